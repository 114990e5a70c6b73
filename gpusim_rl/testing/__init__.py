"""Test suites for packages with tasks or algorithms, and a host-sync counter."""

import sys

# Where pytest runs, a failed check of a suite shows the values it compared. pytest itself is not needed here.
if (pytest := sys.modules.get("pytest")) is not None:
    pytest.register_assert_rewrite("gpusim_rl.testing.conformance", "gpusim_rl.testing.algorithm_conformance")
