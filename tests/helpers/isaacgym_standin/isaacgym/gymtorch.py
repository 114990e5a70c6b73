"""Tensors of the simulation as those of torch, and back."""

from __future__ import annotations

import ctypes
import weakref

import numpy as np
import torch

from isaacgym.gymapi import ContractError, Tensor


def wrap_tensor(tensor: Tensor) -> torch.Tensor:
    if not isinstance(tensor, Tensor):
        raise ContractError(f"wrap_tensor takes a tensor of Isaac Gym, got {type(tensor).__name__}")
    return torch.from_numpy(tensor.array)


def unwrap_tensor(tensor: torch.Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ContractError("unwrap_tensor takes contiguous tensors: it hands over an address")
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())  # which nobody keeps
    return Tensor(np.frombuffer(memory, str(tensor.dtype).removeprefix("torch.")), weakref.ref(tensor))
