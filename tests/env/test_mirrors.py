"""Tests of mirror images of observations: kinds of terms and errors."""

from __future__ import annotations

from typing import Any, ClassVar

import mujoco
import numpy as np
import pytest
import torch
from gpusim_rl.tasks.anymal import Anymal
from gpusim_rl.tasks.anymal_terrain import FEET, SCAN

from gpusim_rl.env import AtSite, PerBody, VecEnv
from gpusim_rl.env.mirrors import mirrored
from gpusim_rl.errors import TaskError
from gpusim_rl.sim import Scene
from gpusim_rl.sim.mirror_image import PSEUDOVECTOR, QUATERNION, VECTOR, MirrorImage
from gpusim_rl.testing.mirror_check import WRONG, differences_by_term, image_of
from helpers.task_envs import class_env


def make(task: str | type = Anymal, **settings: Any) -> VecEnv:
    name, task_class = (task, None) if isinstance(task, str) else ("Anymal", task)
    env = class_env(name, 6, task_class, **{"clip_actions": 1e6, **settings})
    env.reset()
    return env


class Feet(Anymal):
    """Anymal that observes more kinds of quantities."""

    mirrors: ClassVar = {
        **Anymal.mirrors,
        "foot_height": PerBody(FEET),
        "foot_velocity": PerBody(FEET, "vector"),
        "quat": "quaternion",
        "scan": SCAN,
    }

    def __init__(self, cfg, sim):
        super().__init__(cfg, sim)
        self.feet = self.robot.bodies(FEET)

    def observe(self):
        height = self.robot.root_pos[:, 2:]
        more = {
            "foot_height": self.feet.pos[..., 2],
            "foot_velocity": self.feet.lin_vel.flatten(1),
            "quat": self.robot.root_quat,
            # a slope that rises to the left; the mirrored robot sees a slope that rises to the right
            "scan": height + self.robot.root_pos[:, 1:2] * SCAN[:, 1],
        }
        return {"policy": {**super().observe()["policy"], **more}}


@pytest.mark.parametrize("task", ["Anymal", "AnymalTerrain", Feet])
def test_mirrored_step_equals_step_of_the_mirror_image(task):
    found = differences_by_term(make(task))
    assert {part: x for part, x in found.items() if x is not None and x > 1e-5} == {}
    alone = {"policy/command", "policy/command_yaw", "policy/heights"}  # not compared in the air
    assert {part for part, x in found.items() if x is None} <= alone


def test_mirrored_step_agrees_on_the_ground():
    found = differences_by_term(make(Feet), height=-0.05)
    assert {part: x for part, x in found.items() if x is not None and x > 1e-3} == {}


@pytest.mark.parametrize(
    ("part", "kind"),
    [("lin_vel", "pseudovector"), ("ang_vel", "vector"), ("foot_height", "scalar"), ("scan", "scalar")],
)
def test_wrong_mirror_kind_is_found_in_its_term(part, kind, monkeypatch):
    monkeypatch.setattr(Feet, "mirrors", {**Feet.mirrors, part: kind})
    found = differences_by_term(make(Feet))
    assert [name for name, x in found.items() if x is not None and x > WRONG] == [f"policy/{part}"]


def test_asymmetric_stance_is_found():
    class Leaning(Anymal):
        def __init__(self, cfg, sim):
            super().__init__(cfg, sim)
            self.stance = self.stance + 0.5

    found = differences_by_term(make(Leaning))
    assert (found["policy/joint_pos"] or 0.0) > WRONG


def test_history_repeats_the_mirror_map():
    plain = mirrored(make())[0]["policy"]
    settings = {"joint_pos": {"history": 3, "delay": 2}, "gravity": {"history": 2}}
    late = mirrored(make(observations=settings))[0]["policy"]
    values = torch.randn(4, 48)
    pieces = values.split([6, 3, 3, 12, 24], dim=1)
    now = image_of(values, plain).split([6, 3, 3, 12, 24], dim=1)
    repeated = [1, 2, 1, 3, 1]
    longer = torch.cat([piece.repeat(1, times) for piece, times in zip(pieces, repeated, strict=True)], dim=1)
    expected = torch.cat([piece.repeat(1, times) for piece, times in zip(now, repeated, strict=True)], dim=1)
    assert torch.equal(image_of(longer, late), expected)


