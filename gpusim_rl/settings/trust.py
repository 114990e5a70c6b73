"""Which code a run folder may name: a class is imported only from where the user has put trust before.

Free of torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.safe_open import check_plain
from gpusim_rl.settings.discover import announced_packages, check_config_dir, read_yaml

FORBIDDEN = ("hydra", "defaults")
"""Keys of Hydra's own parts: with them, settings would name code to run."""


def check_saved_settings(
    settings: Any,
    where: Path,
    *,
    trust: bool = False,
    config_dir: str | Path | None = None,
    named: Collection[str] = (),
) -> dict[str, Any]:
    """Returns saved settings; stops where they would have code imported that the user has not asked for.

    Trusted are gpusim_rl itself, packages that announce tasks with an entry point, and what this command names.

    Args:
        settings: Saved settings, plain values.
        where: File of the settings.
        trust: Whether the user said `trust=true`.
        config_dir: Folder of the user (`-cd`): the modules that its files name are trusted.
        named: Class paths that this command names.

    Raises:
        ConfigError: They are none of a run, or a module would be imported, which the error names.
    """
    check_plain(settings, where)
    if not isinstance(settings, dict) or not all(isinstance(settings.get(key), dict) for key in ("task", "algo")):
        raise ConfigError(f"{where}: expected the settings of a run, with the sections task and algo")
    for key in settings:
        if str(key).partition("/")[0] in FORBIDDEN:
            raise ConfigError(f"{where} has the key {key!r}: the settings of a run have none. Try removing it")
    modules = {target.rpartition(".")[0] for target in named} | _modules(config_dir)
    for key, target in [] if trust else strange_classes(settings):
        module = target.rpartition(".")[0]
        if module not in modules and module not in sys.modules:  # what is imported already runs nothing again
            source = f"{module!r}, which is neither of gpusim_rl nor of an installed package of tasks"
            advice = "If you trust its code, try trust=true (tools: --trust), or -cd <folder with its yaml>"
            raise ConfigError(f"{where}: {key}={target} would import {source}. {advice}")
    return settings


def strange_classes(settings: Any) -> list[tuple[str, str]]:
    """Returns keys and values of each `_target_` neither of gpusim_rl nor of a package that announces tasks."""
    packages = {"gpusim_rl", *announced_packages()}
    return [(key, target) for key, target in class_paths(settings) if target.partition(".")[0] not in packages]


def refuse_classes_of_script(settings: Any) -> None:
    """Raises ConfigError where a class is of the script that runs: another process cannot import it."""
    for key, target in strange_classes(settings):
        if target.startswith("__main__."):
            raise ConfigError(f"{key}={target} is of the script itself: try a module of its own")


def class_paths(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields keys and values of all `_target_` in nested settings."""
    if isinstance(node, dict):
        for name, value in node.items():
            path = f"{key}.{name}" if key else str(name)
            if name == "_target_" and value is not None:
                yield path, str(value)
            else:
                yield from class_paths(value, path)
    elif isinstance(node, list):
        for item in node:
            yield from class_paths(item, key)


def _modules(config_dir: str | Path | None) -> set[str]:
    """Returns the modules that the files in a user's folder name."""
    if config_dir is None:
        return set()
    check_config_dir(config_dir)
    files = [file for group in ("task", "algo") for file in Path(config_dir, group).glob("*.yaml")]
    return {target.rpartition(".")[0] for file in files for _, target in class_paths(read_yaml(file))}


def add_trust_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a tool that say which code a run may name."""
    parser.add_argument("--trust", action="store_true", help="import the classes that the run names, whatever they are")
    parser.add_argument("-cd", "--config-dir", help="a folder with more tasks, as for train.py: their code is trusted")
