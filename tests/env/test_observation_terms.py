"""Tests of observation terms: names, scales, noise, delay and history."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from gpusim_rl.tasks.cartpole import Cartpole

from gpusim_rl.env import VecEnv
from gpusim_rl.errors import ConfigError, TaskError
from helpers.painted import Painted
from helpers.raised import raises
from helpers.task_envs import class_env

N = 32


def make(observations: dict[str, Any] | None = None, task_class: type = Cartpole, **task: Any) -> VecEnv:
    settings = {"episode_length": 7, "randomize_episode_start": False, "observations": observations or {}, **task}
    return class_env("Cartpole", N, task_class, **settings)


def truth(env: VecEnv) -> dict[str, torch.Tensor]:
    return {name: term.clone() for name, term in env.task.observe()["policy"].items()}


def actions(steps: int) -> torch.Tensor:
    return torch.rand(steps, N, 1, generator=torch.Generator().manual_seed(1)) * 2 - 1


def split(env: VecEnv, obs: torch.Tensor) -> dict[str, torch.Tensor]:
    terms = env.obs_terms["policy"]
    return dict(zip([p.name for p in terms], obs.split([p.size * p.history for p in terms], dim=1), strict=True))


class Scaled(Cartpole):
    def __init__(self, cfg, sim):
        super().__init__(cfg, sim)
        self.scales = {"pole_vel": 0.25}


def test_terms_are_described_and_joined():
    plain, scaled = make(), make(task_class=Scaled)
    first, second = plain.reset()["policy"], scaled.reset()["policy"]
    assert torch.equal(first * torch.tensor([1.0, 1.0, 1.0, 0.25]), second)
    terms = scaled.obs_terms["policy"]
    assert [(p.name, p.size, p.unit, p.scale) for p in terms] == [
        ("cart_pos", 1, "m", 1.0),
        ("cart_vel", 1, "m/s", 1.0),
        ("pole_angle", 1, "rad", 1.0),
        ("pole_vel", 1, "rad/s", 0.25),
    ]


class Oracle:
    """Reference implementation of one term's delay and history, on lists per env."""

    def __init__(self, history: int):
        self.history, self.seen = history, [[] for _ in range(N)]

    def begin(self, env_id: int) -> None:
        self.seen[env_id] = []

    def see(self, frames: torch.Tensor) -> None:
        for frame, seen in zip(frames, self.seen, strict=True):
            seen.append(frame.clone())

    def read(self, delays: torch.Tensor) -> torch.Tensor:
        rows = []
        for delay, seen in zip(delays.tolist(), self.seen, strict=True):
            ages = range(self.history - 1, -1, -1)
            rows.append(torch.cat([seen[max(len(seen) - 1 - delay - age, 0)] for age in ages]))
        return torch.stack(rows)


@pytest.mark.parametrize("clip", [None, 2.0])
def test_delay_and_history_restart_at_resets(clip):
    settings = {"pole_angle": {"delay": [0, 3], "history": 4}, "cart_vel": {"history": 2}, "pole_vel": {"delay": 2}}
    env = make(settings, clip_observations=clip)
    oracles = {"pole_angle": Oracle(4), "cart_vel": Oracle(2), "pole_vel": Oracle(1)}
    assert env.obs_sizes == {} and env.obs_terms == {}
    obs = env.reset()["policy"]
    assert env.obs_sizes["policy"] == 1 + 2 + 4 + 1 and env._groups.sensors is not None
    names = [term.name for term in env.obs_terms["policy"]]
    delays, drawn = {name: env._groups.sensors._history.delays[:, names.index(name)] for name in oracles}, []
    last: dict[str, torch.Tensor] = {}

    def check(obs: torch.Tensor, seen: dict[str, torch.Tensor]) -> None:
        found = split(env, obs)
        for name, oracle in oracles.items():
            expected = oracle.read(delays[name])
            assert torch.equal(found[name], expected if clip is None else expected.clamp(-clip, clip)), name
        assert torch.equal(found["cart_pos"], seen["cart_pos"])

    now = truth(env)
    for name, oracle in oracles.items():
        oracle.see(now[name])
    check(obs, now)
    advance = env.task.advance

    def watch(done: torch.Tensor) -> None:  # record the state at the end of the step, before resets
        last.update(truth(env))
        last["delay"] = delays["pole_angle"].clone()
        advance(done)

    env.task.advance = watch  # type: ignore[method-assign]
    for action in actions(24):
        step = env.step(action)
        for name, oracle in oracles.items():
            oracle.see(last[name])
        drawn.append(delays["pole_angle"].clone())
        after, delays["pole_angle"] = delays["pole_angle"], last["delay"]  # final_obs has the delay of its episode
        check(step.final_obs["policy"], last)
        delays["pole_angle"] = after
        now = truth(env)
        for name, oracle in oracles.items():
            for env_id in step.done.nonzero().flatten().tolist():
                oracle.begin(env_id)
                oracle.seen[env_id].append(now[name][env_id].clone())
        check(step.obs["policy"], now)
    assert torch.stack(drawn).unique().tolist() == [0, 1, 2, 3]


