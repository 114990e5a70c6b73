"""What a scene is for Isaac Gym: an actor for each tree of bodies, from an MJCF file, with PhysX's drives."""

from __future__ import annotations

import itertools
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from gpusim_rl.errors import ConfigError
from gpusim_rl.sim.actuators import delayed_controls, is_dc_motor
from gpusim_rl.sim.scene import Scene

_FREE, _SLIDE, _HINGE = (
    kind.value for kind in (mujoco.mjtJoint.mjJNT_FREE, mujoco.mjtJoint.mjJNT_SLIDE, mujoco.mjtJoint.mjJNT_HINGE)
)
_PLANE, _HFIELD, _BOX = (
    kind.value for kind in (mujoco.mjtGeom.mjGEOM_PLANE, mujoco.mjtGeom.mjGEOM_HFIELD, mujoco.mjtGeom.mjGEOM_BOX)
)
# By type of geom: what MJCF calls it, and how many numbers its size has.
_SHAPES = {
    mujoco.mjtGeom.mjGEOM_SPHERE.value: ("sphere", 1),
    mujoco.mjtGeom.mjGEOM_CAPSULE.value: ("capsule", 2),
    mujoco.mjtGeom.mjGEOM_CYLINDER.value: ("cylinder", 2),
    mujoco.mjtGeom.mjGEOM_BOX.value: ("box", 3),
}
_NEEDED = sum(
    bit.value
    for bit in (
        *(mujoco.mjtDisableBit.mjDSBL_CONSTRAINT, mujoco.mjtDisableBit.mjDSBL_LIMIT),
        *(mujoco.mjtDisableBit.mjDSBL_CONTACT, mujoco.mjtDisableBit.mjDSBL_GRAVITY),
        *(mujoco.mjtDisableBit.mjDSBL_SPRING, mujoco.mjtDisableBit.mjDSBL_DAMPER),
        *(mujoco.mjtDisableBit.mjDSBL_CLAMPCTRL, mujoco.mjtDisableBit.mjDSBL_ACTUATION),
    )
)
_MOST_BITS = 31  # of a collision filter
_SPACING = 5.0  # m; half of an env. Envs do not collide, but overlapping ones fill PhysX's buffers of pairs
_UNLIMITED = 1e9  # N m, N or rad/s


def check_scene(model: mujoco.MjModel) -> None:
    """Raises ConfigError for what its MJCF importer does not take, or PhysX does not have."""
    planes, touching = _fixed_planes(model), _touching(model)
    ground = [*planes, *_terrain(model)]
    touching[ground] = False
    in_world = model.geom_bodyid == 0
    moving = np.flatnonzero(touching & (model.body_weldid[model.geom_bodyid] != 0)).tolist()
    gains = model.actuator_gaintype == mujoco.mjtGain.mjGAIN_FIXED.value
    biases = np.isin(model.actuator_biastype, (mujoco.mjtBias.mjBIAS_NONE.value, mujoco.mjtBias.mjBIAS_AFFINE.value))
    on_joints = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
    driven = model.actuator_trnid[:, 0]
    for wrong, what in (
        (model.ntendon > 0, "tendons"),
        (model.neq > 0, "equality constraints"),
        (not np.isin(model.jnt_type, (_FREE, _SLIDE, _HINGE)).all(), "ball joints"),
        (any(is_dc_motor(model, i) for i in range(model.nactuator)), "DC motors"),
        (bool(delayed_controls(model)[0]), "delays of actuators"),
        (not on_joints.all(), "actuators that are not on one joint"),
        (model.na > 0 or not (gains & biases).all(), "actuators that are not linear"),
        (np.any(model.actuator_biasprm[:, 1:3] > 0.0), "actuators that push away from a target"),
        (np.unique(driven).size < driven.size, "several actuators on one joint"),
        (np.any(touching & in_world), "fixed geoms without a body, but planes and terrain"),
        (not np.isin(model.geom_type[touching], list(_SHAPES)).all(), "meshes, ellipsoids and moving planes"),
        (any(not _collide(model, g, geom) for g in ground for geom in moving), "geoms that pass through the ground"),
        (any(_weightless(model, tree) is None for tree in trees(model)), "gravcomp of some bodies only"),
        (bool(model.opt.disableflags & _NEEDED), "forces that an option switches off (disableflags)"),
    ):
        if wrong:
            raise ConfigError(f"sim=isaacgym is not told of {what}; try sim=mjwarp")


