"""Task with a cheap style: features of Cartpole's pole, and a reference of small swings."""

from __future__ import annotations

from typing import Any

import torch
from gpusim_rl.tasks.cartpole import Cartpole
from torch import Tensor


class Styled(Cartpole):
    """Cartpole whose reference pole swings by 0.05 rad at 1 Hz."""

    def __init__(self, cfg: Any, sim: Any) -> None:
        super().__init__(cfg, sim)
        self.phase = torch.zeros(self.num_envs, 1, device=self.device)

    def advance(self, done: Tensor) -> None:
        self.phase.copy_(self.random.uniform(0.0, 6.28, 1))

    def observe(self) -> dict[str, Any]:
        reference = torch.cat([0.05 * self.phase.sin(), 0.314 * self.phase.cos()], dim=1)
        style = torch.stack([self.robot.joint_pos[:, 1], self.robot.joint_vel[:, 1]], dim=1)
        return {**super().observe(), "style": style, "reference": reference}
