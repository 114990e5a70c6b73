"""Base of the `<Robot>Tracking` tasks: robots that track motion clips."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import TaskConfig, Terms
from gpusim_rl.env.math import quat_angle, quat_conjugate, quat_difference, quat_multiply
from gpusim_rl.env.motions import Frame, Motions, Playhead, Starts, read_clips
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.schema import Bounds, NotNegative, Positive
from gpusim_rl.sim import Scene, Sim

from .robots import HIT, Legged, Rows

SPIN = 0.1  # weight of squared angle [rad2] or rate [rad2/s2] relative to squared distance or speed, in `deepmimic`


@dataclass(frozen=True, slots=True, kw_only=True)
class TermConfig:
    """Reward term: weight x exp(-squared error / sigma squared)."""

    weight: float  # per second
    sigma: Positive  # in the unit of the error


@dataclass(frozen=True, slots=True, kw_only=True)
class BeyondMimicConfig:
    """Reward terms of `task.reward=beyondmimic`."""

    anchor_pos: TermConfig  # m
    anchor_ori: TermConfig  # rad
    body_pos: TermConfig  # m
    body_ori: TermConfig  # rad
    body_lin_vel: TermConfig  # m/s
    body_ang_vel: TermConfig  # rad/s


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepMimicConfig:
    """Reward terms of `task.reward=deepmimic`."""

    joint_pos: TermConfig  # rad
    joint_vel: TermConfig  # rad/s
    root_pose: TermConfig  # m
    root_vel: TermConfig  # m/s
    end_pos: TermConfig  # m


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """Weights of costs, per second."""

    action_rate: float
    joint_limits: float
    self_contact: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartNoiseConfig:
    """Bounds of the noise added to the clip's state at the start of an episode."""

    pos: Bounds  # m along x, y and z
    rot: Bounds  # rad about x, y and z
    lin_vel: Bounds  # m/s
    ang_vel: Bounds  # rad/s
    joint_pos: NotNegative  # rad


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig(TaskConfig):
    """Settings of <Robot>Tracking; values are in cfg/task/<Robot>Tracking.yaml."""

    clips: list[str]
    starts: Starts
    start_noise: StartNoiseConfig
    reward: Literal["beyondmimic", "deepmimic"]
    beyondmimic: BeyondMimicConfig
    deepmimic: DeepMimicConfig
    costs: CostConfig
    action_around: Literal["pose", "clip"]
    encoder_bias: NotNegative
    anchor_height_limit: Positive
    anchor_tilt_limit: Positive
    end_height_limit: Positive

    def __post_init__(self) -> None:
        TaskConfig.__post_init__(self)
        if not self.clips:
            hint = "Try task.clips=[path/to/clip.npz]"
            raise ConfigError(key="task.clips", expected="at least one motion clip", got=self.clips, hint=hint)

    def whole_episodes(self) -> TrackingConfig:
        """Return a copy of the settings for evaluation, with clips from their first frames."""
        return dataclasses.replace(super(TrackingConfig, self).whole_episodes(), starts="first")

    @property
    def terms(self) -> dict[str, TermConfig]:
        """Terms of the chosen reward, in order."""
        chosen = getattr(self, self.reward)
        return {field.name: getattr(chosen, field.name) for field in dataclasses.fields(chosen)}


class BodyStates(NamedTuple):
    """Poses and velocities of the compared bodies, shape [num_envs, bodies, 3, 4 or 6]."""

    pos: Tensor  # m
    quat: Tensor
    vel: Tensor  # angular [rad/s], then linear [m/s]


class Errors(NamedTuple):
    """Errors of a control step shared by several reward terms."""

    anchor: Tensor  # distance of the robot's anchor from the clip's, in the world [m], [num_envs]
    away: Tensor  # distance of the bodies from their targets [m], [num_envs, bodies, 3]
    half_turn: Tensor  # half angle from the targets, then from the anchor of the clip, [rad], [num_envs, bodies + 1]
    joints: Tensor  # rad, [num_envs, joints]


