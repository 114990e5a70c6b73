"""Checkpoints of a run: schedule, content, and compatibility with a configuration."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpusim_rl.env import Environment
from gpusim_rl.errors import ConfigError, first_line, warn
from gpusim_rl.files.checkpoint_file import load as load  # re-export
from gpusim_rl.files.checkpoint_file import load_with_digest, save
from gpusim_rl.files.paths import find_checkpoint
from gpusim_rl.files.safe_open import open_file, replacing
from gpusim_rl.learn.algorithm import TrainedPolicy, load_algorithm_class, make_policy
from gpusim_rl.learn.collective import Collective
from gpusim_rl.run.run_dir import SAVE_ALL, encoder_for
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.settings.checks import algorithm_settings_class, build
from gpusim_rl.settings.older_run import upgrade_settings
from gpusim_rl.settings.schema import RunConfig, declarations
from gpusim_rl.settings.simulators import NO_SIMULATOR, SIMULATORS
from gpusim_rl.settings.trust import check_saved_settings
from gpusim_rl.spaces import ActionSpace

SAVE_INTERVAL_S = 60.0  # maximum age of last.pt within the budget `SAVE_SHARE`
SAVE_SHARE = 0.05  # maximum share of time spent on checkpoints; on a slow disk, a kill loses up to 20 write durations
BURST_S = 2.0  # maximum saved-up budget, which also lets short runs write checkpoints
BEST_INTERVAL_S = 10.0  # minimum time between writes of best.pt: early on, returns keep improving

Types = Mapping[str, tuple[type, ...]]  # accepted types by key; integers are non-negative, floats finite, lists of str
TRAINING: Types = {
    **dict.fromkeys(("task", "sim", "wandb_id"), (str,)),
    **dict.fromkeys(("config", "obs_sizes", "policy", "algorithm", "env", "metrics", "processes"), (dict,)),
    **dict.fromkeys(("num_actions", "seed", "iteration", "env_steps"), (int,)),
    **dict.fromkeys(("best_return", "best_evaluation"), (float, int, type(None))),
    "elapsed_s": (float, int),
    "overrides": (list,),
    "torch_rng": (Tensor,),
    "actor_columns": (int, type(None)),
}
"""Types of the entries of a training checkpoint (`Trainer.state_dict` and `Logger.state_dict`)."""
DIVERGENCE: Types = {
    **{key: TRAINING[key] for key in ("task", "config", "sim", "iteration")},
    "env": (int,),
    "episode_step": (int,),
    "state": (dict,),
    "action": (Tensor,),
}
"""Types of the entries of `diverged.pt` that a replay reads."""
Warn = Callable[[str], None]  # shows a warning
REPLAY = ("replay", "priorities")  # entries of an algorithm's state that are valid only for the envs that recorded them
POLICY_KEYS = ("config", "obs_sizes", "num_actions", "policy")  # entries that a policy is loaded from
EPISODES = "episodes"  # entry of an algorithm's state that is valid only for the running episodes


def load_for(spec: RunSpec) -> tuple[dict[str, Any] | None, str | None]:
    """Load a run's checkpoint and digest, or (None, None); raise ConfigError if task, algorithm or networks differ."""
    if spec.checkpoint is None:
        if spec.cfg.test:
            raise ConfigError("needs a checkpoint", key="test=true", hint="Try checkpoint=<run folder or .pt file>")
        return None, None
    file, task_name, test = spec.checkpoint.file, spec.task_class.__name__, spec.cfg.test
    state, digest = load_with_digest(file)
    check_training(state, file, ("task", "config", "seed", "policy"))
    if (task := state["task"]) != task_name:
        problem, hint = f"checkpoint is for task {task}, not {task_name}", f"Try {shlex.quote(f'task={task}')}"
        raise ConfigError(problem, key=str(file), hint=hint)
    saved = state["config"].get("algo")
    name = saved.get("name") if isinstance(saved, dict) else None
    if isinstance(name, str) and name != spec.cfg.algo:
        problem = f"checkpoint is for algo={name}, not algo={spec.cfg.algo}"
        hint = f"Try {shlex.quote(f'algo={name}')}"
        raise ConfigError(problem, key=str(file), hint=hint)
    settings = declarations(type(spec.cfg.algorithm))
    keys = ["algo"] if test else ["algo", "num_envs"]
    keys += [f"{spec.cfg.algo}.{key}" for key in (settings.policy_structure if test else settings.structure)]
    known = copy.deepcopy(state["config"])
    upgrade_settings(known)
    if different := structural_difference(known, spec.config, keys):
        raise ConfigError(f"checkpoint does not match this configuration: {'; '.join(different)}", key=str(file))
    if not test:
        encoder = spec.cfg.pretrained
        has_own = not encoder.freeze or encoder_for(spec) != encoder.init_from  # in the policy or the run folder
        fixed = ["experiment"] * spec.checkpoint.continues + ["pretrained.init_from"] * has_own
        for line in structural_difference(known, spec.config, [*fixed, "task.randomize_episode_start"]):
            warn(f"{line}; this change has no effect on a resumed run")
    return state, digest


