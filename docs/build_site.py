"""Build the documentation site: all pages, the API reference from docstrings, search, and plain text.

Every warning is an error. On the start page, visitors drive the Go1 demo in the package. For language models, the site
has llms.txt (a list of its pages), llms-full.txt (all pages in one file) and each page as Markdown.

python docs/build_site.py                    docs/site/index.html (not committed)
python docs/build_site.py --out /tmp/site    another folder

Needs `pip install -e ".[docs]"`, and npm, which downloads MuJoCo for browsers once. Pages do not use the network.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE_MB = 6.0  # largest page in which visitors drive a robot

NEEDED = ("sphinx", "furo", "myst_parser", "onnx", "onnxscript", "onnxruntime")
"""Modules that the extra `docs` installs."""


def main(argv: list[str] | None = None) -> int:
    """Check that the extra is installed, and build the site; return the exit code."""
    from gpusim_rl.errors import friendly_errors, import_extra

    out = parse(argv).out
    with friendly_errors():
        for module in NEEDED:  # fail early: the build takes minutes
            import_extra(module, "docs", "build_site")
        return build(out)


def build(out: Path) -> int:
    """Build the site and print the path; return the exit code."""
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as cache:
        options = ["--quiet", "--fail-on-warning", "--jobs", "auto"]
        if failed := build_main([*options, "--doctree-dir", cache, str(DOCS), str(out)]):
            return failed
    write_walk(out / "walk.html")
    write_text(out)
    requests = outside_requests(out)
    for request in requests:
        print(f"error: {request}", file=sys.stderr)
    print(f"{len(list(out.rglob('*.html')))} pages: {out / 'index.html'}")
    return 1 if requests else 0


def write_walk(page: Path) -> None:
    """Write the page in which visitors of the start page drive Go1 (see conf.py)."""
    from gpusim_rl.deployed import share
    from gpusim_rl.export.files import write_all
    from gpusim_rl.files.paths import demos_dir

    with tempfile.TemporaryDirectory() as folder:
        exported, _ = write_all(str(demos_dir() / "Go1Velocity"), Path(folder) / "export", int8=False)
        write(page, share.page(exported, PAGE_MB))


def write(file: Path, text: str) -> None:
    """Write a page atomically."""
    from gpusim_rl.files.safe_open import writing

    with writing(file) as target:
        target.write(text.encode())


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="build_site", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=DOCS / "site", help="folder to write (default: docs/site)")
    return parser.parse_args(argv)


def contents() -> dict[str, list[str]]:
    """Return page names by heading of the start page: `CONTENTS` of conf.py, read without importing Sphinx."""
    for node in ast.parse((DOCS / "conf.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTENTS":
            return ast.literal_eval(node.value)
    raise AssertionError("conf.py has no CONTENTS")


def write_text(site: Path) -> None:
    """Write llms.txt, llms-full.txt (https://llmstxt.org) and the Markdown pages to the site folder."""
    title, summary, start = read_page("index")
    lines, pages = [f"# {title}", "", f"> {summary}"], [start]
    for heading, names in contents().items():
        lines += ["", f"## {heading}", ""]
        for name in names:
            if name.startswith("reference/"):
                lines.append(f"- [{(DOCS / name).with_suffix('.rst').read_text().partition(chr(10))[0]}]({name}.html)")
                continue
            title, summary, text = read_page(name)
            lines.append(f"- [{title}]({name}.md): {summary}")
            pages.append(text)
            write(site / f"{name}.md", text)
    write(site / "llms.txt", "\n".join(lines) + "\n")
    write(site / "llms-full.txt", "\n\n".join(pages))


def read_page(name: str) -> tuple[str, str, str]:
    """Return the title of a Markdown page, its first paragraph on one line, and its text."""
    text = (DOCS / f"{name}.md").read_text()
    title, *paragraphs = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL).split("\n\n")
    words = next(paragraph for paragraph in map(str.strip, paragraphs) if paragraph and paragraph[0] not in "#|!")
    summary = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(words.split())).replace("**", "")
    return title.removeprefix("# "), summary, text


def outside_requests(site: Path) -> list[str]:
    """Return a message for each external resource that a page loads."""
    loads = re.compile(
        r"<(?:script|img|iframe|video|source)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*|<link\b[^>]*\bhref=\"https?://[^\"]*"
    )
    return [f"{page.name} loads {tag}" for page in site.rglob("*.html") for tag in loads.findall(page.read_text())]


if __name__ == "__main__":
    sys.path[0] = str(DOCS.parent)
    sys.exit(main())
