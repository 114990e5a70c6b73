"""What limits a run: rules from the numbers of a run to words and the setting to change. Pure; `readings.py` reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpusim_rl.sim.registry import SIMULATORS, default_simulator

SMALL = 2048
"""Up to so many envs even one graph may not fill a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A run in numbers; None is not known. Shares are parts of 1, of the wall-clock time unless said otherwise."""

    # What was asked for
    task: str
    num_envs: int
    horizon: int  # control steps
    epochs: int
    minibatch_size: int  # samples
    physics_hz: float
    control_hz: float
    log_interval: int  # iterations
    checkpoint_interval: int  # iterations
    wandb: bool = False
    tensorboard: bool = False
    check_task: bool = False
    deterministic: bool = False
    compile: bool = False
    physics_graph: bool = True  # sim.graph
    njmax: int | None = None
    nconmax: int | None = None

    # On what it runs
    sim: str
    sim_device: str
    rl_device: str
    graph_mode: str | None = None  # off, update, step or rollout: what CUDA graphs hold
    graph_reason: str = ""
    bf16: bool | None = None
    bf16_is_fast: bool | None = None
    cpus: int  # that the process may use
    machine_cpus: int | None = None
    physics_threads: int | None = None
    torch_threads: int | None = None
    openmp: Mapping[str, str] | None = None  # variables that are set
    has_gpu: bool = False
    memory_limit_gb: float | None = None
    gpu_memory_limit_gb: float | None = None

    # What was measured
    rows: int  # of metrics.csv, without those of the warm-up
    warm_up_rows: int = 0
    iteration: int  # of the newest row
    env_steps_per_s: float
    simulate: float = 0.0
    policy: float = 0.0
    rollout: float = 0.0  # simulation and policy, where one graph holds both
    update: float = 0.0
    log: float = 0.0
    log_peaks: float = 0.0  # part of `log` beyond what it takes in every row
    cpu_percent: float | None = None  # of the available CPUs
    memory_gb: float | None = None
    load: float | None = None  # threads that run or wait for a CPU, on the whole machine
    gpu_percent: float | None = None
    gpu_memory_gb: float | None = None
    speed_trend: float | None = None  # speed in the last quarter of the rows over that in the first
    memory_growth_gb: float | None = None  # from the first quarter of the rows to the last
    diverged: float = 0.0  # share of all control steps
    overflow: float = 0.0  # envs, at most

    @property
    def gpu(self) -> bool:
        """Physics and learning share a GPU."""
        return self.rl_device.startswith("cuda") and self.sim_device == self.rl_device

    @property
    def cpu_physics(self) -> bool:
        """Physics runs on the threads of C MuJoCo."""
        return SIMULATORS[self.sim].cpu_threads

    @property
    def step_s(self) -> float:
        """Duration of one control step of all envs, policy included [s]."""
        return (self.simulate + self.policy + self.rollout) * self.num_envs / self.env_steps_per_s

    @property
    def minibatches(self) -> int:
        """Optimiser steps of an iteration."""
        return self.epochs * max(1, round(self.num_envs * self.horizon / self.minibatch_size))

    @property
    def gpu_idle(self) -> float | None:
        """Share of the time in which the GPU waits, other than for logging."""
        return None if self.gpu_percent is None else max(0.0, 1.0 - self.gpu_percent / 100.0 - self.log)

    @property
    def log_cost(self) -> float:
        """Share of the time that logging takes from the rest: beside a GPU that works, the host's time is free."""
        return self.log if not self.gpu or self.gpu_percent is None else min(self.log, 1.0 - self.gpu_percent / 100.0)

    @property
    def cpu_idle(self) -> float | None:
        """Share of the available CPU time that this process does not use."""
        return None if self.cpu_percent is None else max(0.0, 1.0 - self.cpu_percent / 100.0)

    @property
    def crowded(self) -> bool:
        """More threads want to run on the machine than it has CPUs, and this run does not get all of its own."""
        if self.load is None or self.machine_cpus is None or self.cpu_idle is None:
            return False
        return self.load > 1.25 * self.machine_cpus and self.cpu_idle > 0.2

    @property
    def too_many_threads(self) -> bool:
        """The process itself has more threads at work than CPUs."""
        return max(self.physics_threads or 0, self.torch_threads or 0) > self.cpus


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that limits a run.

    Attributes:
        rule: Name of the rule.
        cost: Share of the run that is at stake: of its time, at most; 1 where results are wrong or the run may die.
        what: In words, with numbers.
        knobs: Settings to try, each as on the command line; several in one belong together.
        hint: What else to do.
    """

    rule: str
    cost: float
    what: str
    knobs: tuple[str, ...] = ()
    hint: str = ""

    def __str__(self) -> str:
        tries = f"try {' or '.join(self.knobs)}" if self.knobs else ""
        return "; ".join(part for part in (self.what, tries, self.hint) if part)


def diagnose(profile: Profile) -> list[Finding]:
    """All findings, the most costly first."""
    findings = [finding for rule in RULES if (finding := rule(profile)) is not None]
    return sorted(findings, key=lambda finding: -finding.cost)


def verdict(profile: Profile, findings: list[Finding]) -> str:
    """The answer where no rule has found anything."""
    if findings:
        return ""
    shares = {
        "physics": profile.simulate,
        "the rollout": profile.rollout,
        "the policy": profile.policy,
        "the update": profile.update,
        "logging": profile.log_cost,
    }
    most = max(shares, key=lambda name: shares[name])
    unknown = "; how busy the GPU is, its driver does not tell: tools/audit.py does"
    return f"nothing stands out: {most} takes {_percent(shares[most])} of the time" + (
        unknown if profile.gpu and profile.gpu_percent is None else ""
    )


# Wrong results, or about to die


def contact_buffers(p: Profile) -> Finding | None:
    """Contacts are dropped: bodies sink into each other, and the policy learns from it."""
    if p.overflow <= 0:
        return None
    what = f"up to {p.overflow:.0f} of {p.num_envs} envs dropped contacts because a buffer was full: physics is wrong"
    if p.nconmax and p.njmax:
        return Finding("contact_buffers", 1.0, what, (f"sim.nconmax={2 * p.nconmax} sim.njmax={2 * p.njmax}",))
    return Finding("contact_buffers", 1.0, what, hint="raise sim.nconmax and sim.njmax")


def diverged_worlds(p: Profile) -> Finding | None:
    """An env now and then is normal; one control step in a thousand is not."""
    if p.diverged < 1e-3:
        return None
    what = f"{100 * p.diverged:.2g} % of the control steps ended in an env that diverged; their samples are lost"
    return Finding("diverged_worlds", min(1.0, 100 * p.diverged), what, (f"task.physics_hz={2 * p.physics_hz:g}",))


def gpu_memory(p: Profile) -> Finding | None:
    """Near the limit any further allocation ends the run."""
    return _memory("gpu_memory", "GPU memory", p, p.gpu_memory_gb, p.gpu_memory_limit_gb)


def ram(p: Profile) -> Finding | None:
    """Near the limit the machine swaps, or the kernel ends the run."""
    return _memory("ram", "RAM", p, p.memory_gb, p.memory_limit_gb)


def _memory(rule: str, name: str, p: Profile, used: float | None, limit: float | None) -> Finding | None:
    if used is None or limit is None or used < 0.9 * limit:
        return None
    fits = min(_power_of_two(p.num_envs * 0.8 * limit / used), _power_of_two(p.num_envs - 1))
    what = f"{used:.1f} of {limit:.1f} GB {name} in use: a little more ends the run"
    hint = "" if fits else "a smaller ppo.network.hidden, or a machine with more memory"
    return Finding(rule, 1.0, what, (f"num_envs={fits}",) if fits else (), hint)


def memory_leak(p: Profile) -> Finding | None:
    """A run takes its memory at the start; what grows afterwards is kept by mistake."""
    growth, now = p.memory_growth_gb, p.memory_gb
    if growth is None or now is None or p.rows < 40 or growth < max(0.3, 0.15 * now):
        return None
    what = f"memory grew by {growth:.1f} GB over the rows read: something is kept that should be let go"
    return Finding("memory_leak", min(1.0, now / (p.memory_limit_gb or 4 * now)), what, hint="look at the task's hooks")


# The device waits


def launch_bound(p: Profile) -> Finding | None:
    """The GPU waits for Python to launch the next kernel: more work per launch, or fewer launches."""
    idle = p.gpu_idle
    if not p.gpu or idle is None or idle < 0.3 or (_graph_has_all(p) and p.num_envs <= SMALL):
        return None
    if _fell_back(p) or _no_graph_for_checks(p):  # other rules name the cause
        return None
    knobs = [f"num_envs={max(4096, 4 * p.num_envs)}"]
    if _graph_has_all(p):
        what = (
            f"GPU busy {p.gpu_percent:.0f} % although graphs hold rollout and update: it waits for what is between them"
        )
        return Finding("launch_bound", idle, what, tuple(knobs), hint="debug=profile shows what that is")
    if p.graph_mode in ("off", "step"):
        knobs.append("graph=rollout")
    what = f"GPU busy {p.gpu_percent:.0f} %: launch-bound at {p.num_envs} envs"
    return Finding("launch_bound", idle, what, tuple(knobs))


def tiny_task(p: Profile) -> Finding | None:
    """A graph holds all launches, and the GPU still waits: there is not enough work for it."""
    idle = p.gpu_idle
    if not p.gpu or idle is None or idle < 0.3 or not _graph_has_all(p) or p.num_envs > SMALL:
        return None
    what = f"GPU busy {p.gpu_percent:.0f} % although a graph holds the whole rollout: {p.num_envs} envs are little work"
    hint = f"tools/doctor.py sweep task={p.task} measures whether the CPU is faster"
    return Finding("tiny_task", idle, what, (f"num_envs={4 * p.num_envs}", "device=cpu"), hint)


def graph_fallback(p: Profile) -> Finding | None:
    """A graph was wanted and could not be captured."""
    if not p.gpu or not _fell_back(p):
        return None
    what, cost = f"graph={p.graph_mode}, because {p.graph_reason}", 0.3 if p.gpu_idle is None else p.gpu_idle
    of_update = p.graph_reason.startswith("the update ")
    knobs = ("ppo.compile=false",) if of_update and p.compile else ()
    hint = "no task has a part in that: please report it" if of_update else "change that in the task"
    return Finding("graph_fallback", max(0.05, cost), what, knobs, "" if knobs else hint)


def graph_off(p: Profile) -> Finding | None:
    """Python launches every kernel; the GPU keeps up today, and leaves the CPU no time."""
    idle = p.gpu_idle
    if not p.gpu or p.graph_mode != "off" or _fell_back(p) or (idle is not None and idle >= 0.3):
        return None
    return Finding("graph_off", 0.1, "CUDA graphs are off: Python launches every kernel", ("graph=auto",))


def transfer_bound(p: Profile) -> Finding | None:
    """Every control step copies actions one way and observations the other, and waits for both."""
    if p.sim_device == p.rl_device:
        return None
    what = (
        f"physics on {p.sim_device}, policy on {p.rl_device}: every control step waits for two copies;"
        f" simulation takes {_percent(p.simulate)} with them"
    )
    together = "sim=mjwarp sim_device=null" if p.cpu_physics else "sim_device=null"
    knobs = (together, "device=cpu sim_device=null rl_device=null")
    return Finding("transfer_bound", max(0.1, p.simulate / 2), what, knobs)


def few_worlds(p: Profile) -> Finding | None:
    """Calls of Python and torch take about a millisecond per control step, however many envs there are."""
    if p.rl_device != "cpu" or p.step_s > 2e-3:
        return None
    share = p.simulate + p.policy
    what = (
        f"a control step of all {p.num_envs} envs takes {1000 * p.step_s:.1f} ms, mostly calls of Python and torch"
        " that cost the same for more envs"
    )
    return Finding("few_worlds", share / 2, what, (f"num_envs={max(64, 4 * p.num_envs)}",))


# The CPU's threads


def oversubscribed(p: Profile) -> Finding | None:
    """Threads that share a CPU wait for each other at every step."""
    if not p.too_many_threads:
        return None
    most = max(p.physics_threads or 0, p.torch_threads or 0)
    what = f"{p.physics_threads or 0} physics threads and {p.torch_threads or 0} torch threads on {_cpus(p.cpus)}"
    knobs = ("sim.num_threads=null",) if (p.physics_threads or 0) > p.cpus else ()
    hint = f"start with OMP_NUM_THREADS={p.cpus}, or leave it unset" if (p.torch_threads or 0) > p.cpus else ""
    return Finding("oversubscribed", 1.0 - p.cpus / most, what, knobs, hint)


def spinning(p: Profile) -> Finding | None:
    """An idle OpenMP thread that spins takes its CPU from the physics."""
    if p.openmp is None or not p.cpu_physics or (p.torch_threads or 1) < 2:
        return None
    count = p.openmp.get("GOMP_SPINCOUNT")
    active = p.openmp.get("OMP_WAIT_POLICY", "").lower() == "active"
    if not active and count is not None and not (count.isdigit() and int(count) > 100_000):
        return None
    spin = f"GOMP_SPINCOUNT is {count or 'not set'}"
    setting = "OMP_WAIT_POLICY is active" if active else spin
    what = f"torch's idle threads spin for milliseconds on the CPUs that physics needs ({setting})"
    hint = "set GOMP_SPINCOUNT to 10000, as train.py does; in a script call gpusim_rl.hardware.limit_openmp_spin() before torch"
    return Finding("spinning", 0.2 * p.simulate, what, hint=hint)


def busy_machine(p: Profile) -> Finding | None:
    """Other processes take CPUs that this run could use."""
    if not p.cpu_physics or not p.crowded or p.too_many_threads:
        return None
    what = (
        f"load {p.load:.1f} on {_cpus(p.machine_cpus or 0)}, and this run gets {p.cpu_percent:.0f} % of its CPU time:"
        " other processes take the rest"
    )
    return Finding("busy_machine", p.cpu_idle or 0.0, what, hint="end them, or give each run its own CPUs with taskset")


def unused_cpus(p: Profile) -> Finding | None:
    """Physics could use more CPUs."""
    threads = p.physics_threads
    if not p.cpu_physics or threads is None or threads >= p.cpus or p.simulate < 0.4:
        return None
    knob = f"num_envs={16 * p.cpus}" if threads == p.num_envs else "sim.num_threads=null"
    what = f"physics runs on {threads} of {_cpus(p.cpus)}, {_percent(p.simulate)} of the time"
    return Finding("unused_cpus", p.simulate * (1 - threads / p.cpus), what, (knob,))


# A simulator or device that others would beat


def unused_gpu(p: Profile) -> Finding | None:
    """There is a GPU, and enough envs to fill a part of it."""
    if not p.has_gpu or p.rl_device != "cpu" or p.num_envs < 512:
        return None
    what = f"this machine has a GPU, and {p.num_envs} envs run on {_cpus(p.cpus)}"
    hint = f"tools/doctor.py sweep task={p.task} measures both"
    return Finding("unused_gpu", 0.5 * (1 - p.log), what, ("device=cuda",), hint)


def warp_on_cpu(p: Profile) -> Finding | None:
    """Warp's CPU device runs kernels on one thread; it is there for tests."""
    if not SIMULATORS[p.sim].uses_warp or p.sim_device != "cpu":
        return None
    what = f"sim={p.sim} on the CPU runs on one thread, {_percent(p.simulate)} of the time"
    return Finding("warp_on_cpu", p.simulate / 2, what, (f"sim={default_simulator('cpu').name}",))


