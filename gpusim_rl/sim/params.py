"""Physical parameters with per-world values: masses, friction, gains, gravity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.errors import TaskError, available
from gpusim_rl.sim.actuators import has_steps, whole_steps
from gpusim_rl.sim.masks import columns, read_columns, write_columns, write_where
from gpusim_rl.sim.scene import Scene


@dataclass(frozen=True, slots=True)
class Field:
    """Field of `MjModel` that can have per-world values."""

    of: Literal["body", "geom", "joint", "dof", "actuator", "tendon", "world", "camera", "light", "material"]
    """Kind of element that owns a row."""
    constants: bool = False  # whether MuJoCo derives constants from it
    pictures: bool = False  # whether only rendering depends on it


FIELDS = {
    "body_mass": Field("body", constants=True),  # kg
    "body_inertia": Field("body", constants=True),  # kg m^2, along the axes of the body's inertial frame
    "body_ipos": Field("body", constants=True),  # m, centre of mass in the body's frame
    "geom_friction": Field("geom"),  # sliding [-], torsional [m], rolling [m]
    "dof_damping": Field("dof"),  # N m s/rad or N s/m
    "dof_armature": Field("dof", constants=True),  # kg m^2 or kg
    "dof_frictionloss": Field("dof"),  # N m or N
    "jnt_stiffness": Field("joint"),  # N m/rad or N/m
    "jnt_range": Field("joint"),  # rad or m, lower and upper; only where the joint has limits
    "actuator_gainprm": Field("actuator"),
    "actuator_biasprm": Field("actuator"),
    "actuator_forcerange": Field("actuator"),  # N m or N, lower and upper; only where the actuator has limits
    "actuator_gear": Field("actuator", constants=True),
    "actuator_delay": Field("actuator"),  # s, see `whole_steps`; only for actuators with a delay or `max_delay`
    "tendon_stiffness": Field("tendon"),  # N/m
    "tendon_damping": Field("tendon"),  # N s/m
    "gravity": Field("world"),  # m/s^2
    "cam_pos": Field("camera", pictures=True),  # m, in the frame of the body that carries it
    "cam_quat": Field("camera", pictures=True),  # wxyz, in that frame
    "cam_fovy": Field("camera", pictures=True),  # degrees
    "light_pos": Field("light", pictures=True),  # m, in the frame of the body that carries it
    "light_dir": Field("light", pictures=True),  # unit vector, in that frame
    "light_ambient": Field("light", pictures=True),  # red, green, blue, from 0 to 1
    "light_diffuse": Field("light", pictures=True),
    "mat_rgba": Field("material", pictures=True),  # red, green, blue, which multiply the texture; alpha is 0 or 1
    "geom_rgba": Field("geom", pictures=True),  # like mat_rgba; values other than MuJoCo's default override it
}
"""Parameters by their name in MuJoCo's model, with units."""

GROUND = "ground"  # pseudo-articulation: the geoms fixed to the world

_OF_SCENE = {"camera": "ncam", "light": "nlight", "material": "nmat"}  # kind -> count in the model
_FORCE = "actuator_forcelimited"
LIMITED = {"jnt_range": "jnt_limited", "actuator_forcerange": _FORCE, "actuator_delay": "actuator_history"}


class Param:
    """Parameter of selected elements, with separate values per world; created by `Sim.param`.

    Attributes:
        name: Field, one of `FIELDS`.
        elements: Names along the second dimension; empty for gravity.
        default: Values in the model, shape [elements, ...]; [3] for gravity.
    """

    def __init__(
        self,
        name: str,
        elements: list[str],
        default: Tensor,
        selected: slice | Tensor,
        values: Tensor,
        changed: Callable[[Bool[Tensor, " envs"]], None],
    ) -> None:
        self.name, self.elements, self.default = name, elements, default
        self._columns, self._values, self._changed = selected, values, changed
        self.prepare: Callable[[Tensor], Tensor] | None = None  # transform of written values

    @property
    def value(self) -> Float[Tensor, "envs ..."]:
        """Copy of the current values, shape [num_envs, elements, ...]; [num_envs, 3] for gravity."""
        return read_columns(self._values, self._columns).to(torch.float32, copy=True)

    def set(self, value: Float[Tensor, "envs ..."], where: Bool[Tensor, " envs"], column: int | None = None) -> None:
        """Set values in the masked worlds; derived constants update at the next refresh or step.

        `value` has the shape of `Param.value`, without the last dimension if `column` selects one component.
        """
        value = value if self.prepare is None else self.prepare(value)
        values = self._values if column is None else self._values[..., column]
        target = read_columns(values, self._columns)
        write_where(where.view(-1, *[1] * (value.ndim - 1)), value.to(target.dtype), target)
        if not isinstance(self._columns, slice):  # `target` is a copy
            write_columns(values, self._columns, target)
        self._changed(where)


