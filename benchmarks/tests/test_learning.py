"""Learning benchmark: outcomes from rows of a run, and their report."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths
from learn import learning
from learn.learning import (
    POINTS,
    Goal,
    Outcome,
    describe,
    draw,
    fill,
    hold_against,
    measure_run,
    read_goals,
    read_outcomes,
    table,
    train_to,
    write_outcomes,
)


def outcome(**changes: object) -> Outcome:
    values = {"task": "Ant", "seed": 1, "threshold": 100.0, "overrides": [], "run": "", **changes}
    return Outcome(**values)  # type: ignore[arg-type]


def write_rows(folder: Path, returns: Sequence[float | None], counts: Sequence[int] | None = None) -> Path:
    lines = ["iteration,env_steps,time/elapsed_s,episode/return,episode/count,sim/diverged,task/level"]
    for i, value in enumerate(returns, start=1):
        count = 0 if value is None else 100 if counts is None else counts[i - 1]
        lines.append(f"{i},{1000 * i},{2.5 * i},{'' if value is None else value},{count},{i % 2},{i / 10}")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_first_time_at_threshold_and_best_return_are_kept(tmp_path):
    run = write_rows(tmp_path, [None, 10.0, 101.0, 150.0, 90.0])
    found = measure_run(outcome(), run)
    assert found.reached and found.env_steps_to_threshold == 3000 and found.seconds_to_threshold == 7.5
    assert (found.final_return, found.best_return, found.env_steps, found.seconds) == (90.0, 150.0, 5000, 12.5)
    assert found.diverged == 3 and found.stats == {"level": 0.5}
    assert found.curve == [[0.002, 5.0, 10.0], [0.003, 7.5, 101.0], [0.004, 10.0, 150.0], [0.005, 12.5, 90.0]]


def test_measuring_again_starts_from_scratch(tmp_path):
    found = measure_run(outcome(), write_rows(tmp_path, [10.0, 120.0]))
    found.threshold = 130.0
    measure_run(found, tmp_path)
    assert not found.reached and found.env_steps_to_threshold is None
    measure_run(found, write_rows(tmp_path, [10.0, 120.0, 140.0]))
    assert found.env_steps_to_threshold == 3000


def test_incomplete_row_is_left_out(tmp_path):
    run = write_rows(tmp_path, [10.0, 20.0])
    for half_written in ("3,30", "3,3000,7.5,30.0,100,1,0."):  # the second has all columns
        run = write_rows(tmp_path, [10.0, 20.0])
        with (run / "metrics.csv").open("a") as file:
            file.write(half_written)
        found = measure_run(outcome(), run)
        assert found.env_steps == 2000 and found.final_return == 20.0 and found.stats == {"level": 0.2}


def test_mean_of_few_episodes_is_ignored(tmp_path):
    found = measure_run(outcome(), write_rows(tmp_path, [150.0, 120.0, 50.0, 60.0], [1, 99, 100, 100]))
    assert not found.reached and found.best_return == 60.0
    assert [point[2] for point in found.curve] == [50.0, 60.0] and found.episodes == 100
    found = measure_run(outcome(), write_rows(tmp_path, [150.0, 120.0], [1, 7]))
    assert (found.final_return, found.episodes, found.best_return, found.curve) == (120.0, 7.0, None, [])
    draw([found], matplotlib.figure)


def test_new_threshold_applies_without_rows():
    curve = [[0.1, 10.0, 20.0], [0.3, 30.0, 70.0], [0.5, 50.0, 90.0]]
    known = outcome(threshold=60.0, reached=True, best_return=95.0, curve=curve, env_steps=5e5, seconds=50.0)
    hold_against(known, 200.0)
    assert not known.reached and known.seconds_to_threshold is None and known.threshold == 200.0
    hold_against(known, 80.0)
    assert known.reached and (known.env_steps_to_threshold, known.seconds_to_threshold) == (5e5, 50.0)
    hold_against(known, 60.0)
    assert (known.env_steps_to_threshold, known.seconds_to_threshold) == (3e5, 30.0)
    hold_against(known, 93.0)  # between two kept points: at the end, not too early
    assert known.reached and known.seconds_to_threshold == 50.0
    empty = outcome()
    hold_against(empty, 1.0)
    assert not empty.reached


def test_long_curve_is_thinned_and_keeps_its_end(tmp_path):
    found = measure_run(outcome(), write_rows(tmp_path, [float(i) for i in range(1, 1001)]))
    assert POINTS // 2 < len(found.curve) <= POINTS and found.curve[-1] == [1.0, 2500.0, 1000.0]


def test_outcomes_round_trip(tmp_path):
    several = [outcome(task="Walker2d", seed=2), outcome(task="Ant", seed=2), outcome(task="Ant", stats={"level": 1.5})]
    write_outcomes(tmp_path / "tasks.json", several)
    assert read_outcomes(tmp_path / "tasks.json") == [several[2], several[1], several[0]]
    assert read_outcomes(tmp_path / "nothing.json") == []


def test_table_shows_medians_and_missed_goals():
    reached = {"reached": True, "env_steps": 5e6, "seconds": 100.0, "final_return": 120.0, "random_return": 3.2}
    lines = table(
        [
            outcome(seed=1, **reached, env_steps_to_threshold=1e6, seconds_to_threshold=30.0),
            outcome(seed=2, **reached, env_steps_to_threshold=3e6, seconds_to_threshold=50.0),
            outcome(task="Walker2d", env_steps=7e6, seconds=600.0, final_return=-1500.0, best_return=90.0),
            outcome(
                task="Hopper",
                final_return=5.0,
                random_return=5.1,
                overrides=["algo=sac", "num_envs=8", "sac.horizon=2"],
            ),
        ],
        {"Ant": Goal(task="Ant", threshold=100.0, compare="5466")},
    )
    assert lines[2] == ("|`Ant`|100|2.0 M|40 s|||5466|")
    assert lines[3].startswith("|`Hopper`|100 (0 of 1 seeds, not above random)|0.0 M|")
    assert lines[3].endswith("|`algo=sac num_envs=8 sac.horizon=2`||")
    assert lines[4] == "|`Walker2d`|100 (0 of 1 seeds)|7.0 M|10 min||||"
    assert lines[5] == "" and "1 to 2 seeds" in lines[6]


def test_table_shows_end_if_most_seeds_miss_goal():
    first = outcome(
        seed=1, reached=True, env_steps=2e6, seconds=60.0, env_steps_to_threshold=1e6, seconds_to_threshold=30.0
    )
    ends = [outcome(seed=seed, env_steps=5e6, seconds=600.0) for seed in (2, 3)]
    assert "|100 (1 of 3 seeds)|5.0 M|10 min|" in table([first, *ends], {})[2]


def test_preparation_time_counts():
    times = [(10.0, 100.0), (20.0, 20.0), (100.0, 10.0)]
    seeds = [
        outcome(reached=True, env_steps_to_threshold=1e6, seconds_to_threshold=spent, prepare_seconds=before)
        for spent, before in times
    ]
    assert "|110 s|" in table(seeds, {})[2]


def test_each_seed_has_separate_files():
    goal = Goal(task="Ant", threshold=1.0, overrides=("a=x-{seed}.npz",), prepare=("make.py x-{seed}.npz",))
    assert goal.for_seed(3) == Goal(task="Ant", threshold=1.0, overrides=("a=x-3.npz",), prepare=("make.py x-3.npz",))


def test_table_shows_metrics_of_task():
    shown = {"successes": "{:.1f} goals per episode", "error": "{:.0%} off"}
    goals = {"Ant": Goal(task="Ant", threshold=1.0, success=shown)}
    seeds = [outcome(seed=seed, stats={"successes": 2.0 * seed, "other": 3.0}) for seed in (1, 2)]
    assert "|3.0 goals per episode|" in table(seeds, goals)[2]
    seeds[0].stats["error"] = 0.25
    assert "|3.0 goals per episode, 25% off|" in table(seeds, goals)[2]
    assert "|–|" in table([outcome()], goals)[2]
    for seed in seeds:
        seed.recipe, seed.in_full = "quick", {"error": 0.5}
    row = table(seeds, goals)[2]
    assert row.startswith("|`Ant` (quick)|") and "|3.0 goals per episode, 25% off; in the full task 50% off|" in row


def test_episode_statistic_is_newest_known_value(tmp_path):
    lines = ["iteration,env_steps,time/elapsed_s,episode/return,episode/count,task/success"]
    lines += [f"{i},{i},{i},1.0,100,{'' if i % 4 else i / 100}" for i in range(1, 31)]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    assert measure_run(outcome(), tmp_path).stats == {"success": 0.28}


def write_successes(folder: Path, rows: Sequence[tuple[float | None, int]]) -> Path:
    lines = ["env_steps,time/elapsed_s,episode/return,episode/count,episode/ended,task/success"]
    lines += [f"{i},{2 * i},900.0,100,{n},{'' if x is None else x}" for i, (x, n) in enumerate(rows, start=1)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_task_statistic_is_averaged_over_100_episodes(tmp_path):
    # 40 episodes are too few, and 60 of 110 too; 1.0 of 60 and 0.2 of 50 give 0.64. Returns do not count.
    rows = [(1.0, 40), (None, 0), (0.0, 50), (1.0, 60), (0.2, 50), (None, 30)]
    found = measure_run(outcome(threshold=0.6, stat="success"), write_successes(tmp_path, rows))
    assert (found.reached, found.env_steps_to_threshold, found.seconds_to_threshold) == (True, 5, 10)
    assert found.stats["success"] == pytest.approx(70 / 110) and found.best_return == 900.0
    found = measure_run(outcome(threshold=0.65, stat="success"), tmp_path)
    assert not found.reached and found.seconds_to_threshold is None
    found = measure_run(outcome(threshold=0.5, stat="success"), write_successes(tmp_path, rows[:1]))
    assert not found.reached and found.stats == {"success": 1.0}, "too few episodes, but still reported"
    assert not measure_run(outcome(threshold=0.5, stat="elsewhere"), tmp_path).reached


def test_without_rows_only_final_task_statistic_is_known():
    kept = {"best_return": 900.0, "env_steps": 5e5, "seconds": 50.0, "curve": [[0.1, 10.0, 900.0]]}
    known = outcome(threshold=600.0, reached=True, stats={"success": 0.7}, **kept)
    hold_against(known, 0.5, "success")
    assert not known.reached, "0.7 may cover only a few episodes"
    judged = outcome(threshold=0.5, stat="success", reached=True, stats={"success": 0.7}, **kept)
    hold_against(judged, 0.4, "success")
    assert (judged.reached, judged.env_steps_to_threshold, judged.seconds_to_threshold) == (True, 5e5, 50.0)
    hold_against(judged, 0.8, "success")
    assert not judged.reached
    hold_against(known, 0.5, "turns")
    assert not known.reached and (known.threshold, known.stat) == (0.5, "turns")
    hold_against(known, 600.0)
    assert known.reached and known.stat == "" and known.seconds_to_threshold == 10.0


def test_threshold_of_task_statistic_shows_its_name():
    short = outcome(threshold=0.5, stat="success", final_return=900.0, stats={"success": 0.0639}, env_steps=1e6)
    assert table([short], {})[2].startswith("|`Ant`|`success` 0.5 (0 of 1 seeds)|1.0 M|")
    text = "Ant recipe full seed 1: return 900, `success` 0.064, below `success` 0.5, after 1.0 M steps"
    assert describe(short) == text
    short.reached, short.env_steps_to_threshold, short.seconds_to_threshold = True, 1e6, 9.0
    assert describe(short).startswith("Ant recipe full seed 1: `success` 0.5 after 1.0 M steps, 9 s; ")
    draw([short], matplotlib.figure)


def test_fill_replaces_only_text_between_marks():
    text = "before\n<!-- learn -->\nold\n<!-- /learn -->\nafter\n"
    assert fill(text, ["a", "b"]) == "before\n<!-- learn -->\na\nb\n<!-- /learn -->\nafter\n"
    assert fill("no marks\n", ["a"]) == "no marks\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ant: {treshold: 3}", "unknown key .Ant.treshold.*Ant.threshold"),
        ("Ant: [", "cannot read"),
        ("Ant: {minutes: 3}", "missing key .Ant.threshold"),
        ("[Ant, Hopper]", "got list"),
        ("Ant: 3000", "got int"),
        ("Ant: {threshold: {}}", r"Ant\.threshold.*got {}"),
        ("Ant: {threshold: {a: 1, b: 2}}", r"Ant\.threshold.*got {'a': 1\.0, "),
        ("Ant: {threshold: {success: half}}", r"Ant\.threshold: expected a number"),
    ],
)
def test_wrong_goals_are_rejected_in_one_line(tmp_path, text, message):
    file = tmp_path / "learn.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_goals(file)
    assert "\n" not in str(error.value)


def test_page_shows_committed_data():
    root = paths.checkout()
    assert root is not None
    goals = read_goals(root / "benchmarks" / "learn" / "learn.yaml")
    outcomes = read_outcomes(root / "benchmarks" / "learn" / "tasks.json")
    page = (root / "docs" / "benchmarks.md").read_text()
    assert "<!-- learn -->" in page and fill(page, table(outcomes, goals)) == page
    for found in outcomes:
        assert found.task in goals and found.environment["git"]["sha"], found.task
        assert (found.threshold, found.stat) == goals[found.task].judged, found.task
        if found.stat:
            # A reached value may be slightly lower at the end.
            assert found.reached or found.stats.get(found.stat, 0.0) < found.threshold, found.task
        elif found.reached:
            assert found.best_return is not None and found.best_return >= found.threshold, found.task
            assert found.seconds_to_threshold is not None and found.seconds_to_threshold <= found.seconds, found.task
        else:
            assert found.best_return is None or found.best_return < found.threshold, found.task
        assert json.dumps(found.curve) and found.random_return is not None


# Stand-in for a training: writes a run folder until it gets SIGTERM.
TRAINER = """\
import json, pathlib, signal, sys, time
values = dict(text.split("=", 1) for text in sys.argv[2:])
if "checkpoint" in values:
    run = pathlib.Path(values["checkpoint"])
