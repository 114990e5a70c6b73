"""Tests of stress tests: searches, fall rates, gates, the commands `stress` and `transfer` on an export, the report."""

from __future__ import annotations

import json
import math
import resource
import shutil
from functools import partial
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from gpusim_rl.deployed import gate, stress
from gpusim_rl.deployed.stress import SizeSearch, StressTest, Trial, all_searches, gait
from gpusim_rl.deployed.variants import scale_friction, scale_gains, scale_mass
from gpusim_rl.deployed.walkers import Walkers
from gpusim_rl.errors import ConfigError
from helpers.exports import HOPPER, STATUE, write_hopper

pytest_plugins = ["helpers.tool_runs"]

RANGES = {"x": [0.5, 1.0], "yaw": None}


@pytest.fixture(scope="module")
def statue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hopper(tmp_path_factory.mktemp("exports") / "statue", scene=STATUE, commands=RANGES)


@pytest.fixture(scope="module")
def study(statue: Path) -> StressTest:
    return StressTest(Walkers(statue, 64))


@pytest.fixture(scope="module")
def results(statue: Path) -> dict:
    return stress.stress(statue, episodes=16)


def test_intervals_are_wilsons():
    assert stress.rate("", 0, 64)["interval"] == pytest.approx((0.0, 0.0566), abs=1e-4)
    assert stress.rate("", 1, 20)["interval"] == pytest.approx((0.0089, 0.2361), abs=1e-4)
    assert stress.rate("", 10, 10)["interval"] == pytest.approx((0.7225, 1.0), abs=1e-4)


@pytest.mark.parametrize("period", [14, 19])
def test_period_and_phase_of_a_gait_are_found(period):
    steps, phases = np.arange(-130, 0)[:, None], np.array([0.1, 0.8])
    turns = math.tau * (steps / period + phases)
    noise = np.random.default_rng(0).normal(0.0, 0.1, (130, 2, 2))
    speeds = np.stack([np.cos(turns) + 0.3 * np.cos(2.0 * turns), 0.5 * np.sin(turns)], axis=2) + noise
    found, phase = gait(speeds, 50.0)
    assert found == period and phase == pytest.approx(phases, abs=0.02)


def test_bisection_ends_at_the_smallest_size():
    search = SizeSearch("push", "push", "m/s", 3.0, {"a": stress.push, "b": stress.push})
    search.candidates = [("a", 0), ("b", 1)]
    halving = 0
    while (size := search.next_size(halving)) is not None:
        limits = {"a": 1.23, "b": 0.77}
        search.update(size, np.array([size >= limits[way] for way, _ in search.candidates]))
        halving += 1
    assert search.smallest is not None and search.held < 0.77 <= search.smallest < search.held + 0.05
    assert search.worst == ("b", 1) and halving == 7
    never = SizeSearch("delay", "delay", "ms", 200.0, {"": stress.delayed}, step=20.0)
    assert never.next_size(0) == 200.0
    never.update(200.0, np.array([False]))
    assert never.next_size(1) is None and never.row()["smallest"] is None
    never.smallest, never.held = 40.0, 20.0
    assert never.next_size(3) is None  # no multiple of the step lies between


def test_smallest_push_separates_falls_from_standing(study):
    searches = [search for search in all_searches(study.walkers) if search.kind == "push"]
    study.search(searches)
    sizes = [search.smallest or math.inf for search in searches]
    assert max(sizes[0], sizes[4]) < min(sizes[2], sizes[6]) and sizes[0] == pytest.approx(sizes[4], abs=0.2)
    way, start = searches[0].worst
    trials = [searches[0].trial(way, start, size) for size in (searches[0].held, sizes[0])]
    assert study.trials(trials).tolist() == [False, True]
    angle = math.atan2(0.3, 0.1)  # of the centre of mass above the edge; energy to lift it over the edge
    lift = 2.0 * 9.81 * (math.hypot(0.1, 0.3) - 0.3)
    assert math.sqrt(lift) * 0.9 < sizes[0] < 2.0 * math.sqrt(lift) / math.sin(angle)
    replay = study.replay(searches[0])
    assert replay["hz"] == 25.0 and np.shape(replay["qpos"]) == (100, 8)
    assert replay["qpos"][0][2] > 0.29 and replay["qpos"][-1][2] < 0.18


def test_same_seed_repeats_and_others_are_close(statue):
    found = []
    for seed in (0, 0, 1):
        study = StressTest(Walkers(statue, 64, seed), seed)
        search = next(iter(all_searches(study.walkers)))
        study.search([search])
        found.append((search.smallest, study.push_rate(1.0, 16)))
    assert found[0] == found[1] and abs(found[2][0] - found[0][0]) <= 0.1


