"""Random command lines: a training succeeds or fails in one line."""

from __future__ import annotations

import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusim_rl.settings.compose import compose
from helpers.commands import Finished
from reliability.processes import HANGS, TRAIN, Slot
from reliability.record import record

TASKS = ("Cartpole", "Ant", "AnymalTerrain", "FrankaCubeStack", "ShadowHand")
SMALL = (
    *("num_envs=4", "max_iterations=1", "device=cpu", "log.console=plain", "wandb_activate=false"),
    *("ppo.horizon=2", "ppo.epochs=1", "ppo.network.hidden=[8]"),
)
MEMORY = 2_000_000_000
"""Memory limit of a training in addition to libraries [bytes], against a huge number of envs."""
LARGEST_FILE = 100_000_000
LONG_S = 15.0
"""Time after which long trainings get a Ctrl-C [s]."""
LONG = ("max_iterations", "compile")
"""Settings whose valid values make trainings take minutes."""
GROUPS = ("task", "algo", "ppo", "sim", "log", "debug")
NUMBERS = ("1e308", "-1e308", "1e39", "1e30", "1e23", "1e10", "99999999999", f"{2**31}", f"{2**63}", f"{10**23}")
VALUES = {
    "huge": NUMBERS,
    "tiny": ("1e-30", "1e-308", "5e-324", "-1e-30"),
    "negative": ("-1", "-0.5", f"{-(2**63) - 1}"),
    "zero": ("0", "0.0", "-0.0"),
    "not finite": ("nan", "inf", "-inf"),
    "of another type": ("true", "null", "abc", "'1'", "1.5", "3", "[]", "{}"),
    "empty": ("", "''", "' '"),
    "unicode": ("ü", "'✓ \u202e'", "'\u2028'", "'\x1b[2J'", "'a\\nb'", "\ud83d"),
    "path": ("/dev/null/x", "../..", "/proc/self/mem", "no/such.pt", "/", ".", "~"),
    "list": ("[1,2]", "[[]]", "[nan]", "[1,[2,{a:3}]]", "[0]", "[99999999999]", "[-1]"),
    "dict": ("{a:1}", "{a:{b:[1]}}", "{'':1}", "{1:2}"),
    "missing": ("???", "'???'"),
    "interpolation": (
        *("${seed}", "${oc.env:HOME}", "${oc.env:NOPE}", "${nothing}", "'${'", "${", "${task}", "${KEY}"),
        *("${oc.create:1}", "${oc.decode:'['}", "${hydra:runtime.cwd}", "${..x}"),
    ),
    "long": ("a" * 10_000, "1" * 5000, "[" * 500 + "]" * 500),
    "function": ("glob(*)", "int(abc)", "choice(1,2)", "range(1,3)", "sort(3,1)", "1,2", "cast(1)", "extend_list(1)"),
}
SYNTAX = (
    "+=VALUE", "~KEY", "KEY=", "=VALUE", "KEY.=VALUE", "KEY..x=1", "+KEY=VALUE", "++KEY=VALUE", "KEY@x=1", "~KEY=VALUE",
    "KEY", "", "-", "--", "-KEY=1", "KEY.x=1", ".=1", "a.b.c=", "+a.b.c=VALUE", "++KEY.x=VALUE", "$", "KEY==VALUE",
    "'KEY'=VALUE", "KEY=VALUE=", "+++KEY=1", "KEY:=1", "~", "+", "++", "KEY/x=1", "+KEY/x=1", " KEY=VALUE", "KEY[0]=1",
    "${seed}=1", "~a.b", "ü=1", "{KEY}=1", "KEY@=1", "@KEY=1",
)  # fmt: skip


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def invalid_value(draw: random.Random, key: str, now: Any) -> str:
    """Draw a value for a setting; numeric settings mostly get numbers, which pass the type check."""
    if key in LONG:
        return draw.choice(VALUES[draw.choice(["negative", "zero", "not finite", "empty", "unicode", "path", "list"])])
    if isinstance(now, (int, float)) and not isinstance(now, bool) and draw.random() < 0.85:
        whole = isinstance(now, int)
        number = 10 ** draw.uniform(0, 20) if whole else 10 ** draw.uniform(-50, 20)
        text = str(int(number)) if whole else f"{number:.3g}"
        return draw.choice([text, f"-{text}", "0", "1", str(2**63 - 1), str(2**31), draw.choice(NUMBERS)])
    if isinstance(now, bool) and draw.random() < 0.6:
        return str(not now).lower()
    return draw.choice(VALUES[draw.choice(list(VALUES))])