class Params:
    """Per-world fields of one simulator.

    `expand` gives each world its own copy of a field and returns a view of it, [num_envs, rows, ...] or [num_envs, 3];
    `changed` is called with a field and a mask of the worlds in which it was written.
    """

    def __init__(
        self,
        scene: Scene,
        device: torch.device,
        expand: Callable[[str], Tensor],
        changed: Callable[[str, Bool[Tensor, " envs"]], None],
    ) -> None:
        self._scene, self._device, self._expand, self._changed = scene, device, expand, changed
        self.values: dict[str, Tensor] = {}
        """Views returned by `expand`, by field."""

    def find(self, name: str, articulation: str | None, elements: Sequence[str] | None) -> Param:
        """Return a parameter; see `Sim.param`."""
        if name not in FIELDS:
            raise TaskError(f"no parameter {name!r}", key="sim.param", hint=available(name, FIELDS))
        ids, names = find_elements(self._scene, name, articulation, elements)
        if name not in self.values:
            self.values[name] = self._expand(name)
        selected = slice(None) if FIELDS[name].of == "world" else columns(ids, self._device)
        default = torch.as_tensor(model_values(self._scene.model, name), dtype=torch.float32).to(self._device)
        changed = partial(self._changed, name)
        param = Param(name, names, default[selected], selected, self.values[name], changed)
        if name == "actuator_delay":
            held = torch.from_numpy(has_steps(self._scene.model)[ids]).to(self._device)
            dt = float(self._scene.model.opt.timestep)
            param.prepare = lambda value: torch.where(held, whole_steps(value, dt), value)
        return param

    def state_dict(self) -> dict[str, Tensor]:
        """Return the values of all per-world fields."""
        return {name: value.clone() for name, value in self.values.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore per-world fields that were saved; other fields keep their values."""
        for name, value in self.values.items():
            if name in state:
                value.copy_(state[name])


def model_values(model: mujoco.MjModel, name: str) -> np.ndarray:
    """Return a field's array from the compiled model."""
    return model.opt.gravity if name == "gravity" else getattr(model, name)


def find_elements(
    scene: Scene, name: str, articulation: str | None, elements: Sequence[str] | None
) -> tuple[list[int], list[str]]:
    """Return a field's rows in MuJoCo's model and the name of each row's element; raise TaskError for unknown names."""
    kind, model, label = FIELDS[name].of, scene.model, f"sim.param({name!r})"
    if kind == "world":
        if articulation is not None or elements is not None:
            raise TaskError("applies to the whole world; omit articulation and elements", key=label)
        return [], []
    if kind in _OF_SCENE:
        if articulation is not None:
            raise TaskError(f"applies to the scene, not to {articulation!r}", key=label, hint="Pass only `elements`")
        numbers = range(getattr(model, _OF_SCENE[kind]))
        rows = {getattr(model, kind)(i).name or f"{kind}{i}": [i] for i in numbers}
        owner, part, lacking = "the scene", kind, f"{kind}s"
    else:
        known = [*scene.articulation_names, *([GROUND] if kind == "geom" else [])]
        if articulation not in known:
            problem = "requires an articulation" if articulation is None else f"no articulation {articulation!r}"
            raise TaskError(problem, key=label, hint=available(articulation or "", known))
        label, owner = f"sim.param({name!r}, {articulation!r})", repr(articulation)
        if kind == "geom":
            rows, part = _geoms(scene, articulation, FIELDS[name].pictures), "body with geoms"
            lacking = "geoms" if FIELDS[name].pictures else "geoms that can touch anything"
        else:  # by an element's name in its own file
            part = "joint" if kind == "dof" else kind
            rows = {key: [i] for key, i in scene.elements_of(articulation, part).items()}
            rows = {key: model.jnt_dofadr[ids].tolist() for key, ids in rows.items()} if kind == "dof" else rows
            lacking = f"{'bodies' if part == 'body' else part + 's'} with a {name}"
    if elements is not None:
        for element in (element for element in elements if element not in rows):
            raise TaskError(f"no {part} {element!r}", key=label, hint=available(element, rows))
        rows = {element: rows[element] for element in elements}
    if name in LIMITED:
        has = getattr(model, LIMITED[name]).reshape(len(model_values(model, name)), -1)[:, 0]
        free = [key for key, ids in rows.items() if not has[ids].all()]
        if elements is not None and free:
            limits, delay = ("limits", "adding a range in the MJCF"), ("delay", "scene.add_actuators(max_delay=...)")
            lack, fix = delay if name == "actuator_delay" else limits
            raise TaskError(f"{part} {free[0]!r} has no {lack}", key=label, hint=f"Try {fix}")
        rows = {key: ids for key, ids in rows.items() if key not in free}
    if not rows:
        raise TaskError(f"{owner} has no {lacking}", key=label)
    names = [key for key, ids in rows.items() for _ in ids]
    return [row for ids in rows.values() for row in ids], names


def _geoms(scene: Scene, articulation: str, pictures: bool) -> dict[str, list[int]]:
    """Return ids of colliding geoms (all geoms if `pictures`) by body name; the ground's name is `ground`."""
    model, prefix, bodies = scene.model, scene.prefix(articulation), set(scene.bodies_of(articulation))
    ground = articulation == GROUND and GROUND not in scene.articulation_names
    rows: dict[str, list[int]] = {}
    for i in range(model.ngeom):
        body = int(model.geom_bodyid[i])
        selected = body == 0 if ground else body in bodies
        if selected and (pictures or model.geom_contype[i] or model.geom_conaffinity[i]):
            rows.setdefault(GROUND if ground else model.body(body).name.removeprefix(prefix), []).append(i)
    return rows
