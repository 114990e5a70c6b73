"""Replay buffer on the host: samples of the device replay one iteration earlier, bit-identical resume."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.env import Step
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.host_replay import HostReplay
from gpusim_rl.learn.replay import Replay, Trajectory, Transitions
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import differences
from helpers.fakes import RandomEnv
from helpers.off_policy import OffPolicyLearner, store
from helpers.raised import raises

CPU = torch.device("cpu")
ENVS, HORIZON, STEPS, SIZE, SEED = 3, 4, 18, 32, 7
SPEC = EnvSpec(ENVS, {"policy": 2, "critic": 5}, Box(2), 6)
MEMORY: dict[str, Any] = {"n_step": 2, "gamma": 0.9, "storage": torch.float32, "device": CPU}


def random_step(t: int) -> tuple[dict[str, Tensor], Tensor, Step]:
    random = torch.Generator().manual_seed(t)
    obs, final = ({g: torch.randn(ENVS, n, generator=random) for g, n in SPEC.obs_sizes.items()} for _ in range(2))
    flags = torch.rand(3, ENVS, generator=random) < 0.15
    cut = torch.full((ENVS,), t % 6 == 5)  # only when the time limit allows
    terminated, diverged, bad = flags
    done = terminated | cut | diverged
    reward, action = torch.randn(ENVS, generator=random), torch.rand(ENVS, 2, generator=random)
    return obs, action, Step(obs, final, reward, {}, {}, terminated, cut, diverged, bad, done, done)


def memory() -> HostReplay:
    inner = Replay(STEPS, SPEC, ["policy", "critic"], **MEMORY)
    rollout = Trajectory.empty(HORIZON, SPEC, ["policy", "critic"], CPU)
    return HostReplay(inner, rollout, device=CPU, size=SIZE, seed=SEED)


def roll(replay: HostReplay | Replay, iteration: int) -> None:
    for t in range(iteration * HORIZON, (iteration + 1) * HORIZON):
        if isinstance(replay, HostReplay):
            replay.steps.write(*random_step(t))
        else:
            store(replay, *random_step(t))


def sampled(replay: HostReplay) -> Transitions:
    return copy.deepcopy(replay.sample(SIZE, torch.Generator()))


def state(drawn: Transitions) -> dict[str, Any]:
    return {f.name: getattr(drawn, f.name) for f in dataclasses.fields(drawn)}


def test_host_replay_samples_what_was_stored_before_the_rollout() -> None:
    replay, on_device, random = memory(), Replay(STEPS, SPEC, ["policy", "critic"], **MEMORY), torch.Generator()
    random.manual_seed(SEED)
    for iteration in range(8):  # 32 steps: the ring of 18 is full after the fifth
        expected = on_device.sample(SIZE, random)
        roll(replay, iteration)
        replay.exchange()
        assert differences(state(sampled(replay)), state(expected)) == []
        assert replay.fill == min(iteration * HORIZON, STEPS) and bool(expected.weight.any()) == (iteration > 0)
        seen, valid, reward = replay.latest(HORIZON)
        roll(on_device, iteration)
        old, ok, paid = on_device.latest(HORIZON)
        assert differences(seen, old) == [] and torch.equal(valid, ok) and torch.equal(reward.where(ok, 0.0), paid)
    assert differences(replay.state_dict(), {**on_device.state_dict(), "generator": replay._drawn_with}) == []


def test_cut_ends_windows_and_clear_empties_host_replay() -> None:
    replay = memory()
    for iteration in range(2):
        roll(replay, iteration)
        replay.exchange()
    replay.cut()
    assert (replay.memory.ends[2 * HORIZON - 1] != 0).all()
    replay.clear()
    roll(replay, 2)
    replay.exchange()
    assert replay.fill == 0 and not sampled(replay).weight.any()


def test_interrupted_rollout_restarts() -> None:
    it = OffPolicyLearner("sac", RandomEnv(8), {"replay": {"device": "cpu"}})
    it.train(1)
    rewards = []
    it.algorithm.begin_rollout()  # a CUDA graph capture fails after its first step
    it.algorithm.record(it.algorithm.act(it.obs), it.env.step(torch.zeros(8, 3)))
    record = it.algorithm.record
    it.algorithm.record = lambda a, step: (rewards.append(step.reward.clone()), record(a, step))  # type: ignore[method-assign]
    it.train(1)
    memory: Any = it.algorithm.replay
    memory.state_dict()  # waits
    assert torch.equal(memory.memory.reward[4:8], torch.stack(rewards).masked_fill(memory.memory.ends[4:8] >= 4, 0.0))


def test_thread_error_is_raised_by_next_exchange() -> None:
    replay = memory()

    def broken(*_: object) -> None:
        raise RuntimeError("no room")

    replay.memory.extend = broken  # type: ignore[method-assign]
    replay.exchange()
    with pytest.raises(RuntimeError, match="no room"):
        replay.exchange()


def test_priorities_with_host_replay_are_rejected() -> None:
    with raises(ConfigError, key="sac.replay.alpha", got=0.6):
        OffPolicyLearner("sac", RandomEnv(8), {"replay": {"device": "cpu", "alpha": 0.6}})
