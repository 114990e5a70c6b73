"""Counter of host syncs: detection, phases, copied bytes, source lines."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.run.phases import OUTSIDE
from gpusim_rl.testing.sync_counter import CopyTotals, SyncCounter, Work


def mask_write(x: Tensor, mask: Tensor) -> None:
    x.clone()[mask] = torch.ones(3)


def in_backward(x: Tensor, mask: Tensor) -> None:
    y = x.clone().requires_grad_()
    y.register_hook(lambda grad: grad * grad.max().item())
    y.sum().backward()


SYNCS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "item": lambda x, m: x.sum().item(),
    "index": lambda x, m: range(10)[m.sum()],
    "format": lambda x, m: f"{x.sum():.3f}",
    "is_nonzero": lambda x, m: torch.is_nonzero(x.sum()),
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
    "asarray": lambda x, m: np.asarray(x),
    "in backward": in_backward,
}


@pytest.mark.parametrize("name", SYNCS)
def test_sync_counter_detects_sync(name: str) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    mask = x > 2
    with SyncCounter() as syncs:
        SYNCS[name](x, mask)
    assert syncs.total == 1, syncs.locations
    assert "test_sync_counter.py:" in syncs.locations[0]
    before = syncs.total
    SYNCS[name](x, mask)
    assert syncs.total == before, "counted outside of the block"


def test_sync_counter_ignores_device_work() -> None:
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
    assert syncs.total == 0, syncs.locations


def test_sync_counter_pauses_and_restores_methods() -> None:
    methods = {name: getattr(Tensor, name) for name in ("item", "cpu", "numpy", "tolist")}
    tensor = torch.tensor
    x = torch.ones(3)
    with SyncCounter() as syncs:
        with syncs.pause():
            assert x.sum().item() == 3.0 and x[x > 0].tolist() == [1.0] * 3
        assert syncs.total == 0
        x.sum().item()
    assert [location.what for location in syncs.found] == ["item"]
    assert all(getattr(Tensor, name) is method for name, method in methods.items())
    assert torch.tensor is tensor
    with pytest.raises(RuntimeError, match="inside"), SyncCounter():
        raise RuntimeError("inside")
    assert Tensor.item is methods["item"]


def test_sync_counter_detects_copies_between_devices() -> None:
    with SyncCounter() as syncs:
        torch.ones(3).to("meta")
    assert [location.what for location in syncs.found] == ["_to_copy"]


def test_sync_counter_separates_phases():
    x = torch.ones(3)
    with SyncCounter() as syncs:
        with syncs.around("simulate"):
            (x + 1).sum().item()
            with syncs.around("inner"):
                x * 2
        with syncs.around("policy"):
            x.view(3, 1)[:, 0].add_(1)  # views run no kernel
        x.tolist()
    assert {name: (work.operators, dict(work.syncs)) for name, work in syncs.work.items()} == {
        "rollout": (3, {"item": 1}),
        "inner": (1, {}),
        OUTSIDE: (0, {"tolist": 1}),
    }
    assert [place.phase for place in syncs.found] == ["rollout", OUTSIDE]


BYTES: dict[str, tuple[Callable[[Tensor], object], tuple[int, int], tuple[int, int]]] = {
    "item": (lambda x: x.sum().item(), (0, 0), (1, 4)),
    "float": (lambda x: float(x.sum()), (0, 0), (1, 4)),
    "if": (lambda x: 1 if x.any() else 0, (0, 0), (1, 1)),
    "cpu": (lambda x: x.cpu(), (0, 0), (1, 24)),
    "numpy": (lambda x: x.numpy(), (0, 0), (1, 24)),
    "tolist": (lambda x: x.double().tolist(), (0, 0), (1, 48)),
    "nonzero": (lambda x: x.nonzero(), (0, 0), (1, 8)),
    "tensor": (lambda x: torch.tensor([1.0, 2.0]), (1, 8), (0, 0)),
    "as_tensor": (lambda x: torch.as_tensor(np.zeros(3)), (1, 24), (0, 0)),
    "to another device": (lambda x: x.to("meta"), (1, 24), (0, 0)),
    "from another device": (lambda x: torch.zeros(2, 3).copy_(torch.zeros(3, device="meta")), (0, 0), (1, 12)),
    "cpu, then numpy": (lambda x: x.cpu().numpy(), (0, 0), (1, 24)),
    "cpu, then a view": (lambda x: x.cpu().detach()[0].numpy().tolist(), (0, 0), (1, 24)),
    "cpu of two": (lambda x: (x.cpu(), x.sum().cpu())[0].sum().item(), (0, 0), (3, 32)),
    "without data": (lambda x: x + 1, (0, 0), (0, 0)),
}


@pytest.mark.parametrize("name", BYTES)
def test_copies_are_counted_by_direction_and_size(name):
    copies, to_device, to_host = BYTES[name]
    x = torch.arange(6.0).reshape(2, 3)
    with SyncCounter() as syncs, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            copies(x)
        except NotImplementedError:  # meta tensors hold no data
            assert name == "from another device"
    [work] = syncs.work.values() if syncs.work else [Work()]
    assert (work.to_device, work.to_host) == (CopyTotals(*to_device), CopyTotals(*to_host))
    assert syncs.total == to_device[0] + to_host[0]


def test_sync_is_located_in_the_given_library(tmp_path, monkeypatch):
    package = tmp_path / "otherlib" / "torch"  # like the torch subpackage of some libraries
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def learn(step, x):\n    step(x)\n    return x.sum().item()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import otherlib.torch as other  # type: ignore[import-not-found]

    def ours(x: Tensor) -> None:
        x.tolist()

    for library, lines in (("otherlib", (2, 3)), (None, ("test_sync_counter", 3))):
        with SyncCounter(library) as syncs:
            other.learn(ours, torch.ones(2))
        first, second = syncs.locations
        assert second.endswith("otherlib/torch/__init__.py:3")
        assert (f"otherlib/torch/__init__.py:{lines[0]}" if library else "test_sync_counter.py") in first
