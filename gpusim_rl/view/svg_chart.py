"""Line charts as SVG inside of a page, whose colours and letters they take: `--c0` to `--c7`, `--grid` and `--ink`."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gpusim_rl.view.curves import Curve, beyond, mean_and_std

MOST = 400  # points of a line; of more, those of a bin are averaged
COLOURS = 8
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 10, 24  # margins [px]
TINY = 1e-12  # numbers of this size are rounding errors of 0
SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Line:
    """A group of runs in a chart.

    Attributes:
        colour: Number of its colour.
        curves: Curve of each run.
        ends: How each run ended: `complete`, `training`, `stopped` or `failed`.
    """

    colour: int
    curves: Sequence[Curve]
    ends: Sequence[str]


def chart(
    lines: Sequence[Line],
    *,
    label: str,
    width: int,
    height: int,
    time_axis: bool = False,
    threshold: float | None = None,
) -> str:
    """Draws a mean for each group, its spread as a band, and each run as a thin line.

    The mean of several runs ends with the shortest: a bar there says so. A run that did not complete ends in a mark.

    Args:
        lines: Groups of runs; curves without points are left out.
        label: Text for screen readers.
        width: Width [px]; the picture scales.
        height: Height [px].
        time_axis: Whether x is a time [s], else env steps.
        threshold: Value at which a dashed line is drawn.

    Returns:
        An `<svg>` element; empty where no curve has a point.
    """
    lines = [_with_points(line) for line in lines]
    points = [curve for line in lines for curve in line.curves]
    if not points:
        return ""
    low, high = _range(points, threshold)
    right = max(float(curve.x.max()) for curve in points) or 1.0
    unit = next(seconds for seconds in (3600.0, 60.0, 1.0) if right >= 2 * seconds or seconds == 1.0)
    frame = _Frame(width, height, right, low, high)
    parts = [*_axes(frame, unit if time_axis else None, threshold)]
    inner = width - LEFT, height - BOTTOM  # what an inner picture leaves is not drawn
    parts.append(f'<svg x="{LEFT}" width="{inner[0]}" height="{inner[1]}" viewBox="{LEFT} 0 {inner[0]} {inner[1]}">')
    parts += [part for line in lines for part in _drawn(frame, line)]
    parts.append("</svg>")
    label = html.escape(label, quote=True)
    body = "".join(parts)
    return f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{body}</svg>'


def ticks(low: float, high: float, most: int) -> list[float]:
    """Returns round numbers within a range, at most `most` of them; their distance is 1, 2 or 5 times a power of 10."""
    raw = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def short(value: float, digits: int = 6) -> str:
    """Returns a number in few characters, `1.5 k`, `0.002`: a round one, or one that is rounded to some digits."""
    value = float(f"{value:.{digits}g}")
    size, suffix = next((pair for pair in SUFFIXES if abs(value) >= pair[0]), (1.0, ""))
    return f"{value / size:.6g} {suffix}".rstrip()


def visible_range(low: float, high: float) -> tuple[float, float]:
    """Returns a range of y in which the rounding errors of a constant, 1e-16 say, are no curve."""
    size = max(abs(low), abs(high))
    if size > TINY and high - low > 1e-6 * size:
        return low, high
    middle = 0.5 * (low + high) if size > TINY else 0.0
    margin = 0.1 * abs(middle) or 1.0
    return middle - margin, middle + margin


@dataclass(frozen=True)
class _Frame:
    """From values to pixels: x from 0 to `right`, y from `low` to `high`."""

    width: int
    height: int
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * value / self.right

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * share

    def path(self, x: np.ndarray, y: np.ndarray) -> str:
        return "M" + "L".join(f"{self.x(a):.1f} {self.y(b):.1f}" for a, b in zip(x, y, strict=True))


def _with_points(line: Line) -> Line:
    known = [(curve, end) for curve, end in zip(line.curves, line.ends, strict=True) if len(curve.x)]
    return Line(line.colour, [curve for curve, _ in known], [end for _, end in known])


def _range(curves: Sequence[Curve], threshold: float | None) -> tuple[float, float]:
    """Returns the range of y: all that is drawn but absurd values at the start of a training."""
    values = np.concatenate([curve.y for curve in curves])
    low, high = np.percentile(values, 2), values.max()
    low = values.min() if high - values.min() < 3 * (high - low) else low
    if threshold is not None:
        low, high = min(low, threshold), max(high, threshold)
    low, high = visible_range(low, high)
    if low > 0 and low < 0.4 * high:
        low = 0.0
    margin = 0.06 * (high - low)
    return low if low == 0.0 else low - margin, high + margin


def _axes(frame: _Frame, unit: float | None, threshold: float | None) -> Iterator[str]:
    left, right, bottom = LEFT, frame.width - RIGHT, frame.height - BOTTOM
    for value in ticks(frame.low, frame.high, max(2, frame.height // 55)):
        y = frame.y(value)
        yield f'<path class="grid" d="M{left} {y:.1f}H{right}"/>'
        yield f'<text class="tick" x="{left - 7}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>'
    scale = unit or 1.0
    name = {None: " steps", 3600.0: " h", 60.0: " min", 1.0: " s"}[unit]
    marks = ticks(0.0, frame.right / scale, max(2, frame.width // 90))
    for value in marks:
        last = name if value == marks[-1] else ""
        x = frame.x(value * scale)
        anchor = "end" if x > right - 24 else "middle"
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="{anchor}">{short(value)}{last}</text>'
    yield f'<path class="axis" d="M{left} {bottom}H{right}"/>'
    if threshold is not None:
        y = frame.y(threshold)
        yield f'<path class="threshold" d="M{left} {y:.1f}H{right}"/>'
        yield f'<text class="tick" x="{left + 6}" y="{y - 5:.1f}">threshold {short(threshold)}</text>'


def _drawn(frame: _Frame, line: Line) -> Iterator[str]:
    if not line.curves:
        return
    x, mean, std = mean_and_std(line.curves)
    several = len(line.curves) > 1
    yield f'<g style="--c:var(--c{line.colour % COLOURS})">'
    if several and len(x):
        edges = np.append(x, x[::-1]), np.append(mean + std, (mean - std)[::-1])
        yield f'<path class="band" d="{frame.path(*edges)}Z"/>'
    for curve, end in zip(line.curves, line.ends, strict=True):
        thin = _thinned(curve)
        if several:
            yield f'<path class="seed" d="{frame.path(thin.x, thin.y)}"/>'
        yield from _mark(frame, thin.x[-1], thin.y[-1], end)
    if len(x):
        thin = _thinned(Curve(x, mean))
        yield f'<path class="mean" d="{frame.path(thin.x, thin.y)}"/>'
    if several and len(x) and any(rest.x[-1] > 1.02 * x[-1] for rest in beyond(line.curves, x)):
        middle, at = frame.y(mean[-1]), frame.x(x[-1])
        yield f'<path class="cut" d="M{at:.1f} {middle - 9:.1f}V{middle + 9:.1f}"><title>the mean ends here, with the'
        yield " shortest run</title></path>"
    yield "</g>"


def _mark(frame: _Frame, x: float, y: float, end: str) -> Iterator[str]:
    """Marks the end of a run: a cross for a failure, a ring where it was stopped or still trains."""
    at, height = frame.x(x), frame.y(y)
    if end == "failed":
        cross = f"M{at - 4:.1f} {height - 4:.1f}l8 8m0 -8l-8 8"
        yield f'<path class="cut" d="{cross}"><title>failed here</title></path>'
    elif end != "complete":
        yield f'<circle class="stop" cx="{at:.1f}" cy="{height:.1f}" r="3.5"><title>{end} here</title></circle>'


def _thinned(curve: Curve) -> Curve:
    """Returns a curve of at most MOST points, each the mean of as many; the last point stays."""
    size = -(-len(curve.x) // MOST)
    if size < 2:
        return curve
    cuts = list(itertools.pairwise([*range(0, len(curve.x), size), len(curve.x)]))
    means = [np.array([values[a:b].mean() for a, b in cuts]) for values in (curve.x, curve.y)]
    return Curve(np.append(means[0], curve.x[-1]), np.append(means[1], curve.y[-1]))
