"""PPO: losses, gradients, minibatches, learning rate, learning."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from gpusim_rl.learn.algorithm import choose_precision
from gpusim_rl.learn.distributions import DiagonalGaussian
from gpusim_rl.learn.minibatch import Samples, fit_minibatches, fit_sequence_length
from gpusim_rl.learn.networks import EvaluatedActions
from gpusim_rl.learn.on_policy import SOFT_BOUND
from gpusim_rl.learn.ppo import AdaptiveRate
from gpusim_rl.testing.conformance import differences
from helpers.fakes import Learner, Outcome, RandomEnv, ppo_config

KINDS = ["feed-forward", "separate", "lstm", "gru"]


def network(kind: str) -> dict[str, Any]:
    return {"rnn": kind if kind in ("lstm", "gru") else None, "separate": kind == "separate"}


def learner(kind: str = "feed-forward", *, num_envs: int = 12, compile: bool = False, **changes: Any) -> Learner:
    settings = {"horizon": 8, "minibatch_size": 24, "epochs": 3, "sequence_length": 4, **changes}
    net = {**network(kind), **settings.pop("network", {})}
    return Learner(RandomEnv(num_envs), ppo_config(net, **settings), compile=compile)


class Spy:
    """Recorder of each minibatch of an update, evaluated before the step."""

    def __init__(self, learner: Learner) -> None:
        self.minibatches: list[dict[str, Tensor]] = []
        self.rates: list[float] = []
        ppo, loss, head = learner.ppo, learner.ppo._loss, learner.policy.head

        def spying(*args: Any) -> Any:
            inputs, packed, hidden, is_first = args
            old = Samples.unpack(packed, learner.env.num_actions, head.num_parameters)
            before = DiagonalGaussian.stored(old.distribution)
            with torch.no_grad():
                now = learner.policy.evaluate(inputs, old.action, hidden, is_first)
            self.minibatches.append(
                {
                    "action": old.action.clone(),
                    "ratio": (now.log_prob - old.log_prob).exp(),
                    "kl": now.distribution.kl_from(before),
                    "reverse kl": before.kl_from(now.distribution),
                    "advantage": -old.cost,
                    "value change": now.value - 0.5 * (old.value_low + old.value_high),
                    "target": old.target.clone(),
                    "valid": old.weight.bool(),
                }
            )
            self.rates.append(ppo.steps.learning_rate.item())
            out = loss(*args)
            self.minibatches[-1]["reported"] = out[4:6].detach()
            return out

        ppo._loss = spying


# The first minibatch


@pytest.mark.parametrize(("kind", "state_dependent_std"), [*((kind, False) for kind in KINDS), ("gru", True)])
def test_first_minibatch_of_every_update_is_on_policy(kind: str, state_dependent_std: bool) -> None:
    # normalisation on; more than one update, so that its statistics have moved
    it = learner(kind, network={"state_dependent_std": state_dependent_std}, learning_rate=1e-3)
    assert it.cfg.normalize_obs and it.cfg.normalize_value
    for _ in range(3):
        it.collect()
        spy = Spy(it)
        it.update()
        first, later = spy.minibatches[0], spy.minibatches[-1]
        assert (first["ratio"] - 1.0).abs().max() < 1e-6
        assert first["kl"].abs().max() < 1e-9
        kl, clip_fraction = first["reported"].tolist()
        assert kl < 1e-9 and clip_fraction == 0.0
        assert (later["ratio"] - 1.0).abs().max() > 1e-4, "policy did not change"
    assert it.policy.obs_norm["policy"].count > 0


@pytest.mark.parametrize("kind", ["separate", "lstm"])
def test_values_and_targets_are_normalized(kind: str) -> None:
    # rewards with large offset and scale, so that return statistics change a lot
    it = learner(kind, minibatch_size=96, epochs=1, gamma=0.5)
    step = it.env.step

    def scaled(action: Tensor) -> Outcome:
        out = step(action)
        out.reward = torch.where(out.diverged, 0.0, 30.0 * out.reward + 500.0)
        return out

    it.env.step = scaled  # type: ignore[method-assign]
    for _ in range(3):
        it.collect()
        spy = Spy(it)
        it.update()
        (batch,) = spy.minibatches
        assert batch["value change"].abs().max() < 1e-4, "value predictions changed with the statistics"
        target = batch["target"][batch["valid"]]
        assert target.abs().max() < 10.0
    assert it.policy.value_norm.mean > 500.0


def test_observation_statistics_change_after_the_update() -> None:
    it = learner()
    it.collect()
    norm = it.policy.obs_norm["policy"]
    counts = []
    loss = it.ppo._loss
    it.ppo._loss = lambda *args: (counts.append(norm.count.item()), loss(*args))[1]
    it.update()
    assert set(counts) == {0.0}
    valid = it.rollout.valid
    assert norm.count == valid.sum()
    pooled = it.rollout.obs["policy"][valid].double()
    torch.testing.assert_close(norm.mean, pooled.mean(dim=0))
    torch.testing.assert_close(norm.var, pooled.var(dim=0, correction=0))


# Losses and gradients


@pytest.mark.parametrize("value_clip", [True, False])
def test_loss_and_gradients_equal_plain_formulas(value_clip: bool) -> None:
    g, count = torch.Generator().manual_seed(0), 500
    log_ratio, advantage, value, old, target, mean = torch.randn(6, count, generator=g)
    log_ratio, value = 0.3 * log_ratio, old + 0.3 * value
    valid = (torch.rand(count, generator=g) < 0.8).float()
    coefficients = {"value_coef": 1.5, "bounds_coef": 0.3, "entropy_coef": 0.01, "value_clip": value_clip}
    it = Learner(RandomEnv(4, num_actions=1), ppo_config(clip=0.2, **coefficients))
    given = {"log_prob": log_ratio[None], "value": value[None], "entropy": torch.full((1, count), 0.5)}
    leaves = {name: x.clone().requires_grad_() for name, x in {**given, "mean": mean[None, :, None]}.items()}
    distribution = DiagonalGaussian(leaves["mean"], torch.zeros(1, count, 1))
    now = EvaluatedActions(leaves["log_prob"], leaves["entropy"], distribution, leaves["value"])
    it.policy.evaluate = lambda *args: now  # type: ignore[method-assign]
    packed = Samples.of(
        action=torch.zeros(1, count, 1),
        distribution=torch.zeros(1, count, 2),
        log_prob=torch.zeros(1, count),
        value=old[None],
        advantage=advantage[None],
        target=target[None],
        valid=valid[None],
        clip=it.cfg.clip,
    ).pack()
    weight = Samples.weight_of(packed)
    weight /= weight.sum()
    losses = it.ppo.chunk_loss({}, packed, (), None)
    losses.dot(it.ppo._coefficients).backward()

    log_ratio.requires_grad_(), value.requires_grad_(), mean.requires_grad_()
    ratio = log_ratio.exp()
    policy = -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
    error = (value - target).square()
    if value_clip:
        error = torch.maximum(error, (old + (value - old).clamp(-0.2, 0.2) - target).square())
    bounds = (mean.abs() - SOFT_BOUND).clamp(min=0.0).square()
    plain = ((policy + 0.5 * 1.5 * error + 0.3 * bounds - 0.01 * 0.5) * valid).sum() / valid.sum()
    plain.backward()
    torch.testing.assert_close(losses.dot(it.ppo._coefficients), plain)
    expected = {"log_prob": log_ratio.grad, "value": value.grad, "mean": mean.grad}
    for name, gradient in {**expected, "entropy": -0.01 * valid / valid.sum()}.items():
        torch.testing.assert_close(leaves[name].grad.flatten(), gradient)  # type: ignore[union-attr]
    outside = ((ratio - 1.0).abs() > 0.2).float()
    for number, part in {0: policy, 1: error, 2: bounds, 5: outside}.items():
        torch.testing.assert_close(losses[number], (part * valid).sum() / valid.sum())


@pytest.mark.parametrize("kind", ["feed-forward", "lstm"])
def test_invalid_samples_contribute_nothing(kind: str) -> None:
    one, other = (learner(kind, minibatch_size=96, epochs=2) for _ in range(2))
    for it in (one, other):
        it.collect()
    invalid = ~other.rollout.valid
    assert 0 < invalid.sum() < invalid.numel()
    g = torch.Generator().manual_seed(9)
    rollout = other.rollout
    for tensor in (rollout.obs["policy"], rollout.action, rollout.distribution, rollout.reward):
        noise = torch.randn(tensor.shape, generator=g)
        where = invalid if tensor.ndim == 2 else invalid[..., None]
        # a ratio of probabilities must stay finite
        size = 0.3 if tensor is rollout.distribution else 3.0
        tensor.copy_(torch.where(where, size * noise, tensor))
    one.update()
    other.update()
    for (name, a), b in zip(one.policy.state_dict().items(), other.policy.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_advantages_are_normalised_over_valid_samples() -> None:
    it = learner(minibatch_size=96, epochs=1)
    it.collect()
    spy = Spy(it)
    it.update()
    (batch,) = spy.minibatches
    advantage = batch["advantage"][batch["valid"]]
    assert advantage.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert advantage.std(correction=0).item() == pytest.approx(1.0, abs=1e-5)


def test_reward_scale_multiplies_returns() -> None:
    it = learner(gamma=0.0, reward_scale=7.0, normalize_value=False)
    it.collect()
    mean_return = it.update()["value/mean_return"].item()
    valid = it.rollout.valid
    assert mean_return == pytest.approx(7.0 * it.rollout.reward[valid].mean().item(), rel=1e-5)


def test_gradient_norm_is_limited() -> None:
    for limit, clipped in ((1e-3, True), (None, False)):
        it = learner(max_grad_norm=limit)
        it.collect()
        norms: list[float] = []
        step = it.ppo.steps.optimizer.masked_step

        def recording(*gradient: Tensor, it: Learner = it, norms: list[float] = norms, step: Any = step) -> None:
            step(*gradient)  # clips in place
            grads = [p.grad.flatten() for p in it.policy.parameters() if p.grad is not None]
            norms.append(torch.cat(grads).norm().item())

        it.ppo.steps.optimizer.masked_step = recording  # type: ignore[method-assign]
        stats = it.update()
        assert (max(norms) <= 1.001e-3) == clipped
        assert stats["policy/grad_norm"] > 1e-3


def poison(it: Learner, *minibatches: int) -> None:
    """Make the gradients of these minibatches overflow in the next update."""
    loss, calls = it.ppo._loss, iter(range(1000))

    def poisoned(*args: Any) -> Any:
        parts = loss(*args)
        return parts * 3e38 * 3e38 if next(calls) in minibatches else parts

    it.ppo._loss = poisoned  # type: ignore[method-assign]


def everything(it: Learner) -> dict[str, Tensor]:
    adam = {f"adam.{i}.{k}": v for i, s in enumerate(it.ppo.steps.optimizer.state.values()) for k, v in s.items()}
    found = {**it.policy.state_dict(), **adam, "rate": it.ppo.steps.learning_rate}
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize(("kind", "bf16", "limit"), [("separate", False, 1.0), ("lstm", True, None)])
def test_minibatch_with_non_finite_gradient_changes_nothing(kind: str, bf16: bool, limit: float | None) -> None:
    it = learner(kind, max_grad_norm=limit, schedule_per="minibatch")
    it.policy.reduced = torch.bfloat16 if bf16 else None
    it.train(1)
    it.collect()
    poison(it, 5)
    gradient, step, before, steps = it.ppo.steps.gradient, it.ppo.steps.make, {}, []

    def watched_gradient(*args: Any) -> Any:
        before.update(everything(it))
        return gradient(*args)

    def watched_step(*args: Any) -> None:
        step(*args)
        after = everything(it)
        steps.append([name for name in before if not torch.equal(before[name], after[name])])

    it.ppo.steps.gradient = watched_gradient  # type: ignore[method-assign]
    it.ppo.steps.make = watched_step  # type: ignore[method-assign]
    stats = it.update()
    assert len(steps) == 12 and steps[5] == []
    assert all("adam.0.step" in changed for i, changed in enumerate(steps) if i != 5)
    assert stats["policy/skipped_minibatches"] == 1 and stats["check/learned"] == 1
    assert all(value.isfinite() for value in stats.values()), "statistics include the skipped minibatch"
    assert all(value.isfinite().all() for value in everything(it).values())


def test_skipped_minibatches_are_counted_and_saved() -> None:
    it = learner()
    poison(it, 0, 1, 2, *range(12, 24))
    reported = []
    for _ in range(3):
        it.collect()
        stats = it.update()
        reported.append((stats["policy/skipped_minibatches"].item(), stats["check/learned"].item()))
    assert reported == [(3.0, 1.0), (15.0, 0.0), (15.0, 1.0)]
    other = learner()
    other.ppo.load_state_dict(it.ppo.state_dict())
    assert other.ppo.steps.skipped == 15


def test_log_std_can_leave_its_bound() -> None:
    # A parameter beyond the bound would get no gradient.
    it = learner(network={"log_std_init": -5.0}, entropy_coef=1.0, learning_rate=1e-2)
    with torch.no_grad():
        it.policy.head.log_std.fill_(-5.0)
    it.collect()
    # one step down, over the bound
    it.policy.head.log_std.grad = torch.ones_like(it.policy.head.log_std)
    it.ppo.steps.optimizer.step()
    it.ppo.steps.optimizer.state.clear()
    for _ in range(3):
        it.collect()
        it.update()
    assert (it.policy.head.log_std > -5.0).any(), "entropy bonus did not raise log_std"


# Minibatches


@pytest.mark.parametrize("kind", ["feed-forward", "lstm"])
@pytest.mark.parametrize("minibatch_size", [1, 30, 10_000])
def test_minibatches_partition_the_rollout(kind: str, minibatch_size: int) -> None:
    it = learner(kind, minibatch_size=minibatch_size, num_envs=6, epochs=2)
    T, N = it.cfg.horizon, it.env.num_envs
    orders = []
    for _ in range(2):
        it.collect()
        it.rollout.action[..., 0] = torch.arange(T * N).view(T, N).float()  # t * N + env
        spy = Spy(it)
        it.update()
        per_epoch = it.ppo.num_minibatches
        assert it.rollout.sequence_length == (4 if kind == "lstm" else 1)
        assert len(spy.minibatches) == it.cfg.epochs * per_epoch
        for epoch in range(it.cfg.epochs):
            parts = spy.minibatches[epoch * per_epoch : (epoch + 1) * per_epoch]
            ids = [part["action"][..., 0] for part in parts]
            assert len({tuple(i.shape) for i in ids}) == 1, "minibatch sizes differ"
            flat = torch.cat([i.flatten() for i in ids])
            assert torch.equal(flat.sort().values, torch.arange(T * N).float())
            orders.append(flat.tolist())
            for i in ids:  # a sequence is consecutive steps of one env, from a multiple of L
                assert i.shape[0] == it.rollout.sequence_length
                assert (i[1:] - i[:-1] == N).all()
                assert ((i[0] // N) % it.rollout.sequence_length == 0).all()
    assert len({tuple(order) for order in orders}) == len(orders), "two epochs have the same order"


def test_fit_minibatches_returns_nearest_divisor() -> None:
    for units in range(1, 200):
        for wanted in (0.01, 1.0, 3.3, 17.0, 1e6):
            fitted = fit_minibatches(units, wanted)
            assert units % fitted == 0
            divisors = [d for d in range(1, units + 1) if units % d == 0]
            assert abs(fitted - wanted) == min(abs(d - wanted) for d in divisors)


def test_fit_sequence_length_divides_horizon() -> None:
    assert fit_sequence_length(16, 16) == 16
    assert fit_sequence_length(16, 100) == 16
    assert fit_sequence_length(24, 16) == 12
    assert fit_sequence_length(17, 16) == 1
    assert fit_sequence_length(1, 1) == 1


# Learning rate


def python_rule(rate: float, kl: float, threshold: float, low: float = 1e-6, high: float = 1e-2) -> float:
    """Apply rl_games' adaptive schedule."""
    if kl > 2.0 * threshold:
        rate = max(rate / 1.5, low)
    if 0.0 < kl < 0.5 * threshold:
        rate = min(rate * 1.5, high)
    return rate


