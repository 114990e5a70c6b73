"""Legged robots for the velocity and tracking tasks: motors, sensors, a depth camera."""

from __future__ import annotations

import itertools
import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig
from gpusim_rl.env.observations import table
from gpusim_rl.errors import ConfigError, TaskError, did_you_mean
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sensor, Sim

SERVO_HZ = 10.0  # natural frequency of the servos, for any motor inertia
DAMPING_RATIO = 2.0
ACTION_SHARE = 0.25  # share of the maximum torque that an action of 1 commands initially
SOFT_LIMIT = 0.9  # share of a joint's range without cost
HIT = 10.0  # contact force above which a contact is penalised [N]
IMAGE_SIZE = 24, 32  # depth image height and width [pixels]
FOVY = 58.0  # vertical field of view of an Intel RealSense D435 [degrees]
EVERY = 5  # control steps per image: 10 Hz, as in Extreme Parkour (arXiv 2309.14341)
GROUND_GROUP = 1  # geoms that the depth camera renders


@dataclass(frozen=True, kw_only=True)
class Motor:
    """Type of motor with its gear and servo."""

    armature: float  # rotor inertia reflected through the gear [kg m^2]
    effort: float  # maximum torque [N m]
    stiffness: float  # servo stiffness [N m/rad]
    damping: float  # servo damping [N m s/rad]
    scale: float  # joint target offset for an action of 1 [rad]

    @classmethod
    def tuned(cls, armature: float, effort: float, scale: float | None = None) -> Motor:
        """Return a motor with mjlab's servo gains: overdamped, with a natural frequency of 10 Hz.

        Default `scale` [rad]: an action of 1 initially commands a quarter of the maximum torque.
        """
        omega = 2.0 * math.pi * SERVO_HZ
        stiffness, damping = armature * omega**2, 2.0 * DAMPING_RATIO * armature * omega
        scale = ACTION_SHARE * effort / stiffness if scale is None else scale
        return cls(armature=armature, effort=effort, stiffness=stiffness, damping=damping, scale=scale)


@dataclass(frozen=True, kw_only=True)
class Eye:
    """Depth camera on the torso, in its x-z plane, looking ahead and down."""

    x: float  # position ahead of the torso's origin [m]
    z: float  # position above the torso's origin [m]
    pitch: float  # downward angle from the torso's x axis [rad]
    near: float  # depths up to this become 0 in the image [m]
    far: float  # depths from this on, and empty pixels, become 255 [m]

    def __post_init__(self) -> None:
        if not 0.0 <= self.near < self.far:
            raise TaskError(key="Eye", expected="0 <= near < far [m]", got=(self.near, self.far))