def test_disturbances_change_what_they_name(statue):
    walkers = Walkers(statue, 3)
    model, row = walkers.model, np.array([1])
    scale_friction(walkers, row, np.array([0.5]))
    scale_mass(walkers, row, np.array([2.0]))
    stress.payload(walkers, row, np.array([3.0]))
    stress.weak_motor(0, walkers, row, np.array([75.0]))
    stress.slope(math.pi / 2.0, walkers, row, np.array([30.0]))
    stress.command_step(0, 1.0, walkers, row, np.array([50.0]))
    stress.delayed(walkers, row, np.array([40.0]))
    assert walkers.vary("geom_friction")[:, 0, 0].tolist() == [1.0, 0.5, 1.0]
    assert walkers.model.body(walkers.torso).name == "torso"
    masses = walkers.vary("body_mass")[:, walkers.torso] / model.body_mass[walkers.torso]
    assert masses[[0, 2]].tolist() == [1.0, 1.0] and masses[1] > 2.0
    assert walkers.vary("actuator_forcerange")[:, 0, 1].tolist() == [5.0, 1.25, 5.0]
    assert walkers.vary("actuator_biasprm")[1, 0, 1] == -5.0 and walkers.vary("actuator_gainprm")[1, 0, 0] == 5.0
    assert walkers.vary("opt.gravity")[1] == pytest.approx([0.0, 9.81 / 2.0, -9.81 * math.sqrt(0.75)])
    assert walkers.command[:, 0].tolist() == [0.0, 0.5, 0.0] and walkers.delay.tolist() == [0, 2, 0]
    scale_gains(walkers, np.array([2]), np.array([0.5]))
    assert walkers.vary("actuator_gainprm")[2, 0, 0] == 10.0 and walkers.vary("actuator_forcerange")[2, 0, 1] == 5.0
    walkers.restore()
    assert np.array_equal(walkers.vary("body_mass")[1], model.body_mass) and not walkers.delay.any()
    assert walkers.vary("body_subtreemass")[:, walkers.base].tolist() == [model.body_subtreemass[walkers.base]] * 3


def test_force_ends_after_its_duration(study):
    weight = 9.81 * float(study.walkers.model.body_subtreemass[study.walkers.base])
    trials = [Trial(partial(stress.force, 0.0, lasts), 0, 0.3 * weight) for lasts in (0.04, 3.0)]
    assert study.trials(trials).tolist() == [False, True]


def test_more_trials_than_robots_run_in_turns(study):
    size = [0.0, 3.0] * 35
    trials = [Trial(partial(stress.push, 0.0), i % 24, s) for i, s in enumerate(size)]
    assert study.trials(trials).tolist() == [False, True] * 35


def test_changed_physics_has_the_same_episodes_for_all_variants(study):
    rows = study.variants(5, 0.5, ["mass", "delay"])
    assert [row["name"] for row, _ in rows] == [
        "plain",
        "mass x0.9",
        "mass x1.1",
        *(f"delay {i} ({20 * i} ms)" for i in (1, 2, 3)),
    ]
    assert {row["episodes"] for row, _ in rows} == {5} and all(0.4 < error < 1.1 for _, error in rows)
    [first, *_], [again, *_] = rows, study.variants(5, 0.5, [])
    assert again[1] == pytest.approx(first[1], rel=0.2)


def test_results_have_all_kinds_baselines_and_the_worst_fall(results):
    assert {row["kind"] for row in results["searches"]} == {*gate.KINDS}
    assert [row["name"] for row in results["rates"][:3]] == [*gate.RATES]
    assert len(results["baselines"]["zero"]["searches"]) == 8 and results["worst"]["kind"] == "push"
    assert results["baselines"]["zero"] == results["baselines"]["hold"] and results["command"] == {"x": 0.5, "yaw": 0.0}
    json.dumps(results, allow_nan=False)


@pytest.mark.parametrize(
    ("scene", "changes", "words"),
    [
        (HOPPER, {"commands": RANGES}, "falls undisturbed, after 0"),
        (STATUE, {"commands": {"yaw": None, "z": None, "x": [0.5]}}, r"commands\.x: damaged card"),
        (STATUE, {"commands": {"yaw": None, "x": [1.0, 0.5]}}, r"commands\.x: damaged card"),
        (STATUE, {"commands": {"yaw": None, "x": "fast"}}, r"commands\.x: damaged card"),
    ],
)
def test_unusable_policies_are_one_line(tmp_path, scene, changes, words):
    with pytest.raises(ConfigError, match=words):
        stress.stress(write_hopper(tmp_path / "export", scene=scene, **changes))


