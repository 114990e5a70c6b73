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
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.distributed.actor import ActorJob, EnvDescription
from gpusim_rl.distributed.engine import Engine, SentRollout
from gpusim_rl.distributed.inference import InferenceRollouts
from gpusim_rl.distributed.rollouts import PATIENCE_S, ActorsRollouts, Rollouts
from gpusim_rl.distributed.tuner import Limits
from gpusim_rl.env import Environment, Step
from gpusim_rl.env.environment import Observation
from gpusim_rl.errors import ConfigError, one_line_if_out_of_memory
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.learn.remote import Remote, remote_class, remote_of
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.run.collector import Collector, Pause, no_pause
from gpusim_rl.run.metrics import Row
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.start import SEEDS_APART, RunStart, begin, env_spec, make_algorithm, make_collector, use_cpus
from gpusim_rl.run.trainer import Trainer
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


class InFlight:
    """What is on its way between a learner's device and the host. The learner never waits for it.

    Args:
        rollouts: Where weights go, and rollouts come from.
        device: Of the learner.
    """

    def __init__(self, rollouts: Rollouts, device: torch.device) -> None:
        self._rollouts, self._device, self._cuda = rollouts, device, device.type == "cuda"
        self._pinned: dict[str, Tensor] = {}
        self._leaving: tuple[torch.cuda.Event, int] | None = None  # weights, and their version
        self._arriving: deque[tuple[torch.cuda.Event, SentRollout]] = deque()

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

    def release(self, rollout: SentRollout) -> None:
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


