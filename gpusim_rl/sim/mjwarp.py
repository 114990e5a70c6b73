"""`sim=mjwarp`: MuJoCo Warp, on CUDA or on Warp's CPU device."""

from __future__ import annotations

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
from gpusim_rl.sim.mujoco import MAX_STATE
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.warp import WarpGraphs

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
DERIVED = ("xpos", "xquat", "cvel", "subtree_com")

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

    Contact sensors need a full forward pass at a newly written state, and MuJoCo Warp has no masked
    one: with contact sensors `refresh` costs about as much as one physics step, without them next
    to nothing.
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
            # A kernel that prints serialises the device; overflow is reported by mask instead.
            self._model.opt.warn_overflow = False
            self._data = mjw.make_data(model, nworld=num_envs, njmax=cfg.njmax or rows, nconmax=cfg.nconmax or contacts)
            self._reset_where = wp.zeros(num_envs, dtype=wp.bool)

        data = self._data
        self.qpos, self.qvel = self._view(data.qpos), self._view(data.qvel)
        self.ctrl, self.qfrc_applied = self._view(data.ctrl), self._view(data.qfrc_applied)
        self.xfrc_applied = self._view(data.xfrc_applied)
        self._overflow = self._view(data.overflow)
        self._reset_mask = wp.to_torch(self._reset_where)

        # MuJoCo Warp computes sensors for all worlds at once. Ours keep what acted in the last
        # physics step until their own world is written.
        self._has_sensors = model.nsensordata > 0
        self._sensordata = self._view(data.sensordata)
        self.sensordata = self._sensordata.clone()
        self._derived = {field: self._view(getattr(data, field)) for field in DERIVED}
        self._derives = False

        self._written = torch.ones(num_envs, dtype=torch.bool, device=device)
        self._written_on_host = self._written.numpy() if device.type == "cpu" else None
        self._diverged = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._graphs.synchronize()
        self.refresh()

    def articulation(self, name: str) -> MujocoArticulation:
        return MujocoArticulation(self, name)

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
        pass  # inputs are views, and always in use

    def wrote_state(self, where: Bool[Tensor, " envs"]) -> None:
        self._written |= where

    @property
    def diverged(self) -> Bool[Tensor, " envs"]:
        return self._diverged

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        return (self._overflow & DROPPED) != 0

    def step(self, substeps: int) -> None:
        self._graphs.run(("step", substeps, self._derives), lambda: self._step(substeps))
        if self._has_sensors:
            self.sensordata.copy_(self._sensordata)
        self._written.zero_()
        # amax hands NaN on, and a comparison with NaN is false
        fastest = torch.maximum(self.qpos.abs().amax(dim=1), self.qvel.abs().amax(dim=1))
        torch.logical_not(fastest < MAX_STATE, out=self._diverged)

    def _step(self, substeps: int) -> None:
        for _ in range(substeps):
            mjw.step(self._model, self._data)
        if self._derives:
            self._follow()

    def _follow(self) -> None:
        # MuJoCo's step leaves derived quantities at the state before its integration.
        mjw.kinematics(self._model, self._data)
        mjw.com_pos(self._model, self._data)
        mjw.com_vel(self._model, self._data)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        self._reset_mask.copy_(where)
        self._graphs.run("reset", self._reset)
        self._written |= where

    def _reset(self) -> None:
        mjw.reset_data(self._model, self._data, self._reset_where)

    def refresh(self) -> None:
        if not (self._has_sensors or self._derives):
            return  # nothing follows the state, and this is known before any data
        if self._written_on_host is not None and not self._written_on_host.any():
            return  # a shortcut for the CPU only, where a mask is read at no cost
        if self._has_sensors:
            self._graphs.run("forward", self._forward)
            fresh = torch.where(self._written[:, None], self._sensordata, self.sensordata)
            self.sensordata.copy_(fresh)
        else:
            self._graphs.run("follow", self._follow)
        self._written.zero_()

    def _forward(self) -> None:
        mjw.forward(self._model, self._data)

    def scene_qpos(self) -> Float[Tensor, "envs nq"]:
        return self.qpos

    def _state(self) -> dict[str, Tensor]:
        arrays = {name: getattr(self._data, name) for name in STATE}
        return {name: wp.to_torch(array) for name, array in arrays.items() if array.size}

    def state_dict(self) -> dict[str, Any]:
        state = {name: value.clone() for name, value in self._state().items()}
        own = {"sensordata": self.sensordata, "written": self._written, "diverged": self._diverged}
        return {"state": state, "own": {name: value.clone() for name, value in own.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._state().items():
            value.copy_(state["state"][name])
        self._written.fill_(True)
        self.refresh()  # body poses; then the sensors are put back to what acted in the last step
        self.sensordata.copy_(state["own"]["sensordata"])
        self._written.copy_(state["own"]["written"])
        self._diverged.copy_(state["own"]["diverged"])

    def close(self) -> None:
        """Frees the graphs; the simulation cannot be used afterwards."""
        self._graphs.clear()


# Contacts that a plane makes with a geom of each type; with the others up to four.
_PLANE_CONTACTS = {
    mujoco.mjtGeom.mjGEOM_SPHERE.value: 1,
    mujoco.mjtGeom.mjGEOM_CAPSULE.value: 2,
    mujoco.mjtGeom.mjGEOM_ELLIPSOID.value: 1,
}


def estimate_buffers(model: mujoco.MjModel) -> tuple[int, int]:
    """Constraint rows and contacts to allocate per world, for a scene that nobody has measured.

    A few geoms may touch the ground with all the contacts that they can have, many geoms only with
    half of them; of the geoms that can touch each other only some do at a time. This is more than
    twice what Ant needs when it is thrown around. Rows are a limit for each world; contacts, and
    the candidate pairs that share their buffer, are pooled over all worlds.
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
    rows += 6 * model.neq  # a weld has the most
    return _round_up(rows), _round_up(contacts)


def _round_up(number: int, multiple: int = 16) -> int:
    return max(multiple, -(-number // multiple) * multiple)
