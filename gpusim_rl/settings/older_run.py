"""Upgrade of an older run's settings: new settings get current defaults, removed settings are dropped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from gpusim_rl.files import paths
from gpusim_rl.settings.discover import read_yaml

MOVED = {
    "gpusim_rl.learn.amp.AMP": "gpusim_rl.learn.ppo.PPO",
    "gpusim_rl.learn.bc.BC": "gpusim_rl.learn.supervised.BC",
    "gpusim_rl.learn.distill.Distill": "gpusim_rl.learn.supervised.Distill",
}
"""Current paths of built-in algorithms by former paths."""


def upgrade_settings(settings: dict[str, Any]) -> None:
    """Add settings that our yamls have gained for the run's algorithm, simulator and envs; rename or drop old ones."""
    defaults = read_yaml(paths.cfg_dir() / "config.yaml")
    if "encoder" in settings:
        settings["pretrained"] = settings.pop("encoder")
    _add_missing(settings, {"pretrained": defaults["pretrained"], "recipe": None})
    for section in settings.values():
        older = section.get("imitation") if isinstance(section, dict) else None
        if isinstance(older, dict) and older.keys() == {"teacher", "weight", "begin", "end"}:  # PPO's, not a user's own
            section["teacher"] = {"run": older.pop("teacher"), **section.pop("imitation")}
    if isinstance(settings.get("env"), dict):
        settings["env"].pop("overlap", None)  # only affected speed
        _add_missing(settings["env"], defaults["env"])
    for group in ("algo", "sim"):
        section = settings.get(group)
        if isinstance(section, dict) and section.get("_target_") in [*MOVED]:  # a list, as the value may be unhashable
            section["_target_"] = MOVED[section["_target_"]]
        name = section.get("name") if isinstance(section, dict) else None
        file = paths.cfg_dir() / group / f"{name}.yaml"
        if isinstance(name, str) and name.isidentifier() and file.is_file():
            defaults = _with_defaults(file)
            _add_missing(settings, defaults if group == "algo" else {group: defaults})


def _with_defaults(file: Path) -> dict[str, Any]:
    """Read a yaml with its defaults list (`/learn/on_policy@ppo`, `auto`, `_self_`); later entries take precedence."""
    own = read_yaml(file)
    found: dict[str, Any] = {}
    for entry in reversed(own.pop("defaults", ["_self_"])):
        name, _, section = entry.partition("@")
        folder = paths.cfg_dir() if name.startswith("/") else file.parent
        part = own if name == "_self_" else _with_defaults(folder / f"{name.lstrip('/')}.yaml")
        _add_missing(found, {section: part} if section else part)
    return found


def _add_missing(settings: dict[str, Any], defaults: dict[str, Any]) -> None:
    for key, default in defaults.items():
        if key not in settings:
            settings[key] = copy.deepcopy(default)
        elif isinstance(default, dict) and isinstance(settings[key], dict):
            _add_missing(settings[key], default)
