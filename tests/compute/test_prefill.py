"""Partial prefill: which rows run, what fills the others, and what early termination drops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import KVBuffer, ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.planning.early_termination import FocusMonitor

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 10, 40, 60, 75]
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(9)).tolist()
QUESTION = range(60, 75)


@pytest.fixture
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama")


@pytest.fixture
def caches(decoder: Decoder) -> list[ResidentKV]:
    """System and both chunks as they are in the full prompt."""
    output = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75)), captures=[0, 1, 2]))
    return [ResidentKV(capture.start, capture.kv) for capture in output.recorder.captures]


def test_rows_are_counted_and_the_stored_caches_stay_as_they_are(decoder: Decoder, caches: list[ResidentKV]) -> None:
    before = [reused.kv.clone() for reused in caches]
    output = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=[5, 12, *QUESTION]), resident=caches))
    assert output.row_layers == 17 * decoder.layout.layers
    assert output.recorder.captures == ()
    assert all(torch.equal(reused.kv, kept) for reused, kept in zip(caches, before, strict=True))


def test_recomputed_rows_replace_what_was_stored(decoder: Decoder, caches: list[ResidentKV]) -> None:
    spoilt = [caches[0], ResidentKV(10, torch.zeros_like(caches[1].kv)), caches[2]]
    work = PrefillJob(IDS, Rows.of(BOUNDS, new=[*range(10, 40), *QUESTION]), resident=spoilt)
    assert torch.allclose(prefill(decoder, work).logits, decoder.own_logits(IDS)[0], atol=1e-3)


def test_room_is_made_for_the_answer_and_at_least_for_the_prompt(decoder: Decoder) -> None:
    assert prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75)), capacity=90)).buffer.kv.shape[2] == 90
    assert prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75)))).buffer.kv.shape[2] == 75


def test_a_decode_step_writes_its_own_position_only(decoder: Decoder) -> None:
    output = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75)), capacity=80))
    before = output.buffer.kv[:, :, :75].clone()
    logits = decode_step(decoder, output.merged, 42, 75)
    assert torch.equal(output.buffer.kv[:, :, :75], before)
    assert torch.allclose(logits, decoder.own_logits([*IDS, 42])[0], atol=1e-3)


def test_a_chunk_goes_to_its_place_rotated(decoder: Decoder, caches: list[ResidentKV]) -> None:
    merged = KVBuffer(decoder, 75)
    merged.kv.zero_()
    merged.place(1, caches[1].kv[1], 10)
    assert not merged.kv[1, :, :10].any()
    assert not merged.kv[1, :, 40:].any()
    assert torch.equal(merged.kv[1, 1, 10:40], caches[1].kv[1, 1])
    assert not merged.kv[0].any()


class Decides(FocusMonitor):
    """Names the focused chunks in a given layer."""

    def __init__(self, chunks: int, focused: set[int], layer: int) -> None:
        super().__init__(chunks, rule="gap", window=1)
        self._decision, self._when = frozenset(focused), layer
        self.seen: list[Sequence[float]] = []

    def observe(self, layer: int, mass: Sequence[float]) -> bool:
        self.seen.append(mass)
        if layer == self._when:
            self.focused, self.layer = self._decision, layer
        return layer == self._when


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_early_termination_drops_the_rows_of_unfocused_chunks(
    layer: int, decoder: Decoder, caches: list[ResidentKV]
) -> None:
    rows = [*[(p, 1) for p in (10, 20, 30)], *[(p, 2) for p in (40, 50)], *[(p, -1) for p in QUESTION]]
    work = PrefillJob(
        IDS, Rows.of(BOUNDS, new=[p for p, _ in rows]), resident=caches, owners=[owner for _, owner in rows]
    )
    monitor = Decides(2, {1}, layer)  # the second chunk
    output = prefill(decoder, work, monitor=monitor)
    assert output.row_layers == 20 * (layer + 1) + 17 * (3 - layer)
    assert len(monitor.seen) == layer + 1
    # the caches are exact here, so what is dropped is not missed
    assert torch.allclose(output.logits, decoder.own_logits(IDS)[0], atol=1e-3)


def test_births_go_on_when_other_rows_are_dropped(decoder: Decoder, caches: list[ResidentKV]) -> None:
    rows = [*[(p, 1) for p in (10, 20, 30)], *[(p, -1) for p in range(40, 75)]]
    work = PrefillInput(
        IDS,
        BOUNDS,
        [p for p, _ in rows],
        resident=caches[:2],
        owners=[owner for _, owner in rows],
        captures=[2],
    )
    output = prefill(decoder, work, monitor=Decides(2, {1}, 1))
    assert torch.allclose(output.recorder.captures[0].kv, caches[2].kv, atol=1e-4)


def test_the_monitor_sees_what_the_question_pays_to_each_chunk(decoder: Decoder) -> None:
    monitor = Decides(2, {0, 1}, 99)
    prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75)), owners=[-1] * 75), monitor=monitor)
    with decoder.stock() as model, torch.inference_mode():
        model.set_attn_implementation("eager")
        weights = model(input_ids=torch.tensor([IDS]), output_attentions=True).attentions
    for layer, seen in enumerate(monitor.seen):
        rows = weights[layer][0].mean(0)[60:75]
        assert seen == pytest.approx([float(rows[:, 10:40].sum()), float(rows[:, 40:60].sum())], abs=1e-4)


def test_keys_may_be_made_to_believe_in_another_position(decoder: Decoder, caches: list[ResidentKV]) -> None:
    """The ablation without positions: at its new place a chunk's keys are as they would be at another."""
    moved, elsewhere = KVBuffer(decoder, 75), KVBuffer(decoder, 75)
    chunk = caches[1].kv[0]
    moved.place(0, chunk, 40, rotated_from=10)
    elsewhere.place(0, chunk, 10)
    assert torch.equal(moved.kv[0, :, 40:70], elsewhere.kv[0, :, 10:40])
