"""Actor, critic ensemble and target networks of off-policy algorithms."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from gpusim_rl.learn.algorithm import EnvSpec, Hidden, Observation, Policy
from gpusim_rl.learn.encoders import Encoder, FrameStack
from gpusim_rl.learn.ensemble import SLOPES, EnsembleLinear, EnsembleNorm, shared_features
from gpusim_rl.learn.networks import ACTIVATIONS, make_features
from gpusim_rl.learn.normalize import RunningNormalizer
from gpusim_rl.settings.schema import ActorCriticConfig, DQNNetworkConfig, OffPolicyConfig, QNetworkConfig


class _OwnFeatures(nn.ModuleList):
    def forward(self, x: Float[Tensor, "members batch size"]) -> Float[Tensor, "members batch out"]:
        return torch.stack([network(inputs) for network, inputs in zip(self, x, strict=True)])


class Critic(nn.Module):
    """Ensemble of Q functions of normalised observations and actions; each returns `options` values.

    With `atoms`, outputs are logits of a return distribution (C51: Bellemare et al. 2017, arXiv 1707.06887).
    """

    support: Tensor | None
    """Equally spaced returns, [atoms]."""

    def __init__(
        self, size: int, num_actions: int, net: QNetworkConfig | DQNNetworkConfig, key: str, *, options: int = 1
    ) -> None:
        super().__init__()
        members, size = net.critics, size + num_actions
        if net._target_ is not None:
            settings = dataclasses.replace(net, hidden=net.critic_hidden)
            networks = [make_features(size, settings, key) for _ in range(members)]
            self.features: nn.Module = _OwnFeatures(networks)
            size = networks[0].out_size  # type: ignore[assignment]
        else:
            layers: list[nn.Module] = []
            for width in net.critic_hidden:
                norm = [EnsembleNorm(members, width)] if net.layer_norm else []
                layers += [EnsembleLinear(members, size, width), *norm, ACTIVATIONS[net.activation]()]
                size = width
            self.features = nn.Sequential(*layers)
        self.head = EnsembleLinear(members, size, options * (net.atoms or 1))  # type: ignore[arg-type]
        self.members = members
        support = None if net.atoms is None else torch.linspace(net.value_min, net.value_max, net.atoms)
        self.register_buffer("support", support, persistent=False)

    def forward(
        self,
        obs: Float[Tensor, "batch size"],
        action: Float[Tensor, "batch actions"],
        *,
        reduced: torch.dtype | None,
        learns: bool = True,
    ) -> Float[Tensor, "members batch outputs"]:
        """Return Q values [..., 1] or logits of the atoms; without `learns`, the weights get no gradient."""
        return self.head(
            self._features(torch.cat([obs, action], dim=-1), reduced=reduced, learns=learns), learns=learns
        )

    def _features(
        self, x: Tensor, *, reduced: torch.dtype | None, learns: bool = True
    ) -> Float[Tensor, "members batch out"]:
        if reduced and self.shares_kernels():
            weights = [w if learns else w.detach() for w in self.features.parameters()]
            return shared_features([*self.features.children()], reduced, x[None], weights)[0]
        with torch.autocast(x.device.type, dtype=reduced) if reduced else nullcontext():
            features = self.features(x.expand(self.members, -1, -1))
        return features.float()

    def with_target(
        self, target: Critic, inputs: Sequence[Tensor], following: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return outputs for `inputs`, observations and actions, and the target critics' outputs for `following`."""
        x = torch.stack([torch.cat([*pair], dim=-1) for pair in (inputs, following)])
        weights = *self.features.parameters(), *target.features.parameters()
        features, after = shared_features([*self.features.children()], dtype, x, weights)
        return self.head(features), target.head(after)

    def shares_kernels(self) -> bool:
        """Return whether 16-bit features use `shared_features`, on CUDA."""
        known = all(type(layer) in (EnsembleLinear, EnsembleNorm, *SLOPES) for layer in self.features.children())
        return known and self.head.weight.device.type == "cuda"

    def value(self, outputs: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "*batch"]:
        """Convert outputs to expected returns."""
        if self.support is None:
            return outputs.squeeze(-1)
        return outputs.softmax(dim=-1) @ self.support


