"""Fetch meshes of robots, drawn instead of collision shapes.

gpusim-rl looks go1              Go1 in viewers, videos, reports and shared pages
gpusim-rl looks go1 go2 g1 t1    all robots with meshes
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse

from gpusim_rl.errors import friendly_errors, say
from gpusim_rl.options import Parser


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        fetch(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("looks", __doc__)
    parser.option("robots", "go1, go2, g1 or t1", "Arguments", nargs="+", metavar="ROBOT")
    return parser.parse_args(argv)


def fetch(args: argparse.Namespace) -> None:
    """Write the file of each robot."""
    from gpusim_rl.view import looks

    for robot in args.robots:
        file = looks.write(robot)
        say(f"{file}: {file.stat().st_size / 1e6:.2f} MB; {looks.read(file).licence.splitlines()[0]}")


if __name__ == "__main__":
    sys.exit(main())
