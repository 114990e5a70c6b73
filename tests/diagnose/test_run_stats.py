"""Statistics from metrics.csv: weights, warm-up, and files that are broken or being written."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpusim_rl.diagnose.rules import diagnose
from gpusim_rl.diagnose.run_stats import NEWEST, read_rows, read_run_stats, warm_up_rows
from gpusim_rl.errors import ConfigError
from gpusim_rl.run.writers import Row
from gpusim_rl.settings.compose import compose

COLUMNS = (
    "iteration,env_steps,time/iteration_s,speed/env_steps_per_s,time/simulate,time/policy,time/update,time/log,"
    "system/cpu_percent,system/memory_gb,system/gpu_percent,system/load,sim/diverged,sim/overflow"
)
METADATA = {
    "cpu": {"available": 4, "threads": 16},
    "memory_gb": 64.0,
    "gpu": None,
    "sim": {"name": "mujoco", "device": "cpu", "reason": "auto", "threads": 4},
    "learner": {"device": "cpu", "memory_gb": None, "threads": 3},
    "graph": {"mode": "off", "reason": "cpu"},
    "memory_limit_gb": 16.0,
}


@cache
def settings_of(*overrides: str) -> str:
    return yaml.safe_dump(compose(["task=Ant", "num_envs=100", *overrides]))


def change(folder: Path, **sections: Any) -> Path:
    """Change entries of a run's settings."""
    config = yaml.safe_load((folder / "config.yaml").read_text()) | sections
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def make_run(folder: Path, lines: list[str], metadata: dict | None = None, overrides: tuple[str, ...] = ()) -> Path:
    """Write a run folder of 100 envs with these rows."""
    (folder / "config.yaml").write_text(settings_of(*overrides))
    (folder / "env.json").write_text(json.dumps(METADATA if metadata is None else metadata))
    (folder / "metrics.csv").write_text("\n".join([COLUMNS, *lines]) + "\n")
    return folder


def row(iteration: int, seconds: float = 1.0, simulate: float = 0.6, log: float = 0.1, tail: str = "50,1.5,,2.0,0,0"):
    steps = 1600 * iteration
    return f"{iteration},{steps},{seconds},{1600 / seconds},{simulate},0.1,0.2,{log},{tail}"


def test_stats_of_run(tmp_path):
    lines = [row(1, seconds=9.0), row(2), row(3, seconds=3.0, simulate=0.2), row(4, tail="70,1.7,,4.0,8,3")]
    stats = read_run_stats(make_run(tmp_path, lines))
    assert (stats.task, stats.num_envs, stats.horizon, stats.physics_hz) == ("Ant", 100, 16, 120)
    assert (stats.sim, stats.rl_device) == ("mujoco", "cpu")
    assert (stats.rows, stats.warm_up_rows, stats.iteration) == (3, 1, 4)
    assert stats.env_steps_per_s == pytest.approx(3 * 1600 / 5.0)
    assert stats.simulate == pytest.approx((0.6 + 3 * 0.2 + 0.6) / 5)  # weighted by duration
    assert stats.log == pytest.approx(0.1)
    assert stats.log_peaks == pytest.approx(0.2 / 5)  # 0.3 s in one row, 0.1 s in others
    assert stats.cpu_percent == pytest.approx((50 + 50 + 70) / 3) and stats.memory_gb == 1.7
    assert stats.load == pytest.approx(8 / 3) and stats.gpu_percent is None
    assert stats.diverged == pytest.approx(8 / 4800) and stats.overflow == 3
    assert (stats.cpus, stats.machine_cpus, stats.physics_threads, stats.torch_threads) == (4, 16, 4, 3)
    assert (stats.memory_limit_gb, stats.graph_mode) == (16.0, "off")


@pytest.mark.parametrize("settings", [{"noise": 0.3}, None])
def test_stats_support_settings_of_other_algorithms(tmp_path, settings):
    folder = make_run(tmp_path, [row(1), row(2), row(3)])
    stats = read_run_stats(change(folder, algo={"name": "mine"}, mine={"epochs": 7, "horizon": 8}))
    assert (stats.algo, stats.epochs, stats.horizon) == ("mine", 7, 8)
    stats = read_run_stats(change(folder, algo={"name": "search"}, search=settings))
    assert (stats.algo, stats.epochs, stats.minibatch_size, stats.minibatches) == ("search", None, None, None)
    assert stats.horizon == 16 and not stats.compile, "horizon follows from the rows"


