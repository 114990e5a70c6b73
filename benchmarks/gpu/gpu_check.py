"""Run the checks that need a CUDA device, and compare the results with targets.

python benchmarks/gpu/gpu_check.py                       all except more_tests, within nine minutes; writes gpu.json
python benchmarks/gpu/gpu_check.py --quick               smoke test with small sizes
python benchmarks/gpu/gpu_check.py --parts learn,bench   only these
python benchmarks/gpu/gpu_check.py --resume              parts missing from the json
python benchmarks/gpu/gpu_check.py --device cpu          tiny sizes without a GPU; no targets apply

    probe       facts about versions, captures, physics and graph modes (benchmarks/gpu/gpu_probe.py)
    bench       throughput at 4096 envs (benchmarks/bench.py)
    learn       a training run (train.py), timed until its mean return reaches the target
    tests       the decisive tests of tests/gpu
    audit       copies, waits and occupancy in steady state (`gpusim-rl audit`)
    more_tests  the other tests of tests/gpu; only if named in --parts

Each part is a process with a time limit; the json is saved after every part, fact and env count. Exit code 0:
everything ran and met its targets; 1: a part failed or missed a target; 2: bad input, or no CUDA.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from gpu.gpu_targets import PARTS, RETURN, Part, check_targets, describe, read_audit
from gpusim_rl.machine.child import Child
from measuring.checkout import ROOT, process_environment, provenance, require_device, write

SCHEMA = 4
MODULES = ["torch", "numpy", "mujoco", "mujoco_warp", "warp", "hydra", "yaml", "rich", "psutil", "pynvml", "jaxtyping"]

SHARE = {"probe": 0.27, "bench": 0.23, "learn": 0.15, "tests": 0.2, "audit": 0.15, "more_tests": 1.0}
"""Weight of each part when the remaining time is divided."""

ONLY_NAMED = ("more_tests",)
"""Parts that run only if `--parts` names them."""

FACT_SHARE = 0.7
"""Maximum fraction of the probe's remaining time that one fact may take."""

LEAST_S = 5.0
"""Minimum remaining time to start a part [s]."""

ENDING_S = 15.0
"""Grace period after an interrupt [s]."""

OUTCOMES = ("passed", "failed", "skipped", "xfailed")
"""Outcomes of a test."""

TAIL = 15  # output lines to keep of a failed part


@dataclass(frozen=True)
class Plan:
    """Sizes of the parts.

    Attributes:
        num_envs: Number of envs for all parts except tests; the benchmark is judged at this number.
        env_counts: Env counts to benchmark.
        rounds: Number of benchmark rounds.
        seconds: Minimum duration of each case per round [s].
        warm_up: Benchmark iterations before the first round.
        overrides: Settings for all parts.
        max_iterations: Maximum iterations of the training run.
    """

    num_envs: int
    env_counts: tuple[int, ...]
    rounds: int
    seconds: float
    warm_up: int
    overrides: tuple[str, ...] = ()
    max_iterations: int = 5000


