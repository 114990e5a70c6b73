"""Renderer for the cameras of all worlds: MuJoCo Warp's ray caster, one launch on CUDA, several threads on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, no_type_check

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from jaxtyping import Bool
from torch import Tensor

from gpusim_rl.errors import ConfigError, TaskError, first_line
from gpusim_rl.machine.hardware import available_cpus, memory_available_bytes
from gpusim_rl.sim.camera import FAR, SKY, CameraImages, SceneCamera
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.warp import WarpGraphs, announce_compilation

wp.set_module_options({"enable_backward": False})

_BYTES = {"rgb": 4 + 3, "depth": 4 + 4, "segmentation": 8 + 4}  # per pixel: in the renderer, plus in the tensor
_BYTES_OF_SUM = 12  # per pixel, if samples > 1
_READ_BY_RAYS = ("geom_xpos", "geom_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")


def _part(owner: Any, worlds: slice, *fields: str) -> Any:
    """Return a shallow copy in which the named arrays are views restricted to a slice of worlds."""
    part = copy.copy(owner)
    for field in fields:
        array = getattr(owner, field)
        setattr(part, field, array[worlds] if array.size else array)
    return part


def _give_boxes(context: mjw.RenderContext, worlds: slice) -> None:
    """Give a context its own BVH over a slice of worlds, because the ray caster numbers a context's worlds from 0."""
    size, num_envs = context.bvh_ngeom, worlds.stop - worlds.start
    for field in ("lower", "upper"):
        setattr(context, field, wp.clone(getattr(context, field)[size * worlds.start : size * worlds.stop]))
    context.group = wp.clone(context.group[: size * num_envs])
    context.bvh = wp.Bvh(context.lower, context.upper, groups=context.group, constructor="sah")
    context.bvh_id = context.bvh.id
    context.group_root = wp.zeros(num_envs, dtype=int)
    wp.launch(_find_roots, num_envs, inputs=[context.bvh_id], outputs=[context.group_root])


class _Group:
    """Cameras that share a ray-caster context: same geom groups, schedule and samples per pixel."""

    def __init__(self, every: int, num_envs: int, device: torch.device) -> None:
        self.every, self.cameras = every, list[SceneCamera]()
        self.age = torch.full((1,), every, device=device)  # due immediately
        self.age_of_envs = self.age.expand(num_envs)
        self.due = wp.ones(1, dtype=int)
        self.due_mask = wp.to_torch(self.due)

    def advance(self) -> None:
        """Advance the age by one control step; `due` stays on the device, where captured graphs read it."""
        if self.every == 1:
            self.age.zero_()
            return
        self.age += 1
        due = self.age >= self.every
        self.age.masked_fill_(due, 0)
        self.due_mask.copy_(due)


