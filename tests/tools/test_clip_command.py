"""The command `clip`: records, checks and plays motion clips."""

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


def test_what_a_policy_does_becomes_a_clip(clip, tmp_path):
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
    assert "--out a.npz: exists already. Try another name, or --overwrite" in error


WRONG = {
    "a command too few": (("--command", "1", "0"), "3 numbers (x [m/s], y [m/s], yaw [rad/s])"),
    "time back": (("--skip", "-1"), "--skip: expected at least 0, got -1"),
    "no robot": (("--robot", "head", "--seconds", "0.1", "--skip", "0"), "--robot head: "),
    "no clip's name": (("--out", "x.npy"), "got 'x.npy'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_recorded_is_one_line(clip, tmp_path, kind):
    words, line = WRONG[kind]
    assert line in clip("record", demos_dir() / "Go1Velocity", *words, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_an_episode_that_ends_is_no_clip(clip, tmp_path):
    """G1 falls when it is told to run and to turn ten times as fast as it has learned."""
    words = ("--command", "-20", "20", "20", "--seconds", "3", "--out", "x.npz")
    assert "the episode ended after " in clip("record", demos_dir() / "G1VelocityForward", *words, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_a_jump_to_another_place_is_no_motion(clip, tmp_path):
    """Where its clip is over, a tracking task puts the robot into another frame: here back by 0.26 m."""
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
        assert f"moved 'robot' after {when} s" in error
    assert not (tmp_path / "x.npz").exists()
    clip(*words, "0", "--seconds", "0.2")
    assert load(tmp_path / "x.npz").seconds == pytest.approx(0.2)
    still = {name: (0.0 if "vel" in name else 1.0) * value[:1].repeat(22, axis=0) for name, value in short.items()}
    save(tmp_path / "short.npz", replace(trot, **still))
    error = clip(*words[:3], "y.npz", *words[4:], "0", code=2).stderr
    assert "moved 'robot' after 0.42 s" in error, "by as little as it has moved"


def test_a_file_is_checked(clip, tmp_path):
    said = clip("check", "go1_trot").stdout
    assert "201 frames at 50 Hz, 4 s; 12 joints, 13 bodies" in said
    assert "Try clip check" in said and said.endswith("go1\n")
    assert "fits go1: " in clip("check", "go1_trot", "go1").stdout
    assert "a clip of go1" in clip("check", "go1_trot", "g1", code=2).stderr
    gym = clip("check", "go1_trot", "Gymnasium", code=2).stderr
    assert "'Gymnasium' has no scene" in gym
    assert "no task and no robot 'goo1'. Did you mean 'go1'?" in clip("check", "go1_trot", "goo1", code=2).stderr
    assert "no motion clip 'go1_trott'" in (line := clip("check", "go1_trott", code=2).stderr)
    assert "Did you mean 'go1_trot'? Available: g1_bow, " in line and line.count("\n") == 1
    (tmp_path / "x.npz").touch()
    assert "x.npz: not an npz file: " in clip("check", "x.npz", code=2).stderr
    shutil.copy(MOTIONS / "go1_trot.npz", tmp_path / "mine.npz")
    assert "fits " in clip("check", "mine.npz", assets_dir() / "go1" / "go1.xml").stdout


def test_playing_shows_every_frame_and_begins_again():
    trot = load(MOTIONS / "go1_trot.npz")
    expected = positions(trot, scene_of(assets_dir() / "go1" / "go1.xml"), "robot")
    with closing(open_playback(trot, "go1")) as player:
        for frame in (*range(len(expected)), *range(3)):
            assert np.allclose(player.env.sim.qpos[0], expected[frame], atol=1e-6), frame
            player.step()
    with pytest.raises(ConfigError, match="a clip of go1"):
        open_playback(trot, "G1Velocity")


def test_a_clip_becomes_a_video_and_a_page(clip, tmp_path):
    small = ("--width", "64", "--height", "48", "--steps", "6")
    assert clip("play", "g1_bow", "--out", "bow.mp4", *small).stdout == "bow.mp4\n"
    reader = imageio_ffmpeg.read_frames(str(tmp_path / "bow.mp4"))
    assert next(reader)["size"] == (64, 48)
    assert len(list(reader)) == 3  # of 50 Hz every second one
    clip("play", "go1_trot", "--out", "trot.html", *small)
    page = (tmp_path / "trot.html").read_text()
    assert "<title>go1_trot" in page and len(page) > 100_000
    assert ".mp4 or .html" in clip("play", "go1_trot", "--out", "trot.gif", code=2).stderr


def test_a_clip_in_a_browser(clip):
    said = clip("play", "go1_trot", "--steps", "3").stdout
    assert said.startswith("go1_trot is shown at http://127.0.0.1:")


def test_a_clip_of_an_unknown_robot_is_not_shown(clip, tmp_path):
    trot = load(MOTIONS / "go1_trot.npz")
    save(tmp_path / "x.npz", replace(trot, joint_names=tuple(f"j{i}" for i in range(12))))
    assert "Try clip play x.npz <robot>" in clip("play", "x.npz", code=2).stderr
