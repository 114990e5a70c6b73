"""From a command line to one plain dict: the only file that talks to Hydra.

`hydra_main` wraps the function behind `python train.py`, `compose` does the same for Python
callers. Both know the task folders of installed packages and put every complaint of Hydra's into
one line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hydra
import psutil
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpusim_rl.errors import ConfigError, did_you_mean, friendly_errors, printable
from gpusim_rl.files import paths
from gpusim_rl.files.paths import Checkpoint
from gpusim_rl.settings.checks import check_settings, in_open_section, known_keys, plain, unknown_key
from gpusim_rl.settings.discover import (
    check_config_dir,
    default_choice,
    plugin_cfg_dirs,
    read_yaml,
    task_section,
    tasks,
    yaml_error,
)
from gpusim_rl.settings.overrides import is_override, key_of, quote, value_of
from gpusim_rl.settings.saved_run import ONE_CALL_ONLY, SavedRun, continue_run
from gpusim_rl.settings.schema import ALGORITHMS, TASK_DEFAULTS

VERSION_BASE = "1.3"
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError, OSError)
GROUPS = ("task", "algo", "sim", "actors", "log", "debug")
SAVED = "the settings of a saved run"
"""Name of the config that stands for them: no file is called so."""
LEFT_OVER_S = 60.0
"""A folder of a sweep that is younger may be of a process that is not seen from here yet."""
LONGEST_NAME = 200
"""Bytes of the name of a yaml: files have names of at most 255."""


class Outcome(NamedTuple):
    """What the summary of a sweep (`-m`) tells of a run."""

    run: str
    """Its folder."""
    last_return: float | None
    best_return: float | None


def hydra_main(run: Callable[[dict[str, Any], list[str], Checkpoint | None], Outcome]) -> Callable[..., None]:
    """Make `run(config, overrides, checkpoint)` a command with Hydra's flags, sweeps, and errors on one line.

    `config` is the composed config as plain values, checked but for the task's section;
    `overrides` is the command line, with that of a resumed run in front;
    `checkpoint` is what `checkpoint=` names.
    """
    saved: SavedRun | None = None
    outcomes: list[tuple[list[str], Outcome]] = []  # by overrides
    console = "auto"

    def job(cfg: Any) -> None:
        nonlocal console
        with friendly_errors():  # inside the job: else Hydra announces a failed job before our line
            config, overrides = plain(cfg), _job_overrides()
            typed = list(HydraConfig.get().overrides.task)
            refuse_misplaced(config, typed)
            choose_length(config, typed, saved)
            check_settings(config)
            refuse_other_algorithm(config, overrides)
            checkpoint = saved.checkpoint if saved is not None else resolve_checkpoint(config)
            refuse_other_task(config, saved)
            console = config["log"]["console"]
            record = overrides if saved is None else saved.with_overrides(overrides)
            outcomes.append((typed, run(config, record, checkpoint)))

    @wraps(run)
    def main(argv: Sequence[str] | None = None) -> None:
        nonlocal saved
        typed = list(sys.argv[1:] if argv is None else argv)
        with friendly_errors():
            arguments, saved = continue_run(typed, check_flags(flags_first(typed)).config_dir)
            arguments = may_add(flags_first(arguments))
            flags = check_flags(arguments)
            refuse_unreadable(flags.overrides)
            if flags.shell_completion and (runs := _complete_checkpoint(os.environ.get("COMP_LINE", ""))) is not None:
                sys.stdout.write("".join(f"{run}\n" for run in runs))
                return
            _prepare_hydra(flags.config_dir)
            program = sys.argv
            if flags.multirun:
                check_sweep(flags.overrides, flags.config_dir, saved)
            with _sweep_folder() if flags.multirun else nullcontext() as folder:
                if folder is not None:
                    arguments = [*arguments, f"hydra.sweep.dir={quote(folder)}"]
                sys.argv = [program[0], *arguments]  # Hydra reads nothing else
                try:
                    hydra.main(str(paths.cfg_dir()), _primary(saved, flags.overrides), VERSION_BASE)(job)()
                except HYDRA_ERRORS as error:
                    raise explain(error, arguments, saved) from None
                finally:
                    sys.argv = program
                    if flags.multirun and outcomes:  # also where a run failed: those before it are complete
                        sys.stdout.write(sweep_summary(outcomes, console))

    return main


def sweep_summary(outcomes: Sequence[tuple[Sequence[str], Outcome]], console: str) -> str:
    """What is printed at the end of a sweep: a line for each run, with the overrides in which the runs differ.

    Args:
        outcomes: Overrides and outcome of each run.
        console: The setting `log.console`: `json` makes one object of it, `quiet` nothing.
    """
    if console == "quiet":
        return ""
    if console == "json":
        runs = [{"overrides": list(overrides), **outcome._asdict()} for overrides, outcome in outcomes]
        return json.dumps({"event": "sweep", "runs": runs}) + "\n"
    shared = set(outcomes[0][0]).intersection(*(overrides for overrides, _ in outcomes)) if len(outcomes) > 1 else set()
    table: list[tuple[str, ...]] = [("overrides", "last return", "best trimmed return", "run")]
    for overrides, (folder, *returns) in outcomes:
        numbers = ("–" if value is None else f"{value:.4g}" for value in returns)
        table.append((" ".join(text for text in overrides if text not in shared), *numbers, folder))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (f"{name:<{widths[0]}}  {last:>{widths[1]}}  {best:>{widths[2]}}  {run}" for name, last, best, run in table)
    return "".join(["\n", *(f"{printable(line)}\n" for line in lines)])


def compose(
    overrides: Sequence[str] = (), config_dir: str | Path | None = None, saved: SavedRun | None = None
) -> dict[str, Any]:
    """Compose a config as the command line does; return plain values.

    Args:
        overrides: As typed after `python train.py`: `["task=Ant", "num_envs=64"]`.
        config_dir: A folder of the user's with more configs (`-cd`), which win over ours.
        saved: A run whose settings stand in place of the defaults.
    """
    _prepare_hydra(config_dir)
    GlobalHydra.instance().clear()
    arguments = may_add(overrides)
    refuse_unreadable(arguments)
    try:
        with hydra.initialize_config_dir(version_base=VERSION_BASE, config_dir=str(paths.cfg_dir())):
            config = plain(hydra.compose(_primary(saved, arguments), overrides=arguments))
    except HYDRA_ERRORS as error:
        raise explain(error, arguments, saved) from None
    refuse_misplaced(config, arguments)
    choose_length(config, arguments, saved)
    return config


def choose_length(config: dict[str, Any], arguments: Sequence[str], saved: SavedRun | None) -> None:
    """Let `max_iterations` of the algorithm's own section count in place of the task's, which suits PPO's horizon.

    What is typed wins, and so does the length of a saved run.
    """
    name = _section(config, "algo").get("name")
    own = _section(config, name).get("max_iterations") if isinstance(name, str) else None
    typed = {key_of(text) for text in arguments}
    if own is not None and "max_iterations" not in typed and (saved is None or f"{name}.max_iterations" in typed):
        config["max_iterations"] = own


def _primary(saved: SavedRun | None, arguments: Sequence[str]) -> str:
    """Name of the config that Hydra starts from: ours, or the settings of a run in their place.

    A group that is typed (`sim=mjwarp`) wins over the saved settings, as everything that is typed.
    """
    if saved is None:
        return "config"
    ours = read_yaml(paths.cfg_dir() / "config.yaml")
    typed = {key_of(text) for text in arguments}
    defaults: list[Any] = ["_self_"]
    for entry in ours["defaults"]:
        [key] = entry if isinstance(entry, dict) else [entry]
        if key.startswith("override ") or key in typed:
            defaults.append(entry)
    node = {**{key: ours[key] for key in ("hydra", *ONE_CALL_ONLY) if key in ours}, **saved.settings}
    log = read_yaml(paths.cfg_dir() / "log" / "default.yaml")
    node["log"] = {**{key: log[key] for key in ("dir", "console")}, **(node.get("log") or {})}
    ConfigStore.instance().store(name=SAVED, node={"defaults": defaults, **node})
    return SAVED


@contextmanager
def _sweep_folder() -> Iterator[str]:
    """A folder for the multirun.yaml that Hydra writes, as long as the sweep takes.

    Its name has the process in it. Folders of sweeps that were killed are removed.
    """
    for old in Path(tempfile.gettempdir()).glob("gpusim-rl-sweep-*"):
        with suppress(OSError, ValueError):
            state, process = old.lstat(), int(old.name.split("-")[3])
            ours = not hasattr(os, "getuid") or state.st_uid == os.getuid()
            if ours and time.time() - state.st_mtime > LEFT_OVER_S and not psutil.pid_exists(process):
                shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"gpusim-rl-sweep-{os.getpid()}-") as folder:
        yield folder


def flags_first(arguments: Sequence[str]) -> list[str]:
    """Sort flags before overrides: argparse does not understand `task=Ant -m seed=1,2`."""
    return sorted(arguments, key=is_override)


def may_add(arguments: Sequence[str]) -> list[str]:
    """Let what is below `OPEN_SECTIONS` be new: Hydra takes a new key only with + in front."""
    return [f"++{text.lstrip('+')}" if _is_open(text) and text[0] in "+te" else text for text in arguments]


def resolve_checkpoint(config: Mapping[str, Any]) -> Checkpoint | None:
    """What the setting `checkpoint` names."""
    if config.get("checkpoint") is None:
        return None
    return paths.find_checkpoint(config["checkpoint"], config["log"]["dir"])


def refuse_unreadable(overrides: Sequence[str]) -> None:
    """Stop where Hydra would misread an override, or fail with an error of its own that does not name it."""
    for text in overrides:
        if is_override(text) and value_of(text).strip() == "???":  # taken for none: a folder `None` for hydra.run.dir
            raise ConfigError(f"{key_of(text)}: expected a value, got ???")
        try:
            [override] = OverridesParser.create().parse_overrides([text])
            value = override.value()
        except (HydraException, AssertionError, RecursionError, ValueError):  # also lists too deep, numbers too long
            raise _unreadable(text) from None
        if not override.key_or_group:
            raise _unreadable(text)
        names = value if isinstance(value, list) else [value] if isinstance(value, str) else []
        if override.key_or_group in GROUPS and not all(_may_be_file(name) for name in names):
            raise ConfigError(f"{text}: expected a name, e.g. task=Cartpole; see --help")


def _unreadable(text: str) -> ConfigError:
    return ConfigError(f"cannot read {text!r}: expected key=value, e.g. num_envs=64")


def _may_be_file(name: Any) -> bool:
    return isinstance(name, str) and len(os.fsencode(name)) <= LONGEST_NAME


def refuse_other_task(config: Mapping[str, Any], saved: SavedRun | None) -> None:
    """Stop when the run of a checkpoint trained another task than the one asked for."""
    if saved is None:
        return
    trained, asked = (_section(settings, "task").get("_target_") for settings in (saved.settings, config))
    if trained != asked:
        raise ConfigError(
            f"checkpoint of another task: {saved.checkpoint.run_dir or saved.checkpoint.file} trained {trained}, asked"
            f" for {asked}. Try leaving task= away"
        )


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


def refuse_other_algorithm(config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Stop when a setting was typed for an algorithm that does not run."""
    chosen = config["algo"]["name"]
    for text in overrides:
        section = key_of(text).partition(".")[0]
        if section in ALGORITHMS and section != chosen:
            raise _no_effect(key_of(text), chosen)


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


