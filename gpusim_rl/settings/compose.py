"""Conversion of command lines and Python calls to one plain dict, through Hydra."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from gpusim_rl.errors import ConfigError, available, first_line, friendly_errors, on_one_line, say
from gpusim_rl.files import paths
from gpusim_rl.files.paths import Checkpoint
from gpusim_rl.machine.hardware import has_cuda
from gpusim_rl.settings.checks import check_settings, plain
from gpusim_rl.settings.discover import (
    FULL,
    cfg_dirs,
    check_config_dir,
    import_from_current_folder,
    plugin_cfg_dirs,
    read_yaml,
    recipes,
    tuned_sections,
)
from gpusim_rl.settings.hydra_errors import (
    HYDRA_ERRORS,
    check_flags,
    explain,
    refuse_misplaced,
    refuse_other_algorithm,
    refuse_other_task,
    refuse_unreadable,
    section_of,
    task_of,
)
from gpusim_rl.settings.load_class import load_class
from gpusim_rl.settings.overrides import Override, is_open, is_override, key_of, last_value, quote, value_of
from gpusim_rl.settings.saved_run import NO_YAML, SavedRun, continue_run
from gpusim_rl.settings.schema import ALGORITHMS, algorithm_of

VERSION_BASE = "1.3"
SAVED = "the settings of a saved run"  # name of a saved run's in-memory config; there is no such file


class RunResult(NamedTuple):
    """Run folder and returns of a run."""

    run: str
    last_return: float | None
    best_return: float | None


def hydra_main(run: Callable[[dict[str, Any], list[str], Checkpoint | None], RunResult]) -> Callable[..., None]:
    """Make `run(config, overrides, checkpoint)` a command with Hydra's flags, sweeps, and one-line errors."""
    saved: SavedRun | None = None
    outcomes: list[tuple[list[str], RunResult]] = []  # results, each with its overrides
    console = "auto"

    def job(cfg: Any) -> None:
        nonlocal console
        with friendly_errors():  # inside the job, or Hydra would report a failed job first
            settings = plain(cfg)  # first: reading the overrides also resolves values, but its errors lack keys
            typed = list(HydraConfig.get().overrides.task)
            config = _finished(settings, typed, saved)
            overrides = [text.removeprefix("++") if is_open(key_of(text)) else text for text in typed]
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
            # Flags go first: argparse rejects `task=Ant -m seed=1,2`.
            arguments, saved = continue_run(typed, check_flags(sorted(typed, key=is_override)).config_dir)
            arguments = _may_add(sorted(arguments, key=is_override))
            flags = check_flags(arguments)
            refuse_unreadable(flags.overrides, typed)
            if flags.shell_completion and (runs := _complete_checkpoint(os.environ.get("COMP_LINE", ""))) is not None:
                sys.stdout.write("".join(f"{run}\n" for run in runs))
                return
            _prepare_hydra(flags.config_dir)
            if flags.help:
                say(*_help().rstrip("\n").split("\n"))
                return
            if flags.multirun:
                check_sweep(flags.overrides, flags.config_dir, saved)
            if saved is None and not flags.shell_completion:
                arguments = choose_recipe(arguments, flags.config_dir)
            try:
                _run_jobs(job, arguments, _primary(saved, flags.overrides), sweep=flags.multirun)
            except Exception as error:  # Hydra's: a job's errors became SystemExit
                raise explain(error, arguments, saved, TaskFolders.user) from None
            finally:
                if flags.multirun and outcomes:  # report completed runs even after a failed one
                    sys.stdout.write(sweep_summary(outcomes, console))

    return main


