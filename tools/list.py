"""List all tasks with sizes and best results.

gpusim-rl list                       all tasks; a narrow terminal shows the first columns
gpusim-rl list -cd my_cfg            including the tasks in your folder
gpusim-rl list --json --no-sizes     for programs, in about a second
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from typing import Any

from gpusim_rl.errors import friendly_errors, say, warn
from gpusim_rl.learned import Learned, learned
from gpusim_rl.options import Parser
from gpusim_rl.settings.discover import recipes, tasks
from gpusim_rl.view.text_table import table_lines


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        list_tasks(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("list", __doc__)
    parser.rows["Columns"] = [
        ("obs, act, envs", "sizes of observation and action, and number of envs in the task's yaml"),
        ("recipes", "named variants of the task, for recipe=NAME"),
        ("tuned", "yes: a recipe reached the task's threshold; yes*: other settings did; no: none did"),
        ("best result", "the threshold with time and hardware, or the final return"),
    ]
    parser.options("--json", "--config-dir")
    parser.option("--no-sizes", "skip sizes, which require building each task (30 s)", "Output", action="store_true")
    return parser.parse_args(argv)


def list_tasks(args: argparse.Namespace) -> None:
    """Print every task with description, sizes, source and learning result."""
    rows, outcomes = [], learned()
    if not args.no_sizes:
        say("building one env of each task for its sizes; --no-sizes skips this", file=sys.stderr)
    for entry in tasks(args.config_dir).values():
        if entry.problem:  # one broken task must not hide the others
            warn(f"skipped {entry.name}: {entry.problem}")
            continue
        row: dict[str, Any] = {"name": entry.name, "description": entry.description, "source": entry.source}
        row |= {"file": str(entry.file), "recipes": recipes(entry.name, args.config_dir)}
        row |= _learning(outcomes.get(entry.name, {}) if entry.source == "gpusim_rl" else {}, len(row["recipes"]) > 1)
        rows.append(row if args.no_sizes else {**row, **_sizes(entry.name, args.config_dir)})
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return

    sizes = [] if args.no_sizes else ["obs", "act", "envs"]
    table = [["task", *sizes, "recipes", "tuned", "best result", "source", "description"]]
    for row in rows:
        tuned = "yes" if row["tuned"] else "yes*" if row["seconds_to_threshold"] is not None else "no"
        values = [row["name"], *(row[key] for key in sizes), " ".join(row["recipes"]), tuned]
        values += [row["learns"], row["source"], row["description"]]
        table.append(["–" if value is None else str(value) for value in values])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    say(*table_lines(table, right=sizes, width=width))


def _learning(known: Mapping[str, Learned], several: bool) -> dict[str, Any]:
    """Return whether and how a task reached its threshold; `several` adds recipe names."""
    if not known:
        return {"tuned": False, "seconds_to_threshold": None, "learns": None, "overrides": []}
    best = min(known.values(), key=lambda entry: math.inf if entry.seconds is None else entry.seconds)
    words = (f"{f'{name}: ' * several}{entry.result}, {entry.hardware}" for name, entry in known.items())
    row = {"tuned": best.seconds is not None and not best.overrides, "seconds_to_threshold": best.seconds}
    return {**row, "learns": "; ".join(words), "overrides": best.overrides}


def _sizes(name: str, config_dir: str | None) -> dict[str, Any]:
    """Build one env; return its sizes, and `num_envs` and simulator of the yaml; all None if it cannot be built."""
    from gpusim_rl.api import prepare
    from gpusim_rl.view.player import whole_episodes

    try:
        spec = prepare(name, config_dir=config_dir)
        env = whole_episodes(spec, "mujoco", num_envs=1, seed=0)
        env.reset()
    except Exception as error:  # one broken task must not hide the others
        warn(f"{name} cannot be built: {error}")
        return dict.fromkeys(("obs", "act", "envs", "sim"))
    sizes = {"obs": env.obs_sizes["policy"], "act": env.num_actions}
    return {**sizes, "envs": spec.cfg.num_envs, "sim": spec.cfg.sim.name}


if __name__ == "__main__":
    sys.exit(main())
