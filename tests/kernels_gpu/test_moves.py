"""Rotation, placing and drift correction in Triton against float64 torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cachecraft_rag.kernels.gpu.drift import mean_change, owners, write_rows
from cachecraft_rag.kernels.gpu.place import place
from cachecraft_rag.kernels.gpu.rope import rotate
from tests.kernels_gpu import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    (1, 1, 2, 2),
    (7, 3, 6, 6),
    (5, 4, 80, 20),
    (33, 2, 64, 64),
    (3, 2, 10, 2),
    (4, 1, 96, 96),
    (5, 2, 8, 0),
]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def turns(positions: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = noise(positions, width // 2, seed=9).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def near(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[found.dtype]
    return torch.allclose(found.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim", "width"), SHAPES)
def test_rotate(tokens: int, heads: int, head_dim: int, width: int, dtype: torch.dtype) -> None:
    x, (cos, sin) = noise(tokens, heads, head_dim, dtype=dtype), turns(tokens, width, dtype)
    found = rotate(x, cos, sin)
    assert found.dtype == dtype
    assert near(found, reference.rotate(x, cos, sin))
    assert torch.equal(found[..., width:], x[..., width:])


def test_rotate_takes_views_and_writes_where_it_is_told() -> None:
    x, (cos, sin) = noise(2, 5, 8).transpose(0, 1), turns(5, 4, torch.float32)
    room = torch.full((9, 2, 8), torch.nan, device=DEVICE)
    written = rotate(x, cos, sin, out=room[2:7])
    assert written.data_ptr() == room[2:7].data_ptr()
    assert near(room[2:7], reference.rotate(x, cos, sin))
    assert room[:2].isnan().all()
    assert room[7:].isnan().all()
    assert rotate(noise(0, 2, 8), cos[:0], sin[:0]).shape == (0, 2, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim", "width"), SHAPES)
def test_place(tokens: int, heads: int, head_dim: int, width: int, dtype: torch.dtype) -> None:
    cos, sin = turns(tokens + 7, width, dtype)
    chunk = noise(3, 2, tokens, heads, head_dim, dtype=dtype)
    found = torch.full((3, 2, tokens + 9, heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
    expected = found.double()
    place(found, [chunk], [5], cos=cos, sin=sin)
    reference.place(expected, chunk, 5, cos=cos, sin=sin)
    assert near(found, expected)
    assert (found[:, :, :5] == 7.0).all()
    assert (found[:, :, tokens + 5 :] == 7.0).all()


def test_place_into_one_layer_of_a_larger_buffer() -> None:
    buffer, chunk, (cos, sin) = (
        noise(4, 2, 9, 2, 8),
        noise(4, 2, 6, 2, 8, seed=1),
        turns(9, 8, torch.float32),
    )
    expected = buffer.clone()
    reference.place(expected[2:3], chunk[1:2, :, 1:5], 3, cos=cos, sin=sin)
    place(buffer[2:3], [chunk[1:2, :, 1:5]], [3], cos=cos, sin=sin)
    assert near(buffer, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_chunks_are_placed_at_once_whatever_their_lengths(dtype: torch.dtype) -> None:
    cos, sin = turns(90, 8, dtype)
    found = torch.full((2, 2, 90, 2, 16), 7.0, dtype=dtype, device=DEVICE)
    expected = found.double()
    lengths = {3: 5, 10: 40, 50: 1, 60: 30}
    chunks = [noise(2, 2, tokens, 2, 16, seed=tokens, dtype=dtype) for tokens in lengths.values()]
    chunks[1] = chunks[1][:, :, 4:37]  # a view of a longer one
    chunks[2] = noise(2, 2, 1, 4, 16, dtype=dtype)[:, :, :, 2:]  # a rank's own heads
    place(found, chunks, list(lengths), cos=cos, sin=sin)
    for chunk, start in zip(chunks, lengths, strict=True):
        reference.place(expected, chunk, start, cos=cos, sin=sin)
    assert near(found, expected)


def test_place_takes_a_ranks_own_heads() -> None:
    chunk, (cos, sin) = noise(2, 2, 6, 4, 8), turns(9, 8, torch.float32)
    found, expected = (
        torch.zeros(2, 2, 9, 2, 8, device=DEVICE),
        torch.zeros(2, 2, 9, 2, 8, device=DEVICE),
    )
    place(found, [chunk[:, :, :, 2:]], [1], cos=cos, sin=sin)
    reference.place(expected, chunk[:, :, :, 2:], 1, cos=cos, sin=sin)
    assert near(found, expected)


def test_an_empty_chunk_changes_nothing() -> None:
    merged, (cos, sin) = noise(1, 2, 4, 2, 8), turns(4, 8, torch.float32)
    before = merged.clone()
    place(merged, [noise(1, 2, 0, 2, 8)], [2], cos=cos, sin=sin)
    nothing = noise(0, 2, 8)
    owner = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
    write_rows(merged[0], nothing, nothing, noise(0, 2, 2, 8), owner, cos=cos, sin=sin)
    assert torch.equal(merged, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim", "width"), SHAPES)
def test_mean_change(
    tokens: int, heads: int, head_dim: int, width: int, dtype: torch.dtype
) -> None:
    total = tokens + 70  # more rows than a program reads at a time
    cos, sin = (2.0 * turn for turn in turns(total, width, dtype))  # as a rope scaling stretches
    merged = noise(2, total, heads, head_dim, dtype=dtype)
    # views, as the layers hand them over
    rows = noise(total, 3, heads, head_dim, seed=1, dtype=dtype)
    keys, values = rows[:, 0], rows[:, 2]
    changed = torch.arange(1, total, dtype=torch.int32, device=DEVICE)
    positions = total - changed
    edges = torch.tensor([0, 2, len(changed)], dtype=torch.int32, device=DEVICE)
    how = {"rows": changed, "positions": positions, "edges": edges, "strength": 0.4}
    found = mean_change(merged, keys, values, **how, cos=cos, sin=sin)
    expected = reference.mean_change(merged, keys, values, **how, cos=cos, sin=sin)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "head_dim", "width"), SHAPES)
def test_rows_are_written_and_stale_tokens_move(
    tokens: int, heads: int, head_dim: int, width: int, dtype: torch.dtype
) -> None:
    total = tokens + 8
    cos, sin = turns(total, width, dtype)
    found = noise(2, total, heads, head_dim, dtype=dtype)
    shifts = noise(2, 2, heads, head_dim, seed=1)
    rows = noise(3, 2, heads, head_dim, seed=2, dtype=dtype)
    keys, values = rows[:, 0], rows[:, 1]
    positions = np.array([1, 3, total - 1])
    table = owners(total, positions, [(0, range(4)), (1, range(4, 6)), (0, range(7, total))])
    owner = torch.from_numpy(table).to(DEVICE)
    before, expected = found.clone(), found.double()
    write_rows(found, keys, values, shifts, owner, cos=cos, sin=sin)
    reference.write_rows(expected, keys, values, shifts, owner, cos=cos, sin=sin)
    assert near(found, expected)
    assert torch.equal(found[0, positions], keys), "rows are copied, not computed"
    assert torch.equal(found[1, positions], values)
    assert torch.equal(found[:, 6], before[:, 6]), "it is neither written nor stale"


def test_what_does_not_fit_together_is_refused() -> None:
    merged, chunk, (cos, sin) = (
        noise(1, 2, 9, 2, 8),
        noise(1, 2, 4, 2, 8),
        turns(9, 8, torch.float32),
    )
    wrong = [
        (merged, noise(1, 2, 4, 3, 8), 0),
        (merged, noise(2, 2, 4, 2, 8), 0),
        (merged, chunk, 6),
        (merged, chunk, -1),
        (merged[:, :, :3], chunk, 1),
        (merged, noise(1, 2, 2, 4, 8).transpose(2, 3), 0),
    ]
    for into, what, start in wrong:
        with pytest.raises(ValueError, match=r"chunk|token"):
            place(into, [what], [start], cos=cos, sin=sin)
    with pytest.raises(ValueError, match="in pairs"):
        place(merged, [chunk], [0], cos=noise(9, 10), sin=noise(9, 10))
    with pytest.raises(ValueError, match="by"):
        rotate(noise(3, 2, 8), cos, sin)
    with pytest.raises(ValueError, match="side by side"):
        rotate(noise(9, 8, 2).transpose(1, 2), cos, sin)
    rows = noise(3, 2, 8)
    few = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    enough = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="owners"):
        write_rows(merged[0], rows, rows, noise(1, 2, 2, 8), few, cos=cos, sin=sin)
    with pytest.raises(ValueError, match="changes"):
        write_rows(merged[0], rows, rows, noise(1, 2, 3, 8), enough, cos=cos, sin=sin)
    with pytest.raises(ValueError, match="rows"):
        write_rows(merged[0], rows, noise(3, 3, 8), noise(1, 2, 2, 8), enough, cos=cos, sin=sin)
    how = {"rows": few, "positions": few, "edges": few[:2], "strength": 1.0}
    with pytest.raises(ValueError, match="cosines"):
        mean_change(merged[0], rows, rows, **how, cos=cos[1:], sin=sin[1:])


def test_only_the_named_layers_are_placed() -> None:
    cos, sin = turns(12, 8, torch.float32)
    chunk = noise(3, 2, 5, 2, 8)
    found = torch.full((3, 2, 14, 2, 8), 7.0, device=DEVICE)
    expected = found.clone()
    place(found, [chunk], [5], cos=cos, sin=sin, layers=[0, 2])
    for layer in (0, 2):
        reference.place(expected[layer : layer + 1], chunk[layer : layer + 1], 5, cos=cos, sin=sin)
    assert near(found, expected)
    assert torch.equal(found[1], torch.full_like(found[1], 7.0))
