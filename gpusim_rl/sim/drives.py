"""Identified drives: a robot's armature, damping, friction, gains, encoder bias and delay, with training ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.errors import ConfigError, TaskError, available
from gpusim_rl.files.safe_open import load_yaml
from gpusim_rl.sim.actuators import DAMPING, ON_JOINTS, STIFFNESS, is_dc_servo
from gpusim_rl.sim.scene import Scene

FORMAT = 1
POSITIVE = ("armature", "damping", "stiffness")
KINDS = (*POSITIVE, "friction", "bias")
"""Parameters of a joint. `damping` is the joint's and its servo's; `bias`: the encoder's reading - the angle [rad]."""
LEAST_SPREAD = math.log(1.03)  # of scaling ranges, each way
LEAST_DELAY = 0.002  # half of the delay's range, at least [s]
LEAST_BIAS = 0.005  # [rad], added to the interval of the encoder bias
SAME = 0.01  # relative difference of nominal values within which a model is the identified one
DC_MOTOR = mujoco.mjtGain.mjGAIN_DCMOTOR.value


def read_drives(path: Path) -> dict[str, Any]:
    """Return the content of a drives file; raise ConfigError if it is damaged."""
    drives = load_yaml(path)
    try:
        if drives["format"] != FORMAT:
            raise ConfigError("unknown format", key=str(path), expected=str(FORMAT), got=drives["format"])
        rows = [(f"joints.{joint}.{kind}", row[kind]) for joint, row in drives["joints"].items() for kind in KINDS]
        for key, row in [("delay", drives["delay"]), *rows]:
            value, low, high = (float(row[name]) for name in ("value", "low", "high"))
            least = 0.0 if key.rpartition(".")[2] in POSITIVE else -math.inf
            if not least < value < math.inf or not -math.inf < low <= value <= high < math.inf:
                raise ConfigError(key=f"{path}: {key}", expected="low <= value <= high", got=[low, value, high])
        for joint, row in drives["joints"].items():
            numbers = [float(row["servo_damping"]), *(float(drives["nominal"][joint][kind]) for kind in POSITIVE)]
            if not np.isfinite(numbers).all() or min(numbers) < 0.0:
                raise ConfigError(key=f"{path}: joints.{joint}", expected="numbers of at least 0", got=numbers)
        return {name: drives[name] for name in ("format", "robot", "nominal", "delay", "joints")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        hint = "Try gpusim-rl identify"
        raise ConfigError(f"not a drives file ({error!r})", key=str(path), hint=hint) from None


def servos(scene: Scene) -> tuple[str, dict[str, int]]:
    """Return the articulation with most position servos, and the index of each of its servos by joint."""
    model, best = scene.model, ("", dict[str, int]())
    for name in scene.articulation_names:
        joints = {index: joint for joint, index in scene.elements_of(name, "joint").items()}
        found = {
            joints[int(model.actuator_trnid[i, 0])]: i
            for i in scene.elements_of(name, "actuator").values()
            if mujoco.mjtTrn(int(model.actuator_trntype[i])) in ON_JOINTS and int(model.actuator_trnid[i, 0]) in joints
            if servo_gains(model, i)[0] > 0.0 and model.actuator_gear[i, 0] == 1.0
        }
        best = max(best, (name, found), key=lambda each: len(each[1]))
    if not best[1]:
        raise TaskError("no joint has a position servo", key="drives", hint='Try scene.add_actuators(kind="position")')
    return best


def servo_gains(model: mujoco.MjModel, i: int) -> tuple[float, float]:
    """Return stiffness and damping of a position servo; stiffness 0 for other actuators."""
    gain, bias = model.actuator_gainprm[i], model.actuator_biasprm[i]
    if is_dc_servo(model, i, STIFFNESS):
        return float(gain[STIFFNESS]), float(gain[DAMPING])
    affine = model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_AFFINE.value
    return (float(gain[0]), -float(bias[2])) if affine and bias[1] == -gain[0] else (0.0, 0.0)


def nominal(scene: Scene) -> dict[str, dict[str, float]]:
    """Return the model's own values by joint, and the mass that moves with it: a fingerprint of the robot."""
    model, (_, found) = scene.model, servos(scene)
    rows = {}
    for joint, i in found.items():
        j = int(model.actuator_trnid[i, 0])
        dof, (stiffness, damping) = int(model.jnt_dofadr[j]), servo_gains(model, i)
        rows[joint] = {
            "armature": float(model.dof_armature[dof]),
            "damping": damping + float(model.dof_damping[dof]),
            "friction": float(model.dof_frictionloss[dof]),
            "stiffness": stiffness,
            "mass": float(model.body_subtreemass[model.jnt_bodyid[j]]),
        }
    return rows


def _put(element: Any, name: str, value: float, index: int = 0) -> None:
    """Set a number of a spec's or a compiled model's element."""
    if np.ndim(getattr(element, name)):
        getattr(element, name)[index] = value
    else:
        setattr(element, name, value)


def write_drive(joint: Any, servo: Any, values: Mapping[str, float], servo_damping: float) -> None:
    """Set the values of a joint and its servo, of a spec or a compiled model; damping beyond the servo's is passive."""
    _put(joint, "armature", values["armature"])
    _put(joint, "frictionloss", values["friction"])
    _put(joint, "damping", max(0.0, values["damping"] - servo_damping))
    damping = min(servo_damping, values["damping"])
    if int(np.squeeze(servo.gaintype)) == DC_MOTOR:
        columns = (("gainprm", STIFFNESS, values["stiffness"]), ("gainprm", DAMPING, damping))
    else:
        stiffness = values["stiffness"]
        columns = (("gainprm", 0, stiffness), ("biasprm", 1, -stiffness), ("biasprm", 2, -damping))
    for name, column, value in columns:
        _put(servo, name, value, column)


def with_drives(scene: Scene, drives: Mapping[str, Any] | None) -> Scene:
    """Set identified drives in a scene and return it; raise ConfigError if they are another robot's."""
    if drives is None:
        return scene
    own, key = nominal(scene), f"task.drives of {drives['robot']}"
    for joint, row in drives["nominal"].items():
        if joint not in own:
            raise ConfigError(f"the robot has no servo on joint {joint!r}", key=key, hint=available(joint, own))
        for name, value in row.items():
            if not math.isclose(value, own[joint][name], rel_tol=SAME, abs_tol=1e-9):
                problem = f"identified for another robot: {name} of {joint}"
                raise ConfigError(problem, key=key, expected=f"{value:g}", got=own[joint][name])
    if missing := [joint for joint in own if joint not in drives["joints"]]:
        raise ConfigError(f"identified for another robot: no joint {missing[0]!r}", key=key)
    (name, _), spec, dt = servos(scene), scene.spec, scene.spec.option.timestep
    by_target = {actuator.target: actuator for actuator in spec.actuators if actuator.trntype in ON_JOINTS}
    steps, least = round(drives["delay"]["value"] / dt), max(LEAST_DELAY, 0.5 * dt)
    for joint, row in drives["joints"].items():
        full = f"{scene.prefix(name)}{joint}"
        values = {kind: float(row[kind]["value"]) for kind in KINDS}
        write_drive(spec.joint(full), by_target[full], values, float(row["servo_damping"]))
        by_target[full].delay = max(0.0, (steps - 0.5) * dt)  # see `whole_steps`
        by_target[full].nsample, by_target[full].interp = math.ceil((drives["delay"]["high"] + least) / dt) + 2, 0
    scene.option.integrator = scene.option.integrator  # compile the changed spec
    return scene


def expand(task: dict[str, Any]) -> None:
    """Replace the path `task.drives` by the file's content, and randomise around it, in settings of a new run."""
    if not isinstance(task.get("drives"), str):
        return
    drives = task["drives"] = read_drives(Path(task["drives"]))
    params = task["randomization_params"] = {**(task.get("randomization_params") or {})}
    actors = params["actor_params"] = {**(params.get("actor_params") or {})}
    robot = actors[drives["robot"]] = {**(actors.get(drives["robot"]) or {})}
    robot["dof_properties"] = {**(robot.get("dof_properties") or {}), **ranges(drives, 1.0 / task["physics_hz"])}
    task["randomize"] = True
    if "encoder_bias" in task:
        rows = [row["bias"] for row in drives["joints"].values()]
        task["encoder_bias"] = LEAST_BIAS + max(0.5 * (row["high"] - row["low"]) for row in rows)


def ranges(drives: Mapping[str, Any], dt: float) -> dict[str, Any]:
    """Return randomisation of joint properties: each parameter's interval, at least 3 % each way; the delay's 2 ms."""
    properties: dict[str, Any] = {}
    for kind in ("stiffness", "damping", "friction", "armature"):
        for joint, row in drives["joints"].items():
            value, own = float(row[kind]["value"]), float(row["servo_damping"])
            if value <= 0.0:
                continue
            low, high = (row[kind][end] / value for end in ("low", "high"))
            low, high = min(max(low, 0.0), math.exp(-LEAST_SPREAD)), max(high, math.exp(LEAST_SPREAD))
            if kind == "damping" and own:  # the property is the servo's, the interval is that of the sum
                low, high = (max(0.0, 1.0 + (end - 1.0) * value / min(own, value)) for end in (low, high))
            spec = {"range": [low, high], "operation": "scaling", "distribution": "uniform", "names": [joint]}
            properties.setdefault(kind, []).append(spec)
    late, half = drives["delay"], max(LEAST_DELAY, 0.5 * dt)  # half a step: whole steps are right on average
    low, high = min(late["low"], late["value"] - half), max(late["high"], late["value"] + half)
    base = round(late["value"] / dt) * dt
    spec = {"range": [low - base, high - base], "operation": "additive", "distribution": "uniform"}
    return {**properties, "delay": spec}


def biases(task: Mapping[str, Any]) -> dict[str, float]:
    """Return the encoder bias of each joint's full name in a task's settings; empty without identified drives."""
    drives = task.get("drives")
    rows = drives["joints"].items() if isinstance(drives, Mapping) else ()
    return {f"{drives['robot']}/{joint}": float(row["bias"]["value"]) for joint, row in rows if drives}
