"""What a checkpoint holds of tasks and of what belongs to them: their tensors and random streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from gpusim_rl.env.random import EnvRandom
from gpusim_rl.errors import warn


class Stateful:
    """An object with tensors of its own: commands, a curriculum. They are saved with those of the object's owner."""

    def restored(self) -> None:
        """Puts right what follows from restored tensors and today's settings; called after they were restored."""


def kept_tensors(node: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields path and tensor, for all tensors in nested dicts, lists, tuples and `Stateful` objects.

    Expanded views are left out: nothing can be written into them.

    Args:
        node: A tensor, or what contains tensors: `vars(task)`, for example.
        path: Path of the node, with dots.
    """
    if isinstance(node, Tensor):
        if all(stride > 0 or size <= 1 for stride, size in zip(node.stride(), node.shape, strict=True)):
            yield path, node
    elif isinstance(node, Stateful):
        yield from kept_tensors(vars(node), path)
    elif isinstance(node, (dict, list, tuple)):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from kept_tensors(item, f"{path}.{key}" if path else str(key))


def saved_state(owner: object, random: EnvRandom) -> dict[str, Any]:
    """Returns copies of all tensors that an object keeps in its attributes, and the state of its random streams."""
    tensors = {name: value.clone() for name, value in kept_tensors(vars(owner))}
    return {"tensors": tensors, "random": random.state_dict()}


class SeededDraws:
    """Random draws by settings. With other settings than the checkpoint's, draws are new and schedules continue."""

    _stream: ClassVar[int]  # is added to the run's seed: another stream than the task's and those of other draws
    _key: ClassVar[str] = "settings"  # of the settings in a checkpoint
    _settings: Any  # plain values
    _random: EnvRandom

    def _draw_step(self) -> None:
        """Draws what is random in a control step."""
        raise NotImplementedError

    def _draw_anew(self, state: Mapping[str, Any]) -> None:
        """Draws everything, at the progress of a state that was saved with other settings."""
        raise NotImplementedError

    def seed(self, seed: int) -> None:
        """Restart all draws from this seed."""
        self._random.seed(seed + self._stream)
        self._draw_step()

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next draws depend on."""
        return {self._key: self._settings, **saved_state(self, self._random)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in place what `state_dict` returned, or draw again where it was saved with other settings."""
        if state[self._key] == self._settings:
            restore_state(self, self._random, state)
        else:
            self._random.load_state_dict(state["random"])
            self._draw_anew(state)


def fitting(tensors: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the saved tensors that are as large as those of now; warns of others, which belong to other settings."""
    shared = {name: x for name, x in tensors.items() if name in now}
    fits = {name: x for name, x in shared.items() if x.shape == now[name].shape}
    if len(fits) < len(shared):
        names = ", ".join(name for name in shared if name not in fits)
        warn(f"tensors of the task have other shapes now, and begin anew: {names}")
    return fits


def restore_state(owner: object, random: EnvRandom, state: dict[str, Any]) -> None:
    """Restores in place what `saved_state` returned."""
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
