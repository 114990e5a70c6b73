"""What the user should know before the first number of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gpusim_rl.run.run_dir import RunDir

if TYPE_CHECKING:
    from gpusim_rl.run.trainer import Trainer


def banner(trainer: Trainer, run_dir: RunDir, *, continues: bool) -> list[tuple[str, str]]:
    """Label and text, at most 12 lines.

    Args:
        trainer: Of the run.
        run_dir: The run's folder.
        continues: An earlier start of the run has made the folder.
    """
    spec, cfg, env, start = trainer.spec, trainer.cfg, trainer.env, trainer.start
    sizes = ", ".join(f"{name} {size}" for name, size in env.obs_sizes.items())
    ignored = "" if cfg.seed in (-1, start.seed) else f" (the checkpoint's; seed={cfg.seed} is ignored)"
    chosen = trainer.algorithm.metadata()
    threads = torch.get_num_threads()
    precision, reason = chosen.get("precision"), chosen.get("precision_reason")
    git = run_dir.environment.get("git")
    lines = [
        ("task", f"{trainer.task_name}, {_several(trainer)}{cfg.num_envs} envs, {env.summary}"),
        ("spaces", f"observations {sizes}; actions {env.num_actions}"),
        ("sim", str(start.sim)),
        (
            "learner",
            f"{cfg.algo} on {start.device}, {threads} CPU thread{'' if threads == 1 else 's'}"
            + (f", {precision} ({reason})" if precision else ""),
        ),
        ("graph", f"{trainer.collector.graphs.choice}; compiled: {trainer.compile}"),
        *trainer.algorithm.describe().items(),
        ("seed", f"{start.seed}{ignored}"),
    ]
    if spec.overrides:
        lines.append(("changed", " ".join(spec.overrides)))
    if git:
        lines.append(("commit", git["sha"][:10] + (" + local changes" if git["dirty"] else "")))
    if start.resumed:
        found = spec.checkpoint
        branch = "" if continues or found is None else f" of {found.file}, in a new run folder"
        episodes = "" if env.resumable else "; its envs cannot be saved, so new episodes begin"
        lines.append(("resumed", f"at iteration {trainer.iteration}{branch}{episodes}"))
    lines.append(("run", str(run_dir)))
    return lines


def _several(trainer: Trainer) -> str:
    """What has `num_envs` each; empty where this process has all envs."""
    actors, processes = trainer.collector.num_actors, trainer.collective.size
    if actors:
        return f"{actors} actor{'s' * (actors > 1)} ({trainer.cfg.actors.engine}) x "
    return f"{processes} processes x " if processes > 1 else ""
