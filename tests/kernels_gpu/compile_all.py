"""Compiles every kernel for a GPU that need not be there, and prints which instructions and how much memory it takes.

Launched by `tests/test_kernels_gpu.py` in a process of its own, without the interpreter: what the interpreter forgives,
the compiler does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cachecraft_rag.kernels.gpu.attention import attend
from cachecraft_rag.kernels.gpu.drift import shift_stale
from cachecraft_rag.kernels.gpu.place import place
from cachecraft_rag.kernels.gpu.received import received
from cachecraft_rag.kernels.gpu.rope import rotate
from cachecraft_rag.kernels.visibility import Visibility


def compiled_only(self: Any, grid: object) -> Callable[..., None]:
    """In place of `kernel[grid]`: compiles for the arguments and launches nothing."""

    def launch(*arguments: object, **constants: object) -> None:
        kernel = self.run(*arguments, grid=grid, warmup=True, **constants)
        tensor_cores = (
            "wgmma"
            if "wgmma.mma" in kernel.asm["ptx"]
            else "mma"
            if "mma.sync" in kernel.asm["ptx"]
            else ""
        )
        print(self.__name__, len(kernel.asm["cubin"]), kernel.metadata.shared, tensor_cores)

    return launch


def run(capability: int) -> None:
    """Every kernel at least once, with the features that change most of its code."""
    target = GPUTarget("cuda", capability, 32)
    answers = {"target": target, "device": 0, "stream": 0}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: answers["target"],
            get_current_device=lambda: answers["device"],
            get_current_stream=lambda _device: answers["stream"],
        )
    )
    JITFunction.__getitem__ = compiled_only
    rows, keys, kind = 600, 4096, torch.bfloat16
    q, k = torch.zeros(rows, 8, 128, dtype=kind), torch.zeros(keys, 2, 128, dtype=kind)
    visible, bounds = Visibility(torch.arange(rows) * 3), torch.arange(0, keys + 1, 512)
    attend(q, k, k, visible, scale=0.1, bounds=bounds, splits=4)
    attend(
        q,
        k,
        k,
        Visibility(visible.positions, 100, torch.tensor([3])),
        scale=0.1,
        softcap=5.0,
        splits=1,
    )
    received(q, k, torch.zeros(rows, 8), visible, scale=0.1)
    cos = torch.zeros(keys, 96, dtype=kind)
    merged, chunk = (
        torch.zeros(4, 2, keys, 2, 128, dtype=kind),
        torch.zeros(4, 2, 512, 2, 128, dtype=kind),
    )
    place(merged, chunk, 5, cos=cos, sin=cos)
    rotate(q, cos[:rows], cos[:rows])
    shift_stale(
        merged[0], torch.zeros(4, 2, 2, 128), torch.zeros(keys, dtype=torch.int32), cos=cos, sin=cos
    )


if __name__ == "__main__":
    run(int(sys.argv[1]))
