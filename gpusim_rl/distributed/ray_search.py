"""Hyperparameter search on Ray Tune: ASHA (early stopping) and population-based training.

Trials run on this machine or on a cluster that shares the folder. The study is stored in Optuna's database.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpusim_rl.distributed import pbt
from gpusim_rl.distributed.ray_cluster import ray_cluster, same_handler
from gpusim_rl.distributed.search import Search
from gpusim_rl.distributed.trial_run import OBJECTIVE, TrialFailedError, TrialRun
from gpusim_rl.distributed.tuning import Study, database_errors, number_of
from gpusim_rl.errors import ConfigError, say, warn
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import lock, open_file
from gpusim_rl.machine.hardware import available_cpus
from gpusim_rl.run.run_dir import SAVE_ALL

POINTER = "checkpoint.txt"  # file in Ray Tune's checkpoints: path of our checkpoint
CHECKPOINT_S = 60.0  # timeout for a checkpoint that the run is writing [s]
RESTARTS = 5  # maximum restarts of a failed trial of a population


def tune(search: Search) -> list[str]:
    """Search on Ray Tune until the study has all its trials; return `Study.report`."""
    with ray_cluster(f"method={search.cfg.method}") as ray, database_errors(search):
        study = Study(replace(search, folder=search.folder.absolute()))
        with open_file(study.search.folder / "ray.lock", "ab") as file:
            if not lock(file):  # Ray Tune numbers trials from 0 in each process
                hint = f"Wait until that process ends, or try study={study.search.cfg.study}-1"
                raise ConfigError("another process is running this search", key=str(study.search.folder), hint=hint)
            if study.num_ended < search.cfg.trials:
                _fit(study, ray.cluster_resources())
        table = study.search.folder / pbt.TABLE
        return [*study.report(), *([f"copies: {paths.from_here(table)}"] if table.is_file() else [])]


def _fit(study: Study, cluster: Mapping[str, float]) -> None:
    """Run the remaining trials; add each to the study when it ends."""
    quiet = {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "TUNE_PRINT_ALL_TRIAL_ERRORS": "0", "RAY_AIR_NEW_OUTPUT": "0"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    from ray import tune as ray_tune
    from ray.tune.search.basic_variant import BasicVariantGenerator

    search = study.search
    numbers, checkpoints, known = _trials_left(study)
    resources, settings = trial_resources(search, cluster), BasicVariantGenerator(points_to_evaluate=known)
    objective: dict[str, Any] = {"metric": OBJECTIVE, "mode": "max", "num_samples": len(numbers)}
    tuner = ray_tune.Tuner(
        ray_tune.with_resources(_trainable(ray_tune, search, numbers, checkpoints, resources["cpu"]), resources),
        param_space={key: _domain(ray_tune, allowed) for key, allowed in search.space.items()},
        tune_config=ray_tune.TuneConfig(scheduler=make_scheduler(search), search_alg=settings, **objective),
        run_config=ray_tune.RunConfig(
            name=time.strftime("%Y-%m-%d_%H-%M-%S"),
            storage_path=str(search.folder / "ray"),
            callbacks=[_listener(ray_tune, study, numbers)],
            failure_config=ray_tune.FailureConfig(max_failures=RESTARTS if search.cfg.method == "pbt" else 0),
            # Runs write their last checkpoint themselves.
            checkpoint_config=ray_tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    )
    with warnings.catch_warnings(), same_handler(signal.SIGINT):
        warnings.simplefilter("ignore")  # Ray Tune recommends reusing processes
        tuner.fit()
    if study.num_ended < search.cfg.trials:
        raise KeyboardInterrupt  # Ray Tune swallows Ctrl-C


def _trials_left(study: Study) -> tuple[list[int], dict[int, Path], list[dict[str, Any]]]:
    """Return the remaining trial numbers; for a population, also checkpoints and settings of trials to resume."""
    search, ended = study.search, {number_of(trial) for trial in study.trials.get_trials(deepcopy=False)}
    left = search.cfg.trials - study.num_ended
    numbers = [number for number in range(len(ended) + left) if number not in ended][:left]
    checkpoints, known = {}, []
    for number in numbers if search.cfg.method == "pbt" else ():
        file = pbt.newest_checkpoint(search.runs_of(number), search.iterations)
        if file is not None and (settings := pbt.settings_of(file.parents[1], search.space)) is not None:
            checkpoints[number] = file
            known.append(settings)
    return sorted(numbers, key=lambda number: number not in checkpoints), checkpoints, known


def trial_resources(search: Search, cluster: Mapping[str, float]) -> dict[str, float]:
    """Return the Ray resources of a trial. All trials of a population run at once, and may share CPUs and GPUs."""
    together = search.cfg.trials if search.cfg.method == "pbt" else 1

    def share(count: float) -> float:
        return math.floor(1000 / math.ceil(together / count)) / 1000 if count < together else 1.0

    resources = {"cpu": share(cluster.get("CPU", 1.0))}
    if cluster.get("GPU") and search.device != "cpu":  # Ray hides GPUs that are not requested
        resources["gpu"] = share(cluster["GPU"])
    return resources


def _domain(ray_tune: Any, allowed: Mapping[str, Any]) -> Any:
    if "choices" in allowed:
        return ray_tune.choice(allowed["choices"])
    low, high, log = allowed["low"], allowed["high"], bool(allowed.get("log"))
    if isinstance(low, int) and isinstance(high, int):
        return (ray_tune.lograndint if log else ray_tune.randint)(low, high + 1)
    return (ray_tune.loguniform if log else ray_tune.uniform)(low, high)


def make_scheduler(search: Search) -> Any:
    """Make Ray Tune's scheduler for the search method."""
    from ray.tune import schedulers

    cfg, space, chance = search.cfg, search.space, random.Random()
    if cfg.method == "asha":
        sizes = {"max_t": search.iterations, "grace_period": cfg.grace, "reduction_factor": cfg.reduction}
        return schedulers.ASHAScheduler("iteration", stop_last_trials=False, **sizes)  # runs end by themselves

    class Together(schedulers.PopulationBasedTraining):  # type: ignore[reportUntypedBaseClass]
        """Population-based scheduler that never pauses trials, since all trials run at once."""

        def on_trial_result(self, tune_controller: Any, trial: Any, result: Any) -> str:
            decision = super().on_trial_result(tune_controller, trial, result)
            return self.CONTINUE if decision == self.PAUSE else decision

    return Together(
        time_attr="interval_end",
        perturbation_interval=cfg.grace,
        custom_explore_fn=lambda settings: pbt.explored(settings, space, chance),
        log_config=False,
    )


