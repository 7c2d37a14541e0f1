"""Drift correction: what is not recomputed follows what is, and only that."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import RotaryTables
from cachecraft_rag.compute.stale_tokens.drift_correction import DriftCorrection, StaleChunk
from cachecraft_rag.kernels.rope import rotate
from cachecraft_rag.model.decoder import Decoder

MakeDecoder = Callable[..., Decoder]
TOKENS, START = 30, 10
SPAN = range(START, START + TOKENS)
BOUNDS = [0, START, START + TOKENS, START + TOKENS + 5]
RECOMPUTED = [START + 9, START + 14, START + 20]


@pytest.fixture(params=["Llama", "Phi3"])  # Phi-3 rotates a part of each head only
def decoder(tiny_decoder: MakeDecoder, request: pytest.FixtureRequest) -> Decoder:
    return tiny_decoder(request.param)


class Layer:
    """One layer of a merged buffer, and the same keys and values after every token moved by one vector."""

    def __init__(self, decoder: Decoder, *, stretch: float = 1.0) -> None:
        torch.manual_seed(0)
        layout = decoder.layout
        positions = START + TOKENS + 5
        self.cos, self.sin = (stretch * part for part in decoder.rope(torch.arange(positions)))
        raw = torch.randn(2, positions, layout.kv_heads, layout.head_dim)
        self.moved_by = torch.randn(2, 1, layout.kv_heads, layout.head_dim)
        self.merged = self.placed(raw)
        self.new = self.placed(raw + self.moved_by)

    def placed(self, raw: Tensor) -> Tensor:
        return torch.stack((rotate(raw[0], self.cos, self.sin), raw[1]))

    def drift(self, stale: list[StaleChunk], *, strength: float = 1.0) -> DriftCorrection:
        return DriftCorrection(
            stale, strength=strength, rotary=RotaryTables([0], [(self.cos, self.sin)])
        )

    def corrected(
        self,
        rows: list[int],
        *,
        strength: float = 1.0,
        reason: RowReason = RowReason.RECOMPUTED,
        segment: int = 1,
    ) -> Tensor:
        """The layer after the correction, when these rows of a segment run for this reason."""
        drift = self.drift([StaleChunk(segment, [SPAN])], strength=strength)
        drift.locate(np.array(rows), Rows.of(BOUNDS).mark(rows, reason))
        merged = self.merged.clone()
        drift.correct(0, merged, self.new[0, rows], self.new[1, rows])
        return merged


@pytest.mark.parametrize("stretch", [1.0, 1.3])  # some rope scalings stretch what they rotate
def test_a_change_that_all_tokens_share_is_found_at_every_position(
    decoder: Decoder, stretch: float
) -> None:
    layer = Layer(decoder, stretch=stretch)
    merged = layer.corrected(RECOMPUTED)
    stale = [p for p in SPAN if p not in RECOMPUTED]
    assert torch.allclose(merged[:, stale], layer.new[:, stale], atol=1e-4)
    others = [p for p in range(merged.shape[1]) if p not in SPAN]
    assert torch.equal(merged[:, others], layer.merged[:, others])


def test_the_rest_follows_by_the_strength(decoder: Decoder) -> None:
    layer = Layer(decoder)
    stale = [p for p in SPAN if p not in RECOMPUTED]
    halfway = (layer.merged + layer.new)[:, stale] / 2
    assert torch.allclose(layer.corrected(RECOMPUTED, strength=0.5)[:, stale], halfway, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "reason", "segment"),
    [
        ([START + 9], RowReason.RECOMPUTED, 1),
        (RECOMPUTED, RowReason.COMPUTED_INSTEAD, 1),
        (RECOMPUTED, RowReason.NEW, 1),
        (RECOMPUTED, RowReason.RECOMPUTED, 2),
    ],
    ids=[
        "one token",
        "what was stored did not come",
        "nothing was stored",
        "tokens of another chunk",
    ],
)
def test_what_is_no_evidence_moves_nothing(
    decoder: Decoder, rows: list[int], reason: RowReason, segment: int
) -> None:
    layer = Layer(decoder)
    assert torch.equal(layer.corrected(rows, reason=reason, segment=segment), layer.merged)


def test_each_chunk_follows_its_own_tokens(decoder: Decoder) -> None:
    layer = Layer(decoder)
    first, second = range(START, START + 15), range(START + 15, START + 30)
    recomputed = [START + 9, START + 11, START + 25, START + 27]
    bounds = [0, START, START + 15, START + 30, START + 35]
    drift = layer.drift([StaleChunk(1, [first]), StaleChunk(2, [second])])
    drift.locate(np.array(recomputed), Rows.of(bounds, recomputed=recomputed))
    new = layer.merged.clone()
    new[:, list(first)] = layer.new[:, list(first)]  # the second chunk does not change
    merged = layer.merged.clone()
    drift.correct(0, merged, new[0, recomputed], new[1, recomputed])
    stale = [p for p in SPAN if p not in recomputed]
    assert torch.allclose(merged[:, stale], new[:, stale], atol=1e-4)


def test_what_an_earlier_pass_computed_stays(decoder: Decoder) -> None:
    layer = Layer(decoder)
    done = START + 3
    drift = layer.drift([StaleChunk(1, [range(START, done), range(done + 1, START + TOKENS)])])
    drift.locate(np.array(RECOMPUTED), Rows.of(BOUNDS, recomputed=RECOMPUTED))
    merged = layer.merged.clone()
    drift.correct(0, merged, layer.new[0, RECOMPUTED], layer.new[1, RECOMPUTED])
    assert torch.equal(merged[:, done], layer.merged[:, done])
    assert torch.allclose(
        merged[:, done - 1 : done + 2 : 2], layer.new[:, done - 1 : done + 2 : 2], atol=1e-4
    )


def test_evidence_that_does_not_come_is_none_from_then_on(decoder: Decoder) -> None:
    """A row that runs already, and whose stored values were lost on the way: memory holds anything there."""
    layer = Layer(decoder)
    drift, rows = layer.drift([StaleChunk(1, [SPAN])]), Rows.of(BOUNDS, recomputed=RECOMPUTED)
    drift.locate(np.array(RECOMPUTED), rows)
    drift.locate(np.array(RECOMPUTED), rows.mark(RECOMPUTED[:1], RowReason.COMPUTED_INSTEAD))
    merged = layer.merged.clone()
    merged[:, RECOMPUTED[0]] = float("nan")
    drift.correct(0, merged, layer.new[0, RECOMPUTED], layer.new[1, RECOMPUTED])
    stale = [p for p in SPAN if p not in RECOMPUTED]
    assert torch.allclose(merged[:, stale], layer.new[:, stale], atol=1e-4)


def test_evidence_that_is_gone_altogether_moves_nothing(decoder: Decoder) -> None:
    layer = Layer(decoder)
    drift, rows = layer.drift([StaleChunk(1, [SPAN])]), Rows.of(BOUNDS, recomputed=RECOMPUTED)
    drift.locate(np.array(RECOMPUTED), rows)
    drift.locate(np.array(RECOMPUTED[2:]), rows)  # the pass goes on with fewer rows
    merged = layer.merged.clone()
    drift.correct(0, merged, layer.new[0, RECOMPUTED[2:]], layer.new[1, RECOMPUTED[2:]])
    assert torch.equal(merged, layer.merged)
