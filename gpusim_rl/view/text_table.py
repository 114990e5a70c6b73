"""Tables of text in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

LEAST = 20  # minimum width of the last column [characters]
INDENT = 24  # second column of a help text [characters]


def table_lines(table: list[list[str]], right: Sequence[str], width: int | None) -> list[str]:
    """Format a table, cutting its last columns to `width` [characters]; columns in `right` are right-aligned."""
    columns = list(zip(*table, strict=True))
    if width is not None:
        while len(columns) > 1 and sum(max(map(len, column)) + 2 for column in columns[:-1]) + LEAST > width:
            columns.pop()
    for number, column in enumerate(columns):
        size = max(map(len, column))
        columns[number] = tuple(cell.rjust(size) if column[0] in right else cell.ljust(size) for cell in column)
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    return [line if width is None or len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def two_columns(left: str, right: str, width: int) -> list[str]:
    """Format a row; a long left column has a line of its own."""
    first = f"  {left}".ljust(INDENT)
    above, first = ([first.rstrip()], " " * INDENT) if len(first) > INDENT - 2 and first[-1] != " " else ([], first)
    wrapped = textwrap.wrap(right, max(20, width - INDENT - 1), break_on_hyphens=False) or [""]
    return [*above, *(f"{first if i == 0 else ' ' * INDENT}{line}".rstrip() for i, line in enumerate(wrapped))]
