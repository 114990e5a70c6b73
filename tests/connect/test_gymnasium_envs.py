"""Third-party envs in each autoreset mode, against a plain loop over single envs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from stable_baselines3.common.vec_env import DummyVecEnv

import gpusim_rl
from gpusim_rl.api import make_env, prepare
from gpusim_rl.connect.gymnasium_in import EVALUATED_STEPS, GymnasiumEnv
from gpusim_rl.connect.gymnasium_spaces import flat_size
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.run import devices
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.spaces import MultiDiscrete
from gpusim_rl.view.player import Player
from helpers.fake_env import BOX, Fake, async_envs
from helpers.raised import raises

pytest_plugins = ["helpers.tool_runs"]

NUM_ENVS, LIMIT = 3, 5


class Count(gym.Env):
    """Env that observes (seed, episode, step, last action); the step of termination depends on the episode."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))

    def __init__(self, bad: dict[tuple[int, int], float] | None = None) -> None:
        self.seed, self.episode, self.bad = -1, -1, bad or {}

    def _obs(self, last: float) -> np.ndarray:
        return np.array([self.seed, self.episode, self.t, last], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self.seed = self.seed if seed is None else seed
        self.episode, self.t = self.episode + 1, 0
        return self._obs(0.0), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        obs = self._obs(float(action.sum()))
        obs[3] = self.bad.get((self.episode, self.t), obs[3])
        terminated = self.t == 2 + (self.seed + 2 * self.episode) % 5
        return obs, float(self.t), terminated, self.t >= LIMIT, {}


class Foreign(VectorWrapper):
    """Third-party vector env without reset by mask."""

    @property
    def unwrapped(self) -> Any:
        return self

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        assert not options
        return super().reset(seed=seed)


class Pool(gym.vector.VectorEnv):
    """Stand-in for EnvPool 1.2: a Gymnasium vector env with single-env spaces and a custom spec."""

    def __init__(self) -> None:
        self._envs = [Count() for _ in range(NUM_ENVS)]
        self.num_envs, self.config = NUM_ENVS, {"num_envs": NUM_ENVS, "max_episode_steps": LIMIT}
        self.observation_space, self.action_space = Count.observation_space, Count.action_space
        self.metadata, self.spec = {"autoreset_mode": AutoresetMode.NEXT_STEP}, object()
        for number, env in enumerate(self._envs):
            env.seed = 7 + number  # EnvPool takes the seed in its constructor

    def async_reset(self) -> None:
        raise NotImplementedError

    def reset(self, env_id: np.ndarray | None = None, **_: Any) -> tuple[np.ndarray, dict]:
        numbers = range(NUM_ENVS) if env_id is None else env_id
        return np.stack([self._envs[number].reset()[0] for number in numbers]), {}

    def step(self, action: np.ndarray) -> Any:
        obs, *rest = zip(*(env.step(a)[:4] for env, a in zip(self._envs, action, strict=True)), strict=True)
        return np.stack(obs), *(np.array(x) for x in rest), {}


def sync(mode: AutoresetMode) -> Callable[[], Any]:
    return lambda: SyncVectorEnv([Count] * NUM_ENVS, autoreset_mode=mode)


VECTOR_ENVS: dict[str, Callable[[], Any]] = {
    "disabled": sync(AutoresetMode.DISABLED),
    "same step": sync(AutoresetMode.SAME_STEP),
    "next step": sync(AutoresetMode.NEXT_STEP),
    "processes": lambda: async_envs([Count] * NUM_ENVS, autoreset_mode=AutoresetMode.DISABLED),
    "foreign, same step": lambda: Foreign(sync(AutoresetMode.SAME_STEP)()),
    "foreign, next step": lambda: Foreign(sync(AutoresetMode.NEXT_STEP)()),
    "sb3": lambda: DummyVecEnv([Count] * NUM_ENVS),
    "envpool": Pool,
}


def plain_loop(steps: int, action: torch.Tensor, i: int) -> list[tuple[Any, ...]]:
    """Run env i alone; return (obs, final_obs, reward, terminated, truncated) per step."""
    env, found = Count(), []
    env.reset(seed=7 + i)
    sent = np.array([2.0 * float(action[0].clamp(-1, 1)), 5.0 + 5.0 * float(action[1].clamp(-1, 1))], np.float32)
    for _ in range(steps):
        last, reward, terminated, truncated, _ = env.step(sent)
        obs = env.reset()[0] if terminated or truncated else last
        found.append((obs, last, reward, terminated, truncated and not terminated))
    return found


@pytest.mark.parametrize("kind", VECTOR_ENVS)
def test_every_autoreset_mode_equals_plain_loop(kind: str) -> None:
    env = GymnasiumEnv(VECTOR_ENVS[kind](), seed=7, max_episode_steps=LIMIT)
    try:
        obs = env.reset()["policy"]
        assert obs[:, 0].tolist() == [7, 8, 9] and obs[:, 2].tolist() == [0, 0, 0]
        action = torch.tensor([[0.25, -0.5], [3.0, 0.0], [-1.0, 1.0]])
        expected = [plain_loop(60, action[i], i) for i in range(NUM_ENVS)]
        position, ended, skipped = [0] * NUM_ENVS, 0, 0
        for _ in range(60):
            step = env.step(action)
            for i in range(NUM_ENVS):
                if step.skipped is not None and step.skipped[i]:
                    assert step.diverged[i] and step.done[i] and step.incomplete[i] and step.reward[i] == 0
                    assert step.obs["policy"][i].tolist() == expected[i][position[i] - 1][0].tolist()
                    skipped += 1
                    continue
                first, last, reward, terminated, truncated = expected[i][position[i]]
                position[i] += 1
                ended += terminated or truncated
                assert step.final_obs["policy"][i].tolist() == last.tolist()
                assert step.reward[i] == reward and not step.diverged[i] and not step.incomplete[i]
                assert step.terminated[i] == terminated and step.truncated[i] == truncated
                assert step.done[i] == (terminated or truncated)
                if kind != "foreign, next step":
                    assert step.obs["policy"][i].tolist() == first.tolist()
        assert ended > 30 and (skipped > 30) == (kind == "foreign, next step")
    finally:
        env.close()


def test_reset_only_steps_are_not_counted() -> None:
    from gpusim_rl.run.metrics import Metrics

    env = GymnasiumEnv(VECTOR_ENVS["foreign, next step"](), seed=7, max_episode_steps=LIMIT)
    metrics = Metrics(NUM_ENVS, torch.device("cpu"))
    env.reset()
    ends = 0
    for _ in range(20):
        step = env.step(torch.zeros(NUM_ENVS, 2))
        ends += int((step.done & ~step.diverged).sum())
        metrics.record_step(step)
    metrics.end_rollout()
    [(_, row)] = metrics.flush(None, {})
    assert row["sim/diverged"] == 0 and row["episode/count"] == ends > 10


@pytest.mark.parametrize("mode", AutoresetMode)
def test_non_finite_number_is_masked_and_reported_once(mode: AutoresetMode, caplog: pytest.LogCaptureFixture) -> None:
    make = [Count, lambda: Count({(0, 1): np.nan, (2, 1): np.inf}), Count]
    env = GymnasiumEnv(SyncVectorEnv(make, autoreset_mode=mode), seed=7, name="Bad", max_episode_steps=LIMIT)
    env.reset()
    step = env.step(torch.zeros(3, 2))
    assert step.diverged.tolist() == [False, True, False] == step.done.tolist()
    assert step.reward.tolist() == [1, 0, 1] and step.final_obs["policy"][1].tolist() == [0, 0, 0, 0]
    assert step.obs["policy"][1].tolist() == [8, 1, 0, 0], "new episode"
    for _ in range(12):
        step = env.step(torch.zeros(3, 2))
        assert all(torch.isfinite(value).all() for value in (step.obs["policy"], step.final_obs["policy"], step.reward))
    [record] = caplog.records
    assert record.message.startswith("Bad: ") and "'policy'" in record.message and "env 1" in record.message


def test_non_finite_action_counts_as_divergence() -> None:
    env = GymnasiumEnv(VECTOR_ENVS["disabled"](), seed=7, max_episode_steps=LIMIT)
    env.reset()
    step = env.step(torch.tensor([[0.0, 0.0], [torch.nan, 0.0], [0.0, torch.inf]]))
    assert step.bad_action.tolist() == step.diverged.tolist() == step.done.tolist() == [False, True, True]


SPACES = gym.spaces.Dict(
    {
        "b": gym.spaces.Box(-1, 1, (2, 2), np.float64),
        "a": gym.spaces.Tuple([gym.spaces.Discrete(3, start=5), gym.spaces.MultiBinary(2)]),
        "c": gym.spaces.MultiDiscrete([2, 3]),
    }
)
VALUE = {"b": np.arange(4.0).reshape(2, 2), "a": (6, np.array([1, 0], np.int8)), "c": np.array([1, 2])}


@pytest.mark.parametrize("mode", AutoresetMode)
def test_observations_are_flattened_in_space_order(mode: AutoresetMode) -> None:
    make = [lambda: Fake(space=SPACES, obs=VALUE, action_space=gym.spaces.Box(-1, 1, (2, 2), np.float32))] * 2
    env = GymnasiumEnv(SyncVectorEnv(make, autoreset_mode=mode), seed=0, max_episode_steps=9)
    flat = [{"a": [0, 1, 0, 1, 0], "b": [0, 1, 2, 3], "c": [0, 1, 0, 0, 1]}[key] for key in SPACES]
    expected = [[number for part in flat for number in part]] * 2
    assert env.reset()["policy"].tolist() == expected and env.obs_sizes == {"policy": 14}
    for _ in range(3):  # one episode
        step = env.step(torch.zeros(2, 4))
        assert step.final_obs["policy"].tolist() == step.obs["policy"].tolist() == expected


def test_dict_space_may_name_observation_groups() -> None:
    space = gym.spaces.Dict({"critic": gym.spaces.Box(-9, 9, (3,)), "policy": BOX})
    obs = {"critic": np.full(3, 2.0, np.float32), "policy": np.full(2, 1.0, np.float32)}
    env = GymnasiumEnv(SyncVectorEnv([lambda: Fake(space=space, obs=obs)] * 2), seed=0, max_episode_steps=9)
    groups = {group: value.tolist() for group, value in env.reset().items()}
    assert groups == {"policy": [[1.0] * 2] * 2, "critic": [[2.0] * 3] * 2}
    assert env.obs_sizes == {"policy": 2, "critic": 3}


class WrongVector(Foreign):
    def step(self, actions: Any) -> Any:
        obs, *others = super().step(actions)
        return obs[:, :3], *others


def test_wrong_shape_is_reported_in_one_line() -> None:
    env = GymnasiumEnv(WrongVector(sync(AutoresetMode.NEXT_STEP)()), seed=0, name="Wrong", max_episode_steps=1)
    env.reset()
    with pytest.raises(TaskError, match=r"^Wrong: step\(\) .* shape \[3, 3\], expected \[3, 4\]$"):
        env.step(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"shape \[3, 2\], got \[3, 1\]"):
        env.step(torch.zeros(3, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"space": gym.spaces.Text(5)}, "observation space Text"),
        ({"action_space": gym.spaces.Box(0, 5, (2,), np.int64)}, "action space: .*int64"),
    ],
)
def test_unsupported_spaces_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GymnasiumEnv(SyncVectorEnv([lambda: Fake(**changes)]), seed=0, max_episode_steps=1)


