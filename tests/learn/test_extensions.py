"""Extensions of PPO beside each other: one compiled loss, one order, a state that is data."""

from __future__ import annotations

import pytest
import torch

from gpusim_rl.learn.ppo import EXTENSIONS, PPO
from helpers.every_algorithm import learner, run
from helpers.on_policy import collect, prepared

COUNTED = hasattr(PPO.update, "__wrapped__")


def test_rewards_and_losses_pass_through_all_of_them_in_order() -> None:
    it, env = learner("amp", {})
    assert [*it.extensions] == [*EXTENSIONS] == ["style", "rnd", "symmetry", "teacher"]
    assert it.losses[-2:] == ("loss/symmetry", "loss/imitation")
    assert it.rollout.obs.keys() == {"policy"}
    _, stats = run(it, env, env.reset(), 2)
    assert {"loss/discriminator", "loss/rnd", "loss/symmetry", "loss/imitation"} <= stats.keys()


@pytest.mark.skipif(COUNTED, reason="functions that check shapes cannot be compiled whole")
def test_the_loss_with_all_of_them_can_be_compiled_as_a_whole() -> None:
    it, env = learner("amp", {})
    collect(it, env)
    chunk = prepared(it)[1].select(torch.arange(32))
    compiled = torch.compile(it.chunk_loss, fullgraph=True, dynamic=False, backend="aot_eager")
    both = [loss(chunk.inputs, chunk.packed, chunk.hidden, chunk.is_first) for loss in (it.chunk_loss, compiled)]
    torch.testing.assert_close(*both)
