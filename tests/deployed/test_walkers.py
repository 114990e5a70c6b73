"""Tests of the batch of deployed robots: the same rollout as `deploy.py`, disturbances, damaged folders."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gpusim_rl.deployed.walkers import Walkers
from gpusim_rl.errors import ConfigError
from gpusim_rl.export import policy as runtime
from gpusim_rl.export.policy import DeployedPolicy
from helpers.commands import ROOT, load_file
from helpers.exports import TERMS, term, write_hopper


@pytest.fixture(scope="module")
def deploy() -> ModuleType:
    return load_file(ROOT / "docs" / "examples" / "deploy.py", "deploy")


@pytest.fixture
def hopper(tmp_path: Path) -> Path:
    return write_hopper(tmp_path / "hopper")


def compare(deploy: ModuleType, folder: Path, command: list[float], steps: int) -> float:
    """Return the largest difference of positions between one robot of a batch, pushed halfway, and deploy.py's."""
    policy, walkers = DeployedPolicy(folder), Walkers(folder, 3)
    robot = deploy.Robot(folder, policy.card)
    robot.command = dict(zip(robot.command, command, strict=True))
    walkers.command[:] = command
    active, worst = np.array([True, False, True]), 0.0
    for step in range(steps):
        if step == steps // 2:
            walkers.push(np.array([2]), np.array([[0.3, 0.1, 0.0]]))
            yaw = 2.0 * math.atan2(robot.data.qpos[6], robot.data.qpos[3])
            cos, sin = math.cos(yaw), math.sin(yaw)
            robot.data.qvel[:2] += [cos * 0.3 - sin * 0.1, sin * 0.3 + cos * 0.1]
            deploy.mujoco.mj_forward(robot.model, robot.data)  # sensors
        robot.step(policy.act(robot.observe())[1])
        walkers.step(active)
        worst = max(worst, float(np.abs(walkers.qpos[2] - robot.data.qpos).max()))
    assert np.array_equal(walkers.qpos[1], np.float64([*policy.card["start"]["qpos"]]))  # not active
    return worst


@pytest.mark.parametrize(
    ("demo", "command", "tolerance"),
    [("Go1Velocity", [0.5, 0.0, 0.1], 1e-3), ("G1VelocityForward", [0.5, 0.0, 0.0], 1e-3)],
)
def test_demos_walk_as_in_deploy(deploy, exported, demo, command, tolerance):
    assert compare(deploy, exported(demo), command, 100) < tolerance


def test_history_and_recurrent_state_are_those_of_the_runtime(deploy, hopper):
    assert compare(deploy, hopper, [0.5, 0.2], 40) < 1e-6


def test_velocity_up_and_height_are_in_the_heading_frame(hopper):
    walkers = Walkers(hopper, 2)
    half = math.pi / 4.0
    walkers.qpos[1, 3:7] = [math.cos(half), 0.0, 0.0, math.sin(half)]  # facing left
    walkers.qvel[1, :6] = [0.0, 0.7, 0.2, 0.0, 0.0, 0.4]
    assert walkers.velocity[1] == pytest.approx([0.7, 0.0, 0.4]) and walkers.up.tolist() == pytest.approx([1.0, 1.0])
    walkers.push(np.array([1]), np.array([[0.0, 0.5, 0.0]]))
    assert walkers.qvel[1, :3] == pytest.approx([-0.5, 0.7, 0.2]) and walkers.velocity[1, 1] == pytest.approx(0.5)
    walkers.qpos[0, 2] = 0.1
    assert walkers.fallen(0.3).tolist() == [True, False]
    walkers.qpos[1] = np.nan
    assert walkers.fallen(0.3).tolist() == [True, True]


def test_copied_robot_continues_like_its_original(hopper):
    walkers = Walkers(hopper, 3)
    for _ in range(7):
        walkers.step(np.array([True, False, False]))
    walkers.copy(np.array([0, 0]), np.array([1, 2]))
    walkers.delay[2] = 3
    for _ in range(5):
        walkers.step()
    assert np.array_equal(walkers.state[0], walkers.state[1]) and not np.array_equal(walkers.state[0], walkers.state[2])
    walkers.reset(np.array([1]))
    assert walkers.steps.tolist() == [12, 0, 12] and not walkers.action[1].any()


def test_delay_holds_the_first_control_back(hopper):
    walkers, sent, applied = Walkers(hopper, 2), [], []
    walkers.delay[1] = 2
    for _ in range(5):
        walkers.step()
        sent.append(walkers.targets[1, 0])
        applied.append(walkers._ctrl[1, 0])
    assert applied == [sent[0], sent[0], *sent[:3]] and len({*sent}) == 5


