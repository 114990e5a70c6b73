"""Training with the files of docs/connect.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from helpers.commands import ROOT, run_command

FILES = dict(
    re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", (ROOT / "docs/connect.md").read_text(), re.M | re.S)
)
FILES["rl_games_cartpole.yaml"] = (ROOT / "docs/examples/rl_games_cartpole.yaml").read_text()
SHORTER = {"learn(40)": "learn(2)", '"timesteps": 640': '"timesteps": 32', "max_epochs: 40": "max_epochs: 2"}
SHORTER |= {"learn(150_000)": "learn(4096)", "num_envs=256": "num_envs=128", "num_actors: 256": "num_actors: 128"}
SAVED = {
    "rsl_rl": "runs/rsl_rl/model_1.pt",
    "skrl": "runs/skrl/checkpoints/agent_30.pt",
    "rl_games": "runs/Cartpole_*/nn/last_Cartpole_ep_2_*.pth",
    "sb3": "runs/sb3.zip",
}


@pytest.mark.slow
@pytest.mark.parametrize("library", SAVED)
def test_documented_script_trains(library, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SB3_LOGDIR", str(tmp_path))  # default: /tmp
    for name, text in FILES.items():
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        (tmp_path / name).write_text(text)
    run_command(sys.executable, f"train_{library}.py", cwd=tmp_path)
    assert list(tmp_path.glob(SAVED[library]))


def test_every_shortened_setting_occurs():
    assert [text for text in SHORTER if not any(text in file for file in FILES.values())] == []
