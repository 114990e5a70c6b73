"""Learning-curve charts drawn with matplotlib, as images or as themed inline SVG."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import IO

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from gpusim_rl.view.curves import Curve, mean_and_std

MOST = 400  # points per run; longer runs are subsampled
GROUP_COLOURS = 8
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 10, 24  # margins [px]
SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
TIMES = {"h": 3600.0, "min": 60.0, "s": 1.0}  # [s]
# CSS variables of the report page, and the placeholder colours for them in matplotlib.
COLOURS = ("soft", "grid", "line", "card", *(f"c{number}" for number in range(GROUP_COLOURS)))
DRAWN = {name: f"#0000{number:02x}" for number, name in enumerate(COLOURS)}
# Removed from matplotlib's SVG: duplicate ids, page-wide styles, invisible digits.
NOT_FOR_A_PAGE = (
    r' id="\w+[_.]\w+"|<metadata>.*?</metadata>|<style.*?</style>|font-[a-z]+: [^;"]*;? ?| transform="rotate\(-0 [^"]*"'
    r"|(?<=\.\d)\d+(?=[ \n\"])"
)


def draw_runs(
    axes: Axes, curves: Sequence[Curve], colour: str | None = None
) -> tuple[Line2D, np.ndarray, np.ndarray, np.ndarray]:
    """Plot runs as thin lines, with mean and standard deviation; return the mean's line, x, mean and deviation."""
    x, mean, std = mean_and_std(curves)
    [line] = axes.plot(x, mean, color=colour, linewidth=1.8)
    if len(curves) > 1:
        axes.fill_between(x, mean - std, mean + std, color=line.get_color(), alpha=0.18, linewidth=0)
        for curve in curves:
            axes.plot(curve.x, curve.y, color=line.get_color(), linewidth=0.8, alpha=0.75)
    return line, x, mean, std


def chart(
    groups: Mapping[int, list[Curve]], *, label: str, size: tuple[int, int], time: bool = False, threshold: float | None
) -> str:
    """Plot curves of runs, keyed by colour index, as an `<svg>` element; "" without data.

    A bar marks where a mean ends with the shortest run; markers end the curves of incomplete runs. `size` is [px],
    `label` is the accessible name; `time` selects time [s] instead of env steps.
    """
    points = [curve for curves in groups.values() for curve in curves if len(curve.x)]
    if not points:
        return ""
    width, height = size
    right = max(float(curve.x.max()) for curve in points) or 1.0
    figure = Figure(figsize=(width / 72, height / 72), frameon=False)
    axes = figure.add_axes((LEFT / width, BOTTOM / height, 1.0 - (LEFT + RIGHT) / width, 1.0 - (TOP + BOTTOM) / height))
    axes.set(xlim=(0.0, right), ylim=_range(points, threshold), axisbelow=True)
    _draw_axes(axes, size, time_unit(right) if time else ("steps", 1.0), threshold)
    for colour, curves in groups.items():
        _draw_group(axes, DRAWN[f"c{colour % GROUP_COLOURS}"], [_thinned(curve) for curve in curves if len(curve.x)])
    return _svg(figure, label)


