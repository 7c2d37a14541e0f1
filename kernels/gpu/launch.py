"""Launches of kernels: on the device of their tensors, with grids and sizes computed quickly.

Triton compiles for, and launches on, the thread's current device. A thread begins with device 0, so a kernel over
tensors of `cuda:1` would run on the wrong device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context that makes a tensor's device the thread's current one; on a CPU it changes nothing."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up; Triton's `cdiv` is a jitted function, whose call takes longer.

    >>> ceil_div(33, 16)
    3
    """
    return -(-numerator // denominator)


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is not below `least`, which is 1 or more.

    >>> power_of_two(1), power_of_two(96), power_of_two(128)
    (1, 128, 128)
    """
    return 1 << (least - 1).bit_length()
