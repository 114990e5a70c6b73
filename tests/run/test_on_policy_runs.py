"""Whole runs of A2C, REINFORCE and IMPALA: resumed, replayed as a graph would, evaluated, played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.run import checkpoint
from gpusim_rl.run.cuda_graph import GraphChoice, Graphs
from gpusim_rl.run.held_objects import generators_of
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.testing.conformance import differences
from gpusim_rl.testing.sync_counter import SyncCounter
from gpusim_rl.view.player import Player
from helpers.fake_cuda_graph import Recorder, without_shortcuts
from helpers.on_policy import NAMES, SMALL
from helpers.training import merged, read_csv, the_run
from helpers.watched import watched  # noqa: F401


def trainer(name: str, folder: Path, /, **more: Any) -> Trainer:
    settings = {"num_envs": 8, "max_iterations": 4, "log": {"console": "quiet", "dir": str(folder)}}
    settings |= {name: SMALL, "task": {"episode_length": 9}}
    return make_trainer(prepare("Cartpole", algo=name, **merged(settings, more)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rnn", [pytest.param(None, marks=pytest.mark.slow), "gru"])
def test_a_run_resumes_bit_for_bit(name: str, rnn: str | None, tmp_path: Path) -> None:
    network = {name: {"network": {"rnn": rnn}}}
    trainer(name, tmp_path / "whole", max_iterations=8, **network).train()
    trainer(name, tmp_path / "parts", **network).train()
    run = the_run(tmp_path / "parts")
    make_trainer(prepare("Cartpole", checkpoint=str(run), max_iterations=8)).train()
    ends = [checkpoint.load(the_run(tmp_path / part) / "checkpoints" / "last.pt") for part in ("whole", "parts")]
    for part in ("policy", "algorithm", "env", "metrics"):
        assert differences(ends[0][part], ends[1][part]) == []
    assert read_csv(the_run(tmp_path / "whole")) == read_csv(run)


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


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("a2c", "rollout", marks=pytest.mark.slow),
        pytest.param("a2c", "step", marks=pytest.mark.slow),
        pytest.param("reinforce", "rollout", marks=pytest.mark.slow),
        pytest.param("impala", "step", marks=pytest.mark.slow),
    ],
)
def test_replaying_equals_running(name: str, mode: str, tmp_path: Path) -> None:
    check_replays(name, mode, tmp_path)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("mode", ["rollout", "step", "split"])
def test_replaying_draws_what_running_draws(mode: str, tmp_path: Path) -> None:
    check_replays("ppo", mode, tmp_path)


def check_replays(name: str, mode: str, tmp_path: Path) -> None:
    def trained(graphs: type[Graphs], folder: Path) -> dict[str, Any]:
        it = trainer(name, folder, sim={"name": "mjwarp", "num_threads": 1}, device="cpu", max_iterations=8)
        without_shortcuts(it.env.sim)  # type: ignore[attr-defined]
        options: dict[str, Any] = {"generators": generators_of(it.algorithm, it.start.device)}
        options |= {"stateful": it.collector.graphs._stateful}
        it.collector.graphs = graphs(GraphChoice(mode, "test"), it.start.device, **options)
        with it.logging() as log:
            for _ in range(8):
                it.iterate(log)
            assert graphs is Graphs or it.collector.graphs._captured.keys() == {mode, "update"}
            return it.state_dict()

    eager, replayed = trained(Graphs, tmp_path / "eager"), trained(Recorder, tmp_path / "replayed")
    for part in ("policy", "algorithm", "env", "metrics"):
        assert differences(eager[part], replayed[part]) == []


@pytest.mark.parametrize("name", NAMES)
def test_no_host_sync_in_an_iteration(name: str, tmp_path: Path) -> None:
    it = trainer(name, tmp_path, sim="mjwarp", device="cpu")
    with it.logging() as log:
        it.iterate(log)
        with SyncCounter() as syncs:
            it.collector.collect()
            it.algorithm.update()
    assert syncs.total == 0, syncs.locations
