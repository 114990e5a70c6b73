"""A learner on a CUDA device with actors on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.learn.collective import ALONE
from helpers.training import read_csv, the_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"


@pytest.mark.parametrize("inference", ["actor", "learner"])
@pytest.mark.parametrize("algo", ["impala", "sac"])
def test_gpu_learner_trains_on_actor_rollouts(tmp_path: Path, algo: str, inference: str) -> None:
    spec = prepare(
        "Cartpole",
        algo=algo,
        num_envs=16,
        num_actors=2,
        rl_device=DEVICE,
        actors={"engine": "process", "inference": inference},
        max_iterations=30,
        **({"sac": {"learning_starts": 256}} if algo == "sac" else {}),
        log={"dir": str(tmp_path), "console": "quiet", "interval": 10},
    )
    trainer = make_trainer(spec, ALONE)
    assert all(tensor.device.type == DEVICE for tensor, _ in trainer.collector._remote.recording())
    trainer.train()
    last = read_csv(the_run(tmp_path))[-1]
    assert float(last["actors/alive"]) == 2 and float(last["policy/lag_max"]) < 100
    assert float(last["loss/value" if algo == "impala" else "loss/critic"]) > 0.0
