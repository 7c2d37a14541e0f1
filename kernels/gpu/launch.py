"""Launch kernels on the device of their tensors.

Triton compiles for, and launches on, the thread's current device. A thread begins with device 0, so a kernel over
tensors of `cuda:1` would run on the wrong device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make a tensor's device the thread's current one within a `with` block; nothing changes for one on a CPU."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
