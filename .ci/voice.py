"""Check those language rules of CONTRIBUTING.md that a regex can check; exit with 1 on a violation."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

OPENING = re.compile(r"(What|Who|Whom|Whose|That|Those|Of|As|Has|Lets|Where|By|Beside|Likewise|Whether)\b")
THIRD_PERSON = re.compile(
    r"(Returns|Adds|Makes|Reads|Writes|Builds|Checks|Gives|Takes|Finds|Sets|Draws|Runs|Raises|Keeps|Tells|Lets|Puts"
    r"|Prints|Steps|Computes|Creates|Starts|Stops|Waits|Yields|Does|Goes)\b"
)
WORDS = re.compile(
    r"\b(anew|so many|(?:task|yaml|policy|envs?|clip|ones?) of ours|go(?:es)? on|went on|otherwise than"
    r"|beside (?:the|it|them|each)|tells?|told)\b",
    re.I,
)
NAME = re.compile(r"_?of_\w+|_?OF_\w+")
ALLOWED = re.compile(r"(?:one|under|1) (?:of|in|frame in)? ?so many|\btell apart\b")
PROSE = {".md", ".yaml", ".ini"}
SKIPPED = ("benchmarks/parity/",)
"""Recorded data."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield each docstring's line and text, and whether it belongs to a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text, not isinstance(node, ast.Module | ast.ClassDef)


def complaints(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and message of each violation in a source file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for line, text, function in docstrings(tree):
        if OPENING.match(text) or (function and THIRD_PERSON.match(text)):
            yield line, f"opening {text.split()[0]!r}"
        yield from prose(line, text)
    for node in ast.walk(tree):
        for name in (getattr(node, "name", None), getattr(node, "arg", None)):
            if isinstance(name, str) and NAME.fullmatch(name):
                yield node.lineno, f"name {name!r}"  # type: ignore[attr-defined]
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield from prose(token.start[0], token.string)


def prose(line: int, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and message of each discouraged phrase in a text."""
    for number, each in enumerate(text.splitlines()):
        for match in WORDS.finditer(ALLOWED.sub("", each)):
            yield line + number, f"phrase {match[0]!r}"


def main() -> int:
    """Check all tracked files."""
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for path in map(Path, names):
        if str(path).startswith(SKIPPED) or path.is_symlink():
            continue
        if path.suffix == ".py":
            found += [f"{path}:{line}: {words}" for line, words in complaints(path)]
        elif path.suffix in PROSE:
            found += [f"{path}:{line}: {words}" for line, words in prose(1, path.read_text(encoding="utf-8"))]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
