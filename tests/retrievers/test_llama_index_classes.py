"""The vector store and embeddings as LlamaIndex sees them, against its own vector store wherever the two can agree."""

from __future__ import annotations

import asyncio
import datetime
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from llama_index.core import Document, SimpleDirectoryReader, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from cachecraft_rag.errors import ConfigError, IndexStoreError
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.index.removal import Evictions
from cachecraft_rag.retrievers.llama_index import CacheCraftEmbedding, CacheCraftVectorStore
from cachecraft_rag.retrievers.retriever import Retriever, open_index
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.types.captures import Capture, TokenScores
from cachecraft_rag.types.documents import CHUNK_ID_KEY, Chunk, chunk_id_of
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import VariantKey

DIM = 16


def vector_of(text: str) -> list[float]:
    """A vector that depends on the text alone; not of unit length."""
    return (3 * np.random.default_rng(list(text.encode())).standard_normal(DIM)).tolist()


class TextEmbedding(BaseEmbedding):
    """Another vector for every text; counts how many texts it was given."""

    seen: list[str] = []  # noqa: RUF012  # pydantic copies it

    def _get_text_embedding(self, text: str) -> list[float]:
        self.seen.append(text)
        return vector_of(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return vector_of(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return vector_of(query)


def node_of(name: str, text: str, *, document: str | None = "d", **metadata: object) -> TextNode:
    node = TextNode(id_=name, text=text, metadata=metadata, embedding=vector_of(text))
    if document is not None:
        node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=document)
    return node


def found(store: CacheCraftVectorStore, text: str, k: int = 1, **settings: object) -> list[str]:
    """The ids of the nearest nodes."""
    query = VectorStoreQuery(query_embedding=vector_of(text), similarity_top_k=k, **settings)
    return list(store.query(query).ids or [])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CacheCraftVectorStore]:
    with CacheCraftVectorStore(tmp_path / "index") as made:
        yield made


# --- classes ---


def test_classes_are_llama_indexs() -> None:
    assert "BasePydanticVectorStore" in [base.__name__ for base in CacheCraftVectorStore.__mro__]
    assert "BaseEmbedding" in [base.__name__ for base in CacheCraftEmbedding.__mro__]


# --- adding and deleting ---


def test_a_node_comes_back_as_it_was(store: CacheCraftVectorStore) -> None:
    node = node_of("n1", "Descale it.", page=3, tags=["hot", "wet"], when=datetime.date(2024, 5, 1))
    node.excluded_llm_metadata_keys = ["page"]
    node.relationships[NodeRelationship.NEXT] = RelatedNodeInfo(node_id="n2")
    store.add([node])
    (back,) = store.get_nodes(["n1"])
    assert isinstance(back, TextNode)
    assert (back.text, back.ref_doc_id) == ("Descale it.", "d")
    assert back.excluded_llm_metadata_keys == ["page", CHUNK_ID_KEY]
    assert back.excluded_embed_metadata_keys == [CHUNK_ID_KEY]
    assert back.metadata.pop(CHUNK_ID_KEY) == chunk_id_of(back.get_content(metadata_mode="llm"))
    assert back.metadata == {"page": 3, "tags": ["hot", "wet"], "when": "2024-05-01"}
    assert back.next_node is not None
    assert store.client is not None
    (chunk,) = store.client.places()
    # the id of its chunk-cache
    assert chunk.chunk_id == chunk_id_of(back.get_content(metadata_mode="llm"))


def test_before_the_first_node_there_is_nothing_and_no_folder(
    store: CacheCraftVectorStore, tmp_path: Path
) -> None:
    assert found(store, "kettle") == []
    assert store.get_nodes() == []
    store.delete("d")
    store.delete_nodes(["n1"])
    store.clear()
    store.persist()
    assert store.client is None
    assert list(tmp_path.iterdir()) == []


def test_adding_a_node_again_replaces_it_wherever_it_was(store: CacheCraftVectorStore) -> None:
    store.add([node_of("n1", "kettle"), node_of("n2", "toaster")])
    store.add([node_of("n1", "kettle"), node_of("n2", "fridge", document="other")])
    assert sorted(found(store, "kettle", 9)) == ["n1", "n2"]
    assert found(store, "fridge") == ["n2"]
    store.delete("d")
    assert found(store, "kettle", 9) == ["n2"]


