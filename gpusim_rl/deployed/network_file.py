"""ONNX file of unknown origin: read as data, checked against an allowlist, and wrapped for an export."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gpusim_rl.errors import ConfigError, first_line
from gpusim_rl.export.policy import onnx_session
from gpusim_rl.files.safe_open import read_bytes

BYTES = 64 << 20  # size of the file, and of its `.data`
NODES, NUMBERS = 2_000, 1 << 22  # operators, and numbers in a result of one of them
OPSETS = range(11, 30)
OPERATORS = {  # standard operators without subgraphs; `NUMBERS` limits their results
    *("Abs", "Add", "BatchNormalization", "Cast", "Celu", "Clip", "Concat", "Constant", "Conv", "Cos", "Div"),
    *("Dropout", "Elu", "Erf", "Exp", "Flatten", "Gather", "Gelu", "Gemm", "HardSigmoid", "HardSwish", "Identity"),
    *("LeakyRelu", "LayerNormalization", "Log", "MatMul", "Max", "Mean", "Min", "Mish", "Mul", "Neg", "PRelu"),
    *("Pow", "Reciprocal", "ReduceMean", "ReduceSum", "Relu", "Reshape", "Selu", "Sigmoid", "Sign", "Sin", "Slice"),
    *("Softmax", "Softplus", "Softsign", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Swish", "Tanh", "Transpose"),
    *("Unsqueeze", "Where"),
}
LARGEST = float(np.finfo(np.float32).max)


def read_network(path: Path) -> ModelProto:
    """Read a policy with one input [1 or batch, inputs] and one output [1 or batch, actions].

    Weights may be in a file `<name>.data` next to it. The returned model takes any batch size; its names begin with
    `policy/`.

    Raises:
        ConfigError: The file is too large, damaged, or has anything but the above.
    """
    try:
        model = onnx.load_model_from_string(read_bytes(path, BYTES))
        _check_operators(model, path)
        _load_weights(model, path)
        _choose_ends(model)
        model = onnx.compose.add_prefix(model, "policy/")
        del model.graph.value_info[:]
        onnx.checker.check_model(model)
        _check_sizes(model)
        _check_batch(model)
    except OSError as error:
        raise ConfigError(f"cannot read: {error.strerror}", key=str(path)) from None
    except ConfigError as error:
        raise error.within(str(path)) from None
    except Exception as error:  # classes of protobuf, onnx and onnxruntime, without a common base
        raise ConfigError(f"not a valid ONNX file: {first_line(error)}", key=str(path)) from None
    return model


def sizes_of(model: ModelProto) -> tuple[int, int]:
    """Return the number of inputs and of actions."""
    [inputs], [actions] = model.graph.input, model.graph.output
    return inputs.type.tensor_type.shape.dim[1].dim_value, actions.type.tensor_type.shape.dim[1].dim_value


def load(model: ModelProto) -> Callable[[np.ndarray], np.ndarray]:
    """Return the model's first output as a function of its input, [batch, inputs], run on one thread."""
    session = onnx_session(model.SerializeToString(), ["CPUExecutionProvider"])
    return lambda obs: np.asarray(session.run(None, {model.graph.input[0].name: obs})[0])


def _check_operators(model: ModelProto, path: Path) -> None:
    """Raise ConfigError unless the model has operators of the allowlist, and weights in `<name>.data` at most."""
    graph, opsets = model.graph, {item.domain: item.version for item in model.opset_import}
    if custom := {*opsets, *(node.domain for node in graph.node), *(f.name for f in model.functions)} - {"", "ai.onnx"}:
        raise ConfigError(f"custom operators are not supported: {', '.join(sorted(custom))}")
    if unknown := {node.op_type for node in graph.node} - OPERATORS:
        raise ConfigError(f"operators are not supported: {', '.join(sorted(unknown))}")
    if (version := opsets.get("", opsets.get("ai.onnx"))) not in OPSETS:
        raise ConfigError(key="opset", expected=f"{OPSETS[0]} to {OPSETS[-1]}", got=version)
    if len(graph.node) > NODES or graph.sparse_initializer:
        raise ConfigError(f"expected dense weights and at most {NODES} operators")
    places = {entry.value for tensor in graph.initializer for entry in tensor.external_data if entry.key == "location"}
    hidden = any(a.t.data_location == TensorProto.EXTERNAL for node in graph.node for a in node.attribute)
    if hidden or places - {f"{path.name}.data"}:
        raise ConfigError(key="weights", expected=f"in the file or in {path.name}.data", got=sorted(places))


