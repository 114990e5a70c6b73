"""What a task may ask of a simulator: the protocol that every simulator of `simulators.py` follows.

All tensors are float32 (masks are bool) on `Sim.device`, in SI units. Quaternions are wxyz, unit length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.sim.articulation import Articulation
from gpusim_rl.sim.bodies import MujocoTensors
from gpusim_rl.sim.camera import CameraImages
from gpusim_rl.sim.params import Param
from gpusim_rl.sim.rays import Rays
from gpusim_rl.sim.scene import Scene


def not_finite(tensors: Iterable[Tensor]) -> Bool[Tensor, " envs"]:
    """Returns the rows in which a number of any of the tensors, [envs, ...] each, is NaN or infinite."""
    # 0 * x is NaN there, and NaN is not 0
    return functools.reduce(torch.logical_or, ((0.0 * x).flatten(1).any(dim=1) for x in tensors))


def poses_of(sim: MujocoTensors) -> Float[Tensor, "envs poses"]:
    """Returns `Sim.poses`."""
    moved = (sim.mocap_pos.flatten(1), sim.mocap_quat.flatten(1)) if sim.moves_mocap else ()
    return torch.cat([sim.qpos, *moved], dim=1) if moved else sim.qpos


def put_pose(model: mujoco.MjModel, data: mujoco.MjData, pose: np.ndarray) -> None:
    """Writes a row of `Sim.poses` into data of MuJoCo, and computes the places of bodies and geoms."""
    data.qpos[:], moved = pose[: model.nq], pose[model.nq :]
    if moved.size:
        pos, quat = np.split(moved, [3 * model.nmocap])
        data.mocap_pos[:], data.mocap_quat[:] = pos.reshape(-1, 3), quat.reshape(-1, 4)
    mujoco.mj_kinematics(model, data)


@runtime_checkable
class Sim(Protocol):
    """`num_envs` copies of one scene, stepped together."""

    name: str
    num_envs: int
    device: torch.device
    dt: float
    """Physics step [s]."""
    scene: Scene
    qpos: Float[Tensor, "envs nq"]
    """Positions in the layout of the scene's MuJoCo model (`MjData.qpos`), for pictures: read, never write."""
    poses: Float[Tensor, "envs poses"]
    """`qpos`, behind it positions and orientations of the mocap bodies if a task moves them, for `put_pose`."""
    qvel: Float[Tensor, "envs nv"]
    """Velocities in that layout (`MjData.qvel`), for pictures of contacts."""
    ctrl: Float[Tensor, "envs nu"]
    """Controls (`MjData.ctrl`), for pictures of contacts."""
    diverged: Bool[Tensor, " envs"]
    """Worlds whose state became NaN, infinite or too large in the last `step`.

    `env/nan_guard.py` keeps the state before it; `run/finite_check.py` checks what the physics does not.
    """
    buffers: Mapping[str, int]
    """Room of each world in buffers that can overflow, by setting: `{"njmax": 128, "nconmax": 32}`; or empty."""

    @property
    def bad_inputs(self) -> Bool[Tensor, " envs"]:
        """Worlds in which a control, or a force that is applied, is NaN or infinite now.

        Simulators treat such a control differently: one takes it for 0, another one diverges.
        """
        ...

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        """Worlds in which contacts or constraints were dropped, since their last reset, because a buffer was full."""
        ...

    @property
    def needs(self) -> dict[str, Float[Tensor, ""]]:
        """Need of each of the `buffers` in the last physics step: the most of a world, or the mean where it is pooled.

        It is above the room if the buffer was full in a world since that world's last reset.
        """
        ...

    def articulation(self, name: str) -> Articulation:
        """Returns the articulation that the scene knows under this name."""
        ...

    def param(self, name: str, articulation: str | None = None, elements: Sequence[str] | None = None) -> Param:
        """Returns a physical parameter of which every world has its own values from now on.

            self.mass = sim.param("body_mass", "ant", ["torso"])
            self.mass.set(self.mass.default * self.random.uniform(0.8, 1.2, 1), where)

        Call it in the task's `__init__`: a CUDA graph that was captured before would continue to use the shared values.

        Args:
            name: Name in MuJoCo's model: `body_mass`, `geom_friction`, ..., or `gravity`; see `params.FIELDS`.
            articulation: Articulation that has it; None for gravity, cameras, lights and materials. `ground` has the
                geoms that are fixed to the world.
            elements: Bodies (also of geoms), joints, actuators, tendons, cameras, lights or materials; None for all.

        Raises:
            TaskError: There is no such parameter or element.
        """
        ...

    def rays(self, num_rays: int, ignore: Sequence[str] = ()) -> Rays:
        """Makes rays, such as those of a lidar; call it once, in the task's `__init__`.

        Args:
            num_rays: Rays in each world.
            ignore: Articulations that the rays pass through; the robot's own, mostly.

        Raises:
            TaskError: There is no such articulation.
        """
        ...

    def camera(self, name: str) -> CameraImages:
        """Returns the images of a camera of the scene; call it in the task's `__init__`.

        They are zero until `draw` is called first. All simulators draw with MuJoCo Warp's ray caster, on `device`.

        Args:
            name: Name that `scene.add_camera` got.

        Raises:
            TaskError: The scene has no such camera.
            ConfigError: MuJoCo Warp is missing, or cannot draw this scene.
            MemoryError: The images do not fit into the memory that is free.
        """
        ...

    def step(self, substeps: int) -> None:
        """Advances all worlds by `substeps` physics steps with the controls held."""
        ...

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        """Puts the worlds of the mask back to the scene's default state and clears the solver's caches."""
        ...

    def refresh(self) -> None:
        """Lets body poses and velocities follow the states written since the last call or step."""
        ...

    def draw(self) -> None:
        """Draws the cameras that are due, in the state that `step`, `reset` and `refresh` have left.

        `VecEnv` calls it once per control step, after the resets: the last observation of an episode has the images
        that its last action was chosen by. Cameras that no task has asked for are not drawn.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns the full state, so that a simulation loaded with it continues bit for bit where the backend can."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        ...

    def close(self) -> None:
        """Frees threads and memory."""
        ...
