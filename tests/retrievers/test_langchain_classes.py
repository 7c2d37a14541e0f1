"""Our index as LangChain's vector store and retriever, beyond what LangChain's standard tests look at."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, aindex, index

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError, IndexStoreError
from cachecraft_rag.langchain import ChatCacheCraft
from cachecraft_rag.rag import CacheCraft
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.langchain import CacheCraftEmbeddings, CacheCraftVectorStore
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import CHUNK_ID_KEY, chunk_id_of
from cachecraft_rag.types.documents import Document as OwnDocument

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder


class Directions(Embeddings):
    """A text that begins with an angle in degrees points there, three units long; counts what it embeds."""

    def __init__(self) -> None:
        self.embedded: list[str] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.embedded += texts
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        first = text.split()[0]
        angle = math.radians(float(first)) if first.isdigit() else 0.0
        return [3 * math.cos(angle), 3 * math.sin(angle)]


@pytest.fixture
def embedding() -> Directions:
    """Vectors that a reader can check."""
    return Directions()


@pytest.fixture
def store(tmp_path: Path, embedding: Directions) -> Iterator[CacheCraftVectorStore]:
    """An empty store."""
    with CacheCraftVectorStore.open(tmp_path / "index", embedding) as made:
        yield made


def ids(documents: list[Document]) -> list[str | None]:
    """The documents' ids."""
    return [document.id for document in documents]


def test_scores_are_cosines_whatever_the_length_of_the_vectors(
    store: CacheCraftVectorStore,
) -> None:
    store.add_texts(["0 east", "60 north-east", "180 west"], ids=["e", "n", "w"])
    found = store.similarity_search_with_score("0", k=3)
    assert [document.id for document, _ in found] == ["e", "n", "w"]
    assert [score for _, score in found] == pytest.approx([1.0, 0.5, -1.0], abs=1e-6)
    relevant = store.similarity_search_with_relevance_scores("0", k=3)
    assert [score for _, score in relevant] == pytest.approx([1.0, 0.5, 0.0], abs=1e-6)
    search = {"score_threshold": 0.4, "k": 3}
    near = store.as_retriever(search_type="similarity_score_threshold", search_kwargs=search)
    assert ids(near.invoke("0")) == ["e", "n"]
    assert ids(store.similarity_search_by_vector([0.0, 5.0], k=1)) == ["n"]


def test_options_that_do_not_exist_are_refused(store: CacheCraftVectorStore) -> None:
    store.add_texts(["0 east"], ids=["e"])
    calls: list[Callable[[], object]] = [
        lambda: store.similarity_search("0", filtr={"page": 1}),
        lambda: store.similarity_search_by_vector([1.0, 0.0], filtr=None),
        lambda: store.max_marginal_relevance_search("0", lamda_mult=0.5),
        lambda: store.add_texts(["1 b"], id=["b"]),
        lambda: store.delete(["e"], force=True),
        lambda: store.as_retriever(search_kwargs={"top_k": 3}).invoke("0"),
    ]
    for call in calls:
        with pytest.raises(ConfigError):
            call()
    assert ids(store.similarity_search("0")) == ["e"]


def test_marginal_relevance_prefers_what_is_unlike(store: CacheCraftVectorStore) -> None:
    store.add_texts(["10 a", "11 a twin", "50 another"], ids=["a", "twin", "other"])
    assert ids(store.similarity_search("5", k=2)) == ["a", "twin"]
    assert ids(store.max_marginal_relevance_search("5", k=2, lambda_mult=0.2)) == ["a", "other"]
    diverse = store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "lambda_mult": 0.2})
    assert ids(diverse.invoke("5")) == ["a", "other"]


