"""Scripted controllers: what they compute, what they return, and that they do better than zero actions."""

from __future__ import annotations

import json
import math

import mujoco
import pytest
import torch
from gpusim_rl.tasks.trifinger import Trifinger

import gpusim_rl
import scripted
from gpusim_rl.errors import ConfigError

TASKS = {"AllegroHand": 16, "ShadowHand": 20, "Trifinger": 9}


@pytest.fixture
def trifinger():
    return scripted.load("Trifinger")


@pytest.mark.parametrize("task", TASKS)
def test_actions_are_finite_and_within_limits(task):
    env = gpusim_rl.make_env(task, num_envs=2, seed=1, device="cpu")
    env.reset()
    act = scripted.load(task).controller(env.task)
    chosen = []
    for _ in range(64):
        chosen.append(act())
        env.step(chosen[-1])
    chosen = torch.stack(chosen)
    assert chosen.shape == (64, 2, TASKS[task]) and chosen.dtype == torch.float32
    assert chosen.abs().max() <= 1.0 and chosen.std(dim=0).min() > 0.0
    env.sim.close()


@pytest.mark.parametrize("task", ["AllegroHand", "Trifinger"])
def test_a_controller_only_reads(task):
    env = gpusim_rl.make_env(task, num_envs=2, seed=1, device="cpu")
    env.reset()
    act = scripted.load(task).controller(env.task)
    env.step(act())
    before = {name: value.clone() for name, value in env.task.state_dict()["tensors"].items()}
    physics = env.sim.qpos.clone(), env.sim.qvel.clone(), env.sim.ctrl.clone()
    for _ in range(4):
        act()
    after = env.task.state_dict()["tensors"]
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(map(torch.equal, physics, (env.sim.qpos, env.sim.qvel, env.sim.ctrl)))
    env.sim.close()


def test_joint_angles_put_the_tips_where_they_are_wanted(trifinger):
    env = gpusim_rl.make_env("Trifinger", num_envs=8, seed=1, device="cpu")
    env.reset()
    low, high = torch.tensor([-0.3, 0.4, -2.2]).repeat(3), torch.tensor([0.6, 1.3, -0.4]).repeat(3)
    angles = torch.lerp(low, high, torch.rand(8, 9, generator=torch.Generator().manual_seed(1)))
    env.task.robot.set_state(torch.ones(8, dtype=torch.bool), joint_pos=angles)
    env.sim.refresh()
    third = torch.arange(3) * (2.0 * math.pi / 3.0)
    found = trifinger.joint_angles(trifinger.in_finger_frame(env.task.tips.pos, third))
    torch.testing.assert_close(found.flatten(1), angles, atol=1e-4, rtol=0.0)
    env.sim.close()


def test_weight_torque_is_mujocos(trifinger):
    task = gpusim_rl.make_env("Trifinger", num_envs=1, device="cpu").task
    model = Trifinger.scene(task.cfg).model
    data = mujoco.MjData(model)
    angles = torch.tensor([[0.4, 0.9, -1.3], [-0.3, 0.2, -0.4], [0.9, 1.4, -2.5]])
    joints = [model.joint(f"trifinger/{part}_{finger}") for finger in range(3) for part in ("upper", "middle", "lower")]
    for joint, angle in zip(joints, angles.flatten().tolist(), strict=True):
        data.qpos[joint.qposadr] = angle
    mujoco.mj_forward(model, data)
    bias = [data.qfrc_bias[joint.dofadr].item() for joint in joints]
    torch.testing.assert_close(trifinger.weight_torque(angles).flatten(), torch.tensor(bias).float(), atol=2e-3, rtol=0)


def test_motions_go_straight_between_knots():
    scripted.load("AllegroHand")
    import cube_planner

    weights = cube_planner.between_knots(torch.arange(5), horizon=5, knots=3)
    expected = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]
    assert weights.tolist() == expected


def test_the_command_writes_a_row_for_each_task(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(scripted, "__file__", str(tmp_path / "scripted.py"))
    for more in ([], ["--zero"], []):
        monkeypatch.setattr("sys.argv", ["scripted.py", "Trifinger", "--num-envs", "2", "--steps", "5", *more])
        assert scripted.main() == 0
    rows = json.loads((tmp_path / "scripted.json").read_text())["rows"]
    assert [(row["task"], row["actions"]) for row in rows] == [("Trifinger", "scripted"), ("Trifinger", "zero")]
    assert rows[0]["settings"] == {"difficulty": 1} and rows[0]["episode_s"] == 0.1
    assert "success_mean" in capsys.readouterr().out


def test_a_task_without_controller_is_named():
    with pytest.raises(ConfigError, match=r"no controller of Ant: expected benchmarks/scripted/ant\.py"):
        scripted.load("Ant")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "stat", "steps", "better"),
    [
        ("AllegroHand", "successes_end", 200, 0.5),
        ("ShadowHand", "successes_end", 300, 0.5),
        ("Trifinger", "success_mean", 200, 0.3),
    ],
)
def test_controllers_do_better_than_zero_actions(task, stat, steps, better):
    done = scripted.measure(task, num_envs=8, seed=2, steps=steps)
    nothing = scripted.measure(task, num_envs=8, seed=2, steps=steps, zero=True)
    assert done[stat] > nothing[stat] + better, (done, nothing)
