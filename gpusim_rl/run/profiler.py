"""Trace of a few steady iterations by torch's profiler (`debug=profile`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from gpusim_rl.run.logger import Logger
from gpusim_rl.run.run_view import RunView
from gpusim_rl.run.timing import PhaseTimer

PREFIX = "phase/"  # of our ranges in a trace
WARM_UP = 4  # iterations before a trace: compilation, captures and allocations


def phase_range(phase: str) -> AbstractContextManager[Any]:
    """Return a named range in the profiler's trace; for `PhaseTimer.observe`."""
    return torch.profiler.record_function(PREFIX + phase)


def make_profiler(device: torch.device, **settings: Any) -> torch.profiler.profile:
    """Make a profiler of the host and, on CUDA, of all work on the device, including Warp's."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes its stages to stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    cuda = device.type == "cuda"
    if cuda:
        # A profiler that is taken down and set up again between replays of graphs crashes or sees nothing.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    waits = torch.profiler._ExperimentalConfig(enable_cuda_sync_events=cuda)  # type: ignore[reportPrivateImportUsage]
    return torch.profiler.profile(activities=activities, experimental_config=waits, **settings)


@contextmanager
def profiling(run: RunView, timer: PhaseTimer, log: Logger) -> Iterator[None]:
    """Write a trace of the block's steady iterations to `<run>/profile/trace.json.gz` if `debug.profile` is set."""
    if not run.cfg.debug.profile or run.complete:
        yield
        return
    recorder = _Recorder(run, log)
    timer.observe(recorder.around)
    with recorder.profiler or nullcontext():
        recorder.step()
        try:
            yield
        finally:
            recorder.end()


class _Recorder:
    """Profiler steps, one per iteration."""

    def __init__(self, run: RunView, log: Logger) -> None:
        self._log, self._device, self._iteration = log, run.start.device, run.iteration
        left = run.cfg.max_iterations - run.iteration
        active = min(run.cfg.debug.profile, left)
        warm_up = min(WARM_UP, left - active)
        self._first = run.iteration + warm_up + 1
        self._last = run.iteration + warm_up + active
        self._cuda = self._device.type == "cuda"
        # The profiler's first step ends before the first iteration: thus it has its own warm-up in any case.
        schedule = torch.profiler.schedule(wait=warm_up, warmup=1, active=active, repeat=1)
        self.profiler: torch.profiler.profile | None = None  # Nsight Systems
        if not (self._cuda and "NSYS_PROFILING_SESSION_ID" in os.environ):
            self.profiler = make_profiler(self._device, schedule=schedule, on_trace_ready=self._write)

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        """Mark a phase and count iterations; for `PhaseTimer.observe`."""
        with torch.cuda.nvtx.range(phase) if self._cuda else nullcontext(), phase_range(phase):
            yield
        if phase == "log":
            self._iteration += 1
            if self._iteration == self._last:
                self._synchronize()
            self.step()

    def step(self) -> None:
        """End one step of the profiler and begin the next."""
        if self.profiler is not None:
            self.profiler.step()
        elif self._iteration + 1 == self._first:
            torch.cuda.profiler.start()
        elif self._iteration == self._last:
            self._stop_nsight()

    def end(self) -> None:
        """Complete a trace that the end of training cuts short."""
        if self._first <= self._iteration + 1 <= self._last:
            self._synchronize()
            if self.profiler is None:
                self._stop_nsight()

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def _stop_nsight(self) -> None:
        torch.cuda.profiler.stop()
        self._log.console.info(f"Nsight Systems has recorded {self._iterations}")

    def _write(self, profiler: torch.profiler.profile) -> None:
        folder = self._log.run_dir.path / "profile"
        try:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        except (OSError, RuntimeError) as error:
            self._log.console.warn(f"the trace could not be written to {folder}: {error}")
            return
        self._log.console.info(
            f"{self._log.run_dir}/profile/trace.json.gz has {self._iterations}:"
            " open it with https://ui.perfetto.dev or chrome://tracing"
        )

    @property
    def _iterations(self) -> str:
        last = self._iteration
        return f"iteration {self._first}" if last <= self._first else f"iterations {self._first} to {last}"
