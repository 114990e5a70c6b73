"""Task components: commands, per-env curriculum levels, and a curriculum for a single setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpusim_rl.env.stateful import Stateful
from gpusim_rl.env.task import Task, control_steps
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import Count, Fraction, Limits, Natural, Positive, Rule
from gpusim_rl.sim.masks import write_result, write_where

LEAST_FORWARD = 0.3  # minimum speed of a forward command [m/s]


@runtime_checkable
class Steerable(Protocol):
    """Commands that a user can override with sliders in the browser viewer; `value`: shape [num_envs, num_commands]."""

    value: Float[Tensor, "envs commands"]

    def controls(self) -> dict[str, tuple[float, float]]:
        """Return the range (low, high) of each command, by its name and unit, e.g. `x [m/s]`."""
        ...

    def hold(self, where: Bool[Tensor, " envs"], value: Float[Tensor, "... commands"]) -> None:
        """Set the commands in the masked envs until the task draws new ones; call it after each control step."""


def steerable(task: Task[Any]) -> Steerable | None:
    """Return a task's steerable commands, or None."""
    return next((part for part in vars(task).values() if isinstance(part, Steerable)), None)


class Commands(Stateful):
    """Named commands, drawn uniformly for each env.

    Args:
        task: Task whose random numbers are used.
        ranges: Range (low, high) of each command, by name.
        interval: Time between two draws [s]; None = drawn only by `resample`.
        units: Unit of each command, for the viewer.

    Attributes:
        value: The commands, shape [num_envs, num_commands], in the order of `ranges`; zero until `resample`.

    Example:
        self.commands = Commands(self, {"speed": (0.0, 2.0), "turn": (-1.0, 1.0)}, interval=10.0)  # in __init__
        self.commands.resample(where)  # in reset
        self.commands.advance()  # in advance
    """

    def __init__(
        self,
        task: Task[Any],
        ranges: Mapping[str, Sequence[float]],
        *,
        interval: float | None = None,
        units: Mapping[str, str] | None = None,
    ) -> None:
        for name, limits in ranges.items():
            if len(limits) != 2 or limits[0] > limits[1]:
                raise ConfigError(key=f"command {name!r}", expected="[low, high] with low <= high", got=list(limits))
        if interval is not None and interval < task.dt:
            raise ConfigError(key="commands.interval", expected=f"at least one step ({task.dt:g} s)", got=interval)
        self.names = list(ranges)
        self._units = dict(units or {})
        self._random = task.random
        self._low, high = torch.tensor(list(ranges.values()), device=task.device).float().unbind(dim=1)
        self._span = high - self._low
        self._interval = None if interval is None else control_steps(interval, task.dt)
        self._age = torch.zeros(task.num_envs, dtype=torch.int64, device=task.device)  # control steps since the draw
        self.value: Float[Tensor, "envs commands"] = torch.zeros(task.num_envs, len(ranges), device=task.device)

    @property
    def limits(self) -> Float[Tensor, "2 commands"]:
        """Minimum and maximum of each command."""
        return torch.stack([self._low, self._low + self._span])

    def __getitem__(self, name: str) -> Float[Tensor, " envs"]:
        """Return a view of one command, shape [num_envs]."""
        return self.value[:, self.names.index(name)]

    def resample(self, where: Bool[Tensor, " envs"], unit: Float[Tensor, "envs commands"] | None = None) -> None:
        """Draw new commands in the masked envs; `unit`: uniform numbers in [0, 1) to use instead of new ones."""
        if unit is None:
            unit = self._random.uniform(0.0, 1.0, len(self.names))
        self.hold(where, unit.mul(self._span).add_(self._low))

    def controls(self) -> dict[str, tuple[float, float]]:
        """Return the range of each command; see `Steerable`."""
        labels = [f"{name} [{self._units[name]}]" if name in self._units else name for name in self.names]
        return dict(zip(labels, zip(*self.limits.tolist(), strict=True), strict=True))

    def hold(self, where: Bool[Tensor, " envs"], value: Float[Tensor, "... commands"]) -> None:
        """Set the commands in the masked envs; see `Steerable`."""
        torch.where(where[:, None], value, self.value, out=self.value)
        self._age.masked_fill_(where, 0)

    def advance(self) -> None:
        """Count a control step, and draw new commands where the interval has elapsed."""
        if self._interval is not None:
            self._age += 1
            self.resample(self._age >= self._interval)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandStage:
    """Command ranges from control step `steps` on; null keeps the range of the previous stage."""

    steps: Natural
    x: Limits | None = None
    y: Limits | None = None
    yaw: Limits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandConfig:
    """Settings of `VelocityCommands`: the `task.command` section."""

    x: Limits  # m/s
    y: Limits  # m/s
    yaw: Limits  # rad/s
    interval: Limits  # time between two draws [s]
    standing: Fraction  # fraction of zero commands
    heading: Fraction  # fraction of commands with heading control
    forward: Fraction  # fraction of commands straight ahead
    heading_gain: float  # yaw rate / heading error [1/s]
    stages: list[dict[str, Any]]  # later ranges: see `CommandStage`
    stage_error: float | None = None  # maximum error [m/s] of steps that count towards stages; null = all count

    def __post_init__(self) -> None:
        steps = [stage.steps for stage in self.read_stages()]
        if steps != sorted(steps):
            raise ConfigError(key="task.command.stages", expected="steps in ascending order", got=steps)

    def read_stages(self) -> list[CommandStage]:
        """Parse `stages`; raise ConfigError for an unknown key or a wrong value."""
        key = "task.command.stages"
        return [build(CommandStage, stage, f"{key}[{number}]") for number, stage in enumerate(self.stages)]


