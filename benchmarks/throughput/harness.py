"""Measure several cases in interleaved rounds, so that other load does not distort ratios.

Every case is a separate process, with the same OpenMP and malloc settings. Each round measures every case once, in
rotating order; ratios are computed within rounds, medians over rounds.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from gpusim_rl.machine.child import Child
from gpusim_rl.machine.hardware import has_compiler
from throughput.baselines import BASELINES

SCHEMA = 3
"""Version of the json format."""

ANSWER_LIMIT_S = 1800.0
"""Timeout for a response of a process [s]; compilation can take minutes."""

CLOSING_LIMIT_S = 10.0

TRAINING, TRAINING_FASTEST = "+ training", "+ training, fastest"
SEPARATE = ", separate trunks"

Result = dict[str, Any]
"""Results of a case: name, kind, settings, env_steps_per_s, trainer_us, phases, memory, error, ratios.

`trainer_us` is a trainer's time outside `env.step` [us per control step of one env].
"""


@dataclass(frozen=True)
class Case:
    """Case to measure.

    Attributes:
        name: Name in the table.
        spec: Arguments of `throughput.worker`; `kind` is physics, env, policy, training or baseline.
    """

    name: str
    spec: Mapping[str, Any]


@dataclass
class Rounds:
    """Measurement schedule.

    Attributes:
        number: Number of rounds.
        seconds: Minimum duration of each case per round [s]; at least one iteration runs.
        warm_up: Iterations of each case before the first round.
    """

    number: int = 5
    seconds: float = 3.0
    warm_up: int = 6


# Cases


def training_cases(
    overrides: Sequence[str], num_envs: int, *, on_mujoco: bool, baselines: Sequence[str], modes: Sequence[str]
) -> list[Case]:
    """Return the cases: bare physics, our layers on top, and other libraries' trainers on the same environment."""
    line = [*overrides, f"num_envs={num_envs}"]
    base = {"overrides": line, "num_envs": num_envs}
    bare = [Case("bare physics", {**base, "kind": "physics", "persistent": "auto"})]
    ours = [
        Case("env step", {**base, "kind": "env"}),
        Case("+ policy", {**base, "kind": "policy"}),
        Case(TRAINING, {**base, "kind": "training", "mode": "same"}),
    ]
    if baselines and "fastest" in modes and has_compiler():
        compiled = {**base, "overrides": [*line, "compile=learner"], "kind": "training", "mode": "fastest"}
        ours.append(Case(TRAINING_FASTEST, compiled))
    theirs = [
        Case(f"{name}, {mode}", {**base, "kind": "baseline", "baseline": name, "mode": mode})
        for name in baselines
        for mode in modes
    ]
    return [*(_bare_mujoco(base) if on_mujoco else bare), *ours, *theirs]


def _bare_mujoco(base: Mapping[str, Any]) -> list[Case]:
    """Return the bare-physics cases with both values of `persistent`; the faster case is the reference."""
    return [
        Case(f"bare physics, persistent={str(keep).lower()}", {**base, "kind": "physics", "persistent": keep})
        for keep in (False, True)
    ]


def equal_work(case: Case) -> Case:
    """Return our training case with separate trunks, to compare with a baseline that cannot share a trunk."""
    overrides = [*case.spec["overrides"], "ppo.network.separate=true"]
    return Case(f"{case.name}{SEPARATE}", {**case.spec, "overrides": overrides})


# Measuring


