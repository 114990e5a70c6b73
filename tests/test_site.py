"""Documentation site: table of contents, API reference, llms.txt, build."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from types import FunctionType, ModuleType

import pytest

from gpusim_rl import cli
from gpusim_rl.errors import ConfigError
from helpers.commands import ROOT

DOCS = ROOT / "docs"
REFERENCE = sorted((DOCS / "reference").glob("*.rst"))


@pytest.fixture(scope="module")
def build_site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_site", DOCS / "build_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_table_of_contents_once(build_site):
    pages = [path.stem for path in DOCS.glob("*.md") if path.stem != "index"]
    pages += [f"reference/{path.stem}" for path in REFERENCE]
    assert sorted(page for group in build_site.contents().values() for page in group) == sorted(pages)


@pytest.mark.parametrize("package", ["gpusim_rl", "gpusim_rl.env", "gpusim_rl.sim", "gpusim_rl.connect"])
def test_reference_documents_all_exports(package):
    directives = re.findall(r"^\.\. auto(\w+):: (\S+)", "".join(path.read_text() for path in REFERENCE), re.MULTILINE)
    names = [name for kind, name in directives if kind != "module"]
    documented = [getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    modules = {name for kind, name in directives if kind == "module"}
    module = importlib.import_module(package)
    for value in (getattr(module, name) for name in module.__all__):
        if isinstance(value, type | FunctionType):
            assert value in documented or value.__module__ in modules, value


def test_reference_has_every_command(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    text = importlib.import_module("cli_reference").reference()
    titles = re.findall(r"^gpusim-rl (.+)\n~+$", text, re.MULTILINE)
    assert {*titles} == {*cli.commands(), "clip record", "clip check", "clip play", "doctor physics", "doctor scaling"}
    play = text.partition("\ngpusim-rl play\n")[2].partition("\n~~~")[0]
    assert "``--num-envs N``\n   number of envs" in play and "   gpusim-rl play Ant\n" in play


def test_quoted_errors_exist_in_the_code():
    sources = "".join(path.read_text() for path in (ROOT / "gpusim_rl").rglob("*.py"))
    text = re.sub(r'"\s+f?"', "", sources)  # join multi-line messages
    quoted = [part for part in re.findall(r"`([^`]+)`", (DOCS / "limitations.md").read_text()) if part.count(" ") > 2]
    assert len(quoted) > 5
    assert [message for message in quoted if message.removeprefix("error: ") not in text] == []


def test_llms_txt_lists_every_page_with_a_summary(build_site, tmp_path):
    build_site.write_text(tmp_path)
    listed = (tmp_path / "llms.txt").read_text()
    assert re.match(r"# gpusim_rl\n\n> \w.+\.\n", listed)
    links = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\)(?:: (.+))?$", listed, re.MULTILINE)
    pages = [page for group in build_site.contents().values() for page in group]
    assert [target.rpartition(".")[0] for _, target, _ in links] == pages
    for title, target, summary in links:
        if target.endswith(".md"):
            page = (tmp_path / target).read_text()
            assert page.startswith(f"# {title}\n") and page == (DOCS / target).read_text()
            assert 20 < len(summary) < 700 and "](" not in summary
    whole = (tmp_path / "llms-full.txt").read_text()
    assert all(page.read_text() in whole for page in DOCS.glob("*.md"))


def test_external_requests_of_a_page_are_found(build_site, tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="https://x.org">x</a><img src="y.png"><script src="//cdn.org/z.js"></script>'
    )
    assert build_site.outside_requests(tmp_path) == ['a.html loads <script src="//cdn.org/z.js']


@pytest.mark.parametrize("module", ["sphinx", "onnx", "onnxruntime"])
def test_missing_docs_extra_is_rejected_before_building(build_site, module, tmp_path, monkeypatch, capsys):
    for other in build_site.NEEDED:  # may be missing in the test environment
        monkeypatch.setitem(sys.modules, other, ModuleType(other))
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(build_site, "build", lambda out: pytest.fail("build started"))
    with pytest.raises(SystemExit) as end:
        build_site.main(["--out", str(tmp_path)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and module in error and "gpusim-rl[docs]" in error


def test_page_is_written_atomically(build_site, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    build_site.write(page, "old")
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(ConfigError):
        build_site.write(page, "new")
    assert page.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["page.md"]
