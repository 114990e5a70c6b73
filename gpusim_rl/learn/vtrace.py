"""V-trace: advantages and targets for samples of an older policy."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def vtrace(
    log_ratio: Float[Tensor, "time envs"],
    reward: Float[Tensor, "time envs"],
    value: Float[Tensor, "time envs"],
    next_value: Float[Tensor, "time envs"],
    terminated: Bool[Tensor, "time envs"],
    done: Bool[Tensor, "time envs"],
    valid: Bool[Tensor, "time envs"],
    gamma: float | Float[Tensor, "time envs"],
    *,
    lam: float = 1.0,
    clip: float = 1.0,
    advantage_clip: float | None = 1.0,
) -> tuple[Float[Tensor, "time envs"], Float[Tensor, "time envs"]]:
    """V-trace (Espeholt et al. 2018, arXiv 1802.01561, section 4.1), exact where an episode is truncated.

    A truncated episode goes on in V(final_obs), in the advantage too: the next target is of another episode there.

    Args:
        log_ratio: Logarithm of pi(a_t|s_t) / mu(a_t|s_t), of the policy that learns and the one that acted.
        reward: Reward of step t; this and the next five are as for `gae`.
        value: V(s_t), of the critic that learns.
        next_value: V of the observation after step t, before any reset.
        terminated: Whether the episode ended by the task's rules in step t.
        done: Whether the episode ended in step t for any reason.
        valid: Whether the sample counts.
        gamma: Discount per step, one for all or one for each sample.
        lam: Weight of longer returns; the paper has 1.
        clip: Largest weight of a sample in the target, rho-bar of the paper. Its c-bar is 1.
        advantage_clip: Largest weight of a sample in the advantage; None where it has none, because the loss has it.

    Returns:
        Advantages, weighted by the clipped ratio, and targets of the critic.
    """
    ignored = ~valid
    ratio = log_ratio.exp()
    trace = (gamma * lam * ratio.clamp(max=1.0)).masked_fill_(done | ignored, 0.0)
    ahead = reward + gamma * next_value.masked_fill(terminated, 0.0)
    error = (ratio.clamp(max=clip) * (ahead - value)).masked_fill_(ignored, 0.0)
    for t in reversed(range(len(error) - 1)):
        error[t].addcmul_(trace[t], error[t + 1])
    later = torch.cat([error[1:], torch.zeros_like(error[:1])]).masked_fill_(done, 0.0)
    advantage = ahead + gamma * later - value
    if advantage_clip is not None:
        advantage = ratio.clamp(max=advantage_clip) * advantage
    return advantage.masked_fill_(ignored, 0.0), value + error
