"""What limits a run: each rule judges the numbers of a run, and names the setting to change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gpusim_rl.diagnose.run_stats import RunStats
from gpusim_rl.settings.simulators import default_simulator


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that limits a run.

    Attributes:
        rule: Name of the rule.
        cost: Share of the run that is at stake: of its time, at most; 1 where results are wrong or the run may die.
        what: In words, with numbers.
        settings: Settings to try, each as on the command line; several in one belong together.
        hint: What else to do.
    """

    rule: str
    cost: float
    what: str
    settings: tuple[str, ...] = ()
    hint: str = ""

    def __str__(self) -> str:
        tries = f"try {' or '.join(self.settings)}" if self.settings else ""
        return "; ".join(part for part in (self.what, tries, self.hint) if part)


def diagnose(stats: RunStats) -> list[Finding]:
    """All findings, the most costly first."""
    findings = [finding for rule in RULES if (finding := rule(stats)) is not None]
    return sorted(findings, key=lambda finding: -finding.cost)


def conclusion(stats: RunStats, findings: list[Finding]) -> str:
    """The answer where no rule has found anything."""
    if findings:
        return ""
    shares = {
        "physics": stats.simulate,
        "the rollout": stats.rollout,
        "the policy": stats.policy,
        "the wait for actors": stats.actors,
        "the update": stats.update,
        "logging": stats.log_cost,
    }
    most = max(shares, key=lambda name: shares[name])
    unknown = "; how busy the GPU is, its driver does not tell: tools/audit.py does"
    return f"nothing stands out: {most} takes {_percent(shares[most])} of the time" + (
        unknown if stats.on_gpu and stats.gpu_percent is None else ""
    )


# Wrong results, or about to die


def contact_buffers(run: RunStats) -> Finding | None:
    """Contacts are dropped: bodies sink into each other, and the policy learns from it."""
    if run.overflow <= 0:
        return None
    what = (
        f"up to {run.overflow:.0f} of {run.all_envs} envs dropped contacts because a buffer was full: physics is wrong"
    )
    if run.nconmax and run.njmax:
        return Finding("contact_buffers", 1.0, what, (f"sim.nconmax={2 * run.nconmax} sim.njmax={2 * run.njmax}",))
    return Finding(
        "contact_buffers", 1.0, what, hint="double sim.nconmax and sim.njmax: the start of the run shows them"
    )


def diverged_envs(run: RunStats) -> Finding | None:
    """An env now and then is normal; one control step in a thousand is not."""
    if run.diverged < 1e-3:
        return None
    what = f"{100 * run.diverged:.2g} % of the control steps ended in an env that diverged; their samples are lost"
    settings = (f"task.physics_hz={2 * run.physics_hz:g}",) if run.physics_hz else ()
    return Finding("diverged_envs", min(1.0, 100 * run.diverged), what, settings)


def gpu_memory(run: RunStats) -> Finding | None:
    """Near the limit any further allocation ends the run."""
    return _memory("gpu_memory", "GPU memory", run, run.gpu_memory_gb, run.gpu_memory_limit_gb)


def ram(run: RunStats) -> Finding | None:
    """Near the limit the machine swaps, or the kernel ends the run."""
    return _memory("ram", "RAM", run, run.memory_gb, run.memory_limit_gb)


def _memory(rule: str, name: str, run: RunStats, used: float | None, limit: float | None) -> Finding | None:
    if used is None or limit is None or used < 0.9 * limit:
        return None
    fits = min(_power_of_two(run.num_envs * 0.8 * limit / used), _power_of_two(run.num_envs - 1))
    what = f"{used:.1f} of {limit:.1f} GB {name} in use: a little more ends the run"
    hint = "" if fits else "a smaller network, or a machine with more memory"
    return Finding(rule, 1.0, what, (f"num_envs={fits}",) if fits else (), hint)