def _run_options(search: Search, cpus: float) -> tuple[list[str], dict[str, str]]:
    """Return overrides and environment variables of a trial; trials share the machine's CPUs as under torchrun."""
    env = {"LOCAL_WORLD_SIZE": str(max(1, round(available_cpus() / cpus)))}
    if search.cfg.method != "pbt":
        return [], env
    return [f"log.checkpoint_interval={search.cfg.grace}", "log.keep=0"], env | {SAVE_ALL: "1"}


def _trainable(
    ray_tune: Any, search: Search, numbers: Sequence[int], checkpoints: Mapping[int, Path], cpus: float
) -> Any:
    """Make Ray Tune's trainable class, which reads a run's metrics row by row."""
    cwd = os.getcwd()  # Ray's processes have a different one
    grace = search.cfg.grace if search.cfg.method == "pbt" else search.iterations + 1

    class RemoteTrial(ray_tune.Trainable):  # type: ignore[reportUntypedBaseClass]
        """Trial whose run starts at the first `step`, when its checkpoint is known."""

        def setup(self, config: dict[str, Any]) -> None:
            self._number = numbers[int(self.trial_id.rpartition("_")[2])]
            self._trial_run: TrialRun | None = None
            self._rows: Iterator[tuple[int, float]] = iter(())
            self._begin_from(self._number, checkpoints.get(self._number))

        def _begin_from(self, parent: int, checkpoint: Path | None) -> None:
            self._parent, self._checkpoint = parent, checkpoint
            self._interval_end = 0 if checkpoint is None else int(checkpoint.stem)

        def step(self) -> dict[str, Any]:
            if self._trial_run is None:
                words, env = _run_options(search, cpus)
                words += [] if self._checkpoint is None else [f"checkpoint={self._checkpoint}"]
                self._trial_run = TrialRun(search, self._number, self.config, *words, cwd=cwd, **env)
                self._rows = self._trial_run.rows()
            row = next(self._rows, None)
            if row is None:
                raise TrialFailedError(f"no {OBJECTIVE} was logged")
            run, (iteration, value) = self._trial_run, row
            done = iteration >= search.iterations
            result = {"number": self._number, "run": run.folder, "iteration": iteration, OBJECTIVE: value, "done": done}
            if iteration % grace == 0 or (done and grace <= search.iterations):
                result |= {"since": self._interval_end, "parent": self._parent, "should_checkpoint": not done}
                self._interval_end, self._parent = iteration, self._number
            return {**result, "interval_end": self._interval_end}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            assert self._trial_run is not None
            file = Path(self._trial_run.folder, "checkpoints", f"{self._interval_end:06d}.pt")
            end = time.monotonic() + CHECKPOINT_S
            while self._trial_run.running and not file.exists() and time.monotonic() < end:
                time.sleep(0.05)
            Path(checkpoint_dir, POINTER).write_text(str(file))

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            from gpusim_rl.files.checkpoint_file import is_whole

            file = Path(Path(checkpoint_dir, POINTER).read_text())
            parent = int(file.parents[2].name.rpartition(".")[2])
            if parent == self._number or not is_whole(file):  # restart, or damaged checkpoint of another trial
                file, parent = pbt.newest_checkpoint(search.runs_of(self._number), search.iterations), self._number
            self._begin_from(parent, file)

        def cleanup(self) -> None:
            if self._trial_run is not None:
                self._trial_run.end()

    return RemoteTrial


