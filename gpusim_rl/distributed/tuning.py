"""Hyperparameter search with Optuna, and study storage for all methods: SQLite database and table."""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gpusim_rl.distributed.search import Search
from gpusim_rl.distributed.trial_run import LOG_NAME, OBJECTIVE, TrialFailedError, TrialRun
from gpusim_rl.errors import ConfigError, first_line, import_extra, say
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import lock, open_file, replacing
from gpusim_rl.settings.overrides import key_of, value_of

MAY_DIFFER = ("device", "sim_device", "rl_device", "log.", "wandb_")
"""Prefixes of settings that may differ between trials of a study."""
INTERRUPTED = "interrupted"  # attribute of trials that the user stopped; they do not count
DATABASE = "study.db"
LOCK_S = 60.0  # timeout for another process's write to the database [s]
FOREIGN = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that Optuna raises for a database that is malformed, untrusted or from a newer Optuna."""
SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
"""End of a rollback journal that names a super-journal, a file that SQLite would delete."""


def tune(search: Search) -> list[str]:
    """Search with Optuna until the study has all its trials; return `Study.report`."""
    with database_errors(search):
        study = Study(search)
        states, distributions = study.optuna.trial.TrialState, study.distributions()
        while study.num_ended < search.cfg.trials:
            with database_errors(search, *FOREIGN):
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


@contextmanager
def database_errors(search: Search, *more: type[Exception]) -> Iterator[None]:
    """Convert database errors, and errors of the types `more`, to a one-line ConfigError."""
    optuna: Any = import_extra("optuna", "tune", "tune")
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except ConfigError:
        raise
    except (SQLAlchemyError, sqlite3.Error, optuna.exceptions.StorageInternalError, *more) as error:
        cause = error.__cause__ or error
        cause = getattr(cause, "orig", None) or cause
        problem = repr(cause) if isinstance(cause, LookupError) else first_line(cause)
        tip = "Try " if isinstance(error, more) else "Try the same command, which resumes the study, or "
        raise ConfigError(problem, key=str(search.folder / DATABASE), hint=f"{tip}study={search.cfg.study}-1") from None


def _run(study: Study, trial: Any) -> float:
    """Train a trial until it ends or is pruned; return its last objective."""
    run = TrialRun(study.search, trial.number, {key: trial.params[key] for key in study.search.space})
    newest = None
    try:
        for iteration, newest in run.rows():
            trial.report(newest, iteration)
            with database_errors(study.search, *FOREIGN):
                if trial.should_prune():
                    raise study.optuna.TrialPruned
    finally:
        run.end()
        trial.set_user_attr("run", run.folder)
    if newest is None:
        raise TrialFailedError(f"no {OBJECTIVE} was logged")
    return newest


class Study:
    """New or existing study in Optuna's database; `trials` is Optuna's study.

    Raises ConfigError if the study belongs to another search.
    """

    def __init__(self, search: Search) -> None:
        self.search, self.optuna = search, import_extra("optuna", "tune", "tune")
        optuna: Any = self.optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # its warnings include tracebacks of interrupted trials
        search.refuse_links()
        search.folder.mkdir(parents=True, exist_ok=True)
        _check_files(search.folder / DATABASE)
        engine = {"creator": partial(_connect, search.folder / DATABASE)}
        with open_file(search.folder / "study.lock", "ab") as file, database_errors(search, *FOREIGN):
            while not lock(file):  # only one process may create Optuna's tables
                time.sleep(0.05)
            _check_schema(search.folder / DATABASE)
            self.trials: Any = optuna.create_study(
                study_name=search.cfg.study,
                storage=optuna.storages.RDBStorage(f"sqlite:///{DATABASE}", engine),
                load_if_exists=True,
                direction="maximize",
                sampler=optuna.samplers.TPESampler(),  # unseeded: processes must not sample the same settings
                pruner=self._pruner(),
            )
            self._refuse_other_search()
            self._check_trials()
        progress, logs = f"{self.num_ended}/{search.cfg.trials} trials", paths.from_here(search.folder)
        say(f"{search.cfg.study}: {progress} have ended, logs in {logs}", file=sys.stderr)

    def _pruner(self) -> Any:
        pruners: Any = self.optuna.pruners
        iterations = self.search.iterations
        if self.search.cfg.pruner == "hyperband":
            return pruners.HyperbandPruner(min_resource=max(1, iterations // 9), max_resource=iterations)
        if self.search.cfg.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=iterations // 5)
        return pruners.NopPruner()

    def _refuse_other_search(self) -> None:
        """Raise ConfigError for a study with another method, space or training settings."""
        search, cfg, study = self.search, self.search.cfg, f"study={self.search.cfg.study}"
        now: dict[str, Any] = {"method": cfg.method}
        if cfg.method == "pbt":  # populations have a fixed size
            now |= {"trials": cfg.trials, "grace": cfg.grace}
        now |= {key_of(word): value_of(word) for word in search.overrides if not key_of(word).startswith(MAY_DIFFER)}
        now |= {f"space of {key}": dict(allowed) for key, allowed in search.space.items()}
        before = dict(self.trials.user_attrs.get("search") or {})
        if not before:
            self.trials.set_user_attr("search", now)
        for key in {**before, **now} if before else ():
            if before.get(key) != now.get(key):
                was, got = (f"{key}={about[key]}" if key in about else f"no {key}" for about in (before, now))
                raise ConfigError(f"was started with {was}, but now {got}", key=study, hint=f"Try {study}-1")

    def _check_trials(self) -> None:
        """Raise ValueError for trials on which Optuna or the report would fail."""
        kinds, _ = self.distributions(), self.trials.direction  # RuntimeError if the study has several objectives
        for trial in self.trials.get_trials(deepcopy=False):
            complete, waits = trial.state.name == "COMPLETE", trial.state.name == "WAITING"
            strange = any(kinds.get(key, kind) != kind for key, kind in trial.distributions.items())
            if waits or strange or (complete and not isinstance(trial.value, float)):
                raise ValueError(f"trial {trial.number} does not belong to this search")

    def distributions(self) -> dict[str, Any]:
        """Return the search space as Optuna distributions."""
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
        """Number of ended trials, excluding interrupted ones."""
        trials = self.trials.get_trials(deepcopy=False)
        return sum(trial.state.is_finished() and INTERRUPTED not in trial.user_attrs for trial in trials)

    def say_ended(self, place: int) -> None:
        """Print a line about the ended trial at index `place` of the study."""
        trial = self.trials.get_trials(deepcopy=False)[place]
        value = "" if trial.value is None else f", return {trial.value:.5g}"
        reason = f": {trial.user_attrs['failed']}" if "failed" in trial.user_attrs else ""
        text = f"{self.num_ended}/{self.search.cfg.trials}  trial {number_of(trial)} {_state(trial)}{value}{reason}"
        say(text, file=sys.stderr)

    def report(self) -> list[str]:
        """Write `trials.csv`; return lines with the best trials and a command for the best one."""
        search, trials = self.search, sorted(self.trials.get_trials(deepcopy=False), key=number_of)
        rows = [
            {"trial": number_of(trial), "state": _state(trial), OBJECTIVE: trial.value}
            | {key: trial.params.get(key) for key in search.space}
            | {"run": self._run_of(trial), "log": LOG_NAME.format(number_of(trial))}
            for trial in trials
        ]
        with replacing(search.folder / "trials.csv") as table:
            table.write(csv_text(rows))
        names = {"running": "running or killed"}
        counts = (f"{count} {names.get(state, state)}" for state, count in Counter(map(_state, trials)).items())
        lines = [f"{search.cfg.study}: {', '.join(counts)}"]
        complete = [trial for trial in trials if _state(trial) == "complete"]
        if not complete:
            return [*lines, f"no trial completed; see the logs in {paths.from_here(search.folder)}"]
        complete.sort(key=lambda trial: trial.value, reverse=True)
        for trial in complete[:5]:
            settings = (f"{key}={f'{it:.4g}' if isinstance(it, float) else it}" for key, it in trial.params.items())
            lines.append(f"  {trial.value:10.5g}  trial {number_of(trial)}  {'  '.join(settings)}")
        lines.append("best:")
        if search.cfg.method != "pbt":  # pbt changes settings during the run
            best = (f"{key}={value}" for key, value in complete[0].params.items() if key in search.space)
            lines.append(f"  {shlex.join(['python', 'train.py', *search.overrides, *best])}")
        if run := self._run_of(complete[0]):
            lines.append(f"  gpusim-rl play {shlex.quote(str(paths.from_here(Path(run))))}")
        lines.append(f"table: {paths.from_here(search.folder / 'trials.csv')}")
        return lines

    def _run_of(self, trial: Any) -> str:
        """Return a trial's run folder, rebuilt from its name; empty if unknown."""
        name = Path(str(trial.user_attrs.get("run", ""))).name
        folder = self.search.runs_of(number_of(trial)).absolute()
        return str(folder / name) if re.fullmatch(r"2[\w-]*", name, re.ASCII) else ""


