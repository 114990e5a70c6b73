"""Running normalisation with float64 statistics on the device."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gpusim_rl.learn.collective import ALONE, Collective


def moments(
    x: Float[Tensor, "rows time envs"], valid: Float[Tensor, "time envs"], collective: Collective = ALONE
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Return mean and variance of each row over the valid samples of all processes (`valid` is 1.0 or 0.0)."""
    [number] = collective.sum([valid.sum()])
    weight = valid / number.clamp(min=1.0)
    [mean] = collective.sum([(x * weight).sum(dim=(1, 2))])
    [variance] = collective.sum([((x - mean[:, None, None]).square() * weight).sum(dim=(1, 2))])
    return mean, variance


class RunningNormalizer(nn.Module):
    """Feature normalisation by the running mean and variance of all batches; `eps` is added to the variance.

    Batches are merged with Chan, Golub and LeVeque's pairwise update (1979, STAN-CS-79-773), for any batch size.
    Squared deviations from the batch mean are summed in float64, so an offset of 1e6 costs no precision.
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    _mean: Tensor
    scale: Tensor  # standard deviation, float32 [size]; not saved, as `var` determines it
    _inverse_scale: Tensor

    def __init__(self, size: int, *, clip: float | None = None, eps: float = 1e-5) -> None:
        super().__init__()
        self.clip = clip
        self.eps = eps
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        # float32 copies: `forward` runs in every step, but statistics change once per iteration
        for name in ("_mean", "scale", "_inverse_scale"):
            self.register_buffer(name, torch.zeros(size), persistent=False)
        self._update_copies()
        self.register_load_state_dict_post_hook(lambda module, _: module._update_copies())

    def forward(self, x: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        """Normalise float32 features."""
        y = (x - self._mean).mul_(self._inverse_scale)
        return y if self.clip is None else y.clamp_(-self.clip, self.clip)

    def inverse(self, y: Float[Tensor, "*batch size"]) -> Float[Tensor, "*batch size"]:
        """Undo the normalisation, except for clipping."""
        return torch.addcmul(self._mean, y, self.scale)

    @torch.no_grad()
    def update(
        self,
        x: Float[Tensor, "batch size"],
        where: Bool[Tensor, " batch"] | None = None,
        collective: Collective = ALONE,
    ) -> None:
        """Merge the batches of all processes; rows where the mask `where` is False are ignored, even NaN."""
        if where is None:
            count = torch.full_like(self.count, float(x.shape[0]))
            data = x.to(torch.float64, copy=True)
        else:
            count = where.sum(dtype=torch.float64)
            data = torch.where(where[:, None], x, 0.0).double()
        count, total = collective.sum([count, data.sum(dim=0)])
        number = count.clamp(min=1.0)
        mean = total / number
        # Two passes, so that neither offsets nor outliers cost precision; in place, with one copy of the batch
        data.sub_(mean)
        if where is not None:
            data.mul_(where[:, None])
        [squares] = collective.sum([data.square_().sum(dim=0)])
        var = squares / number
        self.count.add_(count)
        weight = count / self.count.clamp(min=1.0)  # 1 for the first batch: drops the initial variance
        delta = mean - self.mean
        # mean += w delta;  var = (1 - w) var + w batch_var + w (1 - w) delta^2
        self.mean.addcmul_(delta, weight)
        self.var.lerp_(var, weight).addcmul_(delta.square_(), weight * (1.0 - weight))
        self._update_copies()

    @torch.no_grad()
    def _update_copies(self) -> None:
        self._mean.copy_(self.mean)
        self.scale.copy_(torch.sqrt(self.var + self.eps))
        torch.reciprocal(self.scale, out=self._inverse_scale)


class DifferenceNormalizer(RunningNormalizer):
    """Feature scaling by the running mean absolute value; zeros stay zeros."""

    def update(self, x: Tensor, where: Tensor | None = None, collective: Collective = ALONE) -> None:
        """Merge the batches of all processes."""
        super().update(x.abs(), where, collective)

    @torch.no_grad()
    def _update_copies(self) -> None:
        self.scale.copy_(torch.where(self.count > 0.0, self.mean, 1.0).clamp(min=1e-4))
        torch.reciprocal(self.scale, out=self._inverse_scale)
