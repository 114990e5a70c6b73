"""`sim=mjwarp`: MuJoCo Warp, on CUDA or on Warp's CPU device."""

from __future__ import annotations

import copy
import logging
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

from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim.actuators import delayed_controls
from gpusim_rl.sim.articulation import MujocoArticulation
from gpusim_rl.sim.interface import not_finite
from gpusim_rl.sim.mujoco import MAX_STATE
from gpusim_rl.sim.option import ON_WARP, limit_solver
from gpusim_rl.sim.params import Param, Params
from gpusim_rl.sim.rays import NUM_GROUPS, MujocoRays, RayGroups
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.warp import WarpGraphs
from gpusim_rl.sim.warp_params import WarpParams

logger = logging.getLogger("gpusim_rl")

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

_VEL = mujoco.mjtStage.mjSTAGE_VEL.value
_NO_SENSORS = mujoco.mjtDisableBit.mjDSBL_SENSOR.value

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
                self._model = mjw.put_model(_solvable(model))
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

        data = self._data
        self.qpos, self.qvel = self._view(data.qpos), self._view(data.qvel)
        self.ctrl, self.qfrc_applied = self._view(data.ctrl), self._view(data.qfrc_applied)
        self.xfrc_applied = self._view(data.xfrc_applied)
        self._used = {"ctrl"}
        self._overflow = self._view(data.overflow)
        self._reset_mask = wp.to_torch(self._reset_where)
        self._time, self._history = self._view(data.time), self._view(data.history)
        waiting, controls = delayed_controls(model)
        self._waiting = torch.tensor(waiting, dtype=torch.int64, device=device)
        self._waiting_controls = torch.tensor(controls, dtype=torch.int64, device=device)

        self._current = self.sensordata = self._view(data.sensordata)
        self._step_senses = scene.senses_steps
        self._sensor_stage = 0  # up to which sensors are computed for the current state; 0 is none
        if not self._step_senses:
            self._model.opt.disableflags |= _NO_SENSORS
        self._derived = {field: self._view(getattr(data, field)) for field in DERIVED}
        self._derives = False

        self._written = torch.ones(num_envs, dtype=torch.bool, device=device)
        self._written_on_host = self._written.numpy() if device.type == "cpu" else None
        self._diverged = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._ray_groups = RayGroups(scene)
        self._boxes: Any = None
        self._ray_arrays: dict[tuple[int, ...], list[Any]] = {}
        self._warp_params = WarpParams(scene, self._model, num_envs, self._graphs, device, self.wrote_state)
        self._params = Params(scene, device, self._warp_params.expand, self._warp_params.wrote)
        self._new_friction: set[int] = set()  # joints that may get dry friction, and have none in the model
        self._graphs.synchronize()
        self.refresh()

    def articulation(self, name: str) -> MujocoArticulation:
        return MujocoArticulation(self, name)

    def param(self, name: str, articulation: str | None = None, elements: Sequence[str] | None = None) -> Param:
        found = self._params.find(name, articulation, elements)
        if name == "dof_frictionloss":
            self._check_friction_rows(found)
        return found

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

    def current_sensors(self, stage: int) -> Float[Tensor, "envs nsensordata"]:
        if stage > self._sensor_stage:
            if self._sensor_stage == 0:
                self.sensordata = self._current.clone()  # Warp's own array has the current values from now on
            self._sensor_stage, self._derives = max(stage, _VEL), True
            self._graphs.clear()  # they compute no sensors
            self._graphs.synchronize()
            self._written.fill_(True)
            self.refresh()
        return self._current

    def rays(self, num_rays: int, ignore: Sequence[str] = ()) -> MujocoRays:
        of_geom, groups = self._ray_groups.leave_out(ignore)
        wp.to_torch(self._model.geom_group).copy_(torch.from_numpy(of_geom))
        if self._boxes is None:  # bounding volumes, which Warp's rays go through
            model = self.scene.model
            with self._graphs.scope():
                self._boxes = mjw.create_render_context(
                    model, self.num_envs, cam_active=[], use_textures=False, enabled_geom_groups=list(range(NUM_GROUPS))
                )
        with self._graphs.scope():
            shape = (self.num_envs, num_rays)
            self._ray_arrays[shape] = [
                *(wp.zeros(shape, dtype=wp.vec3) for _ in range(3)),  # origin, direction, normal
                wp.zeros(shape, dtype=float),
                wp.zeros(shape, dtype=int),
                wp.full(num_rays, -1, dtype=int),
            ]
        self._derives = True
        self._graphs.clear()
        self._graphs.synchronize()
        return MujocoRays(self, num_rays, groups)

    def cast_rays(
        self, origin: Float[Tensor, "envs rays 3"], direction: Float[Tensor, "envs rays 3"], groups: Sequence[int]
    ) -> Float[Tensor, "envs rays"]:
        arrays = self._ray_arrays[tuple(origin.shape[:2])]
        wp.to_torch(arrays[0]).copy_(origin)
        wp.to_torch(arrays[1]).copy_(direction)
        self._graphs.run(("rays", origin.shape[1], *groups), lambda: self._cast_rays(arrays, groups))
        return wp.to_torch(arrays[3]).clone()

    def _cast_rays(self, arrays: list[Any], groups: Sequence[int]) -> None:
        meets: Any = wp.types.vector(6, int)(*groups)
        origin, direction, normal, distance, geom, no_body = arrays
        mjw.refit_bvh(self._model, self._data, self._boxes)
        mjw.rays(
            *(self._model, self._data, origin, direction),
            *(meets, True, no_body, distance, geom, normal, self._boxes),
        )

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
        self._warp_params.derive()
        if len(self._waiting):  # in the first step of an episode its first control fills the delays
            first = self.ctrl.index_select(1, self._waiting_controls)
            held = self._history.index_select(1, self._waiting)
            fresh = (self._time == 0.0)[:, None]
            self._history.index_copy_(1, self._waiting, torch.where(fresh, first, held))
        self._graphs.run(("step", substeps), lambda: self._step(substeps))
        if self._step_senses and self._sensor_stage:
            self.sensordata.copy_(self._current)
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
        model, data = self._model, self._data
        if not self._sensor_stage:
            mjw.kinematics(model, data)
            mjw.com_pos(model, data)
            mjw.com_vel(model, data)
            return
        flags = model.opt.disableflags
        model.opt.disableflags &= ~_NO_SENSORS
        if self._sensor_stage == _VEL:
            mjw.fwd_position(model, data, factorize=False)
            data.sensordata.zero_()
            mjw.sensor_pos(model, data)
            mjw.fwd_velocity(model, data)
            mjw.sensor_vel(model, data)
        else:
            mjw.forward(model, data)
        model.opt.disableflags = flags

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        self._reset_mask.copy_(where)
        self._graphs.run("reset", self._reset)
        if self._step_senses and self._sensor_stage:
            self.sensordata.masked_fill_(where[:, None], 0.0)
        self.wrote_state(where)

    def _reset(self) -> None:
        mjw.reset_data(self._model, self._data, self._reset_where)

    def refresh(self) -> None:
        self._warp_params.derive()
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
        constants = self._warp_params.constants()
        state = {name: value.clone() for name, value in self._state().items()}
        own = {"sensordata": self.sensordata, "written": self._written, "diverged": self._diverged}
        return {
            "state": state,
            "own": {name: value.clone() for name, value in own.items()},
            "params": self._params.state_dict(),
            "constants": constants,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._state().items():
            value.copy_(state["state"][name])
        self._params.load_state_dict(state.get("params", {}))
        self._warp_params.load_constants(state.get("constants", {}))
        self._written.fill_(True)
        self.refresh()  # body poses
        self.sensordata.copy_(state["own"]["sensordata"])
        self._written.copy_(state["own"]["written"])
        self._diverged.copy_(state["own"]["diverged"])

    def close(self) -> None:
        """Frees the graphs; the simulation cannot be used afterwards."""
        self._graphs.close()


def _solvable(model: mujoco.MjModel) -> mujoco.MjModel:
    """The model with a solver that MuJoCo Warp has."""
    if model.opt.solver != mujoco.mjtSolver.mjSOL_PGS:
        return model
    logger.warning("sim=mjwarp has no PGS solver, which the scene asks for: the Newton solver takes its place")
    model = copy.copy(model)
    model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    return model


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
