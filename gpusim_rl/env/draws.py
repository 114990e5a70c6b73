"""Random draws and noise, with IsaacGymEnvs' keys and meanings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.stateful import Stateful
from gpusim_rl.errors import ConfigError, UserError
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import Count, Rule

T = TypeVar("T")

Names = Annotated[list[str], Rule("a list of distinct names", lambda names: 0 < len(names) == len(set(names)))]
LEAST_TO_MOST = Rule("[min, max] with 0 <= min <= max", lambda limits: 0 <= limits[0] <= limits[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """Schedule of a randomisation's strength over the control steps of the run."""

    schedule: Literal["linear", "constant"] | None = None  # linear: 0 to 1 over `schedule_steps`; constant: 0, then 1
    schedule_steps: Count | None = None  # [control steps]

    def __post_init__(self) -> None:
        if (self.schedule is None) != (self.schedule_steps is None):
            raise ConfigError("schedule requires schedule_steps, and vice versa")

    def strength(self, steps: Int[Tensor, ""]) -> Float[Tensor, ""] | float:
        """Return the strength after `steps` control steps, 0 to 1."""
        if self.schedule is None or self.schedule_steps is None:
            return 1.0
        if self.schedule == "linear":
            return (steps / self.schedule_steps).clamp(max=1.0)
        return (steps >= self.schedule_steps).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw(Ramp):
    """Distribution of a random number, and the operation by which it changes a value."""

    range: tuple[float, float]  # lower and upper bound; mean and standard deviation if gaussian
    operation: Literal["additive", "scaling"]  # a draw is added to the value, or multiplies it
    distribution: Literal["uniform", "loguniform", "gaussian"]

    def __post_init__(self) -> None:
        Ramp.__post_init__(self)
        low, high = self.range
        if self.distribution == "gaussian" and high < 0:
            expected = "[mean, standard deviation] with a standard deviation >= 0"
        elif self.distribution != "gaussian" and low > high:
            expected = "[low, high] with low <= high"
        elif self.distribution == "loguniform" and low <= 0:
            expected = "positive bounds for a loguniform distribution"
        else:
            return
        raise ConfigError(key="range", expected=expected, got=list(self.range))

    @property
    def neutral(self) -> float:
        """Draw that leaves a value unchanged."""
        return 0.0 if self.operation == "additive" else 1.0

    @property
    def affine(self) -> tuple[float, float]:
        """Offset and factor that map a standard normal or uniform number to a draw (`loguniform`: to its logarithm)."""
        low, high = self.range
        if self.distribution == "loguniform":
            return math.log(low), math.log(high / low)
        return (low, high) if self.distribution == "gaussian" else (low, high - low)

    def apply(self, value: Tensor, draw: Tensor, steps: Int[Tensor, ""]) -> Tensor:
        """Add the draw to the value, or multiply the value by it, at the schedule's strength."""
        changed = value + draw if self.operation == "additive" else value * draw
        return changed if self.schedule is None else torch.lerp(value, changed, self.strength(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(Draw):
    """White noise in every control step, plus an offset for a whole episode."""

    range_correlated: tuple[float, float] | None = None  # `range` of the offset; null = no offset

    def __post_init__(self) -> None:
        Draw.__post_init__(self)
        if self.range_correlated is not None:
            replace(self, range=self.range_correlated, range_correlated=None)


def parse(cls: type[T], node: Any, path: str) -> T:
    """Build settings from a yaml section; errors name the full key."""
    with named(path):
        return build(cls, node, path)


@contextmanager
def named(path: str) -> Iterator[None]:
    """Prefix errors raised in the block with the path of a yaml key."""
    try:
        yield
    except UserError as error:
        if path in str(error):
            raise
        inner = error.within(path)
        fields = {"expected": inner.expected, "got": inner.got, "hint": inner.hint}
        raise ConfigError(inner.problem, key=inner.key, **fields) from None


class Draws:
    """Sampler of a random vector per env, with one call to the generator. Entries without a spec are 0."""

    def __init__(self, specs: Sequence[Draw | None], device: torch.device) -> None:
        gaussian = [i for i, spec in enumerate(specs) if spec is not None and spec.distribution == "gaussian"]
        others = [i for i, spec in enumerate(specs) if spec is not None and spec.distribution != "gaussian"]
        self._pairs, self._uniform = (len(gaussian) + 1) // 2, len(others)
        # Gaussian numbers come first, in pairs; entries without a spec are multiplied by 0, so any source will do.
        source = [0] * len(specs)
        for place, i in (*enumerate(gaussian), *enumerate(others, start=2 * self._pairs)):
            source[i] = place
        in_order = source == list(range(len(specs)))
        self._source = None if in_order else torch.tensor(source, device=device)
        low_span = [(0.0, 0.0) if spec is None else spec.affine for spec in specs]
        self._low, self._span = torch.tensor(low_span).view(-1, 2).T.contiguous().to(device)
        logarithms = [spec is not None and spec.distribution == "loguniform" for spec in specs]
        self._logarithms = torch.tensor(logarithms, device=device) if any(logarithms) else None

    def draw(self, random: EnvRandom) -> Float[Tensor, "envs numbers"]:
        """Return new draws, shape [num_envs, numbers]."""
        numbers = random.uniform(0.0, 1.0, 2 * self._pairs + self._uniform)
        if self._pairs:
            # uses both numbers of each Box-Muller pair: half the cost of `EnvRandom.normal`
            u, v, uniform = numbers.split([self._pairs, self._pairs, self._uniform], dim=1)
            radius, angle = torch.log1p(-u).mul_(-2.0).sqrt_(), 2.0 * math.pi * v
            numbers = torch.cat([radius * angle.cos(), radius * angle.sin(), uniform], dim=1)
        in_order = numbers[:, : len(self._low)] if self._source is None else numbers.index_select(1, self._source)
        draws = torch.addcmul(self._low, in_order, self._span)
        return draws if self._logarithms is None else torch.where(self._logarithms, draws.exp(), draws)


class VectorNoise(Stateful):
    """Noise on a vector per env: redrawn in every control step, and at the start of episodes.

    `noise` is the current noise and `offset` is its part that lasts for an episode; `next_noise` and `next_offset` are
    for episodes that begin in this step. All are drawn at once: many small kernels cost more than unused numbers.
    """

    def __init__(self, specs: Sequence[Noise | None], num_envs: int, device: torch.device) -> None:
        offsets = [
            spec and spec.range_correlated and replace(spec, range=spec.range_correlated, range_correlated=None)
            for spec in specs
        ]
        self._has_offset = any(offsets)
        self._draws = Draws([*specs, *specs, *(offsets if self._has_offset else [])], device)
        scaling = [spec is not None and spec.operation == "scaling" for spec in specs]
        self._scaling = torch.tensor(scaling, device=device) if any(scaling) else None
        scheduled = dict.fromkeys(spec for spec in specs if spec is not None and spec.schedule is not None)
        self._scheduled = [(spec, torch.tensor([s == spec for s in specs], device=device)) for spec in scheduled]
        self.noise, self.offset, self.next_noise, self.next_offset = (
            torch.zeros(num_envs, len(specs), device=device) for _ in range(4)
        )

    def draw(self, random: EnvRandom, steps: Int[Tensor, ""]) -> None:
        """Draw the noise for control step `steps` of the run."""
        noise, *following = self._draws.draw(random).split(self.noise.shape[1], dim=1)
        self.noise.copy_(self._effective(noise, steps))
        for kept, drawn in zip((self.next_noise, self.next_offset), following, strict=False):
            kept.copy_(drawn)

    def begin_episodes(self, steps: Int[Tensor, ""], where: Bool[Tensor, " envs"]) -> None:
        """Set the offset and noise of the masked envs, whose episodes begin; call it after `draw`."""
        if self._has_offset:
            torch.where(where[:, None], self.next_offset, self.offset, out=self.offset)
        torch.where(where[:, None], self._effective(self.next_noise, steps), self.noise, out=self.noise)

    def apply(self, values: Float[Tensor, "envs numbers"]) -> Float[Tensor, "envs numbers"]:
        """Return the values with the current noise."""
        if self._scaling is None:
            return values + self.noise
        return torch.where(self._scaling, values * self.noise, values + self.noise)

    def _effective(self, white: Float[Tensor, "envs numbers"], steps: Tensor) -> Float[Tensor, "envs numbers"]:
        noise = white + self.offset if self._has_offset else white
        for spec, columns in self._scheduled:
            weaker = spec.neutral + (noise - spec.neutral) * spec.strength(steps)
            noise = torch.where(columns, weaker, noise)
        return noise
