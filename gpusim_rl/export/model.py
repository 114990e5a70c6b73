"""Policy as a function from observation to action, and writers for its file formats."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import torch
from jaxtyping import Float
from torch import Tensor, nn

from gpusim_rl.errors import ConfigError
from gpusim_rl.export.controls import ControlMap
from gpusim_rl.export.joint_order import JointOrder
from gpusim_rl.export.policy import OPERATIONS
from gpusim_rl.learn.algorithm import Hidden, Policy
from gpusim_rl.machine.source_location import describe
from gpusim_rl.spaces import ImageShape


class ExportedPolicy(nn.Module):
    """Policy with observation clipping, normaliser, most likely action, action clipping, joint order and controls."""

    offset: Tensor
    scale: Tensor
    source: Tensor
    obs_order: Tensor
    obs_place: Tensor
    action_order: Tensor

    def __init__(
        self,
        policy: Policy,
        clip_observations: float | None,
        clip_actions: float | None,
        control: ControlMap | None,
        order: JointOrder | None = None,
        images: Mapping[str, ImageShape] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.policy, self.images = policy, dict(images)
        self.clip_observations, self.clip_actions = clip_observations, clip_actions
        self.has_control, self.has_order = control is not None, order is not None
        if order is not None:
            self.register_buffer("obs_order", torch.tensor(order.obs))
            self.register_buffer("obs_place", torch.tensor(order.obs).argsort())
            self.register_buffer("action_order", torch.tensor(order.actions))
        if control is not None:
            for name in ("offset", "scale", "source"):
                self.register_buffer(name, torch.tensor(getattr(control, name)))

    def forward(self, obs: Float[Tensor, "batch size"], *others: Tensor) -> tuple[Tensor, ...]:
        """Return action [batch, actions], control [batch, controls] if known, and next states [layers, batch, units].

        `obs` is the raw observation. `others` are the images, uint8 [batch, height, width, channels], then the
        recurrent state, which is zero at the start of an episode.
        """
        images, state = dict(zip(self.images, others, strict=False)), others[len(self.images) :]
        if self.clip_observations is not None:
            obs = obs.clamp(-self.clip_observations, self.clip_observations)
        if self.has_order:
            obs = obs.index_select(1, self.obs_place)
        action, state = self.policy.act_without_critic({"policy": obs, **images}, state)
        if self.has_order:
            action = action.index_select(1, self.action_order)
        if self.clip_actions is not None:
            action = action.clamp(-self.clip_actions, self.clip_actions)
        if not self.has_control:
            return (action, *state)
        return (action, self.offset + self.scale * action.index_select(1, self.source), *state)

    def initial_state(self, batch: int) -> Hidden:
        """Return the recurrent state at the start of an episode, zeros."""
        return self.policy.actor_state(batch)

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        return ["obs", *self.images, *self._states]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        states = [f"next_{name}" for name in self._states]
        return ["action", *(["control"] if self.has_control else []), *states]

    @property
    def _states(self) -> list[str]:
        return [f"state_{i}" for i in range(len(self.initial_state(1)))]

    def example(self, size: int) -> tuple[Tensor, ...]:
        """Return zero inputs in a batch of 2, with observations of `size` columns."""
        images = (torch.zeros(2, *shape, dtype=torch.uint8) for shape in self.images.values())
        return torch.zeros(2, size), *images, *self.initial_state(2)


def write_onnx(model: ExportedPolicy, size: int, file: Path) -> None:
    """Write a CPU policy as ONNX with a dynamic batch size; raise ConfigError if ONNX does not support an operation."""
    inputs, batch = model.example(size), torch.export.Dim("batch")
    others = tuple({1 if name.startswith("state_") else 0: batch} for name in model.inputs[1:])
    shapes = ({0: batch}, others) if others else ({0: batch},)
    with _quiet(), _one_line("ONNX"):
        names: dict[str, Any] = {"input_names": model.inputs, "output_names": model.outputs}
        program = torch.onnx.export(model, inputs, dynamo=True, verbose=False, dynamic_shapes=shapes, **names)
        assert program is not None
        program.save(str(file), external_data=False)


def write_torchscript(model: ExportedPolicy, size: int, file: Path) -> None:
    """Write a CPU policy as TorchScript; raise ConfigError as for `write_onnx`."""
    content = io.BytesIO()
    with _quiet(), _one_line("TorchScript"):
        torch.jit.save(torch.jit.freeze(torch.jit.trace(model, model.example(size), check_trace=False)), content)
    file.write_bytes(content.getvalue())


def write_int8(file: Path, quantized: Path) -> None:
    """Convert an ONNX file to 8-bit weights and dynamically quantised activations."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(file, quantized, weight_type=QuantType.QInt8)


def write_numpy(file: Path, arrays: Path) -> bool:
    """Convert an ONNX file to an npz of arrays and operations; return False if `policy.py` lacks one of these."""
    graph = onnx.load(file).graph
    nodes: list[list[Any]] = []
    values: dict[str, Any] = {item.name: onnx.numpy_helper.to_array(item) for item in graph.initializer}
    for node in graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            values[node.output[0]] = onnx.numpy_helper.to_array(attributes["value"])
        else:
            nodes.append([node.op_type, list(node.input), *node.output, attributes])
    if not all(len(node) == 4 and node[0] in OPERATIONS for node in nodes):
        return False
    text = json.dumps({"nodes": nodes, "outputs": [output.name for output in graph.output]})
    np.savez(arrays, graph=np.array(text), **values)
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' warnings about other packages and their own deprecation."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def _one_line(form: str) -> Iterator[None]:
    """Turn an exporter's error into a one-line ConfigError."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the exporters have no common error class
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        reason = describe(cause).partition("\n")[0]
        raise ConfigError(f"{form} cannot represent this policy: {reason}") from error