def eager_physics(p: Profile) -> Finding | None:
    """Without its graph every kernel of the physics is launched from Python."""
    if not SIMULATORS[p.sim].uses_warp or p.physics_graph or p.graph_mode not in ("off", "update"):
        return None  # a graph of the whole step or rollout has these kernels too
    what = f"sim.graph=false: every kernel of {p.sim} is launched from Python"
    return Finding("eager_physics", 0.5 * max(p.simulate, p.rollout), what, ("sim.graph=true",))


# Phases


def simulation_bound(p: Profile) -> Finding | None:
    """Physics should take most of the time, not all of it."""
    collecting = p.simulate + p.rollout
    if collecting < 0.85 or _explained(p):
        return None
    what = "the rollout, mostly physics as a rule, takes" if p.rollout > p.simulate else "physics, task and resets take"
    takes = f"simulation-bound: {what} {_percent(collecting)} of the time"
    if p.cpu_physics and p.cpu_idle is not None and p.cpu_idle > 0.4 and not p.crowded:
        what = f"{takes}, with the CPUs busy {p.cpu_percent:.0f} %: a hook of the task waits, or runs on one thread"
        return Finding("simulation_bound", p.simulate * p.cpu_idle, what, hint="debug=profile shows where")
    slower = p.physics_hz / 2
    knobs = (f"task.physics_hz={slower:g}",) if slower >= p.control_hz and slower % p.control_hz == 0 else ()
    hint = f"{'or ' if knobs else ''}fewer contacts, simpler geoms in the task's scene"
    hint += "; graph=off tells physics and policy apart" if p.rollout > p.simulate else ""
    return Finding("simulation_bound", collecting / 2, takes, knobs, hint)


