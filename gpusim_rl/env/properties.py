"""Maps IsaacGym's properties of joints, bodies, shapes and tendons to quantities of MuJoCo that can be randomised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mujoco
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env.task import TaskPart
from gpusim_rl.errors import TaskError, did_you_mean
from gpusim_rl.sim import Param, Sim
from gpusim_rl.sim.actuators import DAMPING, RESISTANCE, STIFFNESS, is_dc_motor, is_dc_servo

LEAST_MASS = 0.01
"""Lower limit of drawn mass and inertia, as a share of the model's."""
LEAST_FRICTION = 1e-5
"""Lower limit of drawn sliding, torsional and rolling friction: MuJoCo's `mjMINMU`."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A physical quantity of some elements: the model's values, and a function that writes others."""

    default: Float[Tensor, "..."]
    """The model's values, shape [elements] or [elements, 3]; [3] for gravity."""
    write: Callable[[Tensor, Bool[Tensor, " envs"]], None]
    """Writes values, shape [num_envs, *default.shape], into the envs of a mask, bool [num_envs]."""
    low: Tensor | float | None = None
    """Lower limit of drawn values; None = no limit."""
    high: Tensor | float | None = None
    """Upper limit of drawn values; None = no limit."""


class Actor(TaskPart):
    """An articulation (or the ground), whose properties can be randomised.

    Args:
        sim: The simulator.
        name: Name of the articulation, or `GROUND`.
    """

    def __init__(self, sim: Sim, name: str) -> None:
        self.sim = sim
        self.name = name
        self.inertia: Inertia | None = None  # made at first use; mass and inertia share it

    def quantities(self, section: str, name: str, elements: Sequence[str] | None) -> list[Quantity]:
        """Returns MuJoCo's quantities for a property of the schema.

        Args:
            section: One of `SECTIONS`.
            name: One of the section's properties.
            elements: Names of bodies, joints or tendons; None = all.

        Raises:
            TaskError: An element does not exist, or has no such property.
        """
        return SECTIONS[section][name](self, elements)

    def param(self, field: str, elements: Sequence[str] | None) -> Param:
        """Returns a parameter of the simulator for some elements; None = all."""
        return self.sim.param(field, self.name, elements)

    def joints(self, elements: Sequence[str] | None) -> list[str]:
        """Returns names of joints; None = all.

        Raises:
            TaskError: A joint does not exist, or the articulation has no joints.
        """
        known = self.sim.articulation(self.name).joint_names
        for name in elements or []:
            if name not in known:
                raise TaskError(f"{self.name!r} has no joint {name!r}.{did_you_mean(name, known)} It has {known}")
        if not known:
            raise TaskError(f"{self.name!r} has no joints")
        return list(known if elements is None else elements)

    def actuators(self, elements: Sequence[str] | None) -> dict[str, tuple[int, str]]:
        """Returns index in the model and joint of each actuator on these joints, by the actuator's name."""
        model, joints = self.sim.scene.model, self.joints(elements)
        prefix = self.sim.scene.prefix(self.name)
        kinds = (mujoco.mjtTrn.mjTRN_JOINT.value, mujoco.mjtTrn.mjTRN_JOINTINPARENT.value)
        found = {}
        for i in range(model.nactuator):
            joint = model.joint(model.actuator_trnid[i, 0]).name if model.actuator_trntype[i] in kinds else ""
            if joint.startswith(prefix) and joint.removeprefix(prefix) in joints:
                found[model.actuator(i).name.removeprefix(prefix)] = (i, joint.removeprefix(prefix))
        return found

    def tensor(self, values: Any) -> Tensor:
        """Returns values as a float32 tensor on the simulator's device."""
        return torch.as_tensor(values, dtype=torch.float32).to(self.sim.device)


def _column(
    param: Param,
    index: int | None = None,
    *,
    sign: float = 1.0,
    low: Tensor | float | None = None,
    high: Tensor | float | None = None,
) -> Quantity:
    """Returns one column of a parameter; with index None a parameter that has one number per element."""
    if index is None:
        return Quantity(param.default, param.set, low, high)
    return Quantity(
        sign * param.default[..., index],
        lambda value, where: param.set(value if sign == 1.0 else sign * value, where, index),
        low,
        high,
    )


