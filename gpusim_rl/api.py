"""Training from Python, without a command line."""

from __future__ import annotations

import dataclasses
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.machine.hardware import limit_openmp_spin
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.settings.checks import build_run, check_settings, settings_class
from gpusim_rl.settings.compose import TaskFolders, choose_recipe, compose, resolve_checkpoint
from gpusim_rl.settings.discover import tasks, tuned_sections
from gpusim_rl.settings.hydra_errors import GROUPS, refuse_other_algorithm, refuse_other_task, unknown_choice
from gpusim_rl.settings.overrides import OPEN_SECTIONS, key_of, quote, text_of
from gpusim_rl.settings.saved_run import NO_YAML, continue_run
from gpusim_rl.settings.schema import algorithm_of

if TYPE_CHECKING:
    from gpusim_rl.env.task import Task, TaskConfig
    from gpusim_rl.env.vec_env import VecEnv
    from gpusim_rl.files.paths import Checkpoint
    from gpusim_rl.learn.algorithm import Algorithm
    from gpusim_rl.run.logger import Logger
    from gpusim_rl.run.trainer import Trainer


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
    """Trains a task; the same as `python train.py`, with the same defaults.

        gpusim_rl.train("Ant", num_envs=64)
        gpusim_rl.train(Hopper, Hopper.Config(...), num_envs=4096, ppo={"horizon": 8}, sim="mujoco")
        gpusim_rl.train(envs, algo="sac")

    Args:
        task: Task class, or the name of a task that has a yaml. Or vector envs that you have made, of Isaac Lab, mjlab,
            Gymnasium, EnvPool or Stable-Baselines3; they are closed at the end.
        config: Settings of the task; None takes them from its yaml.
        algo: Name of an algorithm that has a yaml, or a class of your own (`gpusim_rl.Algorithm`), whose settings are
            the defaults of its `Config`, or those of our algorithm that it extends; None is PPO.
        network: Class of your own in place of the perceptron (`gpusim_rl.learn.networks.Features`). It must be
            importable, so that the run can be resumed and played.
        config_dir: Folder of yours with more tasks and algorithms, as `-cd` for `train.py`.
        **overrides: Settings by name, sections as dicts; a section's name with a string chooses
            its yaml (`debug="smoke"`). `test=True` evaluates instead.

    Returns:
        Last row of metrics; of `test=True`, the result of the evaluation.
    """
    limit_openmp_spin()
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
    """Returns the run of vector envs that a script of the user has made.

    Raises:
        ConfigError: They are of no library that is known here, or a setting has no effect on them.
    """
    name, own = type(envs).__name__, getattr(envs, "unwrapped", envs)
    packages = {cls.__module__.partition(".")[0] for cls in type(own).__mro__}
    task = next((task for package, task in _TASK_OF.items() if package in packages), "Gymnasium")
    known: dict[str, Any] = {} if task == "Gymnasium" else {"device": str(own.device)}
    count = getattr(own, "num_envs", None) or getattr(own, "config", {}).get("num_envs")  # EnvPool's
    if count is not None:
        known["num_envs"] = int(count)
    spec = prepare(task, **{**known, **settings})
    cfg = spec.cfg
    made = [key for key in ("id", "_target_", "kwargs", "cfg", "physics") if getattr(cfg.env, key)]
    elsewhere = {"actors": cfg.actors.engine, "eval.interval": cfg.eval.interval}
    for key in [*(f"env.{key}" for key in made), *(key for key, value in elsewhere.items() if value)]:
        raise ConfigError(
            f"train({name}): {key} has no effect on envs that are there already. Try task={task} env.id=..."
        )
    library: Any = spec.task_class
    adopted = library.adopt(envs, cfg.env, seed=max(0, cfg.seed))
    if adopted.num_envs != cfg.num_envs:
        raise ConfigError(f"train({name}): num_envs={cfg.num_envs}, and there are {adopted.num_envs} envs")
    return dataclasses.replace(spec, envs=adopted)


_TASK_OF = {"isaaclab": "IsaacLab", "mjlab": "MjLab"}
"""Tasks of the libraries whose envs are told by the package of their class."""


