"""IsaacGym's properties of joints, bodies, shapes and tendons as MuJoCo quantities that can be randomised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from gpusim_rl.env.stateful import Stateful
from gpusim_rl.errors import TaskError, available
from gpusim_rl.sim import Param, Sim
from gpusim_rl.sim.actuators import DAMPING, RESISTANCE, STIFFNESS, is_dc_motor, is_dc_servo
from gpusim_rl.sim.params import FIELDS

LEAST_MASS = 0.01
"""Lower limit of drawn masses and inertias, relative to the model's values."""
LEAST_FRICTION = 1e-5
"""Lower limit of drawn sliding, torsional and rolling friction: MuJoCo's `mjMINMU`."""

_ON_JOINTS = (mujoco.mjtTrn.mjTRN_JOINT.value, mujoco.mjtTrn.mjTRN_JOINTINPARENT.value)
_FIXED_GAIN = mujoco.mjtGain.mjGAIN_FIXED.value
_AFFINE_BIAS, _NO_BIAS = mujoco.mjtBias.mjBIAS_AFFINE.value, mujoco.mjtBias.mjBIAS_NONE.value


@dataclass(frozen=True, slots=True)
class Quantity:
    """Physical quantity of some elements: default values and a setter."""

    default: Float[Tensor, "..."]  # values of the model, [elements] or [elements, 3]; [3] for gravity
    write: Callable[[Tensor, Bool[Tensor, " envs"]], None]  # sets values, [num_envs, *default.shape], in masked envs
    low: Tensor | float | None = None  # limits of drawn values
    high: Tensor | float | None = None


@dataclass(frozen=True, slots=True)
class Drive:
    """Actuator on a joint."""

    name: str
    joint: str
    index: int  # in the model


class ActorProperties(Stateful):
    """Randomisable properties of an articulation, or of the ground (`GROUND`). `elements=None` means all."""

    def __init__(self, sim: Sim, name: str) -> None:
        self.sim = sim
        self.model = sim.scene.model
        self.name = name
        self._inertia: Inertia | None = None

    @property
    def inertia(self) -> Inertia:
        """Coupled masses and inertias of the bodies. Created on first use."""
        if self._inertia is None:
            self._inertia = Inertia(self)
        return self._inertia

    def quantities(self, section: str, name: str, elements: Sequence[str] | None) -> list[Quantity]:
        """Return MuJoCo's quantities for a property of `SECTIONS`; raise TaskError if there are none."""
        return SECTIONS[section][name](self, elements)

    def param(self, field: str, elements: Sequence[str] | None) -> Param:
        """Return a parameter of the simulator for the given elements."""
        return self.sim.param(field, self.name, elements)

    def joints(self, elements: Sequence[str] | None) -> list[str]:
        """Return joint names; raise TaskError for an unknown joint, or if there are no joints."""
        known = self.sim.articulation(self.name).joint_names
        for name in elements or []:
            if name not in known:
                raise TaskError(f"{self.name!r} has no joint {name!r}", hint=available(name, known))
        if not known:
            raise TaskError(f"{self.name!r} has no joints")
        return list(known if elements is None else elements)

    def drives(self, elements: Sequence[str] | None) -> list[Drive]:
        """Return the actuators on the given joints."""
        model, joints, prefix = self.model, self.joints(elements), self.sim.scene.prefix(self.name)
        drives = []
        for i in range(model.nactuator):
            joint = model.joint(model.actuator_trnid[i, 0]).name if model.actuator_trntype[i] in _ON_JOINTS else ""
            if joint.startswith(prefix) and joint.removeprefix(prefix) in joints:
                drives.append(Drive(model.actuator(i).name.removeprefix(prefix), joint.removeprefix(prefix), i))
        return drives


GetQuantities = Callable[[ActorProperties, Sequence[str] | None], list[Quantity]]
"""Lookup of a property's quantities for the given elements, None = all; raises TaskError if there are none."""


def _column(
    param: Param,
    index: int | None = None,
    *,
    sign: float = 1.0,
    low: Tensor | float | None = None,
    high: Tensor | float | None = None,
) -> Quantity:
    """Return the quantity for one column of a parameter, or for the whole parameter."""
    if index is None:
        return Quantity(param.default, param.set, low, high)

    def write(value: Tensor, where: Bool[Tensor, " envs"]) -> None:
        param.set(value if sign == 1.0 else sign * value, where, index)

    return Quantity(sign * param.default[..., index], write, low, high)


