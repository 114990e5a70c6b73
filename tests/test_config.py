"""The boundary: yaml holds values, dataclasses names, types and rules; a misfit is one line."""

from __future__ import annotations

import dataclasses
import os
import shutil
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpusim_rl.api import load_spec, prepare
from gpusim_rl.env import TaskConfig
from gpusim_rl.env.task import load_task_class
from gpusim_rl.errors import ConfigError, TaskError, friendly_errors, import_extra
from gpusim_rl.files import paths
from gpusim_rl.files.safe_open import dump_yaml
from gpusim_rl.run.devices import choose_devices
from gpusim_rl.settings import compose as composing
from gpusim_rl.settings import schema as config
from gpusim_rl.settings.discover import read_yaml, tasks
from gpusim_rl.settings.saved_run import ADDED, continue_run, of_this_version, read_overrides

TASKS = sorted(tasks())


def message(info: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(info.value)
    assert "\n" not in text
    return text


@pytest.fixture(scope="module")
def composed() -> dict:
    return composing.compose()


def run_of(*overrides: str) -> config.RunConfig:
    """The settings of a run that `train.py` was asked for."""
    return load_spec(composing.compose(overrides), overrides).cfg


# -- yaml and dataclasses ---------------------------------------------------------------------


def keys_of(cls: type) -> dict:
    hints = typing.get_type_hints(cls)
    return {
        field.name: keys_of(hints[field.name]) if dataclasses.is_dataclass(hints[field.name]) else None
        for field in dataclasses.fields(cls)
    }


def keys_in(node: dict) -> dict:
    return {key: keys_in(value) if isinstance(value, dict) else None for key, value in node.items()}


def test_yaml_keys_are_the_dataclass_fields(composed):
    expected = keys_of(config.RunConfig) | {"task": None, "algo": {"name": None, "_target_": None}}
    expected["env"]["kwargs"] = {}  # a dict of the user's keys
    del expected["algorithm"]  # stands in the section that algo.name says
    assert composed["algo"]["name"] == "ppo"
    assert keys_in(composed) | {"task": None} == expected | {"ppo": keys_of(config.PPOConfig)}


@pytest.mark.parametrize(
    "choice",
    [
        f"{group}={file.stem}"
        for group in ("algo", "sim", "log", "debug")
        for file in sorted((paths.cfg_dir() / group).glob("*.yaml"))
    ],
)
def test_every_choice_of_every_group_is_valid(choice):
    run = run_of(choice)
    group, _, name = choice.partition("=")
    if group == "sim":
        assert run.sim.name == name
    if group == "algo":
        assert run.algo == {"fast_sac": "sac", "apex": "dqn"}.get(name, name)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_builds_and_its_yaml_keys_are_its_config_fields(name):
    plain = composing.compose([f"task={name}"])
    run = config.build_run(plain, task_class=load_task_class(plain["task"]["_target_"]))
    fields = {field.name for field in dataclasses.fields(run.task)}
    assert set(plain["task"]) == fields | {"_target_"}


def test_dataclasses_hold_no_values_and_cannot_change():
    for cls in (
        config.RunConfig,
        config.PPOConfig,
        config.NetworkConfig,
        config.SACConfig,
        config.TD3Config,
        config.ReplayConfig,
        config.QNetworkConfig,
        config.SimConfig,
        config.LogConfig,
    ):
        assert all(field.default is dataclasses.MISSING for field in dataclasses.fields(cls))
    run = run_of()
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.num_envs = 3  # type: ignore[misc]


def test_what_every_task_may_leave_out_has_one_default():
    shared = {field.name: field for field in dataclasses.fields(TaskConfig) if field.name in config.TASK_DEFAULTS}
    reset_from = {"share": 0.0, "capacity": 4096, "chance": 0.05}
    without_yaml = {
        "randomize": shared["randomize"].default,
        "randomization_params": {},
        "reset_from": reset_from,
        "observations": {},
    }
    assert dataclasses.asdict(shared["reset_from"].default_factory()) == reset_from  # type: ignore[misc]
    assert shared["randomization_params"].default_factory is shared["observations"].default_factory is dict
    assert composing.compose(["~task"])["task"] == without_yaml
    for name in TASKS:  # a task's own yaml may have other values
        chosen = read_yaml(tasks()[name].file)["task"]
        composed = composing.compose([f"task={name}"])["task"]
        for key, default in without_yaml.items():
            assert composed[key] == chosen.get(key, default)


@pytest.mark.parametrize(
    "lines",
    [
        ["task.randomization_params={frequency: 3, latency: {range: [0, 1]}}"],
        ["task.randomization_params.frequency=3", "task.randomization_params.latency.range=[0,1]"],
        ["+task.randomization_params.frequency=3", "task.randomization_params.latency={range: [0,1]}"],
        [
            "task.randomization_params={frequency: 9}",
            "task.randomization_params={frequency: 3, latency: {range: [0,1]}}",
        ],
    ],
)
def test_a_command_line_adds_to_what_is_randomised(lines):
    expected = {"frequency": 3, "latency": {"range": [0, 1]}}
    assert composing.compose(["task=Ant", *lines])["task"]["randomization_params"] == expected
    typed = [line.removeprefix("+") for line in lines]
    changed = config.apply_overrides(composing.compose(["task=Ant"]), typed)
    assert changed["task"]["randomization_params"] == expected, "and so does a call from Python"


def test_randomisation_from_python_and_back_from_a_run_folder():
    params = {"sim_params": {"gravity": {"range": [0, 0.4], "operation": "additive", "distribution": "gaussian"}}}
    spec = prepare("Ant", task={"randomize": True, "randomization_params": params})
    run, lines = spec.cfg, spec.overrides
    assert run.task.randomize and run.task.randomization_params == params
    assert composing.compose(lines)["task"]["randomization_params"] == params


def test_smoke_makes_any_task_small():
    for name in TASKS:
        run = run_of(f"task={name}", "debug=smoke")
        assert run.num_envs * run.algorithm.horizon * run.max_iterations <= 1000
        assert run.debug.check_task


def test_known_keys_are_the_composed_keys(composed):
    def flat(node: dict, prefix: str = "") -> set[str]:
        found = set()
        for key, value in node.items():
            found |= {prefix + key} | (flat(value, f"{prefix}{key}.") if isinstance(value, dict) else set())
        return found

    settings = {key: value for key, value in composed.items() if key not in ("task", "algo")}  # both are names here
    settings |= {name: composing.compose([f"algo={name}"])[name] for name in config.ALGORITHMS}
    assert set(config.known_keys()) - {"task", "algo"} == flat(settings)


# -- the strict builder -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    count: config.Count
    rate: float
    flag: bool
    name: str | None
    mode: Literal["slow", "fast"]
    either: Literal["auto"] | bool
    sizes: list[int]
    pair: tuple[float, float]
    gains: dict[str, float]
    inner: Inner
    even: Annotated[int, config.Rule("an even int", lambda value: value % 2 == 0)] = 2


GOOD = {
    "count": 3,
    "rate": 1,
    "flag": True,
    "name": None,
    "mode": "slow",
    "either": "auto",
    "sizes": [1, 2],
    "pair": [1, 2.5],
    "gains": {"x": 1},
    "inner": {"gain": 2},
}


def test_builder_converts_without_loss():
    built = config.build(Sample, GOOD, "task")
    assert built.rate == 1.0 and isinstance(built.rate, float)
    assert built.pair == (1.0, 2.5)
    assert built.gains == {"x": 1.0}
    assert built.inner == Inner(gain=2.0)
    assert built.even == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"count": 0}, "task.count must be a positive int, got 0"),
        ({"count": True}, "task.count must be a positive int, got True"),
        ({"count": 3.0}, "task.count must be a positive int, got 3.0. Try task.count=3"),
        ({"rate": "fast"}, "task.rate must be a number, got 'fast'"),
        ({"rate": True}, "task.rate must be a number, got True"),
        ({"rate": float("nan")}, "task.rate must be a number, got nan"),
        ({"rate": None}, "task.rate must be a number, got None"),
        ({"rate": 1e308}, "task.rate must be a number, got 1e+308. Try at most 1e+18"),
        ({"rate": -(10**400)}, "task.rate must be a number, got -1000"),
        ({"rate": float("-inf")}, "task.rate must be a number, got -inf. Try at least -1e+18"),
        ({"count": 2**31}, "task.count must be a positive int, got 2147483648. Try at most 2147483647"),
        ({"count": 1e23}, "task.count must be a positive int, got 1e+23. Try at most 2147483647"),
        ({"even": 2**70}, "task.even must be an even int, got 1180591620717411303424"),
        ({"flag": 1}, "task.flag must be true or false, got 1"),
        ({"flag": "yes"}, "task.flag must be true or false, got 'yes'"),
        ({"name": 3}, "task.name must be a string or null, got 3"),
        ({"mode": "fst"}, "task.mode must be one of slow, fast, got 'fst'. Did you mean 'fast'?"),
        ({"either": 1}, "task.either must be auto or true or false, got 1"),
        ({"sizes": 3}, "task.sizes must be a list of (an int), got 3"),
        ({"sizes": [1, "a"]}, "task.sizes must be a list of (an int), got [1, 'a']"),
        ({"pair": [1]}, "task.pair must be a list of 2 (a number, a number), got [1]"),
        ({"gains": {"x": "y"}}, "task.gains must be a section of (a number), got {'x': 'y'}"),
        ({"inner": {"gian": 1}}, "unknown key 'task.inner.gian'. Did you mean 'task.inner.gain'?"),
        ({"inner": {}}, "missing key 'task.inner.gain'"),
        ({"inner": 3}, "task.inner must be a section with keys of its own, got 3"),
        ({"even": 3}, "task.even must be an even int, got 3"),
        ({"cuont": 3}, "unknown key 'task.cuont'. Did you mean 'task.count'?"),
    ],
)
def test_builder_names_key_rule_and_value(change, expected):
    with pytest.raises(ConfigError) as info:
        config.build(Sample, {**GOOD, **change}, "task")
    assert message(info).startswith(expected)