def test_chunks_that_llama_index_did_not_add_are_found_and_deleted_by_their_chunk_ids(
    store: CacheCraftVectorStore,
) -> None:
    """As `cachecraft index` adds them to the same index."""
    store.add([node_of("n1", "kettle")])
    assert store.client is not None
    chunks = [Chunk(text, {"source": f"{text}.md"}) for text in ("toaster", "fridge", "oven")]
    for chunk in chunks:
        store.client.add(chunk.metadata["source"], [chunk], [vector_of(chunk.text)])
    toaster, fridge, oven = (chunk.chunk_id for chunk in chunks)
    assert {node.node_id for node in store.get_nodes([toaster, "n1", "unknown"])} == {toaster, "n1"}
    page = MetadataFilters(filters=[MetadataFilter(key="source", value="fridge.md")])
    assert [node.node_id for node in store.get_nodes([toaster, fridge], page)] == [fridge]
    store.delete_nodes(filters=page)
    store.delete_nodes([toaster])
    assert {node.node_id for node in store.get_nodes()} == {oven, "n1"}


def test_a_shared_chunk_stays_until_its_last_document_goes(store: CacheCraftVectorStore) -> None:
    store.add([node_of("a1", "shared", document="a"), node_of("a2", "only a", document="a")])
    store.add([node_of("b1", "shared", document="b"), node_of("b2", "only b", document="b")])
    assert len(found(store, "shared", 9)) == 3  # one for both
    store.delete("a")
    assert found(store, "shared", 9)[0] == "b1"
    assert sorted(node.node_id for node in store.get_nodes()) == ["b1", "b2"]
    store.delete("b")
    assert found(store, "shared", 9) == []


def test_nodes_are_deleted_by_id_and_by_filter(store: CacheCraftVectorStore) -> None:
    store.add([node_of(f"n{at}", f"text {at}", page=at) for at in range(6)])
    store.delete_nodes(["n0", "unknown"])
    store.delete_nodes(["n1", "n2"], MetadataFilters(filters=[MetadataFilter(key="page", value=2)]))
    store.delete_nodes(
        filters=MetadataFilters(
            filters=[MetadataFilter(key="page", value=4, operator=FilterOperator.GT)]
        )
    )
    assert [node.node_id for node in store.get_nodes()] == ["n1", "n3", "n4"]
    empty = MetadataFilters(filters=[])
    either = MetadataFilters(
        filters=[MetadataFilter(key="page", value=7), empty], condition=FilterCondition.OR
    )
    for filters in (None, empty, MetadataFilters(filters=[empty]), either):
        with pytest.raises(ConfigError, match="clear"):
            store.delete_nodes(filters=filters)
    store.delete_nodes([], empty)
    assert len(store.get_nodes()) == 3
    for call in (
        lambda: store.delete("n1", node_id="n1"),
        lambda: store.delete_nodes(["n1"], filter=None),
    ):
        with pytest.raises(ConfigError, match="no such option"):
            call()
    store.clear()
    assert store.get_nodes() == []


@pytest.mark.parametrize("seed", range(3))
def test_after_any_adding_and_deleting_no_search_finds_the_wrong_chunk(
    store: CacheCraftVectorStore, seed: int
) -> None:
    dice, reference = random.Random(seed), SimpleVectorStore()
    nodes: dict[str, TextNode] = {}
    for step in range(60):
        doc = f"d{dice.randrange(6)}"
        if dice.random() < 0.6:
            fresh = [
                node_of(f"n{dice.randrange(40)}", f"text {step} {at}", document=doc)
                for at in range(3)
            ]
            batch = list({node.node_id: node for node in fresh}.values())
            store.add(batch)
            reference.add(batch)
            nodes |= {node.node_id: node for node in batch}
        elif dice.random() < 0.5:
            store.delete(doc)
            reference.delete(doc)
        else:
            ids = [f"n{dice.randrange(40)}" for _ in range(3)]
            store.delete_nodes(ids)
            reference.delete_nodes(ids)
        query = VectorStoreQuery(query_embedding=vector_of(f"query {step}"), similarity_top_k=5)
        ours, theirs = store.query(query), reference.query(query)
        assert ours.ids == theirs.ids
        assert ours.similarities == pytest.approx(theirs.similarities, abs=1e-5)
        assert [node.get_content() for node in ours.nodes] == [
            nodes[name].text for name in theirs.ids
        ]
    assert len(ours.ids) == 5


