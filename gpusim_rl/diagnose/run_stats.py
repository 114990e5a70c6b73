"""Statistics of a live or finished run, read from its folder."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.safe_open import load_json, load_yaml
from gpusim_rl.run.phases import PHASES
from gpusim_rl.run.writers import Row, read_csv
from gpusim_rl.settings.simulators import NO_SIMULATOR, SIMULATORS, default_simulator

NEWEST = 500  # maximum rows read: a run is judged by its current behaviour
WARM_UP_ROWS = 10  # maximum warm-up rows: kernels are compiled, graphs captured, memory allocated
CAPTURED = 5  # warm-up iterations of CUDA graphs: three eager calls, then the capture
POSITIVE = {"num_envs", "processes", "local_processes", "horizon", "epochs", "minibatch_size"}  # divisors in rules
POSITIVE |= {"physics_hz", "control_hz", "log_interval", "cpus"}
NEEDED = ("iteration", "env_steps", "time/iteration_s")
LATER = "Try again after the first iteration"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """Statistics of a run; None = unknown. Shares are fractions of the wall-clock time unless stated otherwise."""

    # Settings
    task: str
    num_envs: int  # per process or per actor
    num_actors: int = 0  # 0: the learner steps its own envs
    algo: str  # name of the algorithm, and of the section with its settings
    horizon: int  # control steps
    epochs: int | None = None  # None: the algorithm has no such setting
    minibatch_size: int | None = None  # samples
    physics_hz: float | None = None  # None: envs of another library
    control_hz: float | None = None
    log_interval: int  # iterations
    checkpoint_interval: int  # iterations
    wandb: bool = False
    tensorboard: bool = False
    check_task: bool = False
    compile: bool = False
    njmax: int | None = None
    nconmax: int | None = None
    njmax_used: float | None = None  # maximum share; above 1 if contacts or limits were dropped
    nconmax_used: float | None = None
    max_policy_lag: int | None = None  # updates

    # Hardware and processes
    sim: str
    sim_device: str
    rl_device: str
    graph_mode: str | None = None  # mode of `GraphChoice`, such as rollout or off
    graph_reason: str = ""
    processes: int = 1  # number of learning processes
    local_processes: int = 1  # number of processes on the first process's machine
    actor_engine: str | None = None  # ray or process
    cpus: int  # available to the process
    machine_cpus: int | None = None
    physics_threads: int | None = None
    torch_threads: int | None = None
    memory_limit_gb: float | None = None
    gpu_memory_limit_gb: float | None = None

    # Measurements
    rows: int  # number of rows of metrics.csv, without warm-up rows
    warm_up_rows: int = 0
    iteration: int  # of the newest row
    env_steps_per_s: float
    simulate: float = 0.0
    policy: float = 0.0
    rollout: float = 0.0  # simulation and policy in one graph
    actors: float = 0.0  # time the learner waits for actors
    update: float = 0.0
    log: float = 0.0
    sums: float | None = None  # in all-reduces, including waits, in any phase; mean over processes
    log_peaks: float = 0.0  # part of `log` beyond its median per row
    cpu_percent: float | None = None  # of the available CPUs
    memory_gb: float | None = None
    load: float | None = None  # runnable threads on the machine
    gpu_percent: float | None = None
    gpu_memory_gb: float | None = None
    speed_trend: float | None = None  # speed in the last quarter of the rows / first quarter
    memory_growth_gb: float | None = None  # from the first to the last quarter of the rows
    diverged: float = 0.0  # share of all control steps
    overflow: float = 0.0  # maximum number of envs that dropped contacts
    actor_wait: float | None = None  # share of the actors' time waiting for the learner
    lag_mean: float | None = None  # updates

    @property
    def on_gpu(self) -> bool:
        """True if physics and learning share a GPU."""
        return self.rl_device.startswith("cuda") and self.sim_device == self.rl_device

    @property
    def cpu_physics(self) -> bool:
        """True if physics runs on C MuJoCo's threads."""
        return self.sim in SIMULATORS and SIMULATORS[self.sim].cpu_threads

    @property
    def all_envs(self) -> int:
        """Number of envs, summed over processes or actors."""
        return self.num_envs * self.processes * max(1, self.num_actors)

    @property
    def step_s(self) -> float:
        """Duration of a control step of all envs, with the policy [s]; 0 with actors."""
        return (self.simulate + self.policy + self.rollout) * self.all_envs / self.env_steps_per_s

    @property
    def minibatches(self) -> int | None:
        """Optimiser steps per iteration."""
        if self.epochs is None or self.minibatch_size is None or self.num_actors:
            return None
        return self.epochs * max(1, round(self.num_envs * self.horizon / self.minibatch_size))

    @property
    def gpu_idle(self) -> float | None:
        """Share of time that the GPU is idle, excluding logging."""
        return None if self.gpu_percent is None else max(0.0, 1.0 - self.gpu_percent / 100.0 - self.log)

    @property
    def log_cost(self) -> float:
        """Share of time lost to logging; host time that overlaps with GPU work is free."""
        if not self.on_gpu:
            return self.log
        busy = (self.gpu_percent or 0.0) / 100.0
        if self.graph_mode == "rollout":  # the driver samples rarely; graphs never wait for the host
            busy = max(busy, self.rollout + self.update)
        return max(0.0, min(self.log, 1.0 - busy))

    @property
    def cpu_idle(self) -> float | None:
        """Unused share of the available CPU time."""
        return None if self.cpu_percent is None else max(0.0, 1.0 - self.cpu_percent / 100.0)

    @property
    def contended(self) -> bool:
        """True if other programs compete for the CPUs."""
        if self.load is None or self.machine_cpus is None or self.cpu_idle is None:
            return False
        return self.load > 1.25 * self.machine_cpus and self.cpu_idle > 0.2

    @property
    def too_many_threads(self) -> bool:
        """True if the run has more threads than CPUs."""
        machine_cpus = self.machine_cpus or self.local_processes * self.cpus
        return self.most_threads > self.cpus or self.local_processes * self.most_threads > machine_cpus

    @property
    def most_threads(self) -> int:
        """Maximum number of busy threads per process."""
        return max(self.physics_threads or 0, self.torch_threads or 0)


