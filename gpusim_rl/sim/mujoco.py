"""`sim=mujoco`: C MuJoCo on CPU threads through `mujoco.batch` (MuJoCo >= 3.17)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float
from mujoco.batch import Batch
from torch import Tensor

from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim.actuators import delayed_controls
from gpusim_rl.sim.articulation import reference_pose
from gpusim_rl.sim.bodies import mocap_start
from gpusim_rl.sim.cameras import Cameras
from gpusim_rl.sim.interface import Sim
from gpusim_rl.sim.option import solver_limits
from gpusim_rl.sim.params import FIELDS, Params
from gpusim_rl.sim.rays import RayGroups, Rays
from gpusim_rl.sim.scene import Scene

# Maximum plausible position or velocity [m, rad, m/s, rad/s].
MAX_STATE = 1e5
# With fewer worlds, one MjData per world fits in the CPU's cache, and velocity-stage quantities cost nothing extra.
PERSISTENT_BELOW = 512

_NONE = mujoco.mjtStage.mjSTAGE_NONE.value
_VEL = mujoco.mjtStage.mjSTAGE_VEL.value
_NO_SENSORS = mujoco.mjtDisableBit.mjDSBL_SENSOR.value
_CONTACT_FULL = mujoco.mjtWarning.mjWARN_CONTACTFULL.value
_CONSTRAINT_FULL = mujoco.mjtWarning.mjWARN_CNSTRFULL.value
# A state that overflows float32 becomes infinite, and its world is reported as diverged.
_float32_may_overflow = np.errstate(over="ignore", invalid="ignore")


class MujocoSim(Sim):
    """Simulator on a pool of CPU threads; see `gpusim_rl.sim.Sim`. Bit-identical for any number of threads.

    MuJoCo's state is float64; each `step` copies it once into a float32 mirror, of which task tensors are slices.
    Derived quantities are computed only after a task has requested them.
    """

    name = "mujoco"

    def __init__(self, scene: Scene, num_envs: int, cfg: SimConfig, device: torch.device) -> None:
        assert device.type == "cpu", device
        super().__init__(scene, num_envs, device)
        model = copy.copy(scene.model)
        model.opt.iterations, model.opt.ls_iterations = solver_limits(model.opt, cfg)
        # Otherwise C MuJoCo silently resets diverged worlds. The flag is set on a copy: MuJoCo Warp rejects it.
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET.value
        if not scene.steps_compute_sensors:
            model.opt.disableflags |= _NO_SENSORS
        self.num_threads = min(cfg.num_threads or available_cpus(), num_envs)
        persistent = num_envs < PERSISTENT_BELOW if cfg.persistent == "auto" else bool(cfg.persistent)
        self._batch = Batch(model, num_envs, nthread=self.num_threads, persistent=persistent)

        # Float32 mirror of [time, qpos, qvel], the start of a state row; torch sees every array as a view.
        nq, nv = model.nq, model.nv
        self._state = self._batch.state
        self._leading = self._state[:, : 1 + nq + nv]
        assert np.shares_memory(self._batch.bind("qpos"), self._leading)
        self._velocity = torch.from_numpy(self._leading[:, 1 + nq :])
        self._mirror = np.zeros((num_envs, 1 + nq + nv), dtype=np.float32)
        self._start = np.zeros(1 + nq + nv, dtype=np.float32)
        self._start[1 : 1 + nq] = reference_pose(model)
        mirror = torch.from_numpy(self._mirror)
        self.qpos, self.qvel = mirror[:, 1 : 1 + nq], mirror[:, 1 + nq :]
        self._qpos_qvel = mirror[:, 1:]

        self._make_inputs(model)
        # MuJoCo's arrays and their float32 mirrors: sensors of the last physics step, and derived quantities.
        self._sensors: list[tuple[np.ndarray, np.ndarray]] = []
        self._derived: list[tuple[np.ndarray, np.ndarray]] = []
        self._tensors: dict[str, Tensor] = {}  # views of the mirrors, by field
        self.sensordata = torch.zeros(num_envs, 0)
        if scene.steps_compute_sensors:
            self.sensordata = self._bind("sensordata", self._sensors)
        self._stage = _VEL  # last stage of `_forward`
        self._current: Tensor | None = None  # sensors in the current state
        self._flags: np.ndarray | None = None  # disable flags per world, if only `_forward` computes sensors

        # Masks of worlds with unread writes to the state, mocap bodies or parameters, and of worlds last `reset`.
        masks = np.zeros((4, num_envs), dtype=bool)
        self._written, self._moved, self._stale, self._reset = masks
        self._written_mask, self._moved_mask, self._stale_mask, self._reset_mask = torch.from_numpy(masks).unbind()
        self._written[:] = True
        self._ray_groups = RayGroups(scene)
        self._cameras = Cameras(scene, (self.qpos, self.mocap_pos, self.mocap_quat), self.num_threads)
        self._params = Params(scene, self.device, self.expand, self._wrote_param)
        self._mirror[:] = self._start
        self.refresh()

    def _make_inputs(self, model: mujoco.MjModel) -> None:
        num_envs = self.num_envs
        self.ctrl = torch.zeros(num_envs, model.nu)
        self.qfrc_applied = torch.zeros(num_envs, model.nv)
        self.xfrc_applied = torch.zeros(num_envs, model.nbody, 6)
        self._mocap_start = mocap_start(model)
        pos, quat = (torch.from_numpy(each).repeat(num_envs, 1, 1) for each in self._mocap_start)
        self.mocap_pos, self.mocap_quat = pos, quat
        self._mocap: list[tuple[np.ndarray, np.ndarray]] = []  # inputs that body poses depend on
        self._inputs = [(self._batch.bind("ctrl"), self.ctrl.numpy())]
        self._waiting, self._waiting_controls = delayed_controls(model)
        if self._waiting:
            self._history = self._batch.bind("history")

    def expand(self, field: str) -> Tensor:
        """Return a model field's values in all worlds, for writing; derived constants update at the next step."""
        kind = FIELDS.get(field, FIELDS["geom_friction"])  # pair_friction is no `Param`
        if kind.pictures:
            return self._cameras.own(field)
        self._stale |= kind.constants
        return torch.from_numpy(self._batch.expand("opt.gravity" if field == "gravity" else field))

    def _wrote_param(self, field: str, where: Bool[Tensor, " envs"]) -> None:
        if FIELDS[field].constants:
            self._stale_mask |= where

    def _derive_constants(self) -> None:
        ids = np.flatnonzero(self._stale)
        if ids.size:
            self._batch.set_const(ids)
            self._stale[:] = False

    def _bind(self, field: str, outputs: list[tuple[np.ndarray, np.ndarray]], name: str | None = None) -> Tensor:
        try:
            output = self._batch.bind(field)
        except RuntimeError as error:  # MuJoCo's message for a failed allocation
            if "unknown exception" not in str(error):
                raise
            raise MemoryError(f"MuJoCo cannot allocate {field} for all envs") from None
        mirror = np.zeros(output.shape, dtype=np.float32)
        outputs.append((output, mirror))
        self._tensors[name or field] = torch.from_numpy(mirror)
        return self._tensors[name or field]

    def derived(self, field: str) -> Tensor:
        if field not in self._tensors:
            self._bind(field, self._derived)
            self._written[:] = True
            self.refresh()
        return self._tensors[field]

    def current_sensors(self, stage: int) -> Float[Tensor, "envs nsensordata"]:
        if self._current is None or stage > self._stage:
            if self._current is None:
                self._current = self._bind("sensordata", self._derived, "current_sensors")
                if not self.scene.steps_compute_sensors:
                    self._flags = self._batch.expand("opt.disableflags")
            self._stage = max(self._stage, stage)
            self._written[:] = True
            self.refresh()
        return self._current

    def _forward(self, ids: np.ndarray | None = None) -> None:
        if self._stage == _VEL and self._flags is None:
            self._batch.forward(ids, stage=_VEL)
            return
        for target, source in self._inputs:
            np.copyto(target, source)
        if self._flags is not None:
            self._flags &= ~_NO_SENSORS
        self._batch.forward(ids, stage=self._stage)
        if self._flags is not None:
            self._flags |= _NO_SENSORS

    def rays(self, num_rays: int, ignore: Sequence[str] = ()) -> Rays:
        of_geom, groups = self._ray_groups.leave_out(ignore)
        if of_geom.any():
            self._batch.expand("geom_group")[:] = of_geom
        cast = partial(self._cast_rays, np.empty((2, self.num_envs, num_rays, 3)))
        return Rays(cast, self.num_envs, num_rays, groups)

    def _cast_rays(
        self,
        memory: np.ndarray,
        origin: Float[Tensor, "envs rays 3"],
        direction: Float[Tensor, "envs rays 3"],
        groups: Sequence[int],
    ) -> Float[Tensor, "envs rays"]:
        self._write_states()
        torch.stack([origin, direction], out=torch.from_numpy(memory))
        distance, _ = self._batch.ray(*memory, np.array(groups, np.uint8))
        return torch.from_numpy(distance).float()

    def uses(self, field: str) -> None:
        if field not in self._used:
            self._used.add(field)
            self.moves_mocap |= field == "mocap_pos"
            pairs = self._mocap if field.startswith("mocap") else self._inputs
            pairs.append((self._batch.bind(field), getattr(self, field).numpy()))

    def wrote_state(self, where: Bool[Tensor, " envs"]) -> None:
        self._written_mask |= where

    def wrote_mocap(self, where: Bool[Tensor, " envs"]) -> None:
        self._moved_mask |= where  # writing the state too would round it to float32

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        full = self._batch.warning[:, [_CONTACT_FULL, _CONSTRAINT_FULL], 1]
        return torch.from_numpy(full.any(axis=1))

    @_float32_may_overflow
    def step(self, substeps: int) -> None:
        self._derive_constants()
        self._write_states()
        self._written[:] = self._moved[:] = False
        for target, source in self._inputs:
            np.copyto(target, source)
        if self._waiting:  # an episode's first control fills the delay buffers
            fresh = np.flatnonzero(self._mirror[:, 0] == 0.0)
            self._history[fresh[:, None], self._waiting] = self.ctrl.numpy()[fresh][:, self._waiting_controls]
        self._batch.step(nstep=substeps, stage=_NONE)
        self.scene.limit_rotation(self._velocity)
        np.copyto(self._mirror, self._leading, casting="same_kind")
        for source, target in self._sensors:
            np.copyto(target, source, casting="same_kind")
        if self._derived:
            # Separate from `step`, which would mix position sensors of the new state with contact sensors of the old.
            self._forward()
            for source, target in self._derived:
                np.copyto(target, source, casting="same_kind")
        # amax propagates NaN, which compares false
        fastest = self._qpos_qvel.abs().amax(dim=1)
        torch.logical_not(fastest < MAX_STATE, out=self.diverged)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        self._written_mask |= where
        self._reset_mask.copy_(where)
        self._cameras.reset(where)
        ids = np.flatnonzero(self._reset)
        if ids.size:
            self._batch.reset(ids, stage=_NONE)
            self._mirror[ids] = self._start
            for _, sensors in self._sensors:
                sensors[ids] = 0.0
            for (_, poses), start in zip(self._mocap, self._mocap_start, strict=False):
                poses[ids] = start
        mask = where[:, None]
        self.ctrl.masked_fill_(mask, 0.0)
        self.qfrc_applied.masked_fill_(mask, 0.0)
        if "xfrc_applied" in self._used:
            self.xfrc_applied.masked_fill_(mask[..., None], 0.0)

    @_float32_may_overflow
    def refresh(self) -> None:
        self._derive_constants()
        ids = np.flatnonzero(self._written | self._moved)
        if not (ids.size and self._derived):
            return  # the next step picks up the writes
        self._write_states()
        self._forward(ids)
        for source, target in self._derived:
            target[ids] = source[ids]
        self._written[:] = False
        self._moved[:] = False

    def _write_states(self) -> None:
        if self._written.any():
            self._leading[self._written] = self._mirror[self._written]
        for target, source in self._mocap:
            np.copyto(target, source)

    def _saved(self) -> dict[str, Tensor]:
        """Return views of the checkpointed tensors, without parameters and camera images."""
        return {
            "state": torch.from_numpy(self._state),
            "mirror": torch.from_numpy(self._mirror),
            "written": self._written_mask,
            **({"moved": self._moved_mask} if self.moves_mocap else {}),
            "diverged": self.diverged,
            "warning": torch.from_numpy(self._batch.warning),
            **{field: getattr(self, field) for field in ("ctrl", "qfrc_applied", "xfrc_applied")},
            **{field: getattr(self, field) for field in ("mocap_pos", "mocap_quat") if field in self._used},
            **{f"tensors.{field}": value for field, value in self._tensors.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        saved = {name: value.clone() for name, value in self._saved().items()}
        return {"params": self._params.state_dict(), "cameras": self._cameras.state_dict(), **saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._params.load_state_dict(state["params"])
        self._stale[:] = any(FIELDS[field].constants for field in self._params.values)
        self._derive_constants()
        for name, value in self._saved().items():
            value.copy_(state["written" if name == "moved" and name not in state else name])  # older checkpoints
        self._cameras.load_state_dict(state.get("cameras", {}))

    def close(self) -> None:
        self._cameras.close()
        self._sensors.clear()
        self._derived.clear()
        del self._batch
