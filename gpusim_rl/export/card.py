"""JSON card of an exported policy: order, units, gains, rates, limits."""

from __future__ import annotations

import math
from contextlib import suppress
from importlib import metadata
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.env import Environment, VecEnv
from gpusim_rl.env.command import steerable
from gpusim_rl.export.controls import ControlMap
from gpusim_rl.export.joint_order import JointOrder
from gpusim_rl.export.model import ExportedPolicy
from gpusim_rl.files.provenance import describe_environment
from gpusim_rl.files.safe_open import load_json
from gpusim_rl.sim.actuators import DAMPING, INPUT, STIFFNESS, control_names, is_dc_motor
from gpusim_rl.sim.drives import biases
from gpusim_rl.spaces import MultiDiscrete
from gpusim_rl.testing.measurable import simulator_only
from gpusim_rl.view.player import Player

FORMAT = 2  # version of the card
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_SCALAR = (mujoco.mjtJoint.mjJNT_HINGE.value, mujoco.mjtJoint.mjJNT_SLIDE.value)


def describe(
    player: Player, model: ExportedPolicy, control: ControlMap | None, order: JointOrder | None
) -> dict[str, Any]:
    """Return the card without files, parity and latencies; omit entries that the task does not declare."""
    env = player.env
    card: dict[str, Any] = {
        "format": FORMAT,
        "task": player.name,
        "algorithm": player.spec.config["algo"]["name"],
        "iteration": player.iteration,
        **_provenance(player),
        "observation": _observation(env, model.clip_observations),
        "action": _action(env, model.clip_actions),
        "recurrent_state": _states(model),
    }
    if not isinstance(env, VecEnv):
        return card
    compiled = env.sim.scene.model
    joints = joint_rows(compiled)
    actuators = actuator_rows(compiled)
    if order is not None:
        card["order"] = order.vendor
        joints, actuators = [joints[i] for i in order.joints], [actuators[i] for i in order.actuators]
    if control is not None:
        if names := control.names([actuator["name"] for actuator in actuators], env.num_actions):
            card["action"]["names"] = names
        card["control"] = {
            "is": "offset[i] + scale[i] * action[source[i]], for each actuator i of the scene",
            "offset": list(control.offset),
            "scale": list(control.scale),
            "source": list(control.source),
            "measured_on_control_steps": control.samples,
            "max_deviation": control.deviation,
        }
        zero = {row.get("joint"): control.offset[i] for i, row in reversed([*enumerate(actuators)]) if row.get("kp")}
        joints = [{**joint, "pose": zero.get(joint["name"], joint["default"])} for joint in joints]
    if bias := biases(player.spec.config["task"]):
        joints = [{**joint, "encoder_bias": bias.get(joint["name"], 0.0)} for joint in joints]
    return {
        **card,
        "commands": _commands(env),
        "control_hz": env.cfg.control_hz,
        "physics_hz": env.cfg.physics_hz,
        "episode_length": env.cfg.episode_length,
        "max_angular_velocity": env.sim.scene.max_angular_velocity,
        "joints": joints,
        "actuators": actuators,
        "settings": _finite(player.spec.config["task"]),
    }


