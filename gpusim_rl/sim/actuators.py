"""Joint drives built from MuJoCo actuators; they act in every physics step on every simulator."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from gpusim_rl.errors import TaskError, available

Value = float | Mapping[str, float]  # one number for all joints, or one per joint name or pattern (`*_hip`)

RESISTANCE, STIFFNESS, DAMPING = 0, 4, 6
"""Columns of a DC motor's `actuator_gainprm`: winding resistance, servo stiffness and servo damping."""

ON_JOINTS = (mujoco.mjtTrn.mjTRN_JOINT, mujoco.mjtTrn.mjTRN_JOINTINPARENT)
INPUT = {"position": 1, "velocity": 2, "torque": 4, "dc_motor": 8}  # mjtCtrlInput of MuJoCo's DC motor
_NEEDS = {"position": ("stiffness",), "velocity": ("damping",), "torque": (), "dc_motor": ("velocity_limit",)}
_GAINS = ("stiffness", "damping")
_REFUSES = {"position": (), "velocity": ("stiffness",), "torque": _GAINS, "dc_motor": _GAINS}
_POSITIVE = ("effort_limit", "velocity_limit", "stall_effort")


def add_actuators(
    spec: mujoco.MjSpec,
    drivable: Mapping[str, mujoco.MjsJoint],
    joints: str | Sequence[str],
    kind: str,
    values: Mapping[str, Value | None],
) -> None:
    """Add an actuator to each joint; see `Scene.add_actuators`. `drivable` maps names to hinges and slides."""
    if kind not in INPUT:
        raise TaskError(f"unknown kind {kind!r}", hint=available(str(kind), INPUT))
    patterns = [joints] if isinstance(joints, str) else list(joints)
    matches = [_matches(pattern, drivable) for pattern in patterns]
    chosen = [name for name in drivable if any(match[name] for match in matches)]
    driven = {actuator.target for actuator in spec.actuators if actuator.trntype in ON_JOINTS}
    for name in chosen:
        if drivable[name].name in driven:
            raise TaskError(f"joint {name!r} already has an actuator")
    by_joint = {argument: _by_joint(argument, value, chosen) for argument, value in values.items()}
    for argument in _NEEDS[kind]:
        if by_joint[argument] is None:
            raise TaskError(f"kind={kind!r} requires {argument}")
    for argument in _REFUSES[kind]:
        if by_joint[argument] is not None:
            hint = "For a servo with a DC motor, try kind='position' with velocity_limit" if kind == "dc_motor" else ""
            raise TaskError(f"kind={kind!r} does not support {argument}", hint=hint)
    given = {argument: numbers for argument, numbers in by_joint.items() if numbers is not None}
    for name in chosen:
        drive = {argument: numbers[name] for argument, numbers in given.items()}
        _add(spec, name, drivable[name], kind, drive)


def _matches(pattern: str, known: Mapping[str, Any]) -> dict[str, bool]:
    """Map each name to whether the pattern matches it; raise TaskError if no name matches."""
    matches = {name: fnmatch.fnmatchcase(name, pattern) for name in known}
    if not any(matches.values()):
        raise TaskError(f"{pattern!r} matches no joint", hint=available(pattern, known))
    return matches


def _by_joint(argument: str, value: Value | None, joints: Sequence[str]) -> dict[str, float] | None:
    if value is None:
        return None
    numbers: dict[str, float] = {}
    if isinstance(value, Mapping):
        source: dict[str, str] = {}
        for pattern, number in value.items():
            for name in (name for name, match in _matches(pattern, dict.fromkeys(joints)).items() if match):
                if name in source:
                    raise TaskError(f"both {source[name]!r} and {pattern!r} match joint {name!r}", key=argument)
                numbers[name], source[name] = number, pattern
        if missing := [name for name in joints if name not in numbers]:
            raise TaskError(f"no pattern matches {', '.join(missing)}", key=argument, got=dict(value))
    else:
        numbers = dict.fromkeys(joints, value)
    for name, number in numbers.items():
        least = "a positive, finite number" if argument in _POSITIVE else "a finite number >= 0"
        right = isinstance(number, int | float) and math.isfinite(number) and number >= 0.0
        if not right or (argument in _POSITIVE and number == 0.0):
            raise TaskError(key=f"{argument} of joint {name!r}", expected=least, got=number)
    return {name: float(number) for name, number in numbers.items()}


