"""Learning from actors: one algorithm acts in each actor, another learns from their rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import Algorithm, Observation
from gpusim_rl.learn.impala import Impala
from gpusim_rl.learn.networks import SampledActions
from gpusim_rl.learn.off_policy import OffPolicy

TRANSITIONS = "transitions"  # key of the learner's transition count in an acting state


class Remote(ABC):
    """Additional interface of algorithms that learn from actors."""

    max_policy_lag: float = float("inf")
    """Maximum number of updates between acting and learning."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm

    # In an actor

    def load_acting_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the learner's `acting_state` in place."""
        self.algorithm.policy.load_state_dict(state)

    @staticmethod
    @abstractmethod
    def act_together(remotes: Sequence[Any], obs: Sequence[Observation]) -> list[Tensor]:
        """Return the actions of several algorithms that share a policy, from one forward pass."""

    @abstractmethod
    def recording(self) -> list[tuple[Tensor, int]]:
        """Return the rollout tensors that an actor sends, each with its env dimension."""

    def begin_episodes(self) -> None:
        """Reset the algorithm's per-episode state, as all envs of the actor begin new episodes."""
        getattr(self.algorithm, "exploration", self.algorithm).begin_episodes()

    # In the learner

    def acting_state(self) -> dict[str, Tensor]:
        """Return the state that `act` needs in all actors: weights and exploration progress."""
        return self.algorithm.policy.state_dict()

    def receive(self, envs: slice, recording: Sequence[Tensor]) -> None:
        """Copy an actor's `recording` into the slice `envs` of the learner's envs."""
        for (memory, dim), sent in zip(self.recording(), recording, strict=True):
            memory.narrow(dim, envs.start, envs.stop - envs.start).copy_(sent, non_blocking=True)

    def end_receiving(self) -> None:  # noqa: B027 (optional)
        """Finish receiving once every env has a rollout."""


class RemoteImpala(Remote):
    """Remote interface of IMPALA: actors send their rollouts."""

    algorithm: Impala

    def __init__(self, algorithm: Impala) -> None:
        super().__init__(algorithm)
        self.max_policy_lag = algorithm.cfg.max_policy_lag
        algorithm.drop_ring()

    @staticmethod
    def act_together(remotes: Sequence[RemoteImpala], obs: Sequence[Observation]) -> list[Tensor]:
        """Sample all actions in one batch."""
        algorithms = [remote.algorithm for remote in remotes]
        explorations = [algorithm.exploration for algorithm in algorithms]
        sizes = [len(exploration.is_first) for exploration in explorations]
        batch = {group: torch.cat([groups[group] for groups in obs]) for group in obs[0]}
        hidden = tuple(torch.cat(states, dim=1) for states in zip(*(x.hidden for x in explorations), strict=True))
        policy = algorithms[0].policy
        sampled = policy.sample(batch, hidden, torch.cat([exploration.noise.now for exploration in explorations]))
        parameters = torch.cat(sampled.distribution.per_sample().parameters, dim=-1)
        actions, values = sampled.action.split(sizes), sampled.value.split(sizes)
        states = zip(*(x.split(sizes, dim=1) for x in sampled.hidden), strict=True) if hidden else [()] * len(sizes)
        rows = zip(explorations, obs, actions, parameters.split(sizes), values, states, strict=True)
        for exploration, seen, action, distribution, value, state in rows:
            exploration.acted_on = seen
            exploration.sampled = SampledActions(action, policy.head.stored(distribution), value, state)
        return list(actions)

    def recording(self) -> list[tuple[Tensor, int]]:
        """Return the rollout's tensors, each with its env dimension."""
        return self.algorithm.rollout.memory()


class RemoteOffPolicy(Remote):
    """Remote interface of off-policy algorithms: actors send steps, and the learner stores them like its own steps.

    `EnvSpec.max_episode_length` is at most the horizon, as successive rollouts come from different actors.
    """

    algorithm: OffPolicy

    def __init__(self, algorithm: OffPolicy) -> None:
        super().__init__(algorithm)
        if algorithm.policy.encoder is not None:
            problem, hint = "image observations are not supported with actors", "Try actors=none, or algo=impala"
            raise ConfigError(problem, key=f"algo={algorithm.section}", hint=hint)
        self._rollout = algorithm.memory

    def load_acting_state(self, state: Mapping[str, Tensor]) -> None:
        """Load weights and transition count."""
        algorithm = self.algorithm
        algorithm.policy.load_state_dict({k: x for k, x in state.items() if k != TRANSITIONS}, strict=False)
        algorithm.steps.copy_(state[TRANSITIONS] // algorithm.num_envs)  # out= would reject a host tensor on CUDA

    @staticmethod
    @torch.no_grad()
    def act_together(remotes: Sequence[RemoteOffPolicy], obs: Sequence[Observation]) -> list[Tensor]:
        """Choose actions from the outputs of one forward pass."""
        algorithms = [remote.algorithm for remote in remotes]
        outputs = algorithms[0].outputs({group: torch.cat([groups[group] for groups in obs]) for group in obs[0]})
        for algorithm, seen in zip(algorithms, obs, strict=True):
            algorithm.acted_on = seen
        split = outputs.split([algorithm.num_envs for algorithm in algorithms])
        return [algorithm.choose(rows) for algorithm, rows in zip(algorithms, split, strict=True)]

    def recording(self) -> list[tuple[Tensor, int]]:
        """Return the rollout's tensors, each with env dimension 1."""
        return [(tensor, 1) for tensor in tree_leaves(self._rollout)]

    def acting_state(self) -> dict[str, Tensor]:
        """Return the weights of the acting networks, and the transition count."""
        algorithm = self.algorithm
        unused = ("target_", "critic.") if algorithm.policy.actor is not None else ("target_",)
        acting = {name: x for name, x in algorithm.policy.state_dict().items() if not name.startswith(unused)}
        return {**acting, TRANSITIONS: algorithm.steps * algorithm.num_envs}

    def end_receiving(self) -> None:
        """Store the received rollouts in the replay buffer."""
        rollout, last = self._rollout, self.algorithm.horizon - 1
        # Bootstrap from `final_obs` of the last step: the env's next rollout belongs to another episode.
        rollout.truncated[last].logical_or_(~(rollout.terminated[last] | rollout.diverged[last]))
        self.algorithm.store()
        self.algorithm.steps += self.algorithm.horizon


REMOTES: dict[type[Algorithm], type[Remote]] = {Impala: RemoteImpala, OffPolicy: RemoteOffPolicy}
"""`Remote` class of each base class of algorithms that can learn from actors."""


def remote_class(algorithm_class: type[Algorithm]) -> type[Remote] | None:
    """Return the `Remote` class of an algorithm; None if it must learn from data of its newest policy."""
    return next((remote for cls, remote in REMOTES.items() if issubclass(algorithm_class, cls)), None)


def remote_of(algorithm: Algorithm) -> Remote:
    """Build the `Remote` of an algorithm that supports actors."""
    cls = remote_class(type(algorithm))
    assert cls is not None
    return cls(algorithm)
