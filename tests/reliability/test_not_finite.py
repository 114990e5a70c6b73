"""Injected NaN and infinity in trainings in this process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpusim_rl.errors import TaskError
from gpusim_rl.run import checkpoint
from gpusim_rl.run.trainer import Trainer
from helpers.training import make_trainer, read_csv, the_run
from reliability.record import record

VALUES = (float("nan"), float("inf"), float("-inf"))
TIMES = 3  # per value, at different steps and envs
ITERATIONS, HORIZON, ENVS, MINIBATCHES = 6, 8, 8, 4  # as in make_trainer


class At:
    """Predicate that is true only at call `number`, counted from 1."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


def wrap(owner: Any, name: str, after: Callable[..., Any]) -> None:
    """Replace a method's result by `after(result, *arguments)`."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *arguments: after(method(*arguments), *arguments))


def into_state(trainer: Trainer, now: At, env: int, value: float) -> None:
    task: Any = trainer.env.task
    where = torch.arange(ENVS) == env

    def before(action: torch.Tensor) -> None:
        if now():
            task.robot.set_state(where, joint_vel=torch.full_like(task.robot.joint_vel, value))
        apply(action)

    apply, task.apply_action = task.apply_action, before


def into_control(trainer: Trainer, now: At, env: int, value: float) -> None:
    task: Any = trainer.env.task
    apply = task.apply_action
    task.apply_action = lambda action: apply(poisoned(action, env, value) if now() else action)


def into_action(trainer: Trainer, now: At, env: int, value: float) -> None:
    wrap(trainer.algorithm, "act", lambda action, _: poisoned(action, env, value) if now() else action)


def into_observation(trainer: Trainer, now: At, env: int, value: float) -> None:
    task: Any = trainer.env.task
    apply = task.apply_action
    bad = False

    def before(action: torch.Tensor) -> None:  # a step observes again at episode ends
        nonlocal bad
        bad = now()
        apply(action)

    task.apply_action = before

    def after(groups: dict[str, Any]) -> dict[str, Any]:
        if not bad:
            return groups
        name, part = next(iter(groups["policy"].items()))
        return {**groups, "policy": {**groups["policy"], name: poisoned(part, env, value)}}

    wrap(task, "observe", after)


def into_reward(trainer: Trainer, now: At, env: int, value: float) -> None:
    def after(terms: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: poisoned(term, env, value) for name, term in terms.items()} if now() else terms

    wrap(trainer.env.task, "rewards", after)


def into_loss(trainer: Trainer, now: At, env: int, value: float) -> None:
    wrap(trainer.algorithm, "_loss", lambda losses, *_: losses * value if now() else losses)


def into_gradient(trainer: Trainer, now: At, env: int, value: float) -> None:
    weights = next(trainer.algorithm.policy.parameters())
    weights.register_hook(lambda gradient: poisoned(gradient, 0, value) if now() else gradient)


def poisoned(tensor: torch.Tensor, row: int, value: float) -> torch.Tensor:
    """Return a copy with the value in one row."""
    found = tensor.clone()
    found[row] = value
    return found


COUNTED = {
    "state (a joint's speed)": (into_state, "sim/diverged", "unstable physics"),
    "action of the policy": (into_action, "sim/bad_actions", "a NaN or infinite action"),
    "control that a task sets": (into_control, "sim/bad_actions", "a NaN or infinite control or force"),
    "loss": (into_loss, "policy/skipped_minibatches", "with a NaN or infinite gradient"),
    "gradient": (into_gradient, "policy/skipped_minibatches", "with a NaN or infinite gradient"),
}
"""Injection, the column that counts it, and the cause named by the warning."""
ENDING = {"observation": into_observation, "reward": into_reward}
ENDS = "ends with one line; no checkpoint contains it, and the newest one resumes"


def trials(chance: random.Random) -> list[tuple[float, int, int, int]]:
    """Draw value, iteration (from 2), call within it, and env of each fault."""
    return [
        (value, chance.randrange(2, ITERATIONS), chance.randrange(HORIZON), chance.randrange(ENVS))
        for value, _ in itertools.product(VALUES, range(TIMES))
    ]


def trainer_in(folder: Path, **settings: Any) -> Trainer:
    return make_trainer("Cartpole", folder, max_iterations=ITERATIONS, **settings)


def assert_finite(run: Path) -> dict[str, Any]:
    saved = checkpoint.load(run / "checkpoints" / "last.pt")
    assert all(value.isfinite().all() for value in saved["policy"].values())
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("where", COUNTED)
def test_non_finite_value_is_counted_and_masked(tmp_path: Path, where: str) -> None:
    inject, column, cause = COUNTED[where]
    chance = random.Random(where)
    learning = column == "policy/skipped_minibatches"
    calls = MINIBATCHES if learning else HORIZON
    found = trials(chance)
    for number, (value, iteration, call, env) in enumerate(found):
        trainer = trainer_in(tmp_path / str(number))
        inject(trainer, At((iteration - 1) * calls + call % calls + 1), env, value)
        trainer.train()
        run = the_run(tmp_path / str(number))
        assert_finite(run)
        warning = cause if learning else f"envs diverged, the first (env {env}) because of {cause}"
        assert (run / "train.log").read_text().count(warning) == 1
        rows = read_csv(run)
        counts = [float(row[column]) for row in rows]
        if learning:  # cumulative
            assert counts == [float(row >= iteration) for row in range(1, ITERATIONS + 1)], (value, counts)
        else:
            assert counts == [float(row == iteration) for row in range(1, ITERATIONS + 1)], (value, counts)
            assert [row["sim/diverged"] for row in rows] == [row[column] for row in rows]
            assert (run / "diverged.pt").is_file()
        assert not [cell for row in rows for cell in row.values() if cell in ("nan", "inf", "-inf")]
    record(
        f"NaN or Inf: {where}",
        f"in one {'minibatch' if learning else 'env'} at a random step of a training",
        len(found),
        f"counted in {column} with a warning; training continues",
        "1 minibatch" if learning else "1 sample, and the rest of the episode",
    )


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("where", ENDING)
def test_non_finite_value_ends_training_before_checkpoint(tmp_path: Path, where: str, interval: int) -> None:
    found = trials(random.Random(where))
    for number, (value, iteration, call, env) in enumerate(found):
        folder, log = tmp_path / str(number), {"interval": interval, "checkpoint_interval": 1}
        trainer = trainer_in(folder, log=log)
        ENDING[where](trainer, At((iteration - 1) * HORIZON + call + 1), env, value)
        when = f"iteration {iteration}; " if interval == 1 else "iterations "
        with pytest.raises(TaskError, match=rf"{where}.*finite in {when}") as error:
            trainer.train()
        assert "\n" not in str(error.value) and (interval > 1 or f"env {env}" in str(error.value))
        run = the_run(folder)
        saved = assert_finite(run)
        assert saved["iteration"] == iteration - 1
        assert all(total.isfinite().all() for total in saved["metrics"]["sums"].values())
        trainer_in(folder, checkpoint=str(run), log=log).train()
        assert assert_finite(run)["iteration"] == ITERATIONS
        rows = range(1, ITERATIONS + 1) if interval == 1 else (5, ITERATIONS)
        assert [row["iteration"] for row in read_csv(run)] == [str(row) for row in rows]
    if interval > 1:
        record(
            f"NaN or Inf: {where} between log rows",
            "in one env at a random step; log.interval=5, and a checkpoint every iteration",
            len(found),
            ENDS,
            "since the last checkpoint",
        )
        return
    record(
        f"NaN or Inf: {where}",
        "in one env at a random step of a training",
        len(found),
        ENDS,
        "since the last checkpoint",
    )