def test_what_is_deleted_during_a_search_is_left_out(
    store: CacheCraftVectorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_texts(["10 a", "11 a twin", "50 another"], ids=["a", "twin", "other"])
    search = store.index.search

    def search_then_delete(*given: Any, **options: Any) -> Any:
        hits = search(*given, **options)
        store.delete(["a"])
        return hits

    monkeypatch.setattr(store.index, "search", search_then_delete)
    assert set(ids(store.max_marginal_relevance_search("5", k=3))) == {"twin", "other"}


def test_an_index_that_texts_could_not_be_added_to_is_closed(
    tmp_path: Path, embedding: Directions, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []
    close = CacheCraftVectorStore.close
    monkeypatch.setattr(
        CacheCraftVectorStore, "close", lambda store: (closed.append(store), close(store))
    )
    circular: dict[str, Any] = {}
    circular["self"] = circular
    with pytest.raises(ConfigError, match="JSON-serializable"):
        CacheCraftVectorStore.from_texts(
            ["0 east"], embedding, [circular], folder=tmp_path / "index"
        )
    assert len(closed) == 1


def test_texts_without_an_id_of_their_own_are_not_dropped(
    store: CacheCraftVectorStore, embedding: Directions, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="1 ids for 2 texts"):
        store.add_texts(["a", "b"], ids=["1"])
    with pytest.raises(ConfigError, match="1 ids for 2 texts"):
        CacheCraftVectorStore.from_texts(["a", "b"], embedding, ids=["1"], folder=tmp_path / "i")


def test_metadatas_are_one_for_each_text_or_none(store: CacheCraftVectorStore) -> None:
    with pytest.raises(ConfigError, match="1 metadatas for 2 texts"):
        store.add_texts(["a", "b"], [{"page": 1}])
    assert len(store.add_texts(["0 east", "1 north"], [])) == 2


def test_metadata_of_any_shape_comes_back_and_can_be_filtered(store: CacheCraftVectorStore) -> None:
    first = {
        "page": 3,
        "draft": False,
        "authors": ["Ida", "Moll"],
        "place": {"room": 7},
        "none": None,
    }
    store.add_documents(
        [Document("0 a", metadata=first, id="1"), Document("1 b", metadata={"page": 4}, id="2")]
    )
    assert store.get_by_ids(["1"])[0].metadata == first
    assert ids(store.similarity_search("0", filter={"page": 4})) == ["2"]
    assert ids(
        store.similarity_search("0", filter=lambda values: "Moll" in values.get("authors", []))
    ) == ["1"]
    with pytest.raises(ConfigError, match="JSON"):
        store.add_documents([Document("2 c", metadata={"day": date(2026, 1, 1)})])
    assert len(store.similarity_search("0", k=9)) == 2


def test_documents_carry_their_chunk_id_and_equal_what_was_added(
    store: CacheCraftVectorStore,
) -> None:
    added = Document("0 a", metadata={"page": 3}, id="1")
    store.add_documents([added])
    (back,) = store.similarity_search("0")
    assert back == added
    assert added == back
    assert back != Document("0 a", metadata={"page": 4}, id="1")
    assert back.metadata[CHUNK_ID_KEY] == chunk_id_of("0 a")
    back.page_content = "0 b"
    store.add_documents([back])  # an edited copy: its old chunk id is not kept
    (edited,) = store.get_by_ids(["1"])
    assert (edited.metadata[CHUNK_ID_KEY], edited.metadata) == (chunk_id_of("0 b"), {"page": 3})


def test_one_text_under_two_ids_is_one_chunk_that_stays_until_both_are_gone(
    store: CacheCraftVectorStore, embedding: Directions
) -> None:
    store.add_texts(
        ["0 the same", "0 the same"], [{"of": "first"}, {"of": "second"}], ids=["1", "2"]
    )
    assert embedding.embedded == ["0 the same"]
    assert ids(store.similarity_search("0", k=9)) == ["1"]
    assert ids(store.similarity_search("0", k=9, filter={"of": "second"})) == ["2"]
    store.delete(["1"])
    assert store.similarity_search("0", k=9) == [
        Document("0 the same", id="2", metadata={"of": "second"})
    ]
    store.delete(["2"])
    assert store.similarity_search("0", k=9) == []


def test_what_is_added_after_a_deletion_is_not_mistaken_for_what_was_deleted(
    store: CacheCraftVectorStore,
) -> None:
    store.add_texts(
        [f"{angle} leaflet" for angle in range(0, 100, 10)],
        ids=[str(angle) for angle in range(0, 100, 10)],
    )
    store.delete(["0", "50", "90"])
    store.add_texts(["52 new"], ids=["new"])
    assert store.similarity_search("51", k=1) == [Document("52 new", id="new")]
    assert ids(store.similarity_search("0", k=1)) == ["10"]
    store.delete()
    assert store.similarity_search("51", k=9) == []


def test_an_upsert_embeds_only_what_is_new(
    store: CacheCraftVectorStore, embedding: Directions
) -> None:
    store.add_texts(["0 a", "1 b"], ids=["a", "b"])
    store.add_texts(["0 a", "2 c"], [{"page": 1}, {}], ids=["a", "b"])
    assert embedding.embedded == ["0 a", "1 b", "2 c"]
    assert store.get_by_ids(["a", "b"]) == [
        Document("0 a", id="a", metadata={"page": 1}),
        Document("2 c", id="b"),
    ]
    assert len({*store.add_texts(["3 d", "4 e"])}) == 2  # ids of their own
    with pytest.raises(ConfigError, match="1 ids for 2 documents"):
        store.add_documents([Document("a"), Document("b")], ids=["1"])


def test_it_is_on_the_disk_and_knows_its_embeddings(tmp_path: Path) -> None:
    four, eight = DeterministicFakeEmbedding(size=4), DeterministicFakeEmbedding(size=8)
    documents = [Document("a", id="1"), Document("b", id="2")]
    with CacheCraftVectorStore.from_documents(documents, four, folder=tmp_path) as made:
        assert made.embeddings is four
    with CacheCraftVectorStore.open(tmp_path, four) as again:
        assert again.similarity_search("b", k=1) == [documents[1]]
    with pytest.raises(IndexStoreError, match="DeterministicFakeEmbedding"):
        CacheCraftVectorStore.open(tmp_path, eight)


def test_a_store_made_from_documents_deletes_chunk_caches_too(
    embedding: Directions, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    documents = [Document("0 kept", id="a"), Document("1 gone", id="b")]
    with (
        ChunkCacheStore.open(tmp_path / "caches") as caches,
        Engine(tiny_decoder("Llama"), caches) as engine,
    ):
        made = CacheCraftVectorStore.from_documents(
            documents, embedding, folder=tmp_path / "index", caches=caches
        )
        with made as store:
            for document in store.similarity_search("0", k=2):
                ChatCacheCraft(engine=engine, max_tokens=2).invoke("What?", documents=[document])
                assert engine.settle()
            store.delete(["b"])
        kept = {row.variant.key.chunk_id for row in caches.rows()}
        assert chunk_id_of("0 kept") in kept
        assert chunk_id_of("1 gone") not in kept
    with pytest.raises(ConfigError, match=r"cashes: no such option. Did you mean caches\?"):
        CacheCraftVectorStore.from_documents(
            documents, embedding, folder=tmp_path / "index", cashes=None
        )


def test_documents_that_were_retrieved_before_their_deletion_leave_no_chunk_cache(
    embedding: Directions, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    documents = [Document("0 kept", id="a"), Document("1 gone", id="b")]
    with (
        ChunkCacheStore.open(tmp_path / "caches") as caches,
        Engine(tiny_decoder("Llama"), caches) as engine,
        CacheCraftVectorStore.from_documents(
            documents, embedding, folder=tmp_path / "index", caches=caches
        ) as store,
    ):
        chat = ChatCacheCraft(engine=engine, max_tokens=2)
        held = store.similarity_search("1", k=2)
        store.delete(["b"])
        store.add_documents([Document("2 new", id="c")])
        chat.invoke("What?", documents=held)
        assert engine.settle()
        gone = chunk_id_of("1 gone")
        assert gone not in {row.variant.key.chunk_id for row in caches.rows()}
        store.add_documents([documents[1]])
        chat.invoke("What?", documents=held)
        assert engine.settle()
        assert gone in {row.variant.key.chunk_id for row in caches.rows()}


def test_over_the_facades_index(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    """Chunks that the facade indexed are found by chunk id, answered over, and deleted with its chunk-caches."""
    embedder = Embedder()
    with (
        FaissStore.open(
            tmp_path / "index", dim=embedder.dim, embedder_fingerprint=embedder.fingerprint
        ) as index,
        ChunkCacheStore.open(tmp_path / "caches") as caches,
        Engine(tiny_decoder("Llama"), caches) as engine,
    ):
        rag = CacheCraft(engine, index, embedder)
        texts = [
            "The Wren K2 is a kettle that holds 1.7 litres.",
            "The Heron V5 is a vacuum cleaner without a cable.",
        ]
        rag.add_documents(
            [OwnDocument(str(place), text, {"place": place}) for place, text in enumerate(texts)]
        )
        store = CacheCraftVectorStore.from_rag(rag)
        store.close()  # the index is the facade's and stays open
        question = "How much does the kettle hold?"
        found = store.as_retriever().invoke(question)
        assert ids(found) == [hit.chunk_id for hit in rag.retrieve(question)]
        assert (found[0].metadata["place"], found[0].metadata["cachecraft_chunk_id"]) == (
            0,
            found[0].id,
        )
        ChatCacheCraft(engine=engine, max_tokens=2).invoke(question, documents=found)
        answer = rag.ask(question)
        # the same chunks by either way
        assert {chunk.outcome for chunk in answer.stats.chunks} == {"exact"}
        kettle = chunk_id_of(found[0].page_content)
        assert store.get_by_ids([kettle, "nothing"])[0].page_content == found[0].page_content
        caches.flush()
        before = caches.stats().chunks
        store.delete([kettle, "nothing"])
        store.close()
        assert caches.stats().chunks == before - 1
        assert ids(store.similarity_search(question)) == [chunk_id_of(found[1].page_content)]


def test_an_upsert_by_deletion_and_addition_keeps_what_did_not_change(
    embedding: Directions, tiny_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    with (
        ChunkCacheStore.open(tmp_path / "caches") as caches,
        Engine(tiny_decoder("Llama"), caches) as engine,
    ):
        index = FaissStore.open(tmp_path / "index", dim=2, embedder_fingerprint="directions@1")
        with index, CacheCraftVectorStore(index, embedding, caches=caches) as store:
            store.add_texts(["0 same", "1 old"], ids=["a", "b"])
            for document in store.similarity_search("0"):
                ChatCacheCraft(engine=engine, max_tokens=2).invoke("What?", documents=[document])
                assert engine.settle()
            store.delete(["a", "b"])
            store.add_texts(["1 new", "0 same"], ids=["a", "b"])
            kept = {row.variant.key.chunk_id for row in caches.rows()}
            assert chunk_id_of("0 same") in kept
            assert chunk_id_of("1 old") not in kept


def test_a_second_close_does_nothing(
    embedding: Directions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkCacheStore.open(tmp_path / "caches") as caches:
        store = CacheCraftVectorStore.open(tmp_path / "index", embedding, caches=caches)
        store.add_texts(["0 east"])
        store.close()
        store.close()
    assert "until the next deletion" not in caplog.text


def test_embeddings_for_any_vector_store() -> None:
    embeddings = CacheCraftEmbeddings()
    vectors = embeddings.embed_documents(["The kettle boils.", "The dog barks."])
    query = embeddings.embed_query("What does the dog do?")
    scores = [sum(a * b for a, b in zip(query, vector, strict=True)) for vector in vectors]
    assert scores[1] > scores[0]
    assert math.hypot(*query) == pytest.approx(1.0, abs=1e-5)
    assert embeddings.embed_documents([]) == []


@pytest.mark.parametrize("is_async", [False, True])
def test_langchains_indexing_api_adds_skips_and_deletes(
    store: CacheCraftVectorStore, is_async: bool
) -> None:
    records = InMemoryRecordManager(namespace="handbook")
    records.create_schema()

    def write(*texts: str) -> Any:
        options: dict[str, Any] = {
            "cleanup": "full",
            "source_id_key": "source",
            "key_encoder": "sha256",
            "batch_size": 1,
        }
        documents = [Document(text, metadata={"source": "handbook.txt"}) for text in texts]
        if is_async:
            return asyncio.run(aindex(documents, records, store, **options))
        return index(documents, records, store, **options)

    before = {document.doc_id for document in store.index.documents()}
    counts = [write("x", "y"), write("x", "y"), write("y")]
    assert [(made["num_added"], made["num_skipped"], made["num_deleted"]) for made in counts] == [
        (2, 0, 0),
        (0, 2, 0),
        (0, 1, 1),
    ]
    added = [
        document.doc_id for document in store.index.documents() if document.doc_id not in before
    ]
    assert [document.page_content for document in store.get_by_ids(added)] == ["y"]
