"""Third-party envs: convertible results are converted, others are reported in one line that names env and call."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from gpusim_rl.api import prepare
from gpusim_rl.connect import gymnasium_in
from gpusim_rl.connect.checked_env import LONGEST_NAME, MOST_NUMBERS, numbers_of
from gpusim_rl.connect.gymnasium_in import GymnasiumEnv, first_seed
from gpusim_rl.connect.gymnasium_spaces import actions_of
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.env import Environment
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.run.evaluation import evaluate, restore
from gpusim_rl.run.make_env import evaluation_seed, resumed_seed
from gpusim_rl.run.start import SEEDS_APART
from gpusim_rl.settings.schema import EnvConfig
from helpers.fake_env import BOX, LENGTH, Fake, async_envs
from helpers.training import SMALL_PPO, read_csv, the_run

SHARED = np.zeros(2, np.float32)


def shared(env: Fake) -> np.ndarray:
    SHARED[:] = env.count
    return SHARED


def fail(kind: type[BaseException]) -> Callable[[Any], Any]:
    def function(env: Fake) -> Any:
        raise kind("deep\ninside")

    return function


def returned_by_step(value: Any) -> Callable[[Fake], Any]:
    """Return zeros at reset and `value` from steps."""
    return lambda env: value if env.count else np.zeros(2, np.float32)


@cache
def settings() -> EnvConfig:
    return prepare("Gymnasium", env={"id": "CartPole-v1"}).cfg.env


def env_by_id(name: str, num_envs: int = 2, **changes: Any) -> Environment:
    cfg = dataclasses.replace(settings(), id=name, **changes)
    return GymnasiumEnv.from_settings(cfg, num_envs=num_envs, seed=5, device=torch.device("cpu"))


@contextmanager
def registered(**changes: Any) -> Iterator[dict[str, str]]:
    """Register `Fake` within the block; yield its `env` settings."""
    gym.register("fake/Fake-v0", Fake, kwargs=changes, max_episode_steps=9)
    yield {"id": "fake/Fake-v0"}
    del gym.registry["fake/Fake-v0"]


def made(vectorization: str = "sync", limit: int | None = 9, **changes: Any) -> Environment:
    with registered(**changes) as env:
        gym.registry[env["id"]].max_episode_steps = None
        return env_by_id(env["id"], vectorization=vectorization, max_episode_steps=limit)


def episode(env: Environment) -> tuple[list[Any], list[Any], list[Any], Any]:
    """Run an episode; return final observations, rewards, done flags and the last step's stats."""
    env.reset()
    steps = [env.step(torch.zeros(env.num_envs, 1, dtype=torch.int64)) for _ in range(LENGTH)]
    assert not any(step.diverged.any() for step in steps)
    last = [{group: value.tolist() for group, value in step.final_obs.items()} for step in steps]
    return last, [step.reward.tolist() for step in steps], [step.done.tolist() for step in steps], steps[-1].stats


@pytest.mark.parametrize(
    "changes",
    [
        {"obs": Fake.filled},
        {"obs": shared},
        {"obs": lambda env: [env.count, env.count]},
        {"obs": lambda env: np.full(2, env.count, np.float64)},
        {"obs": lambda env: np.full((2, 1), env.count, np.int64)},
        {"space": gym.spaces.Box(0, 9, (2,), np.int64), "obs": lambda env: np.full(2, float(env.count))},
        {"space": gym.spaces.Box(0, np.inf, (2,), np.float64)},
        {"space": gym.spaces.Box(-1, 1, (2,), np.float32)},  # observations lie outside the bounds
        *({"reward": lambda env, kind=kind: kind(env.count)} for kind in (int, np.float64, np.array, np.float32)),
        {"reward": lambda env: [[env.count]]},
        *({"flag": kind} for kind in (int, np.bool_, np.array, lambda end: np.array([end]), lambda end: [end])),
        {"info": {"text": "a", "none": None, "array": np.zeros(7), "huge": {str(i): "x" for i in range(9999)}}},
        {"info": lambda env: {"ragged": np.zeros(env.count + id(env) % 5), "final_obs": 3, "_final_obs": None}},
        {"info": "no dict"},
    ],
)
def test_odd_result_types_are_converted(changes: dict[str, Any]) -> None:
    last, rewards, ends, stats = episode(made(**changes))
    assert last == [{"policy": [[t, t]] * 2} for t in (1, 2, 3)]
    assert rewards == [[t, t] for t in (1, 2, 3)]
    assert ends == [[False] * 2, [False] * 2, [True] * 2] and stats == {}


