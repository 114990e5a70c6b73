"""From a command line to one plain dict: the only file that talks to Hydra.

`hydra_main` wraps the function behind `python train.py`, `compose` does the same for Python
callers. Both know the task folders of installed packages and put every complaint of Hydra's into
one line.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpusim_rl import paths
from gpusim_rl.config import (
    ALGORITHMS,
    OPEN_SECTION,
    TASK_DEFAULTS,
    check_settings,
    known_keys,
    plain,
    unknown_key,
)
from gpusim_rl.discover import check_config_dir, plugin_cfg_dirs, read_yaml, task_section, tasks, yaml_error
from gpusim_rl.errors import ConfigError, did_you_mean, friendly_errors
from gpusim_rl.paths import Checkpoint

VERSION_BASE = "1.3"
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError)
GROUPS = ("task", "algo", "sim", "log", "debug")
# A resumed run does not take these over from its saved command line: they belong to one call.
ONE_CALL_ONLY = ("checkpoint", "test", "hydra")
CONFIG_DIR = "--config-dir="
NO_YAML = "~task"
"""Stands in front of the overrides of a run whose task has no yaml: `++task.<key>=<value>` behind it are all it has."""


def hydra_main(run: Callable[[dict[str, Any], list[str], Checkpoint | None], None]) -> Callable[..., None]:
    """Make `run(config, overrides, checkpoint)` a command with Hydra's flags, sweeps, and errors on one line.

    `config` is the composed config as plain values, checked but for the task's section;
    `overrides` is the command line, with that of a resumed run in front;
    `checkpoint` is what `checkpoint=` names.
    """
    found: Checkpoint | None = None

    def job(cfg: Any) -> None:
        with friendly_errors():  # inside the job: else Hydra announces a failed job before our line
            config, overrides = plain(cfg), _job_overrides()
            refuse_misplaced(config, list(HydraConfig.get().overrides.task))
            check_settings(config)
            refuse_other_algorithm(config, overrides)
            checkpoint = found or resolve_checkpoint(config)
            refuse_other_task(config, checkpoint)
            run(config, overrides, checkpoint)

    @wraps(run)
    def main(argv: Sequence[str] | None = None) -> None:
        nonlocal found
        typed = list(sys.argv[1:] if argv is None else argv)
        with friendly_errors():
            arguments, found = with_saved_overrides(typed)
            arguments = may_add(flags_first(arguments))
            flags = check_flags(arguments)
            _prepare_hydra(flags.config_dir)
            program = sys.argv
            with tempfile.TemporaryDirectory(prefix="gpusim-rl-") as folder:
                if flags.multirun:
                    check_sweep(flags.overrides, flags.config_dir)
                    arguments = [*arguments, f"hydra.sweep.dir={quote(folder)}"]  # multirun.yaml
                sys.argv = [program[0], *arguments]  # Hydra reads nothing else
                try:
                    hydra.main(str(paths.cfg_dir()), "config", VERSION_BASE)(job)()
                except HYDRA_ERRORS as error:
                    raise explain(error, arguments) from None
                finally:
                    sys.argv = program

    return main


def compose(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> dict[str, Any]:
    """Compose a config as the command line does; return plain values.

    Args:
        overrides: As typed after `python train.py`: `["task=Ant", "num_envs=64"]`.
        config_dir: A folder of the user's with more configs (`-cd`), which win over ours.
    """
    _prepare_hydra(config_dir)
    GlobalHydra.instance().clear()
    arguments = may_add(overrides)
    try:
        with hydra.initialize_config_dir(version_base=VERSION_BASE, config_dir=str(paths.cfg_dir())):
            config = plain(hydra.compose("config", overrides=arguments))
    except HYDRA_ERRORS as error:
        raise explain(error, arguments) from None
    refuse_misplaced(config, arguments)
    return config


def with_saved_overrides(arguments: Sequence[str]) -> tuple[list[str], Checkpoint | None]:
    """Put the overrides of the run that `checkpoint=` names in front of the typed ones.

    So a run is resumed by its folder alone. What is typed wins over what was saved.

    Returns:
        The arguments, and what `checkpoint=` names; None where it names nothing.
    """
    typed = {_key(text): _value(text) for text in arguments if _is_override(text) or text == NO_YAML}
    name = typed.get("checkpoint", "null")
    if name in ("null", ""):
        return list(arguments), None
    found = paths.find_checkpoint(name, typed.get("log.dir", "runs"))
    # A folder continues in place, a file may start a new run: hand on which of the two was meant.
    meant = found.file if name.endswith(".pt") or found.run_dir is None else found.run_dir
    kept = [f"checkpoint={quote(str(meant))}" if _key(text) == "checkpoint" else text for text in arguments]
    lines, saved = read_overrides(found.run_dir) if found.run_dir else [], []
    if typed.get("task") and NO_YAML in lines:  # all that is known of its task is saved, and another is asked for
        lines = [text for text in lines if not _key(text).startswith("task.")]
    wanted, trained = typed.get("algo.name", typed.get("algo")), _saved_algorithm(lines)
    if wanted not in (None, trained):  # the run's settings of another algorithm are none of this one's
        lines = [text for text in lines if _key(text).partition(".")[0] not in ("algo", trained)]
    for text in lines:
        if text.startswith(CONFIG_DIR):
            if not any(argument.startswith(("-cd", "--config-dir")) for argument in arguments):
                saved.append(text)
        elif text.startswith("++") or (
            _key(text) not in typed and _key(text).split(".")[0] not in ONE_CALL_ONLY
        ):  # the first kind makes a key, which what is typed may then change
            saved.append(text)
    return [*saved, *kept], found


def _saved_algorithm(lines: Sequence[str]) -> str:
    """Name of the algorithm that a saved command line chose."""
    names = {_key(text): _value(text) for text in lines if _key(text) in ("algo", "algo.name")}
    return names.get("algo.name", names.get("algo", "ppo"))


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Sort flags before overrides: argparse does not understand `task=Ant -m seed=1,2`."""
    return sorted(arguments, key=_is_override)


