"""Newton import: the model and solver of a scene."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mujoco
import numpy as np
import torch
import warp as wp

from gpusim_rl.errors import ConfigError, first_line, import_extra
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim.actuators import delayed_controls, is_dc_motor
from gpusim_rl.sim.articulation import reference_pose
from gpusim_rl.sim.buffers import buffer_sizes
from gpusim_rl.sim.newton_xml import plain_xml
from gpusim_rl.sim.option import ON_WARP, solver_limits
from gpusim_rl.sim.scene import Scene

if TYPE_CHECKING:
    import newton
else:
    chosen, wp.config.enable_backward = wp.config.enable_backward, False  # no gradient kernels: slow to compile
    try:
        newton = import_extra("newton", "newton", "sim=newton")
        _ = newton.solvers.SolverMuJoCo  # imported lazily
    finally:
        wp.config.enable_backward = chosen

_FREE = mujoco.mjtJoint.mjJNT_FREE.value
_PLANE, _MESH, _HFIELD = (getattr(mujoco.mjtGeom, f"mjGEOM_{kind}").value for kind in ("PLANE", "MESH", "HFIELD"))
_BODY, _SITE, _EQ_JOINT = mujoco.mjtObj.mjOBJ_BODY.value, mujoco.mjtObj.mjOBJ_SITE.value, mujoco.mjtEq.mjEQ_JOINT.value
_COPIED = (
    *("body_ipos", "body_inertia", "body_iquat", "body_invweight0", "dof_invweight0", "tendon_invweight0"),
    *("eq_data", "eq_solref", "eq_solimp", "jnt_range", "geom_size", "geom_margin", "pair_margin"),
)
_PAIR_FIELDS = ("solref", "solreffriction", "solimp", "gap", "friction")  # margins are copied later


class _Solver(newton.solvers.SolverMuJoCo):
    """Newton's solver with the scene's shapes, contact rules and complete fixed tendons."""

    def __init__(self, model: newton.Model, scene: mujoco.MjModel, **options: Any) -> None:
        self._scene = scene
        self._tendon_joints = scene.wrap_objid[scene.wrap_type == mujoco.mjtWrap.mjWRAP_JOINT]
        super().__init__(model, **options)
        self._jnt_mocap = None  # otherwise Newton's joints move the mocap bodies in every step
        self._take_over()

    def _take_over(self) -> None:
        """Copy the scene's values where Newton computes different ones, or has only the six digits of XML.

        Newton's convex hulls have at most 64 points; principal axes, centres of massless bodies, and inverse weights of
        bodies that only rotate or slide differ. Newton zeroes margins; MuJoCo Warp supports them. Limits must be exact.
        """
        scene, solved, geoms = self._scene, self.mjw_model, collided_geoms(self._scene)
        rows = np.flatnonzero(np.isin(scene.geom_type[geoms], (_HFIELD, _MESH)))
        if self.mj_model.ngeom != len(geoms) or np.any(self.mj_model.geom_type[rows] != scene.geom_type[geoms[rows]]):
            return  # `check_import` reports the mismatch
        prefixes = ("mesh_", "nmesh", "npolygonmax", "hfield_", "nhfield")
        for name in (name for name in dir(solved) if name.startswith(prefixes)):
            value, theirs = getattr(scene, name), getattr(solved, name)
            setattr(solved, name, wp.array(value, dtype=theirs.dtype) if isinstance(theirs, wp.array) else value)
        data = mujoco.MjData(scene)
        mujoco.mj_kinematics(scene, data)
        still = rows[scene.body_weldid[scene.geom_bodyid[geoms[rows]]] == 0]  # kinematics skips fixed geoms
        copies: list[tuple[Any, Any, str, Any]] = [(scene, solved, name, slice(None)) for name in _COPIED]
        copies += [(scene, solved, f"geom_{name}", rows) for name in ("dataid", "pos", "quat", "aabb", "rbound")]
        copies += [(data, self.mjw_data, name, still) for name in ("geom_xpos", "geom_xmat")]
        for source, target, name, chosen in copies:
            values, array = getattr(source, name), getattr(target, name)
            values = values[geoms] if name.startswith("geom") else values
            if values.size and array.shape[1] == len(values):  # else `check_import` reports the mismatch
                theirs = wp.to_torch(array)
                theirs[:, chosen] = torch.as_tensor(values[chosen]).to(theirs).view(theirs[0, chosen].shape)

    def _init_pairs(self, model: Any, spec: mujoco.MjSpec, shape_mapping: Any, template_world: Any) -> None:
        """Replace Newton's masks, excludes, pairs, mocap bodies and equality constraints with the scene's.

        Newton also filters contacts across fixed bodies' joints and connect constraints, and sorts constraints by type.
        """
        scene, numbers, bodies = self._scene, collided_geoms(self._scene), spec.bodies
        geoms, sites = ([each for body in bodies for each in getattr(body, kind)] for kind in ("geoms", "sites"))
        if (len(bodies), len(geoms), len(sites)) != (scene.nbody, len(numbers), scene.nsite):
            return  # `check_import` reports the mismatch
        for body, number in zip(bodies, scene.body_mocapid.tolist(), strict=True):
            body.mocap = number >= 0
        for geom, i in zip(geoms, numbers.tolist(), strict=True):
            geom.contype, geom.conaffinity = int(scene.geom_contype[i]), int(scene.geom_conaffinity[i])
            if scene.geom_type[i] == _PLANE:  # `plain_xml` writes a sphere
                geom.type, geom.size = _PLANE, scene.geom_size[i]
        for exclude in list(spec.excludes):
            spec.delete(exclude)
        for one in scene.exclude_signature.tolist():
            spec.add_exclude(bodyname1=bodies[one >> 16].name, bodyname2=bodies[one & 0xFFFF].name)
        for i, (first, second) in enumerate(np.searchsorted(numbers, [scene.pair_geom1, scene.pair_geom2]).T):
            values = {name: getattr(scene, f"pair_{name}")[i] for name in _PAIR_FIELDS}
            names = {"geomname1": geoms[first].name, "geomname2": geoms[second].name}
            spec.add_pair(condim=int(scene.pair_dim[i]), **names, **values)
        elements = {_BODY: bodies, _SITE: sites}
        for i, equality in enumerate(spec.equalities[: scene.neq]):
            kind, ends = int(scene.eq_objtype[i]), (scene.eq_obj1id[i], scene.eq_obj2id[i])
            known = spec.joints if scene.eq_type[i] == _EQ_JOINT else elements.get(kind)
            if known is not None:  # tendons come last
                equality.name1, equality.name2 = (known[end].name if end >= 0 else "" for end in ends)
                equality.type, equality.objtype, equality.active = scene.eq_type[i], kind, scene.eq_active0[i]
                equality.data = scene.eq_data[i]

    def _init_tendons(self, model: Any, spec: mujoco.MjSpec, joint_mapping: Any, *rest: Any, **named: Any) -> Any:
        # Newton merges multiple joints of a body and drops them from tendons: restore the solver's own joints there.
        attributes: Any = SimpleNamespace(**vars(model.mujoco))
        if len(self._tendon_joints):
            joints = attributes.tendon_joint.numpy()  # the solver reads only the first world's joints
            joints[: len(self._tendon_joints)] = self._tendon_joints[: len(joints)]
            attributes.tendon_joint = wp.array(joints)
        single: Any = SimpleNamespace(mujoco=attributes, joint_type=wp.zeros(len(spec.joints), dtype=int))
        names = {number: joint.name for number, joint in enumerate(spec.joints)}
        return super()._init_tendons(single, spec, names, *rest, **named)


def make_solver(scene: Scene, num_envs: int, cfg: SimConfig) -> newton.solvers.SolverMuJoCo:
    """Return Newton's MuJoCo solver for `num_envs` worlds; ConfigError if it cannot simulate the scene."""
    model = scene.model
    if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
        raise lacks_option("solver", "mjSOL_PGS")
    if np.any(model.jnt_type == mujoco.mjtJoint.mjJNT_BALL):
        raise unsupported("ball joints are not supported")
    if any(is_dc_motor(model, i) for i in range(model.nactuator)) or delayed_controls(model)[0]:
        raise unsupported("DC motors and actuator delays are not supported")
    with warnings.catch_warnings():
        # Newton pins exact versions of MuJoCo; our tests compare the physics instead.
        warnings.simplefilter("ignore", newton.NewtonWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return _solver(_import(scene, num_envs), scene, cfg)
        except (NotImplementedError, ValueError, OSError, ImportError) as error:  # some meshes need SciPy
            raise unsupported(f"cannot simulate this scene: {first_line(error)}") from None


def unsupported(problem: str) -> ConfigError:
    """Return a ConfigError that suggests `sim=mjwarp`."""
    return ConfigError(problem, key="sim=newton", hint="Try sim=mjwarp")


def lacks_option(name: str, value: object) -> ConfigError:
    """Return a ConfigError for an option that Newton ignores."""
    hint = "Try another value, or sim=mujoco"
    return ConfigError(f"sim=newton does not support scene.option.{name} = {value}", hint=hint)


def _import(scene: Scene, num_envs: int) -> newton.Model:
    world, model = newton.ModelBuilder(), scene.model  # compiles, as `spec.to_xml` requires
    world.default_shape_cfg.gap = 0.0  # Newton's default starts contacts before geoms touch
    newton.solvers.SolverMuJoCo.register_custom_attributes(world)
    # Contact masks decide which geoms collide, not class names.
    world.add_mjcf(plain_xml(scene.spec.to_xml(), model), ctrl_direct=True, visual_classes=(), collider_classes=())
    builder = newton.ModelBuilder()
    builder.replicate(world, num_envs)
    imported: Any = builder.finalize()  # its arrays may be None, and its MuJoCo attributes are dynamic
    if world.joint_dof_count >= model.nv:  # else `check_import` reports the mismatch
        scalar = model.jnt_type != _FREE  # XML has six digits, and Newton's positions are relative to the file's pose
        refs = wp.to_torch(imported.mujoco.dof_ref).view(num_envs, -1)
        reference = torch.as_tensor(reference_pose(model)[model.jnt_qposadr[scalar]], dtype=torch.float32)
        refs[:, model.jnt_dofadr[scalar]] = reference.to(refs.device)
    imported.set_gravity(tuple(model.opt.gravity.astype(np.float32).tolist()))
    return imported


def _solver(model: newton.Model, scene: Scene, cfg: SimConfig) -> newton.solvers.SolverMuJoCo:
    option = scene.model.opt
    # XML omits options with MuJoCo's default, and Newton has its own defaults.
    numbers = ("impratio", "tolerance", "ls_tolerance", "ccd_tolerance", "density", "viscosity")
    choices = ("solver", "integrator", "cone", "jacobian", "ccd_iterations")
    options: dict[str, Any] = dict(zip(("njmax", "nconmax"), buffer_sizes(scene, cfg), strict=True))
    options |= dict(zip(("iterations", "ls_iterations"), solver_limits(option, cfg, ON_WARP), strict=True))
    options |= {name: float(getattr(option, name)) for name in numbers}
    options |= {name: int(getattr(option, name)) for name in choices}
    options |= {name: tuple(getattr(option, name).tolist()) for name in ("wind", "magnetic")}
    solver = _Solver(
        model,
        scene.model,
        separate_worlds=True,
        enable_multiccd=not option.disableflags & mujoco.mjtDisableBit.mjDSBL_MULTICCD,
        kinematic_switchable_roots=False,  # else every root gets an inactive weld
        **options,
    )
    solver.mjw_model.opt.run_rne_postconstraint = bool(scene.contact_sensors)  # computes cfrc_ext
    return solver


def collided_geoms(model: mujoco.MjModel) -> np.ndarray:
    """Return ids of geoms that can touch something or guide a tendon; Newton's solver contains only these."""
    guides = (model.wrap_type == mujoco.mjtWrap.mjWRAP_SPHERE) | (model.wrap_type == mujoco.mjtWrap.mjWRAP_CYLINDER)
    named = np.concatenate([model.wrap_objid[guides], model.pair_geom1, model.pair_geom2])
    masked = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    return np.flatnonzero(masked | np.isin(np.arange(model.ngeom), named))
