"""Searches settings: each trial is a usual run, in a process and a run folder of its own. `tune` searches with Optuna.

Several processes, also on several machines with one folder, may search together: they share a journal, a file.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpusim_rl.distributed.trial_run import OBJECTIVE, TrialFailedError, TrialRun
from gpusim_rl.errors import ConfigError, closest, did_you_mean, import_extra, on_one_line
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import load_yaml, replacing
from gpusim_rl.settings.checks import check_settings
from gpusim_rl.settings.compose import compose
from gpusim_rl.settings.discover import tasks
from gpusim_rl.settings.overrides import key_of, value_of
from gpusim_rl.settings.schema import ALGORITHMS, RunConfig

SPACES = Path(__file__).parent / "spaces"
METHODS = ("optuna", "asha", "pbt")
"""`optuna` is here, `asha` and `pbt` are in ray_search.py."""
COUNTS = ("trials", "grace")
PRUNERS = ("hyperband", "median", "none")
MAY_DIFFER = ("device", "sim_device", "rl_device", "log.", "wandb_")
"""Beginnings of settings that trials of one study need not share."""
INTERRUPTED = "interrupted"
"""Of a trial that the user has stopped: it does not count."""
OWN = {
    "method": "optuna",
    "trials": "20",
    "pruner": "hyperband",
    "grace": "0",
    "reduction": "3",
    "study": "",
    "space": "",
    "stall_s": "600",
}
"""Settings of a search and their defaults; all others are those of a training."""


@dataclass(frozen=True)
class Search:
    """What is searched, and how.

    Attributes:
        study: Name of the search; those with one name in one folder go on where the other one is.
        space: For each setting its `low` and `high`, with `log`, or its `choices`.
        overrides: What all trials share, as typed behind `train.py`.
        config_dir: The user's folder (`-cd`).
        trials: Of the whole study.
        method: Of `METHODS`.
        pruner: What stops hopeless trials with `method=optuna`: one of `PRUNERS`.
        grace: With `asha`, iterations before a trial may be stopped; with `pbt`, between two changes of a member.
        reduction: With `asha`, one of so many trials goes on.
        stall_s: A trial without a new row of metrics for so long is stopped [s].
        iterations: Of a trial that is not stopped.
        folder: Of the journal, the table and the pictures; run folders are beside it.
    """

    study: str
    space: Mapping[str, Mapping[str, Any]]
    overrides: Sequence[str]
    config_dir: Path | None
    trials: int
    method: str
    pruner: str
    grace: int
    reduction: float
    stall_s: float
    iterations: int
    folder: Path


def read_search(words: Sequence[str], config_dir: Path | None = None) -> Search:
    """Read and check a command line of `tools/tune.py`.

    Args:
        words: `key=value`, of the search and of the training.
        config_dir: The user's folder (`-cd`).

    Raises:
        ConfigError: A setting is unknown, or a space cannot be searched.
    """
    method_of(words)
    chosen, overrides = split_words(words, OWN)
    if chosen["pruner"] not in PRUNERS:
        near = did_you_mean(chosen["pruner"], PRUNERS)
        raise ConfigError(f"unknown pruner {chosen['pruner']!r}.{near} Available: {', '.join(PRUNERS)}")
    numbers = {key: _positive(key, chosen[key]) for key in ("trials", "stall_s", "reduction")}
    grace = int(_positive("grace", chosen["grace"])) if chosen["grace"] != "0" else 0
    if numbers["reduction"] <= 1.0:
        raise ConfigError(f"reduction must be above 1: one of so many trials goes on, got {chosen['reduction']}")
    study, space, config = find_space(chosen, overrides, config_dir, OWN)
    if grace > int(config["max_iterations"]):
        raise ConfigError(f"grace must not be above max_iterations={config['max_iterations']}, got {grace}")
    folder, iterations, interval = Path(config["log"]["dir"]) / study, int(config["max_iterations"]), 1
    if chosen["method"] == "pbt":
        interval = int(config["log"]["interval"])  # a change needs a row of metrics and a checkpoint
    return Search(
        study=study,
        space=space,
        overrides=overrides,
        config_dir=config_dir,
        trials=int(numbers["trials"]),
        method=chosen["method"],
        pruner=chosen["pruner"],
        grace=-(-(grace or max(1, iterations // 9)) // interval) * interval,
        reduction=numbers["reduction"],
        stall_s=numbers["stall_s"],
        iterations=iterations,
        folder=folder,
    )


def split_words(words: Sequence[str], own: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The settings of a search, with their defaults `own`; and the words that are for the training.

    Raises:
        ConfigError: A word is not `key=value`.
    """
    for word in words:
        if "=" not in word:
            raise ConfigError(f"cannot read {word!r}: expected key=value")
    chosen = {key_of(word): value_of(word) for word in words if key_of(word) in own}
    return {**own, **chosen}, [word for word in words if key_of(word) not in own]