class Worker:
    """Parent-side handle to a case's process; unused after an error.

    Attributes:
        speeds: Control steps per second in each round; None for failed rounds.
        seconds_outside: Seconds outside `env.step` per control step of one env in each round, or None.
        phases: Seconds of each phase over all rounds; `other` is the remainder.
        settings: Settings reported by the process.
        memory: Memory peaks by kind [bytes]; None before `report`.
        seconds: Latest time per iteration [s].
        error: Why the process ended; None while it is running.
    """

    def __init__(self, case: Case, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.case = case
        self.speeds: list[float | None] = []
        self.seconds_outside: list[float | None] = []
        self.phases: dict[str, float] = {}
        self.settings: dict[str, Any] = {}
        self.memory: dict[str, int] | None = None
        self.seconds = 0.0
        self.error: str | None = None
        self._child = Child(command, talks=True, env=environment)
        self._say(case.spec)

    @property
    def kind(self) -> str:
        """Kind of the case: `physics`, `training`, `baseline`, ..."""
        return self.case.spec["kind"]

    @property
    def mode(self) -> str:
        """Mode: `same` or `fastest`."""
        return self.case.spec.get("mode", "same")

    @property
    def trunk(self) -> str | None:
        """Trunk of policy and value: `shared` or `separate`; None without a network."""
        return self.settings.get("trunk")

    def get_ready(self) -> None:
        """Wait until the case is built."""
        ready = self._answer()
        if ready is not None:
            self.settings = ready["settings"]

    def run(self, iterations: int) -> dict[str, Any] | None:
        """Run some iterations; return the measurements, or None after an error."""
        done = self._ask({"run": iterations})
        if done is not None:
            self.seconds = done["seconds"] / iterations
        return done

    def measure(self, seconds: float) -> None:
        """Measure one round of about `seconds` [s]."""
        done = self.run(max(1, round(seconds / self.seconds))) if self.error is None else None
        if done is None:
            self.speeds.append(None)
            self.seconds_outside.append(None)
            return
        seconds, env_steps, in_env = done["seconds"], done["env_steps"], done.get("seconds_in_env")
        self.speeds.append(env_steps / seconds)
        self.seconds_outside.append(None if in_env is None else (seconds - in_env) / env_steps)
        phases = done.get("phases") or {}
        if phases:
            # On CUDA, host and device phases can overlap.
            phases = {**phases, "other": max(0.0, seconds - sum(phases.values()))}
        for phase, part in phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + part

    def report(self) -> None:
        """Request peak memory and settings."""
        answer = self._ask({"report": True})
        if answer is not None:
            self.memory = answer["memory"]
            self.settings = answer.get("settings", self.settings)

    def result(self) -> Result:
        """Return the results so far."""
        total = sum(self.phases.values())
        outside = [None if seconds is None else 1e6 * seconds for seconds in self.seconds_outside]
        return {
            "name": self.case.name,
            "kind": self.kind,
            "mode": self.mode,
            "env_steps_per_s": spread(self.speeds),
            "rounds": list(self.speeds),
            "trainer_us": spread(outside),
            "trainer_us_rounds": outside,
            "phases": {phase: part / total for phase, part in self.phases.items()} if total else None,
            "memory_bytes": self.memory,
            "settings": self.settings,
            "error": self.error,
        }

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._child.process.stdin.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            self._child.process.wait(CLOSING_LIMIT_S)
        self._child.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        self._say(request)
        return self._answer()

    def _say(self, request: Mapping[str, Any]) -> None:
        assert self._child.process.stdin is not None
        with suppress(OSError):  # the process has died; `_answer` reports it
            self._child.process.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.process.stdin.flush()

    def _answer(self) -> dict[str, Any] | None:
        if self.error is not None:
            return None
        answers = self._child.process.stdout
        assert answers is not None
        there, _, _ = select.select([answers], [], [], ANSWER_LIMIT_S)
        if not there:
            self._child.kill()
            self.error = f"no answer for {ANSWER_LIMIT_S:.0f} s"
            return None
        line = answers.readline()
        if not line.endswith(b"\n"):
            self.error = self._last_words()
            return None
        answer = json.loads(line)
        self.error = answer.get("error")
        return None if self.error else answer

    def _last_words(self) -> str:
        code, line = self._child.process.wait(), self._child.last_line().strip()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{line} ({how})" if line else f"failed ({how})"


def measure(
    cases: Sequence[Case],
    rounds: Rounds,
    *,
    command: Sequence[str],
    environment: Mapping[str, str],
    say: Callable[[str], None],
) -> Iterator[list[Result]]:
    """Measure in interleaved rounds; yield all results after each round, and at the end with peak memory.

    If a baseline has separate trunks and our training a shared trunk, add a case of our training with separate trunks.

    Args:
        cases: Cases, all loaded at once.
        rounds: Number and duration of rounds.
        command: Command that runs `throughput.worker.serve`.
        environment: Environment variables of the processes.
        say: Called with a line of progress.
    """
    with ExitStack() as stack:
        workers: list[Worker] = []

        def start(case: Case, index: int) -> None:
            worker = Worker(case, command, environment)
            stack.callback(worker.close)
            workers.insert(index, worker)

        def wait() -> None:
            for worker in workers:
                if not worker.settings and worker.error is None:
                    say(f"starting {worker.case.name}")
                    worker.get_ready()

        for case in cases:
            start(case, len(workers))
        wait()
        separate = {worker.mode for worker in workers if worker.kind == "baseline" and worker.trunk == "separate"}
        for worker in workers:
            if worker.kind == "training" and worker.trunk == "shared" and worker.mode in separate:
                start(equal_work(worker.case), workers.index(worker) + 1)
        wait()
        for worker in workers:
            say(f"warming up {worker.case.name}")
            for _ in range(max(1, rounds.warm_up)):
                worker.run(1)
        for number in range(rounds.number):
            say(f"round {number + 1} of {rounds.number}")
            first = number % len(workers)
            for worker in (*workers[first:], *workers[:first]):
                worker.measure(rounds.seconds)
            yield with_ratios([worker.result() for worker in workers])
        for worker in workers:
            worker.report()
        yield with_ratios([worker.result() for worker in workers])


# Results


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return median, min and max, or None without values."""
    known = [value for value in values if value is not None]
    return {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None


def ratio(above: Result | None, below: Result | None, key: str = "rounds") -> dict[str, float] | None:
    """Return median, min and max of `above` / `below` within rounds, or None without a common round."""
    if above is None or below is None:
        return None
    pairs = zip(above[key], below[key], strict=True)
    return spread(a / b if a is not None and b is not None and b > 0 else None for a, b in pairs)


def fastest(results: Sequence[Result], kind: str) -> Result | None:
    """Return the fastest case of a kind by its median, or None."""
    measured = [row for row in results if row["kind"] == kind and row["env_steps_per_s"]]
    return max(measured, key=lambda row: row["env_steps_per_s"]["median"], default=None)


def with_ratios(results: list[Result]) -> list[Result]:
    """Add to every row its ratio to bare physics, and to other libraries' rows the ratio of our speed to theirs.

    A baseline is compared with our training of the same trunks (shared or separate) and mode. If a CUDA graph captures
    `env.step` and the rest, the trainer's time is the difference from the case `env step`, if that is captured too.
    """
    bare, env = fastest(results, "physics"), fastest(results, "env")
    for row in results:
        row["trainer_us_by_difference"] = False
        if env is not None and row["kind"] in ("policy", "training") and _in_graph(row) and _in_graph(env):
            row["trainer_us_by_difference"] = True
            pairs = zip(row["rounds"], env["rounds"], strict=True)
            row["trainer_us_rounds"] = [1e6 / a - 1e6 / b if a and b else None for a, b in pairs]
            row["trainer_us"] = spread(row["trainer_us_rounds"])
    trainings = {(row["settings"].get("trunk"), row["mode"]): row for row in results if row["kind"] == "training"}
    for row in results:
        row["over_physics"] = ratio(row, bare)
        row["ours"] = row["ours_over_this"] = row["trainer_us_over_ours"] = None
        if row["kind"] != "baseline":
            continue
        trunk = row["settings"].get("trunk")
        ours = trainings.get((trunk, row["mode"])) or trainings.get((trunk, "same"))
        if ours is not None:
            row["ours"], row["ours_over_this"] = ours["name"], ratio(ours, row)
            row["trainer_us_over_ours"] = ratio(row, ours, "trainer_us_rounds")
    return results


def _in_graph(row: Result) -> bool:
    """Return whether CUDA graphs capture the control steps."""
    return str(row["settings"].get("graph")).startswith(("whole rollout", "control step"))


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the key numbers of one env count; keys without a measurement are absent."""
    result: dict[str, Any] = {}

    def add(key: str, value: dict[str, float] | None) -> None:
        if value is not None:
            result[key] = value["median"]
            result[f"{key}_range"] = [value["min"], value["max"]]

    bare = fastest(results, "physics")
    if bare is not None:
        result["bare_physics"] = bare["name"]
        result["bare_physics_env_steps_per_s"] = bare["env_steps_per_s"]["median"]
    for key, name in (
        ("env_step", "env step"),
        ("policy", "+ policy"),
        ("training", TRAINING),
        ("fastest_training", TRAINING_FASTEST),
    ):
        row = next((row for row in results if row["name"] == name), None)
        if row is not None and row["env_steps_per_s"]:
            result[f"{key}_env_steps_per_s"] = row["env_steps_per_s"]["median"]
            add(f"{key}_over_physics", ratio(row, bare))
            if key == "training":
                add("trainer_us", row["trainer_us"])
    compared = [row for row in results if row["kind"] == "baseline" and row["ours_over_this"]]
    # The baseline with the smallest gap to ours: trunks differ, so it is not always the fastest.
    nearest = min(compared, key=lambda row: row["ours_over_this"]["median"], default=None)
    if nearest is not None:
        add("training_over_fastest_baseline", nearest["ours_over_this"])
        result["fastest_baseline"] = nearest["name"]
    compared = [row for row in results if row["kind"] == "baseline" and row["trainer_us_over_ours"]]
    leanest = min(compared, key=lambda row: row["trainer_us_over_ours"]["median"], default=None)
    if leanest is not None:
        add("baseline_trainer_us_over_ours", leanest["trainer_us_over_ours"])
        result["leanest_baseline"] = leanest["name"]
    return result


def markdown(report: Mapping[str, Any]) -> str:
    """Format the results as a page with a table per env count."""
    environment = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    git = report["git"]
    commit = f"commit {git['sha'][:10]}{' with local changes' if git['dirty'] else ''}" if git else "no commit"
    lines = [
        f"# {report['task']}: measured speed",
        "",
        f"`{report['command']}`, {environment['time']}, {commit}",
        "",
        f"{_machine(environment)}; {report['sim']}; Python {environment['python']}, {versions}.",
        "",
        "Control steps per second, summed over envs: median and range of the rounds. Every case is a separate process"
        " with the same threads, OpenMP and malloc settings. Rounds are interleaved: each case is measured"
        " once per round, and a ratio is the median of the ratios within rounds. Trainer's own is the time outside"
        " `env.step` (physics and environment, the same for all): policy, storage, update and logging, in us per"
        " control step of an env.",
    ]
    for part in report["env_counts"]:
        lines += ["", f"## {part['num_envs']} envs", "", *table(part["cases"])]
        notes = [f"- {note}" for note in _notes(part["cases"])]
        lines += ["", *notes] if notes else []
    return "\n".join(lines) + "\n"


def _machine(environment: Mapping[str, Any]) -> str:
    cpu, gpu = environment["cpu"], environment["gpu"]
    text = f"{cpu['available']} CPUs of {cpu['model']}, {environment['memory_gb']:g} GB"
    if gpu:
        text += ", " + ", ".join(device["name"] for device in gpu["devices"]) + f" (driver {gpu['driver']})"
    return text


def table(results: Sequence[Result]) -> list[str]:
    """Format a Markdown table, padded for terminals."""
    heading = [
        "case",
        "env steps/s",
        "range",
        "of bare physics",
        "ours over it",
        "trainer's own us/step",
        "peak memory",
        "phases",
    ]
    cells = [heading]
    for row in results:
        speed, over, ours = row["env_steps_per_s"], row["over_physics"], row["ours_over_this"]
        own = row["trainer_us"]
        cells.append(
            [
                row["name"],
                f"{speed['median']:,.0f}" if speed else "–",
                f"{speed['min']:,.0f} to {speed['max']:,.0f}" if speed else "–",
                f"{over['median']:.2f}" if over else "–",
                f"{ours['median']:.2f}" if ours else "",
                f"{own['median']:.2f}" if own else "",
                _memory(row["memory_bytes"]),
                ", ".join(
                    f"{phase} {100 * part:.0f} %"
                    for phase, part in (row["phases"] or {}).items()
                    if phase != "other" or part >= 0.005
                ),
            ]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(heading))]
    right = (1, 3, 4, 5)
    text = [
        [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in cells
    ]
    rule = ["-" * (width - 1) + ":" if i in right else "-" * width for i, width in enumerate(widths)]
    return ["| " + " | ".join(line) + " |" for line in (text[0], rule, *text[1:])]


def _memory(peaks: Mapping[str, int] | None) -> str:
    if peaks is None:
        return "–"
    text = f"{peaks['resident'] / 1e6:,.0f} MB"
    gpu = peaks.get("cuda_driver", peaks.get("cuda_torch"))
    return text if gpu is None else f"{text}, GPU {gpu / 1e6:,.0f} MB"


def _notes(results: Sequence[Result]) -> list[str]:
    notes = []
    baselines = [row for row in results if row["kind"] == "baseline" and str(row["ours"]).endswith(SEPARATE)]
    if baselines:
        names = ", ".join(row["name"] for row in baselines)
        notes.append(f"compared with our training with separate trunks, like theirs: {names}")
    precision = next((row["settings"].get("precision") for row in results if row["name"] == TRAINING), None)
    others = {row["name"]: row["settings"].get("precision", precision) for row in results if row["kind"] == "baseline"}
    if different := [f"{name} ({other})" for name, other in others.items() if other != precision]:
        notes.append(f"our networks run in {precision}; different precision: {', '.join(different)}")
    if any(row["name"].endswith(", same") for row in results):
        notes.append("same: same work as our PPO")
    modes = [f"{name} {library.fastest}" for name, library in BASELINES.items() if f"{name}, fastest" in others]
    if modes:
        notes.append(f"fastest: {'; '.join(modes)}; compared with ours compiled, if measured")
    if any(row["trainer_us_by_difference"] for row in results):
        notes.append("our trainer's own time is the difference from env step: graphs hide its phases")
    return [*notes, *(f"{row['name']}: {row['error']}" for row in results if row["error"])]


def draw(report: Mapping[str, Any], figures: Any) -> Any:
    """Plot speeds over env counts, one line per case; return the matplotlib Figure."""
    figure = figures.Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row["name"] for part in report["env_counts"] for row in part["cases"]))
    for number, name in enumerate(names):
        points = [
            (part["num_envs"], row["env_steps_per_s"])
            for part in report["env_counts"]
            for row in part["cases"]
            if row["name"] == name and row["env_steps_per_s"]
        ]
        if not points:
            continue
        kind = next(row["kind"] for part in report["env_counts"] for row in part["cases"] if row["name"] == name)
        style = "--s" if kind == "baseline" else "-o"
        x = [num_envs for num_envs, _ in points]
        speed = [values["median"] for _, values in points]
        spread = [[v["median"] - v["min"] for _, v in points], [v["max"] - v["median"] for _, v in points]]
        axes.errorbar(x, speed, yerr=spread, fmt=style, capsize=3, markersize=4, label=name, color=f"C{number % 10}")
    counts = [part["num_envs"] for part in report["env_counts"]]
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.set_xlabel("envs")
    axes.set_ylabel("control steps/s")
    axes.set_title(f"{report['task']}, {report['environment']['cpu']['available']} CPUs", fontsize="medium")
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    return figure
