"""How Newton imports a scene, and the solver that it gets."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
import torch
import warp as wp

from gpusim_rl.errors import ConfigError, import_extra
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim.actuators import delayed_controls, is_dc_motor
from gpusim_rl.sim.articulation import reference_pose
from gpusim_rl.sim.option import ON_WARP, solver_limits
from gpusim_rl.sim.scene import Scene

if TYPE_CHECKING:
    import newton
else:
    newton = import_extra("newton", "newton", "sim=newton")

_SOLREF, _SOLIMP = ("0.02", "1"), ("0.9", "0.95", "0.001", "0.5", "2")
_DEFAULTS = {
    **dict.fromkeys(("solref", "solreflimit", "solreffriction"), _SOLREF),
    **dict.fromkeys(("solimp", "solimplimit", "solimpfriction"), _SOLIMP),
}
"""MuJoCo's, of the constraints' parameters."""
_FREE = mujoco.mjtJoint.mjJNT_FREE.value


def check_scene(model: mujoco.MjModel) -> None:
    """Raises ConfigError for what Newton's importer refuses."""
    if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
        raise lacks_option("solver", "mjSOL_PGS")
    if np.any(model.jnt_type == mujoco.mjtJoint.mjJNT_BALL):
        raise ConfigError("sim=newton is not told of ball joints; try sim=mjwarp")
    if any(is_dc_motor(model, i) for i in range(model.nactuator)) or delayed_controls(model)[0]:
        raise ConfigError("sim=newton has neither DC motors nor delays of actuators; try sim=mjwarp")


def lacks_option(name: str, value: Any) -> ConfigError:
    """Returns the error for an option of MuJoCo that Newton does not take over."""
    return ConfigError(f"sim=newton lacks the option {name} = {value}; try another scene.option.{name}, or sim=mujoco")


def import_scene(scene: Scene, num_envs: int) -> newton.Model:
    """Returns Newton's model of so many worlds of a scene."""
    world = newton.ModelBuilder()
    # Newton's default gap would let contacts begin before geoms touch.
    world.default_shape_cfg.gap = 0.0
    model = scene.model  # compiles; only then can the spec be written as XML
    newton.solvers.SolverMuJoCo.register_custom_attributes(world)
    world.add_mjcf(_plain_xml(scene.spec.to_xml()), ctrl_direct=True)
    # XML has six digits. Robots often start exactly at a limit, and whether it acts there must not
    # depend on the seventh.
    if world.joint_dof_count >= model.nv:  # else `_check_layout` will refuse
        for joint in np.flatnonzero(model.jnt_limited & (model.jnt_type != _FREE)):
            dof = int(model.jnt_dofadr[joint])
            low, high = model.jnt_range[joint] - model.qpos0[model.jnt_qposadr[joint]]  # Newton counts from the pose
            world.joint_limit_lower[dof], world.joint_limit_upper[dof] = float(low), float(high)
    builder = newton.ModelBuilder()
    builder.replicate(world, num_envs)
    imported = builder.finalize()
    if world.joint_dof_count >= model.nv:
        scalar = model.jnt_type != _FREE
        reference = wp.to_torch(imported.mujoco.dof_ref).view(num_envs, -1)  # type: ignore[attr-defined]
        reference[:, model.jnt_dofadr[scalar]] = torch.as_tensor(reference_pose(model)[model.jnt_qposadr[scalar]])
    gravity = torch.tensor(model.opt.gravity, dtype=torch.float32)
    imported.set_gravity(tuple(gravity.tolist()))
    return imported


def make_solver(
    model: newton.Model, scene: Scene, cfg: SimConfig, rows: int, contacts: int
) -> newton.solvers.SolverMuJoCo:
    """Returns Newton's MuJoCo solver with the scene's options and room for so many constraint rows and contacts."""
    option = scene.model.opt
    iterations, ls_iterations = solver_limits(option, cfg, ON_WARP)
    # All of it by hand: an option that has MuJoCo's default value is not written into the XML, and
    # Newton has defaults of its own.
    solver = newton.solvers.SolverMuJoCo(
        model,
        separate_worlds=True,
        njmax=rows,
        nconmax=contacts,
        iterations=iterations,
        ls_iterations=ls_iterations,
        ccd_iterations=option.ccd_iterations,
        solver=int(option.solver),
        integrator=int(option.integrator),
        cone=int(option.cone),
        jacobian=int(option.jacobian),
        impratio=float(option.impratio),
        tolerance=float(option.tolerance),
        ls_tolerance=float(option.ls_tolerance),
        ccd_tolerance=float(option.ccd_tolerance),
        density=float(option.density),
        viscosity=float(option.viscosity),
        wind=tuple(option.wind.tolist()),
        magnetic=tuple(option.magnetic.tolist()),
        enable_multiccd=not option.disableflags & mujoco.mjtDisableBit.mjDSBL_MULTICCD,
        kinematic_switchable_roots=False,  # else every root has an inactive weld
    )
    # Newton sets margins to 0 for MuJoCo's CCD; MuJoCo Warp has taken them all along.
    margins = torch.as_tensor(scene.model.geom_margin[collided_geoms(scene.model)], dtype=torch.float32)
    found = wp.to_torch(solver.mjw_model.geom_margin)
    found.copy_(margins.expand_as(found))
    solver.mjw_model.opt.run_rne_postconstraint = bool(scene.contact_sensors)  # makes cfrc_ext
    return solver


