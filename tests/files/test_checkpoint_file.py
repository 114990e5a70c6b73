"""Tests of checkpoint files: round trips, and errors for damaged or foreign files."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import pickle
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import checkpoint_file
from gpusim_rl.files.checkpoint_file import FORMAT, load, save
from helpers.checkpoints import PAYLOAD, sealed
from helpers.raised import raises


def test_checkpoint_round_trip_is_exact(tmp_path):
    save(tmp_path / "last.pt", PAYLOAD)
    loaded = load(tmp_path / "last.pt")
    assert loaded["format"] == FORMAT and loaded["gpusim_rl"]
    assert torch.load(tmp_path / "last.pt", weights_only=True)["iteration"] == loaded["iteration"]
    assert torch.equal(loaded["policy"]["w"], PAYLOAD["policy"]["w"])
    assert torch.equal(loaded["rng"], PAYLOAD["rng"])
    assert all(loaded[key] == PAYLOAD[key] for key in ("iteration", "best_return", "config"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize(
    "value",
    [
        *(torch.nn.Parameter(torch.zeros(1)), torch.float32, torch.device("cpu"), torch.Size([2])),
        *((1, 2.0), {"a"}, b"a", 1j, True, torch.nn.Linear(1, 1).state_dict()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_supported_values_round_trip(tmp_path, value):
    save(tmp_path / "last.pt", {"value": [value]})
    assert load(tmp_path / "last.pt")["value"] == [value]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"w": Path()}, r"pathlib\.PosixPath at w\."),
        ({"a": [0, (Path(),)]}, r"pathlib\.PosixPath at a/1/0\."),
        ({Path("b"): 1}, r"pathlib\.PosixPath .*key of /\."),
        ({"w": torch.zeros(1, dtype=torch.uint16)}, r"torch\.uint16 at w\. Try torch\.int32"),
    ],
)
def test_unsupported_values_are_not_saved(tmp_path, value, words):
    save(tmp_path / "last.pt", PAYLOAD)
    with pytest.raises(ConfigError, match=words):
        save(tmp_path / "last.pt", value)
    assert load(tmp_path / "last.pt")["iteration"] == 7


class Malicious:
    def __reduce__(self):
        return os.system, ("touch executed",)


def foreign_files(tmp_path: Path):
    save(tmp_path / "good.pt", PAYLOAD)
    good = (tmp_path / "good.pt").read_bytes()
    torch.save({"model": torch.zeros(3)}, tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"gpusim_rl": "x", "format": "1"}, tmp_path / "odd.pt")
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Malicious()))
    torch.save({"gpusim_rl": "x", "format": 1, "x": Malicious()}, tmp_path / "evil.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("iteration,return\n1,2\n")
    (tmp_path / "noise.pt").write_bytes(os.urandom(5000))
    (tmp_path / "folder.pt").mkdir()
    for cut in range(1, len(good), len(good) // 12):
        (tmp_path / f"cut{cut}.pt").write_bytes(good[:cut])
    (tmp_path / "longer.pt").write_bytes(good + b"x")
    (tmp_path / "flipped.pt").write_bytes(bytes([*good[:999], good[999] ^ 1, *good[1000:]]))
    (tmp_path / "good.pt").unlink()
    return [*sorted(tmp_path.glob("*.pt")), tmp_path / "missing.pt", Path("/proc/self/mem")]  # the last is endless


def test_invalid_checkpoint_files_are_rejected_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in foreign_files(tmp_path):
        with pytest.raises(ConfigError) as error:
            load(path)
        assert path.name in str(error.value)
        assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("version", [1, 99])
def test_other_format_shows_the_version_that_wrote_it(tmp_path, version):
    archive = io.BytesIO()
    torch.save({"gpusim_rl": "9.8.7", "format": version}, archive)
    sealed(tmp_path / "other.pt", archive.getvalue())
    with raises(ConfigError, problem=f"written in format {version} by gpusim_rl 9.8.7"):
        load(tmp_path / "other.pt")


def test_damaged_checkpoint_names_newest_good_one(tmp_path):
    for name in ("000001.pt", "000002.pt", "000003.pt", "last.pt"):
        save(tmp_path / name, PAYLOAD)
        os.utime(tmp_path / name, ns=(0, int(name == "000001.pt")))
    for name in ("000003.pt", "last.pt"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"000002\.pt.*checkpoint={tmp_path}/000002"):
        load(tmp_path / "last.pt")
    for file in tmp_path.iterdir():
        file.write_bytes(b"x")
    with raises(ConfigError, hint=""):
        load(tmp_path / "last.pt")


def test_archive_after_a_pickle_is_rejected(tmp_path: Path) -> None:
    """torch reads the start of such a file, zipfile its end."""
    archive = io.BytesIO()
    torch.save({"format": FORMAT}, archive)
    sealed(tmp_path / "x.pt", b"\x80\x02cbuiltins\nbytearray\n" + archive.getvalue())
    with pytest.raises(ConfigError, match="not a torch archive"):
        load(tmp_path / "x.pt")


def test_exponentially_nested_key_is_rejected_quickly(tmp_path: Path) -> None:
    doubled = b"".join(b"q%ch%c\x86" % (count, count) for count in range(60))  # x = (x, x)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}K\x01\x85" + doubled + b"K\x01s.")
    sealed(tmp_path / "x.pt", content.getvalue())
    with pytest.raises(ConfigError, match="too many values"):
        load(tmp_path / "x.pt")


def test_file_swapped_during_load_is_never_read(tmp_path: Path, monkeypatch) -> None:
    """Another process overwrites or replaces the file after each check."""
    path, other = tmp_path / "last.pt", tmp_path / "other.pt"
    for swap in (lambda: path.write_bytes(other.read_bytes()), lambda: other.replace(path)):
        for check, call in itertools.product(("_is_intact", "_strange"), (1, 2)):
            save(path, PAYLOAD)
            other.write_bytes(path.read_bytes().replace(b"data.pkl", b"evil.pkl"))
            checked, calls = getattr(checkpoint_file, check), itertools.count(1)

            def then_swapped(*files, checked=checked, swap=swap, calls=calls, call=call):
                result = checked(*files)
                if next(calls) == call:
                    swap()
                return result

            with monkeypatch.context() as patch:
                patch.setattr(checkpoint_file, check, then_swapped)
                with suppress(ConfigError):  # the swap was noticed
                    assert load(path)["iteration"] == PAYLOAD["iteration"]
            with pytest.raises(ConfigError, match="damaged"):
                load(path)


@pytest.mark.parametrize("problem", ["damaged", "not a torch archive"])
def test_sparse_file_takes_no_memory(tmp_path: Path, monkeypatch, problem) -> None:
    size = 1 << 27
    monkeypatch.setattr(checkpoint_file, "_in_memory", io.BytesIO)  # tracemalloc sees BytesIO
    with (tmp_path / "x.pt").open("wb") as file:
        file.truncate(size)
        if problem != "damaged":
            file.seek(0, 2)
            file.write(hashlib.sha256(bytes(size)).hexdigest().encode())
    tracemalloc.start()
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path / "x.pt")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 24


def test_checkpoint_is_read_without_holding_the_gil(tmp_path: Path, monkeypatch) -> None:
    """Reading a BytesIO would hold the GIL, so that heartbeats of this process would stop."""
    save(tmp_path / "x.pt", PAYLOAD)
    read, numbers = torch.load, []
    monkeypatch.setattr(torch, "load", lambda file, **how: (numbers.append(file.fileno()), read(file, **how))[1])
    assert load(tmp_path / "x.pt")["iteration"] == PAYLOAD["iteration"]
    assert len(numbers) == 1