FULL = Plan(4096, (4096,), rounds=3, seconds=1.5, warm_up=6)
QUICK = Plan(256, (256,), rounds=2, seconds=0.3, warm_up=4, max_iterations=50)
TINY = Plan(
    8,
    (8,),
    rounds=1,
    seconds=0.01,
    warm_up=1,
    overrides=("ppo.horizon=4", "ppo.minibatch_size=32", "ppo.network.hidden=[16,16]", "ppo.precision=fp32"),
    max_iterations=3,
)


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print the results and return the exit code."""
    from gpusim_rl.errors import friendly_errors

    arguments = sys.argv[1:] if argv is None else argv
    began = time.monotonic()
    with friendly_errors():
        args = parse(arguments)
        check_input(args)
        report = check(args, shlex.join(["python", "benchmarks/gpu/gpu_check.py", *arguments]), began)
    return 0 if report["ok"] else 1


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="for all parts except tests, as for train.py")
    add("--parts", help=f"among {', '.join(PARTS)} (default: all except {', '.join(ONLY_NAMED)})")
    add("--device", default="cuda", help="cuda, cuda:<index>; cpu runs tiny sizes (default: cuda)")
    add("--quick", action="store_true", help="small sizes; skip size-dependent targets")
    add(
        "--baselines",
        nargs="?",
        const="all",
        default="none",
        metavar="NAMES",
        help="also benchmark other libraries in their fastest mode",
    )
    add("--env-counts", metavar="N,N", help="env counts to benchmark (default: 4096)")
    add("--return", dest="wanted", type=float, default=RETURN, help=f"target return (default: {RETURN:g})")
    add(
        "--resume",
        action="store_true",
        help="keep earlier results; run parts that are missing, failed or in --parts",
    )
    add("--budget-s", type=float, default=520.0, help="total time budget [s] (default: 520)")
    add("--out", type=Path, default=Path("benchmarks") / "gpu" / "gpu.json", help="default: benchmarks/gpu/gpu.json")
    return parser.parse_intermixed_args(argv)


def check_input(args: argparse.Namespace) -> None:
    """Raise ConfigError for an invalid option or a missing device."""
    from gpusim_rl.errors import ConfigError, did_you_mean

    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:  # report once, not in every part
        raise ConfigError(f"cannot import {', '.join(missing)}. Try `pip install -e .`, or add them to PYTHONPATH")
    args.parts = None if args.parts is None else [name for name in args.parts.split(",") if name]
    for name in args.parts or ():
        if name not in PARTS:
            raise ConfigError(f"unknown part {name!r}.{did_you_mean(name, PARTS)} Available: {', '.join(PARTS)}")
    if args.budget_s <= 0:
        raise ConfigError(f"--budget-s must be positive, got {args.budget_s:g}")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        raise ConfigError(f"--device must be cuda, cuda:<index> or cpu, got {args.device}")
    for text in args.overrides:
        if text.partition("=")[0] in ("task", "num_envs", "device") or "=" not in text:
            raise ConfigError(f"{text}: expected key=value, not task, num_envs or device; try --env-counts or --device")
    plan = TINY if args.device == "cpu" else QUICK if args.quick else FULL
    args.plan = plan
    if args.env_counts is not None:
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", args.env_counts):
            raise ConfigError(f"--env-counts must be positive ints, got {args.env_counts}; try 256,4096")
        counts = dict.fromkeys(int(text) for text in args.env_counts.split(","))
        args.plan = Plan(**{**vars(plan), "env_counts": tuple(counts)})
    require_device(args.device)


def check(args: argparse.Namespace, command: str, began: float) -> dict[str, Any]:
    """Run the parts one at a time, saving the report after each; return the report.

    Args:
        args: From `parse` and `check_input`.
        command: The command line.
        began: Start on `time.monotonic` [s].
    """
    on_cuda = args.device != "cpu"
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "command": command,
        **provenance(args.out.parent),
        "device": args.device,
        "quick": args.quick,
        "overrides": args.overrides,
        "wanted": args.wanted,
        "budget_s": args.budget_s,
        "env_counts": list(args.plan.env_counts),
        "parts": {},
    }
    if args.resume and args.out.is_file():
        report |= known(args.out, report)
    parts: dict[str, Part] = report["parts"]
    todo = [name for name in PARTS if name in (args.parts or ())]
    if args.parts is None:
        todo = [name for name in PARTS if name not in ONLY_NAMED and not complete(parts.get(name, {}))]

    def left() -> float:
        return began + args.budget_s - time.monotonic()

    def save() -> None:
        results = check_targets(
            parts,
            num_envs=args.plan.num_envs,
            env_counts=report["env_counts"],
            on_cuda=on_cuda,
            full=not args.quick and on_cuda,
            wanted=args.wanted,
            asked=[name for name in PARTS if name in todo or name in parts],
        )
        ran = set(parts) >= set(todo) and all(part["status"] == "ok" for part in parts.values())
        missed = [each for each in results if each["ok"] is False and not each["aim"]]
        report.update(seconds=time.monotonic() - began, results=results, ok=ran and not missed)
        write(args.out, json.dumps(report, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(todo):
            old, started = parts.pop(name, {}), time.monotonic()

            def keep(part: Part, name: str = name, started: float = started) -> None:
                parts[name] = part | {"seconds": time.monotonic() - started}
                save()

            limit = left() * SHARE[name] / sum(SHARE[other] for other in todo[number:])
            if limit < LEAST_S:
                status = old | {"status": "skipped", "error": f"the budget of {args.budget_s:g} s is used up"}
            else:
                say(f"{name}: at most {limit:.0f} s")
                try:
                    status = RUN[name](Job(args, Path(folder), limit, old, keep))
                except (OSError, ValueError, KeyError, TypeError) as error:  # malformed output of the part
                    status = parts.get(name, {}) | {"status": "failed", "error": f"{type(error).__name__}: {error}"}
            say(f"{name}: {summary(status)}")
            keep(status)
    if not todo:
        save()
    for line in describe(report):
        print(line)
    print(args.out)
    return report


def known(file: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an earlier report, and its env counts together with the requested env counts.

    Raises:
        ConfigError: The file is not a report, or differs in commit, device or settings.
    """
    from gpusim_rl.errors import ConfigError

    try:
        old = json.loads(file.read_text())
        for name in ("schema", "git", "device", "quick", "overrides", "wanted"):
            if old[name] != report[name]:
                raise ConfigError(
                    f"--resume: {file} has {name}={old[name]}, but now {name}={report[name]}; try another --out"
                )
        if gpus(old) != gpus(report):
            raise ConfigError(f"--resume: {file} was measured on {gpus(old)}, not {gpus(report)}; try another --out")
        parts = dict(old["parts"])
        counts = dict.fromkeys([*old["env_counts"], *report["env_counts"]])
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--resume: {file} is not from benchmarks/gpu/gpu_check.py ({error}); try another --out"
        ) from None
    return {"parts": parts, "env_counts": list(counts)}


