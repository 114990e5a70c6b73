"""Advantage actor-critic without a host sync."""

from __future__ import annotations

from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.settings.schema import A2CConfig


class A2C(OnPolicy):
    """Advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783, all environments in step).

    The loss of the policy is -log pi(a|s) A(s, a), with A of `gae`. Its gradient is that of PPO's first minibatch,
    where the ratio is 1 (Huang et al. 2022, arXiv 2205.09123).
    """

    Config = A2CConfig
