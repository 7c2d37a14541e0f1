import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachecraft_rag.errors import ConfigError, IndexStoreError
from cachecraft_rag.retrievers.embeddings import unit_vectors
from cachecraft_rag.retrievers.index.faiss_store import DATABASE, INDEX_FILE, Change, FaissStore
from cachecraft_rag.retrievers.index.removal import remove_documents
from cachecraft_rag.types.documents import Chunk

DIM = 8
MODEL = "tiny@0123"


def open_store(folder: Path, **settings) -> FaissStore:
    return FaissStore.open(folder, **{"dim": DIM, "embedder_fingerprint": MODEL, **settings})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FaissStore]:
    with open_store(tmp_path / "index") as opened:
        yield opened


def chunk(name: str, **metadata) -> Chunk:
    return Chunk(f"The text of {name}.", metadata)


def vector_of(text: str) -> np.ndarray:
    """A unit vector that depends on the text alone."""
    vector = np.random.default_rng(list(text.encode())).standard_normal(DIM)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def vectors_of(chunks: list[Chunk]) -> np.ndarray:
    return (
        np.stack([vector_of(one.text) for one in chunks])
        if chunks
        else np.empty((0, DIM), np.float32)
    )


def put(store: FaissStore, doc_id: str, *names: str, **metadata) -> Change:
    chunks = [chunk(name, doc=doc_id, **metadata) for name in names]
    return store.upsert(doc_id, chunks, vectors_of(chunks))


def nearest(store: FaissStore, name: str, k: int = 1, **settings) -> list[str]:
    return [hit.text for hit in store.search(vector_of(chunk(name).text), k, **settings)]


def names_of(texts: list[str]) -> list[str]:
    return [text.removeprefix("The text of ").removesuffix(".") for text in texts]


# --- documents, chunks, owners ---


def test_a_chunk_is_found_by_its_vector(store: FaissStore):
    put(store, "a.md", "one", "two", "three")
    hits = store.search(vector_of(chunk("two").text), 3)
    assert hits[0].chunk_id == chunk("two").chunk_id
    assert hits[0].score == pytest.approx(1.0, abs=1e-6)
    assert hits[0].metadata == {"doc": "a.md"}
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_upsert_replaces_the_document_and_nothing_else(store: FaissStore):
    put(store, "a.md", "one", "two")
    put(store, "b.md", "three")
    change = put(store, "a.md", "two", "four")
    assert change == Change(added=(chunk("four").chunk_id,), removed=(chunk("one").chunk_id,))
    assert names_of([one.text for one in store.chunks_of("a.md")]) == ["two", "four"]
    assert names_of([one.text for one in store.chunks_of("b.md")]) == ["three"]
    assert sorted(names_of(nearest(store, "one", 10))) == ["four", "three", "two"]


def test_upsert_twice_is_upsert_once(store: FaissStore):
    put(store, "a.md", "one", "two")
    before = store.stats()
    assert put(store, "a.md", "one", "two") == Change()
    assert (store.stats().owners, store.stats().generation) == (before.owners, before.generation)


def test_documents_are_listed_with_their_digests(store: FaissStore):
    store.upsert(
        "b.md",
        [chunk("x"), chunk("y")],
        vectors_of([chunk("x"), chunk("y")]),
        content_digest="7f",
        root="/docs",
    )
    put(store, "a.md")
    listed = [(one.doc_id, one.content_digest, one.root, one.chunks) for one in store.documents()]
    assert listed == [("a.md", "", "", 0), ("b.md", "7f", "/docs", 2)]


def test_a_shared_chunk_is_one_chunk_with_two_owners(store: FaissStore):
    put(store, "a.md", "shared", "only a")
    assert put(store, "b.md", "shared") == Change()
    assert (store.stats().chunks, store.stats().owners) == (2, 3)
    assert names_of(nearest(store, "shared", 5)).count("shared") == 1


def test_a_shared_chunk_stays_until_its_last_owner_goes(store: FaissStore):
    put(store, "a.md", "shared")
    put(store, "b.md", "shared")
    hit = store.search(vector_of(chunk("shared").text), 1)[0]
    assert hit.metadata == {"doc": "a.md"}
    assert store.delete_document("a.md") == Change()
    hit = store.search(vector_of(chunk("shared").text), 1)[0]
    assert hit.metadata == {"doc": "b.md"}, "the metadata of a living owner"
    assert store.delete_document("b.md") == Change(removed=(chunk("shared").chunk_id,))
    assert store.search(vector_of(chunk("shared").text), 1) == []


def test_a_chunk_twice_in_one_document_keeps_both_places(store: FaissStore):
    put(store, "a.md", "x", "y", "x")
    assert names_of([one.text for one in store.chunks_of("a.md")]) == ["x", "y", "x"]
    assert store.stats().chunks == 2
    put(store, "a.md", "x", "y")
    assert names_of(nearest(store, "x")) == ["x"]


def test_add_appends_and_clears_the_digest(store: FaissStore):
    store.upsert("a.md", [chunk("x")], vectors_of([chunk("x")]), content_digest="7f")
    store.add("a.md", [chunk("y")], vectors_of([chunk("y")]))
    store.add("new", [chunk("z")], vectors_of([chunk("z")]))
    assert names_of([one.text for one in store.chunks_of("a.md")]) == ["x", "y"]
    assert [one.content_digest for one in store.documents()] == ["", ""]
    assert names_of(nearest(store, "z")) == ["z"]


