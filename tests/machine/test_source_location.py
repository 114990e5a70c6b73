"""Tests of source locations in errors."""

from __future__ import annotations

from pathlib import Path

import torch

from gpusim_rl.machine.source_location import describe, short


def test_paths_are_shortened():
    assert short(str(Path.cwd() / "tasks" / "ant.py")) == "tasks/ant.py"
    assert short("/venv/lib/python3.11/site-packages/rsl_rl/runners/runner.py") == "rsl_rl/runners/runner.py"
    assert short("/elsewhere/task.py") == "/elsewhere/task.py"


def test_error_shows_the_innermost_non_library_line():
    try:
        torch.zeros(2).reshape(3)  # here
    except RuntimeError as error:
        text = describe(error)
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if text.endswith("# here"))
    assert text.startswith("shape '[3]'") and text.endswith(f" at {short(__file__)}:{line}")


def test_error_without_message_shows_its_type():
    assert describe(ValueError()) == "ValueError"
