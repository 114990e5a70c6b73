"""Command line: start-up time, one-line errors, completion, runs, sweeps and the Python API."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gpusim_rl import cli
from gpusim_rl.api import prepare
from gpusim_rl.errors import ConfigError
from gpusim_rl.files import paths
from gpusim_rl.options import ORDER
from gpusim_rl.settings.checks import known_keys
from gpusim_rl.settings.compose import compose
from gpusim_rl.settings.discover import read_yaml, tasks
from helpers.commands import ROOT

HEAVY = re.compile(r"\| +(torch|warp|mujoco|mujoco_warp|newton|wandb)\b")


BAD_OVERRIDES = [
    ("task=Antt", "unknown task 'Antt'. Did you mean 'Ant'? Available: AllegroHand, Ant, "),
    ("num_env=64", "unknown key 'num_env'. Did you mean 'num_envs'?"),
    ("+num_envs=64", "'num_envs' already has a value. Try num_envs=64 without +"),
    ("+ppo.horizn=3", "unknown key 'ppo.horizn'. Did you mean 'ppo.horizon'?"),
    ("algo=sac learning_rate=1", "unknown key 'learning_rate'. Did you mean 'sac.learning_rate'?"),
    ("task.physic_hz=60", "unknown key 'task.physic_hz'. Did you mean 'task.physics_hz'?"),
    ("xyzzy=1", "unknown key 'xyzzy'. Try python train.py --help"),
    ("capture_video_len=100", "unknown key 'capture_video_len'. Try gpusim-rl record <run folder> --steps"),
    ("task.sim.dt=0.01", "unknown key 'task.sim.dt'. Try task.physics_hz"),
    ("ppo.xyzzy=1", "unknown key 'ppo.xyzzy'. Keys of ppo: horizon, learning_rate, "),
    ("~num_envs", "missing key 'num_envs'"),
    ("~task", "no task selected. Try task=Cartpole"),
    ("num_envs=8 ppo.gamma =0.9", "cannot read 'ppo.gamma': remove the spaces around =. Try ppo.gamma=0.9"),
    ("sac.alpha=0.1", "sac.alpha has no effect with algo=ppo"),
    ("algo=sac ppo.gamma=0.9", "ppo.gamma has no effect with algo=sac"),
    ("task=Nope", "unknown task 'Nope'. Try -cd"),
    ("task=null", "task=null: expected a name"),
    ("num_envs=abc", "num_envs: expected a positive int, got 'abc'"),
    ("Ant", "cannot read 'Ant': expected key=value. Did you mean 'task=Ant'?"),
    ("ppo.tau=0.95", "unknown key 'ppo.tau'. Did you mean 'ppo.gae_lambda'?"),
    ("num_envs=[1", "cannot read 'num_envs=[1': expected key=value"),
    ("ppo.network.hidden=[256, 128]", "cannot read '128]': remove the spaces from the list, or quote it"),
    ("num_envs=${nothing}", "num_envs: Interpolation key 'nothing' not found"),
    ("hydra.run.dir=???", "hydra.run.dir: expected a value, got ???"),
    ("hydra.run.dir=/proc/x", "[Errno 2] No such file or directory: '/proc/x'"),
    ("ppo=default", "ppo: expected a section with keys, got 'default'. Try ppo.<key>=<value>, or algo=ppo"),
    ("algo=pppo", "unknown algo 'pppo'. Did you mean 'ppo'? Available: a2c, amp, apex, "),
    ("task=Ant,Cartpole", "task=Ant,Cartpole: several values require -m"),
    ("checkpoint=", "checkpoint: expected a run folder, a .pt file or a trained task, got ''"),
    ("checkpoint=Ant", "no checkpoint 'Ant'"),
    ("--task Ant", "unrecognized arguments: --task. Settings are written without dashes: task"),
    ("-cd nowhere task=Ant", "-cd nowhere: no such folder"),
    ("-m task=Cartpole,Antt", "unknown task 'Antt'. Did you mean 'Ant'?"),
]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [pytest.param(*row, marks=() if number % 2 == 0 else pytest.mark.slow) for number, row in enumerate(BAD_OVERRIDES)],
)
def test_bad_override_is_rejected_and_leaves_no_files(train_here, tmp_path, arguments, line):
    done = train_here(*arguments.split())
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {line}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


BAD_HYDRA_SETTINGS = {
    "hydra.verbose=[1]": "Hydra cannot use hydra.verbose=[1]: A logger name must be a string",
    "hydra.run.dir=[1]": "",  # no effect: max_iterations is rejected instead
    "hydra.callbacks={a:{_target_:3}}": "",
    "hydra/launcher=x": "",
    "-m hydra.launcher={_target_:3} seed=1,2": "",
}


@pytest.mark.parametrize("arguments", BAD_HYDRA_SETTINGS)
def test_bad_hydra_setting_is_rejected_in_one_line(train_here, arguments):
    done = train_here(*arguments.split(), "max_iterations=0")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"error: {BAD_HYDRA_SETTINGS[arguments]}"), done.stderr


@pytest.mark.parametrize("arguments", ["--help", "task=Antt", "-m seed=1,2 num_envs=abc"])
def test_help_and_typo_answer_quickly(train_cli, arguments):
    assert train_cli(*arguments.split(), check=False, cold=True).cpu_s < 1.5


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("task.control_hz=abc", "task.control_hz: expected"),
        ("+task.physic_hz=60", "unknown key 'task.physic_hz'"),
        ("task.control_hz=77", "task.physics_hz"),
        ("task._target_=os.getcwd", "task._target_=os.getcwd: expected"),
        ("task._target_=no_such.Hopper", "task._target_=no_such.Hopper: no module named 'no_such'"),
    ],
)
def test_bad_task_setting_is_rejected_and_leaves_no_files(train_here, tmp_path, arguments, line):
    done = train_here(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {line}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_bug_in_task_file_shows_traceback_without_hydra(train_here, tmp_path):
    (tmp_path / "my_cfg" / "task").mkdir(parents=True)
    (tmp_path / "my_cfg" / "task" / "Juggler.yaml").write_text(
        "# @package _global_\ntask: {_target_: juggler_with_bug.Juggler}\n"
    )
    (tmp_path / "juggler_with_bug.py").write_text("speed = 1 / 0\n")
    done = train_here("-cd", "my_cfg", "task=Juggler")
    assert done.returncode == 1
    assert "juggler_with_bug.py" in done.stderr and "ZeroDivisionError" in done.stderr
    assert "hydra/" not in done.stderr


def test_broken_yaml_names_file_and_line(train_here, tmp_path):
    (tmp_path / "my_cfg" / "task").mkdir(parents=True)
    (tmp_path / "my_cfg" / "task" / "Juggler.yaml").write_text("# @package _global_\ntask:\n  a: 1\n b: [\n")
    done = train_here("-cd", "my_cfg", "task=Juggler")
    assert done.returncode == 2
    assert re.match(r"error: .*Juggler\.yaml.* line \d", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def broken_config_dir(tmp_path) -> Path:
    """Folder for -cd with one valid task and several broken ones."""
    folder = tmp_path / "my_cfg" / "task"
    folder.mkdir(parents=True)
    head = "# @package _global_\n"
    (folder / "Small.yaml").write_text(f"# Fewer ants.\n{head}defaults: [Ant]\nnum_envs: 8\n")
    (folder / "Pendulum.yaml").write_text(f"{head}defaults: [Pendulum]\nnum_envs: 8\n")
    (folder / "Hen.yaml").write_text(f"{head}defaults: [Egg, _self_]\n")
    (folder / "Egg.yaml").write_text(f"{head}defaults: [Hen]\n")
    (folder / "Lost.yaml").write_text("task: {_target_: gpusim_rl.tasks.ant.Ant}\nnum_envs: 8\n")
    (folder / "Torn.yaml").write_text(f"{head}task: [\n")
    return tmp_path / "my_cfg"


BROKEN = [
    ("Pendulum", "Pendulum.yaml includes itself (defaults: [Pendulum]). Try another file name, e.g. MyPendulum.yaml"),
    ("Hen", "Hen.yaml includes itself (defaults: [Hen], through Hen, Egg)"),
    ("Lost", "Lost.yaml: the first line must be '# @package _global_'"),
    ("Torn", "Torn.yaml line 3: not valid yaml: "),
]


@pytest.mark.parametrize(("name", "words"), BROKEN)
def test_yaml_that_cannot_be_composed_is_rejected(train_here, broken_config_dir, tmp_path, name, words):
    done = train_here("-cd", "my_cfg", f"task={name}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and f"/{words}" in done.stderr and done.stderr.count("\n") == 1
    with pytest.raises(ConfigError) as info:
        compose([f"task={name}"], broken_config_dir)
    assert f"/{words}" in str(info.value) and "\n" not in str(info.value)
    assert [path.name for path in tmp_path.iterdir()] == ["my_cfg"]


def test_list_skips_broken_tasks_with_a_warning(broken_config_dir, capsys):
    cli.main(["list", "--json", "--no-sizes", "-cd", str(broken_config_dir)])
    printed = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(printed.out)}
    assert set(rows) == {"Small", *tasks()} - {"Pendulum"}
    assert rows["Small"]["description"] == rows["Ant"]["description"] != ""
    warnings = printed.err.splitlines()
    assert len(warnings) == 5 and all(line.startswith("warning: skipped ") for line in warnings)
    assert all(any(words in line for line in warnings) for _, words in BROKEN)


def test_missing_or_conflicting_config_dir_is_rejected(train_here, broken_config_dir, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for call in (lambda folder: compose(["task=Ant"], folder), tasks, lambda folder: cli.main(["list", "-cd", folder])):
        with pytest.raises((ConfigError, SystemExit)):
            call("nowhere")
    with pytest.raises(ConfigError, match=r"-cd my_cgf: .* Did you mean 'my_cfg'\?"):
        compose(["task=Ant"], "my_cgf")
    (broken_config_dir / "config.yaml").write_text("num_envs: 3\n")
    with pytest.raises(ConfigError, match=r"my_cfg/config\.yaml would replace"):
        compose(["task=Ant"], "my_cfg")
    done = train_here("-cd", "my_cfg", "task=Ant")
    assert done.stderr.startswith("error: my_cfg/config.yaml would replace") and done.stderr.count("\n") == 1


def examples() -> list[str]:
    text = (paths.cfg_dir() / "config.yaml").read_text()
    text = text[text.index("Examples:") : text.index("Task:")]
    return re.findall(r"^        gpusim-rl train ?(.*)$", text, flags=re.MULTILINE)


def test_help_is_short_and_names_real_settings(train_here, tmp_path):
    done = train_here("--help")
    lines = done.stdout.splitlines()
    assert len(lines) <= 75
    settings = re.findall(r"^  ([\w.]+)=", done.stdout, re.MULTILINE)
    assert len(settings) == 16
    assert set(settings) <= {*known_keys(), "task", "sim", "algo"}
    choices = done.stdout.partition("\nChoices:\n")[2].partition("\n\n")[0]
    groups = re.findall(r"^  (\w+)", choices, re.MULTILINE)
    assert groups == ["actors", "algo", "debug", "log", "recipe", "sim", "task"] and "auto, cpu, full, quick" in choices
    assert "".join(choices.split()).endswith(f"task{','.join(tasks(outside=True))}")
    assert sum(line.startswith("  gpusim-rl train") for line in lines) == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", ["--help", "--cfg job --resolve task=Ant", "num_envs=abc"])
def test_help_and_composing_import_nothing_heavy(command, checkout, arguments):
    done = command(sys.executable, "-X", "importtime", checkout / "train.py", *arguments.split(), check=False)
    assert "gpusim_rl.settings.schema" in done.stderr
    assert not HEAVY.search(done.stderr)


@pytest.mark.parametrize(("typed", "expected"), [("task=An", "task=Ant"), ("task=Ant ppo.lea", "ppo.learning_rate=")])
def test_tab_completes_settings(command, checkout, typed, expected):
    line = f"train.py {typed}"
    done = command(
        sys.executable,
        *("-X", "importtime", checkout / "train.py", "-sc", "query=bash"),
        env={"COMP_LINE": line, "COMP_POINT": str(len(line))},
    )
    assert expected in done.stdout.split()
    assert not HEAVY.search(done.stderr)


@pytest.fixture
def some_runs(tmp_path) -> Path:
    """Folder with runs of Ant and of an experiment."""
    for name in ("Ant", "fast-legs"):
        run = tmp_path / "runs" / name / "2026-01-31_12-00-00"
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").write_text("")
        (run / "checkpoints" / "last.pt").write_bytes(b"")
        (run.parent / "latest").symlink_to(run.name)
    return tmp_path


RUN = "runs/Ant/2026-01-31_12-00-00/"
CHECKPOINTS = [
    ("checkpoint=", ["checkpoint=Ant ", "checkpoint=fast-legs "]),
    ("task=Ant checkpoint=An", ["checkpoint=Ant "]),
    ("checkpoint=ru", ["checkpoint=runs/"]),
    ("checkpoint=runs/Ant/2", [f"checkpoint={RUN}"]),
    (f"checkpoint={RUN}checkpoints/", [f"checkpoint={RUN}checkpoints/last.pt "]),
    ("log.dir=elsewhere checkpoint=An", []),
]


@pytest.mark.parametrize(("typed", "expected"), CHECKPOINTS)
def test_tab_completes_checkpoints(some_runs, monkeypatch, capsys, typed, expected):
    monkeypatch.chdir(some_runs)
    monkeypatch.setenv("COMP_LINE", f"gpusim-rl train {typed}")
    cli.main(["completion", "query"])
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("rec", ["record "]), ("plot runs/Ant/2", [RUN]), ("list ", []), ("train ppo.epo", ["ppo.epochs="])],
)
def test_bash_completes_commands_and_arguments(command, some_runs, typed, expected):
    bin_folder = some_runs / "bin"
    bin_folder.mkdir()
    entry_point = bin_folder / "gpusim-rl"  # as made by pip
    entry_point.write_text(f"#!{sys.executable}\nfrom gpusim_rl.cli import main\nmain()\n")
    entry_point.chmod(0o755)
    line = f"gpusim-rl {typed}"
    script = (
        f'PATH={bin_folder}:$PATH; eval "$(gpusim-rl completion bash)"\n'
        f"complete -p gpusim-rl > /dev/null; COMP_LINE='{line}ignored'; COMP_POINT={len(line)}; _gpusim_rl\n"
        r"""printf '%s\n' "${COMPREPLY[@]}" """
    )
    done = command("bash", "-c", script, cwd=some_runs, env={"PYTHONPATH": str(paths.PACKAGE.parent)})
    assert [word for word in done.stdout.split("\n") if word] == expected


@pytest.mark.parametrize(
    ("typed", "expected"), [("play comp/", "comp/fine-1.0/"), ("train checkpoint=comp/", "checkpoint=comp/fine-1.0/")]
)
def test_tab_never_offers_names_with_shell_syntax(some_runs, monkeypatch, capsys, typed, expected):
    for name in ("$(touch pwned)", "a;touch pwned", "a b", "`id`", "*", "a\x1b[2J", "fine-1.0"):
        (some_runs / "comp" / name).mkdir(parents=True)
    (some_runs / "runs" / "$(id)").mkdir()
    (some_runs / "runs" / "$(id)" / "1").mkdir()
    (some_runs / "runs" / "$(id)" / "1" / "config.yaml").touch()
    monkeypatch.chdir(some_runs)
    monkeypatch.setenv("COMP_LINE", f"gpusim-rl {typed}")
    cli.main(["completion", "query"])
    offered = capsys.readouterr().out.splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._/=+-]+ ?", word) for word in offered), offered
    assert expected in offered


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("play Ant --po", ["--policy ", "--port "]),
        ("export -", ["-h ", "--help ", "--out ", "--no-int8 ", "--trust ", "-cd ", "--config-dir "]),
        ("clip record --sk", ["--skip "]),
        ("list --no", ["--no-sizes "]),
        ("nothing --", []),
        ("play --nothing", []),
    ],
)
def test_tab_completes_flags_of_tools(tmp_path, monkeypatch, capsys, typed, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_LINE", f"gpusim-rl {typed}")
    cli.main(["completion", "query"])
    offered = capsys.readouterr()
    assert set(expected) <= set(offered.out.splitlines()) and offered.err == ""
    assert expected or not offered.out


def test_package_import_loads_nothing_heavy_and_no_signal_handler(command):
    check = "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    code = f"import signal, sys, gpusim_rl.cli, gpusim_rl.settings.schema; {check}; print(*sys.modules)"
    words = command(sys.executable, "-c", code, env={"PYTHONPATH": str(paths.PACKAGE.parent)})
    assert not {"torch", "numpy", "mujoco", "warp", "newton", "hydra", "omegaconf"} & set(words.stdout.split())


def test_cpu_training_imports_no_compiler_warp_or_wandb(command):
    run = "gpusim_rl.train('Cartpole', debug='smoke', device='cpu')"
    code = f"import gc, sys, gpusim_rl; {run}; print(gc.get_freeze_count(), *sys.modules)"
    done = command(sys.executable, "-c", code, env={"PYTHONPATH": str(paths.PACKAGE.parent)})
    unneeded = {"torch._dynamo", "torch._inductor", "sympy", "warp", "mujoco_warp", "newton", "wandb", "matplotlib"}
    uncollected, *modules = done.stdout.splitlines()[-1].split()
    assert unneeded & set(modules) == set() and int(uncollected) > 100_000


@pytest.mark.parametrize(("before", "torch"), [("enable", "raise OSError"), ("disable", "")])
def test_torch_import_keeps_garbage_collection_on_or_off(before, torch, command, tmp_path):
    (tmp_path / "torch.py").write_text(torch)
    code = f"import contextlib, gc; from gpusim_rl.machine.hardware import import_torch; gc.{before}()\n"
    code += "with contextlib.suppress(OSError): import_torch()\nprint(gc.isenabled())"
    path = os.pathsep.join([str(tmp_path), str(paths.PACKAGE.parent)])
    assert command(sys.executable, "-c", code, env={"PYTHONPATH": path}).stdout == f"{before == 'enable'}\n"


def test_torchrun_processes_limit_openmp_before_importing_torch(command, tmp_path):
    (tmp_path / "torch.py").write_text("import os; raise SystemExit(os.environ['GOMP_SPINCOUNT'])")
    environment = {"PYTHONPATH": str(tmp_path), "TORCHELASTIC_RUN_ID": "x"}
    assert command(sys.executable, ROOT / "train.py", env=environment, check=False).stderr == "10000\n"


def test_every_name_in_all_is_exported():
    import gpusim_rl

    for name in gpusim_rl.__all__:
        assert getattr(gpusim_rl, name) is not None
    assert set(gpusim_rl.__all__) <= set(dir(gpusim_rl))
    with pytest.raises(AttributeError):
        gpusim_rl.nothing  # noqa: B018


def test_list_shows_every_task(capsys, monkeypatch):
    cli.main(["list", "--json", "--no-sizes"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {file.stem for file in (paths.cfg_dir() / "task").glob("*.yaml")} - {
        *("Gymnasium", "IsaacLab", "MjLab")
    }
    assert all(row["description"] for row in rows.values())
    two = {name: tasks()[name] for name in ("Ant", "Pendulum")}
    monkeypatch.setattr("gpusim_rl.settings.discover.tasks", lambda _: two)
    cli.main(["list", "--json"])
    ant, _ = json.loads(capsys.readouterr().out)
    assert (ant["obs"], ant["act"], ant["envs"], ant["source"]) == (60, 8, 4096, "gpusim_rl")


def test_list_shows_time_to_learn(capsys, monkeypatch, tmp_path):
    hardware = {"hardware": "2 CPU cores", "threshold": 1.0, "stat": ""}
    best = {
        "Humanoid": {"result": "3,000 in 7 min", "seconds": 400.0, "overrides": [], **hardware},
        "Anymal": {"result": "3,000 in 7 min", "seconds": 400.0, "overrides": ["num_envs=512"], **hardware},
        "Cartpole": {"result": "205 of 470 in 10 min", "seconds": None, "overrides": [], **hardware},
    }
    by_recipe = {task: {"full": entry} for task, entry in best.items()}
    quick = best["Cartpole"] | {"result": "113 in 17 min", "seconds": 9.0}
    by_recipe["Go1Velocity"] = {"full": best["Cartpole"], "quick": quick}
    (tmp_path / "best.json").write_text(json.dumps(by_recipe))
    monkeypatch.setattr(paths, "learning_file", lambda: tmp_path / "best.json")
    cli.main(["list", "--json", "--no-sizes"])
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    rows = {name: (row["tuned"], row["learns"]) for name, row in listed.items()}
    assert listed["Ant"]["recipes"] == ["full", "cpu"] and listed["Go1Velocity"]["recipes"] == ["full", "quick"]
    each = "full: 205 of 470 in 10 min, 2 CPU cores; quick: 113 in 17 min, 2 CPU cores"
    assert rows["Go1Velocity"] == (True, each) and listed["Go1Velocity"]["seconds_to_threshold"] == 9.0
    assert rows["Humanoid"] == (True, "3,000 in 7 min, 2 CPU cores")
    assert rows["Anymal"] == (False, "3,000 in 7 min, 2 CPU cores")
    assert rows["Cartpole"] == (False, "205 of 470 in 10 min, 2 CPU cores")
    assert rows["Pendulum"] == (False, None)

    cli.main(["list", "--no-sizes"])
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert set(shown) == {"task", *tasks()}
    assert [shown[name].split()[2] for name in ("Humanoid", "Anymal", "Cartpole")] == ["yes", "yes*", "no"]


@pytest.mark.parametrize("width", [80, 10])
def test_narrow_list_drops_columns_but_keeps_names(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    cli.main(["list", "--no-sizes"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(tasks())
    assert all(len(line) <= max(width, 16) for line in lines)
    if width > 16:
        assert [line.split()[0] for line in lines[1:]] == list(tasks())


TASK_YAML = """\
# @package _global_
task: {_target_: plugged.juggler.Juggler}
"""


@pytest.fixture
def plugin(tmp_path) -> Path:
    """Folder with an installed package that ships a task, and one with a broken entry point."""
    site = tmp_path / "site"
    (site / "plugged" / "cfg" / "task").mkdir(parents=True)
    (site / "plugged" / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (site / "plugged" / "juggler.py").write_text('class Juggler:\n    """Keep three balls in the air."""\n')
    (site / "plugged" / "cfg" / "task" / "Juggler.yaml").write_text(TASK_YAML)
    for name, value in (("plugged-tasks", "plugged.cfg"), ("gone", "gone.cfg")):
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[gpusim_rl.cfg]\n{name} = {value}\n")
    return site


def test_installed_package_adds_tasks(command, plugin, checkout):
    env = {"PYTHONPATH": f"{plugin}:{checkout}"}
    done = command(*(sys.executable, "-m", "gpusim_rl.cli", "list", "--json", "--no-sizes"), env=env)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["Juggler"]["source"] == "plugged-tasks"
    assert rows["Juggler"]["description"] == "Keep three balls in the air."
    assert "warning: " in done.stderr and "'gone'" in done.stderr

    shown = command(sys.executable, checkout / "train.py", "--cfg", "job", "task=Juggler", env=env)
    assert "_target_: plugged.juggler.Juggler" in shown.stdout


def run_dirs(folder: Path, task: str) -> list[Path]:
    return sorted(path for path in (folder / "runs" / task).iterdir() if not path.is_symlink())


@pytest.mark.slow
def test_every_example_in_the_help_runs(train_cli, tmp_path):
    assert len(examples()) == 4
    for example in examples():
        done = train_cli(*example.split(), "debug=smoke", "max_iterations=3", "num_envs=16")
        assert done.stderr == ""
    assert len(run_dirs(tmp_path, "Cartpole")) == 4  # the first example, and the sweep over 3 seeds
    assert len(run_dirs(tmp_path, "Ant")) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_run_resumes_from_its_folder(train_here, tmp_path):
    assert train_here("task=Pendulum", "debug=smoke", "ppo.horizon=4").returncode == 0
    [folder] = run_dirs(tmp_path, "Pendulum")
    assert train_here(f"checkpoint={folder}", "max_iterations=3").returncode == 0
    assert run_dirs(tmp_path, "Pendulum") == [folder]
    rows = (folder / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == ["1", "2", "3"]
    done = train_here("checkpoint=Pendulum", "task=Ant")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "another task" in done.stderr


def test_sweep_with_an_invalid_run_does_not_start(train_here, tmp_path):
    done = train_here("-m", "debug=smoke", "seed=1,2,-7")
    assert done.returncode == 2
    assert done.stderr.startswith("error: seed: ") and done.stderr.endswith(" got -7\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_sweep_rejects_a_shared_run_folder(train_cli, tmp_path):
    train_cli("debug=smoke", "task=Cartpole")
    done = train_cli("-m", "checkpoint=Cartpole", "seed=1,2", "max_iterations=4", check=False)
    assert done.returncode == 2 and "2 runs" in done.stderr
    best = re.findall(r"Try (checkpoint=\S+/best\.pt), ", done.stderr)
    train_cli("-m", *best, "seed=1,2", "max_iterations=3")
    assert len(run_dirs(tmp_path, "Cartpole")) == 3


def test_sweep_ends_with_a_row_per_run(train_here, tmp_path):
    small = ("debug=smoke", "task=Cartpole", "task.episode_length=8", "log.console=plain")
    done = train_here("-m", *small, "seed=1,2", "ppo.horizon=16")
    *_, head, first, second = done.stdout.splitlines()
    assert re.split(r"\s{2,}", head) == ["overrides", "last return", "best return", "run"]
    for line, seed in ((first, 1), (second, 2)):
        overrides, last, _, run = line.split()
        assert overrides == f"seed={seed}"
        rows = (tmp_path / run / "metrics.csv").read_text().splitlines()
        column = rows[0].split(",").index("episode/return")
        assert float(last) == pytest.approx(float(rows[-1].split(",")[column]), rel=1e-3)
    assert "seed: 2" in (tmp_path / run / "config.yaml").read_text()
    evaluated = train_here("-m", f"checkpoint={run}", "test=true", "log.console=json", "num_envs=1,2")
    *singles, summary = map(json.loads, evaluated.stdout.splitlines())
    assert summary["event"] == "sweep"
    assert [single["return_mean"] for single in singles] == [one["last_return"] for one in summary["runs"]]
    assert [one["overrides"][-1] for one in summary["runs"]] == ["num_envs=1", "num_envs=2"]


JUGGLER = """\
from dataclasses import dataclass