def _in_proportion(param: Param, default: Float[Tensor, " elements"]) -> Quantity:
    """Returns a quantity of one number per element that scales all columns of a parameter."""

    def write(value: Tensor, where: Bool[Tensor, " envs"]) -> None:
        ratio = torch.where(default > 0.0, value / default, 1.0)
        param.set(ratio[..., None] * param.default, where)

    return Quantity(default, write, low=0.0)


# Joints


def _is_position_servo(model: mujoco.MjModel, i: int) -> bool:
    return bool(
        model.actuator_gaintype[i] == mujoco.mjtGain.mjGAIN_FIXED.value
        and model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_AFFINE.value
        and model.actuator_biasprm[i, 1] == -model.actuator_gainprm[i, 0] != 0.0
    )


def _is_velocity_servo(model: mujoco.MjModel, i: int) -> bool:
    return bool(
        model.actuator_gaintype[i] == mujoco.mjtGain.mjGAIN_FIXED.value
        and model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_AFFINE.value
        and model.actuator_biasprm[i, 1] == 0.0
        and model.actuator_biasprm[i, 2] == -model.actuator_gainprm[i, 0] != 0.0
    )


def _is_motor(model: mujoco.MjModel, i: int) -> bool:
    return bool(
        model.actuator_gaintype[i] == mujoco.mjtGain.mjGAIN_FIXED.value
        and model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_NONE.value
    )


def _stiffness(actor: Actor, elements: Sequence[str] | None) -> list[Quantity]:
    """Stiffness [N m/rad or N/m]: kp of position servos; of joints without a servo, their spring."""
    model = actor.sim.scene.model
    drives = actor.actuators(elements)
    servos = {name: joint for name, (i, joint) in drives.items() if _is_position_servo(model, i)}
    motors = {name: joint for name, (i, joint) in drives.items() if is_dc_servo(model, i, STIFFNESS)}
    found = [_gain_and_bias(actor, list(servos), 1)] if servos else []
    found += [_column(actor.param("actuator_gainprm", list(motors)), STIFFNESS, low=0.0)] if motors else []
    driven = {*servos.values(), *motors.values()}
    springs = [joint for joint in actor.joints(elements) if joint not in driven]
    return [*found, *([_column(actor.param("jnt_stiffness", springs), low=0.0)] if springs else [])]


def _damping(actor: Actor, elements: Sequence[str] | None) -> list[Quantity]:
    """Damping [N m s/rad or N s/m]: kv of servos that have it; of other joints, their own damping."""
    model = actor.sim.scene.model
    drives = actor.actuators(elements)
    servos = {
        name: joint
        for name, (i, joint) in drives.items()
        if _is_position_servo(model, i) and model.actuator_biasprm[i, 2] != 0.0
    }
    speeds = {name: joint for name, (i, joint) in drives.items() if _is_velocity_servo(model, i)}
    motors = {name: joint for name, (i, joint) in drives.items() if is_dc_servo(model, i, DAMPING)}
    found = []
    if servos:
        found.append(_column(actor.param("actuator_biasprm", list(servos)), 2, sign=-1.0, low=0.0))
    if speeds:
        found.append(_gain_and_bias(actor, list(speeds), 2))
    if motors:
        found.append(_column(actor.param("actuator_gainprm", list(motors)), DAMPING, low=0.0))
    driven = {*servos.values(), *speeds.values(), *motors.values()}
    damped = [joint for joint in actor.joints(elements) if joint not in driven]
    return [*found, *([_column(actor.param("dof_damping", damped), low=0.0)] if damped else [])]


def _gain_and_bias(actor: Actor, servos: list[str], column: int) -> Quantity:
    """Gain of servos: it stands in the first column of the gains, and negative in a column of the biases."""
    gain = _column(actor.param("actuator_gainprm", servos), 0)
    bias = _column(actor.param("actuator_biasprm", servos), column, sign=-1.0)

    def write(value: Tensor, where: Bool[Tensor, " envs"]) -> None:
        gain.write(value, where)
        bias.write(value, where)

    return Quantity(gain.default, write, low=0.0)


