"""Extensions of PPO that add to rewards and losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec, Observation, Transition
from gpusim_rl.learn.minibatch import Minibatch
from gpusim_rl.learn.networks import ActorCritic, EvaluatedActions
from gpusim_rl.learn.rollout import Rollout
from gpusim_rl.settings.load_class import load_class

Evaluated: TypeAlias = tuple[dict[str, Tensor], EvaluatedActions]
"""Losses of each sample by name, [time, batch], and its action as evaluated by the current policy."""
Evaluate: TypeAlias = Callable[[Minibatch], Evaluated]


class Extension:
    """Base class of extensions: four hooks, no-ops by default, and a state.

    The entry `ppo.extensions.<name>` builds `Class(env, device=..., **settings)`, where `_target_` names the class.
    Hooks follow the rules of the hot path (docs/architecture.md).

    Attributes:
        weights: Weight of each loss that `losses` adds: a number, or a 0-dim device tensor that may change in place.
            With weight 0, the loss is only logged.
    """

    groups: ClassVar[tuple[str, ...]] = ()
    """Numeric observation groups for the extension alone, hidden from policy and critic."""
    weights: Mapping[str, float | Tensor] = {}

    def record(self, t: int, obs: Observation, step: Transition) -> None:
        """Record step t of the rollout: the observations acted on, and the result."""

    def begin_update(self, rollout: Rollout, reward: Tensor, inputs: dict[str, Tensor], policy: ActorCritic) -> Tensor:
        """Return the rewards to learn from, [T, N]; may add inputs for `losses`, [T, N, ...] each."""
        return reward

    def losses(self, evaluate: Evaluate, minibatch: Minibatch) -> Evaluated:
        """Return the losses of each sample: `evaluate(minibatch)` plus the extension's losses."""
        return evaluate(minibatch)

    def after_minibatch(self, index: Tensor, weight: Tensor, last: bool) -> Mapping[str, Tensor]:
        """Train the extension's networks after each optimiser step; return 0-dim metrics to average over minibatches.

        `index` selects sequences (see `minibatch.by_sequence`); `weight` has each sample's weight, [steps, sequences].
        """
        return {}

    def describe(self) -> dict[str, str]:
        """Return banner lines by label."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data; an `episodes` entry is restored as None if envs begin new episodes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` in place."""


def extension_class(key: str, settings: Mapping[str, Any]) -> type[Extension]:
    """Import the class of the `ppo.extensions` entry `key`; raise ConfigError if it is missing or not an Extension."""
    if not isinstance(settings, Mapping):
        raise ConfigError(key=key, expected="a mapping with _target_", got=settings)
    return load_class(settings.get("_target_"), Extension, f"{key}._target_", "my_extensions.Smoothness")


def make_extension(key: str, settings: Mapping[str, Any], env: EnvSpec, device: torch.device) -> Extension:
    """Build the extension of the `ppo.extensions` entry `key`; raise ConfigError for unknown or missing settings."""
    cls = extension_class(key, settings)
    rest = {name: value for name, value in settings.items() if name != "_target_"}
    try:
        inspect.signature(cls).bind(env, device=device, **rest)
    except TypeError as error:
        raise ConfigError(f"{error}", key=key, hint=f"Settings are passed to {cls.__name__}.__init__") from None
    return cls(env, device=device, **rest)  # type: ignore[call-arg]
