"""Command-line options: one layout of `--help`, and one meaning per shared option. Does not import torch."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from gpusim_rl.errors import EXIT_USER_ERROR, ConfigError, did_you_mean, say
from gpusim_rl.files import paths
from gpusim_rl.settings.simulators import SIMULATORS
from gpusim_rl.view.text_table import two_columns

ORDER = ("Commands", "Arguments", "", "Environments", "Simulation", "Output", "Safety", "General")  # "": all others
MAX = sys.float_info.max


def number(kind: type[int] | type[float], low: float, high: float = MAX) -> Callable[[str], Any]:
    """Return an argparse type: a number from `low` to `high`."""

    def parse(text: str) -> Any:
        if not low <= (value := kind(text)) <= high:
            expected = f"at least {low:g}" if high == MAX else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    parse.__name__ = kind.__name__  # for argparse's messages
    return parse


def listed(kind: Callable[[str], Any], choices: Iterable[str] = ()) -> Callable[[str], list[Any]]:
    """Return an argparse type that parses `A,B`, or `[A,B]` as in settings, to a sorted list of unique values."""

    def parse(text: str) -> list[Any]:
        parts = {*text.strip("[]").split(",")}
        if choices and (wrong := parts - {*choices}):
            raise argparse.ArgumentTypeError(f"expected any of {', '.join(choices)}, got {', '.join(wrong)}")
        return sorted(map(kind, parts))

    parse.__name__ = f"A,B of {kind.__name__}"
    return parse


def ros_package(text: str) -> tuple[str, Path]:
    """Parse NAME=FOLDER of a ROS package, and add it to `paths.ROS_PACKAGES`."""
    name, _, folder = text.partition("=")
    path = Path(folder).absolute()
    if not name or not folder or not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER of an existing ROS package, got {text!r}")
    paths.ROS_PACKAGES[name] = path
    return name, path


positive = number(int, 1)
PACKAGES = {"type": ros_package, "action": "append", "default": [], "metavar": "NAME=FOLDER"}
SHARED: dict[str, tuple[str, str, dict[str, Any]]] = {  # group, description, and settings of `add_argument`
    "run": ("Arguments", "run folder, checkpoint, or a task (its latest run)", {}),
    "runs": ("Arguments", "run folders, or tasks (their latest runs)", {"nargs": "+", "metavar": "RUN"}),
    "settings": ("Arguments", "settings, as for train", {"nargs": "*", "metavar": "KEY=VALUE"}),
    "--packages": ("Robot", "folder of a ROS package with a URDF's meshes; repeatable", PACKAGES),
    "--host": ("Viewer", "address of the web server (default: 127.0.0.1, this machine only)", {}),
    "--port": ("Viewer", "port of the web server (default: first free port from 8080)", {"type": int}),
    "--policy": ("Environments", "actions to use", {"choices": ["trained", "zero", "random"], "default": "trained"}),
    "--num-envs": ("Environments", "number of envs", {"type": positive}),
    "--steps": ("Environments", "control steps", {"type": positive}),
    "--seconds": ("Environments", "simulated time [s]", {"type": number(float, 0.001)}),
    "--seed": ("Environments", "seed for initial states, commands and noise", {"type": int, "default": 0}),
    "--sim": ("Simulation", "simulator", {"choices": [*SIMULATORS]}),
    "--device": ("Simulation", "device, cpu or cuda", {"default": "auto"}),
    "--iterations": ("Measurement", "iterations to measure", {"type": positive}),
    "--out": ("Output", "output path", {"type": Path, "metavar": "PATH"}),
    "--overwrite": ("Output", "replace existing files", {"action": "store_true"}),
    "--json": ("Output", "print JSON instead of text", {"action": "store_true"}),
    "--width": ("Output", "width [pixels]", {"type": positive}),
    "--height": ("Output", "height [pixels]", {"type": positive}),
    "--renderer": ("Output", "OpenGL (gl) or ray caster (ray)", {"choices": ["auto", "gl", "ray"], "default": "auto"}),
    "--trust": ("Safety", "import any class named in the run's settings", {"action": "store_true"}),
    "--config-dir": ("Safety", "folder with more tasks; their code is trusted", {"metavar": "FOLDER"}),
}


class Parser(argparse.ArgumentParser):
    """Parser for `gpusim-rl <prog>`; `text` is a docstring: summary, and examples `gpusim-rl <prog> ...   comment`."""

    def __init__(self, prog: str, text: str | None, **settings: Any) -> None:
        super().__init__(prog=f"gpusim-rl {prog}".rstrip(), allow_abbrev=False, **settings)
        self.summary, _, rest = (text or "").partition("\n")
        self.examples = re.findall(rf"^({self.prog}\b.*?)(?:\s\s+(.*))?$", rest, re.MULTILINE)
        self.rows: dict[str, list[tuple[str, str]]] = {}  # left and right columns, by group title

    def option(self, name: str, text: str = "", group: str = "", note: object = None, **settings: Any) -> None:
        """Add an argument; a shared argument takes its group and description from `SHARED`, with `text` appended.

        `note` describes the default; `settings` go to `add_argument`, except `among`, a mutually exclusive group.
        """
        title, shared, defaults = SHARED.get(name, ("", "", {}))
        settings = {**defaults, **settings}
        among, default = settings.pop("among", self), settings.get("default")
        action = among.add_argument(*["-cd"] * (name == "--config-dir"), name, **settings)
        value = action.metavar or {None: action.dest.upper(), Path: "PATH"}.get(action.type, "N")
        value = f"{{{','.join(action.choices)}}}" if action.choices and not action.metavar else str(value)
        value = {"0": "", "?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} ..."}.get(str(action.nargs), value)
        note = default if note is None and default not in (None, [], "") and not isinstance(default, bool) else note
        described = ", ".join(filter(None, (shared, text))) + f" (default: {note})" * (note is not None)
        left = " ".join(filter(None, [", ".join(action.option_strings), value]))
        self.rows.setdefault(group or title, []).append((left, described))

    def options(self, *names: str, **defaults: Any) -> None:
        """Add options from `SHARED`, with `defaults` by attribute name."""
        for name in names:
            key = name.removeprefix("--").replace("-", "_")
            self.option(name, **({"default": defaults[key]} if key in defaults else {}))

    def parse_settings(self, argv: list[str] | None) -> argparse.Namespace:
        """Parse options and settings in any order; reject `--json FILE`, where FILE would be read as a setting."""
        for flag, word in itertools.pairwise(sys.argv[1:] if argv is None else argv):
            if flag == "--json" and word[:1] not in "-~" and "=" not in word:
                self.error(f"--json takes no value, got {word!r}", f"Try --out {shlex.quote(word)}.")
        return self.parse_intermixed_args(argv)

    def format_help(self) -> str:
        """Return summary, usage, examples and options, wrapped to the terminal's width."""
        width = shutil.get_terminal_size().columns
        words = [left for left, _ in self.rows.get("Arguments", ()) if left[0] != "-"]
        words = ["COMMAND"] * ("Commands" in self.rows or self.prog == "gpusim-rl") + ["[OPTIONS]", *words]
        lines = [self.summary, "", " ".join(["Usage:", self.prog, *words]), *["", "Examples:"] * bool(self.examples)]
        lines += [line for command, note in self.examples for line in (f"  # {note}", f"  {command}")]
        rows = {**self.rows, "General": [*self.rows.get("General", []), ("-h, --help", "show this help")]}
        for title in sorted(rows, key=lambda title: ORDER.index(title if title in ORDER else "")):
            lines += ["", f"{title}:", *(line for row in rows[title] for line in two_columns(*row, width))]
        return "\n".join(lines) + "\n"

    def error(self, message: str, hint: str = "") -> NoReturn:
        """Print the error on one line and exit with code 2."""
        if unknown := re.match(r"unrecognized arguments: (--?[\w-]+)", message):
            hint = did_you_mean(unknown[1], self._option_string_actions)
        text = message.removeprefix("argument ")
        say(f"error: {ConfigError(text, hint=f'{hint} See {self.prog} --help')}", file=sys.stderr)
        raise SystemExit(EXIT_USER_ERROR)
