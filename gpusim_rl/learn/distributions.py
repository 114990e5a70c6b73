"""Action distributions, and the policy heads that return them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional

from gpusim_rl.settings.schema import NetworkConfig
from gpusim_rl.spaces import Box, MultiDiscrete

_LOG_2PI = math.log(2.0 * math.pi)

squared_distance = partial(functional.mse_loss, reduction="none")
"""Element-wise (a - b)^2 of tensors of equal shape; one operation forward, one backward."""


@dataclass(slots=True)
class DiagonalGaussian:
    """Gaussian over unclipped continuous actions, independent per action."""

    mean: Float[Tensor, "*batch actions"]
    log_std: Float[Tensor, "*#batch actions"]  # one row [actions] if state-independent
    _terms: tuple[Tensor, Tensor] | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, index: int | slice) -> DiagonalGaussian:
        return DiagonalGaussian(self.mean[index], self.log_std if self.log_std.ndim == 1 else self.log_std[index])

    def per_sample(self) -> DiagonalGaussian:
        """Return the distribution with the log-std expanded to each sample."""
        return DiagonalGaussian(self.mean, self.log_std.expand_as(self.mean), self._terms)

    @property
    def mode(self) -> Float[Tensor, "*batch actions"]:
        """Most likely action."""
        return self.mean

    def sample(self, noise: Float[Tensor, "*batch actions"]) -> Float[Tensor, "*batch actions"]:
        """Return an action for standard normal noise."""
        return torch.addcmul(self.mean, torch.exp(self.log_std), noise)

    def log_prob(self, action: Float[Tensor, "*batch actions"]) -> Float[Tensor, "*batch"]:
        """Return the log-density of an action."""
        # -(action - mean)^2 / (2 std^2) - log std - log(2 pi) / 2, summed over the actions
        precision, log_volume = self._shared_terms()
        squares = squared_distance(self.mean.expand_as(action), action) * precision
        at_mean = -0.5 * _LOG_2PI * self.mean.shape[-1] - log_volume
        return torch.add(at_mean, squares.sum(dim=-1), alpha=-0.5)

    def entropy(self) -> Float[Tensor, "*batch"]:
        """Return the entropy [nat]; without a batch dimension if the log-std is state-independent."""
        return self._shared_terms()[1] + 0.5 * (1.0 + _LOG_2PI) * self.mean.shape[-1]

    def _shared_terms(self) -> tuple[Tensor, Tensor]:
        """Return 1 / std^2 and the sum of log-stds, cached to save kernel launches."""
        learned = torch.is_grad_enabled() and self.log_std.requires_grad
        if self._terms is None or (learned and not self._terms[0].requires_grad):
            self._terms = torch.exp(-2.0 * self.log_std), self.log_std.sum(dim=-1)
        return self._terms

    def kl_from(self, old: DiagonalGaussian) -> Float[Tensor, "*batch"]:
        """Return KL(old || self) [nat]."""
        # log(std / std_old) + (std_old^2 + (mean_old - mean)^2) / (2 std^2) - 1 / 2, summed over the actions
        # expm1 makes it exactly 0 for equal distributions
        log_ratio = self.log_std - old.log_std
        excess = torch.add(log_ratio, torch.expm1(-2.0 * log_ratio), alpha=0.5)
        squares = squared_distance(self.mean, old.mean)
        return torch.addcmul(excess, squares, self._shared_terms()[0], value=0.5).sum(dim=-1)

    def excess(self, bound: float) -> Float[Tensor, "*batch"]:
        """Return the squared distance of the mean from [-bound, bound], summed over actions."""
        inside = self.mean.detach().clamp(-bound, bound)  # detached: clamp has a gradient only at distance 0
        return squared_distance(self.mean, inside).sum(dim=-1)

    def stats(self) -> dict[str, Tensor]:
        """Return metrics: the mean standard deviation."""
        return {"policy/std": self.log_std.exp().mean()}

    @property
    def parameters(self) -> tuple[Float[Tensor, "*batch actions"], ...]:
        """Mean and log-std of each sample; `stored` takes them concatenated."""
        return self.mean, self.log_std.expand_as(self.mean)

    @classmethod
    def stored(cls, parameters: Float[Tensor, "*batch parameters"]) -> DiagonalGaussian:
        """Build a distribution from its concatenated `parameters`."""
        mean, log_std = parameters.chunk(2, dim=-1)
        return cls(mean, log_std)


@dataclass(slots=True)
class Categorical:
    """One or several independent categorical distributions, one for each discrete choice."""

    logits: Float[Tensor, "*batch parameters"]  # unnormalised log-probabilities of all choices, concatenated
    counts: tuple[int, ...]  # number of options of each choice

    def __getitem__(self, index: int | slice) -> Categorical:
        return Categorical(self.logits[index], self.counts)

    def per_sample(self) -> Categorical:
        """Return self: logits always depend on the state."""
        return self

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split(self.counts, dim=-1) if len(self.counts) > 1 else (x,)

    def _log_probs(self) -> list[Tensor]:
        return [part.log_softmax(dim=-1) for part in self._parts(self.logits)]

    def _largest(self, scores: Tensor) -> Tensor:
        return torch.stack([part.argmax(dim=-1) for part in self._parts(scores)], dim=-1)

    @property
    def mode(self) -> Int[Tensor, "*batch actions"]:
        """Most likely option of each choice."""
        return self._largest(self.logits)

    def sample(self, noise: Float[Tensor, "*batch parameters"]) -> Int[Tensor, "*batch actions"]:
        """Return an action for standard Gumbel noise (Maddison et al. 2014, arXiv 1411.0030)."""
        return self._largest(self.logits + noise)

    def log_prob(self, action: Shaped[Tensor, "*batch actions"]) -> Float[Tensor, "*batch"]:
        """Return the log-probability of indices of any dtype, summed over the choices."""
        index = action.long()
        parts = [part.gather(-1, index[..., k, None]) for k, part in enumerate(self._log_probs())]
        return torch.cat(parts, dim=-1).sum(dim=-1)

    def entropy(self) -> Float[Tensor, "*batch"]:
        """Return the entropy [nat]."""
        return -torch.cat([part.exp() * part for part in self._log_probs()], dim=-1).sum(dim=-1)

    def kl_from(self, old: Categorical) -> Float[Tensor, "*batch"]:
        """Return KL(old || self) [nat]."""
        pairs = zip(old._log_probs(), self._log_probs(), strict=True)
        return torch.cat([before.exp() * (before - now) for before, now in pairs], dim=-1).sum(dim=-1)

    def excess(self, bound: float) -> Float[Tensor, "*batch"]:
        """Return zeros: indices have no bounds."""
        return torch.zeros_like(self.logits[..., 0])

    def stats(self) -> dict[str, Tensor]:
        """Return no metrics: the entropy is logged anyway."""
        return {}

    @property
    def parameters(self) -> tuple[Float[Tensor, "*batch parameters"]]:
        """Logits, as taken by `CategoricalHead.stored`."""
        return (self.logits,)


Distribution = DiagonalGaussian | Categorical


class GaussianHead(nn.Module):
    """Policy head for continuous actions."""

    def __init__(self, size: int, space: Box, cfg: NetworkConfig) -> None:
        super().__init__()
        self.num_parameters, self.num_noise = 2 * space.size, space.size
        self.mean = nn.Linear(size, space.size)
        # Small initial actions (Andrychowicz et al. 2021, arXiv 2006.05990)
        with torch.no_grad():
            self.mean.weight.mul_(0.01)
            self.mean.bias.zero_()
        self.range = (cfg.log_std_min, cfg.log_std_max)
        self.log_std: nn.Parameter | None = None
        self.log_std_of_state: nn.Linear | None = None
        if cfg.state_dependent_std:
            layer: Any = nn.utils.skip_init(nn.Linear, size, space.size)  # consumes no random numbers
            nn.init.zeros_(layer.weight)
            nn.init.constant_(layer.bias, cfg.log_std_init)
            self.log_std_of_state = layer
        else:
            self.log_std = nn.Parameter(torch.full((space.size,), float(cfg.log_std_init)))

    def forward(self, features: Float[Tensor, "*batch size"]) -> DiagonalGaussian:
        """Return the distribution for each row of features."""
        if self.log_std_of_state is not None:
            return DiagonalGaussian(self.mean(features), self.log_std_of_state(features).clamp(*self.range))
        assert self.log_std is not None
        return DiagonalGaussian(self.mean(features), self.log_std)

    stored = staticmethod(DiagonalGaussian.stored)

    def draw_(self, noise: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise for `DiagonalGaussian.sample` in place, [..., num_noise]."""
        return noise.normal_(generator=generator)

    @torch.no_grad()
    def clamp_(self) -> None:
        """Clamp the log-std parameter to its range, after an optimiser step."""
        if self.log_std is not None:
            self.log_std.clamp_(*self.range)


class CategoricalHead(nn.Module):
    """Policy head for discrete actions."""

    def __init__(self, size: int, space: MultiDiscrete) -> None:
        super().__init__()
        self.counts = space.counts
        self.num_parameters = self.num_noise = sum(space.counts)
        self.logits = nn.Linear(size, self.num_parameters)
        with torch.no_grad():  # nearly uniform at first
            self.logits.weight.mul_(0.01)
            self.logits.bias.zero_()

    def forward(self, features: Float[Tensor, "*batch size"]) -> Categorical:
        """Return the distribution for each row of features."""
        return Categorical(self.logits(features), self.counts)

    def stored(self, parameters: Float[Tensor, "*batch parameters"]) -> Categorical:
        """Build a distribution from its `parameters`."""
        return Categorical(parameters, self.counts)

    def draw_(self, noise: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise for `Categorical.sample` in place, [..., num_noise]."""
        return noise.uniform_(generator=generator).log_().neg_().log_().neg_()

    def clamp_(self) -> None:
        """Do nothing: logits have no range."""
