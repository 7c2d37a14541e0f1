"""Calls of the compiled kernels with torch tensors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.kernels.cpu.library import Kernels
from cachecraft_rag.kernels.memory import empty
from cachecraft_rag.kernels.row_blocks import check_sinks
from cachecraft_rag.kernels.visibility import Visibility

MOST_DIM = 256

# Sizes that are compiled into the kernels, see the enum in kernels.c.
_BLOCK = 64
_WIDE = 128
_MASS_ROWS = 8
FEW = 12
_PART = 256

# Number of tokens that a thread moves at a time.
_TOKENS_PER_JOB = 32

# Fewer bytes than this are moved by a single thread: waking a second one takes longer.
_SMALL_BYTES = 1 << 16

_local = threading.local()

T = TypeVar("T")

_P = ctypes.c_void_p
_N = ctypes.c_long


def _fields(text: str, kind: T) -> list[tuple[str, T]]:
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
    _fields_ = [
        ("parts", _Turn * 2),
        *_fields("cos sin", _P),
        *_fields("rows dim width turn_row bfloat", _N),
    ]


class _Move(ctypes.Structure):
    _fields_ = [
        *_fields("k v raw_k raw_v cos sin", _P),
        *_fields("row raw_row turn_row heads dim width bfloat", _N),
        *_fields("evidence at edges pieces shift", _P),
        ("strength", ctypes.c_float),
        *_fields("tokens grain", _N),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [
        *_fields("x out add weight", _P),
        *_fields("rows width bfloat", _N),
        ("eps", ctypes.c_float),
    ]


class _Linear(ctypes.Structure):
    _fields_ = [*_fields("x weight bias out", _P), *_fields("rows width outs bfloat", _N)]


class LayerCall(ctypes.Structure):
    """Weights and shapes of a decoder layer, and the rows of a call of `layer`; see `layer_t` in kernels.c."""

    _fields_ = [
        ("weights", _P * 7),
        ("biases", _P * 7),
        *_fields("norm after_norm q_norm k_norm hidden scratch k v cos sin positions", _P),
        *_fields(
            "rows hidden_size inner_size heads kv_heads dim width key_row window threads bfloat", _N
        ),
        ("eps", ctypes.c_float * 4),
        *_fields("scale softcap", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A row of `layer`.

    k         address of the keys of the row's answer
    v         address of the values of the row's answer
    cos       address of the row's cos
    sin       address of the row's sin
    position  position of the row
    """

    k: int
    v: int
    cos: int
    sin: int
    position: int


