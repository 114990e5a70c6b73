"""Extensions of PPO: objects that add to its rewards and losses. Symmetry, RND, teacher and style are such objects."""

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
"""Losses of each sample by name, [time, batch], and the current policy's view of its action."""
Evaluate: TypeAlias = Callable[[Minibatch], Evaluated]


class Extension:
    """Base of extensions: four calls that do nothing unless overridden, and a state.

    A class of your own is named by `ppo.extensions.<name>._target_` and made as `Class(env, device=..., **settings)`
    with the other settings of that entry. All four calls follow the rules of the hot path (docs/architecture.md): no
    value of a tensor is read on the host, and memory is made in `__init__`.

    Attributes:
        weights: Weight in PPO's loss of each loss that `losses` adds, by name: a number, or a 0-dim tensor of the
            device that may change in place. With weight 0 a loss is only logged.
    """

    groups: ClassVar[tuple[str, ...]] = ()
    """Observation groups of numbers that only the extension sees, not the networks."""
    weights: Mapping[str, float | Tensor] = {}

    def record(self, t: int, obs: Observation, step: Transition) -> None:
        """Take up step t of the rollout: the observations that were acted on, and the result."""

    def begin_update(self, rollout: Rollout, reward: Tensor, inputs: dict[str, Tensor], policy: ActorCritic) -> Tensor:
        """Return the rewards to learn from, [T, N]; may add inputs for `losses`, [T, N, ...] each.

        Args:
            rollout: The rollout, with the task's own rewards.
            reward: Rewards to learn from so far.
            inputs: Normalised observations by group, to which entries may be added.
            policy: Policy that acted.
        """
        return reward

    def losses(self, evaluate: Evaluate, minibatch: Minibatch) -> Evaluated:
        """Return the losses of each sample: those of `evaluate(minibatch)`, and the extension's own.

        It may evaluate other samples than those of the minibatch, such as their mirror images.
        """
        return evaluate(minibatch)

    def after_minibatch(self, index: Tensor, weight: Tensor, last: bool) -> Mapping[str, Tensor]:
        """Learn beside the policy, after each of its steps.

        Args:
            index: Sequences of the minibatch, in the order of `minibatch.by_sequence`.
            weight: Weight of their samples in means, [time, batch].
            last: True for the last minibatch of the update.

        Returns:
            Numbers for the log, 0-dim; their means over the minibatches are logged.
        """
        return {}

    def describe(self) -> dict[str, str]:
        """Return lines for the banner, by label."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs: tensors, numbers, strings, lists and dicts.

        The entry `episodes`, if there is one, is None when it is restored into envs that begin new episodes.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` in place."""


def extension_class(key: str, settings: Mapping[str, Any]) -> type[Extension]:
    """Import the class that an entry of `ppo.extensions` names; `key` is where the entry stands.

    Raises:
        ConfigError: There is no such class, or it is no Extension.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{key} must be a mapping with _target_, got {settings!r}")
    return load_class(settings.get("_target_"), Extension, f"{key}._target_", "my_extensions.Smoothness")


def make_extension(key: str, settings: Mapping[str, Any], env: EnvSpec, device: torch.device) -> Extension:
    """Make the extension of an entry of `ppo.extensions`.

    Raises:
        ConfigError: Its class does not take the settings.
    """
    cls = extension_class(key, settings)
    rest = {name: value for name, value in settings.items() if name != "_target_"}
    try:
        inspect.signature(cls).bind(env, device=device, **rest)
    except TypeError as error:
        raise ConfigError(f"{key}: {error}. Settings are the arguments of {cls.__name__}.__init__") from None
    return cls(env, device=device, **rest)  # type: ignore[call-arg]
