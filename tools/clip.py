"""Record, check and play motion clips.

gpusim-rl clip record Go1Velocity --command 0.6 0 0      record 4 s of a trained policy that walks forward
gpusim-rl clip check walk.npz g1                         check a file, and whether it fits a robot
gpusim-rl clip play go1_trot                             play a bundled clip in a browser
gpusim-rl clip play go1_trot --out trot.mp4              write a video
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim_rl.errors import ConfigError, did_you_mean, friendly_errors, import_extra, say
from gpusim_rl.files.safe_open import writing
from gpusim_rl.machine.hardware import import_torch
from gpusim_rl.options import Parser, number
from gpusim_rl.view.arguments import check_out, check_video

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gpusim_rl.env import Task
    from gpusim_rl.env.clip import Clip
    from gpusim_rl.sim import Articulation
    from gpusim_rl.view.player import Player


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        args = parse(argv)
        import_torch()
        {"record": record, "check": check, "play": play}[args.what](args)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("clip", __doc__)
    words = parser.add_subparsers(dest="what", required=True, metavar="COMMAND", parser_class=Parser)
    summaries = {
        "record": "Record a clip of a trained policy, without noise and randomisation.",
        "check": "Check a clip, and whether it fits a robot.",
        "play": "Play a clip in a browser, or write it as a video or a page.",
    }
    parser.rows["Commands"] = [*summaries.items()]
    records, checks, plays = (
        words.add_parser(name, prog=f"clip {name}", text=f"{summary}\n{__doc__}") for name, summary in summaries.items()
    )
    records.option("run")
    records.option("--command", "fixed commands, in the task's order", "Clip", type=float, nargs="+")
    records.option("--robot", "articulation", "Clip", note="the scene's first")
    records.option("--seconds", default=4.0)
    records.option("--skip", "simulated time before the clip [s]", "Environments", type=number(float, 0), default=1.0)
    records.option("--out", ".npz", note="the run's name, in the current folder")
    records.options("--seed", "--overwrite", "--trust", "--config-dir")
    for each in (checks, plays):
        each.option("file", ".npz file, or a bundled clip, such as go1_trot", "Arguments")
        each.option("robot", "task, robot of tasks/assets, MJCF or URDF file, menagerie:NAME", "Arguments", nargs="?")
        each.option("--packages")
    plays.options("--host", "--port")
    plays.option("--steps", note="the whole clip in a file, endless in a browser")
    plays.option("--out", ".mp4 or .html", note="a browser instead")
    plays.options("--overwrite", "--width", "--height", "--renderer", width=1280, height=720)
    for each in (checks, plays):
        each.option("--config-dir")
    return parser.parse_args(argv)


def record(args: argparse.Namespace) -> None:
    """Record a policy in one env, without sensor noise, initial-state noise, randomisation or pushes."""
    import numpy as np

    from gpusim_rl.env import VecEnv
    from gpusim_rl.env.clip import save
    from gpusim_rl.env.robot_clip import from_states

    out = args.out or Path(f"{Path(args.run).name}.npz")
    check_out(out, ".npz", overwrite=args.overwrite)
    with closing(open_run(args, {})) as probe:
        assert isinstance(probe.env, VecEnv)
        task, hz, robots = probe.spec.config["task"], probe.env.cfg.control_hz, probe.env.sim.scene.articulation_names
    robot = args.robot or robots[0]
    if robot not in robots:
        hint = f"{did_you_mean(robot, robots)} Available: {', '.join(robots)}"
        raise ConfigError("no such articulation in the scene", key=f"--robot {robot}", hint=hint)
    frames = max(1, round(args.seconds * hz)) + 1
    steps = round(args.skip * hz) + frames
    sensors = {part: {k: v for k, v in keys.items() if k != "noise"} for part, keys in task["observations"].items()}
    changes = {"task.randomize": False, "task.observations": sensors, "task.episode_length": steps + 1}
    exact = {"pushes": False, "encoder_bias": 0.0}
    changes |= {f"task.{key}": value for key, value in exact.items() if key in task}
    if isinstance(noise := task.get("start_noise"), dict):  # a tracking task starts at a frame of its clip, with noise
        changes["task.start_noise"] = {k: [0.0] * len(v) if isinstance(v, list) else 0.0 for k, v in noise.items()}
    with closing(open_run(args, changes)) as player:
        assert isinstance(player.env, VecEnv)
        sim, states = player.env.sim, []
        placed = placements(player.env.task, sim.articulation(robot))
        for step in range(steps):
            command(player, args.command)
            if step >= steps - frames:
                states.append((sim.qpos[0].cpu().numpy().copy(), sim.qvel[0].cpu().numpy().copy()))
            if bool(player.step().done.any()):
                hint = "Try a smaller --seconds, or another --seed or --command"
                raise ConfigError(f"the episode ended after {step / hz:.3g} s", hint=hint)
            if steps - frames <= step < steps - 1 and placed[-1]:
                problem = f"the task moved {robot!r} to a new pose after {(step + 1) / hz:.3g} s: the clip would jump"
                raise ConfigError(problem, hint="Try --skip 0, or a smaller --seconds")
        qpos, qvel = (np.stack(values) for values in zip(*states, strict=True))
        clip = from_states(sim.scene, robot, qpos, qvel, hz)
    try:
        save(out, clip)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    say(f"{out}: {len(clip.joint_pos)} frames, {clip.seconds:.3g} s")


def placements(task: Task[Any], robot: Articulation) -> list[bool]:
    """Return a list to which each control step appends whether the task moved the robot of env 0 within an episode."""
    placed: list[bool] = []
    advance, reset = task.advance, task.reset

    def place() -> list[Tensor]:
        of_root = [robot.root_pos, robot.root_quat] if robot.free_root else []
        return [value[0].clone() for value in (*of_root, robot.joint_pos)]

    def moves(call: Callable[[Tensor], None], where: Tensor) -> bool:
        before = place()
        call(where)
        return any(not a.equal(b) for a, b in zip(before, place(), strict=True))

    def watched_reset(where: Tensor) -> None:
        moved = moves(reset, where)
        placed[-1:] = [last or (moved and not bool(where[0])) for last in placed[-1:]]

    task.advance, task.reset = lambda done: placed.append(moves(advance, done)), watched_reset
    return placed


def open_run(args: argparse.Namespace, changes: dict[str, object]) -> Player:
    """Open the run; raise ConfigError for envs of another library, which have no model."""
    from gpusim_rl.env import VecEnv
    from gpusim_rl.view.player import Player

    changes = {"seed": args.seed, **changes}
    player = Player.open(args.run, trust=args.trust, config_dir=args.config_dir, changes=changes)
    if not isinstance(player.env, VecEnv):
        player.close()
        raise ConfigError("envs of another library are not supported", key=player.name)
    return player


def command(player: Player, values: list[float] | None) -> None:
    """Hold the task's commands at the values of `--command`."""
    import torch

    from gpusim_rl.env import VecEnv
    from gpusim_rl.env.command import steerable
    from gpusim_rl.env.encoded_env import EncodedEnv

    if values is None:
        return
    env = player.observed
    assert isinstance(env, VecEnv | EncodedEnv) and isinstance(player.env, VecEnv)
    commands = steerable(player.env.task)
    if commands is None:
        raise ConfigError("the task has no commands", key="--command")
    names = list(commands.controls())
    if len(names) != len(values):
        raise ConfigError(key="--command", expected=f"{len(names)} numbers ({', '.join(names)})", got=values)
    commands.hold(torch.ones(1, dtype=torch.bool, device=env.device), torch.tensor(values, device=env.device))
    player.obs = env.look()


