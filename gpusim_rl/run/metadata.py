"""Choices of a run, which neither its configuration nor the description of the machine tells."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from gpusim_rl.learn.algorithm import Policy
from gpusim_rl.learn.precision import choose_precision
from gpusim_rl.machine.hardware import memory_available_bytes
from gpusim_rl.run.run_view import RunView

OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME")


def precision(settings: Any, policy: Policy, device: torch.device) -> dict[str, Any]:
    """Describes the precision of the networks; empty where the algorithm has no setting `precision`.

    Returns:
        `precision` (fp32 or bf16), `precision_reason`, and `bf16_is_fast` (whether bf16 is fast here).
    """
    wanted = getattr(settings, "precision", None)
    if wanted is None:
        return {}
    return {
        "precision": "bf16" if policy.bf16 else "fp32",
        "precision_reason": choose_precision(wanted, device)[1],
        "bf16_is_fast": choose_precision("auto", device)[0],
    }


def describe_run(run: RunView) -> dict[str, Any]:
    """Describes a run for env.json, which tools/doctor.py reads.

    Returns:
        `sim` (name, device, reason; CPU threads of the physics, None where it has none of its own), `learner` (device,
        its memory in GB on CUDA, CPU threads, precision, whether bf16 is fast here), `graph` (what is replayed, and
        why), `compile` (what is compiled, and why), `actors` (that step envs for this learner), `processes` (that learn
        together), `processes_here` (of them, on this machine), `openmp` (variables that are set) and `memory_limit_gb`
        (RAM that this process may come to hold).
    """
    device, sim, graph = run.start.device, run.start.sim, run.graph
    on_cuda = device.type == "cuda"
    used = psutil.Process().memory_info().rss
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
    return {
        "sim": {"name": sim.name, "device": str(sim.device), "reason": sim.reason, "threads": run.env.num_threads},
        "learner": {
            "device": str(device),
            "memory_gb": torch.cuda.get_device_properties(device).total_memory / 1e9 if on_cuda else None,
            "threads": torch.get_num_threads(),
            **precision(run.cfg.algorithm, run.algorithm.policy, device),
        },
        "graph": {"mode": graph.mode, "reason": graph.reason},
        "compile": {"mode": run.start.compile.mode, "reason": run.start.compile.reason},
        "actors": run.num_actors,
        "processes": run.start.collective.size,
        "processes_here": here,
        "openmp": {name: os.environ[name] for name in OPENMP if name in os.environ},
        "memory_limit_gb": round((memory_available_bytes() / here + used) / 1e9, 2),
    }