def _check_files(file: Path) -> None:
    """Refuse an untrusted database that refers to other files.

    Call before the first connection: closing the file would drop this process's SQLite locks.
    """
    with open_file(file, "ab+") as database:  # refuses links, pipes and hard links
        database.seek(18)
        if database.read(1) == b"\2":
            raise ConfigError("unexpected WAL mode", key=str(file), hint="Try PRAGMA journal_mode=DELETE")
    for other in (f"{file}-wal", f"{file}-shm"):  # SQLite would write to them
        if os.path.lexists(other):
            raise ConfigError("unexpected file next to the database", key=other, hint="Try removing it")
    if os.path.lexists(f"{file}-journal"):
        with open_file(Path(f"{file}-journal"), "ab+") as journal:
            journal.seek(max(0, journal.seek(0, 2) - len(SUPER_JOURNAL)))
            if journal.read() == SUPER_JOURNAL:
                raise ConfigError("refers to another file", key=f"{file}-journal", hint="Try removing it")


def _connect(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, timeout=LOCK_S)
    connection.execute("PRAGMA trusted_schema=OFF")
    return connection


def _check_schema(file: Path) -> None:
    """Raise ValueError for views, triggers and virtual tables, which could run code."""
    kinds = ("CREATE TABLE *", "CREATE INDEX *", "CREATE UNIQUE INDEX *")
    query = "SELECT name FROM sqlite_master WHERE NOT (sql GLOB ? OR sql GLOB ? OR sql GLOB ?)"
    with closing(_connect(file)) as connection:  # not read-only: rolls back the journal of a killed search
        if found := connection.execute(query, kinds).fetchone():
            raise ValueError(f"contains {found[0]!r}, which is not a plain table or index")


def csv_text(rows: Sequence[Mapping[str, Any]], header: bool = True) -> bytes:
    """Format rows, all with the same columns, as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else (), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def number_of(trial: Any) -> int:
    """Return the trial number used in file names; with Ray Tune, it differs from the study's order."""
    number = trial.user_attrs.get("number")
    return number if isinstance(number, int) else trial.number


def _state(trial: Any) -> str:
    return INTERRUPTED if INTERRUPTED in trial.user_attrs else trial.state.name.lower()
