"""Tests of domain randomisation: values, timing, isolation, resume, errors."""

from __future__ import annotations

import copy
import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any

import mujoco
import pytest
import torch
import yaml
from torch import Tensor

from gpusim_rl.api import load_spec, make_env
from gpusim_rl.env import Step, Task, TaskConfig, VecEnv
from gpusim_rl.env.properties import LEAST_MASS, PICTURES, SECTIONS
from gpusim_rl.env.stateful import kept_tensors
from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.compose import compose
from gpusim_rl.sim import Scene, Sim
from gpusim_rl.testing.sync_counter import SyncCounter
from helpers.states import fields, saved
from helpers.task_envs import class_env, plain_env
from helpers.training import differences
from helpers.watched import watched  # noqa: F401

# A floating rover (no ground contact) with every kind of joint and actuator that the schema distinguishes.
ROVER = """
<mujoco>
  <worldbody>
    <body name="hull" pos="0 0 2">
      <freejoint/>
      <geom type="box" size="0.2 0.1 0.05" mass="2" friction="0.8 0.01 0.002"/>
      <body name="arm" pos="0.2 0 0">
        <joint name="servo" axis="0 1 0" range="-60 60" limited="true" damping="0.3" frictionloss="0.1"/>
        <geom type="capsule" size="0.02" fromto="0.1 0 0 0.4 0 0" mass="0.5" friction="0.4 0.02 0.004"/>
        <body name="tip" pos="0.4 0 0">
          <joint name="spring" axis="0 1 0" stiffness="2" damping="0.2"/>
          <geom type="sphere" size="0.03" pos="0.05 0 0" mass="0.1"/>
      </body></body>
      <body name="wheel" pos="-0.2 0 0">
        <joint name="motor" axis="0 1 0" armature="0.03"/>
        <geom type="cylinder" size="0.05 0.02" mass="0.3" contype="0" conaffinity="0"/>
      </body>
      <body name="tail" pos="-0.2 0 0.1">
        <joint name="limited" axis="0 0 1"/>
        <geom type="sphere" size="0.03" pos="-0.05 0 0" mass="0.2"/>
      </body>
    </body>
  </worldbody>
  <tendon><fixed name="cable" stiffness="0.5" damping="0.2"><joint joint="spring" coef="1"/></fixed></tendon>
  <actuator>
    <position name="servo" joint="servo" kp="20" kv="0.5"/>
    <motor name="motor" joint="motor" gear="3" ctrlrange="-2 2"/>
    <motor name="limited" joint="limited" gear="2" forcerange="-4 4"/>
  </actuator>
</mujoco>
"""

CRATE = """
<mujoco><worldbody>
  <body name="crate" pos="3 0 2"><freejoint/><geom type="box" size="0.1 0.1 0.1" mass="1"/></body>
</worldbody></mujoco>
"""

START = 0.1  # m