from gpusim_rl.tasks.pendulum import Pendulum


class Juggler(Pendulum):
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(Pendulum.Config):
        bonus: float = 1.0
"""


@pytest.fixture
def juggler(tmp_path, checkout) -> Path:
    """Task in the user's folder: juggler.py and my_cfg/task/Juggler.yaml."""
    (tmp_path / "juggler.py").write_text(JUGGLER)
    (tmp_path / "my_cfg" / "task").mkdir(parents=True)
    text = (checkout / "cfg" / "task" / "Pendulum.yaml").read_text()
    text = text.replace("gpusim_rl.tasks.pendulum.Pendulum", "juggler.Juggler")
    (tmp_path / "my_cfg" / "task" / "Juggler.yaml").write_text(text)
    return tmp_path


def test_config_dir_adds_task_and_resume_requires_trust(train_here, juggler):
    done = train_here("-cd", "my_cfg", "task=Juggler", "debug=smoke")
    [folder] = run_dirs(juggler, "Juggler")
    offered = re.findall(r"^  (\w.*)$", done.stdout.partition("\nnext:\n")[2], re.MULTILINE)
    assert [" -cd my_cfg" in command for command in offered] == [True, True, True, False]  # plot runs no task code
    train_here("checkpoint=Juggler", "max_iterations=3", "-cd", "my_cfg")
    done = train_here("checkpoint=Juggler", "max_iterations=4", "trust=true")
    assert done.stdout.count("max_iterations=8 trust=true\n") == 1 and done.stdout.count(" --trust\n") == 2
    assert run_dirs(juggler, "Juggler") == [folder]
    done = train_here("checkpoint=Juggler", "max_iterations=5")
    assert "task._target_=juggler.Juggler would run code" in done.stderr and done.stderr.count("\n") == 1
    assert "trust=true" in done.stderr
    done = train_here("--config-dir=my_cfg", "task=Jugler")
    assert done.stderr.startswith("error: unknown task") and "'Juggler'?" in done.stderr


