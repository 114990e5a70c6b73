"""Tests of resets from reached states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.api import make_env, prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.files import checkpoint_file
from gpusim_rl.run.evaluation import restore
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.testing.conformance import differences
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.training import SMALL_PPO, the_run

ENVS = 6


def make(task: str = "Cartpole", envs: int = ENVS, **settings: Any) -> Any:
    reset_from = {"share": 1.0, "capacity": 8, "chance": 1.0, **settings.pop("reset_from", {})}
    more = {"episode_length": 5, "randomize_episode_start": False, "reset_from": reset_from, **settings}
    env = make_env(task, num_envs=envs, sim="mujoco", device="cpu", seed=4, task=more)
    env.reset()
    return env


def state(env: Any) -> Tensor:
    robot = env.task.robot
    return torch.cat([robot.joint_pos, robot.joint_vel], dim=1)


def act(env: Any, generator: torch.Generator) -> Tensor:
    return torch.rand(env.num_envs, env.num_actions, generator=generator) * 2.0 - 1.0


def test_episodes_start_from_the_newest_kept_states() -> None:
    env, generator = make(), torch.Generator().manual_seed(0)
    worth = torch.tensor([True, False, True, True, False, True])
    env.task.worth_keeping = lambda: worth
    kept: list[Tensor] = []
    for number in range(1, 13):
        begin, seen = env.begin_episodes, {}

        def note(where: Tensor, begin: Any = begin, seen: dict[str, Tensor] = seen) -> Any:
            seen["state"] = state(env).clone()
            return begin(where)

        env.begin_episodes = note
        step = env.step(act(env, generator))
        env.begin_episodes = begin
        kept += [seen["state"][i] for i in range(ENVS) if worth[i] and not step.done[i]]
        if number % 5 == 0:
            assert step.done.all()
            possible = torch.stack(kept[-8:])
            now = state(env)
            assert ((now[:, None] - possible[None]).abs().amax(dim=2).amin(dim=1) < 1e-6).all(), "not a kept state"
            assert (env.progress == 0).all()
    assert env.reached is not None and int(env.reached.total) == len(kept)


@pytest.mark.parametrize(("share", "low", "high"), [(0.25, 150, 250), (1.0, 800, 800)])
def test_share_of_resets_from_reached_states(share: float, low: int, high: int) -> None:
    env = make(envs=800, reset_from={"share": share, "capacity": 800})
    for _ in range(4):
        env.step(torch.ones(800, 1))
    assert env.reached is not None
    for ring in env.reached._states:
        ring.fill_(0.0123)
    step = env.step(torch.ones(800, 1))
    assert step.done.all()
    begun = (state(env) - 0.0123).abs().amax(dim=1) < 1e-6
    assert low <= int(begun.sum()) <= high


def test_states_are_kept_with_the_configured_chance() -> None:
    env = make(envs=1000, reset_from={"capacity": 5000, "chance": 0.3})
    env.step(torch.zeros(1000, 1))
    assert env.reached is not None and 250 < int(env.reached.total) < 350


def test_reached_states_include_the_tasks_tensors() -> None:
    env = make("AllegroHand", envs=4)
    env.step(torch.zeros(4, 16))
    assert env.reached is not None
    goals = env.task.goal_quat.clone()
    for _ in range(3):
        env.step(torch.zeros(4, 16))
    assert env.step(torch.zeros(4, 16)).done.all()
    # Each env starts with the cube and the goal of the same episode.
    found = [bool((goals - env.task.goal_quat[i]).abs().amax(dim=1).min() < 1e-6) for i in range(4)]
    assert all(found)


def test_reached_states_do_not_synchronise() -> None:
    env = make()
    env.step(torch.zeros(ENVS, 1))
    reached = env.reached
    assert reached is not None
    where = torch.ones(ENVS, dtype=torch.bool)
    with SyncCounter() as syncs:
        reached.keep(where)
        reached.begin(where)
    assert syncs.total == 0, syncs.locations


def test_resume_is_exact_and_evaluation_ignores_reached_states(tmp_path: Path) -> None:
    def trainer(part: str, iterations: int) -> Trainer:
        log = {"console": "quiet", "dir": str(tmp_path / part)}
        task = {"episode_length": 9, "reset_from": {"share": 0.7, "capacity": 16, "chance": 0.5}}
        settings = {"ppo": SMALL_PPO, "task": task, "log": log}
        return make_trainer(prepare("Cartpole", num_envs=8, max_iterations=iterations, **settings))

    trainer("whole", 4).train()
    trainer("parts", 2).train()
    run = str(the_run(tmp_path / "parts"))
    make_trainer(prepare("Cartpole", checkpoint=run, max_iterations=4)).train()
    ends = [checkpoint_file.load(the_run(tmp_path / x) / "checkpoints" / "last.pt") for x in ("whole", "parts")]
    for part in ("policy", "algorithm", "env"):
        assert differences(ends[0][part], ends[1][part]) == []
    assert int(ends[0]["env"]["reached"]["tensors"]["total"]) > 0
    _, env, *_ = restore(prepare("Cartpole", checkpoint=run, test=True))
    assert env.reached is None  # type: ignore[reportAttributeAccessIssue]
    env.close()


def test_state_dict_has_only_filled_slots(capsys: pytest.CaptureFixture[str]) -> None:
    env = make(reset_from={"capacity": 4096})
    env.step(torch.zeros(ENVS, 1))
    first = env.reached
    kept, saved = int(first.total), first.state_dict()
    assert 0 < kept < 4096 and {len(x) for name, x in saved["tensors"].items() if name != "total"} == {kept}
    again = make(reset_from={"capacity": 4096}).reached
    again.load_state_dict(saved)
    assert int(again.total) == kept
    for name, ring in again._rings().items():
        assert torch.equal(ring[:kept], first._rings()[name][:kept])
    assert capsys.readouterr().err == ""


def test_states_of_another_capacity_are_dropped_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    small, large = (make(reset_from={"capacity": capacity}) for capacity in (8, 16))
    for _ in range(4):
        small.step(torch.zeros(ENVS, 1))
    assert int(small.reached.total) > 8
    capsys.readouterr()
    large.reached.load_state_dict(small.reached.state_dict())
    assert int(large.reached.total) == 0 and "reached states" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chance": 0.0}, r"task\.reset_from\.chance.* got 0\.0"),
        ({"capacity": 5}, r"task\.reset_from\.capacity.* got 5\. .*capacity=24"),
    ],
)
def test_invalid_reset_from_settings_are_rejected(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(reset_from=settings)
