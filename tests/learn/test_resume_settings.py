"""Settings changed at resume: each takes effect or warns."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest

from gpusim_rl.errors import ConfigError
from gpusim_rl.settings.schema import PPOConfig
from gpusim_rl.testing.conformance import differences
from helpers.every_algorithm import BASES, learner, run
from helpers.states import saved
from helpers.training import nested

CHANGED_VALUES: dict[str, Any] = {
    "batch_size": 8,
    "clip_obs": 0.5,
    "horizon": 8,
    "learning_rate_max": 2e-3,
    "learning_rate_min": 5e-3,
    "learning_starts": 300,
    "max_grad_norm": 1e-4,
    "max_policy_lag": 1,
    "noise.steps": [6.0],
    "noise_max": 0.5,
    "noise_min": 0.05,
    "clip": 0.005,
    "ratio_clip": 0.01,
    "smoothing_clip": 0.1,
    "target_entropy": -1.0,
    "value_clip": False,
    "rnd.group": "style",
    "sequence_length": 4,
    "minibatch_size": 32,
    "updates": 2,
    "policy_delay": 4,
    "rnd.begin": 100,
    "teacher.begin": 100,
    "rnd.hidden": [8],
    "discriminator.batch_size": 8,
    "discriminator.penalized": "agent",
    "discriminator.replay_share": 0.5,
}
"""Changed values for settings without a rule in `changed_value`."""
EXCLUDED = ("max_iterations", "teacher", "teacher.run", "demonstrations.file", "extensions")
"""Trainer settings, and settings that must be given again at resume."""
WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "ppo": ("sequence_length",),
    "amp": tuple(field.name for field in dataclasses.fields(PPOConfig)),  # tested with PPO
    "impala": ("advantage_clip",),
    "impala, gradient": ("ratio_clip", "sequence_length"),
    "sac": ("replay.beta",),
    "td3": ("demonstrations.share", "demonstrations.imitation"),
}
"""Settings without effect in these configurations."""


def leaves(settings: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and value of each setting."""
    hints = typing.get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value) and field.init:
            yield from leaves(value, f"{path}{field.name}.")
        elif field.init:
            yield f"{path}{field.name}", hints[field.name], value


def changed_value(name: str, hint: Any, value: Any) -> Any:
    """Return a different value of the type."""
    if name in CHANGED_VALUES:
        return CHANGED_VALUES[name]
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is Literal:
        return next(option for option in typing.get_args(hint) if option not in (value, "auto"))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1 if value < 100 else value // 2
    if isinstance(value, float):
        return 0.5 * value or 0.5
    options = [arg for arg in typing.get_args(hint) if typing.get_origin(arg) is Literal]
    assert options, f"{name}={value!r}: no changed value known"
    return typing.get_args(options[0])[0]


@pytest.mark.parametrize("label", BASES)
def test_every_changed_setting_takes_effect_or_warns(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    first, env = learner(label, {})
    obs, _ = run(first, env, env.reset(), 4)
    state = saved({"policy": first.policy.state_dict(), "algorithm": first.state_dict()})
    stream = env.generator.get_state()

    def resumed(changes: dict[str, Any], iterations: int) -> Any:
        algorithm, its_env = learner(label, changes)
        its_env.generator.set_state(stream)
        algorithm.policy.load_state_dict(saved(state)["policy"])
        algorithm.load_state_dict(saved(state)["algorithm"])
        _, stats = run(algorithm, its_env, obs, iterations)
        return {"stats": stats, "policy": algorithm.policy.state_dict(), "algorithm": algorithm.state_dict()}

    unchanged = {iterations: resumed({}, iterations) for iterations in (1, 2)}

    def has_effect(changes: dict[str, Any]) -> bool:
        for iterations, before in unchanged.items():  # most settings take effect in the first
            now = resumed(changes, iterations)
            if [path for path in differences(before, now) if "configured" not in path] or capsys.readouterr().err:
                return True
        return False

    structure = first.cfg.structure
    silent = []
    for name, hint, value in leaves(first.cfg):
        left_out = *EXCLUDED, *WITHOUT_EFFECT.get(label, ()), *structure
        if any(f"{name}.".startswith(f"{section}.") for section in left_out):
            continue
        capsys.readouterr()
        try:
            if not has_effect(nested(name, changed_value(name, hint, value))):
                silent.append(name)
        except ConfigError:
            continue
        except Exception as error:
            silent.append(f"{name}: {type(error).__name__} {error}")
    assert silent == [], "\n".join(silent)


def resumed_with(label: str, before: dict[str, Any], after: dict[str, Any]) -> Any:
    """Return an algorithm with the state of one trained with other settings."""
    first, env = learner(label, before)
    run(first, env, env.reset(), 3)
    algorithm, _ = learner(label, after)
    algorithm.policy.load_state_dict(first.policy.state_dict())
    algorithm.load_state_dict(saved(first.state_dict()))
    return algorithm


@pytest.mark.parametrize(
    ("before", "after"), [("adaptive", "constant"), ("linear", "constant"), ("linear", "adaptive")]
)
def test_new_schedule_starts_at_configured_rate(before: str, after: str) -> None:
    it = resumed_with("ppo", {"schedule": before}, {"schedule": after})
    assert it.steps.learning_rate.item() == pytest.approx(it.cfg.learning_rate)


def test_adaptive_rate_continues_after_resume() -> None:
    falling = {"kl_threshold": 1e-9, "learning_rate_min": 1e-6}
    it = resumed_with("ppo", falling, {**falling, "clip": 0.3})
    assert it.steps.learning_rate.item() < 0.9 * it.cfg.learning_rate


def test_fixed_alpha_returns_to_configured_value() -> None:
    kept = resumed_with("sac", {}, {})
    assert kept.log_alpha.exp().item() != pytest.approx(kept.cfg.alpha)
    fixed = resumed_with("sac", {}, {"learn_alpha": False})
    assert fixed.log_alpha.exp().item() == pytest.approx(fixed.cfg.alpha)


def test_noise_scale_of_running_episodes_fits_new_range() -> None:
    it = resumed_with("td3", {}, {"noise_min": 0.4, "noise_max": 0.6})
    assert bool(((it.noise_scale >= 0.4) & (it.noise_scale <= 0.6)).all())


@pytest.mark.parametrize(
    ("label", "changes"),
    [
        ("ppo", {"rnd": {"hidden": [64]}}),
        ("ppo", {"rnd": {"outputs": 8}}),
        ("ppo", {"rnd": {"group": "style"}}),
        ("impala", {"sequence_length": 4}),
    ],
)
def test_incompatible_saved_state_warns_and_restarts(
    label: str, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    it = resumed_with(label, {}, changes)
    assert "warning: " in capsys.readouterr().err
    _, env = learner(label, {})
    run(it, env, env.reset(), 1)