def command_lines(seed: int, n: int, tasks: tuple[str, ...] = TASKS) -> list[list[str]]:
    """Draw command lines of small trainings, each with one to three invalid overrides."""
    draw = random.Random(seed)
    settings = {task: sorted(leaves(compose([f"task={task}"])), key=lambda leaf: leaf[0]) for task in tasks}
    lines = []
    for _ in range(n):
        task = draw.choice(tasks)
        overrides = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            key, now = draw.choice(settings[task]) if draw.random() < 0.95 else (draw.choice(GROUPS), "")
            text = draw.choice(SYNTAX) if draw.random() < 0.1 else "KEY=VALUE"
            overrides.append(text.replace("VALUE", invalid_value(draw, key, now)).replace("KEY", key))
        recurrent = ["ppo.network.rnn=gru"] if draw.random() < 0.1 else []
        lines.append([f"task={task}", *SMALL, *recurrent, *overrides])
    return lines


def outcome_of(ended: Finished, interrupted: bool) -> str:
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    if ended.returncode == HANGS:
        return "hang"
    if "Traceback" in ended.stderr + ended.stdout:
        return "traceback"
    if ended.returncode == 0 and not errors:
        return "trained"
    if interrupted and ended.returncode == 130:
        return "trained until Ctrl-C"
    if ended.returncode == 2 and len(errors) == 1 and ended.stderr.endswith(f"{errors[0]}\n"):
        return "rejected in one line"
    return "other"


def outcomes(lines: list[list[str]], folder: Path, slot: Slot) -> Counter[str]:
    """Run command lines; count outcomes and fail on bad ones."""
    slot.run(TRAIN, "--help", cwd=folder)  # now everything is imported
    pages = int(Path(f"/proc/{slot.server.pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.prlimit(slot.server.pid, resource.RLIMIT_AS, (limit, limit))
    resource.prlimit(slot.server.pid, resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    found, bad = Counter[str](), []
    for number, line in enumerate(lines):
        work = folder / str(number)
        work.mkdir()
        began, interrupted = time.monotonic(), False
        running = slot.start(TRAIN, *line, cwd=work)
        while running.alive:
            time.sleep(0.01)
            if time.monotonic() - began > LONG_S and not interrupted:
                running.send(signal.SIGINT)
                interrupted = True
        ended = running.ended()
        outcome = outcome_of(ended, interrupted)
        found[outcome] += 1
        if outcome not in ("trained", "trained until Ctrl-C", "rejected in one line"):
            typed = " ".join(text[:200] for text in line if text not in SMALL)
            bad.append(f"{outcome} ({ended.returncode}): {typed}\n{ended.stderr[-1500:]}")
    assert not bad, f"{len(bad)} of {len(lines)} ended badly:\n" + "\n".join(bad)
    return found


@pytest.mark.slow
def test_invalid_overrides_train_or_fail_in_one_line(tmp_path, slot):
    found = outcomes(command_lines(seed=9, n=12, tasks=("Cartpole", "Ant")), tmp_path, slot)
    assert found["rejected in one line"] > found["trained"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_overrides_train_or_fail_in_one_line(tmp_path, slot):
    n = 300
    found = outcomes(command_lines(seed=300, n=n), tmp_path, slot)
    words = ", ".join(f"{count} {outcome}" for outcome, count in found.most_common())
    record("Random overrides", "1 to 3 settings get an invalid value or odd syntax, one seed", n, words, "nothing")
