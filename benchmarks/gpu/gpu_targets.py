"""Targets for a CUDA device, and their comparison with the results of `benchmarks/gpu/gpu_check.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("probe", "bench", "learn", "tests", "audit", "more_tests")
"""Parts in order: cheap and decisive parts first; the profiler late, since it is the most likely to crash."""

BUSY, OVER_PHYSICS = 0.95, 0.70
RETURN, PAPER_S, AIM_S = 3000.0, 20.0, 10.0
"""Isaac Gym paper (Makoviychuk et al. 2021, arXiv 2108.10470): Ant's return reaches 3000 in 20 s on an A100."""

NOT_COUNTED = ("physics (host)", "checkpoint")

Part = dict[str, Any]
"""Result of a part: status (ok, failed, timed out, skipped, running), seconds, numbers."""


def read_audit(report: Mapping[str, Any]) -> Part:
    """Summarise a report of `gpusim-rl audit --out` per steady iteration; `row_bytes` are copies of metrics rows."""
    phases = {name: phase for name, phase in report["phases"].items() if name not in NOT_COUNTED}
    iterations, rows = report["iterations"], report["log_rows"]
    copied = {"to_device": 0.0, "to_host": 0.0}
    syncs = row_bytes = 0.0
    for name, phase in phases.items():
        allowed = rows if name == "log" else 0
        copied["to_device"] += phase["to_device"]["bytes"]
        of_host = phase["to_host"]
        beyond = max(0, of_host["count"] - allowed) / max(1, of_host["count"])
        copied["to_host"] += beyond * of_host["bytes"]
        row_bytes += (1.0 - beyond) * of_host["bytes"]
        syncs += max(0, sum(phase["syncs"].values()) - allowed)
    result: Part = {
        "num_envs": report["num_envs"],
        "sim": report["sim"],
        "precision": report["precision"],
        "method": report["method"],
        "bytes_to_device": copied["to_device"] / iterations,
        "bytes_to_host": copied["to_host"] / iterations,
        "row_bytes": row_bytes / iterations,
        "syncs": syncs / iterations,
        "phases": phases,
        "violations": report["violations"],
    }
    timed = [phase for phase in phases.values() if phase.get("wall_s")]
    wall_s = sum(phase["wall_s"] for phase in timed)
    for name in ("busy", "occupied"):
        result[name] = sum(phase[f"{name}_s"] for phase in timed) / wall_s if wall_s else None
    return result


