"""Tests of metrics: episode window against a slow reference, rows, state in checkpoints."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.env import Step
from gpusim_rl.learn.collective import Collective
from gpusim_rl.run.metrics import EpisodeWindow, Metrics
from gpusim_rl.testing.sync_counter import SyncCounter

CPU = torch.device("cpu")


class Reference:
    """Slow reference: return and length of the last `size` counted episodes, env by env."""

    def __init__(self, num_envs: int, size: int) -> None:
        self.running = [(0.0, 0)] * num_envs
        self.finished: deque[tuple[float, int]] = deque(maxlen=size)

    def record(self, reward: Tensor, done: Tensor, counts: Tensor) -> None:
        for world, (total, length) in enumerate(self.running):
            total, length = total + reward[world].item(), length + 1
            if done[world] and counts[world]:
                self.finished.append((total, length))
            self.running[world] = (0.0, 0) if done[world] else (total, length)

    def means(self) -> tuple[float, float, int]:
        count = len(self.finished)
        if not count:
            return float("nan"), float("nan"), 0
        returns, lengths = zip(*self.finished, strict=True)
        return sum(returns) / count, sum(lengths) / count, count


@pytest.mark.parametrize(
    ("num_envs", "size", "rate"),
    [
        (1, 3, 0.3),
        (5, 100, 0.1),  # never full
        (40, 4, 0.9),  # one rollout exceeds the window
        (16, 16, 1.0),  # every step fills the window
    ],
)
@pytest.mark.parametrize("horizon", [1, 5])
def test_episode_window_equals_python_reference(num_envs, size, rate, horizon):
    random = torch.Generator().manual_seed(num_envs)
    window, reference = EpisodeWindow(num_envs, size, CPU), Reference(num_envs, size)
    steps = []
    for step in range(60):
        # sums of eighths are exact in any order
        reward = torch.randint(-40, 40, (num_envs,), generator=random) / 8
        # sometimes all envs end at once, sometimes none
        chance = {3: 1.0, 4: 0.0}.get(step % 20, rate)
        done = torch.rand(num_envs, generator=random) < chance
        counts = torch.rand(num_envs, generator=random) < 0.8
        reference.record(reward, done, counts)
        steps.append((reward, done, counts))
        if len(steps) < horizon:
            continue
        window.record(*(torch.stack(values) for values in zip(*steps, strict=True)))
        steps.clear()
        *means, trimmed = [value.item() for value in window.means()]
        assert math.isnan(trimmed) == (means[2] < size)
        assert means == pytest.approx(reference.means(), nan_ok=True, rel=1e-6)


def test_episode_window_ignores_incomplete_episodes():
    window = EpisodeWindow(2, 3, CPU)
    everywhere, nowhere = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.bool)
    window.record(torch.ones(1, 2), everywhere, nowhere)  # ended early
    mean_return, mean_length, count, _ = window.means()
    assert mean_return.isnan() and mean_length.isnan() and count == 0
    window.record(torch.ones(1, 2), everywhere, everywhere)  # the next episode began at zero
    assert [value.item() for value in window.means()[:3]] == [1.0, 1.0, 2.0]


def test_episode_window_resumes_from_its_state():
    random = torch.Generator().manual_seed(0)
    windows = [EpisodeWindow(6, 4, CPU), EpisodeWindow(6, 4, CPU)]
    for step in range(30):
        reward, done = torch.randn(1, 6, generator=random), torch.rand(1, 6, generator=random) < 0.3
        for window in windows[: 1 if step < 15 else 2]:
            window.record(reward, done, torch.ones(1, 6, dtype=torch.bool))
        if step == 14:
            windows[1].load_state_dict(windows[0].state_dict())
    assert torch.equal(windows[0].ring[:, :-1], windows[1].ring[:, :-1])
    assert torch.equal(windows[0].episode_return, windows[1].episode_return)
    assert windows[0].total == windows[1].total


def test_trimmed_mean_resists_outliers():
    window = EpisodeWindow(100, 100, CPU)
    everywhere = torch.ones(1, 100, dtype=torch.bool)
    reward = torch.arange(100.0)[None]
    window.record(reward, everywhere, everywhere)
    assert window.means()[3] == 49.5
    absurd = torch.cat([torch.tensor([[1e30, 1e30, torch.inf]]), reward[:, 3:]], dim=1)
    window.record(absurd, everywhere, everywhere)
    assert window.means()[0] == torch.inf and 49.5 < window.means()[3] < 53.0
    window.record(reward + 10.0, everywhere, everywhere)  # a change of all episodes moves the mean
    assert window.means()[3] == 59.5


def make_step(
    num_envs: int,
    reward: float,
    *,
    done: int = 0,
    diverged: int = 0,
    incomplete: int = 0,
    stats: dict[str, Tensor] | None = None,
) -> Step:
    def first(count: int) -> Tensor:
        return torch.arange(num_envs) < count

    value = torch.full((num_envs,), reward)
    obs = {"policy": torch.zeros(num_envs, 2)}
    return Step(
        obs=obs,
        final_obs=obs,
        reward=value,
        terms={"speed": 0.75 * value, "cost": 0.25 * value},
        stats={} if stats is None else stats,
        terminated=first(done),
        truncated=first(0),
        diverged=first(diverged),
        bad_action=first(0),
        done=first(max(done, diverged)),
        incomplete=first(max(diverged, incomplete)),
    )


def record(metrics: Metrics, *steps: Step) -> None:
    metrics.begin_rollout()
    for step in steps:
        metrics.record_step(step)
    metrics.end_rollout()


def flush(metrics: Metrics, **extra: Tensor) -> dict[str, Any]:
    [(host, row)] = metrics.flush({"iteration": 7}, extra)
    assert host == {"iteration": 7}
    return row


def test_task_stats_are_means_over_envs_with_values():
    metrics = Metrics(4, CPU)
    nan = torch.nan
    level, success = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([nan, 1.0, nan, nan])
    later = torch.tensor([0.0, nan, nan, 0.0])
    steps = (make_step(4, 1.0, stats={"level": level, "success": numbers}) for numbers in (success, later))
    record(metrics, *steps)
    row = flush(metrics)
    assert row["task/level"] == 2.0 and row["task/success"] == pytest.approx(1.0 / 3.0)
    record(metrics, make_step(4, 1.0, stats={"level": level, "success": torch.full((4,), nan)}))
    row = flush(metrics)
    assert row["task/level"] == 2.0 and row["task/success"] is None


def test_row_has_interval_sums_term_means_and_window():
    metrics = Metrics(4, CPU)
    # env 0 ended because it diverged
    record(metrics, make_step(4, 1.0), make_step(4, 3.0, done=2, diverged=1))
    metrics.record_update({"loss/value": torch.tensor(0.5)})
    row = flush(metrics, extra=torch.tensor(9.0))
    assert row == {
        "episode/return": 4.0,
        "episode/length": 2.0,
        "episode/count": 1.0,  # of two that ended, one is complete
        "episode/trimmed_return": None,
        "sim/diverged": 1.0,
        "sim/bad_actions": 0.0,
        "check/valid": 7.0,
        "episode/ended": 2.0,
        "reward/speed": 1.5,
        "reward/cost": 0.5,
        "loss/value": 0.5,
        "extra": 9.0,
    }
    assert all(isinstance(value, float) for name, value in row.items() if name != "episode/trimmed_return")

    record(metrics, make_step(4, 8.0))
    metrics.record_update({"loss/value": torch.tensor(0.25)})
    row = flush(metrics)  # sums restart, the window continues
    assert (row["sim/diverged"], row["episode/ended"], row["reward/speed"]) == (0.0, 0.0, 6.0)
    assert (row["episode/return"], row["loss/value"]) == (4.0, 0.25)


def test_recording_adds_no_sync():
    metrics = Metrics(4, CPU)
    stats = {"loss/value": torch.tensor(0.5), "check/obs": torch.tensor(0.0)}
    record(metrics, make_step(4, 1.0, done=1))
    metrics.record_update(stats)
    step = make_step(4, 1.0, done=1)
    with SyncCounter() as syncs:
        record(metrics, step)
        metrics.record_update(stats)
    assert syncs.total == 0, syncs.locations


def test_unfinished_log_interval_survives_a_checkpoint():
    whole, stopped, resumed = Metrics(4, CPU), Metrics(4, CPU), Metrics(4, CPU)
    before = [make_step(4, 1.0), make_step(4, 2.0, done=3, diverged=1)]
    after = [make_step(4, 5.0, done=4), make_step(4, 0.5)]
    for step in before:
        record(whole, step)
        record(stopped, step)
    resumed.load_state_dict(stopped.state_dict())
    for step in after:
        record(whole, step)
        record(resumed, step)
    assert flush(resumed) == flush(whole)


def test_aborted_rollout_is_discarded():
    metrics = Metrics(4, CPU)
    metrics.begin_rollout()
    metrics.record_step(make_step(4, 100.0, done=4))
    record(metrics, make_step(4, 1.0))
    row = flush(metrics)
    assert (row["reward/speed"], row["episode/ended"]) == (0.75, 0.0)


def test_pending_row_is_waited_for_once():
    class Event:
        waits = 0

        def synchronize(self) -> None:
            self.waits += 1

    metrics, event = Metrics(4, CPU), Event()
    metrics.wait()  # no pending row
    assert metrics.drain() == []
    metrics._in_flight, metrics._arrival = ("host", ["a"], torch.tensor([2.0])), event  # type: ignore[assignment]
    metrics.wait()
    metrics.wait()
    assert metrics.drain() == [("host", {"a": 2.0})] and event.waits == 1
    assert metrics.drain() == []


def test_metrics_state_is_a_snapshot():
    metrics = Metrics(4, CPU)
    record(metrics, make_step(4, 1.0))
    state = metrics.state_dict()
    record(metrics, make_step(4, 1.0, done=4))
    fresh = Metrics(4, CPU)
    fresh.load_state_dict(state)
    assert fresh.episodes.episode_length.tolist() == [1.0] * 4 and fresh.episodes.total == 0


def test_metrics_moved_from_actor_to_learner_equal_local_metrics() -> None:
    envs, steps = 3, 5
    local, actor, learner = (Metrics(envs, torch.device("cpu")) for _ in range(3))
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for metrics in (local, actor):
            metrics.begin_rollout()
        for _ in range(steps):
            reward, kind = (torch.rand(envs, generator=generator) for _ in range(2))
            done = kind < 0.4
            nowhere = torch.zeros(envs, dtype=torch.bool)
            step: Any = SimpleNamespace(
                reward=reward,
                terms={"all": reward},
                stats={"number": torch.where(done, reward, torch.nan)},
                done=done,
                incomplete=done & (kind < 0.2),  # from a staggered start
                diverged=nowhere,
                bad_action=nowhere,
                skipped=None,
            )
            for metrics in (local, actor):
                metrics.record_step(step)
        for metrics in (local, actor):
            metrics.end_rollout()
        learner.add(actor.take())
    [(_, expected)], [(_, moved)] = local.flush(None, {}), learner.flush(None, {})
    assert moved == pytest.approx(expected)
    assert expected["episode/count"] and expected["episode/count"] < expected["episode/ended"]


def test_new_stat_may_appear_within_a_rollout():
    metrics = Metrics(2, CPU)
    known, late = torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 5.0])
    for stats in ({"a": known}, {}, {"b": late, "a": known + 2.0}):
        metrics.record_step(make_step(2, 1.0, stats=stats))
    metrics.end_rollout()
    metrics.record_step(make_step(2, 1.0))
    metrics.end_rollout()
    [(_, row)] = metrics.flush(None, {})
    assert (row["task/a"], row["task/b"]) == (2.0, 5.0)
    [(_, row)] = metrics.flush(None, {})
    assert row["task/a"] is None and row["task/b"] is None


class Pair(Collective):
    """One of two processes; the other has the given names."""

    size = 2

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def gather(self, value: Any) -> list[Any]:
        return [value, self.names]

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)


def test_processes_with_different_stat_names_agree_on_order():
    pair = Pair(["task/b", "task/a"])
    metrics = Metrics(2, CPU, collective=pair, late_names=True)
    metrics.record_step(make_step(2, 1.0, stats={"a": torch.ones(2), "c": torch.ones(2)}))
    metrics.end_rollout()
    [(_, row)] = metrics.flush(None, {})
    order = [name for name in row if name.startswith("task/")]
    assert order == ["task/a", "task/c", "task/b"]
    assert (row["task/a"], row["task/b"], row["task/c"]) == (1.0, None, 1.0)
