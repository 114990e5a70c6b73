"""The base class of every task: six short methods, always in this order, on tensors of all envs at once."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from gpusim_rl.env.environment import Environment, Parts
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.stateful import restore_state, saved_state
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.load_class import load_class
from gpusim_rl.settings.schema import Count, Fraction, Positive, Rule
from gpusim_rl.sim import Scene, Sim

MOST_SUBSTEPS = 10_000
"""Physics steps per action. The simulator takes them in one call, which neither Ctrl-C nor a signal ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetFromConfig:
    """Settings of resets from states that episodes have reached (`gpusim_rl.env.reached_states`)."""

    share: Fraction = 0.0
    """Part of the resets that begin from a state which an episode has reached; 0 = none."""
    capacity: Count = 4096
    """States that are kept; the newest replace the oldest."""
    chance: Annotated[float, Rule("a number in (0, 1]", lambda value: 0.0 < value <= 1.0)] = 0.05
    """Probability that a state which is worth keeping is kept, per env and control step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Settings that every task has; their values are in the task's yaml."""

    physics_hz: Positive
    """Physics steps per simulated second [Hz]."""
    control_hz: Positive
    """Actions per simulated second [Hz]; must divide physics_hz."""
    episode_length: Count
    """Time limit [control steps]."""
    clip_actions: Positive
    """Actions are clamped to [-clip_actions, clip_actions] before the task sees them."""
    clip_observations: Positive | None
    """Observations are clamped to [-clip_observations, clip_observations]; null = not clamped. What is infinite becomes
    NaN, so that it is noticed."""
    randomize_episode_start: bool
    """Whether first episodes start at random points of their time limit. Short horizons then see whole episodes."""
    randomize: bool = False
    """Whether `randomization_params` is applied."""
    randomization_params: dict[str, Any] = field(default_factory=dict)
    """Which properties of the envs are random, and how: docs/randomization.md."""
    reset_from: ResetFromConfig = field(default_factory=ResetFromConfig)
    """Resets from states that episodes have reached."""
    observations: dict[str, Any] = field(default_factory=dict)
    """Noise, delay and history of named parts of the policy's observation: docs/add_a_task.md."""

    def __post_init__(self) -> None:
        if self.physics_hz / self.control_hz > MOST_SUBSTEPS:
            raise ConfigError(
                f"task.physics_hz must be at most {MOST_SUBSTEPS} times task.control_hz, got {self.physics_hz} and"
                f" {self.control_hz}; try control_hz={self.physics_hz / MOST_SUBSTEPS:g}"
            )
        if abs(self.decimation * self.control_hz - self.physics_hz) > 1e-6 * self.physics_hz or self.decimation < 1:
            raise ConfigError(
                f"task.physics_hz must be a whole multiple of task.control_hz, got {self.physics_hz} and"
                f" {self.control_hz}; try physics_hz={max(1, self.decimation) * self.control_hz:g}"
            )

    def whole_episodes(self: Cfg) -> Cfg:
        """Returns these settings for an evaluation: all episodes are whole, and begin as the task says."""
        return dataclasses.replace(self, randomize_episode_start=False, reset_from=ResetFromConfig())

    @property
    def decimation(self) -> int:
        """Physics steps per action."""
        return round(self.physics_hz / self.control_hz)


def control_steps(seconds: float, dt: float) -> int:
    """Returns the control steps of `dt` [s] in a time [s]: at least one, and no more than a tensor can count."""
    return max(1, round(min(seconds / dt, 2.0**62)))


Cfg = TypeVar("Cfg", bound=TaskConfig)


