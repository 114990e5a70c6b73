"""Command `gpusim-rl`: list tasks, train, and run tools, as in `gpusim-rl record RUN`."""

from __future__ import annotations

import sys

from gpusim_rl import interrupts

if sys.argv[0].removesuffix(".exe").endswith("gpusim-rl"):
    interrupts.install()  # before imports that take time

import argparse
import ast
import importlib.util
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from gpusim_rl import __version__
from gpusim_rl.errors import ConfigError, available, friendly_errors, say, warn
from gpusim_rl.files import paths
from gpusim_rl.learned import Learned, learned

LEAST = 20  # minimum width of the last column [characters]
COLUMNS = """\
columns (a narrow terminal shows the first ones):
  obs, act      sizes of observation and action
  envs          number of envs in the task's yaml
  recipes       named variants of the task for recipe=NAME; full: the yaml alone
  tuned         yes: a recipe reached the task's threshold; yes*: other settings did, such as fewer envs or another
                algorithm ("overrides" in --json); no: none did
  best result   the threshold with time and hardware, or the final return and the missed threshold; see also README
  source        package or folder of the task
"""

BUILT_IN = {
    "list": "all tasks; --json for programs",
    "completion": 'TAB completion of bash: eval "$(gpusim-rl completion bash)"',
}
BASH = """\
_gpusim_rl() {
    local IFS=$'\\n'
    COMPREPLY=($(COMP_LINE="${COMP_LINE:0:COMP_POINT}" gpusim-rl completion query 2> /dev/null))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -F _gpusim_rl gpusim-rl
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command named by the first argument."""
    with friendly_errors():
        name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
        if name in ("", "-h", "--help", "help"):
            sys.stdout.write(usage())
        elif name in ("-V", "--version"):
            sys.stdout.write(f"gpusim-rl {__version__}\n")
        elif name == "list":
            list_tasks(rest)
        elif name == "completion":
            completion(rest)
        else:
            load_command(name)(rest)


def commands() -> dict[str, Path]:
    """Return script commands by name: `train` and the tools."""
    files = {"train": paths.train_file()}
    for file in sorted(paths.tools_dir().glob("*.py")):
        if not file.stem.startswith("_"):
            files.setdefault(file.stem.replace("_", "-"), file)
    return files


def usage() -> str:
    """Return the text of `gpusim-rl --help`."""
    lines = ["usage: gpusim-rl COMMAND ...", "", *(f"  {name:<12} {summary}" for name, summary in BUILT_IN.items())]
    for name, file in commands().items():
        summary = _summary(file)
        lines.append(f"  {name:<12} {summary[:1].lower()}{summary[1:].rstrip('.')}")
    return "\n".join([*lines, "", "See gpusim-rl COMMAND --help.", ""])


def load_command(name: str) -> Callable[..., Any]:
    """Return the `main(argv)` of a script."""
    files = commands()
    file = files.get(name.replace("_", "-"))
    if file is None or not file.is_file():
        names = [*BUILT_IN, *files]
        raise ConfigError(f"unknown command {name!r}", hint=available(name, names))
    spec = importlib.util.spec_from_file_location(f"gpusim_rl_command_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses and pickle
    spec.loader.exec_module(module)
    return module.main


def completion(argv: list[str]) -> None:
    """Print bash's completion script, or completions of `COMP_LINE`."""
    if argv == ["bash"]:
        sys.stdout.write(BASH)
    elif argv == ["query"]:
        sys.stdout.write("".join(f"{word}\n" for word in _complete(os.environ.get("COMP_LINE", ""))))
    else:
        hint = 'Try eval "$(gpusim-rl completion bash)"'
        raise ConfigError(key="completion", expected="bash", got=" ".join(argv), hint=hint)


def _complete(line: str) -> list[str]:
    """Return completions of a command line; complete words end with a space."""
    program, *words, last = line.split(" ")
    if not words:
        options = [*BUILT_IN, *commands()]
    elif words[0] == "train":
        os.environ["COMP_LINE"] = line.removeprefix(program).lstrip()  # Hydra skips the first word
        with redirect_stdout(io.StringIO()) as printed:
            load_command("train")(["-sc", "query=bash"])
        options = printed.getvalue().split()
    elif last.startswith("-"):
        options = _flags(words)
    else:
        options = [] if words[0] in BUILT_IN else paths.complete_run(last)
    offered = [word for word in options if word.startswith(last) and paths.SAFE.fullmatch(word)]
    return [word if word.endswith(("=", ".", "/")) else f"{word} " for word in offered]


def _flags(words: list[str]) -> list[str]:
    """Return the flags in the usage of a command or subcommand."""
    names = [word for word in words if not word.startswith("-")][:2]
    for typed in (names, names[:1]):
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()), suppress(Exception, SystemExit):
            main([*typed, "--help"])
        options = re.findall(r"^  (-.*?)(?:  |$)", printed.getvalue(), re.MULTILINE)
        if flags := re.findall(r"(?<!\S)-[\w-]+", " ".join(options)):
            return list(dict.fromkeys(flags))
    return []