def test_missing_entries_of_env_json_are_unknown(tmp_path):
    stats = read_run_stats(make_run(tmp_path, [row(1), row(2)], metadata={"memory_gb": 8.0}))
    assert (stats.sim, stats.sim_device, stats.rl_device) == ("mujoco", "cpu", "cpu")
    assert (stats.physics_threads, stats.graph_mode, stats.memory_limit_gb) == (None, None, 8.0)
    stats = read_run_stats(make_run(tmp_path, [row(1), row(2, tail="9,1,88.0,,0,0")], metadata={}))
    assert (stats.sim, stats.rl_device, stats.gpu_percent) == ("mjwarp", "cuda", 88.0)


def test_control_step_time_covers_all_processes(tmp_path):
    """`env_steps` is summed over all processes; `num_envs` is per process."""
    rows = [row(1), row(2), row(3)]
    alone = read_run_stats(make_run(tmp_path, rows))
    assert (alone.processes, alone.local_processes) == (1, 1) and alone.step_s == pytest.approx(0.7 / 16)
    metadata = METADATA | {"processes": 4, "local_processes": 2}
    several = read_run_stats(make_run(tmp_path, rows, metadata, ("num_envs=25", "multi_gpu=true")))
    assert (several.processes, several.local_processes, several.all_envs) == (4, 2, 100)
    assert several.step_s == pytest.approx(0.7 / 16)
    assert read_run_stats(change(tmp_path, ppo={})).horizon == 16, "horizon follows from the rows"


ACTOR_COLUMNS = (
    "iteration,env_steps,time/iteration_s,speed/env_steps_per_s,time/actors,time/update,time/log,actors/wait,"
    "policy/lag_mean"
)


def make_actor_run(folder: Path, *tails: str) -> Path:
    """Write a run folder of an actor run; `tails` are the columns from `actors/wait`."""
    actors = {"num_actors": 4, "actors": {"engine": "ray", "inference": "learner"}}
    change(make_run(folder, []), algo={"name": "impala"}, impala={"horizon": 8, "max_policy_lag": 8}, **actors)
    lines = [f"{i},{1600 * i},1.0,1600,0.3,0.6,0.05,{tail}" for i, tail in enumerate(tails, start=1)]
    (folder / "metrics.csv").write_text("\n".join([ACTOR_COLUMNS, *lines]) + "\n")
    return folder


def test_stats_of_actor_run(tmp_path):
    stats = read_run_stats(make_actor_run(tmp_path, "0.9,0", "0.2,1.0", "0.4,2.0"))
    assert (stats.num_actors, stats.actor_engine) == (4, "ray")
    assert (stats.max_policy_lag, stats.minibatches, stats.all_envs) == (8, None, 400)
    assert stats.actors == pytest.approx(0.3) and stats.simulate == 0.0
    assert stats.actor_wait == pytest.approx(0.3)
    assert stats.lag_mean == 1.5, "warm-up excluded"


def test_actor_runs_of_other_libraries_are_diagnosed(tmp_path):
    folder = make_actor_run(tmp_path, *["0.1,0"] * 3)
    change(folder, task={"_target_": "gpusim_rl.connect.gymnasium_in.GymnasiumEnv"})
    (folder / "env.json").write_text(json.dumps(METADATA | {"sim": {"name": "none", "device": "cpu"}}))
    stats = read_run_stats(folder)
    assert stats.physics_hz is None and not stats.cpu_physics
    assert {finding.rule for finding in diagnose(replace(stats, diverged=0.1, lag_mean=7.0))} >= {"diverged_envs"}


def test_number_of_actors_comes_from_run(tmp_path):
    folder = make_actor_run(tmp_path, *[","] * 3)
    stats = read_run_stats(folder)
    assert stats.num_actors == 4 and stats.actor_wait is None and stats.lag_mean is None
    (folder / "env.json").write_text(json.dumps(METADATA | {"actors": 6}))
    assert read_run_stats(change(folder, num_actors=None)).num_actors == 6
    assert read_run_stats(change(folder, num_actors=8, actors={"engine": None})).num_actors == 0


def test_log_intervals_are_weighted_by_duration(tmp_path):
    stats = read_run_stats(make_run(tmp_path, [row(10), row(20, simulate=0.8), row(21, simulate=0.2)]))
    assert stats.simulate == pytest.approx((10 * 0.8 + 0.2) / 11)
    assert stats.env_steps_per_s == pytest.approx(1600)


