"""Write a page in which anybody drives a policy, offline.

gpusim-rl share Go1Velocity                              the latest Go1Velocity run; walk.html in its folder
gpusim-rl share runs/Go1Velocity/latest/export           this export
gpusim-rl share Go1Velocity --out go1.html --overwrite   to this file
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
from pathlib import Path

from gpusim_rl.errors import friendly_errors, say
from gpusim_rl.export.of_run import export_folder, results_folder
from gpusim_rl.files.safe_open import writing
from gpusim_rl.options import Parser, number
from gpusim_rl.view.arguments import check_out


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        share(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("share", __doc__)
    parser.option("run", "or an export folder")
    parser.option("--out", ".html", note="walk.html in the run or export folder")
    parser.option("--max-mb", "largest page [MB]", "Output", type=number(float, 1.0), default=6.0)
    parser.options("--overwrite", "--trust", "--config-dir")
    return parser.parse_args(argv)


def share(args: argparse.Namespace) -> Path:
    """Export the run, unless it is an export; write the page and return its path."""
    from gpusim_rl.deployed.share import page

    out = args.out or results_folder(args.run) / "walk.html"
    check_out(out, ".html", overwrite=args.overwrite)
    with export_folder(args, "share") as folder:
        content = page(folder, args.max_mb)
    with writing(out) as file:
        file.write(content.encode())
    say(f"{out}: {len(content) / 1e6:.1f} MB; open it in a browser, or send it to anybody")
    return out


if __name__ == "__main__":
    sys.exit(main())
