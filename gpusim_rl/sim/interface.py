"""Interface between tasks and simulators: float32 tensors (masks: bool) on `Sim.device`, SI units, wxyz quaternions."""

from __future__ import annotations

import functools
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.files.provenance import check_versions
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.settings.simulators import NO_SIMULATOR, OLDER, SIMULATORS, check_warp, default_simulator
from gpusim_rl.sim.articulation import Articulation
from gpusim_rl.sim.bodies import MujocoTensors
from gpusim_rl.sim.camera import CameraImages
from gpusim_rl.sim.cameras import Cameras
from gpusim_rl.sim.params import Param, Params
from gpusim_rl.sim.rays import Rays
from gpusim_rl.sim.scene import Scene

logger = logging.getLogger("gpusim_rl")


def not_finite(tensors: Iterable[Tensor]) -> Bool[Tensor, " envs"]:
    """Return a mask of the envs in which any of the tensors, [envs, ...] each, contains NaN or infinity."""
    # 0 * x is NaN if x is NaN or infinite
    return functools.reduce(torch.logical_or, ((0.0 * x).flatten(1).any(dim=1) for x in tensors))


def put_pose(model: mujoco.MjModel, data: mujoco.MjData, pose: np.ndarray) -> None:
    """Write a row of `Sim.poses` into MuJoCo data and run forward kinematics."""
    data.qpos[:], moved = pose[: model.nq], pose[model.nq :]
    if moved.size:
        pos, quat = np.split(moved, [3 * model.nmocap])
        data.mocap_pos[:], data.mocap_quat[:] = pos.reshape(-1, 3), quat.reshape(-1, 4)
    mujoco.mj_kinematics(model, data)


class Sim(MujocoTensors, ABC):
    """`num_envs` copies of one scene, stepped together. Methods raise TaskError for unknown names."""

    dt: float
    """Physics step [s]."""
    qpos: Float[Tensor, "envs nq"]
    """Positions in the layout of the scene's MuJoCo model (`MjData.qpos`); read-only."""
    qvel: Float[Tensor, "envs nv"]
    """Velocities (`MjData.qvel`)."""
    ctrl: Float[Tensor, "envs nu"]
    """Controls (`MjData.ctrl`)."""
    diverged: Bool[Tensor, " envs"]
    """Worlds whose state became NaN, infinite or too large in the last `step`."""
    buffers: Mapping[str, int] = MappingProxyType({})
    """Capacity per world of buffers that can overflow, by setting: `{"njmax": 128, "nconmax": 32}`."""
    _cameras: Cameras
    _params: Params

    def __init__(self, scene: Scene, num_envs: int, device: torch.device) -> None:
        self.scene, self.num_envs, self.device = scene, num_envs, device
        self.dt = float(scene.model.opt.timestep)
        self.diverged = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.moves_mocap = False
        self._used = {"ctrl"}

    @property
    def poses(self) -> Float[Tensor, "envs poses"]:
        """`qpos`, then positions and orientations of mocap bodies if a task moves them; see `put_pose`."""
        if not self.moves_mocap:
            return self.qpos
        return torch.cat([self.qpos, self.mocap_pos.flatten(1), self.mocap_quat.flatten(1)], dim=1)

    @property
    def inputs(self) -> list[Tensor]:
        """Controls, applied forces and mocap poses that the task writes, [envs, ...] each."""
        return [getattr(self, field) for field in sorted(self._used)]

    @property
    def bad_inputs(self) -> Bool[Tensor, " envs"]:
        """Worlds with a NaN or infinite control, applied force or mocap pose, which simulators handle differently."""
        return not_finite(self.inputs)

    @property
    @abstractmethod
    def overflow(self) -> Bool[Tensor, " envs"]:
        """Worlds in which a full buffer dropped contacts or constraints since their last reset."""

    @property
    def needs(self) -> dict[str, Float[Tensor, ""]]:
        """Required size of each buffer in the last physics step; above its capacity while a world has overflowed it."""
        return {}

    def articulation(self, name: str) -> Articulation:
        """Return an articulation of the scene."""
        return Articulation(self, name)

    def param(self, name: str, articulation: str | None = None, elements: Sequence[str] | None = None) -> Param:
        """Return a physical parameter with per-world values.

            self.mass = sim.param("body_mass", "ant", ["torso"])
            self.mass.set(self.mass.default * self.random.uniform(0.8, 1.2, 1), where)

        Call it in the task's `__init__`: CUDA graphs captured earlier keep the shared values.

        Args:
            name: Field of MuJoCo's model (`body_mass`, `geom_friction`, ...) or `gravity`; see `params.FIELDS`.
            articulation: Owner; `ground` for geoms fixed to the world; None for gravity, cameras, lights, materials.
            elements: Bodies (also for geoms), joints, actuators, tendons, cameras, lights or materials; None for all.
        """
        return self._params.find(name, articulation, elements)

    @abstractmethod
    def rays(self, num_rays: int, ignore: Sequence[str] = ()) -> Rays:
        """Create `num_rays` rays per world, not blocked by articulations in `ignore`. Call in the task's `__init__`."""

    def camera(self, name: str) -> CameraImages:
        """Return a camera's images, zero until the first `draw`. Call it in the task's `__init__`.

        Raises:
            ConfigError: MuJoCo Warp is missing, or cannot render this scene.
            MemoryError: The images do not fit in free memory.
        """
        return self._cameras.find(name)

    @abstractmethod
    def step(self, substeps: int) -> None:
        """Advance all worlds by `substeps` physics steps with constant controls."""

    @abstractmethod
    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        """Reset the masked worlds to the scene's default state and clear their solver caches."""

    @abstractmethod
    def refresh(self) -> None:
        """Update body poses, body velocities and current sensor readings after writes to the state or to parameters."""

    def draw(self) -> None:
        """Render the requested cameras that are due. `VecEnv` calls it once per control step, after the resets."""
        self._cameras.draw()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the full state; after loading it, physics continues bit for bit if the backend supports that."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""

    @abstractmethod
    def close(self) -> None:
        """Stop threads and free memory."""


