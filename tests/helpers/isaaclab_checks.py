"""Checks of `task=IsaacLab` on Isaac Lab itself: python isaaclab_checks.py <name>..., one scene per process."""

from __future__ import annotations

import sys

import gymnasium
import offline_cartpole
import torch
from isaaclab_tasks.core.cartpole.cartpole_direct_env import CartpoleEnv
from isaaclab_tasks.core.cartpole.cartpole_manager_env_cfg import CartpoleEnvCfg as ManagedCfg
from isaaclab_tasks.utils.parse_cfg import parse_env_cfg

import gpusim_rl
from gpusim_rl.connect.isaaclab import IsaacLabEnv
from helpers import tensor_checks

CPU = torch.device("cpu")
CARTPOLE = {"id": "offline_cartpole:Offline-Cartpole", "physics": "newton_mjwarp"}
NO_FORCE = torch.zeros(4, 1)


class ConstantReward(CartpoleEnv):
    """Cartpole with reward 1, constant observation, and no end but the time limit: values are exact."""

    def _get_observations(self) -> dict[str, torch.Tensor]:
        return {"policy": torch.ones(self.num_envs, 4, device=self.device)}

    def _get_rewards(self) -> torch.Tensor:
        return torch.ones(self.num_envs, device=self.device)

    def _get_dones(self) -> tuple[torch.Tensor, torch.Tensor]:
        _, late = super()._get_dones()
        return torch.zeros_like(late), late


gymnasium.register(
    id="Constant-Reward",
    entry_point=ConstantReward,
    disable_env_checker=True,
    kwargs={"env_cfg_entry_point": offline_cartpole.OfflineCartpoleCfg},
)


def managed_cartpole() -> ManagedCfg:
    """Manager-based Cartpole with the direct one's robot."""
    cfg, names = ManagedCfg(), {"slider_to_cart": "railCartJoint", "cart_to_pole": "cartPoleJoint"}
    direct = offline_cartpole.OfflineCartpoleCfg().scene.cartpole
    cfg.scene.ground, cfg.scene.clone_in_fabric = None, False
    cfg.scene.robot.spawn.usd_path = direct.spawn.usd_path
    cfg.scene.robot.init_state.joint_pos, cfg.scene.robot.actuators = direct.init_state.joint_pos, direct.actuators
    cfg.actions.joint_effort.joint_names = ["railCartJoint"]
    for terms in (cfg.events, cfg.rewards, cfg.terminations):
        for term in vars(terms).values():
            joints = term.params.get("asset_cfg")
            if joints is not None:
                joints.joint_names = [names[name] for name in joints.joint_names]
    return cfg


def made(**changes: object) -> IsaacLabEnv:
    cfg = tensor_checks.settings_of("IsaacLab", **CARTPOLE, cfg={"episode_length_s": 0.5, **changes})
    return IsaacLabEnv.from_settings(cfg, num_envs=4, seed=1, device=CPU)


def steps() -> None:
    """Compare with manual stepping, including the observation of a finished episode."""
    env = made()
    first, inner = env.reset(), env._envs
    assert env.max_episode_length == 30
    assert env.obs_sizes == {"policy": 4}
    assert inner.cfg.seed == 1
    before = {group: value.clone() for group, value in first.items()}
    for number in range(1, 31):
        step = env.step(NO_FORCE)
        assert bool(step.truncated.all()) == (number == 30)
        if number < 30:
            assert torch.equal(step.final_obs["policy"], step.obs["policy"])
            assert torch.equal(step.obs["policy"], inner.obs_buf["policy"])
            assert step.obs["policy"].data_ptr() != inner.obs_buf["policy"].data_ptr()
            assert bool(step.stats["Metrics/success_rate"].isnan().all())
        assert torch.equal(step.reward, inner.reward_buf)
        before = step.obs if number < 30 else before
    assert torch.equal(step.final_obs["policy"], inner.extras["final_obs"]["policy"])
    assert not torch.equal(step.final_obs["policy"], step.obs["policy"])
    # The pole has moved by one step, so this is not the state after the reset.
    assert float((step.final_obs["policy"] - before["policy"]).abs().max()) < 1.0
    assert not bool(step.terminated.any())
    assert not bool(step.stats["Metrics/success_rate"].isnan().any())

    diverged(env)
    assert "one scene" in tensor_checks.message_of(made)
    with tensor_checks.host_reads() as seen:
        for _ in range(31):
            env.step(NO_FORCE)
    assert seen == [], seen
    tensor_checks.check_own_time(env)
    assert env.state_dict() == {"common_step_counter": int(inner.common_step_counter)}
    env.begin_from({"common_step_counter": 77})
    assert inner.common_step_counter == 77
    env.close()