def read_run_stats(folder: Path, warm_up: int | None = None) -> RunStats:
    """Return a run folder's statistics, or raise ConfigError; `warm_up=None` infers the number of warm-up rows."""
    config, file = load_yaml(folder / "config.yaml"), folder / "env.json"
    try:
        environment = load_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}", key=str(file)) from None
    rows = read_rows(folder / "metrics.csv", 2 * max(NEWEST, warm_up or 0) + 2)
    try:
        without_sim = (environment.get("sim") or {}).get("name") == NO_SIMULATOR
        if without_sim and not (config.get("actors") or {}).get("engine"):
            hint = "See the columns time/simulate, time/policy and time/update of metrics.csv"
            raise ConfigError("the rules do not cover envs of another library", key=str(folder), hint=hint)
        if warm_up is None:
            captured = (environment.get("graph") or {}).get("mode", "off") != "off"
            warm_up = warm_up_rows(rows, CAPTURED if captured else 1)
        stats = make_run_stats(config, environment, rows, warm_up)
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"invalid config.yaml or env.json: {type(error).__name__} {error}"
        raise ConfigError(problem, key=str(folder)) from None
    _check(stats, folder)
    return stats


def _check(stats: RunStats, folder: Path) -> None:
    """Raise ConfigError for values that the rules cannot use."""
    for name, hint in get_type_hints(RunStats).items():
        value, kinds = getattr(stats, name), tuple(get_origin(kind) or kind for kind in get_args(hint) or (hint,))
        fits = isinstance(value, (*kinds, int) if float in kinds else kinds)
        if name in POSITIVE and fits:
            fits = value is None or value > 0
        if not fits or (name == "sim" and value not in (*SIMULATORS, NO_SIMULATOR)):
            raise ConfigError(f"invalid config.yaml or env.json: {name} is {value!r}", key=str(folder))


