"""Evaluation process that runs during training (`eval.interval`).

It reads JSON lines (settings, then checkpoint paths) and answers each path with a line of metrics, or an error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gpusim_rl.env import Environment, VecEnv
from gpusim_rl.env.task import load_task_or_environment
from gpusim_rl.errors import ConfigError, UserError, first_line
from gpusim_rl.files.checkpoint_file import load
from gpusim_rl.files.safe_open import open_file
from gpusim_rl.learn.algorithm import Algorithm, load_algorithm_class, make_policy
from gpusim_rl.machine.child import Child, same_import_env
from gpusim_rl.run.devices import choose_eval_devices, set_deterministic
from gpusim_rl.run.evaluation import evaluate
from gpusim_rl.run.make_env import evaluation_seed, observed
from gpusim_rl.run.run_dir import encoder_for
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.run.writers import Row
from gpusim_rl.settings.checks import build_run
from gpusim_rl.settings.trust import refuse_classes_of_script

LONGEST_S = 600.0  # an evaluation that takes longer is considered hung
NICENESS = 10  # training has priority on the CPU
_START = "from gpusim_rl.run.eval_process import main; main()"


class EvalProcess:
    """Handle to the evaluation process, whose output is appended to the file `printed`."""

    def __init__(self, spec: RunSpec, printed: Path, iteration: int) -> None:
        self.evaluating: int | None = None  # iteration of the policy under evaluation
        self.failure: str | None = None  # reason why evaluations have stopped
        self._interval = spec.cfg.eval.interval
        self._last = iteration  # last iteration evaluated
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        command, output = [sys.executable, "-c", _START], open_file(printed, "ab+")
        self._child = Child(command, printed=output, talks=True, env=same_import_env())
        threading.Thread(target=self._listen, name="evaluation", daemon=True).start()
        encoder = {**spec.config["pretrained"], "init_from": encoder_for(spec)}
        self._send({"config": {**spec.config, "pretrained": encoder}})

    def _listen(self) -> None:
        assert self._child.process.stdout is not None
        for line in self._child.process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._child.process.stdin is not None
        with suppress(OSError):  # the process has ended; `poll` reports why
            self._child.process.stdin.write(json.dumps(message).encode() + b"\n")
            self._child.process.stdin.flush()

    def due(self, iteration: int, *, last: bool = False) -> bool:
        """Return whether to begin an evaluation; the `last` iteration is always evaluated."""
        idle = self.evaluating is None and self.failure is None
        passed = iteration // self._interval > self._last // self._interval
        return idle and (passed or (last and iteration > self._last))

    def begin(self, file: Path, iteration: int) -> None:
        """Start evaluating the checkpoint `file` of this iteration."""
        self._last = self.evaluating = iteration
        self._child.heard()
        self._send({"checkpoint": str(file)})

    def poll(self, timeout_s: float = 0.0) -> Row | None:
        """Return the current evaluation's result if it arrives within `timeout_s` [s]; on an error, set `failure`."""
        try:
            line = self._answers.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            if self.evaluating is not None and self._child.silent_s > LONGEST_S:
                self.evaluating, self.failure = None, f"an evaluation took over {LONGEST_S:.0f} s"
            return None
        iteration, self.evaluating = self.evaluating, None
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:  # end of the process, or text that a library printed on import
            error = f"unexpected output of the process: {line.decode(errors='replace').strip()!r}"
            if not line.endswith(b"\n"):
                error = f"the process exited with code {self._child.process.wait()}"
            answer = {"error": error}
        self.failure = answer.get("error")
        return None if self.failure is not None else {"eval/iteration": iteration, **answer}

    def close(self) -> None:
        """Stop the process."""
        self._child.close()


class Evaluation:
    """Evaluator of a run's policies, always from the same initial states."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        refuse_classes_of_script(config)
        task_class = load_task_or_environment(config["task"].get("_target_"))
        self._algorithm_class: type[Algorithm] = load_algorithm_class(config["algo"].get("_target_"))
        self._cfg = cfg = build_run(config, task_class=task_class, algorithm_class=self._algorithm_class)
        outside = task_class if issubclass(task_class, Environment) else None
        self._device, choice = choose_eval_devices(cfg, outside=outside)
        set_deterministic(cfg.torch_deterministic)
        self.env: Environment
        number, seed = cfg.eval.num_envs, cfg.eval.seed
        if issubclass(task_class, Environment):
            settings = {"num_envs": number, "seed": evaluation_seed(seed), "device": self._device}
            try:
                self.env = task_class.from_settings(cfg.env, **settings)
            except ConfigError as error:
                raise error.within(f"eval.num_envs={number}") from None
        else:
            task, sim = cfg.task.whole_episodes(), dataclasses.replace(cfg.sim, num_threads=1)
            self.env = VecEnv.make(task_class, task, num_envs=number, choice=choice, sim=sim, seed=seed)
        self.env = observed(self.env, RunSpec(cfg, task_class, self._algorithm_class, {}, []), self._device)
        self.env.reset()
        self._start = self.env.state_dict()

    def __call__(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Evaluate the policy of a checkpoint; return a row of metrics."""
        env, cfg = self.env, self._cfg
        policy = make_policy(self._algorithm_class, cfg, env.obs_sizes, env.action_space, self._device, env.images)
        policy.load_state_dict(state["policy"])
        torch.manual_seed(cfg.eval.seed)
        env.load_state_dict(self._start)
        obs = {group: value.to(self._device) for group, value in env.begin_from(state["env"]).items()}
        result, _ = evaluate(env, policy.eval(), obs, cfg.eval.episodes)
        names = {"return_mean": "return", "return_std": "return_std", "length_mean": "length", "diverged": "diverged"}
        reserved = {*names.values(), "iteration"}  # another library's envs may have an info `return`
        stats = {name: name.removeprefix("task/") for name in result if name.startswith("task/")}
        names |= {name: name if short in reserved else short for name, short in stats.items()}
        return {f"eval/{new}": result[name] for name, new in names.items()}


def answers(lines: Iterable[str]) -> Iterator[str]:
    """Yield a JSON line per checkpoint request; the first of `lines` holds the settings. Stop after an error."""
    evaluation: Evaluation | None = None
    for line in lines:
        request = json.loads(line)
        try:
            if evaluation is None:
                evaluation = Evaluation(request["config"])
            else:
                yield json.dumps(evaluation(load(Path(request["checkpoint"]))))
        except Exception as error:
            traceback.print_exc()
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            yield json.dumps({"error": kind + first_line(error)})
            return


def main() -> None:
    """Answer the evaluation requests on standard input."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    source, output = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    # Envs may print, and a process that they fork closes its standard input: use other descriptors.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    with source:
        for answer in answers(source):
            output.write(f"{answer}\n")
