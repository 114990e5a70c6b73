"""Rollout memory: placement of records, and V(final_obs)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.distributions import DiagonalGaussian
from gpusim_rl.learn.networks import SampledActions
from gpusim_rl.learn.rollout import Rollout
from gpusim_rl.spaces import Box
from helpers.fake_cuda_graph import Recording
from helpers.fakes import Outcome

N, A = 3, 2
SIZES = {"policy": 4, "critic": 2}


def make(T: int = 8, *, sequence_length: int = 1, max_truncations: int = 3, states: int = 0) -> Rollout:
    # the episode length allows `max_truncations` time limits per env in T steps
    env = EnvSpec(N, SIZES, Box(A), max_episode_length=T if max_truncations == 1 else -(-T // max_truncations))
    return Rollout(
        T,
        env,
        2 * A,
        initial_hidden=tuple(torch.zeros(2, N, 5) for _ in range(states)),
        sequence_length=sequence_length,
        device=torch.device("cpu"),
    )


def sample(value: float, hidden: tuple[Tensor, ...] = ()) -> SampledActions:
    return SampledActions(
        action=torch.full((N, A), value),
        distribution=DiagonalGaussian(torch.full((N, A), value + 0.2), torch.full((N, A), value + 0.3)),
        value=torch.full((N,), value + 0.4),
        hidden=hidden,
    )


def obs(value: float) -> dict[str, Tensor]:
    return {g: torch.full((N, s), value) + torch.arange(N)[:, None] * 0.01 for g, s in SIZES.items()}


def mask(*envs: int) -> Tensor:
    return torch.tensor([env in envs for env in range(N)])


def test_rollout_stores_each_record_at_its_step() -> None:
    rollout = make(4)
    for t in range(4):
        step = Outcome(
            obs=obs(t + 1),
            final_obs=obs(100 + t),
            reward=torch.full((N,), 10.0 + t),
            terminated=mask(0) if t == 1 else mask(),
            truncated=mask(1) if t == 1 else mask(),
            diverged=mask(2) if t == 1 else mask(),
        )
        rollout.write(t, obs(t), (), mask(1), sample(float(t)), step)
    for t in range(4):
        for group in SIZES:
            assert torch.equal(rollout.obs[group][t], obs(t)[group])
        assert (rollout.action[t] == t).all() and (rollout.reward[t] == 10 + t).all()
        stored, expected = DiagonalGaussian.stored(rollout.distribution[t]), sample(float(t)).distribution
        assert torch.equal(stored.mean, expected.mean)
        assert torch.equal(stored.log_std, expected.log_std)
        assert torch.equal(rollout.value[t], sample(float(t)).value)
        assert torch.equal(rollout.is_first[t], {0: mask(1), 2: mask(0, 1, 2)}.get(t, mask()))
    assert all(torch.equal(rollout.last_obs[group], obs(4)[group]) for group in SIZES)
    assert rollout.terminated.nonzero().tolist() == [[1, 0]]
    assert rollout.truncated.nonzero().tolist() == [[1, 1]]
    assert (~rollout.valid).nonzero().tolist() == [[1, 2]]
    assert rollout.done.nonzero().tolist() == [[1, 0], [1, 1], [1, 2]]


def truncate(rollout: Rollout, pattern: dict[int, tuple[int, ...]]) -> None:
    """Write all steps; `pattern` maps a step to the envs truncated in it."""
    for t in range(rollout.horizon):
        states = tuple(torch.full((2, N, 5), float(t)) for _ in rollout.final_hidden)
        ended = mask(*pattern.get(t, ()))
        # only final observations of ended envs are meaningful
        final = {g: torch.where(ended[:, None], v, torch.nan) for g, v in obs(100.0 + t).items()}
        after = tuple(torch.full((2, N, 5), t + 0.5) for _ in rollout.final_hidden)
        step = Outcome(obs(t + 1), final, torch.zeros(N), mask(), ended, mask())
        rollout.write(t, obs(t), states, mask(), sample(float(t), after), step)


def test_rollout_keeps_final_obs_of_several_truncations_per_env() -> None:
    rollout = make(8, max_truncations=3, states=2)
    truncate(rollout, {1: (0, 2), 4: (0,), 7: (0, 1)})
    for slot, env, step in ((0, 0, 1), (1, 0, 4), (2, 0, 7), (2, 1, 7), (0, 2, 1)):
        for group in SIZES:
            expected = obs(100.0 + step)[group][env]
            assert torch.equal(rollout.final_obs[group][slot, env], expected)
        for state in rollout.final_hidden:
            assert (state[slot, :, env] == step + 0.5).all()


def test_next_values_use_final_values_after_truncation() -> None:
    rollout = make(8, max_truncations=3)
    truncate(rollout, {1: (0, 2), 4: (0,), 7: (0, 1)})
    final_values = torch.full((3, N), torch.nan)  # slots that are not in use may hold anything
    for slot, env, step in ((0, 0, 1), (1, 0, 4), (2, 0, 7), (2, 1, 7), (0, 2, 1)):
        final_values[slot, env] = 1000.0 + step
    rollout.value.copy_(torch.arange(8.0)[:, None] + torch.arange(N) * 0.1)
    last = torch.tensor([50.0, 51.0, 52.0])
    value = rollout.next_values(last, final_values)
    assert value[:, 0].tolist() == pytest.approx([1, 1001, 3, 4, 1004, 6, 7, 1007])
    assert value[:, 1].tolist() == pytest.approx([1.1, 2.1, 3.1, 4.1, 5.1, 6.1, 7.1, 1007])
    assert value[:, 2].tolist() == pytest.approx([1.2, 1001, 3.2, 4.2, 5.2, 6.2, 7.2, 52.0])


def test_operations_per_step_do_not_grow_with_truncations() -> None:
    """Slots for every step must not cause copies in every step."""

    def operations(max_truncations: int) -> int:
        rollout = make(32, max_truncations=max_truncations)
        with Recording() as recording:
            truncate(rollout, {})
        return len(recording.calls)

    assert operations(32) == operations(1)


def test_new_rollout_drops_old_truncations() -> None:
    rollout = make(4, max_truncations=2)
    truncate(rollout, {0: (0, 1, 2), 3: (0,)})
    truncate(rollout, {2: (1,)})
    value = rollout.next_values(torch.zeros(N), torch.full((2, N), 9.0))
    assert (value == 9.0).nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("sequence_length", [1, 2, 4, 8])
def test_rollout_keeps_recurrent_state_at_start_of_each_sequence(sequence_length: int) -> None:
    rollout = make(8, sequence_length=sequence_length, states=2)
    for t in range(8):
        states = tuple(torch.full((2, N, 5), t + 0.1 * i) for i in range(2))
        step = Outcome(obs(t + 1), obs(t + 1), torch.zeros(N), mask(), mask(), mask())
        rollout.write(t, obs(t), states, mask(), sample(float(t), states), step)
    for i, buffer in enumerate(rollout.hidden):
        assert buffer.shape == (8 // sequence_length, 2, N, 5)
        for sequence in range(len(buffer)):
            expected = torch.full((2, N, 5), sequence * sequence_length + 0.1 * i)
            assert torch.equal(buffer[sequence], expected)
