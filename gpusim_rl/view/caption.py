"""Captions of videos: the policy, and the command of each env."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gpusim_rl.env import Environment, VecEnv
from gpusim_rl.env.command import steerable
from gpusim_rl.files.safe_open import refuse_links
from gpusim_rl.run.writers import read_csv
from gpusim_rl.view.player import Player
from gpusim_rl.view.renderer import Grid

TEXTS_PER_TILE = 20  # tile height over text height
SMALLEST, LARGEST = 10, 18  # text heights [pixels]
INK, OUTLINE = (255, 255, 255), (30, 34, 42)


def words_of(player: Player) -> list[str]:
    """Return the words of a caption, most important first: task, iteration, mean training return."""
    if player.policy is None:
        return [player.name, f"{player.act} actions"]
    words = [player.name, f"iteration {player.iteration:,}"]
    value = None if player.run_dir is None else _return_at(player.run_dir / "metrics.csv", player.iteration)
    return words if value is None else [*words, f"return {value:,.4g}"]


def _return_at(metrics: Path, iteration: int | None) -> float | None:
    if not metrics.is_file():
        return None
    refuse_links(metrics.parent)
    content = read_csv(metrics)
    rows = (dict(zip(content.columns, row, strict=True)) for row in content.rows())
    values = (row.get("episode/return") for row in rows if row["iteration"] == str(iteration))
    return next((float(value) for value in values if value), None)


def commands_of(env: Environment) -> list[str]:
    """Return each env's command, `command  x 1.00  yaw -0.30`; empty without commands."""
    commands = steerable(env.task) if isinstance(env, VecEnv) else None
    if commands is None:
        return []
    names = [name.partition(" ")[0] for name in commands.controls()]
    return ["  ".join(("command", *map("{} {:.2f}".format, names, row))) for row in commands.value.tolist()]


class Caption:
    """Caption writer for a picture; drops the last words if space is short."""

    def __init__(self, grid: Grid, words: Sequence[str]) -> None:
        from PIL import Image, ImageDraw, ImageFont

        self._grid, self._images, self._drawing = grid, Image, ImageDraw
        size = min(LARGEST, max(SMALLEST, grid.tile_height // TEXTS_PER_TILE))
        self._font = ImageFont.load_default(size=size)
        self._edge = size // 2
        self._words = ", ".join(words)
        while self._font.getlength(self._words) > grid.width - 2 * self._edge:
            self._words = self._words.rpartition(", ")[0]

    def write(self, picture: np.ndarray, commands: Sequence[str] = ()) -> np.ndarray:
        """Return the picture, uint8 [height, width, 3], with words on top and a command at the bottom of each tile."""
        image = self._images.fromarray(np.ascontiguousarray(picture))
        draw, edge = self._drawing.Draw(image), self._edge
        look = {"font": self._font, "fill": INK, "stroke_width": 1, "stroke_fill": OUTLINE}
        draw.text((edge, edge), self._words, **look)
        for tile, command in enumerate(commands):
            left, top = self._grid.corner(tile)
            if self._font.getlength(command) <= self._grid.tile_width - 2 * edge:
                draw.text((left + edge, top + self._grid.tile_height - edge), command, anchor="ld", **look)
        return np.asarray(image)
