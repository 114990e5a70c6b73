"""Walking robots that follow commanded velocities, on flat or rough ground: the base of the tasks `<Robot>Velocity`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import AtSite, Levels, Parts, PerBody, Task, TaskConfig
from gpusim_rl.env.math import quat_rotate_inverse, wrap_angle
from gpusim_rl.env.stateful import Stateful
from gpusim_rl.errors import ConfigError, TaskError, did_you_mean
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sensor, Sim
from gpusim_rl.sim.terrain import Terrain, TerrainConfig

SERVO_HZ = 10.0  # natural frequency of the servos, whatever inertia the motor has
DAMPING_RATIO = 2.0
ACTION_SHARE = 0.25  # of the largest torque: what an action of 1 asks for, at the start
SCAN = 0.1 * torch.cartesian_prod(torch.arange(-5, 6), torch.arange(-8, 9)).flip(1)  # m ahead of the base, to its left
PLANE = torch.linspace(0, len(SCAN) - 1, 32).long()  # points of the scan that tell how the ground slopes
SCAN_RANGE = 5.0  # m
MOVING, RUNNING = 0.05, 1.5  # commanded speed [m/s] plus yaw rate [rad/s]
FORWARD = 0.3  # least speed of a command that is forward only [m/s]
SOFT_LIMIT = 0.9  # share of a joint's range that costs nothing
HIT = 10.0  # least force of a contact that costs [N]
AIR_TIMES = 0.05, 0.5  # of a foot, that are rewarded [s]
IMAGE_SIZE = 24, 32  # of the depth camera: height and width [pixels]
FOVY = 58.0  # from top to bottom, as of an Intel RealSense D435 [degrees]
EVERY = 5  # control steps from one image to the next: 10 Hz, as of Extreme Parkour (arXiv 2309.14341)
GROUND_GROUP = 1  # of geoms: what the depth camera draws

TERMS = ("lin_vel", "ang_vel", "upright", "pose", "joint_limits", "action_rate")
FOOT_TERMS = ("foot_clearance", "swing_height", "foot_slip", "soft_landing")
OPTIONAL_TERMS = (
    "air_time",
    "trot",
    "torso_ang_vel",
    "angular_momentum",
    "self_contact",
    "shank_contact",
    "trunk_contact",
)
"""Not computed where their weight is 0 or not there."""


@dataclass(frozen=True, kw_only=True)
class Motor:
    """A type of motor with its gear, and its servo.

    Attributes:
        armature: Inertia of the rotor behind the gear [kg m^2].
        effort: Largest torque [N m].
        stiffness: Stiffness of the servo [N m/rad].
        damping: Damping of the servo [N m s/rad].
        scale: Offset of the joint's target for an action of 1 [rad].
    """

    armature: float
    effort: float
    stiffness: float
    damping: float
    scale: float

    @classmethod
    def tuned(cls, armature: float, effort: float, scale: float | None = None) -> Motor:
        """Return a motor whose servo is an overdamped second-order system of 10 Hz, as those of mjlab's robots.

        Without a `scale` [rad], an action of 1 asks for a quarter of the largest torque.
        """
        omega = 2.0 * math.pi * SERVO_HZ
        stiffness, damping = armature * omega**2, 2.0 * DAMPING_RATIO * armature * omega
        scale = ACTION_SHARE * effort / stiffness if scale is None else scale
        return cls(armature=armature, effort=effort, stiffness=stiffness, damping=damping, scale=scale)


@dataclass(frozen=True, kw_only=True)
class Eye:
    """A depth camera on the torso of a robot, in its x-z plane, which looks ahead and down.

    Attributes:
        x: Place ahead of the torso's origin [m].
        z: Place above it [m].
        pitch: Angle of the view below the torso's x axis [rad].
        near: Depth that becomes 0 in the image [m]; also what is nearer.
        far: Depth that becomes 255 [m]; also what is further, or nothing.
    """

    x: float
    z: float
    pitch: float
    near: float
    far: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.near < self.far:
            raise TaskError(f"eye: expected 0 <= near < far [m], got near={self.near:g}, far={self.far:g}")


@dataclass(frozen=True, kw_only=True)
class Robot:
    """What a task must know of a walking robot. Patterns are of names of joints; the first that fits counts.

    Attributes:
        name: Its folder and file in tasks/assets, where there is no `file`.
        root: Its root body.
        torso: Body that is to be upright.
        imu: Site of the IMU.
        feet: What stands on the ground: `body:<name>`, or `geom:<name>` of a shape.
        soles: Sites at the feet, in the same order: their heights and velocities are rewarded.
        height: Height of the root at the start [m], to which `start_height` is added.
        pose: Joint angles of the pose [rad], by pattern; 0 for the others.
        motors: Motors, by pattern.
        widths: Deviation from the pose that divides its reward by e [rad]: standing, walking, running; by pattern.
        foot_ring: Radius of a ring around each sole [m] and its points, where the sole looks at rough ground.
        thighs: What must not touch rough ground, as `feet`; without it a tilt ends an episode there too.
        shanks: What `shank_contact` is of, as `feet`.
        trot: 1 for feet that swing together in a trot, -1 for the others, in the order of `feet`; needed by its term.
        elliptic: Whether friction cones are elliptic, and friction stiffer than the normal of a contact.
        file: MJCF or URDF, or `menagerie:<robot>`. Its motors, sensors and floor are left out.
        fixed_base: False gives a file without floating base one.
        sites: Body and place in it [m] of sites that the file lacks, by name.
        eye: Depth camera, for `task.vision=depth`.
        packages: Folders of the ROS packages that a URDF names, by package.

    Raises:
        TaskError: A value is not as described here.
    """

    name: str
    root: str
    torso: str
    imu: str
    feet: tuple[str, ...]
    soles: tuple[str, ...]
    height: float
    pose: Mapping[str, float]
    motors: Mapping[str, Motor]
    widths: Mapping[str, tuple[float, float, float]]
    foot_ring: tuple[float, int] = (0.04, 4)
    thighs: tuple[str, ...] = ()
    shanks: tuple[str, ...] = ()
    trot: tuple[float, ...] = ()
    elliptic: bool = False
    file: str | Path | None = None
    fixed_base: bool | None = None
    sites: Mapping[str, tuple[str, tuple[float, float, float]]] = field(default_factory=dict)
    eye: Eye | None = None
    packages: Mapping[str, str | Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in (*self.feet, *self.thighs, *self.shanks):
            if item.partition(":")[0] not in ("body", "geom"):
                expected = f"expected body:<name> or geom:<name>, got {item!r}; try 'body:{item}'"
                raise TaskError(f"robot {self.name!r}: feet, thighs and shanks: {expected}")
        if len(self.soles) != len(self.feet):
            expected = f"expected a sole for each of {len(self.feet)} feet, got {len(self.soles)}"
            raise TaskError(f"robot {self.name!r}: {expected}")
        for pattern, widths in self.widths.items():
            if len(widths) != 3 or min(widths) <= 0.0:
                expected = f"must be three numbers above 0: standing, walking, running [rad], got {widths}"
                raise TaskError(f"robot {self.name!r}: widths[{pattern!r}] {expected}")

    def by_joint(self, joints: list[str], values: str, default: Any = None) -> list[Any]:
        """Returns of `pose`, `motors` or `widths` what each joint has: the value of the first pattern that fits.

        Raises:
            TaskError: A pattern fits no joint, or a joint has no pattern and there is no default.
        """
        by_pattern: Mapping[str, Any] = getattr(self, values)
        where = f"robot {self.name!r}: {values}:"
        for pattern in by_pattern:
            if not any(fnmatchcase(joint, pattern) for joint in joints):
                hint = did_you_mean(pattern, joints)
                raise TaskError(f"{where} {pattern!r} matches no joint.{hint} There are {joints}")
        found = [
            next((value for key, value in by_pattern.items() if fnmatchcase(joint, key)), default) for joint in joints
        ]
        if None in found:
            raise TaskError(f"{where} no pattern matches {joints[found.index(None)]!r}; try '*' for all others")
        return found

    def empty_scene(self, physics_hz: float) -> Scene:
        """Returns a scene without robot and ground, whose solver is as the robot needs it."""
        scene = Scene(physics_hz, integrator="implicitfast")
        if self.elliptic:
            scene.choose(None, "elliptic")
            scene.option.impratio = 10.0
        scene.option.iterations, scene.option.ls_iterations, scene.option.ccd_iterations = 10, 20, 50
        return scene

    def add_motors(self, scene: Scene) -> None:
        """Adds a servo for each joint to a scene that has the robot."""
        values = {
            name: {pattern: getattr(motor, name) for pattern, motor in self.motors.items()}
            for name in ("stiffness", "damping", "armature")
        }
        effort = {pattern: motor.effort for pattern, motor in self.motors.items()}
        scene.add_actuators("robot", list(self.motors), kind="position", effort_limit=effort, **values)

    def add_to(self, scene: Scene) -> None:
        """Adds the robot to a scene as "robot", without motors and sensors.

        Raises:
            TaskError: The file does not fit, or has not the body of a site.
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
                known = [each.name.removeprefix("robot/") for each in spec.bodies[1:]]
                raise TaskError(f"{self.file}: no body {body!r} for the site {site!r}.{did_you_mean(body, known)}")
            place.add_site(name=f"robot/{site}", pos=pos)

    def add_eye(self, scene: Scene) -> None:
        """Adds the depth camera to a scene that has the robot, as "eye"; it draws what is fixed to the world.

        Raises:
            ConfigError: The robot has none.
        """
        eye = self.eye
        if eye is None:
            raise ConfigError(f"task.vision=depth: the robot {self.name!r} has no `eye`. Try task.vision=null")
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


