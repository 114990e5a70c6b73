"""torch.compile of a function, with a way back: what cannot be compiled runs as it is."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from gpusim_rl.machine.source_location import LIBRARY, short

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("gpusim_rl")

_CHANGED = re.compile(r"^ *- \d+/\d+: (.*?) *(#.*)?$", re.MULTILINE)
"""A condition that held when a function was compiled and holds no more, in torch's words."""


class Compiled(Generic[P, R]):
    """A function as one compiled region: call it in the function's place.

    Where it cannot be compiled, it runs as it is from then on, and one warning with its `name` says why. With
    `one_shape`, for arguments that always have the same shapes, this is so too where it cannot be traced as a whole, or
    would have to be compiled again. The compiler runs no line before it has all, so nothing is done twice. Threads may
    call it at a time, once it is compiled.
    """

    def __init__(
        self, function: Callable[P, R], name: str, backend: str = "inductor", *, one_shape: bool = True
    ) -> None:
        from torch._dynamo import config  # takes a second
        from torch._dynamo.exc import TorchDynamoException

        def region(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(*args, **kwargs)

        # Torch keeps what it has compiled by code objects: the same function of another object is no recompilation.
        region.__code__ = region.__code__.replace()
        self._function = function
        self._name = name
        self._error = TorchDynamoException
        self._once = config.patch(error_on_recompile=True) if one_shape else nullcontext()
        shapes: dict[str, Any] = {"fullgraph": True, "dynamic": False} if one_shape else {}
        self._compiled: Callable[P, R] | None = torch.compile(region, **shapes, backend=backend)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function."""
        compiled = self._compiled  # another thread may give it up
        if compiled is not None:
            try:
                with self._once:
                    return compiled(*args, **kwargs)
            except self._error as error:
                logger.warning("%s runs uncompiled: %s", self._name, reason_of(error))
                self._compiled = None
        return self._function(*args, **kwargs)


def reason_of(error: Exception) -> str:
    """Returns why a function was not compiled, and the line that asked for it, with the method in the region."""
    message = str(error).strip()
    changed = _CHANGED.search(message)
    if changed is not None:
        return f"{changed[1].removeprefix('function.__self__.')} is true no more {changed[2] or ''}".strip()
    message = message.partition("\n")[0].removesuffix(".") or type(error).__name__
    stack = getattr(error, "real_stack", None) or ()
    frames = [frame for frame in stack if frame.filename != __file__ and not LIBRARY.search(frame.filename)]
    if not frames:
        return message
    hook, line = frames[min(1, len(frames) - 1)], frames[-1]
    return f"{message} in {hook.name}() at {short(line.filename)}:{line.lineno}"
