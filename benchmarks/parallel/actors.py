"""Measure actors: throughput over the number of actors, losses after a kill, and rollout transfer time.

    python benchmarks/parallel/actors.py [scaling spin faults copies] --rounds 3
    python benchmarks/parallel/actors.py report

Updates the measured sections of scale.json, and writes scale.md and scale.png; `report` only writes the latter two.

- scaling: whole training runs (`train.py`, IMPALA, two layers of 64) on envs that only sleep, one env per actor.
- spin: the same with envs that compute. Actors beyond the number of cores cannot help.
- faults: SIGKILL of an actor, and of the learner, during training.
- copies: transfer time of a rollout [ms]: request, send, receive and copy.

Rounds are interleaved; speeds are medians over rounds. Each training run is a process that prints metrics rows.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/

from gpusim_rl.machine.child import Child
from measuring.checkout import ROOT, process_environment, write

HORIZON, WARM_UP_S = 32, 2.0
SECTIONS = ("scaling", "spin", "faults", "copies")
OURS = {
    "process": ["actors=process"],
    "ray": ["actors=ray"],
    "learner acts": ["actors=process", "actors.inference=learner"],
}
COPIED = {"horizon": HORIZON, "num_envs": 64, "obs": 500}
LAST = Path("checkpoints") / "last.pt"
GONE_S = 5.0
"""Maximum time for the processes of a killed learner to exit [s]."""
PATIENCE_S = 120.0
"""Maximum time for actors to start [s]."""

Row = dict[str, Any]


# Training runs


def training(kind: str, actors: int, env: Mapping[str, Any], folder: Path, *more: str, num_envs: int = 1) -> list[str]:
    """Return the command line of a training run, without `python`."""
    kwargs = [f"+env.kwargs.{name}={value}" for name, value in env.items()]
    return [
        *("train.py", "task=Gymnasium", "env._target_=actor_envs.make", *kwargs, "env.max_episode_steps=1000"),
        *("algo=impala", f"impala.horizon={HORIZON}", "impala.network.hidden=[64,64]"),
        *(*OURS[kind], f"num_actors={actors}", f"num_envs={num_envs}"),
        *("max_iterations=1000000", "log.console=json", f"log.dir={folder}", *more),
    ]


@contextlib.contextmanager
def running(words: Sequence[str]) -> Iterator[Child]:
    """Start a training run that prints JSON events, one per line; yield its process."""
    command = [sys.executable, *[str(ROOT / word) if word == "train.py" else word for word in words]]
    environment = process_environment(OMP_NUM_THREADS="1", WANDB_MODE="offline")
    environment["PYTHONPATH"] += f":{ROOT / 'benchmarks' / 'parallel'}"
    with Child(command, talks=True, env=environment) as child:
        try:
            yield child
        except StopIteration:  # no more rows
            sys.exit(f"{shlex.join(words)} exited with code {child.process.wait()}:\n{child.output()}")


def rows_of(child: Child) -> Iterator[Row]:
    """Yield the metrics rows that a training run prints, each with its arrival time `at` [s]."""
    assert child.process.stdout is not None
    for line in child.process.stdout:
        if line.startswith(b"{") and (event := json.loads(line))["event"] == "row":
            yield event | {"at": time.monotonic()}


def take(rows: Iterator[Row], seconds: float, alive: int | None = None) -> list[Row]:
    """Return the rows of the next `seconds`; with `alive`, all rows until exactly that many actors are running."""
    taken, until = list[Row](), time.monotonic() + (seconds if alive is None else PATIENCE_S)
    while time.monotonic() < until:
        taken.append(next(rows))
        if taken[-1]["actors/alive"] == alive:
            return taken
    if alive is not None:
        sys.exit(f"{taken[-1]['actors/alive']:.0f} actors are running after {PATIENCE_S:.0f} s, expected {alive}")
    return taken


def train(kind: str, actors: int, env: Mapping[str, Any], seconds: float) -> Row:
    """Return throughput, policy lag and time shares of a training run, measured while all actors are running."""
    with tempfile.TemporaryDirectory() as folder, running(training(kind, actors, env, Path(folder))) as child:
        rows = rows_of(child)
        take(rows, 0.0, alive=actors)
        first = take(rows, WARM_UP_S)[-1]
        taken = take(rows, seconds)
        child.stop()
    passed = taken[-1]["time/elapsed_s"] - first["time/elapsed_s"]
    mean = {name: statistics.fmean(row[name] for row in taken) for name in ("policy/lag_mean", "actors/wait")}
    update = sum(row["time/update"] * row["time/iteration_s"] for row in taken) / passed
    steps_per_s = (taken[-1]["env_steps"] - first["env_steps"]) / passed
    return {"steps_per_s": steps_per_s, "lag": mean["policy/lag_mean"], "wait": mean["actors/wait"], "update": update}


def scaling(
    kinds: Sequence[str], counts: Sequence[int], env: Mapping[str, Any], *, rounds: int, seconds: float
) -> Iterator[list[Row]]:
    """Yield the table rows of all cases after each round."""
    found: dict[tuple[str, int], list[Row]] = {(kind, count): [] for kind in kinds for count in counts}
    for _ in range(rounds):
        for (kind, count), measured in found.items():
            measured.append(train(kind, count, env, seconds))
            print(kind, count, {name: round(value, 3) for name, value in measured[-1].items()}, flush=True)
        yield [_summary(kind, count, found) for kind, count in found]


def _summary(kind: str, count: int, found: Mapping[tuple[str, int], list[Row]]) -> Row:
    """Return a case's table row; `efficiency` is the median of the ratios within rounds."""
    here = found[kind, count]
    least = min(other for of, other in found if of == kind)
    first = [row["steps_per_s"] / least for row in found[kind, least]]
    ratios = [row["steps_per_s"] / count / one for row, one in zip(here, first, strict=True)]
    medians = {name: round(statistics.median(row[name] for row in here), 3) for name in here[0]}
    medians["steps_per_s"] = round(medians["steps_per_s"])
    runs = [round(row["steps_per_s"]) for row in here]
    return {"kind": kind, "actors": count, **medians, "efficiency": round(statistics.median(ratios), 3), "runs": runs}


