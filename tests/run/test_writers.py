"""Tests of writers: complete and exact rows, damaged files, full disks, failing writers."""

import csv
import json
import os
import random
import re
import resource
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.writers import CsvWriter, TensorboardWriter, Writers

ROOT = Path(__file__).parents[2]
ROW = {"env_steps": 64, "episode/return": None, "policy/kl": 0.1 + 0.2}


@contextmanager
def disk_full_after(size: int):
    """Limit files to `size` bytes; writing more raises OSError, like a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(writer: CsvWriter, iterations: range) -> None:
    for iteration in iterations:
        row = {**ROW, "policy/kl": iteration / 3}
        if iteration >= 4:
            row["episode/return"] = iteration * 1e-7
            row["reward/late"] = float(iteration)
        writer.write(iteration, row)


def test_csv_rows_are_flushed_at_once_and_exact(tmp_path):
    writer = CsvWriter(tmp_path / "metrics.csv")
    writer.start({})
    writer.write(1, ROW)
    (row,) = read(tmp_path / "metrics.csv")
    assert row == {"iteration": "1", "env_steps": "64", "episode/return": "", "policy/kl": "0.30000000000000004"}
    writer = CsvWriter(tmp_path / "numpy.csv")
    writer.write(1, {"a": np.float64(0.1), "b": float("nan"), "c": float("inf")})
    assert (tmp_path / "numpy.csv").read_text() == "iteration,a,b,c\n1,0.1,nan,inf\n"


def test_csv_appends_late_columns_at_the_end(tmp_path):
    path = tmp_path / "metrics.csv"
    writer = CsvWriter(path)
    writer.start({})
    writer.write(1, {"b": 1.0, "a": 2.0})
    writer.write(2, {"late": 3.0, "a": 4.0})
    writer.write(3, {"b": 5.0})
    assert path.read_text() == "iteration,b,a,late\n1,1.0,2.0,\n2,,4.0,3.0\n3,5.0,,\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize("checkpoint", [2, 5])
def test_csv_of_resumed_run_equals_uninterrupted_run(tmp_path, checkpoint):
    whole, resumed = CsvWriter(tmp_path / "whole.csv"), CsvWriter(tmp_path / "resumed.csv")
    write_rows(whole, range(1, 9))
    write_rows(resumed, range(1, 7))
    with (tmp_path / "resumed.csv").open("a") as file:
        file.write("7,1.0")  # row cut off by a kill
    resumed = CsvWriter(tmp_path / "resumed.csv", resumed_at=checkpoint)
    resumed.start({})
    assert [int(row["iteration"]) for row in read(tmp_path / "resumed.csv")][-1] == checkpoint
    write_rows(resumed, range(checkpoint + 1, 9))
    resumed.close(0)
    assert (tmp_path / "resumed.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.parametrize("content", [None, "", "iteration,a"])
def test_csv_without_rows_is_restarted(tmp_path, content):
    path = tmp_path / "metrics.csv"
    if content is not None:
        path.write_text(content)
    writer = CsvWriter(path, resumed_at=0)
    writer.start({})
    writer.write(1, {"a": 1.0})
    assert path.read_text() == "iteration,a\n1,1.0\n"


def written(path: Path, rows: int = 8) -> bytes:
    """Write the rows of a run and return the content of the file."""
    write_rows(CsvWriter(path), range(1, rows + 1))
    return path.read_bytes()


def resumed(path: Path, at: int, interval: int = 1) -> tuple[list[int], list[str]]:
    """Resume a file from a checkpoint; return the iterations kept and the warnings."""
    warnings: list[str] = []
    writers = Writers([CsvWriter(path, at, interval=interval, warn=warnings.append)], warnings.append)
    writers.start({})
    writers.write(at + 1, ROW)
    assert all("\n" not in line for line in warnings)
    *kept, last = [int(row["iteration"]) for row in read(path)]
    assert last == at + 1
    return kept, warnings


LOST = "after iteration {} are lost"


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        (b"\n6,64,", b"\n6,6\xff,", 5),
        (b"\n6,64,", b"\n6,64,64,", 5),
        (b"\n6,64,", b"\n96,64,", 5),
        (b"\n6,64,", b"\n4,64,", 5),
        (b"\n6,64,", b"\n6,64" + b"9" * 200_000 + b",", 5),
        (b"\n2,64,", b"\n-2,64,", 1),
        (b"iteration,", b"it\xff,", 0),
        (b"iteration,", b"step,", 0),
        (b"\n", b"\r\n", 8),  # an editor on Windows: no loss
    ],
)
def test_damaged_csv_is_cut_to_last_good_row_and_copied(tmp_path, old, new, kept):
    path = tmp_path / "metrics.csv"
    damaged = written(path).replace(old, new)
    path.write_bytes(damaged)
    numbers, warnings = resumed(path, 8)
    assert numbers == list(range(1, kept + 1))
    backup = tmp_path / "metrics-damaged.csv"
    if kept == 8:
        assert warnings == [] and not backup.exists()
    else:
        (warning,) = warnings
        assert LOST.format(kept) in warning and backup.read_bytes() == damaged


def test_lost_csv_rows_are_reported(tmp_path):
    path = tmp_path / "metrics.csv"
    kept, (warning,) = resumed(path, 9)
    assert kept == [] and LOST.format(0) in warning
    path.write_bytes(written(tmp_path / "other.csv")[:-20])
    kept, (warning,) = resumed(path, 8)
    assert kept == list(range(1, 8)) and LOST.format(7) in warning
    written(path := tmp_path / "lost_power.csv")
    with path.open("ab") as file:
        file.write(b"9,\0\xff\n10,64")  # after the checkpoint
    assert resumed(path, 3) == ([1, 2, 3], [])


@pytest.mark.parametrize(
    ("iterations", "interval", "at", "lost"),
    [((5,), 5, 9, False), ((5,), 5, 10, True), ((5, 10, 15), 1, 19, False), ((5, 10, 15), 1, 25, True)],
)
def test_csv_with_log_interval_reports_only_lost_rows(tmp_path, iterations, interval, at, lost):
    """`log.interval` was 5 and may have changed to 1."""
    writer = CsvWriter(tmp_path / "metrics.csv")
    for iteration in iterations:
        writer.write(iteration, ROW)
    kept, warnings = resumed(tmp_path / "metrics.csv", at, interval=interval)
    assert kept == [*iterations] and len(warnings) == lost


def test_csv_deleted_during_a_run_restarts_with_header(tmp_path):
    path = tmp_path / "metrics.csv"
    writer = CsvWriter(path)
    for iteration, row in ((3, ROW), (4, {**ROW, "late": 1.0})):
        write_rows(writer, range(iteration - 2, iteration))
        path.unlink()
        writer.write(iteration, row)
        assert [row["iteration"] for row in read(path)] == [str(iteration)]


def test_csv_survives_random_damage(tmp_path):
    """Rows before random bytes are kept, and lost rows are reported."""
    path, chance = tmp_path / "metrics.csv", random.Random(0)
    whole = written(path)
    for _ in range(60):
        data = bytearray(whole)
        begin = chance.randrange(len(data))
        junk = bytes(chance.choice((0, 10, 13, 34, 44, 49, 57, 255, chance.randrange(256))) for _ in range(3))
        data[begin : begin + chance.randrange(9)] = junk[: chance.randrange(4)]
        path.write_bytes(data)
        kept, warnings = resumed(path, 8)
        lines_before = whole[:begin].count(b"\n")
        assert kept[: max(0, lines_before - 1)] == list(range(1, max(1, lines_before)))
        assert (kept[-1:] == [8]) == (not warnings), (bytes(data), warnings)
        for backup in tmp_path.glob("*damaged*"):
            backup.unlink()


def test_csv_keeps_rows_in_memory_while_disk_is_full(tmp_path):
    path = tmp_path / "metrics.csv"
    warnings = []
    writers = Writers([CsvWriter(path)], warnings.append)
    writers.start({})
    writers.write(1, ROW)
    size = path.stat().st_size
    with disk_full_after(size + 5):  # room for part of a row
        writers.write(2, ROW)
        writers.write(3, {**ROW, "new": 1.0})
        assert [row["iteration"] for row in read(path)] == ["1"] and path.read_bytes().endswith(b"\n")
        assert len(warnings) == 1 and "kept in memory" in warnings[0]
    writers.write(4, ROW)
    assert [row["iteration"] for row in read(path)] == ["1", "2", "3", "4"]
    assert len(warnings) == 2 and "works again" in warnings[1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.csv"]


def test_resumed_csv_survives_disk_full_at_start(tmp_path):
    path, warnings = tmp_path / "metrics.csv", []
    write_rows(CsvWriter(path), range(1, 7))
    before = path.read_bytes()
    writers = Writers([CsvWriter(path, resumed_at=3)], warnings.append)
    with disk_full_after(20):
        writers.start({})
        writers.write(4, ROW)
    assert path.read_bytes() == before and len(warnings) == 1
    writers.write(5, ROW)
    assert [row["iteration"] for row in read(path)] == ["1", "2", "3", "4", "5"]


def test_csv_close_writes_pending_rows_or_warns(tmp_path):
    for room_again in (True, False):
        path, warnings = tmp_path / f"{room_again}.csv", []
        writers = Writers([CsvWriter(path)], warnings.append)
        writers.write(1, ROW)
        with disk_full_after(10):
            writers.write(2, ROW)
            if not room_again:
                writers.close(0)
        if room_again:
            writers.close(0)
        assert len(read(path)) == 1 + room_again
        assert len(warnings) == 2 and ("INCOMPLETE" in warnings[1]) != room_again


class Recorder:
    """Writer that records its calls and raises `error` if set."""

    failures = (OSError,)
    retries = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []
        self.error: Exception | None = None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.error is not None:
            raise self.error

    def start(self, config):
        self._call("start")

    def write(self, iteration, row):
        self._call(f"write {iteration}")

    def close(self, exit_code):
        self._call(f"close {exit_code}")


def test_failing_writer_is_closed_and_others_continue():
    warnings, bad, good = [], Recorder("bad"), Recorder("good")
    writers = Writers([bad, good], warnings.append)
    writers.start({})
    bad.error = ConnectionResetError("gone")
    for iteration in (1, 2):
        writers.write(iteration, ROW)
    writers.close(0)
    assert bad.calls == ["start", "write 1", "close 1"]
    assert good.calls == ["start", "write 1", "write 2", "close 0"]
    [warning] = warnings
    assert "bad" in warning and "ConnectionResetError: gone" in warning


def test_writer_bug_propagates():
    writer = Recorder("buggy")
    writer.error = KeyError("oops")
    with pytest.raises(KeyError):
        Writers([writer], lambda _: None).write(1, ROW)


def test_tensorboard_of_resumed_run_has_each_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tensorboard"
    for resumed_at, iterations in ((None, range(1, 6)), (3, range(4, 8))):
        writer = TensorboardWriter(folder, resumed_at)
        writer.start({"num_envs": 4})
        for iteration in iterations:
            writer.write(iteration, {**ROW, "policy/kl": float(iteration)})
        writer.close(0)
    events = EventAccumulator(str(folder))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"env_steps", "policy/kl"}
    assert [(e.step, e.value) for e in events.Scalars("policy/kl")] == [(i, float(i)) for i in range(1, 8)]
    assert b"num_envs: 4" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


WANDB_RUN = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
from gpusim_rl.run import writers
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.writers import CsvWriter, WandbWriter, Writers

writers.INIT_TIMEOUT_S = 1.0
run = RunDir(Path(sys.argv[1]))
lines = lambda kind: lambda text: print(kind, text, flush=True)
settings = {"project": "ants", "entity": None, "group": "g", "name": None, "tags": ["a", "b"]}
cfg = SimpleNamespace(**{f"wandb_{name}": value for name, value in settings.items()})
wandb_writer = WandbWriter(cfg, run, "abcd1234", lines("info"))
everything = Writers([wandb_writer, CsvWriter(run.metrics_csv)], lines("warn"))
everything.start({"num_envs": 16, "ppo": {"horizon": 8, "network": {"hidden": [32, 32]}}})
for iteration in map(int, sys.argv[2].split(",")):
    if os.environ.get("KILL_AT") == str(iteration):
        import psutil
        children = psutil.Process().children(recursive=True)
        for child in children:
            child.kill()
        psutil.wait_procs(children)
    row = {"env_steps": 128 * iteration, "policy/kl": iteration / 3, "episode/return": None}
    everything.write(iteration, row)
everything.close(0)
print("done", flush=True)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "Ant", "Ant", config={}, overrides=[])


def run_wandb(run: RunDir, iterations: str = "1,2,3", **environment: str):
    """Run WANDB_RUN next to the run folder with only the given wandb settings."""
    folder = run.path.parents[2]
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    kept |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", WANDB_RUN, str(run.path), iterations],
        cwd=folder,
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
    )


def wandb_records(file: Path):
    """Yield the records of a .wandb file: a LevelDB log of protobufs in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, record = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        if left_in_block < 7:
            position += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record or its last piece
            yield Record.FromString(record)
            record = b""


