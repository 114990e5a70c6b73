"""Notebooks: links, empty outputs, and a full run of each."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from helpers.commands import ROOT

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_have_no_outputs_and_links_resolve(notebook):
    code, text = cells(notebook, "code"), cells(notebook, "markdown")
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)
    for target in re.findall(r"\]\(([^)]+)\)", "\n".join("".join(cell["source"]) for cell in text)):
        assert (FOLDER / target).is_file(), target


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "least"), [("first_training", 300.0), ("own_robot", 80.0)])
def test_notebook_trains_and_shows_curve_and_video(name, least, tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any(len(data.get("image/png", "")) > 10_000 for data in shown)
    assert any("data:video/mp4;base64" in data.get("text/html", "") for data in shown)
    returns = [float(text) for data in shown for text in re.findall(r"[\d.]{4,}", data.get("text/plain", ""))]
    assert max(returns) > least
