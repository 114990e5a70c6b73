"""A run at one moment, for what reports of it: console, run folder, profiler."""

from __future__ import annotations

from dataclasses import dataclass

from gpusim_rl.env import Environment
from gpusim_rl.learn.algorithm import Algorithm
from gpusim_rl.run.cuda_graph import GraphChoice
from gpusim_rl.run.start import RunStart
from gpusim_rl.settings.schema import RunConfig


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment. Who gets it changes nothing of the run.

    Attributes:
        start: Task, settings, seed and devices.
        env: Environments; to be read only.
        algorithm: Algorithm; to be read only.
        num_actors: Processes that step envs for this learner; 0 where it steps its own.
        graph: Mode of the CUDA graphs, and its reason.
        iteration: Iterations done.
        env_steps: Control steps done, summed over envs and processes.
        elapsed_s: Time of training, that of earlier starts of the run included [s].
        best_return: Best trimmed mean return over a full window so far; None before there was one.
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
        """All iterations are done."""
        return self.iteration >= self.cfg.max_iterations
