"""Behaviour cloning: a policy learns the actions of demonstrations (Pomerleau 1988; Bain and Sammut 1995)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.learn import demonstrations
from gpusim_rl.learn.algorithm import EnvSpec, Hidden
from gpusim_rl.learn.chunks import Chunks, chunk_samples
from gpusim_rl.learn.distributions import DiagonalGaussian
from gpusim_rl.learn.minibatch import Sequences
from gpusim_rl.learn.networks import ActorCritic
from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.learn.teacher import IMITATION
from gpusim_rl.settings.schema import BCConfig

MOST_HELD_OUT = 8192
"""Held-out control steps of which the loss is computed; of more of them, as many at equal distances."""


class BC(OnPolicy):
    """Learns from a file alone. The envs say what it is worth: an iteration begins with a rollout.

    Observations are normalised by the statistics of the demonstrations. Nothing is learned from rollouts and rewards,
    and there is no value function. Whole episodes are held out, at equal distances in the file.

    Attributes:
        seen: Demonstrations that are learned from: raw observations and actions, [1, steps, size] each; None in a
            policy that only acts.
        held_out: Those that are not; None without.
    """

    Config = BCConfig
    losses = (IMITATION,)

    cfg: BCConfig
    seen: Sequences | None = None
    held_out: Sequences | None = None

    def __init__(self, cfg: BCConfig, env: EnvSpec, *, device: torch.device, seed: int, max_iterations: int) -> None:
        if env.images:
            raise ConfigError("algo=bc learns from demonstrations, which have no images. Try algo=distill")
        alone = dataclasses.replace(env, obs_sizes={"policy": env.obs_sizes["policy"]})
        super().__init__(cfg, alone, device=device, seed=seed, max_iterations=max_iterations)
        self._digest: str | None = None
        if env.role != "acts":
            self.seen, self.held_out = self._load(env)
            self._chunks = Chunks(device, chunk_samples(cfg.batch_size), compiled=env.compile)

    def make_policy(self, env: EnvSpec) -> ActorCritic:
        policy = super().make_policy(env)
        fixed = ("value_head",) if self.cfg.loss == "nll" else ("value_head", "head.log_std")
        for name, parameter in policy.named_parameters():
            if name.startswith(fixed):
                parameter.requires_grad_(False)
        return policy

    def _load(self, env: EnvSpec) -> tuple[Sequences, Sequences | None]:
        """Reads the file, sets the statistics of observations by it, and splits it."""
        key, file = f"{env.section}.demonstrations.file", self.cfg.demonstrations.file
        if file is None:
            problem = "is not given, and a resume needs it again: expected a file that tools/collect.py has written"
            raise ConfigError(f"{key} {problem}. Try {key}=<file.npz>")
        try:
            shown, self._digest = demonstrations.load(file, env, ["policy"])
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
        episode = np.cumsum(shown.ends) - shown.ends  # of each control step
        whole = np.floor(np.arange(shown.episodes + 1) * self.cfg.demonstrations.held_out)
        held = (np.diff(whole) > 0)[episode]
        learned, held = ~held & ~shown.diverged, held & ~shown.diverged
        if not learned.any():
            problem = "all control steps that are not held out diverged. Try more episodes"
            raise ConfigError(f"{key}: {file} has nothing to learn from: {problem}")
        held_steps = np.flatnonzero(held)
        held_steps = held_steps[:: -(-len(held_steps) // MOST_HELD_OUT) or 1]
        seen = self._part(shown, np.flatnonzero(learned))
        for norm in self.policy.obs_norm.values():
            norm.update(seen.inputs["policy"][0])  # type: ignore[operator]
        return seen, self._part(shown, held_steps) if len(held_steps) else None

    def _part(self, shown: demonstrations.Demonstrations, steps: np.ndarray) -> Sequences:
        obs, action = (
            demonstrations.tensor(array[steps], self.device)[None] for array in (shown.obs["policy"], shown.action)
        )
        return Sequences({"policy": obs}, action, (), None)

    def loss_weights(self) -> dict[str, float]:
        return {IMITATION: 1.0}

    @torch.no_grad()
    def _prepare(self) -> tuple[Sequences, dict[str, Tensor]]:
        rollout = self.rollout
        stats = {"check/obs": rollout.obs["policy"].sum(), "check/reward": rollout.reward.sum()}
        if self.held_out is not None:
            held_out = self._errors(self.held_out.inputs, self.held_out.packed)
            stats["loss/held_out"] = held_out.mean()
        assert self.seen is not None, "a policy that acts has nothing to learn from"
        return self.seen, stats

    def _learn(self, batch: Sequences) -> list[tuple[Tensor, Tensor]]:
        shape, steps = (self.num_minibatches, self.cfg.batch_size), []
        drawn = torch.randint(batch.packed.shape[1], shape, generator=self._shuffle_generator, device=self.device)
        for index in drawn.unbind():
            losses, norm, skip = self._gradient(batch, index)
            self._step(norm, skip)
            steps.append((losses, norm))
        return steps

    def _chunk_loss(self, inputs: dict[str, Tensor], packed: Tensor, hidden: Hidden, is_first: Tensor | None) -> Tensor:
        samples = self.cfg.batch_size * self.collective.size
        return self._errors(inputs, packed).sum()[None] / samples

    def _errors(self, obs: dict[str, Tensor], action: Tensor) -> Tensor:
        """Returns the loss of each sample, for raw observations."""
        distribution = self.policy(self.policy.normalize(obs))[0]
        if self.cfg.loss == "mse" and isinstance(distribution, DiagonalGaussian):
            return (distribution.mean - action).square().mean(dim=-1)
        return -distribution.log_prob(action)

    def _fit_minibatches(self, samples: int) -> int:
        return self.cfg.gradient_steps

    def _observe(self) -> None:
        """Leaves the statistics of observations as they are."""

    def _describe_steps(self) -> str:
        steps = 0 if self.seen is None else self.seen.packed.shape[1]
        return f"{self.num_minibatches} x {self.cfg.batch_size} of {steps} demonstrated steps"

    def state_dict(self) -> dict[str, Any]:
        """Returns that of its base, and which demonstrations they are."""
        return super().state_dict() | {"demonstrations": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`; the statistics of observations are those of the checkpoint."""
        super().load_state_dict(state)
        if state["demonstrations"] != self._digest:
            warn("the demonstrations are not those that the training had before")
