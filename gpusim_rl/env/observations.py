"""Observation pipeline from the task's terms to the policy, including all noise, delay and history of sensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env.draws import LEAST_TO_MOST, Noise, VectorNoise, parse
from gpusim_rl.env.environment import Observation, Terms
from gpusim_rl.env.image_noise import ImageNoise
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.stateful import SeededDraws, Stateful
from gpusim_rl.env.task import Task
from gpusim_rl.errors import ConfigError, TaskError, did_you_mean
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import Count, Natural
from gpusim_rl.spaces import ImageShape

TaskObservation = Mapping[str, Tensor | Terms]
"""Observation groups of a task by name: a tensor [num_envs, size], named terms, or images."""

TEACHER = "teacher"
"""Group with the policy's terms and those of `used=false`, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermSettings:
    """Settings of a term in `task.observations`."""

    noise: Any = None  # standard deviation, bounds [low, high] of uniform noise, or IsaacGymEnvs settings [unit]
    delay: Natural | Annotated[tuple[int, int], LEAST_TO_MOST] = 0  # [control steps], or [min, max] of random delays
    history: Count = 1  # number of frames, up to the current control step
    used: bool | Literal["critic"] = True  # false: by the `teacher` group alone; critic: by the `critic` group alone


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationTerm:
    """Observation term: the components of a sensor, in each frame of its history."""

    name: str
    size: int  # components in one frame
    unit: str  # before the scale; `-` = dimensionless, empty = unknown
    scale: float  # factor from the unit to the observation
    noise: Noise | None = None  # of the sensor [unit]
    delay: tuple[int, int] = (0, 0)  # minimum and maximum [control steps]
    history: int = 1  # number of frames, the oldest first


class ObservationGroups:
    """Assembly of a task's terms into one tensor per group.

    `settings` (`task.observations`) are the policy's; `noise` is on all its terms. `describe` sets the attributes.
    """

    def __init__(self, task: Task[Any], settings: Mapping[str, Any], noise: Noise | None, seed: int) -> None:
        self._task, self._settings, self._noise, self._seed = task, settings, noise, seed
        self._scales: dict[str, Tensor] = {}  # factors of groups with scaled terms
        self.sizes: dict[str, int] = {}  # of numeric groups
        self.images: dict[str, ImageShape] = {}
        self.terms: dict[str, tuple[ObservationTerm, ...]] = {}  # terms by group, in order
        self.observed: dict[str, tuple[ObservationTerm, ...]] = {}  # `terms` including hidden ones
        self._read: dict[str, tuple[ObservationTerm, ...]] = {}  # `observed` without those of the critic alone
        self._dropped: set[str] = set()
        self.sensors: SensorModel | None = None
        self.image_noise: ImageNoise | None = None

    def describe(self, obs: TaskObservation) -> None:
        """Determine the groups from a first observation; raise TaskError or ConfigError for unknown terms or keys."""
        task, name = self._task, type(self._task).__name__
        named = {group: value for group, value in obs.items() if not isinstance(value, Tensor)}
        known = {term for terms in named.values() for term in terms} | task.units.keys()  # of all modes
        for attribute in ("scales", "sources"):
            for term in getattr(task, attribute):
                if term not in known:
                    key, hint = f"{name}.{attribute}[{term!r}]", did_you_mean(term, known)
                    raise TaskError("observe() has no such term", key=key, hint=hint)
        images = {group: value for group, value in obs.items() if is_image(value)}
        self.images.update({group: (it.shape[1], it.shape[2], it.shape[3]) for group, it in images.items()})
        own = [*named.get("policy", {}), *self.images]
        for term in (term for term in self._settings if term not in own):
            hint = f"{did_you_mean(term, own)} Available: {', '.join(own) or 'none, since its terms are unnamed'}"
            raise ConfigError("the policy's observation has no such term", key=f"task.observations.{term}", hint=hint)
        image_settings = {group: self._settings[group] for group in self.images if group in self._settings}
        term_settings = {term: settings for term, settings in self._settings.items() if term not in image_settings}
        if image_settings:
            self.image_noise = ImageNoise(image_settings, self.images, task.num_envs, task.device, self._seed)
        for group, terms in named.items():
            settings = term_settings if group == "policy" else {}
            self.observed[group] = tuple(_described(task, term, value, settings) for term, value in terms.items())
            hidden = {term for term in settings if settings[term].get("used") == "critic"}
            self._read[group] = tuple(term for term in self.observed[group] if term.name not in hidden)
            scales = [term.scale for term in self._read[group] for _ in range(term.size)]
            if any(scale != 1.0 for scale in scales):
                self._scales[group] = torch.tensor(scales, device=task.device)
            if unknown := hidden - named.get("critic", {}).keys():
                key = f"task.observations.{min(unknown)}.used=critic"
                raise ConfigError("the `critic` group has no such term", key=key, hint="Try used=false")
        self.terms.update(self._read)
        self._dropped = {term for term, settings in term_settings.items() if settings.get("used") is False}
        if self._dropped:
            if TEACHER in obs:
                raise TaskError(f"group {TEACHER!r} is reserved for used=false", key=f"{name}.observe()")
            self.terms[TEACHER] = self._read["policy"]
            self.terms["policy"] = tuple(term for term in self.terms[TEACHER] if term.name not in self._dropped)
        if self.terms.get("policy") == ():
            raise ConfigError("`used` hides all terms from the policy", key="task.observations")
        if term_settings or (self._noise is not None and "policy" in obs):
            size = self._join("policy", obs["policy"]).shape[1]
            self.sensors = SensorModel(self._read.get("policy", ()), size, self._noise, task, self._seed)
        self.sizes.update({group: value.shape[1] for group, value in self.read(obs).items() if not is_image(value)})

    def read(self, obs: TaskObservation, *, clean: bool = False) -> Observation:
        """Concatenate and scale the terms of each group; `clean`: without noise, delay and history."""
        joined = {}
        for group, value in obs.items():
            frame = self._join(group, value)
            scales = self._scales.get(group)
            if group == "policy" and self.sensors is not None and not clean:
                frame = self.sensors.read(frame, scales)
            elif scales is not None:
                frame *= scales
            elif self.image_noise is not None and not clean and is_image(frame):
                frame = self.image_noise.apply(group, frame)
            joined[group] = frame
        if "policy" not in joined:  # images only
            joined["policy"] = torch.zeros(self._task.num_envs, 0, device=self._task.device)
        if self._dropped:
            terms, joined[TEACHER] = self._read["policy"], joined["policy"]
            pieces = joined[TEACHER].split([term.size * (1 if clean else term.history) for term in terms], dim=1)
            used = [piece for piece, term in zip(pieces, terms, strict=True) if term.name not in self._dropped]
            joined["policy"] = torch.cat(used, dim=1)
        return joined

    def _join(self, group: str, value: Tensor | Terms) -> Tensor:
        return value if isinstance(value, Tensor) else torch.cat([value[it.name] for it in self._read[group]], dim=1)


