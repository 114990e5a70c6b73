"""Tests of `sim=mjwarp` on Warp's CPU device: graphs, views, buffers."""

from __future__ import annotations

import gc
import logging
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mujoco
import mujoco_warp
import numpy as np
import pytest
import torch
import warp as wp
from packaging.requirements import Requirement

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import provenance
from gpusim_rl.sim import Scene, warp
from gpusim_rl.sim.buffers import enough, estimate_buffers
from gpusim_rl.sim.mjwarp import MjwarpSim
from gpusim_rl.sim.warp import WarpGraphs
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.raised import raises
from helpers.scenes import FEET, ant_scene, arm_scene, ball_scene, everywhere, make, only, randomize_ants, scene_with


@pytest.fixture(scope="module")
def scene() -> Scene:
    return ant_scene()


def control_steps(sim, count: int) -> None:
    """Run the calls of an environment's control steps."""
    ant = sim.articulation("ant")
    for i in range(count):
        ant.actuate(torch.full((sim.num_envs, 8), 0.5 - i % 2))
        sim.step(2)
        where = sim.diverged | only(sim, i % sim.num_envs)
        sim.reset(where)
        ant.set_state(where, joint_vel=torch.full((sim.num_envs, 8), 0.1))
        sim.refresh()


def test_captured_steps_equal_eager_steps_and_sensors_in_every_step_bit_for_bit(scene):
    results = []
    for graph, every_step in ((True, False), (False, False), (False, True)):
        sim = make("mjwarp", scene, 6, graph=graph)
        sim._stores_readings = every_step  # computes sensors in every physics step
        ant = sim.articulation("ant")
        bodies, feet = ant.bodies(FEET), ant.contacts(FEET)
        randomize_ants([ant])
        sim.refresh()
        control_steps(sim, 3)
        results.append([x.clone() for x in (sim.qpos, sim.qvel, bodies.pos, feet.in_body_frame())])
    for captured, *eager in zip(*results, strict=True):
        assert all(torch.equal(captured, other) for other in eager)


def test_tensors_are_views_of_the_simulator(scene):
    sim = make("mjwarp", scene, 3)
    assert isinstance(sim, MjwarpSim)
    ant = sim.articulation("ant")
    assert ant.joint_pos.data_ptr() == sim._data.qpos.ptr + 7 * 4
    assert sim.ctrl.data_ptr() == sim._data.ctrl.ptr
    assert sim.derived("xquat").data_ptr() == sim._data.xquat.ptr


def test_each_graph_is_captured_once(scene, monkeypatch):
    captured = []
    original = WarpGraphs._capture

    def count(self, key, body):
        captured.append(key)
        original(self, key, body)

    monkeypatch.setattr(WarpGraphs, "_capture", count)
    sim = make("mjwarp", scene, 4)
    control_steps(sim, 2)
    assert len(captured) == len(set(captured)) == 2  # step, reset
    control_steps(sim, 3)
    sim.step(3)  # another number of substeps is another graph
    assert len(captured) == 3
    sim.articulation("ant").bodies(["torso"])  # body poses now follow resets
    control_steps(sim, 2)
    assert len(captured) == len(set(captured)) == 4  # follow


def test_hot_path_does_not_synchronise(scene):
    sim = make("mjwarp", scene, 4)
    ant = sim.articulation("ant")
    ant.bodies(FEET)
    feet = ant.contacts(FEET[:1])
    control_steps(sim, 1)
    everyone = everywhere(sim)
    with SyncCounter() as syncs:
        sim.step(2)
        sim.reset(everyone)
        ant.set_state(everyone, joint_vel=ant.joint_vel)
        sim.refresh()
        _ = sim.diverged | sim.overflow
        feet.in_body_frame()
    assert syncs.total == 0, syncs.locations


def test_refresh_without_derived_quantities_launches_nothing(monkeypatch):
    sim = make("mjwarp", arm_scene(), 2)
    monkeypatch.setattr(WarpGraphs, "run", lambda *_: pytest.fail("refresh launched something"))
    sim.wrote_state(everywhere(sim))
    sim.refresh()


def test_solver_iteration_limits_are_applied():
    def limits(name: str, scene: Scene, **settings: Any) -> tuple[int, int]:
        sim = make(name, scene, 1, **settings)
        option = sim._model.opt if name == "mjwarp" else sim._batch.model.opt
        return option.iterations, option.ls_iterations

    assert limits("mujoco", ball_scene()) == (100, 50)
    assert limits("mjwarp", ball_scene()) == (12, 20)
    own = ball_scene()
    own.option.iterations = 30
    assert limits("mujoco", own) == (30, 50)
    assert limits("mjwarp", own) == (30, 20)
    for name in ("mujoco", "mjwarp"):
        assert limits(name, own, iterations=7, ls_iterations=9) == (7, 9)
    assert own.model.opt.iterations == 30, "the scene changed"