def gpus(report: Mapping[str, Any]) -> str:
    """Return the names of the GPUs in a report."""
    return ", ".join(device["name"] for device in (report["environment"]["gpu"] or {}).get("devices", [])) or "no GPU"


def complete(part: Part) -> bool:
    """Return whether a part succeeded and skipped nothing."""
    return part.get("status") == "ok" and not part.get("skipped")


def summary(part: Part) -> str:
    """Summarise the outcome of a part in one line."""
    counts = ", ".join(f"{part[kind]} {kind}" for kind in OUTCOMES if kind in part) if "passed" in part else ""
    return ", ".join(text for text in (part["status"], counts, part.get("error")) if text)


# Processes


@dataclass(frozen=True)
class Ended:
    """Result of a finished process.

    Attributes:
        code: Exit code; negative after a signal.
        seconds: Duration [s].
        timed_out: Whether the process was stopped at its time limit.
        output: Combined stdout and stderr.
    """

    code: int
    seconds: float
    timed_out: bool
    output: str

    def status(self, good: Sequence[int] = (0,)) -> Part:
        """Return the status of the part that this process ran, with the last lines of output on failure."""
        lines = [line for line in self.output.splitlines() if line.strip()][-TAIL:]
        if self.timed_out:
            return {"status": "timed out", "error": f"still running after {self.seconds:.0f} s", "tail": lines}
        if self.code in good:
            return {"status": "ok", "error": None}
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return {"status": "failed", "error": f"{lines[-1]} ({how})" if lines else how, "tail": lines}


def run_process(
    command: Sequence[str | Path], limit_s: float, enough: Callable[[], bool] = lambda: False, poll_s: float = 0.05
) -> Ended:
    """Run a command until it exits, exceeds `limit_s` [s], or `enough()` (polled every `poll_s` [s]) returns True."""
    environment = process_environment(PYTHONUNBUFFERED="1", NO_COLOR="1", COLUMNS="200")
    with Child([str(part) for part in command], env=environment) as child:
        timed_out = done = False
        try:
            while child.running and not timed_out and not done:
                done = enough()
                timed_out = not done and child.silent_s > limit_s
                time.sleep(poll_s)
        finally:
            child.stop(ENDING_S, signal.SIGINT)  # an interrupt, so that it can stop its own processes
        return Ended(0 if done else child.process.returncode, child.silent_s, timed_out, child.output())


def tool(name: str) -> list[str | Path]:
    """Return the command line of a script in the checkout."""
    return [sys.executable, ROOT / {"train": "", "audit": "tools", "bench": "benchmarks"}[name] / f"{name}.py"]


@dataclass(frozen=True)
class Job:
    """Input of a part.

    Attributes:
        args: From `parse` and `check_input`.
        folder: Temporary folder, removed after all parts have run.
        limit_s: Time limit [s].
        old: Results of an earlier run.
        keep: Called with intermediate results.
    """

    args: argparse.Namespace
    folder: Path
    limit_s: float
    old: Part
    keep: Callable[[Part], None]

    def settings(self) -> list[str]:
        """Return the overrides from the plan and the user."""
        return [*self.args.plan.overrides, *self.args.overrides]

    def run_words(self) -> list[str]:
        """Return task, device and settings for audit, training and benchmark."""
        return ["task=Ant", f"device={self.args.device}", *self.settings()]


# Parts


