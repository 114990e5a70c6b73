"""Tests of the contract of `gpusim_rl.sim.Sim` on every simulator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import mujoco
import pytest
import torch

from gpusim_rl.errors import TaskError
from gpusim_rl.sim import Scene, Sim
from gpusim_rl.sim.masks import check_shape
from helpers.raised import raises
from helpers.scenes import BALL, FEET, advance, ant_scene, arm_scene, ball_scene, everywhere, make, only, randomize_ants

# mujoco keeps an MjData per world, or one per thread
SIMS = ["mujoco", "mujoco-shared", "mjwarp", "newton"]


@pytest.fixture(params=SIMS, scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def shared(backend: str) -> Iterator[Callable[..., Sim]]:
    """Make one simulator per scene and number of worlds for all tests, and reset it."""
    made: dict[object, Sim] = {}

    def get(make_scene: Callable[[], Scene], num_envs: int) -> Sim:
        if (make_scene, num_envs) not in made:
            made[make_scene, num_envs] = make(backend, make_scene(), num_envs)
        sim = made[make_scene, num_envs]
        sim.reset(everywhere(sim))
        sim.refresh()
        return sim

    yield get
    for sim in made.values():
        sim.close()


def snapshot(sim: Sim) -> dict[str, torch.Tensor]:
    """Return every quantity that a task could read of an Ant."""
    ant = sim.articulation("ant")
    feet, bodies = ant.contacts(FEET), ant.bodies(["torso", *FEET])
    values = {
        "qpos": sim.qpos,
        "joint_vel": ant.joint_vel,
        "root_lin_vel": ant.root_lin_vel,
        "root_ang_vel": ant.root_ang_vel,
        "pos": bodies.pos,
        "quat": bodies.quat,
        "lin_vel": bodies.lin_vel,
        "ang_vel": bodies.ang_vel,
        "force": feet.force,
        "torque": feet.torque,
        "wrench": feet.in_body_frame(),
    }
    return {name: value.clone() for name, value in values.items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], worlds=slice(None)):
    for name, value in left.items():
        assert torch.equal(value[worlds], right[name][worlds]), name


def test_written_state_is_read_back(shared):
    sim = shared(ant_scene, 3)
    ant = sim.articulation("ant")
    assert ant.joint_names[:2] == ["hip_1", "ankle_1"]
    assert ant.actuator_names == ant.joint_names
    before = ant.joint_pos.clone()
    quat = torch.nn.functional.normalize(torch.tensor([[0.9, 0.1, -0.2, 0.3]]), dim=1).expand(3, 4)
    spin = torch.tensor([[0.1, 0.2, 0.3]]).expand(3, 3)
    where = only(sim, 1)
    pos = {"root_pos": torch.full((3, 3), 2.0), "joint_pos": torch.full((3, 8), 0.1)}
    ant.set_state(where, root_quat=quat, root_ang_vel=spin, **pos)
    sim.refresh()
    assert torch.equal(ant.joint_pos[1], torch.full((8,), 0.1))
    assert torch.equal(ant.joint_pos[[0, 2]], before[[0, 2]])
    torch.testing.assert_close(ant.root_quat[1], quat[1])
    torch.testing.assert_close(ant.root_ang_vel[1], spin[1])
    assert (ant.root_ang_vel[[0, 2]] == 0).all()
    assert sim.qpos.shape == (3, 15)
    torch.testing.assert_close(ant.bodies(["torso"]).pos[1, 0], torch.full((3,), 2.0))
    ant.set_state(where, root_quat=quat, root_ang_vel_local=spin)
    assert torch.equal(ant.root_ang_vel_local[1], spin[1]) and (ant.root_ang_vel[[0, 2]] == 0).all()
    with raises(TaskError, got="both"):
        ant.set_state(where, root_ang_vel=spin, root_ang_vel_local=spin)


def test_angular_velocity_is_limited(backend):
    ball = mujoco.MjSpec.from_string(BALL)
    for limit in (None, 10.0):
        scene = Scene(physics_hz=200, gravity=0.0, max_angular_velocity=limit)
        scene.add("ball", ball.copy(), pos=(0, 0, 2))
        sim = make(backend, scene, 3)
        robot = sim.articulation("ball")
        body = robot.bodies(["ball"])
        spin = torch.tensor([[3.0, 0.0, 4.0], [0.0, 0.0, 0.0], [30.0, -40.0, 0.0]])
        velocity = torch.tensor([[0.1, 0.2, 0.3]]).expand(3, 3)
        robot.set_state(everywhere(sim), root_ang_vel=spin, root_lin_vel=velocity)
        for _ in range(2):  # a second step keeps the limited velocity
            sim.step(1)
            expected = spin if limit is None else spin * torch.tensor([[1.0], [1.0], [0.2]])
            torch.testing.assert_close(robot.root_ang_vel, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(body.ang_vel[:, 0], expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(robot.root_lin_vel, velocity, atol=1e-4, rtol=1e-4)


def test_settings_choose_integrator_and_cone():
    scene = ball_scene()
    make("mujoco", scene, 1, integrator="implicitfast", cone="elliptic")
    option = scene.model.opt
    assert (option.integrator, option.cone) == (mujoco.mjtIntegrator.mjINT_IMPLICITFAST, mujoco.mjtCone.mjCONE_ELLIPTIC)
    make("mujoco", scene, 1)
    assert scene.model.opt.cone == mujoco.mjtCone.mjCONE_ELLIPTIC, "an unset setting changed the scene"


def test_free_fall_follows_semi_implicit_euler(shared):
    sim = shared(ball_scene, 2)
    ball = sim.articulation("ball")
    ball.set_state(everywhere(sim), root_pos=torch.tensor([[0.0, 0.0, 50.0]]).expand(2, 3))
    sim.refresh()
    steps = 20
    sim.step(steps)
    # v_n = -g n dt and z_n = z_0 - g dt^2 n (n + 1) / 2
    assert ball.root_lin_vel[0, 2].item() == pytest.approx(-9.81 * steps * sim.dt, rel=1e-5)
    fallen = 9.81 * sim.dt**2 * steps * (steps + 1) / 2
    assert ball.root_pos[0, 2].item() == pytest.approx(50.0 - fallen, abs=2e-5)


def test_friction_brakes_and_spins_a_sliding_ball(shared):
    sim = shared(ball_scene, 2)
    ball = sim.articulation("ball")
    advance(sim, 400)
    ball.set_state(everywhere(sim), root_lin_vel=torch.tensor([[2.0, 0.0, 0.0]]).expand(2, 3))
    contact = ball.contacts(["ball"])
    sim.step(1)
    force, torque = contact.force[0, 0], contact.torque[0, 0]
    assert force[0] < -1.0
    # r x F with r = (0, 0, -radius)
    lever = torch.tensor([0.0, 0.0, -0.1])
    torch.testing.assert_close(torque, torch.linalg.cross(lever, force), atol=1e-2, rtol=1e-2)
    assert ball.root_ang_vel[0, 1] > 0.1


def test_wrenches_and_velocities_agree_with_body_poses(backend):
    sim = make(backend, ant_scene(), 64)
    ant = sim.articulation("ant")
    feet, bodies = ant.contacts(FEET), ant.bodies(FEET)
    torso = ant.bodies(["torso"])
    randomize_ants([ant])
    sim.refresh()
    # rotation matrices of the feet from their quaternions, by hand
    w, x, y, z = bodies.quat.clone().unbind(-1)
    sim.step(1)  # contact forces are of the state before the step
    assert (feet.force.norm(dim=-1) > 1.0).any()
    rows = [
        torch.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], dim=-1),
        torch.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)], dim=-1),
        torch.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], dim=-1),
    ]
    to_world = torch.stack(rows, dim=-2)
    local = feet.in_body_frame()
    for part, world in ((local[..., :3], feet.force), (local[..., 3:], feet.torque)):
        back = (to_world @ part[..., None])[..., 0]
        torch.testing.assert_close(back, world, atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(torso.pos[:, 0], ant.root_pos)
    torch.testing.assert_close(torso.lin_vel[:, 0], ant.root_lin_vel, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torso.ang_vel[:, 0], ant.root_ang_vel, atol=1e-4, rtol=1e-4)


def test_body_velocity_is_the_derivative_of_body_position(shared):
    sim = shared(arm_scene, 8)
    arm = sim.articulation("arm")
    lower = arm.bodies(["lower"])
    random = torch.Generator().manual_seed(0)
    arm.set_state(
        everywhere(sim),
        joint_pos=torch.rand(8, 2, generator=random),
        joint_vel=4.0 * torch.rand(8, 2, generator=random),
    )
    sim.refresh()
    # the central difference over two steps is exact to second order
    positions, velocities = [], []
    for _ in range(3):
        positions.append(lower.pos.clone())
        velocities.append(lower.lin_vel.clone())
        sim.step(1)
    slope = (positions[2] - positions[0]) / (2 * sim.dt)
    assert velocities[1].abs().max() > 0.5
    torch.testing.assert_close(slope, velocities[1], atol=0.05, rtol=0.02)


def test_motors_and_efforts_accelerate_joints(shared):
    sim = shared(arm_scene, 3)
    arm = sim.articulation("arm")
    rest = arm.joint_vel.clone()
    arm.actuate(torch.tensor([[0.0], [1.0], [0.0]]))
    arm.set_joint_effort(torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 0.0]]))
    sim.step(1)
    change = arm.joint_vel - rest
    assert change[1, 0] > change[0, 0]
    # gear 3 x control 1 is the same push as an effort of 3 N m
    torch.testing.assert_close(change[1], change[2], atol=1e-6, rtol=1e-5)
    sim.reset(everywhere(sim))
    sim.step(1)  # controls and efforts were cleared
    torch.testing.assert_close(arm.joint_vel[1], arm.joint_vel[0])
    torch.testing.assert_close(arm.joint_vel[2], arm.joint_vel[0])


def test_wrench_acts_at_the_centre_of_mass_until_reset(shared):
    sim = shared(ball_scene, 3)
    ball = sim.articulation("ball")
    body = ball.bodies(["ball"])
    sim.reset(everywhere(sim))
    ball.set_state(everywhere(sim), root_pos=torch.tensor([0.0, 0.0, 5.0]).expand(3, 3))
    sim.refresh()
    weight = 2.0 * 9.81
    force = torch.tensor([[0.0, 0.0, weight], [4.0, 0.0, weight], [0.0, 0.0, 0.0]])[:, None]
    torque = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.08, 0.0]])[:, None]
    body.apply_wrench(force, torque)
    advance(sim, 20)  # 0.1 s
    velocity = torch.tensor([[0.0, 0.0, 0.0], [0.2, 0.0, 0.0], [0.0, 0.0, -0.981]])
    torch.testing.assert_close(ball.root_lin_vel, velocity, atol=1e-4, rtol=0.0)
    inertia = 0.4 * 2.0 * 0.1**2
    assert ball.root_ang_vel[2, 1].item() == pytest.approx(0.1 * 0.08 / inertia, rel=1e-3)
    sim.reset(only(sim, 0))
    ball.set_state(only(sim, 0), root_pos=torch.tensor([0.0, 0.0, 5.0]).expand(3, 3))
    sim.refresh()
    advance(sim, 20)
    assert ball.root_lin_vel[0, 2].item() == pytest.approx(-0.981, abs=1e-4), "reset did not clear the wrench"
    assert ball.root_lin_vel[1, 0].item() == pytest.approx(0.4, abs=1e-4), "other worlds lost the wrench"


@pytest.mark.parametrize("backend", SIMS[:3], indirect=True)
def test_joint_effort_equals_actuator_force(backend):
    scene = arm_scene()
    scene.add_effort_sensors("arm")
    sim = make(backend, scene, 2)
    arm = sim.articulation("arm")
    sim.reset(everywhere(sim))
    arm.actuate(torch.tensor([[0.5], [-2.0]]))
    sim.step(1)
    # gear 3; controls are limited to [-1, 1]; the elbow has no motor
    torch.testing.assert_close(arm.joint_effort, torch.tensor([[1.5, 0.0], [-3.0, 0.0]]))


def test_masked_reset_leaves_other_worlds_alone(shared, backend):
    touched, untouched = shared(ant_scene, 6), make(backend, ant_scene(), 6)
    for sim in (touched, untouched):
        randomize_ants([sim.articulation("ant")])
        sim.refresh()
        snapshot(sim)  # all quantities are kept up to date from here
        sim.step(2)
    touched.reset(only(touched, 1, 4))
    touched.refresh()
    others = [0, 2, 3, 5]
    assert_equal(snapshot(touched), snapshot(untouched), others)
    torch.testing.assert_close(touched.qpos[1], touched.qpos[4])
    default = torch.tensor([0.0, 0.0, 0.75, 1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(touched.qpos[1, :7], default)
    for sim in (touched, untouched):
        sim.step(2)
    assert_equal(snapshot(touched), snapshot(untouched), others)


def test_contacts_are_of_the_last_step_and_zero_after_reset(shared):
    sim = shared(ball_scene, 3)
    ball = sim.articulation("ball")
    contact = ball.contacts(["ball"])
    advance(sim, 400)
    resting = contact.force.clone()
    weight = torch.tensor([0.0, 0.0, 2.0 * 9.81]).expand(3, 3)
    torch.testing.assert_close(resting[:, 0], weight, atol=0.05, rtol=0.0)
    torch.testing.assert_close(contact.torque[:, 0], torch.zeros(3, 3), atol=1e-3, rtol=0.0)
    sim.reset(only(sim, 1))
    into_the_ground = torch.tensor([[0.0, 0.0, 0.09]]).expand(3, 3)  # 1 cm
    ball.set_state(only(sim, 1, 2), root_pos=into_the_ground)
    sim.refresh()
    assert (contact.force[1] == 0).all() and (contact.in_body_frame()[1] == 0).all()
    assert torch.equal(contact.force[[0, 2]], resting[[0, 2]])
    sim.step(1)
    assert (contact.force[1:, 0, 2] > resting[1:, 0, 2] + 10.0).all()
    torch.testing.assert_close(contact.force[0], resting[0], atol=0.05, rtol=0.0)


def test_repeated_refresh_changes_nothing(shared, backend):
    once, often = shared(ant_scene, 6), make(backend, ant_scene(), 6)
    for sim in (once, often):
        randomize_ants([sim.articulation("ant")])
        sim.refresh()
        snapshot(sim)
    for _ in range(3):
        once.step(1)
        often.step(1)
        before = snapshot(often)
        often.refresh()
        assert_equal(before, snapshot(often))
    assert_equal(snapshot(once), snapshot(often))


def test_diverged_worlds_are_isolated_and_recover_at_reset(shared, backend, tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    sick, healthy = shared(ant_scene, 6), make(backend, ant_scene(), 6)
    for sim in (sick, healthy):
        randomize_ants([sim.articulation("ant")])
        sim.refresh()
        snapshot(sim)
        sim.step(1)
    ant, lost = sick.articulation("ant"), {1: "root_pos", 2: "joint_vel", 4: "root_lin_vel"}
    for world, field in lost.items():
        ant.set_state(only(sick, world), **{field: torch.full_like(getattr(ant, field), torch.nan)})
    for sim in (sick, healthy):
        sim.step(2)
    assert sick.diverged.tolist() == [world in lost for world in range(6)]
    assert not healthy.diverged.any()
    assert not sick.overflow.any()
    assert_equal(snapshot(sick), snapshot(healthy), [0, 3, 5])

    sick.reset(sick.diverged.clone())
    sick.refresh()
    fresh = snapshot(sick)
    assert all(value[[*lost]].isfinite().all() for value in fresh.values())
    healthy.reset(only(healthy, *lost))
    healthy.refresh()
    assert_equal(fresh, snapshot(healthy), [*lost])  # no trace of the NaN is left
    for sim in (sick, healthy):
        sim.step(3)
    assert not sick.diverged.any()
    assert_equal(snapshot(sick), snapshot(healthy), [*lost])

    assert os.listdir(tmp_path) == []  # no MUJOCO_LOG.TXT
    out, err = capfd.readouterr()
    assert "nan" not in (out + err).lower()
    assert "Warning" not in out + err


def test_runaway_world_is_reported_as_diverged(shared):
    sim = shared(ball_scene, 2)
    ball = sim.articulation("ball")
    ball.set_state(only(sim, 0), root_lin_vel=torch.full((2, 3), 1e20))
    sim.step(1)
    assert sim.diverged.tolist() == [True, False]
    sim.reset(sim.diverged.clone())
    sim.step(1)
    assert not sim.diverged.any()


def test_state_dict_continues_bit_for_bit(shared, backend, tmp_path: Path):
    sim, other = shared(ant_scene, 6), make(backend, ant_scene(), 6)
    for s in (sim, other):
        snapshot(s)
    ant = sim.articulation("ant")
    randomize_ants([ant])
    ant.set_joint_effort(torch.full((6, 8), 0.3))
    sim.refresh()
    for _ in range(5):
        sim.step(2)
    saved = sim.state_dict()
    torch.save(saved, tmp_path / "state.pt")
    there = snapshot(sim)

    def run_steps(s: Sim) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(1)
        for _ in range(5):
            s.articulation("ant").actuate(2.0 * torch.rand(6, 8, generator=random) - 1.0)
            s.step(2)
            s.reset(only(s, 3))
            s.refresh()
        return snapshot(s)

    first = run_steps(sim)
    for s, state in ((sim, saved), (other, torch.load(tmp_path / "state.pt", weights_only=True))):
        s.load_state_dict(state)
        assert_equal(there, snapshot(s))
        assert_equal(first, run_steps(s))


def test_unknown_names_are_reported():
    sim = make("mujoco", ball_scene(), 1)
    with pytest.raises(TaskError, match=r"no articulation 'dog'.*ball"):
        sim.articulation("dog")
    ball = sim.articulation("ball")
    with pytest.raises(TaskError, match=r"no body 'tail'.*ball"):
        ball.bodies(["tail"])
    arm = make("mujoco", arm_scene(), 1).articulation("arm")
    with pytest.raises(TaskError, match="no contact sensor"):
        arm.contacts(["lower"])


def test_two_articulations_are_independent(backend):
    scene = ball_scene()
    scene.add("second", mujoco.MjSpec.from_string(BALL), pos=(3.0, 0.0, 0.0))
    sim = make(backend, scene, 2)
    first, second = sim.articulation("ball"), sim.articulation("second")
    bodies = second.bodies(["ball"])
    assert second.default_root_pos.tolist() == [3.0, 0.0, 0.5]
    second.set_state(everywhere(sim), root_lin_vel=torch.tensor([[1.0, 0.0, 0.0]]).expand(2, 3))
    sim.refresh()
    sim.step(2)
    assert (first.root_lin_vel[:, 0] == 0).all()
    assert (second.root_lin_vel[:, 0] > 0.9).all()
    torch.testing.assert_close(bodies.pos[:, 0], second.root_pos)


WRONG_SHAPES = {
    "control-of-one-column": (
        lambda ant: ant.actuate(torch.zeros(4, 1)),
        {"key": "'ant'.actuate(): control", "got": [4, 1], "hint": "Try num_actions = 8 if each action is one control"},
    ),
    "joint-positions": (
        lambda ant: ant.set_state(torch.ones(4, dtype=torch.bool), joint_pos=torch.zeros(4, 1)),
        {"key": "'ant'.set_state(): joint_pos", "got": [4, 1]},
    ),
    "mask-of-one-env": (
        lambda ant: ant.set_state(torch.ones(1, dtype=torch.bool), root_pos=torch.zeros(1, 3)),
        {"key": "'ant'.set_state(): where", "expected": "a tensor of shape [4]", "got": [1]},
    ),
    "force": (
        lambda ant: ant.bodies(["torso", "front_left_foot"]).apply_wrench(torch.zeros(4, 1, 3)),
        {"expected": "a tensor of shape [4, 2, 3] for ['ant/torso', 'ant/front_left_foot']", "got": [4, 1, 3]},
    ),
}


@pytest.fixture(scope="module")
def four_ants() -> Sim:
    return make("mujoco", ant_scene(), 4)


@pytest.mark.parametrize("mistake", WRONG_SHAPES)
def test_wrong_shape_is_rejected_in_one_line(four_ants, mistake):
    write, fields = WRONG_SHAPES[mistake]
    with raises(TaskError, **fields) as error:
        write(four_ants.articulation("ant"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "got", "hint"),
    [
        (torch.zeros(3), [3], "Try .expand(4, 3) to use the same value in all envs"),
        (0.5, float, ""),
        (torch.zeros(4, 3, 1), [4, 3, 1], ""),
    ],
)
def test_check_shape_rejects_other_shapes_and_types(value, got, hint):
    with raises(TaskError, key="torque", expected="a tensor of shape [4, 3]", got=got, hint=hint):
        check_shape("torque", value, (4, 3))


def test_float32_joint_limits_are_within_the_models():
    scene = Scene(physics_hz=100)
    joint = '<joint name="j{}" range="{} {}" type="{}"/>'
    joints = [joint.format(i, -10 - 7.3 * i, 3.1 + i, ("hinge", "slide")[i % 2]) for i in range(8)]
    legs = "".join(f'<body>{joint}<geom size="0.1"/></body>' for joint in joints)
    scene.add("robot", mujoco.MjSpec.from_string(f"<mujoco><worldbody><body>{legs}</body></worldbody></mujoco>"))
    exact = torch.from_numpy(scene.model.jnt_range)
    low, high = make("mujoco", scene, 1).articulation("robot").joint_limits.double().unbind(dim=1)
    assert (low >= exact[:, 0]).all() and (high <= exact[:, 1]).all()
    torch.testing.assert_close(torch.stack([low, high], dim=1), exact, atol=0.0, rtol=1.2e-7)
    assert ((low > exact[:, 0]) & (exact[:, 0].float() < exact[:, 0])).any()  # some are not rounded to nearest


@pytest.mark.parametrize("backend", SIMS[:3], indirect=True)
@pytest.mark.parametrize("angle", [-61.0, -62.0])
def test_joint_that_starts_at_its_limit_moves_freely(backend, angle):
    joint = f'<joint name="j" ref="{angle}" range="{angle} 60"/>'
    body = f'<body>{joint}<geom size="0.1" pos="0.2 0 0"/></body>'
    scene = Scene(physics_hz=100, gravity=0.0)
    scene.add("arm", mujoco.MjSpec.from_string(f"<mujoco><worldbody><body>{body}</body></worldbody></mujoco>"))
    sim = make(backend, scene, 2)
    arm = sim.articulation("arm")
    assert arm.default_joint_pos.double().item() >= scene.model.jnt_range[0, 0]
    sim.reset(everywhere(sim))
    arm.set_state(everywhere(sim), joint_vel=torch.full((2, 1), -0.5))
    arm.set_state(only(sim, 1), joint_pos=arm.default_joint_pos.expand(2, 1))
    sim.step(1)
    torch.testing.assert_close(arm.joint_vel, torch.full((2, 1), -0.5), atol=1e-6, rtol=0.0)  # no limit acts yet