def diverged(env: IsaacLabEnv) -> None:
    """Check that a non-finite number ends an episode; the next step is the library's reset, not a sample."""
    inner, rewards = env._envs, env._envs._get_rewards
    env.reset()
    bad = torch.tensor([False, False, True, False])
    inner._get_rewards = lambda: rewards().masked_fill(bad, torch.nan)
    step = env.step(NO_FORCE)
    inner._get_rewards = rewards
    assert torch.equal(step.diverged, bad)
    assert torch.equal(step.done, bad)
    assert step.skipped is not None and not bool(step.skipped.any())
    assert not bool((step.terminated | step.truncated).any())
    assert step.reward[2] == 0.0
    step = env.step(NO_FORCE)
    assert step.skipped is not None and torch.equal(step.skipped, bad)
    assert torch.equal(step.diverged, bad)
    assert inner.episode_length_buf.tolist() == [2, 2, 0, 2]
    step = env.step(NO_FORCE)
    assert not bool(step.diverged.any())
    # NaN in the state of a Newton world: the reset repairs it.
    inner.joint_pos[1] = torch.nan
    found = [env.step(NO_FORCE) for _ in range(3)]
    assert [step.diverged.tolist() for step in found] == [[False, True, False, False]] * 2 + [[False] * 4]
    assert all(bool(step.obs["policy"].isfinite().all()) for step in found)
    step = env.step(NO_FORCE.masked_fill(bad[:, None], torch.inf))
    assert torch.equal(step.bad_action, bad)
    assert torch.equal(step.diverged, bad)


def value() -> None:
    cfg = {"episode_length_s": 8 / 60}
    tensor_checks.check_value_of_time_out(
        "IsaacLab", 8, **CARTPOLE | {"id": "isaaclab_checks:Constant-Reward"}, cfg=cfg
    )


def managed() -> None:
    """Manager-based env from a function: terms sum to the reward, the last observation is the true one."""
    cfg = tensor_checks.settings_of(
        "IsaacLab",
        _target_="isaaclab_checks.managed_cartpole",
        physics="newton_mjwarp",
        cfg={"episode_length_s": 0.5, "rewards": {"alive": {"weight": 2.0}}},
    )
    env = IsaacLabEnv.from_settings(cfg, num_envs=4, seed=1, device=CPU)
    env.reset()
    assert env.max_episode_length == 30
    for _ in range(30):
        step = env.step(NO_FORCE)
        assert torch.allclose(sum(step.terms.values()), step.reward, atol=1e-6)
        assert torch.equal(step.reward, env._envs.reward_buf)
    assert bool(step.truncated.all())
    assert torch.equal(step.final_obs["policy"], env._envs.extras["final_obs"]["policy"])
    assert not torch.equal(step.final_obs["policy"], step.obs["policy"])
    assert torch.allclose(step.terms["alive"], torch.full((4,), 2.0 * env._envs.step_dt))
    assert {"Episode_Termination/time_out"} <= {
        name for name, value in step.stats.items() if not bool(value.isnan().any())
    }
    with tensor_checks.host_reads() as seen:
        env.step(NO_FORCE)
    assert seen == [], seen


