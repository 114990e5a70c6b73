"""Motion clips on the device at the control rate, and sampling of start frames."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpusim_rl.env.clip import Array, Clip
from gpusim_rl.env.robot_clip import load_for
from gpusim_rl.env.stateful import Stateful
from gpusim_rl.errors import ConfigError, did_you_mean
from gpusim_rl.files.budgets import CLIP_BYTES, RESAMPLED_BYTES, RESAMPLED_RATIO
from gpusim_rl.files.paths import assets_dir, from_home
from gpusim_rl.sim import Scene

Starts = Literal["adaptive", "uniform", "first"]
"""Sampling of start frames: more often where episodes fail, uniformly over all frames, or each clip's first frame."""
FORGETTING = 0.001  # weight of a control step in the running mean of failures
FLOOR = 0.1  # failures per control step added to the running means, spread over all bins
PARTS = 2**24  # resolution of probabilities; u * n stays below n for any float32 u < 1 and n up to this
STRAIGHT = 1e-4  # angle between two quaternions [rad] below which interpolation is linear


def read_clips(names: Sequence[str], scene: Scene, robot: str, bodies: Sequence[str]) -> dict[str, Clip]:
    """Read clips by name for an articulation; raise ConfigError if one is missing or belongs to another robot."""
    return {name: load_for(clip_file(name), scene, robot, bodies) for name in names}


def clip_file(name: str) -> Path:
    """Return the path of a shipped clip by its name, or of a `.npz` file; raise ConfigError for an unknown name."""
    shipped = {path.stem: path for path in sorted((assets_dir() / "motions").glob("*.npz"))}
    if not name.endswith(".npz") and name not in shipped:
        hint = f"{did_you_mean(name, list(shipped))} Available: {', '.join(shipped) or 'none'}, or path/to/clip.npz"
        raise ConfigError(f"no motion clip {name!r} in tasks/assets/motions", hint=hint)
    return shipped.get(name) or from_home(name)


def resampled(clip: Clip, rate: float) -> Clip:
    """Resample a clip to another rate [Hz], quaternions by slerp; raise ConfigError if too short or too large."""
    if clip.fps == rate:
        return clip
    arrays = [value for field in fields(clip) if isinstance(value := getattr(clip, field.name), np.ndarray)]
    size, frames = sum(value.nbytes for value in arrays), clip.seconds * rate + 1.0
    limit = min(CLIP_BYTES, max(RESAMPLED_BYTES, RESAMPLED_RATIO * size))
    if frames * size / len(clip.joint_pos) > limit:
        problem = f"resampled clip too large: {frames:.3g} frames ({clip.seconds:.3g} s) exceed {limit >> 20} MB"
        raise ConfigError(problem, hint="Check the clip's fps, or try a shorter clip")
    times = np.arange(int(frames + 1e-6)) * (clip.fps / rate)
    before = np.minimum(times.astype(int), len(clip.joint_pos) - 2)
    share = times - before

    def linear(values: Array) -> Array:
        t = share.reshape(-1, *[1] * (values.ndim - 1))
        return ((1.0 - t) * values[before] + t * values[before + 1]).astype(np.float32)

    quat = _slerp(clip.body_quat_w[before], clip.body_quat_w[before + 1], share[:, None, None])
    others = ("joint_pos", "joint_vel", "body_pos_w", "body_lin_vel_w", "body_ang_vel_w")
    return replace(clip, fps=rate, body_quat_w=quat, **{name: linear(getattr(clip, name)) for name in others})


def _slerp(a: Array, b: Array, share: np.ndarray) -> Array:
    cosine = (a.astype(float) * b).sum(axis=-1, keepdims=True)
    b = np.where(cosine < 0.0, -b, b)
    angle = np.arccos(np.abs(cosine).clip(max=1.0))
    straight, sine = angle < STRAIGHT, np.sin(np.maximum(angle, STRAIGHT))
    weight_a = np.where(straight, 1.0 - share, np.sin((1.0 - share) * angle) / sine)
    weight_b = np.where(straight, share, np.sin(share * angle) / sine)
    quat = weight_a * a + weight_b * b
    return (quat / np.linalg.norm(quat, axis=-1, keepdims=True)).astype(np.float32)


class Frame(NamedTuple):
    """Motion frame of each env: joints and bodies in the clips' order, bodies in the world frame, quaternions wxyz."""

    joint_pos: Float[Tensor, "envs joints"]
    joint_vel: Float[Tensor, "envs joints"]
    body_pos: Float[Tensor, "envs bodies 3"]
    body_quat: Float[Tensor, "envs bodies 4"]
    body_lin_vel: Float[Tensor, "envs bodies 3"]
    body_ang_vel: Float[Tensor, "envs bodies 3"]
    body_vel: Float[Tensor, "envs bodies 6"]  # angular, then linear velocity


class Motions:
    """Concatenated frames of clips, resampled to `rate` [Hz]; not checkpointed. Raises errors like `resampled`."""

    def __init__(self, clips: Mapping[str, Clip], rate: float, device: torch.device) -> None:
        first = next(iter(clips.values()))
        self.rate, self._joints, self._bodies = rate, len(first.joint_names), len(first.body_names)
        rows = [_rows(name, clip, rate) for name, clip in clips.items()]
        self.lengths = [len(each) for each in rows]
        self.last = (torch.tensor(self.lengths).cumsum(0) - 1).to(device)  # last frame of each clip
        self._frames = torch.from_numpy(np.concatenate(rows)).to(device)

    def __len__(self) -> int:
        return len(self._frames)

    def frame(self, index: Int[Tensor, " envs"]) -> Frame:
        """Return the frame of each env by its index in the concatenated clips."""
        joints, bodies = self._joints, self._bodies
        joint_rows, body_rows = self._frames.index_select(0, index).split([2 * joints, 13 * bodies], dim=1)
        pos, quat, vel = body_rows.unflatten(1, (bodies, 13)).split([3, 4, 6], dim=2)
        joint_pos, joint_vel = joint_rows.split(joints, dim=1)
        return Frame(joint_pos, joint_vel, pos, quat, vel[..., 3:], vel[..., :3], vel)


