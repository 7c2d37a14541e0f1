import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.errors import ConfigError, DocumentError, IndexStoreError
from cachecraft_rag.model.chunk_bound import ModelTokens
from cachecraft_rag.retrievers.embeddings import Embedder
from cachecraft_rag.retrievers.folders import Problem
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.retrievers.indexer import IndexReport, index_documents, index_folder
from cachecraft_rag.types.documents import Chunk, Document
from cachecraft_rag.types.progress import Progress

PAGES = {
    "kettle.md": "# Kettle K2\n\nThe kettle holds two litres.\n\nDescale it every month with citric acid.\n",
    "toaster.md": "# Toaster T4\n\nThe toaster has two slots and a tray for crumbs.\n",
    "more/grinder.txt": "The grinder grinds coffee beans, coarse or fine.\n",
}


class CountingModel:
    """The real model, which notes the texts that reach it; it stands at the library's own boundary."""

    def __init__(self, model) -> None:
        self.model = model
        self.texts: list[str] = []

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def encode_document(self, texts, **settings):
        self.texts += texts
        return self.model.encode_document(texts, **settings)

    def taken(self) -> list[str]:
        """The texts since the last call."""
        texts, self.texts = self.texts, []
        return texts


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    embedder = Embedder()
    embedder._model = CountingModel(embedder._model)
    return embedder


@pytest.fixture
def seen(embedder: Embedder) -> CountingModel:
    embedder._model.taken()
    return embedder._model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "docs"
    for name, text in PAGES.items():
        write(root, name, text)
    return root


@pytest.fixture
def store(tmp_path: Path, embedder: Embedder) -> Iterator[FaissStore]:
    with open_store(tmp_path / "index", embedder) as opened:
        yield opened


def open_store(folder: Path, embedder: Embedder) -> FaissStore:
    return FaissStore.open(folder, dim=embedder.dim, embedder_fingerprint=embedder.fingerprint)


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def found(store: FaissStore, embedder: Embedder, question: str, k: int = 100) -> list[str]:
    return [hit.text for hit in store.search(embedder.encode_query([question])[0], k)]


def doc_ids(store: FaissStore) -> list[str]:
    return [document.doc_id for document in store.documents()]


# --- a folder and its changes ---


def test_a_folder_is_indexed_and_its_chunks_are_found(
    folder: Path, store: FaissStore, embedder: Embedder
):
    report = index_folder(folder, store, embedder)
    assert report.added == ("docs/kettle.md", "docs/more/grinder.txt", "docs/toaster.md")
    assert (report.updated, report.unchanged, report.removed, report.problems) == ((), (), (), ())
    assert report.chunks_embedded == store.stats().chunks == 3
    assert report.seconds > 0
    hit = store.search(embedder.encode_query(["How do I descale it?"])[0], 1)[0]
    assert (
        hit.text
        == "Kettle K2\n\nThe kettle holds two litres.\n\nDescale it every month with citric acid."
    )
    assert hit.metadata["source"] == "docs/kettle.md"
    assert hit.metadata["heading"] == "Kettle K2"


def test_a_second_run_embeds_nothing(
    folder: Path, store: FaissStore, embedder: Embedder, seen: CountingModel
):
    index_folder(folder, store, embedder)
    seen.taken()
    before = store.stats()
    report = index_folder(folder, store, embedder)
    assert report.unchanged == ("docs/kettle.md", "docs/more/grinder.txt", "docs/toaster.md")
    assert (report.added, report.updated, report.removed, report.removed_chunk_ids) == (
        (),
        (),
        (),
        (),
    )
    assert seen.taken() == []
    assert store.stats().generation == before.generation


def long_page(changed: str = "") -> str:
    sections = [
        f"## Section {number}\n\n" + f"Part {number} of the kettle. " * 60 for number in range(4)
    ]
    return "# Kettle\n\n" + "\n\n".join(sections) + changed


def test_after_one_file_changed_only_its_new_chunks_are_embedded(
    folder: Path, store: FaissStore, embedder: Embedder, seen: CountingModel
):
    write(folder, "kettle.md", long_page())
    index_folder(folder, store, embedder)
    old = {chunk.chunk_id for chunk in store.chunks_of("docs/kettle.md")}
    seen.taken()
    write(folder, "kettle.md", long_page("\n\n## Warranty\n\nTwo years."))
    report = index_folder(folder, store, embedder)
    assert seen.taken() == ["Kettle > Warranty\n\nTwo years."]
    assert (report.updated, len(report.unchanged), report.chunks_embedded) == (
        ("docs/kettle.md",),
        2,
        1,
    )
    assert report.chunks_reused == len(old) > 3
    assert report.removed_chunk_ids == ()
    write(folder, "kettle.md", "# Kettle\n\nIt is no longer made.")
    report = index_folder(folder, store, embedder)
    assert seen.taken() == ["Kettle\n\nIt is no longer made."]
    assert old < set(report.removed_chunk_ids)
    assert not old & {
        hit.chunk_id for hit in store.search(embedder.encode_query(["kettle"])[0], 100)
    }


