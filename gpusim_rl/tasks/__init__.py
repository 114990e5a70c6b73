"""Bridge: <checkout>/tasks/<file> is gpusim_rl.tasks.<file>; in a wheel it really is here."""

from gpusim_rl.files.paths import tasks_dir

__path__ = [str(tasks_dir())]
