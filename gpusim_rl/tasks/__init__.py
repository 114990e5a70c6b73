"""Package alias: <checkout>/tasks/<file> is imported as gpusim_rl.tasks.<file>; a wheel has the files here."""

from gpusim_rl.files.paths import tasks_dir

__path__ = [str(tasks_dir())]