def keyed(store: FaissStore, doc_id: str, **names: str) -> Change:
    chunks = [chunk(name, key=key) for key, name in names.items()]
    return store.add(doc_id, chunks, vectors_of(chunks), keys=list(names))


def test_a_key_names_one_place_in_the_whole_store(store: FaissStore):
    keyed(store, "a", k1="kettle", k2="toaster")
    change = keyed(store, "b", k1="fridge", k3="toaster")
    assert [name[:6] for name in change.added] == [chunk("fridge").chunk_id[:6]]
    assert change.removed == (chunk("kettle").chunk_id,)
    assert names_of([one.text for one in store.chunks_of("a")]) == ["toaster"]
    assert names_of([one.text for one in store.chunks_of("b")]) == ["fridge", "toaster"]
    assert nearest(store, "kettle", 5).count(chunk("kettle").text) == 0
    assert nearest(store, "fridge") == [chunk("fridge").text]


def test_a_place_added_again_has_the_new_vector(store: FaissStore):
    keyed(store, "a", k1="kettle")
    change = store.add("a", [chunk("kettle")], [vector_of("something else")], keys=["k1"])
    assert change == Change()  # the chunk was there and is there
    assert store.search(vector_of("something else"), 1)[0].score == pytest.approx(1)
    assert store.stats().owners == 1


def test_places_are_found_and_deleted_by_key(store: FaissStore):
    keyed(store, "a", k1="kettle", k2="toaster")
    keyed(store, "b", k3="kettle")
    assert [one.metadata["key"] for one in store.places()] == ["k1", "k2", "k3"]
    assert [one.metadata["key"] for one in store.places(["k3", "k1", "none"])] == ["k1", "k3"]
    assert [one.metadata["key"] for one in store.places(where={"key": "k2"})] == ["k2"]
    assert store.delete_keys(["k1", "none"]) == Change()  # the other document has the chunk as well
    assert store.delete_keys(["k3"]) == Change(removed=(chunk("kettle").chunk_id,))
    assert [document.doc_id for document in store.documents()] == ["a"]
    assert nearest(store, "kettle", 5) == [chunk("toaster").text]


def test_delete_chunks_removes_them_from_every_document(store: FaissStore):
    put(store, "a.md", "shared", "a")
    put(store, "b.md", "b", "shared")
    change = store.delete_chunks([chunk("shared").chunk_id, "no such chunk"])
    assert change.removed == (chunk("shared").chunk_id,)
    assert sorted(names_of(nearest(store, "shared", 9))) == ["a", "b"]
    assert [one.chunks for one in store.documents()] == [1, 1]


def test_deleting_what_is_not_there_changes_nothing(store: FaissStore):
    put(store, "a.md", "a")
    assert store.delete_document("never was") == Change()
    assert store.delete_chunks([]) == Change()
    assert (store.stats().chunks, store.stats().owners, store.stats().generation) == (1, 1, 1)


def test_get_keeps_the_order_and_names_what_is_missing(store: FaissStore):
    put(store, "a.md", "x", "y", page=3)
    ids = [chunk("y").chunk_id, chunk("x").chunk_id, chunk("y").chunk_id]
    got = store.get(ids)
    assert [one.chunk_id for one in got] == ids
    assert got[0].metadata == {"doc": "a.md", "page": 3}
    with pytest.raises(IndexStoreError, match="chunk nope is not in the index"):
        store.get([*ids, "nope"])


def test_known_vectors_are_those_that_were_stored(store: FaissStore):
    put(store, "a.md", "x", "y")
    known = store.known_vectors([chunk("y").chunk_id, "nope"])
    assert list(known) == [chunk("y").chunk_id]
    np.testing.assert_array_equal(known[chunk("y").chunk_id], vector_of(chunk("y").text))


def test_thousands_of_ids_in_one_call(store: FaissStore):
    many = [f"n{number}" for number in range(5000)]
    put(store, "a.md", *many)
    ids = [chunk(name).chunk_id for name in many]
    assert len(store.known_vectors(ids)) == len(store.get(ids)) == 5000
    assert store.stats().chunks == 5000
    assert len(store.delete_chunks(ids[1:]).removed) == 4999
    assert names_of(nearest(store, "n77", 9)) == ["n0"]


@pytest.mark.parametrize("value", [[1], {"a": 1}, object()])
def test_metadata_must_be_plain_values(store: FaissStore, value: object):
    with pytest.raises(ConfigError, match="metadata 'key'"):
        put(store, "a.md", "x", key=value)
    assert store.documents() == [], "nothing of a refused document stays"


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.upsert("half \ud800", [chunk("x")], [vector_of("x")]),
        lambda store: store.upsert("a.md", [chunk("half \ud800")], [vector_of("x")]),
        lambda store: store.add("a.md", [chunk("x")], [vector_of("x")], keys=["half \ud800"]),
        lambda store: store.set_digest("half \ud800", ""),
        lambda store: store.delete_document("half \ud800"),
        lambda store: store.chunks_of("half \ud800"),
    ],
)
def test_texts_that_sqlite_cannot_hold_are_refused(
    store: FaissStore, call: Callable[[FaissStore], object]
):
    with pytest.raises(ConfigError, match="valid Unicode"):
        call(store)
    assert store.documents() == [], "nothing of a refused document stays"