def left_out(model: mujoco.MjModel) -> list[str]:
    """What of a scene changes the motion and has no effect in PhysX."""
    found = {
        "dry friction of joints": model.dof_frictionloss.any(),
        "drag of air": model.opt.density or model.opt.viscosity,
    }
    return [name for name, has in found.items() if has]


@dataclass(frozen=True, slots=True)
class Tree:
    """A body under the world and what hangs on it: one actor of every env."""

    bodies: list[int]
    joints: list[int]
    """Its hinges and slides."""
    is_free: bool
    first_q: int
    """Where a free root's pose is in `qpos`, and its velocity in `qvel`."""
    first_v: int


def trees(model: mujoco.MjModel) -> list[Tree]:
    """The actors of an env: all trees that move or can be touched."""
    found = []
    for root in np.flatnonzero(model.body_parentid == 0)[1:].tolist():
        bodies = np.flatnonzero(model.body_rootid == root).tolist()
        joints = np.flatnonzero(np.isin(model.jnt_bodyid, bodies)).tolist()
        is_free = bool(joints) and bool(model.jnt_type[joints[0]] == _FREE)
        first_q, first_v = (int(model.jnt_qposadr[joints[0]]), int(model.jnt_dofadr[joints[0]])) if joints else (0, 0)
        if joints or any(touching_geoms(model, body) for body in bodies):
            found.append(Tree(bodies, joints[int(is_free) :], is_free, first_q, first_v))
    return found


def touching_geoms(model: mujoco.MjModel, body: int) -> list[int]:
    """A body's geoms that can touch something, without planes; others are only seen."""
    return np.flatnonzero(_touching(model) & (model.geom_type != _PLANE) & (model.geom_bodyid == body)).tolist()


def _touching(model: mujoco.MjModel) -> np.ndarray:
    return (model.geom_contype != 0) | (model.geom_conaffinity != 0)


def _fixed_planes(model: mujoco.MjModel) -> list[int]:
    """The ground: planes that can touch something, in the world or on bodies that are fixed to it."""
    fixed = model.body_weldid[model.geom_bodyid] == 0
    return np.flatnonzero(_touching(model) & fixed & (model.geom_type == _PLANE)).tolist()


def _terrain(model: mujoco.MjModel) -> list[int]:
    """Height fields of the world, and the boxes around them."""
    kinds = (_HFIELD, _BOX) if np.any(model.geom_type == _HFIELD) else ()
    return np.flatnonzero(_touching(model) & (model.geom_bodyid == 0) & np.isin(model.geom_type, kinds)).tolist()


def terrain_mesh(model: mujoco.MjModel) -> tuple[np.ndarray, np.ndarray]:
    """The terrain's vertices [m], shape [vertices, 3], and triangles, shape [triangles, 3], that look up or outwards.

    The cells of a height field are halved as MuJoCo does.
    """
    points, faces, first = [], [], 0
    for geom in _terrain(model):
        if model.geom_type[geom] == _HFIELD:
            field = int(model.geom_dataid[geom])
            rows, columns, start = (int(of[field]) for of in (model.hfield_nrow, model.hfield_ncol, model.hfield_adr))
            half_x, half_y, height, _ = model.hfield_size[field]
            y, x = np.meshgrid(np.linspace(-half_y, half_y, rows), np.linspace(-half_x, half_x, columns), indexing="ij")
            z = height * model.hfield_data[start : start + rows * columns]
            local = np.stack([x.ravel(), y.ravel(), z], axis=1)
            corner = np.arange(rows * columns).reshape(rows, columns)
            a, b, c, d = (part.ravel() for part in (corner[:-1, :-1], corner[:-1, 1:], corner[1:, :-1], corner[1:, 1:]))
            cells = np.concatenate([np.stack([a, b, d], axis=1), np.stack([a, d, c], axis=1)])
        else:
            local = model.geom_size[geom] * np.array(list(itertools.product((-1, 1), repeat=3)))
            quads = ((0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3))
            cells = np.array([triangle for a, b, c, d in quads for triangle in ((a, b, c), (a, c, d))])
        turn = np.zeros(9)
        mujoco.mju_quat2Mat(turn, model.geom_quat[geom])
        points.append(local @ turn.reshape(3, 3).T + model.geom_pos[geom])
        faces.append(cells + first)
        first += len(local)
    return np.concatenate(points).astype(np.float32), np.concatenate(faces).astype(np.uint32)


