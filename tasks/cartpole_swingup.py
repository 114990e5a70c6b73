"""CartpoleSwingup: a cart swings a pole up, from state or from images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.env.math import tolerance
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim


@dataclass(frozen=True, slots=True, kw_only=True)
class CartpoleSwingupConfig(TaskConfig):
    """Settings of CartpoleSwingup; values are in cfg/task/CartpoleSwingup.yaml."""

    max_force: float
    vision: Literal["rgb"] | None
    height: int
    width: int


class CartpoleSwingup(Task[CartpoleSwingupConfig]):
    """CartpoleSwingup: swing a pole up, by moving its cart, and keep it upright in the middle of the rail.

    Cart, pole and reward match `cartpole-swingup` in dm_control (Tassa et al. 2018, arXiv 1801.00690). An episode has
    250 control steps of 0.04 s (dm_control: 1000 of 0.01 s), so returns are a quarter as high.

    Action space: 1 number in [-1, 1], the force on the cart / `max_force`.

    Observation space:
    | num | name      | observation                          | unit  |
    |-----|-----------|--------------------------------------|-------|
    | 0   | cart_pos  | position of the cart                 | m     |
    | 1   | cart_vel  | velocity of the cart                 | m/s   |
    | 2   | pole_cos  | cosine of the pole angle, 1 upright  | -     |
    | 3   | pole_sin  | sine of the pole angle               | -     |
    | 4   | pole_vel  | angular velocity of the pole         | rad/s |

    With `vision=rgb`, the critic and a teacher get these observations. The policy gets images of `camera`, next to the
    rail, and infers velocities from successive frames (`network.encoder.frames`).

    Reward per step, from 0 to 1: (1 + cosine of the angle) / 2 x (1 + 0.1^(x^2)) / 2 x (1 + 0.1^(v^2)) / 2 x (4 + 1 -
    a^2) / 5, with x the position of the cart / 2 m, v the angular velocity / 5 rad/s and a the action. Start: cart in
    the middle, pole hanging, normal noise (standard deviation 0.01) on each position and velocity. No termination.
    """

    Config = CartpoleSwingupConfig
    units: ClassVar = {"cart_pos": "m", "cart_vel": "m/s", "pole_cos": "-", "pole_sin": "-", "pole_vel": "rad/s"}
    sources: ClassVar = {
        "cart_pos": "position of cartpole/slider",
        "cart_vel": "velocity of cartpole/slider",
        "pole_cos": "cosine of cartpole/hinge",
        "pole_sin": "sine of cartpole/hinge",
        "pole_vel": "velocity of cartpole/hinge",
    }

    @classmethod
    def scene(cls, cfg: CartpoleSwingupConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add_ground()
        scene.add("cartpole", assets_dir() / "cartpole_swingup.xml")
        if cfg.vision is not None:
            size = cfg.height, cfg.width
            scene.add_camera("camera", pos=(0.0, -5.0, 1.5), target=(0.0, 0.0, 1.5), fovy=26.0, size=size)
        return scene

    def __init__(self, cfg: CartpoleSwingupConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("cartpole")
        self.camera = None if cfg.vision is None else sim.camera("camera")
        self.num_actions = 1
        self.hanging = torch.tensor([0.0, math.pi], device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        noise = self.random.normal(0.0, 0.01, 4)
        self.robot.set_state(where, joint_pos=self.hanging + noise[:, :2], joint_vel=noise[:, 2:])

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate(action * self.cfg.max_force)

    def observe(self) -> dict[str, Tensor | Terms]:
        pos, vel = self.robot.joint_pos, self.robot.joint_vel
        angle = pos[:, 1:]
        terms = {
            "cart_pos": pos[:, :1],
            "cart_vel": vel[:, :1],
            "pole_cos": angle.cos(),
            "pole_sin": angle.sin(),
            "pole_vel": vel[:, 1:],
        }
        return {"policy": terms} if self.camera is None else {"camera": self.camera.rgb, "critic": terms}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        (cart, angle), spin = self.robot.joint_pos.unbind(dim=1), self.robot.joint_vel[:, 1]
        middle = 0.5 + 0.5 * tolerance(cart, margin=2.0)
        velocity = 0.5 + 0.5 * tolerance(spin, margin=5.0)
        force = 0.8 + 0.2 * tolerance(self.actions[:, 0], margin=1.0, sigmoid="quadratic", value_at_margin=0.0)
        return {"swing_up": (0.5 + 0.5 * angle.cos()) * middle * velocity * force}

    def terminated(self) -> Bool[Tensor, " envs"]:
        return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        return {"upright": (self.robot.joint_pos[:, 1].cos() > 0.9).float()}
