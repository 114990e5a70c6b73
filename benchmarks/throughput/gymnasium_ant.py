"""Gymnasium's Ant-v5 as a task, to compare CPU physics on the same model (`benchmarks/bench.py --gymnasium`)."""

from __future__ import annotations

from pathlib import Path

import mujoco
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig
from gpusim_rl.errors import import_extra
from gpusim_rl.sim import Scene, Sim

FORWARD_WEIGHT, HEALTHY_REWARD, CONTROL_COST, CONTACT_COST = 1.0, 1.0, 0.5, 5e-4
HEALTHY_Z = (0.2, 1.0)  # height of the torso [m]
RESET_NOISE = 0.1  # half width of the positions' noise, standard deviation of the velocities' [m, rad, m/s, rad/s]

ANT_V5 = TaskConfig(
    physics_hz=100,
    control_hz=20,  # frame_skip=5
    episode_length=1000,
    clip_actions=1.0,
    clip_observations=None,
    randomize_episode_start=False,
)

_SENSORS = mujoco.mjtSensor
_FORCE_TORQUE_POS = 1 << 1 | 1 << 2 | 1 << 4  # data of a contact sensor
_NET_FORCE = 3  # its reduction


class GymnasiumAnt(Task[TaskConfig]):
    """Ant-v5: the model file, observations (105), reward, termination, noise and time limit of Gymnasium.

    One thing differs. Gymnasium reads positions and contact forces after a step of the Runge-Kutta integrator, and what
    MuJoCo leaves there belongs to an intermediate stage of the last physics step. Here positions are those after the
    step, and contact forces those at the beginning of the last physics step.

    The contact forces come from sensors of its own; it runs on `mujoco`, `mjwarp`.
    """

    Config = TaskConfig

    @classmethod
    def scene(cls, cfg: TaskConfig) -> Scene:
        gymnasium = import_extra("gymnasium", "bench", "--gymnasium")
        assert gymnasium.__file__ is not None
        file = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "ant.xml"
        scene = Scene(cfg.physics_hz, integrator="rk4", cone="pyramidal")  # what the file says
        scene.add("ant", file)
        for body in scene.spec.bodies[1:]:
            scene.spec.add_sensor(
                type=_SENSORS.mjSENS_CONTACT,
                objtype=mujoco.mjtObj.mjOBJ_BODY,
                objname=body.name,
                intprm=[_FORCE_TORQUE_POS, _NET_FORCE, 1],
            )
        com = {"type": _SENSORS.mjSENS_SUBTREECOM, "objtype": mujoco.mjtObj.mjOBJ_BODY, "objname": "ant/torso"}
        scene.spec.add_sensor(**com)
        return scene

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.robot = sim.articulation("ant")
        self.num_actions = len(self.robot.actuator_names)
        self.sensors: Tensor = sim.sensordata  # type: ignore[attr-defined]
        self.x_before = torch.zeros(self.num_envs, device=self.device)

    def reset(self, where: Bool[Tensor, " envs"]) -> None:
        robot, joints = self.robot, len(self.robot.joint_names)
        pos, quat, joint_pos = self.random.uniform(-RESET_NOISE, RESET_NOISE, 7 + joints).split([3, 4, joints], dim=1)
        lin_vel, ang_vel, joint_vel = self.random.normal(0.0, RESET_NOISE, 6 + joints).split([3, 3, joints], dim=1)
        robot.set_state(
            where,
            root_pos=robot.default_root_pos + pos,
            root_quat=torch.nn.functional.normalize(robot.default_root_quat + quat, dim=1),
            root_lin_vel=lin_vel,
            root_ang_vel=ang_vel,
            joint_pos=robot.default_joint_pos + joint_pos,
            joint_vel=joint_vel,
        )

    def apply_action(self, action: Float[Tensor, "envs actions"]) -> None:
        self.x_before.copy_(self.robot.root_pos[:, 0])
        self.robot.actuate(action)

    def observe(self) -> Float[Tensor, "envs 105"]:
        robot = self.robot
        position = [robot.root_pos[:, 2:], robot.root_quat, robot.joint_pos]
        velocity = [robot.root_lin_vel, robot.root_ang_vel_local, robot.joint_vel]
        return torch.cat([*position, *velocity, self._contact_forces()], dim=1)

    def rewards(self) -> dict[str, Float[Tensor, " envs"]]:
        return {
            "forward": (FORWARD_WEIGHT / self.dt) * (self.robot.root_pos[:, 0] - self.x_before),
            "survive": HEALTHY_REWARD * self._healthy().float(),
            "control": -CONTROL_COST * self.actions.square().sum(dim=1),
            "contact": -CONTACT_COST * self._contact_forces().square().sum(dim=1),
        }

    def terminated(self) -> Bool[Tensor, " envs"]:
        return ~self._healthy()

    def _healthy(self) -> Bool[Tensor, " envs"]:
        z = self.robot.root_pos[:, 2]
        return (z >= HEALTHY_Z[0]) & (z <= HEALTHY_Z[1])

    def _contact_forces(self) -> Float[Tensor, "envs 78"]:
        """MuJoCo's `cfrc_ext` of all bodies but the env: torque about the robot's centre of mass and force, clipped.

        A contact sensor tells what the body does to the ground, about the mean of the contact points.
        """
        wrenches, com = self.sensors.split([self.sensors.shape[1] - 3, 3], dim=1)
        force, torque, pos = wrenches.unflatten(1, (-1, 9)).split(3, dim=2)
        torque = torque + torch.linalg.cross(pos - com[:, None], force)
        return -torch.cat([torque, force], dim=2).clamp(-1.0, 1.0).flatten(1)
