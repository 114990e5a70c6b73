"""Replay buffer on the learner's device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import register_dataclass, tree_leaves, tree_map

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec, Observation, Outcome, RecordedTensor, recorded_steps

STORAGE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Observation dtypes by setting name."""

TERMINATED, TRUNCATED, DIVERGED = 1, 2, 4  # bit flags in `Replay.ends`


@dataclass(slots=True)
class Transitions:
    """Randomly sampled n-step transitions."""

    obs: dict[str, Tensor]
    """Raw observations [batch, size]; images as frame indices [batch, frames] until `with_frames`."""
    action: Float[Tensor, "batch actions"]
    reward: Float[Tensor, " batch"]
    """Discounted sum of rewards in the window."""
    next_obs: dict[str, Tensor]
    """Raw observations after the window; `final_obs` after a time-out."""
    discount: Float[Tensor, " batch"]
    """gamma^(steps in the window), or 0 if the episode terminated."""
    weight: Float[Tensor, " batch"]
    """1 for a valid transition, else 0."""
    index: Int[Tensor, " batch"]
    """Index in the buffer: slot * N + env."""


register_dataclass(Transitions)


@dataclass(slots=True)
class Trajectory:
    """Consecutive control steps, [T, N, ...]."""

    acted_on: dict[str, Tensor]
    action: Tensor
    final_obs: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    diverged: Tensor
    t: int = field(default=0, init=False)
    """Next control step to write."""
    _rows: list[list[Tensor]] = field(default_factory=list, init=False)

    @classmethod
    def empty(cls, horizon: int, env: EnvSpec, groups: Iterable[str], device: torch.device) -> Trajectory:
        """Allocate a rollout."""

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(horizon, env.num_envs, *size, dtype=dtype, device=device)

        groups = sorted(groups)
        obs, final_obs = (
            {g: zeros(*env.images[g], dtype=torch.uint8) if g in env.images else zeros(env.obs_sizes[g]) for g in kept}
            for kept in (groups, [g for g in groups if env.final_images or g not in env.images])
        )
        terminated, truncated, diverged = (zeros(dtype=torch.bool) for _ in range(3))
        return cls(obs, zeros(env.action_space.size), final_obs, zeros(), terminated, truncated, diverged)

    @torch.no_grad()
    def write(self, obs: Observation, action: Tensor, step: Outcome) -> None:
        """Write a control step; `obs` are the observations before it."""
        if not self._rows:
            self._rows = [[x[t] for x in tree_leaves(self)] for t in range(len(self.reward))]
        row, self.t = self._rows[self.t], (self.t + 1) % len(self._rows)
        seen, final = [obs[group] for group in self.acted_on], [step.final_obs[group] for group in self.final_obs]
        values = *seen, action, *final, step.reward, step.terminated, step.truncated, step.diverged
        for memory, value in zip(row, values, strict=True):
            memory.copy_(value)

    def latest(self) -> tuple[dict[str, Tensor], Bool[Tensor, "steps envs"], Float[Tensor, "steps envs"]]:
        """Return vector observations [T, N, size], a mask of valid steps, and rewards."""
        numbers = {group: x for group, x in self.acted_on.items() if x.is_floating_point()}
        return numbers, ~self.diverged, self.reward

    def recorded(self, steps: int) -> list[RecordedTensor]:
        """Return observations and rewards of the last rollout."""
        obs, _, reward = self.latest()
        return recorded_steps(obs, reward)


register_dataclass(Trajectory)


def ends_by_time(step: Outcome | Trajectory) -> Bool[Tensor, "*steps envs"]:
    """Return a mask of steps where the time limit alone ended the episode."""
    return step.truncated & ~(step.terminated | step.diverged)


