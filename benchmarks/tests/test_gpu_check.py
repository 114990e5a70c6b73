"""`benchmarks/gpu_check.py`: run for real with tiny sizes on the CPU, and with parts that go wrong."""

from __future__ import annotations

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

import gpu_check
from helpers.commands import ROOT, Finished, run_command

GPU_CHECK = ROOT / "benchmarks" / "gpu_check.py"
NO_CUDA = not torch.cuda.is_available()


# The real thing


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Finished, dict[str, Any], Path]:
    """Output, json and folder of a run of all parts."""
    folder = tmp_path_factory.mktemp("gpu_check")
    command = (sys.executable, GPU_CHECK, "--device", "cpu", "--return=-1e9", "seed=1")
    done = run_command(*command, "task.episode_length=3", cwd=folder, check=False, timeout_s=280)
    return done, json.loads((folder / "benchmarks" / "gpu.json").read_text()), folder


@pytest.mark.slow
def test_all_parts_run_and_the_json_tells_all(ran):
    done, report, folder = ran
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(report["parts"]) == ["audit", "learn", "tests", "bench"]
    assert {name: part["status"] for name, part in report["parts"].items()} == dict.fromkeys(report["parts"], "ok")
    assert done.stdout.splitlines()[-1] == "benchmarks/gpu.json"
    assert [path.name for path in folder.iterdir()] == ["benchmarks"], "no run folder stays"
    about = {"schema", "command", "git", "environment", "device", "quick", "budget_s", "seconds", "results", "ok"}
    assert about < set(report)
    assert report["command"].startswith("python benchmarks/gpu_check.py --device cpu ") and report["device"] == "cpu"
    assert report["environment"]["versions"]["torch"] and report["environment"]["cpu"]["available"]
    assert str(folder) not in json.dumps(report)


@pytest.mark.slow
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
    names = [row["name"] for row in count["cases"]]
    assert names[-1] == "+ training" and "env step" in names and len(names) == 5


@pytest.mark.slow
def test_on_the_cpu_nothing_is_judged(ran):
    _, report, _ = ran
    assert len(report["results"]) == 9
    assert {(each["ok"], each["note"]) for each in report["results"]} == {(None, "not on CUDA")}


# A part that goes wrong


def test_a_part_that_fails_or_hangs_leaves_the_others(tmp_path, monkeypatch, capsys):
    scripts = {
        "audit": "print('warming up'); print('Segmentation fault', flush=True); import os; os.kill(os.getpid(), 11)",
        "train": "import time; print('compiling', flush=True); time.sleep(1000)",
        "bench": "raise SystemExit('CUDA error: out of memory')",
    }
    monkeypatch.setattr(gpu_check, "tool", lambda name: [sys.executable, "-c", scripts[name]])
    monkeypatch.setattr(gpu_check, "MOST", dict.fromkeys(gpu_check.MOST, 0.25))
    tested = {"status": "ok", "error": None, "passed": 3, "failed": 0, "skipped": 0, "failures": []}
    monkeypatch.setattr(gpu_check, "run_tests", lambda args, folder, limit: dict(tested))
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--device", "cpu", "--budget-s", "24", "--out", str(out)]) == 1
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


def test_what_a_part_left_may_be_broken(tmp_path, monkeypatch):
    script = "import sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write('{')"
    monkeypatch.setattr(gpu_check, "tool", lambda name: [sys.executable, "-c", script])
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--device", "cpu", "--parts", "audit", "--out", str(out)]) == 1
    part = json.loads(out.read_text())["parts"]["audit"]
    assert part["status"] == "failed" and part["error"].startswith("JSONDecodeError: ")


def test_an_audit_that_breaks_is_no_audit_that_finds_something(tmp_path, monkeypatch):
    """Both end with exit code 1; only one of them writes its json."""
    monkeypatch.setattr(gpu_check, "tool", lambda name: [sys.executable, "-c", "raise RuntimeError('CUDA error: 700')"])
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--device", "cpu", "--parts", "audit", "--out", str(out)]) == 1
    part = json.loads(out.read_text())["parts"]["audit"]
    assert part["status"] == "failed" and part["error"] == "RuntimeError: CUDA error: 700 (exit code 1)"
    assert part["tail"][0].startswith("Traceback")