@pytest.mark.parametrize("value", [float("nan"), 1e19])
def test_diverged_world_adds_no_solver_iterations(scene, value):
    sim: Any = make("mjwarp", scene, 8, iterations=100, ls_iterations=50)
    randomize_ants([sim.articulation("ant")])
    sim.step(1)
    sim.qvel[3, 0] = value
    for _ in range(3):
        sim.step(1)
        assert sim._data.solver_niter.numpy().max() < 12
    assert sim.diverged.tolist() == [number == 3 for number in range(8)]


@pytest.mark.parametrize("name", ["mjwarp", "newton"])
def test_dropped_constraints_are_reported_until_reset(scene, name):
    pytest.importorskip("newton" if name == "newton" else "mujoco_warp")
    sim = make(name, scene, 8, njmax=4)
    randomize_ants([sim.articulation("ant")])
    sim.step(1)
    full = sim.overflow.clone()
    assert full.any()
    sim.reset(only(sim, *range(4)))
    assert not sim.overflow[:4].any()
    assert torch.equal(sim.overflow[4:], full[4:])


@pytest.mark.parametrize(("full", "room"), [("nconmax", {"nconmax": 1}), ("njmax", {"njmax": 4}), (None, {})])
def test_needs_identify_the_full_buffer(scene, full, room):
    sim = make("mjwarp", scene, 8, **room)
    randomize_ants([sim.articulation("ant")])
    for _ in range(2):
        sim.step(1)
    assert bool(sim.overflow.any()) == (full is not None)
    needs, room = {name: float(need) for name, need in sim.needs.items()}, sim.buffers
    assert {name for name in room if needs[name] > room[name]} == ({full} if full else set())
    assert full or 0 < needs["nconmax"] < room["nconmax"]
    assert list(sim.needs) == list(room) == ["njmax", "nconmax"] and make("mujoco", scene, 1).needs == {}


def combs() -> Scene:
    """Return two bodies whose boxes overlap in the reference pose, like the pieces of a gripper."""
    teeth = "".join(f"<geom type='box' size='.04 .04 .04' pos='{0.1 * i} 0 0'/>" for i in range(12))
    body = f"<body><freejoint/>{teeth}</body>"
    return scene_with(500, combs=f"<mujoco><worldbody>{body}{body}</worldbody></mujoco>")


def heap() -> Scene:
    """Return boxes that fall onto a heap: 91 contacts at rest."""
    place = np.random.default_rng(1).uniform(-0.2, 0.2, (20, 2))
    boxes = "".join(
        f"<body pos='{x} {y} {0.1 + 0.12 * (i // 4)}'><freejoint/><geom type='box' size='.05 .05 .05'/></body>"
        for i, (x, y) in enumerate(place)
    )
    return scene_with(500, ground=True, heap=f"<mujoco><worldbody>{boxes}</worldbody></mujoco>")


@pytest.mark.parametrize(("made", "steps"), [(combs, 1), (heap, 1500), (ant_scene, 400)])
def test_estimated_buffers_suffice_for_mujoco(made, steps):
    model = made().model
    rows, contacts = estimate_buffers(model)
    data = mujoco.MjData(model)
    for _ in range(steps):
        mujoco.mj_step(model, data)
        assert data.ncon <= contacts and data.nefc <= rows
    assert data.ncon > 32 or made is ant_scene
    assert made is not ant_scene or (rows, contacts) == (96, 32), "larger buffers cost memory and time"


def test_buffer_estimate_of_a_diverging_scene_ends(capfd):
    spec = mujoco.MjSpec.from_string(
        "<mujoco><worldbody><body><joint name='j'/><geom size='.1'/></body></worldbody>"
        "<actuator><position joint='j' kp='-1e9'/><motor joint='j' ctrlrange='-1e9 1e9'/></actuator></mujoco>"
    )
    assert estimate_buffers(scene_with(20, wild=spec).model) == (16, 16) and capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_height_field_overflow_requests_no_larger_buffer():
    spec = mujoco.MjSpec()
    heights = np.random.default_rng(0).uniform(0.0, 1.0, 51 * 51)
    spec.add_hfield(name="hills", nrow=51, ncol=51, size=[0.5, 0.5, 0.05, 0.1], userdata=heights)
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname="hills")
    body = spec.worldbody.add_body(name="plate", pos=[0, 0, 0.08])
    body.add_freejoint()
    body.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, size=[0.3, 0.3, 0.02])
    sim = make("mjwarp", scene_with(500, hills=spec), 2)
    for _ in range(10):
        sim.step(5)
    assert sim.overflow.all()
    assert all(need <= sim.buffers[name] for name, need in sim.needs.items()), "larger buffers would not help"


