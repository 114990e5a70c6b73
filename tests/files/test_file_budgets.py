"""Tests of the memory budgets of file readers."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpusim_rl.env import motions
from gpusim_rl.env.clip import load
from gpusim_rl.errors import ConfigError
from gpusim_rl.files import budgets, npz_file
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.files.safe_open import keep_damaged, load_json, load_yaml
from gpusim_rl.run.writers import read_csv

GROWTH = 160 << 20
"""Maximum growth of the process's memory [bytes]."""
LARGE = 256 << 20
READ = r"""
import re, sys
from pathlib import Path
from gpusim_rl.diagnose.run_stats import read_rows
from gpusim_rl.env import clip
from gpusim_rl.files import npz_file, safe_open
from gpusim_rl.learn import demonstrations
from gpusim_rl.run import writers
readers = {"npz": (clip.load, demonstrations.read), "csv": (writers.read_csv, read_rows)}
readers |= {"json": (safe_open.load_json,), "yaml": (safe_open.load_yaml,)}
peak = lambda: int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10
before, grown = peak(), 0
for file in sorted(Path(sys.argv[1]).iterdir()):
    for read in readers[file.suffix[1:]]:
        try:
            read(file)
        except ValueError as error:  # base class of ConfigError
            assert len(str(error).splitlines()) == 1, str(error)
        grown = peak() - before
        assert grown < int(sys.argv[2]), f"{file.name}: {grown >> 20} MB"
print("read", grown >> 20)
"""


def npy(shape: str, kind: str = "<f4", version: bytes = b"\x01\x00", length: int | None = None) -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    size = (len(text) if length is None else length).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + text