def test_missing_time_limit_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    env = GymnasiumEnv(SyncVectorEnv([Count]), seed=0, name="Count-v0")
    [record] = caplog.records
    assert "Count-v0" in record.getMessage() and "env.max_episode_steps" in record.getMessage()
    assert env.max_episode_length == EVALUATED_STEPS and "no time limit" in env.summary


def trainer_of(tmp_path: Any, **settings: Any) -> Trainer:
    env = {"id": "Pendulum-v1", **settings.pop("env", {})}
    small = {"device": "cpu", "num_envs": 4, "max_iterations": 2, "log": {"dir": str(tmp_path), "console": "quiet"}}
    return make_trainer(prepare("Gymnasium", env=env, **{**small, **settings}))


def fails() -> Any:
    raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"id": "FrozenLake-v1", "kwargs": {"map_name": "no"}}, "env.id=FrozenLake-v1 env.kwargs={'map_name': 'no'}: "),
        ({"id": "Ant-v5", "kwargs": {"xml_file": "/nope.xml"}}, "env.id=Ant-v5 env.kwargs={'xml_file': '/nope.xml'}: "),
        ({"id": "Pendulm-v1"}, "env.id=Pendulm-v1: .*Did you mean 'Pendulum-v1'?"),
        ({"id": "no_such:Pendulum-v1"}, "env.id=no_such:Pendulum-v1: .*pip install no_such"),
        ({"id": "brokenmod:Pendulum-v1"}, r"env.id=brokenmod:Pendulum-v1: NameError: .*Box.* \(brokenmod\.py:1\)$"),
        ({"id": "Fails-v0"}, r"env.id=Fails-v0: RuntimeError: no licence \(test_gymnasium_envs\.py:\d+\)$"),
        ({"id": "os:Pendulm-v1"}, "env.id=os:Pendulm-v1: .*Did you mean"),
        ({"id": None}, "needs env.id or env._target_"),
        ({"id": None, "_target_": "no_such_module.make"}, "env._target_=no_such_module.make: no module named"),
        ({"vectorization": "envpool"}, "pip install .gpusim-rl.envpool"),
        ({"vectorization": "vector_entry_point"}, "env.id=Pendulum-v1: "),
        ({"kwargs": {"gravty": 3}}, "env.id=Pendulum-v1 env.kwargs={'gravty': 3}: .*gravty"),
    ],
)
def test_wrong_settings_are_rejected_in_one_line(
    env: dict[str, Any], words: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)  # simulates a missing package
    (tmp_path / "brokenmod.py").write_text("space = Box(0, 1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(gym.registry, "Fails-v0", gym.envs.registration.EnvSpec("Fails-v0", entry_point=fails))
    with pytest.raises(ConfigError, match=words) as error:
        trainer_of(tmp_path, env=env)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("task", "settings", "key"),
    [
        ("Ant", {"env": {"id": "CartPole-v1"}}, "env.id"),
        ("Ant", {"env": {"kwargs": {"x": 1}}}, "env.kwargs"),
        ("Gymnasium", {"task": {"randomize": True}}, "task.randomize"),
        ("Gymnasium", {"task": {"reset_from": {"share": 0.5}}}, "task.reset_from.share"),
    ],
)
def test_settings_of_other_task_kinds_are_rejected(task: str, settings: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        prepare(task, **settings)


def test_missing_gymnasium_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gpusim_rl.connect.gymnasium_in")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with raises(ConfigError, key="task=Gymnasium", hint="Try pip install 'gpusim-rl[gymnasium]'"):
        prepare("Gymnasium", env={"id": "CartPole-v1"})


def test_run_trains_resumes_and_is_evaluated(tmp_path: Any, capsys: Any) -> None:
    ppo = {"horizon": 16, "minibatch_size": 32}
    trainer = trainer_of(tmp_path, ppo=ppo, env={"kwargs": {"g": 9.0}})
    assert trainer.env.obs_sizes == {"policy": 3} and trainer.env.max_episode_length == 200
    trainer.train()
    assert trainer.run_dir is not None
    run = str(trainer.run_dir.path)
    again = make_trainer(prepare("Gymnasium", checkpoint=run, max_iterations=3))
    assert again.cfg.env.kwargs == {"g": 9.0} and again.iteration == 2
    capsys.readouterr()
    with again.logging() as log:
        again.iterate(log)
    assert again.iteration == 3
    result = evaluate_run(prepare("Gymnasium", checkpoint=run, test=True))
    assert result["episodes"] == 4 and result["length_mean"] == 200


LINE = """
import gymnasium as gym
import numpy as np

class Line(gym.Env):
    observation_space = action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.clip(action, -1.0, 1.0).astype(np.float32), float(action[0]), False, False, {}

gym.register("own/Line-v0", Line, max_episode_steps=20)
"""


def test_custom_env_trains_by_id_in_folder_of_that_name(train_here: Any, tmp_path: Any) -> None:
    (tmp_path / "my_env.py").write_text(LINE)
    small = ("device=cpu", "num_envs=4", "ppo.horizon=4", "ppo.minibatch_size=16", "log.console=quiet")
    done = train_here("task=Gymnasium", "env.id=my_env:own/Line-v0", "max_iterations=1", *small)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["Line-v0"]
    assert (tmp_path / "runs" / "Line-v0" / "latest" / "checkpoints" / "last.pt").is_file()
    done = train_here("checkpoint=Line-v0", "max_iterations=2")
    assert done.returncode == 2 and "env.id=my_env:own/Line-v0 would run code" in done.stderr, done.stderr
    assert train_here("checkpoint=Line-v0", "env.id=my_env:own/Line-v0", "max_iterations=2").returncode == 0
    run = tmp_path / "runs" / "Line-v0" / "latest"
    assert len((run / "metrics.csv").read_text().splitlines()) == 3


@pytest.fixture(scope="module")
def cart_pole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train a run of CartPole-v1."""
    settings = {"max_iterations": 1, "env": {"id": "CartPole-v1"}, "ppo": {"horizon": 4, "minibatch_size": 16}}
    trainer = trainer_of(tmp_path_factory.mktemp("cart_pole"), **settings)
    trainer.train()
    assert trainer.run_dir is not None
    return trainer.run_dir.path


@pytest.mark.parametrize("act", ["trained", "zero", "random"])
def test_player_acts_within_action_space(cart_pole: Any, act: str) -> None:
    with closing(Player.open(str(cart_pole), act=act, num_envs=64)) as player:
        actions = []
        step = player.env.step
        player.env.step = lambda action: actions.append(action) or step(action)  # type: ignore[method-assign]
        for _ in range(20):
            player.step()
        chosen = torch.stack(actions)
    assert chosen.dtype == torch.int64 and chosen.shape == (20, 64, 1)
    seen = set(chosen.unique().tolist())
    assert seen == {"zero": {0}, "random": {0, 1}}.get(act, seen & {0, 1})


def test_run_is_recorded_and_played(cart_pole: Any, load_tool: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("DISPLAY", ":0")
    small = ["--num-envs", "3", "--width", "320", "--height", "240", "--steps", "10"]
    load_tool("record").main([str(cart_pole), *small])
    video = imageio_ffmpeg.read_frames(capsys.readouterr().out.strip())
    meta = next(video)
    assert (meta["size"], meta["fps"]) == ((320, 240), 25.0)  # 50 Hz: every second step
    first, *rest = [np.frombuffer(frame, np.uint8).reshape(240, 320, 3) for frame in video]
    assert len(rest) == 4 and not (first == rest[-1]).all()
    assert first[:118, :158].std() > 10 and first[122:, 162:].std() == 0  # the fourth tile is empty
    play = load_tool("play")
    play.main([str(cart_pole), "--steps", "3"])
    play.main([str(cart_pole), "--steps", "3", "--viewer", "none"])
    assert "mean reward 1 " in capsys.readouterr().out


def test_unsupported_tools_are_rejected_in_one_line(cart_pole: Any, load_tool: Any) -> None:
    with pytest.raises(ConfigError, match=r"--sim"):
        Player.open(str(cart_pole), sim="mujoco")
    for tool in ("snapshot", "doctor"):
        with pytest.raises(SystemExit) as end:
            load_tool(tool).main([str(cart_pole), *(["--policy", "trained"] if tool == "snapshot" else [])])
        assert end.value.code == 2
    with pytest.raises(ConfigError, match="library"):
        make_env("Gymnasium", env={"id": "Pendulum-v1"})


class Drawn(Count):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012 (Gymnasium's own)
    render_mode = "rgb_array"

    def render(self) -> Any:
        return np.full((4, 6, 3), self.t, np.uint8)


@pytest.mark.parametrize("make", [SyncVectorEnv, async_envs, DummyVecEnv])
def test_rendered_images_come_from_envs(make: Any) -> None:
    env = GymnasiumEnv(make([Drawn] * 2), seed=0, max_episode_steps=LIMIT)
    try:
        env.reset()
        env.step(torch.zeros(2, 2))
        pictures = env.render()
        assert [picture.shape for picture in pictures] == [(4, 6, 3)] * 2 and int(pictures[0].max()) == 1
        assert env.frames_per_s == 7.0
    finally:
        env.close()


def test_rendering_envs_without_images_raises() -> None:
    env = GymnasiumEnv(SyncVectorEnv([Count] * 2), seed=0, max_episode_steps=LIMIT)
    env.reset()
    with raises(ConfigError, key="SyncVectorEnv"):
        env.render()
    assert env.frames_per_s == 30.0


def takes_count(num_envs: int) -> Any:
    return SyncVectorEnv([Count] * num_envs)


def test_target_that_rejects_arguments_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = prepare("Gymnasium", env={"_target_": f"{__name__}.takes_count", "kwargs": {"render_mode": "human"}}).cfg.env
    with pytest.raises(ConfigError, match=r"env\._target_=.*takes_count: .*'render_mode'"):
        GymnasiumEnv.from_settings(cfg, num_envs=2, seed=0, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("space", "counts", "sent", "got"),
    [
        (gym.spaces.Discrete(3, start=-1), (3,), [[0], [2]], [[-1, -1], [1, 1]]),
        (gym.spaces.MultiDiscrete([3, 2], start=[1, 0]), (3, 2), [[2, 1], [0, 0]], [[3, 1], [1, 0]]),
    ],
)
def test_discrete_actions_are_indices_from_zero(
    space: gym.Space, counts: tuple[int, ...], sent: list[list[int]], got: list[list[float]]
) -> None:
    make = [lambda: Fake(action_space=space, obs=lambda env: np.zeros(2) + (env.action if env.count else 0))] * 2
    envs = SyncVectorEnv(make, autoreset_mode=AutoresetMode.DISABLED)
    env = GymnasiumEnv(envs, seed=1, max_episode_steps=LIMIT)
    env.reset()
    assert env.action_space == MultiDiscrete(counts)
    assert env.step(torch.tensor(sent)).final_obs["policy"].tolist() == got


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "settings", "least"),
    [
        ("ppo", {"horizon": 64, "minibatch_size": 256, "learning_rate": 1e-3, "network": {"hidden": [64, 64]}}, 100.0),
        ("dqn", {}, 150.0),
    ],
)
def test_algorithms_learn_cartpole(tmp_path: Any, algo: str, settings: dict[str, Any], least: float) -> None:
    more: dict[str, Any] = {"num_envs": 16, "max_iterations": 25} if algo == "ppo" else {"max_iterations": 150}
    more |= {"env": {"id": "CartPole-v1"}, "seed": 1, algo: settings, "log": {"console": "quiet", "dir": str(tmp_path)}}
    assert make_trainer(prepare("Gymnasium", algo=algo, **more)).train()["episode/return"] > least


class Screen(gym.Env):
    """Env whose pixels (and `steps`, for `dict`) equal the step number; only the last layer of `stack` is current."""

    def __init__(self, kind: str) -> None:
        self._kind, self._step = kind, 0
        picture = gym.spaces.Box(0, 255, {"stack": (4, 40, 32), "grey": (40, 32)}.get(kind, (40, 32, 3)), np.uint8)
        steps = gym.spaces.Box(0, LIMIT, (1,), np.float32)
        self.observation_space = gym.spaces.Dict({"steps": steps, "eye": picture}) if kind == "dict" else picture
        self.action_space = gym.spaces.Discrete(2)

    def _obs(self) -> Any:
        picture = self.observation_space["eye"] if self._kind == "dict" else self.observation_space
        drawn = np.full(picture.shape, self._step, np.uint8)
        if self._kind == "stack":
            drawn[:3] = 0
        return {"steps": np.array([self._step], np.float32), "eye": drawn} if self._kind == "dict" else drawn

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._step = 1
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return self._obs(), 1.0, False, self._step > 3, {}


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(("kind", "channels"), [("rgb", 3), ("grey", 1), ("stack", 4), ("dict", 3)])
def test_images_are_separate_observation_groups(kind: str, channels: int, mode: AutoresetMode) -> None:
    env = GymnasiumEnv(SyncVectorEnv([lambda: Screen(kind)] * 2, autoreset_mode=mode), seed=0, max_episode_steps=3)
    group, numbers = ("eye", 1) if kind == "dict" else ("image", 0)
    assert env.images == {group: (40, 32, channels)}
    assert env.obs_sizes == {"policy": numbers}
    first = env.reset()
    assert first[group].dtype == torch.uint8
    assert first[group].shape == (2, 40, 32, channels)
    step = None
    for _ in range(3):
        step = env.step(torch.zeros(2, 1, dtype=torch.int64))
    assert step is not None and bool(step.truncated.all())
    assert step.final_obs[group][..., -1].unique().tolist() == [4]
    assert step.obs[group][..., -1].unique().tolist() == [1]
    if numbers:
        assert step.final_obs["policy"].tolist() == [[4.0], [4.0]]
    assert int(first[group].max()) == 1  # earlier images are not overwritten
    env.close()


@pytest.mark.parametrize("algo", ["ppo", "a2c", "reinforce"])
def test_images_train_a_learner_on_another_device(algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = {"console": "quiet", "dir": str(tmp_path)}
    settings = {"max_iterations": 2, "seed": 1, "log": log, algo: {"horizon": 6}}
    rows = []
    for device in ("cpu", "cpu:0"):  # torch treats them as different devices
        monkeypatch.setattr(devices, "find_device", lambda *_, device=device: torch.device(device))
        rows.append(gpusim_rl.train(SyncVectorEnv([lambda: Screen("dict")] * 2), algo=algo, **settings))
    one, two = ({key: row[key] for key in row if not key.startswith(("time/", "speed/", "system/"))} for row in rows)
    assert one == two


def test_nested_images_are_rejected_and_small_grids_are_flattened() -> None:
    with pytest.raises(ConfigError, match=r"^env\.id=X-v0: images of shape \[64, 64, 3\]"):
        flat_size(gym.spaces.Tuple([gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)]), "env.id=X-v0")
    assert flat_size(gym.spaces.Box(0, 255, (7, 7, 3), np.uint8), "env.id=X-v0") == 147


def test_train_accepts_vector_env_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = {"max_iterations": 2, "ppo": {"horizon": 8, "minibatch_size": 8}, "log": {"console": "quiet"}}

    envs = SyncVectorEnv([Count] * NUM_ENVS)
    row = gpusim_rl.train(envs, env={"max_episode_steps": LIMIT}, **few | {"log": {"console": "plain"}})
    assert "in the script" in capsys.readouterr().out
    assert row["env_steps"] == 2 * 8 * NUM_ENVS
    assert 1.0 < row["episode/length"] < LIMIT
    assert envs.closed
    [last] = Path("runs/Gymnasium/latest/checkpoints").glob("last.pt")
    resumed = gpusim_rl.train(SyncVectorEnv([Count] * NUM_ENVS), checkpoint=str(last), max_iterations=3)
    assert resumed["iteration"] == 3
    sb3 = DummyVecEnv([lambda: gym.make("Pendulum-v1")] * 2)
    assert gpusim_rl.train(sb3, env={"max_episode_steps": 200}, **few)["iteration"] == 2


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"num_envs": 4}, "num_envs"),
        ({"env": {"id": "CartPole-v1"}}, r"env\.id"),
        ({"eval": {"interval": 2}}, r"eval\.interval"),
        ({"actors": "process", "algo": "impala"}, "actors"),
        ({"sim": "mujoco"}, "sim and sim_device"),
    ],
)
def test_settings_that_conflict_with_passed_envs_are_rejected(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        gpusim_rl.train(SyncVectorEnv([Count] * NUM_ENVS), **{"env": {"max_episode_steps": 5}} | settings)


def test_object_that_is_no_vector_env_is_named() -> None:
    with raises(ConfigError, key="Count", got="Count"):
        gpusim_rl.train(Count())
