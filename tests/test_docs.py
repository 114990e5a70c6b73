"""Documents: commands run, files work, tables and names match the code."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import onnx
import pytest
import torch
import yaml

import gpusim_rl
from gpusim_rl.api import prepare
from gpusim_rl.env import TaskConfig, VecEnv
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.export.files import write_all
from gpusim_rl.files.paths import demos_dir
from gpusim_rl.learn.algorithm import Algorithm
from gpusim_rl.learned import learned
from gpusim_rl.run import checkpoint
from gpusim_rl.settings.checks import check_settings
from gpusim_rl.settings.compose import compose
from gpusim_rl.settings.discover import read_yaml, tasks
from gpusim_rl.settings.schema import ALGORITHMS, RunConfig
from gpusim_rl.sim import Scene, SimChoice
from helpers.commands import ROOT, Finished, run_command, run_here
from learn import learning
from reliability import record

pytest_plugins = ["helpers.tool_runs"]

BLOCK = re.compile(r"(?:<!-- (file\+?): (\S+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Fenced block of a document."""

    language: str
    text: str
    file: str | None  # its path according to the document
    appended: bool


def read(document: str) -> str:
    """Return a document with `python tools/x_y.py`, which runs this checkout, in place of `gpusim-rl x-y`."""
    text, tool = (ROOT / document).read_text(), r"\bgpusim-rl (?!train\b)([a-z-]+)"
    return re.sub(tool, lambda match: f"python tools/{match[1].replace('-', '_')}.py", text)


def blocks(document: str) -> list[Block]:
    """Return all fenced blocks, in order."""
    text = read(document)
    return [Block(language, body, file or None, kind == "file+") for kind, file, language, body in BLOCK.findall(text)]


def write(block: Block, folder: Path) -> None:
    """Write or extend the file of a block."""
    assert block.file is not None
    path = folder / block.file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if block.appended else "w") as file:
        file.write(block.text)


def checkout_copy(folder: Path) -> Path:
    """Copy the checkout."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "runs", "wandb", "build", "dist", "*.egg-info")
    return shutil.copytree(ROOT, folder, ignore=ignored)


def shell(command: str, cwd: Path) -> Finished:
    """Run a command of a document in a shell with this environment's `python` and `pytest`."""
    if re.fullmatch(r"python \S+\.py( [\w./=,+-]+)*", command):  # needs no shell
        return run_command(sys.executable, *command.split()[1:], cwd=cwd, timeout_s=280)
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    env["GOMP_SPINCOUNT"] = "1000"  # these commands share the cores with other tests
    if command.startswith("pytest"):
        env["PYTHONPATH"] = str(cwd)  # the reader has this checkout installed, the test run another one
    return run_command("bash", "-ec", command, cwd=cwd, env=env, timeout_s=280)


