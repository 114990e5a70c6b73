"""Exported policies: each file acts as the policy does, and plain MuJoCo needs nothing else."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
import shutil
import sys
from contextlib import closing, redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType

import mujoco
import numpy as np
import onnxruntime
import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.distributed import actors
from gpusim_rl.errors import ConfigError
from gpusim_rl.export import files, parity
from gpusim_rl.export.controls import fit, measure
from gpusim_rl.files import checkpoint_file
from gpusim_rl.view.player import Player
from helpers.commands import ROOT, run_command
from helpers.training import make_trainer, the_run

pytest_plugins = ["helpers.tool_runs"]

DEPLOY = ROOT / "docs" / "examples" / "deploy.py"
SMALL = {
    "horizon": 8,
    "network": {"hidden": [16, 16], "critic_hidden": [16, 16]},
    "learning_starts": 64,
    "batch_size": 32,
}
DQN = {**SMALL, "network": {"hidden": [16, 16]}}
RNN = {"network": {"hidden": [16], "rnn_size": 8, "rnn_layers": 2}}


def opened(run: Path) -> closing[Player]:
    """The run, for a `with` block."""
    return closing(Player.open(str(run)))


def seen(policy: torch.nn.Module, size: int) -> np.ndarray:
    """Observations [12 steps, 5 envs, size] that the normaliser neither knows nor clips all of."""
    norm = policy.obs_norm["policy"] if len(policy.obs_norm) else None  # type: ignore[union-attr, index]
    mean, scale = (torch.zeros(size), torch.ones(size)) if norm is None else (norm.mean, norm.scale)
    z = 2.0 * torch.randn(12, 5, size, generator=torch.Generator().manual_seed(3))
    return (mean + scale * z).float().numpy()


def check_files(folder: Path, player: Player) -> dict:
    """Play five episodes of twelve steps with the files and with the policy; returns the card."""
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
        # the critic's group does not matter
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
        for ours, theirs in zip(hidden[: len(states)], onnx_state, strict=True):
            np.testing.assert_allclose(theirs, ours.numpy(), rtol=1e-5, atol=1e-5)
        if "control" in card:
            offset, scale = (np.array(card["control"][key]) for key in ("offset", "scale"))
            expected = offset + scale * action.numpy()[:, card["control"]["source"]]
            np.testing.assert_allclose(outputs[1], expected, rtol=1e-5, atol=1e-5)
        acted.append(action)
    assert len(torch.stack(acted).unique(dim=0)) > 1, "the policy does the same whatever it sees"
    return card


def shake(file: Path) -> None:
    """Give a checkpoint's last layers large weights: those of an untrained policy hardly look at the observation."""
    state = checkpoint_file.load(file)
    generator = torch.Generator().manual_seed(0)
    last = ("head.mean.weight", "head.logits.weight", "actor.head.weight", "critic.head.weight")
    for name in last:
        if (value := state["policy"].get(name)) is not None:
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    checkpoint_file.save(file, {key: value for key, value in state.items() if key not in ("format", "gpusim_rl")})


@pytest.fixture(scope="module")
def ant(runs_folder: Path, load_tool, tmp_path_factory) -> tuple[Path, str]:
    """The Ant of the runs, exported as a user does; the folder, and what was printed."""
    folder = shutil.copytree(runs_folder, tmp_path_factory.mktemp("export") / "all", symlinks=True)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.chdir(folder)
        assert load_tool("export").main(["Ant"]) == 0
    return folder / printed.getvalue().splitlines()[-1], printed.getvalue()


