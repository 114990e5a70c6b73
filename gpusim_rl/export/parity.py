"""Errors of exported files against the policy that they were made of, and the time that one action takes."""

from __future__ import annotations

import copy
import math
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.export.model import ExportedPolicy
from gpusim_rl.export.policy import plain_function
from gpusim_rl.learn.algorithm import Policy

OBSERVATIONS = 10_000
OBSERVATIONS_OF_IMAGES = 500
"""The same, where a policy sees images."""
STEPS = 10
"""Length of an episode, over which a recurrent state is carried [control steps]."""
TOLERANCE = 1e-5
"""Largest error of ONNX and TorchScript, relative where a number is above 1, or where the scale of a control is."""
INT8_TOLERANCE = 0.1
"""Error of 8-bit weights above which an action is another one: of actions in [-1, 1] a twentieth of their range."""
INT8_LARGEST = 0.5
"""Largest error of 8-bit weights; of discrete actions the share below counts alone."""
INT8_SHARE = 0.01
"""Share of the observations in which an action may be another one."""
JUMP = 1e-3
"""Smallest error that may be another choice, of an option or a bin."""
BORDER = 1e-3
"""Share of the observations that may be at the border between two choices."""
CALLS = 1000

Arrays = tuple[np.ndarray, ...]
Units = Sequence[np.ndarray | float]
Function = Callable[..., Arrays]
"""Map from observation and states, [layers, batch, units], to the outputs of `ExportedPolicy`."""


@dataclass(frozen=True)
class Parity:
    """Errors of one file."""

    max_error: float
    """Largest error of all outputs, relative as `TOLERANCE` says."""
    borders: int
    """Observations that are left out of it: the policy changes its choice within their rounding."""
    observations: int
    others: int
    """Observations with an error above `INT8_TOLERANCE`."""
    rounding: float
    """Largest change of the policy's own outputs from one float32 of the observations to the next, of the same unit;
    where it sees images, from one float32 of the weights to the next too, as pixels are whole numbers."""

    @property
    def allowed(self) -> float:
        """Largest error that rounding explains: `TOLERANCE`, or more where the policy is steep."""
        return max(TOLERANCE, 2.0 * self.rounding)


