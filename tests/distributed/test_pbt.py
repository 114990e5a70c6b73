"""Population-based training: perturbation, a moving optimum, and lost trials and files."""

from __future__ import annotations

import csv
import math
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from gpusim_rl.distributed import pbt
from gpusim_rl.distributed.pbt import add_row, explored, newest_checkpoint, settings_of
from gpusim_rl.distributed.ray_cluster import ray_cluster
from gpusim_rl.distributed.ray_search import _listener, _trainable, make_scheduler, trial_resources
from gpusim_rl.distributed.search import Search, SearchConfig
from gpusim_rl.distributed.trial_run import OBJECTIVE
from gpusim_rl.distributed.tuning import Study
from gpusim_rl.files.checkpoint_file import load, save
from helpers.searches import start, table_of, wait_for
from helpers.training import read_csv

LOG = {"low": 1e-4, "high": 1e-2, "log": True}


def search_of(space: dict[str, Any], folder: Path = Path("runs/poles"), iterations: int = 24, **changes: Any) -> Search:
    cfg = SearchConfig(method="pbt", study="poles", **changes)
    return Search(cfg, space, ["task=Cartpole"], None, "auto", iterations, folder)


class Scripted(random.Random):
    """Random generator with scripted draws."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def choice(self, seq: Any) -> Any:
        return self.numbers.pop(0)

    def uniform(self, a: float, b: float) -> float:
        return a + self.numbers.pop(0) * (b - a)


def test_perturbation_follows_scale_of_range() -> None:
    space = {
        "ppo.learning_rate": LOG,
        "ppo.gamma": {"low": 0.9, "high": 0.99},
        "ppo.epochs": {"low": 1, "high": 9},
        "x.kind": {"choices": [1, 2, 4]},
    }
    now = {"ppo.learning_rate": 1e-3, "ppo.gamma": 0.95, "ppo.epochs": 4, "x.kind": 2, "other": 3}
    up = explored(now, space, Scripted(1, 0.25, 1, 0.5, 1, 0.5, 1))
    # x (1.1 + 0.25 x 0.4); + (0.1 + 0.5 x 0.2) of the range of 0.09, and of 8: 1.6 is rounded
    assert up["ppo.learning_rate"] == pytest.approx(1.2e-3) and up["ppo.gamma"] == pytest.approx(0.968)
    assert (up["ppo.epochs"], up["x.kind"], up["other"]) == (6, 4, 3)
    down = explored(now, space, Scripted(-1, 1.0, -1, 0.0, -1, 0.0, -1))
    assert down["ppo.learning_rate"] == pytest.approx(1e-3 / 1.5) and down["ppo.gamma"] == pytest.approx(0.941)
    assert (down["ppo.epochs"], down["x.kind"]) == (3, 1)


def test_perturbed_settings_stay_within_space() -> None:
    space = {
        "a": LOG,
        "b": {"low": 0, "high": 2},
        "c": {"choices": ["x", "y"]},
        "d": {"low": 1, "high": 64, "log": True},
    }
    settings: dict[str, Any] = {"a": 9e-3, "b": 2, "c": "y", "d": 1}
    seen = []
    for _ in range(300):
        settings = explored(settings, space, random.Random(len(seen)))
        assert 1e-4 <= settings["a"] <= 1e-2 and settings["c"] in ("x", "y")
        seen.append((settings["b"], settings["d"]))
    assert {b for b, _ in seen} == {0, 1, 2} and all(isinstance(d, int) and 1 <= d <= 64 for _, d in seen)


def test_concurrent_trials_share_resources() -> None:
    search = search_of({"ppo.learning_rate": LOG}, trials=8)
    assert trial_resources(search, {"CPU": 64.0}) == {"cpu": 1.0}
    assert trial_resources(search, {"CPU": 3.0, "GPU": 2.0}) == {"cpu": 0.333, "gpu": 0.25}
    asha = Search(SearchConfig(method="asha"), {}, [], None, "cpu", 24, Path("runs/poles"))
    assert trial_resources(asha, {"CPU": 2.0, "GPU": 2.0}) == {"cpu": 1.0}


def test_row_truncated_by_full_disk_is_removed(tmp_path: Path) -> None:
    for cut in (0, 3):
        for iteration in (4, 8):
            add_row(tmp_path, {"trial": 0, "iteration": iteration, "score": "1,5"})
        with (tmp_path / "population.csv").open("r+b") as table:
            table.truncate(len(table.read()) - cut)
    add_row(tmp_path, {"trial": 0, "iteration": 12, "score": 2.0})
    with (tmp_path / "population.csv").open(newline="") as table:
        rows = [(row["iteration"], row["score"]) for row in csv.DictReader(table)]
    assert rows == [("4", "1,5"), ("8", "1,5"), ("4", "1,5"), ("12", "2.0")]


def test_full_disk_does_not_end_trial(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    study = Study(search_of({}, tmp_path / "poles"))
    monkeypatch.setattr(pbt, "add_row", Mock(side_effect=OSError(28, "no space")))
    result = {"trial": 0, "number": 0, "iteration": 4, OBJECTIVE: 1.0, "since": 0, "parent": 0, "run": "", "config": {}}
    _listener(SimpleNamespace(Callback=object), study, [0]).on_trial_result(result=result)
    assert pbt.add_row.called and "iteration 4  trial 0" in capsys.readouterr().err


def test_trial_resumes_from_newest_intact_checkpoint(tmp_path: Path) -> None:
    files = [tmp_path / run / "checkpoints" / f"{number:06d}.pt" for run, number in (("2a", 8), ("2b", 4), ("2b", 24))]
    for age, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        save(file, {"iteration": int(file.stem)})
        os.utime(file, ns=(age, age))
    assert newest_checkpoint(tmp_path, 24) == files[1]  # 24 is the end of training
    files[1].write_bytes(files[1].read_bytes()[:100])
    assert newest_checkpoint(tmp_path, 24) == files[0]
    files[0].unlink()
    assert newest_checkpoint(tmp_path, 24) is None


def test_trial_of_killed_run_does_not_wait_for_checkpoint(tmp_path: Path) -> None:
    trial = _trainable(SimpleNamespace(Trainable=object), search_of({}), [0], {}, 1.0)()
    trial._interval_end, trial._trial_run = 4, SimpleNamespace(folder=str(tmp_path), running=False)
    began = time.monotonic()
    trial.save_checkpoint(str(tmp_path))
    assert time.monotonic() - began < 10.0


def gain(walk: float) -> float:
    """Return the optimal rate for tracking a random walk with unit noise: Kalman gain, K^2 / (1 - K) = walk^2."""
    return 0.5 * (-(walk**2) + math.sqrt(walk**4 + 4.0 * walk**2))


@pytest.mark.slow
def test_population_follows_best_learning_rate() -> None:
    key, begin = "tracker.learning_rate", [1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4, 0.9]
    search = search_of({key: {"low": 1e-3, "high": 1.0, "log": True}}, trials=8, grace=1)
    walks = [1.0] * 40 + [0.05] * 40  # optimal rate: 0.62, then 0.049
    rates: dict[int, dict[str, tuple[float, float]]] = {}  # interval -> trial -> score and rate

    with ray_cluster("the test"):
        from ray import tune

        class Tracker(tune.Trainable):
            """Tracker of random walks by x += rate (observed - x)."""

            def setup(self, config: dict[str, Any]) -> None:
                self._chance = np.random.default_rng(int(self.trial_id.rpartition("_")[2]))
                self._x = self._target = np.zeros(512)
                self._interval = 0

            def step(self) -> dict[str, Any]:
                errors = []
                for _ in range(40):
                    walked, noise = self._chance.standard_normal((2, 512))
                    self._target = self._target + walks[self._interval] * walked
                    self._x = self._x + self.config[key] * (self._target + noise - self._x)
                    errors.append(np.square(self._x - self._target).mean())
                self._interval += 1
                time.sleep(0.05)  # all trials start before one ends
                return {"score": -np.mean(errors[20:]), "interval_end": self._interval, "rate": self.config[key]}

            def save_checkpoint(self, checkpoint_dir: str) -> None:
                np.save(Path(checkpoint_dir, "state.npy"), np.stack([self._x, self._target]))
                Path(checkpoint_dir, "interval").write_text(str(self._interval))

            def load_checkpoint(self, checkpoint: Any) -> None:
                self._x, self._target = np.load(Path(checkpoint, "state.npy"))
                self._interval = int(Path(checkpoint, "interval").read_text())

            def reset_config(self, new_config: dict[str, Any]) -> bool:
                return True

        class Listener(tune.Callback):
            def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
                rates.setdefault(result["interval_end"], {})[trial.trial_id] = (result["score"], result["rate"])

        tune.Tuner(
            tune.with_resources(Tracker, trial_resources(search, {"CPU": 1.0})),
            param_space={key: tune.grid_search(begin)},
            tune_config=tune.TuneConfig(
                metric="score", mode="max", scheduler=make_scheduler(search), reuse_actors=True
            ),
            run_config=tune.RunConfig(stop={"interval_end": len(walks)}, callbacks=[Listener()], verbose=0),
        ).fit()
    for interval, walk in ((40, 1.0), (80, 0.05)):
        _, rate = max(rates[interval].values())
        assert gain(walk) / 2.0 < rate < gain(walk) * 2.0, (interval, rates[interval])


RATES = {"low": 1e-5, "high": 1e-2, "log": True}
SPACE = "ppo.learning_rate: {low: 1.0e-5, high: 1.0e-2, log: true}\nppo.clip: {choices: [0.1, 0.2, 0.3]}\n"


def pbt_start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return start(folder, "method=pbt", "trials=4", "grace=4", "ppo.minibatch_size=256", *words, space=SPACE)


def intervals(folder: Path) -> set[tuple[int, int]]:
    """Return trial and iteration of each row of the table."""
    return {(int(row["trial"]), int(row["iteration"])) for row in table_of(folder, "population.csv")}


def runs_of(folder: Path, trial: int) -> list[Path]:
    return sorted(run for run in folder.glob(f"runs/poles.{trial:04d}/2*") if not run.is_symlink())


def process_of(run: Path) -> int:
    found = re.match(r"process (\d+) ", (run / "lock").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.slow
def test_killed_trial_and_torn_checkpoint_cost_at_most_one_interval(tmp_path: Path) -> None:
    process = pbt_start(tmp_path, "max_iterations=200")  # long enough for others to run after the restart
    wait_for(process, lambda: any(iteration >= 8 for _, iteration in intervals(tmp_path)))
    table = table_of(tmp_path, "population.csv")
    best = max((row for row in table if int(row["iteration"]) >= 8), key=lambda row: float(row["score"]))
    trial, run = int(best["trial"]), Path(best["run"])  # copied by others, copies none
    torn = newest_checkpoint(run.parent, 200)
    os.kill(process_of(run), signal.SIGKILL)
    assert torn is not None
    torn.write_bytes(torn.read_bytes()[:1000])  # others may be copying it
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0 and "Traceback" not in err, err
    assert f"trial {trial} ended (SIGKILL); resuming" in err
    assert [row["state"] for row in table_of(tmp_path)] == ["complete"] * 4, err
    for row in table_of(tmp_path):
        assert load(Path(row["run"]) / "checkpoints" / "last.pt")["iteration"] == 200
    table = table_of(tmp_path, "population.csv")
    assert all(0 < int(row["iteration"]) - int(row["since"]) <= 4 for row in table)
    copies = [row for row in table if row["parent"] != row["trial"]]
    assert copies and "copies: runs/poles/population.csv" in out
    for row in copies:
        run = Path(row["run"])
        assert int(read_csv(run)[0]["iteration"]) == int(row["since"]) + 1
        assert f"poles.{int(row['parent']):04d}/" in (run / "overrides.yaml").read_text()
        assert settings_of(run, {"ppo.learning_rate": RATES}) == {"ppo.learning_rate": float(row["ppo.learning_rate"])}
    assert "gpusim-rl play runs/poles.000" in out


@pytest.mark.slow
def test_stalled_trial_resumes_from_last_checkpoint(tmp_path: Path) -> None:
    process = pbt_start(tmp_path, "max_iterations=16", "trials=2", "stall_s=20")
    wait_for(process, lambda: (1, 4) in intervals(tmp_path))
    os.kill(process_of(runs_of(tmp_path, 1)[-1]), signal.SIGSTOP)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert re.search(r"trial 1 ended \(.*20 s\); resuming", err), err
    assert [row["state"] for row in table_of(tmp_path)] == ["complete"] * 2


@pytest.mark.slow
def test_stopped_population_resumes(tmp_path: Path) -> None:
    process = pbt_start(tmp_path, "max_iterations=200")
    wait_for(process, lambda: {trial for trial, _ in intervals(tmp_path)} == {0, 1, 2, 3})
    below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    _, err = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err, err
    assert re.search(r"^iteration 4  trial \d  [\d.]+", err, re.MULTILINE), err
    assert psutil.wait_procs(below, timeout=20)[1] == []
    before, runs = {}, {}
    for trial in range(4):
        runs[trial] = runs_of(tmp_path, trial)
        before[trial] = load(runs[trial][-1] / "checkpoints" / "last.pt")["iteration"]
        assert before[trial] == int(read_csv(runs[trial][-1])[-1]["iteration"]) < 200  # all iterations are saved
    other = pbt_start(tmp_path, "max_iterations=200", "trials=5")
    assert "study=poles: had trials=4, now trials=5" in other.communicate(timeout=100)[1] and other.returncode == 2
    again = pbt_start(tmp_path, "max_iterations=200")
    out, err = again.communicate(timeout=500)
    assert again.returncode == 0 and "4 complete" in out, err
    for trial in range(4):
        assert {(trial, 200)} <= intervals(tmp_path)
        first_row = read_csv(runs_of(tmp_path, trial)[len(runs[trial])])[0]
        assert before[trial] - 4 < int(first_row["iteration"]) <= before[trial] + 1  # repeats at most one interval
