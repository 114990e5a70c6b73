"""Composition of a command line into one plain dict."""

from __future__ import annotations

import sys
from enum import IntEnum

import numpy as np
import pytest
from hydra._internal.hydra import Hydra

from gpusim_rl.api import prepare
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings import compose as composing
from gpusim_rl.settings.discover import recipes, tasks, tuned_sections
from helpers.raised import message


@pytest.mark.parametrize(
    "lines",
    [
        ["task.randomization_params={frequency: 3, latency: {range: [0, 1]}}"],
        ["task.randomization_params.frequency=3", "task.randomization_params.latency.range=[0,1]"],
        ["+task.randomization_params.frequency=3", "task.randomization_params.latency={range: [0,1]}"],
    ],
)
def test_command_line_extends_randomization_params(lines):
    expected = {"frequency": 3, "latency": {"range": [0, 1]}}
    assert composing.compose(["task=Ant", *lines])["task"]["randomization_params"] == expected


@pytest.mark.parametrize("value", [np.float64(0.1), np.int64(3), [[1, "null"]], {"a": "${seed}"}, "\\${x", "'\n="])
def test_value_from_python_is_used_unparsed_and_recorded(value):
    spec = prepare("Gymnasium", env={"id": "CartPole-v1", "kwargs": {"value": value}})
    assert spec.config["env"]["kwargs"]["value"] == value
    assert spec.config == composing.compose(spec.overrides) and {type(text) for text in spec.overrides} == {str}


def test_subclass_of_a_number_from_python_is_a_number():
    spec = prepare("Cartpole", num_envs=IntEnum("Size", {"SMALL": 4}).SMALL)
    assert type(spec.cfg.num_envs) is int and spec.overrides == ["task=Cartpole", "num_envs=4"]


def test_randomization_params_from_python_replace_those_of_the_config():
    params = {"sim_params": {"gravity": {"range": [0, 0.4], "operation": "additive", "distribution": "gaussian"}}}
    spec = prepare("Ant", task={"randomize": True, "randomization_params": params})
    assert spec.cfg.task.randomize and spec.cfg.task.randomization_params == params
    spec = prepare("Ant", spec.cfg.task, task={"randomization_params": {"sim_params": {"gravity": None}}})
    assert spec.cfg.task.randomize and spec.cfg.task.randomization_params == {"sim_params": {"gravity": None}}


@pytest.mark.parametrize(
    "text",
    ["+=${seed}", "=1", "~", "sim=[-1]", "+algo=[[]]", f"log={'a' * 1000}", f"seed={'1' * 5000}", "seed=" + "[" * 500],
)
def test_unreadable_override_is_named(text):
    with pytest.raises(ConfigError) as info:
        composing.compose([text])
    assert message(info).startswith((f"cannot read {text!r}", f"{text}: expected a name"))


def test_existing_key_with_wrong_syntax_gets_no_suggestion():
    with pytest.raises(ConfigError, match="'ppo'"):
        composing.compose(["ppo={a:1}"])


@pytest.mark.parametrize(
    ("arguments", "iterations"),
    [
        (["task=Hopper"], 245),
        (["task=Hopper", "algo=sac"], 4000),
        (["task=Hopper", "algo=sac", "sac.max_iterations=70"], 70),
        (["task=Hopper", "algo=sac", "sac.max_iterations=null"], 245),
        (["task=Hopper", "algo=sac", "sac.max_iterations=70", "max_iterations=9"], 9),
        (["task=Hopper", "algo=td3", "debug=smoke"], 2),
    ],
)
def test_algorithm_overrides_max_iterations_of_task(arguments, iterations):
    assert composing.compose(arguments)["max_iterations"] == iterations


@pytest.fixture
def folder(tmp_path):
    """Write a user's folder: MyAnymal has a custom recipe, MyGo1 inherits recipes."""
    yamls = {
        "task/MyAnymal": "defaults: [Anymal, _self_, {optional /recipe/MyAnymal: '${recipe}'}]\nnum_envs: 128\n"
        "ppo: {gamma: 0.9}",
        "recipe/MyAnymal/tiny": "num_envs: 8\nppo: {gamma: 0.8, horizon: 4}\nmy_ppo: {clip: 0.1}",
        "task/MyGo1": "defaults: [Go1Velocity]\nnum_envs: 64",
    }
    for name, text in yamls.items():
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\n{text}\n")
    return tmp_path


@pytest.mark.parametrize("name", ["Ant", "G1Tracking", "Go1Velocity", "HumanoidAMP"])
def test_recipe_is_equal_on_every_device(name):
    for recipe in recipes(name):
        cpu, cuda = (composing.compose([f"task={name}", f"recipe={recipe}", f"device={d}"]) for d in ("cpu", "cuda"))
        assert cpu["recipe"] == recipe and cpu.pop("device") != cuda.pop("device")
        assert cpu == cuda


def test_tasks_with_recipes():
    several = {name for name in tasks(outside=True) if "quick" in recipes(name)}
    velocity, tracking = {f"{r}Velocity" for r in ("Go1", "Go2", "G1", "T1")}, {"G1Tracking", "Go1Tracking"}
    franka, planar = {"FrankaReach", "FrankaReachCamera"}, {"HalfCheetah", "Hopper", "Walker2d"}
    sized = {"CartpoleCamera", "CartpoleSwingup"} | franka | planar
    assert several == velocity | tracking | {"HumanoidTracking", "HumanoidAMP"} | sized
    assert all(recipes(name) == ["full", "quick"] for name in several) and recipes("Ant") == ["full", "cpu"]
    for name in sized:  # recipes differ in the number of samples alone
        quick, full = (composing.compose([f"task={name}", f"recipe={recipe}"]) for recipe in ("quick", "full"))
        minibatches = {c["num_envs"] * c["ppo"]["horizon"] / c["ppo"]["minibatch_size"] for c in (quick, full)}
        assert len(minibatches) == 1 and quick["num_envs"] <= 256 < 2048 <= full["num_envs"]
        for c in (quick, full):
            del c["recipe"], c["num_envs"], c["ppo"]["horizon"], c["ppo"]["minibatch_size"]
        assert quick == full


