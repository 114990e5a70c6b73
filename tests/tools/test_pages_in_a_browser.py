"""Tests of report and replay in headless Chromium without network."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest_plugins = ["helpers.tool_runs"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]  # 3D on the CPU
TIMEOUT_MS = 400_000  # drawing on the CPU is slow


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api")
    for name in ("viser", "mjviser"):
        pytest.importorskip(name)
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(runs_folder, load_tool, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = [str(path) for path in sorted((runs_folder / "runs" / "Cartpole").glob("2*"))[:2]]
    for name, words in (("report", runs), ("record", runs[:1])):
        tool = load_tool(name)
        made = tool.parse([*words, "--steps", "20", "--out", str(folder / f"{name}.html")])
        getattr(tool, name)(made)
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["report", "record"])
def test_page_draws_without_network_requests(browser, pages, kind, scheme):
    from PIL import Image

    context = browser.new_context(viewport={"width": 400, "height": 420}, color_scheme=scheme, offline=True)
    page = context.new_page()
    errors: list[str] = []
    requests: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"file://{pages[kind]}")
    frame = page.frames[-1]
    if kind == "report":
        assert page.locator("svg.chart").first.bounding_box()["height"] > 50
        assert page.locator(".hero svg.chart text").first.bounding_box()["height"] > 9, "unreadable text"
        page.locator("iframe").scroll_into_view_if_needed()
        frame = page.frame_locator("iframe")
    canvas = frame.locator("canvas").first
    canvas.wait_for(timeout=TIMEOUT_MS)
    page.wait_for_timeout(3000)
    picture = np.asarray(Image.open(io.BytesIO(page.screenshot(timeout=TIMEOUT_MS))).convert("L"), dtype=float)
    assert canvas.bounding_box()["width"] > 200
    corner = picture[-20:, :8]  # outside the scene, whose sky is always light
    assert (np.median(corner) > 128) == (scheme == "light"), "page ignores the color scheme"
    assert picture.std() > 10, "empty scene"
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
    context.close()
