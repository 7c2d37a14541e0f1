"""Choice between the Triton kernels and torch's operations."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger("cachecraft_rag.kernels")

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
LARGEST_HEAD = 256  # dimensions of a head that the attention kernels take


def uses_triton(x: Tensor) -> bool:
    """Return True if the Triton kernels take this tensor: 16- or 32-bit floats on a CUDA device, or interpreted.

    False without Triton, and on a device where the trial launch of the first call fails, with a warning.

    >>> uses_triton(torch.zeros(1, dtype=torch.float64))
    False
    """
    if x.dtype not in DTYPES or not _installed():
        return False
    return interpreted() or (x.is_cuda and _launches(x.device))


def attends_by_triton(q: Tensor) -> bool:
    """Return True if the Triton attention kernels take these: as `uses_triton`, and heads up to 256 dimensions."""
    return q.shape[-1] <= LARGEST_HEAD and uses_triton(q)


@cache  # asked at each launch
def interpreted() -> bool:
    """Return True if `$TRITON_INTERPRET` was 1 at the first call; Triton interprets kernels if it was at its import."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _launches(device: torch.device) -> bool:
    """Return whether a kernel can be compiled for a device and launched there."""
    try:
        from cachecraft_rag.kernels.gpu.rope import rotate

        x = torch.zeros(1, 1, 16, device=device)
        rotate(x, x[0], x[0])
    # Triton raises many kinds: without a C compiler, a CUDA library or a supported device
    except Exception as error:  # noqa: BLE001
        logger.warning(
            "Triton cannot run kernels on %s, so torch's slower operations are used there: %s. Triton needs a C "
            "compiler such as gcc (on Debian and Ubuntu: apt-get install gcc)",
            device,
            error,
        )
        return False
    return True


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
