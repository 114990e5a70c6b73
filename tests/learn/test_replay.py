"""Replay buffer against plain Python: windows, episode ends, write position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.prioritized import Priorities
from gpusim_rl.learn.replay import STORAGE, Replay, Trajectory
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import differences
from helpers.fakes import Outcome
from helpers.off_policy import store
from helpers.states import saved_bytes

CPU = torch.device("cpu")
GAMMA = 0.9


def make_replay(steps: int, envs: int, *, n: int = 1, episode: int = 1, size: int = 2, storage: str = "fp32") -> Replay:
    spec = EnvSpec(envs, {"policy": size}, Box(1), episode)
    return Replay(steps, spec, ["policy"], n_step=n, gamma=GAMMA, storage=STORAGE[storage], device=CPU)


@dataclass
class Story:
    """Envs with numbered observations: env + N * 2 t, and env + N * (2 t + 1) for final observations."""

    replay: Replay
    terminated: list[list[int]] = field(default_factory=list)
    truncated: list[list[int]] = field(default_factory=list)
    diverged: list[list[int]] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)

    def obs(self, t: int, *, final: bool = False) -> dict[str, Tensor]:
        number = torch.arange(self.replay.num_envs) + self.replay.num_envs * (2.0 * t + final)
        return {"policy": number[:, None].repeat(1, 2)}

    def write(self, terminated: Any = (), truncated: Any = (), diverged: Any = (), reward: Any = None) -> None:
        """Write one step; the arguments are indices of envs that end."""
        envs, t = self.replay.num_envs, len(self.rewards)
        masks = [torch.tensor([e in where for e in range(envs)]) for where in (terminated, truncated, diverged)]
        reward = torch.full((envs,), float(t + 1)) if reward is None else torch.as_tensor(reward)
        for kept, mask in zip((self.terminated, self.truncated, self.diverged), masks, strict=True):
            kept.append(mask.tolist())
        self.rewards.append(reward.tolist())
        step = Outcome(self.obs(t + 1), self.obs(t, final=True), reward, *masks)
        store(self.replay, self.obs(t), torch.full((envs, 1), float(t)), step)

    def expected(self, t: int, env: int) -> tuple[float, float, float, float]:
        """Return reward, next observation number, discount and weight of the window that begins with step t."""
        total, envs = 0.0, self.replay.num_envs
        for k in range(self.replay.n_step):
            now = t + k
            total += GAMMA**k * (0.0 if self.diverged[now][env] else self.rewards[now][env])
            if self.diverged[now][env]:
                return total, -1.0, -1.0, 0.0
            if self.terminated[now][env]:
                return total, -1.0, 0.0, 1.0
            if self.truncated[now][env]:
                return total, env + envs * (2.0 * now + 1), GAMMA ** (k + 1), 1.0
        return total, env + envs * 2.0 * (t + self.replay.n_step), GAMMA**self.replay.n_step, 1.0

    def check(self, draws: int = 600) -> set[tuple[int, int]]:
        """Compare samples with expected ones; return the window starts drawn."""
        batch = self.replay.sample(draws, torch.Generator().manual_seed(1))
        envs, found = self.replay.num_envs, set()
        for i, number in enumerate(batch.obs["policy"][:, 0].tolist()):
            t, env = int(number) // envs // 2, int(number) % envs
            reward, following, discount, weight = self.expected(t, env)
            found.add((t, env))
            assert batch.action[i].item() == t
            assert batch.weight[i].item() == weight
            if weight == 0.0:
                continue
            assert batch.reward[i].item() == pytest.approx(reward, rel=1e-5, abs=1e-5)
            assert batch.discount[i].item() == pytest.approx(discount, rel=1e-6)
            if discount > 0.0:
                assert batch.next_obs["policy"][i].tolist() == [following, following]
        return found


def test_non_finite_action_never_reaches_the_loss() -> None:
    replay, no = make_replay(4, 3), torch.zeros(3, dtype=torch.bool)
    obs = {"policy": torch.ones(3, 2)}
    for _ in range(3):
        step = Outcome(obs, obs, torch.ones(3), no, no, torch.tensor([False, True, False]))
        store(replay, obs, torch.tensor([[1.0], [torch.nan], [3.0]]), step)
    drawn = replay.sample(64, torch.Generator().manual_seed(0))
    assert drawn.action.isfinite().all()  # 0 x NaN is NaN: a weight of 0 is not enough
    assert drawn.action[drawn.weight > 0].unique().tolist() == [1.0, 3.0] and bool((drawn.weight == 0).any())


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("written", [7, 12, 13, 40])
@pytest.mark.parametrize(("episode", "seed"), [(1, 0), (4, 1), (100, 2)])
def test_samples_equal_plain_python(n: int, written: int, episode: int, seed: int) -> None:
    steps, envs = 12, 3
    random = torch.Generator().manual_seed(seed)
    story = Story(make_replay(steps, envs, n=n, episode=episode))
    progress = torch.randint(episode, (envs,), generator=random)  # staggered starts
    for _ in range(written):
        progress += 1
        kind = torch.rand(3, envs, generator=random)
        truncated = (progress >= episode) if episode > 1 else kind[1] < 0.3
        ends = kind[0] < 0.1, truncated, kind[2] < 0.05
        progress = progress.masked_fill(ends[0] | ends[1] | ends[2], 0)
        names = [[e for e in range(envs) if mask[e]] for mask in ends]
        story.write(*names, reward=torch.randn(envs, generator=random).masked_fill(ends[2], torch.nan))
    first = max(0, written - steps)
    assert story.check() == {(t, e) for t in range(first, written - n) for e in range(envs)}


# Known pitfalls


def test_samples_have_zero_weight_until_a_window_is_stored() -> None:
    story = Story(make_replay(8, 2, n=3))
    for _ in range(3):
        assert story.replay.sample(20, torch.Generator()).weight.sum() == 0
        story.write()
    assert story.replay.sample(20, torch.Generator()).weight.sum() == 0
    story.write()
    assert story.check(50) == {(0, 0), (0, 1)}


def test_window_with_lost_final_observation_has_zero_weight() -> None:
    replay = make_replay(6, 1, episode=100)  # reserves two rows for final observations
    story = Story(replay)
    story.write(truncated=[0])
    story.write(truncated=[0])  # exceeds the reserve: overwrites the previous row
    for _ in range(2):
        story.write()
    batch = replay.sample(100, torch.Generator())
    weights = dict(zip(batch.action[:, 0].tolist(), batch.weight.tolist(), strict=True))
    assert weights == {0.0: 0.0, 1.0: 1.0, 2.0: 1.0}


def test_windows_stop_at_a_cut() -> None:
    story = Story(make_replay(8, 1, n=2))
    for t in range(6):
        story.write()
        if t == 2:
            story.replay.cut()
            story.diverged[-1] = [True]
            story.rewards[-1] = [0.0]
    batch = story.replay.sample(200, torch.Generator())
    weights = dict(zip(batch.action[:, 0].tolist(), batch.weight.tolist(), strict=True))
    assert weights == {0.0: 1.0, 1.0: 0.0, 2.0: 0.0, 3.0: 1.0}


# Sampling


def test_every_window_start_is_equally_likely() -> None:
    story = Story(make_replay(11, 10))
    for _ in range(25):
        story.write()
    draws = 100_000
    numbers = story.replay.sample(draws, torch.Generator().manual_seed(0)).obs["policy"][:, 0].long()
    _, counts = numbers.unique(return_counts=True)
    expected = draws / 100
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert len(counts) == 100 and chi_squared < 150.0  # 99 degrees of freedom: 150 has a probability of 0.0007


@pytest.mark.parametrize("storage", STORAGE)
def test_half_precision_storage_rounds_and_clamps(storage: str) -> None:
    replay = make_replay(4, 2, storage=storage, size=1, episode=3)
    obs = {"policy": torch.tensor([[1.0 + 2.0**-6], [1e6]])}
    no = torch.zeros(2, dtype=torch.bool)
    step = Outcome(obs, obs, torch.zeros(2), no, ~no, no)
    for _ in range(3):
        store(replay, obs, torch.zeros(2, 1), step)
    batch = replay.sample(50, torch.Generator())
    largest = 1e6 if storage != "fp16" else 65504.0
    for found in (batch.obs["policy"], batch.next_obs["policy"]):
        assert found.dtype == torch.float32
        assert torch.allclose(found.unique(), torch.tensor([1.0 + 2.0**-6, largest]), rtol=2.0**-8)
    store(replay, {"policy": torch.full((2, 1), torch.inf)}, torch.zeros(2, 1), step)
    assert not replay.latest(1)[0]["policy"].isfinite().any(), "infinite values were clamped"


def test_latest_steps_are_in_order() -> None:
    story = Story(make_replay(4, 2))
    for t in range(6):
        story.write(diverged=[1] if t == 4 else [])
    obs, valid, reward = story.replay.latest(3)
    assert obs["policy"][:, :, 0].tolist() == [[12.0, 13.0], [16.0, 17.0], [20.0, 21.0]]
    assert valid.tolist() == [[True, True], [True, False], [True, True]]
    assert reward.tolist() == [[4.0, 4.0], [5.0, 0.0], [6.0, 6.0]]


def test_extend_with_a_rollout_equals_single_steps() -> None:
    torch.manual_seed(0)
    sizes = {"policy": 2, "critic": 3}
    spec, cpu = EnvSpec(3, sizes, Box(2), 4), torch.device("cpu")
    memory: dict[str, Any] = {"n_step": 2, "gamma": 0.9, "storage": torch.float32, "device": cpu}
    at_once, by_step = (Replay(10, spec, sizes, **memory) for _ in range(2))
    priorities = [Priorities(replay, 0.6) for replay in (at_once, by_step)]
    for rollout in range(5):  # the second rollout fills the ring and wraps
        steps = Trajectory.empty(7, spec, sizes, cpu)
        for t in range(7):
            cut = (torch.arange(3) + 7 * rollout + t) % 4 == 0  # each env has a different time limit
            obs, final = ({g: torch.randn(3, n) for g, n in sizes.items()} for _ in range(2))
            ends = torch.rand(2, 3) < 0.2
            step: Any = Outcome(obs, final, torch.randn(3), ends[0], cut, ends[1])
            action = torch.randn(3, 2)
            steps.write(obs, action, step)
            store(by_step, obs, action, step)
            priorities[1].after_write(1)
        at_once.extend(steps)
        priorities[0].after_write(7)
        assert differences(at_once.state_dict(), by_step.state_dict()) == []
        assert torch.equal(priorities[0].values, priorities[1].values)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("episode", [1, 200])
def test_saved_replay_is_as_large_as_its_contents(episode: int, truncates: bool) -> None:
    written, envs, size = 10, 4, 16
    story = Story(make_replay(20_000, envs, episode=episode))
    priorities = Priorities(story.replay, 0.6)
    for _ in range(written):
        story.write(truncated=[1] if truncates else [])
        priorities.after_write(1)
    stored = {**story.replay.state_dict(), "priorities": priorities.state_dict()}
    assert saved_bytes(stored) <= written * envs * (2 * size + 24) + 100


@pytest.mark.parametrize("written", [0, 7, 8, 30])
@pytest.mark.parametrize("episode", [1, 3])
def test_restored_replay_equals_original_after_more_writes(written: int, episode: int) -> None:
    one, other = (Story(make_replay(8, 3, n=2, episode=episode)) for _ in range(2))
    for t in range(written):
        one.write(truncated=[t % 3] if t % episode == 0 else [])
    other.replay.load_state_dict(one.replay.state_dict())
    other.rewards = list(one.rewards)
    for more in range(12):
        assert differences(one.replay.state_dict(), other.replay.state_dict()) == []
        for name, memory in (("obs", one.replay.obs), ("ends", {"": one.replay.ends})):
            theirs = {"obs": other.replay.obs, "ends": {"": other.replay.ends}}[name]
            assert differences(memory, theirs) == []
        assert torch.equal(one.replay._final_step, other.replay._final_step)
        for story in (one, other):
            story.write(truncated=[more % 3], terminated=[(more + 1) % 3])


def test_replay_of_outdated_layout_is_rejected() -> None:
    replay = make_replay(8, 3)
    state = replay.state_dict()
    del state["final_place"]
    with pytest.raises(ConfigError, match="outdated"):
        replay.load_state_dict(state)