class ActorsCollector(Collector):
    """Takes rollouts from actors in place of stepping envs.

    A rollout of the learner consists of `actors.rollouts` rollouts, of whichever actors have them first. So a slow
    actor delays nobody, and neither does one that died. Each rollout has the version of the weights that acted. One
    that is too old for the algorithm is dropped.

    Args:
        start: Start of the run.
        num_actors: Number of actors.
        rollouts: What the actors record; it is started.
    """

    def __init__(self, start: RunStart, num_actors: int, rollouts: Rollouts) -> None:
        cfg = start.cfg
        self.num_actors, self._rollouts = num_actors, rollouts
        self._num_rollouts = cfg.actors.rollouts or max(1, num_actors // 2)
        self._in_flight = InFlight(rollouts, start.device)
        self._version = 0  # of the weights: updates since the run was started
        self._lags: list[int] = []  # of this log interval
        self._dropped = 0
        columns = cfg.num_envs * self._num_rollouts
        env = RemoteEnvs(rollouts, num_envs=columns, of_actor=cfg.num_envs, threads=cfg.actors.threads)
        obs = {group: value.to(start.device) for group, value in env.reset().items()}
        spec = env_spec(start, env)
        longest = min(spec.max_episode_length, cfg.algorithm.horizon)  # the next rollout is of another actor
        spec = dataclasses.replace(spec, role="learns", max_episode_length=longest)
        algorithm = make_algorithm(start, spec, start.process_seed)
        self._remote = remote_of(algorithm, spec)
        use_cpus(start, columns)
        super().__init__(cfg, env, algorithm, obs, start.device)

    def collect(self, pause: Pause = no_pause) -> None:
        """Takes over rollouts until there are enough for an update.

        Args:
            pause: Called while the learner waits for a rollout.
        """
        with self.timer("actors"):
            self._in_flight.publish(self._version, self._remote.acting_state())
            for number in range(self._num_rollouts):
                self._take(self._next(number, pause), number * self._cfg.num_envs)
            self._remote.end_receiving()

    def update(self) -> None:
        """Lets the algorithm learn from the rollouts."""
        super().update()
        self._version += 1

    def _next(self, number: int, pause: Pause) -> SentRollout:
        """A rollout that is not too old."""
        heard = time.monotonic()
        while True:
            under_way = self._in_flight.poll()
            rollout = self._rollouts.next(COPYING_S if under_way else POLL_S)
            pause(f"rollout {number + 1}/{self._num_rollouts}")
            if rollout is None:
                if time.monotonic() - heard > PATIENCE_S:
                    heard = time.monotonic()
                    logger.warning("no actor has sent a rollout for %.0f s", PATIENCE_S)
                continue
            lag = self._version - rollout.info.version
            if lag <= self._remote.max_policy_lag:
                self._lags.append(lag)
                return rollout
            self._dropped += 1
            self.metrics.add(rollout.info.taken)
            self._rollouts.release(rollout)

    def _take(self, rollout: SentRollout, first: int) -> None:
        self._remote.receive(slice(first, first + self._cfg.num_envs), rollout.tensors)
        self.metrics.add(rollout.info.taken)
        self._in_flight.release(rollout)

    def numbers(self) -> Row:
        """Ages of the rollouts since the last call, faults of the actors, and numbers of their engine."""
        faults, lags, dropped = self._rollouts.faults, self._lags, self._dropped
        self._lags, self._dropped = [], 0
        return {
            "policy/lag_min": min(lags),
            "policy/lag_mean": sum(lags) / len(lags),
            "policy/lag_max": max(lags),
            "policy/dropped": dropped / (dropped + len(lags)),
            "actors/restarts": faults.restarts,
            "actors/lost_rollouts": faults.lost_rollouts,
            **self._rollouts.numbers(),
            **self._rollouts.engine.numbers(),
        }


def make_actors_collector(start: RunStart) -> ActorsCollector:
    """Starts the actors of a run, and waits for the first one.

    Args:
        start: Start of the run.

    Raises:
        ConfigError: The actors cannot work.
    """
    cfg = start.cfg
    num_actors = cfg.num_actors or max(1, available_cpus() // cfg.actors.threads)
    seed = (start.seed + start.iteration * RESUMES_APART) % 2**31  # a resumed run must not draw the same again
    jobs = [ActorJob(start.spec.config, number, num_actors, seed) for number in range(num_actors)]
    rollouts = _make_rollouts(start, _make_engine(start, jobs), num_actors, seed)
    try:
        rollouts.start()
        with one_line_if_out_of_memory(cfg.num_envs):
            return ActorsCollector(start, num_actors, rollouts)
    except BaseException:  # Ctrl-C: no actors stay behind
        rollouts.close()
        raise


def _make_engine(start: RunStart, jobs: list[ActorJob]) -> Engine:
    actors = start.cfg.actors
    if actors.engine == "ray":
        from gpusim_rl.distributed.ray_engine import RayEngine

        return RayEngine(jobs, address=actors.address)
    from gpusim_rl.distributed.process_engine import ProcessEngine

    return ProcessEngine(jobs, pin=start.device.type == "cuda")


def _make_rollouts(start: RunStart, engine: Engine, num_actors: int, seed: int) -> Rollouts:
    cfg, actors = start.cfg, start.cfg.actors
    if actors.inference == "actor":
        return ActorsRollouts(engine)

    def make_acting(number: int) -> Remote:
        """The algorithm that acts for an actor, here."""
        envs, num_envs = rollouts.envs, cfg.num_envs
        env = EnvSpec(
            num_envs,
            envs.obs_sizes,
            envs.action_space,
            envs.steps_between_truncations,
            role="acts",
            section=cfg.algo,
            first_env=number * num_envs,
            all_envs=num_actors * num_envs,
        )
        return remote_of(make_algorithm(start, env, seed + (1 + number) * SEEDS_APART), env)

    limits = Limits(num_actors, min(actors.max_batch or num_actors, num_actors))
    options = {"num_envs": cfg.num_envs, "device": start.device, "max_wait_ms": actors.max_wait_ms}
    rollouts = InferenceRollouts(engine, make_acting, limits=limits, tune=actors.tune, **options)
    return rollouts


def make_trainer(spec: RunSpec, collective: Collective = ALONE) -> Trainer:
    """The trainer of a run, with actors where it has any.

    Args:
        spec: Task, algorithm and settings.
        collective: Processes that learn together.

    Raises:
        ConfigError: Something in the configuration or the checkpoint does not fit.
        TaskError: A hook of the task is wrong.
    """
    if spec.cfg.actors.engine is None or spec.cfg.test:
        start, state = begin(spec, collective)
        collector: Collector = make_collector(start)
    else:
        start, state = begin(_for_actors(spec))
        collector = make_actors_collector(start)
    try:
        return Trainer(start, collector, state)
    except BaseException:  # a checkpoint that does not fit: no actors stay behind
        collector.close()
        raise


def _for_actors(spec: RunSpec) -> RunSpec:
    """The run as its learner sees it: all envs step on CPUs."""
    cfg, engine = spec.cfg, spec.cfg.actors.engine
    if remote_class(spec.algorithm_class) is None:
        raise ConfigError(
            f"actors={engine}: algo={cfg.algo} learns only from what its newest policy has done. Try algo=impala, or"
            " actors=none"
        )
    if (cfg.sim_device or "cpu") not in ("cpu", "auto"):
        raise ConfigError(f"sim_device={cfg.sim_device} with actors={engine}: they step on CPUs")
    return dataclasses.replace(spec, cfg=dataclasses.replace(cfg, sim_device="cpu"))
