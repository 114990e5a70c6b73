"""Training with actors: processes that step envs on CPUs, of this machine or of many, for one learner.

python train.py task=Ant algo=impala actors=process num_actors=8 num_envs=16
python train.py task=Gymnasium env.id=CartPole-v1 algo=apex actors=ray num_actors=8
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.distributed.actor import ActorJob, EnvDescription
from gpusim_rl.distributed.engine import Engine
from gpusim_rl.distributed.inference import InferenceRollouts
from gpusim_rl.distributed.rollouts import PATIENCE_S, ActorsRollouts, Rollout, Rollouts
from gpusim_rl.distributed.tuner import Limits
from gpusim_rl.env import Environment, Step
from gpusim_rl.env.environment import Observation
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import Algorithm, EnvSpec
from gpusim_rl.learn.collective import Collective
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.run.trainer import SEEDS_APART, Trainer
from gpusim_rl.settings.schema import RunSpec
from gpusim_rl.spaces import ActionSpace

logger = logging.getLogger("gpusim_rl")

POLL_S = 0.1
"""A signal is noticed so soon while the learner waits [s]."""
RESUMES_APART = 7_919
"""Between the seeds of actors, for each iteration that was done before."""
COPYING_S = 1e-3
"""What was copied is noticed so soon [s]."""


class RemoteEnvs(Environment):
    """The envs of all actors, as the learner sees them: it knows what they are, and steps none of them.

    Args:
        rollouts: Where the actors are.
        num_envs: Columns of a batch: envs of an actor x rollouts of a batch.
        of_actor: Envs of an actor.
        threads: CPU threads of an actor.
    """

    resumable = False

    def __init__(self, rollouts: Rollouts, *, num_envs: int, of_actor: int, threads: int) -> None:
        self.num_envs, self.num_threads, self.device = num_envs, threads, torch.device("cpu")
        self._rollouts, self._of_actor = rollouts, of_actor
        self.obs_sizes = dict(self._envs.obs_sizes)
        self.num_actions = self._envs.action_space.size

    @property
    def _envs(self) -> EnvDescription:
        return self._rollouts.envs

    @property
    def action_space(self) -> ActionSpace:
        """Theirs."""
        return self._envs.action_space

    @property
    def max_episode_length(self) -> int:
        """Theirs."""
        return self._envs.max_episode_length

    @property
    def steps_between_truncations(self) -> int:
        """Theirs."""
        return self._envs.steps_between_truncations

    @property
    def physics_evaluations(self) -> int:
        """None here."""
        return 0

    @property
    def summary(self) -> str:
        """Of the envs of an actor."""
        return self._envs.summary

    def reset(self) -> Observation:
        """Zeros: the learner acts on none of them."""
        return {group: torch.zeros(self._of_actor, size) for group, size in self.obs_sizes.items()}

    def step(self, action: Tensor) -> Step:
        """Not here: actors step their envs."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """How far they are: the newest state that an actor has told."""
        return self._rollouts.progress

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Not here: `resumable` is false."""
        raise NotImplementedError

    def begin_from(self, state: dict[str, Any]) -> Observation:
        """Lets the actors begin new episodes there."""
        self._rollouts.begin_from(state)
        return self.reset()

    def close(self) -> None:
        """Ends the actors."""
        self._rollouts.close()


