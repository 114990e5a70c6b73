"""Errors and cost of solver settings, against those of the task."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpusim_rl.diagnose import physics_settings
from gpusim_rl.diagnose.physics_settings import Row, buffer_settings, cheapest, compare_settings
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.overrides import text_of

pytest_plugins = ["helpers.tool_runs"]

RANDOM_GRAVITY = {"sim_params": {"gravity": {"range": [0, 3], "operation": "additive", "distribution": "uniform"}}}


def by_settings(monkeypatch: pytest.MonkeyPatch, *limits: tuple[int, int], **settings: object) -> dict[tuple, Row]:
    monkeypatch.setattr(physics_settings, "LIMITS", limits)
    lines = [f"{key}={text_of(value)}" for key, value in {"device": "cpu", "num_envs": 16, **settings}.items()]
    rows = list(compare_settings(lines, steps=25))
    assert [r.note for r in rows if r.note] == [f"the task's, in {settings.get('sim', 'mujoco')}", "half time step"]
    assert all(0.0 <= row.median <= row.p99 <= row.most and row.seconds > 0.0 for row in rows)
    assert (rows[0].most, rows[1].median > 0.0) == (0.0, True)
    return {(row.cone, row.iterations, row.ls_iterations): row for row in rows if row.note != "half time step"}


def test_short_line_search_spoils_elliptic_cones_alone(monkeypatch):
    rows = by_settings(monkeypatch, (10, 20), (10, 8), (2, 8), (200, 8), task="Go1Velocity", sim="mujoco")
    assert list(rows) == [(cone, *fewer) for cone in ("elliptic", "pyramidal") for fewer in ((10, 20), (10, 8), (2, 8))]
    exact, short = (rows[("elliptic", *limits)] for limits in ((10, 20), (10, 8)))
    assert exact.most == 0.0 and short.median > 0.1
    other, same = (rows[("pyramidal", *limits)] for limits in ((10, 20), (10, 8)))
    assert 0.01 < other.median == pytest.approx(same.median, abs=1e-6) and other.p99 < 1.0
    assert rows["pyramidal", 2, 8].median > 2.0 * other.median
    assert cheapest([*rows.values()], 0.01) is exact and cheapest([*rows.values()], 1.0).cone == "pyramidal"


def test_settings_do_not_matter_without_contacts_and_limits(monkeypatch):
    more: dict[str, Any] = {"task.randomize": True, "task.randomization_params": RANDOM_GRAVITY}
    more |= {"task.episode_length": 5}  # a reset draws another gravity
    rows = by_settings(monkeypatch, (100, 50), (8, 8), task="Pendulum", sim="mujoco", **more)
    assert len(rows) == 4 and all(row.most == 0.0 and row.needs == {} for row in rows.values())


def test_first_step_is_untimed_and_diverged_steps_are_left_out(monkeypatch):
    clock = [0.0]

    def step(substeps: int) -> None:
        clock[0] += substeps if clock[0] else 100.0  # the first compiles kernels

    sim = SimpleNamespace(qvel=torch.ones(2, 1), diverged=torch.tensor([False, True]), buffers={}, needs={}, step=step)
    sim.wrote_state = sim.wrote_mocap = lambda where: None
    env: Any = SimpleNamespace(sim=sim, num_envs=2, device=torch.device("cpu"))
    monkeypatch.setattr(physics_settings, "_clock", lambda _: clock[0])
    velocities, seconds, _ = physics_settings._replay(env, [({}, 3)] * 4, 2)
    assert seconds == 3.0 and velocities.flatten().tolist() == [1.0, torch.inf] * 4
    results = iter([velocities, *[torch.full_like(velocities, 1.5)] * 3])
    monkeypatch.setattr(physics_settings, "_replay", lambda *_: (next(results), 1.0, {}))
    assert [row.most for row in by_settings(monkeypatch, (8, 8), task="Pendulum").values()] == [0.0, 0.5, 0.5]


def test_settings_change_only_for_a_gain_and_buffers_are_never_empty():
    own = Row("elliptic", 100, 50, "the task's", 0.0, 0.0, 0.0, 1.04, {"nconmax": 0.0})
    assert cheapest([own, replace(own, iterations=8, seconds=1.0)], 0.01) is own
    assert buffer_settings(own) == ["sim.nconmax=16"]


def test_buffers_are_recommended_from_use_on_warp(monkeypatch):
    pytest.importorskip("mujoco_warp")
    [row] = by_settings(monkeypatch, task="Ant", sim="mjwarp").values()
    assert (row.cone, row.iterations, row.ls_iterations) == ("pyramidal", 12, 20), "limits on Warp"
    assert 8 <= row.needs["njmax"] <= 64 and 1 <= row.needs["nconmax"] <= 16
    sizes = dict(text.removeprefix("sim.").split("=") for text in buffer_settings(row))
    assert all(row.needs[name] * 1.5 <= int(size) < row.needs[name] * 1.5 + 16 for name, size in sizes.items())


def test_doctor_prints_the_cheapest_settings(load_tool, monkeypatch, capsys):
    monkeypatch.setattr(physics_settings, "LIMITS", ((8, 8),))
    doctor, words = load_tool("doctor"), ("physics", "task=Pendulum", "sim=mujoco", "device=cpu", "--steps", "3")
    assert doctor.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 4 and found["cheapest"][0].startswith("sim.cone=")
    rows = [Row(**row | {"p99": 12.0 * ("the task's" not in row["note"])}) for row in found["rows"]]
    monkeypatch.setattr(physics_settings, "compare_settings", lambda *_, **__: rows)
    assert doctor.main([*words, "--tolerance", "0.02"]) == 0
    out = "".join(capsys.readouterr())
    assert "measuring Pendulum with 64 envs" in out and "1,200.0%" in out and "2.0% (the task's): sim.cone=" in out


def test_envs_of_another_library_are_rejected():
    with pytest.raises(ConfigError, match="another library"):
        list(compare_settings(["task=Gymnasium", "env.id=Pendulum-v1"], steps=1))
