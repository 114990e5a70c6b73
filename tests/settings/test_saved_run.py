"""Settings of resumed runs: saved settings are data, and overrides win."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths, safe_open
from gpusim_rl.files.safe_open import dump_yaml, load_yaml
from gpusim_rl.settings import compose as composing
from gpusim_rl.settings.saved_run import continue_run, read_overrides, repeating_words
from helpers.raised import message

pytest_plugins = ["helpers.cartpole_run"]


def test_missing_overrides_file_is_a_warning(run_dir, capsys):
    (run_dir / "overrides.yaml").unlink()
    assert read_overrides(paths.Checkpoint(run_dir / "checkpoints" / "last.pt", run_dir)) == []
    assert f"{run_dir}/overrides.yaml is missing" in capsys.readouterr().err


def resumed(*typed: str) -> tuple[dict, list[str]]:
    """Return settings and recorded command line of a run resumed with these arguments."""
    arguments, saved = continue_run(typed, None)
    assert saved is not None
    return composing.compose(arguments, saved=saved), saved.with_overrides(arguments)


def test_overrides_win_over_saved_settings_on_resume(run_dir):
    folder = "runs/Cartpole/2026-01-31_12-00-00"
    settings, record = resumed("checkpoint=Cartpole")
    assert settings == composing.compose(["num_envs=64", f"checkpoint={folder}"])
    assert record == ["task=Cartpole", "num_envs=64", f"checkpoint={folder}"]
    settings, record = resumed("num_envs=8", "checkpoint=Cartpole", "max_iterations=9")
    assert (settings["num_envs"], settings["max_iterations"], settings["test"]) == (8, 9, False)
    assert record == ["task=Cartpole", "num_envs=8", f"checkpoint={folder}", "max_iterations=9"]
    file = f"{folder}/checkpoints/000050.pt"
    assert resumed(f"checkpoint={file}")[0]["checkpoint"] == file
    (Path(folder) / "overrides.yaml").write_bytes(dump_yaml(["task=Ant"]))  # recorded for another task
    settings, _ = resumed("task=Cartpole", "checkpoint=Cartpole")
    assert settings["task"]["_target_"] == "gpusim_rl.tasks.cartpole.Cartpole"
    assert resumed("task=Ant", "checkpoint=Cartpole")[0]["task"]["_target_"] == "gpusim_rl.tasks.ant.Ant"
    strange = Path("runs/Cartpole/${oc.env:HOME}")
    shutil.copytree(folder, strange)
    assert resumed(f"checkpoint={strange}")[0]["checkpoint"] == str(strange)
    assert continue_run(["checkpoint=null"], None) == (["checkpoint=null"], None)
    assert continue_run(["task=Cartpole"], None) == (["task=Cartpole"], None)


def test_files_swapped_after_opening_have_no_effect(run_dir, monkeypatch):
    """Another process replaces the files as soon as they are opened."""
    files = {name: run_dir / f"{name}.yaml" for name in ("config", "overrides")}
    other = {"config": dump_yaml({**load_yaml(files["config"]), "num_envs": 999}), "overrides": dump_yaml(["seed=9"])}
    open_file = safe_open.open_file

    def open_then_swap(path, *arguments):
        opened = open_file(path, *arguments)
        if path.name in ("config.yaml", "overrides.yaml"):
            path.unlink()
            path.write_bytes(other[path.stem])
        return opened

    monkeypatch.setattr(safe_open, "open_file", open_then_swap)
    settings, record = resumed("checkpoint=Cartpole")
    assert settings["num_envs"] == 64 and record[:2] == ["task=Cartpole", "num_envs=64"]


def test_config_group_wins_over_saved_settings_on_resume(run_dir):
    settings, _ = resumed("checkpoint=Cartpole", "sim=mjwarp", "debug=smoke", "max_iterations=3")
    assert settings["sim"]["name"] == "mjwarp"
    assert (settings["num_envs"], settings["max_iterations"]) == (16, 3)
    settings, _ = resumed("checkpoint=Cartpole", "task=Cartpole", "algo=ppo")  # unchanged values
    assert settings["num_envs"] == 64


def test_machine_settings_are_not_restored_and_reported(run_dir, capsys):
    typed = ["actors=ray", "actors.address=ray://evil:10001", "num_actors=2", "log.dir=/elsewhere"]
    saved = composing.compose(["task=Cartpole", *typed])
    (run_dir / "config.yaml").write_bytes(dump_yaml(saved))
    (run_dir / "overrides.yaml").write_bytes(dump_yaml(["task=Cartpole", *typed]))
    settings, record = resumed("checkpoint=Cartpole")
    assert settings["actors"] == composing.compose([])["actors"] and settings["num_actors"] is None
    assert record == ["task=Cartpole", "checkpoint=runs/Cartpole/2026-01-31_12-00-00"]
    (line,) = capsys.readouterr().err.splitlines()
    left_out = "actors=ray 'actors.address='\"'\"'ray://evil:10001'\"'\"'' num_actors=2"  # quoted for a shell
    assert line.startswith("warning: ") and f"restored: {left_out}. " in line
    settings, _ = resumed("checkpoint=Cartpole", "actors=process", "num_actors=5", "actors.address=null")
    assert (settings["actors"]["engine"], settings["actors"]["address"], settings["num_actors"]) == ("process", None, 5)
    resumed("checkpoint=Cartpole", "test=true")
    resumed("checkpoint=Cartpole", "actors=none")
    assert capsys.readouterr().err == ""
    resumed("checkpoint=runs/Cartpole/latest/checkpoints/000050.pt")  # starts a new folder
    assert "log.dir=/elsewhere" in capsys.readouterr().err


def test_settings_missing_in_old_run_get_defaults(run_dir):
    saved = composing.compose(["task=Cartpole", "ppo.clip=0.3"])
    del saved["ppo"]["rnd"], saved["ppo"]["network"]["activation"], saved["sim"]["cone"]
    (run_dir / "config.yaml").write_bytes(dump_yaml(saved))
    settings, _ = resumed("checkpoint=Cartpole")
    assert settings["ppo"] == composing.compose(["task=Cartpole", "ppo.clip=0.3"])["ppo"]
    assert settings["sim"]["cone"] is None
    settings, _ = resumed("checkpoint=Cartpole", "sim=newton", "ppo.rnd.weight=1")
    assert settings["sim"]["name"] == "newton" and settings["ppo"]["rnd"]["weight"] == 1


def test_manually_removed_settings_stay_removed(run_dir):
    """Sections are restored whole, without defaults from the task's yaml."""
    saved = composing.compose(["task=Ant", "task.randomization_params={sim_params:{gravity:null}}"])
    del saved["task"]["randomization_params"]["sim_params"]["gravity"]
    (run_dir / "config.yaml").write_bytes(dump_yaml(saved))
    settings, _ = resumed("checkpoint=Cartpole")
    assert settings["task"]["randomization_params"] == saved["task"]["randomization_params"]


