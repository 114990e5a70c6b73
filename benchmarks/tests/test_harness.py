"""Interleaved measurement rounds, failed cases, and ratios within rounds."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.run.cuda_graph import WARM_UP, GraphChoice, Graphs
from gpusim_rl.testing.scratch_training import scratch_training
from throughput import baselines, harness, worker
from throughput.harness import SEPARATE, TRAINING, TRAINING_FASTEST, Case, Rounds

FAKE_WORKER = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]


@pytest.fixture
def measure(tmp_path):
    """Return a function that collects all results of `harness.measure` for specs of cases."""

    def run(*specs: dict[str, Any], rounds: int = 3) -> list[list[harness.Result]]:
        cases = [Case(spec.get("name", spec["kind"]), {"diary": str(tmp_path / "diary"), **spec}) for spec in specs]
        schedule = Rounds(number=rounds, seconds=1.0, warm_up=1)
        lines: list[str] = []
        found = list(harness.measure(cases, schedule, command=FAKE_WORKER, environment=os.environ, say=lines.append))
        assert lines[0] == f"starting {cases[0].name}" and lines[-1] == f"round {rounds} of {rounds}"
        return found

    return run


def by_name(rows: Sequence[harness.Result]) -> dict[str, harness.Result]:
    return {row["name"]: row for row in rows}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_rounds_rotate_and_yield_results(measure, tmp_path):
    found = measure({"kind": "physics"}, {"kind": "env"}, {"kind": "policy"})
    warm_up, rounds = "physics env policy ", "physics env policy env policy physics policy physics env "
    assert (tmp_path / "diary").read_text() == warm_up + rounds
    assert [len(rows[0]["rounds"]) for rows in found] == [1, 2, 3, 3]
    assert found[0][0]["memory_bytes"] is None
    row = found[-1][0]
    assert row["env_steps_per_s"] == {"median": 200.0, "min": 200.0, "max": 200.0}
    assert row["phases"] == pytest.approx({"update": 0.2, "log": 0.6, "other": 0.2})
    assert row["trainer_us"] is None and row["trainer_us_rounds"] == [None] * 3
    assert row["memory_bytes"] == {"resident": 5000000}
    assert not any(alive(row["settings"]["pid"]) for row in found[-1])


def test_failed_case_is_a_result_with_error(measure):
    rows = by_name(
        measure(
            {"kind": "physics"},
            {"kind": "baseline", "name": "never starts", "plan": {"start": "ConfigError: unsupported task"}},
            {"kind": "baseline", "name": "raises", "plan": {"raise_at": 3}},
            {"kind": "baseline", "name": "killed", "plan": {"kill_at": 2}},
            {"kind": "baseline", "name": "reports error", "plan": {"speak_at": 4}},
        )[-1]
    )
    assert rows["physics"]["error"] is None
    assert rows["physics"]["rounds"] == [200.0] * 3
    assert rows["never starts"]["error"] == "ConfigError: unsupported task"
    assert rows["raises"]["error"].startswith("MemoryError: no room")
    assert rows["killed"]["error"] == "chatter (signal 9)"
    assert rows["reports error"]["error"] == "ValueError: bad shape"
    assert [rows[name]["rounds"] for name in ("never starts", "raises", "reports error")] == [
        [None] * 3,
        [200.0, None, None],
        [200.0, 200.0, None],
    ]
    assert rows["raises"]["over_physics"]["median"] == 1.0
    assert rows["killed"]["env_steps_per_s"] is None and rows["killed"]["over_physics"] is None


def test_interrupted_measurement_leaves_no_process():
    cases = [Case(kind, {"kind": kind}) for kind in ("physics", "env")]
    running = harness.measure(cases, Rounds(), command=FAKE_WORKER, environment=os.environ, say=lambda text: None)
    pids = [row["settings"]["pid"] for row in next(running)]
    assert all(alive(pid) for pid in pids)
    running.close()
    assert not any(alive(pid) for pid in pids)


def test_separate_trunks_are_measured_for_baselines_that_need_them(measure):
    training = {"kind": "training", "name": TRAINING, "trunk": "shared", "overrides": ["task=Ant"]}
    shared = {"kind": "baseline", "name": "shares", "trunk": "shared", "steps": 50}
    separate = {"kind": "baseline", "name": "cannot", "trunk": "separate", "steps": 25}
    rows = measure({"kind": "physics", "steps": 400}, training, shared, separate)[-1]
    names = [row["name"] for row in rows]
    assert names == ["physics", TRAINING, TRAINING + SEPARATE, "shares", "cannot"]
    found = by_name(rows)
    assert found["shares"]["ours"] == TRAINING
    assert found["shares"]["ours_over_this"]["median"] == 2.0
    assert found["cannot"]["ours"] == TRAINING + SEPARATE
    assert found["cannot"]["ours_over_this"]["median"] == 4.0
    assert len(measure({"kind": "physics"}, training, shared)[-1]) == 3


@pytest.mark.parametrize(
    ("asked", "modes", "compiler", "compiled"),
    [
        (["skrl"], ["same", "fastest"], True, True),
        (["skrl"], ["same"], True, False),
        (["skrl"], ["fastest"], False, False),
        ([], ["same", "fastest"], True, False),
    ],
)
def test_our_training_is_compiled_against_fastest_baselines(monkeypatch, asked, modes, compiler, compiled):
    monkeypatch.setattr(harness, "has_compiler", lambda: compiler)
    cases = harness.training_cases(["task=Ant"], 64, on_mujoco=True, baselines=asked, modes=modes)
    found = {case.name: case.spec for case in cases}
    assert (TRAINING_FASTEST in found) == compiled
    assert not compiled or "compile=learner" in found[TRAINING_FASTEST]["overrides"]


def test_fastest_baseline_is_compared_to_our_fastest(measure):
    training = {"kind": "training", "name": TRAINING, "trunk": "shared", "overrides": ["task=Ant"], "mode": "same"}
    compiled = {**training, "name": TRAINING_FASTEST, "mode": "fastest", "steps": 200}
    baselines = [
        {"kind": "baseline", "name": f"{name}, {mode}", "trunk": trunk, "mode": mode, "steps": 50}
        for name, trunk in (("shares", "shared"), ("cannot", "separate"))
        for mode in ("same", "fastest")
    ]
    found = by_name(measure(training, compiled, *baselines)[-1])
    assert [name for name in found if name.startswith("+")] == [
        TRAINING,
        TRAINING + SEPARATE,
        TRAINING_FASTEST,
        TRAINING_FASTEST + SEPARATE,
    ]
    compared = {name: found[name]["ours"] for name in ("shares, same", "shares, fastest", "cannot, fastest")}
    assert list(compared.values()) == [TRAINING, TRAINING_FASTEST, TRAINING_FASTEST + SEPARATE]
    assert found["shares, fastest"]["ours_over_this"]["median"] == 4.0
    # without a compiled case there is only one to compare with
    found = by_name(measure(training, baselines[1])[-1])
    assert found["shares, fastest"]["ours"] == TRAINING


def test_trainer_overhead_is_compared_within_rounds(measure):
    training = {"kind": "training", "name": TRAINING, "trunk": "shared", "in_env": 0.4}
    baseline = {"kind": "baseline", "name": "baseline", "trunk": "shared", "in_env": 0.3, "plan": {"raise_at": 4}}
    rows = by_name(measure({"kind": "physics"}, training, baseline)[-1])
    assert rows["physics"]["trainer_us"] is None
    assert rows[TRAINING]["trainer_us_rounds"] == pytest.approx([1000.0] * 3)
    assert rows[TRAINING]["trainer_us"] == pytest.approx({"median": 1000.0, "min": 1000.0, "max": 1000.0})
    assert rows["baseline"]["trainer_us_rounds"] == [pytest.approx(2000.0)] * 2 + [None]
    assert rows["baseline"]["trainer_us_over_ours"] == pytest.approx({"median": 2.0, "min": 2.0, "max": 2.0})
    assert rows[TRAINING]["trainer_us_over_ours"] is None


def row(
    name: str, kind: str, rounds: list[float | None], own: list[float | None] | None = None, **settings: Any
) -> harness.Result:
    own = own or [None] * len(rounds)
    return {
        "name": name,
        "kind": kind,
        "mode": "same",
        "env_steps_per_s": harness.spread(rounds),
        "rounds": rounds,
        "trainer_us": harness.spread(own),
        "trainer_us_rounds": own,
        "phases": {"simulate": 0.6, "update": 0.396, "other": 0.004} if kind == "training" else None,
        "memory_bytes": {"resident": 1_234_000_000},
        "settings": settings,
        "error": None if harness.spread(rounds) else "RuntimeError: gone",
    }


def example() -> list[harness.Result]:
    return harness.with_ratios(
        [
            row("bare physics, persistent=false", "physics", [100.0, 200.0, 100.0]),
            row("bare physics, persistent=true", "physics", [90.0, 100.0, 90.0]),
            row("env step", "env", [80.0, 80.0, 80.0]),
            row("+ policy", "policy", [70.0, 70.0, 70.0]),
            row(TRAINING, "training", [60.0, 100.0, 50.0], [4.0, 3.0, 5.0], trunk="shared", precision="bf16"),
            row(TRAINING + SEPARATE, "training", [40.0, 40.0, 40.0], [5.0, 5.0, 10.0], trunk="separate"),
            row("rsl_rl, same", "baseline", [20.0, 10.0, 40.0], [10.0, 20.0, 25.0], trunk="separate", precision="fp32"),
            row("skrl, same", "baseline", [25.0, 25.0, 25.0], [8.0, 9.0, 15.0], trunk="shared", precision="bf16"),
            row("sb3, same", "baseline", [None, None, None]),
        ]
    )


def test_ratios_are_within_rounds_for_equal_work():
    found = by_name(example())
    assert found[TRAINING]["over_physics"] == {"median": 0.5, "min": 0.5, "max": 0.6}
    assert found["rsl_rl, same"]["ours"] == TRAINING + SEPARATE
    assert found["rsl_rl, same"]["ours_over_this"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert found["skrl, same"]["ours"] == TRAINING
    assert found["sb3, same"]["ours_over_this"] is None
    summary = harness.summary(example())
    assert summary["bare_physics"] == "bare physics, persistent=false"
    assert summary["training_over_physics"] == 0.5
    assert summary["training_over_physics_range"] == [0.5, 0.6]
    assert summary["training_env_steps_per_s"] == 60.0
    assert summary["env_step_over_physics"] == 0.8
    assert summary["fastest_baseline"] == "rsl_rl, same"
    assert summary["training_over_fastest_baseline"] == 2.0
    assert summary["training_over_fastest_baseline_range"] == [1.0, 4.0]
    assert found["rsl_rl, same"]["trainer_us_over_ours"] == {"median": 2.5, "min": 2.0, "max": 4.0}
    assert summary["trainer_us"] == 4.0 and summary["trainer_us_range"] == [3.0, 5.0]
    assert summary["leanest_baseline"] == "rsl_rl, same"
    assert summary["baseline_trainer_us_over_ours"] == 2.5
    assert summary["baseline_trainer_us_over_ours_range"] == [2.0, 4.0]


def test_with_graphs_trainer_overhead_is_difference_to_env_step():
    graph = "whole rollout and whole update (auto: CUDA device)"

    def ours(env_graph: str) -> dict[str, harness.Result]:
        training = row(TRAINING, "training", [200e3, 250e3], trunk="shared", graph=graph)
        baseline = row("skrl, same", "baseline", [100e3, 100e3], [5.0, 6.0], trunk="shared")
        rows = [row("env step", "env", [400e3, None], graph=env_graph), training, baseline]
        return by_name(harness.with_ratios(rows))

    found = ours(graph)
    assert found[TRAINING]["trainer_us_rounds"] == [pytest.approx(2.5), None]
    assert found[TRAINING]["trainer_us_by_difference"] and not found["skrl, same"]["trainer_us_by_difference"]
    assert found["skrl, same"]["trainer_us_over_ours"]["median"] == pytest.approx(2.0)
    assert found["env step"]["trainer_us"] is None
    # A step outside of a graph waits for Python, unlike the step in the training's graph.
    found = ours("off (the rollout cannot be captured)")
    assert found[TRAINING]["trainer_us"] is None and found["skrl, same"]["trainer_us_over_ours"] is None


def test_summary_without_measurements_is_empty():
    assert harness.summary([row("+ training", "training", [None])]) == {}


def test_markdown_has_table_per_env_count():
    gpu = {"driver": "600.1", "devices": [{"name": "NVIDIA H200", "memory_gb": 150.0}]}
    result = {
        "command": "python benchmarks/bench.py task=Ant",
        "git": {"sha": "0123456789abcdef", "dirty": True},
        "environment": {
            "time": "2026-01-31T12:00:00+0000",
            "python": "3.11.7",
            "versions": {"torch": "2.13.0", "skrl": "2.1.1"},
            "cpu": {"model": "EPYC", "available": 2},
            "memory_gb": 25.3,
            "gpu": gpu,
        },
        "task": "Ant",
        "sim": "mujoco on cpu",
        "env_counts": [{"num_envs": 8, "cases": example()}, {"num_envs": 16, "cases": example()[:1]}],
    }
    text = harness.markdown(result)
    assert "commit 0123456789 with local changes" in text
    assert "2 CPUs of EPYC, 25.3 GB, NVIDIA H200 (driver 600.1)" in text and "torch 2.13.0" in text
    assert text.count("\n| case ") == 2 and "\n## 8 envs\n" in text and "\n## 16 envs\n" in text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| +")]
    assert lines[1] == ["+ training", "60", "50 to 100", "0.50", "", "4.00", "1,234 MB", "simulate 60 %, update 40 %"]
    assert re.search(r"^- .*separate trunks.*: rsl_rl, same$", text, re.MULTILINE)
    assert re.search(r"^- .*bf16.*: rsl_rl, same \(fp32\)$", text, re.MULTILINE)
    assert "\n- sb3, same: RuntimeError: gone\n" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in table[: len(example()) + 2]}) == 1  # padded


def test_plot_has_line_per_measured_case():
    figures = pytest.importorskip("matplotlib.figure")
    parts = [{"num_envs": count, "cases": example()} for count in (256, 1024)]
    figure = harness.draw({"task": "Ant", "environment": {"cpu": {"available": 2}}, "env_counts": parts}, figures)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [row["name"] for row in example() if row["env_steps_per_s"]]


def test_choose_baselines_selects_installed_ones(monkeypatch):
    there = {"rsl_rl", "stable_baselines3"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    assert baselines.choose_baselines("all") == (["rsl_rl", "sb3"], ["skrl", "rl_games"])
    assert baselines.choose_baselines("none") == ([], [])
    assert baselines.choose_baselines("sb3,sb3") == (["sb3"], [])
    with pytest.raises(ConfigError, match=r"skrl.*pip install 'skrl~="):
        baselines.choose_baselines("sb3,skrl")
    with pytest.raises(ConfigError, match=r"'rslrl'.*'rsl_rl'"):
        baselines.choose_baselines("rslrl")


def test_worker_errors_are_one_line():
    assert worker.one_line(ConfigError("no room")) == "ConfigError: no room"
    assert worker.one_line(RuntimeError("first\nlast")) == "RuntimeError: first"


@pytest.mark.parametrize(("task", "trunk"), [("Cartpole", "shared"), ("Trifinger", "separate")])
def test_critic_with_own_observations_has_separate_trunk(task, trunk):
    overrides = [f"task={task}", "num_envs=2", "device=cpu", "ppo.horizon=2"]
    with worker._trainer(scratch_training(overrides), learns=False) as ours:
        assert ours.settings["trunk"] == trunk


def test_graphs_are_captured_before_measurement():
    done: list[int] = []

    def captured(mode: str) -> int:
        graphs = Graphs(GraphChoice(mode, "test"), torch.device("cpu"))
        done.clear()
        worker._capture(worker.Workload(lambda: done.append(1), 1, graphs=graphs))
        return len(done)

    assert captured("rollout") > WARM_UP
    assert captured("off") == 0
