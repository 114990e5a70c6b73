"""Tests of the command `pretrain-encoder` and its autoencoder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from gpusim_rl.api import prepare
from gpusim_rl.cli import load_command
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.files import checkpoint_file
from gpusim_rl.learn.pretrained import load_frozen
from gpusim_rl.learn.vae import VAE
from helpers.training import the_run

TASK = ["CartpoleCamera", "--frames", "600", "--epochs", "2", "--num-envs", "20", "--batch-size", "54"]
SMALL = ["task.height=12", "task.width=20", "sim=mujoco"]


def run(*arguments: str) -> None:
    load_command("pretrain-encoder")(list(arguments))


def test_pretraining_writes_encoder_and_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(*TASK, *SMALL, "--latents", "6", "--device", "cpu")
    printed = capsys.readouterr().out.splitlines()
    assert re.match("camera: 540 .* 12 x 20 x 3, spatial, on cpu$", printed[1])
    assert printed[2].split() == ["epoch", "reconstruction", "divergence", "held", "out", "seconds"]
    assert [line.split()[0] for line in printed[3:5]] == ["1", "2"]
    use = "pretrained.init_from=CartpoleCamera.encoder.pt pretrained.freeze=true pretrained.frames=3"
    assert any(line.endswith(f"train.py task=CartpoleCamera {' '.join(SMALL)} {use}") for line in printed)
    saved = torch.load("CartpoleCamera.encoder.pt", weights_only=True)
    assert saved["made"]["task"] == "CartpoleCamera" and saved["made"]["command"].startswith("CartpoleCamera --frames")
    encoder = load_frozen("CartpoleCamera.encoder.pt", {"camera": (12, 20, 3)}, torch.device("cpu"))
    assert encoder({"camera": torch.zeros(2, 12, 20, 3, dtype=torch.uint8)}).shape == (2, 6)
    assert Image.open("CartpoleCamera.encoder.png").size == (3 * 6 * 22, 3 * 2 * 14)


def test_pretraining_on_frames_of_a_trained_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"num_envs": 4, "max_iterations": 1, "device": "cpu", "log": {"console": "quiet"}}
    make_trainer(prepare("CartpoleCamera", **settings, task={"height": 12, "width": 20})).train()
    run(*TASK, "--policy", "trained", "--out", "seen.pt")
    assert checkpoint_file.load(Path("seen.pt"))["groups"]["camera"]["shape"] == [12, 20, 3]
    assert the_run(tmp_path / "runs").is_dir()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Cartpole"], "Try CartpoleCamera"),
        ([*TASK, "task.hight=12"], "Did you mean 'task.height'?"),
        ([*TASK, "task.height=12", "--policy", "trained"], "task.height=12: "),
        ([*TASK, "--out", "x.npz"], "got 'x.npz'"),
        ([*TASK, *SMALL, "--frames", "20"], "--frames: "),
        ([*TASK, *SMALL, "--kind", "nature"], "--kind=nature: "),
    ],
)
def test_bad_input_is_rejected_in_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.slow
def test_autoencoder_reconstructs_a_moving_square():
    """The images differ only in the position of a square of 2 x 2 pixels."""
    torch.manual_seed(0)
    background = torch.randint(256, (16, 24, 1), dtype=torch.uint8)
    images, places = background.repeat(512, 1, 1, 1), torch.randint(22, (512,))
    for image, x in zip(images, places, strict=True):
        image[7:9, x : x + 2] = 255
    vae = VAE((16, 24, 1), "spatial", 4)
    vae.begin(images)
    optimizer = torch.optim.Adam(vae.parameters(), 3e-3)
    for _ in range(300):
        reconstruction, divergence = vae.losses(images[:448], torch.randn(448, 4))
        optimizer.zero_grad()
        (reconstruction + 0.1 * divergence).backward()
        optimizer.step()
    drawn = vae.reconstruct(images[448:]).float()
    error = (drawn - images[448:]).square().mean()
    assert error < 0.3 * (images[448:].float() - images.float().mean(dim=0)).square().mean()
