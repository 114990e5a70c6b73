"""Trust in run folders: settings that travel with them, and code that they may name."""

from __future__ import annotations

import dataclasses
import typing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from gpusim_rl.env.task import load_task_or_environment
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings import discover, schema, trust
from gpusim_rl.settings.compose import compose
from gpusim_rl.settings.trust import check_saved_settings, machine_overrides

FILE = Path("run/config.yaml")
MODULE = __name__  # already imported, which must not count as trusted


def changed(key: str, value: Any) -> dict[str, Any]:
    settings = compose(["task=Gymnasium"])
    *sections, leaf = key.split(".")
    node = settings
    for section in sections:
        node = node[section]
    node[leaf] = value
    return settings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("task._target_", f"{MODULE}.changed"),
        ("task._target_", "torch.nn.Linear"),
        ("task._target_", "gpusim_rl.learn.ppo.PPO"),  # part of the package, but no task
        ("task._target_", "gpusim_rl.tasks.ant.math"),
        ("algo._target_", f"{MODULE}.Own"),
        ("algo._target_", "gpusim_rl.tasks.cartpole.Cartpole"),
        ("ppo.network.encoder._target_", "torch.nn.Linear"),
        ("ppo.network._target_", "gpusim_rl.learn.networks.MLP"),  # no yaml names it
        ("env._target_", "gpusim_rl.tasks.cartpole.Cartpole"),
        ("env._target_", "gymnasium.make_vec"),
        ("env.kwargs", {"config": {"_target_": "builtins.dict"}}),
        ("env.kwargs", [({"_target_": "builtins.dict"},)]),
        ("task._target_", {"a": "gpusim_rl.tasks.cartpole.Cartpole"}),
        ("task._target_", "\ud800"),
    ],
)
def test_unexpected_code_paths_need_trust(key: str, value: Any) -> None:
    settings = changed(key, value)
    with pytest.raises(ConfigError, match=r"would run code .*try trust=true"):
        check_saved_settings(settings, FILE)
    assert check_saved_settings(settings, FILE, trust=True)


@pytest.mark.parametrize(
    "kwargs", [{"env_id": "evil:Evil-v0"}, {"xml_file": "/etc/passwd"}, {"xml_file": "~/x.xml"}, {"a": {"b": ["../x"]}}]
)
def test_env_arguments_outside_folder_need_trust(kwargs: dict[str, Any]) -> None:
    settings = changed("env.kwargs", kwargs)
    with pytest.raises(ConfigError, match=r"env\.kwargs\..*try trust=true"):
        check_saved_settings(settings, FILE)
    assert check_saved_settings(settings, FILE, trust=True)["env"]["kwargs"] == kwargs
    assert check_saved_settings(changed("env.kwargs", {"mode": "rgb", "x": 0.5, "on": True}), FILE)


def test_env_id_with_module_needs_trust_or_override() -> None:
    settings = changed("env.id", "my_env:Line-v0")
    with pytest.raises(ConfigError, match=r"env\.id=my_env:Line-v0 would run code .*try trust=true"):
        check_saved_settings(settings, FILE)
    assert check_saved_settings(settings, FILE, named=[("", "my_env:Line-v0")])["env"]["id"] == "my_env:Line-v0"
    assert check_saved_settings(changed("env.id", "ALE/Pong-v5"), FILE)["env"]["id"] == "ALE/Pong-v5"


def test_code_named_by_installed_yamls_is_trusted(tmp_path: Path, monkeypatch) -> None:
    for name in ("Ant", "Go1Velocity", "Gymnasium"):
        assert check_saved_settings(compose([f"task={name}"]), FILE)
    for name in schema.ALGORITHMS:
        assert check_saved_settings(compose([f"algo={name}"]), FILE)
    (tmp_path / "task").mkdir()
    yaml = "# @package _global_\ntask: {_target_: plugged.Juggler}\nenv: {_target_: plugged.make}\n"
    (tmp_path / "task" / "Juggler.yaml").write_text(yaml)
    task, env = changed("task._target_", "plugged.Juggler"), changed("env._target_", "plugged.make")
    for settings in (task, env):
        with pytest.raises(ConfigError, match="would run code"):
            check_saved_settings(settings, FILE)
        assert check_saved_settings(settings, FILE, config_dir=tmp_path)
    monkeypatch.setattr(discover, "plugin_cfg_dirs", lambda: [("plugged", tmp_path)])
    assert check_saved_settings(task, FILE)
    for settings in (env, changed("algo._target_", "plugged.Juggler"), changed("task._target_", "plugged.Other")):
        with pytest.raises(ConfigError, match="would run code"):  # functions would get the folder's arguments
            check_saved_settings(settings, FILE)


def test_code_named_by_command_is_trusted_only_in_its_place() -> None:
    settings = changed("algo._target_", f"{MODULE}.Own")
    assert check_saved_settings(settings, FILE, named=[("algo", f"{MODULE}.Own")])
    with pytest.raises(ConfigError, match="would run code"):
        check_saved_settings(settings, FILE, named=[("task", f"{MODULE}.Own")])


