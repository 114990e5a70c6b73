"""Environments of other libraries as ours: of Gymnasium, of EnvPool, and vector envs in Stable-Baselines3's interface.

`task=Gymnasium env.id=CartPole-v1` trains on them. They step on the CPU, whatever device the learner is on.
docs/connect.md says what becomes of spaces, of resets and of numbers that are not finite.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError, TaskError, first_line

try:
    import gymnasium
    from gymnasium.spaces import Dict, Space
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
except ModuleNotFoundError:
    raise ConfigError("task=Gymnasium needs gymnasium: pip install 'gpusim-rl[gymnasium]'") from None

from gpusim_rl.connect.gymnasium_spaces import actions_of, flat_size, flatten, picture_shape, pictures, split_pictures
from gpusim_rl.connect.library_config import LibraryConfig
from gpusim_rl.connect.vector_envs import adapt, make
from gpusim_rl.env.environment import Environment, Observation, Step
from gpusim_rl.env.half_batches import HalfBatches
from gpusim_rl.settings.schema import EnvConfig

logger = logging.getLogger(__name__)

Array = np.ndarray
FlatObservation = dict[str, Array]
"""Observation groups by name: float32 [num_envs, size], or uint8 [num_envs, height, width, channels]."""


class GymnasiumEnv(Environment):
    """Gymnasium: envs of other libraries, by their id in Gymnasium or EnvPool, or from a function of yours.

    Args:
        envs: Vector env of Gymnasium (>= 1.1), EnvPool (Gymnasium's interface) or Stable-Baselines3.
        seed: Seed of the first reset.
        name: Name of the envs in messages.
        max_episode_steps: Time limit [control steps]; None if the envs tell it.
        first: Number of the first env in messages.

    Raises:
        ConfigError: Something in them cannot be represented; the message says what.
    """

    Config: ClassVar[type] = LibraryConfig
    library = "Gymnasium"
    resumable, final_images = False, True

    def __init__(
        self, envs: Any, *, seed: int, name: str = "", max_episode_steps: int | None = None, first: int = 0
    ) -> None:
        self.name = name or type(envs).__name__
        self._envs = adapt(envs, self.name)
        self._seed = seed
        self._first = first
        self.device = torch.device("cpu")
        self.num_envs = self._envs.num_envs
        spec = self._envs.spec
        limit = max_episode_steps or (spec.max_episode_steps if spec is not None else None)
        if limit is None:
            raise ConfigError(
                f"{self.name} does not tell its time limit. Try env.max_episode_steps=<steps>: an evaluation ends there"
            )
        self.max_episode_length = int(limit)
        self.steps_between_truncations = 1  # an env may truncate its episode whenever it wants
        self.summary = f"{self.name}, episode {self.max_episode_length} steps at most"
        self.frames_per_s = float(self._envs.metadata.get("render_fps") or self.frames_per_s)
        space: Any = self._envs.single_observation_space
        self._grouped = isinstance(space, Dict) and "policy" in space.spaces and set(space) <= {"policy", "critic"}
        groups = space if self._grouped else {"policy": space}
        observed: Any = groups["policy"]
        numbers, self._pictures = split_pictures(observed)
        self.images = {
            group: picture_shape(observed if key is None else observed[key]) for group, key in self._pictures.items()
        }
        self._groups: dict[str, Space[Any]] = {"policy": numbers}
        if "critic" in set(groups):
            self._groups["critic"] = groups["critic"]
        self.obs_sizes = {group: flat_size(space, self.name) for group, space in self._groups.items()}
        self.action_space, self._to_library = actions_of(self._envs.single_action_space, self.name)
        self.num_actions = self.action_space.size
        mode = self._envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)  # what 1.0 did, without that entry
        self._same_step = mode == AutoresetMode.SAME_STEP
        # Gymnasium's own classes reset by mask in every mode; of others, only the mode that needs it promises that.
        is_gymnasiums = isinstance(self._envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self._by_mask = is_gymnasiums or mode == AutoresetMode.DISABLED
        self._resetting = np.zeros(self.num_envs, dtype=bool)  # envs whose next step is a reset
        self._warned = False

    @classmethod
    def from_settings(cls, cfg: EnvConfig, *, num_envs: int, seed: int, device: torch.device) -> Environment:
        """Makes the envs that the settings name, on the CPU; with `env.overlap` in two halves.

        Raises:
            ConfigError: There are no such envs, their package is missing, or they cannot be represented.
        """
        if cfg.cfg or cfg.physics is not None:
            key = "cfg" if cfg.cfg else "physics"
            raise ConfigError(f"env.{key} has no effect with task=Gymnasium. Try env.kwargs, or task=IsaacLab")
        if not cfg.overlap:
            return cls._make(cfg, num_envs, seed)
        if num_envs % 2:
            raise ConfigError(
                f"env.overlap=true steps two halves: num_envs must be even, got {num_envs}; try {num_envs + 1}"
            )
        half, halves = num_envs // 2, list[GymnasiumEnv]()
        try:
            for first in (0, half):
                halves.append(cls._make(cfg, half, seed + first, first))
        except ConfigError as error:
            for env in halves:
                env.close()
            raise ConfigError(f"env.overlap=true makes two halves, of {half} envs each: {error}") from None
        return HalfBatches(*halves)

    @classmethod
    def adopt(cls, envs: Any, cfg: EnvConfig, *, seed: int) -> GymnasiumEnv:
        """Returns vector envs that a script of the user has made as ours."""
        return cls(envs, seed=seed, max_episode_steps=cfg.max_episode_steps)

    @classmethod
    def _make(cls, cfg: EnvConfig, num_envs: int, seed: int, first: int = 0) -> GymnasiumEnv:
        envs, name = make(cfg, num_envs, seed)
        env = cls(envs, seed=seed, name=name, max_episode_steps=cfg.max_episode_steps, first=first)
        if env.num_envs != num_envs:
            env.close()
            raise ConfigError(f"{name} made {env.num_envs} envs, but num_envs={num_envs}; try num_envs={env.num_envs}")
        return env

    def reset(self) -> Observation:
        """Begins an episode in every env.

        Raises:
            TaskError: The observations are not of their space, or not finite.
        """
        self._resetting[:] = False
        obs = self._flat(self._envs.reset(seed=self._seed)[0], "reset()")
        self._require_finite(obs, np.ones(self.num_envs, dtype=bool))
        return _tensors(obs)

    def step(self, action: Tensor) -> Step:
        """Advances all envs by one control step and resets those whose episode ended.

        Args:
            action: Actions, [num_envs, num_actions]: of a box, in [-1, 1], clamped and scaled to its bounds (where it
                has none, as they are); of a discrete space, int64 indices from 0.

        Raises:
            ValueError: The actions have another shape.
            TaskError: What the envs returned is not of their spaces.
        """
        if list(action.shape) != [self.num_envs, self.num_actions]:
            raise ValueError(
                f"step() needs actions of shape {[self.num_envs, self.num_actions]}, got {list(action.shape)}"
            )
        chosen = action.detach().cpu().numpy()
        bad_action = ~_finite({"action": chosen})
        sent = self._to_library(np.where(bad_action[:, None], 0, chosen) if _any(bad_action) else chosen)
        library_obs, rewards, terminations, truncations, infos = self._envs.step(sent)
        obs = self._flat(library_obs, "step()")
        reward = self._column(rewards, "rewards").astype(np.float32)
        terminated = self._column(terminations, "terminated").astype(bool)
        truncated = self._column(truncations, "truncated").astype(bool)
        begun = terminated | truncated if self._same_step else np.zeros(self.num_envs, dtype=bool)
        final_obs = self._final_obs(obs, begun, infos)

        not_finite = ~(_finite(final_obs) & np.isfinite(reward))
        if _any(not_finite):
            self._warn_once(int(not_finite.argmax()), final_obs, reward)
        # A step in which the library resets an env, and ignores the action, is no sample.
        skipped = self._resetting.copy()
        diverged = not_finite | bad_action | skipped
        truncated &= ~terminated & ~diverged
        terminated &= ~diverged
        done = terminated | truncated | diverged
        obs = self._begin_episodes(done & ~begun & ~skipped, obs)
        if _any(diverged):
            for value in (reward, *_numbers(final_obs)):
                value[diverged] = 0.0
        return Step(
            obs=_tensors(obs),
            final_obs=_tensors(final_obs),
            reward=torch.from_numpy(reward),
            terms={},
            stats={},
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            diverged=torch.from_numpy(diverged),
            bad_action=torch.from_numpy(bad_action),
            done=torch.from_numpy(done),
            incomplete=torch.from_numpy(diverged.copy()),
            skipped=None if self._by_mask else torch.from_numpy(skipped),
        )

    def _final_obs(self, obs: FlatObservation, begun: Array, infos: Mapping[str, Any]) -> FlatObservation:
        """Returns the observations at the end of a step, with the true last one where the library has reset an env."""
        final_obs = {group: value.copy() for group, value in obs.items()}
        env_ids = np.flatnonzero(begun).tolist() if self._same_step else []
        if env_ids and "final_obs" not in infos:
            raise TaskError(f"{type(self._envs).__name__} resets in the same step and gives no infos['final_obs']")
        for env in env_ids:
            with self._space_errors("step()"):
                last_obs = _of_env(infos["final_obs"], env)
                groups = last_obs if self._grouped else {"policy": last_obs}
                for group, space in self._groups.items():
                    final_obs[group][env] = gymnasium.spaces.flatten(space, groups[group]) if space else ()
                for group, picture in self._drawn(groups["policy"]):
                    final_obs[group][env] = pictures(picture[None])[0]
        return final_obs

    def _begin_episodes(self, where: Array, obs: FlatObservation) -> FlatObservation:
        """Begins an episode in some envs, now or, where the library can only do that, with the next step."""
        self._resetting[:] = where & (not self._by_mask)
        if self._by_mask and _any(where):
            first_obs = self._flat(self._envs.reset(options={"reset_mask": where})[0], "reset()")
            for group, value in first_obs.items():
                obs[group][where] = value[where]
            self._require_finite(obs, where)
        for value in _numbers(obs):
            finite = np.isfinite(value)
            if not finite.all():
                value[~finite] = 0.0
        return obs

    def _flat(self, obs: Any, call: str) -> FlatObservation:
        """Returns the library's observations as our groups, in memory of their own."""
        with self._space_errors(call):
            groups = obs if self._grouped else {"policy": obs}
            flat = {group: flatten(space, groups[group], self.num_envs) for group, space in self._groups.items()}
            return flat | {group: pictures(picture) for group, picture in self._drawn(groups["policy"])}

    def _drawn(self, obs: Any) -> Iterator[tuple[str, Array]]:
        """Returns the pictures in an observation by group."""
        return ((group, np.asarray(obs if key is None else obs[key])) for group, key in self._pictures.items())

    @contextmanager
    def _space_errors(self, call: str) -> Iterator[None]:
        """Makes one line of the error that an observation outside of its space has led to."""
        try:
            yield
        except (IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
            raise TaskError(
                f"{self.name}: {call} returned observations that are not of their space: {reason}"
            ) from None

    def _column(self, values: Array, kind: str) -> Array:
        """Returns one number for each env, as a step gave them."""
        column = np.asarray(values)
        if column.shape != (self.num_envs,):
            raise TaskError(
                f"{self.name}: step() returned {kind} of shape {list(column.shape)}, expected [{self.num_envs}]"
            )
        return column

    def _require_finite(self, obs: FlatObservation, where: Array) -> None:
        """Stops where a new episode begins with a number that is not finite: nothing could be done about it."""
        bad = ~_finite(obs) & where
        if bad.any():
            raise TaskError(
                f"{self.name}: reset() returned an observation that is not finite"
                f" (env {self._first + int(bad.argmax())})"
            )

    def _warn_once(self, env: int, obs: FlatObservation, reward: Array) -> None:
        """Names the numbers of an env that are not finite, the first time there are any."""
        if self._warned:
            return
        self._warned = True
        bad = [f"observation {group!r}" for group in self._groups if not np.isfinite(obs[group][env]).all()]
        if not np.isfinite(reward[env]):
            bad.append("reward")
        logger.warning(
            "%s: step() returned a NaN or an infinite number (%s of env %d). The sample is left out and counted in"
            " sim/diverged, and a new episode begins; this is told once",
            self.name,
            " and ".join(bad),
            self._first + env,
        )

    def render(self) -> list[Array]:
        """Returns pictures of the envs, if they were made with `render_mode="rgb_array"`.

        Raises:
            ConfigError: They have none, or a package for drawing is missing.
        """
        try:
            pictures = [np.asarray(picture) for picture in self._envs.render() or ()]
        except (gymnasium.error.Error, NotImplementedError) as error:
            raise ConfigError(f"{self.name} cannot be drawn: {first_line(error)}") from None
        if len(pictures) != self.num_envs or any(picture.ndim != 3 for picture in pictures):
            raise ConfigError(f"{self.name} draws no pictures of its envs (render_mode rgb_array)")
        return pictures

    def close(self) -> None:
        """Ends the envs."""
        self._envs.close()


def _of_env(infos: Any, env: int) -> Any:
    """Returns the entry of one env in infos, which hold a dict of arrays or an array of dicts."""
    if isinstance(infos, Mapping):
        return {key: _of_env(value, env) for key, value in infos.items() if not key.startswith("_")}
    return infos[env]


def _finite(obs: FlatObservation) -> Array:
    """Returns which envs have finite observations, bool [num_envs]."""
    finite = [np.logical_and.reduce(np.isfinite(value), axis=1) for value in _numbers(obs)]
    return finite[0] if len(finite) == 1 else np.logical_and.reduce(finite)


def _numbers(obs: FlatObservation) -> list[Array]:
    """Returns the groups that are not of pictures."""
    return [value for value in obs.values() if value.dtype != np.uint8]


def _any(mask: Array) -> bool:
    """Returns whether a mask holds anywhere; `any` takes six times as long for few envs."""
    return bool(np.count_nonzero(mask))


def _tensors(obs: FlatObservation) -> Observation:
    return {group: torch.from_numpy(value) for group, value in obs.items()}
