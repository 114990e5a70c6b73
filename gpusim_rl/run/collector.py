"""Rollout and update of an iteration, each replayed from a CUDA graph where possible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.env import Environment, Step
from gpusim_rl.errors import warn
from gpusim_rl.learn.algorithm import Algorithm
from gpusim_rl.machine.torch_threads import ROWS_PER_THREAD, limit_torch_threads
from gpusim_rl.run.checkpoint import EPISODES, REPLAY, clear_entries
from gpusim_rl.run.cuda_graph import Graphs, choose_graph
from gpusim_rl.run.held_objects import check_devices, devices_checked, generators_of, regions_of, unsaved
from gpusim_rl.run.metrics import Metrics, Row
from gpusim_rl.run.start import RunStart
from gpusim_rl.run.timing import PhaseTimer

logger = logging.getLogger("gpusim_rl.run")

Pause = Callable[[str], None]  # callback between steps, with a progress text; it may raise to abort the iteration


def ignore_pause(done: str) -> None:
    """Do nothing (default `Pause`)."""


class Collector:
    """Runner of rollouts and updates; `obs` are the current observations by group, [num_envs, size] each."""

    num_actors = 0  # number of processes that step envs for this learner; 0 if it steps its own envs

    def __init__(self, start: RunStart, env: Environment, algorithm: Algorithm, obs: dict[str, Tensor]) -> None:
        self._cfg, self.device, collective = start.cfg, start.device, start.collective
        self.env, self.algorithm = env, algorithm
        self.obs = obs  # always the same tensors: CUDA graphs use their addresses
        self.metrics = Metrics(self._cfg.num_envs, self.device, collective, late_names=not env.resumable)
        self.timer = PhaseTimer(self.device)
        choice = choose_graph(
            self._cfg.graph,
            self.device,
            env.device,
            physics_steps=algorithm.horizon * env.physics_evaluations,
            check_task=self._cfg.debug.check_task,
            library=env.library if env.on_learners_device else None,
        )
        generators, stateful = generators_of(algorithm, self.device), [*env.stateful, algorithm]
        given: dict[str, Any] = {"generators": generators, "stateful": stateful, "collective": collective}
        # A compiled region would run uncompiled under the watch.
        self.graphs = Graphs(choice, self.device, **given, watch=not start.compile.now)
        self._unsaved = [unsaved(owner) for owner in env.stateful]

    def collect(self, pause: Pause = ignore_pause) -> None:
        """Collect `horizon` control steps; call `pause` after each step, unless a CUDA graph replays the rollout."""
        timed = self.timer("rollout") if self.graphs.whole_rollout else nullcontext()
        limited = limit_torch_threads(self._cfg.num_envs, self.device, ROWS_PER_THREAD)
        with self._devices_checked(), timed, limited:
            self.graphs.run("rollout", lambda: self._rollout(pause))

    def update(self) -> None:
        """Update the algorithm from the rollout."""
        with self._devices_checked(), self.timer("update"):
            self.algorithm.before_update()
            stats = self.graphs.run("update", self.algorithm.update)
            self.metrics.record_update(stats, type(self.algorithm).__name__)

    def compile(self) -> None:
        """Compile control steps and update from the next iteration on, and capture graphs again."""
        self.env.compile()
        for region in regions_of(self.algorithm, self.device):
            region.compile()
        self.graphs.forget()

    def numbers(self) -> Row:
        """Return host-side numbers for the next row of metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return all state of rollout and update, except torch's global random state."""
        self._warn_of_unsaved()
        return {
            "actor_columns": self._actor_columns,
            "policy": self.algorithm.policy.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "env": self.env.state_dict(),
            "metrics": self.metrics.state_dict(),
        }

    def _warn_of_unsaved(self) -> None:
        for owner, before in zip(self.env.stateful, self._unsaved, strict=False):
            now = unsaved(owner)
            # A new name may be a constant set up by the first step: only a change counts.
            changed = [name for name, value in now.items() if before.setdefault(name, value) != value]
            if changed:
                names = ", ".join(sorted(f"{type(owner).__name__}.{name}" for name in changed)[:4])
                text = "state changes, but checkpoints do not save it: %s. Try a tensor attribute, updated in place"
                logger.warning(text, names)
                self._unsaved = []

    def load_state_dict(self, state: Mapping[str, Any], *, same_envs: bool) -> None:
        """Restore `state_dict` in place; without `same_envs`, begin new episodes, but keep curricula and schedules."""
        algorithm, same_envs = state["algorithm"], same_envs and self.env.resumable
        if state.get("actor_columns") != self._actor_columns:
            if algorithm.get("replay") is not None:
                warn("transitions now come from different envs; refilling the replay buffer")
            algorithm = clear_entries(algorithm, *REPLAY, EPISODES)
        if not same_envs:
            algorithm = clear_entries(algorithm, EPISODES)
        self.algorithm.policy.load_state_dict(state["policy"])
        self.algorithm.load_state_dict(algorithm)
        if same_envs:
            self._copy_obs(self.env.load_state_dict(state["env"]))
            self.metrics.load_state_dict(state["metrics"])
        else:
            self.begin_from(state["env"])

    def begin_from(self, state: dict[str, Any]) -> None:
        """Begin new episodes in all envs, with curricula and schedules from an env's `state`."""
        self._copy_obs(self.env.begin_from(state))

    def close(self) -> None:
        """Free the simulator."""
        self.env.close()

    @property
    def _actor_columns(self) -> int | None:
        """Total number of envs of all actors, or None without actors."""
        return self.env.num_envs if self.num_actors else None

    def _copy_obs(self, obs: Mapping[str, Tensor]) -> None:
        for group, value in obs.items():
            self.obs[group].copy_(value)

    def _devices_checked(self) -> AbstractContextManager[None]:
        env, algorithm = self.env, self.algorithm
        owners = [("the environment", env, env.device), ("the policy", algorithm.policy, self.device)]
        owners.append(("the algorithm", algorithm, self.device))
        return devices_checked(*owners, enabled=self._cfg.debug.check_device)

    @torch.no_grad()
    def _rollout(self, pause: Pause) -> None:
        with self.timer("policy"):
            self.algorithm.begin_rollout()
            self.metrics.begin_rollout()
        for number, step in enumerate(self._control_steps(), start=1):
            with self.timer("policy"):
                self.metrics.record_step(step)
            pause(f"control step {number}/{self.algorithm.horizon}")
        with self.timer("policy"):
            self.metrics.end_rollout()

    def _control_steps(self) -> Iterator[Step]:
        """Run the control steps of a rollout; yield each after recording it."""
        for _ in range(self.algorithm.horizon):
            action, step = self.graphs.run("step", self.control_step)
            with self.timer("policy"):
                self.algorithm.record(action, step)
                self._copy_obs(step.obs)
            yield step

    def control_step(self) -> tuple[Tensor, Step]:
        """Act and step all envs once, without recording; return actions and step on the learner's device."""
        with self.timer("policy"):
            action = self.algorithm.act(self.obs)
            if self._cfg.debug.check_device:
                check_devices("the algorithm", {"act()": action}, self.device)
        with self.timer("simulate"):
            step = self.env.step(action.to(self.env.device))
            if self._cfg.debug.check_device:
                check_devices("the environment", step, self.env.device)
            return action, step.to(self.device)
