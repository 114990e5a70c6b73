"""Trifinger by a script, at difficulty 1: three fingertips close around the cube and push it along to its goal.

    python tools/collect.py benchmarks/scripted/trifinger.py task=Trifinger task.difficulty=1 --keep success

Joints are driven by torques: those that hold the fingers' weight, and springs to the joint angles of each tip's target.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from gpusim_rl.tasks.trifinger import Trifinger
from jaxtyping import Float
from torch import Tensor

# Lengths of tasks/assets/trifinger.xml [m]. x: beside the finger's radius, y: outwards, z: up, from the hub.
HUB = 0.29  # height
SHOULDER = 0.0505  # y of the middle joint
MIDDLE, LOWER = 0.16, 0.1626  # links, from joint to joint, and to the tip
TIP = 0.01685 + 0.04922 + 0.0185  # x of the tip
WEIGHTS = ((0.25, 0.04485, 0.08, 0.0), (0.021, 0.06607, MIDDLE, 0.06), (0.031, TIP, MIDDLE, LOWER))
"""Of each link: mass [kg], x of its centre, and how far along middle and lower link it is [m]."""
GRAVITY = 9.81  # m/s^2
TORQUE = 0.36  # N m, of an action of 1

STIFFNESS, DAMPING = 4.0, 0.05  # N m/rad, N m s/rad
AROUND = 40.0  # degrees: direction of the first tip from the cube's middle; the others are 120 degrees further
OPEN, CLOSED = 0.085, 0.03  # m, radius of the circle of tips; the cube is in the way of the smaller one
HIGH, LOW = 0.1, 0.035  # m, of the tips
LEAD, GAIN = 0.02, 2.0  # m, by which the circle is ahead of the cube at most; and per metre to the goal
MAX_RADIUS = 0.19  # m, of the arena
OVER, DOWN, CLOSE, PUSH = range(4)
"""What an env is at: tips above a circle around the cube, then down, then to the cube, then all along."""
STEPS = torch.tensor([40, 25, 12])
"""Control steps after which it goes on in any case."""
NEAR = torch.tensor([0.02, 0.015, 0.0])
"""Distance of the tips from their targets [m] at which it goes on."""


def controller(task: Trifinger) -> Callable[[], Tensor]:
    """Returns a function that returns actions [num_envs, 9] for the state that the task is in."""
    device, (low, high) = task.device, task.robot.joint_limits.view(3, 3, 2).unbind(dim=2)
    low, high = low + 0.01, high - 0.01
    third = torch.arange(3, device=device) * (2.0 * math.pi / 3.0)
    angle = math.radians(AROUND) - third
    around = torch.stack([angle.cos(), angle.sin(), 0.0 * angle], dim=1)
    steps, near = STEPS.to(device), NEAR.to(device)
    phase = torch.zeros(task.num_envs, dtype=torch.int64, device=device)
    since = torch.zeros_like(phase)  # control steps in it

    def begin(where: Tensor, new: Tensor | int) -> None:
        phase.copy_(torch.where(where, new, phase))
        since.masked_fill_(where, 0)

    def act() -> Tensor:
        begin(task.progress == 0, OVER)
        cube = task.cube.root_pos
        way = (task.goal.root_pos - cube)[:, :2]
        far = torch.linalg.vector_norm(way, dim=1, keepdim=True)
        ahead = way / far.clamp(min=1e-6) * (GAIN * far).clamp(max=LEAD) * (phase == PUSH)[:, None]
        target = cube[:, None] + torch.where(phase < CLOSE, OPEN, CLOSED)[:, None, None] * around
        target[..., :2] += ahead[:, None]
        target[..., :2] *= MAX_RADIUS / torch.linalg.vector_norm(target[..., :2], dim=2, keepdim=True).clamp(MAX_RADIUS)
        target[..., 2] = torch.where(phase == OVER, HIGH, LOW)[:, None]

        pos, vel = task.robot.joint_pos.view(-1, 3, 3), task.robot.joint_vel.view(-1, 3, 3)
        wanted = torch.minimum(torch.maximum(joint_angles(in_finger_frame(target, third)), low), high)
        torque = STIFFNESS * (wanted - pos) - DAMPING * vel + weight_torque(pos)

        tips = task.tips.pos
        left = torch.linalg.vector_norm(tips - target, dim=2).amax(dim=1)
        beside = torch.linalg.vector_norm((tips - cube[:, None])[..., :2], dim=2).amin(dim=1)
        since.add_(1)
        step = phase.clamp(max=CLOSE)
        begin((phase < PUSH) & ((since > steps[step]) | (left < near[step])), phase + 1)
        begin((phase == PUSH) & (since > 25) & (beside > 0.09), OVER)  # the cube has got away
        return (torque / TORQUE).flatten(1).clamp(-1.0, 1.0)

    return act


def in_finger_frame(points: Float[Tensor, "envs 3 3"], third: Float[Tensor, " 3"]) -> Float[Tensor, "envs 3 3"]:
    """Returns a point for each finger in the finger's frame, whose y axis is the finger's radius; from the hub."""
    x, y, z = points.unbind(dim=2)
    cos, sin = third.cos(), third.sin()  # finger i is turned by -120 i degrees
    return torch.stack([cos * x - sin * y, sin * x + cos * y, z - HUB], dim=2)


def joint_angles(tip: Float[Tensor, "*batch 3"]) -> Float[Tensor, "*batch 3"]:
    """Returns the angles of upper, middle and lower joint [rad] with the tip at a point of the finger's frame [m].

    Where it is out of reach, the finger points there.
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
    """Returns the torques [N m] that hold the links at these joint angles [rad] against gravity."""
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
