"""Audit results and GPU targets, on invented CUDA results."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gpu import gpu_targets

PROBE = "probe facts as expected"
COUNTS = (256, 1024, 4096, 16384, 65536)
SIZES: dict[str, Any] = {"num_envs": 4096, "env_counts": COUNTS}


def test_only_metrics_row_is_allowed_transfer():
    def phase(to_device=0, to_host=(0, 0), syncs=0, wall_s=1.0, busy_s=0.9, occupied_s=0.99):
        return {
            "to_device": {"count": bool(to_device), "bytes": to_device},
            "to_host": {"count": to_host[0], "bytes": to_host[1]},
            "syncs": {"cudaEventSynchronize": syncs},
            "wall_s": wall_s,
            "busy_s": busy_s,
            "occupied_s": occupied_s,
        }

    about = {"num_envs": 8, "sim": "mjwarp", "precision": "bf16", "violations": [], "log_rows": 2}

    def read(**phases):
        return gpu_targets.read_audit({**about, "iterations": 2, "method": "trace", "phases": phases})

    clean = {"rollout": phase(), "update": phase(), "log": phase(to_host=(2, 208), syncs=2, wall_s=0.0)}
    found = read(**clean)
    assert (found["bytes_to_device"], found["bytes_to_host"], found["syncs"]) == (0, 0, 0)
    assert found["row_bytes"] == 104
    assert (found["busy"], found["occupied"]) == pytest.approx((0.9, 0.99))
    found = read(**clean, checkpoint=phase(to_host=(9, 9000), syncs=9))
    assert (found["bytes_to_host"], found["syncs"]) == (0, 0), "checkpoints are no part of a steady iteration"
    found = read(**(clean | {"rollout": phase(to_device=64, to_host=(1, 8), syncs=3)}))
    assert (found["bytes_to_device"], found["bytes_to_host"], found["syncs"]) == (32, 4, 1.5)
    found = read(**(clean | {"log": phase(to_host=(4, 400), syncs=4)}))
    assert (found["bytes_to_host"], found["syncs"]) == (100, 1)


OVER = {"training_over_physics": 0.74, "training_env_steps_per_s": 1.5e6}
BARE = {"kind": "physics", "settings": {"graph": "whole rollout and whole update (CUDA device)"}}
GOOD: dict[str, Any] = {
    "probe": {"status": "ok", "facts": {"versions": {"torch": "2.13", "wrong": []}, "device": {}}, "missing": []},
    "audit": {
        "status": "ok",
        "bytes_to_device": 0.0,
        "bytes_to_host": 0.0,
        "row_bytes": 104.0,
        "syncs": 0.0,
        "busy": 0.7,
        "occupied": 0.97,
    },
    "learn": {"status": "ok", "seconds_from_first_iteration": 8.0, "seconds_from_start_of_process": 14.0},
    "tests": {"status": "ok", "passed": 16, "failed": 0, "skipped": 0},
    "more_tests": {"status": "ok", "passed": 40, "failed": 0, "skipped": 2},
    "bench": {
        "status": "ok",
        "env_counts": [{"num_envs": num, "cases": [BARE], **OVER} for num in COUNTS],
    },
}


def judge(parts, *, on_cuda=True, full=True, **options) -> dict[str, Any]:
    found = gpu_targets.check_targets(parts, **SIZES, on_cuda=on_cuda, full=full, **options)
    return {each["name"]: each["ok"] for each in found}


def changed(part: str, **values: Any) -> dict[str, Any]:
    parts = copy.deepcopy(GOOD)
    parts[part].update(values)
    return parts


def test_all_targets_met():
    assert set(judge(GOOD).values()) == {True} and len(judge(GOOD)) == 11


@pytest.mark.parametrize(
    ("part", "values", "missed"),
    [
        ("audit", {"bytes_to_device": 4.0}, {"bytes host to device in a steady iteration"}),
        ("audit", {"bytes_to_host": 0.5}, {"bytes device to host in a steady iteration"}),
        ("audit", {"syncs": 1.0}, {"host waits in a steady iteration"}),
        ("audit", {"occupied": 0.94}, {"device busy"}),
        ("audit", {"occupied": None}, {"device busy"}),
        ("learn", {"seconds_from_first_iteration": 15.0}, {"Ant's return 3000 [s], aim"}),
        (
            "learn",
            {"seconds_from_first_iteration": 20.5},
            {"Ant's return 3000 [s]", "Ant's return 3000 [s], aim"},
        ),
        (
            "learn",
            {"seconds_from_first_iteration": None},
            {"Ant's return 3000 [s]", "Ant's return 3000 [s], aim"},
        ),
        ("probe", {"missing": ["bare physics"]}, {PROBE}),
        ("probe", {"facts": {"device": {"wrong": ["no memory pool"]}}}, {PROBE}),
        ("probe", {"facts": {"device": {"error": "RuntimeError: no driver"}}}, {PROBE}),
        ("probe", {"facts": {}}, {PROBE}),
        ("tests", {"failed": 1}, {"decisive GPU tests passed"}),
        ("tests", {"passed": 0}, {"decisive GPU tests passed"}),
        ("more_tests", {"status": "timed out"}, {"other GPU tests passed"}),
        (
            "bench",
            {"env_counts": GOOD["bench"]["env_counts"][:2]},
            {"training over bare physics, 4096 envs", "env counts measured"},
        ),
        (
            "bench",
            {"env_counts": [each | {"training_over_physics": 0.69} for each in GOOD["bench"]["env_counts"]]},
            {"training over bare physics, 4096 envs"},
        ),
        (  # physics that waits for Python is no valid reference
            "bench",
            {
                "env_counts": [
                    each | {"cases": [{"kind": "physics", "settings": {"graph": "off (the rollout cannot be)"}}]}
                    for each in GOOD["bench"]["env_counts"]
                ]
            },
            {"training over bare physics, 4096 envs"},
        ),
    ],
)
def test_missed_targets_are_found(part, values, missed):
    found = judge(changed(part, **values))
    assert {name for name, ok in found.items() if not ok} == missed
    assert None not in found.values()


def test_missed_aim_is_no_failure_but_missing_part_is():
    found = gpu_targets.check_targets(
        changed("learn", seconds_from_first_iteration=15.0), **SIZES, on_cuda=True, full=True
    )
    assert [each["name"] for each in found if each["ok"] is False and not each["aim"]] == []
    lines = gpu_targets.describe({"results": found, "parts": {}})
    assert any(line.startswith("not yet Ant's return 3000 [s], aim: 15, target <= 10") for line in lines)
    assert not any(line.startswith("MISSED") for line in lines)

    without = {name: part for name, part in GOOD.items() if name != "tests"}
    assert judge(without)["decisive GPU tests passed"] is False
    assert "decisive GPU tests passed" not in judge(without, asked=("audit", "learn", "bench"))
    failed = GOOD | {"audit": {"status": "failed", "error": "it crashed"}}
    [*_, last] = gpu_targets.check_targets(failed, **SIZES, on_cuda=True, full=True)
    assert (last["ok"], last["value"], last["note"]) == (False, None, "it crashed")


def test_wrong_facts_are_listed_one_by_one():
    facts = {"versions": {"wrong": ["torch 2.9 is outside of >=2.11", "numpy 1 is outside of >=1.26"]}, "device": {}}
    facts |= {"bare physics": {"error": "RuntimeError: CUDA error: 700"}}
    parts = {"probe": {"status": "failed", "error": "bare physics", "facts": facts, "missing": ["training"]}}
    [found] = gpu_targets.check_targets(parts, **SIZES, on_cuda=True, full=True, asked=("probe",))
    assert (found["ok"], found["value"]) == (False, "1 of 4")
    assert found["note"].split("; ") == [
        "versions: torch 2.9 is outside of >=2.11",
        "versions: numpy 1 is outside of >=1.26",
        "bare physics: RuntimeError: CUDA error: 700",
        "training: missing",
    ]


def test_small_sizes_skip_size_dependent_targets():
    found = judge(GOOD, full=False)
    assert {name for name, ok in found.items() if ok is None} == {
        "device busy",
        "Ant's return 3000 [s]",
        "Ant's return 3000 [s], aim",
        "training over bare physics, 4096 envs",
    }
    assert set(judge(GOOD, on_cuda=False).values()) == {None}
