"""Tests of memory: growth over time and with num_envs, failed allocations."""

from __future__ import annotations

import sys
from typing import Any

import mujoco_warp
import pytest
import torch

from gpusim_rl.errors import ConfigError, one_line_if_out_of_memory
from helpers.raised import raises
from helpers.training import make_trainer

LONG_RUN = """
import sys
from gpusim_rl.testing.scratch_training import scratch_training

def used(key):
    (kilobytes,) = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)]
    return kilobytes * 1024

envs, warm_up, iterations = map(int, sys.argv[1:])
small = ["ppo.minibatch_size=4096", "ppo.epochs=1"]
with scratch_training(["task=Cartpole", f"num_envs={envs}", *small]) as (trainer, log):
    for _ in range(warm_up):
        trainer.iterate(log)
    before = used("VmRSS")
    for _ in range(iterations):
        trainer.iterate(log)
    print(before, used("VmRSS"), used("VmHWM"))
"""


def memory_of(command, num_envs: int, warm_up: int, iterations: int) -> list[int]:
    """Return resident memory after the warm-up, at the end, and its peak [B]."""
    done = command(sys.executable, "-c", LONG_RUN, str(num_envs), str(warm_up), str(iterations))
    return [int(number) for number in done.stdout.split()[-3:]]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_iterations(command):
    before, after, _ = memory_of(command, 64, 20, 300)
    assert after - before < 8e6, f"{(after - before) / 300:.0f} B per iteration"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_grows_linearly_with_envs(command):
    sizes = (16384, 65536, 131072)  # far apart: memory kept by the allocator varies by 20 MB
    first, second, third = (memory_of(command, num_envs, 2, 0)[2] for num_envs in sizes)
    few, many = (second - first) / (sizes[1] - sizes[0]), (third - second) / (sizes[2] - sizes[1])
    assert 0.6 < many / few < 1.7, f"{few:.0f} B per env, then {many:.0f} B"  # 2.4 with quadratic growth


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_failed_allocation_suggests_half_of_the_envs(error):
    with raises(ConfigError, key="num_envs=4096", hint="Try num_envs=2048") as info, one_line_if_out_of_memory(4096):
        raise error
    assert "\n" not in str(info.value)
    with pytest.raises(RuntimeError, match="a bug"), one_line_if_out_of_memory(4096):
        raise RuntimeError("a bug")


def test_physics_out_of_memory_suggests_half_of_the_envs(tmp_path, monkeypatch):
    def few_envs_only(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("nworld", getattr(args[-1], "nworld", None)) == 512:
            raise RuntimeError("Failed to allocate 17179869184 bytes on device 'cuda:0'")
        return original(*args, **kwargs)

    original = mujoco_warp.step
    monkeypatch.setattr(mujoco_warp, "step", few_envs_only)
    with raises(ConfigError, key="num_envs=512", hint="Try num_envs=256"):
        make_trainer("Ant", tmp_path, num_envs=512, sim="mjwarp").train()