def body_name(body: int) -> str:
    """What a body of the scene's model is called in our files; joints have `joint_name`."""
    return f"body_{body}"


def joint_name(joint: int) -> str:
    """See `body_name`."""
    return f"joint_{joint}"


def _weightless(model: mujoco.MjModel, tree: Tree) -> bool | None:
    """Whether gravity leaves a tree alone (MuJoCo's `gravcomp`); None where it does so with some bodies."""
    compensated = model.body_gravcomp[tree.bodies][model.body_mass[tree.bodies] > 0]
    return False if not compensated.any() else True if (compensated == 1.0).all() else None


def asset_xml(model: mujoco.MjModel, tree: Tree) -> str:
    """A tree as MJCF, from the compiled model: no defaults, classes, frames or degrees that an importer could misread.

    Joints count from the drawn pose: there is no `ref`. A fixed base has no joint, so that the asset's
    `fix_base_link` holds it: where the first joints hang on the world, a body without geoms stands before them.
    """
    file = ET.Element("mujoco", model="tree")
    ET.SubElement(file, "compiler", angle="radian", coordinate="local", inertiafromgeom="false")
    elements: dict[int, ET.Element] = {}
    parent = ET.SubElement(file, "worldbody")
    root = tree.bodies[0]
    if not tree.is_free and model.body_jntnum[root]:
        parent = ET.SubElement(parent, "body", name="base")
        ET.SubElement(parent, "inertial", pos="0 0 0", mass="1", diaginertia="1 1 1")
    for body in tree.bodies:
        above = parent if body == root else elements[int(model.body_parentid[body])]
        element = ET.SubElement(above, "body", name=body_name(body))
        if body != root:
            element.attrib |= {"pos": _text(model.body_pos[body]), "quat": _text(model.body_quat[body])}
        elements[body] = element
        if model.body_mass[body] > 0:
            inertial = {"pos": model.body_ipos[body], "quat": model.body_iquat[body]}
            inertial |= {"mass": model.body_mass[body], "diaginertia": model.body_inertia[body]}
            ET.SubElement(element, "inertial", {key: _text(value) for key, value in inertial.items()})
        if body == root and tree.is_free:
            ET.SubElement(element, "freejoint", name="root")
        for joint in (j for j in tree.joints if model.jnt_bodyid[j] == body):
            kind = "hinge" if model.jnt_type[joint] == _HINGE else "slide"
            place = {"pos": _text(model.jnt_pos[joint]), "axis": _text(model.jnt_axis[joint])}
            limits = {"limited": "false"}
            if model.jnt_limited[joint]:
                limits = {"limited": "true", "range": _text(drawn_range(model, joint))}
            ET.SubElement(element, "joint", {"name": joint_name(joint), "type": kind, **place, **limits})
        for geom in touching_geoms(model, body):
            kind, numbers = _SHAPES[int(model.geom_type[geom])]
            place = {"pos": _text(model.geom_pos[geom]), "quat": _text(model.geom_quat[geom])}
            shape = {"type": kind, "size": _text(model.geom_size[geom][:numbers])}
            ET.SubElement(element, "geom", {**shape, **place})
    return ET.tostring(file, encoding="unicode")


