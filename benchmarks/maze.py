"""A maze of sparse reward for `rnd.py`: a ball in a U, from the end of one arm to that of the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import mujoco
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Parts, Task, TaskConfig
from gpusim_rl.sim import Scene, Sim

ARM, WIDTH, WALL = 5.0, 1.0, 0.1  # m: inner length, inner width, thickness
BALL = """
<mujoco model="ball">
  <worldbody>
    <body name="ball" pos="0 0 0.1">
      <joint name="x" type="slide" axis="1 0 0"/>
      <joint name="y" type="slide" axis="0 1 0"/>
      <geom name="ball" type="sphere" size="0.1" mass="1" friction="0 0 0"/>
    </body>
  </worldbody>
  <actuator>
    <velocity name="x" joint="x" kv="10"/>
    <velocity name="y" joint="y" kv="10"/>
  </actuator>
</mujoco>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MazeConfig(TaskConfig):
    """30 s at 10 Hz."""

    physics_hz: float = 50.0
    control_hz: float = 10.0
    episode_length: int = 300
    clip_actions: float = 1.0
    clip_observations: float | None = None
    randomize_episode_start: bool = True


class Maze(Task[MazeConfig]):
    """Maze: a ball finds the way from the end of one arm of a U to the end of the other.

    The arms are 5 m long and 1 m wide, and the way is 9.5 m.

    Action space: 2 numbers in [-1, 1], the velocity along x and y that the motors aim at [m/s].

    Observation space:

    | num | name | observation             | unit |
    |-----|------|-------------------------|------|
    | 0-1 | pos  | position from the start | m    |
    | 2-3 | vel  | velocity                | m/s  |

    Reward per step: 1 at the end of the other arm, else 0.

    Start: 0.3 m from the end of the first arm, +-0.1 m. Terminates at the end of the other arm.
    """

    Config = MazeConfig
    units: ClassVar = {"pos": "m", "vel": "m/s"}

    @classmethod
    def scene(cls, cfg: MazeConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        scene.add_ground()
        scene.add("ball", mujoco.MjSpec.from_string(BALL))
        half, across = 0.5 * WALL, WIDTH + 0.5 * WALL  # the middle of the start is at x = y = 0
        left, right, low, high = -0.5 * WIDTH, 1.5 * WIDTH + WALL, -0.5, ARM - 0.5
        middle, top = 0.5 * (low + high), 0.5 * WIDTH + half
        walls = {
            "left": ([left - half, middle], [half, 0.5 * ARM]),
            "right": ([right + half, middle], [half, 0.5 * ARM]),
            "bottom": ([top, low - half], [across + half, half]),
            "top": ([top, high + half], [across + half, half]),
            "between": ([top, middle - 0.5 * WIDTH], [half, 0.5 * (ARM - WIDTH)]),
        }
        for name, (pos, size) in walls.items():
            box = mujoco.mjtGeom.mjGEOM_BOX
            scene.spec.worldbody.add_geom(name=name, type=box, pos=[*pos, 0.1], size=[*size, 0.1])
        return scene

    def __init__(self, cfg: MazeConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("ball")
        self.num_actions = 2

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        pos = self.random.uniform(-0.1, 0.1, 2)
        self.robot.set_state(where, joint_pos=pos, joint_vel=torch.zeros_like(pos))

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.robot.actuate(action)

    def observe(self) -> dict[str, Parts]:
        return {"policy": {"pos": self.robot.joint_pos, "vel": self.robot.joint_vel}}

    def terminated(self) -> Bool[Tensor, " envs"]:
        x, y = self.robot.joint_pos.unbind(dim=1)
        return (x > 0.5 * WIDTH + WALL) & (y < 0.0)

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        return {"goal": self.terminated().float()}
