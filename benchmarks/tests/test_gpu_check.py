"""`benchmarks/gpu/gpu_check.py`: a real run with tiny sizes on the CPU, and failing parts."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import warp as wp

from gpu import gpu_check, gpu_probe
from gpu.gpu_targets import Part
from gpusim_rl.files import provenance
from gpusim_rl.run.collector import Collector
from gpusim_rl.settings.compose import compose
from helpers.commands import ROOT, Finished, run_command

GPU_CHECK = ROOT / "benchmarks" / "gpu" / "gpu_check.py"
NO_CUDA = not torch.cuda.is_available()


# Real run


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Finished, dict[str, Any], Path]:
    """Run all parts; return output, json and folder."""
    folder = tmp_path_factory.mktemp("gpu_check")
    command = (sys.executable, GPU_CHECK, "--device", "cpu", "--return=-1e9", "seed=1")
    done = run_command(*command, "task.episode_length=3", cwd=folder, check=False, timeout_s=280)
    return done, json.loads((folder / "benchmarks" / "gpu" / "gpu.json").read_text()), folder


@pytest.mark.slow
def test_all_parts_run_and_json_is_complete(ran):
    done, report, folder = ran
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(report["parts"]) == ["probe", "bench", "learn", "tests", "audit"]
    assert {name: part["status"] for name, part in report["parts"].items()} == dict.fromkeys(report["parts"], "ok")
    assert done.stdout.splitlines()[-1] == "benchmarks/gpu/gpu.json"
    assert [path.name for path in folder.iterdir()] == ["benchmarks"], "no run folder"
    about = {"schema", "command", "git", "environment", "device", "quick", "budget_s", "seconds", "results", "ok"}
    assert about < set(report)
    assert report["command"].startswith("python benchmarks/gpu/gpu_check.py --device cpu ")
    assert report["device"] == "cpu"
    assert report["environment"]["versions"]["torch"] and report["environment"]["cpu"]["available"]
    assert str(folder) not in json.dumps(report)


@pytest.mark.slow
def test_each_part_has_its_results(ran):
    _, report, _ = ran
    probe, bench, learn, tests, audit = report["parts"].values()
    assert probe["missing"] == [] and list(probe["facts"]) == [
        "versions",
        "bare physics",
        "the same rollout, graph=off",
        "training, graph=off",
    ]
    assert all(fact["wrong"] == [] for fact in probe["facts"].values())
    assert probe["facts"]["training, graph=off"]["control_steps_per_s"] > 0
    assert (audit["bytes_to_device"], audit["bytes_to_host"], audit["syncs"]) == (0, 0, 0)
    assert audit["row_bytes"] > 0 and {"rollout", "update", "log"} <= set(audit["phases"])
    assert audit["busy"] is None, "not measured on the CPU"
    # Stops after the first finished episode, because any return exceeds the threshold.
    assert learn["seconds_from_start_of_process"] > learn["seconds_from_first_iteration"] > 0
    assert learn["env_steps"] % 32 == 0 and learn["best_return"] is not None
    assert 0 < len(learn["curve"]) <= learn["iterations"] <= 3
    assert tests["failed"] == 0 and tests["passed"] + tests["skipped"] > 10
    assert len(tests["outcomes"]) == tests["passed"] + tests["skipped"]
    assert tests["passed"] == 0 or not NO_CUDA
    [count] = bench["env_counts"]
    assert count["num_envs"] == 8 and count["training_over_physics"] > 0 and bench["skipped"] == []
    names = [row["name"] for row in count["cases"]]
    assert names[-1] == "+ training" and "env step" in names and len(names) == 5


def test_gpu_facts_use_valid_settings(monkeypatch):
    composed = []

    def only_compose(overrides, *_, **__):
        composed.append(compose([text for text in overrides if not text.startswith("device=")]))
        return {}

    def physics_only(device, num_envs, overrides, **_):
        return only_compose([f"num_envs={num_envs}", *overrides])

    monkeypatch.setattr(gpu_probe, "training", only_compose)
    monkeypatch.setattr(gpu_probe, "same_rollout", only_compose)
    monkeypatch.setattr(gpu_probe, "bare_physics", physics_only)
    facts = gpu_probe.facts("cuda", 64, ["task=Ant"])
    for name in facts.keys() - {"versions", "loop of Warp in a graph of torch"}:
        facts[name]()
    assert len(composed) == len(facts) - 2
    assert {config["compile"] for config in composed} == {"auto", "learner", "all"}


@pytest.mark.slow
def test_targets_are_not_judged_on_cpu(ran):
    _, report, _ = ran
    assert len(report["results"]) == 10
    assert {(each["ok"], each["note"]) for each in report["results"]} == {(None, "not on CUDA")}


# Failing parts


def test_failing_or_hanging_part_does_not_stop_others(tmp_path, monkeypatch, capsys):
    scripts = {
        "audit": "print('warming up'); print('Segmentation fault', flush=True); import os; os.kill(os.getpid(), 11)",
        "train": "import time; print('compiling', flush=True); time.sleep(1000)",
        "bench": "raise SystemExit('CUDA error: out of memory')",
    }
    monkeypatch.setattr(gpu_check, "tool", lambda name: [sys.executable, "-c", scripts[name]])
    monkeypatch.setitem(gpu_check.RUN, "probe", lambda job: {"status": "ok", "error": None, "facts": {"a": {}}})
    monkeypatch.setitem(
        gpu_check.RUN, "tests", lambda job: {"status": "ok", "error": None, "passed": 3, "failed": 0, "skipped": 0}
    )
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--device", "cpu", "--budget-s", "24", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    parts = report["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "probe": "ok",
        "bench": "failed",
        "learn": "timed out",
        "tests": "ok",
        "audit": "failed",
    }
    assert parts["audit"]["error"] == "Segmentation fault (signal 11)"
    assert parts["audit"]["tail"] == ["warming up", "Segmentation fault"]
    assert parts["learn"]["error"].startswith("still running after ") and parts["learn"]["iterations"] == 0
    assert parts["bench"]["error"].startswith("8: CUDA error: out of memory")
    assert parts["bench"]["env_counts"] == [] and parts["tests"]["passed"] == 3
    assert not report["ok"]
    assert "learn: timed out" in capsys.readouterr().out


def limits(monkeypatch, took: dict[str, float], *arguments: str) -> dict[str, float]:
    """Return time limits of the parts, each taking `took` or its whole limit [s]."""
    clock, found = [0.0], {}

    def run(name: str) -> Callable[[Any], Part]:
        def part(job: Any) -> Part:
            found[name] = job.limit_s
            clock[0] += min(job.limit_s, took.get(name, job.limit_s))
            return {"status": "ok", "error": None}

        return part

    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_check, "RUN", {name: run(name) for name in gpu_check.PARTS})
    gpu_check.main(["--device", "cpu", *arguments])
    return found


def test_decisive_parts_come_first_and_all_get_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slow = limits(monkeypatch, {})
    assert list(slow) == ["probe", "bench", "learn", "tests", "audit"]
    assert sum(slow.values()) == pytest.approx(520.0) and min(slow.values()) >= 75.0
    assert slow["tests"] >= 100.0
    quick = limits(monkeypatch, dict.fromkeys(slow, 20.0))
    assert quick["probe"] == slow["probe"]
    assert quick["audit"] == pytest.approx(520.0 - 4 * 20.0), "unused time goes to the last part"
    assert limits(monkeypatch, {}, "--parts", "more_tests") == {"more_tests": pytest.approx(520.0)}


def test_broken_output_of_part_is_a_failure(tmp_path, monkeypatch):
    script = "import sys; open(sys.argv[sys.argv.index('--out') + 1], 'w').write('{')"
    monkeypatch.setattr(gpu_check, "tool", lambda name: [sys.executable, "-c", script])
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--device", "cpu", "--parts", "audit", "--out", str(out)]) == 1
    part = json.loads(out.read_text())["parts"]["audit"]
    assert part["status"] == "failed" and part["error"].startswith("JSONDecodeError: ")


def test_parts_are_skipped_after_budget_is_spent(tmp_path):
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--device", "cpu", "--budget-s", "0.001", "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert {part["status"] for part in report["parts"].values()} == {"skipped"}
    assert list(report["parts"]) == ["probe", "bench", "learn", "tests", "audit"]
    assert "0.001 s" in report["parts"]["bench"]["error"]


# The probe


FACTS = """
import json, os, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from gpu import gpu_probe
diary = Path({diary!r})

