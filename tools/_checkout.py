"""Setup that tools run by path import first: put their checkout first in sys.path; report Ctrl-C on one line."""

from __future__ import annotations

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # even if the package is installed

from gpusim_rl import interrupts  # noqa: E402

interrupts.install()  # before slow imports
