"""AnymalTerrain: noise, curriculum, pushes, and rewards at known states."""

from __future__ import annotations

import math

import pytest
import torch

from gpusim_rl.env import VecEnv
from gpusim_rl.env.math import quat_from_axis_angle, quat_rotate, quat_yaw
from gpusim_rl.errors import ConfigError
from helpers.raised import raises
from helpers.scenes import everywhere
from helpers.sensing import update_sensors
from helpers.task_envs import task_env

NUM = 20  # one env per column
X, Z = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])


def make_env(num_envs: int = NUM, level: int = 0, **settings) -> VecEnv:
    env = task_env("AnymalTerrain", num_envs, **settings)
    if level:
        env.task.levels.value.fill_(level)
        env.reset()
    return env


def turned(yaw: torch.Tensor) -> torch.Tensor:
    return quat_from_axis_angle(Z.expand(len(yaw), 3), yaw)


# Observations


def test_noise_has_configured_strength():
    env = make_env(64)
    sections = [(3, 0.1 * 2.0), (3, 0.2 * 0.25), (3, 0.05), (3, 0.0), (12, 0.01), (12, 1.5 * 0.05), (140, 0.06 * 5.0)]
    limit = torch.tensor([bound for size, bound in [*sections, (12, 0.0)] for _ in range(size)])
    noise = env.look()["policy"] - env.clean_obs()["policy"]
    assert (noise[:, limit == 0.0] == 0.0).all()
    share = noise[:, limit > 0] / limit[limit > 0]
    assert share.abs().max() <= 1.0 + 1e-4 and (share.abs().amax(dim=0) > 0.8).all()


# Rewards


def test_every_reward_term_at_known_state():
    env = make_env()
    task, robot, dt = env.task, env.task.robot, 0.02
    task.apply_action(torch.zeros(NUM, 12))
    heading = turned(torch.linspace(-3.0, 3.0, NUM))
    robot.set_state(everywhere(env), root_quat=heading)
    task.commands.value[:, :2] = torch.tensor([0.6, -0.4])
    command = torch.cat([task._velocity()[0], task._turn(quat_yaw(robot.root_quat))[:, None]], dim=1)
    error = torch.tensor([0.3, 0.4])
    velocity = torch.cat([command[:, :2] + error, torch.full((NUM, 1), 0.7)], dim=1)
    ang_vel = torch.cat([torch.tensor([0.5, -0.2]).expand(NUM, 2), command[:, 2:] - 0.4], dim=1)
    robot.set_state(
        everywhere(env),
        root_pos=task.origin + 3.0 * Z,
        root_lin_vel=quat_rotate(heading, velocity),
        root_ang_vel=quat_rotate(heading, ang_vel),
        joint_pos=(task.stance + 0.1).expand(NUM, 12),
        joint_vel=torch.full((NUM, 12), 0.5),
    )
    update_sensors(env.sim)
    task.last_joint_vel.fill_(-1.0)
    task.actions.fill_(0.3)
    task.last_actions.fill_(-0.1)
    terms = task.rewards()
    expected = {
        "lin_vel_xy": dt * math.exp(-(0.5**2) / 0.25),
        "ang_vel_z": dt * 0.5 * math.exp(-(0.4**2) / 0.25),
        "air_time": 0.0,
        "lin_vel_z": -dt * 4.0 * 0.7**2,
        "ang_vel_xy": -dt * 0.05 * (0.5**2 + 0.2**2),
        "torque": -dt * 2e-5 * 12 * (80.0 * 0.1 + 2.0 * 0.5) ** 2,
        "joint_acc": -dt * 5e-4 * 12 * 1.5**2,
        "knee_collision": 0.0,
        "action_rate": -dt * 0.01 * 12 * 0.4**2,
    }
    expected["floor"] = -sum(expected.values())
    assert expected["floor"] > 0
    assert list(terms) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(terms[name], torch.full((NUM,), value), rtol=2e-3, atol=1e-6, msg=name)


