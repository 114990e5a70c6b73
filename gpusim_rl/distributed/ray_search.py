"""Searches settings with Ray Tune: `method=asha` stops hopeless trials early, `method=pbt` breeds a population.

Ray starts the trials, on this machine or on a cluster whose nodes see the folder. Each is a usual run all the same. The
study is in Optuna's journal, as with `method=optuna`: table, pictures and resume are the same.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpusim_rl.distributed.ray_cluster import ray_cluster
from gpusim_rl.distributed.trial_run import OBJECTIVE, TrialFailedError, TrialRun
from gpusim_rl.distributed.tuning import Search, num_ended, open_study, report, tell
from gpusim_rl.errors import ConfigError
from gpusim_rl.files.safe_open import lock

POINTER = "checkpoint.txt"
"""File in a checkpoint of Ray Tune's: the path of ours."""
CHECKPOINT_S = 60.0
"""For which a member waits for a checkpoint that its run is writing [s]."""


def tune(search: Search) -> list[str]:
    """Search until the study has its trials; writes `trials.csv` and pictures.

    Returns:
        Lines for the user: the best trials, and the command that repeats the best one.

    Raises:
        ConfigError: There is no Ray, or no Optuna; or a population cannot change what the space has; or another command
            searches in the study.
    """
    if search.method == "pbt":
        _refuse_structure(search)
    with ray_cluster(f"method={search.method}"):
        search = replace(search, folder=search.folder.absolute())
        optuna, study = open_study(search)
        with _alone(search.folder):
            left = search.trials - num_ended(optuna, study)
            if left > 0:
                _fit(search, optuna, study, left)
        return report(optuna, search, study)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other commands out of the study: Ray Tune numbers its trials by itself."""
    with (folder / "ray.lock").open("ab") as file:
        with suppress(OSError):  # a file system without locks
            if not lock(file):
                raise ConfigError(f"{folder}: another command searches there. Try study=<another>, or wait for its end")
        yield


def _refuse_structure(search: Search) -> None:
    """A member goes on from the checkpoint of another one, whose tensors must have the same shapes."""
    from gpusim_rl.learn.algorithm import load_algorithm_class
    from gpusim_rl.settings.compose import compose
    from gpusim_rl.settings.schema import declarations

    algo = compose(search.overrides, search.config_dir)["algo"]
    fixed = [f"{algo['name']}.{name}" for name in declarations(load_algorithm_class(algo["_target_"]).Config).structure]
    for key in search.space:
        if key == "num_envs" or any(f"{key}.".startswith(f"{name}.") for name in fixed):
            raise ConfigError(f"method=pbt: {key} cannot change from one checkpoint to the next. Try method=asha")


def _fit(search: Search, optuna: Any, study: Any, left: int) -> None:
    """Lets Ray Tune run the trials that are left; each is in the study as soon as it has ended."""
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    from ray import tune as ray_tune

    first = len(study.get_trials(deepcopy=False))
    space = {key: _domain(ray_tune, what) for key, what in search.space.items()}

    class Record(ray_tune.Callback):  # type: ignore[reportUntypedBaseClass]
        """Adds what has ended to the study."""

        def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            _add(search, optuna, study, trial.config, trial.last_result)

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
            reason = str(trial.get_error() or "it was lost").strip().splitlines()[-1]
            told = {"log": f"{_number(first, trial.trial_id):04d}.log", **(trial.last_result or {})}
            _add(search, optuna, study, trial.config, {**told, "failed": reason})

    tuner = ray_tune.Tuner(
        ray_tune.with_resources(_trainable(ray_tune, search, first), {"cpu": 1}),
        param_space=space,
        tune_config=ray_tune.TuneConfig(
            metric=OBJECTIVE, mode="max", num_samples=left, scheduler=_scheduler(ray_tune, search, space)
        ),
        run_config=ray_tune.RunConfig(
            name=f"{first:04d}",
            storage_path=str(search.folder / "ray"),
            callbacks=[Record()],
            # A run writes one itself. Ray Tune would ask for another one at the end, and wait for it.
            checkpoint_config=ray_tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a trial could take over the process of another one
        tuner.fit()
    if num_ended(optuna, study) < search.trials:
        raise KeyboardInterrupt  # Ray Tune returns as if it were done


def _number(first: int, trial_id: str) -> int:
    """Of a trial, for its run folder and its log."""
    return first + int(trial_id.rpartition("_")[2])


def _domain(ray_tune: Any, what: Mapping[str, Any]) -> Any:
    """A part of a space in the words of Ray Tune."""
    if "choices" in what:
        return ray_tune.choice(what["choices"])
    low, high, log = what["low"], what["high"], bool(what.get("log"))
    if isinstance(low, int) and isinstance(high, int):
        return (ray_tune.lograndint if log else ray_tune.randint)(low, high + 1)
    return (ray_tune.loguniform if log else ray_tune.uniform)(low, high)


def _scheduler(ray_tune: Any, search: Search, space: Mapping[str, Any]) -> Any:
    if search.method == "asha":
        return ray_tune.schedulers.ASHAScheduler(
            time_attr="iteration",
            max_t=search.iterations,
            grace_period=search.grace,
            reduction_factor=search.reduction,
            stop_last_trials=False,  # they end by themselves, with a checkpoint
        )

    def within(settings: dict[str, Any]) -> dict[str, Any]:
        for key, what in search.space.items():
            if "low" in what:
                settings[key] = min(max(settings[key], what["low"]), what["high"])
        return settings

    return ray_tune.schedulers.PopulationBasedTraining(
        time_attr="iteration",
        perturbation_interval=search.grace,
        hyperparam_mutations={key: what.get("choices", space[key]) for key, what in search.space.items()},
        custom_explore_fn=within,
    )


def _trainable(ray_tune: Any, search: Search, first: int) -> Any:
    """What Ray Tune calls a trainable: follows a run of ours, row by row."""
    cwd = os.getcwd()  # Ray's processes are elsewhere
    interval, breeds = f"log.checkpoint_interval={search.grace}", search.method == "pbt"

    class Trial(ray_tune.Trainable):  # type: ignore[reportUntypedBaseClass]
        """A trial; its run begins with the first step, when it is known from where."""

        def setup(self, config: dict[str, Any]) -> None:
            self._trial_run: TrialRun | None = None
            self._rows: Iterator[tuple[int, float]] = iter(())
            self._from: list[str] = []
            self._reached = 0

        def step(self) -> dict[str, Any]:
            if self._trial_run is None:
                number = _number(first, self.trial_id)
                more = [interval, "log.keep=0"] if breeds else []
                self._trial_run = TrialRun(search, number, self.config, *self._from, *more, cwd=cwd)
                self._rows = self._trial_run.rows()
            found = next(self._rows, None)
            while found is not None and breeds and found[0] % search.grace and found[0] < search.iterations:
                found = next(self._rows, None)  # between two changes
            if found is None:
                raise TrialFailedError(f"no {OBJECTIVE} was told")
            self._reached, value = found
            run = self._trial_run
            told = {"run": run.folder, "command": run.command, "log": run.printed.name}
            return {
                **told,
                "iteration": self._reached,
                OBJECTIVE: value,
                "done": self._reached >= search.iterations,
            }

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            assert self._trial_run is not None
            file = Path(self._trial_run.folder, "checkpoints", f"{self._reached:06d}.pt")
            end = time.monotonic() + CHECKPOINT_S
            while not file.exists() and time.monotonic() < end:
                time.sleep(0.05)
            Path(checkpoint_dir, POINTER).write_text(str(file))

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            self._from = [f"checkpoint={Path(checkpoint_dir, POINTER).read_text()}"]

        def cleanup(self) -> None:
            if self._trial_run is not None:
                self._trial_run.end()

    return Trial


def _add(search: Search, optuna: Any, study: Any, settings: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Adds a trial that has ended to the study, and tells so."""
    states, distributions = optuna.trial.TrialState, optuna.distributions
    value, failed = result.get(OBJECTIVE), result.get("failed")
    whole = result.get("iteration", 0) >= search.iterations
    state = states.FAIL if failed or value is None else states.COMPLETE if whole else states.PRUNED

    def distribution(what: Mapping[str, Any]) -> Any:
        if "choices" in what:
            return distributions.CategoricalDistribution(what["choices"])
        low, high, log = what["low"], what["high"], bool(what.get("log"))
        whole_numbers = isinstance(low, int) and isinstance(high, int)
        kind = distributions.IntDistribution if whole_numbers else distributions.FloatDistribution
        return kind(low, high, log=log)

    attributes = {name: result.get(name, "") for name in ("run", "command", "log")}
    if failed:
        attributes["failed"] = failed
    steps = {int(result["iteration"]): value} if value is not None else {}
    study.add_trial(
        optuna.trial.create_trial(
            state=state,
            value=None if state == states.FAIL else value,
            params=dict(settings),
            distributions={key: distribution(what) for key, what in search.space.items()},
            user_attrs=attributes,
            intermediate_values=steps,
        )
    )
    tell(search, study.get_trials(deepcopy=False)[-1], num_ended(optuna, study))