# --- questions ---

FILTERS = [
    MetadataFilters(filters=[MetadataFilter(key="kind", value="a")]),
    MetadataFilters(
        filters=[MetadataFilter(key="kind", value="a"), MetadataFilter(key="kind", value="b")]
    ),
    MetadataFilters(
        filters=[
            MetadataFilter(key="page", value=7, operator=FilterOperator.GTE),
            MetadataFilter(key="kind", value="b"),
        ],
        condition=FilterCondition.OR,
    ),
    MetadataFilters(filters=[MetadataFilter(key="kind", value="a")], condition=FilterCondition.NOT),
    MetadataFilters(
        filters=[MetadataFilter(key="kind", value=["a", "c"], operator=FilterOperator.IN)]
    ),
    MetadataFilters(
        filters=[MetadataFilter(key="tags", value="even", operator=FilterOperator.CONTAINS)]
    ),
    MetadataFilters(
        filters=[MetadataFilter(key="rare", value=None, operator=FilterOperator.IS_EMPTY)]
    ),
    MetadataFilters(filters=[MetadataFilter(key="ref_doc_id", value="d1")]),
    MetadataFilters(filters=[]),
]


@pytest.fixture
def pages() -> list[TextNode]:
    """Twelve nodes of three kinds in two documents."""
    return [
        node_of(
            f"n{at}",
            f"text {at}",
            document=f"d{at % 2}",
            kind="abc"[at % 3],
            page=at,
            tags=["even" if at % 2 == 0 else "odd"],
            **({"rare": "x"} if at == 5 else {}),
        )
        for at in range(12)
    ]


@pytest.mark.parametrize("filters", FILTERS, ids=range(len(FILTERS)))
def test_filters_let_through_what_llama_indexs_own_store_does(
    store: CacheCraftVectorStore, pages: list[TextNode], filters: MetadataFilters
) -> None:
    reference = SimpleVectorStore()
    store.add(pages)
    reference.add(pages)
    query = VectorStoreQuery(
        query_embedding=vector_of("text 1"), similarity_top_k=20, filters=filters
    )
    assert store.query(query).ids == reference.query(query).ids


def test_filters_may_be_nested_and_joined_with_ids(
    store: CacheCraftVectorStore, pages: list[TextNode]
) -> None:
    store.add(pages)
    low = MetadataFilter(key="page", value=3, operator=FilterOperator.LT)
    nested = MetadataFilters(
        filters=[low, MetadataFilters(filters=[MetadataFilter(key="kind", value="a")])]
    )
    assert found(store, "text 1", 20, filters=nested) == ["n0"]
    assert sorted(
        found(store, "text 1", 20, filters=MetadataFilters(filters=[low]), node_ids=["n1", "n9"])
    ) == ["n1"]
    assert set(found(store, "text 1", 20, doc_ids=["d1"])) == {f"n{at}" for at in range(1, 12, 2)}
    # how an index without nodes asks for all
    assert len(found(store, "text 1", 20, node_ids=[])) == 12


@pytest.mark.parametrize(
    ("condition", "passes"),
    [(FilterCondition.AND, True), (FilterCondition.OR, False), (FilterCondition.NOT, True)],
)
def test_a_nested_group_without_filters_is_all_or_any_of_nothing(
    store: CacheCraftVectorStore, condition: FilterCondition, passes: bool
) -> None:
    store.add([node_of("n1", "kettle", page=1)])
    nested = MetadataFilters(filters=[MetadataFilters(filters=[], condition=condition)])
    assert found(store, "kettle", filters=nested) == (["n1"] if passes else [])


def test_every_id_may_be_given_without_comparing_all_with_all(store: CacheCraftVectorStore) -> None:
    class Counted(str):
        compared = 0

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

    store.add([node_of(f"n{at}", f"text {at}") for at in range(30)])
    every = [Counted(f"n{at}") for at in range(30)]
    assert len(found(store, "text 1", 30, node_ids=every)) == 30
    assert Counted.compared < 100