@pytest.mark.parametrize(
    ("space", "obs", "flat"),
    [
        (gym.spaces.Box(-9, 9, (1,), np.float32), lambda env: env.count, [3]),
        (gym.spaces.Discrete(3, start=1), lambda env: np.array([max(1, env.count)]), [0, 0, 1]),
        (gym.spaces.MultiBinary(3), lambda env: [True, False, True], [1, 0, 1]),
        (gym.spaces.MultiDiscrete([2, 2]), lambda env: [1.0, 0.0], [0, 1, 1, 0]),
        (gym.spaces.Tuple([gym.spaces.Discrete(2), BOX]), lambda env: [1, env.filled()], [0, 1, 3, 3]),
        (gym.spaces.Dict({"a": BOX}), lambda env: {"a": env.filled(), "more": 1}, [3, 3]),
        (gym.spaces.Dict({"a": BOX, "task": gym.spaces.Text(9)}), lambda env: {"a": [3, 3], "task": "go"}, [3, 3]),
    ],
)
def test_numeric_spaces_are_flattened(space: gym.Space, obs: Any, flat: list[float]) -> None:
    assert episode(made(space=space, obs=obs))[0][-1] == {"policy": [flat] * 2}


@pytest.mark.parametrize(
    ("changes", "call", "word"),
    [
        ({"obs": returned_by_step(np.zeros(3))}, "step()", "shape"),
        ({"obs": returned_by_step([None, None])}, "step()", "object"),
        ({"obs": np.zeros(3)}, "reset()", "shape"),
        ({"obs": np.array([np.nan, 0.0])}, "reset()", "non-finite"),
        ({"space": gym.spaces.Box(0, 255, (2,), np.uint8), "obs": np.full(2, 0.5)}, "reset()", "uint8"),
        ({"space": gym.spaces.Discrete(3), "obs": 3}, "reset()", "Discrete"),
        ({"space": gym.spaces.Discrete(3, start=2), "obs": 1}, "reset()", "Discrete"),
        ({"space": gym.spaces.MultiBinary(2), "obs": [0, 2]}, "reset()", "MultiBinary"),
        ({"space": gym.spaces.Dict({"a": BOX}), "obs": {"b": 1}}, "reset()", "'a'"),
        ({"space": gym.spaces.Dict({"a": BOX}), "obs": 3}, "reset()", "int"),
        ({"space": gym.spaces.Tuple([BOX, BOX]), "obs": (np.zeros(2),)}, "reset()", "shorter"),
        ({"reward": None}, "step()", "reward.*NoneType"),
        ({"reward": np.zeros((2, 2))}, "step()", r"reward.*\[2, 2\]"),
        ({"flag": lambda end: None}, "step()", "terminated"),
        ({"flag": lambda end: np.nan}, "step()", "terminated=nan"),
        ({"flag": lambda end: 2}, "step()", "terminated=2"),
        ({"reward": fail(SystemExit)}, "step()", "SystemExit"),
        ({"step": (np.zeros(2), 0.0, False, {})}, "step()", "values.*older"),
        ({"step": None}, "step()", "NoneType.*older"),
        ({"step": None, "limit": 9}, "step()", "NoneType.*older"),  # from Gymnasium's TimeLimit
        ({"reset": np.zeros(2, np.float32)}, "reset()", "ndarray.*older"),
        ({"reward": fail(ZeroDivisionError)}, "step()", r"ZeroDivisionError: deep \(test_checked_env.py:\d+\)"),
    ],
)
def test_invalid_results_are_reported_in_one_line(changes: dict[str, Any], call: str, word: str) -> None:
    with pytest.raises(TaskError, match=rf"(?s)^fake/Fake-v0: {call[:-2]}\(\) .*{word}") as error:
        episode(made(**{"limit": None} | changes))
    assert "\n" not in str(error.value)