def fact(name, action="pass"):
    def found():
        with diary.open("a") as file:
            file.write(name + " ")
        exec(action)
        return {{"wrong": []}}
    return found

names = dict(a="pass", b={b!r}, c={c!r}, d="pass")
wanted = {{name: fact(name, action) for name, action in names.items()}}
sys.exit(0 if gpu_probe.find(wanted, Path(sys.argv[1])) else 1)
"""


@pytest.fixture
def probe(tmp_path, monkeypatch) -> Callable[..., tuple[Part, list[Part], str]]:
    """Run the probe with facts a to d; return the part, intermediate results and started facts."""
    run, diary = gpu_check.run_process, tmp_path / "diary"

    def probe_with(b: str = "pass", c: str = "pass", old: Part | None = None, limit_s: float = 60.0) -> Any:
        script = FACTS.format(path=[str(ROOT), str(ROOT / "benchmarks")], diary=str(diary), b=b, c=c)
        monkeypatch.setattr(
            gpu_check, "run_process", lambda command, *rest: run([sys.executable, "-c", script, command[2]], *rest)
        )
        diary.write_text("")
        kept: list[Part] = []
        args = gpu_check.parse(["--device", "cpu"])
        args.plan = gpu_check.TINY
        part = gpu_check.run_probe(gpu_check.Job(args, tmp_path, limit_s, old or {}, kept.append))
        return part, kept, diary.read_text()

    return probe_with


def test_failing_or_crashing_fact_does_not_stop_others(probe):
    part, kept, begun = probe(b="raise RuntimeError('CUDA error: 700')", c="os.kill(os.getpid(), 11)")
    assert begun == "a b c d "
    assert list(part["facts"]) == ["a", "b", "c", "d"] and part["missing"] == []
    assert part["facts"]["b"]["error"] == "RuntimeError: CUDA error: 700" and part["facts"]["b"]["where"]
    assert part["facts"]["c"] == {"error": "signal 11"}
    assert (part["status"], part["error"]) == ("failed", "b: RuntimeError: CUDA error: 700; c: signal 11")
    assert {each["status"] for each in kept} == {"running"} and "a" in kept[-1]["facts"]


def test_hanging_fact_leaves_time_for_others(probe, monkeypatch):
    monkeypatch.setattr(gpu_check, "FACT_SHARE", 0.05)
    part, _, begun = probe(c="time.sleep(1000)")
    assert begun == "a b c d " and list(part["facts"]) == ["a", "b", "c", "d"]
    assert part["facts"]["c"]["error"].startswith("still running after ") and part["status"] == "failed"


def test_resumed_probe_runs_missing_and_failed_facts(probe, monkeypatch):
    monkeypatch.setattr(gpu_check, "FACT_SHARE", 2.0)
    part, kept, begun = probe(b="raise RuntimeError('busy')", c="time.sleep(1000)", limit_s=8.0)
    assert begun == "a b c " and part["status"] == "timed out" and part["missing"] == ["d"]
    assert part["facts"]["c"]["error"].startswith("still running after ")
    assert kept[-1]["missing"] == ["c", "d"], "on disk if the process dies in c"
    for old in (part, kept[-1]):
        again, _, begun = probe(old=old)
        assert begun == "b c d " and again["status"] == "ok" and list(again["facts"]) == ["a", "b", "c", "d"]


@pytest.mark.skipif(not NO_CUDA, reason="there is a CUDA device")
def test_probe_without_cuda_fails_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu_probe.main([str(tmp_path / "facts.json")])
    assert stopped.value.code == 2 and not list(tmp_path.iterdir())
    errors = capsys.readouterr().err
    assert errors.startswith("error: --device cuda") and errors.count("\n") == 1


def test_probe_reports_versions_out_of_range(monkeypatch):
    assert gpu_probe.versions()["wrong"] == []
    version = importlib.metadata.version
    old = {"torch": "2.9.1", "mujoco-warp": "3.17.0", "warp-lang": "1.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: old.get(name) or version(name))
    monkeypatch.setattr(provenance, "installed_version", provenance.installed_version.__wrapped__)  # without its cache
    found = gpu_probe.versions()
    assert found["torch"] == "2.9.1" and [line.split(" ")[0] for line in found["wrong"]] == list(old)


def test_probe_loop_runs_five_times():
    refill, count_down = gpu_probe.loop_kernels()
    with wp.ScopedDevice("cpu"):
        left, turns = wp.zeros(1, dtype=int), wp.zeros(1, dtype=int)
        with wp.ScopedCapture() as capture:
            wp.launch(refill, 1, [left])
            wp.capture_while(left, while_body=lambda: wp.launch(count_down, 1, [left, turns]))
        for _ in range(3):
            wp.capture_launch(capture.graph)
    assert turns.numpy().tolist() == [15]


def test_probe_detects_different_rollout(monkeypatch):
    lines = ["device=cpu", "num_envs=4", *gpu_check.TINY.overrides]
    assert gpu_probe.same_rollout(lines, "off")["wrong"] == []
    restore, calls = Collector.load_state_dict, itertools.count()
    twice = lambda *args, **more: restore(*args, **more) if next(calls) < 2 else None  # noqa: E731
    monkeypatch.setattr(Collector, "load_state_dict", twice)
    wrong = gpu_probe.same_rollout(lines, "off")["wrong"]
    assert [line.split(" and ")[0] for line in wrong] == ["captured", "replayed"]
    monkeypatch.setattr(Collector, "load_state_dict", lambda *_, **__: None)
    assert gpu_probe.same_rollout(lines, "off")["wrong"][0].startswith("two eager rollouts")


def test_cuda_facts_start_with_cheap_and_decisive_ones():
    names = list(gpu_probe.facts("cuda", 4096, []))
    assert names[:5] == [
        "versions",
        "loop of Warp in a graph of torch",
        "the same rollout, graph=rollout",
        "the same rollout, graph=split",
        "bare physics",
    ]
    modes = {name.partition("=")[2] for name in names if name.startswith("training, graph=")}
    assert modes == {"rollout", "split", "step", "off"}


@pytest.fixture
def benches(monkeypatch) -> list[int]:
    """Numbers of envs passed to a fake bench that takes 40 s each."""
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
        part = {"num_envs": count, "cases": [row], "number": called.count(count)}
        (folder / "bench.json").write_text(json.dumps({"env_counts": [part]}))
        return gpu_check.Ended(0, 40.0, False, "")

    monkeypatch.setattr(gpu_check, "run_process", run_process)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    return called


def test_bench_measures_judged_env_count_first_and_stops_in_time(tmp_path, benches, capsys):
    args = gpu_check.parse(["--baselines", "rsl_rl"])
    args.plan = replace(gpu_check.FULL, env_counts=(256, 1024, 4096, 16384, 65536))
    kept: list[Part] = []
    part = gpu_check.run_bench(gpu_check.Job(args, tmp_path, 130.0, {}, kept.append))
    assert benches == [4096, 256, 1024]
    assert [each["num_envs"] for each in part["env_counts"]] == [256, 4096]
    assert part["skipped"] == [16384, 65536] and part["status"] == "failed"
    assert part["error"].startswith("1024: CUDA error: out of memory")
    assert [len(each["env_counts"]) for each in kept] == [1, 2, 2], "kept after each env count"
    assert {each["status"] for each in kept} == {"running"}
    assert "16384, 65536 envs" in capsys.readouterr().err


def test_report_is_completed_by_further_runs(tmp_path, monkeypatch, benches):
    monkeypatch.setattr(gpu_check, "FULL", gpu_check.Plan(4096, (256, 1024, 4096), rounds=1, seconds=1.0, warm_up=1))
    monkeypatch.setattr(gpu_check, "TINY", gpu_check.FULL)
    out = tmp_path / "gpu.json"
    audits = iter([{"status": "failed", "error": "it crashed"}, {"status": "ok", "error": None}])
    monkeypatch.setitem(gpu_check.RUN, "audit", lambda job: next(audits))

    def run(*arguments: str) -> dict[str, Any]:
        gpu_check.main(["--device", "cpu", "--out", str(out), "--budget-s", "150", *arguments])
        return json.loads(out.read_text())["parts"]

    parts = run("--parts", "audit,bench")
    assert benches == [4096, 256] and parts["bench"]["skipped"] == [1024]
    for name in ("probe", "learn", "tests"):
        monkeypatch.setitem(gpu_check.RUN, name, lambda job: {"status": "ok", "error": None})
    parts = run("--resume")  # failed, missing and skipped parts
    assert benches == [4096, 256, 1024] and sorted(parts) == sorted(gpu_check.SHARE.keys() - {"more_tests"})
    assert parts["audit"]["status"] == "ok" and parts["bench"]["status"] == "failed"
    run("--resume")
    assert benches == [4096, 256, 1024, 1024], "only failed measurements are repeated"
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
        ({"git": {"sha": "0", "dirty": False}}, "{'sha': '0', 'dirty': False}"),
        ({"overrides": ["compile=learner"]}, "['compile=learner']"),
        ({"environment": {"gpu": {"devices": [{"name": "Giant"}]}}}, "Giant"),
        ({"parts": 3}, "is not from benchmarks/gpu/gpu_check.py"),
        (None, "is not from benchmarks/gpu/gpu_check.py"),
    ],
)
def test_resume_rejects_report_of_other_code_settings_or_gpu(tmp_path, monkeypatch, capsys, change, line):
    out = tmp_path / "gpu.json"
    monkeypatch.setitem(gpu_check.RUN, "audit", lambda job: {"status": "ok", "error": None})
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


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupt_keeps_finished_parts(tmp_path, sent):
    """Interrupt in the second part: the first part's results are on disk and no process remains."""
    out = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--parts", "tests,audit", "--out", out]
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


