"""Envs of Gymnasium, EnvPool and Stable-Baselines3's vector interface, stepped on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError, TaskError, first_line

try:
    import gymnasium
    from gymnasium.spaces import Dict
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
    from gymnasium.vector.utils import concatenate, create_empty_array
except ModuleNotFoundError:
    raise ConfigError("task=Gymnasium needs gymnasium: pip install 'gpusim-rl[gymnasium]'") from None

from gpusim_rl.connect.checked_env import END_INFO, HANGS_S, MOST_NUMBERS, WRONG, conform, numbers_of, raised, returned
from gpusim_rl.connect.gymnasium_spaces import (
    actions_of,
    flat_size,
    flatten,
    numeric,
    picture_shape,
    pictures,
    split_pictures,
)
from gpusim_rl.connect.library_config import LibraryConfig, require_shape
from gpusim_rl.connect.vector_envs import adapt, make, time_limit_of
from gpusim_rl.env.environment import Environment, Observation, Step
from gpusim_rl.settings.schema import EnvConfig

logger = logging.getLogger(__name__)

Array = np.ndarray
EVALUATED_STEPS = 10_000  # length of an evaluation of envs without a time limit [control steps]
REPEATED_ENDS = 10  # episodes whose last observation must equal the next first one before a warning
FlatObservation = dict[str, Array]
"""Observation groups: float32 [num_envs, size], or uint8 [num_envs, height, width, channels]."""

_float32_may_overflow = np.errstate(over="ignore", invalid="ignore")  # what overflows is infinite, and reported


class GymnasiumEnv(Environment):
    """Gymnasium: envs of other libraries, by their id in Gymnasium or EnvPool, or from a function of yours.

    Args:
        envs: Vector env of Gymnasium (>= 1.1), EnvPool (Gymnasium's interface) or Stable-Baselines3.
        seed: Seed of the first reset.
        name: Name of the envs in messages.
        max_episode_steps: Time limit [control steps]; None: the limit that the envs declare.

    Raises:
        ConfigError: A space or the autoreset mode is not supported.
    """

    Config: ClassVar[type] = LibraryConfig
    library = "Gymnasium"
    resumable, final_images = False, True

    def __init__(self, envs: Any, *, seed: int, name: str = "", max_episode_steps: int | None = None) -> None:
        self.name = name or type(envs).__name__
        self._given, self._envs = envs, adapt(envs, self.name)
        self._observed = self._envs.single_observation_space
        self._seed = seed
        self.device = torch.device("cpu")
        self.num_envs = self._envs.num_envs
        self._limit = max_episode_steps
        limit = max_episode_steps or time_limit_of(self._envs)
        self.max_episode_length = int(limit or EVALUATED_STEPS)
        self.steps_between_truncations = 1  # an env may truncate its episode whenever it wants
        words = f"episode {limit} steps at most" if limit else "no time limit"
        self.summary = f"{self.name}, {words}"
        if not limit:
            ends = f"its episodes end when it says so, and an evaluation after {EVALUATED_STEPS} steps"
            logger.warning("%s has no time limit: %s. Try env.max_episode_steps=<steps>", self.name, ends)
        self.frames_per_s = float(self._envs.metadata.get("render_fps") or self.frames_per_s)
        space: Any = self._observed
        self._grouped = isinstance(space, Dict) and "policy" in space.spaces and set(space) <= {"policy", "critic"}
        groups = space if self._grouped else {"policy": space}
        observed, left_out = numeric(groups["policy"])
        if left_out:
            logger.warning("%s: observations %s are no numbers, and are left out", self.name, ", ".join(left_out))
        numbers, self._pictures = split_pictures(observed)
        self.images = {
            group: picture_shape(observed if key is None else observed[key]) for group, key in self._pictures.items()
        }
        self._groups: dict[str, gymnasium.Space[Any]] = {"policy": numbers}
        if "critic" in set(groups):
            self._groups["critic"] = groups["critic"]
        self.obs_sizes = {group: flat_size(space, self.name) for group, space in self._groups.items()}
        self.action_space, self._to_library = actions_of(self._envs.single_action_space, self.name)
        self.num_actions = self.action_space.size
        declared = self._envs.metadata.get("autoreset_mode")
        try:
            mode = AutoresetMode.NEXT_STEP if declared is None else AutoresetMode(declared)
        except ValueError:
            raise ConfigError(f"{self.name}: autoreset_mode {declared!r} is none of {[*AutoresetMode]}") from None
        self._mode_known, self._same_step = declared is not None, mode == AutoresetMode.SAME_STEP
        # Gymnasium's own classes reset by mask in every mode; of others, only the mode that needs it promises that.
        is_gymnasiums = isinstance(self._envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self._by_mask = is_gymnasiums or mode == AutoresetMode.DISABLED
        self._resetting = np.zeros(self.num_envs, dtype=bool)  # envs whose next step is a reset
        self._steps = np.zeros(self.num_envs, dtype=np.int64)  # of the episodes under way
        self._stat_names: list[str] = []
        self._warned = self._failed = self._moved = False  # moved: an observation has changed
        self._repeated_ends: int | None = 0  # last observations that equal the next first ones; None: not all do

    @classmethod
    def from_settings(cls, cfg: EnvConfig, *, num_envs: int, seed: int, device: torch.device) -> Environment:
        """Make the envs of the settings; raise ConfigError if they are unknown or not supported."""
        if cfg.cfg or cfg.physics is not None:
            key = "cfg" if cfg.cfg else "physics"
            raise ConfigError(f"env.{key} has no effect with task=Gymnasium. Try env.kwargs, or task=IsaacLab")
        seed = first_seed(seed)
        envs, name = make(cfg, num_envs, seed)
        env = cls(envs, seed=seed, name=name, max_episode_steps=cfg.max_episode_steps)
        if env.num_envs != num_envs:
            env.close()
            raise ConfigError(f"{name} made {env.num_envs} envs, but num_envs={num_envs}; try num_envs={env.num_envs}")
        return env

    @classmethod
    def adopt(cls, envs: Any, cfg: EnvConfig, *, seed: int) -> GymnasiumEnv:
        """Wrap vector envs from a user's script."""
        return cls(envs, seed=first_seed(seed), max_episode_steps=cfg.max_episode_steps)

    def reset(self) -> Observation:
        """Begin an episode in every env; raise TaskError for invalid or non-finite observations."""
        self._resetting[:] = False
        self._steps[:] = 0
        obs = self._flat(self._call("reset", seed=self._seed)[0], "reset()")
        self._require_finite(obs, np.ones(self.num_envs, dtype=bool))
        self._first_row = {group: value[:1].copy() for group, value in obs.items()}
        return _tensors(obs)

    def step(self, action: Tensor) -> Step:
        """Advance all envs by one control step and reset those whose episode ended.

        Args:
            action: Actions, [num_envs, num_actions]: for a box, in [-1, 1], clamped and scaled to its bounds (unbounded
                dimensions pass through); for a discrete space, int64 indices from 0. ValueError for another shape.

        Raises:
            TaskError: A result is not of its space.
        """
        require_shape(action, self.num_envs, self.num_actions)
        chosen = action.detach().cpu().numpy()
        bad_action = ~_finite({"action": chosen})
        sent = self._to_library(np.where(bad_action[:, None], 0, chosen) if _any(bad_action) else chosen)
        library_obs, rewards, terminations, truncations, infos = self._call("step", sent)
        obs = self._flat(library_obs, "step()")
        reward = self._column(rewards, "rewards", np.float32)
        terminated = self._column(terminations, "terminated", bool)
        truncated = self._column(truncations, "truncated", bool)
        ended = terminated | truncated
        if not self._mode_known and _any(ended):  # as vector envs of Gymnasium 0.29
            self._same_step, self._mode_known = _final(infos) is not None, True
        begun = ended if self._same_step else np.zeros(self.num_envs, dtype=bool)
        self._end_at_limit(ended, truncated)
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
        stats = self._stats(infos, (terminated | truncated) & ended)
        obs = self._begin_episodes(done & ~begun & ~skipped, obs)
        self._steps[done] = 0
        if _any(diverged):
            for value in (reward, *_numbers(final_obs)):
                value[diverged] = 0.0
        return Step(
            obs=_tensors(obs),
            final_obs=_tensors(final_obs),
            reward=torch.from_numpy(reward),
            terms={},
            stats=stats,
            terminated=torch.from_numpy(terminated),
            truncated=torch.from_numpy(truncated),
            diverged=torch.from_numpy(diverged),
            bad_action=torch.from_numpy(bad_action),
            done=torch.from_numpy(done),
            incomplete=torch.from_numpy(diverged.copy()),
            skipped=None if self._by_mask else torch.from_numpy(skipped),
        )

    def _final_obs(self, obs: FlatObservation, begun: Array, infos: Mapping[str, Any]) -> FlatObservation:
        """Return the observations before any reset."""
        final_obs = {group: value.copy() for group, value in obs.items()}
        env_ids = np.flatnonzero(begun).tolist() if self._same_step else []
        last_obs = _final(infos)
        if env_ids and last_obs is None:
            raise TaskError(f"{self.name} resets in the same step and gives no infos['final_obs']")
        for env in env_ids:
            with self._space_errors("step()"):
                last = conform(self._observed, _of_env(last_obs, env))
                row = concatenate(self._observed, [last], create_empty_array(self._observed, 1))
                for group, value in self._groups_of(row, 1).items():
                    final_obs[group][env] = value[0]
        if self._same_step and self._repeated_ends is not None:
            self._check_ends(obs, final_obs, begun)
        return final_obs

    def _check_ends(self, obs: FlatObservation, final_obs: FlatObservation, begun: Array) -> None:
        """Warn if every last observation equals the next first one: the envs may have overwritten it."""
        differ = any((value[begun] != final_obs[group][begun]).any() for group, value in obs.items())
        ends = None if differ else (self._repeated_ends or 0) + int(begun.sum())
        self._moved |= any((value != self._first_row[group]).any() for group, value in obs.items())
        if ends is not None and ends >= REPEATED_ENDS and self._moved:
            equal = f"each last observation of {ends} episodes equals the first one of the next"
            wrong = "a reset seems to overwrite it, and time limits are valued wrongly"
            advice = "Try a copy of the observation in step() of the env, or AutoresetMode.DISABLED"
            logger.warning("%s: %s: %s. %s", self.name, equal, wrong, advice)
            ends = None
        self._repeated_ends = ends

    def _end_at_limit(self, ended: Array, truncated: Array) -> None:
        """Truncate episodes at the user's time limit."""
        self._steps += ~self._resetting
        if self._limit is None or not _any(over := (self._steps >= self._limit) & ~ended & ~self._resetting):
            return
        if not self._by_mask:
            longer = f"an episode is longer than env.max_episode_steps={self._limit}, and only its library can reset it"
            advice = "Try the limit there (gymnasium.wrappers.TimeLimit), or AutoresetMode.DISABLED"
            raise TaskError(f"{self.name}: {longer}. {advice}")
        truncated |= over

    def _stats(self, infos: Mapping[Any, Any], ended: Array) -> dict[str, Tensor]:
        """Return the numbers in the last infos of episodes; NaN for envs whose episode continues."""
        if not _any(ended) and not self._stat_names:
            return {}
        missing = np.full(self.num_envs, np.nan, dtype=np.float32)
        stats = {name: missing.copy() for name in self._stat_names}
        of_ends = infos.get("final_info", {}) if self._same_step else infos
        for env in np.flatnonzero(ended).tolist():
            for name, value in _numbers_of_end(of_ends, env):
                if name in stats or len(stats) < MOST_NUMBERS:
                    stats.setdefault(name, missing.copy())[env] = value
        self._stat_names = [*stats]
        return {name: torch.from_numpy(value) for name, value in stats.items()}

    def _begin_episodes(self, where: Array, obs: FlatObservation) -> FlatObservation:
        """Begin episodes now, or with the next step if the library cannot reset single envs."""
        self._resetting[:] = where & (not self._by_mask)
        if self._by_mask and _any(where):
            first_obs = self._flat(self._call("reset", options={"reset_mask": where})[0], "reset()")
            for group, value in first_obs.items():
                obs[group][where] = value[where]
            self._require_finite(obs, where)
        for value in _numbers(obs):
            value[~np.isfinite(value)] = 0.0
        return obs

    def _call(self, call: str, *args: Any, **kwargs: Any) -> Any:
        envs, level = self._envs, gymnasium.logger.min_level
        self._failed = True  # until it returns, also where Ctrl-C ends it
        try:
            if isinstance(envs, AsyncVectorEnv):
                gymnasium.logger.min_level = gymnasium.logger.ERROR + 1  # it logs a traceback of each process
                getattr(envs, f"{call}_async")(*args, **kwargs)
                result = getattr(envs, f"{call}_wait")(timeout=HANGS_S)
            else:
                result = getattr(envs, call)(*args, **kwargs)
        except Exception as error:
            raise raised(error, self.name, f"{call}()") from error
        finally:
            gymnasium.logger.min_level = level
        self._failed = False
        return result

    def _flat(self, obs: Any, call: str) -> FlatObservation:
        with self._space_errors(call):
            return self._groups_of(obs, self.num_envs)

    @_float32_may_overflow
    def _groups_of(self, obs: Any, num_envs: int) -> FlatObservation:
        groups = obs if self._grouped else {"policy": obs}
        flat = {group: flatten(space, groups[group], num_envs) for group, space in self._groups.items()}
        seen = groups["policy"]
        return flat | {group: pictures(seen if key is None else seen[key]) for group, key in self._pictures.items()}

    @contextmanager
    def _space_errors(self, call: str) -> Iterator[None]:
        try:
            yield
        except WRONG as error:
            raise returned(error, self.name, call) from None

    @_float32_may_overflow
    def _column(self, values: Any, kind: str, dtype: Any) -> Array:
        column = np.asarray(values)
        if column.size != self.num_envs or column.shape[:1] != (self.num_envs,) or column.dtype.kind not in "biuf":
            got = f"{kind} of shape {list(column.shape)} and type {column.dtype}"
            raise TaskError(f"{self.name}: step() returned {got}, expected numbers, [{self.num_envs}]")
        return column.reshape(self.num_envs).astype(dtype)

    def _require_finite(self, obs: FlatObservation, where: Array) -> None:
        bad = ~_finite(obs) & where
        if bad.any():
            env = int(bad.argmax())
            raise TaskError(f"{self.name}: reset() returned an observation that is not finite (env {env})")

    def _warn_once(self, env: int, obs: FlatObservation, reward: Array) -> None:
        if self._warned:
            return
        self._warned = True
        bad = [f"observation {group!r}" for group in self._groups if not np.isfinite(obs[group][env]).all()]
        if not np.isfinite(reward[env]):
            bad.append("reward")
        what = f"a NaN or an infinite number ({' and '.join(bad)} of env {env})"
        then = "The sample is left out and counted in sim/diverged, and a new episode begins; this is reported once"
        logger.warning("%s: step() returned %s. %s", self.name, what, then)

    def render(self) -> list[Array]:
        """Return a picture of each env, for envs made with `render_mode="rgb_array"`; else raise ConfigError."""
        try:
            pictures = [np.asarray(picture) for picture in self._envs.render() or ()]
        except Exception as error:  # of an env, or of the library that draws it
            raise ConfigError(f"{self.name} cannot be drawn: {first_line(error)}") from error
        if len(pictures) != self.num_envs or any(picture.ndim != 3 for picture in pictures):
            raise ConfigError(f"{self.name} draws no pictures of its envs (render_mode rgb_array)")
        return pictures

    def close(self) -> None:
        """Close the envs; log errors of their own as one line."""
        try:
            if not self._failed:
                self._envs.close()
        except Exception as error:
            logger.warning("%s", raised(error, self.name, "close()"))
        for process in getattr(self._envs.unwrapped, "processes", ()) if self._failed else ():
            process.kill()
        for envs in (self._envs.unwrapped, getattr(self._given, "unwrapped", self._given)):
            envs.closed = True  # else AsyncVectorEnv closes once more as it is deleted


def first_seed(seed: int) -> int:
    """Return the first env's seed; the other envs' seeds follow it.

    Spread by multiples of the golden ratio: 1,000 consecutive seeds share no env seed at 100,000 envs each.
    """
    return seed * _GOLDEN % _SEEDS


_SEEDS = 2**31 - 2**20  # the last env's is below 2^31, as EnvPool's must be
_GOLDEN = round(_SEEDS * (5**0.5 - 1) / 2)


def _final(infos: Mapping[str, Any]) -> Any:
    """Return last observations by the key of Gymnasium 1.0 or of earlier versions; None without either."""
    return infos.get("final_obs", infos.get("final_observation"))


def _numbers_of_end(infos: Any, env: int) -> Iterable[tuple[str, float]]:
    info = _of_env(infos, env)
    told = info.get(END_INFO) if isinstance(info, Mapping) else None
    return numbers_of(info) if told is None else told


def _of_env(infos: Any, env: int) -> Any:
    """Return one env's entry of infos: a dict of arrays with masks `_<key>`, or a sequence."""
    if not isinstance(infos, Mapping):
        return infos[env]
    found = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        of_key = isinstance(key, str) and key.startswith("_") and key[1:] in infos
        if of_key or isinstance(value, str) or (isinstance(mask, np.ndarray) and mask.dtype == bool and not mask[env]):
            continue
        with suppress(IndexError, KeyError, TypeError):
            found[key] = _of_env(value, env)
    return found


def _finite(obs: FlatObservation) -> Array:
    """Return which envs have finite observations, bool [num_envs]."""
    finite = [np.logical_and.reduce(np.isfinite(value), axis=1) for value in _numbers(obs)]
    return finite[0] if len(finite) == 1 else np.logical_and.reduce(finite)


def _numbers(obs: FlatObservation) -> list[Array]:
    return [value for value in obs.values() if value.dtype != np.uint8]


def _any(mask: Array) -> bool:
    """Return whether any entry is set; `any` is six times slower for few envs."""
    return bool(np.count_nonzero(mask))


def _tensors(obs: FlatObservation) -> Observation:
    return {group: torch.from_numpy(value) for group, value in obs.items()}
