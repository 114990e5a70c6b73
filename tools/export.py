"""Export a run's policy to ONNX and TorchScript.

gpusim-rl export Ant                                     the last checkpoint of the latest Ant run
gpusim-rl export Ant --out ant_policy --no-int8          to this folder, without 8-bit weights
gpusim-rl export Go1Velocity --order unitree             with joints in the vendor SDK's order
gpusim-rl export Go1Velocity --c                         also as a C99 file; of an export folder: only that
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
from pathlib import Path

from gpusim_rl.errors import friendly_errors, say, warn
from gpusim_rl.export import SOURCE
from gpusim_rl.export.of_run import is_export, require_onnx
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.options import Parser
from gpusim_rl.view.arguments import check_out


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        export(parse(argv))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("export", __doc__)
    parser.option("run")
    parser.option("--out", "a folder", note="export/ in the run folder")
    parser.option("--no-int8", "skip the ONNX file with 8-bit weights", "Output", action="store_true")
    parser.option("--c", "also write policy.c: the policy in C99, without dependencies", "Output", action="store_true")
    parser.option("--order", "joint order in all files", "Output", "the scene's", choices=["unitree"])
    parser.options("--overwrite", "--trust", "--config-dir")
    return parser.parse_args(argv)


def export(args: argparse.Namespace) -> Path:
    """Export the run's policy; return the folder."""
    if args.c and is_export(args.run):
        write_c(Path(args.run), args.overwrite)
        return Path(args.run)
    require_onnx("export")
    check_out(args.out, overwrite=args.overwrite)
    import_torch()
    from gpusim_rl.export.files import write_all
    from gpusim_rl.testing.measurable import advice

    options = {"order": args.order, "overwrite": args.overwrite, "trust": args.trust, "config_dir": args.config_dir}
    folder, card = write_all(args.run, args.out, int8=not args.no_int8, **options)
    say(*summary(card))
    if unmeasured := [term["name"] for term in card["observation"].get("terms", ()) if term["measured"] is False]:
        warn(advice(card["task"], unmeasured))
    if version := card.get("scene_needs_mujoco"):
        say(f"scene.xml needs MuJoCo {version} or newer: its actuators have delays or torque-speed curves")
    if args.c:
        write_c(folder, overwrite=True)
    say(str(folder))
    return folder


def write_c(folder: Path, overwrite: bool) -> None:
    """Write policy.c into an export folder."""
    from gpusim_rl.deployed.c_source import c_source

    check_out(folder / SOURCE, overwrite=overwrite)
    (folder / SOURCE).write_text(c_source(folder), encoding="utf-8")
    say(f"{folder / SOURCE}; check it on the robot: cc -std=c99 -O2 -DPOLICY_TEST {SOURCE} -lm && ./a.out")


def summary(card: dict) -> list[str]:
    """Return lines with the maximum errors and the latencies."""
    parity, latency = card["parity"], card["latency_us"]
    errors = ", ".join(f"{name} {row['max_error']:.2g}" for name, row in parity["files"].items())
    times = ", ".join(f"{name} {value:.0f}" for name, value in latency["median"].items())
    lines = [
        f"max error on {parity['observations']:,} random observations (relative for values above 1): {errors}",
        f"one action on one thread, median of {latency['calls']:,} calls [us]: {times}",
    ]
    if borders := max((row["borders"] for row in parity["files"].values()), default=0):
        lines.append(f"excluded: {borders} observations at the border between two actions")
    return lines


if __name__ == "__main__":
    sys.exit(main())