def policy_bound(p: Profile) -> Finding | None:
    """The policy acts once per control step; it should be cheap beside the physics."""
    if p.policy < 0.35 or few_worlds(p) or launch_bound(p):
        return None
    what = f"policy-bound: acting takes {_percent(p.policy)} of the time"
    hint = "a smaller ppo.network.hidden; no ppo.network.rnn if the task can do without"
    return Finding("policy_bound", p.policy / 2, what, hint=hint)


def update_bound(p: Profile) -> Finding | None:
    """Learning takes longer than collecting."""
    if p.update < 0.5 or small_minibatches(p):
        return None
    what = f"update-bound: learning takes {_percent(p.update)} of the time, {p.epochs} epoch{'s' * (p.epochs > 1)}"
    fewer = (f"ppo.epochs={p.epochs // 2}",) if p.epochs > 1 else ()
    compiled = ("ppo.compile=true",) if p.rl_device.startswith("cuda") and not p.compile else ()
    hint = "" if fewer else "a smaller ppo.network.hidden"
    return Finding("update_bound", p.update / 2, what, (*fewer, *compiled), hint)


def small_minibatches(p: Profile) -> Finding | None:
    """Every optimiser step has a fixed cost, which small minibatches do not fill."""
    larger = min(16384, _power_of_two(p.num_envs * p.horizon / 4))
    if p.update < 0.3 or p.minibatch_size >= 2048 or p.minibatches < 32 or larger <= p.minibatch_size:
        return None
    what = (
        f"learning takes {_percent(p.update)} of the time in {p.minibatches} optimiser steps of"
        f" {p.minibatch_size} samples"
    )
    return Finding("small_minibatches", p.update / 2, what, (f"ppo.minibatch_size={larger}",))


