"""What an env looked like before its physics went bad: kept on the device, written down once, to be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mujoco
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gpusim_rl.env.math import quat_rotate
from gpusim_rl.sim import Articulation, Scene, Sim

EnvState = dict[str, dict[str, Tensor]]
"""State of one env: by articulation, the arguments of `Articulation.set_state`, without the leading dimension."""


# The local angular velocity is a view where the simulator allows; it is turned to the world's frame when it is read.
_ROOT = ("root_pos", "root_quat", "root_lin_vel", "root_ang_vel_local")


class FirstDiverged:
    """State and action from which the first env diverged: one row on the device, found without reading a mask.

    Args:
        sim: The simulator.
        num_actions: Size of the action vector.
    """

    def __init__(self, sim: Sim, num_actions: int) -> None:
        self._articulations = {name: sim.articulation(name) for name in sim.scene.articulation_names}
        self._columns = [
            (name, key) for name, found in self._articulations.items() for key in _state_keys(sim.scene, found)
        ]
        width = sum(part.shape[1] for part in self._parts())
        self._before = torch.zeros(sim.num_envs, width, device=sim.device)
        self._row = torch.zeros(1, width + num_actions, device=sim.device)
        self._origin = torch.full((2,), -1, dtype=torch.int64, device=sim.device)  # env and control step
        self._found = torch.zeros((), dtype=torch.bool, device=sim.device)

    def before_step(self) -> None:
        """Remembers all envs as the physics step will find them."""
        torch.cat(self._parts(), dim=1, out=self._before)

    def after_step(
        self,
        diverged: Bool[Tensor, " envs"],
        action: Float[Tensor, "envs actions"],
        progress: Int[Tensor, " envs"],
    ) -> None:
        """Keeps the first env that diverged, if it is the first one ever.

        Args:
            diverged: Envs that the step broke.
            action: What the step was taken with.
            progress: Control steps since the start of each episode, this one included.
        """
        world = diverged.int().argmax()[None]
        row = torch.cat([self._before.index_select(0, world), action.index_select(0, world)], dim=1)
        origin = torch.cat([world, progress.index_select(0, world)])
        new = diverged.any() & ~self._found
        self._row.copy_(torch.where(new, row, self._row))
        self._origin.copy_(torch.where(new, origin, self._origin))
        self._found.logical_or_(new)

    def read(self) -> dict[str, Any] | None:
        """The first diverged env as `env`, `episode_step`, `state` and `action`; None if there was none.

        It waits for the device.
        """
        if not self._found:
            return None
        before, action = self._row[0].cpu().tensor_split([self._before.shape[1]])
        state: EnvState = {name: {} for name in self._articulations}
        values = before.split([part.shape[1] for part in self._parts()])
        for (name, key), value in zip(self._columns, values, strict=True):
            state[name][key] = value.clone()
        for of_articulation in state.values():
            local = of_articulation.pop("root_ang_vel_local", None)
            if local is not None:
                of_articulation["root_ang_vel"] = quat_rotate(of_articulation["root_quat"][None], local[None])[0]
        world, episode_step = self._origin.tolist()
        return {"env": world, "episode_step": episode_step, "state": state, "action": action.clone()}

    def _parts(self) -> list[Tensor]:
        return [getattr(self._articulations[name], key) for name, key in self._columns]


def put_state(sim: Sim, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Puts the state of one env into all envs.

    Args:
        sim: A simulator of the same scene.
        state: As in `FirstDiverged.read`.
    """
    everywhere = torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device)
    sim.reset(everywhere)
    for name, values in state.items():
        here = {key: value.to(sim.device).expand(sim.num_envs, -1) for key, value in values.items()}
        sim.articulation(name).set_state(everywhere, **here)
    sim.refresh()


def _state_keys(scene: Scene, articulation: Articulation) -> tuple[str, ...]:
    root = scene.model.body(f"{articulation.name}/{articulation.body_names[0]}")
    joint = int(root.jntadr[0])
    free = joint >= 0 and scene.model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE.value
    return (*(_ROOT if free else ()), "joint_pos", "joint_vel")
