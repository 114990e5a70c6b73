"""Checks of `task=MjLab` on mjlab itself: python mjlab_checks.py <name>..."""

from __future__ import annotations

from typing import Any

import torch
from mjlab.envs import ManagerBasedRlEnv, ManagerBasedRlEnvCfg
from mjlab.managers.observation_manager import ObservationGroupCfg, ObservationTermCfg
from mjlab.managers.reward_manager import RewardTermCfg
from mjlab.tasks.registry import load_env_cfg

import gpusim_rl
from gpusim_rl.connect.mjlab import MjLabEnv
from helpers import tensor_checks

CPU = torch.device("cpu")
GO1 = "Mjlab-Velocity-Flat-Unitree-Go1"
NOTHING = torch.zeros(4, 12)


def constant_reward() -> ManagerBasedRlEnvCfg:
    """Cartpole with reward 1, constant observation, and no end but the time limit: values are exact."""
    cfg = load_env_cfg("Mjlab-Cartpole-Balance")
    one = ObservationTermCfg(func=lambda env: torch.ones(env.num_envs, 1, device=env.device))
    cfg.observations = {group: ObservationGroupCfg(terms={"one": one}) for group in ("actor", "critic")}
    cfg.rewards = {"one": RewardTermCfg(func=lambda env: torch.ones(env.num_envs, device=env.device), weight=1.0)}
    cfg.scale_rewards_by_dt = False
    assert list(cfg.terminations) == ["time_out"]
    return cfg


def made(**changes: Any) -> MjLabEnv:
    cfg = tensor_checks.settings_of("MjLab", id=GO1, cfg={"episode_length_s": 0.4, **changes})
    return MjLabEnv.from_settings(cfg, num_envs=4, seed=1, device=CPU)


def steps() -> None:
    """Check that observations and rewards equal manual stepping bit for bit, including resets."""
    env = made()
    cfg = load_env_cfg(GO1)
    cfg.scene.num_envs, cfg.seed, cfg.episode_length_s, cfg.auto_reset = 4, 1, 0.4, False
    hand = ManagerBasedRlEnv(cfg, device="cpu")  # two per process
    torch.manual_seed(3)
    actions = [0.5 * torch.randn(4, 12) for _ in range(60)]
    env._envs.seed(9)
    found, names = [env.reset()], set()
    for action in actions:
        step = env.step(action)
        found.append(step.obs)
        step.obs["ends"] = torch.stack([step.reward, step.terminated, step.truncated], dim=1)
        step.obs["last"] = torch.cat([step.final_obs["policy"], step.final_obs["critic"]], dim=1)
        names |= {name for name, value in step.stats.items() if not bool(value.isnan().all())}
        assert torch.allclose(sum(step.terms.values()), step.reward, atol=1e-5)
        assert step.skipped is None or not bool(step.skipped.any())
    assert {"Episode_Termination/time_out", "Episode_Metrics/mean_action_acc"} <= names, names
    assert not [name for name in names if name.startswith("Episode_Reward/")]
    hand.seed(9)
    obs, _ = hand.reset()
    ends = 0
    for number, (first, second) in enumerate(zip(found, [*actions, None], strict=True)):
        for ours, theirs in (("policy", "actor"), ("critic", "critic")):
            assert torch.equal(first[ours], obs[theirs]), (number, ours)
        if second is None:
            break
        obs, reward, terminated, truncated, _ = hand.step(second)
        after = found[number + 1]
        assert torch.equal(after["ends"], torch.stack([reward, terminated, truncated], dim=1)), number
        assert torch.equal(after["last"], torch.cat([obs["actor"], obs["critic"]], dim=1)), number
        ended = terminated | truncated
        if bool(ended.any()):
            ends += 1
            stayed = {group: value.clone() for group, value in obs.items()}
            obs, _ = hand.reset(env_ids=ended.nonzero().flatten())
            obs = {group: torch.where(ended[:, None], obs[group], value) for group, value in stayed.items()}
    assert ends >= 3, ends
    diverged(env)
    with tensor_checks.host_reads() as seen:
        for _ in range(21):
            env.step(NOTHING)
    assert set(seen) == {"aten.nonzero.default"}, seen  # mjlab needs the indices of the envs to reset
    assert len(seen) == 21, seen
    tensor_checks.check_own_time(env)


