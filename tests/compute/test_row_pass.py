"""One pass of rows, and several passes of different requests as one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cachecraft_rag.compute.captures.capture import (
    AttentionAccumulator,
    AttentionStatistics,
    CaptureRecorder,
)
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.row_pass import Observer, RowPass, advance
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import AttentionSettings
from cachecraft_rag.compute.stale_tokens.drift_correction import DriftCorrection, StaleChunk
from cachecraft_rag.kernels.attention_paths import AttentionPaths
from cachecraft_rag.kernels.row_blocks import row_blocks
from cachecraft_rag.kernels.visibility import Visibility
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.types.kv_layout import KVLayout

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 10, 40, 60, 75]
QUESTION = range(60, 75)
LAYERS = 4


def token_ids(seed: int, length: int = BOUNDS[-1]) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def captured(decoder: Decoder, ids: Sequence[int]) -> list[ResidentKV]:
    """System and both chunks as they are in the full prompt."""
    output = prefill(decoder, PrefillJob(ids, Rows.of(BOUNDS, new=range(75)), captures=[0, 1, 2]))
    return [ResidentKV(capture.start, capture.kv) for capture in output.recorder.captures]


class Sees:
    """An observer that keeps copies."""

    def __init__(self) -> None:
        self.watched = range(5, 70)
        self.seen: list[tuple[int, Tensor, Tensor, AttentionSettings]] = []
        self.positions: list[list[int]] = []

    def observe(
        self, layer: int, q: Tensor, k: Tensor, visible: Visibility, settings: AttentionSettings
    ) -> None:
        self.positions.append(visible.positions.tolist())
        self.seen.append((layer, q.clone(), k.clone(), settings))


def filled(decoder: Decoder, resident: Sequence[ResidentKV] = ()) -> KVBuffer:
    """Room for a prompt, zero wherever nothing is placed."""
    buffer = KVBuffer(decoder, 80)
    buffer.kv.zero_()
    for one in resident:
        for layer in range(decoder.layout.layers):
            buffer.place(layer, one.kv[layer], one.start)
    return buffer


class Request:
    """A pass, its buffer, and what goes with it."""

    def __init__(
        self,
        decoder: Decoder,
        ids: Sequence[int],
        rows: Rows,
        *,
        resident: Sequence[ResidentKV] = (),
        captures: Sequence[int] = (),
        measured: bool = False,
        drifts: bool = False,
        observer: Observer | None = None,
        absent: Sequence[int] = (),
    ) -> None:
        self.buffer, self.rows = filled(decoder, resident), rows
        spans = [(segment, *BOUNDS[segment : segment + 2]) for segment in captures]
        self.recorder = CaptureRecorder(
            decoder.layout, self.buffer.kv, spans, measured=BOUNDS if measured else None
        )
        chunks = [
            StaleChunk(segment, [range(*BOUNDS[segment : segment + 2])]) for segment in (1, 2)
        ]
        drift = DriftCorrection(chunks, strength=0.7, rotary=self.buffer.rotary)
        positions = rows.open()
        self.row_pass = RowPass(
            decoder,
            self.buffer,
            torch.tensor(ids)[positions],
            positions,
            rows=rows,
            recorder=self.recorder,
            observer=observer,
            drift=drift if drifts else None,
            absent=np.array(absent) if absent else None,
        )


def requests_of(decoder: Decoder) -> tuple[list[Request], Sees]:
    """A full prefill that is captured; a corrected one; one that is observed; one with a hole; a decode step."""
    foreign = captured(decoder, token_ids(seed=1))
    sees, ids = Sees(), token_ids(seed=2)
    decodes = Rows.of([0, 74, 75], new=[74])
    return [
        Request(decoder, ids, Rows.of(BOUNDS, new=range(75)), captures=[1, 2]),
        Request(
            decoder,
            ids,
            Rows.of(BOUNDS, new=QUESTION, recomputed=[11, 14, 20, 45, 47]),
            resident=foreign,
            drifts=True,
        ),
        Request(
            decoder,
            ids,
            Rows.of(BOUNDS, new=[*range(10), *QUESTION]),
            resident=foreign[1:],
            observer=sees,
        ),
        Request(
            decoder, ids, Rows.of(BOUNDS, new=QUESTION), resident=foreign[:2], absent=range(40, 60)
        ),
        Request(decoder, ids, decodes, resident=foreign),
    ], sees


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Phi3", {"sliding_window": 24}),
    ("Gemma2", {"sliding_window": 24, "attn_logit_softcapping": 5.0}),
]


@pytest.mark.gate
@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[row[0] for row in FAMILIES])
@torch.inference_mode()
def test_passes_of_several_requests_as_one_forward_are_each_what_it_is_alone(
    tiny_decoder: MakeDecoder, family: str, settings: dict[str, Any]
) -> None:
    decoder = tiny_decoder(family, **settings)
    (alone, seen_alone), (together, seen_together) = requests_of(decoder), requests_of(decoder)
    for _ in range(LAYERS):
        for one in alone:
            advance(decoder, [one.row_pass])
        advance(decoder, [one.row_pass for one in together])
    for one, other in zip(alone, together, strict=True):
        assert other.row_pass.layer == LAYERS
        assert_close(other.row_pass.hidden, one.row_pass.hidden)
        assert_close(other.buffer.kv, one.buffer.kv)
    captures = [request.recorder.captures for request in (alone[0], together[0])]
    assert [capture.segment for capture in captures[1]] == [1, 2]
    for expected, found in zip(*captures, strict=True):
        assert_close(found.kv, expected.kv)
        for layer in range(LAYERS):
            assert_close(found.queries[layer], expected.queries[layer])
    assert [seen[0] for seen in seen_together.seen] == list(range(LAYERS))
    for expected_seen, found_seen in zip(seen_alone.seen, seen_together.seen, strict=True):
        assert_close(found_seen[1], expected_seen[1])
        assert_close(found_seen[2], expected_seen[2])
        assert found_seen[3] == expected_seen[3]


@torch.inference_mode()
def test_a_joint_layer_that_fails_is_repeated_alone_without_correcting_twice(
    tiny_decoder: MakeDecoder,
) -> None:
    decoder = tiny_decoder("Llama")
    (alone, seen_alone), (together, seen_together) = requests_of(decoder), requests_of(decoder)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    for layer in range(LAYERS):
        for one in alone:
            advance(decoder, [one.row_pass])
        failing = decoder.model.model.layers[layer].mlp.register_forward_hook(fail)
        try:
            with pytest.raises(RuntimeError, match="no memory"):
                advance(decoder, [one.row_pass for one in together])
        finally:
            failing.remove()
        for one in together:
            advance(decoder, [one.row_pass])
    for one, other in zip(alone, together, strict=True):
        assert_close(other.buffer.kv, one.buffer.kv)
        assert_close(other.row_pass.hidden, one.row_pass.hidden)
    assert [seen[0] for seen in seen_together.seen] == [seen[0] for seen in seen_alone.seen]


@torch.inference_mode()
def test_a_layer_that_failed_amid_its_corrections_is_not_repeated(
    tiny_decoder: MakeDecoder,
) -> None:
    decoder = tiny_decoder("Llama")
    request = requests_of(decoder)[0][1]

    class Fails(Sees):
        def observe(self, *_: object) -> None:
            raise RuntimeError("no memory")

    request.row_pass._observer = Fails()
    with pytest.raises(RuntimeError, match="no memory"):
        advance(decoder, [request.row_pass])
    with pytest.raises(RuntimeError, match="cannot be repeated"):
        advance(decoder, [request.row_pass])


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal but for what another order of additions changes."""
    assert torch.allclose(
        found, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.abs().max()))
    )


