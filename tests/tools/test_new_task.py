"""Tests of the command `new-task`: tasks from robot files and from settings of IsaacGymEnvs."""

from __future__ import annotations

import ast
import itertools
import math
import os
import re
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import mujoco
import pytest
import torch

from gpusim_rl import make_env
from gpusim_rl.connect.isaacgymenvs import read_settings
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.settings.compose import compose
from helpers.commands import ROOT, Finished, run_command, run_here

LEGS = (("FL", 0.18, 0.13), ("FR", 0.18, -0.13), ("RL", -0.18, 0.13), ("RR", -0.18, -0.13))
ISAAC = """
name: Doggo
physics_engine: ${..physics_engine}
env:
  numEnvs: ${resolve_default:512,${...num_envs}}
  envSpacing: 5
  episodeLength: 800
  clipObservations: 5.0
  clipActions: 2.0
  controlFrequencyInv: 2
  powerScale: 1.5
  jointsAtLimitCost: 1e-1
  speed: 3.0
  asset: {assetFileName: "mjcf/doggo.xml", collapseFixedJoints: true}
sim:
  dt: 0.0083333
  substeps: 2
  physx: {num_threads: 4, solver_type: 1}
task: {randomize: false, randomization_params: {frequency: 600}}
viewer: {pos: [1, 2, 3]}
"""
ISAAC_PPO = """
params:
  algo: {name: a2c_continuous}
  network: {separate: false, mlp: {units: [64, 32], activation: relu, d2rl: false}}
  config:
    normalize_input: false
    lr_schedule: identity
    schedule_type: standard
    critic_coef: 4
    truncate_grads: false
    grad_norm: 1.5
    save_frequency: 50
    max_epochs: ${resolve_default:70,${....max_iterations}}
    horizon_length: 16
    mini_epochs: 4
    minibatch_size: 2048
    learning_rate: 3e-4
    reward_shaper: {scale_value: 0.01}
    player: {games: 1, render: true}
"""
DOG = """
<mujoco>
  <worldbody>
    <body name="torso" pos="0 0 0.3"><freejoint/><geom size="0.1"/>
      <body pos="0 0.1 -0.1">
        <joint name="hip" axis="0 1 0" range="-40 40"/>
        <geom type="capsule" size="0.02" fromto="0 0 0 0 0.1 -0.2"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="hip" gear="10" ctrlrange="-1 1" ctrllimited="true"/></actuator>
</mujoco>
"""

pytest_plugins = ["helpers.tool_runs"]


def quadruped() -> str:
    """Return the URDF of a trunk with four legs of two joints, which reach 0.33 m below it."""
    links = [
        '<robot name="dog"><link name="trunk"><inertial><mass value="6"/><inertia ixx="0.04" ixy="0" ixz="0" iyy="0.1"'
        ' iyz="0" izz="0.11"/></inertial><collision><geometry><box size="0.4 0.2 0.1"/></geometry></collision></link>'
    ]
    limit = '<limit lower="-1.2" upper="1.2" effort="30" velocity="20"/><axis xyz="0 1 0"/>'
    inertia = '<inertia ixx="0.002" ixy="0" ixz="0" iyy="0.002" iyz="0" izz="0.0003"/>'
    for leg, x, y in LEGS:
        links.append(
            f'<joint name="{leg}_hip" type="revolute"><parent link="trunk"/><child link="{leg}_thigh"/>'
            f'<origin xyz="{x} {y} 0" rpy="0 0.6 0"/>{limit}</joint>'
            f'<link name="{leg}_thigh"><inertial><origin xyz="0 0 -0.1"/><mass value="0.6"/>{inertia}</inertial></link>'
            f'<joint name="{leg}_knee" type="revolute"><parent link="{leg}_thigh"/><child link="{leg}_calf"/>'
            f'<origin xyz="0 0 -0.2" rpy="0 -1.2 0"/>{limit}</joint>'
            f'<link name="{leg}_calf"><inertial><origin xyz="0 0 -0.1"/><mass value="0.2"/>{inertia}</inertial>'
            '<collision><origin xyz="0 0 -0.2"/><geometry><sphere radius="0.02"/></geometry></collision></link>'
        )
    return "".join(links) + "</robot>"


def walker(*legs: str) -> str:
    """Return the MJCF of a trunk surrounded by legs of two joints, the first leg in front."""
    bodies = []
    for i, leg in enumerate(legs):
        x, y = 0.2 * math.cos(2 * math.pi * i / len(legs)), 0.2 * math.sin(2 * math.pi * i / len(legs))
        bodies.append(
            f'<body name="{leg}_thigh" pos="{x:.4f} {y:.4f} 0"><joint name="{leg}_j1" axis="0 1 0" range="-70 70"/>'
            '<geom type="capsule" size="0.02" fromto="0 0 0 0 0 -0.2" mass="0.5"/>'
            f'<body name="{leg}_shin" pos="0 0 -0.2"><joint name="{leg}_j2" axis="0 1 0" range="-120 20"/>'
            '<geom type="capsule" size="0.02" fromto="0 0 0 0 0 -0.2" mass="0.3"/>'
            f'<body name="{leg}_tip" pos="0 0 -0.2"><geom size="0.025" mass="0.05"/></body></body></body>'
        )
    hat = '<body name="hat"><geom size="0.05" mass="0.1"/></body>'
    trunk = f'<freejoint/><geom type="box" size="0.2 0.2 0.05" mass="6"/>{hat}{"".join(bodies)}'
    return f'<mujoco><worldbody><body name="trunk" pos="0 0 0.5">{trunk}</body></worldbody></mujoco>'


