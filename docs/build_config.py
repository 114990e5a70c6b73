"""Write docs/config.md from the comments of the yaml files in cfg/.

python docs/build_config.py                 docs/config.md
python docs/build_config.py --check         exit code 1 where the page is stale

A setting stands once: its value and its meaning in cfg/, its name, type and rule in gpusim_rl/settings/schema.py. A
comment behind a key is the meaning of the setting; the comment at the top of a file introduces its table.
"""

from __future__ import annotations

import argparse
import ast
import itertools
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

Every setting of a run, with its default and its meaning.

```bash
python train.py --help                       # the settings people change
python train.py --cfg job task=Ant           # all settings and their values for this command
python train.py task=Ant num_envs=1024 ppo.gamma=0.995 ppo.network.hidden=[128,64]
python train.py task=Ant -m seed=1,2,3       # one run after the other
```

A later one wins: `cfg/algo`, `cfg/sim`, `cfg/actors`, `cfg/log`, then `cfg/config.yaml`, then the task's yaml, then
its [recipe](tasks.md#recipes), then `debug=...`, then the command line. With `checkpoint=<run>` the settings of the
run take the place of all but the command line. `checkpoint`, `test`, `trust`, `log.dir`, `log.console`, `actors.*`,
`num_actors`, `demonstrations.file` and `wandb_activate` belong to one call: they are not taken from the run, and the
commands at its end have them.

The names of yaml files are chosen without a dot: `task=Ant`, `recipe=quick`, `algo=ppo`, `sim=mjwarp`, `debug=smoke`.
There is no `+key=value`: an unknown key is an error, however it is written.
"""
ALGORITHMS = tuple(schema.ALGORITHMS)
"""Algorithms with a section of their own; the other yamls of cfg/algo are other values for one of these."""
RECIPES = ("auto", "full", "quick")
GROUPS = {"sim": "auto", "actors": "none", "log": "default", "debug": "none"}
"""Groups of yamls, and the one of each that has all keys."""


@dataclass(frozen=True)
class Setting:
    """A key of a yaml file.

    Attributes:
        key: Full key, such as `ppo.network.hidden`.
        value: Its value as the command line takes it; None for a section.
        comment: What stands behind it.
    """

    key: str
    value: str | None
    comment: str


def main(argv: list[str] | None = None) -> int:
    """Write the page, or compare it."""
    check = parse(argv).check
    page = build()
    if not check:
        PAGE.write_text(page, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page:
        print("docs/config.md is stale. Try python docs/build_config.py", file=sys.stderr)
        return 1
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="build_config", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the page with cfg/, and write nothing")
    return parser.parse_args(argv)


def build() -> str:
    """The page."""
    every = settings(CFG / "config.yaml")
    sections = {name: [s for s in every if s.key.startswith(f"{name}.")] for name in ("env", "eval", "task")}
    run = [s for s in every if "." not in s.key and s.value is not None]
    parts = [HEAD, "## The run\n", table(run)]
    parts += ["## `recipe`\n", "".join(f"- `recipe={n}`: {head(CFG / 'recipe' / f'{n}.yaml')}" for n in RECIPES)]
    parts.append(table([replace(s, value="auto") for s in settings(CFG / "recipe" / "auto.yaml")]))
    parts.append(
        "## Algorithms\n\n`algo=<name>` chooses a yaml of cfg/algo; [algorithms.md](algorithms.md) describes them.\n"
    )
    parts.append(table([s for s in settings(CFG / "algo" / "ppo.yaml") if s.key.startswith("algo.")]))
    taken = {name: shared(CFG / "algo" / f"{name}.yaml") for name in ALGORITHMS}
    for file in sorted({file for files in taken.values() for file in files}, reverse=True):
        owners = [f"`{name}`" for name, files in taken.items() if file in files]
        parts += [f"### In the sections {', '.join(owners)}\n", table(settings(file))]
    for name in ALGORITHMS:
        parts += [f"### `algo={name}`\n", head(CFG / "algo" / f"{name}.yaml"), table(algorithm(name))]
    for file in sorted(set((CFG / "algo").glob("*.yaml")) - {CFG / "algo" / f"{name}.yaml" for name in ALGORITHMS}):
        changed = " ".join(f"{s.key}={s.value}" for s in settings(file) if s.value is not None)
        parts += [f"### `algo={file.stem}`\n", head(file), f"```text\n{changed}\n```\n"]
    for group, complete in GROUPS.items():
        files = sorted((CFG / group).glob("*.yaml"))
        parts += [f"## `{group}`\n", "".join(f"- `{group}={file.stem}`: {head(file)}" for file in files)]
        parts.append(table(settings(CFG / group / f"{complete}.yaml", f"{group}.")))
    for name in ("env", "eval"):
        [comment] = [s.comment for s in every if s.key == name]
        parts += [f"## `{name}`\n", f"{prose(comment[0].upper() + comment[1:])}.\n", table(sections[name])]
    parts.append("## `task`\n\nSettings of every task; values stand in the task's yaml, next to its own settings.\n")
    parts += [table(shared_task_settings()), "A task's yaml may leave these out:\n", table(sections["task"])]
    return "\n".join(parts)


def algorithm(name: str) -> list[Setting]:
    """The settings in an algorithm's own yaml; for a value that differs from the shared one, with its meaning."""
    file = CFG / "algo" / f"{name}.yaml"
    meanings = {s.key: s.comment for other in reversed(shared(file)) for s in settings(other, f"{name}.")}
    own = [s for s in settings(file) if s.key.startswith(f"{name}.")]
    return [replace(s, comment=s.comment or meanings[s.key]) for s in own]


def shared(file: Path) -> list[Path]:
    """The files of cfg/learn whose values a yaml file takes in by its `defaults`, and those that they take in."""
    defaults = yaml.safe_load(file.read_text(encoding="utf-8")).get("defaults", [])
    files = [CFG / "learn" / f"{re.sub('^/learn/|@.*', '', name)}.yaml" for name in defaults if name != "_self_"]
    return [*files, *(other for found in files for other in shared(found))]


def head(file: Path) -> str:
    """The comment at the top of a yaml file, as a line of the page."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.lstrip("# "))
    return prose(" ".join(lines)) + "\n"


def settings(file: Path, prefix: str = "") -> list[Setting]:
    """The keys of a yaml file in their order, sections before what is in them.

    Args:
        file: The file.
        prefix: What stands in front of each key, such as `sim.`.
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


def table(rows: list[Setting]) -> str:
    """A table of settings; a section stands in it where it has a meaning."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{row.key}` | {f'`{row.value}`' if row.value else ''} | {prose(row.comment)} |"
        for row in rows
        if row.value is not None or row.comment
    ]
    return "\n".join([*lines, ""])


def prose(comment: str) -> str:
    """A comment as Markdown: choices between commas, documents as links."""
    text = comment.replace(" | ", ", ").replace("<", "&lt;")
    return re.sub(r"docs/((\w+\.md)(#[\w-]+)?)", r"[\2](\1)", text)


def shared_task_settings() -> list[Setting]:
    """The settings of `TaskConfig` that each task's yaml has, with their docstrings."""
    tree = ast.parse((ROOT / "gpusim_rl" / "env" / "task.py").read_text(encoding="utf-8"))
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TaskConfig"]
    found = [Setting("task._target_", "", "class of the task")]
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and field.value is None and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name) and isinstance(text.value, ast.Constant)
            meaning = " ".join(str(text.value.value).split()).removesuffix(".")
            found.append(Setting(f"task.{field.target.id}", "", meaning[0].lower() + meaning[1:]))
    return found


if __name__ == "__main__":
    sys.exit(main())
