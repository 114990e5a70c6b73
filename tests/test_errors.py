"""Errors, warnings and output for users."""

from __future__ import annotations

import ast
import logging
import pickle
import re

import pytest

from gpusim_rl.errors import ConfigError, TaskError, closest, friendly_errors, import_extra, printable, say, warn
from helpers.commands import ROOT
from helpers.raised import raises


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"problem": "no such thing"}, "no such thing"),
        ({"problem": "Juggler.step: no such thing."}, "Juggler.step: no such thing"),
        ({"key": "seed", "expected": "an integer", "got": "1\n2"}, r"seed: expected an integer, got '1\n2'"),
        ({"key": "seed", "got": None}, "seed: got None"),
        (
            {"key": "task", "problem": "unknown task", "got": "Antt", "hint": " Did you mean 'Ant'?"},
            "task: unknown task. Got 'Antt'. Did you mean 'Ant'?",
        ),
        (
            {"problem": "two", "expected": "one", "got": 2, "hint": "Try 1. Or 3"},
            "two. Expected one, got 2. Try 1. Or 3",
        ),
    ],
)
def test_error_fields_form_one_line(fields, line):
    for kind in (ConfigError, TaskError):
        error = kind(**fields)
        assert str(error) == line
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and vars(again) == vars(error) and str(again) == line


def test_within_prepends_the_location():
    error = TaskError(key="fps", expected="above 0", got=0.0, hint="Try 50").within("walk.npz")
    assert (type(error), error.key, error.got) == (TaskError, "walk.npz: fps", 0.0)
    assert str(error) == "walk.npz: fps: expected above 0, got 0.0. Try 50"
    assert str(ConfigError("not a clip").within("walk.npz")) == "walk.npz: not a clip"


@pytest.mark.parametrize("error", [ConfigError("no such thing"), TaskError("no such thing")])
def test_user_error_prints_one_line_and_exits_with_2(error, capsys):
    with pytest.raises(SystemExit) as info, friendly_errors():
        raise error
    assert info.value.code == 2
    assert capsys.readouterr().err == "error: no such thing\n"


@pytest.mark.parametrize("error", [ConfigError("half composed"), ValueError("half composed"), None])
def test_error_caused_by_ctrl_c_counts_as_ctrl_c(error, capsys):
    with pytest.raises(SystemExit) as info, friendly_errors():
        try:
            raise KeyboardInterrupt
        finally:
            if error is not None:  # like OmegaConf when it restores its state
                raise error
    assert info.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_long_message_keeps_both_ends(capsys):
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


def test_missing_extra_names_the_pip_command():
    with raises(ConfigError, key="tools/record.py", hint="Try pip install 'gpusim-rl[view]'"):
        import_extra("no_such_library", "view", "tools/record.py")


def test_broken_extra_is_not_reported_as_missing(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_extra("half_installed", "view", "tools/record.py")


def test_printable_escapes_control_characters() -> None:
    assert printable("Größe 3 \N{EM DASH} fine\n\tnext") == "Größe 3 \N{EM DASH} fine\n\tnext"
    assert printable("a\x1b[31m\r\x9b\u202eb") == "a\\x1b[31m\\r\\x9b\\u202eb"


def test_message_with_line_breaks_is_printed_on_one_line(capsys) -> None:
    with pytest.raises(SystemExit), friendly_errors():
        raise ConfigError("no run 'x\nerror: try this'")
    warn("y\nz")
    assert capsys.readouterr().err == "error: no run 'x\\nerror: try this'\nwarning: y\\nz\n"


def test_say_prints_one_line_per_text(capsys) -> None:
    say("a\nb\r\x1b[2J\x9b\u2028[red]", "c")
    assert capsys.readouterr().out == "a\\nb\\r\\x1b[2J\\x9b\\u2028[red]\nc\n"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("out of memory\x1b[2J\r"), "out of memory\\x1b[2J"),
        (RuntimeError("can't start new thread"), "can't start"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate"),
    ],
)
def test_out_of_memory_is_one_printable_line(error, reason, capsys) -> None:
    with pytest.raises(SystemExit) as end, friendly_errors():
        raise error
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.count("\n") == 1
    assert line.startswith("error: out of memory (") and reason in line


