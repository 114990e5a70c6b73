"""Overrides `key=value` in Hydra's grammar, as text. Does not import Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpusim_rl.errors import ConfigError

OPEN_SECTIONS = ("task.randomization_params", "task.observations", "env.kwargs", "env.cfg")
"""Sections to which a command line may add keys."""


class Override(str):
    """Override made from a Python value, which is assigned without parsing; the text is for the run's record."""

    value: Any

    def __new__(cls, key: str, value: Any) -> Override:
        """Make `key=value`; a key with the prefix `++` may be new."""
        if isinstance(value, str) and value == "???":  # OmegaConf's missing value
            raise ConfigError("expected a value, got ???", key=key.lstrip("+"))
        override = super().__new__(cls, f"{key}={text_of(value)}")
        override.value = node_of(value)
        return override


def is_override(text: str) -> bool:
    """Return whether an argument is `key=value`, optionally prefixed with + or ~."""
    return "=" in text and not text.startswith("-")


def key_of(text: str) -> str:
    """Return the key of an override: `task` for `+task@package=Ant`."""
    return text.lstrip("+~").partition("=")[0].partition("@")[0]


def value_of(text: str) -> str:
    """Return the value of an override as text, without quotes."""
    value = text.partition("=")[2]
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def last_value(overrides: Iterable[str], *keys: str) -> str | None:
    """Return the value of the last override of one of the keys, or None."""
    values = [value_of(text) for text in overrides if key_of(text) in keys]
    return values[-1] if values else None


def is_open(key: str) -> bool:
    """Return whether a key is in `OPEN_SECTIONS`, an algorithm's extensions, or a task's term weights."""
    named = re.match(r"\w+\.extensions\.|task\.\w*weights\.", f"{key}.")
    return named is not None or any(f"{key}.".startswith(f"{section}.") for section in OPEN_SECTIONS)


def quote(text: str) -> str:
    """Quote a string so that Hydra reads it back unchanged."""
    word = re.fullmatch(r"[A-Za-z_./][\w./-]*", text) and text.strip("./-") != ""
    if word and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${") + "'"


def text_of(value: Any) -> str:
    """Format a plain value in Hydra's override grammar."""
    value = _scalar(value)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(text_of(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{text_of(item)}' for key, item in value.items())}}}"
    return quote(str(value))


def node_of(value: Any) -> Any:
    """Convert a value to plain data that OmegaConf resolves to the same number, string, list or dict."""
    value = _scalar(value)
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [node_of(item) for item in value]
    if isinstance(value, Mapping):
        return {key: node_of(item) for key, item in value.items()}
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", str(value))  # no interpolation


def _scalar(value: Any) -> Any:
    """Convert a NumPy or torch scalar to a Python number or string."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    kind = next((kind for kind in (bool, int, float) if isinstance(value, kind)), None)
    return value if kind is None else kind(value)


def keys_in(value: Any) -> Iterator[str]:
    """Yield the keys of nested mappings, including those in lists."""
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        yield from keys_in(item)
    if isinstance(value, Mapping):
        yield from map(str, value)