# Parsing


PYTEST = """
============================= test session starts ==============================
collected 5 items

tests/gpu/test_graph_cuda.py::test_a[rollout-Ant] PASSED                 [ 20%]
tests/gpu/test_graph_cuda.py::test_a[step-Ant] FAILED                    [ 40%]
tests/gpu/test_mjwarp_cuda.py::test_b SKIPPED (could not import 'newton') [ 60%]
tests/gpu/test_mjwarp_cuda.py::test_c PASSED                             [ 80%]
tests/gpu/test_mjwarp_cuda.py::test_c ERROR                              [ 80%]
tests/gpu/test_mjwarp_cuda.py::test_d """


def test_part_summary_shows_skipped_tests():
    skipped = {"status": "ok", "error": None, "passed": 0, "failed": 0, "skipped": 15}
    assert gpu_check.summary(skipped) == "ok, 0 passed, 0 failed, 15 skipped"
    assert gpu_check.summary({"status": "ok"}) == "ok"
    # The bench's `skipped` is a list of env counts, which it reports itself.
    assert gpu_check.summary({"status": "failed", "error": "8: no", "skipped": [4096]}) == "failed, 8: no"


def test_tests_are_counted_if_pytest_was_killed():
    file = "tests/gpu/test_graph_cuda.py"
    assert gpu_check.read_tests(PYTEST) == {
        f"{file}::test_a[rollout-Ant]": "passed",
        f"{file}::test_a[step-Ant]": "failed",
        "tests/gpu/test_mjwarp_cuda.py::test_b": "skipped",
        "tests/gpu/test_mjwarp_cuda.py::test_c": "failed",
    }
    assert gpu_check.read_tests("No module named pytest") == {}


