"""Rules for code that runs in every step: nothing waits for the device, and memory is fixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.fakes import Learner, RandomEnv, ppo_config

KINDS: dict[str, dict[str, Any]] = {
    "feed-forward": {},
    "separate": {"separate": True, "state_dependent_std": True},
    "lstm": {"rnn": "lstm", "rnn_layers": 2},
    "gru": {"rnn": "gru", "separate": True},
    "images": {"encoder": {"frames": 3}, "separate": True},
}


def learner(kind: str, *, critic: bool = False, device: str = "cpu", **changes: Any) -> Learner:
    sizes = {"policy": 5, "critic": 7} if critic else {"policy": 5}
    env = RandomEnv(8, sizes, device=device, images={"eye": (13, 13, 1)} if kind == "images" else None)
    cfg = ppo_config(KINDS[kind], minibatch_size=32, epochs=2, sequence_length=4, **changes)
    return Learner(env, cfg, device=device, more={"images": env.images})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("critic", "bf16"), [(False, False), (True, True)])
def test_no_host_sync_in_acting_and_learning(kind: str, critic: bool, bf16: bool) -> None:
    it = learner(kind, critic=critic)
    it.policy.bf16 = bf16
    step = it.env.step
    with SyncCounter() as syncs:

        def env_on_the_host(action: Tensor) -> Any:  # the toy env is not what is under test
            with syncs.pause():
                return step(action)

        it.env.step = env_on_the_host  # type: ignore[method-assign]
        for _ in range(2):
            it.collect()
            it.update()
    assert syncs.total == 0, syncs.locations


@pytest.mark.parametrize("schedule", ["adaptive", "linear", "constant"])
@pytest.mark.parametrize("per", ["minibatch", "epoch"])
@pytest.mark.parametrize("limit", [1.0, None])
def test_no_host_sync_with_any_schedule(schedule: str, per: str, limit: float | None) -> None:
    it = learner("feed-forward", schedule=schedule, schedule_per=per, max_grad_norm=limit)
    it.collect()
    with SyncCounter() as syncs:
        it.update()
    assert syncs.total == 0, syncs.locations


def test_a_sync_in_the_update_would_be_found() -> None:
    it = learner("feed-forward")
    it.collect()
    adapt = it.ppo._adapt
    it.ppo._adapt = lambda kl: adapt(kl) if kl > 0 else None  # type: ignore[method-assign]
    with SyncCounter() as syncs:
        it.update()
    assert syncs.total > 0


@pytest.mark.parametrize(
    ("kind", "critic", "schedule"),
    [
        ("feed-forward", False, "adaptive"),
        ("feed-forward", True, "linear"),
        ("separate", False, "constant"),
        ("lstm", False, "adaptive"),
        ("gru", True, "linear"),
        ("images", True, "adaptive"),
        ("images", False, "adaptive"),
    ],
)
def test_the_whole_iteration_runs_without_data(kind: str, critic: bool, schedule: str) -> None:
    # On the device "meta" tensors have no values: whatever reads one fails.
    it = learner(kind, critic=critic, device="meta", schedule=schedule, horizon=4)
    # Adam is the one thing that cannot: the library's unfused step reads its step counter.
    it.ppo.steps.optimizer.step = lambda: None  # type: ignore[method-assign]
    it.collect()
    stats = it.update()
    assert all(v.device.type == "meta" and v.ndim == 0 for v in stats.values())
    assert all(p.grad is not None and p.grad.device.type == "meta" for p in it.policy.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_where_it_is(kind: str) -> None:
    it = learner(kind)

    def places() -> dict[str, int]:
        found = {f"policy.{name}": t for name, t in it.policy.state_dict().items()}
        found |= {name: t for name, t in vars(it.rollout).items() if isinstance(t, Tensor)}
        for name in ("obs", "final_obs"):
            found |= {f"{name}.{g}": t for g, t in getattr(it.rollout, name).items()}
        for name in ("hidden", "final_hidden"):
            found |= {f"{name}.{i}": t for i, t in enumerate(getattr(it.rollout, name))}
        found |= {
            "rate": it.ppo.steps.learning_rate,
            "iteration": it.ppo.steps.iteration,
            "skipped": it.ppo.steps.skipped,
        }
        rate = it.ppo.steps.optimizer.param_groups[0]["lr"]
        assert rate is it.ppo.steps.learning_rate
        for i, state in enumerate(it.ppo.steps.optimizer.state.values()):
            found |= {f"adam.{i}.{name}": t for name, t in state.items()}
        return {name: tensor.data_ptr() for name, tensor in found.items()}

    fresh = it.ppo.state_dict()  # before the first step, in which Adam makes its state
    it.train(1)
    before, trained = places(), it.ppo.state_dict()
    assert len(before) > 40
    it.train(3)
    assert places() == before
    for state in (trained, fresh):  # in the middle of a training too
        it.ppo.load_state_dict(state)
        assert places() == before
        saved = [tensor for moments in state["optimizer"] for tensor in moments.values()]
        loaded = [tensor for state in it.ppo.steps.optimizer.state.values() for tensor in state.values()]
        assert all(
            torch.equal(a, b) for a, b in zip(saved or [torch.zeros_like(x) for x in loaded], loaded, strict=True)
        )


def test_what_an_update_returns_is_its_own() -> None:
    # a captured graph writes its outputs again: what is kept must not be live state
    it = learner("feed-forward")
    it.collect()
    stats = it.update()
    kept = {name: value.clone() for name, value in stats.items()}
    it.collect()
    it.update()
    assert all(torch.equal(kept[name], value) for name, value in stats.items())
