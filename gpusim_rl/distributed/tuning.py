"""Searches settings: each trial is a usual run, in a process and a run folder of its own. `tune` searches with Optuna.

Several processes, also on several machines with one folder, may search together: they share a journal, a file. Every
method has this journal, and the table and the pictures of it.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import sys
import warnings
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gpusim_rl.distributed.journal import Journal
from gpusim_rl.distributed.search import Search
from gpusim_rl.distributed.trial_run import OBJECTIVE, TrialFailedError, TrialRun, command_of, log_name
from gpusim_rl.errors import ConfigError, import_extra, say
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import replacing
from gpusim_rl.settings.overrides import key_of, value_of

MAY_DIFFER = ("device", "sim_device", "rl_device", "log.", "wandb_")
"""Beginnings of settings that trials of one study need not share."""
AXIS_INCHES = 1.7
"""Distance of the axes in the picture of parallel coordinates [inch]."""
INTERRUPTED = "interrupted"
"""Mark of a trial that the user has stopped: it does not count."""


def tune(search: Search) -> list[str]:
    """Searches with Optuna until the study has its trials; writes `trials.csv` and pictures.

    Returns:
        Lines for the user: the best trials, and the command that repeats the best one.
    """
    study = Study(search)
    states, distributions = study.optuna.trial.TrialState, study.distributions()
    while study.num_ended < search.cfg.trials:
        trial = study.trials.ask(distributions)
        try:
            value = _run(study, trial)
        except TrialFailedError as error:
            trial.set_user_attr("failed", str(error))
            study.trials.tell(trial, state=states.FAIL)
        except study.optuna.TrialPruned:
            study.trials.tell(trial, state=states.PRUNED)
        except BaseException:
            trial.set_user_attr(INTERRUPTED, True)
            study.trials.tell(trial, state=states.FAIL)
            raise
        else:
            study.trials.tell(trial, value)
        study.say_ended(trial.number)
    return study.report()


def _run(study: Study, trial: Any) -> float:
    """Trains a trial, tells the pruner how it goes, and stops it where it is hopeless."""
    run = TrialRun(study.search, trial.number, {key: trial.params[key] for key in study.search.space})
    newest = None
    try:
        for iteration, newest in run.rows():
            trial.report(newest, iteration)
            if trial.should_prune():
                raise study.optuna.TrialPruned
    finally:
        run.end()
        trial.set_user_attr("run", run.folder)
    if newest is None:
        raise TrialFailedError(f"no {OBJECTIVE} was told")
    return newest


class Study:
    """The trials of a search in Optuna's journal: a new study, or as it was left.

    Raises:
        ConfigError: There is no Optuna, the study is of another search, or its folder holds what no search writes.

    Attributes:
        search: The search.
        optuna: Module of Optuna.
        trials: Optuna's study.
    """

    def __init__(self, search: Search) -> None:
        self.search, self.optuna = search, import_extra("optuna", "tune", "tools/tune.py")
        optuna: Any = self.optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # its warnings have tracebacks of what Ctrl-C has ended
        search.refuse_links()
        search.folder.mkdir(parents=True, exist_ok=True)
        self._journal = search.folder / "journal.log"
        self.trials: Any = optuna.create_study(
            study_name=search.cfg.study,
            storage=optuna.storages.JournalStorage(Journal(self._journal)),
            load_if_exists=True,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(),  # another seed in each process: they must not try the same
            pruner=self._pruner(),
        )
        self._refuse_other_search()
        ended, folder = f"{self.num_ended} of {search.cfg.trials}", paths.from_here(search.folder)
        say(f"{search.cfg.study}: {ended} trials have ended; {folder} has their logs", file=sys.stderr)

    def _pruner(self) -> Any:
        pruners: Any = self.optuna.pruners
        iterations = self.search.iterations
        if self.search.cfg.pruner == "hyperband":
            return pruners.HyperbandPruner(min_resource=max(1, iterations // 9), max_resource=iterations)
        if self.search.cfg.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=iterations // 5)
        return pruners.NopPruner()

    def _refuse_other_search(self) -> None:
        """Refuses another search: trials of one study are of one method, one space, and one training."""
        search, cfg = self.search, self.search.cfg
        now: dict[str, Any] = {"method": cfg.method}
        if cfg.method == "pbt":  # a population keeps its size
            now |= {"trials": cfg.trials, "grace": cfg.grace}
        now |= {key_of(word): value_of(word) for word in search.overrides if not key_of(word).startswith(MAY_DIFFER)}
        now |= {f"space of {key}": dict(allowed) for key, allowed in search.space.items()}
        before = self.trials.user_attrs.get("search")
        if before is None:
            self.trials.set_user_attr("search", now)
            return
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                was, got = (f"{key}={about[key]}" if key in about else f"no {key}" for about in (before, now))
                raise ConfigError(f"study={cfg.study} has {was}, got {got}. Try study={cfg.study}-1")
        space = self.distributions()
        for trial in self.trials.get_trials(deepcopy=False):
            for key, allowed in trial.distributions.items():
                if space.get(key) != allowed:
                    problem = f"trial {number_of(trial)} has {key}, which is not in the space, or in another range"
                    raise ConfigError(f"{self._journal}: {problem}. Try study={cfg.study}-1")

    def distributions(self) -> dict[str, Any]:
        """Returns the space in Optuna's words."""
        kinds: Any = self.optuna.distributions

        def distribution(allowed: Any) -> Any:
            if "choices" in allowed:
                return kinds.CategoricalDistribution(allowed["choices"])
            low, high = allowed["low"], allowed["high"]
            whole = isinstance(low, int) and isinstance(high, int)
            kind = kinds.IntDistribution if whole else kinds.FloatDistribution
            return kind(low, high, log=bool(allowed.get("log")))

        return {key: distribution(allowed) for key, allowed in self.search.space.items()}

    @property
    def num_ended(self) -> int:
        """Trials that have ended, in whatever way but that the user has stopped them."""
        states = self.optuna.trial.TrialState
        ended = self.trials.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED, states.FAIL))
        return sum(INTERRUPTED not in trial.user_attrs for trial in ended)

    def say_ended(self, place: int) -> None:
        """Shows a line about a trial that has ended; `place` is its place in the journal."""
        trial = self.trials.get_trials(deepcopy=False)[place]
        value = "" if trial.value is None else f", return {trial.value:.5g}"
        reason = f": {trial.user_attrs['failed']}" if "failed" in trial.user_attrs else ""
        text = f"{self.num_ended}/{self.search.cfg.trials}  trial {number_of(trial)} {_state(trial)}{value}{reason}"
        say(text, file=sys.stderr)

    def report(self) -> list[str]:
        """Writes table and pictures; returns lines for the user."""
        search, trials = self.search, sorted(self.trials.get_trials(deepcopy=False), key=number_of)
        table: list[list[Any]] = [["trial", "state", OBJECTIVE, *search.space, "run", "log"]]
        for trial in trials:
            values = [trial.params.get(key) for key in search.space]
            files = [self._run_of(trial), log_name(number_of(trial))]
            table.append([number_of(trial), _state(trial), trial.value, *values, *files])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(table)
        with replacing(search.folder / "trials.csv") as file:
            file.write(text.getvalue().encode())
        counts = Counter(map(_state, trials))
        unknown = {"running": "running or killed"}  # by other commands
        told = (f"{count} {unknown.get(state, state)}" for state, count in counts.items())
        lines = [f"{search.cfg.study}: {', '.join(told)}"]
        complete = [trial for trial in trials if _state(trial) == "complete"]
        if not complete:
            return [*lines, f"no trial was completed; {paths.from_here(search.folder)} has what each printed"]
        complete.sort(key=lambda trial: trial.value, reverse=True)
        lines += [f"  {trial.value:10.5g}  trial {number_of(trial)}  {_settings(trial)}" for trial in complete[:5]]
        lines.append("best:")
        if search.cfg.method != "pbt":  # whose settings have changed
            lines.append(f"  {command_of(search, complete[0].params)}")
        if run := self._run_of(complete[0]):
            lines.append(f"  python tools/play.py {shlex.quote(str(paths.from_here(Path(run))))}")
        lines.append(f"table: {paths.from_here(search.folder / 'trials.csv')}")
        if len(complete) > 1:
            lines += [f"picture: {paths.from_here(picture)}" for picture in self._draw()]
        return lines

    def _run_of(self, trial: Any) -> str:
        """Returns the run folder of a trial, as the names of files are made; empty where there is none."""
        name = Path(trial.user_attrs.get("run", "")).name
        folder = self.search.runs_of(number_of(trial)).absolute()
        return str(folder / name) if re.fullmatch(r"2[\w-]*", name, re.ASCII) else ""

    def _draw(self) -> list[Path]:
        """Draws parallel coordinates and importance, where matplotlib is there."""
        try:
            import matplotlib
        except ImportError:
            return []
        matplotlib.use("Agg")
        from optuna.visualization import matplotlib as drawing  # type: ignore[reportMissingImports]

        evaluator = self.optuna.importance.PedAnovaImportanceEvaluator()
        files = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is experimental
            for name, draw, told in (
                ("parallel_coordinates", drawing.plot_parallel_coordinate, "return"),
                ("importance", partial(drawing.plot_param_importances, evaluator=evaluator), "the return"),
            ):
                with suppress(ValueError, RuntimeError, ZeroDivisionError):  # too few trials that differ
                    axes: Any = draw(self.trials, target_name=told)
                    if name == "parallel_coordinates":
                        spread_out(axes)
                    with replacing(self.search.folder / f"{name}.png") as file:
                        axes.figure.savefig(file, format="png", dpi=120, bbox_inches="tight")
                    files.append(self.search.folder / f"{name}.png")
        return files


