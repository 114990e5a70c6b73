"""Affine map from actions to actuator controls, measured so that no task has to declare it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpusim_rl.env import VecEnv
from gpusim_rl.view.player import random_action

STEPS = 64  # measured control steps per env
TOLERANCE = 1e-5  # maximum deviation of a control, relative for magnitudes above 1; float32 rounds by 1e-7


@dataclass(frozen=True)
class ControlMap:
    """Affine map: control[i] = offset[i] + scale[i] * action[source[i]] for each actuator i of the scene."""

    offset: tuple[float, ...]  # control at action 0
    scale: tuple[float, ...]  # control per action
    source: tuple[int, ...]  # action column of the actuator; 0 if `scale` is 0
    samples: int  # measured control steps
    deviation: float  # largest deviation of a control, relative for magnitudes above 1

    def names(self, actuators: Sequence[str], num_actions: int) -> list[str] | None:
        """Return the actuator of each action column; None unless each drives exactly one."""
        columns = [column for column, scale in zip(self.source, self.scale, strict=True) if scale != 0.0]
        if sorted(columns) != list(range(num_actions)):
            return None
        return [actuators[self.source.index(column)] for column in range(num_actions)]


def measure(env: VecEnv, seed: int) -> ControlMap | None:
    """Fit a map to the controls that random actions produce in random episodes.

    Return None if a control depends on several action columns or earlier actions, if the task also applies forces, or
    if the simulator has no MuJoCo controls.
    """
    sim, task = env.sim, env.task
    inputs = [getattr(sim, name, None) for name in ("ctrl", "qfrc_applied", "xfrc_applied")]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if len(tensors) < len(inputs) or not sim.scene.model.nu:
        return None
    control, *forces = tensors
    generator = torch.Generator(env.device).manual_seed(seed)
    actions, controls, forced = [], [], False
    for _ in range(STEPS):
        action = random_action(env, generator)
        task.actions.copy_(action)
        saved = [(value, value.clone()) for value in (getattr(task, name) for name in task.per_env_errors)]
        for value, _ in saved:
            value.zero_()
        task.apply_action(task.actions)
        actions.append(task.actions.double().cpu().numpy())
        controls.append(control.double().cpu().numpy())
        for value, before in saved:
            value.copy_(before)
        forced |= any(bool(force.any()) for force in forces)
        env.step(action)
    return None if forced else fit(np.concatenate(actions), np.concatenate(controls))


def fit(actions: np.ndarray, controls: np.ndarray) -> ControlMap | None:
    """Fit a map to actions [n, actions] and controls [n, actuators] by least squares; return None if none fits."""
    ones = np.ones((len(actions), 1))
    coefficients = np.linalg.lstsq(np.hstack([ones, actions]), controls, rcond=None)[0]
    offset, slopes = coefficients[0], coefficients[1:]
    source = np.abs(slopes).argmax(axis=0)
    scale = np.take_along_axis(slopes, source[None], axis=0)[0]
    size = np.maximum(1.0, np.abs(controls).max(axis=0))
    scale = np.where(np.abs(scale) < TOLERANCE * size, 0.0, scale)
    # Round to float32 digits of the largest control: 0.5 stays 0.5, -0.0 becomes 0.0.
    decimals = [7 - math.floor(math.log10(largest)) for largest in size]
    offset, scale = (np.array(list(map(round, values.tolist(), decimals))) + 0.0 for values in (offset, scale))
    deviation = np.abs(offset + scale * actions[:, source] - controls) / np.maximum(1.0, np.abs(controls))
    if not deviation.max() <= TOLERANCE:
        return None
    source = np.where(scale == 0.0, 0, source)
    values = tuple(offset.tolist()), tuple(scale.tolist()), tuple(source.tolist())
    return ControlMap(*values, samples=len(actions), deviation=float(deviation.max()))
