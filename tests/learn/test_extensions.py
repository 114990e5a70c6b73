"""Combined extensions of PPO: order, compiled loss, loss checks."""

from __future__ import annotations

import pytest
import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.learn.ppo import EXTENSIONS, PPO
from helpers.every_algorithm import learner, run
from helpers.on_policy import collect, prepared

COUNTED = hasattr(PPO.update, "__wrapped__")


def test_extensions_run_in_order() -> None:
    it, env = learner("amp", {})
    assert [*it.extensions] == [*EXTENSIONS] == ["style", "rnd", "symmetry", "teacher"]
    assert it.losses[-2:] == ("loss/symmetry", "loss/imitation")
    assert it.rollout.obs.keys() == {"policy"}
    _, stats = run(it, env, env.reset(), 2)
    assert {"loss/discriminator", "loss/rnd", "loss/symmetry", "loss/imitation"} <= stats.keys()


@pytest.mark.skipif(COUNTED, reason="shape checks prevent full-graph compilation")
def test_loss_with_all_extensions_compiles_as_full_graph() -> None:
    it, env = learner("amp", {})
    collect(it, env)
    chunk = prepared(it)[1].select(torch.arange(32))
    compiled = torch.compile(it.chunk_loss, fullgraph=True, dynamic=False, backend="aot_eager")
    both = [loss(chunk.inputs, chunk.packed, chunk.hidden, chunk.is_first) for loss in (it.chunk_loss, compiled)]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda terms: {**terms, "loss/extra": terms["loss/value"]}, "'loss/extra'.* without a weight"),
        (lambda terms: {"loss/value": terms["loss/value"]}, "'loss/.*' .* without a loss"),
        (lambda terms: {**terms, "loss/value": terms["loss/value"][..., None]}, "'loss/value': expected shape"),
    ],
    ids=["no weight", "no loss", "shape"],
)
def test_loss_without_weight_or_with_wrong_shape_is_rejected(change, words, monkeypatch: pytest.MonkeyPatch) -> None:
    it, env = learner("amp", {})
    collect(it, env)
    chunk, evaluate = prepared(it)[1].select(torch.arange(32)), it.evaluate
    monkeypatch.setattr(it, "evaluate", lambda minibatch: (change(evaluate(minibatch)[0]), None))
    with pytest.raises(ConfigError, match=words):
        it.chunk_loss(chunk.inputs, chunk.packed, chunk.hidden, chunk.is_first)
