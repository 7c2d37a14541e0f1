"""A user's own readers and splitters: functions, and objects of LangChain and LlamaIndex as they are."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.document_loaders import BaseBlobParser, BaseLoader
from langchain_core.documents import Document as LangChainDocument
from langchain_text_splitters import MarkdownHeaderTextSplitter, RecursiveCharacterTextSplitter
from llama_index.core import Document as LlamaIndexDocument
from llama_index.core.node_parser import MarkdownNodeParser, SentenceSplitter
from llama_index.core.readers.base import BaseReader

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.indexer import IndexReport, index_documents, index_folder
from cachecraft_rag.retrievers.retriever import open_index
from cachecraft_rag.types.documents import Document

LOG = "12:01 the lid is open\n12:02 the water boils\n"


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


@pytest.fixture
def store(tmp_path: Path, embedder: Embedder) -> Iterator[FaissStore]:
    with open_index(tmp_path / "store", embedder) as index:
        yield index


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "docs"
    root.mkdir()
    (root / "kettle.md").write_text("# Kettle\n\nIt holds two litres.")
    (root / "kettle.LOG").write_text(LOG)
    return root


def texts(store: FaissStore, doc_id: str = "docs/kettle.LOG") -> list[str]:
    return [chunk.text for chunk in store.chunks_of(doc_id)]


class LinesReader(BaseReader):
    def load_data(self, file: Path, extra_info: Any = None) -> list[LlamaIndexDocument]:
        lines = file.read_text().splitlines()
        return [
            LlamaIndexDocument(text=line, metadata={"kind": "log", "line": number, "tags": ["a"]})
            for number, line in enumerate(lines)
        ]


class LinesLoader(BaseLoader):
    def __init__(self, path: Path) -> None:
        self.path = path

    def lazy_load(self) -> Iterator[LangChainDocument]:
        for line in self.path.read_text().splitlines():
            yield LangChainDocument(line, metadata={"kind": "log"})


class LinesParser(BaseBlobParser):
    def lazy_parse(self, blob: Any) -> Iterator[LangChainDocument]:
        for line in blob.as_string().splitlines():
            yield LangChainDocument(line, metadata={"kind": "log"})


@pytest.mark.parametrize("reader", [LinesReader(), LinesLoader, LinesParser()])
def test_readers_of_both_frameworks_are_used_as_they_are(
    store: FaissStore, embedder: Embedder, folder: Path, reader: Any
) -> None:
    report = index_folder(folder, store, embedder, reader={".log": reader})
    assert report.added == ("docs/kettle.LOG", "docs/kettle.md")
    assert not report.problems
    assert texts(store) == ["12:01 the lid is open\n\n12:02 the water boils"]
    (chunk,) = store.chunks_of("docs/kettle.LOG")
    assert chunk.metadata["kind"] == "log"
    assert "line" not in chunk.metadata, "what differs between the parts is not of the document"
    assert texts(store, "docs/kettle.md") == ["Kettle\n\nIt holds two litres."]


def test_a_closure_reads_and_splits_in_this_process_and_thread(
    store: FaissStore, embedder: Embedder, folder: Path
) -> None:
    seen: list[tuple[str, int, int]] = []

    def read(path: Path) -> list[str] | None:
        if path.suffix == ".md":
            return None  # the built-in reader's
        seen.append((path.name, os.getpid(), threading.get_ident()))
        return path.read_text().splitlines()

    def by_line(text: str) -> list[str]:
        return [line for line in text.split("\n") if line]

    report = index_folder(folder, store, embedder, reader=read, splitter=by_line)
    assert not report.problems
    assert seen == [("kettle.LOG", os.getpid(), threading.get_ident())]
    assert texts(store) == LOG.splitlines()
    assert texts(store, "docs/kettle.md") == ["# Kettle", "It holds two litres."]
    second = store.chunks_of("docs/kettle.LOG")[1].metadata
    whole = "\n\n".join(LOG.splitlines())
    assert whole[second["start"] : second["end"]] == LOG.splitlines()[1]
    assert (second["source"], second["ordinal"]) == ("docs/kettle.LOG", 1)


def test_metadata_that_the_index_cannot_keep_is_a_problem_of_its_document(
    folder: Path, store: FaissStore, embedder: Any
) -> None:
    def read(path: Path) -> LangChainDocument:
        size = 10**5000 if path.suffix == ".LOG" else 1
        return LangChainDocument(path.read_text(), metadata={"size": size})

    report = index_folder(folder, store, embedder, reader=read)
    assert [(problem.doc_id, problem.kind) for problem in report.problems] == [
        ("docs/kettle.LOG", "inaccessible")
    ]
    assert "a number that is too long" in report.problems[0].reason
    assert texts(store, "docs/kettle.md")


def test_a_splitters_metadata_that_the_index_cannot_keep_is_a_problem_of_its_document(
    folder: Path, store: FaissStore, embedder: Any
) -> None:
    def split_lines(text: str) -> list[LangChainDocument]:
        size = 10**5000 if text.startswith("12:01") else 1
        return [
            LangChainDocument(line, metadata={"size": size}) for line in text.splitlines() if line
        ]

    index_folder(folder, store, embedder, reader={".log": Path.read_text})
    before = texts(store)
    report = index_folder(
        folder, store, embedder, reader={".log": Path.read_text}, splitter=split_lines
    )
    assert [(problem.doc_id, problem.kind) for problem in report.problems] == [
        ("docs/kettle.LOG", "inaccessible")
    ]
    assert "a number that is too long" in report.problems[0].reason
    assert texts(store) == before
    assert texts(store, "docs/kettle.md") == ["# Kettle", "It holds two litres."]


@pytest.mark.parametrize(
    ("splitter", "expected"),
    [
        (
            SentenceSplitter(chunk_size=512, chunk_overlap=0),
            ["# One\n\nFirst.\n\n# Two\n\nSecond."],
        ),
        (MarkdownNodeParser(), ["# One\n\nFirst.", "# Two\n\nSecond."]),
        (
            RecursiveCharacterTextSplitter(chunk_size=16, chunk_overlap=0),
            ["# One\n\nFirst.", "# Two\n\nSecond."],
        ),
        (MarkdownHeaderTextSplitter([("#", "title")]), ["First.", "Second."]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_splitters_of_both_frameworks_are_used_as_they_are(
    store: FaissStore, embedder: Embedder, splitter: Any, expected: list[str]
) -> None:
    text = "# One\n\nFirst.\n\n# Two\n\nSecond."
    report = index_documents([Document("a", text)], store, embedder, splitter=splitter)
    assert not report.problems
    assert texts(store, "a") == expected


def test_a_document_is_read_again_if_reader_or_splitter_change(
    store: FaissStore, embedder: Embedder, folder: Path
) -> None:
    def read(path: Path) -> str:
        return path.read_text()

    def run(**own: Any) -> IndexReport:
        return index_folder(folder, store, embedder, **own)

    small = SentenceSplitter(chunk_size=100, chunk_overlap=0)
    assert len(run(reader={".log": read}, splitter=small).added) == 2
    assert len(run(reader={".log": read}, splitter=small).unchanged) == 2
    smaller = SentenceSplitter(chunk_size=90, chunk_overlap=0)
    assert len(run(reader={".log": read}, splitter=smaller).updated) == 2
    read.version = 2  # type: ignore[attr-defined]
    assert run(reader={".log": read}, splitter=smaller).updated == ("docs/kettle.LOG",)
    without = run(splitter=smaller)
    assert without.removed == ("docs/kettle.LOG",)
    assert [problem.kind for problem in without.problems] == ["unsupported"]


def broken(path: Path) -> str:
    raise ValueError("no log of version 3")


@pytest.mark.parametrize(
    ("reader", "kind", "reason"),
    [
        (
            broken,
            "inaccessible",
            r"kettle\.LOG: the reader broken failed \(ValueError: no log of version 3\)",
        ),
        (
            lambda path: 5,
            "inaccessible",
            "returned 5; return a text, or a list of texts or of documents",
        ),
        (lambda path: [" "], "unreadable", "found no text"),
        (lambda path: None, "unreadable", "not a kind of file that can be indexed"),
    ],
)
def test_what_is_wrong_with_a_reader_is_a_problem_with_its_name(
    store: FaissStore, embedder: Embedder, folder: Path, reader: Any, kind: str, reason: str
) -> None:
    report = index_folder(folder, store, embedder, reader={".log": reader})
    (problem,) = report.problems
    assert (problem.doc_id, problem.kind) == ("docs/kettle.LOG", kind)
    assert re.search(reason, problem.reason)
    assert report.added == ("docs/kettle.md",)


def test_what_was_read_before_stays_if_a_reader_fails(
    store: FaissStore, embedder: Embedder, folder: Path
) -> None:
    index_folder(folder, store, embedder, reader={".log": lambda path: path.read_text()})
    before = texts(store)
    report = index_folder(folder, store, embedder, reader={".log": broken})
    assert report.removed == ()
    assert texts(store) == before != []


def test_what_is_wrong_with_a_splitter_is_a_problem_with_its_name(
    store: FaissStore, embedder: Embedder
) -> None:
    def by_nothing(text: str) -> list[str]:
        raise KeyError(text)

    report = index_documents([Document("a", "text")], store, embedder, splitter=by_nothing)
    (problem,) = report.problems
    assert "a: the splitter " in problem.reason
    assert "by_nothing failed (KeyError: 'text')" in problem.reason


def test_a_chunk_that_the_embedding_model_cannot_read_is_cut_and_a_problem(
    store: FaissStore, embedder: Embedder
) -> None:
    long = " ".join(f"word{number}" for number in range(400))
    report = index_documents(
        [Document("a", f"short\n{long}")], store, embedder, splitter=str.splitlines
    )
    (problem,) = report.problems
    assert problem.kind == "incomplete"
    assert "1 of the splitter str.splitlines's chunks had to be cut" in problem.reason
    chunks = texts(store, "a")
    assert len(chunks) > 2
    assert " ".join(chunks[1:]).split() == long.split()
    assert all(embedder.count_tokens(chunk) <= embedder.limit for chunk in chunks)


def test_arguments_that_are_no_reader_or_splitter_are_refused(
    store: FaissStore, embedder: Embedder, folder: Path
) -> None:
    with pytest.raises(ConfigError, match="reader must be a function of a path, or an object with"):
        index_folder(folder, store, embedder, reader=5)
    with pytest.raises(ConfigError, match="a suffix begins with a dot"):
        index_folder(folder, store, embedder, reader={"odt": LinesReader()})
    with pytest.raises(ConfigError, match="splitter must be a function of a text, or an object"):
        index_folder(folder, store, embedder, splitter="sentences")
    assert not store.documents()
