"""Domain randomisation in IsaacGymEnvs' yaml schema (docs/randomization.md); masked draws, for graph capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from gpusim_rl.env.draws import LEAST_TO_MOST, Draw, Draws, Names, Noise, VectorNoise, named, parse
from gpusim_rl.env.properties import PICTURES, SECTIONS, UNSUPPORTED, ActorProperties, Quantity, scene_quantity
from gpusim_rl.env.pushes import Pusher, Pushes
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.stateful import SeededDraws, Stateful
from gpusim_rl.env.task import control_steps
from gpusim_rl.errors import ConfigError, available
from gpusim_rl.settings.checks import plain
from gpusim_rl.settings.schema import Count, Positive
from gpusim_rl.sim import Sim
from gpusim_rl.sim.params import GROUND

T = TypeVar("T")

logger = logging.getLogger(__name__)

PATH = "task.randomization_params"
_KEYS = ("frequency", "observations", "actions", "latency", "sim_params", "actor_params", "picture_params")

# Schema: names and meanings match IsaacGymEnvs; comments that begin with "ours" mark our extensions.


@dataclass(frozen=True, slots=True, kw_only=True)
class Property(Draw):
    """Randomised physical property. Each body, joint or shape gets its own draw, relative to the model's value."""

    setup_only: bool = False  # drawn once, when the environment is built, at full strength: no schedule applies
    interval_s: Positive | None = None  # ours: time between two draws [s]; null = drawn at resets
    names: Names | None = None  # ours: bodies (mass, shapes), joints or tendons to randomise; null = all
    num_buckets: Count | None = None  # ignored: PhysX limits the number of materials, MuJoCo does not

    def __post_init__(self) -> None:
        Draw.__post_init__(self)
        if self.setup_only and self.interval_s is not None:
            raise ConfigError("setup_only and interval_s are mutually exclusive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Delay of actions, drawn for each episode (our extension)."""

    range: Annotated[tuple[int, int], LEAST_TO_MOST]  # minimum and maximum delay [control steps]


class _ActionQueue(Stateful):
    def __init__(self, spec: Latency, num_envs: int, num_actions: int, device: torch.device) -> None:
        self.spec = spec
        self.queue = torch.zeros(num_envs, spec.range[1] + 1, num_actions, device=device)  # the newest first
        self.delay = torch.zeros(num_envs, dtype=torch.int64, device=device)  # control steps

    def begin_episodes(self, random: EnvRandom, where: Bool[Tensor, " envs"]) -> None:
        new = random.integers(self.spec.range[0], self.spec.range[1] + 1)
        torch.where(where, new, self.delay, out=self.delay)
        self.queue.masked_fill_(where[:, None, None], 0.0)

    def apply(self, action: Float[Tensor, "envs actions"]) -> Float[Tensor, "envs actions"]:
        self.queue.copy_(torch.cat([action[:, None], self.queue[:, :-1]], dim=1))
        late = self.delay[:, None, None].expand(-1, 1, action.shape[1])
        return self.queue.gather(1, late)[:, 0]


class _Group:
    """Group of properties that are drawn at the same times."""

    def __init__(self, properties: Sequence[tuple[Property, Quantity]], device: torch.device) -> None:
        self._properties = properties
        self._sizes = [quantity.default.numel() for _, quantity in properties]
        specs = [spec for (spec, _), size in zip(properties, self._sizes, strict=True) for _ in range(size)]
        self._draws = Draws(specs, device)

    def draw(self, random: EnvRandom, steps: Tensor, where: Bool[Tensor, " envs"]) -> None:
        if not self._properties:
            return
        draws = self._draws.draw(random).split(self._sizes, dim=1)
        for (spec, quantity), draw in zip(self._properties, draws, strict=True):
            value = spec.apply(quantity.default, draw.unflatten(1, quantity.default.shape), steps)
            if quantity.low is not None or quantity.high is not None:
                value = value.clamp(quantity.low, quantity.high)  # type: ignore[arg-type]
            quantity.write(value, where)


class Randomizer(SeededDraws, Stateful):
    """Randomisation of physics and actions by `task.randomization_params`, called by `VecEnv`.

    Physical properties are drawn at construction, then again at resets, at intervals, or never; always relative to
    the model's values. Invalid sections and unknown names raise ConfigError with the full key.
    """

    _stream = 1 << 32  # seeds of tasks are smaller
    _key = "params"

    def __init__(
        self, params: Mapping[str, Any], sim: Sim, *, num_actions: int, dt: float, clip_actions: float, seed: int
    ) -> None:
        num_envs, device = sim.num_envs, sim.device
        self._sim, self._dt, self._clip = sim, dt, clip_actions
        self.params = self._settings = plain(params)
        self._random = EnvRandom(num_envs, device, seed + self._stream)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # control steps of the run, for schedules
        self.age = torch.zeros(num_envs, dtype=torch.int64, device=device)  # control steps since the last reset draw
        _check_keys(params, PATH, _KEYS)
        self._frequency = params.get("frequency", 1)
        if type(self._frequency) is not int or self._frequency < 1:
            raise ConfigError(key=f"{PATH}.frequency", expected="a positive int [control steps]", got=self._frequency)
        self.observations = _parse(Noise, params, "observations", PATH)  # applied by `SensorModel`
        noise, latency = _parse(Noise, params, "actions", PATH), _parse(Latency, params, "latency", PATH)
        self.action_noise = None if noise is None else VectorNoise([noise] * num_actions, num_envs, device)
        self.latency = None if latency is None else _ActionQueue(latency, num_envs, num_actions, device)
        self.pushes: list[Pusher] = []
        self.actors: dict[str, ActorProperties] = {}
        at_setup: list[tuple[Property, Quantity]] = []
        at_reset: list[tuple[Property, Quantity]] = []
        at_interval: dict[int, list[tuple[Property, Quantity]]] = {}  # by control steps
        for spec, quantities, path in self._declared(params):
            if spec.setup_only:
                spec, group = replace(spec, schedule=None, schedule_steps=None), at_setup
            elif spec.interval_s is None:
                group = at_reset
            else:
                group = at_interval.setdefault(control_steps(spec.interval_s, dt), [])
            group.extend((spec, quantity) for quantity in _effective(spec, quantities, path))
        if not any((self.observations, noise, latency, self.pushes, at_setup, at_reset, *at_interval.values())):
            hint = f"Add observations, actions, or actor_params.{sim.scene.articulation_names[0]}"
            raise ConfigError("nothing to randomise, although task.randomize=true", key=PATH, hint=hint)
        self._at_setup, self._at_reset = _Group(at_setup, device), _Group(at_reset, device)
        self._at_interval = {steps: _Group(properties, device) for steps, properties in at_interval.items()}
        # Random phases spread the draws of envs over control steps.
        self.phases = {steps: self._random.integers(0, steps) for steps in self._at_interval}
        self._draw_properties()
        self._draw_step()

    def begin_episodes(self, where: Bool[Tensor, " envs"]) -> None:
        """Draw per-episode values in the masked envs, bool [num_envs]."""
        due = where & (self.age >= self._frequency)
        self._at_reset.draw(self._random, self.steps, due)
        self.age.masked_fill_(due, 0)
        if self.action_noise is not None:
            self.action_noise.begin_episodes(self.steps, where)
        for term in (self.latency, *self.pushes):
            if term is not None:
                term.begin_episodes(self._random, where)

    def act(self, action: Shaped[Tensor, "envs actions"]) -> Shaped[Tensor, "envs actions"]:
        """Return the delayed, noisy and clamped actions for the task."""
        if self.latency is not None:
            action = self.latency.apply(action)
        if self.action_noise is not None:
            self._draw_step()
            action = self.action_noise.apply(action).clamp(-self._clip, self._clip)
        return action

    def before_physics(self) -> None:
        """Apply pushes, and draw the properties whose interval has elapsed."""
        for interval, group in self._at_interval.items():
            group.draw(self._random, self.steps, (self.steps + self.phases[interval]) % interval == 0)
        for pushes in self.pushes:
            pushes.before_physics(self._random, self.steps)

    def after_physics(self) -> None:
        """Remove the push forces of this step, and count the step."""
        for pushes in self.pushes:
            pushes.after_physics()
        self.steps += 1
        self.age += 1

    def _redraw(self, state: Mapping[str, Any]) -> None:
        self.begin_from(state)
        self.begin_episodes(torch.ones_like(self.age, dtype=torch.bool))

    def begin_from(self, state: Mapping[str, Any]) -> None:
        """Continue the schedules of another run's `state_dict`, and draw properties at the scheduled strength."""
        self.steps.copy_(state["tensors"]["steps"])
        self._draw_properties()

    def _draw_step(self) -> None:
        if self.action_noise is not None:
            self.action_noise.draw(self._random, self.steps)

    def _draw_properties(self) -> None:
        everywhere = torch.ones_like(self.age, dtype=torch.bool)
        for group in (self._at_setup, self._at_reset, *self._at_interval.values()):
            group.draw(self._random, self.steps, everywhere)
        self.age.zero_()

    def _declared(self, params: Mapping[str, Any]) -> Iterator[tuple[Property, list[Quantity], str]]:
        """Yield the properties of the yaml: settings, quantities, key path. Also create the pushes."""
        sim = self._sim
        scene = {name: lambda names, name=name: [scene_quantity(sim.param(name, None, names))] for name in PICTURES}
        gravity: Properties = {"gravity": lambda _: [scene_quantity(sim.param("gravity"))]}
        yield from _properties(params, "sim_params", PATH, gravity)
        yield from _properties(params, "picture_params", PATH, scene)
        actors, known = _section(params, "actor_params", PATH), sim.scene.articulation_names
        for name in actors:
            node, path = _section(actors, name, f"{PATH}.actor_params"), f"{PATH}.actor_params.{name}"
            if name not in (*known, GROUND):
                raise ConfigError(f"the scene has no articulation {name!r}", key=path, hint=available(name, known))
            _check_keys(node, path, ("color", "pushes", *SECTIONS) if name in known else ("rigid_shape_properties",))
            if node.get("color"):
                logger.info("%s.color has no effect. For camera images, try rigid_shape_properties.color", path)
            if (pushes := _parse(Pushes, node, "pushes", path)) is not None:
                with named(f"{path}.pushes"):
                    self.pushes.append(Pusher(pushes, sim, name, self._dt))
            actor = self.actors[name] = ActorProperties(sim, name)
            for section, properties in SECTIONS.items():
                known_properties = {key: partial(find, actor) for key, find in properties.items()}
                yield from _properties(node, section, path, known_properties)


Properties = Mapping[str, Callable[[Sequence[str] | None], list[Quantity]]]
"""Lookup of a property's quantities for the given elements, None = all, by the property's name."""


def _properties(
    parent: Mapping[str, Any], section: str, path: str, known: Properties
) -> Iterator[tuple[Property, list[Quantity], str]]:
    node, path = _section(parent, section, path), f"{path}.{section}"
    _check_keys(node, path, known)
    for key in node:
        several = isinstance(node[key], list)  # entries, each for its own `names`
        for i, entry in enumerate(node[key] if several else [node[key]]):
            at = f"{path}.{key}[{i}]" if several else f"{path}.{key}"
            if entry is not None:
                spec = parse(Property, entry, at)
                with named(at):
                    quantities = known[key](spec.names)
                yield spec, quantities, at


def _effective(spec: Property, quantities: list[Quantity], path: str) -> list[Quantity]:
    """Drop the quantities that scaling cannot change because the model's values are 0."""
    if spec.operation == "additive":
        return quantities
    effective = [quantity for quantity in quantities if quantity.default.count_nonzero()]
    if not effective:
        logger.warning("%s has no effect: it scales values that are 0. Try operation: additive", path)
    return effective


def _section(node: Mapping[str, Any], key: str, path: str) -> Mapping[str, Any]:
    section = node.get(key)
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(key=f"{path}.{key}", expected="a section with keys", got=section)
    return section or {}


def _check_keys(node: Mapping[str, Any], path: str, known: Iterable[str]) -> None:
    known = list(known)
    for key in node:
        if key not in known and key in UNSUPPORTED:
            raise ConfigError(UNSUPPORTED[key], key=f"{path}.{key}")
        if key not in known:
            raise ConfigError(f"unknown key '{path}.{key}'", hint=available(key, known))


def _parse(cls: type[T], node: Mapping[str, Any], key: str, path: str) -> T | None:
    return None if node.get(key) is None else parse(cls, node[key], f"{path}.{key}")
