"""What `isaacgym.gymapi` documents, as far as `sim=isaacgym` uses it. It does not import torch.

Contracts that are kept:
- one simulation at a time; nothing is created after `prepare_sim`, nothing simulated or acquired before it
- positions are those in the env, quaternions xyzw, velocities those of centres of mass; all numbers float32
- an acquired tensor changes only when it is refreshed
- what is set acts at the next `simulate`; each setter of states is called once before it
- setters take whole tensors; lists of actors are int32, with their count, and live until `simulate`
- a dof ignores targets and efforts that are for another mode than its own; forces on bodies act in one step
- on the CPU pipeline `fetch_results` ends a step
- dofs and bodies are in an order of its own: depth first, by name
"""

from __future__ import annotations

import copy
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

SIM_PHYSX, SIM_FLEX = "SIM_PHYSX", "SIM_FLEX"
UP_AXIS_Y, UP_AXIS_Z = "UP_AXIS_Y", "UP_AXIS_Z"
DOMAIN_ENV, DOMAIN_SIM = "DOMAIN_ENV", "DOMAIN_SIM"
ENV_SPACE, LOCAL_SPACE, GLOBAL_SPACE = "ENV_SPACE", "LOCAL_SPACE", "GLOBAL_SPACE"
DOF_MODE_NONE, DOF_MODE_POS, DOF_MODE_VEL, DOF_MODE_EFFORT = range(4)

# Not of the API: a compiled scene whose options, contacts and implicit damping the physics behind the stand-in takes.
# PhysX has its own; a test that compares with MuJoCo needs the same.
physics_like: mujoco.MjModel | None = None


class ContractError(RuntimeError):
    """A rule of the API was broken."""


class Tensor:
    """An address with a shape and a type."""

    def __init__(self, array: np.ndarray, owner: Any = None) -> None:
        self.array, self.owner = array, owner


@dataclass
class Vec3:
    x: float = 0.0
    y: float = 0.0
    z: float = 0.0


@dataclass
class Quat:
    x: float = 0.0
    y: float = 0.0
    z: float = 0.0
    w: float = 1.0


@dataclass
class Transform:
    p: Vec3 | None = None
    r: Quat | None = None


@dataclass
class IndexRange:
    start: int
    count: int


class _Documented:
    """Has the documented properties and no others, as the classes of the binary."""

    __slots__ = ()

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, None)


class PhysXParams(_Documented):
    __slots__ = (
        *("always_use_articulations", "bounce_threshold_velocity", "contact_collection", "contact_offset"),
        *("default_buffer_size_multiplier", "friction_correlation_distance", "friction_offset_threshold"),
        *("max_depenetration_velocity", "max_gpu_contact_pairs", "num_position_iterations", "num_subscenes"),
        *("num_threads", "num_velocity_iterations", "rest_offset", "solver_type", "use_gpu"),
    )


