"""How Newton imports a scene, and the solver that it gets."""

from __future__ import annotations

import warnings
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
from gpusim_rl.sim.newton_xml import plain_xml
from gpusim_rl.sim.option import ON_WARP, solver_limits
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.warp import without_gradients

if TYPE_CHECKING:
    import newton
else:
    with without_gradients():
        newton = import_extra("newton", "newton", "sim=newton")
        _ = newton.solvers.SolverMuJoCo  # is imported when it is first asked for

_FREE = mujoco.mjtJoint.mjJNT_FREE.value


class _Solver(newton.solvers.SolverMuJoCo):
    """Newton's solver, with all terms of fixed tendons.

    Newton makes one joint of several of a body, and its solver leaves that one out of tendons. The solver's own model
    has the joints of MuJoCo, so the tendons get those.
    """

    def __init__(self, model: newton.Model, tendon_joints: np.ndarray, **options: Any) -> None:
        self._tendon_joints = tendon_joints
        super().__init__(model, **options)

    def _init_tendons(self, model: Any, spec: mujoco.MjSpec, joint_mapping: Any, *rest: Any, **named: Any) -> Any:
        attributes: Any = SimpleNamespace(**vars(model.mujoco))
        if len(self._tendon_joints):
            joints = attributes.tendon_joint.numpy()  # those of the first world, which the solver reads, come first
            joints[: len(self._tendon_joints)] = self._tendon_joints[: len(joints)]
            attributes.tendon_joint = wp.array(joints)
        single: Any = SimpleNamespace(mujoco=attributes, joint_type=wp.zeros(len(spec.joints), dtype=int))
        names = {number: joint.name for number, joint in enumerate(spec.joints)}
        return super()._init_tendons(single, spec, names, *rest, **named)


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
        except (NotImplementedError, ValueError, OSError, ImportError) as error:  # it wants SciPy for some meshes
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
    world.add_mjcf(plain_xml(scene.spec.to_xml(), model), ctrl_direct=True)
    builder = newton.ModelBuilder()
    builder.replicate(world, num_envs)
    imported: Any = builder.finalize()  # its arrays may be None, and its attributes of MuJoCo are dynamic
    # XML has six digits. Robots often start exactly at a limit, and whether it acts there must not depend on the
    # seventh. Newton counts from the pose that the file draws.
    scalar = model.jnt_type != _FREE
    if world.joint_dof_count >= model.nv:  # else `check_import` will refuse
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
    """Returns the numbers of the geoms that can touch something, or guide a tendon; Newton's solver has no others."""
    guides = (model.wrap_type == mujoco.mjtWrap.mjWRAP_SPHERE) | (model.wrap_type == mujoco.mjtWrap.mjWRAP_CYLINDER)
    guided = np.isin(np.arange(model.ngeom), model.wrap_objid[guides])
    geoms = np.flatnonzero((model.geom_contype != 0) | (model.geom_conaffinity != 0) | guided)
    # `plain_xml` moves planes to the world, whose geoms come first
    bodies = np.where(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE, 0, model.geom_bodyid)
    return geoms[np.argsort(bodies[geoms], kind="stable")]


def inertia_tensors(model: mujoco.MjModel) -> np.ndarray:
    """Returns inertia tensors of all bodies in their own frames [kg m^2], shape [nbody, 3, 3]."""
    axes = np.zeros((model.nbody, 9))
    for matrix, quat in zip(axes, model.body_iquat, strict=True):
        mujoco.mju_quat2Mat(matrix, quat)
    axes = axes.reshape(-1, 3, 3)
    return axes * model.body_inertia[:, None] @ axes.swapaxes(1, 2)
