"""Rules of the doctor: each reports on its profiles and is silent on all others."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from gpusim_rl.diagnose.rules import RULES, Finding, conclusion, diagnose
from gpusim_rl.diagnose.run_stats import RunStats, read_run_stats
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.settings.checks import check_settings
from gpusim_rl.settings.compose import compose
from helpers.commands import ROOT
from helpers.training import Faulty, FaultyConfig, make_trainer

CPU = RunStats(
    task="Ant", num_envs=4096, algo="ppo", horizon=16, epochs=4, minibatch_size=32768, physics_hz=120, control_hz=60,
    log_interval=1, checkpoint_interval=50, sim="mujoco", sim_device="cpu", rl_device="cpu", graph_mode="off",
    graph_reason="cpu has no CUDA graphs", cpus=8, machine_cpus=8, physics_threads=8, torch_threads=8,
    memory_limit_gb=32.0, rows=99, warm_up_rows=1, iteration=100, env_steps_per_s=200_000, simulate=0.71, policy=0.08,
    update=0.20, log=0.005, cpu_percent=93.0, memory_gb=1.2, load=8.1, speed_trend=1.0, memory_growth_gb=0.01,
)  # fmt: skip
GPU = replace(
    CPU, sim="mjwarp", sim_device="cuda:0", rl_device="cuda:0", graph_mode="rollout", graph_reason="auto: CUDA device",
    physics_threads=None, gpu_memory_limit_gb=80.0, env_steps_per_s=900_000, simulate=0.0, policy=0.0, rollout=0.75,
    update=0.23, cpu_percent=14.0, load=1.4, gpu_percent=96.0, gpu_memory_gb=9.0,
)  # fmt: skip
GPU_EAGER = replace(GPU, graph_mode="off", graph_reason="as configured", rollout=0.0, simulate=0.6, policy=0.15)
MIXED = replace(
    GPU_EAGER, sim="mujoco", sim_device="cpu", graph_mode="update", graph_reason="physics on cpu", simulate=0.7
)
CHECKED = replace(GPU_EAGER, graph_mode="update", graph_reason="debug.check_task reads every step", check_task=True)
SUMMED = replace(CPU, processes=4, local_processes=2, machine_cpus=16, sums=0.1)  # two processes per machine
SHARED = replace(GPU, processes=8, local_processes=8, machine_cpus=128)
ACTORS = replace(
    CPU, algo="impala", num_envs=64, num_actors=7, actor_engine="process", epochs=None, minibatch_size=None,
    max_policy_lag=8, physics_threads=1, torch_threads=1, simulate=0.0, policy=0.0, actors=0.15, update=0.8,
    actor_wait=0.15, lag_mean=1.6,
)  # fmt: skip
RAY = replace(ACTORS, actor_engine="ray", num_actors=64, load=60.0)
GPU_LEARNER = replace(RAY, rl_device="cuda:0", gpu_percent=20.0, gpu_memory_gb=9.0, gpu_memory_limit_gb=80.0)
FAILED = "the rollout cannot be captured: Ant.count is a Python number that changes; try a tensor"

CASES: dict[str, list[RunStats]] = {
    "contact_buffers": [replace(GPU, overflow=12), replace(GPU, overflow=3, nconmax=32, njmax=128)],
    "diverged_envs": [replace(CPU, diverged=0.004)],
    "gpu_memory": [replace(GPU, gpu_memory_gb=75.0), replace(GPU, num_envs=1, env_steps_per_s=1e5, gpu_memory_gb=75.0)],
    "ram": [replace(CPU, memory_gb=30.0)],
    "memory_leak": [replace(CPU, memory_growth_gb=0.6, memory_gb=1.9)],
    "graph_fallback": [
        replace(GPU_EAGER, graph_reason=FAILED, gpu_percent=20.0),
        replace(GPU, graph_mode="step", graph_reason=FAILED),
        replace(GPU, graph_mode="step", graph_reason=FAILED, gpu_percent=100.0),
        replace(GPU, graph_mode="rollout only", graph_reason="the update cannot be captured: out of memory"),
    ],
    "transfer_bound": [MIXED, replace(MIXED, sim="newton", sim_device="cuda:1")],
    "few_envs": [replace(CPU, num_envs=16, env_steps_per_s=16_000)],
    "oversubscribed": [
        replace(CPU, physics_threads=32),
        replace(CPU, torch_threads=16, load=15.0, cpu_percent=60.0),
        replace(SUMMED, local_processes=16, cpus=1, machine_cpus=8, physics_threads=1, torch_threads=1, load=16.0),
    ],
    "busy_machine": [replace(CPU, load=17.0, cpu_percent=45.0)],
    "unused_cpus": [
        replace(CPU, physics_threads=1, cpu_percent=20.0),
        replace(CPU, num_envs=4, physics_threads=4, env_steps_per_s=1500),
    ],
    "warp_on_cpu": [
        replace(CPU, sim="mjwarp", physics_threads=None, simulate=0.9, policy=0.02, update=0.07),
        replace(ACTORS, sim="mjwarp", physics_threads=None),
    ],
    "simulation_bound": [
        replace(CPU, simulate=0.92, policy=0.03, update=0.04),
        replace(CPU, simulate=0.95, policy=0.02, update=0.02, cpu_percent=12.0),
        replace(CPU, simulate=0.92, policy=0.03, update=0.04, physics_hz=60.0),
    ],
    "update_bound": [
        replace(CPU, simulate=0.30, policy=0.05, update=0.64),
        replace(CPU, simulate=0.30, policy=0.05, update=0.64, epochs=1),
        replace(GPU, rollout=0.3, update=0.68),
        replace(SUMMED, simulate=0.30, policy=0.05, update=0.64),
    ],
    "small_minibatches": [replace(CPU, simulate=0.4, policy=0.05, update=0.54, minibatch_size=512)],
    "logging_bound": [
        replace(CPU, simulate=0.6, policy=0.07, update=0.17, log=0.15),
        replace(GPU, rollout=0.5, update=0.15, log=0.34, gpu_percent=60.0, wandb=True, tensorboard=True),
    ],
    "checkpoint_bound": [replace(CPU, simulate=0.6, policy=0.07, update=0.17, log=0.15, log_peaks=0.14)],
    "sums_bound": [
        replace(SUMMED, simulate=0.2, policy=0.03, update=0.7, sums=0.45),
        replace(SUMMED, num_envs=256, env_steps_per_s=5e4, minibatch_size=1024, simulate=0.3, sums=0.3, log=0.12),
    ],
    "checked_task": [replace(CPU, check_task=True), CHECKED, replace(CHECKED, gpu_percent=20.0)],
    "slowing_down": [replace(CPU, speed_trend=0.6)],
}
EACH = [(rule, stats) for rule, runs in CASES.items() for stats in runs]
IDS = [f"{rule}-{runs.index(stats)}" for rule, runs in CASES.items() for stats in runs]


def first(stats: RunStats) -> Finding:
    return diagnose(stats)[0]


@pytest.mark.parametrize(("rule", "stats"), EACH, ids=IDS)
def test_profile_triggers_only_its_rule(rule, stats):
    [finding] = diagnose(stats)
    assert finding.rule == rule and 0 < finding.cost <= 1
    assert finding.settings or finding.hint
    assert "\n" not in str(finding) and "None" not in str(finding) and "nan" not in str(finding)


def test_suggested_overrides_are_valid():
    settings = [setting.split() for _, stats in EACH for setting in first(stats).settings]
    by_keys = {tuple(word.partition("=")[0] for word in words): words for words in settings}
    for words in by_keys.values():
        check_settings(compose([f"task={CPU.task}", *words]))


def test_every_rule_has_case_and_documentation():
    names = [rule.__name__ for rule in RULES]
    assert names == list(CASES)
    lines = (ROOT / "docs" / "doctor.md").read_text().splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == names


HEALTHY = {
    "cpu": CPU,
    "gpu": GPU,
    "gpu without graphs": GPU_EAGER,
    "processes": SUMMED,
    "processes with GPUs": SHARED,
    "actors": ACTORS,
    "ray": RAY,
    "gpu learner": GPU_LEARNER,
    "simulation of actors on a gpu": replace(GPU_LEARNER, sim="mjwarp", sim_device="cuda:0", physics_threads=None),
    "a few envs for each actor": replace(ACTORS, num_envs=1, env_steps_per_s=7e3),
}


@pytest.mark.parametrize("stats", HEALTHY.values(), ids=HEALTHY)
def test_healthy_run_has_no_findings(stats):
    assert diagnose(stats) == []


def test_host_work_in_parallel_to_busy_gpu_is_free():
    assert diagnose(replace(GPU, log=0.6)) == []
    assert diagnose(replace(GPU, log=0.6, log_peaks=0.5)) == []
    assert diagnose(replace(GPU, log=0.6, gpu_percent=20.0)) == []  # short run: the driver samples rarely
    assert replace(GPU_EAGER, log=0.6, gpu_percent=20.0).log_cost == 0.6  # eager phases wait for the host
    [finding] = diagnose(replace(GPU, log=0.6, rollout=0.55, gpu_percent=80.0))
    assert finding.rule == "logging_bound" and finding.cost == pytest.approx(0.2)
    [finding] = diagnose(replace(GPU, log=0.6, log_peaks=0.5, rollout=0.55, gpu_percent=90.0))
    assert finding.rule == "checkpoint_bound" and finding.cost == pytest.approx(0.1)


def test_run_without_findings_has_conclusion():
    assert "physics takes 71 %" in conclusion(CPU) and "rollout takes 75 %" in conclusion(GPU)
    assert conclusion(replace(GPU, gpu_percent=None)).endswith("try gpusim-rl audit")
    assert "actors takes 60 %" in conclusion(replace(ACTORS, actors=0.6, update=0.3))


def test_unknown_values_give_no_findings():
    optional = [name for name, field in RunStats.__dataclass_fields__.items() if field.default is None]
    assert "load" in optional and "gpu_percent" in optional
    for stats in (CPU, GPU, SUMMED, ACTORS, RAY):
        assert diagnose(replace(stats, **dict.fromkeys(optional))) == []


def test_findings_are_sorted_by_cost():
    findings = diagnose(replace(CPU, update=0.6, simulate=0.2, log=0.1, overflow=5))
    assert [finding.rule for finding in findings] == ["contact_buffers", "update_bound", "logging_bound"]
    assert [finding.cost for finding in findings] == sorted((finding.cost for finding in findings), reverse=True)


def test_findings_for_multiple_processes():
    assert first(CASES["sums_bound"][1]).settings == ("num_envs=512", "ppo.minibatch_size=2048", "log.interval=10")
    assert "--nproc-per-node=8" in first(CASES["oversubscribed"][2]).hint
    few = replace(SUMMED, num_envs=16, env_steps_per_s=64_000)
    assert "16 envs " in first(few).problem and "0.8 ms" in first(few).problem


def test_time_in_sums_is_not_update_or_logging():
    waits = replace(SUMMED, simulate=0.16, policy=0.06, update=0.63, log=0.14, sums=0.53)
    assert [finding.rule for finding in diagnose(waits)] == ["sums_bound"]
    assert {finding.rule for finding in diagnose(replace(waits, sums=0.05))} == {"update_bound", "logging_bound"}


def test_findings_suggest_settings():
    assert first(CASES["gpu_memory"][0]).settings == ("num_envs=2048",)
    assert first(CASES["gpu_memory"][1]).settings == ()  # one env is the minimum
    assert first(replace(CPU, num_envs=5000, memory_gb=60.0)).settings == ("num_envs=2048",)  # 60 of 32 GB: swapping
    assert first(CASES["contact_buffers"][1]).settings == ("sim.njmax=256 sim.nconmax=64",)
    logging = first(CASES["logging_bound"][1]).settings
    assert logging == ("log.interval=10", "wandb_activate=false", "log.tensorboard=false")
    assert "hook" in first(CASES["simulation_bound"][1]).problem
    assert first(CASES["simulation_bound"][0]).settings == ("task.physics_hz=60",)
    assert first(CASES["simulation_bound"][2]).settings == ()  # must not be below control_hz
    assert first(CASES["unused_cpus"][1]).settings == ("num_envs=128",)
    assert str(first(CASES["graph_fallback"][0])).startswith(f"graph=off, because {FAILED}; ")
    assert "in the task" not in str(first(CASES["graph_fallback"][3]))
    assert first(replace(CASES["graph_fallback"][3], compile=True)).settings == ("compile=off",)
    assert first(CASES["checked_task"][2]).cost == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    ("rule", "below", "above"),
    [
        ("simulation_bound", replace(CPU, simulate=0.84, policy=0.02), replace(CPU, simulate=0.86, policy=0.02)),
        ("update_bound", replace(CPU, update=0.49, simulate=0.4), replace(CPU, update=0.51, simulate=0.4)),
        ("logging_bound", replace(CPU, log=0.049), replace(CPU, log=0.051)),
        ("busy_machine", replace(CPU, load=9.9, cpu_percent=50.0), replace(CPU, load=10.1, cpu_percent=50.0)),
        ("ram", replace(CPU, memory_gb=28.7), replace(CPU, memory_gb=28.9)),
        ("diverged_envs", replace(CPU, diverged=0.9e-3), replace(CPU, diverged=1.1e-3)),
        ("slowing_down", replace(CPU, speed_trend=0.76), replace(CPU, speed_trend=0.74)),
        ("sums_bound", replace(SUMMED, sums=0.19), replace(SUMMED, sums=0.21)),
        ("few_envs", replace(CPU, env_steps_per_s=1.5e6), replace(CPU, env_steps_per_s=1.9e6)),
    ],
)
def test_rule_thresholds(rule, below, above):
    assert diagnose(below) == [] and [finding.rule for finding in diagnose(above)] == [rule]


# Real runs with an injected delay


class Sleepy(Faulty):
    """Task whose reward sleeps."""

    def rewards(self):
        time.sleep(0.1)
        return super().rewards()


@pytest.fixture
def one_thread(monkeypatch):
    """Limit torch to one thread; waits between threads on a shared machine would add their own delay."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(folder, task: type = Faulty, config: FaultyConfig | None = None, iterations: int = 12, **overrides):
    """Run a training; return its stats and the doctor's findings except `busy_machine`."""
    little = {"epochs": 1, "minibatch_size": 64, "network": {"hidden": [4]}}  # the delay dominates an iteration
    settings = {"device": "cpu", "max_iterations": iterations, "ppo": little, **overrides}
    make_trainer(task, folder, config or FaultyConfig(), **settings).train()
    [run] = [path for path in folder.glob(f"{task.__name__}/2*")]
    stats = read_run_stats(run)
    return stats, [finding for finding in diagnose(stats) if finding.rule != "busy_machine"]


