"""docs/examples/rllib_cartpole.py: RLlib trains on our vector env."""

from __future__ import annotations

import re
import secrets
import sys

import pytest

from helpers.commands import ROOT, run_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_example_trains(tmp_path):
    reason = "no RLlib: pip install 'ray[rllib]'"
    pytest.importorskip("ray.rllib.algorithms.ppo", reason=reason, exc_type=ImportError)
    alone = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # no token file in the home folder
    script = ROOT / "docs/examples/rllib_cartpole.py"
    done = run_command(sys.executable, script, cwd=tmp_path, env=alone, timeout_s=500, cold=True)
    returns = [float(value) for value in re.findall(r"^iteration \d+: return (-?\d+),", done.stdout, re.MULTILINE)]
    assert len(returns) == 4
    assert returns[0] < 30.0
    assert returns[-1] > 300.0
