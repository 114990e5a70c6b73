"""Identify a robot's drives from a log of its joints.

gpusim-rl identify Go1Velocity --plan hang.npz                 targets to play on the hanging robot, simulated first
gpusim-rl identify Go1Velocity log.npz --out go1.drives        then: train task=Go1Velocity task.drives=go1.drives
gpusim-rl identify my_arm.xml bag/ --out arm.drives            a robot's file, and a ROS 2 bag
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError, friendly_errors, say, warn
from gpusim_rl.files.safe_open import dump_yaml, writing
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.options import Parser, number
from gpusim_rl.view.text_table import table_lines

if TYPE_CHECKING:
    from gpusim_rl.identify.fit import Identified
    from gpusim_rl.sim import Scene

GROUPS = "armature,damping,friction,gains,bias,delay"
UNITS = {"armature": "kg m2", "damping": "N m s/rad", "friction": "N m", "stiffness": "N m/rad", "bias": "rad"}
TASK_FREE_DT = 0.002  # physics step for a robot's file [s]


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        return identify(parse(argv))


def parse(argv: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = Parser("identify", __doc__)
    parser.option("scene", "task, or a robot: MJCF, URDF or menagerie:<robot>", "Arguments")
    listed = {"type": names, "metavar": "A,B"}
    parser.option("log", "npz, csv, PACE's pt, or a ROS 2 bag", "Arguments", nargs="?", type=Path, metavar="LOG")
    parser.option("--joints", "joints of the log's columns, if it does not name them", "Log", **listed)
    parser.option("--fit", "groups of parameters; without gains, the scene's", "Log", default=GROUPS, **listed)
    parser.option("--out", "drives file", note="<log>.drives")
    parser.option("--plan", "write targets that excite all joints", "Plan", type=Path, metavar="FILE")
    parser.option("--seconds", "of targets", "Plan", default=8.0, type=number(float, 3.0, 60.0))
    parser.option("--hz", "targets per second", "Plan", default=200.0, type=number(float, 50.0, 2000.0))
    parser.options("--seed", "--config-dir")
    return parser.parse_args(argv)


def identify(args: argparse.Namespace) -> int:
    """Write a plan, or a drives file with its page; return the exit code."""
    if (args.log is None) == (args.plan is None):
        raise ConfigError("needs a log, or --plan", key="identify", hint="Try --plan targets.npz")
    import_torch()
    scene, stance = open_scene(args.scene, args.config_dir, pose=args.plan is not None)
    if args.plan is not None:
        return plan(args, scene, stance)
    from gpusim_rl.identify import fit, log, page

    if unknown := {*args.fit} - {*fit.GROUPS}:
        raise ConfigError("unknown group", key="--fit", expected=", ".join(fit.GROUPS), got=min(unknown))
    result = fit.identify(scene, log.read_log(args.log, args.joints), args.fit)
    out = args.out or args.log.with_suffix(".drives")
    say(*table(result))
    with writing(out) as file:
        file.write(dump_yaml(result.drives()))
    with writing(out.with_suffix(".html")) as file:
        file.write(page.page(result, args.scene).encode())
    say(str(out), str(out.with_suffix(".html")))
    for note in result.warnings():
        warn(note)
    return 0


def open_scene(name: str, config_dir: str | None, pose: bool = False) -> tuple[Scene, dict[str, float]]:
    """Return a scene, and with `pose` the joint positions in which a task's robot starts, or a file's."""
    from gpusim_rl.settings.discover import tasks
    from gpusim_rl.sim.drives import servos
    from gpusim_rl.view.playback import scene_by_name

    scene, is_task = scene_by_name(name, config_dir), name in tasks(config_dir, outside=True)
    qpos = list[float]()
    if not is_task:
        scene.spec.option.timestep = TASK_FREE_DT
    elif pose:
        from gpusim_rl.api import make_env

        env = make_env(name, config_dir=config_dir, num_envs=1, sim="mujoco", device="cpu")
        env.reset()
        qpos = env.sim.qpos[0].tolist()  # pyright: ignore[reportAttributeAccessIssue]
        env.close()
    model, qpos = scene.model, qpos or scene.model.qpos0.tolist()
    robot, found = servos(scene)
    return scene, {joint: qpos[model.jnt_qposadr[model.joint(f"{scene.prefix(robot)}{joint}").id]] for joint in found}


def plan(args: argparse.Namespace, scene: Scene, stance: dict[str, float]) -> int:
    """Write and print a plan."""
    from gpusim_rl.files.npz_file import save
    from gpusim_rl.identify.plan import make_plan

    result = make_plan(scene, stance, args.seconds, args.hz, args.seed)
    rows = zip(result.joints, result.stance, result.amplitude, result.margin, result.effort, strict=True)
    head = ["joint", "stance [rad]", "amplitude [rad]", "from limits [rad]", "effort / limit"]
    cells = [[name, *(f"{value:.2f}" for value in values)] for name, *values in rows]
    say(*table_lines([head, *cells], right=head[1:], width=None))
    save(args.plan, result.arrays())
    say(f"{args.plan}: {args.seconds:g} s at {args.hz:g} Hz, simulated with drives of 50, 100 and 150 %")
    return 0


def table(result: Identified) -> list[str]:
    """Return the lines of the tables: parameters with intervals, and errors before and after."""
    drives: dict[str, Any] = result.drives()
    units = (f"{kind} [{unit}]" for kind, unit in UNITS.items())
    head = ["joint", *units, "before", "after [mrad]", "held out / noise"]
    before, after = (1e3 * result.error(readings, "fit") for readings in (result.before, result.after))
    cells = [head]
    for i, (joint, row) in enumerate(drives["joints"].items()):
        numbers = [cell(row[kind]) for kind in UNITS]
        cells.append([joint, *numbers, f"{before[i]:.3g}", f"{after[i]:.3g}", f"{result.held_out[i]:.2f}"])
    return [*table_lines(cells, right=head[1:], width=None), f"delay {cell(drives['delay'], 1e3)} ms"]


def cell(row: dict[str, Any], factor: float = 1.0) -> str:
    """Return a value with half of its interval, or how it is known."""
    value, half = factor * row["value"], 0.5 * factor * (row["high"] - row["low"])
    return f"{value:.3g} ± {half:.1g}" if row["is"] == "identified" else f"{value:.3g} ({row['is']})"


if __name__ == "__main__":
    sys.exit(main())