def test_policy_without_a_speed_command_is_rejected(tmp_path):
    from helpers.exports import term

    folder = write_hopper(tmp_path / "export", [term("gravity", 3, "gravity")], scene=STATUE, commands={})
    with pytest.raises(ConfigError, match="takes no command x") as raised:
        stress.stress(folder)
    assert raised.value.got == "none"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("psh: 1.5", "Did you mean 'push'?"),
        ("push: fast", "gates.yaml: push: expected a positive number, got 'fast'"),
        ("push: true", "got True"),
        ("push: -1", "got -1"),
        ("push: .nan", "got nan"),
        ("falls: 1.5", "expected a rate from 0 to 1, got 1.5"),
        ("- push", "expected bounds such as"),
        ("", "expected bounds such as"),
        ("push: &a 1", "anchors"),
        ("push: [", "not valid yaml"),
    ],
)
def test_invalid_gates_are_one_line(tmp_path, text, words):
    (tmp_path / "gates.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        gate.read(tmp_path / "gates.yaml")
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_gate_fails_only_if_the_interval_excludes_the_bound():
    pushes = [{"kind": "push", "smallest": s, "largest": 3.0, "unit": "m/s", "way": "w"} for s in (2.0, None, 0.7)]
    slope = {"kind": "slope", "smallest": None, "largest": 30.0, "unit": "degrees", "way": ""}
    rates = [stress.rate("falls", 0, 64), stress.rate("falls_push_1", 20, 64)]
    results = {"searches": [*pushes, slope], "rates": rates}

    def verdict(**bounds: float) -> list[str]:
        return [row["verdict"] for row in gate.judge(bounds, results)]

    assert verdict(push=0.7, slope=30.0) == ["met", "met"] and verdict(push=0.71, slope=31.0) == ["missed", "open"]
    assert verdict(falls=0.01) == ["open"] and verdict(falls=0.06) == ["met"]
    assert verdict(falls_push_1=0.1) == ["missed"] and verdict(falls_push_1=0.3) == ["open"]
    assert "0.7 m/s (w), at least 1.5" in gate.judge({"push": 1.5}, results)[0]["text"]


def test_command_writes_results_and_fails_on_a_missed_bound(statue, results, load_tool, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stress, "stress", lambda *_: results)
    tool, folder = load_tool("stress"), shutil.copytree(statue, tmp_path / "export")
    (tmp_path / "gates.yaml").write_text("push: 2.9\nfalls_push_0.5: 0.9")
    assert tool.main([str(folder), "--gate", str(tmp_path / "gates.yaml")]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("missed: push 0.") for line in printed) and printed[0].startswith("disturbance")
    assert any(line.startswith("pushes of 0.5 m/s") for line in printed)
    [sides] = [line.partition(" sides=")[2] for line in printed if " sides=" in line]
    shares, sizes = json.loads(sides), [row["smallest"] for row in results["searches"] if row["kind"] == "push"]
    assert shares == pytest.approx([(min(sizes) / size) ** 2 for size in sizes], rel=0.06)
    assert matplotlib.image.imread(folder / "stress.png").shape[2] == 4
    written = json.loads((folder / "stress.json").read_text())
    assert [row["verdict"] for row in written["gate"]] == ["missed", "met"]
    (tmp_path / "gates.yaml").write_text("push: 0.1")
    assert tool.main([str(folder), "--gate", str(tmp_path / "gates.yaml")]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["."], "no checkpoint in "),
        (["Nothing"], "no checkpoint 'Nothing'"),
        ([".", "--gate", "missing.yaml"], "cannot read missing.yaml"),
        ([".", "--episodes", "0"], "--episodes: expected at least 1, got 0"),
    ],
)
def test_invalid_arguments_are_one_line(load_tool, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        load_tool("stress").main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and words in error and error.count("\n") == 1


def test_transfer_evaluates_an_export(statue, load_tool, tmp_path, capsys):
    transfer, folder = load_tool("transfer"), shutil.copytree(statue, tmp_path / "export")
    options = [str(folder), "--num-envs", "3", "--seconds", "0.2"]
    rows = transfer.transfer(transfer.parse([*options, "--only", "friction,simulator"]))
    assert [row["variant"] for row in rows] == ["plain", *(f"friction x{x}" for x in (0.4, 0.6, 0.8, 1.2))]
    assert json.loads((folder / "transfer.json").read_text())["rows"] == json.loads(json.dumps(rows))
    assert capsys.readouterr().out.startswith("variant")
    with pytest.raises(ConfigError, match="needs a run"):
        transfer.transfer(transfer.parse([*options, "--only", "simulator"]))


@pytest.mark.slow
@pytest.mark.parametrize(("demo", "weakest"), [("G1VelocityForward", (0.3, 1.0)), ("Go1Velocity", (1.0, 3.0))])
def test_demos_are_stressed_within_40_cpu_seconds_and_repeatably(exported, demo, weakest):
    before = resource.getrusage(resource.RUSAGE_SELF)
    results = stress.stress(exported(demo))
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60.0  # 30 s on an idle machine
    smallest = gate.weakest(results["searches"], "push")["smallest"]
    assert weakest[0] < smallest < weakest[1]
    other = StressTest(Walkers(exported(demo), stress.ROBOTS, 1), 1)
    other.search(searches := [search for search in all_searches(other.walkers) if search.kind == "push"])
    assert abs(min(search.smallest or math.inf for search in searches) - smallest) <= 0.1
