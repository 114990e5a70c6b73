"""Tests of runs as processes: signals, offered commands, no network, stdin or memory."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from gpusim_rl.files.checkpoint_file import load
from helpers.commands import ROOT, Finished, run_command
from helpers.training import read_csv, the_run
from reliability.processes import Slot, rows
from reliability.processes import slot as slot  # a fixture
from test_writers import values, wandb_records

TRAIN = Path(__file__).parents[2] / "train.py"
SMALL = ("num_envs=8", "ppo.horizon=8", "ppo.epochs=2", "ppo.minibatch_size=32", "ppo.network.hidden=[16,16]")


def iterations(run: Path) -> list[int]:
    return [int(row["iteration"]) for row in read_csv(run)]


def test_too_little_address_space_is_reported_in_one_line(tmp_path):
    arguments = [*SMALL, "max_iterations=1", "log.console=quiet", "device=cpu"]
    command = f"ulimit -v {1024 * 500}; exec {sys.executable} {TRAIN} {shlex.join(arguments)}"
    done = run_command("bash", "-c", command, cwd=tmp_path, check=False, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2, done.stderr
    assert re.match(r"error: .*memory", done.stderr) and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_signal_saves_and_prints_a_resume_command(tmp_path: Path, slot: Slot) -> None:
    process = slot.start(TRAIN, *SMALL, "max_iterations=100000", "log.console=plain", cwd=tmp_path)
    process.wait_for(lambda: [run for run in tmp_path.glob("runs/*/2*") if len(rows(run)) > 3])
    process.send(signal.SIGTERM)
    done = process.ended()
    assert done.returncode == 143 and done.stderr.startswith("stopping")
    run = the_run(tmp_path / "runs")
    saved = load(run / "checkpoints" / "last.pt")["iteration"]
    assert iterations(run) == list(range(1, saved + 1))

    (words,) = re.findall(r"^  python (.*train\.py checkpoint=.*)$", done.stdout, re.MULTILINE)
    again = slot.run(*shlex.split(words), f"max_iterations={saved + 2}", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert iterations(run) == list(range(1, saved + 3))


def commands(done: Finished) -> list[str]:
    """Return the commands offered at the end of a run."""
    return re.findall(r"^  (.*)$", done.stdout.partition("\nnext:\n")[2], re.MULTILINE)


@pytest.mark.slow
def test_installed_command_is_offered_at_the_end(tmp_path):
    entry_point = tmp_path / "gpusim-rl"  # like the script that pip installs
    entry_point.write_text("from gpusim_rl.cli import main\nmain()\n")
    words = [sys.executable, str(entry_point), "train", *SMALL, "max_iterations=2", "log.console=plain"]
    done = run_command(*words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    run = the_run(tmp_path / "runs").relative_to(tmp_path)
    assert commands(done) == [
        f"gpusim-rl play {run}",
        f"gpusim-rl record {run}",
        f"gpusim-rl train checkpoint={run} max_iterations=4",
        f"gpusim-rl plot {run}",
    ]


SCRIPT = '''
import gpusim_rl
from gpusim_rl.tasks.cartpole import Cartpole

class Balance(Cartpole):
    """Balance: a class of the script itself."""

general = dict(physics_hz=120, control_hz=60, episode_length=500, clip_actions=1, clip_observations=5)
own = dict(max_force=400, reset_distance=3, death_cost=-2, discrete=False)
config = Balance.Config(**general, **own, randomize_episode_start=True)
small = dict(num_envs=8, log={"console": "plain"}, ppo=dict(horizon=8, epochs=2, minibatch_size=32))
'''


@pytest.mark.slow
def test_script_run_offers_a_call_that_resumes_it(tmp_path):
    script = tmp_path / "balance.py"
    script.write_text(f"{SCRIPT}gpusim_rl.train(Balance, config, max_iterations=2, **small)\n")
    command = [sys.executable, str(script)]
    resume, plot = commands(run_command(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}))
    run = the_run(tmp_path / "runs").relative_to(tmp_path)
    call, note = resume.split("  ")
    assert call == f"gpusim_rl.train(..., checkpoint='{run}', max_iterations=4)" and "script" in note
    assert plot.endswith(f"plot.py {run}")

    script.write_text(SCRIPT + call.replace("...", "Balance, config, **small") + "\n")
    run_command(*command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert iterations(tmp_path / run) == [1, 2, 3, 4]


@pytest.mark.slow
def test_too_many_envs_fail_in_one_line(tmp_path):
    command = f"ulimit -v 8000000; exec {sys.executable} {ROOT / 'train.py'} task=Ant num_envs=20000000 device=cpu"
    done = run_command("bash", "-c", command, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert re.search(r"^error: num_envs=20000000: .* Try num_envs=10000000$", done.stderr, re.M)
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_wandb_without_key_network_and_stdin_resumes_offline(tmp_path, train_cli):
    arguments = ["wandb_activate=true", "wandb_project=carts", "wandb_tags=[a,b]", "log.console=plain"]
    first = train_cli(*SMALL, "max_iterations=3", *arguments)
    run = the_run(tmp_path / "runs")
    assert re.search(r"^W&B: offline .* wandb sync runs/Cartpole/", first.stdout, re.MULTILINE)
    assert f"checkpoint={run.relative_to(tmp_path)} wandb_activate=true max_iterations=6" in first.stdout
    train_cli(f"checkpoint={run}", "max_iterations=5", "log.console=plain", "wandb_activate=true")

    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert (
        len(folders) == 2 and len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    )  # one run on the server
    steps: list[int] = []
    for folder in folders:
        (file,) = folder.glob("run-*.wandb")
        records = list(wandb_records(file))
        (saved,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert saved.project == "carts" and list(saved.tags) == ["a", "b"]
        assert values(saved.config.update)["num_envs"] == 8
        history = [values(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]
        assert all("policy/kl" in row for row in history)
        steps += [row["_step"] for row in history]
        assert any(record.WhichOneof("record_type") == "stats" for record in records)
    assert steps == iterations(run) == [1, 2, 3, 4, 5]
