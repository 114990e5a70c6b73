"""Turns the cube of an in-hand task by planning: tries random motions in a simulator of its own, at each control step.

Model predictive path integral control (Williams et al. 2017, arXiv 1707.02342). A motion is a few actions, the knots,
with straight lines between them. The motions tried are the previous plan, shifted, with noise. The new plan is their
mean, in which cheap motions weigh most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpusim_rl.tasks.in_hand import InHand
from jaxtyping import Float
from torch import Tensor

from gpusim_rl.env.math import quat_angle, scale
from gpusim_rl.settings.schema import SimConfig
from gpusim_rl.sim import SimChoice, make_sim


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How many motions are tried, how far and how widely."""

    samples: int = 24
    """Motions tried for each env."""
    horizon: int
    """Control steps of a motion."""
    knots: int = 3
    noise: float = 0.9
    """Largest standard deviation of the noise; the motions have evenly spaced ones from 0 up to it."""
    temperature: float = 0.03
    """rad: a motion that costs so much more than another weighs 1/e as much."""
    home: tuple[float, float, float]
    """Where the cube is to stay [m]."""
    slack: float = 0.03
    """Distance from there that costs nothing [m]."""
    distance_cost: float = 20.0
    """rad/m: beyond it, a metre costs as much as that angle to the goal."""
    success_bonus: float = 2.0
    """rad, for reaching the goal at once; half of it at the end of a motion."""


def plan_with(task: InHand, cfg: Planning, *, seed: int = 0) -> Callable[[], Float[Tensor, "envs actions"]]:
    """Returns a function that returns actions for the state that the task is in.

    It steps `task.num_envs * cfg.samples` worlds of its own. Parameters that a task randomises are those of the scene
    there.

    Args:
        task: The task.
        cfg: How motions are tried.
        seed: Seed of the motions.
    """
    n, samples, horizon, device = task.num_envs, cfg.samples, cfg.horizon, task.device
    sim = make_sim(
        type(task).scene(task.cfg), SimChoice(task.sim.name, device, "as the task"), n * samples, sim_settings()
    )
    hand, cube = sim.articulation("hand"), sim.articulation("object")
    generator = torch.Generator(device).manual_seed(seed)
    everywhere = torch.ones(n * samples, dtype=torch.bool, device=device)
    home = torch.tensor(cfg.home, device=device)
    spread = torch.linspace(0.0, cfg.noise, samples, device=device)[:, None, None]  # the first motion has no noise
    times = torch.arange(horizon, device=device)
    at_steps = between_knots(times, horizon, cfg.knots)
    knot_times = torch.linspace(0.0, horizon - 1.0, cfg.knots, device=device)
    later = between_knots((knot_times + 1.0).clamp(max=horizon - 1.0), horizon, cfg.knots)
    plan = torch.zeros(n, cfg.knots, task.num_actions, device=device)

    def motions() -> Float[Tensor, "envs samples knots actions"]:
        noise = torch.randn(n, samples, cfg.knots, task.num_actions, generator=generator, device=device)
        return (plan[:, None] + spread * noise).clamp(-1.0, 1.0)

    def copies(value: Tensor) -> Tensor:
        return value.repeat_interleave(samples, dim=0)

    def costs(tried: Float[Tensor, "envs samples knots actions"]) -> Float[Tensor, "envs samples"]:
        hand.set_state(everywhere, joint_pos=copies(task.hand.joint_pos), joint_vel=copies(task.hand.joint_vel))
        cube.set_state(
            everywhere,
            root_pos=copies(task.cube.root_pos),
            root_quat=copies(task.cube.root_quat),
            root_lin_vel=copies(task.cube.root_lin_vel),
            root_ang_vel=copies(task.cube.root_ang_vel),
        )
        actions = torch.einsum("tk,nska->tnsa", at_steps, tried).flatten(1, 2)
        targets, goal = copies(task.targets), copies(task.goal_quat)
        total, bonus = torch.zeros(2, n * samples, device=device)
        for step, action in enumerate(actions):
            targets = targets.lerp(scale(action, task.target_low, task.target_high), task.cfg.moving_average)
            hand.actuate(targets)
            sim.step(task.cfg.decimation)
            angle = quat_angle(cube.root_quat, goal)
            away = torch.linalg.vector_norm(cube.root_pos - home, dim=1) - cfg.slack
            cost = angle + cfg.distance_cost * away.clamp(min=0.0)
            total += cost if step == horizon - 1 else cost / horizon
            early = cfg.success_bonus * (1.0 - 0.5 * step / horizon)
            bonus = torch.maximum(bonus, early * (angle <= task.cfg.success_tolerance))
        cost = torch.where(sim.diverged, 1e6, total - bonus)  # not inf, which makes NaN where all diverge
        return cost.view(n, samples)

    def act() -> Float[Tensor, "envs actions"]:
        nonlocal plan
        plan = torch.einsum("qk,nka->nqa", later, plan).masked_fill((task.progress == 0)[:, None, None], 0.0)
        tried = motions()
        weights = torch.softmax(-costs(tried) / cfg.temperature, dim=1)
        plan = torch.einsum("ns,nska->nka", weights, tried)
        return plan[:, 0]

    return act


def between_knots(times: Tensor, horizon: int, knots: int) -> Float[Tensor, "times knots"]:
    """Returns weights of the knots at times in [0, horizon - 1], control steps from the first knot to the last."""
    place = times / (horizon - 1.0) * (knots - 1.0)
    return (1.0 - (place[:, None] - torch.arange(knots, device=times.device)).abs()).clamp(min=0.0)


def sim_settings() -> SimConfig:
    """Returns the settings of a simulator that steps many worlds."""
    return SimConfig(
        name="auto",
        num_threads=None,
        njmax=None,
        nconmax=None,
        graph=True,
        persistent="auto",
        integrator=None,
        cone=None,
        iterations=None,
        ls_iterations=None,
    )
