"""Write docs/config.md from the comments of the yaml files in cfg/.

python docs/build_config.py                 docs/config.md
python docs/build_config.py --check         exit code 1 if the page is stale

Each fact has one source: cfg/ has values and meanings of settings, gpusim_rl/settings/schema.py has names, types and
rules. The comment after a key is its meaning; the comment at the top of a file is the file's introduction.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from gpusim_rl.settings import schema

ROOT = Path(__file__).resolve().parent.parent
CFG, PAGE = ROOT / "cfg", ROOT / "docs" / "config.md"
HEAD = """# Settings

<!-- Written by python docs/build_config.py from the comments in cfg/: edit those. -->

Every setting of a run, as you type it on the command line, with its default and meaning.

```bash
python train.py --help                       # the settings people change
python train.py --cfg job task=Ant           # all settings and their values for this command
python train.py task=Ant num_envs=1024 ppo.gamma=0.995 ppo.network.hidden=[128,64]
python train.py task=Ant -m seed=1,2,3       # three runs
```

`algo=`, `sim=`, `actors=`, `log=`, `task=`, `recipe=` and `debug=` each select a yaml in the folder of that name in
`cfg/`. If several files set a key, the last of these wins: `algo`, `sim`, `actors`, `log`, `cfg/config.yaml`, `task`,
its [recipe](tasks.md#recipes), `debug`, the command line.

With `checkpoint=<run>`, the settings come from the run; type only those that you want to change. These are never taken
from a run, so type them again: `trust`, `log.dir`, `log.console`, `log.video`, `actors`, `num_actors`,
`demonstrations.file`, `teacher.run`, `distill.teacher`, `wandb_activate`. The commands printed at the end of a run
include the ones it needs.

An unknown key is an error ([exit code 2](outputs.md#exit-codes)), with or without Hydra's `+`.
"""
ALGORITHMS = tuple(schema.ALGORITHMS)
"""Algorithms with their own section; the other yamls in cfg/algo are variants of these."""

ALGORITHMS_HEAD = """\
[algorithms.md](algorithms.md) describes the algorithms. An algorithm's settings are under its own heading and under
each heading that lists its section; `horizon` in the `ppo` section is `ppo.horizon`. Different defaults are followed by
their algorithms.
"""
TASK_HEAD = "Settings of every task. Their values are in the task's yaml, next to the task's own settings.\n"
GROUPS = {"sim": "auto", "actors": "none", "log": "default", "debug": "none"}
"""Config groups, each with the name of its yaml that has all keys."""


@dataclass(frozen=True)
class Setting:
    """A key of a yaml file.

    Attributes:
        key: Full key, such as `ppo.network.hidden`.
        value: Value in command-line syntax; None for a section.
        comment: Trailing comment.
    """

    key: str
    value: str | None
    comment: str


def main(argv: list[str] | None = None) -> int:
    """Write the page, or check that it is current."""
    check = parse(argv).check
    page = build()
    if not check:
        PAGE.write_text(page, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page:
        print("docs/config.md is stale. Try python docs/build_config.py", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="build_config", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="check the page against cfg/ without writing")
    return parser.parse_args(argv)


def build() -> str:
    """Return the page's Markdown text."""
    every = settings(CFG / "config.yaml")
    sections = {n: [s for s in every if s.key.startswith(f"{n}.")] for n in ("env", "pretrained", "eval", "task")}
    run = [s for s in every if "." not in s.key and s.value is not None]
    [recipe] = settings(CFG / "recipe" / "auto.yaml")
    parts = [HEAD, "## The run\n", listing([*run, replace(recipe, value="auto")])]
    parts += ["## Algorithms\n", ALGORITHMS_HEAD]
    parts.append(listing([s for s in settings(CFG / "algo" / "ppo.yaml") if s.key.startswith("algo.")]))
    taken, shown = {name: shared(CFG / "algo" / f"{name}.yaml") for name in ALGORITHMS}, set[Setting]()
    for file in sorted({file for files in taken.values() for file in files}, reverse=True):
        owners = [f"`{name}`" for name, files in taken.items() if file in files]
        parts += [f"### In the sections {', '.join(owners)}\n", listing(settings(file), shown, file=file)]
    for name in ALGORITHMS:
        above = {f"{name}.{s.key}" for file in taken[name] for s in settings(file)}
        rows = [s for s in algorithm(name) if s.key not in above]
        parts += [f"### `algo={name}`\n", head(CFG / "algo" / f"{name}.yaml"), listing(rows, shown, name)]
    for file in sorted(set((CFG / "algo").glob("*.yaml")) - {CFG / "algo" / f"{name}.yaml" for name in ALGORITHMS}):
        changed = " ".join(f"{s.key}={s.value}" for s in settings(file) if s.value is not None)
        parts += [f"### `algo={file.stem}`\n", head(file), f"```text\n{changed}\n```\n"]
    for group, complete in GROUPS.items():
        files = sorted((CFG / group).glob("*.yaml"))
        names = "".join(f"- `{group}={file.stem}`: {head(file)}" for file in files)
        parts += [f"## `{group}`\n", names + listing(settings(CFG / group / f"{complete}.yaml", f"{group}."))]
    for name in ("env", "pretrained", "eval"):
        [comment] = [s.comment for s in every if s.key == name]
        parts += [f"## `{name}`\n", sentence(comment), listing(sections[name])]
    parts += ["## `task`\n", TASK_HEAD, listing(shared_task_settings())]
    parts += ["These are optional in a task's yaml:\n", listing(sections["task"])]
    return "\n".join(parts)


def algorithm(name: str) -> list[Setting]:
    """Return an algorithm yaml's settings; overrides without a comment get the shared setting's comment."""
    file = CFG / "algo" / f"{name}.yaml"
    meanings = {s.key: s.comment for other in reversed(shared(file)) for s in settings(other, f"{name}.")}
    own = [s for s in settings(file) if s.key.startswith(f"{name}.")]
    return [replace(s, comment=s.comment or meanings[s.key]) for s in own]


def typed(key: str, file: Path) -> str:
    """Format a setting of a shared file with its default, or with a default per algorithm.

    Args:
        key: Key without its section.
        file: File of cfg/learn.
    """
    names: dict[str | None, list[str]] = {}
    owners = [name for name in ALGORITHMS if file in shared(CFG / "algo" / f"{name}.yaml")]
    for name in owners:
        files = shared(CFG / "algo" / f"{name}.yaml")
        if file == next(other for other in files if key in {s.key for s in settings(other)}):
            values = {s.key: s.value for other in reversed(files) for s in settings(other, f"{name}.")}
            values |= {s.key: s.value for s in settings(CFG / "algo" / f"{name}.yaml")}
            names.setdefault(values[f"{name}.{key}"], []).append(name)
    if [*names.values()] == [owners]:
        return f"`{key}={next(iter(names))}`"
    return f"`{key}=" + ", ".join(f"`{value}` ({', '.join(found)})" for value, found in names.items())[1:]


@functools.cache
def shared(file: Path) -> list[Path]:
    """Return the files of cfg/learn that a yaml includes through `defaults`, directly or indirectly."""
    defaults = yaml.safe_load(file.read_text(encoding="utf-8")).get("defaults", [])
    files = [CFG / "learn" / f"{re.sub('^/learn/|@.*', '', name)}.yaml" for name in defaults if name != "_self_"]
    return [*files, *(other for found in files for other in shared(found))]


def head(file: Path) -> str:
    """Return the comment at the top of a yaml file as a line of the page."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.lstrip("# "))
    return prose(re.sub(" ?Its other settings: .*", "", " ".join(lines))) + "\n"


@functools.cache
def settings(file: Path, prefix: str = "") -> list[Setting]:
    """Return the keys of a yaml file in order, each section before its contents.

    Args:
        file: The file.
        prefix: Prefix of each key, such as `sim.`.
    """
    text = file.read_text(encoding="utf-8")
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    return list(_walk(root, prefix, text.splitlines()))


def _walk(node: yaml.MappingNode, prefix: str, lines: list[str]) -> list[Setting]:
    found = []
    for name, value in node.value:
        if name.value in ("defaults", "hydra"):
            continue
        key = prefix + name.value
        is_section = isinstance(value, yaml.MappingNode) and value.value
        mark = name.end_mark if is_section else value.end_mark
        comment = lines[mark.line][mark.column :].partition("#")[2].strip() if mark.line < len(lines) else ""
        shown = (
            lines[value.start_mark.line][value.start_mark.column : value.end_mark.column].strip('"').replace(", ", ",")
        )
        found.append(Setting(key, None if is_section else shown, comment))
        if is_section:
            found += _walk(value, f"{key}.", lines)
    return found


def listing(rows: list[Setting], shown: set[Setting] | None = None, section: str = "", file: Path | None = None) -> str:
    """Format settings as a list, including sections that have a comment.

    Args:
        rows: The settings.
        shown: Keys (without section) and meanings already on the page. Their rows come last, without the meaning;
            other rows are added to `shown`.
        section: Section that prefixes the keys of `rows`.
        file: File of cfg/learn that has the rows, if defaults may differ between the algorithms that include it.
    """
    lines, explained = [], []
    for row in rows:
        inner = replace(row, key=row.key.removeprefix(f"{section}."), value=None)
        text = f"`{row.key}={row.value}`" if row.value else f"`{row.key}`"
        text = typed(row.key, file) if file and row.value else text
        if shown is not None and inner in shown:
            explained += [text] if row.value else []
        elif row.value is not None or row.comment:
            lines.append(f"- {text}: {prose(row.comment)}")
        if shown is not None:
            shown.add(inner)
    lines += [f"- other defaults, meanings above: {', '.join(explained)}"] if explained else []
    return "\n".join([*lines, ""])


def sentence(comment: str) -> str:
    """Format a comment as a paragraph."""
    return f"{prose(comment[0].upper() + comment[1:])}.\n"


def prose(comment: str) -> str:
    """Format a comment as Markdown: choices separated by commas, file names as links."""
    text = comment.replace(" | ", ", ").replace("<", "&lt;")
    return re.sub(r"docs/((\w+\.md)(#[\w-]+)?)", r"[\2](\1)", text)


def shared_task_settings() -> list[Setting]:
    """Return the settings of `TaskConfig` that each task's yaml has, with their comments."""
    text = (ROOT / "gpusim_rl" / "env" / "task.py").read_text(encoding="utf-8")
    [body] = [n.body for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "TaskConfig"]
    found = [Setting("task._target_", "", "class of the task")]
    for field in body:
        if isinstance(field, ast.AnnAssign) and field.value is None:
            meaning = text.splitlines()[field.lineno - 1].partition("# ")[2]
            found.append(Setting(f"task.{ast.unparse(field.target)}", "", meaning))
    return found


if __name__ == "__main__":
    sys.exit(main())
