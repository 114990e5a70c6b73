"""What a run writes: console, metrics files, checkpoints. `Logger` receives a `RunStatus` once per iteration."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths
from gpusim_rl.files.checkpoint_file import save
from gpusim_rl.run.checkpoint import Checkpoints
from gpusim_rl.run.console import Console
from gpusim_rl.run.log_interval import LogRow
from gpusim_rl.run.metrics import Row
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.writers import CsvWriter, TensorboardWriter, WandbWriter, Writer, Writers
from gpusim_rl.settings.schema import RunConfig
from gpusim_rl.settings.trust import strange_classes

SAVE_INTERVAL_S = 60.0
"""last.pt is at most this old, however long an iteration takes; a kill costs no more than that."""

BEST_INTERVAL_S = 10.0
"""best.pt is written when the mean return has improved, but not more often: early on it improves all the time."""

DIVERGED, SKIPPED = "diverged.pt", "skipped.pt"
"""Dumps in the run folder: before the first divergence; where no gradient was finite any more."""

EVAL_LOG = "eval.log"
"""What the process of evaluations prints, in the run folder."""

ONCE = {
    "sim/overflow": (
        "{number:.0f} envs dropped contacts or limits because a buffer was full; double sim.njmax and sim.nconmax (the"
        " start of the run shows them)"
    ),
    "policy/skipped_minibatches": (
        "the gradient of {number:.0f} minibatches was NaN or infinite; such minibatches change nothing, and are counted"
        " in policy/skipped_minibatches"
    ),
}
"""What is said the first time that a number is not 0."""

CAUSES = {
    "physics": "its physics",
    "action": "its action, which is NaN or infinite",
    "apply_action": "{task}.apply_action(), which gave it a control or a force that is NaN or infinite",
}
"""Why the first env diverged, by `cause` of the NaN guard."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How far a training is.

    Attributes:
        iteration: Iterations done.
        rows: Rows of metrics that have arrived since the last status.
        mean_return: Trimmed mean return over a full window in the newest row; None where the window is not full.
        best_return: Best of all.
        stopping: A signal asked for the end.
        diverged: State and action before the first divergence, the first time a row reports one.
    """

    iteration: int
    rows: tuple[LogRow, ...]
    mean_return: float | None
    best_return: float | None
    stopping: bool
    diverged: Mapping[str, Any] | None = None


class Logger:
    """Opens with the run, records every iteration, and closes with what the user needs next.

    Args:
        cfg: The run.
        run_dir: Where to write.
        wandb_id: Of the run on Weights & Biases.
        resumed_at: Iteration of the checkpoint that the run continues from; None for a new run.
        best_return: Best trimmed mean return of the run so far; where evaluations decide what best.pt is, theirs.
        metrics_csv: `CsvWriter.digest` of the checkpoint, where the run continues in its folder; None is not known.
        config_dir: The user's folder (`-cd`), for the commands that continue from the run.
    """

    def __init__(
        self,
        cfg: RunConfig,
        run_dir: RunDir,
        *,
        wandb_id: str,
        resumed_at: int | None = None,
        best_return: float | None = None,
        metrics_csv: Mapping[str, Any] | None = None,
        config_dir: Path | None = None,
    ) -> None:
        self._cfg = cfg
        self.run_dir = run_dir
        self._checkpoints = Checkpoints(run_dir.checkpoints, cfg.log.keep)
        self.console = Console(cfg.log.console, cfg.max_iterations, run_dir.train_log)
        self._csv = CsvWriter(run_dir.metrics_csv, resumed_at, digest=metrics_csv, warn=self.console.warn)
        writers: list[Writer] = [self._csv]
        if cfg.log.tensorboard:
            writers.append(TensorboardWriter(run_dir.path / "tensorboard", resumed_at))
        if cfg.wandb_activate:
            writers.append(
                WandbWriter(
                    run_dir,
                    project=cfg.wandb_project,
                    entity=cfg.wandb_entity,
                    group=cfg.wandb_group,
                    name=cfg.wandb_name,
                    tags=cfg.wandb_tags,
                    run_id=wandb_id,
                    info=self.console.info,
                )
            )
        self._writers = Writers(writers, self.console.warn)
        self._saved_at = time.perf_counter()
        # The iteration of the newest checkpoint; None before the first one in this folder.
        self._saved = resumed_at if self._checkpoints.last.exists() else None
        self._row: Row = {}
        self._reported: set[str] = set()  # of ONCE
        self._of_script = False  # its classes are of the script that was started
        self._of_user = False  # or of a module of the user's, which a command imports only where told to
        self._config_dir = config_dir
        # Mean return of best.pt; None before there is one. Until then the newest policy is the best: its mean is over
        # the most episodes, and one lucky episode must not stand for the whole run.
        self._best_saved = best_return if self._checkpoints.best.exists() else None
        self._evaluations_decide = cfg.eval.interval > 0

    def __enter__(self) -> Logger:
        return self

    def start(self, banner: list[tuple[str, str]], config: Mapping[str, Any]) -> None:
        """Shows what the run is.

        Args:
            banner: Label and text, at most 12 lines.
            config: The composed configuration.
        """
        strange = strange_classes(config)
        self._of_script = any(target.startswith("__main__.") for _, target in strange)
        self._of_user = bool(strange)
        self.console.start(banner)
        if self._cfg.log.print_config:
            self.console.info(yaml.safe_dump(dict(config), sort_keys=False))
        self._writers.start(config)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cfg.eval.interval:
            with suppress(OSError):  # of an evaluation that did not end
                self._checkpoints.end_evaluation(best=False)
        if kind is not None:
            self.console.note(f"ended by {kind.__name__}: {error}")
        self._writers.close(0 if kind is None else 1)
        self.console.close()

    def note(self, metadata: Mapping[str, Any]) -> None:
        """Writes to env.json what the run has chosen by itself."""
        try:
            self.run_dir.note(metadata)
        except (OSError, ValueError) as error:  # a full disk; a file that somebody edited
            self.console.warn(f"env.json cannot be written ({error}); training continues")

    def record(self, status: RunStatus) -> None:
        """Publishes the rows that have arrived."""
        for row in status.rows:
            self._row = numbers = row.numbers
            self._writers.write(row.iterations[-1], numbers)
            self.console.update(numbers)
            for name, text in ONCE.items():
                if numbers.get(name) and name not in self._reported:
                    self._reported.add(name)
                    self.console.warn(text.format(number=numbers[name]))
        if status.diverged is not None:
            self._write_diverged(status.diverged)

    def _write_diverged(self, state: Mapping[str, Any]) -> None:
        """Writes the state before the first divergence, once, so that a user can replay it."""
        if (self.run_dir.path / DIVERGED).exists():
            return
        how = self.dump(DIVERGED, state)
        cause = CAUSES[state["cause"]].format(task=state["task"])
        self.console.warn(
            f"{state['diverged_envs']} of {self._cfg.num_envs} envs diverged, env {state['env']} first because of"
            f" {cause}; such envs are reset and left out of learning, and counted in sim/diverged. {how} shows it"
        )

    def dump(self, name: str, state: Mapping[str, Any]) -> str:
        """Writes a file that shows what went wrong; returns the command that replays it."""
        try:
            save(self.run_dir.path / name, state)
        except OSError as error:
            self.console.warn(f"{name} cannot be written ({error})")
        return self.replay(name)

    def replay(self, name: str) -> str:
        """The command that replays a dump."""
        return f"{command('play')} --replay {shlex.quote(f'{self.run_dir}/{name}')}"

    # Checkpoints

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint of this run; None before the first one."""
        return None if self._saved is None else self._checkpoints.last

    def checkpoint_due(self, status: RunStatus) -> bool:
        """Whether the state after this iteration is to be saved."""
        age_s = time.perf_counter() - self._saved_at
        better = self._is_better(status) and age_s > BEST_INTERVAL_S
        last = status.iteration == self._cfg.max_iterations
        return self._numbered(status) or last or better or status.stopping or age_s > SAVE_INTERVAL_S

    def save(self, status: RunStatus, state: Mapping[str, Any]) -> None:
        """Writes last.pt, and best.pt if the mean return is above that of the old one, or that is not known.

        Args:
            status: Of the training now.
            state: What a run that continues from here needs.
        """
        self._saved_at = time.perf_counter()
        try:
            best_evaluation = self._best_saved if self._evaluations_decide else None
            self._checkpoints.save_last(
                {**state, "best_evaluation": best_evaluation, "metrics_csv": self._csv.digest()}
            )
            self._saved = status.iteration
            if self._is_better(status) or self._best_saved is None:
                self._checkpoints.save_best()
                self._best_saved = None if self._evaluations_decide else status.mean_return
            if self._numbered(status):
                self._checkpoints.save_numbered(status.iteration)
        except OSError as error:
            self.console.warn(f"checkpoint NOT saved ({error}); training continues, and the next one is tried")

    # Evaluations beside the training

    def save_evaluated(self, state: Mapping[str, Any]) -> Path | None:
        """Writes the checkpoint of a policy that is to be evaluated; None where it cannot be written."""
        try:
            return self._checkpoints.save_evaluated(state)
        except OSError as error:
            self.console.warn(
                f"iteration {state['iteration']} is not evaluated: its checkpoint cannot be written ({error})"
            )
            return None

    def end_evaluation(self, numbers: Row) -> None:
        """Shows the result of an evaluation; its checkpoint is best.pt if none before had a higher mean return."""
        shown = [f"{name.removeprefix('eval/')} {value:.5g}" for name, value in numbers.items() if value is not None]
        self.console.info(f"evaluation: {', '.join(shown)}")
        now = numbers["eval/return"]
        better = now is not None and math.isfinite(now) and (self._best_saved is None or now > self._best_saved)
        try:
            self._checkpoints.end_evaluation(best=better)
        except OSError as error:
            self.console.warn(f"best.pt cannot be written ({error})")
        if better:
            self._best_saved = now

    def evaluations_failed(self, reason: str) -> None:
        """Says that there will be no more evaluations; without any, the returns of the training decide again."""
        self._evaluations_decide = self._best_saved is not None
        why = f"{reason.removesuffix('.')}; {self.run_dir}/{EVAL_LOG} has the rest"
        stays = ", and best.pt stays" if self._evaluations_decide else ""
        self.console.warn(f"no more evaluations ({why}); training continues without them{stays}")

    def is_saved(self, status: RunStatus) -> bool:
        """Whether the newest checkpoint is of this iteration."""
        return self._saved == status.iteration

    def _numbered(self, status: RunStatus) -> bool:
        return status.iteration % self._cfg.log.checkpoint_interval == 0

    def _is_better(self, status: RunStatus) -> bool:
        """The policy is better than that of best.pt: a record may have passed before it was due to be saved."""
        now = None if self._evaluations_decide else status.mean_return
        return now is not None and (self._best_saved is None or now > self._best_saved)

    def finish(self, status: RunStatus, *, left: bool = False) -> Row:
        """Writes the summary, and prints the commands that continue from here.

        Args:
            status: Of the training now.
            left: The iteration after it was left before its end; the newest checkpoint stays, whichever it is.

        Returns:
            The last row of metrics.

        Raises:
            ConfigError: The end of the training could not be saved.
        """
        self._writers.summary({"best_return": status.best_return, **self._row})
        last = self._saved
        newest = "there is no checkpoint" if last is None else f"the newest checkpoint is of iteration {last}"
        if left:
            self.console.info(f"left iteration {status.iteration + 1} before its end; {newest}")
        elif not self.is_saved(status):
            raise ConfigError(
                f"the checkpoint of iteration {status.iteration} could not be written to {self.run_dir}; {newest}"
            )
        if last is not None:
            self.console.footer(self._next(status))
        return self._row

    def _next(self, status: RunStatus) -> list[str]:
        """Commands for the run as it is now."""
        run = shlex.quote(str(self.run_dir))
        ended = status.iteration >= self._cfg.max_iterations  # it would end at once
        further = [f"max_iterations={2 * status.iteration}"] if ended else []
        plot = f"{command('plot')} {run}"
        if self._of_script:
            arguments = ", ".join(["...", f"checkpoint={str(self.run_dir)!r}", *further])
            return [f"gpusim_rl.train({arguments})  in the script with its classes: no command can import them", plot]
        folder, trusts, trust = [], [], []
        if self._of_user and self._config_dir is not None:
            folder = ["-cd", shlex.quote(str(paths.from_here(self._config_dir)))]
        elif self._of_user:
            trusts, trust = ["trust=true"], ["--trust"]
        program = command("train")
        if self._cfg.multi_gpu:
            count = os.environ.get("LOCAL_WORLD_SIZE", "1")
            program = f"torchrun --nproc-per-node={count} {program.removeprefix('python ')}"
        train = " ".join([program, *folder, f"checkpoint={run}", *further, *trusts])
        return [*(" ".join([command(tool), run, *folder, *trust]) for tool in ("play", "record")), train, plot]


