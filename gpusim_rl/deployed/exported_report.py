"""Report of an export folder, and replays of the worst fall that a stress test found."""

from __future__ import annotations

import base64
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gpusim_rl.deployed.exported_task import open_export
from gpusim_rl.deployed.walkers import CARD, reading
from gpusim_rl.errors import first_line
from gpusim_rl.files.safe_open import load_json, read_bytes
from gpusim_rl.view.player import Player
from gpusim_rl.view.report import page
from gpusim_rl.view.web_scene import html_replay

MOST_STEPS = 1000  # of the replay of a fall
WORDS = "The policy, with random commands. Drag to rotate, scroll to zoom."


def export_page(folder: Path, steps: int) -> str:
    """Return the page of an untrusted export folder, with replays unless `steps` is 0; ConfigError if it is damaged."""
    with closing(open_export(folder, 1, "trained")) as player, reading(folder):
        names = (CARD, "stress.json", "transfer.json")
        card, stress, transfer = (load_json(file) if file.is_file() else None for file in map(folder.joinpath, names))
        figures = []
        if steps:
            figures.append(("replay", html_replay(player, range(steps), "report"), WORDS))
            figures.append(("fall", *worst_fall(player, folder / "stress.json")))
        png = folder / "stress.png"
        plot = f"data:image/png;base64,{base64.b64encode(read_bytes(png)).decode()}" if png.is_file() else ""
        export = {"name": player.name, "folder": str(folder), "card": card, "stress": stress, "transfer": transfer}
        return page([], exports=[{**export, "figures": figures, "plot": plot}])


def worst_fall(player: Player, file: Path) -> tuple[str, str]:
    """Return a 3D replay of the worst fall in stress.json and its caption, or the reason for its absence."""
    try:
        worst = load_json(file)["worst"] if file.is_file() else None
        if worst is None:  # no stress test, or no fall
            return "", ""
        env: Any = player.env
        ratio, frames = float(worst["hz"]) / env.cfg.control_hz, torch.tensor(worst["qpos"])
        frames = frames.reshape(len(frames), env.sim.qpos.shape[1])
        steps = range(min(int(len(frames) / ratio), MOST_STEPS))
        shown = (frames[min(int(ratio * step), len(frames) - 1)] for step in count())
        recorded: Any = SimpleNamespace(env=env, step=lambda: env.sim.qpos[0].copy_(next(shown)))
        recorded.step()
        words = f"{worst['label']}, {worst['smallest']:.3g} {worst['unit']}"
        return html_replay(recorded, steps, "report", [words]), f"Worst fall: {words}."
    except Exception as error:  # from a damaged file
        return "", f"No replay of the worst fall: {first_line(error)}"
