"""Phases of an iteration, without torch: tools that read runs import this."""

PHASES: tuple[str, ...] = ("simulate", "policy", "rollout", "actors", "update", "log")
# `rollout`: simulate and policy in one graph; `actors`: waiting for rollouts of actors

ITERATION = "iteration"  # range around all phases
OUTSIDE = "outside phases"  # part of an iteration in none of its phases

_REPORTED_AS = {"simulate": "rollout", "policy": "rollout", ITERATION: OUTSIDE}


def reported_phase(phase: str) -> str:
    """Return the phase under which a timer's phase is reported."""
    return _REPORTED_AS.get(phase, phase)
