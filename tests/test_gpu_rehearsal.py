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
        lambda _: test_host_replay_cuda.test_device_samples_equal_host_samples(),
        lambda folder: test_graph_cuda.test_every_replay_draws_new_randomization("rollout", folder),
        lambda folder: test_graph_cuda.test_every_replay_draws_new_noise("rollout", folder),
        lambda _: test_camera_cuda.test_images_equal_cpu_images(),
        lambda _: test_camera_cuda.test_drawing_does_not_synchronise(),
        pytest.param(
            lambda folder: test_actors_cuda.test_gpu_learner_trains_on_actor_rollouts(folder, "sac", "learner"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["replay buffer", "envs", "numbers", "images", "draws", "actors"],
)
def test_gpu_test_runs_on_the_cpu(
    rehearsed: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules: list[Any] = [test_actors_cuda, test_camera_cuda, test_graph_cuda, test_host_replay_cuda]
    for module in modules:
        monkeypatch.setattr(module, "DEVICE", "cpu")
    rehearsed(tmp_path)
