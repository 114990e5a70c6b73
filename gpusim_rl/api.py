"""Training from Python, without a command line."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.settings.checks import build_run
from gpusim_rl.settings.compose import TaskFolders, resolve_checkpoint
from gpusim_rl.settings.keywords import compose_call

if TYPE_CHECKING:
    from gpusim_rl.env import VecEnv
    from gpusim_rl.env.task import Task, TaskConfig
    from gpusim_rl.files.paths import Checkpoint
    from gpusim_rl.learn.algorithm import Algorithm


def train(
    task: type[Task[Any]] | str | object,
    /,
    config: TaskConfig | None = None,
    *,
    algo: type[Algorithm] | str | None = None,
    network: type | None = None,
    config_dir: str | Path | None = None,
    **overrides: Any,
) -> Any:
    """Train a task, with the defaults of `python train.py`.

        gpusim_rl.train("Ant", num_envs=64)
        gpusim_rl.train(Hopper, Hopper.Config(...), num_envs=4096, ppo={"horizon": 8}, sim="mujoco")
        gpusim_rl.train(envs, algo="sac")

    Args:
        task: Task class, name of a task, or vector envs of Isaac Lab, mjlab, Gymnasium, EnvPool or Stable-Baselines3,
            which are closed at the end.
        config: Settings of the task; None: the values in its yaml.
        algo: Name of an algorithm, or a subclass of `gpusim_rl.Algorithm` with defaults in its `Config`; None: PPO.
        network: Importable class that replaces the MLP (`gpusim_rl.learn.networks.Features`).
        config_dir: Folder with additional tasks and algorithms (`-cd` of `train.py`).
        **overrides: Settings by name, sections as dicts; a string selects a section's yaml (`debug="smoke"`).

    Returns:
        Last row of metrics; with `test=True`, the result of the evaluation.
    """
    classes = {"algo": algo, "network": network, "config_dir": config_dir}
    if isinstance(task, (str, type)):
        spec = prepare(task, config, **classes, **overrides)
    else:
        spec = _with_envs(task, **classes, **overrides)

    from gpusim_rl.distributed.actors import make_trainer
    from gpusim_rl.distributed.data_parallel import joined
    from gpusim_rl.run.evaluation import evaluate_run

    with joined(spec) as collective:
        return evaluate_run(spec) if spec.cfg.test else make_trainer(spec, collective).train()


def _with_envs(envs: Any, **settings: Any) -> RunSpec:
    """Prepare a run with vector envs from the user's script."""
    name, own = type(envs).__name__, getattr(envs, "unwrapped", envs)
    packages = {cls.__module__.partition(".")[0] for cls in type(own).__mro__}
    task = "IsaacLab" if "isaaclab" in packages else "MjLab" if "mjlab" in packages else "Gymnasium"
    known: dict[str, Any] = {} if task == "Gymnasium" else {"device": str(own.device)}
    count = getattr(own, "num_envs", None) or getattr(own, "config", {}).get("num_envs")  # EnvPool has only `config`
    if count is not None:
        known["num_envs"] = int(count)
    spec = prepare(task, **{**known, **settings})
    cfg = spec.cfg
    others = {"actors": cfg.actors.engine, "eval.interval": cfg.eval.interval}
    for key in [*_env_keys(cfg), *(key for key, value in others.items() if value)]:
        problem, hint = f"{key} has no effect on existing envs", f"Try without {key}, or train({task!r}, ...)"
        raise ConfigError(problem, key=f"train({name})", hint=hint)
    library: Any = spec.task_class
    adopted = library.adopt(envs, cfg.env, seed=max(0, cfg.seed))
    if adopted.num_envs != cfg.num_envs:
        raise ConfigError(f"got {adopted.num_envs} envs, but num_envs={cfg.num_envs}", key=f"train({name})")
    return dataclasses.replace(spec, envs=adopted)


def _env_keys(cfg: Any) -> list[str]:
    """Return the `env` settings in use that take effect only when another library's envs are created."""
    return [f"env.{key}" for key in ("id", "_target_", "kwargs", "cfg", "physics") if getattr(cfg.env, key)]


def make_env(
    task: type[Task[Any]] | str,
    /,
    config: TaskConfig | None = None,
    *,
    config_dir: str | Path | None = None,
    **overrides: Any,
) -> VecEnv:
    """Make the environment of `train`, for another library's learner (`gpusim_rl.connect`) or your own.

        env = gpusim_rl.make_env("Ant", num_envs=64)
        obs = env.reset()
        step = env.step(actions)

    The arguments are the same as for `train`; learning and logging settings are ignored.
    """
    spec = prepare(task, config, config_dir=config_dir, **overrides)
    cfg = spec.cfg

    from gpusim_rl.env import Task, VecEnv
    from gpusim_rl.machine.hardware import tune_malloc
    from gpusim_rl.machine.torch_threads import use_available_cpus
    from gpusim_rl.run.devices import choose_devices

    if not issubclass(spec.task_class, Task):
        raise ConfigError("not needed for vector envs of another library: use them directly", key=f"make_env({task!r})")
    use_available_cpus()
    tune_malloc()
    _, choice = choose_devices(cfg)
    seed = secrets.randbelow(2**31) if cfg.seed == -1 else cfg.seed
    return VecEnv.make(spec.task_class, cfg.task, num_envs=cfg.num_envs, choice=choice, sim=cfg.sim, seed=seed)


def prepare(
    task: type[Task[Any]] | str,
    /,
    config: TaskConfig | None = None,
    *,
    algo: type[Algorithm] | str | None = None,
    network: type | None = None,
    config_dir: str | Path | None = None,
    **overrides: Any,
) -> RunSpec:
    """Compose and check the arguments of `train`; return the run's settings and classes."""
    composed = compose_call(task, config, overrides, algo=algo, network=network, config_dir=config_dir)
    task_class = task if isinstance(task, type) else None
    return load_spec(*composed, task_class=task_class, algorithm_class=algo if isinstance(algo, type) else None)


def load_spec(
    config: dict[str, Any],
    overrides: Sequence[str],
    checkpoint: Checkpoint | None = None,
    *,
    task_class: type[Any] | None = None,
    algorithm_class: type[Algorithm] | None = None,
) -> RunSpec:
    """Load the classes that a composed config names, unless passed, check its settings, and return both."""
    import_torch()
    from gpusim_rl.env.task import Task, load_task_or_environment
    from gpusim_rl.learn.algorithm import load_algorithm_class
    from gpusim_rl.sim.drives import expand

    expand(config["task"])
    checkpoint = checkpoint or resolve_checkpoint(config)
    task_class = task_class or load_task_or_environment(config["task"].get("_target_"))
    algorithm_class = algorithm_class or load_algorithm_class(config["algo"].get("_target_"))
    cfg = build_run(config, task_class=task_class, algorithm_class=algorithm_class)
    if (keys := _env_keys(cfg)) and issubclass(task_class, Task):
        raise ConfigError(f"has no effect with task {task_class.__name__}", key=keys[0], hint="Try task=Gymnasium")
    return RunSpec(cfg, task_class, algorithm_class, dict(config), list(overrides), checkpoint, TaskFolders.user)
