"""Image policy: a frozen encoder in front of a policy on features."""

from __future__ import annotations

import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import Hidden, Observation, Policy
from gpusim_rl.learn.encoders import scaled
from gpusim_rl.learn.pretrained import Pretrained


class EncodedPolicy(Policy):
    """`EncodedEnv` as part of a policy: features of the newest frames are appended to the numeric observation.

    The recurrent state begins with features of older frames, float32 [frames - 1, batch, features], newest last.
    """

    def __init__(self, policy: Policy, encoder: Pretrained, frames: int) -> None:
        super().__init__()
        self.policy, self.encoder, self.older = policy, encoder, frames - 1
        self.obs_norm = getattr(policy, "obs_norm", {})

    def act(self, obs: Observation, hidden: Hidden, deterministic: bool = True) -> tuple[Tensor, Hidden]:
        """Return actions for numeric observations and images, and the next recurrent state."""
        seen, older = self._encoded(obs, hidden)
        action, state = self.policy.act(seen, hidden[len(older) :], deterministic)
        return action, older + state

    def act_without_critic(self, obs: Observation, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Return the most likely actions, and the next `actor_state`."""
        seen, older = self._encoded(obs, hidden)
        action, state = self.policy.act_without_critic(seen, hidden[len(older) :])
        return action, older + state

    def initial_state(self, batch: int) -> Hidden:
        """Return the initial recurrent state (all zeros)."""
        return self._begin(batch) + self.policy.initial_state(batch)

    def actor_state(self, batch: int) -> Hidden:
        """Return the actor's zero-initialised recurrent state."""
        return self._begin(batch) + self.policy.actor_state(batch)

    def _begin(self, batch: int) -> Hidden:
        return (torch.zeros(self.older, batch, self.encoder.out_size),) if self.older else ()

    def _encoded(self, obs: Observation, hidden: Hidden) -> tuple[Observation, Hidden]:
        # Not the encoder's `forward`, which splits batches: exporters need a dynamic batch size.
        networks = self.encoder.networks.items()
        newest = torch.cat([network(scaled(obs[group], torch.float32)) for group, network in networks], dim=1)
        every = torch.cat([*hidden[: 1 if self.older else 0], newest[None]])
        numbers = torch.cat([obs["policy"], every.transpose(0, 1).flatten(1)], dim=1)
        return {**obs, "policy": numbers}, (every[1:],) if self.older else ()
