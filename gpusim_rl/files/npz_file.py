"""Untrusted npz files: arrays as data, bounded in size. Does not import torch."""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Container
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpusim_rl.errors import ConfigError, first_line
from gpusim_rl.files import safe_open
from gpusim_rl.files.budgets import UNPACKED_BYTES, UNPACKED_RATIO

BLOCK = 1 << 20
# Compressions that numpy writes; a block of bzip2 or lzma inflates without bound (787 bytes to 1 GB).
PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def load(path: Path, limit: int, names: Container[str] | None = None) -> tuple[dict[str, Any], str]:
    """Return a file's arrays by name (only `names`, if given), and its hex SHA-256; ConfigError if it is invalid.

    Entries that are not arrays are None. `limit` bounds the packed and unpacked size [bytes]; see also
    `UNPACKED_BYTES`.
    """
    if path.is_dir():
        raise ConfigError("this is a folder", key=str(path), expected="an npz file")
    try:
        with safe_open.open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise ConfigError("file too large", key=str(path), expected=f"at most {limit} bytes")
            if not size:
                raise EOFError("empty file")
            arrays = _read(file, path, min(limit, max(UNPACKED_BYTES, UNPACKED_RATIO * size)), names)
            return arrays, safe_open.hex_digest(file, size).decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ConfigError:
        raise
    except Exception as error:  # zip and numpy fail on invalid bytes in a dozen ways
        raise ConfigError(f"invalid npz file: {first_line(error)}", key=str(path)) from None


def _read(file: IO[bytes], path: Path, budget: int, names: Container[str] | None) -> dict[str, Any]:
    """Decompress arrays up to a budget [bytes], whatever sizes their headers claim."""
    arrays: dict[str, Any] = {}
    left = budget
    with safe_open.open_archive(file) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            if name == entry.filename:
                arrays[name] = None
                continue
            if names is not None and name not in names:
                continue
            if entry.compress_type not in PACKED:
                problem = f"{entry.filename}: unsupported compression method"
                raise ConfigError(problem, key=str(path), hint="Try saving with np.savez")
            content = bytearray()
            with archive.open(entry) as packed:
                while block := packed.read(BLOCK):
                    left -= len(block)
                    if left < 0:
                        raise ConfigError("data too large", key=str(path), expected=f"at most {budget} bytes unpacked")
                    content += block
            arrays[name] = _array(memoryview(content))
    return arrays


def _array(content: memoryview) -> np.ndarray:
    """Return an npy file's array as a view of its content."""
    source = io.BytesIO(content[: 1 << 17])  # numpy rejects headers above 10 kB
    version = np.lib.format.read_magic(source)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read_header(source)
    if dtype.hasobject:
        raise ValueError("contains Python objects, which could run code, instead of numbers and strings")
    if dtype.kind not in "biufcSU":
        raise ValueError(f"contains values of dtype {dtype}, expected numbers or strings")
    count, data = math.prod(shape), content[source.tell() :]
    if count * max(1, dtype.itemsize) > len(data) or min(shape, default=0) < 0:
        raise ValueError(f"array of shape {list(shape)} and dtype {dtype} is larger than its zip entry")
    values = np.frombuffer(data, dtype, count) if count else np.empty(0, dtype)
    return np.require(values, requirements="A").reshape(shape, order="F" if by_columns else "C")


def save(path: Path, arrays: dict[str, Any]) -> None:
    """Write compressed arrays to `path`, atomically."""
    with safe_open.replacing(path) as file:
        np.savez_compressed(file, **arrays)
