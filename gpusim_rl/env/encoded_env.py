"""Environments whose images are replaced with a frozen encoder's features in the `policy` group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.env.environment import Environment, Observation, Step
from gpusim_rl.env.vec_env import VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.spaces import ImageShape


def _delegated(name: str) -> Any:
    return property(lambda wrapper: getattr(wrapper.env, name))


class FrozenEncoder(Protocol):
    """Frozen image encoder."""

    out_size: int  # number of features
    digest: str  # hash of the weights
    words: str  # name for the log

    def __call__(self, images: Mapping[str, Tensor], /) -> Tensor:
        """Return the features, float32 [rows, out_size], of images [rows, height, width, channels] by group."""
        ...


class EncodedEnv(Environment):
    """Wrapper that gives the policy features instead of images, so that training stores no images.

    The `policy` group contains its numbers, then the features of the newest `frames` images, oldest first (zero before
    the episode). Images are encoded once. Tasks do not render an episode's last state: `final_obs` has older features.

    Args:
        env: Environment with images.
        make_encoder: Encoder factory; its argument is the shape of each image group.
        frames: Number of frames whose features the policy observes.

    Attributes:
        features: Features of the newest frames, [num_envs, frames, features]; known after `reset`.
        encoder: Encoder of the images; None until `reset`.
        seen: Observation to act on, including images; known after `reset`.
    """

    num_envs, device, action_space, num_actions = map(_delegated, ("num_envs", "device", "action_space", "num_actions"))
    max_episode_length = _delegated("max_episode_length")
    steps_between_truncations = _delegated("steps_between_truncations")
    physics_evaluations, frames_per_s = map(_delegated, ("physics_evaluations", "frames_per_s"))
    library, on_learners_device = map(_delegated, ("library", "on_learners_device"))
    resumable, stateful, num_threads = map(_delegated, ("resumable", "stateful", "num_threads"))
    first_diverged, render, compile, close = map(_delegated, ("first_diverged", "render", "compile", "close"))
    overflow, buffers, unwrapped = map(_delegated, ("overflow", "buffers", "unwrapped"))  # type: ignore[override]

    def __init__(
        self, env: Environment, make_encoder: Callable[[Mapping[str, ImageShape]], FrozenEncoder], frames: int
    ) -> None:
        self.env, self._make_encoder, self.frames = env, make_encoder, frames
        self.summary = env.summary
        self.name: str = getattr(env, "name", type(env).__name__)
        self.obs_sizes = {}
        self.features: Float[Tensor, "envs frames features"]
        self.seen: Observation
        self.encoder: FrozenEncoder | None = None

    def reset(self) -> Observation:
        """Begin an episode in every env; build the encoder once, raising ConfigError if it does not fit the images."""
        obs = self.env.reset()
        if self.encoder is None:
            self.encoder = self._make_encoder(self.env.images)
            self.summary += f", images encoded by {self.encoder.words}"
            size = self.encoder.out_size
            self.features = torch.zeros(self.num_envs, self.frames, size, device=self.device)
            self.obs_sizes = dict(self.env.obs_sizes)
            self.obs_sizes["policy"] = self.obs_sizes.get("policy", 0) + self.frames * size
        return self._begin(obs)

    def look(self) -> Observation:
        """Read the current observation again, without encoding images."""
        assert isinstance(self.env, VecEnv)
        return self._joined(self.env.look(), self.features)

    def step(self, action: Tensor) -> Step:
        """Advance all envs by one control step and reset the envs whose episode ended."""
        step = self.env.step(action)
        done, older = step.done[:, None, None], self.features[:, 1:]
        newest = torch.cat([older, self._encode(step.obs)], dim=1)
        last = self.features if isinstance(self.env, VecEnv) else torch.cat([older, self._encode_last(step)], dim=1)
        final_obs = self._joined(step.final_obs, torch.where(done, last, newest))
        newest[:, :-1].masked_fill_(done, 0.0)
        self.features.copy_(newest)
        self.seen = step.obs
        step.obs, step.final_obs = self._joined(step.obs, newest), final_obs
        return step

    def _encode(self, obs: Observation) -> Float[Tensor, "envs 1 features"]:
        assert self.encoder is not None, "call reset() before step()"
        return self.encoder({group: obs[group] for group in self.env.images})[:, None]

    def _encode_last(self, step: Step) -> Float[Tensor, "envs 1 features"]:
        if self.device.type != "cpu":
            return self._encode(step.final_obs)
        features = torch.zeros_like(self.features[:, :1])
        if bool(step.done.any()):  # no sync: the envs are on the CPU
            images = {group: step.final_obs[group][step.done] for group in self.env.images}
            features[step.done] = self._encode(images)
        return features

    def _joined(self, obs: Observation, features: Float[Tensor, "envs frames features"]) -> Observation:
        numbers = {group: value for group, value in obs.items() if group not in self.env.images}
        own = [numbers["policy"]] if "policy" in numbers else []
        return {**numbers, "policy": torch.cat([*own, features.flatten(1)], dim=1)}

    def _begin(self, obs: Observation) -> Observation:
        self.features.zero_()
        self.features[:, -1:] = self._encode(obs)
        self.seen = obs
        return self._joined(obs, self.features)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the envs, the features and the encoder's digest."""
        assert self.encoder is not None, "call reset() before state_dict()"
        return {**self.env.state_dict(), "features": self.features.clone(), "encoder": self.encoder.digest}

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Restore `state_dict`; raise ConfigError if the encoder differs."""
        self._check_encoder(state)
        obs = self.env.load_state_dict(state)
        self.features.copy_(state["features"])
        self.seen = obs
        return self._joined(obs, self.features)

    def begin_from(self, state: dict[str, Any]) -> Observation:
        """Begin new episodes with the training progress of another run; raise ConfigError if its encoder differs."""
        self._check_encoder(state)
        return self._begin(self.env.begin_from(state))

    def _check_encoder(self, state: Mapping[str, Any]) -> None:
        assert self.encoder is not None, "call reset() before loading the state of another run"
        if state.get("encoder") != self.encoder.digest:
            problem = "the policy was trained with different encoder weights"
            raise ConfigError(problem, key="pretrained.init_from", hint="Try the original encoder file")
