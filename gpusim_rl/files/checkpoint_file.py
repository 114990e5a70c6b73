"""Checkpoint file: data only, versioned, atomic, with a digest.

A `torch.save` file (a zip archive) whose archive comment is the hex SHA-256 of all preceding bytes (docs/security.md).
"""

from __future__ import annotations

import os
import pickletools
import shlex
import struct
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from gpusim_rl.errors import ConfigError
from gpusim_rl.files.budgets import CHECKPOINT_VALUES
from gpusim_rl.files.paths import newest_first
from gpusim_rl.files.safe_open import hex_digest, open_archive, open_file, replacing
from gpusim_rl.public import __version__

FORMAT = 4
SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)  # exact types
DIGEST_SIZE = 64  # hex digits
# Names that the pickle may contain; `weights_only=True` alone allows `bytearray`, which allocates any amount of memory.
CLASSES = {
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch device", "torch Size"),
    *("collections OrderedDict", "builtins set", "__builtin__ set", "builtins complex", "__builtin__ complex"),
    "_codecs encode",  # bytes
    *(str(dtype).replace(".", " ") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
    *(f"torch {storage}" for storage in torch.storage._dtype_to_storage_type_map().values()),
}
DTYPES = tuple(torch.storage._dtype_to_storage_type_map())  # others (uint16) need classes beyond `CLASSES`


def save(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a state (nested dicts and lists of tensors and scalars) to `path`, atomically.

    Raises ConfigError if `load` could not read the state; an OSError leaves the old file unchanged.
    """
    check_is_data(payload)
    versioned = {"format": FORMAT, "gpusim_rl": __version__, **payload}
    with replacing(path) as file:
        try:
            torch.save(versioned, file)
        except RuntimeError as error:
            # torch closes its archive after a failed write, and that failure hides the reason.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.seek(-2, 2)  # an archive ends with the length of its comment
        file.write(struct.pack("<H", DIGEST_SIZE))
        digest = hex_digest(file, file.tell())
        file.seek(0, 2)
        file.write(digest)


def check_is_data(node: Any, path: str = "") -> None:
    """Raise ConfigError if a state, at key path `path`, contains anything but plain data."""

    def not_data(value: Any, where: str) -> ConfigError:
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        expected = "tensors, numbers, strings, lists and dicts"
        return ConfigError(f"the state to save contains a {name} at {where}", expected=expected)

    kind = type(node)
    if kind in (dict, OrderedDict):
        for key, value in node.items():
            if type(key) not in SCALARS:
                raise not_data(key, f"a key of {path or '/'}")
            check_is_data(value, f"{path}/{key}" if path else str(key))
    elif kind in (list, tuple, set):
        for index, value in enumerate(node):
            check_is_data(value, f"{path}/{index}")
    elif kind in (torch.Tensor, torch.nn.Parameter):
        if node.dtype not in DTYPES:
            raise ConfigError(f"the state to save contains a tensor of {node.dtype} at {path}", hint="Try torch.int32")
    elif kind not in SCALARS:
        raise not_data(node, path)


def load(path: Path) -> dict[str, Any]:
    """Return a checkpoint's content; see `load_with_digest`."""
    return load_with_digest(path)[0]


def load_with_digest(path: Path) -> tuple[dict[str, Any], str]:
    """Return a checkpoint's content, with tensors on the CPU, and its digest.

    Raises ConfigError if the file is damaged, not a checkpoint, of another format version, or not plain data.
    """
    try:
        file = open_file(path)
    except OSError as error:
        raise ConfigError(f"cannot read checkpoint {path}: {error.strerror}") from None
    with file, _in_memory() as copy:
        # Check the file first, so that a sparse file takes no memory; then a copy, which no other process can change.
        for target in (None, copy):
            if not _is_intact(file, target):
                raise _damaged(path)
            if problem := _strange(target or file):
                raise _foreign(path, problem)
        copy.seek(0)
        try:
            payload = torch.load(copy, map_location="cpu", weights_only=True)
        except Exception:  # torch's reader fails on invalid bytes in a dozen ways, none of them informative
            raise ConfigError(f"cannot read checkpoint {path}: torch cannot load it") from None
        copy.seek(-DIGEST_SIZE, 2)
        digest = copy.read().decode()
    version = payload.get("format") if isinstance(payload, dict) and "gpusim_rl" in payload else None
    if not isinstance(version, int) or version < 1:
        raise ConfigError("not a gpusim_rl checkpoint", key=str(path))
    if version != FORMAT:
        problem = f"written in format {version} by gpusim_rl {payload['gpusim_rl']}"
        expected, hint = f"format {FORMAT} (gpusim_rl {__version__})", "Try the gpusim_rl commit in the run's env.json"
        raise ConfigError(problem, key=f"checkpoint {path}", expected=expected, hint=hint)
    if not _is_small(payload):
        raise _foreign(path, "too many values")
    return payload, digest


def _foreign(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{problem}; not written by gpusim_rl", key=f"checkpoint {path}")


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint matches its digest; False if unreadable."""
    with suppress(OSError, ConfigError), open_file(path) as file:
        return _is_intact(file)
    return False


def digest_of(path: Path) -> str | None:
    """Return the digest stored in a checkpoint, unchecked; None if unreadable."""
    with suppress(OSError, ConfigError, UnicodeDecodeError), open_file(path) as file:
        file.seek(max(0, file.seek(0, 2) - DIGEST_SIZE))
        return file.read().decode("ascii")
    return None


def _in_memory() -> IO[bytes]:
    """Return an anonymous file, in memory on Linux; unlike a BytesIO, torch reads it without holding the GIL."""
    return os.fdopen(os.memfd_create("checkpoint"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def _is_intact(file: IO[bytes], copy: IO[bytes] | None = None) -> bool:
    """Return whether a file matches its digest; copy the file to `copy`, if given."""
    try:
        size = file.seek(0, 2) - DIGEST_SIZE
    except OSError:  # some kernel files, such as /proc/self/mem, have no end
        return False
    if size <= 0:
        return False
    file.seek(size)
    stored = file.read(DIGEST_SIZE)
    digest = hex_digest(file, size, copy)
    if copy is not None:
        copy.write(stored)
    return digest == stored


def _damaged(path: Path) -> ConfigError:
    """Return the error for a digest mismatch, with the folder's newest good checkpoint as a hint."""
    hint = "No other checkpoint in the folder is intact" if path.parent.name == "checkpoints" else ""
    if good := next(filter(is_whole, newest_first(path.parent.glob("*.pt"))), None):
        new = "" if good.name == "last.pt" else "; training from this file starts a new run folder"
        advice = shlex.quote(f"checkpoint={good}")
        hint = f"The newest intact checkpoint is {good.name}: try {advice} (for a tool, pass only the path{new})"
    problem = f"cannot read checkpoint {path}: damaged, or not a gpusim_rl checkpoint (SHA-256 mismatch)"
    return ConfigError(problem, hint=hint)


def _strange(file: IO[bytes]) -> str:
    """Return the reason why `save` cannot have written an archive, or ""; unpack only the pickle."""
    size = file.seek(0, 2)
    file.seek(0)
    if file.read(4) != b"PK\x03\x04":  # torch would read its legacy format, and zipfile an archive later in the file
        return "not a torch archive"
    try:
        with open_archive(file) as archive:
            entries = archive.infolist()
            pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
            if min((entry.header_offset for entry in entries), default=1) != 0 or len(pickles) != 1:
                return "not a torch archive"
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                return "compressed archive"
            if sum(entry.file_size for entry in entries) > size:
                return "content larger than the file"
            return _strange_pickle(archive.read(pickles[0]))
    except (zipfile.BadZipFile, ValueError, EOFError, struct.error, LookupError, NotImplementedError, RuntimeError):
        return "not a torch archive"


def _strange_pickle(content: bytes) -> str:
    """Return the reason why `save` cannot have written a pickle, or "".

    Tracks only the number of values in each object on the pickle's stack: a tuple that contains a tuple twice, sixty
    levels deep, takes 300 bytes, but hashing it as a dict key takes forever.
    """
    sizes: list[int | None] = []  # None: a mark
    memo: dict[Any, int | None] = {}
    for count, (code, argument, _) in enumerate(pickletools.genops(content)):
        if code.name in ("GLOBAL", "INST") and argument not in CLASSES:
            return f"forbidden class or function {argument!r}"
        if code.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4", "DUP") or count > 20 * CHECKPOINT_VALUES:
            return "unsupported pickle opcodes"
        if code.name.endswith("PUT"):  # PUT, BINPUT, LONG_BINPUT
            memo[argument] = sizes[-1]
        elif code.name == "MEMOIZE":
            memo[len(memo)] = sizes[-1]
        elif code.name.endswith("GET"):
            sizes.append(memo[argument])
        elif code.name == "MARK":
            sizes.append(None)
        else:
            size, operands = 0, list(code.stack_before)
            if pickletools.markobject in operands:
                while (top := sizes.pop()) is not None:
                    size += top
                operands = operands[: operands.index(pickletools.markobject)]
            size += sum(sizes.pop() or 0 for _ in operands)
            if size > CHECKPOINT_VALUES:
                return "too many values"
            sizes.extend(size + 1 for _ in code.stack_after)
    return ""


def _is_small(payload: Any) -> bool:
    """Return whether a state has at most `CHECKPOINT_VALUES` values, and no tensor exceeds its storage.

    A pickle of 1 kB can expand to a billion nested lists, or to a view that repeats one number a billion times.
    """
    stack = [payload]
    for _ in range(CHECKPOINT_VALUES):
        if not stack:
            return True
        node = stack.pop()
        if isinstance(node, dict):
            stack += [*node.keys(), *node.values()]
        elif isinstance(node, (list, tuple, set)):
            stack += node
        elif isinstance(node, torch.Tensor) and node.numel() * node.element_size() > node.untyped_storage().nbytes():
            return False
    return False