class Mission(gym.Space[str]):
    """A space unknown to Gymnasium."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mission)


def test_async_envs_may_have_custom_space() -> None:
    space = gym.spaces.Dict({"a": BOX, "mission": Mission()})
    env = made("async", space=space, obs=lambda env: {"a": [env.count] * 2, "mission": "go"})
    assert episode(env)[0][-1] == {"policy": [[3, 3]] * 2}
    env.close()


class NoSeed(Fake):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


def test_reset_without_seed_argument_names_interface() -> None:
    env = GymnasiumEnv(SyncVectorEnv([NoSeed]), seed=5, name="NoSeed", max_episode_steps=9)
    with pytest.raises(TaskError, match=r"NoSeed: reset\(\) raised TypeError.*older"):
        env.reset()


def report(env: Fake) -> dict[str, Any]:
    return {
        "is_success": np.bool_(env.count == LENGTH),
        "distance": np.array([0.5 * env.count]),
        "third": Fraction(1, 4),
        "nested": {"a": 1, "deeper": {"b": 1}},
        "late" if env.count == LENGTH else "early": 7,
        "bad": np.nan,
        "huge": 10**400,
        "complex": 1j,
        "line\nend": 2,
        "TimeLimit.truncated": True,
    }


NUMBERS = {"is_success": 1.0, "distance": 1.5, "third": 0.25, "nested/a": 1.0, "late": 7.0, "line\\nend": 2.0}


def test_info_numbers_are_those_that_can_be_averaged() -> None:
    env = Fake()
    env._t = LENGTH
    assert dict(numbers_of(report(env))) == NUMBERS
    many = dict(numbers_of({"x" * 99 + str(i): i for i in range(999)} | {i: i for i in range(999)}))
    assert len(many) <= MOST_NUMBERS and max(map(len, many)) <= LONGEST_NAME


@pytest.mark.parametrize("kind", ["sync", "async", "next step", "same step"])
def test_info_at_episode_end_is_logged(kind: str) -> None:
    if kind in ("sync", "async"):
        env = made(kind, info=report)
    else:
        mode = AutoresetMode.SAME_STEP if kind == "same step" else AutoresetMode.NEXT_STEP
        env = GymnasiumEnv(SyncVectorEnv([lambda: Fake(info=report)] * 2, autoreset_mode=mode), seed=5)
    *_, stats = episode(env)
    found = {name: value.tolist() for name, value in stats.items()}
    assert found == {name: [value] * 2 for name, value in NUMBERS.items()}
    step = env.step(torch.zeros(2, 1, dtype=torch.int64))
    assert step.stats.keys() == stats.keys() and all(value.isnan().all() for value in step.stats.values())
    env.close()


def test_success_is_logged_and_evaluated(tmp_path: Any) -> None:
    with registered(info=lambda env: {"is_success": env.count == LENGTH, "return": 1e9}) as env:
        settings = {"num_envs": 2, "seed": 3, "log": {"console": "quiet", "dir": str(tmp_path)}, "ppo": SMALL_PPO}
        trainer = make_trainer(prepare("Gymnasium", env=env, max_iterations=2, **settings))
        assert trainer.env._seed == first_seed(3)  # type: ignore[attr-defined]
        trainer.train()
        row = read_csv(the_run(tmp_path))[-1]
        assert float(row["task/is_success"]) == 1.0 and float(row["episode/return"]) == 6.0
        again: Any = make_trainer(prepare("Gymnasium", env=env, max_iterations=3, checkpoint=str(the_run(tmp_path))))
        assert again.env._seed == first_seed(resumed_seed(3, 2)), "resumed runs use fresh seeds"
        again.close()
        run, tested, policy, obs = restore(prepare("Gymnasium", env=env, test=True, checkpoint=str(the_run(tmp_path))))
        assert tested._seed == first_seed(evaluation_seed(run.seed))  # type: ignore[attr-defined]
        result, _ = evaluate(tested, policy, obs)
        assert result["task/is_success"] == 1.0 and result["return_mean"] == 6.0


def test_run_with_only_nan_names_env(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with registered(reward=np.nan) as env:
        settings = {"num_envs": 2, "log": {"console": "quiet", "dir": str(tmp_path)}, "ppo": SMALL_PPO}
        trainer = make_trainer(prepare("Gymnasium", env=env, max_iterations=2, **settings))
        with pytest.raises(TaskError, match=r"^fake/Fake-v0: all 2 envs") as error:
            trainer.train()
        assert "physics" not in str(error.value) and "replay" not in str(error.value)
        assert "reward of env 0" in caplog.text


def test_evaluation_without_episode_end_is_cut_with_warning(caplog: pytest.LogCaptureFixture) -> None:
    env = GymnasiumEnv(SyncVectorEnv([Endless] * 2), seed=5)
    env.max_episode_length = 6
    policy: Any = SimpleNamespace(
        initial_state=lambda _: (), act=lambda *_, **__: (torch.zeros(2, 1, dtype=torch.int64), ())
    )
    result, _ = evaluate(env, policy, env.reset())
    assert result["length_mean"] == 7 and "2 of 2 episodes" in caplog.text


def test_nearby_seeds_share_no_env_seed() -> None:
    seeds = [seed + SEEDS_APART * rank for seed in range(100) for rank in range(8)]
    of_evaluations = [evaluation_seed(seed) for seed in range(100)]
    resumed = [resumed_seed(3, iteration) for iteration in range(1, 1000)]
    for many in (seeds + of_evaluations, [3, *resumed]):
        assert np.diff(np.sort([first_seed(seed) for seed in many])).min() > 50_000
    assert 0 <= first_seed(2**31 - 1) < 2**31 - 2**20


class Endless(Fake):
    """Env without episode end."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed = seed
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return np.full(2, self._t, np.float32), 1.0, False, False, {}


