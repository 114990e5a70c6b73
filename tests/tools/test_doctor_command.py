"""Tests of the command `doctor`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from gpusim_rl.diagnose import machine_check, short_training
from gpusim_rl.diagnose.short_training import Measurement
from gpusim_rl.settings import checks, compose
from helpers.commands import ROOT

pytest_plugins = ["helpers.tool_runs"]


def test_doctor_diagnoses_a_finished_run(tool_here, runs_folder):
    lines = tool_here("doctor", "Cartpole").stdout.splitlines()
    assert re.match(r"runs/Cartpole/2\S+, iteration 6.* \(\d rows? read; \d warm-up rows skipped\)", lines[0])
    assert re.match(r"Cartpole, 16 envs, mujoco on cpu, learner on cpu: [\d,]+ env steps/s", lines[1])
    assert re.match(r"simulate \d+ % · policy \d+ % · update \d+ % · log \d+ %", lines[2])
    assert lines[4] == "" or lines[3] == ""
    assert lines[-1].startswith("nothing stands out") or re.match(r"\d+\. .*(try|;) ", lines[-1])


def test_doctor_json_accepts_every_name_of_a_run(tool_here, runs_folder):
    [ant] = (runs_folder / "runs" / "Ant").glob("2*")
    for name in ("Ant", "runs/Ant/latest", ant, ant / "checkpoints" / "last.pt"):
        result = json.loads(tool_here("doctor", name, "--json").stdout)
        assert result["run"].endswith(ant.name)
    assert result["stats"]["num_envs"] == 8
    assert result["stats"]["rows"] + result["stats"]["warm_up_rows"] == 1
    assert bool(result["conclusion"]) != bool(result["findings"])
    for finding in result["findings"]:
        assert set(finding) == {"rule", "cost", "problem", "settings", "hint", "text"}
    assert "(1 row read" in tool_here("doctor", "Ant").stdout


def test_doctor_diagnoses_without_importing_torch(tool):
    done = tool("doctor", "Cartpole", env={"PYTHONPROFILEIMPORTTIME": "1"})
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "gpusim_rl.diagnose.run_stats" in loaded
    assert not loaded & {"torch", "mujoco", "warp", "hydra"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["Nothing"], "Found in runs: "),
        (["runs"], "config.yaml, found "),
        (["-cd", "my_cfg", "Nothing"], "no run 'Nothing': "),
        (["scalling", "task=Ant"], "Did you mean 'scaling'?"),
        (["scaling", "task=Antt"], "Did you mean 'Ant'?"),
        (["scaling", "task=Ant", "num_env=3"], "Did you mean 'num_envs'?"),
        (["scaling", "task=Ant", "--num-processes", "0,2"], "--num-processes: expected at least 1, got 0"),
        (["scaling", "task=Ant", "--num-actors", "1,x"], "--num-actors: invalid"),
        (["scaling", "task=Ant", "--device", "gpu"], "device: expected auto, cpu, cuda"),
        (["scaling", "task=Ant", "--num-processes", "1", "--num-actors", "2"], "not both"),
        (["scaling", "task=Ant", "--num-processes", "1,2", "--num-envs", "64,8"], "--num-envs: expected one value"),
        (["scaling", "task=Ant", "num_envs=3"], "num_envs: cannot be overridden"),
    ],
)
def test_bad_input_is_rejected_in_one_line(tool_here, arguments, line):
    assert tool_here("doctor", *arguments).refuses(line)


def test_scaling_measures_a_custom_task(tool_here, tmp_path, monkeypatch):
    started = []
    point = Measurement(env_steps_per_s=1.0)
    monkeypatch.setattr(short_training, "measure_training", lambda words, **_: started.append(words) or point)
    (tmp_path / "my_cfg" / "task").mkdir(parents=True)
    (tmp_path / "my_cfg" / "task" / "Pole.yaml").write_text("# @package _global_\ndefaults: [Cartpole]\n")
    words = ("-cd", "my_cfg", "task=Pole", "--num-envs", "8,16", "--device", "cpu", "--json")
    result = json.loads(tool_here("doctor", "scaling", *words, cwd=tmp_path).stdout)
    assert [(row["num_envs"], row["error"]) for row in result["points"]] == [(8, None), (16, None)]
    assert started[0] == ["-cd", "my_cfg", "task=Pole", "num_envs=8", "device=cpu"]


@pytest.mark.slow
def test_doctor_diagnoses_a_running_training(tool, tmp_path):
    train = [sys.executable, ROOT / "train.py", "num_envs=8", "ppo.horizon=8", "ppo.minibatch_size=64", "device=cpu"]
    quiet = ["max_iterations=1000000", "log.console=quiet", "debug.check_task=true"]
    run = subprocess.Popen([*train, *quiet], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/Cartpole/2*/metrics.csv")) and time.monotonic() < deadline:
            assert run.poll() is None
            time.sleep(0.1)
        first = json.loads(tool("doctor", "Cartpole", "--json", cwd=tmp_path).stdout)
        second = json.loads(tool("doctor", "Cartpole", "--json", cwd=tmp_path).stdout)
        assert run.poll() is None and 0 < first["stats"]["iteration"] < second["stats"]["iteration"]
        assert "checked_task" in [finding["rule"] for finding in second["findings"]]
    finally:
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=60) == 143


@pytest.mark.slow
def test_scaling_recommends_device_and_num_envs(tool, tmp_path):
    small = ["task=Cartpole", "ppo.horizon=4", "ppo.minibatch_size=32"]
    how = ["--num-envs", "8,16", "--device", "cpu", "--iterations", "2", "--min-seconds", "2", "--warm-up", "1"]
    out = tmp_path / "new" / "scaling.json"
    done = tool("doctor", "scaling", *small[:1], *how, *small[1:], "--out", out, env={"OMP_NUM_THREADS": "1"})
    result = json.loads(out.read_text())
    assert [(point["device"], point["num_envs"]) for point in result["points"]] == [("cpu", 8), ("cpu", 16)]
    for point in result["points"]:
        assert point["error"] is None and point["iterations"] >= 2 and point["sim"] == "mujoco"
        assert 0 < point["slowest"] <= point["env_steps_per_s"] <= point["fastest"]
        assert 0.8 < sum(point["phases"].values()) <= 1.01 and 0.1 < point["memory_gb"] < point["memory_limit_gb"]
    assert result["command"].startswith("gpusim-rl doctor scaling task=Cartpole --num-envs 8,16")
    assert result["environment"]["versions"]["mujoco"] and "git" in result and result["load_before"] >= 0
    advice = result["recommendation"]
    assert advice["device"] == "cpu" and advice["num_envs"] in (8, 16) and advice["gpu_speedup"] is None
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["device", "envs", "env"] and lines[1].split()[:2] == ["cpu", "8"]
    assert f"recommended: device=cpu num_envs={advice['num_envs']}" in lines
    assert any("no GPU" in line for line in lines) and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_failed_measurement_is_reported(tool, tmp_path):
    how = ["--num-envs", "8,1000000000", "--device", "cpu", "--iterations", "1", "--min-seconds", "0", "--warm-up", "1"]
    done = tool("doctor", "scaling", "task=Cartpole", "ppo.horizon=4", *how, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert "1000000000 envs on cpu: num_envs=1000000000: " in done.stdout
    assert "recommended: device=cpu num_envs=8" in done.stdout


@pytest.mark.slow
def test_scaling_measures_process_counts(tool, tmp_path):
    out = tmp_path / "scaling.json"
    small = ["task=Cartpole", "--device", "cpu", "--num-envs", "16", "ppo.horizon=8"]
    how = ["--num-processes", "2,1", "--iterations", "3", "--min-seconds", "0", "--warm-up", "2", "--out", out]
    done = tool("doctor", "scaling", *small, *how, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    result = json.loads(out.read_text())
    one, two = result["points"]
    assert (one["count"], two["count"], one["efficiency"]) == (1, 2, 1.0) and one["error"] is None is two["error"]
    assert two["efficiency"] == pytest.approx(two["env_steps_per_s"] / one["env_steps_per_s"] / 2)
    assert 0 < two["learner_wait"] < 1 and two["iterations"] >= 3 and result["task"] == "Cartpole"
    useful = result["recommendation"]["num_processes"]
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["processes", "env", "steps/s"] and lines[2].split()[0] == "2"
    assert "in sums" in lines[0] and "lag" not in lines[0]
    assert useful in (1, 2) and f"useful: num_processes={useful}" in lines
    assert [path.name for path in tmp_path.iterdir()] == ["scaling.json"]


def test_scaling_measures_actor_counts(load_tool, monkeypatch, capsys):
    started = []

    def measure(overrides, *, processes, **how):
        started.append((overrides, processes))
        count = int(overrides[-1].removeprefix("num_actors="))
        if count == 16:
            return Measurement(error="out of memory")
        wait = {"learner_wait": 0.5 / count, "actor_wait": 0.1 * count, "lag": 0.7 * count, "lag_limit": 8}
        return Measurement(env_steps_per_s=1e4 * min(count, 4), slowest=9e3, fastest=5e4, iterations=5, **wait)

    task = {"task": {"_target_": "gpusim_rl.tasks.ant.Ant"}, "num_envs": 4096}
    monkeypatch.setattr(compose, "compose", lambda *_: task)
    monkeypatch.setattr(checks, "check_settings", lambda given: None)
    monkeypatch.setattr(short_training, "measure_training", measure)
    given = ["task=Ant", "actors=process", "algo=impala"]
    assert load_tool("doctor").main(["scaling", *given, "--num-actors", "[1,4,8,16]"]) == 0
    assert started == [([*given, f"num_actors={count}"], None) for count in (1, 4, 8, 16)]
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r"\s\s+", lines[0].strip())[:5] == ["actors", "env steps/s", "slowest", "fastest", "efficiency"]
    assert lines[0].split()[-5:] == ["learner", "waits", "actors", "wait", "lag"]
    assert lines[3].split() == ["8", "40,000", "9,000", "50,000", "50", "%", "6", "%", "80", "%", "5.6"]
    assert "useful: num_actors=4" in lines
    assert any(line.startswith("- 16 ") and line.endswith("out of memory") for line in lines)


@pytest.mark.slow
def test_doctor_checks_the_machine(tool, tmp_path):
    done = tool("doctor", "--json", cwd=tmp_path, timeout_s=280)
    result = json.loads(done.stdout)
    assert result["works"] is True
    names = [check["name"] for check in result["checks"]]
    assert set(names) >= {"system", "CPUs", "memory", "packages", "GPU", "kernels", "rendering", "W&B", "disk"}
    tests = [check["text"] for check in result["checks"] if check["name"] == "self-test"]
    assert tests[0].startswith("mujoco on cpu: 3 ") and len(tests) >= 2
    assert not list(tmp_path.iterdir())


def test_failing_default_simulator_is_broken_others_warn(load_tool, tmp_path, monkeypatch, capsys):
    def fail(overrides, **length):
        broken = "sim=mujoco" in overrides or "sim=newton" in overrides
        return Measurement(error="ended by signal 11") if broken else Measurement(precision="fp32")

    monkeypatch.setattr(machine_check, "check_machine", lambda runs: [])
    monkeypatch.setattr(short_training, "measure_training", fail)
    monkeypatch.chdir(tmp_path)
    assert load_tool("doctor").main([]) == 1
    printed = capsys.readouterr().out
    assert "failed   self-test  mujoco on cpu: ended by signal 11" in printed
    assert "fix: python train.py task=Ant sim=mujoco device=cpu" in printed
    assert "warning  self-test  newton on " in printed and "ok       self-test  mjwarp on " in printed
    assert printed.endswith("1 broken: self-test\n")
