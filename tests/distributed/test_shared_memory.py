"""Shared memory: equal tensors in all processes, cleanup after a kill, and weights without torn reads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import torch

from gpusim_rl.distributed.process_engine import SharedWeights
from gpusim_rl.distributed.shared_memory import SharedMemory
from helpers.commands import ROOT

SHAPES = [((3, 2), torch.float32), ((5,), torch.bool), ((), torch.int64)]
STATE = {"weight": torch.zeros(300_000), "count": torch.zeros((), dtype=torch.int64)}


def child(code: str, *fds: int) -> subprocess.Popen[str]:
    """Start a process with inherited file descriptors of shared memory."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, fds)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, pass_fds=fds, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_share_tensors_and_killed_one_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    memory = SharedMemory()
    first, second, third = memory.lay_out(SHAPES)
    assert [(tuple(x.shape), x.dtype) for x in (first, second, third)] == SHAPES
    first.copy_(torch.arange(6.0).view(3, 2))
    code = """
        import sys, torch
        from gpusim_rl.distributed.shared_memory import SharedMemory
        shapes = [((3, 2), torch.float32), ((5,), torch.bool), ((), torch.int64)]
        first, second, third = SharedMemory(int(sys.argv[1])).lay_out(shapes)
        third.fill_(int(first.sum()))
        second[2] = True
        print("written", flush=True)
        input()
    """
    process = child(code, memory.fd)
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    process.kill()
    process.communicate()
    assert third == 15 and second.tolist() == [False, False, True, False, False]
    memory.close()
    assert first.sum() == 15, "mapped tensors stay valid"
    assert set(os.listdir("/dev/shm")) <= before


def test_weights_are_never_torn() -> None:
    memory = SharedMemory()
    weights = SharedWeights(memory, STATE)
    weights.write(0, STATE)
    code = """
        import sys, torch
        from gpusim_rl.distributed.process_engine import SharedWeights
        from gpusim_rl.distributed.shared_memory import SharedMemory
        weights = SharedWeights(SharedMemory(int(sys.argv[1])),
                                {"weight": torch.zeros(300_000), "count": torch.zeros((), dtype=torch.int64)})
        print("reads", flush=True)
        seen = set()
        while True:
            version, state = weights.read()
            assert (state["weight"] == version).all() and state["count"] == version, version
            seen.add(version)
            if version == -1:
                break
        print(len(seen))
    """
    reader = child(code, memory.fd)
    assert reader.stdout is not None and reader.stdout.readline() == "reads\n"
    end, version = time.monotonic() + 0.5, 0
    while time.monotonic() < end:
        version += 1
        weights.write(version, {"weight": torch.full((300_000,), float(version)), "count": torch.tensor(version)})
        time.sleep(1e-4)
    weights.write(-1, {"weight": torch.full((300_000,), -1.0), "count": torch.tensor(-1)})
    seen, _ = reader.communicate(timeout=60)
    assert reader.returncode == 0 and int(seen) > 2, seen
