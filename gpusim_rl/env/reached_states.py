"""Resets to states that earlier episodes reached."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from gpusim_rl.env.nan_guard import state_keys
from gpusim_rl.env.random import EnvRandom
from gpusim_rl.env.stateful import kept_tensors
from gpusim_rl.env.task import ResetFromConfig, Task
from gpusim_rl.errors import ConfigError, warn
from gpusim_rl.sim import Sim


class ReachedStates:
    """Ring buffer of reached states, for initial states that exploration alone rarely reaches.

    Cf. Salimans and Chen 2018 (arXiv 1812.03381: states of a demonstration), Florensa et al. 2017 (arXiv 1707.05300:
    states from which the goal is sometimes reached). A state comprises all articulations and the task's per-env
    tensors. A capacity below `num_envs` raises ConfigError.
    """

    def __init__(self, cfg: ResetFromConfig, task: Task[Any], sim: Sim, seed: int) -> None:
        envs = sim.num_envs
        if cfg.capacity < envs:
            key, expected = "task.reset_from.capacity", f"at least num_envs={envs}"
            raise ConfigError(key=key, expected=expected, got=cfg.capacity, hint=f"Try {key}={4 * envs}")
        self._cfg, self._task = cfg, task
        self._random = EnvRandom(envs, sim.device, seed + 1)
        self._articulations = {name: sim.articulation(name) for name in sim.scene.articulation_names}
        world = {"root_ang_vel_local": "root_ang_vel"}  # stored in the world frame, as in old checkpoints
        self._fields = [(name, world.get(key, key)) for name, a in self._articulations.items() for key in state_keys(a)]
        # An extra row receives the states that are not kept.
        self._states = [self._ring(value) for value in self._sim_state()]
        self._tensors = {name: self._ring(value) for name, value in self._task_tensors().items()}
        self.total = torch.zeros((), dtype=torch.int64, device=sim.device)

    def seed(self, seed: int) -> None:
        """Restart the random streams from a seed."""
        self._random.seed(seed + 1)

    def _ring(self, value: Tensor) -> Tensor:
        return value.new_zeros(self._cfg.capacity + 1, *value.shape[1:])

    def _sim_state(self) -> list[Tensor]:
        return [getattr(self._articulations[name], key) for name, key in self._fields]

    def _task_tensors(self) -> dict[str, Tensor]:
        task = self._task
        shared = {id(task.actions), id(task.progress)}  # owned by VecEnv
        kept = kept_tensors(vars(task))
        return {name: x for name, x in kept if x.ndim and x.shape[0] == task.num_envs and id(x) not in shared}

    def keep(self, where: Bool[Tensor, " envs"]) -> None:
        """Store the states of a random subset of the masked envs, bool [num_envs]."""
        capacity = self._cfg.capacity
        chosen = where & (self._random.uniform() < self._cfg.chance)
        place = (self.total + chosen.cumsum(0) - 1).remainder_(capacity).masked_fill_(~chosen, capacity)
        for ring, value in zip(self._states, self._sim_state(), strict=True):
            ring.index_copy_(0, place, value)
        for name, value in self._task_tensors().items():
            self._tensors[name].index_copy_(0, place, value)
        self.total += chosen.sum()

    def begin(self, where: Bool[Tensor, " envs"]) -> None:
        """Write stored states into a fraction of the envs that the task has just reset, bool [num_envs]."""
        filled = self.total.clamp(max=self._cfg.capacity)
        chance, which = self._random.uniform(0.0, 1.0, 2).unbind(dim=1)
        chosen = where & (chance < self._cfg.share) & (filled > 0)
        place = (which * filled).long()
        rows: dict[str, dict[str, Tensor]] = {name: {} for name in self._articulations}
        for (name, key), ring in zip(self._fields, self._states, strict=True):
            rows[name][key] = ring.index_select(0, place)
        for name, state in rows.items():
            self._articulations[name].set_state(chosen, **state)
        tensors = self._task_tensors()
        for name, ring in self._tensors.items():
            mask = chosen.view(-1, *[1] * (ring.ndim - 1))
            tensors[name].copy_(torch.where(mask, ring.index_select(0, place), tensors[name]))

    def state_dict(self) -> dict[str, Any]:
        """Return the written rows of the ring, and the random streams. Reads the number of rows from the device."""
        tensors = {name: value[: self._filled()].clone() for name, value in self._rings().items()}
        return {"tensors": {**tensors, "total": self.total.clone()}, "random": self._random.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; if the stored states do not fit capacity or task, warn and discard them all."""
        self._random.load_state_dict(state["random"])
        tensors, rings = dict(state["tensors"]), self._rings()
        self.total.copy_(tensors.pop("total"))
        rows = self._filled()
        expected = {name: (rows, *ring.shape[1:]) for name, ring in rings.items()}
        if {name: tuple(value.shape) for name, value in tensors.items()} != expected:
            self.total.zero_()
            warn("discarding the checkpoint's reached states: they do not fit the current task settings")
            return
        for name, value in tensors.items():
            rings[name][:rows].copy_(value)

    def _rings(self) -> dict[str, Tensor]:
        return dict(kept_tensors({"_states": self._states, "_tensors": self._tensors}))

    def _filled(self) -> int:
        return min(int(self.total), self._cfg.capacity)