def collided_geoms(model: mujoco.MjModel) -> np.ndarray:
    """Returns the numbers of the geoms that can touch something; Newton's solver has no others."""
    return np.flatnonzero((model.geom_contype != 0) | (model.geom_conaffinity != 0))


def inertia_tensors(model: mujoco.MjModel) -> np.ndarray:
    """Returns inertia tensors of all bodies in their own frames [kg m^2], shape [nbody, 3, 3]."""
    tensors = np.zeros((model.nbody, 3, 3))
    for body in range(model.nbody):
        axes = np.zeros(9)
        mujoco.mju_quat2Mat(axes, model.body_iquat[body])
        axes = axes.reshape(3, 3)
        tensors[body] = axes @ np.diag(model.body_inertia[body]) @ axes.T
    return tensors


def _plain_xml(xml: str) -> str:
    """Returns XML as Newton's importer takes it: without frames, with planes in the world itself, and all numbers.

    Newton reads the bodies of frames after the others, and those of later frames first: bodies would have other
    numbers. Of planes it knows only those of the world; a body that is fixed to the world may have some in MuJoCo.
    MuJoCo writes a vector up to the last number that is not its default, and Newton takes 0 for the others.
    """
    root = ET.fromstring(xml)
    for element in root.iter():
        for name, full in _DEFAULTS.items():
            if given := element.get(name, "").split():
                element.set(name, " ".join([*given, *full[len(given) :]]))
    world = root.find("worldbody")
    assert world is not None
    _inline_frames(world, None)
    _move_planes(world, world, (np.zeros(3), np.array([1.0, 0.0, 0.0, 0.0])), None)
    return ET.tostring(root, encoding="unicode")


_Pose = tuple[np.ndarray, np.ndarray]


def _pose(element: ET.Element) -> _Pose:
    """Returns position [m] and orientation wxyz; MuJoCo writes no other form of an orientation."""
    pos, quat = element.get("pos", "0 0 0"), element.get("quat", "1 0 0 0")
    turn = np.array(quat.split(), dtype=float)
    mujoco.mju_normalize4(turn)
    return np.array(pos.split(), dtype=float), turn


def _place(element: ET.Element, outer: _Pose) -> None:
    """Gives an element, placed in a frame, its place in what the frame is in."""
    pos, quat = np.zeros(3), np.zeros(4)
    mujoco.mju_mulPose(pos, quat, *outer, *_pose(element))
    element.set("pos", " ".join(f"{value:.17g}" for value in pos))
    element.set("quat", " ".join(f"{value:.17g}" for value in quat))


def _take_class(element: ET.Element, inherited: str | None) -> None:
    """Says the class that an element had from what it was in."""
    key = "childclass" if element.tag in ("body", "frame") else "class"
    if inherited is not None and key not in element.attrib:
        element.set(key, inherited)


def _inline_frames(parent: ET.Element, inherited: str | None) -> None:
    children: list[ET.Element] = []
    for child in list(parent):
        inner = child.get("childclass", inherited)
        if child.tag in ("body", "frame"):
            _inline_frames(child, inner)
        if child.tag != "frame":
            children.append(child)
            continue
        for element in child:
            _place(element, _pose(child))
            _take_class(element, child.get("childclass"))
            children.append(element)
    parent[:] = children


def _move_planes(world: ET.Element, body: ET.Element, pose: _Pose, inherited: str | None) -> None:
    """Moves the planes of a body and of those below it to the world; the bodies have no joint."""
    for child in list(body):
        if child.tag == "body" and child.find("joint") is None and child.find("freejoint") is None:
            pos, quat = np.zeros(3), np.zeros(4)
            mujoco.mju_mulPose(pos, quat, *pose, *_pose(child))
            _move_planes(world, child, (pos, quat), child.get("childclass", inherited))
        elif child.tag == "geom" and child.get("type") == "plane" and body is not world:
            _place(child, pose)
            _take_class(child, inherited)
            body.remove(child)
            world.append(child)