@pytest.mark.parametrize(
    ("mirrors", "words"),
    [
        ({"lin_vel": None}, r"Feet\.mirrors\['lin_vel'\]: .*missing"),
        ({"lin_vel": "vectr"}, r"Feet\.mirrors\['lin_vel'\]: .* Did you mean 'vector'\?"),
        ({"quat": "vector"}, "multiple of 3 numbers, got 4"),
        ({"quat": "joints"}, "12 numbers .*got 4"),
        ({"foot_height": PerBody(FEET[:3])}, "mirror image of 'LH_SHANK'"),
        ({"scan": SCAN + 0.05}, r"scan point \[.*\]"),
    ],
)
def test_unsuitable_mirror_kind_is_rejected(mirrors, words, monkeypatch):
    monkeypatch.setattr(Feet, "mirrors", {**Feet.mirrors, **mirrors})
    with pytest.raises(TaskError, match=words):
        mirrored(make(Feet))


@pytest.mark.parametrize("task", ["Go1Velocity", "G1Velocity"])
def test_off_plane_velocimeter_is_mirrored(task, monkeypatch):
    """Go1's IMU is 6.7 cm off the plane: its velocity also depends on the angular velocity."""
    plain = {term: {"history": 1} for term in ("ang_vel", "gravity", "joint_pos", "joint_vel", "actions")}
    env = make(task, observations={"lin_vel": {"used": True}, **plain})
    found = differences_by_term(env)
    measured = {group: found[f"{group}/lin_vel"] or 0.0 for group in env.obs_sizes}
    assert max(measured.values()) < 5e-3
    if task == "Go1Velocity":
        maps = mirrored(env)[0]["policy"]
        assert all(abs(factor) == pytest.approx(0.133, abs=2e-3) for _, _, factor in maps.terms) and maps.terms
        values = torch.randn(3, len(maps.sources))
        torch.testing.assert_close(image_of(image_of(values, maps), maps), values)
        monkeypatch.setattr(type(env.task), "mirrors", {**env.task.mirrors, "lin_vel": "vector"})
        assert (differences_by_term(env)["policy/lin_vel"] or 0.0) > 0.02


def test_off_plane_velocity_depends_on_the_angular_velocity_of_its_time():
    """Only the newest of three frames of ang_vel, which follow lin_vel, is as old as lin_vel."""
    [plain, late] = [
        mirrored(make("Go1Velocity", observations={"lin_vel": {"used": True, "history": frames}}))[0]["policy"].terms
        for frames in (1, 2)
    ]
    assert {column for _, column, _ in plain} <= {9, 10, 11} and {row for row, _, _ in plain} <= {0, 1, 2}
    assert {(row // 3, column // 3) for row, column, _ in late} == {(0, 3), (1, 4)}
    with pytest.raises(TaskError, match="history"):
        mirrored(make("Go1Velocity", observations={"lin_vel": {"used": True, "history": 4}}))


def test_rotated_off_plane_sensor_is_mirrored():
    scene = Scene(100.0)
    site = '<site name="imu" pos="0.1 0.2 -0.05" quat="0.8 0.3 -0.5 0.1"/>'
    body = f'<body name="base"><freejoint/><geom type="box" size="0.3 0.2 0.1"/>{site}</body>'
    scene.add("robot", mujoco.MjSpec.from_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>"))
    scene.add_sensor("robot", "lin_vel", "velocimeter", site="imu")
    scene.add_sensor("robot", "ang_vel", "gyro", site="imu")
    data, random, image = mujoco.MjData(scene.model), np.random.default_rng(0), MirrorImage(scene, "robot")

    def measured(quat, velocity):
        data.qpos[3:7], data.qvel[:] = quat, velocity
        mujoco.mj_forward(scene.model, data)
        return data.sensordata[:3].copy(), data.sensordata[3:].copy()

    for _ in range(5):
        quat, velocity = random.normal(size=4), random.normal(size=6)
        quat /= np.linalg.norm(quat)
        lin_vel, ang_vel = measured(quat, velocity)
        expected = measured(quat * QUATERNION, velocity * np.append(VECTOR, PSEUDOVECTOR))
        (flip, lever), (turn, zeros) = image.at_site("imu", "vector"), image.at_site("imu", "pseudovector")
        np.testing.assert_allclose(flip @ lin_vel + lever @ ang_vel, expected[0], atol=1e-6)
        np.testing.assert_allclose(turn @ ang_vel, expected[1], atol=1e-6)
        assert not zeros.any()


def test_off_plane_sensor_needs_an_angular_velocity(monkeypatch):
    env = make("Go1Velocity")
    monkeypatch.setattr(type(env.task), "mirrors", {**env.task.mirrors, "lin_vel": AtSite("imu", "vector", "spin")})
    with pytest.raises(TaskError, match=r"'imu' .* 'spin'"):
        mirrored(env)
