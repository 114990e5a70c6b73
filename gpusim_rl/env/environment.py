"""What a training needs of its environments: `Environment`, and the result of a control step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.schema import EnvConfig
from gpusim_rl.spaces import ActionSpace, ImageShape

Observation = dict[str, Tensor]
"""Observation groups by name: `policy`, and `critic` where the task has one, of shape [num_envs, size]. Groups of
images are uint8, [num_envs, height, width, channels]."""

Parts = dict[str, Float[Tensor, "envs _"]]
"""Parts of an observation group by name, in their order, shape [num_envs, size] each."""


@dataclass(slots=True)
class Step:
    """Results of one control step, for all envs. Without another shape, a tensor has shape [num_envs]."""

    obs: Observation
    """Observation to act on next. Where an episode ended, it is the first one of the next episode."""
    final_obs: Observation
    """Observation at the end of this step, before any reset. Where an episode ended, it is the episode's last one."""
    reward: Float[Tensor, " envs"]
    """Sum of the reward terms."""
    terms: dict[str, Float[Tensor, " envs"]]
    """Named terms of the reward."""
    stats: dict[str, Float[Tensor, " envs"]]
    """Numbers that the task logs, by name; NaN where an env has no value in this step."""
    terminated: Bool[Tensor, " envs"]
    """The episode ended by the task's rules; the value of the next state is 0."""
    truncated: Bool[Tensor, " envs"]
    """The time limit ended the episode; the value of the next state is V(final_obs)."""
    diverged: Bool[Tensor, " envs"]
    """The physics of the env diverged in this step, or its action was bad; the reward is 0, and no algorithm may learn
    from the sample."""
    bad_action: Bool[Tensor, " envs"]
    """The action was NaN or infinite, or a control or force that `apply_action` made of it was."""
    done: Bool[Tensor, " envs"]
    """Terminated, truncated or diverged; the env was reset."""
    incomplete: Bool[Tensor, " envs"]
    """The episode ended, but its return is not that of a whole episode. Either the episode began in the middle of its
    time limit (staggered start) and was truncated, or its env diverged."""
    skipped: Bool[Tensor, " envs"] | None = None
    """Of the diverged envs, those that did not fail: the library used the step for a reset. None where none does."""


class Environment(ABC):
    """Envs that are stepped together: a task on a simulator (`VecEnv`), or envs of another library.

    A training needs no more than this. Whatever runs the envs, a control step has the same semantics: an env whose
    episode ends is reset in the same step, `final_obs` is the episode's true last observation, and an env with a value
    that is not finite is masked out.

    Attributes:
        num_envs: Number of envs, N.
        device: Device of the actions and results of `step`.
        obs_sizes: Size of each observation group of numbers; known after `reset`.
        images: Shape of each observation group of images; known after `reset`.
        final_images: Whether `final_obs` has images of the last state of an episode.
        action_space: Actions that `step` takes.
        num_actions: Numbers in an action.
        max_episode_length: Time limit of an episode [control steps].
        steps_between_truncations: Control steps within which an env is truncated at most once.
        physics_evaluations: Evaluations of the dynamics in a control step, on the device.
        frames_per_s: Control steps in a second of what `render` shows [Hz].
        summary: Words for the start of a run, e.g. `control 60 Hz, episode 500 steps`.
        library: Library that the envs are of, in words; for tasks of ours it is not read.
        on_learners_device: Whether envs of another library step on the learner's device. The library may capture CUDA
            graphs of its own there, so that none of ours holds a control step.
        resumable: Whether `state_dict` holds all that the next step depends on; else a resumed run begins new episodes.
        stateful: Objects whose tensors a CUDA graph must keep in their places.
        num_threads: CPU threads of the physics; None where it has none of its own.
    """

    library: ClassVar[str] = "another library"
    on_learners_device: ClassVar[bool] = False
    resumable: ClassVar[bool] = True

    num_envs: int
    device: torch.device
    obs_sizes: dict[str, int]
    images: Mapping[str, ImageShape] = MappingProxyType({})
    final_images: bool = False
    action_space: ActionSpace
    num_actions: int
    max_episode_length: int
    steps_between_truncations: int
    physics_evaluations: int = 1
    frames_per_s: float = 30.0
    summary: str
    stateful: Sequence[object] = ()
    num_threads: int | None = None

    @classmethod
    def from_settings(cls, cfg: EnvConfig, *, num_envs: int, seed: int, device: torch.device) -> Environment:
        """Makes envs of another library from the section `env`, for a class that `task._target_` names.

        A library that can have its envs on `device`, the learner's, does so. Raises ConfigError where there are no such
        envs, or they do not fit.
        """
        raise ConfigError(f"{cls.__name__} cannot be made from the section env")

    @classmethod
    def adopt(cls, envs: Any, cfg: EnvConfig, *, seed: int) -> Environment:
        """Returns vector envs of the library, which a script of the user has made, as ours.

        Raises ConfigError where they are something else, or cannot be represented.
        """
        raise ConfigError(f"{cls.__name__} cannot take envs that are there already")

    @abstractmethod
    def reset(self) -> Observation:
        """Begins an episode in every env; returns the observation to act on."""

    @abstractmethod
    def step(self, action: Tensor) -> Step:
        """Advances all envs by one control step and resets those whose episode ended.

        Args:
            action: Actions, shape [num_envs, num_actions]: numbers of a Box, float32, or indices of a MultiDiscrete,
                int64.
        """

    @property
    def unwrapped(self) -> Environment:
        """These envs, or those inside a wrapper that changes what is observed."""
        return self

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        """Envs in which the simulator ran out of room for contacts or constraints."""
        return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    @property
    def buffers(self) -> Mapping[str, tuple[int, Float[Tensor, ""]]]:
        """Room per env in each buffer of the simulator that can overflow, and its need, by setting: `Sim.needs`."""
        return {}

    def first_diverged(self) -> dict[str, Any] | None:
        """Returns the state from which the first env diverged, to be replayed; None where that is not known.

        It waits for the device.
        """
        return None

    def render(self) -> list[np.ndarray]:
        """Returns pictures of the envs, uint8 [height, width, 3] each; raises ConfigError if they draw none."""
        raise ConfigError(f"{type(self).__name__} draws no pictures of its envs")

    def compile(self) -> None:  # noqa: B027 (optional)
        """Compiles what a step does besides the physics, by torch.compile."""

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next step depends on; nothing where envs cannot be saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Restores `state_dict`; returns the observation to act on. Called only where `resumable`."""
        return self.reset()

    def begin_from(self, state: dict[str, Any]) -> Observation:
        """Begins new episodes in all envs, at the training progress of another run; returns the observation to act on.

        `state` is that of the other run, from `state_dict`. Without progress of its own an env begins as in `reset`.
        """
        return self.reset()

    @abstractmethod
    def close(self) -> None:
        """Frees what the envs hold."""
