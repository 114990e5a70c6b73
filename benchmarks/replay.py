"""Measures how long a batch of n-step transitions takes to draw, beside SB3's and TorchRL's; writes replay.json.

    python benchmarks/replay.py

A full memory of a million transitions of Ant's sizes, batches of 8192. Measured are the draw, the n-step sum and the
gathering of rows, with one thread and with all. Medians of interleaved rounds. All return the true final observation
where the time limit ended an episode. The others store every next observation. SB3's memory is in numpy and gives
torch tensors (`device="cpu"`). TorchRL's (`pip install torchrl`) adds up n steps before it stores them, so its draw is
the same for every n and has no sum in it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

STEPS, ENVS, OBS, ACTIONS, EPISODE, GAMMA = 15_625, 64, 60, 8, 1000, 0.99
BATCH, ROUNDS = 8192, 15
N_STEPS = (1, 3)


def ours(n_step: int) -> tuple[Callable[[], object], int]:
    """What draws a batch, and the bytes of the memory."""
    import torch

    from gpusim_rl.learn.algorithm import EnvSpec
    from gpusim_rl.learn.replay import DIVERGED, TERMINATED, TRUNCATED, Replay
    from gpusim_rl.spaces import Box

    generator = torch.Generator().manual_seed(0)
    spec = EnvSpec(ENVS, {"policy": OBS}, Box(ACTIONS), EPISODE)
    replay = Replay(
        STEPS, spec, ["policy"], n_step=n_step, gamma=GAMMA, storage=torch.float32, device=torch.device("cpu")
    )
    for memory in (*replay.obs.values(), replay.action, replay.reward):
        memory.normal_(generator=generator)
    kind = torch.rand(STEPS, ENVS, generator=generator)
    bits = TERMINATED * (kind < 0.002) + TRUNCATED * ((kind >= 0.002) & (kind < 0.003)) + DIVERGED * (kind > 0.9999)
    replay.ends.copy_(bits)
    replay.total.fill_(STEPS + 1234)
    return lambda: replay.sample(BATCH, generator), replay.num_bytes


def sb3(n_step: int) -> tuple[Callable[[], object], int]:
    """The same of stable_baselines3."""
    import numpy as np
    from gymnasium.spaces import Box
    from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer

    random = np.random.default_rng(0)
    spaces = (Box(-np.inf, np.inf, (size,), np.float32) for size in (OBS, ACTIONS))
    more: dict[str, Any] = {} if n_step == 1 else {"n_steps": n_step, "gamma": GAMMA}
    kind = ReplayBuffer if n_step == 1 else NStepReplayBuffer
    buffer = kind(STEPS * ENVS, *spaces, device="cpu", n_envs=ENVS, **more)
    arrays = (buffer.observations, buffer.next_observations, buffer.actions, buffer.rewards)
    for array in arrays:
        array[:] = random.standard_normal(array.shape, dtype=np.float32)
    ends = random.random(buffer.dones.shape)
    buffer.dones[:] = ends < 0.003
    buffer.timeouts[:] = (ends >= 0.002) & (ends < 0.003)
    buffer.pos, buffer.full = 1234, True
    return lambda: buffer.sample(BATCH), sum(a.nbytes for a in (*arrays, buffer.dones, buffer.timeouts))


def torchrl(n_step: int) -> tuple[Callable[[], object], int]:
    """The same of torchrl: its buffer of tensors, with windows as its MultiStepTransform would have stored them."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer  # type: ignore[reportMissingImports]

    number = STEPS * ENVS
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(number, *size, generator=generator)

    ends = torch.rand(number, 1, generator=generator)
    following = {
        "observation": random(OBS),
        "reward": random(1),
        "done": ends < 0.003,
        "terminated": ends < 0.002,
        "truncated": (ends >= 0.002) & (ends < 0.003),
    }
    stored: dict[str, Any] = {"observation": random(OBS), "action": random(ACTIONS), "next": following}
    if n_step > 1:
        stored["steps_to_next_obs"] = torch.full((number, 1), n_step)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(number), batch_size=BATCH)
    transitions = TensorDict(stored, batch_size=[number])
    buffer.extend(transitions)
    return buffer.sample, transitions.bytes()


def measure(n_step: int) -> dict[str, Any]:
    """Milliseconds by number of threads, and bytes of a transition, of each."""
    import torch

    from gpusim_rl.machine.hardware import available_cpus

    found: dict[str, Any] = {}
    made = {"gpusim_rl": ours(n_step), "stable_baselines3": sb3(n_step), "torchrl": torchrl(n_step)}
    for threads in sorted({1, available_cpus()}):
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {name: [] for name in made}
        for number in range(ROUNDS + 2):
            for name, (draw, _) in made.items():
                started = time.perf_counter()
                draw()
                if number > 1:
                    times[name].append(1e3 * (time.perf_counter() - started))
        for name, values in times.items():
            found.setdefault(name, {})[f"ms_with_{threads}_threads"] = round(statistics.median(values), 3)
    for name, (_, size) in made.items():
        found[name]["bytes_per_transition"] = round(size / (STEPS * ENVS), 1)
    return found


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()
    from gpusim_rl.files.provenance import describe_environment, git_state

    found = {str(n_step): measure(n_step) for n_step in N_STEPS}
    result = {
        "command": "python benchmarks/replay.py",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "others": {name: version(name) for name in ("stable_baselines3", "torchrl")},
        "transitions": STEPS * ENVS,
        "batch": BATCH,
        "by_n_step": found,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    for n_step, by_name in found.items():
        for name, numbers in by_name.items():
            print(f"n_step {n_step}, {name}: {numbers}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
