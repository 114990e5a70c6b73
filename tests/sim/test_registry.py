"""Tests of the simulator registry and of the choice of a simulator."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.settings.simulators import SIMULATORS, default_simulator
from gpusim_rl.sim import SimChoice, choose_sim, make_sim
from helpers.commands import ROOT
from helpers.raised import raises
from helpers.scenes import ball_scene, sim_config


@pytest.mark.parametrize("simulator", SIMULATORS.values(), ids=list(SIMULATORS))
def test_registry_entry_matches_its_class(simulator):
    pytest.importorskip(simulator.library)
    assert getattr(importlib.import_module(f"gpusim_rl.sim.{simulator.name}"), simulator.cls).name == simulator.name
    assert simulator.replay_sim in SIMULATORS
    assert (ROOT / "cfg" / "sim" / f"{simulator.name}.yaml").is_file()


@pytest.mark.parametrize(
    ("name", "device", "chosen"),
    [
        ("auto", "cpu", "mujoco on cpu (auto: no CUDA "),
        ("auto", "cuda:1", "mjwarp on cuda:1 (auto: CUDA "),
        ("mjwarp", "cpu", "mjwarp on cpu (as "),
        ("newton", "cuda", "newton on cuda (as "),
    ],
)
def test_simulator_choice_shows_its_reason(name, device, chosen):
    assert str(choose_sim(name, torch.device(device))).startswith(chosen)


def test_unsupported_device_is_rejected():
    with pytest.raises(ConfigError, match=r"^sim=mujoco .* cuda. Try sim=mjwarp, or sim_dev"):
        choose_sim("mujoco", torch.device("cuda"))


def test_unused_buffer_sizes_cause_a_warning(caplog):
    cfg = sim_config(njmax=20, nconmax=30)
    with caplog.at_level(logging.WARNING, "gpusim_rl"):
        for name, shown in (("mjwarp", {"njmax": 20, "nconmax": 30}), ("mujoco", {})):
            sim = make_sim(ball_scene(), SimChoice(name, torch.device("cpu"), "test"), 2, cfg)
            assert sim.buffers == shown
    assert ["no effect: sim=mujoco" in line for line in caplog.messages] == [True]


def test_sim_name_accepts_registered_simulators():
    values = {name: getattr(sim_config(), name) for name in SimConfig.__dataclass_fields__}
    for name in ("auto", *SIMULATORS):
        assert build(SimConfig, {**values, "name": name}, "sim").name == name
    with raises(ConfigError, key="sim.name", got="mujocco"):
        build(SimConfig, {**values, "name": "mujocco"}, "sim")


def test_every_device_type_has_a_default_simulator():
    assert [default_simulator(device).name for device in ("cpu", "cuda")] == ["mujoco", "mjwarp"]