@dataclass(frozen=True, kw_only=True)
class Robot:
    """Legged robot of a task. Patterns match joint names; the first match wins. Invalid values raise TaskError."""

    name: str  # folder and file in tasks/assets, unless `file` is set
    root: str  # root body
    torso: str  # body to keep upright
    imu: str  # site of the IMU
    feet: tuple[str, ...]  # parts that stand on the ground: `body:<name>`, or `geom:<name>`
    soles: tuple[str, ...]  # sites at the feet, in the same order, for heights and velocities
    height: float  # initial height of the root [m], plus `start_height`
    pose: Mapping[str, float]  # joint angles [rad], by pattern; 0 for the others
    motors: Mapping[str, Motor]  # by pattern
    # Deviation from the pose at which its reward falls to 1/e [rad]: standing, walking, running; by pattern.
    widths: Mapping[str, tuple[float, float, float]]
    foot_ring: tuple[float, int] = (0.04, 4)  # radius [m] and number of the points of rough ground around each sole
    thighs: tuple[str, ...] = ()  # parts that must not touch rough ground, like `feet`; if empty, tilt ends episodes
    shanks: tuple[str, ...] = ()  # parts for `shank_contact`, named like `feet`
    trot: tuple[float, ...] = ()  # 1 for feet that swing together in a trot, -1 for the others, ordered like `feet`
    elliptic: bool = False  # elliptic friction cones, with an `impratio` of 10
    file: str | Path | None = None  # MJCF, URDF or `menagerie:<robot>`; its motors, sensors and floor are removed
    fixed_base: bool | None = None  # False: add a free joint to the file's fixed base
    sites: Mapping[str, tuple[str, tuple[float, float, float]]] = field(default_factory=dict)  # added: body, pos [m]
    eye: Eye | None = None  # depth camera, for `task.vision=depth`
    packages: Mapping[str, str | Path] = field(default_factory=dict)  # folders of ROS packages for a URDF

    def __post_init__(self) -> None:
        for item in (*self.feet, *self.thighs, *self.shanks):
            if item.partition(":")[0] not in ("body", "geom"):
                key, hint = f"robot {self.name!r}: feet, thighs and shanks", f"Try 'body:{item}'"
                raise TaskError(key=key, expected="body:<name> or geom:<name>", got=item, hint=hint)
        if len(self.soles) != len(self.feet):
            expected = f"one sole for each of {len(self.feet)} feet"
            raise TaskError(key=f"robot {self.name!r}: soles", expected=expected, got=self.soles)
        for pattern, widths in self.widths.items():
            if len(widths) != 3 or min(widths) <= 0.0:
                key = f"robot {self.name!r}: widths[{pattern!r}]"
                raise TaskError(key=key, expected="three positive numbers (stand, walk, run) [rad]", got=widths)

    def by_joint(self, joints: list[str], values: str, default: Any = None) -> list[Any]:
        """Return the value of `pose`, `motors` or `widths` for each joint, from the first matching pattern.

        Raises:
            TaskError: A pattern matches no joint, or a joint matches no pattern and there is no default.
        """
        by_pattern: Mapping[str, Any] = getattr(self, values)
        key = f"robot {self.name!r}: {values}"
        for pattern in by_pattern:
            if not any(fnmatchcase(joint, pattern) for joint in joints):
                hint = f"{did_you_mean(pattern, joints)} Available: {', '.join(joints)}"
                raise TaskError(f"{pattern!r} matches no joint", key=key, hint=hint)
        matches = [next((v for p, v in by_pattern.items() if fnmatchcase(joint, p)), default) for joint in joints]
        if None in matches:
            joint = joints[matches.index(None)]
            raise TaskError(f"no pattern matches joint {joint!r}", key=key, hint="Try '*' for all others")
        return matches

    def empty_scene(self, physics_hz: float) -> Scene:
        """Return a scene with the robot's solver settings, but without robot and ground."""
        scene = Scene(physics_hz, integrator="implicitfast")
        if self.elliptic:
            scene.choose(None, "elliptic")
            scene.option.impratio = 10.0
        scene.option.iterations, scene.option.ls_iterations, scene.option.ccd_iterations = 10, 20, 50
        return scene

    def add_motors(self, scene: Scene) -> None:
        """Add a servo for each joint, and the IMU's sensors, to a scene that contains the robot."""
        scene.add_sensor("robot", "lin_vel", "velocimeter", site=self.imu)
        scene.add_sensor("robot", "ang_vel", "gyro", site=self.imu)
        values = {
            name: {pattern: getattr(motor, name) for pattern, motor in self.motors.items()}
            for name in ("stiffness", "damping", "armature")
        }
        effort = {pattern: motor.effort for pattern, motor in self.motors.items()}
        scene.add_actuators("robot", list(self.motors), kind="position", effort_limit=effort, **values)

    def add_to(self, scene: Scene) -> None:
        """Add the robot to a scene as "robot", without motors and sensors.

        Raises:
            TaskError: The file is unsuitable, or has no body for a site.
        """
        spec, file = scene.spec, self.file or assets_dir() / self.name / f"{self.name}.xml"
        ground = len(spec.worldbody.geoms)
        scene.add("robot", file, fixed_base=self.fixed_base, packages=self.packages or None)
        floor = spec.worldbody.geoms[ground:]
        names = {geom.name for geom in floor}
        pairs = [pair for pair in spec.pairs if names & {pair.geomname1, pair.geomname2}]
        for element in [*spec.sensors, *spec.actuators, *pairs, *floor]:
            spec.delete(element)
        for site, (body, pos) in self.sites.items():
            if (place := spec.body(f"robot/{body}")) is None:
                hint = did_you_mean(body, [each.name.removeprefix("robot/") for each in spec.bodies[1:]])
                raise TaskError(f"no body {body!r} for the site {site!r}", key=str(file), hint=hint)
            place.add_site(name=f"robot/{site}", pos=pos)

    def add_eye(self, scene: Scene) -> None:
        """Add the depth camera "eye", which renders only geoms fixed to the world; raise ConfigError without `eye`."""
        eye = self.eye
        if eye is None:
            problem = f"robot {self.name!r} has no depth camera (`eye`)"
            raise ConfigError(problem, key="task.vision=depth", hint="Try task.vision=null")
        for geom in scene.spec.worldbody.geoms:
            geom.group = GROUND_GROUP
        scene.add_camera(
            "eye",
            f"robot/{self.torso}",
            pos=(eye.x, 0.0, eye.z),
            target=(eye.x + math.cos(eye.pitch), 0.0, eye.z - math.sin(eye.pitch)),
            fovy=FOVY,
            size=IMAGE_SIZE,
            outputs=("depth",),
            every=EVERY,
            groups=(GROUND_GROUP,),
        )


class SensorGroup(list[Sensor]):
    """Sensors of the robot with equal sizes, whose readings are also one tensor."""

    def __init__(self, sim: Sim, names: Sequence[str]) -> None:
        robot, scene = sim.articulation("robot"), sim.scene
        super().__init__(robot.sensor(name) for name in names)
        first = [scene.sensor_columns(f"{scene.prefix('robot')}{name}").start for name in names]
        gap, *others = {b - a for a, b in itertools.pairwise(first)} or {0}
        self._gap = gap if gap >= 0 and not others else None  # between the columns of two sensors

    @property
    def data(self) -> Float[Tensor, "envs sensors size"]:
        """Readings: a view if the sensors are evenly spaced in the simulator's memory, else a copy."""
        if self._gap is None:
            return torch.stack([sensor.data for sensor in self], dim=1)
        data = self[0].data
        return data.as_strided((len(data), len(self), data.shape[1]), (data.stride(0), self._gap, 1))