@given(st.one_of(st.integers(), st.floats(allow_nan=True), st.booleans(), st.text(), st.none()))
def test_builder_accepts_a_value_exactly_when_it_has_the_type(value):
    def accepted(key: str) -> bool:
        try:
            config.build(Sample, {**GOOD, key: value})
        except ConfigError:
            return False
        return True

    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    assert accepted("rate") == (number and abs(value) <= 1e18)
    assert accepted("count") == (isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31)
    assert accepted("flag") == isinstance(value, bool)
    assert accepted("name") == (value is None or isinstance(value, str))


def test_relations_between_fields_are_checked():
    for override, words in [
        ("ppo.learning_rate_min=0.1", "ppo.learning_rate_min"),
        ("ppo.network.log_std_init=9", "ppo.network: log_std_init"),
        ("task.physics_hz=100", "task.physics_hz"),
    ]:
        with pytest.raises(ConfigError, match=words):
            run_of(override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.control_hz=1e-30", "task.physics_hz must be at most 10000 times task.control_hz, got 120.0 and 1e-30"),
        ("task.control_hz=1e-310", "task.physics_hz must be at most 10000 times task.control_hz, got 120.0 and 1e-310"),
        ("task.physics_hz=99999999999", "task.physics_hz must be at most 10000 times task.control_hz"),
        (f"device=cuda:{10**22}", "device must be auto, cpu, cuda or cuda:<index>, got 'cuda:1000"),
        ("task.physics_hz=6e11", "try control_hz=6e+07"),
        ("task.clip_observations=-1", "task.clip_observations must be positive or null, got -1.0"),
        (f"task.episode_length={10**23}", "task.episode_length must be an int, got 1000"),
        ("ppo.network.log_std_min=-1e308", "ppo.network.log_std_min must be a number, got -1e+308"),
    ],
)
def test_an_extreme_value_is_refused(composed, override, words):
    changed = config.apply_overrides(composed, [override])
    with pytest.raises(ConfigError) as info:
        load_spec(changed, [override])
    assert words in message(info)


