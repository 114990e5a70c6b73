"""Tests of the command `clip`: record, check and play motion clips."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch

from gpusim_rl.env.clip import load, save
from gpusim_rl.env.math import quat_rotate_inverse
from gpusim_rl.env.robot_clip import load_for, positions, scene_of
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir, demos_dir
from gpusim_rl.view.playback import open_playback, scene_by_name
from helpers.commands import ROOT, Finished, run_here

pytest_plugins = ["helpers.tool_runs"]

MOTIONS = assets_dir() / "motions"


@pytest.fixture
def clip(tmp_path: Path):
    """Run the command in this process: `clip("check", "go1_trot")`."""

    def run(*words: str | Path, code: int = 0) -> Finished:
        done = run_here(ROOT / "tools" / "clip.py", *words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        if code:
            assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
        return done

    return run


def test_record_writes_a_clip_of_a_policy(clip, tmp_path):
    words = ("record", demos_dir() / "Go1Velocity", "--seconds", "1.2", "--command", "0.6", "0", "0", "--out")
    assert clip(*words, "a.npz").stdout == "a.npz: 61 frames, 1.2 s\n"
    clip(*words, "b.npz")
    walk, again = (load(tmp_path / name) for name in ("a.npz", "b.npz"))
    assert np.array_equal(walk.body_pos_w, again.body_pos_w)
    assert walk.fps == 50.0 and walk.seconds == pytest.approx(1.2)
    scene = scene_by_name("Go1Velocity")
    fitted = load_for(tmp_path / "a.npz", scene, "robot")
    assert fitted.joint_names == tuple(scene.elements_of("robot", "joint"))
    quat, velocity = (torch.tensor(value[:, 0]) for value in (walk.body_quat_w, walk.body_lin_vel_w))
    assert quat_rotate_inverse(quat, velocity).mean(dim=0).tolist() == pytest.approx([0.6, 0.0, 0.0], abs=0.15)
    assert "fits Go1Velocity" in clip("check", "a.npz", "Go1Velocity").stdout
    error = clip(*words, "a.npz", code=2).stderr
    assert "--out a.npz: " in error and "--overwrite" in error


INVALID = {
    "short command": (("--command", "1", "0"), "3 numbers (x [m/s], y [m/s], yaw [rad/s])"),
    "negative skip": (("--skip", "-1"), "--skip: expected at least 0, got -1"),
    "unknown robot": (("--robot", "head", "--seconds", "0.1", "--skip", "0"), "--robot head: "),
    "wrong suffix": (("--out", "x.npy"), "got 'x.npy'"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_recording_options_are_rejected(clip, tmp_path, kind):
    words, line = INVALID[kind]
    assert line in clip("record", demos_dir() / "Go1Velocity", *words, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_episode_that_ends_early_is_not_recorded(clip, tmp_path):
    """G1 falls under commands ten times beyond its trained range."""
    words = ("--command", "-20", "20", "20", "--seconds", "3", "--out", "x.npz")
    assert "episode ended" in clip("record", demos_dir() / "G1VelocityForward", *words, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_position_jump_is_not_recorded(clip, tmp_path):
    """At the end of its clip, a tracking task moves the robot to another frame, here back by 0.26 m."""
    trot = load(MOTIONS / "go1_trot.npz")
    arrays = {f.name: getattr(trot, f.name) for f in fields(trot)}
    short = {name: value[:22] for name, value in arrays.items() if isinstance(value, np.ndarray)}
    save(tmp_path / "short.npz", replace(trot, **short))
    limits = [f"task.{name}_limit=10" for name in ("anchor_height", "anchor_tilt", "end_height")]
    small = ["task.clips=[short.npz]", "debug=smoke", "num_envs=4", "max_iterations=1", "device=cpu"]
    trained = run_here(ROOT / "train.py", "task=Go1Tracking", *small, "log.console=quiet", *limits, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    words = ("record", "Go1Tracking", "--out", "x.npz", "--seconds", "0.6", "--skip")
    for skip, when in (("0", "0.42"), ("0.5", "0.84")):
        error = clip(*words, skip, code=2).stderr
        assert f"moved 'robot' to a new pose after {when} s" in error
    assert not (tmp_path / "x.npz").exists()
    clip(*words, "0", "--seconds", "0.2")
    assert load(tmp_path / "x.npz").seconds == pytest.approx(0.2)
    still = {name: (0.0 if "vel" in name else 1.0) * value[:1].repeat(22, axis=0) for name, value in short.items()}
    save(tmp_path / "short.npz", replace(trot, **still))
    error = clip(*words[:3], "y.npz", *words[4:], "0", code=2).stderr
    assert "new pose after 0.42 s" in error, "small jumps are found too"


def test_check_describes_clips_and_reports_mismatches(clip, tmp_path):
    output = clip("check", "go1_trot").stdout
    assert "201 frames at 50 Hz, 4 s; 12 joints, 13 bodies" in output
    assert "Try gpusim-rl clip check" in output and output.endswith("go1\n")
    assert "fits go1: " in clip("check", "go1_trot", "go1").stdout
    assert "a clip of go1" in clip("check", "go1_trot", "g1", code=2).stderr
    assert "'Gymnasium'" in clip("check", "go1_trot", "Gymnasium", code=2).stderr
    assert "Did you mean 'go1'?" in clip("check", "go1_trot", "goo1", code=2).stderr
    assert "Did you mean 'go1_trot'? Available: g1_bow, " in clip("check", "go1_trott", code=2).stderr
    (tmp_path / "x.npz").touch()
    assert "x.npz: " in clip("check", "x.npz", code=2).stderr
    shutil.copy(MOTIONS / "go1_trot.npz", tmp_path / "mine.npz")
    assert "fits " in clip("check", "mine.npz", assets_dir() / "go1" / "go1.xml").stdout


def test_playback_shows_every_frame_and_loops():
    trot = load(MOTIONS / "go1_trot.npz")
    expected = positions(trot, scene_of(assets_dir() / "go1" / "go1.xml"), "robot")
    with closing(open_playback(trot, "go1")) as player:
        for frame in (*range(len(expected)), *range(3)):
            assert np.allclose(player.env.sim.qpos[0], expected[frame], atol=1e-6), frame
            player.step()
    with pytest.raises(ConfigError, match="a clip of go1"):
        open_playback(trot, "G1Velocity")


def test_clip_plays_as_video_and_page(clip, tmp_path):
    small = ("--width", "64", "--height", "48", "--steps", "6")
    assert clip("play", "g1_bow", "--out", "bow.mp4", *small).stdout == "bow.mp4\n"
    reader = imageio_ffmpeg.read_frames(str(tmp_path / "bow.mp4"))
    assert next(reader)["size"] == (64, 48)
    assert len(list(reader)) == 3  # every second frame of 50 Hz
    clip("play", "go1_trot", "--out", "trot.html", *small)
    page = (tmp_path / "trot.html").read_text()
    assert "<title>go1_trot" in page and len(page) > 100_000
    assert ".mp4 or .html" in clip("play", "go1_trot", "--out", "trot.gif", code=2).stderr


def test_clip_plays_in_a_browser(clip):
    assert "http://127.0.0.1:" in clip("play", "go1_trot", "--steps", "3").stdout


def test_clip_of_unknown_robot_asks_for_a_robot(clip, tmp_path):
    trot = load(MOTIONS / "go1_trot.npz")
    save(tmp_path / "x.npz", replace(trot, joint_names=tuple(f"j{i}" for i in range(12))))
    assert "gpusim-rl clip play x.npz g1" in clip("play", "x.npz", code=2).stderr