def memory_leak(run: RunStats) -> Finding | None:
    """A run takes its memory at the start; what grows afterwards is kept by mistake."""
    growth, now = run.memory_growth_gb, run.memory_gb
    if growth is None or now is None or run.rows < 40 or growth < max(0.3, 0.15 * now):
        return None
    what = f"memory grew by {growth:.1f} GB over the rows read: something is kept that should be let go"
    cost = min(1.0, now / (run.memory_limit_gb or 4 * now))
    return Finding("memory_leak", cost, what, hint="look at the task's hooks")


# The device waits


def idle_gpu(run: RunStats) -> Finding | None:
    """The GPU has little to do, or waits for the host."""
    idle = run.gpu_idle
    if not run.on_gpu or idle is None or idle < 0.3 or run.num_actors:
        return None
    if _fell_back(run) or run.check_task:  # other rules name the cause
        return None
    settings = (f"num_envs={4 * run.num_envs}", *(("graph=auto",) if run.graph_mode == "off" else ()))
    what = f"GPU busy {run.gpu_percent:.0f} % at {run.num_envs} envs with graph={run.graph_mode or 'unknown'}"
    hint = "tools/audit.py and debug=profile show what it waits for"
    return Finding("idle_gpu", idle, what, settings, hint)


def graph_fallback(run: RunStats) -> Finding | None:
    """A graph was wanted and could not be captured."""
    if not run.on_gpu or not _fell_back(run):
        return None
    what, cost = f"graph={run.graph_mode}, because {run.graph_reason}", 0.3 if run.gpu_idle is None else run.gpu_idle
    of_update = run.graph_reason.startswith("the update ")
    settings = ("compile=off",) if of_update and run.compile else ()
    hint = "no task has a part in that: please report it" if of_update else "change that in the task"
    return Finding("graph_fallback", max(0.05, cost), what, settings, "" if settings else hint)


def transfer_bound(run: RunStats) -> Finding | None:
    """Every control step copies actions one way and observations the other, and waits for both."""
    if run.sim_device == run.rl_device or run.num_actors:  # actors send whole rollouts
        return None
    what = (
        f"physics on {run.sim_device}, policy on {run.rl_device}: every control step waits for two copies;"
        f" simulation takes {_percent(run.simulate)} with them"
    )
    together = f"sim={default_simulator('cuda').name} sim_device=null" if run.cpu_physics else "sim_device=null"
    settings = (together, "device=cpu sim_device=null rl_device=null")
    return Finding("transfer_bound", max(0.1, run.simulate / 2), what, settings)


def few_envs(run: RunStats) -> Finding | None:
    """Calls of Python and torch take about a millisecond per control step, however many envs there are."""
    if run.rl_device != "cpu" or run.step_s > 2e-3 or run.num_actors:
        return None
    share = run.simulate + run.policy
    what = (
        f"a control step of {_envs(run)} takes {1000 * run.step_s:.1f} ms, mostly calls of Python and torch"
        " that cost the same for more envs"
    )
    return Finding("few_envs", share / 2, what, (f"num_envs={max(64, 4 * run.num_envs)}",))


# The CPU's threads


def oversubscribed(run: RunStats) -> Finding | None:
    """Threads that share a CPU wait for each other at every step."""
    if not run.too_many_threads:
        return None
    what = f"{run.physics_threads or 0} physics threads and {run.torch_threads or 0} torch threads on {_cpus(run.cpus)}"
    if run.most_threads <= run.cpus:  # each process has the fewest
        what = f"{run.processes_here} processes of {run.most_threads} threads on {_cpus(run.machine_cpus or 0)}"
        cost = 1.0 - (run.machine_cpus or 0) / (run.processes_here * run.most_threads)
        fewer = f"torchrun --nproc-per-node={(run.machine_cpus or 1) // run.most_threads}, each with more envs"
        return Finding("oversubscribed", cost, what, hint=f"start fewer: {fewer}")
    settings = ("sim.num_threads=null",) if (run.physics_threads or 0) > run.cpus else ()
    hint = f"start with OMP_NUM_THREADS={run.cpus}, or leave it unset" if (run.torch_threads or 0) > run.cpus else ""
    return Finding("oversubscribed", 1.0 - run.cpus / run.most_threads, what, settings, hint)