def _effort(actor: Actor, elements: Sequence[str] | None) -> list[Quantity]:
    """Largest force on the joint [N m or N]: the force range of actuators that have one; of motors, their gear."""
    model = actor.sim.scene.model
    limited: dict[str, int] = {}
    motors: dict[str, int] = {}
    for name, (i, _) in actor.actuators(elements).items():
        if model.actuator_forcelimited[i]:
            limited[name] = i
        elif _is_motor(model, i):
            motors[name] = i
        else:
            raise TaskError(f"actuator {name!r} has no forcerange and is no motor; give it a forcerange in the MJCF")
    found = []
    if limited:
        ids = list(limited.values())
        effort = abs(model.actuator_forcerange[ids]).max(axis=1) * abs(model.actuator_gear[ids, 0])
        found.append(_in_proportion(actor.param("actuator_forcerange", list(limited)), actor.tensor(effort)))
        if any(is_dc_motor(model, i) for i in ids):
            found[-1] = _with_stall(actor, limited, found[-1])
    if motors:
        ids = list(motors.values())
        control = abs(model.actuator_ctrlrange[ids]).max(axis=1)
        control[model.actuator_ctrllimited[ids] == 0] = 1.0
        effort = control * abs(model.actuator_gainprm[ids, 0]) * abs(model.actuator_gear[ids, 0])
        found.append(_in_proportion(actor.param("actuator_gear", list(motors)), actor.tensor(effort)))
    if not found:
        raise TaskError(f"{actor.name!r} has no actuators there")
    return found


def _with_stall(actor: Actor, limited: dict[str, int], effort: Quantity) -> Quantity:
    """Effort limits with which the effort of DC motors at standstill goes in proportion."""
    model = actor.sim.scene.model
    motors = [name for name, i in limited.items() if is_dc_motor(model, i)]
    columns = [list(limited).index(name) for name in motors]
    resistance = _column(actor.param("actuator_gainprm", motors), RESISTANCE)

    def write(value: Tensor, where: Bool[Tensor, " envs"]) -> None:
        effort.write(value, where)
        ratio = (value / effort.default)[:, columns].clamp(min=1e-6)
        resistance.write(resistance.default / ratio, where)

    return Quantity(effort.default, write, low=0.0)


def _delay(actor: Actor, elements: Sequence[str] | None) -> list[Quantity]:
    """Delay of actuators [s], from 0 to their `max_delay`."""
    model, drives = actor.sim.scene.model, actor.actuators(elements)
    late = [name for name, (i, _) in drives.items() if model.actuator_history[i, 0]]
    if not late:
        raise TaskError(f"{actor.name!r} has no delays there; give its actuators some: scene.add_actuators(max_delay=)")
    return [_column(actor.param("actuator_delay", late), low=0.0)]


def _lower(actor: Actor, elements: Sequence[str] | None) -> list[Quantity]:
    param = actor.param("jnt_range", elements)
    return [_column(param, 0, high=param.default.mean(dim=1))]  # limits never cross


def _upper(actor: Actor, elements: Sequence[str] | None) -> list[Quantity]:
    param = actor.param("jnt_range", elements)
    return [_column(param, 1, low=param.default.mean(dim=1))]


def _plain(field: str) -> Callable[[Actor, Sequence[str] | None], list[Quantity]]:
    """Returns a property that is a field of the model with one number >= 0 per element."""
    return lambda actor, elements: [_column(actor.param(field, elements), low=0.0)]


# Bodies and shapes


