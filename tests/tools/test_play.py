"""Tests of the command `play` and the player: viewers, settings of the run, replays of dumps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import gpusim_rl
from gpusim_rl.api import prepare
from gpusim_rl.distributed import actors
from gpusim_rl.env import Step
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.files import checkpoint_file
from gpusim_rl.run import checkpoint
from gpusim_rl.view import player
from gpusim_rl.view.player import Player
from gpusim_rl.view.replay_dump import DumpReplay
from helpers.training import OVERFLOWS, Faulty, make_trainer, the_run

pytest_plugins = ["helpers.tool_runs"]

NO_DISPLAY = {"DISPLAY": "", "WAYLAND_DISPLAY": ""}


@contextmanager
def virtual_display() -> Iterator[str]:
    display = f":{os.getpid() % 10000 + 100}"
    server = subprocess.Popen(["Xvfb", display, "-screen", "0", "640x480x24"], stderr=subprocess.DEVNULL)
    try:
        socket = Path(f"/tmp/.X11-unix/X{display[1:]}")
        for _ in range(100):
            if socket.exists():
                break
            time.sleep(0.1)
        yield display
    finally:
        server.terminate()
        server.wait()


def test_new_episodes_start_at_progress_of_newest_checkpoint(run, monkeypatch):
    file = run / "checkpoints" / "last.pt"
    with closing(Player.open(str(run), num_envs=2)) as shown:
        begun: list[Any] = []
        monkeypatch.setattr(shown.env, "begin_from", lambda state: begun.append(state) or shown.obs)
        state = checkpoint_file.load(file)
        checkpoint_file.save(file, {**state, "env": {**state["env"], "newer": True}})
        assert shown.follow() and begun == [], "running episodes continue"
        shown.restart()
        assert "newer" in begun[0]


@pytest.mark.parametrize(
    ("sim", "device", "gpus", "where"),
    [
        ("newton", "cuda:1", 2, "newton on cuda:1"),
        ("newton", "cuda:3", 2, "newton on cuda:0"),
        ("newton", "auto", 2, "newton on cuda:0"),
        ("newton", "cpu", 2, "newton on cpu"),
        ("newton", "cuda:1", 0, "newton on cpu"),
        ("mjwarp", "cuda:1", 2, "mujoco on cpu"),
        ("mujoco", "cpu", 0, "mujoco on cpu"),
    ],
)
def test_run_plays_on_its_device_if_available(run, monkeypatch, sim, device, gpus, where):
    """Newton runs play on Newton, all others on MuJoCo."""
    file = run / "checkpoints" / "last.pt"
    checkpoint_file.save(file, {**checkpoint_file.load(file), "sim": sim})
    for name, value in (("is_available", gpus > 0), ("device_count", gpus), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)

    def chosen(sim: str, device: torch.device) -> None:
        raise LookupError(f"{sim} on {device}")

    monkeypatch.setattr(player, "choose_sim", chosen)
    with pytest.raises(LookupError, match=f"^{where}$"):
        Player.open(str(run), changes={"device": device})


def test_viewer_none_prints_mean_reward(tool_here):
    lines = tool_here("play", "Cartpole", "--viewer", "none", "--steps", "50", env=NO_DISPLAY).stdout.splitlines()
    assert lines[0].startswith("runs/Cartpole/") and "checkpoints/last.pt, iteration " in lines[0]
    assert lines[1].startswith("Cartpole: mean reward ") and lines[1].endswith("per step (50 steps in 16 envs)")


@pytest.mark.parametrize("policy", ["zero", "random"])
def test_task_plays_without_a_run(tool_here, tmp_path, policy):
    arguments = ("--viewer", "none", "--steps", "20", "--num-envs", "3", "--policy", policy)
    first, second = (tool_here("play", "Ant", *arguments, cwd=tmp_path).stdout for _ in range(2))
    assert first.startswith("Ant: mean reward ") and first.endswith("(20 steps in 3 envs)\n")
    assert list(tmp_path.iterdir()) == [] and first == second


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Cartpole", "--viewer", "native"], ["no display", "Try --viewer web or none"]),
        (["Nothing"], ["no checkpoint 'Nothing'"]),  # reported before the missing display
        (["--replay", "x.pt", "--viewer", "none"], ["neither a dump nor a checkpoint"]),
        (["--viewer", "none"], ["--replay FILE"]),
        (["Cartpole", "--viewer", "none", "--port", "8080"], ["--viewer web"]),
        (["--replay", "x.pt", "--viewer", "web"], ["--replay; try --viewer none"]),
    ],
)
def test_bad_input_is_rejected_in_one_line(tool_here, runs_folder, arguments, words):
    checkpoint.save(runs_folder / "x.pt", {"a": 1})
    done = tool_here("play", *arguments, env=NO_DISPLAY)
    assert done.returncode == 2 and all(part in done.stderr.splitlines()[-1] for part in words), done.stderr


def test_unreachable_display_is_reported_in_one_line(tool):
    done = tool("play", "Cartpole", env={"DISPLAY": ":98765", "WAYLAND_DISPLAY": ""}, check=False)
    assert done.returncode == 2 and done.refuses("':98765'")


@pytest.mark.skipif(shutil.which("Xvfb") is None, reason="needs Xvfb")
def test_window_opens_and_closes(tool, tmp_path):
    with virtual_display() as display:
        done = tool("play", "Cartpole", "--steps", "30", env={"DISPLAY": display}, timeout_s=60)
    assert "iteration 6" in done.stdout


def test_player_reaches_the_return_of_an_evaluation(run):
    result = gpusim_rl.train("Cartpole", checkpoint=str(run), test=True, num_envs=8, log={"console": "quiet"})
    player = Player.open(str(run), num_envs=8)
    returns, running = torch.zeros(8), torch.ones(8, dtype=torch.bool)
    for _ in range(player.env.max_episode_length):
        step = player.step()
        returns += torch.where(running, step.reward, 0.0)
        running &= ~step.done
    player.close()
    assert float(returns.mean()) == pytest.approx(result["return_mean"], rel=1e-6)
    assert float(returns.max()) == pytest.approx(result["return_max"], rel=1e-6)


@pytest.mark.parametrize("kind", ["folder", "file", "task"])
def test_run_is_found_by_folder_file_or_task(run, kind):
    (run.parent / "latest").symlink_to(run.name)
    name = {"folder": str(run), "file": str(run / "checkpoints" / "best.pt"), "task": "Cartpole"}[kind]
    player = Player.open(name)
    player.close()
    assert player.run_dir is not None and player.run_dir.resolve() == run and player.checkpoint is not None
    assert player.checkpoint.name == ("best.pt" if kind == "file" else "last.pt")


def test_player_follows_a_running_training(run):
    player = Player.open(str(run))
    before = player.step().obs
    assert not player.follow()

    file = run / "checkpoints" / "last.pt"
    state = checkpoint.load(file)
    state["iteration"] = 77
    state["policy"]["head.mean.bias"] += 100.0
    time.sleep(0.01)  # resolution of file times
    checkpoint.save(file, state)
    assert player.follow() and player.iteration == 77
    assert not player.follow()
    player.step()
    assert float(player.env.task.actions.min()) == 1.0, "new policy pushes right"
    assert before["policy"].shape == player.obs["policy"].shape
    shutil.rmtree(run)
    assert not player.follow(), "play continues without the run folder"
    player.close()


def test_player_uses_settings_of_the_run(run):
    file = run / "checkpoints" / "last.pt"
    state = checkpoint.load(file)
    state["config"]["task"]["max_force"] = 0.5
    checkpoint.save(file, state)
    player = Player.open(str(run))
    assert player.env.cfg.max_force == 0.5
    player.close()


def test_recurrent_state_is_reset_at_episode_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small: dict[str, Any] = {"debug": "smoke", "device": "cpu", "num_envs": 4, "log": {"console": "quiet"}}
    gpusim_rl.train("Cartpole", **small, ppo={"network": {"rnn": "lstm", "rnn_size": 8}})
    player = Player.open("Cartpole", num_envs=4)
    assert all(bool((h == 0).all()) for h in player._hidden)
    done = torch.zeros(4, dtype=torch.bool)
    while not done.any():
        done = player.step().done
    assert all(bool((h[:, done] == 0).all() and (h[:, ~done] != 0).any()) for h in player._hidden)
    player.close()


def test_changed_action_size_is_rejected(run):
    file = run / "checkpoints" / "last.pt"
    state = checkpoint.load(file)
    state["num_actions"] = 3
    checkpoint.save(file, state)
    with pytest.raises(ConfigError, match=r"num_actions is 1, but the checkpoint has 3"):
        Player.open(str(run))


def replayed(file: Path, **options: bool) -> list[str]:
    with closing(DumpReplay.open(file, **options)) as replay:
        return list(iter(replay.step, None))


def diverged(folder: Path, task: type, **faults: Any) -> Path:
    make_trainer(task, folder, task={"randomize_episode_start": False, **faults}).train()
    return the_run(folder) / "diverged.pt"


@pytest.mark.parametrize("sim", ["mujoco", pytest.param("mjwarp", marks=pytest.mark.slow)])
def test_replay_shows_divergence_step_by_step(tmp_path, load_tool, capsys, sim):
    file = diverged(tmp_path, Faulty, speed_at=11)
    capsys.readouterr()
    assert load_tool("play").main(["--replay", str(file), "--viewer", "none", "--sim", sim, "--trust"]) == 0
    title, action, *steps, end = capsys.readouterr().out.splitlines()
    assert title.startswith(f"{file}: env 1, control step 11 of its episode, iteration 2, Faulty on mujoco (here {sim}")
    assert action.startswith("action: ")
    assert re.match(r"physics step 1 of 2: cartpole.joint_pos up to .*, cartpole.joint_vel up to (inf|nan) ", steps[0])
    assert end == "diverged"


def test_replay_names_non_finite_control(tmp_path):
    replay = DumpReplay.open(diverged(tmp_path, Faulty, nan_control_at=11), trust=True)
    replay.env.task.steps.fill_(10)  # the fault depends on the step count of the run
    replay.env.task.victim.fill_(True)
    lines = list(iter(replay.step, None))
    replay.close()
    assert lines[1].startswith("Faulty.apply_action(): ")
    assert lines[-1].endswith("because of the action")


def test_replay_names_non_finite_action(tmp_path):
    file = diverged(tmp_path, Faulty, speed_at=11)
    dump = checkpoint.load(file)
    dump["state"]["cartpole"]["joint_vel"].zero_()
    dump["action"].fill_(torch.nan)
    checkpoint.save(file, dump)
    lines = replayed(file, trust=True)
    assert lines[0].startswith("action: ") and "nan (column 0)" in lines[0]
    assert [line for line in lines if line.startswith("reward: ")]
    assert lines[-1].endswith("because of the action")


def test_replay_shows_update_without_finite_gradient(tool_here, tmp_path):
    with pytest.raises(TaskError) as error:
        make_trainer("Cartpole", tmp_path, ppo=OVERFLOWS).train()
    file = the_run(tmp_path) / "skipped.pt"
    assert f"--replay {file}" in str(error.value)
    lines = tool_here("play", "--replay", file, "--viewer", "none").stdout.splitlines()
    assert lines[0].startswith(f"{file}: ") and "iteration 3, Cartpole on mujoco" in lines[0]
    assert [line.partition(":")[0] for line in lines[1:-1]] == [f"step {n} of 8" for n in range(1, 9)]
    assert "observation policy " in lines[1] and "reward " in lines[1]
    assert lines[-1].startswith("update: no minibatch")


def test_replay_of_a_run_with_actors_needs_no_actors(tmp_path):
    settings: dict[str, Any] = {"impala": {"horizon": 4}, "num_envs": 8, "max_iterations": 1}
    actors.make_trainer(prepare("Cartpole", algo="impala", log={"dir": str(tmp_path)}, **settings)).train()
    file = the_run(tmp_path) / "checkpoints" / "last.pt"
    state = checkpoint.load(file)
    changed = {"actors": {**state["config"]["actors"], "engine": "process"}, "num_actors": 1}
    checkpoint.save(file, {**state, "config": {**state["config"], **changed}, "actor_columns": 8})
    lines = replayed(file)
    assert [line.partition(":")[0] for line in lines] == [*(f"step {n} of 4" for n in range(1, 5)), "update"]


def test_replay_runs_on_the_learner_device(run, monkeypatch):
    moved_steps = []
    monkeypatch.setattr(Step, "to", lambda step, device: moved_steps.append(step) or step)
    lines = replayed(run / "checkpoints" / "last.pt")
    assert len(moved_steps) == len(lines) - 1 > 0 and lines[-1].startswith("update: ")


@pytest.mark.skipif(shutil.which("Xvfb") is None, reason="needs Xvfb")
def test_replay_opens_a_window(tool, tmp_path):
    with pytest.raises(TaskError):
        make_trainer("Cartpole", tmp_path, ppo=OVERFLOWS).train()
    with virtual_display() as display:
        file = the_run(tmp_path) / "skipped.pt"
        done = tool("play", "--replay", file, "--steps", "12", env={"DISPLAY": display}, timeout_s=60)
    assert done.stdout.splitlines()[-1].startswith("update: no minibatch")
