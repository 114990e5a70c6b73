"""Small scenes and their simulators, for tests of physics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mujoco
import torch
from torch import Tensor

from gpusim_rl.settings import compose as composing
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim import Articulation, Scene, Sim, SimChoice, make_sim

ANT = Path(__file__).parents[2] / "tasks" / "assets" / "ant.xml"
FEET = ["front_left_foot", "front_right_foot", "back_left_foot", "back_right_foot"]

# A ball that falls, bounces and rolls: contact, a free joint, no actuator.
BALL = """
<mujoco>
  <worldbody>
    <body name="ball" pos="0 0 0.5">
      <freejoint/>
      <geom name="ball" type="sphere" size="0.1" mass="2" condim="3"/>
    </body>
  </worldbody>
</mujoco>
"""

# An arm on a fixed base: a limited hinge with a motor, and a free hinge with damping and armature.
ARM = """
<mujoco>
  <default>
    <geom type="capsule" contype="0" conaffinity="0"/>
  </default>
  <worldbody>
    <body name="base" pos="0 0 1">
      <geom type="box" size="0.1 0.1 0.1" mass="1"/>
      <body name="upper" pos="0 0.1 0">
        <joint name="shoulder" axis="0 1 0" range="-60 90" limited="true" armature="0.02"/>
        <geom size="0.04" fromto="0 0 0 0.3 0 0" mass="0.5"/>
        <body name="lower" pos="0.3 0 0">
          <joint name="elbow" axis="0 0 1" damping="0.05"/>
          <geom size="0.03" fromto="0 0 0 0.2 0.1 0" mass="0.3"/>
        </body>
      </body>
    </body>
  </worldbody>
  <actuator>
    <motor name="shoulder" joint="shoulder" gear="3" ctrlrange="-1 1"/>
  </actuator>
</mujoco>
"""


def sim_config(**changes: Any) -> SimConfig:
    """Return the defaults of cfg/sim, on one thread."""
    return SimConfig(**{**composing.compose(["~task"])["sim"], "num_threads": 1, **changes})


def scene_with(physics_hz: float, ground: bool = False, **robots: str | Path | mujoco.MjSpec) -> Scene:
    """Return a scene with robots by name, each the text of an MJCF, a file or a spec."""
    scene = Scene(physics_hz)
    if ground:
        scene.add_ground()
    for name, robot in robots.items():
        scene.add(name, mujoco.MjSpec.from_string(robot) if isinstance(robot, str) else robot)
    return scene


def ant_scene() -> Scene:
    scene = Scene(physics_hz=120, integrator="implicit", cone="elliptic")  # the simulators agree best with these
    scene.add_ground()
    scene.add("ant", ANT)
    scene.add_contact_sensor("ant", FEET)
    return scene


def ball_scene() -> Scene:
    scene = scene_with(200, ground=True, ball=BALL)
    scene.add_contact_sensor("ball", ["ball"])
    return scene


def franka_scene(physics_hz: float = 240) -> Scene:
    scene = Scene(physics_hz, integrator="implicit")
    scene.add("franka", ANT.with_name("franka_torque.xml"), pos=(0.4, 0.0, 0.2), quat=(0.8, 0.0, 0.0, 0.6))
    return scene


def arm_scene() -> Scene:
    return scene_with(200, arm=ARM)


def make(name: str, scene: Scene, num_envs: int, device: str = "cpu", **changes: Any) -> Sim:
    if name == "mujoco-shared":
        name, changes = "mujoco", {**changes, "persistent": False}
    choice = SimChoice(name, torch.device(device), "test")
    return make_sim(scene, choice, num_envs, sim_config(name=name, **changes))


def advance(sim: Sim, steps: int) -> None:
    """Step one by one: capturing a Warp graph of 400 steps takes 10 s."""
    for _ in range(steps):
        sim.step(1)


def everywhere(sim: Sim) -> Tensor:
    return torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device)


def only(sim: Sim, *env_ids: int) -> Tensor:
    mask = torch.zeros(sim.num_envs, dtype=torch.bool, device=sim.device)
    mask[list(env_ids)] = True
    return mask


def randomize_ants(ants: list[Articulation], seed: int = 0) -> None:
    """Write the same random states, many in contact, and actions to every Ant."""
    num = ants[0].joint_pos.shape[0]
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=random)

    # Half roughly upright at walking height, half in any orientation.
    upright = torch.tensor([1.0, 0.0, 0.0, 0.0]) + 0.2 * normal(num, 4)
    quat = torch.where(torch.arange(num)[:, None] % 2 == 0, upright, normal(num, 4))
    low, high = ants[0].joint_limits.cpu().unbind(dim=1)
    state = {
        "root_pos": torch.tensor([0.0, 0.0, 0.5]) + normal(num, 3) * torch.tensor([1.0, 1.0, 0.15]),
        "root_quat": torch.nn.functional.normalize(quat, dim=1),
        "root_lin_vel": normal(num, 3),
        "root_ang_vel": 2.0 * normal(num, 3),
        "joint_pos": low + (high - low) * (1.2 * uniform(num, 8) - 0.1),  # some beyond their limits
        "joint_vel": 3.0 * normal(num, 8),
    }
    control = 2.0 * uniform(num, 8) - 1.0
    for ant in ants:
        device = ant.joint_pos.device
        where = torch.ones(num, dtype=torch.bool, device=device)
        ant.set_state(where, **{name: value.to(device) for name, value in state.items()})
        ant.actuate(control.to(device))
