"""Base of the `<Robot>Velocity` tasks: legged robots that track commanded velocities, on flat or rough ground."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import AtSite, Levels, PerBody, TaskConfig, Terms
from gpusim_rl.env.command import CommandConfig, VelocityCommands
from gpusim_rl.env.math import quat_rotate_inverse
from gpusim_rl.env.pushes import PushConfig, RootPushes
from gpusim_rl.errors import ConfigError, TaskError, did_you_mean
from gpusim_rl.settings.schema import Limits, NotNegative, Positive
from gpusim_rl.sim import Scene, Sim
from gpusim_rl.sim.terrain import Terrain, TerrainConfig

from .robots import HIT, Legged, Rows, SensorGroup, squared_error
from .robots import Eye as Eye
from .robots import Motor as Motor

SCAN = 0.1 * torch.cartesian_prod(torch.arange(-5, 6), torch.arange(-8, 9)).flip(1)  # m ahead and left of the base
PLANE = torch.linspace(0, len(SCAN) - 1, 32).long()  # indices of scan points for fitting the slope of the ground
SCAN_RANGE = 5.0  # m
MOVING, RUNNING = 0.05, 1.5  # thresholds of commanded speed [m/s] plus yaw rate [rad/s]
AIR_TIMES = 0.05, 0.5  # range of rewarded foot air times [s]


@dataclass(frozen=True, slots=True, kw_only=True)
class VelocityConfig(TaskConfig):
    """Settings of <Robot>Velocity; values are in cfg/task/<Robot>Velocity.yaml."""

    terrain: Literal["flat", "rough"]
    rough: TerrainConfig
    command: CommandConfig
    pushes: bool
    push: PushConfig
    weights: dict[str, float]
    rough_weights: dict[str, float]
    lin_vel_width: Positive
    ang_vel_width: Positive
    upright_width: Positive
    swing_height: Positive
    encoder_bias: NotNegative
    tilt_limit: float
    start_height: Limits
    vision: Literal["depth"] | None = None

    def __post_init__(self) -> None:
        TaskConfig.__post_init__(self)
        if self.vision is not None and self.terrain == "rough":  # a teacher gets the scan, as noisy as without vision
            heights = self.observations.get("heights", {})
            if isinstance(heights, Mapping):
                heights = {"used": False, **heights}
            object.__setattr__(self, "observations", {**self.observations, "heights": heights})

    @property
    def all_weights(self) -> dict[str, float]:
        """Nonzero term weights on this terrain."""
        weights = {**self.weights, **(self.rough_weights if self.terrain == "rough" else {})}
        return {name: weight for name, weight in weights.items() if weight != 0.0}


class Stride(NamedTuple):
    """Quantities of a control step shared by several reward terms, [num_envs] or [num_envs, feet]."""

    lin_error: Tensor  # squared error of the root's velocity [m2/s2]
    ang_error: Tensor  # squared error of the root's angular velocity [rad2/s2]
    command: Tensor  # commanded speed [m/s] plus yaw rate [rad/s]
    moves: Tensor  # whether the command exceeds `MOVING`, bool
    height: Tensor  # height of each sole above the ground [m]
    speed: Tensor  # horizontal speed of each sole [m/s]; 0 unless `moves`
    force: Tensor  # contact force on each foot [N]
    lands: Tensor  # feet that have just touched the ground, bool; False unless `moves`


Term = Callable[[Any, Stride], Tensor]  # (task, stride) -> values, shape [num_envs] or [num_envs, feet]


def near(squared: Float[Tensor, " envs"], width: float) -> Float[Tensor, " envs"]:
    """Return exp(-squared error / width), 1 at zero error."""
    return torch.exp(squared * (-1.0 / width))


@dataclass(frozen=True)
class Near:
    """Reward term exp(-squared error / width); `rewards()` computes the exponentials of all such terms at once."""

    squared: Term
    width: Callable[[Any], float]  # task settings -> unit of the squared error

    def __call__(self, task: Any, now: Stride) -> Tensor:
        return near(self.squared(task, now), self.width(task.cfg))


class VelocityTask(Legged[VelocityConfig]):
    """Robot that tracks commanded velocities; subclasses set `robot`.

    Commands, rewards, pushes and curriculum match mjlab 1.6's velocity tasks. Differences: the policy observes the last
    three control steps instead of `lin_vel` (`task.observations`), and `heights` without noise (mjlab: +-0.02);
    contacts are read once per control step, and a hit in the last physics step counts for the whole control step;
    contact forces are on the feet, not on the ground; encoder biases are drawn per episode; the slope of rough ground
    is a least-squares fit; `reset` (subclasses must call it) draws commands and pushes, so that `final_obs` has the
    command of the step.

    Reward terms, multiplied by weight and control step; terms of weight 0 are not computed. To add a term, a subclass
    sets `terms = {**VelocityTask.terms, "name": lambda task, now: ...}` and its weight in `task.weights`. Terms of each
    foot, [num_envs, feet], are summed. c is 1 if the command exceeds 0.05 m/s + rad/s, else 0:

    - `lin_vel`, `ang_vel`: exp(-squared error / width) of the root's velocity (z included), and of its yaw rate (roll
      and pitch rate included);
    - `upright`: exp(-squared sine of the torso's tilt / width); on rough ground, for robots with `thighs`, tilt from
      the ground's normal;
    - `pose`: exp(-mean over joints of the squared deviation / squared width); widths depend on the commanded speed;
    - `joint_limits`: sum of joint angles beyond the middle 90 % of their range; `action_rate`: squared change of
      actions;
    - `foot_clearance`: c x sum over feet of |height - swing_height| x horizontal speed; `swing_height`: c x sum over
      landing feet of (highest point of the swing / swing_height - 1) squared; `foot_slip`: c x sum over feet on the
      ground of the squared horizontal speed; `soft_landing`: c x sum of the forces on landing feet;
    - `air_time`: c x number of feet in the air for 0.05 to 0.5 s; `trot`: c x the difference between the diagonals in
      the number of such feet (2 in a trot, 0 in a bound); `torso_ang_vel`: squared roll and pitch rate of the torso,
      world frame; `angular_momentum`: squared angular momentum of the robot; `self_contact`, `shank_contact`,
      `trunk_contact`: physics steps with a force above 10 N between bodies of the robot, on shanks or on the trunk.

    With `vision=depth` the policy gets the `depth` group from a depth camera on the torso: 24 x 32 pixels, depths from
    0 (`near` of the robot's `Eye`) to 255 (`far`), every fifth control step, of the ground only. On rough ground
    `depth` replaces the policy's `heights`; the `teacher` group then has the policy's noisy observation without vision.

    On rough ground each env keeps one kind of patch. At the end of an episode it moves up a level if the robot is more
    than half a patch from the middle, down if it walked less than half of the commanded distance. Log: mean error of
    velocity [m/s] and yaw rate [rad/s], `falls_per_minute`, straight-line `distance` [m] of episodes that end.
    """

    Config = VelocityConfig
    SPECIFICATION = """\
    Observation space: (three control steps of each term but the command, the oldest first, with uniform noise on
    measured terms; `task.observations.lin_vel.used=true` adds `lin_vel`, which no robot measures)

{policy}

    The critic observes the current values, without noise and encoder bias:

{critic}

    With `terrain=rough` both also have `heights`, of one step: 187 heights of the root above the ground / 5 m.

    Reward terms: see `VelocityTask`. Start: the pose, a little above the ground, any yaw; a random command, redrawn
    every 3 to 8 s. Termination: a tilt of more than 70 degrees; on rough ground, for robots with `thighs`, a thigh in
    contact with the ground instead.
    """
    units: ClassVar = {
        **Legged.units,
        "gravity": "-",
        "command": "m/s, m/s, rad/s",
        "heights": f"{SCAN_RANGE:g} m",
        "foot_height": "m",
        "air_time": "s",
        "contact": "-",
        "contact_force": "log(1 + N)",
    }
    sources: ClassVar = {**Legged.sources, "gravity": "gravity", "command": "command x y yaw"}
    sources |= {"heights": "simulator ground heights"}
    terms: ClassVar[Mapping[str, Term]] = {
        "lin_vel": Near(lambda task, now: now.lin_error, lambda cfg: cfg.lin_vel_width),
        "ang_vel": Near(lambda task, now: now.ang_error, lambda cfg: cfg.ang_vel_width),
        "upright": Near(lambda task, now: task.tilt(), lambda cfg: cfg.upright_width),
        "pose": Near(lambda task, now: task.deviation(now.command), lambda cfg: 1.0),
        "joint_limits": lambda task, now: task.beyond_limits(),
        "action_rate": lambda task, now: task.action_change(),
        "foot_clearance": lambda task, now: (now.height - task.cfg.swing_height).abs() * now.speed,
        "swing_height": lambda task, now: task.missed_peak().square() * now.lands,
        "foot_slip": lambda task, now: now.speed.square() * task.touches,
        "soft_landing": lambda task, now: now.force * now.lands,
        "air_time": lambda task, now: task.swings() * now.moves[:, None],
        "trot": lambda task, now: (task.swings() @ task.trot).abs_() * now.moves,
        "torso_ang_vel": lambda task, now: task.sensors["torso_ang_vel"].data[:, :2].square().sum(dim=1),
        "angular_momentum": lambda task, now: task.sensors["angular_momentum"].data.square().sum(dim=1),
        "self_contact": lambda task, now: task.hit_steps("self_contact"),
        "shank_contact": lambda task, now: task.hit_steps("shank_contact"),
        "trunk_contact": lambda task, now: task.hit_steps("trunk_contact"),
    }

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        soles = cls.robot.soles
        if "mirrors" in vars(cls):
            return
        cls.mirrors = {
            "lin_vel": AtSite(cls.robot.imu, "vector", "ang_vel"),
            "ang_vel": AtSite(cls.robot.imu, "pseudovector"),
            "gravity": "vector",
            **dict.fromkeys(["joint_pos", "joint_vel"], "joints"),
            "actions": "actuators",
            "command": "planar_velocity",
            "heights": SCAN,
            **dict.fromkeys(["foot_height", "air_time", "contact"], PerBody(soles)),
            "contact_force": PerBody(soles, "vector"),
            "depth": "image",
        }

    @classmethod
    def _rows(cls, joints: int) -> tuple[Rows, Rows]:
        feet = len(cls.robot.soles)
        critic = [
            ("lin_vel", 3, "velocity of the IMU, IMU frame"),
            ("ang_vel", 3, "angular velocity of the IMU, IMU frame"),
            ("gravity", 3, "direction of gravity, root frame"),
            ("joint_pos", joints, "joint positions from the pose; biased for the policy"),
            ("joint_vel", joints, "joint velocities"),
            ("actions", joints, "last action"),
            ("command", 3, "commanded x, y velocity and yaw rate"),
            ("foot_height", feet, "each foot above the ground"),
            ("air_time", feet, "time since each foot left the ground"),
            ("contact", feet, "1 for feet on the ground, else 0"),
            ("contact_force", 3 * feet, "sign(f) log(1 + abs(f)) of the forces on feet, world frame"),
        ]
        _, *measured, command = critic[:7]
        return [*((name, 3 * size, words) for name, size, words in measured), command], critic

    @classmethod
    def scene(cls, cfg: VelocityConfig) -> Scene:
        for key in ("weights", "rough_weights"):
            for name in getattr(cfg, key):
                if name not in cls.terms:
                    hint = f"{did_you_mean(name, cls.terms)} Available: {', '.join(cls.terms)}"
                    raise ConfigError(f"no reward term {name!r}", key=f"task.{key}", hint=hint)
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
        scene.add_sensor("robot", "root_lin_vel", "velocimeter", body=robot.root)
        for sole in robot.soles:
            scene.add_sensor("robot", f"{sole}_pos", "framepos", site=sole)
            scene.add_sensor("robot", f"{sole}_vel", "framelinvel", site=sole)
            if cfg.terrain == "rough":
                scene.add_sensor("robot", f"{sole}_ahead", "framexaxis", site=sole)
        for item in dict.fromkeys([*robot.feet, *(name for names in cls._hits(cfg).values() for name in names)]):
            kind, _, name = item.partition(":")
            scene.add_sensor("robot", f"{item}/ground", "contact", cutoff=0.0, against="ground", **{kind: name})
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
        """Return the robot parts that must not touch the ground, by reward term (`fall`: termination)."""
        robot, weights = cls.robot, cfg.all_weights
        if "shank_contact" in weights and not robot.shanks:
            of = "rough_weights" if cfg.terrain == "rough" and "shank_contact" in cfg.rough_weights else "weights"
            key = f"task.{of}.shank_contact"
            raise ConfigError("the robot has no `shanks`", key=key, hint=f"Try {key}=0")
        hits = {"shank_contact": robot.shanks, "trunk_contact": (f"body:{robot.root}",)}
        return {
            **{name: items for name, items in hits.items() if name in weights},
            **({"fall": robot.thighs} if cfg.terrain == "rough" and robot.thighs else {}),
        }

    def __init__(self, cfg: VelocityConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        robot, body, num, device = self.robot, self.body, self.num_envs, self.device
        names, weights, rough = body.joint_names, cfg.all_weights, cfg.terrain == "rough"
        self.feet = SensorGroup(sim, [f"{foot}/ground" for foot in robot.feet])
        self.root_lin_vel = body.sensor("root_lin_vel")
        self.axes = SensorGroup(sim, ["ahead", "left", "up"])
        self.torso_up = body.sensor("torso_up")
        self.sole_pos = SensorGroup(sim, [f"{sole}_pos" for sole in robot.soles])
        self.sole_vel = SensorGroup(sim, [f"{sole}_vel" for sole in robot.soles])
        hits = self._hits(cfg).items()
        self.hits = {name: SensorGroup(sim, [f"{item}/ground" for item in items]) for name, items in hits}
        self.thighs = self.hits.pop("fall", None)
        if "self_contact" in weights:
            self.hits["self_contact"] = SensorGroup(sim, ["self_contact"])
        self.sensors = {name: body.sensor(name) for name in ("torso_ang_vel", "angular_momentum") if name in weights}
        widths = torch.tensor(robot.by_joint(names, "widths"), device=device)
        self.tightness = widths.T.pow(-2.0) / len(names)  # standing, walking, running
        self.gaits = torch.tensor([MOVING, RUNNING], device=device)
        if "trot" in weights and len(robot.trot) != len(robot.feet):
            problem = f"the robot's `trot` needs one number for each of {len(robot.feet)} feet, got {len(robot.trot)}"
            raise ConfigError(problem, key="task.weights.trot", hint="Try task.weights.trot=0")
        self.trot = torch.tensor(robot.trot, dtype=torch.float32, device=device)
        terms = {name: term for name, term in self.terms.items() if name in weights}
        self.weighted = sorted(terms, key=lambda name: not isinstance(terms[name], Near))  # exponentials first
        widths = [term.width(cfg) for term in terms.values() if isinstance(term, Near)]
        self.sharpness = torch.tensor([-1.0 / width for width in widths], device=device)[:, None]
        self.weights = self.dt * torch.tensor([weights[name] for name in self.weighted], device=device)[:, None]
        self.eye = None if cfg.vision is None else sim.camera("eye")

        self._allocate_reset_values()
        self.zeros = torch.zeros(num, 3, device=device)
        self.touches = torch.zeros(num, len(robot.feet), dtype=torch.bool, device=device)  # set by rewards()
        self.speeds = torch.zeros(2, num, 2, device=device)  # errors and commands of velocity [m/s], yaw rate [rad/s]
        self.errors = self.speeds[..., 0]
        self.one = torch.ones((), device=device)
        self.fell = torch.zeros(num, dtype=torch.bool, device=device)
        self.walked = torch.zeros(num, device=device)  # distance from the origin [m]
        self.unfinished = torch.zeros(num, dtype=torch.bool, device=device)  # envs whose episode continues
        self.ground = Terrain(cfg.rough, device) if rough else None
        if self.ground is not None:
            self._use_patches(len(self.ground.kinds), cfg.rough.levels)

    def _allocate_reset_values(self) -> None:
        """Allocate what `reset` draws or zeroes in one tensor, and the bounds of all that it draws."""
        cfg, joints, feet, height = self.cfg, len(self.pose), len(self.robot.feet), self.robot.height
        bias, (least, most) = cfg.encoder_bias, cfg.start_height
        bounds = [[-0.5, 0.5], [-0.5, 0.5], [height + least, height + most], [-math.pi, math.pi], cfg.push.interval]
        bounds += [[-bias, bias]] * joints + [[0.0, 0.0]] * (joints + 3 * feet)
        # Before its views: a checkpoint restores tensors in this order, and an old one has only the views.
        self.reset_values = torch.zeros(self.num_envs, len(bounds), device=self.device)
        sizes = [3, 1, 1, joints, joints, 2 * feet, feet]
        pos, yaw, wait, bias, actions, swing, touched = self.reset_values.split(sizes, dim=1)
        self.command = VelocityCommands(self, cfg.command)
        self.pushes = RootPushes(cfg.push, self.body, self.num_envs, self.dt, self.device)
        self.reset_bounds = torch.cat([self.pushes.bounds, torch.tensor(bounds, device=self.device).T], dim=1)
        self.origin = pos  # where the episode began, or the middle of its patch [m]
        self.command.yaw, self.pushes.wait = yaw[:, 0], wait[:, 0]
        self.encoder_bias, self.last_actions = bias, actions
        self.swing = swing.unflatten(1, (2, feet))
        self.air_time, self.peak = self.swing.unbind(dim=1)  # time since a foot left the ground [s], highest point [m]
        self.touched = touched  # 1.0 for feet on the ground at the end of the last control step

    def _use_patches(self, kinds: int, levels: int) -> None:
        """Assign envs to patches of rough ground, and set the points at which robots scan the ground."""
        num, device = self.num_envs, self.device
        self.scan_points = SCAN.to(device)
        self.plane_points = SCAN[PLANE].to(device)
        plane = torch.cat([SCAN[PLANE], torch.ones(len(PLANE), 1)], dim=1)
        self.plane = torch.linalg.pinv(plane)[:2].T.contiguous().to(device)  # slopes ahead and to the left
        self.sole_ahead = SensorGroup(self.sim, [f"{sole}_ahead" for sole in self.robot.soles])
        radius, points = self.robot.foot_ring
        angle = torch.arange(points, device=device) * (2.0 * math.pi / points)
        ring = radius * torch.stack([angle.cos(), angle.sin()], dim=1)
        self.ring = torch.cat([ring, torch.zeros(1, 2, device=device)])  # m; ring and centre
        self.column = torch.arange(num, device=device) % kinds
        self.origin = torch.zeros(num, 3, device=device)
        self.levels = Levels(self, levels, initial=torch.arange(num) % max(1, levels // 2))

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        everyone, (pos, yaw, _) = where[:, None], self.reset_values.tensor_split([3, 4], dim=1)
        low, high = self.reset_bounds
        unit = self.random.uniform(0.0, 1.0, len(low) + VelocityCommands.draws)
        drawn, command = torch.lerp(low, high, unit[:, : len(low)]), unit[:, len(low) :]
        push, values = drawn.tensor_split([RootPushes.draws], dim=1)
        torch.where(everyone, values, self.reset_values, out=self.reset_values)
        if self.ground is not None:
            level = self.levels.value.clamp(max=self.levels.count - 1)  # a resumed run may have had more levels
            torch.where(everyone, self.ground.origins[level, self.column], self.origin, out=self.origin)
            pos = pos + self.origin
        self.body.set_state(
            where,
            root_pos=pos,
            root_quat=self.about_z(yaw),
            root_ang_vel_local=self.zeros,
            joint_pos=self.pose.expand(self.num_envs, -1),
        )
        # Commands and pushes that are due in other envs use the same draw.
        self.command.resample(where, command)
        if self.cfg.pushes:
            self.pushes.push(push, self.axes.data)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        # A servo moves the joint until the biased encoder reads the target.
        self.body.actuate(torch.addcmul(self.pose, action, self.scale) - self.encoder_bias)

    def observe(self) -> dict[str, Tensor | Terms]:
        body, force = self.body, self.feet.data[..., 1:]
        terms = {
            "lin_vel": self.lin_vel.data,
            "ang_vel": self.ang_vel.data,
            "gravity": -self.axes.data[..., 2],
            "joint_pos": body.joint_pos - self.pose,
            "joint_vel": body.joint_vel,
            "actions": self.actions,
            "command": self.command.value,
        }
        if self.ground is not None:
            heights = body.root_pos[:, 2:] - self._scan(self.scan_points)
            terms["heights"] = heights.clamp_(-SCAN_RANGE, SCAN_RANGE) / SCAN_RANGE
        privileged = {
            "foot_height": self._foot_height(),
            "air_time": self.air_time,
            "contact": self.touched,
            "contact_force": torch.copysign(force.abs().log1p(), force).flatten(1),
        }
        seen = {**terms, "joint_pos": terms["joint_pos"] + self.encoder_bias}
        groups: dict[str, Tensor | Terms] = {"policy": seen, "critic": {**terms, **privileged}}
        if self.eye is not None and self.robot.eye is not None:
            groups["depth"] = self.eye.depth_bytes(self.robot.eye.near, self.robot.eye.far)
        return groups

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        now = self._stride()
        chosen = ((name, self.terms[name]) for name in self.weighted)
        terms = {name: (term.squared if isinstance(term, Near) else term)(self, now) for name, term in chosen}
        by_foot = {name: term for name, term in terms.items() if term.shape == self.touches.shape}
        if by_foot:
            terms |= zip(by_foot, torch.stack([*by_foot.values()]).sum(dim=2), strict=True)
        for name, term in terms.items():
            if term.shape != (self.num_envs,):
                raise TaskError(key=f"reward {name!r}", expected=f"shape [{self.num_envs}]", got=[*term.shape])
        values = torch.stack([*terms.values()])
        values[: len(self.sharpness)].mul_(self.sharpness).exp_()  # squared errors of `Near` terms
        return dict(zip(terms, values * self.weights, strict=True))

    def _stride(self) -> Stride:
        """Compute the control step's quantities; update `errors`, `touches` and `peak`."""
        lin, ang = self.root_lin_vel.data, self.body.root_ang_vel_local
        contact, height = self.feet.data, self._foot_height()
        # Columns: velocities z x y, angular velocities z x y, commands x y yaw, two fillers. The commanded velocities
        # 1 to 3 become errors, and from column 1 on there are two rows of x, y, yaw rate: errors, then commands.
        wanted = self.command.value
        columns = torch.cat([lin[:, 2:], lin[:, :2], ang[:, 2:], ang[:, :2], wanted, self.zeros[:, :2]], dim=1)
        columns[:, 1:4].sub_(wanted)
        lin_error, ang_error = columns[:, :6].square().unflatten(1, (2, 3)).sum(dim=2).unbind(dim=1)
        rows = columns[:, 1:].unflatten(1, (2, 5))
        torch.linalg.vector_norm(rows[..., :2], dim=2, out=self.speeds[0])
        torch.abs(rows[..., 2], out=self.speeds[1])
        command = self.speeds[..., 1].sum(dim=0)
        moves = command > MOVING
        torch.gt(contact[..., 0], 0.0, out=self.touches)
        self.peak.clamp_(min=height.masked_fill(self.touches, 0.0))
        return Stride(
            lin_error,
            ang_error,
            command,
            moves,
            height,
            speed=torch.linalg.vector_norm(self.sole_vel.data[..., :2], dim=-1) * moves[:, None],
            force=torch.linalg.vector_norm(contact[..., 1:], dim=-1),
            lands=(self.touches > self.touched) & moves[:, None],  # touches & ~touched & moves in two kernels
        )

    def deviation(self, command: Float[Tensor, " envs"]) -> Float[Tensor, " envs"]:
        """Return the mean over joints of the squared deviation from the pose / squared width at this speed."""
        gait = torch.bucketize(command, self.gaits, right=True)
        off = squared_error(self.body.joint_pos, self.pose.expand(self.num_envs, -1))
        return (off * self.tightness.index_select(0, gait)).sum(dim=1)

    def missed_peak(self) -> Float[Tensor, "envs feet"]:
        """Return 1 - highest point of the swing / `swing_height`."""
        return torch.rsub(self.peak, 1.0, alpha=1.0 / self.cfg.swing_height)

    def swings(self) -> Float[Tensor, "envs feet"]:
        """Return 1 for feet with an air time within `AIR_TIMES`, else 0."""
        least, most = AIR_TIMES
        air_time = (self.air_time + self.dt).masked_fill_(self.touches, 0.0)
        return ((air_time > least) & (air_time < most)).float()

    def hit_steps(self, name: str) -> Tensor:
        """Return the number of physics steps with a hit; a hit in the last one counts for the whole control step."""
        return self.cfg.decimation * _hit(self.hits[name])

    def tilt(self) -> Float[Tensor, " envs"]:
        """Return the squared sine of the torso's tilt from the vertical, or from the normal of rough ground."""
        if self.thighs is None:
            up = self.torso_up.data[:, 2]
            return torch.addcmul(self.one, up, up, value=-1.0)
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
        self.air_time.add_(self.dt)
        self.swing.masked_fill_(self.touches[:, None], 0.0)
        self.last_actions.copy_(self.actions)
        torch.linalg.vector_norm(body.root_pos[:, :2] - self.origin[:, :2], dim=1, out=self.walked)
        torch.logical_not(done, out=self.unfinished)
        if self.ground is not None:
            needed = torch.linalg.vector_norm(self.command.value[:, :2], dim=1) * (0.5 * cfg.episode_length * self.dt)
            up = done & (self.walked > 0.5 * cfg.rough.patch_size)
            self.levels.move(up=up, down=done & ~up & (self.walked < needed))
        self.command.face(self.axes[0].data)
        self.command.count(self.errors[0])
        if cfg.pushes:
            self.pushes.count()

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        stats = {
            "lin_vel_error": self.errors[0],
            "ang_vel_error": self.errors[1],
            "falls_per_minute": self.fell * (60.0 / self.dt),
            "distance": self.walked.masked_fill(self.unfinished, torch.nan),
        }
        if self.ground is not None:
            stats["terrain_level"] = self.levels.value.float()
        return stats

    def _foot_height(self) -> Float[Tensor, "envs feet"]:
        """Return the heights of the soles above the highest ground around them [m], clamped to [0, 1]."""
        if self.ground is None:
            return self.sole_pos.data[..., 2].clamp(0.0, 1.0)
        pos = self.sole_pos.data
        c, s = torch.nn.functional.normalize(self.sole_ahead.data[..., :2], dim=-1)[..., None, :].unbind(dim=-1)
        x, y = self.ring.unbind(dim=1)
        ground = self.ground.height(pos[..., :1] + c * x - s * y, pos[..., 1:2] + s * x + c * y)
        return (pos[..., 2] - ground.amax(dim=-1)).clamp_(0.0, 1.0)

    def _scan(self, points: Float[Tensor, "points 2"]) -> Float[Tensor, "envs points"]:
        """Return ground heights [m] at points ahead and to the left of the root [m]."""
        assert self.ground is not None
        ahead = self.axes[0].data
        return self.ground.scan(self.body.root_pos, torch.atan2(ahead[:, 1], ahead[:, 0]), points)


def _hit(sensors: SensorGroup) -> Bool[Tensor, " envs"]:
    """Return the mask of envs in which any contact sensor reads more than `HIT`."""
    return (torch.linalg.vector_norm(sensors.data[..., 1:], dim=-1) > HIT).any(dim=1)
