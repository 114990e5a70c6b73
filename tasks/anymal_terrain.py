"""AnymalTerrain: a quadruped learns to walk over slopes, stairs and obstacles that grow with its skill."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Commands, Levels, Task, TaskConfig, control_steps
from gpusim_rl.env.math import euler_xyz, quat_rotate_inverse, wrap_angle
from gpusim_rl.paths import assets_dir
from gpusim_rl.sim import Scene, Sim
from gpusim_rl.sim.terrain import Terrain, TerrainConfig

LEGS = ["LF", "LH", "RF", "RH"]
KNEES = [f"{leg}_THIGH" for leg in LEGS]  # the knees belong to the thighs,
FEET = [f"{leg}_SHANK" for leg in LEGS]  # the feet to the shanks
FOOT_RADIUS = 0.04  # m; smaller feet get caught inside the steps of a height field
STIFFNESS = 80.0  # of the servos [N m/rad]; IsaacGymEnvs' Anymal on flat ground has 85
SCAN_X = [0.1 * x for x in (-8, -7, -6, -5, -4, -3, -2, 2, 3, 4, 5, 6, 7, 8)]  # m ahead of the base
SCAN_Y = [0.1 * y for y in (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)]  # m to its left
BASE_HEIGHT = 0.5  # above the ground, when standing [m]
LEAST_SPEED = 0.25  # slower commands count as 0 [m/s]
TURN_RATE = 0.5  # commanded yaw rate / angle to the heading [1/s]
STEP_TIME = 0.5  # a foot is rewarded for longer time in the air [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnymalTerrainConfig(TaskConfig):
    """Values in cfg/task/AnymalTerrain.yaml."""

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
    lin_vel_noise: float
    ang_vel_noise: float
    gravity_noise: float
    joint_pos_noise: float
    joint_vel_noise: float
    height_noise: float


class AnymalTerrain(Task[AnymalTerrainConfig]):
    """AnymalTerrain: walk over rough ground with the velocity, and towards the heading, that are commanded.

    Observations, commands, rewards and curriculum are those of IsaacGymEnvs' AnymalTerrain. Differences: physics runs
    four steps per action (its settings say four, its code runs five); after the hardest level comes a random level, not
    the easiest; stairs rise within 10 cm; feet are balls of 4 cm, not 3 cm; friction is not random; with a commanded
    velocity of 0 a robot turns to the commanded heading, not to +x.

    Action space: 12 numbers in [-10, 10], offset of the joint targets from the stance / 0.5 rad: abduction, hip flexion
    and knee flexion of the legs left front, left hind, right front, right hind.

    Observation space: (uniform noise is added to all but commands and last action)

    | num     | observation                                                        | unit       |
    |---------|--------------------------------------------------------------------|------------|
    | 0-2     | velocity of the base x 2, base frame                               | m/s        |
    | 3-5     | angular velocity of the base x 0.25, base frame                    | rad/s      |
    | 6-8     | direction of gravity, base frame                                   | -          |
    | 9-11    | commanded x, y velocity x 2 and yaw rate x 0.25                    | m/s, rad/s |
    | 12-23   | joint positions                                                    | rad        |
    | 24-35   | joint velocities x 0.05                                            | rad/s      |
    | 36-175  | base above 14 x 10 points of the ground - 0.5 m, in +-1 m, x 5     | m          |
    | 176-187 | last action                                                        | -          |

    Reward terms, x the control step: exp(-squared error / 0.25) of the horizontal velocity, half as much for the yaw
    rate, and the time in the air beyond 0.5 s of feet that land, if a velocity is commanded; penalties for vertical
    velocity, roll and pitch rate, torques, changes of joint velocities and actions, and knees in contact. `floor`
    raises a negative sum to 0.

    Start: above the platform of a patch, +-0.5 m; the stance, each joint angle x 0.5 to 1.5, joint velocities +-0.1
    rad/s; a random command for the episode. Every 15 s a push sets the horizontal velocity of all robots to +-1 m/s.
    Each env has its own kind of patch. At the end of an episode it goes one level up if the robot walked further than
    half a patch, and one level down if it walked less than a quarter of the commanded distance. Termination: more than
    1 N on the base.
    """

    Config = AnymalTerrainConfig

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
        self.commands = Commands(self, ranges)
        self.command_scale = torch.tensor([cfg.lin_vel_scale] * 2 + [cfg.ang_vel_scale], device=device)
        self.push_steps = control_steps(cfg.push_interval, self.dt)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # control steps since the training began
        self.down = torch.tensor([0.0, 0.0, -1.0], device=device).expand(num, 3)

        self.terrain = Terrain(cfg.terrain, device)
        self.scan_points = torch.cartesian_prod(torch.tensor(SCAN_X), torch.tensor(SCAN_Y)).to(device)
        self.column = torch.arange(num, device=device) % len(self.terrain.kinds)
        self.levels = Levels(self, cfg.terrain.levels, initial=torch.zeros(num, dtype=torch.int64))
        self.origin = torch.zeros(num, 3, device=device)  # centre of the episode's patch [m]

        self.air_time = torch.zeros(num, len(FEET), device=device)  # since each foot touched the ground [s]
        self.last_joint_vel = torch.zeros_like(self.robot.joint_vel)
        self.last_actions = torch.zeros(num, self.num_actions, device=device)
        noises = [
            (3, cfg.lin_vel_noise * cfg.lin_vel_scale),
            (3, cfg.ang_vel_noise * cfg.ang_vel_scale),
            (3, cfg.gravity_noise),
            (3, 0.0),
            (self.num_actions, cfg.joint_pos_noise),
            (self.num_actions, cfg.joint_vel_noise * cfg.joint_vel_scale),
            (len(self.scan_points), cfg.height_noise * cfg.height_scale),
            (self.num_actions, 0.0),
        ]
        self.noise_limit = torch.cat([torch.full((size,), limit, device=device) for size, limit in noises])
        self.noise = torch.zeros(num, len(self.noise_limit), device=device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        random, num_joints = self.random, len(self.robot.joint_names)
        everyone = where[:, None]
        level = self.levels.value.clamp(max=self.levels.count - 1)  # a resumed run may have had more levels
        origin = self.terrain.origins[level, self.column]
        self.origin.copy_(torch.where(everyone, origin, self.origin))
        beside = torch.cat([random.uniform(-0.5, 0.5, 2), torch.zeros_like(origin[:, 2:])], dim=1)
        self.robot.set_state(
            where,
            root_pos=self.origin + self.robot.default_root_pos + beside,
            joint_pos=self.stance * random.uniform(0.5, 1.5, num_joints),
            joint_vel=random.uniform(-0.1, 0.1, num_joints),
        )
        self.commands.resample(where)
        for memory in (self.air_time, self.last_joint_vel, self.last_actions):
            memory.masked_fill_(everyone, 0.0)
        self.noise.copy_(torch.where(everyone, self._new_noise(), self.noise))

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate(self.stance + self.cfg.action_scale * action)

    def observe(self) -> Float[Tensor, "envs obs"]:
        cfg, robot = self.cfg, self.robot
        clean = [
            self._lin_vel() * cfg.lin_vel_scale,
            robot.root_ang_vel_local * cfg.ang_vel_scale,
            quat_rotate_inverse(robot.root_quat, self.down),
            self._command() * self.command_scale,
            robot.joint_pos,
            robot.joint_vel * cfg.joint_vel_scale,
            self._heights() * cfg.height_scale,
            self.actions,
        ]
        return torch.cat(clean, dim=1) + self.noise

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        cfg, robot = self.cfg, self.robot
        lin_vel_error, ang_vel_error = self._errors()
        landing_time = (self.air_time + self.dt - STEP_TIME) * (self._on_ground() & (self.air_time > 0.0))
        walks = _norm(self._command()[:, :2]) > 0.0
        knees = (_norm(self.knees.force) > cfg.contact_limit).float()
        terms = {
            "lin_vel_xy": cfg.lin_vel_weight * torch.exp(-lin_vel_error.square() / cfg.tracking_width),
            "ang_vel_z": cfg.ang_vel_weight * torch.exp(-ang_vel_error.square() / cfg.tracking_width),
            "air_time": cfg.air_time_weight * landing_time.sum(dim=1) * walks,
            "lin_vel_z": -cfg.lin_vel_z_cost * self._lin_vel()[:, 2].square(),
            "ang_vel_xy": -cfg.ang_vel_xy_cost * robot.root_ang_vel_local[:, :2].square().sum(dim=1),
            "torque": -cfg.torque_cost * robot.joint_effort.square().sum(dim=1),
            "joint_acc": -cfg.joint_acc_cost * (robot.joint_vel - self.last_joint_vel).square().sum(dim=1),
            "knee_collision": -cfg.knee_collision_cost * knees.sum(dim=1),
            "action_rate": -cfg.action_rate_cost * (self.actions - self.last_actions).square().sum(dim=1),
        }
        terms = {name: self.dt * term for name, term in terms.items()}
        terms["floor"] = -torch.stack(list(terms.values())).sum(dim=0).clamp(max=0.0)
        return terms

    def terminated(self) -> Bool[Tensor, " envs"]:
        return _norm(self.base.force)[:, 0] > self.cfg.contact_limit

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        cfg, robot = self.cfg, self.robot
        came = _norm(robot.root_pos[:, :2] - self.origin[:, :2])
        asked = _norm(self._command()[:, :2]) * cfg.episode_length * self.dt
        self.levels.move(up=done & (came > 0.5 * cfg.terrain.patch_size), down=done & (came < 0.25 * asked))

        self.air_time.copy_((self.air_time + self.dt) * ~self._on_ground())
        self.last_joint_vel.copy_(robot.joint_vel)
        self.last_actions.copy_(self.actions)
        self.noise.copy_(self._new_noise())

        push = self.random.uniform(-cfg.push_speed, cfg.push_speed, 2)
        velocity = torch.cat([push, robot.root_lin_vel[:, 2:]], dim=1)
        self.steps += 1
        robot.set_state((self.steps % self.push_steps == 0).expand(self.num_envs), root_lin_vel=velocity)

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        lin_vel_error, ang_vel_error = self._errors()
        level = self.levels.value.float()
        return {"terrain_level": level, "lin_vel_error": lin_vel_error, "ang_vel_error": ang_vel_error}

    def _command(self) -> Float[Tensor, "envs 3"]:
        """Commanded x and y velocity [m/s] and yaw rate [rad/s], which turns the robot to the commanded heading."""
        velocity, heading = self.commands.value[:, :2], self.commands["heading"]
        moves = _norm(velocity) > LEAST_SPEED
        _, _, yaw = euler_xyz(self.robot.root_quat)
        limit = self.cfg.command_yaw_limit
        turn = (TURN_RATE * wrap_angle(heading - yaw)).clamp(-limit, limit)
        return torch.cat([velocity * moves[:, None], turn[:, None]], dim=1)

    def _errors(self) -> tuple[Float[Tensor, " envs"], Float[Tensor, " envs"]]:
        """Distance of the horizontal velocity [m/s] and of the yaw rate [rad/s] from the command."""
        velocity, turn = self._command().split([2, 1], dim=1)
        return _norm(velocity - self._lin_vel()[:, :2]), (turn[:, 0] - self.robot.root_ang_vel_local[:, 2]).abs()

    def _lin_vel(self) -> Float[Tensor, "envs 3"]:
        return quat_rotate_inverse(self.robot.root_quat, self.robot.root_lin_vel)

    def _on_ground(self) -> Bool[Tensor, "envs feet"]:
        return self.feet.force[..., 2] > self.cfg.contact_limit

    def _heights(self) -> Float[Tensor, "envs points"]:
        """Height of the base above points of the ground, minus its standing height, clamped to [-1, 1] [m]."""
        _, _, yaw = euler_xyz(self.robot.root_quat)
        ground = self.terrain.scan(self.robot.root_pos, yaw, self.scan_points)
        return (self.robot.root_pos[:, 2:] - BASE_HEIGHT - ground).clamp(-1.0, 1.0)

    def _new_noise(self) -> Float[Tensor, "envs obs"]:
        return self.random.uniform(-self.noise_limit, self.noise_limit, len(self.noise_limit))


def _norm(vectors: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    return torch.linalg.vector_norm(vectors, dim=-1)
