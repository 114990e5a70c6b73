"""Loading of task classes by path."""

from __future__ import annotations

import pytest

from gpusim_rl.env.task import load_task_or_environment
from gpusim_rl.errors import ConfigError
from helpers.raised import message


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("os.system; rm", "a class path"),
        ("pathlib.Path", "a subclass of gpusim_rl.Task"),
        ("no_such_module.Hopper", "no module named 'no_such_module'"),
        ("gpusim_rl.tasks.antt.Ant", "no module named 'gpusim_rl.tasks.antt'"),
        ("gpusim_rl.tasks.cartpole.Cartpol", "'Cartpole'?"),
    ],
)
def test_target_must_name_a_task(target, words):
    with pytest.raises(ConfigError) as info:
        load_task_or_environment(target)
    assert words in message(info)


def test_task_file_import_error_is_shown_unchanged(tmp_path, monkeypatch):
    (tmp_path / "broken_task_file.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load_task_or_environment("broken_task_file.Hopper")
