"""Where the numbers of a run go: metrics.csv always, Weights & Biases and TensorBoard if asked for.

A writer that fails (full disk, dead network) is reported, and training continues.
"""

from __future__ import annotations

import csv
import hashlib
import io
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import yaml

from gpusim_rl.errors import import_extra
from gpusim_rl.files.safe_open import keep_damaged, open_file, read_bytes, replacing
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.settings.schema import RunConfig

Row = dict[str, int | float | None]
"""Metrics of one log interval by name; None is not known yet."""

MAX_CSV_BYTES = 1 << 30
"""Of metrics.csv; a row of ours has some 500."""
INIT_TIMEOUT_S = 20.0  # for the W&B server to accept a run
FINISH_TIMEOUT_S = 60.0  # for the last data to reach the W&B server
OFFLINE_MODES = ("offline", "dryrun", "disabled")  # modes of W&B that send nothing


class Writer(Protocol):
    """One place that rows go to.

    Attributes:
        name: What messages call it.
        failures: What it raises when the trouble lies outside (disk, network), not in our code.
        retries: After a failure it keeps its rows and writes them with the next one. Else it is
            given up.
    """

    name: str
    failures: tuple[type[Exception], ...]
    retries: bool

    def start(self, config: Mapping[str, Any]) -> None:
        """Get ready; `config` is the whole config, plain values."""
        ...

    def write(self, iteration: int, row: Row) -> None:
        """Take the row of an iteration; iterations only grow."""
        ...

    def summary(self, values: Row) -> None:
        """Take results of the run as a whole."""
        ...

    def close(self, exit_code: int) -> None:
        """Finish; `exit_code` is that of the process."""
        ...


