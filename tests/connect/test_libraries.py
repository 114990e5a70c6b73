"""Third-party libraries that are missing or have an untested version."""

from __future__ import annotations

import sys

import pytest

from gpusim_rl import connect
from gpusim_rl.errors import ConfigError
from gpusim_rl.files import provenance
from helpers.raised import raises

ADAPTERS = [(name, *connect.LIBRARIES[library]) for name, library in connect._MODULES.items()]
each = pytest.mark.parametrize(("adapter", "module", "requirement"), ADAPTERS)


@each
def test_missing_library_is_named_with_pip_command(monkeypatch, adapter, module, requirement):
    monkeypatch.setitem(sys.modules, module, None)
    with raises(ConfigError, problem=f"{module} is missing", hint=f"Try pip install '{requirement}'"):
        getattr(connect, adapter)


@each
@pytest.mark.parametrize("version", ["0.1", "99.0"])
def test_untested_library_version_is_rejected(monkeypatch, adapter, module, requirement, version):
    pytest.importorskip(module)
    asked = []
    monkeypatch.setattr(provenance, "installed_version", lambda name: asked.append(name) or version)
    with pytest.raises(ConfigError, match=f"gpusim_rl.connect.{adapter} needs {requirement}.* {version} is installed"):
        getattr(connect, adapter)
    assert asked == [requirement.partition("~")[0]]
