"""Scripted FrankaCubeStack: grasp cube A, move it over cube B, put it down, release. Succeeds in 9 of 10 episodes.

    gpusim-rl collect benchmarks/scripted/franka_cube_stack.py task=FrankaCubeStack --episodes 500 --keep success

Like a feed-forward policy, the script has no memory: it acts on the current positions of hand and cubes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpusim_rl.tasks.franka_cube_stack import FrankaCubeStack
from torch import Tensor

from gpusim_rl.env.math import quat_conjugate, quat_from_axis_angle, quat_multiply

IN_PLACE = 0.06  # m, height of cube A's centre above cube B's
ABOVE = 0.1  # m, clearance: hand above cube A before descending, and cube A above cube B's top in transit
OPEN, CLOSED = 1.0, -1.0


def controller(task: FrankaCubeStack) -> Callable[[], Tensor]:
    """Return a function that returns actions [num_envs, 7] for the task's current state."""
    up, down, limits = task.up, torch.tensor([0.0, 1.0, 0.0, 0.0], device=task.device), task.pose_limits

    def down_as(cube_quat: Tensor) -> Tensor:
        """Return the hand orientation (wxyz) that points down with the cube's yaw, up to the nearest quarter turn."""
        quarter = torch.pi / 2
        yaw = 2.0 * torch.atan2(cube_quat[:, 3], cube_quat[:, 0])
        yaw = torch.remainder(yaw + quarter / 2, quarter) - quarter / 2
        return quat_multiply(quat_from_axis_angle(up.expand(len(yaw), 3), yaw), down.expand(len(yaw), 4))

    def stack() -> Tensor:
        quat_a, a, to_b, hand, hand_quat, fingers = task.observe()["policy"].values()
        width, off = fingers.sum(dim=1), hand - a
        beside_a, over_a = off[:, :2].norm(dim=1), off[:, 2]
        beside_b, over_b = to_b[:, :2].norm(dim=1), -to_b[:, 2] - IN_PLACE  # cube A, relative to its goal
        at_a = (beside_a < 0.012) & (over_a.abs() < 0.012)
        in_place = (beside_b < 0.012) & (over_b.abs() < 0.006)
        held = (off.norm(dim=1) < 0.025) & (width < 0.054)

        # not held: move above cube A, then down
        reach = a + up * torch.where(beside_a < 0.012, 0.0, ABOVE)[:, None]
        # held: lift, move over cube B, lower
        high = over_b > 0.6 * ABOVE
        lift = torch.where(high, 0.0 * over_b, ABOVE - over_b)
        height = torch.where(beside_b < 0.01, over_b.clamp(max=0.03).neg(), lift)
        sideways = to_b[:, :2] * (high | (beside_b < 0.03))[:, None]
        carry = hand + torch.cat([sideways, height[:, None]], dim=1)
        # in place: release, then lift the hand
        leave = hand + up * 0.1 * (width > 0.058)[:, None]
        goal = torch.where(in_place[:, None], leave, torch.where(held[:, None], carry, reach))
        gripper = torch.where(~in_place & (held | at_a), CLOSED, OPEN)

        turn = quat_multiply(down_as(quat_a), quat_conjugate(hand_quat))
        rotation = 2.0 * turn[:, 1:] * turn[:, :1].sign()
        pull = torch.cat([goal - hand, rotation], dim=1) / limits
        return torch.cat([pull.clamp(-1.0, 1.0), gripper[:, None]], dim=1)

    return stack
