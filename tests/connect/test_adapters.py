"""Steps of each library's adapter against steps of our environment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl import connect
from gpusim_rl.env import VecEnv
from helpers.reference_env import NUM_ENVS, ReferenceEnv, count_syncs, make

ADAPTERS = {"rsl_rl": "RslRlEnv", "skrl": "SkrlEnv", "rl_games": "RlGamesEnv", "sb3": "Sb3Env"}
each = pytest.mark.parametrize("library", ADAPTERS)


def adapter(library: str, env: VecEnv) -> Any:
    return getattr(connect, ADAPTERS[library])(env, **({"reward_scale": 0.5} if library in ("rsl_rl", "sb3") else {}))


def stepped(library: str, env: Any, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step the adapter; return observation, reward, done and time-limit flags."""
    if library == "sb3":
        obs, reward, done, infos = env.step(action.numpy())
        cut = torch.tensor([info.get("TimeLimit.truncated", False) for info in infos])
        return torch.from_numpy(obs), 2.0 * torch.from_numpy(reward), torch.from_numpy(done), cut
    obs, reward, *ends, infos = env.step(action)
    if library == "skrl":
        terminated, truncated = (end[:, 0] for end in ends)
        return obs, reward[:, 0], terminated | truncated, truncated
    if library == "rsl_rl":
        return obs["policy"], 2.0 * reward, ends[0], infos["time_outs"]
    return obs, reward, ends[0], infos["time_outs"]


@each
def test_adapter_steps_equal_environment_steps(library):
    reference, env = ReferenceEnv(), adapter(library, make())
    ends = torch.zeros(2)
    for _ in range(40):
        action = reference.action()
        ours, (obs, reward, done, cut) = reference.step(action), stepped(library, env, action)
        assert torch.equal(obs, ours.obs["policy"]) and torch.equal(reward, ours.reward)
        assert torch.equal(done, ours.done) and torch.equal(cut, ours.truncated)
        ends += torch.stack([ours.terminated.sum(), ours.truncated.sum()])
    assert ends.min() > 3, "covers terminations and time limits"


@each
def test_diverged_env_is_reported_as_truncated(library):
    env = adapter(library, make(speed_at=3))
    for _ in range(3):
        _, reward, done, cut = stepped(library, env, torch.zeros(NUM_ENVS, 1))
    assert done.tolist() == cut.tolist() == [False, True, *[False] * 6]
    assert reward[1] == 0.0


@pytest.mark.parametrize("library", ["rsl_rl", "skrl", "rl_games"])
def test_adapter_step_has_no_device_syncs(library):
    inner = make(critic=True)
    env = adapter(library, inner)
    syncs = count_syncs(inner, lambda: env.step(torch.zeros(NUM_ENVS, 1)))
    assert syncs.total == 0, syncs.locations
