"""The facade besides questions: sampling by name, async answers, sizes, documents; on a tiny model."""

from __future__ import annotations

import asyncio
import threading
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, DocumentError, StoreError
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.index.removal import remove_documents
from cachecraft_rag.retrievers.retriever import open_index
from cachecraft_rag.store import ChunkCacheStore, RowFilter
from cachecraft_rag.types.documents import Document
from cachecraft_rag.types.progress import Progress

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder

PAGES = {
    "pages/kettle": "The kettle holds 1.7 litres.",
    "pages/oven": "The oven heats up in 9 minutes.",
    "notes": "Ida Moll drew the lamp.",
}
QUESTION = "How much does the kettle hold?"


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


@pytest.fixture
def rag(
    tiny_decoder: Callable[..., Decoder], embedder: Embedder, tmp_path: Path
) -> Iterator[CacheCraft]:
    """Three short documents, nothing primed."""
    with (
        ChunkCacheStore.open(tmp_path / "caches") as caches,
        Engine(tiny_decoder("Llama"), caches) as engine,
        open_index(tmp_path, embedder) as index,
    ):
        made = CacheCraft(engine, index, embedder)
        made.add_documents([Document(name, text) for name, text in PAGES.items()])
        yield made


def test_sampling_is_typed_by_name(rag: CacheCraft) -> None:
    short = rag.ask(QUESTION, max_tokens=3)
    assert short.stats.tokens_generated <= 3
    one, same = (rag.ask(QUESTION, max_tokens=8, temperature=5.0, seed=7).text for _ in range(2))
    assert one == same
    assert rag.ask(QUESTION, max_tokens=8, temperature=5.0, seed=8).text != one
    full = rag.ask(QUESTION, max_tokens=24).text
    assert rag.ask(QUESTION, max_tokens=24, stop=full[2:4]).text == full[: full.index(full[2:4])]
    with pytest.raises(ConfigError, match="mean the same"):
        rag.ask(QUESTION, max_tokens=3, max_new_tokens=4)
    with pytest.raises(ConfigError, match="Did you mean temperature"):
        rag.ask(QUESTION, temperatur=1.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="temperature"):
        rag.ask(QUESTION, temperature=-1.0)


def test_async_answers_are_those_of_the_blocking_calls(rag: CacheCraft) -> None:
    expected = rag.ask(QUESTION, max_tokens=6)

    async def both() -> None:
        stream = rag.astream(QUESTION, max_tokens=6)
        assert stream.sources == ()
        assert stream.stats is None
        pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.text == expected.text
        assert stream.sources == expected.sources
        assert stream.stats is not None
        assert stream.stats.finish == expected.stats.finish
        answers = await asyncio.gather(*(rag.aask(QUESTION, max_tokens=6) for _ in range(3)))
        assert {answer.text for answer in answers} == {expected.text}
        with pytest.raises(ConfigError, match="empty"):
            await rag.aask("  ")

    asyncio.run(both())


def test_an_async_answer_that_is_left_early_frees_the_engine(rag: CacheCraft) -> None:
    async def leave() -> None:
        stream = rag.astream(QUESTION, max_tokens=500)
        await anext(stream)
        await stream.aclose()
        assert stream.stats is not None
        assert stream.stats.finish == "closed"
        assert (await rag.aask(QUESTION, max_tokens=2)).stats.tokens_generated == 2

    asyncio.run(leave())