def test_a_device_whose_number_is_huge_is_refused():
    run = dataclasses.replace(run_of(), device=f"cuda:{10**8}")
    with pytest.raises(ConfigError, match=r"this machine has .*; try device="):
        choose_devices(run)


@pytest.mark.parametrize(
    "text",
    ["+=${seed}", "=1", "~", "sim=[-1]", "+algo=[[]]", f"log={'a' * 1000}", f"seed={'1' * 5000}", "seed=" + "[" * 500],
)
def test_an_override_that_cannot_be_read_is_named(text):
    with pytest.raises(ConfigError) as info:
        composing.compose([text])
    assert message(info).startswith((f"cannot read {text!r}", f"{text}: expected a name"))


def test_a_key_that_exists_is_not_compared_with_itself():
    with pytest.raises(ConfigError, match="'ppo' cannot be changed like this: expected key=value"):
        composing.compose(["ppo={a:1}"])


def test_a_batch_that_does_not_divide_is_not_an_error():
    run = run_of("num_envs=7", "ppo.horizon=5", "ppo.minibatch_size=1000")
    assert (run.num_envs, run.algorithm.horizon) == (7, 5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("num_env=3", "Did you mean 'num_envs'?"),
        ("ppo.horizn=3", "Did you mean 'ppo.horizon'?"),
        ("task.physic_hz=3", "Did you mean 'task.physics_hz'?"),
        ("num_envs", "expected key=value"),
        ("num_envs.deep=3", "unknown key 'num_envs.deep'"),
    ],
)
def test_apply_overrides_changes_known_keys_only(composed, override, words):
    with pytest.raises(ConfigError) as info:
        config.apply_overrides(composed, [override])
    assert words in message(info)