def test_when_the_budget_is_spent_parts_are_skipped(tmp_path):
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--device", "cpu", "--budget-s", "0.001", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert {part["status"] for part in report["parts"].values()} == {"skipped"}
    assert report["parts"]["bench"]["error"] == "the budget of 0.001 s is spent"


@pytest.fixture
def benches(monkeypatch) -> list[int]:
    """Numbers of envs that were benched, for 40 s each; nothing is really run."""
    called: list[int] = []
    clock = [0.0]

    def run_process(command, limit, *rest):
        count = int(next(part for part in command if str(part).startswith("num_envs=")).partition("=")[2])
        called.append(count)
        clock[0] += 40.0
        if count == 1024 and called.count(count) == 1:
            return gpu_check.Ended(1, 40.0, False, "CUDA error: out of memory")
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir(exist_ok=True)
        row = {"name": "bare physics", "kind": "physics", "error": None, "settings": {}}
        of_count = {"num_envs": count, "cases": [row], "number": called.count(count)}
        (folder / "bench.json").write_text(json.dumps({"env_counts": [of_count]}))
        return gpu_check.Ended(0, 40.0, False, "")

    monkeypatch.setattr(gpu_check, "run_process", run_process)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    return called


def test_the_bench_measures_what_is_judged_first_and_stops_in_time(tmp_path, benches, capsys):
    args = gpu_check.parse(["--baselines", "rsl_rl"])
    args.plan = gpu_check.FULL
    kept: list[dict[str, Any]] = []
    part = gpu_check.run_bench(args, tmp_path, 130.0, {}, kept.append)
    assert benches == [4096, 256, 1024]
    assert [each["num_envs"] for each in part["env_counts"]] == [256, 4096]
    assert part["skipped"] == [16384, 65536] and part["status"] == "failed"
    assert part["error"] == "1024: CUDA error: out of memory (exit code 1)"
    assert [len(each["env_counts"]) for each in kept] == [1, 2, 2], "kept after every number of envs"
    assert {each["status"] for each in kept} == {"running"}
    assert "no time was left for 16384, 65536 envs; try --resume" in capsys.readouterr().err


def test_a_report_is_completed_by_further_runs(tmp_path, monkeypatch, benches):
    monkeypatch.setattr(gpu_check, "FULL", gpu_check.Plan(4096, (256, 1024, 4096), rounds=1, seconds=1.0, warm_up=1))
    monkeypatch.setattr(gpu_check, "TINY", gpu_check.FULL)
    out = tmp_path / "gpu.json"
    audits = iter([{"status": "failed", "error": "it crashed"}, {"status": "ok", "error": None}])
    monkeypatch.setattr(gpu_check, "run_audit", lambda *a: next(audits))

    def run(*arguments: str) -> dict[str, Any]:
        gpu_check.main(["--device", "cpu", "--out", str(out), "--budget-s", "90", *arguments])
        return json.loads(out.read_text())["parts"]

    parts = run("--parts", "audit,bench")
    assert benches == [4096, 256] and parts["bench"]["skipped"] == [1024]
    monkeypatch.setattr(gpu_check, "run_learning", lambda *a: {"status": "ok", "error": None})
    monkeypatch.setattr(gpu_check, "run_tests", lambda *a: {"status": "ok", "error": None})
    parts = run("--resume")  # what failed, what is missing, what was left out
    assert benches == [4096, 256, 1024] and list(parts) == ["audit", "learn", "tests", "bench"]
    assert parts["audit"]["status"] == "ok" and parts["bench"]["status"] == "failed"
    run("--resume")
    assert benches == [4096, 256, 1024, 1024], "what failed is measured again, all else is complete"
    parts = run("--resume")
    assert len(benches) == 4 and {part["status"] for part in parts.values()} == {"ok"}
    parts = run("--resume", "--parts", "bench", "--env-counts", "256")
    assert benches[4:] == [256]
    assert [(each["num_envs"], each["number"]) for each in parts["bench"]["env_counts"]] == [
        (256, 2),
        (1024, 2),
        (4096, 1),
    ]
    assert json.loads(out.read_text())["env_counts"] == [256, 1024, 4096]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"git": {"sha": "0", "dirty": False}}, "is of another git: it has {'sha': '0', 'dirty': False}, now "),
        ({"overrides": ["ppo.compile=true"]}, "is of another overrides: it has ['ppo.compile=true'], now []"),
        ({"environment": {"gpu": {"devices": [{"name": "Giant"}]}}}, "is of Giant, this is "),
        ({"parts": 3}, "is not from benchmarks/gpu_check.py"),
        (None, "is not from benchmarks/gpu_check.py"),
    ],
)
def test_only_what_belongs_together_is_put_together(tmp_path, monkeypatch, capsys, change, line):
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu_check, "run_audit", lambda *a: {"status": "ok", "error": None})
    arguments = ["--device", "cpu", "--parts", "audit", "--out", str(out)]
    assert gpu_check.main(arguments) == 0
    report = json.loads(out.read_text())
    out.write_text("[]" if change is None else json.dumps(report | change))
    before = out.read_text()
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main([*arguments, "--resume"])
    errors = capsys.readouterr().err
    assert stopped.value.code == 2 and errors.count("error: ") == 1 and line in errors
    assert out.read_text() == before


