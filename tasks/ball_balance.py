"""BallBalance: a tray on three legs keeps a ball in its middle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim

HIP_RADIUS, HIP_HEIGHT = 0.4, -0.03  # m; radius and height of the hip circle, tray frame
FALL_RADIUS = 0.5  # m; radius of the tray, onto which the ball falls
LOST_HEIGHT = 0.15  # m; 1.5 ball radii; a ball whose centre is lower is off the tray


@dataclass(frozen=True, slots=True, kw_only=True)
class BallBalanceConfig(TaskConfig):
    """Settings of BallBalance; values are in cfg/task/BallBalance.yaml."""

    action_speed: float
    target_height: float
    force_scale: float


class BallBalance(Task[BallBalanceConfig]):
    """BallBalance: catch a falling ball with a tray, and keep it still over the middle.

    Observations, actions, reward and initial states match IsaacGymEnvs' BallBalance. Differences: the force of the ball
    on the tray replaces the force sensors (the original repeats the x component three times); ball joints between feet
    and ground replace the attractors; the knees are softer, with the same lag (see the MJCF).

    Action space: 3 numbers in [-1, 1], velocities of the knees' target positions / `action_speed`.

    Observation space:
    | num   | name       | observation                                                  | unit  |
    |-------|------------|--------------------------------------------------------------|-------|
    | 0-2   | knee_pos   | positions of the knees                                       | rad   |
    | 3-5   | knee_vel   | velocities of the knees                                      | rad/s |
    | 6-8   | ball_pos   | position of the ball                                         | m     |
    | 9-11  | ball_vel   | velocity of the ball                                         | m/s   |
    | 12-14 | tray_force | force of the ball on the tray x 0.05, tray frame             | N     |
    | 15-23 | hip_torque | torque of that force about the three hips x 0.05, tray frame | N m   |

    Reward per step: 1 / (1 + distance) x 1 / (1 + speed) of the ball, with the distance [m] from the point
    `target_height` above the middle. Start: the tray is level. The ball is over it, 1 to 2 m high, falling at 5 m/s and
    moving inwards at random speed: up to 5 m/s at the edge, 0 in the middle. Termination: the ball is below 0.15 m.
    """

    Config = BallBalanceConfig
    units: ClassVar = {
        "knee_pos": "rad",
        "knee_vel": "rad/s",
        "ball_pos": "m",
        "ball_vel": "m/s",
        "tray_force": "N",
        "hip_torque": "N m",
    }
    sources: ClassVar = dict.fromkeys(("ball_pos", "ball_vel"), "simulator ball")

    @classmethod
    def scene(cls, cfg: BallBalanceConfig) -> Scene:
        scene = Scene(cfg.physics_hz, cone="elliptic")
        scene.add_ground()
        scene.add("balance_bot", assets_dir() / "ball_balance.xml")
        scene.add("ball", assets_dir() / "ball.xml")
        scene.add_contact_sensor("balance_bot", ["tray"])
        return scene

    def __init__(self, cfg: BallBalanceConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("balance_bot")
        self.ball = sim.articulation("ball")
        self.tray = self.robot.contacts(["tray"])
        self.scales = {"tray_force": cfg.force_scale, "hip_torque": cfg.force_scale}
        self.num_actions = len(self.robot.actuator_names)
        self.knees = slice(1, None, 2)  # a hip comes before each knee
        self.knee_low, self.knee_high = self.robot.joint_limits[self.knees].unbind(dim=1)
        self.knee_target = torch.zeros(self.num_envs, self.num_actions, device=self.device)  # rad
        angle = torch.arange(3, device=self.device) * (2 * math.pi / 3)
        circle = HIP_RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1)
        self.hips = torch.nn.functional.pad(circle, (0, 1), value=HIP_HEIGHT)[None]
        self.goal = torch.tensor([0.0, 0.0, cfg.target_height], device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        turn, share, speed, above = self.random.uniform(0.0, 1.0, 4).split(1, dim=1)
        angle, radius = 2.0 * math.pi * turn, FALL_RADIUS * share
        outward = torch.cat([angle.cos(), angle.sin()], dim=1)
        inward_speed = 5.0 * share * speed
        height = 1.0 + above
        self.ball.set_state(
            where,
            root_pos=torch.cat([radius * outward, height], dim=1),
            root_lin_vel=torch.cat([-inward_speed * outward, torch.full_like(height, -5.0)], dim=1),
        )
        self.knee_target.masked_fill_(where[:, None], 0.0)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.knee_target.add_(action, alpha=self.dt * self.cfg.action_speed).clamp_(self.knee_low, self.knee_high)
        self.robot.actuate(self.knee_target)

    def observe(self) -> dict[str, Terms]:
        force, torque = self.tray.in_body_frame().split(3, dim=-1)
        hip_torque = torque - torch.linalg.cross(self.hips, force)
        terms = {
            "knee_pos": self.robot.joint_pos[:, self.knees],
            "knee_vel": self.robot.joint_vel[:, self.knees],
            "ball_pos": self.ball.root_pos,
            "ball_vel": self.ball.root_lin_vel,
            "tray_force": force.flatten(1),
            "hip_torque": hip_torque.flatten(1),
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        distance = self._distance()
        speed = torch.linalg.vector_norm(self.ball.root_lin_vel, dim=1)
        return {"balance": 1.0 / ((1.0 + distance) * (1.0 + speed))}

    def terminated(self) -> Bool[Tensor, " envs"]:
        return self.ball.root_pos[:, 2] < LOST_HEIGHT

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        return {"distance": self._distance()}

    def _distance(self) -> Float[Tensor, " envs"]:
        return torch.linalg.vector_norm(self.ball.root_pos - self.goal, dim=1)