@pytest.mark.parametrize("group", ["task", "algo"])
def test_missing_yaml_names_the_searched_folders(juggler, monkeypatch, group):
    monkeypatch.chdir(juggler)

    def hint(config_dir: str | None) -> str:
        with pytest.raises(ConfigError, match=f"unknown {group} 'Zzz'") as info:
            compose([f"{group}=Zzz"], config_dir)
        return info.value.hint.partition(" Available: ")[0]

    assert hint("my_cfg") == f"Looked in my_cfg/{group}/ and gpusim_rl's cfg/."
    (juggler / "my_cfg" / "Zzz.yaml").write_text("{}\n")
    assert hint("my_cfg") == f"Move my_cfg/Zzz.yaml to my_cfg/{group}/."
    assert hint(None) == f"Try -cd <folder that contains {group}/Zzz.yaml>."


def test_config_dir_overrides_a_built_in_task(juggler):
    (juggler / "my_cfg" / "task" / "Juggler.yaml").rename(juggler / "my_cfg" / "task" / "Pendulum.yaml")
    assert compose(["task=Pendulum"], juggler / "my_cfg")["task"]["_target_"] == "juggler.Juggler"
    assert compose(["task=Pendulum"])["task"]["_target_"] == "gpusim_rl.tasks.pendulum.Pendulum"


