"""Tables of observation terms in the docstrings of tasks."""

from __future__ import annotations


def table(rows: list[tuple[str, int, str, str]]) -> str:
    """Format observation terms (name, size, meaning, unit) as a docstring table."""
    cells, first = [("num", "name", "observation", "unit")], 0
    for name, size, words, unit in rows:
        cells.append((str(first) if size == 1 else f"{first}-{first + size - 1}", name, words, unit))
        first += size
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines = [f"    | {line} |" for line in lines]
    lines.insert(1, f"    |{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)