def test_noise_is_white_and_shared_by_obs_and_final_obs():
    env = make(
        {"pole_vel": {"noise": 0.5}, "cart_pos": {"noise": 0.1}}, randomize_episode_start=True, clip_observations=None
    )
    env.reset()
    noise = []
    for action in actions(200):
        step = env.step(action)
        continues = ~step.done
        assert torch.equal(step.obs["policy"][continues], step.final_obs["policy"][continues])
        clean = truth(env)
        noise.append(step.obs["policy"] - torch.cat([*clean.values()], dim=1))
    white = torch.stack(noise)
    assert white[..., 1:3].abs().max() == 0.0
    assert white[..., 3].std().item() == pytest.approx(0.5, rel=0.03)
    assert white[..., 0].std().item() == pytest.approx(0.1, rel=0.03)
    neighbours = torch.corrcoef(torch.stack([white[1:, :, 3].flatten(), white[:-1, :, 3].flatten()]))[0, 1]
    assert abs(neighbours.item()) < 0.05


UNIFORM = {"operation": "additive", "distribution": "uniform"}
RAMP = {"schedule": "linear", "schedule_steps": 40}


def test_noise_distribution_is_set_per_term():
    settings = {
        "cart_pos": {"noise": [-0.2, 0.1]},  # uniform
        "cart_vel": {"noise": {"range": [1.0, 0.1], "operation": "scaling", "distribution": "gaussian"}},
        "pole_angle": {"noise": {"range": [0.5, 2.0], "operation": "scaling", "distribution": "loguniform"}},
        "pole_vel": {"noise": 0.3},  # normal
    }
    env = make(settings, clip_observations=None)
    env.reset()
    noise, factor = [], []
    for action in actions(200):
        obs, clean = env.step(action).obs["policy"], env.clean_obs()["policy"]
        noise.append(obs - clean)
        factor.append(obs / clean)
    noise, factor = torch.stack(noise), torch.stack(factor)
    uniform, normal = noise[..., 0], noise[..., 3]
    assert uniform.min() >= -0.2 - 1e-6 and uniform.max() <= 0.1 + 1e-6
    assert uniform.mean().item() == pytest.approx(-0.05, abs=0.004)
    assert uniform.std().item() == pytest.approx(0.3 / math.sqrt(12), rel=0.02)
    assert normal.mean().abs() < 0.02 and normal.std().item() == pytest.approx(0.3, rel=0.03)
    assert factor[..., 1].mean().item() == pytest.approx(1.0, abs=0.01)
    assert factor[..., 1].std().item() == pytest.approx(0.1, rel=0.05)
    logarithm = factor[..., 2].log2()
    assert logarithm.abs().max() <= 1.0 + 1e-3 and logarithm.mean().abs() < 0.03
    assert logarithm.std().item() == pytest.approx(1 / math.sqrt(3), rel=0.03)
    columns = torch.corrcoef(torch.stack([uniform, factor[..., 1], logarithm, normal]).flatten(1)) - torch.eye(4)
    assert columns.abs().max() < 0.05


def test_noise_is_applied_before_scale_delay_and_history():
    env = make({"pole_vel": {"noise": [1.0, 1.0], "delay": 1, "history": 2}}, Scaled, clip_observations=None)
    obs = env.reset()
    for action in actions(5):
        before, clean = obs["policy"], env.clean_obs()["policy"]
        obs = env.step(action).obs
        torch.testing.assert_close(obs["policy"][:, 4], clean[:, 3] + 0.25, msg="not the previous step's value")
        assert torch.equal(obs["policy"][:, 3], before[:, 4])


def test_first_observation_of_an_episode_has_fresh_noise():
    env = make({"cart_pos": {"noise": 0.5}}, episode_length=3, clip_observations=None)
    env.reset()
    clean: list[torch.Tensor] = []
    advance = env.task.advance
    env.task.advance = lambda done: (clean.append(truth(env)["cart_pos"]), advance(done))[1]  # type: ignore[assignment]
    for _ in range(3):
        step = env.step(torch.zeros(N, 1))
    assert step.truncated.all()
    final, first = step.final_obs["policy"][:, :1] - clean[-1], step.obs["policy"][:, :1] - truth(env)["cart_pos"]
    assert ((final - first).abs() > 1e-4).float().mean() > 0.9
    assert abs(torch.corrcoef(torch.stack([final[:, 0], first[:, 0]]))[0, 1].item()) < 0.6


