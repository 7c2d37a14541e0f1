"""The facade on the embedded models: documents in, answers out."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, IndexStoreError, StoreError
from cachecraft_rag.model.checkpoint import chunk_bound_of
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.planning.config import ReuseConfig
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.indexer import index_documents
from cachecraft_rag.retrievers.retriever import open_index
from cachecraft_rag.serving.generation import Generation
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.types.documents import Chunk, Document
from cachecraft_rag.types.progress import Progress

PAGES = ("kettle-wren-k2.md", "descaling.md", "warranty.md")
SHORT = SamplingParams(max_new_tokens=12)
QUESTION = "How often should I descale the Wren K2 kettle?"


@pytest.fixture(scope="module")
def documents(handbook: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pages of the handbook in a folder of their own."""
    folder = tmp_path_factory.mktemp("pages") / "pages"
    folder.mkdir()
    for page in PAGES:
        shutil.copy(handbook / page, folder)
    return folder


@pytest.fixture(scope="module")
def rag(
    demo_model: Path, documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CacheCraft]:
    """A facade with the three pages indexed and nothing primed."""
    with CacheCraft.from_pretrained(
        str(demo_model), store=tmp_path_factory.mktemp("store")
    ) as made:
        made.add_documents(documents)
        yield made


@pytest.fixture
def fresh(rag: CacheCraft) -> CacheCraft:
    """The same facade with an empty chunk-cache store."""
    rag.engine.write_back.wait_for([])
    rag.engine.store.flush()
    rag.engine.store.evict(down_to_bytes=0)
    return rag


@pytest.fixture
def tiny(
    tiny_decoder: Callable[..., Decoder], store: ChunkCacheStore, tmp_path: Path
) -> Iterator[CacheCraft]:
    """A facade with a tiny model and an empty index."""
    embedder = Embedder()
    with (
        Engine(tiny_decoder("Llama"), store) as engine,
        open_index(tmp_path / "own", embedder) as index,
    ):
        yield CacheCraft(engine, index, embedder)


def test_an_empty_index_says_what_to_do(tiny: CacheCraft) -> None:
    with pytest.raises(IndexStoreError, match="cachecraft index"):
        tiny.ask("Anything?")


def test_what_was_opened_is_closed_again_when_a_later_part_cannot_be(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, own = list[ChunkCacheStore](), ChunkCacheStore.open
    monkeypatch.setattr(
        ChunkCacheStore, "open", lambda *given: opened.append(own(*given)) or opened[-1]
    )
    FaissStore.open(tmp_path / "index", dim=3, embedder_fingerprint="another model@1").close()
    with pytest.raises(IndexStoreError, match="another model"):
        CacheCraft.from_pretrained(str(demo_model), store=tmp_path)
    with pytest.raises(StoreError, match="closed"):
        opened[0].stats()


def test_an_unknown_option_of_a_connection_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"timeout: no such option\. Did you mean timeout_s\?"):
        CacheCraft.connect("http://127.0.0.1:9", store=tmp_path, timeout=3)


def test_later_questions_reuse_the_captures_of_the_first_exactly_or_moved(
    fresh: CacheCraft,
) -> None:
    first = fresh.ask(QUESTION, sampling=SHORT)
    second = fresh.ask(QUESTION, sampling=SHORT)
    assert {chunk.outcome for chunk in first.stats.chunks} == {"computed"}
    assert {chunk.outcome for chunk in second.stats.chunks} == {"exact"}
    assert second.stats.tokens_reused > 0
    assert second.stats.tokens_recomputed == 0
    ranked = [source.chunk_id for source in first.sources]
    # the best is the last, directly before the question
    assert ranked == [chunk.chunk_id for chunk in reversed(first.stats.chunks)]
    other = fresh.ask("What does the warranty say about limescale?", sampling=SHORT)
    moved = [chunk for chunk in other.stats.chunks if chunk.outcome == "reused"]
    assert moved
    assert all(0 < chunk.recomputed < chunk.tokens for chunk in moved)
    assert all(chunk.cfo is not None and 0 < chunk.cfo < 1 for chunk in moved)


