"""Errors of exported files compared with their policy, and the latency of an action."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.export.model import ExportedPolicy
from gpusim_rl.export.policy import onnx_session, plain_function
from gpusim_rl.learn.algorithm import Policy

OBSERVATIONS = 10_000
IMAGE_OBSERVATIONS = 500  # number of observations for image policies
IMAGE_ROUNDING = 5e-5  # maximum change of an image policy's output due to rounding
STEPS = 10  # episode length, over which recurrent state is carried [control steps]
TOLERANCE = 1e-5  # maximum error of ONNX and TorchScript, relative for magnitudes (or control scales) above 1
INT8_TOLERANCE = 0.1  # 8-bit error that counts as a different action: a twentieth of the range [-1, 1]
INT8_LARGEST = 0.5  # maximum 8-bit error of continuous actions
INT8_SHARE = 0.01  # maximum share of observations with a different 8-bit action
JUMP = 1e-3  # minimum error that may indicate a different choice (option or bin)
BORDER = 1e-3  # maximum share of observations at the border of two choices
CALLS = 1000  # timed calls

Arrays = tuple[np.ndarray, ...]
Units = Sequence[np.ndarray | float]
Function = Callable[..., Arrays]
"""Map from observations, images and states, [layers, batch, units], to the outputs of `ExportedPolicy`."""


@dataclass(frozen=True)
class Parity:
    """Errors of an exported file."""

    max_error: float  # of all outputs, relative as for `TOLERANCE`, except at borders
    borders: int  # number of observations whose rounding changes the policy's choice
    observations: int
    others: int  # number of observations with an error above `INT8_TOLERANCE`
    rounding: float  # largest change of the policy's outputs between neighbouring float32 observations

    @property
    def allowed(self) -> float:
        """Maximum error that rounding explains: `TOLERANCE`, or more for a steep policy."""
        return max(TOLERANCE, 2.0 * self.rounding)


def onnx_function(file: Path) -> Function:
    """Load an ONNX file as a function that runs on one thread."""
    session = onnx_session(file.read_bytes(), ["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    return lambda *inputs: tuple(map(np.asarray, session.run(None, dict(zip(names, inputs, strict=True)))))


def torchscript_function(file: Path) -> Function:
    """Load a TorchScript file as a function."""
    module = torch.jit.load(file)

    @torch.no_grad()
    def run(*inputs: np.ndarray) -> Arrays:
        return tuple(output.numpy() for output in module(*map(torch.from_numpy, inputs)))

    return run


def numpy_function(file: Path) -> Function:
    """Load a file of arrays and operations as a function, run by `policy.py`."""
    run = plain_function(file.read_bytes())
    return lambda obs: tuple(map(np.asarray, run({"obs": obs})))


READ = {"torchscript": torchscript_function, "numpy": numpy_function}  # other kinds are ONNX


def torch_function(model: ExportedPolicy, obs_sizes: Mapping[str, int]) -> Function:
    """Return the reference: `Policy.act` with the task's clipping, and with zeros as the critic's observations."""
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


def random_inputs(model: ExportedPolicy, size: int, seed: int) -> Arrays:
    """Return random observations [n, size] and random images, [n, height, width, channels] each."""
    count, random = IMAGE_OBSERVATIONS if model.images else OBSERVATIONS, np.random.default_rng(seed)
    obs = random_observations(model.policy, size, seed)[:count]
    if model.has_order:
        obs = obs[:, model.obs_order.numpy()]
    return (obs, *(random.integers(0, 256, (count, *shape), dtype=np.uint8) for shape in model.images.values()))


def random_observations(policy: Policy, size: int, seed: int) -> np.ndarray:
    """Return observations [`OBSERVATIONS`, size] around the normaliser's mean, a fifth of them extreme."""
    if size == 0:  # images only
        return np.zeros((OBSERVATIONS, 0), np.float32)
    random = np.random.default_rng(seed)
    norms, mean, scale = getattr(policy, "obs_norm", {}), np.zeros(size), np.ones(size)
    if "policy" in norms:
        norm = norms["policy"]
        mean, scale = norm.mean.numpy()[:size], norm.scale.double().numpy()[:size]  # without encoder features
    z = 3.0 * random.standard_normal((OBSERVATIONS, size))
    number = OBSERVATIONS // 20  # per kind of extreme observation
    far, alone, huge, _ = np.split(z[: 4 * number], 4)
    far[:] = random.uniform(-100.0, 100.0, far.shape)
    alone[np.arange(number), random.integers(size, size=number)] *= 1e3
    huge *= 10.0 ** random.uniform(0.0, 6.0, (number, 1))
    obs = mean + scale * z
    obs[3 * number : 4 * number] = 0.0
    return random.permutation(obs).astype(np.float32)


