"""Read-only view of a run for console, run folder and profiler."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim_rl.env import Environment
from gpusim_rl.learn.algorithm import Algorithm
from gpusim_rl.run.cuda_graph import GraphChoice
from gpusim_rl.run.start import RunStart
from gpusim_rl.settings.schema import RunConfig


@dataclass(frozen=True, slots=True)
class RunView:
    """Read-only view of a run at one moment."""

    start: RunStart
    env: Environment
    algorithm: Algorithm
    num_actors: int  # processes that step envs for this learner; 0 if it steps its own
    graph: GraphChoice
    iteration: int
    env_steps: int  # control steps, summed over envs and processes
    elapsed_s: float  # training time including earlier starts
    best_return: float | None  # best trimmed mean return over a full window

    @property
    def cfg(self) -> RunConfig:
        """Settings of the run."""
        return self.start.cfg

    @property
    def complete(self) -> bool:
        """True if all iterations are done."""
        return self.iteration >= self.cfg.max_iterations
