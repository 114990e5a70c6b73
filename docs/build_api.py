"""Build the API reference as HTML from the docstrings, with pdoc. Every warning is an error.

python docs/build_api.py                    docs/api/index.html (not committed)
python docs/build_api.py --out /tmp/api     another folder

It needs `pip install -e ".[test]"`: the adapters in gpusim_rl.connect import the libraries that they adapt to.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import pkgutil
import sys
import typing
import warnings
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    """Write the reference and print where it is."""
    out = parse(argv).out

    import pdoc
    import pdoc.render

    names = modules()
    for module in map(importlib.import_module, names):
        help_pdoc(module)
    pdoc.render.configure(docformat="google")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc(*names, output_directory=out)
    # Other libraries warn while they are imported; what pdoc says about our docstrings and annotations is an error.
    said = {str(warning.message).strip() for warning in caught if "pdoc" in Path(warning.filename).parts}
    # No fault: what a package has added itself; and a private class, which has no page, with annotations of its base.
    ours = sorted(text for text in said if "has already been added" not in text and "._" not in text.split(" for ")[-1])
    for message in ours:
        print(f"error: {message}", file=sys.stderr)
    missing = [name for name in names if not (out / f"{name.replace('.', '/')}.html").is_file()]
    for name in missing:
        print(f"error: no page for {name}", file=sys.stderr)
    print(f"{len(names)} modules: {out / 'index.html'}")
    return 1 if ours or missing else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="build_api", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "api", help="folder to write (default: docs/api)")
    return parser.parse_args(argv)


def modules() -> list[str]:
    """All public modules that can be imported here. The tasks have a page of their own, docs/tasks.md."""
    import gpusim_rl

    found = [module.name for module in pkgutil.walk_packages(gpusim_rl.__path__, "gpusim_rl.")]
    public = [name for name in found if not any(part.startswith("_") for part in name.split("."))]
    return ["gpusim_rl", *(name for name in public if not name.startswith("gpusim_rl.tasks"))]


def help_pdoc(module: ModuleType) -> None:
    """Does what pdoc cannot: loads names that load when they are first used, resolves the fields of named tuples."""
    vars(module).update({name: getattr(module, name) for name in getattr(module, "__all__", ())})
    for value in vars(module).values():
        if isinstance(value, type) and hasattr(value, "_fields") and value.__module__ == module.__name__:
            value.__new__.__annotations__ = typing.get_type_hints(value)
        if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__:
            resolve_inherited(value)


def resolve_inherited(cls: type) -> None:
    """Resolves annotations of a dataclass's `__init__`: fields of its bases name what their own modules import."""
    hints = cls.__init__.__annotations__
    for base in cls.__mro__[1:]:
        for name, text in vars(base).get("__annotations__", {}).items():
            with contextlib.suppress(NameError):  # of an import for type checkers only
                hints[name] = eval(text, vars(sys.modules[base.__module__]))


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.exit(main())
