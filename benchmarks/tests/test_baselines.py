"""Trainers of other libraries on our environments, with equal work."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Distribution
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gpusim_rl.api import make_env, prepare
from gpusim_rl.connect import LIBRARIES
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import make_policy
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.sim.warp import start_warp
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.training import SMALL_PPO, Faulty, FaultyConfig, merged
from throughput import baselines
from throughput.baselines import BASELINES, Baseline, make_baseline

CPU = torch.device("cpu")
every_baseline = pytest.mark.parametrize("name", BASELINES)


def build(name: str, task: Any = "Cartpole", config: Any = None, *, mode: str = "same", bf16: bool = False, **ppo: Any):
    """Build a baseline of 8 envs with a small network; return it with its environment and settings."""
    settings = {"num_envs": 8, "device": "cpu", "ppo": merged(SMALL_PPO, ppo)}
    run = prepare(task, config, **settings).cfg
    env = make_env(task, config, **settings)
    return make_baseline(name, env, run, device=CPU, mode=mode, bf16=bf16), env, run


def parameters(baseline: Any) -> list[torch.Tensor]:
    """Return all parameters of the library's optimizer."""
    optimizer = {
        "rsl_rl": lambda: baseline._runner.alg.optimizer,
        "skrl": lambda: baseline._agent.optimizer,
        "rl_games": lambda: baseline._agent.optimizer,
        "sb3": lambda: baseline._model.policy.optimizer,
    }[baseline.name]()
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def watch(baseline: Baseline) -> list[str]:
    """Record phases from now on: `+update`, `-update`."""
    seen: list[str] = []

    @contextmanager
    def around(phase: str):
        seen.append(f"+{phase}")
        yield
        seen.append(f"-{phase}")

    baseline.observe(around)
    return seen


