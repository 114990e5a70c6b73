"""Tensors that processes of one machine share."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes: of a cache line."""
RETRY_S = 1e-4


class SharedMemory:
    """Memory in a file without a name: it is gone when the last process that has it ends, however it ends.

    Args:
        fd: The file, as another process has passed it on; None makes one.

    Attributes:
        fd: To be passed on to other processes.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = _anonymous_file()
        self.fd = fd
        self._pinned: list[Tensor] = []

    def lay_out(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], *, pin: bool = False) -> list[Tensor]:
        """Tensors in it, one behind the other; all processes must ask for the same.

        Args:
            shapes: Shape and type of each.
            pin: CUDA copies from and to it by itself.
        """
        places, end = [], 0
        for shape, dtype in shapes:
            places.append(end)
            size = torch.Size(shape).numel() * dtype.itemsize
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if os.fstat(self.fd).st_size < end:
            os.ftruncate(self.fd, end)
        whole = torch.frombuffer(mmap.mmap(self.fd, max(1, end)), dtype=torch.uint8)
        if pin:
            cuda: Any = torch.cuda.cudart()
            torch.cuda.check_error(cuda.cudaHostRegister(whole.data_ptr(), end, 0))
            self._pinned.append(whole)
        return [
            whole[place : place + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for place, (shape, dtype) in zip(places, shapes, strict=True)
        ]

    def close(self) -> None:
        """Gives the file back. Tensors in it stay as long as they are in use."""
        for whole in self._pinned:
            torch.cuda.synchronize()  # a copy from it may be under way
            cuda: Any = torch.cuda.cudart()
            torch.cuda.check_error(cuda.cudaHostUnregister(whole.data_ptr()))
        self._pinned.clear()
        os.close(self.fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("gpusim_rl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedWeights:
    """Weights that one process writes and others read whenever they want, without waiting for each other for long.

    A sequence lock: the writer counts before and after it writes. Who reads an odd count, or another one afterwards,
    reads again. So a process that is killed while it reads blocks nobody. Others must see stores
    in their order, as on x86.

    Args:
        memory: Where they are.
        state: Tensors by name, of the shapes and types of the weights. Their values are not used.
    """

    def __init__(self, memory: SharedMemory, state: Mapping[str, Tensor]) -> None:
        shapes = [((2,), torch.int64), *((tuple(x.shape), x.dtype) for x in state.values())]
        numbers, *tensors = memory.lay_out(shapes)
        self._numbers, self._tensors = numbers.numpy(), dict(zip(state, tensors, strict=True))
        self._copy = {name: torch.empty_like(x) for name, x in self._tensors.items()}

    def write(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Publishes weights; they must be on the host."""
        self._numbers[1] += 1
        for name, own in self._tensors.items():
            own.copy_(state[name])
        self._numbers[0] = version
        self._numbers[1] += 1

    def read(self) -> tuple[int, dict[str, Tensor]]:
        """The newest version, and its weights; the next call overwrites them."""
        while True:
            count = int(self._numbers[1])
            if count % 2 == 0:
                for name, own in self._copy.items():
                    own.copy_(self._tensors[name])
                version = int(self._numbers[0])
                if int(self._numbers[1]) == count:
                    return version, self._copy
            time.sleep(RETRY_S)