def test_force_slope_noise_and_model_fields_act_on_one_robot(hopper):
    walkers = Walkers(hopper, 6)
    walkers.force[1] = [30.0, 0.0, 0.0]
    walkers.slope(np.array([2]), np.array([0.3]), np.array([[1.0, 0.0, 0.0]]))
    walkers.noise[3] = 0.5
    walkers.vary("body_mass")[4, walkers.base] += 20.0
    walkers.refresh(constants=True)
    for _ in range(10):
        walkers.step()
    changed = [not np.array_equal(walkers.state[0], walkers.state[i]) for i in range(1, 6)]
    assert changed == [True, True, True, True, False]
    assert walkers.velocity[1, 0] > walkers.velocity[0, 0] + 0.1 < walkers.velocity[2, 0]
    gravity = walkers._readers[1](np.array([0, 2]))
    assert np.linalg.norm(gravity, axis=1) == pytest.approx([1.0, 1.0]) and gravity[1, 0] > gravity[0, 0] + 0.1
    walkers.restore()
    walkers.reset()
    for _ in range(10):
        walkers.step()
    assert all(np.array_equal(walkers.state[0], walkers.state[i]) for i in range(1, 6))


def test_gravity_on_a_slope_is_that_of_a_tilted_robot(hopper):
    walkers = Walkers(hopper, 2)
    walkers.slope(np.array([0]), np.array([0.3]), np.array([[1.0, 0.0, 0.0]]))
    walkers.qpos[1, 3:7] = [math.cos(0.15), 0.0, math.sin(0.15), 0.0]  # nose down
    on_slope, tilted = walkers._readers[1](np.arange(2))
    assert on_slope == pytest.approx(tilted) and walkers.up.tolist() == pytest.approx([1.0, math.cos(0.3)])


def test_baselines_send_constant_targets(hopper):
    card = json.loads((hopper / "policy.json").read_text())
    card["start"]["qpos"][7] = 0.3
    (hopper / "policy.json").write_text(json.dumps(card))
    walkers = Walkers(hopper, 1)
    for policy, target in (("zero", 0.1), ("hold", 0.3)):
        walkers.policy = policy
        walkers.step()
        assert walkers.targets.tolist() == [[pytest.approx(target)]]


def test_phase_is_a_clock_that_may_stop_while_standing(tmp_path):
    phases = [term("a", 1, "phase sine 0.4 0.5"), term("b", 1, "phase cosine 0.4 0.5 standing -1")]
    walkers = Walkers(write_hopper(tmp_path / "phases", [*TERMS, *phases]), 2)
    walkers.command[1, 0] = 0.5
    for _ in range(3):
        walkers.step()
    now = math.tau / 0.4 * 0.06 + 0.5
    sine, cosine = (read(np.arange(2))[:, 0].tolist() for read in walkers._readers[-2:])
    assert sine == pytest.approx([math.sin(now)] * 2) and cosine == pytest.approx([-1.0, math.cos(now)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"control_hz": 0.0}, "division by zero"),
        ({"physics_hz": 1e9}, "physics steps"),
        ({"control_hz": 1e-3}, "control steps"),
        ({"joints": [{"name": "knee"}]}, "no entry 'qpos'"),
        ({"start": {"qpos": [0.0], "qvel": [0.0]}}, "damaged"),
        ({"actuators": [{"name": "motor"}]}, "the scene has no actuator 'motor'"),
        ({"commands": {}}, "command"),
        ({"observation": {"terms": [term("a", 3, "task")]}}, "only the task can compute a"),
        ({"observation": {"terms": [term("a", 1, "gravity")]}}, "only the task can compute a"),
        ({"observation": {}}, "only the task can compute its observations"),
        ({"observation": {"terms": [term("a", 3, "gravity")]}}, "damaged export: "),
        ({"observation": {"terms": [term("a", 3, "gravity", history=10**9)]}}, "memory"),
        ({"files": {"onnx": "../policy.onnx", "scene": "scene.xml"}}, "not a file in the export folder"),
        ({"files": {"onnx": "scene.xml", "scene": "scene.xml"}}, "damaged"),
        ({"files": {"onnx": "policy.onnx", "scene": "policy.onnx"}}, "damaged"),
    ],
)
def test_damaged_card_is_one_line(tmp_path, changes, words):
    with pytest.raises(ConfigError) as raised:
        Walkers(write_hopper(tmp_path / "damaged", **changes), 1)
    assert words in str(raised.value) and "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


def test_other_files_are_one_line(tmp_path, hopper):
    with pytest.raises(ConfigError, match=r"no policy\.json"):
        Walkers(tmp_path, 1)
    scene = (hopper / "scene.xml").read_text()
    (hopper / "scene.xml").write_text(scene.replace("<freejoint/>", '<joint type="slide"/>'))
    with pytest.raises(ConfigError, match="no free base"):
        Walkers(hopper, 1)
    (hopper / "policy.json").write_text('{"a": ')
    with pytest.raises(ConfigError, match="damaged"):
        Walkers(hopper, 1)


def test_missing_onnxruntime_is_a_config_error(monkeypatch, hopper):
    monkeypatch.setattr(runtime, "onnxruntime", None)
    (hopper / "policy.npz").unlink(missing_ok=True)
    card = json.loads((hopper / "policy.json").read_text())
    card["files"].pop("numpy", None)
    (hopper / "policy.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match="needs onnxruntime"):
        Walkers(hopper, 1)
    with pytest.raises(SystemExit, match="needs onnxruntime"):
        DeployedPolicy(hopper)


def test_nothing_in_the_folder_is_executed(hopper):
    (hopper / "policy.py").write_text("raise SystemExit('executed')")
    Walkers(hopper, 1).step()
