"""Rows of docs/reliability.md: every test of this folder ends with one.

python tests/reliability/record.py    rewrite the table after manual changes to rows
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "reliability" / "reliability.json"
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->"
VARIABLE = "GPUSIM_RL_RELIABILITY"
HERE = Path.cwd()  # tests may change the working directory


def record(fault: str, how: str, n: int, outcome: str, lost: str) -> None:
    """Write a row of `n` injections to the file named by GPUSIM_RL_RELIABILITY, if set, in place of its fault's row."""
    if not (name := os.environ.get(VARIABLE)):
        return
    from gpusim_rl.files.provenance import describe_environment, git_state

    file = HERE / name
    git, _ = git_state(DATA, DOCUMENT)
    row = {"fault": fault, "how": how, "n": n, "outcome": outcome, "lost": lost}
    row |= {"git": git, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    with _alone(file):  # tests may run in several processes
        data = json.loads(file.read_text()) if file.exists() else {"rows": []}
        others = [other for other in data["rows"] if other["fault"] != fault]
        environment = {key: value for key, value in describe_environment().items() if key != "command"}
        data = {
            "command": f"{VARIABLE}=benchmarks/reliability/reliability.json pytest -m slow tests/reliability",
            "git": git,
            "environment": environment,
            "rows": sorted([*others, row], key=lambda one: one["fault"].lower()),
        }
        file.write_text(json.dumps(data, indent=2) + "\n")
        if file == DATA:
            write_document()


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Keep other processes out of this block."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def table(data: Mapping[str, Any]) -> str:
    """Format the rows as Markdown; variants `<fault>: <variant>` with equal outcomes share a row."""
    variants: dict[tuple[Any, ...], list[str]] = {}
    for row in data["rows"]:
        fault, _, variant = row["fault"].partition(": ")
        variants.setdefault((fault, row["n"], row["outcome"], row["lost"]), []).append(variant)
    lines = ["|fault|times|outcome|lost|", "|---|---|---|---|"]
    for (fault, n, outcome, lost), names in variants.items():
        words = f"{fault}: {', '.join(names)}" if names[0] else fault
        times = f"{n} each" if len(names) > 1 else str(n)
        lines.append(f"|{words}|{times}|{outcome}|{lost}|")
    return "\n".join(lines) + "\n"


def documented() -> str:
    """Return the document with the table of today's data."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(json.loads(DATA.read_text()))}\n{END}{after}"


def write_document() -> None:
    """Bring the document up to date."""
    if DOCUMENT.exists():
        DOCUMENT.write_text(documented())


if __name__ == "__main__":
    write_document()