Rows = list[tuple[str, int, str]]  # observation terms: name, size, meaning


Cfg = TypeVar("Cfg", bound=TaskConfig)


class Legged(Task[Cfg]):
    """Base of the velocity and the tracking tasks: a robot with a servo and a biased encoder at each joint.

    If a subclass's docstring has `Action space: <n> numbers` but no observations, `SPECIFICATION` is appended, with the
    tables of `_rows`.
    """

    SPECIFICATION: ClassVar[str]
    robot: ClassVar[Robot]
    units: ClassVar = {"lin_vel": "m/s", "ang_vel": "rad/s", "joint_pos": "rad", "joint_vel": "rad/s", "actions": "-"}
    sources: ClassVar = {
        "lin_vel": "sensor robot/lin_vel",
        "ang_vel": "sensor robot/ang_vel",
        "joint_pos": "joint positions from the pose",
        "joint_vel": "joint velocities",
        "actions": "last action",
    }
    per_env_errors: ClassVar = ("encoder_bias",)
    encoder_bias: Float[Tensor, "envs joints"]  # rad; allocated by subclasses, with all else that `reset` sets
    last_actions: Float[Tensor, "envs actions"]  # of the previous control step; allocated by subclasses

    def __init_subclass__(cls) -> None:
        doc = cls.__doc__ or ""
        joints = re.search(r"Action space: (\d+)", doc)
        if joints is not None and "Observation space:" not in doc:
            groups = cls._rows(int(joints[1]))
            rows = ([(*row, cls.units.get(row[0], "as above")) for row in group] for group in groups)
            policy, critic = map(table, rows)
            cls.__doc__ = f"{doc.rstrip()}\n\n{cls.SPECIFICATION.format(policy=policy, critic=critic)}"

    @classmethod
    @abstractmethod
    def _rows(cls, joints: int) -> tuple[Rows, Rows]:
        """Return the observation terms of policy and critic for a robot with `joints` joints."""

    def __init__(self, cfg: Cfg, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.body = body = sim.articulation("robot")
        self.num_actions, names = len(body.actuator_names), body.joint_names
        if body.actuator_names != names:
            missing = sorted(set(names) - set(body.actuator_names))
            raise TaskError(f"joints without a motor: {missing}", key=type(self).__name__)
        self.lin_vel, self.ang_vel = body.sensor("lin_vel"), body.sensor("ang_vel")
        self.pose = torch.tensor(self.robot.by_joint(names, "pose", 0.0), device=self.device)
        scale = [motor.scale for motor in self.robot.by_joint(names, "motors")]
        self.scale = torch.tensor(scale, device=self.device)
        low, high = body.joint_limits.unbind(dim=1)
        self.mid = (0.5 * (low + high)).nan_to_num_(nan=0.0)  # joints without limits
        self.half_range = 0.5 * SOFT_LIMIT * (high - low)
        self.quat_sines = sines("cos/2 0 0 sin/2", self.device)  # of the quaternion of a rotation about z
        self.soft_limits = self.mid - self.half_range, self.mid + self.half_range

    def about_z(self, yaw: Float[Tensor, "envs 1"]) -> Float[Tensor, "envs 4"]:
        """Return the quaternions of rotations about z by `yaw` [rad]."""
        phase, factor = self.quat_sines
        return torch.addcmul(phase, yaw, factor).sin_()

    def beyond_limits(self) -> Float[Tensor, " envs"]:
        """Return the sum of joint angles beyond the middle 90 % of their range [rad]."""
        joint_pos = self.body.joint_pos
        return torch.linalg.vector_norm(joint_pos - joint_pos.clamp(*self.soft_limits), ord=1, dim=1)

    def action_change(self) -> Float[Tensor, " envs"]:
        """Return the squared change of the actions since the last control step."""
        return squared_error(self.actions, self.last_actions).sum(dim=1)


def sines(entries: str, device: torch.device) -> Float[Tensor, "2 entries"]:
    """Return phase and factor of each entry of a rotation, sin(phase + factor * angle), to compute all in one kernel.

    Entries: `0`, `1`, `sin`, `cos`, `-sin`, and those of half the angle, such as `sin/2`.
    """
    quarter = 0.5 * math.pi
    kinds = {"0": (0.0, 0.0), "1": (quarter, 0.0), "sin": (0.0, 1.0), "cos": (quarter, 1.0), "-sin": (0.0, -1.0)}
    kinds |= {f"{name}/2": (phase, 0.5 * factor) for name, (phase, factor) in kinds.items()}
    return torch.tensor([kinds[entry] for entry in entries.split()], device=device).T.contiguous()


def squared_error(a: Float[Tensor, "*batch"], b: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return (a - b) squared, elementwise, in one kernel."""
    return torch.nn.functional.mse_loss(a, b, reduction="none")
