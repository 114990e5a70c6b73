"""The arrays of an npz file, which may be a stranger's: read as data, and bounded in size. Free of torch."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from gpusim_rl.errors import ConfigError, first_line
from gpusim_rl.files import safe_open


def load(path: Path, limit: int) -> tuple[dict[str, Any], str]:
    """Returns the arrays of a file by name, and the SHA-256 of its content in hex.

    An entry of the archive that is no array is bytes, by its file name.

    Args:
        path: File.
        limit: Largest size, packed and unpacked [bytes].

    Raises:
        ConfigError: It is not there, is no npz file, is larger, or has Python objects.
    """
    try:
        content = safe_open.read_bytes(path, limit)
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > limit:
                raise ConfigError(f"{path} has more than {limit} bytes unpacked")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}, hashlib.sha256(content).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ConfigError:
        raise
    except Exception as error:  # the readers of zip and numpy fail on foreign bytes in a dozen ways
        raise ConfigError(f"{path} is no npz file: {first_line(error)}") from None


def save(path: Path, arrays: dict[str, Any]) -> None:
    """Writes arrays by name in place of `path`, packed.

    Raises:
        OSError: The file cannot be written.
    """
    with safe_open.replacing(path) as file:
        np.savez_compressed(file, **arrays)