def here(command: str, cwd: Path) -> Finished:
    """Run one of our commands in this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_tasks"]:
        del sys.modules[name]  # from another folder
    _, script, *words = shlex.split(command)
    return run_here(ROOT / script, *words, cwd=cwd)


def write_files(document: str, folder: Path) -> None:
    """Write all files of a document."""
    for block in blocks(document):
        if block.file is not None:
            write(block, folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tutorial_works_from_start_to_end(tmp_path):
    """Create a task with the tool, then write one, train, evaluate and run the conformance suite."""
    folder, printed = checkout_copy(tmp_path / "checkout"), {}
    for block in blocks("docs/add_a_task.md"):
        if block.file is not None:
            write(block, folder)
        elif block.language == "bash":
            printed |= {line: shell(line, folder) for line in block.text.splitlines()}
    runs = [path for path in (folder / "runs" / "Reacher").iterdir() if not path.is_symlink()]
    [run] = [path for path in runs if len(rows(path)) == 60]
    returns = [float(row["episode/return"]) for row in rows(run) if row["episode/return"]]
    assert returns[0] < 40 and returns[-1] > 80
    assert float(rows(run)[-1]["reward/reach"]) > 0.6
    evaluation = printed["python train.py -cd my_cfg checkpoint=Reacher test=true num_envs=256"].stdout
    assert float(re.search(r"return_mean +(\S+)", evaluation).group(1)) > 90  # type: ignore[union-attr]
    [video] = (folder / "runs" / "MyTask" / "latest" / "videos").glob("*.mp4")
    assert video.stat().st_size > 10_000
    [warp] = [done.stdout for command, done in printed.items() if "sim=mjwarp" in command]
    assert "mjwarp on cpu" in warp and "iteration 2/2" in warp
    summary = printed["pytest test_my_tasks.py"].stdout.splitlines()[-1]
    assert re.search(r"\b[1-4]\d passed", summary) and "failed" not in summary


def test_every_tutorial_block_is_a_file_or_a_command():
    found = blocks("docs/add_a_task.md")
    others = [block.text.partition("\n")[0] for block in found if block.file is None and block.language != "bash"]
    assert [words.split()[0] for words in others] == ["task:", "mirrors"] and len(found) > 8


def test_tutorial_task_trains_and_is_evaluated(tmp_path):
    write_files("docs/add_a_task.md", tmp_path)
    small = "debug=smoke device=cpu log.console=quiet"
    for words in ("task=Reacher", "checkpoint=Reacher test=true"):
        done = here(f"python train.py -cd my_cfg {words} {small}", tmp_path)
        assert done.returncode == 0, done.stderr
    run = (tmp_path / "runs" / "Reacher" / "latest").resolve()
    assert "reward/reach" in rows(run)[-1] and (run / "checkpoints" / "last.pt").is_file()


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("my_tasks/reacher.py", '"to_target": self.to_target()', '"to_target": self.to_target()[:, 0]'),
        ("my_cfg/task/Reacher.yaml", "max_torque: 2.0", "max_torqe: 2.0"),
    ],
)
def test_tutorial_mistakes_raise_documented_errors(tmp_path, file, right, wrong):
    write_files("docs/add_a_task.md", tmp_path)
    text = (tmp_path / file).read_text()
    assert right in text
    (tmp_path / file).write_text(text.replace(right, wrong))
    done = here("python train.py -cd my_cfg task=Reacher debug=smoke device=cpu", tmp_path)
    assert done.returncode == 2
    error = done.stderr.strip().replace(f"{tmp_path}/", "")
    assert f"| `{error}` |" in (ROOT / "docs" / "add_a_task.md").read_text()


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_readme_task_trains_plays_and_resumes(tmp_path, monkeypatch):
    write_files("README.md", tmp_path)
    [command] = [text for text in commands("README.md") if text.startswith("python -c")]
    code = shlex.split(command)[2].replace("num_envs=256", "num_envs=16")
    (tmp_path / "small.py").write_text(code.replace("max_iterations=40", "max_iterations=2"))
    monkeypatch.syspath_prepend(tmp_path)  # as `python -c` does
    play = "tools/play.py Balance --trust --viewer none --steps 10"
    for words in (f"{tmp_path}/small.py", play, "train.py checkpoint=Balance trust=true max_iterations=3"):
        done = here(f"python {words}", tmp_path)
        assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs" / "Balance").glob("2*")
    assert len(rows(run)) == 3


@pytest.mark.slow
def test_readme_task_learns(tmp_path):
    write_files("README.md", tmp_path)
    [command] = [text for text in commands("README.md") if text.startswith("python -c")]
    shell(command, tmp_path)
    [run] = (tmp_path / "runs" / "Balance").glob("2*")
    assert float(rows(run)[-1]["episode/return"]) > 150  # of 300; the first episodes last about 30 steps


@pytest.mark.slow
def test_documented_demonstrations_are_recorded_and_learned(tmp_path):
    for block in blocks("docs/algorithms.md"):
        if block.file == "controller.py":
            write(block, tmp_path)
        elif "collect.py controller.py" in block.text:
            for line in block.text.splitlines():
                shell(line.replace("train.py", str(ROOT / "train.py")).replace("tools/", f"{ROOT}/tools/"), tmp_path)
    cloned, learned = sorted((tmp_path / "runs" / "Cartpole").glob("2*"))
    assert float(rows(cloned)[-1]["loss/held_out"]) < 0.05
    assert rows(learned)[-1]["replay/transitions"] == "1280.0"


def leaf_values(node: dict, prefix: str = "") -> dict[str, object]:
    """Return settings by full key."""
    leaves: dict[str, object] = {}
    for name, value in node.items():
        deeper = isinstance(value, dict) and value
        leaves |= leaf_values(value, f"{prefix}{name}.") if deeper else {prefix + name: value}
    return leaves


@pytest.fixture(scope="module")
def config_page() -> ModuleType:
    return load_script("docs/build_config.py")


def test_settings_page_is_up_to_date(config_page):
    assert config_page.build() == (ROOT / "docs" / "config.md").read_text(), "try python docs/build_config.py"


def descriptions(page: ModuleType) -> dict[str, str]:
    """Return each setting with its comment."""
    rows = page.settings(ROOT / "cfg" / "config.yaml") + page.algorithm("ppo")
    rows += page.settings(ROOT / "cfg" / "recipe" / "auto.yaml")
    for group, complete in page.GROUPS.items():
        rows += page.settings(ROOT / "cfg" / group / f"{complete}.yaml", f"{group}.")
    for name in page.ALGORITHMS:
        for shared in reversed(page.shared(page.CFG / "algo" / f"{name}.yaml")):
            rows += page.settings(shared, f"{name}.")
        rows += page.algorithm(name)
    return {row.key: row.comment for row in rows if row.value is not None}


def test_every_setting_has_one_default_and_a_description(config_page):
    found = descriptions(config_page)
    defaults = leaf_values(compose(["~task"]))
    for name in ALGORITHMS:
        defaults |= leaf_values({name: compose(["~task", f"algo={name}"])[name]})
    assert set(found) == {key for key in defaults if not key.startswith("algo.")}
    assert [key for key, description in found.items() if not description] == []
    listed = set(re.findall(r"`([a-z_0-9.]+)(?:=[^`]*)?`", config_page.build()))
    keys = [*found, *(f"task.{field.name}" for field in dataclasses.fields(TaskConfig))]
    assert [key for key in keys if not {key, key.partition(".")[2]} & listed] == []


def test_every_choice_is_in_the_description_of_its_setting(config_page):
    found = descriptions(config_page)
    algorithms = [choice for name, (_, settings) in ALGORITHMS.items() for choice in choices(settings, f"{name}.")]
    assert len(algorithms) >= 4
    for key, options in [*choices(RunConfig), *algorithms]:
        for option in options:
            assert re.search(rf"\b{option}\b", found[key]), f"{key}: {option}"


def choices(cls: type, prefix: str = "") -> list[tuple[str, list[str]]]:
    """Return keys with a fixed set of strings, and the strings."""
    found: list[tuple[str, list[str]]] = []
    hints = typing.get_type_hints(cls)
    for name in [field.name for field in dataclasses.fields(cls) if field.init]:
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            found += choices(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            options = [option for option in (hint, *typing.get_args(hint)) if typing.get_origin(option) is Literal]
            texts = [text for option in options for text in typing.get_args(option)]
            found += [(prefix + name, texts)] if texts else []
    return found


def test_every_file_and_column_of_a_run_is_documented(runs_folder):
    text = (ROOT / "docs" / "outputs.md").read_text()
    run = (runs_folder / "runs" / "Ant" / "latest").resolve()
    [tree] = [block.text for block in blocks("docs/outputs.md") if not block.language]
    for file in run.iterdir():
        assert re.search(rf"^  {re.escape(file.name)}/? +\S", tree, re.MULTILINE), file.name
    names = set(re.findall(r"`([^`]+)`", BLOCK.sub("", text)))
    for column in rows(run)[0]:
        known = column in names or (column.startswith("reward/") and "reward/<term>" in names)
        assert known or (column.startswith("system/") and "system/..." in names), f"{column} is not documented"


def test_every_field_of_a_checkpoint_is_documented(runs_folder):
    section = (ROOT / "docs" / "outputs.md").read_text().partition("## Checkpoints")[2].partition("## ")[0]
    fields = [line.partition(": ")[0] for line in section.splitlines() if line.startswith("- `")]
    documented = [name for names in fields for name in re.findall(r"`(\w+)`", names)]
    state = checkpoint.load(runs_folder / "runs" / "Ant" / "latest" / "checkpoints" / "last.pt")
    assert sorted(documented) == sorted(state)


@pytest.mark.slow
def test_audit_prints_the_documented_output(tmp_path):
    page = blocks("docs/profiling.md")
    [shown] = [block.text for block in page if block.text.startswith("Ant, 64 envs")]
    command = page[0].text.replace("tools/", f"{ROOT}/tools/").strip()
    printed = shell(f"{command} device=cpu ppo.precision=fp32", tmp_path)

    def skeleton(text: str) -> list[str]:
        """Return the lines without machine-dependent sizes and operator counts."""
        text = re.sub(r"\(auto: [^)]*\)|\([\d.]+ k?B\)| +[\d,]+$", "", text, flags=re.MULTILINE)
        return [re.sub(r" +", " ", line) for line in text.splitlines()]

    assert skeleton(printed.stdout) == skeleton(shown)


@pytest.mark.slow
def test_profiler_trace_is_at_the_documented_path(tmp_path):
    [command] = [text for text in commands("docs/profiling.md") if text.startswith("python train.py")]
    shell(command.replace("train.py", f"{ROOT}/train.py") + " device=cpu num_envs=64", tmp_path)
    assert (tmp_path / "runs" / "Cartpole" / "latest" / "profile" / "trace.json.gz").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_agents_md_run(tmp_path):
    typed = [command for command in commands("AGENTS.md") if command.startswith("python ")]
    assert len(typed) == 8
    for command in typed:
        done = shell(re.sub(r"(tools/|train\.py)", rf"{ROOT}/\1", command, count=1), tmp_path)
        if "json" in command:
            json.loads(done.stdout)
    run = (tmp_path / "runs" / "Reach" / "latest").resolve()
    first, *_, last = [row for row in rows(run) if row["episode/return"]]
    assert float(last["episode/return"]) > float(first["episode/return"])
    assert list((run / "videos").glob("*.mp4")) and json.loads((run / "evaluation.json").read_text())


@pytest.fixture
def my_robot(tmp_path) -> Path:
    """Program of the document."""
    write_files("docs/your_robot.md", tmp_path)
    return tmp_path / "my_robot.py"


def test_documented_robot_follows_its_targets(my_robot):
    found = runpy.run_path(str(my_robot))
    settings = {"seed": 0, "sim": "mujoco", "device": "cpu"}
    drives = {"stiffness": ("scaling", 0.8, 1.2), "effort": ("scaling", 0.7, 1.0), "delay": ("additive", 0.0, 0.006)}
    drives = {k: {"operation": how, "range": ends, "distribution": "uniform"} for k, (how, *ends) in drives.items()}
    randomized = {"randomize": True, "randomization_params": {"actor_params": {"arm": {"dof_properties": drives}}}}
    for randomization in ({}, randomized):
        length = {"episode_length": 1000, "randomize_episode_start": False}
        config = dataclasses.replace(found["config"], **length, **randomization)
        env = gpusim_rl.make_env(found["Follow"], config, num_envs=4, **settings)
        target = env.reset()["policy"][:, -2:]
        for _ in range(150):
            step = env.step(0.5 * target)
        assert (step.reward > 0.99).all()  # within 0.01 rad, also with friction and delays
    model = found["scene"].model
    assert model.actuator_delay.tolist() == pytest.approx([0.003, 0.003])  # 1.5 physics steps
    assert model.nu == 2


@pytest.mark.slow
def test_one_command_creates_a_task_for_the_robot(my_robot):
    for command in commands("docs/your_robot.md"):
        if "Wave" in command:
            here = re.sub(r"^python (tools/)?", lambda match: f"python {ROOT}/{match[1] or ''}", command)
            small = " device=cpu max_iterations=20 log.console=quiet" if "train.py" in command else ""
            shell(here + small, my_robot.parent)
    [run] = (my_robot.parent / "runs" / "Wave").glob("2*")
    first, *_, last = rows(run)
    assert float(last["reward/reach"]) > float(first["reward/reach"]) + 0.1


@pytest.mark.slow
def test_documented_robot_learns(my_robot):
    shell("python train_my_robot.py", my_robot.parent)
    [run] = [path for path in (my_robot.parent / "runs" / "Follow").iterdir() if not path.is_symlink()]
    first, *_, last = rows(run)
    assert float(last["reward/follow"]) > float(first["reward/follow"]) + 0.2
    [command] = [text for text in commands("docs/your_robot.md") if "export.py runs/Follow" in text]
    shell(command.replace("tools/", f"{ROOT}/tools/"), my_robot.parent)
    card = json.loads((run / "export" / "policy.json").read_text())
    assert [term["unit"] for term in card["observation"]["terms"]] == ["rad", "rad/s", "rad/s", "rad"]


def test_robot_mistakes_raise_documented_errors(my_robot):
    found = runpy.run_path(str(my_robot))
    scene, page = found["scene"], (ROOT / "docs" / "your_robot.md").read_text()

    def message(act: Callable[[], None]) -> str:
        with pytest.raises(TaskError) as error:
            act()
        return f"`error: {error.value}`"

    fresh = Scene(500)
    fresh.add("arm", my_robot.parent / "arm.urdf")
    drive = {"kind": "position", "stiffness": 1.0}
    assert message(lambda: fresh.add_actuators("arm", "elbo", **drive)) in page
    assert message(lambda: scene.add_actuators("arm", "elbow", **drive)) in page
    assert message(lambda: fresh.add_actuators("arm", "elbow", damping=-1.0, **drive)) in page


TINY = {
    "train.py": "debug=smoke num_envs=8 max_iterations=1 device=cpu log.console=quiet",
    "tools/play.py": "--viewer none --steps 5 --num-envs 2",
    "tools/record.py": "--steps 5",
    "tools/export.py": "--no-int8",
    "tools/pretrain_encoder.py": "--frames 32 --epochs 1 --num-envs 4 --batch-size 16",
}
"""Arguments that make the commands of vision.md and motion.md small."""
TINY |= {"tools/clip.py": "", "tools/clip.py play": "--out play.html --steps 2"}
TINY |= {"tools/clip.py record": "--seconds 0.2 --skip 0"}


@pytest.fixture
def vision_folder(tmp_path) -> Path:
    """Folder with the files of the document."""
    write_files("docs/vision.md", tmp_path)
    return tmp_path


def tiny(command: str) -> str:
    """Return a command of the page reduced to a few frames, with paths into the checkout."""
    program, first = command.split()[1:3]
    return f"{command.replace(program, f'{ROOT}/{program}', 1)} {TINY.get(f'{program} {first}') or TINY[program]}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_documented_arm_is_trained_recorded_and_exported(vision_folder):
    typed = [command for command in commands("docs/vision.md") if "-cd my_cfg" in command]
    assert [command.split()[1] for command in typed] == ["train.py", "train.py", *list(TINY)[1:4]]
    for command in typed:
        shell(tiny(command), vision_folder)
    run = (vision_folder / "runs" / "Look" / "latest").resolve()
    assert len(rows(run)) == 1 and json.loads((run / "evaluation.json").read_text())
    assert [path.suffix for path in (run / "videos").iterdir()] == [".mp4"]
    card = json.loads((run / "export" / "policy.json").read_text())
    assert "wrist" in json.dumps(card["observation"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("frozen", [False, True])
def test_other_vision_commands_run(vision_folder, frozen):
    typed = [text for text in commands("docs/vision.md") if "-cd my_cfg" not in text and ("encoder" in text) == frozen]
    for command in typed:
        shell(tiny(command), vision_folder)
    runs = [path.parent for path in (vision_folder / "runs").glob("*/2*/config.yaml")]
    assert len(runs) == sum("train.py" in command for command in typed) == (2 if frozen else 6)
    assert all((run / "encoder.pt").is_file() == frozen for run in runs)


def demo_run(task: str, folder: Path) -> None:
    """Copy a bundled demo as the latest run of its task."""
    runs = folder / "runs" / task
    shutil.copytree(demos_dir() / task, runs / "2026-01-31_12-00-00")
    (runs / "latest").symlink_to("2026-01-31_12-00-00")


def strangers_policy(folder: Path) -> None:
    """Write policy.onnx and deploy.yaml of a G1 policy, as another project would."""
    card = write_all(str(demos_dir() / "G1VelocityForward"), folder / "g1", int8=False)[1]
    network = onnx.load(folder / "g1" / "policy.onnx")
    del network.graph.output[1]
    onnx.save(network, folder / "policy.onnx")
    kinds = {"lin_vel": "base_lin_vel", "ang_vel": "base_ang_vel", "gravity": "projected_gravity"}
    kinds |= {"joint_pos": "joint_pos_rel", "actions": "last_action", "command": "velocity_commands"}
    control, actuators = card["control"], card["actuators"]
    contract = {
        "joints": [row["joint"].removeprefix("robot/") for row in actuators],
        "pose": [joint["pose"] for joint in card["joints"]],
        **{key: [row[key] for row in actuators] for key in ("kp", "kd")},
        "control_hz": card["control_hz"],
        "terms": [{"kind": kinds.get(name := term["name"], name)} for term in card["observation"]["terms"]],
        "action_scale": control["scale"],
        "action_offset": control["offset"],
        "commands": card["commands"],
    }
    (folder / "deploy.yaml").write_text(yaml.safe_dump(contract))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_deploy_run(tmp_path, monkeypatch):
    """On bundled demos, and without MuJoCo for browsers, which is not here without a network."""
    monkeypatch.setattr("gpusim_rl.deployed.share.browser_files", lambda: {"code": "", "wasm": ""})
    write_files("docs/deploy.md", tmp_path)
    demo_run("Go1Velocity", tmp_path)
    strangers_policy(tmp_path)
    small = {"train": f"{TINY['train.py']} log.dir=trained", "stress": "--episodes 8"}
    typed, codes = commands("docs/deploy.md"), []
    for command in typed:
        done = here(f"{command} {small.get(Path(command.split()[1]).stem, '')}", tmp_path)
        codes.append(done.returncode)
        assert "--gate" in command or done.returncode == 0, done.stderr
    names = [Path(command.split()[1]).stem for command in typed]
    assert names == ["train", "export", "stress", "stress", "share", "adopt"]
    run = tmp_path / "runs" / "Go1Velocity" / "latest"
    verdicts = [row["verdict"] for row in json.loads((run / "stress.json").read_text())["gate"]]
    assert len(verdicts) == 3 and codes[3] == int("missed" in verdicts)
    assert (run / "walk.html").is_file() and (tmp_path / "walk" / "contract.yaml").is_file()


@pytest.mark.slow
def test_documented_camera_code_runs(vision_folder, monkeypatch):
    page = [block for block in blocks("docs/vision.md") if block.file is None and block.language != "bash"]
    assert {block.language for block in page} == {"python", "yaml"}
    lines = [block.text for block in page if block.language == "python"]
    sections = [yaml.safe_load(block.text)["task"] for block in page if block.language == "yaml"]
    assert (len(lines), len(sections)) == (3, 2)
    monkeypatch.syspath_prepend(vision_folder)
    for name in ("my_tasks", "my_tasks.look"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    settings = {"num_envs": 4, "sim": "mujoco", "device": "cpu"}
    section = {k: v for it in sections for k, v in it.items()}
    spec = prepare("Look", config_dir=vision_folder / "my_cfg", task=section, **settings)

    class Edited(spec.task_class):  # type: ignore[name-defined]
        @classmethod
        def scene(cls, cfg):
            scene = super().scene(cfg)
            exec("\n".join(text for text in lines if text.startswith("scene.")), {"scene": scene})
            return scene

        def __init__(self, cfg, sim):
            super().__init__(cfg, sim)
            exec("\n".join(text for text in lines if text.startswith("self.")), {"self": self, "sim": sim})

    assert all(text.startswith(("scene.", "self.")) for text in lines)
    choice = SimChoice("mujoco", torch.device("cpu"), "test")
    env = VecEnv.make(Edited, spec.cfg.task, num_envs=4, choice=choice, sim=spec.cfg.sim, seed=0)
    task: Any = env.task
    seen, clean = env.reset()["wrist"], env.clean_obs()["wrist"]
    assert seen.shape == (4, 32, 32, 3) and not torch.equal(seen, clean)
    assert task.grip.rgb.shape == (4, 64, 64, 3) and task.grip.depth.shape == (4, 64, 64)
    assert set(env.sim.scene.cameras) == {"wrist", "side", "grip", "arm/overhead"}
    assert len(task.hue.value.unique(dim=0)) == 4, "all balls are equal"
    assert len(env.sim.param("cam_pos", None, ["wrist"]).value.unique(dim=0)) == 4, "all cameras are equal"
    assert task.angle.default.tolist() == [90.0]
    assert env.step(torch.zeros(4, 2)).obs["wrist"].shape == seen.shape


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_motion_commands_run(tmp_path):
    for command in commands("docs/motion.md"):
        shell(tiny(command), tmp_path)
    runs = [path.parent for path in (tmp_path / "runs").glob("*/2*/config.yaml")]
    assert sorted(run.parent.name for run in runs) == [
        *("G1Tracking", "Go1Tracking", "Go1Tracking", "HumanoidAMP", "HumanoidTracking")
    ]
    assert sum(bool(list(run.glob("videos/*.mp4"))) for run in runs) == 2
    assert {path.name for path in tmp_path.iterdir()} >= {"mine.npz", "play.html"}


def test_documented_clip_code_runs(capsys):
    [code] = [block.text for block in blocks("docs/motion.md") if block.language == "python"]
    exec(code, {})
    assert capsys.readouterr().out.startswith("4.0 ('FR_hip_joint'")


@pytest.mark.slow
def test_ported_example_task_conforms_and_learns(tmp_path):
    shutil.copytree(ROOT / "docs" / "examples" / "hold", tmp_path, dirs_exist_ok=True)
    shell(f"python {ROOT}/tools/check_task.py Hold -cd my_cfg --sim mujoco", tmp_path)
    small = "device=cpu max_iterations=30 log.console=quiet"
    shell(f"python {ROOT}/train.py -cd my_cfg task=Hold {small}", tmp_path)
    [run] = (tmp_path / "runs" / "Hold").glob("2*")
    assert float(rows(run)[-1]["task/near"]) > 0.5


DOCUMENTS = [
    "README.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]


def anchors(file: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", BLOCK.sub("", file.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_line_ends_within_inline_code(document):
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = [line for line in text.splitlines() if line.replace("``", "").count("`") % 2 and not line.startswith("|")]
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_resolve(document):
    file = ROOT / document
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", file.read_text()):
        if not target.startswith("http"):
            path = file.parent / target if target else file
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@pytest.fixture(scope="module")
def known_settings() -> set[str]:
    """All settings that a document may name, and names that only look like one."""
    known = {*leaf_values(compose(["~task"])), "debug.check_task"}
    known |= {f"ppo.{section}" for section in ("network", "symmetry", "rnd", "teacher")}
    known |= {f"task.{field.name}" for field in dataclasses.fields(TaskConfig)} | {"task._target_"}
    sections = [read_yaml(entry.file)["task"] for entry in tasks().values()]
    reacher = [block for block in blocks("docs/add_a_task.md") if block.file == "my_cfg/task/Reacher.yaml"]
    sections += [yaml.safe_load(block.text)["task"] for block in reacher]
    for settings in sections:
        known |= {*leaf_values({"task": settings}), *(f"task.{key}" for key in settings)}
    # a deliberate mistake, methods, an argument, a field, a section of IsaacGymEnvs
    methods = {f"sim.{name}" for name in ("articulation", "param", "camera", "draw")}
    return known | methods | {"task.max_torqe", "task_name", "wandb_id", "sim_params"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_settings_exist(document, known_settings):
    text = BLOCK.sub("", (ROOT / document).read_text())
    named = re.findall(r"`((?:algo|ppo|sim|log|debug|task|wandb)[._][a-z_.]+)(?:=[^`]*)?`", text)
    free = ("task.env", "task.sim", "task.randomization_params.")
    assert [name for name in named if name not in known_settings and not name.startswith(free)] == []


def commands(document: str) -> list[str]:
    """Return the commands in bash blocks of a document and in the table of symptoms, without comments."""
    text = read(document)
    bodies = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for body in bodies for line in body.splitlines()]
    if document == "docs/symptoms.md":
        lines += re.findall(r"\| `(python [^`]*)`", text)
    stripped = [re.sub(r"\s+#.*", "", line) for line in lines if not line.startswith("#")]
    return [part for line in stripped for part in line.split(" && ")]


@cache
def load_script(path: str) -> ModuleType:
    """Import a script of the checkout by its path."""
    spec = importlib.util.spec_from_file_location(f"script_{Path(path).stem}", ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


LONG = pytest.param("docs/algorithms.md", marks=pytest.mark.slow)  # 5 s


@pytest.mark.parametrize(
    "document", [LONG, *(name for name in DOCUMENTS if not name.endswith(("add_a_task.md", "algorithms.md")))]
)
def test_commands_parse(document, monkeypatch, runs_folder, tmp_path):
    monkeypatch.chdir(runs_folder)  # where checkpoint=Ant and checkpoint=Cartpole exist
    write_files(document, tmp_path)
    for command in commands(document):
        program, *arguments = shlex.split(re.sub(r"^([A-Z_]+=\S+ )+", "", command))
        if program == "torchrun":
            arguments = arguments[arguments.index("train.py") :]
        if command == "python train.py num_env=64":
            with pytest.raises(ConfigError, match="'num_envs'"):
                compose(arguments[1:])
        elif arguments[:1] == ["train.py"]:
            settings = [argument for argument in arguments[1:] if "=" in argument]
            sweep = "-m" in arguments
            config_dir = tmp_path / arguments[arguments.index("-cd") + 1] if "-cd" in arguments else None
            check_settings(compose([text.split(",")[0] if sweep else text for text in settings], config_dir))
        elif program == "python" and arguments[0].startswith(("tools/", "benchmarks/", "docs/")):
            load_script(arguments[0]).parse(arguments[1:])
            if arguments[0] == "tools/new_task.py":  # later commands need its files
                assert here(command, tmp_path).returncode == 0
        elif program == "python" and (tmp_path / arguments[0]).is_file():  # file of the document
            assert len(arguments) == 1
        elif program == "python" and arguments[0].startswith("tests/"):
            assert (ROOT / arguments[0]).exists()
        elif arguments[:1] != ["-c"]:
            checks = ("ruff", "pyright", "lint-imports", ".ci/run")
            assert program in ("pip", "pytest", "gpusim-rl", "tensorboard", "git", "cd", "cc", "./a.out", *checks), (
                command
            )


# Files of other projects or of the reader, outputs of commands, options of Hydra.
FOREIGN_PATHS = ("my_", "walk/", "cfg/train/", "isaacgymenvs/cfg/task/", "cfg/task/Reacher", "benchmarks/gpu/gpu.json")
FOREIGN_FLAG = re.compile(
    r"--(head|block|max-restarts|nnodes|node-rank|master-(addr|port)|nproc-per-node|rdzv-(backend|conf)|cfg|help)"
)
COMMANDS = ("tools", "benchmarks", "benchmarks/*", "docs", "docs/examples", "tests/helpers")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_paths_exist(document):
    own = {block.file for block in blocks(document)}
    named = re.findall(
        r"\w[\w./-]*\.(?:py|yaml|json)\b(?!\.\w)", re.sub(r"https?://\S+", "", (ROOT / document).read_text())
    )
    for name in {name for name in named if "/" in name} - own:
        places = (ROOT, ROOT / "gpusim_rl", ROOT / "docs", ROOT / "tasks", ROOT / "cfg")
        found = any((place / name).exists() for place in places)
        assert found or name.startswith(FOREIGN_PATHS), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_tests_exist(document):
    if names := re.findall(r"`(test_\w+)`", (ROOT / document).read_text()):
        sources = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
        assert [name for name in names if f"def {name}(" not in sources] == []


FLAG = r"(?<![\w-])(--[a-z][a-z0-9-]*)"


@cache
def flags_of(file: Path) -> set[str]:
    return set(re.findall(r"\"(--[a-z][a-z0-9-]*)\"", file.read_text()))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_flags_exist(document):
    shared = set[str]().union(*(flags_of(ROOT / "gpusim_rl" / f"{name}.py") for name in ("options", "view/arguments")))
    files = [file for folder in COMMANDS for file in ROOT.glob(f"{folder}/*.py")]
    anywhere = shared.union(*map(flags_of, files))
    text = read(document)
    for flag in re.findall(FLAG, text):
        assert flag in anywhere or FOREIGN_FLAG.fullmatch(flag), flag
    with_words = r"python3? ((?:tools|benchmarks(?:/\w+)?|docs|tests/helpers)/\w+\.py)([^`#\n]*)"
    for script, rest in re.findall(with_words, text):
        for flag in re.findall(FLAG, rest):
            assert flag in flags_of(ROOT / script) | shared, f"{script} {flag}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_python_objects_exist(document):
    for name in re.findall(r"`(gpusim_rl(?:\.[A-Za-z_]\w*)+)", (ROOT / document).read_text()):
        if name.startswith(("gpusim_rl.tasks.", "gpusim_rl.cfg")):  # file of the reader, entry point
            continue
        found: object = gpusim_rl
        path = "gpusim_rl"
        for part in name.split(".")[1:]:
            path = f"{path}.{part}"
            if not hasattr(found, part):
                importlib.import_module(path)
            found = getattr(found, part)


def test_readme_begins_with_install_and_train_commands():
    text = (ROOT / "README.md").read_text()
    clone, enter, *first = commands("README.md")[:6]
    assert clone.startswith("git clone https://") and enter == "cd gpusim_rl"
    ours = ["pip install -e .", "python train.py task=Ant num_envs=4096", 'pip install -e ".[test]"', "pytest"]
    assert first == ours
    assert text.splitlines().index(f"{clone} && {enter}") < 15, "the first command is not on the first screen"


def test_table_of_learned_tasks_matches_the_data():
    text, readme = (ROOT / "docs" / "tasks.md").read_text(), (ROOT / "README.md").read_text()
    by_recipe, advice = learned(), "try python benchmarks/bench.py learn --table"
    assert by_recipe == learning.results(ROOT / "benchmarks" / "learn" / "tasks.json"), advice
    assert learning.fill(text, learning.front_page(by_recipe), "tasks") == text, advice
    assert by_recipe.keys() <= tasks().keys()
    best = [entry for entries in by_recipe.values() for entry in entries.values()]
    times = [entry.seconds for entry in best if entry.seconds is not None]
    minutes = max(times) / 60
    alone = sum(not entry.overrides for entry in best)
    [line] = [line for line in readme.splitlines() if line.startswith("- **No GPU needed**")]
    numbers = [int(number) for number in re.findall(r"\d+", line)]
    assert numbers == [len(best), len(tasks()), round(minutes), alone, len(best) - alone]
    assert len(times) == len(best), "not all tasks reach their goals"


def test_table_of_robots_matches_the_data():
    counts = json.loads((ROOT / "benchmarks" / "robots" / "robots.json").read_text())["counts"]
    page = (ROOT / "docs" / "your_robot.md").read_text()
    names = {"bullet": "PyBullet", "erd": "example-robot-data", "unitree": "unitree_ros", "igenvs": "IsaacGymEnvs"}
    for collection, name in {**names, "ros2ctl": "mujoco_ros2_control_menagerie"}.items():
        row = counts[f"{collection} mujoco"]
        [line] = [line for line in page.splitlines() if line.startswith(f"| {name}")]
        numbers = [int(number) for pair in re.findall(r"(\d+) of (\d+)", line) for number in pair]
        keys = ("task", "urdf", "loads", "files", "equal", "compared")
        assert numbers == [row[key] for key in keys] and row["traceback"] == 0
    for simulator in ("mujoco", "mjwarp", "newton"):
        row = counts[f"menagerie {simulator}"]
        text = f"| `{simulator}` | {row['loads']} of {row['files']} | {row['equal']} of {row['compared']} |"
        assert text in page and row["traceback"] == 0


def test_gpu_numbers_match_the_data():
    parts = json.loads((ROOT / "benchmarks" / "gpu" / "gpu.json").read_text())["parts"]
    page, readme = (ROOT / "docs" / "gpu.md").read_text(), (ROOT / "README.md").read_text()
    [case] = parts["bench"]["env_counts"]
    millions = case["training_env_steps_per_s"] / 1e6
    seconds = parts["learn"]["seconds_from_first_iteration"]
    assert f"{millions:.1f} million steps/s; it reaches return 3,000 in {seconds:.1f} s" in readme
    quoted = {
        "Control steps per second": [f"{millions:.2f} million"],
        "over bare physics": [f"{case['training_over_physics']:.2f}"]
        + [f"{number:.2f}" for number in case["training_over_physics_range"]],
        "mean return is 3,000": [f"{seconds:.1f} s", f"{parts['learn']['seconds_from_start_of_process']:.1f} s"],
        "Device occupied": [f"{parts['audit'][name]:.0%}".replace("%", " %") for name in ("occupied", "busy")],
    }
    for words, values in quoted.items():
        [row] = [line for line in page.splitlines() if line.startswith("|") and words in line]
        assert [value for value in values if value not in row] == []
    [tests] = [line for line in page.splitlines() if "decisive` of `tests/gpu`" in line]
    assert f"All {parts['tests']['passed']} tests marked" in tests and parts["tests"]["failed"] == 0
    more = parts["more_tests"]
    total = sum(more[name] for name in ("passed", "skipped", "failed"))
    assert f"Of the other {total}, {more['passed']} pass, {more['skipped']} are skipped" in page
    assert f"and {more['failed']} fail" in page


def test_documented_algorithm_interface_matches_the_code():
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.partition("## The seam between training and algorithm")[2].partition("\n## ")[0]
    rows_of_members = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    members = [name for row in rows_of_members for name in re.findall(r"`(\w+)", row)]
    seam = {name for name in {*vars(Algorithm), *Algorithm.__annotations__} if not name.startswith("_")}
    assert set(members) == seam - {"Config", "make_policy"}  # properties of the class


def test_table_of_faults_matches_the_data():
    assert record.DOCUMENT.read_text() == record.documented(), "try python tests/reliability/record.py"
    data = json.loads(record.DATA.read_text())
    assert data["rows"] and {"command", "git", "environment"} <= set(data)
    for row in data["rows"]:
        assert row["n"] > 0 and row["git"]["sha"] and all(row[name] for name in ("fault", "how", "outcome", "lost"))


def test_readme_picture_is_small():
    [picture] = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text())
    assert (ROOT / picture).stat().st_size < 3e6


def test_github_files_are_consistent():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == gpusim_rl.__version__ and citation["license"] == "Apache-2.0"
    files = (ROOT / ".github" / "workflows").glob("*.yml")
    jobs = {file.stem: yaml.safe_load(file.read_text())["jobs"] for file in files}
    runs = {name: [s["run"] for job in of.values() for s in job["steps"] if "run" in s] for name, of in jobs.items()}
    assert runs["ci"] == [".ci/run", "pip install build twine", ".ci/package"]
    assert runs["release"][-2:] == [".ci/package build dist", ".ci/package try dist"]
    publish = jobs["release"]["publish"]
    assert (publish["needs"], publish["permissions"]) == ("try", {"id-token": "write"})
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert {"name", "description", "body"} <= set(yaml.safe_load(form.read_text())), form.name


def test_workflows_pin_actions_and_restrict_permissions():
    rights = {}
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = file.read_text()
        for action in re.findall(r"uses: (.+)", text):
            release = r"actions/[\w-]+@v\d+" if action.startswith("actions/") else r"\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
            assert re.fullmatch(release, action), f"{file.name}: {action}"
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}, file.name
        for name, job in workflow["jobs"].items():
            rights |= {(file.stem, name): set(job["permissions"])} if "permissions" in job else {}
            checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
            assert all(step.get("with") == {"persist-credentials": False} for step in checkouts), f"{file.name}: {name}"
            assert ("permissions" not in job) or not [step for step in job["steps"] if "run" in step], "runs code"
    assert rights == {("release", "publish"): {"id-token"}, ("site", "publish"): {"pages", "id-token"}}
