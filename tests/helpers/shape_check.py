"""The type checker that tests put behind every annotation of gpusim_rl: beartype.

With `pytest --jaxtyping-packages=gpusim_rl,helpers.shape_check.check`, as .ci/run calls it, shapes such as
`Float[Tensor, "envs 3"]` are checked in every test; they cost nothing without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception

STANDARD = BeartypeConf(is_pep484_tower=True)  # an int is a float, as for static type checkers
Function = TypeVar("Function", bound=Callable[..., Any])


def check(function: Function) -> Function:
    """Check the arguments and the return value of a function against its annotations."""
    try:
        return beartype(conf=STANDARD)(function)
    except BeartypeDecorHintPep3119Exception:
        # A Protocol that is not runtime_checkable: to check it would read every one of its
        # properties, which for a simulator means to compute them.
        return function