class Replay:
    """Ring buffer of the last T control steps of N envs, [T, N, ...].

    Each observation is stored once: a step's successor is in the next slot, except after a time-out. Time-outs are
    at least `max_episode_length` steps apart, so step // length identifies their `final_obs`: T / length + 2 extra rows
    after the slots hold all reachable ones, and one gather reads slots and rows. Only complete windows are sampled. The
    host reads no tensors.

    Args:
        num_steps: T; more than `n_step`.
        n_step: Maximum window length.
        storage: Dtype of stored observations; fp16 clamps to its range.
    """

    def __init__(
        self,
        num_steps: int,
        env: EnvSpec,
        groups: Iterable[str],
        *,
        n_step: int,
        gamma: float,
        storage: torch.dtype,
        device: torch.device,
    ) -> None:
        assert num_steps > n_step
        self.num_steps, self.num_envs, self.n_step, self.device = num_steps, env.num_envs, n_step, device
        self.groups = sorted(groups)
        self._episode = env.max_episode_length
        self._rows = (num_steps - 1) // self._episode + 2  # distinct step // length in T steps, plus one

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        steps, envs = num_steps, env.num_envs
        self.obs = {g: zeros(steps + self._rows, envs, env.obs_sizes[g], dtype=storage) for g in self.groups}
        self.action = zeros(steps, envs, env.action_space.size)
        self.reward = zeros(steps, envs)
        self.ends = zeros(steps, envs, dtype=torch.uint8)
        self._columns = {"action": self.action, "reward": self.reward, "ends": self.ends}
        self._final_step = torch.full((self._rows, envs), -1, dtype=torch.int64, device=device)
        self.total = zeros(dtype=torch.int64)  # steps so far; step t is in slot t modulo T
        self._powers = gamma ** torch.arange(n_step + 1, device=device)
        self._window = torch.arange(n_step, device=device)[:, None]
        self._envs = torch.arange(envs, device=device)
        self._largest = torch.finfo(storage).max
        self.expected_bytes = sum(x.nbytes for x in (*self.obs.values(), *self._columns.values(), self._final_step))

    @property
    def fill(self) -> Tensor:
        """Number of stored steps, int64 []."""
        return self.total.clamp(max=self.num_steps)

    def exchange(self) -> None:
        """Do nothing; `HostReplay` transfers data here."""

    def with_frames(self, drawn: Transitions) -> None:
        """Replace frame indices with images in sampled transitions; a no-op without images."""

    def next_places(self, number: int) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"], Int[Tensor, " n"]]:
        """Return the indices of the next `number` steps, their slots, and the rows for their final observations."""
        time = self.total + torch.arange(number, device=self.device)
        return time, time % self.num_steps, time // self._episode % self._rows

    @torch.no_grad()
    def extend(self, steps: Trajectory) -> None:
        """Store up to T consecutive steps, overwriting the oldest."""
        (time, slot, row), cut = self.next_places(len(steps.reward)), ends_by_time(steps)
        place, behind = ((x * self.num_envs)[:, None] + self._envs for x in (slot, row))
        ended = torch.where(cut, time[:, None], -1).flatten()
        self._final_step.view(-1).scatter_reduce_(0, behind.flatten(), ended, "amax")  # the latest in each row wins
        cut &= self._final_step.take(behind) == time[:, None]
        where = torch.where(cut, behind + self.num_steps * self.num_envs, place).flatten()
        for group, memory in self.obs.items():
            seen, final = (self._stored(x[group], memory) for x in (steps.acted_on, steps.final_obs))
            memory.index_copy_(0, slot, seen)
            memory.flatten(0, 1).index_copy_(0, where, torch.where(cut[..., None], final, seen).flatten(0, 1))
        # a weight of 0 does not cancel a non-finite action
        self.action.index_copy_(0, slot, steps.action.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        self.reward.index_copy_(0, slot, steps.reward.masked_fill(steps.diverged, 0.0))
        ends = steps.terminated * TERMINATED + steps.truncated * TRUNCATED + steps.diverged * DIVERGED
        self.ends.index_copy_(0, slot, ends.to(torch.uint8))
        self.total += len(time)

    def _stored(self, value: Tensor, memory: Tensor) -> Tensor:
        if memory.dtype == torch.float32:
            return value
        # 0 * inf is NaN: infinite values stay visible
        return value.clamp(-self._largest, self._largest).add_(value, alpha=0).to(memory.dtype)

    def cut(self) -> None:
        """End all n-step windows at the last step."""
        slot = ((self.total - 1) % self.num_steps)[None]
        last = self.ends[slot]
        self.ends.index_copy_(0, slot, last.masked_fill(last == 0, DIVERGED))

    def clear(self) -> None:
        """Remove all transitions."""
        self.total.zero_()
        self._final_step.fill_(-1)

    @torch.no_grad()
    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        """Draw transitions uniformly; weights are 0 until `n_step` + 1 steps are stored."""
        envs, fill = self.num_envs, self.fill
        starts = fill - self.n_step  # leaves room for the observation after the longest window
        # float64: float32 has only 2^24 values and would never draw some transitions
        drawn = torch.rand(size, dtype=torch.float64, device=self.total.device, generator=generator)
        flat = drawn.mul_(starts.clamp(min=1) * envs).long()
        offset = flat.div(envs, rounding_mode="floor")
        env = flat.sub_(offset, alpha=envs)
        return self._windows(offset.add_(self.total - fill), env, starts > 0)[0]

    @torch.no_grad()
    def at(self, index: Int[Tensor, " batch"]) -> Transitions:
        """Return the transitions that start at indices slot * N + env; incomplete transitions have weight 0."""
        slot = index.div(self.num_envs, rounding_mode="floor")
        last = self.total - 1
        first = last - (last - slot).remainder_(self.num_steps)
        return self._windows(first, index - slot * self.num_envs, first + self.n_step <= last)[0]

    def _windows(self, first: Tensor, env: Tensor, whole: Tensor) -> tuple[Transitions, Tensor]:
        """Return transitions that begin at the absolute steps `first`, and the indices of their next observations."""
        size, envs = len(first), self.num_envs
        time = first + self._window
        index = time.remainder(self.num_steps).mul_(envs).add_(env)

        # [n, batch]: the window ends with the episode
        ends = self.ends.take(index)
        going = (ends[:-1] == 0).cumprod(dim=0)
        steps = going.sum(dim=0).add_(1)
        reward = self.reward.take(index)
        reward = reward[0] + (self._powers[1:-1, None] * going * reward[1:]).sum(dim=0)
        end = ends.gather(0, (steps - 1)[None])[0]
        discount = self._powers.take(steps).masked_fill_((end & TERMINATED) != 0, 0.0)
        last = time[0] + steps - 1
        row = last.div(self._episode, rounding_mode="floor").remainder_(self._rows)
        cut = end == TRUNCATED
        # final observation overwritten: in an env without a time limit, or within an actor's rollout
        lost = cut & (self._final_step.take(row * envs + env) != last)
        weight = ((end & DIVERGED) == 0) & ~lost & whole

        following = torch.where(cut, row + self.num_steps, (last + 1) % self.num_steps).mul_(envs).add_(env)
        both = torch.cat([index[0], following])
        obs = {g: x.flatten(0, 1).index_select(0, both).float() for g, x in self.obs.items()}
        action = self.action.flatten(0, 1).index_select(0, index[0])
        seen, left = ({g: x[part] for g, x in obs.items()} for part in (slice(size), slice(size, None)))
        return Transitions(seen, action, reward, left, discount, weight.float(), index[0]), following

    def latest(self, steps: int) -> tuple[dict[str, Tensor], Bool[Tensor, "steps envs"], Float[Tensor, "steps envs"]]:
        """Return the last observations [steps, N, size], a mask of valid steps, and rewards."""
        slots = (torch.arange(steps, device=self.total.device) + (self.total - steps)) % self.num_steps
        obs = {group: memory.index_select(0, slots).float() for group, memory in self.obs.items()}
        return obs, (self.ends.index_select(0, slots) & DIVERGED) == 0, self.reward.index_select(0, slots)

    def state_dict(self) -> dict[str, Any]:
        """Return all written slots on the host, since a copy may not fit on the GPU."""
        fill = int(self.fill)
        place = (self._final_step.flatten() >= 0).nonzero().squeeze(1)  # row * N + env of written rows
        state = {
            "total": self.total,
            "final_place": place,
            "final_step": self._final_step.take(place),
            "obs": {group: memory[:fill] for group, memory in self.obs.items()},
            "final_obs": {group: self._final(memory)[place] for group, memory in self.obs.items()},
            **{name: column[:fill] for name, column in self._columns.items()},
        }
        return tree_map(lambda x: x.to("cpu", copy=True), state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, in place."""
        if "final_place" not in state:
            raise ConfigError("the checkpoint's replay buffer format is outdated", hint="Try a new run, or test=true")
        place = state["final_place"].to(self.device)
        self.total.copy_(state["total"])
        self._final_step.fill_(-1).view(-1)[place] = state["final_step"].to(self.device)
        for group, memory in self.obs.items():
            memory[: len(state["obs"][group])].copy_(state["obs"][group])
            self._final(memory)[place] = state["final_obs"][group].to(memory.device)
        for name, column in self._columns.items():
            column[: len(state[name])].copy_(state[name])

    def _final(self, memory: Tensor) -> Tensor:
        return memory[self.num_steps :].flatten(0, 1)