def stand(env: VecEnv, height: float = 0.53) -> None:
    """Put every robot on its patch's platform, at rest in the stance, and simulate until it settles."""
    task = env.task
    still = torch.zeros(env.num_envs, 3)
    task.robot.set_state(
        everywhere(env),
        root_pos=task.origin + height * Z,
        root_quat=turned(torch.zeros(env.num_envs)),
        root_lin_vel=still,
        root_ang_vel=still,
        joint_pos=task.stance.expand(env.num_envs, 12),
        joint_vel=torch.zeros(env.num_envs, 12),
    )
    env.sim.refresh()
    for _ in range(25):
        env.step(torch.zeros(env.num_envs, 12))


def test_robot_stands_on_platforms_of_all_terrains():
    env = make_env()
    env.task.levels.value.copy_(torch.arange(NUM) % 10)
    env.reset()
    assert env.task.origin[:, :2].unique(dim=0).shape[0] == NUM
    stand(env)
    for _ in range(50):
        step = env.step(torch.zeros(NUM, 12))
        assert not step.done.any() and (step.terms["knee_collision"] == 0.0).all()
    height = env.task.robot.root_pos[:, 2] - env.task.origin[:, 2]
    assert ((height > 0.48) & (height < 0.55)).all()
    assert env.task.on_ground.all() and (env.task.air_time == 0.0).all()


