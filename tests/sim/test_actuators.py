"""Tests of drives on joints against their equations, in every physics step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mujoco
import pytest
import torch

from gpusim_rl.env.properties import ActorProperties
from gpusim_rl.errors import TaskError
from gpusim_rl.export.card import actuator_rows
from gpusim_rl.export.scene_file import DC_MOTORS, needs
from gpusim_rl.sim import Articulation, Scene, Sim
from gpusim_rl.sim.actuators import control_names
from gpusim_rl.sim.legged import read_legged
from helpers.raised import message, raises
from helpers.scenes import ARM, advance, everywhere, make, only, scene_with

ROBOTS = Path(__file__).parents[1] / "helpers" / "robots"
INERTIA = 0.5  # kg m^2, of the driven joint
NUM = 3

DISC = f"""
<robot name="disc">
  <link name="base"/>
  <joint name="spin" type="continuous"><parent link="base"/><child link="disc"/><axis xyz="0 0 1"/></joint>
  <link name="disc">
    <inertial><mass value="1"/>
      <inertia ixx="{INERTIA}" ixy="0" ixz="0" iyy="{INERTIA}" iyz="0" izz="{INERTIA}"/></inertial>
  </link>
</robot>
"""

PINS = "<mujoco><worldbody><body name='hub'>{joints}</body></worldbody><actuator>{motors}</actuator></mujoco>"
PIN = (
    "<body><joint name='{0}' axis='0 0 1'/>"
    f"<inertial mass='1' pos='0 0 0' diaginertia='{INERTIA} {INERTIA} {INERTIA}'/></body>"
)


@pytest.fixture(params=["mujoco", "mjwarp"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def disc(tmp_path: Path) -> Path:
    (tmp_path / "disc.urdf").write_text(DISC)
    return tmp_path / "disc.urdf"


def driven(backend: str, file: Path, physics_hz: float = 1000.0, **drive: Any) -> tuple[Sim, Articulation]:
    scene = Scene(physics_hz)
    scene.add("disc", file)
    scene.add_actuators("disc", "*", **drive)
    sim = make(backend, scene, NUM)
    sim.reset(everywhere(sim))
    return sim, sim.articulation("disc")


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def test_servo_step_response_is_second_order(backend, disc):
    stiffness, damping = 50.0, 4.0
    sim, joint = driven(backend, disc, kind="position", stiffness=stiffness, damping=damping)
    joint.actuate(column(1.0, -0.5, 0.0))
    frequency = math.sqrt(stiffness / INERTIA)
    ratio = damping / (2.0 * math.sqrt(stiffness * INERTIA))
    damped = frequency * math.sqrt(1.0 - ratio**2)
    errors = []
    for step in range(1, 1001):
        sim.step(1)
        t = step * sim.dt
        swing = math.cos(damped * t) + ratio / math.sqrt(1.0 - ratio**2) * math.sin(damped * t)
        expected = (1.0 - math.exp(-ratio * frequency * t) * swing) * column(1.0, -0.5, 0.0)
        errors.append((joint.joint_pos - expected).abs().max())
    assert max(errors) < 0.01  # of a step of 1 rad, over the whole second
    assert joint.joint_pos[0, 0] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("drive", "control", "steps", "factor", "approached"),
    [
        ({"kind": "velocity", "damping": 2.0}, (3.0, -1.0, 0.0), 250, 1.0 - math.exp(-0.5 / INERTIA), (3.0, -1.0, 0.0)),
        (
            {"kind": "torque", "effort_limit": 2.0, "armature": 0.3},
            *((1.0, -5.0, 2.0), 100, 0.1 / (INERTIA + 0.3), (1.0, -2.0, 2.0)),
        ),
        (
            {"kind": "position", "stiffness": 100.0, "effort_limit": {"sp*": 3.0}},
            *((10.0, -10.0, 0.01), 1, 0.001 / INERTIA, (3.0, -3.0, 1.0)),
        ),
    ],
    ids=["velocity", "torque", "position"],
)
def test_drive_accelerates_within_its_limits(backend, disc, drive, control, steps, factor, approached):
    sim, joint = driven(backend, disc, **drive)
    assert drive["kind"] != "torque" or joint.control_limits.tolist() == [[-2.0, 2.0]]
    joint.actuate(column(*control))
    advance(sim, steps)
    rtol = 0.01 if drive["kind"] == "velocity" else 1e-4
    torch.testing.assert_close(joint.joint_vel, factor * column(*approached), rtol=rtol, atol=1e-6)


def test_dc_motor_follows_its_torque_speed_line(backend, disc):
    no_load, stall, load = 10.0, 5.0, -2.0
    sim, joint = driven(backend, disc, 200.0, kind="dc_motor", velocity_limit=no_load, stall_effort=stall)
    assert joint.control_limits.tolist() == [[-1.0, 1.0]]
    voltage = column(1.0, 0.5, -3.0)  # clipped to the supply
    joint.actuate(voltage)
    advance(sim, 2500)  # 12 of its time constants
    torch.testing.assert_close(joint.joint_vel, no_load * voltage.clamp(-1, 1), rtol=1e-3, atol=1e-3)
    joint.set_joint_effort(torch.full((NUM, 1), load))
    advance(sim, 2500)
    torch.testing.assert_close(joint.joint_vel, no_load * (voltage.clamp(-1, 1) + load / stall), rtol=1e-3, atol=1e-3)


def efforts(sim: Sim, joint: Articulation, speeds: torch.Tensor) -> torch.Tensor:
    """Return the drive's effort at these speeds, from the change of speed in a physics step."""
    joint.set_state(everywhere(sim), joint_pos=torch.zeros(NUM, 1), joint_vel=speeds)
    sim.step(1)
    return (joint.joint_vel - speeds) * INERTIA / sim.dt


