"""Rules that find a run's bottlenecks and suggest settings to change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from gpusim_rl.diagnose.run_stats import RunStats
from gpusim_rl.settings.simulators import SIMULATORS, default_simulator


@dataclass(frozen=True, slots=True)
class Finding:
    """Bottleneck of a run, with remedies."""

    cost: float  # maximum share of the run's time at stake; 1 if results are wrong or the run may crash
    problem: str  # one clause with numbers
    settings: tuple[str, ...] = ()  # alternative overrides to try; one entry may hold several that belong together
    hint: str = ""  # clause with another remedy
    rule: str = ""

    def __str__(self) -> str:
        tries = f"try {' or '.join(self.settings)}" if self.settings else ""
        return "; ".join(filter(None, (self.problem, tries, self.hint)))


def diagnose(stats: RunStats) -> list[Finding]:
    """Return all findings, most costly first."""
    findings = [dataclasses.replace(found, rule=rule.__name__) for rule in RULES if (found := rule(stats)) is not None]
    return sorted(findings, key=lambda finding: -finding.cost)


def conclusion(stats: RunStats) -> str:
    """Return the summary of a run without findings."""
    shares = {
        "physics": stats.simulate,
        "the rollout": stats.rollout,
        "the policy": stats.policy,
        "the wait for actors": stats.actors,
        "the update": stats.update,
        "logging": stats.log_cost,
    }
    largest = max(shares, key=lambda name: shares[name])
    unknown = stats.on_gpu and stats.gpu_percent is None
    hint = "; the driver does not report GPU utilisation: try gpusim-rl audit" if unknown else ""
    return f"nothing stands out: {largest} takes {_percent(shares[largest])} of the time{hint}"


def contact_buffers(run: RunStats) -> Finding | None:
    """Detect dropped contacts, which let bodies sink into each other."""
    if run.overflow <= 0:
        return None
    problem = f"up to {run.overflow:.0f} of {run.all_envs} envs dropped contacts, so physics is wrong"
    used = [1.1 if share is None else share for share in (run.njmax_used, run.nconmax_used)]  # full, if unknown
    if max(used) <= 1.0:
        hint = "MuJoCo Warp has a fixed limit: use spheres and capsules instead of boxes and meshes, or coarser terrain"
        return Finding(1.0, problem, hint=hint)
    if run.njmax and run.nconmax:
        room = {"njmax": run.njmax, "nconmax": run.nconmax}
        needs = {name: share * size for share, (name, size) in zip(used, room.items(), strict=True)}
        from gpusim_rl.sim.buffers import enough  # slow: imports torch and MuJoCo

        return Finding(1.0, problem, (enough(room, needs),))
    return Finding(1.0, problem, hint="double sim.njmax and sim.nconmax, shown at the start of the run")


def diverged_envs(run: RunStats) -> Finding | None:
    """Detect frequent divergence; a single env now and then is normal."""
    if run.diverged < 1e-3:
        return None
    problem = f"envs diverged in {100 * run.diverged:.2g} % of the control steps; these samples are dropped"
    settings = (f"task.physics_hz={2 * run.physics_hz:g}",) if run.physics_hz else ()
    return Finding(min(1.0, 100 * run.diverged), problem, settings)


def gpu_memory(run: RunStats) -> Finding | None:
    """Detect GPU memory near its limit."""
    return _memory("GPU memory", run, run.gpu_memory_gb, run.gpu_memory_limit_gb)


def ram(run: RunStats) -> Finding | None:
    """Detect RAM near its limit, where the machine swaps or the kernel kills the run."""
    return _memory("RAM", run, run.memory_gb, run.memory_limit_gb)


def _memory(name: str, run: RunStats, used: float | None, limit: float | None) -> Finding | None:
    if used is None or limit is None or used < 0.9 * limit:
        return None
    fits = min(_power_of_two(run.num_envs * 0.8 * limit / used), _power_of_two(run.num_envs - 1))
    problem = f"{used:.1f} of {limit:.1f} GB of {name} in use, close to the limit"
    hint = "" if fits else "a smaller network, or a machine with more memory"
    return Finding(1.0, problem, (f"num_envs={fits}",) if fits else (), hint)


def memory_leak(run: RunStats) -> Finding | None:
    """Detect memory that grows after the start of a run."""
    growth, now = run.memory_growth_gb, run.memory_gb
    if growth is None or now is None or run.rows < 40 or growth < max(0.3, 0.15 * now):
        return None
    problem = f"memory grew by {growth:.1f} GB over the rows read, probably a leak"
    cost = min(1.0, now / (run.memory_limit_gb or 4 * now))
    return Finding(cost, problem, hint="check the task's hooks")


def graph_fallback(run: RunStats) -> Finding | None:
    """Detect a requested CUDA graph that could not be captured."""
    if not run.on_gpu or "cannot be captured" not in run.graph_reason:
        return None
    problem, cost = f"graph={run.graph_mode}, because {run.graph_reason}", 0.3 if run.gpu_idle is None else run.gpu_idle
    in_update = run.graph_reason.startswith("the update ")
    settings = ("compile=off",) if in_update and run.compile else ()
    hint = "this is independent of the task: please report it" if in_update else "fix this in the task"
    return Finding(max(0.05, cost), problem, settings, "" if settings else hint)


def transfer_bound(run: RunStats) -> Finding | None:
    """Detect physics and policy on different devices."""
    if run.sim_device == run.rl_device or run.num_actors:  # actors send whole rollouts
        return None
    devices = f"physics on {run.sim_device}, policy on {run.rl_device}"
    problem = f"{devices}: two copies in every control step; simulation takes {_percent(run.simulate)}"
    together = f"sim={default_simulator('cuda').name} sim_device=null" if run.cpu_physics else "sim_device=null"
    settings = (together, "device=cpu sim_device=null rl_device=null")
    return Finding(max(0.1, run.simulate / 2), problem, settings)


def few_envs(run: RunStats) -> Finding | None:
    """Detect control steps that are mostly overhead, about 1 ms for any number of envs."""
    if run.rl_device != "cpu" or run.step_s > 2e-3 or run.num_actors:
        return None
    envs = f"all {run.num_envs} envs" + (f" of each of {run.processes} processes" if run.processes > 1 else "")
    problem = f"a control step of {envs} takes {1000 * run.step_s:.1f} ms, mostly Python and torch overhead"
    return Finding((run.simulate + run.policy) / 2, problem, (f"num_envs={max(64, 4 * run.num_envs)}",))


def oversubscribed(run: RunStats) -> Finding | None:
    """Detect threads that outnumber the CPUs and wait for each other."""
    if not run.too_many_threads:
        return None
    physics, torch = run.physics_threads or 0, run.torch_threads or 0
    if run.most_threads <= run.cpus:  # only all processes together have too many threads
        machine_cpus = run.machine_cpus or 0
        problem = f"too many threads: {run.local_processes} processes x {run.most_threads} on {_cpus(machine_cpus)}"
        hint = f"start fewer processes: torchrun --nproc-per-node={max(1, machine_cpus) // run.most_threads}"
        return Finding(1.0 - machine_cpus / (run.local_processes * run.most_threads), problem, hint=hint)
    problem = f"too many threads: {physics} for physics and {torch} for torch on {_cpus(run.cpus)}"
    settings = ("sim.num_threads=null",) if physics > run.cpus else ()
    hint = f"start with OMP_NUM_THREADS={run.cpus}, or leave it unset" if torch > run.cpus else ""
    return Finding(1.0 - run.cpus / run.most_threads, problem, settings, hint)


def busy_machine(run: RunStats) -> Finding | None:
    """Detect other processes on the run's CPUs."""
    if not run.cpu_physics or not run.contended or run.too_many_threads or run.actor_engine == "ray":
        return None
    load = f"load {run.load:.1f} on {_cpus(run.machine_cpus or 0)}"
    problem = f"{load}: other processes leave this run only {run.cpu_percent:.0f} % of its CPU time"
    return Finding(run.cpu_idle or 0.0, problem, hint="stop them, or pin runs to separate CPUs with taskset")


