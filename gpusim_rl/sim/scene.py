"""What one world contains: robots, objects, ground and sensors, before any simulator sees it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mujoco
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.errors import TaskError
from gpusim_rl.sim import menagerie
from gpusim_rl.sim.option import SceneOption
from gpusim_rl.sim.terrain import Terrain

TERRAIN_DEPTH = 1.0  # of the ground below its lowest point [m]; what sinks deeper falls through

# MuJoCo's contact sensor: bits of its data specification, and the reduction of all matching contacts to one wrench.
_CONTACT_FORCE, _CONTACT_TORQUE, _CONTACT_POS = 1 << 1, 1 << 2, 1 << 4
_REDUCE_NETFORCE = 3

logger = logging.getLogger(__name__)

_INTEGRATORS = {
    "euler": mujoco.mjtIntegrator.mjINT_EULER,
    "implicit": mujoco.mjtIntegrator.mjINT_IMPLICIT,
    "implicitfast": mujoco.mjtIntegrator.mjINT_IMPLICITFAST,
    "rk4": mujoco.mjtIntegrator.mjINT_RK4,
}
_CONES = {"pyramidal": mujoco.mjtCone.mjCONE_PYRAMIDAL, "elliptic": mujoco.mjtCone.mjCONE_ELLIPTIC}
_FREE = mujoco.mjtJoint.mjJNT_FREE


@dataclass(frozen=True, slots=True)
class ContactSensor:
    """The sensors that give one body's net contact wrench; all are read at the same physics step."""

    body: str
    wrench: str  # contact sensor: force [N], torque [N m] about `pos`, pos [m]; world frame, 9 numbers
    body_pos: str  # frame position of the body [m]
    body_quat: str  # frame orientation of the body, wxyz


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _referring(spec: mujoco.MjSpec) -> dict[str, int]:
    """How many elements name others, by kind: `MjSpec.attach` silently drops those whose others are not there."""
    kinds = ("actuators", "sensors", "tendons", "equalities", "pairs", "excludes", "tuples")
    return {kind: len(getattr(spec, kind)) for kind in kinds}


def _fix_masses(spec: mujoco.MjSpec) -> None:
    """Gives all bodies the masses and inertias that the file's compiler settings make.

    A scene would lose `settotalmass`: it is a setting of the whole spec. The others belong to elements.
    """
    compiler = spec.compiler
    compiler.fusestatic = compiler.discardvisual = False  # they would remove bodies
    model = spec.compile()
    for body in spec.bodies:
        if body.id == 0:
            continue
        body.explicitinertial = True
        body.mass, body.ipos = model.body_mass[body.id], model.body_ipos[body.id]
        body.iquat, body.inertia = model.body_iquat[body.id], model.body_inertia[body.id]
        body.fullinertia[0] = math.nan  # not given
        body.ialt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT
    compiler.settotalmass, compiler.boundmass, compiler.boundinertia = -1.0, 0.0, 0.0  # they have acted
    compiler.inertiafromgeom = mujoco.mjtInertiaFromGeom.mjINERTIAFROMGEOM_FALSE


