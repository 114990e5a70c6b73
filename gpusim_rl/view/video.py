"""Videos of envs: H.264 mp4 (through imageio-ffmpeg), animated WebP, and captions."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from fractions import Fraction
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE

import numpy as np
from torch import Tensor

from gpusim_rl.env import Environment, VecEnv
from gpusim_rl.env.command import steerable
from gpusim_rl.errors import ConfigError, first_line, import_extra
from gpusim_rl.files.safe_open import refuse_links, writing
from gpusim_rl.run.writers import read_csv
from gpusim_rl.view.arguments import check_video
from gpusim_rl.view.player import Player
from gpusim_rl.view.renderer import Grid, make_renderer, tiled

CRF = 15  # constant rate factor of H.264, 0 (lossless) to 51
MAX_FPS = 30.0
TEXTS_PER_TILE = 20  # tile height over text height
SMALLEST, LARGEST = 10, 18  # text heights [pixels]
INK, OUTLINE = (255, 255, 255), (30, 34, 42)


@contextmanager
def video_writer(
    path: Path, size: tuple[int, int], fps: float, needed_by: str
) -> Iterator[Callable[[np.ndarray], object]]:
    """Yield a function that appends a frame, uint8 [height, width, 3], to an mp4 that appears only when complete.

    `needed_by`: command or setting named in errors. Raise ConfigError if ffmpeg, `path` or `size` is unusable.
    """
    ffmpeg = import_extra("imageio_ffmpeg", "view", needed_by)
    check_video(path, size)
    rate = str(Fraction(fps).limit_denominator())
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[0]}x{size[1]}", "-r", rate, "-i", "-", "-an"]
    coded = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", str(CRF), "-v", "error", "-f", "mp4"]
    try:
        program = ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise ConfigError(f"ffmpeg is not available: {first_line(error)}", key=needed_by) from None
    with writing(path) as file:
        command = [program, "-y", *raw, *coded, f"file:{file.name}"]
        # A new session shields ffmpeg from Ctrl-C; this process stops it.
        process = subprocess.Popen(command, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, start_new_session=True)
        stream = process.stdin
        assert stream is not None
        broken = True
        try:
            with suppress(BrokenPipeError):
                yield lambda picture: stream.write(np.ascontiguousarray(picture).data)
                stream.flush()
                broken = False
            message = process.communicate()[1].decode(errors="replace").strip()
            if process.returncode or broken or not os.fstat(file.fileno()).st_size:
                raise OSError(f"ffmpeg exited with code {process.returncode}: {message.rpartition(chr(10))[2]}")
        finally:
            process.kill()
            with suppress(OSError):
                process.communicate()


@contextmanager
def drawing(
    player: Player, size: tuple[int, int], renderer: str = "auto"
) -> Iterator[tuple[Callable[[], np.ndarray], float]]:
    """Yield a function that renders a player's envs to uint8 [height, width, 3], and their control rate [Hz].

    `size` is in pixels; `renderer` is as for `make_renderer`, or `policy` for the policy's own images.
    """
    env = player.env
    hz = env.cfg.control_hz if isinstance(env, VecEnv) else env.frames_per_s
    if renderer == "policy" or not isinstance(env, VecEnv):
        sharp = renderer == "policy"
        pictures = partial(seen, player) if sharp else env.render
        tiled(pictures(), *size)  # fail early
        yield lambda: tiled(pictures(), *size, pixels_stay=sharp), hz
    else:
        sim = env.sim
        with closing(make_renderer(sim.scene, sim.poses.cpu().numpy(), *size, renderer)) as drawn:
            yield lambda: drawn.render(sim.poses.cpu().numpy()), hz


def write_video(
    player: Player,
    path: Path,
    size: tuple[int, int],
    steps: Iterable[int],
    needed_by: str,
    renderer: str = "auto",
    caption: bool = False,
) -> None:
    """Render control steps to an mp4 of this size [pixels], with captions if requested."""
    words = Caption(Grid.of(player.env.num_envs, *size), caption_words(player)) if caption else None
    with drawing(player, size, renderer) as (draw, control_hz):
        every, fps = frame_rate(control_hz)
        with video_writer(path, size, fps, needed_by) as write:
            for step in steps:
                if step % every == 0:
                    picture = draw()
                    write(picture if words is None else words.write(picture, command_captions(player.env)))
                player.step()


def seen(player: Player) -> list[np.ndarray]:
    """Return each env's newest image of the first group, uint8 [height, width, 3]; raise ConfigError without images."""
    images = player.images
    if not images:
        raise ConfigError(f"{player.name} observes no images", key="--renderer policy", hint="Try --renderer auto")
    return list(newest(next(iter(images.values()))))


