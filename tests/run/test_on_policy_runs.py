"""Whole runs of algorithms that learn from a rollout: resumed, replayed as a graph would, evaluated, played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.run import checkpoint
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.testing.conformance import differences
from gpusim_rl.view.player import Player
from helpers.fake_cuda_graph import differences_of_replays
from helpers.on_policy import SMALL
from helpers.training import merged, read_csv, the_run
from helpers.watched import watched  # noqa: F401


def trainer(name: str, folder: Path, /, **more: Any) -> Trainer:
    settings = {"num_envs": 8, "max_iterations": 2, "log": {"console": "quiet", "dir": str(folder)}}
    settings |= {name: SMALL, "task": {"episode_length": 9}}
    return make_trainer(prepare("Cartpole", algo=name, **merged(settings, more)))


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    network = {"impala": {"network": {"rnn": "gru"}}}
    trainer("impala", tmp_path / "whole", max_iterations=4, **network).train()
    trainer("impala", tmp_path / "parts", **network).train()
    run = the_run(tmp_path / "parts")
    make_trainer(prepare("Cartpole", checkpoint=str(run), max_iterations=4)).train()
    ends = [checkpoint.load(the_run(tmp_path / part) / "checkpoints" / "last.pt") for part in ("whole", "parts")]
    for part in ("policy", "algorithm", "env", "metrics"):
        assert differences(ends[0][part], ends[1][part]) == []
    assert read_csv(the_run(tmp_path / "whole")) == read_csv(run)


def test_it_is_evaluated_and_played(tmp_path: Path) -> None:
    trained = trainer("impala", tmp_path)
    trained.train()
    run = str(the_run(tmp_path))
    assert evaluate_run(prepare("Cartpole", checkpoint=run, test=True))["episodes"] == 8
    player = Player.open(run, num_envs=3)
    expected, _ = trained.algorithm.policy.act(player.obs, ())
    assert (player.choose() - expected).abs().max() < 1e-5
    player.step()
    player.close()
    with pytest.raises(ConfigError, match="is of algo=impala, not algo=ppo"):
        make_trainer(prepare("Cartpole", checkpoint=run, algo="ppo"))


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("mode", ["rollout", "step", "split"])
def test_replaying_draws_what_running_draws(mode: str, tmp_path: Path) -> None:
    warp = {"sim": {"name": "mjwarp", "num_threads": 1}, "device": "cpu", "max_iterations": 6}
    assert differences_of_replays(lambda folder: trainer("ppo", folder, **warp), mode, tmp_path) == []
