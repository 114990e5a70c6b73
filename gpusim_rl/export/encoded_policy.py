"""A policy of features, and the frozen encoder that makes them, as one policy of images."""

from __future__ import annotations

import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import Hidden, Observation, Policy
from gpusim_rl.learn.encoders import scaled
from gpusim_rl.learn.pretrained import Pretrained


class EncodedPolicy(Policy):
    """Does what `EncodedEnv` does around a policy: features of the newest frames come behind its numbers.

    Features of older frames are the first part of its recurrent state, float32 [frames - 1, batch, features], the
    newest one last. They are zero where an episode begins.
    """

    def __init__(self, policy: Policy, encoder: Pretrained, frames: int) -> None:
        super().__init__()
        self.policy, self.encoder, self.older = policy, encoder, frames - 1
        self.obs_norm = getattr(policy, "obs_norm", {})

    def act(self, obs: Observation, hidden: Hidden, deterministic: bool = True) -> tuple[Tensor, Hidden]:
        """Returns actions for numbers and images, and the next recurrent state."""
        seen, older = self._encoded(obs, hidden)
        action, state = self.policy.act(seen, hidden[len(older) :], deterministic)
        return action, older + state

    def act_without_critic(self, obs: Observation, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Returns the most likely actions, and the next `actor_state`."""
        seen, older = self._encoded(obs, hidden)
        action, state = self.policy.act_without_critic(seen, hidden[len(older) :])
        return action, older + state

    def initial_state(self, batch: int) -> Hidden:
        """Returns the state at the start of an episode: zeros."""
        return self._begin(batch) + self.policy.initial_state(batch)

    def actor_state(self, batch: int) -> Hidden:
        """Returns the part of it that actions depend on."""
        return self._begin(batch) + self.policy.actor_state(batch)

    def _begin(self, batch: int) -> Hidden:
        return (torch.zeros(self.older, batch, self.encoder.out_size),) if self.older else ()

    def _encoded(self, obs: Observation, hidden: Hidden) -> tuple[Observation, Hidden]:
        # Not by the encoder's `forward`, which splits a batch: exporters take one of any size.
        networks = self.encoder.networks.items()
        newest = torch.cat([network(scaled(obs[group], torch.float32)) for group, network in networks], dim=1)
        every = torch.cat([*hidden[: 1 if self.older else 0], newest[None]])
        numbers = torch.cat([obs["policy"], every.transpose(0, 1).flatten(1)], dim=1)
        return {**obs, "policy": numbers}, (every[1:],) if self.older else ()