class SensorModel(SeededDraws):
    """Sensor model of the policy's observation: noise, delay and history.

    Noise is drawn in every control step and at the start of an episode; the delay of each env and term is drawn only at
    the start. The first frame of an episode fills the history. Noise on the `whole` observation is applied last.
    """

    _stream = 1 << 33

    def __init__(
        self, terms: Sequence[ObservationTerm], size: int, whole: Noise | None, task: Task[Any], seed: int
    ) -> None:
        num_envs, device = task.num_envs, task.device
        self._settings = [dataclasses.asdict(settings) for settings in (*terms, *([whole] if whole else []))]
        self._random = EnvRandom(num_envs, device, seed + self._stream)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # control steps of the run, for schedules
        frames = max((term.delay[1] + term.history for term in terms), default=1)
        self._history = _History(terms, frames, size, task) if frames > 1 else None
        numbers = sum(term.size * term.history for term in terms) or size
        noises = [term.noise for term in terms for _ in range(term.size)]
        self._noise = VectorNoise(noises, num_envs, device) if any(noises) else None
        self._whole_noise = VectorNoise([whole] * numbers, num_envs, device) if whole else None
        self._draw_step()

    def advance(self) -> None:
        """Begin a control step, before `read`: draw new noise, and move all frames back by one."""
        self.steps += 1
        self._draw_step()
        if self._history is not None:
            self._history.advance()

    def begin_episodes(self, where: Bool[Tensor, " envs"]) -> None:
        """Draw the per-episode values of the masked envs; their next frame fills the history."""
        for noise in filter(None, (self._noise, self._whole_noise)):
            noise.begin_episodes(self.steps, where)
        if self._history is not None:
            self._history.begin_episodes(where, self._random)

    def read(self, frame: Float[Tensor, "envs numbers"], scales: Tensor | None) -> Float[Tensor, "envs size"]:
        """Return scaled readings of a true, unscaled observation; a second call in a step replaces the newest frame."""
        if self._noise is not None:
            frame = self._noise.apply(frame)
        if scales is not None:
            frame = frame * scales
        if self._history is not None:
            frame = self._history.read(frame)
        return frame if self._whole_noise is None else self._whole_noise.apply(frame)

    def _draw_step(self) -> None:
        for noise in filter(None, (self._noise, self._whole_noise)):
            noise.draw(self._random, self.steps)

    def _redraw(self, state: Mapping[str, Any]) -> None:
        self.begin_from(state)
        self.begin_episodes(torch.ones(self._random.num_envs, dtype=torch.bool, device=self.steps.device))

    def begin_from(self, state: Mapping[str, Any]) -> None:
        """Continue the schedules of another run's `state_dict`."""
        self.steps.copy_(state["tensors"]["steps"])


