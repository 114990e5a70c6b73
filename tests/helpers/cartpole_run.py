"""Run folder of Cartpole as a training leaves it."""

from __future__ import annotations

import pytest

from gpusim_rl.files.safe_open import dump_yaml
from gpusim_rl.settings import compose as composing


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "Cartpole" / "2026-01-31_12-00-00"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.pt").write_bytes(b"x")
    (folder / "checkpoints" / "000050.pt").write_bytes(b"x")
    saved = composing.compose(["task=Cartpole", "num_envs=64"]) | {"checkpoint": "old.pt", "test": True}
    (folder / "config.yaml").write_bytes(dump_yaml(saved))
    (folder / "overrides.yaml").write_bytes(dump_yaml(["task=Cartpole", "num_envs=64", "checkpoint=old.pt"]))
    (folder.parent / "latest").symlink_to(folder.name)
    return folder
