"""Tests of env.json: choices that a run made by itself."""

from __future__ import annotations

import os

import torch

from gpusim_rl.learn.algorithm import PRECISIONS
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.run.cuda_graph import GraphChoice
from gpusim_rl.run.metadata import describe_run
from helpers.training import make_trainer


def test_run_records_simulator_threads_precision_and_graphs(tmp_path, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    trainer = make_trainer("Cartpole", tmp_path, device="cpu", sim={"num_threads": 1}, ppo={"precision": "fp32"})
    with trainer.logging() as log:
        recorded = log.run_dir.environment
    assert recorded["sim"] == {"name": "mujoco", "device": "cpu", "reason": "auto: no CUDA device in use", "threads": 1}
    assert recorded["learner"]["device"] == "cpu" and recorded["learner"]["threads"] == torch.get_num_threads()
    assert (recorded["learner"]["precision"], recorded["learner"]["precision_reason"]) == ("fp32", "as configured")
    assert recorded["learner"]["memory_gb"] is None and recorded["learner"]["auto_precision"] in PRECISIONS
    assert recorded["graph"]["mode"] == "off" and recorded["graph"]["reason"]
    assert recorded["openmp"]["GOMP_SPINCOUNT"] == os.environ["GOMP_SPINCOUNT"] == "1000"
    assert "OMP_WAIT_POLICY" not in recorded["openmp"]
    assert 0.1 < recorded["memory_limit_gb"] <= recorded["memory_gb"] + 1
    assert recorded["cpu"]["available"] == available_cpus()
    assert recorded["processes"] == recorded["local_processes"] == 1 and recorded["actors"] == 0


def test_local_processes_share_the_memory_limit(tmp_path, monkeypatch):
    trainer = make_trainer("Cartpole", tmp_path, device="cpu")
    alone = describe_run(trainer.view())["memory_limit_gb"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    among_four = describe_run(trainer.view())
    trainer.close()
    assert among_four["local_processes"] == 4 and among_four["memory_limit_gb"] < 0.5 * alone


def test_late_graph_fallback_is_recorded(tmp_path):
    trainer = make_trainer("Cartpole", tmp_path, device="cpu")
    with trainer.logging() as log:
        trainer.iterate(log)
        trainer.collector.graphs.choice = GraphChoice("step", "the rollout cannot be captured: x")
        trainer.iterate(log)
    assert log.run_dir.environment["graph"] == {"mode": "step", "reason": "the rollout cannot be captured: x"}