class Writers:
    """All writers of a run as one: what fails in one neither reaches others nor ends the run."""

    def __init__(self, writers: Iterable[Writer], warn: Callable[[str], None]) -> None:
        """Combine writers; `warn` shows one line to the user."""
        self._writers = list(writers)
        self._failing: set[str] = set()
        self._warn = warn

    def start(self, config: Mapping[str, Any]) -> None:
        """Get all writers ready."""
        self._each(lambda writer: writer.start(config))

    def write(self, iteration: int, row: Row) -> None:
        """Write the row of an iteration."""
        self._each(lambda writer: writer.write(iteration, row))

    def summary(self, values: Row) -> None:
        """Note results of the run as a whole."""
        self._each(lambda writer: writer.summary(values))

    def close(self, exit_code: int) -> None:
        """Finish all writers."""
        self._each(lambda writer: writer.close(exit_code))
        for name in self._failing:
            self._warn(f"{name} is INCOMPLETE: its last rows could not be written")
        self._writers.clear()

    def _each(self, call: Callable[[Writer], None]) -> None:
        for writer in list(self._writers):
            try:
                call(writer)
            except writer.failures as error:
                self._failed(writer, error)
            else:
                if writer.name in self._failing:
                    self._failing.discard(writer.name)
                    self._warn(f"{writer.name}: works again, nothing is missing")

    def _failed(self, writer: Writer, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if not writer.retries:
            self._writers.remove(writer)
            self._warn(f"{writer.name} failed ({reason}); training continues WITHOUT it")
            with suppress(*writer.failures):
                writer.close(1)
        elif writer.name not in self._failing:
            self._failing.add(writer.name)
            self._warn(
                f"{writer.name} cannot be written ({reason}); training continues, "
                "its rows are kept in memory and tried again"
            )


@dataclass(frozen=True, slots=True)
class CsvContent:
    """What can be read of a metrics.csv.

    Attributes:
        columns: Their names, `iteration` first; empty where there are none.
        rows: Cells as text, before the first line that is damaged; each has as many as there are columns.
        damaged: Number of that line, the header is 1; None where no line is damaged.
    """

    columns: list[str]
    rows: list[list[str]]
    damaged: int | None

    @property
    def iteration(self) -> int:
        """Iteration of the last row; 0 without rows."""
        return int(self.rows[-1][0]) if self.rows else 0

    def digest(self, of: Mapping[str, Any]) -> str:
        """SHA-256 of the columns and rows that a digest (`CsvWriter.digest`) is about; later ones do not matter."""
        width, last = len(of["columns"]), of["iteration"]
        rows = [row for row in self.rows if int(row[0]) <= last]
        lines = [self.columns[:width], *(row[:width] for row in rows)] if width else []
        late = any(cell for row in rows for cell in row[width:])  # a late column is empty in earlier rows
        return "" if late else hashlib.sha256(_csv_lines(lines)).hexdigest()


def read_csv(path: Path) -> bytes:
    """Content of a metrics.csv, for `parse_csv`.

    Raises:
        ConfigError: It is no regular file, or larger than any of ours.
        OSError: As by `open`.
    """
    return read_bytes(path, MAX_CSV_BYTES)


def parse_csv(data: bytes, columns: Sequence[str] = ()) -> CsvContent:
    """Reads a metrics.csv that may be damaged.

    What follows the last newline is a row that is being written, or is incomplete after a kill: it is left out.

    Args:
        data: Content of the file.
        columns: Names of the first columns, as far as they are known; the header may be damaged.
    """
    first, *lines = [line.removesuffix("\r") for line in data.decode(errors="replace").split("\n")[:-1]] or [""]
    try:
        header = next(csv.reader([first]), [])
    except csv.Error:
        header = []
    names = header if header[: len(columns)] == [*columns] else [*columns]
    if names[:1] != ["iteration"] or len(set(names)) < len(names) or not all(name.isprintable() for name in names):
        return CsvContent([], [], 1 if first else None)
    rows: list[list[str]] = []
    iteration = 0
    for number, line in enumerate(lines, start=2):
        row = line.split(",")
        if len(row) != len(names) or not all(_is_number(cell) for cell in row):
            return CsvContent(names, rows, number)
        if not (row[0].isdecimal() and int(row[0]) > iteration):
            return CsvContent(names, rows, number)
        iteration = int(row[0])
        rows.append(row)
    return CsvContent(names, rows, None)


def _is_number(cell: str) -> bool:
    """Whether a cell is a number, or empty."""
    try:
        float(cell or 0)
    except ValueError:
        return False
    return len(cell) < 100 and cell.isprintable()


class CsvWriter:
    """metrics.csv: one line per row, on disk when `write` returns; two equal runs give equal bytes.

    Columns keep the order in which they first appear; a late one is empty in earlier rows.
    """

    name = "metrics.csv"
    failures: tuple[type[Exception], ...] = (OSError,)
    retries = True

    def __init__(
        self,
        path: Path,
        resumed_at: int | None = None,
        *,
        digest: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Write to `path`.

        Args:
            path: File to write.
            resumed_at: Iteration of the checkpoint that this run continues from. Later rows are
                dropped: the run makes them again. None: the file is new.
            digest: What `digest` returned when the checkpoint was saved; None is not known.
            warn: Shows one line to the user, where the file was damaged, changed or deleted.
        """
        self._path = path
        self._cut_at = resumed_at  # None as soon as it is done
        self._expected = digest  # until then
        self._warn = warn
        self._columns: list[str] = []  # as in the file
        self._iteration = 0  # of the last row in the file
        self._size = 0  # of the file [bytes]
        self._sha256 = hashlib.sha256()  # of the file
        self._waiting: list[dict[str, int | float | None]] = []  # not yet in the file

    def start(self, config: Mapping[str, Any]) -> None:
        """Cut the file of a resumed run back to its checkpoint."""
        if self._cut_at is not None:
            self._flush()

    def write(self, iteration: int, row: Row) -> None:
        """Append a row, with those that could not be written before."""
        first: dict[str, int | float | None] = {"iteration": iteration}
        self._waiting.append(first | {**row, "iteration": iteration})
        self._flush()

    def summary(self, values: Row) -> None:
        """Rows only: there is no place for a summary."""

    def close(self, exit_code: int) -> None:
        """Write what is still waiting."""
        if self._waiting:
            self._flush()

    def digest(self) -> dict[str, Any]:
        """What this writer has put into the file: its columns, the iteration of its last row, and its SHA-256."""
        return {"columns": self._columns, "iteration": self._iteration, "sha256": self._sha256.hexdigest()}

    def _flush(self) -> None:
        known = all(name in self._columns for row in self._waiting for name in row)
        if not (known and self._cut_at is None and self._append(self._lines(self._columns))):
            self._rewrite()
        self._waiting.clear()

    def _append(self, lines: bytes) -> bool:
        """Whether the lines could be appended: the file is as long as this writer has left it."""
        with open_file(self._path, "ab", buffering=0) as file:
            size = file.tell()
            if size != self._size:
                return False
            try:
                rest = memoryview(lines)
                while rest:  # a disk about to be full takes a part, and then raises
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise
        self._note_written(lines)
        return True

    def _rewrite(self) -> None:
        expected = self._expected if self._cut_at is not None else self.digest() if self._columns else None
        old, notice = self._read(expected)
        named = (name for row in self._waiting for name in row)
        columns = list(dict.fromkeys([*(old.columns or ["iteration"]), *named]))
        empty = [""] * (len(columns) - len(old.columns or ["iteration"]))
        text = _csv_lines([columns, *([*row, *empty] for row in old.rows)]) + self._lines(columns)
        with replacing(self._path) as file:
            file.write(text)
        self._columns, self._cut_at = columns, None
        self._size, self._sha256, self._iteration = 0, hashlib.sha256(), old.iteration
        self._note_written(text)
        if notice:
            self._warn(notice)

    def _note_written(self, text: bytes) -> None:
        self._size += len(text)
        self._sha256.update(text)
        if self._waiting:
            self._iteration = int(self._waiting[-1]["iteration"] or 0)

    def _read(self, expected: Mapping[str, Any] | None) -> tuple[CsvContent, str]:
        """What the file holds up to the checkpoint, and what to tell the user if that is not what was written.

        A file of which rows are dropped is kept under another name.
        """
        data = read_csv(self._path) if self._path.exists() else b""
        content = parse_csv(data, expected["columns"] if expected else ())
        if self._cut_at is not None:
            until = self._cut_at
            content = replace(content, rows=[row for row in content.rows if int(row[0]) <= until])
        if expected is None:
            lost = self._cut_at is not None and content.damaged is not None and content.iteration < self._cut_at
        elif content.digest(expected) == expected["sha256"]:
            return content, ""
        elif not data and expected["iteration"]:
            return content, f"metrics.csv is gone or empty: its rows up to iteration {expected['iteration']} are lost"
        else:
            lost = content.iteration < expected["iteration"]
            if not lost:
                return content, "metrics.csv was changed after it was written; the rows that can be read are kept"
        if not lost:
            return content, ""
        kept = f"its rows after iteration {content.iteration} are lost"
        return content, f"metrics.csv is damaged: {kept}. The file as it was is {keep_damaged(self._path)}"

    def _lines(self, columns: Sequence[str]) -> bytes:
        """The waiting rows as text."""
        return _csv_lines([_csv_text(row.get(name)) for name in columns] for row in self._waiting)


class TensorboardWriter:
    """TensorBoard event files."""

    name = "TensorBoard"
    failures: tuple[type[Exception], ...] = (OSError,)
    retries = False

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        """Write to `folder`, made by `start`; `resumed_at` as in CsvWriter."""
        require_tensorboard()
        self._folder = folder
        self._resumed_at = resumed_at

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the event file, and note the config in it."""
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if self._resumed_at is None else self._resumed_at + 1
        self._events = SummaryWriter(str(self._folder), purge_step=purge_step)
        text = yaml.safe_dump(dict(config), sort_keys=False)
        self._events.add_text("config", f"```yaml\n{text}```")

    def write(self, iteration: int, row: Row) -> None:
        """Add a point to every curve."""
        for name, value in row.items():
            if value is not None:
                self._events.add_scalar(name, value, iteration)
        self._events.flush()

    def summary(self, values: Row) -> None:
        """Curves only: the last point of each is its summary."""

    def close(self, exit_code: int) -> None:
        """Close the event file."""
        self._events.close()


class WandbWriter:
    """A run on Weights & Biases.

    Online when there is an API key and the server answers within INIT_TIMEOUT_S; else, or with
    WANDB_MODE=offline, the data go to `<run>/wandb` for a later `wandb sync`. It never prompts.
    """

    name = "Weights & Biases"
    failures: tuple[type[Exception], ...] = (Exception,)  # its client raises exceptions of many private types
    retries = False

    def __init__(self, cfg: RunConfig, run_dir: RunDir, run_id: str, info: Callable[[str], None]) -> None:
        """Prepare; nothing is sent or written before `start`.

        Args:
            cfg: Settings of the run; those that begin with `wandb_` are arguments of `wandb.init`.
            run_dir: Folder where the data go.
            run_id: Identity on the server: a resumed run keeps that of its checkpoint.
            info: Shows one line to the user.
        """
        self._run_dir = run_dir
        self._run: Any = None  # wandb.Run: the library is imported by `start`
        self._info = info
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
        """Open the run, and say where its data are."""
        mode, reason = wandb_mode()
        try:
            self._run = self._open(mode, config)
        except Exception as error:
            if mode in OFFLINE_MODES:
                raise
            mode, reason = "offline", str(error).partition("\n")[0]  # no network, no such entity, a key that is revoked
            _reset_wandb()  # it would hold on to the run's id
            self._run = self._open(mode, config)
        # Curves over env steps: runs with different num_envs or horizon then compare.
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")
        if self._run.disabled:
            self._info(f"W&B: off ({reason})")
        elif self._run.offline:
            # A run has one folder for every time it was started or resumed; they go up together.
            folder = self._run_dir.path / "wandb"
            names = sorted(part.name for part in folder.glob(f"offline-run-*-{self._run.id}"))
            command = ["wandb", "sync", *(f"{self._run_dir}/wandb/{name}" for name in names)]
            self._info(f"W&B: offline ({reason}); upload with: {shlex.join(command)}")
        else:
            self._info(f"W&B: {self._run.url}")

    def write(self, iteration: int, row: Row) -> None:
        """Log a row."""
        known = {name: value for name, value in row.items() if value is not None}
        self._run.log(known, step=iteration)

    def summary(self, values: Row) -> None:
        """Set values in the run's overview."""
        self._run.summary.update(dict(values))

    def close(self, exit_code: int) -> None:
        """Wait for the last data to be sent, for at most FINISH_TIMEOUT_S."""
        if self._run is not None:
            try:
                self._run.finish(exit_code=exit_code)
            except Exception:
                _reset_wandb()  # it would fail again, with a traceback, when Python exits
                raise

    def _open(self, mode: Any, config: Mapping[str, Any]) -> Any:
        import wandb

        settings = wandb.Settings(
            console="off",  # train.log has it; a live panel would be recorded frame by frame
            silent=True,  # our one line has all that matters
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
        )
        return wandb.init(**self._arguments, config=dict(config), mode=mode, settings=settings)


def require_tensorboard() -> None:
    """Raise the one line that says how to install TensorBoard, where it is missing."""
    import_extra("tensorboard", "tensorboard", "log.tensorboard=true")


def wandb_mode() -> tuple[str, str]:
    """Mode that a run with wandb_activate=true takes here, and the reason when it is not online."""
    import wandb
    from wandb.errors import AuthenticationError

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    if settings.mode in OFFLINE_MODES:
        return settings.mode, f"WANDB_MODE={settings.mode}"
    try:
        has_key = wandb.login(prompt=False, verify=False)  # from the environment, wandb's settings, or a netrc file
    except AuthenticationError as error:
        return "offline", str(error).partition("\n")[0]
    return (settings.mode, "") if has_key else ("offline", "no API key; `wandb login` stores one")


def _reset_wandb() -> None:
    """Shut the client down after a failure: what it still tries to do only fails again."""
    import wandb

    with suppress(Exception, SystemExit):  # it exits where its service does not end well
        wandb.teardown(exit_code=1)


def _csv_lines(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _csv_text(value: int | float | None) -> str:
    """A number so that reading gives it back exactly; empty for None."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else repr(float(value))
