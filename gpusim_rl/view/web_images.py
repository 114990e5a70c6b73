"""Images beside the scene of the viewer in the browser: what the policy sees of the env that is followed."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpusim_rl.view.player import Player
from gpusim_rl.view.video import newest

SIDE = 300  # of an image, about as wide as the panel is [pixels]


class Images:
    """A folder of the panel with the newest image of each group.

    They are those that the policy, or its frozen encoder, sees next: nothing is drawn for the page.

    Args:
        gui: Panel of the page, from viser.
        player: Player whose policy sees images.
    """

    def __init__(self, gui: Any, player: Player) -> None:
        self._player = player
        groups = player.images
        with gui.add_folder("Camera"):
            self.handles: dict[str, Any] = {
                group: gui.add_image(self._picture(group, 0), label=group if len(groups) > 1 else None, format="png")
                for group in groups
            }

    def show(self, env: int) -> None:
        """Sends the images of an env, if they are others than before."""
        for group, handle in self.handles.items():
            picture = self._picture(group, env)
            if not np.array_equal(picture, handle.image):
                handle.image = picture

    def _picture(self, group: str, env: int) -> np.ndarray:
        """Returns an image in whole squares for its pixels: the browser would blur them."""
        image = newest(self._player.images[group][env, None])[0]
        times = max(1, SIDE // max(image.shape[:2]))
        return image.repeat(times, axis=0).repeat(times, axis=1)