def diverged(env: MjLabEnv) -> None:
    """Check that a non-finite number ends an episode, and a new one begins in the same step."""
    env.reset()
    env._envs.sim.data.qpos[1] = torch.nan
    step = env.step(NOTHING)
    bad = torch.tensor([False, True, False, False])
    assert torch.equal(step.diverged, bad)
    assert torch.equal(step.done, bad)
    assert not bool((step.terminated | step.truncated).any())
    assert bool(step.obs["policy"].isfinite().all())
    assert float(step.final_obs["policy"][1].abs().max()) == 0.0
    assert env._envs.episode_length_buf.tolist() == [1, 0, 1, 1]
    step = env.step(NOTHING.masked_fill(bad[:, None], torch.nan))
    assert torch.equal(step.bad_action, bad)
    assert not bool(env.step(NOTHING).diverged.any())


def value() -> None:
    cfg = {"episode_length_s": 0.4}
    tensor_checks.check_value_of_time_out("MjLab", 8, _target_="mjlab_checks.constant_reward", cfg=cfg)


def progress() -> None:
    """Counters and terrain levels of another run are restored; the first reset keeps them."""
    cfg = tensor_checks.settings_of("MjLab", id="Mjlab-Velocity-Rough-Unitree-Go1")
    env = MjLabEnv.from_settings(cfg, num_envs=4, seed=1, device=CPU)
    env.reset()
    env.step(NOTHING)
    state = env.state_dict()
    assert state["common_step_counter"] == 1
    assert state["terrain_levels"].shape == (4,)
    levels = torch.tensor([1, 2, 0, 3])
    env.begin_from({"common_step_counter": 5000, "terrain_levels": levels})
    assert torch.equal(env.state_dict()["terrain_levels"], levels)
    assert env._envs.common_step_counter == 5000
    terrain = env._envs.scene.terrain
    assert torch.equal(terrain.env_origins, terrain.terrain_origins[levels, terrain.terrain_types])
    assert "update_env_origins" not in vars(terrain)


def live() -> None:
    """Train on envs made by a script."""
    cfg = load_env_cfg(GO1)
    cfg.scene.num_envs = 4
    envs = ManagerBasedRlEnv(cfg, device="cpu")
    log = {"console": "quiet"}
    row = gpusim_rl.train(envs, max_iterations=2, ppo={"horizon": 8, "minibatch_size": 16}, log=log)
    assert row["env_steps"] == 2 * 8 * 4


def words() -> None:

    def line(**env: object) -> str:
        cfg = tensor_checks.settings_of("MjLab", **env)
        return tensor_checks.message_of(lambda: MjLabEnv.from_settings(cfg, num_envs=4, seed=1, device=CPU))

    assert line(id=GO1.replace("Unitree", "Unitre")).endswith(f"{GO1!r}?")
    assert line(id=GO1, physics="physx").startswith("env.physics: has no effect")
    assert line(id=GO1, cfg={"episode_length": 1}).endswith("'episode_length_s'?")
    assert line(id=GO1, vectorization="async").startswith("env.vectorization: has no effect")
    assert line().startswith("task=MjLab needs env.id or env._target_")
    assert "nothing_there" in line(_target_="mjlab_checks.nothing_there")
    assert line(_target_="os.getcwd").startswith("env._target_=os.getcwd: expected a ManagerBasedRlEnvCfg")
    assert line(_target_="math.sqrt").startswith("env._target_=math.sqrt: ")
    assert line(id=GO1, kwargs={"device": "cpu"}).startswith("env.kwargs.device: not an argument")
    assert line(id=GO1, cfg={"auto_reset": True}).startswith("env.cfg.auto_reset: has no effect")
    assert line(id=GO1, cfg={"decimation": None}).startswith("env.cfg.decimation: expected int")


if __name__ == "__main__":
    tensor_checks.run({"steps": steps, "value": value, "progress": progress, "live": live, "words": words})
