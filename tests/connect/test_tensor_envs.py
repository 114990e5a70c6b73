"""Adapters for tensor-based libraries, on a stand-in; test_isaaclab.py and test_mjlab.py use the real libraries."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpusim_rl.api import prepare
from gpusim_rl.connect.isaaclab import IsaacLabEnv
from gpusim_rl.connect.library_config import change, in_one_line, refuse_unused
from gpusim_rl.connect.mjlab import MjLabEnv
from gpusim_rl.connect.tensor_envs import actions_of
from gpusim_rl.errors import ConfigError, TaskError
from gpusim_rl.run.cuda_graph import choose_graph
from gpusim_rl.run.devices import choose_devices
from gpusim_rl.spaces import Box, MultiDiscrete
from helpers.raised import raises

CPU, LIMIT = torch.device("cpu"), 4


class Terrain:
    """Terrain levels that change at reset, as in both libraries' curricula."""

    def __init__(self, num_envs: int) -> None:
        self.terrain_levels = torch.zeros(num_envs, dtype=torch.int64)
        self.terrain_types = torch.zeros(num_envs, dtype=torch.int64)
        self.terrain_origins = torch.arange(10.0)[:, None, None].expand(10, 1, 3)
        self.env_origins = torch.zeros(num_envs, 3)

    def update_env_origins(self, env_ids: Any, move_up: Any, move_down: Any) -> None:
        self.terrain_levels.clamp_(min=1)
        self.terrain_levels -= 1