def unused_cpus(run: RunStats) -> Finding | None:
    """Detect idle CPUs that physics could use."""
    threads = run.physics_threads
    if not run.cpu_physics or threads is None or threads >= run.cpus or run.simulate < 0.4:
        return None
    setting = f"num_envs={16 * run.cpus}" if threads == run.num_envs else "sim.num_threads=null"
    problem = f"physics uses {threads} of {_cpus(run.cpus)} and takes {_percent(run.simulate)} of the time"
    return Finding(run.simulate * (1 - threads / run.cpus), problem, (setting,))


def warp_on_cpu(run: RunStats) -> Finding | None:
    """Detect Warp on the CPU, where kernels run on one thread."""
    if run.sim_device != "cpu" or run.sim not in SIMULATORS or not SIMULATORS[run.sim].uses_warp:
        return None
    share = 1.0 - (run.actor_wait or 0.0) if run.num_actors else run.simulate
    problem = f"sim={run.sim} on the CPU uses only one thread and takes {_percent(share)} of the time"
    return Finding(share / 2, problem, (f"sim={default_simulator('cpu').name}",))


def simulation_bound(run: RunStats) -> Finding | None:
    """Detect physics that takes nearly all of the time."""
    causes = (oversubscribed, unused_cpus, warp_on_cpu, transfer_bound, few_envs, graph_fallback)
    if run.simulate < 0.85 or any(rule(run) for rule in causes):
        return None
    problem = f"simulation-bound: physics, task and resets take {_percent(run.simulate)} of the time"
    if run.cpu_physics and run.cpu_idle is not None and run.cpu_idle > 0.4 and not run.contended:
        problem += f" at {run.cpu_percent:.0f} % CPU: a task hook waits, or runs on one thread"
        return Finding(run.simulate * run.cpu_idle, problem, hint="debug=profile shows where")
    slower, control_hz = (run.physics_hz or 0.0) / 2, run.control_hz
    possible = control_hz and slower >= control_hz and slower % control_hz == 0
    settings = (f"task.physics_hz={slower:g}",) if possible else ()
    hint = f"{'or ' if settings else ''}fewer contacts or simpler geoms in the task's scene"
    return Finding(run.simulate / 2, problem, settings, hint)


