"""Looking at a run: player, renderers, snapshots and videos."""
