"""All observation entries against MuJoCo quantities in tilted, rotating and touching states.

Expected values come from a `mujoco.MjData` in the same state: rotation matrices, velocities and contact forces. The
rows below follow the table in the task's docstring, including its scales. test_gymnasium.py compares Hopper, Walker2d
and HalfCheetah with Gymnasium.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

import gpusim_rl
from gpusim_rl.env import VecEnv
from gpusim_rl.env.clip import load
from gpusim_rl.files.paths import assets_dir
from helpers.sensing import update_sensors

NUM_ENVS = 8
FREE = mujoco.mjtJoint.mjJNT_FREE.value
DEPTH = 0.002  # m; penetration of touching bodies


class OneEnv:
    """One env in MuJoCo's data structures."""

    def __init__(self, env: VecEnv, index: int) -> None:
        self.task, self.index, self.model = env.task, index, env.sim.scene.model
        self.data = mujoco.MjData(self.model)
        self.data.qpos[:] = env.sim.qpos[index]
        self.data.qvel[:] = env.sim.qvel[index]
        self.data.ctrl[:] = env.sim.ctrl[index]
        self.data.xfrc_applied[:] = env.sim.xfrc_applied[index]
        mujoco.mj_forward(self.model, self.data)

    def own(self, value: torch.Tensor) -> np.ndarray:
        """Return this env's row of a tensor."""
        return value[self.index].double().numpy()

    @property
    def action(self) -> np.ndarray:
        return self.own(self.task.actions)

    def pos(self, body: str) -> np.ndarray:
        return self.data.body(body).xpos

    def quat(self, body: str) -> np.ndarray:
        return self.data.body(body).xquat

    def turn(self, body: str) -> np.ndarray:
        """Return the rotation matrix from body to world frame."""
        return self.data.body(body).xmat.reshape(3, 3)

    def velocity(self, body: str, local: bool = False) -> np.ndarray:
        return self._velocities(body, local)[3:]

    def spin(self, body: str, local: bool = False) -> np.ndarray:
        return self._velocities(body, local)[:3]

    def _velocities(self, body: str, local: bool) -> np.ndarray:
        velocities = np.zeros(6)
        kind = mujoco.mjtObj.mjOBJ_XBODY
        mujoco.mj_objectVelocity(self.model, self.data, kind, self.model.body(body).id, velocities, local)
        return velocities

    def joints(self, robot: str) -> list[int]:
        """Return the indices of a robot's hinges and slides."""
        model = self.model
        own = [j for j in range(model.njnt) if model.joint(j).name.startswith(f"{robot}/")]
        return [j for j in own if model.jnt_type[j] != FREE]

    def angles(self, robot: str) -> np.ndarray:
        return self.data.qpos[self.model.jnt_qposadr[self.joints(robot)]]

    def speeds(self, robot: str) -> np.ndarray:
        return self.data.qvel[self.model.jnt_dofadr[self.joints(robot)]]

    def efforts(self, robot: str) -> np.ndarray:
        return self.data.qfrc_actuator[self.model.jnt_dofadr[self.joints(robot)]]

    def mapped(self, robot: str) -> np.ndarray:
        """Return joint positions with limits mapped to [-1, 1]."""
        low, high = self.model.jnt_range[self.joints(robot)].T
        return mapped(self.angles(robot), low, high)

    def touch(self, body: str) -> np.ndarray:
        """Return force and torque of all contacts on a body, about its origin and in its frame."""
        body_id, turn = self.model.body(body).id, self.turn(body)
        total, wrench = np.zeros((2, 3)), np.zeros(6)
        for i, contact in enumerate(self.data.contact):
            bodies = self.model.geom_bodyid[contact.geom]
            mujoco.mj_contactForce(self.model, self.data, i, wrench)
            force, torque = wrench.reshape(2, 3) @ contact.frame.reshape(3, 3)  # acting on the second body
            sign = int(bodies[1] == body_id) - int(bodies[0] == body_id)
            total += sign * np.stack([force, torque + np.cross(contact.pos - self.pos(body), force)])
        return (total @ turn).ravel()


def mapped(value: np.ndarray, low: Any, high: Any) -> np.ndarray:
    return 2.0 * (value - low) / (np.asarray(high) - low) - 1.0


def wrapped(angle: float) -> float:
    return np.arctan2(np.sin(angle), np.cos(angle))