def test_suggested_buffer_sizes_hold_the_needs():
    room = {"njmax": 128, "nconmax": 16}
    assert enough(room, {"njmax": 40, "nconmax": 91}) == "sim.njmax=128 sim.nconmax=144"
    assert enough(room, {"njmax": 129, "nconmax": 15}) == "sim.njmax=256 sim.nconmax=32"


def test_early_solver_stop_is_not_an_overflow():
    scene = ant_scene()
    scene.spec.option.iterations = 1
    sim = make("mjwarp", scene, 32)
    randomize_ants([sim.articulation("ant")])
    sim.step(1)
    assert sim._overflow.any()  # the solver's own bit
    assert not sim.overflow.any()


def test_estimated_buffers_suffice_for_tumbling_ants(scene):
    sim = make("mjwarp", scene, 64)
    ant = sim.articulation("ant")
    for seed in range(10):
        randomize_ants([ant], seed)
        sim.refresh()
        sim.step(10)
        assert not sim.overflow.any()


def test_scene_unsupported_by_mjwarp_is_rejected():
    scene = ball_scene()
    scene.option.enableflags = mujoco.mjtEnableBit.mjENBL_FWDINV
    with raises(ConfigError, hint="Try sim=mujoco"):
        make("mjwarp", scene, 1)


@pytest.mark.parametrize("kind", [RuntimeError, Exception])  # Warp raises Exception if it cannot load a module
def test_failed_capture_falls_back_to_eager(kind, monkeypatch, caplog):
    def broken(*_, **__):
        raise kind("no capture today\nsecond line")

    reference = make("mjwarp", ball_scene(), 2)
    reference.step(5)
    monkeypatch.setattr(warp.wp, "ScopedCapture", broken)
    with caplog.at_level(logging.WARNING, "gpusim_rl.sim"):
        sim = make("mjwarp", ball_scene(), 2)
        sim.step(5)
    assert torch.equal(sim.qpos, reference.qpos)
    [line] = [record.getMessage() for record in caplog.records]
    assert "eagerly" in line and line.endswith(": no capture today")
    assert gc.isenabled()


