"""Left-right symmetry: PPO learns from the mirror images of its samples too, or that its actions should mirror."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.learn.algorithm import EnvSpec, Observation
from gpusim_rl.learn.distributions import squared_distance
from gpusim_rl.learn.minibatch import Samples
from gpusim_rl.learn.networks import ActorCritic, EvaluatedActions
from gpusim_rl.settings.schema import PPOConfig, SymmetryConfig
from gpusim_rl.spaces import SignedPermutation

SYMMETRY_LOSS = "loss/symmetry"
IMAGE = "image of "
"""Beginning of the name of an input that is a mirror image."""
AUGMENTED = ("loss/policy", "loss/value", "loss/bounds")
"""Losses whose mean is taken over the samples and their mirror images; entropy and KL are of the samples alone."""


class BothSides(NamedTuple):
    """A minibatch and its mirror image, as two steps of time."""

    old: Samples
    inputs: dict[str, Tensor]


class Symmetry:
    """Adds mirror images to the minibatches of PPO (Mittal et al. 2024, arXiv 2403.04359).

    The mirror image of a sample has the advantage, the value, the target and the old log-probability of the sample. It
    is made of raw observations, and normalised then by the statistics of those that were seen.

    Args:
        cfg: Settings.
        maps: Mirror images of the observation groups and of `actions`, by name.
        asymmetry: Distance of the robot from its own mirror image.
        device: Device of the samples.
    """

    def __init__(
        self, cfg: SymmetryConfig, maps: Mapping[str, SignedPermutation], asymmetry: float, device: torch.device
    ) -> None:
        self._cfg, self._asymmetry = cfg, asymmetry
        self._maps = {name: _tensors(swap, device) for name, swap in maps.items()}

    @classmethod
    def of(cls, cfg: PPOConfig, env: EnvSpec, device: torch.device) -> Symmetry | None:
        """Returns the symmetry of a training; None where it is off, or nothing is learned.

        Raises:
            ConfigError: The policy is recurrent, or the task has no mirror image.
        """
        key, symmetry = f"{env.section}.symmetry", cfg.symmetry
        off = f"Try {key}.augment=false {key}.mirror_loss=0"
        if env.role == "acts" or not (symmetry.augment or symmetry.mirror_loss):
            return None
        if cfg.network.rnn is not None:
            problem = "the recurrent state of a mirror image is not known"
            raise ConfigError(f"{key} with {env.section}.network.rnn={cfg.network.rnn}: {problem}. {off}")
        if env.images and (frames := cfg.network.encoder.frames) > 1:
            problem = "the older frames of a mirror image are not known"
            raise ConfigError(f"{key} with {env.section}.network.encoder.frames={frames}: {problem}. {off}")
        if env.mirrored is None:
            raise ConfigError(f"{key}: the mirror images of these envs are not known. {off}")
        try:
            return cls(symmetry, *env.mirrored(), device)
        except TaskError as error:
            raise ConfigError(f"{key}: {error}. {off}") from None

    def image(self, name: str, values: Tensor) -> Tensor:
        """Returns the mirror image of raw observations of a group, or of `actions`, [*batch, size].

        Of images, uint8 [*batch, height, width, channels], left and right change places.
        """
        if values.dtype == torch.uint8:
            return values.flip(-2)
        index, signs, terms = self._maps[name]
        image = values.index_select(-1, index) * signs
        return image if terms is None else image + values @ terms

    def images(self, policy: ActorCritic, obs: Observation) -> dict[str, Tensor]:
        """Returns the normalised mirror images of raw observations, by the names of inputs."""
        seen = policy.normalize({group: self.image(group, obs[group]) for group in policy.groups})
        return {f"{IMAGE}{group}": value for group, value in seen.items()}

    def with_images(self, old: Samples, inputs: Mapping[str, Tensor]) -> BothSides:
        """Returns samples [1, batch] and their mirror images, [2, batch]; what is equal in both is a view."""
        twice = {field.name: getattr(old, field.name) for field in dataclasses.fields(old)}
        both = {name: value.expand(2, *value.shape[1:]) for name, value in twice.items()}
        both["action"] = torch.cat([old.action, self.image("actions", old.action)])
        groups = [name for name in inputs if f"{IMAGE}{name}" in inputs]
        pairs = {group: torch.cat([inputs[group], inputs[f"{IMAGE}{group}"]]) for group in groups}
        return BothSides(Samples(**both), pairs)

    def fold(self, losses: Mapping[str, Tensor], now: EvaluatedActions) -> dict[str, Tensor]:
        """Returns the losses of samples [1, batch], from those of samples and mirror images [2, batch]."""
        both = AUGMENTED if self._cfg.augment else ()
        folded = {name: x.mean(dim=0, keepdim=True) if name in both else x[:1] for name, x in losses.items()}
        mean, of_image = now.distribution.mode.split(1)
        wanted = self.image("actions", mean).detach()
        return {**folded, SYMMETRY_LOSS: squared_distance(of_image, wanted).mean(dim=-1)}

    def describe(self) -> dict[str, str]:
        """Returns what is done, and how symmetric the robot is."""
        does = ["samples and their mirror images"] * self._cfg.augment
        does += [f"mirror loss {self._cfg.mirror_loss:g}"] * (self._cfg.mirror_loss > 0.0)
        return {"symmetry": f"{', '.join(does)}; the robot differs from its image by {100 * self._asymmetry:.2g} %"}


def _tensors(swap: SignedPermutation, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    signs = torch.tensor(swap.signs, dtype=torch.float32, device=device)
    terms = torch.zeros(len(signs), len(signs)) if swap.terms else None
    for row, source, factor in swap.terms:
        terms[source, row] += factor  # pyright: ignore[reportOptionalSubscript]
    return (
        torch.tensor(swap.sources, dtype=torch.int64, device=device),
        signs,
        None if terms is None else terms.to(device),
    )