else:
    run = pathlib.Path(values["log.dir"], values["experiment"], "run")
    (run / "checkpoints").mkdir(parents=True)
how = sys.argv[1]
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
(run / "env.json").write_text(json.dumps({"cpu": {"available": 1}, "python": "3"}))
columns = "env_steps,time/elapsed_s,episode/return,episode/count"
(run / "metrics.csv").write_text(columns + "\\n10,5.0,3.0,100\\n")
(run / "checkpoints" / "last.pt").write_text("")
(run / "words").write_text(" ".join(sys.argv))
(run / "config.yaml").write_text(f"seed: {values.get('seed')}\\n")
while how == "deaf" or (how == "trains" and not asked):
    time.sleep(0.01)
print("out of memory")
sys.exit(3 if how == "fails" else 143)
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "POLL_S", 0.05)
    (tmp_path / "trainer.py").write_text(TRAINER)

    def train(
        how: str, found: Outcome, minutes: float = 0.05, prepare: tuple[str, ...] = (), **arguments: Any
    ) -> Outcome:
        goal = Goal(task="Ant", threshold=100.0, minutes=minutes, prepare=prepare)
        command = [sys.executable, str(tmp_path / "trainer.py"), how]
        settings: dict[str, Any] = {"environment": os.environ, "runs": tmp_path, "say": lambda text: None, **arguments}
        return train_to(goal, found, command=command, **settings)

    return train