def onnx_function(file: Path) -> Function:
    """Returns the function of an ONNX file, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    return lambda *inputs: tuple(map(np.asarray, session.run(None, dict(zip(names, inputs, strict=True)))))


def torchscript_function(file: Path) -> Function:
    """Returns the function of a TorchScript file."""
    module = torch.jit.load(file)

    @torch.no_grad()
    def run(*inputs: np.ndarray) -> Arrays:
        return tuple(output.numpy() for output in module(*map(torch.from_numpy, inputs)))

    return run


def numpy_function(file: Path) -> Function:
    """Returns the function of a file of arrays and operations, as `policy.py` runs it."""
    run = plain_function(file.read_bytes())
    return lambda obs: tuple(map(np.asarray, run({"obs": obs})))


READ = {"torchscript": torchscript_function, "numpy": numpy_function}
"""Functions of files by their kind; the others are ONNX."""


def torch_function(model: ExportedPolicy, obs_sizes: Mapping[str, int]) -> Function:
    """Returns the function that files are compared with: `Policy.act` as it plays, with the task's clipping around it.

    A critic's observations and its state are zeros here: they do not change an action.
    """
    critic_state = model.policy.initial_state(1)[len(model.initial_state(1)) :]

    @torch.no_grad()
    def run(*inputs: np.ndarray) -> Arrays:
        obs, *others = (torch.from_numpy(value) for value in inputs)
        images, state = dict(zip(model.images, others, strict=False)), others[len(model.images) :]
        if model.clip_observations is not None:
            obs = torch.clip(obs, -model.clip_observations, model.clip_observations)
        if model.has_order:
            obs = torch.empty_like(obs).index_copy_(1, model.obs_order, obs)
        groups = {group: torch.zeros(len(obs), size) for group, size in obs_sizes.items()}
        critic = tuple(layers.expand(-1, len(obs), -1) for layers in critic_state)
        seen = {**groups, **images, "policy": obs}
        action, next_state = model.policy.act(seen, (*state, *critic), deterministic=True)
        if model.has_order:
            action = action[:, model.action_order]
        if model.clip_actions is not None:
            action = torch.clip(action, -model.clip_actions, model.clip_actions)
        control = [model.offset + model.scale * action[:, model.source]] if model.has_control else []
        return tuple(output.numpy() for output in (action, *control, *next_state[: len(state)]))

    return run


def beside_images(model: ExportedPolicy, obs: np.ndarray, seed: int) -> np.ndarray:
    """Returns observations with random pixels behind their numbers; fewer of them, where a policy sees images."""
    pixels = sum(math.prod(shape) for shape in model.images.values())
    if not pixels:
        return obs
    random = np.random.default_rng(seed)
    obs = obs[:OBSERVATIONS_OF_IMAGES]
    return np.concatenate([obs, random.integers(0, 256, (len(obs), pixels)).astype(np.float32)], axis=1)


def with_images(model: ExportedPolicy, function: Function) -> Function:
    """Returns a function of what `beside_images` returns: it makes images of the pixels again."""
    if not model.images:
        return function
    sizes = [math.prod(shape) for shape in model.images.values()]

    def run(joined: np.ndarray, *state: np.ndarray) -> Arrays:
        obs, *images = np.split(joined, -np.cumsum(sizes[::-1])[::-1], axis=1)
        shaped = [
            np.rint(pixels).clip(0.0, 255.0).astype(np.uint8).reshape(-1, *shape)
            for pixels, shape in zip(images, model.images.values(), strict=True)
        ]
        return function(obs, *shaped, *state)

    return run


def random_observations(policy: Policy, size: int, seed: int) -> np.ndarray:
    """Returns observations [`OBSERVATIONS`, size] around those that the normaliser has seen, a fifth of them extreme.

    The extreme ones are up to 100 deviations away, or one number alone is, or all are up to 1e6 times as far, or zero.
    """
    if size == 0:  # the policy sees images alone
        return np.zeros((OBSERVATIONS, 0), np.float32)
    random = np.random.default_rng(seed)
    norms, mean, scale = getattr(policy, "obs_norm", {}), np.zeros(size), np.ones(size)
    if "policy" in norms:
        mean, scale = norms["policy"].mean.numpy(), norms["policy"].scale.double().numpy()
        mean, scale = mean[:size], scale[:size]  # features of a frozen encoder come behind
    z = 3.0 * random.standard_normal((OBSERVATIONS, size))
    number = OBSERVATIONS // 20  # of each of four extreme kinds
    far, alone, huge, _ = np.split(z[: 4 * number], 4)
    far[:] = random.uniform(-100.0, 100.0, far.shape)
    alone[np.arange(number), random.integers(size, size=number)] *= 1e3
    huge *= 10.0 ** random.uniform(0.0, 6.0, (number, 1))
    obs = mean + scale * z
    obs[3 * number : 4 * number] = 0.0
    return random.permutation(obs).astype(np.float32)


def error_units(model: ExportedPolicy) -> list[np.ndarray | float]:
    """Returns the unit of each output's error, where the output is smaller: a control has an action's times a scale."""
    control = [model.scale.abs().clamp(min=1.0).numpy()] if model.has_control else []
    return [1.0, *control, *(1.0 for _ in model.initial_state(1))]


def rounded(model: ExportedPolicy) -> ExportedPolicy:
    """Returns the policy; where it sees images, a copy in which each weight is a neighbour of what it was."""
    if not model.images:
        return model
    model, random = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            up = torch.rand(weight.shape, generator=random) < 0.5
            weight.copy_(weight.nextafter(torch.where(up, math.inf, -math.inf)))
    return model


def compare(
    exact: Function,
    other: Function,
    obs: np.ndarray,
    state: Arrays,
    units: Units = (1.0,),
    near: Function | None = None,
) -> Parity:
    """Returns the errors of a function, in episodes of `STEPS` control steps; each function carries its own state.

    A choice (of discrete actions, or of bins) can change from one float32 to the next. An observation is at such a
    border where the policy gives the other outputs as soon as the observation is rounded otherwise.

    Args:
        exact: Function of the policy.
        other: Function of the file.
        obs: Observations [n, size]; n is a multiple of `STEPS`.
        state: State at the start, [layers, 1, units] each.
        units: Result of `error_units`.
        near: Function of the policy with rounded weights; None for `exact`.
    """
    near = near or exact
    episodes = obs.reshape(STEPS, -1, obs.shape[1])
    exact_state = other_state = tuple(np.repeat(layers, episodes.shape[1], axis=1) for layers in state)
    worst, rounding, borders, others, random = 0.0, 0.0, 0, 0, np.random.default_rng(0)
    for step_obs in episodes:
        expected, got = exact(step_obs, *exact_state), other(step_obs, *other_state)
        next_obs = np.nextafter(step_obs, random.choice(np.array([-np.inf, np.inf], np.float32), step_obs.shape))
        moved = _errors(expected, near(next_obs, *exact_state), units)
        rounding = max(rounding, float(moved.max(initial=0.0, where=moved <= JUMP)))
        error = _errors(expected, got, units)
        rows = np.flatnonzero(error > JUMP)
        if 0 < len(rows) <= BORDER * len(obs):
            at_border = _at_border(exact, got, step_obs, exact_state, rows, units)
            borders += len(at_border)
            error[at_border] = 0.0
        worst = max(worst, float(np.nan_to_num(error, nan=np.inf).max()))
        others += int(np.count_nonzero(~(error <= INT8_TOLERANCE)))
        count = len(expected) - len(state)
        exact_state, other_state = expected[count:], got[count:]
    return Parity(worst, borders, len(obs), others, rounding)


def _errors(expected: Arrays, got: Arrays, units: Units) -> np.ndarray:
    """Returns the largest error of each row."""
    errors = []
    for a, b, unit in zip(expected, got, units, strict=True):
        error = np.abs(a.astype(np.float64) - b) / np.maximum(unit, np.abs(a))
        error = np.moveaxis(error, 1, 0) if error.ndim == 3 else error  # a state's batch is its second axis
        errors.append(error.reshape(len(error), -1).max(axis=1))
    return np.max(errors, axis=0)


def _at_border(
    exact: Function, got: Arrays, obs: np.ndarray, state: Arrays, rows: np.ndarray, units: Units
) -> np.ndarray:
    """Returns those of some rows where the policy gives the other outputs for a neighbour of the observation."""
    random, near = np.random.default_rng(0), np.zeros(len(rows), dtype=bool)
    state = tuple(layers[:, rows] for layers in state)
    got = tuple(output[:, rows] if output.ndim == 3 else output[rows] for output in got)
    for _ in range(64):
        factor = 1.0 + 2e-6 * random.uniform(-1.0, 1.0, obs[rows].shape)
        near |= _errors(exact((obs[rows] * factor).astype(np.float32), *state), got, units) <= TOLERANCE
    return rows[near]


def usable_int8(parity: Parity, discrete: bool) -> bool:
    """Return whether a file with 8-bit weights still acts as the policy does."""
    few = parity.others <= INT8_SHARE * parity.observations
    return few and (discrete or parity.max_error <= INT8_LARGEST)


def require(parity: Parity, name: str) -> None:
    """Raises a ConfigError where a file is not the policy: its error is too large, or it has too many borders."""
    if not parity.max_error <= parity.allowed or parity.borders > BORDER * parity.observations:
        raise ConfigError(
            f"{name} differs from the policy by {parity.max_error:.2g} (expected at most {parity.allowed:.2g}), and in"
            f" {parity.borders} of {parity.observations:,} choices: nothing was written. Try another version of"
            " onnxruntime or torch"
        )


def latency_us(function: Function, inputs: Arrays) -> float:
    """Returns the median time of a call [us]."""
    times = timeit.repeat(lambda: function(*inputs), number=1, repeat=CALLS + CALLS // 10)
    return 1e6 * statistics.median(times[CALLS // 10 :])