class CameraRenderer:
    """Renderer with its own MuJoCo Warp model and data, which track the simulator's positions.

    One thread updates the kinematics (1 % of the time); then each thread renders its share of the worlds. The first
    `draw` allocates memory and compiles kernels, outside of graph captures.
    """

    def __init__(
        self, scene: Scene, state: tuple[Tensor, ...], num_threads: int | None, graphs: WarpGraphs | None
    ) -> None:
        qpos = state[0]
        self._state, self._device, self._num_envs = state, qpos.device, len(qpos)
        self._graphs = graphs or WarpGraphs(qpos.device, enabled=True)
        self._num_threads = min(num_threads or available_cpus(), len(qpos)) if qpos.device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(self._num_threads, "camera") if self._num_threads > 1 else None
        self._source = model = copy.copy(scene.model)
        if model.nflex:
            raise ConfigError("cannot render scenes with flexible bodies", key="sim.camera")
        model.stat.extent, model.vis.map.zfar = 1.0, FAR  # the far plane is their product
        model.opt.solver, model.opt.cone = mujoco.mjtSolver.mjSOL_NEWTON, mujoco.mjtCone.mjCONE_PYRAMIDAL
        model.opt.integrator = mujoco.mjtIntegrator.mjINT_EULER  # never stepped
        with self._graphs.scope():
            try:
                self._model = mjw.put_model(model)
                self._data = mjw.make_data(model, nworld=len(qpos), nconmax=1, njmax=1)
            except (NotImplementedError, ValueError) as error:
                raise ConfigError(f"cannot render this scene: {first_line(error)}", key="sim.camera") from None
        arrays = (self._data.qpos, self._data.mocap_pos, self._data.mocap_quat)
        self._moved = [(wp.to_torch(a), b) for a, b in zip(arrays, state, strict=True) if a.size]
        self._groups: dict[tuple[int, tuple[int, ...], int], _Group] = {}  # by every, geom groups, samples
        self._images: dict[str, CameraImages] = {}
        self._arrays: dict[tuple[str, str], wp.array] = {}  # by camera and output
        self._own: list[str] = []
        self._shares: list[Callable[[], None]] = []
        self._needed = 0  # bytes

    def images(self, camera: SceneCamera) -> CameraImages:
        """Return a camera's images; repeated calls return the same object."""
        if camera.name in self._images:
            return self._images[camera.name]
        if not np.isin(self._source.geom_group, camera.groups).any():
            raise TaskError(f"the scene has no geoms in groups {camera.groups}", key=f"camera {camera.name!r}")
        self._check_memory(camera)
        (height, width), key = camera.size, (camera.every, camera.groups, camera.samples)
        shapes = {"rgb": (3,), "depth": (), "segmentation": ()}
        dtypes = {"rgb": wp.uint8, "depth": float, "segmentation": int}
        tensors = {}
        with self._graphs.scope():
            if key not in self._groups:
                self._groups[key] = _Group(camera.every, self._num_envs, self._device)
            for output in camera.outputs:
                array = wp.zeros((self._num_envs, height * width, *shapes[output]), dtype=dtypes[output])
                self._arrays[camera.name, output] = array
                tensors[output] = wp.to_torch(array).view(-1, height, width, *shapes[output])
        self._groups[key].cameras.append(camera)
        self._images[camera.name] = CameraImages(camera, tensors, self._groups[key].age_of_envs)
        self._forget()
        return self._images[camera.name]

    def _check_memory(self, camera: SceneCamera) -> None:
        height, width = camera.size
        per_pixel = sum(_BYTES[output] for output in camera.outputs) + (_BYTES_OF_SUM if camera.samples > 1 else 0)
        needed = self._num_envs * height * width * per_pixel
        on_cuda = self._device.type == "cuda"
        free = torch.cuda.mem_get_info(self._device)[0] if on_cuda else memory_available_bytes()
        if needed + self._needed > free:
            images = f"images of {height} x {width} pixels in {self._num_envs} envs"
            size = f"{needed / 1e9:.3g} GB for {images}, but only {max(0, free - self._needed) / 1e9:.3g} GB are left"
            raise MemoryError(f"camera {camera.name!r} needs {size}")
        self._needed += needed

    def own(self, field: str) -> Tensor:
        """Give each world its own values of a field; return them, shape [num_envs, rows, ...]."""
        if field not in self._own:
            shared = getattr(self._model, field)
            with self._graphs.scope():
                setattr(self._model, field, wp.empty((self._num_envs, *shared.shape[1:]), dtype=shared.dtype))
            self._own.append(field)
            self._forget()
            values = wp.to_torch(getattr(self._model, field))
            values.copy_(wp.to_torch(shared).expand_as(values))
        return wp.to_torch(getattr(self._model, field))

    def _forget(self) -> None:
        self._shares = []
        self._graphs.clear()  # captured with the old arrays
        self._graphs.synchronize()

    def draw(self) -> None:
        """Render the cameras that are due."""
        for group in self._groups.values():
            group.advance()
        self._launch()

    def redraw(self) -> None:
        """Render all cameras without advancing their ages."""
        for group in self._groups.values():
            group.due_mask.fill_(1)
        self._launch()

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        """Mark all cameras as due if the mask covers all worlds."""
        for group in self._groups.values():
            if group.every > 1:
                group.age.masked_fill_(where.all(), group.every)

    def _launch(self) -> None:
        if not self._groups:
            return
        if not self._shares:
            self._build()
        for target, source in self._moved:
            target.copy_(source)
        self._graphs.run("camera poses", self._move)
        if self._pool is None:
            self._graphs.run("cameras", self._shares[0])
            return
        with self._graphs.scope():  # Warp's current device is shared by all threads
            list(self._pool.map(lambda share: share(), self._shares))

    def _move(self) -> None:
        mjw.kinematics(self._model, self._data)
        mjw.com_pos(self._model, self._data)
        mjw.camlight(self._model, self._data)

    def _build(self) -> None:
        ends = np.linspace(0, self._num_envs, self._num_threads + 1).astype(int).tolist()
        with self._graphs.scope(), announce_compilation():
            contexts = [self._context(group.cameras) for group in self._groups.values()]
            self._move()
            for context in contexts:
                mjw.render(self._model, self._data, context)  # compiles the kernel that the shares use
            self._shares = [self._share(slice(start, end), contexts) for start, end in pairwise(ends)]
            self._shares[0]()  # compiles the copy kernels
        self._graphs.synchronize()

    def _context(self, cameras: list[SceneCamera]) -> mjw.RenderContext:
        one = cameras[0]  # some settings are per context
        if one.samples > 1 and "cam_fovy" in self._own:
            raise TaskError(f"sim.param('cam_fovy') requires samples=1, got {one.samples}", key=f"camera {one.name!r}")
        return mjw.create_render_context(
            self._source,
            nworld=self._num_envs,
            cam_res=[(camera.size[1], camera.size[0]) for camera in cameras],
            render_rgb=["rgb" in camera.outputs for camera in cameras],
            render_depth=["depth" in camera.outputs for camera in cameras],
            render_seg=["segmentation" in camera.outputs for camera in cameras],
            enabled_geom_groups=list(one.groups),
            cam_active=[self._source.camera(camera.name).id for camera in cameras],
            background_color=(*SKY, 1.0),
            use_precomputed_rays="cam_fovy" not in self._own,
            render_skybox=True,
            samples_per_pixel=one.samples,
        )

    def _share(self, worlds: slice, contexts: list[mjw.RenderContext]) -> Callable[[], None]:
        model, data = _part(self._model, worlds, *self._own), _part(self._data, worlds, *_READ_BY_RAYS)
        data.nworld = worlds.stop - worlds.start
        groups = [
            (group, self._frame(group.cameras, model, data, context, worlds))
            for group, context in zip(self._groups.values(), contexts, strict=True)
        ]

        def draw() -> None:
            for group, frame in groups:
                wp.capture_if(group.due, frame) if group.every > 1 else frame()

        return draw

    def _frame(
        self, cameras: list[SceneCamera], model: mjw.Model, data: mjw.Data, whole: mjw.RenderContext, worlds: slice
    ) -> Callable[[], None]:
        context = _part(whole, worlds, "rgb_data", "aa_accum", "depth_data", "seg_data")
        if data.nworld < self._num_envs:
            _give_boxes(context, worlds)
        first_pixel = {"rgb": context.rgb_adr, "depth": context.depth_adr, "segmentation": context.seg_adr}
        first_pixel = {output: numbers.numpy().tolist() for output, numbers in first_pixel.items()}
        kernels = {
            "rgb": (_copy_rgb, context.rgb_data, []),
            "depth": (_copy_depth, context.depth_data, [FAR]),
            "segmentation": (_copy_segmentation, context.seg_data, [model.geom_bodyid]),
        }
        copies = []
        for number, camera in enumerate(cameras):
            for output in camera.outputs:
                kernel, drawn, more = kernels[output]
                inputs = [drawn, first_pixel[output][number], *more]
                copies.append((kernel, inputs, self._arrays[camera.name, output][worlds]))

        def draw() -> None:
            mjw.refit_bvh(model, data, context)
            mjw.render(model, data, context)
            for kernel, inputs, target in copies:
                wp.launch(kernel, dim=target.shape[:2], inputs=inputs, outputs=[target])

        return draw

    def state(self) -> dict[str, Tensor]:
        """Return views of the frames that cannot be rendered again (`every` > 1), and of their ages."""
        late = {key: group for key, group in self._groups.items() if group.every > 1}
        ages = {f"age.{key}": group.age for key, group in late.items()}
        names = [camera.name for group in late.values() for camera in group.cameras]
        frames = {f"{name}.{key}": wp.to_torch(array) for (name, key), array in self._arrays.items() if name in names}
        return {**ages, **frames}

    def close(self) -> None:
        """Stop the rendering threads."""
        self._shares = []
        if self._pool is not None:
            self._pool.shutdown()


