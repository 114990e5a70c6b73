"""Export folders of small robots for tests, made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HOPPER = """
<mujoco>
  <worldbody>
    <geom type="plane" size="5 5 1"/>
    <body name="base" pos="0 0 0.3">
      <freejoint/>
      <geom type="box" size="0.2 0.1 0.05"/>
      <site name="imu"/>
      <body name="leg" pos="0 0 -0.05">
        <joint name="knee" axis="0 1 0" range="-1 1"/>
        <geom type="capsule" fromto="0 0 0 0 0 -0.2" size="0.02"/>
      </body>
    </body>
  </worldbody>
  <actuator><position name="servo" joint="knee" kp="20" kv="1"/></actuator>
  <sensor><gyro name="gyro" site="imu"/></sensor>
</mujoco>
"""

BALL = '<worldbody><body name="ball" pos="3 0 0.1"><freejoint/><geom size="0.1"/></body>'
AFTER_BALL = {  # an object comes before the robot
    "scene": HOPPER.replace("<worldbody>", BALL),
    "joints": [{"name": "knee", "qpos": 14, "qvel": 12, "default": 0.0, "pose": 0.1}],
    "start": {"qpos": [3, 0, 0.1, 1, 0, 0, 0, 0, 0, 0.3, 1, 0, 0, 0, 0.1], "qvel": [0.0] * 13},
}

STATUE = HOPPER  # twice as wide as long: falls forward and backward before it falls to a side
for old, new in {
    "<mujoco>": '<mujoco>\n  <option iterations="10"/>',
    'size="0.2 0.1 0.05"': 'size="0.1 0.2 0.3"',
    'name="leg" pos="0 0 -0.05"': 'name="torso" pos="0 0 0.3"',
    'axis="0 1 0"': 'axis="0 0 1"',
    'fromto="0 0 0 0 0 -0.2"': 'fromto="0 0 0 0 0.1 0"',
    'kv="1"': 'kv="1" forcerange="-5 5"',
}.items():
    STATUE = STATUE.replace(old, new)


def term(name: str, size: int, source: str, scale: float = 1.0, history: int = 1) -> dict:
    return {"name": name, "size": size, "unit": "-", "scale": scale, "history": history, "source": source}


TERMS = [
    term("gyro", 3, "sensor gyro", 0.25),
    term("gravity", 3, "gravity", history=3),
    term("knee", 1, "sine of knee", 2.0, history=2),
    term("actions", 1, "last action"),
    term("command", 2, "command x yaw"),
]


def write_hopper(folder: Path, terms: list[dict] | None = None, scene: str = HOPPER, **changes: object) -> Path:
    """Write an export folder whose network has recurrent state; `changes` replace entries of the card."""
    terms = TERMS if terms is None else terms
    size, rng = sum(row["size"] * row["history"] for row in terms), np.random.default_rng(0)
    weight, offset = rng.normal(size=(size, 1)).astype(np.float32) * 0.2, np.array([[0.1]], np.float32)
    nodes = [
        helper.make_node("MatMul", ["obs", "weight"], ["layer"]),
        helper.make_node("Squeeze", ["state_0", "zero"], ["state"]),
        helper.make_node("Add", ["layer", "state"], ["summed"]),
        helper.make_node("Tanh", ["summed"], ["action"]),
        helper.make_node("Add", ["action", "offset"], ["control"]),
        helper.make_node("Unsqueeze", ["action", "zero"], ["next_state_0"]),
    ]
    arrays = {"weight": weight, "offset": offset, "zero": np.array([0])}
    state: dict = {"input": "state_0", "output": "next_state_0", "shape": [1, "batch", 1], "dtype": "float32"}
    return write_robot(folder, terms, nodes, arrays, scene, [state], **changes)


def write_robot(
    folder: Path, terms: list, nodes: list, arrays: dict, scene: str, states: Sequence[dict] = (), **changes: object
) -> Path:
    """Write card, scene and policy.onnx of a robot with one joint; `changes` replace entries of the card."""
    size = sum(row["size"] * row["history"] for row in terms)
    card = {
        "format": 2,
        "task": "Hopper",
        "algorithm": "ppo",
        "observation": {"size": size, "terms": terms},
        "action": {"size": 1, "dtype": "float32"},
        "recurrent_state": [*states],
        "control": {"offset": [0.1], "scale": [1.0], "source": [0]},
        "commands": {"x": [0.2, 1.0], "yaw": [-1.0, 1.0]},
        "control_hz": 50.0,
        "physics_hz": 200.0,
        "max_angular_velocity": 40.0,
        "joints": [{"name": "knee", "qpos": 7, "qvel": 6, "default": 0.0, "range": [-1.0, 1.0], "pose": 0.1}],
        "actuators": [{"name": "servo", "joint": "knee", "kp": 20.0, "kd": 1.0}],
        "start": {"qpos": [0, 0, 0.3, 1, 0, 0, 0, 0.1], "qvel": [0.0] * 7},
        "files": {"onnx": "policy.onnx", "scene": "scene.xml"},
        **changes,
    }
    inputs = {"obs": ["batch", size], **{state["input"]: state["shape"] for state in states}}
    outputs = {"action": ["batch", 1], "control": ["batch", 1], **{state["output"]: state["shape"] for state in states}}
    values = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in each.items()]
        for each in (inputs, outputs)
    ]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "hopper", *values, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(folder / "policy.onnx"))
    (folder / "scene.xml").write_text(scene)
    (folder / "policy.json").write_text(json.dumps(card))
    return folder
