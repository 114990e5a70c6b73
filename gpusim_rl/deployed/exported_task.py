"""Robots of an export folder as a task, for all viewers and video tools."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.deployed.walkers import CARD, Walkers, reading
from gpusim_rl.env import Commands, Task, TaskConfig
from gpusim_rl.files.safe_open import load_json, refuse_links
from gpusim_rl.sim import Scene, Sim
from gpusim_rl.view.playback import open_replayed
from gpusim_rl.view.player import Player

EPISODE_S, COMMAND_S = 20.0, 5.0  # length of an episode; time between two random commands
ANY = (-1.0, 1.0)  # range of a command whose trained range is unknown
UNITS = {"x": "m/s", "y": "m/s", "yaw": "rad/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedConfig(TaskConfig):
    """Settings of an exported policy's task, created in Python, not from yaml."""

    folder: Path
    scene: str  # file in the folder
    policy: Literal["file", "zero"]


class ExportedTask(Task[ExportedConfig]):
    """ExportedTask: show the robots that `Walkers` steps; actions and the simulator's own step have no effect.

    The reward is the horizontal speed [m/s], for display. An episode ends with a fall, or after `EPISODE_S`.
    """

    Config = ExportedConfig

    @classmethod
    def scene(cls, cfg: ExportedConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add("robot", cfg.folder / cfg.scene)
        return scene

    def __init__(self, cfg: ExportedConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.num_actions = 1  # tasks need at least one
        self.walkers = Walkers(cfg.folder, sim.num_envs)
        self.walkers.policy = cfg.policy
        self._height = float(self.walkers.height[0])
        limits = {name: [*map(float, ends or ANY)] for name, ends in self.walkers.card["commands"].items()}
        if self.walkers.model.nq != sim.scene.model.nq or not np.isfinite([*limits.values()]).all():
            raise ValueError("scene or commands cannot be shown")
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
        for name in ("qpos", "qvel"):
            getattr(self.sim, name).copy_(torch.from_numpy(getattr(self.walkers, name)))
        self.sim.wrote_state(torch.ones_like(self.progress, dtype=torch.bool))

    def observe(self) -> Float[Tensor, "envs obs"]:
        return torch.from_numpy(self.walkers.velocity).float()

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        return {"speed": self.observe()[:, :2].norm(dim=1)}

    def stats(self) -> dict[str, Float[Tensor, " envs"]]:
        return dict(zip(("forward [m/s]", "left [m/s]", "turn [rad/s]"), self.observe().unbind(dim=1), strict=True))

    def terminated(self) -> Bool[Tensor, " envs"]:
        return torch.from_numpy(self.walkers.fallen(self._height))


def open_export(folder: Path, num_envs: int, act: str) -> Player:
    """Return a player for an untrusted export folder, `act` is `trained` or `zero`; ConfigError if it is damaged."""
    refuse_links(folder)
    with reading(folder):
        card: dict[str, Any] = load_json(folder / CARD)
        hz, policy = float(card["control_hz"]), "file" if act == "trained" else act
        name, steps = str(card["task"]), max(1, round(EPISODE_S * hz))
        own = {"folder": folder, "scene": Path(card["files"]["scene"]).name, "policy": policy}
        player = open_replayed(ExportedTask, name, hz, steps, num_envs, **own)
    player.act, player.run_dir = act, folder
    return player
