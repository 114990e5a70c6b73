"""What the tests of a task package use: the conformance suite and a counter of host syncs."""

import sys

# Where pytest runs, a failed check of the suite shows the values it compared. pytest itself is not needed here.
if (pytest := sys.modules.get("pytest")) is not None:
    pytest.register_assert_rewrite("gpusim_rl.testing.conformance")