def test_adaptive_learning_rate_equals_python_rule() -> None:
    g = torch.Generator().manual_seed(0)
    recorded = (0.01 * torch.exp(2.0 * torch.randn(300, generator=g))).tolist()
    recorded += [1e-5] * 30 + [0.0] + [1.0] * 40 + [0.016, 0.004, 0.008]  # both limits and thresholds
    rate, expected = torch.tensor(3e-4), 3e-4
    rule = AdaptiveRate(0.008, 1e-6, 1e-2, rate.device)
    seen = []
    for kl in recorded:
        rule.adapt(rate, torch.tensor(kl))
        expected = python_rule(expected, kl, 0.008)
        seen.append(rate.item())
        assert rate.item() == pytest.approx(expected, rel=1e-4)
    assert max(seen) == pytest.approx(1e-2) and min(seen) == pytest.approx(1e-6)
    before = rate.clone()
    for kl in (math.nan, 0.0, 0.016, 0.004, 0.008):  # unchanged at the thresholds
        rule.adapt(rate, torch.tensor(kl))
        assert torch.equal(rate, before)


@pytest.mark.parametrize("per", ["minibatch", "epoch"])
def test_adaptive_schedule_follows_scripted_kl(per: str) -> None:
    it = learner(schedule="adaptive", schedule_per=per, kl_threshold=0.01, epochs=4)
    assert it.ppo.num_minibatches == 4
    # epoch means are above, below, above and inside the band, unlike single minibatches
    script = [0.0, 0.2, 0.001, 0.001, 0.001, 0.001, 0.001, 0.012]
    script += [0.1, 0.1, 0.001, 0.001, 0.001, 0.03, 0.001, 0.001]
    kls, rates, loss = iter(script), [], it.ppo._loss

    def scripted(*args: Any) -> Any:
        rates.append(it.ppo.steps.learning_rate.item())
        losses = loss(*args)
        return torch.cat([losses[:4], torch.tensor([next(kls)]), losses[5:]])

    it.ppo._loss = scripted
    it.collect()
    rates.append(it.update()["policy/learning_rate"].item())
    powers = [round(math.log(rate / 3e-4, 1.5), 3) for rate in rates]
    if per == "minibatch":  # a minibatch's KL counts before its step
        steps = [0, -1, 1, 1, 1, 1, 1, 0, -1, -1, 1, 1, 1, -1, 1, 1]
        assert powers == [sum(steps[:i]) for i in range(17)]
    else:
        assert powers == [0] * 4 + [-1] * 4 + [0] * 4 + [-1] * 5