def test_training_is_pinned_to_its_cpus(train, monkeypatch):
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("CPUs cannot be shared out here")
    pinned = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: pinned.append((process > 0, cpus)))
    train("trains", outcome(), cpus={0})
    assert pinned == [(True, {0})]


def test_preparation_runs_before_training(train, tmp_path):
    (tmp_path / "make.py").write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('made')")
    made = train("trains", outcome(), prepare=(f"{tmp_path}/make.py {tmp_path}/made",))
    assert (tmp_path / "made").read_text() == "made"
    assert made.prepare_seconds > 0.0
    with pytest.raises(ConfigError, match=r"/nothing\.py .*No such file"):
        train("trains", outcome(), prepare=(f"{tmp_path}/nothing.py",))
    (tmp_path / "killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ConfigError, match=r"python .*/killed.py failed: SIGKILL"):
        train("trains", outcome(), prepare=(f"{tmp_path}/killed.py",))


def test_preparation_can_be_stopped(train, tmp_path):
    (tmp_path / "long.py").write_text("import sys, time; open(sys.argv[1], 'w').close(); time.sleep(600)")
    stop, begun = threading.Event(), tmp_path / "begun"

    def stop_when_begun():
        while not begun.exists():
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=stop_when_begun, daemon=True).start()
    assert train("trains", outcome(), prepare=(f"{tmp_path}/long.py {begun}",), stop=stop).run == ""