@pytest.mark.slow
def test_run_is_named_after_its_yaml(train_cli, tmp_path):
    (tmp_path / "my_cfg" / "task").mkdir(parents=True)
    yaml = "# @package _global_\ndefaults: [Pendulum]\ntask: {max_torque: 3.0}\n"
    (tmp_path / "my_cfg" / "task" / "Strong.yaml").write_text(yaml)
    train_cli("-cd", "my_cfg", "task=Strong", "debug=smoke")
    [folder] = run_dirs(tmp_path, "Strong")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["Strong"]
    train_cli("checkpoint=Strong", "max_iterations=3")
    assert run_dirs(tmp_path, "Strong") == [folder] and read_yaml(folder / "config.yaml")["task"]["max_torque"] == 3.0


def test_python_api_has_command_line_defaults(tmp_path, monkeypatch):
    import gpusim_rl

    monkeypatch.chdir(tmp_path)
    row = gpusim_rl.train("Cartpole", debug="smoke", ppo={"horizon": 4}, wandb_tags=["a", "b, c"], device="cpu")
    assert row["iteration"] == 2
    [folder] = run_dirs(tmp_path, "Cartpole")
    assert gpusim_rl.train("Cartpole", checkpoint=str(folder), max_iterations=3)["iteration"] == 3
    assert run_dirs(tmp_path, "Cartpole") == [folder]


