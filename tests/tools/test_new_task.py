"""`tools/new_task.py`: tasks that train at once, for robots of users and with settings of IsaacGymEnvs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from gpusim_rl import make_env
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
  asset: {assetFileName: "mjcf/doggo.xml"}
sim:
  dt: 0.0083333
  substeps: 2
"""
ISAAC_PPO = """
params:
  network: {mlp: {units: [64, 32], activation: elu}}
  config:
    max_epochs: ${resolve_default:70,${....max_iterations}}
    horizon_length: 16
    mini_epochs: 4
    minibatch_size: 2048
    learning_rate: 3e-4
    reward_shaper: {scale_value: 0.01}
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


def quadruped() -> str:
    """A URDF of a trunk with four legs of two joints, which reach 0.33 m below it."""
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


def new_task(folder: Path, *arguments: str) -> Finished:
    return run_command(sys.executable, ROOT / "tools" / "new_task.py", *arguments, cwd=folder, check=False)


def settings(folder: Path, task: str) -> dict:
    return compose([f"task={task}"], folder / "my_cfg")


def test_an_urdf_quadruped_gets_drives_and_stands_on_its_feet(tmp_path, monkeypatch):
    (tmp_path / "dog.urdf").write_text(quadruped())
    done = new_task(tmp_path, "TrotDog", "--urdf", "dog.urdf", "--free-base")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("wrote")] == [
        "wrote my_tasks/trot_dog.py",
        "wrote my_cfg/task/TrotDog.yaml",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env("TrotDog", num_envs=4, device="cpu", config_dir=tmp_path / "my_cfg")
    robot = env.sim.articulation("robot")
    assert (
        robot.actuator_names == robot.joint_names == [f"{leg}_{part}" for leg, *_ in LEGS for part in ("hip", "knee")]
    )
    env.reset()
    for _ in range(100):  # 2 s with the drives at their start
        step = env.step(torch.zeros(4, 8))
        assert not step.terminated.any()
    assert ((robot.root_pos[:, 2] > 0.25) & (robot.root_pos[:, 2] < 0.4)).all()
    assert robot.root_lin_vel.abs().max() < 0.1
    env.close()


def test_a_robot_of_a_file_follows_commanded_velocities(tmp_path, monkeypatch):
    """It gets a floating base, soles, an IMU and motors, and stands at the pose; a joint need not have limits."""
    (tmp_path / "dog.urdf").write_text(quadruped().replace('FL_hip" type="revolute"', 'FL_hip" type="continuous"'))
    done = new_task(tmp_path, "Trotter", "--urdf", "dog.urdf", "--velocity")
    assert done.returncode == 0, done.stderr
    assert "the file has no IMU site" in done.stdout and "8 joints have no armature in the file" in done.stdout
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    env = make_env("Trotter", num_envs=4, device="cpu", config_dir=tmp_path / "my_cfg", task={"pushes": False})
    task, robot = env.task, env.sim.articulation("robot")
    assert task.robot.feet == tuple(f"body:{leg}_calf" for leg, *_ in LEGS)  # type: ignore[attr-defined]
    assert set(task.robot.motors) == {"*_hip", "*_knee"}  # type: ignore[attr-defined]
    env.reset()
    for _ in range(50):  # 1 s
        step = env.step(torch.zeros(4, 8))
        assert not step.terminated.any()
    sag = task.robot.height - robot.root_pos[:, 2]  # type: ignore[attr-defined]
    assert ((sag > 0.0) & (sag < 0.1)).all() and step.obs["critic"][:, -16:-12].all()  # contacts of the feet
    env.close()


def test_settings_of_isaacgymenvs_are_taken_over(tmp_path):
    theirs = tmp_path / "isaacgymenvs" / "cfg"
    for name, text in (("task/Doggo.yaml", ISAAC), ("train/DoggoPPO.yaml", ISAAC_PPO)):
        (theirs / name).parent.mkdir(parents=True)
        (theirs / name).write_text(text)
    (tmp_path / "assets" / "mjcf").mkdir(parents=True)
    (tmp_path / "assets" / "mjcf" / "doggo.xml").write_text(DOG)
    done = new_task(tmp_path, "MyDoggo", "--from-isaacgymenvs", "isaacgymenvs/cfg/task/Doggo.yaml")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("from")]
    assert told == ["from Doggo.yaml, in the yaml, not used by the class yet: power_scale, joints_at_limit_cost"]
    found = settings(tmp_path, "MyDoggo")
    assert (found["num_envs"], found["max_iterations"]) == (512, 70)
    expected = {
        "physics_hz": 240,
        "control_hz": 60,
        "episode_length": 800,
        "clip_actions": 2.0,
        "clip_observations": 5.0,
    }
    expected |= {"power_scale": 1.5, "joints_at_limit_cost": 0.1}
    assert {key: found["task"][key] for key in expected} == expected
    ppo = {"horizon": 16, "epochs": 4, "minibatch_size": 2048, "learning_rate": 3e-4, "reward_scale": 0.01}
    assert {key: found["ppo"][key] for key in ppo} == ppo and list(found["ppo"]["network"]["hidden"]) == [64, 32]
    source = (tmp_path / "my_tasks" / "my_doggo.py").read_text()
    assert 'Path(__file__).parent / "../assets/mjcf/doggo.xml"' in source and "self.half * action" in source


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reach"], "named like a class"),
        (["Ant"], "there is a task 'Ant' already; try MyAnt"),
        (["Reach", "--urdf", "no.urdf"], "there is no robot file no.urdf"),
        (["Reach", "--out", "nowhere"], "--out nowhere: there is no such folder"),
        (["Reach", "--mjcf", "stone.xml"], "stone.xml: the robot has no joint"),
        (["Trot", "--mjcf", "menagerie:stone", "--velocity"], "error: menagerie:stone"),
        (["Trot", "--mjcf", "broken.xml", "--velocity"], "error: broken.xml: "),
        (["Reach", "--mjcf", "broken.xml"], "error: broken.xml: "),
        (["Trot", "--velocity"], "--velocity needs the robot"),
        (["Trot", "--mjcf", "stone.xml", "--feet", "a"], "--feet is for --velocity"),
        (["Trot", "--mjcf", "stone.xml", "--velocity"], "stone.xml: the robot has no floating base"),
        (["Trot", "--mjcf", "stone.xml", "--velocity", "--free-base"], "stone.xml: found no feet"),
        (["Reach", "--from-isaacgymenvs", "broken.yaml"], "cannot read broken.yaml"),
        (["Reach", "--from-isaacgymenvs", "other.yaml"], "not a task of IsaacGymEnvs"),
        (["Taken"], "exists already; try another name, or --overwrite"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, arguments, said):
    (tmp_path / "stone.xml").write_text('<mujoco><worldbody><body><geom size="1"/></body></worldbody></mujoco>')
    (tmp_path / "broken.xml").write_text("<mujoco><worldbody></mujoco>")
    (tmp_path / "other.yaml").write_text("a: 1\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks" / "taken.py").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    done = run_here(ROOT / "tools" / "new_task.py", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 == done.stderr.count(said)
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "my_tasks" / "taken.py").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("robot", ["arm", "dog", "velocity"])
def test_from_nothing_to_an_exported_policy(tmp_path, robot):
    options = []
    if robot != "arm":
        (tmp_path / "dog.urdf").write_text(quadruped())
        options = ["--urdf", "dog.urdf", "--free-base" if robot == "dog" else "--velocity"]
    done = new_task(tmp_path, "Fresh", *options)
    assert done.returncode == 0, done.stderr
    python = (sys.executable,)
    checked = run_command(
        *python, ROOT / "tools" / "check_task.py", "Fresh", "-cd", "my_cfg", cwd=tmp_path, check=False
    )
    assert checked.returncode == 0, checked.stdout
    iterations = 5 if robot == "velocity" else 40
    small = ("device=cpu", "num_envs=256", f"max_iterations={iterations}", "log.console=plain", "seed=1")
    trained = run_command(*python, ROOT / "train.py", "-cd", "my_cfg", "task=Fresh", *small, cwd=tmp_path)
    said = re.findall(r"\| return (-?[\d,.]+) ", trained.stdout)
    returns = [float(number.replace(",", "")) for number in said]
    assert robot == "velocity" or returns[-1] > returns[0] + 20
    run_command(*python, ROOT / "tools" / "export.py", "Fresh", "-cd", "my_cfg", "--trust", cwd=tmp_path)
    assert list((tmp_path / "runs" / "Fresh").glob("*/export/*.onnx"))