def test_logged_warning_is_one_line_and_traceback_keeps_lines(capsys, monkeypatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])  # as in a command; pytest adds handlers
    with friendly_errors():
        logging.getLogger("gpusim_rl.env").warning("%s has no effect", "a\x1b[2J\nerror: forged")
        logging.getLogger("gpusim_rl.env").error("Traceback\n  \x1b[2J")
    lines = capsys.readouterr().err
    assert lines == "a\\x1b[2J\\nerror: forged has no effect\nTraceback\n  \\x1b[2J\n"


RAW = {
    "gpusim_rl/errors.py": ["friendly_errors", "say"],  # a traceback; what all others call
    "gpusim_rl/cli.py": ["completion", "completion", "main", "main"],  # safe names; our own words
    "gpusim_rl/settings/compose.py": ["main", "main"],  # safe names; lines that are escaped
    "tools/audit.py": ["main"],  # json
    "tools/doctor.py": ["compare_physics", "finish", "report_machine", "report_run"],  # json
    "tools/list.py": ["list_tasks"],  # json
    "tools/record.py": ["progress"],  # a bar without a name
}
"""Functions that print directly, once per call."""


def test_all_output_goes_through_say_and_warn() -> None:
    """Texts may hold names from untrusted files; `say` and `warn` escape control characters."""
    files = [ROOT / "train.py", *(ROOT / "tools").glob("*.py"), *(ROOT / "gpusim_rl").rglob("*.py")]
    found: dict[str, list[str]] = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        if not re.search(r"\bprint\(|\.stdout\.write\(|\.stderr\.write\(|warnings\.warn\(|Console\(", text):
            continue
        nodes = [*ast.walk(ast.parse(text))]
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            prints = name == "print" or name.endswith((".stdout.write", ".stderr.write", "warnings.warn"))
            markup = name.endswith("Console") and not any(key.arg == "markup" for key in call.keywords)
            if prints or (markup and "rich.console" in text):
                around = [each.name for each in functions if each.lineno <= call.lineno <= (each.end_lineno or 0)]
                found.setdefault(str(file.relative_to(ROOT)), []).append(around[-1] if around else "<module>")
    assert {file: sorted(names) for file, names in found.items()} == RAW


TASKS = ["Ant", "Anymal", "Cartpole", "FrankaReach", "Hopper", "Humanoid", "Pendulum", "Walker2d"]
ALGORITHMS = ["a2c", "amp", "bc", "dqn", "impala", "ppo", "sac", "td3"]


@pytest.mark.parametrize(
    ("name", "options", "meant"),
    [
        *((name, TASKS, "Ant") for name in ("Antt", "ant", "nat", "Atn", "aant", "an", "Amt")),
        *((name, TASKS, "Hopper") for name in ("Hoper", "hopper", "Hoppr", "ohpper", "opper", "Hopping", "Copper")),
        *((name, TASKS, "Cartpole") for name in ("artpole", "Cartpol", "CartPole-v1", "catrpole")),
        ("Reach", TASKS, "FrankaReach"),
        ("Walk", TASKS, "Walker2d"),
        *((name, ALGORITHMS, "ppo") for name in ("pop", "pp", "pppo", "ppo2", "pdo")),
        *((name, ALGORITHMS, meant) for name, meant in (("sca", "sac"), ("a3c", "a2c"), ("ddqn", "dqn"))),
        *((name, TASKS, None) for name in ("Nope", "Rope", "Cat", "Dog", "Foo", "Bat", "Slope", "Door", "x", "", "My")),
        *((name, ALGORITHMS, None) for name in ("trpo", "apo", "spo", "cem", "es", "foo", "rainbow", "x")),
    ],
)
def test_only_plausible_names_are_suggested(name, options, meant):
    assert closest(name, options) == meant


def test_problem_accepts_any_object():
    assert str(TaskError(ValueError("no goal"))) == "no goal"
    assert str(ConfigError(5, key="seed")) == "seed: 5"
