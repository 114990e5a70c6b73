"""Gate for CI: bounds on the results of a stress test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpusim_rl.errors import ConfigError, available
from gpusim_rl.files.safe_open import load_yaml

PUSHES = (0.5, 1.0)  # of fall rates [m/s]
RATES = ("falls", *(f"falls_push_{size:g}" for size in PUSHES))
KINDS = ("push", "force", "payload", "command", "friction", "delay", "motor", "slope")


def weakest(rows: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any]:
    """Return the search of a kind that found the smallest size."""
    same = [row for row in rows if row["kind"] == kind]
    return min(same, key=lambda row: math.inf if row["smallest"] is None else row["smallest"])


def size_text(row: Mapping[str, Any]) -> str:
    """Return the size that a search found, or the largest that it tried."""
    return f">{row['largest']:.3g}" if row["smallest"] is None else f"{row['smallest']:.3g}"


def read(file: Path) -> dict[str, float]:
    """Return bounds from a yaml file: least sizes by kind of disturbance, and largest fall rates.

    Raises:
        ConfigError: The file has an unknown key, or a value that is not a positive number (of a rate: 0 to 1).
    """
    bounds = load_yaml(file)
    if not isinstance(bounds, dict) or not bounds:
        raise ConfigError(key=str(file), expected="bounds such as `push: 1.5`", got=bounds)
    for key, bound in bounds.items():
        if key not in KINDS + RATES:
            raise ConfigError(f"unknown key {key!r}", key=str(file), hint=available(str(key), KINDS + RATES))
        most = 1.0 if key in RATES else math.inf
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0.0 <= bound <= most:
            expected = "a rate from 0 to 1" if key in RATES else "a positive number"
            raise ConfigError(key=f"{file}: {key}", expected=expected, got=bound)
    return bounds


def judge(bounds: Mapping[str, float], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per bound: `met`, `missed`, or `open` if the interval of a rate contains the bound."""
    rates, rows = {rate["name"]: rate for rate in results["rates"]}, []
    for key, bound in bounds.items():
        if key in RATES:
            (low, high), value = rates[key]["interval"], rates[key]["falls"] / rates[key]["episodes"]
            verdict = "missed" if low > bound else "met" if high <= bound else "open"
            text = f"{key} {value:.3f} (95 % interval {low:.3f} to {high:.3f}), at most {bound:g}"
        else:
            found = weakest(results["searches"], key)
            if found["smallest"] is None:
                verdict = "open" if bound > found["largest"] else "met"
            else:
                verdict = "met" if found["smallest"] >= bound else "missed"
            text = f"{key} {size_text(found)} {found['unit']} ({found['way']}), at least {bound:g}"
        rows.append({"key": key, "bound": bound, "verdict": verdict, "text": text})
    return rows
