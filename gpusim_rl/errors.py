"""Errors that the user can fix, shown as one line: where, what, expected, got, what to try.

Does not import torch, so that the command line reports a typo at once.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import resource
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from types import ModuleType
from typing import TextIO

from gpusim_rl import interrupts
from gpusim_rl.interrupts import EXIT_INTERRUPTED

EXIT_USER_ERROR = 2

# Out-of-memory messages of torch, mujoco.batch, Warp, CUDA, cuBLAS, the dynamic linker and threading, in lower case.
OUT_OF_MEMORY = (
    "allocate memory",
    "bad_alloc",
    "failed to allocate",
    "out of memory",
    "cublas_status_alloc_failed",
    "failed to map segment",
    "can't start new thread",
)
SURE = 0.75  # similarity at which `closest` ignores the first letter
LONGEST = 1000  # maximum characters of a message; longer messages lose their middle


class _Missing(Enum):
    """Type of `MISSING`; an enum keeps its identity when it is pickled."""

    MISSING = auto()


MISSING = _Missing.MISSING


class UserError(ValueError):
    """Error that the user can fix, shown as one line: `key: problem. Expected x, got y. Hint`.

    Attributes:
        key: Setting, flag, path or call that is wrong; "" if the problem names it.
        problem: Statement of what is wrong; "" if `expected` and `got` say it.
        expected: Description of valid values, or "".
        got: Value that was rejected, shown by `repr`; `MISSING` if there is none to show.
        hint: Suggested fix, such as "Try num_envs=64", or "".
    """

    def __init__(
        self, problem: object = "", *, key: str = "", expected: str = "", got: object = MISSING, hint: str = ""
    ) -> None:
        super().__init__(problem)  # the only positional argument from which pickle rebuilds the error
        self.key, self.problem, self.expected, self.got = key, str(problem), expected, got
        self.hint = hint.strip()

    def __str__(self) -> str:
        values = [f"expected {self.expected}"] if self.expected else []
        values += [] if self.got is MISSING else [f"got {self.got!r}"]
        sentences = [text for text in (self.problem, ", ".join(values), self.hint) if text]
        line = " ".join(_sentence(text, first=i == 0) for i, text in enumerate(sentences)).removesuffix(".")
        return ": ".join(part for part in (self.key, line) if part)

    def within(self, key: str) -> UserError:
        """Return a copy whose key is prefixed with `key`, the file, section or call that contains it."""
        inner = f"{key}: {self.key}" if self.key else key
        return type(self)(self.problem, key=inner, expected=self.expected, got=self.got, hint=self.hint)


def _sentence(text: str, first: bool) -> str:
    text = text if first else text[:1].upper() + text[1:]
    return text if text.endswith((".", "?", "!")) else f"{text}."


class ConfigError(UserError):
    """Invalid setting, file or installation; exit code 2."""


class TaskError(UserError):
    """Violation of `Task`'s contract (shape, dtype, NaN); the key names the method; exit code 2."""