@pytest.mark.slow
@pytest.mark.serial
def test_sleeping_task_is_found(tmp_path, one_thread):
    stats, findings = train(tmp_path, task=Sleepy, iterations=6)
    assert findings[0].rule == "simulation_bound"
    assert stats.simulate > 0.85 and stats.rows + stats.warm_up_rows == 6


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize(
    ("rule", "physics_hz", "overrides"),
    [
        ("few_envs", 120, {"num_envs": 2}),
        pytest.param(
            "unused_cpus",
            1920,  # 32 physics steps per control step: physics dominates on any machine
            {"num_envs": 256, "sim": {"num_threads": 1}, "ppo": {"minibatch_size": 2048}},
            marks=pytest.mark.skipif(available_cpus() == 1, reason="has one CPU"),
        ),
        ("warp_on_cpu", 120, {"sim": {"name": "mjwarp"}}),
        ("small_minibatches", 120, {"ppo": {"epochs": 8, "minibatch_size": 8, "network": {"hidden": [64]}}}),
        ("update_bound", 120, {"ppo": {"epochs": 200, "minibatch_size": 64, "network": {"hidden": [64]}}}),
    ],
)
def test_slow_setting_is_found(tmp_path, one_thread, rule, physics_hz, overrides):
    _, findings = train(tmp_path, config=FaultyConfig(physics_hz=physics_hz), iterations=6, **overrides)
    assert rule in [finding.rule for finding in findings]


def test_run_can_be_diagnosed_during_training(tmp_path):
    trainer = make_trainer(Faulty, tmp_path, FaultyConfig(), device="cpu", max_iterations=100)
    with trainer.logging() as log:
        run_dir = log.run_dir
        for iteration in range(1, 5):
            trainer.iterate(log)
            stats = read_run_stats(run_dir.path)
            assert stats.iteration == iteration == stats.rows + stats.warm_up_rows
        assert not list(run_dir.checkpoints.iterdir()), "no checkpoint yet"


def test_suggested_settings_use_algorithm_section():
    mine = {"algo": "my_ppo"}
    slow, small = replace(CASES["update_bound"][0], **mine), replace(CASES["small_minibatches"][0], **mine)
    assert [first(run).settings[0] for run in (slow, small)] == ["my_ppo.epochs=2", "my_ppo.minibatch_size=16384"]


@pytest.mark.parametrize("rule", ["update_bound", "small_minibatches"])
def test_algorithms_without_epochs_get_no_such_findings(rule):
    for case in CASES[rule]:
        other = replace(case, algo="search", epochs=None, minibatch_size=None)
        assert other.minibatches is None and diagnose(other) == []
        assert "nothing stands out" in conclusion(other)