@pytest.fixture(scope="module")
def deploy() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("deploy", DEPLOY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- the command ------------------------------------------------------------------------------


def test_a_run_becomes_a_folder_that_acts_as_the_policy_does(ant):
    folder, printed = ant
    assert folder.name == "export" and (folder.parent / "checkpoints").is_dir()
    names = ["policy.int8.onnx", "policy.json", "policy.onnx", "policy.ts", "scene.mjb", "scene.xml"]
    assert sorted(path.name for path in folder.iterdir()) == names
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
    assert set(card["latency_us"]["median"]) == {"onnx", "torchscript", "int8", "torch"}
    assert re.search(r"max error on 10,000 .*: onnx \S+, torchscript \S+, int8 \S+\n", printed)
    assert re.search(r"median of 1,000 calls \[us\]: onnx \d+, torchscript \d+, int8 \d+, torch \d+\n", printed)


def test_the_scene_is_the_one_of_the_run(ant):
    folder, _ = ant
    model = mujoco.MjModel.from_binary_path(str(folder / "scene.mjb"))
    readable = mujoco.MjModel.from_xml_path(str(folder / "scene.xml"))
    with opened(folder.parent) as player:
        scene = player.env.sim.scene.model  # type: ignore[attr-defined]
        for name in ("body_mass", "body_inertia", "jnt_range", "actuator_gear", "geom_size", "dof_damping"):
            np.testing.assert_array_equal(getattr(model, name), getattr(scene, name))
            np.testing.assert_allclose(getattr(readable, name), getattr(scene, name), rtol=2e-5)
        assert model.opt.timestep == scene.opt.timestep
        assert (readable.opt.integrator, readable.opt.cone) == (scene.opt.integrator, scene.opt.cone)


def test_the_example_sees_and_earns_what_the_task_does(ant, deploy):
    """Step by step from the same state with the same actions: a wrong sign or frame shows at once."""
    folder, _ = ant
    card = json.loads((folder / "policy.json").read_text())
    example = deploy.Ant(folder, card, 0)
    first = example.reset()
    with opened(folder.parent) as player:
        env, random = player.env, torch.Generator().manual_seed(1)
        state = env.state_dict()["sim"]["mirror"][0].double().numpy()
        example.data.qpos[:], example.data.qvel[:] = state[1:16], state[16:]
        np.testing.assert_allclose(example.observe(), player.obs["policy"][0], atol=1e-4)
        assert first.shape == example.observe().shape
        ended = 0
        for _ in range(150):
            example.potential = float(env.task.potential[0])  # type: ignore[attr-defined]
            action = 2.0 * torch.rand(1, 8, generator=random) - 1.0
            step = env.step(action)
            obs, reward, done = example.step(action[0].numpy(), action[0].numpy())
            np.testing.assert_allclose(obs, step.final_obs["policy"][0], atol=2e-3)
            assert reward == pytest.approx(float(step.reward[0]), abs=1e-2)  # float32: 60,000 m/s of potential
            assert done == bool(step.done[0])
            if done:
                ended += 1
                example.reset()
                state = env.state_dict()["sim"]["mirror"][0].double().numpy()
                example.data.qpos[:], example.data.qvel[:] = state[1:16], state[16:]


def test_the_example_needs_neither_torch_nor_this_package():
    tree = ast.parse(DEPLOY.read_text())
    roots = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    roots |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert roots <= {"__future__", "argparse", "json", "pathlib", "typing", "mujoco", "numpy", "onnxruntime"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["Nothing"], "no checkpoint 'Nothing': expected a run folder, a .pt file or a trained task; in runs there is"),
        (["empty"], "no checkpoint in empty (it ended before its first one, or has just begun): expected checkpoints/"),
        (["Ant", "--out", "new/x"], "--out new/x: there is no folder new. Try one that is there, or make it first"),
        (["Ant", "--out", "runs"], "--out runs: the folder exists. Try another name, or --overwrite"),
        (["Ant", "--out", "/proc/x"], "--out /proc/x: cannot write there: No such file or directory"),
        (["Ant", "--out", "file", "--overwrite"], "--out file: cannot write there: Not a directory"),
    ],
)
def test_bad_input_is_one_line(runs_folder, load_tool, tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_write", lambda player, folder, int8: (folder / "x").touch())
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


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_extra_is_one_line(load_tool, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        load_tool("export").main(["Ant"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: export needs {package}: pip install 'gpusim-rl[export]'\n"


def test_the_recipe_in_plain_torch_is_the_policy(ant, tmp_path):
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


@pytest.mark.slow
def test_a_second_export_leaves_the_first_one_unless_asked(runs_folder, load_tool, monkeypatch, capsys):
    monkeypatch.chdir(runs_folder)
    tool = load_tool("export")

    def exported(*arguments: str) -> Path:
        tool.main(["Cartpole", "--no-int8", *arguments])
        return Path(capsys.readouterr().out.splitlines()[-1])

    first, second = exported(), exported()
    assert (first.name, second.name) == ("export", "export-2") and first.parent == second.parent
    (first / "policy.onnx").write_text("old")
    assert exported("--overwrite") == first
    assert (first / "policy.onnx").read_bytes() == (second / "policy.onnx").read_bytes()
    assert not (first / "policy.int8.onnx").exists()


# -- every kind of policy ---------------------------------------------------------------------

KINDS = {
    "ppo, clipped observations": ("Cartpole", {"task": {"clip_observations": 0.5}}),
    "ppo without normaliser": ("Cartpole", {"ppo": {"normalize_obs": False}}),
    "ppo, default pose": ("Anymal", {}),
    "ppo, discrete": ("Cartpole", {"task": {"discrete": True}}),
    "gru": ("Cartpole", {"ppo": {"network": {**RNN["network"], "rnn": "gru"}}}),
    "lstm, critic of its own": ("Ant", {"ppo": {"network": {**RNN["network"], "rnn": "lstm", "separate": True}}}),
    "asymmetric": ("ShadowHand", {"task": {"observation_type": "openai", "asymmetric": True}}),
    "sac": ("Pendulum", {"algo": "sac", "sac": SMALL}),
    "td3": ("Hopper", {"algo": "td3", "td3": SMALL}),
    "dqn, discrete": ("Cartpole", {"algo": "dqn", "dqn": DQN, "task": {"discrete": True}}),
    "dqn, bins": ("Pendulum", {"algo": "dqn", "dqn": DQN}),
    "envs of Gymnasium": ("Gymnasium", {"env": {"id": "Pendulum-v1"}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_policy_is_exported(tmp_path, monkeypatch, kind):
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
    if kind == "asymmetric":
        assert "critic" in player.env.obs_sizes
    if kind == "envs of Gymnasium":
        assert "joints" not in card and not (folder / "scene.mjb").exists()
    assert ("control" in card) == (kind != "envs of Gymnasium")


# -- its parts --------------------------------------------------------------------------------


def test_controls_that_are_a_scale_and_an_offset_are_found():
    random = np.random.default_rng(0)
    actions = random.uniform(-1, 1, (200, 3))
    controls = np.stack([0.4 - 0.5 * actions[:, 2], 30.0 * actions[:, 0], np.full(200, 1.5), actions[:, 1]], axis=1)
    found = fit(actions, controls.astype(np.float32).astype(float))
    assert found is not None
    assert found.offset == (0.4, 0.0, 1.5, 0.0) and found.scale == (-0.5, 30.0, 0.0, 1.0)
    assert found.source == (2, 0, 0, 1) and found.deviation < 1e-6
    assert found.names(["a", "b", "c", "d"], 3) == ["b", "d", "a"]
    assert fit(actions, actions[:, :1] + 0.1 * actions[:, 1:2]) is None  # two numbers for one actuator
    assert fit(actions, np.clip(actions, -0.9, 0.9)) is None
    assert fit(actions, np.cumsum(actions, axis=0)) is None


@pytest.mark.parametrize(
    ("task", "known"),
    [
        ("Cartpole", True),
        ("BallBalance", False),
        pytest.param("Quadcopter", False, marks=pytest.mark.slow),
        pytest.param("FrankaCabinet", False, marks=pytest.mark.slow),
    ],
)
def test_controls_of_tasks_are_measured(tmp_path, task, known):
    trainer = make_trainer(task, tmp_path, device="cpu")
    found = measure(trainer.env, 0)  # type: ignore[arg-type]
    assert (found is not None) == known
    if found is not None:
        assert (found.offset, found.scale, found.samples) == ((0.0,), (400.0,), 512)


def test_an_error_is_found_and_nothing_is_left(ant, monkeypatch):
    folder, _ = ant
    monkeypatch.setattr(files.parity, "TOLERANCE", -1.0)
    monkeypatch.setattr(files.parity, "CALLS", 10)
    monkeypatch.setattr(files, "write_onnx", lambda model, size, file: shutil.copy(folder / "policy.onnx", file))
    before = sorted(folder.parent.iterdir())
    with pytest.raises(ConfigError, match=r"policy.onnx differs from the policy by .*: nothing was written"):
        files.write_all(str(folder.parent), None, int8=False)
    assert sorted(folder.parent.iterdir()) == before


def test_a_choice_at_its_border_is_no_error_and_a_wrong_one_is():
    obs = np.linspace(-1.0, 1.0, 10_000, dtype=np.float32)[:, None]

    def choice(threshold: float) -> parity.Function:
        return lambda seen: ((seen > np.float32(threshold)).astype(np.int64),)

    exact, near = float(obs[7000, 0]), float(np.nextafter(obs[7000, 0], np.float32(-1.0)))
    found = parity.compare(choice(exact), choice(near), obs, ())
    assert found == parity.Parity(0.0, 1, 10_000)
    assert parity.compare(choice(exact), choice(exact - 3e-4), obs, ()).max_error == 1.0
    assert parity.compare(choice(exact), choice(0.0), obs, ()).max_error == 1.0


def test_a_nan_is_an_error():
    def function(value: float) -> parity.Function:
        return lambda seen: (np.full((len(seen), 1), value),)

    obs = np.zeros((10_000, 1), dtype=np.float32)
    found = parity.compare(function(0.0), function(math.nan), obs, ())
    with pytest.raises(ConfigError, match="differs from the policy by inf"):
        parity.require(found, "policy.onnx")


# -- the example ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_earns_what_the_evaluation_does(tmp_path):
    """Within 3 % and three standard errors of both."""
    train = (sys.executable, ROOT / "train.py", "device=cpu", "ppo.precision=fp32")
    small = ("num_envs=256", "max_iterations=100", "ppo.minibatch_size=2048")
    run_command(*train, "task=Ant", *small, cwd=tmp_path, timeout_s=600)
    run = the_run(tmp_path / "runs")
    run_command(*train, f"checkpoint={run}", "test=true", cwd=tmp_path, timeout_s=300)
    run_command(sys.executable, ROOT / "tools" / "export.py", run, "--no-int8", cwd=tmp_path)
    done = run_command(sys.executable, DEPLOY, run / "export", "--episodes", "100", cwd=tmp_path, timeout_s=300)
    found = re.fullmatch(r"return (\S+) \+- (\S+) \(standard error of 100 episodes\)\n", done.stdout)
    assert found, done.stdout
    mean, error = map(float, found.groups())
    evaluation = json.loads((run / "evaluation.json").read_text())
    both = math.hypot(error, evaluation["return_std"] / evaluation["episodes"] ** 0.5)
    assert abs(mean - evaluation["return_mean"]) <= 0.03 * evaluation["return_mean"] + 3.0 * both
    assert mean > 200.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_policy_that_is_not_finite_is_one_line_to_all_that_act_by_it(
    tool_here, train_here, runs_folder, tmp_path, value
):
    run = shutil.copytree((runs_folder / "runs" / "Cartpole" / "latest").resolve(), tmp_path / "run")
    state = checkpoint_file.load(run / "checkpoints" / "last.pt")
    name, weights = next((name, value) for name, value in state["policy"].items() if value.is_floating_point())
    weights.view(-1)[0] = value
    checkpoint_file.save(run / "checkpoints" / "last.pt", state)
    expected = f"run/checkpoints/last.pt: the policy ({name}) is NaN or infinite. Try another checkpoint of the run\n"
    for done in (
        tool_here("export", run),
        tool_here("play", run, "--viewer", "none", "--steps", "2"),
        train_here(f"checkpoint={run}", "test=true"),
        train_here(f"checkpoint={run}"),
    ):
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and done.stderr.endswith(expected), done.stderr
    assert not (run / "export").exists()
