"""Errors that the user can fix. The message is one line: what, where, expected, got, and what to try.

Nothing here imports torch, so that the command line answers a typo at once.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Protocol

from gpusim_rl import interrupts
from gpusim_rl.interrupts import EXIT_INTERRUPTED

try:
    import resource
except ImportError:  # Windows
    resource = None

EXIT_USER_ERROR = 2

# How torch, mujoco.batch, Warp, CUDA, cuBLAS, the dynamic linker and Python's threads say it, in lower case.
OUT_OF_MEMORY = (
    "allocate memory",
    "bad_alloc",
    "failed to allocate",
    "out of memory",
    "cublas_status_alloc_failed",
    "failed to map segment",
    "can't start new thread",
)
SURE = 0.75  # likeness in `closest`
LONGEST = 1000  # characters of a message; a longer one, such as that of a value of many thousand, loses its middle


class ConfigError(ValueError):
    """A setting, a file or an installation is wrong. The message is one line; the exit code is 2."""


class TaskError(ValueError):
    """A task broke the contract of `Task` (shape, dtype, NaN). The message names the method; the exit code is 2."""


def closest(name: str, options: Iterable[str], similarity: float = 0.6) -> str | None:
    """Returns the option most similar to `name`, ignoring case; None when none is so similar, from 0 to 1.

    Few mistype the first letter: with another one, or with only two letters of three, an option is to be as similar as
    `SURE`, to contain the name, or to have its letters in another order.
    """
    by_lower, lower = {option.lower(): option for option in options}, name.lower()
    for close in difflib.get_close_matches(lower, by_lower, n=3, cutoff=similarity):
        begins = close[:1] == lower[:1] and (len(lower) > 3 or sum(map(str.__ne__, close, lower)) == 1)
        if begins or lower in close or sorted(close) == sorted(lower):
            return by_lower[close]
        if difflib.SequenceMatcher(None, close, lower).ratio() >= SURE:
            return by_lower[close]
    return None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the option most similar to `name`, or "" when none is similar."""
    close = closest(name, options)
    return f" Did you mean {close!r}?" if close else ""


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import a module that one of our extras installs; see `import_optional`."""
    return import_optional(module, f"gpusim-rl[{extra}]", needed_by)


def import_optional(module: str, requirement: str, needed_by: str) -> ModuleType:
    """Import a module for a command or a setting that needs it; `requirement` is what pip installs it by.

    Raises:
        ConfigError: It is not installed; the message has the pip command.
        ModuleNotFoundError: It is installed, but one of its own dependencies is not.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An installed module that fails to import something else is a bug to show, not a missing package.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ConfigError(f"{needed_by} needs {module}: pip install '{requirement}'") from None


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def on_one_line(text: str) -> str:
    """Returns `printable` text of one line: a line end in a name would make a second message of what follows."""
    return printable(text).replace("\n", "\\n")


def printable(text: str) -> str:
    """Returns text from a file, escaped but for line ends and tabs.

    Control characters and the like would move a terminal's cursor, or hide what follows.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class Writable(Protocol):
    """What text can be printed to."""

    def write(self, text: str, /) -> object:
        """Writes it."""


def say(*lines: str, file: Writable | None = None) -> None:
    """Prints lines to `file` or stdout, whatever names and settings they hold. All commands print by it."""
    print("".join(f"{on_one_line(line)}\n" for line in lines), end="", file=file)


def warn(text: str) -> None:
    """Prints a line that must not be missed, before there is a run that logs it."""
    say(f"warning: {text}", file=sys.stderr)


class _Formatter(logging.Formatter):
    """Makes lines of what is logged; an error may be a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return printable(text) if record.levelno >= logging.ERROR else on_one_line(text)


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turns errors inside a `with` block into messages on stderr and exit codes. What is logged is printed there too.

    Raises:
        SystemExit: ConfigError and TaskError, and too little memory: one line, exit code 2. Ctrl-C: one line, exit
            code 130. Other errors: a traceback without Hydra's frames, exit code 1.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    interrupts.begin_work()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if _is_interrupt(error):
            say("interrupted", file=sys.stderr)
            raise SystemExit(EXIT_INTERRUPTED) from None
        if isinstance(error, (ConfigError, TaskError)):
            text = str(error)
            if len(text) > LONGEST:
                text = f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
            say(f"error: {text}", file=sys.stderr)
            raise SystemExit(EXIT_USER_ERROR) from None
        if is_out_of_memory(error):
            say(f"error: out of memory ({first_line(error)}); {_memory_advice()}", file=sys.stderr)
            raise SystemExit(EXIT_USER_ERROR) from None
        trace = traceback.TracebackException.from_exception(error)
        trace.stack[:] = [frame for frame in trace.stack if f"-packages{os.sep}hydra{os.sep}" not in frame.filename]
        sys.stderr.write(printable("".join(trace.format())))
        raise SystemExit(1) from None
    finally:
        interrupts.end_work()


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is Ctrl-C, or came of it: a library's cleanup, OmegaConf's for example, may fail then."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__context__))


@contextmanager
def one_line_if_out_of_memory(num_envs: int) -> Iterator[None]:
    """Turns an allocation that fails in the block into a ConfigError, which says to try half of the envs."""
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        reason, half = first_line(error), max(1, num_envs // 2)
        raise ConfigError(f"out of memory with num_envs={num_envs} ({reason}); try num_envs={half}") from None


def described(error: Exception | SystemExit) -> str:
    """Return an exception's class, first line, and the place in the user's code, or else that where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "-packages" not in frame.filename] or frames
    place = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {on_one_line(first_line(error))}{place}"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error is an allocation, or the start of a thread, that failed."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY)


def address_space_limit_bytes() -> int | None:
    """Returns the limit of this process's address space (`ulimit -v`), or None without a limit."""
    if resource is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _memory_advice() -> str:
    limit = address_space_limit_bytes()
    if limit is None:
        return "try to free some memory, or a smaller num_envs"
    return f"the address space is limited to {limit / 1e9:.3g} GB, try ulimit -v unlimited"
