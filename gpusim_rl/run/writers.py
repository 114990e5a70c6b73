"""Writers of a run's metrics: metrics.csv, Weights & Biases, TensorBoard."""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from gpusim_rl.errors import ConfigError, first_line
from gpusim_rl.files.budgets import LINE_BYTES, METRICS_BYTES, METRICS_COLUMNS
from gpusim_rl.files.safe_open import keep_damaged, open_file, replacing
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.settings.schema import RunConfig

Row = dict[str, int | float | None]  # metrics of one log interval by name; None is unknown

INIT_TIMEOUT_S = 20.0  # maximum wait for the W&B server to accept a run
FINISH_TIMEOUT_S = 60.0  # maximum wait for the last data to reach the W&B server
OFFLINE_MODES = ("offline", "dryrun", "disabled")  # W&B modes without uploads
CELL = re.compile(r"(-?([0-9]{1,30}(\.[0-9]{1,30})?(e[+-]?[0-9]{1,4})?|inf|nan))?")  # cell of metrics.csv


class Writer(Protocol):
    """Destination of metrics rows."""

    name: str  # name shown in messages
    failures: tuple[type[Exception], ...] = (OSError,)  # exceptions with external causes, such as a full disk
    retries: bool = False  # whether the writer keeps rows after a failure and retries; if not, it is dropped

    def start(self, config: Mapping[str, Any]) -> None:
        """Prepare for a run with this composed config."""

    def write(self, iteration: int, row: Row) -> None:
        """Write the row of an iteration; iterations increase."""

    def show(self, iteration: int, video: Path) -> None:
        """Show a video (mp4) of the policy."""

    def close(self, exit_code: int) -> None:
        """Close the destination, with the exit code of the process."""


class Writers:
    """All writers of a run; a failing writer (full disk, dead network) causes a warning, and training continues."""

    def __init__(self, writers: Iterable[Writer], warn: Callable[[str], None]) -> None:
        self._writers, self._warn = list(writers), warn
        self._failing: set[str] = set()

    def start(self, config: Mapping[str, Any]) -> None:
        """Prepare all writers."""
        self._each(lambda writer: writer.start(config))

    def write(self, iteration: int, row: Row) -> None:
        """Write the row of an iteration."""
        self._each(lambda writer: writer.write(iteration, row))

    def show(self, iteration: int, video: Path) -> None:
        """Pass a video of the policy to all writers; a failure does not affect the rows."""
        for writer in self._writers:
            try:
                writer.show(iteration, video)
            except writer.failures as error:
                self._warn(f"cannot add the video to {writer.name}: {first_line(error)}")

    def close(self, exit_code: int) -> None:
        """Close all writers."""
        self._each(lambda writer: writer.close(exit_code))
        for name in self._failing:
            self._warn(f"{name} is INCOMPLETE: the last rows could not be written")
        self._writers.clear()

    def _each(self, call: Callable[[Writer], None]) -> None:
        for writer in list(self._writers):
            name = writer.name
            try:
                call(writer)
                if name in self._failing:
                    self._failing.discard(name)
                    self._warn(f"{name} works again; no rows are missing")
            except writer.failures as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                if not writer.retries:
                    self._writers.remove(writer)
                    self._warn(f"{name} failed ({reason}); training continues WITHOUT it")
                    with suppress(*writer.failures):
                        writer.close(1)
                elif name not in self._failing:
                    self._failing.add(name)
                    self._warn(f"cannot write {name} ({reason}); rows are kept in memory for a retry")


@dataclass(frozen=True, slots=True)
class CsvContent:
    """Readable part of a metrics.csv. Rows are kept as bytes: parsed cells would take 30 times the memory."""

    columns: list[str]  # `iteration` first; empty if unreadable
    lines: bytearray  # valid rows
    damaged: int | None  # line number of the first damage (1: header)

    def __len__(self) -> int:
        return self.lines.count(b"\n")

    def rows(self) -> Iterator[list[str]]:
        """Yield the cells of each row."""
        begin = 0
        while (end := self.lines.find(b"\n", begin)) >= 0:
            yield self.lines[begin:end].decode(errors="replace").split(",")
            begin = end + 1


