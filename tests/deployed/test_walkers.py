"""Tests of the batch of deployed robots: the same rollout as `deploy.py`, disturbances, damaged folders."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import mujoco
import numpy as np
import pytest

from gpusim_rl.deployed.variants import change
from gpusim_rl.deployed.walkers import Walkers
from gpusim_rl.errors import ConfigError
from gpusim_rl.export import policy as runtime
from gpusim_rl.export.policy import DeployedPolicy
from helpers.commands import ROOT, load_file
from helpers.exports import AFTER_BALL, HOPPER, TERMS, term, write_hopper


@pytest.fixture(scope="module")
def deploy() -> ModuleType:
    return load_file(ROOT / "docs" / "examples" / "deploy.py", "deploy")


@pytest.fixture
def hopper(tmp_path: Path) -> Path:
    return write_hopper(tmp_path / "hopper")


def steps(walkers: Walkers, number: int) -> None:
    for _ in range(number):
        walkers.step()


def compare(deploy: ModuleType, folder: Path, command: list[float], steps: int) -> float:
    """Return the largest difference of positions between one robot of a batch, pushed halfway, and deploy.py's."""
    policy, walkers = DeployedPolicy(folder), Walkers(folder, 3)
    robot = deploy.Robot(folder, policy.card)
    robot.command = dict(zip(robot.command, command, strict=True))
    walkers.command[:] = command
    active, worst = np.array([True, False, True]), 0.0
    for step in range(steps):
        if step == steps // 2:
            robot.data.qvel[walkers.linear] += walkers.from_heading(np.array([2]), np.array([0.3, 0.1, 0.0]))[0]
            deploy.mujoco.mj_forward(robot.model, robot.data)  # sensors
            change(walkers, np.array([2]), "push", 1.0, np.array([0.3, 0.1, 0.0]))
        robot.step(policy.act(robot.observe())[1])
        walkers.step(active)
        worst = max(worst, float(np.abs(walkers.qpos[2] - robot.data.qpos).max()))
    assert np.array_equal(walkers.qpos[1], np.float64([*policy.card["start"]["qpos"]]))  # not active
    return worst


@pytest.mark.parametrize(("demo", "turn"), [("Go1Velocity", 0.1), ("G1VelocityForward", 0.0)])
def test_demos_walk_as_in_deploy(deploy, exported, demo, turn):
    assert compare(deploy, exported(demo), [0.5, 0.0, turn], 100) < 1e-3


def test_history_and_recurrent_state_are_those_of_the_runtime(deploy, hopper):
    assert compare(deploy, hopper, [0.5, 0.2], 40) < 1e-6


def test_velocity_up_and_height_are_in_the_heading_frame(hopper):
    walkers = Walkers(hopper, 2)
    half = math.pi / 4.0
    walkers.qpos[1, 3:7] = [math.cos(half), 0.0, 0.0, math.sin(half)]  # facing left
    walkers.qvel[1, :6] = [0.0, 0.7, 0.2, 0.0, 0.0, 0.4]
    assert walkers.velocity[1] == pytest.approx([0.7, 0.0, 0.4])
    change(walkers, np.array([1]), "push", 0.5, np.array([0.0, 1.0, 0.0]))
    assert walkers.qvel[1, :3] == pytest.approx([-0.5, 0.7, 0.2]) and walkers.velocity[1, 1] == pytest.approx(0.5)


def test_robots_that_are_low_tilted_diverged_or_without_targets_have_fallen(hopper):
    walkers = Walkers(hopper, 6)
    walkers.qpos[0, 2], walkers.qpos[2] = 0.1, np.nan
    walkers.qpos[1, 3:7] = [0.5, math.sqrt(0.75), 0.0, 0.0]
    walkers.qpos[3, 2], walkers.qvel[3, 2] = 1e4, 1e6  # MuJoCo takes controls that are not finite as 0
    walkers.targets[4] = np.nan
    assert walkers.fallen(0.3).tolist() == [True, True, True, True, True, False]


def test_copied_robot_continues_like_its_original(hopper):
    walkers = Walkers(hopper, 3)
    for _ in range(7):
        walkers.step(np.array([True, False, False]))
    walkers.load(np.array([1, 2]), walkers.save(np.array([0, 0])))
    walkers.delay[2] = 3
    steps(walkers, 5)
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
    change(walkers, np.array([2]), "slope", 0.3, np.array([1.0, 0.0, 0.0]))
    walkers.noise[3] = 0.5
    walkers.vary("body_mass")[4, walkers.base] += 20.0
    steps(walkers, 10)
    changed = [not np.array_equal(walkers.state[0], walkers.state[i]) for i in range(1, 6)]
    assert changed == [True, True, True, True, False]
    assert walkers.velocity[1, 0] > walkers.velocity[0, 0] + 0.1 < walkers.velocity[2, 0]
    walkers.restore()
    walkers.reset()
    steps(walkers, 10)
    assert all(np.array_equal(walkers.state[0], walkers.state[i]) for i in range(1, 6))


