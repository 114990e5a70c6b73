"""Cartpole: a cart on a rail keeps a pole upright."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.env.math import masked_terms
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim


@dataclass(frozen=True, slots=True, kw_only=True)
class CartpoleConfig(TaskConfig):
    """Settings of Cartpole; values are in cfg/task/Cartpole.yaml."""

    discrete: bool
    max_force: float
    reset_distance: float
    death_cost: float


class Cartpole(Task[CartpoleConfig]):
    """Cartpole: keep the pole upright, with the cart on its rail.

    Observations, action, reward and initial states match IsaacGymEnvs' Cartpole.

    Action space: 1 number in [-1, 1], the force on the cart / `max_force`. With `discrete`, an action of 0 pushes left
    with `max_force` and 1 pushes right, as in Gymnasium's CartPole.

    Observation space:
    | num | name       | observation                     | unit  |
    |-----|------------|---------------------------------|-------|
    | 0   | cart_pos   | position of the cart            | m     |
    | 1   | cart_vel   | velocity of the cart            | m/s   |
    | 2   | pole_angle | angle of the pole, 0 is upright | rad   |
    | 3   | pole_vel   | angular velocity of the pole    | rad/s |

    Reward per step: 1 - angle^2 - 0.01 |cart velocity| - 0.005 |pole velocity|; on failure `death_cost` instead. Start:
    positions +-0.1 m or rad, velocities +-0.25 m/s or rad/s. Termination: the cart is further than `reset_distance`
    from the middle, or the pole is below horizontal.
    """

    Config = CartpoleConfig
    units: ClassVar = {"cart_pos": "m", "cart_vel": "m/s", "pole_angle": "rad", "pole_vel": "rad/s"}
    sources: ClassVar = {
        "cart_pos": "position of cartpole/slider",
        "cart_vel": "velocity of cartpole/slider",
        "pole_angle": "position of cartpole/hinge",
        "pole_vel": "velocity of cartpole/hinge",
    }

    @classmethod
    def scene(cls, cfg: CartpoleConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add_ground()
        scene.add("cartpole", assets_dir() / "cartpole.xml")
        return scene

    def __init__(self, cfg: CartpoleConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("cartpole")
        self.num_actions = 1
        self.choices = (2,) if cfg.discrete else None

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        noise = self.random.uniform(-1.0, 1.0, 2, 2)
        self.robot.set_state(where, joint_pos=0.1 * noise[:, 0], joint_vel=0.25 * noise[:, 1])

    def apply_action(self, action: Shaped[Tensor, "envs actions"]) -> None:
        if self.choices is not None:
            action = 2.0 * action - 1.0
        self.robot.actuate(action * self.cfg.max_force)

    def observe(self) -> dict[str, Tensor | Terms]:
        pos, vel = self.robot.joint_pos, self.robot.joint_vel
        terms = {"cart_pos": pos[:, :1], "cart_vel": vel[:, :1], "pole_angle": pos[:, 1:], "pole_vel": vel[:, 1:]}
        return {"policy": terms}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        angle = self.robot.joint_pos[:, 1]
        cart_speed, pole_speed = self.robot.joint_vel.abs().unbind(dim=1)
        terms = {
            "upright": 1.0 - angle.square(),
            "cart_velocity": -0.01 * cart_speed,
            "pole_velocity": -0.005 * pole_speed,
        }
        failed = self.terminated()
        return {**masked_terms(terms, failed), "death": self.cfg.death_cost * failed}

    def terminated(self) -> Bool[Tensor, " envs"]:
        position, angle = self.robot.joint_pos.abs().unbind(dim=1)
        return (position > self.cfg.reset_distance) | (angle > math.pi / 2)
