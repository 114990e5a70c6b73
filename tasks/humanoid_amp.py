"""HumanoidAMP: a humanoid imitates motion clips with adversarial motion priors."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.env.math import quat_multiply, quat_rotate
from gpusim_rl.env.motions import Motions, read_clips
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.settings.schema import Count, Positive
from gpusim_rl.sim import Scene, Sim

ENDS = ("right_hand", "left_hand", "right_foot", "left_foot")
SOLE_ENDS = ((-0.05, 0.0, -0.025), (0.145, 0.0, -0.025))  # m; centres of a sole's round ends, foot frame
ROUND = 0.025  # m; radius of a sole's round ends
# Sizes of the observation terms, in order.
PARTS = {"height": 1, "root_axes": 5, "lin_vel": 3, "ang_vel": 3, "joint_pos": 28, "joint_vel": 28, "ends": 12}


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanoidAMPConfig(TaskConfig):
    """Settings of HumanoidAMP; values are in cfg/task/HumanoidAMP.yaml."""

    clips: list[str]
    style_frames: Count
    termination_height: Positive
    target_speed: float | None
    speed_width: Positive

    def __post_init__(self) -> None:
        TaskConfig.__post_init__(self)
        if not self.clips:
            raise ConfigError(key="task.clips", expected="a motion clip", got=[], hint="Try task.clips=[humanoid_walk]")


class HumanoidAMP(Task[HumanoidAMPConfig]):
    """HumanoidAMP: imitate motion clips, as judged by a discriminator (`algo=amp`).

    Method, features and CUDA settings match IsaacGymEnvs' HumanoidAMP. `task.clips` lists the clips: names in
    tasks/assets/motions, or paths of .npz files for this robot, including Isaac Lab's.

    Action space: 28 numbers in [-1, 1], joint position targets around the upright pose with bent elbows and knees; an
    action of 1 reaches 10 % beyond the joint's farther limit.

    Observation space: in the heading frame, the world frame rotated about z to the pelvis's heading.
    | num   | name      | observation                                                             | unit  |
    |-------|-----------|-------------------------------------------------------------------------|-------|
    | 0     | height    | height of the pelvis                                                    | m     |
    | 1-5   | root_axes | x axis of the pelvis (without y, which is 0), z axis                    | -     |
    | 6-8   | lin_vel   | velocity of the pelvis                                                  | m/s   |
    | 9-11  | ang_vel   | angular velocity of the pelvis                                          | rad/s |
    | 12-39 | joint_pos | joint positions                                                         | rad   |
    | 40-67 | joint_vel | joint velocities                                                        | rad/s |
    | 68-79 | ends      | right hand, left hand, right foot, left foot, relative to the pelvis    | m     |

    The `style` group, for the discriminator, with `style_frames=2`; an episode's first history comes from the clip:
    | num    | name   | observation                               | unit     |
    |--------|--------|-------------------------------------------|----------|
    | 0-79   | before | the numbers above, a control step earlier | as above |
    | 80-159 | now    | the numbers above                         | as above |

    The `reference` group, for the discriminator, at a random frame of the clips, redrawn every control step:
    | num    | name   | observation                               | unit     |
    |--------|--------|-------------------------------------------|----------|
    | 0-159  | style  | as `style`                                | as above |

    Reward term: `speed`, exp(-(speed - target_speed)^2 / speed_width^2), of the pelvis along its heading. Start: a
    random frame of the clips with a random heading, raised if a sole penetrates the ground. Termination: the pelvis is
    below `termination_height`.
    """

    Config = HumanoidAMPConfig
    units: ClassVar = {
        "height": "m",
        "root_axes": "-",
        "lin_vel": "m/s",
        "ang_vel": "rad/s",
        "joint_pos": "rad",
        "joint_vel": "rad/s",
        "ends": "m",
    }
    sources: ClassVar = {
        "height": "simulator height",
        "lin_vel": "simulator velocity",
        "joint_pos": "joint positions",
        "joint_vel": "joint velocities",
    }

    @classmethod
    def scene(cls, cfg: HumanoidAMPConfig) -> Scene:
        scene = Scene(cfg.physics_hz, integrator="implicitfast")
        scene.add_ground()
        scene.add("humanoid", assets_dir() / "humanoid_28.xml")
        return scene

    def __init__(self, cfg: HumanoidAMPConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = robot = sim.articulation("humanoid")
        self.ends = robot.bodies(ENDS)
        self.num_actions = len(robot.actuator_names)
        low, high = robot.joint_limits.unbind(dim=1)
        bent = {"elbow": -0.3, "knee": 0.15, "hip_y": -0.075, "ankle_y": -0.075}  # rad
        pose = [next((angle for key, angle in bent.items() if key in name), 0.0) for name in robot.joint_names]
        self.pose = torch.tensor(pose, device=self.device)
        self.reach = 1.1 * torch.maximum(self.pose - low, high - self.pose)
        self.axes = torch.eye(3, device=self.device)[None, ::2]  # x and z

        clips = read_clips(cfg.clips, sim.scene, "humanoid", (robot.body_names[0], *ENDS))
        motions = Motions(clips, cfg.control_hz, self.device)
        past = cfg.style_frames - 1
        places = [
            place
            for end, length in zip(itertools.accumulate(motions.lengths), motions.lengths, strict=True)
            for place in range(end - length + past, end)
        ]
        if not places:
            longest = f"at most {max(motions.lengths)} (number of frames in the longest clip at {cfg.control_hz:g} Hz)"
            raise ConfigError(key="task.style_frames", expected=longest, got=cfg.style_frames)
        newest = torch.tensor(places, device=self.device)
        # Features of all frames; `histories` has the rows of each start frame and of the frames before it.
        clip = motions.frame(torch.arange(len(motions), device=self.device))
        joint_pos = clip.joint_pos.clamp(low, high)
        bodies = clip.body_pos, clip.body_quat, clip.body_lin_vel, clip.body_ang_vel
        pos, quat, lin_vel, ang_vel = (x[:, 0] for x in bodies)
        ends = clip.body_pos[:, 1:]
        self.features = self._features(pos, quat, lin_vel, ang_vel, joint_pos, clip.joint_vel, ends)
        self.histories = newest[:, None] + torch.arange(-past, 1, device=self.device)
        soles = torch.tensor(SOLE_ENDS, device=self.device)[None, None]
        soles = ends[:, 2:, None] + quat_rotate(clip.body_quat[:, 3:, None], soles)
        in_ground = (ROUND - soles[..., 2]).flatten(1).amax(dim=1, keepdim=True).clamp(min=0.0)
        start = torch.zeros_like(pos[:, :2]), pos[:, 2:] + in_ground, quat, lin_vel, ang_vel, joint_pos, clip.joint_vel
        self.starts = torch.cat(start, dim=1).index_select(0, newest)
        self.start_sizes = [3, 4, 3, 3, len(pose), len(pose)]
        ahead = _terms(self.features)["lin_vel"][:, 0].mean()
        self.target_speed = ahead if cfg.target_speed is None else torch.full_like(ahead, cfg.target_speed)

        self.style = torch.zeros(self.num_envs, cfg.style_frames, self.features.shape[1], device=self.device)
        self.reference = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)  # row of `histories`
        self.speed = torch.zeros(self.num_envs, device=self.device)  # m/s

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        place, half_yaw = self._random_place(), self.random.uniform(-0.5 * math.pi, 0.5 * math.pi, 1)
        zeros = torch.zeros_like(half_yaw)
        turn = torch.cat([half_yaw.cos(), zeros, zeros, half_yaw.sin()], dim=1)
        pos, quat, lin_vel, ang_vel, *joints = self.starts.index_select(0, place).split(self.start_sizes, dim=1)
        self.robot.set_state(
            where,
            root_pos=pos,
            root_quat=quat_multiply(turn, quat),
            root_lin_vel=quat_rotate(turn, lin_vel),
            root_ang_vel=quat_rotate(turn, ang_vel),
            joint_pos=joints[0],
            joint_vel=joints[1],
        )
        torch.where(where[:, None, None], self._history(place), self.style, out=self.style)

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate(torch.addcmul(self.pose, action, self.reach))

    def observe(self) -> dict[str, Tensor | Terms]:
        groups = {"style": self.style.flatten(1), "reference": self._history(self.reference).flatten(1)}
        return {"policy": _terms(self.style[:, -1]), **groups}

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        forward = quat_rotate(self.robot.root_quat, self.axes[:, 0])
        ahead = torch.nn.functional.normalize(forward[:, :2])
        torch.sum(ahead * self.robot.root_lin_vel[:, :2], dim=1, out=self.speed)
        error = (self.speed - self.target_speed) / self.cfg.speed_width
        return {"speed": torch.exp(-error.square())}

    def terminated(self) -> Bool[Tensor, " envs"]:
        return self.robot.root_pos[:, 2] < self.cfg.termination_height

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        it = self.robot
        newest = self._features(
            it.root_pos, it.root_quat, it.root_lin_vel, it.root_ang_vel, it.joint_pos, it.joint_vel, self.ends.pos
        )
        self.style.copy_(torch.cat([self.style[:, 1:], newest[:, None]], dim=1))
        self.reference.copy_(self._random_place())

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        return {"speed": self.speed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.reference.clamp_(max=len(self.histories) - 1)  # the clips of the checkpoint may have been longer

    def _random_place(self) -> Int[Tensor, " envs"]:
        number = len(self.histories)
        return (self.random.uniform(0.0, 1.0, 1)[:, 0] * number).long().clamp_(max=number - 1)

    def _history(self, place: Int[Tensor, " envs"]) -> Float[Tensor, "envs frames features"]:
        """Return the features of a clip frame and of the frames before it, oldest first."""
        return self.features[self.histories.index_select(0, place)]

    def _features(
        self,
        pos: Float[Tensor, "rows 3"],
        quat: Float[Tensor, "rows 4"],
        lin_vel: Float[Tensor, "rows 3"],
        ang_vel: Float[Tensor, "rows 3"],
        joint_pos: Float[Tensor, "rows joints"],
        joint_vel: Float[Tensor, "rows joints"],
        ends: Float[Tensor, "rows ends 3"],
    ) -> Float[Tensor, "rows features"]:
        """Return the features (`PARTS`) of root, joints, hands and feet; the arguments are in the world frame."""
        axes = quat_rotate(quat[:, None], self.axes)
        vectors = torch.cat([axes, torch.stack([lin_vel, ang_vel], dim=1), ends - pos[:, None]], dim=1)
        c, s = torch.nn.functional.normalize(axes[:, 0, :2]).unsqueeze(1).unbind(dim=2)
        x, y, z = vectors.unbind(dim=2)
        # rotate to the heading frame; c and s are the heading's cosine and sine
        turned = torch.stack([c * x + s * y, c * y - s * x, z], dim=2).flatten(1)
        terms = pos[:, 2:], turned[:, :1], turned[:, 2:12], joint_pos, joint_vel, turned[:, 12:]
        return torch.cat(terms, dim=1)


def _terms(features: Float[Tensor, "rows features"]) -> Terms:
    return dict(zip(PARTS, features.split(list(PARTS.values()), dim=1), strict=True))
