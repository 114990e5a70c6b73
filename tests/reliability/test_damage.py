"""Flipped bits, truncated files and missing files in run folders."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusim_rl.files.checkpoint_file import load
from helpers.commands import Finished
from helpers.training import differences, read_csv, the_run
from reliability.processes import SMALL, TRAIN, Slot, the_error
from reliability.record import record

LAST = 10  # iterations of the damaged run
# Number of damages per file, and allowed outcomes. Checkpoints and settings have a digest.
PLAN: dict[str, tuple[int, set[str]]] = {
    "config.yaml": (30, {"warned"}),
    "overrides.yaml": (20, {"warned"}),
    "metrics.csv": (40, {"warned", "silent"}),
    "env.json": (20, {"warned", "silent"}),
    "train.log": (6, {"silent"}),
    "evaluation.json": (6, {"silent"}),
    "checkpoints/last.pt": (40, {"rejected"}),
    "checkpoints/best.pt": (20, {"rejected"}),
    "checkpoints/000009.pt": (20, {"rejected"}),
}
STATE = ("policy", "algorithm", "env", "torch_rng", "iteration", "env_steps", "best_return", "seed")


class Folder:
    """Intact run folder and its expected results."""

    def __init__(self, slot: Slot, root: Path) -> None:
        self.slot, self.root = slot, root
        assert slot.run(TRAIN, *SMALL, f"max_iterations={LAST}", cwd=root).returncode == 0
        run = the_run(root / "runs")
        assert slot.run(TRAIN, f"checkpoint={run}", "test=true", cwd=root).returncode == 0
        self.intact = root / "intact"
        run.rename(self.intact)
        shutil.rmtree(root / "runs")
        self.expected = {name: self.result(name, self.copy()) for name in PLAN}
        for name, (done, found, csv) in self.expected.items():
            assert done.returncode == 0 and done.stderr == "" and found and csv, (name, done.stderr)

    def copy(self) -> Path:
        """Make a fresh copy at a fixed path, because its name is part of some results."""
        run = self.root / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(self.root / "runs", ignore_errors=True)
        return shutil.copytree(self.intact, run)

    def result(self, name: str, run: Path) -> tuple[Finished, dict[str, Any], list[dict[str, str]]]:
        """Run the command that reads file `name`; return its output, resulting state and rows."""
        if name in ("checkpoints/best.pt", "checkpoints/000009.pt"):
            (run / "evaluation.json").unlink(missing_ok=True)
            done = self.slot.run(TRAIN, f"checkpoint={run / name}", "test=true", cwd=self.root)
            file = run / "evaluation.json"
            return done, json.loads(file.read_text()) if done.returncode == 0 else {}, read_csv(run)
        done = self.slot.run(TRAIN, f"checkpoint={run}", f"max_iterations={LAST + 2}", cwd=self.root)
        if done.returncode:
            return done, {}, []
        saved = load(run / "checkpoints" / "last.pt")
        return done, {key: saved[key] for key in STATE}, read_csv(run)


def flip(content: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.choice([0, chance.randrange(len(content)), len(content) - 1])]


def outcome(folder: Folder, name: str, damage: Callable[[bytes], bytes] | None) -> str:
    """Damage a file and return the outcome: rejected, warned or silent; fail on wrong weights, tracebacks and hangs."""
    run = folder.copy()
    if damage is None:
        (run / name).unlink()
    else:
        (run / name).write_bytes(damage((run / name).read_bytes()))
    done, found, csv = folder.result(name, run)
    if done.returncode:
        line = the_error(done)
        assert name.rpartition("/")[2] in line, line
        if damage is not None and name.startswith("checkpoints/"):
            (good,) = re.findall(r"try checkpoint=(\S+) \(for a tool", line)
            named = folder.root / good  # relative to the working directory
            assert named.read_bytes() == (folder.intact / named.relative_to(run)).read_bytes(), "damaged"
        return "rejected"
    _, expected, expected_csv = folder.expected[name]
    assert not differences(found, expected), "wrong weights"
    assert all(line.startswith("warning: ") for line in done.stderr.splitlines()), done.stderr
    if csv != expected_csv:
        assert name == "metrics.csv", done.stderr
        iterations = [int(row["iteration"]) for row in csv]
        assert iterations == sorted(set(iterations)) and iterations[-2:] == [LAST + 1, LAST + 2]
        assert "metrics.csv" in done.stderr or iterations == [int(row["iteration"]) for row in expected_csv]
    return "warned" if done.stderr else "silent"


@pytest.fixture(scope="module")
def folder(slot: Slot, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(slot, tmp_path_factory.mktemp("damage"))


def summary(counts: Counter[tuple[str, str]]) -> str:
    """Count the outcomes; name the files whose damage nobody noticed."""
    words = {"rejected": "rejected", "warned": "repaired", "silent": "unnoticed"}
    parts = []
    for what, text in words.items():
        files = {name: count for (name, kind), count in counts.items() if kind == what}
        if files:
            each = ", ".join(Path(name).name for name in files)
            parts.append(f"{sum(files.values())} {text}" + f" ({each})" * (what == "silent"))
    return ", ".join(parts)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("damage", [flip, cut])
def test_damaged_file_never_changes_resumed_run(
    folder: Folder, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    chance = random.Random(damage.__name__)
    counts = Counter[tuple[str, str]]()
    wrong: list[str] = []
    for name, (number, allowed) in PLAN.items():
        for _ in range(number // 2):
            state = chance.getstate()
            try:
                what = outcome(folder, name, lambda content: damage(content, chance))
            except AssertionError as error:
                chance.setstate(state)
                content = (folder.intact / name).read_bytes()
                damaged = damage(content, chance)
                at = next((i for i, (a, b) in enumerate(zip(content, damaged, strict=False)) if a != b), len(damaged))
                wrong.append(f"{name} at {at} of {len(content)}: {error}")
                continue
            counts[name, what] += 1
            if what not in allowed:
                wrong.append(f"{name}: {what}")
    assert not wrong, "\n".join(wrong)
    words = {
        flip: ("Damaged file: one bit flipped", "one random bit of one file, in every file in turn"),
        cut: ("Damaged file: cut off", "one file is cut at 0, at random or by a byte, in turn"),
    }
    fault, how = words[damage]
    record(
        fault,
        f"{how}; then the run is resumed, or the checkpoint evaluated",
        sum(counts.values()),
        summary(counts),
        "rows of metrics.csv",
    )


@pytest.mark.slow
def test_missing_file_is_reported(folder: Folder) -> None:
    found = {name: outcome(folder, name, None) for name in PLAN}
    needed = {name for name in PLAN if name.startswith("checkpoints/")}
    assert {name for name, what in found.items() if what == "rejected"} == needed, found
    warned = {"config.yaml", "metrics.csv", "env.json", "overrides.yaml"}
    assert {name for name, what in found.items() if what == "warned"} == warned, found
    record(
        "Damaged file: deleted",
        "each file is deleted in turn, then the run is resumed or evaluated",
        len(found),
        summary(Counter(found.items())),
        "its content",
    )
