"""Tests of commands, levels and curricula: masks, ranges, intervals, distributions, checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mujoco
import pytest
import torch
from torch import Tensor

from gpusim_rl.env import Commands, Curriculum, CurriculumConfig, Levels, Task, TaskConfig, VecEnv, control_steps
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.stateful import restore_state, saved_state
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.checks import build
from gpusim_rl.sim import Scene, Sim
from helpers.raised import raises
from helpers.states import saved
from helpers.task_envs import plain_env

WHEEL = """
<mujoco>
  <worldbody><body name="wheel"><joint name="axle" axis="0 0 1" damping="0.1"/>
    <geom type="cylinder" size="0.1 0.02" mass="1"/></body></worldbody>
  <actuator><motor name="axle" joint="axle"/></actuator>
</mujoco>
"""
RANGES = {"speed": (0.5, 2.0), "turn": (-1.0, 1.0), "fixed": (3.0, 3.0)}
COUNT = 4


class Follow(Task[TaskConfig]):
    """Wheel that follows a commanded speed; an env rises one level when its episode ends."""

    Config = TaskConfig

    @classmethod
    def scene(cls, cfg: TaskConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add("wheel", mujoco.MjSpec.from_string(WHEEL))
        return scene

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("wheel")
        self.num_actions = 1
        self.commands = Commands(self, RANGES, interval=0.1)  # five control steps
        self.levels = Levels(self, COUNT, initial=torch.arange(self.num_envs) % COUNT)

    def reset(self, where: Tensor) -> None:
        self.commands.resample(where)

    def apply_action(self, action: Tensor) -> None:
        self.robot.actuate(action)

    def observe(self) -> Tensor:
        return torch.cat([self.robot.joint_vel, self.commands.value, self.levels.value[:, None].float()], dim=1)

    def rewards(self) -> dict[str, Tensor]:
        return {"speed": -(self.robot.joint_vel[:, 0] - self.commands["speed"]).abs()}

    def terminated(self) -> Tensor:
        return torch.zeros(self.num_envs, dtype=torch.bool)

    def advance(self, done: Tensor) -> None:
        self.commands.advance()
        self.levels.move(up=done, down=torch.zeros_like(done))


def make_env(num_envs: int = 16, seed: int = 0, episode_length: int = 13) -> VecEnv:
    settings = {"physics_hz": 50.0, "episode_length": episode_length, "randomize_episode_start": True}
    return plain_env(Follow, num_envs, seed, **settings)


def make_task(num_envs: int = 16, seed: int = 0) -> Follow:
    task = make_env(num_envs, seed).task
    assert isinstance(task, Follow)
    return task


def everywhere(task: Task[Any]) -> Tensor:
    return torch.ones(task.num_envs, dtype=torch.bool)


def nowhere(task: Task[Any]) -> Tensor:
    return ~everywhere(task)


# Commands


def test_commands_are_uniform_in_their_ranges() -> None:
    task = make_task(num_envs=20_000)
    assert (task.commands.value == 0).all()
    task.commands.resample(everywhere(task))
    for name, (low, high) in RANGES.items():
        drawn = task.commands[name]
        assert drawn.min() >= low and drawn.max() <= high
        if low < high:
            share = torch.histc(drawn, bins=8, min=low, max=high) / task.num_envs
            assert (share - 1 / 8).abs().max() < 0.01  # four standard deviations
    together = torch.corrcoef(task.commands.value[:, :2].T)[0, 1]
    assert together.abs() < 0.03


def test_resample_interval_counts_from_each_envs_last_draw() -> None:
    task = make_task()
    task.commands.resample(everywhere(task))
    late = torch.arange(task.num_envs) % 2 == 0
    draws = []
    for step in range(1, 13):
        if step == 3:
            task.commands.resample(late)
        before = task.commands["speed"].clone()
        task.commands.advance()
        changed = task.commands["speed"] != before
        assert changed[late].all() == changed[late].any() and changed[~late].all() == changed[~late].any()
        draws += [(step, kind) for kind, some in (("late", late), ("early", ~late)) if changed[some].any()]
    assert draws == [(5, "early"), (7, "late"), (10, "early"), (12, "late")]


def test_commands_without_interval_stay_constant() -> None:
    task = make_task()
    commands = Commands(task, RANGES)
    commands.resample(everywhere(task))
    before = commands.value.clone()
    for _ in range(20):
        commands.advance()
    assert torch.equal(commands.value, before)


def test_invalid_command_ranges_and_intervals_are_rejected() -> None:
    task = make_task()
    for limits in ((1.0, 0.0), (1.0,)):
        with raises(ConfigError, key="command 'speed'", got=list(limits)):
            Commands(task, {"speed": limits})
    with raises(ConfigError, key="commands.interval", got=0.01):
        Commands(task, RANGES, interval=0.01)


def test_control_steps_are_at_least_one_and_fit_int64() -> None:
    assert [control_steps(seconds, 0.02) for seconds in (0.0, 1e-30, 0.1)] == [1, 1, 5]
    assert (torch.tensor(7) % control_steps(3e38, 1e-38)).item() == 7


# Levels


def test_levels_start_at_their_initial_values() -> None:
    task = make_task()
    assert task.levels.value.tolist() == [env_id % COUNT for env_id in range(task.num_envs)]
    beyond = Levels(task, COUNT, initial=torch.arange(task.num_envs) - 1)
    assert beyond.value[:6].tolist() == [0, 0, 1, 2, 3, 3]


def test_levels_move_by_masks_and_stop_at_the_bottom() -> None:
    task = make_task(num_envs=8)
    up = torch.tensor([1, 1, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    down = torch.tensor([0, 0, 0, 0, 1, 1, 0, 1], dtype=torch.bool)
    task.levels.move(up=up, down=down)
    #                                          0+ 1+ 2+ 3  0- 1- 2  3+-
    assert task.levels.value.tolist() == [1, 2, 3, 3, 0, 0, 2, 3]


def test_level_above_the_highest_is_random() -> None:
    task = make_task(num_envs=20_000)
    at_top = task.levels.value == COUNT - 1
    others = task.levels.value[~at_top].clone()
    task.levels.move(up=at_top, down=nowhere(task))
    assert torch.equal(task.levels.value[~at_top], others)
    share = torch.bincount(task.levels.value[at_top], minlength=COUNT) / at_top.sum()
    assert (share - 1 / COUNT).abs().max() < 0.025  # four standard deviations


# Curriculum


def curriculum(start: float | None, final: float) -> Curriculum:
    cfg = build(CurriculumConfig, {"start": start, "factor": 0.7, "threshold": 0.5, "window": 4}, "task.curriculum")
    return Curriculum(make_task(num_envs=1), cfg, final=final)


@pytest.mark.parametrize(("start", "final"), [(1.0, 0.2), (0.2, 1.0), (0.3, 0.3)])
def test_curriculum_advances_after_good_windows_to_its_final_value(start: float, final: float) -> None:
    part, value, window = curriculum(start, final), start, []
    scores = torch.rand(200, generator=torch.Generator().manual_seed(0)).tolist()
    values = []
    for score in scores:
        part.advance(torch.tensor(score))
        window.append(score)
        if len(window) == 4:
            if sum(window) / 4 >= 0.5:
                value = max(0.7 * value, final) if start > final else min(value / 0.7, final)
            window = []
        values.append(value)
        assert float(part.value) == pytest.approx(value, rel=1e-5)
    assert value == final and len(set(values)) == (1 if start == final else 6)


def test_curriculum_without_start_has_its_final_value() -> None:
    part = curriculum(None, 0.2)
    part._value.fill_(1.0)
    for _ in range(8):
        part.advance(torch.tensor(1.0))
    assert part.value == 0.2 and not part.on and part._steps == 0


@pytest.mark.parametrize(("saved", "value"), [(0.1, 0.2), (0.6, 0.6), (2.0, 1.0)])
def test_restored_curriculum_value_is_clamped_to_the_range(saved: float, value: float) -> None:
    random = EnvRandom(1, torch.device("cpu"), 0)
    trained, today = ({"part": curriculum(1.0, 0.2)} for _ in range(2))
    trained["part"]._value.fill_(saved)
    owner, other = SimpleNamespace(**trained), SimpleNamespace(**today)
    restore_state(other, random, saved_state(owner, random))
    assert float(today["part"].value) == pytest.approx(value)


# In an environment


def test_commands_and_levels_change_at_episode_end() -> None:
    env = make_env(episode_length=10)
    obs = env.reset()["policy"]
    for _ in range(30):
        task, before = env.task, obs
        assert isinstance(task, Follow)
        step = env.step(torch.zeros(env.num_envs, 1))
        obs = step.obs["policy"]
        assert torch.equal(obs[:, 1:4], task.commands.value)
        assert (obs[step.done, 1] != before[step.done, 1]).all()
        climbed = (before[:, 4] + 1 == obs[:, 4])[step.done & (before[:, 4] < COUNT - 1)]
        assert climbed.all()
        assert torch.equal(before[~step.done, 4], obs[~step.done, 4])


def test_state_dict_restores_commands_ages_and_levels() -> None:
    env, other = make_env(seed=1), make_env(seed=2)
    env.reset()
    other.reset()
    for _ in range(8):
        env.step(torch.ones(env.num_envs, 1))
    names = set(env.task.state_dict()["tensors"])
    assert {"commands.value", "commands._age", "levels.value"} <= names
    other.load_state_dict(saved(env.state_dict()))
    for _ in range(40):
        step, again = (e.step(torch.ones(e.num_envs, 1)) for e in (env, other))
        assert torch.equal(step.obs["policy"], again.obs["policy"])
        assert torch.equal(step.reward, again.reward)