def euler(turn: np.ndarray) -> tuple[float, float]:
    """Return roll and yaw of R = Rz(yaw) Ry(pitch) Rx(roll)."""
    return np.arctan2(turn[2, 1], turn[2, 2]), np.arctan2(turn[1, 0], turn[0, 0])


Row = Callable[[OneEnv], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """Expected observation rows of a task, and the states for the comparison.

    `touch` lists pairs of bodies; each env brings at most one pair into contact by moving the second body, or the robot
    if the second is the ground. `spread` scales random rotation and displacement of free bodies [rad, m].
    """

    policy: Sequence[Row]
    critic: Sequence[Row] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    touch: Sequence[tuple[str, str]] = ()
    spread: float = 1.0
    arrange: Callable[[VecEnv], None] = lambda env: None


# Rows shared by tasks


def torso(body: str, spin_scale: float) -> list[Row]:
    """Return rows for the first 12 entries of Ant and Humanoid."""

    def directions(one: OneEnv) -> list[float]:
        roll, yaw = euler(one.turn(body))
        way = np.array([1000.0, 0.0]) - one.pos(body)[:2]
        up, heading = one.turn(body)[2, 2], one.turn(body)[:2, 0] @ way / np.linalg.norm(way)
        return [yaw, roll, wrapped(np.arctan2(way[1], way[0]) - yaw), up, heading]

    return [
        lambda w: w.pos(body)[2:],
        lambda w: w.velocity(body, local=True),
        lambda w: spin_scale * w.spin(body, local=True),
        lambda w: directions(w)[:3],
        lambda w: directions(w)[3:],
    ]


def base_motion(body: str) -> list[Row]:
    """Return rows for the first 9 entries of Anymal and AnymalTerrain."""
    return [
        lambda w: 2.0 * w.velocity(body, local=True),
        lambda w: 0.25 * w.spin(body, local=True),
        lambda w: -w.turn(body)[2],
    ]


def flight(body: str, target: Row) -> list[Row]:
    """Return rows for the first 13 entries of Quadcopter and Ingenuity."""
    return [
        lambda w: (target(w) - w.pos(body)) / 3.0,
        lambda w: w.quat(body),
        lambda w: w.velocity(body) / 2.0,
        lambda w: w.spin(body) / np.pi,
    ]


def hand_rows(goal: Sequence[float]) -> dict[str, Row]:
    def from_goal(one: OneEnv) -> np.ndarray:
        back, turn = np.zeros(4), np.zeros(4)
        mujoco.mju_negQuat(back, one.own(one.task.goal_quat))
        mujoco.mju_mulQuat(turn, one.quat("object/cube"), back)
        return turn if turn[0] >= 0.0 else -turn

    return {
        "angles": lambda w: w.mapped("hand"),
        "speeds": lambda w: 0.2 * w.speeds("hand"),
        "efforts": lambda w: 10.0 * w.efforts("hand"),
        "cube_pos": lambda w: w.pos("object/cube"),
        "cube_quat": lambda w: w.quat("object/cube"),
        "cube_velocity": lambda w: w.velocity("object/cube"),
        "cube_spin": lambda w: 0.2 * w.spin("object/cube"),
        "goal_pos": lambda w: goal - w.pos("object/cube"),
        "goal_quat": lambda w: w.own(w.task.goal_quat),
        "from_goal": from_goal,
    }


def tips_state(one: OneEnv, tips: Sequence[str]) -> np.ndarray:
    return np.concatenate([[*one.pos(t), *one.quat(t), *one.velocity(t), *one.spin(t)] for t in tips])


def action(one: OneEnv) -> np.ndarray:
    return one.action


# Rows of one task


ANT_FEET = [f"ant/{end}_{side}_foot" for end in ("front", "back") for side in ("left", "right")]
HUMANOID_FEET = ["humanoid/right_foot", "humanoid/left_foot"]
SHADOW_TIPS = [f"hand/{finger}distal" for finger in ("ff", "mf", "rf", "lf", "th")]
TRIFINGER_TIPS = [f"trifinger/tip_{finger}" for finger in range(3)]
STANCE = [0.03, 0.4, -0.8, 0.03, -0.4, 0.8, -0.03, 0.4, -0.8, -0.03, -0.4, 0.8]  # rad; Anymal

shadow = hand_rows((0.0, -0.39, 0.56))
shadow["tips_pos"] = lambda w: np.concatenate([w.pos(tip) for tip in SHADOW_TIPS])
shadow["tips_state"] = lambda w: tips_state(w, SHADOW_TIPS)
shadow["tips_touch"] = lambda w: 10.0 * np.concatenate([w.touch(tip) for tip in SHADOW_TIPS])
shadow["action"] = action
allegro = {**hand_rows((0.0, -0.19, 0.52)), "action": action}


def pick(rows: dict[str, Row], names: str) -> list[Row]:
    return [rows[name] for name in names.split()]


def hand_case(rows: dict[str, Row], kind: str, names: str, **settings: Any) -> Case:
    tips = SHADOW_TIPS if rows is shadow else []
    touch = [(tip, "object/cube") for tip in tips]
    return Case(pick(rows, names), settings={"observation_type": kind, **settings}, touch=touch)


def terrain_command(one: OneEnv) -> list[float]:
    x, y, heading = one.own(one.task.commands.value)
    _, yaw = euler(one.turn("anymal/base"))
    moves = np.hypot(x, y) > 0.25
    return [2.0 * x * moves, 2.0 * y * moves, 0.25 * np.clip(0.5 * wrapped(heading - yaw), -1.0, 1.0)]


def terrain_heights(one: OneEnv) -> list[float]:
    _, yaw = euler(one.turn("anymal/base"))
    base = one.pos("anymal/base")
    along, ground = np.array([np.cos(yaw), np.sin(yaw)]), one.model.geom("ground").id
    ahead = [0.1 * i for i in range(-8, 9) if abs(i) > 1]
    left = [0.1 * i for i in range(-5, 6) if i]
    heights = []
    for x, y in ((x, y) for x in ahead for y in left):
        above = np.array([*(base[:2] + x * along + y * np.array([-along[1], along[0]])), 20.0])
        down = mujoco.mj_rayHfield(one.model, one.data, ground, above, np.array([0.0, 0.0, -1.0]))
        assert down > 0.0
        heights.append(5.0 * np.clip(base[2] - 0.5 - (20.0 - down), -1.0, 1.0))
    return heights


def place_on_patches(env: VecEnv) -> None:
    """Put robots near the platform edges of the hardest patches, with commands of all kinds."""
    num = torch.arange(NUM_ENVS)
    origin = env.task.terrain.origins[9, 2 * num]
    env.sim.qpos[:, :3] = origin + torch.stack([1.6 * num.cos(), 1.7 * num.sin(), 0.35 + 0.1 * num], dim=1)
    commands = torch.stack([num.cos(), 0.7 * num.sin(), 0.8 * num - 2.9], dim=1)
    commands[3, :2] = torch.tensor([0.2, -0.1])  # below the threshold: standing
    env.task.commands.value.copy_(commands)


REACH_POSE = [0.0, -0.137, 0.0, -2.235, 0.0, 2.098, 0.785]  # rad; FrankaReach


def move_targets_to_balls(env: VecEnv) -> None:
    """Set FrankaReach's targets to the positions of its balls."""
    env.task.target.value.copy_(env.task.ball.root_pos)


def hip_torques(one: OneEnv) -> np.ndarray:
    """Compute the ball's torque about the hips."""
    tray, wrench = "balance_bot/tray", one.touch("balance_bot/tray")
    torques = []
    for leg in (1, 2, 3):
        hip = one.data.joint(f"balance_bot/hip_{leg}").xanchor
        torques.append(wrench[3:] + np.cross(one.turn(tray).T @ (one.pos(tray) - hip), wrench[:3]))
    return 0.05 * np.concatenate(torques)


def pole(one: OneEnv, body: str) -> float:
    """Return the angle about the y axis [rad]."""
    turn = one.turn(body)
    return np.arctan2(turn[0, 2], turn[2, 2])


TROT = load(assets_dir() / "motions" / "go1_trot.npz")
GO1_POSE = [0.1, 0.9, -1.8, -0.1, 0.9, -1.8] * 2  # rad


def clip_values(values: np.ndarray) -> Row:
    """Return clip values at the env's target frame."""
    return lambda w: values[int(w.own(w.task.playhead.index))]


def clip_turn(one: OneEnv, body: str) -> np.ndarray:
    turn = np.zeros(9)
    quat = clip_values(TROT.body_quat_w)(one)[TROT.body_names.index(body)]
    mujoco.mju_quat2Mat(turn, quat.astype(np.float64))
    return turn.reshape(3, 3)


def clip_pos(one: OneEnv) -> np.ndarray:
    return clip_values(TROT.body_pos_w)(one)[TROT.body_names.index("trunk")]


def imu_velocity(one: OneEnv) -> np.ndarray:
    lever = one.turn("robot/trunk") @ one.model.site("robot/imu").pos
    velocity = one.velocity("robot/trunk") + np.cross(one.spin("robot/trunk"), lever)
    return velocity @ one.turn("robot/trunk")


go1_clip: list[Row] = [
    clip_values(TROT.joint_pos),
    clip_values(TROT.joint_vel),
    lambda w: (clip_pos(w) - w.pos("robot/trunk")) @ w.turn("robot/trunk"),
    lambda w: (w.turn("robot/trunk").T @ clip_turn(w, "trunk")).T[:2].ravel(),
]
go1_bodies: list[Row] = [
    lambda w: np.concatenate([(w.pos(f"robot/{b}") - clip_pos(w)) @ clip_turn(w, "trunk") for b in w.task.bodies]),
    lambda w: np.concatenate([(clip_turn(w, "trunk").T @ w.turn(f"robot/{b}")).T[:2].ravel() for b in w.task.bodies]),
]
go1_motion: list[Row] = [imu_velocity, lambda w: w.spin("robot/trunk", local=True)]

trifinger: list[Row] = [
    lambda w: w.angles("trifinger"),
    lambda w: w.speeds("trifinger"),
    lambda w: w.pos("cube/cube"),
    lambda w: w.quat("cube/cube"),
    lambda w: w.pos("goal/goal"),
    lambda w: w.quat("goal/goal"),
    action,
]
trifinger_policy: list[Row] = [
    lambda w: w.mapped("trifinger"),
    lambda w: w.speeds("trifinger") / 10.0,
    lambda w: mapped(w.pos("cube/cube"), [-0.3, -0.3, 0.0], 0.3),
    lambda w: w.quat("cube/cube"),
    lambda w: mapped(w.pos("goal/goal"), [-0.3, -0.3, 0.0], 0.3),
    lambda w: w.quat("goal/goal"),
    action,
]
cube_stack: list[Row] = [
    lambda w: w.quat("cube_a/cube"),
    lambda w: w.pos("cube_a/cube"),
    lambda w: w.pos("cube_b/cube") - w.pos("cube_a/cube"),
    lambda w: w.pos("franka/grip"),
    lambda w: w.quat("franka/grip"),
]
SHADOW_FULL = "angles speeds efforts cube_pos cube_quat cube_velocity cube_spin goal_pos goal_quat from_goal"
SHADOW_STATE = f"{SHADOW_FULL} tips_state tips_touch action"
WITHOUT_VELOCITIES = "angles cube_pos cube_quat goal_pos goal_quat from_goal"

# Keys: task, then its observation type after a dot.
CASES = {
    "AllegroHand": hand_case(allegro, "full_state", f"{SHADOW_FULL} action"),
    "Ant": Case(
        [
            *torso("ant/torso", spin_scale=1.0),
            lambda w: w.mapped("ant"),
            lambda w: 0.2 * w.speeds("ant"),
            lambda w: 0.1 * np.concatenate([w.touch(foot) for foot in ANT_FEET]),
            action,
        ],
        touch=[(foot, "world") for foot in ANT_FEET],
    ),
    "Anymal": Case(
        [
            *base_motion("anymal/base"),
            lambda w: 2.0 * w.own(w.task.commands.value)[:2],
            lambda w: 0.25 * w.own(w.task.commands.value)[2:],
            lambda w: w.angles("anymal") - STANCE,
            lambda w: 0.05 * w.speeds("anymal"),
            action,
        ]
    ),
    "AnymalTerrain": Case(
        [
            *base_motion("anymal/base"),
            lambda w: terrain_command(w)[:2],
            lambda w: terrain_command(w)[2:],
            lambda w: w.angles("anymal"),
            lambda w: 0.05 * w.speeds("anymal"),
            terrain_heights,
            action,
        ],
        arrange=place_on_patches,
    ),
    "BallBalance": Case(
        [
            lambda w: w.angles("balance_bot")[1::2],
            lambda w: w.speeds("balance_bot")[1::2],
            lambda w: w.pos("ball/ball"),
            lambda w: w.velocity("ball/ball"),
            lambda w: 0.05 * w.touch("balance_bot/tray")[:3],
            hip_torques,
        ],
        touch=[("balance_bot/tray", "ball/ball")],
        spread=0.1,  # the feet stand on the ground
    ),
    "Cartpole": Case(
        [
            lambda w: w.pos("cartpole/cart")[:1],
            lambda w: w.velocity("cartpole/cart")[:1],
            lambda w: [pole(w, "cartpole/pole")],
            lambda w: w.spin("cartpole/pole")[1:2],
        ]
    ),
    "CartpoleSwingup": Case(
        [
            lambda w: w.pos("cartpole/cart")[:1],
            lambda w: w.velocity("cartpole/cart")[:1],
            lambda w: w.turn("cartpole/pole")[2, 2:],
            lambda w: w.turn("cartpole/pole")[0, 2:],
            lambda w: w.spin("cartpole/pole")[1:2],
        ]
    ),
    "FrankaCabinet": Case(
        [
            lambda w: w.mapped("franka"),
            lambda w: 0.1 * w.speeds("franka"),
            lambda w: w.pos("cabinet/handle") - w.pos("franka/grip"),
            lambda w: w.angles("cabinet"),
            lambda w: w.velocity("cabinet/drawer")[:1],
        ]
    ),
    "FrankaCubeStack": Case([*cube_stack, lambda w: w.angles("franka")[7:]]),
    "FrankaCubeStack.joint_tor": Case(
        [*cube_stack, lambda w: w.angles("franka")], settings={"control_type": "joint_tor"}
    ),
    "FrankaReach": Case(
        [
            lambda w: w.angles("franka")[:7] - REACH_POSE,
            lambda w: w.speeds("franka")[:7],
            lambda w: w.pos("target/target"),
            action,
        ],
        arrange=move_targets_to_balls,
    ),
    "Go1Tracking": Case(
        [
            *go1_clip,
            *go1_motion,
            lambda w: w.angles("robot") - GO1_POSE + w.own(w.task.encoder_bias),
            lambda w: w.speeds("robot"),
            action,
        ],
        [
            *go1_clip,
            *go1_bodies,
            *go1_motion,
            lambda w: w.angles("robot") - GO1_POSE,
            lambda w: w.speeds("robot"),
            action,
        ],
    ),
    "Humanoid": Case(
        [
            *torso("humanoid/torso", spin_scale=0.25),
            lambda w: w.mapped("humanoid"),
            lambda w: 0.1 * w.speeds("humanoid"),
            lambda w: 0.01 * w.efforts("humanoid"),
            lambda w: 0.01 * np.concatenate([w.touch(foot) for foot in HUMANOID_FEET]),
            action,
        ],
        touch=[(foot, "world") for foot in HUMANOID_FEET],
    ),
    "Ingenuity": Case(flight("ingenuity/fuselage", target=lambda w: w.pos("target/marker"))),
    "Pendulum": Case(
        [
            lambda w: w.turn("pendulum/rod")[2, 2:],
            lambda w: w.turn("pendulum/rod")[0, 2:],
            lambda w: w.spin("pendulum/rod")[1:2],
        ]
    ),
    "Quadcopter": Case(
        [*flight("quadcopter/chassis", target=lambda w: np.array([0.0, 0.0, 1.0])), lambda w: w.angles("quadcopter")]
    ),
    "ShadowHand": hand_case(shadow, "full_state", SHADOW_STATE),
    "ShadowHand.full_no_vel": hand_case(shadow, "full_no_vel", f"{WITHOUT_VELOCITIES} tips_pos action"),
    "ShadowHand.openai": hand_case(shadow, "openai", "tips_pos cube_pos from_goal action"),
    "Trifinger": Case(
        trifinger_policy,
        [
            lambda w: np.concatenate([row(w) for row in trifinger]),
            lambda w: w.velocity("cube/cube"),
            lambda w: w.spin("cube/cube"),
            lambda w: tips_state(w, TRIFINGER_TIPS),
            lambda w: w.efforts("trifinger"),
            lambda w: np.concatenate([w.touch(tip) for tip in TRIFINGER_TIPS]),
        ],
        settings={"randomize": False},  # no noise, one model for all envs
        touch=[(tip, "cube/cube") for tip in TRIFINGER_TIPS],
        spread=0.3,
    ),
}

every_case = pytest.mark.parametrize("name", CASES)


# States


def scattered_env(name: str) -> VecEnv:
    """Build an environment with different states per env: rotated, moving, joints anywhere within limits."""
    case, random = CASES[name], np.random.default_rng(0)
    env = gpusim_rl.make_env(name.split(".")[0], num_envs=NUM_ENVS, sim="mujoco", device="cpu", task={**case.settings})
    env.reset()
    model = env.sim.scene.model
    data = mujoco.MjData(model)
    for env_id in range(NUM_ENVS):
        data.qpos[:] = model.qpos0
        for joint in range(model.njnt):
            place, (low, high) = data.qpos[model.jnt_qposadr[joint] :], model.jnt_range[joint]
            if model.jnt_type[joint] == FREE:
                place[:3] += case.spread * random.uniform([-0.8, -0.8, 0.0], 0.8)
                mujoco.mju_quatIntegrate(place[3:7], case.spread * random.normal(0.0, 1.5, 3), 1.0)
            elif model.jnt_limited[joint]:
                middle, half = (low + high) / 2, (high - low) / 2
                place[0] = random.uniform(middle - 0.9 * case.spread * half, middle + 0.9 * case.spread * half)
            else:
                place[0] = random.uniform(-2.0, 2.0)
        pair = env_id % (len(case.touch) + 1)
        if pair < len(case.touch):
            bring_together(model, data, *case.touch[pair])
        env.sim.qpos[env_id] = torch.from_numpy(data.qpos)
        env.sim.qvel[env_id] = torch.from_numpy(random.normal(0.0, 1.0, model.nv))
    case.arrange(env)
    everywhere = torch.ones(NUM_ENVS, dtype=torch.bool)
    env.sim.wrote_state(everywhere)
    env.task.actions.copy_(torch.from_numpy(random.uniform(-1.0, 1.0, (NUM_ENVS, env.num_actions))))
    env.task.apply_action(env.task.actions)
    update_sensors(env.sim)
    return env


def bring_together(model: mujoco.MjModel, data: mujoco.MjData, body: str, other: str) -> None:
    """Move the second body, or the first if the second is the ground, until both touch."""
    mover, sign = (other, 1.0) if other != "world" else (body, -1.0)
    free = model.body_jntadr[model.body_rootid[model.body(mover).id]]
    place = data.qpos[model.jnt_qposadr[free] :][:3]
    place[2] += sign * (1.0 if sign > 0 else -3.0)  # start apart
    mujoco.mj_kinematics(model, data)
    ways = []
    for a, b in ((a, b) for a in collision_geoms(model, body) for b in collision_geoms(model, other)):
        ends = np.zeros(6)
        distance = mujoco.mj_geomDistance(model, data, a, b, 100.0, ends)
        ways.append((distance, ends[3:] - ends[:3]))
    distance, way = min(ways, key=lambda pair: pair[0])
    place -= sign * way * (1.0 + DEPTH / distance)


def collision_geoms(model: mujoco.MjModel, body: str) -> list[int]:
    own = np.flatnonzero(model.geom_bodyid == model.body(body).id)
    return [int(geom) for geom in own if model.geom_contype[geom] or model.geom_conaffinity[geom]]


# The tests


@every_case
def test_observations_equal_mujoco_quantities(name):
    env, case = scattered_env(name), CASES[name]
    envs = [OneEnv(env, index) for index in range(NUM_ENVS)]
    observed = env.clean_obs()
    groups = {"policy": case.policy, **({"critic": case.critic} if case.critic else {})}
    assert list(observed) == list(groups)
    for group, rows in groups.items():
        expected = [np.array([row(one) for one in envs]) for row in rows]
        sizes = [part.shape[1] for part in expected]
        assert sum(sizes) == observed[group].shape[1]
        parts = np.split(observed[group].double().numpy(), np.cumsum(sizes)[:-1], axis=1)
        for i, (actual, part) in enumerate(zip(parts, expected, strict=True)):
            np.testing.assert_allclose(actual, part, rtol=1e-3, atol=2e-4, err_msg=f"{group}: row {i}")
            # a value equal in all envs would test nothing
            assert (np.ptp(part, axis=0) > 1e-3).all(), f"{group}: row {i}"
