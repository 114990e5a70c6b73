"""Tests of the script that publishes demo policies."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.checkpoint_file import load
from helpers.commands import ROOT
from helpers.raised import raises

pytest_plugins = ["helpers.tool_runs"]


def test_demo_has_policy_and_card_but_no_personal_data(tool_here, tmp_path):
    done = tool_here("publish_demo", "Cartpole", "--out", str(tmp_path / "Cartpole"), "--num-envs", "4")
    assert done.stdout == f"{tmp_path / 'Cartpole'}\n"
    files = {str(path.relative_to(tmp_path / "Cartpole")) for path in (tmp_path / "Cartpole").rglob("*.*")}
    assert files == {"config.yaml", "demo.json", "checkpoints/last.pt"}
    state = load(tmp_path / "Cartpole/checkpoints/last.pt")
    assert {"algorithm", "torch_rng", "metrics", "wandb_id"}.isdisjoint(state)
    dtypes = {name: value.dtype for name, value in state["policy"].items()}
    assert all((dtype == torch.float32) == ("_norm." in name) for name, dtype in dtypes.items())
    assert torch.float16 in dtypes.values() and state["config"]["log"]["dir"] == "runs"
    assert not re.search(str(ROOT.parent), (tmp_path / "Cartpole/config.yaml").read_text() + repr(state["config"]))
    card = json.loads((tmp_path / "Cartpole/demo.json").read_text())
    assert (card["task"], card["algorithm"], card["episodes"]) == ("Cartpole", "ppo", 4)
    assert card["env_steps"] == state["env_steps"] > 0


def test_demo_plays_like_its_run(tool_here, runs_folder, tmp_path):
    tool_here("publish_demo", "Cartpole", "--out", tmp_path / "Cartpole", "--num-envs", "4")
    best = next((runs_folder / "runs/Cartpole/latest").resolve().glob("checkpoints/best.pt"))
    rewards = []
    for run in (tmp_path / "Cartpole", best):
        output = tool_here("play", run, "--viewer", "none", "--steps", "50").stdout
        rewards.append(float(re.findall(r"mean reward (\S+)", output)[-1]))
    assert rewards[1] != 0 and abs(rewards[0] - rewards[1]) <= 0.02 * abs(rewards[1])


def test_full_disk_leaves_no_demo(runs_folder, tmp_path, monkeypatch, load_tool):
    monkeypatch.chdir(runs_folder)
    publish_demo = load_tool("publish_demo")

    def full(folder: Path, state: object) -> None:
        folder.mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(publish_demo, "_write", full)
    with pytest.raises(ConfigError, match="No space"):
        publish_demo.publish(publish_demo.parse(["Cartpole", "--out", str(tmp_path / "Cartpole")]))
    assert list(tmp_path.iterdir()) == []


def test_demo_with_lower_return_is_discarded(runs_folder, tmp_path, monkeypatch, load_tool):
    monkeypatch.chdir(runs_folder)
    out = tmp_path / "Cartpole"
    publish_demo = load_tool("publish_demo")
    arguments = ["Cartpole", "--out", str(out), "--num-envs", "2"]
    publish_demo.publish(publish_demo.parse(arguments))
    before = (out / "demo.json").read_bytes()
    with pytest.raises(ConfigError, match="Try --overwrite"):
        publish_demo.publish(publish_demo.parse(arguments))
    monkeypatch.setattr(publish_demo, "_half", lambda name, value: torch.zeros_like(value))
    with pytest.raises(ConfigError, match="Try more episodes: --num-envs 8"):
        publish_demo.publish(publish_demo.parse([*arguments, "--overwrite"]))
    assert (out / "demo.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["Cartpole"]


def test_overwrite_replaces_only_demos(runs_folder, monkeypatch, load_tool):
    monkeypatch.chdir(runs_folder)
    publish_demo = load_tool("publish_demo")
    before = sorted(path for path in runs_folder.rglob("*"))
    for out in (Path("runs"), Path("runs/Cartpole"), Path.cwd()):
        with raises(ConfigError, key=str(out.absolute()), hint="Try another --out"):
            publish_demo.publish(publish_demo.parse(["Cartpole", "--out", str(out), "--overwrite"]))
    assert sorted(path for path in runs_folder.rglob("*")) == before


def test_card_names_training_hardware_without_a_repository(runs_folder, tmp_path, load_tool):
    state = {"task": "A", "config": {"algo": {"name": "ppo"}}, "env_steps": 5, "elapsed_s": 60.0, "seed": 1}
    run = next(path for path in (runs_folder / "runs/Cartpole").glob("2*") if path.is_dir())
    environment = json.loads((run / "env.json").read_text())
    environment |= {"git": None, "gpu": {"driver": "600", "devices": [{"name": "H100", "memory_gb": 80.0}]}}
    result = {"return_mean": 1.0, "return_std": 0.0, "episodes": 2.0}
    for device, hardware in (("cuda:0", "H100"), ("cpu", environment["cpu"]["model"])):
        environment["learner"] = {"device": device}
        (tmp_path / "env.json").write_text(json.dumps(environment))
        load_tool("publish_demo")._write_card(tmp_path / "demo.json", state, tmp_path, result, "")
        card = json.loads((tmp_path / "demo.json").read_text())
        assert (card["hardware"], card["commit"]) == (hardware, None)