def packed(compression: int, content: bytes | None = None, name: str = "fps.npy") -> bytes:
    """Return an archive with one entry; without `content`, an array of many zeros."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression, compresslevel=1) as archive, archive.open(name, "w") as entry:
        if content is None:
            entry.write(npy(f"({LARGE >> 2},)"))
            for _ in range(LARGE >> 20):
                entry.write(bytes(1 << 20))
        else:
            entry.write(content)
    return file.getvalue()


def misdeclared(archive: bytes, size: int) -> bytes:
    """Return the archive with another size of its only entry in both headers."""
    changed = bytearray(archive)
    changed[22:26] = struct.pack("<I", size)
    place = changed.rindex(b"PK\x01\x02")
    changed[place + 24 : place + 28] = struct.pack("<I", size)
    return bytes(changed)


def repeated(archive: bytes, times: int) -> bytes:
    """Return the archive with its only entry listed many times, so that all entries overlap."""
    start, end = archive.rindex(b"PK\x01\x02"), archive.rindex(b"PK\x05\x06")
    tail = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 1, 1, times * (end - start), start, 0)
    return archive[:start] + times * archive[start:end] + tail


def sparse(beginning: bytes, size: int) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        path.write_bytes(beginning)
        os.truncate(path, size)

    return make


V2 = b"\x02\x00"
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


def hostile() -> dict[str, bytes | Callable[[Path], object]]:
    """Return files by name: contents, or a function that writes them."""
    bomb, wide = packed(DEFLATED), b",".join(b"%x" % i for i in range(100_000))
    rows = b"".join(b"%d,%d,1\n" % (i, i) for i in range(1, 300_000))
    return {
        "bzip2.npz": packed(zipfile.ZIP_BZIP2),
        "lzma.npz": packed(zipfile.ZIP_LZMA),
        "deflated.npz": bomb,
        "declared too small.npz": misdeclared(bomb, 4),
        "declared too large.npz": misdeclared(packed(DEFLATED, npy("(1,)") + bytes(4)), 1 << 31),
        "objects.npz": packed(DEFLATED, npy(f"({1 << 40},)", "|O")),
        "a large array.npz": packed(DEFLATED, npy(f"({1 << 40},)")),
        "a product of 0.npz": packed(DEFLATED, npy(f"({1 << 62}, {1 << 62}, 0)")),
        "a large item.npz": packed(DEFLATED, npy("(1,)", f"<U{1 << 28}")),
        "a nested type.npz": packed(DEFLATED, npy("(1,)", f"({1 << 28},)<f8")),
        "negative.npz": packed(DEFLATED, npy("(-1, -4)") + bytes(16)),
        "nested.npz": packed(DEFLATED, npy(f"{'(' * 5000}1{')' * 5000}")),
        "a header of 1 GB.npz": packed(DEFLATED, npy("(1,)", version=V2, length=1 << 30)),
        "a header of 100 MB.npz": packed(DEFLATED, npy("(1,)", version=V2, length=100 << 20) + bytes(100 << 20)),
        "an archive.npz": packed(STORED, bomb, name="inner.npz"),
        "an archive in an array.npz": packed(STORED, bomb),
        "overlapping.npz": repeated(packed(DEFLATED, npy("(262144,)") + bytes(1 << 20)), 5000),
        "many entries.npz": repeated(packed(STORED, b"", name=""), 300_000),
        "holes.npz": sparse(b"PK\x03\x04", budgets.CLIP_BYTES),
        "larger holes.npz": sparse(b"PK\x03\x04", 1 << 40),
        "one line.csv": sparse(b"iteration,env_steps,time/iteration_s\n1,1,1\n", 1 << 30),
        "one header.csv": sparse(b"iteration,", 1 << 30),
        "many columns.csv": b"iteration," + wide + b"\n" + b"1," * 100_000 + b"1\n",
        "holes.csv": sparse(b"", 1 << 40),
        "many rows.csv": b"iteration,env_steps,time/iteration_s\n" + rows,
        "nested.json": b"[" * 500_000,
        "nested objects.json": b'{"a":' * 150_000,
        "an int.json": b'{"a": ' + b"9" * 900_000 + b"}",
        "a float.json": b'{"a": 1e' + b"9" * 900_000 + b"}",
        "holes.json": sparse(b"{", 1 << 40),
        "aliases.yaml": b"a: &a [1,1,1,1,1,1,1,1,1]\n"
        + b"".join(b"%c: &%c [%s]\n" % (i, i, b",".join([b"*%c" % (i - 1)] * 9)) for i in range(98, 116)),
        "nested.yaml": b"[" * 500_000,
        "a number.yaml": b"a: 1" + b":59" * 200_000,
        "holes.yaml": sparse(b"a: ", 1 << 40),
    }


@pytest.mark.slow
def test_hostile_files_take_bounded_memory(tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name, content in hostile().items():
        content(folder / name) if callable(content) else (folder / name).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(folder), str(GROWTH)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("read"), done.stderr[-1000:]


def test_unsupported_npz_compressions_are_rejected(tmp_path: Path) -> None:
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        (tmp_path / "x.npz").write_bytes(packed(compression, npy("(1,)") + bytes(4)))
        with pytest.raises(ConfigError, match="compression"):
            npz_file.load(tmp_path / "x.npz", 1 << 20)


def test_npz_budget_counts_inflated_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(misdeclared(packed(DEFLATED, npy("(500,)") + bytes(2000)), 1 << 31))
    with pytest.raises(ConfigError, match="100 bytes unpacked"):
        npz_file._read((tmp_path / "x.npz").open("rb"), tmp_path / "x.npz", 100, None)


def test_npz_arrays_equal_numpys(tmp_path: Path) -> None:
    arrays = {"f": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "empty": np.zeros((3, 0, 2), np.float32)}
    arrays |= {"text": np.array(["a", "bcd"]), "scalar": np.array(7, ">i2"), "flags": np.array([True, False])}
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **arrays)
        found, _ = npz_file.load(tmp_path / "x.npz", 1 << 20)
        for name, value in arrays.items():
            assert np.array_equal(found[name], value) and found[name].dtype == value.dtype, name
            assert found[name].flags.aligned and found[name].flags.writeable


@pytest.mark.parametrize("fps", [1e-4, 1e-300, 5e-324])
def test_overlong_clip_is_rejected(tmp_path: Path, fps: float) -> None:
    clip = load(assets_dir() / "motions" / "go1_trot.npz")
    arrays = {name: getattr(clip, name) for name in clip.__slots__}
    still = {name: np.tile(value[:1], (2, *[1] * (value.ndim - 1))) for name, value in arrays.items() if "pos" in name}
    still |= {"body_quat_w": np.tile(clip.body_quat_w[:1], (2, 1, 1)), "fps": np.array(fps)}
    still |= {name: np.zeros_like(value[:2]) for name, value in arrays.items() if "vel" in name}
    np.savez(tmp_path / "x.npz", **{**arrays, **still})
    with pytest.raises(ConfigError, match="resampled clip too large"):
        motions.resampled(load(tmp_path / "x.npz"), 50.0)


@pytest.mark.parametrize("fps", [np.nan, np.inf, -50.0, 0.0, 1e9])
def test_invalid_clip_rate_is_rejected(tmp_path: Path, fps: float) -> None:
    clip = load(assets_dir() / "motions" / "go1_trot.npz")
    np.savez(tmp_path / "x.npz", **{name: getattr(clip, name) for name in clip.__slots__ if name != "fps"}, fps=fps)
    with pytest.raises(ConfigError, match="fps"):
        load(tmp_path / "x.npz")


@pytest.mark.parametrize("name", ["x.csv", "x.json", "x.yaml", "x.npz"])
def test_named_pipe_is_rejected_without_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    read = {".csv": read_csv, ".json": load_json, ".yaml": load_yaml, ".npz": lambda path: npz_file.load(path, 1000)}
    with pytest.raises(ConfigError, match="named pipe"):
        read[Path(name).suffix](tmp_path / name)


def test_damaged_file_is_kept_unless_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.csv").write_bytes(content := os.urandom(3 << 20))
    assert keep_damaged(tmp_path / "metrics.csv") == "metrics-damaged.csv"
    assert (tmp_path / "metrics-damaged.csv").read_bytes() == content
    assert keep_damaged(tmp_path / "metrics.csv") == "metrics-damaged-2.csv"
    monkeypatch.setattr(budgets, "COPIED_BYTES", 1000)
    with pytest.raises(ConfigError, match="more than 1000 bytes"):
        keep_damaged(tmp_path / "metrics.csv")


def test_metrics_rows_equal_the_file(tmp_path: Path) -> None:
    text = "iteration,a,b\n1,0.5,\n3,,2\r\n7,1e-3,nan\n9,1"
    (tmp_path / "metrics.csv").write_text(text, newline="")
    content = read_csv(tmp_path / "metrics.csv")
    assert content.damaged is None
    rows = [["1", "0.5", ""], ["3", "", "2"], ["7", "1e-3", "nan"]]
    assert [*content.rows()] == rows and len(content) == 3
    assert [[*read_csv(tmp_path / "metrics.csv", n).rows()] for n in (0, 3, 6)] == [[], rows[:2], rows[:2]]


def test_exported_files_must_be_uncompressed_and_in_the_folder(tmp_path: Path) -> None:
    from gpusim_rl.export.policy import DeployedPolicy

    card = {"observation": {}, "files": {"numpy": "policy.npz", "onnx": "policy.onnx"}}
    (tmp_path / "policy.npz").write_bytes(packed(DEFLATED, npy("(1,)") + bytes(4)))
    for name, word in {"policy.npz": "compressed", "../policy.npz": "folder", "/dev/zero": "folder"}.items():
        card["files"]["numpy"] = name
        (tmp_path / "policy.json").write_text(json.dumps(card))
        with pytest.raises(ValueError, match=word):
            DeployedPolicy(tmp_path, plain=True)
