"""Test suites for packages with tasks or algorithms, and a host-sync counter."""

import sys

# under pytest, failed checks show the values they compared
if (pytest := sys.modules.get("pytest")) is not None:
    pytest.register_assert_rewrite("gpusim_rl.testing.conformance", "gpusim_rl.testing.algorithm_conformance")
