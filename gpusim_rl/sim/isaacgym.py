"""`sim=isaacgym`: Isaac Gym Preview 4 through its tensor API, from the same scene.

Written against the documented API, and tested with a stand-in that keeps the API's rules. It has not run on the real
binary: the last one is for Python 3.8, and this package needs 3.10.

State looks as MuJoCo's here: quaternions wxyz, velocities of body origins. Isaac Gym's tensors hold xyzw and velocities
of centres of mass. They are stale from the moment a state is written until the next step. So what follows a state
(poses of bodies, Jacobians, rays) comes from the simulator that is the default on the device.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.settings.simulators import default_simulator, lacking
from gpusim_rl.sim import isaacgym_model
from gpusim_rl.sim.articulation import MujocoArticulation, check_contact_sensors, reference_pose
from gpusim_rl.sim.before_torch import require_library
from gpusim_rl.sim.choose import SimChoice, make_sim
from gpusim_rl.sim.interface import not_finite
from gpusim_rl.sim.masks import write_where
from gpusim_rl.sim.mujoco import MAX_STATE
from gpusim_rl.sim.params import Param
from gpusim_rl.sim.quaternion import quat_rotate, quat_rotate_inverse
from gpusim_rl.sim.rays import MujocoRays
from gpusim_rl.sim.scene import Scene

require_library("isaacgym")
gymapi: Any = importlib.import_module("isaacgym.gymapi")
gymtorch: Any = importlib.import_module("isaacgym.gymtorch")

logger = logging.getLogger("gpusim_rl")

START_LINE = (
    "sim=isaacgym follows the documented API of Isaac Gym Preview 4; it was tested with a stand-in, never with the real"
    " library, which is for Python 3.6 to 3.8. PhysX has its own solver: sim.integrator and sim.cone have no effect"
)

# PhysX's settings, as IsaacGymEnvs has them for most tasks.
_ITERATIONS = 4  # of positions; `sim.iterations` gives another number
_CONTACT_OFFSET = 0.02  # m, at which contacts are generated
_BOUNCE_THRESHOLD = 0.2  # m/s
_MAX_DEPENETRATION = 100.0  # m/s
_PAIRS = 8 * 1024 * 1024

_PLACE_TOLERANCE = 1e-3  # m
_ANGLE_TOLERANCE = 1e-2  # rad
_VEL = mujoco.mjtStage.mjSTAGE_VEL.value


class IsaacGymSim:
    """`num_envs` worlds in one Isaac Gym simulation; see `gpusim_rl.sim.Sim`.

    Isaac Gym has one simulation in a process. `overflow` is never true: PhysX prints to stderr that a buffer is full,
    and does not say of which env.
    """

    name = "isaacgym"
    buffers = ""
    _exists: ClassVar[bool] = False

    def __init__(self, scene: Scene, num_envs: int, cfg: SimConfig, device: torch.device) -> None:
        model = scene.model
        self.scene, self.num_envs, self.device = scene, num_envs, device
        self.dt = float(model.opt.timestep)
        isaacgym_model.check_scene(model)
        if IsaacGymSim._exists:
            raise ConfigError("sim=isaacgym: Isaac Gym has one simulation in a process; close the other one first")
        logger.warning(START_LINE)
        if ignored := isaacgym_model.left_out(model):
            logger.warning("sim=isaacgym leaves out of this scene: %s", ", ".join(ignored))
        self._cfg, self._gym = cfg, gymapi.acquire_gym()
        self._sim = self._gym.create_sim(device.index or 0, -1, gymapi.SIM_PHYSX, self._settings())
        if self._sim is None:
            raise ConfigError(f"sim=isaacgym cannot make a simulation on {device}; try sim=mjwarp")
        IsaacGymSim._exists = True
        self._worlds = isaacgym_model.make_worlds(gymapi, self._gym, self._sim, scene, num_envs)
        self._gym.prepare_sim(self._sim)

        # Views of Isaac Gym's memory: it changes when they are refreshed.
        self._root = self._acquire("actor_root_state").view(num_envs, -1, 13)
        self._dof = self._acquire("dof_state").view(num_envs, -1, 2)
        self._body = self._acquire("rigid_body_state").view(num_envs, -1, 13)
        self._refreshed = ["actor_root_state", "dof_state"]
        self._sensed = [model.body(body).id for body in scene.contact_sensors]
        if self._sensed:
            self._contact = self._acquire("net_contact_force").view(num_envs, -1, 3)
            self._force_sensor = self._acquire("force_sensor").view(num_envs, -1, 6)
            self._refreshed += ["rigid_body_state", "net_contact_force", "force_sensor"]
        if scene.effort_sensors:
            self._dof_force = self._acquire("dof_force").view(num_envs, -1)
            self._refreshed.append("dof_force")

        self._start = torch.from_numpy(reference_pose(model)).to(device)
        self.qpos = self._start.repeat(num_envs, 1)
        self.qvel = torch.zeros(num_envs, model.nv, device=device)
        self.ctrl = torch.zeros(num_envs, model.nu, device=device)
        self.qfrc_applied = torch.zeros(num_envs, model.nv, device=device)
        self.xfrc_applied = torch.zeros(num_envs, model.nbody, 6, device=device)
        self.sensordata = torch.zeros(num_envs, model.nsensordata, device=device)
        # force [N], world frame; force [N] and torque [N m], body's frame; orientation wxyz
        self.contact_data = torch.zeros(num_envs, len(self._sensed), 13, device=device)
        self._find_indices()
        self._make_drives()

        self._written = torch.ones(num_envs, dtype=torch.bool, device=device)  # worlds to be set from qpos and qvel
        self._restored = torch.zeros(num_envs, dtype=torch.bool, device=device)  # those to be set as Isaac Gym had them
        self._to_set = True  # whether there are such worlds; known without reading a mask
        self._reads_masks = device.type == "cpu"
        self._kept: list[Tensor] = []  # what Isaac Gym reads until the end of `simulate`
        self._applies_wrenches = False
        self._diverged = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._mirror: Any = None
        self._check_poses()

    def _settings(self) -> Any:
        params = gymapi.SimParams()
        params.dt, params.substeps = self.dt, 1
        params.up_axis = gymapi.UP_AXIS_Z
        params.gravity = gymapi.Vec3(*self.scene.model.opt.gravity.tolist())
        params.use_gpu_pipeline = params.physx.use_gpu = self.device.type == "cuda"
        params.physx.solver_type = 1  # TGS
        params.physx.num_position_iterations = self._cfg.iterations or _ITERATIONS
        params.physx.num_velocity_iterations = 1
        params.physx.contact_offset, params.physx.rest_offset = _CONTACT_OFFSET, 0.0
        params.physx.bounce_threshold_velocity = _BOUNCE_THRESHOLD
        params.physx.max_depenetration_velocity = _MAX_DEPENETRATION
        params.physx.max_gpu_contact_pairs = _PAIRS
        if self._cfg.num_threads:
            params.physx.num_threads = self._cfg.num_threads
        return params

    def _acquire(self, what: str) -> Tensor:
        return gymtorch.wrap_tensor(getattr(self._gym, f"acquire_{what}_tensor")(self._sim))

    def _tensor(self, values: Any) -> Float[Tensor, "..."]:
        return torch.as_tensor(np.asarray(values), dtype=torch.float32).to(self.device)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _find_indices(self) -> None:
        model, worlds = self.scene.model, self._worlds
        self._actor_ids = torch.tensor(worlds.actor_ids, dtype=torch.int32, device=self.device).view(self.num_envs, -1)
        self._com = [self._tensor(model.body_ipos[tree.bodies[0]]).expand(self.num_envs, 3) for tree in worlds.trees]
        self._joints = sorted(worlds.dofs, key=worlds.dofs.__getitem__)  # in Isaac Gym's order
        places = model.jnt_qposadr[self._joints]
        self._joint_q = self._index(places.tolist())
        self._joint_v = self._index(model.jnt_dofadr[self._joints].tolist())
        self._ref = self._tensor(model.qpos0[places])  # Isaac Gym counts from the pose that the file draws
        if missing := [body for body in self._sensed if body not in worlds.bodies]:
            raise TaskError(f"body {model.body(missing[0]).name!r} has a contact sensor and nothing that can touch")
        self._sensed_bodies = self._index([worlds.bodies[body] for body in self._sensed])
        self._sensors = self._index([worlds.force_sensors[body] for body in self._sensed])
        self._model_bodies = self._index(list(worlds.bodies))
        self._bodies = self._index(list(worlds.bodies.values()))
        names = {f"{model.joint(joint).name}/effort": i for i, joint in enumerate(self._joints)}
        sensors = {model.sensor(i).name: int(model.sensor_adr[i]) for i in range(model.nsensor)}
        self._effort_columns = self._index([sensors[name] for name in names if name in sensors])
        self._effort_dofs = self._index([names[name] for name in names if name in sensors])

    def _make_drives(self) -> None:
        model, drives = self.scene.model, isaacgym_model.drives(self.scene.model)
        dofs = model.jnt_dofadr[self._joints]
        by_position, by_velocity = drives.stiffness[dofs] > 0.0, drives.by_velocity[dofs]
        by_effort = ~(by_position | by_velocity)
        modes = {"position_target": by_position, "velocity_target": by_velocity, "actuation_force": by_effort}
        self._modes = [mode for mode, has in modes.items() if has.any()]
        gain = np.where(by_position, drives.stiffness[dofs], np.where(by_velocity, drives.damping[dofs], 1.0))
        self._gain = self._tensor(gain)
        self._per_control, self._offset = self._tensor(drives.per_control[dofs].T), self._tensor(drives.offset[dofs])
        feeds_back = drives.feeds_back[dofs]
        self._limit = self._tensor(np.where(feeds_back, np.inf, drives.effort_limit[dofs]))  # PhysX limits servos
        limited = model.actuator_ctrllimited[:, None] != 0
        ranges = np.where(limited, model.actuator_ctrlrange, [-np.inf, np.inf])
        self._low, self._high = self._tensor(ranges).unbind(dim=1)
        # A drive without feedback of its own gives what it is told, and what PhysX adds are the joint's springs.
        self._is_motor = torch.from_numpy(~feeds_back).to(self.device)

    def _check_poses(self) -> None:
        """Compares, once, where Isaac Gym and MuJoCo see the bodies of a world when all joints are turned."""
        model, data = self.scene.model, mujoco.MjData(self.scene.model)
        for joint in self._joints:
            low, high = model.jnt_range[joint] if model.jnt_limited[joint] else (-0.5, 0.5)
            self.qpos[:, model.jnt_qposadr[joint]] = float(0.7 * low + 0.3 * high)
        self._set_states()
        self._simulate()
        self._refresh(["actor_root_state", "dof_state", "rigid_body_state"])
        self._read_state()
        data.qpos = self.qpos[0].cpu().numpy()
        mujoco.mj_kinematics(model, data)
        numbers, seen = self._model_bodies.tolist(), self._body[0, self._bodies].cpu().double().numpy()
        off = np.abs(seen[:, :3] - data.xpos[numbers]).max(axis=1)
        turned = 2.0 * np.arccos(
            np.abs((np.roll(seen[:, 3:7], 1, axis=1) * data.xquat[numbers]).sum(axis=1)).clip(0.0, 1.0)
        )
        wrong = ~((off < _PLACE_TOLERANCE) & (turned < _ANGLE_TOLERANCE))
        if wrong.any():
            body = model.body(numbers[int(np.argmax(wrong))]).name
            self.close()
            raise ConfigError(f"sim=isaacgym imports {body!r} with another pose than MuJoCo; try sim=mjwarp")
        self.reset(torch.ones_like(self._written))

    def articulation(self, name: str) -> IsaacGymArticulation:
        return IsaacGymArticulation(self, name)

    def param(self, name: str, articulation: str | None = None, elements: Sequence[str] | None = None) -> Param:
        raise ConfigError(lacking(self.name, "params"))

    def mirror(self) -> Any:
        """The same worlds in the default simulator of the device, which follows their state and is never stepped."""
        if self._mirror is None:
            choice = SimChoice(default_simulator(self.device.type).name, self.device, "beside sim=isaacgym")
            self._mirror = make_sim(self.scene, choice, self.num_envs, self._cfg)
            self._update_mirror()
        return self._mirror

    def _update_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.qpos.copy_(self.qpos)
            self._mirror.qvel.copy_(self.qvel)
            self._mirror.wrote_state(torch.ones_like(self._written))
            self._mirror.refresh()

    def derived(self, field: str) -> Tensor:
        return self.mirror().derived(field)

    def current_sensors(self, stage: int) -> Float[Tensor, "envs nsensordata"]:
        if stage > _VEL:
            raise TaskError(lacking(self.name, "forces"))
        return self.mirror().current_sensors(stage)

    def rays(self, num_rays: int, ignore: Sequence[str] = ()) -> MujocoRays:
        return self.mirror().rays(num_rays, ignore)

    def wrote_state(self, where: Bool[Tensor, " envs"]) -> None:
        self._written |= where
        self._to_set = True

    def uses(self, field: str) -> None:
        self._applies_wrenches |= field == "xfrc_applied"

    @property
    def diverged(self) -> Bool[Tensor, " envs"]:
        return self._diverged

    @property
    def bad_inputs(self) -> Bool[Tensor, " envs"]:
        return not_finite((self.ctrl, self.qfrc_applied, self.xfrc_applied))

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        return torch.zeros_like(self._diverged)

    def step(self, substeps: int) -> None:
        self._set_states()
        control = (self.ctrl.clamp(self._low, self._high) @ self._per_control).clamp(-self._limit, self._limit)
        effort = control + self._offset + self.qfrc_applied.index_select(1, self._joint_v)
        for _ in range(substeps):
            for mode in self._modes:  # a dof ignores what is for another mode than its own
                getattr(self._gym, f"set_dof_{mode}_tensor")(self._sim, self._unwrap(effort / self._gain))
            if self._applies_wrenches:  # they act in one step only
                self._apply_wrenches()
            self._simulate()
        self._refresh(self._refreshed)
        self._read_state()
        self._read_forces(control)
        self._update_mirror()
        # amax hands NaN on, and a comparison with NaN is false
        fastest = torch.maximum(self.qpos.abs().amax(dim=1), self.qvel.abs().amax(dim=1))
        torch.logical_not(fastest < MAX_STATE, out=self._diverged)

    def _unwrap(self, tensor: Tensor) -> Any:
        self._kept.append(tensor.contiguous())
        return gymtorch.unwrap_tensor(self._kept[-1])

    def _simulate(self) -> None:
        self._gym.simulate(self._sim)
        if self.device.type == "cpu":
            self._gym.fetch_results(self._sim, True)
        self._kept.clear()

    def _refresh(self, names: Sequence[str]) -> None:
        for name in names:
            getattr(self._gym, f"refresh_{name}_tensor")(self._sim)

    def _apply_wrenches(self) -> None:
        wrenches = torch.zeros(*self._body.shape[:2], 6, device=self.device)
        wrenches.index_copy_(1, self._bodies, self.xfrc_applied.index_select(1, self._model_bodies))
        force, torque = wrenches.view(-1, 6).split(3, dim=1)
        apply = self._gym.apply_rigid_body_force_tensors
        apply(self._sim, self._unwrap(force), self._unwrap(torque), gymapi.ENV_SPACE)

    def _set_states(self) -> None:
        """Sets the states that were written: once before a step, for of several calls Isaac Gym takes only the last.

        A list of actors needs the mask on the host. On CUDA that would wait for the device; so the states of all worlds
        are set there, and those that nobody wrote get the numbers that Isaac Gym gave.
        """
        if not self._to_set:
            return
        written = self._written[:, None]
        for actor, tree in enumerate(self._worlds.trees):
            if tree.is_free:
                pos, quat = self.qpos[:, tree.first_q : tree.first_q + 7].split([3, 4], dim=1)
                lin_vel, ang_vel = self.qvel[:, tree.first_v : tree.first_v + 6].split(3, dim=1)
                ang_vel = quat_rotate(quat, ang_vel)
                lin_vel = lin_vel + torch.linalg.cross(ang_vel, quat_rotate(quat, self._com[actor]))
                state = torch.cat([pos, quat.roll(-1, dims=1), lin_vel, ang_vel], dim=1)
                write_where(written, state, self._root[:, actor])
        pos = self.qpos.index_select(1, self._joint_q) - self._ref
        state = torch.stack([pos, self.qvel.index_select(1, self._joint_v)], dim=-1)
        write_where(written[..., None], state, self._dof)
        worlds = (self._written | self._restored).nonzero()[:, 0] if self._reads_masks else None
        trees = self._worlds.trees
        for name, tensor, actors in (
            ("actor_root_state", self._root, [i for i, tree in enumerate(trees) if tree.is_free]),
            ("dof_state", self._dof, [i for i, tree in enumerate(trees) if tree.joints]),
        ):
            if not actors:
                continue
            if worlds is None:
                getattr(self._gym, f"set_{name}_tensor")(self._sim, self._unwrap(tensor))
            elif len(worlds):
                ids = self._unwrap(self._actor_ids[worlds][:, actors].flatten())
                count = len(worlds) * len(actors)
                getattr(self._gym, f"set_{name}_tensor_indexed")(self._sim, self._unwrap(tensor), ids, count)
        self._written.zero_()
        self._restored.zero_()
        self._to_set = False

    def _read_state(self) -> None:
        for actor, tree in enumerate(self._worlds.trees):
            if tree.is_free:
                pos, quat, lin_vel, ang_vel = self._root[:, actor].split([3, 4, 3, 3], dim=1)
                quat = quat.roll(1, dims=1)
                lin_vel = lin_vel - torch.linalg.cross(ang_vel, quat_rotate(quat, self._com[actor]))
                velocity = torch.cat([lin_vel, quat_rotate_inverse(quat, ang_vel)], dim=1)
                self.qpos[:, tree.first_q : tree.first_q + 7] = torch.cat([pos, quat], dim=1)
                self.qvel[:, tree.first_v : tree.first_v + 6] = velocity
        self.qpos.index_copy_(1, self._joint_q, self._dof[..., 0] + self._ref)
        self.qvel.index_copy_(1, self._joint_v, self._dof[..., 1])

    def _read_forces(self, control: Float[Tensor, "envs dofs"]) -> None:
        if self._sensed:
            force = self._contact.index_select(1, self._sensed_bodies)
            local = self._force_sensor.index_select(1, self._sensors)
            quat = self._body.index_select(1, self._sensed_bodies)[..., 3:7].roll(1, dims=-1)
            self.contact_data.copy_(torch.cat([force, local, quat], dim=-1))
        if self.scene.effort_sensors:
            effort = torch.where(self._is_motor, control, self._dof_force)
            self.sensordata.index_copy_(1, self._effort_columns, effort.index_select(1, self._effort_dofs))

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        mask = where[:, None]
        write_where(mask, self._start, self.qpos)
        for tensor in (self.qvel, self.ctrl, self.qfrc_applied, self.sensordata):
            tensor.masked_fill_(mask, 0.0)
        for tensor in (self.xfrc_applied, self.contact_data):
            tensor.masked_fill_(mask[..., None], 0.0)
        self.wrote_state(where)

    def refresh(self) -> None:
        if self._to_set:
            self._update_mirror()

    def scene_qpos(self) -> Float[Tensor, "envs nq"]:
        return self.qpos

    def _tensors(self) -> dict[str, Tensor]:
        names = ("qpos", "qvel", "ctrl", "qfrc_applied", "xfrc_applied", "sensordata", "contact_data")
        own = {name: getattr(self, name) for name in names}
        return own | {"root": self._root, "dof": self._dof, "written": self._written, "diverged": self._diverged}

    def state_dict(self) -> dict[str, Any]:
        """The state; what PhysX keeps of contacts from step to step is not in it, for it does not tell."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])
        self._restored.fill_(True)
        self._to_set = True
        self._update_mirror()

    def close(self) -> None:
        """Destroys the simulation, so that this process can make another one."""
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None
        if self._sim is not None:
            self._gym.destroy_sim(self._sim)
            self._sim, IsaacGymSim._exists = None, False


