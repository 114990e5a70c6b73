"""The phases of an iteration. Without torch: a program that only reads a run need not import it."""

PHASES: tuple[str, ...] = ("simulate", "policy", "rollout", "actors", "update", "log")
"""`rollout` is simulation and policy together, where one graph holds both. `actors` waits for rollouts of actors."""

ITERATION = "iteration"
"""Around all phases of one iteration."""

OUTSIDE = "outside phases"
"""What is in an iteration, but in none of its phases."""

_REPORTED_AS = {"simulate": "rollout", "policy": "rollout", ITERATION: OUTSIDE}


def reported_phase(phase: str) -> str:
    """The phase under which the timer's phase is reported: simulation and policy are the rollout."""
    return _REPORTED_AS.get(phase, phase)
