"""Domain randomisation: envs that differ in physics, observations and actions, in IsaacGymEnvs' yaml schema.

docs/randomization.md explains the schema. Every draw is made for all envs at once, and a mask selects the envs that
keep it. All state is in tensors on the device: a captured CUDA graph continues to draw, and a checkpoint saves it all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import mujoco
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from gpusim_rl.env.properties import NOT_HERE, SECTIONS, Actor, Quantity
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.task import TaskPart, kept_tensors
from gpusim_rl.errors import ConfigError, TaskError, did_you_mean
from gpusim_rl.settings.checks import build, plain
from gpusim_rl.settings.schema import Count, NotNegative, Positive
from gpusim_rl.sim import Articulation, Sim
from gpusim_rl.sim.params import GROUND

logger = logging.getLogger(__name__)

PATH = "task.randomization_params"
_SEED_OFFSET = 1 << 32  # other streams than the task's, whose seeds are smaller

T = TypeVar("T")


# The schema. Names and meanings are those of IsaacGymEnvs. Docstrings that begin with "Ours" mark our extensions.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """How the strength of a randomisation grows with the control steps of the run."""

    schedule: Literal["linear", "constant"] | None = None
    """`linear`: strength from 0 to 1 over `schedule_steps`. `constant`: 0 before them, then 1. null: always 1."""
    schedule_steps: Count | None = None
    """Length of the schedule [control steps]."""

    def __post_init__(self) -> None:
        """Checks that both keys are set, or none.

        Raises:
            ConfigError: Only one of them is set.
        """
        if (self.schedule is None) != (self.schedule_steps is None):
            raise ConfigError("schedule and schedule_steps need each other: give both, or none")

    def strength(self, steps: Tensor) -> Tensor | float:
        """Returns the strength after this many control steps, from 0 (nothing is randomised) to 1."""
        if self.schedule is None or self.schedule_steps is None:
            return 1.0
        if self.schedule == "linear":
            return (steps / self.schedule_steps).clamp(max=1.0)
        return (steps >= self.schedule_steps).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(Ramp):
    """A distribution of draws, and how a draw changes a value."""

    range: tuple[float, float]
    """Lower and upper bound; of `gaussian` mean and standard deviation."""
    operation: Literal["additive", "scaling"]
    """A draw is added to the value, or multiplies it."""
    distribution: Literal["uniform", "loguniform", "gaussian"]
    """Distribution of the draws."""

    def __post_init__(self) -> None:
        """Checks the range.

        Raises:
            ConfigError: The distribution cannot have this range.
        """
        Ramp.__post_init__(self)
        self.check(self.range)

    def check(self, bounds: tuple[float, float]) -> None:
        """Checks a range.

        Raises:
            ConfigError: The distribution cannot have this range.
        """
        low, high = bounds
        if self.distribution == "gaussian" and high < 0:
            raise ConfigError(f"range of gaussian is [mean, standard deviation], got the standard deviation {high:g}")
        if self.distribution != "gaussian" and low > high:
            raise ConfigError(f"range must be [low, high], got [{low:g}, {high:g}]")
        if self.distribution == "loguniform" and low <= 0:
            raise ConfigError(f"range of loguniform must be positive, got [{low:g}, {high:g}]")

    @property
    def affine(self) -> tuple[float, float]:
        """Offset and factor that make a draw of a random number; of `loguniform` they make the draw's logarithm.

        The number is standard normal for `gaussian`, else uniform from [0, 1).
        """
        low, high = self.range
        if self.distribution == "loguniform":
            return math.log(low), math.log(high / low)
        return (low, high) if self.distribution == "gaussian" else (low, high - low)

    def apply(self, value: Tensor, draw: Tensor, steps: Tensor) -> Tensor:
        """Returns the value with the draw added, or multiplied by it.

        The strength after this many control steps scales the effect. At 0.5 half of the draw is added, or the factor is
        halfway from 1 to the draw.
        """
        changed = value + draw if self.operation == "additive" else value * draw
        return changed if self.schedule is None else torch.lerp(value, changed, self.strength(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(Draw):
    """Noise on observations or actions: white noise in every control step, plus an offset for a whole episode."""

    range_correlated: tuple[float, float] | None = None
    """Range of the offset, as `range`; null = no offset."""

    def __post_init__(self) -> None:
        """Checks both ranges.

        Raises:
            ConfigError: The distribution cannot have one of the ranges.
        """
        Draw.__post_init__(self)
        if self.range_correlated is not None:
            self.check(self.range_correlated)


def _check_names(key: str, names: list[str] | None) -> None:
    if names == []:
        raise ConfigError(f"{key} is empty; leave it out for the default")
    for name in names or []:
        if (names or []).count(name) > 1:
            raise ConfigError(f"{key} must be different, got {name!r} more than once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Property(Draw):
    """A physical property. Each body, joint or shape gets its own draw, relative to the model's value."""

    setup_only: bool = False
    """Drawn once, when the environment is made. It has full strength then: a schedule does not apply."""
    interval_s: Positive | None = None
    """Ours: time between two draws [s]; null = drawn at resets."""
    names: list[str] | None = None
    """Ours: the bodies (mass, shapes), joints or tendons that are randomised; null = all."""
    num_buckets: Count | None = None
    """Accepted and ignored: PhysX has a limited number of materials, MuJoCo has not."""

    def __post_init__(self) -> None:
        """Checks the range, the names and the moments of the draws.

        Raises:
            ConfigError: A value is wrong, or two values exclude each other.
        """
        Draw.__post_init__(self)
        _check_names("names", self.names)
        if self.setup_only and self.interval_s is not None:
            raise ConfigError("setup_only and interval_s exclude each other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Ours: actions reach the task late. The delay is drawn for each episode."""

    range: tuple[int, int]
    """Least and most delay [control steps]."""

    def __post_init__(self) -> None:
        """Checks the range.

        Raises:
            ConfigError: The range is wrong.
        """
        if not 0 <= self.range[0] <= self.range[1]:
            raise ConfigError(f"range must be [least, most] control steps, got {list(self.range)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushes(Ramp):
    """Ours: pushes on an articulation, at random moments that differ between envs."""

    interval_s: tuple[Positive, Positive]
    """Least and most time between two pushes [s]."""
    velocity: tuple[NotNegative, NotNegative] | None = None
    """Change of the root's horizontal velocity, in any direction [m/s]."""
    force: tuple[NotNegative, NotNegative] | None = None
    """Force on each of the bodies, in any direction [N]."""
    duration_s: Positive | None = None
    """Duration of a force [s]; null = one control step."""
    bodies: list[str] | None = None
    """Bodies that forces act on; null = the root."""

    def __post_init__(self) -> None:
        """Checks the values, and that either a velocity or a force is given.

        Raises:
            ConfigError: A value is wrong, or two values exclude each other.
        """
        _check_names("bodies", self.bodies)
        if (self.velocity is None) == (self.force is None):
            raise ConfigError("pushes need either velocity: [least, most] or force: [least, most]")
        if self.velocity is not None and (self.bodies is not None or self.duration_s is not None):
            raise ConfigError("pushes by velocity act on the root at once; bodies and duration_s are for force")
        for least, most in (self.interval_s, self.velocity or self.force or (0.0, 0.0)):
            if least > most:
                raise ConfigError(f"pushes: expected [least, most], got [{least:g}, {most:g}]")


class _Draws:
    """Draws of several distributions, made from one call of the random numbers.

    Args:
        device: Device of the draws.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._specs: list[Draw] = []
        self._sizes: list[int] = []
        self._low = self._span = torch.empty(0, device=device)
        self._places: list[slice] = []
        self._pairs, self._uniform = 0, 0  # of Gaussian numbers; uniform numbers

    def add(self, spec: Draw, size: int) -> int:
        """Adds `size` numbers per env to the draws, and returns their place in what `draw` returns."""
        self._specs.append(spec)
        self._sizes.append(size)
        self._pairs = (self._count("gaussian") + 1) // 2
        self._uniform = sum(self._sizes) - self._count("gaussian")
        low, span = torch.zeros(2, 2 * self._pairs + self._uniform).unbind()
        next_place = {True: 0, False: 2 * self._pairs}  # Gaussian numbers first
        self._places.clear()
        for one, count in zip(self._specs, self._sizes, strict=True):
            gaussian = one.distribution == "gaussian"
            place = slice(next_place[gaussian], next_place[gaussian] + count)
            next_place[gaussian] = place.stop
            self._places.append(place)
            low[place], span[place] = one.affine
        self._low, self._span = low.to(self._device), span.to(self._device)
        return len(self._places) - 1

    def _count(self, distribution: str) -> int:
        pairs = zip(self._specs, self._sizes, strict=True)
        return sum(size for spec, size in pairs if spec.distribution == distribution)

    def draw(self, random: EnvRandom) -> list[Float[Tensor, "envs size"]]:
        """Returns new draws, shape [num_envs, size] for each call of `add`."""
        if not self._specs:
            return []
        raw = random.uniform(0.0, 1.0, 2 * self._pairs + self._uniform)
        if self._pairs:
            # both numbers of each pair of Box and Muller's method: half the cost of `EnvRandom.normal`
            u, v, uniform = raw.split([self._pairs, self._pairs, self._uniform], dim=1)
            radius, angle = torch.log1p(-u).mul_(-2.0).sqrt_(), 2.0 * math.pi * v
            raw = torch.cat([radius * angle.cos(), radius * angle.sin(), uniform], dim=1)
        draws = torch.addcmul(self._low, raw, self._span)
        parts = [draws[:, place] for place in self._places]
        for spec, part in zip(self._specs, parts, strict=True):
            if spec.distribution == "loguniform":
                part.exp_()
        return parts


# Noise, latency and pushes


class _Noise(TaskPart):
    def __init__(
        self, spec: Noise, num_envs: int, size: int, device: torch.device, *, per_step: _Draws, per_episode: _Draws
    ) -> None:
        self.spec = spec
        self.white = torch.zeros(num_envs, size, device=device)
        self.correlated = torch.zeros(num_envs, size, device=device)
        self._white_part = per_step.add(spec, size)
        self._offset_part: int | None = None
        if spec.range_correlated is not None:
            self._offset_part = per_episode.add(replace(spec, range=spec.range_correlated), size)

    def step(self, draws: list[Tensor]) -> None:
        self.white.copy_(draws[self._white_part])

    def reset(self, draws: list[Tensor], where: Bool[Tensor, " envs"]) -> None:
        if self._offset_part is not None:
            torch.where(where[:, None], draws[self._offset_part], self.correlated, out=self.correlated)

    def apply(self, value: Float[Tensor, "envs size"], steps: Tensor) -> Float[Tensor, "envs size"]:
        noise = self.white if self._offset_part is None else self.white + self.correlated
        return self.spec.apply(value, noise, steps)


class _Latency(TaskPart):
    def __init__(self, spec: Latency, num_envs: int, num_actions: int, device: torch.device) -> None:
        self.spec = spec
        self.queue = torch.zeros(num_envs, spec.range[1] + 1, num_actions, device=device)  # the newest first
        self.delay = torch.zeros(num_envs, dtype=torch.int64, device=device)  # control steps

    def reset(self, random: EnvRandom, where: Bool[Tensor, " envs"]) -> None:
        new = random.integers(self.spec.range[0], self.spec.range[1] + 1)
        torch.where(where, new, self.delay, out=self.delay)
        self.queue.masked_fill_(where[:, None, None], 0.0)

    def apply(self, action: Float[Tensor, "envs actions"]) -> Float[Tensor, "envs actions"]:
        self.queue.copy_(torch.cat([action[:, None], self.queue[:, :-1]], dim=1))
        late = self.delay[:, None, None].expand(-1, 1, action.shape[1])
        return self.queue.gather(1, late)[:, 0]


class _Pushes(TaskPart):
    def __init__(self, spec: Pushes, sim: Sim, actor: str, dt: float) -> None:
        self.spec = spec
        self.robot: Articulation = sim.articulation(actor)
        self.gap = [max(1, round(seconds / dt)) for seconds in spec.interval_s]  # control steps
        self.duration = max(1, round((spec.duration_s or dt) / dt))  # control steps
        self.wait = torch.zeros(sim.num_envs, dtype=torch.int64, device=sim.device)  # control steps until the next push
        root = sim.scene.model.body(sim.scene.bodies_of(actor)[0])
        if spec.velocity is not None:
            free = int(root.jntnum[0]) and sim.scene.model.jnt_type[root.jntadr[0]] == mujoco.mjtJoint.mjJNT_FREE.value
            if not free:
                raise ConfigError(f"{actor!r} has a fixed base: a push cannot change its velocity; try force")
            return
        names = spec.bodies or self.robot.body_names[:1]
        self.bodies = self.robot.bodies(names)
        for name in names:
            if sim.scene.model.body(f"{sim.scene.prefix(actor)}{name}").weldid[0] == 0:
                raise ConfigError(f"{name!r} of {actor!r} is fixed to the world: no force moves it; try other bodies")
        self.left = torch.zeros_like(self.wait)  # control steps that the force will still act
        self.force = torch.zeros_like(self.bodies.pos)
        self.held = torch.zeros_like(self.bodies.wrench)  # the wrench that the task has set

    def reset(self, random: EnvRandom, where: Bool[Tensor, " envs"]) -> None:
        new = random.integers(self.gap[0], self.gap[1] + 1)
        torch.where(where, new, self.wait, out=self.wait)
        if self.spec.force is not None:
            self.left.masked_fill_(where, 0)

    def before_physics(self, random: EnvRandom, steps: Tensor) -> None:
        self.wait -= 1
        due = self.wait <= 0
        torch.where(due, random.integers(self.gap[0], self.gap[1] + 1), self.wait, out=self.wait)
        strength = self.spec.strength(steps)
        if self.spec.velocity is not None:
            angle = random.uniform(-math.pi, math.pi)
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
        if self.spec.force is not None:
            self.bodies.apply_wrench(self.held[..., :3], self.held[..., 3:])
            self.left -= 1


class _Group:
    """Properties that are drawn at the same moments.

    Args:
        draws: What they are drawn from; others may draw from it too.
    """

    def __init__(self, draws: _Draws) -> None:
        self.draws = draws
        self.parts: list[tuple[Property, Quantity, int]] = []

    def add(self, spec: Property, quantity: Quantity) -> None:
        self.parts.append((spec, quantity, self.draws.add(spec, quantity.default.numel())))

    def write(self, draws: list[Tensor], steps: Tensor, where: Bool[Tensor, " envs"]) -> None:
        for spec, quantity, part in self.parts:
            draw = draws[part].unflatten(1, quantity.default.shape)
            value = spec.apply(quantity.default, draw, steps)
            if quantity.low is not None or quantity.high is not None:
                value = value.clamp(quantity.low, quantity.high)  # type: ignore[arg-type]
            quantity.write(value, where)


class Randomizer(TaskPart):
    """Randomises physics, observations and actions as `task.randomization_params` says. `VecEnv` owns and calls it.

    Physical properties are drawn when it is made. Later each env draws them again at its resets, at intervals, or
    never. A draw is always relative to the model's values.

    Args:
        params: The section of the task's yaml.
        sim: The simulator. Each env gets its own copy of every parameter that is randomised.
        num_actions: Size of the action vector.
        dt: Control step [s].
        clip_actions: Limit of actions with noise.
        seed: Seed of all draws; the task's own random numbers are not affected.

    Raises:
        ConfigError: The section is wrong, or names something that does not exist; the message has the key's path.

    Attributes:
        steps: Control steps of the run so far, int64, shape []; schedules count them.
        age: Control steps since the properties of an env were drawn at a reset, int64 [num_envs].
    """

    def __init__(
        self, params: Mapping[str, Any], sim: Sim, *, num_actions: int, dt: float, clip_actions: float, seed: int
    ) -> None:
        num_envs, device = sim.num_envs, sim.device
        self._sim, self._dt, self._clip = sim, dt, clip_actions
        self._params = plain(params)
        self._random = EnvRandom(num_envs, device, seed + _SEED_OFFSET)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.age = torch.zeros(num_envs, dtype=torch.int64, device=device)

        _check_keys(params, PATH, _TOP)
        self._frequency = _frequency(params)
        self._observations = _parse(Noise, params, "observations", PATH)
        actions, latency = _parse(Noise, params, "actions", PATH), _parse(Latency, params, "latency", PATH)
        self.observation_noise: _Noise | None = None  # made by `start`, which knows the size
        self._per_step, self._per_episode = _Draws(device), _Draws(device)
        self.action_noise = None if actions is None else self._noise(actions, num_actions)
        self.latency = None if latency is None else _Latency(latency, num_envs, num_actions, device)
        self.pushes: list[_Pushes] = []
        self.actors: dict[str, Actor] = {}
        self._at_setup, self._at_reset = _Group(_Draws(device)), _Group(self._per_episode)
        self._at_interval: dict[int, _Group] = {}  # by control steps
        self._add_sim_params(_section(params, "sim_params", PATH))
        actors = _section(params, "actor_params", PATH)
        for name in actors:
            self._add_actor(name, _section(actors, name, f"{PATH}.actor_params"), f"{PATH}.actor_params.{name}")

        noise = (self._observations, self.action_noise, self.latency)
        groups = (self._at_setup, self._at_reset, *self._at_interval.values())
        if all(part is None for part in noise) and not self.pushes and not any(group.parts for group in groups):
            raise ConfigError(
                f"task.randomize=true, but {PATH} has nothing to randomise; try observations, actions, or"
                f" actor_params.{sim.scene.articulation_names[0]}"
            )

        # A random phase per env, so that envs do not draw in the same control step.
        self.phases = {steps: self._random.integers(0, steps) for steps in self._at_interval}
        self._draw_properties()

    # What VecEnv calls

    def seed(self, seed: int) -> None:
        """Begins all draws anew."""
        self._random.seed(seed + _SEED_OFFSET)

    def start(self, num_obs: int) -> None:
        """Draws the first observation noise; VecEnv calls it in `reset`.

        Args:
            num_obs: Size of the policy's observation.
        """
        if self._observations is not None:
            if self.observation_noise is None:
                self.observation_noise = self._noise(self._observations, num_obs)
            self.observation_noise.step(self._per_step.draw(self._random))

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        """Draws what is random per episode.

        Args:
            where: Envs where an episode begins, bool [num_envs].
        """
        due = where & (self.age >= self._frequency)
        draws = self._per_episode.draw(self._random)
        self._at_reset.write(draws, self.steps, due)
        self.age.masked_fill_(due, 0)
        for noise in (self.observation_noise, self.action_noise):
            if noise is not None:
                noise.reset(draws, where)
        for part in (self.latency, *self.pushes):
            if part is not None:
                part.reset(self._random, where)

    def act(self, action: Shaped[Tensor, "envs actions"]) -> Shaped[Tensor, "envs actions"]:
        """Returns the actions that the task gets, shape [num_envs, num_actions]: late, noisy, within the limits.

        VecEnv calls it once per control step. It draws the noise of the whole step, that of its observations too.
        """
        draws = self._per_step.draw(self._random)
        for noise in (self.observation_noise, self.action_noise):
            if noise is not None:
                noise.step(draws)
        if self.latency is not None:
            action = self.latency.apply(action)
        if self.action_noise is not None:
            action = self.action_noise.apply(action, self.steps).clamp(-self._clip, self._clip)
        return action

    def before_physics(self) -> None:
        """Applies pushes, and draws the properties whose interval is over."""
        for interval, group in self._at_interval.items():
            due = (self.steps + self.phases[interval]) % interval == 0
            group.write(group.draws.draw(self._random), self.steps, due)
        for pushes in self.pushes:
            pushes.before_physics(self._random, self.steps)

    def after_physics(self) -> None:
        """Removes the forces of this step."""
        for pushes in self.pushes:
            pushes.after_physics()
        self.steps += 1
        self.age += 1

    def observe(self, policy: Float[Tensor, "envs obs"]) -> Float[Tensor, "envs obs"]:
        """Returns the policy's observation with the noise of this step, shape [num_envs, size].

        A second call in the same step adds the same noise.
        """
        return policy if self.observation_noise is None else self.observation_noise.apply(policy, self.steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next draws depend on. The simulator saves the parameters that were drawn."""
        tensors = {name: value.clone() for name, value in kept_tensors(vars(self))}
        return {"params": self._params, "tensors": tensors, "random": self._random.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores in place what `state_dict` returned.

        If it was saved with other `randomization_params`, properties are drawn again and schedules continue.
        """
        self._random.load_state_dict(state["random"])
        if state["params"] != self._params:
            self.begin_from(state)
            self.reset(torch.ones_like(self.age, dtype=torch.bool))
            return
        for name, value in kept_tensors(vars(self)):
            saved = state["tensors"].get(name)
            if saved is not None and saved.shape == value.shape:
                value.copy_(saved)

    def begin_from(self, state: dict[str, Any]) -> None:
        """Continues the schedules of another run's `state_dict`, and draws properties at their present strength."""
        self.steps.copy_(state["tensors"]["steps"])
        self._draw_properties()

    def _draw_properties(self) -> None:
        everywhere = torch.ones_like(self.age, dtype=torch.bool)
        for group in (self._at_setup, self._at_reset, *self._at_interval.values()):
            group.write(group.draws.draw(self._random), self.steps, everywhere)
        self.age.zero_()

    # Building

    def _noise(self, spec: Noise, size: int) -> _Noise:
        num_envs, device = self._sim.num_envs, self._sim.device
        return _Noise(spec, num_envs, size, device, per_step=self._per_step, per_episode=self._per_episode)

    def _add_sim_params(self, node: Mapping[str, Any]) -> None:
        path = f"{PATH}.sim_params"
        _check_keys(node, path, ("gravity",))
        spec = _parse(Property, node, "gravity", path)
        if spec is not None:
            gravity = self._sim.param("gravity")
            self._add(spec, [Quantity(gravity.default, gravity.set)], f"{path}.gravity")

    def _add_actor(self, name: str, node: Mapping[str, Any], path: str) -> None:
        known = self._sim.scene.articulation_names
        if name not in (*known, GROUND):
            raise ConfigError(f"{path}: the scene has no {name!r}.{did_you_mean(name, known)} It has {known}")
        _check_keys(node, path, ("color", "pushes", *SECTIONS) if name in known else ("rigid_shape_properties",))
        if node.get("color"):
            logger.info("%s.color has no effect: it is not physical, and pictures show the model's own colours", path)
        self.actors[name] = actor = Actor(self._sim, name)
        pushes = _parse(Pushes, node, "pushes", path)
        if pushes is not None:
            with _at(f"{path}.pushes"):
                self.pushes.append(_Pushes(pushes, self._sim, name, self._dt))
        for section, properties in SECTIONS.items():
            wanted = _section(node, section, path)
            _check_keys(wanted, f"{path}.{section}", properties)
            for key in wanted:
                spec = _parse(Property, wanted, key, f"{path}.{section}")
                assert spec is not None
                with _at(f"{path}.{section}.{key}"):
                    quantities = actor.quantities(section, key, spec.names)
                self._add(spec, quantities, f"{path}.{section}.{key}")

    def _add(self, spec: Property, quantities: list[Quantity], path: str) -> None:
        if spec.operation == "scaling":
            quantities = [quantity for quantity in quantities if quantity.default.count_nonzero()]
            if not quantities:
                logger.warning(
                    "%s has no effect: it scales, and the model's values are 0; try operation: additive", path
                )
        group = self._at_reset
        if spec.setup_only:
            group = self._at_setup
            spec = replace(spec, schedule=None, schedule_steps=None)
        elif spec.interval_s is not None:
            group = self._at_interval.setdefault(
                max(1, round(spec.interval_s / self._dt)), _Group(_Draws(self._sim.device))
            )
        for quantity in quantities:
            group.add(spec, quantity)


_TOP = ("frequency", "observations", "actions", "latency", "sim_params", "actor_params")


def _frequency(params: Mapping[str, Any]) -> int:
    frequency = params.get("frequency", 1)
    if not isinstance(frequency, int) or isinstance(frequency, bool) or frequency < 1:
        raise ConfigError(f"{PATH}.frequency must be a positive int [control steps], got {frequency!r}")
    return frequency


def _section(node: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    section = node.get(key)
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"{path}.{key} must be a section with keys of its own, got {section!r}")
    return section or {}


def _check_keys(node: Mapping[str, Any], path: str, known: Iterable[str]) -> None:
    known = list(known)
    for key in node:
        if key not in known and key in NOT_HERE:
            raise ConfigError(f"{path}.{key}: {NOT_HERE[key]}")
        if key not in known:
            raise ConfigError(f"unknown key '{path}.{key}'.{did_you_mean(key, known)} There are {', '.join(known)}")


def _parse(cls: type[T], node: Mapping[str, Any], key: str, path: str) -> T | None:
    if node.get(key) is None:
        return None
    with _at(f"{path}.{key}"):
        return build(cls, node[key], f"{path}.{key}")


@contextmanager
def _at(path: str) -> Iterator[None]:
    """Adds the key's path in the yaml to errors."""
    try:
        yield
    except (ConfigError, TaskError) as error:
        if path in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from None
