"""Base of the tasks that turn a cube in the hand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Curriculum, CurriculumConfig, Task, TaskConfig, Terms
from gpusim_rl.env.math import quat_angle, quat_difference, quat_from_uniform, scale
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim

Cfg = TypeVar("Cfg", bound="InHandConfig")


@dataclass(frozen=True, slots=True, kw_only=True)
class InHandConfig(TaskConfig):
    """Settings shared by the in-hand tasks; values are in the yaml of each task."""

    observation_type: str
    asymmetric: bool
    moving_average: float
    distance_cost: float
    rotation_weight: float
    rotation_offset: float
    action_cost: float
    success_bonus: float
    success_tolerance: float
    curriculum: CurriculumConfig
    fall_cost: float
    fall_distance: float
    cube_pos_noise: float
    joint_pos_noise: float
    vel_scale: float
    force_scale: float

    def __post_init__(self) -> None:
        TaskConfig.__post_init__(self)
        start = self.curriculum.start
        if start is not None and start < self.success_tolerance:
            expected = f"null or at least task.success_tolerance={self.success_tolerance:g}"
            raise ConfigError(key="task.curriculum.start", expected=expected, got=start, hint="Try 1.0")

    def whole_episodes(self: Cfg) -> Cfg:
        """Return a copy of the settings for evaluation, with goals at the final tolerance."""
        curriculum = dataclasses.replace(self.curriculum, start=None)
        return dataclasses.replace(super(InHandConfig, self).whole_episodes(), curriculum=curriculum)


class InHand(Task[InHandConfig]):
    """Hand, palm up, that turns a cube to one goal orientation after another.

    Observations, actions, reward terms and initial states match IsaacGymEnvs. Differences: the goal's position never
    changes and is observed relative to the cube; orientations are uniform over all rotations; gravity acts on the hand
    as well as on the cube; the joints have no friction.

    Reward terms: distance to the goal's position (a cost), rotation (1 / (error + 0.1 rad)), action cost, success (a
    bonus at an error of at most 0.1 rad, then a new goal), fall (a cost, 0 by default).

    With a curriculum, the goal tolerance starts wide and narrows to `success_tolerance` as goals are reached. Log:
    `goals`, goals reached per episode at the current `tolerance`; `successes`, goals within `success_tolerance`, few
    while the tolerance is wide (a reached goal is replaced). Evaluations use only `success_tolerance`.
    """

    Config = InHandConfig
    units: ClassVar = {
        "joint_pos": "-",
        "joint_vel": "rad/s",
        "joint_effort": "N m",
        "cube_pos": "m",
        "cube_quat": "-",
        "cube_lin_vel": "m/s",
        "cube_ang_vel": "rad/s",
        "goal_pos": "m",
        "goal_quat": "-",
        "to_goal": "-",
        "tip_pos": "m",
        "tip_state": "m, -, m/s, rad/s",
        "tip_force": "N, N m",
        "actions": "-",
    }
    sources: ClassVar = {
        **dict.fromkeys(
            ("cube_pos", "cube_quat", "cube_lin_vel", "cube_ang_vel", "goal_pos", "to_goal"), "simulator cube"
        ),
        "joint_vel": "joint velocities",
        "actions": "last action",
    }
    HAND: ClassVar[str]  # MJCF in tasks/assets
    CUBE_START: ClassVar[tuple[float, float, float]]  # initial cube position, in the air above the hand [m]
    GOAL: ClassVar[tuple[float, float, float]]  # goal position of the cube [m]
    OBSERVATIONS: ClassVar[dict[str, str]]  # terms by `observation_type`; an asymmetric critic gets `full_state`

    @classmethod
    def scene(cls, cfg: InHandConfig) -> Scene:
        # Elliptic cones take twice the time. Simulators agree with either kind: no capsule touches a plane.
        scene = Scene(cfg.physics_hz)
        scene.add_light()
        scene.add("hand", assets_dir() / cls.HAND)
        scene.add("object", assets_dir() / "hand_cube.xml", pos=cls.CUBE_START)  # IsaacGymEnvs' name
        scene.add_effort_sensors("hand")
        return scene

    def __init__(self, cfg: InHandConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.hand, self.cube = sim.articulation("hand"), sim.articulation("object")
        self.num_actions = len(self.hand.actuator_names)
        self.scales = {"joint_vel": cfg.vel_scale, "joint_effort": cfg.force_scale, "cube_ang_vel": cfg.vel_scale}
        self.joint_low, self.joint_high = self.hand.joint_limits.unbind(dim=1)
        self.target_low, self.target_high = self.hand.control_limits.unbind(dim=1)
        self.joint_middle = 0.5 * (self.joint_low + self.joint_high)
        self.joint_range = 0.5 * (self.joint_high - self.joint_low)  # half the range, rad
        self.cube_low = self.cube.default_root_pos - cfg.cube_pos_noise  # m, at the start
        self.cube_high = self.cube.default_root_pos + cfg.cube_pos_noise
        self.goal_pos = torch.tensor(self.GOAL, device=self.device)
        self.goal_quat = torch.zeros(self.num_envs, 4, device=self.device)
        self.rotation_error = torch.zeros(self.num_envs, device=self.device)  # error in the last rewards() call [rad]
        self.rest = torch.zeros(self.num_actions, device=self.device).clamp(self.target_low, self.target_high)
        self.targets = torch.zeros(self.num_envs, self.num_actions, device=self.device)
        self.successes = torch.zeros(self.num_envs, device=self.device)  # goals reached in this episode
        self.goals = torch.zeros_like(self.successes)  # goals reached at the curriculum's tolerance
        self.tolerance = Curriculum(self, cfg.curriculum, final=cfg.success_tolerance)  # rad
        self.ended = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        cfg, num_joints = self.cfg, len(self.hand.joint_names)
        joints, place, turn, goal = self.random.uniform(0.0, 1.0, num_joints + 9).split([num_joints, 3, 3, 3], dim=1)
        reach = cfg.joint_pos_noise * torch.lerp(self.joint_low, self.joint_high, joints)
        self.hand.set_state(where, joint_pos=reach.clamp(self.joint_low, self.joint_high))
        cube_pos = torch.lerp(self.cube_low, self.cube_high, place)
        self.cube.set_state(where, root_pos=cube_pos, root_quat=quat_from_uniform(turn))
        self._set_goal(where, quat_from_uniform(goal))
        torch.where(where[:, None], self.rest, self.targets, out=self.targets)
        self.successes.masked_fill_(where, 0.0)
        if self.tolerance.on:
            self.goals.masked_fill_(where, 0.0)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.targets.lerp_(scale(action, self.target_low, self.target_high), self.cfg.moving_average)
        self.hand.actuate(self.targets)

    def observe(self) -> dict[str, Terms]:
        terms = self._terms()
        groups = {"policy": self.cfg.observation_type}
        if self.cfg.asymmetric:
            groups["critic"] = "full_state"
        names = {group: self.OBSERVATIONS[kind].split() for group, kind in groups.items()}
        return {group: {name: terms[name] for name in own} for group, own in names.items()}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg, error, distance = self.cfg, self._rotation_error(), self._distance()
        self.rotation_error.copy_(error)
        return {
            "distance": -cfg.distance_cost * distance,
            "rotation": cfg.rotation_weight / (error + cfg.rotation_offset),
            "action_cost": -cfg.action_cost * self.actions.square().sum(dim=1),
            "success": cfg.success_bonus * (error <= self.tolerance.value),
            "fall": -cfg.fall_cost * (distance >= cfg.fall_distance),
        }

    def terminated(self) -> Bool[Tensor, " envs"]:
        return self._distance() >= self.cfg.fall_distance

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        reached = success = self.rotation_error <= self.cfg.success_tolerance
        if self.tolerance.on:
            reached = self.rotation_error <= self.tolerance.value
            self.goals += reached
            self.tolerance.advance(reached.float().mean() * self.cfg.episode_length)
        self.successes += success
        self.ended.copy_(done)
        self._set_goal(reached, quat_from_uniform(self.random.uniform(0.0, 1.0, 3)))

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        stats = {
            "successes": torch.where(self.ended, self.successes, torch.nan),  # of a whole episode
            "rotation_error": self.rotation_error,
        }
        if isinstance(tolerance := self.tolerance.value, Tensor):
            stats["goals"] = torch.where(self.ended, self.goals, torch.nan)
            stats["tolerance"] = tolerance.expand(self.num_envs)
        return stats

    def _set_goal(self, where: Bool[Tensor, " envs"], quat: Float[Tensor, "envs 4"]) -> None:
        torch.where(where[:, None], quat, self.goal_quat, out=self.goal_quat)

    def _distance(self) -> Float[Tensor, " envs"]:
        return torch.linalg.vector_norm(self.cube.root_pos - self.goal_pos, dim=1)

    def _rotation_error(self) -> Float[Tensor, " envs"]:
        return quat_angle(self.cube.root_quat, self.goal_quat)

    def _terms(self) -> Terms:
        """Return observation terms by name, shape [num_envs, size] each."""
        hand, cube = self.hand, self.cube
        to_goal = quat_difference(cube.root_quat, self.goal_quat)
        return {
            "joint_pos": (hand.joint_pos - self.joint_middle) / self.joint_range,
            "joint_vel": hand.joint_vel,
            "joint_effort": hand.joint_effort,
            "cube_pos": cube.root_pos,
            "cube_quat": cube.root_quat,
            "cube_lin_vel": cube.root_lin_vel,
            "cube_ang_vel": cube.root_ang_vel,
            "goal_pos": self.goal_pos - cube.root_pos,
            "goal_quat": self.goal_quat,
            "to_goal": torch.where(to_goal[:, :1] < 0.0, -to_goal, to_goal),  # q and -q are the same rotation
            "actions": self.actions,
        }
