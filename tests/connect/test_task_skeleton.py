"""Tasks from configurations of Isaac Lab and mjlab: what is written, and that it is what the configuration says.

The configurations themselves are read in tests/connect/test_task_from_library.py, with the libraries.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim_rl import make_env
from gpusim_rl.connect.manager_cfg import CfgReader, LibraryTask, Term, by_section
from gpusim_rl.connect.task_skeleton import RobotElements, task_texts
from gpusim_rl.files.paths import assets_dir

CART = assets_dir() / "cartpole.xml"
MDP = "isaaclab.envs.mdp."
SLIDER = {"name": "robot", "joint_names": ["slider.*"]}


def cartpole(**changes: Any) -> LibraryTask:
    """What Isaac-Cartpole says, with a reward of the user's own."""
    push = Term("push", f"{MDP}actions.JointEffortActionCfg", {"joint_names": ["slider_.*"], "scale": 100.0}, {})
    push.params["asset_name"] = "robot"
    rewards = [
        Term("alive", f"{MDP}rewards.is_alive", {}, {"weight": 1.0}),
        Term("mine", "my_envs.rewards.is_alive", {"gain": 3.0}, {"weight": 0.5}),
    ]
    described: dict[str, Any] = {
        "source": "Isaac-Cartpole of Isaac Lab 3.0.0",
        "physics_hz": 120.0,
        "control_hz": 60.0,
        "episode_s": 5.0,
        "num_envs": 64,
        "robot": "robot",
        "root": ([0.0, 0.0, 2.0], [1.0, 0.0, 0.0, 0.0]),
        "pose": {"slider_to_cart": 0.0, "cart_to_.*": 0.1},
        "drives": [
            {"model": "ImplicitActuatorCfg", "joints": [".*"], "effort_limit": 400.0, "damping": {".*cart": 10.0}}
        ],
        "option": {"integrator": "implicitfast"},
        "groups": {
            "policy": [
                Term("pos", f"{MDP}observations.joint_pos_rel", {}, {"noise": {"n_min": -0.1, "n_max": 0.1}}),
                Term("far", f"{MDP}observations.joint_pos", {"asset_cfg": SLIDER}, {"clip": [-1.0, 1.0]}),
            ]
        },
        "terms": {
            "actions": [push],
            "rewards": rewards,
            "terminations": [Term("time_out", f"{MDP}terminations.time_out", {}, {"time_out": True})],
            "events": [Term("shake", f"{MDP}events.push", {"range": [0.5, 1.0]}, {"mode": "interval", "every": 2.0})],
            "commands": [],
        },
        "left": {"scene.light.spawn.intensity": 2000.0},
    }
    return LibraryTask(**(described | changes))


