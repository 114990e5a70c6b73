"""Changes of robots and of their physics in MuJoCo, shared by `stress` and `transfer`."""

from __future__ import annotations

import math
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.deployed.walkers import Walkers
from gpusim_rl.sim.actuators import DAMPING, RESISTANCE, STIFFNESS

VARIANTS: dict[str, tuple[float, ...]] = {
    "friction": (0.4, 0.6, 0.8, 1.2),
    "mass": (0.9, 1.1),
    "gains": (0.9, 1.1),
    "effort": (0.9, 1.1),
    "delay": (1, 2, 3),
    "noise": (0.05, 0.1),
}
"""Factors of friction, masses, servo gains and maximum efforts; control steps of delay; relative observation noise."""


def change(walkers: Walkers, rows: np.ndarray, kind: str, value: float, way: Any = None) -> None:
    """Disturb the robots with indices `rows` until `Walkers.restore`.

    The unit of the value, and what `way` is, follow from the kind: one of the cases below, or of `factors`. Directions
    are vectors (forward, left, up) in the heading frame.
    """
    match kind:
        case "push":  # [m/s]
            walkers.qvel[rows, walkers.linear] += walkers.from_heading(rows, value * way)
        case "force":  # on the torso [N], for a time [s]
            direction, seconds = way
            walkers.force[rows] = value * direction
            walkers.force_until[rows] = walkers.steps[rows] + seconds * walkers.control_hz
        case "slope":  # [rad]; gravity tilts, which is the same seen from the ground, except for `world_terms`
            down = math.sin(value) * walkers.from_heading(rows, way) - math.cos(value) * np.array([0.0, 0.0, 1.0])
            walkers.vary("opt.gravity")[rows] = np.linalg.norm(walkers.model.opt.gravity) * down
            walkers.down[rows] = down
        case "payload":  # in the torso's centre of mass [kg]
            walkers.vary("body_mass")[rows, walkers.torso] += value
        case "command":  # share of the way to a limit
            column, limit = way
            walkers.command[rows, column] += value * (limit - walkers.command[rows, column])
        case "delay" | "noise":
            getattr(walkers, kind)[rows] = value
        case _:
            for field, factor in factors(walkers.model, kind, value, way).items():
                walkers.vary(field)[rows] *= factor


def factors(model: mujoco.MjModel, kind: str, value: float, actuator: int | None = None) -> dict[str, np.ndarray]:
    """Return factors by model field that scale friction, masses, gains or efforts by a value; empty if there are none.

    `friction` is every coefficient of geoms and contact pairs, `mass` has inertia, `gains` are servos' own, without
    gear and passive joint damping, `effort` force limits, else motors' gain, `motor` one actuator's gains and limit.
    """
    gain, limited, column = model.actuator_gaintype, model.actuator_forcelimited == 1, np.arange(mujoco.mjNGAIN)
    plain, dc = gain <= mujoco.mjtGain.mjGAIN_AFFINE.value, gain == mujoco.mjtGain.mjGAIN_DCMOTOR.value
    servo = model.actuator_biastype != mujoco.mjtBias.mjBIAS_NONE.value
    chosen = servo if actuator is None else np.arange(model.nactuator) == actuator
    linear = (chosen & plain)[:, None] & (column < 3)
    gains = linear | (chosen & dc)[:, None] & np.isin(column, (STIFFNESS, DAMPING))
    masks: dict[str, Any] = {
        "friction": {"geom_friction": True, "pair_friction": True},
        "mass": {"body_mass": True, "body_inertia": True},
        "gains": {"actuator_gainprm": gains, "actuator_biasprm": linear},
        "effort": {
            "actuator_forcerange": limited[:, None],
            "actuator_gainprm": (plain & ~servo & ~limited)[:, None] & (column == 0),
        },
        "motor": {"actuator_gainprm": gains, "actuator_biasprm": linear, "actuator_forcerange": chosen[:, None]},
    }[kind]
    found = {field: np.where(mask, value, np.ones_like(getattr(model, field))) for field, mask in masks.items()}
    if kind == "effort":
        found["actuator_gainprm"][limited & dc, RESISTANCE] = 1.0 / value  # stall torque
    return {field: factor for field, factor in found.items() if (factor != 1.0).any()}


def variant_name(group: str, value: float, control_hz: float) -> str:
    """Return a variant's name in tables, such as `friction x0.4`."""
    names = {"delay": f"delay {value:g} ({1000.0 * value / control_hz:.0f} ms)", "noise": f"noise {value:.0%}"}
    return names.get(group, f"{group} x{value:g}")