class Library:
    """Stand-in that observes (episode, step); env 1 terminates after two steps. Resets itself or waits for `reset`."""

    device, max_episode_length, step_dt = "cpu", LIMIT, 0.1

    def __init__(self, num_envs: int = 3, *, finite: bool = False, group: str = "policy") -> None:
        self.num_envs, self.group, self.unwrapped = num_envs, group, self
        self.cfg = SimpleNamespace(is_finite_horizon=finite, auto_reset=True, compute_final_obs=False)
        self.single_action_space = SimpleNamespace(shape=(2,), low=-np.inf, high=np.inf)
        self.episode = torch.zeros(num_envs)
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64)
        self.common_step_counter, self.closed = 0, False
        self.bad = torch.zeros(num_envs, dtype=torch.bool)
        self.extras: dict[str, Any] = {"log": {}}
        self.scene = SimpleNamespace(terrain=Terrain(num_envs))

    def _obs(self) -> dict[str, torch.Tensor]:
        return {
            self.group: torch.stack([self.episode, self.episode_length_buf.float()], dim=1),
            "camera": torch.zeros(1),
        }

    def reset(self, env_ids: torch.Tensor | None = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        where = slice(None) if env_ids is None else env_ids
        if env_ids is None or len(env_ids):
            self.scene.terrain.update_env_origins(where, None, None)
        self.extras["log"] = {"Metrics/steps": self.episode_length_buf[where].float().mean(), "Curriculum/level": 2.5}
        self.extras["log"]["Episode_Termination/any"] = self.num_envs if env_ids is None else len(env_ids)
        self.episode[where] += 1
        self.episode_length_buf[where] = 0
        return self._obs(), self.extras

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        assert action.shape == (self.num_envs, 2)
        assert bool(action.isfinite().all())
        self.episode_length_buf += 1
        self.common_step_counter += 1
        late = self.episode_length_buf >= LIMIT
        fell = (torch.arange(self.num_envs) == 1) & (self.episode_length_buf == 2)
        reward = self.episode_length_buf.float().masked_fill(self.bad, torch.nan)
        self.extras["log"] = {"Metrics/of_steps": reward.mean()}
        if self.cfg.auto_reset:
            ended = (late | fell).nonzero().flatten()
            if len(ended):
                if self.cfg.compute_final_obs:
                    self.extras["final_obs"] = self._obs()
                self.reset(ended)
        return self._obs(), reward, fell, late, self.extras

    def close(self) -> None:
        self.closed = True


def made(kind: str, **settings: Any) -> tuple[Any, Library]:
    if kind == "isaaclab":
        library = Library(**settings)
        return IsaacLabEnv(library, "Theirs"), library
    library = Library(group="actor", **settings)
    return MjLabEnv(library, "Theirs"), library


KINDS = pytest.mark.parametrize("kind", ["isaaclab", "mjlab"])
ACTION = torch.zeros(3, 2)


@KINDS
def test_final_observation_precedes_reset(kind):
    env, _ = made(kind)
    assert env.reset()["policy"].tolist() == [[1, 0]] * 3
    seen = [env.step(ACTION) for _ in range(LIMIT)]
    assert seen[1].terminated.tolist() == [False, True, False]
    assert seen[1].final_obs["policy"].tolist() == [[1, 2], [1, 2], [1, 2]]
    assert seen[1].obs["policy"].tolist() == [[1, 2], [2, 0], [1, 2]]
    assert seen[3].truncated.tolist() == [True, False, True]
    assert seen[3].terminated.tolist() == [False, True, False]
    assert seen[3].final_obs["policy"].tolist() == [[1, 4], [2, 2], [1, 4]]
    assert seen[3].obs["policy"].tolist() == [[2, 0], [3, 0], [2, 0]]
    assert seen[3].reward.tolist() == [4, 2, 4]
    assert seen[3].stats["Metrics/steps"].tolist() == pytest.approx([10 / 3] * 3)
    ended = 3.0 if kind == "isaaclab" else 1.0  # mjlab logs counts, which become shares
    assert seen[3].stats["Episode_Termination/any"].tolist() == [ended] * 3
    assert "Metrics/of_steps" in seen[0].stats  # present from the first step
    assert seen[3].stats["Curriculum/level"].tolist() == [2.5] * 3
    assert [float(step.stats["Metrics/steps"].nan_to_num(-1.0).max()) for step in seen[:3]] == [-1, 2, -1]


@KINDS
def test_finite_horizon_terminates_episode(kind):
    env, _ = made(kind, finite=True)
    env.reset()
    last = [env.step(ACTION) for _ in range(LIMIT)][-1]
    assert last.terminated.tolist() == [True] * 3
    assert not bool(last.truncated.any())


@KINDS
def test_non_finite_step_is_dropped_and_resets_env(kind, caplog):
    env, library = made(kind)
    env.reset()
    library.bad[2] = True
    bad = env.step(ACTION)
    library.bad[2] = False
    assert bad.diverged.tolist() == bad.done.tolist() == bad.incomplete.tolist() == [False, False, True]
    assert bad.reward.tolist() == [1, 1, 0]
    assert bad.final_obs["policy"].tolist() == [[1, 1], [1, 1], [0, 0]]
    following = env.step(ACTION)
    by_library = kind == "isaaclab"  # only the library can reset, which takes one skipped step
    assert following.diverged.tolist() == following.skipped.tolist() == [False, False, by_library]
    assert following.obs["policy"][2].tolist() == ([2, 0] if by_library else [2, 1])
    assert not bool((following.terminated | following.truncated)[2])
    assert env.first_diverged() is None
    assert "Theirs" in caplog.text and "env 2" in caplog.text


@KINDS
def test_non_finite_action_does_not_reach_library(kind):
    env, _ = made(kind)
    env.reset()
    step = env.step(torch.tensor([[0.0, 0.0], [torch.inf, 0.0], [0.0, torch.nan]]))
    assert step.bad_action.tolist() == step.diverged.tolist() == [False, True, True]


@KINDS
def test_terrain_levels_and_counters_are_restored(kind):
    env, library = made(kind)
    env.reset()
    env.begin_from({"common_step_counter": 700, "terrain_levels": torch.tensor([3, 5])})
    assert library.common_step_counter == 700
    assert library.scene.terrain.terrain_levels.tolist() == [3, 5, 3]
    assert library.scene.terrain.env_origins[:, 0].tolist() == [3, 5, 3]
    state = env.state_dict()
    assert state["common_step_counter"] == 700
    assert state["terrain_levels"].tolist() == [3, 5, 3]
    library.reset()
    assert library.scene.terrain.terrain_levels.tolist() == [2, 4, 2]  # resets change them again
    env.close()
    assert library.closed


@KINDS
def test_curriculum_state_is_restored(kind):
    class Scheduler:
        def __init__(self) -> None:
            self.levels = torch.zeros(3)

        def get_state(self) -> torch.Tensor:
            return self.levels

        def set_state(self, state: torch.Tensor) -> None:
            self.levels = state.clone()

    env, library = made(kind)
    terms = [SimpleNamespace(func=Scheduler()), SimpleNamespace(func=print)]
    library.curriculum_manager = SimpleNamespace(_term_names=["difficulty", "other"], _term_cfgs=terms)
    terms[0].func.levels += torch.tensor([1.0, 2.0, 3.0])
    state = env.state_dict()
    assert list(state["curricula"]) == ["difficulty"]
    terms[0].func.levels.zero_()
    assert state["curricula"]["difficulty"].tolist() == [1, 2, 3]
    env.begin_from({**state, "curricula": {"difficulty": torch.tensor([4.0, 5.0])}})
    assert terms[0].func.levels.tolist() == [4, 5, 4]


def test_non_finite_initial_observation_ends_run():
    env, library = made("mjlab")
    library.episode[0] = torch.nan
    with raises(TaskError, key="Theirs"):
        env.reset()


def test_unsupported_observations_are_rejected():
    env, library = made("isaaclab")
    library.group = "pixels"
    with raises(ConfigError, key="Theirs", hint="Available: camera, pixels"):
        env.reset()
    library._obs = lambda: {"policy": torch.zeros(3, 8, 8, 3)}
    with pytest.raises(ConfigError, match="images"):
        env.reset()


def test_actions_are_scaled_to_library_bounds():
    space = SimpleNamespace(shape=(3,), low=np.array([-2.0, 0.0, -np.inf]), high=np.array([2.0, 10.0, np.inf]))
    ours, send = actions_of(space, CPU, "Theirs")
    assert ours == Box(3, bounds=((-2.0, 2.0), (0.0, 10.0), (-np.inf, np.inf)))
    assert send(torch.tensor([[1.0, -1.0, 5.0], [-9.0, 0.0, -5.0]])).tolist() == [[2.0, 0.0, 5.0], [-2.0, 5.0, -5.0]]
    ours, send = actions_of(SimpleNamespace(nvec=np.array([3, 2])), CPU, "Theirs")
    assert ours == MultiDiscrete((3, 2))
    with raises(ConfigError, key="Theirs: action space"):
        actions_of(SimpleNamespace(spaces={}), CPU, "Theirs")


def test_multiple_agents_are_rejected():
    library = Library()
    library.cfg.possible_agents = ["a", "b"]
    with pytest.raises(ConfigError, match=r"Theirs: .*multi-agent"):
        IsaacLabEnv(library, "Theirs")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"cfg": {"scene": {"num_envs": 8}}}, "env.cfg.scene.num_envs"),
        ({"cfg": {"auto_reset": True}}, "env.cfg.auto_reset"),
        ({"vectorization": "async"}, "env.vectorization"),
    ],
)
def test_settings_without_effect_are_rejected(changes, key):
    cfg = prepare("MjLab", env={"id": "Some-Env", "cfg": {"scene": {"env_spacing": 8}}}).cfg.env
    refuse_unused(cfg, "theirs", {"auto_reset": "x"})
    with raises(ConfigError, key=key):
        refuse_unused(dataclasses.replace(cfg, **changes), "theirs", {"auto_reset": "x"})