def _field(field: str, column: int | None = None, *, low: float | None = 0.0) -> GetQuantities:
    """Return the lookup of a property that is stored in a model field, or in one of its columns."""
    return lambda actor, elements: [_column(actor.param(field, elements), column, low=low)]


def _servo_column(model: mujoco.MjModel, i: int) -> int | None:
    """Return the bias column with a servo's negated gain: 1 = position, 2 = velocity; None for other actuators."""
    gain, bias = model.actuator_gainprm[i, 0], model.actuator_biasprm[i]
    if gain == 0.0 or model.actuator_gaintype[i] != _FIXED_GAIN or model.actuator_biastype[i] != _AFFINE_BIAS:
        return None
    if bias[1] == -gain:
        return 1
    return 2 if bias[1] == 0.0 and bias[2] == -gain else None


def _drive_column(
    actor: ActorProperties, drives: Sequence[Drive], field: str, column: int, *, sign: float = 1.0
) -> list[Quantity]:
    names = [drive.name for drive in drives]
    return [_column(actor.param(field, names), column, sign=sign, low=0.0)] if drives else []


def _gains(actor: ActorProperties, servos: Sequence[Drive], column: int) -> list[Quantity]:
    """Return the gain of servos, which is in the first gain column and, negated, in a bias column."""
    gains = _drive_column(actor, servos, "actuator_gainprm", 0)
    biases = _drive_column(actor, servos, "actuator_biasprm", column, sign=-1.0)

    def write(value: Tensor, where: Bool[Tensor, " envs"]) -> None:
        for quantity in (*gains, *biases):
            quantity.write(value, where)

    return [Quantity(gain.default, write, low=0.0) for gain in gains]


def _undriven(
    actor: ActorProperties, elements: Sequence[str] | None, drives: Sequence[Drive], field: str
) -> list[Quantity]:
    """Return a field of the joints that have no actuator in `drives`."""
    driven = {drive.joint for drive in drives}
    joints = [joint for joint in actor.joints(elements) if joint not in driven]
    return _field(field)(actor, joints) if joints else []


def _stiffness(actor: ActorProperties, elements: Sequence[str] | None) -> list[Quantity]:
    """Return the stiffness [N m/rad or N/m]: kp of position servos, else the joint's spring."""
    model, drives = actor.model, actor.drives(elements)
    servos = [drive for drive in drives if _servo_column(model, drive.index) == 1]
    motors = [drive for drive in drives if is_dc_servo(model, drive.index, STIFFNESS)]
    return [
        *_gains(actor, servos, 1),
        *_drive_column(actor, motors, "actuator_gainprm", STIFFNESS),
        *_undriven(actor, elements, [*servos, *motors], "jnt_stiffness"),
    ]


def _damping(actor: ActorProperties, elements: Sequence[str] | None) -> list[Quantity]:
    """Return the damping [N m s/rad or N s/m]: kv of servos with damping, else the joint's damping."""
    model, drives = actor.model, actor.drives(elements)
    positions = [drive for drive in drives if _servo_column(model, drive.index) == 1]
    damped = [drive for drive in positions if model.actuator_biasprm[drive.index, 2] != 0.0]
    servos = [drive for drive in drives if _servo_column(model, drive.index) == 2]
    motors = [drive for drive in drives if is_dc_servo(model, drive.index, DAMPING)]
    return [
        *_drive_column(actor, damped, "actuator_biasprm", 2, sign=-1.0),
        *_gains(actor, servos, 2),
        *_drive_column(actor, motors, "actuator_gainprm", DAMPING),
        *_undriven(actor, elements, [*damped, *servos, *motors], "dof_damping"),
    ]


def _in_proportion(actor: ActorProperties, field: str, drives: list[Drive], effort: NDArray[np.float64]) -> Quantity:
    """Return actuator efforts [N m or N] as a quantity; writing it scales a parameter in proportion."""
    param = actor.param(field, [drive.name for drive in drives])
    default = torch.as_tensor(effort, dtype=torch.float32).to(actor.sim.device)

    def write(value: Tensor, where: Bool[Tensor, " envs"]) -> None:
        ratio = torch.where(default > 0.0, value / default, 1.0)
        param.set(ratio[..., None] * param.default, where)

    return Quantity(default, write, low=0.0)


