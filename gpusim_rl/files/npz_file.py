"""The arrays of an npz file, which may be a stranger's: read as data, and bounded in size. Free of torch."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np

from gpusim_rl.errors import ConfigError, first_line
from gpusim_rl.files import safe_open


def load(path: Path, limit: int, names: Container[str] | None = None) -> tuple[dict[str, Any], str]:
    """Returns the arrays of a file by name, and the SHA-256 of its content in hex.

    An entry of the archive that is no array is bytes, by its file name.

    Args:
        path: File.
        limit: Largest size, packed and unpacked [bytes].
        names: Names of the arrays that are read; None = all.

    Raises:
        ConfigError: It is not there, is no npz file, is larger, or has Python objects.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a folder: expected an npz file")
    try:
        content = safe_open.read_bytes(path, limit)
        if not content:
            raise EOFError("it is empty")
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > limit:
                raise ConfigError(f"{path} has more than {limit} bytes unpacked")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            chosen = [name for name in arrays.files if names is None or name in names]
            return {name: arrays[name] for name in chosen}, hashlib.sha256(content).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ConfigError:
        raise
    except Exception as error:  # the readers of zip and numpy fail on foreign bytes in a dozen ways
        reason = first_line(error) or type(error).__name__
        if "allow_pickle" in reason:
            reason = "it holds Python objects, which could run code, in place of numbers and text"
        raise ConfigError(f"{path} is no npz file: {reason}") from None


def save(path: Path, arrays: dict[str, Any]) -> None:
    """Writes arrays by name in place of `path`, packed.

    Raises:
        OSError: The file cannot be written.
    """
    with safe_open.replacing(path) as file:
        np.savez_compressed(file, **arrays)
