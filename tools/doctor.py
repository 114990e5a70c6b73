"""Check the machine, diagnose a run, measure scaling.

gpusim-rl doctor                                         the machine: does everything work?
gpusim-rl doctor Ant                                     the latest Ant run, finished or not: what limits it?
gpusim-rl doctor physics task=Go1Velocity                which solver settings are as good, and cheaper?
gpusim-rl doctor scaling task=Ant                        which device and number of envs are best?
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import dataclasses
import importlib.util
import itertools
import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError, did_you_mean, friendly_errors, say
from gpusim_rl.files.paths import find_run
from gpusim_rl.files.provenance import describe_environment, git_state
from gpusim_rl.files.safe_open import writing
from gpusim_rl.machine.hardware import available_cpus, import_torch
from gpusim_rl.options import Parser, listed, number, positive
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.view.text_table import table_lines

if TYPE_CHECKING:
    from gpusim_rl.diagnose.machine_check import Check
    from gpusim_rl.diagnose.run_stats import RunStats
    from gpusim_rl.diagnose.short_training import Measurement

CPU_COUNTS = (64, 256, 1024, 4096)
GPU_COUNTS = (256, 1024, 4096, 16384)
COUNTED = {"num_processes": "processes", "num_actors": "actors"}
SCALING = "Measure a task with several numbers of envs, processes or actors."
PHYSICS = "Compare friction cones, solver iterations and buffers with the task's."
WARM_UP = 5  # on CUDA, the fourth captures the graphs, and in the fifth the host runs ahead of the device
FINISHED_OR_STOPPED_S = 60.0  # a run without a new row for this long, and for three iterations, has ended


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        args = parse(sys.argv[1:] if argv is None else argv)
        return args.command(args)


def parse(argv: list[str]) -> argparse.Namespace:
    if argv[:1] == ["scaling"]:
        parser = Parser("doctor scaling", f"{SCALING}\n{__doc__}")
        parser.option("settings")
        counts = {"type": listed(positive), "metavar": "A,B", "group": "Measurement"}
        parser.option("--num-envs", "one or several", note="64 to 4096 on the CPU, 256 to 16384 on a GPU", **counts)
        parser.option("--num-processes", "number of torchrun processes, one or several", **counts)
        parser.option("--num-actors", "number of actors, one or several", **counts)
        devices = {"type": listed(str), "metavar": "A,B", "default": None}
        parser.option("--device", "or both", "Measurement", note="all available", **devices)
        parser.option("--iterations", "at least", default=5)
        parser.option("--min-seconds", "minimum wall time [s]", "Measurement", type=number(float, 0), default=3.0)
        parser.option("--warm-up", "iterations to discard first", "Measurement", type=positive, default=WARM_UP)
        parser.options("--out", "--json", "--config-dir")
        parser.set_defaults(command=measure_scaling, argv=argv)
        return parser.parse_settings(argv[1:])

    if argv[:1] == ["physics"]:
        parser = Parser("doctor physics", f"{PHYSICS}\n{__doc__}")
        parser.option("settings")
        parser.option("--steps", "with random actions", "Measurement", type=positive, default=60)
        error = "allowed velocity error in 99 % of the control steps, relative to the RMS velocity"
        parser.option("--tolerance", error, "Measurement", type=number(float, 0), default=0.01)
        parser.options("--json", "--config-dir")
        parser.set_defaults(command=compare_physics)
        return parser.parse_settings(argv[1:])

    if any("=" in text for text in argv[1:]) and (hint := did_you_mean(argv[0], ["scaling", "physics"])):
        raise ConfigError(f"unknown command {argv[0]!r}", hint=hint)
    parser = Parser("doctor", __doc__)
    parser.rows["Commands"] = [("scaling", SCALING), ("physics", PHYSICS)]
    parser.option("run", "or nothing to check the machine", nargs="?")
    parser.options("--json", "--config-dir")
    args = parser.parse_args(argv)
    args.command = report_machine if args.run is None else report_run
    return args


def report_machine(args: argparse.Namespace) -> int:
    """Print one line for each check; return 1 if training does not work."""
    from gpusim_rl.diagnose.machine_check import check_machine

    checks = []
    for check in itertools.chain(check_machine(Path("runs")), self_tests()):
        checks.append(check)
        if not args.json:
            say(*str(check).split("\n"))
            sys.stdout.flush()
    broken = [check.name for check in checks if check.state == "failed"]
    if args.json:
        print(json.dumps({"works": not broken, "checks": [*map(dataclasses.asdict, checks)]}, indent=2))
    else:
        say("", f"{len(broken)} broken: {', '.join(broken)}" if broken else "training works here")
    return 1 if broken else 0


def self_tests() -> Iterator[Check]:
    """Train a tiny Ant for three iterations with every simulator that can run here; yield a check for each."""
    import torch

    from gpusim_rl.diagnose.machine_check import Check
    from gpusim_rl.diagnose.short_training import measure_training

    cuda_or_cpu = "cuda" if torch.cuda.is_available() else "cpu"
    for sim, simulator in SIMULATORS.items():
        if importlib.util.find_spec(simulator.library) is None:
            continue
        device = cuda_or_cpu if cuda_or_cpu in simulator.devices else "cpu"
        is_required = device in simulator.default_on
        small = ["task=Ant", f"sim={sim}", f"device={device}", "num_envs=16", "ppo.horizon=8", "ppo.minibatch_size=64"]
        started = time.perf_counter()
        point = measure_training(small, warm_up=2, iterations=1)  # the third replays the graphs
        took_s = time.perf_counter() - started
        if point.error is None:
            text = f"{sim} on {device}: 3 iterations of 16 ants in {point.precision} ({took_s:.0f} s with start-up)"
            yield Check("self-test", "ok", text)
        else:
            fix = f"python train.py {' '.join(small)} max_iterations=1 shows details"
            yield Check("self-test", "failed" if is_required else "warning", f"{sim} on {device}: {point.error}", fix)


def report_run(args: argparse.Namespace) -> int:
    """Print a run's bottlenecks."""
    from gpusim_rl.diagnose.rules import conclusion, diagnose
    from gpusim_rl.diagnose.run_stats import read_run_stats

    folder = find_run(args.run)
    stats = read_run_stats(folder)
    findings = diagnose(stats)
    if args.json:
        result = {
            "run": str(folder),
            "conclusion": "" if findings else conclusion(stats),
            "findings": [{**dataclasses.asdict(finding), "text": str(finding)} for finding in findings],
            "stats": dataclasses.asdict(stats),
        }
        print(json.dumps(result, indent=2))
        return 0
    lines = [f"{number}. {finding}" for number, finding in enumerate(findings, start=1)] or [conclusion(stats)]
    say(*summary(folder, stats), "", *lines)
    return 0


