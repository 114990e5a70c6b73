"""Pixel replay against plain Python: episode starts, ring wraparound, final observations, compression."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec
from gpusim_rl.learn.pixel_replay import BLOCK, PixelReplay
from gpusim_rl.learn.prioritized import Priorities
from gpusim_rl.learn.replay import Trajectory, Transitions
from gpusim_rl.spaces import Box
from helpers.fakes import Outcome, RandomEnv
from helpers.off_policy import store
from helpers.raised import raises
from helpers.states import saved_bytes

CPU = torch.device("cpu")
GAMMA, SHAPE = 0.9, (3, 4, 2)
needs_lz4 = pytest.mark.skipif(importlib.util.find_spec("lz4") is None, reason="pip install lz4")
COMPRESS = [pytest.param(False, id="plain"), pytest.param(True, id="lz4", marks=needs_lz4)]


def make(
    steps: int, envs: int, *, stack: int, n: int = 1, episode: int = 1, compress: bool = False, final: bool = True
) -> PixelReplay:
    spec = EnvSpec(envs, {"joints": 2}, Box(1), episode, images={"camera": SHAPE}, final_images=final)
    groups, kind = ["camera", "joints"], torch.float32
    more = {"stack": stack, "n_step": n, "gamma": GAMMA, "storage": kind, "device": CPU, "compress": compress}
    return PixelReplay(steps, spec, groups, **more)


def stacked(frames: list[Tensor], stack: int) -> Tensor:
    """Return the stack of the last frames of an episode."""
    padded = [torch.zeros_like(frames[0])] * (stack - 1) + frames
    return torch.cat(padded[len(padded) - stack :], dim=-1)


def sample(replay: PixelReplay, size: int, seed: int) -> Transitions:
    drawn = replay.sample(size, torch.Generator().manual_seed(seed))
    replay.with_frames(drawn)
    return drawn


@dataclass
class Story:
    """Envs that observe noise, with a complete history."""

    replay: PixelReplay
    seed: int = 0
    ends: tuple[float, float, float] = (0.1, 0.1, 0.05)
    frames: list[list[Tensor]] = field(default_factory=list)
    """Indexed by step and env."""
    final: list[Tensor] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.progress = torch.zeros(self.replay.num_envs, dtype=torch.int64)

    def images(self) -> Tensor:
        return torch.randint(256, (self.replay.num_envs, *SHAPE), dtype=torch.uint8, generator=self.random)

    def write(self, steps: int, limit: int | None = None) -> None:
        """Write steps of envs whose episodes end at random or at a time limit."""
        for _ in range(steps):
            envs = self.replay.num_envs
            self.progress += 1
            kind = torch.rand(3, envs, generator=self.random)
            truncated = kind[1] < self.ends[1] if limit is None else self.progress >= limit
            terminated, diverged = kind[0] < self.ends[0], kind[2] < self.ends[2]
            reward = torch.randn(envs, generator=self.random).masked_fill(diverged, 0.0)
            frames, final = self.images(), self.images()
            number = torch.full((envs, 2), float(len(self.frames)))
            step = Outcome({}, {"camera": final, "joints": number + 0.5}, reward, terminated, truncated, diverged)
            store(self.replay, {"camera": frames, "joints": number}, number[:, :1], step)
            self.frames.append(list(frames))
            self.final.append(final)
            self.outcomes.append(step)
            self.progress.masked_fill_(step.done, 0)

    def history(self, t: int, env: int) -> list[Tensor]:
        """Return frames of the episode up to the observation before step t."""
        first = t
        while first > 0 and not self.outcomes[first - 1].done[env]:
            first -= 1
        return [self.frames[now][env] for now in range(first, t + 1)]

    def check(self, drawn: Any) -> set[tuple[int, int]]:
        """Compare samples with expected ones; return the window starts with non-zero weight."""
        replay, found = self.replay, set()
        first_kept = max(0, len(self.frames) - replay.num_steps)
        for i, place in enumerate(drawn.index.tolist()):
            t, env = int(drawn.action[i]), place % replay.num_envs
            # Unknown whether the oldest stored step begins an episode: the end before it is overwritten.
            begins = t - len(self.history(t, env)) + 1
            whole = first_kept == 0 or begins > first_kept or t - replay.stack + 1 >= first_kept
            last = t
            while last < t + replay.n_step - 1 and not self.outcomes[last].done[env]:
                last += 1
            end = self.outcomes[last]
            cut = bool(end.truncated[env]) and not end.terminated[env]
            counts = whole and not end.diverged[env] and (replay._has_final or not cut)
            assert (drawn.weight[i] > 0) == counts, (t, env)
            if drawn.weight[i] == 0:
                continue
            found.add((t, env))
            assert drawn.obs["joints"][i].tolist() == [t, t]
            assert torch.equal(drawn.obs["camera"][i], stacked(self.history(t, env), replay.stack))
            if end.terminated[env]:
                assert drawn.discount[i] == 0.0
                continue
            if end.truncated[env]:
                following = [*self.history(last, env), self.final[last][env]]
            else:
                following = self.history(last + 1, env)
            assert torch.equal(drawn.next_obs["camera"][i], stacked(following, replay.stack))
        return found


@pytest.mark.parametrize("compress", COMPRESS)
@pytest.mark.parametrize(("stack", "n"), [(1, 1), (2, 3), (4, 1), (6, 2)])
@pytest.mark.parametrize("written", [7, 17, 61])
def test_samples_equal_plain_python(stack: int, n: int, written: int, compress: bool) -> None:
    story = Story(make(2 * BLOCK, 3, stack=stack, n=n, compress=compress), seed=written)
    story.write(written)
    found = story.check(sample(story.replay, 400, 1))
    assert found


@pytest.mark.parametrize("n", [1, 3])
def test_without_final_images_truncated_windows_have_zero_weight(n: int) -> None:
    without, with_final = (Story(make(16, 3, stack=3, n=n, final=final)) for final in (False, True))
    for story in (without, with_final):
        story.write(41)
    assert without.check(sample(without.replay, 400, 1))
    weights = [sample(story.replay, 400, 1).weight.sum() for story in (without, with_final)]
    assert weights[0] < weights[1]
    sizes = [story.replay.expected_bytes for story in (without, with_final)]
    assert sizes[0] < sizes[1] - 15 * 3 * np.prod(SHAPE) < sizes[1] < (16 + 17 + 1) * 3 * (np.prod(SHAPE) + 40)


@pytest.mark.parametrize("compress", COMPRESS)
def test_extend_with_several_image_groups_equals_single_steps(compress: bool) -> None:
    shapes = {"left": (3, 4, 2), "right": (2, 2, 1)}
    spec = EnvSpec(2, {"policy": 1}, Box(1), 1, images=shapes, final_images=True)
    more: Any = {"stack": 2, "n_step": 1, "gamma": GAMMA, "storage": torch.float16, "device": CPU, "compress": compress}
    at_once, one_by_one = (PixelReplay(2 * BLOCK, spec, ["policy", *shapes], **more) for _ in range(2))
    env = RandomEnv(2, {"policy": 1}, 1, images=shapes)
    for _ in range(5):
        rollout = Trajectory.empty(5, spec, at_once.groups, CPU)
        for _ in range(5):
            obs, step = env.reset(), env.step(torch.zeros(2, 1))
            rollout.write(obs, torch.zeros(2, 1), step)
            store(one_by_one, obs, torch.zeros(2, 1), step)
        at_once.extend(rollout)
    a, b = (sample(replay, 200, 0) for replay in (at_once, one_by_one))
    assert a.weight.sum() > 50
    assert torch.equal(a.weight, b.weight)
    for mine, theirs in ((a.obs, b.obs), (a.next_obs, b.next_obs)):
        assert set(mine) == {"policy", "left", "right"} and mine["left"].shape == (200, 3, 4, 4)
        assert all(torch.equal(mine[group], theirs[group]) for group in mine)


@pytest.mark.parametrize("compress", COMPRESS)
def test_episodes_ending_at_time_limit_are_sampled(compress: bool) -> None:
    story = Story(make(3 * BLOCK, 4, stack=4, n=2, episode=5, compress=compress), ends=(0.0, 0.0, 0.0))
    story.progress = torch.tensor([0, 1, 2, 4])  # staggered starts
    story.write(70, limit=5)
    found = story.check(sample(story.replay, 2000, 1))
    starts = {(t, e) for t in range(46, 68) for e in range(4)}
    assert found <= starts and len(found) >= len(starts) - 3 * 4, "complete windows are excluded"


# Known pitfalls


def only_step(story: Story, t: int) -> Any:
    """Return the transition that begins with step t of the first env."""
    replay = story.replay
    drawn = replay.at(torch.tensor([t % replay.num_steps * replay.num_envs]))
    replay.with_frames(drawn)
    return drawn


def test_frame_stack_stops_at_a_cut() -> None:
    story = Story(make(16, 1, stack=3), ends=(0.0, 0.0, 0.0))
    story.write(3)
    story.replay.cut()
    story.write(3)
    assert torch.equal(only_step(story, 3).obs["camera"][0], stacked([story.frames[3][0]], 3))
    assert only_step(story, 2).weight == 0.0


@pytest.mark.parametrize("compress", COMPRESS)
def test_half_overwritten_block_keeps_its_other_half(compress: bool) -> None:
    story = Story(make(2 * BLOCK, 2, stack=1, compress=compress), ends=(0.0, 0.0, 0.0))
    for written in range(1, 3 * BLOCK):
        story.write(1)
        for t in range(max(0, written - 2 * BLOCK), written - 1):
            assert torch.equal(only_step(story, t).obs["camera"][0], story.history(t, 0)[-1])


# Compression


@needs_lz4
def test_lz4_compresses_similar_frames() -> None:
    packed, random = make(4 * BLOCK, 2, stack=2, compress=True, episode=1000), torch.Generator().manual_seed(0)
    frame = torch.randint(256, (2, *SHAPE), dtype=torch.uint8, generator=random)
    no = torch.zeros(2, dtype=torch.bool)
    for t in range(4 * BLOCK):
        frame[:, 0, 0, 0] = t
        seen = {"camera": frame, "joints": torch.zeros(2, 2)}
        store(packed, seen, torch.zeros(2, 1), Outcome(seen, seen, torch.zeros(2), no, no, no))
    stored = sum(map(len, packed.frames["camera"]._blocks))  # type: ignore[union-attr]
    assert stored < 0.4 * 4 * BLOCK * frame.numel()


def test_missing_lz4_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lz4", None)
    monkeypatch.delitem(sys.modules, "lz4.block", raising=False)
    with raises(ConfigError, problem="lz4.block is missing", hint="Try pip install 'gpusim-rl[encoders]'"):
        make(2 * BLOCK, 1, stack=2, compress=True)


# As a replay buffer


@pytest.mark.parametrize("compress", COMPRESS)
@pytest.mark.parametrize("written", [0, 40])
def test_restored_replay_continues_like_the_original(written: int, compress: bool) -> None:
    one, other = (Story(make(2 * BLOCK, 2, stack=3, n=2, compress=compress)) for _ in range(2))
    one.write(written)
    other.write(11)  # something to replace
    other.replay.load_state_dict(one.replay.state_dict())
    for story in (one, other):
        story.random.manual_seed(7)
        story.progress.zero_()
        story.write(4)
    a, b = (sample(story.replay, 100, 3) for story in (one, other))
    assert torch.equal(a.weight, b.weight)
    where = a.weight > 0
    for name in ("obs", "next_obs"):
        assert torch.equal(getattr(a, name)["camera"][where], getattr(b, name)["camera"][where])


def test_priorities_sample_pixel_replay() -> None:
    replay = make(16, 3, stack=3, n=2)
    priorities = Priorities(replay, 0.6)
    story = Story(replay)
    for _ in range(25):
        story.write(1)
        priorities.after_write(1)
    drawn = priorities.sample(300, torch.Generator().manual_seed(0), torch.tensor(0.0))
    replay.with_frames(drawn)
    assert story.check(drawn)


@pytest.mark.parametrize("compress", COMPRESS)
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("written", [0, 20])
def test_saved_replay_is_as_large_as_its_contents(written: int, final: bool, compress: bool) -> None:
    story = Story(make(400 * BLOCK, 2, stack=3, compress=compress, final=final))
    story.write(written)
    transition = 2 * (int(np.prod(SHAPE)) + 40) + 24  # two frames, and numbers
    assert saved_bytes(story.replay.state_dict()) <= written * 2 * transition + 100
