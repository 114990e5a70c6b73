"""Tests of motion clips on the device: frames at the control rate, and start frames."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpusim_rl.env.clip import ISAAC_LAB, Clip, load, save
from gpusim_rl.env.motions import FLOOR, FORGETTING, Motions, Playhead, read_clips, resampled
from gpusim_rl.env.robot_clip import scene_of
from gpusim_rl.env.stateful import kept_tensors
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene

CPU = torch.device("cpu")


def spinning(frames: int = 61, fps: float = 30.0, rate: float = 2.0, start: float = 0.0) -> Clip:
    """Return a clip of two joints and two bodies 1 m apart that turn about z with `rate` [rad/s]."""
    t = np.arange(frames) / fps
    angle, zeros, ones = rate * t + start, np.zeros(frames), np.ones(frames)
    arm = np.stack([np.cos(angle), np.sin(angle), zeros], axis=1)
    quat = np.stack([np.cos(angle / 2), zeros, zeros, np.sin(angle / 2)], axis=1)
    speed = rate * np.stack([-np.sin(angle), np.cos(angle), zeros], axis=1)
    spin = rate * np.stack([zeros, zeros, ones], axis=1)
    values = {
        "joint_pos": np.stack([np.sin(3.0 * t), t], axis=1),
        "joint_vel": np.stack([3.0 * np.cos(3.0 * t), ones], axis=1),
        "body_pos_w": np.stack([0.0 * arm, arm], axis=1),
        "body_quat_w": np.stack([quat, quat], axis=1),
        "body_lin_vel_w": np.stack([0.0 * arm, speed], axis=1),
        "body_ang_vel_w": np.stack([spin, spin], axis=1),
    }
    names = {"joint_names": ("swing", "slide"), "body_names": ("base", "arm")}
    return Clip(fps=fps, **names, **{key: value.astype(np.float32) for key, value in values.items()})


def motions(*clips: Clip, rate: float = 50.0) -> Motions:
    return Motions({f"clip{i}": clip for i, clip in enumerate(clips)}, rate, CPU)


def test_resampling_keeps_the_motion() -> None:
    clip, exact = resampled(spinning(61, 30.0), 50.0), spinning(101, 50.0)
    assert clip.fps == 50.0 and len(clip.joint_pos) == 101
    for field in dataclasses.fields(Clip):
        value = getattr(clip, field.name)
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(value, getattr(exact, field.name), atol=1e-6 if "quat" in field.name else 4e-3)
    moved = np.diff(clip.body_pos_w, axis=0) * 50.0
    between = 0.5 * (clip.body_lin_vel_w[1:] + clip.body_lin_vel_w[:-1])
    np.testing.assert_allclose(moved, between, atol=0.5 * 4.0 / 30.0)  # linear between two frames, at 4 m/s^2
    assert resampled(exact, 50.0) is exact


def entries(clip: Clip) -> dict[str, np.ndarray]:
    return {field.name: np.asarray(getattr(clip, field.name)) for field in dataclasses.fields(Clip)}


HELD = {"held-twice": [2], "held-three-times": [3], "held-three-and-two": [3, 2], "first-once": [1, *[2] * 500]}


@pytest.mark.parametrize("rate", [25.0, 60.0])
@pytest.mark.parametrize("kind", [*HELD, "alternate-velocities-zero"])
def test_velocities_of_held_poses_follow_the_positions(tmp_path, capsys, kind, rate) -> None:
    """Isaac Lab's files hold each pose twice, so differences at half their rate would all be 0."""
    times = np.resize(HELD.get(kind, [1]), 60)
    true = spinning(60, 60.0 / times[1:].mean())
    held = {name: np.repeat(value, times, axis=0) for name, value in array_fields(true).items()}
    clip = dataclasses.replace(true, fps=60.0, **held)
    changes = np.diff(clip.joint_pos, axis=0, append=clip.joint_pos[-1:]) * 60.0
    if kind not in HELD:
        changes = clip.joint_vel * np.resize([[0.0], [2.0]], (len(clip.joint_pos), 1))
    arrays = entries(clip) | {"joint_vel": changes}
    np.savez(tmp_path / "x.npz", **{ISAAC_LAB.get(name, name): value for name, value in arrays.items()})
    read = resampled(load(tmp_path / "x.npz"), rate)
    assert "positions" in capsys.readouterr().err
    exact = resampled(true, rate)
    frames = min(len(read.joint_pos), len(exact.joint_pos))
    assert frames > 0.9 * len(exact.joint_pos)
    for name in ("joint_vel", "body_lin_vel_w", "body_ang_vel_w"):
        expected = getattr(exact, name)[:frames]
        np.testing.assert_allclose(getattr(read, name)[:frames], expected, atol=0.1 * np.abs(expected).max())


