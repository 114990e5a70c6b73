"""The checkpoints of a run: one serialisation for all of them, and old ones are deleted by number."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.run.checkpoint import Checkpoints, structural_difference
from helpers.checkpoints import PAYLOAD


def checkpoints_in(folder: Path, *, keep: int = 3, every: int = 50) -> Checkpoints:
    log, evaluations = SimpleNamespace(keep=keep, checkpoint_interval=every), SimpleNamespace(interval=0)
    cfg: Any = SimpleNamespace(log=log, eval=evaluations, max_iterations=1000)
    return Checkpoints(cfg, folder, saved=None, best=None, warn=pytest.fail)


def test_one_serialisation_serves_last_best_and_numbered(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save({**PAYLOAD, "iteration": 50}, 1.0)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["000050.pt", "best.pt", "last.pt"]
    assert len({path.read_bytes() for path in files}) == 1
    checkpoints.save({**PAYLOAD, "iteration": 51}, 0.5)
    assert [load(path)["iteration"] for path in files] == [50, 50, 51]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_checkpoint_that_is_damaged_takes_no_other_with_it(tmp_path):
    checkpoints_in(tmp_path).save({**PAYLOAD, "iteration": 50}, 1.0)
    last, copies = tmp_path / "last.pt", [tmp_path / "best.pt", tmp_path / "000050.pt"]
    with last.open("r+b") as file:  # in place, as a disk does it
        file.seek(1000)
        file.write(bytes(byte ^ 1 for byte in file.read(1)) * 2)
    with pytest.raises(ConfigError, match="the SHA-256 of its content"):
        load(last)
    assert [load(copy)["iteration"] for copy in copies] == [50, 50]


def test_only_own_old_numbered_files_are_deleted(tmp_path):
    for name in ("mine.pt", "50.pt", "000010.pt.bak", "000999.pt", "notes.txt"):
        (tmp_path / name).write_text("user's")
    checkpoints = checkpoints_in(tmp_path, keep=2)
    for iteration in (50, 100, 150, 200):
        checkpoints.save({**PAYLOAD, "iteration": iteration}, 1.0)
    kept = {file.name for file in tmp_path.iterdir()}
    expected = {"mine.pt", "50.pt", "000010.pt.bak", "notes.txt", "last.pt", "best.pt"}
    assert kept == expected | {"000150.pt", "000200.pt", "000999.pt"}


def test_keep_0_keeps_all(tmp_path):
    checkpoints = checkpoints_in(tmp_path, keep=0, every=1)
    for iteration in range(1, 8):
        checkpoints.save({**PAYLOAD, "iteration": iteration}, 1.0)
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