def test_apply_overrides_leaves_the_original_alone(composed):
    before = composed["num_envs"]
    changed = config.apply_overrides(composed, ["num_envs=7", "ppo.network.hidden=[8,8]"])
    assert (changed["num_envs"], changed["ppo"]["network"]["hidden"]) == (7, [8, 8])
    assert composed["num_envs"] == before


# -- which class ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (None, "must be a class path"),
        ("os.system; rm", "must be a class path"),
        ("os.getcwd", "must name a subclass of gpusim_rl.Task"),
        ("pathlib.Path", "must name a subclass of gpusim_rl.Task"),
        ("no_such_module.Hopper", "no module named 'no_such_module'"),
        ("gpusim_rl.tasks.antt.Ant", "no module named 'gpusim_rl.tasks.antt'"),
        ("gpusim_rl.tasks.cartpole.Cartpol", "Did you mean 'Cartpole'?"),
    ],
)
def test_target_must_name_a_task(target, words):
    with pytest.raises(ConfigError) as info:
        load_task_class(target)
    assert words in message(info)


def test_a_task_file_that_fails_to_import_shows_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "broken_task_file.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_task_class("broken_task_file.Hopper")


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ("scene reset apply_action observ rewards terminated", "observe. It has 'observ': did you mean 'observe'?"),
        ("scene reset apply_action observe", "rewards, terminated"),
    ],
)
def test_a_task_without_a_hook_is_one_line(composed, hooks, words):
    from gpusim_rl.env import Task

    half = type("Half", (Task,), {"Config": TaskConfig, **{name: lambda self: None for name in hooks.split()}})
    with pytest.raises(ConfigError) as info:
        config.build_run(composed, task_class=half)
    assert message(info) == f"task Half does not define {words}"


def test_config_class_must_be_a_dataclass():
    class Hopper:
        Config = 3

    with pytest.raises(ConfigError, match="must be a dataclass"):
        config.settings_class(Hopper)


