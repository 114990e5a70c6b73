"""Conversion between Gymnasium's spaces and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, flatdim

from gpusim_rl import spaces
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError


def observation_space(env: VecEnv, group: str = "policy") -> Box:
    """Return the space of one env's observation group; call after the first reset."""
    limit = np.inf if env.cfg.clip_observations is None else env.cfg.clip_observations
    return Box(-limit, limit, (env.obs_sizes[group],), np.float32)


def action_space(env: VecEnv) -> Box:
    """Return the space of one env's actions; raise ConfigError if they are discrete."""
    if isinstance(env.action_space, spaces.MultiDiscrete):
        raise ConfigError("this adapter does not support discrete actions", key=env.name, hint="Try gpusim-rl train")
    limit = env.cfg.clip_actions
    return Box(-limit, limit, (env.num_actions,), np.float32)


WRAPPER = "Try a Gymnasium wrapper, in your own function (env._target_=my_envs.make)"
FIXED = (Box, Discrete, MultiBinary, MultiDiscrete, Dict, Tuple)
PICTURE = 32 * 32  # minimum size of an image [bytes]; grid-world views are smaller
MOST_CHANNELS = 16  # maximum size of a leading dimension of channels or stacked frames


def is_picture(space: Space[Any]) -> bool:
    """Return whether observations are images: uint8, two- or three-dimensional, and at least `PICTURE` bytes."""
    shape = space.shape or ()
    return isinstance(space, Box) and space.dtype == np.uint8 and len(shape) in (2, 3) and flatdim(space) >= PICTURE


def numeric(space: Space[Any]) -> tuple[Any, list[str]]:
    """Drop non-numeric entries of a dict space, unless all are non-numeric; return the space and the dropped keys."""
    if not isinstance(space, Dict):
        return space, []
    kept: dict[str, Space[Any]] = {key: entry for key, entry in space.items() if isinstance(entry, FIXED)}
    return (Dict(kept), [key for key in space if key not in kept]) if kept else (space, [])


def split_pictures(space: Space[Any]) -> tuple[Space[Any], dict[str, str | None]]:
    """Split a space into its numeric part and its images.

    Returns the space without images, and the dict key of each image group (None: the observation itself).
    """
    if is_picture(space):
        return Dict({}), {"image": None}
    if isinstance(space, Dict):
        pictures: dict[str, str | None] = {key: key for key, entry in space.items() if is_picture(entry)}
        return Dict({key: entry for key, entry in space.items() if key not in pictures}), pictures
    return space, {}


def picture_shape(space: Space[Any]) -> tuple[int, int, int]:
    """Return the height, width and channels of the images that `pictures` returns."""
    height, width, channels = pictures(np.empty((1, *(space.shape or ())), np.uint8)).shape[1:]
    return height, width, channels


def pictures(obs: Any) -> np.ndarray:
    """Copy images to uint8 [num_envs, height, width, channels], moving leading channels or stacked frames last."""
    value = np.asarray(obs)
    if value.ndim == 3:
        value = value[..., None]
    elif value.shape[1] <= MOST_CHANNELS < min(value.shape[2:]):
        value = np.moveaxis(value, 1, 3)
    return np.array(value, order="C")


def flat_size(space: Space[Any], name: str) -> int:
    """Return the number of columns that `flatten` returns; raise ConfigError for an unsupported space."""
    if is_picture(space):
        problem = f"images of shape {list(space.shape or ())} inside a tuple or for the critic are not supported"
        raise ConfigError(problem, key=name, hint=WRAPPER)
    if isinstance(space, (Dict, Tuple)):
        components = space.spaces.values() if isinstance(space, Dict) else space.spaces
        return sum(flat_size(component, name) for component in components)
    if isinstance(space, FIXED):
        return flatdim(space)
    raise ConfigError(f"observation space {space} is not supported", key=name, hint=WRAPPER)


def flatten(space: Space[Any], obs: Any, num_envs: int) -> np.ndarray:
    """Copy observations to float32 [num_envs, size]; discrete components are one-hot."""
    if isinstance(space, Dict):
        components = [flatten(component, obs[key], num_envs) for key, component in space.spaces.items()]
        return np.concatenate(components, axis=1) if components else np.zeros((num_envs, 0), np.float32)
    if isinstance(space, Tuple):
        pairs = zip(space.spaces, obs, strict=True)
        return np.concatenate([flatten(component, value, num_envs) for component, value in pairs], axis=1)
    value, shape = np.asarray(obs), (num_envs, *(space.shape or ()))
    if value.shape != shape:
        raise ValueError(f"observations of shape {list(value.shape)}, expected {list(shape)}")
    if isinstance(space, Discrete):
        return _one_hot(value - space.start, int(space.n))
    if isinstance(space, MultiDiscrete):
        counts, indices = space.nvec.flatten(), (value - space.start).reshape(num_envs, -1)
        return np.concatenate([_one_hot(indices[:, i], int(count)) for i, count in enumerate(counts)], axis=1)
    return np.array(value, dtype=np.float32, order="C").reshape(num_envs, -1)


def _one_hot(index: np.ndarray, count: int) -> np.ndarray:
    if ((index < 0) | (index >= count)).any():
        raise ValueError(f"an index outside 0 to {count - 1}")
    rows = np.zeros((len(index), count), np.float32)
    rows[np.arange(len(index)), index] = 1.0
    return rows


def actions_of(space: Space[Any], name: str) -> tuple[spaces.ActionSpace, Callable[[np.ndarray], np.ndarray]]:
    """Return our action space, and a function that maps our actions to the library's."""
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (bound.reshape(-1).astype(np.float64) for bound in (space.low, space.high))
        bounded = np.isfinite(low) & np.isfinite(high)
        all_bounded = bool(bounded.all())
        with np.errstate(invalid="ignore", over="ignore"):
            middle, half = np.where(bounded, (low + high) / 2, 0.0), np.where(bounded, (high - low) / 2, 1.0)

        def to_box(action: np.ndarray) -> np.ndarray:
            limited = np.minimum(np.maximum(action, -1.0), 1.0)  # np.clip is ten times slower for small arrays
            scaled = middle + half * (limited if all_bounded else np.where(bounded, limited, action))
            scaled = np.minimum(np.maximum(scaled, low), high)
            return scaled.astype(space.dtype).reshape(-1, *space.shape)

        bounds = tuple(zip(low.tolist(), high.tolist(), strict=True))
        return spaces.Box(low.size, 1.0 if all_bounded else None, bounds), to_box
    if isinstance(space, (Discrete, MultiDiscrete)):
        counts = (int(space.n),) if isinstance(space, Discrete) else tuple(map(int, space.nvec.flatten()))

        def to_indices(action: np.ndarray) -> np.ndarray:
            return action.astype(np.int64).reshape(-1, *(space.shape or ())) + space.start

        return spaces.MultiDiscrete(counts), to_indices
    supported = "Discrete, MultiDiscrete or a Box of floats"
    raise ConfigError(key=f"{name}: action space", expected=supported, got=space, hint=WRAPPER)
