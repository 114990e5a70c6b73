"""Pushes on robots and objects, by tasks or by domain randomisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpusim_rl.env.draws import LEAST_TO_MOST, Names, Ramp
from gpusim_rl.env.math import quat_rotate, quat_rotate_inverse
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.stateful import Stateful
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.schema import Bounds, Positive, Rule
from gpusim_rl.sim import Articulation, Sim
from gpusim_rl.sim.masks import write_where

Sides = Annotated[tuple[float, ...], Rule("numbers >= 0, not all 0", lambda it: it and min(it) >= 0 < max(it))]
"""Relative frequencies of pushes forward and in evenly spaced directions counter-clockwise, in the heading frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushes(Ramp):
    """Pushes on an articulation, at random times per env."""

    interval_s: Annotated[tuple[float, float], LEAST_TO_MOST]  # between two pushes [s]
    velocity: Annotated[tuple[float, float], LEAST_TO_MOST] | None = None  # horizontal change of root velocity [m/s]
    force: Annotated[tuple[float, float], LEAST_TO_MOST] | None = None  # on each body, in any direction [N]
    duration_s: Positive | None = None  # duration of a force [s]; null = one control step
    bodies: Names | None = None  # bodies that forces act on; null = the root
    sides: Sides | None = None  # of velocity changes; null = any direction

    def __post_init__(self) -> None:
        if (self.velocity is None) == (self.force is None):
            raise ConfigError("expected exactly one of velocity: [min, max] and force: [min, max]")
        if self.velocity is not None and (self.bodies is not None or self.duration_s is not None):
            raise ConfigError("bodies and duration_s require force: velocity pushes act on the root instantly")
        if self.velocity is None and self.sides is not None:
            raise ConfigError("sides requires velocity: forces act in any direction")


class Directions:
    """Random horizontal directions around a robot, with frequencies `sides`."""

    def __init__(self, sides: Sides, robot: Articulation, device: torch.device) -> None:
        self._robot, self._width = robot, 2.0 * math.pi / len(sides)
        shares = torch.tensor([0.0, *sides], device=device, dtype=torch.float64)
        self._ends = (shares.cumsum(dim=0) / shares.sum()).float()
        self._ahead = torch.tensor([[1.0, 0.0, 0.0]], device=device)

    def draw(self, unit: Float[Tensor, " envs"]) -> Float[Tensor, " envs"]:
        """Return angles in the world [rad] for uniform numbers in [0, 1); side i is centred on i / sides of a turn."""
        # A side of frequency 0 has no numbers: of equal ends, `right=True` takes the last.
        side = torch.searchsorted(self._ends, unit.contiguous(), right=True).sub_(1).clamp_(max=len(self._ends) - 2)
        first, last = self._ends[side], self._ends[side + 1]
        ahead = quat_rotate(self._robot.root_quat, self._ahead)
        return (side - 0.5 + (unit - first) / (last - first)) * self._width + torch.atan2(ahead[:, 1], ahead[:, 0])


class PushTimer(Stateful):
    """Countdown `wait` to the next push of each env, in the caller's unit."""

    def __init__(self, wait: Tensor) -> None:
        self.wait = wait

    def due(self, step: float, interval: Tensor) -> Bool[Tensor, " envs"]:
        """Count a control step; return the envs to push now, and restart their countdown at `interval`."""
        self.wait -= step
        return self.restart(interval)

    def restart(self, interval: Tensor) -> Bool[Tensor, " envs"]:
        """Return the envs whose countdown has ended, and restart it at `interval`."""
        due = self.wait <= 0
        write_where(due, interval, self.wait)
        return due


@dataclass(frozen=True, slots=True, kw_only=True)
class PushConfig:
    """Settings of a task's pushes, `task.push`: changes to the root's velocity, world frame."""

    interval: Annotated[tuple[float, float], LEAST_TO_MOST]  # time between two pushes [s]
    lin_vel: Bounds  # maximum along x, y and z [m/s]; with `sides`, x is that of the horizontal change
    ang_vel: Bounds  # maximum about x, y and z [rad/s]
    sides: Sides | None = None  # of horizontal changes; null = as drawn from lin_vel


