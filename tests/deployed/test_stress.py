"""Tests of stress tests: searches, fall rates, gates, the commands `stress` and `transfer` on an export, the report."""

from __future__ import annotations

import json
import math
import resource
import shutil
from pathlib import Path

import matplotlib.image
import mujoco
import numpy as np
import pytest

from gpusim_rl.deployed import stress
from gpusim_rl.deployed.stress import SizeSearch, StressTest, gait, heading
from gpusim_rl.deployed.variants import change, factors
from gpusim_rl.deployed.walkers import Walkers
from gpusim_rl.errors import ConfigError
from helpers.commands import ROOT, load_file
from helpers.exports import STATUE, TERMS, term, write_hopper

pytest_plugins = ["helpers.tool_runs"]

RANGES = {"x": [0.5, 1.0], "yaw": None}
command = load_file(ROOT / "tools" / "stress.py", "stress_command")


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
    for falls, episodes, interval in ((0, 64, (0.0, 0.0566)), (1, 20, (0.0089, 0.2361)), (10, 10, (0.7225, 1.0))):
        assert stress.rate("", falls, episodes)["interval"] == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize("period", [14, 19])
def test_period_and_phase_of_a_gait_are_found(period):
    steps, phases = np.arange(-130, 0)[:, None], np.array([0.1, 0.8])
    turns = math.tau * (steps / period + phases)
    noise = np.random.default_rng(0).normal(0.0, 0.1, (130, 2, 2))
    speeds = np.stack([np.cos(turns) + 0.3 * np.cos(2.0 * turns), 0.5 * np.sin(turns)], axis=2) + noise
    found, phase = gait(speeds, 50.0)
    assert found == period and phase == pytest.approx(phases, abs=0.02)


def bisect(search: SizeSearch, limits: dict[str, float]) -> int:
    """Bisect with falls above a limit of each way; return the number of sizes that were tried."""
    trials, number = (bisection := search.bisect()).send(None), 0
    while trials:
        number += 1
        trials = bisection.send(np.array([size >= limits[way] for _, _, size, way in trials]))
    return number


def test_bisection_ends_at_the_smallest_size():
    search = SizeSearch("push", "push", "m/s", 3.0, {"a": "a", "b": "b"})
    assert bisect(search, {"a": 1.23, "b": 0.77}) == 7
    assert search.smallest is not None and search.held < 0.77 <= search.smallest < search.held + 0.05
    assert search.worst[0] == "b"
    never = SizeSearch("delay", "delay", "ms", 200.0, {"": ""}, step=20.0)
    assert bisect(never, {"": 201.0}) == 1 and never.row()["smallest"] is None
    never.held = 0.0
    assert bisect(never, {"": 50.0}) == 4 and (never.smallest, never.held) == (60.0, 40.0)  # no multiple lies between


def test_smallest_push_separates_falls_from_standing(study):
    searches = [search for search in study.searches() if search.kind == "push"]
    study.search(searches)
    sizes = [search.smallest or math.inf for search in searches]
    assert max(sizes[0], sizes[4]) < min(sizes[2], sizes[6]) and sizes[0] == pytest.approx(sizes[4], abs=0.2)
    trials = [searches[0].trials(size, [searches[0].worst])[0] for size in (searches[0].held, sizes[0])]
    assert study.run(study.starts, trials)[0].tolist() == [0.0, 1.0]
    angle = math.atan2(0.3, 0.1)  # of the centre of mass above the edge; energy to lift it over the edge
    lift = 2.0 * 9.81 * (math.hypot(0.1, 0.3) - 0.3)
    assert math.sqrt(lift) * 0.9 < sizes[0] < 2.0 * math.sqrt(lift) / math.sin(angle)
    replay = study.replay(searches[0])
    assert replay["hz"] == 25.0 and np.shape(replay["qpos"]) == (100, 8)
    assert replay["qpos"][0][2] > 0.29 and replay["qpos"][-1][2] < 0.18
    assert study.starts[0][:, 0] == pytest.approx((study._starts_at + 1) / 50.0)  # times: no frame is missing
    searches[0].smallest = 1e200  # diverges
    assert np.isfinite(study.replay(searches[0])["qpos"]).all()


def test_same_seed_repeats_and_others_are_close(statue):
    found = []
    for seed in (0, 0, 1):
        study = StressTest(Walkers(statue, 64, seed), seed)
        search = study.searches()[0]
        study.search([search])
        found.append((search.smallest, study.push_rate(1.0, 16)))
    assert found[0] == found[1] and abs(found[2][0] - found[0][0]) <= 0.1


