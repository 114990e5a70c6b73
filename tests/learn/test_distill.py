"""Distillation: labels, minibatches, recurrence, resume, warm start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpusim_rl.api import prepare
from gpusim_rl.distributed.actors import make_trainer
from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.algorithm import EnvSpec, LearnerContext, Policy, TrainedPolicy
from gpusim_rl.learn.supervised import Distill
from gpusim_rl.run.evaluation import evaluate_run
from gpusim_rl.run.trainer import Trainer
from gpusim_rl.settings.checks import build
from gpusim_rl.settings.schema import DistillConfig
from gpusim_rl.spaces import Box
from gpusim_rl.testing.conformance import merged
from helpers.composed import algorithm_defaults
from helpers.fakes import Env, Outcome, RandomEnv
from helpers.on_policy import collect
from helpers.raised import raises
from helpers.training import SMALL_PPO, the_run

SMALL: dict[str, Any] = {
    "horizon": 8,
    "precision": "fp32",
    "sequence_length": 4,
    "teacher": "teacher",
    "network": {"hidden": [16, 16], "rnn_size": 16},
}


def config(**changes: Any) -> DistillConfig:
    return build(DistillConfig, merged(algorithm_defaults("distill"), SMALL, changes), "distill")


def student(
    env: Env,
    policy: Policy,
    *,
    device: str = "cpu",
    observes: int | None = None,
    limit: float | None = None,
    **changes: Any,
) -> Distill:
    """Build a student of a teacher with this policy."""
    torch.manual_seed(1)
    size = observes or env.obs_sizes.get("teacher", env.obs_sizes["policy"])
    found = TrainedPolicy(policy, None, {"policy": size}, "digest")
    spec = EnvSpec(env.num_envs, env.obs_sizes, Box(env.num_actions, limit), 1)
    context = LearnerContext("distill", load_policy=lambda name: found)
    return Distill(config(**changes), spec, context, device=torch.device(device), seed=0, max_iterations=100)


def random_policy(env: Env, device: str = "cpu", **changes: Any) -> Policy:
    """Build a distillation policy with random weights."""
    torch.manual_seed(2)
    spec = EnvSpec(env.num_envs, env.obs_sizes, Box(env.num_actions), 1)
    policy = Distill.make_policy(config(**changes), spec, LearnerContext("distill"), torch.device(device))
    with torch.no_grad():
        policy.head.mean.weight.mul_(100.0)  # type: ignore[reportAttributeAccessIssue]
    return policy


@pytest.mark.parametrize("rnn", [None, "lstm"])
def test_student_equal_to_teacher_has_zero_loss(rnn: str | None) -> None:
    env = RandomEnv(6, seed=4)
    changes = {"network": {"rnn": rnn}, "normalize_obs": False}
    teacher = random_policy(env, **changes)
    it = student(env, teacher, epochs=1, learning_rate=1e-9, **changes)
    collect(it, env)
    assert float(it.update()["loss/imitation"]) > 1e-3
    it.policy.load_state_dict(teacher.state_dict())
    it.exploration.begin_episodes()
    it.labels.load_state_dict(None)  # type: ignore[union-attr]
    collect(it, env)
    stats = it.update()
    assert float(stats["loss/imitation"]) < 1e-12 and float(stats["policy/grad_norm"]) < 1e-5


def test_teacher_reads_its_group_and_resets_at_episode_end() -> None:
    env = RandomEnv(6, {"policy": 2, "teacher": 5}, seed=5)
    teacher = random_policy(RandomEnv(6, {"policy": 5}), network={"rnn": "gru"})
    it = student(env, teacher)
    obs, hidden = env.reset(), teacher.actor_state(6)
    it.begin_rollout()
    for t in range(8):
        expected, hidden = teacher.act_without_critic({"policy": obs["teacher"]}, hidden)
        step = env.step(it.act(obs))
        it.record(it.act(obs), step)
        hidden, obs = tuple(h * ~step.done[None, :, None] for h in hidden), step.obs
        assert it.labels is not None
        torch.testing.assert_close(it.labels.actions[t], expected)
    assert it.rollout.obs.keys() == {"policy"}


@pytest.mark.parametrize("limit", [0.01, None])
def test_teacher_actions_are_clipped_to_action_limit(limit: float | None) -> None:
    env = RandomEnv(6)
    it = student(env, random_policy(env), limit=limit)
    collect(it, env)
    assert it.labels is not None
    most = float(it.labels.actions.abs().max())
    assert most == pytest.approx(limit) if limit else most > 0.01


def minibatch_indices(it: Distill) -> list[Tensor]:
    """Update and return the sequences of each minibatch."""
    found, gradient = [], it.steps.gradient

    def watched(loss: Any, batch: Any, index: Tensor, weight: Any) -> Any:
        found.append(index)
        return gradient(loss, batch, index, weight)

    it.steps.gradient = watched  # type: ignore[method-assign]
    it.update()
    return found


def test_minibatch_mixes_steps_of_all_times() -> None:
    env = Recall(32)
    it = student(env, Cue(), horizon=20, sequence_length=4, epochs=1)
    collect(it, env)
    parts = minibatch_indices(it)
    assert len(parts) == it.num_minibatches == 5 and sum(map(len, parts)) == 20 * 32
    assert all(len(part.div(32, rounding_mode="floor").unique()) > 15 for part in parts)


def test_distillation_trains_only_the_actor() -> None:
    env = RandomEnv(6)
    it = student(env, random_policy(env))
    before = {name: x.clone() for name, x in it.policy.state_dict().items()}
    collect(it, env)
    stats = it.update()
    kept = {name for name, x in it.policy.state_dict().items() if torch.equal(before[name], x)}
    assert kept == {"head.log_std", "value_head.weight", "value_head.bias"}
    assert float(stats["check/learned"]) == 1.0
    assert float(stats["policy/std"]) == pytest.approx(0.1, rel=0.01)


class Recall(RandomEnv):
    """Cue in the first of 5 steps; the teacher sees it in every step."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, {"policy": 2, "teacher": 1}, num_actions=1)
        self.step_of_episode, self.cue = torch.zeros(num_envs, dtype=torch.int64), torch.zeros(num_envs)

    def _obs(self) -> dict[str, Tensor]:
        new = self.step_of_episode % 5 == 0
        self.cue = torch.where(new, torch.randn(self.num_envs, generator=self.generator).sign(), self.cue)
        return {"policy": torch.stack([self.cue * new, 1.0 * new], dim=1), "teacher": self.cue[:, None]}

    def step(self, action: Tensor) -> Any:
        self.step_of_episode += 1
        ends = self.step_of_episode % 5 == 0
        obs, never = self._obs(), torch.zeros_like(ends)
        return Outcome(obs, obs, torch.zeros(self.num_envs), ends, never, never)


