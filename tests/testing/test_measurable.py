"""Tests of `gpusim_rl.testing.measurable`: which observation terms a robot can measure."""

from __future__ import annotations

from typing import Any

import mujoco
import pytest

from gpusim_rl import make_env
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import TaskError
from gpusim_rl.testing.measurable import _origin, advice, simulator_only


def started(task: str, **settings: Any) -> VecEnv:
    env = make_env(task, num_envs=2, sim="mujoco", **settings)
    assert isinstance(env, VecEnv)
    env.reset()
    return env


@pytest.mark.parametrize(
    ("task", "settings", "expected"),
    [
        ("Go1Velocity", {}, {"lin_vel": "velocimeter"}),
        ("Go1Velocity", {"task.terrain": "rough"}, {"lin_vel": "velocimeter", "heights": "ground heights"}),
        ("Go1Velocity", {"task.observations.lin_vel.used": False}, {}),
        ("Anymal", {}, {"lin_vel": "base velocity"}),
        ("Cartpole", {}, {}),
        ("Ant", {}, {}),  # declares no sources
    ],
)
def test_terms_that_only_a_simulator_provides(task, settings, expected):
    assert simulator_only(started(task, **settings)) == expected


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
