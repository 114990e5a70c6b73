"""Measure physics, environment, rollout and training, and other libraries' trainers on the same environment.

python benchmarks/bench.py task=Ant num_envs=[256,1024,4096]         writes bench.json, .md and .png to throughput/Ant
python benchmarks/bench.py task=Ant num_envs=4096 --baselines none   without other libraries
python benchmarks/bench.py learn [TASK ...] [--minutes 10]           learning benchmark; resumes stopped runs

Each case is a process, measured once per round. All cases of an env count are in memory at the same time.

    bare physics   the task's scene with its decimation and random controls; no task, no resets
    env step       the environment with precomputed actions; the phase `simulate` is physics only
    + policy       rollouts of our trainer
    + training     our training: rollout, update, logging; also compiled if `--modes` includes `fastest`

Numbers are control steps per second over all envs. `training_over_physics` is training over bare physics at the
faster simulator setting and the largest env count; `trainer_us` is the time outside `env.step` [us per control step].
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import queue
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring.checkout import ROOT, process_environment, provenance, write

if TYPE_CHECKING:
    from learn.learning import Goal, Outcome
    from throughput.harness import Case


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, or `learn`; return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    from gpusim_rl.errors import friendly_errors

    with friendly_errors():
        if arguments[:1] == ["learn"]:
            return learn(parse_learn(arguments[1:]))
        bench(parse(arguments), shlex.join(["python", "benchmarks/bench.py", *arguments]))
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", help="as for train.py: task=Ant num_envs=4096; num_envs may be a list: [256,1024]")
    add("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    add("--seconds", type=float, default=3.0, help="seconds per case and round, at least one iteration (default: 3)")
    add("--warm-up", type=int, default=6, help="iterations before the first round (default: 6)")
    add("--baselines", default="all", help="rsl_rl,skrl,rl_games,sb3, or none (default: all installed)")
    modes = "same: same work as our PPO; fastest: the library's fastest documented mode"
    add("--modes", default="same,fastest", help=modes)
    add("--out", type=Path, help="folder to write to (default: benchmarks/throughput/<task>)")
    add("--no-plot", action="store_true", help="do not write a plot")
    return parser.parse_intermixed_args(argv)


def bench(args: argparse.Namespace, command: str) -> None:
    """Measure one env count at a time; results are written after every round."""
    from gpusim_rl.errors import ConfigError
    from throughput.harness import SCHEMA, Rounds, markdown, measure, summary, table
    from throughput.harness import draw as draw_speeds

    if min(args.rounds, args.seconds, args.warm_up) <= 0:
        raise ConfigError("--rounds, --seconds and --warm-up must be positive")
    counts, overrides = env_counts(args.overrides)
    about = measure_task(args, overrides, counts)
    default_counts = about.pop("default_counts")
    counts = counts or default_counts
    cases = about.pop("cases")
    out: Path = args.out or Path("benchmarks") / "throughput" / about["task"]
    rounds = Rounds(args.rounds, args.seconds, args.warm_up)
    known = {"schema": SCHEMA, "command": command, **provenance(out), **about, "rounds": dataclasses.asdict(rounds)}
    report: dict[str, Any] = known
    environment = process_environment()
    parts: list[dict[str, Any]] = []
    for count in counts:

        def say(text: str, count: int = count) -> None:
            print(f"{count} envs: {text}", file=sys.stderr)

        parts.append({})
        results: list[dict[str, Any]] = []
        for results in measure(cases(count), rounds, command=worker_command(), environment=environment, say=say):
            parts[-1] = {"num_envs": count, **summary(results), "cases": results}
            largest = max(parts, key=lambda part: part["num_envs"])
            headline = {key: value for key, value in largest.items() if "_over_" in key}
            report = {**known, **headline, "env_counts": parts}
            write(out / "bench.json", json.dumps(report, indent=2) + "\n")
            write(out / "bench.md", markdown(report))
        print("\n".join(["", f"{about['task']}, {count} envs", "", *table(results), ""]))
    names = ["bench.json", "bench.md"]
    if not args.no_plot and draw(lambda figures: draw_speeds(report, figures), out / "bench.png"):
        names.append("bench.png")
    print(", ".join(str(out / name) for name in names))


def parse_learn(argv: list[str]) -> argparse.Namespace:
    """Parse the command line of `learn`."""
    parser = argparse.ArgumentParser(
        prog="bench learn",
        description="Train tasks to their thresholds or up to a time limit, and save the curves: tasks.json, a plot,"
        " the tables in docs/benchmarks.md and docs/tasks.md. Tasks that have reached their thresholds are skipped;"
        " others continue with more minutes.",
    )
    add = parser.add_argument
    add("tasks", nargs="*", metavar="TASK", help="default: all in learn.yaml")
    add("--minutes", type=float, help="maximum training time per task (default: from learn.yaml)")
    add("--seeds", default="1", help="e.g. 1,2,3 (default: 1)")
    add("--recipe", default="auto", help="recipe of all runs: auto (by device), full or quick (default: auto)")
    in_full = "do not train; evaluate policies trained with other recipes in the full task, if their run folders exist"
    add("--in-full", action="store_true", help=in_full)
    add("--jobs", type=int, default=1, help="concurrent runs, each on its share of the CPUs (default: 1)")
    out = "folder of the results, and of learn.yaml if it has one (default: benchmarks/learn)"
    add("--out", type=Path, default=Path("benchmarks") / "learn", help=out)
    add("--runs", type=Path, default=Path("runs"), help="folder of run folders (default: runs)")
    add("--table", action="store_true", help="do not train; reread the run folders and update the tables")
    page = Path("docs") / "benchmarks.md"
    add("--page", type=Path, default=page, help=f"file with the table (default: {page})")
    return parser.parse_args(argv)


def learn(args: argparse.Namespace) -> int:
    """Train the requested tasks; write the results after each run.

    Returns:
        Exit code: 1 if a training run failed, 130 if it was interrupted.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from gpusim_rl.errors import EXIT_INTERRUPTED, ConfigError, TaskError
    from learn import learning

    if args.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {args.jobs}")
    if args.minutes is not None and not args.minutes > 0.0:
        raise ConfigError(f"--minutes must be positive, got {args.minutes:g}")
    goals_file: Path = args.out / "learn.yaml"
    if not goals_file.is_file():
        goals_file = ROOT / "benchmarks" / "learn" / "learn.yaml"
    goals = learning.read_goals(goals_file)
    asked = list(dict.fromkeys(args.tasks)) or list(goals)
    if unknown := [task for task in asked if task not in goals]:
        raise ConfigError(f"no goal for {', '.join(unknown)} in {goals_file}. Available: {', '.join(goals)}")
    try:
        seeds = list(dict.fromkeys(int(seed) for seed in args.seeds.split(",")))
    except ValueError:
        raise ConfigError(f"--seeds must be ints such as 1,2,3, got {args.seeds}") from None
    file = args.out / "tasks.json"
    known = {(outcome.task, outcome.recipe, outcome.seed): outcome for outcome in learning.read_outcomes(file)}
    shares = cpu_shares(args.jobs)
    git = provenance(args.out, args.page)["git"]
    stop, writing = threading.Event(), threading.Lock()

    def keep(outcome: learning.Outcome) -> None:
        with writing:
            known[outcome.task, outcome.recipe, outcome.seed] = outcome
            learning.write_outcomes(file, list(known.values()))

    def train(goal: learning.Goal, seed: int) -> None:
        recipe, settings = composed(goal, args.recipe)
        outcome = begin(goal, seed, known.get((goal.task, recipe, seed)), recipe, settings)
        goal = goal.for_seed(seed)
        if outcome.reached or outcome.seconds >= goal.minutes * 60.0:
            keep(outcome)
            return
        cpus = shares.get()
        try:
            if cpus is not None:
                os.sched_setaffinity(0, cpus)  # this thread, so that `random_return` uses these CPUs too
            if outcome.random_return is None:
                outcome.random_return = random_return(goal, outcome.recipe)
            if stop.is_set():
                return
            command = [sys.executable, "-m", "gpusim_rl.cli", "train"]
            options = {"environment": process_environment(), "runs": args.runs, "cpus": cpus, "stop": stop}
            say = partial(print, file=sys.stderr)
            learning.train_to(goal, outcome, command=command, say=say, **options)
        finally:
            shares.put(cpus)
            if outcome.run:  # even if training failed: it resumes from the last checkpoint
                outcome.environment.setdefault("git", git)
                keep(outcome)

    wanted = [dataclasses.replace(goals[task], minutes=args.minutes or goals[task].minutes) for task in asked]
    if args.table:
        wanted = []
        for outcome in list(known.values()):
            keep(measured(outcome, goals.get(outcome.task)))
    if args.in_full:
        wanted = []
        for outcome in list(known.values()):
            is_asked = outcome.task in asked and outcome.seed in seeds and outcome.recipe != "full"
            if is_asked and Path(outcome.run).is_dir():
                outcome.in_full = learning.evaluate_in_full(outcome.task, outcome.recipe, Path(outcome.run))
                keep(outcome)
    pool, interrupted, failed = ThreadPoolExecutor(args.jobs), False, False
    with ended_as_by_ctrl_c():
        try:
            for future in as_completed([pool.submit(train, goal, seed) for seed in seeds for goal in wanted]):
                try:
                    future.result()
                except (ConfigError, TaskError) as error:  # the others continue
                    print(f"error: {error}", file=sys.stderr)
                    failed = True
        except KeyboardInterrupt:
            print("interrupted: stopping training runs, with a checkpoint each", file=sys.stderr)
            interrupted = True
        finally:  # do not start pending training runs; active ones save their results
            stop.set()
            pool.shutdown(cancel_futures=True)
    outcomes = list(known.values())
    lines = learning.table(outcomes, goals)
    print("\n".join(lines))
    if args.page.is_file():
        write(args.page, learning.fill(args.page.read_text(), lines))
    best = learning.results(file)
    rows = {task: {name: dataclasses.asdict(row) for name, row in rows.items()} for task, rows in best.items()}
    write(args.out / "best.json", json.dumps(rows, indent=1) + "\n")
    if (front := Path("docs") / "tasks.md").is_file():
        write(front, learning.fill(front.read_text(), learning.front_page(best), "tasks"))
    draw(lambda figures: learning.draw(outcomes, figures), args.out / "tasks.png")
    return EXIT_INTERRUPTED if interrupted else int(failed)


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into interrupts; training runs have their own sessions and would keep running."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    previous = {number: signal.getsignal(number) for number in numbers}
    heard = [number for number in numbers if previous[number] != signal.SIG_IGN]  # nohup ignores SIGHUP
    for number in heard:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, previous[number])