def values(items) -> dict:
    return {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items}


def test_wandb_offline_run_has_config_metrics_and_system(run_dir):
    done = run_wandb(run_dir)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no output of wandb"
    line, end = done.stdout.splitlines()
    assert end == "done"
    folder = re.fullmatch(
        r"info W&B: offline .*`wandb login`.* wandb sync (runs/Ant/\S+/wandb/offline-run-\S+-abcd1234)", line
    )
    assert folder, line
    offline = run_dir.path.parents[2] / folder.group(1)
    assert run_dir.path in offline.parents and not (run_dir.path.parents[2] / "wandb").exists()

    records = list(wandb_records(offline / "run-abcd1234.wandb"))
    kinds = {record.WhichOneof("record_type") for record in records}
    assert kinds >= {"run", "history", "summary", "exit", "metric"}

    started = next(record.run for record in records if record.HasField("run"))
    config = values(started.config.update)
    assert config["num_envs"] == 16 and config["ppo"]["network"] == {"hidden": [32, 32]}
    assert (started.project, started.run_group, started.run_id) == ("ants", "g", "abcd1234")
    assert list(started.tags) == ["a", "b"] and started.display_name == run_dir.path.name

    history = [values(record.history.item) for record in records if record.HasField("history")]
    assert [(row["_step"], row["env_steps"], row["policy/kl"]) for row in history] == [
        (i, 128 * i, i / 3) for i in (1, 2, 3)
    ]
    assert all("episode/return" not in row for row in history), "missing values are not zero"

    summary: dict = {}
    for record in records:
        if record.HasField("summary"):
            summary |= values(record.summary.update)
    assert (summary["env_steps"], summary["policy/kl"]) == (384, 1.0), "summary has the last values"

    axes = {record.metric.glob_name: record.metric.step_metric for record in records}
    assert axes["*"] == "env_steps"
    assert next(record.exit for record in records if record.HasField("exit")).exit_code == 0


