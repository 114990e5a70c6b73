"""Environments of other libraries as ours: of Gymnasium, of EnvPool, and vector envs in Stable-Baselines3's interface.

`task=Gymnasium env.id=CartPole-v1` trains on them. They step on the CPU, whatever device the learner is on.
docs/connect.md tells what becomes of spaces, of resets and of numbers that are not finite.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gpusim_rl import spaces
from gpusim_rl.env.environment import Environment, Observation, Step
from gpusim_rl.env.half_batches import HalfBatches
from gpusim_rl.env.task import ResetFromConfig
from gpusim_rl.errors import ConfigError, TaskError, did_you_mean, import_extra
from gpusim_rl.settings.load_class import load_function
from gpusim_rl.settings.schema import EnvConfig

logger = logging.getLogger(__name__)

Array = np.ndarray
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class GymnasiumConfig:
    """The section `task`: nothing of these envs is set by us. Their own settings are in the section `env`."""

    randomize: Literal[False] = False
    randomization_params: dict[str, Any] = field(default_factory=dict)
    reset_from: ResetFromConfig = field(default_factory=ResetFromConfig)
    observations: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: These envs are asked for what they cannot do.
        """
        if self.reset_from.share > 0.0:
            raise ConfigError("task.reset_from.share has no effect here: the state of these envs is not known. Try 0")
        if self.observations:
            raise ConfigError("task.observations has no effect here: these envs do not name the parts. Try without it")


class Result(NamedTuple):
    """A step of a vector env, before any reset of ours. Observations are in the spaces of the library."""

    obs: Any
    final_obs: Mapping[int, Any]
    """True last observations by env, where `obs` has the first ones of the next episodes already."""
    reward: Array
    terminated: Array
    truncated: Array
    begun: Array
    """Envs that have begun a new episode in this step: `obs` has its first observation."""


class VectorEnv(Protocol):
    """What is common to the vector envs of the libraries."""

    num_envs: int
    observation_space: Any
    """Of one env."""
    action_space: Any
    """Of one env."""
    max_episode_steps: int | None
    """Time limit, if the library tells."""
    metadata: Mapping[str, Any]

    def render(self) -> Any:
        """Pictures of all envs; None where they are not drawn."""
        ...

    def reset(self, seed: int) -> Any:
        """Begins an episode in every env; returns the observations."""
        ...

    def step(self, action: Array) -> Result:
        """Steps all envs."""
        ...

    def reset_where(self, where: Array) -> Any | None:
        """Begins an episode in some envs; returns observations of all, right there. None where it cannot."""
        ...

    def close(self) -> None:
        """Ends processes."""
        ...


