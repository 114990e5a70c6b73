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
    """Read-only view of a run at one moment.

    Attributes:
        num_actors: Processes that step envs for this learner; 0 if it steps its own.
        env_steps: Control steps done, summed over envs and processes.
        elapsed_s: Training time including earlier starts [s].
        best_return: Best trimmed mean return over a full window so far, or None.
    """

    start: RunStart
    env: Environment
    algorithm: Algorithm
    num_actors: int
    graph: GraphChoice
    iteration: int
    env_steps: int
    elapsed_s: float
    best_return: float | None

    @property
    def cfg(self) -> RunConfig:
        """Settings of the run."""
        return self.start.cfg

    @property
    def complete(self) -> bool:
        """Whether all iterations are done."""
        return self.iteration >= self.cfg.max_iterations
