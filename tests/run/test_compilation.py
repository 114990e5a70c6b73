"""Tests of the setting `compile`: the choice, its reason and the compiled functions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpusim_rl.connect.gymnasium_in import GymnasiumEnv
from gpusim_rl.env import vec_env
from gpusim_rl.machine import compiled
from gpusim_rl.run import devices
from gpusim_rl.run.devices import CompileChoice, choose_compile
from helpers.training import differences, make_trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def choose(
    wanted: str, device: torch.device = CUDA, *, check_task: bool = False, engine: str | None = None, **more: Any
) -> CompileChoice:
    given = {name: more.pop(name) for name in ("outside", "since") if name in more}
    settings = {"test": False, "compile": wanted, "torch_deterministic": False, "multi_gpu": False, **more}
    debug, actors = SimpleNamespace(check_task=check_task), SimpleNamespace(engine=engine)
    cfg: Any = SimpleNamespace(**settings, debug=debug, actors=actors)
    return choose_compile(cfg, device, settings.pop("sim_device", device), **given)


@pytest.fixture
def has_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda _: object())
    monkeypatch.setattr(devices, "has_compiler", lambda: True)


@pytest.mark.usefixtures("has_compiler")
def test_compile_choice_states_its_reason() -> None:
    assert choose("off") == CompileChoice("off", "as configured")
    assert choose("learner") == CompileChoice("learner", "as configured")
    assert choose("all", CPU) == CompileChoice("all", "as configured")
    limited = choose("all", check_task=True)
    assert limited.mode == "learner" and "debug.check_task" in limited.reason
    assert choose("learner", check_task=True) == choose("learner")


@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("CUDA", {"device": CPU}),
        ("physics on cpu", {"sim_device": CPU}),
        ("torch_deterministic", {"torch_deterministic": True}),
        ("multi_gpu", {"multi_gpu": True}),
        ("actors", {"engine": "process"}),
        ("Gymnasium", {"outside": GymnasiumEnv}),
        ("check_task", {"check_task": True}),
    ],
)
def test_auto_compiles_only_single_cuda_runs(
    reason: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert choose("auto").mode == "later" and not choose("auto").now
    assert choose("auto", since=9) == CompileChoice("all", "auto: since iteration 9", 9)
    for since in (None, 9):
        choice = choose("auto", since=since, **changes)
        assert choice.mode == "off" and reason in choice.reason
    assert caplog.messages == []


def test_missing_compiler_turns_compilation_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_compiler", lambda: False)
    monkeypatch.setattr(devices, "find_spec", lambda _: object())
    choice = choose("all", CPU)
    assert choice.mode == "off" and "C++" in choice.reason
    monkeypatch.setattr(devices, "find_spec", lambda _: None)
    choice = choose("all")
    assert choice.mode == "off" and "triton" in choice.reason


class Traced(compiled.Compiled):
    """Traced function that runs torch's eager kernels: fast and bit-identical."""

    def __init__(self, function, what, backend):
        super().__init__(function, what, "eager")


@pytest.mark.slow
@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize("mode", ["learner", "all"])
def test_compiled_code_runs_and_stays_out_of_checkpoints(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_compile = torch.compile
    monkeypatch.setattr(vec_env, "Compiled", Traced)
    monkeypatch.setattr(
        torch, "compile", lambda function, **settings: original_compile(function, **{**settings, "backend": "eager"})
    )
    states = {}
    for wanted in ("off", mode):
        trainer = make_trainer("Cartpole", tmp_path / wanted, compile=wanted, max_iterations=99)
        with trainer.logging() as log:
            for _ in range(3):
                trainer.iterate(log)
            states[wanted] = trainer.state_dict()
        assert trainer.start.compile.mode == wanted
        assert {name for name, value in vars(trainer.env).items() if isinstance(value, Traced)} == (
            set(vec_env.COMPILED) if wanted == "all" else set()
        )
        assert trainer.run_dir is not None
        assert trainer.run_dir.environment["compile"] == {
            "mode": wanted,
            "reason": "as configured",
            "since": None,
        }
    assert "compile" not in states[mode]
    for key in ("policy", "algorithm", "env", "metrics"):
        assert differences(states[mode][key], states["off"][key]) == [], key
