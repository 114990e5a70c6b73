"""Tests of run names and of errors for missing runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths

pytest_plugins = ["helpers.cartpole_run"]


def message(info: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(info.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "name",
    [
        "Cartpole",
        "runs/Cartpole",
        "runs/Cartpole/latest",
        "runs/Cartpole/2026-01-31_12-00-00",
        "runs/Cartpole/latest/checkpoints",
        "runs/Cartpole/latest/checkpoints/last.pt",
    ],
)
def test_run_is_found_by_every_name(run_dir, name):
    found = paths.find_checkpoint(name)
    assert found.file.resolve() == run_dir / "checkpoints" / "last.pt"
    assert found.run_dir is not None and found.run_dir.resolve() == run_dir


def test_copied_checkpoint_has_no_run_folder(run_dir, tmp_path):
    copy = tmp_path / "mine.pt"
    copy.write_bytes(b"x")
    assert paths.find_checkpoint("mine.pt").run_dir is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Antt", "runs: Cartpole"),
        ("cartpol", "mean 'Cartpole'?"),
        ("runs/Cartpole/2025", "Cartpole: latest, 2026-01-31_12-00-00"),
        ("nowhere/last.pt", "a run folder"),
        ("a" * 1000, "aaa': File name"),
        ("~no-such-user/last.pt", "a run folder"),
    ],
)
def test_missing_checkpoint_lists_available_ones(run_dir, name, words):
    with pytest.raises(ConfigError) as info:
        paths.find_checkpoint(name)
    assert words in message(info)
    assert "Ant'?" not in message(info)  # Ant has no run


def test_missing_run_lists_only_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"Found in runs: no run yet$"):
        paths.find_checkpoint("Ant")
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"Found in runs: no run$"):
        paths.find_run("Ant")
    run = tmp_path / "runs" / "Cartpole" / "2026-01-31_12-00-00"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    (tmp_path / "mine.pt").write_text("")
    with pytest.raises(ConfigError, match=r"Found in runs: .*Cartpole$"):
        paths.find_run("Ant")
    with pytest.raises(ConfigError, match=r"Found in .* (mine\.pt, runs|runs, mine\.pt)$"):
        paths.find_checkpoint("./no.pt")


def without_checkpoints(run_dir: Path) -> Path:
    for file in (run_dir / "checkpoints").iterdir():
        file.unlink()
    return run_dir


def crashed(folder: Path) -> Path:
    """Make a run folder without checkpoint and metrics, as left by a crash at the start."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("task: {_target_: gpusim_rl.tasks.cartpole.Cartpole}\n")
    return folder


@pytest.mark.parametrize("folder", ["Cartpole", "fast"])
def test_crashed_run_does_not_hide_trained_runs(run_dir, folder, capsys):
    runs = run_dir.parents[1]
    last = crashed(runs / folder / "2026-02-01_12-00-00")
    (runs / "Cartpole" / "latest").unlink()
    (runs / "Cartpole" / "latest").symlink_to(f"../{folder}/{last.name}")
    shutil.copytree(run_dir, runs / "Cartpole" / "2026-01-30_12-00-00")  # an older one
    assert paths.find_checkpoint("Cartpole").run_dir == run_dir.relative_to(Path.cwd())
    line = capsys.readouterr().err
    assert line.startswith(f"runs/{folder}/{last.name} ") and line.endswith(f" runs/Cartpole/{run_dir.name}\n")
    assert paths.find_run("Cartpole") == run_dir.relative_to(Path.cwd())
    assert "metrics.csv or checkpoints/*.pt" in capsys.readouterr().err
    (last / "metrics.csv").write_text("")  # a run that has not saved a checkpoint yet
    assert paths.find_run("Cartpole") == last.relative_to(Path.cwd())
    (last / "checkpoints" / "last.pt").write_bytes(b"x")
    assert paths.find_checkpoint("Cartpole").run_dir == last.relative_to(Path.cwd())
    assert capsys.readouterr().err == ""


def test_newest_run_is_named_if_none_has_a_checkpoint(run_dir):
    without_checkpoints(run_dir)
    crashed(run_dir.parent / "2026-01-30_12-00-00")
    with pytest.raises(ConfigError, match=rf"{run_dir.name} .*checkpoints/last\.pt"):
        paths.find_checkpoint("Cartpole")
    assert paths.find_run("Cartpole") == run_dir.relative_to(Path.cwd())


def test_missing_last_pt_suggests_the_newest_checkpoint(run_dir):
    folder = without_checkpoints(run_dir) / "checkpoints"
    shutil.copytree(run_dir, run_dir.parent / "2026-01-30_12-00-00")  # an older run must not be used instead
    (run_dir.parent / "2026-01-30_12-00-00" / "checkpoints" / "last.pt").write_bytes(b"x")
    for name in ("000050.pt", "000040.pt", "best.pt"):
        (folder / name).write_bytes(b"x")
    os.utime(folder / "000050.pt", (0, 0))  # copies may have an old modification time
    for name in (str(run_dir), "Cartpole"):
        with pytest.raises(ConfigError, match=r"last\.pt is missing from .* checkpoint=\S+/000050\.pt \(for a tool"):
            paths.find_checkpoint(name)


def test_explicit_latest_never_falls_back_to_older_runs(run_dir):
    without_checkpoints(run_dir)
    shutil.copytree(run_dir, run_dir.parent / "2026-01-30_12-00-00")
    (run_dir.parent / "2026-01-30_12-00-00" / "checkpoints" / "last.pt").write_bytes(b"x")
    with pytest.raises(ConfigError, match="no checkpoint in"):
        paths.find_checkpoint("runs/Cartpole/latest")
    assert paths.find_checkpoint("runs/Cartpole").file.is_file()
