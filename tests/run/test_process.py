"""A run as a process: killed, interrupted, started twice in a second, without network, stdin and memory."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from gpusim_rl.errors import friendly_errors
from gpusim_rl.files.checkpoint_file import load
from helpers.commands import ROOT, run_command
from helpers.training import read_csv, the_run
from test_writers import values, wandb_records

TRAIN = Path(__file__).parents[2] / "train.py"
SMALL = [  # as in training.make_trainer
    "num_envs=8",
    "ppo.horizon=8",
    "ppo.epochs=2",
    "ppo.minibatch_size=32",
    "ppo.network.hidden=[16,16]",
    "ppo.network.rnn_size=8",
]


class Process:
    """`python train.py` as a user starts it; killed, should a test leave it behind."""

    def __init__(self, folder: Path, *arguments: str, command: str = "", **variables: str) -> None:
        self.folder = folder
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "HYDRA", "PYTHON"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._files: list[IO[bytes]] = [
            (folder / f"{name}.{time.monotonic_ns()}").open("w+b") for name in ("out", "err")
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {command or shlex.join([sys.executable, str(TRAIN), *SMALL, *arguments])} <&-"],
            cwd=folder,
            env=kept | {"PATH": path, "HOME": str(folder), "NO_COLOR": "1", **variables},
            stdout=self._files[0],
            stderr=self._files[1],
        )

    def _read(self, which: int) -> str:
        return Path(str(self._files[which].name)).read_text()

    @property
    def out(self) -> str:
        return self._read(0)

    @property
    def err(self) -> str:
        return self._read(1)

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.out}\n{self.err}"
            assert time.monotonic() < end, f"waited in vain:\n{self.out}\n{self.err}"
            time.sleep(0.01)

    def rows(self) -> int:
        """Rows of metrics.csv so far."""
        return sum(max(0, file.read_bytes().count(b"\n") - 1) for file in self.folder.glob("runs/*/*-*/metrics.csv"))

    def ended(self, timeout_s: float = 90) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for file in self._files:
            file.close()


@pytest.fixture
def start(tmp_path):
    processes: list[Process] = []

    def start_one(*arguments: str, folder: Path = tmp_path, **options: str) -> Process:
        processes.append(Process(folder, *arguments, **options))
        return processes[-1]

    yield start_one
    for process in processes:
        process.close()


def iterations(run: Path) -> list[int]:
    return [int(row["iteration"]) for row in read_csv(run)]


@pytest.mark.parametrize(
    "megabytes", [500, *(pytest.param(size, marks=pytest.mark.slow) for size in (100, 700, 780, 840))]
)
def test_too_little_address_space_is_one_line(tmp_path, megabytes):
    arguments = [*SMALL, "max_iterations=1", "log.console=quiet", "device=cpu"]
    command = f"ulimit -v {1024 * megabytes}; exec {sys.executable} {TRAIN} {shlex.join(arguments)}"
    done = run_command("bash", "-c", command, cwd=tmp_path, check=False, env={"OMP_NUM_THREADS": "1"})
    if done.returncode == 0 and megabytes > 780:
        return  # enough for this machine's libraries
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: out of memory") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), OSError(12, "Cannot allocate memory")]
)
def test_memory_that_ends_anywhere_is_one_line(error, capsys):
    with pytest.raises(SystemExit) as end, friendly_errors():
        raise error
    assert end.value.code == 2
    assert re.fullmatch(r"error: out of memory \(.+\); try to free some memory, .+\n", capsys.readouterr().err)


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_in_the_temporary_folder(tmp_path, start):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = start("max_iterations=100000", TMPDIR=str(temporary))
    process.wait_for(process.rows)
    process.process.kill()
    process.ended()
    assert list(temporary.glob("gpusim-rl*")) == []  # torch has a cache there


@pytest.mark.slow  # test_trainer has signals in this process, test_console a Ctrl-C in another one
def test_a_signal_saves_and_prints_a_command_that_goes_on(tmp_path, start):
    process = start("max_iterations=100000", "log.console=plain")
    process.wait_for(lambda: process.rows() > 3)
    process.process.send_signal(signal.SIGTERM)
    assert process.ended() == 143, process.err
    assert process.err == "stopping after this iteration, with a checkpoint; once more stops at once\n"
    run = the_run(tmp_path / "runs")
    saved = load(run / "checkpoints" / "last.pt")["iteration"]
    assert iterations(run) == list(range(1, saved + 1))

    (command,) = re.findall(r"^  (python .*train\.py checkpoint=.*)$", process.out, re.MULTILINE)
    again = start(command=f"{command} max_iterations={saved + 2}")
    assert again.ended() == 0, again.err
    assert iterations(run) == list(range(1, saved + 3))


@pytest.mark.slow
def test_a_terminal_that_closes_twice_over_costs_nothing(tmp_path, start):
    process = start("max_iterations=100000", "log.console=plain")
    process.wait_for(lambda: process.rows() > 3)
    for _ in range(2):  # the kernel's and the shell's
        process.process.send_signal(signal.SIGHUP)
    assert process.ended() == 128 + signal.SIGHUP
    run = the_run(tmp_path / "runs")
    assert iterations(run)[-1] == load(run / "checkpoints" / "last.pt")["iteration"]


@pytest.mark.slow
def test_nohup_is_respected(tmp_path, start):
    command = shlex.join(["nohup", sys.executable, str(TRAIN), *SMALL, "max_iterations=100000"])
    process = start(command=command)
    process.wait_for(lambda: process.rows() > 1)
    process.process.send_signal(signal.SIGHUP)
    before = process.rows()
    process.wait_for(lambda: process.rows() > before + 3)
    process.process.send_signal(signal.SIGTERM)
    assert process.ended() == 143


SLOW = '''
import time
from gpusim_rl.tasks.cartpole import Cartpole

class Slow(Cartpole):
    """Slow: an iteration takes a minute."""

    def apply_action(self, action):
        time.sleep(0.5)
        super().apply_action(action)
'''


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path, start):
    yaml = (TRAIN.parent / "cfg" / "task" / "Cartpole.yaml").read_text()
    (tmp_path / "cfg" / "task").mkdir(parents=True)
    (tmp_path / "cfg" / "task" / "Slow.yaml").write_text(yaml.replace("gpusim_rl.tasks.cartpole.Cartpole", "slow.Slow"))
    (tmp_path / "slow.py").write_text(SLOW)
    process = start("task=Slow", "ppo.horizon=120", "log.console=plain", f"-cd={tmp_path / 'cfg'}")
    process.wait_for(lambda: re.search(r"^run +runs/Slow", process.out, re.MULTILINE))
    time.sleep(1.0)  # the handlers are there and the first iteration is under way
    process.process.send_signal(signal.SIGINT)
    process.wait_for(lambda: "once more stops at once" in process.err)
    began = time.monotonic()
    process.process.send_signal(signal.SIGINT)
    assert process.ended() == 130
    assert time.monotonic() - began < 10
    assert process.err.endswith("interrupted\n")
    assert not list((the_run(tmp_path / "runs") / "checkpoints").iterdir())


def commands(process: Process) -> list[str]:
    """What the end of a run offers."""
    return re.findall(r"^  (.*)$", process.out.partition("\nnext:\n")[2], re.MULTILINE)


@pytest.mark.slow
def test_a_user_of_the_installed_command_is_offered_it(tmp_path, start):
    entry_point = tmp_path / "gpusim-rl"  # what pip makes
    entry_point.write_text("from gpusim_rl.cli import main\nmain()\n")
    words = [sys.executable, str(entry_point), "train", *SMALL, "max_iterations=2", "log.console=plain"]
    process = start(command=shlex.join(words), PYTHONPATH=str(ROOT))
    assert process.ended() == 0, process.err
    run = the_run(tmp_path / "runs").relative_to(tmp_path)
    assert commands(process) == [
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
def test_a_run_of_a_script_is_offered_what_can_continue_it(tmp_path, start):
    script = tmp_path / "balance.py"
    script.write_text(f"{SCRIPT}gpusim_rl.train(Balance, config, max_iterations=2, **small)\n")
    first = start(command=shlex.join([sys.executable, str(script)]), PYTHONPATH=str(ROOT))
    assert first.ended() == 0, first.err
    resume, plot = commands(first)
    run = the_run(tmp_path / "runs").relative_to(tmp_path)
    call, why = resume.split("  ")
    assert call == f"gpusim_rl.train(..., checkpoint='{run}', max_iterations=4)"
    assert why == "in the script with its classes: no command can import them"
    assert plot.endswith(f"plot.py {run}")

    script.write_text(SCRIPT + call.replace("...", "Balance, config, **small") + "\n")
    again = start(command=shlex.join([sys.executable, str(script)]), PYTHONPATH=str(ROOT))
    assert again.ended() == 0, again.err
    assert iterations(tmp_path / run) == [1, 2, 3, 4]


@pytest.mark.slow
def test_far_too_many_envs_are_a_warning_and_one_line(tmp_path):
    command = f"ulimit -v 8000000; exec {sys.executable} {ROOT / 'train.py'} task=Ant num_envs=20000000 device=cpu"
    done = run_command("bash", "-c", command, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    said = re.search(r"^num_envs=20000000 probably does not fit: .* GB are free; (try .*)$", done.stderr, re.M)
    assert said and re.search(rf"^error: out of memory with num_envs=20000000 .*; {said[1]}$", done.stderr, re.M)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_weights_and_biases_without_key_network_and_stdin_goes_offline_and_is_resumed(tmp_path, start):
    arguments = ["wandb_activate=true", "wandb_project=carts", "wandb_tags=[a,b]", "log.console=plain"]
    first = start("max_iterations=3", *arguments)
    assert first.ended() == 0, first.err
    run = the_run(tmp_path / "runs")
    assert re.search(
        r"^W&B: offline \(no API key; .*\); upload with: wandb sync runs/Cartpole/", first.out, re.MULTILINE
    )
    assert f"checkpoint={run.relative_to(tmp_path)} wandb_activate=true max_iterations=6" in first.out
    second = start(f"checkpoint={run}", "max_iterations=5", "log.console=plain", "wandb_activate=true")
    assert second.ended() == 0, second.err

    folders = sorted((run / "wandb").glob("offline-run-*"))
    assert (
        len(folders) == 2 and len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    )  # one run on the server
    steps: list[int] = []
    for folder in folders:
        (file,) = folder.glob("run-*.wandb")
        records = list(wandb_records(file))
        (of_run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
        assert of_run.project == "carts" and list(of_run.tags) == ["a", "b"]
        assert values(of_run.config.update)["num_envs"] == 8
        history = [values(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]
        assert all("policy/kl" in row for row in history)
        steps += [row["_step"] for row in history]
        assert any(record.WhichOneof("record_type") == "stats" for record in records)
    assert steps == iterations(run) == [1, 2, 3, 4, 5]
