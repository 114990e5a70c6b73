"""Tests of the command `export`: parity of all files, model card, deployment in plain MuJoCo."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import mujoco
import numpy as np
import onnxruntime
import pytest
import torch

from gpusim_rl import make_env
from gpusim_rl.api import prepare
from gpusim_rl.connect.gymnasium_spaces import actions_of
from gpusim_rl.distributed import actors
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.export import card, files, parity
from gpusim_rl.export.controls import fit, measure
from gpusim_rl.export.joint_order import joint_order
from gpusim_rl.export.scene_file import LICENCE, needs, write_licence, write_scene
from gpusim_rl.files import checkpoint_file
from gpusim_rl.files.paths import assets_dir, robot_file
from gpusim_rl.sim import Scene
from gpusim_rl.view.player import Player
from helpers.commands import ROOT, load_file, run_here
from helpers.scenes import scene_with
from helpers.training import make_trainer, shake, the_run

pytest_plugins = ["helpers.tool_runs"]

DEPLOY = ROOT / "docs" / "examples" / "deploy.py"
DQN = {"horizon": 8, "network": {"hidden": [16, 16]}, "learning_starts": 64, "batch_size": 32}
SMALL = {**DQN, "network": {"hidden": [16, 16], "critic_hidden": [16, 16]}}
RNN = {"network": {"hidden": [16], "rnn_size": 8, "rnn_layers": 2}}


def opened(run: Path) -> closing[Player]:
    return closing(Player.open(str(run)))


def seen(policy: torch.nn.Module, size: int) -> np.ndarray:
    """Return observations [12 steps, 5 envs, size], some beyond the clipping range."""
    norm = policy.obs_norm["policy"] if len(policy.obs_norm) else None  # type: ignore[union-attr, index]
    mean, scale = (torch.zeros(size), torch.ones(size)) if norm is None else (norm.mean, norm.scale)
    z = 2.0 * torch.randn(12, 5, size, generator=torch.Generator().manual_seed(3))
    return (mean + scale * z).float().numpy()


def check_files(folder: Path, player: Player) -> dict:
    """Play five episodes of twelve steps with files and policy; return the card."""
    card, policy, sizes = json.loads((folder / files.CARD).read_text()), player.policy, player.env.obs_sizes
    assert policy is not None
    session = onnxruntime.InferenceSession(folder / card["files"]["onnx"])
    script = torch.jit.load(folder / card["files"]["torchscript"])
    states = card["recurrent_state"]
    assert [node.name for node in session.get_inputs()] == ["obs", *(state["input"] for state in states)]
    assert session.get_inputs()[0].shape[1] == card["observation"]["size"] == sizes["policy"]
    shapes = [[5 if size == "batch" else size for size in state["shape"]] for state in states]
    onnx_state = [np.zeros(shape, dtype=np.float32) for shape in shapes]
    script_state = [torch.zeros(shape) for shape in shapes]
    hidden, acted = policy.initial_state(5), []
    for obs in seen(policy, sizes["policy"]):
        clip = card["observation"]["clip"]
        tensor = torch.from_numpy(obs)
        # the policy ignores the critic's group
        groups = {group: torch.full((5, size), 7.0) for group, size in sizes.items()}
        groups["policy"] = tensor if clip is None else tensor.clamp(-clip, clip)
        action, hidden = policy.act(groups, hidden, deterministic=True)
        if (limit := card["action"].get("clip")) is not None:
            action = action.clamp(-limit, limit)
        names = [node.name for node in session.get_inputs()]
        outputs = session.run(None, dict(zip(names, [obs, *onnx_state], strict=True)))
        scripted = script(tensor, *script_state)
        onnx_state, script_state = outputs[len(outputs) - len(states) :], scripted[len(scripted) - len(states) :]
        for got in (outputs[0], scripted[0].numpy()):
            assert got.dtype == action.numpy().dtype == np.dtype(card["action"]["dtype"])
            np.testing.assert_allclose(got, action.numpy(), rtol=1e-5, atol=1e-5)
        for expected, exported in zip(hidden[: len(states)], onnx_state, strict=True):
            np.testing.assert_allclose(exported, expected.numpy(), rtol=1e-5, atol=1e-5)
        if "control" in card:
            offset, scale = (np.array(card["control"][key]) for key in ("offset", "scale"))
            expected = offset + scale * action.numpy()[:, card["control"]["source"]]
            np.testing.assert_allclose(outputs[1], expected, rtol=1e-5, atol=1e-5)
        acted.append(action)
    assert len(torch.stack(acted).unique(dim=0)) > 1, "constant policy"
    return card


def same_model(read: mujoco.MjModel, model: mujoco.MjModel) -> None:
    for name in dir(model):
        value = getattr(model, name)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            np.testing.assert_array_equal(getattr(read, name), value, err_msg=name)
    assert read.opt.timestep == model.opt.timestep
    assert (read.opt.integrator, read.opt.cone) == (model.opt.integrator, model.opt.cone)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "CALLS", 20)
        patch.setattr(parity, "IMAGE_OBSERVATIONS", 100)
        yield


@pytest.fixture(scope="module")
def ant(runs_folder: Path, load_tool, tmp_path_factory) -> tuple[Path, str]:
    """Export Ant with the command; return the folder and the printed text."""
    folder = shutil.copytree(runs_folder, tmp_path_factory.mktemp("export") / "all", symlinks=True)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.chdir(folder)
        assert load_tool("export").main(["Ant"]) == 0
    return folder / printed.getvalue().splitlines()[-1], printed.getvalue()


@pytest.fixture(scope="module")
def deploy() -> ModuleType:
    return load_file(DEPLOY, "deploy")


def test_exported_folder_acts_like_the_policy(ant):
    folder, printed = ant
    assert folder.name == "export" and (folder.parent / "checkpoints").is_dir()
    names = "policy.int8.onnx policy.json policy.npz policy.onnx policy.py policy.ts scene.xml"
    assert sorted(path.name for path in folder.iterdir()) == names.split()
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
    with opened(folder.parent) as player:
        card = check_files(folder, player)
    assert (card["task"], card["algorithm"], card["iteration"]) == ("Ant", "ppo", 1)
    assert (card["control_hz"], card["physics_hz"], card["max_angular_velocity"]) == (60.0, 120.0, 15.0)
    assert card["action"]["names"] == [actuator["name"] for actuator in card["actuators"]]
    assert card["control"]["scale"] == [1.0] * 8 and card["control"]["offset"] == [0.0] * 8
    assert card["joints"][1]["name"] == "ant/ankle_1" and card["joints"][1]["qpos"] == 8
    hip = {"gain": 1.0, "kp": 0.0, "kd": 0.0, "gear": 15.0, "control_range": [-1.0, 1.0], "force_range": None}
    assert card["actuators"][0] == {"name": "ant/hip_1", "joint": "ant/hip_1", **hip}
    assert len(card["commit"]["sha"]) == 40 and card["versions"]["onnxruntime"] == onnxruntime.__version__
    errors = card["parity"]["files"]
    assert card["parity"]["observations"] == 10_000
    assert errors["onnx"]["max_error"] <= 1e-5 and errors["torchscript"]["max_error"] <= 1e-5
    assert 1e-5 < errors["int8"]["max_error"] < 1.0
    assert set(card["latency_us"]["median"]) == {"onnx", "torchscript", "int8", "numpy", "torch"}
    assert re.search(r"max error on 10,000 .*: onnx \S+, torchscript \S+, int8 \S+, numpy \S+\n", printed)
    assert re.search(r"median of 20 calls \[us\]: onnx \d+, torchscript \d+, int8 \d+, numpy \d+, torch \d+\n", printed)


def test_scene_file_is_exact_and_has_its_assets(ant, tmp_path):
    folder, _ = ant
    with opened(folder.parent) as player:
        same_model(mujoco.MjModel.from_xml_path(str(folder / "scene.xml")), player.env.sim.scene.model)  # type: ignore
    (tmp_path / "meshes").mkdir()
    corners = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 1 4 3\n"
    (tmp_path / "meshes" / "tetra.obj").write_text(corners)
    (tmp_path / "robot.xml").write_text(
        '<mujoco><compiler meshdir="meshes"/><asset><mesh name="tetra" file="tetra.obj" scale=".1 .2 .3"/></asset>'
        '<worldbody><body name="base"><freejoint/><geom type="mesh" mesh="tetra"/>'
        '<body name="arm"><joint name="elbow"/><geom size=".1"/></body></body></worldbody></mujoco>'
    )
    random = np.random.default_rng(0)
    scene = Scene(120.0)
    scene.add_heightfield(random.uniform(-0.3, 0.7, (5, 7)), (2.0, 3.0))
    scene.add("robot", tmp_path / "robot.xml")
    scene.add_actuators("robot", "elbow", kind="position", stiffness=1.0 / 3.0, damping=0.1)
    out = tmp_path / "out"
    out.mkdir()
    model = write_scene(scene.spec.copy(), out)
    shutil.rmtree(tmp_path / "meshes")
    same_model(mujoco.MjModel.from_xml_path(str(out / "scene.xml")), model)
    assert sorted(path.name for path in (out / "assets").iterdir()) == ["hfield0.hfield", "mesh0.obj"]
    assert "input=" not in (out / "scene.xml").read_text()  # rejected by MuJoCo 3.3 to 3.11
    assert needs(model) is None


def test_scene_file_keeps_actuator_delays(tmp_path):
    """Delays are half a step below whole steps to be robust to rounding."""
    (tmp_path / "arm.xml").write_text(
        '<mujoco><worldbody><body name="a"><joint name="j"/><joint name="k" axis="1 0 0"/><geom size=".1"/></body>'
        '</worldbody><actuator><motor name="m" joint="k" delay="0.004" nsample="3"/></actuator></mujoco>'
    )
    scene = scene_with(500.0, arm=tmp_path / "arm.xml")
    scene.add_actuators("arm", "j", kind="torque", delay=0.016)
    write_scene(scene.spec.copy(), tmp_path)
    read = mujoco.MjModel.from_xml_path(str(tmp_path / "scene.xml"))
    assert read.actuator_delay.tolist() == pytest.approx(scene.model.actuator_delay.tolist())
    assert sorted(read.actuator_delay * 500.0) == pytest.approx([1.5, 7.5])


def test_vendor_order_applies_to_joints_of_clips():
    env = make_env("Go1Tracking", num_envs=2, sim="mujoco", task={"action_around": "pose"})
    env.reset()
    order = joint_order("unitree", env, measure(env, 0))
    assert order.obs[:24] == (*order.joints, *(12 + joint for joint in order.joints))


def test_licence_of_a_bundled_robot_is_copied(tmp_path):
    own, scene = tmp_path / "robot.xml", Scene(100.0)
    own.write_text("<mujoco><worldbody><body><freejoint/><geom size='1'/></body></worldbody></mujoco>")
    (tmp_path / "LICENSE").write_text("mine")
    scene.add("own", own)
    write_licence(scene, tmp_path)
    assert not (tmp_path / LICENCE).exists()
    scene.add("go1", robot_file("go1/go1"))
    write_licence(scene, tmp_path)
    assert (tmp_path / LICENCE).read_text() == (assets_dir() / "go1" / "LICENSE").read_text()


def test_each_control_of_an_actuator_has_its_own_column(deploy):
    spec = mujoco.MjSpec()
    body = spec.worldbody.add_body()
    for name in "ab":
        body.add_joint(name=name)
        actuator = spec.add_actuator(name=f"arm/{name}", target=name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        if name == "a":
            actuator.set_to_dcmotor(motorconst=[1.0, 1.0], resistance=1.0, controller=[1.0] + 5 * [0.0], ctrlspec=3)
    body.add_geom(size=[0.1, 0.1, 0.1])
    robot = deploy.Robot.__new__(deploy.Robot)
    robot.model = spec.compile()
    assert robot.model.nu == 3
    assert [robot.column(name) for name in ("arm/a/0", "arm/a/1", "arm/b")] == [0, 1, 2]


@pytest.mark.parametrize(("drive", "version"), [({"delay": 0.01}, "3.5"), ({"velocity_limit": 20.0}, "3.17")])
def test_scene_reports_required_mujoco_version(tmp_path, drive, version):
    scene = scene_with(200.0, arm=ROOT / "tasks" / "assets" / "pendulum.xml")
    for actuator in list(scene.spec.actuators):
        scene.spec.delete(actuator)
    scene.add_actuators("arm", "*", kind="position", stiffness=20.0, damping=0.5, effort_limit=9.0, **drive)
    model = write_scene(scene.spec.copy(), tmp_path)
    same_model(mujoco.MjModel.from_xml_path(str(tmp_path / "scene.xml")), model)
    assert needs(model) == version


@pytest.mark.parametrize("file", [DEPLOY, Path(files.__file__).with_name("policy.py")], ids=["deploy", "policy"])
def test_deployed_code_imports_neither_torch_nor_gpusim_rl(file):
    tree = ast.parse(file.read_text())
    roots = {name.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    roots |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert roots <= sys.stdlib_module_names | {"mujoco", "numpy", "onnxruntime", "imageio_ffmpeg"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["Nothing"], "no checkpoint 'Nothing'"),
        (["empty"], "no checkpoint"),
        (["Ant", "--out", "new/x"], "--out new/x: "),
        (["Ant", "--out", "runs"], "--out runs: "),
        (["Ant", "--out", "file", "--overwrite"], "--out file: "),
    ],
)
def test_bad_input_is_rejected_in_one_line(runs_folder, load_tool, tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_write", lambda player, folder, *options: (folder / "x").touch())
    (tmp_path / "runs").symlink_to(runs_folder / "runs")
    (tmp_path / "empty").mkdir()
    shutil.copy(runs_folder / "runs" / "Ant" / "latest" / "config.yaml", tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        load_tool("export").main(arguments)
    printed, error = capsys.readouterr()
    assert (ended.value.code, printed) == (2, "")
    assert error.startswith(f"error: {line}") and error.count("\n") == 1, error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "runs"]


def test_plain_torch_recipe_equals_the_policy(ant, tmp_path):
    folder, _ = ant
    page = (ROOT / "docs" / "export.md").read_text()
    [recipe] = re.findall(r"<!-- file: my_policy.py -->\n```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert "gpusim_rl" not in recipe
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()):
        patch.chdir(folder.parents[3])
        exec(compile(recipe, "my_policy.py", "exec"), names)
    session = onnxruntime.InferenceSession(folder / "policy.onnx")
    with opened(folder.parent) as player:
        assert player.policy is not None
        for obs in seen(player.policy, 60):
            expected = session.run(["action"], {"obs": obs})[0]
            np.testing.assert_allclose(names["act"](torch.from_numpy(obs)), expected, rtol=1e-5, atol=1e-6)


def test_second_export_keeps_the_first_unless_overwriting(ant, monkeypatch, capsys):
    run = ant[0].parent
    monkeypatch.setattr(files, "_write", lambda player, folder, *_: (folder / "policy.onnx").write_text("new"))
    second, _ = files.write_all(str(run), None)
    assert second.name == "export-2" and "--overwrite" in capsys.readouterr().err
    for name in ("policy.onnx", "policy.int8.onnx", "scene.mjb", "policy.ts", "contract.yaml", "stress.json"):
        (second / name).write_text("old")
    assert files.write_all(str(run), second, overwrite=True)[0] == second
    assert {file.name: file.read_text() for file in second.iterdir()} == {"policy.onnx": "new"}


KINDS = {
    "ppo, clipped observations": ("Cartpole", {"task": {"clip_observations": 0.5}}),
    "ppo without normaliser": ("Cartpole", {"ppo": {"normalize_obs": False}}),
    "ppo, default pose": ("Anymal", {}),
    "ppo, discrete": ("Cartpole", {"task": {"discrete": True}}),
    "gru": ("Cartpole", {"ppo": {"network": {**RNN["network"], "rnn": "gru"}}}),
    "lstm, separate critic": ("Ant", {"ppo": {"network": {**RNN["network"], "rnn": "lstm", "separate": True}}}),
    "asymmetric": ("ShadowHand", {"task": {"observation_type": "openai", "asymmetric": True}}),
    "sac": ("Pendulum", {"algo": "sac", "sac": SMALL}),
    "td3": ("Hopper", {"algo": "td3", "td3": SMALL}),
    "dqn, discrete": ("Cartpole", {"algo": "dqn", "dqn": DQN, "task": {"discrete": True}}),
    "dqn, bins": ("Pendulum", {"algo": "dqn", "dqn": DQN}),
    "Gymnasium envs": ("Gymnasium", {"env": {"id": "Pendulum-v1"}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_policy_exports(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    task, settings = KINDS[kind]
    algo = settings.get("algo", "ppo")
    overrides = {key: value for key, value in settings.items() if key != "algo"}
    common = {"num_envs": 8, "max_iterations": 12 if algo != "ppo" else 2, "device": "cpu"}
    if algo == "ppo":
        ppo = {"horizon": 8, "minibatch_size": 32, "precision": "fp32", **overrides.pop("ppo", {})}
        overrides["ppo"] = {**ppo, "network": {"hidden": [16, 16], **ppo.get("network", {})}}
    log = {"console": "quiet", "dir": "runs"}
    trainer = actors.make_trainer(prepare(task, algo=algo, **common, log=log, **overrides))
    trainer.train()
    run = the_run(tmp_path / "runs")
    shake(run / "checkpoints" / "last.pt")
    folder, card = files.write_all(str(run), None, int8=kind == "gru")
    with opened(run) as player:
        assert json.loads(json.dumps(card)) == check_files(folder, player)
    if kind == "ppo, default pose":
        assert card["control"]["scale"] == [0.5] * 12 and len(set(card["control"]["offset"])) > 1
    if kind == "Gymnasium envs":
        assert "joints" not in card and not (folder / "scene.xml").exists()
    assert ("control" in card) == (kind != "Gymnasium envs")


def test_affine_controls_are_fitted():
    random = np.random.default_rng(0)
    actions = random.uniform(-1, 1, (200, 3))
    controls = np.stack([0.4 - 0.5 * actions[:, 2], 30.0 * actions[:, 0], np.full(200, 1.5), actions[:, 1]], axis=1)
    affine = fit(actions, controls.astype(np.float32).astype(float))
    assert affine is not None
    assert affine.offset == (0.4, 0.0, 1.5, 0.0) and affine.scale == (-0.5, 30.0, 0.0, 1.0)
    assert affine.source == (2, 0, 0, 1) and affine.deviation < 1e-6
    assert affine.names(["a", "b", "c", "d"], 3) == ["b", "d", "a"]
    assert fit(actions, actions[:, :1] + 0.1 * actions[:, 1:2]) is None  # two actions for one actuator
    assert fit(actions, np.clip(actions, -0.9, 0.9)) is None
    assert fit(actions, np.cumsum(actions, axis=0)) is None


@pytest.mark.parametrize(("task", "known"), [("Cartpole", True), ("BallBalance", False)])
def test_controls_of_a_task_are_fitted(tmp_path, task, known):
    trainer = make_trainer(task, tmp_path, device="cpu")
    affine = measure(trainer.env, 0)  # type: ignore[arg-type]
    assert (affine is not None) == known
    if affine is not None:
        assert (affine.offset, affine.scale, affine.samples) == ((0.0,), (400.0,), 512)


def test_fitted_controls_exclude_simulated_bias(tmp_path):
    """Encoders and targets of each env have a bias of up to 0.015 rad."""
    trainer = make_trainer("Go1Velocity", tmp_path, device="cpu")
    affine = measure(trainer.env, 0)  # type: ignore[arg-type]
    assert affine is not None and bool(trainer.env.task.encoder_bias.any())  # type: ignore[attr-defined]
    np.testing.assert_allclose(affine.offset, trainer.env.task.pose, atol=1e-6)  # type: ignore[attr-defined]


def test_parity_failure_leaves_no_files(ant, monkeypatch):
    folder, _ = ant
    monkeypatch.setattr(files.parity.Parity, "allowed", -1.0)
    monkeypatch.setattr(files, "write_onnx", lambda model, size, file: shutil.copy(folder / "policy.onnx", file))
    before = sorted(folder.parent.iterdir())
    with pytest.raises(ConfigError, match=r"policy.onnx: "):
        files.write_all(str(folder.parent), None, int8=False)
    assert sorted(folder.parent.iterdir()) == before


def test_inaccurate_int8_file_is_skipped(ant, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files.parity, "INT8_LARGEST", 0.0)
    monkeypatch.setattr(files, "write_onnx", lambda model, size, file: shutil.copy(ant[0] / "policy.onnx", file))
    folder, card = files.write_all(str(ant[0].parent), tmp_path / "coarse")
    assert "int8" not in card["files"] and not (folder / files.INT8).exists()
    assert card["parity"]["files"]["int8"]["refused"] and "skipping policy.int8.onnx" in capsys.readouterr().err


def test_int8_is_usable_if_actions_agree():
    cases = (1.7, 10, False), (0.3, 10, False), (0.3, 200, False), (2.0, 50, True), (1.0, 500, True)
    usable = [parity.usable_int8(parity.Parity(error, 0, 10_000, n, 0.0), discrete) for error, n, discrete in cases]
    assert usable == [False, True, False, True, False]


def test_card_maps_actions_to_gymnasium_space():
    low, high = np.float32([-2.0, -np.inf, 0.0]), np.float32([2.0, np.inf, 10.0])
    space, to_box = actions_of(gymnasium.spaces.Box(low, high), "Env")
    env: Any = SimpleNamespace(action_space=space, num_actions=3)
    own = card._action(env, None)["env_action"]
    action = np.array([[-5.0, 7.0, 0.5]])
    limited = np.where(own["scaled"], action.clip(-1.0, 1.0), action)
    np.testing.assert_allclose(np.add(own["offset"], np.multiply(own["scale"], limited)), to_box(action))
    assert (own["low"], own["high"]) == ([-2.0, None, 0.0], [2.0, None, 10.0])  # json has no infinity


def test_command_ranges_follow_command_names(monkeypatch, deploy):
    with closing(make_env("Anymal", num_envs=1, device="cpu")) as env:
        assert isinstance(env, VecEnv)
        env.reset()
        ranges = card._commands(env)
        assert list(ranges) == ["x", "y", "yaw"]
        sources = {"command": "command yaw stride", "command_yaw": "command yaw x"}
        monkeypatch.setattr(type(env.task), "sources", {**env.task.sources, **sources})
        reordered = card._commands(env)
    assert reordered == {"yaw": ranges["yaw"], "stride": None, "x": ranges["x"]}
    args = deploy.parse(["folder", "--command", "0.1", "9", "0.2"])
    [(_, command)] = deploy.legs_of(args, reordered)
    assert command == {"yaw": 0.1, "stride": 9.0, "x": 0.2} and deploy.outside(command, reordered) == []


def test_parity_accepts_ties_and_rejects_wrong_choices():
    obs = np.linspace(-1.0, 1.0, 10_000, dtype=np.float32)[:, None]

    def choice(threshold: float) -> parity.Function:
        return lambda seen: ((seen > np.float32(threshold)).astype(np.int64),)

    exact, near = float(obs[7000, 0]), float(np.nextafter(obs[7000, 0], np.float32(-1.0)))
    comparison = parity.compare(choice(exact), choice(near), (obs,), ())
    assert comparison == parity.Parity(0.0, 1, 10_000, 0, 0.0)
    assert parity.compare(choice(exact), choice(exact - 3e-4), (obs,), ()).max_error == 1.0
    assert parity.compare(choice(exact), choice(0.0), (obs,), ()).max_error == 1.0


def test_parity_allows_rounding_of_a_steep_policy():
    obs = np.linspace(-1.0, 1.0, 10_000, dtype=np.float32)[:, None]

    def steep(shift: float) -> parity.Function:
        return lambda seen: (np.sin(400.0 * (seen + np.float32(shift))).astype(np.float32),)

    rounded = parity.compare(steep(0.0), steep(4e-8), (obs,), ())
    assert parity.TOLERANCE < rounded.max_error <= rounded.allowed < 1e-4
    parity.require(rounded, "policy.onnx")
    with pytest.raises(ConfigError, match=r"policy.onnx: .*6.*e-05"):
        parity.require(parity.compare(steep(0.0), steep(1e-6), (obs,), ()), "policy.onnx")


def test_parity_rejects_nan():
    def function(value: float) -> parity.Function:
        return lambda seen: (np.full((len(seen), 1), value),)

    obs = np.zeros((10_000, 1), dtype=np.float32)
    comparison = parity.compare(function(0.0), function(math.nan), (obs,), ())
    with pytest.raises(ConfigError, match="error inf"):
        parity.require(comparison, "policy.onnx")


QUIET = {"randomize_episode_start": False}
EXACT = {name: {"noise": None} for name in ("lin_vel", "ang_vel", "gravity", "joint_pos")}
EXACT["joint_vel"] = {"noise": None, "history": 3}
ON_ROBOT = {
    "Cartpole": {},
    "Anymal": {"observations": {"joint_vel": {"history": 3}}},
    "Go2Velocity": {"observations": EXACT, "pushes": False, "encoder_bias": 0.0, "clip_observations": 3.0},
}


@pytest.fixture(scope="module")
def exported_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains and exports a task once and returns the folder."""
    return cache(lambda task: export_run(tmp_path_factory.mktemp("on_robot"), task, **ON_ROBOT[task]))