def new_task(folder: Path, *arguments: str, code: int = 0) -> Finished:
    """Run the command in this process; check that an error is one line without other output."""
    done = run_here(ROOT / "tools" / "new_task.py", *arguments, cwd=folder)
    assert done.returncode == code, done.stderr
    assert not code or (done.stdout == "" and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1)
    return done


def new_robot_task(folder: Path, name: str, file: str, text: str, *options: str, code: int = 0) -> Finished:
    (folder / file).write_text(text)
    return new_task(folder, name, "--urdf" if file.endswith("urdf") else "--mjcf", file, *options, code=code)


@pytest.fixture
def open_env(monkeypatch):
    made = []

    def make(name: str, folder: Path, num_envs: int = 2, **task: Any) -> Any:
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        for module in [module for module in sys.modules if module.partition(".")[0] == "my_tasks"]:
            monkeypatch.delitem(sys.modules, module)
        made.append(make_env(name, num_envs=num_envs, device="cpu", config_dir=folder / "my_cfg", task=task))
        made[-1].reset()
        return made[-1]

    yield make
    for env in made:
        env.close()


def convert(
    folder: Path, task: str, ppo: str = "", robot: str = DOG, name: str = "mjcf/doggo.xml", **files: str
) -> Finished:
    """Write files of IsaacGymEnvs, others by path, and convert them to the task `Written`."""
    files |= {"cfg/task/Doggo.yaml": task, f"../assets/{name}": robot}
    for path, text in (files | ({"cfg/train/DoggoPPO.yaml": ppo} if ppo else {})).items():
        file = folder / "isaacgymenvs" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return new_task(folder, "Written", "--from-isaacgymenvs", "isaacgymenvs/cfg/task/Doggo.yaml")


def settings(folder: Path, task: str) -> dict:
    return compose([f"task={task}"], folder / "my_cfg")


def test_urdf_quadruped_gets_drives_and_stands(tmp_path, open_env):
    done = new_robot_task(tmp_path, "TrotDog", "dog.urdf", quadruped(), "--free-base")
    wrote = [line for line in done.stdout.splitlines() if line.startswith("wrote")]
    assert wrote == ["wrote my_tasks/trot_dog.py", "wrote my_cfg/task/TrotDog.yaml"]
    env = open_env("TrotDog", tmp_path)
    robot = env.sim.articulation("robot")
    joints = [f"{leg}_{part}" for leg, *_ in LEGS for part in ("hip", "knee")]
    assert robot.actuator_names == robot.joint_names == joints
    for _ in range(100):  # 2 s with the drives at the initial pose
        assert not env.step(torch.zeros(2, 8)).terminated.any()
    assert ((robot.root_pos[:, 2] > 0.25) & (robot.root_pos[:, 2] < 0.4)).all()
    assert robot.root_lin_vel.abs().max() < 0.1


def test_task_without_robot_file_gets_an_example_arm(tmp_path, open_env):
    wrote = [line for line in new_task(tmp_path, "Wave").stdout.splitlines() if line.startswith("wrote")]
    assert wrote == [f"wrote my_{path}" for path in ("tasks/assets/wave.xml", "tasks/wave.py", "cfg/task/Wave.yaml")]
    assert not open_env("Wave", tmp_path).step(torch.zeros(2, 2)).diverged.any()


def test_velocity_task_of_a_robot_file_stands_at_its_pose(tmp_path, open_env):
    """The robot gets a floating base, feet, an IMU and motors; joints may lack limits."""
    text = quadruped().replace('FL_hip" type="revolute"', 'FL_hip" type="continuous"')
    done = new_robot_task(tmp_path, "Trotter", "dog.urdf", text, "--velocity")
    assert "the file has no IMU site" in done.stdout and "8 joints have no armature in the file" in done.stdout
    env = open_env("Trotter", tmp_path, pushes=False)
    task, robot = env.task, env.sim.articulation("robot")
    assert task.robot.feet == tuple(f"body:{leg}_calf" for leg, *_ in LEGS)
    assert set(task.robot.motors) == {"*_hip", "*_knee"}
    size = env.obs_sizes["policy"]
    assert re.search(rf"\| {size - 3}-{size - 1} +\| command ", type(task).__doc__ or "")
    for _ in range(50):  # 1 s
        step = env.step(torch.zeros(2, 8))
        assert not step.terminated.any()
    sag = task.robot.height - robot.root_pos[:, 2]
    assert ((sag > 0.0) & (sag < 0.1)).all() and step.obs["critic"][:, -16:-12].all()  # foot contacts


PAIR = '<contact><pair geom1="floor" geom2="{}_ball"/></contact>'


