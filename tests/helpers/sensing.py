"""Sensor values of a state written by a test."""

from __future__ import annotations

import torch

from gpusim_rl.sim import Sim


def update_sensors(sim: Sim) -> None:
    """Update the sensors for the current state of `sim=mujoco` or `sim=mjwarp`.

    Sensors show the state before a physics step, so take one step and restore the state.
    """
    state = sim.qpos.clone(), sim.qvel.clone()
    sim.step(1)
    sim.qpos.copy_(state[0])
    sim.qvel.copy_(state[1])
    sim.wrote_state(torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device))
    sim.refresh()
