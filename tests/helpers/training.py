"""Small runs of the real trainer, and faulty tasks."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpusim_rl.tasks.cartpole import Cartpole, CartpoleConfig
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.api import prepare
from gpusim_rl.distributed import actors
from gpusim_rl.files import checkpoint_file
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.testing import conformance

differences, leaves, same = conformance.differences, conformance.leaves, conformance.same
merged = conformance.merged

OVERFLOWS = {"value_coef": 1e18, "reward_scale": 1e12, "normalize_value": False}
"""PPO settings that make every gradient infinite."""
SMALL_PPO = {"horizon": 8, "epochs": 2, "minibatch_size": 32, "network": {"hidden": [16, 16], "rnn_size": 8}}
# Machine-dependent columns of metrics.csv
MACHINE = ("time/", "speed/", "system/")
PER_CALL = ("/elapsed_s", "/wandb_id", "/config/checkpoint", "/config/log/dir", "/config/trust", "/overrides")
"""Entries of a checkpoint that a resumed run may change."""


def make_trainer(task: type | str, folder: Path, /, config: Any = None, **overrides: Any) -> Trainer:
    """Build a trainer of 8 envs with a small network and runs in `folder`."""
    return actors.make_trainer(small_spec(task, folder, config, **overrides))


def evaluation(task: type | str, folder: Path, /, **overrides: Any) -> dict[str, float]:
    """Return the result of `test=true`."""
    return evaluate_run(small_spec(task, folder, test=True, **overrides))


def small_spec(task: type | str, folder: Path, /, config: Any = None, **overrides: Any) -> RunSpec:
    settings: dict[str, Any] = {"num_envs": 8, "max_iterations": 3, "log": {"console": "quiet"}, "ppo": SMALL_PPO}
    settings = merged(settings, {"log": {"dir": str(folder)}}, overrides)
    return prepare(task, config, **settings)


def the_run(folder: Path) -> Path:
    """Return the only run folder in `folder`."""
    runs = [path.parent for path in folder.glob("*/*/config.yaml") if path.parent.name != "latest"]
    assert len(runs) == 1, runs
    return runs[0]


def read_csv(run: Path, *, machine: bool = False) -> list[dict[str, str]]:
    """Return rows of metrics.csv, without machine-dependent columns unless `machine`."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if machine or not k.startswith(MACHINE)} for row in rows]


def final_state(folder: Path) -> dict[str, Any]:
    """Return the newest checkpoint of the only run in `folder`."""
    return checkpoint_file.load(the_run(folder) / "checkpoints" / "last.pt")


def assert_same_run(whole: Path, resumed: Path, *ignored: str) -> None:
    """Compare checkpoints and metrics of the only runs in two folders."""
    different = differences(final_state(whole), final_state(resumed))
    different = [path for path in different if not path.startswith((*PER_CALL, *ignored))]
    assert different == [], different
    assert read_csv(the_run(whole)) == read_csv(the_run(resumed))


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return settings with one entry, of a dotted name."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyConfig(CartpoleConfig):
    physics_hz: float = 120.0
    control_hz: float = 60.0
    episode_length: int = 500
    clip_actions: float = 1.0
    clip_observations: float | None = 5.0
    randomize_episode_start: bool = True
    discrete: bool = False
    max_force: float = 400.0
    reset_distance: float = 3.0
    death_cost: float = -2.0
    critic: bool = False  # an observation group for the critic
    nan_observation_at: int = -1  # control step; -1 = never
    inf_observation_at: int = -1
    nan_reward_at: int = -1
    huge_reward_at: int = -1
    huge_reward: float = 1e12
    nan_control_at: int = -1
    speed_at: int = -1  # env 1 gets a speed that no simulator survives


class Faulty(Cartpole):
    """Cartpole with an optional critic group, and faults in a chosen control step and env."""

    Config = FaultyConfig
    cfg: FaultyConfig

    def __init__(self, cfg: FaultyConfig, sim: Any) -> None:
        super().__init__(cfg, sim)
        self.steps = torch.zeros((), dtype=torch.int64, device=self.device)
        world = torch.arange(self.num_envs, device=self.device)
        self.victim = world == min(1, self.num_envs - 1)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.steps += 1
        fast = torch.full_like(self.robot.joint_vel, 1e30)
        self.robot.set_state(self.victim & (self.steps == self.cfg.speed_at), joint_vel=fast)
        bad = self.victim & (self.steps == self.cfg.nan_control_at)
        super().apply_action(torch.where(bad[:, None], torch.nan, action))

    def observe(self) -> dict[str, Float[Tensor, "envs _"]]:
        policy = torch.cat([*super().observe()["policy"].values()], dim=1)
        bad = self.victim & (self.steps == self.cfg.nan_observation_at)
        policy = torch.where(bad[:, None], torch.nan, policy)
        infinite = self.victim & (self.steps == self.cfg.inf_observation_at)
        policy = torch.where(infinite[:, None], torch.inf, policy)
        if not self.cfg.critic:
            return {"policy": policy}
        return {"policy": policy, "critic": torch.cat([policy, policy.square()], dim=1)}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        terms = super().rewards()
        bad = self.victim & (self.steps == self.cfg.nan_reward_at)
        huge = self.victim & (self.steps == self.cfg.huge_reward_at)
        return {
            name: torch.where(bad, torch.nan, torch.where(huge, self.cfg.huge_reward, term))
            for name, term in terms.items()
        }


class Broken(Faulty):
    """Task in which all envs diverge in every step."""

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        everywhere = torch.ones_like(self.victim)
        self.robot.set_state(everywhere, joint_vel=torch.full_like(self.robot.joint_vel, 1e30))
        super().apply_action(action)


class Uncontrolled(Faulty):
    """Task whose controls are always NaN."""

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        super().apply_action(action * torch.nan)


class Schooled(Cartpole):
    """Cartpole whose envs rise a level with each step."""

    Config = FaultyConfig

    def __init__(self, cfg: FaultyConfig, sim: Any) -> None:
        super().__init__(cfg, sim)
        self.steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self.level = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    def advance(self, done: Tensor) -> None:
        self.steps += 1
        self.level += torch.arange(self.num_envs, device=self.device)


def schooled_params() -> dict[str, Any]:
    """Return settings of a `Schooled` whose observations get noisier over 100 control steps."""
    noise = {"range": [0.0, 0.1], "operation": "additive", "distribution": "gaussian"}
    noise |= {"schedule": "linear", "schedule_steps": 100}
    return {"randomize": True, "randomization_params": {"observations": noise}}


def shake(file: Path) -> None:
    """Give a checkpoint's last layers large weights, so that actions depend on observations."""
    state = checkpoint_file.load(file)
    generator = torch.Generator().manual_seed(0)
    last = ("head.mean.weight", "head.logits.weight", "actor.head.weight", "critic.head.weight")
    for name in last:
        if (value := state["policy"].get(name)) is not None:
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    checkpoint_file.save(file, {key: value for key, value in state.items() if key not in ("format", "gpusim_rl")})
