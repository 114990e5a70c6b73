"""Simulated test rig: the robot on a fixed base, without contacts, with the drives' parameters as one vector."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from mujoco.rollout import Rollout

from gpusim_rl.identify.log import Array, Log
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.sim import Scene
from gpusim_rl.sim.drives import nominal, servo_gains, servos, write_drive

FRICTION = 0.2  # initial guess without a nominal value [N m], or a share of the effort limit
EFFORT_SHARE = 0.01
BIAS_UNIT, DELAY_UNIT, DELAY_START = 0.25, 0.01, 0.005  # of the search [rad, s]; initial guess [s]
START_S = 0.05  # time from whose samples a piece's first state is estimated [s]
STEP = 1e-6  # of finite differences
FULL = mujoco.mjtState.mjSTATE_FULLPHYSICS.value


@dataclass(frozen=True)
class Parameter:
    """Entry of the parameter vector: a number x, of which the physical value is unit * x, or unit * exp(x)."""

    joint: str  # "" for the delay of all
    kind: str
    unit: float
    start: float
    low: float
    high: float

    @property
    def log(self) -> bool:
        """True if x is a logarithm."""
        return self.kind in ("armature", "damping", "stiffness")

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.joint} {self.kind}".strip()

    def value(self, x: Any) -> Any:
        """Return the physical value."""
        return self.unit * (np.exp(x) if self.log else x)


class Rig:
    """Robot of a scene on a fixed base.

    Args:
        scene: Scene whose robot has position servos.
        kp: Known stiffness of each servo, else None.
        kd: Known damping of each servo, else None.
        fit: Groups of parameters to search: `armature`, `damping`, `friction`, `gains`, `bias`, `delay`.
    """

    def __init__(
        self, scene: Scene, kp: Array | None = None, kd: Array | None = None, fit: tuple[str, ...] = ()
    ) -> None:
        self.robot, found = servos(scene)
        self.joints, self.nominal, prefix = list(found), nominal(scene), scene.prefix(self.robot)
        spec = scene.spec.copy()
        for element in [*spec.keys, *spec.sensors, *(j for j in spec.joints if j.type == mujoco.mjtJoint.mjJNT_FREE)]:
            spec.delete(element)
        for actuator in spec.actuators:
            actuator.delay, actuator.nsample = 0.0, 0
        spec.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONTACT
        self.model = model = spec.compile()
        self.dt = float(model.opt.timestep)
        self.ids = [model.joint(f"{prefix}{joint}").id for joint in self.joints]
        self.dofs, self.qpos = model.jnt_dofadr[self.ids], model.jnt_qposadr[self.ids]
        targets = {int(model.actuator_trnid[i, 0]): i for i in range(model.nactuator) if servo_gains(model, i)[0] > 0.0}
        self.servos = [targets[i] for i in self.ids]
        self.controls = model.actuator_ctrladr[self.servos]
        self.servo_damping = np.array([servo_gains(model, i)[1] for i in self.servos]) if kd is None else kd
        limits = np.abs(model.actuator_forcerange[self.servos]).max(axis=1)
        self.effort = np.where(model.actuator_forcelimited[self.servos] == 1, limits, np.inf)
        limited = model.jnt_limited[self.ids] == 1
        self.range = np.where(limited[:, None], model.jnt_range[self.ids], [-np.inf, np.inf])
        self.parameters = self._parameters(kp, fit)
        self.start = np.array([parameter.start for parameter in self.parameters])
        self.bounds = [np.array([getattr(p, end) for p in self.parameters]) for end in ("low", "high")]
        coupled = bool(model.neq or model.ntendon)
        self.trees = np.zeros(len(self.dofs), int) if coupled else model.dof_treeid[self.dofs].copy()
        self.fixed = {joint: dict(self.nominal[joint]) for joint in self.joints}
        for joint, number in zip(self.joints, [] if kp is None else kp, strict=False):
            self.fixed[joint]["stiffness"] = float(number)
        self._models, self._data = list[mujoco.MjModel](), [mujoco.MjData(model) for _ in range(available_cpus())]
        self._pool = Rollout(nthread=len(self._data) if len(self._data) > 1 else 0)

    def _parameters(self, kp: Array | None, fit: tuple[str, ...]) -> list[Parameter]:
        data, inertia = mujoco.MjData(self.model), np.zeros((self.model.nv, self.model.nv))
        mujoco.mj_forward(self.model, data)
        mujoco.mj_fullM(self.model, data, inertia)
        rows = list[Parameter]()
        for i, joint in enumerate(self.joints):
            own, mass = self.nominal[joint], float(inertia[self.dofs[i], self.dofs[i]])
            effort = EFFORT_SHARE * self.effort[i] if np.isfinite(self.effort[i]) else 0.0
            unit = max(own["friction"], FRICTION, effort)
            damping = max(own["damping"], float(self.servo_damping[i])) or np.sqrt(own["stiffness"] * mass)
            units = {"armature": own["armature"] or 0.1 * mass, "damping": damping}
            units |= {"stiffness": own["stiffness"]} if kp is None else {}
            for kind, number in units.items():
                if ("gains" if kind == "stiffness" else kind) in fit:
                    most = 2.0 if own[kind] else 4.0
                    rows.append(Parameter(joint, kind, number, 0.0, -most, most))
            if "friction" in fit:
                rows.append(Parameter(joint, "friction", unit, (own["friction"] or FRICTION) / unit, 0.0, 10.0))
            if "bias" in fit:
                rows.append(Parameter(joint, "bias", BIAS_UNIT, 0.0, -1.0, 1.0))
        if "delay" in fit:
            rows.append(Parameter("", "delay", DELAY_UNIT, DELAY_START / DELAY_UNIT, 0.0, 3.0))
        return rows

    def values(self, x: Array) -> tuple[dict[str, dict[str, float]], float]:
        """Return all values by joint, and the delay [s]; what is not searched has its nominal value."""
        rows = {joint: {"bias": 0.0, **row} for joint, row in self.fixed.items()}
        delay = 0.0
        for parameter, number in zip(self.parameters, x, strict=True):
            if parameter.joint:
                rows[parameter.joint][parameter.kind] = float(parameter.value(number))
            else:
                delay = float(parameter.value(number))
        return rows, delay

    def simulate(self, log: Log, piece: slice, xs: Array) -> tuple[Array, Array]:
        """Simulate a piece of a log with each parameter vector of `xs` [batch, parameters].

        Return encoder readings [rad] and velocities [rad/s] at the log's times, [batch, rows, joints].
        """
        time, dt = log.time[piece], self.dt
        steps = int(np.ceil((time[-1] - time[0]) / dt - 1e-6))
        while len(self._models) < len(xs):
            self._models.append(copy.copy(self.model))
        first = np.zeros((len(xs), mujoco.mj_stateSize(self.model, FULL)))
        q0, v0 = log.state_at(piece, START_S)
        control = np.zeros((len(xs), steps, self.model.nu))
        bias = np.zeros((len(xs), len(self.joints)))
        shifted: dict[float, Array] = {}
        for row, x in enumerate(xs):
            values, delay = self.values(x)
            bias[row] = [values[joint]["bias"] for joint in self.joints]
            for i, joint in enumerate(self.joints):
                elements = self._models[row].joint(self.ids[i]), self._models[row].actuator(self.servos[i])
                write_drive(*elements, values[joint], float(self.servo_damping[i]))
            if delay not in shifted:
                shifted[delay] = log.held_targets(piece, dt, steps, delay)
            control[row][:, self.controls] = shifted[delay] - bias[row]
        qpos, qvel = 1 + self.qpos, 1 + self.model.nq + self.dofs
        first[:, 1 : 1 + self.model.nq] = self.model.qpos0
        first[:, qpos], first[:, qvel] = q0 - bias, v0
        after: Any = self._pool.rollout(self._models[: len(xs)], self._data, first, control)[0]
        state = np.concatenate([first[:, None], after], axis=1)
        at = (time - time[0]) / dt
        left = np.clip(at.astype(int), 0, steps - 1)
        share = (at - left)[None, :, None]
        q, v = (
            (1.0 - share) * state[:, left][..., columns] + share * state[:, left + 1][..., columns]
            for columns in (qpos, qvel)
        )
        return q + bias[:, None], v

    def efforts(self, log: Log, q: Array, v: Array, x: Array) -> Array:
        """Return the servos' efforts, not clipped, at readings [rows, joints] and velocities [N m]."""
        values, delay = self.values(x)
        late = log.held_targets(slice(0, len(log.time)), self.dt, 0, delay, at=log.time)
        stiffness, damping = (np.array([values[j][kind] for j in self.joints]) for kind in ("stiffness", "damping"))
        return stiffness * (late - q) - np.minimum(damping, self.servo_damping) * v

    def colours(self) -> list[list[int]]:
        """Return groups of parameters that move different trees of joints, to be differentiated at once."""
        trees, common = dict[int, list[int]](), list[list[int]]()
        for number, parameter in enumerate(self.parameters):
            if parameter.joint:
                trees.setdefault(int(self.trees[self.joints.index(parameter.joint)]), []).append(number)
            else:
                common.append([number])
        return [[i for i in group if i is not None] for group in itertools.zip_longest(*trees.values())] + common

    def columns(self, parameter: Parameter) -> Array:
        """Return the mask of joints that a parameter moves."""
        if not parameter.joint:
            return np.ones(len(self.joints), bool)
        return self.trees == self.trees[self.joints.index(parameter.joint)]
