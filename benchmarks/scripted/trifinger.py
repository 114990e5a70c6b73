"""Scripted Trifinger at difficulty 1: three fingertips close around the cube and push it to the goal.

    gpusim-rl collect benchmarks/scripted/trifinger.py task=Trifinger task.difficulty=1 --keep success

Joint torques are gravity compensation plus PD control towards the joint angles of each tip's target.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from gpusim_rl.tasks.trifinger import Trifinger
from jaxtyping import Float
from torch import Tensor

# Lengths of tasks/assets/trifinger.xml [m]. x: across the finger's radius, y: outwards, z: up, from the hub.
HUB = 0.29  # height
SHOULDER = 0.0505  # y of the middle joint
MIDDLE, LOWER = 0.16, 0.1626  # link lengths: joint to joint, and joint to tip
TIP = 0.01685 + 0.04922 + 0.0185  # x of the tip
WEIGHTS = ((0.25, 0.04485, 0.08, 0.0), (0.021, 0.06607, MIDDLE, 0.06), (0.031, TIP, MIDDLE, LOWER))
"""Per link: mass [kg], x of the centre of mass [m], and its positions along the middle and lower links [m]."""
GRAVITY = 9.81  # m/s^2
TORQUE = 0.36  # N m, of an action of 1

STIFFNESS, DAMPING = 4.0, 0.05  # N m/rad, N m s/rad
AROUND = 40.0  # degrees: direction of the first tip from the cube's centre; the others are at 120 degree intervals
OPEN, CLOSED = 0.085, 0.03  # m, radius of the circle of tips; the closed circle presses the tips against the cube
HIGH, LOW = 0.1, 0.035  # m, heights of the tips
LEAD, GAIN = 0.02, 2.0  # maximum lead of the circle over the cube [m]; lead per metre to the goal
MAX_RADIUS = 0.19  # m, of the arena
PLACED = 0.06  # m, horizontal distance from the open circle at which tips descend
DOWN, FAR, NEAR = 0.07, 0.16, 0.06  # m: height of lowered tips; distances from the cube to hold and to push


def controller(task: Trifinger) -> Callable[[], Tensor]:
    """Return a function that returns actions [num_envs, 9] for the task's current state.

    The controller has no memory: a feed-forward policy can reproduce it.
    """
    device, (low, high) = task.device, task.robot.joint_limits.view(3, 3, 2).unbind(dim=2)
    low, high = low + 0.01, high - 0.01
    third = torch.arange(3, device=device) * (2.0 * math.pi / 3.0)
    angle = math.radians(AROUND) - third
    around = torch.stack([angle.cos(), angle.sin(), 0.0 * angle], dim=1)

    def act() -> Tensor:
        cube, tips = task.cube.root_pos, task.tips.pos
        way = (task.goal.root_pos - cube)[:, :2]
        far = torch.linalg.vector_norm(way, dim=1, keepdim=True)
        out = ((tips - cube[:, None]) * around).sum(dim=2)  # distance from the cube in each tip's direction
        holds = ((tips[..., 2] < DOWN) & (out > 0.005) & (out < FAR)).all(dim=1)
        pushes = holds & (out < NEAR).all(dim=1)
        circle = in_arena(cube[:, None, :2] + OPEN * around[:, :2])
        above = torch.linalg.vector_norm(tips[..., :2] - circle, dim=2).amax(dim=1) < PLACED

        ahead = way / far.clamp(min=1e-6) * (GAIN * far).clamp(max=LEAD) * pushes[:, None]
        grip = in_arena(cube[:, None, :2] + CLOSED * around[:, :2] + ahead[:, None])
        target = torch.where(holds[:, None, None], grip, circle)
        height = torch.where(holds | above, LOW, HIGH)[:, None, None].expand(-1, 3, 1)
        target = torch.cat([target, height], dim=2)

        pos, vel = task.robot.joint_pos.view(-1, 3, 3), task.robot.joint_vel.view(-1, 3, 3)
        wanted = torch.minimum(torch.maximum(joint_angles(in_finger_frame(target, third)), low), high)
        torque = STIFFNESS * (wanted - pos) - DAMPING * vel + weight_torque(pos)
        return (torque / TORQUE).flatten(1).clamp(-1.0, 1.0)

    return act


def in_arena(points: Float[Tensor, "envs 3 2"]) -> Float[Tensor, "envs 3 2"]:
    """Clamp points to the circle of radius `MAX_RADIUS`."""
    return points * (MAX_RADIUS / torch.linalg.vector_norm(points, dim=2, keepdim=True).clamp(min=MAX_RADIUS))


def in_finger_frame(points: Float[Tensor, "envs 3 3"], third: Float[Tensor, " 3"]) -> Float[Tensor, "envs 3 3"]:
    """Transform a point per finger to the finger's frame: origin at the hub, y axis along the finger's radius."""
    x, y, z = points.unbind(dim=2)
    cos, sin = third.cos(), third.sin()  # finger i is turned by -120 i degrees
    return torch.stack([cos * x - sin * y, sin * x + cos * y, z - HUB], dim=2)


def joint_angles(tip: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3"]:
    """Return the upper, middle and lower joint angles [rad] for a tip position in the finger's frame [m].

    If the point is out of reach, the finger points towards it.
    """
    x, y, z = tip.unbind(dim=-1)
    swing = torch.hypot(x, z).clamp(min=TIP + 1e-4)
    upper = -torch.acos(TIP / swing) - torch.atan2(z, x)
    upper = upper.clamp(-0.33, 1.0)
    z, y = x * upper.sin() + z * upper.cos(), y - SHOULDER
    reach = torch.hypot(y, z).clamp(0.06, MIDDLE + LOWER - 1e-4)
    lower = -torch.acos((reach.square() - MIDDLE**2 - LOWER**2) / (2.0 * MIDDLE * LOWER))
    middle = torch.atan2(y, -z) + torch.atan2(-LOWER * lower.sin(), MIDDLE + LOWER * lower.cos())
    return torch.stack([upper, middle, lower], dim=-1)


def weight_torque(angles: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3"]:
    """Return the gravity compensation torques [N m] at joint angles [rad]."""
    upper, middle, lower = angles.unbind(dim=-1)
    torque = torch.zeros_like(angles)
    for mass, x, along_middle, along_lower in WEIGHTS:
        weight = mass * GRAVITY
        down = along_middle * middle.cos() + along_lower * (middle + lower).cos()
        out_lower = along_lower * (middle + lower).sin()
        torque[..., 0] += weight * (down * upper.sin() - x * upper.cos())
        torque[..., 1] += weight * (along_middle * middle.sin() + out_lower) * upper.cos()
        torque[..., 2] += weight * out_lower * upper.cos()
    return torque
