"""The site of the documents: its contents are complete, and what it says of the code is true."""

from __future__ import annotations

import ast
import importlib
import re
from types import FunctionType

import pytest

from helpers.commands import ROOT

DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.rst"))


def contents() -> dict[str, list[str]]:
    """Pages below the start page, as conf.py has them; it imports Sphinx, which is not installed here."""
    tree = ast.parse((DOCS / "conf.py").read_text())
    [value] = [node.value for node in tree.body if isinstance(node, ast.Assign) and "CONTENTS" in ast.unparse(node)]
    return ast.literal_eval(value)


def test_every_page_is_in_the_contents_once():
    pages = [path.stem for path in DOCS.glob("*.md") if path.stem != "index"]
    pages += [f"reference/{path.stem}" for path in REFERENCE]
    assert sorted(page for group in contents().values() for page in group) == sorted(pages)


@pytest.mark.parametrize("package", ["gpusim_rl", "gpusim_rl.env", "gpusim_rl.sim", "gpusim_rl.connect"])
def test_the_reference_has_what_a_package_exports(package):
    directives = re.findall(r"^\.\. auto(\w+):: (\S+)", "".join(path.read_text() for path in REFERENCE), re.MULTILINE)
    names = [name for kind, name in directives if kind != "module"]
    documented = [getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    modules = {name for kind, name in directives if kind == "module"}
    module = importlib.import_module(package)
    for value in (getattr(module, name) for name in module.__all__):
        if isinstance(value, type | FunctionType):
            assert value in documented or value.__module__ in modules, value


def test_refusals_that_are_quoted_are_in_the_code():
    sources = "".join(path.read_text() for path in (ROOT / "gpusim_rl").rglob("*.py"))
    text = re.sub(r'"\s+f?"', "", sources)  # a message of several lines
    quoted = [part for part in re.findall(r"`([^`]+)`", (DOCS / "not_there.md").read_text()) if part.count(" ") > 2]
    assert len(quoted) > 5
    assert [message for message in quoted if message.removeprefix("error: ") not in text] == []