@dataclass(frozen=True, slots=True)
class SimChoice:
    """Chosen simulator and device, and the reason for the choice."""

    name: str
    device: torch.device
    reason: str

    def __str__(self) -> str:
        if self.name == NO_SIMULATOR:
            return f"{self.reason}, on {self.device}"
        return f"{self.name} on {self.device} ({self.reason})"


def choose_sim(name: str, device: torch.device) -> SimChoice:
    """Return the simulator for a `sim` setting, `auto` included; ConfigError if it does not run on the device."""
    if name == "auto":
        reason = "auto: CUDA device" if device.type == "cuda" else "auto: no CUDA device in use"
        return SimChoice(default_simulator(device.type).name, device, reason)
    kinds = SIMULATORS[name].devices
    if device.type not in kinds:
        other = f"sim={default_simulator(device.type).name}, or sim_device={kinds[0]}"
        hint = f"Try {other}; the policy can run on another device"
        raise ConfigError(f"sim={name} runs on {' or '.join(kinds)} only, got device {device}", hint=hint)
    return SimChoice(name, device, "as configured")


def make_sim(scene: Scene, choice: SimChoice, num_envs: int, cfg: SimConfig) -> Sim:
    """Build the chosen simulator, importing only its library; raise ConfigError if it does not support the scene."""
    simulator = SIMULATORS[choice.name]
    if simulator.cpu_threads and (cfg.njmax or cfg.nconmax):
        logger.warning("sim.njmax and sim.nconmax have no effect: sim=%s sizes its buffers automatically", choice.name)
    scene.choose(cfg.integrator, cfg.cone)
    if scene.model.nv == 0:
        raise TaskError("the scene has no joints: nothing in it can move")
    if simulator.uses_warp:
        check_warp(f"sim={choice.name}", "Try sim=mujoco sim_device=cpu")
    check_versions(f"sim={simulator.name}", simulator.needs, OLDER)
    module = importlib.import_module(f"gpusim_rl.sim.{simulator.name}")
    return getattr(module, simulator.cls)(scene, num_envs, cfg, choice.device)