class DiscreteCritic(Critic):
    """Ensemble of Q functions for discrete actions; each returns the values of all options.

    Q values (or logits) of several choices are averaged over the chosen options (Seyde et al. 2023, arXiv 2210.12566).
    """

    offsets: Tensor
    """Index of each choice's first option."""
    places: Tensor
    """Indices of each choice's options, padded with its last option, [choices * maximum options]."""
    centre: Tensor
    """Matrix that subtracts each choice's mean, [options, options]."""

    def __init__(self, size: int, counts: Sequence[int], net: DQNNetworkConfig, key: str) -> None:
        super().__init__(size, 0, net, key, options=sum(counts))
        self.counts = tuple(counts)
        width, self.num_outputs = self.head.weight.shape[1], net.atoms or 1
        self.state_head = EnsembleLinear(self.members, width, self.num_outputs) if net.dueling else None
        count = torch.tensor(counts)
        offsets = count.cumsum(0) - count
        beyond = torch.minimum(torch.arange(max(counts)), count[:, None] - 1)
        same = torch.block_diag(*(torch.full((n, n), 1.0 / n) for n in counts))
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("places", (offsets[:, None] + beyond).flatten(), persistent=False)
        self.register_buffer("centre", torch.eye(sum(counts)) - same, persistent=False)

    def options(self, obs: Tensor, *, reduced: torch.dtype | None) -> Float[Tensor, "members batch outputs options"]:
        """Return Q values or logits of all options, concatenated over choices."""
        features = self._features(obs, reduced=reduced)
        outputs = self.head(features).unflatten(-1, (self.num_outputs, -1))
        if self.state_head is None:
            return outputs
        # dueling (Wang et al. 2016, arXiv 1511.06581)
        return self.state_head(features).unsqueeze(-1) + outputs @ self.centre

    def forward(  # type: ignore[reportIncompatibleMethodOverride]
        self, obs: Float[Tensor, "batch size"], action: Shaped[Tensor, "batch choices"], *, reduced: torch.dtype | None
    ) -> Float[Tensor, "members batch outputs"]:
        """Return Q values [..., 1] or logits of the chosen options."""
        return self.chosen(self.options(obs, reduced=reduced), action)

    def chosen(
        self, outputs: Float[Tensor, "members batch outputs options"], action: Shaped[Tensor, "batch choices"]
    ) -> Float[Tensor, "members batch outputs"]:
        """Select the chosen options' outputs, averaged over choices."""
        index, single = action.long(), len(self.counts) == 1
        index = (index if single else index + self.offsets).view(1, len(index), 1, -1).expand(*outputs.shape[:3], -1)
        per_choice = outputs.gather(3, index)
        return per_choice.squeeze(3) if single else per_choice.mean(dim=3)

    def best(self, outputs: Float[Tensor, "members batch outputs options"]) -> Int[Tensor, "batch choices"]:
        """Return each choice's option with the highest mean value over critics; `outputs` comes from `options`."""
        value = outputs.squeeze(2) if self.support is None else self.value(outputs.mT)
        value = value[0] if self.members == 1 else value.mean(dim=0)
        if len(self.counts) == 1:
            return value.argmax(dim=1, keepdim=True)
        # ties go to the first, so padding is never chosen
        return value.index_select(1, self.places).unflatten(1, (len(self.counts), -1)).argmax(dim=2)


def project(
    probabilities: Float[Tensor, "batch atoms"], returns: Float[Tensor, "batch atoms"], support: Float[Tensor, " atoms"]
) -> Float[Tensor, "batch atoms"]:
    """Project a return distribution onto the support (Bellemare et al. 2017, arXiv 1707.06887, algorithm 1)."""
    atoms = len(support)
    low, high = support[0], support[-1]
    place = (returns.clamp(low, high) - low) * ((atoms - 1) / (high - low))
    lower = place.floor().clamp_(max=atoms - 2)  # the last atom is always the upper one
    upper_share = (place - lower).clamp_(max=1.0) * probabilities
    index = lower.nan_to_num(0.0).long()  # NaN stays in the probabilities, so the update is skipped
    moved = torch.zeros_like(probabilities).scatter_add_(1, index, probabilities - upper_share)
    return moved.scatter_add_(1, index + 1, upper_share)


class ActorNetwork(nn.Module):
    """Network that maps normalised observations to action parameters."""

    def __init__(self, size: int, outputs: int, net: QNetworkConfig, key: str) -> None:
        super().__init__()
        self.features = make_features(size, net, key)
        self.head = nn.Linear(self.features.out_size, outputs)  # type: ignore[arg-type]
        with torch.no_grad():  # initial actions near 0
            self.head.weight.mul_(0.01)
            self.head.bias.zero_()

    def forward(self, obs: Tensor, *, reduced: torch.dtype | None) -> Float[Tensor, "batch outputs"]:
        """Return float32 outputs."""
        with torch.autocast(obs.device.type, dtype=reduced) if reduced else nullcontext():
            features = self.features(obs)
        return self.head(features.float())


