"""Check of a task's mirror image, by simulating mirrored states and actions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpusim_rl.env.mirrors import matrix, mirrored
from gpusim_rl.env.vec_env import VecEnv
from gpusim_rl.sim.mirror_image import PSEUDOVECTOR, QUATERNION, VECTOR, MirrorImage
from gpusim_rl.spaces import SignedPermutation

WRONG = 0.5
"""Relative difference above which a term's mirror kind or sign counts as wrong."""
LEAST = 1e-5  # smallest variation at which a term is compared


def image_of(values: Tensor, swap: SignedPermutation) -> Tensor:
    """Return the mirror image of vectors [*batch, size]."""
    return values @ values.new_tensor(matrix(swap)).T


def differences_by_term(env: VecEnv, *, height: float = 10.0, seed: int = 0) -> dict[str, float | None]:
    """Step random states in the air and their mirror images; return the difference of each observation term.

    `env` must be reset, without noise, delay and history. Differences by `<group>/<term>` are relative to the values'
    variation; None for terms that do not vary, such as a command held by the task. Raises TaskError if the task has no
    mirror image.
    """
    maps, _ = mirrored(env)
    name = env.sim.scene.articulation_names[0]
    joints, random = MirrorImage(env.sim.scene, name).joints, torch.Generator().manual_seed(seed)
    robot, num = env.sim.articulation(name), env.num_envs
    low, high = robot.joint_limits.cpu().unbind(dim=1)
    spread = 0.4 * torch.rand(num, len(low), generator=random) - 0.2
    state = {
        "joint_pos": torch.minimum(torch.maximum(robot.default_joint_pos.cpu() + spread, low), high),
        "joint_vel": 0.3 * torch.randn(num, len(low), generator=random),
    }
    images = {"joint_pos": joints, "joint_vel": joints}
    if robot.free_root:
        turn = torch.cat([torch.ones(num, 1), 0.2 * torch.randn(num, 3, generator=random)], dim=1)
        above = torch.tensor([0.0, 0.0, height])
        state |= {
            "root_pos": robot.default_root_pos.cpu() + above + 0.1 * torch.randn(num, 3, generator=random),
            "root_quat": turn / turn.norm(dim=1, keepdim=True),
            "root_lin_vel": torch.randn(num, 3, generator=random),
            "root_ang_vel": 0.3 * torch.randn(num, 3, generator=random),
        }
        signs = {"root_pos": VECTOR, "root_quat": QUATERNION, "root_lin_vel": VECTOR, "root_ang_vel": PSEUDOVECTOR}
        images |= {key: SignedPermutation(list(range(len(x))), x.tolist()) for key, x in signs.items()}
    action = 2.0 * torch.rand(num, env.num_actions, generator=random) - 1.0

    seen = _observe(env, robot, state, action)
    mirror_state = {key: image_of(x, images[key]) for key, x in state.items()}
    mirror_seen = _observe(env, robot, mirror_state, image_of(action, maps["actions"]))
    found: dict[str, float | None] = {}
    for group, terms in env.obs_terms.items():
        sizes = [term.size for term in terms]
        before_and_after = [
            (image_of(x, maps[group]).split(sizes, dim=1), y.split(sizes, dim=1))
            for x, y in zip(seen[group], mirror_seen[group], strict=True)
        ]
        for k, term in enumerate(terms):
            differences = [_difference(expected[k], got[k]) for expected, got in before_and_after]
            found[f"{group}/{term.name}"] = max((x for x in differences if x is not None), default=None)
    return found


def _difference(expected: Tensor, got: Tensor) -> float | None:
    """Return the largest relative difference; None if `expected` is constant across envs."""
    if float((expected - expected[:1]).abs().max()) < LEAST:
        return None
    sizes = (expected - expected.mean(dim=0)).abs().amax(dim=0)
    return float(((expected - got).abs().amax(dim=0) / sizes.clamp(min=0.05 * float(sizes.max()))).max())


def _observe(env: VecEnv, robot: Any, state: dict[str, Tensor], action: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each group's observations in a state and one control step later."""
    everywhere = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    env.task.load_state_dict({**env.task.state_dict(), "tensors": env._initial})  # pyright: ignore[reportPrivateUsage]
    env.sim.reset(everywhere)
    robot.set_state(everywhere, **{key: value.to(env.device) for key, value in state.items()})
    env.put_action(action.to(env.device))
    env.task.apply_action(env.task.actions)
    env.sim.refresh()
    before = {group: value.cpu().clone() for group, value in env.clean_obs().items()}
    env.sim.step(env.cfg.decimation)
    return {group: (before[group], value.cpu()) for group, value in env.clean_obs().items()}
