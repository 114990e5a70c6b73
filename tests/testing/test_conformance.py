"""Faults that the task conformance suite detects; use of the suite in third-party packages."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from gpusim_rl.tasks.cartpole import Cartpole

from gpusim_rl.env import RayCaster, Stateful, VecEnv
from gpusim_rl.env.ray_sensors import grid
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim import choose_sim
from gpusim_rl.testing import conformance
from gpusim_rl.testing.conformance import CPU, NUM, TaskConformance
from helpers.commands import ROOT, run_command


class ConstantElement(Cartpole):
    def observe(self):
        return {"policy": {**super().observe()["policy"], "constant": torch.ones(self.num_envs, 1)}}


class ImpureObservation(Cartpole):
    def observe(self):
        return {"policy": {**super().observe()["policy"], "noise": self.random.uniform(-1.0, 1.0, 1)}}


class FixedStart(Cartpole):
    def reset(self, where):
        self.robot.set_state(where, joint_pos=torch.full_like(self.robot.joint_pos, 0.05))


class ReplacesTensor(Cartpole):
    def apply_action(self, action):
        self.last = action.clone()
        super().apply_action(action)


class HiddenState(Cartpole):
    def __init__(self, cfg, sim):
        super().__init__(cfg, sim)
        self.history = SimpleNamespace(speed=torch.zeros(self.num_envs, 2))

    def apply_action(self, action):
        self.history.speed.add_(self.robot.joint_vel)
        super().apply_action(action)


class CountsInPython(Cartpole):
    steps = 0

    def apply_action(self, action):
        self.steps = self.steps + 1
        super().apply_action(action)


class CountsInStateful(Cartpole):
    class Counter(Stateful):
        steps = 0

    def __init__(self, cfg, sim):
        super().__init__(cfg, sim)
        self.counter = self.Counter()

    def advance(self, done):
        self.counter.steps = self.counter.steps + 1


class MixesEnvs(Cartpole):
    def observe(self):
        mean = 0.1 * self.robot.joint_vel.clamp(-9, 9).mean()
        return {"policy": {name: part - mean for name, part in super().observe()["policy"].items()}}


class OwnTimeLimit(Cartpole):
    """Task that ends episodes by a clock missing in checkpoints."""

    def __init__(self, cfg, sim):
        super().__init__(cfg, sim)
        self.clock = SimpleNamespace(steps=torch.zeros(self.num_envs))

    def reset(self, where):
        super().reset(where)
        self.clock.steps.masked_fill_(where, 0.0)

    def apply_action(self, action):
        self.clock.steps += 1
        super().apply_action(action)

    def terminated(self):
        return super().terminated() | (self.clock.steps > 3)


class PeeksAfterReset(Cartpole):
    """Task whose reward reads the neighbouring env."""

    def rewards(self):
        return {"speed": self.robot.joint_vel[:, 0].roll(1)}


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (ConstantElement, "no_observation_element_is_constant"),
        (ConstantElement, "class_docstring_matches_observations_and_actions"),
        (ImpureObservation, "observe_and_terminated_have_no_side_effects"),
        (FixedStart, "start_states_differ_between_envs_and_episodes"),
        (ReplacesTensor, "task_state_is_tensors_written_in_place"),
        (HiddenState, "task_state_is_tensors_written_in_place"),
        (CountsInPython, "task_state_is_tensors_written_in_place"),
        (CountsInStateful, "task_state_is_tensors_written_in_place"),
        (OwnTimeLimit, "restored_env_continues_bit_identically"),
        (MixesEnvs, "diverged_env_is_reset_without_affecting_others"),
        (PeeksAfterReset, "final_obs_equals_run_without_resets"),
    ],
)
def test_suite_detects_the_fault(broken, check):
    class Suite(TaskConformance):
        max_steps = 50

        def make_env(self, name, *, num_envs=NUM, seed=0, **settings):
            composed = conformance._composed(name, None)
            section = {key: value for key, value in composed["task"].items() if key != "_target_"}
            cfg = build(broken.Config, {**section, **settings}, "task")
            sim_cfg = build(SimConfig, composed["sim"], "sim")
            return VecEnv.make(broken, cfg, num_envs=num_envs, choice=choose_sim("mujoco", CPU), sim=sim_cfg, seed=seed)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(Suite(), f"test_{check}")("Cartpole")


def test_ray_casting_on_the_host_does_not_count_as_sync(tmp_path, monkeypatch):
    """`sim=mujoco` casts rays on the host."""

    class Scanning(Cartpole):
        def __init__(self, cfg, sim):
            super().__init__(cfg, sim)
            pole = self.robot.bodies(["pole"])
            self.scan = RayCaster(sim, pole, grid(0.4, 0.2, 0.2), turn="yaw", ignore=["cartpole"], max_distance=20.0)

        def observe(self):
            return {"policy": {**super().observe()["policy"], "scan": self.scan.distance}}

    monkeypatch.setattr("gpusim_rl.tasks.cartpole.Cartpole", Scanning)
    TaskConformance().test_iteration_has_no_host_sync("Cartpole", tmp_path)


def test_checkpoint_after_long_iteration_does_not_count_as_sync(tmp_path, monkeypatch):
    monkeypatch.setattr("gpusim_rl.run.stop_signal.LONG_S", 0.0)
    TaskConformance().test_iteration_has_no_host_sync("Cartpole", tmp_path)


# Third-party package outside of the checkout: task, yaml and tests
TASK = """
from gpusim_rl.tasks.cartpole import Cartpole


class Balance(Cartpole):
    __doc__ = "Balance: " + Cartpole.__doc__.partition(": ")[2]
"""
TESTS = """
from gpusim_rl.testing.conformance import TaskConformance


class TestBalance(TaskConformance):
    config_dir = "cfg"
    simulators = ("mujoco",)
"""


@pytest.mark.slow
def test_third_party_package_runs_the_suite(tmp_path):
    yaml = (ROOT / "cfg" / "task" / "Cartpole.yaml").read_text()
    (tmp_path / "cfg" / "task").mkdir(parents=True)
    (tmp_path / "cfg" / "task" / "Balance.yaml").write_text(re.sub("_target_: .*", "_target_: balance.Balance", yaml))
    (tmp_path / "balance.py").write_text(TASK)
    (tmp_path / "test_balance.py").write_text(TESTS)
    pytest_here = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_balance.py")
    env = {"PYTHONPATH": str(ROOT)}
    done = run_command(*pytest_here, cwd=tmp_path, env=env, timeout_s=280)
    checks = [name for name in vars(TaskConformance) if name.startswith("test_")]
    assert f"{len(checks)} passed" in done.stdout
    (tmp_path / "balance.py").write_text(TASK.replace("Balance: ", "Scales: "))
    again = run_command(*pytest_here, "-k", "docstring", cwd=tmp_path, env=env, check=False)
    assert "1 failed" in again.stdout and "'Scales: " in again.stdout
