"""Trace of a few steady iterations by torch's profiler (`debug=profile`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gpusim_rl.run.logger import Logger
from gpusim_rl.run.start import RunView
from gpusim_rl.run.timing import PhaseTimer

PREFIX = "phase/"  # prefix of our ranges in a trace
WARM_UP = 4  # iterations before a trace: compilation, captures and allocations


def phase_range(phase: str) -> AbstractContextManager[Any]:
    """Return a named range in the profiler's trace; for `PhaseTimer.observe`."""
    return torch.profiler.record_function(PREFIX + phase)


def make_profiler(device: torch.device, **settings: Any) -> torch.profiler.profile:
    """Make a profiler of the host and, on CUDA, of all work on the device, including Warp's."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences messages on stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    cuda = device.type == "cuda"
    if cuda:
        # Tearing the profiler down and setting it up again between graph replays crashes or records nothing.
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
    with recorder.profiler:
        recorder.profiler.step()
        try:
            yield
        finally:
            recorder.synchronize()


class _Recorder:
    """Driver of the profiler: one step per iteration, ending with the `log` phase."""

    def __init__(self, run: RunView, log: Logger) -> None:
        self._log, self._device, self._iteration = log, run.start.device, run.iteration
        left = run.cfg.max_iterations - run.iteration
        active = min(run.cfg.debug.profile, left)
        warm_up = min(WARM_UP, left - active)
        self._first, self._last = run.iteration + warm_up + 1, run.iteration + warm_up + active
        # The profiler's first step ends before the first iteration, so its warm-up does not consume an iteration.
        schedule = torch.profiler.schedule(wait=warm_up, warmup=1, active=active, repeat=1)
        self.profiler = make_profiler(self._device, schedule=schedule, on_trace_ready=self._write)

    @contextmanager
    def around(self, phase: str) -> Iterator[None]:
        with phase_range(phase):
            yield
        if phase == "log":
            self._iteration += 1
            if self._iteration == self._last:
                self.synchronize()
            self.profiler.step()

    def synchronize(self) -> None:
        """Wait for launched work, so that the trace includes it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _write(self, profiler: torch.profiler.profile) -> None:
        folder = self._log.run_dir.path / "profile"
        try:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / "trace.json.gz"))
        except (OSError, RuntimeError) as error:
            self._log.console.warn(f"cannot write a trace to {folder}: {error}")
            return
        iterations = f" {self._first}" if self._iteration <= self._first else f"s {self._first} to {self._iteration}"
        file = f"{self._log.run_dir}/profile/trace.json.gz"
        self._log.console.info(f"traced iteration{iterations}: open {file} in https://ui.perfetto.dev")