def test_standing_still_keeps_zero_velocities(tmp_path, capsys) -> None:
    clip = spinning(100, 60.0)
    times = np.where(np.arange(100) == 40, 30, 1)
    still = {k: np.repeat(v, times, axis=0) if v.ndim > 1 else v for k, v in entries(clip).items()}
    for name in ("joint_vel", "body_lin_vel_w", "body_ang_vel_w"):
        still[name][40:70] = 0.0
    np.savez(tmp_path / "x.npz", **still)
    read = load(tmp_path / "x.npz")
    assert np.array_equal(read.joint_vel, still["joint_vel"]) and not capsys.readouterr().err


def test_resampling_takes_the_shortest_rotation() -> None:
    clip = spinning(3, 10.0)
    flipped = clip.body_quat_w * np.array([1.0, -1.0, 1.0], dtype=np.float32)[:, None, None]
    expected = resampled(clip, 20.0).body_quat_w
    dot = (resampled(dataclasses.replace(clip, body_quat_w=flipped), 20.0).body_quat_w * expected).sum(axis=-1)
    np.testing.assert_allclose(np.abs(dot), 1.0, atol=1e-6)


def test_frames_of_all_clips_are_concatenated() -> None:
    first, second = spinning(11, 50.0), spinning(21, 50.0, rate=1.0, start=0.5)
    found = motions(first, second)
    assert len(found) == 32 and found.lengths == [11, 21] and found.last.tolist() == [10, 31]
    frame = found.frame(torch.tensor([3, 11, 31]))
    for row, (clip, number) in enumerate([(first, 3), (second, 0), (second, 20)]):
        assert frame.joint_pos[row].tolist() == clip.joint_pos[number].tolist()
        assert frame.joint_vel[row].tolist() == clip.joint_vel[number].tolist()
        for name in ("pos", "quat", "lin_vel", "ang_vel"):
            expected = getattr(clip, f"body_{name}_w")[number]
            assert getattr(frame, f"body_{name}")[row].tolist() == expected.tolist()


@pytest.fixture(scope="module")
def go1() -> Scene:
    return scene_of(assets_dir() / "go1" / "go1.xml")


TROT = assets_dir() / "motions" / "go1_trot.npz"


def test_clips_are_read_in_the_robots_order(go1, tmp_path) -> None:
    trot, file = load(TROT), str(tmp_path / "own.npz")
    backward: dict[str, Any] = {name: getattr(trot, name)[::-1] for name in ("joint_names", "body_names")}
    backward |= {name: value[:, ::-1] for name, value in array_fields(trot).items()}
    save(Path(file), dataclasses.replace(trot, **backward))
    clips = read_clips([file, "go1_trot"], go1, "robot", ["RL_calf", "trunk"])
    assert list(clips) == [file, "go1_trot"]
    for clip in clips.values():
        assert clip.joint_names == trot.joint_names and clip.body_names == ("RL_calf", "trunk")
        assert np.array_equal(clip.joint_vel, trot.joint_vel)
        assert np.array_equal(clip.body_quat_w, trot.body_quat_w[:, [12, 0]])


def array_fields(clip: Clip) -> dict[str, np.ndarray]:
    fields = {field.name: getattr(clip, field.name) for field in dataclasses.fields(Clip)}
    return {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}


def test_start_bins_exclude_last_frames_and_stay_in_one_clip() -> None:
    found = motions(spinning(51, 50.0), spinning(171, 50.0), spinning(2, 50.0))
    playhead = Playhead(found, 1, "adaptive")
    begins, sizes = playhead._begins.tolist(), playhead._sizes.tolist()
    frames = [frame for begin, size in zip(begins, sizes, strict=True) for frame in range(begin, begin + size)]
    assert frames == [frame for frame in range(len(found)) if frame not in found.last.tolist()]
    assert sizes == [50, 57, 56, 57, 1]
    unit = torch.cartesian_prod(torch.linspace(0.0, 1.0 - 2.0**-24, 41), torch.linspace(0.0, 1.0 - 2.0**-24, 131))
    everywhere = Playhead(found, len(unit), "adaptive")
    _, start = everywhere.begin(torch.ones(len(unit), dtype=torch.bool), unit)
    assert not torch.isin(start, found.last).any()
    assert set(start.tolist()) >= {0, 51, 221, 222} - set(found.last.tolist())
    assert torch.equal(everywhere.index, start + 1)


def test_playhead_stops_at_the_last_frame_of_its_clip() -> None:
    found = motions(spinning(4, 50.0), spinning(3, 50.0))
    playhead, fine = Playhead(found, 2, "uniform"), torch.zeros(2, dtype=torch.bool)
    playhead.index.copy_(torch.tensor([1, 5]))
    assert playhead.advance(fine, fine).tolist() == [False, False] and playhead.index.tolist() == [2, 6]
    assert playhead.advance(fine, fine).tolist() == [False, True] and playhead.index.tolist() == [3, 6]
    assert playhead.advance(fine, fine).tolist() == [True, True] and playhead.index.tolist() == [3, 6]
    restarted, start = playhead.begin(fine, torch.zeros(2, 2))
    assert restarted.all() and torch.equal(playhead.index, start + 1) and not playhead.over.any()