def _effort(actor: ActorProperties, elements: Sequence[str] | None) -> list[Quantity]:
    """Return the maximum effort on joints [N m or N], set by an actuator's force range, else by a motor's gear."""
    model, drives = actor.model, actor.drives(elements)
    limited = [drive for drive in drives if model.actuator_forcelimited[drive.index]]
    motors = [drive for drive in drives if not model.actuator_forcelimited[drive.index]]
    for drive in motors:
        if (model.actuator_gaintype[drive.index], model.actuator_biastype[drive.index]) != (_FIXED_GAIN, _NO_BIAS):
            problem = f"actuator {drive.name!r} has no force limit: it is not a motor and has no forcerange"
            raise TaskError(problem, hint="Set a forcerange in the MJCF")
    quantities = []
    if limited:
        ids = [drive.index for drive in limited]
        effort = abs(model.actuator_forcerange[ids]).max(axis=1) * abs(model.actuator_gear[ids, 0])
        quantity = _in_proportion(actor, "actuator_forcerange", limited, effort)
        quantities.append(_with_stall(actor, limited, quantity))
    if motors:
        ids = [drive.index for drive in motors]
        controls = model.actuator_ctrladr[ids]  # a motor has one control
        control = abs(model.actuator_ctrlrange[controls]).max(axis=1)
        control[model.actuator_ctrllimited[controls] == 0] = 1.0
        effort = control * abs(model.actuator_gainprm[ids, 0]) * abs(model.actuator_gear[ids, 0])
        quantities.append(_in_proportion(actor, "actuator_gear", motors, effort))
    if not quantities:
        raise TaskError(f"{actor.name!r} has no actuators on these joints")
    return quantities


def _with_stall(actor: ActorProperties, limited: list[Drive], effort: Quantity) -> Quantity:
    """Make the stall effort of DC motors scale with their effort limits."""
    columns = [column for column, drive in enumerate(limited) if is_dc_motor(actor.model, drive.index)]
    if not columns:
        return effort
    resistance = _column(actor.param("actuator_gainprm", [limited[column].name for column in columns]), RESISTANCE)

    def write(value: Tensor, where: Bool[Tensor, " envs"]) -> None:
        effort.write(value, where)
        ratio = (value / effort.default)[:, columns].clamp(min=1e-6)
        resistance.write(resistance.default / ratio, where)

    return Quantity(effort.default, write, low=0.0)


def _delay(actor: ActorProperties, elements: Sequence[str] | None) -> list[Quantity]:
    """Return the delays of delayed actuators [s], each from 0 to its `max_delay`."""
    late = [drive.name for drive in actor.drives(elements) if actor.model.actuator_history[drive.index, 0]]
    if not late:
        raise TaskError(f"{actor.name!r} has no delayed actuators", hint="Try scene.add_actuators(..., max_delay=...)")
    return [_column(actor.param("actuator_delay", late), low=0.0)]


def _limit(column: int) -> GetQuantities:
    """Return the lookup of lower or upper joint limits [rad or m]; drawn limits never cross the middle of the range."""

    def find(actor: ActorProperties, elements: Sequence[str] | None) -> list[Quantity]:
        param = actor.param("jnt_range", elements)
        middle = param.default.mean(dim=1)
        return [_column(param, column, low=middle if column else None, high=None if column else middle)]

    return find


