"""The algorithm conformance suite finds faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpusim_rl.learn.a2c import A2C
from gpusim_rl.learn.algorithm import LearnerContext
from gpusim_rl.testing.algorithm_conformance import AlgorithmConformance, make_algorithm
from gpusim_rl.testing.random_env import RandomEnv
from helpers.on_policy import on_policy_config


class Waits(A2C):
    def update(self) -> dict[str, torch.Tensor]:
        stats = super().update()
        return stats if stats["loss/policy"] < 1e9 else {}


class OnTheHost(A2C):
    def act(self, obs: Any) -> torch.Tensor:
        return super().act(obs) + torch.zeros(8, 3)


class Overflows(A2C):
    def update(self) -> dict[str, torch.Tensor]:
        return {**super().update(), "loss/own": torch.tensor(torch.inf)}


class LearnsNothing(A2C):
    def update(self) -> dict[str, torch.Tensor]:
        return {}


class CountsInPython(A2C):
    updates = 0

    def update(self) -> dict[str, torch.Tensor]:
        self.updates = self.updates + 1
        return super().update()


class ReplacesMemory(A2C):
    """Loads its state, but not in place."""

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


class GivesLiveNumbers(ReplacesMemory):
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
        (Waits, "an_iteration_waits_for_nothing"),
        (OnTheHost, "an_iteration_reads_no_value"),
        (Overflows, "what_is_finite_stays_finite"),
        (LearnsNothing, "what_is_finite_stays_finite"),
        (CountsInPython, "replaying_equals_running"),
        (ReplacesMemory, "replaying_equals_running"),
        (Forgets, "a_state_resumes_bit_for_bit"),
        (GivesLiveNumbers, "a_state_resumes_bit_for_bit"),
        (SavesObjects, "a_state_is_data_and_no_larger_than_it"),
        (SavesTooMuch, "a_state_is_data_and_no_larger_than_it"),
    ],
)
def test_the_suite_finds(broken: type[A2C], check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Suite(AlgorithmConformance):
        def make_algorithm(self, name: str, device: str = "cpu") -> Any:
            env = RandomEnv(8, self.obs_sizes, device=device)
            return make_algorithm(broken, on_policy_config("a2c"), env, self.action_space, LearnerContext(name)), env

    more = {"an_iteration_reads_no_value": [monkeypatch]}
    with pytest.raises(Exception):  # noqa: B017
        getattr(Suite(), f"test_{check}")("a2c", *more.get(check, []))
    sound = AlgorithmConformance()
    getattr(sound, f"test_{check}")("a2c", *more.get(check, []))


def test_a_check_of_ones_own_may_be_of_no_algorithm() -> None:
    class Metafunc:
        fixturenames: tuple[str, ...] = ("tmp_path",)
        parametrize = None

    AlgorithmConformance().pytest_generate_tests(Metafunc())  # type: ignore[arg-type]