def test_a_comparison_changes_no_later_comparison(fresh: CacheCraft) -> None:
    fresh.prime()
    stored = {row.variant.variant_id for row in fresh.engine.store.rows()}
    first = fresh.compare(QUESTION, sampling=SHORT)
    second = fresh.compare(QUESTION, sampling=SHORT)
    fresh.engine.write_back.wait_for([])
    assert {row.variant.variant_id for row in fresh.engine.store.rows()} == stored
    assert first.reused.stats.tokens_reused > 0
    assert first.full.stats.tokens_reused == 0
    assert [chunk.outcome for chunk in first.full.stats.chunks] == ["computed"] * len(
        first.full.sources
    )
    assert [source.chunk_id for source in first.reused.sources] == [
        source.chunk_id for source in first.full.sources
    ]
    assert second.full.text == first.full.text
    assert second.reused.stats.tokens_reused == first.reused.stats.tokens_reused
    assert first.is_same == (first.agreement == 1.0)
    assert first.as_dict()["speedup"] == first.full.stats.ttft_s / first.reused.stats.ttft_s
    empty = replace(first.full, stats=replace(first.full.stats, ttft_s=0.0))
    assert math.isnan(replace(first, full=empty).speedup)
    assert math.isnan(replace(first, reused=empty).speedup)


def test_settings_of_another_kind_are_refused_before_anything_is_asked(fresh: CacheCraft) -> None:
    with pytest.raises(ConfigError, match="config must be a ReuseConfig"):
        fresh.compare(QUESTION, config="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reuse is switched off"):
        fresh.compare(QUESTION, config=ReuseConfig.full_prefill())
    for option in ({"reader": str}, {"follow_links": True}, {"opener": os.open}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))}: for files"):
            fresh.add_documents([], **option)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="alone"):
        fresh.estimate_priming(alone="yes")  # type: ignore[arg-type]


def test_without_captures_the_same_question_is_answered_alike(fresh: CacheCraft) -> None:
    fresh.prime()
    settings = ReuseConfig.deterministic()
    first = fresh.ask(QUESTION, sampling=SHORT, config=settings)
    fresh.ask("What does the warranty say about limescale?", sampling=SHORT, config=settings)
    second = fresh.ask(QUESTION, sampling=SHORT, config=settings)
    assert second.text == first.text
    plans = [
        [(chunk.outcome, chunk.recomputed) for chunk in answer.stats.chunks]
        for answer in (first, second)
    ]
    assert plans[0] == plans[1]


@pytest.mark.slow  # tests/test_gates.py has the quick one
def test_reuse_of_exact_caches_gives_the_answer_of_full_prefill_in_fp32(
    demo_model: Path, documents: Path, tmp_path: Path
) -> None:
    with CacheCraft.from_pretrained(str(demo_model), store=tmp_path, dtype="float32") as rag:
        rag.add_documents(documents)
        full = rag.ask(QUESTION, sampling=SHORT, config=ReuseConfig(reuse=False))  # captures
        reused = rag.ask(QUESTION, sampling=SHORT)
    assert reused.stats.tokens_reused > 0
    assert reused.text == full.text


def test_priming_captures_every_chunk_once_and_resumes(fresh: CacheCraft) -> None:
    stats = fresh.index.stats()
    seen: list[Progress] = []
    captured = fresh.prime(progress=seen.append)
    # each document's first chunk twice, and the system segment
    assert captured == stats.chunks + stats.documents + 1
    # before the first pass: minutes would be silent otherwise
    assert (seen[0].done, seen[0].total) == (0, captured)
    assert (seen[-1].done, seen[-1].total) == (captured, captured)
    assert [step.done for step in seen] == sorted({step.done for step in seen})
    assert {step.what for step in seen[1:]} == {
        f"priming {document.doc_id}" for document in fresh.index.documents()
    }
    assert fresh.prime() == 0
    answer = fresh.ask(QUESTION, sampling=SHORT)
    assert all(chunk.outcome in ("exact", "reused") for chunk in answer.stats.chunks)


