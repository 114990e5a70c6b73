"""Discovery of tasks: yaml files in our, packages' and the user's `task` folders. Imports neither tasks nor torch."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from gpusim_rl.errors import ConfigError, did_you_mean, warn
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import yaml_error

FULL = "full"  # recipe of every task: its yaml alone
OWN_RECIPES = re.compile(r"optional /recipe/([\w-]+)")  # defaults-list entry that includes the recipes of a folder
OUTSIDE = "gpusim_rl.connect."  # package that wraps other libraries' envs
# cached by the state of sys.path, which pip changes: reading all packages' metadata takes 10 ms
_entry_points = lru_cache(maxsize=4)(lambda *state: entry_points(group="gpusim_rl.cfg"))


@dataclass(frozen=True)
class TaskEntry:
    """Task accepted by `task=<name>`."""

    name: str
    description: str  # first line of the class docstring; "" if the source is unreadable
    target: str  # class path
    source: str  # package or folder that contains it
    file: Path  # yaml of the task
    problem: str = ""  # why the yaml is unreadable; other tasks stay available


def import_from_current_folder() -> None:
    """Make tasks in the current folder importable, after Python's own modules."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)


def cfg_dirs(config_dir: str | Path | None = None) -> list[tuple[str, Path]]:
    """Return config folders by source: the user's (`-cd`), ours, and those of installed packages."""
    user = [] if config_dir is None else [(str(config_dir), check_config_dir(config_dir))]
    return [*user, ("gpusim_rl", paths.cfg_dir()), *plugin_cfg_dirs()]


def plugin_cfg_dirs() -> list[tuple[str, Path]]:
    """Return config folders of installed packages (entry points `name = "my_package.cfg"`); warn about broken ones."""
    folders, here = [], Path.cwd()
    states = []
    for path in map(Path, sys.path):
        with suppress(OSError):  # missing, or not readable
            states.append((path, *_state(path)))
    for entry in _entry_points(*states):
        if entry.dist and Path(str(entry.dist.locate_file(""))).resolve() == here:
            continue  # untrusted metadata in the current folder
        folder = package_path(entry.value)
        if folder is None or not folder.is_dir():
            warn(f"skipped the tasks of {entry.name!r}: no folder for {entry.value!r}")
            continue
        folders.append((entry.dist.name if entry.dist else entry.name, folder))
    return folders


def tasks(config_dir: str | Path | None = None, *, outside: bool = False) -> dict[str, TaskEntry]:
    """Return all tasks by name; the user's (`-cd`) take precedence; `outside` adds tasks for other libraries' envs."""
    files: dict[str, tuple[str, Path]] = {}
    for source, folder in cfg_dirs(config_dir):
        for file in sorted((folder / "task").glob("*.yaml")):
            files.setdefault(file.stem, (source, file))
    yamls = {name: file for name, (_, file) in files.items()}
    entries = [_entry(name, source, yamls) for name, (source, _) in sorted(files.items())]
    return {entry.name: entry for entry in entries if outside or not entry.target.startswith(OUTSIDE)}


def check_config_dir(config_dir: str | Path) -> Path:
    """Return the user's folder; raise ConfigError if it is missing or would replace config.yaml."""
    folder = Path(config_dir)
    if not folder.is_dir():
        near = folder.parent if folder.parent.is_dir() else Path()
        names = [path.name for path in near.iterdir() if (path / "task").is_dir()]
        hint = f"{did_you_mean(folder.name, names)} Try a folder that contains task/<Name>.yaml"
        raise ConfigError("no such folder", key=f"-cd {folder}", hint=hint)
    if (folder / "config.yaml").is_file():
        hint = "Rename the file: -cd expects task/<Name>.yaml, and recipe/, algo/, sim/, log/ or debug/"
        raise ConfigError(f"{folder / 'config.yaml'} would replace gpusim_rl's own config.yaml", hint=hint)
    return folder


def _entry(name: str, source: str, yamls: Mapping[str, Path]) -> TaskEntry:
    file = yamls[name]
    try:
        target = str(_target(name, yamls) or "")
    except ConfigError as error:
        return TaskEntry(name, "", "", source, file, str(error))
    description = _description(target).removeprefix(f"{target.rpartition('.')[2]}: ")
    return TaskEntry(name, description, target, source, file)