def test_library_error_while_making_envs_is_one_line():
    with pytest.raises(ConfigError, match=r"^My-Env: got an unexpected$"), in_one_line("My-Env"):
        raise TypeError("got an unexpected\nand more")
    with pytest.raises(ConfigError, match=r"No module named 'carb'\. .*Kit"), in_one_line("My-Env"):
        raise ValueError("No module named 'carb'")


@dataclass
class Fields:
    length_s: float = 5  # Isaac Lab assigns ints to float fields
    decimation: int = 4
    limits: tuple[float, float] = (0.0, 1.0)
    pose: dict[str, float] = field(default_factory=lambda: {"hip": 0.0})
    weights: dict[str, Any] = field(default_factory=lambda: {"alive": SimpleNamespace(weight=1.0)})
    name: Any = None


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"decimation": 2.5}, "decimation", "int.*got 2.5"),
        ({"decimation": None}, "decimation", "int"),
        ({"decimation": True}, "decimation", "int"),
        ({"limits": [1]}, "limits", "tuple"),
        ({"limits": ["a", 1]}, "limits", "tuple"),
        ({"weights": {"alive": {"weight": "a"}}}, "weights.alive.weight", "float.*got 'a'"),
        ({"decimatio": 1}, "decimatio", "'decimation'"),
        ({"decimation": {"unit": 1}}, "decimation.unit", "no such field"),
    ],
)
def test_configuration_fields_are_set_by_name(changes, key, words):
    cfg = Fields()
    change(cfg, {"length_s": 0.5, "decimation": 2, "limits": [1, 2], "pose": {"hip": 1, "knee": -0.5}}, "env.cfg")
    assert (cfg.length_s, cfg.decimation, cfg.limits, cfg.pose) == (0.5, 2, (1, 2), {"hip": 1.0, "knee": -0.5})
    change(cfg, {"weights": {"alive": {"weight": 2}}, "name": "y"}, "env.cfg")
    assert (cfg.weights["alive"].weight, cfg.name) == (2.0, "y")
    with pytest.raises(ConfigError, match=words) as error:
        change(Fields(), changes, "env.cfg")
    assert error.value.key == f"env.cfg.{key}"


