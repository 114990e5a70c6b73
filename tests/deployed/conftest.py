"""Exports of the bundled demos."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusim_rl.export.files import write_all
from gpusim_rl.files.paths import demos_dir


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory):
    """Export a bundled demo once: `exported("Go1Velocity")`."""
    folders: dict[str, Path] = {}

    def export(name: str) -> Path:
        if name not in folders:
            out = tmp_path_factory.mktemp("exports") / name
            folders[name] = write_all(str(demos_dir() / name), out, int8=False)[0]
        return folders[name]

    return export
