"""Checkpoints survive a kill and a full disk, and refuse what is not one in one line."""

import os
import pickle
import random
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import FORMAT, load, save
from gpusim_rl.run.checkpoint import Checkpoints, structural_difference

PAYLOAD = {
    "policy": {"w": torch.arange(6.0).reshape(2, 3)},
    "rng": torch.get_rng_state(),
    "iteration": 7,
    "best_return": None,
    "config": {"hidden": [32, 32], "activation": "elu", "rate": 1e-3, "separate": False},
}


@contextmanager
def disk_full_after(size: int):
    """No file can grow beyond `size` bytes: writing raises OSError, as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_round_trip_is_exact(tmp_path):
    save(tmp_path / "last.pt", PAYLOAD)
    loaded = load(tmp_path / "last.pt")
    assert loaded["format"] == FORMAT and loaded["gpusim_rl"]
    assert torch.equal(loaded["policy"]["w"], PAYLOAD["policy"]["w"])
    assert torch.equal(loaded["rng"], PAYLOAD["rng"])
    assert {key: loaded[key] for key in ("iteration", "best_return", "config")} == {
        key: PAYLOAD[key] for key in ("iteration", "best_return", "config")
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize(
    "value",
    [
        *(torch.nn.Parameter(torch.zeros(1)), torch.float32, torch.device("cpu"), torch.Size([2])),
        *((1, 2.0), {"a"}, b"a", 1j, True, torch.nn.Linear(1, 1).state_dict()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_be_saved_can_be_read(tmp_path, value):
    save(tmp_path / "last.pt", {"value": [value]})
    assert load(tmp_path / "last.pt")["value"] == [value]


@pytest.mark.parametrize(
    ("value", "at"), [({"w": Path()}, "w"), ({"a": [0, (Path(),)]}, "a/1/0"), ({Path("b"): 1}, "a key of /")]
)
def test_what_cannot_be_read_again_is_not_saved(tmp_path, value, at):
    save(tmp_path / "last.pt", PAYLOAD)
    with pytest.raises(ConfigError, match=rf"^the state to save has a pathlib\.PosixPath at {at}; a checkpoint holds"):
        save(tmp_path / "last.pt", value)
    assert load(tmp_path / "last.pt")["iteration"] == 7


KILL_LOOP = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.run.checkpoint import Checkpoints
folder = Path(sys.argv[1])
checkpoints, random = Checkpoints(folder, 3), random.Random(0)
checkpoints.save_last({"iteration": 0, "weights": torch.full((1_000_000,), 0.0)})
seen = set()
for _ in range(25):
    child = os.fork()
    if child == 0:
        iteration = load(checkpoints.last)["iteration"]
        while True:
            iteration += 1
            weights = torch.full((1_000_000,), float(iteration))
            checkpoints.save_last({"iteration": iteration, "weights": weights})
            checkpoints.save_best()
            checkpoints.save_numbered(iteration)
    time.sleep(random.uniform(0.02, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for file in folder.glob("*.pt"):
        loaded = load(file)
        assert (loaded["weights"] == loaded["iteration"]).all(), file
    seen.add(load(checkpoints.last)["iteration"])
checkpoints.save_last({"iteration": -1})
checkpoints.save_best()
assert load(checkpoints.best)["iteration"] == -1
print(len(seen), sorted(file.name for file in folder.glob(".*.tmp")))
"""


@pytest.mark.slow
def test_kill_9_while_saving_never_damages_a_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILL_LOOP, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 5, "the children saved nothing between the kills"
    assert "last.pt.tmp" not in done.stdout and "best.pt.tmp" not in done.stdout


def test_full_disk_raises_and_leaves_the_old_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save_last(PAYLOAD)
    checkpoints.save_best()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    big = {"weights": torch.rand(1_000_000)}
    with disk_full_after(100_000), pytest.raises(OSError):
        checkpoints.save_last(big)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    checkpoints.save_last(big)
    assert torch.equal(load(checkpoints.last)["weights"], big["weights"])


