"""Pretrain an image encoder for a task.

gpusim-rl pretrain-encoder CartpoleCamera                images under random actions
gpusim-rl pretrain-encoder CartpoleCamera task.width=64  with task settings
gpusim-rl pretrain-encoder runs/CartpoleCamera/latest --policy trained     images that this run's policy sees
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError, friendly_errors, import_extra, say
from gpusim_rl.files.safe_open import free_name, writing
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.options import Parser, number, positive
from gpusim_rl.view.arguments import check_out

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gpusim_rl.learn.vae import VAE
    from gpusim_rl.view.player import Player

HELD_OUT = 10  # one frame in 10 is held out
BEGIN = 2048  # frames for the initial statistics
SHOWN = 6  # columns of the output image
SCALE = 3  # magnification of the output image


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        pretrain(parse(argv), list(sys.argv[1:] if argv is None else argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("pretrain-encoder", __doc__)
    parser.option("run", "or a task without a run, with --policy random")
    parser.option("settings")
    parser.option("--kind", "network", "Training", choices=["spatial", "nature", "impala"], default="spatial")
    parser.option("--latents", "features per image", "Training", type=positive, default=16)
    parser.option("--beta", "weight of the KL divergence", "Training", type=number(float, 0), default=1.0)
    parser.option("--frames", "frames to train on", "Training", type=positive, default=20_000)
    parser.option("--epochs", "passes over the frames", "Training", type=positive, default=20)
    parser.option("--batch-size", "frames per minibatch", "Training", type=positive, default=128)
    parser.option("--learning-rate", "learning rate of Adam", "Training", type=number(float, 0), default=2e-3)
    parser.option("--policy", choices=["random", "trained"], default="random")
    parser.options("--num-envs", "--seed", "--device", num_envs=64)
    parser.option("--out", ".pt", note="TASK.encoder.pt in the current folder")
    parser.options("--overwrite", "--trust", "--config-dir")
    return parser.parse_intermixed_args(argv)


def pretrain(args: argparse.Namespace, command: Sequence[str]) -> Path:
    """Train an autoencoder for each group of images; return the path of the encoder file."""
    check_out(args.out, ".pt", overwrite=args.overwrite)
    import_extra("PIL.Image", "view", "pretrain-encoder")
    import_torch()
    import torch

    from gpusim_rl.learn.pretrained import save_pretrained
    from gpusim_rl.machine.torch_threads import use_available_cpus
    from gpusim_rl.run.devices import find_device
    from gpusim_rl.run.logger import command as program

    torch.manual_seed(args.seed)
    use_available_cpus()
    device = find_device(args.device, "--device")
    with player_of(args) as player:
        name = player.name
        say(f"{name}: {args.frames:,} frames of {args.num_envs} envs, {args.policy} actions")
        frames = collect(player, args.frames)
    default = Path(f"{name}.encoder.pt")
    path = args.out or (default if args.overwrite else free_name(default))
    trained = {group: train(group, images, args, device) for group, images in frames.items()}
    vaes = {group: vae for group, (vae, _) in trained.items()}
    errors = {group: error for group, (_, error) in trained.items()}
    rows = [(vaes[group], images[::HELD_OUT]) for group, images in frames.items()]
    made = {"task": name, "command": shlex.join(command), "frames": args.frames, "seed": args.seed, "errors": errors}
    try:
        save_pretrained(path, vaes, args.kind, args.latents, made)
        picture = draw(path.with_suffix(".png"), rows, device)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    say(f"{picture}: held-out frames and their reconstructions", str(path))
    folder = [] if args.config_dir is None else ["-cd", str(args.config_dir)]
    use = shlex.join([*folder, f"task={name}", *args.settings, f"pretrained.init_from={path}"])
    train_py = f"  {program('train')} {use}"
    say("", "fixed features:", f"{train_py} pretrained.freeze=true pretrained.frames=3")
    say("fine-tuned encoder:", f"{train_py} ppo.network.encoder.kind={args.kind}")
    return path


@contextmanager
def player_of(args: argparse.Namespace) -> Iterator[Player]:
    """Open a player of the envs, with the trained policy or random actions."""
    from gpusim_rl.view.player import Player

    if args.policy == "trained":
        if args.settings:
            raise ConfigError("a run's settings cannot be changed", key=args.settings[0], hint="Remove the settings")
        options: dict[str, Any] = {"trust": args.trust, "config_dir": args.config_dir}
        player = Player.open(args.run, num_envs=args.num_envs, changes={"seed": args.seed}, **options)
    else:
        from gpusim_rl.api import load_spec
        from gpusim_rl.run.make_env import make_env
        from gpusim_rl.run.start import begin
        from gpusim_rl.settings.compose import compose
        from gpusim_rl.settings.discover import import_from_current_folder

        import_from_current_folder()
        typed = [f"task={args.run}", f"num_envs={args.num_envs}", f"seed={args.seed}", f"device={args.device}"]
        start, _ = begin(load_spec(compose([*typed, *args.settings], args.config_dir), []))
        player = Player(make_env(start), seed=args.seed, act="random")
    with closing(player):
        if not player.observed.images:
            frozen = player.observed is not player.env
            problem = "the policy observes features of a frozen encoder" if frozen else "the task has no images"
            hint = "Try CartpoleCamera, or add images as in docs/vision.md"
            raise ConfigError(problem, key=args.run, hint=hint)
        yield player


def collect(player: Player, number: int) -> dict[str, Tensor]:
    """Step until `number` frames are collected; return them by group, uint8 [frames, height, width, channels]."""
    import torch

    groups, envs = player.observed.images, player.observed.num_envs
    kept: dict[str, list[Tensor]] = {group: [] for group in groups}
    for _ in range(-(-number // envs)):
        for group in groups:
            kept[group].append(player.obs[group].to("cpu", copy=True))
        player.step()
    return {group: torch.cat(parts)[:number] for group, parts in kept.items()}


def train(group: str, images: Tensor, args: argparse.Namespace, device: torch.device) -> tuple[VAE, float]:
    """Train an image group's autoencoder; return the network and its reconstruction error on held-out frames."""
    import torch

    from gpusim_rl.learn.vae import VAE

    rows = torch.arange(len(images))
    learned, held_out = rows[rows % HELD_OUT != 0], rows[::HELD_OUT]
    if len(learned) < args.batch_size:
        expected = f"more than a batch of {args.batch_size}"
        raise ConfigError(key="--frames", expected=expected, got=args.frames, hint="Try --frames 20000")
    shape = images.shape[1], images.shape[2], images.shape[3]
    vae = VAE(shape, args.kind, args.latents).to(device, memory_format=torch.channels_last)  # type: ignore[reportCallIssue]
    vae.begin(images[learned[torch.randperm(len(learned))[:BEGIN]]].to(device))
    optimizer = torch.optim.Adam(vae.parameters(), lr=args.learning_rate)
    say(f"{group}: {len(learned):,} frames of {' x '.join(map(str, shape))}, {args.kind}, on {device}")
    say("epoch  reconstruction  divergence  held out  seconds")
    began, error, step = time.perf_counter(), math.nan, 0
    steps = args.epochs * -(-len(learned) // args.batch_size)
    for epoch in range(1, args.epochs + 1):
        sums = torch.zeros(2, device=device)
        batches = learned[torch.randperm(len(learned))].split(args.batch_size)
        for batch in batches:
            noise = torch.randn(len(batch), args.latents, device=device)
            reconstruction, divergence = vae.losses(images[batch].to(device), noise)
            optimizer.zero_grad()
            beta = args.beta * min(1.0, 2.0 * step / steps)  # ramp up from 0: latents carry no information at first
            step += 1
            (reconstruction + beta * divergence).backward()
            optimizer.step()
            sums += torch.stack([reconstruction, divergence]).detach()
        first, second = (sums / len(batches)).tolist()
        with torch.no_grad():
            zeros = torch.zeros(args.batch_size, args.latents, device=device)  # no noise: decode the means
            parts = held_out.split(args.batch_size)
            errors = [vae.losses(images[part].to(device), zeros[: len(part)])[0] * len(part) for part in parts]
        error = float(sum(errors)) / len(held_out)
        say(f"{epoch:5d}  {first:14.2f}  {second:10.2f}  {error:8.2f}  {time.perf_counter() - began:7.0f}")
        if not math.isfinite(first + second):
            hint = "Try a smaller --learning-rate"
            raise ConfigError("the loss is not finite", key=f"--learning-rate {args.learning_rate:g}", hint=hint)
    return vae.eval(), error


def draw(path: Path, rows: Sequence[tuple[VAE, Tensor]], device: torch.device) -> Path:
    """Write an image of frames above their reconstructions."""
    import numpy as np
    from PIL import Image

    pictures = []
    for vae, images in rows:
        chosen = images[:: max(1, len(images) // SHOWN)][:SHOWN].to(device)
        for row in (chosen, vae.reconstruct(chosen)):
            shown = row.cpu().numpy()[..., :3] if row.shape[3] >= 3 else row.cpu().numpy()[..., :1].repeat(3, axis=3)
            shown = np.pad(shown, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=255)
            pictures.append(np.concatenate(list(shown), axis=1).repeat(SCALE, axis=0).repeat(SCALE, axis=1))
    width = max(picture.shape[1] for picture in pictures)
    padded = [np.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0)), constant_values=255) for x in pictures]
    with writing(path) as file:
        Image.fromarray(np.concatenate(padded)).save(file, "PNG", optimize=True)
    return path


if __name__ == "__main__":
    sys.exit(main())
