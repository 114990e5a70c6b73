"""The folder of a Ray cluster of ours: who deletes it, and when."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpusim_rl.distributed import ray_cluster
from helpers.commands import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes by their command line")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short name: Ray makes sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="r"))
    yield folder
    shutil.rmtree(folder)


def left(temporary: Path, name: str = "left") -> Path:
    """A folder as a killed process has left it."""
    folder = temporary / f"{ray_cluster.PREFIX}{name}"
    folder.mkdir()
    (folder / "owner").touch()
    (folder / "session").mkdir()
    (folder / "session" / "log").write_text("x")
    return folder


def test_a_folder_of_a_process_that_was_killed_is_deleted(temporary: Path) -> None:
    old = left(temporary)
    with ray_cluster._folder() as new:
        assert not old.exists() and Path(new).is_dir()
    assert [*temporary.iterdir()] == []


def test_a_folder_in_use_stays(temporary: Path) -> None:
    with ray_cluster._folder() as first:
        with ray_cluster._folder() as second:
            assert Path(first).is_dir() and first != second
        assert Path(first).is_dir()


def test_a_folder_in_which_ray_still_works_stays(temporary: Path) -> None:
    old = left(temporary)
    command = [sys.executable, "-c", "input()", f"--session-dir={old}/session"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        with ray_cluster._folder():
            assert (old / "session" / "log").exists()
        process.communicate(b"\n")
    with ray_cluster._folder():
        assert not old.exists()


def test_what_is_not_ours_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unmarked = left(temporary, "unmarked")
    (unmarked / "owner").unlink()
    linked = left(temporary, "linked")
    (linked / "owner").unlink()
    (linked / "owner").symlink_to("/dev/null")
    elsewhere = temporary / "elsewhere"
    left(temporary, "moved").rename(elsewhere)
    (temporary / f"{ray_cluster.PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{ray_cluster.PREFIX}file").touch()
    with ray_cluster._folder():
        pass
    assert all((folder / "session" / "log").exists() for folder in (unmarked, linked, elsewhere))
    strangers = left(temporary, "strangers")
    monkeypatch.setattr(os, "getuid", lambda: strangers.stat().st_uid + 1)
    with ray_cluster._folder():
        assert (strangers / "session" / "log").exists()


def test_links_in_it_are_not_followed(temporary: Path) -> None:
    (temporary / "mine").mkdir()
    (temporary / "mine" / "thesis").touch()
    (left(temporary) / "session" / "link").symlink_to(temporary / "mine")
    with ray_cluster._folder():
        pass
    assert [path.name for path in temporary.rglob("*")] == ["mine", "thesis"]


def in_use(folder: Path) -> bool:
    return any(str(folder) in name for name in ray_cluster._names_in_use())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_learner_that_is_killed_leaves_its_folder_to_the_next_one(short_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = ["task=Cartpole", "algo=impala", "actors=ray", "num_actors=1", "num_envs=4", "impala.network.hidden=[16]"]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    variables = {**os.environ, "TMPDIR": str(short_folder)}

    def start(*more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, *more], cwd=tmp_path, env=variables)

    process = start("max_iterations=1000000")
    end = time.monotonic() + 120
    while not [*tmp_path.glob("runs/*/*/metrics.csv")]:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    [folder] = short_folder.glob("gpusim-rl-ray-*")
    assert in_use(folder)
    agents = [it for it in below if it.is_running() and it.name() in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")]
    psutil.wait_procs([it for it in below if it not in agents], timeout=60)
    assert agents and in_use(folder), "their command lines do not tell"
    _, alive = psutil.wait_procs(agents, timeout=120)
    assert alive == [] and not in_use(folder)
    assert start("max_iterations=2").wait(120) == 0
    assert not folder.exists() and not [*short_folder.glob("gpusim-rl-ray-*")]
