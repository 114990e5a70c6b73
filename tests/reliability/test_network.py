"""Trainings of two processes with a hang, a lost machine, or a lost network link."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from helpers.commands import ROOT
from helpers.training import read_csv
from helpers.two_hosts import ADDRESSES, DEVICE, TwoHosts
from reliability.processes import process_of_rank
from reliability.record import record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
ENDS_WITHIN_S = 90.0
TRAINING = (
    "task=Cartpole",
    "multi_gpu=true",
    "device=cpu",
    "num_envs=16",
    "log.console=plain",
    "log.checkpoint_interval=20",
)
STATIC = "`--node-rank` and `--max-restarts=0`"


def variables() -> dict[str, str]:
    """Return environment variables of training processes."""
    one_core = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE, "NO_COLOR": "1", "WANDB_MODE": "offline"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **one_core}


def iterations(folder: Path) -> int:
    """Count the rows of the only run's metrics.csv."""
    return sum(len(file.read_text().splitlines()) - 1 for file in folder.glob("runs/Cartpole/2*/metrics.csv"))


def until(holds: Callable[[], bool], within_s: float) -> float:
    """Return the time until the condition holds [s]; fail after `within_s`."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, f"not after {within_s} s"
        time.sleep(0.1)
    return time.monotonic() - began


def trains(folder: Path) -> None:
    """Wait until a training is past its first checkpoints."""
    until(lambda: bool(list(folder.glob("runs/Cartpole/2*/checkpoints/000020.pt"))), 120)
    time.sleep(2)


def lines(*logs: Path) -> list[str]:
    """Return the error lines about lost processes."""
    return re.findall(r"^error: .*lost_after_s.*$", "\n".join(log.read_text() for log in logs), re.MULTILINE)


def test_hung_process_is_named_and_torchrun_restarts_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = [*command, str(ROOT / "train.py"), *TRAINING, "max_iterations=400"]
    log = tmp_path / "log"
    with log.open("w") as printed:
        environment = variables() | {"GLOO_SOCKET_IFNAME": "lo"}
        run = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=printed, stderr=printed)
        try:
            trains(tmp_path)
            hung = process_of_rank(1, psutil.Process(run.pid).children(recursive=True))
            hung.send_signal(signal.SIGSTOP)
            named_s = until(lambda: bool(lines(log)), ENDS_WITHIN_S)
            again_s = named_s + until(lambda: "\nresumed " in log.read_text(), 120)
            assert run.wait(200) == 0, log.read_text()[-3000:]
        finally:
            for child in psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []:
                child.kill()
            run.kill()
    [line] = lines(log)
    assert re.match(rf"error: process 1 of 2 \(pid {hung.pid} on \S+\) .* 45 s", line)
    [folder] = (tmp_path / "runs" / "Cartpole").glob("2*")
    assert [int(float(row["iteration"])) for row in read_csv(folder)] == list(range(1, 401))
    record(
        "Hung process of torchrun",
        "SIGSTOP, on one machine, `--max-restarts=1`, `lost_after_s=45`",
        1,
        f"named and killed after {named_s:.0f} s; resumed after {again_s:.0f} s",
        "since the last checkpoint",
    )


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    """Set up two hosts connected by a switch."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(TwoHosts())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs `ip netns` and root: {error}")
        yield made


class Job:
    """Training with one process per host."""

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self.logs = [folder / f"log{number}" for number in range(2)]
        self.torchruns = []
        for number, log in enumerate(self.logs):
            where = ["--nnodes=2", f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}", "--master-port=29400"]
            command = [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node=1", "--max-restarts=0"]
            words = [*command, str(ROOT / "train.py"), *TRAINING, "max_iterations=100000"]
            with log.open("w") as printed:
                self.torchruns.append(hosts.start(number, words, cwd=folder, env=variables(), log=printed))
        trains(folder)

    def end_s(self, *numbers: int) -> float:
        """Return the time until torchrun has failed on these hosts [s]."""
        time_s = until(lambda: all(self.torchruns[number].poll() is not None for number in numbers), ENDS_WITHIN_S)
        assert all(self.torchruns[number].returncode == 1 for number in numbers)
        return time_s


def test_network_cut_of_10_s_ends_nothing(tmp_path: Path, hosts: TwoHosts) -> None:
    job = Job(hosts, tmp_path)
    hosts.cut()
    time.sleep(1)
    before = iterations(tmp_path)
    time.sleep(9)
    assert iterations(tmp_path) <= before + 1
    hosts.mend()
    again_s = 10 + until(lambda: iterations(tmp_path) > before + 20, 60)
    assert not any(torchrun.poll() for torchrun in job.torchruns) and lines(*job.logs) == []
    record(
        "Two machines: link cut for 10 s",
        f"two network namespaces, a switch that forwards nothing; torchrun with {STATIC}",
        1,
        f"training waits and continues {again_s:.0f} s after the cut",
        "nothing",
    )


def test_permanent_network_cut_ends_both_processes(tmp_path: Path, hosts: TwoHosts) -> None:
    job = Job(hosts, tmp_path)
    hosts.cut()
    time_s = job.end_s(0, 1)
    first, second = lines(*job.logs)
    assert f"process 1 (pid {_pid(job.logs[0])} on host1)" in first and ADDRESSES[0] in second
    record(
        "Two machines: link cut",
        f"two network namespaces, a switch that forwards nothing; torchrun with {STATIC}, `lost_after_s=45`;"
        f" ended after {time_s:.0f} s",
        1,
        "both end and name the other",
        "since the last checkpoint",
    )


def _pid(log: Path) -> int:
    [found] = re.findall(r"process 1 \(pid (\d+) on", log.read_text())
    return int(found)


@pytest.mark.parametrize("lost", [0, 1])
def test_power_loss_of_one_machine_ends_the_other(tmp_path: Path, hosts: TwoHosts, lost: int) -> None:
    job = Job(hosts, tmp_path)
    hosts.lose_power(lost)
    time_s = job.end_s(1 - lost)
    [line] = lines(job.logs[1 - lost])
    assert line.startswith(f"error: no response from {ADDRESSES[0]}" if lost == 0 else "error: no heartbeat")
    which = "first" if lost == 0 else "second"
    record(
        f"Two machines: {which} loses power",
        f"kill -9 of all its processes, and its network namespace deleted before a packet leaves it; torchrun with"
        f" {STATIC}, `lost_after_s=45`; ended after {time_s:.0f} s",
        1,
        "the other ends and names it",
        "since the last checkpoint",
    )


def test_hung_process_on_other_machine_ends_both(tmp_path: Path, hosts: TwoHosts) -> None:
    job = Job(hosts, tmp_path)
    process_of_rank(0, map(psutil.Process, hosts.processes(0))).send_signal(signal.SIGSTOP)
    time_s = job.end_s(0, 1)
    [line] = lines(*job.logs)
    assert line.startswith("error: process 0 of 2 ") and "on host0" in line
    record(
        "Two machines: hung process",
        f"SIGSTOP; torchrun with {STATIC}, `lost_after_s=45`; ended after {time_s:.0f} s",
        1,
        "named and killed; both end",
        "since the last checkpoint",
    )