class Inertia(TaskPart):
    """Mass and inertia of an actor's bodies. The inertia follows the mass; a second factor scales it alone.

    Args:
        actor: The actor.

    Attributes:
        names: Bodies that have a mass.
        density: Mass divided by the model's, shape [num_envs, bodies].
        spread: Factor on the inertia alone, shape [num_envs, bodies].
    """

    def __init__(self, actor: Actor) -> None:
        model = actor.sim.scene.model
        names, prefix = actor.sim.articulation(actor.name).body_names, actor.sim.scene.prefix(actor.name)
        self.names = [name for name in names if model.body(f"{prefix}{name}").mass[0] > 0.0]
        self._owner = actor.name
        self._param = actor.param
        self._inertia = actor.param("body_inertia", self.names)
        self.density = torch.ones(actor.sim.num_envs, len(self.names), device=actor.sim.device)
        self.spread = torch.ones_like(self.density)

    def mass(self, elements: Sequence[str] | None) -> Quantity:
        """Returns the masses of bodies [kg]; None = all.

        Raises:
            TaskError: A body does not exist, or has no mass.
        """
        param = self._param("body_mass", self._find(elements))
        columns = self._columns(elements)

        def write(value: Tensor, where: Bool[Tensor, " envs"]) -> None:
            param.set(value, where)
            self._scale(self.density, columns, value / param.default, where)

        return Quantity(param.default, write, low=LEAST_MASS * param.default)

    def inertia(self, elements: Sequence[str] | None) -> Quantity:
        """Returns factors on the inertia of bodies, beside that of their mass; None = all.

        Raises:
            TaskError: A body does not exist, or has no mass.
        """
        columns = self._columns(elements)
        default = torch.ones(len(columns), device=columns.device)
        return Quantity(default, lambda value, where: self._scale(self.spread, columns, value, where), low=LEAST_MASS)

    def _scale(self, factor: Tensor, columns: Tensor, value: Tensor, where: Bool[Tensor, " envs"]) -> None:
        old = factor.index_select(1, columns)
        factor.index_copy_(1, columns, torch.where(where[:, None], value, old))
        self._inertia.set((self.density * self.spread)[..., None] * self._inertia.default, where)

    def _find(self, elements: Sequence[str] | None) -> list[str]:
        for name in elements or []:
            if name not in self.names:
                hint = did_you_mean(name, self.names)
                raise TaskError(f"{self._owner!r} has no body with mass {name!r}.{hint} There are {self.names}")
        return list(self.names if elements is None else elements)

    def _columns(self, elements: Sequence[str] | None) -> Tensor:
        columns = [self.names.index(name) for name in self._find(elements)]
        return torch.tensor(columns, dtype=torch.int64, device=self.density.device)


def _inertia(actor: Actor) -> Inertia:
    if actor.inertia is None:
        actor.inertia = Inertia(actor)
    return actor.inertia


def _centre(actor: Actor, elements: Sequence[str] | None) -> list[Quantity]:
    return [_column(actor.param("body_ipos", elements))]


def _friction(column: int) -> Callable[[Actor, Sequence[str] | None], list[Quantity]]:
    return lambda actor, elements: [_column(actor.param("geom_friction", elements), column, low=LEAST_FRICTION)]


SECTIONS: dict[str, dict[str, Callable[[Actor, Sequence[str] | None], list[Quantity]]]] = {
    "dof_properties": {
        "stiffness": _stiffness,
        "damping": _damping,
        "effort": _effort,
        "friction": _plain("dof_frictionloss"),
        "armature": _plain("dof_armature"),
        "delay": _delay,
        "lower": _lower,
        "upper": _upper,
    },
    "rigid_body_properties": {
        "mass": lambda actor, elements: [_inertia(actor).mass(elements)],
        "inertia": lambda actor, elements: [_inertia(actor).inertia(elements)],
        "com": _centre,
    },
    "rigid_shape_properties": {
        "friction": _friction(0),
        "torsion_friction": _friction(1),
        "rolling_friction": _friction(2),
    },
    "tendon_properties": {
        "stiffness": _plain("tendon_stiffness"),
        "damping": _plain("tendon_damping"),
    },
}
"""Properties of an actor in the schema, by section and name."""

NOT_HERE = {
    "velocity": "MuJoCo does not limit the velocity of joints; try damping",
    "restitution": "MuJoCo's contacts bounce as their solref says, which is the MJCF's; leave it out",
    "compliance": "MuJoCo's contacts give way as their solref and solimp say, which are the MJCF's; leave it out",
    "contact_offset": "MuJoCo has margins of geoms instead, which are the MJCF's; leave it out",
    "rest_offset": "MuJoCo has no distance between resting bodies; leave it out",
    "thickness": "MuJoCo's geoms have no skin; leave it out",
    "filter": "what can touch what is the MJCF's; leave it out",
    "scale": "bodies cannot change their size at run time; try mass, inertia and com of rigid_body_properties",
}
"""Properties that IsaacGym can randomise and MuJoCo cannot, with the reason and an alternative."""
