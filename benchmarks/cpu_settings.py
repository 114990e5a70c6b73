"""Measures what our settings for the CPU rest on; writes cpu_settings.json beside this file.

    python benchmarks/cpu_settings.py

- persistent: physics steps/s of Ant with and without an MjData per env, reading state only or body velocities too
- malloc: page faults and seconds of a PPO update with glibc's defaults and with `tune_malloc()`
- sharing: env steps/s of two trainings at once, with GNU OpenMP's default spinning and with `limit_openmp_spin()`
"""

from __future__ import annotations

import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STATE, VELOCITY = 0, 2  # mjSTAGE_NONE, mjSTAGE_VEL


def persistent() -> list[dict[str, Any]]:
    """Physics steps per second by number of envs."""
    import numpy as np
    from mujoco.batch import Batch

    from gpusim_rl.files.paths import assets_dir
    from gpusim_rl.machine.hardware import available_cpus
    from gpusim_rl.sim.scene import Scene

    scene = Scene(120)
    scene.add_ground()
    scene.add("ant", assets_dir() / "ant.xml")
    random = np.random.default_rng(0)
    rows = []
    for num_envs in (64, 256, 512, 1024, 4096):
        row: dict[str, Any] = {"envs": num_envs}
        batches = {}
        for stage_name, stage in (("state", STATE), ("velocity", VELOCITY)):
            for keep in (False, True):
                batch = Batch(scene.model, num_envs, nthread=available_cpus(), persistent=keep)
                batches[stage_name, keep] = (batch, stage, [])
        controls = random.uniform(-1, 1, (num_envs, 8))
        steps = max(20, 40 * 1024 // num_envs)
        for _ in range(4):  # interleaved, so that all see the same machine
            for batch, stage, speeds in batches.values():
                batch.bind("ctrl")[:] = controls
                started = time.perf_counter()
                for _ in range(steps):
                    batch.step(nstep=2, stage=stage)
                speeds.append(2 * steps * num_envs / (time.perf_counter() - started))
        for (stage_name, keep), (_, _, speeds) in batches.items():
            row[f"{stage_name}, persistent={keep}"] = round(statistics.median(speeds[1:]))
        rows.append(row)
    return rows


def update(keep: bool) -> dict[str, float]:
    """Seconds and page faults of an update of Ant's size, in this process."""
    from gpusim_rl.api import scratch_training
    from gpusim_rl.run import start

    if not keep:
        start.tune_malloc = lambda: None
    seconds, faults = [], []
    with scratch_training(["task=Ant", "num_envs=4096", "device=cpu"]) as (trainer, _):
        trainer.collector.collect()
        for _ in range(8):
            before, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            trainer.algorithm.update()
            seconds.append(time.perf_counter() - started)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return {"seconds": statistics.median(seconds[2:]), "page_faults": statistics.median(faults[2:])}


def sharing(spin: str | None) -> dict[str, float]:
    """Env steps per second of two trainings at once."""
    environment = {**os.environ, "GOMP_SPINCOUNT": spin} if spin else dict(os.environ)
    code = "import gpusim_rl.machine.hardware as m; m.limit_openmp_spin = lambda: None; import train; train.main()"
    common = ["task=Ant", "num_envs=1024", "max_iterations=40", "log.console=quiet"]
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            subprocess.Popen(
                [sys.executable, "-c", code, *common, f"log.dir={folder}/{i}"],
                cwd=HERE.parent,
                env=environment,
            )
            for i in range(2)
        ]
        for run in runs:
            run.wait()
        speeds = []
        for path in Path(folder).glob("*/Ant/2*/metrics.csv"):
            with path.open() as file:
                speeds += [float(row["speed/env_steps_per_s"]) for row in csv.DictReader(file)][5:35]
    return {"median_env_steps_per_s_each": statistics.median(speeds)}


def main() -> None:
    """Runs all three."""
    if sys.argv[1:2] == ["update"]:
        sys.stdout.write(json.dumps(update(sys.argv[2] == "keep")))
        return
    from gpusim_rl.files.provenance import describe_environment

    def apart(keep: str) -> Any:
        command = [sys.executable, __file__, "update", keep]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    result = {
        "environment": describe_environment(),
        "sharing": {"default spinning": sharing(None), "limit_openmp_spin()": sharing("1000")},
        "malloc": {"glibc default": apart("default"), "tune_malloc()": apart("keep")},
        "persistent": persistent(),
    }
    (HERE / "cpu_settings.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