# -- checkpoints ------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run folder of Cartpole as a training leaves it, seen from the folder above runs/."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "Cartpole" / "2026-01-31_12-00-00"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.pt").write_bytes(b"x")
    (folder / "checkpoints" / "000050.pt").write_bytes(b"x")
    saved = composing.compose(["task=Cartpole", "num_envs=64"]) | {"checkpoint": "old.pt", "test": True}
    (folder / "config.yaml").write_bytes(dump_yaml(saved))
    (folder / "overrides.yaml").write_bytes(dump_yaml(["task=Cartpole", "num_envs=64", "checkpoint=old.pt"]))
    (folder.parent / "latest").symlink_to(folder.name)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "Cartpole",
        "runs/Cartpole",
        "runs/Cartpole/latest",
        "runs/Cartpole/2026-01-31_12-00-00",
        "runs/Cartpole/latest/checkpoints",
        "runs/Cartpole/latest/checkpoints/last.pt",
    ],
)
def test_a_run_has_many_names(run_dir, name):
    found = paths.find_checkpoint(name)
    assert found.file.resolve() == run_dir / "checkpoints" / "last.pt"
    assert found.run_dir is not None and found.run_dir.resolve() == run_dir


def test_a_command_line_that_is_gone_is_told_of(run_dir, capsys):
    (run_dir / "overrides.yaml").unlink()
    assert read_overrides(paths.Checkpoint(run_dir / "checkpoints" / "last.pt", run_dir)) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"warning: {run_dir}/overrides.yaml is gone: the run's command line is not on record any more"


def test_a_copied_checkpoint_has_no_run_folder(run_dir, tmp_path):
    copy = tmp_path / "mine.pt"
    copy.write_bytes(b"x")
    assert paths.find_checkpoint("mine.pt").run_dir is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Antt", "there is Cartpole. Did you mean 'Ant'?"),
        ("cartpol", "there is Cartpole. Did you mean 'Cartpole'?"),
        ("runs/Cartpole/2025", "there is latest, 2026-01-31_12-00-00"),
        ("nowhere/last.pt", "expected a run folder, a .pt file or a trained task"),
        ("a" * 1000, "aaa': File name too long; expected a run folder, a .pt file or a trained task"),
        ("~no-such-user/last.pt", "; expected a run folder, a .pt file or a trained task"),
    ],
)
def test_a_checkpoint_that_is_not_there_says_what_is(run_dir, name, words):
    with pytest.raises(ConfigError) as info:
        paths.find_checkpoint(name)
    assert words in message(info)


def without_checkpoints(run_dir: Path) -> Path:
    for file in (run_dir / "checkpoints").iterdir():
        file.unlink()
    return run_dir


def test_a_run_without_checkpoint_says_what_is_there(run_dir):
    without_checkpoints(run_dir)
    with pytest.raises(ConfigError, match=r"expected checkpoints/last\.pt, there is"):
        paths.find_checkpoint("Cartpole")