def test_folder_with_special_characters_can_be_resumed(run_dir, tmp_path):
    odd = tmp_path / "my runs, (old)='1'"
    (tmp_path / "runs").rename(odd)
    settings, _ = resumed(f"checkpoint={odd}/Cartpole/latest")
    assert settings["checkpoint"] == f"{odd.name}/Cartpole/2026-01-31_12-00-00"


def saved_go1(run_dir, **changes):
    settings = composing.compose(["task=Go1Velocity", "recipe=quick", "num_envs=64"]) | changes
    (run_dir / "config.yaml").write_bytes(dump_yaml(settings))
    (run_dir / "overrides.yaml").write_bytes(dump_yaml(["task=Go1Velocity", "recipe=quick", "num_envs=64"]))
    return settings


def test_resumed_run_keeps_recipe_on_any_device(run_dir):
    saved = saved_go1(run_dir)
    for typed in (["device=cuda"], ["recipe=quick", "device=cuda"], ["recipe=auto"], ["task=Go1Velocity"]):
        settings, _ = resumed("checkpoint=Cartpole", *typed)
        assert settings["recipe"] == "quick"
        assert (settings["task"], settings["ppo"], settings["num_envs"]) == (saved["task"], saved["ppo"], 64)
    with pytest.raises(ConfigError) as info:
        resumed("checkpoint=Cartpole", "recipe=full")
    assert "quick" in message(info) and info.value.hint == "Try without recipe="


def test_run_without_recorded_recipe_uses_given_one(run_dir):
    settings = saved_go1(run_dir)
    del settings["recipe"]
    (run_dir / "config.yaml").write_bytes(dump_yaml(settings))
    assert resumed("checkpoint=Cartpole")[0]["recipe"] is None
    assert resumed("checkpoint=Cartpole", "recipe=quick")[0]["recipe"] == "quick"
    (run_dir / "overrides.yaml").write_bytes(dump_yaml([]))  # task= recomposes with that recipe
    again, _ = resumed("checkpoint=Cartpole", "task=Go1Velocity", "recipe=quick")
    assert (again["recipe"], again["num_envs"]) == ("quick", 256)


def test_saved_recipe_cannot_be_a_yaml_path(run_dir):
    (run_dir / "other.yaml").write_text("# @package _global_\ntask: {_target_: stranger.Code}\nnum_envs: 7\n")
    path = os.path.relpath(run_dir / "other", paths.cfg_dir() / "recipe")
    saved_go1(run_dir, recipe=path)
    settings, _ = resumed("checkpoint=Cartpole", "task=Ant")
    assert settings["task"]["_target_"] == "gpusim_rl.tasks.ant.Ant"
    assert (settings["recipe"], settings["num_envs"]) == ("full", composing.compose(["task=Ant"])["num_envs"])


def test_repeating_command_names_recipe(run_dir):
    settings = saved_go1(run_dir)
    for record in (["task=Go1Velocity"], ["task=Go1Velocity", "recipe=full"]):
        assert repeating_words(record, settings, run_dir / "config.yaml") == ["task=Go1Velocity", "recipe=quick"]
    unnamed = repeating_words(["task=Go1Velocity"], settings | {"recipe": None}, run_dir / "config.yaml")
    assert unnamed == ["task=Go1Velocity"]


def test_unknown_key_on_resume_suggests_saved_key(run_dir):
    with pytest.raises(ConfigError, match=r"'task\.max_forse'.*'task\.max_force'"):
        resumed("checkpoint=Cartpole", "task.max_forse=1")


def test_invalid_overrides_file_is_rejected(run_dir):
    (run_dir / "overrides.yaml").write_bytes(dump_yaml({"a": 1}))
    with pytest.raises(ConfigError, match="list"):
        continue_run(["checkpoint=Cartpole"], None)
