"""Exported policy, run with numpy, or with onnxruntime if it is installed.

    policy = DeployedPolicy()
    policy.reset()  # at the start of each episode
    action, targets = policy.act({"joint_pos": [...], "command": [0.5, 0.0, 0.0], ...})

`policy.json` lists the terms of the observation with their units, and the joint order of all arrays.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

try:
    import onnxruntime  # pyright: ignore[reportMissingImports]
except ImportError:
    onnxruntime = None

MAX_BYTES = 1 << 30  # size limit of a file


def cut(x: np.ndarray, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> np.ndarray:
    """Return a slice of an array, as ONNX does."""
    index = [slice(None)] * x.ndim
    for i, axis in enumerate(range(len(starts)) if axes is None else axes):
        index[axis] = slice(starts[i], ends[i], None if steps is None else steps[i])
    return x[tuple(index)]


OPERATIONS: dict[str, Callable[..., Any]] = {  # ONNX operations
    "Add": lambda x, y: x + y,
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
    "Div": lambda x, y: x / y,
    "Clip": lambda x, low, high: np.clip(x, low, high),
    "Max": lambda x, y: np.maximum(x, y),
    "Min": lambda x, y: np.minimum(x, y),
    "Pow": lambda x, y: np.power(x, y).astype(x.dtype),
    "Sqrt": np.sqrt,
    "ReduceMean": lambda x, axes=(), keepdims=1: x.mean(tuple(axes) or None, keepdims=bool(keepdims)),
    "Slice": cut,
    "Tanh": np.tanh,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Elu": lambda x, alpha=1.0: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
    "MatMul": lambda x, y: x @ y,
    "Gemm": lambda x, y, z, transB=0, **_: x @ (y.T if transB else y) + z,
    "Gather": lambda x, index, axis=0: np.take(x, index, axis=axis),
    "Reshape": lambda x, shape, **_: x.reshape(shape),
    "Squeeze": lambda x, axes: np.squeeze(x, tuple(axes)),
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(axes)),
    "Concat": lambda *values, axis: np.concatenate(values, axis=axis),
    "ArgMax": lambda x, axis=0, keepdims=1, **_: np.argmax(x, axis=axis, keepdims=bool(keepdims)),
}


class DeployedPolicy:
    """Exported policy with recurrent state and history; `plain` uses numpy even if onnxruntime is installed."""

    def __init__(self, folder: str | Path = Path(__file__).parent, plain: bool = False) -> None:
        folder = Path(folder)
        self.card = json.loads(content(folder, "policy.json"))
        self.terms = self.card["observation"].get("terms", [])
        self._images = self.card["observation"].get("images", {})
        if sum(max(term["size"], 1) * term["history"] for term in self.terms) > MAX_BYTES >> 2:
            raise ValueError("policy.json: the observation is too large")
        try:
            self._run = load_network(folder, self.card["files"], plain)
        except ImportError as error:
            raise SystemExit(str(error)) from None
        actuators = self.card.get("actuators", [])
        joints = [actuator.get("joint") for actuator in actuators]
        self.targets = [
            joint if joint and joints.count(joint) == 1 else actuator["name"]
            for joint, actuator in zip(joints, actuators, strict=True)
        ]
        joints = self.card.get("joints", [])
        self.bias = {joint["name"]: joint.get("encoder_bias", 0.0) for joint in joints}  # reading - angle [rad]
        self.reset()

    def reset(self) -> None:
        """Clear the last action, history and recurrent state at the start of an episode."""
        self.action = np.zeros(self.card["action"]["size"], self.card["action"]["dtype"])
        self._frames: dict[str, list[np.ndarray]] = {}
        self._state = {
            state["input"]: np.zeros([1 if n == "batch" else n for n in state["shape"]], state["dtype"])
            for state in self.card["recurrent_state"]
        }

    def act(self, obs: Mapping[str, Any] | Any) -> tuple[np.ndarray, dict[str, float]]:
        """Return the action, and the control of each actuator (a servo's target [rad or m]), keyed by joint name.

        Args:
            obs: Raw values of each term in its unit, without scale and history, and images by group, uint8 [height,
                width, channels]. The last action is optional. A policy without named terms takes all numbers in order,
                under the key `policy` if there are also images.
        """
        images = {name: self.image(name, obs.get(name)) for name in self._images}
        numbers = obs.get("policy", ()) if images else obs
        numbers = self.observation(obs) if self.terms else np.asarray(numbers, np.float32)
        inputs = {"obs": numbers[None], **images, **self._state}
        action, *rest = self._run(inputs)
        self._state = dict(zip(self._state, rest[len(rest) - len(self._state) :], strict=True))
        self.action = action[0]
        if "control" not in self.card:
            return self.action, {}
        controls = zip(self.targets, rest[0][0].tolist(), strict=True)
        return self.action, {target: value + self.bias.get(target, 0.0) for target, value in controls}

    def image(self, name: str, value: Any) -> np.ndarray:
        """Return the newest frame of a group as a batch of one."""
        shape, array = self._images[name], np.asarray(value)
        if array.dtype != np.uint8 or list(array.shape) != shape:
            got = "nothing" if value is None else f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"image {name!r}: expected uint8 {shape} (height, width, channels), got {got}")
        return array[None]

    def observation(self, obs: Mapping[str, Any]) -> np.ndarray:
        """Return the network input: all terms in order, scaled, each with its history."""
        joined = []
        for term in self.terms:
            value = obs.get(term["name"], self.action if term["source"] == "last action" else None)
            if value is None or np.size(value) != term["size"]:
                got = "nothing" if value is None else f"{np.size(value)} numbers"
                raise ValueError(f"observation term {term['name']!r}: expected {term['size']} numbers, got {got}")
            frame = np.asarray(value, np.float32).ravel() - np.float32(self.offset(term["source"]))
            frame *= np.float32(term["scale"])
            if not np.isfinite(frame).all():  # would persist in the last action, history and recurrent state
                raise ValueError(f"observation term {term['name']!r}: expected finite numbers, got {frame.tolist()}")
            frames = self._frames.setdefault(term["name"], [frame] * term["history"])
            frames[:] = [*frames[1:], frame]  # the first frame of an episode fills the history
            joined += frames
        return np.concatenate(joined)

    def offset(self, source: str) -> Any:
        """Return the encoder biases in the readings of an observation source, or 0."""
        if source.startswith("joint positions"):
            return [*self.bias.values()]
        return self.bias.get(source.removeprefix("position of "), 0.0)


def content(folder: Path, name: str) -> bytes:
    """Read a file of the export; raise ValueError if it is outside the folder or too large.

    onnxruntime gets bytes, not a path, so that an ONNX file cannot reference external weights.
    """
    path = folder / name
    inside = Path(name).name == name and path.is_file()
    if not inside or path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: {f'larger than {MAX_BYTES} bytes' if inside else 'not a file in the export folder'}")
    return path.read_bytes()


def load_network(
    folder: Path, files: Mapping[str, str], plain: bool = False, providers: Sequence[str] | None = None
) -> Callable[[dict[str, Any]], Any]:
    """Build a function from the network's file: with onnxruntime if it is installed, and not `plain`.

    Raises:
        ImportError: The network needs onnxruntime, which is not installed.
    """
    if onnxruntime is not None and not plain:
        session = onnx_session(content(folder, files["onnx"]), providers)
        return lambda inputs: session.run(None, inputs)
    if "numpy" in files:
        return plain_function(content(folder, files["numpy"]))
    raise ImportError("this network needs onnxruntime: pip install onnxruntime")


def onnx_session(onnx: bytes, providers: Sequence[str] | None = None) -> Any:
    """Return onnxruntime's session of an ONNX file's content, on one thread; errors are raised, not logged."""
    assert onnxruntime is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # faster for small networks
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(onnx, options, providers=providers)


def plain_function(npz: bytes) -> Callable[[dict[str, Any]], list[Any]]:
    """Build a function from an npz file with an ONNX graph's arrays and operations."""
    with zipfile.ZipFile(io.BytesIO(npz)) as archive:
        if any(entry.compress_type for entry in archive.infolist()):
            raise ValueError("compressed arrays are not supported: a few bytes could expand to gigabytes")
    arrays = dict(np.load(io.BytesIO(npz)))
    graph = json.loads(str(arrays.pop("graph")))

    def run(inputs: dict[str, Any]) -> list[Any]:
        values = {**arrays, **inputs}
        for name, sources, result, attributes in graph["nodes"]:
            values[result] = OPERATIONS[name](*(values[source] for source in sources), **attributes)
        return [values[name] for name in graph["outputs"]]

    return run
