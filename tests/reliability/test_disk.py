"""Full and read-only disks: a small tmpfs in a separate mount namespace."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpusim_rl.files.checkpoint_file import load
from helpers.training import the_run
from reliability.processes import SMALL, TRAIN, Running, Slot, rows, temporary_files, the_error
from reliability.record import record

SIZE = 2 << 20
KIND = "a tmpfs of 2 MiB"


class Disk:
    """Small disk visible only to its slot's commands; `seen` is its path from outside."""

    def __init__(self, folder: Path) -> None:
        self.inside = folder
        folder.mkdir()
        user = [] if os.geteuid() == 0 else ["--map-root-user"]
        mount = f'mount -t tmpfs -o size={SIZE} tmpfs "$0" && exec "$@"'
        self.slot = Slot("unshare", *user, "--mount", "--propagation", "private", "sh", "-c", mount, str(folder))
        pid = self.slot.server.pid
        self.seen = Path(f"/proc/{pid}/root{folder}")
        self._enter = ["nsenter", "-t", str(pid), "--mount", *([] if os.geteuid() == 0 else ["--user"])]
        while self.slot.server.poll() is None and self.seen.stat().st_dev == folder.stat().st_dev:
            time.sleep(0.01)
        if self.slot.server.poll() is not None:
            pytest.skip("mounting a tmpfs is not allowed here")

    def call(self, *words: str | Path) -> None:
        """Run `mount` or `umount` in the disk's namespace; retry while the disk is busy."""
        command, tries = [*self._enter, *map(str, words)], 100
        while subprocess.run(command, check=tries == 1).returncode:
            tries -= 1
            time.sleep(0.02)

    def fill(self, leave: int = 0) -> None:
        """Fill the disk except for `leave` bytes."""
        disk = os.statvfs(self.seen)
        with (self.seen / "filler").open("wb", buffering=0) as file, suppress(OSError):
            for _ in range(max(0, disk.f_bavail * disk.f_frsize - leave) // 4096):
                file.write(b"x" * 4096)

    def make_room(self) -> None:
        """Undo `fill`."""
        (self.seen / "filler").unlink()

    def clear(self) -> None:
        """Delete everything."""
        for path in self.seen.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def start(self, *words: str | Path) -> Running:
        """Start a training on the disk."""
        return self.slot.start(TRAIN, *words, cwd=self.inside)

    @property
    def run(self) -> Path:
        """The only run on the disk, as a path from outside."""
        return the_run(self.seen / "runs")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    one = Disk(tmp_path_factory.mktemp("disk") / "small")
    yield one
    one.slot.close()


@pytest.fixture(autouse=True)
def empty(disk: Disk) -> None:
    disk.clear()


def only_warnings(text: str) -> list[str]:
    """Return the lines after checking that all are warnings."""
    lines = text.splitlines()
    assert all(line.startswith("warning: ") for line in lines), text
    return lines


def assert_clean_stop(training: Running, run: Path) -> None:
    """Stop with SIGTERM; check the checkpoint, the rows and that no temporary files remain."""
    training.send(signal.SIGTERM)
    done = training.ended()
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    only_warnings(done.stderr.replace("stopping after this iteration", "warning: stopping"))
    assert rows(run) == list(range(1, load(run / "checkpoints" / "last.pt")["iteration"] + 1))
    assert temporary_files(run) == []


@pytest.mark.slow
def test_temporarily_full_disk_loses_nothing(disk: Disk) -> None:
    count, chance = 20, random.Random(0)
    training = disk.start(*SMALL, "max_iterations=1000000")
    training.wait_for(lambda: list(disk.seen.glob("runs/*/*-*/checkpoints/last.pt")))
    run, unsaved = disk.run, 0
    for _ in range(count):
        start = len(training.err)
        disk.fill(leave=chance.choice([0, 0, chance.randrange(100_000)]))
        training.wait_for(lambda start=start: len(training.err) > start)
        time.sleep(chance.uniform(0.0, 0.2))
        load(run / "checkpoints" / "last.pt")
        full = rows(run)
        disk.make_room()
        training.wait_for(lambda full=full: len(rows(run)) > len(full) + 3)
        unsaved += training.err[start:].count("checkpoint NOT saved")
    assert unsaved, "the disk was never full at a checkpoint"
    assert_clean_stop(training, run)
    record(
        "Full disk, temporarily",
        f"{KIND} is filled while a training writes to it, with 0 to 100 kB left, and emptied again",
        count,
        f"a warning; training continues and retries {unsaved} checkpoints",
        "nothing",
    )


@pytest.mark.slow
def test_permanently_full_disk_keeps_newest_checkpoint(disk: Disk) -> None:
    count, chance, lost = 10, random.Random(1), []
    for _ in range(count):
        disk.clear()
        training = disk.start(*SMALL, "max_iterations=40")
        wanted = chance.randrange(3, 20)
        training.wait_for(lambda: list(disk.seen.glob("runs/*/*-*/metrics.csv")))
        training.wait_for(lambda wanted=wanted: len(rows(disk.run)) > wanted)
        disk.fill()
        line = the_error(training.ended())
        saved = load(disk.run / "checkpoints" / "last.pt")["iteration"]
        assert f"checkpoint is from iteration {saved}" in line
        lost.append(40 - saved)
        disk.make_room()
        again = disk.start(f"checkpoint={disk.inside / disk.run.relative_to(disk.seen)}", "max_iterations=42").ended()
        assert again.returncode == 0 and again.stderr == "", again.stderr
        assert rows(disk.run) == list(range(1, 43)) and temporary_files(disk.run) == []
    record(
        "Full disk, until the end",
        f"{KIND} is filled after 3 to 20 of 40 iterations and stays full",
        count,
        "training continues to its end; one line names the newest checkpoint, which resumes",
        f"{min(lost)} to {max(lost)} iterations",
    )


@pytest.mark.slow
def test_full_disk_at_start_is_reported_in_one_line(disk: Disk) -> None:
    count, chance = 10, random.Random(2)
    for number in range(count):
        disk.clear()
        leave = 4096 * number + chance.randrange(4096)
        disk.fill(leave)
        line = the_error(disk.start(*SMALL, "max_iterations=4").ended())
        assert "No space" in line or "not be written" in line, line
        shutil.rmtree(disk.seen / "runs", ignore_errors=True)
        disk.make_room()
        assert disk.start(*SMALL, "max_iterations=4").ended().returncode == 0

        resume = f"checkpoint={disk.inside / disk.run.relative_to(disk.seen)}"
        disk.fill(leave)
        line = the_error(disk.start(resume, "max_iterations=6").ended())
        assert "No space" in line or "not be written" in line, line
        assert load(disk.run / "checkpoints" / "last.pt")["iteration"] == 4
        disk.make_room()
        again = disk.start(resume, "max_iterations=6").ended()
        assert again.returncode == 0 and again.stderr == "" and rows(disk.run) == [1, 2, 3, 4, 5, 6], again.stderr
    record(
        "Full disk, at the start",
        f"{KIND} has 0 to {4 * count} kB left when a new run and a resumed run start",
        2 * count,
        "one error line; works once there is room",
        "what could not be saved",
    )


@pytest.mark.slow
def test_read_only_disk_is_reported_and_allows_evaluation(disk: Disk) -> None:
    assert disk.start(*SMALL, "max_iterations=4").ended().returncode == 0
    run = disk.run
    name = disk.inside / run.relative_to(disk.seen)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    disk.call("mount", "-o", "remount,ro", disk.inside)
    try:
        new = the_error(disk.start(*SMALL, "max_iterations=4").ended())
        assert "Try log.dir=" in new
        resumed = the_error(disk.start(f"checkpoint={name}", "max_iterations=8").ended())
        assert "Read-only file system" in resumed
        evaluated = disk.start(f"checkpoint={name}", "test=true").ended()
        (line,) = only_warnings(evaluated.stderr)
        assert evaluated.returncode == 0 and "evaluation.json (" in line
        assert "return_mean" in evaluated.stdout
    finally:
        disk.call("mount", "-o", "remount,rw", disk.inside)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    record(
        "Read-only folder, at the start",
        "a tmpfs is mounted read-only; a new run, a resumed run and an evaluation start on it",
        3,
        "training: one error line; evaluation works with a warning",
        "nothing",
    )


@pytest.mark.slow
def test_read_only_checkpoint_folder_does_not_stop_training(disk: Disk) -> None:
    count = 5
    training = disk.start(*SMALL, "max_iterations=1000000")
    training.wait_for(lambda: list(disk.seen.glob("runs/*/*-*/checkpoints/last.pt")))
    run = disk.run
    folder = disk.inside / run.relative_to(disk.seen) / "checkpoints"
    for _ in range(count):
        start = len(training.err)
        disk.call("mount", "--bind", folder, folder)
        disk.call("mount", "-o", "remount,bind,ro", folder)
        training.wait_for(lambda start=start: "Read-only file system" in training.err[start:])
        disk.call("umount", folder)
        before = load(run / "checkpoints" / "last.pt")["iteration"]
        training.wait_for(lambda before=before: load(run / "checkpoints" / "last.pt")["iteration"] > before)
    assert_clean_stop(training, run)
    record(
        "Read-only folder, while training",
        "the folder of the checkpoints is mounted read-only for a while",
        count,
        "a warning per checkpoint; training continues",
        "nothing",
    )
