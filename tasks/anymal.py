"""Anymal: a quadruped learns to walk at any commanded velocity on flat ground."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Commands, Task, TaskConfig, Terms
from gpusim_rl.env.math import quat_rotate_inverse
from gpusim_rl.files.paths import robot_file
from gpusim_rl.sim import Articulation, Scene, Sim


@dataclass(frozen=True, slots=True, kw_only=True)
class AnymalConfig(TaskConfig):
    """Settings of Anymal; values are in cfg/task/Anymal.yaml."""

    robot: str
    must_not_touch: list[str]
    command_x: list[float]
    command_y: list[float]
    command_yaw: list[float]
    action_scale: float
    lin_vel_weight: float
    ang_vel_weight: float
    torque_cost: float
    tracking_width: float
    contact_limit: float
    lin_vel_scale: float
    ang_vel_scale: float
    joint_vel_scale: float


def scales(cfg: Any) -> dict[str, float]:
    """Return the scales of the observation terms that both Anymal tasks share."""
    names = {"lin_vel": "lin_vel", "ang_vel": "ang_vel", "command": "lin_vel", "command_yaw": "ang_vel"}
    return {term: getattr(cfg, f"{name}_scale") for term, name in {**names, "joint_vel": "joint_vel"}.items()}


def base_motion(robot: Articulation, down: Float[Tensor, "envs 3"]) -> Terms:
    """Return the base's velocities [m/s, rad/s] and the direction of gravity, in the base frame."""
    vectors = torch.stack([robot.root_lin_vel, down], dim=1)
    lin_vel, gravity = quat_rotate_inverse(robot.root_quat[:, None], vectors).unbind(dim=1)
    return {"lin_vel": lin_vel, "ang_vel": robot.root_ang_vel_local, "gravity": gravity}


class Anymal(Task[AnymalConfig]):
    """Anymal: walk at the commanded velocity and yaw rate.

    Observations, actions, commands and rewards match IsaacGymEnvs' Anymal; physics runs at 200 Hz, not 100 Hz.

    Action space: 12 numbers in [-1, 1], joint target offsets from the stance / 0.5 rad: abduction, hip flexion and knee
    flexion of the left front, left hind, right front and right hind legs.

    Observation space:
    | num   | name        | observation                                     | unit  |
    |-------|-------------|-------------------------------------------------|-------|
    | 0-2   | lin_vel     | velocity of the base x 2, base frame            | m/s   |
    | 3-5   | ang_vel     | angular velocity of the base x 0.25, base frame | rad/s |
    | 6-8   | gravity     | direction of gravity, base frame                | -     |
    | 9-10  | command     | commanded x, y velocity x 2                     | m/s   |
    | 11    | command_yaw | commanded yaw rate x 0.25                       | rad/s |
    | 12-23 | joint_pos   | joint positions, from the stance                | rad   |
    | 24-35 | joint_vel   | joint velocities x 0.05                         | rad/s |
    | 36-47 | actions     | last action                                     | -     |

    Reward terms, multiplied by the control step: exp(-squared error / 0.25) of the horizontal velocity, half as much
    for the yaw rate, and a penalty for squared torques. The penalty is capped at the sum of the other terms, so the
    reward is never negative. Start: the stance with each joint angle x 0.5 to 1.5, joint velocities +-0.1 rad/s; one
    random command per episode. Termination: more than 1 N on the base or a knee.
    """

    Config = AnymalConfig
    units: ClassVar = {
        "lin_vel": "m/s",
        "ang_vel": "rad/s",
        "gravity": "-",
        "command": "m/s",
        "command_yaw": "rad/s",
        "joint_pos": "rad",
        "joint_vel": "rad/s",
        "actions": "-",
    }
    mirrors: ClassVar = {
        "lin_vel": "vector",
        "ang_vel": "pseudovector",
        "gravity": "vector",
        "command": "planar",
        "command_yaw": "turn",
        "joint_pos": "joints",
        "joint_vel": "joints",
        "actions": "actuators",
    }

    sources: ClassVar = {
        "lin_vel": "base velocity",
        "ang_vel": "base angular velocity",
        "gravity": "gravity",
        "command": "command x y",
        "command_yaw": "command yaw",
        "joint_pos": "joint positions from the pose",
        "joint_vel": "joint velocities",
        "actions": "last action",
    }

    @classmethod
    def scene(cls, cfg: AnymalConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add_ground()
        scene.add("anymal", robot_file(cfg.robot))
        scene.add_contact_sensor("anymal", cfg.must_not_touch)
        scene.add_effort_sensors("anymal")
        return scene

    def __init__(self, cfg: AnymalConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("anymal")
        self.contacts = self.robot.contacts(cfg.must_not_touch)
        self.num_actions = len(self.robot.actuator_names)
        self.stance = self.robot.default_joint_pos
        ranges = {"x": cfg.command_x, "y": cfg.command_y, "yaw": cfg.command_yaw}
        self.commands = Commands(self, ranges, units={"x": "m/s", "y": "m/s", "yaw": "rad/s"})
        self.errors = torch.zeros(2, self.num_envs, device=self.device)  # errors of velocity [m/s] and yaw rate [rad/s]
        self.weights = self.dt * torch.tensor([[cfg.lin_vel_weight], [cfg.ang_vel_weight]], device=self.device)
        self.scales = scales(cfg)
        self.down = torch.tensor([0.0, 0.0, -1.0], device=self.device).expand(self.num_envs, 3)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        stretch, joint_vel = self.random.uniform(-1.0, 1.0, 2, len(self.robot.joint_names)).unbind(dim=1)
        joint_pos = torch.addcmul(self.stance, self.stance, stretch, value=0.5)  # stance * (1 + stretch / 2)
        self.robot.set_state(where, joint_pos=joint_pos, joint_vel=0.1 * joint_vel)
        self.commands.resample(where)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate(torch.add(self.stance, action, alpha=self.cfg.action_scale))

    def observe(self) -> dict[str, Terms]:
        robot = self.robot
        terms = {
            **base_motion(robot, self.down),
            "command": self.commands.value[:, :2],
            "command_yaw": self.commands.value[:, 2:],
            "joint_pos": robot.joint_pos - self.stance,
            "joint_vel": robot.joint_vel,
            "actions": self.actions,
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg, dt, robot, command = self.cfg, self.dt, self.robot, self.commands.value
        velocity = quat_rotate_inverse(robot.root_quat, robot.root_lin_vel)[:, :2]
        lin_vel_error = torch.linalg.vector_norm(command[:, :2] - velocity, dim=1)
        ang_vel_error = (command[:, 2] - robot.root_ang_vel_local[:, 2]).abs()
        torch.stack([lin_vel_error, ang_vel_error], out=self.errors)
        lin_vel, ang_vel = self.weights * torch.exp(self.errors.square() / -cfg.tracking_width)
        torque = dt * cfg.torque_cost * robot.joint_effort.square().sum(dim=1)
        return {"lin_vel_xy": lin_vel, "ang_vel_z": ang_vel, "torque": -torch.minimum(torque, lin_vel + ang_vel)}

    def terminated(self) -> Bool[Tensor, " envs"]:
        force = torch.linalg.vector_norm(self.contacts.force, dim=2)
        return (force > self.cfg.contact_limit).any(dim=1)

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        lin_vel_error, ang_vel_error = self.errors
        return {"lin_vel_error": lin_vel_error, "ang_vel_error": ang_vel_error}
