"""Measures what frozen encoders tell of CartpoleCamera's frames; writes encoders.json.

    python tools/pretrain_encoder.py CartpoleCamera
    python benchmarks/encoders.py CartpoleCamera.encoder.pt

A linear probe is a ridge regression from features of one frame to the position of the cart and the angle of the pole.
R^2 is of envs that it was not fitted to; its weight decay is chosen on others again. Frames are of random actions. The
networks with random weights are of the same make, and were never trained. Features of ImageNet need
`pip install 'gpusim-rl[encoders]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TASK, ENVS, STEPS, EVERY, SEED = "CartpoleCamera", 60, 400, 16, 7
TARGETS = {"cart_pos": 0, "pole_angle": 2}  # columns of the group critic
FIT, CHOOSE = 36, 12  # envs for the regression, and to choose its weight decay; R^2 is of the others
LARGEST = 5.0  # standard deviations: a feature that is nearly always the same must not decide where it is not
DECAYS = [10.0**power for power in range(-5, 5)]


def recorded() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Returns frames by group, the state that they show [frames, 4], and the number of the env of each."""
    import torch

    from gpusim_rl.view.player import Player

    with closing(Player.open(TASK, act="random", num_envs=ENVS, from_yaml=True)) as player:
        group = next(iter(player.env.images))
        seen: list[tuple[Tensor, Tensor]] = []
        for step in range(STEPS):
            if step % EVERY == EVERY - 1:
                seen.append((player.obs[group].clone(), player.obs["critic"].clone()))
            player.step()
    frames, states = (torch.cat(parts) for parts in zip(*seen, strict=True))
    return {group: frames}, states, torch.arange(ENVS).repeat(len(seen))


def probe(features: Tensor, targets: Tensor, env: Tensor) -> list[float]:
    """Returns R^2 of each target, on envs that nothing was fitted to."""
    import torch

    fit, choose, test = env < FIT, (env >= FIT) & (env < FIT + CHOOSE), env >= FIT + CHOOSE
    x = features.double()
    mean, std = x[fit].mean(dim=0), x[fit].std(dim=0)
    x = torch.where(std > 1e-8, (x - mean) / std.clamp(min=1e-8), 0.0).clamp(-LARGEST, LARGEST)
    middle = targets[fit].double().mean(dim=0)
    y = targets.double() - middle
    gram, mixed = x[fit].T @ x[fit] / int(fit.sum()), x[fit].T @ y[fit] / int(fit.sum())

    def errors(decay: float, where: Tensor) -> Tensor:
        weights = torch.linalg.solve(gram + decay * torch.eye(x.shape[1], dtype=x.dtype), mixed)
        return (y[where] - x[where] @ weights).square().mean(dim=0)

    trials = torch.stack([errors(decay, choose) for decay in DECAYS])
    found = []
    for column in range(targets.shape[1]):
        error = errors(DECAYS[int(trials[:, column].argmin())], test)[column]
        spread = (y[test][:, column] - y[test][:, column].mean()).square().mean()
        found.append(round(1.0 - float(error / spread), 4))
    return found


def encoders(file: str, images: dict[str, tuple[int, int, int]]) -> dict[str, Callable[[], Any]]:
    """Returns functions that make encoders, by name."""
    import torch
    from torch import nn

    from gpusim_rl.learn.encoders import ImageEncoder
    from gpusim_rl.learn.pretrained import Pretrained, load_frozen
    from gpusim_rl.settings.schema import EncoderConfig

    cpu = torch.device("cpu")

    def untrained(kind: Any) -> Pretrained:
        torch.manual_seed(SEED)
        networks = {g: ImageEncoder(s, EncoderConfig(_target_=None, kind=kind, frames=1)) for g, s in images.items()}
        return Pretrained(networks, next(iter(networks.values())).out_size, None, "", "")  # type: ignore[arg-type]

    def shuffled() -> Pretrained:
        torch.manual_seed(SEED)
        encoder = load_frozen("efficientnet", images, cpu)
        for module in encoder.modules():
            if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
                module.reset_parameters()
            if isinstance(module, nn.Conv2d):  # so that activations neither vanish nor grow: there are no statistics
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        return encoder

    return {
        "VAE": lambda: load_frozen(file, images, cpu),
        "spatial, random weights": lambda: untrained("spatial"),
        "nature, random weights": lambda: untrained("nature"),
        "efficientnet": lambda: load_frozen("efficientnet", images, cpu),
        "efficientnet, random weights": shuffled,
    }


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()
    import torch

    from gpusim_rl.errors import ConfigError
    from gpusim_rl.files.checkpoint_file import load
    from gpusim_rl.files.provenance import describe_environment, git_state

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", help=f"encoder of tools/pretrain_encoder.py {TASK}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    frames, states, env = recorded()
    targets = states[:, list(TARGETS.values())]
    shapes = {group: (x.shape[1], x.shape[2], x.shape[3]) for group, x in frames.items()}
    rows: dict[str, Any] = {}
    for name, make in encoders(args.file, shapes).items():
        with suppress(ConfigError):  # a package is missing: the others are measured
            encoder, started = make(), time.perf_counter()
            features = encoder(frames)
            seconds = time.perf_counter() - started
            r2 = dict(zip(TARGETS, probe(features, targets, env), strict=True))
            milliseconds = round(1e3 * seconds / len(env), 3)
            rows[name] = {"features": encoder.out_size, "r2": r2, "ms_per_frame": milliseconds}
            print(f"{name}: {rows[name]}", flush=True)
    result = {
        "command": f"python benchmarks/encoders.py {args.file}",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "frames": len(env),
        "envs": ENVS,
        "encoder": load(Path(args.file))["made"],
        "by_encoder": rows,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