class Rover(Task["TaskConfig"]):
    """Rover that observes its state and holds up a crate by a force; only the time limit ends episodes."""

    Config = TaskConfig

    @classmethod
    def scene(cls, cfg: TaskConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add_ground(friction=(0.5, 0.03, 0.003))
        scene.add("rover", mujoco.MjSpec.from_string(ROVER))
        scene.add("crate", mujoco.MjSpec.from_string(CRATE))
        return scene

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot, self.crate = sim.articulation("rover"), sim.articulation("crate")
        self.box = self.crate.bodies(["crate"])
        self.num_actions = 3
        self.applied = torch.zeros(sim.num_envs, 3)
        self.lift = torch.zeros(sim.num_envs, 1, 3)  # compensates the crate's weight
        self.lift[..., 2] = 9.81

    def reset(self, where: Tensor) -> None:
        noise = self.random.uniform(-START, START, 3)
        self.robot.set_state(where, root_pos=self.robot.root_pos + noise)
        self.box.apply_wrench(self.lift)

    def apply_action(self, action: Tensor) -> None:
        self.applied.copy_(action)

    def observe(self) -> dict[str, Tensor]:
        state = torch.cat([self.robot.root_pos, self.robot.joint_pos], dim=1)
        return {"policy": state, "critic": state}

    def rewards(self) -> dict[str, Tensor]:
        return {"alive": torch.ones(self.num_envs)}

    def terminated(self) -> Tensor:
        return torch.zeros(self.num_envs, dtype=torch.bool)


NUM = 6


def make(params: dict[str, Any] | None, num_envs: int = NUM, seed: int = 0, **changes: Any) -> VecEnv:
    """Return an environment of the rover; `params` None disables randomisation."""
    off = {"randomize": params is not None, "randomization_params": params or {}}
    return plain_env(Rover, num_envs, seed, **{"episode_length": 10, **off, **changes})


def draw(low: float, high: float, operation: str = "scaling", distribution: str = "uniform", **more: Any) -> dict:
    return {"range": [low, high], "operation": operation, "distribution": distribution, **more}


def rover_params(section: str, **properties: Any) -> dict[str, Any]:
    return {"actor_params": {"rover": {section: properties}}}


def steps(env: VecEnv, count: int, action: float = 0.0) -> list[Step]:
    return [env.step(torch.full((env.num_envs, env.num_actions), action)) for _ in range(count)]


def value(env: VecEnv, field: str, elements: list[str] | None = None, actor: str | None = "rover") -> Tensor:
    return env.sim.param(field, actor, elements).value


# MuJoCo fields of each property of the schema; a draw from [x, x] is x.

DOF, BODY, SHAPE, TENDON = SECTIONS
TWICE, MORE = draw(2.0, 2.0), draw(0.25, 0.25, "additive")

MAPPED: list[tuple[str, str, dict, str, str, list[float]]] = [
    # section, property, draw, field, element, the field's values
    (DOF, "stiffness", TWICE, "actuator_gainprm", "servo", [40.0]),
    (DOF, "stiffness", TWICE, "actuator_biasprm", "servo", [0.0, -40.0, -0.5]),
    (DOF, "stiffness", TWICE, "jnt_stiffness", "spring", [4.0]),
    (DOF, "stiffness", MORE, "jnt_stiffness", "motor", [0.25]),
    (DOF, "stiffness", TWICE, "jnt_stiffness", "servo", [0.0]),
    (DOF, "damping", TWICE, "actuator_biasprm", "servo", [0.0, -20.0, -1.0]),
    (DOF, "damping", TWICE, "dof_damping", "spring", [0.4]),
    (DOF, "damping", MORE, "dof_damping", "motor", [0.25]),
    (DOF, "damping", TWICE, "dof_damping", "servo", [0.3]),
    (DOF, "friction", TWICE, "dof_frictionloss", "servo", [0.2]),
    (DOF, "armature", TWICE, "dof_armature", "motor", [0.06]),
    (DOF, "lower", MORE, "jnt_range", "servo", [-math.pi / 3 + 0.25, math.pi / 3]),
    (DOF, "upper", MORE, "jnt_range", "servo", [-math.pi / 3, math.pi / 3 + 0.25]),
    (BODY, "mass", TWICE, "body_mass", "hull", [4.0]),
    (BODY, "com", MORE, "body_ipos", "arm", [0.5, 0.25, 0.25]),
    (SHAPE, "friction", TWICE, "geom_friction", "arm", [0.8, 0.02, 0.004]),
    (SHAPE, "torsion_friction", TWICE, "geom_friction", "arm", [0.4, 0.04, 0.004]),
    (SHAPE, "rolling_friction", TWICE, "geom_friction", "hull", [0.8, 0.01, 0.004]),
    (SHAPE, "color", MORE, "geom_rgba", "arm", [0.75, 0.75, 0.75, 1.0]),
    (SHAPE, "color", draw(9.0, 9.0), "geom_rgba", "hull", [1.0, 1.0, 1.0, 1.0]),
    (TENDON, "stiffness", TWICE, "tendon_stiffness", "cable", [1.0]),
    (TENDON, "damping", TWICE, "tendon_damping", "cable", [0.4]),
]


@pytest.mark.parametrize(("section", "name", "drawn", "field", "element", "expected"), MAPPED)
def test_property_maps_to_its_mujoco_field(section, name, drawn, field, element, expected):
    env = make(rover_params(section, **{name: drawn}))
    env.reset()
    found = value(env, field, [element]).reshape(NUM, -1)[:, : len(expected)]
    torch.testing.assert_close(found, torch.tensor(expected).expand(NUM, -1))


def test_every_property_of_the_schema_is_tested():
    tested = {(section, name) for section, name, *_ in MAPPED} | {(BODY, "inertia"), (DOF, "effort")}
    tested.add((DOF, "delay"))  # tests/sim/test_actuators.py
    assert tested == {(section, name) for section, properties in SECTIONS.items() for name in properties}


def test_effort_scales_force_range_or_gear():
    env = make(rover_params(DOF, effort=draw(3.0, 3.0, "additive", names=["motor", "limited"])))
    # the motor's effort rises from gear 3 x control 2 = 6 N m to 9, that of `limited` from gear 2 x 4 N m = 8 to 11
    torch.testing.assert_close(value(env, "actuator_gear", ["motor"])[0, 0, 0], torch.tensor(3.0 * 9 / 6))
    torch.testing.assert_close(value(env, "actuator_forcerange", ["limited"])[0, 0], torch.tensor([-5.5, 5.5]))
    torch.testing.assert_close(value(env, "actuator_gear", ["limited"])[0, 0, 0], torch.tensor(2.0))
    with pytest.raises(ConfigError, match=r"effort: .*'servo' .*forcerange"):
        make(rover_params(DOF, effort=TWICE))


def test_inertia_scales_with_mass_and_its_factor():
    names = ["hull", "arm"]
    both = make(rover_params(BODY, mass=TWICE, inertia=draw(1.5, 1.5, names=["arm"])))
    model = both.sim.param("body_inertia", "rover", names).default
    factors = torch.tensor([[2.0], [3.0]])
    torch.testing.assert_close(value(both, "body_inertia", names)[0], factors * model)
    # mass and inertia stay independent if drawn at different times
    env = make(rover_params(BODY, mass=draw(0.5, 2.0, setup_only=True), inertia=draw(0.5, 2.0)), episode_length=3)
    env.reset()
    mass = value(env, "body_mass", names)
    for _ in range(3):
        steps(env, 3)
        ratio = value(env, "body_inertia", names) / (mass / torch.tensor([2.0, 0.5]))[..., None] / model
        assert torch.equal(value(env, "body_mass", names), mass)
        torch.testing.assert_close(ratio, ratio[..., :1].expand(NUM, 2, 3))
        assert (ratio > 0.5 - 1e-5).all() and (ratio < 2.0 + 1e-5).all() and ratio[:, 0, 0].unique().numel() == NUM


def test_gravity_is_per_env():
    env = make({"sim_params": {"gravity": draw(0.0, 0.4, "additive", "gaussian")}})
    env.reset()
    before = env.task.robot.root_lin_vel.clone()
    steps(env, 1)
    fallen = env.task.robot.root_lin_vel - before
    torch.testing.assert_close(fallen, 0.02 * value(env, "gravity", actor=None), atol=2e-4, rtol=0.0)


def test_ground_actor_has_only_shapes():
    env = make({"actor_params": {"ground": {SHAPE: {"friction": TWICE}}}})
    torch.testing.assert_close(value(env, "geom_friction", actor="ground")[0, 0], torch.tensor([1.0, 0.03, 0.003]))
    with pytest.raises(ConfigError, match=r"unknown key 'task\.randomization_params\.actor_params\.ground\.dof_prop"):
        make({"actor_params": {"ground": {DOF: {"damping": TWICE}}}})


def test_draws_stay_within_physical_limits():
    wild = draw(0.0, 30.0, "additive", "gaussian")
    params = rover_params(DOF, lower=wild, upper=wild, damping=wild, friction=wild)
    params["actor_params"]["rover"] |= {BODY: {"mass": wild}, SHAPE: {"friction": wild}}
    env = make(params, num_envs=50)
    env.reset()
    low, high = value(env, "jnt_range", ["servo"])[:, 0].unbind(dim=1)
    assert (low <= high).all() and (low < 0).any() and (high > 1.1).any()
    mass = env.sim.param("body_mass", "rover")
    assert (mass.value >= LEAST_MASS * mass.default).all() and (mass.value > 3.0).any()
    for field in ("dof_damping", "dof_frictionloss", "geom_friction"):
        assert (value(env, field) >= 0.0).all() and (value(env, field) > 5.0).any()


# Distributions, timing, schedules


@pytest.mark.parametrize(
    ("drawn", "mean", "std"),
    [
        (draw(0.5, 1.5), 2.0, 2.0 / math.sqrt(12)),
        (draw(-0.5, 0.5, "additive"), 2.0, 1.0 / math.sqrt(12)),
        (draw(0.5, 2.0, distribution="loguniform"), 2.0 * 1.5 / math.log(4.0), 0.85),
        (draw(1.0, 0.1, distribution="gaussian"), 2.0, 0.2),
        (draw(0.5, 0.3, "additive", "gaussian"), 2.5, 0.3),
    ],
)
def test_draws_follow_their_distribution(drawn, mean, std):
    env = make(rover_params(BODY, mass={**drawn, "names": ["hull", "tip"]}), num_envs=4000)
    hull, tip = value(env, "body_mass", ["hull", "tip"]).unbind(dim=1)
    assert hull.mean().item() == pytest.approx(mean, abs=4 * std / math.sqrt(4000))
    assert hull.std().item() == pytest.approx(std, rel=0.06)
    assert abs(torch.corrcoef(torch.stack([hull, tip]))[0, 1].item()) < 0.07, "draws of bodies are correlated"
    assert hull.unique().numel() > 3900, "envs share draws"


def test_setup_reset_and_interval_draws_occur_on_time():
    params = rover_params(
        BODY,
        mass=draw(0.5, 1.5, setup_only=True),
        com=draw(-0.01, 0.01, "additive"),
        inertia=draw(0.5, 1.5, interval_s=0.1),  # five control steps
    )
    env = make(params, num_envs=40, episode_length=8, randomize_episode_start=True)
    env.reset()
    fields = ("body_mass", "body_ipos", "body_inertia")
    last = {field: value(env, field) for field in fields}
    intervals = torch.zeros(40)
    for _ in range(20):
        (step,) = steps(env, 1)
        changed = {field: (value(env, field) != last[field]).flatten(1).any(dim=1) for field in fields}
        last = {field: value(env, field) for field in fields}
        assert not changed["body_mass"].any()
        assert torch.equal(changed["body_ipos"], step.done), "drawn outside of resets"
        assert 0 < changed["body_inertia"].sum() < 40, "envs must reach their intervals at different times"
        intervals += changed["body_inertia"]
    assert (intervals == 4).all()


def test_frequency_is_the_minimum_steps_between_draws():
    params = {"frequency": 25, **rover_params(BODY, mass=draw(0.5, 1.5))}
    env = make(params, episode_length=10)
    env.reset()
    seen = [value(env, "body_mass", ["hull"])[0].item()]
    for _ in range(70):
        steps(env, 1)
        seen.append(value(env, "body_mass", ["hull"])[0].item())
    changes = [step for step in range(1, 71) if seen[step] != seen[step - 1]]
    assert changes == [30, 60], "first resets after 25 steps since the last draw"


def test_setup_only_draw_ignores_the_schedule():
    # IsaacGymEnvs' files have both keys, whose schedule would start at strength 0 and thus remove the draw.
    env = make(rover_params(BODY, mass=draw(2.0, 2.0, setup_only=True, schedule="linear", schedule_steps=1000)))
    env.reset()
    assert value(env, "body_mass", ["hull"])[0].item() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("schedule", "strengths"), [("linear", [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]), ("constant", [0, 0, 0, 0, 1, 1])]
)
def test_schedule_counts_control_steps(schedule, strengths):
    ramp = {"schedule": schedule, "schedule_steps": 20}
    params = rover_params(BODY, mass=draw(2.0, 2.0, **ramp))
    params["observations"] = draw(0.5, 0.5, "additive", **ramp)
    params["actions"] = draw(0.4, 0.4, **ramp)
    env = make(params, episode_length=5)
    env.reset()
    for count, strength in enumerate(strengths):
        assert value(env, "body_mass", ["hull"])[0].item() == pytest.approx(2.0 * (1.0 + strength)), count
        noise = env._observe()["policy"] - env.task.observe()["policy"]
        torch.testing.assert_close(noise, torch.full_like(noise, 0.5 * strength))
        steps(env, 1, action=0.8)
        expected = 0.8 * (1.0 + strength * (0.4 - 1.0))
        torch.testing.assert_close(env.task.applied, torch.full((NUM, 3), expected))
        steps(env, 4)


