"""Sphinx configuration of the documentation site; build it with `python docs/build_site.py`.

Pages are the Markdown files that the code host displays. The build adds the table of contents below and a robot to
the start page, and turns links to files outside the site into links to the code host.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.ext.napoleon import Config, GoogleDocstring

from gpusim_rl.public import __version__

sys.path.append(str(Path(__file__).parent))

from cli_reference import reference

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DRIVE = """```{raw} html
<iframe src="walk.html" title="Drive a trained Go1" class="replay"></iframe>
<p class="replay">Drive a trained Go1: click, then use the arrow keys. Drag the robot to push it.</p>
```"""
"""Frame (iframe) with the page that `build_site.write_walk` writes."""

SOURCE = "https://github.com/gpusim-rl/gpusim_rl/blob/main/"
CONTENTS = {
    "Get started": ["quickstart", "add_a_task", "symptoms", "faq"],
    "Guides": [
        "your_robot",
        "tasks",
        "algorithms",
        "randomization",
        "vision",
        "motion",
        "export",
        "deploy",
        "robot",
        "distributed",
        "connect",
        "doctor",
        "profiling",
        "migrating_from_isaacgymenvs",
        "migrating_from_isaaclab",
        "migrating_from_mjlab",
    ],
    "Reference": [
        "config",
        "outputs",
        "reference/cli",
        "reference/training",
        "reference/task",
        "reference/environment",
        "reference/scene",
        "reference/algorithm",
        "reference/settings",
        "reference/other",
        "architecture",
        "security",
    ],
    "Results": ["benchmarks", "gpu", "reliability", "comparison"],
    "Limitations": ["limitations"],
}

project = "gpusim_rl"
author = "the authors of gpusim_rl"
version = release = __version__
root_doc = "index"
include_patterns = ["*.md", "reference/*.rst"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = project
html_static_path = ["theme"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "source_repository": "https://github.com/gpusim-rl/gpusim_rl/",
    "source_branch": "main",
    "source_directory": "docs/",
}
highlight_language = "text"
myst_heading_anchors = 4

default_role = "code"  # docstrings use Markdown backticks
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = [
    "gymnasium",
    "rl_games",
    "rsl_rl",
    "skrl",
    "stable_baselines3",
    "tensordict",
]  # bases of adapters
autodoc_inherit_docstrings = False
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 80
GOOGLE = Config(napoleon_use_ivar=True, napoleon_use_rtype=False)


def complete_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Add contents and a robot to the start page and commands to the CLI page; link outside files to the code host."""
    if page == root_doc:
        source[0], found = re.subn(r"(^!\[.*\n)", rf"\1\n{DRIVE}\n", source[0], count=1, flags=re.MULTILINE)
        assert found, "the start page has no picture to put the robot below"
        for caption, pages in CONTENTS.items():
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])
    if page == "reference/cli":
        source[0] += reference()
    text = re.sub(r"(?<!!)(\[[^\]]*\])\(((?:examples|notebooks)/)", r"\1(../docs/\2", source[0])
    source[0] = re.sub(r"(?<!!)(\[[^\]]*\])\(\.\./", rf"\1({SOURCE}", text)


def read_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert a Google-style Markdown docstring to Sphinx's format, where indented examples need `::`."""
    marked: list[str] = []
    depth = 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip() == "Example:":
            line = f"{line}:\n"
        elif line and marked and not marked[-1] and indent >= depth + 4:
            marked += [" " * depth + "::", ""]
        elif line:
            depth = indent
        marked += line.split("\n")
    if what not in ("attribute", "data", "property"):  # for these, Sphinx parses text before a colon as a type
        marked = GoogleDocstring(marked, GOOGLE, app, what, name, obj, options).lines()
    lines[:] = marked


def read_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Remove validation rules of settings from a signature, and show default objects as `Class()`."""
    if signature == "(*args: Any, **kwargs: Any)":  # inherited from a mock
        signature = str(inspect.signature(obj.__init__)).replace("self, ", "").replace("'", "")
    signature = signature and re.sub(r"~typing\.Annotated\[([\w.]+(?:\[[^\]]*\])?), .*?<lambda>\)\]", r"\1", signature)
    return signature and re.sub(r"<[\w.]*?(\w+) object[^>]*>", r"\1()", signature), returned


def setup(app: Sphinx) -> None:
    """Register the functions above as Sphinx event handlers."""
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-process-signature", read_signature)
