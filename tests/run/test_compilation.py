"""compile=off|learner|all: the choice and its reason, and what it compiles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpusim_rl.env import vec_env
from gpusim_rl.machine import compiled
from gpusim_rl.run import compilation
from gpusim_rl.run.compilation import choose_compile
from helpers.training import differences, make_trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def choose(wanted: str, device: torch.device = CUDA, *, check_task: bool = False) -> str:
    cfg: Any = SimpleNamespace(test=False, compile=wanted, debug=SimpleNamespace(check_task=check_task))
    return str(choose_compile(cfg, device))


@pytest.fixture
def has_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "find_spec", lambda _: object())
    monkeypatch.setattr(compilation, "has_compiler", lambda: True)


@pytest.mark.usefixtures("has_compiler")
def test_the_choice_has_a_reason() -> None:
    assert choose("off") == "off (as configured)"
    assert choose("learner") == "learner (as configured)"
    assert choose("all", CPU) == "learner and control steps (as configured)"
    assert choose("all", check_task=True) == "learner (debug.check_task reads every step)"
    assert choose("learner", check_task=True) == "learner (as configured)"


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "has_compiler", lambda: False)
    monkeypatch.setattr(compilation, "find_spec", lambda _: object())
    assert choose("all", CPU) == "off (torch.compile needs a C++ compiler)"
    monkeypatch.setattr(compilation, "find_spec", lambda _: None)
    assert choose("all") == "off (torch.compile needs the package triton)"


class Traced(compiled.Compiled):
    """Traced, and run by torch's eager kernels: bit for bit, in no time."""

    def __init__(self, function, what, backend):
        super().__init__(function, what, "eager")


@pytest.mark.slow
@pytest.mark.usefixtures("has_compiler")
@pytest.mark.parametrize("mode", ["learner", "all"])
def test_compiled_code_is_in_use_and_is_no_part_of_a_checkpoint(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_as_usual = torch.compile
    monkeypatch.setattr(vec_env, "Compiled", Traced)
    monkeypatch.setattr(
        torch, "compile", lambda function, **settings: compile_as_usual(function, **{**settings, "backend": "eager"})
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
        assert trainer.run_dir.environment["compile"] == {"mode": wanted, "reason": "as configured"}
    assert "compile" not in states[mode]
    for key in ("policy", "algorithm", "env", "metrics"):
        assert differences(states[mode][key], states["off"][key]) == [], key
