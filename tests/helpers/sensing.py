"""Sensors at a state that a test has written."""

from __future__ import annotations

import torch

from gpusim_rl.sim import Sim


def feel(sim: Sim) -> None:
    """Lets sensors tell of the current state: they tell of the one that a step began with, so take one, and go back.

    For `sim=mujoco` and `sim=mjwarp`.
    """
    state = sim.qpos.clone(), sim.qvel.clone()
    sim.step(1)
    sim.qpos.copy_(state[0])
    sim.qvel.copy_(state[1])
    sim.wrote_state(torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device))
    sim.refresh()