def test_python_api_accepts_class_with_and_without_yaml(juggler, monkeypatch):
    from gpusim_rl.tasks.pendulum import Pendulum

    monkeypatch.chdir(juggler)
    monkeypatch.syspath_prepend(str(juggler))
    spec = prepare(Pendulum, num_envs=8, task={"max_torque": 3.0})
    assert (spec.task_class, spec.cfg.num_envs, spec.cfg.task.max_torque) == (Pendulum, 8, 3.0)
    assert spec.overrides == ["task=Pendulum", "num_envs=8", "task.max_torque=3.0"]

    from juggler import Juggler

    values = {key: value for key, value in spec.config["task"].items() if key not in ("_target_", "reset_from")}
    settings = Juggler.Config(bonus=2.0, **values)
    spec = prepare(Juggler, settings, num_envs=8, sim="mujoco")
    assert (spec.task_class, spec.cfg.task, spec.cfg.sim.name) == (Juggler, settings, "mujoco")
    assert spec.config["task"]["_target_"] == "juggler.Juggler"
    with pytest.raises(ConfigError, match=r"Try gpusim_rl\.train\(Juggler, Juggler\.Config"):
        prepare(Juggler)


@pytest.mark.slow
def test_run_from_python_resumes_from_its_folder(train_cli, juggler, command, checkout):
    values = {key: value for key, value in read_yaml(tasks()["Pendulum"].file)["task"].items() if key != "_target_"}
    (juggler / "start.py").write_text(
        "import gpusim_rl\nfrom juggler import Juggler\n"
        f"config = Juggler.Config(bonus=2.0, randomization_params={{'latency': {{'range': [0, 1]}}}}, **{values})\n"
        "gpusim_rl.train(Juggler, config, device='cpu', debug='smoke', task={'max_torque': 3.0})\n"
    )
    command(sys.executable, "start.py", cwd=juggler, env={"PYTHONPATH": f"{juggler}:{checkout}"})
    [folder] = run_dirs(juggler, "Juggler")
    before = read_yaml(folder / "config.yaml")
    assert (before["task"]["bonus"], before["task"]["max_torque"]) == (2.0, 3.0)
    for iterations in (3, 4):
        train_cli(f"checkpoint={folder}", f"max_iterations={iterations}", "trust=true", cwd=juggler)
        assert read_yaml(folder / "config.yaml") == {
            **before,
            "max_iterations": iterations,
            "trust": True,
            "checkpoint": str(folder.relative_to(juggler)),
        }
    train_cli("checkpoint=Juggler", "test=true", "task.bonus=5", "trust=true", cwd=juggler)