def drawn_range(model: mujoco.MjModel, joint: int) -> np.ndarray:
    """Limits of a joint, counted from the pose that the file draws."""
    return model.jnt_range[joint] - model.qpos0[model.jnt_qposadr[joint]]


def _text(values: Any) -> str:
    return " ".join(f"{value:.17g}" for value in np.atleast_1d(values))


def collision_filters(model: mujoco.MjModel, actors: Sequence[Tree]) -> dict[int, int]:
    """Bits of each geom of some trees: two geoms of an env collide unless they share a bit.

    Raises:
        ConfigError: What collides with what in MuJoCo needs more bits than there are.
    """
    geoms = [geom for tree in actors for body in tree.bodies for geom in touching_geoms(model, body)]
    apart = {pair: not _collide(model, *pair) for pair in itertools.combinations(geoms, 2)}
    filters, bit = dict.fromkeys(geoms, 0), 0
    for pair in apart:
        if apart[pair] and not filters[pair[0]] & filters[pair[1]]:
            if bit == _MOST_BITS:
                raise ConfigError("sim=isaacgym cannot say what collides with what in this scene; try sim=mjwarp")
            group = list(pair)
            for geom in geoms:  # all that collide with none of the group
                if geom not in group and all(apart[min(geom, g), max(geom, g)] for g in group):
                    group.append(geom)
            for geom in group:
                filters[geom] |= 1 << bit
            bit += 1
    return filters


def _collide(model: mujoco.MjModel, one: int, other: int) -> bool:
    """Whether MuJoCo looks for contacts of two geoms."""
    kinds, reach = model.geom_contype, model.geom_conaffinity
    if not (kinds[one] & reach[other] or kinds[other] & reach[one]):
        return False
    a, b = (int(model.body_weldid[model.geom_bodyid[geom]]) for geom in (one, other))
    above = (int(model.body_weldid[model.body_parentid[body]]) for body in (a, b))
    if a == b or (a and b and (next(above) == b or next(above) == a)):  # fixed to each other, or joined
        return False
    first, second = sorted(int(model.geom_bodyid[geom]) for geom in (one, other))
    return (first << 16) + second not in model.exclude_signature


@dataclass(frozen=True, slots=True)
class Drives:
    """PhysX's drives of all dofs in MuJoCo's order, arrays of shape [nv].

    A drive's effort is stiffness (target position - position) + damping (target velocity - velocity). MuJoCo's linear
    actuators and the springs and dampers of joints are of this form: their effort at position and velocity 0 is
    `offset` + `per_control` @ control, and a target is that by the stiffness or the damping.
    """

    stiffness: np.ndarray
    damping: np.ndarray
    effort_limit: np.ndarray
    feeds_back: np.ndarray
    """Whether its actuator is a servo: its force depends on position or velocity."""
    by_velocity: np.ndarray
    """Servos without stiffness, which follow a target velocity. The others without stiffness are given efforts."""
    offset: np.ndarray
    per_control: np.ndarray  # [nv, nu]


def drives(model: mujoco.MjModel) -> Drives:
    """The drives of a scene; positions are counted from the pose that the file draws."""
    scalar = np.isin(model.jnt_type, (_SLIDE, _HINGE))
    spring, dofs, places = model.jnt_stiffness[scalar], model.jnt_dofadr[scalar], model.jnt_qposadr[scalar]
    stiffness, damping = np.zeros(model.nv), model.dof_damping.copy()
    effort_limit, feeds_back = np.full(model.nv, np.inf), np.zeros(model.nv, dtype=bool)
    offset, per_control = np.zeros(model.nv), np.zeros((model.nv, model.nu))
    stiffness[dofs] = spring
    offset[dofs] = spring * (model.qpos_spring - model.qpos0)[places]
    for i in range(model.nactuator):
        joint = int(model.actuator_trnid[i, 0])
        dof, ref = int(model.jnt_dofadr[joint]), model.qpos0[model.jnt_qposadr[joint]]
        gear, gain = model.actuator_gear[i, 0], model.actuator_gainprm[i, 0]
        has_bias = model.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_AFFINE
        constant, position, velocity = model.actuator_biasprm[i, :3] * has_bias
        stiffness[dof] -= gear**2 * position
        damping[dof] -= gear**2 * velocity
        feeds_back[dof] = position != 0.0 or velocity != 0.0
        offset[dof] += gear * (constant + position * gear * ref)
        per_control[dof, model.actuator_ctrladr[i]] = gear * gain
        if model.actuator_forcelimited[i]:
            effort_limit[dof] = np.abs(gear * model.actuator_forcerange[i]).max()
    for joint in np.flatnonzero(model.jnt_actfrclimited):  # of all actuators on the joint, and here it has one
        dof = int(model.jnt_dofadr[joint])
        effort_limit[dof] = min(effort_limit[dof], np.abs(model.jnt_actfrcrange[joint]).max())
    by_velocity = feeds_back & (stiffness == 0.0)
    return Drives(stiffness, damping, effort_limit, feeds_back, by_velocity, offset, per_control)


