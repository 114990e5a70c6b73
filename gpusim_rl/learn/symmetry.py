"""Left-right symmetry for PPO: mirrored samples and a mirror loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.learn.algorithm import EnvSpec, LearnerContext
from gpusim_rl.learn.distributions import squared_distance
from gpusim_rl.learn.extensions import Evaluate, Evaluated, Extension
from gpusim_rl.learn.minibatch import Minibatch, Samples
from gpusim_rl.learn.networks import ActorCritic, EvaluatedActions
from gpusim_rl.learn.rollout import Rollout
from gpusim_rl.settings.schema import PPOConfig, SymmetryConfig
from gpusim_rl.spaces import SignedPermutation

SYMMETRY_LOSS = "loss/symmetry"
IMAGE = "image of "  # prefix of mirrored inputs
AUGMENTED = ("loss/policy", "loss/value", "loss/bounds")
"""Losses averaged over samples and their mirror images; entropy and KL use only the original samples."""


class Symmetry(Extension):
    """Mirror images in PPO's minibatches, and a mirror loss (Mittal et al. 2024, arXiv 2403.04359).

    A mirror image shares advantage, value, target and old log-probability with its sample. Its raw observations are
    mirrored, then normalised by the statistics of the originals.
    """

    def __init__(
        self, cfg: SymmetryConfig, maps: Mapping[str, SignedPermutation], asymmetry: float, device: torch.device
    ) -> None:
        self._cfg, self._asymmetry = cfg, asymmetry
        self.weights = {SYMMETRY_LOSS: cfg.mirror_loss}
        self._maps = {name: _tensors(swap, device) for name, swap in maps.items()}

    @classmethod
    def of(cls, cfg: PPOConfig, env: EnvSpec, context: LearnerContext, device: torch.device) -> Symmetry:
        """Build the extension; raise ConfigError if the policy or task does not support it."""
        network, key = (f"{context.section}.{name}" for name in ("network", "symmetry"))
        if cfg.network.rnn is not None:
            problem = f"recurrent states cannot be mirrored ({network}.rnn={cfg.network.rnn})"
        elif env.images and (frames := cfg.network.encoder.frames) > 1:
            problem = f"older frames cannot be mirrored ({network}.encoder.frames={frames})"
        elif env.mirrored is None:
            problem = "these envs do not define mirror images"
        else:
            try:
                return cls(cfg.symmetry, *env.mirrored(), device)
            except TaskError as error:
                problem = str(error)
        raise ConfigError(problem, key=key, hint=f"Try {key}.augment=false {key}.mirror_loss=0")

    def image(self, name: str, values: Tensor) -> Tensor:
        """Mirror actions (`name="actions"`), or a group's raw observations or uint8 images [*batch, H, W, channels]."""
        if values.dtype == torch.uint8:
            return values.flip(-2)
        index, signs, terms = self._maps[name]
        image = values.index_select(-1, index) * signs
        return image if terms is None else image + values @ terms

    def begin_update(self, rollout: Rollout, reward: Tensor, inputs: dict[str, Tensor], policy: ActorCritic) -> Tensor:
        """Add the normalised mirror images to the inputs."""
        images = policy.normalize({group: self.image(group, rollout.obs[group]) for group in policy.groups})
        inputs |= {f"{IMAGE}{group}": image.to(inputs[group].dtype) for group, image in images.items()}
        return reward

    def losses(self, evaluate: Evaluate, minibatch: Minibatch) -> Evaluated:
        """Evaluate samples [1, batch] and their mirror images as one batch [2, batch]."""
        old, inputs = minibatch.old, minibatch.inputs
        fields = {field.name: getattr(old, field.name) for field in dataclasses.fields(old)}
        both = {name: value.expand(2, *value.shape[1:]) for name, value in fields.items()}
        both["action"] = torch.cat([old.action, self.image("actions", old.action)])
        groups = [name for name in inputs if f"{IMAGE}{name}" in inputs]
        pairs = {group: torch.cat([inputs[group], inputs[f"{IMAGE}{group}"]]) for group in groups}
        terms, now = evaluate(Minibatch(Samples(**both), pairs))
        augmented = AUGMENTED if self._cfg.augment else ()
        folded = {name: x.mean(dim=0, keepdim=True) if name in augmented else x[:1] for name, x in terms.items()}
        mean, image_mean = now.distribution.mode.split(1)
        target = self.image("actions", mean).detach()
        folded[SYMMETRY_LOSS] = squared_distance(image_mean, target).mean(dim=-1)
        return folded, EvaluatedActions(now.log_prob[:1], now.entropy[:1], now.distribution[:1], now.value[:1])

    def describe(self) -> dict[str, str]:
        """Return the banner line: modes and asymmetry."""
        modes = ["mirrored samples"] * self._cfg.augment
        modes += [f"mirror loss {self._cfg.mirror_loss:g}"] * (self._cfg.mirror_loss > 0.0)
        return {"symmetry": f"{', '.join(modes)}; robot asymmetry {100 * self._asymmetry:.2g} %"}


def _tensors(swap: SignedPermutation, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    sources = torch.tensor(swap.sources, dtype=torch.int64, device=device)
    signs = torch.tensor(swap.signs, dtype=torch.float32, device=device)
    terms = torch.zeros(len(signs), len(signs))
    for row, source, factor in swap.terms:
        terms[source, row] += factor
    return sources, signs, terms.to(device) if swap.terms else None