# Warp compiles kernels; type checkers do not understand their array types.
_Floats = wp.array2d(dtype=float)
_Ints = wp.array2d(dtype=int)


@no_type_check
@wp.kernel
def _find_roots(tree: wp.uint64, root: wp.array(dtype=int)):
    world = wp.tid()
    root[world] = wp.bvh_get_group_root(tree, world)


@no_type_check
@wp.kernel
def _copy_rgb(packed: wp.array2d(dtype=wp.uint32), first: int, rgb: wp.array3d(dtype=wp.uint8)):
    # Packed as ARGB, highest byte first.
    world, pixel = wp.tid()
    color = packed[world, first + pixel]
    for channel in range(3):
        rgb[world, pixel, channel] = wp.uint8((color >> wp.uint32(16 - 8 * channel)) & wp.uint32(255))


@no_type_check
@wp.kernel
def _copy_depth(drawn: _Floats, first: int, far: float, depth: _Floats):
    # A distance of 0 means no hit.
    world, pixel = wp.tid()
    distance = drawn[world, first + pixel]
    depth[world, pixel] = wp.where(distance > 0.0, distance, far)


@no_type_check
@wp.kernel
def _copy_segmentation(drawn: wp.array2d(dtype=wp.vec2i), first: int, body: wp.array(dtype=int), segmentation: _Ints):
    # A geom of -1 means no hit.
    world, pixel = wp.tid()
    geom = drawn[world, first + pixel][0]
    segmentation[world, pixel] = geom
    if geom >= 0:
        segmentation[world, pixel] = body[geom]
