"""FrankaReach: a robot arm moves its hand to a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Commands, Task, TaskConfig, Terms
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.settings.schema import Positive
from gpusim_rl.sim import Scene, Sim

ARM = 7  # joints
# Joint positions with the hand pointing down in the middle of the target box [rad, m].
POSE = [0.0, -0.137, 0.0, -2.235, 0.0, 2.098, 0.785, 0.04, 0.04]
# Maximum distance of a joint target from the joint position [rad]. Drives move at distance / 0.2 s; the robot's
# speed limit is 2.175 rad/s (2.61 rad/s for the last three joints).
MAX_LEAD = [0.2 * 2.175] * 4 + [0.2 * 2.61] * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FrankaReachConfig(TaskConfig):
    """Settings of FrankaReach; values are in cfg/task/FrankaReach.yaml."""

    action_scale: float
    start_noise: float
    target_x: tuple[float, float]
    target_y: tuple[float, float]
    target_z: tuple[float, float]
    target_interval: Positive
    success_distance: float
    distance_weight: float
    near_weight: float
    near_distance: Positive
    action_rate_weight: float
    joint_vel_weight: float


class FrankaReach(Task[FrankaReachConfig]):
    """FrankaReach: move the point between the fingertips to a target that changes every few seconds.

    Targets, actions, rates and reward match Isaac Lab's Isaac-Reach-Franka, for position only (original: position and
    orientation). Differences: targets last half as long; the point is between the fingertips, not at the hand's origin;
    penalties are constant (original: they grow after 4,500 control steps); actions are clamped, and at 0 the hand is in
    the middle of the target box; drive targets stay near the joints, which keeps speeds near the robot's limits;
    observations have no noise (`task.observations` adds it). Log: `success`, share of targets within `success_distance`
    when they expire; `distance`, mean over all control steps.

    Action space: 7 numbers in [-1, 1], drive target offsets from the pose / `action_scale`. The fingers stay open.

    Observation space:
    | num   | name      | observation                              | unit  |
    |-------|-----------|------------------------------------------|-------|
    | 0-6   | joint_pos | joint positions of the arm from the pose | rad   |
    | 7-13  | joint_vel | joint velocities of the arm              | rad/s |
    | 14-16 | target    | position of the target                   | m     |
    | 17-23 | actions   | last action                              | -     |

    Reward terms, multiplied by the control step: negative distance, 1 - tanh(distance / `near_distance`), and penalties
    on the squared change of the action and on squared joint velocities. Start: joints +-`start_noise` rad around the
    pose, at rest. Targets: anywhere in the box of `target_x`, `target_y` and `target_z`, for `target_interval` seconds
    each. Termination: none.
    """

    Config = FrankaReachConfig
    units: ClassVar = {"joint_pos": "rad", "joint_vel": "rad/s", "target": "m", "actions": "-"}
    sources: ClassVar = {"target": "command x y z", "actions": "last action"}

    @classmethod
    def scene(cls, cfg: FrankaReachConfig) -> Scene:
        # Stiff drives on light joints: only an implicit integrator keeps them stable at this rate.
        scene = Scene(cfg.physics_hz, integrator="implicitfast")
        scene.add_ground()
        scene.add("franka", assets_dir() / "franka_position.xml")
        scene.add("target", assets_dir() / "reach_target.xml")
        return scene

    def __init__(self, cfg: FrankaReachConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot, self.ball = sim.articulation("franka"), sim.articulation("target")
        self.hand = self.robot.bodies(["grip"])
        self.num_actions = ARM
        self.pose = torch.tensor(POSE, device=self.device).repeat(self.num_envs, 1)
        self.max_lead = torch.tensor(MAX_LEAD, device=self.device)
        self.joint_low, self.joint_high = self.robot.joint_limits[:ARM].unbind(dim=1)
        ranges = {"x": cfg.target_x, "y": cfg.target_y, "z": cfg.target_z}
        self.target = Commands(self, ranges, interval=cfg.target_interval, units=dict.fromkeys(ranges, "m"))
        self.last_actions = torch.zeros(self.num_envs, ARM, device=self.device)
        self.distance = torch.zeros(self.num_envs, device=self.device)  # at the end of the last control step [m]
        self.time_is_over = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)  # target has expired

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        start, noise = self.pose.clone(), self.cfg.start_noise
        start[:, :ARM] += self.random.uniform(-noise, noise, ARM)
        self.robot.set_state(where, joint_pos=start)
        self.last_actions.masked_fill_(where[:, None], 0.0)
        self.target.resample(where)
        self.ball.set_state(where, root_pos=self.target.value)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        joint_pos = self.robot.joint_pos[:, :ARM]
        targets = torch.add(self.pose[:, :ARM], action, alpha=self.cfg.action_scale)
        targets = targets.clamp(joint_pos - self.max_lead, joint_pos + self.max_lead)
        targets = targets.clamp(self.joint_low, self.joint_high)
        self.robot.actuate(torch.cat([targets, self.pose[:, ARM:]], dim=1))

    def observe(self) -> dict[str, Tensor | Terms]:
        return {"policy": self._state()}

    def _state(self) -> dict[str, Tensor]:
        return {
            "joint_pos": self.robot.joint_pos[:, :ARM] - self.pose[:, :ARM],
            "joint_vel": self.robot.joint_vel[:, :ARM],
            "target": self.target.value,
            "actions": self.actions,
        }

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg = self.cfg
        self.distance.copy_(torch.linalg.vector_norm(self.target.value - self.hand.pos[:, 0], dim=1))
        change = (self.actions - self.last_actions).square().sum(dim=1)
        self.last_actions.copy_(self.actions)
        return {
            "distance": (-cfg.distance_weight * self.dt) * self.distance,
            "near": (cfg.near_weight * self.dt) * (1.0 - torch.tanh(self.distance / cfg.near_distance)),
            "action_rate": (-cfg.action_rate_weight * self.dt) * change,
            "joint_vel": (-cfg.joint_vel_weight * self.dt) * self.robot.joint_vel[:, :ARM].square().sum(dim=1),
        }

    def terminated(self) -> Bool[Tensor, " envs"]:
        return torch.zeros_like(self.progress, dtype=torch.bool)

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        self.target.advance()
        moved = (self.target.value - self.ball.root_pos).abs().amax(dim=1) > 1e-3
        self.ball.set_state(moved, root_pos=self.target.value)
        torch.logical_or(moved, done, out=self.time_is_over)

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        reached = (self.distance < self.cfg.success_distance).float()
        return {"distance": self.distance, "success": torch.where(self.time_is_over, reached, torch.nan)}