def read_rows(file: Path, most: int = sys.maxsize) -> list[Row]:
    """Read metrics.csv without an incomplete last line, or raise ConfigError; drop middle rows if more than `most`."""
    try:
        content = read_csv(file)
    except OSError as error:
        hint = LATER if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot be read: {error.strerror}", key=str(file), hint=hint) from None
    if missing := [name for name in NEEDED if name not in content.columns]:
        raise ConfigError(f"no column {', '.join(missing)}", key=str(file))
    if content.damaged:
        raise ConfigError(f"damaged line {content.damaged}", key=str(file), hint="Try resuming the run to repair it")
    if not content.lines:
        raise ConfigError("no rows", key=str(file), hint=LATER)
    rows: list[Row] = []
    steps, count = 0.0, len(content)
    for number, cells in enumerate(content.rows(), start=2):
        row = {name: float(text) if text else None for name, text in zip(content.columns, cells, strict=True)}
        seconds, now = row["time/iteration_s"] or 0.0, row["env_steps"] or 0.0
        if not (0.0 < seconds < math.inf and steps < now < math.inf):
            raise ConfigError(f"invalid env_steps or time/iteration_s in line {number}", key=str(file))
        steps = now
        if number - 2 < most // 2 or count - (number - 2) <= most - most // 2:
            rows.append(row)
    return rows


def warm_up_rows(rows: Sequence[Row], iterations: int = 1) -> int:
    """Return the number of warm-up rows: the first `iterations`, then rows with unusual durations; never all rows."""
    if len(rows) < 2:
        return 0
    usual = statistics.median(_number(row, "time/iteration_s") for row in rows[1:])
    last = _number(rows[0], "iteration") + iterations - 1
    count = max(1, sum(_number(row, "iteration") <= last for row in rows[:-1]))
    while count < min(WARM_UP_ROWS, len(rows) - 1):
        if 0.5 * usual <= _number(rows[count], "time/iteration_s") <= 1.5 * usual:
            break
        count += 1
    return count


def make_run_stats(config: dict[str, Any], environment: dict[str, Any], rows: Sequence[Row], warm_up: int) -> RunStats:
    """Compute the statistics from a run's files, without warm-up rows."""
    task, sim_cfg, log_cfg, algo = config["task"], config["sim"], config["log"], config["algo"]["name"]
    learning = config.get(algo) or {}  # a user's algorithm may have other settings, or none
    sim, learner, graph, compiled, cpu = (
        environment.get(name) or {} for name in ("sim", "learner", "graph", "compile", "cpu")
    )
    engine, processes = (config.get("actors") or {}).get("engine"), environment.get("processes") or 1
    kept = _Rows(rows, max(warm_up, len(rows) - NEWEST))

    rl_device = learner.get("device") or ("cuda" if kept.mean("system/gpu_percent") is not None else "cpu")
    sim_device = sim.get("device") or config.get("sim_device") or rl_device
    sim_name = sim.get("name") or sim_cfg["name"]
    if sim_name == "auto":
        sim_name = default_simulator("cpu" if sim_device == "cpu" else "cuda").name
    all_envs = config["num_envs"] * processes
    return RunStats(
        task=str(task["_target_"]).rpartition(".")[2],
        num_envs=config["num_envs"],
        num_actors=environment.get("actors") or config["num_actors"] if engine else 0,
        algo=algo,
        horizon=learning.get("horizon")
        or max(1, round(kept.increase("env_steps") / max(1.0, kept.increase("iteration") * all_envs))),
        **{name: learning.get(name) for name in ("epochs", "minibatch_size", "max_policy_lag")},
        **{name: task.get(name) for name in ("physics_hz", "control_hz")},
        log_interval=log_cfg["interval"],
        checkpoint_interval=log_cfg["checkpoint_interval"],
        wandb=config["wandb_activate"],
        tensorboard=log_cfg["tensorboard"],
        check_task=config["debug"]["check_task"],
        compile=compiled.get("mode", config.get("compile")) in ("learner", "all"),
        **{name: sim.get(name) or sim_cfg[name] for name in ("njmax", "nconmax")},
        sim=sim_name,
        sim_device=sim_device,
        rl_device=rl_device,
        graph_mode=graph.get("mode"),
        graph_reason=graph.get("reason") or "",
        processes=processes,
        local_processes=environment.get("local_processes") or 1,
        actor_engine=engine,
        cpus=cpu.get("available") or 1,
        machine_cpus=cpu.get("threads"),
        physics_threads=sim.get("threads"),
        torch_threads=learner.get("threads"),
        memory_limit_gb=environment.get("memory_limit_gb") or environment.get("memory_gb"),
        gpu_memory_limit_gb=learner.get("memory_gb"),
        warm_up_rows=warm_up,
        **kept.measured(),
    )


