"""Tests of `sim=mujoco`: threads, memory per world, full buffers."""

from __future__ import annotations

import warnings

import mujoco
import pytest
import torch

from helpers.scenes import FEET, ant_scene, arm_scene, ball_scene, everywhere, make, only, randomize_ants, scene_with


def run(**changes) -> dict[str, torch.Tensor]:
    sim = make("mujoco", ant_scene(), 12, **changes)
    ant = sim.articulation("ant")
    feet, bodies = ant.contacts(FEET), ant.bodies(FEET)
    randomize_ants([ant])
    sim.refresh()
    for i in range(4):
        sim.step(2)
        sim.reset(only(sim, i))
        # a persistent batch still holds the velocity stage of the state that this overwrites
        ant.set_state(only(sim, i, i + 4), joint_vel=torch.full((12, 8), 0.5))
        if i % 2:
            sim.refresh()
    values = {"qpos": sim.qpos, "qvel": sim.qvel, "force": feet.force, "torque": feet.torque}
    values |= {"pos": bodies.pos, "lin_vel": bodies.lin_vel}
    values = {name: value.clone() for name, value in values.items()}
    sim.close()
    return values


@pytest.mark.parametrize(
    "changes", [{"num_threads": 2}, {"num_threads": 5}, {"persistent": False}, {"persistent": False, "num_threads": 3}]
)
def test_thread_count_and_persistence_do_not_change_results(changes):
    reference = run(num_threads=1, persistent=True)
    other = run(**changes)
    for name, value in reference.items():
        assert torch.equal(value, other[name]), name


def test_thread_count_is_capped_at_the_number_of_worlds():
    assert make("mujoco", ball_scene(), 3, num_threads=64).num_threads == 3


def test_failed_mujoco_allocation_raises_memory_error(monkeypatch):
    sim = make("mujoco", ball_scene(), 1)

    def fail(field: str):  # the binding's error for a failed allocation
        raise RuntimeError("Caught an unknown exception!")

    monkeypatch.setattr(sim._batch, "bind", fail)
    with pytest.raises(MemoryError, match="allocate xpos"):
        sim.derived("xpos")


def test_overflow_is_reported_until_reset():
    boxes = "".join(f'<geom type="box" size="0.05 0.05 0.05" pos="{0.2 * i} 0 0"/>' for i in range(24))
    body = f'<body name="row" pos="0 0 0.04"><freejoint/>{boxes}</body>'
    scene = scene_with(100, ground=True, row=f"<mujoco><worldbody>{body}</worldbody></mujoco>")
    scene.spec.memory = 60_000  # bytes: not enough for 96 contacts
    sim = make("mujoco", scene, 3)
    assert not sim.overflow.any()
    sim.step(1)
    assert sim.overflow.all()
    sim.reset(only(sim, 1))
    assert sim.overflow.tolist() == [True, False, True]


def test_simulator_leaves_the_scenes_flags_unchanged():
    scene = ball_scene()
    make("mujoco", scene, 1)
    # MuJoCo Warp refuses this flag, so only the simulator's copy of the model may have it
    assert not scene.model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_AUTORESET


def test_runaway_world_causes_no_warning():
    sim = make("mujoco", ball_scene(), 2)
    ball = sim.articulation("ball")
    ball.bodies(["ball"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ball.set_state(everywhere(sim), root_lin_vel=torch.full((2, 3), 3e38))
        sim.step(4)
        sim.refresh()
    assert sim.diverged.all()


def test_derived_quantities_requested_late_are_up_to_date():
    sim = make("mujoco", ant_scene(), 4)
    ant = sim.articulation("ant")
    randomize_ants([ant])
    sim.step(3)
    torso = ant.bodies(["torso"])
    torch.testing.assert_close(torso.pos[:, 0], ant.root_pos)


def test_steps_equal_plain_mujoco_bit_for_bit():
    scene = arm_scene()
    sim = make("mujoco", scene, 2)
    arm = sim.articulation("arm")
    start, speed = arm.joint_limits[:, 0].nan_to_num(neginf=0.1), torch.tensor([-1.0, 2.0])
    sim.reset(everywhere(sim))
    arm.set_state(everywhere(sim), joint_pos=start.expand(2, 2), joint_vel=speed.expand(2, 2))
    data = mujoco.MjData(scene.model)
    data.qpos[:], data.qvel[:] = start.double().numpy(), speed.double().numpy()
    push = torch.tensor([-1.0, 0.7, 1.0])  # into one limit of the shoulder, then into the other
    for step in range(600):
        control = push[step // 200].expand(2, 1)
        arm.actuate(control)
        sim.step(1)
        data.ctrl[:] = control[0].double().numpy()
        mujoco.mj_step(scene.model, data)
        assert sim.state_dict()["state"][0, 1:5].tolist() == [*data.qpos, *data.qvel], step