def test_what_cannot_be_searched_is_refused(store: CacheCraftVectorStore) -> None:
    with pytest.raises(ConfigError, match="default and mmr"):
        store.query(VectorStoreQuery(query_embedding=vector_of(""), mode=VectorStoreQueryMode.SVM))
    with pytest.raises(ConfigError, match="embed_model"):
        store.query(VectorStoreQuery(query_str="kettle"))


def test_everything_works_in_an_event_loop(store: CacheCraftVectorStore) -> None:
    async def use() -> None:
        await store.async_add(
            [
                node_of("n1", "kettle"),
                node_of("n2", "toaster"),
                node_of("n3", "fridge", document="e"),
            ]
        )
        query = VectorStoreQuery(query_embedding=vector_of("toaster"), similarity_top_k=1)
        assert (await store.aquery(query)).ids == ["n2"]
        await store.adelete_nodes(["n2"])
        await store.adelete("e")
        assert [node.node_id for node in await store.aget_nodes()] == ["n1"]
        await store.aclear()
        assert await store.aget_nodes() == []

    asyncio.run(use())


# --- persistence ---


def test_an_index_is_there_again_after_a_restart(tmp_path: Path) -> None:
    embedding = TextEmbedding()
    first = CacheCraftVectorStore(tmp_path / "index")
    index = VectorStoreIndex.from_documents(
        [Document(id_=name, text=name) for name in ("kettle", "toaster", "fridge")],
        storage_context=StorageContext.from_defaults(vector_store=first),
        embed_model=embedding,
    )
    index.storage_context.persist(tmp_path / "llama-index")
    first.close()
    again = CacheCraftVectorStore(tmp_path / "index")
    loaded = VectorStoreIndex.from_vector_store(again, embed_model=embedding)
    retriever = loaded.as_retriever(similarity_top_k=1)
    assert [node.text for node in retriever.retrieve("toaster")] == ["toaster"]
    loaded.delete_ref_doc("toaster")
    loaded.insert(Document(id_="oven", text="oven"))
    again.close()
    with FaissStore.open(tmp_path / "index") as beneath:
        assert [document.doc_id for document in beneath.documents()] == ["fridge", "kettle", "oven"]


def test_another_embedding_model_is_refused(tmp_path: Path) -> None:
    first = CacheCraftVectorStore(tmp_path, embedding="mine@1")
    first.add([node_of("n1", "kettle")])
    with pytest.raises(IndexStoreError, match=f"{DIM}.* is needed"):
        first.query(VectorStoreQuery(query_embedding=[1.0, 0.0]))
    first.close()
    with pytest.raises(IndexStoreError, match="embedding model"):
        CacheCraftVectorStore(tmp_path, embedding="other@2")
    unnamed = CacheCraftVectorStore(tmp_path)
    assert found(unnamed, "kettle") == ["n1"]
    unnamed.close()


def test_an_index_that_names_its_embedding_model_is_opened_by_the_facade_too(
    tmp_path: Path,
) -> None:
    embedding = CacheCraftEmbedding()
    with CacheCraftVectorStore(tmp_path / "named" / "index", embedding=embedding) as vectors:
        VectorStoreIndex.from_vector_store(vectors, embed_model=embedding).insert(
            Document(text="Descale the kettle.")
        )
    with open_index(tmp_path / "named", embedding.embedder) as index:
        (hit,) = Retriever(index, embedding.embedder).retrieve("kettle")
        assert hit.text == "Descale the kettle."
    with CacheCraftVectorStore(tmp_path / "nameless" / "index") as vectors:
        VectorStoreIndex.from_vector_store(vectors, embed_model=embedding).insert(
            Document(text="Descale the kettle.")
        )
    with pytest.raises(IndexStoreError, match=r"embedding=CacheCraftEmbedding\(\)"):
        open_index(tmp_path / "nameless", embedding.embedder)


