"""Base class of `sim=mjwarp` and `sim=newton`."""

from __future__ import annotations

from typing import Any

import mujoco_warp as mjw
import torch
import warp as wp
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.sim.cameras import Cameras
from gpusim_rl.sim.constants import Constants, constants_of, has_muscles
from gpusim_rl.sim.interface import Sim
from gpusim_rl.sim.mujoco import MAX_STATE
from gpusim_rl.sim.params import FIELDS, Params
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.warp import WarpGraphs

# Arrays that `step` depends on.
STATE = (
    *("time", "qpos", "qvel", "act", "history", "plastic", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied"),
    *("eq_active", "mocap_pos", "mocap_quat", "userdata", "overflow"),
)
# Arrays derived from the state.
DERIVED = ("xpos", "xquat", "xipos", "ximat", "xanchor", "xaxis", "cvel", "subtree_com")

_Overflow = mjw.OverflowType
# Dropped contacts or constraint rows; the other bits concern the solver and sensors.
ROWS = int(_Overflow.NEFC | _Overflow.NJMAX_NNZ)
CONTACTS = int(_Overflow.BROADPHASE | _Overflow.NARROWPHASE | _Overflow.CCD)
DROPPED = ROWS | CONTACTS | int(_Overflow.NVMAX | _Overflow.HFIELD | _Overflow.EPA_HORIZON | _Overflow.CONTACT_MATCH)


class WarpSim(Sim):
    """Worlds simulated with a MuJoCo Warp model and data; see `gpusim_rl.sim.Sim`.

    State tensors are views of MuJoCo Warp's arrays. Step, reset and refresh are Warp graphs, and no call synchronises
    with the device. MuJoCo Warp has no masked forward pass, so `refresh` updates all worlds.
    """

    def __init__(
        self,
        scene: Scene,
        num_envs: int,
        device: torch.device,
        graphs: WarpGraphs,
        model: mjw.Model,
        data: mjw.Data,
        num_threads: int | None,
    ) -> None:
        super().__init__(scene, num_envs, device)
        self._graphs, self._model, self._data = graphs, model, data
        self.buffers = {"njmax": data.njmax, "nconmax": data.naconmax // num_envs}
        self._counts = [self._view(array) for array in (data.nefc, data.nacon, data.ncollision)]
        # Kernels that print serialise the device.
        model.opt.warn_overflow = False
        # Fixes the order of constraints on CUDA, but not of contacts: contact sorting is a no-op in MuJoCo Warp 4.0.
        model.opt.deterministic = torch.are_deterministic_algorithms_enabled()
        with graphs.scope():
            self._reset_where, self._stale_where = (wp.zeros(num_envs, dtype=wp.bool) for _ in range(2))
        self._reset_mask = wp.to_torch(self._reset_where)

        self.qpos, self.qvel = self._view(data.qpos), self._view(data.qvel)
        self.mocap_pos, self.mocap_quat = self._view(data.mocap_pos), self._view(data.mocap_quat)
        self._cameras = Cameras(scene, (self.qpos, self.mocap_pos, self.mocap_quat), num_threads, graphs)
        self.ctrl, self.qfrc_applied = self._view(data.ctrl), self._view(data.qfrc_applied)
        self.xfrc_applied = self._view(data.xfrc_applied)
        self._overflow = self._view(data.overflow)
        self.sensordata = self._view(data.sensordata)
        self._sensors_apart = False  # whether `sensordata` is a copy of MuJoCo Warp's array
        self._derived = {field: self._view(getattr(data, field)) for field in DERIVED}
        self._derives = False  # whether a derived quantity is read

        self._written = torch.ones(num_envs, dtype=torch.bool, device=device)
        self._written_on_host = self._written.numpy() if device.type == "cpu" else None
        self._params = Params(scene, device, self._expand, self._wrote_param)
        # Per-world constants, allocated once a parameter that they depend on has per-world values.
        self._constants: dict[str, Tensor] = {}
        self._derivation: Constants | None = None
        self._stale = wp.to_torch(self._stale_where)  # worlds whose parameters were written
        self._stale_on_host = self._stale.numpy() if device.type == "cpu" else None  # readable without a sync
        self._wrote_constants = False  # whether any world may be stale, known on the host
        graphs.synchronize()

    def _view(self, array: wp.array) -> Tensor:
        if array.size:
            return wp.to_torch(array)
        return torch.zeros(array.shape, device=self.device)  # no memory to view

    def _expand(self, field: str) -> Tensor:
        """Give each world its own values of a field; return a view of the model's array, [num_envs, rows, ...]."""
        if FIELDS[field].pictures:
            return self._cameras.own(field)
        values = self._expand_array(self._model.opt if field == "gravity" else self._model, field)
        if self._derivation is None and self._has_constants(field):
            for name in constants_of(self.scene.model):
                self._constants[name] = self._expand_array(self._model, name)
            with self._graphs.scope():
                self._derivation = Constants(self.scene.model, self._model, self._stale_where)
        self._graphs.clear()  # captured with the shared arrays
        self._graphs.synchronize()
        return values

    def _expand_array(self, owner: mjw.Model | mjw.Option, name: str) -> Tensor:
        shared = getattr(owner, name)
        with self._graphs.scope():
            array = wp.empty((self.num_envs, *shared.shape[1:]), dtype=shared.dtype)
        self._graphs.synchronize()
        values = wp.to_torch(array)
        values.copy_(wp.to_torch(shared).expand_as(values))
        setattr(owner, name, array)
        return values

    def _has_constants(self, field: str) -> bool:
        model = self.scene.model
        unused = field == "actuator_gear" and not (has_muscles(model) or model.actuator_armature.any())
        return FIELDS[field].constants and not unused

    def _wrote_param(self, field: str, where: Bool[Tensor, " envs"]) -> None:
        if self._has_constants(field):
            self._stale |= where
            self._wrote_constants = True
            self.wrote_state(where)  # centres of mass may have moved

    def _derive_constants(self) -> None:
        written, self._wrote_constants = self._wrote_constants, False
        if written and self._derivation and (self._stale_on_host is None or self._stale_on_host.any()):
            self._graphs.run("constants", self._derivation.derive)

    def derived(self, field: str) -> Tensor:
        if not self._derives:
            self._start_following()
        return self._derived[field]

    def _start_following(self) -> None:
        self._derives = True
        self._written.fill_(True)
        self.refresh()

    def uses(self, field: str) -> None:
        self._used.add(field)
        self.moves_mocap |= field == "mocap_pos"

    def wrote_state(self, where: Bool[Tensor, " envs"]) -> None:
        if self._written_on_host is not None:  # otherwise `refresh` ignores the mask
            self._written |= where

    wrote_mocap = wrote_state

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        return (self._overflow & DROPPED) != 0

    @property
    def needs(self) -> dict[str, Float[Tensor, ""]]:
        rows, contacts, pairs = (count.amax().float() for count in self._counts)
        seen = rows, torch.maximum(contacts, pairs) / self.num_envs
        needs = {}
        for (name, room), need, bits in zip(self.buffers.items(), seen, (ROWS, CONTACTS), strict=True):
            full = ((self._overflow & bits) != 0).any()
            needs[name] = torch.where(full, need.clamp(min=room + 1.0), need.clamp(max=float(room)))
        return needs

    def step(self, substeps: int) -> None:
        self._derive_constants()
        self._advance(substeps)
        if self._sensors_apart:
            self._sense_step()
        self.scene.limit_rotation(self.qvel)
        if self._derives:
            self._follow_state()
        self._followed()
        # largest absolute value; propagates NaN, which compares false
        fastest = torch.linalg.vector_norm(torch.cat([self.qpos, self.qvel], dim=1), ord=torch.inf, dim=1)
        torch.logical_not(fastest < MAX_STATE, out=self.diverged)

    def _advance(self, substeps: int) -> None:
        raise NotImplementedError

    def _sense_step(self) -> None:
        """Write the sensor readings of the last physics step to `sensordata`."""
        raise NotImplementedError

    def _follow_state(self) -> None:
        self._graphs.run("follow", self._follow)

    def _follow(self) -> None:
        # A step leaves derived quantities at the state before integration.
        mjw.kinematics(self._model, self._data)
        mjw.com_pos(self._model, self._data)
        mjw.com_vel(self._model, self._data)

    def _followed(self) -> None:
        if self._written_on_host is not None:
            self._written.zero_()

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        self._reset_mask.copy_(where)
        self._graphs.run("reset", lambda: mjw.reset_data(self._model, self._data, self._reset_where))
        if self._sensors_apart:
            self.sensordata.masked_fill_(where[:, None], 0.0)
        self._cameras.reset(where)
        self.wrote_state(where)

    def refresh(self) -> None:
        self._derive_constants()
        unwritten = self._written_on_host is not None and not self._written_on_host.any()
        if self._derives and not unwritten:
            self._follow_state()
            self._followed()

    def _state(self) -> dict[str, Tensor]:
        arrays = {name: getattr(self._data, name) for name in STATE}
        return {name: wp.to_torch(array) for name, array in arrays.items() if array.size}

    def _own_state(self) -> dict[str, Tensor]:
        return {"sensordata": self.sensordata, "written": self._written, "diverged": self.diverged}

    def state_dict(self) -> dict[str, Any]:
        self._derive_constants()
        parts = {"state": self._state(), "own": self._own_state(), "constants": self._constants}
        return {
            **{part: {key: value.clone() for key, value in tensors.items()} for part, tensors in parts.items()},
            "params": self._params.state_dict(),
            "cameras": self._cameras.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._state().items():
            value.copy_(state["state"][name])
        self._params.load_state_dict(state["params"])
        for name, value in self._constants.items():
            if name in state["constants"]:
                value.copy_(state["constants"][name])
        for name, value in self._own_state().items():
            value.copy_(state["own"][name])
        self._written.fill_(True)
        self.refresh()  # body poses
        self._written.copy_(state["own"]["written"])
        self._cameras.load_state_dict(state.get("cameras", {}))

    def close(self) -> None:
        self._cameras.close()
        self._graphs.close()
