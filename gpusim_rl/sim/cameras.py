"""Lazily created cameras of a simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtyping import Bool
from torch import Tensor

from gpusim_rl.errors import TaskError, available
from gpusim_rl.files.provenance import check_versions
from gpusim_rl.settings.simulators import OLDER, WARP_PACKAGES, check_warp
from gpusim_rl.sim.camera import CameraImages
from gpusim_rl.sim.scene import Scene

if TYPE_CHECKING:
    from gpusim_rl.sim.camera_renderer import CameraRenderer
    from gpusim_rl.sim.warp import WarpGraphs


class Cameras:
    """Cameras of a simulator; the renderer is created when the first camera is requested.

    `state`: qpos [num_envs, nq], mocap positions and mocap orientations of the simulator. `num_threads`: None = one per
    CPU. `graphs`: Warp graphs, if any.
    """

    def __init__(
        self, scene: Scene, state: tuple[Tensor, ...], num_threads: int | None, graphs: WarpGraphs | None = None
    ) -> None:
        self._scene, self._arguments = scene, (state, num_threads, graphs)
        self._made: CameraRenderer | None = None  # created on first use

    def find(self, name: str) -> CameraImages:
        """Return the images of a camera; see `Sim.camera`."""
        cameras = self._scene.cameras
        if name not in cameras:
            raise TaskError(f"no camera {name!r}", key="sim.camera", hint=available(name, cameras))
        return self._renderer.images(cameras[name])

    def own(self, field: str) -> Tensor:
        """Give each world its own values of a rendering field; return them, shape [num_envs, rows, ...]."""
        return self._renderer.own(field)

    @property
    def _renderer(self) -> CameraRenderer:
        if self._made is None:
            check_warp("a camera")
            check_versions("a camera", WARP_PACKAGES, OLDER)
            from gpusim_rl.sim.camera_renderer import CameraRenderer

            self._made = CameraRenderer(self._scene, *self._arguments)
        return self._made

    def draw(self) -> None:
        """Render the cameras that are due; see `Sim.draw`."""
        if self._made is not None:
            self._made.draw()

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        """Mark every camera as due if all worlds are reset together."""
        if self._made is not None:
            self._made.reset(where)

    def state_dict(self) -> dict[str, Any]:
        """Return the frames that cannot be rendered again, and their ages."""
        return {} if self._made is None else {name: value.clone() for name, value in self._made.state().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` and render the other frames again."""
        if self._made is not None:
            self._made.redraw()
            for name, value in self._made.state().items():
                if name in state:
                    value.copy_(state[name])

    def close(self) -> None:
        """Stop the rendering threads."""
        if self._made is not None:
            self._made.close()
        self._made = None
