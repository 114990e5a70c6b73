"""Multi-process training: data parallelism, actors and hyperparameter search."""
