"""Trial of a search: an ordinary run in its own process and run folder, monitored and stopped from here."""

from __future__ import annotations

import csv
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.files import paths
from gpusim_rl.files.budgets import METRICS_BYTES
from gpusim_rl.files.safe_open import open_file, read_bytes
from gpusim_rl.machine.child import Child
from gpusim_rl.settings.overrides import key_of, quote

if TYPE_CHECKING:
    from gpusim_rl.distributed.search import Search

OBJECTIVE = "episode/return"  # objective of a search: mean return of the last 100 training episodes at the end of a run
LOG_NAME = "{:04d}.log"  # output of a trial, in the folder of the study
POLL_S = 0.2


class TrialFailedError(Exception):
    """Failure of a run: it exited with an error, logged nothing for `stall_s`, or has no finite return."""


class TrialRun:
    """Training process of a trial, with settings `chosen`, extra overrides `more` and environment variables `env`."""

    def __init__(
        self, search: Search, number: int, chosen: Mapping[str, Any], *more: str, cwd: str = ".", **env: str
    ) -> None:
        grouped = any(key_of(word) == "wandb_group" for word in search.overrides)
        group = [] if grouped else [f"wandb_group={search.cfg.study}"]
        user = ["-cd", str(search.config_dir)] if search.config_dir is not None else []
        runs = search.runs_of(number)
        place = [f"experiment={runs.name}", f"log.dir={quote(str(runs.parent))}", "log.console=quiet"]
        words = [*user, *search.overrides, *(f"{key}={value}" for key, value in chosen.items()), *group, *more, *place]
        self._search, self._runs = search, runs
        self._before = set(runs.glob("2*"))  # run folders of earlier starts
        printed = open_file(search.folder / LOG_NAME.format(number), "ab+")
        command = [sys.executable, str(paths.train_file()), *words]
        self._child = Child(command, printed=printed, cwd=cwd, env={**os.environ, **env})

    @property
    def running(self) -> bool:
        """True if the run is in progress."""
        return self._child.running

    @property
    def folder(self) -> str:
        """Run folder; empty until it exists."""
        new = {*self._runs.glob("2*")} - self._before
        return str(max(new).absolute()) if new else ""

    def rows(self) -> Iterator[tuple[int, float]]:
        """Yield iteration and objective of each metrics row that has one; hold back the last row until the run ends."""
        seen = 0
        while True:
            running = self.running
            rows = _rows(Path(self.folder) / "metrics.csv") if self.folder else []
            for row in rows[seen:]:
                if running and int(float(row["iteration"])) >= self._search.iterations:
                    break  # the run is still writing its checkpoint
                seen += 1
                self._child.heard()
                if row.get(OBJECTIVE):  # empty until an episode has ended
                    value = float(row[OBJECTIVE])
                    if not math.isfinite(value):
                        raise TrialFailedError(f"{OBJECTIVE} is {value}")
                    yield int(float(row["iteration"])), value
            if not running:
                if self._child.process.wait():
                    raise TrialFailedError(self._child.exit_reason())
                return
            if self._child.silent_s > self._search.cfg.stall_s:
                raise TrialFailedError(f"no new row of metrics for {self._search.cfg.stall_s:g} s")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Interrupt the run like Ctrl-C, which saves a checkpoint."""
        self._child.stop()
        self._child.close()


def _rows(file: Path) -> list[dict[str, str]]:
    try:
        text = read_bytes(file, METRICS_BYTES).decode(errors="replace")
    except OSError:
        return []
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
