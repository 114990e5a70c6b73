"""Tests of run folders: creation, contents, lookup by name."""

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
from helpers.raised import message, raises
from helpers.training import make_trainer, the_run

CONFIG = {"num_envs": 16, "task": {"_target_": "gpusim_rl.tasks.ant.Ant"}, "ppo": {"lr": 1e-05}}


def make_run(base: Path, name: str = "Ant", task: str = "Ant") -> RunDir:
    return RunDir.create(base, name, task, config=CONFIG, overrides=["task=Ant", "num_envs=16"])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Git repository with one commit that is the working directory and the project's checkout."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "tracked.py").write_text("a = 1\n")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.chdir(root)
    monkeypatch.setattr(paths, "checkout", lambda: None)
    return root


def test_run_folder_has_config_overrides_environment_and_link(tmp_path):
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


def test_environment_has_versions_and_machine_but_no_host_name(tmp_path):
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


def test_concurrent_runs_get_separate_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: make_run(tmp_path), range(8)))
    assert len({run.path for run in runs}) == 8 and all(run.config == CONFIG for run in runs)
    assert (tmp_path / "Ant" / "latest" / "config.yaml").is_file()
    assert not list((tmp_path / "Ant").glob(".latest*"))


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "a\n"])
def test_unsafe_run_names_are_rejected(tmp_path, name):
    with raises(ConfigError, expected="only A-Z a-z 0-9 . _ -", got=name):
        make_run(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_unwritable_log_dir_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(ConfigError, key=str(tmp_path / "file" / "Ant"), hint="Try log.dir=<folder>") as info:
        make_run(tmp_path / "file")
    message(info)


def test_git_diff_has_new_sources_and_leaves_the_index_alone(repository):
    (repository / "tracked.py").write_text("a = 2\n")
    (repository / "new task.py").write_text("b = 3\n")
    (repository / "data.bin").write_bytes(bytes(1000))
    make_run(Path("runs"))
    status = ["git", "status", "--porcelain"]
    before = subprocess.run(status, capture_output=True, check=True).stdout
    run = make_run(Path("runs"))  # yaml files of the first run are new too, but left out
    diff = (run.path / "git.diff").read_text()
    assert "-a = 1\n+a = 2\n" in diff and "+b = 3\n" in diff
    assert "data.bin" not in diff and "config.yaml" not in diff
    sha = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, check=True).stdout
    assert run.environment["git"] == {"sha": sha.decode().strip(), "dirty": True}
    assert subprocess.run(status, capture_output=True, check=True).stdout == before
    # the diff alone restores the state
    subprocess.run(["git", "stash", "-q"], check=True)
    (repository / "new task.py").unlink()
    subprocess.run(["git", "apply", str(run.path / "git.diff")], check=True)
    assert (repository / "tracked.py").read_text() == "a = 2\n"
    assert (repository / "new task.py").read_text() == "b = 3\n"


def test_huge_git_diff_is_truncated(repository, monkeypatch):
    monkeypatch.setattr("gpusim_rl.files.provenance.GIT_OUTPUT_LIMIT", 2000)
    (repository / "tracked.py").write_text("a = 2\n" * 10_000)
    diff = (make_run(Path("runs")).path / "git.diff").read_bytes()
    assert len(diff) < 2100 and diff.endswith(b"[cut here]\n")


def test_repository_without_commits_is_supported(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "checkout", lambda: None)
    assert make_run(Path("runs")).environment["git"] is None


def test_missing_git_is_supported(repository, monkeypatch):
    monkeypatch.setenv("PATH", str(repository))
    assert make_run(Path("runs")).environment["git"] is None


def test_task_name_finds_latest_run_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs"))
    run = make_run(Path("runs"), name="fast-legs")
    (run.checkpoints / "last.pt").write_bytes(b"")
    (run.checkpoints / "000050.pt").write_bytes(b"")
    for name in ("Ant", "fast-legs", "runs/Ant/latest", str(run), str(run.path.absolute())):
        resolved, checkpoint = resolve_run(name)
        assert resolved.path.resolve() == run.path.resolve(), name
        assert checkpoint.name == "last.pt"
    resolved, checkpoint = resolve_run(f"{run}/checkpoints/000050.pt")
    assert resolved.config == CONFIG and checkpoint.name == "000050.pt"


def test_checkpoint_outside_a_run_folder_is_rejected(tmp_path):
    (tmp_path / "copied.pt").write_bytes(b"")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").write_bytes(b"")
    for name in ("copied.pt", "."):
        with pytest.raises(ConfigError, match=r"<run>/config\.yaml"):
            resolve_run(str(tmp_path / name))


