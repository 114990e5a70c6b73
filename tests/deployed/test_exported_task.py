"""Export folders in viewers, videos and reports: the robots of `Walkers`, commands, hostile folders."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpusim_rl.deployed.exported_task import export_page, open_export
from gpusim_rl.deployed.walkers import Walkers
from gpusim_rl.errors import ConfigError

pytest_plugins = ["helpers.tool_runs"]


@pytest.fixture
def folder(exported, tmp_path) -> Path:
    return shutil.copytree(exported("Go1Velocity"), tmp_path / "export")


def change_card(folder: Path, **changes: Any) -> None:
    card = json.loads((folder / "policy.json").read_text())
    (folder / "policy.json").write_text(json.dumps({**card, **changes}))


def test_player_takes_the_steps_of_walkers_and_obeys_commands(folder):
    walkers = Walkers(folder, 2)
    with closing(open_export(folder, 2, "trained")) as player:
        env: Any = player.env
        task, command = env.task, torch.tensor([0.5, 0.0, 0.2])
        assert player.name == "Go1Velocity" and "x [m/s]" in task.commands.controls()
        task.commands.hold(torch.ones(2, dtype=torch.bool), command)
        walkers.command[:] = command.numpy()
        for _ in range(50):
            player.step()
            walkers.step()
        step = player.step()
        walkers.step()
        assert np.array_equal(env.sim.qpos.numpy(), walkers.qpos.astype(np.float32))
        assert np.allclose(step.stats["forward [m/s]"], walkers.velocity[:, 0]) and float(step.reward.min()) > 0.2


def test_fallen_robot_begins_a_new_episode(folder):
    with closing(open_export(folder, 2, "trained")) as player:
        env: Any = player.env
        env.task.walkers.qpos[1, 2] = 0.05
        assert player.step().terminated.tolist() == [False, True] and float(env.sim.qpos[1, 2]) > 0.2


def test_play_and_record_accept_an_export(folder, load_tool, capsys, tmp_path):
    assert load_tool("play").main([str(folder), "--viewer", "none", "--steps", "20", "--num-envs", "2"]) == 0
    assert "Go1Velocity: mean reward " in capsys.readouterr().out
    small = ["--steps", "4", "--num-envs", "1", "--width", "64", "--height", "64"]
    assert load_tool("record").main([str(folder), *small, "--policy", "zero"]) == 0
    assert (folder / "videos" / "zero.mp4").stat().st_size > 0


def test_scene_is_the_one_that_the_card_names(folder):
    change_card(folder, files={"onnx": "policy.onnx", "scene": "robot.xml"})
    (folder / "scene.xml").rename(folder / "robot.xml")
    with closing(open_export(folder, 1, "zero")) as player:
        assert player.env.num_envs == 1


@pytest.mark.parametrize(
    ("measured", "words"), [(None, "unknown whether a robot can measure gravity"), (False, "No robot measures gravity")]
)
def test_report_names_terms_that_a_robot_may_not_measure(folder, measured, words):
    card = json.loads((folder / "policy.json").read_text())
    for term in card["observation"]["terms"]:
        term["measured"] = measured if term["name"] == "gravity" else True
    del card["actuators"][0]["force_range"]
    (folder / "policy.json").write_text(json.dumps(card))
    assert words in export_page(folder, 0)


@pytest.mark.parametrize("option", [("--sim", "mjwarp"), ("--policy", "random")])
def test_options_without_effect_are_rejected(folder, load_tool, capsys, option):
    with pytest.raises(SystemExit):
        load_tool("play").main([str(folder), "--viewer", "none", *option])
    assert " ".join(option) in capsys.readouterr().err


DAMAGED: list[dict] = [{"control_hz": 1e9}, {"control_hz": "fast"}, {"task": None, "joints": 3}]
DAMAGED += [{"commands": {"x": ends}} for ends in ([0.0, float("inf")], ["a", "b"], [1.0, -1.0])]


@pytest.mark.parametrize("changes", DAMAGED)
def test_damaged_card_is_rejected_in_one_line(folder, changes):
    change_card(folder, **changes)
    with pytest.raises(ConfigError) as error:
        open_export(folder, 1, "trained")
    assert "\n" not in str(error.value) and re.search("export|command", str(error.value))


def test_nothing_in_the_folder_is_executed(folder):
    (folder / "policy.py").write_text("raise SystemExit('executed')")
    scene = (folder / "scene.xml").read_text()
    (folder / "scene.xml").write_text(scene.replace("</mujoco>", '<include file="/etc/hostname"/></mujoco>'))
    with pytest.raises(ConfigError):
        open_export(folder, 1, "trained")
    (folder / "scene.xml").write_text(scene)
    open_export(folder, 1, "trained").close()


FALL = {"label": "push <b>", "smallest": 0.66, "unit": "m/s", "hz": 25.0}
STRESS = {
    "searches": [{**FALL, "largest": 3.0, "way": "from <i>"}, {**FALL, "smallest": None, "largest": 3.0, "way": ""}],
    "rates": [{"name": "falls_push_1", "falls": 1, "episodes": 4, "interval": [0.05, 0.7]}],
}


def report(load_tool, *words: str) -> str:
    tool = load_tool("report")
    return tool.report(tool.parse([*words, "--steps", "2"])).read_text()


def test_report_of_an_export_has_card_and_stress_test(folder, load_tool):
    pytest.importorskip("viser")
    card = json.loads((folder / "policy.json").read_text())
    card["observation"]["terms"][0]["measured"] = False
    (folder / "policy.json").write_text(json.dumps(card))
    plain, unmeasured = report(load_tool, str(folder)), card["observation"]["terms"][0]["name"]
    assert plain.count("<iframe") == 1 and "Stress test" not in plain and f"No robot measures {unmeasured}" in plain
    for term in card["observation"]["terms"]:
        assert f">{term['name']}</td>" in plain and f">{term['source']}</td>" in plain
    (folder / "stress.json").write_text(json.dumps({**STRESS, "worst": {**FALL, "qpos": [card["start"]["qpos"]] * 3}}))
    (folder / "stress.png").write_bytes(b"png")
    rate = {"variant": "delay <u>", "episodes": 8, "falls": 0, "interval": [0.0, 0.3], "velocity_error": 0.1}
    (folder / "transfer.json").write_text(json.dumps({"rows": [rate]}))
    card["observation"]["terms"][0]["name"], card["task"] = "<script>", "<svg>"
    (folder / "policy.json").write_text(json.dumps(card))
    page = report(load_tool, str(folder))
    assert page.count("<iframe") == 2 and page.count("<img ") == 1
    words = ("&gt;3", "0.66", "pushes of 1 m/s", "5.0 to 70.0 %", "delay &lt;u&gt;", "&lt;script&gt;", "&lt;svg&gt;")
    assert [text for text in words if text not in page] == []
    assert not re.search("push <b>|from <i>|<u>|<script>|<svg>", page)


@pytest.mark.parametrize("damaged", [{"rates": 3}, {"searches": [{}], "rates": []}, [1], "x" * (2 << 20)])
def test_damaged_results_are_rejected_in_one_line(folder, load_tool, damaged):
    pytest.importorskip("viser")
    (folder / "stress.json").write_text(json.dumps(damaged))
    with pytest.raises(ConfigError) as error:
        report(load_tool, str(folder), "--no-replay")
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_report_takes_one_export(folder, load_tool):
    with pytest.raises(ConfigError) as error:
        report(load_tool, str(folder), str(folder))
    assert error.value.got == "2 folders"
