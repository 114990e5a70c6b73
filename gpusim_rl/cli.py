"""Train robots by reinforcement learning in parallel simulation.

gpusim-rl demo                         watch a trained policy
gpusim-rl train task=Ant               train a task
gpusim-rl play Ant                     watch its latest run
"""

from __future__ import annotations

import sys

from gpusim_rl import interrupts

if sys.argv[0].removesuffix(".exe").endswith("gpusim-rl"):
    interrupts.install()  # before slow imports

import importlib.util
import io
import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from gpusim_rl import __version__
from gpusim_rl.errors import ConfigError, available, friendly_errors
from gpusim_rl.files import paths
from gpusim_rl.options import Parser

GROUPS = {
    "Train": ("train", "tune", "collect", "pretrain-encoder"),
    "Look": ("demo", "list", "play", "record", "snapshot", "plot", "report", "looks"),
    "Check": ("doctor", "check-task", "audit", "transfer", "stress", "identify"),
    "Write": ("new-task", "clip"),
    "Share": ("export", "adopt", "share", "publish-demo"),
}
BASH = """\
_gpusim_rl() {
    local IFS=$'\\n'
    COMPREPLY=($(COMP_LINE="${COMP_LINE:0:COMP_POINT}" gpusim-rl completion query 2> /dev/null))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -F _gpusim_rl gpusim-rl
"""


def main(argv: Sequence[str] | None = None) -> int | None:
    """Run the command named by the first argument; return its exit code."""
    with friendly_errors():
        name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
        if name in ("", "-h", "--help", "help"):
            sys.stdout.write(usage())
        elif name in ("-V", "--version"):
            sys.stdout.write(f"gpusim-rl {__version__}\n")
        elif name == "completion":
            completion(rest)
        else:
            return load_command(name)(rest)
    return 0


def commands() -> dict[str, Path]:
    """Return the scripts of all commands by name: `train` and the tools."""
    files = [paths.train_file(), *sorted(paths.tools_dir().glob("[!_]*.py"))]
    return {file.stem.replace("_", "-"): file for file in files}


def usage() -> str:
    """Return the text of `gpusim-rl --help`, with commands grouped by purpose."""
    parser, files = Parser("", __doc__), commands()
    grouped = {name for names in GROUPS.values() for name in names}
    for title, names in {**GROUPS, "Other": [name for name in files if name not in grouped]}.items():
        if texts := {name: files[name].read_text(encoding="utf-8") for name in names if name in files}:
            summary = re.compile(r'"""(.*?)\.?(?:"""|\n)')  # parsing all files takes longer
            parser.rows[title] = [(name, summary.findall(f'{text}""""""')[0]) for name, text in texts.items()]
    parser.rows["Shell"] = [("completion bash", "Print the script for TAB completion")]
    parser.rows["General"] = [("-V, --version", "show the version")]
    return parser.format_help()


def load_command(name: str) -> Callable[..., Any]:
    """Return the `main(argv)` of a command's script."""
    files = commands()
    file = files.get(name.replace("_", "-"))
    if file is None or not file.is_file():
        raise ConfigError(f"unknown command {name!r}", hint=available(name, [*files, "completion"]))
    spec = importlib.util.spec_from_file_location(f"gpusim_rl_command_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses and pickle
    spec.loader.exec_module(module)
    return module.main


def completion(argv: list[str]) -> None:
    """Print the bash completion script, or the completions of `COMP_LINE`."""
    if argv == ["bash"]:
        sys.stdout.write(BASH)
    elif argv == ["query"]:
        sys.stdout.write("".join(f"{word}\n" for word in _complete(os.environ.get("COMP_LINE", ""))))
    else:
        raise ConfigError(key="completion", expected="bash", got=" ".join(argv))


def _complete(line: str) -> list[str]:
    """Return completions of a command line; complete words end with a space."""
    program, *words, last = line.split(" ")
    if not words:
        options = [*commands(), "completion"]
    elif words[0] == "train":
        os.environ["COMP_LINE"] = line.removeprefix(program).lstrip()  # Hydra skips the first word
        with redirect_stdout(io.StringIO()) as printed:
            load_command("train")(["-sc", "query=bash"])
        options = printed.getvalue().split()
    elif last.startswith("-"):
        options = _flags(words)
    else:
        options = [] if words[0] in ("list", "completion") else paths.complete_run(last)
    offered = [word for word in options if word.startswith(last) and paths.SAFE.fullmatch(word)]
    return [word if word.endswith(("=", ".", "/")) else f"{word} " for word in offered]


def _flags(words: list[str]) -> list[str]:
    """Return the flags that the help of a command or subcommand lists."""
    names = [word for word in words if not word.startswith("-")][:2]
    for typed in (names, names[:1]):
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()), suppress(Exception, SystemExit):
            main([*typed, "--help"])
        if flags := re.findall(r"(?<!\S)-[\w-]+", " ".join(re.findall(r"^  (-.*?)(?:  |$)", printed.getvalue(), re.M))):
            return list(dict.fromkeys(flags))
    return []


if __name__ == "__main__":
    sys.exit(main())