@torch.inference_mode()
def test_the_order_of_passes_in_a_forward_makes_no_difference(tiny_decoder: MakeDecoder) -> None:
    decoder = tiny_decoder("Llama")
    (one, _), (other, _) = requests_of(decoder), requests_of(decoder)
    for _ in range(LAYERS):
        advance(decoder, [request.row_pass for request in one])
        advance(decoder, [request.row_pass for request in reversed(other)])
    for first, second in zip(one, other, strict=True):
        assert_close(first.row_pass.hidden, second.row_pass.hidden)


@torch.inference_mode()
def test_the_captured_pass_is_the_models_own_forward_in_company_too(
    tiny_decoder: MakeDecoder,
) -> None:
    decoder = tiny_decoder("Llama")
    requests, _ = requests_of(decoder)
    for _ in range(LAYERS):
        advance(decoder, [request.row_pass for request in requests])
    own = decoder.own_logits(token_ids(seed=2))[0]
    assert torch.allclose(decoder.next_logits(requests[0].row_pass.hidden), own, atol=1e-3)


@torch.inference_mode()
def test_one_layer_is_one_forward_of_all_rows(
    tiny_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, calls = tiny_decoder("Llama"), []
    requests, _ = requests_of(decoder)
    own = decoder.layer

    def layer(index: int, hidden: Tensor, **named: Any) -> Tensor:
        calls.append((index, hidden.shape[1]))
        return own(index, hidden, **named)

    monkeypatch.setattr(decoder, "layer", layer)
    advance(decoder, [request.row_pass for request in requests])
    assert calls == [(0, sum(len(request.row_pass.positions) for request in requests))]


# -- a pass changes on its way ----------------------------------------------------------------------------------------


@torch.inference_mode()
def test_what_is_visible_is_prepared_once_per_pass_and_window(
    tiny_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int | None] = []

    def counted(visible: Visibility) -> Any:
        calls.append(visible.window)
        return row_blocks(visible)

    monkeypatch.setattr("cachecraft_rag.kernels.attention_paths.row_blocks", counted)
    job = PrefillJob(token_ids(1), Rows.of(BOUNDS, new=range(75)))
    llama = tiny_decoder("Llama")
    monkeypatch.setattr(llama, "attention_paths", AttentionPaths({"front": "blocks"}))
    prefill(llama, job)
    assert calls == [None]
    calls.clear()
    prefill(tiny_decoder("Gemma2", sliding_window=24), job)  # every other layer attends in a window
    assert sorted(calls, key=str) == [24, None]


@torch.inference_mode()
def test_rows_that_are_dropped_leave_the_others_as_they_are(tiny_decoder: MakeDecoder) -> None:
    decoder, ids = tiny_decoder("Llama"), token_ids(1)
    resident = captured(decoder, ids)  # exact, so what is dropped is not missed
    request = Request(
        decoder, ids, Rows.of(BOUNDS, new=QUESTION, recomputed=[11, 14, 45]), resident=resident
    )
    one = request.row_pass
    advance(decoder, [one])
    one.keep(one.positions != 14)
    assert one.positions.tolist() == [11, 45, *QUESTION]
    assert one.where.tolist() == one.positions.tolist()
    while one.layer < LAYERS:
        advance(decoder, [one])
    assert one.hidden.shape[1] == 17
    assert torch.allclose(decoder.next_logits(one.hidden), decoder.own_logits(ids)[0], atol=1e-3)


@pytest.mark.parametrize("layer", range(LAYERS))
@torch.inference_mode()
def test_rows_join_in_among_the_others(tiny_decoder: MakeDecoder, layer: int) -> None:
    decoder, ids = tiny_decoder("Llama"), token_ids(1)
    resident = captured(decoder, ids)
    request = Request(decoder, ids, Rows.of(BOUNDS, new=QUESTION), resident=resident)
    late = np.array([3, 41, 59])
    one, more = request.row_pass, RowPass(decoder, request.buffer, torch.tensor(ids)[late], late)
    for _ in range(layer):
        advance(decoder, [one])
        advance(decoder, [more])
    one.join(more)
    assert one.positions.tolist() == [3, 41, 59, *QUESTION]
    while one.layer < LAYERS:
        advance(decoder, [one])
    assert torch.allclose(decoder.next_logits(one.hidden), decoder.own_logits(ids)[0], atol=1e-3)


@torch.inference_mode()
def test_only_passes_before_the_same_layer_can_join(tiny_decoder: MakeDecoder) -> None:
    decoder = tiny_decoder("Llama")
    requests, _ = requests_of(decoder)
    advance(decoder, [requests[0].row_pass])
    with pytest.raises(AssertionError, match="same layer"):
        requests[0].row_pass.join(requests[1].row_pass)


@torch.inference_mode()
def test_evidence_that_did_not_come_corrects_nothing_from_the_update_on(
    tiny_decoder: MakeDecoder,
) -> None:
    decoder, ids = tiny_decoder("Llama"), token_ids(2)
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=[11, 14, 20])
    request = Request(decoder, ids, rows, resident=captured(decoder, token_ids(1)), drifts=True)
    stale = [p for p in range(10, 40) if p not in (11, 14, 20)]
    before = request.buffer.kv[:, :, stale].clone()
    advance(decoder, [request.row_pass])
    advance(decoder, [request.row_pass])
    request.row_pass.update(rows.mark([11, 14], RowReason.COMPUTED_INSTEAD))
    advance(decoder, [request.row_pass])
    advance(decoder, [request.row_pass])
    changed = [
        not torch.equal(request.buffer.kv[layer][:, stale], before[layer])
        for layer in range(LAYERS)
    ]
    # in the first layer a key is its token's alone, whatever stands before: it drifts by rounding at most
    assert changed[1:] == [True, False, False]


