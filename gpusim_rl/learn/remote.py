"""Algorithms that learn from actors: one acts in each actor, and another one learns from their rollouts."""

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

TRANSITIONS = "transitions"
"""Name of the number of the learner's transitions, beside the weights that an actor takes over."""


class Remote(ABC):
    """The part of an algorithm that actors and their learner need besides."""

    max_policy_lag: float = float("inf")
    """Largest number of updates between acting and learning: older rollouts are dropped."""

    def __init__(self, algorithm: Any) -> None:
        self.algorithm = algorithm

    # In an actor

    def load_acting_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over the `acting_state` of the learner, in place."""
        self.algorithm.policy.load_state_dict(state)

    @staticmethod
    @abstractmethod
    def act_together(remotes: Sequence[Any], obs: Sequence[Observation]) -> list[Tensor]:
        """Returns actions of each of several algorithms with one policy, by one call of it, for their observations."""

    @abstractmethod
    def recording(self) -> list[tuple[Tensor, int]]:
        """Returns the tensors of the rollout, which an actor sends, and the dimension of the envs in each."""

    def begin_episodes(self) -> None:
        """Begins new episodes in all envs of the actor."""
        getattr(self.algorithm, "exploration", self.algorithm).begin_episodes()

    # In the learner

    def acting_state(self) -> dict[str, Tensor]:
        """Returns what `act` depends on in all actors, by name: weights, and the progress of exploration."""
        return self.algorithm.policy.state_dict()

    def receive(self, envs: slice, recording: Sequence[Tensor]) -> None:
        """Takes over the tensors of an actor's `recording`, for these envs of the learner."""
        for (memory, dim), sent in zip(self.recording(), recording, strict=True):
            memory.narrow(dim, envs.start, envs.stop - envs.start).copy_(sent, non_blocking=True)

    def end_receiving(self) -> None:  # noqa: B027 (optional)
        """Ends the reception, when there is a rollout for each env."""


class RemoteImpala(Remote):
    """IMPALA: actors send the memory of its rollout."""

    algorithm: Impala

    def __init__(self, algorithm: Impala) -> None:
        super().__init__(algorithm)
        self.max_policy_lag = algorithm.cfg.max_policy_lag
        algorithm.drop_ring()  # with actors the age of a rollout is real

    @staticmethod
    def act_together(remotes: Sequence[RemoteImpala], obs: Sequence[Observation]) -> list[Tensor]:
        """Samples the actions of one batch of all."""
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
        for exploration, groups, action, distribution, value, state in rows:
            exploration.acted_on = groups
            exploration.sampled = SampledActions(action, policy.head.stored(distribution), value, state)
        return list(actions)

    def recording(self) -> list[tuple[Tensor, int]]:
        """Returns the memory of the rollout."""
        return self.algorithm.rollout.memory()


class RemoteOffPolicy(Remote):
    """Off-policy algorithms: actors send the steps of a rollout, and the learner stores them as if it had made them.

    The learner's `EnvSpec.max_episode_length` is at most the horizon: each rollout ends as by a time limit, because the
    next one in its place is of another actor.
    """

    algorithm: OffPolicy

    def __init__(self, algorithm: OffPolicy) -> None:
        super().__init__(algorithm)
        if algorithm.policy.encoder is not None:
            problem = "learns from images only in the process that steps the envs"
            raise ConfigError(f"algo={algorithm.section} {problem}. Try actors=none, or algo=impala")
        self._rollout = algorithm.memory

    def load_acting_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over weights, and the number of transitions."""
        algorithm = self.algorithm
        algorithm.policy.load_state_dict({k: x for k, x in state.items() if k != TRANSITIONS}, strict=False)
        algorithm.steps.copy_(state[TRANSITIONS] // algorithm.num_envs)  # with out= CUDA takes none of the host

    @staticmethod
    @torch.no_grad()
    def act_together(remotes: Sequence[RemoteOffPolicy], obs: Sequence[Observation]) -> list[Tensor]:
        """Chooses the actions of each by the outputs for one batch of all."""
        algorithms = [remote.algorithm for remote in remotes]
        outputs = algorithms[0].outputs({group: torch.cat([groups[group] for groups in obs]) for group in obs[0]})
        for algorithm, groups in zip(algorithms, obs, strict=True):
            algorithm.acted_on = groups
        split = outputs.split([algorithm.num_envs for algorithm in algorithms])
        return [algorithm.choose(rows) for algorithm, rows in zip(algorithms, split, strict=True)]

    def recording(self) -> list[tuple[Tensor, int]]:
        """Returns the steps of the rollout."""
        return [(tensor, 1) for tensor in tree_leaves(self._rollout)]

    def acting_state(self) -> dict[str, Tensor]:
        """Returns the networks that act, and the number of transitions."""
        algorithm = self.algorithm
        unused = ("target_", "critic.") if algorithm.policy.actor is not None else ("target_",)
        acting = {name: x for name, x in algorithm.policy.state_dict().items() if not name.startswith(unused)}
        return {**acting, TRANSITIONS: algorithm.steps * algorithm.num_envs}

    def end_receiving(self) -> None:
        """Stores the rollouts."""
        rollout, last = self._rollout, self.algorithm.horizon - 1
        # What follows the last step is its `final_obs`: the next one in the place of an env is of another episode.
        rollout.truncated[last].logical_or_(~(rollout.terminated[last] | rollout.diverged[last]))
        self.algorithm.store()
        self.algorithm.steps += self.algorithm.horizon


REMOTES: dict[type[Algorithm], type[Remote]] = {Impala: RemoteImpala, OffPolicy: RemoteOffPolicy}
"""Algorithms that can learn from rollouts of an older policy, and what their actors need."""


def remote_class(algorithm_class: type[Algorithm]) -> type[Remote] | None:
    """Returns the class for an algorithm; None where it learns only from rollouts of its newest policy."""
    return next((remote for cls, remote in REMOTES.items() if issubclass(algorithm_class, cls)), None)


def remote_of(algorithm: Algorithm) -> Remote:
    """Makes the `Remote` of an algorithm that can learn from actors."""
    cls = remote_class(type(algorithm))
    assert cls is not None
    return cls(algorithm)
