"""Tests of the command `collect`: recorded demonstrations of scripts and policies."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gpusim_rl.api import make_env, train
from gpusim_rl.errors import ConfigError
from gpusim_rl.files import npz_file
from gpusim_rl.learn.demonstrations import Demonstrations, read
from helpers.commands import ROOT
from helpers.training import make_trainer

pytest_plugins = ["helpers.tool_runs"]

SCRIPT = """
def controller(task):
    def act():
        parts = task.observe()["policy"]
        return {action}
    return act
"""
PUSH = "(3.0 * parts['pole_angle'] + parts['pole_vel'])"
SETTINGS = ("task=Cartpole", "task.episode_length=9", "sim=mujoco")


@pytest.fixture
def collect(load_tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "push.py").write_text(SCRIPT.format(action=PUSH))

    def run(*arguments: str) -> int:
        try:
            return load_tool("collect").main(["--overwrite", "--seed", "3", *arguments])
        except SystemExit as ended:
            return int(ended.code or 0)

    return run


def collected() -> Demonstrations:
    return read(Path("demonstrations.npz"))[0]


def test_file_equals_recorded_episodes(collect: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert collect("push.py", *SETTINGS, "--episodes", "8", "--num-envs", "4") == 0
    settings = {"episode_length": 9, "randomize_episode_start": False}
    env = make_env("Cartpole", num_envs=4, seed=3, sim="mujoco", device="cpu", task=settings)
    obs, rows = env.reset()["policy"].clone(), []
    for _ in range(18):
        action = (3.0 * obs[:, 2:3] + obs[:, 3:4]).clamp(-1.0, 1.0)
        step = env.step(action)
        rows.append((obs, action, step.reward.clone(), step.final_obs["policy"].clone()))
        obs = step.obs["policy"].clone()
    seen, acted, rewards, after = (torch.stack(x).numpy() for x in zip(*rows, strict=True))
    shown = collected()
    for episode in range(8):  # first episodes of all envs, then second ones
        start, n = 9 * (episode // 4), episode % 4
        recorded, played = slice(9 * episode, 9 * episode + 9), slice(start, start + 9)
        assert np.array_equal(shown.obs["policy"][recorded], seen[played, n])
        assert np.array_equal(shown.action[recorded], acted[played, n])
        assert np.array_equal(shown.reward[recorded], rewards[played, n])
        assert np.array_equal(shown.final_obs["policy"][episode], after[start + 8, n])
    assert (shown.truncated == (np.arange(72) % 9 == 8)).all() and not (shown.terminated | shown.diverged).any()
    assert (shown.task, shown.episode_length, shown.num_envs) == ("Cartpole", 9, 4)
    assert shown.dt == env.task.dt
    assert shown.obs_names["policy"].tolist() == ["cart_pos[0]", "cart_vel[0]", "pole_angle[0]", "pole_vel[0]"]
    assert "8 episodes, 72 control steps" in capsys.readouterr().out


def test_episodes_are_balanced_over_envs(collect: Callable[..., int]) -> None:
    settings = ("task=Cartpole", "sim=mujoco", "task.episode_length=60")
    Path("wild.py").write_text(SCRIPT.format(action="1.0 * (task.random.uniform(-1.0, 1.0, 1) > 0.0)"))
    assert collect("wild.py", *settings, "--episodes", "20", "--num-envs", "8") == 0
    assert collected().episodes == 20
    every = collected()
    assert collect("wild.py", *settings, "--episodes", "24", "--num-envs", "8") == 0
    steps = len(every.reward)
    assert np.array_equal(collected().reward[:steps], every.reward)


@pytest.mark.parametrize("name", ["held.py", "torch.py"])
def test_script_may_use_dataclasses_and_any_file_name(collect: Callable[..., int], name: str) -> None:
    header = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
    header += "@dataclass\nclass Gains:\n    angle: float = 3.0\n    kind: ClassVar[str] = 'PD'\n"
    script = SCRIPT.format(action=PUSH.replace("3.0", "Gains().angle")).replace("(task)", "(task: Any)")
    Path(name).write_text(f"{header}from typing import Any\n{script}")  # any task
    assert collect(name, *SETTINGS, "--episodes", "2") == 0
    typed = collected()
    assert collect("push.py", *SETTINGS, "--episodes", "2") == 0
    assert np.array_equal(collected().action, typed.action) and sys.modules["torch"] is torch


def test_step_limit_truncates_last_episodes(collect: Callable[..., int]) -> None:
    assert collect("push.py", *SETTINGS, "--steps", "12", "--num-envs", "3") == 0
    shown = collected()
    assert len(shown.reward) == 36 and shown.episodes == 6 and shown.truncated.sum() == 6
    lengths = np.diff(np.flatnonzero(shown.ends), prepend=-1)
    assert sorted(lengths.tolist()) == [3, 3, 3, 9, 9, 9]


@pytest.mark.parametrize(("limit", "kept"), [(1.0, 1.0), (10.0, 5.0)])
def test_actions_are_stored_clipped(collect: Callable[..., int], limit: float, kept: float) -> None:
    Path("far.py").write_text(SCRIPT.format(action="parts['cart_pos'] * 0.0 + 5.0"))
    assert collect("far.py", *SETTINGS, f"task.clip_actions={limit}", "--steps", "4") == 0
    assert (collected().action == kept).all()


def test_run_acts_deterministically_unless_exploring(collect: Callable[..., int], tmp_path: Path, capsys) -> None:
    trainer = make_trainer("Cartpole", tmp_path / "runs", max_iterations=1, task={"episode_length": 30})
    trainer.train()
    actions = {}
    for explore in ((), ("--explore",)):
        assert collect("Cartpole", "--episodes", "2", *explore) == 0
        shown = collected()
        obs = torch.from_numpy(shown.obs["policy"])
        mean, _ = trainer.algorithm.policy.act({"policy": obs}, ())
        actions[explore] = float((mean.clamp(-1.0, 1.0) - torch.from_numpy(shown.action)).abs().mean())
    assert actions[()] < 1e-5 < 0.1 < actions["--explore",]
    assert collect("Cartpole", "task.episode_length=9") == 2
    assert "task.episode_length=9" in capsys.readouterr().err


def test_script_labels_observations_of_an_acting_policy(collect: Callable[..., int], tmp_path: Path) -> None:
    """DAgger: observations of the policy, actions of the script; only `algo=bc` accepts the file."""
    make_trainer("Cartpole", tmp_path / "runs", max_iterations=1, task={"episode_length": 30}).train()
    assert collect("Cartpole", "--episodes", "2") == 0
    own = collected()
    assert collect("push.py", "--actor", "Cartpole", "--episodes", "2") == 0
    shown = collected()
    assert np.array_equal(shown.obs["policy"], own.obs["policy"]) and np.array_equal(shown.reward, own.reward)
    _, _, angle, turning = shown.obs["policy"].T
    assert np.allclose(shown.action[:, 0], np.clip(3.0 * angle + turning, -1.0, 1.0), atol=1e-6)
    assert own.executed and not shown.executed
    file = {"demonstrations": {"file": "demonstrations.npz"}}
    with pytest.raises(ConfigError, match=r"^sac\.demonstrations\.file: .*Try algo=bc"):
        train("Cartpole", algo="sac", num_envs=4, sac=file)
    train("Cartpole", algo="bc", num_envs=4, max_iterations=1, bc=file)


def test_append_adds_episodes_to_a_file(load_tool, collect: Callable[..., int], capsys) -> None:
    add, arguments = load_tool("collect").main, ["push.py", *SETTINGS, "--episodes", "3", "--append"]
    assert add([*arguments, "--seed", "2"]) == 0  # creates the file
    alone = collected()
    assert collect("push.py", *SETTINGS, "--episodes", "2") == 0
    first = collected()
    assert add(arguments) == 0  # seed 2, the first that two episodes have not used
    both = collected()
    assert "3 episodes, 27 control steps" in (printed := capsys.readouterr().out)
    assert "45 control steps" in printed and both.episodes == 5
    for name in ("action", "reward", "truncated"):
        assert np.array_equal(getattr(both, name), np.concatenate([getattr(first, name), getattr(alone, name)]))
    for name in ("obs", "final_obs"):
        parts = [getattr(each, name)["policy"] for each in (first, alone, both)]
        assert np.array_equal(parts[2], np.concatenate(parts[:2]))
    Path("still.py").write_text("def controller(task):\n    return lambda: task.actions * 0.0\n")
    with pytest.raises(SystemExit):
        add(["still.py", "task=Pendulum", "sim=mujoco", "--episodes", "1", "--append"])
    assert "Expected Pendulum, got 'Cartpole'" in capsys.readouterr().err
    Path("never.py").write_text("def controller(task):\n    raise SystemExit('script called')\n")
    others = {"task.control_hz=30": "Try task.control_hz=60"}
    others["task.observations.cart_pos.history=2"] = "size of observation 'policy'"
    for setting, line in others.items():
        with pytest.raises(SystemExit):
            add(["never.py", *SETTINGS, setting, "--episodes", "1", "--append"])
        assert line in capsys.readouterr().err
    assert collected().episodes == 5


def test_task_without_run_uses_its_demo(collect: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert collect("Quadcopter", "--steps", "3", "--num-envs", "2") == 0
    assert "demos/Quadcopter" in capsys.readouterr().out and collected().task == "Quadcopter"


def test_episodes_are_filtered_by_success_or_return(collect: Callable[..., int], monkeypatch, capsys) -> None:
    from gpusim_rl.tasks.cartpole import Cartpole

    wins = torch.tensor([1.0, 0.0, 1.0, 0.0])
    monkeypatch.setattr(Cartpole, "stats", lambda self: {"success": wins[: self.num_envs]})
    assert collect("push.py", *SETTINGS, "--episodes", "4", "--keep", "success") == 0
    shown, printed = collected(), capsys.readouterr().out
    assert shown.episodes == 2
    assert "2 episodes, 18 control steps" in printed and "all 4 recorded episodes" in printed
    assert "success 50.0%" in printed
    assert collect("push.py", *SETTINGS, "--episodes", "4", "--keep", "1e9") == 2
    assert "--keep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("push.py",), "Try push.py task=<task>"),
        (("none.py", "task=Cartpole", "sim=none"), "none.py: no such script"),
        (("push.py", "task=Cartpole", "num_envs=7"), "num_envs=7: expected a setting of task"),
        (("push.py", "task=Cartpole", "sim=none", "--out", "new/x.npz"), "--out new/x.npz: "),
        (("Quadcopter", "--out", "x.pt"), "got 'x.pt'"),
        (("empty.py", "task=Cartpole"), "empty.py: no function named controller"),
        (("flat.py", "task=Cartpole"), "flat.py: controller(task) returned float"),
        (("wide.py", "task=Cartpole"), "shape [20, 4]"),
        (("nan.py", "task=Cartpole", "--steps", "2"), "control step 0, action[0]"),
        (("push.py", "task=Cartpole", "--keep", "best"), "got 'best'"),
        (("push.py", "task=Cartpole", "--episodes", "1", "--keep", "success"), "--keep success: "),
        (("push.py", "task=CartpoleCamera", "--episodes", "1"), "images"),
        (("push.py", "task=Cartpol"), "Did you mean"),
        (("push.py", "task=Cartpole", "--explore"), "--explore: "),
        (("NoSuchRun",), "NoSuchRun"),
        (("Quadcopter", "--actor", "Cartpole"), "--actor Cartpole: "),
        (("push.py", "--actor", "Quadcopter", "--keep", "success"), "--keep success: incompatible with --actor"),
        (("push.py", "task=Cartpole", "--actor", "Quadcopter"), "task=Cartpole: "),
        (("typed.py", "task=Cartpole"), "Pendulum"),
    ],
)
def test_bad_input_leaves_no_file(
    collect: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    Path("empty.py").write_text("")
    Path("flat.py").write_text("def controller(task):\n    return 1.0\n")
    Path("wide.py").write_text(SCRIPT.format(action="task.robot.joint_pos.repeat(1, 2)"))
    typed = "from gpusim_rl.tasks.pendulum import Pendulum\n\ndef controller(task: Pendulum):\n    return None\n"
    Path("typed.py").write_text(typed)
    Path("nan.py").write_text(SCRIPT.format(action="parts['cart_pos'] * float('nan')"))
    assert collect(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and line in error, error
    assert not Path("demonstrations.npz").exists()


def test_existing_file_needs_overwrite(load_tool, collect, capsys: pytest.CaptureFixture[str]) -> None:
    Path("demonstrations.npz").write_text("mine")
    with pytest.raises(SystemExit):
        load_tool("collect").main(["push.py", "task=Cartpole"])
    assert "--out demonstrations.npz: " in capsys.readouterr().err
    assert Path("demonstrations.npz").read_text() == "mine"


def test_full_disk_is_reported_in_one_line(
    collect: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, arrays: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(npz_file, "save", full)
    assert collect("push.py", *SETTINGS, "--steps", "1") == 2
    error = capsys.readouterr().err
    assert "demonstrations.npz" in error and "No space" in error and error.count("\n") == 1


@pytest.mark.slow
def test_franka_script_stacks_cubes(collect: Callable[..., int]) -> None:
    script = str(ROOT / "benchmarks" / "scripted" / "franka_cube_stack.py")
    assert collect(script, "task=FrankaCubeStack", "sim=mujoco", "--episodes", "16", "--keep", "success") == 0
    assert collected().episodes >= 11
