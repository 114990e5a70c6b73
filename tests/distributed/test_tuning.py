"""Hyperparameter search: search spaces, and trials that fail, are pruned, or run concurrently."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from gpusim_rl.distributed.search import SPACES, read_search
from gpusim_rl.distributed.tuning import Study
from gpusim_rl.errors import ConfigError
from helpers.searches import SMALL, SPACE, start, table_of, tune, wait_for

SIX = (*SMALL, "max_iterations=6")


@pytest.mark.parametrize("file", sorted(SPACES.glob("*.yaml")), ids=lambda file: file.stem)
def test_provided_search_spaces_are_valid(file):
    search = read_search([f"algo={file.stem}", "task=Ant", "trials=3"])
    assert search.cfg.study == f"Ant-{file.stem}" and search.cfg.trials == 3 and len(search.space) > 3


@pytest.mark.parametrize(
    ("words", "space", "expected"),
    [
        (["trials"], SPACE, "key=value"),
        (["trials=1.5"], SPACE, "trials"),
        (["stall_s=x"], SPACE, "stall_s"),
        (["method=grid"], SPACE, "method"),
        (["grace=50", "max_iterations=6"], SPACE, "max_iterations=6, got 50"),
        (["pruner=hyperbnd"], SPACE, "'hyperband'"),
        (["study=a/b"], SPACE, "study: "),
        (["study=Ant"], SPACE, "study=Ant: "),
        (["trails=3"], SPACE, "'trials'"),
        (["space=no.yaml"], SPACE, "space=no.yaml: no such file"),
        ([], "ppo.learning_rat: {low: 1.0, high: 2.0}", "Did you mean 'ppo.learning_rate'"),
        ([], "sac.gamma: {low: 0.9, high: 0.99}", "sac.gamma: "),
        ([], "ppo.epochs: {low: 0, high: 2}", "my.yaml: ppo.epochs"),
        ([], "ppo.gamma: {low: 0.9, high: 0.8}", "ppo.gamma: expected low < high"),
        ([], "ppo.gamma: {low: 0.0, high: 0.8, log: true}", "ppo.gamma: expected low < high"),
        ([], "ppo.gamma: 0.9", "ppo.gamma: expected {low: a, high: b} or {choices: [a, b]}, got 0.9"),
        ([], "ppo.gamma: {low: 0.9, hihg: 0.8}", "ppo.gamma: expected {low: a, high: b}"),
        (["method=pbt"], "ppo.horizon: {choices: [8, 16]}", "cannot tune ppo.horizon"),
        ([], "", "choices"),
    ],
)
def test_bad_search_input_is_rejected_in_one_line(tmp_path, monkeypatch, words, space, expected):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(space)
    with pytest.raises(ConfigError) as error:
        read_search(["task=Cartpole", "space=my.yaml", *words])
    assert expected in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["my.yaml"]


def test_numbers_in_non_yaml_notation_are_parsed(tmp_path):
    learning_rate = "ppo.learning_rate: {low: 1e-4, high: 1e-2, log: true}"
    others = "ppo.clip: {choices: [1e-1, 0.2]}\nppo.network.activation: {choices: [elu, tanh]}"
    (tmp_path / "space.yaml").write_text(f"{learning_rate}\n{others}\n")
    search = read_search(["task=Cartpole", f"space={tmp_path / 'space.yaml'}"])
    assert search.space["ppo.learning_rate"] == {"low": 1e-4, "high": 1e-2, "log": True}
    assert search.space["ppo.clip"]["choices"] == [0.1, 0.2]
    assert search.space["ppo.network.activation"]["choices"] == ["elu", "tanh"]


def test_pbt_grace_is_rounded_up_to_log_interval(tmp_path):
    (tmp_path / "space.yaml").write_text("ppo.clip: {low: 0.1, high: 0.2}\n")
    words = ["task=Cartpole", f"space={tmp_path / 'space.yaml'}", "max_iterations=100", "log.interval=10"]
    assert read_search([*words, "+method='pbt'"]).cfg.grace == 20
    assert read_search([*words, "method=pbt", "grace=33"]).cfg.grace == 40
    assert read_search([*words, "method=asha", "grace=33"]).cfg.grace == 33
    assert read_search([*words, "trials=08", "stall_s=0600"]).cfg.trials == 8


def test_study_rejects_different_search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "other.yaml").write_text("ppo.clip: {low: 0.1, high: 0.2}\n")
    study = Study(read_search(SIX))
    study.trials.ask(study.distributions())
    assert study.report()[0].startswith("poles: 1 running")
    Study(read_search([*SIX, "trials=7", "pruner=none", "log.interval=2"]))
    for words, expected in (
        (["max_iterations=7"], "started with max_iterations=6, but now max_iterations=7. Try study=poles-1"),
        (["method=asha"], "started with method=optuna, but now method=asha"),
        (["seed=3"], "started with no seed, but now seed=3"),
        (["space=other.yaml"], "started with space of ppo.learning_rate={'low': "),
    ):
        with pytest.raises(ConfigError) as error:
            Study(read_search([*SIX, *words]))
        assert expected in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_search_keeps_all_trials(tmp_path, number):
    ours = signal.signal(number, signal.SIG_DFL)  # children inherit ignored signals, such as SIGHUP under nohup
    search = start(tmp_path, "trials=2", "max_iterations=300", stdout=None, start_new_session=True)
    signal.signal(number, ours)
    with search:
        wait_for(search, lambda: [*tmp_path.glob("runs/poles.0000/2*/metrics.csv")])
        os.killpg(search.pid, number)  # like a terminal, to all processes
        _, errors = search.communicate(timeout=90)
    assert search.returncode == 128 + number
    assert "stopped: runs/poles" in errors
    [checkpoint] = tmp_path.glob("runs/poles.0000/2*/checkpoints/last.pt")
    assert "Traceback" not in errors and not (checkpoint.parents[1] / "lock").exists()
    done = tune(tmp_path, "trials=2", "max_iterations=300", "pruner=none")
    assert "2/2  trial 2 complete, return" in done.stderr, done.stderr
    assert [row["state"] for row in table_of(tmp_path)] == ["interrupted", "complete", "complete"]
    assert [row["log"] for row in table_of(tmp_path)] == ["0000.log", "0001.log", "0002.log"]


@pytest.mark.slow
def test_two_processes_share_study_without_losing_trials(tmp_path):
    words = ("max_iterations=6", "trials=6", "pruner=none")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [start(tmp_path, *words, **quiet) for _ in range(2)]
    assert [process.wait(timeout=250) for process in processes] == [0, 0]
    done = tune(tmp_path, *words)  # the study is complete
    assert done.returncode == 0 and "python train.py task=Cartpole" in done.stdout
    found = table_of(tmp_path)
    assert [int(row["trial"]) for row in found] == list(range(len(found))) and 6 <= len(found) <= 7
    assert {row["state"] for row in found} == {"complete"}
    for row in found:
        assert (Path(row["run"]) / "checkpoints" / "last.pt").is_file() and float(row["episode/return"]) > 0.0


@pytest.mark.slow
def test_pruned_trials_keep_their_checkpoint(tmp_path):
    done = tune(tmp_path, "trials=8", "max_iterations=27", "pruner=median")
    assert done.returncode == 0, done.stderr
    found = table_of(tmp_path)
    pruned = [row for row in found if row["state"] == "pruned"]
    assert len(found) == 8 and pruned
    assert (Path(pruned[0]["run"]) / "checkpoints" / "last.pt").is_file()


@pytest.mark.slow
def test_failed_or_stalled_trials_do_not_end_search(tmp_path):
    stalled = tune(tmp_path, "max_iterations=6", "trials=2", "stall_s=0.3")
    assert stalled.returncode == 0 and "2 fail" in stalled.stdout and "completed" in stalled.stdout
    overflows = ("ppo.value_coef=1e18", "ppo.reward_scale=1e12", "ppo.normalize_value=false")
    failed = tune(tmp_path, "trials=2", "max_iterations=12", "study=overflows", *overflows)
    assert failed.returncode == 0 and "2 fail" in failed.stdout
    assert "gradient" in (tmp_path / "runs" / "overflows" / "0001.log").read_text()
