"""Setup of the benchmark tests: shape checks, and Ctrl-C for child processes."""

from __future__ import annotations

import signal

import helpers.shape_check  # noqa: F401 - `--jaxtyping-packages` imports `helpers` alone

# Shells ignore SIGINT in background jobs, and child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
