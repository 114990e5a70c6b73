"""Advantage actor-critic without host syncs."""

from __future__ import annotations

from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.settings.schema import A2CConfig


class A2C(OnPolicy):
    """Synchronous advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783).

    The gradient equals that of PPO's first minibatch (Huang et al. 2022, arXiv 2205.09123).
    """

    Config = A2CConfig