@pytest.mark.parametrize(
    ("legs", "contact"), [(("dog:fl", "dog:fr"), ""), (("leg[0]", "leg[1]"), ""), (("fl", "fr"), PAIR.format("fl"))]
)
def test_velocity_task_accepts_any_body_names_and_floor(tmp_path, open_env, legs, contact):
    floor = '<worldbody><geom name="floor" type="plane" size="0 0 1"/>'
    text = walker(*legs).replace("<worldbody>", floor).replace("</worldbody>", f"</worldbody>{contact}")
    for leg in legs:
        text = text.replace(f'{leg}_tip" pos="0 0 -0.2"><geom', f'{leg}_tip" pos="0 0 -0.2"><geom name="{leg}_ball"')
    new_robot_task(tmp_path, "Hopalong", "bot.xml", text, "--velocity")
    env = open_env("Hopalong", tmp_path, randomize=True)
    env.step(torch.zeros(2, 4))
    assert env.sim.scene.model.npair == 0 and len(env.task.robot.feet) == 2


@pytest.mark.parametrize("legs", ["lf rf lm rm lr rr", "l0a l0b l1a"])
def test_each_joint_has_one_motor_for_any_leg_names(tmp_path, legs):
    new_robot_task(tmp_path, "Crawl", "bot.xml", walker(*legs.split()), "--velocity")
    patterns = re.findall(r'"(.+)": Motor', (tmp_path / "my_tasks" / "crawl.py").read_text())
    for joint in (f"{leg}_{part}" for leg in legs.split() for part in ("j1", "j2")):
        assert [fnmatchcase(joint, pattern) for pattern in patterns].count(True) == 1, joint


@pytest.mark.parametrize(
    ("old", "new", "augment"),
    [("", "", True), ("0.18 0.13 0", "0.18 0.3 0", False), ('mass value="0.6"', 'mass value="15"', False)],
)
def test_asymmetric_robot_disables_symmetry(tmp_path, old, new, augment):
    """A leg may differ in place or mass from its opposite leg."""
    done = new_robot_task(tmp_path, "Limp", "dog.urdf", quadruped().replace(old, new, 1), "--velocity")
    assert ("no mirror images" in done.stdout) is not augment
    composed = compose(["task=Limp", "device=cpu"], tmp_path / "my_cfg")
    assert composed["ppo"]["symmetry"]["augment"] is augment


@pytest.mark.parametrize(("angle", "warned"), [("degree", True), ("radian", False)])
def test_implausibly_small_joint_ranges_warn(tmp_path, angle, warned):
    in_radians = walker("fl", "fr").replace("-70 70", "-1.2 1.2").replace("-120 20", "-2.2 0.4")
    text = in_radians.replace("<world", f'<compiler angle="{angle}"/><world', 1)
    warnings = new_robot_task(tmp_path, "Crawl", "bot.xml", text, "--velocity").stderr.splitlines()
    assert ["fl_j1 from -1.2 to 1.2 degrees" in line for line in warnings] == warned * [True]


