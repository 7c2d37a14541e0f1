"""Probes: what they see, what they choose, and that nothing they touch is left behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cachecraft_rag.compute.balance.speed import ComputeSpeed
from cachecraft_rag.compute.driver import prefill, run
from cachecraft_rag.compute.job import PrefillJob, PrefillResult, ProbeRequest
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.overlapped import OverlappedPrefill
from cachecraft_rag.compute.rows import RowReason, Rows
from cachecraft_rag.compute.stack import Alone, Ranks
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.early_termination import focus_score
from cachecraft_rag.planning.planner import Plan, SegmentPlan
from cachecraft_rag.store.loading.pending import PendingLoads

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 12, 52, 92, 110]  # system, two chunks, question
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(4)).tolist()
QUESTION = range(BOUNDS[-2], BOUNDS[-1])
REUSED = SegmentPlan("reused")
PLAN = (SegmentPlan("exact"), REUSED, REUSED, SegmentPlan("computed"))


@pytest.fixture
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama", num_hidden_layers=5)


class Chooser:
    """Chooses the three tokens of each chunk that were seen most."""

    seen: Mapping[int, NDArray[np.float32]]
    rows: Rows
    focus: Mapping[int, float]

    def __call__(
        self,
        seen: Mapping[int, NDArray[np.float32]],
        rows: Rows,
        focus: Mapping[int, float],
    ) -> Plan:
        self.seen, self.rows, self.focus = seen, rows, focus
        plans = list(PLAN)
        for index, scores in seen.items():
            plans[index] = SegmentPlan("reused", recompute=np.sort(np.argsort(-scores)[:3]))
        return tuple(plans)


def stored(decoder: Decoder) -> list[ResidentKV]:
    """System and chunks as they are in the full prompt."""
    output = prefill(
        decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(BOUNDS[-1])), captures=[0, 1, 2])
    )
    return [ResidentKV(capture.start, capture.kv.clone()) for capture in output.recorder.captures]


def rows_of(*, new: Sequence[int] = (), recomputed: Sequence[int] = ()) -> Rows:
    return Rows.of(BOUNDS, new=[*new, *QUESTION], recomputed=recomputed)


def look(
    decoder: Decoder, resident: list[ResidentKV], rows: Rows, *, loads: PendingLoads | None = None
) -> tuple[PrefillResult, Chooser]:
    """A prefill that looks before its last pass, of all chunks that are among `resident`."""
    chooser = Chooser()
    reused = [index for index in (1, 2) if BOUNDS[index] in {one.start for one in resident}]
    probe = ProbeRequest(QUESTION, chooser)
    job = PrefillJob(IDS, rows, resident=resident, reused=reused, probe=probe)
    if loads is None:
        return prefill(decoder, job), chooser
    steps = OverlappedPrefill(decoder, job, loads, ComputeSpeed(decoder.keys_per_row)).steps()
    return run(decoder, steps), chooser


def recomputed_in(rows: Rows) -> list[int]:
    return np.flatnonzero(rows.reason == RowReason.RECOMPUTED).tolist()


def test_the_question_probe_sees_what_the_model_attends_to(decoder: Decoder) -> None:
    with decoder.stock() as model, torch.inference_mode():
        model.set_attn_implementation("eager")
        attentions = model(torch.tensor([IDS]), output_attentions=True).attentions
    # of five layers the one in the middle
    expected = attentions[2][0, :, QUESTION.start :].sum(1).mean(0).numpy()
    _, chooser = look(decoder, stored(decoder), rows_of())
    seen = np.concatenate([chooser.seen[1], chooser.seen[2]])
    assert np.allclose(seen, expected[12:92] / expected[12:92].mean(), rtol=1e-3)


def test_a_chunk_scores_what_the_question_pays_to_its_strongest_tokens(
    decoder: Decoder,
) -> None:
    with decoder.stock() as model, torch.inference_mode():
        model.set_attn_implementation("eager")
        attentions = model(torch.tensor([IDS]), output_attentions=True).attentions
    # of five layers the one in the middle
    received = attentions[2][0, :, QUESTION.start :].sum(1).mean(0)
    _, chooser = look(decoder, stored(decoder), rows_of())
    for chunk in (1, 2):
        expected = focus_score(received[BOUNDS[chunk] : BOUNDS[chunk + 1]].numpy())
        assert chooser.focus[chunk] == pytest.approx(expected, rel=1e-3)
    assert set(chooser.focus) == {1, 2}, "the instruction and the question are no chunks"


def test_a_chunk_that_is_computed_after_the_probe_has_no_score(decoder: Decoder) -> None:
    _, chooser = look(decoder, stored(decoder)[:2], rows_of(new=range(52, 92)))
    assert set(chooser.focus) == {1}


def test_chunks_still_to_be_computed_are_hidden_from_the_question(
    decoder: Decoder, memory_holds: Callable[[float], None]
) -> None:
    """The prompt with a hole where the second chunk will be: what memory held there makes no difference."""
    reused = stored(decoder)
    seen = []
    for garbage in (0.0, math.nan):
        memory_holds(garbage)
        result, chooser = look(decoder, reused[:2], rows_of(new=range(52, 92)))
        assert list(chooser.seen) == [1]
        assert torch.isfinite(result.hidden).all()
        seen.append(chooser.seen[1])
    assert np.isfinite(seen[1]).all()
    assert np.array_equal(seen[0], seen[1])


def test_what_was_computed_before_stays_chosen_and_what_came_otherwise_is_not(
    decoder: Decoder,
) -> None:
    before = rows_of(new=[15, 40, 41], recomputed=[13, 14, 60]).mark(
        [15, 40, 41], RowReason.COMPUTED_INSTEAD
    )
    before = before.finish([13, 14, 15])
    result, chooser = look(decoder, stored(decoder), before)
    assert {i: chooser.rows.offsets(i, RowReason.RECOMPUTED).tolist() for i in (1, 2)} == {
        1: [1, 2],
        2: [8],
    }
    assert {i: chooser.rows.offsets(i, RowReason.COMPUTED_INSTEAD).tolist() for i in (1, 2)} == {
        1: [3, 28, 29],
        2: [],
    }
    assert np.flatnonzero(chooser.rows.done).tolist() == [13, 14, 15]
    # nothing of them is stored, so nothing is to be fixed
    assert not chooser.seen[1][[3, 28, 29]].any()
    assert np.delete(chooser.seen[1], [3, 28, 29]).all()  # the question attends to all the others
    assert chooser.seen[2].all()
    chosen = [
        BOUNDS[index] + offset
        for index in (1, 2)
        for offset in np.argsort(-chooser.seen[index])[:3].tolist()
    ]  # a done one stays, another one of the first choice does not
    assert recomputed_in(result.rows) == sorted({13, 14, *chosen})
    assert np.flatnonzero(result.rows.reason == RowReason.COMPUTED_INSTEAD).tolist() == [15, 40, 41]


@pytest.mark.gate
def test_with_exact_caches_a_look_changes_nothing(decoder: Decoder) -> None:
    result, _ = look(decoder, stored(decoder), rows_of())
    assert len(result.rows.open()) == len(QUESTION) + 6
    assert (decoder.next_logits(result.hidden) - decoder.own_logits(IDS)[0]).abs().max() <= 1e-3


def test_a_look_is_counted_and_gives_its_plan(decoder: Decoder) -> None:
    result, chooser = look(decoder, stored(decoder), rows_of())
    assert result.plan == chooser(chooser.seen, chooser.rows, chooser.focus)
    assert result.row_layers == len(QUESTION) * 3 + (len(QUESTION) + 6) * 5  # three layers of five


@pytest.mark.parametrize("spoilt", [7.0, math.nan])
def test_rows_that_join_a_look_are_not_taken_for_the_question(
    decoder: Decoder, losing: Callable[..., PendingLoads], spoilt: float
) -> None:
    """With exact caches it makes no difference to what the question sees whether a token was stored or computed."""
    late = range(60, 70)
    _, plain = look(decoder, stored(decoder), rows_of())
    loads = losing(PendingLoads.of_nothing(5), late, before=1, spoilt=spoilt)
    result, chooser = look(decoder, stored(decoder), rows_of(), loads=loads)
    expected = {index: plain.seen[index].copy() for index in (1, 2)}
    # nothing of them is stored: nothing to fix
    expected[2][late.start - BOUNDS[2] : late.stop - BOUNDS[2]] = 0.0
    mean = np.concatenate(list(expected.values())).mean()
    for segment in (1, 2):
        assert np.allclose(chooser.seen[segment], expected[segment] / mean, rtol=1e-3, atol=1e-5)
    assert np.flatnonzero(result.rows.reason == RowReason.COMPUTED_INSTEAD).tolist() == list(late)


def test_a_look_of_the_question_has_no_say_in_what_is_served_to_others(decoder: Decoder) -> None:
    rows = rows_of(recomputed=[14, 16, 18, 55, 57])
    chooser = Chooser()
    probe = ProbeRequest(QUESTION, chooser)
    job = PrefillJob(
        IDS, rows, resident=stored(decoder), reused=(1, 2), probe=probe, shared_until=52
    )
    prefill(decoder, job)
    assert list(chooser.seen) == [2]


def test_what_a_probe_saw_is_the_mean_over_the_ranks(
    decoder: Decoder, on_ranks: Callable[[Decoder, Ranks], Decoder]
) -> None:
    wanted = [13, 20, 51, 52, 60, 91]

    class OtherRankSaw(Alone):
        asked: list[tuple[tuple[int, ...], torch.dtype]]

        def mean(self, seen: Tensor) -> Tensor:
            self.asked.append((tuple(seen.shape), seen.dtype))
            out = torch.full_like(seen, 0.01)
            out[wanted] = 1.0
            return out

    ranks = OtherRankSaw()
    ranks.asked = []
    result, chooser = look(on_ranks(decoder, ranks), stored(decoder), rows_of())
    assert len(ranks.asked) == 1
    assert ranks.asked[0][0][0] >= BOUNDS[-1]
    assert ranks.asked[0][1] == torch.float32
    assert recomputed_in(result.rows) == wanted
    assert np.concatenate(list(chooser.seen.values())).mean() == pytest.approx(1.0, rel=1e-5)