def read_csv(path: Path, until: int = sys.maxsize) -> CsvContent:
    """Read a metrics.csv up to the first damaged line or iteration `until`; raise ConfigError above `METRICS_BYTES`."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > METRICS_BYTES:
            raise ConfigError(f"too large for a run's metrics (limit: {METRICS_BYTES} bytes)", key=str(path))
        header, lines, iteration, damaged = file.readline(LINE_BYTES), bytearray(), 0, None
        columns = _columns(header)
        if not columns:
            return CsvContent([], lines, 1 if header.endswith(b"\n") and header.strip() else None)
        for number in itertools.count(2):
            line = file.readline(LINE_BYTES)
            if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                break
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            cells = line.decode(errors="replace").split(",")
            whole = len(cells) == len(columns) and all(map(CELL.fullmatch, cells)) and cells[0].isdecimal()
            if not whole or int(cells[0]) <= iteration:
                damaged = number
                break
            iteration = int(cells[0])
            if iteration > until:
                break
            lines += line + b"\n"
    return CsvContent(columns, lines, damaged)


def _columns(header: bytes) -> list[str]:
    """Return the column names, or an empty list if the header is damaged."""
    try:
        names = next(csv.reader([header.decode(errors="replace").rstrip("\r\n")]), [])
    except csv.Error:
        names = []
    known = names[:1] == ["iteration"] and len(set(names)) == len(names) <= METRICS_COLUMNS
    return names if known and header.endswith(b"\n") and all(map(str.isprintable, names)) else []


class CsvWriter(Writer):
    """Writer of metrics.csv: rows are on disk when `write` returns, and identical runs give identical bytes.

    Columns keep the order of their first appearance; late columns are empty in earlier rows. Rows after `resumed_at`
    are dropped, because the run repeats them.
    """

    name = "metrics.csv"
    retries = True

    def __init__(
        self, path: Path, resumed_at: int = 0, *, interval: int = 1, warn: Callable[[str], None] = lambda _: None
    ) -> None:
        self._path, self._interval, self._warn = path, interval, warn
        self._cut_at: int | None = resumed_at  # None once the file is truncated
        self._columns: list[str] = []  # columns in the file
        self._waiting: list[Row] = []  # rows not yet in the file

    def start(self, config: Mapping[str, Any]) -> None:
        """Truncate the file of a resumed run at the checkpoint's iteration."""
        self._flush()

    def write(self, iteration: int, row: Row) -> None:
        """Append a row, and earlier rows that could not be written."""
        self._waiting.append({"iteration": iteration, **row})
        self._flush()

    def close(self, exit_code: int) -> None:
        """Write pending rows."""
        self._flush()

    def _flush(self) -> None:
        if self._cut_at is not None:
            self._cut(self._cut_at)
            self._cut_at = None
        columns = list(dict.fromkeys(itertools.chain(self._columns, *self._waiting)))
        if self._columns and columns != self._columns and self._path.exists():
            self._widen(columns)
        self._columns = columns
        if self._waiting:
            self._append(_csv_lines([_csv_text(row.get(name)) for name in columns] for row in self._waiting))
        self._waiting.clear()

    def _cut(self, iteration: int) -> None:
        """Drop rows after an iteration or from the first damaged line; keep a copy of the file if rows are lost."""
        there = self._path.exists()
        content = read_csv(self._path, iteration) if there else CsvContent([], bytearray(), None)
        before, last = [0, 0, *(int(row[0]) for row in content.rows())][-2:]
        lost = last <= iteration - max(self._interval, last - before)  # rows may have a different `log.interval`
        kept = f"; {keep_damaged(self._path)} is a copy of the damaged file" if there and lost else ""
        if there:
            with replacing(self._path) as file:
                file.write(_csv_lines([content.columns]) + content.lines if content.columns else b"")
        self._columns = content.columns
        if lost:
            self._warn(f"metrics.csv: rows after iteration {last} are lost{kept}")

    def _widen(self, columns: Sequence[str]) -> None:
        """Add late columns, empty in existing rows."""
        empty = b"," * (len(columns) - len(self._columns)) + b"\n"
        with open_file(self._path) as old, replacing(self._path) as new:
            new.write(_csv_lines([columns]))
            old.readline()
            for line in old:
                new.write(line.rstrip(b"\r\n") + empty)

    def _append(self, lines: bytes) -> None:
        """Append lines, after the header in a new file; on a full disk, undo the partial write."""
        with open_file(self._path, "ab", buffering=0) as file:
            size = file.tell()
            rest = memoryview(lines if size else _csv_lines([self._columns]) + lines)
            try:
                while rest:  # an almost full disk accepts a part, then raises
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise


