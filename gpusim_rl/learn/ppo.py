"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) without a host sync."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from gpusim_rl.config import PPOConfig
from gpusim_rl.learn.chunks import Chunks
from gpusim_rl.learn.networks import ActorCritic, Hidden, gaussian_kl
from gpusim_rl.learn.rollout import Rollout, gae

SOFT_BOUND = 1.1
"""Action means beyond +-1.1 are penalised by the bounds loss, as in rl_games: actions are clipped at 1."""

CPU_CHUNK = 4096
"""Samples whose activations one CPU thread computes at a time; they stay in its caches."""


def chunk_samples(minibatch: int) -> int:
    """Samples that a minibatch on the CPU is cut into: for four threads or more, if that leaves enough of them to each.

    Where chunks would be so small that the overhead of operations counts, there are two, or one. The settings alone
    decide, not the machine, so that equal runs have equal bits.
    """
    half, quarter = -(-minibatch // 2), -(-minibatch // 4)
    return max(CPU_CHUNK // 4, min(CPU_CHUNK // 2, half), min(CPU_CHUNK, quarter))


def choose_precision(precision: str, device: torch.device) -> tuple[bool, str]:
    """Whether to run networks in bfloat16, and why."""
    if precision != "auto":
        return precision == "bf16", "as configured"
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return fast, "auto: the GPU " + ("computes" if fast else "does not compute") + " in bf16"
    if device.type == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return fast, "auto: the CPU " + ("has" if fast else "has no") + " bf16 matrix instructions"
    return False, f"auto: {device.type}"


def fit_minibatches(units: int, wanted: float) -> int:
    """The divisor of `units` nearest to `wanted`: how many equal minibatches a batch is cut into."""
    divisors = [d for low in range(1, int(units**0.5) + 1) if units % low == 0 for d in (low, units // low)]
    return min(divisors, key=lambda d: (abs(d - wanted), d))


def fit_sequence_length(horizon: int, wanted: int) -> int:
    """The largest divisor of the horizon that is not longer than wanted."""
    return max(d for d in range(1, min(horizon, wanted) + 1) if horizon % d == 0)


def adapt_learning_rate(lr: Tensor, kl: Tensor, threshold: float, low: float, high: float) -> None:
    """Moves the learning rate in place so that the policy's change stays near the threshold.

    rl_games' rule: a KL above twice the threshold divides the rate by 1.5, one below half of it multiplies by 1.5. A KL
    of exactly 0 (no sample of the minibatch was valid) says nothing and changes nothing.
    """
    up = (kl < 0.5 * threshold) & (kl > 0.0)
    factor = torch.where(kl > 2.0 * threshold, 1.0 / 1.5, torch.where(up, 1.5, 1.0))
    lr.mul_(factor.to(lr.dtype)).clamp_(low, high)


@dataclass(slots=True)
class Batch:
    """A rollout arranged for training: [steps per sequence, sequences, ...]; feed-forward policies have one step."""

    inputs: dict[str, Tensor]
    """Normalised observations."""
    columns: Tensor
    """Everything else that is one row per sample, side by side, so that a minibatch is one gather."""
    hidden: Hidden
    """Recurrent state before each sequence, [layers, sequences, size]."""
    is_first: Tensor | None
    """An episode begins at this step; None for feed-forward policies."""

    def select(self, index: Tensor) -> Batch:
        """The sequences of a minibatch."""
        return Batch(
            {group: value.index_select(1, index) for group, value in self.inputs.items()},
            self.columns.index_select(1, index),
            tuple(h.index_select(1, index) for h in self.hidden),
            None if self.is_first is None else self.is_first.index_select(1, index),
        )


class PPO:
    """Learns from rollouts.

    Losses are means over the valid samples of a minibatch:

        policy + 0.5 value_coef * value + bounds_coef * bounds - entropy_coef * entropy

    The learning rate is a device tensor that the schedule changes in place; nothing is read back. Observation
    statistics are updated after the optimisation, so that the ratio is 1 and the KL 0 in the first minibatch. Return
    statistics are updated before it (they do not touch the policy), so that the critic's targets have unit scale from
    the first iteration on.

    Args:
        policy: What is trained.
        cfg: Settings.
        horizon: Steps per rollout.
        num_envs: Envs per rollout.
        max_iterations: Updates in a full training, for the linear schedule.
        generator: Shuffles minibatches.

    Attributes:
        num_minibatches: Per epoch, fitted to divide the batch.
        sequence_length: Steps per training sequence, fitted to divide the horizon; 1 for feed-forward policies.
    """

    def __init__(
        self,
        policy: ActorCritic,
        cfg: PPOConfig,
        *,
        horizon: int,
        num_envs: int,
        max_iterations: int,
        generator: torch.Generator,
    ) -> None:
        self.policy = policy
        self.cfg = cfg
        self.generator = generator
        self.sequence_length = fit_sequence_length(horizon, cfg.sequence_length) if policy.recurrent else 1
        self.num_units = horizon * num_envs // self.sequence_length
        self.num_minibatches = fit_minibatches(self.num_units, horizon * num_envs / cfg.minibatch_size)
        device = next(policy.parameters()).device
        self.device = device
        self._parameters = list(policy.parameters())
        samples = chunk_samples(horizon * num_envs // self.num_minibatches)
        self._chunks = Chunks(device, samples // self.sequence_length, threads=not cfg.compile)
        self.max_iterations = max_iterations
        self.iteration = torch.zeros((), dtype=torch.float32, device=device)
        self.learning_rate = torch.tensor(cfg.learning_rate, dtype=torch.float32, device=device)
        # fused: one kernel per step; its count and rate are device tensors, which a CUDA graph needs (capturable)
        self.optimizer = torch.optim.Adam(
            self._parameters,
            lr=cfg.learning_rate,
            eps=1e-5,
            fused=device.type in ("cpu", "cuda"),
            capturable=device.type == "cuda",
        )
        self.optimizer.param_groups[0]["lr"] = self.learning_rate
        self._loss = torch.compile(self._eager_loss) if cfg.compile else self._eager_loss

    def update(self, rollout: Rollout, last_obs: Mapping[str, Tensor], last_hidden: Hidden) -> dict[str, Tensor]:
        """One iteration of learning.

        Args:
            rollout: T steps of N envs.
            last_obs: Observation after the last step.
            last_hidden: Recurrent state to act on it.

        Returns:
            Statistics as 0-dim device tensors, means over the minibatches.
        """
        cfg = self.cfg
        if cfg.schedule == "linear":
            self.learning_rate.copy_(cfg.learning_rate * (1.0 - self.iteration / self.max_iterations).clamp(min=0.0))
        batch, stats = self._prepare(rollout, last_obs, last_hidden)
        totals: Tensor | None = None
        size = self.num_units // self.num_minibatches
        for epoch in range(cfg.epochs):
            order = torch.randperm(self.num_units, generator=self.generator, device=self.device)
            epoch_kl = torch.zeros_like(self.learning_rate)
            for index in order.split(size):
                # The first minibatch compares the policy with itself: a KL of rounding errors, which says nothing.
                adapt = cfg.schedule_per == "minibatch" and totals is not None
                losses, kl = self._step(batch, index, adapt=adapt)
                totals = losses if totals is None else totals + losses
                epoch_kl += kl / self.num_minibatches
            if cfg.schedule_per == "epoch" and (epoch > 0 or self.num_minibatches > 1):
                self._adapt(epoch_kl)
        assert totals is not None
        self.iteration += 1
        for group, norm in self.policy.obs_norm.items():
            norm.update(rollout.obs[group].flatten(0, 1), rollout.valid.flatten())  # type: ignore[operator]
        means = totals / (cfg.epochs * self.num_minibatches)
        stats |= dict(zip(_LOSS_NAMES, means.unbind(), strict=True))
        stats["policy/learning_rate"] = self.learning_rate.clone()
        stats["policy/std"] = rollout.log_std.exp().mean()
        return stats

    def _step(self, batch: Batch, index: Tensor, *, adapt: bool) -> tuple[Tensor, Tensor]:
        """One step of the optimiser on a minibatch, whose gradient is the sum over its chunks."""
        count = batch.columns[..., -1].index_select(1, index).sum().clamp(min=1.0)

        def gradient(part: Tensor) -> tuple[Tensor, ...]:
            chunk = batch.select(part)
            loss, losses = self._loss(chunk.inputs, chunk.columns, chunk.hidden, chunk.is_first, count)
            return losses, *torch.autograd.grad(loss, self._parameters)

        losses, *gradients = self._chunks.sum(gradient, index)
        for parameter, grad in zip(self._parameters, gradients, strict=True):
            parameter.grad = grad.contiguous()  # as the optimiser expects; it is, but for odd layers
        kl = losses[_LOSS_NAMES.index("policy/kl")]
        cfg = self.cfg
        limit = cfg.max_grad_norm if cfg.max_grad_norm is not None else torch.inf
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, limit, error_if_nonfinite=False)
        if adapt:
            self._adapt(kl)
        self.optimizer.step()
        self.policy.clamp_log_std()
        return torch.cat([losses, norm.detach()[None]]), kl

    def _adapt(self, kl: Tensor) -> None:
        cfg = self.cfg
        if cfg.schedule != "adaptive":
            return
        adapt_learning_rate(self.learning_rate, kl, cfg.kl_threshold, cfg.learning_rate_min, cfg.learning_rate_max)

    def _eager_loss(
        self, inputs: dict[str, Tensor], columns: Tensor, hidden: Hidden, is_first: Tensor | None, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Loss of a chunk, and the statistics of `_LOSS_NAMES` but the gradient norm; each a sum / `count`."""
        cfg, actions = self.cfg, self.policy.num_actions
        action, old_mean, old_log_std, scalars = columns.split([actions, actions, actions, 5], dim=-1)
        old_log_prob, old_value, advantage, target, valid = scalars.unbind(-1)

        def mean(x: Tensor) -> Tensor:
            return (x * valid).sum() / count

        now = self.policy.evaluate(inputs, action, hidden, is_first)
        log_ratio = now.log_prob - old_log_prob
        ratio = torch.exp(log_ratio)
        clipped = ratio.clamp(1.0 - cfg.clip, 1.0 + cfg.clip)
        policy_loss = mean(-torch.minimum(advantage * ratio, advantage * clipped))

        error = (now.value - target).square()
        if cfg.value_clip:
            near = old_value + (now.value - old_value).clamp(-cfg.clip, cfg.clip)
            error = torch.maximum(error, (near - target).square())
        value_loss = mean(error)
        entropy = mean(now.entropy)
        bounds_loss = mean((now.mean.abs() - SOFT_BOUND).clamp(min=0.0).square().sum(dim=-1))
        loss = policy_loss + 0.5 * cfg.value_coef * value_loss
        loss = loss + cfg.bounds_coef * bounds_loss - cfg.entropy_coef * entropy
        with torch.no_grad():
            kl = mean(gaussian_kl(old_mean, old_log_std, now.mean, now.log_std))
            clip_fraction = mean(((ratio - 1.0).abs() > cfg.clip).float())
            losses = torch.stack([policy_loss, value_loss, bounds_loss, entropy, kl, clip_fraction])
        return loss, losses

    @torch.no_grad()
    def _prepare(
        self, rollout: Rollout, last_obs: Mapping[str, Tensor], last_hidden: Hidden
    ) -> tuple[Batch, dict[str, Tensor]]:
        """Advantages and targets, and everything arranged by sequences."""
        policy, cfg = self.policy, self.cfg
        final_values = []
        for slot in range(rollout.final_step.shape[0]):
            final_obs = {group: value[slot] for group, value in rollout.final_obs.items()}
            final_values.append(policy.value(final_obs, tuple(h[slot] for h in rollout.final_hidden)))
        next_value = rollout.next_values(policy.value(last_obs, last_hidden), torch.stack(final_values))
        value, next_value = policy.denormalize_value(rollout.value), policy.denormalize_value(next_value)
        advantage, returns = gae(
            rollout.reward * cfg.reward_scale,
            value,
            next_value,
            rollout.terminated,
            rollout.done,
            rollout.valid,
            cfg.gamma,
            cfg.gae_lambda,
        )
        policy.update_value_norm(returns.flatten(), rollout.valid.flatten())
        valid = rollout.valid.float()
        count = valid.sum().clamp(min=1.0)

        def moments(x: Tensor) -> tuple[Tensor, Tensor]:
            mean = (x * valid).sum() / count
            return mean, ((x - mean).square() * valid).sum() / count

        _, unexplained = moments(advantage)
        _, spread = moments(returns)
        stats = {
            "value/explained_variance": 1.0 - unexplained / spread.clamp(min=1e-12),
            "value/mean_return": (returns * valid).sum() / count,
            # finite sums of finite numbers: a flag that costs one reduction and no read
            "check/obs": torch.stack([value.sum() for value in rollout.obs.values()]).sum(),
            "check/reward": rollout.reward.sum(),
        }
        if cfg.normalize_advantage:
            mean, variance = moments(advantage)
            advantage = (advantage - mean) / (variance.sqrt() + 1e-8)

        inputs = policy.normalize(rollout.obs)
        if policy.bf16 and not policy.recurrent:
            # the first layer rounds its input to bf16 anyway; doing it once halves what every epoch gathers
            inputs = {group: value.bfloat16() for group, value in inputs.items()}
        old_value, target = policy.normalize_value(value), policy.normalize_value(returns)
        columns = torch.cat(
            [
                rollout.action,
                rollout.mean,
                rollout.log_std,
                torch.stack([rollout.log_prob, old_value, advantage, target, valid], dim=-1),
            ],
            dim=-1,
        )
        batch = Batch(
            {group: self._by_sequence(value) for group, value in inputs.items()},
            self._by_sequence(columns),
            tuple(h.transpose(0, 1).flatten(1, 2) for h in rollout.hidden),
            self._by_sequence(rollout.is_first) if policy.recurrent else None,
        )
        return batch, stats

    def _by_sequence(self, x: Shaped[Tensor, "time envs ..."]) -> Tensor:
        """[T, N, ...] -> [L, T / L * N, ...]: consecutive steps of one env stay together."""
        return x.unflatten(0, (-1, self.sequence_length)).transpose(0, 1).flatten(1, 2)

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, learning rate and iteration."""
        return {
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),  # a snapshot, as the rest
            "learning_rate": self.learning_rate.clone(),
            "iteration": self.iteration.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.learning_rate.copy_(state["learning_rate"])
        self.iteration.copy_(state["iteration"])
        # Loading replaced the tensor that the schedule writes to, and took over what the device of then could do.
        here = {"fused": self.device.type in ("cpu", "cuda"), "capturable": self.device.type == "cuda"}
        self.optimizer.param_groups[0].update(here, lr=self.learning_rate)


_LOSS_NAMES = (
    "loss/policy",
    "loss/value",
    "loss/bounds",
    "policy/entropy",
    "policy/kl",
    "policy/clip_fraction",
    "policy/grad_norm",
)