@dataclass(slots=True)
class Worlds:
    """What `make_worlds` made: the numbers of things in an env, by their numbers in the scene's model."""

    trees: list[Tree]
    actor_ids: list[int] = field(default_factory=list)
    """Of all envs, in the simulation."""
    bodies: dict[int, int] = field(default_factory=dict)
    dofs: dict[int, int] = field(default_factory=dict)
    """By joint."""
    force_sensors: dict[int, int] = field(default_factory=dict)
    """By the body that has one."""


def make_worlds(gymapi: Any, gym: Any, sim: Any, scene: Scene, num_envs: int) -> Worlds:
    """Makes the ground and the envs of a simulation: one actor of every tree in each."""
    model = scene.model
    placed = mujoco.MjData(model)
    mujoco.mj_kinematics(model, placed)
    for geom in _fixed_planes(model):
        normal, plane = placed.geom_xmat[geom].reshape(3, 3)[:, 2], gymapi.PlaneParams()
        plane.normal = gymapi.Vec3(*normal.tolist())
        plane.distance = -float(normal @ placed.geom_xpos[geom])
        plane.static_friction = plane.dynamic_friction = float(model.geom_friction[geom, 0])
        plane.restitution = 0.0
        gym.add_ground(sim, plane)
    spacing = _SPACING
    if terrain := _terrain(model):
        vertices, triangles = terrain_mesh(model)
        mesh = gymapi.TriangleMeshParams()
        mesh.nb_vertices, mesh.nb_triangles = len(vertices), len(triangles)
        mesh.static_friction = mesh.dynamic_friction = float(model.geom_friction[terrain[0], 0])
        mesh.restitution = 0.0
        gym.add_triangle_mesh(sim, vertices.ravel(), triangles.ravel(), mesh)
        spacing = 0.0  # there is one terrain for all envs, on which the task spreads them
    worlds = Worlds(trees(model))
    with tempfile.TemporaryDirectory() as folder:
        assets = [_load(gymapi, gym, sim, scene, tree, folder, worlds) for tree in worlds.trees]
    filters, springs = collision_filters(model, worlds.trees), drives(model)
    low, high = gymapi.Vec3(-spacing, -spacing, 0.0), gymapi.Vec3(spacing, spacing, spacing)
    for world in range(num_envs):
        env = gym.create_env(sim, low, high, int(num_envs**0.5))
        for tree, asset in zip(worlds.trees, assets, strict=True):
            root = tree.bodies[0]
            (x, y, z), (w, i, j, k) = model.body_pos[root].tolist(), model.body_quat[root].tolist()
            pose = gymapi.Transform(gymapi.Vec3(x, y, z), gymapi.Quat(i, j, k, w))
            actor = gym.create_actor(env, asset, pose, body_name(root), world, 0)
            worlds.actor_ids.append(gym.get_actor_index(env, actor, gymapi.DOMAIN_SIM))
            _set_shapes(gym, env, actor, model, tree, asset, filters)
            if tree.joints:
                _drive(gymapi, gym, env, actor, model, tree, springs)
            if tree.joints and scene.effort_sensors:
                gym.enable_actor_dof_force_sensors(env, actor)
            if world == 0:  # the order is Isaac Gym's own
                find = gym.find_actor_rigid_body_index
                worlds.bodies |= {i: find(env, actor, body_name(i), gymapi.DOMAIN_ENV) for i in tree.bodies}
                first, names = len(worlds.dofs), gym.get_actor_dof_names(env, actor)
                worlds.dofs |= {i: first + names.index(joint_name(i)) for i in tree.joints}
    return worlds


