"""Cameras on a CUDA device: equality with the CPU, CUDA graphs, and no synchronisation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpusim_rl.sim import Scene, Sim
from gpusim_rl.testing.conformance import differences
from helpers.scenes import ant_scene, everywhere, make, randomize_ants
from helpers.training import make_trainer
from helpers.watched import watched  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
OUTPUTS = ("rgb", "depth", "segmentation")


def scene() -> Scene:
    found = ant_scene()
    for name, every in (("eye", 1), ("late", 3)):
        found.add_camera(
            name, pos=(0, -4, 2), target=(0, 0, 0.5), size=(64, 64), outputs=OUTPUTS, every=every, groups=(0, 1, 2)
        )
    return found


def started(name: str, device: str, num_envs: int = 32) -> Sim:
    sim = make(name, scene(), num_envs, device=device)
    sim.camera("eye"), sim.camera("late")
    sim.reset(everywhere(sim))
    randomize_ants([sim.articulation("ant")])
    sim.refresh()
    sim.draw()
    return sim


@pytest.mark.decisive
def test_images_equal_cpu_images():
    expected, sim = started("mujoco", "cpu"), started("mjwarp", DEVICE)
    for output in OUTPUTS:
        one, other = getattr(expected.camera("eye"), output), getattr(sim.camera("eye"), output).cpu()
        # rays at edges may miss; colours are rounded
        close = torch.isclose(one.double(), other.double(), rtol=1e-3, atol=2.0 if output == "rgb" else 1e-3)
        assert close.float().mean() > 0.995, output


def test_drawing_does_not_synchronise():
    sim = started("mjwarp", DEVICE)
    sim.step(2)
    sim.draw()  # captures
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    ages = []
    try:
        for _ in range(4):
            sim.step(2)
            sim.draw()
            ages.append(sim.camera("late").age.clone())
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert [age[0].item() for age in ages] == [2, 0, 1, 2]


@pytest.mark.decisive
@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("mode", ["rollout", "step", "split"])
def test_graphs_render_same_images_as_eager_code(mode: str, tmp_path: Path):
    states = []
    for graph in ("off", mode):
        settings = {"sim": "mjwarp", "device": DEVICE, "num_envs": 16, "max_iterations": 5, "graph": graph}
        trainer = make_trainer("Cartpole", tmp_path / graph, None, **settings, log={"interval": 1000})
        trainer.save = lambda log: None  # type: ignore[method-assign]
        with trainer.logging() as log:
            for _ in range(5):
                trainer.iterate(log)
            states.append(trainer.state_dict()["env"])
    assert differences(*states) == []