def test_unfinished_tests_resume_after_passed_ones(tmp_path, monkeypatch):
    started: list[list[str]] = []
    outputs = iter(
        [PYTEST, "tests/gpu/test_graph_cuda.py::test_a[step-Ant] PASSED\ntests/gpu/test_x.py::test_d PASSED"]
    )

    def run_process(command, limit_s):
        started.append([str(part) for part in command if str(part).startswith("--deselect")])
        return gpu_check.Ended(0 if len(started) == 2 else -9, 60.0, len(started) == 1, next(outputs))

    monkeypatch.setattr(gpu_check, "run_process", run_process)
    args = gpu_check.parse([])
    first = gpu_check.run_tests(gpu_check.Job(args, tmp_path, 60.0, {}, lambda part: None))
    assert (first["status"], first["passed"], first["failed"], first["skipped"]) == ("timed out", 1, 2, 1)
    second = gpu_check.run_tests(gpu_check.Job(args, tmp_path, 60.0, first, lambda part: None))
    assert started == [
        [],
        [
            f"--deselect=tests/gpu/{name}"
            for name in ("test_graph_cuda.py::test_a[rollout-Ant]", "test_mjwarp_cuda.py::test_b")
        ],
    ]
    assert (second["status"], second["passed"], second["failed"], second["skipped"]) == ("ok", 3, 0, 1)


