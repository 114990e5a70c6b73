"""Budgets of size. A number here goes up only in a commit that says what it is needed for."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from gpusim_rl.learn.algorithm import Algorithm, load_algorithm_class
from gpusim_rl.learn.on_policy import OnPolicy
from gpusim_rl.learn.ppo import PPO
from gpusim_rl.settings.schema import ALGORITHMS
from helpers.commands import ROOT

PACKAGE = ROOT / "gpusim_rl"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "tasks" not in path.relative_to(PACKAGE).parts)
HOT_PATH = (
    "env/vec_env.py",
    "learn/rollout.py",
    "learn/on_policy.py",
    "learn/ppo.py",
    "run/collector.py",
    "run/trainer.py",
)
SEAM = {
    "horizon",
    "policy",
    "begin_rollout",
    "act",
    "record",
    "before_update",
    "update",
    "describe",
    "state_dict",
    "load_state_dict",
}


def lines_of(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def words_of(page: str) -> int:
    return len((ROOT / page).read_text(encoding="utf-8").split())


def test_the_package_does_not_grow():
    assert lines_of(*FILES) <= 43_731


def test_benchmarks_are_instruments_in_folders():
    """A script that answers one question is not kept: its json names the commit."""
    folder = ROOT / "benchmarks"
    assert lines_of(*folder.rglob("*.py")) <= 8_620
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"README.md", "bench.py"}


def test_no_package_is_more_than_a_fifth_of_it():
    lines = Counter({path.name: lines_of(*path.rglob("*.py")) for path in PACKAGE.iterdir() if path.is_dir()})
    [(largest, number)] = lines.most_common(1)
    assert number <= 0.2 * lines_of(*FILES), f"{largest} has {number} lines"


@pytest.mark.parametrize(
    "paths, most",
    [
        (["run/trainer.py"], 330),
        (["env/vec_env.py"], 450),
        (["sim/newton.py", "sim/newton_model.py", "sim/newton_check.py", "sim/newton_xml.py"], 685),
        (HOT_PATH, 1_738),
    ],
    ids=["trainer", "vec_env", "newton", "hot path"],
)
def test_files_that_everybody_reads_stay_short(paths, most):
    assert lines_of(*(PACKAGE / path for path in paths)) <= most


def test_an_algorithm_has_ten_members():
    """`Config` is the type of its settings: it is needed before there is an algorithm."""
    members = {*vars(Algorithm), *Algorithm.__annotations__}
    assert {name for name in members if not name.startswith("_")} - {"Config"} == SEAM


def names_of_classes() -> Counter[str]:
    paths = [*FILES, *(ROOT / "tasks").glob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    found = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return Counter(name for name in found if not name.startswith("_"))


def test_no_class_name_and_no_file_name_stands_twice():
    assert {name for name, number in names_of_classes().items() if number > 1} == set()
    files = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert {name for name, number in files.items() if number > 1} == set()


def test_documents_at_the_front_stay_short():
    assert words_of("README.md") <= 600
    assert words_of("docs/architecture.md") <= 2_000
    assert lines_of(ROOT / "CHANGELOG.md") <= 80


def test_arguments_are_documented_by_a_noun_phrase():
    """`seed: Seed of the action noise.`, not `seed: Of the actions.`."""
    headless = re.compile(
        r"^ {8,}\w+: (Of|In|For|With|From|As|To|On|At|By|Beside|Behind|Where|Whether it) ", re.MULTILINE
    )
    assert [path.name for path in FILES if headless.search(path.read_text(encoding="utf-8"))] == []


def lines_of_methods(cls: type, *names: str) -> int:
    return sum(len(inspect.getsource(getattr(cls, name)).splitlines()) for name in names)


def test_rollout_algorithms_stay_readable():
    """PPO's update and loss are read from top to bottom; what is added to them are extensions."""
    methods = [name for name, member in vars(OnPolicy).items() if inspect.isfunction(member)]
    assert len(methods) <= 20
    assert lines_of_methods(PPO, "update") <= 45 and lines_of_methods(PPO, "update", "sample_losses") <= 70
    classes = [load_algorithm_class(target) for target, _ in ALGORITHMS.values()]
    assert max(cls.__mro__.index(Algorithm) for cls in classes) <= 2