def spinning(run: RunStats) -> Finding | None:
    """An idle OpenMP thread that spins takes its CPU from the physics."""
    if run.openmp is None or not run.cpu_physics or (run.torch_threads or 1) < 2:
        return None
    count = run.openmp.get("GOMP_SPINCOUNT")
    active = run.openmp.get("OMP_WAIT_POLICY", "").lower() == "active"
    if not active and count is not None and not (count.isdigit() and int(count) > 100_000):
        return None
    spin = f"GOMP_SPINCOUNT is {count or 'not set'}"
    setting = "OMP_WAIT_POLICY is active" if active else spin
    what = f"torch's idle threads spin for milliseconds on the CPUs that physics needs ({setting})"
    first = "gpusim_rl.machine.hardware.limit_openmp_spin()"
    hint = f"set GOMP_SPINCOUNT to 10000, as train.py does; a script calls {first} first"
    return Finding("spinning", 0.2 * run.simulating, what, hint=hint)


def busy_machine(run: RunStats) -> Finding | None:
    """Other processes take CPUs that this run could use."""
    if not run.cpu_physics or not run.crowded or run.too_many_threads or run.actor_engine == "ray":
        return None
    what = (
        f"load {run.load:.1f} on {_cpus(run.machine_cpus or 0)}, and this run gets {run.cpu_percent:.0f} % of its CPU"
        " time: other processes take the rest"
    )
    hint = "end them, or give each run its own CPUs with taskset"
    return Finding("busy_machine", run.cpu_idle or 0.0, what, hint=hint)


def unused_cpus(run: RunStats) -> Finding | None:
    """Physics could use more CPUs."""
    threads = run.physics_threads
    if not run.cpu_physics or threads is None or threads >= run.cpus or run.simulate < 0.4:
        return None
    setting = f"num_envs={16 * run.cpus}" if threads == run.num_envs else "sim.num_threads=null"
    what = f"physics runs on {threads} of {_cpus(run.cpus)}, {_percent(run.simulate)} of the time"
    return Finding("unused_cpus", run.simulate * (1 - threads / run.cpus), what, (setting,))


def warp_on_cpu(run: RunStats) -> Finding | None:
    """Warp's CPU device runs kernels on one thread; it is there for tests."""
    if not run.warp_on_cpu:
        return None
    what = f"sim={run.sim} on the CPU runs on one thread, {_percent(run.simulating)} of the time"
    return Finding("warp_on_cpu", run.simulating / 2, what, (f"sim={default_simulator('cpu').name}",))


# Phases


def simulation_bound(run: RunStats) -> Finding | None:
    """Physics should take most of the time, not all of it."""
    if run.simulate < 0.85 or _explained(run):
        return None
    takes = f"simulation-bound: physics, task and resets take {_percent(run.simulate)} of the time"
    if run.cpu_physics and run.cpu_idle is not None and run.cpu_idle > 0.4 and not run.crowded:
        what = f"{takes}, with the CPUs busy {run.cpu_percent:.0f} %: a hook of the task waits, or runs on one thread"
        return Finding("simulation_bound", run.simulate * run.cpu_idle, what, hint="debug=profile shows where")
    slower, control_hz = (run.physics_hz or 0.0) / 2, run.control_hz
    settings = (
        (f"task.physics_hz={slower:g}",) if control_hz and slower >= control_hz and slower % control_hz == 0 else ()
    )
    hint = f"{'or ' if settings else ''}fewer contacts, simpler geoms in the task's scene"
    return Finding("simulation_bound", run.simulate / 2, takes, settings, hint)