def list_tasks(argv: list[str]) -> None:
    """Print every task with description, sizes, source and learning result."""
    from gpusim_rl.settings.discover import recipes, tasks

    text, layout = "List all tasks on our simulators for task=NAME.", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("gpusim-rl list", description=text, epilog=COLUMNS, formatter_class=layout)
    parser.add_argument("--json", action="store_true", help="print one JSON list, for programs")
    parser.add_argument("--no-sizes", action="store_true", help="skip sizes, which need a build of each task (seconds)")
    parser.add_argument("-cd", "--config-dir", help="folder with more tasks, as for train.py")
    args = parser.parse_args(argv)
    rows, outcomes = [], learned()
    for entry in tasks(args.config_dir).values():
        if entry.problem:  # one broken task must not hide the others
            warn(f"left out {entry.name}: {entry.problem}")
            continue
        row: dict[str, Any] = {"name": entry.name, "description": entry.description, "source": entry.source}
        row |= {"file": str(entry.file), "recipes": recipes(entry.name, args.config_dir)}
        row |= _learning(outcomes.get(entry.name, {}) if entry.source == "gpusim_rl" else {}, len(row["recipes"]) > 1)
        rows.append(row if args.no_sizes else {**row, **_sizes(entry.name, args.config_dir)})
    if args.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return

    sizes = [] if args.no_sizes else ["obs", "act", "envs"]
    table = [["task", *sizes, "recipes", "tuned", "best result", "source", "description"]]
    for row in rows:
        tuned = "yes" if row["tuned"] else "yes*" if row["seconds_to_threshold"] is not None else "no"
        values = [row["name"], *(row[key] for key in sizes), " ".join(row["recipes"]), tuned]
        values += [row["learns"], row["source"], row["description"]]
        table.append(["–" if value is None else str(value) for value in values])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    say(*table_lines(table, right=sizes, width=width))


def table_lines(table: list[list[str]], right: Sequence[str], width: int | None) -> list[str]:
    """Format a table, cutting its last columns to `width` [characters]; columns in `right` are right-aligned."""
    columns = list(zip(*table, strict=True))
    if width is not None:
        while len(columns) > 1 and sum(max(map(len, column)) + 2 for column in columns[:-1]) + LEAST > width:
            columns.pop()
    for number, column in enumerate(columns):
        size = max(map(len, column))
        columns[number] = tuple(cell.rjust(size) if column[0] in right else cell.ljust(size) for cell in column)
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    return [line if width is None or len(line) <= width else f"{line[: width - 1]}…" for line in lines]


def _learning(known: Mapping[str, Learned], several: bool) -> dict[str, Any]:
    """Return whether and how a task reached its threshold; `several` adds recipe names."""
    if not known:
        return {"tuned": False, "seconds_to_threshold": None, "learns": None, "overrides": []}
    best = min(known.values(), key=lambda entry: math.inf if entry.seconds is None else entry.seconds)
    words = (f"{f'{name}: ' * several}{entry.result}, {entry.hardware}" for name, entry in known.items())
    return {
        "tuned": best.seconds is not None and not best.overrides,
        "seconds_to_threshold": best.seconds,
        "learns": "; ".join(words),
        "overrides": best.overrides,
    }


def _sizes(name: str, config_dir: str | None) -> dict[str, Any]:
    """Return the sizes of a task from one env, and its yaml's defaults; all None if it cannot be built."""
    import torch

    from gpusim_rl.api import prepare
    from gpusim_rl.env import Task, VecEnv
    from gpusim_rl.sim import choose_sim

    try:
        spec, choice = prepare(name, config_dir=config_dir), choose_sim("mujoco", torch.device("cpu"))
        assert issubclass(spec.task_class, Task)
        env = VecEnv.make(spec.task_class, spec.cfg.task, num_envs=1, choice=choice, sim=spec.cfg.sim, seed=0)
        env.reset()
    except Exception as error:  # one broken task must not hide the others
        warn(f"{name} cannot be built: {error}")
        return dict.fromkeys(("obs", "act", "envs", "sim"))
    sizes = {"obs": env.obs_sizes["policy"], "act": env.num_actions}
    return {**sizes, "envs": spec.cfg.num_envs, "sim": spec.cfg.sim.name}


def _summary(file: Path) -> str:
    with suppress(OSError, SyntaxError):
        return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    return ""


if __name__ == "__main__":
    main()
