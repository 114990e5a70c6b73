"""Tests of motion clips: our files and those of Isaac Lab and mjlab, errors, other robots, shipped clips."""

from __future__ import annotations

import importlib.util
import io
import pickle
import sys
import time
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import mujoco
import numpy as np
import pytest

from gpusim_rl.env import clip as clips
from gpusim_rl.env.clip import Clip, load, save
from gpusim_rl.env.robot_clip import fit, from_states, load_for, positions, robot_of, scene_of
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.paths import assets_dir
from gpusim_rl.sim import Scene

MOTIONS = assets_dir() / "motions"
FPS = 50.0
MADE = ("go1_trot", "g1_crouch", "g1_bow", "g1_turn")


def robot(name: str) -> Scene:
    return scene_of(assets_dir() / name / f"{name}.xml")


@pytest.fixture(scope="module")
def go1() -> Scene:
    return robot("go1")


@pytest.fixture(scope="module")
def g1() -> Scene:
    return robot("g1")


@pytest.fixture(scope="module")
def trot() -> Clip:
    return load(MOTIONS / "go1_trot.npz")


def as_arrays(clip: Clip) -> dict[str, np.ndarray]:
    return {field.name: np.array(getattr(clip, field.name)) for field in fields(Clip)}


def rejection(file: Path, scene: Scene | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file) if scene is None else load_for(file, scene, "robot")
    text = str(caught.value)
    assert str(file) in text and "\n" not in text
    return text


# -- our files ---------------------------------------------------------------------------------


def test_clip_round_trip_is_exact(trot, tmp_path):
    save(tmp_path / "x.npz", trot)
    for name, value in as_arrays(load(tmp_path / "x.npz")).items():
        assert np.array_equal(value, getattr(trot, name)), name


BAD = {
    "no-joint-names": (lambda a: a.pop("joint_names"), "missing arrays joint_names"),
    "two-rates": (lambda a: a.update(fps=np.array([50.0, 60.0])), "Expected one number"),
    "duplicate-name": (lambda a: a["body_names"].__setitem__(2, "trunk"), "duplicate name 'trunk'"),
    "joint-too-few": (lambda a: a.update(joint_pos=a["joint_pos"][:, 1:]), "joint_pos: expected shape [201, 12]"),
    "non-finite": (lambda a: a["body_pos_w"].__setitem__((7, 0, 0), np.nan), "body_pos_w: contains NaN"),
    "too-large": (lambda a: a.update(joint_vel=a["joint_vel"].astype(float) + 1e300), "joint_vel: contains NaN"),
    "quaternion-not-normalised": (lambda a: a["body_quat_w"].__setitem__((5, 1), 0.1), "'FR_hip' in frame 5"),
    "text": (lambda a: a.update(joint_pos=a["joint_pos"].astype(str)), "joint_pos: expected numbers"),
    "no-rate": (lambda a: a.update(fps=np.array(0)), "fps: expected a frame rate"),
    "names-not-a-list": (lambda a: a.update(joint_names=np.array("hip")), "joint_names: expected 1 to"),
    "one-frame": (lambda a: a.update({k: v[:1] for k, v in a.items() if v.ndim > 1}), ": 1 frames"),
    "wrong-rate": (lambda a: a.update(fps=np.array(100)), "Use fps=50 or so, not 100"),
    "degrees": (lambda a: a.update(joint_vel=np.degrees(a["joint_vel"])), "joint_vel: does not match"),
    "swapped-axes": (lambda a: a.update(body_ang_vel_w=a["body_ang_vel_w"][..., [1, 2, 0]]), "change of body_quat_w"),
    "backward-velocities": (lambda a: a.update(body_lin_vel_w=-a["body_lin_vel_w"]), "origins"),
}


@pytest.mark.parametrize("kind", BAD)
def test_invalid_clip_is_rejected(trot, tmp_path, kind):
    change, words = BAD[kind]
    arrays = as_arrays(trot)
    change(arrays)
    np.savez(tmp_path / "x.npz", **arrays)
    assert words in rejection(tmp_path / "x.npz")


