"""Task with cheap images, painted by tensor operations."""

from __future__ import annotations

from typing import Any

import torch
from gpusim_rl.tasks.cartpole import Cartpole, CartpoleConfig
from torch import Tensor


class Painted(Cartpole):
    """Cartpole seen as two spots: the cart and the tip of its pole."""

    def __init__(self, cfg: CartpoleConfig, sim: Any) -> None:
        super().__init__(cfg, sim)
        y, x = (torch.linspace(*ends, 32, device=self.device) for ends in ((1.3, -0.3), (-3.0, 3.0)))
        self.y, self.x = torch.meshgrid(y, x, indexing="ij")

    def observe(self) -> dict[str, Any]:
        def spot(x: Tensor, y: Tensor) -> Tensor:
            return 255 * (-20 * ((self.x - x) ** 2 + (self.y - y) ** 2)).exp()

        at, angle = self.robot.joint_pos[:, :, None, None].unbind(1)
        camera = torch.stack([spot(at, 0 * at), spot(at + angle.sin(), angle.cos())], dim=3).to(torch.uint8)
        return {"camera": camera, "critic": torch.cat([*super().observe()["policy"].values()], dim=1)}
