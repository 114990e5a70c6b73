"""Check the machine, say what limits a run, and measure how a task scales with envs, processes and actors.

python tools/doctor.py                                    the machine: does everything work here?
python tools/doctor.py Ant                                the latest Ant run, finished or not: what limits it?
python tools/doctor.py scaling task=Ant                   numbers of envs and devices: which is the best?
python tools/doctor.py scaling task=Ant --num-envs 256,1024,4096 --devices cpu,cuda --out scaling.json
python tools/doctor.py scaling task=Ant processes=1,2                        processes that learn together
python tools/doctor.py scaling task=Ant algo=impala actors=process num_actors=1,2,4
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusim_rl.diagnose.machine_check import Check
    from gpusim_rl.diagnose.parallel_scaling import ParallelPoint
    from gpusim_rl.diagnose.rules import Finding
    from gpusim_rl.diagnose.run_stats import RunStats
    from gpusim_rl.diagnose.scaling import Point, Recommendation

CPU_COUNTS = (64, 256, 1024, 4096)
GPU_COUNTS = (256, 1024, 4096, 16384)
COUNTED = {"processes": "processes", "num_actors": "actors"}  # settings of which `scaling` measures each number
WARM_UP = 4  # on CUDA the third captures the graphs, and during the fourth the host gets ahead of the device
POINT_TIMEOUT_S = 900.0  # the first one on a new machine compiles kernels
FINISHED_OR_STOPPED_S = 60.0  # a run without a new row for so long, and for three iterations, has ended


def main(argv: list[str] | None = None) -> int:
    """Look, measure, and say it in words; 1 when something is broken that training needs."""
    from gpusim_rl.errors import friendly_errors
    from gpusim_rl.machine.hardware import limit_openmp_spin

    with friendly_errors():
        args = parse(sys.argv[1:] if argv is None else argv)
        limit_openmp_spin()
        return args.command(args)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    if argv[:1] == ["scaling"]:
        parser = argparse.ArgumentParser(
            prog="doctor scaling", description="Measure a task at several numbers of envs and on several devices."
        )
        parser.add_argument(
            "overrides",
            nargs="*",
            metavar="KEY=VALUE",
            help="as for train.py: task=Ant; processes=1,2 and num_actors=1,2,4 are measured one by one",
        )
        parser.add_argument("--num-envs", type=counts, help="numbers of envs, e.g. 64,256,1024")
        parser.add_argument("--devices", type=names, help="cpu, cuda or cpu,cuda (default: what there is)")
        parser.add_argument("--iterations", type=positive, default=5, help="measured, at least (default: 5)")
        parser.add_argument("--seconds", type=float, default=3.0, help="measured time, at least (default: 3)")
        parser.add_argument("--warm-up", type=positive, default=WARM_UP, help=f"iterations before (default: {WARM_UP})")
        parser.add_argument("--json", action="store_true", help="print json instead of the table")
        parser.add_argument("--out", type=Path, help="json file to write")
        parser.set_defaults(command=measure_scaling)
        args = parser.parse_intermixed_args(argv[1:])
        args.argv = argv
        return args
    if argv[:1] == ["measure"]:  # started by `scaling` and by the self-test, in a process of its own
        parser = argparse.ArgumentParser(prog="doctor measure")
        parser.add_argument("overrides", nargs="*")
        parser.add_argument("--warm-up", type=int, default=WARM_UP)
        parser.add_argument("--iterations", type=int, default=5)
        parser.add_argument("--seconds", type=float, default=0.0)
        parser.set_defaults(command=print_measurement)
        return parser.parse_intermixed_args(argv[1:])
    if argv and not argv[0].startswith("-") and any("=" in text for text in argv[1:]):  # what no run takes
        from gpusim_rl.errors import ConfigError

        raise ConfigError(f"unknown command {argv[0]!r}.{meant(argv[0]) or ' Available: scaling'}")
    parser = argparse.ArgumentParser(
        prog="doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", help="run folder, or a task (its latest run); without it, the machine")
    parser.add_argument("--json", action="store_true", help="print json instead of words")
    args = parser.parse_args(argv)
    args.command = report_machine if args.run is None else report_run
    return args


def meant(name: str) -> str:
    """The command that a user probably meant, as a hint."""
    from gpusim_rl.errors import closest

    return " Did you mean 'scaling'?" if closest(name, ["scaling", "scale", "sweep"]) else ""


def counts(text: str) -> list[int]:
    """Numbers of envs, also in brackets as on train.py's command line."""
    numbers = sorted({int(part) for part in text.strip("[]").split(",")})
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {numbers[0]}")
    return numbers