class VelocityCommands(Commands):
    """Velocity commands in a walking robot's frame: x, y [m/s], yaw rate [rad/s]. Some track a heading or are zero."""

    draws = 8  # random numbers per draw

    def __init__(self, task: Task[Any], cfg: CommandConfig) -> None:
        ranges = {"x": cfg.x, "y": cfg.y, "yaw": cfg.yaw}
        super().__init__(task, ranges, units={"x": "m/s", "y": "m/s", "yaw": "rad/s"})
        num, device, rows = task.num_envs, task.device, []
        self._gain, self._dt, self._stage_error = cfg.heading_gain, task.dt, cfg.stage_error
        stages, kinds = cfg.read_stages(), [[-share, 1.0 - share] for share in (cfg.standing, cfg.heading, cfg.forward)]
        for stage in (None, *stages):
            ranges |= {name: getattr(stage, name) for name in ranges if getattr(stage, name, None) is not None}
            rows.append([*ranges.values(), [-math.pi, math.pi], cfg.interval, *kinds])
        self._stages = torch.tensor(rows, device=device).transpose(1, 2).contiguous()  # low and high per stage
        self._begins = torch.tensor([stage.steps for stage in stages], dtype=torch.int64, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)  # control steps counted towards stages
        self._range = self._stages[:1].clone()  # of the current stage
        self._forward = torch.tensor([[LEAST_FORWARD, 0.0, 0.0], [math.inf, 0.0, 0.0]], device=device)  # ahead alone
        self._state = torch.zeros(num, 8, device=device)
        self._drawn = self._state[:, :5]  # x, y, yaw rate, heading [rad, world], time left [s]
        self._kinds = self._state[:, 5:]  # below 0: standing, heading control, forward
        self.yaw = torch.zeros(num, device=device)  # yaw of the robots [rad]; written by `face` and by the task's reset

    @property
    def limits(self) -> Float[Tensor, "2 commands"]:
        """Minimum and maximum of each command in the current stage."""
        return self._range[0, :, :3]

    def restored(self) -> None:
        """Use the ranges of the current settings, not the checkpoint's."""
        self._set_stage()

    def hold(self, where: Bool[Tensor, " envs"], value: Float[Tensor, "... commands"]) -> None:
        """Set the commands in the masked envs, and draw new ones after the shortest interval."""
        write_where(where[:, None], value, self._drawn[:, :3])
        self._drawn[:, 4] = torch.where(where, self._range[0, 0, 4], self._drawn[:, 4])
        self._kinds.masked_fill_(where[:, None], 1.0)
        self._follow()

    def resample(self, where: Bool[Tensor, " envs"], unit: Float[Tensor, "envs 8"] | None = None) -> None:
        """Draw new commands in the masked envs and in those that are due, and apply heading control."""
        self._draw(where | (self._drawn[:, 4] <= 0.0), unit)

    def face(self, ahead: Float[Tensor, "envs 3"]) -> None:
        """Set the robots' yaw by their x axes in the world, for heading control."""
        write_result(self.yaw, torch.atan2, ahead[:, 1], ahead[:, 0])

    def advance(self, unit: Float[Tensor, "envs 8"] | None = None, error: Float[Tensor, " envs"] | None = None) -> None:
        """Count a step and draw due commands; see `count`."""
        self.count(error)
        self._draw(self._drawn[:, 4] <= 0.0, unit)

    def count(self, error: Float[Tensor, " envs"] | None = None) -> None:
        """Count a step; stages advance only while mean `error` [m/s] is small (legged_gym). `resample` must follow."""
        counts = self._stage_error is None or error is None or error.mean() <= self._stage_error
        self._steps += counts
        self._set_stage()
        self._drawn[:, 4].sub_(self._dt)

    def _set_stage(self) -> None:
        torch.index_select(self._stages, 0, torch.bucketize(self._steps, self._begins, right=True), out=self._range)

    def _draw(self, where: Bool[Tensor, " envs"], unit: Float[Tensor, "envs 8"] | None) -> None:
        unit = self._random.uniform(0.0, 1.0, self.draws) if unit is None else unit
        low, high = self._range[0]
        torch.where(where[:, None], torch.lerp(low, high, unit), self._state, out=self._state)
        self._follow()

    def _follow(self) -> None:
        """Apply heading control, turn forward commands ahead, and zero the standing commands."""
        (low, high), velocity = self._range[0, :, 2], self._drawn[:, :3]
        turn = torch.remainder(self._drawn[:, 3] - self.yaw + math.pi, 2.0 * math.pi)  # pi + the heading error
        rate = torch.rsub(turn, -math.pi * self._gain, alpha=-self._gain).clamp_(low, high)
        standing, heading, forward = (self._kinds < 0.0).split(1, dim=1)
        torch.where(forward, velocity.abs().clamp_(*self._forward), velocity, out=self.value)
        write_where(heading[:, 0], rate, self.value[:, 2])
        self.value.masked_fill_(standing, 0.0)