def test_settings_from_python_become_overrides(monkeypatch):
    from gpusim_rl.tasks.pendulum import Pendulum

    values = {
        **prepare(Pendulum).config["task"],
        "max_torque": 3.0,
        "randomization_params": {"latency": {"range": [0, 1]}},
    }
    del values["_target_"]
    spec = prepare(Pendulum, Pendulum.Config(**values), task={"physics_hz": 240})
    assert compose(spec.overrides) == spec.config and spec.config["task"]["max_torque"] == 3.0


def test_python_api_finds_tasks_in_config_dir(juggler, monkeypatch):
    monkeypatch.syspath_prepend(str(juggler))
    monkeypatch.delitem(sys.modules, "juggler", raising=False)
    spec = prepare("Juggler", config_dir=juggler / "my_cfg", num_envs=8)
    assert (spec.task_class.__name__, spec.overrides) == ("Juggler", ["task=Juggler", "num_envs=8"])
    with pytest.raises(ConfigError, match=r"unknown task 'Juggler'\. Try config_dir="):
        prepare("Juggler")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_envs": "8"}, "num_envs: .*'8'"),
        ({"ppo": {"horizn": 8}}, "'ppo.horizon'"),
        *(({name: 8}, "invalid key") for name in ("+num_envs", "++task", "num_envs=3", "ppo[clip]", "")),
        ({"experiment": "???"}, "experiment: expected a value"),
        ({"ppo": [1]}, "^ppo: "),
        ({"sim": "mujco"}, "'mujoco'"),
        ({"experiment": "a/b"}, "experiment: .*'a/b'"),
    ],
)
def test_python_api_raises_command_line_errors(overrides, words):
    with pytest.raises(ConfigError, match=words) as info:
        prepare("Cartpole", **overrides)
    assert "\n" not in str(info.value)
    with pytest.raises(ConfigError, match=r"'Antt'.* 'Ant'"):
        prepare("Antt")