def check(args: argparse.Namespace) -> None:
    """Read and validate a clip, and print its contents."""
    from gpusim_rl.env.robot_clip import robot_of

    clip = read(args)
    parts = f"{len(clip.joint_names)} joints, {len(clip.body_names)} bodies"
    say(f"{args.file}: {len(clip.joint_pos)} frames at {clip.fps:g} Hz, {clip.seconds:.3g} s; {parts}")
    if args.robot is not None:
        say(f"fits {args.robot}: joint names, body names and body poses match")
    elif file := robot_of(clip):
        say(f"the joints look like {file.stem}'s. Try gpusim-rl clip check {shlex.quote(str(args.file))} {file.stem}")


def read(args: argparse.Namespace) -> Clip:
    """Read a clip; check that it fits the robot, if one is given."""
    from gpusim_rl.env.clip import load
    from gpusim_rl.env.motions import clip_file
    from gpusim_rl.env.robot_clip import load_for
    from gpusim_rl.view.playback import scene_by_name

    file = clip_file(args.file)
    if args.robot is None:
        return load(file)
    scene = scene_by_name(args.robot, args.config_dir)
    return load_for(file, scene, scene.articulation_names[0])


def play(args: argparse.Namespace) -> None:
    """Play a clip in a browser, or write it as a video or an HTML page."""
    from gpusim_rl.env.robot_clip import robot_of
    from gpusim_rl.view.playback import open_playback
    from gpusim_rl.view.video import write_video
    from gpusim_rl.view.web import LOCALHOST, view_in_browser
    from gpusim_rl.view.web_scene import html_replay

    check_out(args.out, ".mp4", ".html", overwrite=args.overwrite)
    if args.out is None or args.out.suffix == ".html":
        import_extra("viser", "view", "clip play")
    else:
        check_video(args.out, (args.width, args.height))
    clip = read(args)
    if args.robot is None:
        robot = robot_of(clip)
        if robot is None:
            hint = f"Add the robot, as in gpusim-rl clip play {shlex.quote(str(args.file))} g1"
            raise ConfigError("no bundled robot has these joints", key=args.file, hint=hint)
        args.robot = robot.stem
        clip = read(args)
    with closing(open_playback(clip, args.robot, name=Path(args.file).stem, config_dir=args.config_dir)) as player:
        steps, size = args.steps or len(clip.joint_pos), (args.width, args.height)
        if args.out is None:
            view_in_browser(player, host=args.host or LOCALHOST, port=args.port, steps=args.steps)
            return
        if args.out.suffix == ".html":
            page = html_replay(player, range(steps), "clip play --out")
            with writing(args.out) as file:
                file.write(page.encode())
        else:
            write_video(player, args.out, size, range(steps), "clip play --out", args.renderer)
    say(str(args.out))


if __name__ == "__main__":
    sys.exit(main())
