"""Training without Linux-only calls, signals and files of /proc and /sys."""

from __future__ import annotations

import sys

from helpers.commands import ROOT, run_command

WITHOUT = """
import os, pathlib, signal

for name in ("memfd_create", "O_DIRECTORY", "sched_getaffinity", "sched_setaffinity", "fork", "forkpty"):
    delattr(os, name)
del signal.SIGHUP, signal.SIGQUIT

def hidden(original):
    def call(self, *arguments, **options):
        if self.parts[:2] in (("/", "proc"), ("/", "sys")):
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return original(self, *arguments, **options)
    return call

# Only pathlib is patched: psutil reads /proc on Linux, but not on macOS.
for name in ("open", "read_text", "read_bytes", "exists", "is_file", "is_dir", "stat"):
    setattr(pathlib.Path, name, hidden(getattr(pathlib.Path, name)))

import gpusim_rl

small = {"device": "cpu", "debug": "smoke", "log": {"console": "quiet"}}
row = gpusim_rl.train("Cartpole", max_iterations=2, **small)
assert row["iteration"] == 2
row = gpusim_rl.train("Cartpole", checkpoint="Cartpole", max_iterations=4)
assert row["iteration"] == 4
"""


def test_cartpole_trains_saves_and_resumes(tmp_path):
    run_command(sys.executable, "-c", WITHOUT, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    [run] = (tmp_path / "runs" / "Cartpole").glob("2*")
    assert len((run / "metrics.csv").read_text().splitlines()) == 1 + 4
    assert (run / "checkpoints" / "last.pt").is_file()