def test_unknown_command_suggests_a_known_one():
    with pytest.raises(ConfigError, match="'train'"):
        cli.load_command("trian")


def test_tool_is_a_command_with_exit_code(tmp_path, monkeypatch, capsys):
    (tmp_path / "new_task.py").write_text('"""Write a new task."""\ndef main(argv):\n    print(argv)\n    return 1\n')
    monkeypatch.setattr(paths, "tools_dir", lambda: tmp_path)
    assert cli.main(["new-task", "Juggler", "--force"]) == 1
    assert capsys.readouterr().out == "['Juggler', '--force']\n"
    assert cli.main([]) == 0
    usage = re.sub(" +", " ", capsys.readouterr().out)
    assert "\nTrain:\n train Train or evaluate a task\n" in usage and "\nWrite:\n new-task Write a new task\n" in usage


@pytest.mark.parametrize("name", sorted(cli.commands()))
def test_help_of_every_command_has_the_same_layout(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    summary, usage, *blocks = text.rstrip().split("\n\n")
    assert len(summary) < 60 and usage.startswith(f"Usage: gpusim-rl {name} ")
    titles = [block.partition(":\n")[0] for block in blocks]
    assert titles[0] == "Examples" and titles[-1] == "General" and all(titles)
    fixed = [title for title in titles if title in ORDER]
    assert fixed == sorted(fixed, key=ORDER.index)
    assert 2 <= len(re.findall(rf"^  # .+\n  gpusim-rl {name}", blocks[0], re.MULTILINE)) <= 4
    assert max(map(len, text.splitlines())) <= 80
    if name != "train":  # Hydra's flags
        with pytest.raises(SystemExit, match="2"):
            cli.main([name, *["Ant"] * (name == "demo"), "--no-such-flag=1"])
        assert re.fullmatch(rf"error: .+ See gpusim-rl {name} --help\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (["train.py", "task=Cartpole"], "hydra"),
        (["train.py", "task=Cartpole"], "torch"),
        (["tools/record.py", "Cartpole", "--policy", "random"], "argparse"),
        (["-m", "gpusim_rl", "list"], "argparse"),
    ],
)
def test_ctrl_c_during_import_exits_in_one_line(words, module, tmp_path):
    """The library hangs and replaces KeyboardInterrupt by another error."""
    wait = "import time; print('here', flush=True); time.sleep(60)"
    module_text = f"try:\n    {wait}\nexcept BaseException:\n    raise ImportError('half imported') from None\n"
    (tmp_path / f"{module}.py").write_text(module_text)
    words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == "interrupted\n"
    assert process.returncode == 130
