"""The comparison of trainings with and without mirror images: where a curve reaches its target, and what is kept."""

from __future__ import annotations

import json

import symmetry


def test_the_target_is_reached_where_the_mean_of_ten_rows_is():
    errors = [0.5] * 5 + [0.15] * 20
    rows = [{"env_steps": str(100 * (i + 1)), "task/lin_vel_error": str(e)} for i, e in enumerate(errors)]
    assert symmetry.steps_to_target(rows) == 1400  # nine of ten rows at 0.15, one at 0.5: 0.185
    assert symmetry.steps_to_target(rows[:12]) is None


def test_both_are_trained_once_and_looked_at(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(symmetry, "STARTING", 2)
    monkeypatch.setattr(symmetry, "gait", lambda run, envs, look=symmetry.gait: look(run, envs, steps=10))
    small = ["num_envs=2", "max_iterations=1", "ppo.horizon=4", "ppo.minibatch_size=8", "ppo.network.hidden=[8]"]
    places = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "symmetry.json")]
    monkeypatch.setattr("sys.argv", ["symmetry.py", *small, "device=cpu", "--seeds", "3", "--num-envs", "2", *places])
    symmetry.main()
    rows = json.loads((tmp_path / "symmetry.json").read_text())["rows"]
    assert [(row["symmetry"], row["seed"], row["env_steps"]) for row in rows] == [("with", 3, 8), ("without", 3, 8)]
    assert "augment=false" in rows[1]["command"] and "augment" not in rows[0]["command"]
    assert all(0.0 <= row["gait"]["asymmetry"] <= 2.0 for row in rows)
    symmetry.main()
    assert json.loads((tmp_path / "symmetry.json").read_text())["rows"] == rows
    assert len(capsys.readouterr().out.splitlines()) >= 2