KEY = "0123456789" * 4


@pytest.mark.slow
def test_wandb_goes_offline_if_server_is_silent(run_dir):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        # without this, telemetry waits for the server when Python exits
        quick = {"WANDB_ERROR_REPORTING": "false"}
        done = run_wandb(run_dir, WANDB_API_KEY=KEY, WANDB_BASE_URL=url, **quick)
    assert done.returncode == 0, done.stderr
    assert "info W&B: offline (" in done.stdout and "done" in done.stdout
    assert "warn" not in done.stdout and len(list((run_dir.path / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.slow
def test_wandb_goes_offline_with_malformed_key(run_dir):
    done = run_wandb(run_dir, WANDB_API_KEY="short", WANDB_MODE="online")
    assert done.returncode == 0, done.stderr
    assert "info W&B: offline (" in done.stdout and "40" in done.stdout.splitlines()[0]


def test_wandb_mode_variable_overrides_settings(run_dir):
    done = run_wandb(run_dir, "1", WANDB_MODE="disabled", WANDB_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("info W&B: off (") and not list(run_dir.path.glob("wandb/offline-run-*"))


@pytest.mark.slow
def test_killed_wandb_does_not_end_the_run(run_dir):
    done = run_wandb(run_dir, "1,2,3,4", KILL_AT="3")
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warn")]
    assert len(warnings) == 1 and "Weights & Biases failed" in warnings[0]
    assert done.stdout.endswith("done\n")
    assert [row["iteration"] for row in read(run_dir.metrics_csv)] == ["1", "2", "3", "4"]
    assert "Traceback" not in done.stderr