def test_isaacgymenvs_settings_are_converted(tmp_path):
    done = convert(tmp_path, ISAAC, ISAAC_PPO)
    reported = [line for line in done.stdout.splitlines() if line.startswith(("copied", "ignored"))]
    assert [line.rpartition(": ")[2] for line in reported] == [
        "power_scale, joints_at_limit_cost",  # in the yaml, unused by the class
        "viewer, sim.physx, asset.collapse_fixed_joints",
        "network.mlp.d2rl, config.player",  # unused sections are named once
        "speed",  # attribute of the class
    ]
    composed = settings(tmp_path, "Written")
    assert (composed["num_envs"], composed["max_iterations"], composed["log"]["checkpoint_interval"]) == (512, 70, 50)
    expected = {"physics_hz": 240, "control_hz": 60, "episode_length": 800}
    expected |= {"clip_actions": 2.0, "clip_observations": 5.0, "power_scale": 1.5, "joints_at_limit_cost": 0.1}
    assert {key: composed["task"][key] for key in expected} == expected
    ppo = {"horizon": 16, "epochs": 4, "minibatch_size": 2048, "learning_rate": 3e-4, "reward_scale": 0.01}
    ppo |= {"normalize_obs": False, "schedule": "constant", "schedule_per": "epoch", "value_coef": 4}
    ppo["max_grad_norm"] = None  # truncate_grads: false
    assert (composed["ppo"]["network"]["activation"], composed["ppo"]["network"]["separate"]) == ("relu", False)
    assert {key: composed["ppo"][key] for key in ppo} == ppo and list(composed["ppo"]["network"]["hidden"]) == [64, 32]
    source = (tmp_path / "my_tasks" / "written.py").read_text()
    assert 'Path(__file__).parent / "assets/written/written.xml"' in source and "self.half * action" in source


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reach"], "class name"),
        (["Ant"], "Try MyAnt"),
        (["Reach", "--urdf", "no.urdf"], "no.urdf: "),
        (["Reach", "--out", "nowhere"], "--out nowhere: "),
        (["Reach", "--mjcf", "stone.xml"], "stone.xml: "),
        (["Trot", "--mjcf", "menagerie:stone", "--velocity"], "menagerie:stone"),
        (["Reach", "--mjcf", "broken.xml"], "error: broken.xml: "),
        (["Trot", "--velocity"], "--velocity needs --urdf or --mjcf"),
        (["Trot", "--mjcf", "stone.xml", "--feet", "a"], "--feet needs --velocity"),
        (["Reach", "--packages", "a=."], "--packages needs --urdf"),
        (["Trot", "--mjcf", "fixed.xml", "--velocity"], "no floating base"),
        (["Trot", "--mjcf", "snake.xml", "--velocity"], "two limbs"),
        (["Reach", "--from-isaacgymenvs", "broken.yaml"], "cannot read broken.yaml"),
        (["Reach", "--from-isaacgymenvs", "other.yaml"], "IsaacGymEnvs"),
        (["Existing"], "--overwrite"),
    ],
)
def test_bad_input_is_rejected_and_writes_nothing(tmp_path, arguments, words):
    (tmp_path / "stone.xml").write_text('<mujoco><worldbody><body><geom size="1"/></body></worldbody></mujoco>')
    (tmp_path / "snake.xml").write_text(walker("head"))
    (tmp_path / "fixed.xml").write_text(walker("a", "b").replace("<freejoint/>", ""))
    (tmp_path / "broken.xml").write_text("<mujoco><worldbody></mujoco>")
    (tmp_path / "other.yaml").write_text("a: 1\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks" / "existing.py").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert words in new_task(tmp_path, *arguments, code=2).stderr
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "my_tasks" / "existing.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("feet", "unlike"),
    [
        ("a_tip", ""),
        ("a_tip,a_thigh", ", unlike 'a_thigh'"),
        ("b_tip,a_tip,a_shin", ", unlike 'a_tip'"),  # tip and shin are one limb
        ("hat,a_tip", ", unlike 'hat'"),
    ],
)
def test_feet_must_be_on_separate_limbs(tmp_path, feet, unlike):
    error = new_robot_task(tmp_path, "Trot", "bot.xml", walker("a", "b"), "--velocity", "--feet", feet, code=2).stderr
    assert f"--feet {feet}: " in error and f"own limb{unlike}. " in error and "['a_shin', 'b_shin']" in error


def test_actuator_with_two_controls_is_supported(tmp_path):
    (tmp_path / "bot.xml").write_text(
        "<mujoco><worldbody><body><joint name='a'/><geom size='.1'/><body><joint name='b'/><geom size='.1'/></body>"
        "</body></worldbody><actuator><dcmotor joint='a' motorconst='.1 .1' resistance='1' controller='5 0 1 0 0 0'"
        " input='pos vel'/><motor joint='b'/></actuator></mujoco>"
    )
    new_task(tmp_path, "Two", "--mjcf", "bot.xml")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # several times longer on a busy machine
@pytest.mark.parametrize("robot", ["arm", "dog", "velocity"])
def test_new_task_is_checked_trained_and_exported(tmp_path, robot):
    options = []
    if robot != "arm":
        (tmp_path / "dog.urdf").write_text(quadruped())
        options = ["--urdf", "dog.urdf", "--free-base" if robot == "dog" else "--velocity"]
    new_task(tmp_path, "Fresh", *options)
    python = (sys.executable,)
    run_command(*python, ROOT / "tools" / "check_task.py", "Fresh", "-cd", "my_cfg", cwd=tmp_path, timeout_s=900)
    iterations = 5 if robot == "velocity" else 40
    small = ("device=cpu", "num_envs=256", f"max_iterations={iterations}", "log.console=plain", "seed=1")
    train = (ROOT / "train.py", "-cd", "my_cfg", "task=Fresh", *small)
    trained = run_command(*python, *train, cwd=tmp_path, timeout_s=600)
    shown = re.findall(r"\| return (-?[\d,.]+) ", trained.stdout)
    returns = [float(number.replace(",", "")) for number in shown]
    assert robot == "velocity" or returns[-1] > returns[0] + 20
    run_command(*python, ROOT / "tools" / "export.py", "Fresh", "-cd", "my_cfg", "--trust", cwd=tmp_path)
    assert list((tmp_path / "runs" / "Fresh").glob("*/export/*.onnx"))


