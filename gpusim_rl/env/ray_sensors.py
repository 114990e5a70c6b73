"""Ray sensors for tasks: height scans and lidars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.errors import TaskError
from gpusim_rl.sim import Bodies, Sim, Sites
from gpusim_rl.sim.quaternion import quat_from_axis_angle, quat_rotate, quat_yaw

Pattern = tuple[Float[Tensor, "rays 3"], Float[Tensor, "rays 3"]]
"""Origins [m] and unit directions of rays, in the frame that carries them."""


def grid(length: float, width: float, spacing: float, *, above: float = 10.0) -> Pattern:
    """Return a height scan: rays pointing down from `above` the frame, `spacing` apart over `length` x `width` [m]."""
    if not min(length, width) >= 0.0 < spacing:
        raise TaskError(key="grid()", expected="length, width >= 0 and spacing > 0 [m]", got=(length, width, spacing))
    counts = [1 + round(size / spacing) for size in (length, width)]
    x, y = (spacing * (torch.arange(count) - 0.5 * (count - 1)) for count in counts)
    points = torch.cartesian_prod(x, y)
    origins = torch.cat([points, torch.full((len(points), 1), above)], dim=1)
    return origins, torch.tensor([0.0, 0.0, -1.0]).expand_as(origins)


def lidar(rays: int, *, elevations: Sequence[float] = (0.0,), fov: float = 2.0 * math.pi) -> Pattern:
    """Return rings of rays.

    Args:
        rays: Rays per ring. The first ray of a full ring points along x.
        elevations: Angle of each ring above the frame's x-y plane [rad].
        fov: Angle that a ring covers, centred on x [rad].
    """
    if rays < 1 or not 0.0 < fov <= 2.0 * math.pi:
        raise TaskError(key="lidar()", expected="rays > 0 and fov in (0, 2 pi] [rad]", got=(rays, fov))
    whole = fov == 2.0 * math.pi
    turn = torch.arange(rays) * (fov / rays) if whole else torch.linspace(-0.5 * fov, 0.5 * fov, rays)
    rings = []
    for elevation in elevations:
        flat, up = math.cos(elevation), math.sin(elevation)
        rings.append(torch.stack([flat * turn.cos(), flat * turn.sin(), torch.full_like(turn, up)], dim=1))
    directions = torch.cat(rings)
    return torch.zeros_like(directions), directions


class RayCaster:
    """Ray sensor on a body or site of a robot; create it once, in the task's `__init__`.

        torso = self.robot.bodies(["torso"])
        self.scan = RayCaster(sim, torso, grid(1.6, 1.0, 0.1), turn="yaw", ignore=["robot"], max_distance=20.0)
        self.lidar = RayCaster(sim, self.robot.sites(["lidar"]), lidar(360), ignore=["robot"], max_distance=30.0)

    Reading a property casts all rays.

    Args:
        sim: Simulator.
        frame: Body or site that carries the rays, one per env.
        pattern: Rays in the frame, from `grid`, `lidar`, or your own code.
        turn: Rotation of the pattern: the rotation of the frame, or only its yaw.
        ignore: Articulations that the rays pass through.
        max_distance: Range [m].
    """

    def __init__(
        self,
        sim: Sim,
        frame: Bodies | Sites,
        pattern: Pattern,
        *,
        turn: Literal["frame", "yaw"] = "frame",
        ignore: Sequence[str] = (),
        max_distance: float,
    ) -> None:
        origins, directions = pattern
        if origins.shape != directions.shape or origins.dim() != 2 or origins.shape[1] != 3:
            got = (list(origins.shape), list(directions.shape))
            raise TaskError(key="RayCaster", expected="origins and directions of shape [rays, 3]", got=got)
        if frame.pos.shape[1] != 1:
            raise TaskError(key="RayCaster", expected="a frame with one body or site", got=frame.pos.shape[1])
        if turn not in ("frame", "yaw"):
            raise TaskError(key="RayCaster.turn", expected="'frame' or 'yaw'", got=turn)
        self._frame, self._turn, self._max_distance = frame, turn, max_distance
        self._origins, self._directions = origins.to(sim.device), directions.to(sim.device)
        self._up = torch.tensor([0.0, 0.0, 1.0], device=sim.device).expand(sim.num_envs, 3)
        self._rays = sim.rays(len(origins), ignore)

    @property
    def distance(self) -> Float[Tensor, "envs rays"]:
        """Distance to the hit of each ray [m]; `max_distance` without a hit."""
        return self._cast()[0]

    @property
    def points(self) -> Float[Tensor, "envs rays 3"]:
        """Hit point of each ray [m], world frame; the point at `max_distance` without a hit."""
        distance, origin, direction = self._cast()
        return torch.addcmul(origin, distance[..., None], direction)

    def _cast(self) -> tuple[Tensor, Tensor, Tensor]:
        quat = self._frame.quat
        if self._turn == "yaw":
            quat = quat_from_axis_angle(self._up, quat_yaw(quat[:, 0]))[:, None]
        shape = (len(quat), *self._origins.shape)
        quat = quat.expand(*shape[:-1], 4)
        origin = self._frame.pos + quat_rotate(quat, self._origins.expand(shape))
        direction = quat_rotate(quat, self._directions.expand(shape))
        distance = self._rays.cast(origin, direction)
        far = self._max_distance
        return torch.where(distance < 0.0, far, distance).clamp(max=far), origin, direction
