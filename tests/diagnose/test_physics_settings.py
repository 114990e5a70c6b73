"""Errors and cost of solver settings, against those of the task."""

from __future__ import annotations

import json

import pytest

from gpusim_rl.diagnose import physics_settings
from gpusim_rl.diagnose.physics_settings import Row, buffer_settings, cheapest, compare_settings
from gpusim_rl.errors import ConfigError

pytest_plugins = ["helpers.tool_runs"]


def by_settings(monkeypatch: pytest.MonkeyPatch, *limits: tuple[int, int], **settings: object) -> dict[tuple, Row]:
    monkeypatch.setattr(physics_settings, "LIMITS", limits)
    lines = [f"{key}={value}" for key, value in {"device": "cpu", "num_envs": 16, **settings}.items()]
    rows = list(compare_settings(lines, steps=25))
    assert [row.note for row in rows[:2]] == ["the task's", "half time step"] and not any(row.note for row in rows[2:])
    assert all(0.0 <= row.median <= row.p99 <= row.most and row.seconds > 0.0 for row in rows)
    assert (rows[0].most, rows[1].median > 0.0) == (0.0, True)
    return {(row.cone, row.iterations, row.ls_iterations): row for row in rows if row.note != "half time step"}


def test_short_line_search_spoils_elliptic_cones_alone(monkeypatch):
    rows = by_settings(monkeypatch, (10, 20), (10, 8), (2, 8), (200, 8), task="Go1Velocity", sim="mujoco")
    cones = ("elliptic", "pyramidal")
    assert list(rows) == [(cone, *fewer) for cone in cones for fewer in ((10, 20), (10, 8), (2, 8))]
    exact, short = (rows[("elliptic", *limits)] for limits in ((10, 20), (10, 8)))
    assert exact.most == 0.0 and short.median > 0.1
    other, same = (rows[("pyramidal", *limits)] for limits in ((10, 20), (10, 8)))
    assert 0.01 < other.median == pytest.approx(same.median, abs=1e-6) and other.p99 < 1.0
    assert rows["pyramidal", 2, 8].median > 2.0 * other.median
    assert cheapest(list(rows.values()), 0.01) is exact
    assert cheapest(list(rows.values()), 1.0).cone == "pyramidal"


def test_settings_do_not_matter_without_contacts_and_limits(monkeypatch):
    rows = by_settings(monkeypatch, (100, 50), (8, 8), task="Pendulum", sim="mujoco")
    assert len(rows) == 4 and all(row.most == 0.0 and row.needs == {} for row in rows.values())


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
    assert doctor.main([*words, "--tolerance", "0.02"]) == 0
    out = capsys.readouterr().out
    assert "half time step" in out and "cheapest within 2.0%: sim.cone=" in out


def test_envs_of_another_library_are_rejected():
    with pytest.raises(ConfigError, match="another library"):
        list(compare_settings(["task=Gymnasium", "env.id=Pendulum-v1"], steps=1))
