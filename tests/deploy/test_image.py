"""Dockerfile and its start command, without building the image."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.commands import ROOT

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SCRIPT = ROOT / "deploy" / "start-or-continue"
TRAIN = ["train.py", "task=Cartpole", "device=cpu", "num_envs=16", "log.console=quiet"]


def lines(instruction: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", "")
    return re.findall(rf"^{instruction} (.+)$", joined, re.MULTILINE)


def test_base_image_is_pinned_and_user_is_not_root():
    [base], [user] = lines("FROM"), lines("USER")
    assert base == "python:3.12-slim"
    assert int(user.split(":")[0]) > 0 and DOCKERFILE.rstrip().endswith(f"USER {user}")


def test_layers_contain_no_caches():
    installs = [line for line in lines("RUN") if "pip install" in line]
    assert installs and all("--no-cache-dir" in line for line in installs)
    assert all("rm -rf /var/lib/apt/lists/*" in line for line in lines("RUN") if "apt-get" in line)


def test_installed_extras_exist():
    [extras] = re.findall(r'"\.\[([\w,]+)\]"', DOCKERFILE)
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {*extras.split(",")} <= {*known} and "ray" in extras.split(",")


def test_triton_has_compiler_and_caches_are_on_volume():
    [packages] = [line for line in lines("RUN") if "apt-get install" in line]
    assert {"gcc", "g++"} <= {*packages.split()}
    variables = dict(re.findall(r"(\w+)=(\S+)", " ".join(lines("ENV"))))
    assert {"WARP_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} <= variables.keys()
    assert all(path.startswith("/cache/") for name, path in variables.items() if name != "RUNS")


def test_build_context_is_minimal():
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored and all((ROOT / name).exists() for name in kept)
    project = (ROOT / "pyproject.toml").read_text()
    forced = re.findall(r'^"([\w./]+)" = "gpusim_rl/', project, re.MULTILINE)
    assert {*forced, "gpusim_rl", "pyproject.toml", "README.md", "LICENSE", "deploy/start-or-continue"} <= kept
    assert "deploy/stop-training" in kept


def start(runs: Path, *more: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "RUNS": str(runs), "EXPERIMENT": "ours", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["sh", SCRIPT, sys.executable, *TRAIN, *more],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(pattern: str, folder: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not list(folder.glob(pattern)):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def iterations(runs: Path) -> list[int]:
    [file] = runs.glob("ours/2*/metrics.csv")
    head, *rows = [line.split(",") for line in file.read_text().splitlines()]
    return [int(row[head.index("iteration")]) for row in rows]


@pytest.mark.slow
def test_replacement_pod_continues_run(tmp_path):
    first = start(tmp_path, "max_iterations=100000", "log.interval=1", "log.checkpoint_interval=5")
    wait_for("ours/2*/checkpoints/last.pt", tmp_path, first)
    first.send_signal(signal.SIGTERM)  # to the shell process, as Kubernetes does
    assert first.wait(60) == 128 + signal.SIGTERM, first.communicate()[0]
    before = iterations(tmp_path)
    second = start(tmp_path, f"max_iterations={before[-1] + 3}")
    output = second.communicate(timeout=60)[0]
    assert second.returncode == 0, output
    assert iterations(tmp_path)[: len(before)] == before and iterations(tmp_path)[-1] == before[-1] + 3


def test_run_without_checkpoint_starts_from_scratch(tmp_path):
    (tmp_path / "ours" / "2026-01-01_00-00-00" / "checkpoints").mkdir(parents=True)
    variables = {**os.environ, "RUNS": str(tmp_path), "EXPERIMENT": "ours"}
    output = subprocess.run(["sh", SCRIPT, "echo", "train.py"], env=variables, capture_output=True, text=True).stdout
    assert output.split() == ["train.py", "experiment=ours", f"log.dir={tmp_path}"]


def test_script_name_is_no_shell_builtin():
    output = subprocess.run(["bash", "-c", f"type -t {SCRIPT.name}"], capture_output=True, text=True).stdout
    assert output == ""  # Ray runs the command line in a shell