def test_unreadable_clip_is_not_written(trot, tmp_path):
    jump = trot.body_pos_w.copy()
    jump[100:] -= [30.0, 0.0, 0.0]
    with pytest.raises(ConfigError, match=r"^body_lin_vel_w: does not match"):
        save(tmp_path / "x.npz", replace(trot, body_pos_w=jump))
    assert list(tmp_path.iterdir()) == []


class Evil:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('executed').touch()",)


def as_zip(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return file.getvalue()


def header(shape: str, kind: str = "<f4") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def objects() -> bytes:
    file = io.BytesIO()
    np.savez(file, joint_pos=np.array([Evil()], dtype=object))
    return file.getvalue()


def names(shape: str, kind: str, data: bytes = b"") -> bytes:
    """Return a clip whose list of names is given by a few bytes of its file."""
    file = io.BytesIO()
    np.savez(file, **{name: value for name, value in as_arrays(load(MOTIONS / "go1_trot.npz")).items() if "_w" in name})
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        for name in ("joint_pos", "joint_vel"):
            archive.writestr(f"{name}.npy", header("(201, 12)") + bytes(201 * 12 * 4))
        archive.writestr("fps.npy", header("()") + bytes([0, 0, 0x48, 0x42]))
        archive.writestr("joint_names.npy", header(shape, kind) + data)
        archive.writestr("body_names.npy", header("(1,)", "<U1") + b"a\0\0\0")
    return file.getvalue()


LETTERS = np.arange(0x4E00, 0x4E00 + 9_999, dtype="<u4")
HOSTILE = {
    "empty": (b"", "empty"),
    "text": (b"time,x,y\n0,1,2\n", "not a zip file"),
    "pickle": (pickle.dumps(Evil()), "not a zip file"),
    "pickle-inside": (objects(), "Python objects"),
    "pickle-as-array": (as_zip("joint_pos.npy", pickle.dumps(Evil())), "invalid npz file: "),
    "array-larger-than-file": (as_zip("joint_pos.npy", header("(10**12,)")), "invalid npz file: "),
    "20-million-empty-names": (names("(20_000_000,)", "<U0"), "larger than its zip entry"),
    "name-of-a-million-letters": (names("(1,)", "<U1000000", bytes(4_000_000)), "joint_names: expected 1 to"),
    "numbers-as-names": (names("(1,)", "<f4", bytes(4)), "joint_names: expected 1 to"),
    "duplicate-last-name": (
        names("(10_000,)", "<U1", LETTERS.tobytes() + LETTERS[-1:].tobytes()),
        f"duplicate name {chr(LETTERS[-1])!r}",
    ),
    "zip-bomb": (as_zip("joint_pos.npy", bytes(6 << 20)), "5242880 bytes unpacked"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_clip_file_is_rejected_quickly(tmp_path, monkeypatch, kind):
    content, words = HOSTILE[kind]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(clips, "CLIP_BYTES", 5 << 20)
    (tmp_path / "x.npz").write_bytes(content)
    started = time.process_time()
    assert words in rejection(tmp_path / "x.npz")
    assert time.process_time() - started < 0.5
    assert not (tmp_path / "executed").exists()


def test_damaged_clip_files_are_rejected(trot, tmp_path):
    save(tmp_path / "x.npz", trot)
    whole, rng = (tmp_path / "x.npz").read_bytes(), np.random.default_rng(1)
    refusals = 0
    for _ in range(30):
        content = bytearray(whole[: rng.integers(len(whole))] if rng.random() < 0.3 else whole)
        for place in rng.integers(max(1, len(content)), size=30):
            content[place : place + 1] = bytes([rng.integers(256)])
        (tmp_path / "x.npz").write_bytes(content)
        try:
            load(tmp_path / "x.npz")
        except ConfigError as error:
            refusals += "\n" not in str(error)
    assert refusals == 30


def test_missing_clip_files_and_folders_are_rejected(tmp_path):
    for path in (tmp_path / "no.npz", tmp_path, tmp_path / f"{'x' * 5000}.npz"):
        assert "no such file" in rejection(path)


# -- files of other libraries ------------------------------------------------------------------


def test_isaac_lab_files_are_read(trot, go1, tmp_path):
    arrays = {clips.ISAAC_LAB.get(name, name): value for name, value in as_arrays(trot).items()}
    np.savez(tmp_path / "x.npz", **{**arrays, "fps": np.array(50, dtype=np.int64)})
    assert set(arrays) >= {"dof_names", "dof_positions", "body_rotations", "body_angular_velocities"}
    read = load(tmp_path / "x.npz")
    assert all(np.array_equal(value, getattr(read, name)) for name, value in as_arrays(trot).items())
    assert load_for(tmp_path / "x.npz", go1, "robot").joint_names == trot.joint_names


@pytest.mark.parametrize("height", [-0.05, 0.02])
def test_isaac_lab_clip_is_lifted_above_the_ground(trot, go1, tmp_path, height):
    low = replace(trot, body_pos_w=trot.body_pos_w + np.float32([0.0, 0.0, height]))
    arrays = {clips.ISAAC_LAB.get(name, name): value for name, value in as_arrays(low).items()}
    np.savez(tmp_path / "x.npz", **arrays)
    read = load_for(tmp_path / "x.npz", go1, "robot", ["RL_calf", "FR_calf"])
    expected = trot.body_pos_w[:, [12, 3]] + [0.0, 0.0, max(0.0, height)]
    np.testing.assert_allclose(read.body_pos_w, expected, atol=2e-5)
    save(tmp_path / "ours.npz", low)
    assert np.array_equal(load_for(tmp_path / "ours.npz", go1, "robot").body_pos_w, low.body_pos_w)


ARM = """
<mujoco><worldbody><body name="base"><freejoint/><geom size="0.1"/><body name="arm" pos="0.1 0 0">
  <joint name="arm_x" axis="1 0 0"/><joint name="arm_y" axis="0 1 0"/><joint name="arm_z" axis="0 0 1"/>
  <geom size="0.1"/><body name="hand" pos="0 0 -0.3"><joint name="hand" axis="0 1 0"/><geom size="0.1"/></body>
</body></body></worldbody></mujoco>
"""


def test_ball_joints_of_isaac_lab_become_hinges(tmp_path):
    """Isaac Lab stores rotation vectors and angular velocities in the outer link's frame, not hinge angles."""
    scene = Scene(60.0)
    scene.add("robot", mujoco.MjSpec.from_string(ARM))
    time = np.arange(121)[:, None] / 60.0
    angles = np.array([1.2, 0.9, 1.4, 0.5]) * np.sin(2.0 * time * np.array([1.0, 1.5, 0.7, 2.0]) + np.arange(4))
    rates = np.gradient(angles, 1.0 / 60.0, axis=0)
    qpos = np.concatenate([np.tile([0, 0, 1, 0.6, 0, 0.8, 0], (121, 1)), angles], axis=1)
    clip = from_states(scene, "robot", qpos, np.concatenate([np.zeros((121, 6)), rates], axis=1), 60.0)
    arrays, ball, turning = as_arrays(clip), np.zeros((121, 3)), np.zeros((121, 3))
    for frame, (quats, spins) in enumerate(zip(clip.body_quat_w, clip.body_ang_vel_w, strict=True)):
        base, arm = quats[:2].astype(float)
        relative, inverse, back = np.zeros(4), np.zeros(4), np.zeros(4)
        mujoco.mju_negQuat(back, base)
        mujoco.mju_mulQuat(relative, back, arm)
        mujoco.mju_quat2Vel(ball[frame], relative, 1.0)
        mujoco.mju_negQuat(inverse, arm)
        mujoco.mju_rotVecQuat(turning[frame], (spins[1] - spins[0]).astype(float), inverse)
    arrays["joint_pos"][:, :3], arrays["joint_vel"][:, :3] = ball, turning
    assert np.abs(ball - angles[:, :3]).max() > 0.2
    np.savez(tmp_path / "x.npz", **{clips.ISAAC_LAB.get(name, name): value for name, value in arrays.items()})
    read = load_for(tmp_path / "x.npz", scene, "robot")
    assert np.allclose(read.joint_pos, clip.joint_pos, atol=1e-4)
    assert np.allclose(read.joint_vel, clip.joint_vel, atol=1e-3)
    np.savez(tmp_path / "y.npz", **arrays)  # in our format these values would be hinge angles
    assert "does not match" in rejection(tmp_path / "y.npz", scene)


def test_mjlab_file_gets_the_robots_names(trot, go1, g1, tmp_path):
    arrays = {name: value for name, value in as_arrays(trot).items() if not name.endswith("names")}
    np.savez(tmp_path / "x.npz", **{**arrays, "fps": np.array([50])})
    assert "missing arrays joint_names, body_names" in rejection(tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", x=np.zeros(3))
    assert "found nothing" in rejection(tmp_path / "y.npz", go1)  # names of the robot do not count as the file's
    assert load_for(tmp_path / "x.npz", go1, "robot").joint_names == trot.joint_names
    assert "joint_pos: expected shape [201, 29]" in rejection(tmp_path / "x.npz", g1)


def test_wrong_order_without_names_is_rejected(trot, go1, tmp_path):
    """PhysX orders bodies and joints breadth-first: hips, then thighs, then calves."""
    arrays = {name: value for name, value in as_arrays(trot).items() if not name.endswith("names")}
    breadth = [0, 1, 4, 7, 10, 2, 5, 8, 11, 3, 6, 9, 12]
    bodies = {name: value[:, breadth] for name, value in arrays.items() if name.startswith("body")}
    joints = [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    both = bodies | {name: value[:, joints] for name, value in arrays.items() if name.startswith("joint")}
    for other in (bodies, both):
        np.savez(tmp_path / "x.npz", **{**arrays, **other})
        assert "does not match" in rejection(tmp_path / "x.npz", go1)


# -- other robots ------------------------------------------------------------------------------


def shuffled(clip: Clip, seed: int = 0) -> Clip:
    rng = np.random.default_rng(seed)
    orders = {"joint": rng.permutation(len(clip.joint_names)), "body": rng.permutation(len(clip.body_names))}
    changed = {}
    for name, value in as_arrays(clip).items():
        order = orders.get(name.partition("_")[0])
        changed[name] = value if order is None else value[order] if value.ndim == 1 else value[:, order]
        if value.dtype.kind == "U":
            changed[name] = tuple(changed[name].tolist())
    return replace(clip, **{**changed, "fps": clip.fps})


def test_joints_and_bodies_are_found_by_name(trot, go1):
    fitted = fit(shuffled(trot), go1, "robot")
    assert all(np.array_equal(value, getattr(fitted, name)) for name, value in as_arrays(trot).items())
    some = fit(shuffled(trot), go1, "robot", ["RL_calf", "FR_calf"])
    assert some.body_names == ("RL_calf", "FR_calf")
    assert np.array_equal(some.body_pos_w, trot.body_pos_w[:, [12, 3]])


def test_clip_of_another_robot_is_rejected(trot, go1, g1):
    with pytest.raises(ConfigError, match=r"lacks joints of .*: left_hip_pitch_joint, .* and 25 more.* of go1"):
        fit(trot, g1, "robot")
    with pytest.raises(ConfigError, match="lacks bodies of 'robot': head"):
        fit(trot, go1, "robot", ["head"])
    renamed = replace(trot, joint_names=tuple(f"j{i}" for i in range(12)))
    with pytest.raises(ConfigError, match=r"12 joints \(j0, j1, j2, j3, "):
        fit(renamed, go1, "robot")
    assert robot_of(renamed) is None
    assert robot_of(shuffled(trot)) == assets_dir() / "go1" / "go1.xml"


def test_body_poses_must_match_the_joints(trot, go1):
    swapped = list(trot.body_names)
    swapped[3], swapped[6] = swapped[6], swapped[3]
    for wrong in (
        replace(trot, body_names=tuple(swapped)),
        replace(trot, body_quat_w=trot.body_quat_w[..., [1, 2, 3, 0]]),
        replace(trot, joint_pos=np.degrees(trot.joint_pos)),
    ):
        with pytest.raises(ConfigError, match=r"in frame .* does not match"):
            fit(wrong, go1, "robot")


# -- clips from states, and shipped clips ------------------------------------------------------


def test_from_states_velocities_equal_finite_differences(go1):
    """A flying, rotating body with moving joints against finite differences in much smaller steps."""
    model, dt = go1.model, 2e-4
    rng = np.random.default_rng(0)
    qvel = rng.normal(size=model.nv)
    qpos = [np.concatenate([[1.0, 2.0, 3.0], mujoco_quat(rng), rng.normal(size=12)])]
    for _ in range(2):
        after = qpos[-1].copy()
        mujoco.mj_integratePos(model, after, qvel, dt)
        qpos.append(after)
    clip = from_states(go1, "robot", np.stack(qpos), np.tile(qvel, (3, 1)), 1.0 / dt)
    exact = from_states(go1, "robot", np.stack(qpos)[[1, 1]], np.tile(qvel, (2, 1)), 50.0)
    assert np.allclose(exact.joint_vel[0], qvel[6:])
    forward = [body_positions(go1, q) for q in qpos]
    difference = (forward[2] - forward[0]) / (2.0 * dt)
    assert np.allclose(exact.body_lin_vel_w[0], difference, atol=1e-3)
    assert np.allclose(clip.body_ang_vel_w[1], clips._turns(clip.body_quat_w.astype(np.float64))[1] / dt, atol=2e-2)


def mujoco_quat(rng: np.random.Generator) -> np.ndarray:
    quat = rng.normal(size=4)
    return quat / np.linalg.norm(quat)


def body_positions(scene: Scene, qpos: np.ndarray) -> np.ndarray:
    data = mujoco.MjData(scene.model)
    data.qpos[:] = qpos
    mujoco.mj_kinematics(scene.model, data)
    return data.xpos[list(scene.elements_of("robot", "body").values())].copy()


@pytest.mark.parametrize("name", MADE)
def test_shipped_clip_is_small_and_plausible(name):
    scene = robot(name.partition("_")[0])
    file, model = MOTIONS / f"{name}.npz", scene.model
    clip = load_for(file, scene, "robot")
    assert file.stat().st_size < 200_000 and clip.fps == FPS and 3.0 < clip.seconds < 6.0
    # The clip loops: its last frame equals its first.
    assert np.allclose(clip.joint_pos[0], clip.joint_pos[-1], atol=2e-5)
    assert np.allclose(clip.joint_vel[0], clip.joint_vel[-1], atol=2e-3)
    # Velocities are the derivatives of the positions.
    for velocity, of in ((clip.joint_vel, clip.joint_pos), (clip.body_lin_vel_w, clip.body_pos_w)):
        difference = 0.5 * FPS * (of[2:] - of[:-2])
        assert np.abs(velocity[1:-1] - difference).max() < 0.05 * np.abs(velocity).max()
    # No joint exceeds its limits, and no geom penetrates the ground or another one.
    joints = list(scene.elements_of("robot", "joint").values())
    low, high = model.jnt_range[joints].T
    assert ((low < clip.joint_pos) & (clip.joint_pos < high)).all()
    data = mujoco.MjData(model)
    for qpos in positions(clip, scene, "robot")[::2]:
        data.qpos[:] = qpos
        mujoco.mj_fwdPosition(model, data)
        assert min(data.contact.dist, default=0.0) > -1e-4


@pytest.fixture(scope="module")
def script():
    """Script `make_clips.py` as a module."""
    spec = importlib.util.spec_from_file_location("make_clips", MOTIONS / "make_clips.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", MADE)
def test_shipped_clips_are_reproducible(script, name):
    pytest.importorskip("mink", reason="pip install mink")
    assert tuple(script.MAKERS) == MADE
    made, shipped = as_arrays(script.MAKERS[name]()), as_arrays(load(MOTIONS / f"{name}.npz"))
    for key, value in made.items():
        if value.dtype.kind == "U":
            assert value.tolist() == shipped[key].tolist()
        else:
            assert np.allclose(value, shipped[key], atol=5e-3 if "vel" in key else 1e-4), key