def run_probe(job: Job) -> Part:
    """Collect facts one at a time; after a crash, continue in a new process."""
    file, args, began = job.folder / "probe.json", job.args, time.monotonic()
    command = [sys.executable, ROOT / "benchmarks" / "gpu" / "gpu_probe.py", file, "--device", args.device]
    command += ["--num-envs", str(args.plan.num_envs), *job.settings()]
    facts = {name: fact for name, fact in job.old.get("facts", {}).items() if "error" not in fact}
    write(file, json.dumps({"facts": facts, "running": None, "missing": []}))
    told = set(facts)
    began_at: dict[str, float] = {}  # start of each fact [s]

    def read() -> Part:
        return json.loads(file.read_text())

    def hangs() -> bool:
        """Report new facts; return whether the current fact has exceeded its time limit."""
        found, now = read(), time.monotonic()
        new = {name: fact for name, fact in found["facts"].items() if name not in told}
        for name, fact in new.items():
            say(f"probe: {name}: {json.dumps(fact)}")
            told.add(name)
        if new:
            job.keep({"status": "running", "error": None, "facts": found["facts"], "missing": found["missing"]})
        if found["running"] is None:
            return False
        since = began_at.setdefault(found["running"], now)
        return now - since > FACT_SHARE * (job.limit_s - (since - began))

    while True:
        before = read()
        ended = run_process(command, job.limit_s - (time.monotonic() - began), hangs)
        after = read()
        running = after["running"]
        if running is not None:  # the process ended in the middle of a fact
            hung = f"still running after {time.monotonic() - began_at.get(running, began):.0f} s"
            after["facts"][running] = {"error": ended.status()["error"] or hung}
            after["missing"].remove(running)
            after["running"] = None
            write(file, json.dumps(after))
        if ended.timed_out or not after["missing"] or after == before:
            break
    failed = [f"{name}: {fact['error']}" for name, fact in after["facts"].items() if "error" in fact]
    status = ended.status(good=(0, 1) if after != before else (0,))
    if status["status"] == "ok" and failed:
        status = {"status": "failed", "error": "; ".join(failed)}
    return status | {"facts": after["facts"], "missing": after["missing"]}


def run_audit(job: Job) -> Part:
    """Measure copies, waits and occupancy of a steady-state iteration."""
    file = job.folder / "audit.json"
    command = [*tool("audit"), *job.run_words(), f"num_envs={job.args.plan.num_envs}", "--out", file]
    ended = run_process(command, job.limit_s)
    # 1: the audit has findings, which the results report; without the file, it crashed
    status = ended.status(good=(0, 1) if file.is_file() else ())
    return status if status["status"] != "ok" else status | read_audit(json.loads(file.read_text()))


