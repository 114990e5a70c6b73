"""Counter-based random numbers for envs, whose state is an explicit device tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gpusim_rl.sim.fused import fits, hash_numbers


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit number; torch has no uint64 arithmetic."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right without copying the sign bit."""
    return x.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Hash int64 in place with SplitMix64's finaliser (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195).

    The last step, which only changes the low 33 bits, is omitted.
    """
    x ^= _shift_right(x, 30)
    x *= _MIX_1
    x ^= _shift_right(x, 27)
    x *= _MIX_2
    return x


def _mix_all(x: Tensor) -> Tensor:
    x = _mix(x)
    x ^= _shift_right(x, 31)
    return x


class EnvRandom:
    """Random numbers with one independent stream per env.

    Each number is a hash of (seed, env, number of earlier draws of the env): the same on every device, for any number
    of envs, and in a captured CUDA graph, since the state is a device tensor.
    """

    def __init__(self, num_envs: int, device: torch.device, seed: int = 0) -> None:
        self.num_envs = num_envs
        self.device = device
        self._state = torch.empty(num_envs, dtype=torch.int64, device=device)
        self._steps = self._multiples(256)
        self.seed(seed)

    def _multiples(self, count: int) -> Int[Tensor, " count"]:
        return torch.arange(1, count + 1, dtype=torch.int64, device=self.device).mul_(_GOLDEN)

    def seed(self, seed: int) -> None:
        """Restart the streams from a seed."""
        env_ids = self._multiples(self.num_envs)
        stream = _mix_all(torch.full_like(env_ids, _signed(seed % (1 << 64))).mul_(_GOLDEN))
        self._state.copy_(_mix_all(env_ids.add_(stream)))

    def _bits(self, count: int, number: int) -> Int[Tensor, "envs count"]:
        """Return non-negative int64 numbers of `number` random bits, at most 31."""
        shift = 64 - number
        if fits(self._state):
            bits = hash_numbers(self._state, count, shift)
        else:
            if count > len(self._steps):
                self._steps = self._multiples(count)
            bits = _shift_right(_mix(self._state[:, None] + self._steps[:count]), shift)
        self._state += _signed(count * _GOLDEN % (1 << 64))
        return bits

    def uniform(self, low: float | Tensor = 0.0, high: float | Tensor = 1.0, *shape: int) -> Float[Tensor, "envs ..."]:
        """Draw uniform numbers in [low, high), shape `[N, *shape]`; tensor bounds broadcast to it.

        With bounds other than 0 and 1, about one in 2^24 numbers rounds to `high`.
        """
        # 24 bits: every value is exact in float32, and 1.0 is never reached
        bits = self._bits(math.prod(shape), 24).view(self.num_envs, *shape)
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            return (bits * 2.0**-24).mul(high - low).add_(low)
        scale = 2.0**-24 * (high - low)
        if low != 0.0 and math.frexp(high - low)[0] == 0.5:  # the product is exact, so one kernel has the same bits
            return torch.rsub(bits, float(low), alpha=-scale)
        unit = bits * scale
        return unit.add_(low) if low != 0.0 else unit

    def normal(self, mean: float | Tensor = 0.0, std: float | Tensor = 1.0, *shape: int) -> Float[Tensor, "envs ..."]:
        """Draw normal numbers, shape `[N, *shape]`, by the Box-Muller method."""
        count = math.prod(shape)
        u = self.uniform(0.0, 1.0, 2, count)
        radius = torch.log1p(-u[:, 0]).mul_(-2.0).sqrt_()
        unit = torch.cos(2.0 * math.pi * u[:, 1]).mul_(radius)
        return unit.view(self.num_envs, *shape) * std + mean

    def integers(self, low: int, high: int, *shape: int) -> Int[Tensor, "envs ..."]:
        """Draw uniform integers in [low, high), int64, shape `[N, *shape]`."""
        span = high - low
        # 31 bits and a far smaller span: the bias of the remainder is below span / 2**31
        drawn = (self._bits(math.prod(shape), 31) % span).view(self.num_envs, *shape)
        return drawn.add_(low) if low else drawn

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all streams."""
        return {"key": self._state.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the streams of a `state_dict`."""
        self._state.copy_(state["key"])
