"""`torch.compile` with an eager fallback."""

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
"""Failed guard in torch's recompilation message."""


class Compiled(Generic[P, R]):
    """Function compiled as one region; if compilation fails, it runs eagerly, after one warning that contains `name`.

    With `one_shape`, for arguments of constant shapes, graph breaks and recompilations count as failures. No code runs
    twice: compilation finishes before any code runs. Thread-safe once compiled. Eager until `compile` unless `now`.
    """

    def __init__(
        self,
        function: Callable[P, R],
        name: str,
        backend: str = "inductor",
        *,
        one_shape: bool = True,
        now: bool = True,
    ) -> None:
        self._function, self._name = function, name
        self._backend, self._one_shape = backend, one_shape
        self._compiled: Callable[P, R] | None = None
        if now:
            self.compile()

    def compile(self) -> None:
        """Compile the function from the next call on."""
        from torch._dynamo import config  # takes a second
        from torch._dynamo.exc import TorchDynamoException

        function = self._function

        def region(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(*args, **kwargs)

        # Torch caches by code object: the same function of another instance must not count as a recompilation.
        region.__code__ = region.__code__.replace()
        self._error = TorchDynamoException
        self._once = config.patch(error_on_recompile=True) if self._one_shape else nullcontext()
        shapes: dict[str, Any] = {"fullgraph": True, "dynamic": False} if self._one_shape else {}
        self._compiled = torch.compile(region, **shapes, backend=self._backend)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function."""
        compiled = self._compiled  # another thread may reset the attribute
        if compiled is not None:
            try:
                with self._once:
                    return compiled(*args, **kwargs)
            except self._error as error:
                logger.warning("%s runs uncompiled: %s", self._name, reason_of(error))
                self._compiled = None
        return self._function(*args, **kwargs)


def reason_of(error: Exception) -> str:
    """Return the reason why a function was not compiled, with the responsible method and line."""
    message = str(error).strip()
    changed = _CHANGED.search(message)
    if changed is not None:
        return f"{changed[1].removeprefix('function.__self__.')} no longer holds {changed[2] or ''}".strip()
    message = message.partition("\n")[0].removesuffix(".") or type(error).__name__
    stack = getattr(error, "real_stack", None) or ()
    frames = [frame for frame in stack if frame.filename != __file__ and not LIBRARY.search(frame.filename)]
    if not frames:
        return message
    hook, line = frames[min(1, len(frames) - 1)], frames[-1]
    return f"{message} in {hook.name}() at {short(line.filename)}:{line.lineno}"
