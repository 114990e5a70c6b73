"""Tests of `export --c`: the C file, compiled, compared with the numpy runtime and with torch."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import helper

from gpusim_rl.deployed.c_source import FORMULAS, MOVES, c_source
from gpusim_rl.errors import ConfigError
from gpusim_rl.export.policy import OPERATIONS, DeployedPolicy, plain_function
from helpers.commands import ROOT, run_here
from helpers.exports import HOPPER, term, write_robot

CC = shutil.which("cc")
pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler here")
FLAGS = ("-std=c99", "-O1", "-Wall", "-Wextra", "-pedantic", "-Werror")
TERMS = [
    term("gyro", 3, "sensor gyro", 0.25, history=3),
    term("float", 1, "joint positions from the pose"),
    term('a[9]; system("ls"); float b', 1, "phase sine 0.8 0.5"),
    term("actions", 1, "last action", 2.0, history=2),
]
SIZE = 13
RNG = np.random.default_rng(0)
ARRAYS: dict[str, Any] = {
    "weight": RNG.normal(size=(20, SIZE)).astype(np.float32),
    "bias": RNG.normal(size=20).astype(np.float32),
    "square": RNG.normal(size=(SIZE, SIZE)).astype(np.float32),
    "last": RNG.normal(size=(20, 1)).astype(np.float32),
    "row": RNG.normal(size=(1, SIZE)).astype(np.float32),
    "one": np.float32(1),
    "two": np.float32(2),
    "order": np.array([5, 1, 1, 12]),
    "shape": np.array([-1, SIZE]),
    "axis": np.array([1]),
    "starts": np.array([2]),
    "ends": np.array([9]),
    "flat": np.array([1, -1]),
}
POLICY: list[Any] = [
    ["Gemm", ["obs", "weight", "bias"], "layer", {"transB": 1}],
    ["Elu", ["layer"], "unit", {}],
    ["MatMul", ["unit", "last"], "sum", {}],
    ["Tanh", ["sum"], "action", {}],
    ["Mul", ["action", "two"], "control", {}],
]
CASES: dict[str, list[Any]] = {  # operation: nodes from `obs` [1, 13] to `action`
    **{name: [[name, ["obs", "row"], "action", {}]] for name in ("Add", "Sub", "Mul", "Div", "Max", "Min")},
    **{name: [[name, ["obs"], "action", {}]] for name in ("Tanh", "Relu", "Sigmoid", "Elu")},
    "Clip": [["Sub", ["one", "two"], "low", {}], ["Clip", ["obs", "low", "one"], "action", {}]],
    "Pow": [["Pow", ["obs", "two"], "action", {}]],
    "Sqrt": [["Mul", ["obs", "obs"], "squared", {}], ["Sqrt", ["squared"], "action", {}]],
    "ReduceMean": [["ReduceMean", ["obs", "axis"], "mean", {"keepdims": 1}], ["Sub", ["obs", "mean"], "action", {}]],
    "ArgMax": [["ArgMax", ["obs"], "action", {"axis": 1}]],
    "MatMul": [["MatMul", ["obs", "square"], "action", {}]],
    "Gemm": [["Gemm", ["obs", "weight", "bias"], "action", {"transB": 1}]],
    "Gather": [["Gather", ["obs", "order"], "action", {"axis": 1}]],
    "Slice": [["Slice", ["obs", "starts", "ends", "axis"], "action", {}]],
    "Concat": [["Concat", ["row", "obs", "obs"], "action", {"axis": 1}]],
    "Reshape": [["Reshape", ["obs", "shape"], "action", {}]],
    "Unsqueeze": [["Unsqueeze", ["obs", "axis"], "action", {}]],
    "Squeeze": [["Unsqueeze", ["obs", "axis"], "high", {}], ["Squeeze", ["high", "axis"], "action", {}]],
}


def write_export(folder: Path, nodes: list[Any] = POLICY, terms: list[Any] = TERMS, **changes: Any) -> Path:
    """Write an export with a numpy version of a network; policy.onnx is not read by these tests."""
    made = [helper.make_node(name, sources, [result], **settings) for name, sources, result, settings in POLICY]
    files = {"onnx": "policy.onnx", "numpy": "policy.npz", "scene": "scene.xml"}
    write_robot(folder, terms, made, ARRAYS, HOPPER, **{"files": files, "task": '*/ "\\?', **changes})
    graph = {"nodes": nodes, "outputs": ["action", "control"]}
    if nodes is not POLICY:
        card = json.loads((folder / "policy.json").read_text())
        del card["control"]
        (folder / "policy.json").write_text(json.dumps(card))
        graph["outputs"] = ["action"]
    np.savez(folder / "policy.npz", graph=json.dumps(graph), **ARRAYS)
    return folder


def compiled(folder: Path) -> ctypes.CDLL:
    (folder / "policy.c").write_text(c_source(folder))
    command = [str(CC), *FLAGS, "-shared", "-fPIC", "policy.c", "-o", "policy.so", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "policy.so"))


def check(folder: Path) -> int:
    """Return the exit code of the file's own test."""
    subprocess.run([str(CC), *FLAGS, "-DPOLICY_TEST", "policy.c", "-o", "check", "-lm"], cwd=folder, check=True)
    return subprocess.run([folder / "check"], check=False).returncode