def _load(gymapi: Any, gym: Any, sim: Any, scene: Scene, tree: Tree, folder: str, worlds: Worlds) -> Any:
    model, root = scene.model, tree.bodies[0]
    options = gymapi.AssetOptions()
    options.fix_base_link = not tree.is_free
    options.collapse_fixed_joints = False  # every body has contacts of its own
    options.disable_gravity = bool(_weightless(model, tree))
    options.linear_damping = options.angular_damping = 0.0
    options.max_angular_velocity = scene.max_angular_velocity or _UNLIMITED
    file = f"{body_name(root)}.xml"
    Path(folder, file).write_text(asset_xml(model, tree), encoding="utf-8")
    asset = gym.load_asset(sim, folder, file, options)
    names = [] if asset is None else gym.get_asset_rigid_body_names(asset)
    if not {body_name(body) for body in tree.bodies} <= set(names):
        raise ConfigError(f"sim=isaacgym cannot import {model.body(root).name!r}; try sim=mjwarp")
    for body in (body for body in tree.bodies if model.body(body).name in scene.contact_sensors):
        forces = gymapi.ForceSensorProperties()
        forces.enable_forward_dynamics_forces = False  # of contacts, not of weight and inertia
        forces.enable_constraint_solver_forces, forces.use_world_frame = True, False
        gym.create_asset_force_sensor(asset, names.index(body_name(body)), gymapi.Transform(), forces)
        worlds.force_sensors[body] = len(worlds.force_sensors)
    return asset


def _set_shapes(
    gym: Any, env: Any, actor: int, model: mujoco.MjModel, tree: Tree, asset: Any, filters: Mapping[int, int]
) -> None:
    names, ranges = gym.get_asset_rigid_body_names(asset), gym.get_asset_rigid_body_shape_indices(asset)
    shapes = gym.get_actor_rigid_shape_properties(env, actor)
    for body in tree.bodies:
        place = ranges[names.index(body_name(body))]
        mine = shapes[place.start : place.start + place.count]
        for shape, geom in zip(mine, touching_geoms(model, body), strict=True):
            shape.friction, shape.torsion_friction, shape.rolling_friction = model.geom_friction[geom].tolist()
            shape.restitution, shape.filter = 0.0, filters[geom]
    gym.set_actor_rigid_shape_properties(env, actor, shapes)


def _drive(gymapi: Any, gym: Any, env: Any, actor: int, model: mujoco.MjModel, tree: Tree, springs: Drives) -> None:
    properties, names = gym.get_actor_dof_properties(env, actor), gym.get_actor_dof_names(env, actor)
    for joint in tree.joints:
        dof, row = int(model.jnt_dofadr[joint]), properties[names.index(joint_name(joint))]
        row["driveMode"] = gymapi.DOF_MODE_VEL if springs.by_velocity[dof] else gymapi.DOF_MODE_EFFORT
        if springs.stiffness[dof] > 0:
            row["driveMode"] = gymapi.DOF_MODE_POS
        row["stiffness"], row["damping"] = springs.stiffness[dof], springs.damping[dof]
        limit = springs.effort_limit[dof] if springs.feeds_back[dof] else _UNLIMITED  # motors are limited before
        row["effort"], row["velocity"] = min(limit, _UNLIMITED), _UNLIMITED
        row["armature"], row["friction"] = model.dof_armature[dof], 0.0
        if model.jnt_limited[joint]:
            row["lower"], row["upper"] = drawn_range(model, joint)
    gym.set_actor_dof_properties(env, actor, properties)
