"""Random network distillation: reward, schedule, statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.rnd import RandomDistillation
from gpusim_rl.learn.rollout import Rollout
from helpers.composed import algorithm_defaults
from helpers.fakes import Learner, RandomEnv, ppo_config
from helpers.on_policy import prepared
from helpers.raised import raises
from helpers.training import make_trainer


def learner(env: Any = None, *, device: str = "cpu", more: Any = None, **rnd: Any) -> Learner:
    changes = {key: rnd.pop(key) for key in list(rnd) if key not in algorithm_defaults("ppo")["rnd"]}
    settings = {"minibatch_size": 32, "epochs": 2, **changes}
    cfg = ppo_config(
        settings.pop("network", None), rnd={**algorithm_defaults("ppo")["rnd"], "weight": 1.0, **rnd}, **settings
    )
    return Learner(env or RandomEnv(8, device=device), cfg, device=device, more=more or {})


def rnd_of(it: Learner) -> RandomDistillation:
    found = it.ppo.extensions["rnd"]
    assert isinstance(found, RandomDistillation)
    return found


def reward_of(it: Learner, rollout: Rollout) -> Tensor:
    """Return the intrinsic reward alone."""
    nothing = torch.zeros_like(rollout.reward)
    return rnd_of(it).begin_update(rollout, nothing, {}, it.policy).detach() / it.cfg.reward_scale


def test_rnd_reward_is_distance_times_weight_and_dt():
    it = learner(more={"dt": 0.02}, weight=3.0)
    it.train(2)
    it.collect()
    rnd, rollout = rnd_of(it), it.rollout
    states = [*rollout.obs["policy"][1:], rollout.last_obs["policy"]]  # after each step
    with torch.no_grad():
        seen = rnd.seen(torch.stack(states))
        squares = (rnd.predictor(seen) - rnd.target(seen)).square().sum(dim=-1)
    torch.testing.assert_close(reward_of(it, rollout), 0.06 * squares.sqrt())


def test_rnd_reward_is_added_to_training_reward_only():
    it = learner(reward_scale=0.5)
    it.collect()
    before = it.rollout.reward.clone()
    expected = reward_of(it, it.rollout)
    torch.testing.assert_close(prepared(it.ppo)[0], 0.5 * (before + expected))
    it.update()
    assert torch.equal(it.rollout.reward, before)


class Rooms(RandomEnv):
    """Envs whose observations stay in one room until the door opens."""

    open = False

    def _obs(self) -> dict[str, Tensor]:
        obs = super()._obs()["policy"]
        return {"policy": 6.0 - obs if self.open else obs.clamp(max=3.0)}


def test_rnd_reward_falls_for_familiar_and_rises_for_new_states():
    env = Rooms(16)
    it = learner(env, learning_rate=1e-2, clip_obs=100.0)
    rewards = []
    for _ in range(30):
        it.collect()
        rewards.append(float(it.update()["rnd/reward"]))
    assert rewards[-1] < 0.1 * rewards[0]
    env.open = True
    it.collect()
    assert float(it.update()["rnd/reward"]) > 3.0 * rewards[-1]


def test_only_rnd_predictor_learns_with_separate_optimizer():
    it = learner()
    rnd = rnd_of(it)
    target, predictor = ([x.clone() for x in net.parameters()] for net in (rnd.target, rnd.predictor))
    loss = [float(it.update()["loss/rnd"]) for _ in range(20) if it.collect() is None]
    assert all(torch.equal(a, b) for a, b in zip(target, rnd.target.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(predictor, rnd.predictor.parameters(), strict=True))
    assert loss[-1] < 0.5 * loss[0]
    assert not {*map(id, it.ppo.steps.optimizer.parameters)} & {*map(id, rnd.predictor.parameters())}


def test_rnd_statistics_change_after_the_update():
    it = learner()
    it.collect()
    assert not rnd_of(it).seen.mean.any()
    reward_of(it, it.rollout)
    assert not rnd_of(it).seen.mean.any()
    it.update()
    assert rnd_of(it).seen.mean.all()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [2.0] * 8),
        ("step", [2.0] * 5 + [1.0] * 3),
        ("linear", [2.0, 2.0, 2.0, 2.0 - 1.0 / 3.0, 2.0 - 2.0 / 3.0, 1.0, 1.0, 1.0]),
    ],
)
def test_rnd_schedules_count_control_steps(schedule, expected):
    it = learner(horizon=4, weight=2.0, final_weight=1.0, begin=2, end=5, schedule=schedule)
    weights = []
    for _ in range(2):
        weights.append(rnd_of(it).weights_of_steps())
        it.train(1)
    torch.testing.assert_close(torch.cat(weights), torch.tensor(expected))


def test_normalized_rnd_reward_is_divided_by_std_of_returns():
    it = learner(normalize=True)
    it.collect()
    rnd = rnd_of(it)
    plain = learner()
    rnd.predictor.load_state_dict(rnd_of(plain).predictor.state_dict())
    rnd.target.load_state_dict(rnd_of(plain).target.state_dict())
    raw, got = reward_of(plain, it.rollout), reward_of(it, it.rollout)
    sums, total = [], torch.zeros(8)
    for row in raw:
        total = 0.99 * total + row
        sums.append(total)
    valid = torch.stack(sums)[it.rollout.valid]
    torch.testing.assert_close(got, raw / torch.sqrt(valid.var(unbiased=False) + 1e-5))


def test_rnd_can_be_added_at_resume_and_is_described(tmp_path):
    settings = {"ppo": {"rnd": {"weight": 1.0, "schedule": "linear", "end": 20}}}
    make_trainer("Cartpole", tmp_path, max_iterations=1).train()
    [file] = tmp_path.glob("*/2*/checkpoints/last.pt")
    begun = make_trainer("Cartpole", tmp_path / "b", max_iterations=2, checkpoint=str(file), **settings)
    assert begun.algorithm.describe()["rnd"].endswith("linear to 0 at step 20")
    begun.train()


def test_unknown_rnd_group_is_rejected():
    env = RandomEnv(8, {"policy": 5, "critic": 7})
    assert rnd_of(learner(env)).group == "critic"
    assert rnd_of(learner(env, group="policy")).group == "policy"
    with raises(ConfigError, key="ppo.rnd.group", got="polcy", hint="Did you mean 'policy'?"):
        learner(env, group="polcy")