def load_policy(spec: RunSpec, action_space: ActionSpace, device: torch.device, name: str) -> TrainedPolicy:
    """Load the policy of another run (folder, .pt file, or task), with the settings in its checkpoint."""
    file = find_checkpoint(name, spec.cfg.log.dir).file
    state, digest = load_with_digest(file)
    check_training(state, file, POLICY_KEYS)
    config = check_saved_settings(state["config"], file, trust=spec.cfg.trust, config_dir=spec.config_dir)
    (theirs, ours) = (settings["task"].get("_target_") for settings in (config, spec.config))
    if theirs != ours:  # joints may be ordered differently
        warn(f"{file} is a policy for {theirs}, not {ours}: check that observations and actions have the same meaning")
    section, algorithm_class = config["algo"].get("name"), load_algorithm_class(config["algo"].get("_target_"))
    settings = build(algorithm_settings_class(section, algorithm_class), config.get(section), f"{file}: {section}")
    if state["num_actions"] != action_space.size:
        problem = f"the policy has {state['num_actions']} actions, but the task has {action_space.size}"
        raise ConfigError(problem, key=str(file), hint="Try the task that the policy was trained on")
    cfg = dataclasses.replace(spec.cfg, algo=section, algorithm=settings)
    with must_fit(file, "its own settings"):
        images = state.get("images", {})
        policy = make_policy(algorithm_class, cfg, state["obs_sizes"], action_space, device, images)
        policy.load_state_dict(state["policy"])
    return TrainedPolicy(policy.eval().requires_grad_(False), settings, state["obs_sizes"], digest)


def state_of_process(state: dict[str, Any], collective: Collective) -> tuple[dict[str, Any], bool]:
    """Return this rank's state, and whether the number of processes has changed, in which case new episodes begin."""
    processes = state.get("processes", {})
    before, now = max(1, len(processes)), collective.size
    if now == before:
        return state | processes.get(collective.rank, {}), False
    if collective.rank == 0:
        change = f"the number of processes changed from {before} to {now}"
        warn(f"{change}: starting new episodes and refilling the replay buffer, if any")
    return state | {"algorithm": clear_entries(state["algorithm"], *REPLAY)}, True


def check_spaces(state: Mapping[str, Any], env: Environment) -> None:
    """Raise ValueError unless observations and actions of the envs match a checkpoint; use within `must_fit`."""
    spaces = {"obs_sizes": dict(env.obs_sizes), "images": dict(env.images), "num_actions": env.num_actions}
    for key, now in spaces.items():
        if (saved := state.get(key, {})) != now:
            hint = "Try the task version used in training (see the run's git.diff and env.json)"
            raise ValueError(f"{key} is {now}, but the checkpoint has {saved}. {hint}")


def check_training(state: dict[str, Any], file: Path, needed: Collection[str]) -> dict[str, Any]:
    """Validate an untrusted training checkpoint and return it; raise ConfigError for invalid keys, types or policy."""
    check_types(state, TRAINING, needed, f"{file} is not a training checkpoint")
    for name, value in state.get("policy", {}).items():
        if isinstance(value, Tensor) and not value.isfinite().all():
            problem, hint = f"the policy ({name}) contains NaN or infinity", "Try another checkpoint of the run"
            raise ConfigError(problem, key=str(file), hint=hint)
    return state


