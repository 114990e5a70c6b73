"""Descriptions of a run: banner and env.json."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import psutil
import torch

from gpusim_rl.learn.algorithm import choose_precision
from gpusim_rl.machine.hardware import memory_available_bytes
from gpusim_rl.run.run_dir import RunDir, chosen_task
from gpusim_rl.run.start import RunView
from gpusim_rl.settings.discover import FULL, recipes, tuned_sections
from gpusim_rl.settings.schema import ALGORITHMS, algorithm_of

OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME")


def banner(run: RunView, run_dir: RunDir, *, continues: bool) -> list[tuple[str, str]]:
    """Return the banner, at most 12 (label, text) pairs; `continues`: the run folder is from an earlier start."""
    start, cfg, env = run.start, run.cfg, run.env
    sizes = ", ".join(f"{name} {size}" for name, size in env.obs_sizes.items() if size)
    sizes += "".join(f", {name} {'x'.join(map(str, shape))}" for name, shape in env.images.items())
    ignored = "" if cfg.seed in (-1, start.seed) else f" (from the checkpoint; seed={cfg.seed} is ignored)"
    threads, chosen = torch.get_num_threads(), _precision(run)
    learner = f"{cfg.algo} on {start.device}, {threads} CPU thread{'' if threads == 1 else 's'}"
    learner += f", {chosen['precision']} ({chosen['precision_reason']})" if chosen else ""
    speed_up = [("compiled", str(start.compile))] if start.compile.mode != "off" else []
    if start.device.type == "cuda" or cfg.graph not in ("auto", "off"):
        speed_up = [("graph", f"{run.graph}; compiled: {start.compile}")]
    git = run_dir.environment.get("git")
    lines = [
        ("task", f"{run.start.task_name}, {_setting(run)}{cfg.num_envs} envs, {env.summary}"),
        ("spaces", f"observations {sizes}; actions {env.num_actions}"),
        ("sim", str(start.sim)),
        ("learner", learner + _untuned(run)),
        *speed_up,
        *run.algorithm.describe().items(),
        ("seed", f"{start.seed}{ignored}"),
    ]
    if start.spec.overrides:
        lines.append(("changed", " ".join(start.spec.overrides)))
    if git:
        lines.append(("commit", git["sha"][:10] + (" + local changes" if git["dirty"] else "")))
    if start.resumed:
        checkpoint = start.spec.checkpoint
        branch = "" if continues or checkpoint is None else f" from {checkpoint.file}, in a new run folder"
        episodes = "" if env.resumable else "; starting new episodes, because these envs cannot be restored"
        lines.append(("resumed", f"at iteration {run.iteration}{branch}{episodes}"))
    lines.append(("run", str(run_dir)))
    return lines


def _untuned(run: RunView) -> str:
    """Return a note that names the algorithms tuned for this task; empty if there are none or the run uses one."""
    spec, task = run.start.spec, chosen_task(run.start.spec.overrides)
    if run.start.resumed or task is None:
        return ""
    tuned = tuned_sections(task, spec.config_dir, run.cfg.recipe or FULL)
    others = [name for name in ALGORITHMS if name in tuned]
    if {run.cfg.algo, algorithm_of(spec.algorithm_class)} & tuned.keys() or not others:
        return ""
    return f"; the task has tuned values only for {' and '.join(others)}"


def _setting(run: RunView) -> str:
    """Return the banner's text before the number of envs: recipe, and number of actors or processes."""
    spec, actors, processes = run.start.spec, run.num_actors, run.start.collective.size
    several = len(recipes(chosen_task(spec.overrides) or "", spec.config_dir)) > 1
    recipe = f"recipe {run.cfg.recipe}, " if several and run.cfg.recipe else ""
    if actors:
        return f"{recipe}{actors} actor{'s' * (actors > 1)} ({run.cfg.actors.engine}) x "
    return f"{recipe}{processes} processes x " if processes > 1 else recipe


def describe_run(run: RunView) -> dict[str, Any]:
    """Describe a run for env.json, which `gpusim-rl doctor` reads."""
    device, sim, graph = run.start.device, run.start.sim, run.graph
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else None
    used = psutil.Process().memory_info().rss
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    learner = {"device": str(device), "memory_gb": memory, "threads": torch.get_num_threads(), **_precision(run)}
    return {
        "sim": {"name": sim.name, "device": str(sim.device), "reason": sim.reason, "threads": run.env.num_threads}
        | {name: room for name, (room, _) in run.env.buffers.items()},
        "learner": learner,
        "graph": {"mode": graph.mode, "reason": graph.reason},
        "compile": dataclasses.asdict(run.start.compile),
        "actors": run.num_actors,
        "processes": run.start.collective.size,
        "local_processes": here,
        "openmp": {name: os.environ[name] for name in OPENMP if name in os.environ},
        "memory_limit_gb": round((memory_available_bytes() / here + used) / 1e9, 2),
    }


def _precision(run: RunView) -> dict[str, Any]:
    """Describe the networks' precision; empty if the algorithm has no such setting."""
    wanted, device = getattr(run.cfg.algorithm, "precision", None), run.start.device
    if wanted is None:
        return {}
    return {
        "precision": run.algorithm.policy.precision,
        "precision_reason": choose_precision(wanted, device)[1],
        "auto_precision": choose_precision("auto", device)[0],
    }