def run_learning(job: Job) -> Part:
    """Train as a user would, until the return reaches the target."""
    runs, plan, wanted = job.folder / "runs", job.args.plan, job.args.wanted
    settings = [f"num_envs={plan.num_envs}", f"max_iterations={plan.max_iterations}", f"log.dir={runs}"]
    began, seen = time.monotonic(), [0.0, 0.0]

    def reached() -> bool:
        rows = run_rows(runs)
        if len(rows) > seen[0]:
            seen[:] = len(rows), time.monotonic() - began
        return first_at(rows, wanted) is not None

    ended = run_process([*tool("train"), *job.run_words(), *settings, "log.console=plain"], job.limit_s, reached)
    status = ended.status()
    rows = run_rows(runs)
    if status["status"] == "timed out" and rows:  # the rows suffice; the result reports a missed target
        status = {"status": "ok", "error": None}
    found = first_at(rows, wanted)
    return status | {
        "num_envs": plan.num_envs,
        "wanted": wanted,
        "seconds_from_start_of_process": seen[1] if found else None,
        "seconds_from_first_iteration": found["time/elapsed_s"] if found else None,
        "env_steps": found["env_steps"] if found else None,
        "iterations": len(rows),
        "best_return": max((value for row in rows if (value := row.get("episode/return")) is not None), default=None),
        "curve": [
            {"seconds": row["time/elapsed_s"], "env_steps": row["env_steps"], "return": row.get("episode/return")}
            for row in rows[:: max(1, len(rows) // 200)]
        ],
    }


def run_rows(runs: Path) -> list[dict[str, Any]]:
    """Read the metrics rows of the only run in a folder."""
    from learn.learning import read_rows

    return [row for file in runs.glob("Ant/2*/metrics.csv") for row in read_rows(file)]


def first_at(rows: Sequence[Mapping[str, Any]], wanted: float) -> Mapping[str, Any] | None:
    """Return the first row that reaches the target return."""
    return next((row for row in rows if (value := row.get("episode/return")) is not None and value >= wanted), None)


def run_tests(job: Job, chosen: str = "decisive") -> Part:
    """Run GPU tests selected by pytest marks; a rerun skips tests that have passed."""
    # Skip our options and conftest.py: these tests need only pytest; the others already check annotations.
    options = ["-v", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-o", "addopts=", "--noconftest"]
    again = job.old.get("status") != "ok" or job.old.get("failed")
    known = {name: outcome for name, outcome in job.old.get("outcomes", {}).items() if again and outcome != "failed"}
    options += ["--rootdir", ROOT, *(f"--deselect={name}" for name in known), "-m", f"{chosen} and not slow"]
    command = [sys.executable, "-m", "pytest", ROOT / "tests" / "gpu", *options]
    ended = run_process(command, job.limit_s)
    outcomes = known | read_tests(ended.output)
    names = {kind: [name for name, outcome in outcomes.items() if outcome == kind] for kind in OUTCOMES}
    counts = {kind: len(of_kind) for kind, of_kind in names.items()}
    status = ended.status(good=(0, 1, 5) if outcomes else (0,))  # 5: no tests left
    about = {**counts, "failures": names["failed"], "outcomes": outcomes}
    return status | about | ({"tail": ended.output.splitlines()[-80:]} if names["failed"] else {})


def read_tests(output: str) -> dict[str, str]:
    """Parse the outcome of each test from the output of `pytest -v`, which may be truncated."""
    found: dict[str, str] = {}
    for name, outcome in re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", output, re.MULTILINE):
        words: dict[str, str] = {"ERROR": "failed", "XFAIL": "xfailed"}
        found[name] = words.get(str(outcome), str(outcome).lower())  # a teardown error follows the test's outcome
    return found


def run_bench(job: Job) -> Part:
    """Benchmark one env count at a time, starting with the judged one, while time remains.

    Env counts with earlier results are measured again only if named in `--env-counts` or failed.
    """
    args, plan, old, began = job.args, job.args.plan, job.old, time.monotonic()
    measured: dict[int, Part] = {each["num_envs"]: each for each in old.get("env_counts", [])}
    errors: dict[int, list[str]] = {each["num_envs"]: each["errors"] for each in old.get("errors", [])}
    again = plan.env_counts if args.env_counts is not None else errors.keys()
    counts = [count for count in plan.env_counts if count in again or count not in measured]
    counts.sort(key=lambda count: (count != plan.num_envs, count))
    rounds = ["--rounds", str(plan.rounds), "--seconds", str(plan.seconds), "--warm-up", str(plan.warm_up)]
    skipped: list[int] = []
    last_s = 0.0

    def part(status: str) -> Part:
        texts = [f"{count}: {text}" for count, of_count in sorted(errors.items()) for text in of_count]
        return {
            "status": status,
            "error": "; ".join(texts) or None,
            "env_counts": [measured[count] for count in sorted(measured)],
            "errors": [{"num_envs": count, "errors": of_count} for count, of_count in sorted(errors.items())],
            "skipped": sorted(skipped),
        }

    for count in counts:
        left = job.limit_s - (time.monotonic() - began)
        if left < max(LEAST_S, last_s):
            skipped.append(count)
            continue
        say(f"bench: {count} envs")
        out = job.folder / f"bench-{count}"
        command = [
            *tool("bench"),
            *job.run_words(),
            f"num_envs={count}",
            "--baselines",
            args.baselines,
            "--modes",
            "fastest",
            *rounds,
            "--out",
            out,
        ]
        ended = run_process([*command, "--no-plot"], left)
        last_s, status, found = ended.seconds, ended.status(), []
        if (out / "bench.json").is_file():  # written after the first round
            [of_count] = json.loads((out / "bench.json").read_text())["env_counts"]
            measured[count] = of_count
            found = [f"{row['name']}: {row['error']}" for row in of_count["cases"] if row["error"]]
        if status["status"] != "ok":
            found.append(status["error"])
        errors.pop(count, None)
        if found:
            errors[count] = found
        job.keep(part("running"))
    if skipped:
        say(f"bench: ran out of time for {', '.join(map(str, sorted(skipped)))} envs; try --resume, or --budget-s")
    return part("failed" if errors else "ok")


RUN: dict[str, Callable[[Job], Part]] = {
    "probe": run_probe,
    "bench": run_bench,
    "learn": run_learning,
    "tests": run_tests,
    "audit": run_audit,
    "more_tests": lambda job: run_tests(job, "not decisive"),
}


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the parts run in their own sessions and would continue
    # Like train.py, import the checkout of this file, installed or not; keep the script's own folder.
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