WALK_YAML = """
name: Doggo
mode: {export_scene: False, export_states: False}
env:
  sides: [False, False]
  numEnvs: ${resolve_default:256,${...num_envs}}
  numObservations: 48
  terrain: {staticFriction: 1.0, curriculum: true, proportions: [0.1, 0.9]}
  baseInitState: {pos: [0.0, 0.0, 0.45], rot: [0.0, 0.0, 0.0, 1.0]}
  randomCommandVelocityRanges: {linear_x: [-1., 1.], yaw: [-3.14, 3.14]}
  control: {stiffness: 40.0, damping: 1.0, actionScale: 0.4, decimation: 4}
  defaultJointAngles: {FL_hip: 0.1, FL_knee: -0.2, NO_knee: 1.0}
  urdfAsset: {file: urdf/doggo.urdf, footName: foot, collapseFixedJoints: True, fixBaseLink: False}
  learn: {episodeLength_s: 12, torqueRewardScale: -0.00002, addNoise: true, pushInterval_s: 15}
  viewer: {pos: [0, 0, 10]}
sim: {dt: 0.005, substeps: 1, gravity: [0.0, 0.0, -9.81]}
task:
  randomize: True
  randomization_params:
    frequency: 600
    actions: {range: [0., .02], operation: additive, distribution: gaussian}
    sim_params: {gravity: {range: [0, 0.4], operation: additive, distribution: gaussian}}
    actor_params:
      doggo:
        color: True
        rigid_body_properties: {mass: {range: [0.5, 1.5], operation: scaling, distribution: uniform, setup_only: True}}
        rigid_shape_properties:
          friction: {num_buckets: 500, range: [0.7, 1.3], operation: scaling, distribution: uniform}
          restitution: {range: [0., 0.7], operation: scaling, distribution: uniform}
      ball: {scale: {range: [0.9, 1.1], operation: scaling, distribution: uniform}}
"""
WALK_PPO = """
params:
  network:
    space: {continuous: {fixed_sigma: True, sigma_init: {name: const_initializer, val: -1.0}}}
    mlp: {units: [64], activation: softsign}
    rnn: {name: lstm, units: 32, layers: 1, before_mlp: True}
  config: {mixed_precision: True, save_frequency: 25, gamma: 0.99, learning_rate: none, horizon_length: 24, seq_len: 8}
"""


def test_nested_isaacgymenvs_settings_take_effect(tmp_path, open_env):
    done = convert(tmp_path, WALK_YAML, WALK_PPO, quadruped(), "urdf/doggo.urdf")
    composed = settings(tmp_path, "Written")
    task = composed["task"]
    assert [task[key] for key in ("physics_hz", "control_hz", "episode_length", "reach")] == [200, 50, 600, 0.4]
    assert set(task["stiffness"].values()) == {40.0} and set(task["damping"].values()) == {1.0}
    assert task["learn"]["torque_reward_scale"] == -2e-5 and task["terrain"]["proportions"] == [0.1, 0.9]
    assert (dict(task["mode"]), task["sides"]) == ({"export_scene": False, "export_states": False}, [False, False])
    assert task["random_command_velocity_ranges"] == {"linear_x": [-1.0, 1.0], "yaw": [-3.14, 3.14]}
    assert set(task["randomization_params"]["actor_params"]["robot"]["rigid_shape_properties"]) == {"friction"}
    ppo, network = composed["ppo"], composed["ppo"]["network"]
    assert (ppo["precision"], ppo["sequence_length"], composed["log"]["checkpoint_interval"]) == ("bf16", 8, 25)
    assert (network["log_std_init"], network["state_dependent_std"]) == (-1.0, False)
    assert (network["rnn"], network["rnn_size"], network["rnn_layers"]) == ("lstm", 32, 1)
    for left in ("restitution", "actor_params.ball", "no joint NO_knee", "activation", "learning_rate", "before_mlp"):
        assert left in done.stdout
    shutil.rmtree(tmp_path / "assets")  # the task has its own copy of the robot
    env = open_env("Written", tmp_path, start_noise=0.0)
    robot = env.sim.articulation("robot")
    assert robot.root_pos[:, 2].tolist() == pytest.approx([0.45, 0.45])
    start = dict(zip(robot.joint_names, robot.joint_pos[0].tolist(), strict=True))
    assert (start["FL_hip"], start["FL_knee"], start["RR_hip"]) == pytest.approx((0.1, -0.2, 0.0))
    assert not env.step(torch.zeros(2, 8)).diverged.any()


@pytest.mark.parametrize(
    ("asset", "code", "free"),
    [
        ("urdfAsset: {file: urdf/doggo.urdf, fixBaseLink: True}", "", False),
        ("asset: {assetFileName: urdf/doggo.urdf}", "", True),
        ("asset: {assetFileNameDog: urdf/doggo.urdf}", "options.fix_base_link = True", False),
        ("", 'file = "urdf/doggo.urdf"\noptions.fix_base_link = False', True),
    ],
)
def test_base_is_fixed_or_free_as_in_isaacgymenvs(tmp_path, asset, code, free):
    task = f"name: Doggo\nenv:\n  numEnvs: 8\n  {asset}\n"
    done = convert(tmp_path, task, robot=quadruped(), name="urdf/doggo.urdf", **{"tasks/doggo.py": code})
    assert f"base is {'free' if free else 'fixed'}" in done.stdout
    text = (tmp_path / "my_tasks" / "assets" / "written" / "written.xml").read_text()
    assert ("<freejoint" in text or 'type="free"' in text) is free


REGISTRY = """
def make_doggo(cfg, *args):
    kinds = dict(walk=DoggoWalk)
    return kinds[cfg["env"]["kind"]](cfg, *args)

isaacgym_task_map = {"Doggo": make_doggo, "Other": Other}
"""
WALK_CODE = """
class DoggoWalk(DoggoBase, Mixin):
    def load(self):
        self.cfg_env = compose(config_name="task/DoggoEnv.yaml")
        bone_file = "bone.urdf"
        bone_options.fix_base_link = False
"""
BASE_CODE = """
class DoggoBase(VecTask):
    def load(self):
        bone_options.fix_base_link = False
        dog_file = "doggo.urdf"
        dog_options.fix_base_link = True
"""


