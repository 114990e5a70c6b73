"""What a run has chosen by itself stands in its folder."""

from __future__ import annotations

import os

import torch

from gpusim_rl.hardware import available_cpus
from gpusim_rl.run.cuda_graph import GraphChoice
from gpusim_rl.run.logger import Logger
from helpers.training import make_trainer


def test_a_run_tells_simulator_threads_precision_and_graphs(tmp_path, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    trainer = make_trainer("Cartpole", tmp_path, device="cpu", sim={"num_threads": 1}, ppo={"precision": "fp32"})
    run_dir = trainer.run_dir()
    with Logger(trainer, run_dir):
        facts = run_dir.environment
    assert facts["sim"] == {
        "name": "mujoco",
        "device": "cpu",
        "reason": "auto: no CUDA device in use",
        "threads": 1,
    }
    assert facts["learner"]["device"] == "cpu" and facts["learner"]["threads"] == torch.get_num_threads()
    assert (facts["learner"]["precision"], facts["learner"]["precision_reason"]) == ("fp32", "as configured")
    assert facts["learner"]["memory_gb"] is None and isinstance(facts["learner"]["bf16_is_fast"], bool)
    assert facts["graph"]["mode"] == "off" and facts["graph"]["reason"]
    assert facts["openmp"]["GOMP_SPINCOUNT"] == os.environ["GOMP_SPINCOUNT"] == "1000"
    assert "OMP_WAIT_POLICY" not in facts["openmp"]
    assert 0.1 < facts["memory_limit_gb"] <= facts["memory_gb"] + 1
    assert facts["cpu"]["available"] == available_cpus()


def test_a_capture_that_fails_later_is_noted(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, device="cpu")
    run_dir = trainer.run_dir()
    with Logger(trainer, run_dir) as log:
        trainer.timer.start()
        trainer.iterate(log)
        trainer.graphs.choice = GraphChoice("step", "the rollout cannot be captured: x")
        trainer.iterate(log)
    assert run_dir.environment["graph"] == {"mode": "step", "reason": "the rollout cannot be captured: x"}