def crashed(folder: Path, task: str = "cartpole.Cartpole") -> Path:
    """A run folder that a start has left without a checkpoint and without rows."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"task: {{_target_: gpusim_rl.tasks.{task}}}\n")
    return folder


@pytest.mark.parametrize("folder", ["Cartpole", "fast"])
def test_a_run_that_crashed_at_its_start_does_not_hide_those_that_trained(run_dir, folder, capsys):
    runs = run_dir.parents[1]
    last = crashed(runs / folder / "2026-02-01_12-00-00")
    (runs / "Cartpole" / "latest").unlink()
    (runs / "Cartpole" / "latest").symlink_to(f"../{folder}/{last.name}")
    shutil.copytree(run_dir, runs / folder / "2026-01-30_12-00-00")  # an older one
    other = crashed(runs / folder / "2026-01-31_13-00-00", task="ant.Ant")
    (other / "checkpoints" / "last.pt").write_bytes(b"x")  # a newer one, of another task of the same experiment
    assert paths.find_checkpoint("Cartpole").run_dir == run_dir.relative_to(Path.cwd())
    told = f"runs/{folder}/{last.name} has no checkpoints/*.pt: using runs/Cartpole/{run_dir.name}\n"
    assert capsys.readouterr().err == told
    assert paths.find_run("Cartpole") == run_dir.relative_to(Path.cwd())
    assert "has no metrics.csv or checkpoints/*.pt: using" in capsys.readouterr().err
    (last / "metrics.csv").write_text("")  # it trains, and has not saved yet
    assert paths.find_run("Cartpole") == last.relative_to(Path.cwd())
    (last / "checkpoints" / "last.pt").write_bytes(b"x")
    assert paths.find_checkpoint("Cartpole").run_dir == last.relative_to(Path.cwd())
    assert capsys.readouterr().err == ""


def test_where_no_run_has_a_checkpoint_the_newest_is_named(run_dir):
    without_checkpoints(run_dir)
    crashed(run_dir.parent / "2026-01-30_12-00-00")
    with pytest.raises(ConfigError, match=rf"{run_dir.name} \(it ended before its first one, or has"):
        paths.find_checkpoint("Cartpole")
    assert paths.find_run("Cartpole") == run_dir.relative_to(Path.cwd())


def test_where_only_last_pt_is_gone_the_newest_other_checkpoint_is_named(run_dir):
    folder = without_checkpoints(run_dir) / "checkpoints"
    shutil.copytree(run_dir, run_dir.parent / "2026-01-30_12-00-00")  # an older run, which is not taken in its place
    (run_dir.parent / "2026-01-30_12-00-00" / "checkpoints" / "last.pt").write_bytes(b"x")
    for name in ("000050.pt", "best.pt"):
        (folder / name).write_bytes(b"x")
    os.utime(folder / "000050.pt", (0, 0))
    for name in (str(run_dir), "Cartpole"):
        with pytest.raises(ConfigError, match=r"last.pt in \S+: it is gone.* try checkpoint=\S+/best.pt \(tools"):
            paths.find_checkpoint(name)


def test_a_run_of_an_older_version_gets_the_settings_that_it_lacks(run_dir):
    settings = (run_dir / "config.yaml").read_text().partition("\n")[2]
    lines = [line for line in settings.splitlines() if not line.startswith("  iterations:")]
    assert len(lines) == len(settings.splitlines()) - 1
    (run_dir / "config.yaml").write_bytes(dump_yaml(yaml.safe_load("\n".join(lines))))
    assert resumed("checkpoint=Cartpole")[0]["sim"]["iterations"] is None


def test_compile_of_an_older_version_is_a_setting_of_the_run(run_dir):
    with pytest.raises(ConfigError, match=r"unknown key 'ppo\.compile'\. It is compile=learner now, or compile=off"):
        resumed("checkpoint=Cartpole", "ppo.compile=true")
    settings = yaml.safe_load((run_dir / "config.yaml").read_text().partition("\n")[2])
    settings.pop("compile")
    for old, now in ((None, "off"), (False, "off"), (True, "learner")):
        settings["ppo"].pop("compile", None)
        if old is not None:
            settings["ppo"]["compile"] = old
        (run_dir / "config.yaml").write_bytes(dump_yaml(settings))
        assert resumed("checkpoint=Cartpole")[0]["compile"] == now
        assert "compile" not in resumed("checkpoint=Cartpole")[0]["ppo"]


def test_a_setting_of_a_task_that_an_older_version_lacks_is_as_it_was(run_dir):
    settings = yaml.safe_load((run_dir / "config.yaml").read_text().partition("\n")[2])
    del settings["task"]["discrete"]
    (run_dir / "config.yaml").write_bytes(dump_yaml(settings))
    assert resumed("checkpoint=Cartpole")[0]["task"]["discrete"] is False


@pytest.mark.parametrize("target", [target for target in ADDED if target.startswith("gpusim_rl.tasks.")])
def test_a_run_of_an_older_version_gets_what_its_task_did_not_have(target):
    settings = composing.compose([f"task={target.rpartition('.')[2]}"])
    task = {key: value for key, value in settings["task"].items() if key not in ADDED[target]}
    assert ADDED[target] and len(task) == len(settings["task"]) - len(ADDED[target]), "a key that the task has no more"
    filled = of_this_version({**settings, "task": task})
    assert filled["task"] == {**task, **ADDED[target]}
    values = {key: value for key, value in filled["task"].items() if key != "_target_"}
    config.build(config.settings_class(load_task_class(target)), values, "task")


def test_what_a_run_says_of_a_newer_setting_stays():
    settings = composing.compose(["task=AnymalTerrain", "task.fixed_level=3"])
    assert of_this_version(settings)["task"]["fixed_level"] == 3


def test_what_is_called_latest_by_the_user_is_the_latest(run_dir):
    without_checkpoints(run_dir)
    shutil.copytree(run_dir, run_dir.parent / "2026-01-30_12-00-00")
    (run_dir.parent / "2026-01-30_12-00-00" / "checkpoints" / "last.pt").write_bytes(b"x")
    with pytest.raises(ConfigError, match="no checkpoint in"):
        paths.find_checkpoint("runs/Cartpole/latest")
    assert paths.find_checkpoint("runs/Cartpole").file.is_file()


def resumed(*typed: str) -> tuple[dict, list[str]]:
    """The settings of a run that these arguments continue, and its command line for the record."""
    arguments, saved = continue_run(typed, None)
    assert saved is not None
    return composing.compose(arguments, saved=saved), saved.with_overrides(arguments)


def test_a_resumed_run_has_the_saved_settings_and_what_is_typed_wins(run_dir):
    folder = "runs/Cartpole/2026-01-31_12-00-00"
    settings, record = resumed("checkpoint=Cartpole")
    assert settings == composing.compose(["num_envs=64", f"checkpoint={folder}"])
    assert record == ["task=Cartpole", "num_envs=64", f"checkpoint={folder}"]
    settings, record = resumed("num_envs=8", "checkpoint=Cartpole", "max_iterations=9")
    assert (settings["num_envs"], settings["max_iterations"], settings["test"]) == (8, 9, False)
    assert record == ["task=Cartpole", "num_envs=8", f"checkpoint={folder}", "max_iterations=9"]
    file = f"{folder}/checkpoints/000050.pt"
    assert resumed(f"checkpoint={file}")[0]["checkpoint"] == file
    (Path(folder) / "overrides.yaml").write_bytes(dump_yaml(["task=Ant"]))  # a record that tells of another task
    settings, _ = resumed("task=Cartpole", "checkpoint=Cartpole")
    assert settings["task"]["_target_"] == "gpusim_rl.tasks.cartpole.Cartpole"
    assert resumed("task=Ant", "checkpoint=Cartpole")[0]["task"]["_target_"] == "gpusim_rl.tasks.ant.Ant"
    strange = Path("runs/Cartpole/${oc.env:HOME}")
    shutil.copytree(folder, strange)
    assert resumed(f"checkpoint={strange}")[0]["checkpoint"] == str(strange)
    assert continue_run(["checkpoint=null"], None) == (["checkpoint=null"], None)
    assert continue_run(["task=Cartpole"], None) == (["task=Cartpole"], None)


def test_a_group_typed_at_a_resume_wins_over_the_saved_settings(run_dir):
    settings, _ = resumed("checkpoint=Cartpole", "sim=mjwarp", "debug=smoke", "max_iterations=3")
    assert settings["sim"]["name"] == "mjwarp"
    assert (settings["num_envs"], settings["max_iterations"]) == (16, 3)
    settings, _ = resumed("checkpoint=Cartpole", "task=Cartpole", "algo=ppo")  # what it has: nothing new
    assert settings["num_envs"] == 64


def test_settings_removed_by_hand_stay_removed(run_dir):
    """A section is taken over whole: nothing comes back from the task's yaml."""
    saved = composing.compose(["task=Ant", "task.randomization_params={sim_params:{gravity:null}}"])
    del saved["task"]["randomization_params"]["sim_params"]["gravity"]
    (run_dir / "config.yaml").write_bytes(dump_yaml(saved))
    settings, _ = resumed("checkpoint=Cartpole")
    assert settings["task"]["randomization_params"] == saved["task"]["randomization_params"]