def export_run(tmp_path: Path, task: str, **settings: Any) -> Path:
    ppo = {"horizon": 8, "minibatch_size": 32, "precision": "fp32", "network": {"hidden": [16, 16]}}
    log = {"console": "quiet", "dir": str(tmp_path)}
    small = {"num_envs": 8, "max_iterations": 1, "device": "cpu", "ppo": ppo, "log": log}
    actors.make_trainer(prepare(task, **small, task={**QUIET, **settings})).train()
    run = the_run(tmp_path)
    shake(run / "checkpoints" / "last.pt")
    return files.write_all(str(run), None, int8=False)[0]


@pytest.mark.parametrize("task", ON_ROBOT)
def test_deployed_policy_in_plain_mujoco_equals_the_task(exported_run, deploy, task):
    """The card alone reproduces observations, controls and states step by step."""
    folder = exported_run(task)
    policy = deploy.load_policy(folder)
    robot = deploy.Robot(folder, policy.card)
    with opened(folder.parent) as player:
        env: Any = player.env
        np.testing.assert_array_equal(env.sim.qpos[0], np.float32(robot.data.qpos))
        command = getattr(env.task, "commands", getattr(env.task, "command", None))
        assert (command is not None) == bool(robot.command)
        steps = 0
        for _ in range(20):
            if command is not None:
                robot.command = dict(zip(robot.command, command.value[0].tolist(), strict=True))
            action, targets = policy.act(robot.observe())
            if bool(player.step().done[0]):
                break  # the next episode starts differently
            np.testing.assert_allclose(action, env.task.actions[0], rtol=1e-4, atol=1e-4)
            robot.step(targets)
            np.testing.assert_allclose(robot.data.qpos, env.sim.qpos[0], atol=1e-4)
            steps += 1
    assert steps >= 5