# Faults


def descendants(pid: int) -> list[Any]:
    """Return all descendant processes of a process."""
    import psutil

    return psutil.Process(pid).children(recursive=True)


def actors_of(pid: int) -> list[Any]:
    """Return the actor processes of a learner process, for either engine."""

    def is_actor(words: list[str]) -> bool:
        return any("process_engine import main" in word or word.startswith("ray::RemoteActor") for word in words)

    return [process for process in descendants(pid) if is_actor(process.cmdline())]


def kill_actor(kind: str, actors: int, env: Mapping[str, Any], seconds: float) -> Row:
    """Kill an actor; return the times until its loss is noticed and it is back, and the longest update gaps [s]."""
    with tempfile.TemporaryDirectory() as folder, running(training(kind, actors, env, Path(folder))) as child:
        rows = rows_of(child)
        take(rows, 0.0, alive=actors)
        take(rows, WARM_UP_S)
        before = take(rows, seconds)
        killed = time.monotonic()
        actors_of(child.process.pid)[0].kill()
        lost = take(rows, 0.0, alive=actors - 1)
        during = take(rows, 0.0, alive=actors)
        after = take(rows, seconds)
        below = descendants(child.process.pid)
        child.stop()
        numbers = _check_run(Path(folder))
        gone = _gone(below)
    iterations = [row["iteration"] for row in [*before, *lost, *during, *after]]
    assert iterations == list(range(iterations[0], iterations[0] + len(iterations)))
    return {
        "killed": "actor",
        "kind": kind,
        "actors": actors,
        "noticed_s": round(lost[-1]["at"] - killed, 3),
        "back_s": round(during[-1]["at"] - killed, 3),
        "gap_before_s": round(_gap(before), 3),
        "gap_s": round(_gap([before[-1], *lost, *during, *after]), 3),
        "restarts": after[-1]["actors/restarts"],
        "lost_rollouts": after[-1]["actors/lost_rollouts"],
        "exit": child.process.returncode,
        "left_processes": gone,
        **numbers,
    }


def _gap(rows: Sequence[Row]) -> float:
    """Return the longest time between consecutive updates [s]."""
    return max(b["time/elapsed_s"] - a["time/elapsed_s"] for a, b in pairwise(rows))


