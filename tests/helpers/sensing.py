"""Sensor values for a state that a test has written."""

from __future__ import annotations

import torch

from gpusim_rl.sim import Sim


def update_sensors(sim: Sim) -> None:
    """Updates the sensors for the current state of a `sim=mujoco` or `sim=mjwarp`.

    Sensors show the state in which a physics step began. So this takes one step and restores the state.
    """
    state = sim.qpos.clone(), sim.qvel.clone()
    sim.step(1)
    sim.qpos.copy_(state[0])
    sim.qvel.copy_(state[1])
    sim.wrote_state(torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device))
    sim.refresh()
