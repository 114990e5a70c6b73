"""Collecting demonstrations: the file has what happened, by whoever acted, and mistakes are one line."""

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


def found() -> Demonstrations:
    return read(Path("demonstrations.npz"))[0]


def test_a_file_has_what_happened(collect: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
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
    shown = found()
    for episode in range(8):  # round by round: the first episode of every env, then the second
        start, n = 9 * (episode // 4), episode % 4
        ours, theirs = slice(9 * episode, 9 * episode + 9), slice(start, start + 9)
        assert np.array_equal(shown.obs["policy"][ours], seen[theirs, n])
        assert np.array_equal(shown.action[ours], acted[theirs, n])
        assert np.array_equal(shown.reward[ours], rewards[theirs, n])
        assert np.array_equal(shown.final_obs["policy"][episode], after[start + 8, n])
    assert (shown.truncated == (np.arange(72) % 9 == 8)).all() and not (shown.terminated | shown.diverged).any()
    assert (shown.task, shown.episode_length, shown.num_envs) == ("Cartpole", 9, 4)
    assert shown.dt == env.task.dt
    assert shown.obs_names["policy"].tolist() == ["cart_pos[0]", "cart_vel[0]", "pole_angle[0]", "pole_vel[0]"]
    assert "8 episodes, 72 control steps, mean return " in capsys.readouterr().out


def test_envs_have_as_many_episodes_each(collect: Callable[..., int]) -> None:
    settings = ("task=Cartpole", "sim=mujoco", "task.episode_length=60")
    Path("wild.py").write_text(SCRIPT.format(action="1.0 * (task.random.uniform(-1.0, 1.0, 1) > 0.0)"))
    assert collect("wild.py", *settings, "--episodes", "20", "--num-envs", "8") == 0
    assert found().episodes == 20
    every = found()
    assert collect("wild.py", *settings, "--episodes", "24", "--num-envs", "8") == 0
    steps = len(every.reward)
    assert np.array_equal(found().reward[:steps], every.reward)


@pytest.mark.parametrize("name", ["held.py", "torch.py"])
def test_a_script_may_have_what_looks_its_module_up(collect: Callable[..., int], name: str) -> None:
    of_module = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
    of_module += "@dataclass\nclass Gains:\n    angle: float = 3.0\n    kind: ClassVar[str] = 'PD'\n"
    script = SCRIPT.format(action=PUSH.replace("3.0", "Gains().angle")).replace("(task)", "(task: Any)")
    Path(name).write_text(f"{of_module}from typing import Any\n{script}")  # for any task
    assert collect(name, *SETTINGS, "--episodes", "2") == 0
    theirs = found()
    assert collect("push.py", *SETTINGS, "--episodes", "2") == 0
    assert np.array_equal(found().action, theirs.action)
    assert sys.modules["torch"] is torch


def test_a_number_of_steps_cuts_the_last_episodes_off(collect: Callable[..., int]) -> None:
    assert collect("push.py", *SETTINGS, "--steps", "12", "--num-envs", "3") == 0
    shown = found()
    assert len(shown.reward) == 36 and shown.episodes == 6 and shown.truncated.sum() == 6
    lengths = np.diff(np.flatnonzero(shown.ends), prepend=-1)
    assert sorted(lengths.tolist()) == [3, 3, 3, 9, 9, 9]


@pytest.mark.parametrize(("limit", "kept"), [(1.0, 1.0), (10.0, 5.0)])
def test_actions_are_stored_as_the_envs_take_them(collect: Callable[..., int], limit: float, kept: float) -> None:
    Path("far.py").write_text(SCRIPT.format(action="parts['cart_pos'] * 0.0 + 5.0"))
    assert collect("far.py", *SETTINGS, f"task.clip_actions={limit}", "--steps", "4") == 0
    assert (found().action == kept).all()


def test_a_run_acts_as_it_would_play(collect: Callable[..., int], tmp_path: Path, capsys) -> None:
    trainer = make_trainer("Cartpole", tmp_path / "runs", max_iterations=1, task={"episode_length": 30})
    trainer.train()
    actions = {}
    for explore in ((), ("--explore",)):
        assert collect("Cartpole", "--episodes", "2", *explore) == 0
        shown = found()
        obs = torch.from_numpy(shown.obs["policy"])
        mean, _ = trainer.algorithm.policy.act({"policy": obs}, ())
        actions[explore] = float((mean.clamp(-1.0, 1.0) - torch.from_numpy(shown.action)).abs().mean())
    assert actions[()] < 1e-5 < 0.1 < actions["--explore",]
    assert collect("Cartpole", "task.episode_length=9") == 2
    assert "a run has its own settings" in capsys.readouterr().err


def test_a_script_says_what_it_would_do_where_a_policy_acts(collect: Callable[..., int], tmp_path: Path) -> None:
    """DAgger: observations are the policy's, actions the script's, and only cloning takes such a file."""
    make_trainer("Cartpole", tmp_path / "runs", max_iterations=1, task={"episode_length": 30}).train()
    assert collect("Cartpole", "--episodes", "2") == 0
    own = found()
    assert collect("push.py", "--actor", "Cartpole", "--episodes", "2") == 0
    shown = found()
    assert np.array_equal(shown.obs["policy"], own.obs["policy"]) and np.array_equal(shown.reward, own.reward)
    _, _, angle, turning = shown.obs["policy"].T
    assert np.allclose(shown.action[:, 0], np.clip(3.0 * angle + turning, -1.0, 1.0), atol=1e-6)
    assert own.executed and not shown.executed
    file = {"demonstrations": {"file": "demonstrations.npz"}}
    with pytest.raises(ConfigError, match=r"sac\.demonstrations\.file: a policy acted.*Try algo=bc"):
        train("Cartpole", algo="sac", num_envs=4, sac=file)
    train("Cartpole", algo="bc", num_envs=4, max_iterations=1, bc=file)


def test_episodes_are_added_to_a_file(load_tool, collect: Callable[..., int], capsys) -> None:
    add, arguments = load_tool("collect").main, ["push.py", *SETTINGS, "--episodes", "3", "--append"]
    assert add([*arguments, "--seed", "2"]) == 0  # makes the file
    alone = found()
    assert collect("push.py", *SETTINGS, "--episodes", "2") == 0
    first = found()
    assert add(arguments) == 0  # 2: the seed that two episodes have not had
    both = found()
    assert "3 episodes, 27 control steps" in (printed := capsys.readouterr().out)
    assert "added to 2: 45 control steps" in printed
    assert both.episodes == 5
    for name in ("action", "reward", "truncated"):
        assert np.array_equal(getattr(both, name), np.concatenate([getattr(first, name), getattr(alone, name)]))
    for name in ("obs", "final_obs"):
        parts = [getattr(each, name)["policy"] for each in (first, alone, both)]
        assert np.array_equal(parts[2], np.concatenate(parts[:2]))
    Path("still.py").write_text("def controller(task):\n    return lambda: task.actions * 0.0\n")
    with pytest.raises(SystemExit):
        add(["still.py", "task=Pendulum", "sim=mujoco", "--episodes", "1", "--append"])
    assert "Expected Pendulum, got 'Cartpole'" in capsys.readouterr().err
    Path("never.py").write_text("def controller(task):\n    raise SystemExit('it began')\n")
    others = {"task.control_hz=30": "Try task.control_hz=60"}
    others["task.observations.cart_pos.history=2"] = "size of observation 'policy'"
    for setting, line in others.items():
        with pytest.raises(SystemExit):
            add(["never.py", *SETTINGS, setting, "--episodes", "1", "--append"])
        assert line in capsys.readouterr().err
    assert found().episodes == 5


def test_a_task_without_a_run_has_its_demo(collect: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert collect("Quadcopter", "--steps", "3", "--num-envs", "2") == 0
    assert "demos/Quadcopter" in capsys.readouterr().out
    assert found().task == "Quadcopter"


def test_episodes_are_kept_by_success_or_return(collect: Callable[..., int], monkeypatch, capsys) -> None:
    from gpusim_rl.tasks.cartpole import Cartpole

    wins = torch.tensor([1.0, 0.0, 1.0, 0.0])
    monkeypatch.setattr(Cartpole, "stats", lambda self: {"success": wins[: self.num_envs]})
    assert collect("push.py", *SETTINGS, "--episodes", "4", "--keep", "success") == 0
    shown, printed = found(), capsys.readouterr().out
    assert shown.episodes == 2
    assert "2 episodes, 18 control steps" in printed and "all 4 recorded episodes" in printed
    assert "success 50.0%" in printed
    assert collect("push.py", *SETTINGS, "--episodes", "4", "--keep", "1e9") == 2
    assert "none of 4 episodes is kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("push.py",), "Try push.py task=<task>"),
        (("none.py", "task=Cartpole", "sim=none"), "none.py: no such script"),
        (("push.py", "task=Cartpole", "num_envs=7"), "num_envs=7: expected task.<setting>"),
        (("push.py", "task=Cartpole", "sim=none", "--out", "new/x.npz"), "--out new/x.npz: there is no folder new"),
        (("Quadcopter", "--out", "x.pt"), "got 'x.pt'"),
        (("empty.py", "task=Cartpole"), "empty.py: no function controller"),
        (("flat.py", "task=Cartpole"), "flat.py: controller(task) returned a float"),
        (("wide.py", "task=Cartpole"), "wide.py: expected actions [20, 1], got [20, 4]"),
        (("nan.py", "task=Cartpole", "--steps", "2"), "not finite in control step 0, action[0]"),
        (("push.py", "task=Cartpole", "--keep", "best"), "got 'best'"),
        (("push.py", "task=Cartpole", "--episodes", "1", "--keep", "success"), "success: Cartpole logs"),
        (("push.py", "task=CartpoleCamera", "--episodes", "1"), "images cannot be recorded"),
        (("push.py", "task=Cartpol"), "Did you mean"),
        (("push.py", "task=Cartpole", "--explore"), "--explore: "),
        (("NoSuchRun",), "NoSuchRun"),
        (("Quadcopter", "--actor", "Cartpole"), "--actor Cartpole: expected a script"),
        (("push.py", "--actor", "Quadcopter", "--keep", "success"), "--keep success: incompatible with --actor"),
        (("push.py", "task=Cartpole", "--actor", "Quadcopter"), "task=Cartpole: a run has its own settings"),
        (("typed.py", "task=Cartpole"), "typed.py: the script is for Pendulum"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(
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


def test_a_file_is_not_replaced_unasked(load_tool, collect, capsys: pytest.CaptureFixture[str]) -> None:
    Path("demonstrations.npz").write_text("mine")
    with pytest.raises(SystemExit):
        load_tool("collect").main(["push.py", "task=Cartpole"])
    assert "--out demonstrations.npz: exists already. Try another name, or --overwrite" in capsys.readouterr().err
    assert Path("demonstrations.npz").read_text() == "mine"


def test_a_disk_that_is_full_is_one_line(
    collect: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, arrays: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(npz_file, "save", full)
    assert collect("push.py", *SETTINGS, "--steps", "1") == 2
    assert capsys.readouterr().err == "error: cannot write demonstrations.npz: No space left on device\n"


@pytest.mark.slow
def test_the_script_stacks_cubes(collect: Callable[..., int]) -> None:
    script = str(ROOT / "benchmarks" / "scripted" / "franka_cube_stack.py")
    assert collect(script, "task=FrankaCubeStack", "sim=mujoco", "--episodes", "16", "--keep", "success") == 0
    assert found().episodes >= 11
