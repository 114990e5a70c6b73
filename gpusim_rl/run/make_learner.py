"""Algorithm of a run, and the collector that steps its environments."""

from __future__ import annotations

from functools import partial

from gpusim_rl.errors import one_line_if_out_of_memory
from gpusim_rl.learn.algorithm import ActorPlace, Algorithm, EnvSpec, LearnerContext
from gpusim_rl.learn.pretrained import init_from_pretrained
from gpusim_rl.learn.teacher import begin_from
from gpusim_rl.machine.torch_threads import use_available_cpus
from gpusim_rl.run.checkpoint import load_policy
from gpusim_rl.run.collector import Collector
from gpusim_rl.run.make_env import env_spec, make_started_env
from gpusim_rl.run.start import RunStart
from gpusim_rl.settings.schema import declarations


def make_collector(start: RunStart, actor: ActorPlace | None = None) -> Collector:
    """Make the collector of a run or of one of its actors, with environments and algorithm."""
    with one_line_if_out_of_memory(start.cfg.num_envs):
        env, obs = make_started_env(start)
        algorithm = make_algorithm(start, env_spec(start, env), actor)
        use_cpus(start, env.num_envs)
        if start.compile.mode == "all":
            env.compile()
        return Collector(start, env, algorithm, obs)


def use_cpus(start: RunStart, num_envs: int) -> None:
    """Set torch's thread count to the number that an update over `num_envs` envs can use."""
    settings = start.cfg.algorithm
    use_available_cpus(declarations(type(settings)).batch_rows(settings, num_envs))


def make_algorithm(
    start: RunStart, env: EnvSpec, actor: ActorPlace | None = None, seed: int | None = None
) -> Algorithm:
    """Make the algorithm of a run, with pretrained weights if configured; `seed` replaces the process's seed."""
    cfg, load = start.cfg, partial(load_policy, start.spec, env.action_space, start.device)
    context = LearnerContext(cfg.algo, start.collective, start.compile.now, load, actor)
    algorithm = start.spec.algorithm_class(
        cfg.algorithm,
        env,
        context,
        device=start.device,
        seed=start.process_seed if seed is None else seed,
        max_iterations=cfg.max_iterations,
    )
    if actor is None and cfg.pretrained.init_from is not None and not (cfg.pretrained.freeze or start.resumed):
        init_from_pretrained(algorithm.policy, cfg.pretrained.init_from, cfg.algo)
    if actor is None and cfg.start_from is not None:
        begin_from(algorithm.policy, cfg.algorithm, env, context, cfg.start_from)
    return algorithm
