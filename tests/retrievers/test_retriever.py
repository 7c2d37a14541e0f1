"""Retrieval on its own, and through both frameworks' classes; no answering model is loaded for any of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachecraft_rag.errors import ConfigError, IndexStoreError
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.indexer import index_documents
from cachecraft_rag.retrievers.retriever import INDEX_FOLDER, Retriever, open_index
from cachecraft_rag.types.documents import Document

DOCUMENTS = [
    Document("kettle", "Descale the kettle with citric acid.", {"kind": "manual"}),
    Document("train", "The train leaves at noon.", {"kind": "timetable"}),
    Document("scale", "Limescale forms where water boils.", {"kind": "manual"}),
]
QUESTION = "How is limescale removed from a kettle?"


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


@pytest.fixture
def retriever(embedder: Embedder, tmp_path: Path) -> Iterator[Retriever]:
    with open_index(tmp_path, embedder) as index:
        yield Retriever(index, embedder)
    assert (tmp_path / INDEX_FOLDER).is_dir()


def sources(retriever: Retriever, **options: object) -> list[str]:
    return [str(hit.metadata["source"]) for hit in retriever.retrieve(QUESTION, **options)]  # type: ignore[arg-type]


def test_the_nearest_chunks_come_first(retriever: Retriever) -> None:
    with pytest.raises(IndexStoreError, match="cachecraft index"):
        retriever.retrieve(QUESTION)
    index_documents(DOCUMENTS, retriever.index, retriever.embedder)
    assert sources(retriever)[-1] == "train"
    assert len(sources(retriever, top_k=2)) == 2
    assert sources(retriever, where={"kind": "timetable"}) == ["train"]
    assert sources(retriever, where=lambda metadata: metadata["kind"] == "none") == []


def test_wrong_arguments_are_refused(retriever: Retriever) -> None:
    with pytest.raises(ConfigError, match="top_k"):
        retriever.retrieve(QUESTION, top_k=0)
    with pytest.raises(ConfigError, match="question"):
        retriever.retrieve(5)  # type: ignore[arg-type]


def test_langchain_takes_a_plain_retriever(retriever: Retriever) -> None:
    from cachecraft_rag.retrievers.langchain import CacheCraftVectorStore

    index_documents(DOCUMENTS, retriever.index, retriever.embedder)
    found = CacheCraftVectorStore.from_rag(retriever).similarity_search(QUESTION, k=3)
    assert [document.metadata["source"] for document in found] == sources(retriever)
    with pytest.raises(ConfigError, match="rag"):
        CacheCraftVectorStore.from_rag(retriever.index)  # type: ignore[arg-type]


def test_llama_index_takes_a_plain_retriever(retriever: Retriever) -> None:
    from cachecraft_rag.retrievers.llama_index import CacheCraftRetriever

    index_documents(DOCUMENTS, retriever.index, retriever.embedder)
    found = CacheCraftRetriever(retriever, top_k=2).retrieve(QUESTION)
    assert [node.node.metadata["source"] for node in found] == sources(retriever, top_k=2)


@pytest.mark.parametrize("module", ["retriever", "langchain", "llama_index"])
def test_the_retrieval_side_does_not_import_the_facade(module: str) -> None:
    code = (
        f"import sys, cachecraft_rag.retrievers.{module}\n"
        "loaded = {'cachecraft_rag.rag', 'cachecraft_rag.engine.engine'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
