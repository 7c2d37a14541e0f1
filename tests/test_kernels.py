"""Rope, attention and gather against plain formulas and against the model families' own rotary functions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cachecraft_rag.kernels.attention import attention
from cachecraft_rag.kernels.attention_mass import attention_mass, attention_received
from cachecraft_rag.kernels.attention_paths import PATHS, AttentionPaths, paths_for, shape_class
from cachecraft_rag.kernels.placing import place, scatter_rows
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.kernels.row_blocks import BLOCK_ROWS, RowBlock, row_blocks
from cachecraft_rag.kernels.visibility import Visibility

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def turns(
    positions: Tensor, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin as a Llama makes them."""
    frequencies = 100.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = (positions[:, None].double() * frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


# -- rope -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "width"),
    [(1, 1, 2, 2), (7, 3, 6, 6), (5, 4, 80, 20), (33, 9, 64, 64), (3, 2, 10, 2)],
)
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3", "gemma2", "mistral", "qwen2"])
def test_rotate_is_the_families_own(
    family: str, tokens: int, heads: int, head_dim: int, width: int, dtype: torch.dtype
) -> None:
    module: Any = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    x, (cos, sin) = (
        noise(tokens, heads, head_dim, dtype=dtype),
        turns(torch.arange(tokens) * 7 + 3, width, dtype),
    )
    ours = rotate(x, cos, sin)
    own = module.apply_rotary_pos_emb(
        x.transpose(0, 1)[None, ..., :width],
        x.transpose(0, 1)[None, ..., :width],
        cos[None],
        sin[None],
    )[1]
    assert ours.dtype == dtype
    assert torch.allclose(
        ours[..., :width].float(), own[0].transpose(0, 1).float(), atol=TOLERANCE[dtype]
    )
    assert torch.equal(ours[..., width:], x[..., width:])


def test_rotating_by_nothing_is_nothing() -> None:
    x = noise(4, 2, 8)
    assert torch.equal(rotate(x, torch.ones(4, 8), torch.zeros(4, 8)), x)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_a_score_depends_on_the_distance_only(start: int, gap: int) -> None:
    q, k = noise(1, 1, 16, dtype=torch.float64), noise(1, 1, 16, seed=1, dtype=torch.float64)

    def score(query_place: int, key_place: int) -> Tensor:
        at = [turns(torch.tensor([place]), 16, torch.float64) for place in (query_place, key_place)]
        return (rotate(q, *at[0]) * rotate(k, *at[1])).sum()

    assert torch.allclose(score(start + gap, start), score(gap, 0), atol=1e-8)


def test_rotate_writes_where_it_is_told_and_keeps_its_input() -> None:
    x, (cos, sin) = noise(5, 2, 8), turns(torch.arange(5), 4)
    before, room = x.clone(), torch.full((9, 2, 8), torch.nan)
    written = rotate(x, cos, sin, out=room[2:7])
    assert written.data_ptr() == room[2:7].data_ptr()
    assert torch.equal(room[2:7], rotate(x, cos, sin))
    assert torch.equal(x, before)
    assert room[:2].isnan().all()
    assert room[7:].isnan().all()


def test_rotate_takes_views() -> None:
    wide, (cos, sin) = noise(3, 5, 8), turns(torch.arange(5), 8)
    view = wide.transpose(0, 1)  # [5, 3, 8], as the layers hand it over
    assert torch.equal(rotate(view, cos, sin), rotate(view.contiguous(), cos, sin))


# -- attention --------------------------------------------------------------------------------------------------------


