"""Writing of stored chunk-caches and computed rows into the merged K/V buffer of a request.

The merged buffer of a layer is `[2, keys, kv_heads, head_dim]`: *rotated* keys, then values, in prompt order. It is
token-major like the stored chunk-caches, so placing a chunk is one contiguous copy of its values and one rotation of
its keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cachecraft_rag.kernels.cpu import calls
from cachecraft_rag.kernels.cpu.library import kernels_for
from cachecraft_rag.kernels.gpu.choice import uses_triton
from cachecraft_rag.kernels.rope import rotate


def place(merged: Tensor, chunk: Tensor, start: int, *, cos: Tensor, sin: Tensor) -> None:
    """Write one layer of a stored chunk-cache into the merged buffer at its new position (Cache-Craft §3.4.3).

    Args:
        merged: `[2, keys, kv_heads, head_dim]`, written at `start : start + tokens`.
        chunk: `[2, tokens, kv_heads, head_dim]`, raw keys and values.
        start: the chunk's new first position; ValueError beyond the buffer.
        cos, sin: `[keys, rotary_dim]`, for all positions.
    """
    if uses_triton(merged):
        place_all(merged[None], [chunk[None]], [start], cos=cos, sin=sin, layers=[0])
        return
    stop = start + chunk.shape[1]
    if start < 0 or stop > merged.shape[1]:
        raise ValueError(f"a chunk at {start}:{stop} has no place in {merged.shape[1]} positions")
    run = kernels_for(merged, chunk, cos, sin)
    if run is not None and merged.stride(2) == chunk.stride(2) == chunk.shape[3]:
        calls.place(run, merged[:, start:stop], chunk, cos[start:stop], sin[start:stop])
        return
    rotate(chunk[0], cos[start:stop], sin[start:stop], out=merged[0, start:stop])
    merged[1, start:stop] = chunk[1]


def place_all(
    merged: Tensor,
    chunks: Sequence[Tensor],
    starts: Sequence[int],
    *,
    cos: Tensor,
    sin: Tensor,
    layers: Sequence[int],
) -> None:
    """Do the work of `place` for several chunks and layers, which must rotate alike: in one launch with Triton.

    `merged` and each of `chunks` are `[layers, 2, …]` on the same device; `starts` are the new first positions, and
    `layers` the numbers of the layers to place, ascending.
    """
    if uses_triton(merged):
        from cachecraft_rag.kernels.gpu.place import place as place_on_gpu

        place_on_gpu(merged, chunks, starts, cos=cos, sin=sin, layers=layers)
        return
    for chunk, start in zip(chunks, starts, strict=True):
        for layer in layers:
            place(merged[layer], chunk[layer], start, cos=cos, sin=sin)


def scatter_rows(merged: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
    """Write rotated keys and values `[rows, kv_heads, head_dim]`, in the dtype of `merged`, to int64 positions.

    The positions have no repeats, and on a GPU it is not checked that they are in `merged`.
    """
    merged[0].index_copy_(0, positions, keys)
    merged[1].index_copy_(0, positions, values)
