"""Memory for keys and values: uninitialised tensors, and copies from a GPU."""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Alignment in bytes, the same as that of torch's own memory.
_ALIGNMENT = 64


def empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    pinned: bool = False,
) -> Tensor:
    """Return an uninitialised, contiguous tensor; on a CPU its memory begins at a multiple of 64 bytes.

    On a CPU, NumPy allocates its memory, because NumPy asks the system for huge pages if the block is large. torch does
    not, and faulting in a new block of 50 MB by pages of 4 KiB takes six times as long as filling it. Copies from
    `pinned`, page-locked memory to a GPU are faster and run beside computing. MemoryError if there is no such memory.
    """
    if pinned or torch.device(device).type != "cpu":
        try:
            return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
    nbytes = math.prod(shape) * dtype.itemsize
    block = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    return torch.from_numpy(_aligned(block, nbytes)).view(dtype).view(shape)


def to_host(tensor: Tensor, *, pinned: bool) -> Tensor:
    """Return a tensor's copy in main memory, once it is complete; a tensor that is there already is returned itself.

    With `pinned` it is page-locked if there is room: copying it back then takes a ninth of the time
    (docs/results/gpu.md). torch rounds the size of such memory up to a power of two, and keeps it for later tensors.
    """
    if tensor.device.type != "cuda" or not pinned:
        return tensor.cpu()
    try:
        host = empty(tuple(tensor.shape), tensor.dtype, pinned=True)
    except MemoryError:
        return tensor.cpu()
    return host.copy_(tensor)


def _aligned(block: NDArray[np.uint8], nbytes: int) -> NDArray[np.uint8]:
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + nbytes]


class Recycler:
    """Memory for one tensor after the other, such as the K/V buffer of each request. The last block is used again.

    A new block is faulted in page by page, which in a virtual machine takes as long as filling it three times. At most
    one unused block is kept, and it is not used for a tensor of less than half its size.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block: NDArray[np.uint8] | None = None
        self._user: weakref.ref[NDArray[np.uint8]] | None = None

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return an uninitialised tensor. On a CPU it may use the memory of an earlier, unused tensor.

        That tensor and all its views must be gone. If its memory is in use or does not fit the size, new memory is kept
        in its place. On other devices nothing is kept. Any thread may call this method.
        """
        if torch.device(device).type != "cpu":
            return empty(shape, dtype, device)
        nbytes = math.prod(shape) * dtype.itemsize
        size = nbytes + _ALIGNMENT
        with self._lock:
            is_unused = self._user is None or self._user() is None
            fits = self._block is not None and size <= self._block.size <= 2 * size
            if self._block is None or not (is_unused and fits):
                self._block = None  # release the old block before the new one is allocated
                self._block = np.empty(size, dtype=np.uint8)
            memory = _aligned(self._block, nbytes)
            self._user = weakref.ref(memory)  # the tensor keeps this array alive
        return torch.from_numpy(memory).view(dtype).view(shape)
