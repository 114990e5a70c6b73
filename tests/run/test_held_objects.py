"""`debug.check_device`: the first tensor on another device is named, and no tensor where it belongs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpusim_rl.tasks.cartpole import Cartpole
from torch import Tensor, nn

from gpusim_rl.env import Stateful
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.run.held_objects import check_devices
from helpers.training import FaultyConfig, make_trainer

META, CPU = torch.device("meta"), torch.device("cpu")
LOST = torch.zeros(2, device=META)
CHECK = {"debug": {"check_device": True}}


class Goal(Stateful):
    def __init__(self, lost: bool) -> None:
        self.value = {"position": [torch.zeros(2), LOST if lost else torch.zeros(2)]}


class Lost(Cartpole):
    """Cartpole with a tensor that no hook uses."""

    Config = FaultyConfig

    def __init__(self, cfg: Any, sim: Any) -> None:
        super().__init__(cfg, sim)
        self.goal = Goal(lost=True)


class Late(Cartpole):
    """Cartpole whose reward is of two devices from its third step on."""

    Config = FaultyConfig

    def __init__(self, cfg: Any, sim: Any) -> None:
        super().__init__(cfg, sim)
        self.steps, self.bonus = 0, torch.zeros(self.num_envs)

    def rewards(self) -> dict[str, Tensor]:
        self.steps += 1
        if self.steps == 3:
            self.bonus = self.bonus.to(META)
        return {name: term + self.bonus for name, term in super().rewards().items()}


def refused(task: Any, folder: Any, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        make_trainer(task, folder, **CHECK, **settings).train()
    return str(error.value)


def test_a_tensor_of_the_task_is_named_before_the_run_folder_is_made(tmp_path):
    said = refused(Lost, tmp_path)
    assert said == ("debug.check_device: the environment: Goal.value['position'][1] is on meta, expected cpu")
    assert not list(tmp_path.iterdir())


def test_without_the_setting_nothing_is_looked_at(tmp_path):
    make_trainer(Lost, tmp_path, max_iterations=1)


def test_an_error_of_torch_becomes_one_that_names_the_tensor(tmp_path):
    assert refused(Late, tmp_path).endswith("the environment: Late.bonus is on meta, expected cpu")


def test_tensors_of_the_policy_and_of_the_algorithm_are_named(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, **CHECK)
    policy: Any = trainer.algorithm.policy
    policy.table = LOST  # a plain attribute: nn.Module.to() leaves it behind
    with pytest.raises(ConfigError, match=r"the policy: ActorCritic\.table is on meta, expected cpu"):
        trainer.collector.update()
    del policy.table
    algorithm: Any = trainer.algorithm
    algorithm.rollout.extra = (LOST,)
    with pytest.raises(ConfigError, match=r"the algorithm: Rollout\.extra\[0\] is on meta, expected cpu"):
        trainer.collector.update()


def test_what_goes_between_them_is_named(tmp_path, monkeypatch):
    trainer = make_trainer("Cartpole", tmp_path, **CHECK)
    step = trainer.env.step

    def lost_length(action: Tensor) -> Any:
        found = step(action)
        found.stats["length"] = torch.zeros(8, device=META)
        return found

    monkeypatch.setattr(trainer.env, "step", lost_length)
    with pytest.raises(ConfigError, match=r"the environment: Step\.stats\['length'\] is on meta, expected cpu"):
        trainer.collector.collect()
    monkeypatch.undo()
    monkeypatch.setattr(PPO, "act", lambda self, obs: torch.zeros(8, 1, device=META))
    with pytest.raises(ConfigError, match=r"the algorithm: \['act\(\)'\] is on meta, expected cpu"):
        trainer.collector.collect()


class OnTheHost:
    """A memory of the host, by design."""

    def __init__(self) -> None:
        self.device = CPU
        self.value = torch.zeros(2)


class Slots:
    __slots__ = ("unset", "value")

    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_an_object_says_where_its_tensors_are() -> None:
    check_devices("it", [OnTheHost()], META)
    with pytest.raises(ConfigError, match=r"OnTheHost\.value is on cpu, expected meta"):
        check_devices("it", OnTheHost(), META)  # what is asked for itself does not say


def test_slots_circles_and_modules_of_torch_are_looked_into() -> None:
    circle: list[Any] = [torch.zeros(1)]
    circle.append(circle)
    check_devices("it", circle, CPU)
    with pytest.raises(ConfigError, match=r"Slots\.value is on meta"):
        check_devices("it", {"a": Slots(LOST)}, CPU)
    net = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2).to(META))
    with pytest.raises(ConfigError, match=r"Sequential\.1\.weight_ih_l0 is on meta, expected cpu"):
        check_devices("it", net, CPU)


def test_a_counter_of_an_optimizer_may_be_on_the_host() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.zeros(2)
    optimizer.step()
    optimizer.state[weight]["step"] = optimizer.state[weight]["step"].to(META)
    check_devices("it", [optimizer], CPU)
    optimizer.state[weight]["exp_avg"] = LOST
    with pytest.raises(ConfigError, match=r"Adam\.state\['exp_avg'\] is on meta"):
        check_devices("it", [optimizer], CPU)
