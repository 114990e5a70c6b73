"""`sim=mjwarp`: MuJoCo Warp, on CUDA or on Warp's CPU device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import mujoco
import mujoco_warp as mjw
import torch
import warp as wp
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.errors import ConfigError, first_line
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim.actuators import delayed_controls
from gpusim_rl.sim.buffers import buffer_sizes, contact_matches
from gpusim_rl.sim.option import ON_WARP, solver_limits
from gpusim_rl.sim.rays import NUM_GROUPS, RayGroups, Rays
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.warp import WarpGraphs
from gpusim_rl.sim.warp_sim import WarpSim

logger = logging.getLogger("gpusim_rl")

_VEL = mujoco.mjtStage.mjSTAGE_VEL.value
_NO_SENSORS = mujoco.mjtDisableBit.mjDSBL_SENSOR.value


class MjwarpSim(WarpSim):
    """MuJoCo Warp simulation of the scene that MuJoCo compiles; see `WarpSim`."""

    name = "mjwarp"

    def __init__(self, scene: Scene, num_envs: int, cfg: SimConfig, device: torch.device) -> None:
        graphs = WarpGraphs(device, cfg.graph)
        rows, contacts = buffer_sizes(scene, cfg)
        with graphs.scope():
            try:
                model = mjw.put_model(_solvable(scene.model))
            except (NotImplementedError, ValueError) as error:
                problem = f"sim=mjwarp cannot simulate this scene: {first_line(error)}"
                raise ConfigError(problem, hint="Try sim=mujoco") from None
            model.opt.iterations, model.opt.ls_iterations = solver_limits(scene.model.opt, cfg, ON_WARP)
            model.opt.contact_sensor_maxmatch = min(model.opt.contact_sensor_maxmatch, contact_matches(scene))
            data = mjw.make_data(scene.model, nworld=num_envs, njmax=rows, nconmax=contacts)
        super().__init__(scene, num_envs, device, graphs, model, data, cfg.num_threads)

        self._time, self._history = self._view(data.time), self._view(data.history)
        waiting, controls = delayed_controls(scene.model)
        self._waiting = torch.tensor(waiting, dtype=torch.int64, device=device)
        self._waiting_controls = torch.tensor(controls, dtype=torch.int64, device=device)

        self._current = self.sensordata
        self._sensor_stage = 0  # last stage of sensors computed in the current state; 0: none
        if not scene.steps_compute_sensors:
            model.opt.disableflags |= _NO_SENSORS
        # Sensors with a delay or an interval store the readings of every physics step.
        self._stores_readings = bool(scene.model.sensor_interval.any() or scene.model.sensor_delay.any())
        self._ray_groups = RayGroups(scene)
        self._boxes: mjw.RenderContext | None = None
        # Warp arrays and torch's views of them, by shape
        self._ray_arrays: dict[tuple[int, ...], tuple[list[Any], list[Tensor]]] = {}

    def current_sensors(self, stage: int) -> Float[Tensor, "envs nsensordata"]:
        if stage > self._sensor_stage:
            if self._sensor_stage == 0:
                self.sensordata = self._current.clone()  # Warp's own array now has the current values
                self._sensors_apart = self.scene.steps_compute_sensors
            self._sensor_stage = max(stage, _VEL)
            self._graphs.clear()  # captured without sensors
            self._graphs.synchronize()
            self._start_following()
        return self._current

    def rays(self, num_rays: int, ignore: Sequence[str] = ()) -> Rays:
        of_geom, groups = self._ray_groups.leave_out(ignore)
        wp.to_torch(self._model.geom_group).copy_(torch.from_numpy(of_geom))
        if self._boxes is None:  # bounding volumes
            model = self.scene.model
            with self._graphs.scope():
                self._boxes = mjw.create_render_context(
                    model, self.num_envs, cam_active=[], use_textures=False, enabled_geom_groups=list(range(NUM_GROUPS))
                )
        with self._graphs.scope():
            shape = (self.num_envs, num_rays)  # of origins, directions, normals, distances and geoms
            arrays = [wp.zeros(shape, dtype=dtype) for dtype in (wp.vec3, wp.vec3, wp.vec3, float, int)]
            arrays.append(wp.full(num_rays, -1, dtype=int))
            self._ray_arrays[shape] = arrays, [self._view(array) for array in arrays[:4]]
        self._derives = True
        self._graphs.clear()
        self._graphs.synchronize()
        return Rays(self._cast_rays, self.num_envs, num_rays, groups)

    def _cast_rays(
        self, origin: Float[Tensor, "envs rays 3"], direction: Float[Tensor, "envs rays 3"], groups: Sequence[int]
    ) -> Float[Tensor, "envs rays"]:
        arrays, (origins, directions, _, distances) = self._ray_arrays[tuple(origin.shape[:2])]
        origins.copy_(origin)
        directions.copy_(direction)
        self._graphs.run(("rays", origin.shape[1], *groups), lambda: self._launch_rays(arrays, groups))
        return distances.clone()

    def _launch_rays(self, arrays: list[Any], groups: Sequence[int]) -> None:
        meets: Any = wp.types.vector(6, int)(*groups)
        origin, direction, normal, distance, geom, no_body = arrays
        mjw.refit_bvh(self._model, self._data, self._boxes)
        outputs = distance, geom, normal, self._boxes
        mjw.rays(self._model, self._data, origin, direction, meets, True, no_body, *outputs)

    def _advance(self, substeps: int) -> None:
        if len(self._waiting):  # an episode's first control fills the delay buffers
            first = self.ctrl.index_select(1, self._waiting_controls)
            held = self._history.index_select(1, self._waiting)
            fresh = (self._time == 0.0)[:, None]
            self._history.index_copy_(1, self._waiting, torch.where(fresh, first, held))
        self._graphs.run(("step", substeps), lambda: self._step(substeps))

    def _step(self, substeps: int) -> None:
        option = self._model.opt
        flags = option.disableflags
        for left in reversed(range(substeps)):
            # A control step reports the readings of its last physics step.
            option.disableflags = flags | _NO_SENSORS if left and not self._stores_readings else flags
            mjw.step(self._model, self._data)

    def _sense_step(self) -> None:
        self.sensordata.copy_(self._current)

    def _follow(self) -> None:
        model, data = self._model, self._data
        if not self._sensor_stage:
            super()._follow()
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


def _solvable(model: mujoco.MjModel) -> mujoco.MjModel:
    if model.opt.solver != mujoco.mjtSolver.mjSOL_PGS:
        return model
    logger.warning("sim=mjwarp has no PGS solver: using the Newton solver instead")
    model = copy.copy(model)
    model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    return model
