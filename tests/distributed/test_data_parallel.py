"""Data-parallel training: equality with one process, restarts, failures and console output."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[reportPrivateImportUsage]

from gpusim_rl.api import prepare
from gpusim_rl.diagnose.rules import diagnose
from gpusim_rl.diagnose.run_stats import read_run_stats
from gpusim_rl.distributed import actors, data_parallel
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load, save
from gpusim_rl.learn.collective import Collective
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.run.log_interval import LogIntervals
from helpers import data_parallel_process
from helpers.commands import ROOT, Finished, run_command
from helpers.raised import raises
from helpers.training import differences, read_csv
from reliability.processes import process_of_rank

SMALL = ("task=Cartpole", "multi_gpu=true", "device=cpu", "num_envs=16", "log.console=plain")
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SAC = ("algo=sac", "sac.learning_starts=64", "sac.batch_size=32", "sac.replay.capacity=2000")


def command_of(script: Path = ROOT / "train.py", processes: int = 2, restarts: int = 0) -> list[str]:
    count = f"--nproc-per-node={processes}"
    return ["-m", "torch.distributed.run", "--standalone", count, f"--max-restarts={restarts}", str(script)]


def torchrun(folder: Path, *arguments: str, check: bool = True, **options: Any) -> Finished:
    """Run `torchrun ... train.py` as a user would."""
    return run_command(sys.executable, *command_of(**options), *arguments, cwd=folder, env=ENV, check=check)


def last(folder: Path) -> dict:
    """Load the last checkpoint of the only run."""
    [run] = (folder / "runs" / "Cartpole").glob("2*")
    return load(run / "checkpoints" / "last.pt")


@pytest.mark.parametrize(
    ("name", "minibatches"),
    [("ppo", 4), *(pytest.param(*it, marks=pytest.mark.slow) for it in (("sac", 1), ("amp", 4), ("bc", 1)))],
)
def test_two_processes_learn_same_as_one_with_all_envs(tmp_path, monkeypatch, name, minibatches):
    monkeypatch.setattr(torch, "randperm", data_parallel_process.identity)
    alone = data_parallel_process.record(name, tmp_path, 2, minibatches)
    script = ROOT / "tests" / "helpers" / "data_parallel_process.py"
    command = [sys.executable, str(script), "1", "2", str(tmp_path), name, str(minibatches)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    other = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    data_parallel_process.learn(0, 2, tmp_path, name, minibatches)
    assert other.wait(timeout=100) == 0
    first, second = (torch.load(tmp_path / f"policy-{rank}.pt") for rank in range(2))
    assert differences(first, second) == []  # bit for bit
    before = data_parallel_process.learned(data_parallel_process.make_learner(name, 16, minibatches))
    for key, value in data_parallel_process.learned(alone).items():
        torch.testing.assert_close(first[key], value, rtol=1e-6, atol=1e-6)
    assert any(not torch.equal(before[key], value) for key, value in first.items())


@pytest.mark.slow
def test_doctor_reads_run_of_two_processes(tmp_path):
    torchrun(tmp_path, *SMALL[:3], "num_envs=64", "max_iterations=12", "log.console=quiet")
    [run] = (tmp_path / "runs" / "Cartpole").glob("2*")
    stats = read_run_stats(run)
    assert (stats.processes, stats.local_processes, stats.all_envs) == (2, 2, 128)
    assert stats.cpus == max(1, available_cpus() // 2)
    rows = read_csv(run, machine=True)
    shares = [float(row["time/sums"]) for row in rows]
    assert stats.sums is not None and all(0.0 < share < 1.0 for share in shares)
    assert stats.sums < stats.update + stats.log + 0.05  # sums run only there
    step_s = (stats.simulate + stats.policy) * 2 * 64 / stats.env_steps_per_s
    assert stats.step_s == pytest.approx(step_s)
    found = {finding.rule for finding in diagnose(stats)}
    assert ("sums_bound" in found) == (stats.sums >= 0.2)
    assert not found & {"unused_cpus", "simulation_bound", "ram", "transfer_bound"}
    if "sums_bound" in found:  # sums explain the update time
        assert "logging_bound" not in found and ("update_bound" not in found or stats.update - stats.sums >= 0.5)


@pytest.mark.slow
def test_learners_of_all_processes_stay_bit_identical(tmp_path):
    done = torchrun(tmp_path, *SMALL, "max_iterations=50", "ppo.horizon=8")
    assert "2 processes x 16 envs" in done.stdout and done.stdout.count("iteration 50/50") == 1
    state = last(tmp_path)
    first, second = state["processes"][0], state["processes"][1]
    for key in ("optimizer", "learning_rate", "iteration", "skipped"):
        assert differences(first["algorithm"][key], second["algorithm"][key]) == [], key
    assert first["algorithm"]["learning_rate"] != state["config"]["ppo"]["learning_rate"]  # was adapted
    assert differences(first["env"], second["env"]) != []
    rows = read_csv(tmp_path / "runs" / "Cartpole" / "latest")
    assert [int(float(row["env_steps"])) for row in rows] == [2 * 16 * 8 * number for number in range(1, 51)]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [("ppo.horizon=8",), SAC])
def test_resume_with_two_processes_equals_uninterrupted_run(tmp_path, algorithm):
    for name, lengths in (("whole", (8,)), ("resumed", (4, 8))):
        folder = tmp_path / name
        folder.mkdir()
        for length in lengths:
            more = [] if length == lengths[0] else ["checkpoint=Cartpole"]
            torchrun(folder, *SMALL, *algorithm, f"max_iterations={length}", *more)
    whole, resumed = last(tmp_path / "whole"), last(tmp_path / "resumed")
    for key in ("policy", "processes", "iteration", "env_steps"):
        assert differences(whole[key], resumed[key]) == [], key


class SecondOfTwo(Collective):
    rank, size = 1, 2


@pytest.mark.parametrize("processes", [2, 3])
def test_restore_gives_each_process_its_noise_and_replay_memory(tmp_path, processes):
    settings = {"learning_starts": 64, "batch_size": 32, "replay": {"capacity": 2000}}
    cfg: dict[str, Any] = {"num_envs": 16, "device": "cpu", "multi_gpu": True, "sac": settings}
    trainer = actors.make_trainer(prepare("Cartpole", algo="sac", **cfg), SecondOfTwo())
    own = trainer.algorithm.state_dict()
    trainer.collector.collect()
    first = trainer.algorithm.state_dict()
    others = {rank: {"algorithm": first} for rank in range(processes)}
    save(tmp_path / "last.pt", {**trainer.state_dict(), "processes": others | {1: {"algorithm": own}}})
    checkpoints, console = SimpleNamespace(saved=0, last=tmp_path / "last.pt"), SimpleNamespace(warn=str)
    log: Any = SimpleNamespace(checkpoints=checkpoints, console=console)
    trainer._restore_learner(log, SimpleNamespace(iterations=[1]))  # type: ignore[arg-type]
    now = trainer.algorithm.state_dict()
    trainer.close()
    assert not torch.equal(now["act_generator"], first["act_generator"])
    assert torch.equal(now["act_generator"], own["act_generator"]) == (processes == 2)
    assert differences(now["replay"], own["replay"]) == [] != differences(now["replay"], first["replay"])


@pytest.mark.slow
def test_torchrun_with_one_process_equals_plain_training(tmp_path):
    for name in ("torchrun", "alone"):
        (tmp_path / name).mkdir()
    arguments = [*SMALL, "max_iterations=4"]
    torchrun(tmp_path / "torchrun", *arguments, processes=1)
    run_command(sys.executable, ROOT / "train.py", *arguments, "multi_gpu=false", cwd=tmp_path / "alone")
    one, alone = last(tmp_path / "torchrun"), last(tmp_path / "alone")
    for key in ("policy", "algorithm", "env"):
        assert differences(one[key], alone[key]) == [], key


@pytest.mark.slow
def test_resume_with_other_process_count_restarts_episodes(tmp_path):
    torchrun(tmp_path, *SMALL, "max_iterations=3")
    done = run_command(
        sys.executable, ROOT / "train.py", "checkpoint=Cartpole", "multi_gpu=false", "max_iterations=5", cwd=tmp_path
    )
    assert "2 processes before" in done.stderr + done.stdout
    state = last(tmp_path)
    assert state["iteration"] == 5 and "processes" not in state
    assert state["env_steps"] == 2 * 16 * 16 * 3 + 16 * 16 * 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_torchrun_restarts_run_after_losing_process(tmp_path):
    settings = [*SMALL, "max_iterations=150", "log.checkpoint_interval=10", "ppo.horizon=32"]
    command = [sys.executable, *command_of(restarts=2), *settings]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **ENV}, stdout=log, stderr=log)
        killed = False
        while run.poll() is None:
            time.sleep(0.1)
            if not killed and list(tmp_path.glob("runs/Cartpole/2*/checkpoints/000010.pt")):
                process_of_rank(1, psutil.Process(run.pid).children(recursive=True)).send_signal(signal.SIGKILL)
                killed = True
    output = (tmp_path / "log").read_text()
    assert killed and run.returncode == 0, output[-3000:]
    assert "resumed" in output
    [folder] = (tmp_path / "runs" / "Cartpole").glob("2*")
    rows = read_csv(folder)
    assert [int(float(row["iteration"])) for row in rows] == list(range(1, 151))
    assert last(tmp_path)["iteration"] == 150


def spec_of(*, test: bool = False, multi_gpu: bool = True, algo: str = "ppo", **settings):
    return prepare("Cartpole", algo=algo, multi_gpu=multi_gpu, num_envs=4, **settings)


def under_torchrun(monkeypatch, size: int) -> None:
    names = {"TORCHELASTIC_RUN_ID": "x", "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))


def test_settings_that_conflict_with_torchrun_are_rejected(monkeypatch):
    with raises(ConfigError, key="multi_gpu=true"):
        data_parallel.joined(spec_of()).__enter__()
    under_torchrun(monkeypatch, 2)
    with raises(ConfigError, key="multi_gpu=false", hint="Try multi_gpu=true"):
        data_parallel.joined(spec_of(multi_gpu=False)).__enter__()
    under_torchrun(monkeypatch, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"4 processes .*2 GPUs.*--nproc-per-node=2"):
        data_parallel.joined(spec_of()).__enter__()
    with raises(ConfigError, key="device=cuda:1"):
        data_parallel._choose_gpu(spec_of(device="cuda:1").cfg)


def test_restarted_process_continues_started_run(monkeypatch, tmp_path):
    store = data_parallel.TCPStore("localhost", 0, is_master=True)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    typed = ["task=Ant", "checkpoint=old", "multi_gpu=true"]
    assert data_parallel.continued(typed) == typed  # first start
    store.set(data_parallel.RUN_DIR, str(tmp_path))
    assert data_parallel.continued(typed) == typed, "no checkpoint yet"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").touch()
    assert data_parallel.continued(typed) == ["task=Ant", "multi_gpu=true", f"checkpoint={tmp_path}"]
    assert data_parallel.continued(["-m", *typed]) == ["-m", *typed]
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert data_parallel.continued(typed) == typed


def test_processes_agree_on_start_despite_stale_keys():
    store = HashStore()
    words = []
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            first = pool.submit(data_parallel._agree, store, 0, 3)
            others = []
            for rank in (2, 1):
                time.sleep(0.2)  # keys from before the restart are still set
                others.append(pool.submit(data_parallel._agree, store, rank, 3))
            [word] = {one.result() for one in (first, *others)}
            words.append(word)
    assert words[0] != words[1]
    assert data_parallel._agree(store, 0, 1) not in words


@pytest.mark.slow
def test_sweep_trains_runs_sequentially(tmp_path):
    torchrun(tmp_path, *SMALL, "max_iterations=2", "-m", "seed=1,2")
    assert len(list(tmp_path.glob("runs/Cartpole/2*/checkpoints/last.pt"))) == 2


@pytest.mark.slow
def test_different_settings_per_process_are_rejected(tmp_path):
    script = tmp_path / "start.py"
    script.write_text(
        "import os, subprocess, sys\n"
        f"envs = 16 + int(os.environ['RANK'])\n"
        f"sys.exit(subprocess.call([sys.executable, r'{ROOT / 'train.py'}', *sys.argv[1:], f'num_envs={{envs}}']))\n"
    )
    done = torchrun(tmp_path, *SMALL[:3], script=script, check=False)
    assert done.returncode != 0
    assert "different settings: num_envs: process 0 has 16, process 1 has 17" in done.stderr


NAN_IN_ONE = """
import os, runpy, sys
sys.path.insert(0, {root!r})
from gpusim_rl.tasks.cartpole import Cartpole
rewards, calls = Cartpole.rewards, iter(range(10**9))
if os.environ["RANK"] == "1":
    Cartpole.rewards = lambda task: {{
        name: term * (float("nan") if next(calls) == 170 else 1.0) for name, term in rewards(task).items()
    }}
