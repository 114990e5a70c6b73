"""Scripted solution of Trifinger: its kinematics, and success compared to zero actions."""

from __future__ import annotations

import math

import mujoco
import pytest
import torch
from gpusim_rl.tasks.trifinger import Trifinger

import gpusim_rl
from gpusim_rl.env import VecEnv
from scripted import trifinger


def make(num_envs: int, **task: object) -> VecEnv:
    env = gpusim_rl.make_env("Trifinger", num_envs=num_envs, seed=1, device="cpu", task=task)
    env.reset()
    return env


def test_controller_only_reads_state_and_respects_action_limits():
    env = make(2)
    act = trifinger.controller(env.task)
    env.step(act())
    before = {name: value.clone() for name, value in env.task.state_dict()["tensors"].items()}
    physics = env.sim.qpos.clone(), env.sim.qvel.clone(), env.sim.ctrl.clone()
    for _ in range(4):
        act()
    after = env.task.state_dict()["tensors"]
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(map(torch.equal, physics, (env.sim.qpos, env.sim.qvel, env.sim.ctrl)))
    chosen = []
    for _ in range(64):
        chosen.append(act())
        env.step(chosen[-1])
    chosen = torch.stack(chosen)
    assert chosen.shape == (64, 2, 9) and chosen.abs().max() <= 1.0 and chosen.std(dim=0).min() > 0.0
    env.close()


def test_joint_angles_invert_fingertip_positions():
    env = make(8)
    low, high = torch.tensor([-0.3, 0.4, -2.2]).repeat(3), torch.tensor([0.6, 1.3, -0.4]).repeat(3)
    angles = torch.lerp(low, high, torch.rand(8, 9, generator=torch.Generator().manual_seed(1)))
    env.task.robot.set_state(torch.ones(8, dtype=torch.bool), joint_pos=angles)
    env.sim.refresh()
    third = torch.arange(3) * (2.0 * math.pi / 3.0)
    found = trifinger.joint_angles(trifinger.in_finger_frame(env.task.tips.pos, third))
    torch.testing.assert_close(found.flatten(1), angles, atol=1e-4, rtol=0.0)
    env.close()


def test_weight_torque_equals_mujoco():
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


@pytest.mark.slow
def test_script_outperforms_zero_actions():
    def success(scripted: bool) -> float:
        env = make(8, difficulty=1, randomize_episode_start=False)
        act = trifinger.controller(env.task) if scripted else lambda: torch.zeros(8, 9)
        reached = [env.step(act()).stats["success"].mean() for _ in range(200)]
        env.close()
        return float(torch.stack(reached).mean())

    assert success(True) > success(False) + 0.3
