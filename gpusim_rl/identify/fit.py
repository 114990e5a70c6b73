"""Least squares over rollouts: parameters of the drives, their intervals, and what the log does not show."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from mujoco import minimize

from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.identify.log import CLIPPED, MOST_S, NEAR, Array, Log, matched
from gpusim_rl.identify.rig import STEP, Rig
from gpusim_rl.sim import Scene
from gpusim_rl.sim.drives import FORMAT, KINDS, POSITIVE

GROUPS = ("armature", "damping", "friction", "gains", "bias", "delay")
HELD_OUT = 0.25  # share of the log at its end
BURN_S = 0.3  # start of a piece without residuals: its first state is noisy [s]
LEAST_NOISE = (1e-4, 1e-3)  # standard deviations of readings [rad] and velocities [rad/s]
UNSEEN = 0.15  # standard deviation of x above which the log does not show a parameter
PART = 0.05  # share of a parameter, or of two, in a combination that the log does not show
HOLD = 1e4  # weight that freezes such a combination
ITERATIONS, SMALL_STEP = 25, 1e-5
Z = 1.96  # of a 95 % interval
DIFFER, SURELY = 3.0, 5.5  # standard deviations between halves of a log that widen an interval; that are a misfit
EXCESS, SLOW, BLOCK_S = 1.3, 1.8, 0.05  # of a wrong model: variance over noise, or of means of blocks over white [s]
ASSUMED = 0.4  # range of logarithms that were not identified, each way


@dataclass
class Identified:
    """Result of `identify`; arrays of parameters are in the order of `rig.parameters`."""

    rig: Rig
    log: Log
    x: Array
    sigma: Array  # standard deviations of x
    correlation: Array
    unseen: list[list[str]]  # parameters, or combinations of parameters, that the log does not show
    frozen: Array  # mask of parameters in `unseen`
    misfit: dict[str, str]  # reason by joint whose model is wrong
    rows: dict[str, Array]  # masks of samples: `fit`, `held`
    noise: Array  # [2, joints]: rad, rad/s
    before: Array  # readings of the nominal robot [samples, joints], NaN outside of pieces
    after: Array
    seconds: float = 0.0
    rollouts: int = 0
    notes: list[str] = field(default_factory=list)

    def error(self, readings: Array, part: str) -> Array:
        """Return the rms error of readings by joint [rad]."""
        rows = self.rows[part]
        return np.sqrt(np.mean((readings[rows] - self.log.q[rows]) ** 2, axis=0))

    @property
    def held_out(self) -> Array:
        """Error on the held-out end of the log, relative to the noise, by joint."""
        return self.error(self.after, "held") / self.noise[0]

    def interval(self, i: int) -> tuple[float, float, float]:
        """Return value, and 95 % interval (or the assumed range) of a parameter."""
        parameter, half = self.rig.parameters[i], Z * float(self.sigma[i])
        low, value, high = (float(parameter.value(self.x[i] + shift)) for shift in (-half, 0.0, half))
        return value, low if parameter.kind == "bias" else max(0.0, low), high

    def drives(self) -> dict[str, Any]:
        """Return the content of a drives file."""
        rig, (values, delay) = self.rig, self.rig.values(self.x)
        index = {(p.joint, p.kind): i for i, p in enumerate(rig.parameters)}

        def row(joint: str, kind: str, number: float) -> dict[str, Any]:
            i = index.get((joint, kind))
            value, low, high = (number,) * 3 if i is None else self.interval(i)
            how = "given" if i is None else "not seen" if self.frozen[i] else "identified"
            return {"value": value, "low": min(low, value), "high": max(high, value), "is": how}

        joints = {
            joint: {
                **{kind: row(joint, kind, values[joint][kind]) for kind in KINDS},
                "servo_damping": float(min(kd, values[joint]["damping"])),
            }
            for joint, kd in zip(rig.joints, rig.servo_damping, strict=True)
        }
        return {
            "format": FORMAT,
            "robot": rig.robot,
            "nominal": {
                joint: {name: rig.nominal[joint][name] for name in (*POSITIVE, "mass")} for joint in rig.joints
            },
            "delay": row("", "delay", delay),
            "joints": joints,
            "unseen": self.unseen,
            "misfit": self.misfit,
            "held_out": dict(zip(rig.joints, self.held_out.tolist(), strict=True)),
        }

    def warnings(self) -> list[str]:
        """Return a line for each thing that the user must know."""
        lines = [*self.notes]
        lines += [f"the log does not show {' + '.join(names)}; frozen at the nominal value" for names in self.unseen]
        lines += [f"the model of {joint} is wrong: {reason}" for joint, reason in self.misfit.items()]
        for gain, kind in ((self.log.kp, "stiffness"), (self.log.kd, "damping")):
            own = np.array([self.rig.nominal[joint][kind] for joint in self.rig.joints])
            if gain is not None and not np.allclose(gain, own, rtol=0.05):
                i = int(np.abs(gain / own - 1.0).argmax())
                text = f"{kind} {gain[i]:.4g} in the log, {own[i]:.4g} in the scene: deploy with the log's gains"
                lines.append(f"{self.rig.joints[i]}: {text}")
        return lines

    def couplings(self, count: int = 5) -> list[tuple[str, str, float]]:
        """Return the most correlated pairs of parameters."""
        upper = np.abs(np.triu(self.correlation, 1))
        pairs = zip(*np.unravel_index(np.argsort(-upper, axis=None)[:count], upper.shape), strict=True)
        names = [parameter.name for parameter in self.rig.parameters]
        return [(names[i], names[j], float(self.correlation[i, j])) for i, j in pairs]


class _Problem:
    """Whitened residuals of a log, [samples, 2 * joints], as a function of the parameters."""

    def __init__(self, rig: Rig, log: Log, rows: Array, noise: Array) -> None:
        self.rig, self.log, self.rows, self.rollouts = rig, log, rows, 0
        channels = [log.q / noise[0]] + ([] if log.dq is None else [log.dq / noise[1]])
        self.noise, self.measured = noise, np.concatenate(channels, axis=1)
        self.held = np.zeros((0, len(rig.parameters)))  # combinations that are frozen

    def readings(self, xs: Array) -> Array:
        """Return whitened simulated channels, [batch, samples, channels]; NaN outside of pieces."""
        found = np.full((len(xs), *self.measured.shape), np.nan)
        for piece in self.log.pieces:
            q, dq = self.rig.simulate(self.log, piece, xs)
            found[:, piece] = np.concatenate([q / self.noise[0], dq / self.noise[1]], axis=2)[
                ..., : len(self.measured[0])
            ]
        self.rollouts += len(xs) * len(self.log.pieces)
        return found

    def residual(self, x: Array) -> Array:
        """Return residuals of columns of parameters, as `least_squares` calls it."""
        xs = x.T if x.ndim == 2 else x[None]
        channels = (self.readings(xs) - self.measured)[:, self.rows].reshape(len(xs), -1)
        frozen = HOLD * (xs - self.rig.start) @ self.held.T
        return np.ascontiguousarray(np.concatenate([channels, frozen], axis=1).T)

    def jacobian(self, x: Array, _: Any = None) -> Array:
        """Return the derivatives; parameters of separate trees of joints share a rollout."""
        rig, x = self.rig, x.ravel()
        step = np.where(x + STEP > rig.bounds[1], -STEP, STEP)
        colours = rig.colours()
        xs = np.tile(x, (len(colours) + 1, 1))
        for row, members in enumerate(colours):
            xs[row, members] += step[members]
        found = self.readings(xs)[:, self.rows]
        result = np.zeros((*found.shape[1:], len(x)))
        for row, members in enumerate(colours):
            change = found[row] - found[-1]
            for i in members:
                mask = np.tile(rig.columns(rig.parameters[i]), change.shape[1] // len(rig.joints))
                result[:, mask, i] = change[:, mask] / step[i]
        return np.concatenate([result.reshape(-1, len(x)), HOLD * self.held])

    def directions(self, jacobian: Array) -> Array:
        """Return the combinations of parameters that the log does not show, [combinations, parameters]."""
        weights, vectors = np.linalg.eigh(jacobian.T @ jacobian)
        return vectors[:, weights < 1.0 / UNSEEN**2].T

    def solve(self, x: Array) -> tuple[Array, Array]:
        """Return the best parameters and the derivatives; freeze what the log does not show, and search again."""
        self.held = self.directions(jacobian := self.jacobian(x))
        for _ in range(3):
            x = x + self.held.T @ (self.held @ (self.rig.start - x))
            x, _ = minimize.least_squares(
                np.clip(x, *self.rig.bounds),
                self.residual,
                self.rig.bounds,
                self.jacobian,
                max_iter=ITERATIONS,
                xtol=SMALL_STEP,
                verbose=minimize.Verbosity.SILENT,
            )
            x = x.ravel()
            jacobian = self.jacobian(x)
            more = self.directions(jacobian)
            if not len(more):
                break
            self.held = np.concatenate([self.held, more])
        return x, jacobian


def _combinations(held: Array, names: Sequence[str]) -> list[list[str]]:
    """Return names of the parameters in each unseen combination: connected parts of the projection on them."""
    projection = np.abs(held.T @ held)
    left, groups = {int(i) for i in np.flatnonzero(np.diag(projection) > PART)}, list[list[str]]()
    while left:
        group, front = set[int](), {min(left)}
        while front:
            group |= front
            front = {j for i in front for j in left - group if projection[i, j] > PART}
        left -= group
        groups.append([names[i] for i in sorted(group)])
    return groups


def identify(scene: Scene, log: Log, fit: Sequence[str] = GROUPS) -> Identified:
    """Find the drives of a scene's robot from a log.

    Args:
        scene: Scene with one robot whose joints have position servos.
        log: Log of the robot with a fixed base and without contacts; see `read_log`.
        fit: Groups of parameters to search, of `GROUPS`. Gains in the log are exact; without `gains`, the scene's are.

    Raises:
        ConfigError: The log is another robot's, or its efforts are clipped.
    """
    began = time.process_time()
    rig = Rig(scene)
    log = matched(log, rig.joints, rig.range)
    rig = Rig(scene, log.kp, log.kd, tuple(fit))
    log, notes = _shortened(log)
    noise = np.stack([log.noise(log.q, LEAST_NOISE[0]), log.noise(log.q if log.dq is None else log.dq, LEAST_NOISE[1])])
    rows = _rows(log)
    problem = _Problem(rig, log, rows["fit"], noise)
    if not len(rig.parameters):
        raise TaskError("nothing to identify", key="fit", expected=", ".join(GROUPS))
    _refuse_clipped(rig, log)
    before = problem.readings(rig.start[None])[0]
    x, jacobian = problem.solve(rig.start)
    after = problem.readings(x[None])[0]
    if not np.isfinite(after[rows["fit"]]).all():
        raise ConfigError(
            "the simulated robot diverges", key=log.path, hint="Try a smaller physics step, or check units"
        )
    names, joints = [parameter.name for parameter in rig.parameters], len(rig.joints)
    residual = (after - problem.measured)[rows["fit"]]
    sigma, correlation, misfit = _uncertainty(problem, residual, jacobian)
    groups = _combinations(problem.held, names)
    frozen = np.isin(names, [name for group in groups for name in group])
    sigma = np.where(frozen, ASSUMED / Z, sigma)
    return Identified(
        *(rig, log, x, sigma, correlation, groups, frozen, misfit, rows, noise),
        *(channels[:, :joints] * noise[0] for channels in (before, after)),
        seconds=time.process_time() - began,
        rollouts=problem.rollouts,
        notes=notes,
    )


def _shortened(log: Log) -> tuple[Log, list[str]]:
    """Return the start of a log, and a line if it is not the whole."""
    count, seconds = int((log.time <= log.time[0] + MOST_S).sum()), log.time[-1] - log.time[0]
    tables = {name: getattr(log, name) for name in ("time", "target", "q", "dq", "tau", "gyro")}
    short = replace(log, **{name: None if table is None else table[:count] for name, table in tables.items()})
    return short, [f"only the first {MOST_S:g} s of the log's {seconds:.0f} s are used"] * (count < len(log.time))


def _rows(log: Log) -> dict[str, Array]:
    """Return masks of the samples to fit and of the held-out end, without the start of each piece."""
    used = np.zeros(len(log.time), bool)
    for piece in log.pieces:
        used[piece] = log.time[piece] >= log.time[piece][0] + BURN_S
    cut = np.flatnonzero(used)[int((1.0 - HELD_OUT) * used.sum())]
    first = np.arange(len(used)) < cut
    return {"fit": used & first, "held": used & ~first}


def _refuse_clipped(rig: Rig, log: Log) -> None:
    """Raise ConfigError for joints whose effort is often at its limit."""
    efforts = log.tau
    if efforts is None and log.kp is not None and log.kd is not None and log.dq is not None:
        efforts = log.kp * (log.target - log.q) - log.kd * log.dq
    if efforts is None:
        return
    shares = (np.abs(efforts) > NEAR * rig.effort).mean(axis=0)
    if (shares > CLIPPED).any():
        i = int(shares.argmax())
        problem = f"{rig.joints[i]} is at its effort limit in {shares[i]:.0%} of samples"
        raise ConfigError(
            problem, key=log.path, expected=f"less than {rig.effort[i]:g} N m", hint="Try smaller targets"
        )


def _uncertainty(problem: _Problem, residual: Array, jacobian: Array) -> tuple[Array, Array, dict[str, str]]:
    """Return standard deviations and correlation of x, and reasons why the model of a joint is wrong.

    Each joint's noise counts: its variance, and the correlation of neighbouring residuals. Where halves of the log
    differ, the difference widens the interval.
    """
    rig, joints = problem.rig, len(problem.rig.joints)
    channels = residual.reshape(len(residual), -1, joints)
    variance = np.mean(channels**2, axis=0).max(axis=0)
    alike = np.mean(channels[1:] * channels[:-1], axis=0) / np.mean(channels**2, axis=0)
    size = max(2, round(BLOCK_S / problem.log.period))
    blocks = channels[: len(channels) // size * size].reshape(-1, size, *channels.shape[1:]).mean(axis=1)
    slow = (size * np.mean(blocks**2, axis=0) / np.mean(channels**2, axis=0)).max(axis=0)
    excess = np.maximum(np.mean(channels**2, axis=(0, 1)), 0.25)
    grow = excess * np.maximum(1.0, (1.0 + alike.max(axis=0)) / np.maximum(1.0 - alike.max(axis=0), 1e-3))
    owner = [rig.joints.index(p.joint) if p.joint else -1 for p in rig.parameters]
    factor = np.append(grow, grow.mean())[owner]

    freeze, data = (HOLD * problem.held).T @ (HOLD * problem.held), jacobian[: residual.size]
    inverse = np.linalg.inv(data.T @ data + freeze)
    sigma = np.sqrt(np.diag(inverse) * factor)
    spread = np.sqrt(np.diag(inverse))
    half = residual.size // 2
    shifts, covariances = [], []
    for part in (slice(0, half), slice(half, None)):
        inner = np.linalg.pinv(data[part].T @ data[part] + freeze + 1e-9 * np.eye(len(sigma)))
        shifts.append(-inner @ (data[part].T @ residual.ravel()[part]))
        covariances.append(np.diag(inner))
    gap = np.abs(shifts[0] - shifts[1])
    z = gap / np.sqrt(sum(covariances) * factor + 1e-18)
    sigma = np.where(z > DIFFER, np.maximum(sigma, gap), sigma)

    misfit: dict[str, str] = {}
    for i, joint in enumerate(rig.joints):
        mine = [z[k] for k, owned in enumerate(owner) if owned == i]
        if variance[i] > EXCESS:
            misfit[joint] = f"the residual's variance is {variance[i]:.3g} times the noise's"
        elif slow[i] > SLOW:
            misfit[joint] = f"slow residuals are {slow[i]:.3g} times those of white noise"
        elif mine and max(mine) > SURELY:
            misfit[joint] = f"halves of the log differ by {max(mine):.1f} standard deviations"
    return sigma, inverse / np.outer(spread, spread), misfit
