"""Hopper, Walker2d and HalfCheetah against Gymnasium: physics, observations, rewards, terminations and starts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from gpusim_rl.env import VecEnv
from helpers.task_envs import class_env

pytest.importorskip("imageio", reason="gymnasium[mujoco]")
gymnasium = pytest.importorskip("gymnasium")

TASKS = ("Hopper", "Walker2d", "HalfCheetah")
NUM_ENVS = 240
TERMS = {"forward": "reward_forward", "alive": "reward_survive", "control_cost": "reward_ctrl"}

every_task = pytest.mark.parametrize("name", TASKS)

# Model fields that do not depend on where a body has its frame.
SAME = (
    *("body_parentid", "body_mass", "body_subtreemass", "body_gravcomp", "body_invweight0"),
    *("jnt_type", "jnt_bodyid", "jnt_limited", "jnt_range", "jnt_stiffness", "jnt_solref", "jnt_solimp", "jnt_margin"),
    *("jnt_actfrclimited", "jnt_actgravcomp", "qpos0", "qpos_spring"),
    *("dof_armature", "dof_damping", "dof_frictionloss", "dof_invweight0", "dof_M0"),
    *("actuator_trntype", "actuator_trnid", "actuator_gear", "actuator_ctrllimited", "actuator_ctrlrange"),
    *("actuator_dyntype", "actuator_gaintype", "actuator_gainprm", "actuator_biastype", "actuator_forcelimited"),
    *("geom_type", "geom_bodyid", "geom_contype", "geom_conaffinity", "geom_condim", "geom_priority", "geom_friction"),
    *("geom_solref", "geom_solimp", "geom_solmix", "geom_margin", "geom_gap", "geom_fluid"),
)
SIZES = ("nq", "nv", "nu", "na", "nbody", "njnt", "ngeom", "neq", "ntendon", "nexclude", "npair")


def make_env(name: str, **settings: Any) -> VecEnv:
    return class_env(name, NUM_ENVS, seed=3, **settings)


def make_gym(name: str) -> Any:
    return gymnasium.make(f"{name}-v5").unwrapped


# The model


@every_task
def test_model_equals_gymnasium(name):
    ours, theirs = make_env(name).sim.scene.model, make_gym(name).model
    for field in SIZES:
        assert getattr(ours, field) == getattr(theirs, field), field
    for field in SAME:
        np.testing.assert_allclose(getattr(ours, field), getattr(theirs, field), rtol=1e-9, atol=1e-12, err_msg=field)
    np.testing.assert_allclose(ours.geom_size[1:], theirs.geom_size[1:], rtol=1e-9)  # ground: rendering only
    for field in (field for field in dir(theirs.opt) if not field.startswith("_")):
        np.testing.assert_array_equal(getattr(ours.opt, field), getattr(theirs.opt, field), err_msg=field)


# The step


@every_task
def test_step_equals_gymnasium(name):
    """Compare observation, reward, reward terms and termination from one state with one action."""
    env, gym = make_env(name, randomize_episode_start=False), make_gym(name)
    gym.model.jnt_range[:] = gym.model.jnt_range.astype(np.float32)  # as sim/mujoco.py does: 3e-8 rad
    env.reset()
    qpos, qvel, actions = states_and_actions(gym)
    env.task.robot.set_state(torch.ones(NUM_ENVS, dtype=torch.bool), joint_pos=qpos, joint_vel=qvel)
    step = env.step(actions)
    assert not step.diverged.any()
    seen = Counter[str]()  # events covered by the compared steps
    for env_id in range(NUM_ENVS):
        gym.reset()
        gym.set_state(qpos[env_id].double().numpy(), qvel[env_id].double().numpy())
        obs, reward, terminated, _, info = gym.step(actions[env_id].numpy())
        where = f"env {env_id}"
        np.testing.assert_allclose(step.final_obs["policy"][env_id], obs, rtol=1e-5, atol=1e-5, err_msg=where)
        assert float(step.reward[env_id]) == pytest.approx(reward, rel=1e-5, abs=1e-5), where
        assert bool(step.terminated[env_id]) == terminated, where
        for term, value in step.terms.items():
            assert float(value[env_id]) == pytest.approx(info[TERMS[term]], rel=1e-5, abs=1e-5), f"{where}: {term}"
        assert set(step.terms) == {term for term, key in TERMS.items() if key in info}
        seen["fell" if terminated else "healthy"] += 1
        seen["touched"] += gym.data.ncon > 0
        seen["folded"] += (gym.data.efc_type == mujoco.mjtConstraint.mjCNSTR_LIMIT_JOINT).any()
        seen["fast"] += (np.abs(gym.data.qvel) > 10.0).any()
    assert min(seen[what] for what in ("healthy", "touched", "folded", "fast")) > 20, seen
    assert (seen["fell"] > 20) == (name != "HalfCheetah"), seen


def states_and_actions(gym: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Draw states, a quarter each: of endless episodes, with random velocities, poses, or one value at a limit.

    Every x is near 0 because speed is a difference of float32 positions.
    """
    random = np.random.default_rng(5)
    nq, nv, nu = gym.model.nq, gym.model.nv, gym.model.nu
    qpos, qvel = np.zeros((NUM_ENVS, nq)), np.zeros((NUM_ENVS, nv))
    for env_id in range(NUM_ENVS):
        gym.reset(seed=env_id)
        if env_id % 4 < 2:
            for _ in range(random.integers(0, 80)):
                gym.step(random.uniform(-1.0, 1.0, nu))
        qpos[env_id], qvel[env_id] = gym.data.qpos, gym.data.qvel
        if env_id % 4 == 1:
            qvel[env_id] += random.normal(0.0, 5.0, nv)
        elif env_id % 4 == 2:
            qpos[env_id] += random.uniform(-0.3, 0.3, nq)
            qvel[env_id] = random.uniform(-3.0, 3.0, nv)
        elif env_id % 8 == 3:
            qpos[env_id, 1] += random.uniform(0.4, 1.1)
        else:
            qpos[env_id, 1] += 0.1  # no friction
            qvel[env_id, 0] = random.choice([-1.0, 1.0]) * random.uniform(80.0, 120.0)
        qpos[env_id, 0] = random.uniform(-0.1, 0.1)
    actions = random.uniform(-1.0, 1.0, (NUM_ENVS, nu))
    actions[::5] = np.sign(actions[::5])
    return tuple(torch.from_numpy(part).float() for part in (qpos, qvel, actions))  # type: ignore[return-value]