def test_a_folder_with_odd_characters_survives_the_command_line(run_dir, tmp_path):
    odd = tmp_path / "my runs, (old)='1'"
    (tmp_path / "runs").rename(odd)
    settings, _ = resumed(f"checkpoint={odd}/Cartpole/latest")
    assert settings["checkpoint"] == f"{odd.name}/Cartpole/2026-01-31_12-00-00"


def test_checkpoint_of_another_task_is_refused(run_dir):
    arguments, saved = continue_run(["task=Ant", "checkpoint=Cartpole"], None)
    with pytest.raises(ConfigError) as info:
        composing.refuse_other_task(composing.compose(arguments, saved=saved), saved)
    assert message(info).startswith("checkpoint of another task")
    composing.refuse_other_task(composing.compose(["task=Cartpole"]), saved)
    composing.refuse_other_task(composing.compose(["task=Ant"]), None)


def test_an_unknown_key_at_a_resume_is_compared_with_those_of_the_run(run_dir):
    with pytest.raises(ConfigError, match=r"unknown key 'task\.max_forse'\. Did you mean 'task\.max_force'\?"):
        resumed("checkpoint=Cartpole", "task.max_forse=1")


def test_foreign_overrides_file_is_refused(run_dir):
    (run_dir / "overrides.yaml").write_bytes(dump_yaml({"a": 1}))
    with pytest.raises(ConfigError, match="expected a list"):
        continue_run(["checkpoint=Cartpole"], None)


