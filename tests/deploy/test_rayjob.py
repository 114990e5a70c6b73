"""Shutdown of a RayJob learner's pod: a real Ray head, a submitted job, and the manifest's preStop hook."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.test_manifests import learner
from gpusim_rl.files.checkpoint_file import load
from helpers.commands import ROOT
from helpers.training import read_csv
from reliability.record import record

TRAINING = "task=Cartpole algo=impala actors=ray num_actors=2 num_envs=4 impala.network.hidden=[16,16]"
TIMEOUT_S = 120.0


class Head:
    """`ray start --head --block` as in the pod, on loopback only."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder, self.temporary = folder, temporary
        scripts = Path(sys.executable).parent
        self.experiment = f"rayjob-{os.getpid()}-{time.time_ns()}"
        gone = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
        self.env = {key: value for key, value in os.environ.items() if key not in gone}
        self.env |= {"RUNS": str(folder), "EXPERIMENT": self.experiment, "RAY_AUTH_MODE": "disabled"}
        self.env |= {"PATH": f"{ROOT / 'deploy'}:{scripts}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        port, self.dashboard = free_port(), free_port()
        words = [f"--port={port}", f"--dashboard-port={self.dashboard}", "--dashboard-host=127.0.0.1"]
        words += ["--node-ip-address=127.0.0.1", "--num-cpus=3", f"--temp-dir={temporary}", "--disable-usage-stats"]
        with (folder / "head.log").open("w") as log:
            command = ["ray", "start", "--head", "--block", *words]
            self.process = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=folder)

    def submit(self) -> None:
        """Submit the training as KubeRay's pod does, until the head answers."""
        words = ["ray", "job", "submit", "--no-wait", f"--address=http://127.0.0.1:{self.dashboard}", "--"]
        words += ["start-or-continue", "python", str(ROOT / "train.py"), *shlex.split(TRAINING)]
        words += ["max_iterations=1000000", "log.checkpoint_interval=100000"]
        end = time.monotonic() + TIMEOUT_S
        while (done := subprocess.run(words, env=self.env, capture_output=True, text=True)).returncode:
            assert time.monotonic() < end, done.stderr + done.stdout
            time.sleep(1.0)

    def wait_for_rows(self, count: int) -> None:
        end = time.monotonic() + TIMEOUT_S
        while len(self.rows()) < count:
            assert time.monotonic() < end, (self.folder / "head.log").read_text()
            time.sleep(0.2)

    def run(self) -> Path | None:
        return next(iter(self.folder.glob(f"{self.experiment}/2*")), None)

    def rows(self) -> list[int]:
        run = self.run()
        if run is None or not (run / "metrics.csv").exists():
            return []
        return [int(row["iteration"]) for row in read_csv(run, machine=True)]

    def end(self) -> None:
        """Stop the head as Kubernetes does."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        _, alive = psutil.wait_procs(below, timeout=30)
        for it in alive:
            it.kill()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    pytest.importorskip("ray")
    server = "ray.dashboard.optional_deps"  # Ray's only check before it starts a job server
    pytest.importorskip(server, reason="no job server: pip install 'ray[default]'", exc_type=ImportError)
    temporary = Path(tempfile.mkdtemp(prefix="r"))  # short, because Ray creates sockets in it
    head = Head(tmp_path, temporary)
    below: list[psutil.Process] = []
    try:
        yield head
    finally:
        if head.process.poll() is None:
            below = psutil.Process(head.process.pid).children(recursive=True)
            head.process.kill()
            head.process.wait()
        for it in below:
            if it.is_running():
                it.kill()
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="processes in /proc")
def test_pre_stop_hook_saves_last_iteration(head: Head) -> None:
    head.submit()
    head.wait_for_rows(50)
    pod = learner("ray")
    began = time.monotonic()
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    subprocess.run(hook, env=head.env, check=True, timeout=60)
    hook_s = time.monotonic() - began
    head.end()
    whole_s = time.monotonic() - began
    assert whole_s < pod["terminationGracePeriodSeconds"]
    run, rows = head.run(), head.rows()
    assert run is not None and rows == [*range(1, rows[-1] + 1)]
    assert load(run / "checkpoints" / "last.pt")["iteration"] == rows[-1]
    record(
        "Kubernetes ends the learner's pod (RayJob)",
        "`ray start --head --block` and `ray job submit` on one machine; the preStop hook of the manifest, then SIGTERM"
        " to the head",
        1,
        f"the training ends {hook_s:.1f} s after the hook began, the head after {whole_s:.1f} s;"
        f" last.pt matches the last row of metrics.csv ({rows[-1]})",
        "nothing",
    )


def test_pre_stop_hook_ends_at_once_without_training() -> None:
    variables = {**os.environ, "EXPERIMENT": f"nobody-{time.time_ns()}"}
    subprocess.run([ROOT / "deploy" / "stop-training"], env=variables, check=True, timeout=20)
    done = subprocess.run(["sh", ROOT / "deploy" / "stop-training"], env={}, capture_output=True, text=True)
    assert done.returncode and "EXPERIMENT" in done.stderr