runpy.run_path({train!r}, run_name="__main__")
"""


def test_flags_of_unfinished_interval_are_reduced_on_host():
    class OnGpus(Collective):
        size = 2

        def sum(self, tensors: Any) -> Any:
            raise RuntimeError("No backend type associated with device type cpu")  # as NCCL raises

        def any(self, *flags: bool) -> tuple[bool, ...]:
            return flags  # the other process is fine

    metrics = SimpleNamespace(flags=lambda: {"check/obs": 3.0, "check/reward": math.nan})
    row = LogIntervals(SimpleNamespace(metrics=metrics, timer=None), OnGpus()).pending(6)  # type: ignore[arg-type]
    assert row.flags["check/obs"] == 3.0 and math.isnan(row.flags["check/reward"] or 0.0)
    assert row.processes == (0,) and row.iterations == range(1, 7)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nan_in_one_process_ends_all_and_names_it(tmp_path):
    (tmp_path / "start.py").write_text(NAN_IN_ONE.format(root=str(ROOT), train=str(ROOT / "train.py")))
    words = (*SMALL, "max_iterations=40", "ppo.horizon=8", "log.interval=5", "log.checkpoint_interval=2")
    done = torchrun(tmp_path, *words, script=tmp_path / "start.py", check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(lines) == 2, done.stderr
    assert all("reward" in line and "process 1 " in line and "iteration 6;" in line for line in lines), lines
    assert "lost another process" not in done.stderr
    saved = last(tmp_path)
    sums = [value for process in saved["processes"].values() for value in process["metrics"]["sums"].values()]
    assert all(bool(value.isfinite().all()) for value in sums)
