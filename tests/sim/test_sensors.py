"""Tests of sensors, sites and ray casters."""

from __future__ import annotations

import math

import pytest
import torch

from gpusim_rl.env import RayCaster
from gpusim_rl.env.math import quat_from_axis_angle
from gpusim_rl.env.ray_sensors import grid, lidar
from gpusim_rl.errors import TaskError
from gpusim_rl.sim import Scene, Sim
from helpers.raised import message, raises
from helpers.scenes import FEET, advance, ant_scene, everywhere, make, only, randomize_ants, scene_with

# A box on the ground with an off-centre IMU, a rangefinder that looks down, and a touch sensor.
BOX = """
<mujoco>
  <worldbody>
    <body name="box" pos="0 0 0.1">
      <freejoint/>
      <geom name="box" type="box" size="0.1 0.1 0.1" mass="2"/>
      <site name="imu" pos="0.05 0 0.05" euler="0 0 90"/>
      <site name="eye" pos="0.3 0 0" euler="180 0 0"/>
      <site name="below" type="box" size="0.11 0.11 0.11"/>
    </body>
  </worldbody>
  <sensor>
    <gyro name="gyro" site="imu"/>
    <accelerometer name="accelerometer" site="imu"/>
    <rangefinder name="height" site="eye"/>
    <touch name="touch" site="below"/>
    <framepos name="imu_pos" objtype="site" objname="imu"/>
    <framequat name="imu_quat" objtype="site" objname="imu"/>
    <framelinvel name="imu_lin_vel" objtype="site" objname="imu"/>
    <frameangvel name="imu_ang_vel" objtype="site" objname="imu"/>
  </sensor>
</mujoco>
"""