def test_streamed_pieces_are_the_answer(fresh: CacheCraft) -> None:
    stream = fresh.stream(QUESTION, sampling=SHORT)
    assert stream.sources
    assert stream.stats.finish is None
    pieces = list(stream)
    assert "".join(pieces) == stream.text
    assert stream.stats.finish in ("end", "length")
    assert stream.stats.tokens_generated <= SHORT.max_new_tokens


def test_the_chunk_caches_of_a_removed_document_go_with_it(
    tiny: CacheCraft, documents: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pages"
    shutil.copytree(documents, folder)
    with tiny as rag:
        steps: list[Progress] = []
        rag.add_documents(folder, prime=True, progress=steps.append)
        assert [step.what.split()[0] for step in steps[:3]] == ["reading"] * 3
        assert [step.what.split()[0] for step in steps[-3:]] == ["priming"] * 3
        # first chunks twice, instruction
        assert steps[-1].done == steps[-1].total == rag.index.stats().chunks + 3 + 1
        before = rag.engine.store.stats().chunks
        (folder / "warranty.md").unlink()
        report = rag.add_documents(folder)
        assert report.removed == ("pages/warranty.md",)
        assert rag.engine.store.stats().chunks == before - len(report.removed_chunk_ids)
        found = rag.retrieve("What does the warranty cover?", top_k=50)
        assert {hit.metadata["source"] for hit in found} == {
            "pages/kettle-wren-k2.md",
            "pages/descaling.md",
        }


def test_a_text_removed_between_retrieval_and_answer_is_not_captured_until_it_is_added_again(
    tiny: CacheCraft, documents: Path
) -> None:
    store = tiny.engine.store
    assert isinstance(store, ChunkCacheStore)
    tiny.add_documents(documents)
    held = [Chunk(hit.text, hit.metadata) for hit in tiny.retrieve("warranty", top_k=3)]
    ids = tuple(chunk.chunk_id for chunk in held)

    def ask() -> Generation:
        stream = tiny.engine.stream(QUESTION, held, sampling=SHORT)
        for _ in stream:
            pass
        assert tiny.engine.settle(60)
        return stream

    tiny.remove_documents([document.doc_id for document in tiny.documents()])
    stats = ask().stats
    assert store.rows(RowFilter(chunk_ids=ids)) == []
    assert {chunk.reason for chunk in stats.chunks} == {
        "its document was removed; neither it nor chunks after it are stored until it is added again"
    }

    # opened again, over the same folders
    CacheCraft(tiny.engine, tiny.index, tiny.embedder)
    ask()
    assert store.rows(RowFilter(chunk_ids=ids)) == []

    tiny.add_documents(documents)
    ask()
    assert {chunk.outcome for chunk in ask().stats.chunks} == {"exact"}


def test_no_chunk_cache_names_a_removed_chunk_before_it(tiny: CacheCraft) -> None:
    store = tiny.engine.store
    assert isinstance(store, ChunkCacheStore)
    tiny.add_documents(
        [
            Document("price", "The Wren K2 kettle costs 30 euros in May."),
            Document("descaling", "Descale the Wren K2 kettle with vinegar."),
        ]
    )
    for question in ("What does the kettle cost?", "How do I descale the kettle?"):
        tiny.ask(question, top_k=2, sampling=SHORT)
        assert tiny.engine.settle(60)
    report = tiny.remove_documents(["price"])
    assert report.chunk_caches >= 2
    left = {name for row in store.rows() for name in row.variant.key.origin_prefix}
    assert left.isdisjoint(report.chunk_ids)


def test_documents_in_memory_and_filters(fresh: CacheCraft) -> None:
    note = Document(
        "note", "The Wren K2 was drawn by Ida Moll in a barn near the river.", {"kind": "note"}
    )
    assert fresh.add_documents([note]).added == ("note",)
    hits = fresh.retrieve("Who drew the kettle?", where={"kind": "note"})
    assert [hit.metadata["source"] for hit in hits] == ["note"]
    fresh.index.delete_document("note")


@pytest.mark.slow
def test_a_document_in_signs_the_model_does_not_know_does_not_silence_the_others(
    demo_model: Path, documents: Path, tmp_path: Path
) -> None:
    signs = "".join(chr(0x13000 + place * 7 % 1000) for place in range(3000))
    glyphs = Document("glyphs", f"# Kettle glyphs\n\n{signs}")
    with CacheCraft.from_pretrained(str(demo_model), store=tmp_path) as rag:
        rag.add_documents(documents)
        # as an index made without the model holds it
        index_documents([glyphs], rag.index, rag.embedder)
        (whole,) = rag.index.chunks_of("glyphs")
        skipped: list[str] = []
        # the system segment, all but one chunk, and the first chunk of three documents once more
        assert rag.prime(skipped=skipped.append) == rag.index.stats().chunks + 3
        assert skipped == [
            "glyphs: 1 of 1 chunks are too long for the model and were not computed; index the document again with "
            "this model"
        ]
        answer = rag.ask(QUESTION, top_k=50, sampling=SHORT)
        outcomes = {chunk.chunk_id: chunk.outcome for chunk in answer.stats.chunks}
        assert outcomes.pop(whole.chunk_id) == "trimmed"
        assert set(outcomes.values()) <= {"exact", "reused"}
        assert rag.add_documents([glyphs]).updated == ("glyphs",)
        bound = rag.engine.decoder.chunk_bound
        assert bound.name == chunk_bound_of(str(demo_model)).name
        assert (
            max(bound.count(chunk.text) for chunk in rag.index.chunks_of("glyphs")) <= bound.limit
        )
        # no two of them fit a pass
        assert rag.prime(skipped=skipped.append) == len(rag.index.chunks_of("glyphs"))
        assert len(skipped) == 1


def test_priming_refuses_what_cannot_be_called(rag: CacheCraft) -> None:
    nothing: Any
    for nothing in (5, None):
        with pytest.raises(ConfigError, match="skipped must be a function"):
            rag.prime(skipped=nothing)


def test_a_question_without_words_is_refused(rag: CacheCraft) -> None:
    with pytest.raises(ConfigError, match="empty"):
        rag.ask("  ")


HISTORY = [("user", QUESTION), ("assistant", "Every 8 weeks.")]


def test_a_follow_up_finds_what_it_refers_to_and_says_what_was_searched(fresh: CacheCraft) -> None:
    first = fresh.ask(QUESTION, sampling=SHORT)
    assert first.stats.searched == (QUESTION,)
    follow_up = "What happens if I never do it?"
    alone = fresh.ask(follow_up, top_k=3, history=HISTORY, sampling=SHORT, search_history=False)
    together = fresh.ask(follow_up, top_k=3, history=(turn for turn in HISTORY), sampling=SHORT)
    assert alone.stats.searched == (follow_up,)
    assert together.stats.searched == (follow_up, f"{QUESTION} {follow_up}")
    assert together.as_dict()["stats"]["searched"] == together.stats.searched
    answering = "Limescale wastes energy"
    assert any(answering in source.text for source in together.sources)
    assert not any(answering in source.text for source in alone.sources)
    cached = {source.chunk_id for source in first.sources}
    assert cached & {source.chunk_id for source in together.sources}


def test_after_the_result_of_a_tool_nothing_is_retrieved(fresh: CacheCraft) -> None:
    called = [
        ("user", QUESTION),
        ("calls", '[{"name": "look", "arguments": {}}]'),
        ("result", "Every 8 weeks."),
    ]
    answer = fresh.ask("", history=called, sampling=SHORT)
    assert answer.sources == answer.stats.chunks == answer.stats.searched == ()


@pytest.mark.parametrize(
    "options", [{"search_history": 1}, {"history": "text"}, {"history": [("user", 1)]}]
)
def test_a_wrong_history_is_refused_before_retrieval(
    fresh: CacheCraft, options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="history"):
        fresh.stream("And then?", **options)  # type: ignore[arg-type]