def test_missing_or_untested_library_is_reported_in_one_line():
    for task, name in (("IsaacLab", "isaaclab"), ("MjLab", "mjlab")):
        spec = prepare(task, env={"id": "Some-Env"}, device="cpu")
        with pytest.raises(ConfigError, match=f"task={task}.*{name} is missing.*pip install"):
            spec.task_class.from_settings(spec.cfg.env, num_envs=2, seed=0, device=CPU)
    for kind, switch in (("isaaclab", "compute_final_obs"), ("mjlab", "auto_reset")):
        library = Library()
        delattr(library.cfg, switch)
        with pytest.raises(ConfigError, match=rf"^Theirs: .*version.* {switch}"):
            {"isaaclab": IsaacLabEnv, "mjlab": MjLabEnv}[kind](library, "Theirs")


def test_library_settings_are_rejected_for_other_tasks():
    with raises(ConfigError, key="env.cfg"):
        cfg = prepare("Gymnasium", env={"id": "CartPole-v1", "cfg": {"a": 1}}).cfg.env
        prepare("Gymnasium").task_class.from_settings(cfg, num_envs=2, seed=0, device=CPU)
    for task, section, key in (("Cartpole", "env", "physics"), ("MjLab", "task", "randomization_params")):
        with pytest.raises(ConfigError, match=rf"{section}\.{key}"):
            prepare(task, **{section: {key: {"a": 1} if section == "task" else "newton_mjwarp"}})


def test_library_steps_on_learner_device_outside_cuda_graphs():
    spec = prepare("IsaacLab", env={"id": "Some-Env"}, device="cpu")
    device, sim = choose_devices(spec.cfg, outside=spec.task_class)
    assert str(device) == "cpu" and str(sim).startswith("Isaac Lab")
    cuda = torch.device("cuda", 0)
    choice = choose_graph("auto", cuda, cuda, physics_steps=1, check_task=False, library="Isaac Lab")
    assert choice.mode == "update" and "Isaac Lab" in choice.reason