def check_range(key: str, limits: Any) -> None:
    """Raises a ConfigError where a setting is no [low, high]."""
    numbers = isinstance(limits, list) and all(isinstance(limit, int | float) for limit in limits)
    if not numbers or len(limits) != 2 or not limits[0] <= limits[1]:
        raise ConfigError(f"{key} must be [low, high], got {limits}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandConfig:
    """Settings of `VelocityCommand`."""

    x: list[float]  # m/s
    y: list[float]  # m/s
    yaw: list[float]  # rad/s
    interval: list[float]  # s between two draws
    standing: float  # share of commands
    heading: float  # share of commands that turn to a heading
    forward: float  # share of commands straight ahead
    heading_gain: float  # yaw rate / angle to the heading [1/s]
    stages: list[dict[str, Any]]  # other ranges from a number of control steps on: {steps, x, y, yaw}
    stage_error: float | None = None  # mean error [m/s] above which a control step does not count for the stages

    def __post_init__(self) -> None:
        steps: list[Any] = [stage.get("steps") for stage in self.stages]
        growing = all(isinstance(number, int) and number >= 0 for number in steps) and steps == sorted(steps)
        if not growing or any(not stage.keys() <= {"steps", "x", "y", "yaw"} for stage in self.stages):
            raise ConfigError(
                "task.command.stages must be {steps, x, y, yaw} with growing steps, got"
                f" {self.stages}; try {{steps: 120000, x: [-1.5, 2.0]}}"
            )
        ranges = {name: getattr(self, name) for name in ("x", "y", "yaw", "interval")}
        for number, stage in enumerate(self.stages):
            ranges |= {f"stages[{number}].{name}": limits for name, limits in stage.items() if name != "steps"}
        for name, limits in ranges.items():
            check_range(f"task.command.{name}", limits)
        for name in ("standing", "heading", "forward"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"task.command.{name} must be a share from 0 to 1, got {getattr(self, name)}")


class VelocityCommand(Stateful):
    """Commanded velocities in the robot's frame.

    Attributes:
        value: x and y velocity [m/s] and yaw rate [rad/s], shape [num_envs, 3].
    """

    draws = 8
    """Random numbers that a new command needs."""

    def __init__(self, cfg: CommandConfig, num: int, dt: float, device: torch.device) -> None:
        self._gain, self._dt, self._stage_error = cfg.heading_gain, dt, cfg.stage_error
        ranges = {"x": cfg.x, "y": cfg.y, "yaw": cfg.yaw, "heading": [-math.pi, math.pi], "left": cfg.interval}
        rows = []
        for stage in ({}, *cfg.stages):
            ranges |= {name: limits for name, limits in stage.items() if name != "steps"}
            rows.append([*ranges.values()])
        self._stages = torch.tensor(rows, device=device).transpose(1, 2)  # low and high of each stage
        self._begins = torch.tensor([stage["steps"] for stage in cfg.stages], dtype=torch.int64, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)  # control steps that count
        self.limits = self._stages[0].clone()
        self._shares = torch.tensor([cfg.standing, cfg.heading, cfg.forward], device=device)
        self._drawn = torch.zeros(num, 5, device=device)  # x, y, yaw rate, heading [rad, world], time left [s]
        self._kinds = torch.zeros(num, 3, dtype=torch.bool, device=device)  # standing, turning to the heading, forward
        self._yaw = torch.zeros(num, device=device)  # of the robot [rad]
        self.value = torch.zeros(num, 3, device=device)

    def speed(self) -> Float[Tensor, " envs"]:
        """Returns the commanded speed [m/s] plus yaw rate [rad/s]."""
        return torch.linalg.vector_norm(self.value[:, :2], dim=1) + self.value[:, 2].abs()

    def controls(self) -> dict[str, tuple[float, float]]:
        """Returns the range of each command by its name and unit."""
        low, high = self.limits[:, :3].tolist()
        return dict(zip(("x [m/s]", "y [m/s]", "yaw [rad/s]"), zip(low, high, strict=True), strict=True))

    def hold(self, where: Bool[Tensor, " envs"], value: Float[Tensor, " 3"]) -> None:
        """Sets the commands in the envs of a mask, for at least the shortest interval."""
        torch.where(where[:, None], value, self._drawn[:, :3], out=self._drawn[:, :3])
        self._drawn[:, 4] = torch.where(where, self.limits[0, 4], self._drawn[:, 4])
        self._kinds.masked_fill_(where[:, None], False)
        self._follow()

    def restored(self) -> None:
        """Takes the ranges from today's settings: those of the checkpoint may be others."""
        self._take_stage()

    def _take_stage(self) -> None:
        stage = torch.bucketize(self._steps, self._begins, right=True)
        self.limits.copy_(self._stages.index_select(0, stage)[0])

    def begin(self, where: Bool[Tensor, " envs"], unit: Float[Tensor, "envs 8"], yaw: Float[Tensor, " envs"]) -> None:
        """Draws new commands in the envs of a mask, from numbers in [0, 1), for robots of a yaw [rad]."""
        self._draw(where, unit)
        torch.where(where, yaw, self._yaw, out=self._yaw)
        self._follow()

    def advance(
        self, unit: Float[Tensor, "envs 8"], ahead: Float[Tensor, "envs 3"], error: Float[Tensor, " envs"]
    ) -> None:
        """Counts a control step, draws new commands where their time is over, and follows where the robots look to.

        Commands widen only when they are followed, as in legged_gym: `error` is that of the velocity [m/s].
        """
        self._steps += 1 if self._stage_error is None else error.mean() <= self._stage_error
        self._take_stage()
        left = self._drawn[:, 4]
        left -= self._dt
        self._draw(left <= 0.0, unit)
        torch.atan2(ahead[:, 1], ahead[:, 0], out=self._yaw)
        self._follow()

    def _draw(self, where: Bool[Tensor, " envs"], unit: Float[Tensor, "envs 8"]) -> None:
        low, high = self.limits
        new, kinds = torch.lerp(low, high, unit[:, :5]), unit[:, 5:] < self._shares
        forward = kinds[:, 2:]
        ahead = new[:, :1].abs().clamp_(min=FORWARD)
        torch.where(forward, ahead, new[:, :1], out=new[:, :1])
        new[:, 1:3].masked_fill_(forward, 0.0)
        torch.where(where[:, None], new, self._drawn, out=self._drawn)
        torch.where(where[:, None], kinds, self._kinds, out=self._kinds)

    def _follow(self) -> None:
        """Lets commands of a heading follow the robot's yaw, and those to stand stand."""
        low, high = self.limits[:, 2]
        rate = wrap_angle(self._drawn[:, 3] - self._yaw).mul_(self._gain).clamp_(low, high)
        self.value[:, :2].copy_(self._drawn[:, :2])
        torch.where(self._kinds[:, 1], rate, self._drawn[:, 2], out=self.value[:, 2])
        self.value.masked_fill_(self._kinds[:, :1], 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushConfig:
    """Pushes: changes of the root's velocity, world frame."""

    interval: list[float]  # s between two pushes
    lin_vel: list[float]  # m/s along x, y and z, at most
    ang_vel: list[float]  # rad/s about x, y and z, at most

    def __post_init__(self) -> None:
        check_range("task.push.interval", self.interval)
        if self.interval[0] < 0.0:
            raise ConfigError(f"task.push.interval must be [low, high] of at least 0, got {self.interval}")
        for name in ("lin_vel", "ang_vel"):
            most = getattr(self, name)
            if len(most) != 3 or min(most) < 0.0:
                raise ConfigError(f"task.push.{name} must be three numbers of at least 0, got {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class VelocityConfig(TaskConfig):
    """Values in cfg/task/<Robot>Velocity.yaml."""

    terrain: Literal["flat", "rough"]
    rough: TerrainConfig
    command: CommandConfig
    pushes: bool
    push: PushConfig
    weights: dict[str, float]
    rough_weights: dict[str, float]
    lin_vel_width: float
    ang_vel_width: float
    upright_width: float
    swing_height: float
    encoder_bias: float
    tilt_limit: float
    start_height: list[float]
    vision: Literal["depth"] | None = None

    def __post_init__(self) -> None:
        TaskConfig.__post_init__(self)
        if self.vision is not None and self.terrain == "rough":  # a teacher has the scan, with noise as without vision
            heights = self.observations.get("heights", {})
            if isinstance(heights, Mapping):
                heights = {"used": False, **heights}
            object.__setattr__(self, "observations", {**self.observations, "heights": heights})
        check_range("task.start_height", self.start_height)
        for name in ("lin_vel_width", "ang_vel_width", "upright_width", "swing_height"):
            if getattr(self, name) <= 0.0:
                raise ConfigError(f"task.{name} must be above 0, got {getattr(self, name)}")
        if self.encoder_bias < 0.0:
            raise ConfigError(f"task.encoder_bias must be at least 0, got {self.encoder_bias}")
        known = (*TERMS, *FOOT_TERMS, *OPTIONAL_TERMS)
        for key in ("weights", "rough_weights"):
            for name in getattr(self, key):
                if name not in known:
                    hint = f"{did_you_mean(name, known)} There are {list(known)}"
                    raise ConfigError(f"task.{key}: no term {name!r}.{hint}")

    @property
    def all_weights(self) -> dict[str, float]:
        """Weight of each term that is computed, in the order of `VelocityTask.rewards`."""
        weights = {**self.weights, **(self.rough_weights if self.terrain == "rough" else {})}
        always = {name: weights.get(name, 0.0) for name in (*TERMS, *FOOT_TERMS)}
        return always | {name: weights[name] for name in OPTIONAL_TERMS if weights.get(name, 0.0) != 0.0}


class VelocityTask(Task[VelocityConfig]):
    """A robot follows commanded velocities. Subclasses say which: `robot`.

    Commands, observations, rewards, pushes and curriculum are those of mjlab 1.6's velocity tasks. Differences:
    contacts are looked at once in a control step, not in every physics step; a hit is one of the last physics step,
    and counts for all of the control step; contact forces act on the feet, not on the ground; the bias of the
    encoders is anew in each episode; the slope of rough ground is a least-squares fit; `heights` have noise only where
    `task.observations` has it (+-0.02 is mjlab's).

    Reward terms, x weight x control step; c is 1 if more than 0.05 m/s + rad/s are commanded, else 0:

    - `lin_vel`, `ang_vel`: exp(-squared error / width), errors of the root's velocity with that along z, and of its
      yaw rate with roll and pitch rate;
    - `upright`: exp(-squared sine of the torso's tilt / width); on rough ground, of robots whose thighs must not touch
      it, the tilt from the ground's normal;
    - `pose`: exp(-mean over joints of the squared deviation / squared width); the widths follow the commanded speed;
    - `joint_limits`: sum of what joints are beyond the middle 90 % of their range; `action_rate`: squared change of the
      actions;
    - `foot_clearance`: c x sum over feet of |height - swing_height| x horizontal speed; `swing_height`: c x sum over
      landing feet of (highest point of the swing / swing_height - 1) squared; `foot_slip`: c x sum over feet on the
      ground of the squared horizontal speed; `soft_landing`: c x sum of the forces on landing feet;
    - `air_time`: c x feet that have been in the air for 0.05 to 0.5 s; `trot`: c x the difference of their number
      between the diagonals, 2 in a trot and 0 where front and rear feet bound; `torso_ang_vel`: squared roll and pitch
      rate of the torso, world frame; `angular_momentum`: its square, of all of the robot; `self_contact`,
      `shank_contact`, `trunk_contact`: physics steps with a force of more than 10 N between bodies of the robot, on
      shanks or on the trunk.

    With `vision=depth` the policy gets images of a depth camera on the torso, the group `depth`: 24 x 32 pixels, the
    depth along the view from 0 (`near` of the robot's `Eye`) to 255 (`far`). It draws the ground alone, not the robot,
    in every fifth control step. On rough ground the images take the place of the policy's `heights`. The group
    `teacher` then has what the policy observes without vision, the same noise included; on flat ground there is none.

    On rough ground each env has its own kind of patch. At the end of an episode it goes one level up if the robot is
    further than half a patch from its middle, and one level down if it is nearer than half of the commanded distance.

    The log has, beside the return: mean error of velocity [m/s] and yaw rate [rad/s] over all control steps,
    `falls_per_minute`, and the `distance` [m] of episodes that end, in a straight line.
    """

    Config = VelocityConfig
    robot: ClassVar[Robot]
    units: ClassVar = {
        "lin_vel": "m/s",
        "ang_vel": "rad/s",
        "gravity": "-",
        "joint_pos": "rad",
        "joint_vel": "rad/s",
        "actions": "-",
        "command": "m/s, m/s, rad/s",
        "heights": f"{SCAN_RANGE:g} m",
        "foot_height": "m",
        "air_time": "s",
        "contact": "-",
        "contact_force": "log(1 + N)",
    }
    sources: ClassVar = {
        "lin_vel": "sensor robot/lin_vel",
        "ang_vel": "sensor robot/ang_vel",
        "gravity": "gravity",
        "joint_pos": "joint positions from the pose",
        "joint_vel": "joint velocities",
        "actions": "last action",
        "command": "command x y yaw",
    }
    errors_of_envs: ClassVar = ("encoder_bias",)

    def __init_subclass__(cls) -> None:
        soles = cls.robot.soles
        if "mirrors" in vars(cls):
            return
        cls.mirrors = {
            "lin_vel": AtSite(cls.robot.imu, "vector", "ang_vel"),
            "ang_vel": AtSite(cls.robot.imu, "pseudovector"),
            "gravity": "vector",
            "joint_pos": "joints",
            "joint_vel": "joints",
            "actions": "actuators",
            "command": "planar_velocity",
            "heights": SCAN,
            "foot_height": PerBody(soles),
            "air_time": PerBody(soles),
            "contact": PerBody(soles),
            "contact_force": PerBody(soles, "vector"),
            "depth": "image",
        }

    @classmethod
    def scene(cls, cfg: VelocityConfig) -> Scene:
        robot = cls.robot
        scene = robot.empty_scene(cfg.physics_hz)
        if cfg.terrain == "rough":
            scene.option.ccd_iterations = 500
            scene.add_terrain(Terrain(cfg.rough))
        else:
            scene.add_ground()
        robot.add_to(scene)
        if cfg.vision is not None:
            robot.add_eye(scene)
        robot.add_motors(scene)
        for name, axis in (("ahead", "framexaxis"), ("left", "frameyaxis"), ("up", "framezaxis")):
            scene.add_sensor("robot", name, axis, body=robot.root)
        scene.add_sensor("robot", "torso_up", "framezaxis", body=robot.torso)
        scene.add_sensor("robot", "lin_vel", "velocimeter", site=robot.imu)
        scene.add_sensor("robot", "ang_vel", "gyro", site=robot.imu)
        scene.add_sensor("robot", "root_lin_vel", "velocimeter", body=robot.root)
        for sole in robot.soles:
            scene.add_sensor("robot", f"{sole}_pos", "framepos", site=sole)
            scene.add_sensor("robot", f"{sole}_vel", "framelinvel", site=sole)
            if cfg.terrain == "rough":
                scene.add_sensor("robot", f"{sole}_ahead", "framexaxis", site=sole)
        for item in dict.fromkeys([*robot.feet, *(name for names in cls._hits(cfg).values() for name in names)]):
            kind, _, name = item.partition(":")
            of = {"geom": name} if kind == "geom" else {"body": name}
            scene.add_sensor("robot", f"{item}/ground", "contact", cutoff=0.0, against="ground", **of)
        weights = cfg.all_weights
        if "torso_ang_vel" in weights:
            scene.add_sensor("robot", "torso_ang_vel", "frameangvel", body=robot.torso)
        if "angular_momentum" in weights:
            scene.add_sensor("robot", "angular_momentum", "subtreeangmom", body=robot.root)
        if "self_contact" in weights:
            scene.add_sensor("robot", "self_contact", "contact", against="self", body=robot.root)
        return scene

    @classmethod
    def _hits(cls, cfg: VelocityConfig) -> dict[str, tuple[str, ...]]:
        """Returns what must not touch the ground, by what it counts for."""
        robot, weights = cls.robot, cfg.all_weights
        if "shank_contact" in weights and not robot.shanks:
            of = "rough_weights" if cfg.terrain == "rough" and "shank_contact" in cfg.rough_weights else "weights"
            key = f"task.{of}.shank_contact"
            raise ConfigError(f"{key}: the robot has no `shanks`. Try {key}=0")
        hits = {"shank_contact": robot.shanks, "trunk_contact": (f"body:{robot.root}",)}
        return {
            **{name: items for name, items in hits.items() if name in weights},
            **({"fall": robot.thighs} if cfg.terrain == "rough" and robot.thighs else {}),
        }

    def __init__(self, cfg: VelocityConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        robot, num, device = self.robot, self.num_envs, self.device
        self.body = body = sim.articulation("robot")
        self.num_actions = len(body.actuator_names)
        names, weights, rough = body.joint_names, cfg.all_weights, cfg.terrain == "rough"
        if body.actuator_names != names:
            raise TaskError(f"{type(self).__name__}: joints without a motor: {set(names) - set(body.actuator_names)}")
        self.feet = [body.sensor(f"{foot}/ground") for foot in robot.feet]
        self.lin_vel, self.ang_vel, self.root_lin_vel = map(body.sensor, ("lin_vel", "ang_vel", "root_lin_vel"))
        self.axes = [body.sensor(name) for name in ("ahead", "left", "up")]
        self.torso_up = body.sensor("torso_up")
        self.sole_pos = [body.sensor(f"{sole}_pos") for sole in robot.soles]
        self.sole_vel = [body.sensor(f"{sole}_vel") for sole in robot.soles]
        hits = {name: [body.sensor(f"{item}/ground") for item in items] for name, items in self._hits(cfg).items()}
        self.thighs = hits.pop("fall", None)
        if "self_contact" in weights:
            hits["self_contact"] = [body.sensor("self_contact")]
        self.hits = hits
        self.sensors = {name: body.sensor(name) for name in ("torso_ang_vel", "angular_momentum") if name in weights}

        self.pose = torch.tensor(robot.by_joint(names, "pose", 0.0), device=device)
        self.scale = torch.tensor([motor.scale for motor in robot.by_joint(names, "motors")], device=device)
        widths = torch.tensor(robot.by_joint(names, "widths"), device=device)
        self.tightness = widths.T.pow(-2.0) / len(names)  # standing, walking, running
        self.gaits = torch.tensor([MOVING, RUNNING], device=device)
        low, high = body.joint_limits.unbind(dim=1)
        self.mid = (0.5 * (low + high)).nan_to_num_(nan=0.0)  # of joints without limits
        self.half_range = 0.5 * SOFT_LIMIT * (high - low)
        widths = [cfg.lin_vel_width, cfg.ang_vel_width, cfg.upright_width, 1.0]
        self.sharpness = -torch.tensor(widths, device=device).reciprocal()[:, None]
        self.terms = tuple(weights)
        if "trot" in weights and len(robot.trot) != len(robot.feet):
            raise ConfigError(
                f"task.weights.trot: expected `trot` of the robot to have a number for each of {len(robot.feet)} feet,"
                f" got {len(robot.trot)}. Try task.weights.trot=0"
            )
        self.trot = torch.tensor(robot.trot, dtype=torch.float32, device=device)
        self.weights = self.dt * torch.tensor([*weights.values()], device=device)[:, None]

        self.eye = None if cfg.vision is None else sim.camera("eye")

        self.command = VelocityCommand(cfg.command, num, self.dt, device)
        bias, (least, most) = cfg.encoder_bias, cfg.start_height
        starts = [[-0.5, 0.5], [-0.5, 0.5], [robot.height + least, robot.height + most], [-math.pi / 2, math.pi / 2]]
        starts += [cfg.push.interval, *[[-bias, bias]] * len(names)]
        self.starts = torch.tensor(starts, device=device).T.contiguous()  # x, y, z, yaw / 2, time to a push, bias
        push = torch.tensor([*cfg.push.lin_vel, *cfg.push.ang_vel, 0.0], device=device)
        self.push_range = torch.stack([-push, push])  # and the time to the next one
        self.push_range[:, 6].copy_(self.starts[:, 4])
        self.until_push = torch.zeros(num, 1, device=device)  # s
        self.zeros = torch.zeros(num, 3, device=device)
        self.encoder_bias = torch.zeros(num, len(names), device=device)
        self.last_actions = torch.zeros(num, self.num_actions, device=device)
        self.air_time = torch.zeros(num, len(robot.feet), device=device)  # since each foot left the ground [s]
        self.touches = torch.zeros(num, len(robot.feet), dtype=torch.bool, device=device)  # of rewards()
        self.touched = torch.zeros_like(self.touches)  # a control step before
        self.peak = torch.zeros(num, len(robot.feet), device=device)  # height of each foot since it left the ground [m]
        self.errors = torch.zeros(2, num, device=device)  # of the velocity [m/s] and the yaw rate [rad/s]
        self.fell = torch.zeros(num, dtype=torch.bool, device=device)
        self.origin = torch.zeros(num, 3, device=device)  # where the episode began, or the middle of its patch [m]
        self.walked = torch.zeros(num, device=device)  # distance from there [m]
        self.ended = torch.zeros(num, dtype=torch.bool, device=device)
        self.ground = Terrain(cfg.rough, device) if rough else None
        if self.ground is not None:
            self.scan_points = SCAN.to(device)
            self.plane_points = SCAN[PLANE].to(device)
            plane = torch.cat([SCAN[PLANE], torch.ones(len(PLANE), 1)], dim=1)
            self.plane = torch.linalg.pinv(plane)[:2].T.contiguous().to(device)  # slopes ahead and to the left
            self.sole_ahead = [body.sensor(f"{sole}_ahead") for sole in robot.soles]
            radius, points = robot.foot_ring
            angle = torch.arange(points, device=device) * (2.0 * math.pi / points)
            ring = radius * torch.stack([angle.cos(), angle.sin()], dim=1)
            self.ring = torch.cat([ring, torch.zeros(1, 2, device=device)])  # m, and the middle
            self.column = torch.arange(num, device=device) % len(self.ground.kinds)
            self.levels = Levels(self, cfg.rough.levels, initial=torch.arange(num) % max(1, cfg.rough.levels // 2))

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        everyone, joints, num = where[:, None], len(self.pose), self.num_envs
        unit = self.random.uniform(0.0, 1.0, 5 + joints + VelocityCommand.draws)
        low, high = self.starts
        drawn = torch.lerp(low, high, unit[:, : 5 + joints])
        pos, half_yaw, push, bias = drawn.split([3, 1, 1, joints], dim=1)
        if self.ground is None:
            torch.where(everyone, pos, self.origin, out=self.origin)
        else:
            level = self.levels.value.clamp(max=self.levels.count - 1)  # a resumed run may have had more levels
            torch.where(everyone, self.ground.origins[level, self.column], self.origin, out=self.origin)
            pos = pos + self.origin
        self.body.set_state(
            where,
            root_pos=pos,
            root_quat=torch.cat([half_yaw.cos(), self.zeros[:, :2], half_yaw.sin()], dim=1),
            root_ang_vel=self.zeros,
            joint_pos=self.pose.expand(num, joints),
        )
        torch.where(everyone, bias, self.encoder_bias, out=self.encoder_bias)
        torch.where(everyone, push, self.until_push, out=self.until_push)
        for memory in (self.last_actions, self.air_time, self.peak, self.touched):
            memory.masked_fill_(everyone, 0)
        self.command.begin(where, unit[:, 5 + joints :], 2.0 * half_yaw[:, 0])

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        # A servo turns the joint until its encoder, with its bias, shows the target.
        self.body.actuate(torch.addcmul(self.pose, action, self.scale) - self.encoder_bias)

    def observe(self) -> dict[str, Tensor | Parts]:
        body, force = self.body, _stacked(self.feet)[..., 1:]
        parts = {
            "lin_vel": self.lin_vel.data,
            "ang_vel": self.ang_vel.data,
            "gravity": torch.stack([axis.data[:, 2] for axis in self.axes], dim=1).neg_(),
            "joint_pos": body.joint_pos - self.pose,
            "joint_vel": body.joint_vel,
            "actions": self.actions,
            "command": self.command.value,
        }
        if self.ground is not None:
            parts["heights"] = (body.root_pos[:, 2:] - self._scan(self.scan_points)).clamp_(
                -SCAN_RANGE, SCAN_RANGE
            ) / SCAN_RANGE
        privileged = {
            "foot_height": self._foot_height(),
            "air_time": self.air_time,
            "contact": self.touched.float(),
            "contact_force": torch.copysign(force.abs().log1p(), force).flatten(1),
        }
        seen = {**parts, "joint_pos": parts["joint_pos"] + self.encoder_bias}
        groups: dict[str, Tensor | Parts] = {"policy": seen, "critic": {**parts, **privileged}}
        if self.eye is not None and self.robot.eye is not None:
            groups["depth"] = self.eye.depth_bytes(self.robot.eye.near, self.robot.eye.far)
        return groups

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        body, command = self.body, self.command
        error = torch.stack([self.root_lin_vel.data, body.root_ang_vel_local], dim=1)
        error[:, 0, :2] -= command.value[:, :2]
        error[:, 1, 2] -= command.value[:, 2]
        torch.linalg.vector_norm(error[:, 0, :2], dim=1, out=self.errors[0])
        torch.abs(error[:, 1, 2], out=self.errors[1])
        velocity, spin = error.square().sum(dim=2).unbind(dim=1)
        speed = command.speed()
        gait = torch.bucketize(speed, self.gaits, right=True)
        deviation = ((body.joint_pos - self.pose).square() * self.tightness.index_select(0, gait)).sum(dim=1)
        near = torch.exp(torch.stack([velocity, spin, self._tilt(), deviation]) * self.sharpness)
        beyond = ((body.joint_pos - self.mid).abs() - self.half_range).clamp_(min=0.0).sum(dim=1)
        action_rate = (self.actions - self.last_actions).square().sum(dim=1)
        values = [near, torch.stack([beyond, action_rate]), self._feet() * (speed > MOVING)]
        if optional := self._optional(speed > MOVING):
            values.append(torch.stack(optional))
        return dict(zip(self.terms, torch.cat(values) * self.weights, strict=True))

    def _feet(self) -> Float[Tensor, "terms envs"]:
        """Returns `FOOT_TERMS`."""
        height = self._foot_height()
        speed = torch.linalg.vector_norm(_stacked(self.sole_vel)[..., :2], dim=-1)
        contact = _stacked(self.feet)
        force = torch.linalg.vector_norm(contact[..., 1:], dim=-1)
        touches = torch.gt(contact[..., 0], 0.0, out=self.touches)
        lands = touches > self.touched  # of masks: and not
        torch.where(touches, self.peak, torch.maximum(self.peak, height), out=self.peak)
        target = self.cfg.swing_height
        terms = [
            (height - target).abs() * speed,
            (self.peak / target - 1.0).square() * lands,
            speed.square() * touches,
            force * lands,
        ]
        self.peak.masked_fill_(lands, 0.0)
        return torch.stack(terms).sum(dim=-1)

    def _optional(self, moves: Bool[Tensor, " envs"]) -> list[Float[Tensor, " envs"]]:
        """Returns those of `OPTIONAL_TERMS` that have a weight, in their order."""
        found = []
        for name in self.terms[len(TERMS) + len(FOOT_TERMS) :]:
            if name in ("air_time", "trot"):
                least, most = AIR_TIMES
                air_time = (self.air_time + self.dt).masked_fill_(self.touches, 0.0)
                swings = ((air_time > least) & (air_time < most)).float()
                number = swings.sum(dim=1) if name == "air_time" else (swings @ self.trot).abs_()
                found.append(number * moves)
            elif name == "torso_ang_vel":
                found.append(self.sensors[name].data[:, :2].square().sum(dim=1))
            elif name == "angular_momentum":
                found.append(self.sensors[name].data.square().sum(dim=1))
            else:  # a hit in the last physics step counts for all of the control step
                found.append(self.cfg.decimation * _hit(self.hits[name]))
        return found

    def _tilt(self) -> Float[Tensor, " envs"]:
        """Returns the squared sine of the angle between torso and vertical, or the ground's normal on rough ground."""
        if self.thighs is None:
            return 1.0 - self.torso_up.data[:, 2].square()
        a, b = (self._scan(self.plane_points) @ self.plane).unbind(dim=1)  # slopes, ahead and to the left
        x, y = torch.nn.functional.normalize(self.axes[0].data[:, :2]).unbind(dim=1)
        normal = torch.stack([b * y - a * x, -a * y - b * x, torch.ones_like(a)], dim=1)
        up = quat_rotate_inverse(self.body.root_quat, torch.nn.functional.normalize(normal))
        return up[:, :2].square().sum(dim=1)

    def terminated(self) -> Bool[Tensor, " envs"]:
        if self.thighs is not None:
            return self.fell.copy_(_hit(self.thighs))
        return torch.lt(self.axes[2].data[:, 2], math.cos(self.cfg.tilt_limit), out=self.fell)

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        cfg, body = self.cfg, self.body
        self.touched.copy_(self.touches)
        self.air_time.add_(self.dt).masked_fill_(self.touches, 0.0)
        self.last_actions.copy_(self.actions)
        torch.linalg.vector_norm(body.root_pos[:, :2] - self.origin[:, :2], dim=1, out=self.walked)
        self.ended.copy_(done)
        if self.ground is not None:
            needed = torch.linalg.vector_norm(self.command.value[:, :2], dim=1) * (0.5 * cfg.episode_length * self.dt)
            up = done & (self.walked > 0.5 * cfg.rough.patch_size)
            self.levels.move(up=up, down=done & ~up & (self.walked < needed))
        unit = self.random.uniform(0.0, 1.0, VelocityCommand.draws + 7)
        self.command.advance(unit[:, 7:], self.axes[0].data, self.errors[0])
        if cfg.pushes:
            self._push(unit[:, :7])

    def _push(self, unit: Float[Tensor, "envs 7"]) -> None:
        body = self.body
        low, high = self.push_range
        lin_vel, ang_vel, interval = torch.lerp(low, high, unit).split([3, 3, 1], dim=1)
        self.until_push -= self.dt
        due = self.until_push <= 0.0
        torch.where(due, interval, self.until_push, out=self.until_push)
        body.set_state(due[:, 0], root_lin_vel=body.root_lin_vel + lin_vel, root_ang_vel=body.root_ang_vel + ang_vel)

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        stats = {
            "lin_vel_error": self.errors[0],
            "ang_vel_error": self.errors[1],
            "falls_per_minute": self.fell * (60.0 / self.dt),
            "distance": torch.where(self.ended, self.walked, torch.nan),
        }
        if self.ground is not None:
            stats["terrain_level"] = self.levels.value.float()
        return stats

    def _foot_height(self) -> Float[Tensor, "envs feet"]:
        """Returns the height of the soles above the highest ground around them [m], between 0 and 1 m."""
        if self.ground is None:
            return torch.stack([sole.data[:, 2] for sole in self.sole_pos], dim=1).clamp_(0.0, 1.0)
        pos = _stacked(self.sole_pos)
        c, s = torch.nn.functional.normalize(_stacked(self.sole_ahead)[..., :2], dim=-1)[..., None, :].unbind(dim=-1)
        x, y = self.ring.unbind(dim=1)
        ground = self.ground.height(pos[..., :1] + c * x - s * y, pos[..., 1:2] + s * x + c * y)
        return (pos[..., 2] - ground.amax(dim=-1)).clamp_(0.0, 1.0)

    def _scan(self, points: Float[Tensor, "points 2"]) -> Float[Tensor, "envs points"]:
        """Returns heights of the ground [m] at points ahead and to the left of the root [m]."""
        assert self.ground is not None
        ahead = self.axes[0].data
        return self.ground.scan(self.body.root_pos, torch.atan2(ahead[:, 1], ahead[:, 0]), points)


def _stacked(sensors: list[Sensor]) -> Float[Tensor, "envs sensors size"]:
    return torch.stack([sensor.data for sensor in sensors], dim=1)


def _hit(sensors: list[Sensor]) -> Bool[Tensor, " envs"]:
    """Returns where the force of any of some contact sensors is large."""
    return (torch.linalg.vector_norm(_stacked(sensors)[..., 1:], dim=-1) > HIT).any(dim=1)