def test_a_folder_that_is_moved_keeps_its_chunks(tmp_path: Path) -> None:
    chunks = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kettle.md").write_text("Descale the kettle every 8 weeks.")
        pages = SimpleDirectoryReader(str(tmp_path / folder)).load_data()
        # LlamaIndex's default
        assert folder in pages[0].get_content(metadata_mode=MetadataMode.LLM)
        node = pages[0].model_copy(update={"embedding": vector_of("kettle")})
        with CacheCraftVectorStore(tmp_path / f"index-{folder}") as vectors:
            vectors.add([node])
            assert vectors.client is not None
            chunks.append(vectors.client.places()[0])
            # it is still there to read
            assert vectors.get_nodes()[0].metadata["file_path"].endswith("kettle.md")
    assert chunks[0].chunk_id == chunks[1].chunk_id
    assert "kettle.md" not in chunks[0].text


def test_a_store_that_was_given_stays_open(tmp_path: Path) -> None:
    with FaissStore.open(tmp_path, dim=DIM, embedder_fingerprint="mine@1") as beneath:
        store = CacheCraftVectorStore(beneath)
        store.add([node_of("n1", "kettle", document=None)])
        store.close()
        assert [document.doc_id for document in beneath.documents()] == ["n1"]


# --- ingestion ---


def ingest(pipeline: IngestionPipeline, **texts: str) -> Sequence[BaseNode]:
    return pipeline.run(documents=[Document(id_=name, text=text) for name, text in texts.items()])


@pytest.mark.parametrize(
    "strategy", [DocstoreStrategy.UPSERTS, DocstoreStrategy.UPSERTS_AND_DELETE]
)
def test_a_pipeline_with_upserts(store: CacheCraftVectorStore, strategy: DocstoreStrategy) -> None:
    embedding = TextEmbedding()
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0), embedding],
        docstore=SimpleDocumentStore(),
        vector_store=store,
        docstore_strategy=strategy,
        disable_cache=True,
    )
    assert (
        len(ingest(pipeline, kettle="Descale it.", toaster="Empty the tray.", shared="Descale it."))
        == 3
    )
    embedding.seen.clear()
    ingest(pipeline, kettle="Fill it.", toaster="Empty the tray.", shared="Descale it.")
    assert embedding.seen == ["Fill it."]
    (hit,) = store.query(
        VectorStoreQuery(query_embedding=vector_of("Descale it."), similarity_top_k=1)
    ).nodes
    assert hit.ref_doc_id == "shared"
    ingest(pipeline, kettle="Fill it.")
    left = {node.ref_doc_id: node.get_content() for node in store.get_nodes()}
    gone = {"toaster", "shared"} if strategy == DocstoreStrategy.UPSERTS_AND_DELETE else set()
    assert left.keys() == {"kettle", "toaster", "shared"} - gone
    assert left["kettle"] == "Fill it."


def capture(caches: ChunkCacheStore, *texts: str) -> None:
    """Store a chunk-cache of each text."""
    import torch

    layout = KVLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32")
    for text in texts:
        captured = Capture(
            key=VariantKey("default", "model", chunk_id_of(text), ("system",)),
            layout=layout,
            tokens_digest="0",
            kv=torch.zeros(layout.shape(2)),
            token_scores=TokenScores(),
            inter=(0.0,),
            intra=0.0,
            cci=0.5,
            exact_share=1.0,
        )
        caches.put(captured).result()


def cached(caches: ChunkCacheStore) -> set[str]:
    return {row.variant.key.chunk_id for row in caches.rows()}


@pytest.fixture
def caches(tmp_path: Path) -> Iterator[ChunkCacheStore]:
    with ChunkCacheStore.open(tmp_path / "caches") as opened:
        yield opened


def test_chunk_caches_leave_with_the_last_node_that_has_their_chunk(
    caches: ChunkCacheStore, tmp_path: Path
) -> None:
    capture(caches, "shared", "only a", "elsewhere")
    with CacheCraftVectorStore(tmp_path / "index", caches=caches) as store:
        store.add([node_of("a1", "shared", document="a"), node_of("a2", "only a", document="a")])
        store.add([node_of("b1", "shared", document="b")])
        store.delete("a")
        store.add([node_of("c1", "new", document="c")])
        assert cached(caches) == {chunk_id_of("shared"), chunk_id_of("elsewhere")}
        store.delete_nodes(["b1"])
    assert cached(caches) == {chunk_id_of("elsewhere")}


