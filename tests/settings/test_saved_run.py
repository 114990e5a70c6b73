"""A run is resumed by its folder alone: its settings are data, and what is typed wins."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from gpusim_rl.env.task import load_task_class
from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import dump_yaml
from gpusim_rl.settings import checks
from gpusim_rl.settings import compose as composing
from gpusim_rl.settings.saved_run import ADDED, continue_run, of_this_version, read_overrides

pytest_plugins = ["helpers.cartpole_run"]


def message(info: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(info.value)
    assert "\n" not in text
    return text


def test_a_command_line_that_is_gone_is_told_of(run_dir, capsys):
    (run_dir / "overrides.yaml").unlink()
    assert read_overrides(paths.Checkpoint(run_dir / "checkpoints" / "last.pt", run_dir)) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"warning: {run_dir}/overrides.yaml is gone: the run's command line is not on record any more"


def test_a_run_of_an_older_version_gets_the_settings_that_it_lacks(run_dir):
    settings = (run_dir / "config.yaml").read_text().partition("\n")[2]
    lines = [line for line in settings.splitlines() if not line.startswith("  iterations:")]
    assert len(lines) == len(settings.splitlines()) - 1
    (run_dir / "config.yaml").write_bytes(dump_yaml(yaml.safe_load("\n".join(lines))))
    assert resumed("checkpoint=Cartpole")[0]["sim"]["iterations"] is None


def test_compile_of_an_older_version_is_a_setting_of_the_run(run_dir):
    with pytest.raises(ConfigError, match=r"unknown key 'ppo\.compile'\. It is compile=learner now, or compile=off"):
        resumed("checkpoint=Cartpole", "ppo.compile=true")
    settings = yaml.safe_load((run_dir / "config.yaml").read_text().partition("\n")[2])
    settings.pop("compile")
    for old, now in ((None, "off"), (False, "off"), (True, "learner")):
        settings["ppo"].pop("compile", None)
        if old is not None:
            settings["ppo"]["compile"] = old
        (run_dir / "config.yaml").write_bytes(dump_yaml(settings))
        assert resumed("checkpoint=Cartpole")[0]["compile"] == now
        assert "compile" not in resumed("checkpoint=Cartpole")[0]["ppo"]


def test_a_setting_of_a_task_that_an_older_version_lacks_is_as_it_was(run_dir):
    settings = yaml.safe_load((run_dir / "config.yaml").read_text().partition("\n")[2])
    del settings["task"]["discrete"]
    (run_dir / "config.yaml").write_bytes(dump_yaml(settings))
    assert resumed("checkpoint=Cartpole")[0]["task"]["discrete"] is False


@pytest.mark.parametrize("target", [target for target in ADDED if target.startswith("gpusim_rl.tasks.")])
def test_a_run_of_an_older_version_gets_what_its_task_did_not_have(target):
    settings = composing.compose([f"task={target.rpartition('.')[2]}"])
    task = {key: value for key, value in settings["task"].items() if key not in ADDED[target]}
    assert ADDED[target] and len(task) == len(settings["task"]) - len(ADDED[target]), "a key that the task has no more"
    filled = of_this_version({**settings, "task": task})
    assert filled["task"] == {**task, **ADDED[target]}
    values = {key: value for key, value in filled["task"].items() if key != "_target_"}
    checks.build(checks.settings_class(load_task_class(target)), values, "task")


def test_what_a_run_says_of_a_newer_setting_stays():
    settings = composing.compose(["task=AnymalTerrain", "task.fixed_level=3"])
    assert of_this_version(settings)["task"]["fixed_level"] == 3


def resumed(*typed: str) -> tuple[dict, list[str]]:
    """The settings of a run that these arguments continue, and its command line for the record."""
    arguments, saved = continue_run(typed, None)
    assert saved is not None
    return composing.compose(arguments, saved=saved), saved.with_overrides(arguments)


def test_a_resumed_run_has_the_saved_settings_and_what_is_typed_wins(run_dir):
    folder = "runs/Cartpole/2026-01-31_12-00-00"
    settings, record = resumed("checkpoint=Cartpole")
    assert settings == composing.compose(["num_envs=64", f"checkpoint={folder}"])
    assert record == ["task=Cartpole", "num_envs=64", f"checkpoint={folder}"]
    settings, record = resumed("num_envs=8", "checkpoint=Cartpole", "max_iterations=9")
    assert (settings["num_envs"], settings["max_iterations"], settings["test"]) == (8, 9, False)
    assert record == ["task=Cartpole", "num_envs=8", f"checkpoint={folder}", "max_iterations=9"]
    file = f"{folder}/checkpoints/000050.pt"
    assert resumed(f"checkpoint={file}")[0]["checkpoint"] == file
    (Path(folder) / "overrides.yaml").write_bytes(dump_yaml(["task=Ant"]))  # a record that tells of another task
    settings, _ = resumed("task=Cartpole", "checkpoint=Cartpole")
    assert settings["task"]["_target_"] == "gpusim_rl.tasks.cartpole.Cartpole"
    assert resumed("task=Ant", "checkpoint=Cartpole")[0]["task"]["_target_"] == "gpusim_rl.tasks.ant.Ant"
    strange = Path("runs/Cartpole/${oc.env:HOME}")
    shutil.copytree(folder, strange)
    assert resumed(f"checkpoint={strange}")[0]["checkpoint"] == str(strange)
    assert continue_run(["checkpoint=null"], None) == (["checkpoint=null"], None)
    assert continue_run(["task=Cartpole"], None) == (["task=Cartpole"], None)


def test_a_group_typed_at_a_resume_wins_over_the_saved_settings(run_dir):
    settings, _ = resumed("checkpoint=Cartpole", "sim=mjwarp", "debug=smoke", "max_iterations=3")
    assert settings["sim"]["name"] == "mjwarp"
    assert (settings["num_envs"], settings["max_iterations"]) == (16, 3)
    settings, _ = resumed("checkpoint=Cartpole", "task=Cartpole", "algo=ppo")  # what it has: nothing new
    assert settings["num_envs"] == 64


def test_settings_removed_by_hand_stay_removed(run_dir):
    """A section is taken over whole: nothing comes back from the task's yaml."""
    saved = composing.compose(["task=Ant", "task.randomization_params={sim_params:{gravity:null}}"])
    del saved["task"]["randomization_params"]["sim_params"]["gravity"]
    (run_dir / "config.yaml").write_bytes(dump_yaml(saved))
    settings, _ = resumed("checkpoint=Cartpole")
    assert settings["task"]["randomization_params"] == saved["task"]["randomization_params"]


