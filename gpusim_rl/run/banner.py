"""Description of a run before its first number."""

from __future__ import annotations

import torch

from gpusim_rl.run.metadata import precision
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.run_view import RunView


def banner(run: RunView, run_dir: RunDir, *, continues: bool) -> list[tuple[str, str]]:
    """Returns labels and texts, at most 12; `continues` tells that an earlier start of the run has made the folder."""
    start, cfg, env = run.start, run.cfg, run.env
    sizes = ", ".join(f"{name} {size}" for name, size in env.obs_sizes.items())
    ignored = "" if cfg.seed in (-1, start.seed) else f" (the checkpoint's; seed={cfg.seed} is ignored)"
    threads = torch.get_num_threads()
    chosen = precision(cfg.algorithm, run.algorithm.policy, start.device)
    bits = f", {chosen['precision']} ({chosen['precision_reason']})" if chosen else ""
    git = run_dir.environment.get("git")
    lines = [
        ("task", f"{run.start.task_name}, {_several(run)}{cfg.num_envs} envs, {env.summary}"),
        ("spaces", f"observations {sizes}; actions {env.num_actions}"),
        ("sim", str(start.sim)),
        ("learner", f"{cfg.algo} on {start.device}, {threads} CPU thread{'' if threads == 1 else 's'}{bits}"),
        ("graph", f"{run.graph}; compiled: {start.compile}"),
        *run.algorithm.describe().items(),
        ("seed", f"{start.seed}{ignored}"),
    ]
    if start.spec.overrides:
        lines.append(("changed", " ".join(start.spec.overrides)))
    if git:
        lines.append(("commit", git["sha"][:10] + (" + local changes" if git["dirty"] else "")))
    if start.resumed:
        checkpoint = start.spec.checkpoint
        branch = "" if continues or checkpoint is None else f" of {checkpoint.file}, in a new run folder"
        episodes = "" if env.resumable else "; its envs cannot be saved, so new episodes begin"
        lines.append(("resumed", f"at iteration {run.iteration}{branch}{episodes}"))
    lines.append(("run", str(run_dir)))
    return lines


def _several(run: RunView) -> str:
    """Owners of `num_envs` each; empty where this process has all envs."""
    actors, processes = run.num_actors, run.start.collective.size
    if actors:
        return f"{actors} actor{'s' * (actors > 1)} ({run.cfg.actors.engine}) x "
    return f"{processes} processes x " if processes > 1 else ""