def test_a_deleted_files_chunks_are_never_retrieved_again(
    tmp_path: Path, folder: Path, store: FaissStore, embedder: Embedder
):
    index_folder(folder, store, embedder)
    kettle = {chunk.chunk_id for chunk in store.chunks_of("docs/kettle.md")}
    (folder / "kettle.md").unlink()
    report = index_folder(folder, store, embedder)
    assert (report.removed, set(report.removed_chunk_ids)) == (("docs/kettle.md",), kettle)
    assert not any(
        "Kettle" in text for text in found(store, embedder, "How do I descale the kettle?")
    )
    store.close()
    with open_store(tmp_path / "index", embedder) as again:
        assert len(found(again, embedder, "How do I descale the kettle?")) == 2
        assert not any(
            "Kettle" in text for text in found(again, embedder, "How do I descale the kettle?")
        )


def test_a_chunk_that_two_files_share_outlives_one_of_them(
    folder: Path, store: FaissStore, embedder: Embedder, seen: CountingModel
):
    write(folder, "copy.md", PAGES["kettle.md"])
    report = index_folder(folder, store, embedder)
    assert len(seen.taken()) == report.chunks_embedded == 3
    (folder / "copy.md").unlink()
    assert index_folder(folder, store, embedder).removed_chunk_ids == ()
    hit = store.search(embedder.encode_query(["How do I descale the kettle?"])[0], 1)[0]
    assert hit.metadata["source"] == "docs/kettle.md"


def test_a_renamed_file_is_not_embedded_again(
    folder: Path, store: FaissStore, embedder: Embedder, seen: CountingModel
):
    index_folder(folder, store, embedder)
    seen.taken()
    (folder / "toaster.md").rename(folder / "a-toaster.md")
    report = index_folder(folder, store, embedder)
    assert (report.added, report.removed) == (("docs/a-toaster.md",), ("docs/toaster.md",))
    assert (seen.taken(), report.removed_chunk_ids, report.chunks_reused) == ([], (), 1)


def test_another_chunk_size_splits_anew(folder: Path, store: FaissStore, embedder: Embedder):
    write(folder, "kettle.md", long_page())
    index_folder(folder, store, embedder)
    assert (
        max(embedder.count_tokens(chunk.text) for chunk in store.chunks_of("docs/kettle.md")) > 100
    )
    report = index_folder(folder, store, embedder, chunk_tokens=64)
    assert len(report.updated) == 3
    assert (
        max(embedder.count_tokens(chunk.text) for chunk in store.chunks_of("docs/kettle.md")) <= 64
    )


def test_chunks_fit_the_embedder_whatever_is_asked_for(
    folder: Path, store: FaissStore, embedder: Embedder
):
    write(folder, "kettle.md", "The kettle boils water. " * 300)
    index_folder(folder, store, embedder, chunk_tokens=4096)
    counts = [embedder.count_tokens(chunk.text) for chunk in store.chunks_of("docs/kettle.md")]
    assert embedder.limit - 10 < max(counts) <= embedder.limit


# --- files that cannot be read ---


def test_bad_files_are_reported_and_the_rest_is_indexed(
    folder: Path, store: FaissStore, embedder: Embedder
):
    write(folder, "empty.md", "")
    write(folder, "photo.png", "not text")
    report = index_folder(folder, store, embedder)
    assert len(report.added) == 3
    assert [(problem.doc_id, problem.kind) for problem in report.problems] == [
        ("docs/empty.md", "unreadable"),
        ("docs/photo.png", "unsupported"),
    ]