def probabilities(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Plain softmax `[heads, rows, keys]` in float64, one query head at a time."""
    group = q.shape[1] // k.shape[1]
    keys = torch.arange(k.shape[0])
    visible = keys[None, :] <= positions[:, None]
    if window is not None:
        visible &= positions[:, None] - keys[None, :] < window
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // group].double().T * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible, -torch.inf)
        sink = torch.full(
            (len(q), 1), -torch.inf if sinks is None else float(sinks[head]), dtype=torch.float64
        )
        heads.append(torch.cat((scores, sink), -1).softmax(-1)[:, :-1])
    return torch.stack(heads)


CASES: dict[str, dict[str, Any]] = {
    "scattered rows": {"positions": [0, 3, 4, 11, 30]},
    "one row": {"positions": [17]},
    "the first row": {"positions": [0]},
    "one head each": {"positions": [2, 9], "heads": 2, "kv_heads": 2},
    "one key head for all": {"positions": [2, 9, 29], "heads": 6, "kv_heads": 1},
    "window": {"positions": [0, 5, 6, 25, 30], "window": 7},
    "window of one": {"positions": [0, 5, 30], "window": 1},
    "window wider than the prompt": {"positions": [0, 5, 30], "window": 99},
    "one row in a window": {"positions": [30], "window": 7},
    "softcap": {"positions": [0, 5, 30], "softcap": 2.0},
    "softcap and window": {"positions": [3, 5, 30], "softcap": 2.0, "window": 4},
    "sinks": {"positions": [0, 5, 30], "sinks": True},
    "sinks, one row": {"positions": [17], "sinks": True},
    "sinks, softcap and window": {
        "positions": [3, 5, 30],
        "softcap": 2.0,
        "window": 4,
        "sinks": True,
    },
    "sinks, every row": {"positions": [*range(31)], "sinks": True},
    "several blocks": {"positions": [*range(0, 700, 2), 731], "keys": 740},
    "several blocks in a window": {
        "positions": [*range(0, 700, 2), 731],
        "keys": 740,
        "window": 33,
    },
    "a last block of one row": {"positions": [*range(BLOCK_ROWS + 1)], "keys": 300, "window": 9},
    "every row": {"positions": [*range(31)]},
}


def tensors(
    case: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
    heads, kv_heads, keys = case.get("heads", 6), case.get("kv_heads", 2), case.get("keys", 31)
    positions = torch.tensor(case["positions"])
    q, k = (
        noise(len(positions), heads, 16, dtype=dtype),
        noise(keys, kv_heads, 16, seed=1, dtype=dtype),
    )
    v = noise(keys, kv_heads, 16, seed=2, dtype=dtype)
    sinks = noise(heads, seed=3).float() if case.get("sinks") else None
    return q, k, v, positions, {"scale": 0.3, "softcap": case.get("softcap"), "sinks": sinks}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_attention_is_a_plain_softmax(name: str, path: str, dtype: torch.dtype) -> None:
    q, k, v, positions, how = tensors(CASES[name], dtype)
    window = CASES[name].get("window")
    visible = Visibility(positions, window=window)
    if PATHS[path].kind == "causal" and shape_class(visible) != "front":
        pytest.skip("a prompt's first tokens only")
    paths = AttentionPaths({"few": path, "some": path, "front": path})
    found = attention(q, k, v, visible, paths=paths, **how)
    shares = probabilities(q, k, positions, window=window, **how)
    values = v.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    expected = torch.einsum("hrk,khd->rhd", shares, values)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, atol=TOLERANCE[dtype])


def test_keys_after_a_row_do_not_matter_even_if_they_are_no_numbers() -> None:
    q, k, v, positions, how = tensors({"positions": [2, 9]}, torch.float32)
    expected = attention(q, k, v, Visibility(positions), **how)
    k[10:], v[10:] = torch.nan, torch.nan  # not computed yet: whatever the memory held
    assert torch.equal(attention(q, k, v, Visibility(positions), **how), expected)


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_number_of_sinks_is_refused(path: str) -> None:
    q, k, v, positions, how = tensors({"positions": [*range(31)], "sinks": True}, torch.float32)
    paths = AttentionPaths({"few": path, "some": path, "front": path})
    how["sinks"] = how["sinks"][1:]
    with pytest.raises(ValueError, match=r"6 query heads need 6 sinks, got \(5,\)"):
        attention(q, k, v, Visibility(positions), paths=paths, **how)
    with pytest.raises(ValueError, match=r"6 query heads need 6 sinks, got \(5,\)"):
        attention_mass(q, k, Visibility(positions), torch.tensor([0, 31]), **how)


def test_no_rows_no_blocks() -> None:
    assert row_blocks(Visibility(torch.tensor([], dtype=torch.int64))) == ()


# -- attention mass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_mass_is_the_mean_over_heads_without_the_own_position(
    name: str, dtype: torch.dtype
) -> None:
    q, k, _, positions, how = tensors(CASES[name], dtype)
    window, keys = CASES[name].get("window"), k.shape[0]
    # the first keys of no segment, a segment of one key, an empty one
    bounds = torch.tensor([4, 5, 5, 20, keys])
    found, _ = attention_mass(q, k, Visibility(positions, window=window), bounds, **how)
    shares = probabilities(q, k, positions, window=window, **how).mean(0)
    shares[torch.arange(len(positions)), positions] = 0.0
    expected = torch.stack([shares[:, a:b].sum(1) for a, b in pairwise(bounds)], dim=1)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_received_is_the_sum_over_rows_beside_the_same_mass(name: str, dtype: torch.dtype) -> None:
    q, k, _, positions, how = tensors(CASES[name], dtype)
    window, bounds = CASES[name].get("window"), torch.tensor([4, 20, k.shape[0]])
    _, received = attention_mass(q, k, Visibility(positions, window=window), bounds, **how)
    shares = probabilities(q, k, positions, window=window, **how).mean(0)
    shares[torch.arange(len(positions)), positions] = 0.0
    assert received.dtype == torch.float32
    assert torch.allclose(
        received.double(), shares.sum(0), atol=len(positions) ** 0.5 * TOLERANCE[dtype]
    )


def test_mass_over_everything_is_one_less_the_own_position() -> None:
    q, k, _, positions, how = tensors(CASES["scattered rows"], torch.float32)
    found = attention_mass(q, k, Visibility(positions), torch.tensor([0, 31]), **how)[0][:, 0]
    own = probabilities(q, k, positions, **how).mean(0)[torch.arange(5), positions]
    assert torch.allclose(found.double(), 1 - own, atol=1e-5)
    assert found[0] == 0  # position 0 sees itself only


def test_mass_of_large_half_precision_scores_is_finite() -> None:
    q, k = (
        noise(3, 2, 64, dtype=torch.float16) * 200,
        noise(9, 2, 64, seed=1, dtype=torch.float16) * 200,
    )
    # products up to a million, which half precision cannot hold
    positions = torch.tensor([2, 5, 8])
    found, _ = attention_mass(q, k, Visibility(positions), torch.tensor([0, 9]), scale=0.001)
    expected = probabilities(q, k, positions, scale=0.001).mean(0)
    expected[torch.arange(3), positions] = 0.0
    assert torch.allclose(found[:, 0].double(), expected.sum(1), atol=2e-2)


# -- gather -----------------------------------------------------------------------------------------------------------


def test_a_placed_chunk_is_rotated_to_its_place_and_nothing_else_changes() -> None:
    merged, chunk = torch.full((2, 12, 2, 8), 7.0), noise(2, 5, 2, 8)
    cos, sin = turns(torch.arange(12), 8)
    place(merged, chunk, 4, cos=cos, sin=sin)
    assert torch.equal(merged[0, 4:9], rotate(chunk[0], cos[4:9], sin[4:9]))
    assert torch.equal(merged[1, 4:9], chunk[1])
    assert (merged[:, :4] == 7).all()
    assert (merged[:, 9:] == 7).all()


@pytest.mark.parametrize("start", [-1, 8])
def test_a_chunk_beyond_the_buffer_is_refused(start: int) -> None:
    merged, (cos, sin) = torch.zeros(2, 12, 2, 8), turns(torch.arange(12), 8)
    with pytest.raises(ValueError, match="has no place in"):
        place(merged, noise(2, 5, 2, 8), start, cos=cos, sin=sin)
    assert not merged.any()


def test_computed_rows_replace_what_was_placed() -> None:
    merged, keys, values = torch.zeros(2, 10, 2, 8), noise(3, 2, 8), noise(3, 2, 8, seed=1)
    positions = torch.tensor([1, 4, 9])
    scatter_rows(merged, keys, values, positions)
    assert torch.equal(merged[0, positions], keys)
    assert torch.equal(merged[1, positions], values)
    untouched = [0, 2, 3, 5, 6, 7, 8]
    assert not merged[:, untouched].any()


def test_attention_received_is_the_sum_of_the_weights() -> None:
    torch.manual_seed(3)
    q, k = torch.randn(5, 4, 8), torch.randn(20, 2, 8)
    positions = torch.tensor([3, 8, 12, 13, 19])
    scores = torch.einsum("rhd,khd->hrk", q, k.repeat_interleave(2, 1)) * 0.3
    visible = torch.arange(20) <= positions[:, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).mean(0)
    weights[torch.arange(5), positions] = 0.0
    _, found = attention_mass(q, k, Visibility(positions), torch.tensor([0, 20]), scale=0.3)
    assert torch.allclose(found, weights.sum(0), atol=1e-5)
    assert torch.equal(attention_received(q, k, Visibility(positions), scale=0.3), found)


def test_attention_is_written_to_the_given_tensor() -> None:
    q, k, v = noise(3, 4, 8), noise(20, 2, 8, seed=1), noise(20, 2, 8, seed=2)
    visible = Visibility(torch.tensor([3, 8, 19]))
    room = torch.full((3, 2, 4, 8), torch.nan)
    attention(q, k, v, visible, scale=0.3, out=room[:, 1])
    assert torch.equal(room[:, 1], attention(q, k, v, visible, scale=0.3))
    assert room[:, 0].isnan().all()


def test_absent_keys_are_seen_by_no_row() -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(6, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    positions, absent = torch.arange(14, 20), torch.tensor([2, 3, 9])
    there = torch.tensor([p for p in range(20) if p not in absent])
    present = Visibility(positions, absent=absent)
    moved = Visibility(positions - 3)  # the same rows in a world without those keys
    expected = attention(q, k[there], v[there], moved, scale=0.3)
    assert torch.allclose(attention(q, k, v, present, scale=0.3), expected, atol=1e-5)
    capped = attention(q, k, v, present, scale=0.3, softcap=5.0)
    assert torch.allclose(
        capped, attention(q, k[there], v[there], moved, scale=0.3, softcap=5.0), atol=1e-5
    )
    one = row_blocks(Visibility(torch.tensor([19]), absent=absent))[0]
    assert one.hidden is not None
    assert one.hidden.sum() == 3
    for path in paths_for("some"):
        found = attention(q, k, v, present, scale=0.3, paths=AttentionPaths({"few": path}))
        assert torch.allclose(found, expected, atol=1e-5)


# -- visibility -------------------------------------------------------------------------------------------------------


def test_what_is_visible_is_prepared_once_and_shared_by_all_layers() -> None:
    calls: list[Visibility] = []

    def counted(visible: Visibility) -> tuple[RowBlock, ...]:
        calls.append(visible)
        return row_blocks(visible)

    visible = Visibility(torch.tensor([2, 9]), window=7)
    first = visible.prepared(counted)
    assert all(visible.prepared(counted) is first for _ in range(3))
    assert calls == [visible]


def test_kernels_of_one_pass_share_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Visibility] = []

    def counted(visible: Visibility) -> tuple[RowBlock, ...]:
        calls.append(visible)
        return row_blocks(visible)

    for module in ("attention_paths", "attention_mass"):
        monkeypatch.setattr(f"cachecraft_rag.kernels.{module}.row_blocks", counted)
    q, k, v, positions, how = tensors(CASES["several blocks"], torch.float32)
    visible = Visibility(positions)
    for _ in range(3):  # layers
        attention(q, k, v, visible, **how)
        attention_mass(q, k, visible, torch.tensor([0, k.shape[0]]), **how)
    assert calls == [visible]
    attention(q, k, v, other := Visibility(positions), **how)
    assert calls == [visible, other]


def test_each_kernel_prepares_what_it_needs_and_no_two_passes_share() -> None:
    one, other = Visibility(torch.tensor([3])), Visibility(torch.tensor([3]))

    def last(visible: Visibility) -> int:
        return int(visible.positions[-1])

    assert one.prepared(last) == 3
    assert len(one.prepared(row_blocks)) == 1
    assert one.prepared(row_blocks) is not other.prepared(row_blocks)
    assert one != other  # tensors have no single truth value, so passes are compared by identity
