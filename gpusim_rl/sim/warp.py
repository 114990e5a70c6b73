"""Warp start-up, streams shared with torch, and captured graphs."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import warp as wp

from gpusim_rl.errors import ConfigError

logger = logging.getLogger("gpusim_rl.sim")

ANNOUNCE_AFTER_S = 3.0  # longer than loading cached kernels takes


def start_warp(device: torch.device) -> str:
    """Initialise Warp without its banner, and return Warp's name for a torch device."""
    if wp.config.log_level == wp.LOG_INFO:  # the default, not a user's choice
        wp.config.log_level = wp.LOG_WARNING
    with _one_line_if_cache_fails(), _silent_stderr() if device.type == "cpu" else nullcontext():
        wp.init()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return str(wp.device_from_torch(device))


@contextmanager
def _one_line_if_cache_fails() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cache, failed = wp.config.kernel_cache_dir, error.filename
        if cache is None or not isinstance(failed, str | Path):
            raise
        if not (Path(cache).is_relative_to(failed) or Path(failed).is_relative_to(cache)):
            raise
        problem = f"Warp cannot write its compiled kernels to {cache}: {error.strerror}"
        raise ConfigError(problem, hint="Set WARP_CACHE_PATH to a writable folder") from None


@contextmanager
def _silent_stderr() -> Iterator[None]:
    # Warp's native code reports a missing CUDA driver on file descriptor 2.
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), 2)
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextmanager
def announce_compilation() -> Iterator[None]:
    """Log that kernels are being compiled if the block takes longer than `ANNOUNCE_AFTER_S`."""
    start = time.monotonic()
    timer = threading.Timer(ANNOUNCE_AFTER_S, logger.info, ["compiling physics kernels, first run only …"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        elapsed = time.monotonic() - start
        if elapsed > ANNOUNCE_AFTER_S:
            logger.info("physics kernels ready after %.0f s", elapsed)


# Warp unregisters a stream when any of its wrappers is destroyed, so each stream keeps one wrapper.
_STREAMS: dict[tuple[torch.device, int], wp.Stream] = {}


def wrapped_stream(stream: torch.cuda.Stream) -> wp.Stream:
    """Return Warp's wrapper of a torch stream."""
    key = (stream.device, stream.cuda_stream)
    if key not in _STREAMS:
        _STREAMS[key] = wp.stream_from_torch(stream)
    return _STREAMS[key]


_apart: list[Callable[[Callable[[], None]], None]] = []


@contextmanager
def defer_launches(take: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Within the block, pass launches of `WarpGraphs` to `take`, to run later: torch captures must not include them."""
    _apart.append(take)
    try:
        yield
    finally:
        _apart.pop()


class WarpGraphs:
    """Fixed sequences of Warp launches, captured on first use and replayed.

    Launches run on torch's current stream, which orders torch and Warp without synchronisation. While torch captures
    that stream, launches become part of torch's graph, which is registered with Warp because `wp.capture_while` needs
    it. If not `enabled`, every run is eager.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._device = device
        self._enabled = enabled
        self._warp_device = start_warp(device)
        self._graphs: dict[Hashable, wp.Graph] = {}
        self._in_torch_graphs: list[wp.Graph] = []
        self._seen: set[Hashable] = set()
        # The legacy default stream cannot be captured.
        self._eager_stream: wp.Stream | None = None
        self._capture_stream: wp.Stream | None = None
        if device.type == "cuda":
            self._capture_stream = wrapped_stream(torch.cuda.Stream(device))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Make the device current in Warp; raise ConfigError if the kernel cache cannot be written."""
        with _one_line_if_cache_fails(), wp.ScopedDevice(self._warp_device):
            yield

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Run `body`, which must launch the same work on the same arrays every time for a given `key`."""
        if _apart:
            _apart[-1](lambda: self.run(key, body))
            return
        stream = None
        if self._device.type == "cuda":
            stream = wrapped_stream(torch.cuda.current_stream(self._device))
            if torch.cuda.is_current_stream_capturing():
                self._run_in_torch_graph(stream, body)
                return
        if self._enabled and key not in self._graphs:
            self._capture(key, body)
        if self._enabled:
            wp.capture_launch(self._graphs[key], stream=stream)
        else:
            self._run_eagerly(key, stream, body)

    def clear(self) -> None:
        """Discard all graphs."""
        self._graphs.clear()

    def close(self) -> None:
        """Free the graphs, and the kernels used by torch's graphs, which must not be replayed afterwards."""
        self.clear()
        self._in_torch_graphs.clear()

    def synchronize(self) -> None:
        """Wait for the device. Required after construction, when work moves from Warp's stream to torch's."""
        wp.synchronize_device(self._warp_device)

    def _capture(self, key: Hashable, body: Callable[[], None]) -> None:
        # Garbage-collecting a graph during a capture breaks the capture.
        collecting = gc.isenabled()
        gc.disable()
        stream = self._capture_stream
        try:
            with (
                announce_compilation(),
                self.scope(),
                # Waiting for another stream on entry would pull it into the capture.
                wp.ScopedStream(stream, sync_enter=False),
                wp.ScopedCapture(self._warp_device, stream=stream) as capture,
            ):
                body()
            assert capture.graph is not None
            self._graphs[key] = capture.graph
        except ConfigError:
            raise
        except Exception as error:  # Warp raises bare exceptions too
            self._enabled = False
            reason = str(error).strip().splitlines() or [type(error).__name__]
            logger.warning("Warp graph capture failed, stepping eagerly (slow): %s", reason[0])
        finally:
            if collecting:
                gc.enable()

    def _run_eagerly(self, key: Hashable, stream: wp.Stream | None, body: Callable[[], None]) -> None:
        scope = nullcontext() if key in self._seen else announce_compilation()
        self._seen.add(key)
        with scope, self._after_and_before(stream) as inner, self.scope(), wp.ScopedStream(inner, sync_enter=False):
            body()

    @contextmanager
    def _after_and_before(self, stream: wp.Stream | None) -> Iterator[wp.Stream | None]:
        """Yield a Warp stream; it waits for torch's stream on entry, and torch's stream waits for it on exit.

        Warp frees temporary memory on the legacy default stream, which is ordered only with Warp's own streams.
        """
        if stream is None:  # the CPU
            yield None
            return
        if self._eager_stream is None:
            self._eager_stream = wp.Stream(self._warp_device)
        self._eager_stream.wait_stream(stream)
        try:
            yield self._eager_stream
        finally:  # launches before an error still run
            stream.wait_stream(self._eager_stream)

    def _run_in_torch_graph(self, stream: wp.Stream, body: Callable[[], None]) -> None:
        with self.scope(), wp.ScopedStream(stream, sync_enter=False):
            before = _capture_id(stream)
            wp.capture_begin(stream=stream, external=True, force_module_load=False)
            try:
                body()
            finally:
                # Keeps Warp from unloading the kernels of torch's graph.
                self._in_torch_graphs.append(wp.capture_end(stream=stream))
            # A Warp loop interrupts and resumes the capture; torch's memory and RNG depend on the capture id.
            if _capture_id(stream) != before:
                raise RuntimeError("a Warp loop changed the id of torch's graph capture")


def _capture_id(stream: wp.Stream) -> int:
    return wp._src.context.runtime.core.wp_cuda_stream_get_capture_id(stream.cuda_stream)  # type: ignore[attr-defined]
