"""First import of a tool started by its path: put its checkout first, and end Ctrl-C in one line."""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # whether it is installed or not

from gpusim_rl import interrupts  # noqa: E402

interrupts.install()  # before imports that take time
