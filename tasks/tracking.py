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

from .robots import HIT, Legged, Rows, sines

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

    anchor_distance: Tensor  # from the clip's anchor to the robot's, in the world [m], [num_envs]
    offset: Tensor  # from the bodies to their targets [m], [num_envs, bodies, 3]
    half_angle: Tensor  # of the bodies to their targets, then of the anchor to the clip's [rad], [num_envs, bodies + 1]
    joint_pos: Tensor  # rad, [num_envs, joints]


def quat_pairs(a: Float[Tensor, "*batch 4"], b: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 16"]:
    """Return the products of each component of `a` with each component of `b`."""
    return (a[..., :, None] * b[..., None, :]).flatten(-2)


def pair_matrix(function: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> Float[Tensor, "16 size"]:
    """Return the matrix with function(a, b) = quat_pairs(a, b) @ matrix, for a function linear in both quaternions.

    One matrix product replaces the kernels of a formula.
    """
    unit = torch.eye(4)
    return function(unit.repeat_interleave(4, dim=0), unit.repeat(4, 1)).to(device)


def frame_axes(a: Float[Tensor, "*batch 4"], b: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 9"]:
    """Return the x, y and z axes of a frame whose orientation is a = b."""
    axes = torch.eye(4)[1:, None].expand(3, *a.shape)
    return torch.cat([quat_multiply(quat_multiply(a, axis), quat_conjugate(b))[..., 1:] for axis in axes], dim=-1)


def inverse_yaw(a: Float[Tensor, "*batch 4"], b: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 2"]:
    """Return half the sine and half the cosine of the yaw of the inverse of a rotation a = b."""
    (aw, ax, ay, az), (bw, bx, by, bz) = a.unbind(-1), b.unbind(-1)
    return torch.stack([ax * by - aw * bz, 0.5 * (aw * bw + ax * bx - ay * by - az * bz)], dim=-1)


class TrackingTask(Legged[TrackingConfig]):
    """Robot that tracks motion clips; subclasses set the robot and the bodies to compare.

    Observations, targets, rewards, terminations and initial states match mjlab 1.6's tracking task, which is based on
    BeyondMimic (arXiv 2508.08241). Differences: a self-collision in the last physics step counts for the whole control
    step; encoder biases are drawn per episode; start orientations are rotated about a random axis, not by three angles;
    the critic observes bodies relative to the clip's anchor, not the robot's. `task.randomize=true` randomises pushes
    (horizontal), friction and centres of mass.

    `task.clips` lists the clips: names in tasks/assets/motions, or paths of .npz files (docs/motion.md#clips). Each env
    tracks a clip frame by frame. At the end of a clip, `reset` (subclasses must call it) moves the robot to another
    frame and the episode continues, as in mjlab; `final_obs` of that step has the clip's last frame.

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
    sources: ClassVar = {
        **Legged.sources,
        "ref_joint_pos": "clip joint positions",
        "ref_joint_vel": "clip joint velocities",
        "anchor_pos": "simulator position",
        "anchor_axes": "clip orientation",
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
        # Limits of the height error of each body, then of half the anchor's tilt error
        limits = dict.fromkeys(self.bodies, math.inf) | dict.fromkeys(self.ends, cfg.end_height_limit)
        limits[self.anchor] = min(limits[self.anchor], cfg.anchor_height_limit)
        self.limits = torch.tensor([*limits.values(), 0.5 * cfg.anchor_tilt_limit], device=device)
        self.self_contact = body.sensor("self_contact") if cfg.costs.self_contact else None

        terms = cfg.terms
        # exp(-squared error / sigma squared) = exp(sharpness x (error / factor) squared)
        factors = self._factors() if cfg.reward == "beyondmimic" else {}
        sharpness = [factors.get(name, 1.0) / term.sigma for name, term in terms.items()]
        self.sharpness = -torch.tensor(sharpness, device=device).square_()[:, None]
        weights = {name: term.weight for name, term in terms.items()}
        weights |= {"action_rate": cfg.costs.action_rate, "joint_limits": cfg.costs.joint_limits}
        if cfg.costs.self_contact:
            weights["self_contact"] = cfg.costs.self_contact * cfg.decimation
        self.terms, self.weights = tuple(weights), self.dt * torch.tensor([*weights.values()], device=device)[:, None]

        self._allocate_reset_values()
        self.self_hit = torch.zeros(num, device=device)  # 1.0 for a contact of the robot with itself
        self.to_product, self.to_difference = pair_matrix(quat_multiply, device), pair_matrix(quat_difference, device)
        self.to_axes, self.to_inverse_yaw = pair_matrix(frame_axes, device), pair_matrix(inverse_yaw, device)
        # Rotations about z: vector @ matrix, and quaternion @ matrix
        turn_vector = "cos sin 0  -sin cos 0  0 0 1"
        turn_quat = "cos/2 0 0 sin/2  0 cos/2 sin/2 0  0 -sin/2 cos/2 0  -sin/2 0 0 cos/2"
        self.turn_sines = sines(f"{turn_vector} {turn_quat}", device)
        self.errors = torch.zeros(3, num, device=device)  # errors of bodies [m], anchor [m] and joints [rad]
        self.lost = torch.zeros(num, dtype=torch.bool, device=device)  # envs whose robot is too far from its clip

    def _allocate_reset_values(self) -> None:
        """Allocate what `reset` draws or zeroes in one tensor, and the bounds of all that it draws."""
        noise, joints = self.cfg.start_noise, len(self.pose)
        half_turn = [0.5 * angle for angle in noise.rot]
        bounds = [*noise.pos, *half_turn, *noise.lin_vel, *noise.ang_vel, *[noise.joint_pos] * joints]
        bound = torch.tensor([*bounds, *[self.cfg.encoder_bias] * joints, *[0.0] * joints], device=self.device)
        self.reset_bounds = -bound, bound
        # Before its views: a checkpoint restores tensors in this order, and an old one has only the views.
        self.reset_values = torch.zeros(self.num_envs, 2 * joints, device=self.device)
        self.encoder_bias, self.last_actions = self.reset_values.split(joints, dim=1)

    def _factors(self) -> dict[str, float]:
        """Return the factors that make the norms of `_beyondmimic` root mean squares, and half angles angles."""
        mean = 1.0 / math.sqrt(len(self.bodies))
        return {"anchor_ori": 2.0, "body_pos": mean, "body_ori": 2.0 * mean, "body_lin_vel": mean, "body_ang_vel": mean}

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        root, joints = self.root_index, len(self.pose)
        low, high = self.reset_bounds
        unit = self.random.uniform(0.0, 1.0, Playhead.draws + len(low))
        drawn = torch.lerp(low, high, unit[:, Playhead.draws :])
        pos, half_turn, lin_vel, ang_vel, joint_pos, values = drawn.split([3, 3, 3, 3, joints, 2 * joints], dim=1)
        torch.where(where[:, None], values, self.reset_values, out=self.reset_values)
        self.lost.masked_fill_(where, False)
        placed, start = self.playhead.begin(where, unit[:, : Playhead.draws])  # also envs whose clip has ended
        frame = self.motions.frame(start)
        half_angle = torch.linalg.vector_norm(half_turn, dim=1, keepdim=True)
        turn = torch.cat([half_angle.cos(), torch.sinc(half_angle / math.pi) * half_turn], dim=1)
        self.body.set_state(
            placed,
            root_pos=frame.body_pos[:, root] + pos,
            root_quat=quat_pairs(turn, frame.body_quat[:, root]) @ self.to_product,
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
        # Quaternions, and x and y axes in the world, of the clip's anchor and of the robot's bodies
        quat = torch.cat([frame.body_quat[:, None, anchor], self.followed.quat], dim=1)
        pairs = quat_pairs(quat, quat)
        xy_axes = (pairs @ self.to_axes[:, :6]).unflatten(2, (2, 3)).flatten(1, 2)
        # Matrices with the axes of the two anchors as columns: vectors @ matrix are the vectors in that frame.
        anchors = pairs[:, :: anchor + 1][:, :2]
        to_clip, to_robot = (anchors @ self.to_axes).unflatten(2, (3, 3)).mT.unbind(dim=1)
        from_clip = self.followed.pos - frame.body_pos[:, None, anchor]
        to_anchor = from_clip[:, anchor, None]  # from the clip's to the robot's
        clip = {
            "ref_joint_pos": frame.joint_pos,
            "ref_joint_vel": frame.joint_vel,
            # -to_anchor @ to_robot in one kernel
            "anchor_pos": torch.baddbmm(to_anchor, to_anchor, to_robot, beta=0.0, alpha=-1.0).flatten(1),
            "anchor_axes": (xy_axes[:, :2] @ to_robot).flatten(1),
        }
        own = {
            "lin_vel": self.lin_vel.data,
            "ang_vel": self.ang_vel.data,
            "joint_pos": body.joint_pos - self.pose,
            "joint_vel": body.joint_vel,
            "actions": self.actions,
        }
        privileged = {
            "body_pos": (from_clip @ to_clip).flatten(1),
            "body_axes": (xy_axes[:, 2:] @ to_clip).flatten(1),
        }
        return {
            "policy": {**clip, **own, "joint_pos": own["joint_pos"] + self.encoder_bias},
            "critic": {**clip, **privileged, **own},
        }

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        frame, now = self._frame(), BodyStates(*self.followed.state())
        method = self._beyondmimic if self.cfg.reward == "beyondmimic" else self._deepmimic
        terms = {**method(frame, now, self._errors(frame, now)), **self._costs()}
        values = torch.stack([terms[name] for name in self.terms])
        values[: len(self.sharpness)].square_().mul_(self.sharpness).exp_()
        return dict(zip(self.terms, values * self.weights, strict=True))

    def _errors(self, frame: Frame, now: BodyStates) -> Errors:
        """Compare the bodies with the clip's, moved to the x and y of the robot's anchor and rotated to its yaw."""
        anchor = self.anchor_index
        anchor_pos, clip_pos = now.pos[:, anchor], frame.body_pos[:, anchor]
        rotation = quat_pairs(frame.body_quat, now.quat) @ self.to_difference  # from the bodies to the clip's, world
        pairs = quat_pairs(rotation[:, anchor], rotation[:, anchor])
        sine, cosine = (pairs @ self.to_inverse_yaw).split(1, dim=1)  # of the yaw from the clip's anchor to the robot's
        phase, factor = self.turn_sines
        turn_vector, turn_quat = torch.addcmul(phase, torch.atan2(sine, cosine), factor).sin_().split([9, 16], dim=1)
        # offset = target - position; target = origin + turned (clip - clip's anchor)
        origin = torch.cat([anchor_pos[:, :2], clip_pos[:, 2:]], dim=1)[:, None]
        from_anchor = frame.body_pos - clip_pos[:, None]
        offset = torch.baddbmm(now.pos - origin, from_anchor, turn_vector.unflatten(1, (3, 3)), beta=-1.0)
        # from the bodies to their targets, then from the anchor to the clip's
        rotations = torch.cat([rotation @ turn_quat.unflatten(1, (4, 4)), rotation[:, anchor, None]], dim=1)
        half_angle = torch.atan2(torch.linalg.vector_norm(rotations[..., 1:], dim=2), rotations[..., 0].abs())
        joint_pos = frame.joint_pos - self.body.joint_pos
        torch.mean(torch.linalg.vector_norm(offset, dim=2), dim=1, out=self.errors[0])
        torch.linalg.vector_norm(clip_pos - anchor_pos, dim=1, out=self.errors[1])
        torch.mean(joint_pos.abs(), dim=1, out=self.errors[2])
        return Errors(self.errors[1], offset, half_angle, joint_pos)

    def _beyondmimic(self, frame: Frame, now: BodyStates, errors: Errors) -> dict[str, Float[Tensor, " envs"]]:
        """Return the error of each term of `BeyondMimicConfig` / its factor (`_factors`)."""
        norm, vel = torch.linalg.vector_norm, (frame.body_vel - now.vel).unflatten(2, (2, 3))
        ang_vel, lin_vel = norm(vel, dim=(1, 3)).unbind(dim=1)
        return {
            "anchor_pos": errors.anchor_distance,
            "anchor_ori": errors.half_angle[:, -1],
            "body_pos": norm(errors.offset, dim=(1, 2)),
            "body_ori": norm(errors.half_angle[:, :-1], dim=1),
            "body_lin_vel": lin_vel,
            "body_ang_vel": ang_vel,
        }

    def _deepmimic(self, frame: Frame, now: BodyStates, errors: Errors) -> dict[str, Float[Tensor, " envs"]]:
        """Return the error of each term of `DeepMimicConfig`."""
        body, root, norm, spin = self.body, self.root_index, torch.linalg.vector_norm, math.sqrt(SPIN)
        pos = norm(frame.body_pos[:, root] - now.pos[:, root], dim=1)
        lin_vel = norm(frame.body_lin_vel[:, root] - body.root_lin_vel, dim=1)
        ang_vel = norm(frame.body_ang_vel[:, root] - body.root_ang_vel, dim=1)
        return {
            "joint_pos": norm(errors.joint_pos, dim=1),
            "joint_vel": norm(frame.joint_vel - body.joint_vel, dim=1),
            "root_pose": torch.hypot(pos, spin * quat_angle(frame.body_quat[:, root], now.quat[:, root])),
            "root_vel": torch.hypot(lin_vel, spin * ang_vel),
            "end_pos": norm(errors.offset.index_select(1, self.end_index), dim=(1, 2)),
        }

    def _costs(self) -> dict[str, Float[Tensor, " envs"]]:
        """Return the unweighted costs of `CostConfig`."""
        costs = {"action_rate": self.action_change(), "joint_limits": self.beyond_limits()}
        if self.self_contact is not None:
            force = torch.linalg.vector_norm(self.self_contact.data[:, 1:], dim=1)
            costs["self_contact"] = torch.gt(force, HIT, out=self.self_hit)
        return costs

    def terminated(self) -> Bool[Tensor, " envs"]:
        anchor, frame = self.anchor_index, self._frame()
        height = frame.body_pos[..., 2] - self.followed.pos[..., 2]
        # The z component of the up axis of a quaternion is 1 - 2 (x^2 + y^2).
        xy, clip_xy = self.followed.quat[:, anchor, 1:3], frame.body_quat[:, anchor, 1:3]
        half_tilt = torch.addcmul(xy.square(), clip_xy, clip_xy, value=-1.0).sum(dim=1, keepdim=True)
        return torch.any(torch.cat([height, half_tilt], dim=1).abs_() > self.limits, dim=1, out=self.lost)

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