def method_of(words: Sequence[str]) -> str:
    """The method of a command line, `optuna` by default.

    Raises:
        ConfigError: A word is not `key=value`, or there is no such method.
    """
    method = split_words(words, {"method": OWN["method"]})[0]["method"]
    if method not in METHODS:
        near = did_you_mean(method, METHODS)
        raise ConfigError(f"unknown method {method!r}.{near} Available: {', '.join(METHODS)}")
    return method


def find_space(
    chosen: Mapping[str, str], overrides: Sequence[str], config_dir: Path | None, own: Mapping[str, str]
) -> tuple[str, dict[str, dict[str, Any]], dict[str, Any]]:
    """The name of a study, its space, and the composed configuration of the training.

    Args:
        chosen: `space` and `study`; where they are empty, those of the algorithm and the task.
        overrides: Of the training.
        config_dir: The user's folder (`-cd`).
        own: Settings of the search.

    Raises:
        ConfigError: There is no such setting, neither of the search nor of the training; or no such space, or it cannot
            be searched.
    """
    _refuse_unknown(overrides, own)
    config = compose(overrides, config_dir)
    settings = check_settings(config)
    file = Path(chosen["space"]) if chosen["space"] else SPACES / f"{settings['algo']}.yaml"
    if not file.is_file():
        what = f"space={file}: there is no such file" if chosen["space"] else f"there is no space for {file.stem}"
        raise ConfigError(f"{what}. Try space=<yaml>, such as {paths.from_here(SPACES / 'ppo.yaml')}")
    task = next((value_of(word) for word in overrides if key_of(word) == "task"), "Cartpole")
    method = chosen["method"]
    study = chosen["study"] or f"{task}-{settings['algo']}{'' if method == 'optuna' else f'-{method}'}"
    if study in tasks(config_dir, outside=True):
        raise ConfigError(f"study={study} is the name of a task, whose runs are in that folder. Try study={study}-1")
    if not re.fullmatch(r"[\w-][\w.-]*", study):
        raise ConfigError(f"study must be a folder name of A-Z a-z 0-9 . _ -, got {study!r}")
    return study, _check_space(load_yaml(file), file, settings["algo"], overrides, config_dir), config


def _refuse_unknown(overrides: Sequence[str], own: Mapping[str, str]) -> None:
    """Settings that are those of another method, or misspelt: as settings of a training they would get no good hint."""
    of_training = {field.name for field in dataclasses.fields(RunConfig)}
    for word in overrides:
        key = key_of(word)
        if "." in key or key in of_training:
            continue
        if near := closest(key, own, 0.75):
            raise ConfigError(f"unknown key {key!r}. Did you mean {near!r}?")


