"""Tests of a task with two robots."""

from __future__ import annotations

import mujoco
import pytest
import torch
from torch import Tensor

from gpusim_rl.env import Task, TaskConfig, Terms
from gpusim_rl.sim import Scene, Sim
from helpers.scenes import ARM, arm_scene, everywhere, make
from helpers.task_envs import plain_env

NAMES = ("left", "right")


class Pair(Task[TaskConfig]):
    """Task that raises the left of two arms and holds the right one still."""

    Config = TaskConfig

    @classmethod
    def scene(cls, cfg: TaskConfig) -> Scene:
        scene = Scene(cfg.physics_hz)
        for name, side in zip(NAMES, (-1.0, 1.0), strict=True):
            scene.add(name, mujoco.MjSpec.from_string(ARM), pos=(0.0, side, 0.0), quat=(0.0, 0.0, 0.0, 1.0))
        return scene

    def __init__(self, cfg: TaskConfig, sim: Sim) -> None:
        super().__init__(cfg, sim)
        self.arms = {name: sim.articulation(name) for name in NAMES}
        self.ends = {name: arm.bodies(["lower"]) for name, arm in self.arms.items()}
        self.counts = [len(arm.actuator_names) for arm in self.arms.values()]
        self.num_actions = sum(self.counts)

    def reset(self, where: Tensor) -> None:
        for arm in self.arms.values():
            arm.set_state(where, joint_pos=self.random.uniform(-0.5, 0.5, 2), joint_vel=self.random.uniform(-1, 1, 2))

    def apply_action(self, action: Tensor) -> None:
        for arm, control in zip(self.arms.values(), action.split(self.counts, dim=1), strict=True):
            arm.actuate(control)

    def observe(self) -> dict[str, Terms]:
        terms = {}
        for name, arm in self.arms.items():
            terms |= {f"{name}_pos": arm.joint_pos, f"{name}_vel": arm.joint_vel}
            terms[f"{name}_end"] = self.ends[name].pos[:, 0]
        return {"policy": terms}

    def rewards(self) -> dict[str, Tensor]:
        return {"raise": self.ends["left"].pos[:, 0, 2], "hold": -self.arms["right"].joint_vel.square().sum(dim=1)}

    def terminated(self) -> Tensor:
        return torch.zeros_like(self.progress, dtype=torch.bool)


@pytest.mark.parametrize("backend", ["mujoco", pytest.param("mjwarp", marks=pytest.mark.slow)])
def test_two_robots_of_one_task_move_independently(backend):
    env = plain_env(Pair, 3, sim=backend)
    assert env.num_actions == 2
    obs = env.reset()["policy"]
    assert [term.name for term in env.obs_terms["policy"]] == [f"{n}_{q}" for n in NAMES for q in ("pos", "vel", "end")]
    sims = [make(backend, arm_scene(), 3) for _ in NAMES]
    alone = [sim.articulation("arm") for sim in sims]
    ends = [arm.bodies(["lower"]) for arm in alone]
    offset = torch.tensor([[0.0, -1.0, 0.0], [0.0, 1.0, 0.0]])
    turned = torch.tensor([-1.0, -1.0, 1.0])
    random = torch.Generator().manual_seed(0)
    for step_id in range(60):  # two episodes
        if step_id % 30 == 0:
            for sim, arm, (pos, vel, _) in zip(sims, alone, _per_robot(obs), strict=True):
                sim.reset(everywhere(sim))
                arm.set_state(everywhere(sim), joint_pos=pos, joint_vel=vel)
        action = 2.0 * torch.rand(3, 2, generator=random) - 1.0
        step = env.step(action)
        for i, (sim, arm, seen) in enumerate(zip(sims, alone, _per_robot(step.final_obs["policy"]), strict=True)):
            arm.actuate(action[:, i : i + 1])
            sim.step(4)
            expected = arm.joint_pos, arm.joint_vel, ends[i].pos[:, 0] * turned + offset[i]
            torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(step.terms["raise"], ends[0].pos[:, 0, 2], rtol=1e-4, atol=1e-4)
        assert bool(step.done.all()) == (step_id % 30 == 29)
        obs = step.obs["policy"]


def _per_robot(obs: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    """Return joint positions, joint velocities and end position of each robot."""
    return tuple(half.split([2, 2, 3], dim=1) for half in obs.split(7, dim=1))
