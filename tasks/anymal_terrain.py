"""AnymalTerrain: a quadruped learns to walk over slopes, stairs and obstacles that get harder as it improves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Commands, Levels, Task, TaskConfig, Terms, control_steps
from gpusim_rl.env.math import quat_rotate_inverse, quat_yaw, wrap_angle
from gpusim_rl.env.pushes import PushTimer
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene, Sim
from gpusim_rl.sim.terrain import Terrain, TerrainConfig

from .anymal import Anymal, base_motion, scales

# Knees are part of the thigh bodies, feet of the shanks.
KNEES, FEET = ([f"{leg}_{part}" for leg in ("LF", "LH", "RF", "RH")] for part in ("THIGH", "SHANK"))
FOOT_RADIUS = 0.04  # m; smaller feet get caught inside the steps of a height field
STIFFNESS = 80.0  # servo stiffness [N m/rad]; IsaacGymEnvs' flat-ground Anymal uses 85
SCAN_X = [0.1 * x for x in (-8, -7, -6, -5, -4, -3, -2, 2, 3, 4, 5, 6, 7, 8)]  # m ahead of the base
SCAN_Y = [0.1 * y for y in (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)]  # m to the left of the base
SCAN = torch.cartesian_prod(torch.tensor(SCAN_X), torch.tensor(SCAN_Y))
BASE_HEIGHT = 0.5  # standing height above the ground [m]
LEAST_SPEED = 0.25  # slower commands count as 0 [m/s]
TURN_RATE = 0.5  # commanded yaw rate / angle to the heading [1/s]
STEP_TIME = 0.5  # air time of a foot beyond this is rewarded [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnymalTerrainConfig(TaskConfig):
    """Settings of AnymalTerrain; values are in cfg/task/AnymalTerrain.yaml."""

    terrain: TerrainConfig
    command_x: list[float]
    command_y: list[float]
    command_heading: list[float]
    command_yaw_limit: float
    push_interval: float
    push_speed: float
    action_scale: float
    lin_vel_weight: float
    ang_vel_weight: float
    air_time_weight: float
    lin_vel_z_cost: float
    ang_vel_xy_cost: float
    torque_cost: float
    joint_acc_cost: float
    knee_collision_cost: float
    action_rate_cost: float
    tracking_width: float
    contact_limit: float
    lin_vel_scale: float
    ang_vel_scale: float
    joint_vel_scale: float
    height_scale: float
    fixed_level: int | None

    def __post_init__(self) -> None:
        TaskConfig.__post_init__(self)
        if self.fixed_level is not None and not 0 <= self.fixed_level < self.terrain.levels:
            expected = f"null or from 0 to {self.terrain.levels - 1}"
            raise ConfigError(key="task.fixed_level", expected=expected, got=self.fixed_level)


class AnymalTerrain(Task[AnymalTerrainConfig]):
    """AnymalTerrain: walk over rough ground, with the commanded velocity and heading.

    Observations, commands, rewards and curriculum match IsaacGymEnvs' AnymalTerrain. Differences: physics runs four
    steps per action (original: five, contrary to its settings); after the hardest level comes a random level, not the
    easiest; whether a robot moves down depends on its own command (original: on the norm over all robots reset in the
    same step); stair risers slope over 10 cm; rough ground is +-2.5 cm at the easiest level and +-10 cm at the hardest
    (original: at all levels); foot radius is 4 cm, not 3 cm; friction is not randomised; with zero commanded velocity a
    robot turns to the commanded heading, not to +x.

    Action space: 12 numbers in [-10, 10], joint target offsets from the stance / 0.5 rad: abduction, hip flexion and
    knee flexion of the left front, left hind, right front and right hind legs.

    Observation space: (uniform noise is added to all but commands and last action)
    | num     | name        | observation                                                    | unit  |
    |---------|-------------|----------------------------------------------------------------|-------|
    | 0-2     | lin_vel     | velocity of the base x 2, base frame                           | m/s   |
    | 3-5     | ang_vel     | angular velocity of the base x 0.25, base frame                | rad/s |
    | 6-8     | gravity     | direction of gravity, base frame                               | -     |
    | 9-10    | command     | commanded x, y velocity x 2                                    | m/s   |
    | 11      | command_yaw | commanded yaw rate x 0.25                                      | rad/s |
    | 12-23   | joint_pos   | joint positions                                                | rad   |
    | 24-35   | joint_vel   | joint velocities x 0.05                                        | rad/s |
    | 36-175  | heights     | base height over 14 x 10 ground points - 0.5 m, +-1 m, x 5     | m     |
    | 176-187 | actions     | last action                                                    | -     |

    Reward terms, multiplied by the control step: exp(-squared error / 0.25) of the horizontal velocity, half as much
    for the yaw rate, and the air time beyond 0.5 s of landing feet, if a velocity is commanded; penalties for vertical
    velocity, roll and pitch rate, torques, changes of joint velocities and actions, and knee contacts. `floor` raises a
    negative sum to 0. Start: above the platform of a patch, +-0.5 m; the stance with each joint angle x 0.5 to 1.5,
    joint velocities +-0.1 rad/s; one random command per episode. Every 15 s a push sets the horizontal velocity of all
    robots at random within +-1 m/s. Each env keeps one kind of patch. At the end of an episode it moves up a level if
    the robot walked further than half a patch, down a level if it walked less than a quarter of the commanded distance.
    Termination: more than 1 N on the base.

    Log: `success`, share of episodes in which the robot walked further than half a patch. Levels differ between runs,
    so compare runs with `fixed_level`, which puts all robots on one level.
    """

    Config = AnymalTerrainConfig
    units: ClassVar = {**Anymal.units, "heights": "m"}
    sources: ClassVar = {**Anymal.sources, "joint_pos": "joint positions", "heights": "simulator ground heights"}
    mirrors: ClassVar = {**Anymal.mirrors, "heights": SCAN}

    @classmethod
    def scene(cls, cfg: AnymalTerrainConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add_terrain(Terrain(cfg.terrain))
        scene.add("anymal", assets_dir() / "anymal.xml")
        for foot in FEET:
            (ball,) = (geom for geom in scene.spec.body(f"anymal/{foot}").geoms if geom.contype)
            ball.size[0] = FOOT_RADIUS
        for servo in scene.spec.actuators:
            servo.gainprm[0], servo.biasprm[1] = STIFFNESS, -STIFFNESS
        scene.add_contact_sensor("anymal", ["base", *KNEES, *FEET])
        scene.add_effort_sensors("anymal")
        return scene

    def __init__(self, cfg: AnymalTerrainConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        num, device = self.num_envs, self.device
        self.robot = sim.articulation("anymal")
        self.base, self.knees, self.feet = (self.robot.contacts(bodies) for bodies in (["base"], KNEES, FEET))
        self.num_actions = len(self.robot.actuator_names)
        self.stance = self.robot.default_joint_pos
        ranges = {"x": cfg.command_x, "y": cfg.command_y, "heading": cfg.command_heading}
        self.commands = Commands(self, ranges, units={"x": "m/s", "y": "m/s", "heading": "rad"})
        self.push_interval = torch.full((num,), control_steps(cfg.push_interval, self.dt), device=device)
        self.push = PushTimer(self.push_interval.clone())  # all robots at once, regardless of episode starts
        self.down = torch.tensor([0.0, 0.0, -1.0], device=device).expand(num, 3)

        self.terrain = Terrain(cfg.terrain, device)
        self.scan_points = SCAN.to(device)
        self.column = torch.arange(num, device=device) % len(self.terrain.kinds)
        self.levels = Levels(self, cfg.terrain.levels, initial=torch.zeros(num, dtype=torch.int64))
        self.origin = torch.zeros(num, 3, device=device)  # centre of the episode's patch [m]
        self.ended = torch.zeros(num, dtype=torch.bool, device=device)
        self.passed = torch.zeros(num, dtype=torch.bool, device=device)  # further than half a patch from its centre

        self.air_time = torch.zeros(num, len(FEET), device=device)  # time since each foot last touched the ground [s]
        self.on_ground = torch.zeros(num, len(FEET), dtype=torch.bool, device=device)  # each foot; set by rewards()
        self.last_joint_vel = torch.zeros_like(self.robot.joint_vel)
        self.last_actions = torch.zeros(num, self.num_actions, device=device)
        weights = {
            "lin_vel_xy": cfg.lin_vel_weight,
            "ang_vel_z": cfg.ang_vel_weight,
            "air_time": cfg.air_time_weight,
            "lin_vel_z": -cfg.lin_vel_z_cost,
            "ang_vel_xy": -cfg.ang_vel_xy_cost,
            "torque": -cfg.torque_cost,
            "joint_acc": -cfg.joint_acc_cost,
            "knee_collision": -cfg.knee_collision_cost,
            "action_rate": -cfg.action_rate_cost,
        }
        self.terms, self.weights = tuple(weights), torch.tensor(list(weights.values()), device=device)[:, None]
        self.errors = torch.zeros(2, num, device=device)  # errors of velocity [m/s] and yaw rate [rad/s]
        self.scales = {**scales(cfg), "heights": cfg.height_scale}

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        num_joints = len(self.robot.joint_names)
        everyone = where[:, None]
        if self.cfg.fixed_level is not None:  # overrides levels reached in training
            self.levels.value.fill_(self.cfg.fixed_level)
        level = self.levels.value.clamp(max=self.levels.count - 1)  # a resumed run may have had more levels
        torch.where(everyone, self.terrain.origins[level, self.column], self.origin, out=self.origin)
        sizes = [2, num_joints, num_joints]
        unit = self.random.uniform(0.0, 1.0, sum(sizes) + len(self.commands.names))  # in one draw
        beside, stretch, joint_vel = (2.0 * unit[:, : sum(sizes)]).sub_(1.0).split(sizes, dim=1)
        root_pos = self.origin + self.robot.default_root_pos
        root_pos[:, :2].add_(beside, alpha=0.5)
        self.robot.set_state(
            where,
            root_pos=root_pos,
            joint_pos=torch.addcmul(self.stance, self.stance, stretch, value=0.5),  # stance * (1 + stretch / 2)
            joint_vel=0.1 * joint_vel,
        )
        self.commands.resample(where, unit[:, sum(sizes) :])
        for memory in (self.air_time, self.last_joint_vel, self.last_actions):
            memory.masked_fill_(everyone, 0.0)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate(torch.add(self.stance, action, alpha=self.cfg.action_scale))

    def observe(self) -> dict[str, Terms]:
        robot = self.robot
        yaw = quat_yaw(robot.root_quat)
        terms = {
            **base_motion(robot, self.down),
            "command": self._velocity()[0],
            "command_yaw": self._turn(yaw)[:, None],
            "joint_pos": robot.joint_pos,
            "joint_vel": robot.joint_vel,
            "heights": self._heights(yaw),
            "actions": self.actions,
        }
        return {"policy": terms}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg, robot = self.cfg, self.robot
        (velocity, walks), turn = self._velocity(), self._turn(quat_yaw(robot.root_quat))
        lin_vel = quat_rotate_inverse(robot.root_quat, robot.root_lin_vel)
        ang_vel = robot.root_ang_vel_local
        lin_vel_error, ang_vel_error = _norm(velocity - lin_vel[:, :2]), (turn - ang_vel[:, 2]).abs()
        torch.stack([lin_vel_error, ang_vel_error], out=self.errors)
        tracking = torch.exp(self.errors.square() / -cfg.tracking_width)
        torch.gt(self.feet.force[..., 2], cfg.contact_limit, out=self.on_ground)
        landing_time = (self.air_time + (self.dt - STEP_TIME)) * (self.on_ground & (self.air_time > 0.0))
        knees = _norm(self.knees.force) > cfg.contact_limit
        terms = {
            "lin_vel_xy": tracking[0],
            "ang_vel_z": tracking[1],
            "air_time": landing_time.sum(dim=1) * walks,
            "lin_vel_z": lin_vel[:, 2].square(),
            "ang_vel_xy": ang_vel[:, :2].square().sum(dim=1),
            "torque": robot.joint_effort.square().sum(dim=1),
            "joint_acc": (robot.joint_vel - self.last_joint_vel).square().sum(dim=1),
            "knee_collision": knees.sum(dim=1, dtype=torch.float32),
            "action_rate": (self.actions - self.last_actions).square().sum(dim=1),
        }
        values = torch.stack([terms[name] for name in self.terms]).mul_(self.weights).mul_(self.dt)
        return {**dict(zip(self.terms, values, strict=True)), "floor": -values.sum(dim=0).clamp(max=0.0)}

    def terminated(self) -> Bool[Tensor, " envs"]:
        return _norm(self.base.force)[:, 0] > self.cfg.contact_limit

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        cfg, robot = self.cfg, self.robot
        walked = _norm(robot.root_pos[:, :2] - self.origin[:, :2])
        speed = _norm(self.commands.value[:, :2])
        quarter = (speed * (speed > LEAST_SPEED)) * (0.25 * cfg.episode_length * self.dt)  # of the commanded distance
        torch.gt(walked, 0.5 * cfg.terrain.patch_size, out=self.passed)
        self.ended.copy_(done)
        if cfg.fixed_level is None:
            self.levels.move(up=done & self.passed, down=done & (walked < quarter))

        self.air_time.add_(self.dt).masked_fill_(self.on_ground, 0.0)
        self.last_joint_vel.copy_(robot.joint_vel)
        self.last_actions.copy_(self.actions)

        push = self.random.uniform(-1.0, 1.0, 2)
        velocity = torch.cat([cfg.push_speed * push, robot.root_lin_vel[:, 2:]], dim=1)
        robot.set_state(self.push.due(1, self.push_interval), root_lin_vel=velocity)

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        lin_vel_error, ang_vel_error = self.errors
        return {
            "success": torch.where(self.ended, self.passed.float(), torch.nan),
            "terrain_level": self.levels.value.float(),
            "lin_vel_error": lin_vel_error,
            "ang_vel_error": ang_vel_error,
        }

    def _velocity(self) -> tuple[Float[Tensor, "envs 2"], Bool[Tensor, " envs"]]:
        """Return the commanded x and y velocity [m/s], 0 up to `LEAST_SPEED`, and the mask of envs above it."""
        velocity = self.commands.value[:, :2]
        walks = _norm(velocity) > LEAST_SPEED
        return velocity * walks[:, None], walks

    def _turn(self, yaw: Float[Tensor, " envs"]) -> Float[Tensor, " envs"]:
        """Return the yaw rate [rad/s] that turns to the commanded heading."""
        limit = self.cfg.command_yaw_limit
        return (TURN_RATE * wrap_angle(self.commands["heading"] - yaw)).clamp(-limit, limit)

    def _heights(self, yaw: Float[Tensor, " envs"]) -> Float[Tensor, "envs points"]:
        """Return the base height above ground points, minus the standing height, clamped to [-1, 1] [m]."""
        ground = self.terrain.scan(self.robot.root_pos, yaw, self.scan_points)
        return (self.robot.root_pos[:, 2:] - BASE_HEIGHT - ground).clamp(-1.0, 1.0)


def _norm(vectors: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    return torch.linalg.vector_norm(vectors, dim=-1)
