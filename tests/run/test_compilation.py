"""compile=off|learner|all|auto: the choice, how `auto` measures, and that a run continues with what it has chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim_rl.env import vec_env
from gpusim_rl.machine import compiled
from gpusim_rl.run import compilation
from gpusim_rl.run.compilation import SKIPPED, TIMED, CompileChoice, Trial, choose_compile
from gpusim_rl.run.trainer import Trainer
from helpers.training import differences, make_trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
ITERATIONS = 2 * (SKIPPED + TIMED)


def choose(wanted: str, device: torch.device = CUDA, sim: torch.device = CUDA, **given: Any) -> str:
    settings = {"check_task": False, "deterministic": False, "before": None, **given}
    return str(choose_compile(wanted, device, sim, **settings))


def test_the_choice_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "find_spec", lambda _: object())
    monkeypatch.setattr(compilation, "has_compiler", lambda: True)
    assert choose("off") == "off (as configured)"
    assert choose("learner") == "learner (as configured)"
    assert choose("all", CPU, CPU) == "learner and control steps (as configured)"
    assert choose("auto") == "to be measured (in the first 12 iterations)"
    assert choose("auto", CPU, CPU) == "off (auto: the CPU is as fast without)"
    assert choose("auto", CUDA, CPU) == "off (auto: physics on cpu)"
    assert choose("auto", deterministic=True) == "off (auto: torch_deterministic=true)"
    assert choose("all", CPU, CPU, deterministic=True) == "learner and control steps (as configured)"
    assert choose("auto", before="all") == "learner and control steps (auto: as before the checkpoint)"
    assert choose("auto", before="off") == "off (auto: as before the checkpoint)"
    assert choose("auto", before="auto").startswith("to be measured")
    assert choose("all", check_task=True) == "learner (debug.check_task reads every step)"
    assert choose("auto", check_task=True) == "off (debug.check_task reads every step)"


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "has_compiler", lambda: False)
    monkeypatch.setattr(compilation, "find_spec", lambda _: object())
    assert choose("all", CPU, CPU) == "off (torch.compile needs a C++ compiler)"
    assert choose("auto") == "off (torch.compile needs a C++ compiler)"
    monkeypatch.setattr(compilation, "find_spec", lambda _: None)
    assert choose("all") == "off (torch.compile needs the package triton)"


def timer(times: Sequence[float]) -> Callable[[Callable[[], None]], float]:
    """Runs the work, and says that it took the next one of these times."""
    left = iter(times)

    def seconds(work: Callable[[], None]) -> float:
        work()
        return next(left)

    return seconds


@pytest.mark.parametrize(
    ("eager", "compiled", "switches", "mode"),
    [
        (0.004, 0.003, [True], "all"),
        (0.003, 0.004, [True, False], "off"),
        (0.100, 0.098, [True, False], "off"),  # within the noise
    ],
)
def test_auto_keeps_the_faster_and_tells_both_times(
    eager: float, compiled: float, switches: list[bool], mode: str
) -> None:
    times = [9.0] * SKIPPED + [eager, eager, 5.0] + [0.001] * SKIPPED + [compiled, compiled, 5.0]
    switched: list[bool] = []
    done: list[int] = []
    trial = Trial(lambda enabled: switched.append(enabled), timer(times))
    choices = [trial.run(lambda: done.append(len(switched))) for _ in range(ITERATIONS)]
    assert choices[:-1] == [None] * (ITERATIONS - 1)
    reason = f"auto: an iteration takes {1e3 * compiled:.2f} ms compiled and {1e3 * eager:.2f} ms eager"
    assert choices[-1] == CompileChoice(mode, reason, measured=True)
    assert switched == switches
    assert done == [0] * (SKIPPED + TIMED) + [1] * (SKIPPED + TIMED), "every iteration runs once"


class Traced(compiled.Compiled):
    """Traced, and run by torch's eager kernels: bit for bit, in no time."""

    def __init__(self, function: Callable, what: str, backend: str) -> None:
        super().__init__(function, what, "eager")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[CompileChoice]:
    """`auto` measures on the CPU, as it does on CUDA: compiled code is the faster."""
    times = [1.0] * (SKIPPED + TIMED) + [0.5] * (SKIPPED + TIMED)
    chosen = []

    def auto(wanted: str, *_: object, before: str | None, **__: object) -> CompileChoice:
        chosen.append(choose_compile(wanted, CUDA, CUDA, check_task=False, deterministic=False, before=before))
        return chosen[-1]

    monkeypatch.setattr(compilation, "find_spec", lambda _: object())
    monkeypatch.setattr(compilation, "has_compiler", lambda: True)
    monkeypatch.setattr(compilation, "choose_compile", auto)
    monkeypatch.setattr(compilation, "cuda_seconds", timer(times))
    monkeypatch.setattr(vec_env, "Compiled", Traced)
    monkeypatch.setattr(torch, "compile", with_eager_kernels(torch.compile))
    return chosen


def with_eager_kernels(compile: Callable) -> Callable:
    return lambda function, **settings: compile(function, **{**settings, "backend": "eager"})


def train(trainer: Trainer) -> dict[str, Any]:
    """State after some iterations more than a measurement takes; it is saved."""
    with trainer.logging() as log:
        for _ in range(ITERATIONS + 1):
            trainer.iterate(log)
        trainer.save(log)
        return trainer.state_dict()


@pytest.mark.slow
def test_measuring_changes_no_number_of_a_training_and_a_resumed_run_chooses_the_same(
    measured: list[CompileChoice], tmp_path: Path
) -> None:
    expected = train(make_trainer("Cartpole", tmp_path / "eager", compile="off", max_iterations=99))
    auto = make_trainer("Cartpole", tmp_path / "auto", compile="auto", max_iterations=99)
    assert auto.compile.mode == "auto"
    state = train(auto)
    reason = "auto: an iteration takes 500.00 ms compiled and 1000.00 ms eager"
    assert auto.compile == CompileChoice("all", reason, measured=True)
    assert isinstance(vars(auto.env)["_act"], Traced)
    for key in ("policy", "algorithm", "env", "metrics"):
        assert differences(state[key], expected[key]) == [], key
    assert state["compile"] == "all"
    assert auto.run_dir is not None and auto.run_dir.environment["compile"]["mode"] == "all"
    again = make_trainer("Cartpole", tmp_path / "auto", checkpoint=str(auto.run_dir), compile="auto", max_iterations=99)
    assert again.compile == CompileChoice("all", "auto: as before the checkpoint", measured=True)
    assert isinstance(vars(again.env)["_act"], Traced)
    for key in ("policy", "algorithm", "env", "metrics"):
        assert differences(again.state_dict()[key], expected[key]) == [], key
    with again.logging() as log:  # its banner is short enough
        again.iterate(log)
