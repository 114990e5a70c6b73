"""Measures trainings of few small envs beside Stable-Baselines3's; writes small_envs.json.

    python benchmarks/small_envs.py

CPU seconds (user and system, of one process on one core, with one thread of torch) per control step of one env, and
those until the first update is done. The env, the number of envs, networks, batches, epochs and gradient steps are the
same. Ours is the whole training as `train.py` runs it, with its logs, its normalisation of observations and returns and
its machine monitor; SB3 has its defaults, which print and write nothing. In every round each of the two takes its turn;
ratios are those within a round, medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkout import process_environment, provenance, write

LIBRARIES = ("gpusim_rl", "stable_baselines3")
ROLLOUT = 2048
"""Samples of a rollout of PPO, as SB3 has it."""
TRAIN_FREQUENCY = 8
"""Control steps between two turns of learning, with as many gradient steps, of SAC and DQN."""


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        algo: `ppo`, `sac` or `dqn`.
        env: Id in Gymnasium.
        num_envs: Envs in one process.
        batch: Samples of a gradient step.
        hidden: Units of each layer of each network.
    """

    algo: str
    env: str
    num_envs: int
    batch: int
    hidden: tuple[int, ...] = (64, 64)

    @property
    def horizon(self) -> int:
        """Control steps in each env between two turns of learning."""
        return ROLLOUT // self.num_envs if self.algo == "ppo" else TRAIN_FREQUENCY


CASES = tuple(
    Case(algo, env, num_envs, batch, hidden)
    for algo, env, batch, hidden in (
        ("ppo", "Acrobot-v1", 64, (64, 64)),
        ("ppo", "CartPole-v1", 256, (64, 64)),
        ("sac", "Pendulum-v1", 256, (256, 256)),
        ("dqn", "CartPole-v1", 64, (64, 64)),
    )
    for num_envs in (1, 8, 16)
)

Iterate = Callable[[], object]


def ours(case: Case) -> Iterate:
    """An iteration of our training."""
    from gpusim_rl.machine.hardware import limit_openmp_spin

    limit_openmp_spin()
    from gpusim_rl.api import scratch_training

    name, sizes = case.algo, list(case.hidden)
    settings = {
        "horizon": case.horizon,
        "precision": "fp32",
        "learning_rate": 3e-4,
        "network.hidden": sizes,
        **{
            "ppo": {
                "epochs": 10,
                "minibatch_size": case.batch,
                "schedule": "constant",
                "value_clip": "false",
                "network.separate": "true",
            },
            "sac": {"policy_delay": 1, "tau": 0.005, "network.critic_hidden": sizes},
            "dqn": {"n_step": 1, "double": "false", "network.dueling": "false"},
        }[name],
    }
    if name != "ppo":
        settings |= {"updates": 1, "batch_size": case.batch, "learning_starts": 1000, "network.layer_norm": "false"}
        settings |= {"replay.capacity": 100_000}
    overrides = [f"{name}.{key}={str(value).replace(' ', '')}" for key, value in settings.items()]
    overrides += ["task=Gymnasium", f"env.id={case.env}", f"num_envs={case.num_envs}", f"algo={name}", "seed=0"]
    training = scratch_training(overrides)
    trainer, log = training.__enter__()
    return lambda: (training, trainer.iterate(log))


def sb3(case: Case) -> Iterate:
    """The same of stable_baselines3."""
    import torch
    from stable_baselines3 import DQN, PPO, SAC
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    envs = make_vec_env(case.env, case.num_envs, seed=0)
    more: dict[str, Any] = {"n_steps": case.horizon}
    if case.algo != "ppo":
        more = {"train_freq": TRAIN_FREQUENCY, "gradient_steps": TRAIN_FREQUENCY, "learning_starts": 1000}
        more |= {"buffer_size": 100_000}
    if case.algo == "sac":
        more["tau"] = 0.005
    model: Any = {"ppo": PPO, "sac": SAC, "dqn": DQN}[case.algo](
        "MlpPolicy",
        envs,
        batch_size=case.batch,
        learning_rate=3e-4,
        policy_kwargs={"net_arch": list(case.hidden)},
        seed=0,
        device="cpu",
        **more,
    )
    return lambda: model.learn(case.horizon * case.num_envs * CHUNK[case.algo], reset_num_timesteps=False)