@pytest.mark.parametrize("keys", [["a", "b"], [], ["a", "a"]])
def test_keys_are_one_for_each_chunk(store: FaissStore, keys: list[str]):
    chunks = [chunk("x"), chunk("y")][: 2 if keys == ["a", "a"] else 1]
    with pytest.raises(ConfigError, match="one for each chunk"):
        store.add("a.md", chunks, [vector_of(each.text) for each in chunks], keys=keys)
    assert store.documents() == []


@pytest.mark.parametrize("vector", ["four", ["a", "b"], [[1.0], [2.0, 3.0]], [1e300] * DIM])
def test_vectors_must_be_finite_numbers(store: FaissStore, vector: Any):
    for call in (
        partial(store.search, vector, 1),
        partial(store.upsert, "a.md", [chunk("x")], [vector]),
    ):
        with pytest.raises(IndexStoreError):
            call()


# --- search: the traps ---


def test_search_in_an_empty_store_finds_nothing(store: FaissStore):
    assert store.search(vector_of("anything"), 5) == []


def test_more_than_there_are_gives_all_and_never_minus_one(store: FaissStore):
    put(store, "a.md", "x", "y", "z")
    assert sorted(names_of(nearest(store, "x", 1000))) == ["x", "y", "z"]
    assert names_of(nearest(store, "x", 1000, where={"doc": "b.md"})) == []


def test_a_search_for_nothing_is_refused(store: FaissStore):
    with pytest.raises(ConfigError, match="at least 1"):
        store.search(vector_of("x"), 0)


def test_ties_come_by_chunk_id_whatever_k_and_whatever_the_order_of_insertion(tmp_path: Path):
    names = [f"tie {number}" for number in range(60)]
    expected = sorted(chunk(name).chunk_id for name in names)
    for seed in range(3):
        random.Random(seed).shuffle(names)
        with open_store(tmp_path / str(seed)) as store:
            for name in names:
                store.upsert(name, [chunk(name)], vector_of("the same")[None])
            put(store, "other", "something else")
            for k in (1, 5, 59, 60):
                hits = store.search(vector_of("the same"), k)
                assert [hit.chunk_id for hit in hits] == expected[:k]


def test_every_filter_is_exact(store: FaissStore):
    rng = random.Random(0)
    chunks = [
        chunk(f"n{number}", colour=rng.choice("rgb"), size=rng.randrange(3))
        for number in range(300)
    ]
    for number, one in enumerate(chunks):
        store.upsert(f"doc{number}", [one], vectors_of([one]))
    query = vector_of("query")
    for where in ({"colour": "r"}, {"colour": "g", "size": 2}, {"size": 0}, {"colour": "purple"}):
        matching = [
            one for one in chunks if all(one.metadata[key] == value for key, value in where.items())
        ]
        expected = sorted(
            matching, key=lambda one: (-float(vector_of(one.text) @ query), one.chunk_id)
        )[:7]
        assert [hit.chunk_id for hit in store.search(query, 7, where=where)] == [
            one.chunk_id for one in expected
        ]
        by_function = store.search(
            query, 7, where=lambda found, where=where: where.items() <= found.items()
        )
        assert by_function == store.search(query, 7, where=where)


def test_a_filter_tells_values_apart(store: FaissStore):
    values = {
        "true": True,
        "one": 1,
        "float": 1.5,
        "text": "1",
        "none": None,
        "quote": 'a"b',
        "ä": "ü😀",
    }
    for name, value in values.items():
        store.upsert(name, [chunk(name, **{'the "key"': value})], vectors_of([chunk(name)]))
    put(store, "without", "without")
    for name, value in values.items():
        assert names_of(nearest(store, name, 9, where={'the "key"': value})) == [name]
    assert names_of(nearest(store, "one", 9, where={'the "key"': 1.0})) == ["one"]


def test_a_filtered_hit_has_the_metadata_of_an_owner_that_matches(store: FaissStore):
    put(store, "a.md", "shared", lang="en")
    put(store, "b.md", "shared", lang="de")
    hits = store.search(vector_of(chunk("shared").text), 1, where={"lang": "de"})
    assert [hit.metadata for hit in hits] == [{"doc": "b.md", "lang": "de"}]


def test_after_delete_and_add_no_number_leads_to_the_wrong_chunk(store: FaissStore):
    rng = random.Random(1)
    living: dict[str, list[str]] = {}
    for step in range(120):
        doc_id = f"doc{rng.randrange(12)}"
        if rng.random() < 0.35:
            store.delete_document(doc_id)
            living.pop(doc_id, None)
        else:
            living[doc_id] = [
                f"{step}-{part}" if rng.random() < 0.7 else f"common {part}" for part in range(3)
            ]
            put(store, doc_id, *living[doc_id])
        if step % 5 == 0:
            names = {name for document in living.values() for name in document}
            for name in rng.sample(sorted(names), min(5, len(names))):
                assert names_of(nearest(store, name)) == [name]
            assert sorted(names_of(nearest(store, "any", 500))) == sorted(names)