# Noise and latency


def test_correlated_noise_is_constant_in_an_episode():
    spec = draw(0.0, 0.0, "additive", range_correlated=[-1.0, 1.0])
    env = make({"observations": spec, "actions": spec}, num_envs=200, episode_length=5, clip_actions=9.0)
    noises, acted = [env.reset()["policy"] - env.task.observe()["policy"]], []
    for _ in range(10):
        (step,) = steps(env, 1, action=1.0)
        noises.append(step.obs["policy"] - env.task.observe()["policy"])
        acted.append(env.task.applied - 1.0)
    noise, action = torch.stack(noises), torch.stack(acted)
    for whole, episodes in ((noise, (slice(0, 5), slice(5, 10))), (action, (slice(0, 5), slice(5, 10)))):
        one, two = (whole[episode] for episode in episodes)
        torch.testing.assert_close(one, one[:1].expand_as(one), atol=1e-6, rtol=0.0)
        torch.testing.assert_close(two, two[:1].expand_as(two), atol=1e-6, rtol=0.0)
        assert ((one[0] - two[0]).abs() > 1e-4).float().mean() > 0.95
        assert one.abs().max() <= 1.0 and one.std().item() == pytest.approx(1 / math.sqrt(3), rel=0.05)


def test_clipping_is_applied_after_noise():
    params = {"observations": draw(9.0, 9.0, "additive"), "actions": draw(0.7, 0.7, "additive")}
    env = make(params, clip_observations=1.5, clip_actions=1.0)
    assert (env.reset()["policy"] == 1.5).all()
    (step,) = steps(env, 1, action=0.5)
    assert (step.obs["policy"] == 1.5).all() and (step.final_obs["policy"] == 1.5).all()
    assert (env.task.applied == 1.0).all()
    assert (env.task.actions == 0.5).all(), "the task must see the policy's action"


