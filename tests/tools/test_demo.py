"""Tests of the packaged demo policies and the command `demo`."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import demos_dir
from gpusim_rl.run.evaluation import evaluate
from gpusim_rl.view.player import Player
from helpers.commands import ROOT

pytest_plugins = ["helpers.tool_runs"]

LONG = ("G1VelocityForward", "Humanoid")  # episodes of many bodies
DEMOS = sorted(file.parent.name for file in demos_dir().glob("*/demo.json"))


def test_demos_cover_common_robots_and_stay_small():
    robots = {"Go1Velocity", "G1VelocityForward", "Ant", "Humanoid", "FrankaCubeStack", "Quadcopter", "HalfCheetah"}
    assert robots <= set(DEMOS)
    files = [path for path in demos_dir().rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"config.yaml", "demo.json", "last.pt"}
    assert sum(path.stat().st_size for path in files) < 6e6


@pytest.mark.parametrize("demo", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in DEMOS])
def test_demo_reaches_the_return_of_its_card(demo):
    """The mean return of 4 episodes equals the card's within the uncertainty of so few episodes."""
    card = json.loads((demos_dir() / demo / "demo.json").read_text())
    with closing(Player.open(str(demos_dir() / demo), num_envs=4)) as player:
        result, _ = evaluate(player.env, player.policy, player.obs)  # type: ignore[arg-type]
    spread = 4.0 * (result["return_std"] ** 2 + card["return_std"] ** 2) ** 0.5 / 4**0.5
    assert abs(result["return_mean"] - card["return"]) <= 0.02 * abs(card["return"]) + spread


def test_forward_only_demo_is_labelled(load_tool):
    card = json.loads((demos_dir() / "G1VelocityForward" / "demo.json").read_text())
    assert card["recipe"] == "quick" and "recipe quick" in load_tool("demo").summary(card)
    assert "forward only" in card["note"] and card["note"] in load_tool("demo").summary(card)
    readme = (ROOT / "README.md").read_text()
    assert "G1 walks forward only" in readme and not (demos_dir() / "G1Velocity").exists()


def test_demo_name_may_be_abbreviated(load_tool):
    choose = load_tool("demo").choose
    demos = ["Ant", "Go1Velocity", "Go2Velocity", "HalfCheetah"]
    assert choose("Ant", demos) == "Ant" and choose("go1", demos) == "Go1Velocity"
    assert choose("half", demos) == "HalfCheetah"
    with pytest.raises(ConfigError, match="Try one of Go1Velocity, Go2Velocity"):
        choose("go", demos)
    with pytest.raises(ConfigError, match=r"Did you mean 'Ant'\?"):
        choose("Antt", demos)


def test_demo_list_shows_return_and_training_steps(tool_here):
    lines = tool_here("demo", "--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == DEMOS
    assert all(" M steps in " in line and "; return " in line for line in lines)


def test_demo_forwards_options_to_play(tool_here):
    output = tool_here("demo", "Ant", "--viewer", "none", "--steps", "5", "--num-envs", "2").stdout
    assert output.splitlines()[-1].startswith("Ant: mean reward")
    output = tool_here("demo", "--viewer", "none", "--steps", "5", "--num-envs", "2").stdout
    assert output.splitlines()[-1].startswith("Go1Velocity: mean reward"), "default task"
