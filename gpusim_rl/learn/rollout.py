"""What one iteration collected, in preallocated memory, and generalised advantage estimation."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.learn.algorithm import EnvSpec, Hidden, Observation, Transition
from gpusim_rl.learn.networks import Sample


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
    """T steps of N environments, time-major.

    V(final_obs) is needed only where the time limit ended an episode. In T steps that happens to an environment at most
    `max_truncations` times. So those observations are kept in that many slots per environment, written by mask, and
    valued in one batch per slot at the end: exact, without a second forward pass in every step, without an index list.

    Args:
        horizon: T.
        env: The environments.
        num_actions: Numbers in an action.
        num_parameters: Numbers that describe one action distribution.
        initial_hidden: A zero recurrent state for N environments; empty for feed-forward policies.
        sequence_length: Steps per training sequence of a recurrent policy; divides T.
        device: Where everything lives.
    """

    def __init__(
        self,
        horizon: int,
        env: EnvSpec,
        num_actions: int,
        num_parameters: int,
        *,
        initial_hidden: Hidden,
        sequence_length: int,
        device: torch.device,
    ) -> None:
        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        time, envs = horizon, env.num_envs
        max_truncations = 1 + (horizon - 1) // env.max_episode_length
        self.horizon, self.num_envs, self.sequence_length = horizon, envs, sequence_length
        self.obs = {group: empty(time, envs, size) for group, size in env.obs_sizes.items()}
        self.action = empty(time, envs, num_actions)
        self.distribution = empty(time, envs, num_parameters)
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

        self.last_obs = {group: empty(envs, size) for group, size in env.obs_sizes.items()}
        """The observation after the last step."""
        self.final_obs = {group: empty(max_truncations, envs, size) for group, size in env.obs_sizes.items()}
        self.final_hidden = tuple(empty(max_truncations, *h.shape) for h in initial_hidden)
        self.final_step = torch.full((max_truncations, envs), -1, dtype=torch.int64, device=device)
        self._truncations = torch.zeros(envs, dtype=torch.int64, device=device)

    def write(
        self, t: int, obs: Observation, hidden: Hidden, is_first: Tensor, sample: Sample, step: Transition
    ) -> None:
        """Stores step t; step 0 begins a new rollout.

        Args:
            t: In [0, T).
            obs: What was seen.
            hidden: Recurrent state before the step.
            is_first: An episode begins at this step.
            sample: What was done; `sample.hidden` is the recurrent state after the step.
            step: The result of the action.
        """
        if t == 0:  # the episodes of the last rollout that the time limit ended are forgotten
            self.final_step.fill_(-1)
            self._truncations.zero_()
        for group, buffer in self.obs.items():
            buffer[t].copy_(obs[group])
        if t % self.sequence_length == 0:
            for buffer, state in zip(self.hidden, hidden, strict=True):
                buffer[t // self.sequence_length].copy_(state)
        self.is_first[t].copy_(is_first)
        self.action[t].copy_(sample.action)
        sample.distribution.store(self.distribution[t])
        self.log_prob[t].copy_(sample.log_prob)
        self.value[t].copy_(sample.value)
        self.reward[t].copy_(step.reward)
        self.terminated[t].copy_(step.terminated)
        self.truncated[t].copy_(step.truncated)
        torch.logical_not(step.diverged, out=self.valid[t])
        self.done[t].copy_(step.done)
        for slot in range(self.final_step.shape[0]):
            here = step.truncated & (self._truncations == slot)
            self.final_step[slot].masked_fill_(here, t)
            for group, buffer in self.final_obs.items():
                torch.where(here[:, None], step.final_obs[group], buffer[slot], out=buffer[slot])
            for buffer, state in zip(self.final_hidden, sample.hidden, strict=True):
                torch.where(here[None, :, None], state, buffer[slot], out=buffer[slot])
        self._truncations += step.truncated
        if t == self.horizon - 1:
            for group, buffer in self.last_obs.items():
                buffer.copy_(step.obs[group])

    def next_values(self, last_value: Tensor, final_values: Float[Tensor, "slots envs"]) -> Float[Tensor, "time envs"]:
        """V of the observation after each step, before any reset, [T, N].

        Args:
            last_value: V of the observation after the last step, [N].
            final_values: V of `final_obs`; slots that are not in use may hold anything.
        """
        next_value = torch.cat([self.value[1:], last_value[None]])
        steps = torch.arange(self.horizon, device=last_value.device)[:, None]
        for slot in range(self.final_step.shape[0]):
            next_value = torch.where(steps == self.final_step[slot], final_values[slot], next_value)
        return next_value