def _positive(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < math.inf or (key in COUNTS and number != int(number)):
        raise ConfigError(f"{key} must be a positive {'int' if key in COUNTS else 'number'}, got {text!r}")
    return number


def _number(value: Any) -> Any:
    """The number that a word of a yaml means: it takes 1e-3 for text."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+\.?\d*[eE][-+]?\d+", value)
    return float(value) if is_number else value


def _check_space(
    space: Any, file: Path, algo: str, overrides: Sequence[str], config_dir: Path | None
) -> dict[str, dict[str, Any]]:
    """A space whose every end is a setting that a training takes."""
    if not isinstance(space, dict) or not space:
        raise ConfigError(f"{file}: expected settings with low and high, or choices")
    for key, what in space.items():
        section = str(key).partition(".")[0]
        if section in ALGORITHMS and section != algo:
            raise ConfigError(
                f"{file}: {key} is a setting of algo={section}, and algo={algo} is trained. Try algo={section}"
            )
        if isinstance(what, dict):
            for name in ("low", "high"):
                what |= {name: _number(what[name])} if name in what else {}
            if isinstance(what.get("choices"), list):
                what["choices"] = [_number(choice) for choice in what["choices"]]
        choices = what.get("choices") if isinstance(what, dict) else None
        ends: Any = choices or ([what.get("low"), what.get("high")] if isinstance(what, dict) else [])
        known = isinstance(what, dict) and what.keys() <= ({"choices"} if choices else {"low", "high", "log"})
        if not known or len(ends) < 2 or not all(isinstance(end, int | float | str) for end in ends):
            raise ConfigError(f"{file}: {key}: expected {{low: a, high: b}}, or {{choices: [a, b]}}, got {what}")
        if not choices and not (ends[0] < ends[1] and (ends[0] > 0 or not what.get("log"))):
            raise ConfigError(f"{file}: {key}: low must be below high, and above 0 with log: true, got {what}")
        for end in ends:
            try:
                check_settings(compose([*overrides, f"{key}={end}"], config_dir))
            except ConfigError as error:
                raise ConfigError(f"{file}: {error}") from None
    return space


def tune(search: Search) -> list[str]:
    """Search until the study has its trials; writes `trials.csv` and pictures.

    Returns:
        Lines for the user: the best trials, and the command that repeats the best one.
    """
    optuna, study = open_study(search)

    def ended(study: Any, trial: Any) -> None:
        ahead = num_ended(optuna, study)
        tell(search, trial, ahead)
        if ahead >= search.trials:
            study.stop()

    if num_ended(optuna, study) < search.trials:
        try:
            study.optimize(lambda trial: _run(optuna, search, trial), callbacks=[ended], catch=(TrialFailedError,))
        except ValueError as error:
            raise ConfigError(f"{search.folder}: {error}. Try another study=<name>") from None
    return report(optuna, search, study)


def tell(search: Search, trial: Any, ended: int) -> None:
    """A line about a trial that has ended, one of so many.

    Args:
        search: What it is a part of.
        trial: Of Optuna.
        ended: Trials of the study that have ended.
    """
    value = "" if trial.value is None else f", return {trial.value:.5g}"
    reason = trial.user_attrs.get("failed")
    _say(f"{ended}/{search.trials}  trial {trial.number} {_state(trial)}{value}{f': {reason}' if reason else ''}")


def _say(text: str) -> None:
    sys.stderr.write(f"{on_one_line(text)}\n")
    sys.stderr.flush()


def _state(trial: Any) -> str:
    return INTERRUPTED if INTERRUPTED in trial.user_attrs else trial.state.name.lower()


def _settings(trial: Any) -> str:
    return "  ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in trial.params.items()
    )


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
        study_name=search.study,
        storage=optuna.storages.JournalStorage(backend),
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(),  # another seed in each process: they must not try the same
        pruner=_pruner(optuna, search),
    )
    _refuse_other_search(search, study)
    folder, ended = paths.from_here(search.folder), num_ended(optuna, study)
    _say(f"{search.study}: {ended} of {search.trials} trials have ended; {folder} has their logs")
    return optuna, study


def _refuse_other_search(search: Search, study: Any) -> None:
    """Trials of one study can be compared: all are of one method, one space, and one training."""
    training = {key_of(word): value_of(word) for word in search.overrides if not key_of(word).startswith(MAY_DIFFER)}
    now = {"method": search.method, **training, **{f"space of {key}": what for key, what in search.space.items()}}
    before = study.user_attrs.get("search")
    if before is None:
        study.set_user_attr("search", now)
        return
    for key in {**before, **now}:
        if before.get(key) != now.get(key):
            was, got = (f"{key}={about[key]}" if key in about else f"no {key}" for about in (before, now))
            raise ConfigError(f"study={search.study} has {was}, got {got}. Try study={search.study}-1")


def num_ended(optuna: Any, study: Any) -> int:
    """Trials of a study that have ended, in whatever way but that the user has stopped them."""
    states = optuna.trial.TrialState
    ended = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED, states.FAIL))
    return sum(INTERRUPTED not in trial.user_attrs for trial in ended)


def _pruner(optuna: Any, search: Search) -> Any:
    if search.pruner == "hyperband":
        least = max(1, search.iterations // 9)
        return optuna.pruners.HyperbandPruner(min_resource=least, max_resource=search.iterations)
    if search.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=search.iterations // 5)
    return optuna.pruners.NopPruner()


def _suggest(trial: Any, key: str, what: Mapping[str, Any]) -> Any:
    if "choices" in what:
        return trial.suggest_categorical(key, what["choices"])
    low, high, log = what["low"], what["high"], bool(what.get("log"))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(key, low, high, log=log)
    return trial.suggest_float(key, low, high, log=log)


def _run(optuna: Any, search: Search, trial: Any) -> float:
    """One trial: trains, tells the pruner how it goes, and stops it where it is hopeless."""
    run = TrialRun(search, trial.number, {key: _suggest(trial, key, what) for key, what in search.space.items()})
    newest = None
    try:
        trial.set_user_attr("command", run.command)
        trial.set_user_attr("log", run.printed.name)
        for iteration, newest in run.rows():
            trial.report(newest, iteration)
            if trial.should_prune():
                raise optuna.TrialPruned
        if newest is None:
            raise TrialFailedError(f"no {OBJECTIVE} was told")
    except TrialFailedError as error:
        trial.set_user_attr("failed", str(error))
        raise
    except (KeyboardInterrupt, SystemExit):
        trial.set_user_attr(INTERRUPTED, True)
        raise
    finally:
        run.end()
        trial.set_user_attr("run", run.folder)
    return newest


def report(optuna: Any, search: Search, study: Any) -> list[str]:
    """Table, pictures and lines of what was found."""
    trials = study.get_trials(deepcopy=False)
    states = optuna.trial.TrialState
    header = ["trial", "state", OBJECTIVE, *search.space, "run", "log"]
    table = []
    for trial in trials:
        values = (trial.params.get(key) for key in search.space)
        where = (trial.user_attrs.get(name, "") for name in ("run", "log"))
        table.append([trial.number, _state(trial), trial.value, *values, *where])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *table])
    with replacing(search.folder / "trials.csv") as file:
        file.write(text.getvalue().encode())
    counts = Counter(map(_state, trials))
    told = [f"{search.study}: " + ", ".join(f"{count} {name}" for name, count in counts.items())]
    best = sorted(
        (trial for trial in trials if trial.state == states.COMPLETE), key=lambda trial: -(trial.value or -math.inf)
    )
    if not best:
        return [*told, f"no trial was completed; {paths.from_here(search.folder)} has what each printed"]
    told += [f"  {trial.value:10.5g}  trial {trial.number}  {_settings(trial)}" for trial in best[:5]]
    told += ["best:", f"  {best[0].user_attrs['command']}"]
    if run := best[0].user_attrs.get("run"):
        told.append(f"  python tools/play.py {paths.from_here(Path(run))}")
    told.append(f"table: {paths.from_here(search.folder / 'trials.csv')}")
    if len(best) > 1:
        told += [f"picture: {paths.from_here(picture)}" for picture in _draw(optuna, search, study)]
    return told


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
