"""Validation of the return values of a task's hooks; errors name the hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.env.observations import ObservationGroups, is_image
from gpusim_rl.env.task import Task, TaskConfig
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.spaces import ActionSpace, Box, MultiDiscrete

IMAGE_HINT = "An image is uint8 [envs, height, width, channels]. Try camera.rgb or .depth_bytes(near, far)"


class HookChecks:
    """Checks of a task's hooks; each raises TaskError. The `finite...` checks synchronise with the device."""

    def __init__(self, task: Task[Any], groups: ObservationGroups) -> None:
        self._name = type(task).__name__
        self._num_envs = task.num_envs
        self._device = task.device
        self._groups = groups

    def observation(self, obs: Any) -> None:
        """Check the groups, terms, shapes and dtypes that `Task.observe` returned."""
        hook = f"{self._name}.observe()"
        if not isinstance(obs, dict):
            expected = f"a tensor of shape [{self._num_envs}, size] or a dict"
            raise TaskError(key=hook, expected=expected, got=type(obs))
        images = {group for group, value in obs.items() if is_image(value)}
        if "policy" not in obs and not images:
            raise TaskError(key=hook, expected="a 'policy' group", got=list(obs))
        if named := sorted(images & {"policy", "critic"}):
            raise TaskError(f"group {named[0]!r} cannot be an image", key=hook, hint="Try a name such as 'camera'")
        if images and "critic" not in obs:
            problem = "images require a numeric 'critic' group, because an episode's last state is not rendered"
            raise TaskError(problem, key=hook, got=list(obs))
        for group, value in obs.items():
            label = hook if list(obs) == ["policy"] else f"{hook}[{group!r}]"
            if group in images:
                self._tensor(label, value, (self._num_envs, *self._groups.images.get(group, [None] * 3)), torch.uint8)
                continue
            if not isinstance(value, dict):
                self._tensor(label, value, (self._num_envs, self._groups.sizes.get(group)), torch.float32)
                continue
            sizes = {term.name: term.size for term in self._groups.observed.get(group, ())}
            if not value or (sizes and list(value) != list(sizes)):
                expected = f"the terms {list(sizes)}" if sizes else "named terms"
                raise TaskError(key=label, expected=expected, got=list(value))
            for name, numbers in value.items():
                self._tensor(f"{label}[{name!r}]", numbers, (self._num_envs, sizes.get(name)), torch.float32)

    def reward_terms(self, terms: Any) -> None:
        """Check the names, shapes and dtypes of the terms that `Task.rewards` returned."""
        hook = f"{self._name}.rewards()"
        if not isinstance(terms, dict) or not terms:
            got = terms if terms == {} else type(terms)
            raise TaskError(key=hook, expected="a non-empty dict of named terms", got=got)
        for name, term in terms.items():
            self._tensor(f"{hook}[{name!r}]", term, (self._num_envs,), torch.float32)

    def stats(self, stats: Mapping[str, Any]) -> None:
        """Check the shapes and dtypes of the values that `Task.stats` returned."""
        for name, value in stats.items():
            self._tensor(f"{self._name}.stats()[{name!r}]", value, (self._num_envs,), torch.float32)

    def mask(self, hook: str, mask: Any) -> None:
        """Check the mask that a hook returned, bool [num_envs]."""
        self._tensor(f"{self._name}.{hook}()", mask, (self._num_envs,), torch.bool)

    def finite_observation(self, obs: Mapping[str, Tensor]) -> None:
        """Check that all numeric groups of an observation are finite."""
        for group, value in obs.items():
            if is_image(value):
                continue
            terms = self._groups.terms.get(group, ())
            columns = [term.name for term in terms for _ in range(term.size * term.history)]
            self.finite(f"{self._name}.observe()", repr(group), value, columns)

    def finite_terms(self, terms: Mapping[str, Tensor]) -> None:
        """Check that all reward terms are finite."""
        for name, term in terms.items():
            self.finite(f"{self._name}.rewards()", repr(name), term)

    def finite(self, key: str, name: str, value: Tensor, columns: Sequence[str] = ()) -> None:
        """Check that a tensor is finite; `columns`: term name of each column."""
        bad = ~torch.isfinite(value)
        if bool(bad.any()):
            env_id = int(bad.reshape(self._num_envs, -1).any(dim=1).int().argmax())
            number = int(bad[env_id].int().argmax()) if value.ndim > 1 else 0
            column = "" if value.ndim == 1 else f", column {number}"
            column += f", term {columns[number]!r}" if columns else ""
            raise TaskError(f"{name} is not finite (env {env_id}{column})", key=key)

    def _tensor(self, label: str, value: Any, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
        expected = "[" + ", ".join("size" if size is None else str(size) for size in shape) + "]"
        if not isinstance(value, Tensor):
            raise TaskError(key=label, expected=f"a tensor of shape {expected}", got=type(value))
        if value.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, value.shape, strict=True)):
            hint = IMAGE_HINT if len(shape) == 2 and value.ndim in (3, 4) else ""
            raise TaskError(key=label, expected=f"shape {expected}", got=list(value.shape), hint=hint)
        if value.dtype != dtype:
            raise TaskError(key=label, expected=str(dtype), got=value.dtype)
        if value.device.type != self._device.type:
            raise TaskError(key=label, expected=f"a tensor on {self._device}", got=str(value.device))


def action_space(task: Task[Any], cfg: TaskConfig) -> ActionSpace:
    """Return the action space; raise TaskError or ConfigError if the task or its settings are invalid."""
    name = type(task).__name__
    num_actions = getattr(task, "num_actions", None)
    if not isinstance(num_actions, int) or num_actions < 1:
        raise TaskError(key=f"{name}.num_actions", expected="a positive int (set in __init__)", got=num_actions)
    if task.choices is None:
        return Box(num_actions, cfg.clip_actions)
    counts = tuple(task.choices)
    if len(counts) != num_actions or not all(isinstance(count, int) and count > 1 for count in counts):
        expected = f"an int of at least 2 for each of {num_actions} actions"
        raise TaskError(key=f"{name}.choices", expected=expected, got=task.choices)
    if cfg.randomize and not cfg.randomization_params.keys().isdisjoint(("actions", "latency")):
        problem = f"{name} has discrete actions, which do not support noise or latency"
        raise ConfigError(problem, key="task.randomization_params", hint="Remove `actions` and `latency`")
    return MultiDiscrete(counts)
