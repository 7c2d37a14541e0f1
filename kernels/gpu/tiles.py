"""Parts that the attention kernels share: sizes of tiles, loading and scoring of a tile, and checks of arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from cachecraft_rag.kernels.gpu.choice import DTYPES, LARGEST_HEAD, interpreted
from cachecraft_rag.kernels.gpu.launch import power_of_two
from cachecraft_rag.kernels.visibility import Visibility

_SMALLEST_ROWS = 16  # what a matrix product needs at least
_PROGRAMS_PER_PROCESSOR = 2
_MOST_SPLITS = 64

# Fewest keys of a split: with fewer, joining the parts costs more than it saves.
_LEAST_KEYS = 256

# Shared memory in bytes that a program may use on a data centre's GPU; on other GPUs it is 99 KiB.
_LARGE_SHARED = 160 << 10

# Shared memory in bytes that NVIDIA's GPUs have from Hopper on, where larger tiles need fewer registers.
_WARP_GROUPS_SHARED = 220 << 10


@dataclass(frozen=True, slots=True)
class Tiling:
    """Size of a tile of an attention kernel.

    rows    pairs of a tile: rows, times the query heads that share a key/value head
    keys    keys of a tile
    warps   warps of the program
    stages  stages of prefetched keys
    """

    rows: int
    keys: int
    warps: int
    stages: int

    @classmethod
    def of(cls, q: Tensor, *, pairs: int | None = None, has_mass: bool = False) -> Self:
        """Choose a tile by head_dim, dtype and the shared memory of the device.

        `pairs` are rows times query heads of a group, of a kernel that decode steps launch: up to 16 get the smallest
        tile, and more the largest, as None does. `has_mass` is True for a kernel that sums up mass, which takes
        registers.
        """
        is_wide = q.dtype == torch.float32
        head_dim = q.shape[-1]
        # With fewer warps or larger tiles, registers are spilled.
        if head_dim <= 64:
            largest, keys, warps, stages = (32, 32, 8, 2) if is_wide else (128, 64, 4, 3)
            if has_mass:
                warps = 8
        elif head_dim <= 128:
            largest, keys, warps, stages = (32, 16, 8, 1) if is_wide else (128, 64, 8, 3)
        else:
            largest, keys, warps, stages = (16, 16, 4, 1) if is_wide else (64, 32, 8, 2)
            if has_mass and _shared_bytes(q.device) < _WARP_GROUPS_SHARED:
                largest = min(largest, 32)
        if _shared_bytes(q.device) < _LARGE_SHARED:
            keys = min(keys, 32)
            stages = min(stages, 2)
        # Two sizes only: each is another compilation.
        if pairs is not None and pairs <= _SMALLEST_ROWS:
            return cls(_SMALLEST_ROWS, keys, 4, stages)
        return cls(largest, keys, warps, stages)

    def splits(self, device: torch.device, *, programs: int, keys: int) -> int:
        """Return in how many splits, 1 to 64, of 256 `keys` or more each, so many `programs` fill the device."""
        wanted = -(-_PROGRAMS_PER_PROCESSOR * _processors(device) // programs)
        fewest = max(1, keys // max(_LEAST_KEYS, self.keys))
        return max(1, min(wanted, fewest, _MOST_SPLITS))

    def constants(
        self, q: Tensor, visible: Visibility, *, absent: Tensor | None, softcap: float | None
    ) -> dict[str, object]:
        """Return the constants and launch options that the kernels share, by parameter; `absent`: see `absent_mask`."""
        return {
            "HEAD_DIM": q.shape[-1],
            "BLOCK_D": max(16, power_of_two(q.shape[-1])),
            "BLOCK_M": self.rows,
            "BLOCK_N": self.keys,
            "ABSENT": absent is not None,
            "WINDOW": visible.window is not None,
            "SOFTCAP": softcap is not None,
            "UPCAST": interpreted(),
            "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


@cache
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; a few for the interpreter, to split keys there too."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _shared_bytes(device: torch.device) -> int:
    """Return the shared memory in bytes that a program may use."""
    if device.type != "cuda":
        return _LARGE_SHARED
    properties = torch.cuda.get_device_properties(device)
    for name in ("shared_memory_per_block_optin", "shared_memory_per_block"):
        if getattr(properties, name, 0):
            return int(getattr(properties, name))
    return _LARGE_SHARED


@dataclass(frozen=True)
class _AbsentMask:
    """Turns a `Visibility`'s absent keys into a mask; equal instances share their result."""

    keys: int

    def __call__(self, visible: Visibility) -> Tensor | None:
        if visible.absent is None:
            return None
        mask = torch.zeros(self.keys, dtype=torch.uint8, device=visible.absent.device)
        return mask.index_fill_(0, visible.absent, 1)


