"""Measures a replay memory of images, with and without compression, on rendered frames; writes pixel_replay.json.

    pip install stable-baselines3 torchrl
    python benchmarks/pixel_replay.py

Beside it are the memories of SB3 and TorchRL, which store what they are given: two stacks for each transition. Four
envs of each task under seeded random actions, 1024 control steps, 84 x 84 pixels in color. Every frame is written once.
Batches of 256 transitions, of which each has two stacks of 4 frames, are drawn from the full memory. Medians of
interleaved rounds, one thread. The samples of both of our memories are compared bit by bit.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

TASKS, ENVS, STEPS, PIXELS, STACK = ("Cartpole", "HalfCheetah", "Ant"), 4, 1024, 84, 4
BATCH, ROUNDS = 256, 15


def rendered(task: str) -> tuple[Any, Any, str]:
    """Frames [steps, envs, height, width, 3], where episodes end [steps, envs], and how they were drawn."""
    import numpy as np
    import torch

    from gpusim_rl.view.player import Player
    from gpusim_rl.view.renderer import GAP, Grid, make_renderer

    player = Player.open(task, act="random", num_envs=ENVS, from_yaml=True)
    width = 2 * PIXELS + GAP
    env: Any = player.env
    sim, grid = env.sim, Grid.of(ENVS, width, width)
    frames = np.zeros((STEPS, ENVS, PIXELS, PIXELS, 3), np.uint8)
    done = torch.zeros(STEPS, ENVS, dtype=torch.bool)
    renderer, _ = make_renderer(sim.scene, sim.qpos.cpu().numpy(), width, width)
    with closing(player), closing(renderer):
        for t in range(STEPS):
            picture = renderer.render(sim.qpos.cpu().numpy())
            for env in range(ENVS):
                x, y = grid.corner(env)
                frames[t, env] = picture[y : y + PIXELS, x : x + PIXELS]
            done[t] = player.step().done
        return torch.from_numpy(frames), done, renderer.name


def of_others(frames: Any, done: Any) -> dict[str, tuple[Any, int, float]]:
    """The same frames in the memories of other libraries: a draw, bytes of a transition, frames written per second."""
    import numpy as np
    import torch
    from gymnasium.spaces import Box
    from stable_baselines3.common.buffers import ReplayBuffer
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer  # type: ignore[reportMissingImports]

    from gpusim_rl.learn.encoders import FrameStack

    shape, first = tuple(frames.shape[2:]), done.roll(1, 0)
    stack = FrameStack({"camera": shape}, STACK)
    seen = stack({"camera": frames}, stack.initial_state(ENVS, torch.device("cpu")), first)[0]["camera"]
    space, action = Box(0, 255, tuple(seen.shape[2:]), np.uint8), Box(-1.0, 1.0, (1,), np.float32)
    sb3 = ReplayBuffer(STEPS * ENVS, space, action, device="cpu", n_envs=ENVS)
    nothing, none = np.zeros(ENVS, np.float32), [{}] * ENVS
    images, ends = seen.numpy(), done.numpy()
    started = time.perf_counter()
    for t in range(STEPS):
        sb3.add(images[t], images[(t + 1) % STEPS], nothing[:, None], nothing, ends[t], none)
    seconds = {"stable_baselines3": time.perf_counter() - started}

    torchrl = TensorDictReplayBuffer(storage=LazyTensorStorage(STEPS * ENVS), batch_size=BATCH)
    zeros = torch.zeros(ENVS, 1)
    started = time.perf_counter()
    for t in range(STEPS):
        outcome = {"pixels": seen[(t + 1) % STEPS], "reward": zeros, "done": done[t, :, None]}
        transitions = {"pixels": seen[t], "action": zeros, "next": TensorDict(outcome, batch_size=[ENVS])}
        torchrl.extend(TensorDict(transitions, batch_size=[ENVS]))
    seconds["torchrl"] = time.perf_counter() - started
    draws = {"stable_baselines3": lambda: sb3.sample(BATCH), "torchrl": torchrl.sample}
    size = sb3.observations.nbytes + sb3.next_observations.nbytes
    return {name: (draws[name], size // (STEPS * ENVS), STEPS * ENVS / seconds[name]) for name in draws}


def measure(task: str) -> dict[str, Any]:
    """Bytes, and speeds of writing and sampling, of both memories."""
    import torch

    from gpusim_rl.env import Step
    from gpusim_rl.learn.algorithm import EnvSpec
    from gpusim_rl.learn.pixel_replay import PixelReplay
    from gpusim_rl.spaces import Box

    frames, done, renderer = rendered(task)
    height, width, channels = frames.shape[2:]
    images: Any = {"images": {"camera": (height, width, channels)}, "final_images": True}
    spec = EnvSpec(ENVS, {}, Box(1), STEPS, **images)
    more: Any = {"stack": STACK, "n_step": 1, "gamma": 0.99, "storage": torch.float32, "device": torch.device("cpu")}
    memories = {
        name: PixelReplay(STEPS, spec, ["camera"], **more, compress=packed)
        for name, packed in (("plain", False), ("lz4", True))
    }
    nothing, action = torch.zeros(ENVS), torch.zeros(ENVS, 1)
    no = torch.zeros(ENVS, dtype=torch.bool)
    found: dict[str, Any] = {}
    for name, memory in memories.items():
        started = time.perf_counter()
        for t in range(STEPS):
            seen = {"camera": frames[t]}
            step = Step(seen, seen, nothing, {}, {}, done[t], no, no, no, done[t], no)
            memory.write(seen, action, step)
        seconds = time.perf_counter() - started
        found[name] = {
            "bytes_per_frame": round(memory.num_bytes / (STEPS * ENVS), 1),
            "frames_written_per_s": round(STEPS * ENVS / seconds),
        }

    generators = {name: torch.Generator().manual_seed(0) for name in memories}
    others = of_others(frames, done)
    times: dict[str, list[float]] = {name: [] for name in (*memories, *others)}
    equal = True
    for number in range(ROUNDS + 2):
        drawn = {}
        for name, memory in memories.items():
            started = time.perf_counter()
            drawn[name] = memory.sample(BATCH, generators[name])
            memory.with_frames(drawn[name])
            if number > 1:
                times[name].append(1e3 * (time.perf_counter() - started))
        for name, (draw, *_) in others.items():
            started = time.perf_counter()
            draw()
            if number > 1:
                times[name].append(1e3 * (time.perf_counter() - started))
        a, b = drawn.values()
        equal &= all(
            torch.equal(getattr(a, part)["camera"], getattr(b, part)["camera"]) for part in ("obs", "next_obs")
        )
    for name, (_, size, speed) in others.items():
        found[name] = {"bytes_per_frame": size, "frames_written_per_s": round(speed)}
    for name, values in times.items():
        found[name]["ms_per_batch"] = round(statistics.median(values), 2)
    whole = frames[0, 0].numel()
    # A block that is being written and the final frames are not compressed: how much they add depends on T.
    packed = sum(map(len, memories["lz4"].frames["camera"]._blocks)) / (STEPS * ENVS)  # type: ignore[union-attr]
    return {
        "renderer": renderer,
        "episodes": int(done.sum()),
        "bytes_of_a_frame": whole,
        "bytes_of_a_transition_as_two_stacks": 2 * STACK * whole,
        "ratio_lz4": round(whole / packed, 1),
        "samples_are_equal": equal,
        **found,
    }


def main() -> None:
    """Measures and writes."""
    from gpusim_rl.machine.hardware import limit_openmp_spin, tune_malloc

    limit_openmp_spin()
    tune_malloc()  # as a training does
    from importlib.metadata import version

    import torch

    from gpusim_rl.files.provenance import describe_environment, git_state

    torch.set_num_threads(1)
    by_task = {}
    for task in TASKS:
        by_task[task] = measure(task)
        print(f"{task}: {by_task[task]}", flush=True)
    result = {
        "command": "python benchmarks/pixel_replay.py",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "versions": {name: version(name) for name in ("lz4", "stable_baselines3", "torchrl")},
        "steps": STEPS,
        "envs": ENVS,
        "stack": STACK,
        "batch": BATCH,
        "by_task": by_task,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
