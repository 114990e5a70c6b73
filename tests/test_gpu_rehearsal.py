"""Selected tests of tests/gpu on a CPU, to keep them in step with the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu import test_actors_cuda, test_camera_cuda, test_graph_cuda, test_host_replay_cuda


@pytest.mark.parametrize(
    "rehearsed",
    [
        lambda _: test_host_replay_cuda.test_what_arrives_on_the_device_is_what_the_host_would_draw_for_itself(),
        lambda folder: test_graph_cuda.test_every_replay_draws_new_envs("rollout", folder),
        lambda folder: test_graph_cuda.test_every_replay_draws_new_numbers("rollout", folder),
        lambda _: test_camera_cuda.test_images_are_those_of_the_cpu(),
        lambda _: test_camera_cuda.test_drawing_does_not_synchronise(),
        pytest.param(
            lambda folder: test_actors_cuda.test_a_learner_on_the_gpu_takes_rollouts_of_actors(
                folder, "sac", "learner"
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["replay memory", "envs", "numbers", "images", "draws", "actors"],
)
def test_gpu_test_runs_on_the_cpu(
    rehearsed: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules: list[Any] = [test_actors_cuda, test_camera_cuda, test_graph_cuda, test_host_replay_cuda]
    for module in modules:
        monkeypatch.setattr(module, "DEVICE", "cpu")
    rehearsed(tmp_path)
