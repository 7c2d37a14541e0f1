"""Probes: what they see, what they choose, and that nothing they touch is left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.probe import PROBES, Probe, QuestionProbe, Tokens, ValueProbe
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.engine.decoder import Decoder
from cachecraft_rag.planning.planner import Plan, SegmentPlan

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 12, 52, 92, 110]  # system, two chunks, question
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(4)).tolist()
QUESTION = range(BOUNDS[-2], BOUNDS[-1])
REUSED = SegmentPlan("reused")
PLAN = Plan((SegmentPlan("exact"), REUSED, REUSED, SegmentPlan("computed")))


@pytest.fixture
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama", num_hidden_layers=5)


class Chooser:
    """Chooses the three tokens of each chunk that were seen most."""

    def __init__(self) -> None:
        self.seen: dict[int, np.ndarray] = {}
        self.recomputed: Tokens = {}
        self.gone: Tokens = {}

    def __call__(self, seen: dict[int, np.ndarray], recomputed: Tokens, gone: Tokens) -> Plan:
        self.seen, self.recomputed, self.gone = seen, recomputed, gone
        chosen = {i: tuple(sorted(np.argsort(-scores)[:3].tolist())) for i, scores in seen.items()}
        return Plan(
            tuple(
                SegmentPlan("reused", recompute=chosen[i]) if i in chosen else planned
                for i, planned in enumerate(PLAN.segments)
            )
        )


def stored(decoder: Decoder, *, moved: Sequence[int] = ()) -> list[ResidentKV]:
    """System and chunks as they are in the full prompt, but for the values of these positions in the second layer."""
    output = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=[0, 1, 2]))
    reused = [ResidentKV(capture.start, capture.kv.clone()) for capture in output.recorder.captures]
    for position in moved:
        one = max((one for one in reused if one.start <= position), key=lambda one: one.start)
        one.kv[1, 1, position - one.start] += 1.0
    return reused


def seen_by(
    probe: Probe, passes: PartialPrefill, supply: Supply, rows: dict[int, int], done: dict[int, int] | None = None
) -> dict[int, int]:
    """Let it look, as the last pass does."""
    done = done or {}
    return probe.look(passes, supply, probe.positions(rows, done), rows=rows, done=done)


def look(
    probe: type[Probe], decoder: Decoder, reused: list[ResidentKV], rows: dict[int, int]
) -> tuple[dict[int, int], Chooser]:
    chooser = Chooser()
    passes = PartialPrefill(decoder, IDS, BOUNDS)
    found = seen_by(probe(PLAN, BOUNDS, QUESTION, chooser), passes, AtHand(reused), rows)
    return found, chooser


def test_the_value_scout_finds_what_moved(decoder: Decoder) -> None:
    moved = [15, 20, 33, 60, 70, 91]
    rows = dict.fromkeys(QUESTION, -1) | {14: 1, 55: 2}
    found, chooser = look(ValueProbe, decoder, stored(decoder, moved=moved), rows)
    assert found == dict.fromkeys(QUESTION, -1) | {15: 1, 20: 1, 33: 1, 60: 2, 70: 2, 91: 2}
    assert np.concatenate(list(chooser.seen.values())).mean() == pytest.approx(1.0, rel=1e-3)


def test_the_question_scout_sees_what_the_model_attends_to(decoder: Decoder) -> None:
    with torch.inference_mode():
        weights = decoder.model.config._attn_implementation
        try:
            decoder.model.set_attn_implementation("eager")
            attentions = decoder.model(torch.tensor([IDS]), output_attentions=True).attentions
        finally:
            decoder.model.set_attn_implementation(weights)
    expected = attentions[2][0, :, QUESTION.start :].sum(1).mean(0).numpy()  # of five layers the one in the middle
    _, chooser = look(QuestionProbe, decoder, stored(decoder), dict.fromkeys(QUESTION, -1))
    seen = np.concatenate([chooser.seen[1], chooser.seen[2]])
    assert np.allclose(seen, expected[12:92] / expected[12:92].mean(), rtol=1e-3)


def test_chunks_still_to_be_computed_are_hidden_from_the_question(decoder: Decoder) -> None:
    """The prompt with a hole where the second chunk will be: what memory held there makes no difference."""
    reused = stored(decoder)
    rows = dict.fromkeys([*range(52, 92), *QUESTION], -1)
    plan = Plan((SegmentPlan("exact"), REUSED, SegmentPlan("computed"), SegmentPlan("computed")))
    seen = []
    for garbage in (0.0, float("nan")):
        chooser = Chooser()
        passes = PartialPrefill(decoder, IDS, BOUNDS)
        passes.buffer.kv[:] = garbage
        seen_by(QuestionProbe(plan, BOUNDS, QUESTION, chooser), passes, AtHand(reused[:2]), rows)
        assert list(chooser.seen) == [1]
        seen.append(chooser.seen[1])
    assert np.isfinite(seen[1]).all()
    assert np.array_equal(seen[0], seen[1])


@pytest.mark.parametrize("kind", sorted(PROBES))
def test_what_was_computed_before_stays_chosen_and_what_came_otherwise_is_not(decoder: Decoder, kind: str) -> None:
    chooser = Chooser()
    passes = PartialPrefill(decoder, IDS, BOUNDS)
    rows = dict.fromkeys([40, 41, *QUESTION], -1) | {60: 2}
    done = {13: 1, 14: 1, 15: -1}
    passes.compute([13, 14, 15], AtHand(stored(decoder)))
    seen_by(PROBES[kind](PLAN, BOUNDS, QUESTION, chooser), passes, AtHand(stored(decoder)), rows, done)
    assert chooser.recomputed == {1: frozenset({1, 2}), 2: frozenset()}
    assert chooser.gone == {1: frozenset({3, 28, 29}), 2: frozenset()}


@pytest.mark.gate
@pytest.mark.parametrize("kind", sorted(PROBES))
def test_with_exact_caches_a_look_changes_nothing(decoder: Decoder, kind: str) -> None:
    passes = PartialPrefill(decoder, IDS, BOUNDS)
    supply = AtHand(stored(decoder))
    rows = seen_by(PROBES[kind](PLAN, BOUNDS, QUESTION, Chooser()), passes, supply, dict.fromkeys(QUESTION, -1))
    assert len(rows) == len(QUESTION) + 6
    output = passes.finish(sorted(rows), supply, owners=rows)
    assert (output.logits - decoder.own_logits(IDS)[0]).abs().max() <= 1e-3


class Late:
    """A supply that finds in the second layer that some positions will not come."""

    def __init__(self, reused: list[ResidentKV], late: Sequence[int]) -> None:
        self._there, self._late = AtHand(reused), late

    def place(self, layer: int, merged: MergedKV) -> Sequence[int]:
        self._there.place(layer, merged)
        if layer < 1:
            return ()
        merged.kv[layer, :, self._late] = float("nan")
        late, self._late = self._late, ()
        return late


def test_rows_that_join_a_look_are_not_taken_for_the_question(decoder: Decoder) -> None:
    """With exact caches it makes no difference to what the question sees whether a token was stored or computed."""
    rows = dict.fromkeys(QUESTION, -1)
    _, plain = look(QuestionProbe, decoder, stored(decoder), rows)
    chooser = Chooser()
    passes = PartialPrefill(decoder, IDS, BOUNDS)
    seen_by(QuestionProbe(PLAN, BOUNDS, QUESTION, chooser), passes, Late(stored(decoder), range(60, 70)), rows)
    for segment in (1, 2):
        assert np.allclose(chooser.seen[segment], plain.seen[segment], rtol=1e-3, atol=1e-5)