def error_units(model: ExportedPolicy) -> list[np.ndarray | float]:
    """Return the minimum denominator of each output's relative error: 1, or a control's scale if larger."""
    control = [model.scale.abs().clamp(min=1.0).numpy()] if model.has_control else []
    return [1.0, *control, *(1.0 for _ in model.initial_state(1))]


def compare(exact: Function, other: Function, inputs: Arrays, state: Arrays, units: Units = (1.0,)) -> Parity:
    """Compare two functions in episodes of `STEPS` control steps; each function carries its own state.

    A choice (a discrete action, or a bin) can change between neighbouring float32 observations. Such borders are
    counted, not compared. `inputs` are observations [n, size] and images [n, ...]; `state` is the initial state,
    [layers, 1, units].
    """
    count, images = len(inputs[0]), len(inputs) > 1
    episodes = zip(*(values.reshape(STEPS, count // STEPS, *values.shape[1:]) for values in inputs), strict=True)
    exact_state = other_state = tuple(np.repeat(layers, count // STEPS, axis=1) for layers in state)
    worst, rounding, borders, others = 0.0, IMAGE_ROUNDING if images else 0.0, 0, 0
    random = np.random.default_rng(0)
    for seen in episodes:
        expected, got = exact(*seen, *exact_state), other(*seen, *other_state)
        next_obs = np.nextafter(seen[0], random.choice(np.array([-np.inf, np.inf], np.float32), seen[0].shape))
        moved = _errors(expected, exact(next_obs, *seen[1:], *exact_state), units)
        rounding = max(rounding, float(moved.max(initial=0.0, where=moved <= JUMP)))
        error = _errors(expected, got, units)
        rows = np.flatnonzero(error > JUMP)
        if 0 < len(rows) <= BORDER * count:
            at_border = _at_border(exact, got, seen, exact_state, rows, units)
            borders += len(at_border)
            error[at_border] = 0.0
        worst = max(worst, float(np.nan_to_num(error, nan=np.inf).max()))
        others += int(np.count_nonzero(~(error <= INT8_TOLERANCE)))
        outputs = len(expected) - len(state)
        exact_state, other_state = expected[outputs:], got[outputs:]
    return Parity(worst, borders, count, others, rounding)


def _errors(expected: Arrays, got: Arrays, units: Units) -> np.ndarray:
    errors = []
    for a, b, unit in zip(expected, got, units, strict=True):
        error = np.abs(a.astype(np.float64) - b) / np.maximum(unit, np.abs(a))
        error = np.moveaxis(error, 1, 0) if error.ndim == 3 else error  # [layers, batch, units] of states
        errors.append(error.reshape(len(error), -1).max(axis=1))
    return np.max(errors, axis=0)


def _at_border(
    exact: Function, got: Arrays, inputs: Arrays, state: Arrays, rows: np.ndarray, units: Units
) -> np.ndarray:
    """Return the rows where a tiny change of the observation makes the policy's outputs match the file's."""
    random, near = np.random.default_rng(0), np.zeros(len(rows), dtype=bool)
    (obs, *images), state = (values[rows] for values in inputs), tuple(layers[:, rows] for layers in state)
    got = tuple(output[:, rows] if output.ndim == 3 else output[rows] for output in got)
    for _ in range(64):
        factor = 1.0 + 2e-6 * random.uniform(-1.0, 1.0, obs.shape)
        near |= _errors(exact((obs * factor).astype(np.float32), *images, *state), got, units) <= TOLERANCE
    return rows[near]


def usable_int8(parity: Parity, discrete: bool) -> bool:
    """Return whether an 8-bit file's actions are close enough to the policy's."""
    few = parity.others <= INT8_SHARE * parity.observations
    return few and (discrete or parity.max_error <= INT8_LARGEST)


def require(parity: Parity, name: str) -> None:
    """Raise ConfigError if a file's error is too large, or if too many of its actions differ."""
    if not parity.max_error <= parity.allowed or parity.borders > BORDER * parity.observations:
        problem = f"maximum error {parity.max_error:.2g} (expected at most {parity.allowed:.2g});"
        problem += f" {parity.borders} of {parity.observations:,} actions differ. Nothing was written"
        raise ConfigError(problem, key=name, hint="Try another version of onnxruntime or torch")


def latency_us(function: Function, inputs: Arrays) -> float:
    """Return the median time of a call [us]."""
    times = timeit.repeat(lambda: function(*inputs), number=1, repeat=CALLS + CALLS // 10)
    return 1e6 * statistics.median(times[CALLS // 10 :])
