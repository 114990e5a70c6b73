"""Whole runs of A2C, REINFORCE and IMPALA: resumed, replayed as a graph would, evaluated, played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.view.player import Player
from helpers.on_policy import NAMES, SMALL
from helpers.training import merged, the_run
from helpers.watched import watched  # noqa: F401
from helpers.whole_runs import check_no_sync, check_replays, check_resumes


def trainer(name: str, folder: Path, /, **more: Any) -> Trainer:
    settings = {"num_envs": 8, "max_iterations": 4, "log": {"console": "quiet", "dir": str(folder)}}
    settings |= {name: SMALL, "task": {"episode_length": 9}}
    return make_trainer(prepare("Cartpole", algo=name, **merged(settings, more)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rnn", [pytest.param(None, marks=pytest.mark.slow), "gru"])
def test_a_run_resumes_bit_for_bit(name: str, rnn: str | None, tmp_path: Path) -> None:
    def make(folder: Path, **more: Any) -> Trainer:
        return trainer(name, folder, **{name: {"network": {"rnn": rnn}}}, **more)

    check_resumes(make, lambda run: make_trainer(prepare("Cartpole", checkpoint=str(run), max_iterations=8)), tmp_path)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("ppo", "split"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("ppo", "rollout"), ("a2c", "step"), ("reinforce", "rollout"), ("impala", "step"))
        ),
    ],
)
def test_replaying_equals_running(name: str, mode: str, tmp_path: Path) -> None:
    def make(folder: Path, **more: Any) -> Trainer:
        return trainer(name, folder, sim={"name": "mjwarp", "num_threads": 1}, device="cpu", **more)

    check_replays(make, mode, tmp_path, lambda it: it.env.sim)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["impala", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[:2])])
def test_it_is_evaluated_and_played(name: str, tmp_path: Path) -> None:
    trained = trainer(name, tmp_path)
    trained.train()
    run = str(the_run(tmp_path))
    assert make_trainer(prepare("Cartpole", checkpoint=run, test=True)).evaluate()["episodes"] == 8
    player = Player.open(run, num_envs=3)
    expected, _ = trained.algorithm.policy.act(player.obs, ())
    assert (player.choose() - expected).abs().max() < 1e-5
    player.step()
    player.close()
    with pytest.raises(ConfigError, match=rf"is of algo={name}, not algo=ppo"):
        make_trainer(prepare("Cartpole", checkpoint=run, algo="ppo"))


@pytest.mark.parametrize("name", NAMES)
def test_no_host_sync_in_an_iteration(name: str, tmp_path: Path) -> None:
    check_no_sync(trainer(name, tmp_path, sim="mjwarp", device="cpu"))
