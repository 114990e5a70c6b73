"""Rollout memory and generalised advantage estimation."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.learn.algorithm import EnvSpec, Hidden, Observation, RecordedTensor, Transition, recorded_steps
from gpusim_rl.learn.networks import SampledActions


def gae(
    reward: Float[Tensor, "time envs"],
    value: Float[Tensor, "time envs"],
    next_value: Float[Tensor, "time envs"],
    terminated: Bool[Tensor, "time envs"],
    done: Bool[Tensor, "time envs"],
    valid: Bool[Tensor, "time envs"],
    gamma: float,
    gae_lambda: float,
) -> tuple[Float[Tensor, "time envs"], Float[Tensor, "time envs"]]:
    """Compute generalised advantages (Schulman et al. 2016, arXiv 1506.02438, equation 16).

    Args:
        reward: Reward of step t.
        value: V(s_t).
        next_value: V after step t, before any reset: V(final_obs) where truncated.
        terminated: The task ended the episode: no bootstrap.
        done: The episode ended.
        valid: Mask of valid samples; invalid samples have advantage 0, and the trajectory ends before them.
        gamma: Discount per step.
        gae_lambda: Weight of longer returns.

    Returns:
        Advantages, and returns (advantage + value).
    """
    # A_t = reward_t + gamma (1 - terminated_t) next_value_t - value_t + gamma gae_lambda (1 - done_t) A_{t+1}
    ignored = ~valid
    carry_on = torch.ones_like(reward).masked_fill_(done | ignored, 0.0).mul_(gamma * gae_lambda)
    discount = reward.new_full((), gamma)
    advantage = torch.addcmul(reward, next_value.masked_fill(terminated, 0.0), discount).sub_(value)
    advantage.masked_fill_(ignored, 0.0)
    for t in reversed(range(len(advantage) - 1)):
        advantage[t].addcmul_(carry_on[t], advantage[t + 1])
    return advantage, advantage + value


class Rollout:
    """T steps of N envs, time-major, in preallocated memory.

    The time limit ends an env's episode at most once in `max_episode_length` steps, so there is one `final_obs` slot
    per that many steps, zero if unused. The critic evaluates all slots in one batch at the end, with images if
    `valued_images`. The recurrent state before each sequence is kept; `sequence_length` divides T.
    """

    def __init__(
        self,
        horizon: int,
        env: EnvSpec,
        num_parameters: int,
        *,
        initial_hidden: Hidden,
        sequence_length: int,
        device: torch.device,
        valued_images: bool = True,
    ) -> None:
        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        time, envs = horizon, env.num_envs
        self._steps_per_slot = min(env.max_episode_length, horizon)
        self.slots = -(-horizon // self._steps_per_slot)
        self.horizon, self.num_envs, self.sequence_length = horizon, envs, sequence_length
        num_actions, uint8 = env.action_space.size, torch.uint8
        self.obs = {group: empty(time, envs, size) for group, size in env.obs_sizes.items()}
        self.obs |= {group: empty(time, envs, *shape, dtype=uint8) for group, shape in env.images.items()}
        # One operation writes each of the following four; `action`, `value`, `reward` and the masks are views.
        self._drawn = empty(time, envs, num_actions + num_parameters)
        self._numbers = empty(time, 2, envs)
        self._masks = empty(time, 4, envs, dtype=torch.bool)
        self._begins = empty(envs, dtype=torch.bool)  # an episode begins with the first step
        # Recurrent state before each sequence, [sequences, layers, N, size]
        self.hidden = tuple(empty(time // sequence_length, *h.shape, dtype=h.dtype) for h in initial_hidden)
        # Observations for the critic alone (`last_obs`, `final_obs`), and recurrent state before each of them
        later = 1 + self.slots
        self.later_obs = {group: empty(later, envs, size) for group, size in env.obs_sizes.items()}
        if valued_images:
            self.later_obs |= {group: empty(later, envs, *shape, dtype=uint8) for group, shape in env.images.items()}
        self.later_hidden = tuple(empty(later, *h.shape, dtype=h.dtype) for h in initial_hidden)
        self.action, self.distribution = self._drawn.tensor_split([num_actions], dim=-1)
        self.value, self.reward = self._numbers.unbind(1)
        self.terminated, self.truncated, self.diverged, self.done = self._masks.unbind(1)
        self.last_obs = {group: x[0] for group, x in self.later_obs.items()}
        self.final_obs = {group: x[1:] for group, x in self.later_obs.items()}
        self.last_hidden = tuple(x[0] for x in self.later_hidden)
        self.final_hidden = tuple(x[1:] for x in self.later_hidden)

    def memory(self) -> list[tuple[Tensor, int]]:
        """Return all tensors, each with its env dimension."""
        stored = [(x, 1) for x in (*self.obs.values(), self._drawn, *self.later_obs.values())]
        hidden = [(x, 2) for x in (*self.hidden, *self.later_hidden)]
        return [*stored, *hidden, (self._numbers, 2), (self._masks, 2), (self._begins, 0)]

    @property
    def valid(self) -> Bool[Tensor, "time envs"]:
        """Mask of valid samples: the env did not diverge."""
        return ~self.diverged

    @property
    def is_first(self) -> Bool[Tensor, "time envs"]:
        """Mask of steps that begin an episode."""
        return torch.cat([self._begins[None], self.done[:-1]])

    @torch.no_grad()
    def write(
        self, t: int, obs: Observation, hidden: Hidden, is_first: Tensor, sample: SampledActions, step: Transition
    ) -> None:
        """Store step t, with observations and recurrent state before it; step 0 also stores `is_first` [N]."""
        if t == 0:
            self._begins.copy_(is_first)
            for buffer in (*self.final_obs.values(), *self.final_hidden):
                buffer.zero_()
        for group, buffer in self.obs.items():
            buffer[t].copy_(obs[group])
        if t % self.sequence_length == 0:
            for buffer, state in zip(self.hidden, hidden, strict=True):
                buffer[t // self.sequence_length].copy_(state)
        torch.cat([sample.action, *sample.distribution.parameters], dim=1, out=self._drawn[t])
        torch.stack([sample.value, step.reward], out=self._numbers[t])
        torch.stack([step.terminated, step.truncated, step.diverged, step.done], out=self._masks[t])
        slot, cut = t // self._steps_per_slot, step.truncated[:, None]
        pairs = [(self.final_obs[group], step.final_obs[group]) for group in self.final_obs]
        for buffer, new in (*pairs, *zip(self.final_hidden, sample.hidden, strict=True)):
            where = cut[..., None, None] if new.dim() == 4 else cut  # images
            torch.where(where, new, buffer[slot], out=buffer[slot])
        if t == self.horizon - 1:
            for group, buffer in self.last_obs.items():
                buffer.copy_(step.obs[group])
            for buffer, state in zip(self.last_hidden, sample.hidden, strict=True):
                buffer.copy_(state.masked_fill(step.done[None, :, None], 0.0))

    def recorded(self, steps: int) -> list[RecordedTensor]:
        """Return observations and rewards of the last steps, and observations after them."""
        obs = {group: x[-steps:] for group, x in self.obs.items() if x.is_floating_point()}
        name, axes = "an observation after the last step", ("", "env", "column")
        later = [RecordedTensor(name, x, axes, g) for g, x in self.later_obs.items() if x.is_floating_point()]
        return [*recorded_steps(obs, self.reward[-steps:]), *later]

    def next_values(self, last_value: Tensor, final_values: Float[Tensor, "slots envs"]) -> Float[Tensor, "time envs"]:
        """Return V after each step, before any reset, from V of `last_obs` and `final_obs`."""
        next_value = torch.cat([self.value[1:], last_value[None]])
        final_value = final_values.repeat_interleave(self._steps_per_slot, dim=0)[: self.horizon]
        return torch.where(self.truncated, final_value, next_value)
