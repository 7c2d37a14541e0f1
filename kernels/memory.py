"""Uninitialised memory for keys and values."""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
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
    return torch.from_numpy(_aligned(np.empty(nbytes + _ALIGNMENT, dtype=np.uint8), nbytes)).view(dtype).view(shape)


def _aligned(block: NDArray[np.uint8], nbytes: int) -> NDArray[np.uint8]:
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + nbytes]


class Recycler:
    """Memory of one tensor after the other, such as the K/V buffer of each request: the last block is used again.

    A fresh block is faulted in page by page, which in a virtual machine takes as long as filling it three times. At
    most one block is kept that nothing uses, and none for a tensor of less than half its size.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block: NDArray[np.uint8] | None = None
        self._user: weakref.ref[NDArray[np.uint8]] | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """See `empty`; on a CPU its memory may have been that of an earlier tensor of which nothing is left."""
        if torch.device(device).type != "cpu":
            return empty(shape, dtype, device)
        nbytes = math.prod(shape) * dtype.itemsize
        size = nbytes + _ALIGNMENT
        with self._lock:
            free = self._user is None or self._user() is None
            if not (free and self._block is not None and size <= self._block.size <= 2 * size):
                self._block = None  # before the next one is asked for
                self._block = np.empty(size, dtype=np.uint8)
            own = _aligned(self._block, nbytes)
            self._user = weakref.ref(own)  # a tensor's memory holds on to it
        return torch.from_numpy(own).view(dtype).view(shape)
