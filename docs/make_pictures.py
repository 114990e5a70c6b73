"""Make the pictures at the top of the guides, docs/images/guide_*.webp: mosaics of tasks and video frames.

python docs/make_pictures.py                     all
python docs/make_pictures.py robots exported     some

Needs `pip install -e ".[test]"` and OpenGL through EGL, and takes two minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
DEMO = str(ROOT / "gpusim_rl" / "demos" / "Go1Velocity")
WIDTH = 1280  # width of a picture [pixels]
QUALITY = 80  # of the WebP files, 0 to 100
APPEARANCE = (
    "{picture_params: {cam_pos: {range: [-0.15, 0.15], operation: additive, distribution: uniform},"
    " mat_rgba: {range: [0.3, 1.5], operation: scaling, distribution: uniform}}}"
)

MOSAICS = {
    "robots": "Go1Velocity Go2Velocity Anymal G1Velocity T1Velocity",
    "tasks": "Ant ShadowHand FrankaCubeStack Quadcopter G1Tracking Hopper Trifinger Anymal BallBalance Go1Velocity",
    "isaacgymenvs": "Ant AnymalTerrain ShadowHand FrankaCubeStack Ingenuity",
    "isaaclab": "Cartpole FrankaReach AllegroHand G1Velocity Quadcopter",
    "mjlab": "Go1Velocity G1Velocity Go1Tracking G1Tracking Cartpole",
}
"""Tasks in each mosaic, five per row."""


def main(argv: list[str] | None = None) -> int:
    """Write the pictures and print their paths and sizes."""
    from gpusim_rl.errors import friendly_errors
    from gpusim_rl.files.safe_open import writing

    parser = argparse.ArgumentParser(prog="make_pictures", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pictures", nargs="*", metavar="PICTURE", help=f"default: {' '.join([*MOSAICS, *VIDEOS])}")
    names = parser.parse_args(argv).pictures or [*MOSAICS, *VIDEOS]
    if unknown := set(names) - {*MOSAICS, *VIDEOS}:
        parser.error(f"unknown pictures: {', '.join(unknown)}")
    with friendly_errors(), tempfile.TemporaryDirectory() as folder:
        for name in names:
            tiles = tasks(MOSAICS[name].split()) if name in MOSAICS else VIDEOS[name](Path(folder))
            path = IMAGES / f"guide_{name}.webp"
            with writing(path) as file:
                mosaic(tiles).save(file, "WEBP", quality=QUALITY, method=6)
            print(f"{path} {path.stat().st_size / 1e3:.0f} kB", flush=True)
    return 0


def tasks(names: list[str]) -> list[Image]:
    """Read the task pictures written by `gpusim-rl snapshot`."""
    from PIL import Image

    return [Image.open(IMAGES / f"{name}.png").convert("RGB") for name in names]


def mosaic(tiles: list[Image]) -> Image:
    """Combine tiles of equal size into one image, in rows of four or five."""
    from PIL import Image

    columns = 5 if len(tiles) % 5 == 0 else 4
    width = WIDTH // columns
    height = round(width * tiles[0].height / tiles[0].width)
    picture = Image.new("RGB", (WIDTH, height * (len(tiles) // columns)))
    for i, tile in enumerate(tiles):
        picture.paste(
            tile.resize((width, height), Image.Resampling.LANCZOS), (i % columns * width, i // columns * height)
        )
    return picture


def run(folder: Path, script: str, *words: str) -> None:
    """Run a script from this checkout with `folder` as its working directory."""
    environment = os.environ | {"MUJOCO_GL": "egl", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(ROOT / script), *words], cwd=folder, env=environment, check=True)


def moments(video: Path, box: tuple[int, int, int, int], shares: tuple[float, ...]) -> list[Image]:
    """Crop a box (left, top, right, bottom [pixels]) from frames at these fractions of a video's duration."""
    import imageio.v3
    from PIL import Image

    frames: Any = imageio.v3.imread(video)
    return [Image.fromarray(np.asarray(frames[int(share * len(frames))])).crop(box) for share in shares]


def exported(folder: Path) -> list[Image]:
    """Return frames of the exported demo in plain MuJoCo."""
    run(folder, "tools/export.py", DEMO, "--out", "export")
    command = ("--command", "0.8", "0", "0", "--seconds", "2", "--out", "walk.mp4")
    run(folder, "docs/examples/deploy.py", "export", *command)
    return moments(folder / "walk.mp4", (130, 150, 510, 435), (0.6, 0.68, 0.76, 0.84))


def clip(folder: Path) -> list[Image]:
    """Return frames of a motion clip of the G1."""
    run(
        folder, "tools/clip.py", "play", "g1_bow", "G1Tracking", "--out", "bow.mp4", "--width", "480", "--height", "360"
    )
    return moments(folder / "bow.mp4", (80, 40, 400, 340), (0.05, 0.2, 0.4, 0.6, 0.9))


def randomized(folder: Path) -> list[Image]:
    """Return the policy's camera images in ten envs, with random colours and camera positions."""
    sizes = ("num_envs=10", "task.height=160", "task.width=160", "ppo.horizon=2", "ppo.minibatch_size=20")
    draws = ("task.randomize=true", f"task.randomization_params={APPEARANCE}")
    run(folder, "train.py", "task=FrankaReachCamera", "device=cpu", "max_iterations=1", *sizes, *draws)
    record = ("--renderer", "policy", "--policy", "zero", "--num-envs", "10", "--steps", "4", "--no-caption")
    run(folder, "tools/record.py", "FrankaReachCamera", *record, "--out", "random.mp4")
    corners = [(40 + 320 * column, 240 * row) for row in range(3) for column in range(4)][:10]
    return [moments(folder / "random.mp4", (x, y, x + 238, y + 238), (0.9,))[0] for x, y in corners]


VIDEOS = {"exported": exported, "clip": clip, "randomized": randomized}

if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.exit(main())
