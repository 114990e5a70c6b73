"""For all tests of benchmarks: the type checker is imported, and Ctrl-C reaches what they start."""

from __future__ import annotations

import signal

import helpers.shape_check  # noqa: F401 - `--jaxtyping-packages` imports `helpers` alone

# A shell that starts the tests in the background makes them, and all that they start, deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
