"""Changed physics for robots that an exported policy drives, shared by `stress` and `transfer`."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np

from gpusim_rl.deployed.walkers import Walkers
from gpusim_rl.sim.actuators import DAMPING, STIFFNESS, is_dc_motor

VARIANTS: dict[str, tuple[float, ...]] = {
    "friction": (0.4, 0.6, 0.8, 1.2),
    "mass": (0.9, 1.1),
    "gains": (0.9, 1.1),
    "effort": (0.9, 1.1),
    "delay": (1, 2, 3),
    "noise": (0.05, 0.1),
}
"""Factors of friction, masses, servo gains and force limits; control steps of delay; relative observation noise."""


def scale_friction(walkers: Walkers, rows: np.ndarray, factor: np.ndarray) -> None:
    """Scale the friction of all contacts."""
    walkers.vary("geom_friction")[rows] *= factor[:, None, None]
    if walkers.model.npair:
        walkers.vary("pair_friction")[rows] *= factor[:, None, None]


def scale_mass(walkers: Walkers, rows: np.ndarray, factor: np.ndarray) -> None:
    """Scale all masses and inertias."""
    walkers.vary("body_mass")[rows] *= factor[:, None]
    walkers.vary("body_inertia")[rows] *= factor[:, None, None]
    walkers.refresh(rows, constants=True)


def scale_gains(walkers: Walkers, rows: np.ndarray, factor: np.ndarray, only: Sequence[int] | None = None) -> None:
    """Scale stiffness and damping of servos, or the force of the actuators `only` per control and state."""
    model, where = walkers.model, rows[:, None]
    servos = np.flatnonzero(model.actuator_biastype != mujoco.mjtBias.mjBIAS_NONE) if only is None else only
    for actuator in map(int, servos):
        if is_dc_motor(model, actuator):
            walkers.vary("actuator_gainprm")[where, actuator, [STIFFNESS, DAMPING]] *= factor[:, None]
            continue
        for field in ("actuator_gainprm", "actuator_biasprm"):
            walkers.vary(field)[where, actuator, [0, 1, 2]] *= factor[:, None]


def scale_effort(walkers: Walkers, rows: np.ndarray, factor: np.ndarray, only: Sequence[int] | None = None) -> None:
    """Scale the force limits of all actuators, or of the actuators `only`."""
    actuators = np.arange(walkers.model.nactuator) if only is None else np.array(only)
    walkers.vary("actuator_forcerange")[rows[:, None], actuators] *= factor[:, None, None]


def vary(group: str, walkers: Walkers, rows: np.ndarray, values: np.ndarray) -> None:
    """Change the physics of one group of `VARIANTS`."""
    if group in SCALE:
        SCALE[group](walkers, rows, values)
    else:  # delay or noise
        getattr(walkers, group)[rows] = values


SCALE = {"friction": scale_friction, "mass": scale_mass, "gains": scale_gains, "effort": scale_effort}


def variant_name(group: str, value: float, control_hz: float) -> str:
    """Return a variant's name in tables, such as `friction x0.4`."""
    match group:
        case "delay":
            return f"delay {value:g} ({1000.0 * value / control_hz:.0f} ms)"
        case "noise":
            return f"noise {value:.0%}"
    return f"{group} x{value:g}"
