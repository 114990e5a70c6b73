"""Base class of tasks: six short methods in a fixed order, on tensors of all envs."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from gpusim_rl.env.environment import Environment, Terms
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.stateful import restore_state, saved_state
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.load_class import load_class
from gpusim_rl.settings.schema import Count, Fraction, Positive, Rule
from gpusim_rl.sim import Scene, Sim
from gpusim_rl.sim.drives import with_drives

MOST_SUBSTEPS = 10_000
"""Maximum physics steps per action. They run in one simulator call, which signals cannot interrupt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetFromConfig:
    """Settings of resets to states that earlier episodes reached."""

    share: Fraction = 0.0  # fraction of resets that start from a reached state; 0 = none
    capacity: Count = 4096  # number of stored states; the newest replace the oldest
    chance: Annotated[float, Rule("a number in (0, 1]", lambda value: 0.0 < value <= 1.0)] = 0.05  # of storing a state


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Settings of every task; their values are in the task's yaml."""

    physics_hz: Positive  # physics steps per simulated second [Hz]
    control_hz: Positive  # actions per simulated second [Hz]; must divide physics_hz
    episode_length: Count  # time limit [control steps]
    clip_actions: Positive  # actions are clamped to [-clip_actions, clip_actions] before the task sees them
    clip_observations: Positive | None  # limit of observations; infinity becomes NaN; null = no limit
    randomize_episode_start: bool  # first episodes start with a random elapsed time, to stagger time-outs
    randomize: bool = False  # whether `randomization_params` is applied
    randomization_params: dict[str, Any] = field(default_factory=dict)  # docs/randomization.md
    reset_from: ResetFromConfig = field(default_factory=ResetFromConfig)  # resets to reached states
    observations: dict[str, Any] = field(default_factory=dict)  # sensors of observation terms: docs/add_a_task.md
    drives: dict[str, Any] | None = None  # identified drives: docs/robot.md; see `gpusim_rl.sim.drives`

    def __post_init__(self) -> None:
        physics, control, expected, hint = self.physics_hz, self.control_hz, "", ""
        if physics / control > MOST_SUBSTEPS:
            expected, hint = f"at most {MOST_SUBSTEPS} times", f"Try task.control_hz={physics / MOST_SUBSTEPS:g}"
        elif abs(self.decimation * control - physics) > 1e-6 * physics or self.decimation < 1:
            expected, hint = "an integer multiple of", f"Try task.physics_hz={max(1, self.decimation) * control:g}"
        if expected:
            expected += f" task.control_hz={control:g}"
            raise ConfigError(key="task.physics_hz", expected=expected, got=physics, hint=hint)

    def whole_episodes(self: Cfg) -> Cfg:
        """Return a copy of the settings for an evaluation: whole episodes from the task's own initial states."""
        return dataclasses.replace(self, randomize_episode_start=False, reset_from=ResetFromConfig())

    @property
    def decimation(self) -> int:
        """Physics steps per action."""
        return round(self.physics_hz / self.control_hz)


def control_steps(seconds: float, dt: float) -> int:
    """Convert a time [s] to control steps of `dt` [s], at least 1."""
    return max(1, round(min(seconds / dt, 2.0**62)))


Cfg = TypeVar("Cfg", bound=TaskConfig)


