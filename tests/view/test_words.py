"""Metric names and numbers in readable form."""

from __future__ import annotations

import math

import pytest

from gpusim_rl.run.console import number
from gpusim_rl.view.charts import short
from gpusim_rl.view.curves import in_words


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("reward/foot_slip", "foot slip, reward per step"),
        ("loss/value", "value loss"),
        ("time/update", "update, share of time"),
        ("system/gpu_memory_gb", "gpu memory [GB]"),
        ("policy/kl", "policy KL per update [nat]"),
        ("foot_slip", "foot slip"),
    ],
)
def test_metric_name_in_words(key, words):
    assert in_words(key) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (1234.5, "1,234"), (-0.12345, "-0.123"), (3e-5, "3e-05"), (0, "0"), (math.inf, "inf")],
)
def test_number_format(value, text):
    assert number(value) == text


def test_number_with_unit_and_negligible_number():
    assert number(0.5, " GB") == "0.5 GB"
    assert [number(value, least=5e-4) for value in (-3e-5, 6e-4, 2000.0)] == ["0", "0.0006", "2,000"]


def test_short_number_has_suffix_and_few_digits():
    texts = {999.0: "999", 1500.0: "1.5 k", -2e6: "-2 M", 3e9: "3 G", 0.002: "0.002", 10_001.0: "10.001 k"}
    assert {value: short(value) for value in texts} == texts
    assert [short(value, 3) for value in (1_234_567.0, 999_999.0, 0.123456)] == ["1.23 M", "1 M", "0.123"]