def test_gravity_on_a_slope_is_that_of_a_tilted_robot(hopper):
    walkers = Walkers(hopper, 2)
    change(walkers, np.array([0]), "slope", 0.3, np.array([1.0, 0.0, 0.0]))
    walkers.qpos[1, 3:7] = [math.cos(0.15), 0.0, math.sin(0.15), 0.0]  # nose down
    on_slope, tilted = walkers._readers[1](np.arange(2))
    assert on_slope == pytest.approx(tilted)


def test_baselines_send_constant_targets(tmp_path):
    start = {"qpos": [0, 0, 0.3, 1, 0, 0, 0, 0.3], "qvel": [0.0] * 7}
    walkers = Walkers(write_hopper(tmp_path / "held", start=start), 1)
    for policy, target in (("zero", 0.1), ("hold", 0.3)):
        walkers.policy = policy
        walkers.step()
        assert walkers.targets.tolist() == [[pytest.approx(target)]]


def test_phase_is_a_clock_that_may_stop_while_standing(tmp_path):
    phases = [term("a", 1, "phase sine 0.4 0.5"), term("b", 1, "phase cosine 0.4 0.5 standing -1")]
    walkers = Walkers(write_hopper(tmp_path / "phases", [*TERMS, *phases]), 2)
    walkers.command[1, 0] = 0.5
    steps(walkers, 3)
    now = math.tau / 0.4 * 0.06 + 0.5
    sine, cosine = (read(np.arange(2))[:, 0].tolist() for read in walkers._readers[-2:])
    assert sine == pytest.approx([math.sin(now)] * 2) and cosine == pytest.approx([-1.0, math.cos(now)])


def test_force_and_delay_last_as_long_at_any_rate(tmp_path):
    for hz in (25.0, 30.0, 100.0):
        walkers, impulse = Walkers(write_hopper(tmp_path / f"{hz:g}", control_hz=hz, physics_hz=600.0), 1), 0.0
        assert walkers.max_delay == round(0.2 * hz)
        change(walkers, np.array([0]), "force", 10.0, (np.array([1.0, 0.0, 0.0]), 0.08))
        for _ in range(round(0.2 * hz)):
            walkers.step()
            impulse += np.linalg.norm(walkers._xfrc[0, walkers.torso, :3]) / hz
        assert impulse == pytest.approx(0.8)


def test_base_is_the_robots_not_that_of_an_object(tmp_path, deploy):
    terms = [*TERMS, term("speed", 3, "base velocity")]
    walkers = Walkers(folder := write_hopper(tmp_path / "e", terms, **AFTER_BALL), 1)
    assert walkers.height.tolist() == [0.3] and walkers.model.body(walkers.torso).name == "base"
    assert compare(deploy, folder, [0.5, 0.2], 20) < 1e-6


def test_sensors_of_deploy_measure_the_present_state_after_the_limit_of_spins(tmp_path, deploy):
    sensors = '<framequat name="q" objtype="site" objname="imu"/><accelerometer name="a" site="imu"/>'
    scene = HOPPER.replace("<sensor>", f"<sensor>{sensors}")
    start = {"qpos": [0, 0, 0.3, 1, 0, 0, 0, 0.1], "qvel": [0, 0, 0, 1, 2, 30, 0.5]}
    terms = [*TERMS, term("q", 4, "sensor q"), term("a", 3, "sensor a", 0.01)]
    folder = write_hopper(tmp_path / "e", terms, scene, start=start, max_angular_velocity=20.0)
    assert compare(deploy, folder, [0.5, 0.2], 20) < 1e-6


def test_accelerometer_measures_the_present_state(tmp_path):
    scene = HOPPER.replace("<sensor>", '<sensor><accelerometer name="acc" site="imu"/>')
    walkers = Walkers(write_hopper(tmp_path / "acc", [*TERMS, term("acc", 3, "sensor acc")], scene), 2)
    steps(walkers, 4)
    data = mujoco.MjData(walkers.model)
    data.qpos, data.qvel, data.ctrl = walkers.qpos[1], walkers.qvel[1], walkers._ctrl[1]
    mujoco.mj_forward(walkers.model, data)
    walkers.step()
    assert walkers._frames[-1][1, -1] == pytest.approx(data.sensor("acc").data, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"control_hz": 0.0}, "division by zero"),
        ({"physics_hz": 1e9}, "physics steps"),
        ({"control_hz": 1e-3}, "control steps"),
        ({"joints": [{"name": "knee"}]}, "no entry 'qpos'"),
        ({"joints": [{"name": "knee", "qpos": 8, "qvel": 6, "default": 0.0}]}, "damaged"),
        ({"max_angular_velocity": "fast"}, "damaged"),
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
    with pytest.raises(ConfigError, match="needs onnxruntime"):
        Walkers(hopper, 1)
    with pytest.raises(SystemExit, match="needs onnxruntime"):
        DeployedPolicy(hopper)


def test_nothing_in_the_folder_is_executed_or_linked(hopper):
    (hopper / "policy.py").write_text("raise SystemExit('executed')")
    Walkers(hopper, 1).step()
    (hopper / "policy.onnx").rename(hopper.parent / "policy.onnx")
    (hopper / "policy.onnx").symlink_to(hopper.parent / "policy.onnx")
    with pytest.raises(ConfigError, match="a link to"):
        Walkers(hopper, 1)
