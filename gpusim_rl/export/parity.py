"""How far exported files are from the policy that they were made of, and how long one action takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.export.model import ExportedPolicy
from gpusim_rl.learn.algorithm import Policy

OBSERVATIONS = 10_000
EXTREME = 0.2
"""Share of the observations that are extreme."""
STEPS = 10
"""Control steps of an episode, over which a recurrent state is carried."""
TOLERANCE = 1e-5
"""Largest error of ONNX and TorchScript, relative where a number is above 1, or where the scale of a control is."""
JUMP = 1e-3
"""Smallest error that may be another choice, of an option or a bin."""
BORDER = 1e-3
"""Share of the observations that may be at the border between two choices."""
CALLS = 1000

Function = Callable[..., tuple[np.ndarray, ...]]
"""Observation and state to the outputs of `ExportedPolicy`."""


@dataclass(frozen=True)
class Parity:
    """Errors of one file.

    Attributes:
        max_error: Largest one of all outputs, relative as `TOLERANCE` says.
        borders: Observations that are left out of it: the policy changes its choice within their rounding.
        observations: How many there were.
    """

    max_error: float
    borders: int
    observations: int


def onnx_function(file: Path) -> Function:
    """An ONNX file, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [part.name for part in session.get_inputs()]
    return lambda *inputs: tuple(map(np.asarray, session.run(None, dict(zip(names, inputs, strict=True)))))


