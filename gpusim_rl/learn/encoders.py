"""Image encoders and frame stacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor, nn

from gpusim_rl.errors import ConfigError
from gpusim_rl.images import shifted
from gpusim_rl.learn.algorithm import Hidden
from gpusim_rl.machine.source_location import describe
from gpusim_rl.settings.load_class import load_class
from gpusim_rl.settings.schema import EncoderConfig
from gpusim_rl.spaces import ImageShape


class SpatialSoftmax(nn.Module):
    """Mean position of each channel's activation, in [-1, 1], x then y (Levine et al. 2016, arXiv 1504.00702)."""

    TEMPERATURE = 0.3
    """Softmax temperature, fixed: a learned one shrinks until positions jump. 0.3 finds thin objects sooner than 1."""

    places: Tensor
    """Pixel positions, [height * width, 2]."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        x, y = (torch.linspace(-1.0, 1.0, size) for size in (width, height))
        places = torch.stack([x.expand(height, -1).flatten(), y[:, None].expand(-1, width).flatten()], dim=1)
        self.register_buffer("places", places, persistent=False)

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """Return positions [batch, 2 * channels], float32."""
        activation = x.float().flatten(2)
        deviation, mean = torch.std_mean(activation, dim=2, keepdim=True)
        share = ((activation - mean) / (self.TEMPERATURE * (deviation + 1e-3))).softmax(dim=2)
        # not a matmul: autocast would round the positions
        return torch.stack([(share * place).sum(dim=2) for place in self.places.unbind(1)], dim=2).flatten(1)


class _Residual(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x.relu()).relu())


def _spatial(channels: int) -> list[nn.Module]:
    """Return the convolutions of mjlab's camera tasks."""
    return [nn.Conv2d(channels, 16, 5, 2), nn.ELU(), nn.Conv2d(16, 32, 3, 2), nn.ELU()]


def _nature(channels: int) -> list[nn.Module]:
    """Return the convolutions of Mnih et al. 2015 (doi 10.1038/nature14236)."""
    layers: list[nn.Module] = []
    for width, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layers += [nn.Conv2d(channels, width, kernel, stride), nn.ReLU()]
        channels = width
    return layers


def _impala(channels: int) -> list[nn.Module]:
    """Return the network of Espeholt et al. 2018 (arXiv 1802.01561), figure 3."""
    layers: list[nn.Module] = []
    for width in (16, 32, 32):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
        layers += [_Residual(width), _Residual(width)]
        channels = width
    return [*layers, nn.ReLU()]


_KINDS = {"spatial": (_spatial, None), "nature": (_nature, 512), "impala": (_impala, 256)}
"""Convolutions of each `kind`, and the width of the layer after them (None: spatial softmax)."""


class ImageEncoder(nn.Sequential):
    """Built-in network for float32 images [batch, channels, height, width] in [-0.5, 0.5]."""

    def __init__(self, shape: ImageShape, cfg: EncoderConfig, setting: str = "encoder.kind") -> None:
        height, width, channels = shape
        make, size = _KINDS[cfg.kind]
        layers = nn.Sequential(*make(channels))
        try:
            with torch.no_grad():
                out = layers(torch.zeros(1, channels, height, width)).shape
            if size is None and out[2:].numel() == 1:
                raise RuntimeError("a softmax over one pixel")
        except RuntimeError:
            hint = f"Try {'' if cfg.kind == 'spatial' else f'{setting}=spatial, or '}larger images"
            problem = f"images of {height} x {width} are too small"
            raise ConfigError(problem, key=f"{setting}={cfg.kind}", hint=hint) from None
        if size is None:
            super().__init__(layers, SpatialSoftmax(out[2], out[3]))
            self.out_size = 2 * out[1]
        else:
            last = nn.Linear(out[1:].numel(), size)
            super().__init__(layers, nn.Flatten(), last, nn.LayerNorm(size), nn.ReLU())
            self.out_size = size
        self.kind, self.shape = cfg.kind, shape


def scaled(
    images: UInt8[Tensor, "batch height width channels"], dtype: torch.dtype
) -> Float[Tensor, "batch channels height width"]:
    """Convert 8-bit images to a new tensor in [-0.5, 0.5]."""
    x = images.permute(0, 3, 1, 2).to(dtype)  # bf16 is exact for 8 bits
    return x.mul_(1.0 / 255.0).sub_(0.5)