def _finite(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _finite(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


def _provenance(player: Player) -> dict[str, Any]:
    assert player.run_dir is not None
    run: dict[str, Any] = {"run": player.run_dir.name}
    with suppress(OSError, ValueError, KeyError, TypeError):  # env.json may be missing or damaged
        git = load_json(player.run_dir / "env.json")["git"]
        run["commit"] = {"sha": str(git["sha"]), "dirty": bool(git["dirty"])}
    environment = describe_environment()
    versions = {package: metadata.version(package) for package in PACKAGES}
    return {**run, "versions": {**environment["versions"], **versions}, "cpu": environment["cpu"]["model"]}


def _observation(env: Environment, limit: float | None) -> dict[str, Any]:
    card: dict[str, Any] = {"group": "policy", "size": env.obs_sizes["policy"], "clip": limit}
    terms = env.obs_terms.get("policy", ()) if isinstance(env, VecEnv) else ()
    if terms:  # in order; `history` frames of `size` numbers, oldest first, all multiplied by `scale`
        keys = ("name", "size", "unit", "scale", "history")
        assert isinstance(env, VecEnv)
        sources, unmeasured = env.task.sources, simulator_only(env)
        card["terms"] = [{key: getattr(term, key) for key in keys} for term in terms]
        for term in card["terms"]:
            term["source"] = sources.get(term["name"], "task")
            term["measured"] = None if term["source"] == "task" else term["name"] not in unmeasured
    if env.images:  # uint8, channels last
        card["images"] = {group: list(shape) for group, shape in env.images.items()}
    return card


def _commands(env: VecEnv) -> dict[str, list[float] | None]:
    """Return the current range of each command that the policy observes; None if unknown."""
    sources = [env.task.sources.get(term.name, "") for term in env.obs_terms.get("policy", ())]
    names = [name for source in sources if source.startswith("command ") for name in source.split()[1:]]
    target = steerable(env.task)
    ranges = {} if target is None else {key.partition(" [")[0]: [*limits] for key, limits in target.controls().items()}
    return {name: ranges.get(name) for name in names}


def _action(env: Environment, limit: float | None) -> dict[str, Any]:
    if isinstance(env.action_space, MultiDiscrete):
        return {"size": env.num_actions, "dtype": "int64", "choices": list(env.action_space.counts)}
    card = {"size": env.num_actions, "dtype": "float32", "clip": limit}
    bounds = env.action_space.bounds
    if bounds is None:
        return card
    scaled = [math.isfinite(low) and math.isfinite(high) for low, high in bounds]
    pairs = list(zip(bounds, scaled, strict=True))
    mapping = {
        "is": "offset + scale * action, with action within +-1 where `scaled`, and then within low and high",
        "offset": [(low + high) / 2 if both else 0.0 for (low, high), both in pairs],
        "scale": [(high - low) / 2 if both else 1.0 for (low, high), both in pairs],
        "scaled": scaled,
        "low": [low for low, _ in bounds],
        "high": [high for _, high in bounds],
    }
    return {**card, "env_action": _finite(mapping)}


def _states(model: ExportedPolicy) -> list[dict[str, Any]]:
    rows = []
    for i, state in enumerate(model.initial_state(1)):
        row = {"input": f"state_{i}", "output": f"next_state_{i}", "shape": [len(state), "batch", state.shape[2]]}
        rows.append({**row, "dtype": str(state.dtype).removeprefix("torch."), "start": 0.0})
    return rows


def joint_rows(model: mujoco.MjModel) -> list[dict[str, Any]]:
    """Return a row per joint with one degree of freedom."""
    return [
        {
            "name": model.joint(j).name,
            "qpos": int(model.jnt_qposadr[j]),
            "qvel": int(model.jnt_dofadr[j]),
            "default": float(model.qpos0[model.jnt_qposadr[j]]),
            "range": _range(model.jnt_range[j], model.jnt_limited[j]),
        }
        for j in range(model.njnt)
        if model.jnt_type[j] in _SCALAR
    ]


def actuator_rows(model: mujoco.MjModel) -> list[dict[str, Any]]:
    """Return one row per control, in order.

    Without a torque-speed curve, the force is `gear * (gain * control - kp * position - kd * velocity)`: a position
    servo has gain = kp, a motor has kp = kd = 0. Rows of other actuators have no gains.
    """
    rows = []
    for control, (name, i) in enumerate(control_names(model)):
        row: dict[str, Any] = {"name": name}
        if model.actuator_ctrlnum[i] > 1:
            inputs = [kind for kind, bit in INPUT.items() if model.actuator_ctrlspec[i] & bit]
            row["input"] = inputs[control - int(model.actuator_ctrladr[i])]
        if model.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT:
            row["joint"] = model.joint(int(model.actuator_trnid[i, 0])).name
        fixed = model.actuator_gaintype[i] == mujoco.mjtGain.mjGAIN_FIXED
        if fixed and model.actuator_dyntype[i] == mujoco.mjtDyn.mjDYN_NONE:
            bias = model.actuator_biasprm[i]
            if model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_NONE:
                bias = np.zeros(3)
            if model.actuator_biastype[i] != mujoco.mjtBias.mjBIAS_MUSCLE and bias[0] == 0.0:
                row["gain"] = float(model.actuator_gainprm[i, 0])
                row |= {"kp": 0.0 - float(bias[1]), "kd": 0.0 - float(bias[2])}
        if is_dc_motor(model, i):  # a servo with a torque-speed curve
            gain = model.actuator_gainprm[i]
            row |= {"kp": float(gain[STIFFNESS]), "kd": float(gain[DAMPING]), "velocity_limit": 1.0 / float(gain[1])}
        if model.actuator_delay[i] > 0.0:
            row["delay_steps"] = math.ceil(model.actuator_delay[i] / model.opt.timestep - 1e-6)  # physics steps
        row["gear"] = float(model.actuator_gear[i, 0])
        row["control_range"] = _range(model.actuator_ctrlrange[control], model.actuator_ctrllimited[control])
        row["force_range"] = _range(model.actuator_forcerange[i], model.actuator_forcelimited[i])
        rows.append(row)
    return rows


def _range(values: np.ndarray, limited: int | np.generic) -> list[float] | None:
    return [float(value) for value in values] if limited else None
