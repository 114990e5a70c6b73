"""Type checker for `pytest --jaxtyping-packages=gpusim_rl,helpers.shape_check.check`: beartype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception

STANDARD = BeartypeConf(is_pep484_tower=True)  # an int is a float, as for static type checkers
Function = TypeVar("Function", bound=Callable[..., Any])


def check(function: Function) -> Function:
    """Check arguments and return value against the annotations."""
    try:
        return beartype(conf=STANDARD)(function)
    except BeartypeDecorHintPep3119Exception:
        # A Protocol that is not runtime_checkable: a check would read (for a simulator: compute)
        # all of its properties.
        return function
