"""Quadcopter: a disc with four tilting rotors hovers at one point; base of the flight tasks."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.env.math import quat_rotate
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Articulation, Scene, Sim

ROTORS = ["rotor_1", "rotor_2", "rotor_3", "rotor_4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightConfig(TaskConfig):
    """Settings shared by the flight tasks; values are in the yaml of each task."""

    lost_distance: float
    lost_height: float


Cfg = TypeVar("Cfg", bound=FlightConfig)


class Flight(Task[Cfg]):
    """Robot that flies to a target and hovers there, upright and without spinning."""

    UPRIGHT: ClassVar[float]  # weight of the term `upright`
    sources: ClassVar = {"to_target": "simulator position", "lin_vel": "simulator velocity"}
    robot: Articulation

    @abstractmethod
    def _way(self) -> Float[Tensor, "envs 3"]:
        """Return the vector to the target [m]."""

    def observe(self) -> dict[str, Terms]:
        robot = self.robot
        terms = {
            "to_target": self._way() / 3.0,
            "quat": robot.root_quat,
            "lin_vel": robot.root_lin_vel / 2.0,
            "ang_vel": robot.root_ang_vel / math.pi,
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        near = 1.0 / (1.0 + self._distance().square())
        tilt = 2.0 * self.robot.root_quat[:, 1:3].square().sum(dim=1)  # 1 - vertical component of the z axis
        return {
            "position": near,
            "upright": self.UPRIGHT * near / (1.0 + tilt.square()),
            "spin": near / (1.0 + self.robot.root_ang_vel[:, 2].square()),
        }

    def terminated(self) -> Bool[Tensor, " envs"]:
        too_low = self.robot.root_pos[:, 2] < self.cfg.lost_height
        return (self._distance() > self.cfg.lost_distance) | too_low

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        return {"distance": self._distance()}

    def _distance(self) -> Float[Tensor, " envs"]:
        return torch.linalg.vector_norm(self._way(), dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuadcopterConfig(FlightConfig):
    """Settings of Quadcopter; values are in cfg/task/Quadcopter.yaml."""

    tilt_speed: float
    thrust_speed: float
    max_thrust: float
    target_height: float


class Quadcopter(Flight[QuadcopterConfig]):
    """Quadcopter: fly to a point and hover, upright and without spinning.

    Observations, actions, reward and initial states match IsaacGymEnvs' Quadcopter, but with wxyz quaternions
    (original: xyzw) and without PhysX's angular velocity limit of 4 pi rad/s. Rotors produce thrust, but no torque.

    Action space: 12 numbers in [-1, 1]: 0-7 rates of the rotors' target angles / `tilt_speed`, pitch and roll for each
    rotor; 8-11 rates of the rotor thrusts / `thrust_speed`.

    Observation space:
    | num   | name      | observation                          | unit     |
    |-------|-----------|--------------------------------------|----------|
    | 0-2   | to_target | vector to the target / 3             | 3 m      |
    | 3-6   | quat      | orientation of the chassis, wxyz     | -        |
    | 7-9   | lin_vel   | velocity of the chassis / 2          | 2 m/s    |
    | 10-12 | ang_vel   | angular velocity of the chassis / pi | pi rad/s |
    | 13-20 | rotor_pos | angles of the rotors                 | rad      |

    Reward terms, with near = 1 / (1 + distance^2): position = near; upright = near / (1 + (1 - up)^2) with up the
    projection of the chassis' z axis onto the vertical; spin = near / (1 + (vertical angular velocity)^2). Start: level
    and at rest, within +-1.5 m sideways and 0.2 m below to 1.5 m above the target, rotor angles +-0.2 rad, no thrust.
    Termination: further from the target than `lost_distance`, or below `lost_height`.
    """

    Config = QuadcopterConfig
    UPRIGHT = 1.0
    units: ClassVar = {"to_target": "3 m", "quat": "-", "lin_vel": "2 m/s", "ang_vel": "pi rad/s", "rotor_pos": "rad"}
    sources: ClassVar = {**Flight.sources, "rotor_pos": "joint positions"}

    @classmethod
    def scene(cls, cfg: QuadcopterConfig) -> Scene:
        # An untrained policy spins faster than the Euler integrator can simulate stably.
        scene = Scene(cfg.physics_hz, integrator="implicit")
        scene.add_ground()
        scene.add("quadcopter", assets_dir() / "quadcopter.xml")
        return scene

    def __init__(self, cfg: QuadcopterConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("quadcopter")
        self.rotors = self.robot.bodies(ROTORS)
        self.num_tilts = len(self.robot.joint_names)
        self.num_actions = self.num_tilts + len(ROTORS)
        self.tilt_low, self.tilt_high = self.robot.joint_limits.unbind(dim=1)
        self.start_low = torch.tensor([-1.5, -1.5, -0.2] + [-0.2] * self.num_tilts, device=self.device)  # m, rad
        self.start_high = torch.tensor([1.5, 1.5, 1.5] + [0.2] * self.num_tilts, device=self.device)
        self.tilt_target = torch.zeros(self.num_envs, self.num_tilts, device=self.device)  # rad
        self.thrust = torch.zeros(self.num_envs, len(ROTORS), device=self.device)  # N, along the rotors' z axes
        self.target = torch.tensor([0.0, 0.0, cfg.target_height], device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        start = self.random.uniform(self.start_low, self.start_high, 3 + self.num_tilts)
        offset, tilt = start.split([3, self.num_tilts], dim=1)
        self.robot.set_state(where, root_pos=self.target + offset, joint_pos=tilt)
        torch.where(where[:, None], tilt, self.tilt_target, out=self.tilt_target)
        self.thrust.masked_fill_(where[:, None], 0.0)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        cfg = self.cfg
        tilt_rate, thrust_rate = action[:, : self.num_tilts], action[:, self.num_tilts :]
        self.tilt_target.add_(tilt_rate, alpha=self.dt * cfg.tilt_speed).clamp_(self.tilt_low, self.tilt_high)
        self.thrust.add_(thrust_rate, alpha=self.dt * cfg.thrust_speed).clamp_(0.0, cfg.max_thrust)
        self.robot.actuate(self.tilt_target)
        force = torch.nn.functional.pad(self.thrust[..., None], (2, 0))
        self.rotors.apply_wrench(quat_rotate(self.rotors.quat, force))

    def observe(self) -> dict[str, Terms]:
        return {"policy": {**super().observe()["policy"], "rotor_pos": self.robot.joint_pos}}

    def _way(self) -> Float[Tensor, "envs 3"]:
        return self.target - self.robot.root_pos