@pytest.mark.parametrize(("kind", "num_envs", "per"), [("feed-forward", 1, "minibatch"), ("lstm", 12, "epoch")])
def test_first_minibatch_does_not_change_learning_rate(kind: str, num_envs: int, per: str) -> None:
    # Rounding errors (acting and learning use different batch sizes, so kernels may differ) must not
    # count as too small a KL.
    size = {"minibatch_size": 8 * num_envs, "epochs": 1}
    it = learner(kind, num_envs=num_envs, schedule="adaptive", schedule_per=per, **size)
    assert it.ppo.num_minibatches == 1
    for _ in range(3):
        it.collect()
        assert it.update()["policy/learning_rate"].item() == pytest.approx(3e-4)


def test_constant_schedule_keeps_learning_rate() -> None:
    it = learner(schedule="constant", learning_rate=1e-3, kl_threshold=1e-9)
    for _ in range(2):
        it.collect()
        assert it.update()["policy/learning_rate"].item() == pytest.approx(1e-3)


# State and reproducibility


def test_state_dict_is_a_snapshot() -> None:
    it = learner()
    it.train(1)
    state = it.ppo.state_dict()
    before = copy.deepcopy(state)
    it.train(1)
    assert differences(before, state) == []


def test_reported_kl_is_kl_of_old_from_new_policy() -> None:
    it = learner(learning_rate=3e-2, schedule="constant", epochs=2)
    it.collect()
    spy = Spy(it)
    stats = it.update()
    kls = [minibatch["reported"][0].item() for minibatch in spy.minibatches]
    assert stats["policy/kl"].item() == pytest.approx(sum(kls) / len(kls), rel=1e-4)
    last = spy.minibatches[-1]
    valid = last["valid"]
    kl = last["reported"][0].item()
    assert kl == pytest.approx(last["kl"][valid].mean().item(), rel=1e-5)
    assert abs(kl / last["reverse kl"][valid].mean().item() - 1.0) > 0.01, "KL is symmetric here"