def test_nothing_of_a_process_stays(tmp_path):
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
    ended = gpu_check.run_process([sys.executable, "-c", code], 60.0, written)
    assert ended.code == 0 and not ended.timed_out
    pid = int(file.read_text())
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child lives")


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_known(tmp_path, sent):
    """Ctrl-C or the end of a batch job in the second part: the first one's results are on disk, nothing runs on."""
    out = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--parts", "tests,bench", "--out", out, "--env-counts", "8,16,32,64,128,256"]
    command = [sys.executable, GPU_CHECK, *arguments]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as running:
        for _ in range(1200):
            if out.exists() or running.poll() is not None:
                break
            time.sleep(0.1)
        time.sleep(1.0)
        started = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(sent)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors.decode()
    assert started and not psutil.wait_procs(started, timeout=20)[1]
    assert errors.decode().endswith("interrupted\n")
    report = json.loads(out.read_text())
    assert list(report["parts"]) == ["tests"] and not report["ok"]


# Reading


PYTEST = """
============================= test session starts ==============================
collected 5 items

tests/gpu/test_graph_cuda.py::test_a[rollout-Ant] PASSED                 [ 20%]
tests/gpu/test_graph_cuda.py::test_a[step-Ant] FAILED                    [ 40%]
tests/gpu/test_mjwarp_cuda.py::test_b SKIPPED (could not import 'newton') [ 60%]
tests/gpu/test_mjwarp_cuda.py::test_c PASSED                             [ 80%]
tests/gpu/test_mjwarp_cuda.py::test_c ERROR                              [ 80%]
tests/gpu/test_mjwarp_cuda.py::test_d """


def test_tests_are_counted_even_if_pytest_was_ended():
    assert gpu_check.read_tests(PYTEST) == {
        "passed": 2,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests/gpu/test_graph_cuda.py::test_a[step-Ant]", "tests/gpu/test_mjwarp_cuda.py::test_c"],
    }
    assert gpu_check.read_tests("No module named pytest")["passed"] == 0


def test_rows_are_read_while_they_are_written(tmp_path):
    assert gpu_check.run_rows(tmp_path) == []
    folder = tmp_path / "Ant" / "2026-01-31_12-00-00"
    folder.mkdir(parents=True)
    head = "iteration,env_steps,time/elapsed_s,episode/return,loss/value\n"
    (folder / "metrics.csv").write_text(head + "1,64,0.5,,1.0\n2,128,1.0,12.5,1.0\n3,192,1.5,3000.5,1.0\n4,2")
    (tmp_path / "Ant" / "latest").symlink_to(folder)
    rows = gpu_check.run_rows(tmp_path)
    assert [row["episode/return"] for row in rows] == [None, 12.5, 3000.5]
    first = gpu_check.first_at(rows, 3000.0)
    assert first is rows[2]
    assert (first["env_steps"], first["time/elapsed_s"], first["episode/return"]) == (192.0, 1.5, 3000.5)
    assert gpu_check.first_at(rows, 4000.0) is None


# Bad input


def test_packages_that_are_missing_are_told_before_anything_is_started(monkeypatch, capsys):
    find = gpu_check.importlib.util.find_spec
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None if name == "jaxtyping" else find(name))
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(["--device", "cpu"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "error: cannot find jaxtyping: try pip install -e ., or add their folder to PYTHONPATH\n"
    )


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
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(arguments)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    assert errors.startswith("error: ") and errors.count("\n") == 1 and line in errors
    assert not list(tmp_path.iterdir())