# -- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ConfigError("no such thing"), TaskError("no such thing")])
def test_user_errors_are_one_line_and_exit_2(error, capsys):
    with pytest.raises(SystemExit) as info, friendly_errors():
        raise error
    assert info.value.code == 2
    assert capsys.readouterr().err == "error: no such thing\n"


def test_a_message_with_a_long_value_keeps_both_ends(capsys):
    with pytest.raises(SystemExit), friendly_errors():
        raise ConfigError(f"seed must be an int, got {'1' * 100_000}. Try 1")
    line = capsys.readouterr().err
    assert line.startswith("error: seed must be an int, got 111") and line.endswith("111. Try 1\n")
    assert len(line) < 1100


def test_other_errors_keep_their_traceback(capsys):
    with pytest.raises(SystemExit) as info, friendly_errors():
        raise ZeroDivisionError("a bug")
    assert info.value.code == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("Traceback") and "ZeroDivisionError: a bug" in stderr


def test_missing_extra_says_what_to_install():
    with pytest.raises(ConfigError) as info:
        import_extra("no_such_library", "video", "tools/record.py")
    assert message(info) == ("tools/record.py needs no_such_library: pip install 'gpusim-rl[video]'")


def test_an_extra_that_is_broken_inside_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_extra("half_installed", "video", "tools/record.py")


@pytest.mark.parametrize(
    ("arguments", "iterations"),
    [
        (["task=Hopper"], 245),
        (["task=Hopper", "algo=sac"], 4000),
        (["task=Hopper", "algo=sac", "sac.max_iterations=70"], 70),
        (["task=Hopper", "algo=sac", "sac.max_iterations=null"], 245),
        (["task=Hopper", "algo=sac", "max_iterations=9"], 9),
        (["task=Hopper", "algo=sac", "sac.max_iterations=70", "max_iterations=9"], 9),
        (["task=Hopper", "algo=fast_sac"], 30000),
        (["task=Gymnasium", "env.id=CartPole-v1", "algo=dqn"], 400),
        (["task=Hopper", "algo=td3", "debug=smoke"], 2),
        (["task=Hopper", "algo=a2c"], 245),
    ],
)
def test_the_length_of_a_training_is_that_of_the_algorithm_where_it_has_one(arguments, iterations):
    assert composing.compose(arguments)["max_iterations"] == iterations
