"""FrankaCabinet: a robot arm opens the drawer of a cabinet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.env.math import masked_terms, unscale
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim

from .franka_reach import MAX_LEAD as ARM_LEAD

START = [1.157, -1.066, -0.155, -2.239, -1.841, 1.003, 0.469, 0.035, 0.035]  # joint positions [rad, m]
TARGET_SPEEDS = [1.0] * 7 + [0.1] * 2  # of the arm [rad/s] and the fingers [m/s], times action_scale
MAX_LEAD = [*ARM_LEAD, 0.04, 0.04]  # maximum distance of a target from its joint [rad, m]; fingers: full range
FINGER_REACH = 0.04  # m; fingers closer than this to the handle's height are rewarded


@dataclass(frozen=True, slots=True, kw_only=True)
class FrankaCabinetConfig(TaskConfig):
    """Settings of FrankaCabinet; values are in cfg/task/FrankaCabinet.yaml."""

    action_scale: float
    start_noise: float
    distance_weight: float
    rotation_weight: float
    around_handle_weight: float
    open_weight: float
    finger_distance_weight: float
    action_cost: float
    bad_style_cost: float
    finger_overreach: float
    open_distance: float
    joint_vel_scale: float
    end_when_open: bool


class FrankaCabinet(Task[FrankaCabinetConfig]):
    """FrankaCabinet: open the top drawer of a cabinet, by its handle.

    Observations, actions and reward terms match IsaacGymEnvs' FrankaCabinet. Differences: the cabinet model is our own,
    with an empty drawer; the gripping point is between the fingertips, not next to them; joint targets stay near the
    joint positions, which keeps speeds near the robot's limits (PhysX enforces them). An episode ends when the drawer
    is open, so holding it almost open earns more; `end_when_open=false` avoids this. Log: `success`, share of episodes
    that end with an open drawer.

    Action space: 9 numbers in [-1, 1], velocities of the joint targets / 7.5 rad/s (fingers: 0.75 m/s).

    Observation space:
    | num   | name       | observation                                             | unit       |
    |-------|------------|---------------------------------------------------------|------------|
    | 0-8   | joint_pos  | joint positions, limits mapped to [-1, 1]: arm, fingers | -          |
    | 9-17  | joint_vel  | joint velocities x 0.1                                  | rad/s, m/s |
    | 18-20 | to_handle  | vector from the gripping point to the handle            | m          |
    | 21    | drawer_pos | opening of the drawer                                   | m          |
    | 22    | drawer_vel | velocity of the drawer                                  | m/s        |

    Reward terms: distance to the handle, hand level and facing the cabinet, one finger above and one below the handle,
    their distances from the handle, opening, bonuses at 0.01, 0.2 and 0.39 m, action cost; a penalty for fingers that
    reach behind the handle replaces the other terms. Start: joints +-`start_noise` rad around a pose next to the
    cabinet. Termination: the drawer is open by more than `open_distance` (none with `end_when_open=false`).
    """

    Config = FrankaCabinetConfig
    units: ClassVar = {
        "joint_pos": "-",
        "joint_vel": "rad/s, m/s",
        "to_handle": "m",
        "drawer_pos": "m",
        "drawer_vel": "m/s",
    }
    sources: ClassVar = dict.fromkeys(("to_handle", "drawer_pos", "drawer_vel"), "simulator drawer")

    @classmethod
    def scene(cls, cfg: FrankaCabinetConfig) -> Scene:
        # Stiff drives on light joints: only an implicit integrator keeps them stable at this rate.
        scene = Scene(cfg.physics_hz, integrator="implicitfast", cone="elliptic", impratio=10.0)
        scene.add_ground()
        scene.add("franka", assets_dir() / "franka_position.xml", pos=(1.0, 0.0, 0.0), quat=(0.0, 0.0, 0.0, 1.0))
        scene.add("cabinet", assets_dir() / "cabinet.xml", pos=(-0.065, 0.0, 0.0))
        return scene

    def __init__(self, cfg: FrankaCabinetConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("franka")
        self.drawer = sim.articulation("cabinet")
        self.hand = self.robot.bodies(["grip", "left_finger", "right_finger"])
        self.handle = self.drawer.bodies(["handle"])
        self.num_actions = len(self.robot.actuator_names)
        self.joint_low, self.joint_high = self.robot.joint_limits.unbind(dim=1)
        self.start = torch.tensor(START, device=self.device)
        self.step_size = torch.tensor(TARGET_SPEEDS, device=self.device) * cfg.action_scale * self.dt
        self.max_lead = torch.tensor(MAX_LEAD, device=self.device)
        self.targets = torch.zeros(self.num_envs, self.num_actions, device=self.device)
        self.scales = {"joint_vel": cfg.joint_vel_scale}
        self.ended = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        noise = self.random.uniform(-self.cfg.start_noise, self.cfg.start_noise, self.num_actions)
        start = (self.start + noise).clamp(self.joint_low, self.joint_high)
        self.robot.set_state(where, joint_pos=start)
        torch.where(where[:, None], start, self.targets, out=self.targets)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        joint_pos = self.robot.joint_pos
        targets = (self.targets + self.step_size * action).clamp(joint_pos - self.max_lead, joint_pos + self.max_lead)
        self.targets.copy_(targets.clamp(self.joint_low, self.joint_high))
        self.robot.actuate(self.targets)

    def observe(self) -> dict[str, Terms]:
        terms = {
            "joint_pos": unscale(self.robot.joint_pos, self.joint_low, self.joint_high),
            "joint_vel": self.robot.joint_vel,
            "to_handle": self.handle.pos[:, 0] - self.hand.pos[:, 0],
            "drawer_pos": self.drawer.joint_pos,
            "drawer_vel": self.drawer.joint_vel,
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg = self.cfg
        grip, left, right = self.hand.pos.unbind(dim=1)
        handle, opening = self.handle.pos[:, 0], self.drawer.joint_pos[:, 0]
        distance = torch.linalg.vector_norm(handle - grip, dim=1)
        near = 1.0 / (1.0 + distance.square()).square()
        # Rotation matrix elements; both are 1 if the hand points along -x with its left finger up.
        w, x, y, z = self.hand.quat[:, 0].unbind(dim=1)
        facing, level = -2.0 * (x * z + w * y), 2.0 * (y * z + w * x)
        above, below = left[:, 2] - handle[:, 2], handle[:, 2] - right[:, 2]
        around = ((above > 0.0) & (below > 0.0)).float()
        bonuses = 0.5 * (opening > 0.01) + around * (0.5 * (opening > 0.2) + (opening > 0.39))
        terms = {
            "distance": cfg.distance_weight * torch.where(distance <= 0.02, 2.0 * near, near),
            "rotation": cfg.rotation_weight * 0.5 * (facing * facing.abs() + level * level.abs()),
            "around_handle": cfg.around_handle_weight * 0.5 * around,
            "finger_distance": cfg.finger_distance_weight * around * (2.0 * FINGER_REACH - above - below),
            "open": cfg.open_weight * opening * (1.0 + 0.5 * around),
            "bonuses": bonuses,
            "action_cost": -cfg.action_cost * self.actions.square().sum(dim=1),
        }
        behind = torch.minimum(left[:, 0], right[:, 0]) < handle[:, 0] - cfg.finger_overreach
        return {**masked_terms(terms, behind), "bad_style": -cfg.bad_style_cost * behind}

    def terminated(self) -> Bool[Tensor, " envs"]:
        return self._open() & self.cfg.end_when_open

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        self.ended.copy_(done)

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        return {
            "opening": self.drawer.joint_pos[:, 0],
            "success": torch.where(self.ended, self._open().float(), torch.nan),
        }

    def _open(self) -> Bool[Tensor, " envs"]:
        return self.drawer.joint_pos[:, 0] > self.cfg.open_distance