def _add(spec: mujoco.MjSpec, name: str, joint: mujoco.MjsJoint, kind: str, drive: Mapping[str, float]) -> None:
    names = {actuator.name for actuator in spec.actuators}
    actuator = spec.add_actuator(
        name=joint.name if joint.name not in names else f"{joint.name}_{kind}",
        target=joint.name,
        trntype=mujoco.mjtTrn.mjTRN_JOINT,
    )
    stiffness, damping, effort = drive.get("stiffness", 0.0), drive.get("damping", 0.0), drive.get("effort_limit")
    if effort is None and joint.actfrcrange[1] > joint.actfrcrange[0] and joint.actfrclimited:
        effort = float(max(abs(joint.actfrcrange)))  # from the file
    stall = drive.get("stall_effort", effort)
    if "velocity_limit" in drive:
        if stall is None:
            raise TaskError("velocity_limit requires effort_limit or stall_effort", key=f"joint {name!r}")
        # MuJoCo's DC motor and servo at 1 V: torque K (V - K w) / R is `stall` at rest and 0 at the velocity limit.
        constant = 1.0 / drive["velocity_limit"]
        actuator.set_to_dcmotor(
            motorconst=[constant, constant],
            resistance=constant / stall,
            controller=[stiffness, 0.0, damping, 0.0, 0.0, 1.0],
            ctrlspec=INPUT[kind],
        )
    elif "stall_effort" in drive:
        raise TaskError("stall_effort requires velocity_limit", key=f"joint {name!r}")
    elif kind == "position":
        actuator.set_to_position(kp=stiffness, kv=damping)
    elif kind == "velocity":
        actuator.set_to_velocity(kv=damping)
    else:
        actuator.set_to_motor()
    if effort is not None:
        actuator.forcelimited, actuator.forcerange = True, [-effort, effort]
        joint.actfrclimited = False  # replaced by the actuator's limit, which can differ per world
    if kind == "torque" and effort is not None:
        actuator.ctrllimited, actuator.ctrlrange = True, [-effort, effort]
    if kind == "dc_motor":
        actuator.ctrllimited, actuator.ctrlrange = True, [-1.0, 1.0]
    if "armature" in drive:
        joint.armature = drive["armature"]
    if "friction" in drive:
        joint.frictionloss = drive["friction"]
    dt, delay = spec.option.timestep, drive.get("delay", 0.0)
    most = drive.get("max_delay", delay)
    if most < delay:
        raise TaskError(f"max_delay ({most} s) is less than delay ({delay} s)", key=f"joint {name!r}")
    steps, most_steps = (math.ceil(seconds / dt - 1e-6) for seconds in (delay, most))
    if most_steps:
        actuator.delay = max(0.0, (steps - 0.5) * dt)  # see `whole_steps`
        actuator.nsample, actuator.interp = most_steps + 1, 0


def whole_steps(delay: Tensor, dt: float) -> Tensor:
    """Round delays [s] up to whole steps, then subtract half a step: rounding errors must not select another sample."""
    return ((delay / dt - 1e-3).ceil() - 0.5).clamp(min=0.0) * dt


def has_steps(model: mujoco.MjModel) -> np.ndarray:
    """Return a mask of actuators whose delayed controls are held instead of interpolated, shape [nactuator]."""
    return (model.actuator_history[:, 0] > 0) & (model.actuator_history[:, 1] == 0)


def with_whole_steps(model: mujoco.MjModel) -> mujoco.MjModel:
    """Round the model's actuator delays in place with `whole_steps`, and return the model."""
    held = has_steps(model)
    model.actuator_delay[held] = whole_steps(torch.from_numpy(model.actuator_delay[held]), model.opt.timestep)
    return model


def delayed_controls(model: mujoco.MjModel) -> tuple[list[int], list[int]]:
    """Return the columns of `MjData.history` that hold pending controls, and the control index of each."""
    columns, controls = [], []
    for i in range(model.nactuator):
        samples, number = int(model.actuator_history[i, 0]), int(model.actuator_ctrlnum[i])
        first = int(model.actuator_historyadr[i]) + 2 + samples  # after a header of two numbers and the time stamps
        control = int(model.actuator_ctrladr[i])
        columns += range(first, first + samples * number)
        controls += [control + k % number for k in range(samples * number)]
    return columns, controls


def control_names(model: mujoco.MjModel) -> list[tuple[str, int]]:
    """Return the name and actuator id of each control; an actuator's several controls are `name/0`, `name/1`, ..."""
    names = []
    for i, number in enumerate(model.actuator_ctrlnum.tolist()):
        name = model.actuator(i).name
        names += [(name if number == 1 else f"{name}/{k}", i) for k in range(number)]
    return names


def is_dc_motor(model: mujoco.MjModel, actuator: int) -> bool:
    """Return whether an actuator is a DC motor (`mjGAIN_DCMOTOR`)."""
    return int(model.actuator_gaintype[actuator]) == mujoco.mjtGain.mjGAIN_DCMOTOR.value


def is_dc_servo(model: mujoco.MjModel, actuator: int, column: int) -> bool:
    """Return whether an actuator is a DC motor with a nonzero servo gain in `column` (`STIFFNESS` or `DAMPING`)."""
    return is_dc_motor(model, actuator) and bool(model.actuator_gainprm[actuator, column] > 0.0)
