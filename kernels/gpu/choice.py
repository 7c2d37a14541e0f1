"""Choice between the Triton kernels and torch's operations."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def uses_triton(x: Tensor) -> bool:
    """Return True if the Triton kernels take this tensor: on a CUDA device, or on a CPU under Triton's interpreter.

    >>> uses_triton(torch.zeros(1, dtype=torch.float64))
    False
    """
    return (x.is_cuda or interpreted()) and x.dtype in DTYPES and _installed()


def interpreted() -> bool:
    """Return True if this process runs Triton's interpreter, which must be chosen before Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
