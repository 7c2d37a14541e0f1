"""Compiles every kernel for a GPU that need not be there, and prints which instructions and how much memory it takes.

Launched by `tests/test_kernels_gpu.py` in a separate process, without the interpreter: what the interpreter forgives,
the compiler does not. One line of JSON for each compiled kernel.

    python tests/kernels_gpu/compile_all.py TARGET [DTYPE ...]

Without dtypes: all of them, which takes minutes for a GPU of NVIDIA.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cachecraft_rag.kernels.gpu import tiles
from cachecraft_rag.kernels.gpu.attention import attend
from cachecraft_rag.kernels.gpu.drift import mean_change, write_rows
from cachecraft_rag.kernels.gpu.place import place
from cachecraft_rag.kernels.gpu.received import received
from cachecraft_rag.kernels.gpu.rope import rotate
from cachecraft_rag.kernels.visibility import Visibility


@dataclass(frozen=True)
class Target:
    """A GPU: its architecture for Triton, and the shared memory that a program may have, in bytes."""

    gpu: GPUTarget
    shared: int


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 << 10),  # A100
    "sm_89": Target(GPUTarget("cuda", 89, 32), 99 << 10),  # L4, RTX 4090
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 << 10),  # H100
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 << 10),  # B200
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 << 10),  # MI300
}


@dataclass(frozen=True)
class Case:
    """One variant of the attention kernels.

    name        what the case is about
    rows, keys  numbers of rows and keys
    segments    segments whose mass is summed up; 0 = none
    group       query heads of a key/value head
    """

    name: str
    rows: int = 600
    keys: int = 4096
    segments: int = 0
    group: int = 4
    window: int | None = None
    softcap: float | None = None
    absent: bool = False
    sinks: bool = False
    values: bool = True
    splits: int = 1


PREFILL = Case("prefill")
CAPTURE = Case("capture of few segments", segments=12)
CAPTURE_MANY = Case("capture of many segments", segments=128)
DECODE = Case("decode", rows=1, splits=16)
SPLIT_MASS = Case("mass in splits", rows=40, segments=34, values=False, splits=4)
PROBE = Case("probe", rows=64, absent=True, splits=4)
CAPPED = Case("window and soft cap", window=100, softcap=5.0, absent=True, segments=34)
SINKS = Case("sinks", window=128, sinks=True)
ALONE = Case("one head", group=1, segments=34)
ODD = Case("seven heads", group=7)

COMMON = (PREFILL, CAPTURE_MANY, DECODE, CAPPED)
ALL = (*COMMON, CAPTURE, SPLIT_MASS, PROBE, SINKS, ALONE, ODD)


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def cases(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.dtype, int, Case]]:
    """Yield dtype, head_dim and case of every variant of attention."""
    for dtype in dtypes:
        for head_dim in (64, 80, 96, 128, 256):
            thorough = head_dim == 128 and dtype == torch.bfloat16
            for case in ALL if thorough else COMMON:
                yield dtype, head_dim, case


def compiled_only(report: Callable[[str, Any], None]) -> Callable[..., Any]:
    """In place of `kernel[grid]`: compiles for the arguments and launches nothing."""

    def launcher(self: Any, grid: object) -> Callable[..., None]:
        def launch(*arguments: object, **constants: object) -> None:
            report(self.__name__, self.run(*arguments, grid=grid, warmup=True, **constants))

        return launch

    return launcher


def spilled_bytes(kernel: Any) -> int:
    """Return the bytes of registers that a thread of the kernel keeps in memory."""
    if "amdgcn" in kernel.asm:
        # AMD: registers of 4 bytes
        counts = re.findall(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])
        return 4 * sum(map(int, counts))
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    usage = re.search(r"STACK:(\d+)", done.stdout)
    assert usage is not None, done.stdout
    return int(usage[1])


def run(target: Target, dtypes: Sequence[torch.dtype]) -> None:
    """Compile every kernel for these dtypes, with the features that change most of its code."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target.gpu,
            get_current_device=lambda: 0,
            get_current_stream=lambda _device: 0,
        )
    )
    tiles._shared_bytes = lambda _device: target.shared  # type: ignore[assignment]
    label: dict[str, object] = {}

    def report(name: str, kernel: Any) -> None:
        text = kernel.asm.get("ptx") or kernel.asm["amdgcn"]
        units = [
            unit for unit in ("wgmma.mma", "mma.sync", "tcgen05.mma", "v_mfma") if unit in text
        ]
        line = {"kernel": name, **label, "shared": kernel.metadata.shared}
        print(json.dumps({**line, "spilled": spilled_bytes(kernel), "units": units}), flush=True)

    JITFunction.__getitem__ = compiled_only(report)
    for dtype, head_dim, case in cases(dtypes):
        label.clear()
        label.update(dtype=str(dtype).removeprefix("torch."), head_dim=head_dim, case=case.name)
        compile_attention(dtype, head_dim, case)
    for dtype in dtypes:
        for head_dim, rotary in ((128, 128), (80, 32), (96, 96), (128, 0), (256, 64)):
            label.clear()
            label.update(dtype=str(dtype).removeprefix("torch."), head_dim=head_dim)
            label.update(case=f"{rotary} dimensions rotated")
            compile_moves(dtype, head_dim, rotary)


def compile_attention(dtype: torch.dtype, head_dim: int, case: Case) -> None:
    """Compile the attention kernels of a case."""
    heads = 2 * case.group
    q = torch.zeros(case.rows, heads, head_dim, dtype=dtype)
    k = torch.zeros(case.keys, 2, head_dim, dtype=dtype)
    positions = torch.arange(case.rows) * 3
    visible = Visibility(positions, case.window, torch.tensor([3]) if case.absent else None)
    bounds = None
    if case.segments:
        bounds = torch.linspace(0, case.keys, case.segments + 1).long()
    attend(
        q,
        k,
        k if case.values else None,
        visible,
        scale=0.1,
        softcap=case.softcap,
        sinks=torch.zeros(heads) if case.sinks else None,
        bounds=bounds,
        splits=case.splits,
    )
    if case.name in (PREFILL.name, CAPPED.name):
        lse = torch.zeros(case.rows, heads)
        received(q, k, lse, visible, scale=0.1, softcap=case.softcap)


def compile_moves(dtype: torch.dtype, head_dim: int, rotary: int) -> None:
    """Compile the kernels that rotate, place and correct keys."""
    keys = 4096
    cos = torch.zeros(keys, rotary, dtype=dtype)
    merged = torch.zeros(4, 2, keys, 2, head_dim, dtype=dtype)
    chunk = torch.zeros(4, 2, 512, 2, head_dim, dtype=dtype)
    place(merged, [chunk], [5], cos=cos, sin=cos)
    rotate(merged[0, 0], cos, cos)
    shifts = torch.zeros(4, 2, 2, head_dim)
    rows = merged[1, 0, :600]
    owner = torch.zeros(keys, dtype=torch.int32)
    write_rows(merged[0], rows, rows, shifts, owner, cos=cos, sin=cos)
    changed = {"rows": owner, "positions": owner, "edges": owner[:5]}
    mean_change(merged[0], rows, rows, **changed, strength=0.4, cos=cos, sin=cos)


if __name__ == "__main__":
    run(TARGETS[sys.argv[1]], [DTYPES[name] for name in sys.argv[2:] or DTYPES])
