"""Validation of single third-party envs."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from gpusim_rl.errors import TaskError, UserError, described, first_line, is_out_of_memory, on_one_line

END_INFO = "gpusim_rl.end"
"""Info key of an ended episode's numbers: (name, value) pairs, since vector envs would merge a dict key by key."""
HANGS_S = 600.0  # timeout for step() and reset() of envs in subprocesses [s]
MOST_NUMBERS = 50  # maximum number of values logged per episode
LONGEST_NAME = 60
PR_SET_PDEATHSIG = 1
OLDER = "Try a wrapper for older Gym interfaces, such as shimmy"
WRONG = (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError)
_STEP = "(observation, reward, terminated, truncated, info)"


class CheckedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Env wrapper that copies results, and raises TaskError if they do not match the env's spaces.

    `maker` is the PID of the process that creates the envs, if each env steps in a subprocess.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], name: str, maker: int | None = None) -> None:
        super().__init__(env)
        self._name, self._space = name, env.observation_space
        if maker not in (None, os.getpid()):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process saves before it stops the envs
            if sys.platform == "linux":  # kill this process with its parent, even if the env hangs
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the env; return its first observation and an empty info."""
        try:
            result = self.env.reset(seed=seed, options=options)
        except (Exception, SystemExit) as error:
            raise raised(error, self._name, "reset()") from error
        try:
            [obs, _] = _items(result, 2, "(observation, info)")
            return conform(self._space, obs), {}
        except WRONG as error:
            raise returned(error, self._name, "reset()") from error

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the env; replace its info with the numbers to log if the episode has ended, otherwise with {}."""
        try:
            result = self.env.step(action)
        except (Exception, SystemExit) as error:
            raise raised(error, self._name, "step()") from error
        try:
            obs, reward, terminated, truncated, info = _items(result, 5, _STEP)
            terminated, truncated = _flag(terminated, "terminated"), _flag(truncated, "truncated")
            numbers = tuple(numbers_of(info)) if terminated or truncated else ()
            end_info = {END_INFO: numbers} if numbers else {}
            return conform(self._space, obs), _number(reward, "reward"), terminated, truncated, end_info
        except WRONG as error:
            raise returned(error, self._name, "step()") from error


def raised(error: Exception | SystemExit, name: str, call: str) -> BaseException:
    """Convert an env's exception to a one-line TaskError; our own and out-of-memory errors pass through."""
    if isinstance(error, UserError) or is_out_of_memory(error):
        wrapped = error.args[0] if error.args else None  # AsyncVectorEnv raises TaskError(TaskError(...))
        return wrapped if isinstance(wrapped, UserError) else error
    if isinstance(error, (EOFError, ConnectionError)):
        return TaskError(f"an env process died in {call}", key=name, hint="Try env.vectorization=sync to see its error")
    if isinstance(error, multiprocessing.TimeoutError):
        return TaskError(f"an env process hangs: no response to {call} for {HANGS_S:.0f} s", key=name)
    older = any(words in str(error) for words in ("to unpack", "cannot unpack", "keyword argument 'seed'"))
    return TaskError(f"{call} raised {described(error)}", key=name, hint=OLDER if older else "")


def returned(error: Exception, name: str, call: str) -> TaskError:
    """Build the one-line error for results that do not match the env's spaces."""
    reason = f"an observation without {error}" if isinstance(error, KeyError) else first_line(error)
    return TaskError(f"{call} returned {on_one_line(reason)}", key=name)


def _items(result: Any, count: int, names: str) -> tuple[Any, ...]:
    if isinstance(result, tuple) and len(result) == count:
        return result
    got = f"{len(result)} values" if isinstance(result, tuple) else f"a single {type(result).__name__}"
    raise ValueError(f"{got}, expected {names}. {OLDER}")


def conform(space: Space[Any], obs: Any) -> Any:
    """Copy an observation into the layout of its space; drop unknown keys of a dict.

    Raises KeyError, TypeError or ValueError if the observation does not fit; box bounds are not checked.
    """
    if type(obs) is np.ndarray and type(space) is Box and obs.dtype == space.dtype and obs.shape == space.shape:
        return obs.copy()  # fast path: the rest takes ten times as long
    if isinstance(space, Dict):
        return {key: conform(component, obs[key]) for key, component in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(conform(component, value) for component, value in zip(space.spaces, obs, strict=True))
    if not isinstance(space, (Box, Discrete, MultiBinary, MultiDiscrete)):
        return obs
    shape, dtype = space.shape or (), np.dtype(space.dtype or np.int64)
    value = np.array(obs)
    if value.shape != shape:
        if [size for size in value.shape if size != 1] != [size for size in shape if size != 1]:
            raise ValueError(f"an observation of shape {list(value.shape)}, expected {list(shape)}")
        value = value.reshape(shape)
    if value.dtype != dtype:
        value = _cast(value, dtype)
    if not isinstance(space, Box):
        least = 0 if isinstance(space, MultiBinary) else space.start
        count = 2 if isinstance(space, MultiBinary) else space.n if isinstance(space, Discrete) else space.nvec
        if ((value < least) | (value >= least + count)).any():
            raise ValueError(f"the observation {value.tolist()}, which is not in {space}")
    return value


def _cast(value: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    if value.dtype.kind not in "biuf":
        raise TypeError(f"an observation of type {value.dtype}, expected {dtype}")
    with np.errstate(invalid="ignore", over="ignore"):
        cast = value.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(cast, value):
        raise TypeError(f"an observation of type {value.dtype} with values that {dtype} cannot represent")
    return cast


def _number(value: Any, what: str) -> float:
    if isinstance(value, float):
        return float(value)
    number = np.asarray(value)
    if number.size != 1 or number.dtype.kind not in "biuf":
        kind = f"shape {list(number.shape)}" if number.dtype.kind in "biuf" else f"type {type(value).__name__}"
        raise ValueError(f"a {what} of {kind}, expected one number")
    return float(number.reshape(()))


def _flag(value: Any, what: str) -> bool:
    number = value if isinstance(value, (bool, np.bool_)) else _number(value, what)
    if number not in (0, 1):
        raise ValueError(f"{what}={number}, expected True or False")
    return bool(number)


def numbers_of(info: Any) -> Iterator[tuple[str, float]]:
    """Return up to `MOST_NUMBERS` finite numbers and flags of an `info` dict; nested ones are named `<key>/<name>`."""
    return islice(_all_numbers(info), MOST_NUMBERS)


def _all_numbers(info: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in info.items() if isinstance(info, Mapping) else ():
        name = f"{prefix}{on_one_line(str(key))}"[:LONGEST_NAME]
        if key in _NOT_LOGGED:
            continue
        if isinstance(value, Mapping) and not prefix:
            yield from _all_numbers(value, f"{name}/")
        elif isinstance(value, Real) or getattr(getattr(value, "dtype", None), "kind", "-") in "biuf":
            with suppress(OverflowError, TypeError, ValueError):  # an array with several elements
                number = float(np.asarray(value, dtype=np.float64).reshape(()))
                if np.isfinite(number):
                    yield name, number


# Keys that libraries use to report the end of an episode.
_NOT_LOGGED = {"final_obs", "final_info", "final_observation", "terminal_observation", "TimeLimit.truncated"}