def summary(folder: Path, stats: RunStats) -> list[str]:
    """Return the report's header: run, setup, phase shares and utilisation."""
    from gpusim_rl.run.phases import PHASES

    sim = f", {stats.sim} on {stats.sim_device}" if stats.sim in SIMULATORS else " of another library"
    age_s = time.time() - (folder / "metrics.csv").stat().st_mtime
    quiet = age_s > FINISHED_OR_STOPPED_S and age_s > 3 * stats.all_envs * stats.horizon / stats.env_steps_per_s
    newest = f"iteration {stats.iteration}" + ("" if quiet else f", {age_s:.0f} s ago")
    shares = {phase: getattr(stats, phase) for phase in PHASES}
    sums, wait = (None if share is None else 100 * share for share in (stats.sums, stats.actor_wait))
    numbers = {
        "CPU {:.0f} %": stats.cpu_percent,
        "RAM {:.1f} GB": stats.memory_gb,
        "GPU {:.0f} %": stats.gpu_percent,
        "GPU memory {:.1f} GB": stats.gpu_memory_gb,
        "load {:.1f}": stats.load,
        "sums {:.0f} %": sums,
        "actors wait {:.0f} %": wait,
        "samples {:.1f} updates old": stats.lag_mean if stats.num_actors else None,
    }
    use = [words.format(value) for words, value in numbers.items() if value is not None]
    several = f"{stats.processes} processes x " if stats.processes > 1 else ""
    if stats.num_actors:
        several = f"{stats.num_actors} actor{'s' * (stats.num_actors > 1)} ({stats.actor_engine}) x "
    left_out = f"; {stats.warm_up_rows} warm-up rows skipped" if stats.warm_up_rows else "; still warming up"
    graph = f", graph={stats.graph_mode}" if stats.on_gpu and stats.graph_mode else ""
    return [
        f"{folder}, {newest} ({stats.rows} row{'s' if stats.rows > 1 else ''} read{left_out})",
        f"{stats.task}, {several}{stats.num_envs} envs{sim}, learner on"
        f" {stats.rl_device}{graph}: {stats.env_steps_per_s:,.0f} env steps/s",
        " · ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share),
        *[" · ".join(use)] * bool(use),
    ]


