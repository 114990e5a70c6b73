"""Size-limited reading of a robot's XML, includes and assets."""

from __future__ import annotations

import codecs
import itertools
import math
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from xml.etree import ElementTree
from xml.parsers import expat

import mujoco

from gpusim_rl.errors import TaskError
from gpusim_rl.files import budgets

try:
    import resource
except ImportError:  # Windows
    resource = None

# MuJoCo multiplies these as 32-bit integers, and writes out of bounds if they overflow.
_SIZED = {"hfield": [("nrow", "ncol")], "texture": [("width", "height")], "numeric": [("size",)]}
_USERS = 1000  # assumed number of elements that `<size nuser_...>` applies to
_ENCODINGS = re.compile(r"(utf|iso-|windows-|cp|gb|big5|shift_jis|euc-|koi8|(us-)?ascii)", re.IGNORECASE)
_LFS = b"version https://git-lfs.github.com"
_HEAD = 100_000  # bytes within which the root element starts
_REPLICATED = ("replicate", "composite", "flexcomp")


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Raise ValueError if the block allocates more than `budgets.ROBOT_BYTES`."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:
        pages = 0
    if resource is None or not pages:  # macOS and Windows have no such limit
        yield
        return
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        used = pages * resource.getpagesize() + budgets.ROBOT_BYTES
        bounds = [limit for limit in (*limits, used) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), limits[1]))
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        failed = "allocate memory" in str(error) or "unknown exception" in str(error).lower()  # MuJoCo's wording
        if not (failed or isinstance(error, MemoryError)):
            raise
        raise ValueError(f"requires more than {budgets.ROBOT_BYTES >> 20} MB of memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def regular_file(path: Path, limit: int = budgets.ASSET_BYTES) -> None:
    """Raise TaskError if an existing file is not regular (e.g. a pipe), is too large, or is a Git LFS pointer."""
    if not path.is_file():
        if path.exists():
            raise TaskError("not a regular file", key=str(path), hint="Try copying its content to a regular file")
        return
    size = path.stat().st_size
    if size > limit:
        raise TaskError(f"too large: {size >> 20} MB", key=str(path), expected=f"at most {limit >> 20} MB")
    if size < 1000 and path.read_bytes().startswith(_LFS):
        raise TaskError("Git LFS pointer instead of the file", key=str(path), hint="Try: git lfs pull")


def read_content(file: Path) -> bytes:
    """Return an XML file as UTF-8 without prolog; try the declared encoding, then UTF-8, then Latin-1."""
    regular_file(file, budgets.XML_BYTES)
    content, text = file.read_bytes(), ""
    named = re.search(rb"<\?xml [^>]*encoding *= *[\"']([\w-]+)", content[:_HEAD])
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    declared = "utf-16" if content.startswith(marks) else named[1].decode() if named else ""
    for encoding in (declared if _ENCODINGS.match(declared) else "utf-8", "utf-8", "latin-1"):
        with suppress(UnicodeDecodeError, LookupError):
            text = content.decode(encoding)
            break
    text = text[max(text.find("<?xml "), 0) :].strip("\ufeff\0 \t\r\n")
    return (text.partition("?>")[2] if text.startswith("<?xml ") else text).encode()


def walk(content: bytes, start: Callable[[str, dict[str, str]], object], end: Callable[[str], object]) -> None:
    """Call `start(tag, attributes)` and `end(tag)` for each element; ValueError for invalid or too large XML."""
    parser, depth, count = expat.ParserCreate(), 0, 0

    def opened(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth, count
        depth, count = depth + 1, count + 1
        if depth > budgets.XML_DEPTH or count > budgets.XML_ELEMENTS:
            nested, many = f"nested more than {budgets.XML_DEPTH} deep", f"more than {budgets.XML_ELEMENTS} elements"
            raise ValueError(f"XML: line {parser.CurrentLineNumber}: {nested if depth > budgets.XML_DEPTH else many}")
        start(tag, attributes)

    def closed(tag: str) -> None:
        nonlocal depth
        depth -= 1
        end(tag)

    def entity(name: str, *_: object) -> None:
        raise ValueError(f"XML: entity {name[:40]!r} is not supported. Try inlining its text")

    parser.StartElementHandler, parser.EndElementHandler, parser.EntityDeclHandler = opened, closed, entity
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, LookupError) as error:
        raise ValueError(f"XML: {error}") from None


def parse(content: bytes) -> ElementTree.Element:
    """Parse XML into a tree without comments; see `walk`."""
    builder = ElementTree.TreeBuilder()
    walk(content, builder.start, builder.end)
    return builder.close()


def root_tag(file: Path) -> str:
    """Return the name of a file's root element; "" if unreadable."""
    tags = list[str]()
    with suppress(OSError, ValueError):  # MuJoCo reports the error
        walk(read_content(file)[:_HEAD], lambda tag, attributes: tags.append(tag), str)
    return tags[0] if tags else ""


def read_mjcf(file: Path) -> mujoco.MjSpec:
    """Read an MJCF file and check its includes and assets; raise ValueError or OSError if they are invalid."""
    if not file.exists():
        raise FileNotFoundError("no such file")
    included_files(file)
    spec = mujoco.MjSpec.from_file(str(file))
    if spec.strippath:  # `attach` would lose this setting
        for asset in (*spec.meshes, *spec.hfields, *spec.skins, *spec.textures):
            asset.file = asset.file.replace("\\", "/").rpartition("/")[2]
    check_assets(spec)
    return spec


def included_files(file: Path) -> set[Path]:
    """Return the paths of a file and its includes; ValueError if their elements would allocate too much memory."""
    waiting, seen, meshes, places = [file], set[Path](), set[str](), {""}
    while waiting:
        path = waiting.pop().resolve()
        if path in seen or not path.exists():  # MuJoCo reports missing files
            continue
        seen.add(path)
        if len(seen) > budgets.XML_FILES:
            raise ValueError(f"includes more than {budgets.XML_FILES} files")
        try:
            included = _included(path, meshes, places)
            waiting += [folder / name for name in included for folder in (file.parent, path.parent)]
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
    if len(meshes) * len(places) > budgets.XML_FILES:
        raise ValueError(f"<flexcomp>: too many possible paths for {len(meshes)} meshes in {len(places)} folders")
    for name, place in itertools.product(meshes, places):  # MuJoCo reads these files before `check_assets`
        regular_file(file.parent / place / name)
    return seen


def _included(file: Path, meshes: set[str], places: set[str]) -> list[str]:
    """Return the names of a file's includes; collect its `<flexcomp>` meshes in `meshes`, mesh folders in `places`."""
    included, copies = list[str](), [1]

    def start(tag: str, attributes: dict[str, str]) -> None:
        meshes.update([attributes["file"]] if tag == "flexcomp" and "file" in attributes else [])
        places.update(attributes[key] for key in ("meshdir", "assetdir") if tag == "compiler" and key in attributes)
        if tag in ("include", "model") and (name := attributes.get("file")):
            included.append(name)
        made = math.prod(_integers(attributes.get("count", "1"))) if tag in _REPLICATED else 1
        copies.append(copies[-1] * max(made, 1))
        if copies[-1] > budgets.XML_COPIES:
            raise ValueError(f"<{tag}>: creates {copies[-1]} copies, expected at most {budgets.XML_COPIES}")
        per_element = [(name,) for name in attributes if name.startswith(("nuser", "nkey"))] if tag == "size" else []
        for names in per_element or _SIZED.get(tag, ()):
            numbers = [number for name in names for number in _integers(attributes.get(name, ""))[:1]]
            if math.prod(numbers) * (_USERS if per_element else 1) > budgets.ASSET_NUMBERS:
                raise ValueError(f"<{tag}>: too many values: {' x '.join(names)} = {math.prod(numbers)}")

    walk(read_content(file), start, lambda tag: copies.pop())
    return included


def _integers(text: str) -> list[int]:
    """Return an attribute's first three integers; MuJoCo reports malformed numbers."""
    try:
        return [min(int(float(word)), 1 << 40) for word in text.split(None, 3)[:3]]
    except (ValueError, OverflowError):
        return []


def check_assets(spec: mujoco.MjSpec) -> None:
    """Raise ValueError for an asset that is missing, not a regular file, or too large according to its header."""
    folder, compiler, missing = Path(spec.modelfiledir), spec.compiler, list[str]()
    assets = [(mesh.file, compiler.meshdir) for mesh in (*spec.meshes, *spec.hfields, *spec.skins)]
    for texture in spec.textures:
        assets += [(name, compiler.texturedir) for name in (texture.file, *texture.cubefiles)]
    for name, place in assets:
        paths = {folder / place / name, folder / name} if name else ()
        missing += [name] if paths and not any(path.exists() for path in paths) else []
        for path in paths:
            regular_file(path)
            if path.suffix.lower() == ".png" and path.is_file():
                with path.open("rb") as file:
                    head = file.read(24)
                width, height = struct.unpack(">II", head[16:24]) if len(head) == 24 else (0, 0)
                if width * height > budgets.ASSET_NUMBERS:
                    raise TaskError(f"image too large: {width} x {height} pixels", key=str(path))
    try:
        if missing:
            spec.copy().compile()  # an attached model has its files elsewhere
    except ValueError as error:
        meshes = [mesh.name for mesh in spec.meshes if mesh.file in missing]
        users = [f" of body {geom.parent.name!r}" for geom in spec.geoms if geom.meshname in meshes][:1]
        where = f"looked in {folder / compiler.meshdir}. Try moving the file there, or correcting its path or `meshdir`"
        raise ValueError(f"{' '.join(str(error).split())}{''.join(users)}; {where}") from None
