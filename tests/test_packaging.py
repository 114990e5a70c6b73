"""Editable install, wheel and sdist: commands, contents, metadata. All other tests run in the checkout."""

from __future__ import annotations

import email
import json
import re
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import tomllib

import gpusim_rl
from gpusim_rl.connect import LIBRARIES
from helpers.commands import run_command
from helpers.library_python import VERSIONS, bare_environment, pip


def copy_checkout(checkout: Path, folder: Path) -> Path:
    """Copy the checkout without ignored files."""
    ignored = shutil.ignore_patterns(*("__pycache__", ".*", "runs", "wandb", "outputs", "build", "dist", "*.egg-info"))
    return shutil.copytree(checkout, folder, ignore=ignored)


def environment_without_package(folder: Path) -> Path:
    """Create a virtual environment with all packages of this one except gpusim_rl."""
    venv.create(folder, with_pip=False, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # A plain path: .pth files in it (an editable gpusim_rl) are not processed.
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    """Install without network and without building anything but gpusim_rl."""
    run_command(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"),
        *("--no-deps", "--no-build-isolation", "--force-reinstall", *what),
        cwd=python.parent,
    )


@pytest.fixture(scope="module")
def editable(checkout, tmp_path_factory) -> tuple[Path, Path]:
    """Python of an environment with an editable install, and its checkout."""
    folder = tmp_path_factory.mktemp("editable")
    source = copy_checkout(checkout, folder / "source")
    python = environment_without_package(folder / "venv")
    install(python, "-e", source)
    return python, source


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> tuple[Path, Path]:
    """Python of an environment with the wheel installed, and the wheel (next to the sdist)."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_checkout(checkout, folder / "source")
    python = environment_without_package(folder / "venv")
    run_command(*(sys.executable, "-m", "hatchling", "build", "-d", folder / "dist"), cwd=source)
    [file] = (folder / "dist").glob("*.whl")
    shutil.rmtree(source)
    install(python, file)
    return python, file


# .ci/run and the README use the editable install, on which all other tests run.
MODES = pytest.mark.parametrize("mode", [pytest.param("editable", marks=pytest.mark.slow), "wheel"])


@MODES
def test_installed_command_trains_and_rejects_a_typo(mode, request, command, tmp_path):
    python, _ = request.getfixturevalue(mode)
    train = (python.parent / "gpusim-rl", "train")
    done = command(*train, "task=Antt", check=False)
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert done.stderr.startswith("error: ") and "'Ant'?" in done.stderr
    command(*train, "task=Ant", "debug=smoke", "device=cpu", timeout_s=280)
    run_dir = (tmp_path / "runs" / "Ant" / "latest").resolve()
    assert (run_dir / "checkpoints" / "last.pt").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


@MODES
def test_installed_command_lists_tasks_and_tools(mode, request, command, checkout):
    python, _ = request.getfixturevalue(mode)
    program = python.parent / "gpusim-rl"
    rows = json.loads(command(program, "list", "--json", "--no-sizes").stdout)
    ours = {file.stem for file in (checkout / "cfg" / "task").glob("*.yaml")}
    libraries = {"Gymnasium", "IsaacLab", "MjLab"}  # third-party envs
    assert {row["name"] for row in rows} == ours - libraries
    usage = command(program, "--help").stdout
    for file in [checkout / "train.py", *(checkout / "tools").glob("[a-z]*.py")]:
        assert f"  {file.stem.replace('_', '-')} " in usage
    assert command(program, "--version").stdout == f"gpusim-rl {gpusim_rl.__version__}\n"


@pytest.mark.slow
def test_editable_install_picks_up_edits(editable, command):
    python, source = editable
    code = "import gpusim_rl.tasks.cartpole as task; print(task.__file__, hasattr(task, 'MARK'))"
    file = source / "tasks" / "cartpole.py"
    assert command(python, "-c", code).stdout.split() == [str(file), "False"]
    file.write_text(file.read_text() + "\nMARK = 1\n")
    assert command(python, "-c", code).stdout.split() == [str(file), "True"]

    yaml = source / "cfg" / "task" / "Cartpole.yaml"
    yaml.write_text(yaml.read_text().replace("num_envs: 512", "num_envs: 513"))
    shown = command(python.parent / "gpusim-rl", "train", "--cfg", "job").stdout
    assert "num_envs: 513" in shown


def test_wheel_holds_one_package_with_all_files(wheel, checkout):
    _, file = wheel
    names = zipfile.ZipFile(file).namelist()
    info = f"gpusim_rl-{gpusim_rl.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"gpusim_rl", info}
    for folder in ("cfg", "tasks", "tools"):
        for path in (checkout / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"gpusim_rl/{path.relative_to(checkout)}" in names
    assert {"gpusim_rl/py.typed", "gpusim_rl/tools/train.py"} <= set(names)
    for part in ("walk.html", "draw.js", "robot.js", "walk.js", "LICENSE.mujoco"):
        assert f"gpusim_rl/deployed/page/{part}" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_sdist_holds_sources_and_documents(wheel):
    _, file = wheel
    [sdist] = file.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2]: member.size for member in archive if member.isfile()}
    expected = {"gpusim_rl", "cfg", "tasks", "tools", "docs", "deploy", "benchmarks", "train.py", "hatch_build.py"}
    expected |= {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "PKG-INFO"}
    assert {name.split("/")[0] for name in files} - {".gitignore"} == expected
    assert [name for name in files if name.startswith("benchmarks/")] == ["benchmarks/learn/best.json"]
    assert [name for name, size in files.items() if size > 2**20 or "__pycache__" in name] == []


def test_wheel_includes_licences_of_all_models(wheel, checkout):
    _, file = wheel
    names = zipfile.ZipFile(file).namelist()
    licences = [path.relative_to(checkout) for path in (checkout / "tasks" / "assets").glob("*/LICENSE")]
    folders = [path for path in (checkout / "tasks" / "assets").iterdir() if path.is_dir() and path.name != "motions"]
    assert len(licences) == len(folders) >= 4, "a robot folder has no licence"
    for licence in ("LICENSE", *licences):
        assert f"gpusim_rl-{gpusim_rl.__version__}.dist-info/licenses/{licence}" in names


def test_named_extras_exist(checkout):
    extras = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [path for folder in ("gpusim_rl", "tools", "docs") for path in (checkout / folder).rglob("*.[pm][yd]")]
    text = "\n".join(path.read_text() for path in [*files, checkout / "README.md", checkout / "CONTRIBUTING.md"])
    listed = re.findall(r"(?:gpusim-rl|install -e \"\.|install \"\.)\[([\w,-]+)\]", text)
    named = {*re.findall(r'import_extra\([^,()]+, "([\w-]+)"', text), *",".join(listed).split(",")}
    assert {"view", "robots", "encoders", "test"} < named <= set(extras)
    assert len(extras.keys() - {"docs", "test"}) <= 11
    asked_for = {requirement for _, requirement in LIBRARIES.values()}
    assert asked_for <= set(extras["test"]), "the test extra lacks a version of an adapter"


def test_pypi_page_is_the_readme_with_release_links(wheel, checkout):
    _, file = wheel
    with zipfile.ZipFile(file) as archive:
        metadata = archive.read(f"gpusim_rl-{gpusim_rl.__version__}.dist-info/METADATA").decode()
    message = email.message_from_string(metadata)
    assert message["Description-Content-Type"] == "text/markdown"
    page, readme = message.get_payload(), (checkout / "README.md").read_text()
    host, tag = "https://github.com/gpusim-rl/gpusim_rl", f"v{gpusim_rl.__version__}"
    links, targets = ([*re.finditer(r"(!?)\[[^\]]*\]\(([^)]+)\)", text)] for text in (page, readme))
    assert len(links) == len(targets) > 20
    for link, target in zip(links, targets, strict=True):
        assert link[2] == f"{host}/{'raw' if link[1] else 'blob'}/{tag}/{target[2]}"
        assert (checkout / target[2].partition("#")[0]).is_file()
    assert page.replace(f"{host}/raw/{tag}/", "").replace(f"{host}/blob/{tag}/", "").strip() == readme.strip()


def test_wheel_uses_its_installed_files(wheel, command):
    python, _ = wheel
    find = "from importlib.util import find_spec; file = find_spec('gpusim_rl.tasks.ant').origin"
    code = f"{find}; from gpusim_rl.files.paths import checkout; print(file, checkout())"  # imports no torch
    file, checkout = command(python, "-c", code).stdout.split()
    assert Path(file).is_relative_to(python.parent.parent)
    assert checkout == "None"


def test_extra_names_are_normalized(wheel):
    """pip 23.2 looks up extras by their normalised names (PEP 685), with hyphens, and ignores others."""
    _, file = wheel
    with zipfile.ZipFile(file) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(metadata).decode().splitlines()
    extras = [line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")]
    assert {"view", "robots"} <= set(extras)
    assert [name for name in extras if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []
    used = [part for line in lines if "extra ==" in line for part in re.findall(r"extra == ['\"]([^'\"]+)", line)]
    assert set(used) <= set(extras), "a condition names an unknown extra"


@pytest.mark.slow
@pytest.mark.parametrize(
    "library, mujoco", [(None, "4."), ("isaaclab", "3.12."), ("mjlab", "3.11.")], ids=["bare", "isaaclab", "mjlab"]
)
def test_pip_resolves_with_other_libraries(library, mujoco, checkout, tmp_path):
    """Isaac Lab and mjlab pin an older MuJoCo than our simulators need."""
    python, report = bare_environment(tmp_path / "venv"), tmp_path / "report.json"
    more = [VERSIONS[library]] if library else []
    us = str(copy_checkout(checkout, tmp_path / "us"))
    pip(python, "install", "--dry-run", "--quiet", "--report", str(report), us, *more)
    found = {row["metadata"]["name"]: row["metadata"]["version"] for row in json.loads(report.read_text())["install"]}
    assert set(found) >= {"gpusim-rl", "torch", *([library] if library else [])}
    assert found["mujoco"].startswith(mujoco)
    assert found["mujoco-warp"].startswith(mujoco)
