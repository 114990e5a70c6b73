"""Folders of studies from strangers: what is in them is data, or one line."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpusim_rl.distributed import pbt, ray_search, trial_run
from gpusim_rl.distributed.search import Search, SearchConfig
from gpusim_rl.distributed.tuning import Study
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


@pytest.fixture
def search(tmp_path: Path) -> Search:
    """A study of four trials: two complete, one pruned, one failed."""
    search = search_in(tmp_path)
    study = Study(search)
    for number, state in enumerate(("COMPLETE", "COMPLETE", "PRUNED", "FAIL")):
        trial = study.trials.ask(study.distributions())
        trial.set_user_attr("run", str(search.runs_of(number) / f"2026-01-01_00-00-0{number}"))
        trial.report(1.0 + number, 1)
        trial.should_prune()
        if state == "FAIL":
            trial.set_user_attr("failed", "it stalled")
        value = 2.0 + number if state == "COMPLETE" else None
        study.trials.tell(trial, value, state=study.optuna.trial.TrialState[state])
    return search


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    return file


# Links and pipes

NAMES = (
    "poles/journal.log",
    "poles/journal.log.lock",
    "poles/0000.log",
    "poles/0007.log",
    "poles/trials.csv",
    "poles/importance.png",
    "poles/lineage.png",
    "poles/population.csv",
    "poles/ray.lock",
    "poles/ray",
    "poles.0000",
    "poles.0000/2026-01-01_00-00-00",
    "poles.0000/2026-01-01_00-00-00/config.yaml",
    "poles.0000/2026-01-01_00-00-00/checkpoints/000004.pt",
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
@pytest.mark.parametrize("name", NAMES)
def test_a_study_with_a_link_or_a_pipe_is_one_line(search: Search, secret: Path, name: str, kind: str) -> None:
    path = search.folder.parent / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(secret if kind == "link" else secret.with_name("new"))
    with pytest.raises(ConfigError) as error:
        Study(search)
    assert str(path) in str(error.value) and "Try removing it" in str(error.value) and "\n" not in str(error.value)
    assert secret.read_bytes() == SECRET and not secret.with_name("new").exists()


def test_a_study_that_is_a_link_to_another_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "poles").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"poles is a link to .*elsewhere"):
        Study(search_in(tmp_path))
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_latest_may_lead_to_the_newest_run(search: Search) -> None:
    folder = search.runs_of(0)
    (folder / "2026-01-01_00-00-00").mkdir(parents=True)
    (folder / "latest").symlink_to("2026-01-01_00-00-00")
    (folder / ".latest-2026-01-01_00-00-01-77").symlink_to("2026-01-01_00-00-01")  # of a run that begins now
    assert Study(search).num_ended == 4


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["link", "pipe", "second name"])
@pytest.mark.parametrize("name", ["journal.log", "0000.log", "ray.lock", "population.csv"])
def test_no_file_is_written_by_way_of_another_name(tmp_path: Path, secret: Path, name: str, kind: str) -> None:
    """Each opening is safe by itself: a link may come after the look at the folder."""
    search = search_in(tmp_path)
    study = Study(search) if name == "journal.log" else None
    search.folder.mkdir(parents=True, exist_ok=True)
    path = search.folder / name
    path.unlink(missing_ok=True)
    make: dict[str, Callable[[], None]] = {
        "link": lambda: path.symlink_to(secret),
        "pipe": lambda: os.mkfifo(path),
        "second name": lambda: path.hardlink_to(secret),
    }
    make[kind]()

    def write() -> None:
        if study is not None:
            study.trials.set_user_attr("kept", 1)
        elif name == "0000.log":
            trial_run.TrialRun(search, 0, {}).end()
        elif name == "ray.lock":
            with ray_search._alone(search.folder):
                pass
        else:
            pbt.add_row(search.folder, {"trial": 0})

    with pytest.raises(ConfigError, match=f"{name} is "):
        write()
    assert secret.read_bytes() == SECRET


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["population.csv", "metrics.csv"])
def test_no_file_is_read_by_way_of_another_name(tmp_path: Path, name: str) -> None:
    search = search_in(tmp_path)
    search.folder.mkdir(parents=True)
    os.mkfifo(search.folder / name)
    with pytest.raises(ConfigError, match="a named pipe"):
        pbt.read_rows(search) if name == "population.csv" else trial_run._rows(search.folder / name)


def test_pictures_take_the_place_of_links(search: Search, secret: Path) -> None:
    study = Study(search)
    for name in ("parallel_coordinates.png", "importance.png"):
        (search.folder / name).symlink_to(secret)
    lines = study.report()
    assert "picture: " in lines[-1]
    assert secret.read_bytes() == SECRET and not (search.folder / "importance.png").is_symlink()


# Records

TRIAL = {"op_code": 4, "worker_id": "x", "study_id": 0, "datetime_start": "2026-01-01T00:00:00+00:00"}
RATE = '{"name": "FloatDistribution", "attributes": {"step": null, "low": 1e-06, "high": 0.01, "log": true}}'
KIND = '{"name": "CategoricalDistribution", "attributes": {"choices": [1, 4]}}'
TARGET = '{"name": "CategoricalDistribution", "attributes": {"choices": ["shutil.rmtree"]}}'
PARAM = {"op_code": 5, "worker_id": "x", "trial_id": 4, "param_name": "ppo.learning_rate"}
ENDED = {"op_code": 6, "worker_id": "x", "trial_id": 4, "datetime_complete": "2026-01-01T00:00:00+00:00"}
VALUE = {"op_code": 7, "worker_id": "x", "trial_id": 4}
ODD: dict[str, Any] = {
    "a list": [1, 2],
    "a number": 7,
    "nothing": {},
    "no worker": {key: value for key, value in TRIAL.items() if key != "worker_id"},
    "unknown operation": {**TRIAL, "op_code": 77},
    "operation of another type": {**TRIAL, "op_code": [4]},
    "deletes the study": {"op_code": 1, "worker_id": "x", "study_id": 0},
    "another direction": {"op_code": 0, "worker_id": "x", "study_name": "poles", "directions": [1, 2]},
    "settings of another type": {"op_code": 2, "worker_id": "x", "study_id": 0, "user_attr": {"search": [1]}},
    "attribute of Optuna's": {"op_code": 3, "worker_id": "x", "study_id": 0, "system_attr": {"x": 1}},
    "trial that waits": {**TRIAL, "state": 4},
    "trial with a class": {
        **TRIAL,
        "state": 4,
        "distributions": {"task._target_": TARGET},
        "params": {"task._target_": 0},
        "system_attrs": {"fixed_params": {"task._target_": "shutil.rmtree"}},
    },
    "time of another type": {**TRIAL, "datetime_start": 3},
    "time before all": {**TRIAL, "datetime_start": "0001-01-01T00:00:00+23:59"},
    "study of another type": {**TRIAL, "study_id": []},
    "study id huge": {**TRIAL, "study_id": 10**4000},
    "complete without a value": {**TRIAL, "state": 1, "value": None},
    "complete with NaN": {**TRIAL, "state": 1, "value": float("nan")},
    "complete with a huge value": {**TRIAL, "state": 1, "value": 10**400},
    "complete with text": {**TRIAL, "state": 1, "value": "7"},
    "complete with two values": {**TRIAL, "state": 1, "values": [1.0, 2.0]},
    "state of another type": {**TRIAL, "state": "1"},
    "number of another type": {**TRIAL, "user_attrs": {"number": "a"}},
    "number huge": {**TRIAL, "user_attrs": {"number": 10**30}},
    "run of another type": {**TRIAL, "user_attrs": {"run": {"a": 1}}},
    "attributes of another type": {**TRIAL, "user_attrs": [1]},
    "intermediate values of another type": {**TRIAL, "intermediate_values": {"a": 1.0}},
    "params without distributions": {**TRIAL, "params": {"ppo.epochs": 1}},
    "choice that there is not": {**TRIAL, "params": {"ppo.epochs": 9}, "distributions": {"ppo.epochs": KIND}},
    "param of another type": {**PARAM, "param_value_internal": "0.001", "distribution": RATE},
    "param that is NaN": {**PARAM, "param_value_internal": float("nan"), "distribution": RATE},
    "param outside": {**PARAM, "param_value_internal": 7.0, "distribution": RATE},
    "distribution of another type": {**PARAM, "param_value_internal": 1e-3, "distribution": 3},
    "unknown distribution": {**PARAM, "param_value_internal": 1e-3, "distribution": '{"name": "os.system"}'},
    "distribution of a list": {**PARAM, "param_value_internal": 1e-3, "distribution": "[]"},
    "ended without values": {**ENDED, "state": 1, "values": None},
    "ended with infinity": {**ENDED, "state": 1, "values": [float("inf")]},
    "ended with text": {**ENDED, "state": 2, "values": ["a"]},
    "made to wait": {**ENDED, "state": 4, "values": None},
    "ended without a time": {key: value for key, value in ENDED.items() if key != "datetime_complete"}
    | {"state": 3, "values": None},
    "reported text": {**VALUE, "step": 1, "intermediate_value": "a"},
    "reported NaN": {**VALUE, "step": 1, "intermediate_value": float("nan")},
    "reported at a step of another type": {**VALUE, "step": "a", "intermediate_value": 1.0},
    "reported at a step below 0": {**VALUE, "step": -1, "intermediate_value": 1.0},
    "rung of another type": {"op_code": 9, "worker_id": "x", "trial_id": 4, "system_attr": {"completed_rung_0": "a"}},
    "two attributes": {"op_code": 8, "worker_id": "x", "trial_id": 4, "user_attr": {"run": "a", "failed": "b"}},
    "failed of another type": {"op_code": 8, "worker_id": "x", "trial_id": 4, "user_attr": {"failed": 3}},
}


def append(search: Search, *records: Any) -> None:
    with (search.folder / "journal.log").open("a") as journal:
        journal.writelines(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_record_is_one_line(search: Search, name: str) -> None:
    records = [TRIAL, ODD[name]] if isinstance(ODD[name], dict) and "trial_id" in ODD[name] else [ODD[name]]
    number = len((search.folder / "journal.log").read_bytes().splitlines()) + len(records)
    append(search, *records, TRIAL)
    with pytest.raises(ConfigError) as error:
        Study(search).report()
    text = str(error.value)
    assert f"journal.log: line {number} is not a record" in text and "Try removing the line" in text, text


@pytest.mark.parametrize(
    "line", [b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"1" * 10_000 + b"\n", b'"' + b"x" * (2 << 20) + b'"\n', b"\0" * 40]
)
def test_a_line_that_is_no_json_is_one_line(search: Search, line: bytes) -> None:
    with (search.folder / "journal.log").open("ab") as journal:
        journal.write(line + 2 * (json.dumps(TRIAL).encode() + b"\n"))
    with pytest.raises(ConfigError, match=r"journal\.log: line \d+ is "):
        Study(search)


def test_an_odd_record_of_another_member_ends_this_one_in_one_line(search: Search) -> None:
    study = Study(search)
    append(search, {**TRIAL, "state": "x"})
    with pytest.raises(ConfigError, match=r"journal\.log: line \d+ is not a record"):
        study.trials.ask(study.distributions())


def test_trials_of_other_settings_are_one_line(search: Search) -> None:
    more = {"distributions": {"task._target_": TARGET}, "params": {"task._target_": 0}, "state": 1, "value": 9.0}
    append(search, {**TRIAL, **more})
    with pytest.raises(ConfigError, match=r"trial 4 has task\._target_, which is not in the space"):
        Study(search)


def test_no_text_of_the_journal_is_offered_as_a_command(search: Search) -> None:
    text = "python train.py task=Cartpole; rm -rf ~"
    hostile = {"command": text, "log": "../../x", "run": "/home/$(rm -rf ~)\n"}
    more = {"distributions": {"ppo.epochs": KIND}, "params": {"ppo.epochs": 1}, "state": 1, "value": 9.0}
    append(search, {**TRIAL, **more, "user_attrs": hostile})
    lines = Study(search).report()
    assert not [line for line in lines if "rm -rf" in line]
    assert "  python train.py task=Cartpole ppo.epochs=4" in lines
    assert "rm -rf" not in (search.folder / "trials.csv").read_text()


def test_whatever_a_record_becomes_there_is_no_traceback(search: Search) -> None:
    chance, file = random.Random(0), search.folder / "journal.log"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    values = [None, True, -1, 10**30, float("nan"), "", "a", [], [1.0], {}, {"a": 1}, {"search": {}}, "1", 0, 7]
    refused = 0
    for _ in range(60):
        changed = json.loads(json.dumps(records))
        for _ in range(chance.randint(1, 3)):
            record = chance.choice(changed)
            key = chance.choice([*record, "state", "user_attrs"])
            if chance.random() < 0.2:
                record.pop(key, None)
            else:
                record[key] = chance.choice(values)
        if chance.random() < 0.2:
            chance.shuffle(changed)
        file.write_text("".join(json.dumps(record) + "\n" for record in changed))
        try:
            study = Study(search)
            trial = study.trials.ask(study.distributions())
            trial.report(1.0, 1)
            trial.should_prune()
            study.trials.tell(trial, 1.0)
            study._draw, draw = list, study._draw  # slow
            study.report()
            if chance.random() < 0.1:
                draw()
        except ConfigError:
            refused += 1
    assert 8 < refused < 60


# Populations


def rows_of(search: Search, *rows: str) -> None:
    search.folder.mkdir(parents=True, exist_ok=True)
    names = "trial,iteration,score,since,parent,run,ppo.learning_rate,ppo.epochs"
    (search.folder / "population.csv").write_text("\n".join([names, *rows]) + "\n")


GOOD = "1,4,2.5,0,0,x,0.001,4"


@pytest.mark.parametrize(
    "row",
    [
        "a,4,2.5,0,0,x,0.001,4",
        "-1,4,2.5,0,0,x,0.001,4",
        f"{10**400},4,2.5,0,0,x,0.001,4",
        "9,4,2.5,0,0,x,0.001,4",
        "1,nan,2.5,0,0,x,0.001,4",
        "1,4,nan,0,0,x,0.001,4",
        "1,4,1e999,0,0,x,0.001,4",
        "1,4,2.5,inf,0,x,0.001,4",
        "1,4,2.5,0,77,x,0.001,4",
        "1,4,2.5,0,0,x,nan,4",
        "1,4,2.5,0,0,x,7.0,4",
        r"1,4,2.5,0,0,x,0.001,$\frac{$",
        "1,4,2.5,0,0,x,0.001",
        "1,4,2.5,0,0,x,0.001,4,5,6",
        "\0,4,2.5,0,0,x,0.001,4",
        "1,4,2.5,0,0," + "x" * 200_000 + ",0.001,4",
        "\x80,4",
    ],
)
def test_an_odd_row_of_a_population_is_left_out_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str
) -> None:
    search = search_in(tmp_path, method="pbt")
    rows_of(search, GOOD, row, GOOD.replace("1,4", "2,8", 1))
    assert [kept["trial"] for kept in pbt.read_rows(search)] == ["1", "2"]
    assert "population.csv: 1 row that is not of this search is left out" in capsys.readouterr().err


def test_what_is_left_of_a_population_is_drawn(tmp_path: Path) -> None:
    search = search_in(tmp_path, method="pbt")
    rows_of(search, GOOD, "\0", GOOD.replace("1,4", "2,8", 1))
    assert pbt.report(search)[-1].startswith("picture: ")


def test_a_table_of_other_columns_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = search_in(tmp_path, method="pbt")
    search.folder.mkdir(parents=True)
    (search.folder / "population.csv").write_text("a,b\n1,2\n")
    assert pbt.report(search) == []
    assert "left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        {"ppo": {"learning_rate": 1e-3, "epochs": "1 task._target_=x"}},
        {"ppo": {"learning_rate": 7.0, "epochs": 1}},
        {"ppo": {"learning_rate": True, "epochs": 1}},
        {"ppo": {"learning_rate": float("nan"), "epochs": 1}},
        {"ppo": {"learning_rate": 1e-3, "epochs": True}},
        {"ppo": 3},
        [],
    ],
)
def test_settings_of_a_member_are_of_the_space_or_left_out(
    tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "2026-01-01_00-00-00"
    run.mkdir()
    (run / "config.yaml").write_bytes(dump_yaml(config))
    assert pbt.settings_of(run, SPACE) is None
    assert str(run) in capsys.readouterr().err


def test_settings_of_a_member_with_an_interpolation_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(dump_yaml({"ppo": {"learning_rate": "${oc.env:HOME}", "epochs": 1}}))
    with pytest.raises(ConfigError, match="interpolation"):
        pbt.settings_of(tmp_path, SPACE)


def test_a_member_goes_on_with_its_settings(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(dump_yaml({"ppo": {"learning_rate": 1e-3, "epochs": 4, "clip": 0.2}}))
    assert pbt.settings_of(tmp_path, SPACE) == {"ppo.learning_rate": 1e-3, "ppo.epochs": 4}


def test_names_of_checkpoints_may_be_odd(tmp_path: Path) -> None:
    folder = tmp_path / "2026-01-01_00-00-00" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("0abc.pt", "1e5.pt", "9\n.pt"):
        (folder / name).write_text("x")
    assert pbt.newest_checkpoint(tmp_path, 9) is None


def test_the_folder_of_a_trial_is_no_link(search: Search, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    search.runs_of(9).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"poles\.0009 is a link"):
        Study(replace(search, folder=search.folder.absolute()))