def test_the_index_is_flat_so_that_removal_keeps_recall(store: FaissStore):
    names = [f"n{number}" for number in range(400)]
    for name in names:
        put(store, name, name)
    assert names_of(nearest(store, "n7")) == ["n7"]
    for name in names[::2]:
        store.delete_document(name)
    assert sorted(names_of(nearest(store, "n7", 400))) == sorted(names[1::2])
    for name in names[::4]:
        put(store, name, name)
    # a second removal is what ends the process with an inverted file below IDMap2
    store.delete_document("n1")
    for name in names[3::2]:
        assert names_of(nearest(store, name)) == [name]


# --- what is refused ---


def test_another_embedding_model_is_refused_with_advice(tmp_path: Path):
    with open_store(tmp_path) as store:
        put(store, "a.md", "x")
    with pytest.raises(
        IndexStoreError,
        match=r"tiny \(8 dimensions\), not with big .*delete the folder and index again",
    ):
        open_store(tmp_path, embedder_fingerprint="big@4567")
    with pytest.raises(IndexStoreError, match="16 dimensions"):
        open_store(tmp_path, dim=16)
    open_store(tmp_path, embedder_fingerprint="same weights, another name@0123").close()


def test_an_index_is_not_made_by_looking(tmp_path: Path):
    with pytest.raises(IndexStoreError, match="no index here"):
        FaissStore.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_an_index_can_be_looked_at_without_its_model(tmp_path: Path):
    with open_store(tmp_path) as store:
        put(store, "a.md", "x")
    with FaissStore.open(tmp_path) as store:
        assert (store.dim, store.embedder, store.stats().chunks) == (DIM, MODEL, 1)


def test_an_index_of_the_version_before_keys_is_brought_up_to_date(tmp_path: Path):
    with open_store(tmp_path / "index") as store:
        put(store, "a", "kettle")
    with closing(sqlite3.connect(tmp_path / "index" / DATABASE)) as db, db:
        db.execute("ALTER TABLE documents DROP COLUMN document_sum")
        db.execute("ALTER TABLE owners DROP COLUMN place_sum")
        db.execute("ALTER TABLE chunks DROP COLUMN vector_sum")
        db.execute("DROP TABLE removed_chunks")
        db.execute("DROP INDEX owners_by_key")
        db.execute("ALTER TABLE owners DROP COLUMN key")
        db.execute("ALTER TABLE chunks ADD COLUMN generation INTEGER NOT NULL DEFAULT 1")
        db.execute("CREATE INDEX chunks_by_generation ON chunks (generation)")
        db.execute("PRAGMA user_version = 1")
    with open_store(tmp_path / "index") as store:
        keyed(store, "b", k1="toaster")
        assert nearest(store, "kettle") == [chunk("kettle").text]
        assert len(store.places()) == 2


def test_chunks_that_left_are_noted_until_they_are_forgotten_or_back(tmp_path: Path) -> None:
    kettle, toaster = chunk("kettle").chunk_id, chunk("toaster").chunk_id
    with open_store(tmp_path / "index") as store:
        put(store, "a", "kettle", "toaster")
        assert store.removed_chunks() == {}
        store.delete_document("a")
        noted = store.removed_chunks()
        assert set(noted) == {kettle, toaster}
        put(store, "b", "kettle")
        assert set(store.removed_chunks()) == {toaster}
    with open_store(tmp_path / "index") as store:
        store.delete_document("b")
        # It has another number now, so what was read before does not forget it.
        store.forget_removed(noted.values())
        assert set(store.removed_chunks()) == {kettle}
        store.forget_removed(store.removed_chunks().values())
        assert store.removed_chunks() == {}


def test_a_document_without_chunks_is_there_until_it_is_deleted(tmp_path: Path) -> None:
    with open_store(tmp_path / "index") as store:
        store.upsert("void", [], [])
        assert store.holds("void")
        assert not store.holds("voi")
        store.delete_document("void")
        assert not store.holds("void")


def test_a_document_of_another_folder_is_not_overwritten(tmp_path: Path) -> None:
    """Two processes that index folders of one name at the same time choose the same names."""
    vectors = [[1.0, *[0.0] * (DIM - 1)]]
    with open_store(tmp_path / "index") as store:
        store.upsert("docs/a.md", [chunk("kettle")], vectors, root="/first/docs")
        with pytest.raises(IndexStoreError, match="it gets another name"):
            store.upsert("docs/a.md", [chunk("toaster")], vectors, root="/second/docs")
        assert [found.text for found in store.chunks_of("docs/a.md")] == [chunk("kettle").text]
        store.upsert("docs/a.md", [chunk("toaster")], vectors, root="/first/docs")


def test_a_key_with_a_nul_is_refused_and_finds_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "index") as store:
        keyed(store, "a", k="kettle")
        with pytest.raises(ConfigError, match="without NUL"):
            store.add("b", [chunk("toaster")], [[1.0] * DIM], keys=["k\0z"])
        assert store.delete_keys(["k\0z"]).removed == ()
        assert len(store.places(["k"])) == 1