@torch.inference_mode()
def test_absent_keys_make_no_difference(tiny_decoder: MakeDecoder) -> None:
    decoder, ids = tiny_decoder("Llama"), token_ids(2)
    resident, found = captured(decoder, token_ids(1))[:2], []
    for garbage in (0.0, 9.0):
        request = Request(
            decoder, ids, Rows.of(BOUNDS, new=QUESTION), resident=resident, absent=range(40, 60)
        )
        request.buffer.kv[:, :, 40:60] = garbage
        for _ in range(LAYERS):
            advance(decoder, [request.row_pass])
        found.append(request.row_pass.hidden)
    assert torch.equal(*found)


@torch.inference_mode()
def test_attention_measured_in_a_pass_counts_once_if_a_joint_layer_fails_and_is_repeated(
    tiny_decoder: MakeDecoder,
) -> None:
    decoder, ids = tiny_decoder("Llama"), token_ids(1)
    masses = []
    for fails in (False, True):
        request = Request(
            decoder, ids, Rows.of(BOUNDS, new=range(75)), captures=[1, 2], measured=True
        )
        for layer in range(LAYERS):
            if fails and layer == 1:
                hidden = request.row_pass.hidden
                decoder.layer(
                    layer, hidden, positions=request.row_pass.where, layer_pass=request.row_pass
                )
            advance(decoder, [request.row_pass])
        captures = request.recorder.captures
        assert [capture.segment for capture in captures] == [1, 2]
        masses.append([capture.mass for capture in captures])
    for once, repeated in zip(*masses, strict=True):
        assert torch.equal(once, repeated)


