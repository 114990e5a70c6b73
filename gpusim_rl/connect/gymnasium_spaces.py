"""Observation and action spaces, from Gymnasium's to ours and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, flatdim

from gpusim_rl import spaces
from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError

# Ours as Gymnasium's


def observation_space(env: VecEnv, group: str = "policy") -> Box:
    """Returns the space of one observation group of one env, shape [size]; call it after the first reset."""
    limit = np.inf if env.cfg.clip_observations is None else env.cfg.clip_observations
    return Box(-limit, limit, (env.obs_sizes[group],), np.float32)


def action_space(env: VecEnv) -> Box:
    """Returns the space of the actions of one env, shape [num_actions]; the environment clamps to its limits.

    Raises:
        ConfigError: The actions are discrete.
    """
    if isinstance(env.action_space, spaces.MultiDiscrete):
        raise ConfigError(
            f"{env.name} has discrete actions, and this adapter knows continuous ones; try python train.py"
        )
    limit = env.cfg.clip_actions
    return Box(-limit, limit, (env.num_actions,), np.float32)


# Gymnasium's as ours

FIXED = (Box, Discrete, MultiBinary, MultiDiscrete, Dict, Tuple)
PICTURE = 32 * 32
"""Least number of bytes of an observation that is a picture; the views of grid worlds are smaller."""


MOST_CHANNELS = 16
"""An array of pictures with so many layers in front has its channels, or a stack of frames, there."""


def is_picture(space: Space[Any]) -> bool:
    """Returns whether observations of a space are pictures: uint8, with two or three dimensions."""
    of_bytes = isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)
    return of_bytes and flatdim(space) >= PICTURE


def numeric(space: Space[Any]) -> tuple[Any, list[str]]:
    """Return a dict's space without the entries that are no numbers, such as a text, and their names.

    Another space stays as it is, and so does a dict that has nothing else.
    """
    if not isinstance(space, Dict):
        return space, []
    kept: dict[str, Space[Any]] = {key: entry for key, entry in space.items() if isinstance(entry, FIXED)}
    return (Dict(kept), [key for key in space if key not in kept]) if kept else (space, [])


def split_pictures(space: Space[Any]) -> tuple[Space[Any], dict[str, str | None]]:
    """Returns the space of the numbers in an observation, and names its pictures.

    Pictures are the observation itself, `image`, or entries of a dict.

    Returns:
        Space of all but the pictures, empty where there are only those; and for each group of pictures the key of its
        entry, None where the observation is one.
    """
    if is_picture(space):
        return Dict({}), {"image": None}
    if isinstance(space, Dict):
        pictures: dict[str, str | None] = {key: key for key, entry in space.items() if is_picture(entry)}
        return Dict({key: entry for key, entry in space.items() if key not in pictures}), pictures
    return space, {}


def picture_shape(space: Space[Any]) -> tuple[int, int, int]:
    """Returns height, width and channels of what `pictures` makes of a space."""
    height, width, channels = pictures(np.empty((1, *(space.shape or ())), np.uint8)).shape[1:]
    return height, width, channels


def pictures(obs: Any) -> np.ndarray:
    """Returns pictures, uint8 [num_envs, height, width, channels], in new memory.

    Channels or frames of a stack come last; those that a library has in front are moved.
    """
    value = np.asarray(obs)
    if value.ndim == 3:
        value = value[..., None]
    elif value.shape[1] <= MOST_CHANNELS < min(value.shape[2:]):
        value = np.moveaxis(value, 1, 3)
    return np.array(value, order="C")


def flat_size(space: Space[Any], name: str) -> int:
    """Returns the number of columns that `flatten` makes of the space of one env; `name` is for messages.

    Raises:
        ConfigError: The space has no fixed size, or is of pictures.
    """
    if is_picture(space):
        raise ConfigError(
            f"{name}: pictures, {list(space.shape or ())}, are observations or entries of a dict of them, here they are"
            " within a tuple or for the critic. Try a wrapper, in a function of yours (env._target_=my_envs.make)"
        )
    if isinstance(space, (Dict, Tuple)):
        components = space.spaces.values() if isinstance(space, Dict) else space.spaces
        return sum(flat_size(component, name) for component in components)
    if isinstance(space, FIXED):
        return flatdim(space)
    raise ConfigError(
        f"{name}: an observation of {space} has no fixed size as numbers. Try a wrapper of Gymnasium, in a function of"
        " yours (env._target_=my_envs.make)"
    )


def flatten(space: Space[Any], obs: Any, num_envs: int) -> np.ndarray:
    """Returns observations as numbers, float32 [num_envs, size], in new memory.

    Components follow in the order of the space, which is that of one env; discrete ones are one-hot.
    `gymnasium.spaces.flatten` does the same for one env.
    """
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
        raise ValueError(f"an index outside of {count} values")
    rows = np.zeros((len(index), count), np.float32)
    rows[np.arange(len(index)), index] = 1.0
    return rows


def actions_of(space: Space[Any], name: str) -> tuple[spaces.ActionSpace, Callable[[np.ndarray], np.ndarray]]:
    """Returns the action space of one env as ours, and the function from our actions to its; `name` is for messages.

    Raises:
        ConfigError: There is no such action space here.
    """
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (bound.reshape(-1).astype(np.float64) for bound in (space.low, space.high))
        bounded = np.isfinite(low) & np.isfinite(high)
        all_bounded = bool(bounded.all())
        with np.errstate(invalid="ignore", over="ignore"):
            middle, half = np.where(bounded, (low + high) / 2, 0.0), np.where(bounded, (high - low) / 2, 1.0)

        def to_box(action: np.ndarray) -> np.ndarray:
            limited = np.minimum(np.maximum(action, -1.0), 1.0)  # np.clip takes ten times as long for few numbers
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
    raise ConfigError(
        f"{name}: actions of {space} cannot be represented: box (floats), discrete and multi-discrete can. Try a"
        " wrapper of Gymnasium, in a function of yours (env._target_=my_envs.make)"
    )