def test_term_noise_and_observation_noise_add_up():
    whole = {"range": [2.0, 2.0], **UNIFORM}
    params = {"randomize": True, "randomization_params": {"observations": whole}}
    env = make({"pole_vel": {"noise": [1.0, 1.0], "history": 2}}, clip_observations=None, **params)
    obs = env.reset()["policy"]
    clean = env.clean_obs()["policy"][:, [0, 1, 2, 3, 3]]
    torch.testing.assert_close(obs - clean, torch.tensor([2.0, 2.0, 2.0, 3.0, 3.0]).expand(N, 5))


RESUMED = [
    {"pole_angle": {"noise": 0.1, "delay": [0, 2], "history": 3}},
    {"pole_angle": {"noise": {"range": [0.0, 0.1], "range_correlated": [-1.0, 1.0], **UNIFORM, **RAMP}}},
]


@pytest.mark.parametrize("settings", RESUMED)
def test_resumed_env_continues_bit_for_bit(settings):
    first, second = make(settings), make(settings)
    first.reset(), second.reset()
    for action in actions(10):
        first.step(action)
    assert torch.equal(second.load_state_dict(first.state_dict())["policy"], first._obs["policy"])
    for action in actions(10):
        assert torch.equal(first.step(action).obs["policy"], second.step(action).obs["policy"])


def test_resume_applies_new_noise_and_continues_schedules():
    noise = {"range": [1.0, 1.0], **UNIFORM, **RAMP}
    old, new = make({"cart_pos": {"noise": noise}}), make({"cart_pos": {"noise": {**noise, "range": [2.0, 2.0]}}})
    old.reset(), new.reset()
    for action in actions(20):
        old.step(action)
    new.load_state_dict(old.state_dict())
    added = new._observe()["policy"] - new.clean_obs()["policy"]
    torch.testing.assert_close(added[:, 0], torch.full((N,), 1.0), msg="not half of 2")
    shown = make({"cart_pos": {"noise": noise}})
    shown.reset()
    obs = shown.begin_from(old.state_dict())["policy"]
    torch.testing.assert_close((obs - shown.clean_obs()["policy"])[:, 0], torch.full((N,), 0.5))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pole_angl": {"noise": 1}}, "pole_angl: .* mean 'pole_angle'.* cart_pos, "),
        ({"pole_vel": {"noise": -1}}, r"task\.observations\.pole_vel\.noise: .* got -1"),
        ({"pole_vel": {"noise": [1, 0]}}, r"task\.observations\.pole_vel\.noise: range: .* got \[1.0, 0.0\]"),
        ({"pole_vel": {"delay": [2, 1]}}, r"pole_vel\.delay.* got \[2, 1\]"),
        ({"pole_vel": {"history": 0}}, r"pole_vel\.history.* got 0"),
        ({"pole_vel": 3}, r"task\.observations\.pole_vel.* section .* got 3"),
    ],
)
def test_invalid_term_settings_are_rejected(settings, words):
    with pytest.raises(ConfigError, match=words):
        make(settings).reset()


class Unnamed(Cartpole):
    def observe(self):
        return torch.cat([*super().observe()["policy"].values()], dim=1)


class Changing(Cartpole):
    calls = 0

    def observe(self):
        terms = super().observe()["policy"]
        self.calls += 1
        return {"policy": terms if self.calls < 3 else dict(reversed(terms.items()))}


class WrongScale(Cartpole):
    def __init__(self, cfg, sim):
        super().__init__(cfg, sim)
        self.scales = {"pole_speed": 2.0}


class WrongShape(Cartpole):
    def observe(self):
        return {"policy": {"pole": self.robot.joint_pos[:, 0]}}


class NotFinite(Cartpole):
    def observe(self):
        terms = super().observe()["policy"]
        return {"policy": {**terms, "pole_vel": terms["pole_vel"] * torch.nan}}


class FloatImage(Painted):
    def observe(self):
        obs = super().observe()
        return {"policy": obs["critic"], "critic": obs["critic"], "camera": obs["camera"].float()}


class NoCritic(Painted):
    def observe(self):
        return {"camera": super().observe()["camera"]}


class ImageOfCritic(Painted):
    def observe(self):
        return {"critic": super().observe()["camera"]}


