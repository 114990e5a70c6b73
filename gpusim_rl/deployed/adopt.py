"""Adoption of a policy from another project: write an export folder from its network and contract."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import onnx
import yaml

from gpusim_rl.deployed.contract import SENSORS, Contract, Inputs
from gpusim_rl.deployed.network_file import load, sizes_of, wrap
from gpusim_rl.errors import ConfigError, available
from gpusim_rl.export import policy
from gpusim_rl.export.card import FORMAT, actuator_rows, joint_rows
from gpusim_rl.export.files import CARD, NUMPY, ONNX, RUNTIME
from gpusim_rl.export.joint_order import ORDERS
from gpusim_rl.export.model import write_numpy
from gpusim_rl.export.parity import TOLERANCE
from gpusim_rl.export.scene_file import SCENE, needs, write_scene
from gpusim_rl.files.safe_open import temporary_name
from gpusim_rl.sim import Scene

ROBOTS = ("g1", "t1", "go1", "go2")
PHYSICS_HZ = 200.0  # lowest physics rate
CLEARANCE = 0.005  # initial height of the feet above the ground [m]
GAINS = 40.0, 1.0  # kp, kd of a robot file's joints that the contract leaves out
OBSERVATIONS = 256  # on which policy.npz must equal policy.onnx


@dataclass(frozen=True)
class Body:
    """Robot for an adopted policy, with its own values by joint, in the scene's order."""

    robot: Any  # `gpusim_rl.tasks.robots.Robot`
    joints: tuple[str, ...]
    pose: tuple[float, ...]
    kp: tuple[float, ...]
    kd: tuple[float, ...]
    effort: tuple[float, ...]
    orders: dict[str, tuple[str, ...]]  # usual orders of joints

    @classmethod
    def open(cls, name: str) -> Body:
        """Open one of `ROBOTS`, an MJCF or URDF file, or `menagerie:<robot>`; ConfigError for other names."""
        own = name in ROBOTS
        if own:
            robot = getattr(
                importlib.import_module(f"gpusim_rl.tasks.{name}_velocity"), f"{name.title()}Velocity"
            ).robot
        elif name.endswith((".xml", ".urdf")) or name.startswith("menagerie:"):
            bare: dict[str, Any] = {
                **dict.fromkeys(("root", "torso", "imu"), ""),
                "feet": (),
                "soles": (),
                "widths": {},
            }
            robot_class = importlib.import_module("gpusim_rl.tasks.robots").Robot
            robot = robot_class(name=name, file=name, fixed_base=False, height=0.0, pose={}, motors={}, **bare)
        else:
            raise ConfigError(f"unknown robot {name!r}", key="--robot", hint=f"{available(name, ROBOTS)}; .xml, .urdf")
        scene = _scene(robot, PHYSICS_HZ)
        joints, n = scene.elements_of("robot", "joint"), len(scene.elements_of("robot", "joint"))
        if not joints:
            raise ConfigError("the robot has no joints", key=f"--robot {name}")
        values = [(GAINS[0],) * n, (GAINS[1],) * n, (math.inf,) * n]
        if own:
            motors = robot.by_joint([*joints], "motors")
            values = [tuple(getattr(m, key) for m in motors) for key in ("stiffness", "damping", "effort")]
        parents, bodies = scene.model.body_parentid, scene.model.jnt_bodyid

        def depth(body: int) -> int:
            return 0 if body == 0 else 1 + depth(parents[body])

        breadth = sorted(joints, key=lambda joint: depth(bodies[joints[joint]]))
        plain = {joint.removesuffix("_joint"): joint for joint in joints}
        orders = {"depth first": (*joints,), "breadth first": (*breadth,), "alphabetical": (*sorted(joints),)}
        for order in (order for order in ORDERS["unitree"] if {*order} == {*plain}):
            orders["in Unitree's order"] = tuple(plain[joint] for joint in order)
        kp, kd, effort = values
        return cls(robot, (*joints,), tuple(robot.by_joint([*joints], "pose", 0.0)), kp, kd, effort, orders)

    def scene(self, contract: Contract, sources: Sequence[str]) -> Scene:
        """Return a scene with the contract's servos, and the sensors of `sources`."""
        scene, robot = _scene(self.robot, physics_rate(contract.control_hz)), self.robot
        gains = dict(zip(self.joints, zip(self.kp, self.kd, strict=True), strict=True))
        gains |= zip(contract.joints, zip(contract.kp, contract.kd, strict=True), strict=True)
        motors = dict(zip(gains, robot.by_joint([*gains], "motors"), strict=True)) if robot.motors else {}
        values = {
            key: {joint: pair[i] for joint, pair in gains.items()} for i, key in enumerate(("stiffness", "damping"))
        }
        if motors:
            values["effort_limit"] = {joint: motor.effort for joint, motor in motors.items()}
            values["armature"] = {joint: motor.armature for joint, motor in motors.items()}
        scene.add_actuators("robot", [*gains], kind="position", **values)
        root = next(body.name for body in scene.spec.bodies if body.name.startswith("robot/")).removeprefix("robot/")
        for sensor, kind in SENSORS.items():
            if f"sensor robot/{sensor}" in sources:
                scene.add_sensor("robot", sensor, kind, body=root)
        return scene

    def start(self, model: mujoco.MjModel, contract: Contract) -> np.ndarray:
        """Return qpos of the robot in the contract's pose, its lowest part just above the ground."""
        data, pose = mujoco.MjData(model), dict(zip(self.joints, self.pose, strict=True))
        for joint, angle in {**pose, **dict(zip(contract.joints, contract.pose, strict=True))}.items():
            data.qpos[model.joint(f"robot/{joint}").qposadr[0]] = angle
        free = int(model.jnt_qposadr[np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)[0]])
        data.qpos[free : free + 3] = 0.0, 0.0, 2.0
        mujoco.mj_forward(model, data)
        solid = np.flatnonzero((model.geom_bodyid > 0) & ((model.geom_contype > 0) | (model.geom_conaffinity > 0)))
        ground = int(np.flatnonzero(model.geom_bodyid == 0)[0])
        gaps = [mujoco.mj_geomDistance(model, data, ground, geom, 10.0, None) for geom in solid.tolist()]
        data.qpos[free + 2] += CLEARANCE - min(gaps, default=0.0)
        return data.qpos.copy()

    def control(self, contract: Contract) -> dict[str, np.ndarray]:
        """Return offset, scale and action index of each servo."""
        rows = {joint: (angle, 0.0, 0) for joint, angle in zip(self.joints, self.pose, strict=True)}
        actions = zip(contract.joints, contract.action_offset, contract.action_scale, strict=True)
        rows |= {joint: (offset, scale, i) for i, (joint, offset, scale) in enumerate(actions)}
        return dict(zip(("offset", "scale", "source"), map(np.array, zip(*rows.values(), strict=True)), strict=True))


