"""The compiled kernels of every instruction set that this CPU has, against float64."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import RotaryTables
from cachecraft_rag.compute.stale_tokens.drift_correction import DriftCorrection, StaleChunk
from cachecraft_rag.kernels.attention import attention
from cachecraft_rag.kernels.attention_mass import attention_mass
from cachecraft_rag.kernels.attention_paths import AttentionPaths
from cachecraft_rag.kernels.cpu import calls, library
from cachecraft_rag.kernels.cpu.calls import differs
from cachecraft_rag.kernels.cpu.library import (
    SETTING,
    available,
    description,
    kernels,
    kernels_for,
    reason,
)
from cachecraft_rag.kernels.placing import place
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.kernels.visibility import Visibility

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
COMPILED = AttentionPaths(dict.fromkeys(("few", "some", "front"), "compiled"))
needs_build = pytest.mark.skipif(
    not available(), reason="the compiled kernels were not built: no C compiler"
)


@pytest.fixture(params=list(available()) or ["torch"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SETTING, request.param)
    return str(request.param)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turns(positions: int, width: int) -> tuple[Tensor, Tensor]:
    angles = (
        (torch.arange(positions)[:, None] * 50.0 ** (-torch.arange(0, width, 2) / width))
        .double()
        .repeat(1, 2)
    )
    return angles.cos(), angles.sin()


def weights(
    q: Tensor,
    k: Tensor,
    visible: Visibility,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Plain softmax `[heads, rows, keys]`."""
    scores = (
        torch.einsum("rhd,khd->hrk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    )
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys, own = torch.arange(len(k)), visible.positions[:, None]
    hidden = keys > own
    if visible.window is not None:
        hidden |= keys <= own - visible.window
    if visible.absent is not None:
        hidden |= torch.isin(keys, visible.absent)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    sink_scores = sinks.double()[:, None, None].expand(-1, len(q), 1)
    return torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]


def near(found: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    return float((found.double() - right).abs().max()) <= TOLERANCE[dtype] * max(
        1.0, float(right.abs().max())
    )


CASES: dict[str, dict[str, Any]] = {
    "one row, one key": {"positions": [0], "keys": 1},
    "one row": {"positions": [200], "keys": 300},
    "scattered": {"positions": [0, 1, 63, 64, 65, 127, 128, 300], "keys": 301},
    "many": {"positions": [*range(5, 700, 3)], "keys": 710},
    "a front": {"positions": [*range(90)], "keys": 90},
    "window": {"positions": [3, 40, 41, 260, 699], "keys": 700, "window": 130},
    "window of one": {"positions": [0, 5, 300], "keys": 310, "window": 1},
    "absent": {"positions": [9, 150, 190], "keys": 200, "absent": [*range(10, 140), 189]},
    "soft cap": {"positions": [7, 90, 140], "keys": 150, "softcap": 3.0},
    "soft cap and window": {"positions": [7, 90, 140], "keys": 150, "softcap": 0.5, "window": 60},
    "sinks, one row": {"positions": [600], "keys": 610, "sinks": True},
    "sinks, scattered": {"positions": [0, 7, 90, 140, 300], "keys": 301, "sinks": True},
    "sinks, many": {"positions": [*range(5, 700, 3)], "keys": 710, "sinks": True, "window": 90},
    "sinks and soft cap": {"positions": [7, 90, 140], "keys": 150, "sinks": True, "softcap": 3.0},
    "every head its own keys": {"positions": [7, 90], "keys": 99, "heads": 3, "kv_heads": 3},
    "one key head": {"positions": [7, 90, 91, 92, 93], "keys": 99, "heads": 7, "kv_heads": 1},
    "small heads": {"positions": [7, 90], "keys": 99, "dim": 8},
    "odd heads": {"positions": [7, 90, 91], "keys": 99, "dim": 80},
    "heads of 96": {"positions": [7, 90, 91], "keys": 99, "dim": 96},
    "heads of 128": {"positions": [7, 90, 91], "keys": 199, "dim": 128},
    "heads of 256": {"positions": [7, 90, 91], "keys": 199, "dim": 256},
    "more rows, every head its own keys": {
        "positions": [*range(3, 140, 9)],
        "keys": 150,
        "heads": 2,
        "kv_heads": 2,
    },
    **{
        f"more rows, heads of {dim}": {"positions": [*range(3, 140, 9)], "keys": 150, "dim": dim}
        for dim in (2, 8, 34, 80, 96, 128, 256)
    },
}


def made(
    case: dict[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Visibility, dict[str, Any]]:
    heads, kv_heads, dim = case.get("heads", 6), case.get("kv_heads", 2), case.get("dim", 64)
    q = noise(len(case["positions"]), heads, dim).to(dtype)
    k, v = (noise(case["keys"], kv_heads, dim, seed=seed).to(dtype) for seed in (1, 2))
    absent = torch.tensor(case["absent"]) if "absent" in case else None
    visible = Visibility(torch.tensor(case["positions"]), window=case.get("window"), absent=absent)
    sinks = 2 * noise(heads, seed=3).float() if case.get("sinks") else None
    return (
        q,
        k,
        v,
        visible,
        {"scale": 1.5 * dim**-0.5, "softcap": case.get("softcap"), "sinks": sinks},
    )


@needs_build
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_mass_are_a_plain_softmax(
    name: str, dtype: torch.dtype, instructions: str
) -> None:
    q, k, v, visible, how = made(CASES[name], dtype)
    exact = weights(q.double(), k.double(), visible, **how)
    right = torch.einsum(
        "hrk,khd->rhd", exact, v.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    )
    run = kernels_for(q, k, v)
    assert run is not None
    assert run.instructions == instructions
    assert near(calls.attend(run, q, k, v, visible, **how), right, dtype)
    bounds = torch.tensor([0, len(k) // 3, len(k) // 3, len(k)])  # one segment is empty
    mass, received = attention_mass(q, k, visible, bounds, **how)
    mean = exact.mean(0).scatter(1, visible.positions[:, None], 0.0)
    parts = [mean[:, a:b].sum(1) for a, b in pairwise(bounds.tolist())]
    assert near(mass, torch.stack(parts, 1), torch.float32 if dtype == torch.float32 else dtype)
    assert near(received, mean.sum(0), dtype)


@needs_build
def test_uninitialised_keys_after_the_last_row_are_not_read(instructions: str) -> None:
    q, k, v, visible, how = made({"positions": [3, 70], "keys": 200}, torch.bfloat16)
    right = attention(q, k[:71], v[:71], visible, paths=COMPILED, **how)
    k[71:], v[71:] = torch.nan, torch.nan
    assert torch.equal(attention(q, k, v, visible, paths=COMPILED, **how), right)


@needs_build
def test_views_are_taken_as_they_lie(instructions: str) -> None:
    q, k, v, visible, how = made(CASES["scattered"], torch.float32)
    # head by head in memory
    merged = torch.stack((k, v)).transpose(1, 2).contiguous().transpose(1, 2)
    wide = q.transpose(0, 1).contiguous().transpose(0, 1)
    right = attention(q, k, v, visible, paths=COMPILED, **how)
    assert torch.equal(attention(wide, merged[0], merged[1], visible, paths=COMPILED, **how), right)


@needs_build
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sums_do_not_depend_on_the_number_of_threads(dtype: torch.dtype, instructions: str) -> None:
    q, k, v, visible, how = made(CASES["many"], dtype)
    bounds, before, found = torch.tensor([0, 300, 710]), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            mass = attention_mass(q, k, visible, bounds, **how)
            found.append((attention(q, k, v, visible, paths=COMPILED, **how), *mass))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_build
def test_two_threads_of_python_may_call_at_once(instructions: str) -> None:
    cases = [made(CASES[name], torch.float32) for name in ("many", "scattered")]
    alone = [attention(q, k, v, visible, paths=COMPILED, **how) for q, k, v, visible, how in cases]
    wrong: list[int] = []

    def repeat(number: int) -> None:
        q, k, v, visible, how = cases[number]
        for _ in range(20):
            if not torch.equal(attention(q, k, v, visible, paths=COMPILED, **how), alone[number]):
                wrong.append(number)

    threads = [threading.Thread(target=repeat, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_build
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("dim", "width"), [(2, 2), (6, 6), (80, 20), (64, 64), (64, 0), (128, 64), (256, 256)]
)
@pytest.mark.parametrize("tokens", [0, 1, 77])
def test_a_chunk_is_rotated_into_its_place(
    tokens: int, dim: int, width: int, dtype: torch.dtype, instructions: str
) -> None:
    chunk, (cos, sin) = (
        noise(2, tokens, 3, dim).to(dtype),
        (turn.to(dtype) for turn in turns(100, width)),
    )
    merged = torch.full((2, 100, 3, dim), torch.nan, dtype=dtype)
    place(merged, chunk, 20, cos=cos, sin=sin)
    stop, half, x = 20 + tokens, width // 2, chunk[0].double()
    turned = torch.cat((-x[..., half:width], x[..., :half]), -1) * sin[20:stop, None].double()
    right = torch.cat((x[..., :width] * cos[20:stop, None].double() + turned, x[..., width:]), -1)
    if tokens:
        assert near(merged[0, 20:stop], right, dtype)
    assert torch.equal(merged[1, 20:stop], chunk[1])
    assert torch.equal(rotate(chunk[0], cos[20:stop], sin[20:stop]), merged[0, 20:stop])
    assert merged[:, :20].isnan().all()
    assert merged[:, stop:].isnan().all()


@needs_build
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("dim", "width"), [(64, 64), (20, 12), (20, 0)])
def test_drift_moves_as_torch_does(
    dim: int, width: int, dtype: torch.dtype, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = noise(2, 200, 2, dim).to(dtype)
    cos, sin = (1.3 * turn.to(dtype) for turn in turns(200, width))  # 1.3: a scaling that stretches
    positions = np.array([12, 20, 31, 90, 150, 199])
    rows = Rows.of([0, 10, 80, 160, 200], new=range(160, 200)).mark(
        positions[:5], RowReason.RECOMPUTED
    )
    keys, values = noise(6, 2, dim, seed=1).to(dtype), noise(6, 2, dim, seed=2).to(dtype)
    chunks = [StaleChunk(1, [range(10, 12), range(13, 80)]), StaleChunk(2, [range(80, 160)])]
    found = []
    for setting in (instructions, "torch"):
        monkeypatch.setenv(SETTING, setting)
        drift, changed = (
            DriftCorrection(chunks, strength=0.7, rotary=RotaryTables([0], [(cos, sin)])),
            merged.clone(),
        )
        drift.locate(positions, rows)
        drift.correct(0, changed, keys, values)
        found.append(changed)
    assert not torch.equal(found[0], merged)
    assert near(found[0], found[1].double(), dtype)
    assert torch.equal(found[0][:, 160:], merged[:, 160:])


@needs_build
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 64), (3, 37), (9, 130)])
def test_norms_and_gates_of_any_width(
    rows: int, width: int, dtype: torch.dtype, instructions: str
) -> None:
    x, add, weight = (
        noise(rows, width).to(dtype),
        noise(rows, width, seed=1).to(dtype),
        noise(width, seed=2).to(dtype),
    )
    run, changed, gate = kernels(), x.clone(), x.clone()
    assert run is not None
    for seen, found in (
        (x, calls.norm(run, x, weight, 1e-3)),
        (x + add, calls.norm(run, changed, weight, 1e-3, add)),
    ):
        root = (seen.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
        assert near(found, seen.double() / root * weight.double(), dtype)
    assert torch.equal(changed, x + add)
    assert calls.gated(run, gate, add) is gate
    assert near(gate, torch.nn.functional.silu(x.double()) * add.double(), dtype)


@needs_build
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "outs"), [(1, 1), (37, 33), (64, 64), (166, 70)])
def test_products_of_few_rows(width: int, outs: int, dtype: torch.dtype, instructions: str) -> None:
    weight, bias = noise(outs, width, seed=1).to(dtype), noise(outs, seed=2).to(dtype)
    run = kernels()
    assert run is not None
    for rows in range(1, 9):
        x = noise(rows, width).to(dtype)
        right = x.double() @ weight.double().T
        assert near(calls.linear(run, x, weight, None), right, dtype)
        assert near(calls.linear(run, x, weight, bias), right + bias.double(), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_torchs(dtype: torch.dtype) -> None:
    q, k, v, visible, how = made(CASES["scattered"], dtype)
    assert kernels_for(q) is None
    attention(q, k, v, visible, paths=COMPILED, **how)


def test_the_setting_switches_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "torch")
    assert kernels() is None
    assert (description(), reason()) == ("torch", f"{SETTING}=torch")


@needs_build
def test_a_setting_that_this_cpu_does_not_know_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(SETTING, "abacus")
    assert description() == list(available())[-1]
    assert "abacus" in caplog.text


def test_a_library_that_cannot_be_loaded_is_none(tmp_path: Path) -> None:
    (tmp_path / "native.so").write_bytes(b"not a library")
    assert available(tmp_path) == {}


@needs_build
@pytest.mark.parametrize("part", ["attend", "mass", "rotate", "place"])
def test_kernels_that_are_wrong_are_noticed(part: str, instructions: str) -> None:
    right = available()[instructions]
    assert differs(right) == ""

    def wrong(call: Any, *rest: object) -> None:
        if part in ("attend", "mass"):
            call._obj.scale *= 1.5
        else:
            call._obj.cos = call._obj.sin
        right(part, call, *rest)

    assert differs(library.Kernels(instructions, right.functions | {part: wrong}))  # type: ignore[dict-item]
