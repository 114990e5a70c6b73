"""How good a policy is: one whole episode in every env, without exploration."""

from __future__ import annotations

import torch
from torch import Tensor

from gpusim_rl.env import VecEnv
from gpusim_rl.env.device_env import moved
from gpusim_rl.learn.algorithm import Policy


@torch.no_grad()
def evaluate(env: VecEnv, policy: Policy, obs: dict[str, Tensor]) -> dict[str, float]:
    """Runs one episode in every env.

    Args:
        env: At the start of an episode everywhere.
        policy: Acts with the most likely action.
        obs: What the policy sees first, on its device.

    Returns:
        Number of episodes; mean, deviation and extremes of their returns; mean length; envs that diverged.
    """
    num_envs, device = env.num_envs, next(iter(obs.values())).device
    hidden = policy.initial_state(num_envs)
    returns = torch.zeros(num_envs, device=device)
    lengths = torch.zeros_like(returns)
    running = torch.ones(num_envs, dtype=torch.bool, device=device)
    diverged = torch.zeros((), device=device)
    for _ in range(env.max_episode_length):
        action, hidden = policy.act(obs, hidden, deterministic=True)
        step = moved(env.step(action.to(env.device)), device)
        returns += torch.where(running, step.reward, 0.0)
        lengths += running.float()
        diverged += (step.diverged & running).sum()
        running &= ~step.done
        hidden = tuple(state.masked_fill(step.done[None, :, None], 0.0) for state in hidden)
        obs = step.obs
    return {
        "episodes": float(num_envs),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std(correction=0)),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "length_mean": float(lengths.mean()),
        "diverged": float(diverged),
    }