def test_one_serialisation_serves_last_best_and_numbered(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    last = checkpoints.save_last(PAYLOAD)
    names = [last, checkpoints.save_best(), checkpoints.save_numbered(50)]
    assert [path.name for path in names] == ["last.pt", "best.pt", "000050.pt"]
    assert len({path.read_bytes() for path in names}) == 1
    checkpoints.save_last({**PAYLOAD, "iteration": 51})
    assert load(checkpoints.last)["iteration"] == 51
    assert load(checkpoints.best)["iteration"] == load(tmp_path / "000050.pt")["iteration"] == 7
    assert not list(tmp_path.glob("*.tmp"))


def test_a_checkpoint_that_is_damaged_takes_no_other_with_it(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    last = checkpoints.save_last(PAYLOAD)
    copies = [checkpoints.save_best(), checkpoints.save_numbered(50)]
    with last.open("r+b") as file:  # in place, as a disk does it
        file.seek(1000)
        file.write(bytes(byte ^ 1 for byte in file.read(1)) * 2)
    with pytest.raises(ConfigError, match="the SHA-256 of its content"):
        load(last)
    assert [load(copy)["iteration"] for copy in copies] == [7, 7]


def test_only_own_old_numbered_files_are_deleted(tmp_path):
    for name in ("mine.pt", "50.pt", "000010.pt.bak", "000999.pt", "notes.txt"):
        (tmp_path / name).write_text("user's")
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save_last(PAYLOAD)
    for iteration in (50, 100, 150, 200):
        checkpoints.save_numbered(iteration)
    kept = {file.name for file in tmp_path.iterdir()}
    expected = {"mine.pt", "50.pt", "000010.pt.bak", "notes.txt", "last.pt"}
    assert kept == expected | {"000150.pt", "000200.pt", "000999.pt"}


def test_keep_0_keeps_all(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=0)
    checkpoints.save_last(PAYLOAD)
    for iteration in range(1, 8):
        checkpoints.save_numbered(iteration)
    assert len(list(tmp_path.glob("0*.pt"))) == 7


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
    (tmp_path / "good.pt").unlink()
    return [*sorted(tmp_path.glob("*.pt")), tmp_path / "missing.pt", Path("/proc/self/mem")]  # the last has no end


def test_foreign_damaged_and_missing_files_are_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in foreign_files(tmp_path):
        with pytest.raises(ConfigError) as error:
            load(path)
        assert path.name in str(error.value)
        assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("version", [1, 99])
def test_another_format_names_the_version_that_wrote_it(tmp_path, version):
    torch.save({"gpusim_rl": "9.8.7", "format": version}, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match=rf"format {version} of gpusim_rl 9\.8\.7; .* reads format {FORMAT}"):
        load(tmp_path / "other.pt")


def test_no_flipped_bit_and_no_cut_is_loaded(tmp_path):
    save(tmp_path / "last.pt", PAYLOAD)
    whole, chance = (tmp_path / "last.pt").read_bytes(), random.Random(0)
    damaged = []
    for _ in range(200):
        content = bytearray(whole)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        damaged += [bytes(content), whole[: chance.randrange(len(whole))], whole + b"x" * chance.randrange(1, 9)]
    for content in damaged:
        (tmp_path / "last.pt").write_bytes(content)
        with pytest.raises(ConfigError) as info:
            load(tmp_path / "last.pt")
        assert "\n" not in str(info.value)


def test_a_damaged_checkpoint_names_the_newest_good_one(tmp_path):
    for name in ("000001.pt", "000002.pt", "000003.pt", "last.pt"):
        save(tmp_path / name, PAYLOAD)
        os.utime(tmp_path / name, ns=(0, int(name == "000002.pt")))
    for name in ("000003.pt", "last.pt"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-100])
    with pytest.raises(ConfigError, match=rf"newest good checkpoint there is 000002\.pt: try checkpoint={tmp_path}/0"):
        load(tmp_path / "last.pt")
    for file in tmp_path.iterdir():
        file.write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"not the one in it\)$"):
        load(tmp_path / "last.pt")


def test_torch_reads_a_checkpoint_too(tmp_path):
    save(tmp_path / "last.pt", PAYLOAD)
    assert torch.load(tmp_path / "last.pt", weights_only=True)["iteration"] == 7


def test_a_tensor_that_could_not_be_read_again_is_not_saved(tmp_path):
    with pytest.raises(ConfigError, match=r"a tensor of torch\.uint16 at w\. Try torch\.int32"):
        save(tmp_path / "last.pt", {"w": torch.zeros(1, dtype=torch.uint16)})


def test_structural_difference_names_each_key_that_differs():
    saved = {"num_envs": 64, "ppo": {"horizon": 16, "network": {"hidden": [64], "rnn": None}}}
    now = {"num_envs": 32, "ppo": {"horizon": 16, "network": {"hidden": [64, 64], "size": 3}}}
    keys = ("num_envs", "ppo.horizon", "ppo.network", "ppo.missing")
    assert structural_difference(saved, now, keys) == [
        "num_envs: saved 64, now 32",
        "ppo.network.hidden: saved [64], now [64, 64]",
        "ppo.network.size: saved None, now 3",
    ]
    assert structural_difference(saved, saved, keys) == []
