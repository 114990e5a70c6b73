"""ShadowHand by planning: see cube_planner.py.

python tools/collect.py benchmarks/scripted/shadow_hand.py task=ShadowHand --episodes 64
"""

from __future__ import annotations

from collections.abc import Callable

from cube_planner import Planning, plan_with
from gpusim_rl.tasks.shadow_hand import ShadowHand
from torch import Tensor

PLANNING = Planning(samples=32, horizon=12, home=(0.0, -0.38, 0.555))


def controller(task: ShadowHand) -> Callable[[], Tensor]:
    """Returns a function that returns actions [num_envs, 20] for the state that the task is in."""
    return plan_with(task, PLANNING)