def run_of(folder: Path) -> Path:
    """Return the only run in a folder."""
    [run] = {path.resolve() for path in (folder / "Gymnasium").iterdir() if path.is_dir()}
    return run


def _check_run(folder: Path) -> Row:
    """Return whether the metrics have each iteration once, and the last checkpoint is from the last iteration."""
    import csv

    import torch

    run = run_of(folder)
    with (run / "metrics.csv").open() as file:
        found = [int(row["iteration"]) for row in csv.DictReader(file)]
    state = torch.load(run / LAST, weights_only=True)
    whole = found == list(range(1, len(found) + 1)) and state["iteration"] == len(found)
    return {"run_folder_whole": whole}


def _gone(processes: Sequence[Any]) -> int:
    """Kill the processes that are still alive after GONE_S; return their number."""
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    for process in alive:
        process.kill()
    return len(alive)


def kill_learner(kind: str, actors: int, env: Mapping[str, Any], seconds: float) -> Row:
    """Kill the learner and resume with the same command plus checkpoint=; return lost iterations and restart times."""
    with tempfile.TemporaryDirectory() as folder:
        words = training(kind, actors, env, Path(folder))
        with running(words) as child:
            rows = rows_of(child)
            take(rows, 0.0, alive=actors)
            while not (run_of(Path(folder)) / LAST).exists():
                take(rows, 0.5)
            last = take(rows, seconds)[-1]
            below = descendants(child.process.pid)
            child.process.kill()
            last = [last, *rows][-1]  # including rows printed before the kill
            left = _gone(below)
        began = time.monotonic()
        with running([*words, f"checkpoint={run_of(Path(folder))}", "trust=true"]) as child:
            rows = rows_of(child)
            first = next(rows)
            all_back = take(rows, 0.0, alive=actors)[-1]
            take(rows, 1.0)
            child.stop()
        numbers = _check_run(Path(folder))
    return {
        "killed": "learner",
        "kind": kind,
        "actors": actors,
        "trained_s": round(last["time/elapsed_s"], 1),
        "lost_iterations": last["iteration"] + 1 - first["iteration"],
        "of_iterations": last["iteration"],
        "first_update_s": round(first["at"] - began, 2),
        "all_actors_s": round(all_back["at"] - began, 2),
        "left_processes": left,
        **numbers,
    }


# Rollout transfer


