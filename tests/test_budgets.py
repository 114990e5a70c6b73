"""Line budgets by capability.

A budget rises only if another falls by as much, or for an entirely new capability.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest

from gpusim_rl.learn.algorithm import Algorithm, EnvSpec, load_algorithm_class
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
    "make_policy",
}


CORE = "core: physics, MDP, learning, loop, settings, files"
CAPABILITIES: dict[str, tuple[int | str, ...]] = {
    "Newton": (602, "sim/newton*"),
    "robot files": (1_247, "sim/urdf", "sim/robot_*", "sim/mesh_file", "sim/menagerie", "sim/legged"),
    "scaffold": (396, "connect/task_text", "connect/isaacgymenvs"),
    "looks": (225, "view/looks"),
    "viewer and report": (2_624, "view/*", "learned"),
    "other libraries": (2_129, "connect/*"),
    "actors": (
        1_592,
        *("distributed/actor*", "distributed/*engine", "distributed/ray_cluster", "distributed/rollouts"),
        *("distributed/inference", "distributed/shared_memory", "learn/remote"),
    ),
    "motion and imitation": (
        1_445,
        *("env/clip", "env/robot_clip", "env/motions"),
        *("learn/style", "learn/demonstrations", "learn/supervised", "learn/teacher"),
    ),
    "vision": (
        1_534,
        *("images", "sim/camera*", "env/image_noise", "env/encoded_env"),
        *("learn/encoders", "learn/pretrained", "learn/vae", "learn/pixel_replay"),
    ),
    "logging": (
        1_583,
        *("run/console", "run/logger", "run/writers", "run/metrics"),
        *("run/log_interval", "run/reporter", "run/system"),
    ),
    "identification": (1_324, "identify/*", "sim/drives"),
    "randomisation": (1_225, "env/randomize", "env/properties", "env/draws", "env/pushes", "sim/params"),
    "export": (1_337, "export/*"),
    "measurable terms": (60, "testing/measurable"),
    "stress": (760, "deployed/__init__", "deployed/walkers", "deployed/variants", "deployed/stress"),
    "exports in viewers and reports": (141, "deployed/exported*"),
    "C source": (348, "deployed/c_source"),
    "share": (199, "deployed/share", "deployed/browser_mujoco"),
    "adopt": (1_091, "deployed/adopt", "deployed/contract*", "deployed/network_file"),
    "search": (875, "distributed/*search", "distributed/tuning", "distributed/pbt", "distributed/trial_run"),
    "symmetry and RND": (
        699,
        *("learn/symmetry", "learn/rnd", "env/mirrors", "sim/mirror_image", "testing/mirror_check"),
    ),
    "graph watch": (93, "run/capture_watch"),
    "compilation in the background": (146, "run/background_compile"),
    "critic ensembles": (126, "learn/ensemble"),
    "fused kernels": (175, "sim/fused*"),
    "physics settings": (156, "diagnose/physics_settings"),
    "doctor": (1_595, "diagnose/*"),
    CORE: (19_594,),
}
"""Line budget and file patterns of each capability; the first matching row owns a file."""
FOLDERS = {"tasks": 5_084, "tools": 4_296, "tests": 53_865, "benchmarks": 8_849}


def lines_of(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def words_of(page: str) -> int:
    return len((ROOT / page).read_text(encoding="utf-8").split())


def capability_of(path: Path) -> str:
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return next((c for c, (_, *patterns) in CAPABILITIES.items() if any(fnmatch(name, p) for p in patterns)), CORE)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_capability_stays_within_its_line_budget(capability):
    most, *patterns = CAPABILITIES[capability]
    assert lines_of(*(path for path in FILES if capability_of(path) == capability)) <= most
    names = [path.relative_to(PACKAGE).with_suffix("").as_posix() for path in FILES]
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)] == []


@pytest.mark.parametrize(("folder", "most"), FOLDERS.items())
def test_folder_stays_within_its_line_budget(folder, most):
    assert lines_of(*(ROOT / folder).rglob("*.py")) <= most


def test_commands_on_exports_of_any_origin_stay_short():
    tools = [ROOT / "tools" / f"{name}.py" for name in ("stress", "share", "adopt")]
    files = [PACKAGE / "testing" / "measurable.py", *(PACKAGE / "deployed").glob("*.py")]
    files.remove(PACKAGE / "deployed" / "c_source.py")
    assert lines_of(*files, *tools) <= 2_552


def test_benchmarks_folder_has_only_bench_and_readme():
    folder = ROOT / "benchmarks"
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"README.md", "bench.py"}


def test_no_subpackage_exceeds_a_fifth_of_the_code():
    lines = Counter({path.name: lines_of(*path.rglob("*.py")) for path in PACKAGE.iterdir() if path.is_dir()})
    [(largest, number)] = lines.most_common(1)
    assert number <= 0.2 * lines_of(*FILES), f"{largest} has {number} lines"


@pytest.mark.parametrize(
    "paths, most",
    [
        (["run/trainer.py"], 255),
        (["env/vec_env.py"], 370),
        (["sim/newton.py", "sim/newton_model.py", "sim/newton_check.py", "sim/newton_xml.py"], 620),
        (HOT_PATH, 1_400),
    ],
    ids=["trainer", "vec_env", "newton", "hot path"],
)
def test_core_files_stay_short(paths, most):
    assert lines_of(*(PACKAGE / path for path in paths)) <= most


def test_algorithm_interface_has_no_further_members():
    members = {*vars(Algorithm), *Algorithm.__annotations__}
    assert {name for name in members if not name.startswith("_")} - {"Config"} == SEAM  # Config: type of the settings


def test_env_spec_has_at_most_ten_fields():
    assert len(dataclasses.fields(EnvSpec)) <= 10


def imported(path: Path) -> set[str]:
    """Return the modules of the package that a file imports."""
    froms = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)]
    ours = [
        (node.module, name.name) for node in froms for name in node.names if (node.module or "").startswith("gpusim_rl")
    ]
    return {f"{m}.{n}" if (ROOT / m.replace(".", "/") / f"{n}.py").is_file() else m for m, n in ours if m is not None}


def test_no_module_imports_more_than_sixteen_others():
    assert {path.name: len(imported(path)) for path in FILES if len(imported(path)) > 16} == {}


def test_no_function_is_longer_than_sixty_lines():
    functions = [
        (path.name, node.name, (node.end_lineno or 0) - node.lineno + 1)
        for path in [*FILES, *(ROOT / "tasks").glob("*.py")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [function for function in functions if function[2] > 60] == []


def names_of_classes() -> Counter[str]:
    paths = [*FILES, *(ROOT / "tasks").glob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    found = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return Counter(name for name in found if not name.startswith("_"))


def test_class_and_file_names_are_unique():
    assert {name for name, number in names_of_classes().items() if number > 1} == set()
    files = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert {name for name, number in files.items() if number > 1} == set()


def test_front_documents_stay_short():
    assert words_of("README.md") <= 400
    assert words_of("docs/architecture.md") <= 1_200
    pages = [page for kind in ("*.md", "reference/*.rst") for page in (ROOT / "docs").glob(kind)]
    assert sum(words_of(str(page)) for page in pages) <= 34_037
    assert lines_of(ROOT / "CHANGELOG.md") <= 80


def test_argument_docs_are_noun_phrases():
    """`seed: Seed of the action noise.`, not `seed: Of the actions.`."""
    headless = re.compile(
        r"^ {8,}\w+: (Of|In|For|With|From|As|To|On|At|By|Beside|Behind|Where|Whether it) ", re.MULTILINE
    )
    assert [path.name for path in FILES if headless.search(path.read_text(encoding="utf-8"))] == []


def lines_of_methods(cls: type, *names: str) -> int:
    return sum(len(inspect.getsource(getattr(cls, name)).splitlines()) for name in names)


def test_on_policy_algorithms_stay_short():
    methods = [name for name, member in vars(OnPolicy).items() if inspect.isfunction(member)]
    assert len(methods) <= 20
    assert lines_of_methods(PPO, "update") <= 45 and lines_of_methods(PPO, "update", "sample_losses") <= 70
    classes = [load_algorithm_class(target) for target, _ in ALGORITHMS.values()]
    assert max(cls.__mro__.index(Algorithm) for cls in classes) <= 2
