"""Safe reading and writing of run folders, which may be untrusted or on a failing disk. Does not import torch.

Files are read as data or rejected; see docs/security.md.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import yaml

from gpusim_rl.errors import ConfigError, first_line
from gpusim_rl.files import budgets

DIGEST = b"# sha256 "  # start of a saved yaml's first line, followed by the hex digest of the other lines
NUMBER = re.compile(r"[-+.]?[0-9][0-9a-fA-FxobE_:.+-]*")
PLAIN = (str, int, float, bool, type(None))
TOO_MANY = "too many or too deeply nested values for saved settings"

_FLAGS = {"rb": os.O_RDONLY, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab+": os.O_RDWR | os.O_APPEND | os.O_CREAT}


def open_file(path: Path, mode: Literal["rb", "ab", "ab+"] = "rb", buffering: int = -1) -> IO[bytes]:
    """Open a regular file without following links or blocking on pipes.

    Raises ConfigError if the file is not regular, or is opened for writing and has hard links.
    """
    try:
        number = os.open(path, _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe without a reader
            raise _not_a_file(path, path.lstat().st_mode) from None
        raise
    state = os.fstat(number)
    if not stat.S_ISREG(state.st_mode):
        os.close(number)
        raise _not_a_file(path, state.st_mode)
    if mode != "rb" and state.st_nlink > 1:
        os.close(number)
        raise ConfigError(f"{path} is a hard link to another file", hint="Try replacing it with a copy")
    return os.fdopen(number, mode, buffering)


def lock(file: IO[bytes]) -> bool:
    """Lock an open file for this process and its children; return False if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_bytes(path: Path, limit: int = budgets.SETTINGS_BYTES) -> bytes:
    """Return a regular file's content; raise ConfigError above `limit` bytes."""
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ConfigError(f"too large for a run file: more than {limit} bytes", key=str(path))
    return content


@contextmanager
def open_archive(file: IO[bytes]) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive; raise BadZipFile if its entry list exceeds `budgets.DIRECTORY_BYTES`."""
    with zipfile.ZipFile(_Bounded(file)) as archive:  # type: ignore[arg-type]
        archive.fp = file  # the entry list has been read
        yield archive


class _Bounded:
    """File wrapper that limits each read of zipfile to `budgets.DIRECTORY_BYTES`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        most = budgets.DIRECTORY_BYTES
        content = self._file.read(size if 0 <= size <= most else most + 1)
        if len(content) > most:
            raise zipfile.BadZipFile("entry list too long")
        return content


def hex_digest(file: IO[bytes], size: int, copy: IO[bytes] | None = None) -> bytes:
    """Return the hex SHA-256 of the first `size` bytes; copy these bytes to `copy`, if given."""
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(min(size, 1 << 20)):
        digest.update(block)
        if copy is not None:
            copy.write(block)
        size -= len(block)
    return digest.hexdigest().encode()


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that atomically replaces `path` once complete and on disk.

    A link at `path` is replaced, not followed. Libraries that need a file name can write to `file.name`.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("x+b") as file:  # a new name (O_EXCL): nothing is followed or overwritten
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that a user requested: like `replacing`, but create the folder and raise ConfigError on failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def temporary_name(path: Path) -> Path:
    """Return a unique hidden path next to `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def free_name(path: Path) -> Path:
    """Return `path` if it is free, else the first free path of `<name>-2`, `<name>-3`, ..."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{count}") for count in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def keep_damaged(path: Path) -> str:
    """Copy a file to the first free `<name>-damaged`, `<name>-damaged-2`, ...; return the copy's name."""
    copy = free_name(path.with_stem(f"{path.stem}-damaged"))
    with open_file(path) as file, replacing(copy) as new:
        if os.fstat(file.fileno()).st_size > budgets.COPIED_BYTES:
            raise ConfigError(f"too large to copy: more than {budgets.COPIED_BYTES} bytes", key=str(path))
        shutil.copyfileobj(file, new)
    return copy.name


def remove_temporary(folder: Path) -> None:
    """Delete leftovers of `replacing` from a killed process; call it only if no other process writes there."""
    for file in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", file.name):
            with suppress(OSError):
                file.unlink()


def refuse_links(folder: Path, depth: int = 0, skipped: tuple[str, ...] = ()) -> None:
    """Raise ConfigError if a folder, `depth` levels below the top of a run folder, contains links or special files.

    Entries whose names start with `skipped` may be links, and so may files below `wandb`: W&B replaces its links.
    """
    if depth > budgets.FOLDERS:
        raise ConfigError(f"folders are nested {depth} deep, expected at most {budgets.FOLDERS}", key=str(folder))
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # deleted by a run in progress
                if entry.name.startswith(skipped):
                    continue
                refuse_link(Path(entry.path))
                if entry.is_dir(follow_symlinks=False) and entry.name != "wandb":
                    refuse_links(Path(entry.path), depth + 1)


