"""Cartpole with cameras; its policy sees a row of pixels."""

from __future__ import annotations

from typing import Any

import pytest
from gpusim_rl.tasks.cartpole import Cartpole, CartpoleConfig

from gpusim_rl.env import Terms
from gpusim_rl.sim import Scene, Sim

SIZE = (12, 16)
EVERY = {"now": 1, "late": 3}
SCENE, INIT, OBSERVE = Cartpole.scene, Cartpole.__init__, Cartpole.observe


def _scene(cfg: CartpoleConfig) -> Scene:
    scene = SCENE(cfg)
    for name, every in EVERY.items():
        outputs = ("rgb", "depth", "segmentation")
        scene.add_camera(name, pos=(0, -3, 2), target=(0, 0, 2), size=SIZE, outputs=outputs, every=every)
    return scene


def _init(self: Any, cfg: CartpoleConfig, sim: Sim) -> None:
    INIT(self, cfg, sim)
    self.images = {name: sim.camera(name) for name in EVERY}


def _observe(self: Any) -> dict[str, Terms]:
    terms = OBSERVE(self)["policy"]
    for name, images in self.images.items():
        row = SIZE[0] // 2
        terms |= {
            f"{name}_rgb": images.rgb[:, row].flatten(1) / 255.0,
            f"{name}_depth": images.depth[:, row] / 100.0,
            f"{name}_segmentation": images.segmentation[:, row].float(),
            f"{name}_age": images.age[:, None].float(),
        }
    return {"policy": terms}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cartpole, "scene", staticmethod(_scene))
    monkeypatch.setattr(Cartpole, "__init__", _init)
    monkeypatch.setattr(Cartpole, "observe", _observe)
