"""AllegroHand by planning: see cube_planner.py.

python tools/collect.py benchmarks/scripted/allegro_hand.py task=AllegroHand --episodes 64
"""

from __future__ import annotations

from collections.abc import Callable

from cube_planner import Planning, plan_with
from gpusim_rl.tasks.allegro_hand import AllegroHand
from torch import Tensor

PLANNING = Planning(horizon=8, home=(0.0, -0.13, 0.55))


def controller(task: AllegroHand) -> Callable[[], Tensor]:
    """Returns a function that returns actions [num_envs, 16] for the state that the task is in."""
    return plan_with(task, PLANNING)