def newest(images: Tensor) -> np.ndarray:
    """Return the newest frames of stacked images, uint8 [n, height, width, channels], with 3 channels."""
    pixels = images.cpu().numpy()
    return pixels[..., -3:] if pixels.shape[3] % 3 == 0 else pixels[..., -1:].repeat(3, axis=3)


def moving_picture(player: Player, steps: int, size: tuple[int, int], needed_by: str) -> bytes:
    """Return control steps rendered to an animated WebP of this size [pixels] that plays in real time."""
    images = import_extra("PIL.Image", "view", needed_by)
    pictures = []
    with drawing(player, size) as (draw, control_hz):
        every, fps = frame_rate(control_hz)
        for step in range(steps):
            if step % (2 * every) == 0:  # half the frame rate of a video
                pictures.append(images.fromarray(draw().copy()))
            player.step()
    file = io.BytesIO()
    options = {"append_images": pictures[1:], "duration": round(2000 / fps), "loop": 0, "quality": 60}
    pictures[0].save(file, "WEBP", save_all=True, **options)
    return file.getvalue()


def frame_rate(control_hz: float) -> tuple[int, float]:
    """Return control steps per frame, and real-time frames per second [Hz]."""
    every = max(1, -int(-control_hz // MAX_FPS))
    return every, control_hz / every


def caption_words(player: Player) -> list[str]:
    """Return the words of a caption, most important first: task, iteration, mean training return."""
    if player.policy is None:
        return [player.name, f"{player.act} actions"]
    words = [player.name, f"iteration {player.iteration:,}"]
    if player.run_dir is None or not (player.run_dir / "metrics.csv").is_file():
        return words
    refuse_links(player.run_dir)
    content = read_csv(player.run_dir / "metrics.csv")
    rows = (dict(zip(content.columns, row, strict=True)) for row in content.rows())
    values = [row.get("episode/return") for row in rows if row["iteration"] == str(player.iteration)]
    return [*words, *(f"return {float(value):,.4g}" for value in values[:1] if value)]


def command_captions(env: Environment) -> list[str]:
    """Return each env's command as text, `command  x 1.00  yaw -0.30`; empty without commands."""
    commands = steerable(env.task) if isinstance(env, VecEnv) else None
    if commands is None:
        return []
    names = [name.partition(" ")[0] for name in commands.controls()]
    return ["  ".join(("command", *map("{} {:.2f}".format, names, row))) for row in commands.value.tolist()]


class Caption:
    """Caption writer for images; drops trailing words that do not fit."""

    def __init__(self, grid: Grid, words: Sequence[str]) -> None:
        from PIL import Image, ImageDraw, ImageFont

        self._grid, self._images, self._drawing = grid, Image, ImageDraw
        size = min(LARGEST, max(SMALLEST, grid.tile_height // TEXTS_PER_TILE))
        self._font = ImageFont.load_default(size=size)
        self._edge = size // 2
        self._words = ", ".join(words)
        while self._font.getlength(self._words) > grid.width - 2 * self._edge:
            self._words = self._words.rpartition(", ")[0]

    def write(self, picture: np.ndarray, commands: Sequence[str] = ()) -> np.ndarray:
        """Return the image, uint8 [height, width, 3], with words on top and a command at the bottom of each tile."""
        image = self._images.fromarray(np.ascontiguousarray(picture))
        draw, edge = self._drawing.Draw(image), self._edge
        look = {"font": self._font, "fill": INK, "stroke_width": 1, "stroke_fill": OUTLINE}
        draw.text((edge, edge), self._words, **look)
        for tile, command in enumerate(commands):
            left, top = self._grid.corner(tile)
            if self._font.getlength(command) <= self._grid.tile_width - 2 * edge:
                draw.text((left + edge, top + self._grid.tile_height - edge), command, anchor="ld", **look)
        return np.asarray(image)
