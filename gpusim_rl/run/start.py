"""What a run begins with: checkpoint, seed and devices, and the environments and the algorithm that they make."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gpusim_rl.env import Environment, VecEnv
from gpusim_rl.env.encoded_env import EncodedEnv
from gpusim_rl.env.mirrors import mirrored
from gpusim_rl.env.observations import number_names
from gpusim_rl.errors import import_extra, one_line_if_out_of_memory, warn
from gpusim_rl.learn.algorithm import Algorithm, EnvSpec
from gpusim_rl.learn.collective import ALONE, Collective
from gpusim_rl.learn.pretrained import begin_from_pretrained, load_frozen
from gpusim_rl.learn.teacher import begin_from
from gpusim_rl.machine.hardware import tune_malloc
from gpusim_rl.machine.torch_threads import use_available_cpus
from gpusim_rl.run import checkpoint
from gpusim_rl.run.collector import Collector
from gpusim_rl.run.compilation import CompileChoice, choose_compile
from gpusim_rl.run.devices import choose_devices, choose_eval_devices, set_deterministic
from gpusim_rl.run.held_objects import devices_checked
from gpusim_rl.run.load_policy import load_policy
from gpusim_rl.run.run_dir import encoder_of
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.settings.schema import RunConfig, declarations
from gpusim_rl.sim import SimChoice, make_sim

SEEDS_APART = 1_000_003
"""Distance of the seeds of two processes that learn together: their envs and their noise differ."""
RESUMES_APART = 7_919
"""Distance of the seeds of two starts of a run, for each iteration between them."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """Decisions before anything is built.

    Attributes:
        spec: Task, algorithm and settings.
        collective: Processes that learn together; each has `num_envs` envs.
        seed: Seed of the run.
        device: Device of the learner.
        sim: Simulator and its device.
        compile: Mode of torch.compile, and its reason.
        resumed: Whether the run continues from a checkpoint.
        iteration: Iterations done before this start of the run.
        regrouped: Whether another number of processes learned together before: new episodes begin, with other noise.
        digest: Digest of the checkpoint's file.
    """

    spec: RunSpec
    collective: Collective
    seed: int
    device: torch.device
    sim: SimChoice
    compile: CompileChoice
    resumed: bool = False
    iteration: int = 0
    regrouped: bool = False
    digest: str | None = None

    @property
    def cfg(self) -> RunConfig:
        """Settings of the run."""
        return self.spec.cfg

    @property
    def task_name(self) -> str:
        """Name of the task's class."""
        return self.spec.task_class.__name__

    @property
    def process_seed(self) -> int:
        """Seed of this process among those that learn together."""
        return self.seed + SEEDS_APART * self.collective.rank


def begin(spec: RunSpec, collective: Collective = ALONE) -> tuple[RunStart, dict[str, Any] | None]:
    """Reads the checkpoint, chooses seed and devices, and prepares torch for them.

    Returns:
        Start of the run, and the state of the checkpoint from which this process continues; None for a new run.

    Raises:
        ConfigError: Something in the configuration or the checkpoint does not fit.
    """
    cfg = spec.cfg
    outside = spec.task_class if issubclass(spec.task_class, Environment) else None
    if cfg.log.tensorboard:
        import_extra("tensorboard", "tensorboard", "log.tensorboard=true")
    if cfg.log.video:
        for module in ("imageio_ffmpeg", "PIL.Image"):
            import_extra(module, "view", "log.video=true")
    state, digest = checkpoint.load_for(spec)
    regrouped = False
    if state is not None and not cfg.test:
        state, regrouped = state_of_process(state, collective)
    seed = collective.share(_choose_seed(cfg, state))
    device, sim = choose_devices(cfg, outside=outside)
    if cfg.eval.interval and not cfg.test:
        choose_eval_devices(cfg, outside=outside)  # what is wrong is said now
    compiled = choose_compile(cfg, device)
    torch.manual_seed(seed)
    if cfg.torch_deterministic:  # without it cuBLAS refuses; read when CUDA starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    set_deterministic(cfg.torch_deterministic)
    use_available_cpus()
    tune_malloc()
    start = RunStart(spec, collective, seed, device, sim, compiled)
    if state is not None:
        iteration = int(state["iteration"])
        start = dataclasses.replace(start, resumed=True, iteration=iteration, regrouped=regrouped, digest=digest)
    return start, state


def _choose_seed(cfg: RunConfig, state: Mapping[str, Any] | None) -> int:
    if state is not None and not cfg.test:
        return int(state["seed"])
    return secrets.randbelow(2**31) if cfg.seed == -1 else cfg.seed


def state_of_process(state: dict[str, Any], collective: Collective) -> tuple[dict[str, Any], bool]:
    """Returns this process's state in a checkpoint, and whether it was of another number of processes.

    With as many processes as before it continues as it was. Else learning continues, and episodes begin anew.
    """
    processes = state.get("processes", {})
    before, now = max(1, len(processes)), collective.size
    if now == before:
        return state | processes.get(collective.rank, {}), False
    if collective.rank == 0:
        warn(
            f"the run had {before} process{'es' if before > 1 else ''} before, and has {now} now: new episodes"
            " begin, and a replay memory is filled again"
        )
    return state | {"algorithm": checkpoint.anew(state["algorithm"], *checkpoint.REPLAY)}, True