class Inertia(Stateful):
    """Mass and inertia of an actor's bodies. Inertia scales with mass, and with a separate factor, `spread`."""

    def __init__(self, actor: ActorProperties) -> None:
        names, prefix = actor.sim.articulation(actor.name).body_names, actor.sim.scene.prefix(actor.name)
        self.names = [name for name in names if actor.model.body(f"{prefix}{name}").mass[0] > 0.0]
        self._owner, self._param = actor.name, actor.param
        self._inertia = actor.param("body_inertia", self.names)
        self.density = torch.ones(actor.sim.num_envs, len(self.names), device=actor.sim.device)  # mass / model's mass
        self.spread = torch.ones_like(self.density)

    def mass(self, elements: Sequence[str] | None) -> Quantity:
        """Return the masses of bodies [kg]; raise TaskError for a body without mass."""
        names, columns = self._find(elements)
        param = self._param("body_mass", names)

        def write(value: Tensor, where: Bool[Tensor, " envs"]) -> None:
            param.set(value, where)
            self._scale(self.density, columns, value / param.default, where)

        return Quantity(param.default, write, low=LEAST_MASS * param.default)

    def factor(self, elements: Sequence[str] | None) -> Quantity:
        """Return the inertia factors `spread`; raise TaskError for a body without mass."""
        _, columns = self._find(elements)
        default = torch.ones(len(columns), device=columns.device)
        return Quantity(default, lambda value, where: self._scale(self.spread, columns, value, where), low=LEAST_MASS)

    def _scale(self, factor: Tensor, columns: Tensor, value: Tensor, where: Bool[Tensor, " envs"]) -> None:
        old = factor.index_select(1, columns)
        factor.index_copy_(1, columns, torch.where(where[:, None], value, old))
        self._inertia.set((self.density * self.spread)[..., None] * self._inertia.default, where)

    def _find(self, elements: Sequence[str] | None) -> tuple[list[str], Tensor]:
        for name in elements or []:
            if name not in self.names:
                raise TaskError(f"{self._owner!r} has no body {name!r} with mass", hint=available(name, self.names))
        names = list(self.names if elements is None else elements)
        columns = [self.names.index(name) for name in names]
        return names, torch.tensor(columns, dtype=torch.int64, device=self.density.device)


def scene_quantity(param: Param) -> Quantity:
    """Return the quantity for gravity, `PICTURES` or geom colours. Directions are normalised; alpha is unchanged."""
    if param.name in ("cam_quat", "light_dir"):
        return Quantity(param.default, lambda value, where: param.set(normalize(value, dim=-1), where))
    if param.name in ("mat_rgba", "geom_rgba"):
        alpha = param.default[..., 3:]

        def write(value: Tensor, where: Bool[Tensor, " envs"]) -> None:
            param.set(torch.cat([value, alpha.expand(*value.shape[:-1], 1)], dim=-1), where)

        return Quantity(param.default[..., :3], write, low=0.0, high=1.0)
    low, high = _LIMITS.get(param.name, (None, None))
    return Quantity(param.default, param.set, low, high)


_LIMITS = {"cam_fovy": (1.0, 179.0), "light_ambient": (0.0, 1.0), "light_diffuse": (0.0, 1.0)}
PICTURES = [name for name, field in FIELDS.items() if field.pictures and field.of != "geom"]
"""`Sim.param` names of camera, light and material properties."""

SECTIONS: dict[str, dict[str, GetQuantities]] = {
    "dof_properties": {
        "stiffness": _stiffness,
        "damping": _damping,
        "effort": _effort,
        "friction": _field("dof_frictionloss"),
        "armature": _field("dof_armature"),
        "delay": _delay,
        "lower": _limit(0),
        "upper": _limit(1),
    },
    "rigid_body_properties": {
        "mass": lambda actor, elements: [actor.inertia.mass(elements)],
        "inertia": lambda actor, elements: [actor.inertia.factor(elements)],
        "com": _field("body_ipos", low=None),
    },
    "rigid_shape_properties": {
        "friction": _field("geom_friction", 0, low=LEAST_FRICTION),
        "torsion_friction": _field("geom_friction", 1, low=LEAST_FRICTION),
        "rolling_friction": _field("geom_friction", 2, low=LEAST_FRICTION),
        "color": lambda actor, elements: [scene_quantity(actor.param("geom_rgba", elements))],
    },
    "tendon_properties": {"stiffness": _field("tendon_stiffness"), "damping": _field("tendon_damping")},
}
"""Properties of an actor, by section and key in the yaml."""

UNSUPPORTED = {
    "velocity": "not supported: MuJoCo does not limit joint velocities. Try damping",
    "restitution": "not supported; in MuJoCo, solref in the MJCF sets how contacts bounce. Remove this key",
    "compliance": "not supported; in MuJoCo, solref and solimp in the MJCF set contact compliance. Remove this key",
    "contact_offset": "not supported; MuJoCo uses geom margins in the MJCF instead. Remove this key",
    "rest_offset": "not supported: MuJoCo has no rest offset. Remove this key",
    "thickness": "not supported: MuJoCo has no shape thickness. Remove this key",
    "filter": "not supported; collision filters are set in the MJCF. Remove this key",
    "scale": "not supported: bodies cannot be resized at run time. Try mass, inertia and com of rigid_body_properties",
}
"""IsaacGym properties that MuJoCo cannot randomise, with the reason and an alternative."""