class Levels(Stateful):
    """Curriculum level of each env, int64 `value` in [0, count): up after success, down after failure.

    After success at the highest level an env moves to a random level, so that the policy does not forget easier ones
    (Rudin et al. 2021, Learning to Walk in Minutes, arXiv 2109.11978, section 3). `initial` levels are clamped.
    """

    def __init__(self, task: Task[Any], count: int, *, initial: Int[Tensor, " envs"]) -> None:
        self.count = count
        self._random = task.random
        self.value = initial.to(task.device, torch.int64).clamp(0, count - 1)

    def move(self, *, up: Bool[Tensor, " envs"], down: Bool[Tensor, " envs"]) -> None:
        """Move masked envs one level up (from the highest: to a random level) or down; envs in both masks stay."""
        level = (self.value + up).add_(down, alpha=-1).clamp_(min=0)
        torch.where(level < self.count, level, self._random.integers(0, self.count), out=self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumConfig:
    """Settings of a `Curriculum`."""

    start: Positive | None  # initial value; null = no curriculum
    factor: Annotated[float, Rule("a number in (0, 1)", lambda x: 0.0 < x < 1.0)]  # multiplier; divisor if value grows
    threshold: Positive  # minimum mean score for a change of the value
    window: Count  # control steps over which scores are averaged


class Curriculum(Stateful):
    """Task setting, shared by all envs, that gets harder as the policy succeeds.

    After each `window` control steps the value moves by `factor` towards `final` if the mean score was at least
    `threshold`. Petrenko et al. 2023 (DexPBT, arXiv 2305.12127) narrow a goal's tolerance in this way, Akkaya et al.
    2019 (arXiv 1910.07113) widen a cube's randomisation. Without `cfg.start` the value is always `final`.
    """

    def __init__(self, task: Task[Any], cfg: CurriculumConfig, *, final: float) -> None:
        self._cfg, self._final = cfg, final
        start = final if cfg.start is None else cfg.start
        self._low, self._high = min(start, final), max(start, final)
        self._factor = cfg.factor if start > final else 1.0 / cfg.factor
        self._value = torch.full((), start, device=task.device)
        self._total = torch.zeros((), device=task.device)  # sum of scores in this window
        self._steps = torch.zeros((), dtype=torch.int64, device=task.device)  # control steps of this window

    def restored(self) -> None:
        """Clamp the value to the current range, because the checkpoint may have had another final value."""
        self._value.clamp_(self._low, self._high)

    @property
    def on(self) -> bool:
        """True if the curriculum is enabled."""
        return self._cfg.start is not None

    @property
    def value(self) -> Float[Tensor, ""] | float:
        """Current value: a tensor, or `final` without a curriculum."""
        return self._value if self.on else self._final

    def advance(self, score: Float[Tensor, ""]) -> None:
        """Count a control step with a score (mean over envs); move the value at the end of a successful window."""
        if not self.on:
            return
        self._total += score
        self._steps += 1
        over = self._steps >= self._cfg.window
        passed = over & (self._total >= self._cfg.threshold * self._cfg.window)
        harder = (self._value * self._factor).clamp_(self._low, self._high)
        torch.where(passed, harder, self._value, out=self._value)
        self._total.masked_fill_(over, 0.0)
        self._steps.masked_fill_(over, 0)