def compare_physics(args: argparse.Namespace) -> int:
    """Print the velocity error and the cost of each choice of solver settings, and the cheapest within tolerance."""
    import_torch()  # with less spinning, which would count as cost
    from gpusim_rl.diagnose.physics_settings import buffer_settings, cheapest, compare_settings

    settings = ["num_envs=64", *args.settings]
    say("measuring {} with {} envs …".format(*checked(settings, args.config_dir)), file=sys.stderr)
    rows = list(compare_settings(settings, steps=args.steps, config_dir=args.config_dir))
    best = cheapest(rows, args.tolerance)
    words = [f"sim.cone={best.cone}", f"sim.iterations={best.iterations}", f"sim.ls_iterations={best.ls_iterations}"]
    words += buffer_settings(best)
    if args.json:
        print(json.dumps({"rows": [dataclasses.asdict(row) for row in rows], "cheapest": words}, indent=2))
        return 0
    cells = [head := ["cone", "iterations", "line search", "median error", "99 %", "maximum", "relative time", ""]]
    for row in rows:
        limits, errors = (row.iterations, row.ls_iterations), (f"{x:,.1%}" for x in (row.median, row.p99, row.most))
        cells.append([row.cone, *map(str, limits), *errors, f"{row.seconds / rows[0].seconds:.2f}", row.note])
    say(*table_lines(cells, right=head[1:-1], width=None), "")
    own = " (the task's)" * (best is rows[0])
    say(f"cheapest within {args.tolerance:.1%}{own}: {' '.join(words)}")
    return 0


def measure_scaling(args: argparse.Namespace) -> int:
    """Measure speed for numbers of envs, processes or actors, and recommend one."""
    import psutil

    args.load = psutil.getloadavg()[0]
    for text in args.settings:
        key = text.partition("=")[0]
        if key in ("num_envs", "num_actors", "device"):
            hint = f"Try --{key.replace('_', '-')}"
            raise ConfigError("cannot be overridden in `gpusim-rl doctor scaling`", key=key, hint=hint)
    counted = [key for key in COUNTED if getattr(args, key)]
    return measure_parallel(args, counted) if counted else measure_envs(args)


def measure_envs(args: argparse.Namespace) -> int:
    """Measure every number of envs on every device, and recommend a device and a number."""
    import torch

    from gpusim_rl.diagnose.scaling import recommend

    devices = args.device or ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
    known = [checked([*args.settings, f"device={device}"], args.config_dir) for device in devices]
    task, tuned_envs = known[0]
    measured: dict[str, dict[int, Measurement]] = {}
    for device in devices:
        measured[device] = {}
        for num_envs in args.num_envs or (GPU_COUNTS if device.startswith("cuda") else CPU_COUNTS):
            overrides = [*args.settings, f"num_envs={num_envs}", f"device={device}"]
            measured[device][num_envs] = measure(args, f"{task} with {num_envs} envs on {device}", overrides)
    advice = recommend(measured, task=task, tuned_envs=tuned_envs)
    points = [(device, num_envs, point) for device in measured for num_envs, point in measured[device].items()]
    errors = [f"{num_envs} envs on {device}: {point.error}" for device, num_envs, point in points if point.error]
    rows = [{"device": device, "num_envs": num_envs, **dataclasses.asdict(point)} for device, num_envs, point in points]
    best = f"recommended: device={advice.device} num_envs={advice.num_envs}" if advice.device else ""
    table = [envs_row(*point) for point in points]
    return finish(args, task, rows, dataclasses.asdict(advice), table, best, [*errors, *advice.reasons])


def measure_parallel(args: argparse.Namespace, counted: list[str]) -> int:
    """Measure speed for the option in `counted` (numbers of processes or actors), and recommend a number."""
    from gpusim_rl.diagnose.scaling import efficiency, reasons, useful

    key, fixed = counted[0], [*args.settings]
    if len(counted) > 1:
        raise ConfigError("expected --num-processes or --num-actors, not both", key="scaling")
    for single in ("num_envs", "device"):
        values = getattr(args, single) or []
        fixed += [f"{single}={value}" for value in values]
        if len(values) > 1:
            expected = f"one value with --{key.replace('_', '-')}"
            raise ConfigError(key=f"--{single.replace('_', '-')}", expected=expected, got=values)
    torchrun = key == "num_processes"
    lines = {n: [*fixed, "multi_gpu=true" if torchrun else f"num_actors={n}"] for n in getattr(args, key)}
    task, _ = checked(next(iter(lines.values())), args.config_dir)
    points = {
        count: measure(args, f"{task} with {key}={count}", line, processes=count if torchrun else None)
        for count, line in lines.items()
    }
    best, sentences, shares = useful(points), reasons(points, COUNTED[key]), efficiency(points)
    rows = [{"count": n, "efficiency": shares.get(n), **dataclasses.asdict(point)} for n, point in points.items()]
    table = [parallel_row(COUNTED[key], count, point, shares.get(count)) for count, point in points.items()]
    words = f"useful: {key}={best}" if best else ""
    return finish(args, task, rows, {key: best, "reasons": sentences}, table, words, sentences)


