"""Tensors in memory shared by processes of one machine."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # size of a cache line [bytes]


class SharedMemory:
    """Anonymous file, freed when its last process ends. `fd`: file descriptor from another process; None: new file."""

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            linux = hasattr(os, "memfd_create")
            fd = os.memfd_create("gpusim_rl") if linux else os.dup(tempfile.TemporaryFile().fileno())  # noqa: SIM115
        self.fd = fd
        self._pinned: list[Tensor] = []

    def lay_out(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], *, pin: bool = False) -> list[Tensor]:
        """Return tensors of these shapes and types, at equal offsets in all processes; `pin` pins them for CUDA."""
        spans, end = [], 0
        for shape, dtype in shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            spans.append(slice(end, end + size))
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if os.fstat(self.fd).st_size < end:
            os.ftruncate(self.fd, end)
        whole = torch.frombuffer(mmap.mmap(self.fd, max(1, end)), dtype=torch.uint8)
        if pin:
            cuda: Any = torch.cuda.cudart()
            torch.cuda.check_error(cuda.cudaHostRegister(whole.data_ptr(), end, 0))
            self._pinned.append(whole)
        return [whole[span].view(dtype).view(shape) for span, (shape, dtype) in zip(spans, shapes, strict=True)]

    def close(self) -> None:
        """Release the file; mapped tensors stay valid."""
        for whole in self._pinned:
            torch.cuda.synchronize()  # copies may be under way
            cuda: Any = torch.cuda.cudart()
            torch.cuda.check_error(cuda.cudaHostUnregister(whole.data_ptr()))
        self._pinned.clear()
        os.close(self.fd)
