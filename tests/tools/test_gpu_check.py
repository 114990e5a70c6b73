"""`tools/gpu_check.py`: run for real with tiny sizes on the CPU; judged on invented results of CUDA."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from conftest import ROOT, Finished, run_command

pytest_plugins = ["tool_runs"]

NO_CUDA = not torch.cuda.is_available()


@pytest.fixture(scope="module")
def check(load_tool):
    return load_tool("gpu_check")


# The real thing


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Finished, dict[str, Any], Path]:
    """Output, json and folder of a run of all parts."""
    folder = tmp_path_factory.mktemp("gpu_check")
    command = (sys.executable, ROOT / "tools" / "gpu_check.py", "--device", "cpu", "--return=-1e9", "seed=1")
    done = run_command(*command, "task.episode_length=3", cwd=folder, check=False, timeout_s=280)
    return done, json.loads((folder / "benchmarks" / "gpu.json").read_text()), folder


def test_all_parts_run_and_the_json_tells_all(ran):
    done, report, folder = ran
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(report["parts"]) == ["audit", "learn", "tests", "bench"]
    assert {name: part["status"] for name, part in report["parts"].items()} == dict.fromkeys(report["parts"], "ok")
    assert done.stdout.splitlines()[-1] == "benchmarks/gpu.json"
    assert [path.name for path in folder.iterdir()] == ["benchmarks"], "no run folder stays"
    about = {"schema", "command", "git", "environment", "device", "quick", "budget_s", "seconds", "verdicts", "ok"}
    assert about < set(report)
    assert report["command"].startswith("python tools/gpu_check.py --device cpu ") and report["device"] == "cpu"
    assert report["environment"]["versions"]["torch"] and report["environment"]["cpu"]["available"]
    assert str(folder) not in json.dumps(report)


def test_each_part_has_its_numbers(ran):
    _, report, _ = ran
    audit, learn, tests, bench = report["parts"].values()
    assert (audit["bytes_to_device"], audit["bytes_to_host"], audit["syncs"]) == (0, 0, 0)
    assert audit["row_bytes"] > 0 and {"rollout", "update", "log"} <= set(audit["phases"])
    assert audit["busy"] is None, "the CPU has no such clock"
    # Ended as soon as an episode had ended: any return is above what was asked for.
    assert learn["seconds_from_start_of_process"] > learn["seconds_from_first_iteration"] > 0
    assert learn["env_steps"] % 32 == 0 and learn["best_return"] is not None
    assert 0 < len(learn["curve"]) <= learn["iterations"] <= 3
    assert tests["failed"] == 0 and tests["passed"] + tests["skipped"] > 10
    assert tests["passed"] == 0 or not NO_CUDA
    [count] = bench["env_counts"]
    assert count["num_envs"] == 8 and count["training_over_physics"] > 0 and bench["skipped"] == []
    names = [row["name"] for row in count["contestants"]]
    assert names[-1] == "+ training" and "env step" in names and len(names) == 5


def test_on_the_cpu_nothing_is_judged(ran):
    _, report, _ = ran
    assert len(report["verdicts"]) == 9
    assert {(each["ok"], each["note"]) for each in report["verdicts"]} == {(None, "not on CUDA")}


# A part that goes wrong


def test_a_part_that_fails_or_hangs_leaves_the_others(check, tmp_path, monkeypatch, capsys):
    scripts = {
        "audit": "print('warming up'); print('Segmentation fault', flush=True); import os; os.kill(os.getpid(), 11)",
        "train": "import time; print('compiling', flush=True); time.sleep(1000)",
        "bench": "raise SystemExit('CUDA error: out of memory')",
    }
    monkeypatch.setattr(check, "tool", lambda name: [sys.executable, "-c", scripts[name]])
    monkeypatch.setattr(check, "LONGEST_S", dict.fromkeys(check.PARTS, 6.0))
    tested = {"status": "ok", "error": None, "passed": 3, "failed": 0, "skipped": 0, "failures": []}
    monkeypatch.setattr(check, "run_tests", lambda args, folder, limit: dict(tested))
    out = tmp_path / "gpu.json"
    assert check.main(["--device", "cpu", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    parts = report["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "audit": "failed",
        "learn": "timed out",
        "tests": "ok",
        "bench": "failed",
    }
    assert parts["audit"]["error"] == "Segmentation fault (signal 11)"
    assert parts["audit"]["tail"] == ["warming up", "Segmentation fault"]
    assert parts["learn"]["error"].startswith("no end within ") and parts["learn"]["iterations"] == 0
    assert parts["bench"]["error"] == "8: CUDA error: out of memory (exit code 1)"
    assert parts["bench"]["env_counts"] == [] and parts["tests"]["passed"] == 3
    assert not report["ok"]
    assert "learn: timed out" in capsys.readouterr().out


def test_what_a_part_left_may_be_broken(check, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "tool", lambda name: [sys.executable, "-c", ""])  # writes no json
    out = tmp_path / "gpu.json"
    assert check.main(["--device", "cpu", "--parts", "audit", "--out", str(out)]) == 1
    part = json.loads(out.read_text())["parts"]["audit"]
    assert part["status"] == "failed" and part["error"].startswith("FileNotFoundError: ")


def test_when_the_budget_is_spent_parts_are_skipped(check, tmp_path):
    out = tmp_path / "gpu.json"
    assert check.main(["--device", "cpu", "--budget-s", "0.001", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert {part["status"] for part in report["parts"].values()} == {"skipped"}
    assert report["parts"]["bench"]["error"] == "the budget of 0.001 s is spent"


def test_the_bench_measures_what_is_judged_first_and_stops_in_time(check, tmp_path, monkeypatch, capsys):
    called = []
    clock = [0.0]

    def run_process(command, limit, *rest):
        count = int(next(part for part in command if str(part).startswith("num_envs=")).partition("=")[2])
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir()
        row = {"name": "bare physics", "kind": "physics", "error": None, "settings": {}}
        (folder / "bench.json").write_text(json.dumps({"env_counts": [{"num_envs": count, "contestants": [row]}]}))
        called.append(count)
        clock[0] += 40.0
        return check.Ended(0, 40.0, False, "")

    monkeypatch.setattr(check, "run_process", run_process)
    monkeypatch.setattr(check.time, "monotonic", lambda: clock[0])
    args = check.parse(["--peers", "rsl_rl"])
    args.plan = check.FULL
    part = check.run_bench(args, tmp_path, 130.0)
    assert called == [4096, 256, 1024]
    assert [each["num_envs"] for each in part["env_counts"]] == [256, 1024, 4096]
    assert part["skipped"] == [16384, 65536] and part["status"] == "ok"
    assert "no time was left for 16384, 65536 worlds; try --budget-s" in capsys.readouterr().err


def test_nothing_of_a_process_stays(check, tmp_path):
    """A child of a part that ignores the interrupt is ended with it."""
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
        "signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1000)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(1000)\n"
    )
    written = lambda: file.is_file() and file.read_text() != ""  # noqa: E731
    ended = check.run_process([sys.executable, "-c", code], 60.0, written)
    assert ended.code == 0 and not ended.timed_out
    pid = int(file.read_text())
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child lives")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupt_keeps_what_is_known(tmp_path):
    """Ctrl-C in the middle of the second part: the first one's results are on disk, and nothing runs on."""
    out = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--parts", "tests,bench", "--out", out, "--env-counts", "8,16,32,64,128,256"]
    command = [sys.executable, ROOT / "tools" / "gpu_check.py", *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as running:
        for _ in range(1200):
            if out.exists() or running.poll() is not None:
                break
            time.sleep(0.1)
        time.sleep(1.0)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors.decode()
    assert errors.decode().endswith("interrupted\n")
    report = json.loads(out.read_text())
    assert list(report["parts"]) == ["tests"] and not report["ok"]


# Reading


def test_a_row_of_metrics_is_no_offence_and_all_else_is(check):
    def phase(to_device=0, to_host=(0, 0), syncs=0, wall_s=1.0, busy_s=0.9, occupied_s=0.99):
        return {
            "to_device": {"count": bool(to_device), "bytes": to_device},
            "to_host": {"count": to_host[0], "bytes": to_host[1]},
            "syncs": {"cudaEventSynchronize": syncs},
            "wall_s": wall_s,
            "busy_s": busy_s,
            "occupied_s": occupied_s,
        }

    about = {"num_envs": 8, "sim": "mjwarp", "precision": "bf16", "offences": [], "log_rows": 2}

    def read(**phases):
        return check.read_audit({**about, "ours": {"iterations": 2, "method": "trace", "phases": phases}})

    clean = {"rollout": phase(), "update": phase(), "log": phase(to_host=(2, 208), syncs=2, wall_s=0.0)}
    found = read(**clean)
    assert (found["bytes_to_device"], found["bytes_to_host"], found["syncs"]) == (0, 0, 0)
    assert found["row_bytes"] == 104
    assert (found["busy"], found["occupied"]) == pytest.approx((0.9, 0.99))
    found = read(**clean, checkpoint=phase(to_host=(9, 9000), syncs=9))
    assert (found["bytes_to_host"], found["syncs"]) == (0, 0), "saving is not part of a steady iteration"
    found = read(**(clean | {"rollout": phase(to_device=64, to_host=(1, 8), syncs=3)}))
    assert (found["bytes_to_device"], found["bytes_to_host"], found["syncs"]) == (32, 4, 1.5)
    found = read(**(clean | {"log": phase(to_host=(4, 400), syncs=4)}))
    assert (found["bytes_to_host"], found["syncs"]) == (100, 1)


PYTEST = """
============================= test session starts ==============================
collected 5 items

tests/gpu/test_graph_cuda.py::test_a[rollout-Ant] PASSED                 [ 20%]
tests/gpu/test_graph_cuda.py::test_a[step-Ant] FAILED                    [ 40%]
tests/gpu/test_mjwarp_cuda.py::test_b SKIPPED (could not import 'newton') [ 60%]
tests/gpu/test_mjwarp_cuda.py::test_c PASSED                             [ 80%]
tests/gpu/test_mjwarp_cuda.py::test_c ERROR                              [ 80%]
tests/gpu/test_mjwarp_cuda.py::test_d """


def test_tests_are_counted_even_if_pytest_was_ended(check):
    assert check.read_tests(PYTEST) == {
        "passed": 2,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests/gpu/test_graph_cuda.py::test_a[step-Ant]", "tests/gpu/test_mjwarp_cuda.py::test_c"],
    }
    assert check.read_tests("No module named pytest")["passed"] == 0


def test_rows_are_read_while_they_are_written(check, tmp_path):
    assert check.read_rows(tmp_path) == []
    folder = tmp_path / "Ant" / "2026-01-31_12-00-00"
    folder.mkdir(parents=True)
    head = "iteration,env_steps,time/elapsed_s,episode/return,loss/value\n"
    (folder / "metrics.csv").write_text(head + "1,64,0.5,,1.0\n2,128,1.0,12.5,1.0\n3,192,1.5,3000.5,1.0\n4,2")
    (tmp_path / "Ant" / "latest").symlink_to(folder)
    rows = check.read_rows(tmp_path)
    assert [row["episode/return"] for row in rows] == [None, 12.5, 3000.5]
    assert check.first_at(rows, 3000.0) == {"env_steps": 192.0, "time/elapsed_s": 1.5, "episode/return": 3000.5}
    assert check.first_at(rows, 4000.0) is None


# Judging

OVER = {"training_over_physics": 0.74, "training_env_steps_per_s": 1.5e6}
BARE = {"kind": "physics", "settings": {"graph": "whole rollout and whole update (CUDA device)"}}
GOOD: dict[str, Any] = {
    "audit": {
        "status": "ok",
        "bytes_to_device": 0.0,
        "bytes_to_host": 0.0,
        "row_bytes": 104.0,
        "syncs": 0.0,
        "busy": 0.7,
        "occupied": 0.97,
    },
    "learn": {"status": "ok", "seconds_from_first_iteration": 8.0, "seconds_from_start_of_process": 14.0},
    "tests": {"status": "ok", "passed": 40, "failed": 0, "skipped": 2},
    "bench": {
        "status": "ok",
        "env_counts": [{"num_envs": num, "contestants": [BARE], **OVER} for num in (256, 1024, 4096, 16384, 65536)],
    },
}


def judge(check, parts, *, on_cuda=True, full=True, **options) -> dict[str, Any]:
    found = check.verdicts(parts, check.FULL, on_cuda=on_cuda, full=full, **options)
    return {each["name"]: each["ok"] for each in found}


def changed(part: str, **values: Any) -> dict[str, Any]:
    parts = copy.deepcopy(GOOD)
    parts[part].update(values)
    return parts


def test_all_targets_met(check):
    assert set(judge(check, GOOD).values()) == {True} and len(judge(check, GOOD)) == 9


@pytest.mark.parametrize(
    ("part", "values", "missed"),
    [
        ("audit", {"bytes_to_device": 4.0}, {"bytes host to device in a steady iteration"}),
        ("audit", {"bytes_to_host": 0.5}, {"bytes device to host in a steady iteration"}),
        ("audit", {"syncs": 1.0}, {"waits of the host in a steady iteration"}),
        ("audit", {"occupied": 0.94}, {"device busy"}),
        ("audit", {"occupied": None}, {"device busy"}),
        ("learn", {"seconds_from_first_iteration": 15.0}, {"Ant's return 3000 [s], aim"}),
        (
            "learn",
            {"seconds_from_first_iteration": 20.5},
            {"Ant's return 3000 [s]", "Ant's return 3000 [s], aim"},
        ),
        (
            "learn",
            {"seconds_from_first_iteration": None},
            {"Ant's return 3000 [s]", "Ant's return 3000 [s], aim"},
        ),
        ("tests", {"failed": 1}, {"GPU tests passed"}),
        ("tests", {"passed": 0}, {"GPU tests passed"}),
        ("tests", {"status": "timed out"}, {"GPU tests passed"}),
        (
            "bench",
            {"env_counts": GOOD["bench"]["env_counts"][:2]},
            {"training over bare physics, 4096 worlds", "numbers of worlds measured"},
        ),
        (
            "bench",
            {"env_counts": [each | {"training_over_physics": 0.69} for each in GOOD["bench"]["env_counts"]]},
            {"training over bare physics, 4096 worlds"},
        ),
        (  # physics that waits for Python is easy to keep up with
            "bench",
            {
                "env_counts": [
                    each | {"contestants": [{"kind": "physics", "settings": {"graph": "off (the rollout cannot be)"}}]}
                    for each in GOOD["bench"]["env_counts"]
                ]
            },
            {"training over bare physics, 4096 worlds"},
        ),
    ],
)
def test_what_misses_a_target(check, part, values, missed):
    found = judge(check, changed(part, **values))
    assert {name for name, ok in found.items() if not ok} == missed
    assert None not in found.values()


def test_an_aim_is_no_failure_and_a_part_that_is_missing_is(check):
    found = check.verdicts(changed("learn", seconds_from_first_iteration=15.0), check.FULL, on_cuda=True, full=True)
    assert [each["name"] for each in found if each["ok"] is False and not each["aim"]] == []
    lines = check.describe({"verdicts": found, "parts": {}})
    assert "not yet Ant's return 3000 [s], aim: 15, target <= 10  (14.0 s from the start of the process)" in lines
    assert not any(line.startswith("MISSED") for line in lines)

    without = {name: part for name, part in GOOD.items() if name != "tests"}
    assert judge(check, without)["GPU tests passed"] is False
    assert "GPU tests passed" not in judge(check, without, asked=("audit", "learn", "bench"))
    failed = GOOD | {"audit": {"status": "failed", "error": "it crashed"}}
    [first, *_] = check.verdicts(failed, check.FULL, on_cuda=True, full=True)
    assert (first["ok"], first["value"], first["note"]) == (False, None, "it crashed")


def test_small_sizes_are_held_against_what_does_not_depend_on_size(check):
    found = judge(check, GOOD, full=False)
    assert {name for name, ok in found.items() if ok is None} == {
        "device busy",
        "Ant's return 3000 [s]",
        "Ant's return 3000 [s], aim",
        "training over bare physics, 4096 worlds",
    }
    assert set(judge(check, GOOD, on_cuda=False).values()) == {None}


# Bad input


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--parts", "audit,lern"], "unknown part 'lern'. Did you mean 'learn'? Available: audit, learn, tests, bench"),
        (["--device", "gpu"], "--device must be cuda, cuda:<index> or cpu, got gpu"),
        (["--device", "cpu", "--env-counts", "8,many"], "--env-counts must be positive ints, got 8,many"),
        (["--device", "cpu", "--budget-s", "0"], "--budget-s must be positive, got 0"),
        (["--device", "cpu", "num_envs=7"], "num_envs=7: task and sizes are given; see --device, --env-counts"),
        pytest.param(
            ["--parts", "audit"],
            "--device cuda: found 0 CUDA devices",
            marks=pytest.mark.skipif(not NO_CUDA, reason="there is a CUDA device"),
        ),
    ],
)
def test_bad_input_is_one_line(check, capsys, tmp_path, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        check.main(arguments)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    assert errors.startswith("error: ") and errors.count("\n") == 1 and line in errors
    assert not list(tmp_path.iterdir())