class RootPushes(PushTimer):
    """Pushes of a task on a robot's root, at random times per env."""

    draws = 7  # random numbers per push, including the time to the next one

    def __init__(self, cfg: PushConfig, robot: Articulation, num: int, dt: float, device: torch.device) -> None:
        super().__init__(torch.zeros(num, device=device))  # s
        self._robot, self._dt = robot, dt
        bounds = [*([-most, most] for most in (*cfg.lin_vel, *cfg.ang_vel)), [*cfg.interval]]
        self._directions = None if cfg.sides is None else Directions(cfg.sides, robot, device)
        if cfg.sides is not None:
            bounds[:2] = [0.0, 1.0], [0.0, cfg.lin_vel[0]]  # number that `Directions` turns into an angle, and size
        self.bounds = torch.tensor(bounds, device=device).T.contiguous()  # of velocity changes and the next interval

    def advance(self, unit: Float[Tensor, "envs 7"]) -> None:
        """Count a control step, and push the envs that are due; `unit`: uniform numbers in [0, 1)."""
        low, high = self.bounds
        self.count()
        self.push(torch.lerp(low, high, unit))

    def count(self) -> None:
        """Count a control step; `push` must follow."""
        self.wait -= self._dt

    def push(self, drawn: Float[Tensor, "envs 7"], axes: Float[Tensor, "envs 3 3"] | None = None) -> None:
        """Push the envs that are due; drawn: numbers within `bounds`; axes: of the root in the world, one per row."""
        lin_vel, ang_vel, interval = drawn.split([3, 3, 1], dim=1)
        robot, due = self._robot, self.restart(interval[:, 0])
        if self._directions is not None:
            unit, size, up = lin_vel.unbind(dim=1)
            angle = self._directions.draw(unit)
            lin_vel = torch.stack([size * angle.cos(), size * angle.sin(), up], dim=1)
        turned = quat_rotate_inverse(robot.root_quat, ang_vel) if axes is None else (axes @ ang_vel[..., None])[..., 0]
        local = robot.root_ang_vel_local + turned
        robot.set_state(due, root_lin_vel=robot.root_lin_vel + lin_vel, root_ang_vel_local=local)


class Pusher(PushTimer):
    """Pushes on one articulation; raises ConfigError if the articulation or a body cannot be pushed."""

    def __init__(self, spec: Pushes, sim: Sim, actor: str, dt: float) -> None:
        super().__init__(torch.zeros(sim.num_envs, dtype=torch.int64, device=sim.device))  # control steps
        self.spec = spec
        self.robot: Articulation = sim.articulation(actor)
        self.gap = [max(1, round(seconds / dt)) for seconds in spec.interval_s]  # between pushes [control steps]
        self.duration = max(1, round((spec.duration_s or dt) / dt))  # control steps
        if spec.velocity is not None:
            if not self.robot.free_root:
                raise ConfigError(f"cannot push {actor!r} by velocity: its base is fixed", hint="Try force")
            self._directions = None if spec.sides is None else Directions(spec.sides, self.robot, sim.device)
            return
        names = spec.bodies or self.robot.body_names[:1]
        self.bodies = self.robot.bodies(names)
        for name in names:
            if sim.scene.model.body(f"{sim.scene.prefix(actor)}{name}").weldid[0] == 0:
                raise ConfigError(f"cannot push {name!r} of {actor!r}: fixed to the world", hint="Try other bodies")
        self.left = torch.zeros_like(self.wait)  # control steps for which the force still acts
        self.force = torch.zeros_like(self.bodies.pos)
        self.held = torch.zeros_like(self.bodies.wrench)  # wrench set by the task

    def begin_episodes(self, random: EnvRandom, where: Bool[Tensor, " envs"]) -> None:
        """Draw the time of the first push and end the current push in the masked envs."""
        new = random.integers(self.gap[0], self.gap[1] + 1)
        torch.where(where, new, self.wait, out=self.wait)
        if self.spec.force is not None:
            self.left.masked_fill_(where, 0)

    def before_physics(self, random: EnvRandom, steps: Int[Tensor, ""]) -> None:
        """Push the envs that are due; `steps`: control steps of the run so far, for the schedule."""
        due = self.due(1, random.integers(self.gap[0], self.gap[1] + 1))
        strength = self.spec.strength(steps)
        if self.spec.velocity is not None:
            angle = random.uniform(-math.pi, math.pi)
            if self._directions is not None:
                angle = self._directions.draw(0.5 + angle / (2.0 * math.pi))
            speed = random.uniform(*self.spec.velocity) * strength
            push = torch.stack([speed * angle.cos(), speed * angle.sin(), torch.zeros_like(speed)], dim=1)
            self.robot.set_state(due, root_lin_vel=self.robot.root_lin_vel + push)
        elif self.spec.force is not None:
            count = self.force.shape[1]
            direction = torch.nn.functional.normalize(random.normal(0.0, 1.0, count, 3), dim=-1)
            new = direction * random.uniform(*self.spec.force, count, 1) * strength
            torch.where(due[:, None, None], new, self.force, out=self.force)
            self.left.masked_fill_(due, self.duration)
            self.held.copy_(self.bodies.wrench)
            force = torch.where((self.left > 0)[:, None, None], self.force, 0.0)
            self.bodies.apply_wrench(self.held[..., :3] + force, self.held[..., 3:])

    def after_physics(self) -> None:
        """Remove the push forces of this step; the task's forces stay."""
        if self.spec.force is not None:
            self.bodies.apply_wrench(self.held[..., :3], self.held[..., 3:])
            self.left -= 1