def layer(run: Kernels, call: LayerCall, hidden: Tensor, rows: Sequence[LayerRow]) -> Tensor:
    """Return a decoder layer's output, `[1, rows, hidden]` in the dtype of `hidden`; write the rows' keys and values.

    Each row's rotated keys and its values are written at its `position` from its addresses on, and then it attends to
    the positions up to its own, within the window of `call`. One or more rows may be given; it is made for the few of
    decode steps. The addresses and shapes are not checked. `hidden` and `call` stay as they are.
    """
    hidden = hidden.clone(memory_format=torch.contiguous_format)
    count = len(rows)
    address_array = ctypes.c_uint64 * count
    keys = address_array(*(row.k for row in rows))
    values = address_array(*(row.v for row in rows))
    cos = address_array(*(row.cos for row in rows))
    sin = address_array(*(row.sin for row in rows))
    positions = (ctypes.c_int64 * count)(*(row.position for row in rows))

    call = LayerCall.from_buffer_copy(call)  # two engines may share a model
    call.hidden = hidden.data_ptr()
    call.rows = count
    call.threads = torch.get_num_threads()
    call.k = ctypes.addressof(keys)
    call.v = ctypes.addressof(values)
    call.cos = ctypes.addressof(cos)
    call.sin = ctypes.addressof(sin)
    call.positions = ctypes.addressof(positions)

    row_width = (
        2 * call.hidden_size + 2 * (call.heads + call.kv_heads) * call.dim + 2 * call.inner_size
    )
    parts = -(-(max(positions) + 1) // _PART)
    parts_bytes = 4 * call.heads * parts * (call.dim + 2)
    call.scratch = _scratch(4 * count * row_width + 8 * 64 + parts_bytes, "layer")
    run("layer", ctypes.byref(call))
    return hidden


def rotate(run: Kernels, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Compute `rope.rotate` by the compiled kernel into `out`; shapes and dtypes are not checked."""
    rows, heads, dim = x.shape
    turn = _Turn(
        x.data_ptr(), out.data_ptr(), x.stride(0), x.stride(1), out.stride(0), out.stride(1), heads
    )
    call = _Rotate(
        (_Turn * 2)(turn, _Turn()),
        cos.data_ptr(),
        sin.data_ptr(),
        rows,
        dim,
        cos.shape[1],
        cos.stride(0),
    )
    call.bfloat = x.dtype == torch.bfloat16
    run("rotate", ctypes.byref(call), _N(_threads(x.numel() * x.element_size())))


def place(run: Kernels, merged: Tensor, chunk: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write raw keys and values `[2, tokens, heads, dim]` into the same tokens of `merged`, with keys rotated.

    `cos` and `sin`, `[tokens, rotary_dim]`, are those of the new positions, and `merged` has as many tokens. The kernel
    reads by address and checks nothing: `library.kernels_for` must accept the tensors, and a token's heads be adjacent.
    """
    call = _move(merged, cos, sin)
    call.raw_k = chunk[0].data_ptr()
    call.raw_v = chunk[1].data_ptr()
    call.raw_row = chunk.stride(1)
    call.tokens = chunk.shape[1]
    call.grain = _TOKENS_PER_JOB
    run("place", ctypes.byref(call), _N(_threads(chunk.numel() * chunk.element_size())))


class Drift:
    """Drift correction of one pass: the recomputed tokens and the stale ones.

    Args:
        run: the compiled kernels.
        evidence: int64 row numbers of the recomputed tokens of each chunk; at least one chunk, each with a row or more.
        positions: int64 `[rows]`, positions of the pass's rows.
        pieces: (index of the chunk in `evidence`, first position, end) of each range of positions to move.
    """

    def __init__(
        self,
        run: Kernels,
        evidence: Sequence[NDArray[np.int64]],
        positions: NDArray[np.int64],
        pieces: Sequence[tuple[int, int, int]],
    ) -> None:
        self._run = run
        self._chunks = len(evidence)
        self._pieces = len(pieces)
        rows = np.concatenate(evidence)
        edges = np.cumsum([0, *map(len, evidence)], dtype=np.int64)
        piece_array = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        self._arrays = (rows, positions[rows], edges, piece_array)  # the pointers need them alive
        self._pointers = [array.ctypes.data for array in self._arrays]

    def correct(
        self,
        merged: Tensor,
        rows: tuple[Tensor, Tensor],
        turns: tuple[Tensor, Tensor],
        strength: float,
    ) -> None:
        """Move all positions of `pieces` in one layer by their chunk's mean change, in place. Nothing is checked.

        A change is the difference of a recomputed token in `rows` from what `merged` holds at its position, so call
        this before the rows are written there: recomputed tokens within `pieces` are moved, too. `merged` is `[2,
        positions, kv_heads, head_dim]`, `rows` are keys and values `[rows, kv_heads, head_dim]`, keys rotated; `turns`
        are cos and sin `[positions, rotary_dim]`.
        """
        keys, values = (row_tensor.contiguous() for row_tensor in rows)
        call = _move(merged, *turns)
        call.raw_k = keys.data_ptr()
        call.raw_v = values.data_ptr()
        call.raw_row = keys.stride(0)
        call.evidence, call.at, call.edges, call.pieces = self._pointers
        call.strength = strength
        call.shift = _scratch(self._chunks * 8 * merged.shape[2] * merged.shape[3], "shift")
        threads = torch.get_num_threads()
        self._run("drift", ctypes.byref(call), _N(self._chunks), _N(self._pieces), _N(threads))


def norm(run: Kernels, x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> Tensor:
    """Return `x / rms(x) · weight` along the last dimension, as a new tensor with the shape and dtype of x.

    `add`, with the same shape, is added to x first, in place; None: nothing is added. The mean of the squares is
    increased by `eps` before its root. x and `add` must be contiguous, `weight` `[width]`, and all of one dtype. None
    of this is checked.
    """
    out = torch.empty_like(x)
    width = x.shape[-1]
    call = _Rows(
        x=x.data_ptr(),
        out=out.data_ptr(),
        weight=weight.data_ptr(),
        rows=x.numel() // width,
        width=width,
    )
    call.add = None if add is None else add.data_ptr()
    call.eps = eps
    call.bfloat = x.dtype == torch.bfloat16
    run("norm", ctypes.byref(call), _N(_threads(x.numel() * x.element_size())))
    return out


def gated(run: Kernels, gate: Tensor, up: Tensor) -> Tensor:
    """Overwrite `gate` with `silu(gate) · up` and return it; `up` stays as it is.

    Both must be contiguous and have the same shape and dtype, which is not checked.
    """
    width = gate.shape[-1]
    call = _Rows(x=gate.data_ptr(), add=up.data_ptr(), rows=gate.numel() // width, width=width)
    call.bfloat = gate.dtype == torch.bfloat16
    run("gated", ctypes.byref(call), _N(_threads(gate.numel() * gate.element_size())))
    return gate


def linear(run: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x @ weightᵀ + bias` for a few rows `[…, width]`. Reads the weights once, at memory speed.

    `weight` is `[outs, width]` and `bias` `[outs]`, or None for no bias. All must be contiguous, on the CPU, and all
    float32 or all bfloat16, which is not checked. The result is new, `[…, outs]`.
    """
    out = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype)
    call = _Linear(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()
    )
    call.width = x.shape[-1]
    call.outs = len(weight)
    call.bfloat = x.dtype == torch.bfloat16
    call.rows = x.numel() // call.width
    run("linear", ctypes.byref(call), _N(_threads(weight.numel() * weight.element_size())))
    return out


def attends(q: Tensor, *others: Tensor) -> bool:
    """Return True if `attend` and `mass` accept these: a row or more, and the same even head dimension up to 256."""
    dim = q.shape[2]
    has_good_dim = dim <= MOST_DIM and dim % 2 == 0
    return len(q) > 0 and has_good_dim and all(other.shape[2] == dim for other in others)


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
    """Compute `attention.attention` by the compiled kernel; arguments as there, without `paths` and `out`.

    Only the sinks are checked, and the kernel reads by address: `attends` and `library.kernels_for` must accept the
    tensors, and positions must be below the number of keys. A row that sees no key gets NaN.
    """
    out = torch.empty(q.shape, dtype=q.dtype)
    call = _attention(run, q, k, visible, scale=scale, softcap=softcap, sinks=sinks)
    call.v = v.data_ptr()
    call.v_row = v.stride(0)
    call.v_head = v.stride(1)
    call.out = out.data_ptr()
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
    """Compute `attention_mass.attention_mass` by the compiled kernel; arguments and result as there.

    Only the sinks are checked; otherwise the tensors must be as `attend` needs them. A row that sees no key gets NaN,
    and keys up to it may receive NaN.
    """
    by_segment = torch.empty(len(q), len(bounds) - 1, dtype=torch.float32)
    parts = -(-len(q) // _MASS_ROWS)
    call = _attention(run, q, k, visible, scale=scale, softcap=softcap, sinks=sinks)
    received_parts = torch.empty(parts, -(-call.keys // _WIDE) * _WIDE, dtype=torch.float32)
    bounds = bounds.contiguous()
    call.bounds = bounds.data_ptr()
    call.segments = len(bounds) - 1
    call.mass = by_segment.data_ptr()
    call.received = received_parts.data_ptr()
    run("mass", ctypes.byref(call))

    received = torch.zeros(len(k), dtype=torch.float32)
    # the kernel has added up the parts in the first one
    received[: call.keys] = received_parts[0, : call.keys]
    return by_segment, received


def differs(run: Kernels) -> str:
    """Compare `attend`, `mass`, `rotate` and `place` with float64 on a few shapes.

    Returns a description of the first difference, or "" if there is no difference. The other kernels are not compared
    here; tests compare them.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    positions = torch.tensor([*range(0, 180, 10), 181, 199])
    bounds = torch.tensor([0, 90, 200])
    exact_q = noise(20, 4, 48)
    exact_k = noise(200, 2, 48)
    exact_v = noise(200, 2, 48)
    angle = noise(200, 24).repeat(1, 2)

    scores = torch.einsum("rhd,khd->hrk", exact_q, exact_k.repeat_interleave(2, 1)) * 0.3
    scores = scores.masked_fill(torch.arange(200) > positions[:, None], -torch.inf)
    weights = scores.softmax(-1)
    attended = torch.einsum("hrk,khd->rhd", weights, exact_v.repeat_interleave(2, 1))
    weights = weights.mean(0).scatter(1, positions[:, None], 0.0)
    by_segment = torch.stack((weights[:, :90].sum(1), weights[:, 90:].sum(1)), 1)
    quarter_turn = torch.cat((-exact_k[..., 24:], exact_k[..., :24]), -1)
    rotated = exact_k * angle.cos()[:, None] + quarter_turn * angle.sin()[:, None]

    visible = Visibility(positions)
    last_rows = Visibility(positions[-3:])
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 4e-2)):
        q, k, v, cos, sin = (
            x.to(dtype) for x in (exact_q, exact_k, exact_v, angle.cos(), angle.sin())
        )
        out = torch.empty_like(k)
        rotate(run, k, cos, sin, out)
        merged = torch.empty(2, 200, 2, 48, dtype=dtype)
        place(run, merged, torch.stack((k, v)), cos, sin)
        mass_by_segment, received = mass(run, q, k, visible, bounds, scale=0.3, softcap=None)
        pairs = {
            "attend": (attend(run, q, k, v, visible, scale=0.3, softcap=None), attended),
            "attend to few": (
                attend(run, q[-3:], k, v, last_rows, scale=0.3, softcap=None),
                attended[-3:],
            ),
            "mass": (mass_by_segment, by_segment),
            "received": (received, weights.sum(0)),
            "rotate": (out, rotated),
            "place": (merged, torch.stack((rotated, exact_v))),
        }
        for name, (result, exact) in pairs.items():
            error = float((result.double() - exact).abs().max())
            is_close = error <= tolerance * float(exact.abs().max())
            if not is_close:  # NaN is not close either
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
    check_sinks(sinks, heads)
    keys_in_reach, absent, positions = visible.prepared(_reach)
    keys = min(keys_in_reach, len(k))
    kv_heads = k.shape[1]

    call = _Attend()
    call.q = q.data_ptr()
    call.k = k.data_ptr()
    call.positions = positions.data_ptr()
    call.absent = absent.data_ptr() if absent is not None else None
    call.rows = rows
    call.heads = heads
    call.kv_heads = k.shape[1]
    call.dim = dim
    call.keys = keys
    call.window = visible.window or 0
    call.threads = torch.get_num_threads()
    call.bfloat = q.dtype == torch.bfloat16
    call.q_row = q.stride(0)
    call.q_head = q.stride(1)
    call.k_row = k.stride(0)
    call.k_head = k.stride(1)
    call.scale = scale
    call.softcap = softcap or 0.0
    call.sinks = None if sinks is None else sinks.data_ptr()
    blocks = -(-keys // _WIDE) * (_WIDE // _BLOCK)
    padded_dim = -(-dim // _BLOCK) * _BLOCK
    item_bytes = 2 if run.instructions in ("avx512_bf16", "amx") and call.bfloat else 4
    packed_bytes = kv_heads * blocks * _BLOCK * (dim + padded_dim) * item_bytes
    parts_bytes = 4 * FEW * kv_heads * -(-keys // _PART) * (dim + 2)  # few rows are not packed
    call.packed = _scratch(max(packed_bytes, parts_bytes), "packed")
    return call


def _reach(visible: Visibility) -> tuple[int, Tensor | None, Tensor]:
    """Return the number of keys up to the last row's own, the absent ones as bytes, and contiguous positions."""
    keys = int(visible.positions[-1]) + 1
    positions = visible.positions.contiguous()
    if visible.absent is None:
        return keys, None, positions
    absent = torch.zeros(keys, dtype=torch.uint8)
    absent[visible.absent[visible.absent < keys]] = 1
    return keys, absent, positions


def _move(merged: Tensor, cos: Tensor, sin: Tensor) -> _Move:
    call = _Move()
    call.k = merged[0].data_ptr()
    call.v = merged[1].data_ptr()
    call.cos = cos.data_ptr()
    call.sin = sin.data_ptr()
    call.row = merged.stride(1)
    call.turn_row = cos.stride(0)
    call.heads = merged.shape[2]
    call.dim = merged.shape[3]
    call.width = cos.shape[1]
    call.bfloat = merged.dtype == torch.bfloat16
    return call


def _threads(nbytes: int) -> int:
    return 1 if nbytes < _SMALL_BYTES else torch.get_num_threads()


def _scratch(nbytes: int, use: str) -> int:
    """Return the address of scratch memory of this thread. Calls share it; it grows and is kept."""
    memory: Tensor | None = getattr(_local, use, None)
    if memory is None or memory.numel() < nbytes:
        memory = empty((nbytes + 64,), torch.uint8)
        setattr(_local, use, memory)
    return memory.data_ptr()
