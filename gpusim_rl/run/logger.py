"""What a run writes down: console, metrics files, checkpoints. The training loop calls `record` once per iteration."""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import yaml

from gpusim_rl import paths
from gpusim_rl.errors import ConfigError
from gpusim_rl.run import checkpoint
from gpusim_rl.run.checkpoint import Checkpoints
from gpusim_rl.run.console import Console
from gpusim_rl.run.metadata import describe_run
from gpusim_rl.run.metrics import WINDOW, Row
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.system import SystemMonitor
from gpusim_rl.run.timing import Lap
from gpusim_rl.run.writers import CsvWriter, TensorboardWriter, WandbWriter, Writer, Writers

if TYPE_CHECKING:
    from gpusim_rl.run.trainer import Trainer

SAVE_INTERVAL_S = 60.0
"""last.pt is at most this old, however long an iteration takes; a kill costs no more than that."""

BEST_INTERVAL_S = 10.0
"""best.pt is written when the mean return has improved, but not more often: early on it improves all the time."""


@dataclass(frozen=True, slots=True)
class Interval:
    """What of a log interval is known on the host when it ends; its row may arrive an interval later."""

    numbers: Row
    iterations: range
    env_steps: int  # in the interval
    lap: Lap


class Logger:
    """Opens with the run, records every iteration, and closes with what the user needs next."""

    def __init__(self, trainer: Trainer, run_dir: RunDir) -> None:
        cfg = trainer.cfg
        self._trainer = trainer
        self.run_dir = run_dir
        resumed_at = trainer.iteration if trainer.resumed is not None else None
        self._checkpoints = Checkpoints(run_dir.checkpoints, cfg.log.keep)
        self.console = Console(cfg.log.console, cfg.max_iterations, run_dir.train_log)
        writers: list[Writer] = [CsvWriter(run_dir.metrics_csv, resumed_at)]
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
                    run_id=trainer.wandb_id,
                    info=self.console.info,
                )
            )
        self._writers = Writers(writers, self.console.warn)
        self._monitor = SystemMonitor(trainer.rl_device)
        self._interval_start = (trainer.iteration, trainer.env_steps)
        self._elapsed_before = trainer.elapsed_s
        self._began = time.perf_counter()
        self._saved_at = time.perf_counter()
        # The iteration of the newest checkpoint; None before the first one in this folder.
        self._saved = resumed_at if self._checkpoints.last.exists() else None
        self._row: Row = {}
        self._overflow_reported = False
        self._divergence_reported = False
        # Mean return over a full window now, and of best.pt; None before there is one. Until then the newest policy is
        # the best: its mean is over the most episodes, and one lucky episode must not stand for the whole run.
        self._return: float | None = None
        self._best_saved = trainer.best_return if self._checkpoints.best.exists() else None

    def __enter__(self) -> Logger:
        self.console.start(banner(self._trainer, self.run_dir))
        if self._trainer.cfg.log.print_config:
            self.console.info(yaml.safe_dump(self._trainer.config, sort_keys=False))
        self._note_facts()
        self._writers.start(self._trainer.config)
        if self._trainer.iteration >= self._trainer.cfg.max_iterations:
            self.console.info(
                f"nothing to do: this is iteration {self._trainer.iteration} of max_iterations="
                f"{self._trainer.cfg.max_iterations}; try max_iterations={2 * self._trainer.iteration}"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.console.note(f"ended by {kind.__name__}: {error}")
        self._monitor.close()
        self._writers.close(0 if kind is None else 1)
        self.console.close()
        self._trainer.env.close()

    def record(self) -> None:
        """Ends an iteration: a row of metrics every `log.interval`, a checkpoint where one is due."""
        trainer, cfg = self._trainer, self._trainer.cfg
        trainer.elapsed_s = self._elapsed_before + time.perf_counter() - self._began
        last = trainer.iteration == cfg.max_iterations
        if trainer.iteration % cfg.log.interval == 0 or last:
            self._flush()
        due = trainer.iteration % cfg.log.checkpoint_interval == 0
        age_s = time.perf_counter() - self._saved_at
        better = self._better and age_s > BEST_INTERVAL_S
        if due or last or better or trainer.stopping or age_s > SAVE_INTERVAL_S:
            self.save(numbered=due)

    def _note_facts(self) -> None:
        """Writes to env.json what the run has chosen by itself."""
        self._noted = self._trainer.graphs.choice
        try:
            self.run_dir.note(describe_run(self._trainer))
        except (OSError, ValueError) as error:  # a full disk; a file that somebody edited
            self.console.warn(f"env.json cannot be written ({error}); training goes on")

    def _flush(self) -> None:
        trainer = self._trainer
        if trainer.graphs.choice is not self._noted:  # a capture failed
            self._note_facts()
        iteration, env_steps = self._interval_start
        self._interval_start = (trainer.iteration, trainer.env_steps)
        numbers: Row = {
            "iteration": trainer.iteration,
            "env_steps": trainer.env_steps,
            "time/elapsed_s": trainer.elapsed_s,
        }
        iterations = range(iteration + 1, trainer.iteration + 1)
        ended = Interval(numbers, iterations, trainer.env_steps - env_steps, trainer.timer.flush())
        overflow = trainer.env.sim.overflow.sum().float().to(trainer.rl_device)
        self._wait()
        for interval, values in trainer.metrics.flush(ended, {"sim/overflow": overflow}):
            self._publish(interval, values)

    def _publish(self, interval: Interval, values: Row) -> None:
        trainer = self._trainer
        trainer.check_finite(values, interval.iterations)
        wall_s, phases = interval.lap.wall_s, interval.lap.phases()
        row: Row = interval.numbers | {
            "time/iteration_s": wall_s / len(interval.iterations),
            "speed/env_steps_per_s": interval.env_steps / wall_s,
            "speed/sim_steps_per_s": interval.env_steps / phases["simulate"] if phases.get("simulate") else None,
        }
        row |= {f"time/{phase}": seconds / wall_s for phase, seconds in phases.items()}
        row |= self._monitor.latest()
        row |= {name: value for name, value in values.items() if not name.startswith("check/")}
        now = row.get("episode/return") if (row.get("episode/count") or 0.0) >= WINDOW else None
        self._return = now
        if now is not None and (trainer.best_return is None or now > trainer.best_return):
            trainer.best_return = now
        row["episode/best_return"] = trainer.best_return
        self._row = row
        self._writers.write(interval.iterations[-1], row)
        self.console.update(row)
        if row.get("sim/overflow") and not self._overflow_reported:
            self._overflow_reported = True
            self.console.warn(
                f"{row['sim/overflow']:.0f} envs dropped contacts because a buffer was full;"
                " raise sim.nconmax and sim.njmax"
            )
        if row.get("sim/diverged") and not self._divergence_reported:
            self._divergence_reported = True
            self._dump_diverged()

    def _dump_diverged(self) -> None:
        """Writes down once, to be replayed, from where the first env diverged."""
        trainer, path = self._trainer, self.run_dir.path / "diverged.pt"
        first = trainer.env.first_diverged.read()
        if first is None or path.exists():
            return
        about = {"task": trainer.task_name, "config": trainer.config, "sim": trainer.choice.name}
        where = f"are in {self.run_dir}/diverged.pt"
        try:
            checkpoint.save(path, {**about, "iteration": trainer.iteration, **first})
        except OSError as error:
            where = f"could not be saved ({error})"
        self.console.warn(
            f"the physics of env {first['env']} diverged; such envs are reset and left out of learning, and"
            f" counted in sim/diverged. The state and action before it {where}"
        )

    @property
    def _better(self) -> bool:
        """The policy is better than that of best.pt: a record may have passed before it was due to be saved."""
        return self._return is not None and (self._best_saved is None or self._return > self._best_saved)

    def save(self, *, numbered: bool) -> None:
        """Writes last.pt, and best.pt if the mean return is above that of the old one, or that is not known."""
        trainer = self._trainer
        self._saved_at = time.perf_counter()
        self._drain()  # a run that continues from here does not make these rows again
        trainer.check_policy()
        try:
            self._checkpoints.save_last(trainer.state_dict())
            self._saved = trainer.iteration
            if self._better or self._best_saved is None:
                self._checkpoints.save_best()
                self._best_saved = self._return
            if numbered:
                self._checkpoints.save_numbered(trainer.iteration)
        except OSError as error:
            self.console.warn(f"checkpoint NOT saved ({error}); training goes on, the next one is tried again")

    def finish(self) -> Row:
        """Publishes what is still on its way, and prints the commands that continue from here.

        Raises:
            ConfigError: The end of the training could not be saved.
        """
        trainer = self._trainer
        self._drain()
        self._writers.summary({"best_return": trainer.best_return, **self._row})
        if self._saved != trainer.iteration:  # a signal after the last look, or a disk that is full
            self.save(numbered=False)
        if self._saved != trainer.iteration:
            newest = "there is no checkpoint" if self._saved is None else f"the newest is of iteration {self._saved}"
            raise ConfigError(
                f"the checkpoint of iteration {trainer.iteration} could not be written to {self.run_dir}; {newest}"
            )
        run = shlex.quote(str(self.run_dir))
        limit = trainer.cfg.max_iterations
        further = f" max_iterations={2 * limit}" if trainer.iteration >= limit else ""  # else it would end at once
        self.console.footer(
            [f"{command(tool)} {run}" for tool in ("play", "record")]
            + [f"{command('train')} checkpoint={run}{further}", f"{command('plot')} {run}"]
        )
        return self._row

    def _wait(self) -> None:
        """On CUDA the host is an iteration ahead of the device, and waits for it here: that is no time of logging."""
        with self._trainer.timer.waiting():
            self._trainer.metrics.wait()

    def _drain(self) -> None:
        self._wait()
        for interval, values in self._trainer.metrics.drain():
            self._publish(interval, values)


def command(tool: str) -> str:
    """How a user starts a tool or the training from the current folder."""
    checkout = paths.checkout()
    if checkout is None:
        return f"gpusim-rl {tool}"
    file = paths.train_file() if tool == "train" else paths.tools_dir() / f"{tool}.py"
    here = Path.cwd()
    return f"python {shlex.quote(str(file.relative_to(here) if file.is_relative_to(here) else file))}"


def banner(trainer: Trainer, run_dir: RunDir) -> list[tuple[str, str]]:
    """What the user should know before the first number, as label and text; at most 12 lines."""
    cfg, env, ppo = trainer.cfg, trainer.env, trainer.ppo
    sizes = ", ".join(f"{name} {size}" for name, size in env.obs_sizes.items())
    parameters = sum(p.numel() for p in trainer.policy.parameters())
    batch = cfg.num_envs * cfg.ppo.horizon
    minibatch = batch // ppo.num_minibatches
    fitted = "" if minibatch == cfg.ppo.minibatch_size else f" (fitted: ppo.minibatch_size={cfg.ppo.minibatch_size})"
    cut = f"{ppo.num_minibatches} minibatch{'es' if ppo.num_minibatches > 1 else ''}"
    sequence = ""
    if trainer.policy.recurrent:
        sequence = f", sequences of {ppo.sequence_length}"
        if ppo.sequence_length != cfg.ppo.sequence_length:
            sequence += f" (fitted: ppo.sequence_length={cfg.ppo.sequence_length})"
    ignored = "" if cfg.seed in (-1, trainer.seed) else f" (the checkpoint's; seed={cfg.seed} is ignored)"
    network = "x".join(map(str, cfg.ppo.network.hidden))
    precision = "bf16" if trainer.policy.bf16 else "fp32"
    git = run_dir.environment.get("git")
    lines = [
        (
            "task",
            f"{trainer.task_name}, {cfg.num_envs} envs, control {cfg.task.control_hz:g} Hz, physics"
            f" {cfg.task.physics_hz:g} Hz, episode {cfg.task.episode_length} steps",
        ),
        ("spaces", f"observations {sizes}; actions {env.num_actions}"),
        ("sim", str(trainer.choice)),
        (
            "learner",
            f"{trainer.rl_device}, {torch.get_num_threads()} CPU threads, {precision} ({trainer.precision_reason})",
        ),
        ("graph", str(trainer.graphs.choice)),
        ("network", f"{network} {cfg.ppo.network.activation}, {parameters:,} parameters"),
        (
            "batch",
            f"{cfg.num_envs} x {cfg.ppo.horizon} = {batch} samples, {cut} of"
            f" {minibatch}{fitted}{sequence}, {cfg.ppo.epochs} epochs",
        ),
        ("seed", f"{trainer.seed}{ignored}"),
    ]
    if trainer.overrides:
        lines.append(("changed", " ".join(trainer.overrides)))
    if git:
        lines.append(("commit", git["sha"][:10] + (" + local changes" if git["dirty"] else "")))
    if trainer.resumed is not None:
        lines.append(("resumed", f"at iteration {trainer.iteration}"))
    lines.append(("run", str(run_dir)))
    return lines


def report(trainer: Trainer, result: dict[str, float]) -> None:
    """Prints the result of an evaluation, one number per line."""
    console = Console(trainer.cfg.log.console, 0, None)
    width = max(map(len, result))
    for name, value in result.items():
        console.info(f"{name:<{width}}  {'–' if math.isnan(value) else f'{value:.6g}'}")
    console.close()