def begin(goal: Goal, seed: int, known: Outcome | None, recipe: str, settings: str) -> Outcome:
    """Return the known outcome of a goal's training run, or a new outcome if unknown or if settings changed.

    Args:
        goal: Task, threshold and overrides.
        seed: Seed of the run.
        known: Previous outcome of this task, recipe and seed.
        recipe: Name of the recipe.
        settings: Hash of the settings, from `composed`.
    """
    from learn.learning import Outcome

    overrides = list(goal.overrides)
    if known is None or known.overrides != overrides or known.settings not in ("", settings):
        threshold, stat = goal.judged
        new = {"task": goal.task, "seed": seed, "recipe": recipe, "threshold": threshold, "stat": stat, "run": ""}
        return Outcome(**new, overrides=overrides, settings=settings)
    return measured(known, goal)


def measured(known: Outcome, goal: Goal | None) -> Outcome:
    """Return a copy of an outcome, judged against a goal by the run's metrics rows or else by stored values."""
    from learn.learning import hold_against, measure_run

    outcome = dataclasses.replace(known, stats=dict(known.stats))
    threshold, stat = (known.threshold, known.stat) if goal is None else goal.judged
    if outcome.run and (Path(outcome.run) / "metrics.csv").is_file():
        outcome.threshold, outcome.stat = threshold, stat
        measure_run(outcome, Path(outcome.run))
    elif (threshold, stat) != (outcome.threshold, outcome.stat):
        hold_against(outcome, threshold, stat)
    return outcome


