"""Trainer factory; with actors, processes step envs on CPUs of one or many machines for one learner."""

from __future__ import annotations

import dataclasses

from gpusim_rl.distributed.actor import ActorJob
from gpusim_rl.distributed.engine import Engine
from gpusim_rl.distributed.inference import InferenceRollouts
from gpusim_rl.distributed.rollouts import ActorsCollector, ActorsRollouts, Rollouts
from gpusim_rl.errors import ConfigError, one_line_if_out_of_memory
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.learn.remote import remote_class
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.run.make_env import resumed_seed
from gpusim_rl.run.make_learner import make_collector
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.start import RunStart, begin
from gpusim_rl.run.trainer import Trainer


def make_trainer(spec: RunSpec, collective: Collective = ALONE) -> Trainer:
    """Make the trainer of a run, with or without actors; raise ConfigError or TaskError."""
    if spec.cfg.actors.engine is None:
        start, state = begin(spec, collective)
        collector = make_collector(start)
    else:
        start, state = begin(_for_actors(spec))
        collector = _make_actors_collector(start)
    try:
        return Trainer(start, collector, state)
    except BaseException:  # an incompatible checkpoint, for example
        collector.close()  # stops the actors
        raise


def _for_actors(spec: RunSpec) -> RunSpec:
    """Return the spec with envs on CPUs; raise ConfigError if a setting does not support actors."""
    cfg, engine = spec.cfg, spec.cfg.actors.engine
    if remote_class(spec.algorithm_class) is None:
        problem = f"not supported by algo={cfg.algo}, which learns only from rollouts of its newest policy"
        raise ConfigError(problem, key=f"actors={engine}", hint="Try algo=impala, or actors=none")
    if (cfg.sim_device or "cpu") not in ("cpu", "auto"):
        raise ConfigError(key="sim_device", expected=f"cpu with actors={engine}", got=cfg.sim_device)
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
    except BaseException:  # Ctrl-C, for example
        rollouts.close()  # stops the actors
        raise


def _make_engine(start: RunStart, jobs: list[ActorJob]) -> Engine:
    actors = start.cfg.actors
    if actors.engine == "ray":
        from gpusim_rl.distributed.ray_engine import RayEngine

        return RayEngine(jobs, address=actors.address)
    from gpusim_rl.distributed.process_engine import ProcessEngine

    return ProcessEngine(jobs, pin=start.device.type == "cuda")


def _make_rollouts(start: RunStart, engine: Engine, seed: int) -> Rollouts:
    return ActorsRollouts(engine) if start.cfg.actors.inference == "actor" else InferenceRollouts(engine, start, seed)
