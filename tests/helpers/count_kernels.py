"""Counts the kernels of an iteration by task and part, and rewrites tests/kernels.json.

    python tests/helpers/count_kernels.py              all tasks, and the file
    python tests/helpers/count_kernels.py Ant Anymal   only these, and no file

Prints a table in Markdown.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from gpusim_rl.settings.discover import tasks
from gpusim_rl.settings.hydra_errors import unknown_choice
from gpusim_rl.settings.schema import ALGORITHMS
from helpers.fake_cuda import CONTROL_STEP, PARTS, count, load_guard, why_not

TABLE = Path(__file__).parents[1] / "kernels.json"
Kernels = Mapping[str, Mapping[str, int]]
"""Kernels by task and part."""


def torch_version() -> str:
    """Without the patch: `2.13`."""
    return ".".join(torch.__version__.split(".")[:2])


def markdown(kernels: Kernels) -> str:
    """A row for each task."""
    columns = [CONTROL_STEP, *PARTS]
    rows = [["task", *columns], ["---", *("---:" for _ in columns)]]
    rows += [[task, *(f"{parts.get(column, 0):,}" for column in columns)] for task, parts in kernels.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(names: list[str]) -> int:
    unknown = [unknown_choice("task", name, list(tasks()), None) for name in names if name not in tasks()]
    problem = why_not() or next(map(str, unknown), None)
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        load_guard(Path(folder))
    found: dict[str, Kernels] = {}
    for algo in ALGORITHMS:
        found[algo] = {task: count(task, algo).kernels for task in names or tasks()}
        sys.stdout.write(f"{algo}, torch {torch.__version__}\n\n{markdown(found[algo])}\n")
    if not names:
        TABLE.write_text(json.dumps({"torch": torch_version(), "kernels": found}, indent=1) + "\n")
        sys.stdout.write(f"\nwrote {TABLE}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
