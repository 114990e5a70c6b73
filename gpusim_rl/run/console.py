"""What a run shows while it trains: a live panel on a terminal, plain lines elsewhere.

Everything but the panel is also written to train.log. A terminal or pipe that goes away ends the
display, not the run.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

import rich.console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpusim_rl.run.phases import PHASES
from gpusim_rl.run.writers import Row

PANEL_INTERVAL_S = 0.25
PANEL_WIDTH = 100  # columns at most
UNKNOWN = "–"
STYLES = {"banner": "", "info": "", "warning": "bold yellow", "footer": "bold"}
NUMBERS = {  # label: name in the row
    "return (last 100 episodes)": "episode/return",
    "best return": "episode/best_return",
    "episode length": "episode/length",
    "steps/s": "speed/env_steps_per_s",
    "KL": "policy/kl",
    "simulator steps/s": "speed/sim_steps_per_s",
    "value loss": "loss/value",
    "env steps": "env_steps",
    "learning rate": "policy/learning_rate",
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
OF_EVERY_RUN = ("episode", "speed", "time", "system", "task", "sim", "reward", "iteration", "env_steps")
"""Groups of numbers that are not the algorithm's."""


class Console:
    """The screen of a run.

    Attributes:
        mode: `rich` (live panel), `plain` (lines), `json` (an object per line) or `quiet`
            (warnings only).
    """

    def __init__(
        self,
        mode: str,
        total_iterations: int,
        log: Path | None,
        *,
        min_interval_s: float = 2.0,
    ) -> None:
        """Write to stdout, and warnings of `plain` and `quiet` to stderr.

        Args:
            mode: One of the modes; `auto` is `rich` on a terminal and `plain` elsewhere.
            total_iterations: Iteration at which the run will be complete.
            log: File that gets the text too, appended; None for none.
            min_interval_s: Plain lines of rows are at least this far apart, but for first and last.
        """
        self._out, self._err = _Stream(sys.stdout), _Stream(sys.stderr)
        if mode == "auto":
            able = self._out.isatty() and os.environ.get("TERM") != "dumb"
            mode = "rich" if able else "plain"
        self.mode = mode
        self._total = total_iterations
        self._log = log
        self._log_failed = False
        self._min_interval_s = min_interval_s
        file = cast(TextIO, self._out)
        self._rich = rich.console.Console(file=file, markup=False, highlight=False)
        self._live: Live | None = None
        self._row: Row = {}
        self._line_due = self._panel_due = -math.inf  # times on the monotonic clock
        self._line_shown = True  # the latest row is among the lines
        self._eta = _Eta(total_iterations)

    def start(self, banner: Sequence[tuple[str, str]]) -> None:
        """Show what the run is, as label and text, at most 12 lines; then the panel."""
        assert len(banner) <= 12, "a banner is read only while it is short"
        width = max((len(label) for label, _ in banner), default=0)
        lines = [f"{label:<{width}}  {text}" for label, text in banner]
        self._say("banner", "\n".join(lines), dict(banner))
        if self.mode == "rich":
            # No thread that redraws: it would compete with the physics for the interpreter.
            self._live = Live(self._panel(), console=self._rich, auto_refresh=False)
            self._live.start(refresh=True)

    def update(self, row: Row) -> None:
        """Show a row of metrics; `iteration` is in it."""
        now, last = time.monotonic(), (row["iteration"] or 0) >= self._total
        self._row, self._line_shown = row, False
        self._eta.update(row)
        if self.mode == "json":
            finite = {name: value if _is_finite(value) else None for name, value in row.items()}
            self._write_json({"event": "row", **finite})
        if self._live is not None and (now >= self._panel_due or last):
            self._panel_due = now + PANEL_INTERVAL_S
            self._live.update(self._panel(), refresh=True)
        if now >= self._line_due or last:
            self._line_due = now + self._min_interval_s
            self._show_line()

    def info(self, text: str) -> None:
        """Show a line."""
        self._say("info", text, {"text": text})

    def warn(self, text: str) -> None:
        """Show a line that must not be missed, in every mode."""
        self._say("warning", f"warning: {text}", {"text": text})

    def note(self, text: str) -> None:
        """Write a line to train.log only."""
        self._record(text)

    def footer(self, commands: Sequence[str]) -> None:
        """End the display of rows and show what can be done with the run now."""
        self._stop_rows()
        text = "\n".join(["next:", *(f"  {command}" for command in commands)])
        self._say("footer", text, {"commands": list(commands)})

    def close(self) -> None:
        """End the display; a second call does nothing."""
        self._stop_rows()

    def _stop_rows(self) -> None:
        if not self._line_shown:
            self._show_line()
        if self._live is not None:
            self._live.update(self._panel())
            self._live.stop()
            self._live = None
            if not self._rich.is_terminal:
                self._rich.line()  # rich leaves it open there

    def _show_line(self) -> None:
        self._line_shown = True
        line = self._line()
        self._record(line)
        if self.mode == "plain":
            self._out.write(f"{line}\n")
            self._out.flush()

    def _say(self, event: str, text: str, data: Mapping[str, object]) -> None:
        self._record(text)
        if self.mode == "json":
            self._write_json({"event": event, **data})
        elif self.mode == "rich":
            shown = Text(text, style=STYLES[event])
            if event == "banner":
                shown.highlight_regex(r"(?m)^\S+", "bold cyan")
            self._rich.print(shown, soft_wrap=True)
        elif self.mode == "plain" or event == "warning":
            stream = self._err if event == "warning" else self._out
            stream.write(f"{text}\n")
            stream.flush()

    def _write_json(self, data: Mapping[str, object]) -> None:
        self._out.write(json.dumps(data) + "\n")
        self._out.flush()

    def _record(self, text: str) -> None:
        """Append to train.log; a full disk is reported once and the next text tried again."""
        if self._log is None:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            with self._log.open("a", encoding="utf-8") as file:
                file.writelines(f"{stamp}  {line}\n" for line in text.splitlines())
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                self.warn(f"{self._log.name} cannot be written ({error.strerror}); it has gaps")

    def _line(self) -> str:
        row = self._row
        numbers = [f"{label} {_number(row.get(name))}" for label, name in _labels(row, LINE_NUMBERS)]
        return " | ".join([f"iteration {row['iteration']:.0f}/{self._total}", *numbers, f"ETA {self._eta}"])

    def _panel(self) -> Panel:
        row, total = self._row, self._total
        done = row.get("iteration")
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column(ratio=1)
        head.add_row(
            ProgressBar(total=max(1, total), completed=done or 0),
            f"iteration {_number(done)}/{total}",
            f"ETA {self._eta}",
        )
        numbers = Table.grid(expand=True, padding=(0, 2))
        for _ in range(2):
            numbers.add_column(style="dim", no_wrap=True)
            numbers.add_column(ratio=1, no_wrap=True)
        cells = [
            text
            for label, name in _labels(row, NUMBERS)
            for text in (label, (_duration if label == "elapsed" else _number)(row.get(name)))
        ]
        for start in range(0, len(cells), 4):
            numbers.add_row(*cells[start : start + 4])
        body = Table.grid(expand=True)
        body.add_row(head)
        body.add_row(numbers)
        body.add_row(
            Text.assemble(
                ("time     ", "dim"),
                " · ".join(
                    f"{phase} {_percent(row.get(f'time/{phase}'), 100)}" for phase in PHASES if f"time/{phase}" in row
                ),
            )
        )
        body.add_row(
            Text.assemble(
                ("machine  ", "dim"),
                " · ".join(
                    f"{label} {_percent(row.get(f'system/{load}'))}, memory {_gigabytes(row.get(f'system/{memory}'))}"
                    for label, load, memory in MACHINE
                ),
            )
        )
        return Panel(body, title="training", width=min(PANEL_WIDTH, self._rich.width))


