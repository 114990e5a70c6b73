"""docs/connect.md: its files train, and they are the examples of the modules."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from pathlib import Path

import pytest

from helpers.commands import ROOT, run_command

FILES = dict(
    re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", (ROOT / "docs/connect.md").read_text(), re.M | re.S)
)
LIBRARIES = ("rsl_rl", "skrl", "rl_games", "sb3")
SHORTER = {"learn(40)": "learn(2)", '"timesteps": 640': '"timesteps": 32', "max_epochs: 40": "max_epochs: 2"}
SHORTER |= {"learn(150_000)": "learn(4096)", "num_envs=256": "num_envs=128", "num_actors: 256": "num_actors: 128"}
SAVED = {
    "rsl_rl": "runs/rsl_rl/model_1.pt",
    "skrl": "runs/skrl/checkpoints/agent_30.pt",
    "rl_games": "runs/Cartpole_*/nn/last_Cartpole_ep_2_*.pth",
    "sb3": "runs/sb3.zip",
}


@pytest.mark.parametrize(
    "library", ["skrl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rsl_rl", "rl_games", "sb3"))]
)
def test_the_document_trains(library, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path))  # else it is in /tmp
    for name, text in FILES.items():
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        (tmp_path / name).write_text(text)
    run_command(sys.executable, f"train_{library}.py", cwd=tmp_path)
    assert list(tmp_path.glob(SAVED[library]))


def test_there_is_something_to_shorten():
    assert [text for text in SHORTER if not any(text in file for file in FILES.values())] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_module_shows_the_same_example(library):
    text = importlib.import_module(f"gpusim_rl.connect.{library}").__doc__ or ""
    indented = [line for line in text.splitlines() if line.startswith("    ") or not line]
    assert textwrap.dedent("\n".join(indented)).strip() == FILES[f"train_{library}.py"].strip()