class Encoder(nn.Module):
    """Image encoder: one network per image group, features concatenated. `images` maps groups to frame-stack shapes."""

    def __init__(self, images: Mapping[str, ImageShape], cfg: EncoderConfig, key: str) -> None:
        super().__init__()
        self.groups, self.frames = sorted(images), cfg.frames
        self.networks = nn.ModuleDict({group: _make(images[group], cfg, key) for group in self.groups})
        self.to(memory_format=torch.channels_last)  # type: ignore[reportCallIssue]
        self.out_size = sum(network.out_size for network in self.networks.values())  # type: ignore[arg-type]

    def forward(self, images: Mapping[str, Tensor], *, reduced: torch.dtype | None) -> Float[Tensor, "*batch features"]:
        """Return float32 features of uint8 images [*batch, height, width, channels]."""
        return torch.cat([self._features(group, images[group], reduced) for group in self.groups], dim=-1)

    def _features(self, group: str, images: Tensor, reduced: torch.dtype | None) -> Tensor:
        batch = images.shape[:-3]
        x = scaled(images.flatten(0, -4), reduced or torch.float32)
        with torch.autocast(images.device.type, dtype=reduced) if reduced else nullcontext():
            features = self.networks[group](x)
        return features.float().unflatten(0, batch)


def _make(shape: ImageShape, cfg: EncoderConfig, key: str) -> nn.Module:
    if cfg._target_ is None:
        return ImageEncoder(shape, cfg, f"{key}.encoder.kind")
    return make_own(cfg._target_, f"{key}.encoder", "my_networks.MyEncoder", {"shape": shape, "cfg": cfg})


def make_own(target: str, key: str, example: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Build the user-defined network `<key>._target_`; raise ConfigError if that fails or `out_size` is missing."""
    kind, where = load_class(target, nn.Module, f"{key}._target_", example), f"{key}._target_={target}"
    try:
        module = kind(*arguments.values())
    except TypeError as error:
        inner = error.__traceback__.tb_next if error.__traceback__ is not None else None
        reason = describe(error.with_traceback(inner))  # without this file's frame
        (name, value), call = next(iter(arguments.items())), f"{kind.__name__}({', '.join(arguments)})"
        problem = f"{call} failed: {reason}. Called with {name}={value} and the `{key}` settings as cfg"
        raise ConfigError(problem, key=where) from error
    if not isinstance(getattr(module, "out_size", None), int):
        raise ConfigError("requires an int attribute out_size, the number of output features", key=where)
    return module


def random_shift(
    images: UInt8[Tensor, "batch height width channels"], pixels: int, generator: torch.Generator
) -> UInt8[Tensor, "batch height width channels"]:
    """Shift each image randomly by up to `pixels`, replicating the border."""
    moves = torch.randint(-pixels, pixels + 1, (2, len(images)), device=images.device, generator=generator)
    return shifted(images, *moves)


class FrameStack:
    """Stacks of the newest frames; the older frames are part of the policy's recurrent state.

    Frames before the start of an episode are black. A group's state is uint8 [older frames, batch, values per frame],
    newest last.
    """

    def __init__(self, images: Mapping[str, ImageShape], frames: int) -> None:
        self._images, self._older = dict(sorted(images.items())), frames - 1
        self.num_states = len(images) if frames > 1 else 0
        self.shapes = {group: (h, w, channels * frames) for group, (h, w, channels) in self._images.items()}
        """Shape of each group's stack."""

    def initial_state(self, batch: int, device: torch.device) -> Hidden:
        """Return the initial state: black frames."""
        sizes = [math.prod(shape) for shape in self._images.values()][: self.num_states]
        return tuple(torch.zeros(self._older, batch, size, dtype=torch.uint8, device=device) for size in sizes)

    def __call__(
        self, inputs: Mapping[str, Tensor], hidden: Hidden, is_first: Bool[Tensor, "time batch"] | None
    ) -> tuple[dict[str, Tensor], Hidden]:
        """Return stacks [time, batch, height, width, channels] and the state after the last one."""
        if not self.num_states:
            return {group: inputs[group] for group in self._images}, ()
        stacks, states = {}, []
        for group, before in zip(self._images, hidden[: self.num_states], strict=True):
            frames = inputs[group]
            time, steps = len(frames), range(self._older + 1)
            every = torch.cat([before.unflatten(2, frames.shape[2:]), frames])
            lags = [every[i : i + time] for i in steps]  # oldest first
            if is_first is not None:
                reaches = torch.ones_like(is_first)
                for lag in steps[1:]:
                    same_episode = torch.ones_like(is_first)
                    same_episode[lag - 1 :] = ~is_first[: max(0, time - lag + 1)]
                    reaches = reaches & same_episode
                    lags[self._older - lag] = lags[self._older - lag] * reaches[..., None, None, None]
            stacks[group] = torch.cat(lags, dim=-1)
            states.append(torch.stack([lag[-1] for lag in lags[1:]]).flatten(2))
        return stacks, tuple(states)