def closest(name: str, options: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the option most similar to `name`, ignoring case, or None if no similarity reaches `similarity` (0 to 1).

    The first letter is rarely mistyped: an option with a different first letter must reach `SURE`, contain the name, or
    be an anagram of it. The same holds for an option that differs from a three-letter name in two letters.
    """
    by_lower, lower = {option.lower(): option for option in options}, name.lower()
    for close in difflib.get_close_matches(lower, by_lower, n=3, cutoff=similarity):
        begins = close[:1] == lower[:1] and (len(lower) > 3 or sum(map(str.__ne__, close, lower)) == 1)
        sure = difflib.SequenceMatcher(None, close, lower).ratio() >= SURE
        if begins or sure or lower in close or sorted(close) == sorted(lower):
            return by_lower[close]
    return None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the option most similar to `name`, or ""."""
    close = closest(name, options)
    return f" Did you mean {close!r}?" if close else ""


def available(name: str, options: Collection[str]) -> str:
    """Return a hint that suggests the option most similar to `name`, and lists all options."""
    return f"{did_you_mean(name, options)} Available: {', '.join(options) or 'none'}"


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import a module from this package's optional dependencies `extra`; see `import_optional`."""
    return import_optional(module, f"gpusim-rl[{extra}]", needed_by)


def import_optional(module: str, requirement: str, needed_by: str) -> ModuleType:
    """Import a module for the command or setting `needed_by`; pip installs it as `requirement`.

    Raises:
        ConfigError: The module is not installed; the message has the pip command.
        ModuleNotFoundError: The module is installed, but one of its dependencies is not.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An installed module that fails to import something else is a bug to show, not a missing package.
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise ConfigError(f"{module} is missing", key=needed_by, hint=f"Try pip install '{requirement}'") from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def on_one_line(text: str) -> str:
    """Return `printable(text)` with escaped newlines, so that a newline in a name cannot look like a second message."""
    return printable(text).replace("\n", "\\n")


def printable(text: str) -> str:
    """Escape control characters except newlines and tabs: they could move a terminal's cursor or hide text."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print lines to `file` or stdout for all commands, escaping control characters, since names may be untrusted."""
    print("".join(f"{on_one_line(line)}\n" for line in lines), end="", file=file)


def warn(text: str) -> None:
    """Print a warning to stderr, for use before a run's logger exists."""
    say(f"warning: {text}", file=sys.stderr)


class _Formatter(logging.Formatter):
    """Log formatter that escapes control characters; errors may span several lines."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return printable(text) if record.levelno >= logging.ERROR else on_one_line(text)


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn errors inside the block into messages on stderr and exit codes; log records go to stderr too.

    Raises:
        SystemExit: `UserError` or out of memory: one line, exit code 2. Ctrl-C: one line, exit code 130. Other errors:
            a traceback without Hydra's frames, exit code 1.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    interrupts.set_working(True)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if _is_interrupt(error):
            say("interrupted", file=sys.stderr)
            raise SystemExit(EXIT_INTERRUPTED) from None
        if isinstance(error, UserError):
            text = str(error)
            if len(text) > LONGEST:
                text = f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"
            say(f"error: {text}", file=sys.stderr)
            raise SystemExit(EXIT_USER_ERROR) from None
        if is_out_of_memory(error):
            say(f"error: out of memory ({first_line(error)}). {_memory_advice()}", file=sys.stderr)
            raise SystemExit(EXIT_USER_ERROR) from None
        trace = traceback.TracebackException.from_exception(error)
        trace.stack[:] = [frame for frame in trace.stack if f"-packages{os.sep}hydra{os.sep}" not in frame.filename]
        sys.stderr.write(printable("".join(trace.format())))
        raise SystemExit(1) from None
    finally:
        interrupts.set_working(False)


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused the error, directly or through a library's cleanup (OmegaConf's, for example)."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__context__))


@contextmanager
def one_line_if_out_of_memory(num_envs: int) -> Iterator[None]:
    """Turn a failed allocation in the block into a ConfigError that suggests half as many envs."""
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
        hint = f"Try num_envs={max(1, num_envs // 2)}"
        raise ConfigError(f"out of memory ({first_line(error)})", key=f"num_envs={num_envs}", hint=hint) from None


def described(error: Exception | SystemExit) -> str:
    """Return an error's class, first line, and innermost location outside installed packages (else where raised)."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "-packages" not in frame.filename] or frames
    place = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {on_one_line(first_line(error))}{place}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a failed allocation, or a thread that could not start."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY)


def address_space_limit_bytes() -> int | None:
    """Return this process's address-space limit (`ulimit -v`), or None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _memory_advice() -> str:
    limit = address_space_limit_bytes()
    if limit is None:
        return "Try freeing memory, or a smaller num_envs"
    return f"The address space is limited to {limit / 1e9:.3g} GB. Try ulimit -v unlimited"
