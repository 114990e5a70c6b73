"""Worker process that runs one case for `throughput.harness`.

It reads and writes json, one value per line: first the case's spec, then `{"run": 3}` for three iterations or
`{"report": true}` for peak memory and settings. An error is reported as `{"error": ...}` and ends the process.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.machine.hardware import import_torch, tune_malloc

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gpusim_rl.env import Task, TaskConfig, VecEnv
    from gpusim_rl.run.cuda_graph import Graphs
    from gpusim_rl.run.logger import Logger
    from gpusim_rl.run.timing import PhaseTimer
    from gpusim_rl.run.trainer import Trainer
    from gpusim_rl.settings.schema import RunConfig, SimConfig
    from gpusim_rl.sim import Sim, SimChoice

ACTION_SETS = 16
"""Number of precomputed random actions, used in turn."""

SETTLING_STEPS = 60
"""Control steps of bare physics before measuring, so that the robots are on the ground."""


@dataclass
class Workload:
    """Measurable workload that runs one iteration at a time.

    Attributes:
        iterate: Runs one iteration: `horizon` control steps in all envs, and the update if the workload learns.
        env_steps: Control steps of one iteration, summed over envs.
        settings: Plain values to report.
        device: Device of the workload.
        phases: Timer of the phases, if any.
        in_env: Timer of `env.step`, if called from Python.
        graphs: CUDA graphs, if any.
    """

    iterate: Callable[[], Any]
    env_steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    device: torch.device | None = None
    phases: PhaseTimer | None = None
    graphs: Graphs | None = None
    in_env: PhaseTimer | None = None


def serve() -> None:
    """Serve one case over stdin and stdout, until stdin closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep library output out of the answers

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        spec = json.loads(sys.stdin.readline())
        import_torch()
        tune_malloc()
        with ExitStack() as stack:
            workload = stack.enter_context(_build(spec))
            _capture(workload)
            answer(ready=True, settings=_settings(workload))
            for line in iter(sys.stdin.readline, ""):
                request = json.loads(line)
                answer(**(_run(workload, request["run"]) if "run" in request else _report(workload)))
    except Exception as error:
        traceback.print_exc()
        answer(error=one_line(error))
        raise SystemExit(1) from None