@pytest.mark.parametrize("kind", ["position", "torque"])
def test_velocity_limit_clips_effort_to_the_dc_motor_line(backend, disc, kind):
    # Like Isaac Lab's DCMotor: clipped to stall (+-1 - v / limit), then to the effort limit.
    limit, stall, most = 8.0, 6.0, 4.0
    settings = {"stiffness": 100.0, "damping": 0.5} if kind == "position" else {}
    sim, joint = driven(
        backend, disc, kind=kind, velocity_limit=limit, stall_effort=stall, effort_limit=most, **settings
    )
    for speeds in (column(0.0, 4.0, 6.0), column(8.0, 10.0, -4.0), column(-8.0, -9.0, 2.0)):
        joint.actuate(torch.full((NUM, 1), 100.0))
        line = stall * (1.0 - speeds / limit)
        torch.testing.assert_close(efforts(sim, joint, speeds), line.clamp(-most, most), rtol=2e-3, atol=5e-3)
    joint.actuate(column(0.02, 0.02, 0.02))  # within the line the servo's effort is unchanged
    speeds = column(0.0, 1.0, -1.0)
    asked = 100.0 * 0.02 - 0.5 * speeds if kind == "position" else torch.full((NUM, 1), 0.02)
    torch.testing.assert_close(efforts(sim, joint, speeds), asked, rtol=2e-3, atol=5e-3)


def test_reset_discards_delayed_controls(backend, disc):
    sim, joint = driven(backend, disc, kind="torque", delay=0.005)
    joint.actuate(column(1.0, 1.0, 1.0))
    advance(sim, 10)
    sim.reset(only(sim, 1))
    joint.actuate(column(-2.0, -2.0, -2.0))
    before = joint.joint_vel.clone()
    sim.step(1)
    torch.testing.assert_close((joint.joint_vel - before) * INERTIA / sim.dt, column(1.0, -2.0, 1.0), rtol=1e-3, atol=0)


def test_state_dict_holds_delayed_controls(backend, disc):
    (sim, joint), (other, copy) = (driven(backend, disc, kind="torque", delay=0.005) for _ in range(2))
    joint.actuate(column(1.0, 2.0, 3.0))
    advance(sim, 3)
    joint.actuate(column(-1.0, 0.0, 1.0))
    advance(sim, 3)
    other.load_state_dict(sim.state_dict())
    for one, drive in ((sim, joint), (other, copy)):
        drive.actuate(column(5.0, 5.0, 5.0))
        advance(one, 4)
    assert torch.equal(joint.joint_vel, copy.joint_vel)


