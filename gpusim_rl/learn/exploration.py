"""Acting side of on-policy algorithms: sampled actions, recurrent state, noise, rollout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import EnvSpec, Hidden, Observation, Transition, make_generator, restore_generator
from gpusim_rl.learn.minibatch import fit_sequence_length
from gpusim_rl.learn.networks import ActorCritic, SampledActions, Settings
from gpusim_rl.learn.noise import ActionNoise
from gpusim_rl.learn.rollout import Rollout
from gpusim_rl.settings.schema import NetworkConfig


class Exploration:
    """Action sampling and rollout recording for a policy."""

    def __init__(
        self, policy: ActorCritic, env: EnvSpec, cfg: Settings, section: str, device: torch.device, seed: int
    ) -> None:
        self.policy, self.horizon, num_envs, head = policy, cfg.horizon, env.num_envs, policy.head
        self._generator = make_generator(device, seed)
        self.hidden: Hidden = policy.initial_state(num_envs)
        self.is_first = torch.ones(num_envs, dtype=torch.bool, device=device)  # an episode begins with the rollout
        self.noise = ActionNoise(
            cfg.noise, env, f"{section}.noise", horizon=cfg.horizon, columns=head.num_noise, device=device
        )
        self.acted_on: Observation = {}
        self.sampled: SampledActions | None = None
        self.step = 0
        length = fit_sequence_length(cfg.horizon, cfg.sequence_length) if policy.recurrent else 1
        self._length = fitted(length, cfg.sequence_length, f"{section}.sequence_length")
        self.rollout = Rollout(
            cfg.horizon,
            env,
            head.num_parameters,
            initial_hidden=self.hidden,
            sequence_length=length,
            device=device,
            valued_images=policy.critic_sees_images,
        )

    def begin_rollout(self) -> None:
        """Draw the noise of all steps at once, outside the CUDA graphs of single steps."""
        self.step = 0
        self.noise.begin_rollout(lambda numbers: self.policy.head.draw_(numbers, self._generator))

    def act(self, obs: Observation) -> Tensor:
        """Sample actions, [num_envs, actions]."""
        self.acted_on, self.sampled = obs, self.policy.sample(obs, self.hidden, self.noise.now)
        return self.sampled.action

    def record(self, step: Transition) -> None:
        """Record a step and keep the recurrent state, zeroed where an episode ended."""
        assert self.sampled is not None, "act() comes before record()"
        self.rollout.write(self.step, self.acted_on, self.hidden, self.is_first, self.sampled, step)
        for state, new in zip(self.hidden, self.sampled.hidden, strict=True):
            state.copy_(new.masked_fill(step.done[None, :, None], 0.0))
        self.step = (self.step + 1) % self.horizon
        if self.step == 0:
            self.is_first.copy_(step.done)
        self.noise.advance(self.step, step.done)

    def begin_episodes(self) -> None:
        """Start new episodes in all envs."""
        for state in self.hidden:
            state.zero_()
        self.is_first.fill_(True)
        self.noise.begin_episodes()

    def describe(self, net: NetworkConfig, steps: str) -> dict[str, str]:
        """Describe network and batch; `steps` describes the optimiser steps."""
        rollout, policy = self.rollout, self.policy
        layers = net._target_ or f"{'x'.join(map(str, net.hidden))} {net.activation}"
        if policy.encoder is not None:
            layers = f"{net.encoder.describe()}, {layers}"
        samples = f"{rollout.num_envs} x {self.horizon} = {rollout.num_envs * self.horizon} samples"
        sequences = f", sequences of {self._length}" if policy.recurrent else ""
        return {
            "network": f"{layers}, {sum(p.numel() for p in policy.parameters()):,} parameters",
            "batch": f"{samples}{sequences}, {steps}",
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state and, under `episodes`, the state of unfinished episodes."""
        return {
            "noise_generator": self._generator.get_state(),
            "episodes": {
                "hidden": [state.clone() for state in self.hidden],
                "is_first": self.is_first.clone(),
                "noise": self.noise.state_dict(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; start new episodes if `episodes` is None."""
        restore_generator(self._generator, state["noise_generator"])
        episodes = state["episodes"]
        if episodes is None:
            self.begin_episodes()
            return
        for hidden, saved in zip(self.hidden, episodes["hidden"], strict=True):
            hidden.copy_(saved)
        self.is_first.copy_(episodes["is_first"])
        self.noise.load_state_dict(episodes["noise"])


def fitted(value: int, wanted: int, key: str) -> str:
    """Format an adjusted value, followed by the configured value if that differs."""
    return f"{value}" if value == wanted else f"{value} (fitted: {key}={wanted})"