COMPOSING = threading.Lock()
"""Lock for Hydra's global state, since several threads start training runs."""


def composed(goal: Goal, recipe: str) -> tuple[str, str]:
    """Return the name of a goal's recipe, and a hash of all settings that learning depends on."""
    from gpusim_rl.settings.compose import compose

    with COMPOSING:
        config = compose([f"task={goal.task}", f"recipe={recipe}", *goal.for_seed(0).overrides])
    parts = {name: config[name] for name in ("task", "num_envs", "max_iterations", config["algo"]["name"], "sim")}
    if goal.prepare:
        parts["prepare"] = goal.prepare
    return config["recipe"], hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def cpu_shares(jobs: int) -> queue.SimpleQueue[set[int] | None]:
    """Return a queue with a set of CPUs per concurrent training run, or with None if they cannot be divided."""
    shares: queue.SimpleQueue[set[int] | None] = queue.SimpleQueue()
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    for job in range(jobs):
        shares.put(set(cpus[job::jobs]) if 1 < jobs <= len(cpus) else None)
    return shares


def random_return(goal: Goal, recipe: str) -> float:
    """Return the mean return of random actions in 64 envs with the goal's settings."""
    from omegaconf import OmegaConf

    from gpusim_rl import make_env
    from learn.learning import random_return as measure

    ours = ["num_envs=64", "device=cpu", "task.randomize_episode_start=false"]
    settings: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"recipe={recipe}", *goal.overrides, *ours]))
    with COMPOSING:
        env = make_env(goal.task, **settings)
    try:
        return measure(env)
    finally:
        env.close()


