"""Faults that the algorithm conformance suite detects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpusim_rl.learn.a2c import A2C
from gpusim_rl.learn.algorithm import LearnerContext
from gpusim_rl.testing.algorithm_conformance import AlgorithmConformance, make_algorithm
from gpusim_rl.testing.random_env import RandomEnv
from helpers.on_policy import on_policy_config


class SyncsWithHost(A2C):
    def update(self) -> dict[str, torch.Tensor]:
        stats = super().update()
        return stats if stats["loss/policy"] < 1e9 else {}


class ActsOnHost(A2C):
    def act(self, obs: Any) -> torch.Tensor:
        return super().act(obs) + torch.zeros(8, 3)


class Overflows(A2C):
    def update(self) -> dict[str, torch.Tensor]:
        return {**super().update(), "loss/extra": torch.tensor(torch.inf)}


class ReturnsNoStatistics(A2C):
    def update(self) -> dict[str, torch.Tensor]:
        return {}


class CountsInPython(A2C):
    updates = 0

    def update(self) -> dict[str, torch.Tensor]:
        self.updates = self.updates + 1
        return super().update()


class ReplacesMemory(A2C):
    """Algorithm whose load_state_dict replaces a tensor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own = {"updates": torch.zeros(())}

    def update(self) -> dict[str, torch.Tensor]:
        self.own["updates"] += 1.0
        return {**super().update(), "own/updates": self.own["updates"].clone()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": self.own["updates"].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.own = {"updates": state["own"]}


class Forgets(ReplacesMemory):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        A2C.load_state_dict(self, state)


class ReturnsLiveStatistics(ReplacesMemory):
    def update(self) -> dict[str, torch.Tensor]:
        return {**super().update(), "own/updates": self.own["updates"]}


class SavesObjects(A2C):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": self.cfg}


class SavesTooMuch(A2C):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": torch.zeros(1000)[:2]}


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (SyncsWithHost, "iteration_has_no_host_sync"),
        (ActsOnHost, "iteration_runs_on_meta_tensors"),
        (Overflows, "training_stays_finite_and_learns"),
        (ReturnsNoStatistics, "training_stays_finite_and_learns"),
        (CountsInPython, "graph_replay_equals_eager_run"),
        (ReplacesMemory, "graph_replay_equals_eager_run"),
        (Forgets, "resume_is_bit_identical"),
        (ReturnsLiveStatistics, "resume_is_bit_identical"),
        (SavesObjects, "state_dict_is_plain_data_of_minimal_size"),
        (SavesTooMuch, "state_dict_is_plain_data_of_minimal_size"),
    ],
)
def test_suite_detects_the_fault(broken: type[A2C], check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Suite(AlgorithmConformance):
        def make_algorithm(self, name: str, device: str = "cpu") -> Any:
            env = RandomEnv(8, self.obs_sizes, device=device)
            return make_algorithm(broken, on_policy_config("a2c"), env, self.action_space, LearnerContext(name)), env

    more = {"iteration_runs_on_meta_tensors": [monkeypatch]}
    with pytest.raises(Exception):  # noqa: B017
        getattr(Suite(), f"test_{check}")("a2c", *more.get(check, []))
    sound = AlgorithmConformance()
    getattr(sound, f"test_{check}")("a2c", *more.get(check, []))


def test_custom_check_needs_no_algorithm_parameter() -> None:
    class Metafunc:
        fixturenames: tuple[str, ...] = ("tmp_path",)
        parametrize = None

    AlgorithmConformance().pytest_generate_tests(Metafunc())  # type: ignore[arg-type]