def _listener(ray_tune: Any, study: Study, numbers: Sequence[int]) -> Any:
    """Make Ray Tune's callback, which adds intervals to the table and ended trials to the study."""
    search = study.search

    def number(trial: Any) -> int:
        return numbers[int(trial.trial_id.rpartition("_")[2])]

    def reason(trial: Any) -> str:
        text = Path(trial.error_file).read_text().strip() if trial.error_file else "lost"
        return text.splitlines()[-1].rpartition(f"{TrialFailedError.__name__}: ")[2]

    class Listener(ray_tune.Callback):  # type: ignore[reportUntypedBaseClass]
        def on_trial_result(self, *, result: dict[str, Any], **info: Any) -> None:
            if "parent" not in result:
                return
            row = {"trial": result["number"], "iteration": result["iteration"], "score": result[OBJECTIVE]}
            row |= {name: result[name] for name in ("since", "parent", "run")}
            with suppress(OSError, ConfigError):  # a full disk must not end the trials
                pbt.add_row(search.folder, row | {key: result["config"][key] for key in search.space})
            copied = "" if row["parent"] == row["trial"] else f", copied from trial {row['parent']}"
            say(f"iteration {row['iteration']}  trial {row['trial']}  {row['score']:.5g}{copied}", file=sys.stderr)

        def on_trial_recover(self, *, trial: Any, **info: Any) -> None:
            warn(f"trial {number(trial)} failed ({reason(trial)}); resuming from its last checkpoint")

        def on_trial_complete(self, *, trial: Any, **info: Any) -> None:
            _add(study, trial.config, trial.last_result)

        def on_trial_error(self, *, trial: Any, **info: Any) -> None:
            last = trial.last_result or {}
            _add(study, trial.config, {"number": number(trial), **last, "failed": reason(trial)})

    return Listener()


def _add(study: Study, settings: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Add an ended trial to the study and print a line."""
    trials: Any = study.optuna.trial
    value, states = result.get(OBJECTIVE), trials.TrialState
    state = states.COMPLETE if result.get("iteration", 0) >= study.search.iterations else states.PRUNED
    state = states.FAIL if "failed" in result or value is None else state
    fields: dict[str, Any] = {"params": dict(settings), "distributions": study.distributions()}
    fields["user_attrs"] = {name: result[name] for name in ("number", "run", "failed") if name in result}
    fields["intermediate_values"] = {} if value is None else {int(result["iteration"]): value}
    value = None if state == states.FAIL else value
    study.trials.add_trial(trials.create_trial(state=state, value=value, **fields))
    study.say_ended(-1)