def _load_weights(model: ModelProto, path: Path) -> None:
    """Move weights from `<name>.data` into the model."""
    tensors = [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    content = read_bytes(path.with_name(f"{path.name}.data"), BYTES) if tensors else b""
    for tensor in tensors:
        entry = {entry.key: entry.value for entry in tensor.external_data}
        start = int(entry.get("offset", 0))
        length = int(entry.get("length", len(content) - start))
        if not 0 <= start <= start + length <= len(content):
            raise ConfigError(f"{path.name}.data ends before the weights {tensor.name!r}")
        tensor.raw_data, tensor.data_location = content[start : start + length], TensorProto.DEFAULT
        del tensor.external_data[:]


def _choose_ends(model: ModelProto) -> None:
    """Keep one input and one output, for batches of any size; ConfigError unless there is one of each, in float32."""
    graph, weights = model.graph, {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    actions = [value for value in graph.output if value.name in ("action", "actions")] or [*graph.output]
    for what, ends, values in (("inputs", graph.input, inputs), ("outputs", graph.output, actions)):
        if len(values) != 1:
            raise ConfigError(key=what, expected="one", got=[value.name for value in values])
        kind, dims = values[0].type.tensor_type.elem_type, values[0].type.tensor_type.shape.dim
        if kind != TensorProto.FLOAT:
            got = TensorProto.DataType.Name(kind).lower()
            raise ConfigError(key=values[0].name, expected="float32", got=got, hint="Try exporting it in float32")
        if len(dims) != 2 or dims[1].dim_value < 1 or dims[0].dim_value > 1:
            got = [dim.dim_param or dim.dim_value for dim in dims]
            raise ConfigError(key=values[0].name, expected="shape [1 or batch, a fixed number]", got=got)
        end = helper.make_tensor_value_info(values[0].name, kind, ["batch", dims[1].dim_value])
        del ends[:]
        ends.append(end)


def _check_sizes(model: ModelProto) -> None:
    """Raise ConfigError if sizes depend on data, or are larger than `NUMBERS`."""
    single = ModelProto()
    single.CopyFrom(model)
    for value in (*single.graph.input, *single.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    graph = onnx.shape_inference.infer_shapes(single, strict_mode=True, data_prop=True).graph
    known = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.output)}
    for name in (name for node in graph.node for name in node.output if name):
        dims = known.get(name)
        if dims is None or not np.prod([d.dim_value if d.HasField("dim_value") else np.inf for d in dims]) <= NUMBERS:
            raise ConfigError("dynamic shapes, or too large ones", hint="Try exporting it with fixed shapes")


def _check_batch(model: ModelProto) -> None:
    """Raise ConfigError unless three observations at once give the actions of each alone, and finite ones."""
    run, obs = load(model), np.random.default_rng(0).standard_normal((3, sizes_of(model)[0])).astype(np.float32)
    alone = np.concatenate([run(row[None]) for row in obs])
    with suppress(Exception):  # onnxruntime's, for shapes that contain the batch size
        if np.allclose(run(obs), alone, rtol=1e-3, atol=1e-4) and np.isfinite(alone).all():
            return
    raise ConfigError("the network must work for a batch of observations", hint="Try exporting a dynamic batch")


def wrap(
    model: ModelProto,
    readings: int,
    columns: np.ndarray,
    servos: np.ndarray,
    action_clip: float | None,
) -> ModelProto:
    """Return a model from readings `obs` to `action` and `control`, as `gpusim-rl export` writes it.

    `columns` has a `COLUMN` of each input of the policy, `servos` a `SERVO` of each actuator.
    """
    weights, limit = [*model.graph.initializer], np.float32(action_clip or LARGEST)

    def chain(first: str, last: str, *steps: tuple[Any, ...]) -> list[NodeProto]:
        """Return operators from tensor `first` to `last`, each with constant further inputs."""
        nodes = []
        for i, (operator, *values) in enumerate(steps):
            names = [f"contract/{len(weights) + k}" for k in range(len(values))]
            weights.extend(map(numpy_helper.from_array, map(np.asarray, values), names))
            output = last if i == len(steps) - 1 else f"{last}/{i}"
            attributes: Any = {"axis": 1} if operator == "Gather" else {}
            nodes.append(helper.make_node(operator, [first, *names], [output], **attributes))
            first = output
        return nodes

    def step(operator: str, values: np.ndarray) -> tuple[str, np.ndarray]:
        return operator, np.clip(values, -LARGEST, LARGEST).astype(np.float32)[None]

    def clip(rows: np.ndarray) -> list[tuple[str, np.ndarray]]:
        bounded = np.isfinite([rows["low"], rows["high"]]).any()
        return [step("Max", rows["low"]), step("Min", rows["high"])] if bounded else []

    steps = [("Gather", columns["index"]), step("Sub", columns["bias"]), *clip(columns), step("Mul", columns["scale"])]
    moves = [("Gather", servos["source"]), step("Mul", servos["scale"]), step("Add", servos["offset"]), *clip(servos)]
    nodes = [*chain("obs", model.graph.input[0].name, *steps), *model.graph.node]
    nodes += chain(model.graph.output[0].name, "action", ("Clip", -limit, limit))
    nodes += chain("action", "control", *moves)
    ends = (("obs", readings), ("action", sizes_of(model)[1]), ("control", len(servos)))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name, size in ends]
    graph = helper.make_graph(nodes, "adopted", values[:1], values[1:], weights)
    wrapped = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    onnx.checker.check_model(wrapped)
    return wrapped