@pytest.mark.parametrize(
    "damage",
    ["UPDATE chunks SET vector = x'00'", "UPDATE settings SET value = 'x' WHERE key = 'dim'"],
)
def test_damaged_vectors_are_said_to_be_damaged(tmp_path: Path, damage: str) -> None:
    with open_store(tmp_path / "index") as store:
        put(store, "a", "kettle")
    (tmp_path / "index" / INDEX_FILE).unlink(missing_ok=True)
    with closing(sqlite3.connect(tmp_path / "index" / DATABASE)) as db, db:
        db.execute(damage)

    def search() -> None:
        with FaissStore.open(tmp_path / "index") as store:
            store.search([1.0] * DIM, 1)

    with pytest.raises(IndexStoreError, match="the index is damaged"):
        search()


def test_an_index_of_a_newer_version_is_refused(tmp_path: Path):
    open_store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as db, db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(IndexStoreError, match="newer version"):
        open_store(tmp_path)


def test_a_damaged_database_is_refused_with_advice(tmp_path: Path):
    (tmp_path / DATABASE).write_bytes(b"this is no database" * 500)
    with pytest.raises(IndexStoreError, match="delete the folder and index again"):
        open_store(tmp_path)


def test_a_full_disk_is_no_reason_to_delete_the_index(
    tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
):
    open_store(tmp_path).close()
    with full_disk():
        opened = open_store(tmp_path)
        assert opened.documents() == []
        with pytest.raises(IndexStoreError, match=r"the disk is full or broken. Free some space"):
            opened.upsert("doc", [Chunk("One.")], np.eye(1, opened.dim))
        opened.close()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "index").write_text("I was here first")
    with pytest.raises(IndexStoreError, match="cannot be opened"):
        open_store(tmp_path / "index")


@pytest.mark.parametrize(
    "vectors",
    [np.zeros((1, DIM + 1)), np.zeros((2, DIM)), np.zeros(DIM), np.full((1, DIM), np.nan)],
)
def test_vectors_that_do_not_fit_are_refused_and_change_nothing(
    store: FaissStore, vectors: np.ndarray
):
    with pytest.raises(IndexStoreError):
        store.upsert("a.md", [chunk("x")], vectors)
    assert store.documents() == []


def test_a_query_of_another_width_is_refused(store: FaissStore):
    with pytest.raises(IndexStoreError, match="tiny"):
        store.search(np.ones(DIM - 1), 1)


def test_a_closed_store_says_so(tmp_path: Path):
    store = open_store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(IndexStoreError, match="closed"):
        store.stats()


def test_a_database_that_cannot_be_read_does_not_keep_the_store_from_closing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = open_store(tmp_path)
    put(store, "a.md", "x")
    store.search(vector_of("q"), 1)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as other:
        other.execute("DROP TABLE settings")
    store.close()
    assert "not brought up to date" in caplog.text
    with pytest.raises(IndexStoreError, match="closed"):
        store.stats()


# --- files, restarts, crashes ---


def test_everything_is_there_after_a_restart(tmp_path: Path):
    with open_store(tmp_path) as store:
        put(store, "a.md", "x", "y")
        before = store.search(vector_of("q"), 5)
    with open_store(tmp_path) as store:
        assert store.search(vector_of("q"), 5) == before


def test_nothing_in_the_folder_is_a_pickle(tmp_path: Path):
    with open_store(tmp_path) as store:
        put(store, "a.md", "x", "y")
        store.save()
        files = {path.name: path.read_bytes()[:8] for path in tmp_path.iterdir()}
    assert files[DATABASE].startswith(b"SQLite")
    assert files[INDEX_FILE] == b"CCINDEX2"
    assert set(files) <= {DATABASE, INDEX_FILE, f"{DATABASE}-wal", f"{DATABASE}-shm"}


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize(
    "damage", [None, cut, flip, lambda data: b"", lambda data: b"\0" * 300, lambda data: data[:11]]
)
def test_a_lost_or_damaged_index_file_is_built_anew(
    tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
):
    with open_store(tmp_path) as store:
        put(store, "a.md", "x", "y", "z")
        store.save()
    path = tmp_path / INDEX_FILE
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with open_store(tmp_path) as store:
        assert names_of(nearest(store, "y")) == ["y"]
    assert [record for record in caplog.records if "damaged" in record.message] or damage is None
    with open_store(tmp_path) as store:
        assert names_of(nearest(store, "z", 3))[0] == "z"


def test_an_index_file_that_is_out_of_date_catches_up(tmp_path: Path):
    with open_store(tmp_path) as store:
        put(store, "a.md", "x", "y")
        store.save()
        old = (tmp_path / INDEX_FILE).read_bytes()
        put(store, "a.md", "y", "z")
    (tmp_path / INDEX_FILE).write_bytes(old)
    with open_store(tmp_path) as store:
        assert sorted(names_of(nearest(store, "z", 9))) == ["y", "z"]


def test_an_index_file_of_another_store_is_not_believed(tmp_path: Path):
    for name in ("one", "two"):
        with open_store(tmp_path / name) as store:
            put(store, "a.md", f"from {name}")
            store.save()
    (tmp_path / "one" / INDEX_FILE).replace(tmp_path / "two" / INDEX_FILE)
    with open_store(tmp_path / "two") as store:
        assert names_of(nearest(store, "from one", 5)) == ["from two"]


