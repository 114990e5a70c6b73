"""Tests of `gpusim_rl.testing.measurable`: which observation terms a robot can measure."""

from __future__ import annotations

from typing import Any

import mujoco
import pytest
import torch

from gpusim_rl import make_env
from gpusim_rl.env import VecEnv
from gpusim_rl.env.command import steerable
from gpusim_rl.env.math import quat_rotate_inverse
from gpusim_rl.errors import TaskError
from gpusim_rl.export.card import joint_rows
from gpusim_rl.testing.measurable import _origin, advice, simulator_only


def started(task: str, **settings: Any) -> VecEnv:
    env = make_env(task, num_envs=2, sim="mujoco", **settings)
    assert isinstance(env, VecEnv)
    env.reset()
    return env


@pytest.mark.parametrize(
    ("task", "settings", "expected"),
    [
        ("Go1Velocity", {}, {}),
        ("Go1Velocity", {"task.terrain": "rough"}, {"heights": "ground heights"}),
        ("Go1Velocity", {"task.observations.lin_vel.used": True}, {"lin_vel": "velocimeter"}),
        ("Anymal", {}, {"lin_vel": "base velocity"}),
        ("Cartpole", {}, {}),
        ("Ant", {}, {"height": "height", "lin_vel": "base velocity", "angles": "target", "directions": "target"}),
        ("G1Tracking", {}, {"lin_vel": "velocimeter", "anchor_pos": "position"}),
        ("FrankaReach", {}, {}),
        ("FrankaCabinet", {}, dict.fromkeys(("to_handle", "drawer_pos", "drawer_vel"), "drawer")),
        ("FrankaCubeStack", {}, dict.fromkeys(("cube_quat", "cube_pos", "to_cube_b"), "cubes")),
        ("Quadcopter", {}, {"to_target": "position", "lin_vel": "velocity"}),
        ("BallBalance", {}, {"ball_pos": "ball", "ball_vel": "ball"}),
        ("Hopper", {}, {"height": "height", "lin_vel": "velocity"}),
    ],
)
def test_terms_that_only_a_simulator_provides(task, settings, expected):
    assert simulator_only(started(task, **settings)) == expected


@pytest.mark.parametrize(
    "task", ["Ant", "Humanoid", "HumanoidAMP", "AllegroHand", "Quadcopter", "FrankaReach", "Go1Tracking", "Trifinger"]
)
def test_declared_sources_have_the_values_of_their_terms(task):
    env = started(task)
    for _ in range(3):
        env.step(torch.full_like(env.task.actions, 0.1))
    joints = joint_rows(env.sim.scene.model)
    base, free = env.sim.scene.model.jnt_type == mujoco.mjtJoint.mjJNT_FREE, {}
    if base.any():
        first, pose = int(env.sim.scene.model.jnt_dofadr[base][0]), int(env.sim.scene.model.jnt_qposadr[base][0])
        linear, angular = env.sim.qvel[:, first : first + 6].split(3, dim=1)
        quat = env.sim.qpos[:, pose + 3 : pose + 7]
        free = {"base velocity": quat_rotate_inverse(quat, linear), "base angular velocity": angular}
    command = steerable(env.task)
    readings = {
        "joint positions": env.sim.qpos[:, [joint["qpos"] for joint in joints]],
        "joint velocities": env.sim.qvel[:, [joint["qvel"] for joint in joints]],
        "last action": env.task.actions,
        "command x y z": None if command is None else command.value,
        **free,
    }
    observed: Any = env.task.observe()
    terms, checked = observed["policy"], 0
    for name in terms:
        if (expected := readings.get(env.task.sources.get(name, "task"))) is not None:
            assert torch.allclose(terms[name], expected, atol=1e-5), name
            checked += 1
    assert checked > 0


@pytest.mark.parametrize(
    ("source", "origin"),
    [
        ("sensor robot/ang_vel", None),
        ("sensor robot/torso_up", None),
        ("sensor robot/FR_pos", "framepos"),
        ("sensor robot/FR_vel", "framelinvel"),
        ("sensor robot/geom:FR_foot_collision/ground", "contact"),
        ("simulator friction", "friction"),
        ("base angular velocity", None),
        ("last action", None),
        ("task", None),
    ],
)
def test_origin_of_a_source(monkeypatch, source, origin):
    env = started("Go1Velocity")
    monkeypatch.setattr(type(env.task), "sources", {"joint_pos": source})
    assert simulator_only(env) == ({} if origin is None else {"joint_pos": origin})


def test_unknown_sensor_is_an_error(monkeypatch):
    env = started("Go1Velocity")
    monkeypatch.setattr(type(env.task), "sources", {"ang_vel": "sensor robot/ang_vell"})
    with pytest.raises(TaskError) as error:
        simulator_only(env)
    assert error.value.hint == "Did you mean 'robot/ang_vel'?"


def test_advice_names_the_settings():
    line = advice("Go1Velocity", ["lin_vel", "heights"])
    assert line.endswith("task=Go1Velocity task.observations.lin_vel.used=false task.observations.heights.used=false")


@pytest.mark.parametrize(("joint", "origin"), [("", None), ("<freejoint/>", "framepos")])
def test_joint_angles_give_positions_on_a_fixed_base(joint, origin):
    model = mujoco.MjModel.from_xml_string(f"""<mujoco><worldbody><body name="base">{joint}<geom size="1"/>
        <body name="tip"><joint/><geom size="1"/></body></body></worldbody>
        <sensor><framepos name="tip" objtype="body" objname="tip"/></sensor></mujoco>""")
    assert _origin(model, "sensor tip") == origin