def test_adaptive_starts_follow_recent_failures() -> None:
    found = motions(spinning(201, 50.0))
    playhead = Playhead(found, 8, "adaptive")
    assert playhead.chances().tolist() == [0.25] * 4
    assert playhead.stats()["start_entropy"].tolist() == pytest.approx([1.0] * 8)
    failed = torch.arange(8) < 3
    for _ in range(100):
        playhead.index.fill_(120)
        playhead.advance(failed, torch.zeros_like(failed))
    mean = 3.0 * (1.0 - (1.0 - FORGETTING) ** 100)
    assert playhead.failures.tolist() == pytest.approx([0.0, 0.0, mean, 0.0], rel=1e-4)
    likely = (mean + FLOOR / 4) / (mean + FLOOR)
    assert playhead.chances()[2].item() == pytest.approx(likely, rel=1e-4)
    chances = playhead.chances().numpy()
    entropy = -(chances * np.log(chances)).sum() / math.log(4)
    assert playhead.stats()["start_entropy"][0].item() == pytest.approx(entropy, rel=1e-5) and entropy < 0.8
    assert playhead.stats()["start_top_bin"].tolist() == [2.0] * 8
    unit = torch.rand(8192, 2, generator=torch.Generator().manual_seed(0))
    playhead.index, playhead.over = torch.ones(8192, dtype=torch.int64), torch.zeros(8192, dtype=torch.bool)
    _, start = playhead.begin(torch.ones(8192, dtype=torch.bool), unit)
    inside = (start >= 100) & (start < 150)
    assert inside.float().mean().item() == pytest.approx(likely, abs=0.02)
    counts = torch.bincount(start[inside] - 100, minlength=50).float()
    assert counts.min() > 0.5 * counts.mean(), "frames of a bin must be equally likely"
    for _ in range(3000):
        playhead.advance(*torch.zeros(2, 8192, dtype=torch.bool))
    assert playhead.failures[2].item() == pytest.approx(mean * (1.0 - FORGETTING) ** 3000, rel=1e-2)


def test_uniform_and_first_starts_ignore_failures() -> None:
    found, failed = motions(spinning(101, 50.0), spinning(51, 50.0)), torch.ones(4, dtype=torch.bool)
    for starts, expected in (("uniform", [1 / 3, 1 / 3, 1 / 3]), ("first", [0.5, 0.5])):
        playhead = Playhead(found, 4, starts)
        for _ in range(50):
            playhead.advance(failed, torch.zeros_like(failed))
        assert playhead.chances().tolist() == pytest.approx(expected)
        _, start = playhead.begin(failed, torch.tensor([[0.0, 0.99], [0.4, 0.5], [0.6, 0.0], [0.99, 0.99]]))
        if starts == "first":
            assert start.tolist() == [0, 0, 101, 101]


def test_state_dict_has_failures_but_not_clips() -> None:
    found = motions(spinning(201, 50.0))
    owner = {"motions": found, "playhead": Playhead(found, 2, "adaptive")}
    names = {name for name, _ in kept_tensors(owner)}
    assert {"playhead.failures", "playhead.index"} <= names
    assert not any(name.startswith("motions") for name in names)
    one = Playhead(found, 1, "adaptive")
    assert one.stats().keys() == {"start_entropy", "start_top_bin"}
    assert Playhead(motions(spinning(11, 50.0)), 1, "adaptive").stats()["start_entropy"].tolist() == [1.0]


def test_restored_frame_is_clamped_to_the_clip() -> None:
    playhead = Playhead(motions(spinning(11, 50.0)), 2, "adaptive")
    playhead.index.copy_(torch.tensor([4, 200]))
    playhead.restored()
    assert playhead.index.tolist() == [4, 10]


def test_unsuitable_clips_are_rejected_by_name(go1, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"'clip0' at 50 Hz: not enough data: 1 frames"):
        motions(spinning(2, 200.0))
    save(tmp_path / "own.npz", spinning())
    for name, bodies, words in (
        (str(tmp_path / "own.npz"), [], r"own\.npz: lacks joints of .*: FR_hip_joint, .* 2 joints \(swing, slide"),
        ("go1_trott", [], r"'go1_trott' in .*motions\. .*mean 'go1_trot'"),
        ("~nosuch/x.npz", [], r"~nosuch/x\.npz: .*home"),
        ("../motions/go1_trot", [], r"no motion clip '\.\./motions/go1_trot'"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_clips([name], go1, "robot", bodies)
