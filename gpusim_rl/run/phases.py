"""Phases of an iteration. Does not import torch, so that tools read runs quickly."""

PHASES: tuple[str, ...] = ("simulate", "policy", "rollout", "actors", "update", "log")
# `rollout`: simulate and policy in one graph; `actors`: waiting for actors' rollouts

ITERATION = "iteration"  # profiler range around all phases
OUTSIDE = "outside phases"  # part of an iteration outside all phases

_REPORTED_AS = {"simulate": "rollout", "policy": "rollout", ITERATION: OUTSIDE}


def reported_phase(phase: str) -> str:
    """Return the name under which a timer's phase is reported."""
    return _REPORTED_AS.get(phase, phase)