def test_explained_variance_of_noisy_values() -> None:
    it = learner(normalize_value=False, gamma=0.0, num_envs=200)
    it.collect()
    # with gamma 0 the return is the reward; the value is the reward plus noise of half its size
    noise = 0.5 * torch.randn(it.rollout.reward.shape, generator=torch.Generator().manual_seed(1))
    it.rollout.value.copy_(it.rollout.reward + noise)
    stats = it.update()
    assert stats["value/explained_variance"].item() == pytest.approx(0.75, abs=0.05)


def test_non_finite_reward_or_observation_is_flagged() -> None:
    for key, spoil in (("check/reward", "reward"), ("check/obs", "obs")):
        it = learner()
        it.collect()
        tensor = it.rollout.reward if spoil == "reward" else it.rollout.obs["policy"]
        tensor[2, 1] = torch.nan
        assert not torch.isfinite(it.update()[key])


def test_choose_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_precision("fp16", torch.device("cpu")) == ("fp16", "as configured")
    assert choose_precision("auto", torch.device("cpu"))[1].startswith("auto: the CPU")
    for capability, precision in (((6, 1), "fp32"), ((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=capability: found)
        assert choose_precision("auto", torch.device("cuda"))[0] == precision


def test_failed_compilation_falls_back_to_eager(monkeypatch, caplog) -> None:
    def broken(function: Any, **settings: Any) -> Any:
        def compiled(*args: Any) -> Any:
            raise BackendCompilerFailed(broken, RuntimeError("no compiler"), None)

        return compiled

    monkeypatch.setattr(torch, "compile", broken)
    eager, compiled = learner("feed-forward"), learner("feed-forward", compile=True)
    for it in (eager, compiled):
        it.train(2)
    assert all(map(torch.equal, eager.policy.parameters(), compiled.policy.parameters()))
    assert len(caplog.messages) == 1 and "uncompiled" in caplog.messages[0]


def run_alone(script: str) -> None:
    """Run a script in a new process, without the shape checks that the compiler cannot handle."""
    here = Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parent), str(here.parents[1]), str(here.parents[2])])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["feed-forward", "lstm"])
