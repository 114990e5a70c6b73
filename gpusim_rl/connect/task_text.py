"""Source text of generated tasks: literals, tables and values by joint-name pattern.

Names and values come from third-party files: only what `literal` quotes or `is_field` accepts reaches code or yaml.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from gpusim_rl.env.observations import table as table
from gpusim_rl.errors import TaskError

SIDES = re.compile(
    r"(?<![A-Za-z])(left|right|front|rear|hind|back|[lrfhb]|[frhbl][lrfh])(?![a-z])|(Left|Right)(?=[A-Z])",
    re.IGNORECASE,
)
"""Words in a joint name that denote the side, such as left or front."""
FIELD_TYPES = {"bool", "dict", "float", "int", "list", "str"}
"""Names that a field must not shadow."""
YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # words that yaml does not parse as strings


def literal(value: Any, yaml: bool = False) -> str:
    """Format plain data as a literal of Python or flow-style yaml, on one line without control characters.

    Raises TaskError for a non-finite number, or a yaml string with `${`, which OmegaConf would interpolate.
    """
    match value:
        case str():
            if yaml and "${" in value:
                hint = "Try another name in the robot's file"
                raise TaskError("contains '${', which starts a reference in yaml", got=value, hint=hint)
            text = value.replace("\\", r"\\").replace('"', r"\"")
            return f'"{"".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)}"'
        case bool() | None:
            return {True: "true", False: "false", None: "null"}[value] if yaml else repr(value)
        case int():
            return repr(value)
        case float() if math.isfinite(value):
            return repr(float(value))  # NumPy scalars have a different repr
        case dict():
            return f"{{{', '.join(f'{literal(key, yaml)}: {literal(item, yaml)}' for key, item in value.items())}}}"
        case list() | tuple():
            items = ", ".join(literal(item, yaml) for item in value)
            comma = "," if len(value) == 1 else ""
            return f"[{items}]" if yaml or isinstance(value, list) else f"({items}{comma})"
    raise TaskError(expected="finite numbers and strings", got=value)


def is_field(name: Any) -> bool:
    """Return whether a key of a third-party yaml can name a field of a class."""
    ascii_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is not None
    return ascii_name and not keyword.iskeyword(name) and name not in FIELD_TYPES


def number(value: float) -> float | int:
    """Round a rate such as 59.9999 to 60; rates are inexact because files store periods."""
    return round(value) if abs(value - round(value)) < 5e-4 else value


def by_pattern(joints: list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Key values by name pattern if joints that differ only in their side have equal values, else by joint name."""
    patterns = {joint: re.sub(r"\*[_\W]*(?=\*)", "", SIDES.sub("*", escape(joint))) for joint in joints}
    result: dict[str, Any] = {}
    for joint, value in values.items():
        alike = [other for other in joints if patterns[other] == patterns[joint]]
        alone = alike == [other for other in joints if fnmatchcase(other, patterns[joint])]
        same = all(nearly(values.get(other), values.get(alike[0])) for other in alike)
        result.setdefault(patterns[joint] if alone and same else escape(joint), value)
    return result


def nearly(one: Any, two: Any) -> bool:
    """Return whether two values are equal, or floats within 0.02 of each other."""
    return abs(one - two) <= 0.02 if isinstance(one, float) and isinstance(two, float) else one == two


def wrapped(head: str, brackets: str, items: list[str]) -> str:
    """Format a tuple or a dict, on one line if it fits."""
    comma = "," if brackets == "()" and len(items) == 1 else ""
    line = f"{head}{brackets[0]}{', '.join(items)}{comma}{brackets[1]}"
    if len(line) <= 88:
        return line
    indent = " " * (len(head) - len(head.lstrip()))
    return "\n".join([head + brackets[0], *(f"{indent}    {item}," for item in items), indent + brackets[1]])


def units(rows: list[tuple[str, int, str, str]]) -> str:
    """Format the units of observation terms as a class attribute."""
    items = [f"{literal(name)}: {literal(unit)}" for name, _, _, unit in rows]
    return wrapped("    units: ClassVar = ", "{}", items)


def yaml_lines(values: Mapping[str, Any], indent: int) -> list[str]:
    """Format nested settings in yaml block style."""
    lines = []
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        name = key if is_field(key) and key.lower() not in YAML_WORDS else literal(key)
        lines.append(f"{' ' * indent}{name}:{'' if nested else f' {literal(value, yaml=True)}'}")
        lines += yaml_lines(value, indent + 2) if nested else []
    return lines


def type_of(value: Any) -> str:
    """Return the type annotation for a field with this value."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        kind = "float" if all(isinstance(item, int | float) and not isinstance(item, bool) for item in items) else "Any"
        return f"dict[str, {kind}]" if isinstance(value, dict) else f"list[{kind}]"
    return "Any" if value is None else type(value).__name__


def rounded(value: float) -> float:
    """Round to two significant digits."""
    return float(f"{value:.2g}")


def render(folder: Path, template: str, **values: Any) -> str:
    """Render a template from a folder; the filters `py` and `yaml` format third-party names and values as literals."""
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"py": literal, "yaml": partial(literal, yaml=True)}
    environment.globals |= {"table": table, "units": units, "wrapped": wrapped, "yaml_lines": yaml_lines}
    return environment.from_string((folder / f"{template}.jinja").read_text()).render(values)
