"""Repeated kill -9 of one run."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from gpusim_rl.files.checkpoint_file import load
from helpers.training import differences, merged, read_csv, the_run
from reliability.processes import SMALL, TRAIN, Slot, rows, saved_iteration, temporary_files
from reliability.record import record

KILLS = 100
EVERY = 3  # log.checkpoint_interval of SMALL


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_killed_a_hundred_times_equals_uninterrupted_run(tmp_path: Path, slot: Slot) -> None:
    chance = random.Random(0)
    training = slot.start(TRAIN, *SMALL, "max_iterations=1000000", cwd=tmp_path)
    training.wait_for(lambda: list(tmp_path.glob("runs/Cartpole/*-*/checkpoints/last.pt")))
    run = the_run(tmp_path / "runs")
    lost: list[int] = []
    resumed = cleared = 0
    for number in range(KILLS):
        if number:
            before, left = saved_iteration(run), temporary_files(run)
            training = slot.start(TRAIN, f"checkpoint={run}", "max_iterations=1000000", cwd=tmp_path)
            if number % 2:  # during training
                training.wait_for(lambda before=before: saved_iteration(run) > before)
                assert not {*left} & {*temporary_files(run)}, f"left by kill {number - 1}"
                cleared += len(left)
                time.sleep(chance.uniform(0.0, 0.25))
            else:  # at any time, including start and repair
                time.sleep(chance.uniform(0.0, 1.5))
        training.send(signal.SIGKILL)
        done = training.ended()
        assert done.returncode == -signal.SIGKILL and done.stderr == "", done.stderr
        if number and "resumed  at iteration" in done.stdout:
            assert f"resumed  at iteration {before}\n" in done.stdout
            resumed += 1
        for file in (run / "checkpoints").glob("*.pt"):
            load(file)  # a partial file raises ConfigError
        saved = saved_iteration(run)
        assert rows(run) == list(range(1, len(rows(run)) + 1)), f"kill {number}"
        lost.append(len(rows(run)) - saved)
        assert 0 <= lost[-1] <= EVERY, f"kill {number}"

    assert resumed >= KILLS / 2 and cleared, "kills came too early"
    last = saved + 2
    end = slot.run(TRAIN, f"checkpoint={run}", f"max_iterations={last}", cwd=tmp_path)
    assert end.returncode == 0 and end.stderr == "", end.stderr
    assert f"resumed  at iteration {saved}\n" in end.stdout
    assert temporary_files(run) == []
    assert not (run / "lock").exists()
    assert rows(run) == list(range(1, last + 1))

    whole = tmp_path / "whole"
    whole.mkdir()
    assert slot.run(TRAIN, *SMALL, f"max_iterations={last}", cwd=whole).returncode == 0
    assert read_csv(run) == read_csv(the_run(whole / "runs"))
    assert not differences(state(run), state(the_run(whole / "runs")))
    record(
        "`kill -9` at any moment",
        "SIGKILL at random moments of one run that is resumed each time: half of them while it trains, half of them"
        f" within 1.5 s of its start; a checkpoint every {EVERY} iterations",
        KILLS,
        "always resumed; metrics and weights equal an uninterrupted run's bit for bit",
        f"{sum(lost) / len(lost):.1f} iterations on average, at most {max(lost)}",
    )


def state(run: Path) -> dict[str, object]:
    """Return the state that determines the rest of a run, without paths and times."""
    saved = load(run / "checkpoints" / "last.pt")
    kept = ("policy", "algorithm", "env", "torch_rng", "iteration", "env_steps", "best_return")
    return merged({}, {key: saved[key] for key in kept})
