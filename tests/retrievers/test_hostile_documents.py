"""Documents made to keep a parser busy or to fill the memory: each is skipped, and the next one is read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachecraft_rag.errors import DocumentError
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.indexer import index_folder
from cachecraft_rag.retrievers.reading.documents import SourceFile
from cachecraft_rag.retrievers.reading.limited_reader import LimitedReader, ReadingBudget
from cachecraft_rag.retrievers.retriever import open_index

ONE_SECOND = ReadingBudget(cpu_seconds=1, cpu_seconds_per_mib=0, waiting_factor=60)


def pdf_bytes(operators: bytes, *, pages: int = 1) -> bytes:
    """A PDF that names one page, with these drawing operators, several times."""
    content = zlib.compress(operators)
    fonts = b"<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>" % (pages, b"3 0 R " * pages),
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R /Resources %s >>"
        % fonts,
        b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(content), content),
    ]
    made = b"%PDF-1.4\n"
    table = b"0000000000 65535 f \n"
    for number, written in enumerate(objects, 1):
        table += b"%010d 00000 n \n" % len(made)
        made += b"%d 0 obj\n%s\nendobj\n" % (number, written)
    trailer = b"trailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % len(made)
    return made + b"xref\n0 5\n" + table + trailer


GOOD = pdf_bytes(b"BT /F1 12 Tf (Descale it.) Tj ET")
SLOW = {
    "a page of three million tags": ("p.html", b"<b>x" * 3_000_000),
    "a PDF whose page takes seconds": (
        "a.pdf",
        pdf_bytes(b"BT /F1 12 Tf " + b"(a) Tj " * 300_000 + b"ET"),
    ),
    "a PDF that names a page 100,000 times": (
        "b.pdf",
        pdf_bytes(b"BT /F1 12 Tf (Hello) Tj ET", pages=100_000),
    ),
}
GROWING = {
    "a long key before many values": (
        "c.json",
        json.dumps([{"k" * 150: [1] * 100_000} for _ in range(9)]),
    ),
    "long column names": (
        "d.csv",
        ",".join(["n" * 200] * 100) + "\n" + (",".join("1" * 100) + "\n") * 10_000,
    ),
}


def source(name: str) -> SourceFile:
    return SourceFile(Path(name), name)


@pytest.fixture
def reader() -> Iterator[LimitedReader]:
    with LimitedReader() as made:
        yield made


@pytest.mark.parametrize(("name", "data"), SLOW.values(), ids=SLOW.keys())
def test_a_document_that_takes_too_long_is_skipped_and_the_next_is_read(
    name: str, data: bytes
) -> None:
    with LimitedReader(ONE_SECOND) as reader:
        with pytest.raises(
            DocumentError, match=f"{name}: skipped: reading it takes more than 1 s of CPU time"
        ):
            reader.read(source(name), data)
        assert reader.read(source("good.pdf"), GOOD).text == "Descale it."


def test_a_document_that_fills_the_memory_is_skipped() -> None:
    # Two million objects need more than the budget, well before anything was counted as time.
    deep = "[" + ",".join(['{"a":1}'] * 2_000_000) + "]"
    small = ReadingBudget(cpu_seconds=120, memory_bytes=120 << 20, memory_per_byte=0)
    with LimitedReader(small) as limited:
        with pytest.raises(
            DocumentError, match=r"e\.json: skipped: reading it takes more than 120 MiB of memory"
        ):
            limited.read(source("e.json"), deep.encode())
        assert limited.read(source("good.json"), b'{"a": 1}').text == "a: 1"


@pytest.mark.parametrize(("name", "text"), GROWING.values(), ids=GROWING.keys())
def test_a_text_that_grows_many_times_is_refused(
    reader: LimitedReader, name: str, text: str
) -> None:
    with pytest.raises(DocumentError, match="10 times as long as the file; shorten the names"):
        reader.read(source(name), text.encode())


def test_text_made_against_a_separator_search_is_read(reader: LimitedReader) -> None:
    quotes = "\"a\"b,'c'd;" * 6_500  # csv.Sniffer takes half a minute
    assert "a" in reader.read(source("f.csv"), quotes.encode()).text


def test_a_parser_that_prints_or_crashes_loses_one_document(reader: LimitedReader) -> None:
    reader.read(source("good.pdf"), GOOD)
    process = reader._worker
    assert process is not None
    process.terminate()
    process.wait()
    with pytest.raises(DocumentError, match="skipped: its parser crashed"):
        reader.read(source("good.pdf"), GOOD)
    assert reader.read(source("good.pdf"), GOOD).text == "Descale it."
    assert reader._worker is not process


def test_a_hostile_file_in_a_folder_is_a_problem_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cachecraft_rag.retrievers.indexer.LimitedReader", lambda: LimitedReader(ONE_SECOND)
    )
    folder = tmp_path / "docs"
    folder.mkdir()
    name, data = SLOW["a PDF that names a page 100,000 times"]
    (folder / name).write_bytes(data)
    (folder / "good.pdf").write_bytes(GOOD)
    embedder = Embedder()
    with open_index(tmp_path / "store", embedder) as index:
        report = index_folder(folder, index, embedder)
    (problem,) = report.problems
    assert (problem.doc_id, problem.kind) == ("docs/b.pdf", "unreadable")
    assert "skipped: " in problem.reason
    assert report.added == ("docs/good.pdf",)
