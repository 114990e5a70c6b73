"""Counts the kernels that torch.compile leaves of a control step and an update; writes fused_kernels.json.

    python benchmarks/fused_kernels.py

No GPU is needed: torch's compiler writes code for the CPU and tells how many kernels that are. The same scheduler
decides on both devices what is fused; CUDA's code may be cut a little differently. Matrix products are called, not
written: they are counted as without the compiler. What is not compiled counts as in tests/kernels.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("Ant", "Humanoid", "Anymal", "AnymalTerrain", "Trifinger", "ShadowHand")
NOT_COMPILED = ("act", "physics", "record", "metrics")
"""Parts of a control step."""


def measure(task: str, eager: dict[str, int]) -> dict[str, dict[str, int]]:
    """Kernels of a control step and of an update, without and with the compiler; `eager` is the row of kernels.json."""
    import torch
    from torch._inductor import config, metrics

    from gpusim_rl.api import prepare
    from gpusim_rl.distributed.actors import make_trainer

    config.force_disable_caches = True  # what comes from a cache is not counted
    with tempfile.TemporaryDirectory() as folder:
        log = {"console": "quiet", "dir": folder}
        trainer = make_trainer(prepare(task, num_envs=32, device="cpu", compile="learner", max_iterations=9, log=log))
        env, algorithm = trainer.env, trainer.algorithm
        trainer.collector.collect()
        loss, products = count_loss(algorithm)
        with torch.no_grad():
            metrics.reset()
            env.compile()
            env.step(torch.zeros(env.num_envs, env.num_actions))
        step = sum(eager[part] for part in NOT_COMPILED) + metrics.generated_kernel_count
        metrics.reset()
        algorithm.update()
        saved = loss - products - metrics.generated_kernel_count
        trainer.close()
    return {
        "control_step": {"eager": eager["control step"], "compiled": step},
        "minibatch_step": {"eager": eager["minibatch step"], "compiled": eager["minibatch step"] - saved},
        "update": {"eager": eager["update"], "compiled": eager["update"] - minibatches(task) * saved},
    }


def minibatches(task: str) -> int:
    """Steps of the optimiser in an update of the task's own size."""
    from gpusim_rl.api import prepare
    from gpusim_rl.learn.minibatch import fit_minibatches

    cfg = prepare(task).cfg
    samples = cfg.num_envs * cfg.algorithm.horizon
    return cfg.algorithm.epochs * fit_minibatches(samples, samples / cfg.algorithm.minibatch_size)


def count_loss(algorithm: Any) -> tuple[int, int]:
    """Kernels of the loss of a minibatch and of its gradient; the matrix products among them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        kernels = products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__  # as tests/kernels.json counts: not what is a view, or only allocates
            if not func.is_view and "empty" not in name and name != "_unsafe_view":
                self.kernels += 1
                self.products += name in ("mm", "addmm", "bmm")
            return func(*args, **(kwargs or {}))

    counts: list[tuple[int, int]] = []
    compiled = algorithm._loss

    def counted(*arguments: Any) -> Any:
        with Operators() as operators:
            result = algorithm._chunk_loss(*arguments)
            torch.autograd.grad(result, algorithm.optimizer.parameters, algorithm._coefficients, retain_graph=True)
        counts.append((operators.kernels, operators.products))
        return result

    algorithm._loss = counted
    algorithm.update()
    algorithm._loss = compiled
    return counts[0]


def main() -> None:
    """Measures all tasks."""
    from gpusim_rl.files.provenance import describe_environment

    eager = json.loads((ROOT / "tests" / "kernels.json").read_text())["kernels"]["ppo"]
    tasks = {task: measure(task, eager[task]) for task in TASKS}
    result = {"environment": describe_environment(), "tasks": tasks}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the checkout, installed or not
    main()
