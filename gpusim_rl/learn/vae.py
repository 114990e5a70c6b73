"""Variational autoencoder of images, for `gpusim-rl pretrain-encoder`."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from gpusim_rl.learn.encoders import ImageEncoder, scaled
from gpusim_rl.settings.schema import EncoderConfig
from gpusim_rl.spaces import ImageShape

DEVIATION = 0.1
"""Standard deviation of a reconstructed pixel, with brightness in [0, 1]. Larger values lose small moving objects."""
NARROW = -4.0
"""Initial log-variance of the latents, small so that the decoder uses them."""
HALVINGS = 3
WIDTHS = (64, 32, 16)
"""Decoder channels before each upsampling."""


class VAE(nn.Module):
    """Beta-VAE (Higgins et al. 2017).

    The decoder predicts pixels in standard deviations from their mean over all images, so small moving objects count
    from the start. Without this, Cartpole's pole (12 of 3,840 pixels) is lost.
    """

    background: Tensor
    """Mean of each pixel, [channels, height, width]."""
    spread: Tensor
    """Standard deviation of each pixel, [channels, height, width]."""

    def __init__(self, shape: ImageShape, kind: str, latents: int) -> None:
        super().__init__()
        self.shape = shape
        cfg = EncoderConfig(_target_=None, kind=kind, frames=1)  # type: ignore[arg-type]
        self.encoder = ImageEncoder(shape, cfg, "--kind")
        self.mean, self.log_var = (nn.Linear(self.encoder.out_size, latents) for _ in range(2))
        height, width, channels = shape
        rows, columns = (-(-size // 2**HALVINGS) for size in (height, width))
        first = (WIDTHS[0], rows, columns)
        layers: list[nn.Module] = [nn.Linear(latents, 128), nn.ReLU(), nn.Linear(128, WIDTHS[0] * rows * columns)]
        layers.append(nn.Unflatten(1, first))
        for before, after in zip(WIDTHS, (*WIDTHS[1:], channels), strict=True):
            layers += [nn.ReLU(), nn.ConvTranspose2d(before, after, 4, stride=2, padding=1)]
        self.decoder = nn.Sequential(*layers)
        self.register_buffer("background", torch.zeros(channels, height, width))
        self.register_buffer("spread", torch.ones(channels, height, width))

    @torch.no_grad()
    def begin(self, images: UInt8[Tensor, "batch height width channels"]) -> None:
        """Fit background, spread and initial latent scale to sample images."""
        x = scaled(images, torch.float32)
        self.background.copy_(x.mean(dim=0))
        self.spread.copy_(x.std(dim=0))
        features = self.encoder(x)
        deviation = features.std(dim=0)
        self.mean.weight.div_(torch.maximum(deviation, deviation.mean()))  # some units may be constant
        self.mean.bias.copy_(-(self.mean.weight @ features.mean(dim=0)))
        self.log_var.weight.zero_()
        self.log_var.bias.fill_(NARROW)

    def decode(self, latents: Float[Tensor, "batch latents"]) -> Float[Tensor, "batch channels height width"]:
        """Decode latents to images, roughly in [-0.5, 0.5]."""
        height, width, _ = self.shape
        return self.decoder(latents)[..., :height, :width] * self.spread + self.background

    def losses(
        self, images: UInt8[Tensor, "batch height width channels"], noise: Float[Tensor, "batch latents"]
    ) -> tuple[Tensor, Tensor]:
        """Return reconstruction loss and KL divergence [nat], averaged over images, 0-dim."""
        x = scaled(images, torch.float32)
        features = self.encoder(x)
        mean, log_var = self.mean(features), self.log_var(features)
        error = self.decode(mean + (0.5 * log_var).exp() * noise) - x
        divergence = 0.5 * (mean.square() + log_var.exp() - 1.0 - log_var).sum(dim=1)
        return error.square().flatten(1).sum(dim=1).mean() / (2.0 * DEVIATION**2), divergence.mean()

    @torch.no_grad()
    def reconstruct(
        self, images: UInt8[Tensor, "batch height width channels"]
    ) -> UInt8[Tensor, "batch height width channels"]:
        """Encode images to mean latents and decode them."""
        x = self.decode(self.mean(self.encoder(scaled(images, torch.float32))))
        return x.add(0.5).clamp(0.0, 1.0).mul(255.0).round().to(torch.uint8).permute(0, 2, 3, 1)
