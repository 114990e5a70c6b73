"""Display of a run: live panel on a terminal, plain lines elsewhere; all but the panel also goes to train.log."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO, cast

import rich.console
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpusim_rl.errors import on_one_line
from gpusim_rl.files.safe_open import open_file
from gpusim_rl.run.phases import PHASES
from gpusim_rl.run.writers import Row

PANEL_INTERVAL_S = 0.5  # drawing takes 5 ms of the host
PANEL_WIDTH = 100  # columns at most
ECHO_WIDTH = 2  # columns right of the panel, where a terminal writes ^C
PROGRESS_INTERVAL_S = {"rich": 2.0, "plain": 10.0, "json": 10.0}  # between two signs of life in a long iteration
GAP = 2  # columns between a label, its value and the next label
VALUE_WIDTH = 12  # fixed columns of a value, so that the layout is stable
BAR_WIDTH = 12  # minimum columns of the progress bar next to its text
UNKNOWN = "–"
BARS = "▁▂▃▄▅▆▇█"  # of the sparkline, the lowest first
STYLES = {"banner": "", "info": "", "notice": "bold", "warning": "bold yellow", "footer": "bold"}
NUMBERS = {  # label: name in the row
    "return (last 100 episodes)": "episode/return",
    "best (middle 90 of 100)": "episode/best_return",  # the mean of some episodes more is often above it
    "episode length": "episode/length",
    "steps/s": "speed/env_steps_per_s",
    "KL": "policy/kl",
    "simulator steps/s": "speed/sim_steps_per_s",
    "value loss": "loss/value",
    "env steps": "env_steps",
    "learning rate": "policy/learning_rate",
    "action std": "policy/std",
    "entropy": "policy/entropy",
    "elapsed": "time/elapsed_s",
}
MACHINE = (("CPU", "cpu_percent", "memory_gb"), ("GPU", "gpu_percent", "gpu_memory_gb"))
LINE_NUMBERS = {  # the same for plain lines
    "return": "episode/return",
    "length": "episode/length",
    "steps/s": "speed/env_steps_per_s",
    "KL": "policy/kl",
    "value loss": "loss/value",
    "lr": "policy/learning_rate",
}
# Groups of numbers that do not come from the algorithm.
GENERAL = ("episode", "eval", "speed", "time", "system", "task", "sim", "reward", "actors", "iteration", "env_steps")


class Console:
    """Display on stdout, with warnings of `plain` and `quiet` on stderr; text is also appended to the file `log`.

    Modes: `rich` (live panel), `plain` (a row per `min_interval_s` seconds), `json` (an object per line), `quiet`
    (warnings only), `auto` (`rich` on a terminal, else `plain`).
    """

    def __init__(self, mode: str, total_iterations: int, log: Path | None, *, min_interval_s: float = 2.0) -> None:
        self._out, self._err = _Stream(sys.stdout), _Stream(sys.stderr)
        if mode == "auto":
            mode = "rich" if self._out.isatty() and os.environ.get("TERM") != "dumb" else "plain"
        self.mode = mode
        self._total = total_iterations
        self._log = log
        self._log_failed = False
        self._min_interval_s = min_interval_s
        self._rich = rich.console.Console(file=cast(TextIO, self._out), markup=False, highlight=False)
        self._live: Live | None = None
        self._title = "training"
        self._row: Row = {}
        self._returns: list[float] = []
        self._first_return = 0.0  # iteration of the first of them
        self._line_due = self._panel_due = -math.inf  # times on the monotonic clock
        self._line_shown = True  # the latest row is among the lines
        self._eta = _Eta(total_iterations)
        self._progress = ""  # where the iteration under way is, if it takes long
        self._alive_at = time.monotonic()  # when the display last changed
        self._busy = False  # something is being shown
        self._notices: list[str] = []  # that came meanwhile

    def start(self, banner: Sequence[tuple[str, str]], title: str = "training") -> None:
        """Show the banner (labels and texts, at most 12 lines), then the panel with this title."""
        self._title = on_one_line(title)
        indent = max((len(label) for label, _ in banner), default=0) + GAP
        lines = [f"{label:<{indent}}{text}" for label, text in banner]
        self._say("banner", *lines, data=dict(banner), hang=indent)
        if self.mode == "rich":
            with self._whole():  # no thread that redraws: it would compete with the physics for the interpreter
                self._live = Live(self._panel(), console=self._rich, auto_refresh=False)
                self._live.start(refresh=True)
        self._alive_at = time.monotonic()

    def update(self, row: Row) -> None:
        """Show a row of metrics."""
        now, last = time.monotonic(), (row["iteration"] or 0) >= self._total
        self._row, self._line_shown = row, False
        self._eta.update(row)
        if (mean := row.get("episode/return")) is not None and math.isfinite(mean):
            self._first_return = self._first_return if self._returns else row["iteration"] or 0.0
            self._returns.append(mean)
        self._progress, self._alive_at = "", now
        if self.mode == "json":
            self._write_json({"event": "row", **finite(row)})
        if now >= self._panel_due or last:
            self._panel_due = now + PANEL_INTERVAL_S
            self._draw()
        if now >= self._line_due or last:
            self._line_due = now + self._min_interval_s
            self._show_line()

    def progress(self, text: str) -> None:
        """Show the progress of a long iteration, rate-limited."""
        now = time.monotonic()
        if now - self._alive_at < PROGRESS_INTERVAL_S.get(self.mode, math.inf):
            return
        self._alive_at = now
        if self._live is not None:
            self._progress = text
            self._draw()
        else:
            self.info(text)

    def info(self, *lines: str) -> None:
        """Show lines."""
        self._say("info", *lines)

    def warn(self, text: str) -> None:
        """Show a warning in every mode."""
        self._say("warning", f"warning: {text}", data={"text": text})

    def notice(self, text: str) -> None:
        """Show a line from a signal handler, deferred until any output in progress is complete."""
        self._notices.append(text)
        if not self._busy:
            self._show_notices()

    def result(self, result: Mapping[str, float | str]) -> None:
        """Show the result of an evaluation: one JSON object in `json`, else a line per number."""
        if self.mode == "json":
            self._write_json({"event": "evaluation", **finite(result)})
            return
        width = max(map(len, result))
        for name, value in finite(result).items():
            shown = UNKNOWN if value is None else f"{value:.6g}" if isinstance(value, float) else value
            self.info(f"{name:<{width}}  {shown}")

    def footer(self, commands: Sequence[str]) -> None:
        """Close the display and show follow-up commands."""
        self.close()
        self._say("footer", "next:", *(f"  {command}" for command in commands), data={"commands": list(commands)})

    def close(self) -> None:
        """Close the panel; idempotent."""
        if not self._line_shown:
            self._show_line()
        if self._live is not None:
            with self._whole():
                self._progress = ""
                self._live.update(self._panel())
                self._live.stop()
                self._live = None
                if not self._rich.is_terminal:
                    self._rich.line()  # rich leaves it open there

    def _show_line(self) -> None:
        self._line_shown = True
        row = self._row
        numbers = [f"{label} {number(row.get(name))}" for label, name in _labels(row, LINE_NUMBERS)]
        line = " | ".join([f"iteration {row['iteration']:.0f}/{self._total}", *numbers, f"ETA {self._eta}"])
        self.note(line)
        if self.mode == "plain":
            self._write(self._out, on_one_line(line))

    def _say(self, event: str, *lines: str, data: Mapping[str, object] | None = None, hang: int = 0) -> None:
        """Show lines; on a terminal, `hang` wraps them at words with a hanging indent of as many columns."""
        data = data or {"text": "\n".join(lines)}
        text = "\n".join(map(on_one_line, lines))  # they may hold names and settings of a folder from a stranger
        self.note(*lines)
        if self.mode == "json":
            self._write_json({"event": event, **data})
        elif self.mode == "rich":
            if hang:
                text = "\n".join(_wrapped(line, self._rich.width, hang) for line in text.split("\n"))
            shown = Text(text, style=STYLES[event])
            if event == "banner":
                shown.highlight_regex(r"(?m)^\S+", "bold cyan")
            with self._whole():
                self._rich.print(shown, soft_wrap=True)
        elif event in ("warning", "notice"):
            self._write(self._err, text)
        elif self.mode == "plain":
            self._write(self._out, text)

    def _draw(self) -> None:
        if self._live is not None:
            with self._whole():
                self._live.update(self._panel(), refresh=True)

    def _write(self, stream: _Stream, line: str) -> None:
        with self._whole():
            stream.write(f"{line}\n")
            stream.flush()

    def _write_json(self, data: Mapping[str, object]) -> None:
        self._write(self._out, json.dumps(data))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Defer notices until the block has finished printing."""
        outer, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = outer
            if not outer:
                self._show_notices()

    def _show_notices(self) -> None:
        while self._notices:
            text = self._notices.pop(0)
            if self.mode != "rich" and self._err.isatty():
                self._err.write("\n")  # the line has a ^C already
            self._say("notice", text)

    def note(self, *lines: str) -> None:
        """Append to train.log only; report a failed write once."""
        if self._log is None:
            return
        try:
            with open_file(self._log, "ab") as file:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                file.write("".join(f"{stamp}  {on_one_line(line)}\n" for line in lines).encode())
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                self.warn(f"{self._log.name} cannot be written ({error.strerror}); it has gaps")

    def _panel(self) -> Panel:
        row, options = self._row, self._rich.options
        width = max(1, min(PANEL_WIDTH, options.max_width - ECHO_WIDTH))
        inner = options.update_width(max(1, width - 4))  # border and padding
        usual = [
            (label, _duration(row.get(name)) if label == "elapsed" else number(row.get(name)))
            for label, name in _labels(row, NUMBERS)
        ]
        terms = sorted((name for name in row if name.startswith("reward/")), key=lambda name: -abs(row[name] or 0.0))
        own = [(name, number(row[name])) for name in (*(name for name in row if name.startswith("task/")), *terms)]
        above, below = [*self._head(inner.max_width), *self._sparkline(inner.max_width)], self._below()
        taken = len(above) + len(self._rich.render_lines(below, inner)) + 3  # borders, and a line above the panel
        labels = [len(label) for label, _ in usual + own]
        wide = sum(max(labels[side::2], default=0) + VALUE_WIDTH + 2 for side in (0, 1))
        columns = 2 if wide <= inner.max_width else 1
        free = self._rich.height - taken - math.ceil(len(usual) / columns)
        fits = max(0, free) * columns
        shown = own if len(own) <= fits else own[: max(0, fits - columns)]
        spaced = bool(own) and len(shown) == len(own) and math.ceil(len(own) / columns) + 2 <= free
        table = _table(usual, columns)
        if spaced:
            table.add_row()
        _add_pairs(table, shown, columns)
        more = len(own) - len(shown) if free > 0 else 0
        left_out = [Text(f"and {more} more in metrics.csv", "dim")] if more else []
        return Panel(
            Group(*above, table, *left_out, *([Text()] if spaced else []), below),
            title=Text(self._title),
            subtitle=Text(on_one_line(self._progress)) if self._progress else None,
            width=width,
        )

    def _below(self) -> Table:
        row = self._row
        phases = [f"{phase} {_percent(row.get(f'time/{phase}'), 100)}" for phase in PHASES if f"time/{phase}" in row]
        machine = [
            f"{label} {_percent(row.get(f'system/{load}'))}, memory {number(row.get(f'system/{memory}'), ' GB')}"
            for label, load, memory in MACHINE
            if label == "CPU" or row.get(f"system/{memory}") is not None
        ]
        table = Table.grid(padding=(0, GAP, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        for label, items in (("time", phases), ("machine", machine)):
            table.add_row(label, Columns([*(f"{item} ·" for item in items[:-1]), *items[-1:]]))
        return table

    def _sparkline(self, width: int) -> list[Text]:
        low, high = min(self._returns, default=0.0), max(self._returns, default=0.0)
        words = f"{number(low)} to {number(high)}"
        if self._first_return > 1:
            words += f" since iteration {number(self._first_return)}"
        label = f"{'return':<{len('machine') + GAP}}"
        bars = min(len(self._returns), width - len(label) - GAP - len(words))
        if bars < BAR_WIDTH or not self._out.encoding.lower().startswith("utf"):
            return []
        ends = [len(self._returns) * bar // bars for bar in range(bars + 1)]
        means = [sum(self._returns[begin:end]) / (end - begin) for begin, end in pairwise(ends)]
        scale = (len(BARS) - 1) / ((high - low) or 1.0)
        line = "".join(BARS[round(scale * (mean - low))] for mean in means)
        return [Text.assemble((label, "dim"), (line, "green"), " " * GAP, words)]

    def _head(self, width: int) -> list[RenderableType]:
        done = self._row.get("iteration")
        words = (f"iteration {number(done)}/{self._total}", f"ETA {self._eta}")
        styles: dict[str, Any] = {"style": "bright_black", "complete_style": "green", "finished_style": "green"}
        bar = ProgressBar(total=max(1, self._total), completed=done or 0, **styles)
        head = Table.grid(expand=True, padding=(0, GAP))
        head.add_column(ratio=1)
        if width < BAR_WIDTH + sum(GAP + len(text) for text in words):
            head.add_row(bar)
            return [head, Text((" " * GAP).join(words))]
        head.add_row(bar, *words)
        return [head]


class _Eta:
    """Time to the last iteration, at the pace since the second row (the first ones warm up)."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._rows: list[tuple[float, float]] = []  # iteration and time [s] of the second one, and of the newest

    def update(self, row: Row) -> None:
        if (elapsed_s := row.get("time/elapsed_s")) is not None:
            self._rows = [*self._rows[:2], (row["iteration"] or 0.0, elapsed_s)]

    def __str__(self) -> str:
        if len(self._rows) < 3 or self._rows[2][0] <= self._rows[1][0]:
            return UNKNOWN
        _, (warm, warm_s), (now, now_s) = self._rows
        return _duration(max(0.0, (self._total - now) * (now_s - warm_s) / (now - warm)))


class _Stream:
    """Stream that drops its output once the terminal or pipe is gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # a file, its stand-in, or None in a daemon
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show every sign

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, method: str, *arguments: str) -> None:
        if self._stream is not None:
            try:
                getattr(self._stream, method)(*arguments)
            except (OSError, ValueError):
                with suppress(OSError, ValueError):  # Python's own flush at exit goes nowhere
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self.fileno())
                    os.close(nowhere)
                self._stream = None
            except RuntimeError:  # a signal came while another library was writing; train.log has the text
                pass

    def isatty(self) -> bool:
        with suppress(ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()


def _labels(row: Row, usual: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return labels and names to show; the algorithm's own numbers replace standard ones that it lacks."""
    known = [(label, name) for label, name in usual.items() if name in row or not row]
    others = [name for name in row if name.partition("/")[0] not in GENERAL and name not in usual.values()]
    others.sort(key=lambda name: name.startswith(("loss/", "policy/")))  # numbers of this algorithm alone come first
    return known + [(name, name) for name in others[: len(usual) - len(known)]]


def _table(pairs: Sequence[tuple[str, str]], columns: int) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(columns):
        table.add_column(style="dim", overflow="fold")
        table.add_column(min_width=VALUE_WIDTH, no_wrap=True)
    _add_pairs(table, pairs, columns)
    return table


def _add_pairs(table: Table, pairs: Sequence[tuple[str, str]], columns: int) -> None:
    # Names may be a stranger's. A minus hangs in the gap, so that digits stand below each other.
    cells = [(Text(on_one_line(label)), f"{'' if value[0] == '-' else ' '}{value}") for label, value in pairs]
    for start in range(0, len(cells), columns):
        table.add_row(*(cell for pair in cells[start : start + columns] for cell in pair))


def _wrapped(line: str, width: int, hang: int) -> str:
    """Wrap a line at words with a hanging indent."""
    if len(line) <= width:
        return line
    text = textwrap.wrap(line[hang:], max(1, width - hang), break_long_words=False, break_on_hyphens=False)
    return line[:hang] + ("\n" + " " * hang).join(text)


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity by None, for JSON."""
    odd = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: None if name in odd else value for name, value in values.items()}


def number(value: int | float | None, unit: str = "", least: float = 0.0) -> str:
    """Format a number for people, such as `1,234` or `0.123 GB`; below `least` in magnitude it is `0`."""
    if value is None:
        return UNKNOWN
    return (f"{value:,.0f}" if abs(value) >= 1000 else "0" if abs(value) < least else f"{value:.3g}") + unit


def _percent(value: int | float | None, scale: int = 1) -> str:
    return UNKNOWN if value is None else f"{value * scale:.0f} %"


def _duration(seconds: int | float | None) -> str:
    if seconds is None:
        return UNKNOWN
    minutes, seconds = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
