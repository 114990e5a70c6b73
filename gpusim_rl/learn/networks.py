"""Actor and critic: networks, the Gaussian policy, and the normalisers that belong to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gpusim_rl.config import PPOConfig
from gpusim_rl.learn.normalize import RunningNormalizer

# In place where the gradient can be had from the output alone: less memory traffic.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": partial(nn.ELU, inplace=True),
    "relu": partial(nn.ReLU, inplace=True),
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "selu": partial(nn.SELU, inplace=True),
}

Hidden = tuple[Tensor, ...]
"""Recurrent state, [layers, batch, size] each; empty for feed-forward policies."""

_LOG_2PI = math.log(2.0 * math.pi)


@dataclass(slots=True)
class Sample:
    """What acting gave, for a batch of envs."""

    action: Float[Tensor, "batch actions"]
    """Not clipped: the log-probability is of this number."""
    log_prob: Float[Tensor, " batch"]
    mean: Float[Tensor, "batch actions"]
    log_std: Float[Tensor, "batch actions"]
    value: Float[Tensor, " batch"]
    """As the network gives it: normalised, if values are normalised."""
    hidden: Hidden


@dataclass(slots=True)
class Evaluation:
    """What the current policy says of stored actions; the leading dimensions are those of the observations."""

    log_prob: Float[Tensor, "*batch"]
    entropy: Float[Tensor, "*batch"]
    mean: Float[Tensor, "*batch actions"]
    log_std: Float[Tensor, "*batch actions"]
    value: Float[Tensor, "*batch"]


def gaussian_log_prob(action: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of a diagonal Gaussian, summed over the last dimension; `log_std` may be the same for the batch."""
    z = (action - mean) * torch.exp(-log_std)
    return -0.5 * (z.square().sum(dim=-1) + (2.0 * log_std + _LOG_2PI).sum(dim=-1))


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Entropy of a diagonal Gaussian [nat], summed over the last dimension."""
    return (log_std + 0.5 * (1.0 + _LOG_2PI)).sum(dim=-1)


def gaussian_kl(mean_p: Tensor, log_std_p: Tensor, mean_q: Tensor, log_std_q: Tensor) -> Tensor:
    """KL(p || q) of diagonal Gaussians [nat], summed over the last dimension."""
    # exp(2 dlog) - 1 - 2 dlog by expm1: exactly 0 where the two are equal
    log_ratio = log_std_p - log_std_q
    distance = ((mean_p - mean_q) * torch.exp(-log_std_q)).square()
    return 0.5 * (torch.expm1(2.0 * log_ratio) - 2.0 * log_ratio + distance).sum(dim=-1)


class Trunk(nn.Module):
    """Features of an observation: an optional LSTM or GRU, then an MLP."""

    def __init__(self, size: int, cfg: PPOConfig) -> None:
        super().__init__()
        net = cfg.network
        self.rnn: nn.LSTM | nn.GRU | None = None
        if net.rnn is not None:
            kind = nn.LSTM if net.rnn == "lstm" else nn.GRU
            self.rnn = kind(size, net.rnn_size, net.rnn_layers)
            size = net.rnn_size
        layers: list[nn.Module] = []
        for width in net.hidden:
            layers += [nn.Linear(size, width), ACTIVATIONS[net.activation]()]
            size = width
        self.mlp = nn.Sequential(*layers)
        self.out_size = size

    @property
    def num_states(self) -> int:
        """Tensors in this trunk's recurrent state."""
        return 0 if self.rnn is None else 2 if isinstance(self.rnn, nn.LSTM) else 1

    def initial_state(self, batch: int) -> Hidden:
        """Zero state."""
        if self.rnn is None:
            return ()
        device = next(self.rnn.parameters()).device
        shape = (self.rnn.num_layers, batch, self.rnn.hidden_size)
        return tuple(torch.zeros(shape, device=device) for _ in range(self.num_states))

    def forward(
        self,
        x: Float[Tensor, "time batch size"],
        hidden: Hidden,
        is_first: Bool[Tensor, "time batch"] | None,
        *,
        bf16: bool,
    ) -> tuple[Float[Tensor, "time batch out"], Hidden]:
        """Runs a sequence; where `is_first`, an episode begins at that step and the state is zero before it.

        The recurrent layer is float32 always: its state carries rounding on, and many CPUs have no such layer in bf16.
        """
        autocast = torch.autocast(x.device.type, dtype=torch.bfloat16) if bf16 else nullcontext()
        if self.rnn is None:
            with autocast:
                return self._features(x), ()
        outputs = []
        for t in range(x.shape[0]):
            if is_first is not None:
                keep = (~is_first[t])[None, :, None]
                hidden = tuple(h * keep for h in hidden)
            state = hidden if isinstance(self.rnn, nn.LSTM) else hidden[0]
            output, state = self.rnn(x[t : t + 1], state)
            hidden = state if isinstance(state, tuple) else (state,)
            outputs.append(output)
        with autocast:
            return self._features(torch.cat(outputs)), hidden

    def _features(self, x: Float[Tensor, "time batch size"]) -> Float[Tensor, "time batch out"]:
        # One batch dimension: a layer would return a view for two, and in-place activations of views copy gradients.
        return self.mlp(x.flatten(0, 1)).float().unflatten(0, x.shape[:2])