def _scene(robot: Any, physics_hz: float) -> Scene:
    scene = robot.empty_scene(physics_hz)
    scene.add_ground()
    robot.add_to(scene)
    return scene


def physics_rate(control_hz: float) -> float:
    """Return the lowest multiple of the control rate that reaches `PHYSICS_HZ` [Hz]."""
    return control_hz * math.ceil(PHYSICS_HZ / control_hz - 1e-9)


def write_folder(
    folder: Path, network: onnx.ModelProto, contract: Contract, body: Body, name: str, inputs: Inputs | None = None
) -> dict[str, Any]:
    """Write an export folder, replacing files of an earlier one; return its card.

    Args:
        folder: Output folder.
        network: Policy from `read_network`.
        contract: Contract of the policy.
        body: Robot.
        name: Name of the policy.
        inputs: Readings of the export; None: those that the contract needs.

    Raises:
        ConfigError: The contract's sizes differ from the network's, or the folder is not writable.
    """
    expected, got = sizes_of(network), (contract.size, len(contract.joints))
    if expected != got:
        raise ConfigError("contract and network differ in inputs and actions", expected=str(expected), got=got)
    inputs = inputs or Inputs([contract], body.joints)
    limits = dict(zip(contract.joints, contract.target_clip or (), strict=False))
    clip = np.array([limits.get(joint, (-math.inf, math.inf)) for joint in body.joints]).T if limits else None
    columns = inputs.place(contract.columns(body.joints))
    wrapped = wrap(network, inputs.size, columns, [*body.control(contract).values()], contract.action_clip, clip)
    temporary = temporary_name(folder)
    try:
        temporary.mkdir(parents=True)
        folder.mkdir(exist_ok=True)
        (temporary / ONNX).write_bytes(wrapped.SerializeToString())
        shutil.copy(Path(policy.__file__), temporary / RUNTIME)
        files = {"onnx": ONNX, **_numpy(wrapped, temporary, inputs.size), "runtime": RUNTIME, "scene": SCENE}
        model = write_scene(body.scene(contract, [*inputs.sources]).spec.copy(), temporary)
        card = {
            "task": name,
            **_card(contract, body, inputs, model),
            "files": files,
            "scene_needs_mujoco": needs(model),
        }
        (temporary / CARD).write_text(json.dumps(card, indent=2, allow_nan=False) + "\n")
        text = yaml.safe_dump(contract.to_mapping(), sort_keys=False, default_flow_style=None, width=120)
        (temporary / "contract.yaml").write_text(text)
        (folder / NUMPY).unlink(missing_ok=True)
        for file in temporary.iterdir():
            if file.is_dir():
                shutil.rmtree(folder / file.name, ignore_errors=True)
            file.replace(folder / file.name)
    except OSError as error:
        raise ConfigError(f"cannot write: {error.strerror or error}", key=f"--out {folder}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return card


def _card(contract: Contract, body: Body, inputs: Inputs, model: mujoco.MjModel) -> dict[str, Any]:
    control = {key: values.tolist() for key, values in body.control(contract).items()}
    poses = zip(joint_rows(model), control["offset"], strict=True)
    return {
        "format": FORMAT,
        "algorithm": "adopted",
        "observation": {"group": "policy", "size": inputs.size, "clip": None, "terms": inputs.terms()},
        "action": {"size": len(contract.joints), "dtype": "float32", "clip": contract.action_clip},
        "recurrent_state": [],
        "control": control,
        "commands": contract.commands,
        "control_hz": contract.control_hz,
        "physics_hz": physics_rate(contract.control_hz),
        "max_angular_velocity": None,
        "joints": [{**row, "pose": zero} for row, zero in poses],
        "actuators": actuator_rows(model),
        "start": {"qpos": body.start(model, contract).tolist(), "qvel": [0.0] * model.nv},
        "contract": contract.to_mapping(),
    }


def _numpy(model: onnx.ModelProto, folder: Path, size: int) -> dict[str, str]:
    """Write policy.npz if policy.py has the operators, and computes the same; return the card's entry."""
    if not write_numpy(folder / ONNX, folder / NUMPY):
        return {}
    obs = np.random.default_rng(0).standard_normal((OBSERVATIONS, size)).astype(np.float32)
    exact, got = load(model)(obs), policy.plain_function((folder / NUMPY).read_bytes())({"obs": obs})[0]
    if (np.abs(exact - got) <= 10.0 * TOLERANCE * np.maximum(1.0, np.abs(exact))).all():
        return {"numpy": NUMPY}
    (folder / NUMPY).unlink()
    return {}
