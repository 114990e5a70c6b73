"""Contracts of other projects, converted to the mapping that `Contract.read` reads."""

from __future__ import annotations

import ast
import json
import math
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpusim_rl.deployed.adopt import Body
from gpusim_rl.deployed.contract import Contract, match_joints
from gpusim_rl.errors import ConfigError, available, first_line
from gpusim_rl.files import budgets
from gpusim_rl.files.safe_open import load_yaml, open_archive, open_file, read_bytes

NAMES = {  # our terms by names of Isaac Lab, mjlab, Unitree, legged_gym and holosoma
    **dict.fromkeys(["base_lin_vel", "lin_vel"], "base_lin_vel"),
    **dict.fromkeys(["base_ang_vel", "ang_vel", "imu_ang_vel"], "base_ang_vel"),
    **dict.fromkeys(["projected_gravity", "gravity", "gravity_orientation"], "projected_gravity"),
    **dict.fromkeys(["velocity_commands", "keyboard_velocity_commands", "command", "commands"], "velocity_commands"),
    **dict.fromkeys(["generated_commands", "twist"], "velocity_commands"),
    **{name: name for name in ("command_lin_vel", "command_ang_vel", "sin_phase", "cos_phase")},
    **dict.fromkeys(["joint_pos", "joint_pos_rel", "dof_pos"], "joint_pos_rel"),
    **dict.fromkeys(["joint_vel", "joint_vel_rel", "dof_vel"], "joint_vel"),
    **dict.fromkeys(["actions", "action", "last_action", "last_actions", "prev_actions"], "last_action"),
    **dict.fromkeys(["gait_phase", "phase"], "gait_phase"),
}
_CONFIG = "holosoma_inference/config/config_values"
_RANGES = {"lin_vel_x": "x", "lin_vel_y": "y", "ang_vel_z": "yaw", "ang_vel_yaw": "yaw"}
_INCOMPLETE = KeyError, TypeError, AttributeError, IndexError, ValueError, ZeroDivisionError  # of incomplete files


def read_contract(path: Path | None, metadata: dict[str, str], inputs: int, body: Body) -> Contract | None:
    """Read a policy's contract; None if neither file nor metadata lists its observation.

    The file is a `deploy.yaml` of Unitree, a yaml in our format, or a wheel or unpacked folder of holosoma_inference;
    mjlab and holosoma write metadata.
    """
    where, given = "metadata" if path is None else str(path), None
    try:
        if path is None:
            given = _mjlab(metadata) if "observation_names" in metadata else None
        elif path.suffix == ".whl" or path.is_dir():
            given = _holosoma(path, metadata, inputs)
        else:
            given = load_yaml(path)
            given = _unitree(given, body) if isinstance(given, dict) and "joint_ids_map" in given else given
    except ConfigError as error:
        raise error if error.key.startswith(where) else error.within(where) from None
    except _INCOMPLETE as error:
        raise ConfigError(f"incomplete ({type(error).__name__}: {first_line(error)})", key=where) from None
    return None if given is None else Contract.read(given, where, body.joints)


def known_values(metadata: dict[str, str], body: Body, actions: int) -> dict[str, Any]:
    """Return joints, gains and command ranges of a model without a list of observations, from metadata or the robot."""
    names = _json(metadata, "dof_names") or [*body.joints]
    if len(names) != actions:
        hint = "Try --contract with a yaml that lists the policy's joints"
        raise ConfigError(key="joints", expected=f"{actions}, one for each action", got=len(names), hint=hint)
    order = [body.joints.index(name) for name in match_joints(names, body.joints)]
    own = {key: [getattr(body, key)[i] for i in order] for key in ("kp", "kd", "pose")}
    own |= {key: value for key in ("kp", "kd") if (value := _json(metadata, key)) is not None}
    return {"joints": names, **own, "commands": _ranges(_json(metadata, "command_ranges"))}


def _json(metadata: dict[str, str], key: str) -> Any:
    try:
        return json.loads(metadata[key][: budgets.SETTINGS_BYTES])
    except (KeyError, ValueError, RecursionError):
        return None


def _ranges(ranges: Any) -> dict[str, Any]:
    items = ranges.items() if isinstance(ranges, dict) else ()
    return {_RANGES[name]: limits for name, limits in items if name in _RANGES}


def _term(name: Any, scale: Any, clip: Any, history: Any) -> dict[str, Any]:
    """Return a term by our name."""
    if name not in NAMES:
        raise ConfigError(f"unknown observation term {name!r}", hint=available(str(name), sorted(NAMES)))
    return {"kind": NAMES[name], "scale": 1.0 if scale is None else scale, "clip": clip, "history": history or 1}