def make_collector(start: RunStart, **role: Any) -> Collector:
    """Makes the environments of a run and its algorithm; `role` has fields of `EnvSpec` for one of several processes.

    Raises:
        ConfigError: Something in the configuration does not fit.
        TaskError: A hook of the task is wrong.
    """
    cfg = start.cfg
    with one_line_if_out_of_memory(cfg.num_envs):
        env = observed(make_env(start), start.spec, start.device)
        with devices_checked(("the environment", env, env.device), enabled=cfg.debug.check_device):
            obs = {group: value.to(start.device, copy=True) for group, value in env.reset().items()}
        algorithm = make_algorithm(start, env_spec(start, env, **role), start.process_seed)
        use_cpus(start, env.num_envs)
        if start.compile.mode == "all":
            env.compile()
        return Collector(cfg, env, algorithm, obs, start.device, start.collective)


def resumed_seed(seed: int, iteration: int) -> int:
    """Return the seed of envs that begin new episodes at an iteration: a resumed run must not draw the same again."""
    return (seed + iteration * RESUMES_APART) % 2**31


def evaluation_seed(seed: int) -> int:
    """Return the seed of envs of another library in which a policy is judged: their starts are not the training's."""
    return (seed + 2**30) % 2**31


def make_env(start: RunStart) -> Environment:
    """Makes the environments of a run, which have the images that its policy may get features of."""
    cfg, task_class, task_cfg = start.cfg, start.spec.task_class, start.cfg.task
    if start.spec.envs is not None:
        return start.spec.envs
    if issubclass(task_class, Environment):
        seed = evaluation_seed(start.process_seed) if cfg.test else resumed_seed(start.process_seed, start.iteration)
        return task_class.from_settings(cfg.env, num_envs=cfg.num_envs, seed=seed, device=start.device)
    if cfg.test:  # whole episodes only
        task_cfg = task_cfg.whole_episodes()
    sim = make_sim(task_class.scene(task_cfg), start.sim, cfg.num_envs, cfg.sim)
    return VecEnv(task_class, task_cfg, sim, start.process_seed, check=cfg.debug.check_task)


def observed(env: Environment, spec: RunSpec, device: torch.device) -> Environment:
    """Returns envs as the policy of a run observes them: with `pretrained.freeze` it gets features in place of images.

    Args:
        env: Envs of the task.
        spec: The run.
        device: Device of the encoder.

    Raises:
        ConfigError: The envs cannot be encoded.
    """
    cfg, name = spec.cfg.pretrained, encoder_of(spec)
    if not cfg.freeze or name is None:
        return env
    return EncodedEnv(env, partial(load_frozen, name, device=device), cfg.frames)


def env_spec(start: RunStart, env: Environment, **role: Any) -> EnvSpec:
    """Returns the properties of environments for an algorithm; `role` has fields for one of several processes."""
    inside = env.unwrapped
    spec = EnvSpec(
        env.num_envs,
        dict(env.obs_sizes),
        env.action_space,
        env.steps_between_truncations,
        role="acts" if start.cfg.test else "both",
        section=start.cfg.algo,
        collective=start.collective,
        compile=start.compile.mode != "off",
        dt=inside.task.dt if isinstance(inside, VecEnv) else 1.0,
        task=start.task_name,
        obs_names=number_names(env.obs_sizes, env.obs_parts) if isinstance(env, VecEnv) else {},
        images=dict(env.images),
        final_images=env.final_images,
        mirrored=partial(mirrored, env),
        load_policy=partial(load_policy, start.spec, env.action_space, start.device),
    )
    return dataclasses.replace(spec, **role)


def use_cpus(start: RunStart, num_envs: int) -> None:
    """Gives torch as many threads as an update of a learner of these envs keeps busy."""
    settings = start.cfg.algorithm
    use_available_cpus(declarations(type(settings)).batch_rows(settings, num_envs))


def make_algorithm(start: RunStart, env: EnvSpec, seed: int) -> Algorithm:
    """Makes the algorithm of a run for environments with these properties; the seed is that of all its noise."""
    cfg, make = start.cfg, start.spec.algorithm_class
    algorithm = make(cfg.algorithm, env, device=start.device, seed=seed, max_iterations=cfg.max_iterations)
    if cfg.pretrained.init_from is not None and not (cfg.pretrained.freeze or start.resumed or env.role == "acts"):
        begin_from_pretrained(algorithm.policy, cfg.pretrained.init_from, cfg.algo)
    if cfg.start_from is not None and env.role != "acts":
        begin_from(algorithm.policy, cfg.algorithm, env, cfg.start_from)
    return algorithm
