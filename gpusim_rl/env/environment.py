"""Environment interface of the trainer, and the result of a control step."""

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
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.schema import EnvConfig
from gpusim_rl.spaces import ActionSpace, ImageShape

Observation = dict[str, Tensor]
"""Groups by name: `policy`, `critic` (optional), [num_envs, size]; images uint8 [num_envs, height, width, channels]."""

Terms = dict[str, Float[Tensor, "envs _"]]
"""Terms of an observation group by name, in order, shape [num_envs, size] each."""


@dataclass(slots=True)
class Step:
    """Results of one control step of all envs, shape [num_envs] unless noted otherwise."""

    obs: Observation
    """Observation to act on next: after a reset, the first observation of the next episode."""
    final_obs: Observation
    """Observation at the end of this step, before any reset."""
    reward: Float[Tensor, " envs"]
    """Sum of the reward terms."""
    terms: dict[str, Float[Tensor, " envs"]]
    """Named reward terms."""
    stats: dict[str, Float[Tensor, " envs"]]
    """Values that the task logs, by name; NaN = no value in this step."""
    terminated: Bool[Tensor, " envs"]
    """The episode ended by the task's rules; the value of the next state is 0."""
    truncated: Bool[Tensor, " envs"]
    """The time limit ended the episode; the value of the next state is V(final_obs)."""
    diverged: Bool[Tensor, " envs"]
    """The physics diverged, or the action was bad; the reward is 0, and algorithms must not learn from the sample."""
    bad_action: Bool[Tensor, " envs"]
    """The action, or a control or force that `apply_action` derived from it, was NaN or infinite."""
    done: Bool[Tensor, " envs"]
    """Terminated, truncated or diverged; the env was reset."""
    incomplete: Bool[Tensor, " envs"]
    """The return does not cover a whole episode: the env diverged, or started staggered and was truncated."""
    skipped: Bool[Tensor, " envs"] | None = None
    """Envs marked as diverged only because the library used the step for a reset; None = the library never does so."""

    def to(self, device: torch.device) -> Step:
        """Move a step to the learner's device in one copy of its bytes (to CUDA: asynchronous, from pinned memory)."""
        source = self.reward.device
        if source == device:
            return self
        fields, structure = tree_flatten([getattr(self, name) for name in self.__slots__])
        # The largest elements first, so that each tensor is aligned in the buffer
        tensors = sorted((x for x in fields if x is not None), key=Tensor.element_size, reverse=True)
        sources = [x.reshape(-1).view(torch.uint8) for x in tensors]
        sizes, pinned = list(map(len, sources)), source.type == "cpu" and device.type == "cuda"
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=source, pin_memory=pinned)
        parts = torch.cat(sources, out=packed).to(device, non_blocking=pinned).split(sizes)
        moved = {id(x): part.view(x.dtype).view(x.shape) for x, part in zip(tensors, parts, strict=True)}
        return Step(*tree_unflatten([None if x is None else moved[id(x)] for x in fields], structure))


class Environment(ABC):
    """Environments stepped together: a task on a simulator (`VecEnv`), or envs of another library.

    An env whose episode ends is reset in the same step, `final_obs` is the episode's true last observation, and envs
    with non-finite values are masked out.

    Attributes:
        num_envs: Number of envs, N.
        device: Device of actions and results.
        obs_sizes: Size of each numeric observation group; known after `reset`.
        images: Shape of each image group; known after `reset`.
        final_images: Whether `final_obs` has images of an episode's last state.
        action_space: Actions that `step` accepts.
        num_actions: Size of the action vector.
        max_episode_length: Time limit [control steps].
        steps_between_truncations: Control steps within which an env is truncated at most once.
        physics_evaluations: Evaluations of the dynamics per control step, on the device.
        frames_per_s: Frame rate of videos with one frame per control step [Hz].
        summary: Banner line, e.g. `control 60 Hz, episode 500 steps`.
        library: Name of the third-party library.
        on_learners_device: Whether third-party envs step on the learner's device. They may capture CUDA graphs there,
            so no graph of this package contains a control step.
        resumable: Whether `state_dict` is complete; otherwise a resumed run begins new episodes.
        stateful: Objects whose tensors a CUDA graph needs at fixed addresses.
        num_threads: CPU threads of the physics; None if unknown.
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
        """Build envs of another library, on the learner's `device` if possible; raise ConfigError if building fails."""
        raise ConfigError("cannot be built from the `env` section", key=cls.__name__)

    @abstractmethod
    def reset(self) -> Observation:
        """Begin an episode in every env; return the observation to act on."""

    @abstractmethod
    def step(self, action: Tensor) -> Step:
        """Step all envs once with float32 (Box) or int64 (MultiDiscrete) actions; reset envs whose episode ended."""

    @property
    def unwrapped(self) -> Environment:
        """Innermost environment, without observation wrappers."""
        return self

    @property
    def overflow(self) -> Bool[Tensor, " envs"]:
        """Envs in which a simulator buffer for contacts or constraints overflowed."""
        return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)

    @property
    def buffers(self) -> Mapping[str, tuple[int, Float[Tensor, ""]]]:
        """Capacity and demand per env of each simulator buffer that can overflow, by setting name; see `Sim.needs`."""
        return {}

    def first_diverged(self) -> dict[str, Any] | None:
        """Return the state before the first divergence, if known; synchronises with the device."""
        return None

    def render(self) -> list[np.ndarray]:
        """Return images of the envs, uint8 [height, width, 3] each; raise ConfigError if they cannot render."""
        raise ConfigError("does not support rendering", key=type(self).__name__)

    def compile(self) -> None:  # noqa: B027 (optional)
        """Compile the step around the physics with torch.compile."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on; empty if envs cannot be saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Restore `state_dict`; return the observation to act on. Called only if `resumable`."""
        return self.reset()

    def begin_from(self, state: dict[str, Any]) -> Observation:
        """Begin new episodes with the training progress from another run's `state_dict`, if the envs track progress."""
        return self.reset()

    @abstractmethod
    def close(self) -> None:
        """Free all resources."""
