"""`sim=isaacgym` on a stand-in for Isaac Gym, which has MuJoCo's physics and keeps the rules of Isaac Gym's API."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import mujoco
import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.run.cuda_graph import choose_graph
from gpusim_rl.settings.discover import tasks
from gpusim_rl.sim import Scene, Sim, SimChoice, before_torch
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.commands import ROOT
from helpers.isaacgym import STANDIN, standin
from helpers.scenes import (
    ANT,
    FEET,
    ant_scene,
    arm_scene,
    ball_scene,
    everywhere,
    make,
    only,
    randomize_ants,
)
from helpers.training import make_trainer, read_csv, the_run


@pytest.fixture
def gymapi() -> Iterator[Any]:
    with standin() as module:
        yield module


def same_physics(gymapi: Any, scene: Scene, num_envs: int) -> tuple[Sim, Sim]:
    """The stand-in with the options and contacts of a scene, and MuJoCo."""
    gymapi.physics_like = scene.model
    return make("isaacgym", scene, num_envs), make("mujoco", scene, num_envs)


def assert_close(one: Any, other: Any, names: str, tolerance: float) -> None:
    for name in names.split():
        left, right = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(
            left, right, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name} {text}"
        )


# Tasks


def compare_with_mujoco(gymapi: Any, task: str, steps: int, tolerance: float, **settings: Any) -> int:
    """Steps a task on both, and returns how many episodes have ended."""
    envs = []
    for sim in ("isaacgym", "mujoco"):
        spec = prepare(task, sim=sim, device="cpu", num_envs=4, task=settings)
        gymapi.physics_like = spec.task_class.scene(spec.cfg.task).model
        choice = SimChoice(sim, torch.device("cpu"), "test")
        envs.append(VecEnv.make(spec.task_class, spec.cfg.task, num_envs=4, choice=choice, sim=spec.cfg.sim, seed=0))
    assert [env.sim.name for env in envs] == ["isaacgym", "mujoco"]
    torch.testing.assert_close(*(env.reset() for env in envs), atol=1e-6, rtol=1e-6)
    random, ends = torch.Generator().manual_seed(0), 0
    for _ in range(steps):
        action = 2.0 * torch.rand(4, envs[0].num_actions, generator=random) - 1.0
        ours, theirs = (env.step(action) for env in envs)
        torch.testing.assert_close(ours.obs, theirs.obs, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(ours.reward, theirs.reward, atol=tolerance, rtol=tolerance)
        assert torch.equal(ours.terminated, theirs.terminated) and torch.equal(ours.truncated, theirs.truncated)
        assert not ours.diverged.any()
        ends += int(ours.done.sum())
    return ends


@pytest.mark.parametrize(
    ("task", "tolerance"),
    # What touches and slides multiplies the rounding of the state, which is float32 in Isaac Gym.
    [
        ("Cartpole", 1e-5),
        ("Ant", 1e-4),
        pytest.param("Anymal", 1e-4, marks=pytest.mark.slow),
        pytest.param("AllegroHand", 5e-3, marks=pytest.mark.slow),
    ],
)
def test_a_task_sees_what_it_sees_in_mujoco(gymapi, task, tolerance):
    assert compare_with_mujoco(gymapi, task, 20, tolerance, episode_length=12) >= 4, "every env was reset on the way"


REFUSED = {"BallBalance": "equality constraints", "ShadowHand": "tendons", "Trifinger": "geoms that pass through"}


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(tasks()))
def test_every_task_runs_as_in_mujoco_or_is_refused_in_one_line(gymapi, task):
    if task in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[task]):
            compare_with_mujoco(gymapi, task, 1, 1e-4)
    else:
        compare_with_mujoco(gymapi, task, 5, 1e-4)


def test_cartpole_trains(gymapi, tmp_path, capfd):
    row = make_trainer("Cartpole", tmp_path, sim="isaacgym", device="cpu").train()
    assert row["iteration"] == 3 and row["sim/diverged"] == 0


def test_it_is_imported_before_torch(command):
    code = "import sys; from gpusim_rl.sim.before_torch import import_before_torch as do; do('mujoco'); do('isaacgym');"
    code += " print('torch' in sys.modules, 'isaacgym' in sys.modules)"
    assert command(sys.executable, "-c", code, env={"PYTHONPATH": f"{ROOT}:{STANDIN}"}).stdout == "False True\n"


@pytest.mark.slow
def test_cartpole_learns_on_the_command_line(train_cli, tmp_path):
    arguments = ["task=Cartpole", "sim=isaacgym", "device=cpu", "num_envs=64", "max_iterations=60", "log.dir=runs"]
    done = train_cli(*arguments, env={"PYTHONPATH": f"{ROOT}:{STANDIN}"}, timeout_s=280)
    assert "never with the real library" in done.stderr + done.stdout
    assert float(read_csv(the_run(tmp_path / "runs"))[-1]["episode/return"]) > 200.0


def test_without_it_one_line_says_where_it_comes_from(train_cli):
    done = train_cli("task=Cartpole", "sim=isaacgym", check=False)
    assert done.returncode == 2
    needs = "Isaac Gym Preview 4 (isaacgym), which NVIDIA distributes for Python 3.6 to 3.8, not by pip"
    assert done.stderr == f"error: sim=isaacgym needs {needs}; try sim=mujoco\n"


def test_after_torch_one_line_says_why_it_does_not_load(monkeypatch):
    monkeypatch.syspath_prepend(STANDIN)
    monkeypatch.setattr(before_torch, "_reasons", {})
    with pytest.raises(
        ConfigError, match=r"^sim=isaacgym needs .* it does not load: PyTorch was imported before"
    ) as error:
        importlib.import_module("gpusim_rl.sim.isaacgym")
    assert "\n" not in str(error.value)
    assert "gpusim_rl.sim.isaacgym" not in sys.modules


# What follows a state

# The centre of mass is not the origin; a reference angle, a spring, and drives of each kind behind gears.
MACHINE = """
<mujoco>
  <compiler angle="radian"/>
  <option integrator="implicitfast"/>
  <default><geom contype="0" conaffinity="0"/></default>
  <worldbody>
    <body name="hull" pos="0 0 2" quat="0.8 0.2 -0.4 0.4">
      <freejoint/>
      <geom type="box" size="0.2 0.1 0.05" pos="0.3 0.1 -0.05" mass="2"/>
      <site name="tip" pos="0.1 0.2 0.3" quat="0.5 0.5 0.5 0.5"/>
      <body name="z_first" pos="-0.1 0 0" quat="0.9 0 0.1 0">
        <joint name="servo" axis="0 0 1" ref="0.5" range="-0.2 1.5" damping="0.01"/>
        <geom type="capsule" size="0.02" fromto="0 0 0 -0.3 0 0.1" mass="0.2"/>
      </body>
      <body name="a_second" pos="0 0.1 0">
        <joint name="wheel" axis="0 1 0" armature="0.01"/>
        <joint name="spring" type="slide" axis="0 0 1" stiffness="40" springref="0.05" damping="0.3"/>
        <geom size="0.05" mass="0.3"/>
        <body name="hand" pos="0 0 0.2">
          <joint name="motor" axis="1 0 0"/>
          <geom size="0.03" pos="0 0.1 0" mass="0.1"/>
        </body>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor name="motor" joint="motor" gear="0.5" ctrlrange="-1 1" forcerange="-0.8 0.8"/>
    <position name="servo" joint="servo" kp="8" kv="0.2" gear="2" forcerange="-50 50"/>
    <velocity name="wheel" joint="wheel" kv="0.05" gear="-1"/>
  </actuator>
  <sensor><gyro name="gyro" site="tip"/><accelerometer name="imu" site="tip"/></sensor>
