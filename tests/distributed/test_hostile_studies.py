"""Untrusted study folders: contents are data or are rejected in one line."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpusim_rl.distributed import pbt, trial_run, tuning
from gpusim_rl.distributed.search import Search, SearchConfig
from gpusim_rl.distributed.tuning import SUPER_JOURNAL, Study, database_errors
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.safe_open import dump_yaml

SPACE: dict[str, dict[str, Any]] = {
    "ppo.learning_rate": {"low": 1e-6, "high": 1e-2, "log": True},
    "ppo.epochs": {"choices": [1, 4]},
}
SECRET = b"a file of the user's\n"


def search_in(folder: Path, **settings: Any) -> Search:
    cfg = SearchConfig(study="poles", **{"trials": 4, **settings})
    return Search(cfg, SPACE, ["task=Cartpole"], None, "cpu", 9, folder / "runs" / "poles")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Search:
    """Write a study of two complete trials."""
    search = search_in(tmp_path_factory.mktemp("study"))
    study = Study(search)
    for number in range(2):
        trial = study.trials.ask(study.distributions())
        trial.set_user_attr("run", str(search.runs_of(number) / f"2026-01-01_00-00-0{number}"))
        study.trials.tell(trial, 2.0 + number)
    return search


@pytest.fixture
def search(written: Search, tmp_path: Path) -> Search:
    """Copy the study of `written`."""
    copy = search_in(tmp_path)
    shutil.copytree(written.folder, copy.folder)
    return copy


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    return file


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["poles/study.db", "poles/0007.log", "poles.0000", "poles.0000/2026-01-01/env.json"])
def test_study_with_link_or_pipe_is_rejected_in_one_line(search: Search, secret: Path, name: str, kind: str) -> None:
    path = search.folder.parent / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(secret)
    with pytest.raises(ConfigError) as error:
        Study(search)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert secret.read_bytes() == SECRET


def test_linked_study_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "poles").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"poles .*link.*elsewhere"):
        Study(search_in(tmp_path))
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_latest_link_is_allowed(search: Search) -> None:
    folder = search.runs_of(0)
    (folder / "2026-01-01_00-00-00").mkdir(parents=True)
    (folder / "latest").symlink_to("2026-01-01_00-00-00")
    (folder / ".latest-2026-01-01_00-00-01-77").symlink_to("2026-01-01_00-00-01")  # of a run that starts now
    assert Study(search).num_ended == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "pipe", "second name"])
@pytest.mark.parametrize("name", ["study.db", "study.db-journal", "study.db-wal", "study.db-shm", "0000.log"])
def test_writing_through_links_and_pipes_is_rejected(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """Check each open call by itself, because links may appear after the folder check."""
    search = search_in(tmp_path)
    monkeypatch.setattr(Search, "refuse_links", lambda search: None)
    search.folder.mkdir(parents=True)
    make: dict[str, Callable[[Path], None]] = {
        "link": lambda path: path.symlink_to(secret),
        "pipe": os.mkfifo,
        "second name": lambda path: path.hardlink_to(secret),
    }
    make[kind](search.folder / name)
    with pytest.raises(ConfigError, match=name):
        Study(search) if name.startswith("study.db") else trial_run.TrialRun(search, 0, {}).end()
    assert secret.read_bytes() == SECRET


@pytest.mark.parametrize("content", [b"SQLite format 3\0" + 5000 * b"x", SECRET])
def test_damaged_database_is_reported_in_one_line(search: Search, content: bytes) -> None:
    (search.folder / "study.db").write_bytes(content)
    with pytest.raises(ConfigError, match=r"study\.db: .*Try ") as error, database_errors(search):
        Study(search)
    assert "\n" not in str(error.value)


def test_rollback_journal_cannot_delete_other_files(search: Search, secret: Path) -> None:
    name = os.fsencode(secret)
    end = len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big") + SUPER_JOURNAL
    (search.folder / "study.db-journal").write_bytes(bytes(512) + name + end)
    with pytest.raises(ConfigError, match=r"study\.db-journal: refers to another file"):
        Study(search)
    assert secret.read_bytes() == SECRET


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "script",
    [
        "PRAGMA journal_mode=WAL",
        "CREATE VIEW v AS SELECT 1",
        "CREATE TRIGGER t AFTER INSERT ON trials BEGIN DELETE FROM trials; END",
        "CREATE VIRTUAL TABLE t USING fts5(x)",
        "DELETE FROM trial_values",
        "UPDATE trial_values SET value = 'x'",
        "UPDATE trial_values SET value_type = 'x'",
        "UPDATE study_user_attributes SET value_json = '[1]' WHERE key = 'search'",
        "UPDATE study_user_attributes SET value_json = '{' WHERE key = 'search'",
        "UPDATE trials SET state = 'LOST'",
        "UPDATE trial_params SET distribution_json = '{}'",
        'UPDATE trial_params SET distribution_json = \'{"type": "int", "low": 0, "high": 9}\'',
        "UPDATE alembic_version SET version_num = 'v99.0.0.a'",
        "INSERT INTO study_directions (direction, study_id, objective) VALUES ('MAXIMIZE', 1, 1)",
        "UPDATE trials SET state = 'WAITING' WHERE number = 1",
    ],
)
def test_manipulated_database_is_reported_in_one_line(search: Search, script: str) -> None:
    with closing(sqlite3.connect(search.folder / "study.db")) as database:
        database.executescript(script)
    with pytest.raises(ConfigError, match=r"^[^\n]*study\.db[^\n]*Try [^\n]*$"):
        Study(search)


def test_internal_error_is_not_blamed_on_database(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_run", {}.__getitem__)
    with pytest.raises(TypeError, match="exactly one argument"):
        tuning.tune(search)


def test_database_text_is_never_suggested_as_command(search: Search) -> None:
    text = "python train.py task=Cartpole; rm -rf ~"
    with closing(sqlite3.connect(search.folder / "study.db")) as database, database:
        database.execute("UPDATE trial_user_attributes SET value_json = ?", (f'"../$(rm -rf ~)/{text}"',))
        database.execute("UPDATE trial_params SET param_name = 'task._target_' WHERE param_name = 'ppo.learning_rate'")
    lines = Study(search).report()
    assert not [line for line in lines if "_target_" in line and "train.py" in line]
    assert not [line for line in lines if "play.py" in line]


def test_database_attributes_do_not_enter_table(search: Search) -> None:
    Study(search).trials.set_user_attr("interval ...", "x")
    study = Study(search)
    pbt.add_row(study.search.folder, {"trial": 0, "iteration": 4})
    assert (search.folder / pbt.TABLE).read_text() == "trial,iteration\n0,4\n"


@pytest.mark.parametrize(
    "config",
    [
        {"ppo": {"learning_rate": 1e-3, "epochs": "1 task._target_=x"}},
        {"ppo": {"learning_rate": 7.0, "epochs": 1}},
        {"ppo": {"learning_rate": float("nan"), "epochs": 1}},
        {"ppo": 3},
    ],
)
def test_member_settings_outside_space_are_ignored(
    tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "2026-01-01_00-00-00"
    run.mkdir()
    (run / "config.yaml").write_bytes(dump_yaml(config))
    assert pbt.settings_of(run, SPACE) is None
    assert str(run) in capsys.readouterr().err


def test_member_resumes_with_its_settings(tmp_path: Path) -> None:
    settings = {"learning_rate": 1e-3, "epochs": 4, "clip": 0.2}
    (tmp_path / "config.yaml").write_bytes(dump_yaml({"ppo": settings}))
    assert pbt.settings_of(tmp_path, SPACE) == {"ppo.learning_rate": 1e-3, "ppo.epochs": 4}
    (tmp_path / "config.yaml").write_bytes(dump_yaml({"ppo": {**settings, "learning_rate": "${oc.env:HOME}"}}))
    with pytest.raises(ConfigError, match="interpolation"):
        pbt.settings_of(tmp_path, SPACE)


def test_odd_checkpoint_names_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "2026-01-01_00-00-00" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("0abc.pt", "1e5.pt", "9\n.pt"):
        (folder / name).write_text("x")
    assert pbt.newest_checkpoint(tmp_path, 9) is None
