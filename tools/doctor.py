"""Check the machine, report what limits a run, and measure how a task scales with envs, processes and actors.

python tools/doctor.py                                    the machine: does everything work here?
python tools/doctor.py Ant                                the latest Ant run, finished or not: what limits it?
python tools/doctor.py scaling task=Ant                   numbers of envs and devices: which is the best?
python tools/doctor.py scaling task=Ant --num-envs 256,1024,4096 --devices cpu,cuda --out scaling.json
python tools/doctor.py scaling task=Ant processes=1,2                        processes that learn together
python tools/doctor.py scaling task=Ant algo=impala actors=process num_actors=1,2,4
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

from gpusim_rl.cli import table_lines
from gpusim_rl.errors import ConfigError, did_you_mean, friendly_errors, say
from gpusim_rl.files.paths import find_run
from gpusim_rl.files.provenance import describe_environment, git_state
from gpusim_rl.files.safe_open import writing
from gpusim_rl.machine.hardware import available_cpus, limit_openmp_spin
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.view.arguments import positive

if TYPE_CHECKING:
    from gpusim_rl.diagnose.machine_check import Check
    from gpusim_rl.diagnose.run_stats import RunStats
    from gpusim_rl.diagnose.short_training import Measurement

CPU_COUNTS = (64, 256, 1024, 4096)
GPU_COUNTS = (256, 1024, 4096, 16384)
COUNTED = {"processes": "processes", "num_actors": "actors"}  # settings of which `scaling` measures each number
WARM_UP = 4  # on CUDA the third captures the graphs, and during the fourth the host gets ahead of the device
FINISHED_OR_STOPPED_S = 60.0  # a run without a new row for so long, and for three iterations, has ended


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        args = parse(sys.argv[1:] if argv is None else argv)
        limit_openmp_spin()
        return args.command(args)


def parse(argv: list[str]) -> argparse.Namespace:
    if argv[:1] == ["scaling"]:
        words = "Measure a task at several numbers of envs and on several devices."
        parser = argparse.ArgumentParser(prog="doctor scaling", description=words)
        words = "as for train.py: task=Ant; processes=1,2 or num_actors=1,2,4: measure each number"
        parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=words)
        parser.add_argument("--num-envs", type=counts, help="numbers of envs, e.g. 64,256,1024")
        parser.add_argument("--devices", type=names, help="cpu, cuda or cpu,cuda (default: all available)")
        parser.add_argument("--iterations", type=positive, default=5, help="measured iterations, at least (default: 5)")
        parser.add_argument("--seconds", type=float, default=3.0, help="measured time, at least (default: 3)")
        parser.add_argument("--warm-up", type=positive, default=WARM_UP, help=f"iterations before (default: {WARM_UP})")
        parser.add_argument("--json", action="store_true", help="print json instead of the table")
        parser.add_argument("--out", type=Path, help="json file to write")
        parser.add_argument("-cd", "--config-dir", help="folder with more tasks, as for train.py")
        parser.set_defaults(command=measure_scaling)
        args = parser.parse_intermixed_args(argv[1:])
        args.argv = argv
        return args

    if any("=" in text for text in argv[1:]) and (hint := did_you_mean(argv[0], ["scaling"])):  # no run takes those
        raise ConfigError(f"unknown command {argv[0]!r}", hint=hint)
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="doctor", description=__doc__, formatter_class=layout)
    parser.add_argument("run", nargs="?", help="run folder, or a task (its latest run); without it, the machine")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("-cd", "--config-dir", help="as for train.py; unused")
    args = parser.parse_args(argv)
    args.command = report_machine if args.run is None else report_run
    return args


def counts(text: str) -> list[int]:
    """Return the numbers of an argument, also in brackets as on train.py's command line."""
    numbers = sorted({int(number) for number in text.strip("[]").split(",")})
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {numbers[0]}")
    return numbers


def names(text: str) -> list[str]:
    """Return the devices of an argument."""
    devices = text.strip("[]").split(",")
    if not {*devices} <= {"cpu", "cuda"}:
        raise argparse.ArgumentTypeError(f"expected cpu and cuda, got {text!r}")
    return devices


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
        lines = [dataclasses.asdict(check) for check in checks]
        print(json.dumps({"works": not broken, "checks": lines}, indent=2))
    else:
        say("", f"{len(broken)} broken: {', '.join(broken)}" if broken else "training works here")
    return 1 if broken else 0


def self_tests() -> Iterator[Check]:
    """Train a tiny Ant for three iterations with every simulator that can run here."""
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
        point = measure_training(small, warm_up=2, iterations=1)  # the third is replayed from graphs
        took_s = time.perf_counter() - started
        if point.error is None:
            text = f"{sim} on {device}: 3 iterations of 16 ants in {point.precision} ({took_s:.0f} s with start-up)"
            yield Check("self-test", "ok", text)
        else:
            fix = f"python train.py {' '.join(small)} max_iterations=1 shows more"
            yield Check("self-test", "failed" if is_required else "warning", f"{sim} on {device}: {point.error}", fix)


def report_run(args: argparse.Namespace) -> int:
    """Print what limits a run."""
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
    """Return lines about the run."""
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
    left_out = f"; {stats.warm_up_rows} of the warm-up left out" if stats.warm_up_rows else "; still warming up"
    graph = f", graph={stats.graph_mode}" if stats.on_gpu and stats.graph_mode else ""
    return [
        f"{folder}, {newest} ({stats.rows} row{'s' if stats.rows > 1 else ''} read{left_out})",
        f"{stats.task}, {several}{stats.num_envs} envs{sim}, learner on"
        f" {stats.rl_device}{graph}: {stats.env_steps_per_s:,.0f} env steps/s",
        " · ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share),
        *[" · ".join(use)] * bool(use),
    ]