@pytest.mark.parametrize(
    ("arguments", "recipe", "num_envs"),
    [
        (["task=Go1Velocity", "device=cpu"], "quick", 256),
        (["task=Go1Velocity", "device=cuda:1"], "full", 4096),
        (["task=Go1Velocity", "device=cuda", "sim_device=cpu"], "quick", 256),
        (["task=Go1Velocity", "device=cuda", "recipe=quick", "num_envs=8"], "quick", 8),
        (["task=T1Velocity", "device=cpu", "debug=smoke"], "quick", 16),
        (["task=Anymal", "device=cpu", "recipe=auto"], "full", 4096),
        (["task=Ant", "device=cpu"], "full", 4096),
        (["task=Ant", "recipe=cpu"], "cpu", 256),
        (["~task", "device=cpu"], "full", 4096),
    ],
)
def test_recipe_is_set_or_chosen_by_device(arguments, recipe, num_envs):
    config = composing.compose(arguments)
    assert (config["recipe"], config["num_envs"]) == (recipe, num_envs)


def test_device_auto_checks_for_gpu_without_importing_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
    monkeypatch.setattr(composing, "has_cuda", lambda: True)
    assert composing.choose_recipe(["task=Go1Velocity"]) == ["task=Go1Velocity", "recipe=full"]
    monkeypatch.setattr(composing, "has_cuda", lambda: False)
    assert composing.choose_recipe(["task=Go1Velocity"]) == ["task=Go1Velocity", "recipe=quick"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["task=Anymal", "recipe=quick"], ("Anymal", "'quick'", "Available: full")),
        (["task=Go1Velocity", "recipe=quik"], ("Go1Velocity", "'quik'", "Did you mean")),
        (["~task", "recipe=quick"], ("without a yaml", "'quick'")),
        (["task=Go1Velocity", "device=cpu,cuda"], ("cpu,cuda", "recipe=full or recipe=quick")),
    ],
)
def test_invalid_recipe_is_rejected_in_one_line(arguments, named):
    with pytest.raises(ConfigError) as info:
        composing.choose_recipe(arguments)
    assert all(word in message(info) for word in named)


@pytest.mark.parametrize(("arguments", "times"), [([], 1), (["hydra.mode=RUN"], 2)])
def test_command_line_composes_settings_once(monkeypatch, arguments, times):
    composed, compose_config = [], Hydra.compose_config
    monkeypatch.setattr(Hydra, "compose_config", lambda *a, **k: composed.append(1) or compose_config(*a, **k))
    composing.hydra_main(lambda *run: composing.RunResult("", None, None))(["task=Cartpole", *arguments])
    assert len(composed) == times


def test_sweep_uses_given_recipes_or_one_per_task():
    assert composing.choose_recipe(["task=Go1Velocity", "recipe=quick,full"])[-1] == "recipe=quick,full"
    assert composing.choose_recipe(["task=Anymal,Go1Velocity", "device=cpu"])[-1] == "recipe=quick"
    anymal = composing._finished(composing.compose(["task=Anymal"]) | {"recipe": "quick"}, ["task=Anymal"], None)
    assert anymal["recipe"] == "full"


def test_user_task_has_custom_and_inherited_recipes(folder):
    assert recipes("MyAnymal", folder) == ["full", "tiny"] and recipes("MyGo1", folder) == ["full", "quick"]
    commands = (["task=MyAnymal", f"recipe={name}", "device=cpu"] for name in ("tiny", "auto"))
    tiny, full = (composing.compose(command, folder) for command in commands)
    assert (tiny["recipe"], tiny["num_envs"], tiny["ppo"]["gamma"], tiny["ppo"]["horizon"]) == ("tiny", 8, 0.8, 4)
    assert (full["recipe"], full["num_envs"], full["ppo"]["gamma"]) == ("full", 128, 0.9)
    typed = composing.compose(["task=MyAnymal", "recipe=tiny", "ppo.gamma=0.7", "num_envs=2"], folder)
    assert (typed["num_envs"], typed["ppo"]["gamma"], typed["ppo"]["horizon"]) == (2, 0.7, 4)
    mine = composing.compose(["task=MyGo1", "device=cpu"], folder)
    assert (mine["recipe"], mine["num_envs"], mine["task"]["weights"]["trot"]) == ("quick", 64, 1.0)


def test_tuned_sections_include_values_of_recipe(folder):
    assert tuned_sections("MyAnymal", folder)["ppo"]["gamma"] == 0.9
    tiny = tuned_sections("MyAnymal", folder, "tiny")
    assert (tiny["ppo"]["gamma"], tiny["my_ppo"]) == (0.8, {"clip": 0.1}) and "horizon" in tiny["ppo"]  # Anymal's


def test_run_from_python_keeps_recipe_name():
    spec = prepare("Go1Velocity", recipe="full", device="cpu")
    assert spec.cfg.recipe == "full" and "recipe=full" in spec.overrides
    spec = prepare("Go1Velocity", device="cpu")
    assert spec.cfg.recipe == spec.config["recipe"] == "quick" and "recipe=quick" in spec.overrides
    assert "recipe" not in " ".join(prepare("Anymal", device="cpu").overrides)
