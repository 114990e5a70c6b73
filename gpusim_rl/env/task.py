"""The template that a task subclasses: six short methods, always in this order, on tensors of all envs at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpusim_rl.discover import load_class
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.errors import ConfigError
from gpusim_rl.sim import Scene, Sim


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """What every task has; values stand in the task's yaml."""

    physics_hz: float
    """Physics steps per simulated second [Hz]."""
    control_hz: float
    """Actions per simulated second [Hz]; must divide physics_hz."""
    episode_length: int
    """Time limit [control steps]."""
    clip_actions: float
    """Actions are clamped to [-clip_actions, clip_actions] before the task sees them."""
    clip_observations: float | None
    """Observations are clamped to this magnitude; null for none."""
    randomize_episode_start: bool
    """Envs begin at random points of their time limit, so that short horizons see all of an episode."""
    randomize: bool = False
    """Do what `randomization_params` says."""
    randomization_params: dict[str, Any] = field(default_factory=dict)
    """Which properties of the envs are random, and how; see docs/randomization.md."""

    def __post_init__(self) -> None:
        """Checks the relations between the values.

        Raises:
            ConfigError: A value is out of its range.
        """
        for key in ("physics_hz", "control_hz", "episode_length", "clip_actions"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"task.{key} must be positive, got {getattr(self, key)}")
        if abs(self.decimation * self.control_hz - self.physics_hz) > 1e-6 * self.physics_hz or self.decimation < 1:
            raise ConfigError(
                f"task.physics_hz must be a whole multiple of task.control_hz, got {self.physics_hz} and"
                f" {self.control_hz}; try physics_hz={max(1, self.decimation) * self.control_hz:g}"
            )

    @property
    def decimation(self) -> int:
        """Physics steps per action."""
        return round(self.physics_hz / self.control_hz)


Cfg = TypeVar("Cfg", bound=TaskConfig)


class TaskPart:
    """A piece of a task with tensors of its own (commands, a curriculum): what it keeps is saved with the task."""


class Task(ABC, Generic[Cfg]):
    """An MDP over `num_envs` envs.

    Subclasses define `Config` (a frozen dataclass with one field per value of the task's yaml) and the methods below.
    In one control step `VecEnv` calls them in the order

        apply_action -> physics -> rewards -> terminated -> advance -> observe -> reset(where it ended) -> observe

    Hooks work on whole tensors with masks: no Python loop over envs, no `.item()`, no `if` on tensor data. A tensor
    that must outlive a step is an attribute, or one of a `TaskPart`, made once in `__init__` and written in place
    (`copy_`), so that a CUDA graph can own it and a checkpoint can save it.

    Attributes:
        cfg: The task's configuration.
        sim: The simulator; use its articulations.
        actions: The action of the current step, clipped, shape [num_envs, num_actions]; zero after a reset. Kept by
            VecEnv. It is what the policy chose: with `randomize`, `apply_action` may get it late and noisy.
        progress: Control steps since the (staggered) start of each episode, int64 [num_envs]; kept by VecEnv.
        random: Random numbers, one stream per env. It gets the run's seed after `__init__`: draw from it in `reset`.
        dt: Control step [s].
    """

    Config: ClassVar[type[TaskConfig]]

    num_actions: int
    """Size of the action vector; set in `__init__`."""

    def __init__(self, cfg: Cfg, sim: Sim) -> None:
        """Looks up names once; subclasses call this first."""
        self.cfg = cfg
        self.sim = sim
        self.num_envs = sim.num_envs
        self.device = sim.device
        self.dt = cfg.decimation * sim.dt
        self.random = EnvRandom(sim.num_envs, sim.device)
        self.actions: Float[Tensor, "envs actions"] = torch.zeros(sim.num_envs, 0, device=sim.device)
        self.progress: Int[Tensor, " envs"] = torch.zeros(sim.num_envs, dtype=torch.int64, device=sim.device)

    @classmethod
    @abstractmethod
    def scene(cls, cfg: Cfg) -> Scene:
        """What one env contains."""

    @abstractmethod
    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        """Writes a randomised initial state into the envs of the mask, which are at the scene's default state."""

    @abstractmethod
    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        """Turns the clipped action into controls; they hold for all physics steps of the control step."""

    @abstractmethod
    def observe(self) -> Float[Tensor, "envs obs"] | dict[str, Float[Tensor, "envs _"]]:
        """The observation of every env: a tensor, or a dict with the group `policy` and, if there is one, `critic`.

        A critic with a group of its own makes the actor-critic asymmetric. `observe` is called twice in a control step
        (before and after resets): it must change nothing.
        """

    @abstractmethod
    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        """The named terms of the reward; the reward is their sum, and each is logged. Called once per control step."""

    @abstractmethod
    def terminated(self) -> Bool[Tensor, " envs"]:
        """Envs whose episode ended in failure or success; the time limit belongs to VecEnv."""

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        """Moves on what changes in time beside the physics: goals, commands, curricula, pushes. Optional.

        Called once per control step, after the rewards and before the next observation. Body poses and velocities
        follow a `set_state` in here only after the resets: the observation at the end of this step (`final_obs`) still
        has those of before, the one to act on has the new. Sensors tell of the last physics step in both, and are zero
        in envs that have just been reset.

        Args:
            done: Envs whose episode has just ended; they still are in their last state, and will be reset next.
        """

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        """Numbers worth a curve beside the reward, logged as `task/<name>`: levels, errors, successes. Optional.

        Called once per control step, after `advance` and before resets. The log shows the mean over envs and steps;
        NaN stands for an env that has nothing to tell in this step.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Every tensor that the task keeps (also in dicts, lists, tuples and parts), and its random streams."""
        return {"tensors": {k: v.clone() for k, v in self._own_tensors().items()}, "random": self.random.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict` in place."""
        own = self._own_tensors()
        for name, value in state["tensors"].items():
            own[name].copy_(value)
        self.random.load_state_dict(state["random"])

    def _own_tensors(self) -> dict[str, Tensor]:
        return dict(kept_tensors(vars(self)))


def kept_tensors(node: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested dicts, lists, tuples and parts, by path; without expanded views, which nothing can write."""
    if isinstance(node, Tensor):
        if all(stride > 0 or size <= 1 for stride, size in zip(node.stride(), node.shape, strict=True)):
            yield path, node
    elif isinstance(node, TaskPart):
        yield from kept_tensors(vars(node), path)
    elif isinstance(node, (dict, list, tuple)):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from kept_tensors(item, f"{path}.{key}" if path else str(key))


def load_task_class(target: Any) -> type[Task[Any]]:
    """Import the Task subclass that `task._target_` names, e.g. `gpusim_rl.tasks.ant.Ant`.

    Raises:
        ConfigError: There is no such class, or it is no Task.
    """
    return load_class(target, Task, "task._target_", "gpusim_rl.tasks.ant.Ant")