@pytest.fixture(params=["mujoco", "mujoco-shared", "mjwarp", pytest.param("newton", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def box_scene() -> Scene:
    return scene_with(500, ground=True, box=BOX)


def assert_close(value: torch.Tensor, expected: list[float] | float, atol: float = 1e-3):
    torch.testing.assert_close(value, torch.tensor(expected).expand_as(value), atol=atol, rtol=0)


def test_contact_sensor_reports_count_and_force(backend):
    scene = box_scene()
    scene.add_sensor("box", "ground", "contact", geom="box", against="ground")
    scene.add_sensor("box", "itself", "contact", body="box", against="self")
    sim = make(backend, scene, 2)
    ground, itself = (sim.articulation("box").sensor(name) for name in ("ground", "itself"))
    advance(sim, 500)
    assert (ground.data[:, 0] >= 1.0).all()
    assert_close(ground.data[:, 1:], [0.0, 0.0, 2.0 * 9.81], atol=0.05)
    assert_close(itself.data, 0.0)


@pytest.mark.parametrize(
    "of",
    [
        {"kind": "contact", "against": "ground"},
        {"kind": "contact", "geom": "box"},
        {"kind": "gyro", "site": "imu", "against": "self"},
    ],
)
def test_incomplete_contact_sensor_is_rejected(of):
    with raises(TaskError, key="Scene.add_sensor('box', 'new')"):
        box_scene().add_sensor("box", "new", **of)


def test_sensor_readings_of_a_box_at_rest(backend):
    sim = make(backend, box_scene(), 3)
    box = sim.articulation("box")
    gyro, accelerometer, touch = (box.sensor(name) for name in ("gyro", "accelerometer", "touch"))
    height = box.sensor("height")
    assert [gyro.size, height.size] == [3, 1]
    for _ in range(200):
        sim.step(5)
    assert_close(gyro.data, 0.0)
    assert_close(accelerometer.data, [0.0, 0.0, 9.81])
    assert_close(touch.data / (2 * 9.81), 1.0)
    assert_close(height.data, 0.1)
    sim.close()


def test_sensors_follow_written_state(backend):
    sim = make(backend, box_scene(), 3)
    box = sim.articulation("box")
    gyro, height, site = box.sensor("gyro"), box.sensor("height"), box.sites(["imu"])
    accelerometer = box.sensor("accelerometer")
    state = {
        "root_pos": torch.tensor([[0.3, -0.2, 2.0]]).expand(3, 3),
        "root_quat": torch.nn.functional.normalize(torch.tensor([[1.0, 0.2, -0.3, 0.1]])).expand(3, 4),
        "root_lin_vel": torch.tensor([[0.5, 0.1, -0.2]]).expand(3, 3),
        "root_ang_vel": torch.tensor([[1.0, 2.0, 3.0]]).expand(3, 3),
    }
    before = height.data.clone()
    box.set_state(only(sim, 1), **state)
    sim.refresh()
    assert torch.equal(height.data[[0, 2]], before[[0, 2]])
    # site poses and velocities equal MuJoCo's frame sensors
    for name, value in (("pos", site.pos), ("quat", site.quat), ("lin_vel", site.lin_vel), ("ang_vel", site.ang_vel)):
        torch.testing.assert_close(value[:, 0], box.sensor(f"imu_{name}").data, atol=1e-5, rtol=0)
    torch.testing.assert_close(gyro.data[1].norm(), torch.tensor(14.0).sqrt())
    # In free fall an accelerometer measures only the centripetal acceleration w x (w x r).
    w, r = site.ang_vel[1, 0], site.pos[1, 0] - box.root_pos[1]
    felt = torch.linalg.cross(w, torch.linalg.cross(w, r)).norm()
    torch.testing.assert_close(accelerometer.data[1].norm(), felt, atol=1e-3, rtol=0)
    sim.reset(only(sim, 1))
    sim.refresh()
    assert_close(gyro.data[1], 0.0)
    sim.close()


def trajectory(backend: str, read: list[str]) -> torch.Tensor:
    scene = ant_scene()
    for kind in ("gyro", "accelerometer"):
        scene.add_sensor("ant", kind, kind, body="torso")
    sim = make(backend, scene, 4)
    ant = sim.articulation("ant")
    feet, sensors = ant.contacts(FEET), [ant.sensor(name) for name in read]
    randomize_ants([ant])
    sim.refresh()
    values = []
    for i in range(30):
        advance(sim, 1)
        values += [sim.qpos.clone(), feet.torque.flatten(1).clone()]
        sim.reset(only(sim, i % 4))
        sim.refresh()
        values += [feet.force.flatten(1).clone()]
        assert all(sensor.data.isfinite().all() for sensor in sensors)
    sim.close()
    return torch.cat(values, dim=1)


def test_reading_sensors_does_not_change_the_physics(backend):
    expected = trajectory(backend, [])
    for read in (["gyro"], ["gyro", "accelerometer"]):
        assert torch.equal(trajectory(backend, read), expected)


def test_resumed_simulation_has_equal_sensor_readings():
    def begin() -> Sim:
        sim = make("mujoco", box_scene(), 2)
        sim.articulation("box").sensor("accelerometer")
        return sim

    first, second = begin(), begin()
    first.articulation("box").set_state(only(first, 1), root_pos=torch.full((2, 3), 0.11))
    first.step(3)
    second.load_state_dict(first.state_dict())
    for sim in (first, second):
        sim.step(2)
    name = "accelerometer"
    left, right = (sim.articulation("box").sensor(name).data for sim in (first, second))
    assert torch.equal(left, right)


def test_added_sensors_measure_known_motion():
    scene = box_scene()
    scene.add_sensor("box", "acceleration", "framelinacc", body="box")
    scene.add_sensor("box", "spin", "gyro", body="box")
    scene.add_sensor("box", "depth", "rangefinder", site="eye")
    scene.add_sensor("box", "up", "rangefinder", body="box")
    scene.add_sensor("box", "centre", "subtreecom", body="box")
    scene.add_sensor("box", "velocity", "subtreelinvel", body="box")
    sim = make("mujoco", scene, 1)
    box = sim.articulation("box")
    box.set_state(
        everywhere(sim), root_pos=torch.tensor([[0.0, 0.0, 5.0]]), root_ang_vel=torch.tensor([[0.0, 0.0, 2.0]])
    )
    box.bodies(["box"]).apply_wrench(torch.tensor([[[6.0, 0.0, 0.0]]]))
    acceleration, spin = box.sensor("acceleration"), box.sensor("spin")
    sim.step(1)
    assert_close(acceleration.data, [3.0, 0.0, 0.0])  # 6 N on 2 kg in free fall
    assert_close(spin.data, [0.0, 0.0, 2.0])
    assert_close(box.sensor("depth").data, box.root_pos[:, 2:].tolist())
    assert_close(box.sensor("up").data, -1.0)
    assert_close(box.sensor("centre").data, box.root_pos.tolist(), atol=1e-5)
    assert_close(box.sensor("velocity").data, box.root_lin_vel.tolist(), atol=1e-5)


# A robot with a mast that would block the rays, in a room of 4 by 6 m with a step.
ROBOT = """
<mujoco>
  <worldbody>
    <body name="base" pos="0 0 0.5">
      <freejoint/>
      <geom name="base" type="box" size="0.2 0.1 0.1" mass="5"/>
      <geom name="mast" type="capsule" size="0.05" fromto="0.3 0 -0.3 0.3 0 0.3" mass="0.1"/>
    </body>
  </worldbody>
</mujoco>
"""
ROOM = """
<mujoco>
  <worldbody>
    <body name="room">
      <geom name="east" type="box" size="0.1 3 1" pos="2.1 0 1"/>
      <geom name="west" type="box" size="0.1 3 1" pos="-2.1 0 1"/>
      <geom name="north" type="box" size="2 0.1 1" pos="0 3.1 1"/>
      <geom name="step" type="box" size="2 1 0.1" pos="0 2 0.1"/>
    </body>
  </worldbody>
</mujoco>
"""


def room_sim(backend: str) -> Sim:
    scene = scene_with(500, ground=True, robot=ROBOT, room=ROOM)
    return make(backend, scene, 3)


def test_rays_hit_walls_and_skip_ignored_bodies(backend):
    sim = room_sim(backend)
    robot = sim.articulation("robot")
    base = robot.bodies(["base"])
    scan = RayCaster(sim, base, grid(0.4, 2.0, 0.2), turn="yaw", ignore=["robot"], max_distance=20.0)
    ring = RayCaster(sim, base, lidar(36), ignore=["robot"], max_distance=4.0)
    blind = RayCaster(sim, base, lidar(4), max_distance=4.0)
    yaw = torch.tensor([0.0, 0.4, -2.0])
    turned = quat_from_axis_angle(torch.tensor([[0.0, 0.0, 1.0]]).expand(3, 3), yaw)
    robot.set_state(everywhere(sim), root_pos=torch.tensor([[0.5, 0.3, 0.9]]).expand(3, 3), root_quat=turned)
    sim.refresh()

    # Along a direction (c, s) the walls are at x = 2, x = -2 and y = 3; there is no south wall.
    angle = yaw[:, None] + torch.arange(36) * (2 * math.pi / 36)
    c, s = angle.cos(), angle.sin()
    inf = torch.tensor(torch.inf)
    walls = [
        torch.where(c > 1e-6, 1.5 / c, inf),
        torch.where(c < -1e-6, -2.5 / c, inf),
        torch.where(s > 1e-6, 2.7 / s, inf),
    ]
    expected = torch.stack(walls).amin(dim=0).clamp(max=4.0)
    south = 0.3 + expected * s < -3.0  # beyond the ends of the walls
    torch.testing.assert_close(ring.distance[~south], expected[~south], atol=1e-3, rtol=0)
    assert (~south).sum() > 80

    points = scan.points
    torch.testing.assert_close(points[..., 2], 0.2 * (points[..., 1] > 1.0), atol=1e-3, rtol=0)
    assert points[..., 2].amax() > 0.1 and points[..., 2].amin() < 0.1
    # Without `ignore`, the rays of `blind` hit the base from inside.
    torch.testing.assert_close(blind.distance, torch.tensor([[0.2, 0.1, 0.2, 0.1]]).expand(3, 4), atol=1e-3, rtol=0)
    sim.close()


def test_casting_rays_creates_no_views(monkeypatch):
    """The views are created once, with the rays; Newton uses those of its `MjwarpSim`."""
    pytest.importorskip("newton")
    sim = room_sim("newton")
    scan = RayCaster(sim, sim.articulation("robot").bodies(["base"]), lidar(36), ignore=["robot"], max_distance=4.0)
    sim.refresh()
    before = scan.distance.clone()
    for function in ("to_torch", "from_torch"):
        monkeypatch.setattr(f"warp.{function}", lambda *_, **__: pytest.fail("a view was made"))
    assert torch.equal(scan.distance, before)
    sim.step(5)
    assert scan.distance.isfinite().all()


def test_grid_and_lidar_patterns():
    origins, directions = grid(0.4, 0.2, 0.2, above=3.0)
    expected = torch.tensor([[x, y, 3.0] for x in (-0.2, 0.0, 0.2) for y in (-0.1, 0.1)])
    torch.testing.assert_close(origins, expected)
    assert directions.unique(dim=0).tolist() == [[0.0, 0.0, -1.0]]
    _, directions = lidar(3, elevations=[0.0, 0.5], fov=math.pi)
    expected = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(directions[:3], expected)
    torch.testing.assert_close(directions[3:, 2], torch.full((3,), math.sin(0.5)))
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(6))


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda sim: sim.articulation("box").sensor("giro"), "mean 'gyro'"),
        (lambda sim: sim.articulation("box").sites(["eyes"]), "mean 'eye'"),
        (lambda sim: sim.rays(3, ["bx"]), "mean 'box'"),
        (lambda sim: sim.rays(3).cast(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)), "rays: origin: expected"),
        (lambda sim: grid(1.0, 1.0, 0.0), "grid(): expected"),
        (lambda sim: lidar(0), "lidar(): expected"),
        (lambda sim: sim.scene.add_sensor("bx", "a", "gyro", body="box"), "Scene.add_sensor: no articulation 'bx'"),
        (lambda sim: sim.scene.add_sensor("box", "a", "giro", body="box"), "mean 'gyro'"),
        (lambda sim: sim.scene.add_sensor("box", "a", "gyro", body="bx"), "mean 'box'"),
        (lambda sim: sim.scene.add_sensor("box", "gyro", "gyro", body="box"), "already"),
        (lambda sim: sim.scene.add_sensor("box", "a", "gyro", body="box", site="imu"), "exactly one of"),
        (lambda sim: sim.scene.add_sensor("box", "a", "gyro", link="box"), "exactly one of"),
    ],
)
def test_invalid_sensor_calls_are_rejected_in_one_line(call, word):
    sim = make("mujoco", box_scene(), 1)
    with pytest.raises(TaskError) as error:
        call(sim)
    assert word in message(error)