def check_types(state: Mapping[str, Any], types: Types, needed: Collection[str], problem: str) -> None:
    """Raise ConfigError, with `problem` as its key, for a missing or invalid entry of an untrusted file."""
    if missing := set(needed) - state.keys():
        raise ConfigError(f"missing {', '.join(sorted(missing))}", key=problem)
    for key in types.keys() & state.keys():
        value, wrong = state[key], None
        if not isinstance(value, types[key]) or isinstance(value, bool):
            names = " or ".join(kind.__name__ for kind in types[key])
            raise ConfigError(f"{key} has type {type(value).__name__}", key=problem, expected=names)
        if isinstance(value, int) and value not in range(1 << (31 if key == "seed" else 63)):
            wrong = f"{value}, out of range"
        elif isinstance(value, float) and not math.isfinite(value):
            wrong = value
        elif isinstance(value, list) and not all(isinstance(item, str) for item in value):
            wrong = "not a list of strings"
        elif key == "sim" and value not in (*SIMULATORS, NO_SIMULATOR):
            wrong = f"{value!r}, an unknown simulator"
        if wrong is not None:
            raise ConfigError(f"{key} is {wrong}", key=problem)


def clear_entries(algorithm: Mapping[str, Any], *entries: str) -> dict[str, Any]:
    """Return an algorithm's state with the given entries set to None."""
    return {name: None if name in entries else value for name, value in algorithm.items()}


