"""`sim=mjwarp`: MuJoCo Warp, on CUDA or on Warp's CPU device."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.config import SimConfig
from gpusim_rl.errors import ConfigError
from gpusim_rl.sim.articulation import MujocoArticulation
from gpusim_rl.sim.constants import Constants, constants_of, uses_gear
from gpusim_rl.sim.interface import not_finite
from gpusim_rl.sim.mujoco import MAX_STATE
from gpusim_rl.sim.option import ON_WARP, limit_solver
from gpusim_rl.sim.params import FIELDS, Param, Params
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.warp import WarpGraphs

REQUIREMENT = "mujoco-warp>=4.0,<5"  # as in pyproject.toml
if not hasattr(mjw, "SetConstGroup"):  # new in 4.0
    raise ConfigError(f"mujoco-warp {version('mujoco-warp')} is too old; try: pip install '{REQUIREMENT}'")

# What `step` depends on: continuing from these arrays is continuing the simulation.
STATE = (
    "time",
    "qpos",
    "qvel",
    "act",
    "history",
    "plastic",
    "qacc_warmstart",
    "ctrl",
    "qfrc_applied",
    "xfrc_applied",
    "eq_active",
    "mocap_pos",
    "mocap_quat",
    "userdata",
    "overflow",
)
# Arrays that follow the state and that a task may read.
DERIVED = ("xpos", "xquat", "xipos", "ximat", "xanchor", "xaxis", "cvel", "subtree_com")

_Overflow = mjw.OverflowType
# Contacts or constraint rows were dropped. The other bits tell of a solver that stopped early, or
# of sensors.
DROPPED = int(
    _Overflow.NEFC
    | _Overflow.NJMAX_NNZ
    | _Overflow.BROADPHASE
    | _Overflow.NARROWPHASE
    | _Overflow.CCD
    | _Overflow.HFIELD
    | _Overflow.NVMAX
    | _Overflow.EPA_HORIZON
)


class MjwarpSim:
    """`num_envs` worlds on one device; see `gpusim_rl.sim.Sim`.

    The tensors are views of MuJoCo Warp's own arrays: nothing is copied. Step, reset and refresh
    are Warp graphs, captured at their first use; no call synchronises with the device.

    MuJoCo Warp has no masked forward pass: where a task reads body poses, `refresh` computes those of
    all worlds. Sensors cost nothing there: they tell of the last step.
    """

    name = "mjwarp"

    def __init__(self, scene: Scene, num_envs: int, cfg: SimConfig, device: torch.device) -> None:
        self.scene = scene
        self.num_envs = num_envs
        self.device = device
        model = scene.model
        self.dt = float(model.opt.timestep)
        self._graphs = WarpGraphs(device, cfg.graph)

        rows, contacts = estimate_buffers(model)
        with self._graphs.scope():
            try:
                self._model = mjw.put_model(model)
            except (NotImplementedError, ValueError) as error:
                raise ConfigError(
                    f"sim=mjwarp cannot simulate this scene: {str(error).splitlines()[0]}; try sim=mujoco"
                ) from None
            limit_solver(self._model.opt, model.opt, cfg, ON_WARP)
            # A kernel that prints serialises the device; overflow is reported by mask instead.
            self._model.opt.warn_overflow = False
            rows, contacts = cfg.njmax or scene.njmax or rows, cfg.nconmax or contacts
            self.buffers = f"sim.njmax={rows} sim.nconmax={contacts}"
            self._data = mjw.make_data(model, nworld=num_envs, njmax=rows, nconmax=contacts)
            self._reset_where = wp.zeros(num_envs, dtype=wp.bool)
            self._stale_where = wp.zeros(num_envs, dtype=wp.bool)

        data = self._data
        self.qpos, self.qvel = self._view(data.qpos), self._view(data.qvel)
        self.ctrl, self.qfrc_applied = self._view(data.ctrl), self._view(data.qfrc_applied)
        self.xfrc_applied = self._view(data.xfrc_applied)
        self._used = {"ctrl"}
        self._overflow = self._view(data.overflow)
        self._reset_mask = wp.to_torch(self._reset_where)

        self.sensordata = self._view(data.sensordata)
        self._derived = {field: self._view(getattr(data, field)) for field in DERIVED}
        self._derives = False

        self._written = torch.ones(num_envs, dtype=torch.bool, device=device)
        self._written_on_host = self._written.numpy() if device.type == "cpu" else None
        self._diverged = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._params = Params(scene, device, self._expand, self._wrote_param)
        self._new_friction: set[int] = set()  # joints that may get dry friction, and have none in the model
        # What is derived from parameters. Each world has its own of these when the first such parameter is its own.
        self._constants: dict[str, Tensor] = {}
        self._derivation: Constants | None = None
        self._stale = wp.to_torch(self._stale_where)  # worlds whose parameters were written since
        self._stale_on_host = self._stale.numpy() if device.type == "cpu" else None
        self._wrote = False  # whether any were, as far as it is known before any data
        self._graphs.synchronize()
        self.refresh()

    def articulation(self, name: str) -> MujocoArticulation:
        return MujocoArticulation(self, name)

    def param(self, name: str, articulation: str | None = None, elements: Sequence[str] | None = None) -> Param:
        found = self._params.find(name, articulation, elements)
        if name == "dof_frictionloss":
            self._check_friction_rows(found)
        return found

    def _expand(self, field: str) -> Tensor:
        values = self._expand_array(self._model.opt if field == "gravity" else self._model, field)
        if self._derivation is None and self._has_constants(field):
            for name in constants_of(self.scene.model):
                self._constants[name] = self._expand_array(self._model, name)
            with self._graphs.scope():
                self._derivation = Constants(self.scene.model, self._model, self._stale_where)
        self._graphs.clear()  # they have captured the shared arrays
        self._graphs.synchronize()
        return values

    def _expand_array(self, owner: Any, name: str) -> Tensor:
        shared = getattr(owner, name)
        with self._graphs.scope():
            own = wp.empty((self.num_envs, *shared.shape[1:]), dtype=shared.dtype)
        self._graphs.synchronize()
        values = wp.to_torch(own)
        values.copy_(wp.to_torch(shared).expand_as(values))
        setattr(owner, name, own)
        return values

    def _check_friction_rows(self, friction: Param) -> None:
        # Each joint with dry friction takes a row of the constraints, whose number was fixed without it.
        assert friction.rows is not None
        without = (friction.default == 0.0).tolist()
        self._new_friction.update(row for row, new in zip(friction.rows, without, strict=True) if new)
        rows = estimate_buffers(self.scene.model, len(self._new_friction))[0]
        if self._new_friction and rows > self._data.njmax:
            raise ConfigError(
                f"sim=mjwarp has {self._data.njmax} constraint rows per world, too few for dry friction in"
                f" {len(self._new_friction)} more joints; try sim.njmax={rows}"
            )

    def _has_constants(self, field: str) -> bool:
        if field == "actuator_gear" and not uses_gear(self.scene.model):
            return False
        return FIELDS[field].constants

    def _wrote_param(self, field: str, where: Bool[Tensor, " envs"]) -> None:
        if self._has_constants(field):
            self._stale |= where
            self._wrote = True
            self.wrote_state(where)  # bodies' centres of mass follow too

    def _derive_constants(self) -> None:
        if not self._wrote:
            return
        assert self._derivation is not None
        self._wrote = False
        if self._stale_on_host is None or self._stale_on_host.any():  # a shortcut for the CPU only
            self._graphs.run("constants", self._derivation.derive)

    def _view(self, array: wp.array) -> Tensor:
        if array.size:
            return wp.to_torch(array)
        return torch.zeros(array.shape, device=self.device)  # Warp has no memory to show for it

    def derived(self, field: str) -> Tensor:
        if not self._derives:
            self._derives = True
            self._written.fill_(True)
            self.refresh()
        return self._derived[field]

    def uses(self, field: str) -> None:
        self._used.add(field)

    def wrote_state(self, where: Bool[Tensor, " envs"]) -> None:
        if self._written_on_host is not None:  # else `refresh` does not ask
            self._written |= where

    @property
    def diverged(self) -> Bool[Tensor, " envs"]:
        return self._diverged

    @property
    def bad_inputs(self) -> Bool[Tensor, " envs"]:
        return not_finite(getattr(self, field) for field in self._used)

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        return (self._overflow & DROPPED) != 0

    def step(self, substeps: int) -> None:
        self._derive_constants()
        self._graphs.run(("step", substeps), lambda: self._step(substeps))
        self.scene.limit_rotation(self.qvel)
        if self._derives:
            self._graphs.run("follow", self._follow)
        self._followed()
        # amax hands NaN on, and a comparison with NaN is false
        fastest = torch.cat([self.qpos, self.qvel], dim=1).abs_().amax(dim=1)
        torch.logical_not(fastest < MAX_STATE, out=self._diverged)

    def _step(self, substeps: int) -> None:
        for _ in range(substeps):
            mjw.step(self._model, self._data)

    def _follow(self) -> None:
        # MuJoCo's step leaves derived quantities at the state before its integration.
        mjw.kinematics(self._model, self._data)
        mjw.com_pos(self._model, self._data)
        mjw.com_vel(self._model, self._data)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        self._reset_mask.copy_(where)
        self._graphs.run("reset", self._reset)
        self.wrote_state(where)

    def _reset(self) -> None:
        mjw.reset_data(self._model, self._data, self._reset_where)

    def refresh(self) -> None:
        self._derive_constants()
        if not self._derives:
            return  # nothing follows the state, and this is known before any data
        if self._written_on_host is not None and not self._written_on_host.any():
            return  # a shortcut for the CPU only, where a mask is read at no cost
        self._graphs.run("follow", self._follow)
        self._followed()

    def _followed(self) -> None:
        if self._written_on_host is not None:
            self._written.zero_()

    def scene_qpos(self) -> Float[Tensor, "envs nq"]:
        return self.qpos

    def _state(self) -> dict[str, Tensor]:
        arrays = {name: getattr(self._data, name) for name in STATE}
        return {name: wp.to_torch(array) for name, array in arrays.items() if array.size}

    def state_dict(self) -> dict[str, Any]:
        self._derive_constants()
        state = {name: value.clone() for name, value in self._state().items()}
        own = {"sensordata": self.sensordata, "written": self._written, "diverged": self._diverged}
        return {
            "state": state,
            "own": {name: value.clone() for name, value in own.items()},
            "params": self._params.state_dict(),
            "constants": {name: value.clone() for name, value in self._constants.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._state().items():
            value.copy_(state["state"][name])
        self._params.load_state_dict(state.get("params", {}))
        for name, value in self._constants.items():
            if name in state.get("constants", {}):
                value.copy_(state["constants"][name])
        self._written.fill_(True)
        self.refresh()  # body poses
        self.sensordata.copy_(state["own"]["sensordata"])
        self._written.copy_(state["own"]["written"])
        self._diverged.copy_(state["own"]["diverged"])

    def close(self) -> None:
        """Frees the graphs; the simulation cannot be used afterwards."""
        self._graphs.close()


# Contacts that a plane makes with a geom of each type; with the others up to four.
_PLANE_CONTACTS = {
    mujoco.mjtGeom.mjGEOM_SPHERE.value: 1,
    mujoco.mjtGeom.mjGEOM_CAPSULE.value: 2,
    mujoco.mjtGeom.mjGEOM_ELLIPSOID.value: 1,
}


def estimate_buffers(model: mujoco.MjModel, more_rows: int = 0) -> tuple[int, int]:
    """Constraint rows and contacts to allocate per world, for a scene that nobody has measured.

    A few geoms may touch the ground with all the contacts that they can have, many geoms only with
    half of them; of the geoms that can touch each other only some do at a time. This is more than
    twice what Ant needs when it is thrown around. Rows are a limit for each world; contacts, and
    the candidate pairs that share their buffer, are pooled over all worlds.

    Args:
        model: The scene's.
        more_rows: Rows for what the model does not have.
    """
    plane, hfield = mujoco.mjtGeom.mjGEOM_PLANE.value, mujoco.mjtGeom.mjGEOM_HFIELD.value
    wants, accepts = model.geom_contype, model.geom_conaffinity
    body = model.body_weldid[model.geom_bodyid]
    touch = ((wants[:, None] & accepts) | (wants & accepts[:, None])) != 0
    touch &= body[:, None] != body
    is_plane, is_hfield = model.geom_type == plane, model.geom_type == hfield
    most = np.array([_PLANE_CONTACTS.get(kind, 4) for kind in model.geom_type.tolist()])
    ground = int((touch[is_plane] * most).sum() + 4 * (touch[is_hfield] * most).sum())
    near = int(touch[:, ~(is_plane | is_hfield)].any(axis=1).sum())
    contacts = min(ground, 8 + ground // 2) + min(near, 6 + near // 4) + 4 * model.npair

    dims = [*model.geom_condim[touch.any(axis=1)].tolist(), *model.pair_dim.tolist()]
    dim = max(dims, default=1)
    pyramidal = model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL.value
    rows = contacts * (2 * (dim - 1) if pyramidal and dim > 1 else dim)
    for flags in (
        model.jnt_limited,
        model.tendon_limited,
        model.dof_frictionloss,
        model.tendon_frictionloss,
    ):
        rows += int(np.count_nonzero(flags))
    rows += 6 * model.neq + more_rows  # a weld has the most
    return _round_up(rows), _round_up(contacts)


def _round_up(number: int, multiple: int = 16) -> int:
    return max(multiple, -(-number // multiple) * multiple)
