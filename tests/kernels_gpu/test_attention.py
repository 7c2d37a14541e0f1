"""Attention, the mass of segments and what keys receive, in Triton, against float64 matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cachecraft_rag.kernels.attention import attention, attention_with_mass
from cachecraft_rag.kernels.attention_mass import attention_mass, attention_received, segment_mass
from cachecraft_rag.kernels.gpu.attention import MOST_SEGMENTS, Attended, attend
from cachecraft_rag.kernels.gpu.choice import LARGEST_HEAD
from cachecraft_rag.kernels.gpu.combine import combine
from cachecraft_rag.kernels.gpu.received import received
from cachecraft_rag.kernels.gpu.tiles import Tiling
from cachecraft_rag.kernels.visibility import Visibility
from tests.kernels_gpu import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SMALL = Tiling(rows=16, keys=16, warps=4, stages=1)  # several tiles even of few rows and keys


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def on_device(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_as_the_reference(
    q: Tensor, k: Tensor, v: Tensor | None, visible: Visibility, **how: Any
) -> Attended:
    """Attention and what keys receive equal their references; returns what was found."""
    launch = {name: how.pop(name) for name in ("splits", "tiling") if name in how}
    found = attend(q, k, v, visible, **how, **launch)
    expected = reference.attend(q, k, v, visible, **how)
    tolerance = TOLERANCE[q.dtype]
    for name in ("out", "lse", "mass"):
        ours, right = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (right is None), name
        if ours is not None:
            assert ours.shape == right.shape, name
            assert torch.allclose(ours.double(), right, atol=tolerance, rtol=tolerance), name
    assert found.out is None or found.out.dtype == q.dtype
    how.pop("bounds", None)
    how.pop("sinks", None)  # what a row gives to its sink shows in its lse
    tiling = launch.get("tiling")
    keys = received(q, k, expected.lse.float(), visible, **how, tiling=tiling)
    right = reference.received(q, k, expected.lse, visible, **how)
    assert keys.shape == right.shape
    assert torch.allclose(
        keys.double(), right, atol=tolerance * max(1, len(q) // 8), rtol=tolerance
    )
    return found


CASES: dict[str, dict[str, Any]] = {
    "scattered rows": {"positions": [0, 3, 4, 11, 30, 31, 36]},
    "one row": {"positions": [36]},
    "one key": {"positions": [0], "keys": 1},
    "one head each": {"positions": [2, 9], "heads": 2, "kv_heads": 2},
    "one key head for all": {"positions": [2, 9, 29], "heads": 6, "kv_heads": 1},
    "a group of three": {"positions": [0, 7, 8, 9, 20, 21, 33], "heads": 6, "kv_heads": 2},
    "window": {"positions": [0, 5, 6, 25, 30], "window": 7},
    "window of one": {"positions": [0, 5, 30], "window": 1},
    "window wider than the prompt": {"positions": [0, 5, 30], "window": 99},
    "window over several tiles": {"positions": [*range(0, 90, 4)], "window": 35, "keys": 91},
    "soft cap": {"positions": [0, 5, 30], "softcap": 2.0},
    "soft cap and window": {"positions": [3, 5, 30], "softcap": 2.0, "window": 4},
    "absent keys": {"positions": [9, 20, 36], "absent": [0, 1, 2, 8, 10, 33]},
    "absent keys in a window": {
        "positions": [9, 20, 36],
        "absent": [0, 1, 2, 8, 10, 33],
        "window": 5,
    },
    "a row that sees nothing": {"positions": [2, 20], "absent": [0, 1, 2]},
    "sinks": {"positions": [0, 5, 30], "sinks": [0.5, -1.0, 2.0, 0.0]},
    "sinks, soft cap and window": {
        "positions": [3, 5, 30],
        "softcap": 2.0,
        "window": 4,
        "sinks": [1.0, 2.0, 3.0, -9.0],
    },
    "several tiles": {"positions": [*range(1, 50, 2)], "keys": 60},
    "every row": {"positions": [*range(37)]},
}


def tensors(
    case: dict[str, Any], dtype: torch.dtype, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Visibility]:
    heads, kv_heads, keys = case.get("heads", 4), case.get("kv_heads", 2), case.get("keys", 37)
    absent = on_device(case["absent"]) if "absent" in case else None
    visible = Visibility(on_device(case["positions"]), window=case.get("window"), absent=absent)
    q = noise(len(case["positions"]), heads, head_dim, dtype=dtype)
    return q, *(noise(keys, kv_heads, head_dim, seed=seed, dtype=dtype) for seed in (1, 2)), visible


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in CASES for dtype in (torch.float32, torch.bfloat16)]
    + [(name, torch.float16) for name in ("scattered rows", "soft cap and window", "absent keys")],
)
def test_every_feature(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    q, k, v, visible = tensors(case, dtype, 16)
    # one segment is empty
    bounds = on_device([0, 4, 4, 9, len(k)] if len(k) > 9 else [0, 0, len(k)])
    sinks = on_device(case["sinks"], torch.float32) if "sinks" in case else None
    how = {"scale": 0.3, "softcap": case.get("softcap"), "sinks": sinks, "bounds": bounds}
    found = assert_as_the_reference(q, k, v, visible, **how, tiling=SMALL)
    assert found.mass is not None
    assert not found.mass[:, 1 if len(k) > 9 else 0].any()


@pytest.mark.parametrize("splits", [2, 8])
@pytest.mark.parametrize(
    "name", ["one row", "one key", "several tiles", "soft cap and window", "absent keys", "sinks"]
)
def test_keys_split_among_programs(name: str, splits: int) -> None:
    q, k, v, visible = tensors(CASES[name], torch.float32, 16)
    case = CASES[name]
    sinks = on_device(case["sinks"], torch.float32) if "sinks" in case else None
    how = {
        "scale": 0.3,
        "softcap": case.get("softcap"),
        "sinks": sinks,
        "bounds": on_device([0, 1, len(k)]),
    }
    assert_as_the_reference(q, k, v, visible, **how, tiling=SMALL, splits=splits)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 128, 192, 256])
def test_head_dims_with_the_tiles_that_are_used(head_dim: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        case = {"positions": [0, 3, 40, 69], "keys": 70}
        q, k, v, visible = tensors(case, dtype, head_dim)
        assert_as_the_reference(
            q, k, v, visible, scale=head_dim**-0.5, bounds=on_device([0, 33, 70])
        )


def test_without_values_and_without_bounds() -> None:
    q, k, v, visible = tensors(CASES["scattered rows"], torch.float32, 16)
    whole = assert_as_the_reference(q, k, v, visible, scale=0.3, bounds=on_device([0, 10, 37]))
    mass = assert_as_the_reference(q, k, None, visible, scale=0.3, bounds=on_device([0, 10, 37]))
    out = assert_as_the_reference(q, k, v, visible, scale=0.3)
    assert mass.out is None
    assert out.mass is None
    assert whole.mass is not None
    assert torch.equal(whole.mass, mass.mass)
    # without bounds few rows have smaller tiles, whose sums are rounded in another order
    assert torch.allclose(whole.out, out.out, atol=1e-5)


def test_more_segments_than_one_launch_sums_up() -> None:
    case = {"positions": [0, 100, 299], "keys": 300, "heads": 2, "kv_heads": 1}
    q, k, v, visible = tensors(case, torch.float32, 16)
    found = assert_as_the_reference(
        q, k, v, visible, scale=0.3, bounds=torch.arange(0, 301, 2, device=DEVICE)
    )
    assert found.mass is not None
    assert found.mass.shape[1] == 150 > MOST_SEGMENTS


def test_no_rows() -> None:
    q, k, v, visible = tensors({"positions": []}, torch.float32, 16)
    found = attend(q, k, v, visible, scale=1.0, bounds=on_device([0, 3, 37]))
    assert found.out is not None
    assert found.mass is not None
    assert (found.out.shape, found.lse.shape, found.mass.shape) == ((0, 4, 16), (0, 4), (0, 2))


def test_views_as_the_layers_hand_them_over() -> None:
    q, k, v, visible = tensors(CASES["scattered rows"], torch.float32, 16)
    merged = torch.stack((k, v))
    wide = q.transpose(0, 1).contiguous().transpose(0, 1)
    expected = attend(q, k, v, visible, scale=0.3).out
    assert torch.equal(attend(wide, merged[0], merged[1], visible, scale=0.3).out, expected)


@pytest.mark.parametrize("splits", [1, 3])
def test_the_output_is_written_to_the_given_tensor(splits: int) -> None:
    q, k, v, visible = tensors(CASES["several tiles"], torch.bfloat16, 80)
    how = {"scale": 0.3, "tiling": SMALL, "splits": splits}
    room = torch.full((len(q) + 2, *q.shape[1:]), torch.nan, dtype=q.dtype, device=DEVICE)
    written = attend(q, k, v, visible, **how, out=room[1:-1]).out
    assert written is not None
    assert written.data_ptr() == room[1:-1].data_ptr()
    assert torch.equal(written, attend(q, k, v, visible, **how).out)
    assert room[[0, -1]].isnan().all()


def test_the_output_of_several_launches_is_written_to_the_given_tensor() -> None:
    case = {"positions": [0, 100, 299], "keys": 300, "heads": 2, "kv_heads": 1}
    q, k, v, visible = tensors(case, torch.float32, 16)
    bounds = torch.arange(0, 301, 2, device=DEVICE)
    assert len(bounds) > MOST_SEGMENTS + 1
    room = torch.full_like(q, torch.nan)
    written = attend(q, k, v, visible, scale=0.3, bounds=bounds, out=room).out
    assert written is not None
    assert written.data_ptr() == room.data_ptr()
    assert torch.equal(room, attend(q, k, v, visible, scale=0.3, bounds=bounds).out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_that_the_kernel_cannot_write_is_copied(dtype: torch.dtype) -> None:
    """Views with gaps, and other dtypes."""
    q, k, v, visible = tensors(CASES["scattered rows"], torch.float32, 16)
    room = torch.full((len(q), 2, *q.shape[1:]), torch.nan, dtype=dtype, device=DEVICE)
    attention(q, k, v, visible, scale=0.3, out=room[:, 1])
    assert torch.equal(room[:, 1], attention(q, k, v, visible, scale=0.3).to(dtype))
    assert room[:, 0].isnan().all()


def test_what_keys_receive_needs_no_segments() -> None:
    q, k, _, visible = tensors(CASES["scattered rows"], torch.float32, 16)
    found = attention_received(q, k, visible, scale=0.3)
    _, expected = attention_mass(q, k, visible, on_device([0, len(k)]), scale=0.3)
    assert torch.allclose(found, expected, atol=1e-6)
    none = Visibility(on_device([]))
    assert not attention_received(q[:0], k, none, scale=0.3).any()


def test_heads_too_large_for_the_kernels_attend_by_torch() -> None:
    """Such as those of 512 dimensions in some layers of Gemma 4."""
    q, k, v, visible = tensors(CASES["scattered rows"], torch.float32, LARGEST_HEAD + 16)
    bounds = on_device([0, 9, len(k)])
    expected = reference.attend(q, k, v, visible, scale=0.1, bounds=bounds)
    keys = reference.received(q, k, expected.lse, visible, scale=0.1)
    out, mass = attention_with_mass(q, k, v, visible, bounds, scale=0.1)
    pairs = [
        (out, expected.out),
        (mass, expected.mass),
        (attention(q, k, v, visible, scale=0.1), expected.out),
        (segment_mass(q, k, visible, bounds, scale=0.1), expected.mass),
        (attention_mass(q, k, visible, bounds, scale=0.1)[1], keys),
        (attention_received(q, k, visible, scale=0.1), keys),
    ]
    for ours, right in pairs:
        assert right is not None
        assert torch.allclose(ours.double(), right, atol=1e-4)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_combine_is_its_reference() -> None:
    parts, lses, masses = (
        noise(4, 3, 2, 16),
        noise(4, 3, 2, seed=1),
        noise(4, 3, 2, 5, seed=2).abs(),
    )
    lses[1:, 0], lses[:, 1, 0] = -torch.inf, -torch.inf  # one part has it all; none has anything
    found = combine(parts, lses, masses, dtype=torch.float32)
    expected = reference.combine(
        parts.double(), lses.double(), masses.double(), dtype=torch.float64
    )
    for ours, right in zip(found, expected, strict=True):
        assert ours is not None
        assert right is not None
        assert torch.allclose(ours.double(), right, atol=1e-6)


@pytest.mark.parametrize(
    ("pairs", "kind", "rows"),
    [
        (1, torch.bfloat16, 16),
        (16, torch.bfloat16, 16),
        (17, torch.bfloat16, 128),
        (40, torch.float32, 32),
    ],
)
def test_tiles_have_two_sizes_each_of_which_is_compiled_once(
    pairs: int, kind: torch.dtype, rows: int
) -> None:
    assert Tiling.of(torch.empty(1, 1, 128, dtype=kind), pairs=pairs).rows == rows


def test_few_rows_are_split_over_keys_and_many_are_not() -> None:
    tiling, device = Tiling.of(noise(1, 4, 64), pairs=4), torch.device(DEVICE)
    assert tiling.splits(device, programs=2, keys=16384) > 1
    assert tiling.splits(device, programs=2, keys=100) == 1
    assert tiling.splits(device, programs=10_000, keys=16384) == 1


def test_what_does_not_fit_together_is_refused() -> None:
    q, k, v, visible = tensors(CASES["scattered rows"], torch.float32, 16)
    wrong: list[tuple[Any, ...]] = [
        (q.double(), k, v, visible),
        (q, k.half(), v, visible),
        (q, k, v.half(), visible),
        (q[:, :3], k, v, visible),
        (q, k[..., :8], v[..., :8], visible),
        (q, k, v[:5], visible),
        (q[:2], k, v, visible),
        (noise(7, 4, 512), noise(37, 2, 512), noise(37, 2, 512), visible),
        (q, k.transpose(0, 2).contiguous().transpose(0, 2), v, visible),
    ]
    for a, b, c, sight in wrong:
        with pytest.raises(ValueError, match=r"must|multiple|values|positions|dimensions"):
            attend(a, b, c, sight, scale=1.0)
    with pytest.raises(ValueError, match="4 query heads need 4 sinks"):
        attend(q, k, v, visible, scale=1.0, sinks=noise(2))
    with pytest.raises(ValueError, match="lse must be"):
        received(q, k, noise(7, 3), visible, scale=1.0)
