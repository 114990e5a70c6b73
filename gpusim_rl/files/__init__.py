"""Files of run folders, which may come from a stranger: safe opening, checkpoints, paths, provenance."""