def test_slow_first_rows_are_left_out():
    def rows(*seconds: float) -> list[Row]:
        return [{"iteration": float(i), "time/iteration_s": value} for i, value in enumerate(seconds, start=1)]

    assert warm_up_rows(rows(1.0)) == 0  # the only row
    assert warm_up_rows(rows(1.0, 1.0, 1.0)) == 1
    assert warm_up_rows(rows(30.0, 9.0, 4.0, 1.0, 1.1, 1.0, 0.9, 5.0)) == 3
    assert warm_up_rows(rows(*[5.0] * 20, *[1.0] * 30)) == 10 and warm_up_rows(rows(9.0, 8.0)) == 1
    # On CUDA with graphs the host runs ahead of the device: a row can end long before its work is done.
    assert warm_up_rows(rows(30.0, 9.0, 20.0, 0.01, 1.0, 1.0, 1.1, 0.9, 1.0)) == 4


def test_rows_around_graph_capture_are_left_out(tmp_path):
    metadata = METADATA | {"graph": {"mode": "rollout", "reason": "auto"}}
    seconds = [20.0, 1.0, 1.0, 8.0, 0.8, *[1.0] * 6]  # the second and third are eager, the fourth captures
    stats = read_run_stats(make_run(tmp_path, [row(i, s) for i, s in enumerate(seconds, start=1)], metadata))
    assert (stats.rows, stats.warm_up_rows) == (6, 5) and stats.env_steps_per_s == pytest.approx(1600)
    assert read_run_stats(make_run(tmp_path, [row(1), row(2), row(3)], metadata)).warm_up_rows == 2
    assert read_run_stats(make_run(tmp_path, [row(10), row(20), row(30)], metadata)).warm_up_rows == 1
    resumed = [row(i) for i in range(101, 109)]
    assert read_run_stats(make_run(tmp_path, resumed, metadata)).warm_up_rows == 5


def test_only_the_newest_rows_are_read(tmp_path):
    lines = [row(i, simulate=0.9 if i <= 100 else 0.5) for i in range(1, NEWEST + 101)]
    stats = read_run_stats(make_run(tmp_path, lines))
    assert stats.rows == NEWEST and stats.simulate == pytest.approx(0.5)
    assert stats.env_steps_per_s == pytest.approx(1600)


def test_speed_and_memory_trends_compare_start_and_end(tmp_path):
    lines = [row(i, seconds=1.0 if i < 30 else 2.0, tail=f"50,{1 + i / 50},,1,0,0") for i in range(1, 51)]
    stats = read_run_stats(make_run(tmp_path, lines))
    assert stats.speed_trend == pytest.approx(0.5)
    assert stats.memory_growth_gb == pytest.approx(0.74, abs=0.05)


def test_incomplete_last_line_is_left_out(tmp_path):
    run = make_run(tmp_path, [row(1), row(2)])
    whole = (run / "metrics.csv").read_text()
    for cut in range(len(whole) - 1, whole.index("\n2,"), -7):
        (run / "metrics.csv").write_text(whole[:cut])
        assert len(read_rows(run / "metrics.csv")) == 1
    (run / "metrics.csv").write_text(whole + row(3)[:9])
    assert read_run_stats(run).iteration == 2


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("metrics.csv", None, "metrics.csv: cannot be read"),
        ("metrics.csv", "", "no column iteration"),
        ("metrics.csv", COLUMNS + "\n", "no rows"),
        ("metrics.csv", COLUMNS + "\n1,2\n", "damaged line 2. Try resuming"),
        ("metrics.csv", COLUMNS + "\n" + row(1).replace("0.6", "fast") + "\n", "damaged line 2"),
        ("metrics.csv", COLUMNS + "\n" + row(1).replace("1,1600,", ",1600,", 1) + "\n", "damaged line 2"),
        ("metrics.csv", COLUMNS + "\n" + row(1).replace("1,1600,", "1,nan,", 1) + "\n", "env_steps or time"),
        ("metrics.csv", COLUMNS + "\n" + row(1) + "\n" + row(1).replace("1,", "2,", 1) + "\n", "_s in line 3"),
        ("config.yaml", None, "config.yaml: No such file"),
        ("config.yaml", "num_envs: 3", "KeyError 'task'"),
        ("env.json", "{", "env.json: cannot be read"),
        ("env.json", '{"sim": 3}', "env.json: AttributeError"),
    ],
)
def test_broken_runs_are_rejected_in_one_line(tmp_path, file, text, line):
    run = make_run(tmp_path, [row(1), row(2)])
    if text is None:
        (run / file).unlink()
    else:
        (run / file).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_run_stats(run)
    assert line in str(error.value) and "\n" not in str(error.value)
