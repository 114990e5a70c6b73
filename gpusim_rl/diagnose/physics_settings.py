"""Solver settings of a task's physics: their errors against the task's own settings, and their cost."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import mujoco
import torch
from torch import Tensor

from gpusim_rl.api import load_spec
from gpusim_rl.env import Task, VecEnv
from gpusim_rl.errors import ConfigError
from gpusim_rl.run.devices import choose_devices
from gpusim_rl.run.run_spec import RunSpec
from gpusim_rl.settings.compose import compose
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.sim.option import ON_WARP, USUAL, solver_limits

LIMITS = ((100, 50), (20, 20), (10, 20), (8, 20), (6, 20), (10, 8), (8, 8), (6, 8), (4, 8), (2, 8))
SMALL_STEP = "half time step"
MARGIN = 1.5  # of recommended buffers over the largest need
NOISE = 1.05  # ratio of costs up to which they count as equal

Frame = tuple[dict[str, Tensor], int]  # state and inputs by field before a control step, and its physics steps


@dataclass(frozen=True, slots=True)
class Row:
    """Velocity error after a control step, relative to the root mean square of the reference's velocities.

    `seconds` is the time per env and control step. `needs` has the largest use of each buffer (MuJoCo Warp).
    """

    cone: str
    iterations: int
    ls_iterations: int
    note: str
    median: float
    p99: float
    most: float
    seconds: float
    needs: dict[str, float]


def compare_settings(settings: Sequence[str], *, steps: int, config_dir: str | None = None) -> Iterator[Row]:
    """Yield a row for the task's own settings, the reference, then for half the time step and for cheaper settings.

    Each row's new simulator starts every control step from a state that random actions reach with the task's settings.

    Args:
        settings: Command line: task, simulator, number of envs.
        steps: Number of control steps.
        config_dir: Folder of the user's tasks.
    """
    spec = _spec(settings, config_dir)
    with closing(_env(spec)) as env:
        cone, limits = _own_settings(env, spec.cfg.sim)
        hz, frames = env.cfg.physics_hz, _drive(env, steps)
    with closing(_env(spec)) as env:  # in the same initial state as the others, including randomised parameters
        reference, seconds, needs = _replay(env, frames)
    valid = reference.isfinite().all(dim=-1)
    if not valid.any():
        raise ConfigError("every env diverges under random actions", key="doctor physics")
    scale = reference[valid].square().sum(dim=-1).mean().sqrt().clamp(min=1e-12)

    def row(changes: Sequence[str], cone: str, limits: tuple[int, int], note: str = "", substeps: int = 1) -> Row:
        with closing(_env(_spec([*settings, *changes], config_dir))) as env:
            velocities, seconds, needs = _replay(env, frames, substeps)
        errors = ((velocities - reference)[valid].norm(dim=-1) / scale).nan_to_num(math.inf, math.inf)
        median, p99 = (float(errors.sort().values[int(share * (len(errors) - 1))]) for share in (0.5, 0.99))
        return Row(cone, *limits, note, median, p99, float(errors.max()), seconds, needs)

    yield Row(cone, *limits, f"the task's, in {env.sim.name}", 0.0, 0.0, 0.0, seconds, needs)
    yield row([f"task.physics_hz={2 * hz}"], cone, limits, SMALL_STEP, substeps=2)
    for other in (cone, *({"elliptic", "pyramidal"} - {cone})):
        for fewer in LIMITS:
            if all(few <= own for few, own in zip(fewer, limits, strict=True)) and (other, fewer) != (cone, limits):
                words = [f"sim.cone={other}", f"sim.iterations={fewer[0]}", f"sim.ls_iterations={fewer[1]}"]
                yield row(words, other, fewer)


def cheapest(rows: Sequence[Row], tolerance: float) -> Row:
    """Return the first row at the least cost whose error is at most `tolerance` in 99 % of the control steps."""
    good = [row for row in rows if row.p99 <= tolerance and row.note != SMALL_STEP]  # the first is exact
    return next(row for row in good if row.seconds <= NOISE * min(row.seconds for row in good))


def buffer_settings(row: Row) -> list[str]:
    """Return the settings of buffers with a margin over a row's needs."""
    return [f"sim.{name}={16 * max(1, math.ceil(MARGIN * need / 16))}" for name, need in row.needs.items()]


def _spec(settings: Sequence[str], config_dir: str | None) -> RunSpec:
    return load_spec(compose(settings, config_dir), settings)


def _env(spec: RunSpec) -> VecEnv:
    cfg, task = spec.cfg, spec.task_class
    if not issubclass(task, Task):
        raise ConfigError("envs of another library have no solver settings", key="doctor physics")
    env = VecEnv.make(task, cfg.task, num_envs=cfg.num_envs, choice=choose_devices(cfg)[1], sim=cfg.sim, seed=cfg.seed)
    env.reset()
    return env


def _own_settings(env: VecEnv, cfg: SimConfig) -> tuple[str, tuple[int, int]]:
    """Return friction cone, and limits on solver and line-search iterations."""
    option, usual = env.sim.scene.model.opt, ON_WARP if SIMULATORS[env.sim.name].uses_warp else USUAL
    cone = mujoco.mjtCone(option.cone).name.removeprefix("mjCONE_").lower()
    return cone, solver_limits(option, cfg, usual)


def _drive(env: VecEnv, steps: int) -> list[Frame]:
    """Play random actions, standard normal but within the limits; return the frame of each control step."""
    sim, frames, generator = env.sim, list[Frame](), torch.Generator().manual_seed(0)
    advance = sim.step

    def step(substeps: int) -> None:
        frames.append(({name: getattr(sim, name).clone() for name in ("qpos", "qvel", *sorted(sim._used))}, substeps))
        advance(substeps)

    sim.step = step
    for _ in range(steps):
        env.step(torch.randn(env.num_envs, env.num_actions, generator=generator).to(env.device))
    return frames


def _replay(env: VecEnv, frames: Sequence[Frame], times: int = 1) -> tuple[Tensor, float, dict[str, float]]:
    """Return velocities after each control step (infinite if diverged), time per env [s], and largest buffer needs."""
    sim, velocities, needs, spent = env.sim, [], dict.fromkeys(env.sim.buffers, 0.0), []
    everywhere = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    for fields, substeps in [frames[0], *frames]:  # first untimed: kernels are compiled, graphs captured
        for name, value in fields.items():
            getattr(sim, name).copy_(value)
        sim.wrote_state(everywhere)
        sim.wrote_mocap(everywhere)
        before = _clock(env.device)
        sim.step(times * substeps)
        spent.append(_clock(env.device) - before)
        velocities.append(sim.qvel.masked_fill(sim.diverged[:, None], math.inf))
        needs = {name: max(needs[name], float(need)) for name, need in sim.needs.items()}
    return torch.stack(velocities[1:]), sum(spent[1:]) / (len(frames) * env.num_envs), needs


def _clock(device: torch.device) -> float:
    """Return the CPU time of all threads [s], or on a GPU the wall-clock time when the device has finished."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
