"""Metrics: device sums, copied to the host once per log interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Step
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.run.writers import Row

WINDOW = 100  # episodes in the mean return; records and thresholds need a full window
TRIMMED = 0.05  # fraction trimmed at each end, so that a few outliers cannot set an unbeatable record


class EpisodeWindow:
    """Ring buffer of the last finished episodes' returns and lengths; a prefix sum finds the slots on the device."""

    def __init__(self, num_envs: int, size: int, device: torch.device) -> None:
        self.size = size
        self._running = torch.zeros(2, num_envs, device=device)
        self.episode_return, self.episode_length = self._running  # partial sums of running episodes
        self.ring = torch.zeros(2, size + 1, device=device)  # the last slot takes steps that do not end an episode
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    def record(
        self, reward: Float[Tensor, "time envs"], done: Bool[Tensor, "time envs"], counts: Bool[Tensor, "time envs"]
    ) -> None:
        """Add the steps of a rollout; `counts` excludes episodes cut by a staggered start or a diverged simulation."""
        # Return and length up to each step, [time, 2, envs]. Multiplying by 0 resets them in one kernel; an infinite
        # reward does not affect later rollouts.
        sums = torch.stack([reward, torch.ones_like(reward)], dim=1)
        continues = (~done).to(sums.dtype)[:, None].unbind()
        first, *later = now = sums.unbind()
        first.add_(self._running)
        for factor, before, after in zip(continues, now, later, strict=False):
            after.addcmul_(factor, before)
        self._running.copy_(now[-1].masked_fill(done[-1], 0.0))

        ended = (done & counts).flatten()
        rank = ended.cumsum(dim=0)
        number = rank[-1]
        kept = ended & (rank > number - self.size)
        slot = torch.where(kept, (self.total + rank - 1) % self.size, self.size)
        self.ring.index_copy_(1, slot, sums.transpose(0, 1).flatten(1))
        self.total += number

    def newest(self, number: int) -> Float[Tensor, "2 episodes"]:
        """Return returns and lengths of the last `number` episodes, at most `size`."""
        slots = torch.arange(-min(number, self.size), 0, device=self.ring.device) + self.total
        return self.ring.index_select(1, slots % self.size)

    def add(self, episodes: Float[Tensor, "2 episodes"]) -> None:
        """Add the `newest` episodes of another window."""
        slots = torch.arange(episodes.shape[1], device=self.ring.device) + self.total
        self.ring.index_copy_(1, slots % self.size, episodes.to(self.ring.device))
        self.total += episodes.shape[1]

    def means(self, collective: Collective = ALONE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return mean return, mean length, number of episodes and trimmed mean return (NaN before a full window)."""
        count = self.total.clamp(max=self.size)
        known = torch.arange(self.size, device=self.ring.device) < count
        sums = torch.where(known, self.ring[:, :-1], 0.0).sum(dim=1)
        sums, number = collective.sum([sums, count.float()])
        mean_return, mean_length = (sums / number).unbind()
        cut = int(TRIMMED * self.size)
        trimmed = self.ring[0, :-1].sort().values[cut : self.size - cut].mean()
        [trimmed] = collective.mean([trimmed.where(count == self.size, torch.nan)])
        return mean_return, mean_length, number, trimmed

    def state_dict(self) -> dict[str, Any]:
        """Return the ring buffer, and the returns and lengths of unfinished episodes."""
        names = ("episode_return", "episode_length", "ring", "total")
        return {name: getattr(self, name).clone() for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        for name, value in state.items():
            getattr(self, name).copy_(value)


@dataclass(frozen=True, slots=True)
class RolloutSums:
    """Summed metrics of an actor's rollout."""

    episodes: list[list[float]]  # returns and lengths of finished episodes, at most WINDOW
    sums: dict[str, Any]  # by name: a number, or [sum, count]
    terms: dict[str, float]  # reward terms, summed over steps and envs
    steps: int


class Metrics:
    """Device accumulators for one row per log interval.

    On CUDA, a row is copied to pinned memory and read one interval later, so the loop never waits for it. With
    `late_names`, envs may add statistics at any step, and names may differ by process.
    """

    def __init__(
        self, num_envs: int, device: torch.device, collective: Collective = ALONE, *, late_names: bool = False
    ) -> None:
        self.num_envs, self.device, self._collective = num_envs, device, collective
        self.episodes = EpisodeWindow(num_envs, WINDOW, device)
        self._late_names = late_names and collective.size > 1
        self._rollout: list[tuple[Tensor, Tensor]] = []  # numbers and masks of each step, [count, envs]
        self._sums: dict[str, Tensor] = {}
        self._terms: Tensor | None = None
        self._term_names: list[str] = []
        self._stat_names: list[str] = []
        self._latest: dict[str, Tensor] = {}
        self._checked: set[str] = set()  # names of validated statistics
        self._steps = torch.zeros((), device=device)  # on the device, so that graphs can count
        self._taken = 0  # episodes that `take` has returned
        self._in_flight: tuple[Any, list[str], Tensor] | None = None
        self._arrival: torch.cuda.Event | None = None

    def begin_rollout(self) -> None:
        """Begin a rollout; discard the steps of an aborted one."""
        self._rollout.clear()

    def record_step(self, step: Step) -> None:
        """Store one control step until `end_rollout`."""
        self._term_names = list(step.terms)
        late = [name for name in step.stats if name not in self._stat_names]
        self._stat_names += late
        if late and self._rollout:  # another library's envs may add a name at the end of an episode
            missing = torch.full((len(late), self.num_envs), torch.nan, device=self.device)
            self._rollout = [(torch.cat([numbers, missing]), masks) for numbers, masks in self._rollout]
        missing = torch.full_like(step.reward, torch.nan) if len(step.stats) < len(self._stat_names) else step.reward
        stats = [step.stats.get(name, missing) for name in self._stat_names]
        numbers = torch.stack([step.reward, *step.terms.values(), *stats])
        failed = step.diverged if step.skipped is None else step.diverged > step.skipped
        masks = torch.stack([step.done, step.incomplete, failed, step.bad_action])
        self._rollout.append((numbers, masks))

    def end_rollout(self) -> None:
        """Add the stored control steps to the sums."""
        numbers, masks = (torch.stack(steps, dim=1) for steps in zip(*self._rollout, strict=True))
        self._rollout.clear()
        num_terms = len(self._term_names)
        reward, terms, stats = numbers[0], numbers[1 : 1 + num_terms], numbers[1 + num_terms :]
        done, incomplete, diverged, _ = masks
        self.episodes.record(reward, done, ~incomplete)
        sums = terms.sum(dim=(1, 2))
        if self._terms is None:
            self._terms = torch.zeros_like(sums)
        self._terms += sums
        if self._stat_names:
            known = ~stats.isnan()
            sums = torch.stack([stats.nansum(dim=(1, 2)), known.sum(dim=(1, 2))], dim=1)
            for name, value in zip(self._stat_names, sums, strict=True):
                self._add(f"task/{name}", value)
        ended, _, failed, bad = masks.sum(dim=(1, 2)).float()
        self._add("sim/diverged", failed)
        self._add("sim/bad_actions", bad)
        self._add("check/valid", diverged.numel() - failed)
        self._add("episode/ended", ended)
        self._steps += len(reward)

    def record_update(self, stats: Mapping[str, Tensor], algorithm: str = "Algorithm") -> None:
        """Keep the statistics of the latest update, device scalars by name; flags (`check/...`) are summed."""
        key = f"{algorithm}.update()"
        if not isinstance(stats, Mapping):
            raise ConfigError(f"returned a {type(stats).__name__}", key=key, expected="a dict of tensors by name")
        for name, value in stats.items():
            if name not in self._checked:
                self._check(name, value, key)
                self._checked.add(name)
            if name.startswith("check/"):
                self._add(name, value)
            else:
                self._latest[name] = value

    def take(self) -> RolloutSums:
        """Return the sums since the last call, for `add` in another process; waits for the device."""
        total = int(self.episodes.total)  # complete episodes only, unlike `episode/ended`
        ended, self._taken = total - self._taken, total
        sums = {name: value.tolist() for name, value in self._sums.items()}
        assert self._terms is not None
        terms = dict(zip(self._term_names, self._terms.tolist(), strict=True))
        taken = RolloutSums(self.episodes.newest(ended).tolist(), sums, terms, int(self._steps))
        for value in (*self._sums.values(), self._terms, self._steps):
            value.zero_()
        return taken

    def add(self, taken: RolloutSums) -> None:
        """Add the sums of another process's rollout of `num_envs` envs, in one asynchronous copy."""
        sums = {name: value if isinstance(value, list) else [value] for name, value in taken.sums.items()}
        returns, lengths = taken.episodes
        lists = [[*returns, *lengths], *sums.values(), [*taken.terms.values()]]
        cuda = self.device.type == "cuda"
        packed = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.float32, pin_memory=cuda)
        episodes, *values, terms = packed.to(self.device, non_blocking=cuda).split([len(numbers) for numbers in lists])
        self.episodes.add(episodes.view(2, -1))
        for (name, numbers), value in zip(taken.sums.items(), values, strict=True):
            self._add(name, value if isinstance(numbers, list) else value[0])
        self._term_names = [*taken.terms]
        self._terms = terms.clone() if self._terms is None else self._terms.add_(terms)
        self._steps += taken.steps

    def _check(self, name: Any, value: Any, key: str) -> None:
        if not isinstance(name, str) or not all(name.partition("/")):
            raise ConfigError(key=key, expected=f"names such as 'search/{name}'", got=name)
        is_tensor = isinstance(value, Tensor)
        if not is_tensor or value.ndim != 0 or value.device.type != self.device.type:
            got = f"shape {[*value.shape]} on {value.device}" if is_tensor else type(value)
            expected = f"a tensor of shape [] on {self.device}"
            raise ConfigError(key=f"{key}[{name!r}]", expected=expected, got=got)

    def _add(self, name: str, value: Tensor) -> None:
        if name not in self._sums:
            self._sums[name] = torch.zeros_like(value)
        self._sums[name] += value

    def flags(self) -> Row:
        """Return the flags (`check/...`) of the unfinished interval; waits for the device."""
        return {name: float(value) for name, value in self._sums.items() if name.startswith("check/")}

    def flush(self, host: Any, extra: Mapping[str, Tensor]) -> list[tuple[Any, Row]]:
        """End an interval, adding device scalars `extra` to its row.

        Return the rows that have arrived, with `host` values: this interval's row on the CPU, the previous one on CUDA.
        """
        collective = self._collective
        if self._late_names:
            gathered = collective.gather([name for name, value in self._sums.items() if value.ndim])
            for name in collective.share(list(dict.fromkeys(name for names in gathered for name in names))):
                self._sums[name] = self._sums.pop(name, torch.zeros(2, device=self.device))  # same order everywhere
        names = ("episode/return", "episode/length", "episode/count", "episode/trimmed_return")
        values: dict[str, Tensor] = dict(zip(names, self.episodes.means(collective), strict=True))
        for name, value in zip(self._sums, collective.sum([*self._sums.values()]), strict=True):
            values[name] = value[0] / value[1] if value.ndim else value  # a task's statistic: sum and count
        if self._terms is not None:
            [per_step] = collective.mean([self._terms / (self._steps * self.num_envs).clamp(min=1.0)])
            values |= dict(zip((f"reward/{name}" for name in self._term_names), per_step.unbind(), strict=True))
            self._terms.zero_()
        values |= dict(zip(self._latest, collective.mean([*self._latest.values()]), strict=True))
        values |= dict(zip(extra, collective.sum([*extra.values()]), strict=True))
        stacked = torch.stack([value.float() for value in values.values()])
        for value in self._sums.values():
            value.zero_()
        self._steps.zero_()
        if self.device.type != "cuda":
            return [(host, _row(list(values), stacked))]
        arrived = self.drain()
        pinned = torch.empty(stacked.shape, pin_memory=True)
        pinned.copy_(stacked, non_blocking=True)
        self._arrival = torch.cuda.Event()
        self._arrival.record(torch.cuda.current_stream(self.device))  # not torch's current device
        self._in_flight = (host, list(values), pinned)
        return arrived

    def wait(self) -> None:
        """Wait until the device has finished the interval of the pending row."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None

    def drain(self) -> list[tuple[Any, Row]]:
        """Wait for the pending row, if any, and return it."""
        self.wait()
        if self._in_flight is None:
            return []
        host, names, pinned = self._in_flight
        self._in_flight = None
        return [(host, _row(names, pinned))]

    def state_dict(self) -> dict[str, Any]:
        """Return the episode window and the sums of the unfinished interval."""
        return {
            "episodes": self.episodes.state_dict(),
            "sums": {name: value.clone() for name, value in self._sums.items()},
            "terms": None if self._terms is None else self._terms.clone(),
            "term_names": list(self._term_names),
            "steps": self._steps.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.episodes.load_state_dict(state["episodes"])
        self._sums = {name: value.to(self.device) for name, value in state["sums"].items()}
        self._terms = None if state["terms"] is None else state["terms"].to(self.device)
        self._term_names = list(state["term_names"])
        self._steps.fill_(state["steps"])


def _row(names: list[str], values: Tensor) -> Row:
    """Build a row; NaN in episode and task metrics (no data) becomes None."""
    return {
        name: None if name.startswith(("episode/", "task/")) and math.isnan(value) else value
        for name, value in zip(names, values.tolist(), strict=True)
    }
