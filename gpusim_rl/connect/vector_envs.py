"""Vector envs of Gymnasium, EnvPool and Stable-Baselines3 as `gymnasium.vector.VectorEnv`."""

from __future__ import annotations

import gc
import inspect
import os
from contextlib import suppress
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch.utils._pytree import tree_map

from gpusim_rl.connect.checked_env import CheckedEnv, raised
from gpusim_rl.connect.library_config import module_and_id, require_id
from gpusim_rl.errors import ConfigError, described, did_you_mean, first_line, import_extra, is_out_of_memory
from gpusim_rl.settings.load_class import load_function
from gpusim_rl.settings.schema import EnvConfig

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv as Sb3VecEnv


# Keys that EnvPool adds to every info.
ENVPOOL_KEYS = {"env_id", "players", "elapsed_step", "terminated", "TimeLimit.truncated"}


class _EnvPoolEnvs(VectorEnv):
    """Synchronous EnvPool envs with Gymnasium's interface, without autoreset; `envpool.make` sets their seeds."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self.num_envs = int(envs.config["num_envs"])
        self.single_observation_space, self.single_action_space = envs.observation_space, envs.action_space
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        limit = envs.config.get("max_episode_steps")
        self.spec = EnvSpec("EnvPool-v0", max_episode_steps=None if limit == np.iinfo(np.int32).max else limit)
        self._obs: Any = None

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options is None:
            self._obs = self._envs.reset()[0]
        else:
            env_ids = np.flatnonzero(options["reset_mask"]).astype(np.int32)
            self._obs = tree_map(partial(_with_rows, env_ids), self._obs, self._envs.reset(env_ids)[0])
        return self._obs, {}

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self._obs, reward, terminated, truncated, infos = self._envs.step(actions)
        return self._obs, reward, terminated, truncated, {k: v for k, v in infos.items() if k not in ENVPOOL_KEYS}

    def close_extras(self, **kwargs: Any) -> None:
        self._envs.close()


class _Sb3Envs(VectorEnv):
    """Stable-Baselines3 vector env with Gymnasium's interface; ended envs reset in the same step."""

    def __init__(self, envs: Sb3VecEnv) -> None:
        self._envs = envs
        self.num_envs = envs.num_envs
        self.single_observation_space, self.single_action_space = envs.observation_space, envs.action_space
        self.metadata = {**(getattr(envs, "metadata", None) or {}), "autoreset_mode": AutoresetMode.SAME_STEP}

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._envs.seed(seed)
        return self._envs.reset(), {}

    def step(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        obs, reward, done, infos = self._envs.step(actions)
        done = np.asarray(done, dtype=bool)
        truncated = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos]) & done
        final_obs = [info.get("terminal_observation") for info in infos]
        return obs, reward, done & ~truncated, truncated, {"final_obs": final_obs, "final_info": infos}

    def get_attr(self, name: str) -> Any:
        return self._envs.get_attr(name)

    def render(self) -> Any:
        return self._envs.get_images()

    def close_extras(self, **kwargs: Any) -> None:
        self._envs.close()


def adapt(envs: Any, name: str) -> VectorEnv:
    """Adapt a vector env of Gymnasium (>= 1.1), EnvPool or Stable-Baselines3 to Gymnasium's interface."""
    if hasattr(envs, "async_reset"):  # EnvPool: also a VectorEnv, but with the spaces of one env
        return _EnvPoolEnvs(envs)
    if isinstance(envs, VectorEnv):
        if type(envs) is SyncVectorEnv:  # leave the user's object unchanged
            envs = copy(envs)
            envs.envs = [env if isinstance(env, CheckedEnv) else CheckedEnv(env, name) for env in envs.envs]
        return envs
    if hasattr(envs, "step_wait") and hasattr(envs, "env_method"):
        return _Sb3Envs(envs)
    raise ConfigError(
        key=name, expected="a vector env of Gymnasium, EnvPool or Stable-Baselines3", got=type(envs).__name__
    )


def time_limit_of(envs: VectorEnv) -> int | None:
    """Return the declared time limit [control steps]; None without a limit."""
    spec = envs.spec or envs.unwrapped.spec
    if spec is not None:
        return spec.max_episode_steps
    with suppress(Exception):  # third-party classes may raise anything
        return max(spec.max_episode_steps for spec in cast("Any", envs).get_attr("spec"))
    return None


def make(cfg: EnvConfig, num_envs: int, seed: int) -> tuple[Any, str]:
    """Make envs from settings; return the library's vector env and its name for messages.

    Only EnvPool needs `seed` here.
    """
    require_id(cfg, "Gymnasium", "CartPole-v1")
    if cfg._target_ is not None:
        return _make_by_function(cfg._target_, cfg, num_envs), cfg._target_
    name = str(cfg.id)
    pool = cfg.vectorization == "envpool"
    return _make_envpool(name, cfg, num_envs, seed) if pool else _make_registered(name, cfg, num_envs), name