def test_action_latency_is_drawn_per_episode():
    env = make({"latency": {"range": [1, 3]}}, num_envs=60, episode_length=12)
    env.reset()
    delays = []
    for _ in range(3):  # episodes
        sent, came = [], []
        for t in range(12):
            action = torch.full((60, 3), 0.05 * (t + 1))
            env.step(action)
            sent.append(action)
            came.append(env.task.applied.clone())
        arrived = torch.stack(came)[:, :, 0]
        delay = (arrived == 0.0).sum(dim=0)
        for t in range(12):
            expected = torch.where(delay <= t, 0.05 * (t + 1 - delay), 0.0)
            torch.testing.assert_close(arrived[t], expected)
        delays.append(delay)
    every = torch.stack(delays)
    assert sorted(every.unique().tolist()) == [1, 2, 3]
    assert not torch.equal(delays[0], delays[1])


# Pushes


def push_velocities(spec: dict[str, Any], count: int = 60, **changes: Any) -> tuple[VecEnv, Tensor]:
    """Return the environment and the change of the floating crate's velocity per step, shape [steps, envs, 3]."""
    env = make({"actor_params": {"crate": {"pushes": spec}}}, **{"num_envs": 100, "episode_length": 1000, **changes})
    env.reset()
    velocity = env.task.crate.root_lin_vel
    found = []
    for _ in range(count):
        before = velocity.clone()
        steps(env, 1)
        found.append(velocity - before)
    return env, torch.stack(found)