</mujoco>
"""
STATE = "root_pos root_quat root_lin_vel root_ang_vel root_ang_vel_local joint_pos joint_vel"


def machine_scene() -> Scene:
    scene = Scene(physics_hz=250)
    scene.add("other", mujoco.MjSpec.from_string(MACHINE), pos=(0.0, 3.0, 0.0))
    scene.add("machine", mujoco.MjSpec.from_string(MACHINE), quat=(0.7, 0.0, 0.7, 0.0))
    return scene


@pytest.fixture
def machines(gymapi):
    sims = same_physics(gymapi, machine_scene(), 3)
    robots = [sim.articulation("machine") for sim in sims]
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(3, *shape, generator=random)

    state = {
        "root_pos": normal(3),
        "root_quat": torch.nn.functional.normalize(normal(4), dim=1),
        "root_lin_vel": normal(3),
        "root_ang_vel": 3.0 * normal(3),
        "joint_pos": torch.tensor([0.6, 0.0, 0.0, 0.0]) + 0.1 * normal(4),
        "joint_vel": normal(4),
    }
    for sim, robot in zip(sims, robots, strict=True):
        robot.set_state(only(sim, 0, 2), **state)
        robot.actuate(torch.tensor([[3.0, 1.2, 2.0], [-0.5, 0.2, -1.0], [0.1, 0.6, 0.5]]))
        sim.refresh()
    return sims, robots


def test_bodies_sites_sensors_and_dynamics_follow_what_is_written_and_what_is_stepped(machines):
    sims, robots = machines
    readers = [
        (robot.bodies(["hull", "hand"]), robot.sites(["tip"]), robot.sensor("gyro"), robot.dynamics("hand"))
        for robot in robots
    ]
    rays = [sim.rays(1, ignore=["machine"]) for sim in sims]
    down = torch.tensor([[[0.0, 3.0, 9.0]]]).expand(3, 1, 3), torch.tensor([[[0.0, 0.0, -1.0]]]).expand(3, 1, 3)
    for _ in range(4):
        assert_close(*robots, STATE, 2e-5)
        for one, other, names in zip(
            *readers,
            ("pos quat lin_vel ang_vel", "pos quat lin_vel ang_vel", "data", "jacobian mass_matrix"),
            strict=True,
        ):
            assert_close(one, other, names, 5e-5)
        torch.testing.assert_close(*(ray.cast(*down) for ray in rays))
        torch.testing.assert_close(*(sim.scene_qpos() for sim in sims), atol=2e-5, rtol=2e-5)
        for sim in sims:
            sim.step(5)
    for robot, sim in zip(robots, sims, strict=True):
        robot.set_state(only(sim, 1), joint_pos=torch.full((3, 4), 0.1))  # Isaac Gym's own tensors are stale now
        sim.refresh()
    for one, other in zip(*readers, strict=True):
        assert_close(
            one, other, "pos quat" if hasattr(one, "pos") else "data" if hasattr(one, "data") else "jacobian", 5e-5
        )


def test_forces_on_joints_and_bodies_act_in_every_step_until_the_reset(machines):
    sims, robots = machines
    for sim, robot in zip(sims, robots, strict=True):
        robot.set_joint_effort(torch.tensor([[0.1, 0.02, -0.5, 0.05]]).expand(3, 4))
        force = torch.tensor([[[1.0, 2.0, 30.0], [0.5, 0.0, 0.0]]]).expand(3, 2, 3)
        robot.bodies(["hull", "hand"]).apply_wrench(force, 0.1 * force)
        sim.step(10)
    assert_close(*robots, STATE, 5e-5)
    for sim in sims:
        sim.reset(only(sim, 1))
        sim.step(10)
    assert_close(*robots, STATE, 5e-5)


@pytest.mark.parametrize("lists", [True, False], ids=["lists of actors", "whole tensors"])
def test_a_reset_leaves_other_worlds_alone(gymapi, lists):
    scene = ant_scene()
    gymapi.physics_like = scene.model
    results = []
    for resets in (False, True):
        sim = make("isaacgym", scene, 6)
        sim._reads_masks = lists  # on CUDA they are not read
        ant = sim.articulation("ant")
        feet = ant.contacts(FEET)
        randomize_ants([ant])
        sim.step(2)
        if resets:
            sim.reset(only(sim, 1, 4))
            assert (feet.force[[1, 4]] == 0).all() and (feet.in_body_frame()[[1, 4]] == 0).all()
        sim.step(2)
        sim.refresh()
        results.append(torch.cat([sim.scene_qpos(), ant.joint_vel, ant.root_ang_vel, feet.force.flatten(1)], dim=1))
        sim.close()
    assert torch.equal(*(result[[0, 2, 3, 5]] for result in results))
    assert torch.equal(results[1][1], results[1][4]) and not torch.equal(results[0][1], results[1][1])


def test_no_step_waits_for_a_cuda_device(gymapi):
    sim = make("isaacgym", ant_scene(), 4)
    sim._reads_masks = False  # as on CUDA
    ant = sim.articulation("ant")
    feet, torso = ant.contacts(FEET), ant.root_pos.clone()
    where, height, action = only(sim, 1), torch.full((4, 3), 2.0), torch.zeros(4, 8)
    with SyncCounter() as syncs:
        for _ in range(2):
            ant.actuate(action)
            ant.set_joint_effort(action)
            sim.step(2)
            sim.reset(sim.diverged | where)
            ant.set_state(where, root_pos=height)
            sim.refresh()
            torso += ant.root_pos + feet.force[:, 0] + feet.torque[:, 0] + feet.in_body_frame()[:, 0, :3]
    assert syncs.total == 0, syncs.counts


def test_contacts_are_those_of_mujoco(gymapi):
    sims = same_physics(gymapi, ant_scene(), 16)
    ants = [sim.articulation("ant") for sim in sims]
    feet = [ant.contacts(FEET) for ant in ants]
    randomize_ants(ants)
    for sim in sims:
        sim.step(1)
    assert (feet[1].force.norm(dim=-1) > 10.0).any()
    torch.testing.assert_close(feet[0].force, feet[1].force, atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(feet[0].in_body_frame(), feet[1].in_body_frame(), atol=2e-3, rtol=1e-4)
    # The force sensor is in the body's frame, which has turned on by some degrees at the end of the step.
    left, right = (foot.torque.norm(dim=-1) for foot in feet)
    torch.testing.assert_close(left, right, atol=2e-3, rtol=1e-4)


def test_a_free_body_turns_no_faster_than_the_scene_says(gymapi):
    scene = Scene(physics_hz=200, gravity=0.0, max_angular_velocity=10.0)
    body = '<body name="ball" pos="0 0 2"><freejoint/><geom size="0.1"/></body>'
    scene.add("ball", mujoco.MjSpec.from_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>"))
    sim = make("isaacgym", scene, 2)
    ball = sim.articulation("ball")
    ball.set_state(everywhere(sim), root_ang_vel=torch.tensor([[3.0, 0.0, 4.0], [30.0, -40.0, 0.0]]))
    sim.step(1)
    torch.testing.assert_close(ball.root_ang_vel.norm(dim=1), torch.tensor([5.0, 10.0]))


def test_a_run_continues_from_its_state(gymapi):
    gymapi.physics_like = machine_scene().model
    sim = make("isaacgym", machine_scene(), 4)
    robot = sim.articulation("machine")
    robot.set_state(only(sim, 1), joint_pos=torch.full((4, 4), 0.2))
    robot.actuate(torch.full((4, 3), 0.3))
    sim.step(3)
    sim.reset(only(sim, 2))
    saved = sim.state_dict()
    results = []
    for _ in range(2):
        sim.step(5)
        results.append((sim.scene_qpos().clone(), robot.joint_vel.clone()))
        sim.load_state_dict(saved)
    for first, again in zip(*results, strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize("value", [math.nan, 1e20])
def test_a_world_that_diverges_is_told_and_healed_by_a_reset(gymapi, value):
    sim = make("isaacgym", ball_scene(), 3)
    ball = sim.articulation("ball")
    ball.set_state(only(sim, 1), root_lin_vel=torch.full((3, 3), value))
    sim.step(1)
    assert sim.diverged.tolist() == [False, True, False] and not sim.overflow.any() and not sim.bad_inputs.any()
    sim.reset(sim.diverged.clone())
    sim.step(1)
    assert not sim.diverged.any()
    assert torch.equal(ball.root_pos[1], ball.root_pos[0]) is False  # it fell one step, the other two
    assert ball.root_pos.isfinite().all()


# What it refuses


def test_what_it_lacks_is_one_line(gymapi):
    sim = make("isaacgym", machine_scene(), 1)
    with pytest.raises(ConfigError) as error:
        sim.param("body_mass", "machine")
    others = "try sim=mujoco or sim=mjwarp or sim=newton"
    assert str(error.value) == f"sim=isaacgym has the same physical parameters in all envs; {others}"
    with pytest.raises(TaskError) as error:
        sim.articulation("machine").sensor("imu")
    assert str(error.value) == f"sim=isaacgym has no sensors of forces and accelerations; {others}"
    with pytest.raises(ConfigError, match="one simulation in a process"):
        make("isaacgym", machine_scene(), 1)
    sim.close()
    make("isaacgym", machine_scene(), 1)


ARMS = "".join(f'<body name="{name}"><joint name="{name}"/><geom size="0.1"/></body>' for name in "ab")
EQUALITY = '<equality><joint joint1="a" joint2="b"/></equality>'
TENDON = '<tendon><fixed><joint joint="a" coef="1"/></fixed></tendon>'
TWO_MOTORS = '<actuator><motor joint="a"/><motor joint="a"/></actuator>'
GHOST = '<geom type="plane" size="1 1 1" contype="2" conaffinity="2"/>'


@pytest.mark.parametrize(
    ("bodies", "rest", "what"),
    [
        (ARMS.replace("<joint", '<joint type="ball"', 1), "", "ball joints"),
        (ARMS, EQUALITY, "equality constraints"),
        (ARMS, TENDON, "tendons"),
        (ARMS, '<actuator><intvelocity joint="a" actrange="0 1"/></actuator>', "not linear"),
        (ARMS, TWO_MOTORS, "several actuators"),
        (ARMS.replace('size="0.1"', 'type="ellipsoid" size="0.1 0.2 0.1"', 1), "", "ellipsoids"),
        ('<geom type="box" size="1 1 1"/>' + ARMS, "", "fixed geoms without a body"),
        (GHOST + ARMS, "", "pass through the ground"),
        (ARMS.replace("<body", '<body gravcomp="0.5"', 1), "", "gravcomp"),
        (ARMS, '<actuator><general joint="a" biastype="affine" biasprm="0 1 0"/></actuator>', "push away"),
        (ARMS, '<option><flag gravity="disable"/></option>', "switches off"),
    ],
)
def test_a_scene_that_physx_or_its_importer_cannot_take_is_refused(gymapi, bodies, rest, what):
    scene = Scene(physics_hz=100)
    scene.add("robot", mujoco.MjSpec.from_string(f"<mujoco><worldbody>{bodies}</worldbody>{rest}</mujoco>"))
    with pytest.raises(ConfigError, match=rf"^sim=isaacgym is not told of .*{what}.*; try sim=mjwarp$"):
        make("isaacgym", scene, 1)


def test_what_has_no_effect_is_said(gymapi, caplog):
    scene = Scene(physics_hz=100)
    body = '<body><joint frictionloss="0.1"/><geom size="0.1"/></body>'
    scene.add("arm", mujoco.MjSpec.from_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>"))
    make("isaacgym", scene, 1)
    assert caplog.messages[-1] == "sim=isaacgym leaves out of this scene: dry friction of joints"


def test_a_robot_that_is_imported_otherwise_is_noticed(gymapi, monkeypatch):
    model = importlib.import_module("gpusim_rl.sim.isaacgym_model")
    right = model.asset_xml
    monkeypatch.setattr(model, "asset_xml", lambda *of: right(*of).replace('axis="0 0 1"', 'axis="0 1 0"'))
    with pytest.raises(ConfigError, match=r"^sim=isaacgym imports 'arm/lower' with another pose than MuJoCo; try"):
        make("isaacgym", arm_scene(), 1)


def test_cuda_graphs_leave_it_out():
    cuda = torch.device("cuda", 0)
    choice = choose_graph("rollout", cuda, cuda, physics_steps=10, check_task=False, capturable=False)
    assert str(choice) == "whole update (a graph cannot hold this simulator's steps)"


# The rules of the API, which the stand-in keeps: what breaks one of them is refused


class Raw:
    """The API itself: two envs with an ant each."""

    def __init__(self, gymapi: Any) -> None:
        self.api, self.torch = gymapi, importlib.import_module("isaacgym.gymtorch")
        self.ours = make("isaacgym", ant_scene(), 2)
        self.gym, self.sim = self.ours._gym, self.ours._sim
        self.root = self.torch.wrap_tensor(self.gym.acquire_actor_root_state_tensor(self.sim))
        self.dof = self.torch.wrap_tensor(self.gym.acquire_dof_state_tensor(self.sim))
        self.unwrap = self.torch.unwrap_tensor

    def simulate(self) -> None:
        self.gym.simulate(self.sim)
        self.gym.fetch_results(self.sim, True)

    def refresh(self, name: str) -> None:
        getattr(self.gym, f"refresh_{name}_tensor")(self.sim)

    def set_root(self, ids: torch.Tensor, root: torch.Tensor | None = None, count: int | None = None) -> None:
        values = self.unwrap(self.root if root is None else root)
        count = len(ids) if count is None else count
        self.gym.set_actor_root_state_tensor_indexed(self.sim, values, self.unwrap(ids), count)


@pytest.fixture
def raw(gymapi):
    return Raw(gymapi)


IDS = torch.tensor([0, 1], dtype=torch.int32)
BROKEN = {
    "actors as int64": lambda raw: raw.set_root(IDS.long()),
    "a wrong count": lambda raw: raw.set_root(IDS, count=1),
    "an actor that is not there": lambda raw: raw.set_root(IDS + 1),
    "two writes of roots in a step": lambda raw: [raw.set_root(IDS[:1]), raw.set_root(IDS[1:])],
    "states of some actors": lambda raw: raw.set_root(IDS[:1], raw.root[:1]),
    "float64": lambda raw: raw.set_root(IDS, raw.root.double()),
    "memory that is not contiguous": lambda raw: raw.unwrap(raw.root[:, :3]),
    "a tensor of torch": lambda raw: raw.gym.set_dof_state_tensor(raw.sim, raw.dof),
    "targets of some dofs": lambda raw: raw.gym.set_dof_actuation_force_tensor(raw.sim, raw.unwrap(torch.zeros(8))),
    "a list of actors that is freed": lambda raw: [raw.set_root(IDS.clone()), raw.simulate()],
    "no fetch_results": lambda raw: [raw.gym.simulate(raw.sim), raw.gym.simulate(raw.sim)],
    "a refresh before fetch_results": lambda raw: [raw.gym.simulate(raw.sim), raw.refresh("dof_state")],
    "an env after prepare_sim": lambda raw: raw.gym.create_env(raw.sim, None, None, 1),
    "a second simulation": lambda raw: raw.gym.create_sim(0, -1, raw.api.SIM_PHYSX, raw.api.SimParams()),
    "forces of dofs without sensors": lambda raw: raw.gym.acquire_dof_force_tensor(raw.sim),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_the_standin_refuses(raw, broken):
    with pytest.raises(raw.api.ContractError):
        BROKEN[broken](raw)


def test_the_standin_refuses_what_comes_before_prepare_sim_and_what_is_not_documented(gymapi):
    gym, params = gymapi.acquire_gym(), gymapi.SimParams()
    with pytest.raises(AttributeError):
        params.timestep = 0.01
    params.use_gpu_pipeline = params.physx.use_gpu = False
    sim = gym.create_sim(0, -1, gymapi.SIM_PHYSX, params)
    for early in (gym.simulate, gym.acquire_dof_state_tensor):
        with pytest.raises(gymapi.ContractError):
            early(sim)
    with pytest.raises(gymapi.ContractError, match="tendon"):
        gymapi._Asset("<mujoco><worldbody><body/></worldbody><tendon/></mujoco>", gymapi.AssetOptions())


def test_in_the_standin_writes_act_at_the_next_step_and_tensors_are_stale_until_they_are_refreshed(raw):
    before = raw.root.clone()
    assert before[0, 3:7].tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0], abs=0.05), "xyzw"
    written = before.clone()
    written[:, :3] = torch.tensor([1.0, 2.0, 3.0])
    written[:, 3:7] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # upside down: in wxyz it would be upright
    written[:, 7:] = 0.0
    ids = IDS[1:].clone()
    raw.set_root(ids, written)
    raw.refresh("actor_root_state")
    assert torch.equal(raw.root, before)
    raw.simulate()
    assert torch.equal(raw.root, before)
    raw.refresh("actor_root_state")
    torch.testing.assert_close(raw.root[1, :7], written[1, :7], atol=0.01, rtol=0.0)
    assert raw.root[0, 2] < 1.0
    bodies = raw.torch.wrap_tensor(raw.gym.acquire_rigid_body_state_tensor(raw.sim)).view(2, -1, 13)
    raw.refresh("rigid_body_state")
    assert torch.equal(bodies[1, 0, :3], raw.root[1, :3]), "the root is the first body"


def test_in_the_standin_a_force_on_a_body_acts_in_one_step_and_a_target_of_another_mode_never(raw):
    def velocity() -> torch.Tensor:
        raw.simulate()
        raw.refresh("actor_root_state")
        return raw.root[:, 7:10].clone()

    raw.gym.set_dof_position_target_tensor(raw.sim, raw.unwrap(torch.full((16,), 100.0)))
    start = velocity()
    force = torch.zeros(2, 9, 3)
    force[1, :, 0] = 50.0
    nothing = torch.zeros_like(force)
    apply = raw.gym.apply_rigid_body_force_tensors
    apply(raw.sim, raw.unwrap(force), raw.unwrap(nothing), raw.api.ENV_SPACE)
    pushed, coasting = velocity(), velocity()
    assert (pushed - start)[1, 0] > 0.1 and (coasting - pushed)[1, 0].abs() < 0.05
    assert (start[0, :2].abs() < 1e-3).all(), "the position targets moved no joint"


def test_cartpole_is_where_its_file_draws_it(gymapi):
    scene = Scene(physics_hz=120)
    scene.add("cartpole", ANT.with_name("cartpole.xml"))
    sim = make("isaacgym", scene, 2)
    torch.testing.assert_close(sim.articulation("cartpole").bodies(["pole"]).pos[0, 0], torch.tensor([0.0, 0.0, 2.0]))
