"""From a command line to one plain dict."""

from __future__ import annotations

import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings import compose as composing


def message(info: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(info.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "lines",
    [
        ["task.randomization_params={frequency: 3, latency: {range: [0, 1]}}"],
        ["task.randomization_params.frequency=3", "task.randomization_params.latency.range=[0,1]"],
        ["+task.randomization_params.frequency=3", "task.randomization_params.latency={range: [0,1]}"],
        [
            "task.randomization_params={frequency: 9}",
            "task.randomization_params={frequency: 3, latency: {range: [0,1]}}",
        ],
    ],
)
def test_a_command_line_adds_to_what_is_randomised(lines):
    expected = {"frequency": 3, "latency": {"range": [0, 1]}}
    assert composing.compose(["task=Ant", *lines])["task"]["randomization_params"] == expected


def test_randomisation_from_python_and_back_from_a_run_folder():
    params = {"sim_params": {"gravity": {"range": [0, 0.4], "operation": "additive", "distribution": "gaussian"}}}
    spec = prepare("Ant", task={"randomize": True, "randomization_params": params})
    run, lines = spec.cfg, spec.overrides
    assert run.task.randomize and run.task.randomization_params == params
    assert composing.compose(lines)["task"]["randomization_params"] == params
    spec = prepare("Ant", spec.cfg.task, task={"randomization_params": {"sim_params": {"gravity": None}}})
    assert spec.cfg.task.randomize and spec.cfg.task.randomization_params == {"sim_params": {"gravity": None}}


@pytest.mark.parametrize(
    "text",
    ["+=${seed}", "=1", "~", "sim=[-1]", "+algo=[[]]", f"log={'a' * 1000}", f"seed={'1' * 5000}", "seed=" + "[" * 500],
)
def test_an_override_that_cannot_be_read_is_named(text):
    with pytest.raises(ConfigError) as info:
        composing.compose([text])
    assert message(info).startswith((f"cannot read {text!r}", f"{text}: expected a name"))


def test_a_key_that_exists_is_not_compared_with_itself():
    with pytest.raises(ConfigError, match="'ppo' cannot be changed like this: expected key=value"):
        composing.compose(["ppo={a:1}"])


@pytest.mark.parametrize(
    ("arguments", "iterations"),
    [
        (["task=Hopper"], 245),
        (["task=Hopper", "algo=sac"], 4000),
        (["task=Hopper", "algo=sac", "sac.max_iterations=70"], 70),
        (["task=Hopper", "algo=sac", "sac.max_iterations=null"], 245),
        (["task=Hopper", "algo=sac", "max_iterations=9"], 9),
        (["task=Hopper", "algo=sac", "sac.max_iterations=70", "max_iterations=9"], 9),
        (["task=Hopper", "algo=fast_sac"], 30000),
        (["task=Gymnasium", "env.id=CartPole-v1", "algo=dqn"], 400),
        (["task=Hopper", "algo=td3", "debug=smoke"], 2),
        (["task=Hopper", "algo=a2c"], 245),
    ],
)
def test_the_length_of_a_training_is_that_of_the_algorithm_where_it_has_one(arguments, iterations):
    assert composing.compose(arguments)["max_iterations"] == iterations


@pytest.mark.parametrize(
    ("arguments", "num_envs", "hidden"),
    [
        (["device=cpu"], 16, [64, 32]),
        (["device=cuda:1"], 4096, [512]),
        (["device=auto"], 4096 if torch.cuda.is_available() else 16, [512] if torch.cuda.is_available() else [64, 32]),
        (["device=cuda", "num_envs=8"], 8, [512]),
    ],
)
def test_a_value_of_a_yaml_depends_on_the_device_and_what_is_typed_wins(tmp_path, arguments, num_envs, hidden):
    (tmp_path / "task").mkdir()
    lines = ["# @package _global_", "defaults: [Ant]", "num_envs: ${by_device:16,4096}"]
    lines += ["ppo: {network: {hidden: '${by_device:[64,32],[512]}'}}"]
    (tmp_path / "task" / "MyAnt.yaml").write_text("\n".join(lines))
    config = composing.compose(["task=MyAnt", *arguments], tmp_path)
    assert config["num_envs"] == num_envs and config["ppo"]["network"]["hidden"] == hidden
