"""Assertions on the fields of errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpusim_rl.errors import UserError


@contextmanager
def raises(kind: type[UserError], **fields: object) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect an error whose named fields (key, problem, expected, got, hint) are equal to these."""
    with pytest.raises(kind) as info:
        yield info
    assert {name: getattr(info.value, name) for name in fields} == fields


def message(info: pytest.ExceptionInfo[BaseException]) -> str:
    """Return an error's message after checking that it is one line."""
    text = str(info.value)
    assert "\n" not in text
    return text