# The episode


@every_task
def test_action_bounds_time_limit_and_dt_equal_gymnasium(name):
    env, gym = make_env(name), make_gym(name)
    assert env.max_episode_length == gymnasium.spec(f"{name}-v5").max_episode_steps
    assert env.task.dt == pytest.approx(gym.dt, rel=1e-12)
    limit = np.full(env.num_actions, env.cfg.clip_actions)
    np.testing.assert_array_equal(gym.action_space.low, -limit)
    np.testing.assert_array_equal(gym.action_space.high, limit)


@every_task
def test_start_distribution_matches_gymnasium(name):
    env, gym = make_env(name), make_gym(name)
    env.reset()
    robot = env.task.robot
    ours = torch.cat([robot.joint_pos, robot.joint_vel], dim=1).double().numpy()
    theirs = []
    for seed in range(NUM_ENVS):
        gym.reset(seed=seed)
        theirs.append(gym.state_vector())
    theirs = np.stack(theirs)
    scale = theirs.std(axis=0)
    assert np.abs(ours.mean(axis=0) - theirs.mean(axis=0)).max() < 0.5 * scale.min()
    np.testing.assert_allclose(ours.std(axis=0), scale, rtol=0.25)
    # A uniform distribution is bounded by 1.7 standard deviations, a normal one is not.
    furthest = [(np.abs(starts - theirs.mean(axis=0)) / scale).max(axis=0) for starts in (ours, theirs)]
    np.testing.assert_array_equal(furthest[0] < 2.0, furthest[1] < 2.0)