class GymnasiumEnv(Environment):
    """Gymnasium: envs of other libraries, by their id in Gymnasium or EnvPool, or from a function of yours.

    Args:
        envs: A vector env of Gymnasium (>= 1.1), EnvPool (Gymnasium's interface) or Stable-Baselines3.
        seed: Of the envs.
        name: What messages call them.
        max_episode_steps: Time limit [control steps]; None where the envs tell it.
        first: What messages call the first of them.

    Raises:
        ConfigError: Something in them cannot be represented; the message says what.

    Attributes:
        name: What messages call them.
    """

    Config: ClassVar[type] = GymnasiumConfig
    resumable = False

    def __init__(
        self, envs: Any, *, seed: int, name: str = "", max_episode_steps: int | None = None, first: int = 0
    ) -> None:
        self._first = first
        self.name = name or type(envs).__name__
        self.device = CPU
        self._envs = _adapted(envs, self.name)
        self._seed = seed
        self.num_envs = self._envs.num_envs
        limit = max_episode_steps or self._envs.max_episode_steps
        if limit is None:
            raise ConfigError(
                f"{self.name} does not tell its time limit. Try env.max_episode_steps=<steps>: an evaluation ends there"
            )
        self._limit = int(limit)
        self._groups = _groups(self._envs.observation_space, self.name)
        self.obs_sizes = {group: _size(space, self.name) for group, space in self._groups.items()}
        self._space, self._to_env = _action_space(self._envs.action_space, self.name)
        self.num_actions = self._space.size
        self._skip = np.zeros(self.num_envs, dtype=bool)
        self._reported = False

    @classmethod
    def from_settings(cls, cfg: EnvConfig, *, num_envs: int, seed: int) -> Environment:
        """Makes the envs that the settings name.

        Args:
            cfg: The section `env`.
            num_envs: Number of envs.
            seed: Of the envs.

        Raises:
            ConfigError: There are no such envs, their package is missing, or they cannot be represented.
        """
        import_extra("gymnasium", "gymnasium", "task=Gymnasium")
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
            if cfg._target_ is not None and isinstance(halves[0]._envs, _EnvPool):  # its seed is not ours to set
                raise ConfigError("both would begin with the same seed. Try env.id and env.vectorization=envpool")
        except ConfigError as error:
            for env in halves:
                env.close()
            raise ConfigError(f"env.overlap=true makes two halves, of {half} envs each: {error}") from None
        return HalfBatches(*halves)

    @classmethod
    def _make(cls, cfg: EnvConfig, num_envs: int, seed: int, first: int = 0) -> GymnasiumEnv:
        if (cfg.id is None) == (cfg._target_ is None):
            raise ConfigError("task=Gymnasium needs env.id or env._target_: try env.id=CartPole-v1")
        if cfg._target_ is not None:
            name = cfg._target_
            make = load_function(name, "env._target_", "my_envs.make")
            try:
                inspect.signature(make).bind(num_envs=num_envs, **cfg.kwargs)
            except TypeError as error:
                raise ConfigError(f"env._target_={name} with num_envs and env.kwargs: {error}") from None
            envs = make(num_envs=num_envs, **cfg.kwargs)
        else:
            name = str(cfg.id)
            envs = _make_envpool(cfg, num_envs, seed) if cfg.vectorization == "envpool" else _make(cfg, num_envs)
        found = cls(envs, seed=seed, name=name, max_episode_steps=cfg.max_episode_steps, first=first)
        if found.num_envs != num_envs:
            found.close()
            raise ConfigError(
                f"{name} made {found.num_envs} envs, but num_envs={num_envs}; try num_envs={found.num_envs}"
            )
        return found

    @property
    def action_space(self) -> spaces.ActionSpace:
        """The actions that `step` takes."""
        return self._space

    @property
    def max_episode_length(self) -> int:
        """Time limit of an episode [control steps]."""
        return self._limit

    @property
    def steps_between_truncations(self) -> int:
        """One: an env may truncate its episode whenever it wants, not only at the time limit."""
        return 1

    @property
    def summary(self) -> str:
        """What the start of a run tells of it."""
        return f"{self.name}, episode {self._limit} steps at most"

    def reset(self) -> Observation:
        """Begins an episode in every env.

        Raises:
            TaskError: The observations are not of their space, or not finite.
        """
        self._skip[:] = False
        obs = self._flat(self._envs.reset(self._seed), "reset()")
        self._refuse_bad(obs, np.ones(self.num_envs, dtype=bool))
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
        result = self._envs.step(self._to_env(np.where(bad_action[:, None], 0, chosen)))
        obs = self._flat(result.obs, "step()")
        final_obs = {group: value.copy() for group, value in obs.items()}
        for i, last in result.final_obs.items():
            for group, value in self._flat(_batch_of_one(last), "step()", num_envs=1).items():
                final_obs[group][i] = value[0]
        reward = self._numbers(result.reward, "rewards").astype(np.float32)
        terminated: Array = self._numbers(result.terminated, "terminated").astype(bool)
        truncated = self._numbers(result.truncated, "truncated").astype(bool) & ~terminated

        not_finite = ~_finite({**final_obs, "reward": reward[:, None]})
        self._report(not_finite, final_obs, reward)
        # A step in which the library resets an env, and ignores the action, is no sample.
        skipped = self._skip.copy()
        diverged = not_finite | bad_action | skipped
        terminated &= ~diverged
        truncated &= ~diverged
        done = terminated | truncated | diverged
        obs = self._begin(done & ~result.begun & ~skipped, obs)
        reward[diverged] = 0.0
        for value in final_obs.values():
            value[diverged] = 0.0
        masks = (
            torch.from_numpy(mask) for mask in (terminated, truncated, diverged, bad_action, done, diverged.copy())
        )
        rewards = torch.from_numpy(reward)
        return Step(_tensors(obs), _tensors(final_obs), rewards, {}, {}, *masks, skipped=torch.from_numpy(skipped))

    def _begin(self, where: Array, obs: dict[str, Array]) -> dict[str, Array]:
        """Begins an episode in some envs, now or, where the library can only do that, with the next step."""
        self._skip[:] = False
        if where.any():
            fresh = self._envs.reset_where(where)
            if fresh is None:
                self._skip[:] = where
            else:
                for group, value in self._flat(fresh, "reset()").items():
                    obs[group][where] = value[where]
                self._refuse_bad(obs, where)
        return {group: np.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0) for group, value in obs.items()}

    def _flat(self, obs: Any, call: str, num_envs: int | None = None) -> dict[str, Array]:
        """Observation groups, [num_envs, size] each, in memory of their own."""
        num_envs = self.num_envs if num_envs is None else num_envs
        try:
            return {
                group: _flatten(space, obs if space is self._envs.observation_space else obs[group], num_envs)
                for group, space in self._groups.items()
            }
        except (IndexError, KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            raise TaskError(
                f"{self.name}: {call} returned observations that are not of their space: {reason}"
            ) from None

    def _numbers(self, value: Any, what: str) -> Array:
        value = np.asarray(value)
        if value.shape != (self.num_envs,):
            raise TaskError(
                f"{self.name}: step() returned {what} of shape {list(value.shape)}, expected [{self.num_envs}]"
            )
        return value

    def _refuse_bad(self, obs: dict[str, Array], where: Array) -> None:
        """Stops where a new episode begins with what is not finite: nothing could be done about it."""
        if not (_finite(obs) | ~where).all():
            env = int((~_finite(obs) & where).argmax())
            raise TaskError(
                f"{self.name}: reset() returned an observation that is not finite (env {self._first + env})"
            )

    def _report(self, not_finite: Array, obs: dict[str, Array], reward: Array) -> None:
        if self._reported or not not_finite.any():
            return
        self._reported = True
        env = int(not_finite.argmax())
        bad = [f"observation {group!r}" for group, value in obs.items() if not np.isfinite(value[env]).all()]
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
        """Pictures of the envs, of envs that were made with `render_mode="rgb_array"`.

        Raises:
            ConfigError: They have none, or a package for drawing is missing.
        """
        from gymnasium.error import Error

        try:
            pictures = self._envs.render()
        except (Error, NotImplementedError) as error:
            raise ConfigError(f"{self.name} cannot be drawn: {_first_line(error)}") from None
        found = [np.asarray(picture) for picture in pictures or ()]
        if len(found) != self.num_envs or any(picture.ndim != 3 for picture in found):
            raise ConfigError(f"{self.name} draws no pictures of its envs (render_mode rgb_array)")
        return found

    @property
    def frames_per_s(self) -> float:
        """Control steps in a second of what `render` shows [Hz]."""
        return float(self._envs.metadata.get("render_fps") or super().frames_per_s)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: no library lets envs be saved."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> Observation:
        """Begins new episodes."""
        return self.begin_from(state)

    def begin_from(self, state: dict[str, Any]) -> Observation:
        """Begins new episodes; nothing of another run is of use."""
        return self.reset()

    def close(self) -> None:
        """Ends the envs."""
        self._envs.close()


# Vector envs of the libraries


class _Gymnasium:
    """A `gymnasium.vector.VectorEnv`, in each of its autoreset modes."""

    def __init__(self, envs: Any) -> None:
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

        self._envs = envs
        self.num_envs = envs.num_envs
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space
        self.max_episode_steps = envs.spec.max_episode_steps if envs.spec is not None else None
        self.metadata, self.render = envs.metadata, envs.render
        mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)  # what 1.0 did, which has no such entry
        self._same_step = mode == AutoresetMode.SAME_STEP
        # Gymnasium's own classes reset by mask in every mode; of others, only the mode that needs it promises that.
        known = isinstance(envs.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self._by_mask = known or mode == AutoresetMode.DISABLED

    def reset(self, seed: int) -> Any:
        return self._envs.reset(seed=seed)[0]

    def step(self, action: Array) -> Result:
        obs, reward, terminated, truncated, infos = self._envs.step(action)
        begun = np.zeros(self.num_envs, dtype=bool)
        final_obs: dict[int, Any] = {}
        if self._same_step:
            begun |= np.asarray(terminated, dtype=bool) | np.asarray(truncated, dtype=bool)
            if begun.any() and "final_obs" not in infos:
                raise TaskError(f"{type(self._envs).__name__} resets in the same step and gives no infos['final_obs']")
            final_obs = {int(i): _of_env(infos["final_obs"], int(i)) for i in np.flatnonzero(begun)}
        return Result(obs, final_obs, reward, terminated, truncated, begun)

    def reset_where(self, where: Array) -> Any | None:
        return self._envs.reset(options={"reset_mask": where})[0] if self._by_mask else None

    def close(self) -> None:
        self._envs.close()


class _EnvPool:
    """An EnvPool env in Gymnasium's interface, synchronous. It resets in the next step, or when it is told to."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self.num_envs = int(envs.config["num_envs"])
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.max_episode_steps = envs.config.get("max_episode_steps")
        self.metadata: Mapping[str, Any] = {}
        self._obs: Any = None

    def render(self) -> None:
        return None

    def reset(self, seed: int) -> Any:
        self._obs = self._envs.reset()[0]  # the seed is an argument of `envpool.make`
        return self._obs

    def step(self, action: Array) -> Result:
        self._obs, reward, terminated, truncated, _ = self._envs.step(action)
        return Result(self._obs, {}, reward, terminated, truncated, np.zeros(self.num_envs, dtype=bool))

    def reset_where(self, where: Array) -> Any:
        numbers = np.flatnonzero(where).astype(np.int32)
        return _scattered(self._envs.reset(numbers)[0], numbers, self._obs)

    def close(self) -> None:
        self._envs.close()


class _StableBaselines3:
    """A vector env in the interface of Stable-Baselines3: it resets in the same step."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self.num_envs = envs.num_envs
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.max_episode_steps: int | None = None
        self.metadata: Mapping[str, Any] = getattr(envs, "metadata", None) or {}
        self.render = envs.get_images

    def reset(self, seed: int) -> Any:
        self._envs.seed(seed)
        return self._envs.reset()

    def step(self, action: Array) -> Result:
        obs, reward, done, infos = self._envs.step(action)
        done = np.asarray(done, dtype=bool)
        truncated = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos]) & done
        final_obs = {int(i): infos[i]["terminal_observation"] for i in np.flatnonzero(done)}
        return Result(obs, final_obs, reward, done & ~truncated, truncated, done)

    def reset_where(self, where: Array) -> None:
        return None

    def close(self) -> None:
        self._envs.close()


