"""Render the animation on the start page: trained policies, one tile per run.

python docs/make_animation.py runs/Ant/latest@0.45 runs/Hopper/latest --seconds 4      docs/images/trained.webp
python docs/make_animation.py runs/Pendulum/latest --out pendulum.webp

Every run folder becomes one tile, labelled with the task; with `@0.45`, the robot fills 45 % of the tile at the start.
The animation plays in real time and repeats.
Needs Pillow, which `pip install -e ".[view]"` installs.
"""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
GAP = 4  # pixels between tiles
SMOOTH = 2  # supersampling factor in both directions


def main(argv: list[str] | None = None) -> int:
    """Write the animation; print its path and size."""
    from gpusim_rl.errors import friendly_errors

    with friendly_errors():
        args = parse(argv)
        save(args.out, picture(args), args.fps, args.quality)
        print(f"{args.out} {args.out.stat().st_size / 1e6:.2f} MB")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="make_animation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", help="run folder or checkpoint, one tile each; RUN@FILL overrides --fill")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "trained.webp", help="file to write")
    parser.add_argument("--columns", type=int, default=4, help="tiles per row (default: 4)")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration (default: 5)")
    parser.add_argument("--skip", type=float, default=1.0, help="simulated seconds to leave out first (default: 1)")
    parser.add_argument("--fps", type=int, default=15, help="frames per second (default: 15)")
    parser.add_argument("--width", type=int, default=240, help="tile width in pixels (default: 240)")
    parser.add_argument("--height", type=int, default=180, help="tile height in pixels (default: 180)")
    parser.add_argument("--fill", type=float, default=0.6, help="tile fraction filled by the robot (default: 0.6)")
    parser.add_argument("--quality", type=int, default=60, help="quality of the WebP file, 0 to 100 (default: 60)")
    return parser.parse_args(argv)


def picture(args: argparse.Namespace) -> np.ndarray:
    """Return all frames of the animation, uint8 [frames, height, width, 3]."""
    from gpusim_rl.machine.hardware import import_torch

    import_torch()
    tiles = [tile(run, args) for run in args.runs]
    rows = math.ceil(len(tiles) / args.columns)
    height, width = (args.height + GAP) * rows - GAP, (args.width + GAP) * args.columns - GAP
    frames = np.full((len(tiles[0]), height, width, 3), 255, dtype=np.uint8)
    for index, drawn in enumerate(tiles):
        row, column = divmod(index, args.columns)
        top, left = row * (args.height + GAP), column * (args.width + GAP)
        frames[:, top : top + args.height, left : left + args.width] = drawn
    return frames


def tile(run: str, args: argparse.Namespace) -> np.ndarray:
    """Return the frames of one run, labelled with its task, uint8 [frames, height, width, 3]."""
    from PIL import Image, ImageDraw, ImageFont

    from gpusim_rl.view.player import Player
    from gpusim_rl.view.renderer import Camera, make_renderer
    from gpusim_rl.view.snapshot import FramingCamera

    class Framed(FramingCamera):
        """Camera that follows the robot, framed as for a snapshot."""

        offset: np.ndarray | None = None

        def follow(self, tile: int, position: np.ndarray) -> np.ndarray:
            if self.offset is None:
                self.offset = super().follow(tile, position) - position
            return Camera.follow(self, tile, position) + self.offset

    run, _, fill = run.partition("@")
    with closing(Player.open(run)) as player:
        hz, sim = player.env.cfg.control_hz, player.env.sim
        for _ in range(round(args.skip * hz)):
            player.step()
        qpos = sim.qpos.cpu().numpy()
        camera = Framed(sim.scene, qpos, args.width / args.height, float(fill or args.fill))
        renderer = make_renderer(sim.scene, qpos, SMOOTH * args.width, SMOOTH * args.height, camera=camera)
        font, frames, steps = ImageFont.load_default(size=14), [], 0
        with closing(renderer):
            for frame in range(round(args.seconds * args.fps)):
                while steps < frame * hz / args.fps:
                    player.step()
                    steps += 1
                large = renderer.render(sim.qpos.cpu().numpy())
                smooth = large.reshape(args.height, SMOOTH, args.width, SMOOTH, 3).mean(axis=(1, 3))
                image = Image.fromarray(np.rint(smooth).astype(np.uint8))
                ImageDraw.Draw(image).text(
                    (8, 6), player.env.name, fill="white", font=font, stroke_width=2, stroke_fill=(30, 34, 42)
                )
                frames.append(np.asarray(image))
        print(f"{player.env.name}: iteration {player.iteration}", file=sys.stderr)
    return np.stack(frames)


def save(path: Path, frames: np.ndarray, fps: int, quality: int) -> None:
    """Write frames as an animated WebP that loops."""
    from PIL import Image

    from gpusim_rl.files.safe_open import writing

    first, *others = [Image.fromarray(frame) for frame in frames]
    timing = {"duration": round(1000 / fps), "loop": 0}
    with writing(path) as file:
        first.save(file, "WEBP", save_all=True, append_images=others, quality=quality, method=6, **timing)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.exit(main())