@torch.inference_mode()
def test_ranks_average_the_attention_that_their_passes_measured(
    tiny_decoder: MakeDecoder,
) -> None:
    decoder, ids = tiny_decoder("Llama"), token_ids(1)
    request = Request(decoder, ids, Rows.of(BOUNDS, new=range(75)), captures=[1], measured=True)
    for _ in range(LAYERS):
        advance(decoder, [request.row_pass])
    (own,) = request.recorder.captures
    both = request.recorder.with_all_heads(
        lambda kv: torch.cat((kv, kv), dim=-2), lambda seen: seen / 2
    )
    (joined,) = both.captures
    assert own.mass is not None
    assert joined.mass is not None
    assert torch.equal(joined.mass, own.mass / 2)
    assert not joined.queries
    assert joined.kv.shape[-2] == 2 * own.kv.shape[-2]
    assert not both.needs_keys


def test_a_capture_of_several_ranks_is_described_with_the_sinks_of_all_heads() -> None:
    heads, kv_heads, head_dim, tokens = 8, 4, 16, 24
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    queries = some(LAYERS, tokens, heads, head_dim)
    keys = some(LAYERS, tokens, kv_heads, head_dim)
    sinks = some(LAYERS, heads)

    def recorder_of(rank: int, ranks: int) -> CaptureRecorder:
        """Record one chunk as a rank does that has its share of the heads."""
        own = slice(rank * heads // ranks, (rank + 1) * heads // ranks)
        own_kv = slice(rank * kv_heads // ranks, (rank + 1) * kv_heads // ranks)
        layout = KVLayout(LAYERS, kv_heads // ranks, head_dim, "float32")
        recorder = CaptureRecorder(layout, keys, [(1, 8, tokens)])
        places = recorder.locate(np.arange(tokens))
        for layer in range(LAYERS):
            kv = keys[layer, :, own_kv]
            settings = AttentionSettings(0.25, sinks=sinks[layer, own])
            recorder.record(layer, places, (queries[layer, :, own], kv, kv), settings)
        return recorder

    def described(recorder: CaptureRecorder) -> AttentionStatistics:
        (capture,) = recorder.captures
        accumulator = AttentionAccumulator(capture, recorder.settings, bounds=[0, 8, tokens])
        for layer in range(LAYERS):
            accumulator.add_layer(layer, keys[layer])
        return accumulator.statistics()

    sent: list[Tensor] = []

    def send(own: Tensor) -> Tensor:
        sent.append(own)
        return own[..., :0, :]

    assert not recorder_of(1, 2).with_all_heads(send, torch.clone).captures

    def join(own: Tensor) -> Tensor:
        return torch.cat((own, sent.pop(0)), dim=-2)

    joined = recorder_of(0, 2).with_all_heads(join, torch.clone)
    assert not sent
    assert described(joined).intra == pytest.approx(described(recorder_of(0, 1)).intra, rel=1e-5)
    assert described(joined).inter == pytest.approx(described(recorder_of(0, 1)).inter, rel=1e-5)


@torch.inference_mode()
def test_an_observer_sees_the_rotated_queries_that_it_watches_and_all_rotated_keys(
    tiny_decoder: MakeDecoder,
) -> None:
    decoder, ids, sees = tiny_decoder("Llama"), token_ids(1), Sees()
    request = Request(decoder, ids, Rows.of(BOUNDS, new=range(75)), captures=[1], observer=sees)
    for _ in range(LAYERS):
        advance(decoder, [request.row_pass])
    (capture,) = request.recorder.captures
    for layer, q, k, settings in sees.seen:
        assert torch.equal(q[5:35], capture.queries[layer])
        assert len(q) == 65
        assert torch.equal(k[:75], request.buffer.kv[layer, 0, :75])
        assert settings == request.recorder.settings[layer]
    assert sees.positions == [list(sees.watched)] * LAYERS


@torch.inference_mode()
def test_an_observer_is_shown_the_rows_that_it_watches_whatever_others_run(
    tiny_decoder: MakeDecoder,
) -> None:
    decoder, ids, sees = tiny_decoder("Llama"), token_ids(1), Sees()
    request = Request(decoder, ids, Rows.of(BOUNDS, new=[3, 5, 6, 30, 69, 70, 74]), observer=sees)
    advance(decoder, [request.row_pass])
    request.row_pass.keep(np.array([True, True, False, True, False, True, True]))
    for _ in range(LAYERS - 1):
        advance(decoder, [request.row_pass])
    assert sees.positions == [[5, 6, 30, 69], *[[5, 30]] * (LAYERS - 1)]
    assert [len(q) for _, q, _, _ in sees.seen] == [4, *[2] * (LAYERS - 1)]