def test_run_name_is_relative_to_working_directory(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    assert str(run) == str(run.path)
    monkeypatch.chdir(tmp_path)
    assert str(run) == f"Ant/{run.path.name}"


def test_stale_lock_is_replaced_and_held_lock_is_kept(tmp_path):
    run = make_run(tmp_path)
    (run.path / "lock").write_text("process 1 on another-host\n")
    with run.locked():
        assert (run.path / "lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} on "), run.locked():
            pass
    assert not (run.path / "lock").exists()
    with pytest.raises(RuntimeError), run.locked():
        raise RuntimeError
    assert not (run.path / "lock").exists()


def test_damaged_config_is_replaced_from_the_checkpoint(tmp_path, capsys):
    make_trainer("Cartpole", tmp_path, max_iterations=1).train()
    run = the_run(tmp_path)
    for damage in (b"\xff\xfe", b"a: &a [*a]", b"ppo: !!python/object:os.system x", b""):
        content = (run / "config.yaml").read_bytes()
        (run / "config.yaml").write_bytes(content[:40] + damage + content[41:])
        trainer = make_trainer("Cartpole", tmp_path, checkpoint=str(run), max_iterations=2)
        assert "config.yaml was changed" in capsys.readouterr().err and trainer.cfg.num_envs == 8
        trainer.close()
        (run / "config.yaml").write_bytes(content)


def test_edited_config_is_kept_as_a_copy(tmp_path, capsys):
    make_trainer("Cartpole", tmp_path, max_iterations=1).train()
    run = the_run(tmp_path)
    for iterations, name in ((2, "config-damaged.yaml"), (3, "config-damaged-2.yaml")):
        edited = (run / "config.yaml").read_text().replace("seed: 42", f"seed: {iterations}")
        (run / "config.yaml").write_text(edited)
        make_trainer("Cartpole", tmp_path, checkpoint=str(run), max_iterations=iterations).train()
        warning = capsys.readouterr().err
        assert "<key>=<value>" in warning and name in warning
        assert (run / name).read_text() == edited and "seed: 42" in (run / "config.yaml").read_text()


def test_user_folder_named_latest_is_kept(tmp_path):
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
    assert path.read_bytes() == b"new" and [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_notes_are_merged_into_the_environment(tmp_path):
    run = make_run(tmp_path)
    before = run.environment
    run.note({"graph": {"mode": "rollout"}})
    run.note({"graph": {"mode": "off"}, "memory_limit_gb": 3.5})
    assert run.environment == {**before, "graph": {"mode": "off"}, "memory_limit_gb": 3.5}


def test_resumed_run_records_every_start_and_keeps_diffs(repository, monkeypatch):
    (repository / "tracked.py").write_text("a = 2\n")
    run = make_run(Path("runs"))
    run.note({"sim": {"name": "mujoco"}})
    first = run.environment
    run.resume(config=CONFIG, overrides=[])
    assert run.environment["git"] == first["git"] and not (run.path / "git-1.diff").exists(), "same code"
    subprocess.run(["git", "stash", "-q"], check=True)
    monkeypatch.setattr("gpusim_rl.files.provenance.available_cpus", lambda: 77)
    run.resume(config=CONFIG, overrides=[])
    now = run.environment
    assert now["cpu"]["available"] == 77 and now["git"]["dirty"] is False and now["sim"] == {"name": "mujoco"}
    assert [start["git"]["dirty"] for start in now["earlier"]] == [True, True]
    assert now["earlier"][0] == {name: first[name] for name in ("time", "command", "versions", "cpu", "gpu", "git")}
    assert (run.path / "git.diff").read_bytes() == b"" and b"+a = 2" in (run.path / "git-2.diff").read_bytes()


@pytest.mark.parametrize(("content", "reason"), [("{", "Expecting property name"), (None, "No such file")])
def test_resume_with_unreadable_environment_warns(tmp_path, capsys, content, reason):
    run = make_run(tmp_path)
    run.env_json.unlink() if content is None else run.env_json.write_text(content)
    run.resume(config=CONFIG, overrides=[])
    assert run.environment["earlier"] == [] and run.environment["cpu"]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{run.env_json} ({reason}" in line


def test_ignored_paths_do_not_make_the_checkout_dirty(repository):
    (repository / "results").mkdir()
    (repository / "results" / "data.yaml").write_text("a: 1\n")
    (repository / "tracked.py").write_text("a = 2\n")
    assert git_state(repository / "results")[0]["dirty"]
    assert not git_state(repository / "results", repository / "tracked.py")[0]["dirty"]
