"""What one iteration collected, in preallocated memory, and generalised advantage estimation."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.learn.networks import Hidden, Sample


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
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, equation 16).

    Args:
        reward: Reward of step t.
        value: V(s_t).
        next_value: V of the observation after step t, before any reset: V(final_obs) where an episode was truncated.
        terminated: The episode ended by the task's rules in step t: what follows is worth 0.
        done: The episode ended in step t for any reason: nothing of the next episode leaks into it.
        valid: The sample counts; where it does not, its advantage is 0 and the trajectory before it ends there.
        gamma: Discount per step.
        gae_lambda: Weight of longer returns.

    Returns:
        Advantages, and returns (advantage + value).
    """
    not_terminated = (~terminated).to(reward.dtype)
    carry_on = (~done & valid).to(reward.dtype) * (gamma * gae_lambda)
    delta = torch.where(valid, reward + gamma * next_value * not_terminated - value, 0.0)
    advantage = torch.empty_like(reward)
    running = torch.zeros_like(reward[0])
    for t in reversed(range(reward.shape[0])):
        running = delta[t] + carry_on[t] * running
        advantage[t] = running
    return advantage, advantage + value


class Rollout:
    """T steps of N envs, time-major.

    V(final_obs) is needed only where the time limit cut an episode, which in T steps happens to an env at most
    `max_truncations` times. So those observations are kept in that many slots per env, written by mask, and valued in
    one batch per slot at the end: exact, without a second forward pass in every step and without an index list.

    Args:
        horizon: T.
        num_envs: N.
        obs_sizes: Size of each observation group.
        num_actions: Size of the action vector.
        initial_hidden: A zero recurrent state for N envs; empty for feed-forward policies.
        sequence_length: Steps per training sequence of a recurrent policy; divides T.
        max_truncations: How often the time limit can end an episode of one env in T steps.
        device: Where everything lives.
    """

    def __init__(
        self,
        horizon: int,
        num_envs: int,
        obs_sizes: Mapping[str, int],
        num_actions: int,
        *,
        initial_hidden: Hidden,
        sequence_length: int,
        max_truncations: int,
        device: torch.device,
    ) -> None:
        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        time, envs = horizon, num_envs
        self.horizon, self.num_envs, self.sequence_length = horizon, num_envs, sequence_length
        self.obs = {group: empty(time, envs, size) for group, size in obs_sizes.items()}
        self.action = empty(time, envs, num_actions)
        self.mean = empty(time, envs, num_actions)
        self.log_std = empty(time, envs, num_actions)
        self.log_prob = empty(time, envs)
        self.value = empty(time, envs)
        self.reward = empty(time, envs)
        self.terminated = empty(time, envs, dtype=torch.bool)
        self.truncated = empty(time, envs, dtype=torch.bool)
        self.valid = empty(time, envs, dtype=torch.bool)
        self.done = empty(time, envs, dtype=torch.bool)
        self.is_first = empty(time, envs, dtype=torch.bool)
        """An episode begins at this step."""
        self.hidden = tuple(empty(time // sequence_length, *h.shape) for h in initial_hidden)
        """Recurrent state before the first step of each sequence, [sequences, layers, N, size]."""

        self.final_obs = {group: empty(max_truncations, envs, size) for group, size in obs_sizes.items()}
        self.final_hidden = tuple(empty(max_truncations, *h.shape) for h in initial_hidden)
        self.final_step = torch.full((max_truncations, envs), -1, dtype=torch.int64, device=device)
        self._truncations = torch.zeros(envs, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Forgets the last rollout's truncated episodes."""
        self.final_step.fill_(-1)
        self._truncations.zero_()

    def write_policy(self, t: int, obs: Mapping[str, Tensor], hidden: Hidden, is_first: Tensor, sample: Sample) -> None:
        """Stores what was seen and done at step t."""
        for group, buffer in self.obs.items():
            buffer[t].copy_(obs[group])
        if t % self.sequence_length == 0:
            for buffer, state in zip(self.hidden, hidden, strict=True):
                buffer[t // self.sequence_length].copy_(state)
        self.is_first[t].copy_(is_first)
        self.action[t].copy_(sample.action)
        self.mean[t].copy_(sample.mean)
        self.log_std[t].copy_(sample.log_std)
        self.log_prob[t].copy_(sample.log_prob)
        self.value[t].copy_(sample.value)

    def write_outcome(
        self,
        t: int,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        diverged: Tensor,
        final_obs: Mapping[str, Tensor],
        hidden: Hidden,
    ) -> None:
        """Stores what came of step t; `hidden` is the recurrent state after it."""
        self.reward[t].copy_(reward)
        self.terminated[t].copy_(terminated)
        self.truncated[t].copy_(truncated)
        torch.logical_not(diverged, out=self.valid[t])
        torch.logical_or(terminated, truncated, out=self.done[t])
        self.done[t].logical_or_(diverged)
        for slot in range(self.final_step.shape[0]):
            here = truncated & (self._truncations == slot)
            self.final_step[slot].masked_fill_(here, t)
            for group, buffer in self.final_obs.items():
                torch.where(here[:, None], final_obs[group], buffer[slot], out=buffer[slot])
            for buffer, state in zip(self.final_hidden, hidden, strict=True):
                torch.where(here[None, :, None], state, buffer[slot], out=buffer[slot])
        self._truncations += truncated

    def next_values(self, last_value: Tensor, final_values: Float[Tensor, "slots envs"]) -> Float[Tensor, "time envs"]:
        """V of the observation after each step, before any reset.

        Args:
            last_value: V of the observation after the last step, [N].
            final_values: V of `final_obs`; slots that are not in use may hold anything.
        """
        next_value = torch.cat([self.value[1:], last_value[None]])
        steps = torch.arange(self.horizon, device=last_value.device)[:, None]
        for slot in range(self.final_step.shape[0]):
            next_value = torch.where(steps == self.final_step[slot], final_values[slot], next_value)
        return next_value