@every_baseline
def test_iteration_is_rollout_and_update(name, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    start_warp(torch.device("cpu"))  # otherwise skrl starts Warp with output if another test has imported it
    baseline, env, run = build(name)
    seen, steps = watch(baseline), 0
    before = [parameter.detach().clone() for parameter in parameters(baseline)]
    step = env.step

    def counted(action: torch.Tensor):
        nonlocal steps
        steps += 1
        return step(action)

    env.step = counted
    for iteration in (1, 2):
        baseline.iterate()
        assert seen == ["+rollout", "-rollout", "+update", "-update"] * iteration
        assert steps == iteration * run.algorithm.horizon
        after = [parameter.detach().clone() for parameter in parameters(baseline)]
        assert all(value.isfinite().all() for value in after)
        assert sum(not torch.equal(*pair) for pair in zip(before, after, strict=True)) > len(after) // 2
        before = after
    assert baseline.env_steps_per_iteration == 8 * run.algorithm.horizon
    baseline.close()
    assert list(tmp_path.iterdir()) == [], "no files in the working directory"
    assert capfd.readouterr() == ("", "")


@every_baseline
def test_settings_are_plain_values_and_name_library(name):
    baseline, _, _ = build(name, minibatch_size=16)
    assert baseline.name == name and baseline.mode == "same" and baseline.version[0].isdigit()
    settings = json.loads(json.dumps(baseline.settings))
    assert settings["minibatches"] == 4 and settings["epochs"] == 2 and settings["hidden"] == [16, 16]
    assert settings["precision"] == "fp32" and settings["compile"] == "no" and settings["device"] == "cpu"


@every_baseline
@pytest.mark.parametrize("separate", [False, True])
def test_networks_have_our_parameter_count(name, separate):
    baseline, env, run = build(name, network={"separate": separate})
    trunk = baseline.settings["trunk"]
    assert trunk == ("separate" if separate or name == "rsl_rl" else "shared")
    if trunk == "separate" and not separate:
        return  # rsl_rl cannot share
    ours = make_policy(PPO, run, env.obs_sizes, env.action_space, torch.device("cpu"))
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert sum(parameter.numel() for parameter in parameters(baseline)) == count


@every_baseline
def test_optimizer_makes_as_many_steps_as_ours(name):
    baseline, _, _ = build(name, minibatch_size=16, epochs=3)
    baseline.iterate()
    optimizer: Any = {"rsl_rl": "_runner.alg.optimizer", "sb3": "_model.policy.optimizer"}.get(name, "_agent.optimizer")
    node: Any = baseline
    for attribute in optimizer.split("."):
        node = getattr(node, attribute)
    assert {int(state["step"]) for state in node.state.values()} == {3 * 4}


@every_baseline
def test_critic_observations_determine_trunk(name):
    baseline, _, _ = build(name, Faulty, FaultyConfig(critic=True))
    baseline.iterate()
    baseline.iterate()
    expected = "shared" if name == "sb3" else "separate"  # SB3 has no separate critic input
    assert baseline.settings["trunk"] == expected


@every_baseline
def test_bf16_is_used_where_supported(name):
    baseline, _, _ = build(name, bf16=True)
    baseline.iterate()
    assert baseline.settings["precision"].startswith({"rsl_rl": "bf16", "skrl": "bf16"}.get(name, "fp32"))
    assert all(parameter.isfinite().all() for parameter in parameters(baseline))


@pytest.mark.slow
@every_baseline
def test_fastest_mode_runs(name):
    baseline, _, _ = build(name, mode="fastest")
    seen = watch(baseline)
    baseline.iterate()
    baseline.iterate()
    assert seen == ["+rollout", "-rollout", "+update", "-update"] * 2
    assert baseline.settings["compile"] == ("default" if name in ("rsl_rl", "rl_games") else "no")


@every_baseline
@pytest.mark.parametrize("mode", ["same", "fastest"])
def test_fastest_mode_disables_logging_where_possible(name, mode, monkeypatch):
    monkeypatch.setattr(baselines, "has_compiler", lambda: False)
    baseline, _, _ = build(name, mode=mode)
    baseline.iterate()
    baseline.iterate()
    files = list(Path(baseline._folder.name).rglob("*tfevents*"))  # type: ignore[attr-defined]
    expected = {"sb3": "in memory" if mode == "same" else "none"}.get(name, "TensorBoard")
    if mode == "fastest" and name in ("rsl_rl", "skrl"):
        expected = "none"
    assert baseline.settings["log"] == expected
    assert bool(files) == (expected == "TensorBoard")
    baseline.close()


@every_baseline
@pytest.mark.parametrize("mode", ["same", "fastest"])
def test_library_decides_matmul_precision_on_cpu(name, mode, monkeypatch):
    monkeypatch.setattr(baselines, "has_compiler", lambda: False)
    baseline, _, _ = build(name, mode=mode)
    assert baseline.settings["matmul_precision"] == ("high" if name == "rl_games" else "highest")


@every_baseline
def test_syncs_are_counted_per_phase(name):
    baseline, _, _ = build(name)
    baseline.iterate()
    counts: dict[str, int] = {}

    @contextmanager
    def around(phase: str):
        with SyncCounter() as syncs:
            yield
        counts[phase] = syncs.total

    baseline.observe(around)
    baseline.iterate()
    assert counts["rollout"] > 0 and counts["update"] > 0
    assert _get_current_dispatch_mode() is None


@every_baseline
def test_process_switches_are_restored(name):
    before = (Distribution._validate_args, torch.get_float32_matmul_precision(), torch.get_num_threads())
    baseline, _, _ = build(name)
    baseline.iterate()
    assert before == (Distribution._validate_args, torch.get_float32_matmul_precision(), torch.get_num_threads())


def test_each_library_keeps_its_switches():
    before = {name: build(name)[0]._process_settings for name in BASELINES}
    assert {name for name in BASELINES if before[name].validate} == {"rl_games", "sb3"}
    assert before == {name: build(name)[0]._process_settings for name in reversed(BASELINES)}


def test_baselines_run_in_one_process():
    built = [build(name)[0] for name in BASELINES]
    for _ in range(2):
        for baseline in built:
            baseline.iterate()


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("rslrl", "same", "Available: rsl_rl, skrl, rl_games, sb3"),
        ("sb3", "fast", "Available: same, fastest"),
    ],
)
def test_unknown_name_is_rejected_in_one_line(name, mode, words):
    with pytest.raises(ConfigError) as error:
        build(name, mode=mode)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "module"), [("rsl_rl", "rsl_rl"), ("sb3", "stable_baselines3")])
def test_missing_library_is_reported_in_one_line(name, module, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ConfigError) as error:
        build(name)
    assert (error.value.key, error.value.hint) == (f"baseline {name}", f"Try pip install '{LIBRARIES[name][1]}'")


def test_unsupported_policies_are_rejected():
    with pytest.raises(ConfigError, match=r"got ppo\.network\.rnn=lstm$"):
        build("skrl", network={"rnn": "lstm"})