def pictures() -> None:
    """Check that each env is rendered alone, without a display, and that rendering changes no state."""
    cfg = tensor_checks.settings_of("IsaacLab", **CARTPOLE, kwargs={"render_mode": "rgb_array"})
    env = IsaacLabEnv.from_settings(cfg, num_envs=2, seed=1, device=CPU)
    before = env.reset()["policy"].clone()
    first = env.render()
    assert torch.equal(before, env._envs._get_observations()["policy"])
    assert [(picture.shape, picture.dtype.name) for picture in first] == [((720, 1280, 3), "uint8")] * 2
    for _ in range(20):
        env.step(torch.ones(2, 1))
    later = env.render()
    sky = first[0][0, 0].astype(int)
    for picture in (*first, *later):
        drawn = (abs(picture.astype(int) - sky) > 20).any(axis=2)
        rows, columns = drawn.any(axis=1).nonzero()[0], drawn.any(axis=0).nonzero()[0]
        assert 0 < rows[0] < rows[-1] < 719  # fully inside the image
        assert 0 < columns[0] < columns[-1] < 1279
        assert columns[-1] - columns[0] > 400  # and large
    assert (first[0] != first[1]).any()
    assert (first[0] != later[0]).any()
    env.close()


def live() -> None:
    """Train on envs made by a script, wrapped or not; they are closed afterwards."""
    few = {"max_iterations": 2, "log": {"console": "quiet"}}
    cfg = parse_env_cfg("Offline-Cartpole", device="cpu", num_envs=4, overrides=["physics=newton_mjwarp"])
    row = gpusim_rl.train(gymnasium.make("Offline-Cartpole", cfg=cfg), algo="sac", sac={"batch_size": 32}, **few)
    assert row["iteration"] == 2
    cfg = parse_env_cfg("Offline-Cartpole", device="cpu", num_envs=8, overrides=["physics=newton_mjwarp"])
    row = gpusim_rl.train(CartpoleEnv(cfg), ppo={"horizon": 8, "minibatch_size": 32}, **few)
    assert row["env_steps"] == 2 * 8 * 8


def words() -> None:

    def line(num_envs: int = 4, **env: object) -> str:
        cfg = tensor_checks.settings_of("IsaacLab", **env)
        return tensor_checks.message_of(lambda: IsaacLabEnv.from_settings(cfg, num_envs=num_envs, seed=1, device=CPU))

    assert "'Isaac-Cartpole-Direct'?" in line(id="Isaac-Cartpole-Direc")
    assert "'nowhere'" in line(id="nowhere:My-Env")
    assert line(**CARTPOLE | {"physics": "wrong"}).startswith("env.physics=wrong: Unknown preset")
    assert line(**CARTPOLE, cfg={"episode_length": 1}).endswith("'episode_length_s'?")
    assert line(**CARTPOLE, cfg={"decimation": "two"}).startswith("env.cfg.decimation: expected int")
    assert line(**CARTPOLE, cfg={"scene": {"num_envs": 8}}).startswith("env.cfg.scene.num_envs: has no effect")
    assert line(**CARTPOLE, cfg={"seed": 8}).startswith("env.cfg.seed: has no effect")
    assert "multi-agent" in line(id="Isaac-Shadow-Handover-Direct")
    target = "offline_cartpole.OfflineCartpoleCfg"
    assert "expected a ManagerBasedRLEnvCfg" in line(_target_=target)
    assert "unknown preset of offline_cartpole.OfflineCartpoleCfg" in line(_target_=target, physics="wrong")
    assert line(_target_="math.sqrt").startswith("env._target_=math.sqrt: ")
    assert "Kit must run" in line(**CARTPOLE | {"physics": "isaacsim_physx"})
    sys.modules["pyglet.window"] = None  # as without OpenGL: cannot be imported
    drawn = line(**CARTPOLE, kwargs={"render_mode": "rgb_array"})
    del sys.modules["pyglet.window"]
    assert "cannot render" in drawn
    assert drawn.endswith("try apt-get install libegl1 libgl1")
    assert "server" in line(id="Isaac-Cartpole-Direct")  # last: leaves a half-built scene


if __name__ == "__main__":
    checks = {"steps": steps, "value": value, "managed": managed, "live": live, "pictures": pictures, "words": words}
    tensor_checks.run(checks)