def checked(overrides: Sequence[str], config_dir: str | None) -> tuple[str, int]:
    """Check the settings of a command line; return the task's class name and the number of envs."""
    from gpusim_rl.settings.checks import check_settings
    from gpusim_rl.settings.compose import compose

    config = compose(overrides, config_dir)
    check_settings(config)
    return config["task"]["_target_"].rpartition(".")[2], config["num_envs"]


def measure(args: argparse.Namespace, title: str, overrides: list[str], processes: int | None = None) -> Measurement:
    """Measure a training run with these overrides, in `processes` torchrun processes if given."""
    from gpusim_rl.diagnose.short_training import measure_training

    if not args.json:
        say(f"measuring {title} …", file=sys.stderr)
    length = {"warm_up": args.warm_up, "iterations": args.iterations, "seconds": args.min_seconds}
    more_tasks = ["-cd", args.config_dir] if args.config_dir else []
    return measure_training([*more_tasks, *overrides], processes=processes, **length)


def envs_row(device: str, num_envs: int, point: Measurement) -> dict[str, str]:
    """Return the table row for a number of envs."""
    from gpusim_rl.diagnose.scaling import percent, speeds
    from gpusim_rl.run.phases import PHASES

    row = {"device": device, "envs": str(num_envs), **speeds(point)}
    if point.error is not None:
        return row
    return row | {
        "per env": f"{point.env_steps_per_s / num_envs:,.1f}",
        "ms/step": f"{point.step_ms:.1f}",
        **{phase: percent(point.phases.get(phase)) for phase in PHASES},
        "memory": "" if point.memory_gb is None else f"{point.memory_gb:.1f} GB",
        "sim": f"{point.sim}, {point.precision}",
    }


def parallel_row(unit: str, count: int, point: Measurement, efficiency: float | None) -> dict[str, str]:
    """Return the table row for a number of processes or actors."""
    from gpusim_rl.diagnose.scaling import percent, speeds

    return {
        unit: str(count),
        **speeds(point),
        "efficiency": percent(efficiency),
        "in sums" if unit == "processes" else "learner waits": percent(point.learner_wait),
        "actors wait": percent(point.actor_wait),
        "lag": "" if point.lag is None else f"{point.lag:.1f}",
        "CPU": "" if point.cpu_percent is None else f"{point.cpu_percent:.0f} %",
    }


def finish(
    args: argparse.Namespace,
    task: str,
    points: list[dict[str, Any]],
    recommendation: dict[str, Any],
    table: Sequence[Mapping[str, str]],
    best: str,
    reasons: Sequence[str],
) -> int:
    """Write the measurements to `--out`, print them as JSON or as a table, and return the exit code.

    Empty columns of `table` are left out; `best` is empty if nothing could be measured.
    """
    result = {
        "command": shlex.join(["gpusim-rl", "doctor", *args.argv]),
        "git": git_state(*filter(None, [args.out]))[0],
        "environment": describe_environment(),
        "load_before": round(args.load, 2),
        "task": task,
        "points": points,
        "recommendation": recommendation,
    }
    text = f"{json.dumps(result, indent=2)}\n"
    if args.out:
        with writing(args.out) as file:
            file.write(text.encode())
    if args.json:
        print(text, end="")
        return 0 if best else 1
    columns = [name for name in dict.fromkeys(itertools.chain(*table)) if any(row.get(name) for row in table)]
    cells = [columns, *([row.get(name, "") for name in columns] for row in table)]
    say(*table_lines(cells, right=[name for name in columns if name not in ("device", "sim")], width=None))
    say("", *[best] * bool(best), *(f"- {reason}" for reason in reasons))
    if args.load > 0.5 * available_cpus():
        say(f"- the machine was busy (load {args.load:.1f} before the first measurement): speeds may be low")
    return 0 if best else 1


if __name__ == "__main__":
    sys.exit(main())
