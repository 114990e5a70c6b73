"""Base of the `<Robot>Tracking` tasks: robots that track motion clips."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import TaskConfig, Terms
from gpusim_rl.env.math import (
    quat_angle,
    quat_conjugate,
    quat_difference,
    quat_multiply,
    quat_rotate,
    quat_rotate_inverse,
    quat_yaw,
)
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


class Poses(NamedTuple):
    """Actual or target body poses: positions [m] and quaternions, [num_envs, bodies, 3 or 4]."""

    pos: Tensor
    quat: Tensor


class TrackingTask(Legged[TrackingConfig]):
    """Robot that tracks motion clips; subclasses set the robot and the bodies to compare.

    Observations, targets, rewards, terminations and initial states match mjlab 1.6's tracking task, which is based on
    BeyondMimic (arXiv 2508.08241). Differences: a self-collision in the last physics step counts for the whole control
    step; encoder biases are drawn per episode; start orientations are rotated about a random axis, not by three angles;
    the critic observes bodies relative to the clip's anchor, not the robot's. `task.randomize=true` randomises pushes
    (horizontal), friction and centres of mass.

    `task.clips` lists the clips: names in tasks/assets/motions, or paths of .npz files (docs/motion.md#clips). Each env
    tracks a clip frame by frame. At the end of the clip the robot is reset to another frame and the episode continues,
    as in mjlab; `final_obs` of that step has the new frame's joints and the old frame's bodies.

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
        self.self_contact = body.sensor("self_contact") if cfg.costs.self_contact else None

        self.soft_limits = self.mid - self.half_range, self.mid + self.half_range
        terms = cfg.terms
        self.sharpness = -torch.tensor([term.sigma for term in terms.values()], device=device).pow_(-2.0)[:, None]
        costs = [cfg.costs.action_rate, cfg.costs.joint_limits]
        costs += [cfg.costs.self_contact * cfg.decimation] if cfg.costs.self_contact else []
        weights = [*(term.weight for term in terms.values()), *costs]
        self.weights = self.dt * torch.tensor(weights, device=device)[:, None]
        self.terms = (*terms, "action_rate", "joint_limits", "self_contact")[: len(weights)]

        noise = cfg.start_noise
        bounds = [*noise.pos, *noise.rot, *noise.lin_vel, *noise.ang_vel, *[noise.joint_pos] * len(self.pose)]
        self.start_noise = torch.tensor(bounds, device=device)
        self.first_axes = torch.eye(3, device=device)[:2]
        self.errors = torch.zeros(3, num, device=device)  # errors of bodies [m], anchor [m] and joints [rad]
        self.lost = torch.zeros(num, dtype=torch.bool, device=device)  # envs whose robot is too far from its clip

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        everyone, bias = where[:, None], self.cfg.encoder_bias
        self._begin(where)
        drawn = self.random.uniform(-bias, bias, len(self.pose))
        torch.where(everyone, drawn, self.encoder_bias, out=self.encoder_bias)
        self.last_actions.masked_fill_(everyone, 0.0)
        self.lost.masked_fill_(where, False)

    def _begin(self, where: Bool[Tensor, " envs"]) -> None:
        """Reset masked envs to frames of the clips, with noise."""
        root, joints, draws = self.root_index, len(self.pose), Playhead.draws
        unit = self.random.uniform(0.0, 1.0, draws + len(self.start_noise))
        frame = self.motions.frame(self.playhead.begin(where, unit[:, :draws]))
        noise = torch.lerp(-self.start_noise, self.start_noise, unit[:, draws:])
        pos, turn, lin_vel, ang_vel, joint_pos = noise.split([3, 3, 3, 3, joints], dim=1)
        half = 0.5 * torch.linalg.vector_norm(turn, dim=1, keepdim=True)
        turn = torch.cat([half.cos(), 0.5 * torch.sinc(half / math.pi) * turn], dim=1)
        self.body.set_state(
            where,
            root_pos=frame.body_pos[:, root] + pos,
            root_quat=quat_multiply(turn, frame.body_quat[:, root]),
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
        body, frame = self.body, self._frame()
        pos, quat = self.followed.pos, self.followed.quat
        at, at_clip = pos[:, self.anchor_index], frame.body_pos[:, self.anchor_index]
        turned, turned_clip = quat[:, self.anchor_index], frame.body_quat[:, self.anchor_index]
        clip = {
            "ref_joint_pos": frame.joint_pos,
            "ref_joint_vel": frame.joint_vel,
            "anchor_pos": quat_rotate_inverse(turned, at_clip - at),
            "anchor_axes": self._axes(quat_multiply(quat_conjugate(turned), turned_clip)),
        }
        own = {
            "lin_vel": self.lin_vel.data,
            "ang_vel": self.ang_vel.data,
            "joint_pos": body.joint_pos - self.pose,
            "joint_vel": body.joint_vel,
            "actions": self.actions,
        }
        turned_clip = turned_clip[:, None]
        privileged = {
            "body_pos": quat_rotate_inverse(turned_clip, pos - at_clip[:, None]).flatten(1),
            "body_axes": self._axes(quat_multiply(quat_conjugate(turned_clip).expand_as(quat), quat)).flatten(1),
        }
        return {
            "policy": {**clip, **own, "joint_pos": own["joint_pos"] + self.encoder_bias},
            "critic": {**clip, **privileged, **own},
        }

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        frame, now = self._frame(), Poses(self.followed.pos, self.followed.quat)
        squared = self._beyondmimic if self.cfg.reward == "beyondmimic" else self._deepmimic
        terms = {**squared(frame, now, self._targets(frame, now)), **self._costs()}
        values = torch.stack([terms[name] for name in self.terms])
        values[: len(self.sharpness)].mul_(self.sharpness).exp_()
        return dict(zip(self.terms, values * self.weights, strict=True))

    def _away(self, frame: Frame, now: Poses, target: Poses) -> tuple[Tensor, Tensor, Tensor]:
        """Return squared distances [m2] of bodies from targets and of the anchor from the clip, and joint errors [rad].

        Also update `errors`.
        """
        away = (target.pos - now.pos).square().sum(dim=2)
        from_clip = (frame.body_pos[:, self.anchor_index] - now.pos[:, self.anchor_index]).square().sum(dim=1)
        joints = frame.joint_pos - self.body.joint_pos
        torch.mean(away.sqrt(), dim=1, out=self.errors[0])
        torch.sqrt(from_clip, out=self.errors[1])
        torch.mean(joints.abs(), dim=1, out=self.errors[2])
        return away, from_clip, joints

    def _beyondmimic(self, frame: Frame, now: Poses, target: Poses) -> dict[str, Float[Tensor, " envs"]]:
        """Return the squared error of each term of `BeyondMimicConfig`."""
        away, from_clip, _ = self._away(frame, now, target)
        anchors = (frame.body_quat[:, self.anchor_index, None], now.quat[:, self.anchor_index, None])
        turned = (torch.cat(pair, dim=1) for pair in zip((target.quat, now.quat), anchors, strict=True))
        turn = quat_angle(*turned).square_()  # squared angles of the bodies, and of the anchor in the world
        velocities = torch.stack([self.followed.lin_vel, self.followed.ang_vel])
        off = torch.stack([frame.body_lin_vel, frame.body_ang_vel]).sub_(velocities)
        lin_vel, ang_vel = off.square_().sum(dim=3).mean(dim=2)
        return {
            "anchor_pos": from_clip,
            "anchor_ori": turn[:, -1],
            "body_pos": away.mean(dim=1),
            "body_ori": turn[:, :-1].mean(dim=1),
            "body_lin_vel": lin_vel,
            "body_ang_vel": ang_vel,
        }

    def _deepmimic(self, frame: Frame, now: Poses, target: Poses) -> dict[str, Float[Tensor, " envs"]]:
        """Return the squared error of each term of `DeepMimicConfig`."""
        body, root = self.body, self.root_index
        away, _, joints = self._away(frame, now, target)
        turn = quat_angle(frame.body_quat[:, root], now.quat[:, root]).square()
        spin = (frame.body_ang_vel[:, root] - body.root_ang_vel).square().sum(dim=1)
        return {
            "joint_pos": joints.square().sum(dim=1),
            "joint_vel": (frame.joint_vel - body.joint_vel).square().sum(dim=1),
            "root_pose": (frame.body_pos[:, root] - now.pos[:, root]).square().sum(dim=1) + SPIN * turn,
            "root_vel": (frame.body_lin_vel[:, root] - body.root_lin_vel).square().sum(dim=1) + SPIN * spin,
            "end_pos": away.index_select(1, self.end_index).sum(dim=1),
        }

    def _costs(self) -> dict[str, Float[Tensor, " envs"]]:
        """Return the unweighted costs of `CostConfig`."""
        change = (self.actions - self.last_actions).square().sum(dim=1)
        costs = {"action_rate": change, "joint_limits": self.beyond_limits()}
        if self.self_contact is not None:
            force = torch.linalg.vector_norm(self.self_contact.data[:, 1:], dim=1)
            costs["self_contact"] = (force > HIT).float()
        return costs

    def terminated(self) -> Bool[Tensor, " envs"]:
        cfg, anchor, frame = self.cfg, self.anchor_index, self._frame()
        above = (frame.body_pos[..., 2] - self.followed.pos[..., 2]).abs_()
        tilt = _up(frame.body_quat[:, anchor]) - _up(self.followed.quat[:, anchor])
        lost = (above[:, anchor] > cfg.anchor_height_limit) | (tilt.abs_() > cfg.anchor_tilt_limit)
        far = (above.index_select(1, self.end_index) > cfg.end_height_limit).any(dim=1)
        return torch.logical_or(lost, far, out=self.lost)

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        self.last_actions.copy_(self.actions)
        over = self.playhead.advance(self.lost & done, self.sim.diverged)
        self._begin(over > done)  # over & ~done in one kernel

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

    def _targets(self, frame: Frame, now: Poses) -> Poses:
        """Return target poses: the clip's bodies at the x and y of the robot's anchor, rotated to its yaw."""
        anchor = self.anchor_index
        at, at_clip = now.pos[:, anchor], frame.body_pos[:, anchor]
        yaw = quat_yaw(quat_difference(now.quat[:, anchor], frame.body_quat[:, anchor]))
        zeros = torch.zeros_like(yaw)
        turn = torch.stack([(0.5 * yaw).cos(), zeros, zeros, (0.5 * yaw).sin()], dim=1)[:, None]
        origin = torch.cat([at[:, :2], at_clip[:, 2:]], dim=1)[:, None]
        pos = origin + quat_rotate(turn, frame.body_pos - at_clip[:, None])
        return Poses(pos, quat_multiply(turn.expand_as(frame.body_quat), frame.body_quat))

    def _axes(self, quat: Float[Tensor, "*batch 4"]) -> Float[Tensor, "*batch 6"]:
        """Return the x and y axes of frames with the given orientations."""
        return quat_rotate(quat[..., None, :], self.first_axes.expand(*quat.shape[:-1], 2, 3)).flatten(-2)


def _up(quat: Float[Tensor, "envs 4"]) -> Float[Tensor, " envs"]:
    """Return the z component of a frame's z axis, from 1 (upright) to -1."""
    return 1.0 - 2.0 * quat[:, 1:3].square().sum(dim=1)