def one_line(error: BaseException) -> str:
    """Return the type and first line of an error."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return re.sub(r"^(?:\w+\.)+(?=\w+: )", "", text.partition("\n")[0])


def _capture(workload: Workload) -> None:
    """Run until graphs are captured, even if the warm-up is shorter."""
    if workload.graphs is not None and workload.graphs.choice.mode != "off":
        from gpusim_rl.run.cuda_graph import WARM_UP

        for _ in range(WARM_UP + 1):
            workload.iterate()


def _run(workload: Workload, iterations: int) -> dict[str, Any]:
    for timer in (workload.phases, workload.in_env):
        if timer is not None:
            timer.start()
    _synchronize(workload.device)
    started = time.perf_counter()
    for _ in range(iterations):
        workload.iterate()
    _synchronize(workload.device)
    seconds = time.perf_counter() - started
    result: dict[str, Any] = {"env_steps": iterations * workload.env_steps, "seconds": seconds}
    if workload.phases is not None:
        phases = workload.phases.flush().phases()
        result["phases"] = {phase: part for phase, part in phases.items() if part > 0}
    if workload.in_env is not None:
        result["seconds_in_env"] = workload.in_env.flush().phases()["simulate"]
    return result


def _report(workload: Workload) -> dict[str, Any]:
    """Return memory peaks, settings and graph capture status."""
    graph = {} if workload.graphs is None else {"graph": str(workload.graphs.choice)}
    return {"memory": _memory(workload), "settings": _settings(workload) | graph}


def _settings(workload: Workload) -> dict[str, Any]:
    """Return the settings of the workload and its process: OpenMP spinning and threads."""
    process: dict[str, Any] = {"openmp_spins": os.environ.get("GOMP_SPINCOUNT")}
    torch = sys.modules.get("torch")  # EnvPool and Gymnasium do not need torch
    if torch is not None:
        process["threads"] = torch.get_num_threads()
    return process | workload.settings


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _memory(workload: Workload) -> dict[str, int]:
    """Return memory peaks [bytes]: resident and, on CUDA, from torch and the driver."""
    peaks = {"resident": _peak_resident() + _children_now()}
    if workload.device is not None and workload.device.type == "cuda":
        import torch

        peaks["cuda_torch"] = torch.cuda.max_memory_allocated(workload.device)
        used = _driver_memory(workload.device)
        if used is not None:
            peaks["cuda_driver"] = used
    return peaks


def _peak_resident() -> int:
    with suppress(OSError, AttributeError):
        # Not ru_maxrss, which starts at the size of the parent process.
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return 1024 * int(found.group(1))  # type: ignore[union-attr]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _children_now() -> int:
    """Return the current memory of child processes [bytes]."""
    import psutil

    total = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += child.memory_full_info().uss
    return total


def _driver_memory(device: torch.device) -> int | None:
    """Return the driver's reading of this process's GPU memory [bytes]; None if unavailable, as in many containers."""
    import pynvml
    import torch

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    return None


# Workloads


def _build(spec: dict[str, Any]) -> AbstractContextManager[Workload]:
    kind = spec["kind"]
    from gpusim_rl.testing.scratch_training import scratch_training

    if kind in ("policy", "training"):
        return _trainer(scratch_training(spec["overrides"]), learns=kind == "training")
    from gpusim_rl.machine.torch_threads import use_available_cpus

    scenario = _scenario(spec["overrides"])
    use_available_cpus(scenario.cfg.algorithm.batch_rows(scenario.num_envs))  # as our trainer does, for all cases
    if kind == "physics":
        return _bare_physics(scenario, spec.get("persistent", "auto"))
    if kind == "env":
        return _env_step(scenario)
    return _baseline(scenario, spec["baseline"], spec["mode"])


def _sim_facts(sim: Sim, choice: SimChoice) -> dict[str, Any]:
    threads = getattr(sim, "num_threads", None)  # CPU physics only
    return {"sim": str(choice)} | ({} if threads is None else {"physics_threads": threads})


@dataclass(frozen=True)
class _Scenario:
    """Task, simulator, device and settings of a case."""

    task_class: type[Task]
    task: TaskConfig
    num_envs: int
    sim: SimConfig
    choice: SimChoice
    cfg: RunConfig
    rl_device: torch.device

    def make_env(self) -> VecEnv:
        from gpusim_rl.env import VecEnv

        seed = max(0, self.cfg.seed)
        return VecEnv.make(
            self.task_class, self.task, num_envs=self.num_envs, choice=self.choice, sim=self.sim, seed=seed
        )


def _scenario(overrides: list[str]) -> _Scenario:
    from gpusim_rl.api import load_spec
    from gpusim_rl.env import Task
    from gpusim_rl.run.devices import choose_devices
    from gpusim_rl.settings.compose import compose

    spec = load_spec(compose(overrides), overrides)
    cfg = spec.cfg
    assert issubclass(spec.task_class, Task)
    rl_device, choice = choose_devices(cfg)
    return _Scenario(spec.task_class, cfg.task, cfg.num_envs, cfg.sim, choice, cfg, rl_device)


@contextmanager
def _bare_physics(scenario: _Scenario, persistent: Any) -> Iterator[Workload]:
    """Build the task's scene with its decimation and random controls, without task and resets."""
    import torch

    from gpusim_rl.sim import make_sim

    scene = scenario.task_class.scene(scenario.task)
    sim = make_sim(scene, scenario.choice, scenario.num_envs, replace(scenario.sim, persistent=persistent))
    articulations = [sim.articulation(name) for name in scene.articulation_names]
    limits = torch.as_tensor(scene.model.actuator_ctrlrange, dtype=torch.float32, device=sim.device)
    limited = torch.as_tensor(scene.model.actuator_ctrllimited.astype(bool), device=sim.device)
    low = torch.where(limited, limits[:, 0], -1.0)
    high = torch.where(limited, limits[:, 1], 1.0)
    controls = low + (high - low) * _random(scenario.num_envs, low.shape[0], sim.device)

    def steps(count: int) -> None:
        for i in range(count):
            first = 0
            for articulation in articulations:
                last = first + len(articulation.actuator_names)
                articulation.actuate(controls[i % ACTION_SETS, :, first:last])
                first = last
            sim.step(scenario.task.decimation)

    settings = _sim_facts(sim, scenario.choice) | {"persistent": persistent, "decimation": scenario.task.decimation}
    horizon = scenario.cfg.algorithm.horizon
    env_steps = horizon * scenario.num_envs
    graphs = _graphs(sim.device)
    with graphs.stream():
        steps(SETTLING_STEPS)
        yield Workload(
            lambda: graphs.run("rollout", lambda: steps(horizon)), env_steps, settings, sim.device, graphs=graphs
        )
    sim.close()


