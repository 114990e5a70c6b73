"""Bounded reading of a robot's XML: encodings, nesting, sizes, includes, and the line for each file that is refused."""

from __future__ import annotations

import codecs
import math
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree
from xml.parsers import expat

import mujoco

MAX_XML_BYTES = 32 << 20
MAX_ASSET_BYTES = 256 << 20
MAX_DEPTH = 200
MAX_ELEMENTS = 500_000
MAX_FILES = 200
MAX_REPLICAS = 100_000
"""Copies that `<replicate>`, `<composite>` and `<flexcomp>` make, nested ones multiplied."""
MAX_CELLS = 20_000_000
"""Numbers in one height field, texture or custom field; 80 MB as float32."""
MAX_USERS = 1000
"""Elements that have the numbers of `<size nuser_...>` each."""
_SIZED = {"hfield": [("nrow", "ncol")], "texture": [("width", "height")], "numeric": [("size",)]}
_ENCODINGS = re.compile(r"(utf|iso-|windows-|cp|gb|big5|shift_jis|euc-|koi8|(us-)?ascii)", re.IGNORECASE)
_LFS = b"version https://git-lfs.github.com"
_HEAD = 100_000  # bytes in which a file's first element begins
_REPLICATED = ("replicate", "composite", "flexcomp")


def regular_file(path: Path, limit: int = MAX_ASSET_BYTES) -> None:
    """Raise ValueError for a path that is no regular file (a pipe blocks), too large, or a Git LFS pointer."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file. Try a copy of its content")
    if path.is_file() and path.stat().st_size > limit:
        raise ValueError(f"{path} has {path.stat().st_size >> 20} MB, expected at most {limit >> 20} MB")
    if path.is_file() and path.stat().st_size < 1000 and path.read_bytes().startswith(_LFS):
        raise ValueError(f"{path} is a Git LFS pointer, not the file. Try: git lfs pull")


def read_content(file: Path) -> bytes:
    """Return an XML file as UTF-8 without its prolog, and without what other readers skip before and after it.

    A file that is not in the encoding of its prolog is UTF-8, or has a character for each byte.

    Raises:
        ValueError: It is not a regular file, or too large.
        OSError: It cannot be read.
    """
    regular_file(file, MAX_XML_BYTES)
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
    """Call `start` and `end` for each element. Prefixes of names are kept, declared or not.

    Raises:
        ValueError: The text is not XML, or is nested too deeply, or has too many elements.
    """
    parser, depth, count = expat.ParserCreate(), 0, 0

    def opened(tag: str, attributes: dict[str, str]) -> None:
        nonlocal depth, count
        depth, count = depth + 1, count + 1
        if depth > MAX_DEPTH or count > MAX_ELEMENTS:
            limit = f"nested deeper than {MAX_DEPTH}" if depth > MAX_DEPTH else f"more than {MAX_ELEMENTS}"
            raise ValueError(f"XML: line {parser.CurrentLineNumber}: elements are {limit}")
        start(tag, attributes)

    def closed(tag: str) -> None:
        nonlocal depth
        depth -= 1
        end(tag)

    parser.StartElementHandler, parser.EndElementHandler = opened, closed
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, LookupError) as error:
        raise ValueError(f"XML: {error}") from None


def parse(content: bytes) -> ElementTree.Element:
    """Return the tree of a text, without comments; raises ValueError as `walk`."""
    builder = ElementTree.TreeBuilder()
    walk(content, builder.start, builder.end)
    return builder.close()


def root_tag(file: Path) -> str:
    """Return the name of a file's first element; empty if it cannot be read."""
    tags = list[str]()
    with suppress(OSError, ValueError):  # MuJoCo says what is wrong
        walk(read_content(file)[:_HEAD], lambda tag, attributes: tags.append(tag), str)
    return tags[0] if tags else ""


def read_mjcf(file: Path) -> mujoco.MjSpec:
    """Read an MJCF file after a look at it, the files that it includes, and the assets that it names.

    Raises:
        ValueError: A file is not valid, not a regular file, or would take unbounded memory.
        FileNotFoundError: The file is not there.
    """
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}")
    included_files(file)
    spec = mujoco.MjSpec.from_file(str(file))
    if spec.strippath:  # `attach` would lose it
        for asset in (*spec.meshes, *spec.hfields, *spec.skins, *spec.textures):
            asset.file = asset.file.replace("\\", "/").rpartition("/")[2]
    check_assets(spec)
    return spec


def included_files(file: Path) -> set[Path]:
    """Return a file and those that it includes, after a look at what their elements allocate.

    Raises:
        ValueError: See `read_mjcf`.
    """
    waiting, seen = [file], set[Path]()
    while waiting:
        path = waiting.pop().resolve()
        if path in seen or not path.exists():  # MuJoCo says which one is missing
            continue
        seen.add(path)
        if len(seen) > MAX_FILES:
            raise ValueError(f"it includes more than {MAX_FILES} files")
        try:
            waiting += [folder / name for name in _included(path) for folder in (file.parent, path.parent)]
        except ValueError as error:
            raise ValueError(f"{path.name}: {error}") from None
    return seen


def _included(file: Path) -> list[str]:
    """Return the files that a file includes, after a look at what its elements allocate."""
    included, copies = list[str](), [1]

    def start(tag: str, attributes: dict[str, str]) -> None:
        if tag in ("include", "model") and (name := attributes.get("file")):
            included.append(name)
        made = math.prod(_integers(attributes.get("count", "1"))) if tag in _REPLICATED else 1
        copies.append(copies[-1] * max(made, 1))
        if copies[-1] > MAX_REPLICAS:
            raise ValueError(f"<{tag}>: makes {copies[-1]} copies, expected at most {MAX_REPLICAS}")
        per_element = [(name,) for name in attributes if name.startswith(("nuser", "nkey"))] if tag == "size" else []
        for names in per_element or _SIZED.get(tag, ()):
            numbers = [number for name in names for number in _integers(attributes.get(name, ""))[:1]]
            if math.prod(numbers) * (MAX_USERS if per_element else 1) > MAX_CELLS:
                raise ValueError(f"<{tag}>: {' x '.join(names)} is {math.prod(numbers)}; it allocates too many numbers")

    walk(read_content(file), start, lambda tag: copies.pop())
    return included


def _integers(text: str) -> list[int]:
    """Return the whole numbers of an attribute; MuJoCo says what is wrong with others."""
    try:
        return [int(float(word)) for word in text.split()]
    except (ValueError, OverflowError):
        return []


def check_assets(spec: mujoco.MjSpec) -> None:
    """Raise ValueError for an asset that is a pipe or the like, or whose header asks for too much memory."""
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
                if width * height > MAX_CELLS:
                    raise ValueError(f"{path}: has {width} x {height} pixels, expected at most {MAX_CELLS}")
    try:
        if missing:
            spec.copy().compile()  # a file of an attached model is elsewhere
    except ValueError as error:
        meshes = [mesh.name for mesh in spec.meshes if mesh.file in missing]
        users = [f" of body {geom.parent.name!r}" for geom in spec.geoms if geom.meshname in meshes][:1]
        where = f"looked in {folder / compiler.meshdir}. Try to put it there, or to correct its path or `meshdir`"
        raise ValueError(f"{' '.join(str(error).split())}{''.join(users)}; {where}") from None
