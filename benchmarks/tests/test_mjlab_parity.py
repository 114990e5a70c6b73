"""Velocity tasks against recordings of mjlab: observations, rewards and models at the same states."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from parity import mjlab_models, mjlab_parity
from parity.mjlab_parity import CASES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def go1():
    return mjlab_parity.read("go1")


@pytest.mark.parametrize("name", CASES)
def test_terms_agree_with_mjlab_or_have_a_reason(name):
    rows = mjlab_parity.compare(name, mjlab_parity.read(name))
    assert [row for row in rows if not mjlab_parity.agrees(row)] == []
    strict = [row for row in rows if row["kind"] in ("actor", "reward") and "reason" not in row]
    assert len(strict) >= 13 and all(row["difference"] <= mjlab_parity.TOLERANCE for row in strict)


@pytest.mark.parametrize("name", CASES)
def test_compiled_models_equal_mjlab_models(name):
    assert mjlab_parity.compare_models(name, mjlab_parity.read(name)) == []


def test_recorded_states_cover_standing_falling_and_contact(go1):
    seen = go1["seen"]
    assert 0.2 < np.mean(seen["critic"]["foot_contact"]) < 0.8
    assert 0.05 < np.mean(seen["ends"]["fell_over"]) < 0.5
    for term, value in seen["rewards"].items():
        assert np.ptp(value) > 0.05, term


def test_differing_terms_are_reported_by_name(monkeypatch, capsys, tmp_path, go1):
    changed = copy.deepcopy(go1)
    changed["seen"]["rewards"]["pose"][3] += 0.01
    changed["weights"]["upright"] = 1.5
    changed["model"]["joint FR_calf_joint"]["armature"] = [0.01]
    monkeypatch.setattr(mjlab_parity, "read", lambda name: changed)
    monkeypatch.setattr("sys.argv", ["mjlab_parity.py", "--only", "go1", "--out", str(tmp_path / "out.json")])
    assert mjlab_parity.main() == 1
    lines = capsys.readouterr().out.rpartition("\n\n")[2].strip().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "go1 model",
        "go1 reward pose",
        "go1 weight upright",
    ]


def test_models_are_compared_by_name_to_five_digits():
    model = {"joint a": {"range": [0.0, 1.0]}, "site s": {"pos": [0.0]}}
    assert mjlab_models.differences(model, {"joint a": {"range": [0.0, 1.000001]}}) == []
    assert mjlab_models.differences({}, {"joint a": {"range": [0.0]}}) == [("joint a", "", False, True)]
    [(what, field, ours, theirs)] = mjlab_models.differences(model, {"joint a": {"range": [0.0, 1.01]}})
    assert (what, field, ours, theirs) == ("joint a", "range", [0.0, 1.0], [0.0, 1.01])
