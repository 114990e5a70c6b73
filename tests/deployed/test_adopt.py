"""Tests of the command `adopt`: others' contracts and networks, hostile files, search over contract errors."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper

from gpusim_rl.deployed import contract_formats, contract_search, network_file
from gpusim_rl.deployed.adopt import Body, write_folder
from gpusim_rl.deployed.contract import Contract, Inputs
from gpusim_rl.deployed.contract_search import Candidate, ContractSearch, corrections
from gpusim_rl.deployed.walkers import Walkers
from gpusim_rl.errors import ConfigError
from gpusim_rl.export import parity
from helpers.commands import ROOT, load_file

WHEELS = ("left_front", "left_rear", "right_front", "right_rear")
ROVER = (
    '<mujoco><worldbody><geom type="plane" size="5 5 1"/><body name="base" pos="0 0 0.2"><freejoint/>'
    '<geom type="box" size="0.3 0.15 0.05" mass="3"/>'
    + "".join(
        f'<body name="{name}" pos="{0.2 if "front" in name else -0.2} {0.2 if "left" in name else -0.2} 0">'
        f'<joint name="{name}_joint" axis="0 1 0" armature="0.01"/>'
        '<geom type="sphere" size="0.1" mass="0.3" friction="0.6"/></body>'
        for name in WHEELS
    )
    + "</body></worldbody></mujoco>"
)
ROVER_CONTRACT = {
    "joints": [*WHEELS],
    "pose": 0.0,
    "kp": 2.0,
    "kd": 0.4,
    "terms": [{"kind": "projected_gravity"}, {"kind": "joint_pos_rel"}, {"kind": "velocity_commands"}],
    "action_scale": 1.0,
}


@pytest.fixture
def rover(tmp_path: Path) -> Body:
    (tmp_path / "rover.xml").write_text(ROVER)
    return Body.open(str(tmp_path / "rover.xml"))


def rover_weights() -> np.ndarray:
    """Return weights with which each target leads its wheel in proportion to the command."""
    weights = np.zeros((10, 4), np.float32)
    weights[3:7] = np.eye(4)
    weights[7], weights[9] = 2.0, [-2.0, -2.0, 2.0, 2.0]
    return weights


def linear(
    weights: np.ndarray, *, batch: int | str = 1, names: tuple[str, str] = ("obs", "actions")
) -> onnx.ModelProto:
    """Return a network with one matrix."""
    return model([helper.make_node("MatMul", [names[0], "w"], [names[1]])], {"w": weights}, weights.shape, batch, names)


def model(nodes, weights, sizes, batch: int | str = 1, names=("obs", "actions"), kind=TensorProto.FLOAT, **settings):
    """Return a model from `names[0]` [batch, sizes[0]] to `names[1]` [batch, sizes[1]]."""
    ends = [helper.make_tensor_value_info(n, kind, [batch, size]) for n, size in zip(names, sizes, strict=True)]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "policy", ends[:1], ends[1:], tensors)
    opsets = settings.pop("opset_imports", [helper.make_opsetid("", 18)])
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, **settings)


def saved(folder: Path, network: onnx.ModelProto) -> Path:
    file = folder / "policy.onnx"
    file.write_bytes(network.SerializeToString())
    return file


def node(operator: str, inputs: str = "obs", output: str = "actions", **attributes) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(" "), [output], **attributes)


W = np.ones((4, 2), np.float32)
BRANCH = helper.make_graph([node("Identity", "w", "a")], "b", [], [helper.make_tensor_value_info("a", 1, [4, 2])])
HALF = linear(W.astype(np.float16))
for end in (*HALF.graph.input, *HALF.graph.output):
    end.type.tensor_type.elem_type = TensorProto.FLOAT16
TWO = linear(W)
TWO.graph.input.append(helper.make_tensor_value_info("time_step", TensorProto.FLOAT, [1, 1]))
CUSTOM = [helper.make_opsetid("", 18), helper.make_opsetid("evil", 1)]
HOSTILE = {
    "custom operator": (model([node("Run", domain="evil")], {}, (4, 2), opset_imports=CUSTOM), "evil"),
    "control flow": (
        model(
            [node("If", "c", "m", then_branch=BRANCH, else_branch=BRANCH), node("MatMul", "obs m")],
            {"w": W, "c": np.array(True)},
            (4, 2),
        ),
        "If",
    ),
    "data-dependent size": (model([node("NonZero", "obs", "i"), node("Cast", "i", to=1)], {}, (4, 2)), "NonZero"),
    "two inputs": (TWO, "time_step"),
    "float16": (HALF, "float16"),
    "dynamic inputs": (model([node("Relu")], {}, ("n", "n")), "a fixed number"),
    "three axes": (
        helper.make_model(
            helper.make_graph(
                [node("Relu")], "g", *[[helper.make_tensor_value_info(n, 1, [1, 2, 3])] for n in ("obs", "actions")]
            )
        ),
        "a fixed number",
    ),
    "several outputs": (
        model([node("Relu", "obs", "a"), node("Relu", "obs", "b")], {}, (4, 4), names=("obs", "a")),
        None,
    ),
    "one row only": (model([node("Reshape", "obs s")], {"s": np.array([1, 4])}, (4, 4)), "batch"),
    "large result": (
        model(
            [node("Add", "a b", "c"), node("ReduceSum", "c", "d", keepdims=0), node("Mul", "obs d")],
            {"a": np.ones((3000, 1), np.float32), "b": np.ones((1, 3000), np.float32)},
            (4, 4),
        ),
        "large",
    ),
    "wrong weights": (
        model([node("MatMul", "obs w")], {"w": np.ones((5, 2), np.float32)}, (4, 2)),
        "not a valid ONNX file",
    ),
    "not a number": (linear(np.full((4, 2), np.nan, np.float32)), "batch"),
    "old operators": (model([node("Relu")], {}, (4, 4), opset_imports=[helper.make_opsetid("", 7)]), "opset"),
}
HOSTILE["several outputs"][0].graph.output.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [1, 4]))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_network_is_rejected_in_one_line(tmp_path, name):
    network, word = HOSTILE[name]
    with pytest.raises(ConfigError) as error:
        network_file.read_network(saved(tmp_path, network))
    text = str(error.value)
    assert "\n" not in text and str(tmp_path) in text and (word or "outputs") in text


def external(tensor: onnx.TensorProto, **entries: object) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)


@pytest.mark.parametrize("location", ["/etc/hostname", "../policy.onnx.data", "weights.bin", "policy.onnx.data"])
def test_weights_come_from_the_sibling_file_only(tmp_path, location):
    network, weights = linear(W), np.arange(8, dtype=np.float32).reshape(4, 2)
    external(network.graph.initializer[0], location=location, offset=4, length=32)
    (tmp_path / "policy.onnx.data").write_bytes(b"????" + weights.tobytes())
    file = saved(tmp_path, network)
    if location != "policy.onnx.data":
        with pytest.raises(ConfigError, match=r"policy\.onnx\.data"):
            network_file.read_network(file)
        return
    obs = np.ones((3, 4), np.float32)
    assert np.allclose(network_file.load(network_file.read_network(file))(obs), obs @ weights)
    (tmp_path / "policy.onnx.data").write_bytes(b"????")
    with pytest.raises(ConfigError, match="ends before"):
        network_file.read_network(file)
    (tmp_path / "policy.onnx.data").unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        network_file.read_network(file)


@pytest.mark.parametrize("content", [b"", b"\x08\x08" * 40, b"<html>" * 100])
def test_damaged_and_large_files_are_rejected(tmp_path, content, monkeypatch):
    (tmp_path / "policy.onnx").write_bytes(content)
    with pytest.raises(ConfigError):
        network_file.read_network(tmp_path / "policy.onnx")
    monkeypatch.setattr(network_file, "BYTES", 10)
    with pytest.raises(ConfigError, match="too large"):
        network_file.read_network(saved(tmp_path, linear(W)))


BAD = {
    "terms": {"terms": [{"kind": "joint_po"}]},
    "scal": {"terms": [{"kind": "joint_pos", "scal": 1.0}]},
    "kp": {"kp": [1.0, 2.0, 3.0]},
    "no joint": {"joints": ["left_front", "left_wing"]},
    "twice": {"joints": ["left_front", "left_front_joint"]},
    "frames": {"layout": "frame"},
    "unknown key": {"gains": 1.0},
    "pose": {"pose": "home"},
    "control_hz": {"control_hz": math.nan},
    "joint_pos: scale": {"terms": [{"kind": "joint_pos", "scale": [1.0, 2.0, 3.0]}]},
    "history": {"terms": [{"kind": "joint_pos", "history": 10_000}]},
    "period": {"terms": [{"kind": "gait_phase"}], "phase": {"period": -1.0}},
    "commands": {"commands": {"z": [0.0, 1.0]}},
    "same history": {"layout": "frames", "terms": [{"kind": "joint_pos", "history": 2}, {"kind": "joint_vel"}]},
    "negative": {"kd": -1.0},
    "target_clip": {"target_clip": [[-1.0, 1.0]]},
}


@pytest.mark.parametrize("word", BAD)
def test_invalid_contract_is_rejected_in_one_line(tmp_path, rover, word):
    file = tmp_path / "contract.yaml"
    file.write_text(yaml.safe_dump({**ROVER_CONTRACT, "joints": ["left_front", "left_rear"], **BAD[word]}))
    with pytest.raises(ConfigError) as error:
        contract_formats.read_contract(file, {}, 10, rover)
    assert word in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["[1, 2]", "!!python/object/apply:os.system [ls]", "a: &x [1]\nb: *x", "joints:\n  - {[: ]"]
)
def test_contract_file_is_plain_yaml(tmp_path, rover, text):
    file = tmp_path / "contract.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"contract\.yaml"):
        contract_formats.read_contract(file, {}, 10, rover)


def unitree(**changes: object) -> dict:
    """Return a deploy.yaml for Go2, whose policy starts with the front left leg, and whose motors with the right."""
    ids = [3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8]
    terms = {
        "base_ang_vel": {"params": {}, "clip": None, "scale": [0.2, 0.2, 0.2], "history_length": 1},
        "velocity_commands": {"params": {}, "clip": [-1.0, 1.0], "scale": None, "history_length": 1},
        "joint_pos": {"params": {}, "clip": None, "scale": [1.0] * 12, "history_length": 2},
        "gait_phase": {"params": {"period": 0.6}, "clip": None, "scale": None, "history_length": 1},
    }
    return {
        "joint_ids_map": ids,
        "step_dt": 0.02,
        "stiffness": [float(i) for i in range(12)],
        "damping": [1.0] * 12,
        "default_joint_pos": [0.1 * i for i in range(12)],
        "commands": {"base_velocity": {"ranges": {"lin_vel_x": [-0.5, 1.0], "heading": None}}},
        "actions": {"JointPositionAction": {"clip": None, "scale": [0.25] * 12, "offset": [0.0] * 12}},
        "observations": terms,
        **changes,
    }


def test_unitree_yaml_has_gains_in_motor_order(tmp_path):
    body, file = Body.open("go2"), tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(unitree(), sort_keys=False))
    contract = contract_formats.read_contract(file, {}, 32, body)
    assert contract is not None
    assert contract.joints[:2] == ("FL_hip_joint", "FL_thigh_joint") and contract.kp[:4] == (3.0, 4.0, 5.0, 0.0)
    assert contract.pose[:2] == (0.0, 0.1) and contract.action_offset == (0.0,) * 12
    assert [term.kind for term in contract.terms] == [*unitree()["observations"]]
    assert contract.terms[0].scale == 0.2 and contract.terms[1].clip == [-1.0, 1.0]
    assert contract.phase.source("sine", 0.0) == "phase sine 0.6 0.0" and contract.phase.offsets == (0.0,)
    assert contract.commands == {"x": [-0.5, 1.0], "y": None, "yaw": None} and contract.size == 3 + 3 + 24 + 2


@pytest.mark.parametrize(
    "changes",
    [{"joint_ids_map": [99]}, {"actions": {}}, {"stiffness": [1.0]}, {"observations": {"height": {}}}, {"step_dt": 0}],
)
def test_damaged_unitree_yaml_is_rejected_in_one_line(tmp_path, changes):
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump(unitree(**changes)))
    with pytest.raises(ConfigError, match=r"deploy\.yaml"):
        contract_formats.read_contract(file, {}, 32, Body.open("go2"))


MJLAB = {
    "joint_names": ",".join(WHEELS),
    "joint_stiffness": "2.000,2.000,2.000,2.000",
    "joint_damping": "0.400,0.400,0.400,0.400",
    "default_joint_pos": "0.100,0.000,0.000,0.000",
    "observation_names": "base_lin_vel,joint_pos,actions,command",
    "observation_terms_scale": "2.000,1.000,1.000,1.000;1.000;0.250",
    "observation_terms_clip": "-inf;inf,-1.000;1.000,-inf;inf,-inf;inf",
    "observation_terms_history_length": "0.000,3.000,0.000,0.000",
    "action_scale": "0.500,0.250,0.250,0.250",
}


def test_mjlab_metadata_is_read(rover):
    contract = contract_formats.read_contract(None, MJLAB, 22, rover)
    assert contract is not None and contract.size == 22 and contract.pose[0] == 0.1
    first, second, _, last = contract.terms
    assert (first.scale, first.clip, second.clip, second.history) == (2.0, None, [-1.0, 1.0], 3)
    assert last.scale == (1.0, 1.0, 0.25) and contract.action_scale == (0.5, 0.25, 0.25, 0.25)
    assert contract_formats.read_contract(None, {}, 22, rover) is None
    for key, value in (("joint_damping", "a"), ("observation_names", "x,y"), ("action_scale", "")):
        with pytest.raises(ConfigError, match="metadata"):
            contract_formats.read_contract(None, {**MJLAB, key: value}, 22, rover)


def holosoma(tmp_path: Path, wheel: bool) -> Path:
    """Write settings of holosoma that would leave a file behind if they were imported."""
    trap = f"open({str(tmp_path / 'trap')!r}, 'w')\n"
    terms = ["dof_pos", "command_lin_vel", "actions"]
    dims = {"dof_pos": 4, "command_lin_vel": 2, "actions": 4}
    texts = {
        "robot": f"rover = RobotConfig(dof_names={WHEELS!r}, default_dof_angles=(0.1, 0, 0, 0), motor=len('x'))",
        "observation": f"loco_rover = ObservationConfig(obs_dict={{'actor_obs': {terms}}}, obs_dims={dims}, "
        f"obs_scales={dict.fromkeys(terms, 0.5)}, history_length_dict={{'actor_obs': 1}})",
        "task": "locomotion = TaskConfig(rl_rate=100, policy_action_scale=0.5, gait_period=1.0)",
    }
    out = tmp_path / ("h.whl" if wheel else "site")
    for name, text in texts.items():
        path = f"holosoma_inference/config/config_values/{name}.py"
        if wheel:
            with zipfile.ZipFile(out, "a") as archive:
                archive.writestr(path, trap + text)
        else:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_text(trap + text)
    return out


@pytest.mark.parametrize("wheel", [False, True])
def test_holosoma_settings_are_read_but_not_imported(tmp_path, rover, wheel):
    path, metadata = holosoma(tmp_path, wheel), {key: json.dumps([1.0] * 4) for key in ("kp", "kd")}
    metadata["dof_names"] = json.dumps([f"{name}_joint" for name in WHEELS])
    with pytest.raises(ConfigError, match="no robot"):
        contract_formats.read_contract(path, metadata, 10, rover)
    metadata["dof_names"] = json.dumps(WHEELS)
    contract = contract_formats.read_contract(path, metadata, 10, rover)
    assert contract is not None and not (tmp_path / "trap").exists()
    assert [term.kind for term in contract.terms] == ["last_action", "command_lin_vel", "joint_pos_rel"]
    assert (contract.control_hz, contract.pose[0], contract.action_scale[0]) == (100.0, 0.1, 0.5)
    with pytest.raises(ConfigError, match="no observation of 11 numbers"):
        contract_formats.read_contract(path, metadata, 11, rover)


@pytest.mark.parametrize("layout", ["terms", "frames"])
@pytest.mark.parametrize("newest_first", [False, True])
def test_history_layouts(rover, layout, newest_first):
    terms = [{"kind": "joint_vel", "scale": 0.5, "history": 3}, {"kind": "command_ang_vel", "history": 3}]
    given = {**ROVER_CONTRACT, "joints": [*WHEELS[::-1]], "layout": layout, "newest_first": newest_first}
    contract = Contract.read({**given, "terms": terms}, "test", rover.joints)
    inputs = Inputs([contract], rover.joints)
    columns = inputs.place(contract)
    assert [row["measured"] for row in inputs.terms()] == [True, True]
    blind = Contract.read({**given, "terms": [{"kind": "base_lin_vel", "history": 3}]}, "test", rover.joints)
    assert [row["measured"] for row in Inputs([blind], rover.joints).terms()] == [False]
    frames = np.random.default_rng(0).normal(size=(3, 4 + 3))  # oldest first: velocities in the scene's order, command
    readings = np.concatenate([frames[:, :4].ravel(), frames[:, 4:].ravel()])
    times = [2, 1, 0] if newest_first else [0, 1, 2]
    parts = {(i, t): (0.5 * frames[t, 3::-1], frames[t, 6:])[i] for i in range(2) for t in times}
    order = (
        [(i, t) for i in range(2) for t in times] if layout == "terms" else [(i, t) for t in times for i in range(2)]
    )
    read = (readings[columns["index"]] - columns["bias"]) * columns["scale"]
    assert np.allclose(read, np.concatenate([parts[key] for key in order]))


def test_export_applies_scales_clips_and_joint_order(tmp_path, rover):
    weights, rng = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32), np.random.default_rng(1)
    terms = [{"kind": "joint_pos_rel", "scale": [1.0, 2.0, 3.0, 4.0], "clip": [-0.2, 0.2]}]
    terms += [{"kind": "command_ang_vel"}, {"kind": "last_action"}]
    given = {**ROVER_CONTRACT, "joints": [*WHEELS[::-1]], "pose": 0.1, "action_scale": [1.0, 2.0, 3.0, 4.0]}
    given |= {"terms": terms, "action_clip": 0.5, "target_clip": [[-1.0, 1.0]] * 4}
    contract = Contract.read(given, "test", rover.joints)
    network = network_file.read_network(saved(tmp_path, linear(weights, names=("actor_obs", "action"))))
    card = write_folder(tmp_path / "out", network, contract, rover, "rover")
    assert [term["source"] for term in card["observation"]["terms"]][:2] == ["joint positions", "command x y yaw"]
    readings = rng.normal(size=(5, card["observation"]["size"])).astype(np.float32)
    angles, turn, last = readings[:, 3::-1], readings[:, 6:7], readings[:, 7:]
    seen = np.concatenate([np.clip(angles - 0.1, -0.2, 0.2) * [1, 2, 3, 4], turn, last], axis=1)
    action = np.clip(seen @ weights, -0.5, 0.5)
    control = np.clip(0.1 + action * [1, 2, 3, 4], -1.0, 1.0)[:, ::-1]
    for read in (parity.onnx_function, parity.numpy_function):
        got = read(tmp_path / "out" / ("policy.onnx" if read is parity.onnx_function else "policy.npz"))(readings)
        assert np.allclose(got[0], action, atol=1e-5) and np.allclose(got[1], control, atol=1e-5)
    again = contract_formats.read_contract(tmp_path / "out" / "contract.yaml", {}, 9, rover)
    assert again == contract
    with pytest.raises(ConfigError, match="differ"):
        short = Contract.read(ROVER_CONTRACT, "test", rover.joints)
        write_folder(tmp_path / "out", network, short, rover, "rover")


@pytest.mark.parametrize("end", [[node("Gemm", "obs w")], [node("MatMul", "obs w", "a"), node("Clip", "a  high")]])
def test_operators_that_the_runtime_lacks_need_onnxruntime(tmp_path, rover, end):
    weights = {"w": rover_weights(), "high": np.float32(5.0)}
    network = network_file.read_network(saved(tmp_path, model(end, weights, (10, 4))))
    contract = Contract.read(ROVER_CONTRACT, "test", rover.joints)
    assert "numpy" not in write_folder(tmp_path / "out", network, contract, rover, "rover")["files"]
    assert not (tmp_path / "out" / "policy.npz").exists()


def test_start_stands_on_the_ground(rover):
    contract = Contract.read(ROVER_CONTRACT, "test", rover.joints)
    qpos = rover.start(rover.scene(contract, []).model, contract)
    assert qpos[2] == pytest.approx(0.105, abs=1e-6)  # wheel radius, and 5 mm


def test_joints_without_an_action_hold_the_pose(rover):
    given = {**ROVER_CONTRACT, "joints": ["right_rear", "left_front"], "action_scale": 0.5, "action_offset": [0.1, 0.2]}
    servos = rover.servos(Contract.read(given, "test", rover.joints))
    assert servos["source"].tolist() == [1, 0, 0, 0] and servos["scale"].tolist() == [0.5, 0.0, 0.0, 0.5]
    assert servos["offset"].tolist() == [0.2, 0.0, 0.0, 0.1]


def test_walkers_and_deploy_agree(tmp_path, rover, monkeypatch):
    terms = [*ROVER_CONTRACT["terms"], {"kind": "gait_phase", "scale": 0.0}]
    given = {**ROVER_CONTRACT, "terms": terms, "phase": {"period": 0.7, "offsets": [0.3], "standing": math.pi}}
    weights = np.concatenate([rover_weights(), np.zeros((2, 4), np.float32)])
    network = network_file.read_network(saved(tmp_path, linear(weights)))
    contract = Contract.read(given, "test", rover.joints)
    card = write_folder(tmp_path / "out", network, contract, rover, "rover")
    walkers = Walkers(tmp_path / "out", 1)
    walkers.command[:] = 0.4, 0.0, 0.2
    deploy = load_file(ROOT / "docs" / "examples" / "deploy.py", "deploy_example")
    robot, policy = deploy.Robot(tmp_path / "out", card), deploy.load_policy(tmp_path / "out")
    assert robot.read("phase cosine 0.7 0.3 standing -1") == -1.0
    robot.command = {"x": 0.4, "y": 0.0, "yaw": 0.2}
    for _ in range(50):
        walkers.step()
        robot.step(policy.act(robot.observe())[1])
    assert np.allclose(robot.data.qpos, walkers.qpos[0], atol=1e-4) and robot.data.qpos[0] > 0.1
    assert robot.read("phase sine 0.7 0.3") == pytest.approx(math.sin(math.tau / 0.7 + 0.3))


@pytest.fixture
def short(monkeypatch):
    """Shorten the simulations of the search."""
    for name, value in {"STAND_S": 0.6, "MOVE_S": 1.0, "SETTLE_S": 0.2, "FINALISTS": 8, "DEPTH": 1}.items():
        monkeypatch.setattr(contract_search, name, value)


PLANTED = {
    "velocity_commands sign": lambda c: correction(c, "velocity_commands negated"),
    "term order": lambda c: correction(c, "projected_gravity and velocity_commands exchanged"),
    "joint order": lambda c: correction(c, "joints alphabetical", joints=(*WHEELS[2:], *WHEELS[:2])),
}


def correction(contract: Contract, text: str, **values: object) -> Contract:
    from dataclasses import replace

    if values:
        return replace(contract, joints=tuple(f"{name}_joint" for name in values["joints"]))
    body = Body("", contract.joints, contract.pose, contract.kp, contract.kd, (math.inf,) * 4, {})
    [change] = [change for change in corrections(contract, body) if change.text == text]
    return replace(contract, **change.values)


@pytest.mark.parametrize("part", PLANTED)
def test_search_names_a_planted_error_first(tmp_path, rover, part, short):
    network = network_file.read_network(saved(tmp_path, linear(rover_weights())))
    true = Contract.read(ROVER_CONTRACT, "test", rover.joints)
    search = ContractSearch(network, rover)
    best = search.correct(search.evaluate([Candidate(PLANTED[part](true))]))
    assert [change.part for change in best[0].changes] == [part] and best[0].believed


def test_search_applies_the_limits_of_targets(tmp_path, rover, short):
    network = network_file.read_network(saved(tmp_path, linear(rover_weights())))
    given = {**ROVER_CONTRACT, "target_clip": [[-0.01, 0.01]] * 4}  # the wheels cannot turn
    [tested] = ContractSearch(network, rover).evaluate([Candidate(Contract.read(given, "test", rover.joints))])
    assert tested.stands and not any(tested.follows)


def adopt(*arguments: object) -> Path:
    tool = load_file(ROOT / "tools" / "adopt.py", "adopt_tool")
    return tool.adopt(tool.parse([str(argument) for argument in arguments]))


def test_command_writes_an_export(tmp_path, rover, capsys):
    file, contract = saved(tmp_path, linear(rover_weights())), tmp_path / "contract.yaml"
    contract.write_text(yaml.safe_dump(ROVER_CONTRACT))
    out = adopt(file, "--contract", contract, "--robot", rover.robot.file, "--out", tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {
        *("contract.yaml", "policy.json", "policy.npz", "policy.onnx", "policy.py", "scene.xml")
    }
    assert "upright 8.0 of 8 s" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="already exists"):
        adopt(file, "--contract", contract, "--robot", rover.robot.file, "--out", out)


def test_command_corrects_a_contract(tmp_path, rover, capsys, short):
    file, contract = saved(tmp_path, linear(rover_weights())), tmp_path / "contract.yaml"
    terms = [*ROVER_CONTRACT["terms"][:2], {"kind": "velocity_commands", "scale": -1.0}]
    contract.write_text(yaml.safe_dump({**ROVER_CONTRACT, "terms": terms}))
    out = adopt(file, "--contract", contract, "--robot", rover.robot.file, "--out", tmp_path / "out")
    assert "1. velocity_commands" in capsys.readouterr().out
    assert yaml.safe_load((out / "contract.yaml").read_text())["terms"][2]["scale"] == 1.0


def test_command_names_three_guesses_for_a_policy_that_never_moves(tmp_path, rover, capsys, short):
    file, contract = saved(tmp_path, linear(0.0 * rover_weights())), tmp_path / "contract.yaml"
    contract.write_text(yaml.safe_dump(ROVER_CONTRACT))
    with pytest.raises(ConfigError, match="does not stand and follow"):
        adopt(file, "--contract", contract, "--robot", rover.robot.file, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists() and "\n3. " in capsys.readouterr().out


@pytest.mark.parametrize("robot", ["g3", "rover.usd", ""])
def test_unknown_robot_is_rejected(robot):
    with pytest.raises(ConfigError, match="--robot"):
        Body.open(robot)


def test_network_without_a_list_of_observations(rover):
    with pytest.raises(ConfigError, match="one for each action"):
        contract_formats.known_values({}, rover, 5)
    known = contract_formats.known_values({"kp": "[1, 2, 3, 4]"}, rover, 4)
    assert known["kp"] == [1, 2, 3, 4] and known["joints"] == [*rover.joints]
    assert contract_search.guesses(known, 20, rover) == []
    found = contract_search.guesses(known, 2 * (9 + 3 * 4 + 4), rover)
    assert found and {candidate.contract.size for candidate in found} == {50}


HOLOSOMA = "holosoma-inference==0.1.3"
UNITREE = "https://raw.githubusercontent.com/unitreerobotics/unitree_rl_mjlab/5b7e39658e33ec63b9283688ef23b38434c9d5c5"
UNITREE += "/deploy/robots/g1/config/policy/velocity/v0/"


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Download holosoma's wheel; skip without a network."""
    folder = tmp_path_factory.mktemp("strangers")
    command = [sys.executable, "-m", "pip", "download", HOLOSOMA, "--no-deps", "-q", "-d", str(folder)]
    if subprocess.run(command, capture_output=True, timeout=120).returncode:
        pytest.skip(f"cannot download {HOLOSOMA}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in (name for name in archive.namelist() if "/models/loco/" in name and name.endswith(".onnx")):
            (folder / Path(name).name).write_bytes(archive.read(name))
    return folder


def assert_walks(folder: Path) -> None:
    """Stand for 10 s, and follow 0.5 m/s for 10 s."""
    walkers = Walkers(folder, 2)
    standing, moved = walkers.height.copy(), []
    walkers.command[1, 0] = 0.5
    for _ in range(500):
        walkers.step()
        assert not walkers.fallen(standing).any()
        moved.append(walkers.velocity)
    still, ahead = np.mean(moved[150:], axis=0)
    assert np.abs(still).max() < 0.05 and 0.35 < ahead[0] < 0.6 and abs(ahead[1]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ppo_g1", "fastsac_g1", "ppo_t1", "fastsac_t1"])
@pytest.mark.parametrize("settings", [True, False], ids=["settings", "metadata only"])
def test_holosoma_policies_walk(strangers, tmp_path, policy, settings):
    file, robot = strangers / f"{policy}_29dof.onnx", policy.rpartition("_")[2]
    contract = ["--contract", next(strangers.glob("*.whl"))] if settings else []
    assert_walks(adopt(file, *contract, "--robot", robot, "--out", tmp_path / "out"))


@pytest.mark.slow
def test_unitree_policy_walks(tmp_path):
    for name in ("params/deploy.yaml", "exported/policy.onnx", "exported/policy.onnx.data"):
        try:
            with urllib.request.urlopen(UNITREE + name, timeout=30) as answer:
                (tmp_path / Path(name).name).write_bytes(answer.read(1 << 24))
        except OSError:
            pytest.skip("cannot download Unitree's policy")
    arguments = ["--contract", tmp_path / "deploy.yaml", "--robot", "g1", "--out", tmp_path / "out"]
    assert_walks(adopt(tmp_path / "policy.onnx", *arguments))