@pytest.mark.parametrize("later", [(), ("v",), ("v", "w"), ("v", "w", "u")])
def test_a_database_restored_from_an_older_copy_is_believed(tmp_path: Path, later: tuple[str, ...]):
    with open_store(tmp_path) as store:
        put(store, "a.md", "x")
    copy = (tmp_path / DATABASE).read_bytes()
    with open_store(tmp_path) as store:
        put(store, "b.md", "y")
        put(store, "c.md", "z")
        store.save()
    (tmp_path / DATABASE).write_bytes(copy)
    # writes as often as the lost writers did, or more, or less, and saves no index
    with open_store(tmp_path) as store:
        for name in later:
            put(store, name, name)
    with open_store(tmp_path) as store:
        assert sorted(names_of(nearest(store, "y", 9))) == sorted([*later, "x"])
        put(store, "d.md", "t")
        assert sorted(names_of(nearest(store, "y", 9))) == sorted([*later, "t", "x"])
        assert [names_of(nearest(store, name)) for name in (*later, "x")] == [
            [name] for name in (*later, "x")
        ]


def test_leftovers_of_killed_writers_are_swept(tmp_path: Path):
    old, young = tmp_path / f"{INDEX_FILE}.1.tmp", tmp_path / f"{INDEX_FILE}.2.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    with open_store(tmp_path) as store:
        put(store, "a.md", "x")
        store.save()
    assert (old.exists(), young.exists()) == (False, True)


def test_saving_where_nothing_can_be_written_is_no_error(
    store: FaissStore, caplog: pytest.LogCaptureFixture
):
    put(store, "a.md", "x")
    (store.folder / INDEX_FILE).mkdir()
    store.save()
    assert "cannot be written" in caplog.text
    assert names_of(nearest(store, "x")) == ["x"]