def update_bound(run: RunStats) -> Finding | None:
    """Learning takes longer than collecting."""
    if run.minibatches is None or run.update - (run.sums or 0.0) < 0.5:
        return None
    if small_minibatches(run) or small_batch_per_process(run):
        return None
    epochs = run.epochs or 1
    what = f"update-bound: learning takes {_percent(run.update)} of the time, {epochs} epoch{'s' * (epochs > 1)}"
    fewer = (f"{run.algo}.epochs={epochs // 2}",) if epochs > 1 else ()
    compiled = ("compile=learner",) if run.rl_device.startswith("cuda") and not run.compile else ()
    hint = "" if fewer else "a smaller network"
    return Finding("update_bound", run.update / 2, what, (*fewer, *compiled), hint)


def small_minibatches(run: RunStats) -> Finding | None:
    """Every optimiser step has a fixed cost, which small minibatches do not fill."""
    size, steps = run.minibatch_size, run.minibatches
    if size is None or steps is None:
        return None
    larger = min(16384, _power_of_two(run.num_envs * run.horizon / 4))
    if run.update < 0.3 or size >= 2048 or steps < 32 or larger <= size:
        return None
    what = f"learning takes {_percent(run.update)} of the time in {steps} optimiser steps of {size} samples"
    return Finding("small_minibatches", run.update / 2, what, (f"{run.algo}.minibatch_size={larger}",))


def logging_bound(run: RunStats) -> Finding | None:
    """Rows, console and trackers, in every row alike."""
    if run.log_cost < 0.05 or run.log_peaks >= 0.5 * run.log or sums_bound(run):
        return None  # numbers in rows are added up too, and wait for the slowest process
    what = f"logging-bound: writing rows takes {_percent(run.log_cost)} of the time"
    off = (("wandb_activate=false",) if run.wandb else ()) + (("log.tensorboard=false",) if run.tensorboard else ())
    return Finding("logging_bound", run.log_cost, what, (f"log.interval={10 * run.log_interval}", *off))


def checkpoint_bound(run: RunStats) -> Finding | None:
    """Logging that takes long in a few rows only: checkpoints."""
    cost = min(run.log_peaks, run.log_cost)
    if run.log_cost < 0.05 or run.log_peaks < 0.5 * run.log:
        return None
    what = f"checkpoints take {_percent(cost)} of the time"
    setting = f"log.checkpoint_interval={4 * run.checkpoint_interval}"
    return Finding("checkpoint_bound", cost, what, (setting,), "or log.dir on a faster disk")


# Processes that learn together


def sums_bound(run: RunStats) -> Finding | None:
    """A sum has a fixed cost, and it ends when the slowest process has come to it."""
    if run.processes < 2 or run.sums is None or run.sums < 0.2:
        return None
    what = (
        f"{run.processes} processes spend {_percent(run.sums)} of the time in sums over all of them, which wait for the"
        " slowest one"
    )
    size = run.minibatch_size
    fewer = (f"{run.algo}.minibatch_size={2 * size}",) if size and run.num_envs * run.horizon > size else ()
    rows = (f"log.interval={10 * run.log_interval}",) if run.log_cost >= 0.05 else ()
    hint = "else fewer processes: tools/doctor.py scaling processes=1,2 measures them"
    return Finding("sums_bound", run.sums, what, (f"num_envs={2 * run.num_envs}", *fewer, *rows), hint)


def small_batch_per_process(run: RunStats) -> Finding | None:
    """More processes make the work of each smaller, and no sum shorter."""
    samples = run.num_envs * run.horizon
    if run.processes < 2 or run.minibatches is None or samples >= 2048 or run.update < 0.3:
        return None
    if sums_bound(run) or small_minibatches(run):
        return None
    what = (
        f"learning takes {_percent(run.update)} of the time, with {samples} samples in each of {run.processes}"
        " processes"
    )
    return Finding("small_batch_per_process", run.update / 2, what, (f"num_envs={4 * run.num_envs}",))


