"""Laws of the hot path: nothing waits for the device, and memory is fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.diagnose.transfers import SyncCounter
from helpers.fakes import Learner, RandomEnv, ppo_config

KINDS: dict[str, dict[str, Any]] = {
    "feed-forward": {},
    "separate": {"separate": True, "state_dependent_std": True},
    "lstm": {"rnn": "lstm", "rnn_layers": 2},
    "gru": {"rnn": "gru", "separate": True},
}


def learner(kind: str, *, critic: bool = False, device: str = "cpu", **changes: Any) -> Learner:
    sizes = {"policy": 5, "critic": 7} if critic else {"policy": 5}
    env = RandomEnv(8, sizes, device=device)
    cfg = ppo_config(KINDS[kind], minibatch_size=32, epochs=2, sequence_length=4, **changes)
    return Learner(env, cfg, device=device)


# The counter itself: a test that cannot fail proves nothing


def mask_write(x: Tensor, mask: Tensor) -> None:
    x.clone()[mask] = torch.ones(3)


def in_backward(x: Tensor, mask: Tensor) -> None:
    y = x.clone().requires_grad_()
    y.register_hook(lambda grad: grad * grad.max().item())
    y.sum().backward()


SYNCS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "item": lambda x, m: x.sum().item(),
    "float": lambda x, m: float(x.sum()),
    "int": lambda x, m: int(x.sum()),
    "bool": lambda x, m: bool(m.any()),
    "if": lambda x, m: 1 if m.any() else 0,
    "index": lambda x, m: range(10)[m.sum()],
    "format": lambda x, m: f"{x.sum():.3f}",
    "is_nonzero": lambda x, m: torch.is_nonzero(x.sum()),
    "_local_scalar_dense": lambda x, m: torch.ops.aten._local_scalar_dense(x.sum()),
    "nonzero": lambda x, m: m.nonzero(),
    "argwhere": lambda x, m: torch.argwhere(m),
    "where with one argument": lambda x, m: torch.where(m),
    "mask read": lambda x, m: x[m],
    "mask read of rows": lambda x, m: x[m.any(dim=1)],
    "mask write": mask_write,
    "masked_select": lambda x, m: x.masked_select(m),
    "unique": lambda x, m: x.unique(),
    "unique of rows": lambda x, m: torch.unique(x, dim=0),
    "unique_consecutive": lambda x, m: x.unique_consecutive(),
    "equal": lambda x, m: torch.equal(x, x),
    "allclose": lambda x, m: torch.allclose(x, x),
    "bincount": lambda x, m: torch.bincount(m.flatten().long()),
    "repeat_interleave": lambda x, m: torch.repeat_interleave(x[0], m[0].long()),
    "cpu": lambda x, m: x.cpu(),
    "numpy": lambda x, m: x.numpy(),
    "asarray": lambda x, m: np.asarray(x),
    "tolist": lambda x, m: x.tolist(),
    "tensor": lambda x, m: torch.tensor([1.0, 2.0]),
    "as_tensor": lambda x, m: torch.as_tensor(2.0),
    "in backward": in_backward,
}


@pytest.mark.parametrize("name", SYNCS)
def test_the_counter_counts(name: str) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    mask = x > 2
    with SyncCounter() as syncs:
        SYNCS[name](x, mask)
    assert syncs.total == 1, syncs.places
    assert "test_hot_path.py:" in syncs.places[0], "it says where"
    before = syncs.total
    SYNCS[name](x, mask)
    assert syncs.total == before, "it counts only while entered"


def test_the_counter_lets_device_work_pass() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    mask, index = x > 2, torch.arange(2)
    with SyncCounter() as syncs:
        torch.where(mask, x, 0.0).sum()
        x.masked_fill(mask, 1.0)
        x[index], x[:, 1], x[..., 0]
        x.clone()[:, 0] = 1.0
        x.clone().copy_(x)
        x.to(torch.float64).mean().clamp(min=0.0)
        torch.as_tensor(x)
        torch.repeat_interleave(x, 2, dim=0)
        torch.randperm(7)
        x.new_zeros(3).normal_()
        mask.cumsum(dim=0)
        assert x.shape[0] == 2 and x.device.type == "cpu"
    assert syncs.total == 0, syncs.places


def test_the_counter_pauses_and_restores() -> None:
    methods = {name: getattr(Tensor, name) for name in ("item", "cpu", "numpy", "tolist")}
    tensor = torch.tensor
    x = torch.ones(3)
    with SyncCounter() as syncs:
        with syncs.pause():
            assert x.sum().item() == 3.0 and x[x > 0].tolist() == [1.0] * 3
        assert syncs.total == 0
        x.sum().item()
    assert syncs.counts == {"item": 1}
    assert all(getattr(Tensor, name) is method for name, method in methods.items())
    assert torch.tensor is tensor
    with pytest.raises(RuntimeError, match="inside"), SyncCounter():
        raise RuntimeError("inside")
    assert Tensor.item is methods["item"]


def test_the_counter_sees_copies_between_devices() -> None:
    with SyncCounter() as syncs:
        torch.ones(3).to("meta")
    assert syncs.counts == {"_to_copy": 1}


# The laws


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
    assert syncs.total == 0, syncs.places


@pytest.mark.parametrize("schedule", ["adaptive", "linear", "constant"])
@pytest.mark.parametrize("per", ["minibatch", "epoch"])
@pytest.mark.parametrize("limit", [1.0, None])
def test_no_host_sync_with_any_schedule(schedule: str, per: str, limit: float | None) -> None:
    it = learner("feed-forward", schedule=schedule, schedule_per=per, max_grad_norm=limit)
    it.collect()
    with SyncCounter() as syncs:
        it.update()
    assert syncs.total == 0, syncs.places


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
    ],
)
def test_the_whole_iteration_runs_without_data(kind: str, critic: bool, schedule: str) -> None:
    # On the device "meta" tensors have no values: whatever reads one fails.
    it = learner(kind, critic=critic, device="meta", schedule=schedule, horizon=4)
    # Adam is the one thing that cannot: the library's unfused step reads its step counter.
    it.ppo.optimizer.step = lambda: None  # type: ignore[method-assign]
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
        found |= {"rate": it.ppo.learning_rate, "iteration": it.ppo.iteration}
        rate = it.ppo.optimizer.param_groups[0]["lr"]
        assert rate is it.ppo.learning_rate
        for i, state in enumerate(it.ppo.optimizer.state.values()):
            found |= {f"adam.{i}.{name}": t for name, t in state.items()}
        return {name: tensor.data_ptr() for name, tensor in found.items()}

    it.train(1)  # Adam makes its state in the first step
    before = places()
    assert len(before) > 40
    it.train(3)
    assert places() == before


def test_what_an_update_returns_is_its_own() -> None:
    # a captured graph writes its outputs again: what is kept must not be live state
    it = learner("feed-forward")
    it.collect()
    stats = it.update()
    kept = {name: value.clone() for name, value in stats.items()}
    it.collect()
    it.update()
    assert all(torch.equal(kept[name], value) for name, value in stats.items())
