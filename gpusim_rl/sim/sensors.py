"""Sensors and sites of articulations, from what MuJoCo's model says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mujoco
import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.errors import TaskError, did_you_mean
from gpusim_rl.sim.interface import Bodies
from gpusim_rl.sim.quaternion import quat_multiply, quat_rotate


class Sensed(Protocol):
    """A simulation whose sensors are MuJoCo's."""

    def current_sensors(self, stage: int) -> Float[Tensor, "envs nsensordata"]:
        """See `MujocoTensors`."""
        ...


class MujocoSensor:
    """See `gpusim_rl.sim.Sensor`."""

    def __init__(self, sim: Sensed, model: mujoco.MjModel, sensor: int) -> None:
        self._sim, self._stage = sim, int(model.sensor_needstage[sensor])
        first, self.size = int(model.sensor_adr[sensor]), int(model.sensor_dim[sensor])
        self._columns = slice(first, first + self.size)
        sim.current_sensors(self._stage)

    @property
    def data(self) -> Float[Tensor, "envs size"]:
        return self._sim.current_sensors(self._stage)[:, self._columns]


class SitesOfBodies:
    """See `gpusim_rl.sim.Sites`: points that are fixed to bodies, on any simulator that has `bodies`.

    Args:
        bodies: The body of each site.
        pos: Where the sites are in the frames of their bodies [m].
        quat: How they are turned there, wxyz.
    """

    def __init__(self, bodies: Bodies, pos: Float[Tensor, "sites 3"], quat: Float[Tensor, "sites 4"]) -> None:
        self._bodies, self._pos, self._quat = bodies, pos, quat

    def _lever(self) -> Float[Tensor, "envs sites 3"]:
        quat = self._bodies.quat
        return quat_rotate(quat, self._pos.expand(*quat.shape[:-1], 3))

    @property
    def pos(self) -> Float[Tensor, "envs sites 3"]:
        return self._bodies.pos + self._lever()

    @property
    def quat(self) -> Float[Tensor, "envs sites 4"]:
        quat = self._bodies.quat
        return quat_multiply(quat, self._quat.expand_as(quat))

    @property
    def lin_vel(self) -> Float[Tensor, "envs sites 3"]:
        return self._bodies.lin_vel + torch.linalg.cross(self._bodies.ang_vel, self._lever())

    @property
    def ang_vel(self) -> Float[Tensor, "envs sites 3"]:
        return self._bodies.ang_vel


def find_elements(kind: str, names: Sequence[str], articulation: str, prefix: str, model: mujoco.MjModel) -> list[int]:
    """Ids of an articulation's sites or sensors.

    Args:
        kind: `site` or `sensor`.
        names: As in the articulation's file.
        articulation: Its name, for messages.
        prefix: What their names begin with in the model.
        model: Of the scene.

    Raises:
        TaskError: There is no such element.
    """
    element = getattr(model, kind)
    everything = (element(i).name for i in range(getattr(model, f"n{kind}")))
    known = [name.removeprefix(prefix) for name in everything if name.startswith(prefix)]
    for name in names:
        if name not in known:
            raise TaskError(
                f"{articulation!r} has no {kind} {name!r}.{did_you_mean(name, known)} It has {known or 'none'}"
            )
    return [element(prefix + name).id for name in names]