def positive(text: str) -> int:
    """A number of iterations."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return int(text)


def names(text: str) -> list[str]:
    """Devices."""
    devices = text.strip("[]").split(",")
    for device in devices:
        if device not in ("cpu", "cuda"):
            raise argparse.ArgumentTypeError(f"must be of cpu and cuda, got {device!r}")
    return devices


# The machine


def report_machine(args: argparse.Namespace) -> int:
    """Prints one line for each thing that was looked at; 1 if training does not work."""
    from gpusim_rl.diagnose.machine_check import check_machine

    checks = []
    for check in itertools.chain(check_machine(Path("runs")), self_tests()):
        checks.append(check)
        if not args.json:
            print(check, flush=True)
    broken = [check for check in checks if check.state == "failed"]
    if args.json:
        lines = [{name: getattr(check, name) for name in ("name", "state", "text", "fix")} for check in checks]
        print(json.dumps({"works": not broken, "checks": lines}, indent=2))
    elif broken:
        print(f"\n{len(broken)} broken: {', '.join(check.name for check in broken)}")
    else:
        print("\ntraining works here")
    return 1 if broken else 0


def self_tests() -> Iterator[Check]:
    """Really trains Ant, for three iterations and very small, with every simulator that can run here."""
    import torch

    from gpusim_rl.diagnose.machine_check import Check
    from gpusim_rl.settings.simulators import SIMULATORS

    cuda_or_cpu = "cuda" if torch.cuda.is_available() else "cpu"
    for sim, simulator in SIMULATORS.items():
        if importlib.util.find_spec(simulator.library) is None:
            continue
        device = cuda_or_cpu if cuda_or_cpu in simulator.devices else "cpu"
        needed = device in simulator.default_on
        small = ["task=Ant", f"sim={sim}", f"device={device}", "num_envs=16", "ppo.horizon=8", "ppo.minibatch_size=64"]
        started = time.perf_counter()
        result = measure_in_subprocess(
            small, "--warm-up", "2", "--iterations", "1"
        )  # the third is replayed from graphs
        took = f"{time.perf_counter() - started:.0f} s"
        if isinstance(result, dict):
            text = f"{sim} on {device}: 3 iterations of 16 ants in {result['precision']} ({took} with start-up)"
            yield Check("self-test", "ok", text)
        else:
            fix = f"python train.py {' '.join(small)} max_iterations=1 shows more"
            yield Check("self-test", "failed" if needed else "warning", f"{sim} on {device}: {result}", fix)


# A run


def report_run(args: argparse.Namespace) -> int:
    """Prints what limits a run."""
    import dataclasses

    from gpusim_rl.diagnose.rules import conclusion, diagnose
    from gpusim_rl.diagnose.run_stats import read_run_stats
    from gpusim_rl.errors import ConfigError, printable
    from gpusim_rl.files.paths import find_run

    try:
        folder = find_run(args.run)
    except ConfigError as error:
        raise ConfigError(f"{error}.{meant(args.run)}".removesuffix(".")) from None
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
    print(printable("\n".join([*summary(folder, stats), "", *finding_lines(stats, findings)])))
    return 0


def summary(folder: Path, stats: RunStats) -> list[str]:
    """What was looked at."""
    from gpusim_rl.run.phases import PHASES
    from gpusim_rl.settings.simulators import SIMULATORS

    sim = f", {stats.sim} on {stats.sim_device}" if stats.sim in SIMULATORS else " of another library"
    age_s = time.time() - (folder / "metrics.csv").stat().st_mtime
    quiet = age_s > FINISHED_OR_STOPPED_S and age_s > 3 * stats.all_envs * stats.horizon / stats.env_steps_per_s
    newest = f"iteration {stats.iteration}" + ("" if quiet else f", {age_s:.0f} s ago")
    shares = {phase: getattr(stats, phase) for phase in PHASES}
    use = [
        f"CPU {stats.cpu_percent:.0f} %" if stats.cpu_percent is not None else "",
        f"RAM {stats.memory_gb:.1f} GB" if stats.memory_gb is not None else "",
        f"GPU {stats.gpu_percent:.0f} %" if stats.gpu_percent is not None else "",
        f"GPU memory {stats.gpu_memory_gb:.1f} GB" if stats.gpu_memory_gb is not None else "",
        f"load {stats.load:.1f}" if stats.load is not None else "",
        f"sums {100 * stats.sums:.0f} %" if stats.sums is not None else "",
        f"actors wait {100 * stats.actor_wait:.0f} %" if stats.actor_wait is not None else "",
        f"samples {stats.lag_mean:.1f} updates old" if stats.num_actors and stats.lag_mean is not None else "",
    ]
    left_out = f"; {stats.warm_up_rows} of the warm-up left out" if stats.warm_up_rows else "; still warming up"
    graph = f", graph={stats.graph_mode}" if stats.on_gpu and stats.graph_mode else ""
    return [
        f"{folder}, {newest} ({stats.rows} row{'s' if stats.rows > 1 else ''} read{left_out})",
        f"{stats.task}, {several(stats)}{stats.num_envs} envs{sim}, learner on"
        f" {stats.rl_device}{graph}: {stats.env_steps_per_s:,.0f} env steps/s",
        " · ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share),
        *filter(None, [" · ".join(filter(None, use))]),
    ]


def several(stats: RunStats) -> str:
    """How many processes or actors have the envs; nothing for one process."""
    if stats.num_actors:
        return f"{stats.num_actors} actor{'s' * (stats.num_actors > 1)} ({stats.actor_engine}) x "
    return f"{stats.processes} processes x " if stats.processes > 1 else ""


def finding_lines(stats: RunStats, findings: Sequence[Finding]) -> list[str]:
    """The findings, the most important first."""
    from gpusim_rl.diagnose.rules import conclusion

    if not findings:
        return [conclusion(stats)]
    return [f"{number}. {finding}" for number, finding in enumerate(findings, start=1)]


# Scaling


def measure_scaling(args: argparse.Namespace) -> int:
    """Measures every number of envs on every device, and recommends one; or every number of processes or of actors."""
    counted = [text for text in args.overrides if text.partition("=")[0] in COUNTED]
    if counted:
        return measure_parallel(args, counted)
    import dataclasses

    import psutil

    from gpusim_rl.diagnose.scaling import recommend
    from gpusim_rl.errors import ConfigError
    from gpusim_rl.settings.checks import check_settings
    from gpusim_rl.settings.compose import compose

    fixed = [text for text in args.overrides if text.partition("=")[0] in ("num_envs", "device")]
    if fixed:
        raise ConfigError(f"scaling sets {fixed[0].partition('=')[0]} itself: try --num-envs and --devices")
    config = compose(args.overrides)
    check_settings(config)
    task = config["task"]["_target_"].rpartition(".")[2]
    devices = args.devices or available_devices()
    how = ["--warm-up", str(args.warm_up), "--iterations", str(args.iterations), "--seconds", str(args.seconds)]
    points, git, load = [], None, psutil.getloadavg()[0]
    for device in devices:
        for num_envs in args.num_envs or (GPU_COUNTS if device == "cuda" else CPU_COUNTS):
            if not args.json:
                print(f"measuring {task} with {num_envs} envs on {device} …", file=sys.stderr, flush=True)
            result = measure_in_subprocess([*args.overrides, f"num_envs={num_envs}", f"device={device}"], *how)
            points.append(point(device, num_envs, result))
            git = result["git"] if isinstance(result, dict) else git
    advice = recommend(points, task=task, tuned_envs=config["num_envs"])
    rows = [{**dataclasses.asdict(one), "env_steps_per_s_and_env": one.per_env} for one in points]
    keep_result(args, git, load, task, rows, advice.as_dict())
    if not args.json:
        print_table(points)
        print_advice(advice)
        print_load(load)
    return 0 if advice.device else 1


def keep_result(
    args: argparse.Namespace, git: Any, load: float, task: str, points: list[Any], recommendation: dict[str, Any]
) -> None:
    """Writes the measurements to `--out`, and with `--json` prints them."""
    from gpusim_rl.errors import ConfigError
    from gpusim_rl.files.provenance import describe_environment

    result = {
        "command": shlex.join(["python", "tools/doctor.py", *args.argv]),
        "git": git,
        "environment": describe_environment(),
        "load_before": round(load, 2),
        "task": task,
        "points": points,
        "recommendation": recommendation,
    }
    if args.out:
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {args.out}: {error.strerror}") from None
    if args.json:
        print(json.dumps(result, indent=2))


def print_load(load: float) -> None:
    """A doubt, where other programs ran."""
    from gpusim_rl.machine.hardware import available_cpus

    if load > 0.5 * available_cpus():
        print(f"- the machine was not quiet (load {load:.1f} before the first measurement): the numbers may be low")


def measure_parallel(args: argparse.Namespace, counted: list[str]) -> int:
    """Measures every number of processes, or of actors, and says which is useful.

    Args:
        args: The command line.
        counted: Of its overrides, those with the numbers.
    """
    import dataclasses

    import psutil

    from gpusim_rl.diagnose.parallel_scaling import ParallelPoint, efficiency, reasons, useful
    from gpusim_rl.diagnose.short_training import measure_training
    from gpusim_rl.errors import ConfigError
    from gpusim_rl.settings.checks import check_settings
    from gpusim_rl.settings.compose import compose

    if args.num_envs or args.devices:
        raise ConfigError(f"scaling measures {counted[0]} with one number of envs: try num_envs=512 device=cpu")
    if len(counted) > 1:
        raise ConfigError(f"scaling measures one at a time, got {' '.join(counted)}")
    key, _, text = counted[0].partition("=")
    try:
        numbers = counts(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise ConfigError(f"{key} must be positive numbers, as in {key}=1,2,4; got {text!r}") from None
    given = [text for text in args.overrides if text not in counted]
    points, git, load, what = [], None, psutil.getloadavg()[0], COUNTED[key]
    task = ""
    for count in numbers:
        overrides = [*given, "multi_gpu=true" if key == "processes" else f"num_actors={count}"]
        if not task:
            config = compose(overrides)
            check_settings(config)
            task = config["task"]["_target_"].rpartition(".")[2]
        if not args.json:
            print(f"measuring {task} with {key}={count} …", file=sys.stderr, flush=True)
        result = measure_training(
            overrides,
            processes=count if key == "processes" else None,
            warm_up=args.warm_up,
            iterations=args.iterations,
            seconds=args.seconds,
            timeout_s=POINT_TIMEOUT_S,
        )
        if isinstance(result, str):
            points.append(ParallelPoint(count=count, error=result))
        else:
            git = result.pop("git")
            points.append(ParallelPoint(count=count, **result))
    found, why, share = useful(points), reasons(points, what), efficiency(points)
    advice = {key: found.count if found else None, "reasons": why}
    rows = [{**dataclasses.asdict(one), "efficiency": share.get(one.count)} for one in points]
    keep_result(args, git, load, task, rows, advice)
    if not args.json:
        print_parallel_table(points, what, share)
        print()
        if found:
            print(f"useful: {key}={found.count}")
        for reason in why:
            print(f"- {reason}")
        print_load(load)
    return 0 if found else 1


def print_parallel_table(points: Sequence[ParallelPoint], what: str, share: dict[int, float]) -> None:
    """All measurements, with the efficiency of each; columns that no measurement fills are left out."""
    from rich.console import Console
    from rich.table import Table

    def percent(part: float | None) -> str:
        return "" if part is None else f"{100 * part:.0f} %"

    columns = {
        what: [str(one.count) for one in points],
        "env steps/s": ["–" if one.error else f"{one.env_steps_per_s:,.0f}" for one in points],
        "slowest": ["" if one.error else f"{one.slowest:,.0f}" for one in points],
        "fastest": ["" if one.error else f"{one.fastest:,.0f}" for one in points],
        "efficiency": [percent(share.get(one.count)) for one in points],
        "in sums" if what == "processes" else "learner waits": [percent(one.learner_wait) for one in points],
        "actors wait": [percent(one.actor_wait) for one in points],
        "lag": ["" if one.lag is None else f"{one.lag:.1f}" for one in points],
        "CPU": ["" if one.cpu_percent is None else f"{one.cpu_percent:.0f} %" for one in points],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def available_devices() -> list[str]:
    """Devices of this machine."""
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def point(device: str, num_envs: int, result: dict[str, Any] | str) -> Point:
    """A measurement as the recommendation wants it."""
    from gpusim_rl.diagnose.scaling import Point

    if isinstance(result, str):
        return Point(device=device, num_envs=num_envs, error=result)
    return Point(device=device, num_envs=num_envs, **{name: value for name, value in result.items() if name != "git"})


def print_table(points: Sequence[Point]) -> None:
    """All measurements; shares of the time in percent."""
    from rich.console import Console
    from rich.table import Table

    phases = list(dict.fromkeys(phase for one in points for phase in one.phases))
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ["device", "envs", "env steps/s", "slowest", "fastest", "per env", "ms/step", *phases, "memory", "sim"]
    for column in columns:
        table.add_column(column, justify="left" if column in ("device", "sim") else "right", no_wrap=True)
    for one in points:
        if one.error is not None:
            table.add_row(one.device, str(one.num_envs), "–")
            continue
        speeds = [f"{speed:,.0f}" for speed in (one.env_steps_per_s, one.slowest, one.fastest)]
        shares = [f"{100 * one.phases[phase]:.0f} %" if phase in one.phases else "–" for phase in phases]
        memory = "–" if one.memory_gb is None else f"{one.memory_gb:.1f} GB"
        row = [*speeds, f"{one.per_env:,.1f}", f"{one.step_ms:.1f}", *shares, memory, f"{one.sim}, {one.precision}"]
        table.add_row(one.device, str(one.num_envs), *row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for one in points:
        if one.error is not None:
            print(f"{one.num_envs} envs on {one.device}: {one.error}")


def print_advice(advice: Recommendation) -> None:
    """The recommendation, and why."""
    print()
    if advice.device:
        print(f"recommended: device={advice.device} num_envs={advice.num_envs}")
    for reason in advice.reasons:
        print(f"- {reason}")


# Measuring


def measure_in_subprocess(overrides: Sequence[str], *how: str) -> dict[str, Any] | str:
    """Trains a little in a process of its own; its numbers, or one line that tells what went wrong."""
    command = [sys.executable, __file__, "measure", *overrides, *how]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=POINT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {POINT_TIMEOUT_S:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}{': out of memory?' if done.returncode == -9 else ''}"
    if done.returncode != 0:
        return lines[-1].removeprefix("error: ") if lines else f"ended with exit code {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


def print_measurement(args: argparse.Namespace) -> int:
    """What `measure_in_subprocess` reads."""
    print(json.dumps(measure(args.overrides, args.warm_up, args.iterations, args.seconds)))
    return 0


def measure(overrides: Sequence[str], warm_up: int, iterations: int, seconds: float) -> dict[str, Any]:
    """Trains in this process.

    Args:
        overrides: The command line.
        warm_up: Iterations that do not count.
        iterations: That count, at least.
        seconds: That these take, at least.
    """
    import resource
    import statistics

    import torch

    from gpusim_rl.api import scratch_training
    from gpusim_rl.diagnose.run_stats import read_rows, read_run_stats
    from gpusim_rl.run.phases import PHASES

    with scratch_training([*overrides, "log.interval=1"]) as (trainer, log):
        for _ in range(warm_up):
            trainer.iterate(log)
        began, count = time.perf_counter(), 0
        while count < iterations or time.perf_counter() - began < seconds:
            trainer.iterate(log)
            count += 1
        for _ in range(trainer.rl_device.type == "cuda"):  # a row arrives with the iteration after its own
            trainer.iterate(log)
        stats = read_run_stats(log.run_dir.path, warm_up=warm_up)
        rows = read_rows(log.run_dir.metrics_csv)[warm_up:]
        git = log.run_dir.environment["git"]
        precision = trainer.algorithm.metadata().get("precision", "fp32")
        gpu = trainer.rl_device if trainer.rl_device.type == "cuda" else None
        free, total = torch.cuda.mem_get_info(gpu) if gpu else (0, 0)
    speeds = [row["speed/env_steps_per_s"] or 0.0 for row in rows]
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    phases = {phase: getattr(stats, phase) for phase in PHASES}
    return {
        "sim": stats.sim,
        "precision": precision,
        "env_steps_per_s": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "phases": {name: share for name, share in phases.items() if share},
        "step_ms": 1000 * stats.step_s,
        "memory_gb": (total - free) / 1e9 if gpu else rss / 1e9,
        "memory_limit_gb": total / 1e9 if gpu else stats.memory_limit_gb,
        "iterations": len(rows),
        "crowded": stats.crowded,
        "git": git,
    }


if __name__ == "__main__":
    # As for train.py: the checkout that this file is in, whether it is installed or not.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.exit(main())
