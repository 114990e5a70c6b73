"""Bridge: the files in <checkout>/tasks are importable as gpusim_rl.tasks.<file>, in a wheel they really are here."""

from gpusim_rl.paths import tasks_dir

__path__ = [str(tasks_dir())]
