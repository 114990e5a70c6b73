"""Training and evaluation runs, with their output on disk and on screen."""