def logging_bound(p: Profile) -> Finding | None:
    """Rows, console and trackers, in every row alike."""
    if p.log_cost < 0.05 or p.log_peaks >= 0.5 * p.log:
        return None
    what = f"logging-bound: writing rows takes {_percent(p.log_cost)} of the time"
    off = (("wandb_activate=false",) if p.wandb else ()) + (("log.tensorboard=false",) if p.tensorboard else ())
    return Finding("logging_bound", p.log_cost, what, (f"log.interval={10 * p.log_interval}", *off))


def checkpoint_bound(p: Profile) -> Finding | None:
    """Logging that takes long in a few rows only: checkpoints."""
    cost = min(p.log_peaks, p.log_cost)
    if p.log_cost < 0.05 or p.log_peaks < 0.5 * p.log:
        return None
    what = f"checkpoints take {_percent(cost)} of the time"
    knob = f"log.checkpoint_interval={4 * p.checkpoint_interval}"
    return Finding("checkpoint_bound", cost, what, (knob,), "or log.dir on a faster disk")


# Settings


def slow_precision(p: Profile) -> Finding | None:
    """Networks in float32 where bfloat16 is faster."""
    if not p.bf16_is_fast or p.bf16 is not False or p.update + p.policy < 0.3:
        return None
    what = f"networks run in fp32, {_percent(p.update + p.policy)} of the time, and this device is faster in bf16"
    return Finding("slow_precision", (p.update + p.policy) / 3, what, ("ppo.precision=auto",))


