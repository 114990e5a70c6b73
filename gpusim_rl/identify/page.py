"""Page of an identification: residuals before and after, intervals, couplings, and the held-out end of the log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from gpusim_rl.identify.fit import Identified
from gpusim_rl.identify.log import Array
from gpusim_rl.public import __version__

WIDTH, HEIGHT, POINTS = 900.0, 120.0, 700  # of a chart; of its curves
KINDS = {"armature": "kg m²", "damping": "N m s/rad", "friction": "N m", "stiffness": "N m/rad", "bias": "mrad"}


def page(result: Identified, scene: str) -> str:
    """Return the html; names in it come from strangers and are escaped."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    before, after = (1e3 * result.error(readings, "fit") for readings in (result.before, result.after))
    held, noise = 1e3 * result.error(result.after, "held"), 1e3 * result.noise[0]
    names, columns = ("joint", "before", "after", "held", "noise"), (result.rig.joints, before, after, held, noise)
    errors = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return environment.get_template("page.html").render(
        scene=scene,
        log=Path(result.log.path).name,
        seconds=float(result.log.time[-1] - result.log.time[0]),
        hz=1.0 / result.log.period,
        parameters=len(result.x),
        cpu=result.seconds,
        warnings=result.warnings(),
        errors=errors,
        misfit=result.misfit,
        most=max(float(before.max()), 1e-9),
        kinds=[(kind, unit, bars(result, kind)) for kind, unit in KINDS.items()],
        delay={name: 1e3 * value if name != "is" else value for name, value in result.drives()["delay"].items()},
        couplings=result.couplings(),
        traces=traces(result),
        width=WIDTH,
        height=HEIGHT,
        version=__version__,
    )


def bars(result: Identified, kind: str) -> list[dict[str, Any]]:
    """Return a row per joint with nominal value, value and interval, and their places from 0 to 100."""
    rows, factor = result.drives()["joints"], 1e3 if kind == "bias" else 1.0
    found = []
    for joint, row in rows.items():
        nominal = factor * float(result.rig.nominal[joint].get(kind, 0.0))
        value, low, high = (factor * float(row[kind][name]) for name in ("value", "low", "high"))
        bar = {"joint": joint, "nominal": nominal, "value": value, "low": low, "high": high, "is": row[kind]["is"]}
        found.append(bar)
    ends = [row[name] for row in found for name in ("low", "high", "nominal")]
    least, span = min(ends), max(max(ends) - min(ends), 1e-12)
    for row in found:
        row["at"] = {name: 2.0 + 96.0 * (row[name] - least) / span for name in ("nominal", "value", "low", "high")}
    return found


def traces(result: Identified) -> list[dict[str, Any]]:
    """Return curves of the held-out end for the joints with the largest and the median error."""
    order, rows = np.argsort(-result.held_out), np.flatnonzero(result.rows["held"])
    rows = rows[:: max(1, len(rows) // POINTS)]
    return [trace(result, int(i), rows) for i in dict.fromkeys((order[0], order[len(order) // 2]))]


def trace(result: Identified, i: int, rows: Any) -> dict[str, Any]:
    """Return a joint's measured, simulated and nominal readings as points of polylines."""
    time, curves = result.log.time[rows], [values[rows, i] for values in (result.before, result.log.q, result.after)]
    low, high = min(c.min() for c in curves), max(c.max() for c in curves)

    def points(values: Array) -> str:
        x = WIDTH * (time - time[0]) / max(time[-1] - time[0], 1e-9)
        y = HEIGHT * (1.0 - (values - low) / max(high - low, 1e-9))
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))

    lines: Sequence[tuple[str, str]] = [*zip(("nominal", "measured", "identified"), map(points, curves), strict=True)]
    return {"joint": result.rig.joints[i], "lines": lines, "low": float(low), "high": float(high)}