def _run_jobs(job: Callable[[Any], None], arguments: Sequence[str], primary: str, *, sweep: bool) -> None:
    program, get_mode = sys.argv, Hydra.get_mode
    with tempfile.TemporaryDirectory(prefix="gpusim-rl-sweep-") if sweep else nullcontext() as folder:
        more = [] if folder is None else [f"hydra.sweep.dir={quote(folder)}"]
        sys.argv = [program[0], *arguments, *more]  # Hydra reads only this
        if TaskFolders.user is None and not plugin_cfg_dirs() and not any("hydra" in text for text in arguments):
            Hydra.get_mode = lambda *_, **__: None  # it composes all settings for hydra.mode, which our yamls leave out
        try:
            hydra.main(str(paths.cfg_dir()), primary, VERSION_BASE)(job)()
        finally:
            sys.argv, Hydra.get_mode = program, get_mode


def _help() -> str:
    """Return the text of `--help`; Hydra's own implementation composes all settings once per group."""
    groups: dict[str, set[str]] = {}
    for _, folder in cfg_dirs(TaskFolders.user):
        for file in [*folder.glob("*/*.yaml"), *folder.glob("recipe/*/*.yaml")]:
            groups.setdefault(file.relative_to(folder).parts[0], set()).add(file.stem)
    del groups["learn"]  # only included by algorithms
    fill = partial(textwrap.fill, width=shutil.get_terminal_size().columns, subsequent_indent=" " * 24)
    lines = (fill(f"  {group:<22}{', '.join(sorted(names))}") for group, names in sorted(groups.items()))
    text = read_yaml(paths.cfg_dir() / "config.yaml")["hydra"]["help"]["template"]
    return text.replace("$APP_CONFIG_GROUPS", "\n".join(lines))


def sweep_summary(outcomes: Sequence[tuple[Sequence[str], RunResult]], console: str) -> str:
    """Return a sweep's results as a table with the overrides that differ, or as JSON; empty if `console` is quiet."""
    if console == "quiet":
        return ""
    if console == "json":
        runs = [{"overrides": list(overrides), **outcome._asdict()} for overrides, outcome in outcomes]
        return json.dumps({"event": "sweep", "runs": runs}) + "\n"
    shared = set(outcomes[0][0]).intersection(*(overrides for overrides, _ in outcomes)) if len(outcomes) > 1 else set()
    table: list[tuple[str, ...]] = [("overrides", "last return", "best return", "run")]
    for overrides, (folder, *returns) in outcomes:
        numbers = ("–" if value is None else f"{value:.4g}" for value in returns)
        table.append((" ".join(text for text in overrides if text not in shared), *numbers, folder))
    width = max(len(name) for name, *_ in table)
    lines = (f"{name:<{width}}  {last:>11}  {best:>11}  {run}" for name, last, best, run in table)
    return "".join(["\n", *(f"{on_one_line(line)}\n" for line in lines)])


def compose(
    overrides: Sequence[str] = (), config_dir: str | Path | None = None, saved: SavedRun | None = None
) -> dict[str, Any]:
    """Compose plain settings like the command line, from the user's folder (`-cd`) and ours, or from a saved run."""
    _prepare_hydra(config_dir)
    GlobalHydra.instance().clear()
    arguments = _may_add(overrides)
    refuse_unreadable([text for text in arguments if not isinstance(text, Override)])
    arguments = choose_recipe(arguments, config_dir) if saved is None else arguments
    words = [text for text in arguments if not isinstance(text, Override)]
    try:
        with hydra.initialize_config_dir(version_base=VERSION_BASE, config_dir=str(paths.cfg_dir())):
            node = hydra.compose(_primary(saved, arguments), overrides=words)
            _assign(node, [text for text in arguments if isinstance(text, Override)])
            config = plain(node)
    except HYDRA_ERRORS as error:
        raise explain(error, arguments, saved, TaskFolders.user) from None
    return _finished(config, arguments, saved)


