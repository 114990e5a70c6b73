"""Trifinger: three fingers move a cube to a goal pose."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Curriculum, CurriculumConfig, Task, TaskConfig, Terms
from gpusim_rl.env.math import quat_angle, quat_from_axis_angle, quat_from_uniform, quat_rotate
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim

TIPS = ["tip_0", "tip_1", "tip_2"]
MAX_JOINT_SPEED = 10.0  # rad/s; only scales observations
CUBE = 0.065  # m
REST = CUBE / 2  # m, height of the cube's centre on the table
CORNER = CUBE * math.sqrt(3) / 2  # m, from the centre to a corner
MAX_RADIUS = 0.195 - CORNER  # m; within it the cube cannot touch the arena's wall in any orientation
# Goal positions by difficulty: maximum radius, minimum and maximum height of the cube's centre [m].
GOALS = {
    1: (MAX_RADIUS, REST, REST),
    2: (0.0, REST + 0.05, REST + 0.05),
    3: (MAX_RADIUS, REST, 0.1),
    4: (MAX_RADIUS, CORNER, 0.1),
}
TURNED = 4  # difficulty with random goal orientations
NORMAL = 4  # one in this many envs skips the curriculum; `success` in the log is from these envs only


@dataclass(frozen=True, slots=True, kw_only=True)
class TrifingerConfig(TaskConfig):
    """Settings of Trifinger; values are in cfg/task/Trifinger.yaml."""

    difficulty: int
    curriculum: CurriculumConfig
    movement_weight: float
    reach_weight: float
    reach_env_steps: float
    pose_weight: float
    pose_sharpness: float
    position_tolerance: float
    rotation_tolerance: float

    def __post_init__(self) -> None:
        TaskConfig.__post_init__(self)
        if self.difficulty not in GOALS:
            raise ConfigError(key="task.difficulty", expected=f"one of {list(GOALS)}", got=self.difficulty)
        if (start := self.curriculum.start) is None:
            return
        if start >= 1.0:
            raise ConfigError(key="task.curriculum.start", expected="null or below 1", got=start, hint="Try 0.1")
        if self.difficulty == TURNED:
            problem, hint = "not supported with random goal orientations", f"Try task.difficulty={TURNED - 1}"
            raise ConfigError(problem, key="task.curriculum", hint=hint)

    def whole_episodes(self) -> TrifingerConfig:
        """Return a copy of the settings for evaluation, without the curriculum."""
        curriculum = dataclasses.replace(self.curriculum, start=None)
        return dataclasses.replace(super(TrifingerConfig, self).whole_episodes(), curriculum=curriculum)


# Sizes of the policy's observation terms, mapped to [-1, 1].
MAPPED = {"joint_pos": 9, "joint_vel": 9, "cube_pos": 3, "cube_quat": 4, "goal_pos": 3, "goal_quat": 4, "actions": 9}


class Trifinger(Task[TrifingerConfig]):
    """Trifinger: move a cube to a goal pose, with three fingers of three joints each; the cube is 65 mm wide.

    Observations, actions, rewards, goals and domain randomisation match IsaacGymEnvs' Trifinger (Allshire et al. 2021,
    arXiv 2108.09779). Differences: quaternions are wxyz; the cube's size is fixed; the motors' safety damping acts
    every physics step, not every control step; motion due to a reset is not rewarded.

    Action space: 9 numbers in [-1, 1], torque / 0.36 N m: upper, middle and lower joint of fingers 0 to 2.

    Observation space: the `policy` group, with the bounds in brackets mapped to [-1, 1]:
    | num   | name      | observation                                       | unit |
    |-------|-----------|---------------------------------------------------|------|
    | 0-8   | joint_pos | joint positions (limits)                          | -    |
    | 9-17  | joint_vel | joint velocities (+-10 rad/s)                     | -    |
    | 18-20 | cube_pos  | position of the cube (+-0.3 m, height 0 to 0.3 m) | -    |
    | 21-24 | cube_quat | orientation of the cube                           | -    |
    | 25-27 | goal_pos  | position of the goal (+-0.3 m, height 0 to 0.3 m) | -    |
    | 28-31 | goal_quat | orientation of the goal                           | -    |
    | 32-40 | actions   | last action                                       | -    |

    And the `critic` group:
    | num    | name         | observation                                              | unit             |
    |--------|--------------|----------------------------------------------------------|------------------|
    | 0-40   | state        | as `policy`, not mapped                                  | rad, rad/s, m, - |
    | 41-43  | cube_lin_vel | velocity of the cube                                     | m/s              |
    | 44-46  | cube_ang_vel | angular velocity of the cube                             | rad/s            |
    | 47-85  | tip_state    | position, orientation, velocities of each fingertip      | m, -, m/s, rad/s |
    | 86-94  | joint_effort | motor torques                                            | N m              |
    | 95-112 | tip_wrench   | contact force and torque on each fingertip, in its frame | N, N m           |

    Reward terms: pose (the logistic kernel 1 / (e^(a d) + 2 + e^(-a d)) of the distances d between corresponding
    corners of cube and goal), finger reach (distance [m] by which the fingertips approached the cube, early in training
    only), and a penalty on squared fingertip velocities. Start: fingers at rest in the reference pose, the cube
    anywhere on the table. Goals: by `difficulty`, see `GOALS`. Termination: none, only the time limit. Log: `success`,
    share of control steps with the cube at its goal, within `position_tolerance` (and `rotation_tolerance`, at the
    difficulty with goal orientations).

    With a curriculum, three of four envs start with the cube near its goal; the distance (`spread`, share of the full
    distance) grows with these envs' share of control steps at the goal (`near_success`). Only the other envs count
    towards `success`. Evaluations have no curriculum.
    """

    Config = TrifingerConfig
    units: ClassVar = {
        **dict.fromkeys(MAPPED, "-"),
        "state": "rad, rad/s, m, -",
        "cube_lin_vel": "m/s",
        "cube_ang_vel": "rad/s",
        "tip_state": "m, -, m/s, rad/s",
        "joint_effort": "N m",
        "tip_wrench": "N, N m",
    }
    sources: ClassVar = {**dict.fromkeys(("cube_pos", "cube_quat"), "simulator cube"), "actions": "last action"}

    @classmethod
    def scene(cls, cfg: TrifingerConfig) -> Scene:
        # Implicit: light links on damped motors, and a cube that is free to spin.
        scene = Scene(cfg.physics_hz, integrator="implicit", cone="elliptic")
        scene.add_ground(friction=(0.1, 0.005, 0.0001))
        scene.add("trifinger", assets_dir() / "trifinger.xml")
        scene.add("cube", assets_dir() / "trifinger_cube.xml")
        scene.add("goal", assets_dir() / "trifinger_goal.xml")
        scene.add_contact_sensor("trifinger", TIPS)
        scene.add_effort_sensors("trifinger")
        return scene

    def __init__(self, cfg: TrifingerConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("trifinger")
        self.cube, self.goal = sim.articulation("cube"), sim.articulation("goal")
        self.tips, self.touch = self.robot.bodies(TIPS), self.robot.contacts(TIPS)
        self.num_actions = len(self.robot.actuator_names)
        low, high = self.robot.joint_limits.cpu().unbind(dim=1)
        speed, action = torch.full_like(low, MAX_JOINT_SPEED), torch.ones(self.num_actions)
        pose_low, pose_high = torch.tensor([[-0.3, -0.3, 0.0] + [-1.0] * 4, [0.3] * 3 + [1.0] * 4])
        low = torch.cat([low, -speed, pose_low, pose_low, -action]).to(self.device)
        high = torch.cat([high, speed, pose_high, pose_high, action]).to(self.device)
        self.middle, self.half_range = 0.5 * (low + high), 0.5 * (high - low)  # range of the policy's observation
        corner = torch.tensor([-REST, REST])
        self.corners = torch.cartesian_prod(corner, corner, corner).to(self.device)
        self.up = torch.tensor([0.0, 0.0, 1.0], device=self.device).repeat(self.num_envs, 1)
        self.start_tips = self.tips.pos.clone()  # in the default state, where episodes start
        self.last_tips = self.start_tips.clone()
        self.last_reach = torch.zeros(self.num_envs, device=self.device)  # sum of the tips' distances from the cube [m]
        self.spread = Curriculum(self, cfg.curriculum, final=1.0)  # share of the way from cube to goal
        # Control steps of training so far, summed over envs. Not per env, since play uses a different number of envs.
        self.env_steps = torch.zeros((), dtype=torch.int64, device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        turn, cube, goal, goal_turn = self.random.uniform(0.0, 1.0, 10).split([1, 3, 3, 3], dim=1)
        yaw = 2.0 * math.pi * turn[:, 0] - math.pi
        cube_pos = _in_arena(cube, MAX_RADIUS, REST, REST)
        goal_pos = _in_arena(goal, *GOALS[self.cfg.difficulty])
        if self.spread.on:
            spread = torch.where(self._near(), self.spread.value, 1.0)
            yaw = spread * yaw
            goal_pos = cube_pos + spread[:, None] * (goal_pos - cube_pos)
        self.cube.set_state(where, root_pos=cube_pos, root_quat=quat_from_axis_angle(self.up, yaw))
        goal_quat = self.goal.default_root_quat.expand(self.num_envs, 4)
        if self.cfg.difficulty == TURNED:
            goal_quat = quat_from_uniform(goal_turn)
        self.goal.set_state(where, root_pos=goal_pos, root_quat=goal_quat)
        torch.where(where[:, None, None], self.start_tips, self.last_tips, out=self.last_tips)
        torch.where(where, self._reach(self.start_tips), self.last_reach, out=self.last_reach)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate(action)

    def observe(self) -> dict[str, Terms]:
        robot, cube, goal, tips = self.robot, self.cube, self.goal, self.tips
        poses = [cube.root_pos, cube.root_quat, goal.root_pos, goal.root_quat]
        state = torch.cat([robot.joint_pos, robot.joint_vel, *poses, self.actions], dim=1)
        mapped = ((state - self.middle) / self.half_range).split(list(MAPPED.values()), dim=1)
        critic = {
            "state": state,
            "cube_lin_vel": cube.root_lin_vel,
            "cube_ang_vel": cube.root_ang_vel,
            "tip_state": torch.cat([tips.pos, tips.quat, tips.lin_vel, tips.ang_vel], dim=2).flatten(1),
            "joint_effort": robot.joint_effort,
            "tip_wrench": self.touch.in_body_frame().flatten(1),
        }
        return {"policy": dict(zip(MAPPED, mapped, strict=True)), "critic": critic}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg = self.cfg
        tips = self.tips.pos
        speed = (tips - self.last_tips) / self.dt
        reach = self._reach(tips)
        closer = self.last_reach - reach
        self.last_tips.copy_(tips)
        self.last_reach.copy_(reach)
        early = self.env_steps <= cfg.reach_env_steps
        distance = torch.linalg.vector_norm(self._corners_from_goal(), dim=2)
        # 1 / (e^x + 2 + e^-x) = sigmoid(x) sigmoid(-x), which does not overflow when the cube is far away.
        kernel = torch.sigmoid(cfg.pose_sharpness * distance) * torch.sigmoid(-cfg.pose_sharpness * distance)
        return {
            "finger_movement": -cfg.movement_weight * speed.square().sum(dim=(1, 2)),
            "finger_reach": cfg.reach_weight * early * closer,
            "pose": cfg.pose_weight * self.dt * kernel.mean(dim=1),
        }

    def terminated(self) -> Bool[Tensor, " envs"]:
        return torch.zeros_like(self.progress, dtype=torch.bool)

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        self.env_steps += self.num_envs
        if self.spread.on:
            near = self._near()
            self.spread.advance((self._at_goal(*self._errors()) & near).sum() / near.sum().clamp(min=1))

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        position, rotation = self._errors()
        at_goal = self._at_goal(position, rotation).float()
        stats = {"position_error": position, "rotation_error": rotation, "success": at_goal}
        if isinstance(spread := self.spread.value, Tensor):
            near = self._near()
            stats["success"] = at_goal.masked_fill(near, torch.nan)
            stats["near_success"] = at_goal.masked_fill(~near, torch.nan)
            stats["spread"] = spread.expand(self.num_envs)
        return stats

    def _near(self) -> Bool[Tensor, " envs"]:
        """Return the mask of envs that use the curriculum."""
        return torch.arange(self.num_envs, device=self.device) % NORMAL > 0

    def _errors(self) -> tuple[Float[Tensor, " envs"], Float[Tensor, " envs"]]:
        """Return the distance [m] and the angle [rad] between the cube and its goal."""
        position = torch.linalg.vector_norm(self.cube.root_pos - self.goal.root_pos, dim=1)
        return position, quat_angle(self.cube.root_quat, self.goal.root_quat)

    def _at_goal(self, position: Float[Tensor, " envs"], rotation: Float[Tensor, " envs"]) -> Bool[Tensor, " envs"]:
        placed = position <= self.cfg.position_tolerance
        return placed & (rotation <= self.cfg.rotation_tolerance) if self.cfg.difficulty == TURNED else placed

    def _reach(self, tips: Float[Tensor, "envs 3 3"]) -> Float[Tensor, " envs"]:
        """Return the sum of the fingertips' distances from the cube's centre [m]."""
        return torch.linalg.vector_norm(tips - self.cube.root_pos[:, None], dim=2).sum(dim=1)

    def _corners_from_goal(self) -> Float[Tensor, "envs 8 3"]:
        """Return the vectors from the goal's corners to the corresponding corners of the cube [m]."""
        quat = torch.stack([self.cube.root_quat, self.goal.root_quat], dim=1)
        cube, goal = quat_rotate(quat[:, :, None], self.corners[None, None]).unbind(dim=1)
        return (self.cube.root_pos - self.goal.root_pos)[:, None] + cube - goal


def _in_arena(u: Float[Tensor, "envs 3"], radius: float, low: float, high: float) -> Float[Tensor, "envs 3"]:
    """Map uniform numbers in [0, 1) to points [m] that are uniform over a disc and a range of heights."""
    distance, angle = radius * u[:, 0].sqrt(), 2.0 * math.pi * u[:, 1]
    return torch.stack([distance * angle.cos(), distance * angle.sin(), low + (high - low) * u[:, 2]], dim=1)
