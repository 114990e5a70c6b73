"""Text tables for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def table_lines(table: list[list[str]], right: Sequence[str], width: int | None, least: int = 20) -> list[str]:
    """Format rows to fit `width`: drop trailing columns, cut the last to `least` or more; right-align `right`."""
    columns = list(zip(*table, strict=True))
    if width is not None:
        while len(columns) > 1 and sum(max(map(len, column)) + 2 for column in columns[:-1]) + least > width:
            columns.pop()
    for number, column in enumerate(columns):
        size = max(map(len, column))
        columns[number] = tuple(cell.rjust(size) if column[0] in right else cell.ljust(size) for cell in column)
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    return [line if width is None or len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def two_columns(left: str, right: str, width: int, indent: int = 24) -> list[str]:
    """Format a row of two columns, wrapped to `width`; a long left cell gets its own line."""
    first = f"  {left}".ljust(indent)
    above, first = ([], first) if first.endswith("  ") else ([first.rstrip()], " " * indent)
    wrapped = textwrap.wrap(right, max(20, width - indent - 1), break_on_hyphens=False) or [""]
    return [*above, *(f"{first if i == 0 else ' ' * indent}{line}".rstrip() for i, line in enumerate(wrapped))]