class _History(Stateful):
    """Readings of the newest control steps, the oldest first; few kernels, since every step takes all of them."""

    def __init__(self, terms: Sequence[ObservationTerm], frames: int, size: int, task: Task[Any]) -> None:
        num_envs, device = task.num_envs, task.device
        ranges = [(term.delay[0], term.delay[1] - term.delay[0] + 1) for term in terms]
        self._least, self._spread = torch.tensor(ranges, device=device).T.contiguous()
        self.delays = torch.zeros(num_envs, len(terms), dtype=torch.int64, device=device)  # control steps
        self._delayed = any(term.delay[1] for term in terms)
        self._frames = torch.zeros(num_envs, frames, size, device=device)
        self._past = torch.zeros_like(self._frames)  # of earlier control steps, moved back; the last is unused
        self._fills = torch.ones(num_envs, frames, 1, dtype=torch.bool, device=device)  # frames set to the next one
        # For each entry of the observation: place in the frames, if there is no delay, and index of its term.
        columns = torch.arange((frames - 1) * size, frames * size, device=device).split([term.size for term in terms])
        ages = [(k, age) for k, term in enumerate(terms) for age in reversed(range(term.history))]
        self._places = torch.cat([columns[k] - age * size for k, age in ages])
        self._owners = torch.cat([torch.full_like(columns[k], k) for k, _ in ages])

    def advance(self) -> None:
        self._past[:, :-1].copy_(self._frames[:, 1:])
        self._fills[:, :-1].zero_()

    def begin_episodes(self, where: Bool[Tensor, " envs"], random: EnvRandom) -> None:
        self._fills |= where[:, None, None]
        if self._delayed:
            drawn = random.uniform(0.0, 1.0, len(self._least)).mul_(self._spread).long().add_(self._least)
            torch.where(where[:, None], drawn, self.delays, out=self.delays)

    def read(self, frame: Float[Tensor, "envs numbers"]) -> Float[Tensor, "envs size"]:
        frames = torch.where(self._fills, frame[:, None], self._past, out=self._frames).flatten(1)
        if not self._delayed:
            return frames.index_select(1, self._places)
        delays = self.delays.index_select(1, self._owners)
        return frames.gather(1, torch.sub(self._places, delays, alpha=frame.shape[1]))


def is_image(value: Any) -> TypeGuard[Tensor]:
    """Return whether a group holds images: uint8, [num_envs, height, width, channels]."""
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def number_names(sizes: Mapping[str, int], terms: Mapping[str, Sequence[ObservationTerm]]) -> dict[str, list[str]]:
    """Return the column names of every observation group, `term[i]`."""
    counts = {group: [(term.name, term.size * term.history) for term in own] for group, own in terms.items()}
    counts = {group: counts.get(group) or [(group, size)] for group, size in sizes.items()}
    return {group: [f"{name}[{n}]" for name, count in own for n in range(count)] for group, own in counts.items()}


def table(rows: list[tuple[str, int, str, str]]) -> str:
    """Format observation terms (name, size, meaning, unit) as a docstring table."""
    cells, first = [("num", "name", "observation", "unit")], 0
    for name, size, words, unit in rows:
        cells.append((str(first) if size == 1 else f"{first}-{first + size - 1}", name, words, unit))
        first += size
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"    | {' | '.join(map(str.ljust, row, widths))} |" for row in cells]
    lines.insert(1, f"    |{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


def _described(task: Task[Any], name: str, value: Tensor, settings: Mapping[str, Any]) -> ObservationTerm:
    key, size = f"task.observations.{name}", value.shape[1]
    checked = build(TermSettings, settings.get(name, {}), key)
    unit, scale = task.units.get(name, ""), float(task.scales.get(name, 1.0))
    noise = None if checked.noise is None else _noise(checked.noise, f"{key}.noise")
    delay = (checked.delay, checked.delay) if isinstance(checked.delay, int) else checked.delay
    return ObservationTerm(
        name=name, size=size, unit=unit, scale=scale, noise=noise, delay=delay, history=checked.history
    )


def _noise(value: Any, key: str) -> Noise | None:
    if isinstance(value, Mapping):
        return parse(Noise, value, key)
    if isinstance(value, list | tuple):
        return parse(Noise, {"range": list(value), "operation": "additive", "distribution": "uniform"}, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < float("inf"):
        expected = "a standard deviation >= 0, uniform bounds [low, high], or a section with `range`"
        raise ConfigError(key=key, expected=expected, got=value, hint="Try 0.1")
    return Noise(range=(0.0, float(value)), operation="additive", distribution="gaussian") if value else None
