"""Phase times on CUDA, where the host runs an iteration ahead and its waits belong to no phase."""

from __future__ import annotations

import pytest
import torch

from gpusim_rl.diagnose.rules import diagnose
from gpusim_rl.diagnose.run_stats import read_rows, read_run_stats
from helpers.training import make_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_device_phases_fill_iteration_and_logging_does_not(tmp_path):
    ppo = {"horizon": 16, "minibatch_size": 8192}
    make_trainer("Ant", tmp_path, num_envs=2048, device="cuda", max_iterations=24, ppo=ppo).train()
    [folder] = tmp_path.glob("Ant/2*")
    assert len(read_rows(folder / "metrics.csv")) == 24
    stats = read_run_stats(folder)
    assert stats.warm_up_rows >= 4 and stats.graph_mode == "rollout"
    assert 0.5 < stats.rollout + stats.update < 1.2
    assert stats.log < 0.5, "time of writing, without waits for the device"
    assert "logging_bound" not in [finding.rule for finding in diagnose(stats)]
