"""Tests of mocap bodies: moved by a task, they drag welded bodies."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from gpusim_rl.env.nan_guard import NanGuard, put_state
from gpusim_rl.errors import TaskError
from gpusim_rl.sim.interface import put_pose
from helpers.scenes import everywhere, make, only, scene_with

PUSHER = """
<mujoco><worldbody>
<body name="arm"><joint name="swing" axis="0 1 0"/><geom size=".05" pos="0 0 -.3" contype="0" conaffinity="0"/></body>
<body name="marker" mocap="true" pos="0 0 2"><geom size=".01" contype="0" conaffinity="0"/></body>
<body name="hand" mocap="true" pos=".5 0.1 .5" quat="1 0 1 0"><geom size=".03" contype="0" conaffinity="0"/></body>
<body name="cube" pos=".5 0.1 .5" quat="1 0 1 0"><freejoint/><geom type="box" size=".04 .05 .06" mass=".2"/></body>
</worldbody>
<equality><weld body1="hand" body2="cube"/></equality></mujoco>
"""
PLACES = torch.tensor([[0.5, 0.1, 0.5], [0.7, 0.0, 0.9], [0.2, -0.3, 0.4]])
TURNS = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 0.2, 0.8, 0.0], [1.0, 0.0, 1.2, 0.3]]))


@pytest.fixture(params=["mujoco", "mjwarp", "newton"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "newton":
        pytest.importorskip("newton")
    return request.param


def pusher(backend: str, text: str = PUSHER, **settings: Any) -> Any:
    scene = scene_with(500, pusher=text)
    return make(backend, scene, 3, **settings)


def test_mocap_weld_drags_an_object_as_in_mujoco(backend):
    sim = pusher(backend)
    hand, cube = sim.articulation("pusher").mocap("hand"), sim.articulation("pusher/cube")
    assert torch.equal(hand.pos, PLACES[:1].expand(3, 3))
    hand.set(everywhere(sim), pos=PLACES, quat=TURNS)
    for _ in range(10):
        sim.step(5)
    for world in range(3):
        data = mujoco.MjData(sim.scene.model)
        data.mocap_pos[1], data.mocap_quat[1] = PLACES[world], TURNS[world]
        for _ in range(50):
            mujoco.mj_step(sim.scene.model, data)
        np.testing.assert_allclose(sim.qpos[world], data.qpos, atol=2e-3)
    assert (cube.root_pos - PLACES).norm(dim=1).max() < 0.15 and (cube.root_pos[1] - PLACES[0]).norm() > 0.3


def test_moving_a_mocap_body_keeps_the_float64_state():
    """MuJoCo's state is float64; a moved body must not round it to the task's float32."""
    sim = pusher("mujoco")
    hand = sim.articulation("pusher").mocap("hand")
    sim.articulation("pusher").bodies(["arm"])  # so that `refresh` writes too
    model, data = sim.scene.model, mujoco.MjData(sim.scene.model)
    data.qpos[:], data.mocap_pos[:], data.mocap_quat[:] = sim.qpos[0], sim.mocap_pos[0], sim.mocap_quat[0]
    for k in range(200):
        pos = torch.tensor([0.5 + 0.3 * np.sin(0.05 * k), 0.1, 0.7 + 0.2 * np.cos(0.03 * k)])
        turn = torch.nn.functional.normalize(torch.tensor([1.0, 0.001 * k, 1.0, 0.0]), dim=0)
        hand.set(everywhere(sim), pos=pos.float().expand(3, 3), quat=turn.expand(3, 4))
        sim.refresh()
        sim.step(2)
        data.mocap_pos[1], data.mocap_quat[1] = pos.float(), turn
        mujoco.mj_step(model, data, 2)
    np.testing.assert_array_equal(sim.qpos, np.tile(data.qpos.astype(np.float32), (3, 1)))
    np.testing.assert_array_equal(sim.qvel, np.tile(data.qvel.astype(np.float32), (3, 1)))


def test_mocap_pose_is_per_world_and_restored_by_reset(backend):
    sim = pusher(backend)
    robot = sim.articulation("pusher")
    hand, marker, bodies = robot.mocap("hand"), robot.mocap("marker"), robot.bodies(["hand", "marker"])
    hand.set(only(sim, 1, 2), pos=PLACES)
    marker.set(only(sim, 2), pos=marker.default_pos + torch.ones(3, 3))
    sim.refresh()
    expected = torch.stack([PLACES[0], PLACES[1], PLACES[2]])
    torch.testing.assert_close(bodies.pos[:, 0], expected)
    torch.testing.assert_close(bodies.pos[:, 1], torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 2.0], [1.0, 1.0, 3.0]]))
    sim.step(3)
    torch.testing.assert_close(bodies.pos[:, 0], expected)
    sim.reset(only(sim, 2))
    sim.refresh()
    torch.testing.assert_close(bodies.pos[:, 0], torch.stack([PLACES[0], PLACES[1], PLACES[0]]))
    assert torch.equal(marker.pos[2], marker.default_pos)
    torch.testing.assert_close(hand.quat, hand.default_quat.expand(3, 4))
    sim.step(3)
    torch.testing.assert_close(bodies.pos[2, 0], PLACES[0])


def test_state_dict_restores_mocap_poses(backend):
    sims = [pusher(backend) for _ in range(2)]
    hands = [sim.articulation("pusher").mocap("hand") for sim in sims]
    hands[0].set(only(sims[0], 0, 1), pos=PLACES.flip(0))
    sims[0].step(4)
    hands[0].set(only(sims[0], 2), quat=TURNS.flip(0))  # not yet in the simulator
    sims[1].load_state_dict(sims[0].state_dict())
    for sim in sims:
        sim.step(4)
    assert torch.equal(hands[0].pos, hands[1].pos) and torch.equal(hands[0].quat, hands[1].quat)
    assert torch.equal(sims[0].qpos, sims[1].qpos)


def test_state_dict_without_moved_worlds_is_loaded():
    sims = [pusher("mujoco") for _ in range(2)]
    hands = [sim.articulation("pusher").mocap("hand") for sim in sims]
    hands[0].set(only(sims[0], 0, 1), pos=PLACES.flip(0))
    state = sims[0].state_dict()
    del state["moved"]
    state["written"] |= only(sims[0], 0, 1)
    sims[1].load_state_dict(state)
    for sim in sims:
        sim.step(4)
    assert torch.equal(hands[0].pos, hands[1].pos) and torch.equal(sims[0].qpos, sims[1].qpos)


def test_pictures_and_dumps_include_mocap_poses(backend):
    sim = pusher(backend)
    assert sim.poses is sim.qpos, "mocap poses are added only once a task moves them"
    robot = sim.articulation("pusher")
    hand = robot.mocap("hand")
    guard = NanGuard(sim, 1)
    hand.set(everywhere(sim), pos=PLACES, quat=TURNS)
    model = sim.scene.model
    data = mujoco.MjData(model)
    put_pose(model, data, sim.poses[1].numpy())
    np.testing.assert_allclose(data.body("pusher/hand").xpos, PLACES[1], atol=1e-6)
    np.testing.assert_allclose(data.body("pusher/hand").xquat, TURNS[1], atol=1e-6)
    guard.before_step(torch.zeros(3, 1), torch.zeros(3, 1))
    guard.after_step(everywhere(sim) & only(sim, 1), torch.ones(3, dtype=torch.int64), only(sim))
    dump = guard.read()
    assert dump is not None
    again = pusher(backend)
    there = again.articulation("pusher").mocap("hand")
    put_state(again, dump["state"])
    torch.testing.assert_close(there.pos, PLACES[1].expand(3, 3))
    torch.testing.assert_close(there.quat, TURNS[1].expand(3, 4))
    hand.set(only(sim, 1), pos=torch.full((3, 3), torch.nan))
    assert sim.bad_inputs.tolist() == [False, True, False]


def test_sensors_follow_mocap_bodies(backend):
    sensor = '<sensor><framepos name="place" objtype="body" objname="hand"/></sensor></mujoco>'
    sim = pusher(backend, PUSHER.replace("</mujoco>", sensor))
    robot = sim.articulation("pusher")
    place = robot.sensor("place")
    robot.mocap("hand").set(everywhere(sim), pos=PLACES)
    sim.refresh()
    torch.testing.assert_close(place.data, PLACES)


def test_articulation_root_can_be_a_mocap_body(backend):
    text = '<mujoco><worldbody><body name="goal" mocap="true" pos="0 0 1"/></worldbody></mujoco>'
    sim = make(backend, scene_with(500, pusher=PUSHER, goal=text), 3)
    goal = sim.articulation("goal")
    mocap = goal.mocap("goal")
    mocap.set(only(sim, 0), pos=PLACES, quat=TURNS)
    torch.testing.assert_close(goal.root_pos, torch.stack([PLACES[0], *torch.tensor([[0.0, 0.0, 1.0]] * 2)]))
    torch.testing.assert_close(goal.root_quat[0], TURNS[0])
    with pytest.raises(TaskError, match=r"Try \.mocap\('goal'\)\.set"):
        goal.set_state(everywhere(sim), root_pos=PLACES)


def test_invalid_mocap_calls_are_rejected():
    sim = pusher("mujoco")
    robot = sim.articulation("pusher")
    with pytest.raises(TaskError, match=r"'pusher/arm' .*mocap.*pusher/hand"):
        robot.mocap("arm")
    with pytest.raises(TaskError, match=r"'hend'.* mean 'hand'"):
        robot.mocap("hend")
    with pytest.raises((TaskError, TypeCheckError), match="pos"):  # TypeCheckError if jaxtyping checks shapes
        robot.mocap("hand").set(everywhere(sim), pos=torch.zeros(3))