# Actors


def learner_starved(run: RunStats) -> Finding | None:
    """The learner waits for rollouts, and the actors make them as fast as they can."""
    if not run.num_actors or run.actors < 0.3 or (run.actor_wait or 0.0) >= 0.2 or more_actors_than_useful(run):
        return None
    what = f"the learner waits {_percent(run.actors)} of the time for the rollouts of {_actors(run.num_actors)}"
    if run.actor_engine == "process" and run.cpu_percent is not None and run.cpu_percent > 90:
        what = f"{what}, and the CPUs are busy {run.cpu_percent:.0f} %"
        return Finding("learner_starved", run.actors, what, hint="actors=ray takes the CPUs of other machines too")
    settings = (f"num_actors={2 * run.num_actors}", f"num_envs={2 * run.num_envs}")
    return Finding("learner_starved", run.actors, what, settings)


def actors_starved(run: RunStats) -> Finding | None:
    """The actors wait for the learner, which is never idle: the update limits the run."""
    if not run.num_actors or run.actor_wait is None or run.actor_wait < 0.3 or run.actors >= 0.1:
        return None
    what = (
        f"{_actors(run.num_actors)} wait {_percent(run.actor_wait)} of the time for the learner, whose updates take"
        f" {_percent(run.update)}"
    )
    fewer = (f"num_actors={run.num_actors // 2}",) if run.num_actors > 1 else ()
    hint = "a faster learner: larger batches, a smaller network" + ("" if run.rl_device != "cpu" else ", a GPU")
    return Finding("actors_starved", run.actor_wait / 2, what, fewer, f"or {hint}" if fewer else hint)


def lag_too_high(run: RunStats) -> Finding | None:
    """The older the policy that acted, the less its samples teach, and samples beyond the limit nothing."""
    limit, lag = run.max_policy_lag, run.lag_mean
    if limit is None or lag is None or (lag <= 0.5 * limit and run.dropped <= 0.05):
        return None
    what = (
        f"samples are {lag:.1f} updates old on average, with {run.algo}.max_policy_lag={limit},"
        f" and {_percent(run.dropped)} are dropped"
    )
    fewer = (f"num_actors={run.num_actors // 2}",) if run.num_actors > 1 else ()
    hint = f"fewer rollouts under way, or a smaller {run.algo}.learning_rate" if run.num_actors else "a smaller delay"
    return Finding("lag_too_high", max(0.1, run.dropped), what, fewer, f"or {hint}" if fewer else hint)


def object_store_full(run: RunStats) -> Finding | None:
    """Ray writes rollouts to the disk when its store is full, or stops."""
    if run.object_store is None or run.object_store <= 0.8:
        return None
    what = f"Ray's object store is {_percent(run.object_store)} full, with rollouts that nobody has learned from"
    fewer = (f"num_actors={run.num_actors // 2}",) if run.num_actors > 1 else ()
    hint = "a larger store: ray start --object-store-memory=<bytes>"
    return Finding("object_store_full", 0.5, what, fewer, f"or {hint}" if fewer else hint)


def more_actors_than_useful(run: RunStats) -> Finding | None:
    """Actors beyond the CPUs share them, and make samples older without making more of them."""
    active, useful = run.actors_active, max(1, run.cpus - 1)  # one CPU is the learner's
    if not run.num_actors:
        return None
    if active is not None and active < 0.9 * run.num_actors:
        what = f"{active:.1f} of {_actors(run.num_actors)} are asked for rollouts: more have brought nothing"
        fewer = max(1, round(active))
        return Finding("more_actors_than_useful", 0.2 * (1 - fewer / run.num_actors), what, (f"num_actors={fewer}",))
    if run.actor_engine != "process" or run.num_actors <= run.cpus or (run.cpu_percent or 0.0) <= 90:
        return None
    what = f"{_actors(run.num_actors)} on {_cpus(run.cpus)}, which are busy {run.cpu_percent:.0f} %"
    cost = 0.5 * (1 - useful / run.num_actors)
    return Finding("more_actors_than_useful", cost, what, (f"num_actors={useful}",))


