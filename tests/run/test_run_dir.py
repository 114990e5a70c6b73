"""A run folder is made once, tells what the run is made of, and is found by what users call it."""

import json
import os
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths
from gpusim_rl.files.provenance import git_state
from gpusim_rl.files.safe_open import replacing
from gpusim_rl.run.run_dir import RunDir, resolve_run
from helpers.training import make_trainer, the_run

CONFIG = {"num_envs": 16, "task": {"_target_": "gpusim_rl.tasks.ant.Ant"}, "ppo": {"lr": 1e-05}}


def make_run(base: Path, name: str = "Ant", task: str = "Ant") -> RunDir:
    return RunDir.create(base, name, task, config=CONFIG, overrides=["task=Ant", "num_envs=16"])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with one commit, as the current folder and as the project's checkout."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "tracked.py").write_text("a = 1\n")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.chdir(root)
    monkeypatch.setattr(paths, "checkout", lambda: None)
    return root


def test_folder_holds_config_overrides_environment_and_link(tmp_path):
    run = make_run(tmp_path)
    assert run.path.parent == tmp_path / "Ant"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", run.path.name)
    assert {entry.name for entry in run.path.iterdir()} == {
        "config.yaml",
        "overrides.yaml",
        "env.json",
        "git.diff",
        "checkpoints",
    }
    assert run.config == CONFIG
    assert yaml.safe_load(run.overrides_yaml.read_text()) == ["task=Ant", "num_envs=16"]
    link = tmp_path / "Ant" / "latest"
    assert link.is_symlink() and link.readlink() == Path(run.path.name)


def test_environment_tells_versions_and_machine_but_not_the_host(tmp_path):
    import platform

    import torch

    run = make_run(tmp_path)
    environment = run.environment
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["versions"]["mujoco"] and environment["versions"]["gpusim-rl"]
    assert environment["python"] == platform.python_version()
    assert environment["cpu"]["available"] >= 1 and environment["memory_gb"] > 0
    assert environment["command"].startswith("python ")
    assert "host" not in json.dumps(list(environment)).lower()


def test_many_runs_in_one_second_never_share_a_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: make_run(tmp_path), range(8)))
    assert len({run.path for run in runs}) == 8
    assert all(run.config == CONFIG for run in runs)
    assert (tmp_path / "Ant" / "latest" / "config.yaml").is_file()
    assert not list((tmp_path / "Ant").glob(".latest*"))


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "a\n"])
def test_names_are_safe_in_a_shell_and_stay_in_the_folder(tmp_path, name):
    with pytest.raises(ConfigError, match="A-Z a-z 0-9"):
        make_run(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"Try log.dir=<folder>") as error:
        make_run(tmp_path / "file")
    assert "\n" not in str(error.value)


def test_git_diff_has_changes_and_new_sources_and_leaves_the_index_alone(repository):
    (repository / "tracked.py").write_text("a = 2\n")
    (repository / "new task.py").write_text("b = 3\n")
    (repository / "data.bin").write_bytes(bytes(1000))
    make_run(Path("runs"))
    status = ["git", "status", "--porcelain"]
    before = subprocess.run(status, capture_output=True, check=True).stdout
    run = make_run(Path("runs"))  # the first run's yaml files are new too, and not of interest
    diff = (run.path / "git.diff").read_text()
    assert "-a = 1\n+a = 2\n" in diff and "+b = 3\n" in diff
    assert "data.bin" not in diff and "config.yaml" not in diff
    sha = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, check=True).stdout
    assert run.environment["git"] == {"sha": sha.decode().strip(), "dirty": True}
    assert subprocess.run(status, capture_output=True, check=True).stdout == before
    # The diff alone brings the state back.
    subprocess.run(["git", "stash", "-q"], check=True)
    (repository / "new task.py").unlink()
    subprocess.run(["git", "apply", str(run.path / "git.diff")], check=True)
    assert (repository / "tracked.py").read_text() == "a = 2\n"
    assert (repository / "new task.py").read_text() == "b = 3\n"


def test_a_huge_diff_is_cut(repository, monkeypatch):
    monkeypatch.setattr("gpusim_rl.files.provenance.GIT_OUTPUT_LIMIT", 2000)
    (repository / "tracked.py").write_text("a = 2\n" * 10_000)
    diff = (make_run(Path("runs")).path / "git.diff").read_bytes()
    assert len(diff) < 2100 and diff.endswith(b"[cut here]\n")


def test_a_repository_without_commits_is_no_obstacle(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "checkout", lambda: None)
    assert make_run(Path("runs")).environment["git"] is None


def test_missing_git_is_no_obstacle(repository, monkeypatch):
    monkeypatch.setenv("PATH", str(repository))
    assert make_run(Path("runs")).environment["git"] is None


def test_task_name_finds_its_latest_run_whatever_its_folder_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs"))
    run = make_run(Path("runs"), name="fast-legs")
    (run.checkpoints / "last.pt").write_bytes(b"")
    (run.checkpoints / "000050.pt").write_bytes(b"")
    for name in ("Ant", "fast-legs", "runs/Ant/latest", str(run), str(run.path.absolute())):
        found, checkpoint = resolve_run(name)
        assert found.path.resolve() == run.path.resolve(), name
        assert checkpoint.name == "last.pt"
    found, checkpoint = resolve_run(f"{run}/checkpoints/000050.pt")
    assert found.config == CONFIG and checkpoint.name == "000050.pt"


