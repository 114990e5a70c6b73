"""The task that stands beside EnvPool in the benchmark is Gymnasium's Ant-v5: same model, same numbers."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch

from gpusim_rl.env import VecEnv
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim import choose_sim
from throughput.gymnasium_ant import ANT_V5, GymnasiumAnt

pytest.importorskip("imageio", reason="gymnasium[mujoco]")
ant_v5 = pytest.importorskip("gymnasium.envs.mujoco.ant_v5")

SIM = SimConfig(
    name="mujoco",
    num_threads=1,
    njmax=None,
    nconmax=None,
    integrator=None,
    cone=None,
    iterations=None,
    ls_iterations=None,
    graph=True,
    persistent="auto",
)
STATE = 27  # numbers of the observation that are positions and velocities


class AtTheEndOfAStep(ant_v5.AntEnv):
    """Ant-v5 that reads positions after the step, contact forces at the beginning of the last physics step."""

    def _step_mujoco_simulation(self, ctrl, n_frames):
        self.data.ctrl[:] = ctrl
        mujoco.mj_step(self.model, self.data, nstep=n_frames - 1)
        warmstart = self.data.qacc_warmstart.copy()
        mujoco.mj_forward(self.model, self.data)
        mujoco.mj_rnePostConstraint(self.model, self.data)
        forces = self.data.cfrc_ext.copy()
        self.data.qacc_warmstart[:] = warmstart
        mujoco.mj_step(self.model, self.data)
        mujoco.mj_kinematics(self.model, self.data)
        self.data.cfrc_ext[:] = forces


def make_env(num_envs: int) -> VecEnv:
    choice = choose_sim("mujoco", torch.device("cpu"))
    env = VecEnv.make(GymnasiumAnt, ANT_V5, num_envs=num_envs, choice=choice, sim=SIM, seed=0)
    env.reset()
    return env


def test_the_model_is_gymnasiums():
    env = make_env(1)
    ours, theirs = env.sim.scene.model, ant_v5.AntEnv().model
    for part in ("", "opt"):
        a, b = (getattr(model, part) if part else model for model in (ours, theirs))
        for field in dir(b):
            value = getattr(b, field)
            if isinstance(value, np.ndarray) and not field.startswith(("_", "name", "tex_", "mat_", "sensor_")):
                np.testing.assert_array_equal(getattr(a, field), value, err_msg=field)
            elif part == "opt" and isinstance(value, (int, float)):
                assert getattr(a, field) == value, field


@pytest.mark.parametrize("reference", [AtTheEndOfAStep, ant_v5.AntEnv])
def test_every_step_is_gymnasiums(reference):
    num_envs, steps = 8, 20
    env = make_env(num_envs)
    generator = torch.Generator().manual_seed(1)
    actions = 2.4 * torch.rand(steps, num_envs, 8, generator=generator) - 1.2  # some are clipped
    theirs = []
    for i in range(num_envs):
        gym = reference()
        gym.reset()
        gym.set_state(env.sim.qpos[i].double().numpy(), env.sim.qvel[i].double().numpy())
        theirs.append(gym)
    alive = torch.ones(num_envs, dtype=torch.bool)
    touched = 0
    for action in actions:
        step = env.step(action)
        for i in alive.nonzero().flatten().tolist():
            obs, reward, terminated, _, parts = theirs[i].step(action[i].clamp(-1, 1).numpy())
            final = step.final_obs["policy"][i].numpy()
            np.testing.assert_allclose(final[:STATE], obs[:STATE], rtol=1e-5, atol=1e-5)
            terms = {name: float(term[i]) for name, term in step.terms.items()}
            assert terms["survive"] == parts["reward_survive"]
            assert terms["control"] == pytest.approx(parts["reward_ctrl"], abs=1e-5)
            assert bool(step.terminated[i]) == terminated
            if reference is AtTheEndOfAStep:
                np.testing.assert_allclose(final, obs, rtol=1e-5, atol=1e-5)
                assert float(step.reward[i]) == pytest.approx(reward, abs=1e-5)
                touched += int((obs[STATE:] != 0).any())
        alive &= ~step.done
    assert reference is ant_v5.AntEnv or touched > 20


def test_random_actions_end_episodes_as_often():
    num_envs, steps = 64, 100
    env = make_env(num_envs)
    gym = ant_v5.AntEnv()
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    ours = theirs = 0
    for _ in range(steps):
        ours += int(env.step(2 * torch.rand(num_envs, 8, generator=generator) - 1).terminated.sum())
    for seed in range(num_envs):
        gym.reset(seed=seed)
        for _ in range(steps):
            if gym.step(random.uniform(-1, 1, 8))[2]:
                theirs += 1
                gym.reset()
    assert theirs > 25
    assert ours == pytest.approx(theirs, rel=0.6)  # about 50 each
