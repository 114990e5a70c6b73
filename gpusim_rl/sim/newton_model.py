"""How Newton imports a scene, and the solver that it gets."""

from __future__ import annotations

import warnings
import xml.etree.ElementTree as ET
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
import torch
import warp as wp

from gpusim_rl.errors import ConfigError, import_extra
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim.actuators import delayed_controls, is_dc_motor
from gpusim_rl.sim.articulation import reference_pose
from gpusim_rl.sim.buffers import buffer_sizes
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
"""MuJoCo's defaults of the constraints' parameters."""
_FREE = mujoco.mjtJoint.mjJNT_FREE.value


class _Solver(newton.solvers.SolverMuJoCo):
    """Newton's solver, with all terms of fixed tendons.

    Newton makes one joint of several of a body, and its solver leaves that one out of tendons. The solver's own model
    has the joints of MuJoCo, so the tendons get those.
    """

    def __init__(self, model: newton.Model, tendon_joints: np.ndarray, **options: Any) -> None:
        self._tendon_joints = tendon_joints
        super().__init__(model, **options)

    def _init_tendons(self, model: newton.Model, spec: mujoco.MjSpec, joint_mapping: Any, *arguments: Any) -> Any:
        attributes: Any = SimpleNamespace(**vars(model.mujoco))
        if len(self._tendon_joints):
            joints = attributes.tendon_joint.numpy()  # those of the first world, which the solver reads, come first
            joints[: len(self._tendon_joints)] = self._tendon_joints[: len(joints)]
            attributes.tendon_joint = wp.array(joints)
        single: Any = SimpleNamespace(mujoco=attributes, joint_type=wp.zeros(len(spec.joints), dtype=int))
        names = {number: joint.name for number, joint in enumerate(spec.joints)}
        return super()._init_tendons(single, spec, names, *arguments)


def make_solver(scene: Scene, num_envs: int, cfg: SimConfig) -> newton.solvers.SolverMuJoCo:
    """Returns Newton's MuJoCo solver of so many worlds of a scene; its `model` is Newton's model of them.

    Raises:
        ConfigError: Newton cannot simulate the scene.
    """
    model = scene.model
    if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
        raise lacks_option("solver", "mjSOL_PGS")
    if np.any(model.jnt_type == mujoco.mjtJoint.mjJNT_BALL):
        raise ConfigError("sim=newton is not told of ball joints; try sim=mjwarp")
    if any(is_dc_motor(model, i) for i in range(model.nactuator)) or delayed_controls(model)[0]:
        raise ConfigError("sim=newton has neither DC motors nor delays of actuators; try sim=mjwarp")
    with warnings.catch_warnings():
        # Newton pins exact versions of MuJoCo; our tests compare the physics instead.
        warnings.simplefilter("ignore", newton.NewtonWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return _solver(_import(scene, num_envs), scene, cfg)
        except (NotImplementedError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"sim=newton cannot simulate this scene: {reason}; try sim=mjwarp") from None


def lacks_option(name: str, value: object) -> ConfigError:
    """Returns the error for an option of MuJoCo that Newton does not take over."""
    return ConfigError(f"sim=newton lacks the option {name} = {value}; try another scene.option.{name}, or sim=mujoco")


def _import(scene: Scene, num_envs: int) -> newton.Model:
    world = newton.ModelBuilder()
    # Newton's default gap would let contacts begin before geoms touch.
    world.default_shape_cfg.gap = 0.0
    model = scene.model  # compiles; only then can the spec be written as XML
    newton.solvers.SolverMuJoCo.register_custom_attributes(world)
    world.add_mjcf(_plain_xml(scene.spec.to_xml()), ctrl_direct=True)
    builder = newton.ModelBuilder()
    builder.replicate(world, num_envs)
    imported: Any = builder.finalize()  # its arrays may be None, and its attributes of MuJoCo are dynamic
    # XML has six digits. Robots often start exactly at a limit, and whether it acts there must not depend on the
    # seventh. Newton counts from the pose that the file draws.
    scalar = model.jnt_type != _FREE
    if world.joint_dof_count >= model.nv:  # else `NewtonSim._check_layout` will refuse
        limited = scalar & (model.jnt_limited != 0)
        limits = model.jnt_range[limited] - model.qpos0[model.jnt_qposadr[limited], None]
        reference = reference_pose(model)[model.jnt_qposadr[scalar]]
        for array, joints, values in (
            (imported.joint_limit_lower, limited, limits[:, 0]),
            (imported.joint_limit_upper, limited, limits[:, 1]),
            (imported.mujoco.dof_ref, scalar, reference),
        ):
            of_worlds = wp.to_torch(array).view(num_envs, -1)
            of_worlds[:, model.jnt_dofadr[joints]] = torch.as_tensor(values, dtype=torch.float32).to(of_worlds.device)
    gravity = torch.tensor(model.opt.gravity, dtype=torch.float32)
    imported.set_gravity(tuple(gravity.tolist()))
    return imported


def _solver(model: newton.Model, scene: Scene, cfg: SimConfig) -> newton.solvers.SolverMuJoCo:
    option = scene.model.opt
    rows, contacts = buffer_sizes(scene, cfg)
    iterations, ls_iterations = solver_limits(option, cfg, ON_WARP)
    # All of it by hand: an option that has MuJoCo's default value is not written into the XML, and Newton has defaults
    # of its own.
    numbers = ("impratio", "tolerance", "ls_tolerance", "ccd_tolerance", "density", "viscosity")
    choices = ("solver", "integrator", "cone", "jacobian", "ccd_iterations")
    options: dict[str, Any] = {name: float(getattr(option, name)) for name in numbers}
    options |= {name: int(getattr(option, name)) for name in choices}
    options |= {name: tuple(getattr(option, name).tolist()) for name in ("wind", "magnetic")}
    solver = _Solver(
        model,
        scene.model.wrap_objid[scene.model.wrap_type == mujoco.mjtWrap.mjWRAP_JOINT],
        separate_worlds=True,
        njmax=rows,
        nconmax=contacts,
        iterations=iterations,
        ls_iterations=ls_iterations,
        enable_multiccd=not option.disableflags & mujoco.mjtDisableBit.mjDSBL_MULTICCD,
        kinematic_switchable_roots=False,  # else every root has an inactive weld
        **options,
    )
    # Newton sets margins to 0 for MuJoCo's CCD; MuJoCo Warp has taken them all along.
    margins = torch.as_tensor(scene.model.geom_margin[collided_geoms(scene.model)], dtype=torch.float32)
    solver_margins = wp.to_torch(solver.mjw_model.geom_margin)
    solver_margins.copy_(margins.expand_as(solver_margins))
    solver.mjw_model.opt.run_rne_postconstraint = bool(scene.contact_sensors)  # makes cfrc_ext
    return solver


def collided_geoms(model: mujoco.MjModel) -> np.ndarray:
    """Returns the numbers of the geoms that can touch something; Newton's solver has no others."""
    return np.flatnonzero((model.geom_contype != 0) | (model.geom_conaffinity != 0))


def inertia_tensors(model: mujoco.MjModel) -> np.ndarray:
    """Returns inertia tensors of all bodies in their own frames [kg m^2], shape [nbody, 3, 3]."""
    axes = np.zeros((model.nbody, 9))
    for matrix, quat in zip(axes, model.body_iquat, strict=True):
        mujoco.mju_quat2Mat(matrix, quat)
    axes = axes.reshape(-1, 3, 3)
    return axes * model.body_inertia[:, None] @ axes.swapaxes(1, 2)


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
