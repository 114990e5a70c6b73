"""Take the screenshots docs/images/screen_*.webp: terminal, plot, report, viewer and the site's start page.

python docs/make_screenshots.py                                 all, with three short Cartpole runs
python docs/make_screenshots.py plot report --runs runs/Ant/*   some, with existing runs

Needs `pip install -e ".[test,docs]"` and Chromium. Without a GPU, a 3D picture takes minutes.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = ("chromium-headless-shell", "chromium", "google-chrome")
FLAGS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]  # 3D on the CPU
PATIENCE_MS = 400_000  # the CPU renders slowly
SHOWN = 0.6  # fraction of a run that the panel shows
WIDTH = 102  # width of the terminal, in characters
TERMINAL = (
    '<pre style="color: {foreground}; background: {background}; display: inline-block; margin: 0; padding: 16px 10px;'
    ' font: 19px/normal monospace">{code}</pre>'
)
QUALITY = 80  # of the WebP files, 0 to 100


def main(argv: list[str] | None = None) -> int:
    """Write the pictures and print their paths and sizes."""
    from gpusim_rl.errors import friendly_errors, import_extra
    from gpusim_rl.files.safe_open import writing

    args = parse(argv)
    with friendly_errors(), tempfile.TemporaryDirectory() as folder, browser() as chromium:
        images = import_extra("PIL.Image", "test", "make_screenshots")
        work = Work(Path(folder), chromium, [str(run.resolve()) for run in args.runs])
        for picture in args.pictures or PICTURES:
            path = args.out / f"screen_{picture}.webp"
            png = PICTURES[picture](work)
            with writing(path) as file:
                images.open(io.BytesIO(png)).convert("RGB").save(file, "WEBP", quality=QUALITY, method=6)
            print(f"{path} {path.stat().st_size / 1e3:.0f} kB", flush=True)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="make_screenshots", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pictures", nargs="*", metavar="PICTURE", help=f"default: {' '.join(PICTURES)}")
    parser.add_argument("--runs", nargs="+", type=Path, default=[], help="runs of one task (default: train them)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="folder (default: docs/images)")
    args = parser.parse_args(argv)
    if unknown := set(args.pictures) - set(PICTURES):
        parser.error(f"unknown pictures: {', '.join(unknown)}; available: {', '.join(PICTURES)}")
    return args


@contextmanager
def browser() -> Iterator[Any]:
    """Start Chromium and yield it; close it at the end of the block."""
    from gpusim_rl.errors import ConfigError, import_extra

    playwright = import_extra("playwright.sync_api", "test", "make_screenshots")
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        raise ConfigError(f"no browser on the PATH: expected one of {', '.join(CHROMIUM)}. Try apt install chromium")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=found, args=FLAGS)
        yield chromium
        chromium.close()


class Work:
    """Working folder, browser, and runs, which are trained on first use."""

    def __init__(self, folder: Path, chromium: Any, runs: Sequence[str]) -> None:
        self.folder, self._chromium, self._runs = folder, chromium, runs

    def run(self, script: str, *words: str) -> None:
        """Run a script from this checkout in the working folder."""
        from gpusim_rl.errors import ConfigError

        if subprocess.run([sys.executable, str(ROOT / script), *words], cwd=self.folder).returncode:
            raise ConfigError(f"{script} failed: see its last output line above")

    def output(self, script: str, *words: str) -> str:
        """Run a script from this checkout in the working folder; return its output."""
        command = [sys.executable, str(ROOT / script), *words]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout.rstrip()

    def runs(self) -> Sequence[str]:
        """Return the run folders; without --runs, train three seeds of Cartpole."""
        if not self._runs:
            self.run("train.py", "-m", "seed=1,2,3", "max_iterations=120", "device=cpu")
            self._runs = sorted(map(str, (self.folder / "runs" / "Cartpole").glob("2*")))
        return self._runs

    def page(self, height: int, address: str = "about:blank") -> Any:
        """Open a page at laptop width."""
        page = self._chromium.new_page(viewport={"width": 1280, "height": height}, color_scheme="light")
        page.set_default_timeout(PATIENCE_MS)
        page.goto(address)
        return page


def panel(work: Work) -> bytes:
    """Render the console panel of a run during training, as PNG."""
    from gpusim_rl.run.console import Console
    from gpusim_rl.view.curves import read_run

    run = read_run(Path(work.runs()[0]))
    count = len(run.columns["iteration"])
    os.environ |= {"COLUMNS": str(WIDTH), "LINES": "40"}
    console = Console("rich", run.config["max_iterations"], None)
    console._title = f"{run.task} · {run.run.path.name}"
    for row in range(round(SHOWN * count)):
        numbers = {name: float(column[row]) for name, column in run.columns.items()}
        console.update({name: number if number == number else None for name, number in numbers.items()})
    return terminal(work, f"python train.py task={run.task}", console._panel())


def terminal(work: Work, command: str, shown: Any) -> bytes:
    """Render a terminal with a command and its output (text or a rich renderable), as PNG."""
    from rich.console import Console as Terminal
    from rich.terminal_theme import SVG_EXPORT_THEME

    screen = Terminal(file=io.StringIO(), width=WIDTH, record=True, color_system="truecolor")
    screen.print(f"$ {command}", highlight=False)
    screen.print(shown, highlight=False, markup=False)
    page = work.page(800)
    page.set_content(screen.export_html(theme=SVG_EXPORT_THEME, code_format=TERMINAL, inline_styles=True))
    return page.locator("pre").screenshot()


def doctor(work: Work) -> bytes:
    """Render the doctor's report on a run of Ant, as PNG."""
    work.run("train.py", "task=Ant", "num_envs=256", "max_iterations=30", "device=cpu")
    return terminal(work, "gpusim-rl doctor Ant", work.output("tools/doctor.py", "Ant"))


