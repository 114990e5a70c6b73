"""The task conformance suite finds faults, and works in other packages."""

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


class OneStart(Cartpole):
    def reset(self, where):
        self.robot.set_state(where, joint_pos=torch.full_like(self.robot.joint_pos, 0.05))


class Replaces(Cartpole):
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
    """Ends episodes by a clock that checkpoints miss."""

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
    """Reads the neighbouring env."""

    def rewards(self):
        return {"speed": self.robot.joint_vel[:, 0].roll(1)}


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (ConstantElement, "no_element_of_an_observation_is_constant"),
        (ConstantElement, "the_class_docstring_is_the_specification"),
        (ImpureObservation, "observing_and_asking_for_the_end_change_nothing"),
        (OneStart, "starts_are_random_in_every_env_and_episode"),
        (Replaces, "what_a_task_keeps_is_tensors_written_in_place"),
        (HiddenState, "what_a_task_keeps_is_tensors_written_in_place"),
        (CountsInPython, "what_a_task_keeps_is_tensors_written_in_place"),
        (CountsInStateful, "what_a_task_keeps_is_tensors_written_in_place"),
        (OwnTimeLimit, "a_state_continues_bit_for_bit_in_another_environment"),
        (MixesEnvs, "an_env_that_diverges_is_reset_and_no_other_env_notices"),
        (PeeksAfterReset, "final_obs_is_what_a_run_without_resets_sees"),
    ],
)
def test_the_suite_finds(broken, check):
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


def test_a_scan_of_the_ground_is_no_wait_of_the_task(tmp_path, monkeypatch):
    """`sim=mujoco` casts rays on the host."""

    class Scanning(Cartpole):
        def __init__(self, cfg, sim):
            super().__init__(cfg, sim)
            pole = self.robot.bodies(["pole"])
            self.scan = RayCaster(sim, pole, grid(0.4, 0.2, 0.2), turn="yaw", ignore=["cartpole"], max_distance=20.0)

        def observe(self):
            return {"policy": {**super().observe()["policy"], "scan": self.scan.distance}}

    monkeypatch.setattr("gpusim_rl.tasks.cartpole.Cartpole", Scanning)
    TaskConformance().test_an_iteration_waits_for_nothing("Cartpole", tmp_path)


def test_a_checkpoint_after_a_long_iteration_is_no_wait_of_the_task(tmp_path, monkeypatch):
    monkeypatch.setattr("gpusim_rl.run.stop_signal.LONG_S", 0.0)
    TaskConformance().test_an_iteration_waits_for_nothing("Cartpole", tmp_path)


# A package of its own, outside of the checkout: a task, its yaml, and a file of tests.
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
def test_a_package_of_its_own_is_checked_by_a_few_lines(tmp_path):
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
    assert "1 failed" in again.stdout and "'Scales: " in again.stdout, "the values that were compared are shown"