def test_extension_needs_trust_and_arguments_stay_in_folder() -> None:
    target = f"{MODULE}.Own"
    settings = changed("ppo.extensions", {"own": {"_target_": target, "weight": 1.0, "file": "shown.npz"}})
    with pytest.raises(ConfigError, match=r"ppo\.extensions\.own\._target_=.* would run code"):
        check_saved_settings(settings, FILE, named=[("algo", target), ("network", target)])
    assert check_saved_settings(settings, FILE, named=[("extension", target)])
    settings["ppo"]["extensions"]["own"]["file"] = "../shown.npz"
    with pytest.raises(ConfigError, match=r"ppo\.extensions\.own\.file="):
        check_saved_settings(settings, FILE, named=[("extension", target)])


# Which settings travel

TRAVELS = (
    "task._target_",  # code: imported if trusted, settings/trust.py
    "algo._target_",  # likewise
    "*.network._target_",  # likewise
    "*.network.encoder._target_",  # likewise
    "env._target_",  # likewise
    "env.id",  # id of envs registered by an installed package
    "env.kwargs",  # their arguments: settings/trust.py
    "env.cfg",  # likewise, config fields
    "env.physics",  # name of a physics preset
    "task.robot",  # a model file read by MuJoCo: docs/security.md
    "pretrained.init_from",  # weights, read like a checkpoint
    "task.clips",  # names and paths of motion clips, read as data
    "task.must_not_touch",  # body names
    "task.*.columns",  # terrain names
    "task.*weights",  # names of reward terms
    "task.command.stages",  # axis names
    "task.randomization_params",  # part names and numbers
    "task.observations",  # likewise
    "task.drives",  # numbers by joint name, or the path of a file of them, read as data
    "*.rnd.group",  # name of an observation group
    "*.extensions",  # arguments of classes: settings/trust.py
    *("wandb_project", "wandb_entity", "wandb_group", "wandb_name", "wandb_tags"),  # need wandb_activate=true
)
"""Settings that may hold any text but still travel with a run folder."""


def texts(config: type, path: str = "") -> list[str]:
    """Return the keys of settings that may hold any text."""
    keys, hints = [], typing.get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        key, hint = f"{path}{field.name}", hints[field.name]
        options = typing.get_args(hint) if typing.get_origin(hint) not in (dict, list, typing.Annotated) else ()
        for kind in options or (hint,):
            if dataclasses.is_dataclass(kind):
                keys += texts(typing.cast(type, kind), f"{key}.")
            elif may_hold_text(kind):
                keys.append(key)
    return keys


def may_hold_text(kind: Any) -> bool:
    """Return whether a type may hold a path or an address; `Literal` and types with a rule may not."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return may_hold_text(kind.__origin__) and kind.__origin__ is not str
    return kind is str or (origin in (list, dict, tuple) and any(map(may_hold_text, typing.get_args(kind))))


def test_every_text_setting_is_classified_as_travelling_or_per_call() -> None:
    """Every new text setting belongs in `TRAVELS` or in a table of the schema."""
    found = set(texts(schema.RunConfig)) | {"task._target_", "algo._target_"}
    for name, (_, config) in schema.ALGORITHMS.items():
        found |= set(texts(config, f"{name}."))
    for entry in discover.tasks().values():
        found |= set(texts(load_task_or_environment(entry.target).Config, "task."))
    travel = {key for key in found if any(fnmatchcase(key, one) for one in TRAVELS)}
    per_call = {key for key in found if trust.is_per_call(key)}
    assert found - travel - per_call == {"algo"}, "add it to TRAVELS, or to MACHINE_SETTINGS of settings/schema.py"
    assert not travel & per_call
    assert {"log.dir", "checkpoint", "actors.address", "sac.demonstrations.file", "td3.demonstrations.file"} <= per_call


def test_per_call_settings_do_not_travel() -> None:
    typed = ["algo=sac", "actors=ray", "actors.address=ray://evil:10001", "actors.threads=2", "num_actors=3"]
    typed += ["sac.demonstrations.file=/home/x/shown.pt", "wandb_activate=true", "log.dir=elsewhere"]
    settings = compose(["task=Cartpole", *typed, "test=true", "checkpoint=x", "trust=true", "log.console=json"])
    default = compose(["task=Cartpole", "algo=sac"])
    assert check_saved_settings(settings, FILE) == default
    quoted = [word.replace("ray://evil:10001", "'ray://evil:10001'") for word in typed[1:]]
    assert sorted(machine_overrides(settings)) == sorted(quoted)
    assert machine_overrides(default) == []
    settings |= {"actors": "process", "log": 5, "num_actors": [1]}  # untrusted values
    assert machine_overrides(check_saved_settings(settings, FILE)) == []
    assert "actors=process" in machine_overrides(settings)


class Own:
    """Class that is no algorithm; only its path matters."""