def check_sweep(overrides: Sequence[str], config_dir: str | None = None, saved: SavedRun | None = None) -> None:
    """Check every run of `-m` before the first one starts."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        [jobs] = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise explain(error, overrides, saved) from None
    trainings = 0
    for job in jobs:
        config = compose(job, config_dir, saved)
        check_settings(config)
        trainings += not config["test"]
    if saved is not None and saved.checkpoint.continues and trainings > 1:
        raise ConfigError(
            f"-m with checkpoint={saved.checkpoint.run_dir}: {trainings} runs would train in one folder. Try"
            f" checkpoint={saved.checkpoint.file.with_name('best.pt')}, from which each begins one of its own"
        )


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


def explain(error: Exception, arguments: Sequence[str] = (), saved: SavedRun | None = None) -> ConfigError:
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
        return _unreadable(error.override)
    if found := re.search(r"Could not (?:override|delete) '([^'=]+)", text) or re.search(
        r"config group '(.+)' does not", text
    ):
        key, chosen = found.group(1), [value_of(text) for text in arguments if key_of(text) in ("algo", "algo.name")]
        if chosen and chosen[-1] != key.partition(".")[0] and key.partition(".")[0] in ALGORITHMS:
            return _no_effect(key, chosen[-1])
        return unknown_key(key, _all_keys(arguments, saved))
    if found := re.search(r"already at '(.+)'|Multiple values for ([\w/]+)", text):
        key = found.group(1) or found.group(2)
        value = next((value_of(argument) for argument in arguments if key_of(argument) == key), "<value>")
        return ConfigError(f"{key!r} has a value already: write {key}={value} without +")
    if text.startswith("Config group override must be"):
        groups = [argument for argument in arguments if key_of(argument) in GROUPS]
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
        folder = paths.from_here(config_dir.resolve())
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
    """What was typed for this run."""
    typed = HydraConfig.get().overrides.task
    return [text.removeprefix("++") if _is_open(text) else text for text in typed]


def _is_open(text: str) -> bool:
    """Whether an override is below `OPEN_SECTIONS`."""
    return in_open_section(key_of(text))


def _complete_checkpoint(line: str) -> list[str] | None:
    """What TAB makes of a command line that ends with `checkpoint=<run>`, of which Hydra knows nothing; else None."""
    *words, last = line.split(" ")
    if key_of(last) != "checkpoint" or "=" not in last:
        return None
    typed = {key_of(word): value_of(word) for word in words}
    return [f"checkpoint={run}" for run in paths.complete_run(value_of(last), typed.get("log.dir", "runs"))]


def _all_keys(arguments: Sequence[str], saved: SavedRun | None) -> list[str]:
    """Keys that a command line may set, with those of the task it names."""
    if saved is not None:
        sections = [_section(saved.settings, "task")]
    else:
        entries = tasks(get_args_parser().parse_known_args(list(arguments))[0].config_dir, outside=True)
        names = [name for name in _task_names(arguments) if name in entries and not entries[name].problem]
        sections = [task_section(entries[name].file) for name in names]
    keys = {f"task.{key}": None for section in [*sections, TASK_DEFAULTS] for key in section if key != "_target_"}
    made = [key_of(text) for text in arguments if text.startswith("++") and not _is_open(text)]
    algo = next((f"{value_of(text)}." for text in reversed(arguments) if key_of(text) == "algo"), "")
    ours = sorted(known_keys(), key=lambda key: not (algo and key.startswith(algo)))  # what is chosen is meant
    return [*ours, *keys, *made]


def _problem(arguments: Sequence[str]) -> str:
    """What is wrong with the yaml of the task that a command line names."""
    entries = tasks(TaskFolders.user, outside=True)
    return next((entries[name].problem for name in _task_names(arguments) if name in entries), "")


def _task_names(arguments: Sequence[str]) -> list[str]:
    """Tasks that a command line asks for."""
    return [value_of(text) for text in arguments if key_of(text) == "task"] or [default_choice("task")]