class Scene:
    """One world, simulator-neutral; the canonical form is a `mujoco.MjSpec`.

    Every robot or object is added under a name, which prefixes the names of all its elements (`ant/torso`) and under
    which `Sim.articulation` finds it.

    A scene has one set of MuJoCo's options (`<option>`, `<flag>`). The task sets them by the arguments below, or by
    their names in `option`. What it does not set is what the robots' files say, and else MuJoCo's default.

    Args:
        physics_hz: Physics steps per simulated second [Hz]; the time step of a file has no effect.
        integrator: How MuJoCo integrates. `euler`, the default, is the fastest. It gains energy from fast rotation: a
            floating robot that turns by more than about a sixth of a radian per step speeds up until it diverges. A
            policy may find that this pays: see `max_angular_velocity`. `implicit` takes the gyroscopic forces at the
            end of the step and stays stable; a step of Ant costs a third more. `implicitfast` takes only the drives'
            and joints' damping at the end of the step: for stiff drives, at about the cost of `euler`. `rk4` is the
            fourth-order Runge-Kutta method: four evaluations of the dynamics per step.
        cone: Shape of the friction cones. `pyramidal`, the default, is the fastest. Its friction depends on the
            tangent directions of a contact, which MuJoCo and MuJoCo Warp choose differently for steep capsules on
            planes: there one step of Ant differs by up to 0.46 rad/s. With `elliptic` cones it is 4e-5, feet on the
            ground creep half as fast, and a step of Humanoid costs a third more.
        impratio: How much stiffer friction is than the contact's normal, for elliptic cones. At 1, the default, what
            is grasped creeps out of the hand; 10 holds it.
        gravity: Downwards [m/s^2]; the default is 9.81.
        max_angular_velocity: Of bodies with a free joint [rad/s]: after each control step what turns faster is slowed
            down to it. PhysX has such a limit too, of 64 rad/s. None is no limit.

    Attributes:
        option: MuJoCo's options by their names in `mujoco.MjOption`. What the task writes here holds against all files,
            if it is written before they are added.
        njmax: Constraint rows that MuJoCo Warp allocates for an env, where `sim.njmax` does not say. None, the default,
            estimates them from geoms and joints. It drops contacts that find no row: `sim/overflow` tells.

    Example:
        scene = Scene(physics_hz=120)
        scene.add_ground()
        scene.add("ant", ASSETS / "ant.xml")
        scene.add_contact_sensor("ant", ["front_left_foot"])
    """

    def __init__(
        self,
        physics_hz: float,
        *,
        integrator: Literal["euler", "implicit", "implicitfast", "rk4"] | None = None,
        cone: Literal["pyramidal", "elliptic"] | None = None,
        impratio: float | None = None,
        gravity: float | None = None,
        max_angular_velocity: float | None = None,
    ) -> None:
        # Without a handler MuJoCo appends every warning to MUJOCO_LOG.TXT in the user's folder; simulators report
        # worlds that go bad by mask.
        mujoco.set_mju_user_warning(logger.debug)
        self.spec = mujoco.MjSpec()
        self.spec.option.timestep = 1.0 / physics_hz
        self._model: mujoco.MjModel | None = None
        self.option = SceneOption(self.spec, self._changed)
        if max_angular_velocity is not None and not max_angular_velocity > 0.0:
            raise TaskError(f"Scene: max_angular_velocity must be above 0 rad/s, got {max_angular_velocity}")
        self.max_angular_velocity = max_angular_velocity
        self.njmax: int | None = None
        self.choose(integrator, cone)
        if impratio is not None:
            self.option.impratio = impratio
        if gravity is not None:
            self.option.gravity = [0.0, 0.0, -gravity]
        self.contact_sensors: dict[str, ContactSensor] = {}
        self.effort_sensors: set[str] = set()
        self.articulation_names: list[str] = []

    def _changed(self) -> None:
        self._model = None

    def choose(self, integrator: str | None, cone: str | None) -> None:
        """Sets the integrator and the friction cones, by the names of the arguments above; None leaves it."""
        if integrator is not None:
            self.option.integrator = _INTEGRATORS[integrator]
        if cone is not None:
            self.option.cone = _CONES[cone]

    def add_ground(
        self,
        *,
        friction: Sequence[float] = (1.0, 0.005, 0.0001),
        solimp: Sequence[float] = (0.9, 0.95, 0.001),
        margin: float = 0.0,
    ) -> None:
        """Adds an infinite horizontal plane at height 0 with a light above it.

        Args:
            friction: Sliding [-], torsional [m] and rolling [m] friction; contacts use the larger of the two geoms'.
            solimp: Impedance at the surface, at a depth, and that depth [m]; contacts use the mean of the two geoms'.
            margin: Distance at which contacts begin to be found [m]; contacts use the sum of the two geoms'.
        """
        self._add_ground_material()
        self.spec.worldbody.add_geom(
            name="ground",
            type=mujoco.mjtGeom.mjGEOM_PLANE,
            size=[0, 0, 1],
            friction=list(friction),
            solimp=[*solimp, 0.5, 2.0],
            margin=margin,
            material="ground",
        )
        self.add_light()

    def add_terrain(self, terrain: Terrain, *, friction: Sequence[float] = (1.0, 0.005, 0.0001)) -> None:
        """Adds the ground of a terrain with a light above it, the same for all worlds: a height field and its border.

        What sinks in so far that its middle is below ground stays there, for MuJoCo pushes it out of each cell of the
        field into the next. So contacts are as stiff as the time step allows: feet should be balls of 4 cm or more.

        Args:
            terrain: What it looks like.
            friction: Sliding [-], torsional [m] and rolling [m] friction; contacts use the larger of the two geoms'.
        """
        heights = terrain.heights.cpu().numpy()
        low, relief = heights.min(), max(heights.max() - heights.min(), 1e-3)
        half_x, half_y = terrain.half_size
        self._add_ground_material()
        surface = {
            "friction": list(friction),
            "material": "ground",
            "solref": [2.0 * self.spec.option.timestep, 1.0],
            "solmix": 1e3,  # its own solref counts, not the mean with the other geom's
        }
        self.spec.add_hfield(
            name="ground",
            size=[half_x, half_y, relief, TERRAIN_DEPTH],
            ncol=heights.shape[0],
            nrow=heights.shape[1],
            userdata=((heights.T - low) / relief).ravel(),
        )
        self.spec.worldbody.add_geom(
            name="ground", type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname="ground", pos=[0, 0, low], **surface
        )
        if border := 0.5 * terrain.cfg.border:
            for side in (-1, 1):
                for name, pos, size in (
                    ("x", [side * (half_x + border), 0], [border, half_y + 2 * border]),
                    ("y", [0, side * (half_y + border)], [half_x, border]),
                ):
                    self.spec.worldbody.add_geom(
                        name=f"border_{'+' if side > 0 else '-'}{name}",
                        type=mujoco.mjtGeom.mjGEOM_BOX,
                        pos=[*pos, -TERRAIN_DEPTH],
                        size=[*size, TERRAIN_DEPTH],
                        **surface,
                    )
        self.add_light()
        self._model = None

    def _add_ground_material(self) -> None:
        self.spec.add_texture(
            name="ground",
            type=mujoco.mjtTexture.mjTEXTURE_2D,
            builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
            rgb1=[0.36, 0.40, 0.46],
            rgb2=[0.30, 0.34, 0.40],
            width=256,
            height=256,
        )
        textures = [""] * mujoco.mjtTextureRole.mjNTEXROLE.value
        textures[mujoco.mjtTextureRole.mjTEXROLE_RGB.value] = "ground"
        self.spec.add_material(name="ground", textures=textures, texrepeat=[1, 1], texuniform=True)

    def add_light(self) -> None:
        """Adds a directional light from above; it matters only for pictures."""
        self.spec.worldbody.add_light(
            type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, pos=[0, 0, 6], dir=[0.3, 0.2, -1.0], castshadow=True
        )

    def add(
        self,
        name: str,
        mjcf: str | Path | mujoco.MjSpec,
        *,
        pos: Sequence[float] = (0.0, 0.0, 0.0),
        quat: Sequence[float] = (1.0, 0.0, 0.0, 0.0),
    ) -> None:
        """Adds a robot or object from an MJCF/URDF file or a spec.

        Its bodies, joints and actuators without a name get one (`body4`): an articulation finds them by name. Its
        options are those of the scene, unless the task has set them (see `Scene`). Its `<compiler>` settings hold for
        its own elements. Of these, `fusestatic`, `discardvisual`, `fitaabb` and `lengthrange` have no effect.

        Args:
            name: Its name in the scene; elements become `<name>/<element>`.
            mjcf: A file, a spec (which is consumed), or a robot of MuJoCo Menagerie: `menagerie:unitree_go1`.
            pos: Where its frame stands in the world [m].
            quat: How its frame is turned, wxyz.

        Raises:
            TaskError: The name is taken. Or the file is missing or not valid, or refers to what it does not have. Or
                an option has another value in a file that was added before.
        """
        if name in self.articulation_names:
            raise TaskError(f"Scene.add({name!r}): the scene already has a {name!r}; names must be unique")
        part = mjcf
        if isinstance(part, str) and part.startswith(menagerie.PREFIX):
            part = menagerie.load(part)
        elif isinstance(part, str | Path):
            try:
                part = mujoco.MjSpec.from_file(str(mjcf))
            except (ValueError, FileNotFoundError) as error:
                raise TaskError(f"Scene.add({name!r}): cannot load {mjcf}: {_one_line(error)}") from None
        roots = [body.name for body in part.worldbody.bodies]
        if len(roots) != 1:
            raise TaskError(f"Scene.add({name!r}): expected one body under the worldbody, got {roots or 'none'}")
        for kind, elements in (("body", part.bodies), ("joint", part.joints), ("actuator", part.actuators)):
            for number, element in enumerate(elements):
                element.name = element.name or f"{kind}{number}"
        if part.compiler.settotalmass > 0:
            try:
                _fix_masses(part)
            except ValueError as error:
                raise TaskError(f"Scene.add({name!r}): cannot load {mjcf}: {_one_line(error)}") from None
        before, own = _referring(self.spec), _referring(part)
        source = f"the spec of {name!r}" if isinstance(mjcf, mujoco.MjSpec) else str(mjcf)
        self.option.take_over(part, f"Scene.add({name!r})", source)
        self.spec.attach(part, prefix=f"{name}/", frame=self.spec.worldbody.add_frame(pos=list(pos), quat=list(quat)))
        after = _referring(self.spec)
        if lost := [kind for kind in own if before[kind] + own[kind] > after[kind]]:
            try:
                if not isinstance(mjcf, mujoco.MjSpec) and not str(mjcf).startswith(menagerie.PREFIX):
                    mujoco.MjSpec.from_file(str(mjcf)).compile()  # says which name it is, and on which line
            except ValueError as error:
                raise TaskError(f"Scene.add({name!r}): cannot load {mjcf}: {_one_line(error)}") from None
            raise TaskError(f"Scene.add({name!r}): among its {' and '.join(lost)} some name what it does not have")
        self.articulation_names.append(name)
        self._model = None

    def add_contact_sensor(self, name: str, bodies: Sequence[str]) -> None:
        """Makes `articulation.contacts(bodies)` available: the net contact wrench on each body.

        Args:
            name: The articulation.
            bodies: Its bodies, by their names in its own file.

        Raises:
            TaskError: A body does not exist.
        """
        known = {body.name for body in self.spec.bodies}
        for body in (f"{name}/{body}" for body in bodies):
            if body not in known:
                there = sorted(known - {"world"})
                raise TaskError(f"Scene.add_contact_sensor: no body {body!r}; the scene has {there}")
            if body in self.contact_sensors:
                continue
            sensor = ContactSensor(body, f"{body}/contact", f"{body}/contact_pos", f"{body}/contact_quat")
            self.spec.add_sensor(
                name=sensor.wrench,
                type=mujoco.mjtSensor.mjSENS_CONTACT,
                reftype=mujoco.mjtObj.mjOBJ_BODY,  # as the second body: the sensor reports what acts on it
                refname=body,
                intprm=[_CONTACT_FORCE | _CONTACT_TORQUE | _CONTACT_POS, _REDUCE_NETFORCE, 1],
            )
            for kind, sensor_name in (
                (mujoco.mjtSensor.mjSENS_FRAMEPOS, sensor.body_pos),
                (mujoco.mjtSensor.mjSENS_FRAMEQUAT, sensor.body_quat),
            ):
                self.spec.add_sensor(name=sensor_name, type=kind, objtype=mujoco.mjtObj.mjOBJ_XBODY, objname=body)
            self.contact_sensors[body] = sensor
        self._model = None

    def add_effort_sensors(self, name: str) -> None:
        """Makes `articulation.joint_effort` available: the force of the actuators on each joint.

        Args:
            name: The articulation.

        Raises:
            TaskError: It does not exist.
        """
        if name not in self.articulation_names:
            raise TaskError(f"Scene.add_effort_sensors: no {name!r}; the scene has {self.articulation_names}")
        if name in self.effort_sensors:
            return
        scalar = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)
        for joint in self.spec.joints:
            if joint.name.startswith(f"{name}/") and joint.type in scalar:
                self.spec.add_sensor(
                    name=f"{joint.name}/effort",
                    type=mujoco.mjtSensor.mjSENS_JOINTACTFRC,
                    objtype=mujoco.mjtObj.mjOBJ_JOINT,
                    objname=joint.name,
                )
        self.effort_sensors.add(name)
        self._model = None

    @property
    def evaluations(self) -> int:
        """How often a physics step evaluates the dynamics."""
        return 4 if self.model.opt.integrator == _INTEGRATORS["rk4"] else 1

    def limit_rotation(self, qvel: Float[Tensor, "envs nv"]) -> None:
        """Slows down, in place, what turns faster than `max_angular_velocity`; qvel in MuJoCo's layout."""
        if self.max_angular_velocity is not None:
            model = self.model
            for dof in model.jnt_dofadr[model.jnt_type == _FREE].tolist():
                qvel[:, dof + 3 : dof + 6].renorm_(2, 0, self.max_angular_velocity)  # the 2-norm of each row

    @property
    def model(self) -> mujoco.MjModel:
        """The compiled model.

        Raises:
            TaskError: MuJoCo's compiler refuses the scene.
        """
        if self._model is None:
            try:
                self._model = self.spec.compile()
            except ValueError as error:
                raise TaskError(f"Scene: MuJoCo cannot compile it: {_one_line(error)}") from None
        return self._model
