"""CartpoleCamera: Cartpole from camera images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gpusim_rl.env import Terms
from gpusim_rl.sim import Scene, Sim

from .cartpole import Cartpole, CartpoleConfig

DISTANCE = 5.0  # distance of the camera from the rail [m]
NEAR, FAR = 4.0, 6.0  # depths that become 0 and 255 [m]


@dataclass(frozen=True, slots=True, kw_only=True)
class CartpoleCameraConfig(CartpoleConfig):
    """Settings of CartpoleCamera; values are in cfg/task/CartpoleCamera.yaml."""

    image: Literal["rgb", "depth"]
    height: int
    width: int


class CartpoleCamera(Cartpole):
    """CartpoleCamera: keep the pole upright using images, taken by a camera next to the rail.

    Action space: 1 number in [-1, 1], the force on the cart / `max_force`; with `discrete`, 0 or 1 as in Cartpole.

    Observation space: the policy gets `camera` images, RGB or one depth channel, and infers velocities from successive
    frames (`ppo.network.encoder.frames`). The critic and a teacher get Cartpole's observation:
    | num | name       | observation                     | unit  |
    |-----|------------|---------------------------------|-------|
    | 0   | cart_pos   | position of the cart            | m     |
    | 1   | cart_vel   | velocity of the cart            | m/s   |
    | 2   | pole_angle | angle of the pole, 0 is upright | rad   |
    | 3   | pole_vel   | angular velocity of the pole    | rad/s |

    Reward per step: as in Cartpole. Start: as in Cartpole. Termination: as in Cartpole.
    """

    Config = CartpoleCameraConfig
    cfg: CartpoleCameraConfig

    @classmethod
    def scene(cls, cfg: CartpoleConfig) -> Scene:
        assert isinstance(cfg, CartpoleCameraConfig)
        scene = super().scene(cfg)
        place = {"pos": (0.0, -DISTANCE, 2.45), "target": (0.0, 0.0, 2.45), "fovy": 13.7}
        scene.add_camera("camera", **place, size=(cfg.height, cfg.width), outputs=(cfg.image,))
        return scene

    def __init__(self, cfg: CartpoleCameraConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.camera = sim.camera("camera")

    def observe(self) -> dict[str, Tensor | Terms]:
        state = super().observe()["policy"]
        image = self.camera.rgb if self.cfg.image == "rgb" else self.camera.depth_bytes(NEAR, FAR)
        return {"camera": image, "critic": state}
