"""Physical parameters of which every world has its own, in a model of MuJoCo Warp, which Newton's solver has too."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mujoco_warp as mjw
import torch
import warp as wp
from jaxtyping import Bool
from torch import Tensor

from gpusim_rl.sim.constants import Constants, constants_of, uses_gear
from gpusim_rl.sim.params import FIELDS
from gpusim_rl.sim.scene import Scene
from gpusim_rl.sim.warp import WarpGraphs


class WarpParams:
    """Gives worlds their own values of fields, and derives from them what MuJoCo derives when it compiles.

    Args:
        scene: Scene of the worlds.
        model: Model of MuJoCo Warp, with the scene's bodies, joints, actuators and tendons.
        num_envs: Number of worlds.
        graphs: Graphs of the simulation; forgotten when a field is expanded, for they hold the shared values.
        device: Device of the values.
        moved: Function that is called with the worlds in which bodies' centres of mass may have moved.
    """

    def __init__(
        self,
        scene: Scene,
        model: mjw.Model,
        num_envs: int,
        graphs: WarpGraphs,
        device: torch.device,
        moved: Callable[[Bool[Tensor, " envs"]], None],
    ) -> None:
        self._scene, self._model, self._num_envs = scene, model, num_envs
        self._graphs, self._moved = graphs, moved
        # What is derived from parameters. Each world has its own of these when the first such parameter is its own.
        self._constants: dict[str, Tensor] = {}
        self._derivation: Constants | None = None
        with graphs.scope():
            self._stale_where = wp.zeros(num_envs, dtype=wp.bool)
        self._stale = wp.to_torch(self._stale_where)  # worlds whose parameters were written since
        self._stale_on_host = self._stale.numpy() if device.type == "cpu" else None
        self._wrote = False  # whether any were, as far as it is known before any data

    def expand(self, field: str) -> Tensor:
        """Makes a field each world's own; returns a view of the model's memory, [num_envs, rows, ...]."""
        values = self._expand_array(self._model.opt if field == "gravity" else self._model, field)
        if self._derivation is None and self._has_constants(field):
            for name in constants_of(self._scene.model):
                self._constants[name] = self._expand_array(self._model, name)
            with self._graphs.scope():
                self._derivation = Constants(self._scene.model, self._model, self._stale_where)
        self._graphs.clear()  # they have captured the shared arrays
        self._graphs.synchronize()
        return values

    def _expand_array(self, owner: mjw.Model | mjw.Option, name: str) -> Tensor:
        shared = getattr(owner, name)
        with self._graphs.scope():
            own = wp.empty((self._num_envs, *shared.shape[1:]), dtype=shared.dtype)
        self._graphs.synchronize()
        values = wp.to_torch(own)
        values.copy_(wp.to_torch(shared).expand_as(values))
        setattr(owner, name, own)
        return values

    def _has_constants(self, field: str) -> bool:
        if field == "actuator_gear" and not uses_gear(self._scene.model):
            return False
        return FIELDS[field].constants

    def wrote(self, field: str, where: Bool[Tensor, " envs"]) -> None:
        """Says that a field was written in the worlds of a mask."""
        if self._has_constants(field):
            self._stale |= where
            self._wrote = True
            self._moved(where)

    def derive(self) -> None:
        """Derives constants in the worlds whose parameters were written since the last call."""
        if not self._wrote:
            return
        assert self._derivation is not None
        self._wrote = False
        if self._stale_on_host is None or self._stale_on_host.any():  # a shortcut for the CPU only
            self._graphs.run("constants", self._derivation.derive)

    def constants(self) -> dict[str, Tensor]:
        """Returns copies of what was derived."""
        self.derive()
        return {name: value.clone() for name, value in self._constants.items()}

    def load_constants(self, saved: Mapping[str, Tensor]) -> None:
        """Restores `constants`; what was not saved keeps the value it has."""
        for name, value in self._constants.items():
            if name in saved:
                value.copy_(saved[name])