def write(sim: Sim, name: str, *values: float) -> None:
    [quantity] = ActorProperties(sim, "disc").quantities("dof_properties", name, None)
    quantity.write(column(*values), everywhere(sim))


@pytest.mark.parametrize("motor", [False, True])
def test_stiffness_damping_and_effort_are_per_world(backend, disc, motor):
    line = {"velocity_limit": 1000.0, "stall_effort": 50.0} if motor else {}
    sim, joint = driven(backend, disc, kind="position", stiffness=10.0, damping=1.0, effort_limit=4.0, **line)
    write(sim, "stiffness", 10.0, 20.0, 50.0)
    write(sim, "damping", 1.0, 2.0, 0.0)
    joint.actuate(torch.full((NUM, 1), 0.1))
    speeds = column(0.5, 0.5, 0.5)
    expected = column(1.0 - 0.5, 2.0 - 1.0, 5.0).clamp(max=4.0)
    torch.testing.assert_close(efforts(sim, joint, speeds), expected, rtol=3e-3, atol=3e-3)
    write(sim, "effort", 0.2, 4.0, 4.5)
    expected = column(0.2, 1.0, 4.5)
    torch.testing.assert_close(efforts(sim, joint, speeds), expected, rtol=3e-3, atol=3e-3)


def test_dc_motor_effort_scales_its_stall_effort(disc):
    sim, joint = driven("mujoco", disc, kind="dc_motor", velocity_limit=10.0, effort_limit=4.0)
    write(sim, "effort", 4.0, 2.0, 8.0)
    joint.actuate(torch.ones(NUM, 1))
    speeds = column(5.0, 5.0, 5.0)
    torch.testing.assert_close(efforts(sim, joint, speeds), column(2.0, 1.0, 4.0), rtol=1e-3, atol=1e-3)


def test_velocity_drive_damping_is_per_world(disc):
    sim, joint = driven("mujoco", disc, kind="velocity", damping=2.0)
    write(sim, "damping", 2.0, 1.0, 0.0)
    joint.actuate(torch.ones(NUM, 1))
    torch.testing.assert_close(efforts(sim, joint, torch.zeros(NUM, 1)), column(2.0, 1.0, 0.0), rtol=1e-3, atol=1e-6)


