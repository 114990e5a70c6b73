"""Tests of looks: files of meshes from a stand-in for Menagerie, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import mujoco
import numpy as np
import pytest

from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.sim import Scene
from gpusim_rl.view import looks
from gpusim_rl.view.playback import scene_by_name
from gpusim_rl.view.renderer import Camera, picture_model
from helpers.commands import ROOT, run_here

GO1 = ROOT / "tasks" / "assets" / "go1" / "go1.xml"


@pytest.fixture
def menagerie(tmp_path, monkeypatch) -> Path:
    """Stand-in for Menagerie's Go1: our Go1 with a ball on each body; returns its folder."""
    trimesh = pytest.importorskip("trimesh")
    pytest.importorskip("fast_simplification")
    source = tmp_path / "unitree_go1"
    (source / "assets").mkdir(parents=True)
    trimesh.creation.icosphere(subdivisions=5, radius=0.05).export(source / "assets" / "ball.stl")
    spec = mujoco.MjSpec.from_file(str(GO1))
    spec.meshdir = "assets"
    spec.add_mesh(name="ball", file="ball.stl")
    for body in spec.bodies[1:]:
        body.add_geom(type=looks.MESH, meshname="ball", group=2, contype=0, conaffinity=0, rgba=[1, 0, 0, 1], mass=0)
    spec.modelfiledir = str(source)
    (source / "go1.xml").write_text(spec.to_xml())
    (source / "LICENSE").write_text("BSD of a stand-in")
    monkeypatch.setenv("GPUSIM_RL_LOOKS", str(tmp_path / "looks"))
    monkeypatch.setattr(looks.menagerie, "load", lambda name: mujoco.MjSpec.from_file(str(source / "go1.xml")))
    return source


def test_pictures_show_meshes_instead_of_collision_shapes(menagerie):
    scene = scene_by_name("Go1Velocity")
    plain = scene.model
    assert looks.hints(scene) and looks.for_page(plain) == ({}, "")
    file = looks.write("go1")
    assert file.stat().st_size < looks.MOST_BYTES and not looks.hints(scene)
    model = picture_model(scene, Camera(scene, plain.qpos0[None]))
    drawn, on_robot = model.geom_group < looks.HIDDEN_GROUP, model.geom_bodyid > 0
    assert (model.geom_type[drawn & on_robot] == looks.MESH).all() and (drawn & on_robot).sum() == 13
    assert model.mesh_facenum.sum() <= 1.1 * looks.FACES and model.nq == plain.nq
    np.testing.assert_allclose(model.geom_rbound[drawn & on_robot], 0.05 * 3**0.5, rtol=0.02)  # of a box
    assert scene.model.nmesh == 0  # physics keeps its shapes
    parts, licence = looks.for_page(plain)
    described = json.loads(parts["looks"])["parts"]
    assert sorted({part[0] for part in described}) == list(range(1, 14)) and "BSD of a stand-in" in licence
    assert len(parts["skin"]) == 6 * sum(part[2] + part[3] for part in described)
    assert looks.find(scene_by_name("Go2Velocity").model) == (None, [])


def test_robot_of_other_dimensions_keeps_its_shapes(menagerie):
    looks.write("go1")
    spec = mujoco.MjSpec.from_file(str(GO1))
    for body in spec.bodies[2:]:
        body.pos = body.pos + 0.01
    scene = Scene(100.0)
    scene.add("robot", spec)
    assert looks.find(scene.model) == (None, [])


@pytest.mark.parametrize("damage", [b"", b"no archive", None])
def test_damaged_file_is_one_warning(menagerie, capsys, damage):
    file, scene = looks.write("go1"), scene_by_name("Go1Velocity")
    if damage is None:  # faces beyond the vertices
        arrays = dict(np.load(file))
        np.savez(file, **{**arrays, "faces": arrays["faces"] + 60_000})
    else:
        file.write_bytes(damage)
    looks._read_once.cache_clear()
    for _ in range(2):
        assert looks.find(scene.model) == (None, [])
    assert capsys.readouterr().err.count("looks go1") == 1


def test_bad_sources_are_refused(menagerie, monkeypatch):
    with pytest.raises(ConfigError, match="go1"):
        looks.write("go11")
    monkeypatch.setattr(looks, "MOST_FACES", 100)
    with pytest.raises(ConfigError, match="faces"):
        looks.write("go1")
    monkeypatch.setattr(looks, "LICENCE_BYTES", 3)
    with pytest.raises(TaskError, match="3 bytes"):
        looks.write("go1")
    text = (menagerie / "go1.xml").read_text()
    (menagerie.parent / "ball.stl").write_bytes((menagerie / "assets" / "ball.stl").read_bytes())
    (menagerie / "go1.xml").write_text(text.replace("ball.stl", "../../ball.stl"))
    with pytest.raises(TaskError, match="outside"):
        looks.write("go1")
    monkeypatch.setattr(looks.menagerie, "load", lambda name: mujoco.MjSpec.from_file(str(GO1)))
    monkeypatch.setattr(looks, "LICENCE_BYTES", 9_000)
    with pytest.raises(ConfigError, match="faces"):
        looks.write("go1")


def test_command_needs_its_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fast_simplification", None)
    with pytest.raises(ConfigError, match=r"gpusim-rl\[robots\]"):
        looks.write("go1")
    assert run_here(ROOT / "tools" / "looks.py", "go3", cwd=tmp_path).refuses("go1")


def test_training_never_reads_looks(train_cli, tmp_path, monkeypatch):
    (tmp_path / "go1.npz").write_text("garbage")
    monkeypatch.setenv("GPUSIM_RL_LOOKS", str(tmp_path))
    words = ("task=Go1Velocity", "recipe=quick", "num_envs=4", "max_iterations=1", "ppo.horizon=4", "sim=mujoco")
    done = train_cli(*words, "ppo.minibatch_size=16")
    assert "damaged" not in done.stdout + done.stderr