@pytest.mark.parametrize("registry", [REGISTRY, REGISTRY.replace("make_doggo,", "DoggoWalk,")])
def test_robot_file_is_found_in_base_classes_of_the_task(tmp_path, registry):
    """Bases of objects, which have no joints, are ignored."""
    texts = {"tasks/__init__.py": registry, "tasks/dogs/walk.py": WALK_CODE, "tasks/dogs/base.py": BASE_CODE}
    texts["tasks/other.py"] = 'class Other(VecTask):\n    file = "other.urdf"\n    options.fix_base_link = False\n'
    texts["cfg/task/DoggoEnv.yaml"] = "env: {bone_friction: 0.3, kind: swim}\nsim: {dt: 0.01}\n"
    texts["../assets/dogs/urdf/bone.urdf"] = '<robot name="bone"><link name="bone"/></robot>'
    yaml = "name: Doggo\nenv: {numEnvs: 8, kind: walk, resetTime: 12}\nsim: {dt: 0.02}\n"
    done = convert(tmp_path, yaml, robot=quadruped(), name="dogs/urdf/doggo.urdf", **texts)
    assert "base is fixed" in done.stdout
    task = settings(tmp_path, "Written")["task"]
    assert (task["bone_friction"], task["kind"], task["physics_hz"], task["episode_length"]) == (0.3, "walk", 50, 600)
    model = mujoco.MjModel.from_xml_path(str(tmp_path / "my_tasks" / "assets" / "written" / "written.xml"))
    assert model.nq == model.njnt == 8


ODD_NOISE = """
name: Doggo
env: {numEnvs: 8, resetTime: -1, asset: {assetFileName: urdf/doggo.urdf}}
task:
  randomize: True
  randomization_params:
    observations: {dof_pos: {range: [0, 0.005], operation: additive, distribution: gaussian}}
    gravity: {range: [0, 0.4], operation: additive, distribution: gaussian}
    actor_params:
      dog:
        color: True
        scale: {range: [0.95, 1.05], operation: scaling, distribution: uniform, setup_only: True}
        tendon_properties: {damping: {range: [0.3, 3.0], operation: scaling, distribution: loguniform}}
        dof_properties:
          damping: {range: [0.01, 20.0], operation: scaling, distribution: loguniform}
          stiffness: {range: [0, 20.0], operation: scaling, distribution: loguniform}
          velocity: {range: [0.5, 2.0], operation: scaling, distribution: uniform}
  adr:
    use_adr: True
    params:
      dog_damping: {range_path: actor_params.dog.dof_properties.damping.range, init_range: [0.5, 2.0], delta: 0.01}
      dog_odd: {range_path: [1], init_range: 3}
      odd: 3
"""


@pytest.mark.parametrize("left", ["damping", ""])
def test_randomisation_keeps_only_supported_entries(tmp_path, open_env, left):
    """Initial ranges of ADR are kept; a task without supported entries does not randomise."""
    text = ODD_NOISE if left else re.sub(r".*(damping|color).*\n", "", ODD_NOISE)
    done = convert(tmp_path, text, robot=quadruped(), name="urdf/doggo.urdf")
    task = settings(tmp_path, "Written")["task"]
    assert (task["randomize"], task["episode_length"]) == (bool(left), 600)
    params = task["randomization_params"]
    if left:
        robot = params["actor_params"]["robot"]
        assert (robot["color"], robot["dof_properties"]) == (True, {"damping": robot["dof_properties"]["damping"]})
        assert robot["dof_properties"]["damping"]["range"] == [0.5, 2.0] and "observations" not in params
    else:
        assert not params
    paths = ("observations", "gravity", "robot.scale", "dof_properties.stiffness", "dof_properties.velocity")
    assert all(path in done.stdout for path in paths)
    open_env("Written", tmp_path).step(torch.zeros(2, 8))


def test_ppo_settings_come_from_the_base_task(tmp_path):
    train = {"cfg/train/BasePPO.yaml": "params: {config: {seq_length: 8, lr_schedule: fixed, horizon_length: 20}}\n"}
    assert "BasePPO.yaml" in convert(tmp_path, ISAAC.replace("name: Doggo", "name: Base"), **train).stdout
    ppo = settings(tmp_path, "Written")["ppo"]
    assert (ppo["sequence_length"], ppo["schedule"], ppo["horizon"]) == (8, "constant", 20)


def test_sac_settings_are_not_read_as_ppo_settings(tmp_path):
    train = {"cfg/train/BasePPO.yaml": "params: {config: {horizon_length: 20}}\n"}
    train["cfg/train/Doggo.yaml"] = "params: {algo: {name: sac}}\n"
    assert "train/Doggo.yaml" in convert(tmp_path, ISAAC.replace("name: Doggo", "name: Base"), **train).stdout
    assert settings(tmp_path, "Written")["ppo"]["horizon"] == 24