def update_bound(run: RunStats) -> Finding | None:
    """Detect updates that take at least half of the time."""
    if run.minibatches is None or run.update - (run.sums or 0.0) < 0.5 or small_minibatches(run):
        return None
    epochs = run.epochs or 1
    problem = f"update-bound: learning takes {_percent(run.update)} of the time ({epochs} epoch{'s' * (epochs > 1)})"
    fewer = (f"{run.algo}.epochs={epochs // 2}",) if epochs > 1 else ()
    compiled = ("compile=learner",) if run.rl_device.startswith("cuda") and not run.compile else ()
    return Finding(run.update / 2, problem, (*fewer, *compiled), "" if fewer else "a smaller network")


def small_minibatches(run: RunStats) -> Finding | None:
    """Detect minibatches too small for the fixed cost of optimiser steps."""
    size, steps = run.minibatch_size, run.minibatches
    if size is None or steps is None:
        return None
    larger = min(16384, _power_of_two(run.num_envs * run.horizon / 4))
    if run.update < 0.3 or size >= 2048 or steps < 32 or larger <= size:
        return None
    problem = f"learning takes {_percent(run.update)} of the time in {steps} optimiser steps of {size} samples"
    return Finding(run.update / 2, problem, (f"{run.algo}.minibatch_size={larger}",))


def logging_bound(run: RunStats) -> Finding | None:
    """Detect logging that is slow for every row."""
    if run.log_cost < 0.05 or run.log_peaks >= 0.5 * run.log or sums_bound(run):
        return None  # logging also sums rows over processes
    problem = f"logging-bound: writing rows takes {_percent(run.log_cost)} of the time"
    off = (("wandb_activate=false",) if run.wandb else ()) + (("log.tensorboard=false",) if run.tensorboard else ())
    return Finding(run.log_cost, problem, (f"log.interval={10 * run.log_interval}", *off))


def checkpoint_bound(run: RunStats) -> Finding | None:
    """Detect logging that is slow for a few rows only: checkpoints."""
    if run.log_cost < 0.05 or run.log_peaks < 0.5 * run.log:
        return None
    cost = min(run.log_peaks, run.log_cost)
    settings = (f"log.checkpoint_interval={4 * run.checkpoint_interval}",)
    return Finding(cost, f"checkpoints take {_percent(cost)} of the time", settings, "or log.dir on a faster disk")


def sums_bound(run: RunStats) -> Finding | None:
    """Detect slow all-reduces, which wait for the slowest process."""
    if run.processes < 2 or run.sums is None or run.sums < 0.2:
        return None
    problem = f"{run.processes} processes spend {_percent(run.sums)} of the time waiting for the slowest in all-reduces"
    size = run.minibatch_size
    fewer = (f"{run.algo}.minibatch_size={2 * size}",) if size and run.num_envs * run.horizon > size else ()
    rows = (f"log.interval={10 * run.log_interval}",) if run.log_cost >= 0.05 else ()
    hint = "or fewer processes, measured by gpusim-rl doctor scaling --num-processes 1,2"
    return Finding(run.sums, problem, (f"num_envs={2 * run.num_envs}", *fewer, *rows), hint)


def checked_task(run: RunStats) -> Finding | None:
    """Detect `debug.check_task`, which synchronises at every step."""
    if not run.check_task:
        return None
    problem, cost = "debug.check_task=true checks every hook of the task at every step", 0.1
    if run.on_gpu:
        problem, cost = f"{problem}, without CUDA graphs", max(cost, run.gpu_idle or 0.0)
    return Finding(cost, problem, ("debug.check_task=false",))


def slowing_down(run: RunStats) -> Finding | None:
    """Detect throughput that drops over time."""
    if run.speed_trend is None or run.rows < 40 or run.speed_trend > 0.75:
        return None
    problem = f"speed fell to {_percent(run.speed_trend)} over the rows read"
    hint = "check for other processes, thermal throttling, or episodes that are harder to simulate"
    return Finding(1 - run.speed_trend, problem, hint=hint)


RULES: tuple[Callable[[RunStats], Finding | None], ...] = (
    contact_buffers, diverged_envs, gpu_memory, ram, memory_leak, graph_fallback, transfer_bound, few_envs,
    oversubscribed, busy_machine, unused_cpus, warp_on_cpu, simulation_bound, update_bound, small_minibatches,
    logging_bound, checkpoint_bound, sums_bound, checked_task, slowing_down,
)  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _cpus(count: int) -> str:
    return f"{count} CPU{'' if count == 1 else 's'}"


def _power_of_two(at_most: float) -> int:
    """Return the largest power of two up to a number, or 0."""
    return 1 << int(math.log2(at_most)) if at_most >= 1 else 0