def test_no_page_ends_a_run(folder: Path, store: FaissStore, embedder: Embedder):
    pages = {
        "a-undefined.html": '<meta charset="undefined"><p>Rinse it.</p>',
        "b-punycode.html": '<meta charset="punycode"><p>Rinse it.</p>',
        "c-marked.html": "<p>Rinse it.</p><![x[",
        "d-number.html": "<p>Rinse it.</p>&#" + "1" * 4400,
        "e-deep.html": "<div>" * 100_000 + "</b>" * 100_000,
        "f.pdf": "%PDF-1.7\n1 0 obj\n<</Length 1 0 R>>\nendobj\ntrailer\n<</Root 1 0 R>>",
    }
    for name, page in pages.items():
        write(folder, name, page)
    report = index_folder(folder, store, embedder)
    assert len(report.added) == 3 + 4
    assert [(problem.doc_id, problem.kind) for problem in report.problems] == [
        ("docs/e-deep.html", "unreadable"),
        ("docs/f.pdf", "unreadable"),
    ]


def test_a_splitter_that_fails_is_a_problem_of_its_document(
    folder: Path, store: FaissStore, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
):
    counted = embedder.count_tokens

    def count(text: str) -> int:
        if "toaster" in text:
            raise RecursionError("too deep")
        return counted(text)

    monkeypatch.setattr(embedder, "count_tokens", count)
    report = index_folder(folder, store, embedder)
    assert report.added == ("docs/kettle.md", "docs/more/grinder.txt")
    assert [(problem.doc_id, problem.kind) for problem in report.problems] == [
        ("docs/toaster.md", "unreadable")
    ]
    assert "RecursionError: too deep" in report.problems[0].reason
    report = index_documents(
        [Document("t", "A toaster."), Document("k", "A kettle.")], store, embedder
    )
    assert (report.added, report.problems[0].doc_id) == (("k",), "t")


def test_a_link_out_of_the_folder_is_not_indexed_unless_asked_for(
    tmp_path: Path, folder: Path, store: FaissStore, embedder: Embedder
):
    write(tmp_path / "private", "diary.md", "My diary.")
    (folder / "private").symlink_to(tmp_path / "private")
    report = index_folder(folder, store, embedder)
    assert [(problem.doc_id, problem.kind) for problem in report.problems] == [
        ("docs/private", "outside")
    ]
    assert "docs/private/diary.md" in index_folder(folder, store, embedder, follow_links=True).added
    assert index_folder(folder, store, embedder).removed == ("docs/private/diary.md",)


# --- the answering model's tokens ---


def test_an_index_made_without_a_model_is_split_anew_only_where_chunks_are_too_long(
    tmp_path: Path, folder: Path, embedder: Embedder, seen: CountingModel
):
    write(folder, "glyphs.md", "# Glyphs\n\n" + "\U00013000" * 2000)
    model = ModelTokens("bytes.512", lambda text: len(text.encode()), 512)
    with open_store(tmp_path / "index", embedder) as store:
        index_folder(folder, store, embedder)
    with open_store(tmp_path / "index", embedder) as store:
        seen.taken()
        report = index_folder(folder, store, embedder, model=model)
        assert (report.updated, len(report.unchanged)) == (("docs/glyphs.md",), 3)
        assert all(model.fits(chunk.text) for chunk in store.chunks_of("docs/glyphs.md"))
        assert all("Glyphs" in text for text in seen.taken())
        for again in (
            model,
            None,
            ModelTokens("other.1024", lambda text: len(text.encode()), 1024),
        ):
            assert len(index_folder(folder, store, embedder, model=again).unchanged) == 4
        strict = ModelTokens("strict.128", lambda text: len(text.encode()), 128)
        assert index_folder(folder, store, embedder, model=strict).updated == ("docs/glyphs.md",)


def test_a_file_that_was_emptied_loses_its_chunks(
    folder: Path, store: FaissStore, embedder: Embedder
):
    index_folder(folder, store, embedder)
    write(folder, "kettle.md", "")
    report = index_folder(folder, store, embedder)
    assert (report.removed, report.problems[0].doc_id) == (("docs/kettle.md",), "docs/kettle.md")
    assert not any("Kettle" in text for text in found(store, embedder, "kettle"))


def test_a_single_file_that_was_emptied_loses_its_chunks(
    folder: Path, store: FaissStore, embedder: Embedder
):
    index_folder(folder, store, embedder)
    write(folder, "kettle.md", "")
    report = index_folder(folder / "kettle.md", store, embedder)
    assert (report.removed, report.problems[0].kind) == (("docs/kettle.md",), "unreadable")
    assert doc_ids(store) == ["docs/more/grinder.txt", "docs/toaster.md"]