def written(folder: Path, task: LibraryTask) -> list[str]:
    elements = RobotElements(CART, {"slider_to_cart": "slider", "cart_to_pole": "hinge"})
    places = {"robot": f'Path("{CART}")'}
    source, yaml, notes = task_texts(task, elements, {"name": "Taken", "module": "taken"}, places)
    for path, text in (("my_tasks/taken.py", source), ("my_cfg/task/Taken.yaml", yaml)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return notes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tasks.taken", raising=False)
    return tmp_path


def test_a_task_with_their_numbers_runs_at_once(folder):
    written(folder, cartpole())
    env = make_env("Taken", num_envs=3, device="cpu", config_dir=folder / "my_cfg")
    task, robot, cfg = env.task, env.sim.articulation("robot"), env.task.cfg
    assert (1 / task.dt, cfg.physics_hz, cfg.episode_length) == (pytest.approx(60.0), 120, 300)
    assert cfg.weights == {"alive": 1.0, "mine": 0.5}  # type: ignore[attr-defined]
    assert cfg.terms["rewards"] == {"mine": {"gain": 3.0}}  # type: ignore[attr-defined]
    assert cfg.terms["events"] == {"shake": {"range": [0.5, 1.0], "every": 2.0}}  # type: ignore[attr-defined]
    assert cfg.observations == {"pos": {"noise": [-0.1, 0.1]}}
    assert robot.control_limits.tolist() == [[-400.0, 400.0]]
    assert env.sim.scene.model.dof_damping.tolist() == [10.0, 0.0]
    assert env.sim.scene.model.body("robot/rail").pos.tolist() == [0.0, 0.0, 2.0]  # where it is there
    env.reset()
    assert torch.allclose(robot.joint_pos, torch.tensor([0.0, 0.1]))
    env.step(torch.ones(3, 1))
    assert env.sim.ctrl.tolist() == [[100.0]] * 3
    terms = task.rewards()
    assert torch.allclose(terms["alive"], torch.tensor(1.0 / 60.0)) and not terms["mine"].any()
    env.close()


def test_what_is_to_be_written_and_what_is_not_taken_is_named(folder):
    to_write = [
        "observations.far: isaaclab.envs.mdp.observations.joint_pos",
        "rewards.mine: my_envs.rewards.is_alive",
        "events.shake, interval: isaaclab.envs.mdp.events.push",
    ]
    not_taken = "scene.light: spawn.intensity=2000.0"
    notes = written(folder, cartpole())
    assert notes[:4] == ["to write:", *(f"  {line}" for line in to_write)]
    assert notes[4:] == ["not taken, in full at the end of the yaml:", f"  {not_taken}"]
    source, yaml = (folder / "my_tasks/taken.py").read_text(), (folder / "my_cfg/task/Taken.yaml").read_text()
    assert all(f"    - {line}\n" in source for line in to_write) and yaml.endswith(f"# Not taken:\n# {not_taken}\n")
    assert '"mine": zero,  # to write: is_alive(gain=3.0)' in source


def test_servos_act_around_the_pose_and_hold_the_other_joints(folder):
    servo = Term("reach", f"{MDP}actions.JointPositionActionCfg", {"joint_names": ["cart_to_pole"]}, {})
    servo.params |= {"asset_name": "robot", "use_default_offset": True, "scale": 0.5}
    drives = [{"model": "IdealPDActuatorCfg", "joints": ["slider.*", "cart.*", "knee"], "damping": 1.0}]
    drives[0]["stiffness"] = {"slider.*": 7.0}
    notes = written(folder, cartpole(drives=drives, terms={**cartpole().terms, "actions": [servo]}))
    assert "  drives: the stiffness of hinge is a guess: IdealPDActuatorCfg has no such number" in notes
    assert "  joint 'knee': the robot's file has none, see --names" in notes
    env = make_env("Taken", num_envs=2, device="cpu", config_dir=folder / "my_cfg")
    env.reset()
    env.step(torch.ones(2, 1))
    assert torch.allclose(env.sim.ctrl, torch.tensor([0.0, 0.6]))
    assert env.sim.scene.model.actuator_gainprm[:, 0].tolist() == [7.0, 20.0]
    env.close()


def test_a_direct_env_has_its_numbers_and_no_code(folder):
    none: dict[str, list[Term]] = {key: [] for key in cartpole().terms}
    values = {"action_scale": 100.0, "rew_scale_alive": 2.0, "max_cart_pos": 3.0}
    pose = {".*": 0.5}
    described = cartpole(code="my_envs:Cart", values=values, terms=none, groups={}, pose=pose)
    assert written(folder, described)[1].endswith("_reset_idx of my_envs:Cart")
    env = make_env("Taken", num_envs=2, device="cpu", config_dir=folder / "my_cfg")
    cfg = env.task.cfg
    assert cfg.weights == {"rew_scale_alive": 2.0}  # type: ignore[attr-defined]
    assert cfg.terms["env"] == {"action_scale": 100.0, "max_cart_pos": 3.0}  # type: ignore[attr-defined]
    env.reset()
    env.step(torch.tensor([[1.0, -1.0]] * 2))
    assert env.sim.ctrl.tolist() == [[100.0, -100.0]] * 2  # efforts, whatever the pose
    env.close()


@dataclass
class Spring:
    stiffness: float = 5.0
    name: str = "spring"


@dataclass
class Described:
    dt: float = 0.01
    limit: float | None = None
    springs: dict[str, Spring] = field(default_factory=lambda: {"left": Spring()})
    viewer: Spring = field(default_factory=Spring)


def test_what_is_not_a_librarys_default_and_was_not_read_is_left(monkeypatch):
    monkeypatch.setattr(Spring, "__module__", "isaaclab.sim.springs")
    cfg = Described(limit=math.pi)
    cfg.springs["left"].stiffness, cfg.viewer.stiffness = 6.0, 7.0
    reader = CfgReader(cfg)
    left = {"dt": 0.01, "limit": math.pi, "springs.left.stiffness": 6.0, "viewer.stiffness": 7.0}
    assert reader.left == left  # the user's own defaults are the user's choice
    assert reader.take("dt") == 0.01 and reader.take("nothing.here", 3) == 3
    assert by_section(reader.left) == [f"limit: {math.pi}", "springs: left.stiffness=6.0"]
