"""Ray casting against the scene, e.g. for lidars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.errors import TaskError, available
from gpusim_rl.sim.masks import check_shape
from gpusim_rl.sim.scene import Scene

NUM_GROUPS = 6  # MuJoCo's number of geom groups


class RayGroups:
    """Geom groups that rays can skip, one per ignored articulation: MuJoCo's rays can only ignore whole groups."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._ignored: list[str] = []

    def leave_out(self, names: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """Return each geom's group, and a flag per group: 1 if rays that ignore `names` can hit the group, else 0."""
        known = self._scene.articulation_names
        for name in names:
            if name not in known:
                raise TaskError(f"no articulation {name!r}", key="rays", hint=available(name, known))
        self._ignored += [name for name in names if name not in self._ignored]
        if len(self._ignored) >= NUM_GROUPS:
            raise TaskError(key="rays", expected=f"at most {NUM_GROUPS - 1} ignored articulations", got=self._ignored)
        model = self._scene.model
        group = np.zeros(model.ngeom, dtype=np.int32)
        for number, name in enumerate(self._ignored, start=1):
            group[np.isin(model.geom_bodyid, self._scene.bodies_of(name))] = number
        left_out = {1 + self._ignored.index(name) for name in names}
        return group, [int(number not in left_out) for number in range(NUM_GROUPS)]


class Rays:
    """Fixed number of rays per world; `groups` flags the geom groups that the rays can hit (1 or 0)."""

    def __init__(
        self, cast: Callable[[Tensor, Tensor, Sequence[int]], Tensor], num_envs: int, num_rays: int, groups: list[int]
    ) -> None:
        self._cast, self._shape, self._groups = cast, (num_envs, num_rays, 3), groups

    def cast(
        self, origin: Float[Tensor, "envs rays 3"], direction: Float[Tensor, "envs rays 3"]
    ) -> Float[Tensor, "envs rays"]:
        """Return distances to the first hit, in multiples of the direction's length; -1 without a hit. World frame."""
        check_shape("rays: origin", origin, self._shape)
        check_shape("rays: direction", direction, self._shape)
        return self._cast(origin, direction, self._groups)
