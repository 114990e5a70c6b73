"""Smoothed numbers of the browser viewer, as HTML bars and tables."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping

import torch

from gpusim_rl.env import Step, VecEnv
from gpusim_rl.run.console import number

MEAN_S, MEAN_OF_ALL_S = 0.5, 5.0  # time constants of the means over one env and over all envs [s]
LEAST = 5e-4  # smaller magnitudes are shown as 0
GAIN, LOSS = "#12b886", "#fa5252"  # bar colours
PAD = "padding:0 0.9em;font-size:0.8em;line-height:1.4;"  # matches viser's controls
RIGHT = "text-align:right;font-variant-numeric:tabular-nums"


class Numbers:
    """Running means of reward terms and metrics, slow enough to read."""

    def __init__(self, env: VecEnv) -> None:
        self._dt = env.task.dt
        self.terms: dict[str, float] = {}  # reward terms of the followed env
        self._stats: tuple[dict[str, float], dict[str, float]] = {}, {}  # of the followed env, and of all envs
        self._returns = torch.zeros(env.num_envs, device=env.device)
        self._ended, self._early, self._return_sum = 0, 0, 0.0

    def forget(self) -> None:
        """Discard the means of the followed env."""
        self.terms.clear()
        self._stats[0].clear()

    def add(self, step: Step, env: int) -> None:
        """Add a control step."""
        share, share_of_all = (1.0 - math.exp(-self._dt / time_s) for time_s in (MEAN_S, MEAN_OF_ALL_S))
        _move(self.terms, {name: float(term[env]) for name, term in step.terms.items()}, share)
        _move(self._stats[0], {name: float(stat[env]) for name, stat in step.stats.items()}, share)
        _move(self._stats[1], {name: float(stat.nanmean()) for name, stat in step.stats.items()}, share_of_all)
        self._returns += step.reward
        self._ended += int(step.done.sum())
        self._early += int((step.terminated | step.diverged).sum())
        self._return_sum += float(self._returns[step.done].sum())
        self._returns.masked_fill_(step.done, 0.0)

    def rows(self, env: VecEnv, followed: int) -> Iterable[tuple[str, str, str]]:
        """Yield label, value of the followed env, and value over all envs."""
        mean = number(self._return_sum / self._ended if self._ended else None, least=LEAST)
        yield "time in episode [s]", f"{int(env.progress[followed]) * self._dt:.1f}", ""
        yield "return", number(float(self._returns[followed]), least=LEAST), mean
        yield "episodes", "", str(self._ended)
        yield "ended early", "", f"{self._early / self._ended:.0%}" if self._ended else "–"
        for name in self._stats[1] | self._stats[0]:
            one, of_all = (number(stats.get(name), least=LEAST) for stats in self._stats)
            yield name, one, of_all


def _move(means: dict[str, float], values: Mapping[str, float], share: float) -> None:
    for name, value in values.items():
        if math.isfinite(value):
            means[name] = means.get(name, value) + share * (value - means.get(name, value))


def bars(terms: Mapping[str, float]) -> str:
    """Return HTML bars of reward terms; gains extend to the right."""
    most = max((abs(value) for value in terms.values()), default=0.0) or 1.0
    digits = max(0, 2 - math.floor(math.log10(most)))
    rows = []
    for name, value in {**terms, "sum": sum(terms.values())}.items():
        width = 50.0 * min(1.0, abs(value) / most)
        start = 50.0 if value >= 0.0 else 50.0 - width
        bar = f"position:absolute;left:{start:.1f}%;width:{width:.1f}%;height:100%;border-radius:2px"
        rows.append(
            f"<div>{html.escape(name)}</div>"
            f"<div style='position:relative;height:0.7em;background:rgba(128,128,128,0.15)'>"
            f"<div style='{bar};background:{GAIN if value >= 0.0 else LOSS}'></div></div>"
            f"<div style='{RIGHT}'>{round(value, digits) + 0.0:.{digits}f}</div>"
        )
    grid = "display:grid;grid-template-columns:auto 1fr auto;gap:0 0.6em;align-items:center"
    return f"<div style='{PAD}{grid}'>{''.join(rows)}</div>"


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return an HTML table of `Numbers.rows`."""
    cells = "".join(
        f"<div>{html.escape(name)}</div><div style='{RIGHT}'>{one}</div><div style='{RIGHT}'>{of_all}</div>"
        for name, one, of_all in [("", "<b>this</b>", "<b>all</b>"), *rows]
    )
    return f"<div style='{PAD}display:grid;grid-template-columns:1fr auto auto;gap:0 0.8em'>{cells}</div>"
