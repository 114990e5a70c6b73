"""Outputs of a run: console, metrics files, checkpoints."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths
from gpusim_rl.files.checkpoint_file import save
from gpusim_rl.run.checkpoint import Checkpoints
from gpusim_rl.run.console import Console
from gpusim_rl.run.cuda_graph import GraphChoice
from gpusim_rl.run.devices import CompileChoice
from gpusim_rl.run.film import film
from gpusim_rl.run.log_interval import LogRow
from gpusim_rl.run.metadata import banner, describe_run
from gpusim_rl.run.metrics import Row
from gpusim_rl.run.run_dir import RunDir
from gpusim_rl.run.start import RunView
from gpusim_rl.run.writers import CsvWriter, TensorboardWriter, WandbWriter, Writer, Writers
from gpusim_rl.settings.trust import machine_overrides, untrusted_values
from gpusim_rl.sim.buffers import enough

LOGGER_KEYS = ("wandb_id", "best_evaluation")  # checkpoint entries from `Logger.state_dict`
DIVERGED, SKIPPED = "diverged.pt", "skipped.pt"  # dumps: before the first divergence, after the last finite gradient
NEARLY = 0.8  # buffer usage that triggers a warning

# Warnings, each shown once
SKIPS = "policy/skipped_minibatches is {number:.0f}: gradients were NaN or infinite; in fp16, a few skips are normal"
FULL = "physics is wrong in {envs:.0f} envs: a full buffer dropped contacts or limits ({uses} in use). Set {settings}"
NEARLY_FULL = "{uses} in use; contacts and limits beyond 100 % are dropped, which makes physics wrong. Try {settings}"
WARP_LIMIT = (
    "{envs:.0f} envs dropped contacts at a limit of MuJoCo Warp itself: 50 candidates per geom on a height field, or"
    " convex shapes that are too fine. Try spheres and capsules instead of boxes and meshes, or another terrain"
    " resolution (docs/gpu.md)"
)
PAYS_TO_FAIL = (
    "mean return is {loss:.3g} and episodes end after {steps:.0f} of {limit} steps: the policy gains by failing early."
    " Add a reward per survived step, or lower the penalties (see reward/ in metrics.csv)"
)

CAUSES = {  # descriptions of the NaN guard's causes
    "physics": "unstable physics",
    "action": "a NaN or infinite action",
    "apply_action": "a NaN or infinite control or force of {task}.apply_action()",
}


class Logger:
    """Recorder of rows and warnings, silent except on rank 0.

    `earlier` holds the logger's checkpoint entries if the run continues in its own folder; otherwise it is empty.
    """

    def __init__(self, run: RunView, run_dir: RunDir, earlier: Mapping[str, Any]) -> None:
        self._cfg = cfg = run.cfg
        self._silent = silent = run.start.collective.rank > 0
        self.run_dir = run_dir
        mode, train_log = ("quiet", None) if silent else (cfg.log.console, run_dir.train_log)
        self.console = Console(mode, cfg.max_iterations, train_log)
        resumed_at = run.iteration if run.start.resumed else None
        best = earlier.get("best_evaluation") if cfg.eval.interval else run.best_return
        warn = self.console.warn
        self.checkpoints = Checkpoints(cfg, run_dir.checkpoints, resumed_at, best, warn, writes=not silent)
        self._wandb_id = earlier.get("wandb_id") or secrets.token_hex(4)
        rows_until = run.iteration if earlier else 0
        writers: list[Writer] = [CsvWriter(run_dir.metrics_csv, rows_until, interval=cfg.log.interval, warn=warn)]
        if cfg.log.tensorboard:
            writers.append(TensorboardWriter(run_dir.path / "tensorboard", resumed_at))
        if cfg.wandb_activate:
            writers.append(WandbWriter(cfg, run_dir, self._wandb_id, self.console.info))
        self._writers = Writers([] if silent else writers, warn)
        self._row: Row = {}
        self._warned: set[str] = set()  # warnings that are shown once
        self._rewards_checked = False
        self._room = {name: room for name, (room, _) in run.env.buffers.items()}
        self._noted: tuple[GraphChoice, CompileChoice] | None = None  # recorded in env.json
        spec = run.start.spec
        foreign = untrusted_values(spec.config)  # classes and arguments that commands accept only with these flags
        folder = None if untrusted_values(spec.config, spec.config_dir) else spec.config_dir
        flags = ["--trust"] if folder is None else ["-cd", str(paths.from_here(folder))]
        self._flags = flags if foreign else []
        in_script = any(target.startswith("__main__.") for _, target in foreign)
        self._script_has = "classes" if in_script else "envs" if spec.envs is not None else ""
        self._machine = [word for word in machine_overrides(spec.config) if not word.startswith("log.dir=")]

    def __enter__(self) -> Logger:
        return self

    def start(self, run: RunView, *, continues: bool) -> None:
        """Show the banner and open the writers; `continues`: the folder is from an earlier start."""
        folder, name = ("", *self.run_dir.path.parts)[-2:]
        title = f"{run.start.task_name} · {name if folder in ('', run.start.task_name) else f'{folder}/{name}'}"
        self.console.start(banner(run, self.run_dir, continues=continues), title)
        if self._cfg.log.print_config:
            self.console.info(*yaml.safe_dump(dict(run.start.spec.config), sort_keys=False).splitlines())
        self._writers.start(run.start.spec.config)
        if not run.complete:
            self.note(run)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.checkpoints.close()
        if kind is not None:
            self.console.note(f"ended by {kind.__name__}: {error}")
        self._writers.close(0 if kind is None else 1)
        self.console.close()

    def note(self, run: RunView) -> None:
        """Write the run's description to env.json, initially and whenever the graph or compile mode has changed."""
        modes = run.graph, run.start.compile
        if self._silent or self._noted == modes:
            return
        self._noted = modes
        try:
            self.run_dir.note(describe_run(run))
        except (OSError, ValueError) as error:  # full disk; edited file
            self.console.warn(f"cannot write env.json ({error}); training continues")

    def record(self, rows: Sequence[LogRow]) -> None:
        """Write rows to all outputs; warn about skipped minibatches, full buffers, and rewards for failing early."""
        for row in rows:
            self._row = numbers = row.numbers
            self._writers.write(row.iterations[-1], numbers)
            self.console.update(numbers)
            if skipped := numbers.get("policy/skipped_minibatches"):
                self._warn_once(SKIPS, number=skipped)
            self._check_buffers(numbers)
            self._check_rewards(numbers)

    def _warn_once(self, text: str, **values: object) -> None:
        if text not in self._warned and not self._silent:
            self._warned.add(text)
            self.console.warn(text.format(**values))

    def _check_buffers(self, numbers: Row) -> None:
        used = {name: numbers.get(f"sim/{name}_used") or 0.0 for name in self._room}
        most, envs = max(used.values(), default=0.0), numbers.get("sim/overflow") or 0.0
        text = FULL if most > 1.0 else WARP_LIMIT if envs and used else NEARLY_FULL if most > NEARLY else None
        if text is None or FULL in self._warned:
            return
        shares = (f"{min(100 * used[name], 100):.0f} % of sim.{name}={room}" for name, room in self._room.items())
        settings = enough(self._room, {name: used[name] * room for name, room in self._room.items()})
        self._warn_once(text, envs=envs, uses=" and ".join(shares), settings=settings)

    def _check_rewards(self, numbers: Row) -> None:
        limit, count = getattr(self._cfg.task, "episode_length", None), numbers.get("episode/count") or 0.0
        if limit is None or count < 100 or self._rewards_checked:
            return
        self._rewards_checked = True
        loss, steps = numbers["episode/return"], numbers["episode/length"]
        if loss is not None and steps is not None and loss < 0.0 and steps < 0.9 * limit:
            self._warn_once(PAYS_TO_FAIL, loss=loss, steps=steps, limit=limit)

    def write_diverged(self, state: Mapping[str, Any]) -> None:
        """Write the state before the first divergence, unless an earlier start has done so."""
        if self._silent or (self.run_dir.path / DIVERGED).exists():
            return
        replay = self.dump(DIVERGED, state)
        cause = CAUSES[state["cause"]].format(task=state["task"])
        self.console.warn(
            f"{state['diverged_envs']} of {self._cfg.num_envs} envs diverged, the first (env {state['env']}) because of"
            f" {cause}; they are reset and excluded from learning (see sim/diverged). To replay the first: {replay}"
        )

    def dump(self, name: str, state: Mapping[str, Any]) -> str:
        """Write a file that reproduces a failure; return the command that replays it."""
        try:
            if not self._silent:
                save(self.run_dir.path / name, state)
        except OSError as error:
            self.console.warn(f"cannot write {name} ({error})")
        return self.replay(name)

    def replay(self, name: str) -> str:
        """Return the command that replays a dump."""
        return f"{command('play')} --replay {shlex.quote(f'{self.run_dir}/{name}')}"

    def state_dict(self) -> dict[str, Any]:
        """Return the logger's checkpoint entries."""
        return {"wandb_id": self._wandb_id, "best_evaluation": self.checkpoints.best_evaluation}

    def finish(self, run: RunView, *, left: bool = False) -> Row:
        """Record the video, show follow-up commands, return the last row; `left`: the next iteration was aborted."""
        last = self.checkpoints.saved
        newest = "there is no checkpoint" if last is None else f"the newest checkpoint is from iteration {last}"
        if left:
            self.console.info(f"aborted iteration {run.iteration + 1}; {newest}")
        elif last != run.iteration:
            raise ConfigError(
                f"checkpoint of iteration {run.iteration} could not be written; {newest}", key=str(self.run_dir)
            )
        if last is not None:
            if self._cfg.log.video and run.complete and not self._silent:
                self.console.info("recording a video of the policy")
                try:
                    video = film(self.run_dir.path, self._flags)
                except ConfigError as error:
                    self.console.warn(f"no video: {error}")
                else:
                    self.console.info(f"video: {video}")
                    self._writers.show(run.iteration, video)
            self.console.footer(self._next(run))
        return self._row

    def _next(self, run: RunView) -> list[str]:
        folder = str(self.run_dir)
        plot = f"{command('plot')} {shlex.quote(folder)}"
        further = [f"max_iterations={2 * run.iteration}"] if run.complete else []  # else the run would end immediately
        if self._script_has:
            arguments = ", ".join(["...", f"checkpoint={folder!r}", *further])
            return [f"gpusim_rl.train({arguments})  in the script with its {self._script_has}", plot]
        program = command("train")
        if self._cfg.multi_gpu:
            processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
            program = f"torchrun --nproc-per-node={processes} {program.removeprefix('python ')}"
        config_dir, trust = ([], ["trust=true"]) if self._flags == ["--trust"] else (self._flags, [])
        train = shlex.join([*config_dir, f"checkpoint={folder}", *self._machine, *further, *trust])
        view = shlex.join([folder, *self._flags])
        images = " --renderer policy" if run.env.images else ""
        return [f"{command('play')} {view}", f"{command('record')} {view}{images}", f"{program} {train}", plot]


@contextmanager
def open_log(run: RunView, earlier: Mapping[str, Any]) -> Iterator[Logger]:
    """Open the run folder and its logger, on every rank."""
    start = run.start
    if start.collective.rank:
        with Logger(run, RunDir(Path(start.collective.run_dir(None))), {}) as log:
            yield log
        return
    with RunDir.of(start.spec, start.digest, trains=not run.complete) as (run_dir, continues):
        start.collective.run_dir(str(run_dir.path.absolute()))
        with Logger(run, run_dir, earlier if continues else {}) as log:  # a branch is a new run
            log.start(run, continues=continues)
            yield log


def command(tool: str) -> str:
    """Return the shell command that runs a tool or `train` from the current folder."""
    if paths.checkout() is None or Path(sys.argv[0]).stem == "gpusim-rl":
        return f"gpusim-rl {tool}"
    file = paths.train_file() if tool == "train" else paths.tools_dir() / f"{tool}.py"
    return f"python {shlex.quote(str(paths.from_here(file)))}"