def test_a_folder_with_odd_characters_survives_the_command_line(run_dir, tmp_path):
    odd = tmp_path / "my runs, (old)='1'"
    (tmp_path / "runs").rename(odd)
    settings, _ = resumed(f"checkpoint={odd}/Cartpole/latest")
    assert settings["checkpoint"] == f"{odd.name}/Cartpole/2026-01-31_12-00-00"


def test_checkpoint_of_another_task_is_refused(run_dir):
    arguments, saved = continue_run(["task=Ant", "checkpoint=Cartpole"], None)
    with pytest.raises(ConfigError) as info:
        composing.refuse_other_task(composing.compose(arguments, saved=saved), saved)
    assert message(info).startswith("checkpoint of another task")
    composing.refuse_other_task(composing.compose(["task=Cartpole"]), saved)
    composing.refuse_other_task(composing.compose(["task=Ant"]), None)


def test_an_unknown_key_at_a_resume_is_compared_with_those_of_the_run(run_dir):
    with pytest.raises(ConfigError, match=r"unknown key 'task\.max_forse'\. Did you mean 'task\.max_force'\?"):
        resumed("checkpoint=Cartpole", "task.max_forse=1")


def test_foreign_overrides_file_is_refused(run_dir):
    (run_dir / "overrides.yaml").write_bytes(dump_yaml({"a": 1}))
    with pytest.raises(ConfigError, match="expected a list"):
        continue_run(["checkpoint=Cartpole"], None)
