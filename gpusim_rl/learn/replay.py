"""Replay memory on the device: what off-policy algorithms learn from."""

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
"""Types that observations may be kept in, by their names in the settings."""

TERMINATED, TRUNCATED, DIVERGED = 1, 2, 4  # bits of `Replay.ends`


@dataclass(slots=True)
class Transitions:
    """Transitions over n steps, in random order. Discount and weight stand for all flags."""

    obs: dict[str, Tensor]
    """Raw observations, float32 [batch, size] each; of images, until `with_frames`, places in the memory, [batch,
    frames]."""
    action: Float[Tensor, "batch actions"]
    reward: Float[Tensor, " batch"]
    """Discounted sum over the window, which ends with the episode."""
    next_obs: dict[str, Tensor]
    """Raw observations after the window: where the time limit ended the episode, the last ones of that episode."""
    discount: Float[Tensor, " batch"]
    """Discount of the value of `next_obs`: gamma^(steps in the window); 0 where the episode terminated."""
    weight: Float[Tensor, " batch"]
    """1 where the transition counts, else 0."""
    index: Int[Tensor, " batch"]
    """Place in the memory: slot * N + env."""

    def beside(self, other: Transitions, number: int) -> Transitions:
        """Adds those of another memory: of each of `number` equal batches these come first, then the others."""

        def joined(ours: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([x.unflatten(0, (number, -1)) for x in (ours, theirs)], dim=1).flatten(0, 1)

        return tree_map(joined, self, other)


register_dataclass(Transitions)


@dataclass(slots=True)
class Trajectory:
    """Control steps, [T, N, ...] each, or one of them: what a `Replay` stores, and no more.

    A rollout is kept here until it is stored as a whole: so a step of few envs takes few operations.
    """

    acted_on: dict[str, Tensor]
    action: Tensor
    final_obs: dict[str, Tensor]
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    diverged: Tensor
    t: int = field(default=0, init=False)
    """Control step that is written next."""
    _rows: list[list[Tensor]] = field(default_factory=list, init=False)

    @classmethod
    def empty(cls, horizon: int, env: EnvSpec, groups: Iterable[str], device: torch.device) -> Trajectory:
        """Makes room for a rollout of `horizon` steps, with these observation groups; final images if there are any."""

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(horizon, env.num_envs, *size, dtype=dtype, device=device)

        groups = sorted(groups)
        obs, final_obs = (
            {g: zeros(*env.images[g], dtype=torch.uint8) if g in env.images else zeros(env.obs_sizes[g]) for g in kept}
            for kept in (groups, [g for g in groups if env.final_images or g not in env.images])
        )
        terminated, truncated, diverged = (zeros(dtype=torch.bool) for _ in range(3))
        return cls(obs, zeros(env.action_space.size), final_obs, zeros(), terminated, truncated, diverged)

    def at(self, t: int) -> Trajectory:
        """Returns step t."""
        return tree_map(lambda x: x[t], self)

    def begin_rollout(self) -> None:
        """Makes the next step the first one of a rollout, also where the last one was left in the middle."""
        self.t = 0

    @torch.no_grad()
    def write(self, obs: Observation, action: Tensor, step: Outcome) -> None:
        """Keeps a control step: observations before it, actions, outcome."""
        if not self._rows:
            self._rows = [tree_leaves(self.at(t)) for t in range(len(self.reward))]
        row, self.t = self._rows[self.t], (self.t + 1) % len(self._rows)
        seen, final = [obs[group] for group in self.acted_on], [step.final_obs[group] for group in self.final_obs]
        values = *seen, action, *final, step.reward, step.terminated, step.truncated, step.diverged
        for memory, value in zip(row, values, strict=True):
            memory.copy_(value)

    def latest(self) -> tuple[dict[str, Tensor], Bool[Tensor, "steps envs"], Float[Tensor, "steps envs"]]:
        """Returns observations of numbers [T, N, size], which of them did not diverge, and rewards."""
        numbers = {group: x for group, x in self.acted_on.items() if x.is_floating_point()}
        return numbers, ~self.diverged, self.reward


register_dataclass(Trajectory)


def ends_by_time(step: Outcome | Trajectory) -> Bool[Tensor, "*steps envs"]:
    """Returns where the time limit, and nothing else, ended an episode: what follows is `final_obs`."""
    return step.truncated & ~(step.terminated | step.diverged)


class Replay:
    """The last T control steps of N environments, in a ring [T, N, ...].

    An observation is stored once. The next slot has the observation that follows a step, except where the time limit
    ended an episode. Such `final_obs` are at least `max_episode_length` steps apart. So the step number divided by that
    length tells them apart, and a ring of T / length + 2 rows holds all that can be asked for. The rows lie behind the
    T slots, in the same tensor, so that one gather reads both kinds.

    Starts are drawn such that the whole window and the observation after it are stored: no window reaches across the
    place of the next write. The step counter is a tensor on the device, and nothing is read on the host.

    Args:
        num_steps: T; more than `n_step`.
        groups: Observation groups to keep.
        n_step: Largest number of steps in a window.
        gamma: Discount per step.
        storage: Type of observations in memory. In fp16 they are clamped to its range, +-65504.

    Attributes:
        expected_bytes: Memory that it will take when it is full [bytes].
        groups: Observation groups that it keeps.
        obs: Observation groups, [T + rows for final observations, N, size] each.
        total: Steps written since the beginning, int64 []; step t is in slot t modulo T.
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
        self._rows = (num_steps - 1) // self._episode + 2  # quotients that T successive steps can have, and one more

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        steps, envs = num_steps, env.num_envs
        self.obs = {g: zeros(steps + self._rows, envs, env.obs_sizes[g], dtype=storage) for g in self.groups}
        self.action = zeros(steps, envs, env.action_space.size)
        self.reward = zeros(steps, envs)
        self.ends = zeros(steps, envs, dtype=torch.uint8)
        self._final_step = torch.full((self._rows, envs), -1, dtype=torch.int64, device=device)
        self.total = zeros(dtype=torch.int64)
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
        """Does nothing: the memory is where the learner is."""

    def with_frames(self, drawn: Transitions) -> None:
        """Puts images in the stead of their places, in transitions that were drawn: here there are none."""

    def next_places(self, number: int) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"], Int[Tensor, " n"]]:
        """Returns the next control steps, their slots, and the rows behind the slots for their final observations."""
        time = self.total + torch.arange(number, device=self.device)
        return time, time % self.num_steps, time // self._episode % self._rows

    @torch.no_grad()
    def write(self, obs: Observation, action: Tensor, step: Outcome) -> None:
        """Stores a control step (observations before it, actions, outcome), in place of the oldest one if full."""
        flags = step.terminated, step.truncated, step.diverged
        steps = Trajectory(dict(obs), action.to(self.action.dtype), dict(step.final_obs), step.reward, *flags)
        self.extend(tree_map(lambda x: x[None], steps))

    @torch.no_grad()
    def extend(self, steps: Trajectory) -> None:
        """Stores successive control steps, T at most, in place of the oldest ones if full."""
        (time, slot, row), cut = self.next_places(len(steps.reward)), ends_by_time(steps)
        place, behind = ((x * self.num_envs)[:, None] + self._envs for x in (slot, row))
        # The last one of a row counts, where an env keeps no time limit.
        self._final_step.view(-1).scatter_reduce_(
            0, behind.flatten(), torch.where(cut, time[:, None], -1).flatten(), "amax"
        )
        cut &= self._final_step.take(behind) == time[:, None]
        where = torch.where(cut, behind + self.num_steps * self.num_envs, place).flatten()
        for group, memory in self.obs.items():
            seen, final = (self._stored(x[group], memory) for x in (steps.acted_on, steps.final_obs))
            memory.index_copy_(0, slot, seen)
            memory.flatten(0, 1).index_copy_(0, where, torch.where(cut[..., None], final, seen).flatten(0, 1))
        # A bad action is not finite, and no weight makes that a 0.
        self.action.index_copy_(0, slot, steps.action.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        self.reward.index_copy_(0, slot, steps.reward.masked_fill(steps.diverged, 0.0))
        ends = steps.terminated * TERMINATED + steps.truncated * TRUNCATED + steps.diverged * DIVERGED
        self.ends.index_copy_(0, slot, ends.to(torch.uint8))
        self.total += len(time)

    def _stored(self, value: Tensor, memory: Tensor) -> Tensor:
        if memory.dtype == torch.float32:
            return value
        # 0 * inf is NaN: what is infinite must not look like the limit.
        return value.clamp(-self._largest, self._largest).add_(value, alpha=0).to(memory.dtype)

    def cut(self) -> None:
        """Ends all windows with the last step: the next one does not follow from it."""
        slot = ((self.total - 1) % self.num_steps)[None]
        last = self.ends[slot]
        self.ends.index_copy_(0, slot, last.masked_fill(last == 0, DIVERGED))

    def clear(self) -> None:
        """Forgets everything."""
        self.total.zero_()
        self._final_step.fill_(-1)

    @torch.no_grad()
    def sample(self, size: int, generator: torch.Generator) -> Transitions:
        """Draws transitions uniformly, with replacement. Until `n_step` + 1 steps are stored, all have weight 0."""
        envs, fill = self.num_envs, self.fill
        starts = fill - self.n_step  # the observation after the longest window must be stored too
        # float64: float32 has 2^24 values only, and would never draw some of the transitions.
        drawn = torch.rand(size, dtype=torch.float64, device=self.total.device, generator=generator)
        flat = drawn.mul_(starts.clamp(min=1) * envs).long()
        offset = flat.div(envs, rounding_mode="floor")
        env = flat.sub_(offset, alpha=envs)
        return self._windows(offset.add_(self.total - fill), env, starts > 0)[0]

    @torch.no_grad()
    def at(self, index: Int[Tensor, " batch"]) -> Transitions:
        """Returns the transitions that begin at slot * N + env. Weight 0 where a window is not stored whole."""
        slot = index.div(self.num_envs, rounding_mode="floor")
        last = self.total - 1
        first = last - (last - slot).remainder_(self.num_steps)
        return self._windows(first, index - slot * self.num_envs, first + self.n_step <= last)[0]

    def _windows(self, first: Tensor, env: Tensor, whole: Tensor) -> tuple[Transitions, Tensor]:
        """Returns transitions that begin with the steps `first`, counted since the beginning; `whole` if stored.

        With them come the places of their next observations: slot * N + env, or (T + row) * N + env of final ones.
        """
        size, envs = len(first), self.num_envs
        time = first + self._window
        index = time.remainder(self.num_steps).mul_(envs).add_(env)

        # [n, batch]: a step belongs to the window if none before it ended the episode
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
        # Lost are those of an environment that keeps no time limit, and those within a rollout of an actor.
        lost = cut & (self._final_step.take(row * envs + env) != last)
        weight = ((end & DIVERGED) == 0) & ~lost & whole

        following = torch.where(cut, row + self.num_steps, (last + 1) % self.num_steps).mul_(envs).add_(env)
        both = torch.cat([index[0], following])
        obs = {g: x.flatten(0, 1).index_select(0, both).float() for g, x in self.obs.items()}
        action = self.action.flatten(0, 1).index_select(0, index[0])
        seen, left = ({g: x[part] for g, x in obs.items()} for part in (slice(size), slice(size, None)))
        return Transitions(seen, action, reward, left, discount, weight.float(), index[0]), following

    def latest(self, steps: int) -> tuple[dict[str, Tensor], Bool[Tensor, "steps envs"], Float[Tensor, "steps envs"]]:
        """Returns the last steps: observations [steps, N, size], which of them did not diverge, and rewards."""
        slots = (torch.arange(steps, device=self.total.device) + (self.total - steps)) % self.num_steps
        obs = {group: memory.index_select(0, slots).float() for group, memory in self.obs.items()}
        return obs, (self.ends.index_select(0, slots) & DIVERGED) == 0, self.reward.index_select(0, slots)

    def recorded(self, steps: int) -> list[RecordedTensor]:
        """Returns observations and rewards of the last control steps."""
        obs, _, reward = self.latest(steps)
        return recorded_steps(obs, reward)

    @property
    def _columns(self) -> dict[str, Tensor]:
        return {"action": self.action, "reward": self.reward, "ends": self.ends}

    def state_dict(self) -> dict[str, Any]:
        """Returns what is stored, on the host: a GPU may have no room for it twice. Reads the number of steps.

        Slots that were never written are left out, and so are the places of final observations.
        """
        fill = int(self.fill)
        place = (self._final_step.flatten() >= 0).nonzero().squeeze(1)  # row * N + env of those that were written

        def copy(x: Tensor) -> Tensor:
            return x.to("cpu", copy=True)

        return {
            "total": copy(self.total),
            "final_place": copy(place),
            "final_step": copy(self._final_step.take(place)),
            "obs": {group: copy(memory[:fill]) for group, memory in self.obs.items()},
            "final_obs": {
                group: copy(memory[self.num_steps :].flatten(0, 1)[place]) for group, memory in self.obs.items()
            },
            **{name: copy(column[:fill]) for name, column in self._columns.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`, in place."""
        if "final_place" not in state:
            raise ConfigError("the checkpoint has a replay memory of an earlier layout. Try a new run, or test=true")
        place = state["final_place"].to(self.device)
        self.total.copy_(state["total"])
        self._final_step.fill_(-1).view(-1)[place] = state["final_step"].to(self.device)
        for group, memory in self.obs.items():
            memory[: len(state["obs"][group])].copy_(state["obs"][group])
            memory[self.num_steps :].flatten(0, 1)[place] = state["final_obs"][group].to(memory.device)
        for name, column in self._columns.items():
            column[: len(state[name])].copy_(state[name])
