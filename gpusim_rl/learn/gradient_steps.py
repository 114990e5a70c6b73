"""Optimiser steps on minibatches, with step skipping and a learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gpusim_rl.learn.algorithm import Hidden, LearnerContext
from gpusim_rl.learn.minibatch import Sequences
from gpusim_rl.learn.networks import ActorCritic, Settings
from gpusim_rl.learn.optimizer import MaskedAdamW

MOST_WORKERS = 16  # maximum worker threads; more would wait for the GIL (held for about 5 % of a chunk)

CPU_CHUNK = 4096  # maximum samples per chunk, so that activations stay in a core's caches
Loss = Callable[[dict[str, Tensor], Tensor, Hidden, Tensor | None], Tensor]
"""Function from a chunk of `Sequences` to its share of the minibatch statistics, [losses]."""


def chunk_samples(minibatch: int) -> int:
    """Return the chunk size [samples]: a quarter of the minibatch, at most `CPU_CHUNK`; more if the minibatch is small.

    Independent of the machine, so that runs are reproducible bit for bit.
    """
    half, quarter = -(-minibatch // 2), -(-minibatch // 4)
    return max(CPU_CHUNK // 4, min(CPU_CHUNK // 2, half), min(CPU_CHUNK, quarter))


def most_workers() -> int:
    """Return the maximum number of concurrent chunks."""
    return min(torch.get_num_threads(), MOST_WORKERS)


class Chunks:
    """Summation of a function's results over chunks of indices; a single chunk except on CPUs.

    On CPUs, minibatch-wide operations stream activations through memory and end in a thread barrier; chunks per thread
    stay in the caches (benchmarks/updates/update_chunks.json). Sums are in chunk order, independent of thread timing.
    With `compiled`, a single worker runs all chunks of the first call, which compiles the function.
    """

    def __init__(self, device: torch.device, size: int, *, compiled: bool = False) -> None:
        self._size = max(1, size) if device.type == "cpu" else None
        self._cold = compiled
        self._pool: ThreadPoolExecutor | None = None

    def sum(self, function: Callable[[Tensor], Sequence[Tensor]], index: Tensor) -> list[Tensor]:
        """Add up the results of `function` over the chunks of `index`, tensor by tensor."""
        parts = index.split(self._size) if self._size is not None else (index,)
        # A dispatch mode, such as an operation counter, sees only its own thread.
        if len(parts) == 1 or _get_current_dispatch_mode() is not None:
            results = map(function, parts)
        elif self._cold:
            results, self._cold = self._workers().submit(lambda: [*map(function, parts)]).result(), False
        else:
            results = self._workers().map(function, parts)
        total, *others = results
        for result in others:
            total = [a + b for a, b in zip(total, result, strict=True)]
        return list(total)

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None:
            inner = max(1, torch.get_num_threads() // MOST_WORKERS)
            # torch's thread count is per thread: set it in each worker.
            self._pool = ThreadPoolExecutor(most_workers(), "chunk", torch.set_num_threads, (inner,))
        return self._pool


class GradientSteps:
    """Adam steps of a policy; a step with a non-finite gradient changes nothing."""

    def __init__(
        self,
        policy: ActorCritic,
        context: LearnerContext,
        cfg: Settings,
        minibatch: int,
        sequence_length: int,
        device: torch.device,
    ) -> None:
        # the order determines the rounding of the gradient norm, and thus the results of fixed-seed runs
        named = sorted(policy.named_parameters(), key=lambda x: (x[0] != "head.log_std", "log_std_of_state" in x[0]))
        self._policy, self.collective = policy, context.collective
        self._configured, self._schedule = cfg.learning_rate, cfg.schedule
        self.learning_rate = torch.tensor(cfg.learning_rate, dtype=torch.float32, device=device)
        parameters = [parameter for _, parameter in named]
        scaled = policy.reduced is torch.float16
        options: dict[str, Any] = {"max_norm": cfg.max_grad_norm, "eps": 1e-5, "scaled": scaled}
        self.optimizer = MaskedAdamW(parameters, self.learning_rate, **options)
        self.iteration = torch.zeros((), dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)
        self.chunks = Chunks(device, chunk_samples(minibatch) // sequence_length, compiled=context.compile)

    def anneal(self, max_iterations: int) -> None:
        """Update the learning rate if the schedule is linear; it reaches 0 at `max_iterations`."""
        if self._schedule == "linear":
            self.learning_rate.copy_(self._configured * (1.0 - self.iteration / max_iterations).clamp(min=0.0))

    def gradient(self, loss: Loss, batch: Sequences, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Pass the gradient of a minibatch, summed over chunks and processes, to the optimiser.

        `weight` is the loss weight of each statistic. Return statistics and gradient norm.
        """

        def chunk_gradient(sequences: Tensor) -> tuple[Tensor, ...]:
            chunk = batch.select(sequences)
            losses = loss(chunk.inputs, chunk.packed, chunk.hidden, chunk.is_first)
            return losses.detach(), *self.optimizer.gradients(losses, weight)

        losses, *gradients = self.collective.sum(self.chunks.sum(chunk_gradient, index))
        return losses, self.optimizer.set_gradients(gradients)

    def make(self, norm: Tensor) -> None:
        """Apply the gradient with norm `norm`, if it is finite."""
        self.optimizer.masked_step(norm)
        self._policy.head.clamp_()

    def summarize(self, steps: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        """End an iteration; return the means of statistics and norm over the applied `steps`, and metrics."""
        numbers, made = applied_steps(steps)
        self.iteration += 1
        used = made.float().sum()
        self.skipped += len(made) - used
        stats = {"policy/skipped_minibatches": self.skipped.clone(), "check/learned": (used > 0).float()}
        stats["policy/learning_rate"] = self.learning_rate.clone()
        return numbers.sum(dim=0) / used.clamp(min=1.0), stats

    def state_dict(self) -> dict[str, Any]:
        """Return optimiser, schedule and counters, and the settings that determine the schedule."""
        return {
            "optimizer": self.optimizer.moments(),
            "learning_rate": self.learning_rate.clone(),
            "configured_learning_rate": self._configured,
            "configured_schedule": self._schedule,
            "iteration": self.iteration.clone(),
            "skipped": self.skipped.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; a changed learning rate or schedule setting restarts the schedule."""
        self.optimizer.load_moments(state["optimizer"])
        before = state["configured_learning_rate"], state.get("configured_schedule", self._schedule)
        if self._schedule != "constant" and before == (self._configured, self._schedule):
            self.learning_rate.copy_(state["learning_rate"])
        else:
            self.learning_rate.fill_(self._configured)
        self.iteration.copy_(state["iteration"])
        self.skipped.copy_(state["skipped"])


def applied_steps(steps: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return statistics and norm per step, zeroed if skipped, and a mask of applied steps."""
    losses, norms = (torch.stack(numbers) for numbers in zip(*steps, strict=True))
    made = norms < torch.inf
    return torch.cat([losses, norms[:, None]], dim=1).masked_fill_(~made[:, None], 0.0), made