def env_counts(overrides: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the requested numbers of envs and the other overrides."""
    from gpusim_rl.errors import ConfigError

    mine = [text for text in overrides if text.startswith("num_envs=")]
    rest = [text for text in overrides if not text.startswith("num_envs=")]
    if not mine:
        return [], rest
    value = mine[-1].partition("=")[2]
    try:
        counts = [int(part) for part in value.strip("[]() ").split(",")]
        if min(counts) < 1:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"num_envs must be a positive int or a list of positive ints, got {value}; try num_envs=[256,1024]"
        ) from None
    return list(dict.fromkeys(counts)), rest


def measure_task(args: argparse.Namespace, overrides: Sequence[str], counts: Sequence[int]) -> dict[str, Any]:
    """Check the settings; return the task's entries of the report. `cases` maps a number of envs to its cases."""
    from gpusim_rl.api import load_spec
    from gpusim_rl.errors import ConfigError
    from gpusim_rl.learn.algorithm import choose_precision
    from gpusim_rl.run.devices import choose_devices
    from gpusim_rl.settings.compose import compose
    from gpusim_rl.settings.schema import PPOConfig
    from throughput.baselines import MODES, choose_baselines, install_command
    from throughput.harness import training_cases

    baselines, missing = choose_baselines(args.baselines)
    if missing:
        print(f"skipped, not installed: {', '.join(missing)}; {install_command(missing)}", file=sys.stderr)
    modes = args.modes.split(",")
    if not set(modes) <= set(MODES):
        raise ConfigError(f"--modes must be among {', '.join(MODES)}, got {args.modes}")
    spec = load_spec(compose([*overrides, *(f"num_envs={count}" for count in counts[:1])]), overrides)
    cfg = spec.cfg
    if not isinstance(cfg.algorithm, PPOConfig):
        raise ConfigError("the benchmark only measures PPO: try algo=ppo")
    rl_device, choice = choose_devices(cfg)

    def cases(num_envs: int) -> list[Case]:
        return training_cases(overrides, num_envs, on_mujoco=choice.name == "mujoco", baselines=baselines, modes=modes)

    return {
        "task": spec.task_class.__name__,
        "overrides": list(overrides),
        "sim": str(choice),
        "learner": str(rl_device),
        "precision": choose_precision(cfg.algorithm.precision, rl_device)[0],
        "decimation": cfg.task.decimation,
        "horizon": cfg.algorithm.horizon,
        "cases": cases,
        "default_counts": [cfg.num_envs],
    }


def worker_command() -> list[str]:
    """Return the command that starts a case's process."""
    return [sys.executable, str(Path(__file__).resolve().parent / "throughput" / "worker.py")]


def draw(make: Callable[[Any], Any], path: Path) -> bool:
    """Save the figure that `make(matplotlib.figure)` returns; return False if matplotlib is not installed."""
    from gpusim_rl.errors import ConfigError, import_extra

    try:
        figures = import_extra("matplotlib.figure", "view", "the plot")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return False
    make(figures).savefig(path, dpi=150)
    return True


if __name__ == "__main__":
    # Like train.py, import the checkout of this file, installed or not; keep the script's own folder.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
