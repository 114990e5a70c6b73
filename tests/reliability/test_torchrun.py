"""torchrun with a process that is killed before the first checkpoint."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from helpers.commands import ROOT
from reliability.processes import SMALL, TRAIN, process_of_rank, rows, saved_iteration
from reliability.record import record

ITERATIONS = 60


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_process_killed_before_first_checkpoint_is_restarted(tmp_path: Path) -> None:
    count, chance, again = 4, random.Random(0), []
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    words = [*SMALL, "multi_gpu=true", f"max_iterations={ITERATIONS}", "log.checkpoint_interval=1000"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        wanted = chance.randrange(ITERATIONS // 2)
        with (folder / "log").open("w") as log:
            job = subprocess.Popen([*command, str(TRAIN), *words], cwd=folder, env=env, stdout=log, stderr=log)
        while not [run for run in runs_in(folder) if len(rows(run)) >= wanted]:
            assert job.poll() is None, (folder / "log").read_text()
            time.sleep(0.01)
        before = runs_in(folder)
        assert not [*before[0].glob("checkpoints/*.pt")]
        process_of_rank(number % 2, psutil.Process(job.pid).children(recursive=True)).send_signal(signal.SIGKILL)
        killed = time.monotonic()
        while job.poll() is None and (new_run(folder, before) is None):
            time.sleep(0.05)
        again.append(time.monotonic() - killed)
        assert job.wait(120) == 0, (folder / "log").read_text()[-2000:]
        run = new_run(folder, before) or before[0]
        assert rows(run) == list(range(1, ITERATIONS + 1)) and saved_iteration(run) == ITERATIONS
    record(
        "`kill -9` of a torchrun process before a checkpoint",
        f"one of two processes, after 0 to {ITERATIONS // 2} iterations of {ITERATIONS}; torchrun may restart them"
        " twice",
        count,
        f"a new run starts within {max(again):.0f} s",
        "all iterations so far",
    )


def runs_in(folder: Path) -> list[Path]:
    return sorted(run for run in folder.glob("runs/Cartpole/2*") if not run.is_symlink())


def new_run(folder: Path, before: list[Path]) -> Path | None:
    new = [run for run in runs_in(folder) if run not in before and rows(run)]
    return new[-1] if new else None