def test_delay_is_per_world(backend, disc):
    sim, joint = driven(backend, disc, 200.0, kind="torque", max_delay=0.04)
    write(sim, "delay", 0.0, 0.012, 0.038)
    torques = []
    for step in range(10):
        before = joint.joint_vel.clone()
        joint.actuate(torch.full((NUM, 1), float(step + 1)))
        sim.step(1)
        torques.append((joint.joint_vel - before)[:, 0] * INERTIA / sim.dt)
    found = torch.stack(torques)
    for world, steps in enumerate((0, 3, 8)):
        expected = torch.tensor([max(1.0, step + 1.0 - steps) for step in range(10)])
        torch.testing.assert_close(found[:, world], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("source", ["param", "file"])
@pytest.mark.parametrize(
    ("backend", "physics_hz"), [*(("mujoco", hz) for hz in (120, 250, 333, 1000)), ("mjwarp", 250)]
)
def test_delay_of_k_physics_steps_is_exact(backend, physics_hz, source):
    steps = torch.arange(9)
    if source == "param":
        scene = Scene(physics_hz, gravity=0.0)
        scene.add("disc", mujoco.MjSpec.from_string(PINS.format(joints=PIN.format(0), motors="")))
        scene.add_actuators("disc", "*", kind="torque", max_delay=8.0 / physics_hz)
        sim = make(backend, scene, 9)
        sim.param("actuator_delay", "disc").set((steps * (1.0 / physics_hz))[:, None], everywhere(sim))
    else:
        motors = "".join(f'<motor joint="{k}" delay="{k / physics_hz!r}" nsample="{k + 1}"/>' for k in range(1, 9))
        scene = Scene(physics_hz, gravity=0.0)
        text = PINS.format(joints="".join(map(PIN.format, range(1, 9))), motors=motors)
        scene.add("disc", mujoco.MjSpec.from_string(text))
        sim, steps = make(backend, scene, 1), steps[1:]
    disc = sim.articulation("disc")
    shape = (sim.num_envs, len(disc.actuator_names))
    for _ in range(700):  # rounding errors of the time add up
        sim.step(1)
    for number in range(60):
        before = disc.joint_vel.clone()
        disc.actuate(torch.full(shape, number * 1e-3))
        sim.step(1)
        found = ((disc.joint_vel - before) * INERTIA * physics_hz * 1e3).flatten()
        if number > 8:
            assert (number - found).round().int().tolist() == steps.tolist(), number


def test_drive_values_match_joints_by_name_and_pattern():
    scene = Scene(physics_hz=500)
    scene.add("dog", ROBOTS / "quadruped.urdf", pos=(0.0, 0.0, 0.45), fixed_base=False)
    scene.add_actuators(
        "dog",
        ["*_hip", "*_thigh"],
        kind="position",
        stiffness={"*_hip": 40.0, "*_thigh": 60.0},
        damping=2.0,
        armature=0.01,
        friction={"*_hip": 0.2, "front_*_thigh": 0.1, "rear_*_thigh": 0.0},
    )
    scene.add("other", mujoco.MjSpec.from_string(ARM), pos=(5.0, 0.0, 0.0))
    scene.add_actuators("dog", "*_knee", kind="position", stiffness=80.0, effort_limit=25.0)
    sim = make("mujoco", scene, 2)
    dog, model = sim.articulation("dog"), scene.model
    assert dog.actuator_names[:3] == ["front_left_hip", "front_left_thigh", "front_right_hip"]
    assert len(dog.actuator_names) == 12 and dog.actuator_names[8:] == [
        f"{end}_{side}_knee" for end in ("front", "rear") for side in ("left", "right")
    ]
    for name, stiffness, effort, armature, friction in (
        ("front_left_hip", 40, 30, 0.01, 0.2),
        ("rear_left_thigh", 60, 30, 0.01, 0.0),
        ("front_right_thigh", 60, 30, 0.01, 0.1),
        ("rear_right_knee", 80, 25, 0.0, 0.0),
    ):
        actuator, joint = model.actuator(f"dog/{name}"), model.joint(f"dog/{name}")
        assert actuator.gainprm[0] == stiffness and actuator.biasprm[1] == -stiffness
        assert actuator.forcerange.tolist() == [-effort, effort]  # the file's, unless overridden
        assert (joint.armature[0], joint.frictionloss[0]) == (armature, friction)
    # The dog's actuators are not contiguous: the other robot's actuator is between them.
    dog.actuate(torch.arange(12.0).expand(2, 12))
    sim.articulation("other").actuate(torch.full((2, 1), 0.5))
    assert sim.ctrl[0].tolist() == [*range(8), 0.5, *range(8, 12)]  # type: ignore[attr-defined]


def test_actuator_with_two_targets_has_two_controls(backend):
    # The servo of MuJoCo's DC motor may take a position and a velocity.
    spec = mujoco.MjSpec.from_string(ARM)
    servo = spec.add_actuator(name="elbow", target="elbow", trntype=mujoco.mjtTrn.mjTRN_JOINT)
    servo.set_to_dcmotor(motorconst=[0.1, 0.1], resistance=1.0, controller=[5.0, 0, 1.0, 0, 0, 0], ctrlspec=3)
    scene = Scene(500, gravity=0.0)
    scene.add("arm", spec)
    sim = make(backend, scene, 2)
    arm = sim.articulation("arm")
    assert arm.actuator_names == ["shoulder", "elbow/0", "elbow/1"] and arm.control_limits.shape == (3, 2)
    sim.param("actuator_gear", "arm")
    sim.param("body_mass", "arm")
    arm.actuate(torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.4, 0.0]]))
    advance(sim, 50)
    assert arm.joint_pos[0, 1] == pytest.approx(0.0, abs=1e-6) and arm.joint_pos[1, 1] > 0.1


