"""Searches settings: each trial is a usual run, in a process and a run folder of its own. `tune` searches with Optuna.

Several processes, also on several machines with one folder, may search together: they share a journal, a file. Every
method has this journal, and the table and the pictures of it.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpusim_rl.distributed.search import Search
from gpusim_rl.distributed.trial_run import OBJECTIVE, TrialFailedError, TrialRun
from gpusim_rl.errors import ConfigError, import_extra, on_one_line
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import replacing
from gpusim_rl.settings.overrides import key_of, value_of

MAY_DIFFER = ("device", "sim_device", "rl_device", "log.", "wandb_")
"""Beginnings of settings that trials of one study need not share."""
INTERRUPTED = "interrupted"
"""Mark of a trial that the user has stopped: it does not count."""


def tune(search: Search) -> list[str]:
    """Search until the study has its trials; writes `trials.csv` and pictures.

    Returns:
        Lines for the user: the best trials, and the command that repeats the best one.
    """
    optuna, study = open_study(search)
    while num_ended(optuna, study) < search.cfg.trials:
        trial = study.ask(distributions(optuna, search))
        try:
            value = _run(optuna, search, trial)
        except TrialFailedError as error:
            trial.set_user_attr("failed", str(error))
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        except optuna.TrialPruned:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        except BaseException:
            trial.set_user_attr(INTERRUPTED, True)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            raise
        else:
            study.tell(trial, value)
        say_ended(search, study.get_trials(deepcopy=False)[trial.number], num_ended(optuna, study))
    return report(optuna, search, study)


def _run(optuna: Any, search: Search, trial: Any) -> float:
    """One trial: trains, tells the pruner how it goes, and stops it where it is hopeless."""
    run = TrialRun(search, trial.number, trial.params)
    newest = None
    try:
        trial.set_user_attr("command", run.command)
        trial.set_user_attr("log", run.printed.name)
        for iteration, newest in run.rows():
            trial.report(newest, iteration)
            if trial.should_prune():
                raise optuna.TrialPruned
    finally:
        run.end()
        trial.set_user_attr("run", run.folder)
    if newest is None:
        raise TrialFailedError(f"no {OBJECTIVE} was told")
    return newest


# The study


def open_study(search: Search) -> tuple[Any, Any]:
    """Optuna, and the study in its journal: a new one, or as it was left.

    Raises:
        ConfigError: There is no Optuna, or the study is of another search.
    """
    optuna = import_extra("optuna", "tune", "tools/tune.py")
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # its warnings have tracebacks of what Ctrl-C has ended
    search.folder.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(search.folder / "journal.log"))
    study = optuna.create_study(
        study_name=search.cfg.study,
        storage=optuna.storages.JournalStorage(backend),
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(),  # another seed in each process: they must not try the same
        pruner=_pruner(optuna, search),
    )
    _refuse_other_search(search, study)
    folder, ended = paths.from_here(search.folder), num_ended(optuna, study)
    say(f"{search.cfg.study}: {ended} of {search.cfg.trials} trials have ended; {folder} has their logs")
    return optuna, study


def _pruner(optuna: Any, search: Search) -> Any:
    if search.cfg.pruner == "hyperband":
        least = max(1, search.iterations // 9)
        return optuna.pruners.HyperbandPruner(min_resource=least, max_resource=search.iterations)
    if search.cfg.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=search.iterations // 5)
    return optuna.pruners.NopPruner()


def _refuse_other_search(search: Search, study: Any) -> None:
    """Trials of one study can be compared: all are of one method, one space, and one training."""
    now: dict[str, Any] = {"method": search.cfg.method}
    if search.cfg.method == "pbt":  # a population keeps its size
        now |= {"trials": search.cfg.trials, "grace": search.cfg.grace}
    now |= {key_of(word): value_of(word) for word in search.overrides if not key_of(word).startswith(MAY_DIFFER)}
    now |= {f"space of {key}": dict(allowed) for key, allowed in search.space.items()}
    before = study.user_attrs.get("search")
    if before is None:
        study.set_user_attr("search", now)
        return
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            was, got = (f"{key}={about[key]}" if key in about else f"no {key}" for about in (before, now))
            name = search.cfg.study
            raise ConfigError(f"study={name} has {was}, got {got}. Try study={name}-1")


def distributions(optuna: Any, search: Search) -> dict[str, Any]:
    """The space in Optuna's words."""

    def distribution(allowed: Any) -> Any:
        if "choices" in allowed:
            return optuna.distributions.CategoricalDistribution(allowed["choices"])
        low, high, log = allowed["low"], allowed["high"], bool(allowed.get("log"))
        whole = isinstance(low, int) and isinstance(high, int)
        kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
        return kind(low, high, log=log)

    return {key: distribution(allowed) for key, allowed in search.space.items()}