def _unitree(given: dict[str, Any], body: Body) -> dict[str, Any]:
    """Convert a deploy.yaml: gains are in the order of motors, everything else in the policy's."""
    motors, ids = body.orders.get("in Unitree's order", body.joints), given["joint_ids_map"]
    if not all(type(i) is int and 0 <= i < len(motors) for i in ids):
        raise ConfigError(key="joint_ids_map", expected=f"motors, 0 to {len(motors) - 1}", got=ids)
    action, listed = given["actions"]["JointPositionAction"], given["observations"]
    terms = {name: term for name, term in listed.items() if isinstance(term, dict)}
    rows = {name: _term(name, *map(term.get, ("scale", "clip", "history_length"))) for name, term in terms.items()}
    if "joint_pos" in rows:  # mjlab's is relative to the pose
        rows["joint_pos"]["kind"] = "joint_pos"
    periods = [term["params"]["period"] for term in terms.values() if "period" in (term.get("params") or {})]
    return {
        "control_hz": round(1.0 / given["step_dt"], 6),
        "joints": [motors[i] for i in ids],
        "pose": given["default_joint_pos"],
        "kp": [given["stiffness"][i] for i in ids],
        "kd": [given["damping"][i] for i in ids],
        "terms": [*rows.values()],
        "layout": "frames" if listed.get("use_gym_history") else "terms",
        "action_scale": 1.0 if action.get("scale") is None else action["scale"],
        "action_offset": 0.0 if action.get("offset") is None else action["offset"],
        "target_clip": action.get("clip"),
        "commands": _ranges(given["commands"]["base_velocity"]["ranges"]),
        "phase": {"period": periods[0] if periods else 1.0, "offsets": [0.0]},
    }


def _mjlab(metadata: dict[str, str]) -> dict[str, Any]:
    """Convert metadata of mjlab: lists with commas, lists inside them with semicolons."""
    names = metadata["observation_names"].split(",")

    def column(key: str, default: Any = None) -> list[Any]:
        rows = [[*map(float, entry.split(";"))] for entry in metadata[key].split(",")] if key in metadata else []
        return [row[0] if len(row) == 1 else row for row in rows] or [default] * len(names)

    clips = [None if limits is None or math.inf in limits else limits for limits in column("observation_terms_clip")]
    history = [int(frames) for frames in column("observation_terms_history_length", 0.0)]
    flat = column("observation_terms_flatten_history_dim", 1.0)
    if any(frames > 1 and not flattened for frames, flattened in zip(history, flat, strict=True)):
        raise ConfigError("observation_terms_flatten_history_dim=0 is not supported")
    action = column("action_scale")
    return {
        "joints": metadata["joint_names"].split(","),
        "kp": column("joint_stiffness"),
        "kd": column("joint_damping"),
        "pose": column("default_joint_pos"),
        "terms": [_term(*row) for row in zip(names, column("observation_terms_scale"), clips, history, strict=True)],
        "action_scale": action[0] if len(action) == 1 else action,
    }


def _holosoma(path: Path, metadata: dict[str, str], inputs: int) -> dict[str, Any]:
    """Convert holosoma_inference's settings: its Python files are parsed for literals, never imported."""
    robots, observations, tasks = (_calls(path, name) for name in ("robot", "observation", "task"))
    joints = _json(metadata, "dof_names")
    robot = next((name for name, value in robots.items() if [*value.get("dof_names", ())] == joints), None)
    if robot is None:
        raise ConfigError("no robot has the joints in the network's metadata", hint=f"It has {', '.join(robots)}")
    fits = {name: value for name, value in observations.items() if "loco" in name and _total(value) == inputs}
    name = max(fits, key=lambda name: name.endswith(robot), default=None)
    if name is None:
        raise ConfigError(f"no observation of {inputs} numbers", hint=f"It has {', '.join(observations)}")
    seen, task = fits[name], tasks["locomotion"]
    terms, history = sorted(seen["obs_dict"]["actor_obs"]), seen["history_length_dict"]["actor_obs"]
    return {
        "joints": joints,
        "control_hz": task["rl_rate"],
        "kp": _json(metadata, "kp"),
        "kd": _json(metadata, "kd"),
        "pose": robots[robot]["default_dof_angles"],
        "terms": [_term(term, seen["obs_scales"][term], None, history) for term in terms],
        "action_scale": task["policy_action_scale"],
        "action_clip": 100.0,
        "commands": _ranges(_json(metadata, "command_ranges")),
        "phase": {"period": task["gait_period"], "standing": math.pi},
    }


def _total(observation: dict[str, Any]) -> int:
    """Return the number of inputs of one of holosoma's observations."""
    dims, terms = observation["obs_dims"], observation["obs_dict"]["actor_obs"]
    return observation["history_length_dict"]["actor_obs"] * sum(dims[term] for term in terms)


def _calls(path: Path, name: str) -> dict[str, dict[str, Any]]:
    """Return the literal keyword arguments of each `x = Call(...)` of a settings file."""
    file = f"{_CONFIG}/{name}.py"
    try:
        if path.is_dir():
            text = read_bytes(path / (file if (path / file).is_file() else file.partition("/")[2]))
        else:
            with open_file(path) as opened, open_archive(opened) as archive, archive.open(file) as entry:
                text = entry.read(budgets.SETTINGS_BYTES)
        statements = ast.parse(text).body
    except (OSError, KeyError, zipfile.BadZipFile, SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ConfigError(f"no readable {file} of holosoma_inference: {first_line(error)}") from None
    calls = dict[str, dict[str, Any]]()
    for node in statements:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            values = calls[node.targets[0].id] = dict[str, Any]()
            for word in node.value.keywords:
                with suppress(ValueError, TypeError, RecursionError, MemoryError):
                    values[word.arg or ""] = ast.literal_eval(word.value)
    return calls
