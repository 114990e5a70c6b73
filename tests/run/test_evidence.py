"""Learning evidence: what is concluded from a run's rows, and what is told about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpusim_rl import paths
from gpusim_rl.api import make_env
from gpusim_rl.errors import ConfigError
from gpusim_rl.run.evidence import (
    POINTS,
    Goal,
    Outcome,
    describe,
    fill,
    measure_run,
    random_return,
    read_goals,
    read_outcomes,
    table,
    write_outcomes,
)


def outcome(**changes: object) -> Outcome:
    values = {"task": "Ant", "seed": 1, "threshold": 100.0, "overrides": [], "run": "", **changes}
    return Outcome(**values)  # type: ignore[arg-type]


def write_rows(folder: Path, returns: list[float | None]) -> Path:
    lines = ["iteration,env_steps,time/elapsed_s,episode/return,sim/diverged,task/level"]
    for i, value in enumerate(returns, start=1):
        lines.append(f"{i},{1000 * i},{2.5 * i},{'' if value is None else value},{i % 2},{i / 10}")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_the_first_crossing_counts_and_the_best_is_kept(tmp_path):
    run = write_rows(tmp_path, [None, 10.0, 101.0, 150.0, 90.0])
    found = measure_run(outcome(), run)
    assert found.reached and found.env_steps_to_threshold == 3000 and found.seconds_to_threshold == 7.5
    assert (found.final_return, found.best_return, found.env_steps, found.seconds) == (90.0, 150.0, 5000, 12.5)
    assert found.diverged == 3 and found.stats == {"level": 0.5}
    assert found.curve == [[0.002, 5.0, 10.0], [0.003, 7.5, 101.0], [0.004, 10.0, 150.0], [0.005, 12.5, 90.0]]


def test_measuring_again_begins_anew(tmp_path):
    found = measure_run(outcome(), write_rows(tmp_path, [10.0, 120.0]))
    found.threshold = 130.0
    measure_run(found, tmp_path)
    assert not found.reached and found.env_steps_to_threshold is None
    measure_run(found, write_rows(tmp_path, [10.0, 120.0, 140.0]))
    assert found.env_steps_to_threshold == 3000


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    run = write_rows(tmp_path, [10.0, 20.0])
    with (run / "metrics.csv").open("a") as file:
        file.write("3,30")
    found = measure_run(outcome(), run)
    assert found.env_steps == 2000 and found.final_return == 20.0


def test_a_long_curve_is_thinned_and_keeps_its_end(tmp_path):
    found = measure_run(outcome(), write_rows(tmp_path, [float(i) for i in range(1, 1001)]))
    assert POINTS // 2 < len(found.curve) <= POINTS and found.curve[-1] == [1.0, 2500.0, 1000.0]


def test_what_is_written_is_read(tmp_path):
    several = [outcome(task="Walker2d", seed=2), outcome(task="Ant", seed=2), outcome(task="Ant", stats={"level": 1.5})]
    write_outcomes(tmp_path / "tasks.json", several)
    assert read_outcomes(tmp_path / "tasks.json") == [several[2], several[1], several[0]]
    assert read_outcomes(tmp_path / "nothing.json") == []


def test_the_table_tells_medians_and_what_is_not_reached():
    reached = {"reached": True, "env_steps": 5e6, "seconds": 100.0, "best_return": 120.0, "random_return": 3.2}
    environment = {"cpu": {"available": 2}, "gpu": None}
    lines = table(
        [
            outcome(seed=1, **reached, env_steps_to_threshold=1e6, seconds_to_threshold=30.0, environment=environment),
            outcome(seed=2, **reached, env_steps_to_threshold=3e6, seconds_to_threshold=50.0, environment=environment),
            outcome(task="Walker2d", env_steps=7e6, seconds=600.0, best_return=-1500.0),
        ],
        {"Ant": Goal(task="Ant", threshold=100.0, compare="5466, skrl")},
    )
    assert lines[2] == "| `Ant` | 100 | 2 of 2 | 2.0 M | 40 s | 2 CPU cores | 120 | 3 | 5466, skrl |"
    assert lines[3] == "| `Walker2d` | 100 | 0 of 1 | 7.0 M | 10 min | ? CPU cores | -1,500 | – |  |"


def test_a_sentence_tells_whether_it_was_reached():
    assert describe(outcome(env_steps=2e6)) == "Ant seed 1: no episode ended, below 100, after 2.0 M steps"
    text = describe(outcome(reached=True, env_steps_to_threshold=1e6, seconds_to_threshold=9.0, final_return=105.0))
    assert text == "Ant seed 1: 100 after 1.0 M steps, 9 s; return 105"


def test_only_what_is_between_the_marks_is_replaced():
    text = "before\n<!-- learn -->\nold\n<!-- /learn -->\nafter\n"
    assert fill(text, ["a", "b"]) == "before\n<!-- learn -->\na\nb\n<!-- /learn -->\nafter\n"
    assert fill("no marks\n", ["a"]) == "no marks\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ant: {treshold: 3}", "unknown key .Ant.treshold.*Ant.threshold"),
        ("Ant: [", "cannot read"),
        ("Ant: {minutes: 3}", "missing key .Ant.threshold"),
    ],
)
def test_wrong_goals_are_one_line(tmp_path, text, message):
    file = tmp_path / "learn.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_goals(file)
    assert "\n" not in str(error.value)


def test_random_actions_are_worse_than_doing_nothing_on_a_cartpole():
    env = make_env("Cartpole", num_envs=32, device="cpu", task={"randomize_episode_start": False})
    value = random_return(env)
    assert -2.0 < value < 100.0 and value == random_return_again()


def random_return_again() -> float:
    env = make_env("Cartpole", num_envs=32, device="cpu", task={"randomize_episode_start": False})
    return random_return(env)


def test_the_readme_shows_the_committed_data():
    root = paths.checkout()
    assert root is not None
    goals = read_goals(root / "benchmarks" / "learn.yaml")
    outcomes = read_outcomes(root / "benchmarks" / "tasks.json")
    readme = (root / "README.md").read_text()
    assert "<!-- learn -->" in readme and fill(readme, table(outcomes, goals)) == readme
    for found in outcomes:
        assert found.task in goals and found.environment["git"]["sha"], found.task
        assert found.reached == any(point[2] >= found.threshold for point in found.curve) or found.reached
        assert json.dumps(found.curve) and found.random_return is not None
