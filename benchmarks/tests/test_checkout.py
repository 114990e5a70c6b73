"""Benchmarks import the package; the package and its tools do not import benchmarks."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from gpusim_rl.errors import ConfigError
from measuring.checkout import ROOT, process_environment, provenance, write


def test_installed_code_imports_no_benchmark():
    folders = {path.name for path in (ROOT / "benchmarks").iterdir() if path.is_dir() and [*path.glob("*.py")]}
    assert {"measuring", "learn", "throughput", "gpu"} < folders
    programs = {"bench", *folders}
    for folder in ("gpusim_rl", "tools", "tasks"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                found = programs & {name.partition(".")[0] for name in names}
                assert not found, f"{file} imports {found}"


def test_child_process_finds_this_checkout_first(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "mine")
    environment = process_environment(NO_COLOR="1")
    assert environment["PYTHONPATH"] == os.pathsep.join([str(ROOT), "mine"]) and environment["NO_COLOR"] == "1"


def test_provenance_has_library_versions(tmp_path):
    found = json.loads(json.dumps(provenance(tmp_path)))
    assert set(found) == {"git", "environment"} and found["environment"]["versions"]["torch"]


def test_write_error_is_reported_in_one_line(tmp_path):
    write(tmp_path / "new" / "a.json", "{}\n")
    assert (tmp_path / "new" / "a.json").read_text() == "{}\n"
    with pytest.raises(ConfigError, match=r"/dev/null/a\.json: .*--out$"):
        write(Path("/dev/null/a.json"), "")