def save(figure: Figure, file: IO[bytes], form: str) -> None:
    """Write a figure with literal text: run names are not TeX."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # pyright: ignore[reportAttributeAccessIssue]
        text.set_usetex(False)  # pyright: ignore[reportAttributeAccessIssue]
    figure.savefig(file, format=form, dpi=150)


def time_unit(last_s: float) -> tuple[str, float]:
    """Return the name and length [s] of the unit for a time axis ending at `last_s` [s]."""
    return next((unit, seconds) for unit, seconds in TIMES.items() if last_s >= 2.0 * seconds or seconds == 1.0)


def short(value: float, digits: int = 6) -> str:
    """Format a number compactly, e.g. `1.5 k`."""
    value = float(f"{value:.{digits}g}")
    size, suffix = next((pair for pair in SUFFIXES if abs(value) >= pair[0]), (1.0, ""))
    return f"{value / size:.6g} {suffix}".rstrip()


def visible_range(low: float, high: float) -> tuple[float, float]:
    """Return a y range, widened if so narrow that rounding errors of a constant would look like a curve."""
    low, high = round(low, 12), round(high, 12)  # 0, not its rounding error
    size = max(abs(low), abs(high))
    margin = 0.0 if high - low > 1e-6 * size else 0.1 * size or 1.0
    return low - margin, high + margin


def _range(curves: Sequence[Curve], threshold: float | None) -> tuple[float, float]:
    """Return the y range, excluding extreme values at the start of training."""
    values = np.concatenate([curve.y for curve in curves])
    low, high = float(np.percentile(values, 2)), float(values.max())
    low = float(values.min()) if high - values.min() < 3 * (high - low) else low
    if threshold is not None:
        low, high = min(low, threshold), max(high, threshold)
    low, high = visible_range(low, high)
    low = 0.0 if 0 < low < 0.4 * high else low
    margin = 0.06 * (high - low)
    return low if low == 0.0 else low - margin, high + margin


def _draw_axes(axes: Axes, size: tuple[int, int], unit: tuple[str, float], threshold: float | None) -> None:
    (name, scale), (_, right) = unit, axes.get_xlim()
    xs, ys = _ticks(0.0, right / scale, size[0] // 90), _ticks(*axes.get_ylim(), size[1] // 55)
    axes.set_yticks(ys, [short(value) for value in ys])
    axes.set_xticks(xs * scale, [short(value) for value in xs[:-1]] + [f"{short(xs[-1])} {name}"])
    if xs[-1] * scale > 0.95 * right:
        axes.get_xticklabels()[-1].set_horizontalalignment("right")
    axes.tick_params(length=0, pad=6)
    axes.grid(axis="y", color=DRAWN["grid"], linewidth=1)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(DRAWN["line"])
    if threshold is not None:
        axes.axhline(threshold, color=DRAWN["soft"], linewidth=1, linestyle=(0, (5, 4)))
        label = f"threshold {short(threshold)}"
        axes.annotate(label, (0.0, threshold), (6, 4), textcoords="offset points", fontsize=9)


def _ticks(low: float, high: float, most: int) -> np.ndarray:
    values = np.asarray(MaxNLocator(max(2, most), steps=[1, 2, 5, 10]).tick_values(low, high))
    margin = 1e-9 * (high - low)
    return np.where(abs(values) < margin, 0.0, values)[(values >= low - margin) & (values <= high + margin)]


def _draw_group(axes: Axes, colour: str, curves: Sequence[Curve]) -> None:
    if not curves:
        return
    _, x, mean, _ = draw_runs(axes, curves, colour)
    for curve in curves:
        if curve.end != "complete":
            mark, gid = ("x", "failed") if curve.end == "failed" else ("o", "stopped")
            style = {"markersize": 7, "markeredgewidth": 2, "markerfacecolor": DRAWN["card"]}
            axes.plot(curve.x[-1], curve.y[-1], mark, color=colour, clip_on=False, gid=gid, **style)
    if len(x) and any(curve.x[-1] > 1.02 * x[-1] for curve in curves):
        axes.plot(x[-1], mean[-1], "|", color=colour, markersize=16, markeredgewidth=2, gid="mean-ends")


def _thinned(curve: Curve) -> Curve:
    stride = -(-len(curve.x) // MOST) or 1
    return Curve(curve.x[::-stride][::-1], curve.y[::-stride][::-1], curve.end)


def _svg(figure: Figure, label: str) -> str:
    file = io.BytesIO()
    figure.axes[0].patch.set_visible(False)
    with rc_context({"svg.fonttype": "none"}):
        save(figure, file, "svg")
    width, height = (72.0 * figure.get_size_inches()).round().astype(int)
    label = html.escape(label, quote=True)
    text = re.sub(NOT_FOR_A_PAGE, "", file.getvalue().decode(), flags=re.DOTALL)
    text = re.sub(r"#0000([0-9a-f]{2})", lambda match: f"var(--{COLOURS[int(match[1], 16)]})", text)
    text = re.sub(r' id="(failed|stopped|mean-ends)"', r' class="\1"', text)
    body = re.sub(r".*?<svg [^>]*>", "", text, count=1, flags=re.DOTALL)
    return f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{body}'.strip()