def test_noise_needs_named_terms():
    with pytest.raises(ConfigError, match="unnamed"):
        make({"pole_vel": {"noise": 1}}, task_class=Unnamed).reset()


@pytest.mark.parametrize(
    ("task_class", "words"),
    [
        (
            Changing,
            "observe(): expected the terms ['cart_pos', 'cart_vel', 'pole_angle', 'pole_vel'], got ['pole_vel', ",
        ),
        (WrongScale, "mean 'pole_vel'?"),
        (WrongShape, "WrongShape.observe()['pole']: expected shape [32, size], got [32]"),
        (NotFinite, "(env 0, column 3, term 'pole_vel')"),
        (FloatImage, "['camera']: expected shape [32, size], got [32, 32, 32, 2]. An image is uint8"),
        (NoCritic, "numeric 'critic' group"),
        (ImageOfCritic, "'critic' cannot be an"),
    ],
)
def test_invalid_observations_are_rejected(task_class, words):
    env = make(task_class=task_class)
    with pytest.raises(TaskError, match=re.escape(words)):
        env.reset()
        env.step(torch.zeros(N, 1))


@pytest.mark.parametrize("clip", [None, 2.0])
def test_unused_terms_are_only_in_the_teacher_group(clip):
    settings = {"cart_pos": {"used": False}, "pole_angle": {"history": 3, "noise": 0.1}, "pole_vel": {"used": False}}
    env = make(settings, clip_observations=clip)
    every = make({"pole_angle": settings["pole_angle"]}, clip_observations=clip)
    env.reset(), every.reset()
    assert env.obs_sizes == {"policy": 4, "teacher": 6} and every.obs_sizes == {"policy": 6}
    assert [term.name for term in env.obs_terms["policy"]] == ["cart_vel", "pole_angle"]
    assert env.obs_terms["teacher"] == every.obs_terms["policy"]
    for action in actions(9):
        obs, whole = env.step(action).obs, every.step(action).obs["policy"]
        assert torch.equal(obs["teacher"], whole)
        assert torch.equal(obs["policy"], whole[:, 1:5])
        assert torch.equal(env.clean_obs()["policy"], every.clean_obs()["policy"][:, 1:3])


class Critic(Scaled):
    def observe(self):
        policy = super().observe()["policy"]
        return {"policy": policy, "critic": {name: policy[name] for name in ("cart_pos", "pole_vel")}}


def test_terms_of_the_critic_alone_are_in_no_other_group():
    noise = {"pole_angle": {"history": 3, "noise": 0.1}, "cart_vel": {"delay": 1}}
    hidden = {"cart_pos": {"used": "critic", "noise": 0.5}, "pole_vel": {"used": "critic"}, **noise}
    env, dropped = make(hidden, Critic), make({**hidden, "cart_vel": {"delay": 1, "used": False}}, Critic)
    first = env.reset()
    assert env.obs_sizes == {"policy": 4, "critic": 2}
    assert [term.name for term in env.obs_terms["policy"]] == ["cart_vel", "pole_angle"]
    assert [term.name for term in env.obs_terms["critic"]] == ["cart_pos", "pole_vel"]
    dropped.reset()
    assert dropped.obs_sizes == {"policy": 3, "critic": 2, "teacher": 4}
    seen = torch.cat([*truth(env).values()], dim=1)
    assert torch.equal(first["critic"], seen[:, [0, 3]] * torch.tensor([1.0, 0.25]))
    for action in actions(9):
        obs, other = env.step(action).obs, dropped.step(action).obs
        assert torch.equal(env.clean_obs()["policy"], torch.cat([*truth(env).values()], dim=1)[:, 1:3])
        assert torch.equal(obs["policy"], other["teacher"]) and torch.equal(obs["policy"][:, 1:], other["policy"])


@pytest.mark.parametrize(
    ("used", "key"),
    [
        ({"cart_pos": 0}, "cart_pos.used"),
        ({"cart_pos": "critics"}, "cart_pos.used"),
        ({"pole_angle": "critic"}, "pole_angle.used=critic"),
        (dict.fromkeys(("cart_pos", "cart_vel", "pole_angle", "pole_vel"), False), ""),
        ({**dict.fromkeys(("cart_pos", "pole_vel"), "critic"), "cart_vel": False, "pole_angle": False}, ""),
    ],
)
def test_invalid_use_of_terms_is_rejected(used, key):
    env = make({term: {"used": value} for term, value in used.items()}, Critic)
    with raises(ConfigError, key=f"task.observations.{key}".rstrip(".")):
        env.reset()