def test_generated_robot_file_is_reported_with_advice(tmp_path):
    for folder in ("tasks", "cfg/task"):
        (tmp_path / "isaacgymenvs" / folder).mkdir(parents=True)
    code = 'ET.ElementTree(root).write("drone.xml")\nasset_file = "drone.xml"'
    (tmp_path / "isaacgymenvs" / "tasks" / "drone.py").write_text(code)
    (tmp_path / "isaacgymenvs" / "cfg" / "task" / "Drone.yaml").write_text("env: {numEnvs: 8}\n")
    source = ("--from-isaacgymenvs", "isaacgymenvs/cfg/task/Drone.yaml")
    error = new_task(tmp_path, "MyDrone", *source, code=2).stderr
    assert "drone.xml" in error and "--mjcf" in error


OLD = """
<mujoco>
  <compiler meshdir="meshes"/>
  <option apirate="200" timestep="0.005"/>
  <asset><mesh name="tip" file="tip.obj"/></asset>
  <worldbody>
    <geom type="plane" size="1 1 1" material="grid"/>
    <body name="base" pos="0 0 0.5"><geom name="base" size="0.1"/>
      <body name="arm" pos="0.2 0 0"><joint name="turn" axis="0 1 0"/><geom size="0.05"/>
        <body name="hand" pos="-0.1 0 0"><joint name="bend" axis="0 1 0"/>
          <geom name="hand" type="mesh" mesh="tip"/>
        </body>
      </body>
    </body>
  </worldbody>
  <contact><pair geom1="base" geom2="hand"/></contact>
</mujoco>
"""


def test_robot_file_of_older_mujoco_is_converted(tmp_path):
    tip = "v 0 0 0\nv .1 0 0\nv 0 .1 0\nv 0 0 .1\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"
    done = convert(tmp_path, ISAAC, robot=OLD, **{"../assets/mjcf/meshes/tip.obj": tip})
    assert "apirate" in done.stdout and "grid" in done.stdout and "overlap" in done.stdout
    shutil.rmtree(tmp_path / "assets")
    model = mujoco.MjModel.from_xml_path(str(tmp_path / "my_tasks" / "assets" / "written" / "written.xml"))
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    assert model.nmesh == 1 and data.ncon == 0


def test_pipe_as_robot_asset_is_rejected(load_tool, tmp_path):
    meshes = tmp_path / "assets" / "mjcf" / "meshes"
    meshes.mkdir(parents=True)
    os.mkfifo(meshes / "tip.obj")
    with pytest.raises(TaskError, match=r"tip\.obj"):
        (tmp_path / "assets" / "mjcf" / "old.xml").write_text(OLD)
        load_tool("new_task").read_spec(str(tmp_path / "assets" / "mjcf" / "old.xml"), [])


def test_recursive_yaml_defaults_are_rejected(tmp_path):
    file = tmp_path / "X.yaml"
    file.write_text(f"defaults: [{', '.join(6 * ['X'])}]\nenv: {{}}\n")
    with pytest.raises(ConfigError, match="more than 50 files"):
        read_settings(file)


def test_fixed_base_of_urdf_is_reported(tmp_path):
    assert "--free-base" in new_robot_task(tmp_path, "Wave", "dog.urdf", quadruped()).stdout


def test_base_yamls_are_read(tmp_path):
    bases = {"cfg/task/Base.yaml": ISAAC.replace("speed: 3.0", "gain: {a: 1.0, b: 2.0}")}
    bases["cfg/task/env/throw.yaml"] = "far: 5.0\n"
    task = "defaults: [Base, env: throw, _self_]\nenv: {gain: {b: 3.0}, episodeLength: 20}\n"
    convert(tmp_path, task, **bases)
    composed = settings(tmp_path, "Written")["task"]
    assert (composed["gain"], composed["far"], composed["episode_length"]) == ({"a": 1.0, "b": 3.0}, 5.0, 20)


EVIL = (
    'x"; import os; os.system("touch pwned"); "',
    "y'); __import__('os').system('touch pwned'); ('",
    'z"""\n__import__("os").system("touch pwned")\n"""',
    "$name $$ {0} {self} %s \\N{BULLET} \\",
    "\u202e# noqa\u2028\x85 [a] *",
)


def rename_hostile(text: str, *benign: str) -> str:
    for name, evil in zip(benign, itertools.cycle(EVIL)):
        assert name in text
        text = text.replace(f'"{name}"', quoteattr(f"{evil}{name}", {"\n": "&#10;"}))
    return text