class SilentLogger(Logger):
    """Of a process that learns together with others, and is not the first: it shows and writes nothing.

    Args:
        cfg: The run.
        run_dir: Where the first process writes.
        resumed_at: Iteration of the checkpoint that the run continues from; None for a new run.
    """

    def __init__(self, cfg: RunConfig, run_dir: RunDir, *, resumed_at: int | None) -> None:
        self._cfg, self.run_dir = cfg, run_dir
        self.console = Console("quiet", cfg.max_iterations, None)
        self._checkpoints = Checkpoints(run_dir.checkpoints, cfg.log.keep)
        self._saved, self._row = resumed_at, {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.console.close()

    def note(self, metadata: Mapping[str, Any]) -> None:
        """Nothing: the first process does it."""

    def record(self, status: RunStatus) -> None:
        """Keeps the newest row."""
        for row in status.rows:
            self._row = row.numbers

    def dump(self, name: str, state: Mapping[str, Any]) -> str:
        """Nothing; the command that replays what the first process writes."""
        return self.replay(name)

    def checkpoint_due(self, status: RunStatus) -> bool:
        """The first process decides, unless this one has got a signal."""
        return status.stopping

    def save(self, status: RunStatus, state: Mapping[str, Any]) -> None:
        """Notes that the first process saves."""
        self._saved = status.iteration

    def finish(self, status: RunStatus, *, left: bool = False) -> Row:
        """The last row of metrics."""
        return self._row


def command(tool: str) -> str:
    """How a user starts a tool or the training from the current folder."""
    checkout = paths.checkout()
    if checkout is None or Path(sys.argv[0]).stem == "gpusim-rl":
        return f"gpusim-rl {tool}"
    file = paths.train_file() if tool == "train" else paths.tools_dir() / f"{tool}.py"
    return f"python {shlex.quote(str(paths.from_here(file)))}"
