"""How good a policy is: one whole episode in every env, without exploration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from gpusim_rl.env import Environment
from gpusim_rl.env.device_env import moved
from gpusim_rl.learn.algorithm import Policy
from gpusim_rl.run.console import Console, finite
from gpusim_rl.run.run_dir import replacing


@torch.no_grad()
def evaluate(env: Environment, policy: Policy, obs: dict[str, Tensor]) -> dict[str, float]:
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


def report(console_mode: str, evaluation: Mapping[str, float | str], run_dir: Path | None) -> None:
    """Prints an evaluation, and writes it to evaluation.json in the folder of the run, in place of an earlier one.

    Args:
        console_mode: As for `Console`; `json` prints one object.
        evaluation: What was evaluated, and the result.
        run_dir: Folder of the run; None for a checkpoint that was copied elsewhere: nothing is written.
    """
    console = Console(console_mode, 0, None)
    shown = dict(evaluation)
    if run_dir is not None:
        file = run_dir / "evaluation.json"
        try:
            with replacing(file) as written:
                written.write((json.dumps(finite(evaluation), indent=2) + "\n").encode())
            shown["file"] = str(file)
        except OSError as error:
            console.warn(f"{file} cannot be written ({error.strerror})")
    console.result(shown)
    console.close()
