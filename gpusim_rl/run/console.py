"""Display of a run: live panel on a terminal, else plain lines; all output but the panel also goes to train.log."""

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

PANEL_INTERVAL_S = 0.5  # drawing takes 5 ms of host time
PANEL_WIDTH = 100  # maximum columns
ECHO_WIDTH = 2  # columns right of the panel, where a terminal writes ^C
PROGRESS_INTERVAL_S = {"rich": 2.0, "plain": 10.0, "json": 10.0}  # between progress messages in a long iteration
GAP = 2  # columns between a label, its value and the next label
VALUE_WIDTH = 12  # fixed columns of a value, so that the layout is stable
BAR_WIDTH = 12  # minimum columns of the progress bar next to its text
UNKNOWN = "–"
BARS = "▁▂▃▄▅▆▇█"  # levels of the sparkline, lowest first
STYLES = {"banner": "", "info": "", "notice": "bold", "warning": "bold yellow", "footer": "bold"}
NUMBERS = {  # label: name in the row
    "return (last 100 episodes)": "episode/return",
    "best (middle 90 of 100)": "episode/best_return",  # trimmed; the plain mean may exceed it
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
LINE_NUMBERS = {  # label: name in the row, for plain lines
    "return": "episode/return",
    "length": "episode/length",
    "steps/s": "speed/env_steps_per_s",
    "KL": "policy/kl",
    "value loss": "loss/value",
    "lr": "policy/learning_rate",
}
# Prefixes of metrics that do not come from the algorithm.
GENERAL = ("episode", "eval", "speed", "time", "system", "task", "sim", "reward", "actors", "iteration", "env_steps")


class Console:
    """Display on stdout; in `plain` and `quiet` mode, warnings go to stderr. Text is also appended to the file `log`.

    Modes: values of `log.console` (docs/outputs.md). `plain` shows at most one row per `min_interval_s` seconds.
    """

    def __init__(self, mode: str, total_iterations: int, log: Path | None, *, min_interval_s: float = 2.0) -> None:
        self._out, self._err = _Stream(sys.stdout), _Stream(sys.stderr)
        if mode == "auto":
            mode = "rich" if self._out.isatty() and os.environ.get("TERM") != "dumb" else "plain"
        self.mode, self._total, self._min_interval_s = mode, total_iterations, min_interval_s
        self._log, self._log_failed = log, False
        self._rich = rich.console.Console(file=cast(TextIO, self._out), markup=False, highlight=False)
        self._live: Live | None = None
        self._title = "training"
        self._row: Row = {}
        self._returns: list[float] = []
        self._first_return = 0.0  # iteration of the first return
        self._pace: list[tuple[float, float]] = []  # iteration and time [s] of the first, second and latest row
        self._line_due = self._panel_due = -math.inf  # times on the monotonic clock
        self._line_shown = True  # whether the latest row was shown as a line
        self._progress = ""
        self._changed_at = time.monotonic()  # last change of the display
        self._busy = False  # whether output is in progress
        self._notices: list[str] = []  # deferred

    def start(self, banner: Sequence[tuple[str, str]], title: str = "training") -> None:
        """Show the banner (at most 12 labelled lines), then the panel with this title."""
        self._title = on_one_line(title)
        indent = max((len(label) for label, _ in banner), default=0) + GAP
        lines = [f"{label:<{indent}}{text}" for label, text in banner]
        self._say("banner", *lines, data=dict(banner), hang=indent)
        if self.mode == "rich":
            with self._whole():  # without rich's refresh thread, which would compete with the physics
                self._live = Live(self._panel(), console=self._rich, auto_refresh=False)
                self._live.start(refresh=True)
        self._changed_at = time.monotonic()

    def update(self, row: Row) -> None:
        """Show a row of metrics."""
        now, iteration = time.monotonic(), row["iteration"] or 0
        self._row, self._line_shown = row, False
        if (elapsed_s := row.get("time/elapsed_s")) is not None:
            self._pace = [*self._pace[:2], (iteration, elapsed_s)]
        if (mean := row.get("episode/return")) is not None and math.isfinite(mean):
            self._first_return = self._first_return if self._returns else iteration
            self._returns.append(mean)
        self._progress, self._changed_at = "", now
        if self.mode == "json":
            self._write_json({"event": "row", **finite(row)})
        if now >= self._panel_due or iteration >= self._total:
            self._panel_due = now + PANEL_INTERVAL_S
            self._draw()
        if now >= self._line_due or iteration >= self._total:
            self._line_due = now + self._min_interval_s
            self._show_line()

    def progress(self, text: str) -> None:
        """Show the progress of a long iteration, rate-limited."""
        now = time.monotonic()
        if now - self._changed_at < PROGRESS_INTERVAL_S.get(self.mode, math.inf):
            return
        self._changed_at = now
        if self._live is not None:
            self._progress = text
            self._draw()
        else:
            self.info(text)

    def info(self, *lines: str) -> None:
        """Show lines of text."""
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
        """Show the result of an evaluation: one JSON object in `json` mode, otherwise one line per number."""
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
                    self._rich.line()  # without a terminal, rich leaves the last line unterminated

    def _show_line(self) -> None:
        self._line_shown = True
        numbers = [f"{label} {number(self._row.get(name))}" for label, name in _labels(self._row, LINE_NUMBERS)]
        line = " | ".join([f"iteration {self._row['iteration']:.0f}/{self._total}", *numbers, f"ETA {self._eta}"])
        self.note(line)
        if self.mode == "plain":
            self._write(self._out, on_one_line(line))

    def _say(self, event: str, *lines: str, data: Mapping[str, object] | None = None, hang: int = 0) -> None:
        """Show lines; on a terminal, a nonzero `hang` word-wraps them with that hanging indent [columns]."""
        texts = list(map(on_one_line, lines))  # names and settings may be untrusted
        self.note(*lines)
        if self.mode == "json":
            self._write_json({"event": event, **(data or {"text": "\n".join(lines)})})
        elif self.mode == "rich":
            if hang:
                options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
                options |= {"width": self._rich.width, "subsequent_indent": " " * hang}
                split = [textwrap.wrap(text[hang:], initial_indent=text[:hang], **options) for text in texts]
                texts = [line for lines in split for line in lines]
            shown = Text("\n".join(texts), style=STYLES[event])
            if event == "banner":
                shown.highlight_regex(r"(?m)^\S+", "bold cyan")
            with self._whole():
                self._rich.print(shown, soft_wrap=True)
        elif event in ("warning", "notice") or self.mode == "plain":
            self._write(self._err if event in ("warning", "notice") else self._out, "\n".join(texts))

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
                self._err.write("\n")  # after the terminal's ^C
            self._say("notice", text)

    def note(self, *lines: str) -> None:
        """Append lines to train.log only; warn about the first failed write."""
        if self._log is None:
            return
        try:
            with open_file(self._log, "ab") as file:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S")
                file.write("".join(f"{stamp}  {on_one_line(line)}\n" for line in lines).encode())
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                self.warn(f"cannot write {self._log.name} ({error.strerror}); lines will be missing")

    @property
    def _eta(self) -> str:
        """Estimated remaining time, at the pace since the second row: the first rows include warm-up."""
        if len(self._pace) < 3:
            return UNKNOWN
        _, (first, first_s), (now, now_s) = self._pace
        return _duration((self._total - now) * (now_s - first_s) / (now - first))

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
        labels = [len(label) for label, _ in usual + own]
        two_columns = sum(max(labels[side::2], default=0) + VALUE_WIDTH + 2 for side in (0, 1))
        columns = 2 if two_columns <= inner.max_width else 1
        # Borders, a line above the panel, and two blank lines around the task's own numbers.
        fixed = 5 + len(above) + len(self._rich.render_lines(below, inner)) + math.ceil(len(usual) / columns)
        most = max(0, self._rich.height - fixed) * columns
        shown = own if len(own) <= most else own[: max(0, most - columns)]
        parts: list[RenderableType] = [*above, _table([usual, shown] if shown else [usual], columns)]
        if len(shown) < len(own) and most:
            parts.append(Text(f"and {len(own) - len(shown)} more in metrics.csv", "dim"))
        return Panel(
            Group(*parts, *([Text()] if shown else []), below),
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


class _Stream:
    """Stream that drops its output once the terminal or pipe is gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # None in a daemon
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for characters that the terminal cannot encode

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, method: str, *arguments: str) -> None:
        if self._stream is None:
            return
        try:
            getattr(self._stream, method)(*arguments)
        except RuntimeError:  # a signal during another library's write; train.log has the text
            pass
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # Python's own flush at exit must not fail
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)
            self._stream = None

    def isatty(self) -> bool:
        with suppress(ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()


def _labels(row: Row, usual: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (label, metric) pairs to show; the algorithm's own metrics replace missing standard metrics."""
    known = [(label, name) for label, name in usual.items() if name in row or not row]
    others = [name for name in row if name.partition("/")[0] not in GENERAL and name not in usual.values()]
    others.sort(key=lambda name: name.startswith(("loss/", "policy/")))  # specific metrics first
    return known + [(name, name) for name in others[: len(usual) - len(known)]]


def _table(groups: Sequence[Sequence[tuple[str, str]]], columns: int) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(columns):
        table.add_column(style="dim", overflow="fold")
        table.add_column(min_width=VALUE_WIDTH, no_wrap=True)
    for index, pairs in enumerate(groups):
        if index:
            table.add_row()
        # Names may be untrusted. A minus sign extends into the gap, so that digits align.
        cells = [(Text(on_one_line(label)), f"{'' if value[0] == '-' else ' '}{value}") for label, value in pairs]
        for start in range(0, len(cells), columns):
            table.add_row(*(cell for pair in cells[start : start + columns] for cell in pair))
    return table


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity with None, for JSON."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def number(value: int | float | None, unit: str = "", least: float = 0.0) -> str:
    """Format a number for display, such as `1,234` or `0.123 GB`; magnitudes below `least` become `0`."""
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
