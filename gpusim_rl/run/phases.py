"""The phases of an iteration. Without torch, which who only reads a run need not wait for."""

PHASES: tuple[str, ...] = ("simulate", "policy", "rollout", "update", "log")
"""`rollout` is simulation and policy together, where one graph holds both."""