def test_pushes_change_horizontal_velocity_at_random_times():
    _, change = push_velocities({"interval_s": [0.1, 0.3], "velocity": [0.5, 1.0]})
    speed = change.norm(dim=-1)
    push = speed > 0.4
    assert (speed[push] < 1.0 + 1e-3).all() and (speed[push] > 0.5 - 1e-3).all() and (speed[~push] < 1e-3).all()
    assert (change[push][:, 2].abs() < 1e-3).all()
    angles = torch.atan2(change[push][:, 1], change[push][:, 0])
    assert angles.cos().mean().abs() < 0.1 and angles.sin().mean().abs() < 0.1
    assert 0 < push[20].sum() < 100, "envs must be pushed at different times"
    for env_id in range(100):
        moments = push[:, env_id].nonzero().flatten()
        gaps = moments.diff()
        assert gaps.min() >= 5 and gaps.max() <= 15 and moments[0] < 15


def test_velocity_pushes_come_from_the_configured_sides():
    _, change = push_velocities({"interval_s": [0.1, 0.3], "velocity": [0.5, 1.0], "sides": [1, 0, 0, 0]})
    push = change.norm(dim=-1) > 0.4
    angles = torch.atan2(change[push][:, 1], change[push][:, 0])  # the crate does not turn
    assert angles.abs().max() < math.pi / 4 + 0.05
    assert angles.min() < -0.5 and angles.max() > 0.5


def test_force_pushes_last_their_duration_and_keep_task_forces():
    spec = {"interval_s": [0.4, 0.4], "force": [3.0, 3.0], "duration_s": 0.1, "bodies": ["crate"]}
    env, change = push_velocities(spec, num_envs=40)
    acceleration = change / env.task.dt  # of 1 kg, whose weight the task compensates
    size = acceleration.norm(dim=-1)
    push = size > 1.0
    torch.testing.assert_close(size[push], torch.full_like(size[push], 3.0), atol=2e-2, rtol=0.0)
    assert (size[~push] < 2e-2).all(), "the task's force must still compensate the weight"
    for env_id in range(40):
        on = push[:, env_id].nonzero().flatten()
        assert on.tolist() == [19, 20, 21, 22, 23, 39, 40, 41, 42, 43, 59]  # every 20 steps, for 5 steps
        force = acceleration[on[:5], env_id]
        torch.testing.assert_close(force, force[:1].expand(5, 3), atol=2e-2, rtol=0.0)
    assert acceleration[push][:, 2].abs().max() > 2.0, "forces must have all directions"
    torch.testing.assert_close(env.task.box.wrench[:, 0, :3], torch.tensor([0.0, 0.0, 9.81]).expand(40, 3))


def test_reset_ends_a_push():
    spec = {"interval_s": [0.06, 0.06], "force": [5.0, 5.0], "duration_s": 10.0, "bodies": ["crate"]}
    _, change = push_velocities(spec, count=12, episode_length=6, num_envs=4)
    pushes = change.norm(dim=-1)[:, 0] > 0.05  # 5 N on 1 kg for 0.02 s
    assert pushes[:5].tolist() == [False, False, True, True, True]
    assert pushes[6:11].tolist() == [False, False, True, True, True]


def test_pushes_follow_their_schedule():
    spec = {"interval_s": [0.02, 0.02], "velocity": [1.0, 1.0], "schedule": "linear", "schedule_steps": 40}
    _, change = push_velocities(spec, count=50)
    expected = (torch.arange(50) / 40).clamp(max=1.0)
    torch.testing.assert_close(change.norm(dim=-1).mean(dim=1), expected, atol=5e-3, rtol=0.0)


# Isolation and resume


def all_features() -> dict[str, Any]:
    """Return settings that use every feature of the schema for the rover."""
    noise = {"range_correlated": [0.0, 0.05], "schedule": "linear", "schedule_steps": 30}
    return {
        "frequency": 8,
        "observations": draw(0.0, 0.02, "additive", "gaussian", **noise),
        "actions": draw(0.0, 0.05, "additive", "gaussian", **noise),
        "latency": {"range": [0, 3]},
        "sim_params": {"gravity": draw(0.0, 0.4, "additive", "gaussian")},
        "actor_params": {
            "rover": {
                "color": True,
                "pushes": {"interval_s": [0.1, 0.2], "velocity": [0.0, 0.5]},
                DOF: {
                    "stiffness": draw(0.7, 1.3, distribution="loguniform"),
                    "damping": draw(0.5, 1.5, interval_s=0.14),
                    "armature": draw(0.9, 1.1, setup_only=True),
                    "lower": draw(0.0, 0.01, "additive", "gaussian"),
                    "upper": draw(0.0, 0.01, "additive", "gaussian"),
                },
                BODY: {
                    "mass": draw(0.5, 1.5),
                    "inertia": draw(0.8, 1.2, interval_s=0.2),
                    "com": draw(-0.02, 0.02, "additive"),
                },
                SHAPE: {"friction": draw(0.7, 1.3, num_buckets=250)},
                TENDON: {"stiffness": draw(0.7, 1.3, distribution="loguniform"), "damping": draw(0.3, 3.0)},
            },
            "crate": {"pushes": {"interval_s": [0.1, 0.3], "force": [0.0, 2.0], "duration_s": 0.06}},
        },
    }


