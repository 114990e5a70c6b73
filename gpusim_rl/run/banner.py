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
    spec, cfg, env = trainer.spec, trainer.cfg, trainer.env
    sizes = ", ".join(f"{name} {size}" for name, size in env.obs_sizes.items())
    ignored = "" if cfg.seed in (-1, trainer.seed) else f" (the checkpoint's; seed={cfg.seed} is ignored)"
    chosen = trainer.algorithm.metadata()
    threads = torch.get_num_threads()
    precision, reason = chosen.get("precision"), chosen.get("precision_reason")
    git = run_dir.environment.get("git")
    lines = [
        ("task", f"{trainer.task_name}, {trainer.several}{cfg.num_envs} envs, {env.summary}"),
        ("spaces", f"observations {sizes}; actions {env.num_actions}"),
        ("sim", str(trainer.choice)),
        (
            "learner",
            f"{cfg.algo} on {trainer.rl_device}, {threads} CPU thread{'' if threads == 1 else 's'}"
            + (f", {precision} ({reason})" if precision else ""),
        ),
        ("graph", f"{trainer.graphs.choice}; compiled: {trainer.compile}"),
        *trainer.algorithm.describe().items(),
        ("seed", f"{trainer.seed}{ignored}"),
    ]
    if spec.overrides:
        lines.append(("changed", " ".join(spec.overrides)))
    if git:
        lines.append(("commit", git["sha"][:10] + (" + local changes" if git["dirty"] else "")))
    if trainer.resumed:
        found = spec.checkpoint
        branch = "" if continues or found is None else f" of {found.file}, in a new run folder"
        episodes = "" if env.resumable else "; its envs cannot be saved, so new episodes begin"
        lines.append(("resumed", f"at iteration {trainer.iteration}{branch}{episodes}"))
    lines.append(("run", str(run_dir)))
    return lines