def torchscript_function(file: Path) -> Function:
    """A TorchScript file."""
    module = torch.jit.load(file)

    @torch.no_grad()
    def run(*inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(output.numpy() for output in module(*map(torch.from_numpy, inputs)))

    return run


def torch_function(model: ExportedPolicy, policy: Policy, obs_sizes: Mapping[str, int]) -> Function:
    """What the files are compared with: `Policy.act` as it plays, with the task's clipping around it.

    A critic's observations are zeros here, and its state is carried along.

    Args:
        model: For its limits and controls.
        policy: What acts, on the CPU.
        obs_sizes: Of all observation groups.
    """
    critic = [policy.initial_state(1)[len(model.initial_state(1)) :]]

    @torch.no_grad()
    def run(*inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        seen, *state = (torch.from_numpy(value) for value in inputs)
        if model.clip_observations is not None:
            seen = torch.clip(seen, -model.clip_observations, model.clip_observations)
        groups = {group: torch.zeros(len(seen), size) for group, size in obs_sizes.items()}
        rest = tuple(part.expand(-1, len(seen), -1) for part in critic[0])
        action, after = policy.act({**groups, "policy": seen}, (*state, *rest), deterministic=True)
        if model.clip_actions is not None:
            action = torch.clip(action, -model.clip_actions, model.clip_actions)
        outputs: list[Tensor] = [action]
        if model.has_control:
            outputs.append(model.offset + model.scale * action[:, model.source])
        return tuple(part.numpy() for part in (*outputs, *after[: len(state)]))

    return run


def random_observations(policy: Policy, size: int, seed: int) -> np.ndarray:
    """Observations [`OBSERVATIONS`, size]: around what the normaliser has seen, and extreme ones.

    Four fifths are normal with three standard deviations. The others are up to 100 away, or one number alone is, or all
    are as large as 1e6 times that, or zero.
    """
    random = np.random.default_rng(seed)
    norms = getattr(policy, "obs_norm", {})
    mean, scale = np.zeros(size), np.ones(size)
    if "policy" in norms:
        mean, scale = norms["policy"].mean.numpy(), norms["policy"].scale.double().numpy()
    z = 3.0 * random.standard_normal((OBSERVATIONS, size))
    number = int(EXTREME * OBSERVATIONS) // 4
    far, alone, huge, zero = np.split(z[: 4 * number], 4)
    far[:] = random.uniform(-100.0, 100.0, far.shape)
    alone[np.arange(number), random.integers(size, size=number)] *= 1e3
    huge *= 10.0 ** random.uniform(0.0, 6.0, (number, 1))
    zero[:] = 0.0
    obs = mean + scale * z
    obs[3 * number : 4 * number] = 0.0
    return random.permutation(obs).astype(np.float32)


def units(model: ExportedPolicy) -> list[np.ndarray | float]:
    """What an error of each output is relative to, where the output itself is smaller.

    A control is an action times a scale. It has the action's errors times that scale.
    """
    control = [model.scale.abs().clamp(min=1.0).numpy()] if model.has_control else []
    return [1.0, *control, *(1.0 for _ in model.initial_state(1))]


def compare(
    exact: Function,
    other: Function,
    obs: np.ndarray,
    state: tuple[np.ndarray, ...],
    relative_to: Sequence[np.ndarray | float] = (1.0,),
) -> Parity:
    """Errors of a function on observations, in episodes of `STEPS` control steps; each carries its own state.

    A choice (of discrete actions, or of bins) can change from one float32 to the next. An observation where the policy
    itself gives the other outputs, as soon as the observation is rounded otherwise, is at such a border.

    Args:
        exact: The policy.
        other: The file.
        obs: Observations [n, size]; n is a multiple of `STEPS`.
        state: At the start, [layers, 1, units] each.
        relative_to: See `units`.
    """
    judge = partial(_errors, relative_to=relative_to, states=len(state))
    episodes = obs.reshape(STEPS, -1, obs.shape[1])
    ours = theirs = tuple(np.repeat(part, episodes.shape[1], axis=1) for part in state)
    worst, borders = 0.0, 0
    for seen in episodes:
        expected, got = exact(seen, *ours), other(seen, *theirs)
        error = judge(expected, got)
        rows = np.flatnonzero(error > JUMP)
        if 0 < len(rows) <= BORDER * len(obs):
            at_border = _at_border(exact, judge, got, seen, ours, rows)
            borders += len(at_border)
            error[at_border] = 0.0
        worst = max(worst, float(np.nan_to_num(error, nan=np.inf).max()))
        count = len(expected) - len(state)
        ours, theirs = expected[count:], got[count:]
    return Parity(worst, borders, len(obs))


def _errors(
    expected: tuple[np.ndarray, ...],
    got: tuple[np.ndarray, ...],
    *,
    relative_to: Sequence[np.ndarray | float],
    states: int,
) -> np.ndarray:
    """The largest error of each row."""
    errors = []
    for place, (a, b, unit) in enumerate(zip(expected, got, relative_to, strict=True)):
        each = np.abs(a.astype(np.float64) - b) / np.maximum(unit, np.abs(a))
        each = np.moveaxis(each, 1, 0) if place >= len(expected) - states else each  # a state is [layers, batch, units]
        errors.append(each.reshape(len(each), -1).max(axis=1))
    return np.max(errors, axis=0)


def _at_border(
    exact: Function,
    judge: Callable[..., np.ndarray],
    got: tuple[np.ndarray, ...],
    obs: np.ndarray,
    state: tuple[np.ndarray, ...],
    rows: np.ndarray,
) -> np.ndarray:
    """Those of some rows where the policy gives the other outputs for a neighbour of the observation."""
    random, found = np.random.default_rng(0), np.zeros(len(rows), dtype=bool)
    there = tuple(part[:, rows] for part in state)
    count = len(got) - len(state)
    wanted = (*(part[rows] for part in got[:count]), *(part[:, rows] for part in got[count:]))
    for _ in range(64):
        factor = 1.0 + 2e-6 * random.uniform(-1.0, 1.0, obs[rows].shape)
        found |= judge(exact((obs[rows] * factor).astype(np.float32), *there), wanted) <= TOLERANCE
    return rows[found]


def require(parity: Parity, name: str) -> None:
    """Stops where a file is not the policy.

    Raises:
        ConfigError: Its error is above `TOLERANCE`, or too many observations are at borders.
    """
    if not parity.max_error <= TOLERANCE or parity.borders > BORDER * parity.observations:
        raise ConfigError(
            f"{name} differs from the policy by {parity.max_error:.2g} (expected at most {TOLERANCE:g}), and in"
            f" {parity.borders} of {parity.observations:,} choices: nothing was written. Try another version of"
            " onnxruntime or torch"
        )


def latency_us(function: Function, inputs: tuple[np.ndarray, ...]) -> float:
    """Median time of a call [us]."""
    times = []
    for _ in range(CALLS + CALLS // 10):
        begin = time.perf_counter_ns()
        function(*inputs)
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times[CALLS // 10 :]) / 1e3
