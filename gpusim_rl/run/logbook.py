"""What a run writes down: console, metrics files, checkpoints. The training loop calls `record` once per iteration."""

from __future__ import annotations

import math
import shlex
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import yaml

from gpusim_rl.run.checkpoint import Checkpoints
from gpusim_rl.run.console import Console
from gpusim_rl.run.metrics import Row
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.system import SystemMonitor
from gpusim_rl.run.writers import CsvWriter, TensorboardWriter, WandbWriter, Writer, Writers

if TYPE_CHECKING:
    from gpusim_rl.run.trainer import Trainer

SAVE_INTERVAL_S = 60.0
"""last.pt is at most this old, however long an iteration takes; a kill costs no more than that."""

BEST_INTERVAL_S = 10.0
"""best.pt is written when the mean return has improved, but not more often than this: early on it improves all the time."""


class Logbook:
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
        self._row: Row = {}
        self._overflow_reported = False
        self._improved = False

    def __enter__(self) -> Logbook:
        self.console.start(banner(self._trainer, self.run_dir))
        if self._trainer.cfg.log.print_config:
            self.console.info(yaml.safe_dump(self._trainer.config, sort_keys=False))
        self._writers.start(self._trainer.config)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        better = self._improved and age_s > BEST_INTERVAL_S
        if due or last or better or trainer.stopping or age_s > SAVE_INTERVAL_S:
            self.save(numbered=due)

    def _flush(self) -> None:
        trainer = self._trainer
        wall_s, phases = trainer.timer.flush()
        iterations = trainer.iteration - self._interval_start[0]
        env_steps = trainer.env_steps - self._interval_start[1]
        self._interval_start = (trainer.iteration, trainer.env_steps)
        host: dict[str, float | None] = {
            "iteration": trainer.iteration,
            "env_steps": trainer.env_steps,
            "time/elapsed_s": trainer.elapsed_s,
            "time/iteration_s": wall_s / max(1, iterations),
            "speed/env_steps_per_s": env_steps / wall_s,
            "speed/sim_steps_per_s": env_steps / phases["simulate"] if phases["simulate"] else None,
        }
        host |= {f"time/{phase}": seconds / wall_s for phase, seconds in phases.items()}
        host |= self._monitor.latest()
        overflow = trainer.env.sim.overflow.sum().float().to(trainer.rl_device)
        for earlier, values in trainer.metrics.flush(host, {"sim/overflow": overflow}):
            self._publish(earlier, values)

    def _publish(self, host: dict[str, Any], values: Row) -> None:
        trainer = self._trainer
        trainer.check_finite(values)
        row: Row = host | {name: value for name, value in values.items() if not name.startswith("check/")}
        now = row.get("episode/return")
        self._improved = now is not None and (trainer.best_return is None or now > trainer.best_return)
        if self._improved:
            trainer.best_return = now
        row["episode/best_return"] = trainer.best_return
        self._row = row
        self._writers.write(int(host["iteration"]), row)
        self.console.update(row)
        if row.get("sim/overflow") and not self._overflow_reported:
            self._overflow_reported = True
            self.console.warn(
                f"{row['sim/overflow']:.0f} worlds dropped contacts because a buffer was full; raise sim.nconmax and sim.njmax"
            )

    def save(self, *, numbered: bool) -> None:
        """Writes last.pt, and best.pt if the mean return is the best so far."""
        trainer = self._trainer
        self._saved_at = time.perf_counter()
        try:
            self._checkpoints.save_last(trainer.state_dict())
            if self._improved or not self._checkpoints.best.exists():
                self._checkpoints.save_best()
            if numbered:
                self._checkpoints.save_numbered(trainer.iteration)
        except OSError as error:
            self.console.warn(f"checkpoint NOT saved ({error}); training goes on, the next one is tried again")

    def finish(self) -> Row:
        """Publishes what is still on its way, and prints the commands that continue from here."""
        trainer = self._trainer
        for host, values in trainer.metrics.drain():
            self._publish(host, values)
        self._writers.summary({"best_return": trainer.best_return, **self._row})
        run = shlex.quote(str(self.run_dir))
        self.console.footer(
            [
                f"python tools/play.py {run}",
                f"python tools/record.py {run}",
                f"python train.py checkpoint={run}",
                f"python tools/plot.py {run}",
            ]
        )
        return self._row


def banner(trainer: Trainer, run_dir: RunDir) -> list[tuple[str, str]]:
    """What the user should know before the first number, as label and text; at most 12 lines."""
    cfg, env, ppo = trainer.cfg, trainer.env, trainer.ppo
    sizes = ", ".join(f"{name} {size}" for name, size in env.obs_sizes.items())
    parameters = sum(p.numel() for p in trainer.policy.parameters())
    batch = cfg.num_envs * cfg.ppo.horizon
    minibatch = batch // ppo.num_minibatches
    fitted = "" if minibatch == cfg.ppo.minibatch_size else f" (fitted: ppo.minibatch_size={cfg.ppo.minibatch_size})"
    sequence = ""
    if trainer.policy.recurrent:
        sequence = f", sequences of {ppo.sequence_length}"
        if ppo.sequence_length != cfg.ppo.sequence_length:
            sequence += f" (fitted: ppo.sequence_length={cfg.ppo.sequence_length})"
    network = "x".join(map(str, cfg.ppo.network.hidden))
    precision = "bf16" if trainer.policy.bf16 else "fp32"
    git = run_dir.environment.get("git")
    lines = [
        ("task", f"{trainer.task_name}, {cfg.num_envs} envs, control {cfg.task.control_hz:g} Hz, physics"
                 f" {cfg.task.physics_hz:g} Hz, episode {cfg.task.episode_length} steps"),
        ("spaces", f"observations {sizes}; actions {env.num_actions}"),
        ("sim", str(trainer.choice)),
        ("learner", f"{trainer.rl_device}, {torch.get_num_threads()} CPU threads, {precision} ({trainer.precision_reason})"),
        ("network", f"{network} {cfg.ppo.network.activation}, {parameters:,} parameters"),
        ("batch", f"{cfg.num_envs} x {cfg.ppo.horizon} = {batch} samples, {ppo.num_minibatches} minibatches of"
                  f" {minibatch}{fitted}{sequence}, {cfg.ppo.epochs} epochs"),
        ("seed", str(trainer.seed)),
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
