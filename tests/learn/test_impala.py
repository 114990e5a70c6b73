"""IMPALA: age of rollouts, dropped samples, checkpoints."""

from __future__ import annotations

import pytest
import torch

from gpusim_rl.learn.impala import Impala
from helpers.fakes import RandomEnv
from helpers.on_policy import collect, make_on_policy


def test_impala_without_delay_equals_a2c_with_full_returns() -> None:
    ends = []
    for name, changes in (("a2c", {"gae_lambda": 1.0}), ("impala", {"delay": 0, "loss": "gradient"})):
        torch.manual_seed(1)
        env = RandomEnv(8, {"policy": 5})
        it = make_on_policy(name, env, learning_rate=1e-3, **changes)
        for _ in range(3):
            collect(it, env)
            it.update()
        ends.append([parameter.clone() for parameter in it.policy.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_checkpoint_holds_only_recorded_rollouts() -> None:
    def made() -> Impala:
        torch.manual_seed(0)
        it = make_on_policy("impala", env, delay=7)
        assert isinstance(it, Impala)
        return it

    env = RandomEnv(8, {"policy": 5})
    first = made()
    for _ in range(2):
        collect(first, env)
        first.update()
    state = first.state_dict()
    assert {len(ring) for ring in state["ring"]} == {2}
    again, older = made(), made()
    again.load_state_dict(state)
    older.load_state_dict({**state, "ring": [ring.clone() for ring in first._ring]})  # all rows: older checkpoints
    for it in (again, older):
        assert torch.equal(it._versions, first._versions)
        assert all(torch.equal(*pair) for pair in zip(it._ring, first._ring, strict=True))


@pytest.mark.parametrize(("max_policy_lag", "dropped"), [(8, 0), (1, 2)])
def test_policy_lag_of_envs_follows_schedule(max_policy_lag: int, dropped: int) -> None:
    env = RandomEnv(6)
    it = make_on_policy("impala", env, delay=2, max_policy_lag=max_policy_lag, network={"rnn": "lstm"})
    assert isinstance(it, Impala)
    hidden = []
    for number in range(5):
        collect(it, env)
        it.rollout.reward.fill_(float(number))
        it.rollout.diverged.zero_()
        hidden.append([state.clone() for state in it.exploration.hidden])
        stats = it.update()
        behind = torch.tensor([0, 0, 1, 1, 2, 2])
        known = (behind <= number) & (behind <= max_policy_lag)
        assert torch.equal(it.rollout.valid, known.expand(it.horizon, 6))
        assert it.rollout.reward[:, known].unique(dim=0).tolist() == [(number - behind[known]).tolist()]
        assert stats["policy/lag_max"] == min(number, 2, max_policy_lag) and stats["policy/lag_min"] == 0.0
        assert stats["policy/lag_mean"].item() == pytest.approx(behind[known].float().mean().item())
        assert stats["policy/dropped"].item() == pytest.approx(1.0 - known.float().mean().item())
        for env_index in torch.nonzero(known).flatten().tolist():
            then = hidden[number - int(behind[env_index])]
            for own, expected in zip(it.rollout.last_hidden, then, strict=True):
                assert torch.equal(own[:, env_index], expected[:, env_index])
    assert round(6 * stats["policy/dropped"].item()) == dropped


def test_only_older_rollouts_have_importance_ratios() -> None:
    env = RandomEnv(4)
    it = make_on_policy("impala", env, delay=1, learning_rate=0.05)
    assert isinstance(it, Impala)
    for _ in range(3):
        collect(it, env)
        it.update()
    newest, older = it._log_ratio[:, :2], it._log_ratio[:, 2:]
    assert newest.abs().max() < 1e-5
    assert older.abs().max() > 1e-3