def make_env(
    task: type[Task[Any]] | str,
    /,
    config: TaskConfig | None = None,
    *,
    config_dir: str | Path | None = None,
    **overrides: Any,
) -> VecEnv:
    """Makes the environment of `train`, for a learner of another library (`gpusim_rl.connect`) or your own.

        env = gpusim_rl.make_env("Ant", num_envs=64)
        obs = env.reset()
        step = env.step(actions)

    Args:
        task: Task class or name, as for `train`.
        config: Settings of the task, as for `train`.
        config_dir: Folder of yours, as for `train`.
        **overrides: Settings by name, as for `train`; those of learning and logging have no effect.
    """
    limit_openmp_spin()
    spec = prepare(task, config, config_dir=config_dir, **overrides)
    cfg = spec.cfg

    from gpusim_rl.env import Task, VecEnv
    from gpusim_rl.machine.hardware import tune_malloc
    from gpusim_rl.machine.torch_threads import use_available_cpus
    from gpusim_rl.run.devices import choose_devices

    if not issubclass(spec.task_class, Task):
        raise ConfigError(f"make_env({task!r}): these are envs of another library already, hand them on as they are")
    use_available_cpus()
    tune_malloc()
    _, choice = choose_devices(cfg)
    seed = secrets.randbelow(2**31) if cfg.seed == -1 else cfg.seed
    return VecEnv.make(spec.task_class, cfg.task, num_envs=cfg.num_envs, choice=choice, sim=cfg.sim, seed=seed)


def load_spec(config: dict[str, Any], overrides: Sequence[str], checkpoint: Checkpoint | None = None) -> RunSpec:
    """Loads the classes of a composed config, and checks the rest of it.

    Raises:
        ConfigError: A class is not there, or a setting does not fit.
    """
    from gpusim_rl.env.task import load_task_or_environment
    from gpusim_rl.learn.algorithm import load_algorithm_class

    checkpoint = checkpoint or resolve_checkpoint(config)
    task_class = load_task_or_environment(config["task"].get("_target_"))
    return _spec(config, overrides, checkpoint, task_class, load_algorithm_class(config["algo"].get("_target_")))


def _spec(
    config: dict[str, Any],
    overrides: Sequence[str],
    checkpoint: Checkpoint | None,
    task_class: type[Any],
    algorithm_class: type[Algorithm],
) -> RunSpec:
    from gpusim_rl.env import Task

    cfg = build_run(config, task_class=task_class, algorithm_class=algorithm_class)
    keys = [key for key in ("id", "_target_", "kwargs", "cfg", "physics") if getattr(cfg.env, key)]
    if keys and issubclass(task_class, Task):
        raise ConfigError(f"env.{keys[0]} has no effect with task {task_class.__name__}. Try task=Gymnasium")
    return RunSpec(cfg, task_class, algorithm_class, dict(config), list(overrides), checkpoint, TaskFolders.user)


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
    """Composes and checks what `train` was asked for."""
    name = _yaml_name(task, config_dir)
    typed = [f"task={name}" if name else NO_YAML]
    if isinstance(algo, str):
        typed.append(f"algo={algo}")
    elif algo is not None:
        section = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", algo.__name__).lower()
        base = algorithm_of(algo)
        if overrides.get("checkpoint") is not None:
            settings: Mapping[str, Any] = {}  # those of the run
        elif base is None:
            settings = dataclasses.asdict(_defaults(algo, f"algo={algo.__name__}"))
        else:  # with the task's tuned values
            fields = dataclasses.fields(settings_class(algo))
            new = {
                field.name: field.default for field in fields if field.default is not dataclasses.MISSING and field.init
            }
            choosing = [line for line in _lines(overrides) if key_of(line) in ("recipe", "device", "sim_device")]
            composed = compose([*typed, *choosing, f"algo={base}"], config_dir)
            tuned = tuned_sections(name, config_dir, composed["recipe"]).get(base, {}) if name else {}
            own = {key: value for key, value in new.items() if key not in tuned}
            settings = {**composed[base], **own}
        typed += [f"++algo.name={section}", f"++algo._target_={_class_path(algo, 'algo')}"]
        typed += _lines(settings, f"++{section}.")
    typed += _lines(overrides)
    places = {"task": task, "algo": algo, "network": network}
    named = [(place, _class_path(cls)) for place, cls in places.items() if isinstance(cls, type)]
    lines, saved = continue_run(typed, config_dir, named)
    more = [line for line in lines if line.startswith("task.")] if config is not None or name is None else []
    lines = [line for line in lines if line not in more]  # the others are composed on top of the task's own settings
    lines = choose_recipe(lines, config_dir) if saved is None else lines
    composed = compose(lines, config_dir, saved)
    target = _class_path(task) if isinstance(task, type) else composed["task"].get("_target_")
    if saved is not None:
        composed["task"]["_target_"] = target
    if network is not None:
        more.append(f"{composed['algo']['name']}.network._target_={_class_path(network, 'network')}")
    if isinstance(task, str):
        from gpusim_rl.env.task import load_task_or_environment

        task = load_task_or_environment(target)
    if config is not None or "_target_" not in composed["task"]:
        settings = dataclasses.asdict(_defaults(task, f"train({task.__name__})") if config is None else config)
        more = [*_section_lines(composed["task"], {"_target_": _class_path(task), **settings}), *more]
    if more:
        composed = compose([*lines, *more], config_dir, saved)
        if saved is not None:
            composed["task"]["_target_"] = target
    check_settings(composed)
    refuse_other_algorithm(composed, lines)
    refuse_other_task(composed, saved)

    from gpusim_rl.learn.algorithm import load_algorithm_class

    algorithm = (
        load_algorithm_class(composed["algo"].get("_target_")) if algo is None or isinstance(algo, str) else algo
    )
    record = [*lines, *more]
    if saved is None:
        return _spec(composed, record, None, task, algorithm)
    return _spec(composed, saved.with_overrides(record), saved.checkpoint, task, algorithm)


