"""Walking robots that follow commanded velocities, on flat or rough ground: the base of the tasks `<Robot>Velocity`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Levels, Parts, PerBody, Task, TaskConfig
from gpusim_rl.env.math import quat_rotate, quat_rotate_inverse, quat_yaw, wrap_angle
from gpusim_rl.env.stateful import Stateful
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim
from gpusim_rl.sim.terrain import Terrain, TerrainConfig

SERVO_HZ = 10.0  # natural frequency of the servos, whatever inertia the motor has
DAMPING_RATIO = 2.0
ACTION_SHARE = 0.25  # of the largest torque: what an action of 1 asks for, at the start
SCAN = torch.cartesian_prod(0.1 * torch.arange(-8, 9), 0.1 * torch.arange(-5, 6))  # m ahead of the base, m to its left
SCAN_RANGE = 5.0  # m
MOVING, RUNNING = 0.05, 1.5  # commanded speed [m/s] plus yaw rate [rad/s]
FORWARD = 0.3  # least speed of a command that is forward only [m/s]
SOFT_LIMIT = 0.9  # share of a joint's range that costs nothing


@dataclass(frozen=True, kw_only=True)
class Motor:
    """A type of motor with its gear.

    Its servo has the stiffness and damping of a second-order system of 10 Hz that is overdamped, as mjlab's robots
    have: they follow from the inertia of the rotor behind the gear.

    Attributes:
        joints: Patterns of the joints that it drives.
        armature: Inertia of the rotor behind the gear [kg m^2].
        effort: Largest torque [N m].
    """

    joints: tuple[str, ...]
    armature: float
    effort: float

    @property
    def stiffness(self) -> float:
        """Stiffness of the servo [N m/rad]."""
        return self.armature * (2.0 * math.pi * SERVO_HZ) ** 2

    @property
    def damping(self) -> float:
        """Damping of the servo [N m s/rad]."""
        return 2.0 * DAMPING_RATIO * self.armature * (2.0 * math.pi * SERVO_HZ)

    @property
    def scale(self) -> float:
        """Offset of the joint's target for an action of 1 [rad]."""
        return ACTION_SHARE * self.effort / self.stiffness


@dataclass(frozen=True, kw_only=True)
class Robot:
    """What a task must know of a walking robot.

    Attributes:
        name: Folder and file in tasks/assets.
        height: Height of the root at the start [m], to which `start_height` is added.
        pose: Joint angles of the pose [rad], by pattern; 0 for the others.
        motors: Its motors.
        feet: Bodies that stand on the ground.
        soles: Sites at the feet, in the same order: their heights and velocities are rewarded.
        imu: Site of the IMU.
        widths: Deviation from the pose that divides its reward by e [rad]: standing, walking, running; by pattern.
    """

    name: str
    height: float
    pose: Mapping[str, float]
    motors: tuple[Motor, ...]
    feet: tuple[str, ...]
    soles: tuple[str, ...]
    imu: str
    widths: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)


def by_joint(names: list[str], values: Mapping[str, Any], default: Any) -> list[Any]:
    """Returns a value for each joint: that of the first pattern that fits."""
    return [next((value for key, value in values.items() if fnmatchcase(name, key)), default) for name in names]


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
    stages: list[dict[str, Any]]  # wider ranges from a number of control steps on: {steps, x, yaw}