class Cue(Policy):
    """Teacher of `Recall`."""

    def act(self, obs: Any, hidden: Any, deterministic: bool = True) -> Any:
        return obs["policy"], hidden


def test_only_recurrent_student_recalls_a_cue() -> None:
    losses = {}
    for rnn in (None, "gru"):
        env = Recall(32)
        it = student(env, Cue(), network={"rnn": rnn}, horizon=5, sequence_length=5, learning_rate=1e-2)
        obs = env.reset()
        for _ in range(30):
            obs = collect(it, env, obs)
            losses[rnn] = float(it.update()["loss/imitation"])
    assert losses[None] > 0.7  # a cue of +-1, unknown in 4 of 5 steps
    assert losses["gru"] < 0.05


# Whole runs


def run(folder: Path, algo: str = "distill", **changes: Any) -> Trainer:
    settings = {"num_envs": 8, "max_iterations": 2, "seed": 1, "log": {"console": "quiet", "dir": str(folder)}}
    small = {"ppo": SMALL_PPO, "distill": {key: SMALL[key] for key in SMALL if key != "teacher"}}
    return make_trainer(prepare("Cartpole", algo=algo, **merged(settings, {algo: small[algo]}, changes)))


LEFT_OUT = {"observations": {"cart_vel": {"used": False}, "pole_vel": {"used": False}}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    run(folder, "ppo", ppo={"network": {"rnn": "gru"}}).train()
    return str(the_run(folder))


@pytest.mark.parametrize("algo", ["distill", "ppo"])
def test_resume_requires_the_teacher_again(algo: str, teacher: str, tmp_path: Path, capsys) -> None:
    def teacher_setting(by: str) -> dict[str, Any]:
        return {algo: {"teacher": by if algo == "distill" else {"run": by, "weight": 1.0, "end": 30}}}

    rnn = {algo: {"network": {"rnn": "gru"}}}
    first = run(tmp_path / "b", algo, task={**LEFT_OUT, "episode_length": 9}, **merged(rnn, teacher_setting(teacher)))
    assert first.env.obs_sizes == {"policy": 2, "teacher": 4}
    assert first.train()["loss/imitation"] > 0.0  # type: ignore[operator]
    folder, key = str(the_run(tmp_path / "b")), "distill.teacher" if algo == "distill" else "ppo.teacher.run"
    with raises(ConfigError, key=key):
        make_trainer(prepare("Cartpole", checkpoint=folder, max_iterations=4))
    assert f"{key}={teacher}" in capsys.readouterr().err
    make_trainer(prepare("Cartpole", checkpoint=folder, max_iterations=4, **teacher_setting(teacher))).train()
    assert "warning: the teacher" not in capsys.readouterr().err
    assert evaluate_run(prepare("Cartpole", checkpoint=folder, test=True))["episodes"] == 8
    run(tmp_path / "c", "ppo").train()
    make_trainer(
        prepare("Cartpole", checkpoint=folder, max_iterations=5, **teacher_setting(str(the_run(tmp_path / "c"))))
    )
    assert "warning: the teacher" in capsys.readouterr().err


def test_ppo_starts_from_a_student(teacher: str, tmp_path: Path) -> None:
    it = run(tmp_path / "a", task=LEFT_OUT, distill={"teacher": teacher})
    it.train()
    folder, network = str(the_run(tmp_path / "a")), {"hidden": [16, 16]}
    begun = run(tmp_path / "b", "ppo", task=LEFT_OUT, start_from=folder, ppo={"network": network})
    names = {name for name in it.algorithm.policy.state_dict() if not name.startswith("value")}
    ours, theirs = (x.algorithm.policy.state_dict() for x in (begun, it))
    assert {name for name in theirs if torch.equal(ours[name], theirs[name])} == names
    begun.train()
    make_trainer(prepare("Cartpole", checkpoint=str(the_run(tmp_path / "b")), max_iterations=3)).train()
    with pytest.raises(ConfigError, match=r"start_from=.*checkpoint"):
        run(tmp_path / "c", "ppo", start_from=folder, checkpoint=str(the_run(tmp_path / "b")))
    with pytest.raises(ConfigError, match=r"start_from=.* both runs"):
        make_trainer(prepare("Cartpole", algo="sac", task=LEFT_OUT, num_envs=2, start_from=folder))
    with pytest.raises(ConfigError, match=r"start_from=.* Try '?ppo\.network\.hidden=\[16,16\]"):
        run(tmp_path / "c", "ppo", task=LEFT_OUT, start_from=folder, ppo={"network": {"hidden": [8]}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distill": {"teacher": "nowhere"}}, r"^no checkpoint 'nowhere'"),
        ({"task": {"observations": {"cart_pos": {"history": 2}}}}, r"observes 4 numbers, .* 'policy' .* has 5"),
        ({"task": {"discrete": True}}, r"discrete actions are not supported"),
        ({"distill": {"network": {"separate": True}}}, r"no value function"),
    ],
)
def test_incompatible_teacher_is_rejected(changes: dict[str, Any], words: str, teacher: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        run(tmp_path, **merged({"distill": {"teacher": teacher}}, changes))
    assert "\n" not in str(error.value)


def test_teacher_with_other_actions_or_code_is_rejected(teacher: str, tmp_path: Path) -> None:
    pendulum = {"num_envs": 2, "log": {"console": "quiet", "dir": str(tmp_path)}, "distill": {"teacher": teacher}}
    with pytest.raises(ConfigError, match=r"distill\.teacher=.* observes 4 numbers"):
        make_trainer(prepare("Pendulum", algo="distill", **pendulum))
    with pytest.raises(ConfigError, match=r"1 actions.* 8"):
        make_trainer(prepare("Ant", algo="distill", **pendulum))
    state = torch.load(f"{teacher}/checkpoints/last.pt", weights_only=True)
    state["config"]["ppo"]["network"]["_target_"] = "torch.nn.Linear"
    from gpusim_rl.files.checkpoint_file import save

    save(tmp_path / "evil.pt", {key: value for key, value in state.items() if key not in ("format", "gpusim_rl")})
    with pytest.raises(ConfigError, match=r"would run code .*try trust=true"):
        run(tmp_path, distill={"teacher": str(tmp_path / "evil.pt")})