class Copies:
    """What is on its way between a learner's device and the host. The learner never waits for it.

    Args:
        rollouts: Where weights go, and rollouts come from.
        device: Of the learner.
    """

    def __init__(self, rollouts: Rollouts, device: torch.device) -> None:
        self._rollouts, self._device, self._cuda = rollouts, device, device.type == "cuda"
        self._pinned: dict[str, Tensor] = {}
        self._leaving: tuple[torch.cuda.Event, int] | None = None  # weights, and their version
        self._arriving: deque[tuple[torch.cuda.Event, Rollout]] = deque()

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Lets the actors know weights: on CUDA as soon as they are on the host, which `poll` finds out."""
        if not self._cuda:
            self._rollouts.publish(version, state)
            return
        first = not self._pinned
        if first:
            self._pinned = {name: torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for name, x in state.items()}
        if self._leaving is not None:  # the host is an update ahead: no further
            self._leaving[0].synchronize()
            self.poll()
        for name, x in state.items():
            self._pinned[name].copy_(x, non_blocking=True)
        self._leaving = (self._event(), version)
        if first:  # the actors wait for them
            self._leaving[0].synchronize()
        self.poll()

    def release(self, rollout: Rollout) -> None:
        """Lets an actor write the memory of a rollout again, when it is copied."""
        if self._cuda:
            self._arriving.append((self._event(), rollout))
        else:
            self._rollouts.release(rollout)

    def poll(self) -> bool:
        """Passes on what has arrived; returns whether there is more to come."""
        if self._leaving is not None and self._leaving[0].query():
            (_, version), self._leaving = self._leaving, None
            self._rollouts.publish(version, self._pinned)
        while self._arriving and self._arriving[0][0].query():
            self._rollouts.release(self._arriving.popleft()[1])
        return self._leaving is not None or bool(self._arriving)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event


class ActorTrainer(Trainer):
    """The learner: takes rollouts from actors in place of stepping envs.

    An iteration learns from `actors.rollouts` rollouts, of whichever actors have them first. So a slow actor delays
    nobody, and neither does one that died. Each rollout has the version of the weights that acted. One that is too old
    for the algorithm is dropped.

    Args:
        spec: The run.

    Raises:
        ConfigError: The algorithm cannot learn in this way, or the actors cannot work.
    """

    def __init__(self, spec: RunSpec) -> None:
        cfg = spec.cfg
        if not spec.algorithm_class.learns_from_actors:
            raise ConfigError(
                f"actors={cfg.actors.engine}: algo={cfg.algo} learns only from what its newest policy has done. Try"
                " algo=impala, or actors=none"
            )
        if (cfg.sim_device or "cpu") not in ("cpu", "auto"):
            raise ConfigError(f"sim_device={cfg.sim_device} with actors={cfg.actors.engine}: they step on CPUs")
        self.num_actors = cfg.num_actors or max(1, available_cpus() // cfg.actors.threads)
        self._num_rollouts = cfg.actors.rollouts or max(1, self.num_actors // 2)
        self._lags: list[int] = []  # of this log interval
        self._dropped = 0
        self._started = ExitStack()
        try:
            super().__init__(dataclasses.replace(spec, cfg=dataclasses.replace(cfg, sim_device="cpu")))
        except BaseException:  # a checkpoint that does not fit, Ctrl-C: no actors stay behind
            self._started.close()
            raise

    def _choose_seed(self, state: dict[str, Any] | None) -> int:
        seed = super()._choose_seed(state)
        begun_at = 0 if state is None else int(state["iteration"])
        self._seed_of_actors = (seed + begun_at * RESUMES_APART) % 2**31  # a resumed run must not draw the same again
        return seed

    def _make_env(self) -> Environment:
        cfg = self.cfg
        config = self.spec.config
        jobs = [ActorJob(config, number, self.num_actors, self._seed_of_actors) for number in range(self.num_actors)]
        self._rollouts = self._make_rollouts(self._make_engine(jobs))
        self._started.callback(self._rollouts.close)
        self._rollouts.start()
        self._copies = Copies(self._rollouts, self.rl_device)
        columns = cfg.num_envs * self._num_rollouts
        return RemoteEnvs(self._rollouts, num_envs=columns, of_actor=cfg.num_envs, threads=cfg.actors.threads)

    def _make_engine(self, jobs: list[ActorJob]) -> Engine:
        if self.cfg.actors.engine == "ray":
            from gpusim_rl.distributed.ray_engine import RayEngine

            return RayEngine(jobs, address=self.cfg.actors.address)
        from gpusim_rl.distributed.process_engine import ProcessEngine

        return ProcessEngine(jobs, pin=self.rl_device.type == "cuda")

    def _make_rollouts(self, engine: Engine) -> Rollouts:
        cfg, actors = self.cfg, self.cfg.actors
        if actors.inference == "actor":
            return ActorsRollouts(engine)
        limits = Limits(self.num_actors, min(actors.max_batch or self.num_actors, self.num_actors))
        options = {"num_envs": cfg.num_envs, "device": self.rl_device, "max_wait_ms": actors.max_wait_ms}
        return InferenceRollouts(engine, self._make_acting, limits=limits, tune=actors.tune, **options)

    def _make_acting(self, number: int) -> Algorithm:
        """The algorithm that acts for an actor, here."""
        envs, cfg = self.cfg.num_envs, self.cfg
        whole = super()._env_spec()
        spec = dataclasses.replace(
            whole, num_envs=envs, role="acts", first_env=number * envs, all_envs=self.num_actors * envs
        )
        return self.spec.algorithm_class(
            cfg.algorithm,
            spec,
            device=self.rl_device,
            seed=self._seed_of_actors + (1 + number) * SEEDS_APART,
            max_iterations=cfg.max_iterations,
        )

    def _env_spec(self) -> EnvSpec:
        return dataclasses.replace(super()._env_spec(), role="learns")

    # The loop

    def collect(self) -> None:
        """Takes over rollouts until there are enough for an update."""
        if self.iteration % self.cfg.log.interval == 0:
            self._lags, self._dropped = [], 0
        with self.timer("actors"):
            self._copies.publish(self.iteration, self.algorithm.acting_state())
            for number in range(self._num_rollouts):
                self._take(self._next(number), number * self.cfg.num_envs)
        self._tell()

    def _next(self, number: int) -> Rollout:
        """A rollout that is not too old."""
        heard = time.monotonic()
        while True:
            under_way = self._copies.poll()
            found = self._rollouts.next(COPYING_S if under_way else POLL_S)
            self._pause(f"rollout {number + 1}/{self._num_rollouts}")
            if found is None:
                if time.monotonic() - heard > PATIENCE_S:
                    heard = time.monotonic()
                    logger.warning("no actor has sent a rollout for %.0f s", PATIENCE_S)
                continue
            lag = self.iteration - found.version
            if lag <= self.algorithm.max_policy_lag:
                self._lags.append(lag)
                return found
            self._dropped += 1
            self.metrics.add(found.taken)
            self._rollouts.release(found)

    def _take(self, rollout: Rollout, first: int) -> None:
        self.algorithm.receive(slice(first, first + self.cfg.num_envs), rollout.tensors)
        self.metrics.add(rollout.taken)
        self._copies.release(rollout)

    def _tell(self) -> None:
        """Adds to the row of this log interval."""
        faults, lags = self._rollouts.faults, self._lags
        self.intervals.add(
            {
                "policy/lag_min": min(lags),
                "policy/lag_mean": sum(lags) / len(lags),
                "policy/lag_max": max(lags),
                "policy/dropped": self._dropped / (self._dropped + len(lags)),
                "actors/restarts": faults.restarts,
                "actors/lost_rollouts": faults.lost_rollouts,
            }
        )
        if (self.iteration + 1) % self.cfg.log.interval == 0:
            self.intervals.add({**self._rollouts.numbers(), **self._rollouts.engine.numbers()})

    # State

    def state_dict(self) -> dict[str, Any]:
        """That of every training, and how many columns a batch has."""
        return super().state_dict() | {"actor_columns": self.actor_columns}

    @property
    def actor_columns(self) -> int:
        """Envs that send together."""
        return self.env.num_envs


def make_trainer(spec: RunSpec, collective: Collective) -> Trainer:
    """The trainer of a run: a learner with actors, if it has any."""
    alone = spec.cfg.actors.engine is None or spec.cfg.test
    return Trainer(spec, collective) if alone else ActorTrainer(spec)
