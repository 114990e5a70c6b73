"""Replay buffer on the host for a learner on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.host_replay import HostReplay
from gpusim_rl.learn.replay import Replay, Trajectory
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import differences
from helpers.fakes import RandomEnv

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
ENVS, HORIZON, SIZE = 64, 4, 4096


def test_device_samples_equal_host_samples() -> None:
    spec = EnvSpec(ENVS, {"policy": 300}, Box(8), 1)
    settings: dict[str, Any] = {"n_step": 2, "gamma": 0.9, "storage": torch.float32, "device": torch.device("cpu")}

    def make(device: torch.device) -> HostReplay:
        memory, rollout = Replay(50, spec, ["policy"], **settings), Trajectory.empty(HORIZON, spec, ["policy"], device)
        return HostReplay(memory, rollout, device=device, size=SIZE, seed=3)

    cpu, cuda = make(torch.device("cpu")), make(torch.device(DEVICE))
    env, size = RandomEnv(ENVS, {"policy": 300}), 4096 if DEVICE == "cuda" else 8
    busy = torch.randn(size, size, device=DEVICE)
    obs = env.reset()
    for _ in range(20):
        for _ in range(HORIZON):
            action = torch.rand(ENVS, 8)
            step = env.step(action)
            cpu.steps.write(obs, action, step)
            cuda.steps.write({g: x.to(DEVICE) for g, x in obs.items()}, action.to(DEVICE), step)
            obs = step.obs
        busy = busy @ busy / 64.0  # keeps the device behind the host
        for replay in (cpu, cuda):
            replay.exchange()
        here, there = (replay.sample(SIZE, torch.Generator()) for replay in (cpu, cuda))
        for name in ("action", "reward", "discount", "weight", "index"):
            assert torch.equal(getattr(here, name), getattr(there, name).cpu()), name
        for name in ("obs", "next_obs"):
            assert torch.equal(getattr(here, name)["policy"], getattr(there, name)["policy"].cpu()), name
        assert cpu.fill == cuda.fill.cpu()
    assert differences(cpu.state_dict(), cuda.state_dict()) == []


def test_captured_training_learns_from_host_replay(tmp_path: Path) -> None:
    settings = {"sim": "mjwarp", "device": DEVICE, "num_envs": 64, "max_iterations": 8, "compile": "off"}
    settings["log"] = {"dir": str(tmp_path), "console": "quiet"}
    sac = {"replay": {"device": "cpu"}, "learning_starts": 500, "horizon": 4, "updates": 2}
    trainer = make_trainer(prepare("Cartpole", algo="sac", sac=sac, **settings))
    before = {name: p.detach().clone() for name, p in trainer.algorithm.policy.named_parameters()}
    row = trainer.train()
    assert trainer.collector.graphs.choice.mode == "rollout" and torch.tensor(row["loss/critic"]).isfinite()
    assert row["replay/transitions"] == 7 * 4 * 64  # stored before the last rollout
    after = dict(trainer.algorithm.policy.named_parameters())
    assert all(not torch.equal(before[name], after[name]) for name in before if "critic" in name and "weight" in name)