def test_landing_rewards_air_time_beyond_half_a_second():
    env = make_env()
    task = env.task
    stand(env)
    task.commands.value[:, :2] = 0.5
    task.commands.value[: NUM // 2, :2] = 0.1  # below the threshold: standing
    task.air_time.copy_(torch.tensor([0.0, 0.98, 0.48, 0.0]))  # before this step of 0.02 s; 0: on the ground
    reward = task.rewards()["air_time"]
    torch.testing.assert_close(reward[NUM // 2 :], torch.full((NUM // 2,), 0.02 * (0.5 + 0.0)))
    assert (reward[: NUM // 2] == 0.0).all()
    task.robot.set_state(everywhere(env), root_pos=task.origin + 3.0 * Z)
    update_sensors(env.sim)
    assert (task.rewards()["air_time"] == 0.0).all()
    before = task.air_time.clone()
    task.advance(torch.zeros(NUM, dtype=torch.bool))
    torch.testing.assert_close(task.air_time, before + 0.02)


@pytest.mark.parametrize(
    ("height", "kfe", "knees", "ends"),
    [
        (0.335, 2.5, 4, False),  # on the knees, shanks folded
        (0.095, 2.5, 4, True),  # on the belly
    ],
)
def test_knee_contact_costs_and_belly_contact_ends_episode(height, kfe, knees, ends):
    env = make_env()
    task = env.task
    signs = (1.0, -1.0, 1.0, -1.0)  # front, hind
    joint_pos = torch.tensor([angle for sign in signs for angle in (0.0, 0.0, -kfe * sign)])
    task.robot.set_state(everywhere(env), root_pos=task.origin + height * Z, joint_pos=joint_pos.expand(NUM, 12))
    update_sensors(env.sim)
    assert (task.terminated() == ends).all()
    assert task.rewards()["knee_collision"].tolist() == pytest.approx([-0.02 * 0.25 * knees] * NUM)


# Episodes


def test_envs_start_on_platform_of_their_column_and_level():
    env = make_env(64)
    task = env.task
    task.levels.value.copy_(torch.arange(64) % 7)
    env.reset()
    kinds = [task.terrain.kinds[column] for column in task.column.tolist()]
    assert kinds[:20] == task.terrain.kinds and kinds[20:40] == task.terrain.kinds
    expected = torch.stack([task.terrain.origins[w % 7, w % 20] for w in range(64)])
    offset = task.robot.root_pos - expected
    assert (offset[:, :2].abs() <= 0.5).all() and offset[:, :2].std() > 0.2
    assert offset[:, 2].tolist() == pytest.approx([0.62] * 64, abs=1e-5)


def test_curriculum_promotes_by_distance_and_demotes_by_command():
    env = make_env(8, level=3)
    task = env.task
    task.commands.value[:, :2] = torch.tensor([0.6, 0.0])  # a quarter of 12 m in 20 s is 3 m
    task.commands.value[6, :2] = 0.0
    task.commands.value[7, :2] = torch.tensor([1.0, 0.0])  # a quarter is 5 m; half a patch is less
    came = torch.tensor([4.1, 3.9, 3.1, 2.9, 0.1, 4.1, 0.1, 4.5])
    direction = torch.nn.functional.normalize(torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), dim=1)
    pos = task.origin + torch.cat([came[:, None] * direction, torch.full((8, 1), 5.0)], dim=1)
    task.robot.set_state(everywhere(env), root_pos=pos)
    done = torch.arange(8) != 5
    task.advance(done)
    assert task.levels.value.tolist() == [4, 3, 3, 2, 2, 3, 3, 3]
    stats = task.stats()
    assert stats["terrain_level"].tolist() == [4.0, 3.0, 3.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert stats["success"].isnan().tolist() == (~done).tolist()
    assert stats["success"][done].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    before = task.origin.clone()
    env.begin_episodes(done)
    patches = torch.stack([task.terrain.origins[level, w] for w, level in enumerate(task.levels.value.tolist())])
    assert torch.equal(task.origin, torch.where(done[:, None], patches, before))


def test_episodes_start_on_levels_of_checkpoint():
    trained, shown = make_env(4), make_env(6)
    trained.task.levels.value.copy_(torch.tensor([3, 9, 0, 5]))
    shown.begin_from(trained.state_dict())
    levels = [3, 9, 0, 5, 3, 9]
    assert shown.task.levels.value.tolist() == levels
    patches = torch.stack([shown.task.terrain.origins[level, w] for w, level in enumerate(levels)])
    assert torch.equal(shown.task.origin, patches)
    lower = make_env(4, terrain={"levels": 4})
    lower.begin_from(trained.state_dict())
    assert torch.equal(lower.task.origin[1], lower.task.terrain.origins[3, 1]), "clamped to the highest level"


def test_fixed_level_overrides_levels_of_checkpoint():
    trained, shown = make_env(4), make_env(6, fixed_level=7)
    trained.task.levels.value.copy_(torch.tensor([3, 9, 0, 5]))
    shown.begin_from(trained.state_dict())
    task = shown.task
    task.robot.set_state(everywhere(shown), root_pos=task.origin + 5.0 * X)
    task.advance(everywhere(shown))
    assert task.stats()["success"].tolist() == [1.0] * 6 and task.stats()["terrain_level"].tolist() == [7.0] * 6
    assert torch.equal(task.origin, task.terrain.origins[7, task.column])
    with raises(ConfigError, key="task.fixed_level", got=10):
        make_env(1, fixed_level=10)


def test_push_sets_only_horizontal_velocity_every_interval():
    env = make_env(200, push_interval=0.1)  # every fifth step
    task = env.task
    state = {"root_pos": task.origin + 3.0 * Z, "root_lin_vel": torch.tensor([[3.0, 3.0, 0.3]]).expand(200, 3)}
    task.push.wait.copy_(task.push_interval)
    env.progress.copy_(torch.arange(200))  # push times do not depend on episode progress
    for step in range(1, 12):
        task.robot.set_state(everywhere(env), **state)
        task.advance(torch.zeros(200, dtype=torch.bool))
        velocity = task.robot.root_lin_vel
        assert (velocity[:, 2] == 0.3).all()
        if step % 5 == 0:
            assert velocity[:, :2].abs().max() <= 1.0 and velocity[:, :2].std().item() == pytest.approx(0.577, rel=0.15)
        else:
            assert (velocity[:, :2] == 3.0).all()


@pytest.mark.slow
def test_feet_rarely_penetrate_ground():
    # Typical share: 0.1 %; 2 % with feet of 3 cm, 15 % with MuJoCo's default contacts in addition.
    env = make_env(100, level=8)
    task, random = env.task, torch.Generator().manual_seed(0)
    shanks = task.robot.bodies(["LF_SHANK", "LH_SHANK", "RF_SHANK", "RH_SHANK"])
    mirror = torch.tensor([[1.0, 1, 1], [-1, 1, 1], [1, -1, 1], [-1, -1, 1]])
    feet = (mirror * torch.tensor([0.08795, 0.01305, -0.31547])).expand(100, 4, 3)
    caught = torch.zeros(100, 4)
    for step in range(150):
        if step % 10 == 0:
            actions = 2.0 * torch.rand(100, 12, generator=random) - 1.0
        env.step(actions)
        x, y, z = (shanks.pos + quat_rotate(shanks.quat, feet)).unbind(dim=2)
        caught += z < task.terrain.height(x, y)
    assert caught.mean() / 150 < 0.01