def refuse_link(path: Path) -> None:
    """Raise ConfigError unless a path is a regular file or a folder."""
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise _not_a_file(path, mode)


def _not_a_file(path: Path, mode: int) -> ConfigError:
    kind = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder"}.get(stat.S_IFMT(mode), "a link, device or socket")
    with suppress(OSError):  # not a link, or no longer a link
        kind = f"a link to {os.readlink(path)}"
    expected = "a regular file" if stat.S_ISDIR(mode) else "a regular file or folder"
    return ConfigError(f"{path} is {kind}", expected=expected, hint="Try removing or replacing it")


class _Dumper(yaml.SafeDumper):
    """Dumper without aliases, which `load_yaml` rejects."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump_yaml(value: Any) -> bytes:
    """Return plain values as yaml, with a digest in the first line."""
    body = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode()
    return DIGEST + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def read_intact(path: Path) -> bytes | None:
    """Return a saved yaml's content if it matches its digest, else None."""
    try:
        content = read_bytes(path)
    except OSError:
        return None
    first, _, body = content.partition(b"\n")
    return content if first == DIGEST + hashlib.sha256(body).hexdigest().encode() else None


def load_yaml(path: Path, content: bytes | None = None) -> Any:
    """Return plain values of an untrusted yaml file, or of its `content`; ConfigError if it is not plain yaml."""
    try:
        content = read_bytes(path) if content is None else content
        check_events(content, path)
        value = yaml.safe_load(content)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an int of 5,000 digits
        raise yaml_error(error, path) from None
    check_plain(value, path)
    return value


def yaml_error(error: Exception, path: Path | None = None) -> ConfigError:
    """Convert a yaml parser error to a ConfigError with file and line."""
    mark = getattr(error, "problem_mark", None)
    where = f"{path or mark.name} line {mark.line + 1}" if mark else str(path or "")
    return ConfigError(f"not valid yaml: {getattr(error, 'problem', None) or first_line(error)}", key=where)


def check_events(text: bytes, path: Path) -> None:
    """Reject aliases, tags, long numbers and too many values before any value is built: parsing is lazy."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
        where, problem = f"{path} line {event.start_mark.line + 1}", ""
        long = isinstance(event, yaml.ScalarEvent) and len(event.value) > budgets.NUMBER_CHARACTERS
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            problem = "anchors and aliases (& and *) are not allowed. Try repeating the values"
        elif getattr(event, "tag", None) is not None:
            problem = f"the tag {event.tag!r} is not allowed in saved settings"
        elif long and NUMBER.fullmatch(event.value):
            problem = f"number too long: {len(event.value)} characters"
        elif depth > budgets.SETTINGS_DEPTH or count > budgets.SETTINGS_VALUES:
            problem = TOO_MANY
        if problem:
            raise ConfigError(problem, key=where)


def check_plain(value: Any, where: Path | str) -> None:
    """Raise ConfigError if settings from `where` contain interpolations, objects or too many values."""
    count = 0

    def check(node: Any, key: str, depth: int) -> None:
        nonlocal count
        count += 1
        if count > budgets.SETTINGS_VALUES or depth > budgets.SETTINGS_DEPTH:
            raise ConfigError(TOO_MANY, key=str(where))
        if isinstance(node, dict):
            for name, item in node.items():
                check_type(name, "a key")
                check(item, f"{key}.{name}" if key else str(name), depth + 1)
        elif isinstance(node, (list, tuple)):
            for item in node:
                check(item, key, depth + 1)
        else:
            check_type(node, key)
            if isinstance(node, str) and "${" in node:
                raise ConfigError(f"{key} is the interpolation {node!r}, expected a plain value", key=str(where))

    def check_type(node: Any, name: str) -> None:
        if type(node) not in PLAIN:
            raise ConfigError(f"{name} is a {type(node).__name__}, expected a number or string", key=str(where))

    check(value, "", 0)


def load_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file such as env.json; raise ValueError if the file is damaged."""
    try:
        value = json.loads(read_bytes(path))
    except RecursionError:
        raise ConfigError("nested too deeply", key=str(path)) from None
    if not isinstance(value, dict):
        raise ConfigError(f"expected a JSON object, got {type(value).__name__}", key=str(path))
    return value