class ActorCritic(nn.Module):
    """A Gaussian policy and a value function, with shared or separate trunks.

    Observations come in groups: `policy` for the actor and, if present, `critic` for the critic, which then has its own
    trunk (asymmetric actor-critic, Pinto et al. 2017, arXiv 1710.06542). Heads, log-probabilities and statistics are
    float32; only the trunks' MLPs run under autocast.

    Args:
        obs_sizes: Size of each observation group.
        num_actions: Size of the action vector.
        cfg: Network, normalisation and precision.
        bf16: Run the trunks in bfloat16.
    """

    def __init__(self, obs_sizes: Mapping[str, int], num_actions: int, cfg: PPOConfig, *, bf16: bool = False) -> None:
        super().__init__()
        net = cfg.network
        self.bf16 = bf16
        self.num_actions = num_actions
        self.critic_group = "critic" if "critic" in obs_sizes else "policy"
        self.separate = net.separate or self.critic_group == "critic"
        groups = {"policy", self.critic_group}
        normalized = sorted(groups) if cfg.normalize_obs else []
        self.obs_norm = nn.ModuleDict({g: RunningNormalizer(obs_sizes[g], clip=cfg.clip_obs) for g in normalized})
        self.value_norm = RunningNormalizer(1) if cfg.normalize_value else None

        self.actor = Trunk(obs_sizes["policy"], cfg)
        self.critic = Trunk(obs_sizes[self.critic_group], cfg) if self.separate else None
        self.mean_head = nn.Linear(self.actor.out_size, num_actions)
        self.value_head = nn.Linear((self.critic or self.actor).out_size, 1)
        self.log_std_range = (net.log_std_min, net.log_std_max)
        self.log_std_head: nn.Linear | None = None
        self.log_std: nn.Parameter | None = None
        if net.state_dependent_std:
            self.log_std_head = nn.Linear(self.actor.out_size, num_actions)
            nn.init.zeros_(self.log_std_head.weight)
            nn.init.constant_(self.log_std_head.bias, net.log_std_init)
        else:
            self.log_std = nn.Parameter(torch.full((num_actions,), float(net.log_std_init)))
        # A small last layer starts the policy near zero everywhere (Andrychowicz et al. 2021, arXiv 2006.05990).
        with torch.no_grad():
            self.mean_head.weight.mul_(0.01)
            self.mean_head.bias.zero_()

    @property
    def recurrent(self) -> bool:
        """Whether the policy has a recurrent state."""
        return self.actor.rnn is not None

    def initial_state(self, batch: int) -> Hidden:
        """Zero recurrent state: the actor's tensors, then those of a separate critic."""
        return self.actor.initial_state(batch) + (self.critic.initial_state(batch) if self.critic else ())

    def normalize(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Network inputs of the groups in use, normalised if configured."""
        groups = ("policy",) if self.critic_group == "policy" else ("policy", "critic")
        return {g: self.obs_norm[g](obs[g]) if g in self.obs_norm else obs[g] for g in groups}

    def forward(
        self, inputs: Mapping[str, Tensor], hidden: Hidden = (), is_first: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Hidden]:
        """Mean, log-std and value of normalised inputs [time, batch, size]; value has no trailing dimension.

        A log-std that does not depend on the state is one row, [actions].
        """
        split = self.actor.num_states
        features, actor_state = self.actor(inputs["policy"], hidden[:split], is_first, bf16=self.bf16)
        critic_state: Hidden = ()
        critic_features = features
        if self.critic is not None:
            inputs_of_critic = inputs[self.critic_group]
            critic_features, critic_state = self.critic(inputs_of_critic, hidden[split:], is_first, bf16=self.bf16)
        mean = self.mean_head(features)
        log_std = self.log_std_head(features) if self.log_std_head is not None else self.log_std
        assert log_std is not None
        value = self.value_head(critic_features).squeeze(-1)
        return mean, log_std.clamp(*self.log_std_range), value, actor_state + critic_state

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], hidden: Hidden, noise: Float[Tensor, "batch actions"]) -> Sample:
        """Samples actions for raw observations [batch, size].

        Args:
            obs: Observation groups.
            hidden: Recurrent state; zero where an episode begins.
            noise: Standard normal numbers; zeros give the deterministic action.
        """
        inputs = {group: value[None] for group, value in self.normalize(obs).items()}
        mean, log_std, value, hidden = self(inputs, hidden)
        mean, log_std, value = mean[0], log_std.expand_as(mean)[0], value[0]
        action = mean + torch.exp(log_std) * noise
        return Sample(action, gaussian_log_prob(action, mean, log_std), mean, log_std, value, hidden)

    @torch.no_grad()
    def value(self, obs: Mapping[str, Tensor], hidden: Hidden) -> Float[Tensor, " batch"]:
        """Value of raw observations, as the network gives it."""
        inputs = {group: value[None] for group, value in self.normalize(obs).items()}
        return self(inputs, hidden)[2][0]

    def evaluate(
        self,
        inputs: Mapping[str, Tensor],
        action: Float[Tensor, "time batch actions"],
        hidden: Hidden = (),
        is_first: Bool[Tensor, "time batch"] | None = None,
    ) -> Evaluation:
        """What the current policy says of stored actions, for normalised inputs [time, batch, size]."""
        mean, log_std, value, _ = self(inputs, hidden, is_first)
        log_prob, entropy = gaussian_log_prob(action, mean, log_std), gaussian_entropy(log_std)
        return Evaluation(log_prob, entropy.expand_as(log_prob), mean, log_std.expand_as(mean), value)

    @torch.no_grad()
    def clamp_log_std(self) -> None:
        """Puts the log-std parameter back into its range, where it has a gradient, after an optimiser's step."""
        if self.log_std is not None:
            self.log_std.clamp_(*self.log_std_range)

    def denormalize_value(self, value: Tensor) -> Tensor:
        """Network value to the scale of returns."""
        return value if self.value_norm is None else self.value_norm.inverse(value[..., None])[..., 0]

    def normalize_value(self, value: Tensor) -> Tensor:
        """Return to the scale of network values."""
        return value if self.value_norm is None else self.value_norm(value[..., None])[..., 0]

    @torch.no_grad()
    def update_value_norm(self, returns: Float[Tensor, " batch"], where: Bool[Tensor, " batch"]) -> None:
        """Merges returns into the value statistics, and rescales the value head so that no prediction changes.

        This is PopArt's output preservation (van Hasselt et al. 2016, arXiv 1602.07714, section 2.2): without it every
        change of the statistics would shift the critic's predictions.
        """
        if self.value_norm is None:
            return
        old_mean, old_scale = self.value_norm.mean.float(), self.value_norm.scale()
        self.value_norm.update(returns[:, None], where)
        mean, scale = self.value_norm.mean.float(), self.value_norm.scale()
        self.value_head.weight.mul_((old_scale / scale)[:, None])
        self.value_head.bias.copy_((old_scale * self.value_head.bias + old_mean - mean) / scale)
