"""Trainer factory; with actors, processes step envs on CPUs of one or many machines for one learner."""

from __future__ import annotations

import dataclasses

from gpusim_rl.distributed.actor import ActorJob
from gpusim_rl.distributed.engine import Engine
from gpusim_rl.distributed.inference import InferenceRollouts
from gpusim_rl.distributed.rollouts import ActorsCollector, ActorsRollouts, Rollouts
from gpusim_rl.errors import ConfigError, one_line_if_out_of_memory
from gpusim_rl.learn.algorithm import ActorPlace, EnvSpec
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.learn.remote import Remote, remote_class, remote_of
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.run.make_env import resumed_seed
from gpusim_rl.run.make_learner import make_algorithm, make_collector
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.start import SEEDS_APART, RunStart, begin
from gpusim_rl.run.trainer import Trainer


def make_trainer(spec: RunSpec, collective: Collective = ALONE) -> Trainer:
    """Make the trainer of a run, with or without actors.

    Raises:
        ConfigError: The configuration or the checkpoint does not fit.
        TaskError: A hook of the task is wrong.
    """
    if spec.cfg.actors.engine is None:
        start, state = begin(spec, collective)
        collector = make_collector(start)
    else:
        start, state = begin(_for_actors(spec))
        collector = _make_actors_collector(start)
    try:
        return Trainer(start, collector, state)
    except BaseException:  # a checkpoint that does not fit: no actors stay behind
        collector.close()
        raise


def _for_actors(spec: RunSpec) -> RunSpec:
    """Check settings that actors need; move the envs to CPUs."""
    cfg, engine = spec.cfg, spec.cfg.actors.engine
    if remote_class(spec.algorithm_class) is None:
        problem = f"algo={cfg.algo} learns only from what its newest policy has done"
        raise ConfigError(f"actors={engine}: {problem}. Try algo=impala, or actors=none")
    if (cfg.sim_device or "cpu") not in ("cpu", "auto"):
        raise ConfigError(f"sim_device={cfg.sim_device} with actors={engine}: they step on CPUs")
    return dataclasses.replace(spec, cfg=dataclasses.replace(cfg, sim_device="cpu"))


def _make_actors_collector(start: RunStart) -> ActorsCollector:
    cfg = start.cfg
    num_actors = cfg.num_actors or max(1, available_cpus() // cfg.actors.threads)
    seed = resumed_seed(start.seed, start.iteration)
    jobs = [ActorJob(start.spec.config, number, num_actors, seed) for number in range(num_actors)]
    rollouts = _make_rollouts(start, _make_engine(start, jobs), seed)
    try:
        rollouts.start()
        with one_line_if_out_of_memory(cfg.num_envs):
            return ActorsCollector(start, rollouts)
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


def _make_rollouts(start: RunStart, engine: Engine, seed: int) -> Rollouts:
    cfg, actors, num_actors = start.cfg, start.cfg.actors, engine.num_actors
    if actors.inference == "actor":
        return ActorsRollouts(engine)

    def make_remote(number: int) -> Remote:
        envs, num_envs = rollouts.envs, cfg.num_envs
        spaces = envs.obs_sizes, envs.action_space, envs.steps_between_truncations
        env, place = (
            EnvSpec(num_envs, *spaces, images=envs.images),
            ActorPlace(number * num_envs, num_actors * num_envs),
        )
        return remote_of(make_algorithm(start, env, place, seed + (1 + number) * SEEDS_APART))

    rollouts = InferenceRollouts(
        engine,
        make_remote,
        num_envs=cfg.num_envs,
        device=start.device,
        max_batch=min(actors.max_batch or num_actors, num_actors),
        max_wait_ms=actors.max_wait_ms,
    )
    return rollouts
