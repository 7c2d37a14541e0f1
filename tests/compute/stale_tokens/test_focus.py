"""Early termination: what the monitor sees of the question, and which rows it drops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from cachecraft_rag.compute import overlapped
from cachecraft_rag.compute.driver import prefill
from cachecraft_rag.compute.job import EarlyTermination, PrefillJob
from cachecraft_rag.compute.kv_buffer import ResidentKV
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.early_termination import FocusMonitor

MakeDecoder = Callable[..., Decoder]
BOUNDS = [0, 10, 40, 60, 75]
IDS = torch.randint(0, 256, (BOUNDS[-1],), generator=torch.Generator().manual_seed(9)).tolist()
QUESTION = range(60, 75)
ON = EarlyTermination(1)


@pytest.fixture
def decoder(tiny_decoder: MakeDecoder) -> Decoder:
    return tiny_decoder("Llama")


@pytest.fixture
def caches(decoder: Decoder) -> list[ResidentKV]:
    """System and both chunks as they are in the full prompt."""
    output = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75)), captures=[0, 1, 2]))
    return [ResidentKV(capture.start, capture.kv) for capture in output.recorder.captures]


class Decides(FocusMonitor):
    """Names the focused chunks in a given layer."""

    def __init__(self, chunks: int, focused: set[int], layer: int) -> None:
        super().__init__(chunks, window=1)
        self._decision, self._when = frozenset(focused), layer
        self.seen: list[Sequence[float]] = []

    def observe(self, layer: int, mass: Sequence[float]) -> bool:
        self.seen.append(mass)
        if layer == self._when:
            self.focused, self.layer = self._decision, layer
        return layer == self._when


Decide = Callable[[set[int], int], Decides]


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch) -> Decide:
    """The monitor of the next prefill names these chunks in this layer."""

    def use(focused: set[int], layer: int) -> Decides:
        monitor = Decides(2, focused, layer)

        def made(chunks: int, *, window: int) -> Decides:
            assert (chunks, window) == (2, ON.window)
            return monitor

        monkeypatch.setattr(overlapped, "FocusMonitor", made)
        return monitor

    return use


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_early_termination_drops_the_rows_of_unfocused_chunks(
    layer: int, decoder: Decoder, caches: list[ResidentKV], decide: Decide
) -> None:
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=[10, 20, 30, 40, 50])
    monitor = decide({1}, layer)  # the second chunk
    output = prefill(decoder, PrefillJob(IDS, rows, resident=caches, early_termination=ON))
    assert output.row_layers == 20 * (layer + 1) + 17 * (3 - layer)
    assert output.focus_layer == layer
    assert len(monitor.seen) == layer + 1
    # the caches are exact here, so what is dropped is not missed
    assert torch.allclose(decoder.next_logits(output.hidden), decoder.own_logits(IDS)[0], atol=1e-3)


def test_what_the_question_must_not_shape_is_not_dropped(
    decoder: Decoder, caches: list[ResidentKV], decide: Decide
) -> None:
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=[10, 20, 30, 40, 50])
    decide(set(), 0)  # nothing is focused
    output = prefill(
        decoder, PrefillJob(IDS, rows, resident=caches, early_termination=ON, shared_until=40)
    )
    assert output.row_layers == 20 + 18 * 3  # the second chunk only


def test_captures_go_on_when_other_rows_are_dropped(
    decoder: Decoder, caches: list[ResidentKV], decide: Decide
) -> None:
    rows = Rows.of(BOUNDS, new=range(40, 75), recomputed=[10, 20, 30])
    decide({1}, 1)
    job = PrefillJob(IDS, rows, resident=caches[:2], captures=[2], early_termination=ON)
    output = prefill(decoder, job)
    assert output.row_layers == 38 * 2 + 35 * 2
    assert torch.allclose(output.recorder.captures[0].kv, caches[2].kv, atol=1e-4)


def question_attention(decoder: Decoder, rows: range) -> list[list[float]]:
    """Attention of these rows to both chunks, in each layer, as transformers computes it."""
    with decoder.stock() as model, torch.inference_mode():
        model.set_attn_implementation("eager")
        weights = model(input_ids=torch.tensor([IDS]), output_attentions=True).attentions
    found = [layer[0].mean(0)[rows.start : rows.stop] for layer in weights]
    return [[float(one[:, 10:40].sum()), float(one[:, 40:60].sum())] for one in found]


def test_the_monitor_sees_what_the_question_pays_to_each_chunk(
    decoder: Decoder, decide: Decide
) -> None:
    monitor = decide({0, 1}, 99)
    output = prefill(decoder, PrefillJob(IDS, Rows.of(BOUNDS, new=range(75)), early_termination=ON))
    assert output.focus_layer is None
    assert len(monitor.seen) == decoder.layout.layers
    for seen, expected in zip(monitor.seen, question_attention(decoder, QUESTION), strict=True):
        assert seen == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("recomputed", [[], [10, 20, 40]])
def test_a_last_token_that_the_server_computes_itself_is_no_row_and_no_key(
    recomputed: list[int],
    decoder: Decoder,
    caches: list[ResidentKV],
    decide: Decide,
    memory_holds: Callable[[float], None],
) -> None:
    memory_holds(math.nan)
    monitor = decide({0, 1}, 99)
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=recomputed).finish([QUESTION[-1]])
    output = prefill(decoder, PrefillJob(IDS, rows, resident=caches, early_termination=ON))
    assert torch.isfinite(output.hidden).all()
    for seen, expected in zip(
        monitor.seen, question_attention(decoder, QUESTION[:-1]), strict=True
    ):
        assert seen == pytest.approx(expected, abs=1e-4)


def test_a_question_without_a_row_of_its_own_ends_nothing(
    decoder: Decoder, caches: list[ResidentKV], decide: Decide
) -> None:
    monitor = decide({1}, 0)
    rows = Rows.of(BOUNDS, new=QUESTION, recomputed=[10, 20]).finish(QUESTION)
    output = prefill(decoder, PrefillJob(IDS, rows, resident=caches, early_termination=ON))
    assert (monitor.seen, output.focus_layer, output.row_layers) == (
        [],
        None,
        2 * decoder.layout.layers,
    )