def outer(a: Float[Tensor, "*batch 4"], b: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 16"]:
    """Return the products of all pairs of components; `table` turns them into products of quaternions."""
    return (a[..., :, None] * b[..., None, :]).flatten(-2)


def table(product: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> Float[Tensor, "16 size"]:
    """Return the matrix T of a bilinear function of two quaternions, whose value is outer(a, b) @ T."""
    unit = torch.eye(4)
    return product(unit.repeat_interleave(4, dim=0), unit.repeat(4, 1)).to(device)


def axes(a: Float[Tensor, "*batch 4"], b: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 9"]:
    """Return the x, y and z axes of frames with the orientation a = b."""
    vectors = torch.eye(4)[1:, None].expand(3, *a.shape)
    rotated = [quat_multiply(quat_multiply(a, vector), quat_conjugate(b))[..., 1:] for vector in vectors]
    return torch.cat(rotated, dim=-1)


def yaw_back(a: Float[Tensor, "*batch 4"], b: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 2"]:
    """Return sine and cosine, times 0.5, of the yaw of the inverse of the rotation a = b."""
    (aw, ax, ay, az), (bw, bx, by, bz) = a.unbind(-1), b.unbind(-1)
    return torch.stack([ax * by - aw * bz, 0.5 * (aw * bw + ax * bx - ay * by - az * bz)], dim=-1)


def waves(rows: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return phase and factor of the sines that are the entries of a matrix: c(os), s(in), n(egative sin), 0, 1.

    Capital letters are of the whole angle, others of its half.
    """
    kinds = {"c": (0.5, 0.5), "s": (0.0, 0.5), "n": (0.0, -0.5), "C": (0.5, 1.0), "S": (0.0, 1.0), "N": (0.0, -1.0)}
    kinds |= {"0": (0.0, 0.0), "1": (0.5, 0.0)}
    phase, factor = torch.tensor([kinds[letter] for letter in rows], device=device).unbind(dim=1)
    return math.pi * phase, factor


class TrackingTask(Legged[TrackingConfig]):
    """Robot that tracks motion clips; subclasses set the robot and the bodies to compare.

    Observations, targets, rewards, terminations and initial states match mjlab 1.6's tracking task, which is based on
    BeyondMimic (arXiv 2508.08241). Differences: a self-collision in the last physics step counts for the whole control
    step; encoder biases are drawn per episode; start orientations are rotated about a random axis, not by three angles;
    the critic observes bodies relative to the clip's anchor, not the robot's. `task.randomize=true` randomises pushes
    (horizontal), friction and centres of mass.

    `task.clips` lists the clips: names in tasks/assets/motions, or paths of .npz files (docs/motion.md#clips). Each env
    tracks a clip frame by frame. At the end of the clip the robot is reset to another frame and the episode continues,
    as in mjlab; `final_obs` of that step has the clip's last frame.

    An action is a joint target offset from the robot's pose, or with `action_around=clip` from the clip's joints, which
    keeps an untrained policy near the clip. Body targets are the clip's bodies, moved to the robot's `anchor` in x and
    y and rotated to its yaw; heights stay as in the clip.

    Reward terms (x weight x control step) are exp(-squared error / sigma squared). With `reward=beyondmimic`:

    - `anchor_pos`, `anchor_ori`: distance and angle between the robot's anchor and the clip's, in the world;
    - `body_pos`, `body_ori`: mean over bodies of the squared distance and angle from the target;
    - `body_lin_vel`, `body_ang_vel`: mean over bodies of the squared velocity difference, in the world.

    With `reward=deepmimic`, the terms of DeepMimic (arXiv 1804.02717) with MimicKit's scales:

    - `joint_pos`, `joint_vel`: sum over joints of the squared difference;
    - `root_pose`, `root_vel`: squared distance of the root in the world + 0.1 squared angle; likewise for velocities;
    - `end_pos`: sum over limb ends of the squared distance from the target.

    Costs with either reward: `action_rate`, squared change of the actions; `joint_limits`, sum of joint angles beyond
    the middle 90 % of their range; `self_contact`, physics steps with a force above 10 N between bodies of the robot.

    Start: a frame of a clip with noise (`start_noise`), joints in the middle 90 % of their range. `starts=adaptive`
    starts more often in the seconds of a clip where episodes failed. Evaluations start at the first frame of each clip.

    Termination: the anchor's height is off by more than `anchor_height_limit`, a limb end's height by more than
    `end_height_limit`, or the z component of the anchor's up axis by more than `anchor_tilt_limit`.

    Log: `body_error`, mean distance of bodies from targets [m]; `anchor_error` [m]; `joint_error`, mean [rad];
    `ends_per_minute`, terminations; `start_entropy`, 1 = uniform start frames; `start_top_bin`, most likely start bin.
    """

    Config = TrackingConfig
    SPECIFICATION = """\
    Observation space: (uniform noise is added to the policy's proprioception and anchor target)

{policy}

    The critic observes the same without noise and bias, plus the poses of `bodies`:

{critic}

    Reward terms, multiplied by the control step: see `TrackingTask`.

    Start: a frame of a clip, with noise. Termination: the anchor or one of `ends` is too low or too high, or the anchor
    is tilted; see `TrackingTask`.
    """
    anchor: ClassVar[str]  # body in the middle of the robot; one of `bodies`
    bodies: ClassVar[tuple[str, ...]]  # bodies to compare with the clip, including the root
    ends: ClassVar[tuple[str, ...]]  # bodies at the ends of the limbs
    units: ClassVar = {
        **Legged.units,
        "ref_joint_pos": "rad",
        "ref_joint_vel": "rad/s",
        "anchor_pos": "m",
        "anchor_axes": "-",
        "body_pos": "m",
        "body_axes": "-",
    }

    @classmethod
    def _rows(cls, joints: int) -> tuple[Rows, Rows]:
        num, anchor = len(cls.bodies), cls.anchor.removesuffix("_link")
        clip = [
            ("ref_joint_pos", joints, "joint positions of the clip"),
            ("ref_joint_vel", joints, "joint velocities of the clip"),
            ("anchor_pos", 3, f"{anchor} of the clip, {anchor} frame"),
            ("anchor_axes", 6, f"x and y axes of that body, {anchor} frame"),
        ]
        bodies = [
            ("body_pos", 3 * num, f"positions of the {num} bodies, {anchor} frame of the clip"),
            ("body_axes", 6 * num, f"x and y axes of the bodies, {anchor} frame of the clip"),
        ]
        own = [
            ("lin_vel", 3, "velocity of the IMU, IMU frame"),
            ("ang_vel", 3, "angular velocity of the IMU, IMU frame"),
            ("joint_pos", joints, "joint positions from the pose, for the policy plus encoder bias"),
            ("joint_vel", joints, "joint velocities"),
            ("actions", joints, "last action"),
        ]
        return [*clip, *own], [*clip, *bodies, *own]

    @classmethod
    def scene(cls, cfg: TrackingConfig) -> Scene:
        robot = cls.robot
        scene = robot.empty_scene(cfg.physics_hz)
        scene.add_ground()
        robot.add_to(scene)
        robot.add_motors(scene)
        if cfg.costs.self_contact:
            scene.add_sensor("robot", "self_contact", "contact", against="self", body=robot.root)
        return scene

    def __init__(self, cfg: TrackingConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        robot, body, num, device = self.robot, self.body, self.num_envs, self.device
        self.motions = Motions(read_clips(cfg.clips, sim.scene, "robot", self.bodies), 1.0 / self.dt, device)
        self.playhead = Playhead(self.motions, num, cfg.starts)
        self.followed = body.bodies(self.bodies)
        self.anchor_index, self.root_index = self.bodies.index(self.anchor), self.bodies.index(robot.root)
        self.end_index = torch.tensor([self.bodies.index(end) for end in self.ends], device=device)
        self.limits = self._limits()
        self.self_contact = body.sensor("self_contact") if cfg.costs.self_contact else None

        terms = cfg.terms
        # Of squared errors. Norms over bodies become root mean squares, and half angles angles.
        scales = self._scales() if cfg.reward == "beyondmimic" else {}
        sharpness = [scales.get(name, 1.0) / term.sigma for name, term in terms.items()]
        self.sharpness = -torch.tensor(sharpness, device=device).square_()[:, None]
        costs = [cfg.costs.action_rate, cfg.costs.joint_limits]
        costs += [cfg.costs.self_contact * cfg.decimation] if cfg.costs.self_contact else []
        weights = [*(term.weight for term in terms.values()), *costs]
        self.weights = self.dt * torch.tensor(weights, device=device)[:, None]
        self.terms = (*terms, "action_rate", "joint_limits", "self_contact")[: len(weights)]

        noise, bias = cfg.start_noise, [cfg.encoder_bias] * len(self.pose)
        half_turn = [0.5 * angle for angle in noise.rot]
        bounds = [*noise.pos, *half_turn, *noise.lin_vel, *noise.ang_vel, *[noise.joint_pos] * len(self.pose)]
        bound = torch.tensor([*bounds, *bias, *[0.0] * len(self.pose)], device=device)
        self.start_noise = -bound, bound
        # What `reset` sets, side by side; before its views, so that a checkpoint without it restores them
        self.begun = torch.zeros(num, 2 * len(self.pose), device=device)
        del self.encoder_bias, self.last_actions
        self.encoder_bias, self.last_actions = self.begun.split(len(self.pose), dim=1)
        self.hit = torch.zeros(num, device=device)  # 1.0 for a self-contact
        self.product, self.difference = (table(f, device) for f in (quat_multiply, quat_difference))
        self.to_axes, self.to_yaw = table(axes, device), table(yaw_back, device)
        # Rotation about z of row vectors, then of quaternions
        self.turn_waves = waves("CS0NC0001c00s0cs00nc0n00c", device)
        self.errors = torch.zeros(3, num, device=device)  # errors of bodies [m], anchor [m] and joints [rad]
        self.lost = torch.zeros(num, dtype=torch.bool, device=device)  # envs whose robot is too far from its clip

    def _limits(self) -> Float[Tensor, " limits"]:
        """Return the limits of the height error of each body, then of the tilt of the anchor / 2, for `terminated`."""
        cfg, limits = self.cfg, dict.fromkeys(self.bodies, math.inf)
        limits |= dict.fromkeys(self.ends, cfg.end_height_limit)
        limits[self.anchor] = min(limits[self.anchor], cfg.anchor_height_limit)
        return torch.tensor([*limits.values(), 0.5 * cfg.anchor_tilt_limit], device=self.device)

    def _scales(self) -> dict[str, float]:
        """Return the factors of the errors of `_beyondmimic`."""
        mean = 1.0 / math.sqrt(len(self.bodies))
        return {"anchor_ori": 2.0, "body_pos": mean, "body_ori": 2.0 * mean, "body_lin_vel": mean, "body_ang_vel": mean}

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        root, joints, everyone = self.root_index, len(self.pose), where[:, None]
        unit = self.random.uniform(0.0, 1.0, Playhead.draws + len(self.start_noise[0]))
        noise = torch.lerp(*self.start_noise, unit[:, Playhead.draws :])
        pos, half_turn, lin_vel, ang_vel, joint_pos, own = noise.split([3, 3, 3, 3, joints, 2 * joints], dim=1)
        torch.where(everyone, own, self.begun, out=self.begun)
        self.lost.masked_fill_(where, False)
        where, start = self.playhead.begin(where, unit[:, : Playhead.draws])  # also envs whose clip has ended
        frame = self.motions.frame(start)
        half = torch.linalg.vector_norm(half_turn, dim=1, keepdim=True)
        turn = torch.cat([half.cos(), torch.sinc(half / math.pi) * half_turn], dim=1)
        self.body.set_state(
            where,
            root_pos=frame.body_pos[:, root] + pos,
            root_quat=outer(turn, frame.body_quat[:, root]) @ self.product,
            root_lin_vel=frame.body_lin_vel[:, root] + lin_vel,
            root_ang_vel=frame.body_ang_vel[:, root] + ang_vel,
            joint_pos=torch.clamp(frame.joint_pos + joint_pos, *self.soft_limits),
            joint_vel=frame.joint_vel,
        )

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        # A servo moves the joint until the biased encoder reads the target.
        around = self.pose if self.cfg.action_around == "pose" else self._frame().joint_pos
        self.body.actuate(torch.addcmul(around, action, self.scale) - self.encoder_bias)

    def observe(self) -> dict[str, Terms]:
        body, frame, anchor = self.body, self._frame(), self.anchor_index
        # Axes of the clip's anchor and of the bodies; those two anchors are the frames in which to observe them.
        quat = torch.cat([frame.body_quat[:, None, anchor], self.followed.quat], dim=1)
        pairs = outer(quat, quat)
        first_axes = (pairs @ self.to_axes[:, :6]).unflatten(2, (2, 3)).flatten(1, 2)
        clip_axes, robot_axes = (pairs[:, :: anchor + 1][:, :2] @ self.to_axes).unflatten(2, (3, 3)).mT.unbind(dim=1)
        away = self.followed.pos - frame.body_pos[:, None, anchor]
        at = away[:, anchor, None]
        clip = {
            "ref_joint_pos": frame.joint_pos,
            "ref_joint_vel": frame.joint_vel,
            "anchor_pos": torch.baddbmm(at, at, robot_axes, beta=0.0, alpha=-1.0).flatten(1),
            "anchor_axes": (first_axes[:, :2] @ robot_axes).flatten(1),
        }
        own = {
            "lin_vel": self.lin_vel.data,
            "ang_vel": self.ang_vel.data,
            "joint_pos": body.joint_pos - self.pose,
            "joint_vel": body.joint_vel,
            "actions": self.actions,
        }
        privileged = {
            "body_pos": (away @ clip_axes).flatten(1),
            "body_axes": (first_axes[:, 2:] @ clip_axes).flatten(1),
        }
        return {
            "policy": {**clip, **own, "joint_pos": own["joint_pos"] + self.encoder_bias},
            "critic": {**clip, **privileged, **own},
        }

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        frame, now = self._frame(), BodyStates(*self.followed.state())
        errors = self._beyondmimic if self.cfg.reward == "beyondmimic" else self._deepmimic
        terms = {**errors(frame, now, self._errors(frame, now)), **self._costs()}
        values = torch.stack([terms[name] for name in self.terms])
        values[: len(self.sharpness)].square_().mul_(self.sharpness).exp_()
        return dict(zip(self.terms, values * self.weights, strict=True))

    def _errors(self, frame: Frame, now: BodyStates) -> Errors:
        """Compare the bodies with the clip's, at the x and y of the robot's anchor and turned to its yaw."""
        anchor = self.anchor_index
        at, at_clip = now.pos[:, anchor], frame.body_pos[:, anchor]
        turn = outer(frame.body_quat, now.quat) @ self.difference  # from the robot to the clip, world frame
        sine, cosine = (outer(turn[:, anchor], turn[:, anchor]) @ self.to_yaw).split(1, dim=1)
        phase, factor = self.turn_waves
        matrices = torch.addcmul(phase, torch.atan2(sine, cosine), factor).sin_()
        about_z, quat_about_z = matrices[:, :9].unflatten(1, (3, 3)), matrices[:, 9:].unflatten(1, (4, 4))
        origin = torch.cat([at[:, :2], at_clip[:, 2:]], dim=1)[:, None]
        away = torch.baddbmm(now.pos - origin, frame.body_pos - at_clip[:, None], about_z, beta=-1.0)
        turns = torch.cat([turn @ quat_about_z, turn[:, anchor, None]], dim=1)
        half_turn = torch.atan2(torch.linalg.vector_norm(turns[..., 1:], dim=2), turns[..., 0].abs())
        joints = frame.joint_pos - self.body.joint_pos
        torch.mean(torch.linalg.vector_norm(away, dim=2), dim=1, out=self.errors[0])
        torch.linalg.vector_norm(at_clip - at, dim=1, out=self.errors[1])
        torch.mean(joints.abs(), dim=1, out=self.errors[2])
        return Errors(self.errors[1], away, half_turn, joints)

    def _beyondmimic(self, frame: Frame, now: BodyStates, errors: Errors) -> dict[str, Float[Tensor, " envs"]]:
        """Return the error / scale of each term of `BeyondMimicConfig`, see `_scales`."""
        off = (frame.body_vel - now.vel).unflatten(2, (2, 3))
        ang_vel, lin_vel = torch.linalg.vector_norm(off, dim=(1, 3)).unbind(dim=1)
        return {
            "anchor_pos": errors.anchor,
            "anchor_ori": errors.half_turn[:, -1],
            "body_pos": torch.linalg.vector_norm(errors.away, dim=(1, 2)),
            "body_ori": torch.linalg.vector_norm(errors.half_turn[:, :-1], dim=1),
            "body_lin_vel": lin_vel,
            "body_ang_vel": ang_vel,
        }

    def _deepmimic(self, frame: Frame, now: BodyStates, errors: Errors) -> dict[str, Float[Tensor, " envs"]]:
        """Return the error of each term of `DeepMimicConfig`."""
        body, root, norm, spin = self.body, self.root_index, torch.linalg.vector_norm, math.sqrt(SPIN)
        turn = quat_angle(frame.body_quat[:, root], now.quat[:, root])
        ang_vel = norm(frame.body_ang_vel[:, root] - body.root_ang_vel, dim=1)
        return {
            "joint_pos": norm(errors.joints, dim=1),
            "joint_vel": norm(frame.joint_vel - body.joint_vel, dim=1),
            "root_pose": torch.hypot(norm(frame.body_pos[:, root] - now.pos[:, root], dim=1), spin * turn),
            "root_vel": torch.hypot(norm(frame.body_lin_vel[:, root] - body.root_lin_vel, dim=1), spin * ang_vel),
            "end_pos": norm(errors.away.index_select(1, self.end_index), dim=(1, 2)),
        }

    def _costs(self) -> dict[str, Float[Tensor, " envs"]]:
        """Return the unweighted costs of `CostConfig`."""
        costs = {"action_rate": self.action_change(), "joint_limits": self.beyond_limits()}
        if self.self_contact is not None:
            force = torch.linalg.vector_norm(self.self_contact.data[:, 1:], dim=1)
            costs["self_contact"] = torch.gt(force, HIT, out=self.hit)
        return costs

    def terminated(self) -> Bool[Tensor, " envs"]:
        anchor, frame = self.anchor_index, self._frame()
        above = frame.body_pos[..., 2] - self.followed.pos[..., 2]
        # Squared x and y of the quaternions: the up axis of a frame has z = 1 - 2 (x2 + y2).
        up, up_clip = self.followed.quat[:, anchor, 1:3], frame.body_quat[:, anchor, 1:3]
        tilt = torch.addcmul(up.square(), up_clip, up_clip, value=-1.0).sum(dim=1, keepdim=True)
        return torch.any(torch.cat([above, tilt], dim=1).abs_() > self.limits, dim=1, out=self.lost)

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        self.last_actions.copy_(self.actions)
        self.playhead.advance(self.lost & done, self.sim.diverged)

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        return {
            "body_error": self.errors[0],
            "anchor_error": self.errors[1],
            "joint_error": self.errors[2],
            "ends_per_minute": self.lost * (60.0 / self.dt),
            **self.playhead.stats(),
        }

    def _frame(self) -> Frame:
        """Return the frame that each env should reach by the end of the control step."""
        return self.motions.frame(self.playhead.index)