def measure_scaling(args: argparse.Namespace) -> int:
    """Measure all envs on all devices, or all numbers of processes or actors, and recommend one."""
    import psutil

    args.load = psutil.getloadavg()[0]
    counted = [text for text in args.overrides if text.partition("=")[0] in COUNTED]
    return measure_parallel(args, counted) if counted else measure_envs(args)


def measure_envs(args: argparse.Namespace) -> int:
    """Measure every number of envs on every device, and recommend one."""
    import torch

    from gpusim_rl.diagnose.scaling import recommend

    fixed = [text for text in args.overrides if text.partition("=")[0] in ("num_envs", "device")]
    if fixed:
        raise ConfigError("scaling sets it", key=fixed[0].partition("=")[0], hint="Try --num-envs and --devices")
    task, tuned_envs = checked(args.overrides, args.config_dir)
    measured: dict[str, dict[int, Measurement]] = {}
    for device in args.devices or ["cpu", "cuda"][: 1 + torch.cuda.is_available()]:
        measured[device] = {}
        for num_envs in args.num_envs or (GPU_COUNTS if device == "cuda" else CPU_COUNTS):
            overrides = [*args.overrides, f"num_envs={num_envs}", f"device={device}"]
            measured[device][num_envs] = measure(args, f"{task} with {num_envs} envs on {device}", overrides)
    advice = recommend(measured, task=task, tuned_envs=tuned_envs)
    points = [(device, num_envs, point) for device in measured for num_envs, point in measured[device].items()]
    errors = [f"{num_envs} envs on {device}: {point.error}" for device, num_envs, point in points if point.error]
    rows = [{"device": device, "num_envs": num_envs, **dataclasses.asdict(point)} for device, num_envs, point in points]
    best = f"recommended: device={advice.device} num_envs={advice.num_envs}" if advice.device else ""
    table = [envs_row(*point) for point in points]
    return finish(args, task, rows, dataclasses.asdict(advice), table, best, [*errors, *advice.reasons])


def measure_parallel(args: argparse.Namespace, counted: list[str]) -> int:
    """Measure the numbers of processes or actors in the overrides `counted`, and recommend one."""
    from gpusim_rl.diagnose.scaling import efficiency, reasons, useful

    if args.num_envs or args.devices:
        raise ConfigError("scaling needs one number of envs", key=counted[0], hint="Try num_envs=512 device=cpu")
    if len(counted) > 1:
        raise ConfigError(key="scaling", expected="processes or num_actors", got=" ".join(counted))
    key, _, text = counted[0].partition("=")
    try:
        numbers = counts(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise ConfigError(key=key, expected="positive numbers such as 1,2,4", got=text) from None
    fixed, torchrun = [text for text in args.overrides if text not in counted], key == "processes"
    lines = {count: [*fixed, "multi_gpu=true" if torchrun else f"num_actors={count}"] for count in numbers}
    task, _ = checked(lines[numbers[0]], args.config_dir)
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
    """Check the settings of a command line; return its task and number of envs."""
    from gpusim_rl.settings.checks import check_settings
    from gpusim_rl.settings.compose import compose

    config = compose(overrides, config_dir)
    check_settings(config)
    return config["task"]["_target_"].rpartition(".")[2], config["num_envs"]


def measure(args: argparse.Namespace, title: str, overrides: list[str], processes: int | None = None) -> Measurement:
    """Measure a training with these overrides with this many torchrun processes (None: without torchrun)."""
    from gpusim_rl.diagnose.short_training import measure_training

    if not args.json:
        say(f"measuring {title} …", file=sys.stderr)
    length = {"warm_up": args.warm_up, "iterations": args.iterations, "seconds": args.seconds}
    more_tasks = ["-cd", args.config_dir] if args.config_dir else []
    return measure_training([*more_tasks, *overrides], processes=processes, **length)


def envs_row(device: str, num_envs: int, point: Measurement) -> dict[str, str]:
    """Return the table row of a number of envs."""
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
    """Return the table row of a number of processes or actors."""
    return {
        unit: str(count),
        **speeds(point),
        "efficiency": percent(efficiency),
        "in sums" if unit == "processes" else "learner waits": percent(point.learner_wait),
        "actors wait": percent(point.actor_wait),
        "lag": "" if point.lag is None else f"{point.lag:.1f}",
        "CPU": "" if point.cpu_percent is None else f"{point.cpu_percent:.0f} %",
    }


def speeds(point: Measurement) -> dict[str, str]:
    """Return the speed columns."""
    if point.error is not None:
        return {"env steps/s": "–"}
    numbers = {"env steps/s": point.env_steps_per_s, "slowest": point.slowest, "fastest": point.fastest}
    return {name: f"{number:,.0f}" for name, number in numbers.items()}


def percent(share: float | None) -> str:
    """Format a share in percent; empty if unknown."""
    return "" if share is None else f"{100 * share:.0f} %"


def finish(
    args: argparse.Namespace,
    task: str,
    points: list[dict[str, Any]],
    recommendation: dict[str, Any],
    table: Sequence[Mapping[str, str]],
    best: str,
    reasons: Sequence[str],
) -> int:
    """Write the measurements to `--out`, print them as json or as a table, and return the exit code.

    Empty columns of `table` are left out; `best` is empty if nothing could be measured.
    """
    result = {
        "command": shlex.join(["python", "tools/doctor.py", *args.argv]),
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
