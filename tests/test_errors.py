"""Errors for users are one line."""

from __future__ import annotations

import pytest

from gpusim_rl.errors import ConfigError, TaskError, friendly_errors, import_extra, printable, warn


def message(info: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(info.value)
    assert "\n" not in text
    return text


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


def test_printable_keeps_text_and_escapes_the_rest() -> None:
    assert printable("Größe 3 \N{EM DASH} fine\n\tnext") == "Größe 3 \N{EM DASH} fine\n\tnext"
    assert printable("a\x1b[31m\r\x9b\u202eb") == "a\\x1b[31m\\r\\x9b\\u202eb"


def test_a_message_is_one_line_whatever_is_in_it(capsys) -> None:
    with pytest.raises(SystemExit), friendly_errors():
        raise ConfigError("no run 'x\nerror: try this'")
    warn("y\nz")
    assert capsys.readouterr().err == "error: no run 'x\\nerror: try this'\nwarning: y\\nz\n"