def lost_actors(run: RunStats) -> Finding | None:
    """An actor is lost now and then; what is lost again and again has a cause."""
    wanted, alive = run.actors_active or run.num_actors, run.actors_alive
    missing = 0.0 if alive is None or not run.num_actors else max(0.0, 1.0 - alive / wanted)
    if not run.num_actors or (run.actor_restarts < 2 and missing <= 0.1):
        return None
    what = []
    if run.actor_restarts:
        times = f"{run.actor_restarts:.0f} time{'' if run.actor_restarts == 1 else 's'}"
        what.append(f"actors were started again {times}, and {run.lost_rollouts:.0f} rollouts were lost")
    if missing > 0.1:
        what.append(f"{alive:.1f} of {_actors(round(wanted))} were at work on average")
    short = "memory is short" if run.actor_restarts else "the cluster has no room"
    return Finding("lost_actors", max(0.1, missing), "; ".join(what), hint=f"train.log may tell why; often {short}")


# Settings


def checked_task(run: RunStats) -> Finding | None:
    """Every hook is checked at every step, which waits for the device."""
    if not run.check_task:
        return None
    what, cost = "debug.check_task=true checks every hook of the task at every step", 0.1
    if run.on_gpu:
        what, cost = f"{what}, which no CUDA graph can hold", max(cost, run.gpu_idle or 0.0)
    return Finding("checked_task", cost, what, ("debug.check_task=false",))


def slowing_down(run: RunStats) -> Finding | None:
    """The same work takes longer than at the start."""
    if run.speed_trend is None or run.rows < 40 or run.speed_trend > 0.75:
        return None
    what = f"speed fell to {_percent(run.speed_trend)} of what it was at the start of the rows read"
    hint = "look for other processes, a hot machine, or episodes that have become harder to simulate"
    return Finding("slowing_down", 1 - run.speed_trend, what, hint=hint)


Rule = Callable[[RunStats], "Finding | None"]
RULES: tuple[Rule, ...] = (
    contact_buffers,
    diverged_envs,
    gpu_memory,
    ram,
    memory_leak,
    idle_gpu,
    graph_fallback,
    transfer_bound,
    few_envs,
    oversubscribed,
    spinning,
    busy_machine,
    unused_cpus,
    warp_on_cpu,
    simulation_bound,
    update_bound,
    small_minibatches,
    logging_bound,
    checkpoint_bound,
    sums_bound,
    small_batch_per_process,
    learner_starved,
    actors_starved,
    lag_too_high,
    object_store_full,
    more_actors_than_useful,
    lost_actors,
    checked_task,
    slowing_down,
)


def _explained(run: RunStats) -> bool:
    """Another rule names the cause of a long simulation."""
    causes = (oversubscribed, unused_cpus, warp_on_cpu, transfer_bound, few_envs, idle_gpu, graph_fallback)
    return any(rule(run) for rule in causes)


def _fell_back(run: RunStats) -> bool:
    return "cannot be captured" in run.graph_reason


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _envs(run: RunStats) -> str:
    return f"all {run.num_envs} envs" + (f" of each of {run.processes} processes" if run.processes > 1 else "")


def _actors(count: int) -> str:
    return f"{count} actor{'' if count == 1 else 's'}"


def _cpus(count: int) -> str:
    return f"{count} CPU{'' if count == 1 else 's'}"


def _power_of_two(at_most: float) -> int:
    """The largest power of two up to a number; 0 below 1."""
    return 1 << int(math.log2(at_most)) if at_most >= 1 else 0