def test_disturbances_change_what_they_name(statue):
    walkers = Walkers(statue, 3)
    model, row = walkers.model, np.array([1])
    for kind, value in {"friction": 0.5, "mass": 2.0, "payload": 3.0, "delay": 2}.items():
        change(walkers, row, kind, value)
    change(walkers, row, "motor", 0.25, 0)
    change(walkers, row, "slope", math.pi / 6.0, heading(math.pi / 2.0))
    change(walkers, row, "command", 0.5, (0, 1.0))
    assert walkers.vary("geom_friction")[:, 0, 0].tolist() == [1.0, 0.5, 1.0]
    assert walkers.model.body(walkers.torso).name == "torso"
    masses = walkers.vary("body_mass")[:, walkers.torso] / model.body_mass[walkers.torso]
    assert masses[[0, 2]].tolist() == [1.0, 1.0] and masses[1] > 2.0
    assert walkers.vary("actuator_forcerange")[:, 0, 1].tolist() == [5.0, 1.25, 5.0]
    assert walkers.vary("actuator_biasprm")[1, 0, 1] == -5.0 and walkers.vary("actuator_gainprm")[1, 0, 0] == 5.0
    assert walkers.vary("opt.gravity")[1] == pytest.approx([0.0, 9.81 / 2.0, -9.81 * math.sqrt(0.75)])
    assert walkers.command[:, 0].tolist() == [0.0, 0.5, 0.0] and walkers.delay.tolist() == [0, 2, 0]
    change(walkers, np.array([2]), "gains", 0.5)
    assert walkers.vary("actuator_gainprm")[2, 0, 0] == 10.0 and walkers.vary("actuator_forcerange")[2, 0, 1] == 5.0
    walkers.restore()
    walkers.step()
    assert np.array_equal(walkers.vary("body_mass")[1], model.body_mass) and not walkers.delay.any()
    assert walkers.vary("body_subtreemass")[:, walkers.base].tolist() == [model.body_subtreemass[walkers.base]] * 3


def test_effort_of_motors_is_their_strength():
    spec = mujoco.MjSpec.from_string(STATUE.replace("</actuator>", '<motor name="motor" joint="knee"/></actuator>'))
    actuator = spec.add_actuator(name="dc", target="knee", trntype=mujoco.mjtTrn.mjTRN_JOINT, forcerange=[-2, 2])
    actuator.set_to_dcmotor(
        motorconst=[0.1, 0.1], resistance=0.5, controller=[5.0, 0.0, 1.0, 0.0, 0.0, 1.0], ctrlspec=1
    )
    model = spec.compile()
    effort = factors(model, "effort", 0.5)
    assert effort["actuator_forcerange"][:, 0].tolist() == [0.5, 1.0, 0.5]
    assert effort["actuator_gainprm"][:, 0].tolist() == [1.0, 0.5, 2.0]  # gains; resistance of the DC motor
    assert factors(model, "gains", 0.5)["actuator_gainprm"][2, [4, 6]].tolist() == [0.5, 0.5]


def test_more_trials_than_robots_run_in_turns(study):
    trials = [(i % 24, "push", size, heading(0.0)) for i, size in enumerate([0.0, 3.0] * 35)]
    assert study.run(study.starts, trials)[0].tolist() == [0.0, 1.0] * 35


def test_changed_physics_has_the_same_episodes_for_all_variants(study):
    rows, delays = study.variants(5, 0.5, ["mass", "delay"]), (f"delay {i} ({20 * i} ms)" for i in (1, 2, 3))
    assert [row["name"] for row, _ in rows] == ["plain", "mass x0.9", "mass x1.1", *delays]
    assert {row["episodes"] for row, _ in rows} == {5} and all(0.4 < error < 1.1 for _, error in rows)
    [first, *_], [again, *_] = rows, study.variants(5, 0.5, [])
    assert again[1] == pytest.approx(first[1], rel=0.2)


def test_results_have_all_kinds_baselines_and_the_worst_fall(results):
    assert {row["kind"] for row in results["searches"]} == {*command.KINDS}
    assert [row["name"] for row in results["rates"][:3]] == [*command.RATES]
    assert len(results["baselines"]["zero"]["searches"]) == 8 and results["worst"]["kind"] == "push"
    assert results["baselines"]["zero"] == results["baselines"]["hold"] and results["command"] == {"x": 0.5, "yaw": 0.0}
    json.dumps(results, allow_nan=False)