class IsaacGymArticulation(MujocoArticulation):
    """See `gpusim_rl.sim.Articulation`.

    `joint_effort` of a servo is the force of PhysX's drive: the joint's own spring and damper, and `set_joint_effort`,
    are in it.
    """

    def __init__(self, sim: IsaacGymSim, name: str) -> None:
        super().__init__(sim, name)
        self._isaacgym = sim

    def contacts(self, names: Sequence[str]) -> IsaacGymContacts:
        self._find_bodies(names)
        return IsaacGymContacts(self._isaacgym, [f"{self._prefix}{body}" for body in names])


class IsaacGymContacts:
    """See `gpusim_rl.sim.Contacts`.

    Forces in the world frame are Isaac Gym's net contact forces. Torques, and what is in the body's frame, come from
    force sensors of what PhysX's solver does to the body: contacts, and joints that are at their limits.
    """

    def __init__(self, sim: IsaacGymSim, bodies: list[str]) -> None:
        check_contact_sensors(sim.scene, bodies)
        known = list(sim.scene.contact_sensors)
        self._sim, self._columns = sim, torch.tensor([known.index(body) for body in bodies], device=sim.device)

    def _read(self) -> tuple[Tensor, ...]:
        return self._sim.contact_data.index_select(1, self._columns).split([3, 3, 3, 4], dim=-1)

    @property
    def force(self) -> Float[Tensor, "envs bodies 3"]:
        return self._read()[0]

    @property
    def torque(self) -> Float[Tensor, "envs bodies 3"]:
        _, _, torque, quat = self._read()
        return quat_rotate(quat, torque)

    def in_body_frame(self) -> Float[Tensor, "envs bodies 6"]:
        _, force, torque, _ = self._read()
        return torch.cat([force, torque], dim=-1)