def _target(name: str, yamls: Mapping[str, Path], trail: tuple[str, ...] = ()) -> Any:
    """Return a task's `_target_`, from its own yaml or a base yaml (`defaults: [Ant]`)."""
    file = yamls[name]
    content = read_yaml(file)
    section = content.get("task") or {}
    if not isinstance(section, dict):
        raise ConfigError(key=f"{file}: task", expected="a section with keys", got=section)
    if "task" in content and not re.match(r"(\s*#.*\n|\s)*#\s*@package\s+_global_", file.read_text(encoding="utf-8")):
        raise ConfigError("the first line must be '# @package _global_', or all keys are misplaced", key=str(file))
    target = section.get("_target_")
    for base in content.get("defaults") or []:
        if not isinstance(base, str) or base == "_self_" or base not in yamls:
            continue  # another group's choice, or an error for Hydra to report
        if base in (*trail, name):
            way = "" if base == name else f", through {', '.join([*trail, name])}"
            problem = f"{yamls[base]} includes itself (defaults: [{base}]{way})"
            raise ConfigError(problem, hint=f"Try another file name, e.g. My{base}.yaml")
        inherited = _target(base, yamls, (*trail, name))
        target = target or inherited
    return target


def tuned_sections(task: str, config_dir: str | Path | None = None, recipe: str = FULL) -> dict[str, Any]:
    """Return the sections other than `task` in a task's yamls and recipe, with unresolved interpolations."""
    sections: dict[str, Any] = {}
    for content, own in _task_yamls(task, config_dir):
        for layer in [*(read_yaml(file) for file in own if file.stem == recipe), content]:
            for name, section in layer.items():
                if isinstance(section, dict) and name != "task":
                    sections[name] = {**section, **sections.get(name, {})}
    return sections


def recipes(task: str, config_dir: str | Path | None = None) -> list[str]:
    """Return the names of a task's recipes: `full`, and those in folders that its yamls include."""
    names = {file.stem for _, own in _task_yamls(task, config_dir) for file in own}
    return [FULL, *sorted(names - {FULL})]


def _task_yamls(task: str, config_dir: str | Path | None) -> Iterator[tuple[dict[str, Any], list[Path]]]:
    """Yield the content and recipe files of a task's yaml and of its bases' yamls."""
    folders = [folder for _, folder in cfg_dirs(config_dir)]
    names, seen = [task], set()
    while names:
        name = names.pop()
        files = [folder / "task" / f"{name}.yaml" for folder in folders if re.fullmatch(r"[\w.-]{1,200}", name)]
        file = next(filter(Path.is_file, files), None)
        if file is None or name in seen:
            continue
        seen.add(name)
        content = read_yaml(file)
        defaults = content.get("defaults")
        entries = defaults if isinstance(defaults, list) else []
        names += [entry for entry in entries if isinstance(entry, str)]
        keys = [str(key) for entry in entries if isinstance(entry, dict) for key in entry]
        own = [match[1] for key in keys if (match := OWN_RECIPES.fullmatch(key))]
        places = [folder / "recipe" / name for name in own for folder in folders]
        yield content, [file for place in places for file in place.glob("*.yaml")]


def default_choice(group: str) -> str:
    """Return the name of a group's default yaml."""
    return next(entry[group] for entry in read_yaml(paths.cfg_dir() / "config.yaml")["defaults"] if group in entry)


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a yaml mapping; errors name file and line."""
    import yaml

    try:
        node = _parsed(file, *_state(file))
    except yaml.YAMLError as error:
        raise yaml_error(error) from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    if not isinstance(node, dict):
        raise ConfigError(f"expected keys with values, got {type(node).__name__}", key=str(file))
    return {str(key): deepcopy(value) for key, value in node.items()}


def _state(file: Path) -> tuple[int, int, int]:
    state = file.stat()
    return state.st_mtime_ns, state.st_ino, state.st_size


@lru_cache(maxsize=256)
def _parsed(file: Path, *state: int) -> Any:
    """Parse a yaml file once per file state: uncached, listing all tasks takes 0.2 s."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(file), resolve=False)


def package_path(dotted: str) -> Path | None:
    """Return the folder or .py file of a dotted name, without importing it."""
    top, *rest = dotted.split(".")
    spec = None
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(top)
    if not rest:
        return Path(spec.origin) if spec is not None and spec.origin else None
    places = [Path(place, *rest) for place in (spec and spec.submodule_search_locations) or []]
    files = (path if path.is_dir() else path.with_suffix(".py") for path in places)
    return next(filter(Path.exists, files), None)


def _description(target: str) -> str:
    module, _, class_name = target.rpartition(".")
    package, _, name = module.rpartition(".")
    file = paths.tasks_dir() / f"{name}.py" if package == "gpusim_rl.tasks" else package_path(module)
    return _first_lines(file, *_state(file)).get(class_name, "") if file is not None and file.is_file() else ""


@lru_cache(maxsize=256)
def _first_lines(file: Path, *state: int) -> dict[str, str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError:
        return {}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: (ast.get_docstring(node) or "").partition("\n")[0] for node in reversed(classes)}