def audit(work: Work) -> bytes:
    """Render the audit of a run's copies and waits, as PNG."""
    return terminal(work, "gpusim-rl audit task=Ant", work.output("tools/audit.py", "task=Ant", "num_envs=64"))


def plot(work: Work) -> bytes:
    """Plot the learning curves of the runs, as PNG."""
    work.run("tools/plot.py", *work.runs(), "--out", "plot.png", "--overwrite")
    return (work.folder / "plot.png").read_bytes()


def report(work: Work) -> bytes:
    """Take a screenshot of the report on the runs."""
    work.run("tools/report.py", *work.runs(), "--out", "report.html", "--overwrite")
    page = work.page(1080, f"file://{work.folder / 'report.html'}")
    wait_for_scene(page, page.frame_locator("iframe"))
    return page.screenshot()


def viewer(work: Work) -> bytes:
    """Take a screenshot of the viewer, with the demo and contact forces."""
    command = [sys.executable, "-u", str(ROOT / "tools" / "demo.py"), "Go1", "--port", "0", "--num-envs", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = next(filter(None, (re.search(r"http://\S+", line) for line in server.stdout)))
            page = work.page(1060, found[0])
            wait_for_scene(page, page)
            for _ in range(2):  # a busy page can lose the first click; otherwise the second is a no-op
                page.get_by_label("Contact forces").check(force=True)
                page.wait_for_timeout(6_000)
            return page.screenshot()
        finally:
            server.terminate()


def wait_for_scene(page: Any, frame: Any) -> None:
    """Wait until a 3D scene is rendered; close the note about CPU rendering if there is one."""
    frame.locator("canvas").first.wait_for()
    page.wait_for_timeout(20_000)
    for button in frame.locator("button.mantine-Notification-closeButton").all():
        button.click(force=True)
    page.wait_for_timeout(3_000)


def site(work: Work) -> bytes:
    """Build the site and take a screenshot of the start page."""
    work.run("docs/build_site.py", "--out", "site")
    return work.page(800, f"file://{work.folder / 'site' / 'index.html'}").screenshot()


PICTURES = {
    "panel": panel,
    "plot": plot,
    "report": report,
    "viewer": viewer,
    "site": site,
    "doctor": doctor,
    "audit": audit,
}

if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.exit(main())
