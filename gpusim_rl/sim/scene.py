"""What one world contains: robots, objects, ground and sensors, before any simulator sees it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import mujoco
import numpy as np
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.errors import TaskError
from gpusim_rl.sim import actuators, ground, menagerie
from gpusim_rl.sim.camera import SceneCamera, add_camera
from gpusim_rl.sim.option import SceneOption
from gpusim_rl.sim.robot_file import (
    attach,
    free_objects,
    hide_collision_shapes,
    mujoco_warnings,
    one_line,
    read_robot,
)
from gpusim_rl.sim.robot_xml import bounded_memory
from gpusim_rl.sim.scene_sensors import add_sensor
from gpusim_rl.sim.terrain import Terrain

# MuJoCo's contact sensor: bits of its data specification, and the reduction of all matching contacts to one wrench.
_CONTACT_FORCE, _CONTACT_TORQUE, _CONTACT_POS = 1 << 1, 1 << 2, 1 << 4
_REDUCE_NETFORCE = 3

logger = logging.getLogger(__name__)

_PROCESS_WIDE = threading.RLock()  # for the limit of memory and the handler of warnings: two threads never swap them

_FREE = mujoco.mjtJoint.mjJNT_FREE
_SCALAR = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)
_ON_JOINTS = (mujoco.mjtTrn.mjTRN_JOINT, mujoco.mjtTrn.mjTRN_JOINTINPARENT)


class Scene:
    """One world, simulator-neutral; the canonical form is a `mujoco.MjSpec`.

    Every robot or object is added under a name, which prefixes the names of all its elements (`ant/torso`) and under
    which `Sim.articulation` finds it.

    A scene has one set of MuJoCo's options (`<option>`, `<flag>`). The task sets them by the arguments below, or by
    their names in `option`. What it does not set is what the robots' files say, and else MuJoCo's default.

    Args:
        physics_hz: Physics steps per simulated second [Hz]; the time step of a file has no effect.
        integrator: Integrator of MuJoCo. `euler`, the default, is the fastest. It gains energy from fast rotation: a
            floating robot that turns by more than about a sixth of a radian per step speeds up until it diverges. A
            policy may find that this pays: see `max_angular_velocity`. `implicit` takes the gyroscopic forces at the
            end of the step and stays stable; a step of Ant costs a third more. `implicitfast` takes only the drives'
            and joints' damping at the end of the step: for stiff drives, at about the cost of `euler`. `rk4` is the
            fourth-order Runge-Kutta method: four evaluations of the dynamics per step.
        cone: Shape of the friction cones. `pyramidal`, the default, is the fastest. Its friction depends on the
            tangent directions of a contact, which MuJoCo and MuJoCo Warp choose differently for steep capsules on
            planes: there one step of Ant differs by up to 0.46 rad/s. With `elliptic` cones it is 4e-5, feet on the
            ground creep half as fast, and a step of Humanoid costs a third more.
        impratio: Ratio of the stiffness of friction to that of the contact's normal, for elliptic cones. At 1, the
            default, what is grasped creeps out of the hand; 10 holds it.
        gravity: Acceleration downwards [m/s^2], or a vector in the world frame; the default is 9.81.
        max_angular_velocity: Limit for bodies with a free joint [rad/s]: after each control step what turns faster is
            slowed down to it. PhysX has such a limit too, of 64 rad/s. None is no limit.

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
        gravity: float | Sequence[float] | None = None,
        max_angular_velocity: float | None = None,
    ) -> None:
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
            vector = [0.0, 0.0, -gravity] if isinstance(gravity, int | float) else list(gravity)
            if len(vector) != 3:
                raise TaskError(f"Scene: gravity must be a number or three numbers [m/s^2], got {gravity}")
            self.option.gravity = vector
        self.contact_sensors: list[str] = []  # bodies, by their names in the model
        self.effort_sensors: set[str] = set()
        self.articulation_names: list[str] = []
        self.cameras: dict[str, SceneCamera] = {}
        self._velocity_limits: dict[str, dict[str, float]] = {}  # of joints, by what was added
        self._objects: dict[str, str] = {}  # articulations that share a file with another one: the name of that

    def _changed(self) -> None:
        self._model = None

    def choose(self, integrator: str | None, cone: str | None) -> None:
        """Sets the integrator and the friction cones, by the names of the arguments above; None leaves it."""
        if integrator is not None:
            self.option.integrator = getattr(mujoco.mjtIntegrator, f"mjINT_{integrator.upper()}")
        if cone is not None:
            self.option.cone = getattr(mujoco.mjtCone, f"mjCONE_{cone.upper()}")

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
        ground.add_plane(self.spec, friction, solimp, margin)
        self.add_light()

    def add_terrain(self, terrain: Terrain, *, friction: Sequence[float] = (1.0, 0.005, 0.0001)) -> None:
        """Adds the ground of a terrain with a light above it, the same for all worlds: a height field and its border.

        What sinks in so far that its middle is below ground stays there, for MuJoCo pushes it out of each cell of the
        field into the next. So contacts are as stiff as the time step allows: feet should be balls of 4 cm or more.
        The friction is as in `add_ground`.
        """
        ground.add_terrain(self.spec, terrain, friction)
        self.add_light()

    def add_heightfield(
        self,
        heights: np.ndarray | str | Path,
        size: Sequence[float],
        *,
        height: float | None = None,
        pos: Sequence[float] = (0.0, 0.0, 0.0),
        friction: Sequence[float] = (1.0, 0.005, 0.0001),
        name: str = "ground",
    ) -> None:
        """Adds ground of your own with a light above it: a height field, the same for all worlds.

        Feet should be balls of 4 cm or more, see `add_terrain`. Nothing is beyond its edges.

        Args:
            heights: Heights [m] at the points of a grid, shape [x, y], or a PNG picture, whose right is +x and whose
                top is +y.
            size: Lengths along x and y [m].
            height: Height of a picture's brightest point above its darkest [m].
            pos: Position of the middle, at height 0 [m]; the darkest point of a picture is at height 0.
            friction: Friction as in `add_ground`.
            name: Name of the geom and the height field.

        Raises:
            TaskError: The heights are not a grid of finite numbers, or cannot be read, or a size is not positive.
        """
        field = ground.read_heights("Scene.add_heightfield", heights, size, height)
        ground.add_heights(self.spec, name, field, (0.5 * size[0], 0.5 * size[1]), pos, friction)
        self.add_light()

    def add_light(self) -> None:
        """Adds a directional light from above; it matters only for pictures."""
        self.spec.worldbody.add_light(
            type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, pos=[0, 0, 6], dir=[0.3, 0.2, -1.0], castshadow=True
        )
        self._model = None

    def add(
        self,
        name: str,
        robot: str | Path | mujoco.MjSpec,
        *,
        pos: Sequence[float] = (0.0, 0.0, 0.0),
        quat: Sequence[float] = (1.0, 0.0, 0.0, 0.0),
        keyframe: str | None = None,
        fixed_base: bool | None = None,
        packages: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Adds a robot or object from an MJCF or URDF file or a spec, with all that the file has.

        All bodies of the file are one articulation, in the file's order. Its root is the first body under the
        worldbody; it has a root state if that body has a free joint. Any other body under the worldbody that has a free
        joint is an object: with what hangs on it, it is an articulation of its own, `<name>/<body>`. Geoms of the
        worldbody are fixed, and make no articulation. Ball joints move, but are not among an articulation's joints:
        their position is not one number.

        Its bodies, joints and actuators without a name get one (`body4`): an articulation finds them by name. Its
        options are those of the scene, unless the task has set them (see `Scene`). Its `<compiler>` settings hold for
        its own elements. Of these, `fusestatic`, `discardvisual`, `fitaabb` and `lengthrange` have no effect.

        Args:
            name: Name in the scene; elements become `<name>/<element>`.
            robot: A file, a spec (which is consumed), or a robot of MuJoCo Menagerie: `menagerie:unitree_go1`.
            pos: Position of its frame in the world [m].
            quat: Orientation of its frame, wxyz.
            keyframe: Name of the file's keyframe that becomes the reference pose, in which worlds begin. Joints keep
                their zeros and limits. None is the pose that the file draws; of Menagerie's robots it is `home`.
            fixed_base: Whether the base is fixed: False gives the first body a free joint, True removes it. None is as
                the file has it: in URDF files the base is fixed.
            packages: Folder of each ROS package that a URDF file names, for `package://<package>/meshes/x.stl`. A
                package that is missing here is looked for by its name, in the file's folder and those above it.

        Raises:
            TaskError: The name is taken. Or the file is missing or not valid, or refers to what it does not have. Or
                an option has another value in a file that was added before. Or another argument does not fit the file.
        """
        label = f"Scene.add({name!r})"
        if name in (*self._velocity_limits, *self.articulation_names):
            raise TaskError(f"{label}: the scene already has a {name!r}; names must be unique")
        from_menagerie = isinstance(robot, str) and robot.startswith(menagerie.PREFIX)
        try:
            with _PROCESS_WIDE, mujoco_warnings(label), bounded_memory():
                spec, velocity_limits = read_robot(robot, packages, keyframe, fixed_base)
            objects, has_bodies = free_objects(spec), bool(spec.worldbody.bodies)
            source = f"the spec of {name!r}" if isinstance(robot, mujoco.MjSpec) else str(robot)
            self.option.take_over(spec, source)
            frame = self.spec.worldbody.add_frame(pos=list(pos), quat=list(quat))
            attach(self.spec, spec, name, frame, None if from_menagerie else robot)
        except TaskError as error:
            named = str(error).startswith(menagerie.PREFIX)  # by what was to be loaded
            raise error if named else TaskError(f"{label}: {error}") from None
        except (ValueError, OSError) as error:
            raise TaskError(f"{label}: cannot load {robot}: {one_line(error)}") from None
        self._velocity_limits[name] = velocity_limits
        self._objects |= {f"{name}/{body}": name for body in objects}
        self.articulation_names += [name] * has_bodies + [f"{name}/{body}" for body in objects]
        self._model = None

    def prefix(self, articulation: str) -> str:
        """Returns what the names of an articulation's elements begin with in the scene's model."""
        return f"{self._objects.get(articulation, articulation)}/"

    def bodies_of(self, articulation: str) -> list[int]:
        """Returns an articulation's bodies in the scene's model, in their order; none if it does not exist."""
        model, prefix = self.model, self.prefix(articulation)
        bodies = [i for i in range(model.nbody) if model.body(i).name.startswith(prefix)]
        roots = {i: model.body(model.body_rootid[i]).name for i in bodies}
        if articulation in self._objects:
            return [i for i in bodies if roots[i] == articulation]
        return [i for i in bodies if roots[i] not in self._objects]

    def elements_of(self, articulation: str, kind: str) -> dict[str, int]:
        """Returns numbers in the scene's model of an articulation's elements, by their names in its own file.

        Args:
            articulation: Name of the articulation; one that does not exist has no elements.
            kind: `body`, `joint` (hinges and slides only), `actuator`, `tendon`, `site` or `sensor`.
        """
        model, prefix, bodies = self.model, self.prefix(articulation), self.bodies_of(articulation)
        if kind == "body":
            ids = bodies
        elif kind == "joint":
            scalar = np.isin(model.jnt_type, [joint.value for joint in _SCALAR])
            ids = np.flatnonzero(np.isin(model.jnt_bodyid, bodies) & scalar).tolist()
        else:
            element = getattr(model, kind)
            ids = [i for i in range(getattr(model, f"n{kind}")) if element(i).name.startswith(prefix)]
        if kind == "actuator":  # of a file's actuators those on joints are of the articulation that has the joint
            on_joint = np.isin(model.actuator_trntype, [transmission.value for transmission in _ON_JOINTS])
            joint_of, rest = model.actuator_trnid[:, 0], articulation not in self._objects
            ids = [i for i in ids if (model.jnt_bodyid[joint_of[i]] in bodies if on_joint[i] else rest)]
        return {getattr(model, kind)(i).name.removeprefix(prefix): i for i in ids}

    def sensor_columns(self, name: str) -> range:
        """Returns the columns of the simulators' sensor data that a sensor of the scene's model writes."""
        sensor = self.model.sensor(name)
        return range(int(sensor.adr[0]), int(sensor.adr[0] + sensor.dim[0]))

    def contact_columns(self, body: str) -> list[int]:
        """Returns columns of the sensor data that tell of a body's contacts, by its name in the scene's model.

        Force [N], torque [N m] about a point, and that point [m]; position of the body [m] and its orientation wxyz.
        All are of the same physics step, in the world frame.

        Raises:
            TaskError: It has no contact sensor.
        """
        if body not in self.contact_sensors:
            raise TaskError(f"body {body!r} has no contact sensor; call scene.add_contact_sensor in the task's scene()")
        names = (f"{body}/contact", f"{body}/contact_pos", f"{body}/contact_quat")
        return [column for name in names for column in self.sensor_columns(name)]

    def _check_name(self, call: str, articulation: str) -> None:
        if articulation not in self.articulation_names:
            raise TaskError(f"Scene.{call}: no {articulation!r}; the scene has {self.articulation_names}")

    def _joints_of(self, articulation: str) -> list[mujoco.MjsJoint]:
        """Returns its hinges and slides in the spec."""
        prefix, joints = self.prefix(articulation), []
        for joint in self.spec.joints:
            if joint.name.startswith(prefix) and joint.type in _SCALAR:
                body = joint.parent
                while body.parent.name != "world":
                    body = body.parent
                if (body.name if body.name in self._objects else prefix[:-1]) == articulation:
                    joints.append(joint)
        return joints

    def velocity_limits(self, name: str) -> dict[str, float]:
        """Returns the largest speeds of joints [rad/s or m/s] that a URDF file states, by joint.

        MuJoCo does not limit the speed of joints; a drive does: `add_actuators(velocity_limit=...)`.

        Raises:
            TaskError: There is no such articulation.
        """
        self._check_name("velocity_limits", name)
        return dict(self._velocity_limits.get(name, {}))

    def add_actuators(
        self,
        name: str,
        joints: str | Sequence[str],
        *,
        kind: str,
        stiffness: actuators.Value | None = None,
        damping: actuators.Value | None = None,
        effort_limit: actuators.Value | None = None,
        velocity_limit: actuators.Value | None = None,
        stall_effort: actuators.Value | None = None,
        armature: actuators.Value | None = None,
        friction: actuators.Value | None = None,
        delay: actuators.Value | None = None,
        max_delay: actuators.Value | None = None,
    ) -> None:
        """Puts a drive on each of some joints: an actuator of the joint's name, which acts in every physics step.

        Every value is one number for all of the joints, or numbers by joint or pattern: `{"*_hip": 80, "*_knee": 120}`.

        With a `velocity_limit` a drive follows the torque-speed line of a DC motor: what it asks for is clipped to
        +-stall_effort (+-1 - v / velocity_limit), and then to +-effort_limit. At the velocity limit no torque is left
        to go faster, and beyond it the motor brakes. It is MuJoCo's DC motor
        (https://mujoco.readthedocs.io/en/latest/_static/dcmotor.pdf), and the same line as Isaac Lab's `DCMotor`.

        Args:
            name: Name of the robot.
            joints: Names or patterns (`*_hip`, `[fr]*_knee`) of its hinges and slides.
            kind: Meaning of the control. `position`: target position [rad or m]; the effort is
                stiffness (target - position) - damping velocity. `velocity`: target velocity [rad/s or m/s]; the effort
                is damping (target - velocity). `torque`: the effort [N m or N]. `dc_motor`: voltage, from -1 to 1 of
                the supply; the effort is stall_effort (control - velocity / velocity_limit).
            stiffness: Stiffness of a servo [N m/rad or N/m].
            damping: Damping of a servo [N m s/rad or N s/m].
            effort_limit: Largest effort [N m or N]; None is the limit that the file has for the joint, or none.
            velocity_limit: Speed at which the drive has no effort left [rad/s or m/s]; None is no such line. A URDF
                file's are `scene.velocity_limits(name)`.
            stall_effort: Effort of the line at standstill [N m or N]; None is `effort_limit`.
            armature: Inertia of the rotor behind the gear [kg m^2 or kg]; None leaves the file's.
            friction: Dry friction of the joint [N m or N]; None leaves the file's.
            delay: Time until a control acts [s], rounded up to physics steps. Until the first control of an
                episode arrives, that one acts.
            max_delay: Largest delay that a world can get through `sim.param("actuator_delay", ...)` [s]; None is
                `delay`.

        Raises:
            TaskError: A pattern matches no joint, a joint has an actuator already, or a value is missing, superfluous
                or negative.
        """
        self._check_name(f"add_actuators({name!r})", name)
        values = {"stiffness": stiffness, "damping": damping, "armature": armature, "friction": friction}
        values |= {"effort_limit": effort_limit, "velocity_limit": velocity_limit, "stall_effort": stall_effort}
        values |= {"delay": delay, "max_delay": max_delay}
        try:
            drivable = {joint.name.removeprefix(self.prefix(name)): joint for joint in self._joints_of(name)}
            actuators.add_actuators(self.spec, drivable, joints, kind, values)
        except TaskError as error:
            raise TaskError(f"Scene.add_actuators({name!r}): {error}") from None
        self._model = None

    def add_sensor(
        self, name: str, sensor: str, kind: str, *, cutoff: float = 0.0, against: str | None = None, **of: str
    ) -> None:
        """Makes `articulation.sensor(sensor)` available, where the articulation's own file has no such sensor.

            scene.add_sensor("go1", "imu_gyro", "gyro", body="trunk")
            scene.add_sensor("go1", "foot_force", "touch", site="foot")

        Args:
            name: Name of the articulation.
            sensor: Name of the new sensor.
            kind: Kind as MuJoCo's XML calls it: `gyro`, `accelerometer`, `force`, `touch`, `framelinacc`,
                `rangefinder`, ... See https://mujoco.readthedocs.io/en/stable/XMLreference.html#sensor.
            cutoff: Largest absolute value that it reads, in its unit; 0 = no limit.
            against: Other side of a `contact` sensor of a body or geom. `ground`: what is fixed to the env; it reads
                the number of contacts and their net force on the element [N], world frame. `self`: the body and all
                that hangs on it, among themselves; it reads the number, and the largest force, in its contact's frame.
            **of: Element that it is on: one of `site`, `body`, `joint`, `actuator`, `tendon` and `geom`, by its name in
                the articulation's file. A body stands for its frame: a gyro of a body has the body's axes.

        Raises:
            TaskError: There is no such kind or element, or the name is taken.
        """
        self._check_name("add_sensor", name)
        add_sensor(self.spec, name, self.prefix(name), sensor, kind, of, cutoff, against)
        self._model = None

    def add_contact_sensor(self, name: str, bodies: Sequence[str]) -> None:
        """Makes `articulation.contacts(bodies)` available: the net contact wrench on each of its bodies.

        Raises:
            TaskError: A body does not exist.
        """
        known = {body.name for body in self.spec.bodies[1:]}  # without the world
        for body in (f"{self.prefix(name)}{body}" for body in bodies):
            if body not in known:
                raise TaskError(f"Scene.add_contact_sensor: no body {body!r}; the scene has {sorted(known)}")
            if body in self.contact_sensors:
                continue
            self.spec.add_sensor(
                name=f"{body}/contact",
                type=mujoco.mjtSensor.mjSENS_CONTACT,
                reftype=mujoco.mjtObj.mjOBJ_BODY,  # as the second body: the sensor reports what acts on it
                refname=body,
                intprm=[_CONTACT_FORCE | _CONTACT_TORQUE | _CONTACT_POS, _REDUCE_NETFORCE, 1],
            )
            for sensor, kind in (
                (f"{body}/contact_pos", mujoco.mjtSensor.mjSENS_FRAMEPOS),
                (f"{body}/contact_quat", mujoco.mjtSensor.mjSENS_FRAMEQUAT),
            ):
                self.spec.add_sensor(name=sensor, type=kind, objtype=mujoco.mjtObj.mjOBJ_XBODY, objname=body)
            self.contact_sensors.append(body)
        self._model = None

    def add_effort_sensors(self, name: str) -> None:
        """Makes `articulation.joint_effort` available: the force of the actuators on each joint.

        Raises:
            TaskError: There is no such articulation.
        """
        self._check_name("add_effort_sensors", name)
        if name in self.effort_sensors:
            return
        for joint in self._joints_of(name):
            self.spec.add_sensor(
                name=f"{joint.name}/effort",
                type=mujoco.mjtSensor.mjSENS_JOINTACTFRC,
                objtype=mujoco.mjtObj.mjOBJ_JOINT,
                objname=joint.name,
            )
        self.effort_sensors.add(name)
        self._model = None

    def add_camera(
        self,
        name: str,
        body: str | None = None,
        pos: Sequence[float] | None = None,
        quat: Sequence[float] | None = None,
        fovy: float | None = None,
        size: tuple[int, int] = (64, 64),
        outputs: Sequence[str] = ("rgb",),
        every: int = 1,
        *,
        target: Sequence[float] | None = None,
        groups: Sequence[int] = (0, 1, 2),
        samples: int = 1,
    ) -> None:
        """Makes `Sim.camera(name)` available: images of every world. Nothing is drawn until a task asks for them.

            scene.add_camera("side", pos=(0.0, -3.0, 1.0), target=(0.0, 0.0, 0.5), size=(84, 84))
            scene.add_camera("wrist", body="arm/hand", pos=(0.05, 0.0, 0.0), outputs=("rgb", "depth"))
            scene.add_camera("go1/tracking", size=(64, 64))

        A camera that a robot's file has is added by its name in the scene, without a place.

        Args:
            name: Name of the camera.
            body: Body that carries it, by its name in the scene (`arm/hand`); None is the world.
            pos: Position [m], in the body's frame.
            quat: Orientation, wxyz, in the body's frame. A camera looks along its -z axis, its y axis is up and its x
                axis to the right in the image. None is that of the body.
            fovy: Angle of view from top to bottom [degrees]; None is 45, or that of the file.
            size: Height and width [pixels].
            outputs: Images that it draws, of `rgb`, `depth` and `segmentation`.
            every: Control steps from one frame to the next.
            target: Point that it looks at [m], in the body's frame, in place of `quat`; z is up in the image.
            groups: Groups of geoms that it draws, of MuJoCo's 0 to 5. Few primitives are drawn many times faster than
                fine meshes.
            samples: Rays of a pixel along each side; `rgb` is their mean. With 1 a thing that is thinner than a pixel
                is there or not; 2 costs four times as much. The other outputs are of the first ray.

        Raises:
            TaskError: The name is taken, there is no such body or camera, or a value is out of its range.
        """
        if name in self.cameras:
            raise TaskError(f"Scene.add_camera: the scene already draws with a camera {name!r}; names must be unique")
        camera = SceneCamera(name, size, tuple(outputs), every, tuple(sorted({*groups})), samples)
        add_camera(self.spec, camera, body, pos, quat, target, fovy)
        self.cameras[name] = camera
        self._model = None

    @property
    def senses_steps(self) -> bool:
        """Whether physics steps compute sensors. What only `Articulation.sensor` reads is computed where it is read."""
        model = self.model
        late = bool(model.sensor_interval.any() or model.sensor_delay.any())  # these keep what earlier steps read
        touches = bool(np.any(model.sensor_type == mujoco.mjtSensor.mjSENS_CONTACT))  # ours, or of the user's spec
        return touches or bool(self.effort_sensors) or late

    @property
    def evaluations(self) -> int:
        """How often a physics step evaluates the dynamics."""
        return 4 if self.model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4 else 1

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
                with _PROCESS_WIDE, mujoco_warnings("Scene"), bounded_memory():
                    self._model = actuators.with_whole_steps(self.spec.compile())
                hide_collision_shapes(self._model)
            except ValueError as error:
                raise TaskError(f"Scene: MuJoCo cannot compile it: {one_line(error)}") from None
        return self._model