def _rows(name: str, clip: Clip, rate: float) -> Array:
    try:
        clip = resampled(clip, rate)
    except ConfigError as error:
        raise error.within(f"motion clip {name!r} at {rate:g} Hz") from None
    bodies = np.concatenate([clip.body_pos_w, clip.body_quat_w, clip.body_ang_vel_w, clip.body_lin_vel_w], axis=2)
    return np.concatenate([clip.joint_pos, clip.joint_vel, bodies.reshape(len(clip.joint_pos), -1)], axis=1)


class Playhead(Stateful):
    """Current frame of each env, and sampling of start frames.

    Adaptive sampling follows BeyondMimic (arXiv 2508.08241): bins of about a second are drawn in proportion to the mean
    number of episodes that fail in them. The last frame of a clip is never a start frame.
    """

    draws = 2  # random numbers per start

    def __init__(self, motions: Motions, num: int, starts: Starts) -> None:
        device, begins, sizes = motions.last.device, [], []
        for first, length in zip(itertools.accumulate([0, *motions.lengths]), motions.lengths, strict=False):
            last = first + length - 1
            bins = 1 if starts == "first" else max(1, round((last - first) / motions.rate))
            edges = [first + round(i * (last - first) / bins) for i in range(bins + 1)]
            begins += edges[:-1]
            sizes += [1] if starts == "first" else [b - a for a, b in itertools.pairwise(edges)]
        self._starts: Starts = starts
        self._bins = torch.tensor([begins, sizes], device=device).T.contiguous()  # first frame and size of each bin
        self._begins, self._sizes = self._bins.unbind(dim=1)
        every_frame = torch.arange(len(motions), device=device)
        bins = torch.bucketize(every_frame, self._begins.contiguous(), right=True) - 1
        last = motions.last.index_select(0, torch.bucketize(every_frame, motions.last))
        self._places = torch.stack([bins, last], dim=1)  # bin of each frame, and last frame of its clip
        self.index = torch.ones(num, dtype=torch.int64, device=device)  # frame to reach by the end of the control step
        self.failures = torch.zeros(len(begins), device=device)  # mean failed episodes per control step, by bin
        self._now = torch.zeros_like(self.failures)
        self._chances = torch.zeros_like(self.failures)
        self._ends = torch.zeros_like(self._begins)  # cumulative chances / `PARTS`
        self.over = torch.zeros(num, dtype=torch.bool, device=device)  # envs whose clip has ended
        self._set_chances()

    def restored(self) -> None:
        """Clamp the frame indices to the current clips, because the checkpoint's clips may have been longer."""
        self.index.clamp_(max=len(self._places) - 1)
        self._set_chances()

    def chances(self) -> Float[Tensor, " bins"]:
        """Return the probability that an episode starts in each bin."""
        return self._chances

    def _set_chances(self) -> None:
        if self._starts == "first":
            weights = torch.ones_like(self.failures)
        elif self._starts == "uniform":
            weights = self._sizes.float()
        else:
            weights = self.failures + FLOOR / len(self.failures)
        torch.div(weights, weights.sum(), out=self._chances)
        # integers: CUDA's cumsum of floats is nondeterministic
        torch.cumsum((self._chances * PARTS).long(), dim=0, out=self._ends)

    def begin(self, where: Bool[Tensor, " envs"], unit: Float[Tensor, "envs 2"]) -> tuple[Tensor, Tensor]:
        """Restart masked envs and those whose clip has ended; return their mask and start frames, drawn by `unit`."""
        chosen = torch.bucketize((unit[:, 0] * self._ends[-1]).long(), self._ends, right=True)
        begin, size = self._bins.index_select(0, chosen).unbind(dim=1)
        start = begin + (unit[:, 1] * size).long()
        where = where | self.over
        torch.where(where, start + 1, self.index, out=self.index)
        self.over.zero_()
        return where, start

    def advance(self, failed: Bool[Tensor, " envs"], diverged: Bool[Tensor, " envs"]) -> Bool[Tensor, " envs"]:
        """Count failed episodes, except diverged ones, and advance by a frame; return the envs whose clip has ended."""
        # failed & ~diverged in one kernel
        counted = torch.gt(failed, diverged, out=torch.empty(len(failed), device=failed.device))
        bins, last = self._places.index_select(0, self.index).unbind(dim=1)
        now = self._now.zero_().index_add_(0, bins, counted)
        self.failures.lerp_(now, FORGETTING)
        if self._starts == "adaptive":
            self._set_chances()
        torch.ge(self.index, last, out=self.over)
        torch.minimum(self.index + 1, last, out=self.index)
        return self.over

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        """Return the normalised entropy of the start bins (1 = uniform) and the index of the most likely bin."""
        chances = self.chances()
        single = len(chances) == 1
        entropy = chances.sum() if single else torch.special.entr(chances).sum() / math.log(len(chances))
        top = chances.argmax().float()
        return {"start_entropy": entropy.expand_as(self.index), "start_top_bin": top.expand_as(self.index)}