def test_an_upsert_keeps_the_chunk_caches_of_what_did_not_change(
    caches: ChunkCacheStore, tmp_path: Path
) -> None:
    with CacheCraftVectorStore(tmp_path / "index", caches=caches) as store:
        pipeline = IngestionPipeline(
            transformations=[SentenceSplitter(chunk_size=24, chunk_overlap=0), TextEmbedding()],
            docstore=SimpleDocumentStore(),
            vector_store=store,
            docstore_strategy=DocstoreStrategy.UPSERTS,
        )
        same = "Keep the base of the kettle dry and let it cool before you put it away. "
        before = ingest(
            pipeline, kettle=f"{same}Descale it every 8 weeks with citric acid, 20 grams of it."
        )
        texts = [node.get_content(metadata_mode=MetadataMode.LLM) for node in before]
        assert len(texts) == 2
        capture(caches, *texts)
        ingest(pipeline, kettle=f"{same}Descale it every 9 weeks with citric acid, 20 grams of it.")
        assert cached(caches) == {chunk_id_of(texts[0])}


def test_chunk_caches_of_a_deletion_alone_leave_after_a_grace(
    caches: ChunkCacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Evictions.__init__, "__kwdefaults__", {"grace_s": 0.05})
    capture(caches, "kettle")
    with CacheCraftVectorStore(tmp_path / "index", caches=caches) as store:
        store.add([node_of("a1", "kettle", document="a")])
        store.delete("a")
        while cached(caches):  # the run's own time limit ends a test that waits for ever
            time.sleep(0.01)
    assert not caches.stats().variants


def test_chunk_caches_of_replaced_nodes_leave_after_an_error_too(
    caches: ChunkCacheStore, tmp_path: Path
) -> None:
    capture(caches, "kettle")
    with CacheCraftVectorStore(tmp_path / "index", caches=caches) as store:
        store.add([node_of("a1", "kettle", document="a")])
        short = node_of("b1", "train", document="b")
        short.embedding = short.get_embedding()[:-1]
        with pytest.raises(IndexStoreError):
            store.add([node_of("a1", "toaster", document="a"), short])
        assert cached(caches)
        store.add([node_of("c1", "train", document="c")])
        assert not cached(caches)


def test_a_store_that_outlives_its_chunk_caches_closes_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkCacheStore.open(tmp_path / "caches") as opened:
        store = CacheCraftVectorStore(tmp_path / "index", caches=opened)
        store.add([node_of("a1", "kettle", document="a")])
        store.delete("a")
    store.close()
    assert "until the next deletion" in caplog.text


def test_a_second_close_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ChunkCacheStore.open(tmp_path / "caches") as opened:
        store = CacheCraftVectorStore(tmp_path / "index", caches=opened)
        store.add([node_of("a1", "kettle", document="a")])
        store.close()
        store.close()
    assert "until the next deletion" not in caplog.text


# --- embeddings ---


def test_the_embedding_model_is_the_packages_own() -> None:
    embedder = Embedder()
    embedding = CacheCraftEmbedding(embedder)
    texts = ["Descale the kettle.", "The toaster has a tray."]
    expected = embedder.encode_document(texts)
    assert np.allclose(embedding.get_text_embedding_batch(texts), expected)
    assert np.allclose(embedding.get_text_embedding(texts[1]), expected[1], atol=1e-5)
    assert np.allclose(
        embedding.get_query_embedding(texts[0]), embedder.encode_query(texts[:1])[0], atol=1e-5
    )
    assert np.allclose(asyncio.run(embedding.aget_text_embedding_batch(texts)), expected, atol=1e-5)
    assert np.allclose(
        asyncio.run(embedding.aget_query_embedding(texts[0])), expected[0], atol=1e-5
    )
    assert embedding.model_name == embedder.name
    assert embedding.embedder is embedder


def test_options_that_are_only_hints_are_accepted(store: CacheCraftVectorStore) -> None:
    node = TextNode(text="hint", embedding=[1.0, 0.0, 0.0])
    assert store.add([node], batch_size=8, show_progress=True) == [node.node_id]
    with pytest.raises(ConfigError, match="batch_sise"):
        store.add([node], batch_sise=8)