def may_add(arguments: Sequence[str]) -> list[str]:
    """Let what is below `OPEN_SECTION` be new: Hydra takes a new key only with + in front."""
    return [f"++{text.lstrip('+')}" if _is_open(text) and text[0] in "+t" else text for text in arguments]


def read_overrides(run_dir: Path) -> list[str]:
    """The command line that a run folder keeps in overrides.yaml; empty when it has none."""
    file = run_dir / "overrides.yaml"
    if not file.is_file():
        return []
    overrides = OmegaConf.to_container(OmegaConf.load(file))
    if not isinstance(overrides, list) or not all(isinstance(text, str) for text in overrides):
        raise ConfigError(f"{file}: expected a list of key=value, got {type(overrides).__name__}")
    return [str(text) for text in overrides]


def resolve_checkpoint(config: Mapping[str, Any]) -> Checkpoint | None:
    """What the setting `checkpoint` names."""
    if config.get("checkpoint") is None:
        return None
    return paths.find_checkpoint(config["checkpoint"], config["log"]["dir"])


def refuse_other_task(config: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
    """Stop when the run of a checkpoint trained another task than the one asked for."""
    run_dir = checkpoint.run_dir if checkpoint is not None else None
    if run_dir is None or not (run_dir / "config.yaml").is_file():
        return
    trained = task_section(run_dir / "config.yaml").get("_target_")
    asked = config["task"].get("_target_")
    if trained != asked:
        raise ConfigError(
            f"checkpoint of another task: {run_dir} trained {trained}, asked for {asked}. Try leaving task= away"
        )


def refuse_other_algorithm(config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Stop when a setting was typed for an algorithm that does not run."""
    chosen = config["algo"]["name"]
    for text in overrides:
        section = _key(text).partition(".")[0]
        if section in ALGORITHMS and section != chosen:
            raise _no_effect(_key(text), chosen)


def _no_effect(key: str, chosen: str) -> ConfigError:
    section = key.partition(".")[0]
    return ConfigError(f"{key} has no effect with algo={chosen}. Try algo={section}, or {chosen}.<key>=<value>")


def refuse_misplaced(config: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Stop when the task's yaml lacks its first line, so that Hydra put all it holds below `task`."""
    algo = config.get("algo")
    if isinstance(algo, Mapping) and isinstance(algo.get("algo"), Mapping):
        raise ConfigError(
            "the algorithm's yaml has a section 'algo' below 'algo': is its first line not '# @package _global_'?"
        )
    section = config.get("task")
    if isinstance(section, Mapping) and isinstance(section.get("task"), Mapping):
        raise ConfigError(
            _problem(arguments)
            or "the task's yaml has a section 'task' below 'task': is its first line not '# @package _global_'?"
        )


def check_sweep(overrides: Sequence[str], config_dir: str | None = None) -> None:
    """Check every run of `-m` before the first one starts."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        [jobs] = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise explain(error, overrides) from None
    for job in jobs:
        check_settings(compose(job, config_dir))


def check_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the flags; an unknown one is one line that says how settings are written."""

    def refuse(message: str) -> NoReturn:
        bad = re.match(r"unrecognized arguments: (\S+)", message)
        name = bad.group(1).lstrip("-").partition("=")[0].replace("-", "_") if bad else ""
        hint = did_you_mean(name, known_keys())
        key = re.findall(r"'(.*)'", hint)[0] if hint else "num_envs"
        raise ConfigError(f"{message}. Settings are written without dashes: {key}=<value>; see --help")

    parser: argparse.ArgumentParser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_args(list(arguments))


def explain(error: Exception, arguments: Sequence[str] = ()) -> ConfigError:
    """Put an error of Hydra's into one line: what is wrong and what was probably meant."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, YAMLError):
        return yaml_error(error)
    if isinstance(error, RecursionError):
        where = TaskFolders.user or paths.cfg_dir()
        return ConfigError(
            _problem(arguments) or f"a yaml in {where} builds on itself: none may name itself in its defaults"
        )
    text = str(error).strip()
    first = text.partition("\n")[0]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return unknown_choice(group, name, list(error.options), TaskFolders.user)
    if isinstance(error, OverrideParseException):
        return ConfigError(f"cannot read {error.override!r}: expected key=value, e.g. num_envs=64")
    if found := re.search(r"Could not (?:override|delete) '([^'=]+)", text) or re.search(
        r"config group '(.+)' does not", text
    ):
        key, chosen = found.group(1), [_value(text) for text in arguments if _key(text) in ("algo", "algo.name")]
        if chosen and chosen[-1] != key.partition(".")[0] and key.partition(".")[0] in ALGORITHMS:
            return _no_effect(key, chosen[-1])
        return unknown_key(key, _all_keys(arguments))
    if found := re.search(r"already at '(.+)'|Multiple values for ([\w/]+)", text):
        key = found.group(1) or found.group(2)
        value = next((_value(argument) for argument in arguments if _key(argument) == key), "<value>")
        return ConfigError(f"{key!r} has a value already: write {key}={value} without +")
    if text.startswith("Config group override must be"):
        groups = [argument for argument in arguments if _key(argument) in GROUPS]
        return ConfigError(f"{' '.join(groups)}: expected a name, e.g. task=Cartpole; see --help")
    if found := re.search(r"Ambiguous value for argument '(.+)'|Sweep parameters '(.+)' requires", first):
        asked = found.group(1) or found.group(2)
        return ConfigError(f"{asked}: several values need -m (one run for each); a list is written [a,b]")
    cause = error.__cause__
    reason = f": {str(cause).partition(chr(10))[0]}" if cause is not None else ""
    return ConfigError(f"{first or type(error).__name__}{reason}")


def unknown_choice(
    group: str, name: str, options: Sequence[str], config_dir: Path | None, otherwise: str = ""
) -> ConfigError:
    """The error for a yaml that no config folder has.

    Args:
        group: Folder of the yaml: `task`, `algo`.
        name: What was asked for.
        options: What there is.
        config_dir: The user's folder (`-cd`).
        otherwise: What to try without one, where nothing is similar.
    """
    hint = did_you_mean(name, options)
    if config_dir is not None:
        folder = config_dir.resolve()
        folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        misplaced = folder / f"{name}.yaml"
        if misplaced.is_file():
            hint = f" Move {misplaced} to {folder / group}/."
        else:
            hint += f" Looked in {folder / group}/ and ours."
    elif not hint and group in ("task", "algo"):
        hint = otherwise or f" Try -cd <folder that holds {group}/{name}.yaml>."
    return ConfigError(f"unknown {group} {name!r}.{hint} Available: {', '.join(options)}")


class TaskFolders(SearchPathPlugin):
    """Where Hydra looks: the user's folder, ours, those of installed packages.

    Attributes:
        user: What `-cd` names. Hydra itself would put it behind ours, where it could not win.
    """

    user: Path | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Put the user's folder in front, and every announced one behind."""
        if self.user is not None:
            search_path.prepend(provider="user", path=f"file://{self.user}")
        for source, folder in plugin_cfg_dirs():
            search_path.append(provider=source, path=f"file://{folder}")


def _prepare_hydra(config_dir: str | Path | None = None) -> None:
    if config_dir is not None:
        check_config_dir(config_dir)
    TaskFolders.user = Path(config_dir).resolve() if config_dir is not None else None
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands errors on instead of printing them; `explain` words them
    # Hydra 1.3 wants version_base, 1.4 warns on it; we support both.
    warnings.filterwarnings("ignore", message="The version_base parameter is deprecated")
    Plugins.instance().register(TaskFolders)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # tasks in the user's folder; last, so that it hides nothing


def _job_overrides() -> list[str]:
    """The overrides of this run, in the form that `with_saved_overrides` reads back."""
    settings = HydraConfig.get()
    folders = [source.path for source in settings.runtime.config_sources if source.provider == "command-line"]
    typed = [text.removeprefix("++") if _is_open(text) else text for text in settings.overrides.task]
    return [*(f"{CONFIG_DIR}{folder}" for folder in folders), *typed]


def _is_open(text: str) -> bool:
    """Whether an override is below `OPEN_SECTION`."""
    return f"{_key(text)}.".startswith(f"{OPEN_SECTION}.")


def _all_keys(arguments: Sequence[str]) -> list[str]:
    """Keys that a command line may set, with those of the task it names."""
    config_dir = get_args_parser().parse_known_args(list(arguments))[0].config_dir
    entries = tasks(config_dir)
    names = [name for name in _task_names(arguments) if name in entries and not entries[name].problem]
    sections = [task_section(entries[name].file) for name in names]
    keys = {f"task.{key}": None for section in [*sections, TASK_DEFAULTS] for key in section if key != "_target_"}
    made = [_key(text) for text in arguments if text.startswith("++") and not _is_open(text)]
    return [*known_keys(), *keys, *made]


def _problem(arguments: Sequence[str]) -> str:
    """What is wrong with the yaml of the task that a command line names."""
    entries = tasks(TaskFolders.user)
    return next((entries[name].problem for name in _task_names(arguments) if name in entries), "")


def _task_names(arguments: Sequence[str]) -> list[str]:
    """Tasks that a command line asks for."""
    return [_value(text) for text in arguments if _key(text) == "task"] or [_default_task()]


def _default_task() -> str:
    defaults = read_yaml(paths.cfg_dir() / "config.yaml")["defaults"]
    return next(entry["task"] for entry in defaults if "task" in entry)


def _is_override(text: str) -> bool:
    return "=" in text and not text.startswith("-")  # also with + and ~ in front


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0].partition("@")[0]


def _value(text: str) -> str:
    """Value of an override as text, without the quotes of Hydra's grammar."""
    value = text.partition("=")[2]
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def quote(text: str) -> str:
    """A value that Hydra reads back as this very string."""
    word = re.fullmatch(r"[A-Za-z_./][\w./-]*", text) and text.strip("./-") != ""
    if word and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