def _make_by_function(name: str, cfg: EnvConfig, num_envs: int) -> Any:
    make_envs = load_function(name, "env._target_", "my_envs.make")
    try:
        inspect.signature(make_envs).bind(num_envs=num_envs, **cfg.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"cannot be called with num_envs and env.kwargs: {error}", key=f"env._target_={name}"
        ) from None
    try:
        return make_envs(num_envs=num_envs, **cfg.kwargs)
    except Exception as error:
        raise raised(error, f"env._target_={name}", "the function") from error


def _make_envpool(name: str, cfg: EnvConfig, num_envs: int, seed: int) -> Any:
    envpool: Any = import_extra("envpool", "envpool", "env.vectorization=envpool")
    env_ids = sorted(envpool.list_all_envs())
    if name not in env_ids:
        raise ConfigError("not an EnvPool env", key=f"env.id={name}", hint=did_you_mean(name, env_ids))
    limit = {} if cfg.max_episode_steps is None else {"max_episode_steps": cfg.max_episode_steps}
    try:
        return envpool.make(name, env_type="gymnasium", num_envs=num_envs, seed=seed, **{**cfg.kwargs, **limit})
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(described(error), key=f"env.id={name} env.kwargs={dict(cfg.kwargs)}") from error


def _make_registered(name: str, cfg: EnvConfig, num_envs: int) -> VectorEnv:
    """Make envs by their id in Gymnasium's registry, or by `module:id`."""
    kwargs, env_id = dict[str, Any](cfg.kwargs), module_and_id(name)
    ours = {"num_envs": "num_envs", "vectorization_mode": "env.vectorization"}
    for key in {*ours, "vector_kwargs", "wrappers"} & kwargs.keys():
        hint = f"Set {ours[key]} instead" if key in ours else "Try your own function: env._target_=my_envs.make"
        raise ConfigError(f"not an argument of {name}", key=f"env.kwargs.{key}", hint=hint)
    typed = kwargs.get("max_episode_steps")
    if cfg.max_episode_steps is not None:
        if typed not in (None, cfg.max_episode_steps):
            problem = f"conflicts with env.max_episode_steps={cfg.max_episode_steps}"
            raise ConfigError(problem, key="env.kwargs.max_episode_steps", got=typed, hint="Set only one of them")
        typed = kwargs["max_episode_steps"] = cfg.max_episode_steps
    if cfg.vectorization != "vector_entry_point":
        # Without autoreset, the true last observation is returned. CheckedEnv copies anyway.
        kwargs["vector_kwargs"] = {"autoreset_mode": AutoresetMode.DISABLED, "copy": False}
        maker = os.getpid() if cfg.vectorization == "async" else None
        kwargs["wrappers"] = [partial(CheckedEnv, name=name, maker=maker)]
        kwargs.setdefault("disable_env_checker", True)  # CheckedEnv fixes what the checker would warn about
    make_envs = partial(gymnasium.make_vec, name, num_envs=num_envs, vectorization_mode=cfg.vectorization)
    gc.collect()  # a simulator collected in a forked process would wait for threads that the fork lacks
    try:
        try:
            envs = make_envs(**kwargs)
        except ValueError as error:  # shared memory does not support custom spaces
            if "shared_memory=False" not in str(error):
                raise
            envs = make_envs(**{**kwargs, "vector_kwargs": {**kwargs["vector_kwargs"], "shared_memory": False}})
    except (gymnasium.error.NameNotFound, gymnasium.error.NamespaceNotFound, gymnasium.error.VersionNotFound):
        hint = did_you_mean(name, sorted(gymnasium.registry))
        raise ConfigError("not a Gymnasium env", key=f"env.id={name}", hint=hint) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        key = f"env.id={name}" + (f" env.kwargs={dict(cfg.kwargs)}" if cfg.kwargs else "")
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = f"Try pip install {missing}, or the Gymnasium extra that includes it" if missing else ""
        plain = isinstance(error, (gymnasium.error.Error, ImportError, TypeError, ValueError, LookupError, OSError))
        raise ConfigError(first_line(error) if plain else described(error), key=key, hint=hint) from error
    spec = copy(envs.spec or gymnasium.spec(env_id))
    if typed is not None:
        spec.max_episode_steps = None if typed == -1 else typed  # -1 removes the limit
    envs.unwrapped.spec = spec
    return envs


def _with_rows(env_ids: np.ndarray, obs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    obs = np.array(obs)
    obs[env_ids] = rows
    return obs