class _Eta:
    """Time until the last iteration, at the pace since the second row: the first ones warm up."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._rows = 0
        self._warm = (0.0, 0.0)  # iteration and time [s] when it was warm
        self._left_s: float | None = None

    def update(self, row: Row) -> None:
        iteration, elapsed_s = row["iteration"] or 0.0, row.get("time/elapsed_s")
        if elapsed_s is None:
            return
        self._rows += 1
        if self._rows <= 2:
            self._warm = (iteration, elapsed_s)
        elif iteration > self._warm[0]:
            pace_s = (elapsed_s - self._warm[1]) / (iteration - self._warm[0])
            self._left_s = max(0.0, (self._total - iteration) * pace_s)

    def __str__(self) -> str:
        return _duration(self._left_s)


class _Stream:
    """A terminal or pipe that may go away: what it can no longer show is dropped, without error."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # what sys.stdout is: a file, its stand-in, None in a daemon
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show every sign

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):
                self._drop()
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._drop()

    def isatty(self) -> bool:
        with suppress(ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def _drop(self) -> None:
        """Forget the stream, and let Python's own flush at exit go nowhere."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        self._stream = None


def _labels(row: Row, usual: Mapping[str, str]) -> list[tuple[str, str]]:
    """Labels and names to show: in place of the usual numbers that an algorithm does not have, some of its own."""
    there = [(label, name) for label, name in usual.items() if name in row or not row]
    own = [name for name in row if name.partition("/")[0] not in OF_EVERY_RUN and name not in usual.values()]
    own.sort(key=lambda name: name.startswith(("loss/", "policy/")))  # what only this algorithm has comes first
    return there + [(name, name) for name in own[: len(usual) - len(there)]]


def _is_finite(value: int | float | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(value: int | float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def _percent(value: int | float | None, scale: int = 1) -> str:
    return UNKNOWN if value is None else f"{value * scale:.0f} %"


def _gigabytes(value: int | float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g} GB"


def _duration(seconds: int | float | None) -> str:
    if seconds is None:
        return UNKNOWN
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
