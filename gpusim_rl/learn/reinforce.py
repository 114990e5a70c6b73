"""REINFORCE without a host sync."""

from __future__ import annotations

from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.settings.schema import ReinforceConfig


class Reinforce(OnPolicy):
    """REINFORCE with a baseline (Williams 1992; Sutton and Barto 2018, section 13.4).

    The loss of the policy is -log pi(a|s) (G - V(s)). G is the discounted return from the step on. It ends with the
    episode if that is terminated. Where the time limit or the end of the rollout cut it off, the rest of it is
    V of the last observation: an episode longer than `horizon` needs no memory of its own. The discount of the step
    itself, gamma^t, is left out, as everyone does.
    """

    Config = ReinforceConfig