def _adapted(envs: Any, name: str) -> VectorEnv:
    """The adapter that fits."""
    from gymnasium.vector import VectorEnv as OfGymnasium

    if hasattr(envs, "async_reset"):  # a VectorEnv of Gymnasium too, without its spec
        return _EnvPool(envs)
    if isinstance(envs, OfGymnasium):
        return _Gymnasium(envs)
    if hasattr(envs, "step_wait") and hasattr(envs, "env_method"):
        return _StableBaselines3(envs)
    raise ConfigError(
        f"{name} is a {type(envs).__name__}; expected a vector env of Gymnasium, EnvPool or Stable-Baselines3"
    )


def _make(cfg: EnvConfig, num_envs: int) -> Any:
    """Envs by their id in Gymnasium's registry."""
    import gymnasium
    from gymnasium.vector import AutoresetMode

    name = str(cfg.id)
    if ":" in name:  # Gymnasium would import the module: a run folder of a stranger could name any
        raise ConfigError(
            f"env.id={name}: no module may be named here. Try env._target_=my_envs.make, your own function"
        )
    kwargs: dict[str, Any] = dict(cfg.kwargs)
    if cfg.vectorization != "vector_entry_point":
        # No autoreset: so the true last observation is always at hand, in one piece.
        kwargs["vector_kwargs"] = {"autoreset_mode": AutoresetMode.DISABLED}
        if cfg.max_episode_steps is not None:
            kwargs["max_episode_steps"] = cfg.max_episode_steps
    try:
        spec = gymnasium.spec(name)
        envs = gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode=cfg.vectorization, **kwargs)
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound, gymnasium.error.VersionNotFound):
        known = sorted(gymnasium.registry)
        raise ConfigError(f"env.id={name}: Gymnasium has no such env.{did_you_mean(name, known)}") from None
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, LookupError, OSError) as error:
        given = f" env.kwargs={dict(cfg.kwargs)}" if cfg.kwargs else ""
        raise ConfigError(f"env.id={name}{given}: {_first_line(error)}") from None
    if envs.spec is None:
        envs.spec = spec
    return envs


