"""Calls of the compiled kernels with torch tensors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.kernels.cpu.library import Kernels
from cachecraft_rag.kernels.memory import empty
from cachecraft_rag.kernels.visibility import Visibility

MOST_DIM = 256
_BLOCK, _WIDE, _MASS_ROWS, FEW, _PART = 64, 128, 8, 12, 256  # of body.h
_GRAIN = 32  # tokens of a job that moves
_SMALL = 1 << 16  # bytes: less is moved by one thread, waking another takes longer
_local = threading.local()

_P, _N = ctypes.c_void_p, ctypes.c_long


def _fields(text: str, kind: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name in text.split()]


class _Attend(ctypes.Structure):
    _fields_ = [
        *_fields("q k v out packed positions bounds absent mass received", _P),
        *_fields("rows heads kv_heads dim keys window segments threads bfloat", _N),
        *_fields("q_row q_head k_row k_head v_row v_head", _N),
        *_fields("scale softcap", ctypes.c_float),
        *_fields("sinks", _P),
    ]


class _Turn(ctypes.Structure):
    _fields_ = [*_fields("x out", _P), *_fields("x_row x_head out_row out_head heads", _N)]


class _Rotate(ctypes.Structure):
    _fields_ = [("parts", _Turn * 2), *_fields("cos sin", _P), *_fields("rows dim width turn_row bfloat", _N)]


class _Move(ctypes.Structure):
    _fields_ = [
        *_fields("k v raw_k raw_v cos sin", _P),
        *_fields("row raw_row turn_row heads dim width bfloat", _N),
        *_fields("evidence at edges pieces shift", _P),
        ("strength", ctypes.c_float),
        *_fields("tokens grain", _N),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [*_fields("x out add weight", _P), *_fields("rows width bfloat", _N), ("eps", ctypes.c_float)]


class _Linear(ctypes.Structure):
    _fields_ = [*_fields("x weight bias out", _P), *_fields("rows width outs bfloat", _N)]


class LayerCall(ctypes.Structure):
    """A decoder layer's weights and shapes, and the rows of one call of `layer`; see `layer_t` in kernels.c."""

    _fields_ = [
        ("weights", _P * 7),
        ("biases", _P * 7),
        *_fields("norm after_norm q_norm k_norm hidden scratch k v cos sin positions", _P),
        *_fields("rows hidden_size inner_size heads kv_heads dim width key_row window threads bfloat", _N),
        ("eps", ctypes.c_float * 4),
        *_fields("scale softcap", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A row of `layer`: addresses of its answer's keys and values, its angles' address, and its position."""

    k: int
    v: int
    cos: int
    sin: int
    position: int


def layer(run: Kernels, call: LayerCall, hidden: Tensor, rows: Sequence[LayerRow]) -> Tensor:
    """What a decoder layer makes of few rows `[1, rows, hidden]`; their keys and values are written."""
    hidden = hidden.clone(memory_format=torch.contiguous_format)
    count = len(rows)
    addresses, whole = ctypes.c_uint64 * count, ctypes.c_int64 * count
    k, v = addresses(*(row.k for row in rows)), addresses(*(row.v for row in rows))
    cos, sin = addresses(*(row.cos for row in rows)), addresses(*(row.sin for row in rows))
    positions = whole(*(row.position for row in rows))
    call = LayerCall.from_buffer_copy(call)  # two engines may share a model
    call.hidden, call.rows, call.threads = hidden.data_ptr(), count, torch.get_num_threads()
    call.k, call.v, call.cos, call.sin, call.positions = (ctypes.addressof(one) for one in (k, v, cos, sin, positions))
    wide = 2 * call.hidden_size + 2 * (call.heads + call.kv_heads) * call.dim + 2 * call.inner_size
    parts = 4 * call.heads * -(-(max(positions) + 1) // _PART) * (call.dim + 2)
    call.scratch = _scratch(4 * count * wide + 8 * 64 + parts, "layer")
    run("layer", ctypes.byref(call))
    return hidden


def rotate(run: Kernels, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """See `rope.rotate`."""
    rows, heads, dim = x.shape
    turn = _Turn(x.data_ptr(), out.data_ptr(), x.stride(0), x.stride(1), out.stride(0), out.stride(1), heads)
    call = _Rotate((_Turn * 2)(turn, _Turn()), cos.data_ptr(), sin.data_ptr(), rows, dim, cos.shape[1], cos.stride(0))
    call.bfloat = x.dtype == torch.bfloat16
    run("rotate", ctypes.byref(call), _N(_threads(x.numel() * x.element_size())))


def place(run: Kernels, merged: Tensor, chunk: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Keys and values `[2, tokens, heads, dim]` into the same tokens of the merged ones, keys rotated."""
    call = _move(merged, cos, sin)
    call.raw_k, call.raw_v, call.raw_row = chunk[0].data_ptr(), chunk[1].data_ptr(), chunk.stride(1)
    call.tokens, call.grain = chunk.shape[1], _GRAIN
    run("place", ctypes.byref(call), _N(_threads(chunk.numel() * chunk.element_size())))


class Drift:
    """Drift correction of one pass: its evidence and what it moves.

    Args:
        evidence: for each chunk, int64 row numbers of its recomputed tokens.
        positions: int64 `[rows]`.
        pieces: chunk, first position, the one behind the last; of what is moved.
    """

    def __init__(
        self,
        run: Kernels,
        evidence: Sequence[NDArray[np.int64]],
        positions: NDArray[np.int64],
        pieces: Sequence[tuple[int, int, int]],
    ) -> None:
        self._run, self._counts = run, (len(evidence), len(pieces))
        rows = np.concatenate(evidence)
        edges = np.cumsum([0, *map(len, evidence)], dtype=np.int64)
        self._arrays = rows, positions[rows], edges, np.array(pieces, dtype=np.int64).reshape(-1, 3)
        self._pointers = [one.ctypes.data for one in self._arrays]

    def correct(
        self, merged: Tensor, rows: tuple[Tensor, Tensor], turns: tuple[Tensor, Tensor], strength: float
    ) -> None:
        """See `DriftCorrection.correct`; `rows` are rotated keys and values, `turns` cos and sin of all positions."""
        keys, values = (one.contiguous() for one in rows)
        call = _move(merged, *turns)
        call.raw_k, call.raw_v, call.raw_row = keys.data_ptr(), values.data_ptr(), keys.stride(0)
        call.evidence, call.at, call.edges, call.pieces = self._pointers
        call.strength = strength
        chunks, pieces = self._counts
        call.shift = _scratch(chunks * 8 * merged.shape[2] * merged.shape[3], "shift")
        self._run("drift", ctypes.byref(call), _N(chunks), _N(pieces), _N(torch.get_num_threads()))


def norm(run: Kernels, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
    """`x / rms(x) · weight` along the last dimension, contiguous; x is increased by `add` first, in place."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    call = _Rows(x=x.data_ptr(), out=out.data_ptr(), weight=weight.data_ptr(), rows=x.numel() // width, width=width)
    call.add, call.eps, call.bfloat = None if add is None else add.data_ptr(), eps, x.dtype == torch.bfloat16
    run("norm", ctypes.byref(call), _N(_threads(x.numel() * x.element_size())))
    return out


def gated(run: Kernels, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) · up`, contiguous, in place of `gate`."""
    width = gate.shape[-1]
    call = _Rows(x=gate.data_ptr(), add=up.data_ptr(), rows=gate.numel() // width, width=width)
    call.bfloat = gate.dtype == torch.bfloat16
    run("gated", ctypes.byref(call), _N(_threads(gate.numel() * gate.element_size())))
    return gate


def linear(run: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weightᵀ + bias` of few rows `[…, width]`, contiguous: reads the weights once, at the memory's speed."""
    out = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype)
    call = _Linear(x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    call.width, call.outs, call.bfloat = x.shape[-1], len(weight), x.dtype == torch.bfloat16
    call.rows = x.numel() // call.width
    run("linear", ctypes.byref(call), _N(_threads(weight.numel() * weight.element_size())))
    return out


def attends(q: Tensor, *others: Tensor) -> bool:
    """True for rows, keys and values that `attend` and `mass` can take."""
    dim = q.shape[2]
    return len(q) > 0 and dim <= MOST_DIM and dim % 2 == 0 and all(one.shape[2] == dim for one in others)


def attend(
    run: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `attention.attention`."""
    out = torch.empty(q.shape, dtype=q.dtype)
    call = _attention(run, q, k, visible, scale=scale, softcap=softcap, sinks=sinks)
    call.v, call.v_row, call.v_head, call.out = v.data_ptr(), v.stride(0), v.stride(1), out.data_ptr()
    run("attend", ctypes.byref(call))
    return out


def mass(
    run: Kernels,
    q: Tensor,
    k: Tensor,
    visible: Visibility,
    bounds: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `attention_mass.attention_mass`."""
    found = torch.empty(len(q), len(bounds) - 1, dtype=torch.float32)
    parts = -(-len(q) // _MASS_ROWS)
    call = _attention(run, q, k, visible, scale=scale, softcap=softcap, sinks=sinks)
    received = torch.empty(parts, -(-call.keys // _WIDE) * _WIDE, dtype=torch.float32)
    bounds = bounds.contiguous()
    call.bounds, call.segments, call.mass, call.received = (
        bounds.data_ptr(),
        len(bounds) - 1,
        found.data_ptr(),
        received.data_ptr(),
    )
    run("mass", ctypes.byref(call))
    whole = torch.zeros(len(k), dtype=torch.float32)
    whole[: call.keys] = received[0, : call.keys]
    return found, whole


def differs(run: Kernels) -> str:
    """What the kernels get wrong on a few shapes, compared with float64; "" where nothing."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    positions, edges = torch.tensor([*range(0, 180, 10), 181, 199]), torch.tensor([0, 90, 200])
    q, k, v = noise(20, 4, 48), noise(200, 2, 48), noise(200, 2, 48)
    angle = noise(200, 24).repeat(1, 2)
    scores = torch.einsum("rhd,khd->hrk", q, k.repeat_interleave(2, 1)) * 0.3
    scores = scores.masked_fill(torch.arange(200) > positions[:, None], -torch.inf)
    weights = scores.softmax(-1)
    right = torch.einsum("hrk,khd->rhd", weights, v.repeat_interleave(2, 1))
    weights = weights.mean(0).scatter(1, positions[:, None], 0.0)
    turned = k * angle.cos()[:, None] + torch.cat((-k[..., 24:], k[..., :24]), -1) * angle.sin()[:, None]
    visible, last = Visibility(positions), Visibility(positions[-3:])
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 4e-2)):
        a, b, c, cos, sin = (x.to(dtype) for x in (q, k, v, angle.cos(), angle.sin()))
        out, merged = torch.empty_like(b), torch.empty(2, 200, 2, 48, dtype=dtype)
        rotate(run, b, cos, sin, out)
        place(run, merged, torch.stack((b, c)), cos, sin)
        found, received = mass(run, a, b, visible, edges, scale=0.3, softcap=None)
        pairs = {
            "attend": (attend(run, a, b, c, visible, scale=0.3, softcap=None), right),
            "attend to few": (attend(run, a[-3:], b, c, last, scale=0.3, softcap=None), right[-3:]),
            "mass": (found, torch.stack((weights[:, :90].sum(1), weights[:, 90:].sum(1)), 1)),
            "received": (received, weights.sum(0)),
            "rotate": (out, turned),
            "place": (merged, torch.stack((turned, v))),
        }
        for name, (ours, exact) in pairs.items():
            if not (error := float((ours.double() - exact).abs().max())) <= tolerance * float(exact.abs().max()):
                return f"{name} in {dtype} is off by {error:.1e}"
    return ""


def _attention(
    run: Kernels,
    q: Tensor,
    k: Tensor,
    visible: Visibility,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> _Attend:
    rows, heads, dim = q.shape
    keys, absent, positions = visible.prepared(_reach)
    keys = min(keys, len(k))
    call = _Attend(q=q.data_ptr(), k=k.data_ptr(), positions=positions.data_ptr())
    call.absent = absent.data_ptr() if absent is not None else None
    call.rows, call.heads, call.kv_heads, call.dim, call.keys = rows, heads, k.shape[1], dim, keys
    call.window, call.threads, call.bfloat = visible.window or 0, torch.get_num_threads(), q.dtype == torch.bfloat16
    call.q_row, call.q_head, call.k_row, call.k_head = q.stride(0), q.stride(1), k.stride(0), k.stride(1)
    call.scale, call.softcap = scale, softcap or 0.0
    call.sinks = None if sinks is None else sinks.data_ptr()
    blocks = -(-keys // _WIDE) * (_WIDE // _BLOCK)
    padded = -(-dim // _BLOCK) * _BLOCK
    size = 2 if run.instructions in ("avx512_bf16", "amx") and call.bfloat else 4
    packed = k.shape[1] * blocks * _BLOCK * (dim + padded) * size
    parts = 4 * FEW * k.shape[1] * -(-keys // _PART) * (dim + 2)  # of few rows, which are not packed
    call.packed = _scratch(max(packed, parts), "packed")
    return call


def _reach(visible: Visibility) -> tuple[int, Tensor | None, Tensor]:
    """Number of keys down to the last row's own, which of them are absent, as bytes, and the positions, adjoining."""
    keys = int(visible.positions[-1]) + 1
    if visible.absent is None:
        return keys, None, visible.positions.contiguous()
    absent = torch.zeros(keys, dtype=torch.uint8)
    absent[visible.absent[visible.absent < keys]] = 1
    return keys, absent, visible.positions.contiguous()


def _move(merged: Tensor, cos: Tensor, sin: Tensor) -> _Move:
    call = _Move(merged[0].data_ptr(), merged[1].data_ptr(), None, None, cos.data_ptr(), sin.data_ptr())
    call.row, call.turn_row = merged.stride(1), cos.stride(0)
    call.heads, call.dim, call.width = merged.shape[2], merged.shape[3], cos.shape[1]
    call.bfloat = merged.dtype == torch.bfloat16
    return call


def _threads(nbytes: int) -> int:
    return 1 if nbytes < _SMALL else torch.get_num_threads()


def _scratch(nbytes: int, use: str) -> int:
    """Memory of this thread that calls use again; it grows and stays."""
    kept: Tensor | None = getattr(_local, use, None)
    if kept is None or kept.numel() < nbytes:
        kept = empty((nbytes + 64,), torch.uint8)
        setattr(_local, use, kept)
    return kept.data_ptr()
