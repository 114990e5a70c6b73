"""Watch a trained policy that ships with the package.

gpusim-rl demo                          a Go1 in the browser, with sliders for its commands
gpusim-rl demo Humanoid                 another task; a prefix of its name is enough
gpusim-rl demo Ant --num-envs 9         with play's options
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import json
from typing import Any

from gpusim_rl.cli import load_command
from gpusim_rl.errors import ConfigError, did_you_mean, friendly_errors, say
from gpusim_rl.files.paths import demos_dir
from gpusim_rl.options import Parser

FIRST = "Go1Velocity"
OWN = ("-h", "--help", "--list")


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        args, options = parse(sys.argv[1:] if argv is None else argv)
        cards = {file.parent.name: json.loads(file.read_text("utf-8")) for file in demos_dir().glob("*/demo.json")}
        if args.list:
            say(*(f"{name:<19}{summary(card)}" for name, card in sorted(cards.items())))
            return 0
        name = choose(args.task, sorted(cards))
        say(f"{name}: {summary(cards[name])}")
        if not any(option.partition("=")[0] == "--viewer" for option in options):
            options = ["--viewer", "web", *options]
        return load_command("play")([str(demos_dir() / name), *options], "demo")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the task or `--list` if it comes first; return the result, and the remaining arguments for play."""
    parser = Parser("demo", __doc__)
    parser.option("task", "task, or a prefix of its name", "Arguments", nargs="?", default=FIRST)
    parser.option("--list", "list the demos", "Output", action="store_true")
    parser.rows["Viewer"] = [("...", "play's options")]
    ours, others = (argv[:1], argv[1:]) if argv[:1] and (argv[0] in OWN or argv[0][0] != "-") else ([], argv)
    return parser.parse_args(ours), others


def choose(name: str, demos: list[str]) -> str:
    """Return the demo of a task, or the only demo whose name starts with `name`, ignoring case.

    Raises:
        ConfigError: No demo or several demos match.
    """
    found = [demo for demo in demos if demo.lower().startswith(name.lower())]
    if name in demos or len(found) == 1:
        return name if name in demos else found[0]
    if found:
        raise ConfigError(f"{name!r} is ambiguous", hint=f"Try one of {', '.join(found)}")
    raise ConfigError(f"no demo for {name!r}", hint=f"{did_you_mean(name, demos)} Available: {', '.join(demos)}")


def summary(card: dict[str, Any]) -> str:
    """Describe the policy's training and results on one line."""
    reached = ", ".join(f"{name} {value:.3g}" for name, value in card["success"].items())
    value = f"{card['return']:,.0f}" if abs(card["return"]) >= 100 else f"{card['return']:.3g}"
    note = f"; {card['note']}" if card.get("note") else ""
    recipe = f", recipe {card['recipe']}" if card.get("recipe") not in (None, "full") else ""
    return (
        f"{card['algorithm']}{recipe}, {card['env_steps'] / 1e6:.2g} M steps in {card['minutes']:.0f} min on"
        f" {card['hardware']}; return {value}{f', {reached}' if reached else ''}{note}"
    )


if __name__ == "__main__":
    sys.exit(main())
