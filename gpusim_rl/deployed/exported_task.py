"""Robots of an export folder as a task, for all viewers, video tools and reports."""

from __future__ import annotations

import base64
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.deployed.walkers import Walkers, reading
from gpusim_rl.env import Commands, Task, TaskConfig
from gpusim_rl.errors import first_line
from gpusim_rl.files.safe_open import load_json, read_bytes
from gpusim_rl.sim import Scene, Sim
from gpusim_rl.view.playback import open_replayed
from gpusim_rl.view.player import Player

EPISODE_S, COMMAND_S = 20.0, 5.0  # length of an episode; time between two random commands
ANY = (-1.0, 1.0)  # range of a command whose trained range is unknown
UNITS = {"x": "m/s", "y": "m/s", "yaw": "rad/s"}
MOST_STEPS = 1000  # of the replay of a fall


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedConfig(TaskConfig):
    """Settings of an exported policy's task, created in Python, not from yaml."""

    walkers: Walkers


class ExportedTask(Task[ExportedConfig]):
    """ExportedTask: show the robots that `Walkers` steps; actions and the simulator's own step have no effect.

    The reward is the horizontal speed [m/s], for display. An episode ends with a fall, or after `EPISODE_S`.
    """

    Config = ExportedConfig

    @classmethod
    def scene(cls, cfg: ExportedConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add("robot", cfg.walkers.folder / Path(cfg.walkers.card["files"]["scene"]).name)
        return scene

    def __init__(self, cfg: ExportedConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.num_actions, self.walkers = 1, cfg.walkers  # tasks need at least one action
        self._standing = float(self.walkers.height[0])
        limits = {name: [*(ends or ANY)] for name, ends in self.walkers.ranges.items()}
        self.commands = Commands(self, limits, interval=COMMAND_S, units=UNITS) if limits else None

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        if self.commands is not None:
            self.commands.resample(where)
        self.walkers.reset(np.flatnonzero(where.numpy()))
        self._show()

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        if self.commands is not None:
            self.walkers.command[:] = self.commands.value.numpy()
        self.walkers.step()

    def advance(self, done: Bool[Tensor, " envs"]) -> None:
        if self.commands is not None:
            self.commands.advance()
        self._show()

    def _show(self) -> None:
        self.sim.qpos.copy_(torch.from_numpy(self.walkers.qpos))
        self.sim.qvel.copy_(torch.from_numpy(self.walkers.qvel))
        self.sim.wrote_state(torch.ones_like(self.progress, dtype=torch.bool))

    def observe(self) -> Float[Tensor, "envs obs"]:
        return torch.from_numpy(self.walkers.velocity).float()

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        return {"speed": self.observe()[:, :2].norm(dim=1)}

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        return dict(zip(("forward [m/s]", "left [m/s]", "turn [rad/s]"), self.observe().unbind(dim=1), strict=True))

    def terminated(self) -> Bool[Tensor, " envs"]:
        return torch.from_numpy(self.walkers.fallen(self._standing))


def open_export(folder: Path, num_envs: int, act: str) -> Player:
    """Return a player for an untrusted export folder, `act` is `trained` or `zero`; ConfigError if it is damaged."""
    walkers = Walkers(folder, num_envs)
    walkers.policy = "file" if act == "trained" else "zero"
    hz, name = walkers.control_hz, str(walkers.card.get("task"))
    with reading(folder):
        player = open_replayed(ExportedTask, name, hz, round(EPISODE_S * hz), num_envs, walkers=walkers)
    player.act, player.run_dir = act, folder
    return player


def export_page(folder: Path, steps: int) -> str:
    """Return the page of an untrusted export folder, with replays unless `steps` is 0; ConfigError if it is damaged."""
    from gpusim_rl.view.report import page
    from gpusim_rl.view.web_scene import html_replay

    with closing(open_export(folder, 1, "trained")) as player, reading(folder):
        names, figures = ("policy.json", "stress.json", "transfer.json"), []
        card, stress, transfer = (load_json(file) if file.is_file() else None for file in map(folder.joinpath, names))
        if steps:
            words = "The policy, with random commands. Drag to rotate, scroll to zoom."
            figures.append(("replay", html_replay(player, range(steps), "report"), words))
            figures.append(("fall", *worst_fall(player, folder / "stress.json")))
        png = folder / "stress.png"
        plot = f"data:image/png;base64,{base64.b64encode(read_bytes(png)).decode()}" if png.is_file() else ""
        export = {"name": player.name, "folder": str(folder), "card": card, "stress": stress, "transfer": transfer}
        return page([], exports=[{**export, "figures": figures, "plot": plot}])


def worst_fall(player: Player, file: Path) -> tuple[str, str]:
    """Return a 3D replay of the worst fall in stress.json and its caption, or the reason for its absence."""
    from gpusim_rl.view.web_scene import html_replay

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