def num_ended(optuna: Any, study: Any) -> int:
    """Trials of a study that have ended, in whatever way but that the user has stopped them."""
    states = optuna.trial.TrialState
    ended = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED, states.FAIL))
    return sum(INTERRUPTED not in trial.user_attrs for trial in ended)


def number_of(trial: Any) -> int:
    """Number of a trial in the names of its run folder and its log. Ray Tune's are not in the order of their ends."""
    return trial.user_attrs.get("number", trial.number)


# What the user is told


def say(text: str) -> None:
    """Shows a line of progress."""
    sys.stderr.write(f"{on_one_line(text)}\n")
    sys.stderr.flush()


def say_ended(search: Search, trial: Any, ended: int) -> None:
    """Shows a line about a trial that has ended.

    Args:
        search: Search that it is a part of.
        trial: Trial of Optuna.
        ended: Trials of the study that have ended.
    """
    value = "" if trial.value is None else f", return {trial.value:.5g}"
    reason = trial.user_attrs.get("failed")
    reason = f": {reason}" if reason else ""
    say(f"{ended}/{search.cfg.trials}  trial {number_of(trial)} {_state(trial)}{value}{reason}")


def _state(trial: Any) -> str:
    return INTERRUPTED if INTERRUPTED in trial.user_attrs else trial.state.name.lower()


def report(optuna: Any, search: Search, study: Any) -> list[str]:
    """Table, pictures and lines of what was found."""
    trials = sorted(study.get_trials(deepcopy=False), key=number_of)
    table: list[list[Any]] = [["trial", "state", OBJECTIVE, *search.space, "run", "log"]]
    for trial in trials:
        values = (trial.params.get(key) for key in search.space)
        where = (trial.user_attrs.get(name, "") for name in ("run", "log"))
        table.append([number_of(trial), _state(trial), trial.value, *values, *where])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    with replacing(search.folder / "trials.csv") as file:
        file.write(text.getvalue().encode())
    counts = Counter(map(_state, trials))
    lines = [f"{search.cfg.study}: " + ", ".join(f"{count} {state}" for state, count in counts.items())]
    complete = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
    if not complete:
        return [*lines, f"no trial was completed; {paths.from_here(search.folder)} has what each printed"]
    complete.sort(key=lambda trial: -(trial.value or -math.inf))
    lines += [f"  {trial.value:10.5g}  trial {number_of(trial)}  {_settings(trial)}" for trial in complete[:5]]
    best = complete[0].user_attrs
    lines.append("best:")
    if search.cfg.method != "pbt":  # whose settings have changed
        lines.append(f"  {best['command']}")
    if run := best.get("run"):
        lines.append(f"  python tools/play.py {paths.from_here(Path(run))}")
    lines.append(f"table: {paths.from_here(search.folder / 'trials.csv')}")
    if len(complete) > 1:
        lines += [f"picture: {paths.from_here(picture)}" for picture in _draw(optuna, search, study)]
    return lines


def _settings(trial: Any) -> str:
    numbers = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in trial.params.items()}
    return "  ".join(f"{key}={value}" for key, value in numbers.items())


def _draw(optuna: Any, search: Search, study: Any) -> list[Path]:
    """Parallel coordinates and importance, where matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        return []
    import warnings

    matplotlib.use("Agg")
    from optuna.visualization import matplotlib as drawing  # type: ignore[reportMissingImports]

    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    drawn = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is experimental
        for name, make in (
            ("parallel_coordinates", lambda: drawing.plot_parallel_coordinate(study)),
            ("importance", lambda: drawing.plot_param_importances(study, evaluator=evaluator)),
        ):
            with suppress(ValueError, RuntimeError, ZeroDivisionError):  # too few trials that differ
                axes: Any = make()
                file = search.folder / f"{name}.png"
                axes.figure.savefig(file, dpi=120, bbox_inches="tight")
                drawn.append(file)
    return drawn
