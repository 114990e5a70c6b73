"""FrankaCubeStack: a robot arm puts one cube on another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.env.math import masked_terms, operational_space_torque, quat_from_axis_angle, solve_positive_definite
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Articulation, Scene, Sim

START = [0.0, 0.1963, 0.0, -2.6180, 0.0, 2.9416, 0.7854, 0.035, 0.035]  # joint positions [rad, m]
TABLE_HEIGHT = 1.025  # m
SIZE_A, SIZE_B = 0.05, 0.07  # m
CLEAR = (SIZE_A + SIZE_B) * math.sqrt(2.0)  # m; cubes with centres this far apart never touch, in any rotation
TORQUE_LIMITS, SPEED_LIMITS = [87.0] * 4 + [12.0] * 3, [2.175] * 4 + [2.61] * 3  # N m, rad/s
POSE_LIMITS = [0.1] * 3 + [0.5] * 3  # m, rad
STIFFNESS, POSTURE_STIFFNESS = 150.0, 10.0  # 1/s^2, critically damped


@dataclass(frozen=True, slots=True, kw_only=True)
class FrankaCubeStackConfig(TaskConfig):
    """Settings of FrankaCubeStack; values are in cfg/task/FrankaCubeStack.yaml."""

    control_type: Literal["osc", "joint_tor"]
    start_position_noise: float
    start_rotation_noise: float
    start_joint_noise: float
    distance_weight: float
    lift_weight: float
    align_weight: float
    stack_weight: float
    end_when_stacked: bool

    def __post_init__(self) -> None:
        TaskConfig.__post_init__(self)
        if self.start_position_noise < CLEAR:
            key, expected = "task.start_position_noise", f"at least {CLEAR:.2f} m"
            raise ConfigError("the cubes could overlap", key=key, expected=expected, got=self.start_position_noise)


class FrankaCubeStack(Task[FrankaCubeStackConfig]):
    """FrankaCubeStack: stack two cubes, A on B, and let go.

    Observations, actions, reward terms and controller match IsaacGymEnvs' FrankaCubeStack. Differences: episodes
    continue once the cubes are stacked, since termination would make holding the cube at its goal worth more than
    releasing it (`end_when_stacked=true` ends them); the controller uses the Jacobian of the gripping point, not of the
    hand; torques are reduced beyond the joint speed limits, which PhysX enforces; the finger drives are softer (2000
    N/m, 60 N s/m, at most 70 N; original: 5000, 100, 200). Log: `success`, share of episodes that end with cube A
    released on cube B; `stacked`, share of control steps in that state.

    Action space: 7 numbers in [-1, 1]: displacement of the gripping point / 0.1 m, rotation vector / 0.5 rad, and the
    gripper, open at 0 and above. With `control_type=joint_tor`, 8 numbers: torques / (87 or 12 N m), and the gripper.

    Observation space:
    | num   | name      | observation                                             | unit |
    |-------|-----------|---------------------------------------------------------|------|
    | 0-3   | cube_quat | orientation of cube A, wxyz                             | -    |
    | 4-6   | cube_pos  | position of cube A                                      | m    |
    | 7-9   | to_cube_b | vector from cube A to cube B                            | m    |
    | 10-12 | hand_pos  | position of the gripping point                          | m    |
    | 13-16 | hand_quat | orientation of the gripping point, wxyz                 | -    |
    | 17-18 | joint_pos | positions of the fingers (`joint_tor`: of all 9 joints) | m    |

    Reward: 16 while cube A rests on cube B, released. Otherwise the sum of: 0.1 x nearness of hand and fingers to cube
    A (or of cube A to its goal, if larger), 1.5 while cube A is lifted, 2 x nearness of the lifted cube to its goal.
    Start: cubes within +-0.25 m of the table's middle along x and y, not overlapping, rotated by up to 45 degrees; arm
    joints +-0.25 rad. Termination: none, or when stacked.
    """

    Config = FrankaCubeStackConfig
    units: ClassVar = {
        **dict.fromkeys(["cube_pos", "to_cube_b", "hand_pos", "joint_pos"], "m"),
        **dict.fromkeys(["cube_quat", "hand_quat"], "-"),
    }
    sources: ClassVar = dict.fromkeys(("cube_quat", "cube_pos", "to_cube_b"), "simulator cubes")

    @classmethod
    def scene(cls, cfg: FrankaCubeStackConfig) -> Scene:
        scene = Scene(cfg.physics_hz, integrator="implicitfast", cone="elliptic", impratio=10.0)
        scene.add_ground()
        scene.add("franka", assets_dir() / "franka_torque.xml", pos=(-0.45, 0.0, TABLE_HEIGHT + 0.1))
        scene.add("table", assets_dir() / "table.xml", pos=(0.0, 0.0, TABLE_HEIGHT))
        for name, size in (("cube_a", SIZE_A), ("cube_b", SIZE_B)):
            scene.add(name, assets_dir() / f"{name}.xml", pos=(0.0, 0.0, TABLE_HEIGHT + size / 2))
        return scene

    def __init__(self, cfg: FrankaCubeStackConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("franka")
        self.cube_a, self.cube_b = sim.articulation("cube_a"), sim.articulation("cube_b")
        self.hand = self.robot.bodies(["grip", "left_tip", "right_tip"])
        self.dynamics = self.robot.dynamics("grip")
        self.uses_osc = cfg.control_type == "osc"
        self.num_actions = 7 if self.uses_osc else 8
        self.start = torch.tensor(START, device=self.device)
        self.joint_low, self.joint_high = self.robot.joint_limits.unbind(dim=1)
        self.torque_limits = torch.tensor(TORQUE_LIMITS, device=self.device)
        self.speed_limits = torch.tensor(SPEED_LIMITS, device=self.device)
        self.pose_limits = torch.tensor(POSE_LIMITS, device=self.device)
        self.up = torch.tensor([0.0, 0.0, 1.0], device=self.device)
        self.in_place = torch.tensor([0.0, 0.0, (SIZE_A + SIZE_B) / 2], device=self.device)  # goal of A relative to B
        self.ended = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        half, noise = self.cfg.start_position_noise, self.cfg.start_joint_noise
        joint_pos = self.start.expand(self.num_envs, -1).clone()
        joints, place, turns = self.random.uniform(-1.0, 1.0, 13).split([7, 4, 2], dim=1)
        joint_pos[:, :7] += noise * joints
        self.robot.set_state(where, joint_pos=joint_pos.clamp(self.joint_low, self.joint_high))
        # Cube A's position is drawn from a ring around cube B. A point outside the square re-enters on the opposite
        # side, which is always farther away from cube B.
        place_b, angle = half * place[:, :2], math.pi * place[:, 2:3]
        radius = 0.5 * (CLEAR + half) + 0.5 * (half - CLEAR) * place[:, 3:]
        place_a = place_b + radius * torch.cat([angle.cos(), angle.sin()], dim=1)
        turn_a, turn_b = (self.cfg.start_rotation_noise * turns).unbind(dim=1)
        self._place(where, self.cube_a, torch.remainder(place_a + half, 2.0 * half) - half, turn_a)
        self._place(where, self.cube_b, place_b, turn_b)

    def _place(
        self,
        where: Bool[Tensor, " envs"],
        cube: Articulation,
        place: Float[Tensor, "envs 2"],
        yaw: Float[Tensor, " envs"],
    ) -> None:
        turn = quat_from_axis_angle(self.up.expand(self.num_envs, 3), yaw)
        cube.set_state(where, root_pos=torch.cat([place, cube.root_pos[:, 2:]], dim=1), root_quat=turn)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        arm, gripper = action[:, :-1], action[:, -1:]
        joint_vel, mass = self.robot.joint_vel[:, :7], self.dynamics.mass_matrix[:, :7, :7]
        torque = self._osc_torque(arm * self.pose_limits, mass) if self.uses_osc else arm * self.torque_limits
        torque = torque.clamp(-self.torque_limits, self.torque_limits)
        # Keep joint speeds close to their limits in this step. The prediction ignores gravity and contacts.
        acceleration = solve_positive_definite(mass, torque[..., None])[..., 0]
        slowest, fastest = (-self.speed_limits - joint_vel) / self.dt, (self.speed_limits - joint_vel) / self.dt
        torque = (mass @ acceleration.clamp(slowest, fastest)[..., None])[..., 0]
        fingers = torch.where(gripper >= 0.0, self.joint_high[7:], self.joint_low[7:])
        self.robot.actuate(torch.cat([torque, fingers], dim=1))

    def _osc_torque(
        self, displacement: Float[Tensor, "envs 6"], mass: Float[Tensor, "envs 7 7"]
    ) -> Float[Tensor, "envs 7"]:
        """Return torques [N m] that displace the gripping point and, in the null space, pull the arm to its start."""
        velocity = torch.cat([self.hand.lin_vel[:, 0], self.hand.ang_vel[:, 0]], dim=1)
        joint_pos, joint_vel = self.robot.joint_pos[:, :7], self.robot.joint_vel[:, :7]
        acceleration = STIFFNESS * displacement - 2.0 * math.sqrt(STIFFNESS) * velocity
        posture = POSTURE_STIFFNESS * (self.start[:7] - joint_pos) - 2.0 * math.sqrt(POSTURE_STIFFNESS) * joint_vel
        return operational_space_torque(self.dynamics.jacobian[..., :7], mass, acceleration, posture)

    def observe(self) -> dict[str, Terms]:
        cube_a, joints = self.cube_a, self.robot.joint_pos
        terms = {
            "cube_quat": cube_a.root_quat,
            "cube_pos": cube_a.root_pos,
            "to_cube_b": self.cube_b.root_pos - cube_a.root_pos,
            "hand_pos": self.hand.pos[:, 0],
            "hand_quat": self.hand.quat[:, 0],
            "joint_pos": joints[:, 7:] if self.uses_osc else joints,
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg = self.cfg
        from_hand = torch.linalg.vector_norm(self.hand.pos - self.cube_a.root_pos[:, None], dim=2)
        lifted = (self.cube_a.root_pos[:, 2] - TABLE_HEIGHT - SIZE_A > 0.04).float()
        off_place = self.cube_a.root_pos - self.cube_b.root_pos - self.in_place
        align = lifted * _nearness(torch.linalg.vector_norm(off_place, dim=1))
        stacked = self._stacked()
        terms = {
            "distance": cfg.distance_weight * torch.maximum(_nearness(from_hand.mean(dim=1)), align),
            "lift": cfg.lift_weight * lifted,
            "align": cfg.align_weight * align,
        }
        return {**masked_terms(terms, stacked), "stack": cfg.stack_weight * stacked}

    def terminated(self) -> Bool[Tensor, " envs"]:
        return self._stacked() & self.cfg.end_when_stacked

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        self.ended.copy_(done)

    def worth_keeping(self) -> Bool[Tensor, " envs"]:
        return self.cube_a.root_pos[:, 2] - TABLE_HEIGHT - SIZE_A > 0.04  # lifted: exploration rarely gets this far

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        stacked = self._stacked().float()
        return {"stacked": stacked, "success": torch.where(self.ended, stacked, torch.nan)}

    def _stacked(self) -> Bool[Tensor, " envs"]:
        place = self.cube_a.root_pos
        centred = torch.linalg.vector_norm((place - self.cube_b.root_pos)[:, :2], dim=1) < 0.02
        on_top = (place[:, 2] - TABLE_HEIGHT - SIZE_B - SIZE_A / 2).abs() < 0.02
        released = torch.linalg.vector_norm(self.hand.pos[:, 0] - place, dim=1) > 0.04
        return centred & on_top & released


def _nearness(distance: Float[Tensor, " envs"]) -> Float[Tensor, " envs"]:
    return 1.0 - torch.tanh(10.0 * distance)
