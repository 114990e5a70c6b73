"""One-line errors for settings that do not match their dataclass."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim_rl.api import load_spec
from gpusim_rl.env import TaskConfig
from gpusim_rl.errors import ConfigError
from gpusim_rl.run.devices import choose_devices
from gpusim_rl.settings import checks, schema
from gpusim_rl.settings import compose as composing
from helpers.raised import message, raises


@pytest.fixture(scope="module")
def composed() -> dict:
    return composing.compose()


def run_of(*overrides: str) -> schema.RunConfig:
    """Return the settings that `train.py` builds from overrides."""
    return load_spec(composing.compose(overrides), overrides).cfg


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    count: schema.Count
    rate: float
    flag: bool
    name: str | None
    mode: Literal["slow", "fast"]
    either: Literal["auto"] | bool
    sizes: list[int]
    pair: tuple[float, float]
    gains: dict[str, float]
    inner: Inner
    even: Annotated[int, schema.Rule("an even int", lambda value: value % 2 == 0)] = 2


GOOD = {"count": 3, "rate": 1, "flag": True, "name": None, "mode": "slow", "either": "auto"}
GOOD |= {"sizes": [1, 2], "pair": [1, 2.5], "gains": {"x": 1}, "inner": {"gain": 2}}


def test_build_converts_without_loss():
    built = checks.build(Sample, GOOD, "task")
    assert (built.rate, built.pair, built.gains, built.even) == (1.0, (1.0, 2.5), {"x": 1.0}, 2)
    assert isinstance(built.rate, float) and built.inner == Inner(gain=2.0)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"count": 0}, {"key": "task.count", "got": 0}),
        ({"count": True}, {"key": "task.count", "got": True}),
        ({"count": 3.0}, {"key": "task.count", "hint": "Try task.count=3"}),
        ({"rate": "fast"}, {"key": "task.rate", "expected": "a number", "got": "fast"}),
        ({"rate": float("nan")}, {"key": "task.rate", "expected": "a number"}),
        ({"rate": 1e308}, {"key": "task.rate", "hint": "Try at most 1e+18"}),
        ({"rate": -(10**400)}, {"key": "task.rate", "expected": "a number"}),
        ({"count": 2**31}, {"key": "task.count", "hint": "Try at most 2147483647"}),
        ({"flag": 1}, {"key": "task.flag", "got": 1}),
        ({"name": 3}, {"key": "task.name", "got": 3}),
        ({"mode": "fst"}, {"key": "task.mode", "hint": "Did you mean 'fast'?"}),
        ({"either": 1}, {"key": "task.either", "got": 1}),
        ({"sizes": 3}, {"key": "task.sizes", "hint": "Try task.sizes=[3]"}),
        ({"pair": [1]}, {"key": "task.pair", "got": [1]}),
        ({"gains": {"x": "y"}}, {"key": "task.gains", "got": {"x": "y"}}),
        ({"inner": {"gian": 1}}, {"hint": "Did you mean 'task.inner.gain'?"}),
        ({"inner": {}}, {"problem": "missing key 'task.inner.gain', which has no default"}),
        ({"inner": 3}, {"key": "task.inner", "got": 3}),
        ({"even": 3}, {"key": "task.even", "expected": "an even int", "got": 3}),
        ({"cuont": 3}, {"problem": "unknown key 'task.cuont'", "hint": "Did you mean 'task.count'?"}),
    ],
)
def test_build_error_names_key_and_value(change, fields):
    with raises(ConfigError, **fields) as info:
        checks.build(Sample, {**GOOD, **change}, "task")
    assert message(info)


@given(st.one_of(st.integers(), st.floats(allow_nan=True), st.booleans(), st.text(), st.none()))
def test_build_accepts_exactly_values_of_the_type(value):
    def accepted(key: str) -> bool:
        try:
            checks.build(Sample, {**GOOD, key: value})
        except ConfigError:
            return False
        return True

    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    assert accepted("rate") == (number and abs(value) <= 1e18)
    assert accepted("count") == (isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31)
    assert accepted("flag") == isinstance(value, bool)
    assert accepted("name") == (value is None or isinstance(value, str))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.control_hz=1e-30", "task.control_hz=1e-30, got 120.0"),
        (f"device=cuda:{10**22}", "got 'cuda:1000"),
        ("task.physics_hz=6e11", "Try task.control_hz=6e+07"),
        (f"task.episode_length={10**23}", "task.episode_length: "),
        ("ppo.network.log_std_min=-1e308", "got -1e+308"),
        ("ppo.teacher.begin=5", "Try ppo.teacher.end="),
    ],
)
def test_extreme_and_inconsistent_values_are_rejected(override, words):
    with pytest.raises(ConfigError) as info:
        run_of(override)
    assert words in message(info)


def test_huge_device_index_is_rejected():
    run = dataclasses.replace(run_of(), device=f"cuda:{10**8}")
    with pytest.raises(ConfigError, match="Try device="):
        choose_devices(run)


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ("scene reset apply_action observ rewards terminated", "'observe'"),
        ("scene reset apply_action observe", "rewards, terminated"),
    ],
)
def test_task_without_hook_is_reported_in_one_line(composed, hooks, words):
    from gpusim_rl.env import Task

    half = type("Half", (Task,), {"Config": TaskConfig, **{name: lambda self: None for name in hooks.split()}})
    with pytest.raises(ConfigError) as info:
        checks.build_run(composed, task_class=half, algorithm_class=object)
    assert message(info).startswith("task Half ") and words in message(info)


def test_config_class_must_be_a_dataclass():
    class Hopper:
        Config = 3

    with pytest.raises(ConfigError, match="expected a dataclass"):
        checks.settings_class(Hopper)


def test_names_from_other_libraries_map_to_existing_settings():
    assert checks.OURS.keys() <= {key.rpartition(".")[2] for key in checks.known_keys()}
    names = [name for group in checks.OURS.values() for name in group.split()]
    assert sorted(names) == sorted(checks.OTHERS) and not checks.OTHERS.keys() & checks.OURS.keys()