def test_late_failure_is_reported_and_recorded(train, tmp_path):
    found = outcome()
    with pytest.raises(ConfigError, match=r"Ant.*: out of memory"):
        train("fails", found, minutes=60.0)  # ends by itself, without a stop request
    assert found.run == str(tmp_path / "learn-Ant" / "run") and found.final_return == 3.0
    assert found.environment["cpu"] == {"available": 1}


def test_unresponsive_training_is_killed_and_recorded(train, monkeypatch):
    monkeypatch.setattr(learning, "STOP_S", 0.2)
    found = outcome()
    with pytest.raises(ConfigError, match="killed"):
        train("deaf", found)
    assert found.run and found.seconds == 5.0


def test_training_can_be_stopped_early(train):
    stop, found = threading.Event(), outcome()
    threading.Timer(0.5, stop.set).start()
    train("trains", found, minutes=60.0, stop=stop)
    assert not found.reached


def test_run_of_training_is_found_by_seed(train, tmp_path):
    found = outcome(seed=2)
    other = tmp_path / "learn-Ant" / "other"
    other.mkdir(parents=True)
    (other / "metrics.csv").write_text("")

    (other / "config.yaml").write_text("seed: 1\n")  # of a concurrent training, and newer
    os.utime(other / "config.yaml", (2e9, 2e9))
    assert learning._new_run(tmp_path / "learn-Ant", 2, 0.0) is None
    assert learning._new_run(tmp_path / "learn-Ant", 1, 0.0) == other
    train("trains", found)
    assert found.run == str(tmp_path / "learn-Ant" / "run")


def test_finished_training_continues_with_more_iterations(train, tmp_path):
    found = train("trains", outcome())
    run = Path(found.run)
    (run / "metrics.csv").write_text(
        "iteration,env_steps,time/elapsed_s,episode/return,episode/count\n5,10,1.0,3.0,100\n"
    )
    for most, words in ((5, ["max_iterations=10"]), (6, [])):
        (run / "config.yaml").write_text(f"seed: 1\nmax_iterations: {most}\n")
        assert learning._more_iterations(run) == words
    (run / "config.yaml").write_text("seed: 1\nmax_iterations: 5\n")
    train("trains", found)
    assert (run / "words").read_text().split()[-3:-1] == ["max_iterations=10", f"log.dir={tmp_path}"]


def test_training_on_two_machines_records_both(train, tmp_path):
    here, there = {"cpu": {"available": 1}, "gpu": None}, {"cpu": {"available": 4}, "gpu": None}
    run = tmp_path / "run"
    run.mkdir()
    (run / "env.json").write_text(json.dumps({**here, "earlier": [there, here]}))
    environment = learning._environment(run)
    assert environment == {**here, "earlier": [there]}
