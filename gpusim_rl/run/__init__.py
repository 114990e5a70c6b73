"""A run: training, and everything it leaves on disk and on screen."""
