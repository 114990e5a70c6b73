"""Measure images per second of a scene's cameras on the CPU, on one and two threads, and of MuJoCo's OpenGL renderer.

    python benchmarks/vision/camera.py
    python benchmarks/vision/camera.py --rounds 5

Writes camera.json. Renderers alternate within a round, each thread pinned to its own CPU; ratios are computed within
rounds. `cpu_ms` is CPU time per frame of all envs: the main thread and, with two threads, the slower worker thread.
OpenGL renders one env after another, without shadows and antialiasing; without a GPU, its driver uses the CPU.

The committed data was measured with raised priority:
`setsid sh -c 'echo -20 > /proc/self/autogroup; python benchmarks/vision/camera.py'`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCENES: dict[str, dict[str, Any]] = {
    "Cartpole": {"pos": (0.0, -4.0, 2.0), "target": (0.0, 0.0, 2.0)},
    "Go1Velocity": {"pos": (0.9, -1.1, 0.7), "target": (0.0, 0.0, 0.25)},
}
"""Camera position and target [m] by task."""
SIZES = {32: 512, 64: 256, 84: 128}
"""Number of envs by image width and height [pixels]."""
OPENGL_ENVS = 16
"""Envs that OpenGL renders per round."""
ROUNDS = 15


def make(task: str, pixels: int, num_envs: int, threads: int) -> Any:
    """Return a simulator of a task's scene with a camera; states differ between envs."""
    import torch

    from gpusim_rl.api import prepare
    from gpusim_rl.sim import SimChoice, make_sim

    spec: Any = prepare(task, num_envs=num_envs, device="cpu", sim={"name": "mujoco", "num_threads": threads})
    scene = spec.task_class.scene(spec.cfg.task)
    scene.add_camera("camera", size=(pixels, pixels), **SCENES[task])
    sim: Any = make_sim(scene, SimChoice("mujoco", torch.device("cpu"), "benchmark"), num_envs, spec.cfg.sim)
    sim.camera("camera")
    sim.reset(torch.ones(num_envs, dtype=torch.bool))
    sim.ctrl.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(0))
    sim.step(20)
    sim.draw()
    renderer = sim._cameras._made
    if threads > 1 and hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        renderer._shares = [pinned(share, cpus[i % len(cpus)]) for i, share in enumerate(renderer._shares)]
    return sim


def pinned(share: Callable[[], None], cpu: int) -> Callable[[], None]:
    """Wrap a renderer thread's work to run on one CPU."""

    def run() -> None:
        os.sched_setaffinity(0, {cpu})
        share()

    return run


def opengl(sim: Any, pixels: int) -> tuple[Callable[[], None], str]:
    """Return a function that renders `OPENGL_ENVS` envs with MuJoCo's renderer, and the OpenGL device name."""
    import importlib

    import mujoco

    model = copy.copy(sim.scene.model)
    model.vis.quality.offsamples = 0  # no antialiasing, as in the cameras
    data, renderer = mujoco.MjData(model), mujoco.Renderer(model, pixels, pixels)
    qpos = sim.qpos[:OPENGL_ENVS].numpy().astype(float)

    def draw() -> None:
        for positions in qpos:
            data.qpos[:] = positions
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            mujoco.mj_camlight(model, data)
            renderer.update_scene(data, "camera")
            renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
            renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
            renderer.render()

    draw()
    name = importlib.import_module("OpenGL.GL").glGetString(0x1F01)  # GL_RENDERER
    return draw, name.decode() if name else "unknown"


def threads_of(sim: Any) -> dict[str, float]:
    """Return the CPU time per frame [ms] of the main thread (`alone`) and of the slowest worker thread (`longest`)."""
    renderer = sim._cameras._made
    shares, took = renderer._shares, []

    def timed(share: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            started = time.thread_time()
            share()
            took.append(time.thread_time() - started)

        return run

    if renderer._pool is not None:
        renderer._shares = [timed(share) for share in shares]
    before = time.thread_time()
    sim.draw()
    alone = time.thread_time() - before
    renderer._shares = shares
    return {"alone": 1e3 * alone, "longest": 1e3 * max(took, default=0.0)}


def measure(task: str, pixels: int, num_envs: int, rounds: int) -> dict[str, Any]:
    """Return images per second of each renderer, and the speed-up with two threads."""
    sims = {threads: make(task, pixels, num_envs, threads) for threads in (1, 2)}
    gl, name = opengl(sims[1], pixels)
    ways = {"1 thread": sims[1].draw, "2 threads": sims[2].draw, "OpenGL": gl}
    images = {way: OPENGL_ENVS if way == "OpenGL" else num_envs for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for way, draw in ways.items():
            started = time.perf_counter()
            draw()
            seconds[way].append(time.perf_counter() - started)
        for threads, sim in sims.items():
            cpu[threads].append(sum(threads_of(sim).values()))
    for sim in sims.values():
        sim.close()
    ratios = [one / two for one, two in zip(seconds["1 thread"], seconds["2 threads"], strict=True)]
    cpu_ms = {f"{threads} threads": statistics.median(values) for threads, values in cpu.items()}
    return {
        "task": task,
        "pixels": pixels,
        "num_envs": num_envs,
        "opengl": name,
        "images_per_s": {way: round(images[way] / statistics.median(took)) for way, took in seconds.items()},
        "best_images_per_s": {way: round(images[way] / min(took)) for way, took in seconds.items()},
        "two_threads_over_one": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "cpu_ms": cpu_ms,
        "cpu_ratio": cpu_ms["1 threads"] / cpu_ms["2 threads"],
    }


def main() -> None:
    """Run the benchmark and write camera.json."""
    parser = argparse.ArgumentParser(description="Measure images per second of cameras on the CPU.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    os.environ.setdefault("MUJOCO_GL", "egl")
    from gpusim_rl.files.provenance import describe_environment, git_state

    rows = []
    for task in SCENES:
        for pixels, num_envs in SIZES.items():
            rows.append(measure(task, pixels, num_envs, rounds))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "command": "python benchmarks/vision/camera.py",
        "git": git_state(Path("runs"))[0],
        "environment": describe_environment(),
        "rows": rows,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, installed or not
    main()
