"""Tests of a run's checkpoints: serialisation, rotation of numbered files, share of time spent on saving."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.run import checkpoint
from gpusim_rl.run.checkpoint import Checkpoints, structural_difference
from helpers.checkpoints import PAYLOAD


def checkpoints_in(
    folder: Path, *, keep: int = 3, every: int = 50, evaluate: int = 0, iterations: int = 1000, warn: Any = pytest.fail
) -> Checkpoints:
    log, evaluations = SimpleNamespace(keep=keep, checkpoint_interval=every), SimpleNamespace(interval=evaluate)
    cfg: Any = SimpleNamespace(log=log, eval=evaluations, max_iterations=iterations)
    return Checkpoints(cfg, folder, saved=None, best=None, warn=warn)


def test_one_serialisation_serves_last_best_and_numbered(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save({**PAYLOAD, "iteration": 50}, 1.0)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["000050.pt", "best.pt", "last.pt"]
    assert len({path.read_bytes() for path in files}) == 1
    checkpoints.save({**PAYLOAD, "iteration": 51}, 0.5)
    assert [load(path)["iteration"] for path in files] == [50, 50, 51]
    assert not list(tmp_path.glob("*.tmp"))


def test_damaged_checkpoint_leaves_its_copies_intact(tmp_path):
    checkpoints_in(tmp_path).save({**PAYLOAD, "iteration": 50}, 1.0)
    last, copies = tmp_path / "last.pt", [tmp_path / "best.pt", tmp_path / "000050.pt"]
    with last.open("r+b") as file:  # in place, like a failing disk
        file.seek(1000)
        file.write(bytes(byte ^ 1 for byte in file.read(1)) * 2)
    with pytest.raises(ConfigError, match="SHA-256"):
        load(last)
    assert [load(copy)["iteration"] for copy in copies] == [50, 50]


def test_only_old_numbered_checkpoints_of_this_run_are_deleted(tmp_path):
    for name in ("mine.pt", "50.pt", "000010.pt.bak", "000999.pt", "notes.txt"):
        (tmp_path / name).write_text("user's")
    checkpoints = checkpoints_in(tmp_path, keep=2)
    for iteration in (50, 100, 150, 200):
        checkpoints.save({**PAYLOAD, "iteration": iteration}, 1.0)
    kept = {file.name for file in tmp_path.iterdir()}
    expected = {"mine.pt", "50.pt", "000010.pt.bak", "notes.txt", "last.pt", "best.pt"}
    assert kept == expected | {"000150.pt", "000200.pt", "000999.pt"}


def test_keep_0_keeps_all_checkpoints(tmp_path):
    checkpoints = checkpoints_in(tmp_path, keep=0, every=1)
    for iteration in range(1, 8):
        checkpoints.save({**PAYLOAD, "iteration": iteration}, 1.0)
    assert len(list(tmp_path.glob("0*.pt"))) == 7


def test_structural_difference_names_each_differing_key():
    saved = {"num_envs": 64, "ppo": {"horizon": 16, "network": {"hidden": [64], "rnn": None}}}
    now = {"num_envs": 32, "ppo": {"horizon": 16, "network": {"hidden": [64, 64], "size": 3}}}
    keys = ("num_envs", "ppo.horizon", "ppo.network", "ppo.missing")
    assert structural_difference(saved, now, keys) == [
        "num_envs: saved 64, now 32",
        "ppo.network.hidden: saved [64], now [64, 64]",
        "ppo.network.size: saved None, now 3",
    ]
    assert structural_difference(saved, saved, keys) == []


class SlowDisk:
    """Fake clock and disk; writing a checkpoint takes `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now_s, self.seconds, self.written_s, self.fails = 0.0, seconds, 0.0, False
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr(checkpoint, "time", clock)
        monkeypatch.setattr(checkpoint, "save", self.write)
        monkeypatch.setattr(Checkpoints, "_copy_last", lambda self, path: None)

    def write(self, path: Path, state: Any) -> None:
        self.now_s += self.seconds
        self.written_s += self.seconds
        if self.fails:
            raise OSError("the disk is full")


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
@pytest.mark.parametrize("reason", ["time", "numbered", "best", "long", "evaluated"])
@pytest.mark.parametrize("seconds", [0.2, 3.0, 12.0, 30.0])
def test_saving_stays_within_5_percent_of_run_time_on_any_disk(tmp_path, monkeypatch, seconds, reason, fails):
    disk, lines = SlowDisk(monkeypatch, seconds), []
    every, evaluate = (1 if reason == "numbered" else 10**9), reason == "evaluated"
    checkpoints = checkpoints_in(tmp_path, every=every, evaluate=evaluate, iterations=10**9, warn=lines.append)
    disk.fails = fails
    times = []
    for iteration in range(1, 20_001):
        disk.now_s += 0.1
        state = {"iteration": iteration}
        if evaluate and checkpoints.may_evaluate():
            checkpoints.save_evaluated(state)
        mean_return = float(iteration) if reason == "best" else None
        if checkpoints.due(iteration, mean_return, long=reason == "long"):
            times.append(disk.now_s)
            checkpoints.save(state, mean_return)
    allowed_s = 0.05 * disk.now_s + 2.0 * checkpoint.BURST_S + (2 if evaluate else 1) * seconds
    assert 0.0 < disk.written_s <= allowed_s
    lost_s = max(after - before for before, after in zip([0.0, *times], times, strict=False))
    shortest = 0.025 if evaluate else 0.05
    assert len(times) > 1 and lost_s <= 1.0 + max(checkpoint.SAVE_INTERVAL_S, (1 + 1 / shortest) * seconds)
    slowed = [line for line in lines if "to write" in line]
    assert len(slowed) <= 2 and bool(slowed) == (
        reason not in ("time", "best") or seconds > (3.0 if reason == "time" else 1.0)
    )


@pytest.mark.parametrize(
    ("save_all", "every", "iterations", "iteration_s", "save_s", "expected"),
    [
        (False, 1, 3, 1.0, 12.0, [1, 3]),  # the last iteration is always saved
        (True, 2, 1000, 0.1, 12.0, [2, 4, 6, 8]),  # a search copies numbered checkpoints
        (True, 30, 1000, 10.0, 70.0, [7, 30]),  # all others stay within the budget
    ],
)
def test_required_checkpoints_are_saved_at_any_cost(
    tmp_path, monkeypatch, save_all, every, iterations, iteration_s, save_s, expected
):
    if save_all:
        monkeypatch.setenv(checkpoint.SAVE_ALL, "1")
    disk, saved = SlowDisk(monkeypatch, save_s), []
    checkpoints = checkpoints_in(tmp_path, every=every, iterations=iterations, warn=lambda line: None)
    for iteration in range(1, min(iterations, max(8, every)) + 1):
        disk.now_s += iteration_s
        if checkpoints.due(iteration, None):
            saved.append(iteration)
            checkpoints.save({"iteration": iteration}, None)
    assert saved == expected
