"""New variants over vLLM: what asks for them, when they are computed, and what they save."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from cachecraft_rag.planning.candidates import Candidate
from cachecraft_rag.planning.config import ReuseConfig, ReuseMethod
from cachecraft_rag.serving.config import NewVariants
from cachecraft_rag.serving.new_variants import Dropped
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.documents import Chunk
from cachecraft_rag.types.prompts import Segment
from cachecraft_rag.types.variants import Variant, VariantKey
from cachecraft_rag.vllm.calls import Step
from cachecraft_rag.vllm.engine import VLLMEngine
from cachecraft_rag.vllm.idle.new_variants import Captured, IdleVariants
from cachecraft_rag.vllm.messages import FIELD
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.server.server_engine import ServerEngine
from cachecraft_rag.vllm.settings import ConnectorSettings
from tests.vllm.conftest import TEXTS

SHORT = SamplingParams(max_new_tokens=4)
REUSE = ReuseConfig(method=ReuseMethod(alpha=0.6, probe_min_rows=0, loading="whole"))


def candidate(name: str, tokens: int = 5) -> Candidate:
    segments = (Segment("system", "s", (1, 2)), Segment("chunk", name, (3, 4, 5)))
    return Candidate(segments, {1: tokens})


def test_the_most_wanted_first_within_the_budget() -> None:
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def capture(wanted: Candidate) -> Captured:
        order.append(wanted.segments[-1].segment_id)
        begun.set()
        assert go_on.wait(60)
        if order == ["first", "often"]:
            return Captured(again=True)  # its blocks were needed
        return (
            Captured(stored=1, tokens=100)
            if order[-1] != "rare"
            else Captured(dropped=Dropped.REMOVED)
        )

    made = IdleVariants(NewVariants(share=1.0), capture)
    made.answered(150, candidate("first"))
    assert begun.wait(60)
    made.answered(0, candidate("rare"))
    for _ in range(3):
        made.answered(0, candidate("often"))
    assert not made.settle(0.01)
    go_on.set()
    assert made.settle(60)
    assert order == ["first", "often", "often"]  # the budget is spent
    made.answered(0, candidate("removed"))
    made.forget(["removed"])
    made.answered(100, None)
    assert made.settle(60)
    assert (order[-1], made.stats.captured, made.stats.tokens) == ("rare", 2, 200)
    assert made.stats.dropped == {"removed": 2}
    made.close()
    made.answered(100, candidate("late"))
    assert (made.stats.waiting, len(order)) == (0, 4)


def test_unmarked_text_does_not_wait_after_what_waits_for_an_idle_server() -> None:
    go_on, came = threading.Event(), threading.Event()

    def capture(wanted: Candidate) -> Captured:
        came.set() if wanted.never_stored else go_on.wait(60)
        return Captured(stored=1, tokens=1)

    made = IdleVariants(NewVariants(), capture)
    made.answered(100, candidate("often", tokens=100))
    made.answered(0, replace(candidate("text"), never_stored=frozenset({1})))
    assert came.wait(60)
    assert not made.settle(0.01)
    go_on.set()
    assert made.settle(60)
    assert (made.stats.captured, made.stats.waiting, made.stats.dropped) == (2, 0, {})


@pytest.mark.parametrize(
    "error", [RuntimeError("of this test"), KeyError("of this test"), OSError("of this test")]
)
def test_one_that_fails_costs_no_other_and_no_answer(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(wanted: Candidate) -> Captured:
        if wanted.segments[-1].segment_id != "fine":
            raise error
        return Captured(stored=1, tokens=1)

    made = IdleVariants(NewVariants(), broken)
    for name in ("first", "again", "fine", "last"):
        made.answered(100, candidate(name))
        assert made.settle(60)
    assert (made.stats.captured, made.stats.dropped) == (1, {"failed": 3})
    logged = [one for one in caplog.records if "could not be computed" in one.getMessage()]
    assert len(logged) == 2  # of several in a row, as where vLLM has ended, the first is enough


def test_several_unmarked_texts_wait_for_an_idle_server_at_once() -> None:
    together = threading.Barrier(3)  # broken unless three captures are under way

    def capture(wanted: Candidate) -> Captured:
        together.wait(60)
        return Captured(stored=1, tokens=1)

    made = IdleVariants(NewVariants(), capture)
    for name in ("one", "two", "three"):
        made.answered(100, replace(candidate(name), never_stored=frozenset({1})))
    assert made.settle(120)
    assert (made.stats.captured, made.stats.dropped) == (3, {})
    made.close()


def test_captures_end_without_a_traceback_where_their_server_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "cachecraft_rag.new_variants")
    begun, go_on = threading.Event(), threading.Event()

    def capture(wanted: Candidate) -> Captured:
        begun.set()
        assert go_on.wait(60)
        raise asyncio.CancelledError  # as the requests of an event loop that ends

    made = IdleVariants(NewVariants(), capture)
    made.answered(100, candidate("first"))
    assert begun.wait(60)
    made.answered(100, candidate("second"))
    go_on.set()
    assert made.settle(60)
    assert made.stats.dropped == {"closed": 2}
    (line,) = caplog.records
    assert (line.levelname, line.exc_info) == ("INFO", None)
    assert "the server is ending" in line.getMessage()


def test_the_running_one_is_counted_once_and_knows_what_was_removed() -> None:
    begun, go_on, removed = threading.Event(), threading.Event(), list[Set[str]]()

    def capture(wanted: Candidate) -> Captured:
        begun.set()
        assert go_on.wait(60)
        removed.append(made.removed(wanted))
        return Captured(dropped=Dropped.REFUSED)

    made = IdleVariants(NewVariants(), capture)
    made.answered(100, candidate("a"))
    assert begun.wait(60)
    made.forget(["a", "another"])
    go_on.set()
    assert made.settle(60)
    assert (removed, made.stats.dropped) == ([{"a"}], {"removed": 1})
    begun.clear()
    go_on.clear()
    made.answered(100, candidate("b"))
    assert begun.wait(60)
    made.close()
    go_on.set()
    assert made.stats.dropped == {"removed": 1, "closed": 1}


@pytest.mark.parametrize(("context_length", "dropped"), [(4096, "removed"), (7, "too_long")])
def test_a_text_that_is_removed_while_it_waits_or_fits_no_prompt_is_not_stored(
    context_length: int,
    dropped: str,
    tiny_decoder: Callable[..., Any],
    byte_tokenizer: Any,
    tmp_path: Path,
) -> None:
    decoder = tiny_decoder("Llama")
    model = VLLMModel(
        "tiny",
        None,
        byte_tokenizer,
        decoder.fingerprint,
        decoder.layout,
        context_length,
        frozenset(),
    )
    text = replace(candidate("text"), never_stored=frozenset({1}))

    def stored(*_prompt: Any) -> Iterator[Step]:
        """What vLLM does; meanwhile somebody removes the text."""
        store.evict(RowFilter(chunk_ids=("text",)))
        system, chunk = text.segments
        kv = torch.zeros(decoder.layout.shape(3), dtype=getattr(torch, decoder.layout.dtype))
        key = VariantKey(engine.namespace, decoder.fingerprint, "text", (system.segment_id,))
        how: Any = {"inter": (0.1,), "intra": 0.3, "cci": 0.6, "exact_share": 1.0}
        made = store.put(
            Capture(key, decoder.layout, chunk.tokens_digest, kv, TokenScores(), **how)
        ).result()
        assert isinstance(made, Variant)
        yield Step((1,), True, {FIELD: {"segments": [], "row_layers": 0}})

    calls: Any = SimpleNamespace(close=lambda: None, generate=stored)
    with ChunkCacheStore.open(tmp_path) as store:
        engine = ServerEngine(
            model, store, ConnectorSettings(str(tmp_path), model.identity), calls=calls
        )
        engine._backend._params = lambda *_ask, **_sampling: None  # type: ignore[method-assign]
        engine.new_variants.answered(100, text)
        assert engine.settle(60)
        assert (store.rows(), engine.new_variants.stats.dropped) == ([], {dropped: 1})


@pytest.fixture
def served(model_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., VLLMEngine]:
    """Engines over vLLM whose own prefix cache is off, so that every prompt is filled."""
    server: dict[str, Any] = {
        "max_model_len": 2048,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }

    def make(when: Any) -> VLLMEngine:
        options: Any = {"reuse": REUSE, "best_last": False, "new_variants": when}
        folder = str(model_folder("Llama"))
        return VLLMEngine.from_pretrained(
            folder, store=tmp_path / str(when), server=server, **options
        )

    return make


@pytest.mark.slow
def test_chunks_that_come_again_are_recomputed_less(served: Callable[..., VLLMEngine]) -> None:
    chunks, orders = [Chunk(text) for text in TEXTS], [[2, 1, 0], [0, 2, 3], [4, 3, 1]]
    recomputed, variants = {}, {}
    for when in ("off", "idle"):
        with served(when) as made:
            made.primer().prime(chunks)
            for turn in range(2):
                counts = []
                for order in orders:
                    stream = made.stream("Why?", [chunks[i] for i in order], sampling=SHORT)
                    assert "".join(stream) is not None
                    counts.append(stream.stats.tokens_recomputed)
                    assert made.settle(600)
                recomputed[when, turn] = sum(counts)
            variants[when] = len(made.store.rows())
            stats = made.new_variants.stats
            assert (stats.captured > 0, stats.tokens > 0, stats.dropped) == (
                when == "idle",
                when == "idle",
                {},
            )
    assert recomputed["off", 0] == recomputed["off", 1] == recomputed["idle", 0] > 0
    assert recomputed["idle", 1] <= 0.6 * recomputed["idle", 0]
    assert variants["idle"] > variants["off"]
