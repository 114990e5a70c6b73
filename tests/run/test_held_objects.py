"""Tests of checks on held objects: tensors on the wrong device, state missing from checkpoints."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpusim_rl.tasks.cartpole import Cartpole
from torch import Tensor, nn

from gpusim_rl.env import Stateful
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.run.held_objects import check_devices, unsaved
from helpers.raised import raises
from helpers.training import FaultyConfig, make_trainer

META, CPU = torch.device("meta"), torch.device("cpu")
LOST = torch.zeros(2, device=META)
CHECK = {"debug": {"check_device": True}}


def misplaced(owner: str, path: str) -> Any:
    """Expect the error for a tensor on the meta device."""
    return raises(ConfigError, key=f"debug.check_device: {owner}", problem=f"{path} is on meta", expected="cpu")


class Goal(Stateful):
    def __init__(self, lost: bool) -> None:
        self.value = {"position": [torch.zeros(2), LOST if lost else torch.zeros(2)]}


class Lost(Cartpole):
    """Cartpole with an unused tensor on the wrong device."""

    Config = FaultyConfig

    def __init__(self, cfg: Any, sim: Any) -> None:
        super().__init__(cfg, sim)
        self.goal = Goal(lost=True)


class Late(Cartpole):
    """Cartpole whose reward mixes two devices from the third step on."""

    Config = FaultyConfig

    def __init__(self, cfg: Any, sim: Any) -> None:
        super().__init__(cfg, sim)
        self.steps, self.bonus = 0, torch.zeros(self.num_envs)

    def rewards(self) -> dict[str, Tensor]:
        self.steps += 1
        if self.steps == 3:
            self.bonus = self.bonus.to(META)
        return {name: term + self.bonus for name, term in super().rewards().items()}


def train_checked(task: Any, folder: Any) -> None:
    make_trainer(task, folder, **CHECK).train()


def test_misplaced_task_tensor_is_named_before_run_folder_exists(tmp_path):
    with misplaced("the environment", "Goal.value['position'][1]"):
        train_checked(Lost, tmp_path)
    assert not list(tmp_path.iterdir())


def test_devices_are_not_checked_by_default(tmp_path):
    make_trainer(Lost, tmp_path, max_iterations=1)


def test_torch_device_error_names_the_tensor(tmp_path):
    with misplaced("the environment", "Late.bonus"):
        train_checked(Late, tmp_path)


def test_misplaced_policy_and_algorithm_tensors_are_named(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, **CHECK)
    policy: Any = trainer.algorithm.policy
    policy.table = LOST  # a plain attribute: nn.Module.to() leaves it behind
    with misplaced("the policy", "ActorCritic.table"):
        trainer.collector.update()
    del policy.table
    algorithm: Any = trainer.algorithm
    algorithm.rollout.extra = (LOST,)
    with misplaced("the algorithm", "Rollout.extra[0]"):
        trainer.collector.update()


def test_misplaced_step_and_action_tensors_are_named(tmp_path, monkeypatch):
    trainer = make_trainer("Cartpole", tmp_path, **CHECK)
    step = trainer.env.step

    def lost_length(action: Tensor) -> Any:
        result = step(action)
        result.stats["length"] = torch.zeros(8, device=META)
        return result

    monkeypatch.setattr(trainer.env, "step", lost_length)
    with misplaced("the environment", "Step.stats['length']"):
        trainer.collector.collect()
    monkeypatch.undo()
    monkeypatch.setattr(PPO, "act", lambda self, obs: torch.zeros(8, 1, device=META))
    with misplaced("the algorithm", "['act()']"):
        trainer.collector.collect()


class OnTheHost:
    """Object whose tensors belong on the host."""

    def __init__(self) -> None:
        self.device = CPU
        self.value = torch.zeros(2)


class Slots:
    __slots__ = ("unset", "value")

    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_device_attribute_declares_where_tensors_belong() -> None:
    check_devices("owner", [OnTheHost()], META)
    with raises(ConfigError, key="debug.check_device: owner", problem="OnTheHost.value is on cpu", expected="meta"):
        check_devices("owner", OnTheHost(), META)  # the declaration does not apply to the root object


def test_device_check_covers_slots_cycles_and_torch_modules() -> None:
    circle: list[Any] = [torch.zeros(1)]
    circle.append(circle)
    check_devices("owner", circle, CPU)
    with misplaced("owner", "Slots.value"):
        check_devices("owner", {"a": Slots(LOST)}, CPU)
    net = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2).to(META))
    with misplaced("owner", "Sequential.1.weight_ih_l0"):
        check_devices("owner", net, CPU)


def test_optimizer_step_counter_may_be_on_the_host() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.zeros(2)
    optimizer.step()
    optimizer.state[weight]["step"] = optimizer.state[weight]["step"].to(META)
    check_devices("owner", [optimizer], CPU)
    optimizer.state[weight]["exp_avg"] = LOST
    with misplaced("owner", "Adam.state['exp_avg']"):
        check_devices("owner", [optimizer], CPU)


class Helper:
    def __init__(self) -> None:
        self.count, self.sums = 0, torch.zeros(2)


class Owner:
    """Task with every kind of object that may hold a counter."""

    def __init__(self) -> None:
        self.cfg, self.sim, self.kept, self.level = Helper(), Helper(), torch.zeros(2), Levels()
        self.number, self.later, self.name, self.flag = 0, None, "a", False
        self.numbers, self.pair, self.table, self.queue = [0], (0, [0]), {"x": 0}, deque([0])
        self.array, self.scalar, self.helper = np.zeros(2), np.float32(0), Helper()
        self.stream, self.python, self.counter = np.random.default_rng(0), random.Random(0), itertools.count()
        self.torch, self.plain, self.nan = torch.Generator(), SimpleNamespace(x=0), math.nan
        self.loop = [self]


class Levels(Stateful):
    def __init__(self) -> None:
        self.mean, self.value, self.inner = 0, torch.zeros(2), [torch.zeros(2)]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda it: setattr(it, "number", 1),
    "later": lambda it: setattr(it, "later", 1.0),
    "name": lambda it: setattr(it, "name", "b"),
    "flag": lambda it: setattr(it, "flag", True),
    "numbers.0": lambda it: it.numbers.__setitem__(0, 1),
    "numbers (length)": lambda it: it.numbers.pop(),
    "pair.1.0": lambda it: it.pair[1].__setitem__(0, 1),
    "table.x": lambda it: it.table.update(x=1),
    "queue.0": lambda it: it.queue.__setitem__(0, 1),
    "array": lambda it: it.array.__setitem__(0, 1),
    "scalar": lambda it: setattr(it, "scalar", np.float32(1)),
    "helper.count": lambda it: setattr(it.helper, "count", 1),
    "helper.sums": lambda it: it.helper.sums.add_(1.0),
    "level.mean": lambda it: setattr(it.level, "mean", 1),
    "stream": lambda it: it.stream.random(),
    "python": lambda it: it.python.random(),
    "counter": lambda it: next(it.counter),
    "torch": lambda it: torch.rand(1, generator=it.torch),
    "plain.x": lambda it: setattr(it.plain, "x", 1),
}
KEPT: dict[str, Callable[[Any], Any]] = {
    "a tensor": lambda it: it.kept.add_(1.0),
    "a tensor of a component": lambda it: it.level.value.add_(1.0),
    "a tensor in a list of a component": lambda it: it.level.inner[0].add_(1.0),
    "settings": lambda it: setattr(it.cfg, "count", 1),
    "the simulator": lambda it: setattr(it.sim, "count", 1),
    "nothing": lambda it: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_state_outside_checkpoints_is_found(name: str) -> None:
    it = Owner()
    before = unsaved(it)
    CHANGES[name](it)
    now = unsaved(it)
    assert name in {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}


@pytest.mark.parametrize("name", KEPT)
def test_state_in_checkpoints_is_not_reported(name: str) -> None:
    it = Owner()
    before = unsaved(it)
    KEPT[name](it)
    assert unsaved(it) == before


class Counting(Cartpole):
    """Cartpole that counts its control steps with a Python number."""

    Config = FaultyConfig
    count = 0

    def advance(self, done: Tensor) -> None:
        self.count += 1


class Settling(Cartpole):
    """Cartpole that caches a value in its first control step."""

    Config = FaultyConfig

    def apply_action(self, action: Tensor) -> None:
        self.limit = 400.0
        super().apply_action(action)


@pytest.mark.parametrize(("task", "warned"), [(Counting, True), (Settling, False), ("Cartpole", False)])
def test_unsaved_python_number_warns_once_at_first_checkpoint(
    task: Any, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = None if isinstance(task, str) else FaultyConfig()
    make_trainer(task, tmp_path, config, log={"checkpoint_interval": 1}).train()
    lines = [record.message for record in caplog.records if "checkpoint" in record.message]
    assert len(lines) == warned and all("Counting.count" in line for line in lines)


def test_unsaved_state_check_tolerates_odd_values() -> None:
    with torch.inference_mode():
        made = torch.ones(2)
    it = SimpleNamespace(many=10**5000, extras={}, helper=SimpleNamespace(made=made), motions=np.zeros((9 << 20,)))
    before = unsaved(it)
    it.extras["near"] = torch.ones(2)
    assert unsaved(it) == before
    it.extras["count"] = 1
    it.many += 1
    assert {path for path, value in unsaved(it).items() if before.get(path) != value} >= {"many", "extras.count"}
