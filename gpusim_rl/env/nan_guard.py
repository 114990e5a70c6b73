"""NaN guard: state and action before the first divergence, for a replay.

`Sim.diverged` flags NaN, infinite and unphysically large states; `VecEnv` adds non-finite actions and controls.
`run/finite_check.py` finds NaN in observations, rewards, losses and policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from gpusim_rl.env.math import quat_rotate
from gpusim_rl.sim import Articulation, Sim
from gpusim_rl.sim.interface import not_finite

EnvState = dict[str, dict[str, Tensor]]
"""State of one env: by articulation, the arguments of `Articulation.set_state`, without the env dimension."""

# Angular velocity in the root's frame is a view of the simulator's memory; `read` rotates it to the world frame.
_ROOT = ("root_pos", "root_quat", "root_lin_vel", "root_ang_vel_local")


class NanGuard:
    """State and action before the first divergence of a run, in fixed device memory."""

    def __init__(self, sim: Sim, num_actions: int) -> None:
        self._articulations = {name: sim.articulation(name) for name in sim.scene.articulation_names}
        self._fields = [(name, key) for name, a in self._articulations.items() for key in state_keys(a)]
        self._sim, self._widths = sim, [*(value.shape[1] for value in self._state()), num_actions, num_actions]
        # State, applied action and given action of all envs: in the newest step, or in that of the first divergence.
        self._before = torch.zeros(sim.num_envs, sum(self._widths), device=sim.device)
        self._progress = torch.zeros(sim.num_envs, dtype=torch.int64, device=sim.device)
        self._bad_input, self._diverged, self._diverged_ever = (
            torch.zeros(sim.num_envs, dtype=torch.bool, device=sim.device) for _ in range(3)
        )
        self._found = torch.zeros((), dtype=torch.bool, device=sim.device)

    def before_step(
        self, action: Shaped[Tensor, "envs actions"], applied: Shaped[Tensor, "envs actions"]
    ) -> Bool[Tensor, " envs"]:
        """Store states and actions before the physics, until an env diverges.

        `applied` is the action after limits and noise. Return the envs with a non-finite action, control or force.
        """
        numbers = torch.cat([*self._state(), applied, action, *(x.flatten(1) for x in self._sim.inputs)], dim=1)
        self._keep(numbers[:, : self._before.shape[1]], self._before)
        return not_finite([numbers[:, self._before.shape[1] - action.shape[1] :]])

    def after_step(
        self, diverged: Bool[Tensor, " envs"], progress: Int[Tensor, " envs"], bad_input: Bool[Tensor, " envs"]
    ) -> None:
        """Record the outcome of a step; `bad_input`: envs with a non-finite action, control or force."""
        self._keep(diverged, self._diverged)
        self._keep(progress, self._progress)
        self._keep(bad_input, self._bad_input)
        self._diverged_ever |= diverged
        torch.any(self._diverged_ever, dim=0, out=self._found)

    def forget(self) -> None:
        """Clear all recorded divergences."""
        self._diverged_ever.zero_()
        self._found.zero_()

    def _keep(self, new: Tensor, kept: Tensor) -> None:
        torch.where(self._found, kept, new, out=kept)

    def read(self) -> dict[str, Any] | None:
        """Return the first divergence, or None; synchronises with the device.

        Returns:
            `env`: env index. `episode_step`: control step of its episode. `cause`: `physics`, or `action` or
                `apply_action` if the action or a control is not finite. `diverged_envs`: number of envs that ever
                diverged. `state`: an `EnvState`. `action`: shape [num_actions].
        """
        if not self._found:
            return None
        env_id = int(self._diverged.int().argmax())
        *row, action, given = self._before[env_id].cpu().split(self._widths)
        bad_action = not given.isfinite().all()
        state: EnvState = {name: {} for name in self._articulations}
        for (name, key), value in zip(self._fields, row, strict=True):
            state[name][key] = value.clone()
        for values in state.values():
            if (local := values.pop("root_ang_vel_local", None)) is not None:
                values["root_ang_vel"] = quat_rotate(values["root_quat"][None], local[None])[0]
        cause = "apply_action" if self._bad_input[env_id] else "physics"
        return {
            "env": env_id,
            "episode_step": int(self._progress[env_id]),
            "cause": "action" if bad_action else cause,
            "diverged_envs": int(self._diverged_ever.sum()),
            "state": state,
            "action": (given if bad_action else action).clone(),
        }

    def _state(self) -> list[Tensor]:
        return [getattr(self._articulations[name], key) for name, key in self._fields]


def put_state(sim: Sim, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write a state from `NanGuard.read` into all envs of a simulator of the same scene."""
    everywhere = torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device)
    sim.reset(everywhere)
    for name, values in state.items():
        expanded = {key: value.to(sim.device).expand(sim.num_envs, -1) for key, value in values.items()}
        sim.articulation(name).set_state(everywhere, **expanded)
    sim.refresh()


def state_keys(articulation: Articulation) -> tuple[str, ...]:
    """Return the names of the properties that make up an articulation's state."""
    moved = ("mocap_poses",) if articulation.mocap_poses.shape[1] else ()
    return (*(_ROOT if articulation.free_root else ()), "joint_pos", "joint_vel", *moved)