class TensorboardWriter(Writer):
    """Writer of TensorBoard event files; a resumed run drops the points after `resumed_at`."""

    name = "TensorBoard"

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        self._folder, self._resumed_at = folder, resumed_at

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the event file and store the config in it."""
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if self._resumed_at is None else self._resumed_at + 1
        self._events = SummaryWriter(str(self._folder), purge_step=purge_step)
        self._events.add_text("config", f"```yaml\n{yaml.safe_dump(dict(config), sort_keys=False)}```")

    def write(self, iteration: int, row: Row) -> None:
        """Add a point to every curve."""
        for name, value in row.items():
            if value is not None:
                self._events.add_scalar(name, value, iteration)
        self._events.flush()

    def close(self, exit_code: int) -> None:
        """Close the event file."""
        self._events.close()


class WandbWriter(Writer):
    """Writer to Weights & Biases that never prompts for a login.

    Without an API key or an answer within INIT_TIMEOUT_S, or with WANDB_MODE=offline, data go to `<run>/wandb` for a
    later `wandb sync`. A resumed run keeps its id.
    """

    name = "Weights & Biases"
    failures = (Exception,)  # the client has many private exception types

    def __init__(self, cfg: RunConfig, run_dir: RunDir, run_id: str, info: Callable[[str], None]) -> None:
        self._run_dir, self._info = run_dir, info
        self._run: Any = None  # wandb.Run; `start` imports the library
        self._arguments = {
            "project": cfg.wandb_project,
            "entity": cfg.wandb_entity,
            "group": cfg.wandb_group,
            "name": cfg.wandb_name or run_dir.path.name,
            "tags": list(cfg.wandb_tags),
            "id": run_id,
            "resume": "allow",
            "dir": str(run_dir.path),
        }

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the run and show where its data go."""
        mode, reason = wandb_mode()
        try:
            self._run = self._open(mode, config)
        except Exception as error:
            if mode in OFFLINE_MODES:
                raise
            reason = str(error).partition("\n")[0]  # no network, no such entity, a revoked key
            _reset_wandb()  # frees the run's id
            self._run = self._open("offline", config)
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")  # comparable for any num_envs and horizon
        status = f"off ({reason})" if self._run.disabled else self._run.url
        if self._run.offline and not self._run.disabled:  # one folder per start of the run
            folders = sorted((self._run_dir.path / "wandb").glob(f"offline-run-*-{self._run.id}"))
            command = ["wandb", "sync", *(f"{self._run_dir}/wandb/{folder.name}" for folder in folders)]
            status = f"offline ({reason}); upload with: {shlex.join(command)}"
        self._info(f"W&B: {status}")

    def write(self, iteration: int, row: Row) -> None:
        """Log a row."""
        self._run.log({name: value for name, value in row.items() if value is not None}, step=iteration)

    def show(self, iteration: int, video: Path) -> None:
        """Log the video."""
        import wandb

        self._run.log({"video": wandb.Video(str(video), format="mp4")}, step=iteration)

    def close(self, exit_code: int) -> None:
        """Wait at most FINISH_TIMEOUT_S for the upload."""
        if self._run is not None:
            try:
                self._run.finish(exit_code=exit_code)
            except Exception:
                _reset_wandb()  # else it fails again at exit, with a traceback
                raise

    def _open(self, mode: Any, config: Mapping[str, Any]) -> Any:
        import wandb

        options: dict[str, Any] = {"init_timeout": INIT_TIMEOUT_S, "finish_timeout": FINISH_TIMEOUT_S}
        settings = wandb.Settings(console="off", silent=True, **options)  # else wandb would record every panel frame
        return wandb.init(**self._arguments, config=dict(config), mode=mode, settings=settings)


def wandb_mode() -> tuple[str, str]:
    """Return the W&B mode that applies here, and the reason if it is not online."""
    import wandb
    from wandb.errors import AuthenticationError

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if settings.mode in OFFLINE_MODES:
        return settings.mode, f"WANDB_MODE={settings.mode}"
    try:
        has_key = wandb.login(prompt=False, verify=False)  # from environment, settings or netrc
    except AuthenticationError as error:
        return "offline", str(error).partition("\n")[0]
    return (settings.mode, "") if has_key else ("offline", "no API key; run `wandb login` to store one")


def _reset_wandb() -> None:
    """Shut the client down after a failure, so that it does not fail again at exit."""
    import wandb

    with suppress(Exception, SystemExit):  # wandb exits the process if its service fails
        wandb.teardown(exit_code=1)


def _csv_lines(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _csv_text(value: int | float | None) -> str:
    """Format a number so that parsing restores it exactly; None is empty."""
    return "" if value is None else str(value) if isinstance(value, int) else repr(float(value))
