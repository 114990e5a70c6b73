"""Build the site of the documents: all pages, the API reference from the docstrings, search. Every warning is an error.

python docs/build_site.py                    docs/site/index.html (not committed)
python docs/build_site.py --out /tmp/site    another folder

It needs `pip install -e ".[docs]"` and no network; nor do the pages it builds.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> int:
    """Build the site, and print where it is."""
    out = parse(argv).out

    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as cache:
        options = ["--quiet", "--fail-on-warning", "--jobs", "auto"]
        if failed := build_main([*options, "--doctree-dir", cache, str(DOCS), str(out)]):
            return failed
    requests = outside_requests(out)
    for request in requests:
        print(f"error: {request}", file=sys.stderr)
    print(f"{len(list(out.rglob('*.html')))} pages: {out / 'index.html'}")
    return 1 if requests else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="build_site", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=DOCS / "site", help="folder to write (default: docs/site)")
    return parser.parse_args(argv)


def outside_requests(site: Path) -> list[str]:
    """What a browser would load from elsewhere to show a page, with the page."""
    loads = re.compile(
        r"<(?:script|img|iframe|video|source)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*|<link\b[^>]*\bhref=\"https?://[^\"]*"
    )
    return [f"{page.name} loads {tag}" for page in site.rglob("*.html") for tag in loads.findall(page.read_text())]


if __name__ == "__main__":
    sys.path[0] = str(DOCS.parent)
    sys.exit(main())
