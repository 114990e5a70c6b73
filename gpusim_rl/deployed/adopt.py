"""Adoption of a policy from another project: write an export folder from its network and contract."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import onnx
import yaml

from gpusim_rl.deployed.contract import SENSORS, Contract, Inputs
from gpusim_rl.deployed.network_file import sizes_of, wrap
from gpusim_rl.errors import ConfigError, available
from gpusim_rl.export import CARD, parity, policy
from gpusim_rl.export.card import FORMAT, actuator_rows, joint_rows
from gpusim_rl.export.files import NUMPY, ONNX, RUNTIME, replacing_files
from gpusim_rl.export.joint_order import ORDERS
from gpusim_rl.export.model import write_numpy
from gpusim_rl.export.scene_file import SCENE, needs, write_licence, write_scene
from gpusim_rl.sim import Scene

ROBOTS = ("g1", "t1", "go1", "go2")
PHYSICS_HZ = 200.0  # lowest physics rate
CLEARANCE = 0.005  # initial height of the feet above the ground [m]
UNKNOWN_MOTOR = {"armature": 0.0, "effort": math.inf, "stiffness": 40.0, "damping": 1.0, "scale": 1.0}  # of robot files
OBSERVATIONS = 250  # on which policy.npz must equal policy.onnx
FREE = -math.inf, math.inf
SERVO = np.dtype([(name, float) for name in ("pose", "kp", "kd", "offset", "scale", "low", "high")] + [("source", int)])


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
        robots = importlib.import_module("gpusim_rl.tasks.robots")
        if name in ROBOTS:
            task = importlib.import_module(f"gpusim_rl.tasks.{name}_velocity")
            robot = getattr(task, f"{name.title()}Velocity").robot
        elif name.endswith((".xml", ".urdf")) or name.startswith("menagerie:"):
            parts = {"root": "", "torso": "", "imu": "", "feet": (), "soles": ()}
            values = {"pose": {}, "motors": {}, "widths": {}}
            robot = robots.Robot(name=name, file=name, fixed_base=False, height=0.0, **parts, **values)
        else:
            raise ConfigError(f"unknown robot {name!r}", key="--robot", hint=f"{available(name, ROBOTS)}; .xml, .urdf")
        scene = _scene(robot, PHYSICS_HZ)
        if not (joints := scene.elements_of("robot", "joint")):
            raise ConfigError("the robot has no joints", key=f"--robot {name}")
        motors = robot.by_joint([*joints], "motors", robots.Motor(**UNKNOWN_MOTOR))
        kp, kd, effort = (tuple(getattr(motor, key) for motor in motors) for key in ("stiffness", "damping", "effort"))
        depth = [0]
        for parent in scene.model.body_parentid[1:]:
            depth.append(1 + depth[parent])
        breadth = sorted(joints, key=lambda joint: depth[scene.model.jnt_bodyid[joints[joint]]])
        plain = {joint.removesuffix("_joint"): joint for joint in joints}
        orders = {"depth first": (*joints,), "breadth first": (*breadth,), "alphabetical": (*sorted(joints),)}
        for order in (order for order in ORDERS["unitree"] if {*order} == {*plain}):
            orders["in Unitree's order"] = tuple(plain[joint] for joint in order)
        return cls(robot, (*joints,), tuple(robot.by_joint([*joints], "pose", 0.0)), kp, kd, effort, orders)

    def servos(self, contract: Contract) -> np.ndarray:
        """Return a `SERVO` of each joint: the contract's values, or the robot's own, whose target is the pose."""
        own = [(pose, kp, kd, pose, 0.0, *FREE, 0) for pose, kp, kd in zip(self.pose, self.kp, self.kd, strict=True)]
        values = [getattr(contract, name) for name in ("pose", "kp", "kd", "action_offset", "action_scale")]
        limits = zip(*(contract.target_clip or [FREE] * len(contract.joints)), strict=True)
        given = zip(*values, *limits, range(len(contract.joints)), strict=True)
        rows = dict(zip((*self.joints, *contract.joints), (*own, *given), strict=True))
        return np.array([*rows.values()], SERVO)

    def scene(self, contract: Contract, sources: Sequence[str]) -> Scene:
        """Return a scene with the contract's servos, and the sensors of `sources`."""
        scene, servos = _scene(self.robot, physics_rate(contract.control_hz)), self.servos(contract)
        values = {
            "stiffness": dict(zip(self.joints, servos["kp"].tolist(), strict=True)),
            "damping": dict(zip(self.joints, servos["kd"].tolist(), strict=True)),
            "effort_limit": {pattern: motor.effort for pattern, motor in self.robot.motors.items()} or None,
            "armature": {pattern: motor.armature for pattern, motor in self.robot.motors.items()} or None,
        }
        scene.add_actuators("robot", [*self.joints], kind="position", **values)
        root = next(body.name for body in scene.spec.bodies if body.name.startswith("robot/")).removeprefix("robot/")
        for sensor, kind in SENSORS.items():
            if f"sensor robot/{sensor}" in sources:
                scene.add_sensor("robot", sensor, kind, body=root)
        return scene

    def start(self, model: mujoco.MjModel, contract: Contract) -> np.ndarray:
        """Return qpos of the robot in the contract's pose, its lowest part just above the ground."""
        data = mujoco.MjData(model)
        for joint, angle in zip(self.joints, self.servos(contract)["pose"], strict=True):
            data.qpos[model.joint(f"robot/{joint}").qposadr[0]] = angle
        free = int(model.jnt_qposadr[np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)[0]])
        data.qpos[free : free + 3] = 0.0, 0.0, 2.0
        mujoco.mj_forward(model, data)
        solid = np.flatnonzero((model.geom_bodyid > 0) & ((model.geom_contype > 0) | (model.geom_conaffinity > 0)))
        ground = int(np.flatnonzero(model.geom_bodyid == 0)[0])
        gaps = [mujoco.mj_geomDistance(model, data, ground, geom, 10.0, None) for geom in solid.tolist()]
        data.qpos[free + 2] += CLEARANCE - min(gaps, default=0.0)
        return data.qpos.copy()


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

    The export has the readings that the contract needs, or more in `inputs`. Raises ConfigError if the contract's sizes
    differ from the network's, or if the folder is not writable.
    """
    expected, got = sizes_of(network), (contract.size, len(contract.joints))
    if expected != got:
        raise ConfigError("contract and network differ in inputs and actions", expected=str(expected), got=got)
    inputs = inputs or Inputs([contract], body.joints)
    servos = body.servos(contract)
    control = {key: servos[key].tolist() for key in ("offset", "scale", "source")}
    wrapped = wrap(network, inputs.size, inputs.place(contract), servos, contract.action_clip)
    with replacing_files(folder) as temporary:
        (temporary / ONNX).write_bytes(wrapped.SerializeToString())
        shutil.copy(Path(policy.__file__), temporary / RUNTIME)
        numpy = {"numpy": NUMPY} if _writes_numpy(temporary, inputs.size) else {}
        scene, given = body.scene(contract, [*inputs.sources]), contract.to_mapping()
        model = write_scene(scene.spec.copy(), temporary)
        write_licence(scene, temporary)
        card = {
            "task": name,
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
            "joints": [{**row, "pose": zero} for row, zero in zip(joint_rows(model), control["offset"], strict=True)],
            "actuators": actuator_rows(model),
            "start": {"qpos": body.start(model, contract).tolist(), "qvel": [0.0] * model.nv},
            "contract": given,
            "files": {"onnx": ONNX, **numpy, "runtime": RUNTIME, "scene": SCENE},
            "scene_needs_mujoco": needs(model),
        }
        (temporary / CARD).write_text(json.dumps(card, indent=2, allow_nan=False) + "\n")
        text = yaml.safe_dump(given, sort_keys=False, default_flow_style=None, width=120)
        (temporary / "contract.yaml").write_text(text)
    return card


def _writes_numpy(folder: Path, size: int) -> bool:
    """Write policy.npz; return False, without the file, unless policy.py computes the same with it."""
    obs = np.random.default_rng(0).standard_normal((OBSERVATIONS, size)).astype(np.float32)
    if not write_numpy(folder / ONNX, folder / NUMPY):
        return False
    exact, other = parity.onnx_function(folder / ONNX), parity.numpy_function(folder / NUMPY)
    with suppress(Exception):  # an operator without inputs that policy.py expects
        if parity.compare(exact, other, (obs,), (), (1.0, 1.0)).max_error <= 10.0 * parity.TOLERANCE:
            return True
    (folder / NUMPY).unlink()
    return False