def test_vendor_joint_order_gives_the_same_motion(exported_run, tmp_path, deploy):
    """Go2's model lists the left leg first, Unitree's SDK the right one; the motion is the same."""
    folders = [exported_run("Go2Velocity")]
    folders.append(files.write_all(str(folders[0].parent), tmp_path / "sdk", int8=False, order="unitree")[0])
    policies = [deploy.load_policy(folder) for folder in folders]
    robots = [deploy.Robot(folder, policy.card) for folder, policy in zip(folders, policies, strict=True)]
    robots[1].data.qpos[:] = robots[0].data.qpos
    names = [f"robot/{leg}_{part}_joint" for leg in ("FR", "FL", "RR", "RL") for part in ("hip", "thigh", "calf")]
    card = policies[1].card
    for listed in (card["action"]["names"], [joint["name"] for joint in card["joints"]]):
        assert listed == names
    order = [policies[0].card["action"]["names"].index(name) for name in names]
    assert order[:3] == [3, 4, 5]
    for _ in range(10):
        for robot in robots:
            robot.command |= {"x": 0.7, "yaw": 0.3}
        acted = [policy.act(robot.observe()) for policy, robot in zip(policies, robots, strict=True)]
        (action, targets), (reordered, by_name) = acted
        np.testing.assert_allclose(reordered, action[order], atol=1e-5)
        assert by_name == pytest.approx(targets, abs=1e-5)
        robots[0].step(targets)
        robots[1].step(by_name)
    np.testing.assert_allclose(robots[1].data.qpos, robots[0].data.qpos, atol=1e-4)
    assert (folders[0] / "policy.onnx").read_bytes() != (folders[1] / "policy.onnx").read_bytes()