def test_randomize_false_creates_no_randomizer():
    plain, off = make(None), make(None, randomization_params=all_features())
    assert plain.randomizer is None and off.randomizer is None
    assert differences(plain.reset(), off.reset()) == []
    assert differences(saved(plain.state_dict()), saved(off.state_dict())) == []
    assert "randomizer" not in saved(off.state_dict())


def test_randomization_leaves_the_tasks_random_stream_unchanged():
    quiet, noisy = make(None), make(all_features())
    quiet.reset()
    noisy.reset()
    for _ in range(25):
        assert torch.equal(quiet.task.random._state, noisy.task.random._state)
        if (quiet.progress == 0).all():
            assert torch.equal(quiet.task.robot.root_pos, noisy.task.robot.root_pos), "episodes must start equally"
        (one,), (two,) = steps(quiet, 1), steps(noisy, 1)
        assert torch.equal(one.done, two.done)


def test_env_draws_do_not_depend_on_the_number_of_envs():
    few, many = make(all_features(), num_envs=3), make(all_features(), num_envs=20)
    few.reset()
    many.reset()
    for one, two in zip(steps(few, 25), steps(many, 25), strict=True):
        assert torch.equal(one.obs["policy"], two.obs["policy"][:3])


def test_randomized_env_resumes_bit_for_bit():
    env, other = make(all_features(), episode_length=12), make(all_features(), episode_length=12, seed=8)
    env.reset()
    other.reset()
    steps(env, 17, action=0.3)
    steps(other, 5)
    state = saved(env.state_dict())
    later = [fields(step) for step in steps(env, 30, action=-0.4)]
    assert differences(other.load_state_dict(state), state["obs"]) == []
    assert differences(saved(other.state_dict()), state) == []
    for expected, step in zip(later, steps(other, 30, action=-0.4), strict=True):
        assert differences(expected, fields(step)) == []
    assert differences(saved(env.state_dict()), saved(other.state_dict())) == []


def test_unrandomized_run_can_resume_randomized():
    plain, noisy = make(None), make(all_features())
    plain.reset()
    noisy.reset()
    steps(plain, 3)
    mass = value(noisy, "body_mass")
    noisy.load_state_dict(saved(plain.state_dict()))
    assert torch.equal(value(noisy, "body_mass"), mass)
    steps(noisy, 12)
    plain.load_state_dict(saved(noisy.state_dict()))
    steps(plain, 3)


def ramped(**changes: Any) -> dict[str, Any]:
    """Return settings that ramp masses and observations over 100 control steps, with action latency."""
    ramp = {"schedule": "linear", "schedule_steps": 100}
    mass = draw(2.0, 2.0, "scaling", "uniform", names=["hull"], **ramp)
    params = {
        "frequency": 600,
        "observations": draw(5.0, 5.0, "additive", "uniform", **ramp),
        "latency": {"range": [3, 3]},
    }
    return {**params, "actor_params": {"rover": {BODY: {"mass": mass}}}, **changes}


def test_begin_from_continues_schedules():
    old, new = make(ramped()), make(ramped(), num_envs=3, seed=1)
    old.reset()
    steps(old, 50)
    new.reset()
    assert value(new, "body_mass", ["hull"]).unique().tolist() == [2.0]
    new.begin_from(saved(old.state_dict()))
    randomizer: Any = new.randomizer
    assert randomizer.steps == 50
    assert value(new, "body_mass", ["hull"]).unique().tolist() == [3.0], "must be drawn despite frequency=600"
    clean = new.task.observe()["policy"]
    torch.testing.assert_close(new._obs["policy"], clean + 2.5)


def test_resume_draws_new_settings_and_continues_schedules():
    old = make(ramped())
    old.reset()
    steps(old, 50)
    other = ramped(latency={"range": [0, 1]})
    other["actor_params"]["rover"][BODY]["mass"]["range"] = [4.0, 4.0]
    new = make(other, seed=1)
    new.reset()
    new.load_state_dict(saved(old.state_dict()))
    randomizer: Any = new.randomizer
    assert randomizer.steps == 50
    assert value(new, "body_mass", ["hull"]).unique().tolist() == [2.0 * 2.5], "half of four times"
    assert randomizer.latency.delay.max() <= 1, "the old delay of 3 steps is no longer valid"
    steps(new, 5)


def test_randomized_step_does_not_synchronise():
    env: Any = make(all_features(), episode_length=6)
    env.reset()
    steps(env, 3)
    syncs = SyncCounter()

    def uncounted(call: Any) -> Any:
        def paused(*args: Any) -> None:
            with syncs.pause():  # physics on the host
                call(*args)

        return paused

    for method in ("step", "reset", "refresh"):
        setattr(env.sim, method, uncounted(getattr(env.sim, method)))
    with syncs:
        steps(env, 10)
    assert syncs.total == 0, syncs.locations


