"""Evaluation of a policy: whole episodes without exploration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack, closing

import torch
from torch import Tensor

from gpusim_rl.env import Environment
from gpusim_rl.errors import one_line_if_out_of_memory
from gpusim_rl.files.safe_open import replacing
from gpusim_rl.learn.algorithm import Policy, make_policy
from gpusim_rl.run.checkpoint import check_spaces, must_fit
from gpusim_rl.run.console import Console, finite
from gpusim_rl.run.make_env import make_started_env
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.start import RunStart, begin

logger = logging.getLogger(__name__)


@torch.no_grad()
def evaluate(
    env: Environment, policy: Policy, obs: dict[str, Tensor], episodes: int = 1
) -> tuple[dict[str, float], Tensor]:
    """Run whole episodes in every env with the policy's deterministic actions, starting from `obs`.

    Return a summary (mean, deviation and extremes of the return, mean length in control steps, number of divergences,
    means of the task's `stats()` as `task/<name>`), and the returns, shape [episodes, num_envs].
    """
    num_envs, device = env.num_envs, next(iter(obs.values())).device
    hidden = policy.initial_state(num_envs)
    returns = torch.zeros(episodes, num_envs, device=device)
    lengths = torch.zeros_like(returns)
    episode = torch.zeros(1, num_envs, dtype=torch.int64, device=device)  # index of the current episode
    diverged = torch.zeros((), device=device)
    sums: dict[str, Tensor] = {}  # sum and count of each of the task's statistics
    for _ in range(episodes * (env.max_episode_length + 1)):  # some libraries use a step for a reset
        action, hidden = policy.act(obs, hidden, deterministic=True)
        step = env.step(action.to(env.device)).to(device)
        counts = episode[0] < episodes
        if step.skipped is not None:
            counts &= ~step.skipped
        slot = episode.clamp(max=episodes - 1)
        returns.scatter_add_(0, slot, torch.where(counts, step.reward, 0.0)[None])
        lengths.scatter_add_(0, slot, counts.float()[None])
        diverged += (step.diverged & counts).sum()
        for name, value in step.stats.items():
            known = counts & ~value.isnan()
            both = torch.stack([torch.where(known, value, 0.0).sum(), known.sum()]).double()
            sums[name] = sums[name] + both if name in sums else both
        episode += (step.done & counts)[None]
        if not bool((episode < episodes).any()):
            break
        hidden = tuple(state.masked_fill(step.done[None, :, None], 0.0) for state in hidden)
        obs = step.obs
    if cut := int((episodes - episode).clamp(min=0).sum()):
        text = "%d of %d episodes had not ended after %d steps: their returns are partial"
        logger.warning(text, cut, returns.numel(), env.max_episode_length * episodes)
    return {
        "episodes": float(returns.numel()),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std(correction=0)),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "length_mean": float(lengths.mean()),
        "diverged": float(diverged),
        **{f"task/{name}": float(total / count) for name, (total, count) in sums.items()},
    }, returns


def restore(spec: RunSpec) -> tuple[RunStart, Environment, Policy, dict[str, Tensor]]:
    """Rebuild a checkpoint's policy, and envs with its curriculum state; return start, envs, policy, observations."""
    start, state = begin(spec)
    assert state is not None and spec.checkpoint is not None, "begin() has read the checkpoint"
    env, obs = make_started_env(start)
    with ExitStack() as stack, must_fit(spec.checkpoint.file, f"task {start.task_name} with algo={spec.cfg.algo}"):
        stack.enter_context(closing(env))
        check_spaces(state, env)
        spaces = env.obs_sizes, env.action_space, start.device, env.images
        policy = make_policy(spec.algorithm_class, spec.cfg, *spaces).eval()
        policy.load_state_dict(state["policy"])
        for group, value in env.begin_from(state["env"]).items():
            obs[group].copy_(value)
        stack.pop_all()  # the caller closes the env
    return start, env, policy, obs


def evaluate_run(spec: RunSpec) -> dict[str, float]:
    """Evaluate a checkpoint for one episode per env; print, write and return the result."""
    with one_line_if_out_of_memory(spec.cfg.num_envs):
        start, env, policy, obs = restore(spec)
        with closing(env):
            result, _ = evaluate(env, policy, obs)
    report(start, result)
    return result


def report(start: RunStart, result: Mapping[str, float]) -> None:
    """Print the result of `evaluate` and write it to evaluation.json in the run folder, if there is one."""
    checkpoint = start.spec.checkpoint
    shown: dict[str, float | str] = {
        "checkpoint": str(checkpoint.file if checkpoint else start.cfg.checkpoint),
        "iteration": start.iteration,
        "task": start.task_name,
        "sim": start.sim.name,
        "seed": start.seed,
        "num_envs": start.cfg.num_envs,
        **result,
    }
    console = Console(start.cfg.log.console, 0, None)
    if checkpoint is not None and checkpoint.run_dir is not None:
        file = checkpoint.run_dir / "evaluation.json"
        try:
            with replacing(file) as written:
                written.write((json.dumps(finite(shown), indent=2) + "\n").encode())
            shown["file"] = str(file)
        except OSError as error:
            console.warn(f"cannot write {file} ({error.strerror})")
    console.result(shown)
    console.close()