def copies(kind: str, rollouts: int) -> list[float]:
    """Return each rollout's transfer time [ms], with one rollout in flight."""
    import torch

    from gpusim_rl.distributed.actor import Actor, ActorJob, EnvDescription, SentRollout
    from gpusim_rl.distributed.engine import Engine
    from gpusim_rl.settings.compose import compose

    words = training(kind, 1, {"obs": COPIED["obs"]}, Path("runs"), num_envs=COPIED["num_envs"])
    job = ActorJob(compose(words[1:]), 0, 1, 0)
    engine: Engine
    if kind == "ray":
        from gpusim_rl.distributed.ray_engine import RayEngine

        engine = RayEngine([job], address=None)
    else:
        from gpusim_rl.distributed.process_engine import ProcessEngine

        engine = ProcessEngine([job], pin=False)

    def answer(wanted: type) -> Any:
        while True:
            for found in engine.get(1.0):
                if isinstance(found, wanted):
                    return found

    here = Actor(job)
    taken, room = list[float](), [torch.empty(shape, dtype=dtype) for shape, dtype in here.describe().recording]
    try:
        engine.start()
        answer(EnvDescription)
        engine.publish(0, here.acting_state())
        for _ in range(rollouts):
            asked = time.perf_counter()
            engine.ask_for_rollout(0)
            found = answer(SentRollout)
            for own, sent in zip(room, found.tensors, strict=True):
                own.copy_(sent)
            taken.append(1e3 * (time.perf_counter() - asked - found.worked_s))
            engine.release(found)
    finally:
        engine.close()
        here.collector.close()
    return taken[rollouts // 4 :]


def copies_rows(kinds: Sequence[str], *, rounds: int, rollouts: int = 40) -> Iterator[list[Row]]:
    """Yield the rows of both engines after each round, each measured in a separate process."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, medians in found.items():
            command = [sys.executable, __file__, "copy", kind, str(rollouts)]
            environment = process_environment(OMP_NUM_THREADS="1")
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if done.returncode:
                sys.exit(f"{shlex.join(command)}:\n{done.stderr}")
            medians.append(statistics.median(json.loads(done.stdout.splitlines()[-1])))
            print(kind, f"{medians[-1]:.2f} ms", flush=True)
        megabytes = round(4e-6 * COPIED["horizon"] * COPIED["num_envs"] * COPIED["obs"], 1)
        yield [
            {
                "kind": kind,
                "obs_mb": megabytes,
                "ms": round(statistics.median(ms), 2),
                "runs": [round(x, 2) for x in ms],
            }
            for kind, ms in found.items()
        ]


# The report


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> list[str]:
    """Format a Markdown table; `columns` maps keys to titles."""
    lines = [f"| {' | '.join(columns.values())} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(_text(row.get(key)) for key in columns)} |" for row in rows]


def _text(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, (int, float)) and value > 1000 else str(value)


def markdown(data: Mapping[str, Any]) -> str:
    """Format scale.json as Markdown."""
    speed = {"kind": "", "actors": "actors", "steps_per_s": "steps/s", "efficiency": "of linear"}
    speed |= {"lag": "mean lag [updates]", "wait": "actors wait", "update": "learner updates"}
    actor = {"kind": "", "gap_before_s": "longest gap between updates before [s]", "gap_s": "around the kill [s]"}
    actor |= {"noticed_s": "noticed after [s]", "back_s": "actor is back after [s]", "lost_rollouts": "rollouts lost"}
    actor |= {"restarts": "restarts", "left_processes": "processes left", "run_folder_whole": "run folder whole"}
    learner = {"kind": "", "trained_s": "killed after [s]", "lost_iterations": "updates lost", "of_iterations": "of"}
    learner |= {"first_update_s": "next update after [s]", "all_actors_s": "all actors after [s]"}
    learner |= {"left_processes": "processes left after 5 s", "run_folder_whole": "run folder whole"}
    way = {"kind": "", "obs_mb": "observations [MB]", "ms": "ms"}
    parts: list[tuple[str, str, dict[str, str], str | None]] = [
        ("scaling", "Actors: envs that sleep", speed, None),
        ("spin", "Actors: envs that compute", speed, None),
        ("faults", "SIGKILL of an actor", actor, "actor"),
        ("faults", "SIGKILL of the learner", learner, "learner"),
        ("copies", "Rollout transfer", way, None),
    ]
    lines = ["# Scaling", "", "Written by `python benchmarks/parallel/actors.py report` from scale.json."]
    if "rows" in data:
        data_parallel = {"processes": "processes", "steps_per_s": "steps/s", "efficiency": "of linear"}
        lines += ["", "## Data parallelism", "", *table(data["rows"], data_parallel)]
    for name, title, columns, killed in parts:
        if name in data:
            section = data[name]
            rows = [row for row in section["rows"] if row.get("killed") == killed]
            about = f"{section['what']} `{section['command']}`, {_origin(section)}."
            lines += ["", f"## {title}", "", about, "", *table(rows, columns)]
    return "\n".join(lines) + "\n"


def _origin(section: Mapping[str, Any]) -> str:
    git, environment = section["git"], section["environment"]
    commit = f"commit {git['sha'][:10]}{' with local changes' if git['dirty'] else ''}" if git else "no commit"
    return f"{environment['cpu']['available']} CPUs of {environment['cpu']['model']}, {commit}"


def draw(data: Mapping[str, Any], figures: Any) -> Any:
    """Plot speed over number of actors, one panel per kind of env; `figures` is `matplotlib.figure`."""
    sections = [name for name in ("scaling", "spin") if name in data]
    figure = figures.Figure(figsize=(4.6 * len(sections), 3.6), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(sections), squeeze=False)[0], sections, strict=True):
        rows = data[name]["rows"]
        for kind in dict.fromkeys(row["kind"] for row in rows):
            points = sorted((row["actors"], row["steps_per_s"]) for row in rows if row["kind"] == kind)
            panel.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=3,
                linewidth=1.2,
                label=kind,
                linestyle="-" if kind in OURS else "--",
            )
        first = max(row["steps_per_s"] / row["actors"] for row in rows)
        counts = sorted({row["actors"] for row in rows})
        panel.plot(
            counts, [first * count for count in counts], color="tab:gray", linewidth=0.8, linestyle=":", label="linear"
        )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter(lambda speed, _: f"{speed:,.0f}")
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_title({"scaling": "env sleeps", "spin": "env computes"}[name], fontsize=9)
        panel.set_xlabel("actors")
        panel.set_ylabel("env steps per second")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    return figure


# The command line


def main() -> None:
    """Measure the requested sections and write them."""
    args = parse(sys.argv[1:])
    if args.what[0] == "copy":
        print(json.dumps(copies(args.what[1], int(args.what[2]))))
        return
    for name in args.what if args.what != ["report"] else ():
        for rows in measure(name, args):
            note(name, args, rows)
    report(args.out)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", nargs="*", default=list(SECTIONS), help="scaling, spin, faults, copies (default: all), or report")
    add("--actors", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of actors (default: 1 2 4 8)")
    add("--kinds", nargs="+", choices=[*OURS], default=[*OURS], help="kinds of actors (default: all)")
    add("--rounds", type=int, default=3, help="interleaved rounds (default: 3)")
    add("--seconds", type=float, default=6.0, help="duration of a measurement [s] (default: 6)")
    add("--wait-ms", type=float, default=10.0, help="sleep per env step (default: 10)")
    add("--spin-ms", type=float, default=1.0, help="CPU time per env step (default: 1)")
    default = ROOT / "benchmarks" / "parallel" / "scale.json"
    add("--out", type=Path, default=default, help="file to write (default: benchmarks/parallel/scale.json)")
    return parser.parse_args(argv)


def measure(name: str, args: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the rows of a section after each round."""
    waits, engines = {"wait_ms": args.wait_ms}, [kind for kind in ("process", "ray") if kind in args.kinds]
    if name in ("scaling", "spin"):
        env = waits if name == "scaling" else {"spin_ms": args.spin_ms}
        yield from scaling(args.kinds, args.actors, env, rounds=args.rounds, seconds=args.seconds)
    elif name == "copies":
        yield from copies_rows(engines, rounds=args.rounds)
    elif name == "faults":
        rows = list[Row]()
        for _ in range(args.rounds):
            for kind in engines:
                for kill in (kill_actor, kill_learner):
                    rows.append(kill(kind, max(1, args.actors[-1] // 2), waits, args.seconds))
                    print(rows[-1], flush=True)
            yield rows
    else:
        sys.exit(f"unknown section {name!r}. Available: {', '.join(SECTIONS)}, report")


def note(name: str, args: argparse.Namespace, rows: list[Row]) -> None:
    """Replace a section of scale.json, including its command, commit and machine."""
    from gpusim_rl.files.provenance import describe_environment, git_state

    environment = describe_environment()
    for package in ("ray", "gymnasium"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            environment["versions"][package] = importlib.metadata.version(package)
    what = {
        "scaling": f"A step of an env sleeps for {args.wait_ms:g} ms.",
        "spin": f"A step of an env computes for {args.spin_ms:g} ms.",
        "faults": f"A step of an env sleeps for {args.wait_ms:g} ms.",
        "copies": f"{COPIED['horizon']} steps of {COPIED['num_envs']} envs with {COPIED['obs']} observations.",
    }[name]
    command = shlex.join(["python", "benchmarks/parallel/actors.py", *sys.argv[1:]])
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    about = {"command": command, "git": git_state(args.out.parent)[0], "environment": environment, "what": what}
    write(args.out, json.dumps(kept | {name: {**about, "rows": rows}}, indent=1) + "\n")


def report(path: Path) -> None:
    """Write scale.md and scale.png."""
    from matplotlib import figure as figures

    data = json.loads(path.read_text())
    write(path.with_suffix(".md"), markdown(data))
    if "scaling" in data or "spin" in data:
        draw(data, figures).savefig(path.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # the checkout, installed or not
    main()