def test_unusable_policies_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="falls undisturbed, after 0"):
        stress.stress(write_hopper(tmp_path / "hopper", commands=RANGES))
    for ends in ([0.5], [1.0, 0.5], "fast"):
        with pytest.raises(ConfigError, match=r"commands\.x: damaged card"):
            stress.stress(write_hopper(tmp_path / "statue", scene=STATUE, commands={"yaw": None, "x": ends}))
    with pytest.raises(ConfigError, match="takes no command x") as raised:
        stress.stress(write_hopper(tmp_path / "none", [term("gravity", 3, "gravity")], STATUE, commands={}))
    assert raised.value.got == "none"


def test_slope_is_not_tested_if_the_policy_observes_the_world_frame(tmp_path):
    sensors = '<sensor><framequat name="attitude" objtype="site" objname="imu"/>'
    scene, terms = STATUE.replace("<sensor>", sensors), [*TERMS[:-1], term("command", 1, "command x")]
    folder = write_hopper(tmp_path / "e", [*terms, term("quat", 4, "sensor attitude")], scene, commands={"x": None})
    study = StressTest(Walkers(folder, 64))
    [slope] = [search for search in study.searches() if search.kind == "slope"]
    study.search([slope])
    assert (slope.smallest, slope.largest) == (None, 0.0) and "quat" in slope.row()["way"]
    assert command.judge({"slope": 10.0}, {"searches": [slope.row()], "rates": []})[0]["verdict"] == "open"


GATES = {
    "psh: 1.5": "Did you mean 'push'?",
    "push: fast": "gates.yaml: push: expected a positive number, got 'fast'",
    **{f"push: {value}": f"got {got}" for value, got in (("true", "True"), ("-1", "-1"), (".nan", "nan"))},
    "falls: 1.5": "expected a rate from 0 to 1, got 1.5",
    **dict.fromkeys(("- push", ""), "expected bounds such as"),
    "push: &a 1": "anchors",
    "push: [": "not valid yaml",
}


@pytest.mark.parametrize(("text", "words"), GATES.items())
def test_invalid_gates_are_one_line(tmp_path, text, words):
    (tmp_path / "gates.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        command.read_gate(tmp_path / "gates.yaml")
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_gate_fails_only_if_the_interval_excludes_the_bound():
    pushes = [{"kind": "push", "smallest": s, "largest": 3.0, "unit": "m/s", "way": "w"} for s in (2.0, None, 0.7)]
    slope = {"kind": "slope", "smallest": None, "largest": 30.0, "unit": "degrees", "way": ""}
    rates = [stress.rate("falls", 0, 64), stress.rate("falls_push_1", 20, 64)]
    results = {"searches": [*pushes, slope], "rates": rates}

    def verdict(**bounds: float) -> list[str]:
        return [row["verdict"] for row in command.judge(bounds, results)]

    assert verdict(push=0.7, slope=30.0) == ["met", "met"] and verdict(push=0.71, slope=31.0) == ["missed", "open"]
    assert verdict(falls=0.01) == ["open"] and verdict(falls=0.06) == ["met"]
    assert verdict(falls_push_1=0.1) == ["missed"] and verdict(falls_push_1=0.3) == ["open"]
    assert "0.7 m/s (w), at least 1.5" in command.judge({"push": 1.5}, results)[0]["text"]


def test_command_writes_results_and_fails_on_a_missed_bound(statue, results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stress, "stress", lambda *_: results)
    folder = shutil.copytree(statue, tmp_path / "export")
    (tmp_path / "gates.yaml").write_text("push: 2.9\nfalls_push_0.5: 0.9")
    assert command.main([str(folder), "--gate", str(tmp_path / "gates.yaml")]) == 1
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
    assert command.main([str(folder), "--gate", str(tmp_path / "gates.yaml")]) == 0


ARGUMENTS = {
    ".": "no checkpoint in ",
    "Nothing": "no checkpoint 'Nothing'",
    ". --gate missing.yaml": "cannot read missing.yaml",
    ". --episodes 0": "--episodes: expected at least 1, got 0",
}


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS.items())
def test_invalid_arguments_are_one_line(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(arguments.split())
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
    smallest = command.weakest(results["searches"], "push")["smallest"]
    assert weakest[0] < smallest < weakest[1]
    other = StressTest(Walkers(exported(demo), stress.ROBOTS, 1), 1)
    other.search(searches := [search for search in other.searches() if search.kind == "push"])
    assert abs(min(search.smallest or math.inf for search in searches) - smallest) <= 0.1
