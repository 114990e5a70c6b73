"""Envs of Gymnasium, EnvPool and Stable-Baselines3's vector interface, stepped on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
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
    hint = "Try pip install 'gpusim-rl[gymnasium]'"
    raise ConfigError("gymnasium is missing", key="task=Gymnasium", hint=hint) from None

from gpusim_rl.connect import gymnasium_spaces as spaces
from gpusim_rl.connect.checked_env import END_INFO, HANGS_S, MOST_NUMBERS, WRONG, conform, numbers_of, raised, returned
from gpusim_rl.connect.library_config import LibraryConfig, require_shape
from gpusim_rl.connect.vector_envs import adapt, make, time_limit_of
from gpusim_rl.env.environment import Environment, Observation, Step
from gpusim_rl.settings.schema import EnvConfig

logger = logging.getLogger(__name__)

Array = np.ndarray
EVALUATED_STEPS = 10_000  # evaluation length for envs without a time limit [control steps]
REPEATED_ENDS = 10  # warn after this many episodes whose last observation equals the first of the next episode
FlatObservation = dict[str, Array]
"""Observation groups: float32 [num_envs, size], or uint8 [num_envs, height, width, channels]."""

_float32_may_overflow = np.errstate(over="ignore", invalid="ignore")  # infinite values are reported later


class GymnasiumEnv(Environment):
    """Gymnasium: envs of other libraries, by their id in Gymnasium or EnvPool, or from your own function.

    Args:
        envs: Vector env of Gymnasium (>= 1.1), EnvPool (Gymnasium's interface) or Stable-Baselines3.
        seed: Seed of the first reset.
        name: Name of the envs in messages.
        max_episode_steps: Time limit [control steps]; None: the envs' declared limit.
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
        self.steps_between_truncations = 1  # an env may truncate its episode at any step
        self.summary = f"{self.name}, {f'episode {limit} steps at most' if limit else 'no time limit'}"
        if not limit:
            message = "%s has no time limit: evaluations stop after %d steps. Set env.max_episode_steps to change this"
            logger.warning(message, self.name, EVALUATED_STEPS)
        self.frames_per_s = float(self._envs.metadata.get("render_fps") or self.frames_per_s)
        space: Any = self._observed
        self._grouped = isinstance(space, Dict) and "policy" in space.spaces and set(space) <= {"policy", "critic"}
        groups = space.spaces if self._grouped else {"policy": space}
        observed, dropped = spaces.numeric(groups["policy"])
        if dropped:
            logger.warning("%s: dropped non-numeric observations %s", self.name, ", ".join(dropped))
        numbers, self._pictures = spaces.split_pictures(observed)
        seen = {group: observed if key is None else observed[key] for group, key in self._pictures.items()}
        self.images = {group: spaces.picture_shape(space) for group, space in seen.items()}
        self._groups: dict[str, gymnasium.Space[Any]] = {"policy": numbers}
        if "critic" in groups:
            self._groups["critic"] = groups["critic"]
        self.obs_sizes = {group: spaces.flat_size(space, self.name) for group, space in self._groups.items()}
        self.action_space, self._to_library = spaces.actions_of(self._envs.single_action_space, self.name)
        self.num_actions = self.action_space.size
        declared = self._envs.metadata.get("autoreset_mode")
        try:
            mode = AutoresetMode.NEXT_STEP if declared is None else AutoresetMode(declared)
        except ValueError:
            modes = " or ".join(mode.value for mode in AutoresetMode)
            raise ConfigError(key=f"{self.name}: autoreset_mode", expected=modes, got=declared) from None
        self._mode_known, self._same_step = declared is not None, mode == AutoresetMode.SAME_STEP
        # Gymnasium's own classes can reset by mask in every autoreset mode, others only with autoreset disabled.
        is_gymnasiums = isinstance(self._envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self._by_mask = is_gymnasiums or mode == AutoresetMode.DISABLED
        self._resetting = np.zeros(self.num_envs, dtype=bool)  # envs whose next step is a reset
        self._steps = np.zeros(self.num_envs, dtype=np.int64)  # steps of the current episodes
        self._stat_names: list[str] = []
        self._warned = self._failed = self._moved = False  # moved: an observation has changed
        self._repeated_ends: int | None = 0  # last observations equal to the next episode's first; None: some differ

    @classmethod
    def from_settings(cls, cfg: EnvConfig, *, num_envs: int, seed: int, device: torch.device) -> Environment:
        """Make envs from settings."""
        if cfg.cfg or cfg.physics is not None:
            key = "env.cfg" if cfg.cfg else "env.physics"
            raise ConfigError("has no effect with task=Gymnasium", key=key, hint="Try env.kwargs, or task=IsaacLab")
        seed = first_seed(seed)
        envs, name = make(cfg, num_envs, seed)
        env = cls(envs, seed=seed, name=name, max_episode_steps=cfg.max_episode_steps)
        if env.num_envs != num_envs:
            env.close()
            hint = f"Try num_envs={env.num_envs}"
            raise ConfigError(f"made {env.num_envs} envs instead of {num_envs}", key=name, hint=hint)
        return env

    @classmethod
    def adopt(cls, envs: Any, cfg: EnvConfig, *, seed: int) -> GymnasiumEnv:
        """Wrap vector envs from a user's script."""
        return cls(envs, seed=first_seed(seed), max_episode_steps=cfg.max_episode_steps)

    def reset(self) -> Observation:
        """Begin an episode in every env and return the observations; raise TaskError if they are invalid."""
        self._resetting[:] = False
        self._steps[:] = 0
        obs = self._flat(self._call("reset", seed=self._seed)[0], "reset()", self.num_envs)
        self._require_finite(obs, np.ones(self.num_envs, dtype=bool))
        self._first_row = {group: value[:1].copy() for group, value in obs.items()}
        return _tensors(obs)

    def step(self, action: Tensor) -> Step:
        """Advance all envs by one control step and reset those whose episode ended.

        Actions [num_envs, num_actions] are int64 indices from 0 or, for a box, values in [-1, 1], clamped and scaled to
        the box's bounds (unbounded dimensions pass through). Raises TaskError for an invalid result.
        """
        require_shape(action, self.num_envs, self.num_actions)
        chosen = action.detach().cpu().numpy()
        bad_action = ~_finite({"action": chosen})
        sent = self._to_library(np.where(bad_action[:, None], 0, chosen) if _any(bad_action) else chosen)
        library_obs, rewards, terminations, truncations, infos = self._call("step", sent)
        obs = self._flat(library_obs, "step()", self.num_envs)
        reward = self._column(rewards, "rewards", np.float32)
        terminated = self._column(terminations, "terminated", bool)
        truncated = self._column(truncations, "truncated", bool)
        ended = terminated | truncated
        if not self._mode_known and _any(ended):  # vector envs of Gymnasium 0.29 declare no mode
            self._same_step, self._mode_known = _final(infos) is not None, True
        begun = ended if self._same_step else np.zeros(self.num_envs, dtype=bool)
        self._end_at_limit(ended, truncated)
        final_obs = self._final_obs(obs, begun, infos)

        not_finite = ~(_finite(final_obs) & np.isfinite(reward))
        if _any(not_finite) and not self._warned:
            self._warn(int(not_finite.argmax()), final_obs, reward)
        # A step that resets an env and ignores the action is not a sample.
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
        columns = {"reward": reward, "terminated": terminated, "truncated": truncated, "diverged": diverged}
        columns |= {"bad_action": bad_action, "done": done, "incomplete": diverged.copy()}
        skips = None if self._by_mask else torch.from_numpy(skipped)
        groups, final_groups = _tensors(obs), _tensors(final_obs)
        return Step(obs=groups, final_obs=final_groups, terms={}, stats=stats, skipped=skips, **_tensors(columns))

    def _final_obs(self, obs: FlatObservation, begun: Array, infos: Mapping[str, Any]) -> FlatObservation:
        """Return the observations after the step, before any reset."""
        final_obs = {group: value.copy() for group, value in obs.items()}
        env_ids = np.flatnonzero(begun).tolist() if self._same_step else []
        last_obs = _final(infos)
        if env_ids and last_obs is None:
            raise TaskError("infos lack 'final_obs', which AutoresetMode.SAME_STEP requires", key=self.name)
        for env in env_ids:
            with self._space_errors("step()"):
                last = conform(self._observed, _entry(last_obs, env))
                row = concatenate(self._observed, [last], create_empty_array(self._observed, 1))
            for group, value in self._flat(row, "step()", 1).items():
                final_obs[group][env] = value[0]
        if self._same_step and self._repeated_ends is not None:
            self._check_ends(obs, final_obs, begun)
        return final_obs

    def _check_ends(self, obs: FlatObservation, final_obs: FlatObservation, begun: Array) -> None:
        """Warn if every last observation equals the next episode's first: reset() may have overwritten it."""
        differ = any((value[begun] != final_obs[group][begun]).any() for group, value in obs.items())
        ends = None if differ else (self._repeated_ends or 0) + int(begun.sum())
        self._moved |= any((value != self._first_row[group]).any() for group, value in obs.items())
        if ends is not None and ends >= REPEATED_ENDS and self._moved:
            problem = f"reset() seems to overwrite final observations ({ends} of {ends} equal the next episode's first)"
            hint = "Value targets at time limits are wrong. Try returning a copy from step(), or AutoresetMode.DISABLED"
            logger.warning("%s: %s. %s", self.name, problem, hint)
            ends = None
        self._repeated_ends = ends

    def _end_at_limit(self, ended: Array, truncated: Array) -> None:
        self._steps += ~self._resetting
        if self._limit is None or not _any(over := (self._steps >= self._limit) & ~ended & ~self._resetting):
            return
        if not self._by_mask:
            problem = f"cannot end an episode at env.max_episode_steps={self._limit}, because the envs reset themselves"
            hint = "Try gymnasium.wrappers.TimeLimit on each env, or AutoresetMode.DISABLED"
            raise TaskError(problem, key=self.name, hint=hint)
        truncated |= over

    def _stats(self, infos: Mapping[Any, Any], ended: Array) -> dict[str, Tensor]:
        """Return the numbers in ended episodes' infos, [num_envs] each; NaN for envs whose episode continues."""
        if not _any(ended) and not self._stat_names:
            return {}
        missing = np.full(self.num_envs, np.nan, dtype=np.float32)
        stats = {name: missing.copy() for name in self._stat_names}
        end_infos = infos.get("final_info", {}) if self._same_step else infos
        for env in np.flatnonzero(ended).tolist():
            info = _entry(end_infos, env)
            for name, value in info[END_INFO] if isinstance(info, Mapping) and END_INFO in info else numbers_of(info):
                if name in stats or len(stats) < MOST_NUMBERS:
                    stats.setdefault(name, missing.copy())[env] = value
        self._stat_names = [*stats]
        return {name: torch.from_numpy(value) for name, value in stats.items()}

    def _begin_episodes(self, where: Array, obs: FlatObservation) -> FlatObservation:
        """Begin episodes in masked envs (without reset by mask: in the next step); return finite observations."""
        self._resetting[:] = where & (not self._by_mask)
        if self._by_mask and _any(where):
            library_obs, _ = self._call("reset", options={"reset_mask": where})
            first_obs = self._flat(library_obs, "reset()", self.num_envs)
            for group, value in first_obs.items():
                obs[group][where] = value[where]
            self._require_finite(obs, where)
        for value in _numbers(obs):
            value[~np.isfinite(value)] = 0.0
        return obs

    def _call(self, call: str, *args: Any, **kwargs: Any) -> Any:
        envs, level = self._envs, gymnasium.logger.min_level
        self._failed = True  # until the call returns; Ctrl-C may interrupt it
        try:
            if isinstance(envs, AsyncVectorEnv):
                gymnasium.logger.min_level = gymnasium.logger.ERROR + 1  # suppress each process's traceback
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

    @_float32_may_overflow
    def _flat(self, obs: Any, call: str, num_envs: int) -> FlatObservation:
        with self._space_errors(call):
            groups = obs if self._grouped else {"policy": obs}
            flat = {group: spaces.flatten(space, groups[group], num_envs) for group, space in self._groups.items()}
            seen = groups["policy"]
            images = {group: seen if key is None else seen[key] for group, key in self._pictures.items()}
            return flat | {group: spaces.pictures(value) for group, value in images.items()}

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
            problem = f"step() returned {kind} of shape {list(column.shape)} and type {column.dtype}"
            raise TaskError(problem, key=self.name, expected=f"numbers of shape [{self.num_envs}]")
        return column.reshape(self.num_envs).astype(dtype)

    def _require_finite(self, obs: FlatObservation, where: Array) -> None:
        bad = ~_finite(obs) & where
        if bad.any():
            raise TaskError(f"reset() returned a non-finite observation (env {bad.argmax()})", key=self.name)

    def _warn(self, env: int, obs: FlatObservation, reward: Array) -> None:
        self._warned = True
        bad = [f"observation {group!r}" for group in self._groups if not np.isfinite(obs[group][env]).all()]
        if not np.isfinite(reward[env]):
            bad.append("reward")
        message = "%s: step() returned NaN or infinity (%s of env %d). These samples are dropped; see sim/diverged"
        logger.warning(message, self.name, " and ".join(bad), env)

    def render(self) -> list[Array]:
        """Return an image per env; needs `render_mode="rgb_array"`."""
        try:
            pictures = [np.asarray(picture) for picture in self._envs.render() or ()]
        except Exception as error:  # raised by an env or its renderer
            raise ConfigError(f"cannot render: {first_line(error)}", key=self.name) from error
        if len(pictures) != self.num_envs or any(picture.ndim != 3 for picture in pictures):
            raise ConfigError("the envs do not render", key=self.name, hint="Try env.kwargs.render_mode=rgb_array")
        return pictures

    def close(self) -> None:
        """Close the envs; log their errors as one-line warnings."""
        try:
            if not self._failed:
                self._envs.close()
        except Exception as error:
            logger.warning("%s", raised(error, self.name, "close()"))
        for process in getattr(self._envs.unwrapped, "processes", ()) if self._failed else ():
            process.kill()
        for envs in (self._envs.unwrapped, getattr(self._given, "unwrapped", self._given)):
            envs.closed = True  # AsyncVectorEnv.__del__ would close the envs again


def first_seed(seed: int) -> int:
    """Return the seed of the first env; the other envs use the seeds that follow.

    Seeds are spread by the golden ratio: 1,000 runs with consecutive seeds and 100,000 envs each share no env seed.
    """
    return seed * _GOLDEN % _SEEDS


_SEEDS = 2**31 - 2**20  # EnvPool needs seeds below 2^31, including the last env's
_GOLDEN = round(_SEEDS * (5**0.5 - 1) / 2)


def _final(infos: Mapping[str, Any]) -> Any:
    """Return the final observations in infos, if any; Gymnasium before 1.0 used another key."""
    return infos.get("final_obs", infos.get("final_observation"))


def _entry(infos: Any, env: int) -> Any:
    """Return one env's info; `infos` is a sequence, or a dict of arrays with masks `_<key>`."""
    if not isinstance(infos, Mapping):
        return infos[env]
    entries = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        is_mask = isinstance(key, str) and key.startswith("_") and key[1:] in infos
        if is_mask or isinstance(value, str) or (isinstance(mask, np.ndarray) and mask.dtype == bool and not mask[env]):
            continue
        with suppress(IndexError, KeyError, TypeError):
            entries[key] = _entry(value, env)
    return entries


def _finite(obs: FlatObservation) -> Array:
    """Return which envs have finite observations, bool [num_envs]."""
    finite = [np.logical_and.reduce(np.isfinite(value), axis=1) for value in _numbers(obs)]
    return finite[0] if len(finite) == 1 else np.logical_and.reduce(finite)


def _numbers(obs: FlatObservation) -> list[Array]:
    return [value for value in obs.values() if value.dtype != np.uint8]


def _any(mask: Array) -> bool:
    """Return whether any entry is True; `np.any` is six times slower for few envs."""
    return bool(np.count_nonzero(mask))


def _tensors(obs: FlatObservation) -> Observation:
    return {group: torch.from_numpy(value) for group, value in obs.items()}