def _assign(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Assign values from Python to a composed config, with the errors that Hydra raises for typed overrides."""
    for override in overrides:
        key = override.partition("=")[0].removeprefix("++")
        try:
            new = override.startswith("++") or is_open(key)
            OmegaConf.update(config, key, override.value, merge=True, force_add=new)
        except (ConfigAttributeError, ConfigKeyError) as error:
            raise ConfigCompositionException(f"Could not override '{key}'.") from error
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            raise ConfigError(first_line(error), key=key) from None


def choose_recipe(arguments: Sequence[str], config_dir: str | Path | None = None) -> list[str]:
    """Replace `recipe=auto`, typed or implied, with the recipe for the physics device, or raise ConfigError."""
    typed = {key_of(text): value_of(text) for text in arguments if is_override(text)}
    tasks = [] if NO_YAML in arguments else task_of(arguments).split(",")
    known = {task: [FULL, "quick"] if "(" in task else recipes(task, config_dir) for task in tasks}  # glob(*): any task
    names = typed.get("recipe", "auto").split(",")
    for task, name in itertools.product(known or {"without a yaml": [FULL]}, names):
        options = known.get(task, [FULL])
        if name not in ("auto", *options):
            raise ConfigError(f"task {task} has no recipe {name!r}", hint=available(name, options))
        _store_recipe(name)
    if "auto" not in names or ("recipe" not in typed and all(options == [FULL] for options in known.values())):
        return list(arguments)
    device = typed.get("sim_device", "null")
    device = typed.get("device", "auto") if device == "null" else device
    if "," in device:
        raise ConfigError("recipe=auto requires one device", got=device, hint="Try recipe=full or recipe=quick")
    on_cuda = device.startswith("cuda") or (device == "auto" and has_cuda())
    chosen = FULL if on_cuda or not any("quick" in options for options in known.values()) else "quick"
    words = ",".join(dict.fromkeys(chosen if name == "auto" else name for name in names))
    return [*(text for text in arguments if key_of(text) != "recipe"), f"recipe={words}"]


def _finished(config: dict[str, Any], arguments: Sequence[str], saved: SavedRun | None) -> dict[str, Any]:
    """Check a composed config; the algorithm's `max_iterations` overrides the task's, which assumes PPO's horizon."""
    refuse_misplaced(config, arguments, TaskFolders.user)
    name = section_of(config, "algo").get("name")
    if saved is None and isinstance(name, str):
        _take_tuned(config, name, arguments)
    length = section_of(config, name).get("max_iterations") if isinstance(name, str) else None
    typed = {key_of(text) for text in arguments}
    if length is not None and "max_iterations" not in typed and (saved is None or f"{name}.max_iterations" in typed):
        config["max_iterations"] = length
    if saved is None and config.get("recipe") not in recipes(task_of(arguments), TaskFolders.user):
        config["recipe"] = FULL  # another task of the sweep has the recipe
    return config


def _store_recipe(name: str) -> None:
    """Register a name in the `recipe` group, since Hydra requires a yaml for each name."""
    if not (paths.cfg_dir() / "recipe" / f"{name}.yaml").is_file():
        ConfigStore.instance().store(group="recipe", name=name, node={"recipe": name}, package="_global_")


def _take_tuned(config: dict[str, Any], name: str, arguments: Sequence[str]) -> None:
    """Copy a task's tuned values for a built-in algorithm to the section `name` of a user's algorithm extending it."""
    target = section_of(config, "algo").get("_target_")
    if any(target == ours for ours, _ in ALGORITHMS.values()):
        return
    base = None
    with suppress(ConfigError):  # raised again where the class is needed
        base = algorithm_of(load_class(target, object, "algo._target_", "gpusim_rl.learn.ppo.PPO"))
    if base in (None, name) or not all(isinstance(config.get(section), dict) for section in (base, name)):
        return
    own = tuned_sections(task_of(arguments), TaskFolders.user, config["recipe"]).get(name)
    typed = tuple(f"{key_of(text)}." for text in arguments)

    def copy(tuned: dict[str, Any], section: dict[str, Any], own: Any, path: str) -> None:
        own = own if isinstance(own, dict) else {}
        for key, value in tuned.items():
            if isinstance(value, dict) and isinstance(section.get(key), dict):
                copy(value, section[key], own.get(key), f"{path}{key}.")
            elif key in section and key not in own and not any(f"{path}{key}.".startswith(word) for word in typed):
                section[key] = value

    copy(config[base], config[name], own, f"{name}.")


def _primary(saved: SavedRun | None, arguments: Sequence[str]) -> str:
    """Return the primary config's name: ours, or a saved run's, stored without overridden groups like `sim=mjwarp`."""
    if saved is None:
        return "config"
    primary = read_yaml(paths.cfg_dir() / "config.yaml")
    typed = {key_of(text) for text in arguments}
    defaults: list[Any] = ["_self_"]
    for entry in primary["defaults"]:
        [key] = entry if isinstance(entry, dict) else [entry]
        if key == "recipe" and "task" in typed:  # the task's yaml includes the run's recipe
            known, name = recipes(task_of(arguments), TaskFolders.user), saved.settings.get("recipe")
            entry = {"recipe": name if name in known else FULL}  # Hydra would read any path
            _store_recipe(entry["recipe"])
        elif not key.startswith("override ") and key not in typed:
            continue
        defaults.append(entry)
    node = {"defaults": defaults, "hydra": primary["hydra"], **saved.settings}
    ConfigStore.instance().store(name=SAVED, node=node)
    return SAVED


def check_sweep(overrides: Sequence[str], config_dir: str | None = None, saved: SavedRun | None = None) -> None:
    """Check every run of `-m` before the first starts."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        [jobs] = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise explain(error, overrides, saved, TaskFolders.user) from None
    trainings = 0
    for job in jobs:
        config = compose(job, config_dir, saved)
        check_settings(config)
        trainings += not config["test"]
    if saved is not None and saved.checkpoint.continues and trainings > 1:
        best = shlex.quote(f"checkpoint={saved.checkpoint.file.with_name('best.pt')}")
        key, hint = f"-m with checkpoint={saved.checkpoint.run_dir}", f"Try {best}, so that each run has its own folder"
        raise ConfigError(f"{trainings} runs would train in the same folder", key=key, hint=hint)


def resolve_checkpoint(config: Mapping[str, Any]) -> Checkpoint | None:
    """Find the checkpoint that the `checkpoint` setting names; return None without one."""
    name = config.get("checkpoint")
    return None if name is None else paths.find_checkpoint(name, config["log"]["dir"])


class TaskFolders(SearchPathPlugin):
    """Hydra's search path: the user's folder, ours, and those of installed packages."""

    user: Path | None = None  # from `-cd`; Hydra itself would put it last

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Prepend the user's folder and append those of packages."""
        if self.user is not None:
            search_path.prepend(provider="user", path=f"file://{self.user}")
        for source, folder in plugin_cfg_dirs():
            search_path.append(provider=source, path=f"file://{folder}")


def _prepare_hydra(config_dir: str | Path | None = None) -> None:
    TaskFolders.user = None if config_dir is None else check_config_dir(config_dir).resolve()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors, for `explain`
    # Hydra 1.3 requires version_base; Hydra 1.4 deprecates it.
    warnings.filterwarnings("ignore", message="The version_base parameter is deprecated")
    Plugins.instance().register(TaskFolders)
    import_from_current_folder()


def _may_add(arguments: Sequence[str]) -> list[str]:
    """Prefix overrides of open sections with `++`, as Hydra requires for new keys."""
    new = {text for text in arguments if is_open(key_of(text)) and text[0] != "~" and not isinstance(text, Override)}
    return [f"++{text.lstrip('+')}" if text in new else text for text in arguments]


def _complete_checkpoint(line: str) -> list[str] | None:
    """Complete `checkpoint=<run>`; return None for other keys."""
    *words, last = line.split(" ")
    if key_of(last) != "checkpoint" or "=" not in last:
        return None
    return [f"checkpoint={run}" for run in paths.complete_run(value_of(last), last_value(words, "log.dir") or "runs")]