@pytest.mark.parametrize(
    "name",
    [
        "kettle.md",
        pytest.param(
            "more",
            marks=pytest.mark.skipif(
                os.listdir not in os.supports_fd,
                reason="openers open no folders here, as on Windows",
            ),
        ),
    ],
)
def test_what_an_opener_refuses_keeps_its_chunks(
    name: str, folder: Path, store: FaissStore, embedder: Embedder
):
    def refuse(path: str, flags: int) -> int:
        if path.endswith(name):
            raise DocumentError(f"{name}: not now")
        return os.open(path, flags)

    index_folder(folder, store, embedder)
    report = index_folder(folder, store, embedder, opener=refuse)
    assert report.problems == (Problem(f"docs/{name}", "inaccessible", f"{name}: not now"),)
    assert report.removed == ()


def test_what_is_out_of_reach_keeps_its_chunks(folder: Path, store: FaissStore, embedder: Embedder):
    index_folder(folder, store, embedder)
    for name in ("kettle.md", "more"):  # a link to itself cannot be opened, not even by root
        target = folder / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        target.symlink_to(target)
    report = index_folder(folder, store, embedder)
    assert {(problem.doc_id, problem.kind) for problem in report.problems} == {
        ("docs/kettle.md", "inaccessible"),
        ("docs/more", "inaccessible"),
    }
    assert report.removed == ()
    assert len(found(store, embedder, "kettle")) == 3


@pytest.mark.parametrize(
    ("executable", "failed"),
    [("/bin/false", "ended before it could read (exit code 1)"), ("/no/python", "No such file")],
)
def test_where_no_process_can_read_documents_they_keep_their_chunks(
    folder: Path,
    store: FaissStore,
    embedder: Embedder,
    monkeypatch: pytest.MonkeyPatch,
    executable: str,
    failed: str,
) -> None:
    write(folder, "prices.csv", "item,price\nkettle,20\n")
    index_folder(folder, store, embedder)
    write(folder, "prices.csv", "item,price\nkettle,30\n")
    monkeypatch.setattr(sys, "executable", executable)
    report = index_folder(folder, store, embedder)
    (problem,) = report.problems
    assert (problem.doc_id, problem.kind) == ("docs/prices.csv", "inaccessible")
    assert "the process that reads documents" in problem.reason
    assert failed in problem.reason
    assert report.removed == ()
    assert any("kettle" in text and "20" in text for text in found(store, embedder, "kettle price"))
    monkeypatch.undo()
    assert index_folder(folder, store, embedder).updated == ("docs/prices.csv",)


def test_a_missing_folder_removes_nothing(folder: Path, store: FaissStore, embedder: Embedder):
    index_folder(folder, store, embedder)
    shutil.rmtree(folder)
    with pytest.raises(DocumentError, match="no such file or folder"):
        index_folder(folder, store, embedder)
    assert len(doc_ids(store)) == 3


# --- several folders ---


def test_folders_of_the_same_name_do_not_overwrite_one_another(
    tmp_path: Path, store: FaissStore, embedder: Embedder
):
    for place in ("a", "b"):
        write(tmp_path / place / "docs", "page.md", f"This is the page of {place}.")
        index_folder(tmp_path / place / "docs", store, embedder)
    assert doc_ids(store) == ["docs-2/page.md", "docs/page.md"]
    (tmp_path / "a/docs/page.md").unlink()
    report = index_folder(tmp_path / "a/docs", store, embedder)
    assert report.removed == ("docs/page.md",)
    assert found(store, embedder, "page") == ["This is the page of b."]
    assert index_folder(tmp_path / "b/docs", store, embedder).unchanged == ("docs-2/page.md",)


def test_a_folder_below_an_indexed_one_belongs_to_it(
    folder: Path, store: FaissStore, embedder: Embedder
):
    index_folder(folder, store, embedder)
    write(folder, "more/new.txt", "A new page about ovens.")
    (folder / "more/grinder.txt").unlink()
    report = index_folder(folder / "more", store, embedder)
    assert (report.added, report.removed) == (("docs/more/new.txt",), ("docs/more/grinder.txt",))
    assert index_folder(folder, store, embedder).unchanged == (
        "docs/kettle.md",
        "docs/more/new.txt",
        "docs/toaster.md",
    )


def test_a_folder_around_an_indexed_one_takes_over_its_documents(
    folder: Path, store: FaissStore, embedder: Embedder, seen: CountingModel
):
    index_folder(folder / "more", store, embedder)
    assert doc_ids(store) == ["more/grinder.txt"]
    seen.taken()
    report = index_folder(folder, store, embedder)
    assert report.removed == ("more/grinder.txt",)
    assert doc_ids(store) == ["docs/kettle.md", "docs/more/grinder.txt", "docs/toaster.md"]
    assert not any("grinder" in text for text in seen.taken())
    (folder / "more/grinder.txt").unlink()
    index_folder(folder, store, embedder)
    assert not any("grinder" in text for text in found(store, embedder, "grinder"))