class FakeStream(wp.Stream):
    """Stream without a device that records which stream waits for which."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self.done = name, done

    def __del__(self) -> None:
        pass

    def wait_stream(self, other_stream: wp.Stream, *_: Any, **__: Any) -> None:
        assert isinstance(other_stream, FakeStream)
        self.done.append(f"{self.name} waits for {other_stream.name}")


def test_eager_launches_use_warps_stream_in_order_with_torch(monkeypatch):
    done: list[str] = []
    torchs, own = FakeStream("torch", done), FakeStream("Warp", done)
    monkeypatch.setattr(warp.wp, "Stream", lambda device: own)
    monkeypatch.setattr(warp.wp, "ScopedStream", lambda stream, **_: nullcontext(done.append(f"on {stream.name}")))
    graphs = WarpGraphs(torch.device("cpu"), enabled=False)
    for _ in range(2):
        graphs._run_eagerly("key", torchs, lambda: done.append("body"))
    assert done == ["Warp waits for torch", "on Warp", "body", "torch waits for Warp"] * 2


@pytest.mark.parametrize("ids", [(3, 3), (3, 4)])
def test_torch_capture_must_keep_its_id(ids, monkeypatch):
    found, ended = iter(ids), []
    monkeypatch.setattr(warp, "_capture_id", lambda stream: next(found))
    monkeypatch.setattr(warp.wp, "capture_begin", lambda **_: None)
    monkeypatch.setattr(warp.wp, "capture_end", lambda **_: ended.append("graph"))
    monkeypatch.setattr(warp.wp, "ScopedStream", lambda *_, **__: nullcontext())
    graphs = WarpGraphs(torch.device("cpu"), enabled=True)
    same = ids[0] == ids[1]
    with nullcontext() if same else pytest.raises(RuntimeError, match="changed the id"):
        graphs._run_in_torch_graph(FakeStream("torch", []), lambda: None)
    assert ended == ["graph"]


def test_deferred_launches_can_be_replayed():
    graphs, done, taken = WarpGraphs(torch.device("cpu"), enabled=False), [], []
    with warp.defer_launches(taken.append):
        graphs.run("a", lambda: done.append("a"))
        graphs.run("b", lambda: done.append("b"))
    assert done == []
    for launch in [*taken, *taken]:
        launch()
    assert done == ["a", "b", "a", "b"]


def test_capture_restores_garbage_collection():
    make("mjwarp", ball_scene(), 1)
    assert gc.isenabled()
    gc.disable()
    try:
        make("mjwarp", ball_scene(), 1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_only_slow_compilation_is_announced(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "gpusim_rl.sim"):
        monkeypatch.setattr(warp, "ANNOUNCE_AFTER_S", 100.0)
        with warp.announce_compilation():
            pass
        assert not caplog.records
        monkeypatch.setattr(warp, "ANNOUNCE_AFTER_S", 0.05)
        with warp.announce_compilation():
            time.sleep(0.3)
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("compiling") and "ready after" in last


@pytest.mark.slow
def test_startup_prints_nothing(command, checkout: Path):
    code = "from gpusim_rl.api import make_env; make_env('Ant', num_envs=2, sim='mjwarp', device='cpu').reset()"
    done = command(sys.executable, "-c", code, env={"PYTHONPATH": str(checkout)})
    assert done.stdout == ""
    assert done.stderr == ""


@pytest.mark.slow
def test_unwritable_home_is_reported_in_one_line(train_cli, tmp_path: Path, monkeypatch):
    for name in ("WARP_CACHE_PATH", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "home"
    done = train_cli("task=Cartpole", "sim=mjwarp", "device=cpu", "num_envs=4", env={"HOME": str(home)}, check=False)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and f"{home}/.cache/warp/" in line
    assert "Not a directory" in line and "WARP_CACHE_PATH=" in line


@wp.kernel
def count_up(numbers: wp.array(dtype=int)):  # type: ignore[valid-type]
    numbers[0] = 1


@pytest.mark.parametrize("enabled", [True, False], ids=["captured", "eager"])
def test_unwritable_kernel_cache_is_reported(tmp_path: Path, monkeypatch, enabled):
    graphs = WarpGraphs(torch.device("cpu"), enabled=enabled)
    with graphs.scope():
        numbers = wp.zeros(1, dtype=int)
    (tmp_path / "cache").touch()
    monkeypatch.setattr(wp.config, "kernel_cache_dir", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=f"Warp .* {tmp_path}/cache: "):
        graphs.run("count", lambda: wp.launch(count_up, dim=1, inputs=[numbers]))


@pytest.mark.parametrize(
    "name, older, need",
    [
        ("mujoco", {"mujoco": "3.12.0"}, "mujoco>=3.17,<5"),
        ("mjwarp", {"mujoco": "3.17.0", "mujoco-warp": "3.12.0"}, "mujoco-warp>=4.0,<5"),
        ("newton", {"mujoco": "4.0.0", "mujoco-warp": "3.17.0"}, "mujoco-warp>=4.0,<5"),
    ],
)
def test_outdated_package_is_reported(monkeypatch, name, older, need):
    """Isaac Lab and mjlab pin old packages: ours installs next to them, but its simulators cannot run."""
    monkeypatch.setattr(provenance, "installed_version", older.get)
    with pytest.raises(ConfigError) as error:
        make(name, ball_scene(), 1)
    got = older[Requirement(need).name]
    assert error.value.problem.startswith(f"sim={name} needs {need}, but {got}")
    assert "pip install 'mujoco>=" in error.value.hint


def test_missing_mujoco_warp_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with raises(ConfigError, key="sim=mjwarp", hint="Try pip install 'mujoco-warp>=4.0,<5'"):
        make("mjwarp", ball_scene(), 1)


def test_unsupported_python_is_reported(monkeypatch):
    """On such a Python pip finds no MuJoCo Warp in our range, so its command would not help."""
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    with raises(ConfigError, key="sim=mjwarp", got=(3, 10), hint="Try sim=mujoco sim_device=cpu"):
        make("mjwarp", ball_scene(), 1)


@pytest.mark.parametrize("name", ["mjwarp", "newton"])
def test_physics_follows_torchs_deterministic_mode(name):
    """CPU physics is always deterministic, so the mode changes no result there."""
    pytest.importorskip("newton" if name == "newton" else "mujoco_warp")
    runs = []
    for switch in (True, False):
        torch.use_deterministic_algorithms(switch)
        try:
            sim = make(name, ant_scene(), 4)
        finally:
            torch.use_deterministic_algorithms(False)
        assert sim._model.opt.deterministic == (mujoco_warp.DeterminismType.ALL if switch else 0)
        randomize_ants([sim.articulation("ant")])
        control_steps(sim, 5)
        runs.append(sim.state_dict()["state"])
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
