"""A misfit between settings and their dataclass is one line."""

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
from helpers.raised import message


@pytest.fixture(scope="module")
def composed() -> dict:
    return composing.compose()


def run_of(*overrides: str) -> schema.RunConfig:
    """The settings of a run that `train.py` was asked for."""
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


def test_builder_converts_without_loss():
    built = checks.build(Sample, GOOD, "task")
    assert (built.rate, built.pair, built.gains, built.even) == (1.0, (1.0, 2.5), {"x": 1.0}, 2)
    assert isinstance(built.rate, float) and built.inner == Inner(gain=2.0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"count": 0}, "task.count: expected a positive int, got 0"),
        ({"count": True}, "task.count: expected a positive int, got True"),
        ({"count": 3.0}, "task.count: expected a positive int, got 3.0. Try task.count=3"),
        ({"rate": "fast"}, "task.rate: expected a number, got 'fast'"),
        ({"rate": float("nan")}, "task.rate: expected a number, got nan"),
        ({"rate": 1e308}, "task.rate: expected a number, got 1e+308. Try at most 1e+18"),
        ({"rate": -(10**400)}, "task.rate: expected a number, got -1000"),
        ({"count": 2**31}, "task.count: expected a positive int, got 2147483648. Try at most 2147483647"),
        ({"flag": 1}, "task.flag: expected true or false, got 1"),
        ({"name": 3}, "task.name: expected a string or null, got 3"),
        ({"mode": "fst"}, "task.mode: expected one of slow, fast, got 'fst'. Did you mean 'fast'?"),
        ({"either": 1}, "task.either: expected auto or true or false, got 1"),
        ({"sizes": 3}, "task.sizes: expected a list of (an int), got 3. Try task.sizes=[3]"),
        ({"pair": [1]}, "task.pair: expected a list of 2 (a number, a number), got [1]"),
        ({"gains": {"x": "y"}}, "task.gains: expected a section of (a number), got {'x': 'y'}"),
        ({"inner": {"gian": 1}}, "unknown key 'task.inner.gian'. Did you mean 'task.inner.gain'?"),
        ({"inner": {}}, "missing key 'task.inner.gain'"),
        ({"inner": 3}, "task.inner: expected a section with keys of its own, got 3"),
        ({"even": 3}, "task.even: expected an even int, got 3"),
        ({"cuont": 3}, "unknown key 'task.cuont'. Did you mean 'task.count'?"),
    ],
)
def test_builder_names_key_rule_and_value(change, expected):
    with pytest.raises(ConfigError) as info:
        checks.build(Sample, {**GOOD, **change}, "task")
    assert message(info).startswith(expected)


@given(st.one_of(st.integers(), st.floats(allow_nan=True), st.booleans(), st.text(), st.none()))
def test_builder_accepts_a_value_exactly_when_it_has_the_type(value):
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
        ("task.control_hz=1e-30", "at most 10000 times task.control_hz=1e-30, got 120.0"),
        (f"device=cuda:{10**22}", "device: expected auto, cpu, cuda or cuda:<index>, got 'cuda:1000"),
        ("task.physics_hz=6e11", "Try control_hz=6e+07"),
        (f"task.episode_length={10**23}", "task.episode_length: expected a positive int, got 1000"),
        ("ppo.network.log_std_min=-1e308", "ppo.network.log_std_min: expected a number, got -1e+308"),
    ],
)
def test_an_extreme_value_is_refused(override, words):
    with pytest.raises(ConfigError) as info:
        run_of(override)
    assert words in message(info)


def test_a_device_whose_number_is_huge_is_refused():
    run = dataclasses.replace(run_of(), device=f"cuda:{10**8}")
    with pytest.raises(ConfigError, match=r"this machine has .*\. Try device="):
        choose_devices(run)


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ("scene reset apply_action observ rewards terminated", "observe. It has 'observ': did you mean 'observe'?"),
        ("scene reset apply_action observe", "rewards, terminated"),
    ],
)
def test_a_task_without_a_hook_is_one_line(composed, hooks, words):
    from gpusim_rl.env import Task

    half = type("Half", (Task,), {"Config": TaskConfig, **{name: lambda self: None for name in hooks.split()}})
    with pytest.raises(ConfigError) as info:
        checks.build_run(composed, task_class=half)
    assert message(info) == f"task Half does not define {words}"


def test_config_class_must_be_a_dataclass():
    class Hopper:
        Config = 3

    with pytest.raises(ConfigError, match="expected a dataclass"):
        checks.settings_class(Hopper)


def test_names_of_other_libraries_lead_to_settings_that_there_are():
    assert checks.OURS.keys() <= {key.rpartition(".")[2] for key in checks.known_keys()}
    names = [name for group in checks.OURS.values() for name in group.split()]
    assert sorted(names) == sorted(checks.OTHERS) and not checks.OTHERS.keys() & checks.OURS.keys()
