"""Tests of runs older than a setting: resume, evaluation, playback, use as a teacher."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load, save
from gpusim_rl.files.safe_open import dump_yaml
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.settings.older_run import upgrade_settings
from gpusim_rl.settings.schema import ALGORITHMS
from gpusim_rl.settings.trust import check_saved_settings
from gpusim_rl.testing.conformance import differences
from gpusim_rl.view.player import Player
from helpers.composed import algorithm_defaults
from helpers.every_algorithm import learner, run
from helpers.states import saved
from helpers.training import make_trainer as small_trainer
from helpers.training import the_run


def test_older_run_gets_new_defaults_and_drops_removed_settings(tmp_path: Path) -> None:
    small_trainer("Cartpole", tmp_path).train()
    folder = the_run(tmp_path)
    file = folder / "checkpoints" / "last.pt"
    state = load(file)
    config = state["config"]
    config["ppo"]["imitation"] = {"teacher": None, **config["ppo"].pop("teacher")}
    del (
        config["ppo"]["imitation"]["run"],
        config["ppo"]["extensions"],
        config["ppo"]["network"]["activation"],
        config["sim"]["cone"],
    )
    del config["env"]["cfg"], config["env"]["physics"]
    config["env"]["overlap"] = True
    config["encoder"] = config.pop("pretrained")
    (folder / "config.yaml").write_bytes(dump_yaml(config))
    save(file, {key: value for key, value in state.items() if key not in ("format", "gpusim_rl")})
    log = {"dir": str(tmp_path / "new"), "console": "quiet"}
    assert evaluate_run(prepare("Cartpole", checkpoint=str(file), test=True, log=log))["episodes"] == 8
    make_trainer(prepare("Cartpole", checkpoint=str(file), max_iterations=4, log=log)).train()
    with closing(Player.open(str(file), num_envs=2)) as player:
        player.step()
    taught = {"teacher": str(file), "horizon": 4, "network": {"hidden": [8]}}
    make_trainer(prepare("Cartpole", algo="distill", num_envs=2, max_iterations=1, distill=taught, log=log)).train()


def test_user_settings_keep_their_names() -> None:
    own = {"task": {"imitation": {"weight": 1.0}}, "mine": {"imitation": {"teacher": "x", "end": 3}}}
    settings = copy.deepcopy(own)
    upgrade_settings(settings)
    assert {name: settings[name] for name in own} == own


def test_former_algorithm_paths_are_trusted() -> None:
    for name, (target, _) in ALGORITHMS.items():
        if name in ("amp", "bc", "distill"):
            former = f"gpusim_rl.learn.{name}.{'Distill' if name == 'distill' else name.upper()}"
            settings = {"task": {}, "algo": {"name": name, "_target_": former}, name: {}}
            assert check_saved_settings(settings, Path("config.yaml"))["algo"]["_target_"] == target
    odd = {"task": {}, "algo": {"name": "ppo", "_target_": ["gpusim_rl.learn.amp.AMP"]}}
    with pytest.raises(ConfigError, match=r"algo\._target_"):
        check_saved_settings(odd, Path("config.yaml"))


def test_checkpoint_older_than_extensions_restores_their_states() -> None:
    it, env = learner("amp", {})
    run(it, env, env.reset(), 2)
    state = saved(it.state_dict())
    older = copy.deepcopy(state)
    extensions = older.pop("extensions")
    assert extensions.keys() == {"style", "rnd", "symmetry", "teacher"}
    older["episodes"]["teacher"] = extensions["teacher"]["episodes"]
    other, _ = learner("amp", {})
    other.load_state_dict({**older, "style": extensions["style"], "rnd": extensions["rnd"]})
    assert differences(saved(other.state_dict()), state) == []


def test_upgraded_settings_equal_composed_defaults() -> None:
    for name in ("ppo", "amp", "impala", "sac", "dqn", "distill"):
        settings: dict[str, Any] = {"algo": {"name": name}, name: {}}
        upgrade_settings(settings)
        assert settings[name] == algorithm_defaults(name)
    settings = {"encoder": {"init_from": "eye.pt", "freeze": True}}
    upgrade_settings(settings)
    assert settings["pretrained"] == {"init_from": "eye.pt", "freeze": True, "frames": 1} and "encoder" not in settings
    settings = {"algo": {"name": "../ppo"}, "sim": {"name": "newton", "graph": False}}
    upgrade_settings(settings)
    assert settings["algo"] == {"name": "../ppo"} and settings["sim"]["persistent"] == "auto"
    assert settings["sim"]["name"] == "newton" and settings["sim"]["graph"] is False