def test_compiled_updates_equal_eager_updates(kind: str) -> None:
    script = f"""
import torch
from test_ppo import learner
eager, compiled = learner({kind!r}), learner({kind!r}, compile=True)
for it in (eager, compiled):
    it.train(2)
for a, b in zip(eager.policy.parameters(), compiled.policy.parameters(), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
"""
    run_alone(script)


@pytest.mark.parametrize("kind", ["separate", "lstm"])
def test_bf16_updates_stay_finite_with_fp32_weights(kind: str) -> None:
    it = Learner(RandomEnv(12), ppo_config(network(kind), minibatch_size=24), bf16=True)
    for _ in range(2):
        it.collect()
        spy = Spy(it)
        stats = it.update()
        assert all(torch.isfinite(v) for v in stats.values())
        assert (spy.minibatches[0]["ratio"] - 1).abs().max() < 1e-3
    assert all(p.dtype == torch.float32 for p in it.policy.parameters())


# Learning


class Recall:
    """Memory task: the action in the last of 4 steps must equal the sign shown in the first."""

    obs_sizes, num_actions = {"policy": 2}, 1
    length = 4

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.generator = torch.Generator().manual_seed(0)
        self.no = torch.zeros(num_envs, dtype=torch.bool)
        self.progress = torch.zeros(num_envs, dtype=torch.int64)
        self.cue = self._cue()

    def _cue(self) -> Tensor:
        return torch.randint(0, 2, (self.num_envs,), generator=self.generator) * 2.0 - 1.0

    def _obs(self) -> dict[str, Tensor]:
        shown = torch.where(self.progress == 0, self.cue, 0.0)
        last = (self.progress == self.length - 1).float()
        return {"policy": torch.stack([shown, last], dim=1)}

    def reset(self) -> dict[str, Tensor]:
        return self._obs()

    def step(self, action: Tensor) -> Outcome:
        ended = self.progress == self.length - 1
        reward = torch.where(ended, -(action[:, 0] - self.cue).square(), 0.0)
        self.progress = torch.where(ended, 0, self.progress + 1)
        self.cue = torch.where(ended, self._cue(), self.cue)
        return Outcome(self._obs(), self._obs(), reward, ended, self.no, self.no)


FAST = {"learning_rate": 3e-3, "minibatch_size": 256, "epochs": 4}


@pytest.mark.parametrize("kind", ["feed-forward", "lstm", pytest.param("gru", marks=pytest.mark.slow)])
def test_only_recurrent_policy_learns_to_remember(kind: str) -> None:
    # Without memory the best action is 0, with a reward of -1 per episode.
    it = Learner(Recall(128), ppo_config({**network(kind), "rnn_size": 16}, **FAST))
    per_episode = 4.0 * it.train(18)[-1]
    if kind == "feed-forward":
        assert -1.5 < per_episode < -0.9
    else:
        assert per_episode > -0.2


def test_state_of_another_device_uses_local_optimizer_options() -> None:
    it, other = learner("feed-forward"), learner("feed-forward")
    it.train(1)
    state = it.ppo.state_dict()
    kept = {name for moments in state["optimizer"] for name in moments}
    assert kept == {"step", "exp_avg", "exp_avg_sq"}, "device options are saved"
    other.ppo.load_state_dict(state)
    group = other.ppo.steps.optimizer.param_groups[0]
    assert (group["capturable"], group["fused"]) == (False, True)
    assert group["lr"] is other.ppo.steps.learning_rate
    other.train(1)