def network(library: ctypes.CDLL, obs: np.ndarray, outputs: int) -> np.ndarray:
    result, row = np.zeros((len(obs), outputs), np.float32), ctypes.POINTER(ctypes.c_float)
    for x, y in zip(obs, result, strict=True):
        library.policy_network(x.ctypes.data_as(row), y.ctypes.data_as(row))
    return result


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float((np.abs(got - expected) / np.maximum(1.0, np.abs(expected))).max())


def test_every_operation_has_a_formula():
    assert {*FORMULAS, *MOVES, "Gemm", "MatMul", "ReduceMean", "ArgMax"} == {*OPERATIONS} == {*CASES}


def test_operations_in_c_equal_numpy(tmp_path):
    nodes: list[Any] = []
    for case, steps in CASES.items():
        renamed = {result: f"{case}.{result}" for _, _, result, _ in steps}
        nodes += [[op, [renamed.get(s, s) for s in sources], renamed[r], more] for op, sources, r, more in steps]
        nodes.append(["Reshape", [f"{case}.action", "flat"], f"{case}.row", {}])
    nodes.append(["Concat", [f"{case}.row" for case in CASES], "action", {"axis": 1}])
    obs = np.random.default_rng(1).normal(size=(50, SIZE)).astype(np.float32)
    terms = [term("all", SIZE, "sensor gyro")]
    folder = write_export(tmp_path / "export", nodes, terms, action={"size": 305, "dtype": "float32"})
    run = plain_function((folder / "policy.npz").read_bytes())
    expected = np.stack([run({"obs": row[None]})[0][0] for row in obs])
    assert relative(network(compiled(folder), obs, expected.shape[1]), expected) < 1e-5


@pytest.mark.parametrize("bias", [0.0, 0.3])  # of the encoder [rad]
def test_history_and_last_action_equal_the_runtime(tmp_path, bias):
    joint = {"name": "knee", "qpos": 7, "qvel": 6, "default": 0.0, "range": [-1.0, 1.0], "encoder_bias": bias}
    folder = write_export(tmp_path / "export", joints=[joint])
    library, policy = compiled(folder), DeployedPolicy(folder, plain=True)
    state, values = (ctypes.c_float * (SIZE + 2))(), np.random.default_rng(2).normal(size=(8, 5)).astype(np.float32)
    action, control = (ctypes.c_float * 1)(), (ctypes.c_float * 1)()
    for _ in range(2):  # episodes
        library.policy_reset(state)
        policy.reset()
        for row in values:
            given = (ctypes.c_float * 5)(*row)
            assert library.policy_act(state, given, action, control) == 0
            parts = np.split(row, [3, 4])
            names = ("gyro", "float", TERMS[2]["name"])
            expected, targets = policy.act(dict(zip(names, parts, strict=True)))
            assert [*action] == pytest.approx([*expected], abs=1e-6)
            assert [*control] == pytest.approx([*targets.values()], abs=1e-6)