def test_a_folder_around_it_keeps_what_is_out_of_reach(
    folder: Path, store: FaissStore, embedder: Embedder
):
    index_folder(folder / "more", store, embedder)
    grinder = folder / "more/grinder.txt"
    grinder.unlink()
    grinder.symlink_to(grinder)
    report = index_folder(folder, store, embedder)
    assert [problem.doc_id for problem in report.problems] == ["docs/more/grinder.txt"]
    assert report.removed == ()
    assert doc_ids(store) == ["docs/kettle.md", "docs/toaster.md", "more/grinder.txt"]
    assert any("grinder" in text for text in found(store, embedder, "grinder"))


def test_a_subfolder_indexed_first_is_taken_over_after_a_single_file_of_its_parent(
    folder: Path, store: FaissStore, embedder: Embedder
):
    index_folder(folder / "more", store, embedder)
    index_folder(folder / "kettle.md", store, embedder)
    (folder / "more/grinder.txt").unlink()
    write(folder, "more/mill.txt", "The mill grinds pepper.\n")
    report = index_folder(folder, store, embedder)
    assert report.removed == ("more/grinder.txt",)
    assert doc_ids(store) == ["docs/kettle.md", "docs/more/mill.txt", "docs/toaster.md"]
    assert not any("coffee" in text for text in found(store, embedder, "coffee beans"))


@pytest.mark.parametrize("again", ["more", "more/grinder.txt", "."])
def test_a_run_that_was_cut_off_over_an_indexed_subfolder_leaves_no_old_text(
    folder: Path, store: FaissStore, embedder: Embedder, again: str
):
    index_folder(folder / "more", store, embedder)
    for name, text in PAGES.items():  # written by the run over the parent, which was cut off then
        vectors = embedder.encode_document([text])
        store.upsert(f"docs/{name}", [Chunk(text)], vectors, root=str(folder))
    write(folder, "more/grinder.txt", "The grinder is out of order.\n")
    index_folder(folder / again, store, embedder)
    texts = found(store, embedder, "grinder")
    assert sum("grinder" in text for text in texts) == 1
    assert not any("coffee" in text for text in texts)


def test_a_hidden_folder_that_was_named_is_not_taken_over(
    tmp_path: Path, store: FaissStore, embedder: Embedder
):
    write(tmp_path / "docs/.notes", "a.md", "A note.")
    write(tmp_path / "docs", "b.md", "A page.")
    index_folder(tmp_path / "docs/.notes", store, embedder)
    assert index_folder(tmp_path / "docs", store, embedder).removed == ()
    assert doc_ids(store) == [".notes/a.md", "docs/b.md"]


def test_a_single_file_is_a_page_of_its_folder(folder: Path, store: FaissStore, embedder: Embedder):
    assert index_folder(folder / "kettle.md", store, embedder).added == ("docs/kettle.md",)
    assert doc_ids(store) == ["docs/kettle.md"]
    report = index_folder(folder, store, embedder)
    assert (report.unchanged, len(report.added)) == (("docs/kettle.md",), 2)
    write(folder, "kettle.md", "The kettle is new.")
    report = index_folder(folder / "kettle.md", store, embedder)
    assert (report.updated, report.removed) == (("docs/kettle.md",), ())
    assert len(doc_ids(store)) == 3


def test_a_relative_path_is_the_same_folder(
    folder: Path, store: FaissStore, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
):
    index_folder(folder, store, embedder)
    monkeypatch.chdir(folder.parent)
    assert len(index_folder("docs", store, embedder).unchanged) == 3
    monkeypatch.chdir(folder)
    assert len(index_folder(".", store, embedder).unchanged) == 3


# --- documents in memory ---


def test_documents_in_memory_are_added_and_updated(
    store: FaissStore, embedder: Embedder, seen: CountingModel
):
    first = Document("faq/1", "# Fridge\n\nKeep the fridge at four degrees.", {"lang": "en"})
    assert index_documents([first], store, embedder).added == ("faq/1",)
    assert index_documents([first], store, embedder).unchanged == ("faq/1",)
    assert len(seen.taken()) == 1
    relabelled = Document("faq/1", first.text, {"lang": "de"})
    assert index_documents([relabelled], store, embedder).updated == ("faq/1",)
    assert seen.taken() == []
    assert store.chunks_of("faq/1")[0].metadata["lang"] == "de"