def _make_envpool(cfg: EnvConfig, num_envs: int, seed: int) -> Any:
    """Envs by their id in EnvPool."""
    name = str(cfg.id)
    envpool: Any = import_extra("envpool", "envpool", "env.vectorization=envpool")
    known = sorted(envpool.list_all_envs())
    if name not in known:
        raise ConfigError(f"env.id={name}: EnvPool has no such env.{did_you_mean(name, known)}")
    limit = {} if cfg.max_episode_steps is None else {"max_episode_steps": cfg.max_episode_steps}
    return envpool.make(name, env_type="gymnasium", num_envs=num_envs, seed=seed, **limit, **cfg.kwargs)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


# Spaces


def _groups(space: Any, name: str) -> dict[str, Any]:
    """Observation groups: those of a dict that calls them so, else all in one."""
    from gymnasium.spaces import Dict

    if isinstance(space, Dict) and "policy" in space.spaces and set(space.spaces) <= {"policy", "critic"}:
        return {group: space.spaces[group] for group in ("policy", "critic") if group in space.spaces}
    return {"policy": space}


def _size(space: Any, name: str) -> int:
    """Numbers in a flat observation."""
    from gymnasium import spaces as gym

    if isinstance(space, gym.Dict):
        return sum(_size(part, name) for part in space.spaces.values())
    if isinstance(space, gym.Tuple):
        return sum(_size(part, name) for part in space.spaces)
    if isinstance(space, gym.Discrete):
        return int(space.n)
    if isinstance(space, gym.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, (gym.Box, gym.MultiBinary)):
        return math.prod(space.shape)
    raise ConfigError(
        f"{name}: an observation of {space} has no fixed size as numbers. Try a wrapper of Gymnasium, in a function of"
        " yours (env._target_=my_envs.make)"
    )