def test_an_async_answer_closed_before_its_first_piece_has_none(
    rag: CacheCraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    retrieving, closed = threading.Event(), threading.Event()
    retrieve = rag.retrieve

    def slow(*arguments: Any, **options: Any) -> Any:
        retrieving.set()
        assert closed.wait(60)
        return retrieve(*arguments, **options)

    monkeypatch.setattr(rag, "retrieve", slow)

    async def close_while_it_begins() -> None:
        stream = rag.astream(QUESTION, max_tokens=500)
        first = asyncio.create_task(anext(stream, None))
        assert await asyncio.to_thread(retrieving.wait, 60)
        await stream.aclose()
        closed.set()
        assert await first is None
        assert await anext(stream, None) is None
        assert stream.text == ""
        assert stream.stats is not None
        assert stream.stats.ttft_s == 0.0  # the model has not run

    asyncio.run(close_while_it_begins())


def test_the_estimate_of_priming_is_what_priming_writes(rag: CacheCraft) -> None:
    expected = rag.estimate_priming()
    assert expected.captures == len(PAGES) + 1  # and the instruction
    assert expected.fits
    assert expected.disk_used == 0
    assert rag.prime() == expected.captures
    rag.engine.store.flush()
    written = rag.engine.store.stats().disk_bytes
    headers = 16_000 * expected.captures
    assert expected.nbytes <= written <= expected.nbytes + headers
    after = rag.estimate_priming()
    assert (after.captures, after.nbytes) == (0, 0)


def test_an_estimate_says_when_the_budget_is_too_small(
    tiny_decoder: Callable[..., Decoder], embedder: Embedder, tmp_path: Path
) -> None:
    with (
        ChunkCacheStore.open(tmp_path / "caches", disk_bytes=1000, codec="int8") as caches,
        Engine(tiny_decoder("Llama"), caches) as engine,
        open_index(tmp_path, embedder) as index,
    ):
        rag = CacheCraft(engine, index, embedder)
        rag.add_documents([Document("page", "The kettle holds 1.7 litres.")])
        estimate = rag.estimate_priming()
        assert not estimate.fits
        layout = engine.decoder.layout
        values = 2 * layout.layers * layout.kv_heads * estimate.tokens
        # a byte a value, two for each scale
        assert estimate.nbytes == values * (layout.head_dim + 2)


def test_documents_are_listed_and_removed_with_their_chunk_caches(rag: CacheCraft) -> None:
    rag.add_documents([Document("copy", PAGES["notes"])])
    assert [document.doc_id for document in rag.documents()] == [
        "copy",
        "notes",
        "pages/kettle",
        "pages/oven",
    ]
    rag.prime(alone=True)  # not after one another
    before = rag.engine.store.stats().chunks
    with pytest.raises(DocumentError, match="did you mean notes"):
        rag.remove_documents(["pages/kettle", "note"])
    assert len(rag.documents()) == 4  # a wrong name removes nothing
    shared = rag.remove_documents(["notes"])
    assert (shared.chunk_ids, shared.chunk_caches) == ((), 0)  # "copy" has its chunk too
    removed = rag.remove_documents(["pages/"])
    assert removed.documents == ("pages/kettle", "pages/oven")
    assert len(removed.chunk_ids) == removed.chunk_caches == 2
    assert removed.nbytes > 0
    assert rag.engine.store.stats().chunks == before - 2
    assert [hit.metadata["source"] for hit in rag.retrieve(QUESTION)] == ["copy"]
    with pytest.raises(ConfigError):
        rag.remove_documents("pages/")


def test_chunk_caches_that_could_not_be_deleted_are_deleted_by_the_next_call(
    tiny_decoder: Callable[..., Decoder], embedder: Embedder, tmp_path: Path
) -> None:
    decoder = tiny_decoder("Llama")
    pages = [Document(name, text) for name, text in PAGES.items()]
    with open_index(tmp_path / "own", embedder) as index:
        with (
            ChunkCacheStore.open(tmp_path / "caches") as store,
            Engine(decoder, store) as engine,
        ):
            rag = CacheCraft(engine, index, embedder)
            rag.add_documents(pages)
            rag.prime(alone=True)  # not after one another
            first, second, *_ = PAGES
            before = store.stats().chunks
        with pytest.raises(StoreError, match="left the index, but their chunk-caches"):
            remove_documents(index, [first], caches=store)  # which is closed
        with ChunkCacheStore.open(tmp_path / "caches") as store:
            assert store.stats().chunks == before
            with pytest.raises(DocumentError, match="no such document"):
                remove_documents(index, [first], caches=store)
            assert store.stats().chunks < before

            # As if the process had been killed in between.
            index.delete_document(second)
            left = store.stats().chunks
            with Engine(decoder, store) as engine:
                CacheCraft(engine, index, embedder)
                assert store.stats().chunks < left


def test_a_document_that_is_removed_while_it_is_primed_leaves_nothing(rag: CacheCraft) -> None:
    gone: list[str] = []

    def remove(_: Progress) -> None:
        if not gone:
            gone.extend(rag.remove_documents(["pages/oven"]).chunk_ids)

    assert rag.prime(progress=remove) > 0
    assert gone
    assert not rag.engine.store.rows(RowFilter(chunk_ids=tuple(gone)))


def test_a_comparison_retrieves_once(rag: CacheCraft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two searches a document may be removed."""
    stream = rag.engine.stream

    def removing(*given: Any, **options: Any) -> Any:
        rag.remove_documents([document.doc_id for document in rag.documents()][:1])
        return stream(*given, **options)

    monkeypatch.setattr(rag.engine, "stream", removing)
    found = rag.compare(QUESTION, max_tokens=2, top_k=3)
    assert len(rag.documents()) == 1
    assert [source.chunk_id for source in found.reused.sources] == [
        source.chunk_id for source in found.full.sources
    ]


def test_a_document_is_removed_by_the_name_that_a_keyboard_types(
    rag: CacheCraft, tmp_path: Path
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    typed = "Größe.md"
    (folder / unicodedata.normalize("NFD", typed)).write_text("The size of the Wren K2 is 5.")
    rag.add_documents(folder)
    stored = [one.doc_id for one in rag.documents() if "Gr" in one.doc_id]
    assert len(rag.remove_documents([f"docs/{typed}"]).documents) == len(stored) == 1
    assert not [one for one in rag.documents() if one.doc_id in stored]