@pytest.mark.parametrize("mode", [*AutoresetMode])
def test_configured_time_limit_truncates_episodes(mode: AutoresetMode) -> None:
    env = GymnasiumEnv(SyncVectorEnv([Endless] * 2, autoreset_mode=mode), seed=5, max_episode_steps=4)
    env.reset()
    ends = [env.step(torch.zeros(2, 1, dtype=torch.int64)) for _ in range(9)]
    assert [bool(step.truncated.all()) for step in ends] == [t % 4 == 0 for t in range(1, 10)]
    assert [step.final_obs["policy"][0, 0].item() for step in ends] == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert ends[3].obs["policy"].tolist() == [[0, 0]] * 2 and not ends[3].terminated.any()


def test_time_limit_that_cannot_be_applied_is_rejected() -> None:
    class Closed(gym.vector.VectorWrapper):
        @property
        def unwrapped(self) -> Any:
            return self

    envs = Closed(SyncVectorEnv([Endless] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    env = GymnasiumEnv(envs, seed=5, max_episode_steps=2, name="Closed")
    env.reset()
    env.step(torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(TaskError, match=r"^Closed: .*env\.max_episode_steps=2"):
        env.step(torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("make", [SyncVectorEnv, async_envs, DummyVecEnv])
def test_time_limit_of_vector_env_is_detected(make: Any) -> None:
    env = GymnasiumEnv(make([lambda: gym.make("CartPole-v1")] * 2), seed=5)
    assert env.max_episode_length == 500
    env.close()


@pytest.mark.parametrize(
    ("kwargs", "limit", "expected"),
    [
        ({"max_episode_steps": 7}, None, 7),
        ({}, 8, 8),
        ({"max_episode_steps": -1}, None, gymnasium_in.EVALUATED_STEPS),
        ({"max_episode_steps": None}, None, 200),
    ],
)
def test_configured_time_limits_are_detected(kwargs: dict[str, Any], limit: int | None, expected: int) -> None:
    env = env_by_id("Pendulum-v1", kwargs=kwargs, max_episode_steps=limit)
    assert env.max_episode_length == expected
    env.close()


@pytest.mark.parametrize(
    ("kwargs", "limit", "word"),
    [
        ({"max_episode_steps": 7}, 8, "env.max_episode_steps=8"),
        ({"max_episode_steps": 0}, None, "max_episode_steps"),
        ({"vector_kwargs": {}}, None, "env.kwargs.vector_kwargs"),
        ({"num_envs": 3}, None, "env.kwargs.num_envs"),
        ({"g": [1]}, None, "Pendulum-v1"),
    ],
)
def test_invalid_env_arguments_are_reported_in_one_line(kwargs: dict[str, Any], limit: int | None, word: str) -> None:
    with pytest.raises((ConfigError, TaskError), match=word) as error:
        env = env_by_id("Pendulum-v1", num_envs=1, kwargs=kwargs, max_episode_steps=limit)
        env.reset()
        env.step(torch.zeros(1, 1))
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("error")
def test_float32_overflow_is_reported_without_numpy_warning(caplog: pytest.LogCaptureFixture) -> None:
    huge = {"obs": returned_by_step(np.full(2, 1e300)), "space": gym.spaces.Box(-9, 9, (2,), float)}
    for changes in ({"reward": 1e300}, huge):
        env = made(**changes)
        env.reset()
        assert env.step(torch.zeros(2, 1, dtype=torch.int64)).diverged.all()
    actions_of(gym.spaces.Box(-np.inf, np.inf, (1,), np.float32), "any")
    assert len([record for record in caplog.records if "NaN" in record.getMessage()]) == 2


def test_wrapping_leaves_user_envs_unchanged() -> None:
    envs = SyncVectorEnv([lambda: Fake(info={"is_success": True})] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    before = list(envs.envs)
    env = GymnasiumEnv(envs, seed=5, max_episode_steps=9)
    episode(env)
    assert all(one is other for one, other in zip(envs.envs, before, strict=True))
    envs.reset(seed=1)
    *_, infos = [envs.step(np.zeros(2, np.int64)) for _ in range(LENGTH)][-1]
    assert infos["final_info"]["is_success"].tolist() == [True, True]
    env.close()
    assert envs.closed


@pytest.mark.parametrize(
    ("obs", "kind", "lines"),
    [
        (Fake.filled, "plain", 0),
        (Fake.filled, "wrapped", 1),
        (Fake.filled, "sb3", 1),
        (Fake.filled, "async", 1),
        (lambda env: np.full(2, env.count, np.float32), "wrapped", 0),
        (np.zeros(2, np.float32), "wrapped", 0),
    ],
)
def test_overwritten_final_observations_are_copied_or_reported(
    obs: Any, kind: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    fakes: Any = [lambda: Fake(obs=obs)] * 2
    if kind == "sb3":
        envs: Any = DummyVecEnv(fakes)
    elif kind == "async":
        envs = async_envs(fakes, autoreset_mode=AutoresetMode.SAME_STEP)
    else:
        envs = SyncVectorEnv(fakes, autoreset_mode=AutoresetMode.SAME_STEP)
        envs = envs if kind == "plain" else gym.vector.VectorWrapper(envs)
    env = GymnasiumEnv(envs, seed=5, max_episode_steps=9)
    for _ in range(12):
        last, *_ = episode(env)
    assert sum("overwrite" in record.getMessage() for record in caplog.records) == lines
    if not lines and callable(obs):
        assert last[-1] == {"policy": [[3, 3]] * 2}
    env.close()


class Old(SyncVectorEnv):
    """Vector env of Gymnasium 0.29: no autoreset mode, other key for the final observation."""

    def __init__(self) -> None:
        super().__init__([Fake] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        del self.metadata["autoreset_mode"]

    @property
    def unwrapped(self) -> Any:
        return gym.vector.VectorWrapper(self)

    def step(self, actions: Any) -> Any:
        *others, infos = super().step(actions)
        if "final_obs" in infos:
            infos["final_observation"] = infos.pop("final_obs")
            infos["final_info"] = np.array([{"is_success": True}, None])
        return *others, infos


def test_same_step_reset_of_gymnasium_0_29_is_detected() -> None:
    env = GymnasiumEnv(Old(), seed=5, max_episode_steps=9)
    last, _, ends, stats = episode(env)
    assert last[-1] == {"policy": [[3, 3]] * 2} and ends[-1] == [True] * 2
    assert stats["is_success"].nan_to_num(-1).tolist() == [1, -1]
    assert not env.step(torch.zeros(2, 1, dtype=torch.int64)).diverged.any()


@pytest.mark.parametrize("mode_text", ["SameStep", "Disabled", "NextStep", "often"])
def test_autoreset_mode_may_be_text(mode_text: str) -> None:
    mode = AutoresetMode.SAME_STEP if mode_text == "often" else AutoresetMode(mode_text)
    envs = SyncVectorEnv([lambda: Fake(obs=Fake.filled)] * 2, autoreset_mode=mode)
    envs.metadata["autoreset_mode"] = mode_text
    if mode_text == "often":
        with pytest.raises(ConfigError, match="often"):
            GymnasiumEnv(envs, seed=5)
        return
    last, _, ends, _ = episode(GymnasiumEnv(envs, seed=5))
    assert ends[-1] == [True, True] and last[-1] == {"policy": [[3, 3]] * 2}


@pytest.mark.parametrize("how", ["dies", "raises", "hangs"])
def test_failing_env_processes_are_reported_and_cleaned_up(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium_in, "HANGS_S", 0.5)
    act = {"dies": lambda env: os._exit(3), "raises": fail(ValueError), "hangs": lambda env: time.sleep(60)}
    env: Any = made("async", reward=act[how])
    env.reset()
    with pytest.raises(TaskError, match=r"^fake/Fake-v0: .*step\(\)"):
        env.step(torch.zeros(2, 1, dtype=torch.int64))
    env.close()
    for process in env._envs.processes:
        process.join(5)
    assert not any(process.is_alive() for process in env._envs.processes)


def test_error_in_close_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    env: Any = GymnasiumEnv(SyncVectorEnv([Fake]), seed=5, name="Fake", max_episode_steps=9)
    env._envs.close_extras = lambda **_: fail(RuntimeError)(Fake())
    env.close()
    [record] = caplog.records
    assert record.getMessage().startswith("Fake: close() ") and "RuntimeError" in record.getMessage()