def _flatten(space: Any, value: Any, num_envs: int) -> Array:
    """Observations of a batch as numbers, float32 [num_envs, size]: parts in the space's order, indices one-hot."""
    from gymnasium import spaces as gym

    if isinstance(space, gym.Dict):
        return np.concatenate([_flatten(part, value[key], num_envs) for key, part in space.spaces.items()], axis=1)
    if isinstance(space, gym.Tuple):
        parts = zip(space.spaces, value, strict=True)
        return np.concatenate([_flatten(part, item, num_envs) for part, item in parts], axis=1)
    value = np.asarray(value)
    if value.shape != (num_envs, *space.shape):
        raise ValueError(f"expected shape {[num_envs, *space.shape]}, got {list(value.shape)}")
    if isinstance(space, gym.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[value - space.start]
    if isinstance(space, gym.MultiDiscrete):
        counts, indices = space.nvec.flatten(), (value - space.start).reshape(num_envs, -1)
        one_hot = [np.eye(int(n), dtype=np.float32)[indices[:, i]] for i, n in enumerate(counts)]
        return np.concatenate(one_hot, axis=1)
    return np.array(value, dtype=np.float32).reshape(num_envs, -1)


def _batch_of_one(value: Any) -> Any:
    """The observation of one env as that of a batch."""
    if isinstance(value, Mapping):
        return {key: _batch_of_one(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_batch_of_one(item) for item in value)
    return np.asarray(value)[None]


def _of_env(values: Any, env: int) -> Any:
    """What `infos` tells of one env: they hold a dict of arrays or an array of dicts."""
    if isinstance(values, Mapping):
        return {key: _of_env(value, env) for key, value in values.items() if not key.startswith("_")}
    return values[env]


def _scattered(some: Any, numbers: Array, everything: Any) -> Any:
    """Observations of some envs, where they belong among those of all."""
    if isinstance(everything, Mapping):
        return {key: _scattered(some[key], numbers, value) for key, value in everything.items()}
    if isinstance(everything, tuple):
        return tuple(_scattered(a, numbers, b) for a, b in zip(some, everything, strict=True))
    found = np.array(everything)
    found[numbers] = some
    return found


def _action_space(space: Any, name: str) -> tuple[spaces.ActionSpace, Callable[[Array], Array]]:
    """Our action space, and what turns our actions into the library's."""
    from gymnasium import spaces as gym

    if isinstance(space, gym.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (bound.reshape(-1).astype(np.float64) for bound in (space.low, space.high))
        bounded = np.isfinite(low) & np.isfinite(high)
        middle, half = np.where(bounded, (low + high) / 2, 0.0), np.where(bounded, (high - low) / 2, 1.0)

        def to_box(action: Array) -> Array:
            limited = np.where(bounded, np.clip(action, -1.0, 1.0), action)
            scaled = np.clip(middle + half * limited, low, high)
            return scaled.astype(space.dtype).reshape(-1, *space.shape)

        return spaces.Box(low.size), to_box
    if isinstance(space, gym.Discrete):
        return spaces.MultiDiscrete((int(space.n),)), lambda action: action[:, 0].astype(np.int64) + space.start
    if isinstance(space, gym.MultiDiscrete):
        shape, counts = space.shape, tuple(int(n) for n in space.nvec.flatten())
        to_indices = lambda action: action.astype(np.int64).reshape(-1, *shape) + space.start  # noqa: E731
        return spaces.MultiDiscrete(counts), to_indices
    raise ConfigError(
        f"{name}: actions of {space} cannot be represented: box (floats), discrete and multi-discrete can. Try a"
        " wrapper of Gymnasium, in a function of yours (env._target_=my_envs.make)"
    )


def _finite(obs: Mapping[str, Array]) -> Array:
    """Envs whose observations are finite."""
    return np.all([np.isfinite(value).all(axis=1) for value in obs.values()], axis=0)


def _tensors(obs: Mapping[str, Array]) -> Observation:
    return {group: torch.from_numpy(np.ascontiguousarray(value)) for group, value in obs.items()}