def test_decisive_gpu_tests_need_only_pytest(tmp_path, monkeypatch):
    (tmp_path / "beartype.py").write_text("raise ImportError('conftest.py needs it')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run, found = gpu_check.run_process, []

    def collect(command, limit_s):
        ended = run([*command, "--collect-only", "-qq"], limit_s)
        found.extend(line for line in ended.output.splitlines() if "::" in line)
        return ended

    monkeypatch.setattr(gpu_check, "run_process", collect)
    gpu_check.run_tests(gpu_check.Job(gpu_check.parse([]), tmp_path, 120.0, {}, lambda part: None))
    assert 10 < len(found) < 25
    assert any("test_graph_equals_eager_code[split" in test for test in found)


def test_no_gpu_test_name_is_prefix_of_another():
    """`--deselect` matches prefixes of names."""
    for file in (ROOT / "tests" / "gpu").glob("test_*.py"):
        names = sorted(re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
        assert names and not [then for name, then in itertools.pairwise(names) if then.startswith(name)]


def test_rows_are_read_while_being_written(tmp_path):
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


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--parts", "audit,lern"], "'learn'"),
        (["--device", "gpu"], "got gpu"),
        (["--device", "cpu", "--env-counts", "8,many"], "got 8,many"),
        (["--device", "cpu", "--budget-s", "0"], "--budget-s"),
        (["--device", "cpu", "num_envs=7"], "num_envs=7"),
        pytest.param(
            ["--parts", "audit"],
            "--device cuda",
            marks=pytest.mark.skipif(not NO_CUDA, reason="there is a CUDA device"),
        ),
    ],
)
def test_bad_input_is_rejected_in_one_line(capsys, tmp_path, monkeypatch, arguments, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        gpu_check.main(arguments)
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    assert errors.startswith("error: ") and errors.count("\n") == 1 and line in errors
    assert not list(tmp_path.iterdir())
