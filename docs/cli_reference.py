"""Command-line reference for the site: a section per command, generated from `--help`."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout, suppress
from unittest import mock

from gpusim_rl import cli


def reference() -> str:
    """Return the sections of all commands, grouped by purpose, as reStructuredText."""
    lines: list[str] = []
    for group, names in cli.GROUPS.items():
        lines += heading(group, "-")
        for name in names:
            lines += section(name)
    return "\n".join(lines)


def section(name: str) -> list[str]:
    """Return the sections of a command and its subcommands."""
    summary, usage, *blocks = help_text(name).rstrip().split("\n\n")
    lines = heading(f"gpusim-rl {name}", "~")
    lines += [summary, "", "::", "", f"   {usage.removeprefix('Usage: ')}", ""]
    below: list[str] = []
    for block in blocks[:-1]:  # the last one has --help
        title, _, text = block.partition(":\n")
        if title == "Examples":
            lines += [".. code-block:: bash", "", *(f" {line}" for line in text.split("\n")), ""]
            continue
        lines += [f".. rubric:: {title}", ""]
        for left, right in re.findall(r"^  (\S.*?)(?:\n {24}|  +)(.+)$", text, re.MULTILINE):
            lines += [f"``{left}``", "   " + re.sub(r"([*`|_\\])", r"\\\1", right), ""]
            below += section(f"{name} {left}") if title == "Commands" else []
    return lines + below


def help_text(name: str) -> str:
    """Return the `--help` output of a command, each option on one line."""
    with mock.patch.dict(os.environ, COLUMNS="1000"), redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        cli.main([*name.split(" "), "--help"])
    return printed.getvalue()


def heading(title: str, line: str) -> list[str]:
    """Return the lines of a heading."""
    return [title, line * len(title), ""]
