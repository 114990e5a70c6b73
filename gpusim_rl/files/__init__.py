"""Files of run folders, which may be untrusted: safe opening, checkpoints, paths, provenance."""