def test_a_folder_deleted_meanwhile_does_not_come_back(tmp_path: Path):
    with open_store(tmp_path / "index") as store:
        put(store, "a.md", "x")
        assert names_of(nearest(store, "x")) == ["x"]
        shutil.rmtree(tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_a_full_disk_is_an_error_with_advice_and_the_store_lives_on(store: FaissStore):
    put(store, "a.md", "x")
    pages = store._db._writer.execute("PRAGMA page_count").fetchone()[0]
    store._db._writer.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(IndexStoreError, match="full"):
        put(store, "b.md", *[f"n{number}" for number in range(500)])
    store._db._writer.execute("PRAGMA max_page_count = 1000000")
    assert [one.doc_id for one in store.documents()] == ["a.md"]
    put(store, "b.md", "y")
    assert names_of(nearest(store, "y")) == ["y"]


# --- threads and processes ---


def test_another_process_is_seen_at_the_next_search(tmp_path: Path):
    with open_store(tmp_path) as reader, open_store(tmp_path) as writer:
        assert reader.search(vector_of("q"), 9) == []
        put(writer, "a.md", "x", "y")
        assert sorted(names_of(nearest(reader, "x", 9))) == ["x", "y"]
        put(writer, "a.md", "y", "z")
        assert sorted(names_of(nearest(reader, "x", 9))) == ["y", "z"]
        reader.save()
        writer.delete_document("a.md")
        assert nearest(reader, "x", 9) == []


def test_threads_search_while_others_write(store: FaissStore):
    put(store, "fixed", *[f"fixed {number}" for number in range(30)])
    failures: list[object] = []
    done = threading.Event()

    def search(seed: int) -> None:
        rng = random.Random(seed)
        while not done.is_set():
            name = f"fixed {rng.randrange(30)}"
            if names_of(nearest(store, name, 3))[:1] != [name]:
                failures.append(name)

    def write(seed: int) -> None:
        for step in range(40):
            put(store, f"doc {seed}", *[f"{seed} {step} {part}" for part in range(3)])
            if step % 3 == 0:  # so too after the last step
                store.delete_document(f"doc {seed}")

    searchers = [threading.Thread(target=search, args=(seed,)) for seed in range(3)]
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(2)]
    for thread in [*searchers, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in searchers:
        thread.join()
    assert failures == []
    assert sorted(names_of(nearest(store, "any", 99))) == sorted(
        f"fixed {number}" for number in range(30)
    )


WRITER = """
import sys
import numpy as np
from cachecraft_rag.retrievers.index.faiss_store import FaissStore
from cachecraft_rag.types.documents import Chunk

folder, seed, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = FaissStore.open(folder, dim=8, embedder_fingerprint="tiny@0123")
print("ready", flush=True)
for step in range(steps):
    chunks = [Chunk(f"{seed} {step} {part}", {"step": step}) for part in range(4)]
    vectors = np.random.default_rng([seed, step]).standard_normal((4, 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    store.upsert(f"doc {seed} {step % 5}", chunks, vectors, content_digest=str(step))
    if step % 7 == 0:
        store.save()
store.close()
"""


def writer(folder: Path, seed: int, steps: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(folder), str(seed), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check_consistent(folder: Path) -> None:
    """Every document is whole, every chunk has an owner, and every chunk is found by its own vector."""
    with open_store(folder) as store:
        owned = set()
        for document in store.documents():
            chunks = store.chunks_of(document.doc_id)
            assert {str(one.metadata["step"]) for one in chunks} == {document.content_digest}
            assert len(chunks) == 4
            owned |= {one.chunk_id for one in chunks}
        hits = store.search(np.ones(DIM), 10_000)
        assert {hit.chunk_id for hit in hits} == owned
        assert len(hits) == len(owned) == store.stats().chunks
        for chunk_id, vector in store.known_vectors(owned).items():
            assert store.search(vector, 1)[0].chunk_id == chunk_id


def test_a_writer_killed_at_any_moment_leaves_whole_documents(tmp_path: Path):
    rng = random.Random(5)
    for round_number in range(6):
        process = writer(tmp_path, round_number, 100_000)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        check_consistent(tmp_path)


def test_two_processes_write_and_a_third_reads(tmp_path: Path):
    # both make the store: neither may fail
    processes = [writer(tmp_path, seed, 40) for seed in range(2)]
    open_store(tmp_path).close()
    with open_store(tmp_path) as store:
        while any(process.poll() is None for process in processes):
            hits = store.search(np.ones(DIM), 1000)
            assert len({hit.chunk_id for hit in hits}) == len(hits)
            time.sleep(0.01)
    for process in processes:
        assert process.wait() == 0
        assert process.stdout is not None
        process.stdout.close()
    check_consistent(tmp_path)
    with open_store(tmp_path) as store:
        assert len(store.documents()) == 10


# --- rows that were changed ---


def test_a_row_with_another_text_than_its_id_says_is_refused(store: FaissStore):
    put(store, "a.md", "one", "two")
    store.add("b.md", [chunk("three")], vectors_of([chunk("three")]), keys=["node"])
    with closing(sqlite3.connect(store.folder / DATABASE)) as db, db:
        db.execute("UPDATE chunks SET text = 'Pay to another account.'")
    ways = [
        lambda: store.search(vector_of(chunk("two").text), 1),
        lambda: store.get([chunk("one").chunk_id]),
        lambda: store.chunks_of("a.md"),
        lambda: store.places(["node"]),
    ]
    for way in ways:
        with pytest.raises(IndexStoreError, match="index again"):
            way()


def test_no_chunk_enters_under_the_id_of_another_text(store: FaissStore):
    wrong = [Chunk("Pay to another account.", {}, chunk("one").chunk_id)]
    store.upsert("a.md", wrong, vectors_of(wrong))
    assert [(one.chunk_id, one.text) for one in store.chunks_of("a.md")] == [
        (Chunk("Pay to another account.").chunk_id, "Pay to another account.")
    ]


def test_get_takes_ids_from_a_generator(store: FaissStore):
    put(store, "a.md", "one", "two")
    assert [one.text for one in store.get(chunk(name).chunk_id for name in ("two", "one"))] == [
        chunk("two").text,
        chunk("one").text,
    ]


def test_similar_chunks_are_the_nearest_others_best_first(store: FaissStore):
    put(store, "doc", "a", "b", "c", "d")
    page = chunk("a")
    expected = [name for name in names_of(nearest(store, "a", 4)) if name != "a"]
    assert names_of([other.text for other in store.similar(page.chunk_id, 2)]) == expected[:2]
    assert names_of([other.text for other in store.similar(page.chunk_id, 10)]) == expected
    with pytest.raises(IndexStoreError, match="is not in the index"):
        store.similar(chunk("unknown").chunk_id, 1)


def test_numbers_too_large_to_compare_are_refused(store: FaissStore):
    large = np.full((1, store.dim), 3e38, dtype=np.float32)
    with pytest.raises(IndexStoreError, match="scale vectors to unit length"):
        store.upsert("a.md", [chunk("one")], large)
    with pytest.raises(IndexStoreError, match="scale vectors to unit length"):
        store.search(large[0], 1)
    lengths = np.linalg.norm(unit_vectors(large), axis=1)
    assert lengths == pytest.approx(1.0)
    store.upsert("a.md", [chunk("one")], unit_vectors(large))
    assert store.search(unit_vectors(large)[0], 1)[0].score == pytest.approx(1.0)


# --- bytes of removed chunks, and damaged bytes ---


def bytes_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


class _LeavesRemovedRows(sqlite3.Connection):
    """A connection as most builds of SQLite make it: removed rows stay in the file unless told otherwise."""

    def __init__(self, *values, **settings) -> None:
        super().__init__(*values, **settings)
        self.execute("PRAGMA secure_delete = OFF")


@pytest.mark.parametrize("length", [20, 700, 9000])
@pytest.mark.parametrize("end", ["open", "closed"])
def test_no_file_holds_text_or_vector_of_a_removed_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, end: str
):
    connect = partial(sqlite3.connect, factory=_LeavesRemovedRows)
    monkeypatch.setattr("cachecraft_rag.store.database.sqlite3.connect", connect)
    dice = random.Random(length)
    folder = tmp_path / "index"
    with open_store(folder) as store:
        texts = {
            f"doc {number}": f"Secret {number:04}. {'word ' * (dice.randrange(length) // 5)}"
            for number in range(120)
        }
        for doc_id, text in texts.items():
            store.upsert(doc_id, [Chunk(text)], vector_of(text)[None])
        store.save()
        removed = dice.sample(sorted(texts), 60)
        for doc_id in removed[30:]:
            store.upsert(doc_id, [], np.empty((0, DIM), np.float32))
        remove_documents(store, removed[:30])
        if end == "closed":
            store.save()
            store.close()
        left = bytes_in(folder)
        for doc_id, text in texts.items():
            for content in (text[:12].encode(), vector_of(text).tobytes()):
                assert (content in left) == (doc_id not in removed), doc_id


def test_an_index_file_written_while_a_chunk_is_removed_does_not_keep_its_vector(
    store: FaissStore, tmp_path: Path
):
    put(store, "a.md", "one")
    put(store, "b.md", "two")
    store.save()
    assert (tmp_path / "index" / INDEX_FILE).exists()
    with open_store(tmp_path / "index") as other:
        other.delete_document("a.md")
        assert vector_of(chunk("one").text).tobytes() not in bytes_in(tmp_path / "index")
    assert names_of(nearest(store, "one", 3)) == ["two"]
    store.save()
    assert (tmp_path / "index" / INDEX_FILE).exists()
    assert vector_of(chunk("one").text).tobytes() not in bytes_in(tmp_path / "index")


@pytest.mark.parametrize("saved", [True, False])
def test_no_flipped_bit_in_the_database_gives_a_wrong_hit(tmp_path: Path, saved: bool):
    names = [f"chunk {number}" for number in range(30)]
    with open_store(tmp_path / "index") as store:
        for name in names:
            put(store, "a.md" if name < "chunk 2" else f"{name}.md", name, page=1, title="Kettles")
        store.save()
    if not saved:
        (tmp_path / "index" / INDEX_FILE).unlink()

    def hits(folder: Path) -> list[list[tuple[str, float]]]:
        with FaissStore.open(folder) as opened:
            found = [opened.search(vector_of(chunk(name).text), 3) for name in names]
        return [[(hit.text, round(hit.score, 5), hit.metadata) for hit in near] for near in found]

    right = hits(shutil.copytree(tmp_path / "index", tmp_path / "whole"))
    content = (tmp_path / "index" / DATABASE).read_bytes()
    noticed = 0
    for seed in range(150):
        dice = random.Random(seed)
        damaged = bytearray(content)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        folder = shutil.copytree(tmp_path / "index", tmp_path / f"flipped {seed}")
        (folder / DATABASE).write_bytes(damaged)
        try:
            assert hits(folder) == right, seed
        except IndexStoreError:
            noticed += 1
    assert noticed


Read = Callable[[FaissStore], object]
METADATA_READERS: dict[str, Read] = {
    "search": lambda store: store.search(vector_of(chunk("one").text), 2)[0].metadata,
    "filter": lambda store: store.search(vector_of("x"), 2, where={"page": {"$gt": 0}}),
    "get": lambda store: store.get([chunk("one").chunk_id]),
    "places": lambda store: store.places(["node"]),
    "chunks_of": lambda store: store.chunks_of("a.md"),
}


@pytest.mark.parametrize("reader", METADATA_READERS)
@pytest.mark.parametrize("changed", ["metadata = '{\"page\": 2}'", "metadata = '{'", "ordinal = 9"])
def test_a_changed_place_of_a_chunk_is_an_error_that_says_what_to_do(
    store: FaissStore, changed: str, reader: str
):
    one = chunk("one", page=1)
    store.add("a.md", [one], vectors_of([one]), keys=["node"])
    METADATA_READERS[reader](store)
    with closing(sqlite3.connect(store.folder / DATABASE)) as db, db:
        db.execute(f"UPDATE owners SET {changed}")
    with pytest.raises(IndexStoreError, match=r"damaged.*delete the index folder and index again"):
        METADATA_READERS[reader](store)


@pytest.mark.parametrize(
    "changed",
    [
        "doc_id = 'b.md'",
        "content_digest = 'another'",
        "root = '/elsewhere'",
        "root = CAST(X'ff' AS TEXT)",
        "root = X'00'",
    ],
)
@pytest.mark.parametrize("call", ["documents", "upsert", "set_digest", "add"])
def test_a_changed_entry_of_a_document_is_an_error_that_says_what_to_do(
    store: FaissStore, changed: str, call: str
):
    one = chunk("one")
    store.upsert("a.md", [one], vectors_of([one]), content_digest="first", root="/docs")
    calls: dict[str, Read] = {
        "documents": lambda store: store.documents(),
        "upsert": lambda store: store.upsert(name, [one], vectors_of([one]), root="/docs"),
        "set_digest": lambda store: store.set_digest(name, "second"),
        "add": lambda store: store.add(name, [one], vectors_of([one])),
    }
    name = "b.md" if "doc_id" in changed else "a.md"
    with closing(sqlite3.connect(store.folder / DATABASE)) as db, db:
        db.execute(f"UPDATE documents SET {changed}")
    with pytest.raises(IndexStoreError, match=r"the index is damaged.*delete the folder and index"):
        calls[call](store)


def test_documents_of_an_older_version_without_a_checksum_are_read(store: FaissStore):
    put(store, "a.md", "one")
    with closing(sqlite3.connect(store.folder / DATABASE)) as db, db:
        db.execute("UPDATE documents SET document_sum = NULL, content_digest = 'old'")
    assert [document.content_digest for document in store.documents()] == ["old"]


def test_metadata_of_an_older_version_without_a_checksum_is_read(store: FaissStore):
    put(store, "a.md", "one", page=1)
    with closing(sqlite3.connect(store.folder / DATABASE)) as db, db:
        db.execute("UPDATE owners SET place_sum = NULL")
    assert store.chunks_of("a.md")[0].metadata == {"doc": "a.md", "page": 1}