@contextmanager
def _env_step(scenario: _Scenario) -> Iterator[Workload]:
    """Build the environment with precomputed actions: task, resets and time limit, but no policy."""
    env = scenario.make_env()
    env.reset()
    limit, horizon = env.cfg.clip_actions, scenario.cfg.algorithm.horizon
    actions = limit * (2.0 * _random(env.num_envs, env.num_actions, env.device) - 1.0)

    def steps() -> None:
        for i in range(horizon):
            env.step(actions[i % ACTION_SETS])

    settings = _sim_facts(env.sim, scenario.choice) | {"persistent": scenario.sim.persistent}
    env_steps = horizon * scenario.num_envs
    graphs = _graphs(env.device, env.task)
    phases = _time("simulate", env.sim) if env.device.type == "cpu" else None
    with graphs.stream():
        run = lambda: graphs.run("rollout", steps)  # noqa: E731
        yield Workload(run, env_steps, settings, env.device, graphs=graphs, phases=phases)
    env.close()


def _graphs(device: torch.device, *stateful: object) -> Graphs:
    """Return graphs that capture an iteration in one CUDA graph, like our training's rollout."""
    from gpusim_rl.run.cuda_graph import GraphChoice, Graphs

    choice = GraphChoice("rollout", "CUDA device") if device.type == "cuda" else GraphChoice("off", device.type)
    return Graphs(choice, device, stateful=stateful)


def _time(phase: str, stepped: Any) -> PhaseTimer:
    """Wrap `step` of envs or a simulator with a timer; return the timer."""
    from gpusim_rl.run.timing import PhaseTimer

    timer, step = PhaseTimer(stepped.device), stepped.step

    def timed(argument: Any) -> Any:
        with timer(phase):
            return step(argument)

    stepped.step = timed
    return timer


def _random(num_envs: int, size: int, device: torch.device) -> Tensor:
    """Return random numbers in [0, 1), shape [ACTION_SETS, num_envs, size]."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(ACTION_SETS, num_envs, size, generator=generator, device=device)


@contextmanager
def _trainer(training: AbstractContextManager[tuple[Trainer, Logger]], *, learns: bool) -> Iterator[Workload]:
    """Build a workload of our trainer: whole iterations if `learns`, else only rollouts."""
    import torch

    from gpusim_rl.run.timing import PhaseTimer

    with training as (trainer, log):
        phases = PhaseTimer(trainer.start.device)
        trainer.collector.timer.observe(phases)
        algorithm: Any = trainer.algorithm
        ppo, policy = trainer.cfg.algorithm, algorithm.policy

        def collect() -> None:
            trainer.collector.collect()
            trainer.collector.timer.start()  # normally done by the logger

        env: Any = trainer.env
        settings = _sim_facts(env.sim, trainer.start.sim) | {
            "device": str(trainer.start.device),
            "precision": policy.precision,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "graph": str(trainer.collector.graphs.choice),
            "compile": trainer.start.compile.mode,
            "trunk": "shared" if policy.critic is None else "separate",
            "hidden": list(ppo.network.hidden),
            "horizon": ppo.horizon,
        }
        if learns:
            settings |= {"epochs": ppo.epochs, "minibatches": algorithm.num_minibatches}
        iterate = (lambda: trainer.iterate(log)) if learns else collect
        env_steps = trainer.cfg.num_envs * ppo.horizon
        in_env = None if trainer.collector.graphs.whole_rollout else _time("simulate", env)  # replays do not call step
        yield Workload(iterate, env_steps, settings, trainer.start.device, phases, trainer.collector.graphs, in_env)


@contextmanager
def _baseline(scenario: _Scenario, name: str, mode: str) -> Iterator[Workload]:
    """Build another library's trainer on our environment."""
    from gpusim_rl.learn.algorithm import choose_precision
    from gpusim_rl.run.timing import PhaseTimer
    from throughput.baselines import make_baseline

    device = scenario.rl_device
    bf16 = choose_precision(scenario.cfg.algorithm.precision, device)[0] == "bf16"
    env = scenario.make_env()
    baseline = make_baseline(name, env, scenario.cfg, device=device, mode=mode, bf16=bf16)
    phases = PhaseTimer(device)
    baseline.observe(phases)
    in_env = _time("simulate", env)
    settings = {"version": baseline.version, **_sim_facts(env.sim, scenario.choice), **baseline.settings}
    yield Workload(baseline.iterate, baseline.env_steps_per_iteration, settings, device, phases, in_env=in_env)
    baseline.close()
    env.close()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # import `throughput` as a package, not its modules
    serve()
