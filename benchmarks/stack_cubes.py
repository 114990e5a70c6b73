"""Writes demonstrations of FrankaCubeStack by a script, and prints how many of its episodes end stacked.

    python benchmarks/stack_cubes.py demonstrations.pt --envs 256 --steps 1200

The script sees what a policy sees: it has no memory, and chooses by where hand and cubes are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

TABLE = 1.025  # m
IN_PLACE = 0.06  # m, of cube A's middle over cube B's
ABOVE = 0.1  # m, of the hand over cube A before it goes down, and of cube A over cube B's top on its way
OPEN, CLOSED = 1.0, -1.0
LIMITS = torch.tensor([0.1] * 3 + [0.5] * 3)  # m, rad: of a displacement


def down_as(cube_quat: Tensor) -> Tensor:
    """Orientation of a hand that points down and is turned as a cube, to the nearest quarter turn; wxyz."""
    from gpusim_rl.env.math import quat_from_axis_angle, quat_multiply

    quarter = torch.pi / 2
    yaw = 2.0 * torch.atan2(cube_quat[:, 3], cube_quat[:, 0])
    yaw = torch.remainder(yaw + quarter / 2, quarter) - quarter / 2
    up = torch.tensor([0.0, 0.0, 1.0]).expand(len(yaw), 3)
    return quat_multiply(quat_from_axis_angle(up, yaw), torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(len(yaw), 4))


def stack(obs: Mapping[str, Tensor]) -> Tensor:
    """Actions for observations of FrankaCubeStack: grasp cube A, carry it over cube B, put it down, let go."""
    from gpusim_rl.env.math import quat_conjugate, quat_multiply

    quat_a, a, to_b, hand, hand_quat, fingers = obs["policy"].split([4, 3, 3, 3, 4, 2], dim=1)
    up = torch.tensor([0.0, 0.0, 1.0])
    width, off = fingers.sum(dim=1), hand - a
    beside_a, over_a = off[:, :2].norm(dim=1), off[:, 2]
    beside_b, over_b = to_b[:, :2].norm(dim=1), -to_b[:, 2] - IN_PLACE  # of cube A, from its place
    at_a = (beside_a < 0.012) & (over_a.abs() < 0.012)
    in_place = (beside_b < 0.012) & (over_b.abs() < 0.006)
    held = (off.norm(dim=1) < 0.025) & (width < 0.054)

    # not held: to a point above cube A, then down to it
    reach = a + up * torch.where(beside_a < 0.012, 0.0, ABOVE)[:, None]
    # held: up, then over cube B, then down
    high = over_b > 0.6 * ABOVE
    height = torch.where(beside_b < 0.01, over_b.clamp(max=0.03).neg(), torch.where(high, 0.0 * over_b, ABOVE - over_b))
    sideways = to_b[:, :2] * (high | (beside_b < 0.03))[:, None]
    carry = hand + torch.cat([sideways, height[:, None]], dim=1)
    # in place: let go, then up
    leave = hand + up * 0.1 * (width > 0.058)[:, None]
    goal = torch.where(in_place[:, None], leave, torch.where(held[:, None], carry, reach))
    gripper = torch.where(~in_place & (held | at_a), CLOSED, OPEN)

    turn = quat_multiply(down_as(quat_a), quat_conjugate(hand_quat))
    rotation = 2.0 * turn[:, 1:] * turn[:, :1].sign()
    pull = torch.cat([goal - hand, rotation], dim=1) / LIMITS
    return torch.cat([pull.clamp(-1.0, 1.0), gripper[:, None]], dim=1)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="where to write")
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1200, help="control steps of each env; an episode has 300")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main() -> None:
    """Records, and prints the share of episodes that ended stacked."""
    options = parse()
    import gpusim_rl
    from gpusim_rl.learn.demonstrations import record

    env = gpusim_rl.make_env("FrankaCubeStack", num_envs=options.envs, seed=options.seed, device="cpu")
    ended = []
    stats = env.task.stats

    def noted() -> dict[str, Tensor]:
        numbers = stats()
        ended.append(numbers["success"].clone())
        return numbers

    env.task.stats = noted  # type: ignore[method-assign]
    record(env, stack, options.file, steps=options.steps)
    success = torch.cat(ended)
    success = success[~success.isnan()]
    print(f"{options.file}: {len(success)} episodes ended, {success.mean():.1%} of them stacked")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, installed or not
    main()
