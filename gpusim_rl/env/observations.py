"""Observations of named parts: what each part is, and the noise, delay and history that its sensor has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env.environment import Parts
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.task import kept_tensors
from gpusim_rl.errors import ConfigError, did_you_mean

_SEED_OFFSET = 1 << 33  # another stream than the task's and the randomizer's


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationPart:
    """A named part of an observation: as many numbers as a sensor gives, times the frames of its history."""

    name: str
    size: int
    """Numbers of one frame."""
    unit: str
    """Of the part before its scale; `-` has none, and an empty one is not known."""
    scale: float
    """What the observation has is the part times this."""
    noise: float = 0.0
    """Standard deviation [unit]."""
    delay: tuple[int, int] = (0, 0)
    """Fewest and most control steps by which it is late."""
    history: int = 1
    """Frames of the control steps up to this one, the oldest first."""


class SensorModel:
    """Makes a policy's observation of named parts as real sensors give it: noisy, late, and of several steps.

    Noise is normal, drawn anew for each number and control step. The delay is drawn for each env and part when an
    episode begins. Before an episode's first frame, sensors show that frame. Frames are kept in a ring on the device.

    Args:
        parts: Parts in their order.
        num_envs: Number of envs.
        device: Of the observation.
        seed: Of noise and delays.
    """

    def __init__(self, parts: tuple[ObservationPart, ...], num_envs: int, device: torch.device, seed: int) -> None:
        self._parts = parts
        self._random = EnvRandom(num_envs, device, seed + _SEED_OFFSET)
        std = torch.tensor([part.noise for part in parts for _ in range(part.size)], device=device)
        self._std = std if bool(std.any()) else None
        self.noise = torch.zeros(num_envs, len(std), device=device)
        self.fresh = torch.ones(num_envs, dtype=torch.bool, device=device)  # envs whose episode has just begun
        self.newest = torch.zeros(1, dtype=torch.int64, device=device)  # place of the newest frame in the rings
        self.rings: dict[str, Tensor] = {}  # [frames, num_envs, size]
        self.delays: dict[str, Tensor] = {}  # [num_envs]
        self._ages: dict[str, Tensor] = {}  # [history, 1], of each frame beside the delay, the oldest first
        self._frames = max(part.delay[1] + part.history for part in parts)
        for part in parts:
            if part.delay[1] or part.history > 1:
                self.rings[part.name] = torch.zeros(self._frames, num_envs, part.size, device=device)
                self.delays[part.name] = torch.zeros(num_envs, dtype=torch.int64, device=device)
                self._ages[part.name] = torch.arange(part.history - 1, -1, -1, device=device)[:, None]
        self.advance()

    def seed(self, seed: int) -> None:
        """Begins all draws anew."""
        self._random.seed(seed + _SEED_OFFSET)

    def advance(self) -> None:
        """Begins a control step: new noise, and room for a new frame. Call it once per step, before `read`."""
        if self._std is not None:
            self.noise.copy_(self._random.normal(0.0, self._std, len(self._std)))
        self.newest.add_(1).remainder_(self._frames)
        self.fresh.zero_()

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        """Begins episodes in the envs of a mask: draws their delays; the next `read` gives their first frame."""
        self.fresh |= where
        for part in self._parts:
            low, high = part.delay
            if high > low:
                drawn = self._random.integers(low, high + 1)
                torch.where(where, drawn, self.delays[part.name], out=self.delays[part.name])
            elif high:
                self.delays[part.name].fill_(high)

    def read(self, parts: Parts) -> list[Float[Tensor, "envs _"]]:
        """What the sensors give now, in the order of the parts. A second call in a step replaces the newest frame."""
        read, column = [], 0
        for part in self._parts:
            frame = parts[part.name]
            if part.noise:
                frame = frame + self.noise[:, column : column + part.size]
            column += part.size
            read.append(frame if part.name not in self.rings else self._through_ring(part, frame))
        return read

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next frames depend on."""
        tensors = {name: value.clone() for name, value in kept_tensors(vars(self))}
        return {"tensors": tensors, "random": self._random.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores in place what `state_dict` returned. With other delays the rings begin with the next frame."""
        self._random.load_state_dict(state["random"])
        own, saved = dict(kept_tensors(vars(self))), state["tensors"]
        if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in saved.items()}:
            self.fresh.fill_(True)
            return
        for name, value in own.items():
            value.copy_(saved[name])

    def _through_ring(self, part: ObservationPart, frame: Float[Tensor, "envs size"]) -> Float[Tensor, "envs _"]:
        ring = self.rings[part.name]
        ring.index_copy_(0, self.newest, frame[None])
        torch.where(self.fresh[None, :, None], frame[None], ring, out=ring)
        place = (self.newest - self._ages[part.name] - self.delays[part.name]).remainder_(self._frames)
        found = ring.gather(0, place[..., None].expand(-1, -1, part.size))
        return found.transpose(0, 1).flatten(1)


def describe(
    parts: Parts, units: Mapping[str, str], scales: Mapping[str, float], sensors: Mapping[str, Any]
) -> tuple[ObservationPart, ...]:
    """What the parts of a group are.

    Args:
        parts: As the task returns them.
        units: Of the task, by part.
        scales: Of the task, by part.
        sensors: `task.observations`: noise, delay and history by part.

    Raises:
        ConfigError: `sensors` has a part or a key that there is not, or a value out of its range.
    """
    return tuple(
        ObservationPart(
            name=name,
            size=value.shape[1],
            unit=units.get(name, ""),
            scale=float(scales.get(name, 1.0)),
            **_checked(name, sensors.get(name, {})),
        )
        for name, value in parts.items()
    )


def check_names(sensors: Mapping[str, Any], parts: Mapping[str, object]) -> None:
    """Raises ConfigError for a part of `task.observations` that the policy's observation does not have."""
    for name in sensors:
        if name not in parts:
            there = f"It has {', '.join(parts)}" if parts else "The task does not name its parts"
            hint = did_you_mean(name, parts)
            raise ConfigError(f"task.observations.{name}: the policy's observation has no such part.{hint} {there}")


def _checked(name: str, settings: Any) -> dict[str, Any]:
    """The settings of a part, each with the type that `ObservationPart` has."""
    key = f"task.observations.{name}"
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{key} must be settings such as {{noise: 0.1}}, got {settings!r}")
    for unknown in settings.keys() - {"noise", "delay", "history"}:
        hint = did_you_mean(str(unknown), ("noise", "delay", "history"))
        raise ConfigError(f"unknown key '{key}.{unknown}'.{hint} It has noise, delay and history")
    found: dict[str, Any] = {}
    if (noise := settings.get("noise")) is not None:
        if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0.0 <= noise < float("inf"):
            raise ConfigError(f"{key}.noise must be a standard deviation of at least 0, got {noise!r}; try 0.1")
        found["noise"] = float(noise)
    if (delay := settings.get("delay")) is not None:
        both = [delay, delay] if isinstance(delay, int) else delay
        if not _is_range(both):
            expected = "control steps: one number, or [fewest, most]"
            raise ConfigError(f"{key}.delay must be {expected}, got {delay!r}; try [0, 2]")
        found["delay"] = tuple(both)  # type: ignore[arg-type]
    if (history := settings.get("history")) is not None:
        if isinstance(history, bool) or not isinstance(history, int) or history < 1:
            raise ConfigError(f"{key}.history must be a positive number of frames, got {history!r}; try 5")
        found["history"] = history
    return found


def _is_range(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    whole = all(isinstance(step, int) and not isinstance(step, bool) for step in value)
    return whole and 0 <= value[0] <= value[1]
