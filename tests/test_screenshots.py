"""Screenshots of the documents: complete, small and used."""

from __future__ import annotations

import importlib.util

import pytest

from helpers.commands import ROOT

SCRIPT = ROOT / "docs" / "make_screenshots.py"


@pytest.fixture(scope="module")
def pictures() -> list[str]:
    spec = importlib.util.spec_from_file_location("make_screenshots", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [f"screen_{name}.webp" for name in module.PICTURES]


def test_script_draws_every_screenshot(pictures):
    assert sorted(path.name for path in (ROOT / "docs" / "images").glob("screen_*")) == sorted(pictures)


def test_screenshots_are_small_and_sharp(pictures):
    image = pytest.importorskip("PIL.Image")
    for name in pictures:
        path = ROOT / "docs" / "images" / name
        assert path.stat().st_size < 80_000, name
        with image.open(path) as picture:
            assert picture.width >= 1000 and 200 <= picture.height <= 1200, (name, picture.size)
            darkest, brightest = picture.convert("L").getextrema()
        assert brightest - darkest > 150, f"{name} is empty"


def test_every_screenshot_is_used_in_a_page(pictures):
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    text = "".join(page.read_text() for page in pages)
    assert [name for name in pictures if f"images/{name})" not in text] == []