class Task(ABC, Generic[Cfg]):
    """An MDP over `num_envs` envs.

    Subclasses define `Config` (a frozen dataclass with one field per value of the task's yaml) and the methods below.
    In one control step `VecEnv` calls them in the order

        apply_action -> physics -> rewards -> terminated -> advance -> observe -> reset(where it ended) -> observe

    Hooks work on whole tensors with masks: no Python loop over envs, no `.item()`, no `if` on tensor data. A tensor
    that lives longer than one step is an attribute of the task or of a `Stateful` object. It is made once in `__init__`
    and written in place (`copy_`): a CUDA graph then uses the same memory, and a checkpoint saves it.

    Attributes:
        cfg: The task's configuration.
        sim: The simulator; use its articulations.
        num_envs: Number of envs.
        device: Device of all tensors.
        dt: Control step [s].
        random: Random numbers, one stream per env. It gets the run's seed after `__init__`: draw from it in `reset`.
        actions: Clamped actions of the current step, shape [num_envs, num_actions]; zero after a reset. VecEnv writes
            them. Discrete ones are indices, int64. They are the policy's choice: with `cfg.randomize`, `apply_action`
            may get them late and noisy.
        progress: Control steps since the (staggered) start of each episode, int64 [num_envs]. VecEnv writes it.
    """

    Config: ClassVar[type[TaskConfig]]
    """Class of the task's configuration."""

    num_actions: int
    """Size of the action vector; set in `__init__`."""
    choices: Sequence[int] | None = None
    """Of discrete actions the options of each choice, `num_actions` counts; None where actions are continuous."""
    units: ClassVar[Mapping[str, str]] = {}
    """Units of the named parts of the observation, before `scales`; `-` where a part has none."""
    sources: ClassVar[Mapping[str, str]] = {}
    """Where a robot gets named parts from, in the words of docs/export.md. Without them only the task can compute a
    part."""
    errors_of_envs: ClassVar[tuple[str, ...]] = ()
    """Attributes with errors of sensors and drives that each env has for itself: controls are exported without them."""
    scales: Mapping[str, float] = {}
    """Factors by which named parts of the observation are multiplied; 1 for the others. Set in `__init__`."""
    mirrors: ClassVar[Mapping[str, Any]] = {}
    """Kinds of the named parts of the observation, for their mirror images: docs/add_a_task.md#mirror-images."""

    def __init__(self, cfg: Cfg, sim: Sim) -> None:
        """Makes what every task has. Subclasses call it first, then look up bodies and joints by name."""
        self.cfg = cfg
        self.sim = sim
        self.num_envs = sim.num_envs
        self.device = sim.device
        self.dt = cfg.decimation * sim.dt
        self.random = EnvRandom(sim.num_envs, sim.device)
        self.actions: Shaped[Tensor, "envs actions"] = torch.zeros(sim.num_envs, 0, device=sim.device)
        self.progress: Int[Tensor, " envs"] = torch.zeros(sim.num_envs, dtype=torch.int64, device=sim.device)

    @classmethod
    @abstractmethod
    def scene(cls, cfg: Cfg) -> Scene:
        """Describes what one env contains."""

    @abstractmethod
    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        """Writes a random initial state into some envs; they are in the scene's default state before.

        Args:
            where: Envs to write, bool [num_envs].
        """

    @abstractmethod
    def apply_action(self, action: Shaped[Tensor, "envs actions"]) -> None:
        """Sets the controls (targets, torques, forces) for all physics steps of this control step.

        Args:
            action: Clamped actions, shape [num_envs, num_actions]; int64 where the task has `choices`.
        """

    @abstractmethod
    def observe(self) -> Float[Tensor, "envs obs"] | Mapping[str, Tensor | Parts]:
        """Returns the observation of every env, shape [num_envs, size].

        A dict has the group `policy`, and optionally `critic`: then the critic sees other numbers than the policy
        (asymmetric actor-critic). A group of numbers is a tensor, or a dict of its named parts, [num_envs, size] each.
        VecEnv multiplies parts by their `scales`, and joins them in their order. Of the policy's parts
        `cfg.observations` can say noise, delay and history.

        Images are groups of their own, uint8 [num_envs, height, width, channels], beside a group `critic`:
        docs/vision.md.

        VecEnv calls it twice per control step, before and after resets: it must not change any state.
        """

    @abstractmethod
    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        """Returns the named terms of the reward, shape [num_envs] each. The reward is their sum; each term is logged.

        VecEnv calls it once per control step.
        """

    @abstractmethod
    def terminated(self) -> Bool[Tensor, " envs"]:
        """Returns the envs whose episode ended in failure or success, bool [num_envs]; VecEnv adds the time limit."""

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        """Updates what changes in time beside the physics: goals, commands, curricula, pushes. Optional.

        VecEnv calls it once per control step, after the rewards and before the next observation. If it calls
        `set_state`, body poses and velocities follow only after the resets. So the observation at the end of this step
        (`final_obs`) has the old poses, and the observation to act on has the new ones. Sensors show the last physics
        step in both; they are zero in envs that have just been reset.

        Args:
            done: Envs whose episode has just ended, bool [num_envs]. They are still in their last state; VecEnv resets
                them next.
        """

    def worth_keeping(self) -> Bool[Tensor, " envs"]:
        """Returns the envs whose state may be the start of another episode, bool [num_envs]. Optional; all by default.

        VecEnv calls it once per control step where `cfg.reset_from.share` is above 0.
        """
        return torch.ones_like(self.progress, dtype=torch.bool)

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        """Returns numbers to log as `task/<name>`, shape [num_envs] each: levels, errors, successes. Optional.

        VecEnv calls it once per control step, after `advance` and before resets. The log has the mean over envs and
        steps. NaN means that an env has no value in this step.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of all tensors of the task (see `kept_tensors`), and the state of its random streams."""
        return saved_state(self, self.random)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores in place what `state_dict` returned."""
        restore_state(self, self.random, state)


def load_task_class(target: Any) -> type[Task[Any]]:
    """Imports the subclass of `Task` that `task._target_` names, for example `gpusim_rl.tasks.ant.Ant`.

    Raises:
        ConfigError: There is no such class, or it is not a subclass of `Task`.
    """
    cls = load_task_or_environment(target)
    if issubclass(cls, Environment):
        raise ConfigError(
            f"{target}: envs of another library are trained, evaluated (test=true), played and recorded. They cannot be"
            " replayed or handed on from here"
        )
    return cls


def load_task_or_environment(target: Any) -> type[Any]:
    """Does as `load_task_class`; or imports a subclass of `Environment`, the envs of another library."""
    return load_class(target, (Task, Environment), "task._target_", "gpusim_rl.tasks.ant.Ant")