def test_a_file_outside_a_run_folder_is_refused_where_the_folder_is_needed(tmp_path):
    (tmp_path / "copied.pt").write_bytes(b"")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").write_bytes(b"")
    for name in ("copied.pt", "."):
        with pytest.raises(ConfigError, match=r"not in a run folder\. Expected .* <run>/config\.yaml"):
            resolve_run(str(tmp_path / name))


def test_name_of_a_run_is_relative_to_here(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    assert str(run) == str(run.path)
    monkeypatch.chdir(tmp_path)
    assert str(run) == f"Ant/{run.path.name}"


def test_a_lock_is_taken_over_from_the_dead_and_kept_by_the_living(tmp_path):
    run = make_run(tmp_path)
    (run.path / "lock").write_text("process 1 on another-host\n")
    with run.locked():
        assert (run.path / "lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        with pytest.raises(ConfigError, match=rf"is being trained by process {os.getpid()} on "), run.locked():
            pass
    assert not (run.path / "lock").exists()
    with pytest.raises(RuntimeError), run.locked():
        raise RuntimeError
    assert not (run.path / "lock").exists()


def test_a_changed_config_is_replaced_by_that_of_the_checkpoint_and_said(tmp_path, capsys):
    make_trainer("Cartpole", tmp_path, max_iterations=1).train()
    run = the_run(tmp_path)
    for damage in (b"\xff\xfe", b"a: &a [*a]", b"ppo: !!python/object:os.system x", b""):
        content = (run / "config.yaml").read_bytes()
        (run / "config.yaml").write_bytes(content[:40] + damage + content[41:])
        trainer = make_trainer("Cartpole", tmp_path, checkpoint=str(run), max_iterations=2)
        assert "config.yaml was changed or damaged" in capsys.readouterr().err
        assert trainer.cfg.num_envs == 8
        trainer.close()
        (run / "config.yaml").write_bytes(content)


def test_a_config_that_somebody_edited_is_kept_beside_the_new_one(tmp_path, capsys):
    make_trainer("Cartpole", tmp_path, max_iterations=1).train()
    run = the_run(tmp_path)
    for iterations, name in ((2, "config-damaged.yaml"), (3, "config-damaged-2.yaml")):
        edited = (run / "config.yaml").read_text().replace("seed: 42", f"seed: {iterations}")
        (run / "config.yaml").write_text(edited)
        make_trainer("Cartpole", tmp_path, checkpoint=str(run), max_iterations=iterations).train()
        told = capsys.readouterr().err
        assert "<key>=<value>" in told and f"{name} is a copy" in told
        assert (run / name).read_text() == edited
        assert "seed: 42" in (run / "config.yaml").read_text()


def test_a_folder_called_latest_stays(tmp_path):
    (tmp_path / "Ant" / "latest").mkdir(parents=True)
    (tmp_path / "Ant" / "latest" / "mine").write_text("")
    make_run(tmp_path)
    assert (tmp_path / "Ant" / "latest" / "mine").exists()
    assert not list((tmp_path / "Ant").glob(".latest*"))


def test_replacing_keeps_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_facts_are_added_to_the_environment_and_replaced_by_newer_ones(tmp_path):
    run = make_run(tmp_path)
    before = run.environment
    run.note({"graph": {"mode": "rollout"}})
    run.note({"graph": {"mode": "off"}, "memory_limit_gb": 3.5})
    assert run.environment == {**before, "graph": {"mode": "off"}, "memory_limit_gb": 3.5}


def test_a_resumed_run_tells_where_each_start_ran_and_loses_no_diff(repository, monkeypatch):
    (repository / "tracked.py").write_text("a = 2\n")
    run = make_run(Path("runs"))
    run.note({"sim": {"name": "mujoco"}})
    first = run.environment
    run.resume(config=CONFIG, overrides=[])
    assert run.environment["git"] == first["git"] and not (run.path / "git-1.diff").exists(), "the same code"
    subprocess.run(["git", "stash", "-q"], check=True)
    monkeypatch.setattr("gpusim_rl.files.provenance.available_cpus", lambda: 77)
    run.resume(config=CONFIG, overrides=[])
    now = run.environment
    assert now["cpu"]["available"] == 77 and now["git"]["dirty"] is False and now["sim"] == {"name": "mujoco"}
    assert [start["git"]["dirty"] for start in now["earlier"]] == [True, True]
    assert now["earlier"][0] == {name: first[name] for name in ("time", "command", "versions", "cpu", "gpu", "git")}
    assert (run.path / "git.diff").read_bytes() == b"" and b"+a = 2" in (run.path / "git-2.diff").read_bytes()


@pytest.mark.parametrize(("content", "reason"), [("{", "Expecting property name"), (None, "No such file")])
def test_a_run_without_a_readable_environment_goes_on_and_says_so(tmp_path, capsys, content, reason):
    run = make_run(tmp_path)
    run.env_json.unlink() if content is None else run.env_json.write_text(content)
    run.resume(config=CONFIG, overrides=[])
    assert run.environment["earlier"] == [] and run.environment["cpu"]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run.env_json} ({reason}" in line


def test_what_a_tool_writes_itself_does_not_make_its_checkout_dirty(repository):
    (repository / "results").mkdir()
    (repository / "results" / "data.yaml").write_text("a: 1\n")
    (repository / "tracked.py").write_text("a = 2\n")
    assert git_state(repository / "results")[0]["dirty"]
    assert not git_state(repository / "results", repository / "tracked.py")[0]["dirty"]