def test_randomizer_tensors_keep_their_addresses():
    env = make(all_features(), episode_length=6)
    env.reset()
    owners = {"randomizer": env.randomizer, "sensors": env._groups.sensors}

    def kept(kind: Any) -> dict[str, Any]:
        found = {}
        for name, owner in owners.items():
            tensors = {key: tensor.data_ptr() for key, tensor in kept_tensors(vars(owner))}
            numbers = {key: item for key, item in vars(owner).items() if isinstance(item, (int, float))}
            found |= {f"{name}.{key}": value for key, value in (tensors if kind is Tensor else numbers).items()}
        return found

    addresses, numbers = kept(Tensor), kept(float)
    for name in (
        "randomizer.age",
        "randomizer.latency.queue",
        "randomizer.pushes.0.wait",
        "sensors._whole_noise.noise",
    ):
        assert name in addresses
    steps(env, 15)
    assert kept(Tensor) == addresses and kept(float) == numbers


ISAACGYMENVS = yaml.safe_load((Path(__file__).parent / "isaacgymenvs.yaml").read_text())
# Settings that MuJoCo does not support, by task.
NOT_IN_MUJOCO = {
    "Humanoid": ("humanoid", SHAPE, "restitution"),
    **dict.fromkeys(["ShadowHand", "AllegroHand"], ("object", "scale")),
}
# Properties that IsaacGymEnvs scales and that are 0 in our model.
ZERO = {"Ant": ["ant.dof_properties.stiffness"], "ShadowHand": ["hand.tendon_properties.damping"]}


@pytest.mark.parametrize("name", ISAACGYMENVS)
def test_isaacgymenvs_sections_work_except_unsupported_ones(name, caplog):
    params = copy.deepcopy(ISAACGYMENVS[name])

    def made() -> VecEnv:
        task = {"randomize": True, "randomization_params": params}
        return make_env(name, num_envs=3, sim="mujoco", device="cpu", task=task)

    if name in NOT_IN_MUJOCO:
        with pytest.raises(ConfigError, match=NOT_IN_MUJOCO[name][-1]):
            made()
        *path, last = NOT_IN_MUJOCO[name]
        section = params["actor_params"]
        for key in path:
            section = section[key]
        del section[last]
    caplog.clear()
    with caplog.at_level("WARNING"):
        env = made()
        env.reset()
        for step in steps(env, 3):
            assert step.obs["policy"].isfinite().all()
    lines = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    prefix = "task.randomization_params.actor_params."
    assert [line.partition(" has no effect")[0] for line in lines] == [prefix + path for path in ZERO.get(name, [])]
    for actor in params["actor_params"]:
        assert value(env, "body_mass", None, actor).unique(dim=0).shape[0] == 3


def watched_cartpole(params: dict[str, Any]) -> VecEnv:
    return class_env("Cartpole", 3, seed=0, randomize=True, randomization_params=params)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("name", PICTURES)
def test_picture_params_are_drawn_per_env(name: str):
    drawn = draw(0.3, 0.9) if name in ("cam_fovy", "mat_rgba") else draw(0.05, 0.5, "additive")
    env = watched_cartpole({"picture_params": {name: drawn}})
    env.reset()
    found = value(env, name, None, None)
    assert len(found.unique(dim=0)) == 3
    if name in ("cam_quat", "light_dir"):
        torch.testing.assert_close(found.norm(dim=-1), torch.ones(found.shape[:-1]))
    if name == "mat_rgba":
        assert (found[..., 3] == 1.0).all() and found.max() <= 1.0
    if name != "light_pos":  # the light is a direction
        task: Any = env.task
        images = task.images["now"].rgb.float()
        assert all((images[i] - images[j]).abs().max() > 0 for i, j in ((0, 1), (1, 2)))


@pytest.mark.usefixtures("watched")
def test_invalid_picture_params_are_rejected():
    drawn = draw(0.1, 0.2, "additive")
    with pytest.raises(ConfigError, match=r"picture_params\.cam_pos: .*'nwo'.* Did you mean"):
        watched_cartpole({"picture_params": {"cam_pos": {**drawn, "names": ["nwo"]}}})
    with pytest.raises(ConfigError, match=r"'task\.randomization_params\.picture_params\.cam_fov'. Did you mean"):
        watched_cartpole({"picture_params": {"cam_fov": drawn}})


# Errors