def test_vendor_order_of_another_robot_is_rejected(tool_here, ant):
    done = tool_here("export", ant[0].parent, "--order", "unitree", "--out", "none")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not Path("none").exists()
    assert "--order unitree: " in done.stderr and "['hip_1', 'ankle_1', 'hip_2']" in done.stderr


@pytest.mark.parametrize("plain", [False, True])
def test_runtime_acts_like_the_policy(exported_run, monkeypatch, plain):
    """Inputs: scaled terms, history and the stored last action."""
    folder = exported_run("Anymal")
    module = load_file(folder / "policy.py", "policy")
    if plain:
        monkeypatch.setattr(module, "onnxruntime", None)
    policy, random = module.DeployedPolicy(), np.random.default_rng(0)
    terms = policy.card["observation"]["terms"]
    with opened(folder.parent) as player:
        for _ in range(2):
            policy.reset()
            last, speeds = np.zeros(12), []
            for _ in range(6):
                raw = {term["name"]: random.standard_normal(term["size"]) for term in terms}
                del raw["actions"]
                speeds = [*(speeds or [raw["joint_vel"]] * 2), raw["joint_vel"]][-3:]
                rows = {**raw, "actions": last, "joint_vel": np.concatenate(speeds)}
                obs = np.concatenate([rows[term["name"]] * term["scale"] for term in terms]).clip(-5.0, 5.0)
                groups = {"policy": torch.tensor(obs[None], dtype=torch.float32)}
                expected = player.policy.act(groups, (), deterministic=True)[0][0].clamp(-1.0, 1.0).numpy()
                action, targets = policy.act(raw)
                np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-5)
                stance = np.array([targets[joint["name"]] - joint["pose"] for joint in policy.card["joints"]])
                np.testing.assert_allclose(stance, 0.5 * expected, rtol=1e-5, atol=1e-5)
                last = action
    with pytest.raises(ValueError, match="'gravity': expected 3 numbers"):
        policy.act({"lin_vel": np.zeros(3), "ang_vel": np.zeros(3)})


