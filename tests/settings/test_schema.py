"""Consistency of yaml values and settings dataclasses."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from gpusim_rl.api import load_spec
from gpusim_rl.env import TaskConfig
from gpusim_rl.errors import ConfigError, TaskError, UserError
from gpusim_rl.files import paths
from gpusim_rl.settings import checks, discover, schema
from gpusim_rl.settings import compose as composing
from helpers.raised import raises


@pytest.fixture(scope="module")
def composed() -> dict:
    return composing.compose()


def run_of(*overrides: str) -> schema.RunConfig:
    """Return the settings that `train.py` builds from overrides."""
    return load_spec(composing.compose(overrides), overrides).cfg


def keys_of(cls: type) -> dict:
    hints = typing.get_type_hints(cls)
    return {
        field.name: keys_of(hints[field.name]) if dataclasses.is_dataclass(hints[field.name]) else None
        for field in dataclasses.fields(cls)
    }


def keys_in(node: dict) -> dict:
    return {key: keys_in(value) if isinstance(value, dict) else None for key, value in node.items()}


def test_yaml_keys_equal_dataclass_fields(composed):
    expected = keys_of(schema.RunConfig) | {"task": None, "algo": {"name": None, "_target_": None}}
    expected["env"]["kwargs"] = expected["env"]["cfg"] = {}  # dicts with user keys
    ppo = keys_of(schema.PPOConfig) | {"extensions": {}}
    del expected["algorithm"]  # lives in the section named by algo.name
    assert composed["algo"]["name"] == "ppo"
    assert keys_in(composed) | {"task": None} == expected | {"ppo": ppo}


@pytest.mark.parametrize(
    "choice",
    [
        f"{group}={file.stem}"
        for group in ("algo", "sim", "log", "debug")
        for file in sorted((paths.cfg_dir() / group).glob("*.yaml"))
    ],
)
def test_every_choice_of_every_group_is_valid(choice):
    run = run_of(choice)
    group, _, name = choice.partition("=")
    assert group != "sim" or run.sim.name == name
    assert group != "algo" or run.algo == {"fast_sac": "sac", "apex": "dqn"}.get(name, name)


def test_dataclasses_are_frozen_and_have_no_defaults():
    for cls in (schema.RunConfig, schema.PPOConfig, schema.NetworkConfig, schema.SACConfig, schema.SimConfig):
        assert all(field.default is dataclasses.MISSING for field in dataclasses.fields(cls))
    run = run_of()
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.num_envs = 3  # type: ignore[misc]


def test_optional_task_settings_have_one_default():
    shared = {field.name: field for field in dataclasses.fields(TaskConfig) if field.name in schema.TASK_DEFAULTS}
    reset_from = {"share": 0.0, "capacity": 4096, "chance": 0.05}
    without_yaml = {"randomize": shared["randomize"].default, "reset_from": reset_from}
    assert dataclasses.asdict(shared["reset_from"].default_factory()) == reset_from  # type: ignore[misc]
    assert shared["randomization_params"].default_factory is shared["observations"].default_factory is dict
    found = composing.compose(["~task"])["task"]
    assert found == {**without_yaml, "randomization_params": {}, "observations": {}, "drives": None}


def test_debug_smoke_shrinks_any_task():
    for name in ("AllegroHand", "Ant", "CartpoleCamera", "Go1Velocity"):
        run = run_of(f"task={name}", "debug=smoke")
        assert run.num_envs * run.algorithm.horizon * run.max_iterations <= 1000
        assert run.debug.check_task


def test_known_keys_equal_composed_keys(composed):
    def flat(node: dict, prefix: str = "") -> set[str]:
        found = set()
        for key, value in node.items():
            found |= {prefix + key} | (flat(value, f"{prefix}{key}.") if isinstance(value, dict) else set())
        return found

    settings = {key: value for key, value in composed.items() if key not in ("task", "algo")}  # names, not sections
    settings |= {name: composing.compose([f"algo={name}"])[name] for name in schema.ALGORITHMS}
    assert set(checks.known_keys()) - {"task", "algo"} == flat(settings)


def test_relations_between_fields_are_validated():
    for override, key, got in [
        ("ppo.learning_rate_min=0.1", "ppo.learning_rate_min", 0.1),
        ("ppo.network.log_std_init=9", "ppo.network.log_std_init", 9),
        ("task.physics_hz=100", "task.physics_hz", 100),
    ]:
        with raises(ConfigError, key=key, got=got):
            run_of(override)


@pytest.mark.parametrize(
    ("error", "key"),
    [
        (ConfigError("whole", key="task.a"), "task.a"),
        (UserError(key="b", expected="1", got=2), "task.own.b"),
        (UserError("bad"), "task.own"),
        (TaskError("bad", key="Scene.add('robot')"), "task.own"),
        (ValueError("bad"), "task.own"),
    ],
)
def test_errors_of_user_settings_get_their_section(error, key):
    @dataclasses.dataclass
    class Own:
        def __post_init__(self):
            raise error

    with raises(ConfigError, key=key):
        checks.build(Own, {}, "task.own")


def test_unreadable_folder_on_the_path_has_no_tasks(monkeypatch):
    def state(path):
        raise PermissionError(path)

    monkeypatch.setattr(discover, "_state", state)
    assert discover.plugin_cfg_dirs() == []