PUSH = {"interval_s": [1, 2], "force": [0, 1]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"frequency": 600}, "nothing to randomise"),
    (rover_params(DOF, stiffness=draw(1, 2, names=["motor"])), "nothing to randomise"),
    ({"observation": TWICE}, "Did you mean 'observations'?"),
    ({"frequency": 0}, "task.randomization_params.frequency: expected a positive int"),
    ({"observations": {**TWICE, "rnge": 1}}, "observations.range'?"),
    ({"observations": {"range": [0, 1]}}, "task.randomization_params.observations.operation"),
    ({"actions": {**TWICE, "range": [2, 1]}}, "task.randomization_params.actions: range: expected [low, high]"),
    ({"actions": draw(0, -1, "additive", "gaussian")}, "range: expected [mean, standard deviation]"),
    ({"actions": draw(0, 1, distribution="loguniform")}, "loguniform distribution, got [0.0, 1.0]"),
    ({"actions": {**TWICE, "range_correlated": [3, 2]}}, "range: expected [low, high] with low <= high, got"),
    ({"actions": {**TWICE, "schedule": "linear"}}, "schedule_steps"),
    ({"actions": 3}, "task.randomization_params.actions"),
    ({"latency": {"range": [2, 1]}}, "[min, max] with 0 <= min <= max, got [2, 1]"),
    ({"sim_params": {"gravty": TWICE}}, "Did you mean 'gravity'?"),
    ({"actor_params": {"rovr": {}}}, "actor_params.rovr: the scene has no articulation 'rovr'. Did you mean 'rover'?"),
    ({"actor_params": {"rover": {"scale": TWICE}}}, "rover.scale: not supported: bodies cannot be resized"),
    (rover_params(DOF, dampng=TWICE), "actor_params.rover.dof_properties.dampng'. Did you mean 'damping'?"),
    (rover_params(DOF, damping=draw(1, 2, names=["moter"])), "'rover' has no joint 'moter'. Did you mean 'motor'?"),
    (rover_params(BODY, mass=draw(1, 2, names=["hul"])), "has no body 'hul' with mass. Did you mean 'hull'?"),
    (rover_params(BODY, mass=draw(1, 2, names=["hull", "hull"])), "a list of distinct names or null, got ["),
    (rover_params(DOF, lower=draw(1, 2, names=["motor"])), "'motor' has no limits"),
    (rover_params(BODY, mass={**TWICE, "setup_only": True, "interval_s": 1.0}), "mass: setup_only and interval_s"),
    ({"actor_params": {"crate": {DOF: {"damping": MORE}}}}, "dof_properties.damping: 'crate' has no joints"),
    ({"actor_params": {"rover": {"pushes": {"interval_s": [1, 2]}}}}, "pushes: expected exactly one of velocity"),
    ({"actor_params": {"rover": {"pushes": {**PUSH, "bodies": ["hul"]}}}}, "pushes: 'rover' has no body 'hul'"),
]


@pytest.mark.parametrize(("params", "words"), WRONG, ids=[words[:50] for _, words in WRONG])
def test_invalid_randomization_is_rejected_in_one_line(params, words):
    with pytest.raises(ConfigError) as info:
        make(params)
    assert words in str(info.value) and "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("pushes", "words"),
    [
        ({"velocity": [0, 1]}, r".*base is fixed.* Try force"),
        ({"force": [0, 1], "bodies": ["rail"]}, r".*'rail' of.*fixed"),
        ({"force": [0, 1], "sides": [1]}, "sides requires velocity"),
    ],
)
def test_pushes_that_do_not_fit_are_rejected(pushes, words):
    params = {"actor_params": {"cartpole": {"pushes": {"interval_s": [1, 2], **pushes}}}}
    with pytest.raises(ConfigError, match=rf"cartpole\.pushes: {words}"):
        class_env("Cartpole", 1, randomize=True, randomization_params=params)


# docs/randomization.md


def blocks(document: str, language: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / document).read_text()
    return [part.partition("\n```")[0] for part in text.split(f"```{language}\n")[1:]]


def test_documented_yaml_extends_a_task(tmp_path):
    (text,) = blocks("randomization.md", "yaml")
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "AntRandom.yaml").write_text(text)
    lines = ["task=AntRandom", "task.randomization_params.frequency=300"]
    run = load_spec(compose(lines, tmp_path), lines).cfg
    ant = load_spec(compose(["task=Ant"]), []).cfg
    assert run.task.randomize and run.task.randomization_params["frequency"] == 300
    assert run.task.randomization_params["latency"] == {"range": [0, 2]}
    assert dataclasses.replace(run.task, randomize=False, randomization_params={}) == ant.task
    assert run.algorithm == ant.algorithm


@pytest.mark.parametrize("sim", ["mujoco", pytest.param("mjwarp", marks=pytest.mark.slow)])
def test_documented_examples_run(sim):
    sections = [yaml.safe_load(text)["task"] for text in blocks("randomization.md", "yaml")]
    command = [line for line in blocks("randomization.md", "bash")[0].splitlines() if line.startswith("python train")]
    sections += [compose(shlex.split(line)[2:])["task"] for line in command]
    assert len(sections) == 2
    for section in sections:
        task = {key: section[key] for key in ("randomize", "randomization_params")}
        env = make_env("Ant", num_envs=4, sim=sim, device="cpu", task={**task, "episode_length": 5})
        assert env.randomizer is not None
        env.reset()
        assert (value(env, "body_mass", ["torso"], "ant").unique().numel()) == 4
        for step in steps(env, 12, action=0.5):
            assert all(torch.isfinite(x).all() for x in step.obs.values())
            assert not step.diverged.any()
