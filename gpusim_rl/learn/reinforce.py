"""REINFORCE without host syncs."""

from __future__ import annotations

from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.settings.schema import ReinforceConfig


class Reinforce(OnPolicy):
    """REINFORCE with baseline (Williams 1992; Sutton and Barto 2018, section 13.4).

    The policy loss is -log pi(a|s) (G - V(s)). The return G is bootstrapped with V where the time limit or the end of
    the rollout cut the episode off; the factor gamma^t is left out, as usual.
    """

    Config = ReinforceConfig
