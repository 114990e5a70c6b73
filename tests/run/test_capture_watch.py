"""Values that a CUDA graph would freeze, planted in a task."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.errors import TaskError
from gpusim_rl.run.cuda_graph import WARM_UP, GraphChoice
from gpusim_rl.testing.recorded_graphs import RecordedGraphs

CPU = torch.device("cpu")
COUNTER = itertools.count()


class Habits:
    """Task that keeps state as a graph would freeze it; each method returns a factor of the reward."""

    total = 0.0

    def __init__(self) -> None:
        self.buffer = torch.arange(12.0).view(4, 3)
        self.number = 0.0
        self.helper = SimpleNamespace(number=0.0, even=False, tensor=torch.ones(3))
        self.table: dict[str, Any] = {"number": 0.0, "tensor": torch.ones(3)}
        self.numbers = [0.0]
        self.past = deque([torch.ones(3)] * 2, maxlen=2)
        self.rows = list(self.buffer.unbind())
        self.made = (torch.full((3,), 2.0) for _ in itertools.count())

    def attribute(self, x: Tensor) -> Tensor:
        self.number += 1.0
        return x * self.number

    def class_attribute(self, x: Tensor) -> Tensor:
        Habits.total += 1.0
        return x * Habits.total

    def number_of_helper(self, x: Tensor) -> Tensor:
        self.helper.number += 1.0
        return x + self.helper.number

    def number_in_dict(self, x: Tensor) -> Tensor:
        self.table["number"] += 1.0
        return x.clamp(max=self.table["number"])

    def number_in_list(self, x: Tensor) -> Tensor:
        self.numbers[0] += 1.0
        return x + self.numbers[0]

    def counter(self, x: Tensor) -> Tensor:
        return x * next(COUNTER)

    def random_number(self, x: Tensor) -> Tensor:
        return x * random.random()

    def numpy_number(self, x: Tensor) -> Tensor:
        return x * float(np.random.default_rng().random())

    def clock(self, x: Tensor) -> Tensor:
        return x * time.perf_counter()

    def number_made_a_tensor(self, x: Tensor) -> Tensor:
        self.helper.number += 1.0
        return x * torch.tensor([self.helper.number] * 3)

    def index(self, x: Tensor) -> Tensor:
        return x + self.buffer[next(COUNTER) % 4]

    def branch(self, x: Tensor) -> Tensor:
        self.helper.even = not self.helper.even
        return x.sin() if self.helper.even else x.cos()

    def replaced_tensor_of_helper(self, x: Tensor) -> Tensor:
        self.helper.tensor = 0.9 * self.helper.tensor + x
        return x * self.helper.tensor

    def replaced_tensor_in_dict(self, x: Tensor) -> Tensor:
        self.table["tensor"] = self.table["tensor"] + x
        return x * self.table["tensor"]

    def deque_of_tensors(self, x: Tensor) -> Tensor:
        self.past.append(x + 1.0)
        return x * self.past[0]

    def rotated_list(self, x: Tensor) -> Tensor:
        self.rows.append(self.rows.pop(0))
        return x * self.rows[0]

    def generator(self, x: Tensor) -> Tensor:
        made = next(self.made) if next(COUNTER) % 2 else self.helper.tensor
        return x * made


class Allowed(Habits):
    """Task whose state a graph repeats correctly."""

    def replaced_tensor(self, x: Tensor) -> Tensor:
        self.buffer = self.buffer * 0.5 + x
        return x + self.buffer[0]

    def written_in_place(self, x: Tensor) -> Tensor:
        self.helper.tensor.mul_(0.9).add_(x)
        self.table["tensor"].copy_(torch.where(x > 0.0, self.helper.tensor, 1.0))
        return x * self.table["tensor"]

    def loop(self, x: Tensor) -> Tensor:
        for t in range(4):
            self.buffer[t] += float(t)
        return x + self.buffer.sum(dim=0) + torch.rand(3)

    def tensors_of_one_call(self, x: Tensor) -> Tensor:
        return torch.stack(list(deque([x, x + 1.0, x * 2.0], maxlen=2))).sum(dim=0)


def names(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_") and callable(getattr(cls, name))]


def run(task: Habits, name: str, *, strict: bool = False) -> RecordedGraphs:
    graphs = RecordedGraphs(GraphChoice("rollout", "test", strict), CPU, stateful=[task])
    habit: Callable[[Tensor], Tensor] = getattr(task, name)
    x = torch.ones(3)
    for _ in range(WARM_UP + 3):
        graphs.run("rollout", lambda: habit(x * 1.0))
    return graphs


@pytest.mark.parametrize("name", names(Habits))
def test_frozen_value_is_named_with_its_line_and_runs_eagerly(name: str, caplog: pytest.LogCaptureFixture) -> None:
    graphs = run(Habits(), name)
    code = getattr(Habits, name).__code__
    lines = {line for *_, line in code.co_lines() if line}
    assert graphs.choice.mode == "update" and not graphs._captured
    if name == "attribute":
        assert "Habits.number" in graphs.choice.reason
    else:
        [line] = re.findall(r"aten\.\w+\.\w+ at \S*test_capture_watch\.py:(\d+) ", graphs.choice.reason)
        assert int(line) in lines
    assert graphs.choice.reason.removeprefix("the rollout cannot be captured: ") in caplog.text


@pytest.mark.parametrize("name", names(Allowed))
def test_state_that_a_graph_repeats_is_captured(name: str) -> None:
    graphs = run(Allowed(), name)
    assert graphs.choice.mode == "rollout" and graphs._captured


def test_frozen_value_is_an_error_in_a_mode_of_the_users_choice() -> None:
    with pytest.raises(TaskError) as info:
        run(Habits(), "clock", strict=True)
    assert info.value.key == "graph=rollout" and "aten.mul" in info.value.problem