def encoder_for(cfg: OffPolicyConfig, env: EnvSpec, section: str) -> tuple[Encoder | None, int]:
    """Return the image encoder, or None, and the actor's input size."""
    size = env.obs_sizes["policy"]
    if not env.images:
        return None, size
    net = cfg.network.encoder
    encoder = Encoder(FrameStack(env.images, net.frames).shapes, net, f"{section}.network")
    return encoder, size + encoder.out_size


def actor_and_critic(
    cfg: ActorCriticConfig, env: EnvSpec, outputs: int, section: str
) -> tuple[Encoder | None, ActorNetwork, Critic]:
    """Build encoder, actor and critic for continuous actions."""
    (encoder, size), key = encoder_for(cfg, env, section), f"{section}.network"
    actor = ActorNetwork(size, outputs, cfg.network, key)
    return encoder, actor, Critic(env.obs_sizes.get("critic", size), env.action_space.size, cfg.network, key)


class QPolicy(Policy):
    """Critics with target networks, normalisers, and an actor unless the critics choose actions.

    The `policy` group feeds the actor; the `critic` group, if present, feeds the critics (Pinto et al. 2017, arXiv
    1710.06542). Image features are appended to `policy`. Critics that see images train the encoder and share it with
    the target critics (DrQ-v2: Yarats et al. 2021, arXiv 2107.09645); otherwise the actor trains it.
    """

    actor: ActorNetwork | None
    critic: Critic
    target_critic: Critic
    target_actor: ActorNetwork | None

    def __init__(
        self,
        cfg: OffPolicyConfig,
        env: EnvSpec,
        encoder: Encoder | None,
        actor: ActorNetwork | None,
        critic: Critic,
        *,
        target_actor: bool = False,
    ) -> None:
        super().__init__()
        obs_sizes = env.obs_sizes
        self.critic_group = "critic" if "critic" in obs_sizes else "policy"
        self.critic_sees_images = bool(env.images) and self.critic_group == "policy"
        self.groups = sorted({"policy", self.critic_group})
        normalized = self.groups if cfg.normalize_obs else []
        self.obs_norm = nn.ModuleDict({g: RunningNormalizer(obs_sizes[g], clip=cfg.clip_obs) for g in normalized})
        self.groups = [*self.groups, *sorted(env.images)]
        self.images, self.encoder = FrameStack(env.images, cfg.network.encoder.frames), encoder
        self.actor = actor
        self.critic = critic
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.target_actor = copy.deepcopy(actor).requires_grad_(False) if actor is not None and target_actor else None

    def normalize(self, obs: Observation) -> dict[str, Tensor]:
        """Normalise observations by group, if configured."""
        return {g: self.obs_norm[g](obs[g]) if g in self.obs_norm else obs[g] for g in self.groups}

    def initial_state(self, batch: int) -> Hidden:
        """Return the initial state: black frames."""
        return self.images.initial_state(batch, self.critic.head.weight.device)

    def outputs(self, obs: Observation, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Return the acting network's outputs for raw observations, and the next state."""
        seen = obs["policy"]
        seen = self.obs_norm["policy"](seen) if self.obs_norm else seen
        if self.encoder is not None:
            images, hidden = self.images({g: obs[g][None] for g in self.encoder.groups}, hidden, None)
            seen = torch.cat([seen, self.encoder(images, reduced=self.reduced)[0]], dim=-1)
        return self._choosing(seen), hidden

    def action(self, outputs: Tensor) -> Tensor:
        """Convert network outputs to actions."""
        raise NotImplementedError

    @torch.no_grad()
    def act(self, obs: Observation, hidden: Hidden, deterministic: bool = True) -> tuple[Tensor, Hidden]:
        """Return noise-free actions for raw observations [batch, size]."""
        outputs, hidden = self.outputs(obs, hidden)
        return self.action(outputs), hidden

    def _choosing(self, seen: Float[Tensor, "batch size"]) -> Tensor:
        assert self.actor is not None
        return self.actor(seen, reduced=self.mlp_reduced)

    def target_pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return target parameters and the parameters they track."""
        targets: list[Tensor] = [*self.target_critic.parameters()]
        online: list[Tensor] = [*self.critic.parameters()]
        if self.target_actor is not None and self.actor is not None:
            targets, online = [*targets, *self.target_actor.parameters()], [*online, *self.actor.parameters()]
        return targets, online