CHUNK = {"ppo": 1, "sac": 16, "dqn": 32}
"""Iterations in one call, whose beginning and end are no part of a long training."""


def serve(library: str, case: Case) -> None:
    """Trains as it is asked to on stdin; answers with CPU seconds."""
    iterate = ours(case) if library == "gpusim_rl" else sb3(case)
    calls = 1 if library == "stable_baselines3" else CHUNK[case.algo]

    def run(chunks: int) -> float:
        before = time.process_time()
        for _ in range(chunks * calls):
            iterate()
        return time.process_time() - before

    warm_up = 1 if case.algo == "ppo" else -(-1000 // (case.horizon * case.num_envs * CHUNK[case.algo])) + 1
    run(warm_up)
    print(json.dumps(time.process_time()), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(int(line))), flush=True)


def measure(case: Case, rounds: int, seconds: float, core: int) -> dict[str, Any]:
    """Measures both libraries in turn."""
    environment = process_environment(OMP_NUM_THREADS="1")
    chunk = case.horizon * case.num_envs * CHUNK[case.algo]
    processes: dict[str, Any] = {}
    startup, counts = {}, {}
    try:
        for library in LIBRARIES:
            command = [sys.executable, __file__, "--serve", library, json.dumps(asdict(case))]
            processes[library] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
            startup[library] = json.loads(processes[library].stdout.readline())

        def ask(library: str, chunks: int) -> float:
            process = processes[library]
            process.stdin.write(f"{chunks}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        for library in LIBRARIES:
            counts[library] = max(1, round(seconds / ask(library, 1)))
        chunks = max(counts.values())
        rows: dict[str, list[float]] = {library: [] for library in LIBRARIES}
        for number in range(rounds):
            for library in LIBRARIES if number % 2 else LIBRARIES[::-1]:
                rows[library].append(1e6 * ask(library, chunks) / (chunks * chunk))
    finally:
        for process in processes.values():
            process.stdin.close()
            process.wait(60)
    ratios = [a / b for a, b in zip(*rows.values(), strict=True)]
    return {
        **asdict(case),
        "env_steps_of_a_round": chunks * chunk,
        "cpu_us_per_env_step": {name: round(statistics.median(values), 2) for name, values in rows.items()},
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "cpu_s_until_steady": {name: round(value, 2) for name, value in startup.items()},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    parser.add_argument("--seconds", type=float, default=1.5, help="CPU seconds of each in a round (default: 1.5)")
    parser.add_argument("--only", default="", help="cases whose name has this, such as ppo-Acrobot-v1-8")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="CPU core of the trainings")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"), help="file to write")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Measures and writes."""
    arguments = parse()
    if arguments.serve:
        library, case = arguments.serve
        serve(library, Case(**json.loads(case)))
        return
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/small_envs.py", *sys.argv[1:]]),
        **provenance(arguments.out),
        "cases": [],
    }
    for case in CASES:
        if arguments.only not in f"{case.algo}-{case.env}-{case.num_envs}":
            continue
        found = measure(case, arguments.rounds, arguments.seconds, arguments.core)
        result["cases"].append(found)
        cpu, ratio = found["cpu_us_per_env_step"], found["ratio"]
        numbers = ", ".join(f"{name} {value:.1f}" for name, value in cpu.items())
        start = ", ".join(f"{value:.1f}" for value in found["cpu_s_until_steady"].values())
        print(
            f"{case.algo} {case.env} x {case.num_envs}: {numbers} us per step, ratio {ratio['median']:.2f}"
            f" ({ratio['min']:.2f} to {ratio['max']:.2f}); start {start} s",
            flush=True,
        )
        write(arguments.out, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
