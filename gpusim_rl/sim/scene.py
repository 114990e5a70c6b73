"""Scene: robots, objects, ground and sensors of one world, independent of the simulator."""

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

from gpusim_rl.errors import TaskError, available
from gpusim_rl.sim import actuators, ground, menagerie
from gpusim_rl.sim.camera import SceneCamera, add_camera
from gpusim_rl.sim.option import SceneOption
from gpusim_rl.sim.robot_file import attach, free_objects, hide_collision_shapes, mujoco_warnings, one_line, read_robot
from gpusim_rl.sim.robot_xml import bounded_memory
from gpusim_rl.sim.scene_sensors import add_sensor
from gpusim_rl.sim.terrain import Terrain

# MuJoCo's contact sensor: bits of its data specification, and the reduction of all contacts to one wrench.
_CONTACT_FORCE, _CONTACT_TORQUE, _CONTACT_POS, _REDUCE_NETFORCE = 1 << 1, 1 << 2, 1 << 4, 3
_SCALAR = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)
_PROCESS_WIDE = threading.RLock()  # guards the memory limit and the warning handler

logger = logging.getLogger(__name__)


class Scene:
    """One world as a `mujoco.MjSpec`; methods raise TaskError for unknown names and invalid values.

    Every robot or object has a name, which prefixes its elements (`ant/torso`). A scene has one set of MuJoCo options:
    set by the task, through these arguments or `option`, else by the robots' files, else MuJoCo's defaults.

    Args:
        physics_hz: Physics steps per simulated second [Hz]; a file's time step is ignored.
        integrator: `euler`, the default, is the fastest, but gains energy from fast rotation: a floating robot that
            turns more than about a sixth of a radian per step speeds up until it diverges, which a policy may exploit;
            see `max_angular_velocity`. `implicit` stays stable; a step of Ant costs a third more. `implicitfast` suits
            stiff drives at about the cost of `euler`. `rk4` evaluates the dynamics four times per step.
        cone: Friction cones. `pyramidal`, the default, is the fastest; its friction depends on a contact's tangents,
            which MuJoCo and MuJoCo Warp choose differently for steep capsules on planes: a step of Ant then differs by
            up to 0.46 rad/s. With `elliptic` it differs by 4e-5 rad/s, feet creep half as fast, and a step of Humanoid
            costs a third more.
        impratio: Stiffness of friction relative to the normal, for elliptic cones. At 1, the default, grasped objects
            creep out of the hand; 10 holds them.
        gravity: Downward acceleration, or a vector in the world frame [m/s^2]; default 9.81.
        max_angular_velocity: Limit for free bodies, applied after each control step [rad/s]; PhysX uses 64.

    Attributes:
        option: MuJoCo's options by name. Values written before a file is added override the file's.
        njmax: Constraint rows per env in MuJoCo Warp if `sim.njmax` is null; None estimates them. Contacts without a
            row are dropped and reported in `sim/overflow`.

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
            raise TaskError(key="Scene.max_angular_velocity", expected="a positive number", got=max_angular_velocity)
        self.max_angular_velocity = max_angular_velocity
        self.njmax: int | None = None
        self.choose(integrator, cone)
        if impratio is not None:
            self.option.impratio = impratio
        if gravity is not None:
            vector = [0.0, 0.0, -gravity] if isinstance(gravity, int | float) else list(gravity)
            if len(vector) != 3:
                raise TaskError(key="Scene.gravity", expected="one or three numbers", got=gravity)
            self.option.gravity = vector
        self.contact_sensors: list[str] = []  # names of bodies in the model
        self.effort_sensors: set[str] = set()
        self.articulation_names: list[str] = []
        self.cameras: dict[str, SceneCamera] = {}
        self.files: list[Path] = []  # of robots and objects, in order
        self._velocity_limits: dict[str, dict[str, float]] = {}  # by file, then joint
        self._objects: dict[str, str] = {}  # file of each free object after the first body

    def _changed(self) -> None:
        self._model = None

    def choose(self, integrator: str | None, cone: str | None) -> None:
        """Set integrator and friction cones by name; None keeps them."""
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
        """Add an infinite plane at height 0 and a light.

        Args:
            friction: Sliding [-], torsional [m] and rolling [m] friction; contacts use the maximum of both geoms.
            solimp: MuJoCo's (d0, dwidth, width): impedance at depths 0 and `width` [m]; contacts use the mean.
            margin: Distance at which contacts are detected [m]; contacts use the sum of both geoms.
        """
        ground.add_plane(self.spec, friction, solimp, margin)
        self.add_light()

    def add_terrain(self, terrain: Terrain, *, friction: Sequence[float] = (1.0, 0.005, 0.0001)) -> None:
        """Add a light and a terrain: a height field with a border, shared by all worlds.

        Geoms that sink into the ground past their centre stay there, so contacts are as stiff as the time step allows:
        use feet with a radius of 4 cm or more.
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
        """Add a height field shared by all worlds, and a light. See `add_terrain` for the minimum foot radius.

        Args:
            heights: Heights [m], shape [x, y], or a PNG file (right is +x, top is +y).
            size: Lengths along x and y [m].
            height: Height of an image's brightest point above its darkest [m].
            pos: Position of the centre [m]; an image's darkest point is at height 0.
            friction: See `add_ground`.
            name: Name of the geom and the height field.
        """
        field = ground.read_heights("Scene.add_heightfield", heights, size, height)
        ground.add_heights(self.spec, name, field, (0.5 * size[0], 0.5 * size[1]), pos, friction)
        self.add_light()

    def add_light(self) -> None:
        """Add a directional light for rendering."""
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
        """Add a robot or object from an MJCF or URDF file or a spec.

        The file becomes an articulation whose root is the first body under the worldbody; other bodies there with a
        free joint become separate articulations, `<name>/<body>`. Geoms of the worldbody stay fixed, without an owner.
        Ball joints move but are not listed as joints. Unnamed bodies, joints and actuators get names (`body4`).

        The file's options are merged into the scene's; files must not conflict. Its `<compiler>` settings apply to its
        own elements, except for `fusestatic`, `discardvisual`, `fitaabb` and `lengthrange`.

        Args:
            name: Name in the scene; elements become `<name>/<element>`.
            robot: File, spec (consumed), or robot of MuJoCo Menagerie (`menagerie:unitree_go1`).
            pos: Position of the file's frame in the world [m].
            quat: Orientation of the file's frame, wxyz.
            keyframe: Keyframe that becomes the reference pose, in which worlds start; joints keep their zeros and
                limits. Default: `home` for Menagerie, else the pose of the file.
            fixed_base: False adds a free joint to the first body, True removes it. Default: as in the file; fixed for
                URDF.
            packages: Folders of ROS packages in a URDF (`package://<package>/meshes/x.stl`). Other packages are looked
                up by name in the file's folder and its parents.
        """
        label = f"Scene.add({name!r})"
        if name in (*self._velocity_limits, *self.articulation_names):
            raise TaskError("this name is already in use", key=label)
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
            raise error.within(label) from None
        except (ValueError, OSError) as error:
            raise TaskError(f"cannot load {robot}: {one_line(error)}", key=label) from None
        self.files += [Path(robot)] if isinstance(robot, str | Path) else []
        self._velocity_limits[name] = velocity_limits
        self._objects |= {f"{name}/{body}": name for body in objects}
        self.articulation_names += [name] * has_bodies + [f"{name}/{body}" for body in objects]
        self._model = None

    def prefix(self, articulation: str) -> str:
        """Return the prefix of an articulation's elements in the model."""
        return f"{self._objects.get(articulation, articulation)}/"

    def bodies_of(self, articulation: str) -> list[int]:
        """Return an articulation's body ids in order; empty if it does not exist."""
        model, prefix = self.model, self.prefix(articulation)
        bodies = [i for i in range(model.nbody) if model.body(i).name.startswith(prefix)]
        roots = {i: model.body(model.body_rootid[i]).name for i in bodies}
        if articulation in self._objects:
            return [i for i in bodies if roots[i] == articulation]
        return [i for i in bodies if roots[i] not in self._objects]

    def elements_of(self, articulation: str, kind: str) -> dict[str, int]:
        """Return ids of an articulation's elements by their names in its file; empty if it does not exist.

        Joints are hinges and slides. Other kinds are `body`, `actuator`, `tendon`, `site` and `sensor`.
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
        if kind == "actuator":  # actuators on joints belong to the joint's articulation
            on_joint = np.isin(model.actuator_trntype, [transmission.value for transmission in actuators.ON_JOINTS])
            joint_of, rest = model.actuator_trnid[:, 0], articulation not in self._objects
            ids = [i for i in ids if (model.jnt_bodyid[joint_of[i]] in bodies if on_joint[i] else rest)]
        return {getattr(model, kind)(i).name.removeprefix(prefix): i for i in ids}

    def sensor_columns(self, name: str) -> range:
        """Return the range of a sensor's columns in the sensor data."""
        sensor = self.model.sensor(name)
        return range(int(sensor.adr[0]), int(sensor.adr[0] + sensor.dim[0]))

    def contact_columns(self, body: str) -> list[int]:
        """Return the sensor-data columns of a body's contacts, all from one physics step and in the world frame.

        Columns: force [N], torque [N m] about a point, that point [m], body position [m] and orientation (wxyz).
        """
        if body not in self.contact_sensors:
            hint = "Try scene.add_contact_sensor in the task's scene()"
            raise TaskError(f"body {body!r} has no contact sensor", hint=hint)
        names = (f"{body}/contact", f"{body}/contact_pos", f"{body}/contact_quat")
        return [column for name in names for column in self.sensor_columns(name)]

    def _check_name(self, call: str, articulation: str) -> None:
        if articulation not in self.articulation_names:
            hint = available(articulation, self.articulation_names)
            raise TaskError(f"no articulation {articulation!r}", key=f"Scene.{call}", hint=hint)

    def _joints_of(self, articulation: str) -> list[mujoco.MjsJoint]:
        """Return an articulation's hinges and slides in the spec."""
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
        """Return a URDF's velocity limits [rad/s or m/s] by joint; pass them to `add_actuators` to apply them."""
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
        """Add a drive to each joint, named after the joint; it acts in every physics step.

        Each value is one number for all joints, or numbers by joint or pattern: `{"*_hip": 80, "*_knee": 120}`.

        With `velocity_limit`, a drive has the torque-speed curve of a DC motor, like Isaac Lab's `DCMotor`: its effort
        is clipped to +-stall_effort (+-1 - v / velocity_limit), then to +-effort_limit; beyond the velocity limit the
        drive brakes. See https://mujoco.readthedocs.io/en/latest/_static/dcmotor.pdf.

        Args:
            name: Name of the robot.
            joints: Names or patterns (`*_hip`, `[fr]*_knee`) of hinges and slides.
            kind: Meaning of the control. `position`: target position [rad or m]; effort = stiffness (target - position)
                - damping velocity. `velocity`: target velocity [rad/s or m/s]; effort = damping (target - velocity).
                `torque`: effort [N m or N]. `dc_motor`: voltage from -1 to 1; effort = stall_effort (control - velocity
                / velocity_limit).
            stiffness: Servo stiffness [N m/rad or N/m].
            damping: Servo damping [N m s/rad or N s/m].
            effort_limit: Maximum effort [N m or N]; default: the file's, if any.
            velocity_limit: No-load speed [rad/s or m/s]; see `velocity_limits` for a URDF's.
            stall_effort: Effort at standstill [N m or N]; default `effort_limit`.
            armature: Reflected rotor inertia [kg m^2 or kg]; default: the file's.
            friction: Dry friction [N m or N]; default: the file's.
            delay: Control delay [s], rounded up to physics steps; an episode's first control acts immediately.
            max_delay: Maximum delay for `sim.param("actuator_delay", ...)` [s]; default `delay`.
        """
        self._check_name(f"add_actuators({name!r})", name)
        values = {"stiffness": stiffness, "damping": damping, "armature": armature, "friction": friction}
        values |= {"effort_limit": effort_limit, "velocity_limit": velocity_limit, "stall_effort": stall_effort}
        values |= {"delay": delay, "max_delay": max_delay}
        try:
            drivable = {joint.name.removeprefix(self.prefix(name)): joint for joint in self._joints_of(name)}
            actuators.add_actuators(self.spec, drivable, joints, kind, values)
        except TaskError as error:
            raise error.within(f"Scene.add_actuators({name!r})") from None
        self._model = None

    def add_sensor(
        self, name: str, sensor: str, kind: str, *, cutoff: float = 0.0, against: str | None = None, **of: str
    ) -> None:
        """Add a sensor that the file does not have; read it with `articulation.sensor(sensor)`.

            scene.add_sensor("go1", "imu_gyro", "gyro", body="trunk")
            scene.add_sensor("go1", "foot_force", "touch", site="foot")

        Args:
            name: Name of the articulation.
            sensor: Name of the new sensor.
            kind: Kind in MuJoCo's XML: `gyro`, `accelerometer`, `force`, `touch`, `framelinacc`, `rangefinder`, ... See
                https://mujoco.readthedocs.io/en/stable/XMLreference.html#sensor.
            cutoff: Maximum absolute reading, in the sensor's unit; 0 = no limit.
            against: Other side of a `contact` sensor. `ground` (anything fixed to the world): number of contacts and
                net force on the element [N], world frame. `self` (contacts within the body's subtree): number of
                contacts and the largest force [N], in that contact's frame.
            **of: `site`, `body`, `joint`, `actuator`, `tendon` or `geom` by its name in the file; `body` means the
                body's frame.
        """
        self._check_name("add_sensor", name)
        add_sensor(self.spec, name, self.prefix(name), sensor, kind, of, cutoff, against)
        self._model = None

    def add_contact_sensor(self, name: str, bodies: Sequence[str]) -> None:
        """Add sensors for `articulation.contacts(bodies)`: the net contact wrench on each body."""
        kinds, objects = mujoco.mjtSensor, mujoco.mjtObj
        known = {body.name for body in self.spec.bodies[1:]}  # without the world
        wrench = [_CONTACT_FORCE | _CONTACT_TORQUE | _CONTACT_POS, _REDUCE_NETFORCE, 1]
        for body in (f"{self.prefix(name)}{body}" for body in bodies):
            if body not in known:
                hint = available(body, sorted(known))
                raise TaskError(f"no body {body!r}", key="Scene.add_contact_sensor", hint=hint)
            if body in self.contact_sensors:
                continue
            second = {"reftype": objects.mjOBJ_BODY, "refname": body}  # sensors report the wrench on the second body
            self.spec.add_sensor(name=f"{body}/contact", type=kinds.mjSENS_CONTACT, intprm=wrench, **second)
            for pose, kind in (("pos", kinds.mjSENS_FRAMEPOS), ("quat", kinds.mjSENS_FRAMEQUAT)):
                frame = {"objtype": objects.mjOBJ_XBODY, "objname": body}
                self.spec.add_sensor(name=f"{body}/contact_{pose}", type=kind, **frame)
            self.contact_sensors.append(body)
        self._model = None

    def add_effort_sensors(self, name: str) -> None:
        """Add sensors for `articulation.joint_effort`: the actuators' force on each joint."""
        self._check_name("add_effort_sensors", name)
        if name in self.effort_sensors:
            return
        kind = {"type": mujoco.mjtSensor.mjSENS_JOINTACTFRC, "objtype": mujoco.mjtObj.mjOBJ_JOINT}
        for joint in self._joints_of(name):
            self.spec.add_sensor(name=f"{joint.name}/effort", objname=joint.name, **kind)
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
        """Add a camera for `Sim.camera(name)`: images of every world, rendered only if a task requests them.

            scene.add_camera("side", pos=(0.0, -3.0, 1.0), target=(0.0, 0.0, 0.5), size=(84, 84))
            scene.add_camera("wrist", body="arm/hand", pos=(0.05, 0.0, 0.0), outputs=("rgb", "depth"))
            scene.add_camera("go1/tracking", size=(64, 64))  # a camera of the robot's file

        Args:
            name: Name of the camera.
            body: Body that carries the camera (`arm/hand`); None = world.
            pos: Position in the body's frame [m].
            quat: Orientation in the body's frame, wxyz: the camera looks along -z; in the image, +y is up and +x is
                right.
            fovy: Vertical field of view [degrees]; default: the file's, else 45.
            size: Height and width [pixels].
            outputs: Any of `rgb`, `depth` and `segmentation`.
            every: Control steps per frame.
            target: Point to look at in the body's frame [m], instead of `quat`; z is up in the image.
            groups: MuJoCo's geom groups to render. A few primitives render many times faster than fine meshes.
            samples: Rays per pixel along each side, averaged in `rgb`, for objects thinner than a pixel; 2 costs four
                times as much.
        """
        if name in self.cameras:
            raise TaskError(f"the scene already has a camera {name!r}", key="Scene.add_camera")
        camera = SceneCamera(name, size, tuple(outputs), every, tuple(sorted({*groups})), samples)
        add_camera(self.spec, camera, body, pos, quat, target, fovy)
        self.cameras[name] = camera
        self._model = None

    @property
    def steps_compute_sensors(self) -> bool:
        """True if physics steps compute sensors; sensors read only by `Articulation.sensor` are computed on demand."""
        model = self.model
        late = bool(model.sensor_interval.any() or model.sensor_delay.any())  # such sensors store earlier readings
        touches = bool(np.any(model.sensor_type == mujoco.mjtSensor.mjSENS_CONTACT))
        return touches or bool(self.effort_sensors) or late

    @property
    def evaluations(self) -> int:
        """Evaluations of the dynamics per physics step."""
        return 4 if self.model.opt.integrator == mujoco.mjtIntegrator.mjINT_RK4 else 1

    def limit_rotation(self, qvel: Float[Tensor, "envs nv"]) -> None:
        """Limit the angular velocity of free bodies to `max_angular_velocity` in place; qvel is in MuJoCo's layout."""
        if self.max_angular_velocity is not None:
            model = self.model
            for dof in model.jnt_dofadr[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE].tolist():
                qvel[:, dof + 3 : dof + 6].renorm_(2, 0, self.max_angular_velocity)  # the 2-norm of each row

    @property
    def model(self) -> mujoco.MjModel:
        """Compiled model; TaskError if MuJoCo rejects the scene."""
        if self._model is None:
            try:
                with _PROCESS_WIDE, mujoco_warnings("Scene"), bounded_memory():
                    self._model = actuators.with_whole_steps(self.spec.compile())
                hide_collision_shapes(self._model)
            except ValueError as error:
                raise TaskError(f"MuJoCo cannot compile the scene: {one_line(error)}", key="Scene") from None
        return self._model