def calls(folder: Path) -> set[str]:
    """Return all calls and imports in the Python files below a folder."""
    trees = [ast.parse(file.read_text()) for file in sorted(folder.rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {*names, *(ast.unparse(node) for node in nodes if isinstance(node, ast.Import))}


@pytest.mark.parametrize("kind", ["mjcf", "urdf", "drives", "velocity", "isaacgymenvs"])
def test_names_in_robot_files_never_become_code(tmp_path, open_env, kind):
    robot = {"mjcf": DOG, "isaacgymenvs": DOG, "velocity": walker("fl", "fr"), "urdf": quadruped()}.get(kind, DOG)
    names = {"velocity": ("trunk", "fl_j1", "fr_j2", "fl_tip", "fr_tip")}
    names["urdf"] = ("trunk", "FL_hip", "FL_knee", "RR_hip")
    yamls = {"": ISAAC, "evil_": ISAAC.replace("  speed: 3.0", HOSTILE)}
    if kind == "drives":
        robot = robot.partition("<actuator>")[0] + "</mujoco>"
    words = {"urdf": ("--urdf", "robot.xml", "--free-base"), "velocity": ("--mjcf", "robot.xml", "--velocity")}
    found_calls = []
    for prefix in ("", "evil_"):
        folder = tmp_path / f"{prefix}folder"
        (folder / "a" / "cfg" / "task").mkdir(parents=True)
        (folder / "assets" / "mjcf").mkdir(parents=True)
        text = rename_hostile(robot, *names.get(kind, ("torso", "hip"))) if prefix else robot
        for file in (folder / "robot.xml", folder / "assets" / "mjcf" / "doggo.xml"):
            file.write_text(text)
        (folder / "a" / "cfg" / "task" / "Doggo.yaml").write_text(yamls[prefix])
        source = ("--from-isaacgymenvs", "a/cfg/task/Doggo.yaml")
        options = source if kind == "isaacgymenvs" else words.get(kind, ("--mjcf", "robot.xml"))
        assert all(line.isprintable() for line in new_task(folder, "Harmless", *options).stdout.splitlines())
        found_calls.append(calls(folder / "my_tasks"))
    assert found_calls[0] == found_calls[1]
    env = open_env("Harmless", folder)
    env.step(torch.zeros(2, env.task.num_actions))
    assert not [*tmp_path.rglob("pwned*")]


def test_name_with_interpolation_is_rejected(tmp_path):
    text = walker("fl", "fr").replace("fl_tip", "${oc.env:HOME}")
    assert "reference" in new_robot_task(tmp_path, "Trot", "bot.xml", text, "--velocity", code=2).stderr
    assert not (tmp_path / "my_tasks").exists()


HOSTILE = r"""
  speed: 3.0
  "a: float\n    b = __import__('os').system('touch pwned')  #": 1.0
  "x: 1\n_target_: os.system\n#": 1.0
  _target_: os.system
  class: 1.0
  float: 1.0
  list: [1.0]
  episode_length_x: "\n_target_: os.system"
  observations: {a: 1.0}
  secret: "${oc.env:HOME}"
  learn: {"a\nb": "x\" #", "${oc.env:HOME}": [1.0, "'"], _target_: os.system, on: true}
"""


def test_hostile_isaacgymenvs_yaml_never_becomes_code(tmp_path):
    ppo = ISAAC_PPO.replace("network: {", "network: {_target_: x.y, ")
    convert(tmp_path, ISAAC.replace("  speed: 3.0", HOSTILE), ppo)
    composed = settings(tmp_path, "Written")
    task = composed["task"]
    assert composed["ppo"]["network"]["_target_"] is None
    assert task["_target_"] == "my_tasks.written.Written" and "secret" not in task and "class" not in task
    assert task["episode_length_x"] == "\n_target_: os.system"
    assert task["learn"]["a\nb"] == 'x" #' and "_target_" not in task["learn"]


@pytest.mark.parametrize(
    ("yaml", "word"),
    [
        ("a: &a [1, 1]\nb: &b [*a, *a]\nenv: {c: *b}\n", "alias"),
        ("env:\n" + "".join(f"  k{i}: [{'1, ' * 50}]\n" for i in range(1000)), "too many"),
        ("env: " + "[" * 2000, "deeply"),
        ("env: {a: " + "1" * 10**6 * 2 + "}", "bytes"),
        ("3\n", "cannot read"),
        ("env: !!python/object/apply:os.system [ls]\n", "tag"),
        ("env: {numEnvs: [1]}\n", "num_envs"),
        ("env: {numEnvs: 1}\nsim: {dt: 0}\n", "dt"),
        ("env: {episodeLength: x}\nsim: [1]\ntask: 3\n", "episode_length"),
        ('env: {asset: {assetFileName: "../../../../../../etc/passwd.xml"}}\n', "--urdf or --mjcf"),
        ('env: {asset: {assetFileName: "a\\0.xml"}}\n', "--urdf or --mjcf"),
        ('env: {asset: {assetFileName: "**[.xml", b: [1]}, control: 3, defaultJointAngles: [1]}\n', "--urdf or --mjcf"),
        ("env: {asset: 3, urdfAsset: [x.urdf], baseInitState: {pos: [a, b, c]}}\n", "--urdf or --mjcf"),
        ("env: {a: '${oc.env:HOME}'}\ndefaults: [../../x, /y, {z: ..}]\n", "--urdf or --mjcf"),
    ],
)
def test_invalid_isaacgymenvs_yaml_is_rejected(tmp_path, yaml, word):
    (tmp_path / "Doggo.yaml").write_text(yaml)
    assert word in new_task(tmp_path, "Hop", "--from-isaacgymenvs", "Doggo.yaml", code=2).stderr