class VelocityCommand(Stateful):
    """Commanded velocities in the robot's frame.

    Attributes:
        value: x and y velocity [m/s] and yaw rate [rad/s], shape [num_envs, 3].
    """

    def __init__(self, task: Task[Any], cfg: CommandConfig) -> None:
        num, device = task.num_envs, task.device
        self._cfg, self._random, self._dt = cfg, task.random, task.dt
        stages = [{"steps": 0}, *cfg.stages]
        first = {"x": cfg.x, "y": cfg.y, "yaw": cfg.yaw}
        ranges = []
        for stage in stages:
            first = {name: stage.get(name, limits) for name, limits in first.items()}
            ranges.append(list(first.values()))
        self._ranges = torch.tensor(ranges, device=device)  # of the stages
        self._begins = torch.tensor([stage["steps"] for stage in stages], device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)  # control steps since the training began
        self.value = torch.zeros(num, 3, device=device)
        self._heading = torch.zeros(num, device=device)  # rad, world frame
        self._kinds = torch.zeros(num, 2, dtype=torch.bool, device=device)  # standing; turning to the heading
        self._left = torch.zeros(num, device=device)  # time until the next draw [s]

    @property
    def limits(self) -> Float[Tensor, "3 2"]:
        """Range of the commands in this stage of the training."""
        stage = (self._begins <= self._steps).sum() - 1
        return self._ranges.index_select(0, stage[None])[0]

    @property
    def moves(self) -> Bool[Tensor, " envs"]:
        """Whether anything but standing is commanded."""
        return self.speed > MOVING

    @property
    def speed(self) -> Float[Tensor, " envs"]:
        """Commanded speed [m/s] plus yaw rate [rad/s]."""
        return torch.linalg.vector_norm(self.value[:, :2], dim=1) + self.value[:, 2].abs()

    def resample(self, where: Bool[Tensor, " envs"]) -> None:
        """Draws new commands in the envs of a mask."""
        cfg, unit = self._cfg, self._random.uniform(0.0, 1.0, 8)
        low, high = self.limits.unbind(dim=1)
        new = torch.lerp(low, high, unit[:, :3])
        ahead = new.new_tensor([1.0, 0.0, 0.0]) * new.abs().clamp(min=FORWARD)
        new = torch.where(unit[:, 3:4] < cfg.forward, ahead, new)
        kinds = torch.stack([unit[:, 4] < cfg.standing, unit[:, 5] < cfg.heading], dim=1)
        shortest, longest = cfg.interval
        for memory, value in (
            (self.value, new),
            (self._kinds, kinds),
            (self._heading, (2.0 * math.pi) * unit[:, 6] - math.pi),
            (self._left, shortest + (longest - shortest) * unit[:, 7]),
        ):
            torch.where(where.view(-1, *[1] * (value.ndim - 1)), value, memory, out=memory)

    def advance(self) -> None:
        """Counts a control step, and draws new commands where their time is over."""
        self._steps += 1
        self._left -= self._dt
        self.resample(self._left <= 0.0)

    def turn(self, yaw: Float[Tensor, " envs"]) -> None:
        """Lets commands of a heading follow the robot's yaw [rad], and those to stand stand."""
        standing, turning = self._kinds.unbind(dim=1)
        low, high = self.limits[2]
        rate = (self._cfg.heading_gain * wrap_angle(self._heading - yaw)).clamp(low, high)
        self.value[:, 2].copy_(torch.where(turning, rate, self.value[:, 2]))
        self.value.masked_fill_(standing[:, None], 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushConfig:
    """Pushes: changes of the root's velocity."""

    interval: list[float]  # s between two pushes
    lin_vel: list[float]  # m/s along x, y and z, at most
    ang_vel: list[float]  # rad/s about x, y and z, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class VelocityConfig(TaskConfig):
    """Values in cfg/task/<Robot>Velocity.yaml."""

    terrain: Literal["flat", "rough"]
    rough: TerrainConfig
    command: CommandConfig
    push: PushConfig
    weights: dict[str, float]
    lin_vel_width: float
    ang_vel_width: float
    upright_width: float
    swing_height: float
    encoder_bias: float
    tilt_limit: float
    start_height: list[float]
    pushes: bool


class VelocityTask(Task[VelocityConfig]):
    """A robot follows commanded velocities. Subclasses say which: `robot`.

    Commands, observations, rewards, randomisation and curriculum are those of mjlab 1.6's velocity task.
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
        "heights": "m",
        "foot_height": "m",
        "air_time": "s",
        "contact": "-",
        "contact_force": "log(1 + N)",
    }

    def __init_subclass__(cls) -> None:
        feet, soles = cls.robot.feet, cls.robot.soles
        cls.mirrors = {
            "lin_vel": "vector",
            "ang_vel": "pseudovector",
            "gravity": "vector",
            "joint_pos": "joints",
            "joint_vel": "joints",
            "actions": "actuators",
            "command": "planar_velocity",
            "heights": SCAN,
            "foot_height": PerBody(soles),
            "air_time": PerBody(feet),
            "contact": PerBody(feet),
            "contact_force": PerBody(feet, "vector"),
        }

    @classmethod
    def scene(cls, cfg: VelocityConfig) -> Scene:
        robot = cls.robot
        scene = Scene(cfg.physics_hz, integrator="implicitfast", cone="elliptic", impratio=10.0)
        scene.option.iterations, scene.option.ls_iterations = 10, 20
        if cfg.terrain == "rough":
            scene.add_terrain(Terrain(cfg.rough))
        else:
            scene.add_ground()
        scene.add("robot", assets_dir() / robot.name / f"{robot.name}.xml")
        for motor in robot.motors:
            scene.add_actuators(
                "robot",
                list(motor.joints),
                kind="position",
                stiffness=motor.stiffness,
                damping=motor.damping,
                effort_limit=motor.effort,
                armature=motor.armature,
            )
        scene.add_contact_sensor("robot", list(robot.feet))
        scene.add_sensor("robot", "lin_vel", "velocimeter", site=robot.imu)
        scene.add_sensor("robot", "ang_vel", "gyro", site=robot.imu)
        return scene

    def __init__(self, cfg: VelocityConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        robot, num, device = self.robot, self.num_envs, self.device
        self.body = sim.articulation("robot")
        self.num_actions = len(self.body.actuator_names)
        self.feet, self.soles = self.body.contacts(robot.feet), self.body.sites(robot.soles)
        self.imu_lin_vel, self.imu_ang_vel = self.body.sensor("lin_vel"), self.body.sensor("ang_vel")
        names, driven = self.body.joint_names, self.body.actuator_names
        self.pose = torch.tensor(by_joint(names, robot.pose, 0.0), device=device)
        scales = {key: motor.scale for motor in robot.motors for key in motor.joints}
        self.scale = torch.tensor(by_joint(driven, scales, 1.0), device=device)
        self.centre = torch.tensor(by_joint(driven, robot.pose, 0.0), device=device)
        widths = torch.tensor(by_joint(names, robot.widths, (0.3, 0.3, 0.3)), device=device)
        self.tightness = widths.T.pow(-2.0)  # standing, walking, running
        low, high = self.body.joint_limits.unbind(dim=1)
        slack = 0.5 * (1.0 - SOFT_LIMIT) * (high - low)
        self.joint_limits = low + slack, high - slack

        self.command = VelocityCommand(self, cfg.command)
        self.down = torch.tensor([0.0, 0.0, -1.0], device=device).expand(num, 3)
        self.encoder_bias = torch.zeros(num, len(names), device=device)
        self.last_actions = torch.zeros(num, self.num_actions, device=device)
        self.air_time = torch.zeros(num, len(robot.feet), device=device)  # since each foot left the ground [s]
        self.touched = torch.zeros(num, len(robot.feet), dtype=torch.bool, device=device)  # a control step ago
        self.peak = torch.zeros(num, len(robot.feet), device=device)  # height of each foot since it left the ground [m]
        self.until_push = torch.zeros(num, device=device)  # s
        self.push_range = torch.tensor([*cfg.push.lin_vel, *cfg.push.ang_vel], device=device)
        self.errors = torch.zeros(2, num, device=device)  # of the velocity [m/s] and the yaw rate [rad/s]
        self.fell = torch.zeros(num, device=device)
        self.terms = tuple(cfg.weights)
        self.weights = torch.tensor([*cfg.weights.values()], device=device)[:, None] * self.dt
        self.origin = torch.zeros(num, 3, device=device)  # where the episode began [m]
        self.walked = torch.zeros(num, device=device)  # distance from there [m]
        self.ended = torch.zeros(num, dtype=torch.bool, device=device)
        self.ground = Terrain(cfg.rough, device) if cfg.terrain == "rough" else None
        if self.ground is not None:
            self.scan_points = SCAN.to(device)
            self.column = torch.arange(num, device=device) % len(self.ground.kinds)
            self.levels = Levels(self, cfg.rough.levels, initial=torch.arange(num) % max(1, cfg.rough.levels // 2))

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        cfg, everyone = self.cfg, where[:, None]
        joints = self.pose.shape[0]
        unit = self.random.uniform(0.0, 1.0, 5 + joints)
        beside, (up, yaw, push), bias = unit[:, :2] - 0.5, unit[:, 2:5].unbind(dim=1), unit[:, 5:]
        pos = torch.zeros_like(self.origin)
        if self.ground is not None:
            level = self.levels.value.clamp(max=self.levels.count - 1)
            pos = self.ground.origins[level, self.column].clone()
        torch.where(everyone, pos, self.origin, out=self.origin)
        pos[:, :2] += beside
        low, high = cfg.start_height
        pos[:, 2] += self.robot.height + low + (high - low) * up
        half = math.pi * yaw - 0.5 * math.pi
        zero = torch.zeros_like(half)
        self.body.set_state(
            where,
            root_pos=pos,
            root_quat=torch.stack([half.cos(), zero, zero, half.sin()], dim=1),
            joint_pos=self.pose.expand(self.num_envs, joints),
        )
        torch.where(everyone, (2.0 * bias - 1.0) * cfg.encoder_bias, self.encoder_bias, out=self.encoder_bias)
        first, last = cfg.push.interval
        torch.where(where, first + (last - first) * push, self.until_push, out=self.until_push)
        for memory in (self.last_actions, self.air_time, self.peak):
            memory.masked_fill_(everyone, 0.0)
        self.touched.masked_fill_(everyone, False)
        self.command.resample(where)
        self.command.turn(quat_yaw(self.body.root_quat))

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.body.actuate(torch.addcmul(self.centre, action, self.scale))

    def observe(self) -> dict[str, Parts]:
        body = self.body
        height, force = self._foot_height(), self.feet.force
        parts = {
            "lin_vel": self.imu_lin_vel.data,
            "ang_vel": self.imu_ang_vel.data,
            "gravity": quat_rotate_inverse(body.root_quat, self.down),
            "joint_pos": body.joint_pos - self.pose,
            "joint_vel": body.joint_vel,
            "actions": self.actions,
            "command": self.command.value,
        }
        if self.ground is not None:
            parts["heights"] = self._heights() / SCAN_RANGE
        privileged = {
            "foot_height": height,
            "air_time": self.air_time,
            "contact": self.touched.float(),
            "contact_force": (force.sign() * force.abs().log1p()).flatten(1),
        }
        seen = {**parts, "joint_pos": parts["joint_pos"] + self.encoder_bias}
        return {"policy": seen, "critic": {**parts, **privileged}}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg, body, command = self.cfg, self.body, self.command.value
        vectors = torch.stack([body.root_lin_vel, self.down], dim=1)
        lin_vel, gravity = quat_rotate_inverse(body.root_quat[:, None], vectors).unbind(dim=1)
        ang_vel = body.root_ang_vel_local
        lin_error, yaw_error = command[:, :2] - lin_vel[:, :2], command[:, 2] - ang_vel[:, 2]
        torch.stack([torch.linalg.vector_norm(lin_error, dim=1), yaw_error.abs()], out=self.errors)
        moves, speed = self.command.moves, self.command.speed
        height, foot_vel = self._foot_height(), self.soles.lin_vel[..., :2]
        foot_speed2 = foot_vel.square().sum(dim=-1)
        force = torch.linalg.vector_norm(self.feet.force, dim=-1)
        touches = force > 0.0
        lands = touches & ~self.touched
        torch.where(touches, self.peak, torch.maximum(self.peak, height), out=self.peak)
        gait = (speed >= MOVING).int() + (speed >= RUNNING).int()
        deviation = (body.joint_pos - self.pose).square() * self.tightness.index_select(0, gait)
        low, high = self.joint_limits
        beyond = (low - body.joint_pos).clamp(min=0.0) + (body.joint_pos - high).clamp(min=0.0)
        swing = (self.peak / cfg.swing_height - 1.0).square() * lands
        self.peak.masked_fill_(lands, 0.0)
        terms = {
            "lin_vel": torch.exp(-(lin_error.square().sum(dim=1) + lin_vel[:, 2].square()) / cfg.lin_vel_width),
            "ang_vel": torch.exp(-(yaw_error.square() + ang_vel[:, :2].square().sum(dim=1)) / cfg.ang_vel_width),
            "upright": torch.exp(-gravity[:, :2].square().sum(dim=1) / cfg.upright_width),
            "pose": torch.exp(-deviation.mean(dim=1)),
            "joint_limits": beyond.sum(dim=1),
            "action_rate": (self.actions - self.last_actions).square().sum(dim=1),
            "foot_clearance": ((height - cfg.swing_height).abs() * foot_speed2.sqrt()).sum(dim=1) * moves,
            "swing_height": swing.sum(dim=1) * moves,
            "foot_slip": (foot_speed2 * touches).sum(dim=1) * moves,
            "soft_landing": (force * lands).sum(dim=1) * moves,
        }
        values = torch.stack([terms[name] for name in self.terms]) * self.weights
        return dict(zip(self.terms, values, strict=True))

    def terminated(self) -> Bool[Tensor, " envs"]:
        up = quat_rotate(self.body.root_quat, -self.down)[:, 2]
        fallen = up < math.cos(self.cfg.tilt_limit)
        self.fell.copy_(fallen)
        return fallen

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        cfg, body = self.cfg, self.body
        touches = torch.linalg.vector_norm(self.feet.force, dim=-1) > 0.0
        self.touched.copy_(touches)
        self.air_time.add_(self.dt).masked_fill_(touches, 0.0)
        self.last_actions.copy_(self.actions)
        self.ended.copy_(done)
        torch.linalg.vector_norm(body.root_pos[:, :2] - self.origin[:, :2], dim=1, out=self.walked)
        if self.ground is not None:
            needed = torch.linalg.vector_norm(self.command.value[:, :2], dim=1) * (0.5 * cfg.episode_length * self.dt)
            up = done & (self.walked > 0.5 * cfg.rough.patch_size)
            self.levels.move(up=up, down=done & ~up & (self.walked < needed))
        self.command.advance()
        self.command.turn(quat_yaw(body.root_quat))
        if cfg.pushes:
            self._push()

    def _push(self) -> None:
        cfg, body = self.cfg.push, self.body
        first, last = cfg.interval
        unit = self.random.uniform(0.0, 1.0, 7)
        self.until_push -= self.dt
        due = self.until_push <= 0.0
        torch.where(due, first + (last - first) * unit[:, 6], self.until_push, out=self.until_push)
        lin_vel, ang_vel = ((2.0 * unit[:, :6] - 1.0) * self.push_range).split(3, dim=1)
        body.set_state(due, root_lin_vel=body.root_lin_vel + lin_vel, root_ang_vel=body.root_ang_vel + ang_vel)

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
        """Returns the height of the soles above the ground [m]."""
        pos = self.soles.pos
        return pos[..., 2] if self.ground is None else pos[..., 2] - self.ground.height(pos[..., 0], pos[..., 1])

    def _heights(self) -> Float[Tensor, "envs points"]:
        """Returns the height of the root above points of the ground [m]."""
        assert self.ground is not None
        body = self.body
        ground = self.ground.scan(body.root_pos, quat_yaw(body.root_quat), self.scan_points)
        return (body.root_pos[:, 2:] - ground).clamp(-SCAN_RANGE, SCAN_RANGE)