def test_of_documents_with_the_same_name_the_last_one_stays(store: FaissStore, embedder: Embedder):
    old, other = (Document("faq/1", f"The fridge has {n} shelves.") for n in (3, 4))
    assert index_documents([other, old], store, embedder).added == ("faq/1",)
    assert store.chunks_of("faq/1")[0].text == old.text
    assert index_documents([other, old], store, embedder).unchanged == ("faq/1",)
    assert store.chunks_of("faq/1")[0].text == old.text


def test_folders_and_documents_in_memory_leave_each_other_alone(
    folder: Path, store: FaissStore, embedder: Embedder
):
    index_documents([Document("docs/memo", "A memo about fridges.")], store, embedder)
    assert index_folder(folder, store, embedder).added[0] == "docs-2/kettle.md"
    assert index_folder(folder, store, embedder).removed == ()
    with pytest.raises(DocumentError, match="give the document another"):
        index_documents([Document("docs-2/kettle.md", "Mine.")], store, embedder)
    assert len(doc_ids(store)) == 4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("Keep the fridge at four degrees.", "each document must be a Document"),
        (Document("faq/2", None), "the text of faq/2 must be text"),  # type: ignore[arg-type]
        (Document(5, "A text."), "doc_id must be text"),  # type: ignore[arg-type]
        (Document("faq/\ud800", "A text."), "valid Unicode"),
        (Document("faq/2", "A text.", ["lang"]), "the metadata of faq/2"),  # type: ignore[arg-type]
    ],
)
def test_anything_but_documents_is_refused_before_the_first_is_written(
    store: FaissStore, embedder: Embedder, wrong: Any, says: str
):
    with pytest.raises(ConfigError, match=says):
        index_documents([Document("faq/1", "A text."), wrong], store, embedder)
    assert doc_ids(store) == []


# --- interruptions, progress, mismatches ---


def test_a_run_that_is_cut_off_is_completed_by_the_next(
    tmp_path: Path, folder: Path, embedder: Embedder, seen: CountingModel
):
    for number in range(12):
        write(
            folder,
            f"page{number:02}.md",
            "\n\n".join(f"# Part {number}.{part}\n\nText." for part in range(40)),
        )

    class Killed(BaseException):
        pass

    def kill(_: Progress) -> None:
        if len(seen.texts) >= 300:
            raise Killed

    seen.taken()

    with open_store(tmp_path / "index", embedder) as store, pytest.raises(Killed):
        index_folder(folder, store, embedder, progress=kill)
    with open_store(tmp_path / "index", embedder) as store:
        done = set(doc_ids(store))
        assert 0 < len(done) < 15
        assert all(store.chunks_of(doc_id) for doc_id in done)
        stored = store.stats().chunks
        seen.taken()
        report = index_folder(folder, store, embedder)
        assert set(report.unchanged) == done
        assert len(seen.taken()) == store.stats().chunks - stored
        assert len(doc_ids(store)) == 15


def test_progress_tells_files_and_chunks(folder: Path, store: FaissStore, embedder: Embedder):
    steps: list[Progress] = []
    report = index_folder(folder, store, embedder, progress=steps.append)
    names = ("docs/kettle.md", "docs/more/grinder.txt", "docs/toaster.md")
    assert steps[:3] == [
        Progress(done, 3, f"reading {name}") for done, name in enumerate(names, start=1)
    ]
    assert steps[3:] == [Progress(3, 3, f"{report.chunks_embedded} chunks embedded")]


def test_a_store_of_another_model_is_refused_before_anything_is_read(
    tmp_path: Path, folder: Path, embedder: Embedder, seen: CountingModel
):
    with FaissStore.open(
        tmp_path / "other", dim=embedder.dim, embedder_fingerprint="other@0"
    ) as store:
        with pytest.raises(IndexStoreError, match="another embedding model than all-MiniLM-L6-v2"):
            index_folder(folder, store, embedder)
        assert (store.documents(), seen.taken()) == ([], [])


def test_a_report_of_nothing_is_empty(tmp_path: Path, store: FaissStore, embedder: Embedder):
    (tmp_path / "docs").mkdir()
    report = index_folder(tmp_path / "docs", store, embedder)
    assert report == IndexReport((), (), (), (), 0, 0, (), (), report.seconds)
