"""Tests of whole off-policy runs: resume, evaluation, playback."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.connect.gymnasium_in import GymnasiumEnv
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.run import checkpoint
from gpusim_rl.run.evaluation import evaluate, evaluate_run
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.testing.conformance import leaves
from gpusim_rl.view.player import Player
from helpers.commands import ROOT
from helpers.off_policy import NAMES, settings_of
from helpers.raised import raises
from helpers.states import saved_bytes
from helpers.training import assert_same_run, merged, the_run

IMAGES = {"network": {"encoder": {"frames": 3}}, "n_step": 2}
PAINTED = {"task": {"_target_": "helpers.painted.Painted"}}


def trainer(name: str, folder: Path, /, changes: dict[str, Any] | None = None, **more: Any) -> Trainer:
    quiet = {"num_envs": 8, "max_iterations": 4, "log": {"console": "quiet", "dir": str(folder)}}
    settings = {name: settings_of(name, changes), "task": {"episode_length": 9}}
    return make_trainer(prepare("Cartpole", algo=name, **merged(quiet, merged(settings, more))))


@pytest.mark.parametrize(("name", "changes", "task"), [("dqn", {}, {}), ("sac", IMAGES, PAINTED)])
def test_resumed_run_is_bit_identical(name: str, changes: dict[str, Any], task: dict[str, Any], tmp_path: Path) -> None:
    trainer(name, tmp_path / "whole", changes, **task, max_iterations=6).train()
    trainer(name, tmp_path / "parts", changes, **task).train()
    run = the_run(tmp_path / "parts")
    again = {"checkpoint": str(run), "trust": True, "max_iterations": 6}
    trainer(name, tmp_path / "parts", changes, **task, **again).train()
    assert_same_run(tmp_path / "whole", tmp_path / "parts", "/config")


@pytest.mark.parametrize("name", ["rainbow", "host"])
def test_checkpoint_size_is_independent_of_replay_capacity(name: str, tmp_path: Path) -> None:
    """No saved tensor is a view of a larger storage, which `torch.save` would write in full."""
    algorithm = {"rainbow": "dqn", "host": "sac"}[name]
    sizes = []
    for capacity in (1_000, 100_000):
        replay = {"capacity": capacity, "alpha": 0.5 * (name == "rainbow"), "device": "cpu" if name == "host" else None}
        trainer(algorithm, tmp_path / str(capacity), {"replay": replay}, max_iterations=2).train()
        file = the_run(tmp_path / str(capacity)) / "checkpoints" / "last.pt"
        sizes.append(file.stat().st_size)
        state = checkpoint.load(file)
        assert saved_bytes(state) <= sum(x.nbytes for _, x in leaves(state) if isinstance(x, torch.Tensor))
    assert sizes[1] < sizes[0] + 2_000


@pytest.fixture(scope="module")
def sac_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only run of SAC."""
    folder = tmp_path_factory.mktemp("sac")
    trainer("sac", folder).train()
    return the_run(folder)


def test_changed_time_limit_empties_replay_at_resume(sac_run: Path, tmp_path: Path, capsys) -> None:
    run = shutil.copytree(sac_run, tmp_path / "run")
    resumed = make_trainer(prepare("Cartpole", checkpoint=str(run), max_iterations=6, task={"episode_length": 100}))
    assert "time limit changed from 9 to 100" in capsys.readouterr().err
    assert int(resumed.algorithm.replay.fill) == 0  # type: ignore[attr-defined]
    resumed.train()


def test_evaluation_accepts_more_envs_than_replay_capacity(sac_run: Path) -> None:
    assert evaluate_run(prepare("Cartpole", checkpoint=str(sac_run), test=True, num_envs=300))["episodes"] == 300


def test_errors_name_the_section_of_the_variant(tmp_path: Path) -> None:
    (tmp_path / "algo").mkdir()
    yaml = (ROOT / "cfg" / "algo" / "sac.yaml").read_text()
    for old in ("name: sac", "@sac,", "\nsac:"):
        yaml = yaml.replace(old, old.replace("sac", "gentle_sac"))
    (tmp_path / "algo" / "gentle_sac.yaml").write_text(yaml)

    def started(**settings: Any) -> Trainer:
        quiet = {"num_envs": 64, "log": {"console": "quiet", "dir": str(tmp_path)}}
        return make_trainer(prepare("Cartpole", config_dir=tmp_path, algo="gentle_sac", **quiet, gentle_sac=settings))

    with raises(ConfigError, key="gentle_sac.replay.capacity", hint="Try gentle_sac.replay.capacity=512"):
        started(replay={"capacity": 8}, learning_starts=8, batch_size=8)
    with raises(ConfigError, key="gentle_sac.noise.steps", expected="1 number"):
        started(noise={"steps": [1.0, 1.0]})
    with pytest.raises(ConfigError, match=r"^gentle_sac\.network\._target_"):
        started(network={"_target_": "torch.nn.Linear"})


@pytest.mark.parametrize("name", ["sac", "dqn"])
def test_trained_policy_is_evaluated_and_played(name: str, tmp_path: Path) -> None:
    trained = trainer(name, tmp_path)
    trained.train()
    run = str(the_run(tmp_path))
    result = evaluate_run(prepare("Cartpole", checkpoint=run, test=True))
    assert result["episodes"] == 8
    player = Player.open(run, num_envs=3)
    expected, _ = trained.algorithm.policy.act(player.obs, ())
    assert torch.allclose(player.choose(), expected)
    player.step()
    player.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_off_policy_algorithms_learn_pendulum_in_20_000_steps(name: str, tmp_path: Path) -> None:
    iterations = 78 if name == "dqn" else 156  # the horizon of dqn is twice as long
    settings: dict[str, Any] = {"max_iterations": iterations, "seed": 1}
    settings["log"] = {"console": "quiet", "dir": str(tmp_path)}
    it = make_trainer(prepare("Gymnasium", algo=name, env={"id": "Pendulum-v1"}, **settings))
    it.train()
    assert it.env_steps == 19_968
    envs = GymnasiumEnv(gymnasium.make_vec("Pendulum-v1", num_envs=64), seed=2)
    result, _ = evaluate(envs, it.algorithm.policy, envs.reset())
    assert result["return_mean"] > -200.0  # random policy: -1200; best: about -150


def test_changed_capacity_or_algorithm_is_rejected_at_resume(sac_run: Path) -> None:
    run = str(sac_run)
    with pytest.raises(ConfigError, match=r"sac\.replay\.capacity: saved 400, now 800"):
        make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=8, sac={"replay": {"capacity": 800}}))
    with pytest.raises(ConfigError, match=r"algo=sac, not algo=td3"):
        make_trainer(prepare("Cartpole", checkpoint=run, algo="td3"))


def test_fast_sac_is_a_variant_of_sac() -> None:
    cfg: Any = prepare("Ant", algo="fast_sac").cfg
    assert cfg.algo == "sac" and cfg.algorithm.network.atoms == 101 and cfg.algorithm.batch_size == 8192


@pytest.mark.parametrize("capacity", [15, 7])
def test_replay_of_less_than_two_steps_is_rejected(capacity: int, tmp_path: Path) -> None:
    changes = {"replay": {"capacity": capacity}, "learning_starts": 4, "batch_size": 4}
    with raises(ConfigError, key="sac.replay.capacity", got=capacity):
        trainer("sac", tmp_path, changes)