def spread_out(axes: Any) -> None:
    """Gives the axes of Optuna's parallel coordinates the room that their labels need."""
    figure = axes.figure
    names = [name.get_text() for name in axes.get_xticklabels()]
    figure.set_size_inches(AXIS_INCHES * len(names), 5.0)
    axes.set_title("settings of the trials; the darker, the higher the return", y=1.05)
    axes.set_xticks(axes.get_xticks(), [name.replace(".", ".\n") for name in names], rotation=0, ha="center")
    for other in list(figure.axes):
        if other is not axes and other.get_ylabel():
            other.remove()  # the colour bar repeats the first axis, behind the labels of the last one
            continue
        for label in (*other.get_yticklabels(), *other.get_yticklabels(minor=True)):
            if label.get_text():
                label.set(fontsize="small", bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5})


def number_of(trial: Any) -> int:
    """Returns the number of a trial in the names of its files. Ray Tune's are not in the order of their ends."""
    return trial.user_attrs.get("number", trial.number)


def _state(trial: Any) -> str:
    return INTERRUPTED if INTERRUPTED in trial.user_attrs else trial.state.name.lower()


def _settings(trial: Any) -> str:
    numbers = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in trial.params.items()}
    return "  ".join(f"{key}={value}" for key, value in numbers.items())
