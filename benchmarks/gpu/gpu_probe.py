"""Facts about a CUDA device, the cheapest and most decisive first; `benchmarks/gpu/gpu_check.py` runs this as `probe`.

    python benchmarks/gpu/gpu_probe.py FILE [--device cpu] [--num-envs N] [key=value ...]

The file is saved after every fact. If a fact fails, its error is recorded and the process exits, since a failure may
corrupt the device; a rerun continues with the next fact. Exit code 0: no fact is missing; 1: the last fact failed;
2: bad input, or no CUDA.
"""

import argparse
import copy
import importlib.metadata
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from measuring.checkout import ROOT, require_device, write

Fact = dict[str, Any]
"""Measured values, and messages about unexpected values under `wrong`."""

ROUNDS = 5
"""Rounds per measurement; the result is the median."""

SPREADS = 10.0
"""Maximum ratio of the captured-eager difference to the eager-eager difference."""

MOST_SPREAD = 1e-3
"""Maximum observation difference between two eager rollouts of 16 control steps from the same state."""

SETTLING = 60
"""Control steps before measuring, so that the robots are on the ground."""

NOT_PIECES = "; captures in pieces (graph=split) do not need this"


def main(argv: list[str] | None = None) -> int:
    """Collect missing facts until one fails."""
    from gpusim_rl.errors import friendly_errors

    parser = argparse.ArgumentParser(prog="gpu_probe", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:<index>; cpu skips CUDA facts")
    parser.add_argument("--num-envs", type=int, default=4096)
    args = parser.parse_intermixed_args(argv)
    with friendly_errors():
        require_device(args.device)
        return 0 if find(facts(args.device, args.num_envs, args.overrides), args.file) else 1


def find(wanted: dict[str, Callable[[], Fact]], file: Path) -> bool:
    """Collect the facts missing from a file until one fails; return whether the file is complete.

    The file has the `facts` by name, the names of `missing` facts, and the name of the `running` fact.
    """
    known: dict[str, Fact] = json.loads(file.read_text())["facts"] if file.is_file() else {}

    def save(running: str | None) -> None:
        missing = [name for name in wanted if name not in known]
        write(file, json.dumps({"facts": known, "running": running, "missing": missing}, indent=2) + "\n")

    for name, fact in wanted.items():
        if name in known:
            continue
        save(name)
        began = time.monotonic()
        try:
            known[name] = fact()
        except Exception as error:
            known[name] = describe_error(error)
        known[name]["seconds"] = time.monotonic() - began
        save(None)
        if "error" in known[name]:
            break
    return known.keys() >= wanted.keys()


def describe_error(error: BaseException) -> Fact:
    """Return the first error of a chain and its location: later errors, from ending a capture, are uninformative."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return {"error": f"{type(error).__name__}: {error}"[:600], "where": where[-4:]}


def facts(device: str, num_envs: int, overrides: Sequence[str]) -> dict[str, Callable[[], Fact]]:
    """Return the function that measures each fact, by name, in the order to run them."""

    def physics(*more: str, **options: Any) -> Callable[[], Fact]:
        return lambda: bare_physics(device, num_envs, [*overrides, *more], **options)

    def trained(graph: str, *more: str) -> Callable[[], Fact]:
        return lambda: training([f"device={device}", f"num_envs={num_envs}", *overrides, *more], graph)

    def equal(graph: str) -> Callable[[], Fact]:
        return lambda: same_rollout([f"device={device}", f"num_envs={min(num_envs, 64)}", *overrides], graph)

    if device == "cpu":
        off = {"the same rollout, graph=off": equal("off"), "training, graph=off": trained("off")}
        return {"versions": versions, "bare physics": physics(), **off}
    return {
        "versions": versions,
        "loop of Warp in a graph of torch": lambda: loop_in_graph(device),
        **{f"the same rollout, graph={graph}": equal(graph) for graph in ("rollout", "split")},
        "bare physics": physics(),
        **{f"training, graph={graph}": trained(graph) for graph in ("rollout", "split", "step", "off")},
        "bare physics, the other cone": physics(other_cone=True),
        **{f"training, compile={mode}": trained("rollout", f"compile={mode}") for mode in ("learner", "all")},
    }


def versions() -> Fact:
    """Return versions of Python and packages; flag untested versions as wrong."""
    from packaging.requirements import Requirement

    from gpusim_rl.files.provenance import describe_environment
    from gpusim_rl.settings.simulators import SIMULATORS

    environment, wrong = describe_environment(), []
    # Not from metadata: the checkout may not be installed.
    ours = re.findall(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    names = [
        *re.findall(r'"(.+?)"', ours[0]),
        *SIMULATORS["mjwarp"].needs,
        *(importlib.metadata.requires("mujoco-warp") or []),
    ]
    for requirement in map(Requirement, names):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(requirement.name)
            if not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version} is outside {requirement.specifier}")
    return {"python": environment["python"], **environment["versions"], "wrong": wrong}


def loop_kernels() -> tuple[Any, Any]:
    """Make the kernels of a five-iteration loop: one sets the loop counter, the other is the body that counts down."""
    import warp as wp

    @wp.kernel
    def refill(left: wp.array[int]):  # noqa: ANN202 - Warp reads annotations
        left[0] = 5  # type: ignore[index]

    @wp.kernel
    def count_down(left: wp.array[int], turns: wp.array[int]):  # noqa: ANN202
        left[0] = left[0] - 1  # type: ignore[index]
        turns[0] = turns[0] + 1  # type: ignore[index]

    return refill, count_down


def loop_in_graph(name: str) -> Fact:
    """Check a Warp loop in torch's graph capture: stable capture id, memory pool, loop count, new random numbers."""
    import torch
    import warp as wp

    from gpusim_rl.sim.warp import _capture_id, start_warp

    refill, count_down = loop_kernels()
    device, at = torch.device(name), start_warp(torch.device(name))
    stream = torch.cuda.Stream(device)
    in_warp = wp.stream_from_torch(stream)
    left, turns = wp.zeros(1, dtype=int, device=at), wp.zeros(1, dtype=int, device=at)
    wp.launch(refill, 1, [left], device=at)  # loads the kernels
    wp.launch(count_down, 1, [left, turns], device=at)
    turns.zero_()
    wp.synchronize_device(at)
    generator = torch.Generator(device).manual_seed(1)
    early, late = (torch.zeros(1 << 16, device=device) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    early.normal_(generator=generator).fill_(0.0)  # loads torch's kernels
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        early.normal_(generator=generator)
        before = _capture_id(in_warp)
        with wp.ScopedDevice(at), wp.ScopedStream(in_warp, sync_enter=False):
            wp.capture_begin(stream=in_warp, external=True, force_module_load=False)
            wp.launch(refill, 1, [left])
            wp.capture_while(left, while_body=lambda: wp.launch(count_down, 1, [left, turns]))
            of_warp = wp.capture_end(stream=in_warp)
        after = _capture_id(in_warp)
        allocated = torch.full((1 << 22,), 1.0, device=device)  # 16 MB: gets its own segment
        late.normal_(generator=generator)
    inside = [
        segment["segment_pool_id"]
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= allocated.data_ptr() < segment["address"] + segment["total_size"]
    ]
    numbers = set()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize(device)
        numbers |= {float(early[0]), float(late[0])}
    del of_warp
    result = {"capture_id_stable": before == after, "pools": inside, "turns": int(turns.numpy()[0])}
    checks = {
        f"the loop changes the id of torch's graph capture{NOT_PIECES}": before == after,
        f"graph memory is in torch's default pool{NOT_PIECES}": inside != [] and (0, 0) not in map(tuple, inside),
        f"the loop ran {result['turns']} times in 3 replays, not 15 times": result["turns"] == 15,
        "replays repeat random numbers": len(numbers) == 6,
    }
    return result | {"wrong": [text for text, right in checks.items() if not right]}


def bare_physics(device: str, num_envs: int, overrides: Sequence[str], *, other_cone: bool = False) -> Fact:
    """Measure Ant's physics with random actions in a pure Warp graph; `other_cone` swaps the friction cone."""
    import torch
    import warp as wp

    from gpusim_rl.api import load_spec
    from gpusim_rl.env import Task
    from gpusim_rl.run.devices import choose_devices
    from gpusim_rl.settings.compose import compose
    from gpusim_rl.sim.mjwarp import MjwarpSim

    began = time.monotonic()
    lines = ["task=Ant", "sim=mjwarp", f"device={device}", f"num_envs={num_envs}", *overrides]
    spec = load_spec(compose(lines), lines)
    assert issubclass(spec.task_class, Task)
    scene, cfg = spec.task_class.scene(spec.cfg.task), spec.cfg.sim
    if other_cone:
        scene.option.cone = type(scene.option.cone)(1 - int(scene.model.opt.cone))
    _, choice = choose_devices(spec.cfg)
    sim = MjwarpSim(scene, num_envs, cfg, choice.device)
    ant = sim.articulation("ant")
    action = 2.0 * torch.rand(num_envs, len(ant.actuator_names), device=sim.device) - 1.0

    def control_step() -> None:
        ant.actuate(action.copy_(action.roll(1, 0)))
        sim.step(spec.cfg.task.decimation)

    for _ in range(SETTLING):
        control_step()
    ready = time.monotonic() - began
    ms = milliseconds(control_step, sim.device, turns=20)
    iterations = wp.to_torch(sim._data.solver_niter).float()
    overflow, captured = int(sim.overflow.sum()), sim._graphs._enabled
    checks = {"Warp could not capture its graph": captured, f"contacts are missing in {overflow} envs": not overflow}
    found = {
        "control_step_ms": ms,
        "control_steps_per_s": num_envs / ms * 1e3,
        "ready_s": ready,
        "solver_iterations": {"mean": float(iterations.mean()), "most": float(iterations.max())},
        "wrong": [text for text, right in checks.items() if not right],
    }
    sim.close()
    return found


def same_rollout(lines: Sequence[str], graph: str) -> Fact:
    """Compare captured and eager rollouts of Ant: four rollouts from the same state.

    The reference is the difference of two eager rollouts: 0 on a CPU, but CUDA's atomics order constraints arbitrarily.

    Returns:
        Median and maximum observation difference of each rollout from the first one, per control step.
    """
    import torch

    from gpusim_rl.run.cuda_graph import WARM_UP
    from gpusim_rl.testing.scratch_training import scratch_training

    lines = [*lines, "task=Ant", "sim=mjwarp", f"graph={graph}", "seed=1", "torch_deterministic=true"]
    with scratch_training(lines) as (trainer, log):
        for _ in range(WARM_UP + 1):
            trainer.iterate(log)
        collector, algorithm = trainer.collector, cast(Any, trainer.algorithm)
        graphs, captured = collector.graphs, collector.graphs._segments
        before = copy.deepcopy(collector.state_dict())

        def rollout(segments: Any) -> torch.Tensor:
            collector.load_state_dict(copy.deepcopy(before), same_envs=True)
            graphs._segments = segments
            collector.collect()
            return algorithm.rollout.obs["policy"].clone()

        first = rollout(())
        others = {"eager": rollout(()), "captured": rollout(captured), "replayed": rollout(captured)}
        found: Fact = {"mode": str(graphs.choice), "wrong": []}
        if graphs.choice.mode != graph:
            found["wrong"].append(f"graph={graph} fell back to {graphs.choice}")
        spread = 0.0
        for name, obs in others.items():
            apart = (obs - first).abs().flatten(1).cpu()  # CUDA has no deterministic median
            found[name] = {"median": apart.median(dim=1).values.tolist(), "largest": apart.amax(dim=1).tolist()}
            most = float(apart.amax())
            if name == "eager":
                spread = most
                if not most <= MOST_SPREAD:
                    found["wrong"].append(f"two eager rollouts differ by {most:.3g}")
            elif not most <= SPREADS * spread:
                found["wrong"].append(f"{name} and eager differ by {most:.3g}, two eager rollouts by {spread:.3g}")
        return found


def training(lines: Sequence[str], graph: str) -> Fact:
    """Measure rollout and update of Ant in a graph mode; flag a fallback to another mode as wrong."""
    import torch

    from gpusim_rl.run.cuda_graph import WARM_UP
    from gpusim_rl.testing.scratch_training import scratch_training

    began = time.monotonic()
    with scratch_training([*lines, "task=Ant", "sim=mjwarp", f"graph={graph}"]) as (trainer, log):
        for _ in range(WARM_UP + 1):
            trainer.iterate(log)
        device, cfg = trainer.start.device, trainer.cfg
        synchronize(device)
        ready = time.monotonic() - began
        rollout = milliseconds(trainer.collector.collect, device)
        update = milliseconds(lambda: trainer.collector.graphs.run("update", trainer.algorithm.update), device)
        choice, parameters = trainer.collector.graphs.choice, list(trainer.algorithm.policy.parameters())
        checks = {f"graph={graph} fell back to {choice}": choice.mode == graph}
        checks["a weight is not finite"] = all(bool(parameter.isfinite().all()) for parameter in parameters)
        return {
            "rollout_ms": rollout,
            "update_ms": update,
            "control_steps_per_s": cfg.num_envs * trainer.algorithm.horizon / (rollout + update) * 1e3,
            "ready_s": ready,
            "memory_gb": torch.cuda.max_memory_reserved(device) / 1e9 if device.type == "cuda" else None,
            "wrong": [text for text, right in checks.items() if not right],
        }


def milliseconds(body: Callable[[], Any], device: Any, turns: int = 2) -> float:
    """Return the duration of a call [ms], as the median over rounds."""
    found = []
    for _ in range(ROUNDS):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(turns):
            body()
        synchronize(device)
        found.append((time.perf_counter() - began) / turns * 1e3)
    return statistics.median(found)


def synchronize(device: Any) -> None:
    """Wait until a CUDA device is idle; no-op for other devices."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the checkout of this file, installed or not
    sys.exit(main())