class SimParams(_Documented):
    __slots__ = (
        *(
            "dt",
            "enable_actor_creation_warning",
            "flex",
            "gravity",
            "num_client_threads",
            "physx",
            "stress_visualization",
        ),
        *("substeps", "up_axis", "use_gpu_pipeline"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.dt, self.substeps, self.up_axis, self.physx = 1 / 60, 2, UP_AXIS_Y, PhysXParams()


class AssetOptions(_Documented):
    __slots__ = (
        *("angular_damping", "armature", "collapse_fixed_joints", "convex_decomposition_from_submeshes"),
        *("default_dof_drive_mode", "density", "disable_gravity", "enable_gyroscopic_forces", "fix_base_link"),
        *("flip_visual_attachments", "linear_damping", "max_angular_velocity", "max_linear_velocity"),
        *("mesh_normal_mode", "min_particle_mass", "override_com", "override_inertia"),
        *("replace_cylinder_with_capsule", "slices_per_cylinder", "tendon_limit_stiffness", "thickness"),
        *("use_mesh_materials", "use_physx_armature", "vhacd_enabled", "vhacd_params"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.max_angular_velocity, self.angular_damping = 64.0, 0.5


class PlaneParams(_Documented):
    __slots__ = ("distance", "dynamic_friction", "normal", "restitution", "segmentation_id", "static_friction")


class TriangleMeshParams(_Documented):
    __slots__ = (
        *("dynamic_friction", "nb_triangles", "nb_vertices", "restitution", "segmentation_id", "static_friction"),
        "transform",
    )


class ForceSensorProperties(_Documented):
    __slots__ = ("enable_constraint_solver_forces", "enable_forward_dynamics_forces", "use_world_frame")

    def __init__(self) -> None:
        self.enable_constraint_solver_forces = self.enable_forward_dynamics_forces = True
        self.use_world_frame = False


class RigidShapeProperties(_Documented):
    __slots__ = (
        *("compliance", "contact_offset", "filter", "friction", "rest_offset", "restitution", "rolling_friction"),
        *("thickness", "torsion_friction"),
    )


_DOF = [("hasLimits", bool), ("lower", "f4"), ("upper", "f4"), ("driveMode", "i4"), ("velocity", "f4")]
_DOF += [(name, "f4") for name in ("effort", "stiffness", "damping", "friction", "armature")]
_TAGS = {"mujoco", "compiler", "worldbody", "body", "inertial", "freejoint", "joint", "geom"}


class _Asset:
    def __init__(self, xml: str, options: AssetOptions) -> None:
        if unknown := {element.tag for element in ET.fromstring(xml).iter()} - _TAGS:
            raise ContractError(f"the importer of MJCF does not take {unknown}")
        self.xml, self.options = xml, options
        spec = mujoco.MjSpec.from_string(xml)
        (root,) = spec.worldbody.bodies
        if bool(options.fix_base_link) == any(joint.type == mujoco.mjtJoint.mjJNT_FREE for joint in root.joints):
            raise ContractError("fix_base_link says something else than the file")
        if options.fix_base_link and root.joints:
            raise ContractError("a fixed base has no joint")
        self.bodies: list[Any] = []
        waiting = [root]
        while waiting:
            body = waiting.pop()
            self.bodies.append(body)
            waiting += sorted(body.bodies, key=lambda child: child.name, reverse=True)
        self.spec = spec
        self.joints = [j for body in self.bodies for j in body.joints if j.type != mujoco.mjtJoint.mjJNT_FREE]
        self.shapes = [RigidShapeProperties() for body in self.bodies for _ in body.geoms]
        self.sensors: list[int] = []
        self.dofs = np.zeros(len(self.joints), dtype=_DOF)
        self.dofs["lower"], self.dofs["upper"] = np.array([j.range for j in self.joints]).reshape(-1, 2).T
        self.dofs["hasLimits"] = [bool(joint.limited) for joint in self.joints]


@dataclass
class _Actor:
    asset: _Asset
    pose: Transform
    group: int
    shapes: list[RigidShapeProperties]
    dofs: np.ndarray
    senses_dofs: bool = False


class _Sim:
    def __init__(self, params: SimParams) -> None:
        self.params, self.planes, self.meshes, self.envs = params, [], [], []
        self.prepared, self.simulated = False, False
        self.states: dict[str, tuple[np.ndarray, np.ndarray, Any]] = {}  # by setter: values, actors, owner of the list
        self.targets: dict[int, np.ndarray] = {}
        self.forces: np.ndarray | None = None
        self.tensors: dict[str, np.ndarray] = {}

    # the physics: all envs have the same actors
    def compile(self) -> None:
        like, spec = physics_like, mujoco.MjSpec()
        for plane in self.planes:
            normal, quat = np.array([plane.normal.x, plane.normal.y, plane.normal.z]), np.zeros(4)
            mujoco.mju_quatZ2Vec(quat, normal)
            kind = mujoco.mjtGeom.mjGEOM_PLANE
            spec.worldbody.add_geom(
                type=kind,
                size=[0, 0, 1],
                pos=-plane.distance * normal,
                quat=quat,
                friction=[plane.static_friction, 0, 0],
            )
        for vertices, triangles in self.meshes:
            self.add_terrain(spec, vertices.reshape(-1, 3), triangles.reshape(-1, 3))
        actors = self.envs[0]
        for k, actor in enumerate(actors):
            p, r = actor.pose.p, actor.pose.r
            frame = spec.worldbody.add_frame(pos=[p.x, p.y, p.z], quat=[r.w, r.x, r.y, r.z])
            spec.attach(mujoco.MjSpec.from_string(actor.asset.xml), prefix=f"{k}/", frame=frame)
            for body in actor.asset.bodies:
                spec.body(f"{k}/{body.name}").gravcomp = float(bool(actor.asset.options.disable_gravity))
            for joint, dof in zip(actor.asset.joints, actor.dofs, strict=True):
                held = dof["stiffness"] if dof["driveMode"] == DOF_MODE_POS else 0.0
                actuator = spec.add_actuator(target=f"{k}/{joint.name}", trntype=mujoco.mjtTrn.mjTRN_JOINT)
                actuator.biastype = mujoco.mjtBias.mjBIAS_AFFINE
                actuator.gainprm[0], actuator.biasprm[1:3] = 1.0, [-held, -dof["damping"]]
                actuator.forcelimited, actuator.forcerange = True, [-dof["effort"], dof["effort"]]
        gravity = self.params.gravity
        spec.option.timestep, spec.option.gravity = (
            self.params.dt / self.params.substeps,
            [gravity.x, gravity.y, gravity.z],
        )
        model = self.model = spec.compile()
        names = [(k, body.name) for k, actor in enumerate(actors) for body in actor.asset.bodies]
        self.bodies = [model.body(f"{k}/{name}").id for k, name in names]
        joints = [model.joint(f"{k}/{j.name}") for k, actor in enumerate(actors) for j in actor.asset.joints]
        self.dof_q = np.array([joint.qposadr[0] for joint in joints], dtype=int)
        self.dof_v = np.array([joint.dofadr[0] for joint in joints], dtype=int)
        properties = np.concatenate([actor.dofs for actor in actors])
        self.mode, self.gain = properties["driveMode"], np.ones(len(joints))
        self.gain[self.mode == DOF_MODE_POS] = properties["stiffness"][self.mode == DOF_MODE_POS]
        self.gain[self.mode == DOF_MODE_VEL] = properties["damping"][self.mode == DOF_MODE_VEL]
        model.dof_armature[self.dof_v] = properties["armature"]
        self.filters = {}
        for k, actor in enumerate(actors):
            for body, first in zip(actor.asset.bodies, actor.asset.first_shapes, strict=True):
                number = model.body(f"{k}/{body.name}").id
                for i in range(model.body_geomnum[number]):
                    shape, geom = actor.shapes[first + i], model.body_geomadr[number] + i
                    model.geom_friction[geom] = shape.friction, shape.torsion_friction, shape.rolling_friction
                    self.filters[geom] = shape.filter
        if like is not None:
            self.take_over(like, names, joints)
        self.sensors = [
            model.body(f"{k}/{actor.asset.bodies[i].name}").id
            for k, actor in enumerate(actors)
            for i in actor.asset.sensors
        ]
        self.roots = [model.body(f"{k}/{actor.asset.bodies[0].name}").id for k, actor in enumerate(actors)]
        self.datas = [mujoco.MjData(model) for _ in self.envs]
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self.scratch = mujoco.MjData(model)
        self.root = np.zeros((len(self.envs) * len(self.roots), 13), dtype=np.float32)
        self.dof = np.zeros((len(self.envs) * len(joints), 2), dtype=np.float32)
        for e in range(len(self.envs)):
            self.from_mujoco(e)
        self.net = np.zeros((len(self.envs), model.nbody, 3))
        self.local = np.zeros((len(self.envs), model.nbody, 6))
        self.targets = {mode: np.zeros((len(self.envs), len(joints))) for mode in range(1, 4)}

    def add_terrain(self, spec: mujoco.MjSpec, vertices: np.ndarray, triangles: np.ndarray) -> None:
        """MuJoCo has no such meshes: it gets the terrain of `physics_like`, which the mesh must be the surface of."""
        like = physics_like
        if like is None or triangles.max() >= len(vertices):
            raise NotImplementedError("the stand-in has the terrain of physics_like")
        data, of_ray = mujoco.MjData(like), np.array([0.0, 0.0, -1.0])
        mujoco.mj_kinematics(like, data)
        corners = vertices[triangles].astype(float)
        up = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])[:, 2] > 1e-9
        for middle in corners[up].mean(axis=1)[:: max(1, up.sum() // 500)]:
            seen = mujoco.mj_ray(
                like, data, middle + np.array([0.0, 0.0, 5.0]), of_ray, None, 1, -1, np.zeros(1, dtype=np.int32)
            )
            if abs(seen - 5.0) > 1e-3:
                raise ContractError(f"the mesh is {5.0 - seen} m above the ground of the scene at {middle}")
        for geom in np.flatnonzero((like.geom_bodyid == 0) & (like.geom_type != mujoco.mjtGeom.mjGEOM_PLANE)):
            added = spec.worldbody.add_geom(
                type=like.geom_type[geom], pos=like.geom_pos[geom], quat=like.geom_quat[geom]
            )
            if like.geom_type[geom] != mujoco.mjtGeom.mjGEOM_HFIELD:
                added.size = like.geom_size[geom]
                continue
            rows, columns, start = (int(of[0]) for of in (like.hfield_nrow, like.hfield_ncol, like.hfield_adr))
            values = like.hfield_data[start : start + rows * columns]
            added.hfieldname = "terrain"
            spec.add_hfield(name="terrain", size=like.hfield_size[0], nrow=rows, ncol=columns, userdata=values)

    def take_over(self, like: mujoco.MjModel, names: list[tuple[int, str]], joints: list[Any]) -> None:
        model = self.model
        for name in (
            name for name in dir(model.opt) if not name.startswith("_") and name not in ("timestep", "gravity")
        ):
            setattr(model.opt, name, getattr(like.opt, name))
        pairs = [(model.body(f"{k}/{name}").id, int(name.split("_")[1])) for k, name in names if name != "base"]
        for mine, theirs in [(0, 0), *pairs]:
            geoms = [
                g for g in np.flatnonzero(like.geom_bodyid == theirs) if like.geom_contype[g] | like.geom_conaffinity[g]
            ]
            for i, geom in enumerate(geoms):
                for field in (
                    "contype",
                    "conaffinity",
                    "condim",
                    "solref",
                    "solimp",
                    "margin",
                    "gap",
                    "solmix",
                    "priority",
                ):
                    getattr(model, f"geom_{field}")[model.body_geomadr[mine] + i] = getattr(like, f"geom_{field}")[geom]
                if mine == 0:
                    model.geom_friction[model.body_geomadr[mine] + i] = like.geom_friction[geom]
        for i, joint in enumerate(joints):
            theirs = int(joint.name.split("_")[1])
            dof = joint.dofadr[0]
            model.jnt_solref[joint.id], model.jnt_solimp[joint.id] = like.jnt_solref[theirs], like.jnt_solimp[theirs]
            damping = like.dof_damping[like.jnt_dofadr[theirs]]
            model.dof_damping[dof], model.actuator_biasprm[i, 2] = damping, model.actuator_biasprm[i, 2] + damping
        mujoco.mj_setConst(model, mujoco.MjData(model))

    def simulate(self) -> None:
        model = self.model
        for name, (values, actors, _) in self.states.items():
            for actor in actors:
                rows, mine = self.rows(name, int(actor))
                if rows[mine].tobytes() != values.reshape(rows.shape)[mine].tobytes():
                    rows[mine] = values.reshape(rows.shape)[mine]
                    self.datas[actor // len(self.roots)].qacc_warmstart[:] = 0.0
        for e, data in enumerate(self.datas):
            self.to_mujoco(e)
            for mode, targets in self.targets.items():
                mine = self.mode == mode
                data.ctrl[mine] = (self.gain * targets[e])[mine]
            data.xfrc_applied[:] = 0.0
            if self.forces is not None:
                data.xfrc_applied[self.bodies] = self.forces[e]
            for _ in range(self.params.substeps):
                mujoco.mj_step(model, data)
            self.read_contacts(e)
            self.check_filters(data)
            self.from_mujoco(e)
        self.states.clear()
        self.forces = None

    # the state is what the tensors hold, float32: to set it again changes nothing
    def rows(self, name: str, actor: int) -> tuple[np.ndarray, slice]:
        if name == "actor_root_state":
            return self.root, slice(actor, actor + 1)
        e, k = divmod(actor, len(self.roots))
        sizes = [len(one.asset.joints) for one in self.envs[0]]
        first = e * sum(sizes) + sum(sizes[:k])
        return self.dof, slice(first, first + sizes[k])

    def from_mujoco(self, e: int) -> None:
        num, data = len(self.roots), self.datas[e]
        root = self.states_of_bodies(e)[self.roots]
        for k, one in enumerate(self.envs[0]):
            fastest, spin = one.asset.options.max_angular_velocity, np.linalg.norm(root[k, 10:])
            root[k, 10:] *= fastest / spin if spin > fastest else 1.0
        self.root[e * num : (e + 1) * num] = root
        state = np.stack([data.qpos[self.dof_q], data.qvel[self.dof_v]], axis=-1)
        self.dof.reshape(len(self.envs), -1, 2)[e] = state

    def to_mujoco(self, e: int) -> None:
        data = self.datas[e]
        data.qpos[self.dof_q], data.qvel[self.dof_v] = self.dof.reshape(len(self.envs), -1, 2)[e].T
        for root, row in zip(self.roots, self.root[e * len(self.roots) :], strict=False):
            if self.model.body_dofnum[root] == 6:
                row, lever = row.astype(float), np.zeros(3)
                quat, (q, v) = np.roll(row[3:7], 1), self.free(root)
                mujoco.mju_rotVecQuat(lever, self.model.body_ipos[root], quat)
                data.qpos[q : q + 7] = np.concatenate([row[:3], quat])
                data.qvel[v : v + 3] = row[7:10] - np.cross(row[10:13], lever)
                mujoco.mju_rotVecQuat(data.qvel[v + 3 : v + 6], row[10:13], quat * [1, -1, -1, -1])

    def check_filters(self, data: mujoco.MjData) -> None:
        for i in range(data.ncon):
            one, other = self.filters.get(data.contact[i].geom1, 0), self.filters.get(data.contact[i].geom2, 0)
            if one & other:
                raise ContractError("these shapes touch in the scene and are filtered here")

    def free(self, root: int) -> tuple[int, int]:
        joint = self.model.body_jntadr[root]
        return int(self.model.jnt_qposadr[joint]), int(self.model.jnt_dofadr[joint])

    def read_contacts(self, e: int) -> None:
        model, data = self.model, self.datas[e]
        self.net[e] = self.local[e] = 0.0
        for i in range(data.ncon):
            contact, wrench = data.contact[i], np.zeros(6)
            mujoco.mj_contactForce(model, data, i, wrench)
            frame = contact.frame.reshape(3, 3)
            force, torque = wrench[:3] @ frame, wrench[3:] @ frame
            for sign, geom in ((-1.0, contact.geom1), (1.0, contact.geom2)):
                body = model.geom_bodyid[geom]
                about = torque + np.cross(contact.pos - data.xpos[body], force)
                self.net[e, body] += sign * force
                self.local[e, body] += sign * np.concatenate([force, about])
        for body in range(model.nbody):
            self.local[e, body] = (self.local[e, body].reshape(2, 3) @ data.xmat[body].reshape(3, 3)).ravel()

    def states_of_bodies(self, e: int) -> np.ndarray:
        data, model = self.scratch, self.model
        data.qpos, data.qvel = self.datas[e].qpos, self.datas[e].qvel
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_comVel(model, data)
        states = np.zeros((model.nbody, 13))
        for body in range(model.nbody):
            velocity = np.zeros(6)
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_BODY, body, velocity, 0)  # of the centre of mass
            states[body] = np.concatenate([data.xpos[body], np.roll(data.xquat[body], -1), velocity[3:], velocity[:3]])
        return states

    def read(self, name: str) -> np.ndarray:
        if name in ("dof_state", "actor_root_state"):
            return self.dof if name == "dof_state" else self.root
        if name == "dof_force":
            if not all(actor.senses_dofs for actor in self.envs[0] if actor.asset.joints):
                raise ContractError("enable_actor_dof_force_sensors was not called")
            return np.concatenate([d.qfrc_actuator[self.dof_v] for d in self.datas])
        if name == "net_contact_force":
            return self.net[:, self.bodies]
        if name == "force_sensor":
            return self.local[:, self.sensors]
        return np.stack([self.states_of_bodies(e)[self.bodies] for e in range(len(self.envs))])


class Gym:
    _sim: _Sim | None = None  # a process has one

    def create_sim(self, compute_device: int, graphics_device: int, physics: str, params: SimParams) -> _Sim:
        if Gym._sim is not None:
            raise ContractError("this process has a simulation")
        if physics != SIM_PHYSX or params.use_gpu_pipeline is not False or params.physx.use_gpu is not False:
            raise ContractError("this is PhysX on the CPU")
        Gym._sim = _Sim(params)
        return Gym._sim

    def destroy_sim(self, sim: _Sim) -> None:
        Gym._sim = None

    def _unprepared(self, sim: _Sim) -> None:
        if sim.prepared:
            raise ContractError("after prepare_sim nothing is created")

    def add_ground(self, sim: _Sim, plane: PlaneParams) -> None:
        self._unprepared(sim)
        sim.planes.append(plane)

    def add_triangle_mesh(
        self, sim: _Sim, vertices: np.ndarray, triangles: np.ndarray, mesh: TriangleMeshParams
    ) -> None:
        self._unprepared(sim)
        if vertices.dtype != np.float32 or triangles.dtype != np.uint32 or vertices.ndim + triangles.ndim != 2:
            raise ContractError("vertices are float32 and triangles uint32, both flat")
        if (3 * mesh.nb_vertices, 3 * mesh.nb_triangles) != (vertices.size, triangles.size):
            raise ContractError("the numbers of vertices and triangles do not fit")
        sim.meshes.append((vertices, triangles))

    def load_asset(self, sim: _Sim, root: str, file: str, options: AssetOptions) -> _Asset:
        asset = _Asset(Path(root, file).read_text(), options)
        asset.first_shapes = [sum(len(b.geoms) for b in asset.bodies[:i]) for i in range(len(asset.bodies))]
        return asset

    def get_asset_rigid_body_names(self, asset: _Asset) -> list[str]:
        return [body.name for body in asset.bodies]

    def get_actor_rigid_shape_properties(self, env: tuple[_Sim, int], actor: int) -> list[RigidShapeProperties]:
        return copy.deepcopy(self._actor(env, actor).shapes)

    def set_actor_rigid_shape_properties(
        self, env: tuple[_Sim, int], actor: int, shapes: list[RigidShapeProperties]
    ) -> None:
        self._actor(env, actor).shapes = shapes

    def get_asset_rigid_body_shape_indices(self, asset: _Asset) -> list[IndexRange]:
        return [IndexRange(first, len(b.geoms)) for b, first in zip(asset.bodies, asset.first_shapes, strict=True)]

    def create_asset_force_sensor(
        self, asset: _Asset, body: int, pose: Transform, properties: ForceSensorProperties
    ) -> int:
        if properties.enable_forward_dynamics_forces or properties.use_world_frame:
            raise NotImplementedError("the stand-in has sensors of contacts, in the body's frame")
        asset.sensors.append(body)
        return len(asset.sensors) - 1

    def create_env(self, sim: _Sim, lower: Vec3, upper: Vec3, per_row: int) -> tuple[_Sim, int]:
        self._unprepared(sim)
        if per_row < 1:
            raise ContractError("a row has an env at least")
        sim.envs.append([])
        return sim, len(sim.envs) - 1

    def create_actor(
        self, env: tuple[_Sim, int], asset: _Asset, pose: Transform, name: str, group: int, filter: int
    ) -> int:
        sim, number = env
        self._unprepared(sim)
        if group != number:
            raise ContractError("envs of one collision group collide with each other")
        if filter:
            raise NotImplementedError("the stand-in has filters of shapes")
        sim.envs[number].append(_Actor(asset, pose, group, copy.deepcopy(asset.shapes), asset.dofs.copy()))
        return len(sim.envs[number]) - 1

    def _actor(self, env: tuple[_Sim, int], actor: int) -> _Actor:
        return env[0].envs[env[1]][actor]

    def get_actor_index(self, env: tuple[_Sim, int], actor: int, domain: str) -> int:
        sim, number = env
        return actor if domain == DOMAIN_ENV else sum(map(len, sim.envs[:number])) + actor

    def get_actor_dof_names(self, env: tuple[_Sim, int], actor: int) -> list[str]:
        return [joint.name for joint in self._actor(env, actor).asset.joints]

    def get_actor_dof_properties(self, env: tuple[_Sim, int], actor: int) -> np.ndarray:
        return self._actor(env, actor).dofs.copy()

    def set_actor_dof_properties(self, env: tuple[_Sim, int], actor: int, properties: np.ndarray) -> None:
        self._actor(env, actor).dofs = properties.copy()

    def enable_actor_dof_force_sensors(self, env: tuple[_Sim, int], actor: int) -> None:
        self._actor(env, actor).senses_dofs = True

    def find_actor_rigid_body_index(self, env: tuple[_Sim, int], actor: int, name: str, domain: str) -> int:
        if domain != DOMAIN_ENV:
            raise NotImplementedError("the stand-in counts bodies in an env")
        actors = env[0].envs[env[1]]
        names = [body.name for body in actors[actor].asset.bodies]
        return sum(len(one.asset.bodies) for one in actors[:actor]) + names.index(name) if name in names else -1

    def prepare_sim(self, sim: _Sim) -> bool:
        self._unprepared(sim)
        sim.prepared = True
        sim.compile()
        return True

    def simulate(self, sim: _Sim) -> None:
        if not sim.prepared or sim.simulated:
            raise ContractError("simulate comes after prepare_sim, and after fetch_results of the step before")
        for _, _, owner in sim.states.values():
            if owner() is None:
                raise ContractError("the list of actors was freed before simulate")
        sim.simulate()
        sim.simulated = True

    def fetch_results(self, sim: _Sim, wait: bool) -> None:
        sim.simulated = False

    def _acquire(self, sim: _Sim, name: str) -> Tensor:
        if not sim.prepared:
            raise ContractError("tensors are acquired after prepare_sim")
        if name not in sim.tensors:
            sim.tensors[name] = _flat(sim.read(name))
        return Tensor(sim.tensors[name])

    def _refresh(self, sim: _Sim, name: str) -> bool:
        if name not in sim.tensors or sim.simulated:
            raise ContractError("a tensor is refreshed after it was acquired, and after fetch_results")
        sim.tensors[name][:] = _flat(sim.read(name))
        return True

    def _set(self, sim: _Sim, name: str, values: Tensor, actors: Tensor | None = None, count: int = 0) -> bool:
        width = 13 if name == "actor_root_state" else 2
        size = len(sim.roots) * len(sim.envs) * 13 if width == 13 else len(sim.dof_q) * len(sim.envs) * 2
        numbers = _numbers(values, np.float32, size)
        if name in sim.states:
            raise ContractError(f"{name} was set already in this step: of several calls one acts")
        everyone = np.arange(len(sim.roots) * len(sim.envs), dtype=np.int32)
        if actors is None:
            sim.states[name] = numbers.copy(), everyone, lambda: self
        else:
            ids = _numbers(actors, np.int32)
            if count != ids.size or not np.isin(ids, everyone).all():
                raise ContractError("the count and the actors do not fit")
            sim.states[name] = numbers.copy(), ids, actors.owner
        return True

    def _target(self, sim: _Sim, mode: int, values: Tensor) -> bool:
        sim.targets[mode] = _numbers(values, np.float32, sim.targets[mode].size).reshape(sim.targets[mode].shape).copy()
        return True

    def set_dof_position_target_tensor(self, sim: _Sim, values: Tensor) -> bool:
        return self._target(sim, DOF_MODE_POS, values)

    def set_dof_velocity_target_tensor(self, sim: _Sim, values: Tensor) -> bool:
        return self._target(sim, DOF_MODE_VEL, values)

    def set_dof_actuation_force_tensor(self, sim: _Sim, values: Tensor) -> bool:
        return self._target(sim, DOF_MODE_EFFORT, values)

    def apply_rigid_body_force_tensors(self, sim: _Sim, force: Tensor, torque: Tensor, space: str) -> bool:
        if space == LOCAL_SPACE:
            raise NotImplementedError("the stand-in has forces in the frame of the env")
        size = len(sim.envs) * len(sim.bodies) * 3
        parts = [_numbers(values, np.float32, size).reshape(len(sim.envs), -1, 3) for values in (force, torque)]
        sim.forces = np.concatenate(parts, axis=-1)
        return True


def _flat(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float32)
    return values.reshape(-1, values.shape[-1]).copy() if values.ndim == 3 else values.copy()


def _numbers(tensor: Tensor, kind: type, size: int | None = None) -> np.ndarray:
    if not isinstance(tensor, Tensor):
        raise ContractError("setters take what unwrap_tensor gives")
    if tensor.array.dtype != kind:
        raise ContractError(f"a tensor of {np.dtype(kind).name} is expected, got {tensor.array.dtype.name}")
    if size is not None and tensor.array.size != size:
        raise ContractError(f"{size} numbers are expected, got {tensor.array.size}: setters take whole tensors")
    return tensor.array.ravel()


for _name in ("actor_root_state", "dof_state", "rigid_body_state", "net_contact_force", "force_sensor", "dof_force"):
    setattr(Gym, f"acquire_{_name}_tensor", lambda self, sim, name=_name: self._acquire(sim, name))
    setattr(Gym, f"refresh_{_name}_tensor", lambda self, sim, name=_name: self._refresh(sim, name))
for _name in ("actor_root_state", "dof_state"):
    setattr(Gym, f"set_{_name}_tensor", lambda self, sim, values, name=_name: self._set(sim, name, values))
    setattr(
        Gym,
        f"set_{_name}_tensor_indexed",
        lambda self, sim, values, actors, count, name=_name: self._set(sim, name, values, actors, count),
    )

_GYM = Gym()


def acquire_gym() -> Gym:
    return _GYM
