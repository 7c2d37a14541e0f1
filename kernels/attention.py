"""Attention of scattered rows over a merged K/V buffer."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cachecraft_rag.kernels.attention_mass import segment_mass
from cachecraft_rag.kernels.attention_paths import UNMEASURED, AttentionPaths, attend
from cachecraft_rag.kernels.gpu.choice import attends_by_triton
from cachecraft_rag.kernels.row_blocks import row_blocks
from cachecraft_rag.kernels.visibility import Visibility


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    paths: AttentionPaths = UNMEASURED,
    out: Tensor | None = None,
) -> Tensor:
    """Softmax attention of scattered rows, masked by position.

    Args:
        q: `[rows, heads, head_dim]`, rotated.
        k, v: `[keys, kv_heads, head_dim]`, keys rotated; heads is a multiple of kv_heads. With Triton, ValueError if
            they do not fit `q` (`gpu.tiles.check_attention`).
        visible: the keys that each row sees. Its positions must be below `keys`, which is not checked everywhere.
        scale: multiplies the scores.
        softcap: above 0: scores become softcap · tanh(scores / softcap) (Gemma-2); None: no cap.
        sinks: float32 `[heads]`, contiguous; the score of a position without a value, which each head may attend to
            (gpt-oss). None: no sinks.
        paths: the fastest ways to attend on this CPU.
        out: where to write the result, of the shape of `q`, and returned; None = a new tensor. Triton's kernel writes
            there itself if it is contiguous and of the same dtype.

    Returns:
        `[rows, heads, head_dim]` in the dtype of `q`. A row that sees no key gets zeros or NaN.
    """
    if attends_by_triton(q):
        from cachecraft_rag.kernels.gpu.attention import attend as attend_on_gpu

        is_fitting = out is not None and out.is_contiguous() and out.dtype == q.dtype
        room = out if is_fitting else None
        attended = attend_on_gpu(
            q, k, v, visible, scale=scale, softcap=softcap, sinks=sinks, out=room
        ).out
        assert attended is not None, "values were given"
        if room is not None:
            return room
    else:
        attended = _attention_on_cpu(
            q, k, v, visible, paths, scale=scale, softcap=softcap, sinks=sinks
        )
    return attended if out is None else out.copy_(attended)


def _attention_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visibility,
    paths: AttentionPaths,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    rows, heads, head_dim = q.shape
    path = paths.of(visible)
    needs_products = softcap is not None or sinks is not None
    is_decode_step = rows == 1 and visible.absent is None
    if is_decode_step and path.kind != "compiled" and not needs_products:
        (block,) = visible.prepared(row_blocks)
        span = slice(block.first_key, block.last_key)
        # The queries of a group are rows of their common key/value head.
        kv_heads = k.shape[1]
        queries = q.view(1, kv_heads, heads // kv_heads, head_dim)
        keys = k[span].transpose(0, 1)[None]
        values = v[span].transpose(0, 1)[None]
        return scaled_dot_product_attention(queries, keys, values, scale=scale).reshape(
            1, heads, head_dim
        )
    return attend(q, k, v, visible, path, scale=scale, softcap=softcap, sinks=sinks)


def attention_with_mass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visibility,
    bounds: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    paths: AttentionPaths = UNMEASURED,
) -> tuple[Tensor, Tensor]:
    """Return what `attention` returns, and the attention of each row to each segment.

    The latter is averaged over heads and leaves out a row's own position. With Triton both are computed in one sweep
    over the keys. The arguments are those of `attention` but `out`, and `bounds`.

    Args:
        bounds: int64 `[segments + 1]`, ascending; segment i covers the keys `bounds[i]:bounds[i + 1]`.

    Returns:
        `[rows, heads, head_dim]` in the dtype of `q`, and float32 `[rows, segments]`, the first result of
        `attention_mass`: 0 for an empty segment. A row that sees no key gets zeros or NaN in both.
    """
    if attends_by_triton(q):
        from cachecraft_rag.kernels.gpu.attention import attend as attend_on_gpu

        attended = attend_on_gpu(
            q, k, v, visible, scale=scale, softcap=softcap, sinks=sinks, bounds=bounds
        )
        assert attended.out is not None, "values were given"
        assert attended.mass is not None, "bounds were given"
        return attended.out, attended.mass
    out = attention(q, k, v, visible, scale=scale, softcap=softcap, sinks=sinks, paths=paths)
    mass = segment_mass(q, k, visible, bounds, scale=scale, softcap=softcap, sinks=sinks)
    return out, mass