def checked_task(p: Profile) -> Finding | None:
    """Every hook is checked at every step, which waits for the device."""
    if not p.check_task:
        return None
    what, cost = "debug.check_task=true checks every hook of the task at every step", 0.1
    if _no_graph_for_checks(p):
        what, cost = f"{what}, which no CUDA graph can hold", max(cost, p.gpu_idle or 0.0)
    return Finding("checked_task", cost, what, ("debug.check_task=false",))


def deterministic(p: Profile) -> Finding | None:
    """Deterministic kernels are the slower ones."""
    if not p.deterministic or not p.rl_device.startswith("cuda"):
        return None
    return Finding("deterministic", 0.1, "only deterministic kernels are used", ("torch_deterministic=false",))


def diminishing_returns(p: Profile) -> Finding | None:
    """The device is full: more envs only wait, and fewer of them learn from more updates in the same time."""
    if p.gpu and p.gpu_percent is not None and p.gpu_percent >= 97 and p.num_envs >= 16384:
        what = f"GPU busy {p.gpu_percent:.0f} % at {p.num_envs} envs: more would only wait"
    elif p.cpu_physics and p.num_envs > 4096 * p.cpus:
        what = f"{p.num_envs} envs on {_cpus(p.cpus)}: most of them wait at any moment"
    else:
        return None
    hint = f"fewer give more updates in the same time; tools/doctor.py sweep task={p.task} finds the knee"
    return Finding("diminishing_returns", 0.05, what, (f"num_envs={_power_of_two(p.num_envs / 2)}",), hint)