def test_non_finite_reading_is_reported_and_not_stored(tmp_path):
    library = compiled(write_export(tmp_path / "export"))
    state, action = (ctypes.c_float * (SIZE + 2))(), (ctypes.c_float * 2)()
    library.policy_reset(state)
    given = (ctypes.c_float * 5)(0.0, 0.0, 0.0, float("nan"), 0.0)
    assert library.policy_act(state, given, action, action) == 2
    assert not any(state) and not any(action)


def test_check_fails_for_other_weights(tmp_path):
    folder = write_export(tmp_path / "export")
    (folder / "policy.c").write_text(c_source(folder))
    assert check(folder) == 0
    text = (folder / "policy.c").read_text()
    (folder / "policy.c").write_text(text.replace("* expm1f", "* 1.01f * expm1f"))
    assert check(folder) == 1


def test_names_in_an_export_do_not_become_code(tmp_path):
    text = c_source(write_export(tmp_path / "export"))
    fields = text.partition("typedef struct {\n")[2].partition("}")[0].split("\n")
    assert [line.strip() for line in fields] == ["float gyro[3];", "float term_1_[1];", "float term_2_[1];", ""]
    assert r"\"*/ \\\"\\\\\?\"" in text.partition("policy_card")[2]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"recurrent_state": [{"input": "state_0"}]}, "recurrent policies"),
        ({"files": {"onnx": "policy.onnx"}}, "networks without policy.npz"),
        ({"files": {"numpy": "../../policy.npz"}}, "damaged export"),
        ({"nodes": [["Einsum", ["obs"], "action", {}]]}, "damaged export: no entry 'Einsum'"),
        ({"nodes": [["MatMul", ["square", "obs"], "action", {}]]}, "two computed values"),
        ({"nodes": [[]]}, "damaged export"),
        ({"action": {"size": 3, "dtype": "float32"}}, "1 actions, the card 3"),
        ({"observation": {"size": 1 << 40, "terms": TERMS}}, "damaged export"),
        ({"observation": {"size": SIZE, "terms": [term("x", 1, "sensor gyro", history=1 << 30)]}}, "the terms have"),
    ],
)
def test_unsuitable_export_is_refused_in_one_line(tmp_path, changes, words):
    folder = write_export(tmp_path / "export", **{"nodes": POLICY, **changes})
    with pytest.raises(ConfigError, match=words) as raised:
        c_source(folder)
    assert "\n" not in str(raised.value)


def test_command_adds_the_file_to_an_export(tmp_path):
    folder = write_export(tmp_path / "export")
    command = (ROOT / "tools" / "export.py", "export", "--c")
    assert run_here(*command, cwd=tmp_path).returncode == 0 and (folder / "policy.c").is_file()
    assert run_here(*command, cwd=tmp_path).refuses("already exists")
    assert run_here(*command, "--overwrite", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_go1_in_c_equals_torch_on_ten_thousand_observations(exported, tmp_path):
    folder = shutil.copytree(exported("Go1Velocity"), tmp_path / "export")
    size = json.loads((folder / "policy.json").read_text())["observation"]["size"]
    obs = (3.0 * np.random.default_rng(0).standard_normal((10_000, size))).astype(np.float32)
    got = network(compiled(folder), obs, 24)
    with torch.no_grad():
        expected = torch.cat(torch.jit.load(folder / "policy.ts")(torch.from_numpy(obs)), dim=1).numpy()
    assert relative(got, expected) < 1e-5
    assert check(folder) == 0
