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
import tempfile
from pathlib import Path

from gpusim_rl.errors import friendly_errors, import_extra, say
from gpusim_rl.files.paths import find_checkpoint
from gpusim_rl.files.safe_open import writing
from gpusim_rl.machine.hardware import import_torch
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

    check_out(args.out, ".html", overwrite=args.overwrite)
    folder = Path(args.run)
    exported = (folder / "policy.json").is_file()
    if not exported:
        folder = find_checkpoint(args.run).run_dir or Path()
    out = args.out or folder / "walk.html"
    check_out(out, overwrite=args.overwrite)
    if exported:
        content = page(folder, args.max_mb)
    else:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_extra(package, "export", "share")
        import_torch()
        from gpusim_rl.export.files import write_all

        with tempfile.TemporaryDirectory(prefix="gpusim-rl-") as temporary:
            options = {"trust": args.trust, "config_dir": args.config_dir, "int8": False}
            content = page(write_all(args.run, Path(temporary) / "export", **options)[0], args.max_mb)
    with writing(out) as file:
        file.write(content.encode())
    say(f"{out}: {len(content) / 1e6:.1f} MB; open it in a browser, or send it to anybody")
    return out


if __name__ == "__main__":
    sys.exit(main())
