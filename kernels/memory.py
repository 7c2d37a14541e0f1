"""Uninitialised memory for keys and values."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64  # what torch's own memory has


def empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", *, pinned: bool = False
) -> Tensor:
    """An uninitialised tensor.

    On a CPU its memory comes from NumPy, which asks the system for huge pages where the block is large; torch does not,
    and faulting a fresh 50 MB in by pages of 4 KiB takes six times as long as filling them.

    Args:
        pinned: page-locked main memory, from which copies to a GPU are faster and run beside computing.

    Raises:
        MemoryError: there is not enough.
    """
    if pinned or torch.device(device).type != "cpu":
        try:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
    nbytes = math.prod(shape) * dtype.itemsize
    block = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return torch.from_numpy(block[start : start + nbytes]).view(dtype).view(shape)
