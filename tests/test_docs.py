"""The documents are true: their commands run, their files work, their tables agree with the code."""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import ROOT, Finished, run_command

BLOCK = re.compile(r"(?:<!-- (file\+?): (\S+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    language: str
    text: str
    file: str | None  # the file that the document says it is
    appended: bool


def blocks(document: str) -> list[Block]:
    """All fenced blocks, in order."""
    text = (ROOT / "docs" / document).read_text()
    return [Block(language, body, file or None, kind == "file+") for kind, file, language, body in BLOCK.findall(text)]


def write(block: Block, folder: Path) -> None:
    """Write or continue the file that a block is."""
    assert block.file is not None
    path = folder / block.file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if block.appended else "w") as file:
        file.write(block.text)


def checkout_copy(folder: Path) -> Path:
    """A copy of the checkout, to add files to."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "runs", "wandb", "build", "dist", "*.egg-info")
    return shutil.copytree(ROOT, folder, ignore=ignored)


def shell(command: str, cwd: Path, *, check: bool = True) -> Finished:
    """Run a command of a document in the reader's shell, where `python` and `pytest` are ours."""
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if command.startswith("pytest"):
        env["PYTHONPATH"] = str(cwd)  # the reader has installed this checkout; we have installed another one
    return run_command("bash", "-ec", command, cwd=cwd, env=env, timeout_s=280, check=check)


# -- add_a_task.md ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reacher(tmp_path_factory) -> tuple[Path, dict[str, Finished]]:
    """A checkout in which a reader has done all that the document says, and what each command printed."""
    folder = checkout_copy(tmp_path_factory.mktemp("add_a_task") / "checkout")
    printed = {}
    for block in blocks("add_a_task.md"):
        if block.file is not None:
            write(block, folder)
        elif block.language == "bash":
            printed[block.text.strip()] = shell(block.text, folder)
    return folder, printed


def test_every_block_of_the_walk_is_a_file_or_a_command():
    found = blocks("add_a_task.md")
    assert [block.text.partition("\n")[0] for block in found if block.file is None and block.language != "bash"] == [
        "my_tasks/assets/reacher.xml     the robot, as MJCF"
    ]
    assert len(found) > 10


@pytest.mark.timeout(600)
def test_the_new_task_learns(reacher):
    folder, printed = reacher
    [run] = [
        path for path in (folder / "runs" / "Reacher").iterdir() if len(rows(path)) == 60 and not path.is_symlink()
    ]
    returns = [float(row["episode/return"]) for row in rows(run) if row["episode/return"]]
    assert returns[0] < 40
    assert returns[-1] > 80
    assert float(rows(run)[-1]["reward/reach"]) > 0.6
    evaluation = printed["python train.py checkpoint=Reacher test=true num_envs=256"].stdout
    assert float(re.search(r"return_mean +(\S+)", evaluation).group(1)) > 90  # type: ignore[union-attr]


def test_tools_know_the_new_task_by_its_run(reacher):
    folder, printed = reacher
    [video, plot] = printed[
        "python tools/record.py Reacher --steps 150\npython tools/plot.py Reacher"
    ].stdout.splitlines()
    assert (folder / video).stat().st_size > 10_000 and video.endswith("videos/000060.mp4")
    assert (folder / plot).is_file()


def test_the_new_task_trains_from_python_and_on_another_simulator(reacher):
    _, printed = reacher
    assert printed["python train_reacher.py"].stdout.splitlines()[-1] == str(64 * 32 * 2)
    [warp] = [done.stdout for command, done in printed.items() if "sim=mjwarp" in command]
    assert "mjwarp on cpu" in warp and "iteration 2/2" in warp


def test_the_new_task_conforms(reacher):
    _, printed = reacher
    summary = printed["pytest -k Reacher tests/test_tasks.py"].stdout.splitlines()[-1]
    assert re.search(r"\b(1\d|2\d) passed", summary) and "failed" not in summary


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("my_tasks/reacher.py", "self._way()], dim=1)", "self._way()], dim=0)"),
        ("my_tasks/reacher.py", "dtype=torch.bool,", "dtype=torch.float32,"),
        ("my_cfg/task/Reacher.yaml", "max_torque: 2.0", "max_torqe: 2.0"),
        ("my_tasks/reacher.py", '["hand"]', '["fist"]'),
    ],
)
def test_mistakes_read_as_the_document_says(tmp_path, file, right, wrong):
    for block in blocks("add_a_task.md"):
        if block.file is not None:
            write(block, tmp_path)
    text = (tmp_path / file).read_text()
    assert right in text
    (tmp_path / file).write_text(text.replace(right, wrong))
    command = f"python {ROOT}/train.py -cd my_cfg task=Reacher debug=smoke device=cpu"
    done = shell(command, tmp_path, check=False)
    assert done.returncode == 2
    assert f"| `{done.stderr.strip()}` |" in (ROOT / "docs" / "add_a_task.md").read_text()


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))
