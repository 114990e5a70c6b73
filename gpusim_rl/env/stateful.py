"""Checkpoint state of tasks and their components: tensors and random streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from gpusim_rl.env.random import EnvRandom
from gpusim_rl.errors import warn


class Stateful:
    """Component (commands, a curriculum) whose tensors are saved in its owner's state."""

    def restored(self) -> None:
        """Recompute values derived from restored tensors and the current settings; called after a restore."""


def kept_tensors(node: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield path and tensor, for all writable tensors in nested dicts, lists, tuples and `Stateful` objects."""
    if isinstance(node, Tensor):
        if all(stride > 0 or size <= 1 for stride, size in zip(node.stride(), node.shape, strict=True)):
            yield path, node
    elif isinstance(node, Stateful):
        yield from kept_tensors(vars(node), path)
    elif isinstance(node, (dict, list, tuple)):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from kept_tensors(item, f"{path}.{key}" if path else str(key))


def saved_state(owner: object, random: EnvRandom) -> dict[str, Any]:
    """Return copies of an object's tensors, and the state of its random streams."""
    tensors = {name: value.clone() for name, value in kept_tensors(vars(owner))}
    return {"tensors": tensors, "random": random.state_dict()}


class SeededDraws:
    """Random draws configured by `_settings`, redrawn if a checkpoint's settings differ; the schedules continue."""

    _stream: ClassVar[int]  # added to the run's seed; unique for each class
    _key: ClassVar[str] = "settings"  # key of `_settings` in a checkpoint
    _settings: Any  # plain values
    _random: EnvRandom

    def _draw_step(self) -> None:
        """Draw the values of a control step."""
        raise NotImplementedError

    def _redraw(self, state: Mapping[str, Any]) -> None:
        """Redraw everything, with the training progress of a saved state whose settings differ."""
        self._draw_step()

    def seed(self, seed: int) -> None:
        """Restart all draws from a seed."""
        self._random.seed(seed + self._stream)
        self._draw_step()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next draws depend on."""
        return {self._key: self._settings, **saved_state(self, self._random)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` in place, or redraw if its settings differ or tensors are missing (an older version)."""
        if state[self._key] == self._settings and dict(kept_tensors(vars(self))).keys() <= state["tensors"].keys():
            restore_state(self, self._random, state)
        else:
            self._random.load_state_dict(state["random"])
            self._redraw(state)


def fitting(tensors: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the saved tensors whose shape is unchanged; warn about the others."""
    shared = {name: x for name, x in tensors.items() if name in now}
    fits = {name: x for name, x in shared.items() if x.shape == now[name].shape}
    if len(fits) < len(shared):
        names = ", ".join(name for name in shared if name not in fits)
        warn(f"resetting task tensors whose shapes differ from the checkpoint's: {names}")
    return fits


def restore_state(owner: object, random: EnvRandom, state: dict[str, Any]) -> None:
    """Restore `saved_state` in place."""
    for name, value in kept_tensors(vars(owner)):
        value.copy_(state["tensors"][name])
    for part in _stateful_parts(vars(owner)):
        part.restored()
    random.load_state_dict(state["random"])


def _stateful_parts(node: Any) -> Iterator[Stateful]:
    if isinstance(node, Stateful):
        yield node
        node = vars(node)
    if isinstance(node, (dict, list, tuple)):
        for item in node.values() if isinstance(node, dict) else node:
            yield from _stateful_parts(item)
