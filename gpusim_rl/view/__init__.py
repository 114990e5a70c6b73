"""Visualisation of runs: player, renderers, snapshots and videos."""