@contextmanager
def must_fit(file: Path, target: str) -> Iterator[None]:
    """Convert errors from loading a checkpoint that does not match `target` (a description) to ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"missing {error}" if isinstance(error, KeyError) else first_line(error)
        raise ConfigError(f"checkpoint does not match {target}: {reason}", key=str(file)) from error


class TimeShare:
    """Token bucket that limits work to `share` of the wall-clock time, plus `BURST_S` and the last piece of work."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.cost_s = 0.0  # duration of the last piece of work
        self._balance_s, self._counted_at = BURST_S, time.perf_counter()
        self._working = False

    @property
    def allows(self) -> bool:
        """True if the budget allows work now."""
        self._count(time.perf_counter())
        return self._balance_s >= 0.0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the block as work; nested blocks count once."""
        if self._working:
            yield
            return
        began, self._working = time.perf_counter(), True
        try:
            yield
        finally:
            now, self._working = time.perf_counter(), False
            self.cost_s = now - began
            self._count(now)
            self._balance_s -= self.cost_s

    def _count(self, now: float) -> None:
        self._balance_s = min(BURST_S, self._balance_s + self.share * (now - self._counted_at))
        self._counted_at = now


class Checkpoints:
    """Checkpoint files of a training run: last.pt, best.pt, numbered files, and evaluated.pt during an evaluation.

    An iteration is serialised once; other files are copies, not links, so that damage to one does not affect the rest.
    """

    def __init__(
        self, cfg: RunConfig, folder: Path, saved: int | None, best: float | None, warn: Warn, *, writes: bool = True
    ) -> None:
        self._cfg, self._folder, self._warn, self._writes = cfg, folder, warn, writes
        self.last, self._best, self._evaluated = (folder / f"{name}.pt" for name in ("last", "best", "evaluated"))
        self._saved_at, self._numbered_due = time.perf_counter(), False
        share = SAVE_SHARE / (2 if cfg.eval.interval else 1)
        self.budget, self.budget_evaluated = TimeShare(share), TimeShare(share)
        self._reported_s: dict[str, float] = {}  # last reported interval between writes, by kind of checkpoint
        self.saved = saved if self.last.exists() else None  # iteration of last.pt
        # None until best.pt exists. Until then, the newest policy counts as best: its mean covers the most episodes.
        self._best_return = best if self._best.exists() else None
        self._evaluations_decide = cfg.eval.interval > 0

    @property
    def best_evaluation(self) -> float | None:
        """Mean return of the best evaluation, or None."""
        return self._best_return if self._evaluations_decide else None

    def due(self, iteration: int, mean_return: float | None, long: bool = False) -> bool:
        """Return whether to save after this iteration; wanted if iterations are `long`, since a signal aborts those."""
        if not self._writes:
            return False
        age_s = time.perf_counter() - self._saved_at
        better = self._is_better(mean_return) and age_s > BEST_INTERVAL_S
        self._numbered_due |= self._numbered(iteration)
        wanted = self._numbered_due or better or long or age_s > SAVE_INTERVAL_S
        exempt = self._numbered_due and SAVE_ALL in os.environ
        affordable = wanted and (exempt or self._affordable(self.budget, "a checkpoint"))
        return iteration == self._cfg.max_iterations or affordable

    def may_evaluate(self) -> bool:
        """Return whether the time budget allows writing a checkpoint for evaluation."""
        return self._affordable(self.budget_evaluated, "a checkpoint for evaluation")

    def _affordable(self, budget: TimeShare, name: str) -> bool:
        """Return whether the budget allows a write; warn if the interval between writes has more than doubled."""
        between_s = budget.cost_s / budget.share
        if budget.allows:
            return True
        if between_s > 2.0 * self._reported_s.get(name, 0.0):
            self._reported_s[name] = between_s
            limit = f"at most one per {between_s:.3g} s ({100 * budget.share:g} % of the time) will be written"
            risk = "if the run is killed, the progress since the last one is lost"
            self._warn(f"{name} takes {budget.cost_s:.2g} s to write; {limit}; {risk}")
        return False

    def save(self, state: Mapping[str, Any], mean_return: float | None) -> None:
        """Write last.pt, best.pt if `mean_return` is a new best, and a numbered file if one is due."""
        if not self._writes:
            self.saved = state["iteration"]
            return
        numbered = self._numbered_due or self._numbered(state["iteration"])
        self._numbered_due = False
        try:
            with self.budget.spending():
                save(self.last, state)
                self.saved = state["iteration"]
                if self._is_better(mean_return) or self._best_return is None:
                    self._copy_last(self._best)
                    self._best_return = None if self._evaluations_decide else mean_return
                if numbered:
                    self._save_numbered(state["iteration"])
        except OSError as error:
            self._warn(f"checkpoint NOT saved ({error}); training continues, and the next save tries again")
        self._saved_at = time.perf_counter()

    def save_evaluated(self, state: Mapping[str, Any]) -> Path | None:
        """Write a checkpoint for evaluation; return its path, or None if the write fails."""
        try:
            with self.budget_evaluated.spending():
                save(self._evaluated, state)
        except OSError as error:
            self._warn(f"iteration {state['iteration']} is not evaluated: cannot write its checkpoint ({error})")
            return None
        return self._evaluated

    def end_evaluation(self, mean_return: float | None) -> None:
        """Promote the evaluated checkpoint to best.pt if its mean return is the highest so far, else delete it."""
        best = -math.inf if self._best_return is None else self._best_return
        try:
            if mean_return is not None and best < mean_return < math.inf:
                self._best_return = mean_return
                self._evaluated.replace(self._best)
            else:
                self._evaluated.unlink(missing_ok=True)
        except OSError as error:
            self._warn(f"cannot write best.pt ({error})")

    def stop_evaluations(self) -> bool:
        """Fall back to training returns for best.pt unless an evaluation has finished; return True if one has."""
        self._evaluations_decide = self._best_return is not None
        return self._evaluations_decide

    def close(self) -> None:
        """Delete the checkpoint of an unfinished evaluation."""
        if self._cfg.eval.interval and self._writes:
            with suppress(OSError):
                self._evaluated.unlink(missing_ok=True)

    def _save_numbered(self, iteration: int) -> None:
        self._copy_last(self._folder / f"{iteration:06d}.pt")
        numbers = [int(file.stem) for file in self._folder.glob("*.pt") if re.fullmatch(r"\d{6,}", file.stem)]
        older = sorted(number for number in numbers if number <= iteration)  # higher numbers predate a rollback
        for number in older[: -self._cfg.log.keep] if self._cfg.log.keep else []:
            (self._folder / f"{number:06d}.pt").unlink(missing_ok=True)

    def _copy_last(self, path: Path) -> None:
        with open_file(self.last) as last, replacing(path) as file:
            shutil.copyfileobj(last, file)

    def _numbered(self, iteration: int) -> bool:
        return iteration % self._cfg.log.checkpoint_interval == 0

    def _is_better(self, mean_return: float | None) -> bool:
        now = None if self._evaluations_decide else mean_return
        return now is not None and (self._best_return is None or now > self._best_return)


def structural_difference(saved: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Return one line per difference between two configs at or below dotted keys such as `ppo.network`."""
    lines = []
    for key in keys:
        old, new = _leaves(saved, key), _leaves(now, key)
        names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
        lines += [f"{name}: saved {old.get(name)}, now {new.get(name)}" for name in names]
    return lines


def _leaves(config: Any, key: str) -> dict[str, Any]:
    """Return the values at or below a dotted key, by full key."""
    for part in key.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return {}
        config = config[part]
    if not isinstance(config, Mapping):
        return {key: config}
    return {f"{key}.{full}": leaf for part in config for full, leaf in _leaves(config, str(part)).items()}