@contextmanager
def scratch_training(overrides: Sequence[str]) -> Iterator[tuple[Trainer, Logger]]:
    """Makes a training to measure: it prints nothing, and its run folder is gone when the block ends.

        with scratch_training(["task=Ant", "num_envs=64"]) as (trainer, log):
            trainer.iterate(log)

    Args:
        overrides: Command line, as for `train.py`; it wins over what makes the run quiet.
    """
    with tempfile.TemporaryDirectory() as folder:
        quiet = [f"log.dir={quote(folder)}", "log.console=quiet", "log.checkpoint_interval=1000000"]
        spec = load_spec(compose([*quiet, "max_iterations=1000000", *overrides]), overrides)

        from gpusim_rl.distributed.actors import make_trainer
        from gpusim_rl.learn.collective import ALONE

        trainer = make_trainer(spec, ALONE)
        with trainer.logging() as log:
            yield trainer, log


def _yaml_name(task: type | str, config_dir: str | Path | None = None) -> str | None:
    """Returns the name of the yaml of a task, None when it has none."""
    entries = tasks(config_dir, outside=True)
    if isinstance(task, str):
        if task not in entries:
            folder = Path(config_dir) if config_dir is not None else None
            otherwise = " Try config_dir=<folder with its yaml>, or pass its class."
            raise unknown_choice("task", task, list(entries), folder, otherwise)
        return task
    target = f"{task.__module__}.{task.__qualname__}"
    names = [entry.name for entry in entries.values() if entry.target == target]
    return task.__name__ if task.__name__ in names else next(iter(names), None)


def _defaults(owner: type, asked: str) -> Any:
    """Makes the settings of a class that has no yaml, if all of them have defaults in the dataclass."""
    try:
        return settings_class(owner)()
    except TypeError:
        name = owner.__name__
        advice = f"try gpusim_rl.train({name}, {name}.Config(...)), or defaults in {name}.Config"
        raise ConfigError(f"{asked}: {name} has no yaml and was given no settings: {advice}") from None


def _class_path(cls: type, argument: str = "") -> str:
    """Returns where a class can be imported from again."""
    if cls.__module__ == "__main__" and argument:
        problem = f"{argument}={cls.__name__} is a class of this script: only the script can resume or play the run"
        warn(f"{problem}. Try a module of its own")
    if "<locals>" in cls.__qualname__ and argument:
        needed = "the class must be at the top level of a module, so that a run with it can be resumed and played"
        raise ConfigError(f"{argument}={cls.__name__}: {needed}")
    return f"{cls.__module__}.{cls.__qualname__}"


def _section_lines(composed: Mapping[str, Any], section: Mapping[str, Any]) -> Iterator[str]:
    """Yields overrides that make the composed section of a task the one that was passed."""
    for key, value in section.items():
        old = composed.get(key)
        if old != value or key not in composed:
            if isinstance(old, Mapping) and old:  # Hydra would merge the two
                yield f"~task.{key}"
            yield f"++task.{key}={text_of(value)}"


def _lines(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields keyword arguments as lines of a command line."""
    for name, value in overrides.items():
        key = prefix + name
        if isinstance(value, Mapping) and key not in OPEN_SECTIONS and (value or not prefix):
            yield from _lines(value, f"{key}.")
        elif isinstance(value, str) and key in GROUPS:
            yield f"{key}={value}"
        else:
            yield f"{key}={text_of(value)}"