class _Rows:
    """Rows of metrics.csv after the first `skipped`; the last skipped row marks the start."""

    def __init__(self, rows: Sequence[Row], skipped: int) -> None:
        self.rows = rows[skipped:]
        self._before: Row = rows[skipped - 1] if skipped else {"iteration": 0, "env_steps": 0}
        iterations = [_number(row, "iteration") for row in (self._before, *self.rows)]
        self._seconds = [
            _number(row, "time/iteration_s") * (now - before)
            for row, (before, now) in zip(self.rows, itertools.pairwise(iterations), strict=True)
        ]
        self.total_s = sum(self._seconds) or 1e-9

    def measured(self) -> dict[str, Any]:
        steps = self.increase("env_steps")
        speed, memory = self.quarters("speed/env_steps_per_s"), self.quarters("system/memory_gb")
        return {
            "rows": len(self.rows),
            "iteration": int(_number(self.rows[-1], "iteration")),
            "env_steps_per_s": steps / self.total_s,
            **{phase: self.share(f"time/{phase}") for phase in PHASES},
            "sums": self.share("time/sums") if self.values("time/sums") else None,
            "log_peaks": self.peaks("time/log"),
            **{name: self.mean(f"system/{name}") for name in ("cpu_percent", "gpu_percent", "load")},
            **{name: self.last(f"system/{name}") for name in ("memory_gb", "gpu_memory_gb")},
            "speed_trend": speed[1] / speed[0] if speed and speed[0] > 0 else None,
            "memory_growth_gb": memory[1] - memory[0] if memory else None,
            **{name: max(self.values(f"sim/{name}"), default=None) for name in ("njmax_used", "nconmax_used")},
            "diverged": sum(self.values("sim/diverged")) / steps if steps else 0.0,
            "overflow": max(self.values("sim/overflow"), default=0.0),
            "actor_wait": self.mean("actors/wait"),
            "lag_mean": self.mean("policy/lag_mean"),
        }

    def values(self, name: str) -> list[float]:
        return [value for row in self.rows if (value := row.get(name)) is not None]

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.fmean(values) if values else None

    def last(self, name: str) -> float | None:
        return next(reversed(self.values(name)), None)

    def increase(self, name: str) -> float:
        return _number(self.rows[-1], name) - _number(self._before, name)

    def quarters(self, name: str) -> tuple[float, float] | None:
        """Return the medians of a column's first and last quarter."""
        values = self.values(name)
        quarter = len(values) // 4
        return (statistics.median(values[:quarter]), statistics.median(values[-quarter:])) if quarter else None

    def share(self, name: str) -> float:
        return sum(self._spent(name)) / self.total_s

    def peaks(self, name: str) -> float:
        """Return the share of the total time that a phase takes beyond its median per row."""
        spent = self._spent(name)
        usual = statistics.median(spent)
        return sum(max(0.0, seconds - usual) for seconds in spent) / self.total_s

    def _spent(self, name: str) -> list[float]:
        return [(row.get(name) or 0.0) * wall for row, wall in zip(self.rows, self._seconds, strict=True)]


def _number(row: Row, name: str) -> float:
    value = row[name]
    assert value is not None  # checked by read_rows
    return value
