"""The checkpoints of a run survive a kill and a full disk, and old ones are deleted by number."""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.run.checkpoint import Checkpoints, structural_difference
from helpers.checkpoints import PAYLOAD


@contextmanager
def disk_full_after(size: int):
    """No file can grow beyond `size` bytes: writing raises OSError, as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


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