def test_runtime_takes_images_and_stacks_frames(tmp_path):
    folder = export_run(tmp_path, "CartpoleCamera")
    policy, random = load_file(folder / "policy.py", "policy").DeployedPolicy(), np.random.default_rng(0)
    [(name, shape)] = policy.card["observation"]["images"].items()
    with opened(folder.parent) as player:
        for _ in range(2):
            policy.reset()
            state = player.policy.actor_state(1)
            for _ in range(4):
                image = random.integers(0, 256, shape, dtype=np.uint8)
                seen = {"policy": torch.zeros(1, 0), name: torch.from_numpy(image)[None]}
                expected, state = player.policy.act_without_critic(seen, state)
                action, _ = policy.act({name: image})
                np.testing.assert_allclose(action, expected[0].clamp(-1.0, 1.0).detach().numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=rf"image '{name}': expected uint8 \[36, 96, 3\] .*, got nothing"):
        policy.act({})
    with pytest.raises(ValueError, match=r"got float64 \[36, 96, 3\]"):
        policy.act({name: np.zeros(shape)})


def test_deploy_example_walks_squares_and_reports_errors(exported_run, capsys, deploy, ant):
    folder = exported_run("Anymal")
    deploy.main([str(folder), "--square", "0.05"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "command {'x': 0.0, 'y': -0.5, 'yaw': 0.0}: mean velocity" in lines[3]
    assert re.search(r"mean error \d\.\d\d m/s, \d\.\d\d rad/s, \d\.\d\d m from the corner$", lines[0])
    deploy.main([str(folder), "--command", "0.5", "0", "-3", "--seconds", "0.1"])
    assert "yaw -3" in capsys.readouterr().out.splitlines()[0]
    with pytest.raises(SystemExit, match=r"^--command: .*got 1 "):
        deploy.main([str(folder), "--command", "1"])
    with pytest.raises(SystemExit, match=r"^Ant: .*height, angles"):
        deploy.main([str(ant[0])])


def test_deploy_example_reports_a_fall(exported_run, capsys, deploy, monkeypatch):
    monkeypatch.setattr(deploy.Robot, "fell", lambda robot: robot.data.time > 0.25)
    deploy.main([str(exported_run("Anymal")), "--square", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert "fell after 0.3 s" in lines[-2] and len(lines) == 3


def test_zero_and_limit_commands_are_inside_the_range(deploy):
    ranges = {"x": [0.20000000298023224, 0.800000011920929], "y": [-0.1, 0.1]}
    assert deploy.outside({"x": 0.2, "y": 0.0}, ranges) == deploy.outside({"x": 0.0, "y": 0.0}, ranges) == []
    [line] = deploy.outside({"x": 0.0, "y": 0.1}, ranges)
    assert "x 0 " in line and "[0.2, 0.8]" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--square", "-1"], "--square: "),
        (["--command", "nan", "0", "0"], "got nan"),
        (["--square", "1", "--seconds", "3"], "--command and --seconds"),
    ],
)
def test_invalid_deploy_arguments_are_rejected(tmp_path, capsys, deploy, arguments, words):
    with pytest.raises(SystemExit):
        deploy.parse([str(tmp_path), *arguments])
    assert words in capsys.readouterr().err


def test_non_finite_reading_is_rejected_and_not_stored(exported_run, deploy):
    folder = exported_run("Anymal")
    policy = deploy.load_policy(folder)
    obs = deploy.Robot(folder, policy.card).observe()
    expected, _ = policy.act(obs)
    policy.reset()
    with pytest.raises(ValueError, match=r"'gravity': .*got \[nan, "):
        policy.act({**obs, "gravity": np.full(3, np.nan)})
    np.testing.assert_array_equal(policy.act(obs)[0], expected)


def test_deploy_video_failure_is_reported(exported_run, deploy, monkeypatch, tmp_path):
    def no_context(*_: object) -> None:
        raise mujoco.FatalError("an OpenGL platform library has not been loaded")

    arguments = [str(exported_run("Anymal")), "--out", str(tmp_path / "a.mp4")]
    monkeypatch.setattr(mujoco, "Renderer", no_context)
    with pytest.raises(SystemExit, match=r"^--out: no OpenGL .*loaded\); try MUJOCO_GL=egl"):
        deploy.main(arguments)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(SystemExit, match=r"^--out: .*pip install imageio-ffmpeg"):
        deploy.main(arguments)


def test_deploy_example_without_policy_exits_with_2(tmp_path):
    done = run_here(DEPLOY, tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "policy.json" in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_policy_is_rejected_by_every_command(tool_here, train_here, runs_folder, tmp_path, value):
    run = shutil.copytree((runs_folder / "runs" / "Cartpole" / "latest").resolve(), tmp_path / "run")
    state = checkpoint_file.load(run / "checkpoints" / "last.pt")
    name, weights = next((name, value) for name, value in state["policy"].items() if value.is_floating_point())
    weights.view(-1)[0] = value
    checkpoint_file.save(run / "checkpoints" / "last.pt", state)
    expected = f"run/checkpoints/last.pt: the policy ({name}) contains NaN or infinity"
    for done in (
        tool_here("export", run),
        tool_here("play", run, "--viewer", "none", "--steps", "2"),
        train_here(f"checkpoint={run}", "test=true"),
        train_here(f"checkpoint={run}"),
    ):
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and expected in done.stderr, done.stderr
    assert not (run / "export").exists()
