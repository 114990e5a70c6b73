"""Tests of `VecEnv.compile`: equal steps, one graph per piece, eager fallback.

Comparisons run in subprocesses: torch cannot compile the shape checks of the test run.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gpusim_rl.tasks.cartpole import Cartpole
from torch import Tensor

from gpusim_rl.env import Step, Terms, VecEnv, vec_env
from gpusim_rl.env.vec_env import COMPILED
from gpusim_rl.machine.hardware import has_compiler
from gpusim_rl.settings.discover import tasks
from helpers.commands import run_command
from helpers.task_envs import class_env

TOLERANCE = 1e-4
"""Relative and absolute tolerance of one compiled step, whose kernels round in another order."""


def make(task: str, num_envs: int = 16, task_class: type | None = None, sim: str = "mujoco") -> VecEnv:
    env = class_env(task, num_envs, task_class, sim=sim)
    env.reset()
    return env


def numbers(step: Step) -> dict[str, Tensor]:
    groups = {f"obs {name}": value for name, value in step.obs.items()}
    groups |= {f"final_obs {name}": value for name, value in step.final_obs.items()}
    masks = {name: getattr(step, name) for name in ("terminated", "truncated", "diverged", "done", "incomplete")}
    return {**groups, **masks, **step.terms, **{f"stat {k}": v for k, v in step.stats.items()}, "reward": step.reward}


def compare(task: str, backend: str, steps: int, sim: str = "mujoco") -> None:
    """Assert that compiled steps equal eager ones, and that each piece is compiled exactly once."""
    from torch._dynamo.utils import counters

    eager, compiled = make(task, sim=sim), make(task, sim=sim)
    counters.clear()
    tolerance = 0.0 if backend == "eager" else TOLERANCE
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        compiled.compile(backend=backend)
        for _ in range(steps):
            action = 2.0 * torch.rand(eager.num_envs, eager.num_actions, generator=generator) - 1.0
            expected, got = numbers(eager.step(action)), numbers(compiled.step(action))
            assert list(expected) == list(got)
            for name, value in expected.items():
                torch.testing.assert_close(
                    got[name], value, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
                )
            if tolerance:  # contacts amplify small differences
                compiled.load_state_dict(eager.state_dict())
    assert counters["stats"]["unique_graphs"] == len(COMPILED), counters["stats"]


def run(call: str) -> str:
    """Run a call of this file in a subprocess and return its log."""
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[1]), str(here.parents[2])]
    script = f"import logging, sys; logging.basicConfig(level=logging.WARNING)\nsys.path[:0] = {paths}\n"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "call.py"
        file.write_text(f"{script}import test_compile\ntest_compile.{call}\n")
        return run_command(sys.executable, file, cwd=here.parents[2]).stderr


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(tasks().keys() - {"Cartpole"}))
def test_traced_steps_equal_eager_steps_bit_for_bit(task: str) -> None:
    assert "uncompiled" not in run(f"compare({task!r}, 'eager', 20)")


@pytest.mark.slow
def test_traced_steps_on_mujoco_warp_equal_eager_steps() -> None:
    assert "uncompiled" not in run("compare('Cartpole', 'eager', 20, sim='mjwarp')")


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("task", tasks())
def test_compiled_steps_are_close_to_eager_steps(task: str) -> None:
    assert "uncompiled" not in run(f"compare({task!r}, 'inductor', 3)")


class DataDependent(Cartpole):
    """Cartpole that branches on data in `rewards` and changes a number in `observe`."""

    number = 0.0

    def rewards(self) -> dict[str, Tensor]:
        terms = super().rewards()
        return terms if self.progress.sum() >= 0 else {}

    def observe(self) -> dict[str, Terms]:
        self.number += 1.0
        terms = super().observe()["policy"]
        return {"policy": {**terms, "cart_pos": terms["cart_pos"] + 0.0 * self.number}}


def untraceable() -> None:
    eager, compiled = make("Cartpole", task_class=DataDependent), make("Cartpole", task_class=DataDependent)
    with torch.no_grad():
        compiled.compile(backend="eager")
        for _ in range(4):
            action = torch.zeros(eager.num_envs, 1)
            expected, got = numbers(eager.step(action)), numbers(compiled.step(action))
            assert all(torch.equal(got[name], value) for name, value in expected.items())


def both() -> None:
    compare("Cartpole", "eager", 20)
    logging.warning("compiled")
    untraceable()


def test_uncompiled_code_is_reported_and_steps_equal_eager() -> None:
    first, branching, changes = run("both()").splitlines()
    assert first.endswith("compiled")  # traced steps log nothing
    assert "DataDependent: the step" in branching and "in rewards() at " in branching
    assert "uncompiled" in branching and "test_compile.py:" in branching
    assert "DataDependent: the observation" in changes and "uncompiled: task.number == " in changes
    assert "no longer holds # self.number += 1.0" in changes and "in observe" in changes


def twice() -> None:
    compare("Cartpole", "eager", 2)
    compare("Cartpole", "eager", 2)


@pytest.mark.slow
def test_each_env_is_compiled_separately() -> None:
    assert "uncompiled" not in run("twice()")


class Counting(Cartpole):
    """Cartpole that counts its steps in a Python int."""

    calls = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps = 0

    def advance(self, resetting: Tensor) -> None:
        super().advance(resetting)
        self.steps += 1


@pytest.mark.parametrize("task", ["Ant", "Counting"])
def test_warm_up_step_before_compilation_leaves_no_trace(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"task": "Cartpole", "task_class": Counting} if task == "Counting" else {"task": task}
    env, other = make(**given), make(**given)
    before = {name: value for name, value in vars(env.task).items() if isinstance(value, int)}
    guard, before_step = env.nan_guard, env.nan_guard.before_step
    with monkeypatch.context() as patch:  # the first step's physics diverges in one env
        patch.setattr(guard, "before_step", lambda *a: (before_step(*a), guard._diverged_ever[1:2].fill_(True))[0])
        patch.setattr(vec_env, "Compiled", lambda function, *_: function)
        env.compile()
    assert {name: vars(env.task)[name] for name in before} == before
    assert env.first_diverged() is None
    action = torch.full((env.num_envs, env.num_actions), 0.5)
    expected, got = numbers(other.step(action)), numbers(env.step(action))
    assert all(torch.equal(got[name], value) for name, value in expected.items())