def check_targets(
    parts: Mapping[str, Part],
    *,
    num_envs: int,
    env_counts: Sequence[int],
    on_cuda: bool,
    full: bool,
    wanted: float = RETURN,
    asked: Sequence[str] = PARTS,
) -> list[dict[str, Any]]:
    """Compare results with the targets.

    Args:
        parts: Results by name; missing parts have not run yet.
        num_envs: Env count at which throughput is judged.
        env_counts: Env counts to measure.
        on_cuda: Whether the device is CUDA; the targets apply only to CUDA.
        full: Whether the parts ran at full size; some targets are not judged at small sizes.
        wanted: Target return of the training run.
        asked: Requested parts; others are not judged.

    Returns:
        Dicts with name, target, value, ok (None: not judged), note, and aim (True: missing it is not a failure).
    """
    probe, bench, learn, audit = (parts.get(name, {}) for name in ("probe", "bench", "learn", "audit"))
    found: list[dict[str, Any]] = []

    def judge(
        part: str,
        name: str,
        target: str,
        value: Any,
        met: bool,
        note: str = "",
        *,
        sized: bool = False,
        aim: bool = False,
    ) -> None:
        if part not in asked:
            return
        ok: bool | None = met
        if not on_cuda:
            ok, note = None, "not on CUDA"
        elif sized and not full:
            ok, note = None, "small sizes: not judged"
        elif part not in parts:
            ok, note = False, "not run"
        elif value is None:
            ok, note = False, note or parts[part].get("error") or "not measured"
        found.append({"name": name, "target": target, "value": value, "ok": ok, "note": note, "aim": aim})

    facts, missing = probe.get("facts", {}), probe.get("missing", [])
    odd = {name: [fact["error"]] if "error" in fact else fact.get("wrong", []) for name, fact in facts.items()}
    odd = {name: lines for name, lines in odd.items() if lines} | {name: ["missing"] for name in missing}
    total = len(facts) + len(missing)
    value = f"{total - len(odd)} of {total}" if total else None
    note = "; ".join(f"{name}: {line}" for name, lines in odd.items() for line in lines)
    judge("probe", "probe facts as expected", "all", value, not odd, note)

    counts = {each["num_envs"]: each for each in bench.get("env_counts", [])}
    of_plan = counts.get(num_envs, {})
    over = of_plan.get("training_over_physics")
    bare = next((row for row in of_plan.get("cases", []) if row["kind"] == "physics"), None)
    graph = str(bare["settings"].get("graph", "unknown")) if bare else ""
    captured = graph.startswith("whole rollout")
    note = "" if bare is None else f"bare physics in a graph: {graph}"
    name = f"training over bare physics, {num_envs} envs"
    judge("bench", name, f">= {OVER_PHYSICS:.2f}", over, (over or 0.0) >= OVER_PHYSICS and captured, note, sized=True)
    key = "training_env_steps_per_s"
    speeds = {num: each[key] for num, each in counts.items() if key in each}
    judge(
        "bench",
        "env counts measured",
        ", ".join(map(str, env_counts)),
        ", ".join(map(str, sorted(speeds))) or None,
        set(speeds) >= set(env_counts),
        "; ".join(f"{num}: {speed:,.0f} control steps/s" for num, speed in sorted(speeds.items())),
    )

    seconds = learn.get("seconds_from_first_iteration")
    start = learn.get("seconds_from_start_of_process")
    note = "" if start is None else f"{start:.1f} s from process start"
    if start is None and learn.get("best_return") is not None:
        note = f"best return {learn['best_return']:.0f} in {learn['iterations']} iterations"
    fast = float("inf") if seconds is None else seconds
    judge("learn", f"Ant's return {wanted:g} [s]", f"<= {PAPER_S:g}", seconds, fast <= PAPER_S, note, sized=True)
    judge(
        "learn",
        f"Ant's return {wanted:g} [s], aim",
        f"<= {AIM_S:g}",
        seconds,
        fast <= AIM_S,
        note,
        sized=True,
        aim=True,
    )

    for part, name in (("tests", "decisive GPU tests passed"), ("more_tests", "other GPU tests passed")):
        tests = parts.get(part, {})
        passed = tests.get("passed")
        clean = tests.get("status") == "ok" and not tests.get("failed") and bool(passed)
        note = f"{tests['failed']} failed, {tests['skipped']} skipped" if passed is not None else ""
        judge(part, name, "all", passed, clean, note)

    for key, name in (
        ("bytes_to_device", "bytes host to device in a steady iteration"),
        ("bytes_to_host", "bytes device to host in a steady iteration"),
        ("syncs", "host waits in a steady iteration"),
    ):
        value = audit.get(key)
        beside = key == "bytes_to_host" and value is not None
        note = f"in addition to the metrics row, {audit['row_bytes']:.0f} bytes" if beside else ""
        judge("audit", name, "0", value, value == 0, note)
    busy, occupied = audit.get("busy"), audit.get("occupied")
    note = "" if busy is None else f"lower bound {busy:.3f}: the profiler records graph loops once"
    judge("audit", "device busy", f">= {BUSY}", occupied, (occupied or 0.0) >= BUSY, note, sized=True)
    return found


def describe(report: Mapping[str, Any]) -> list[str]:
    """Format the results as lines."""
    lines = []
    for each in report["results"]:
        sign = {True: "met", False: "MISSED", None: "–"}[each["ok"]]
        if each["aim"] and each["ok"] is False:
            sign = "not yet"
        value = each["value"]
        shown = "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        note = f"  ({each['note']})" if each["note"] else ""
        lines.append(f"{sign:<8}{each['name']}: {shown}, target {each['target']}{note}")
    lines += [f"{name}: {part['status']}, {part['error']}" for name, part in report["parts"].items() if part["error"]]
    return lines