def slowing_down(p: Profile) -> Finding | None:
    """The same work takes longer than at the start."""
    if p.speed_trend is None or p.rows < 40 or p.speed_trend > 0.75:
        return None
    what = f"speed fell to {_percent(p.speed_trend)} of what it was at the start of the rows read"
    hint = "look for other processes, a hot machine, or episodes that have become harder to simulate"
    return Finding("slowing_down", 1 - p.speed_trend, what, hint=hint)


Rule = Callable[[Profile], "Finding | None"]
RULES: tuple[Rule, ...] = (
    contact_buffers,
    diverged_worlds,
    gpu_memory,
    ram,
    memory_leak,
    launch_bound,
    tiny_task,
    graph_fallback,
    graph_off,
    transfer_bound,
    few_worlds,
    oversubscribed,
    spinning,
    busy_machine,
    unused_cpus,
    unused_gpu,
    warp_on_cpu,
    eager_physics,
    simulation_bound,
    policy_bound,
    update_bound,
    small_minibatches,
    logging_bound,
    checkpoint_bound,
    slow_precision,
    checked_task,
    deterministic,
    diminishing_returns,
    slowing_down,
)


def _explained(p: Profile) -> bool:
    """Another rule names the cause of a long simulation."""
    causes = (oversubscribed, unused_cpus, warp_on_cpu, eager_physics, transfer_bound, few_worlds)
    return any(rule(p) for rule in (*causes, launch_bound, tiny_task, graph_fallback))


def _graph_has_all(p: Profile) -> bool:
    return p.graph_mode == "rollout"


def _fell_back(p: Profile) -> bool:
    return "cannot be captured" in p.graph_reason


def _no_graph_for_checks(p: Profile) -> bool:
    return p.gpu and p.check_task and p.graph_mode == "update"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _cpus(count: int) -> str:
    return f"{count} CPU{'' if count == 1 else 's'}"


def _power_of_two(at_most: float) -> int:
    """The largest power of two up to a number; 0 below 1."""
    return 1 << int(math.log2(at_most)) if at_most >= 1 else 0
