"""Remote actors and the learners that train on their recordings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpusim_rl.learn.algorithm import ActorPlace, EnvSpec, LearnerContext, load_algorithm_class
from gpusim_rl.learn.remote import remote_class, remote_of
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import ALGORITHMS
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import merged
from helpers.composed import algorithm_defaults
from helpers.fakes import RandomEnv
from helpers.on_policy import collect, on_policy_config

ENVS, ACTORS = 3, 2
SMALL_OFF_POLICY: dict[str, Any] = {
    "horizon": 6,
    "n_step": 3,
    "batch_size": 16,
    "learning_starts": 16,
    "precision": "fp32",
    "replay": {"capacity": 600},
}


def settings(name: str, **changes: Any) -> Any:
    if name in ("impala", "a2c"):
        return on_policy_config(name, **changes)
    defaults = algorithm_defaults(name)
    return build(ALGORITHMS[name][1], merged(defaults, SMALL_OFF_POLICY, changes), name)


def make(name: str, env: RandomEnv, *, place: ActorPlace | None = None, seed: int = 0, **changes: Any) -> Any:
    """Build an actor if `place` is given, else a learner."""
    torch.manual_seed(0)
    spec = EnvSpec(env.num_envs, env.obs_sizes, Box(env.num_actions), 5)
    context = LearnerContext(name, actor=place)
    cls: Any = load_algorithm_class(ALGORITHMS[name][0])
    return cls(settings(name, **changes), spec, context, device=torch.device("cpu"), seed=seed, max_iterations=100)


def make_learner(name: str, env: RandomEnv, **changes: Any) -> Any:
    return remote_of(make(name, env, **changes))


def make_actor(name: str, env: RandomEnv, *, number: int = 0, **changes: Any) -> Any:
    return remote_of(make(name, env, place=ActorPlace(number * ENVS, ENVS * ACTORS), **changes))


@pytest.mark.parametrize("name", ["impala", "sac", "td3", "dqn"])
def test_learner_receives_recordings_of_its_actors(name: str) -> None:
    learner = make_learner(name, RandomEnv(ENVS * ACTORS))
    actors, recordings = [], []
    for number in range(ACTORS):
        env = RandomEnv(ENVS, seed=number)
        actor = make_actor(name, env, number=number, seed=number)
        actor.load_acting_state(learner.acting_state())
        collect(actor.algorithm, env, env.reset())
        sent = [tensor for tensor, _ in actor.recording()]
        learner.receive(slice(number * ENVS, (number + 1) * ENVS), sent)
        actors.append(actor)
        recordings.append(sent)
    for (own, dim), *sent in zip(learner.recording(), *recordings, strict=True):
        assert torch.equal(own, torch.cat(sent, dim=dim))
    algorithm = learner.algorithm
    before = [parameter.clone() for parameter in algorithm.policy.parameters()]
    for _ in range(2):
        learner.end_receiving()
        algorithm.before_update()
        stats = algorithm.update()
    assert all(torch.isfinite(value) for value in stats.values())
    assert any(not torch.equal(x, y) for x, y in zip(before, algorithm.policy.parameters(), strict=True))


def test_actor_loads_weights_and_progress_from_another_device() -> None:
    """Weights may come from a CUDA learner in pinned memory."""
    learner, actor = make_learner("sac", RandomEnv(ENVS)), make_actor("sac", RandomEnv(ENVS))
    actor.algorithm.steps, actor.algorithm.policy = actor.algorithm.steps.to("meta"), actor.algorithm.policy.to("meta")
    actor.load_acting_state(learner.acting_state())


@pytest.mark.parametrize("rnn", [None, "lstm"])
def test_impala_learns_the_same_from_actors_as_from_local_envs(rnn: str | None) -> None:
    changes = {"network": {"rnn": rnn}, "delay": 0}
    alone, learner, actor = (made("impala", RandomEnv(ENVS), **changes) for made in (make, make_learner, make_actor))
    env, other = RandomEnv(ENVS, seed=3), RandomEnv(ENVS, seed=3)
    obs, other_obs = env.reset(), other.reset()
    for _ in range(3):
        obs = collect(alone, env, obs)
        alone.update()
        actor.load_acting_state(learner.acting_state())
        other_obs = collect(actor.algorithm, other, other_obs)
        learner.receive(slice(0, ENVS), [tensor for tensor, _ in actor.recording()])
        learner.end_receiving()
        learner.algorithm.update()
        for one, two in zip(alone.policy.parameters(), learner.algorithm.policy.parameters(), strict=True):
            assert torch.equal(one, two)


def test_impala_resumes_with_different_number_of_actors() -> None:
    before, now = (make("impala", RandomEnv(ENVS * actors)) for actors in (1, ACTORS))
    now.load_state_dict({**before.state_dict(), "episodes": None})
    assert now.steps.iteration == before.steps.iteration


def test_n_step_windows_end_at_rollout_boundaries() -> None:
    remote = make_learner("sac", RandomEnv(ENVS))
    learner = remote.algorithm
    env = RandomEnv(ENVS, seed=1, ends=(0.0, 0.0, 0.0))
    actor = make_actor("sac", env)
    obs, sent = env.reset(), []
    for _ in range(4):
        obs = collect(actor.algorithm, env, obs)
        rollout = [tensor.clone() for tensor, _ in actor.recording()]
        remote.receive(slice(0, ENVS), rollout)
        remote.end_receiving()
        sent.append(rollout)
    horizon, gamma = learner.horizon, learner.cfg.gamma
    slots = torch.arange(4 * horizon).repeat_interleave(ENVS)  # slot of each transition
    found = learner.replay.at(torch.arange(4 * horizon * ENVS))
    acted_on, action, final_obs, reward = (torch.cat([rollout[i] for rollout in sent]) for i in range(4))
    last = learner.cfg.n_step - 1
    for index, slot in enumerate(slots.tolist()):
        env_index, left = index % ENVS, horizon - slot % horizon  # steps of the rollout from here on
        if slot + last + 1 >= 4 * horizon:
            continue  # the observation after the longest window is not stored yet
        steps = min(learner.cfg.n_step, left)
        window = reward[slot : slot + steps, env_index]
        expected = (window * gamma ** torch.arange(steps)).sum()
        assert found.weight[index] == 1.0
        torch.testing.assert_close(found.reward[index], expected)
        torch.testing.assert_close(found.discount[index], torch.tensor(gamma**steps))
        assert torch.equal(found.obs["policy"][index], acted_on[slot, env_index])
        at_end = steps == left  # of the rollout: the next slot belongs to another actor
        following = final_obs[slot + steps - 1, env_index] if at_end else acted_on[slot + steps, env_index]
        assert torch.equal(found.next_obs["policy"][index], following)
        assert torch.equal(found.action[index], action[slot, env_index])


def test_each_actor_gets_its_share_of_the_epsilon_ladder() -> None:
    whole = make("dqn", RandomEnv(ENVS * ACTORS), epsilon_ladder=7.0)
    actors = [make_actor("dqn", RandomEnv(ENVS), number=number, epsilon_ladder=7.0) for number in range(ACTORS)]
    parts = [actor.algorithm.epsilon(whole.steps) for actor in actors]
    assert torch.equal(whole.epsilon(whole.steps), torch.cat(parts))


def test_actors_adopt_transition_count_of_the_learner() -> None:
    learner, actor = make_learner("dqn", RandomEnv(ENVS * ACTORS)), make_actor("dqn", RandomEnv(ENVS))
    learner.algorithm.steps.fill_(50)
    actor.load_acting_state(learner.acting_state())
    assert actor.algorithm.steps * ENVS == 50 * ENVS * ACTORS


def test_only_off_policy_corrected_algorithms_support_actors() -> None:
    able = {name for name, (target, _) in ALGORITHMS.items() if remote_class(load_algorithm_class(target))}
    assert able == {"impala", "sac", "td3", "dqn"}


@pytest.mark.parametrize("name", ["impala", "sac"])
def test_begin_episodes_resets_actor_noise_and_hidden_state(name: str) -> None:
    network = {"network": {"rnn": "lstm"}} if name == "impala" else {}
    env = RandomEnv(ENVS, ends=(0.0, 0.0, 0.0))
    actor = make_actor(name, env, noise={"kind": "held", "steps": [5.0]}, **network)
    collect(actor.algorithm, env, env.reset())
    acting = getattr(actor.algorithm, "exploration", actor.algorithm)
    held = acting.noise.now.clone()
    actor.begin_episodes()
    if name == "impala":
        assert acting.is_first.all() and not any(state.any() for state in acting.hidden)
    actor.algorithm.begin_rollout()
    assert (acting.noise.now[:, :3] != held[:, :3]).all()


TOGETHER = {"impala": {}, "impala, lstm": {"network": {"rnn": "lstm"}}, "sac": {}, "dqn": {"epsilon_ladder": 7.0}}


@pytest.mark.parametrize("kind", TOGETHER)
def test_batched_acting_equals_acting_one_by_one(kind: str) -> None:
    name, seeds = kind.partition(",")[0], range(ACTORS)
    actors, alone = (
        [make_actor(name, RandomEnv(ENVS), number=n, seed=n, **TOGETHER[kind]) for n in seeds] for _ in range(2)
    )
    for actor in [*actors, *alone]:
        if name != "impala":
            actor.algorithm.steps.fill_(1000)
        actor.algorithm.begin_rollout()
    obs = [RandomEnv(ENVS, seed=n).reset() for n in range(ACTORS)]
    with torch.no_grad():
        together = actors[0].act_together(actors, obs)
        for number in range(ACTORS):
            one_by_one = alone[number].algorithm.act(obs[number])
            torch.testing.assert_close(together[number], one_by_one, rtol=1e-5, atol=1e-6)
    step = RandomEnv(ENVS).step(together[0])
    actors[0].algorithm.record(together[0], step)  # uses the values kept by act_together
    alone[0].algorithm.record(together[0], step)
    for (one, _), (two, _) in zip(actors[0].recording(), alone[0].recording(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["impala", "sac"])
def test_interrupted_rollout_does_not_shift_the_next_one(name: str) -> None:
    env, remote = RandomEnv(ENVS, seed=1), make_actor(name, RandomEnv(ENVS))
    obs, actor = env.reset(), remote.algorithm
    with torch.no_grad():
        actor.begin_rollout()
        for _ in range(2):
            action = actor.act(obs)
            step = env.step(action)
            actor.record(action, step)
            obs = step.obs
        actor.begin_rollout()
        action = actor.act(obs)
        actor.record(action, env.step(action))
    assert torch.equal(remote.recording()[0][0][0], obs["policy"])
