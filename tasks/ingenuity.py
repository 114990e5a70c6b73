"""Ingenuity: a helicopter on Mars flies from one point to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env.math import quat_rotate
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.settings.schema import Count
from gpusim_rl.sim import Scene, Sim

from .quadcopter import Flight, FlightConfig

ROTORS = ["lower_rotor", "upper_rotor"]
MARS_GRAVITY = 3.721  # m/s^2
START_HEIGHT = 1.0  # m
ROTOR_SPEED = 50.0  # rad/s; at the real 250 rad/s the rotors blur in videos


@dataclass(frozen=True, slots=True, kw_only=True)
class IngenuityConfig(FlightConfig):
    """Settings of Ingenuity; values are in cfg/task/Ingenuity.yaml."""

    max_thrust: float
    max_lateral: float
    target_steps: Count
    target_range: float


class Ingenuity(Flight[IngenuityConfig]):
    """Ingenuity: fly to a point and hover, upright and without spinning; the point moves every few seconds.

    Observations, actions, reward and initial states match IsaacGymEnvs' Ingenuity, but with wxyz quaternions (original:
    xyzw) and with the mass and dimensions of the real helicopter. Each rotor tilts its thrust vector and produces no
    torque about its axis. A target out of reach is moved closer; the original ends the episode.

    Action space: 6 numbers in [-1, 1], for the lower, then the upper rotor: thrust tilt in x and y (lateral / axial
    thrust), clamped to +-`max_lateral`; axial thrust / `max_thrust`.

    Observation space:
    | num   | name      | observation                           | unit     |
    |-------|-----------|---------------------------------------|----------|
    | 0-2   | to_target | vector to the target / 3              | 3 m      |
    | 3-6   | quat      | orientation of the fuselage, wxyz     | -        |
    | 7-9   | lin_vel   | velocity of the fuselage / 2          | 2 m/s    |
    | 10-12 | ang_vel   | angular velocity of the fuselage / pi | pi rad/s |

    Reward terms, with near = 1 / (1 + distance^2): position = near; upright = 5 near / (1 + (1 - up)^2) with up the
    projection of the fuselage's z axis onto the vertical; spin = near / (1 + (vertical angular velocity)^2). Start:
    level and at rest, within +-1.5 m of the middle and 0.8 to 2.5 m high; targets are within +-`target_range` and 1 to
    2 m high. Termination: further from the target than `lost_distance`, or below `lost_height`.
    """

    Config = IngenuityConfig
    UPRIGHT = 5.0
    units: ClassVar = {"to_target": "3 m", "quat": "-", "lin_vel": "2 m/s", "ang_vel": "pi rad/s"}

    @classmethod
    def scene(cls, cfg: IngenuityConfig) -> Scene:
        # An untrained policy spins faster than the Euler integrator can simulate stably.
        scene = Scene(cfg.physics_hz, integrator="implicit", gravity=MARS_GRAVITY)
        scene.add_ground()
        scene.add("ingenuity", assets_dir() / "ingenuity.xml")
        scene.add("target", assets_dir() / "marker.xml")
        return scene

    def __init__(self, cfg: IngenuityConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("ingenuity")
        self.target = sim.articulation("target")
        self.rotors = self.robot.bodies(ROTORS)
        self.num_actions = 3 * len(ROTORS)
        reach = cfg.target_range
        self.start_low = torch.tensor([-1.5, -1.5, START_HEIGHT - 0.2], device=self.device)  # m
        self.start_high = torch.tensor([1.5, 1.5, START_HEIGHT + 1.5], device=self.device)
        self.target_low = torch.tensor([-reach, -reach, 1.0], device=self.device)  # m
        self.target_high = torch.tensor([reach, reach, 2.0], device=self.device)
        self.rotor_speed = torch.tensor([-ROTOR_SPEED, ROTOR_SPEED], device=self.device).expand(self.num_envs, 2)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        start = self.random.uniform(self.start_low, self.start_high, 3)
        self.robot.set_state(where, root_pos=start, joint_vel=self.rotor_speed)
        self._move_target(where)

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        self._move_target((self.progress % self.cfg.target_steps == 0) & ~done)

    def _move_target(self, where: Bool[Tensor, " envs"]) -> None:
        way = self.random.uniform(self.target_low, self.target_high, 3) - self.robot.root_pos
        # A target beyond lost_distance would end the episode at once.
        reach = 0.9 * self.cfg.lost_distance / torch.linalg.vector_norm(way, dim=1, keepdim=True)
        self.target.set_state(where, root_pos=self.robot.root_pos + way * reach.clamp(max=1.0))

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        tilt, thrust = action.unflatten(1, (len(ROTORS), 3)).split([2, 1], dim=-1)
        tilt = tilt.clamp(-self.cfg.max_lateral, self.cfg.max_lateral)
        force = self.cfg.max_thrust * thrust * torch.nn.functional.pad(tilt, (0, 1), value=1.0)
        quat = self.robot.root_quat[:, None].expand(-1, len(ROTORS), -1)
        self.rotors.apply_wrench(quat_rotate(quat, force))

    def _way(self) -> Float[Tensor, "envs 3"]:
        return self.target.root_pos - self.robot.root_pos