class Task(ABC, Generic[Cfg]):
    """MDP over `num_envs` envs.

    Subclasses define `Config`, a frozen dataclass with one field per value of the task's yaml, and these methods.
    `VecEnv` calls them in every control step in this order:

        apply_action -> physics -> rewards -> terminated -> advance -> stats -> observe -> reset(where done) -> observe

    Hooks work on whole tensors with masks: no loop over envs, no `.item()`, no `if` on tensor data. Tensors that
    outlive a step are attributes of the task or of a `Stateful` object, allocated in `__init__` and written in place
    (`copy_`), so that CUDA graphs find them and checkpoints save them.

    Attributes:
        cfg: Settings of the task.
        sim: Simulator; use its articulations.
        num_envs: Number of envs.
        device: Device of all tensors.
        dt: Control step [s].
        random: Random numbers, one stream per env, seeded after `__init__`: draw in `reset`.
        actions: The policy's clamped actions, [num_envs, num_actions]; int64 indices if discrete; zero after a reset.
        progress: Control steps since the (staggered) start of each episode, int64 [num_envs].
    """

    Config: ClassVar[type[TaskConfig]]  # class of the task's settings
    num_actions: int  # size of the action vector; set in `__init__`
    choices: Sequence[int] | None = None  # options of each discrete action; None = continuous actions
    units: ClassVar[Mapping[str, str]] = {}  # of observation terms before `scales`; `-` = dimensionless
    sources: ClassVar[Mapping[str, str]] = {}  # where a robot gets observation terms: docs/export.md
    per_env_errors: ClassVar[tuple[str, ...]] = ()  # attributes with per-env sensor or drive errors; exports omit them
    scales: Mapping[str, float] = {}  # factors on observation terms, default 1; set in `__init__`
    mirrors: ClassVar[Mapping[str, Any]] = {}  # kinds of terms in the mirror image: docs/add_a_task.md#mirror-images

    def __init__(self, cfg: Cfg, sim: Sim) -> None:
        """Set the common attributes. Subclasses call it first, then look up bodies and joints by name."""
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
        """Return the scene of one env."""

    @classmethod
    def built_scene(cls, cfg: Cfg) -> Scene:
        """Return the scene of one env, with the drives of `cfg.drives`."""
        return with_drives(cls.scene(cfg), cfg.drives)

    @abstractmethod
    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        """Write random initial states into the masked envs, bool [num_envs], over the scene's default state."""

    @abstractmethod
    def apply_action(self, action: Shaped[Tensor, "envs actions"]) -> None:
        """Set targets, torques or forces for this control step; `cfg.randomize` may delay the actions and add noise."""

    @abstractmethod
    def observe(self) -> Float[Tensor, "envs obs"] | Mapping[str, Tensor | Terms]:
        """Return the observation, shape [num_envs, size], or a dict of groups.

        Groups are `policy`, and optionally `critic` for an asymmetric critic: a tensor, or a dict of named terms,
        [num_envs, size] each. VecEnv scales and concatenates terms in order; `cfg.observations` adds noise, delay and
        history to the policy's terms. Images are separate groups, uint8 [num_envs, height, width, channels], and
        require `critic`: docs/vision.md.

        Called before and after the resets of a control step: it must not change any state.
        """

    @abstractmethod
    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        """Return named reward terms, shape [num_envs] each; their sum is the reward."""

    @abstractmethod
    def terminated(self) -> Bool[Tensor, " envs"]:
        """Return the envs whose episode ended in failure or success, bool [num_envs]; VecEnv adds the time limit."""

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        """Update what changes over time outside the physics: goals, commands, curricula, pushes. Optional.

        Called once per control step, after the rewards. After a `set_state` here, body poses and velocities update only
        with the resets: `final_obs` has the old poses; the observation to act on has the new poses. Sensors show the
        last physics step in both; they are zero in envs that have just been reset.

        Args:
            done: Envs whose episode has just ended, bool [num_envs]; still in their last state.
        """

    def worth_keeping(self) -> Bool[Tensor, " envs"]:
        """Return the envs whose state may become an initial state (`cfg.reset_from`), bool [num_envs]; default all."""
        return torch.ones_like(self.progress, dtype=torch.bool)

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        """Return values to log as `task/<name>`, shape [num_envs] each; the mean is logged, ignoring NaN. Optional."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the task's tensors (`kept_tensors`) and its random streams."""
        return saved_state(self, self.random)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` in place."""
        restore_state(self, self.random, state)


def load_task_or_environment(target: Any) -> type[Any]:
    """Import a subclass of `Task`, or of `Environment` for the envs of another library."""
    return load_class(target, (Task, Environment), "task._target_", "gpusim_rl.tasks.ant.Ant")