def test_two_control_actuator_shifts_later_indices():
    spec = mujoco.MjSpec.from_string(
        """<mujoco><worldbody><body name="torso" pos="0 0 1"><freejoint/><geom size="0.1"/>
        <body name="a_foot"><joint name="a"/><geom size="0.1" pos="0 0.2 -0.9"/></body>
        <body name="b_foot"><joint name="b"/><geom size="0.1" pos="0 -0.2 -0.9"/></body></body></worldbody>
        <actuator><dcmotor name="a" joint="a" motorconst="0.1 0.1" resistance="1" controller="5 0 1 0 0 0"
        input="pos vel"/><motor name="b" joint="b" ctrlrange="-7 7" gear="3"/></actuator></mujoco>"""
    )
    scene = scene_with(500, robot=spec)
    model = scene.model
    assert control_names(model) == [("robot/a/0", 0), ("robot/a/1", 0), ("robot/b", 1)]
    assert needs(model) == DC_MOTORS
    rows = actuator_rows(model)
    assert [(row["name"], row["joint"]) for row in rows] == [
        ("robot/a/0", "robot/a"),
        ("robot/a/1", "robot/a"),
        ("robot/b", "robot/b"),
    ]
    assert [row.get("input") for row in rows] == ["position", "velocity", None]
    assert [row["control_range"] for row in rows] == [None, None, [-7.0, 7.0]] and rows[2]["gear"] == 3.0
    assert read_legged(scene, "robot").motors["b"][1] == 21.0
    sim = make("mujoco", scene, 2)
    (effort,) = ActorProperties(sim, "robot").quantities("dof_properties", "effort", ["b"])
    assert effort.default.tolist() == [21.0]


@pytest.mark.parametrize(
    ("arguments", "key", "word"),
    [
        ({"joints": "shouldr"}, "", "mean 'shoulder'"),
        ({"joints": ["elbow", "*_hip"]}, "", "'*_hip'"),
        ({"joints": ["elbow", "left*"]}, "", "'left_finger' already"),
        ({"kind": "positon"}, "", "mean 'position'"),
        ({"stiffness": None}, "", "requires stiffness"),
        ({"kind": "torque"}, "", "not support stiffness"),
        ({"kind": "dc_motor", "velocity_limit": 3.0}, "", "try kind='position'"),
        ({"kind": "dc_motor", "stiffness": None}, "", "requires velocity_limit"),
        ({"stiffness": -1.0}, ": stiffness of joint 'elbow'", "got -1.0"),
        ({"damping": math.nan}, ": damping of joint 'elbow'", "got nan"),
        ({"effort_limit": 0.0}, ": effort_limit of joint 'elbow'", "positive"),
        ({"delay": 0.02, "max_delay": 0.01}, ": joint 'elbow'", "max_delay (0.01 s)"),
        ({"stiffness": {"elbw": 3.0}}, "", "mean 'elbow'"),
        ({"stiffness": {"*": 3.0, "elbow": 4.0}}, ": stiffness", "both '*' and 'elbow'"),
        ({"joints": ["elbow", "shoulder"], "stiffness": {"elbow": 3.0}}, ": stiffness", "shoulder"),
        ({"stall_effort": 3.0}, ": joint 'elbow'", "requires velocity_limit"),
        ({"name": "leg"}, "", "Available: arm"),
    ],
)
def test_invalid_drive_is_rejected_in_one_line(arguments, key, word):
    scene = scene_with(100, arm=ROBOTS / "arm.urdf")
    scene.add_actuators("arm", "left_finger", kind="torque")
    settings = {"name": "arm", "joints": "elbow", "kind": "position", "stiffness": 10.0} | arguments
    with raises(TaskError, key=f"Scene.add_actuators('{settings['name']}'){key}") as error:
        scene.add_actuators(**settings)
    assert word in message(error)


def test_velocity_limit_without_effort_limit_is_rejected(disc):
    scene = scene_with(100, disc=disc)
    with pytest.raises(TaskError, match=r"joint 'spin': velocity_limit requires effort_limit"):
        scene.add_actuators("disc", "spin", kind="torque", velocity_limit=3.0)


def test_delay_of_a_drive_without_one_is_rejected(disc):
    sim, _ = driven("mujoco", disc, kind="torque")
    with raises(TaskError, hint="Try scene.add_actuators(..., max_delay=...)"):
        write(sim, "delay", 0.0, 0.0, 0.0)
    with raises(TaskError, key="sim.param('actuator_delay', 'disc')", problem="actuator 'spin' has no delay"):
        sim.param("actuator_delay", "disc", ["spin"])
