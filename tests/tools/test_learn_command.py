"""`tools/bench.py learn` as a user runs it: real trainings that stop at a threshold or by their time, and go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from conftest import ROOT, run_command

GOALS = """\
Cartpole:
  threshold: {threshold}
  minutes: {minutes}
  overrides: [device=cpu, num_envs=64, ppo.minibatch_size=1024]
  compare: "494"
Pendulum: {{threshold: 700}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("learn")
    (folder / "benchmarks").mkdir()
    (folder / "README.md").write_text("# Mine\n\n<!-- learn -->\nnothing yet\n<!-- /learn -->\n\nThe end.\n")
    return folder


def learn(folder: Path, *arguments: str, threshold: float = 60.0, minutes: float = 1.0, check: bool = True):
    (folder / "benchmarks" / "learn.yaml").write_text(GOALS.format(threshold=threshold, minutes=minutes))
    return run_command(sys.executable, ROOT / "tools" / "bench.py", "learn", *arguments, cwd=folder, check=check)


def outcomes(folder: Path) -> list[dict]:
    return json.loads((folder / "benchmarks" / "tasks.json").read_text())["outcomes"]


def test_a_training_stops_by_time_goes_on_and_stops_at_the_threshold(folder):
    # More than Cartpole can give, in no time: it is stopped, with a checkpoint.
    learn(folder, "Cartpole", threshold=600.0, minutes=0.01)
    [first] = outcomes(folder)
    assert not first["reached"] and first["env_steps"] > 0 and (folder / first["run"] / "checkpoints/last.pt").is_file()

    # The same training goes on, and ends at the threshold.
    done = learn(folder, "Cartpole", threshold=60.0)
    [second] = outcomes(folder)
    assert second["run"] == first["run"] and second["reached"]
    assert second["env_steps"] > first["env_steps"] and second["seconds"] > first["seconds"]
    assert second["final_return"] >= 60.0 and second["random_return"] < 60.0
    assert second["environment"]["versions"]["torch"] and second["environment"]["cpu"]["available"]
    assert "git" in second["environment"]
    assert [point[0] for point in second["curve"]] == sorted(point[0] for point in second["curve"])

    readme = (folder / "README.md").read_text()
    row = next(line for line in done.stdout.splitlines() if line.startswith("| `Cartpole`"))
    assert f"{row}\n<!-- /learn -->\n\nThe end.\n" in readme and "nothing yet" not in readme
    assert (folder / "benchmarks" / "tasks.png").read_bytes().startswith(b"\x89PNG")

    # What has been reached is not trained again.
    learn(folder, "Cartpole")
    assert outcomes(folder) == [second]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Cartpol",), "error: no goal for Cartpol in benchmarks/learn.yaml; it has Cartpole, Pendulum"),
        (("Cartpole", "--seeds", "a"), "error: --seeds must be ints such as 1,2,3, got a"),
    ],
)
def test_bad_input_is_one_line(folder, arguments, message):
    done = learn(folder, *arguments, check=False)
    assert done.returncode == 2 and done.stderr.strip() == message


def test_a_training_that_fails_is_told_and_the_others_go_on(folder):
    goals = folder / "benchmarks" / "learn.yaml"
    goals.write_text("Cartpole: {threshold: 10, overrides: [device=cpu, num_env=3]}\nNothing: {threshold: 1}\n")
    done = run_command(sys.executable, ROOT / "tools" / "bench.py", "learn", cwd=folder, check=False)
    assert "error: training Cartpole failed: " in done.stderr and "num_env" in done.stderr
    assert "error: unknown task 'Nothing'" in done.stderr