def absent_mask(visible: Visibility, keys: int) -> Tensor | None:
    """Return a mask, 1 for absent keys, uint8 `[keys]`, made once for a `visible`; None without `visible.absent`."""
    return visible.prepared(_AbsentMask(keys))


def check_attention(q: Tensor, k: Tensor, v: Tensor | None, visible: Visibility) -> int:
    """Return kv_heads; raise ValueError unless the arguments of an attention kernel fit together.

    Checked are dtypes, heads, dimensions of a head (at most 256), the number of positions, and that a head's dimensions
    lie side by side. Positions beyond the keys are not noticed.
    """
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[-2]
    if q.dtype not in DTYPES or k.dtype != q.dtype or (v is not None and v.dtype != q.dtype):
        raise ValueError(
            f"q, k and v must share one of float32, bfloat16 and float16, not {q.dtype} and {k.dtype}"
        )
    if head_dim > LARGEST_HEAD or k.shape[-1] != head_dim:
        raise ValueError(
            f"heads of {head_dim} and {k.shape[-1]} dimensions; they must agree, and be 256 at most"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key/value heads")
    if v is not None and v.shape != k.shape:
        raise ValueError(f"keys are {tuple(k.shape)}, values {tuple(v.shape)}")
    if visible.positions.shape != (rows,):
        raise ValueError(
            f"{rows} rows need as many positions, not {tuple(visible.positions.shape)}"
        )
    if any(x.stride(-1) != 1 for x in (q, k, k if v is None else v)):
        raise ValueError("a head's dimensions must lie side by side")
    return kv_heads


@triton.jit
def load_pairs(
    q,
    positions,
    pair,
    live,
    head,
    q_row,
    q_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load a tile of pairs: a row and one of the query heads that share a key/value head.

    Returns row and query head of each `pair` (row · GROUP + head in its group), its position int32 `[BLOCK_M]`, and its
    query `[BLOCK_M, BLOCK_D]`. Pairs that are not `live` have the position -1 and a query of zeros; so have the
    dimensions from HEAD_DIM to BLOCK_D. `q_row` and `q_head` are the numbers from a row, and from a head, to the next.
    """
    row = pair // GROUP
    query_head = head * GROUP + pair % GROUP
    pos = tl.load(positions + row, mask=live, other=-1).to(tl.int32)
    dims = tl.arange(0, BLOCK_D)
    at = row.to(tl.int64)[:, None] * q_row + query_head[:, None] * q_head + dims[None, :]
    qq = tl.load(q + at, mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return row, query_head, pos, qq


@triton.jit
def load_keys(
    x,
    keys,
    key_stride,
    head_offset,
    there,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load keys or values of one head, `[BLOCK_N, BLOCK_D]`, in their own dtype.

    With MASKED, keys that are not in `there` are zeros; without it, every key must be in range. The dimensions from
    HEAD_DIM to BLOCK_D are zeros. Those of index i in `keys` begin `head_offset` + i · `key_stride` numbers after `x`.
    """
    dims = tl.arange(0, BLOCK_D)
    at = x + head_offset + keys.to(tl.int64)[:, None] * key_stride + dims[None, :]
    if MASKED or HEAD_DIM != BLOCK_D:
        return tl.load(at, mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def scores(
    q, k, scale, softcap, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr
):
    """Return scores times log2(e), float32 `[BLOCK_M, BLOCK_N]`, of `q` `[BLOCK_M, BLOCK_D]`, `k` `[BLOCK_N, BLOCK_D]`.

    With SOFTCAP, scores become softcap · tanh(scores / softcap). Without, `softcap` is not used, and the caller must
    have multiplied `scale` by log2(e). UPCAST is for Triton's interpreter, which multiplies the bits of bfloat16 as if
    they were integers. PRECISION is `tl.dot`'s `input_precision`.
    """
    if UPCAST:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if SOFTCAP:  # tanh x = 1 - 2 / (1 + e^2x), which is 1 if e^2x overflows
        s = (
            softcap - 2.0 * softcap / (1.0 + tl.exp2(s / softcap * 2.8853900817779268))
        ) * 1.4426950408889634
    return s
