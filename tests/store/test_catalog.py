"""The catalog: rows come back as they went in, fast among many; budgets and announcements in every transaction."""

from __future__ import annotations

import random
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.catalog.catalog import _INSERT, Catalog
from cachecraft_rag.store.catalog.rows import (
    COLUMNS,
    CatalogRow,
    pack_ids,
    row_of,
    sum_of,
    sum_of_scores,
    unpack_ids,
)
from cachecraft_rag.store.catalog_records import (
    DamagedRow,
    FileRef,
    Limits,
    Listed,
    RowFilter,
    Totals,
)
from cachecraft_rag.store.eviction import Use, policy_named
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.variants import Variant, VariantKey

COLUMNS_OF = [name.strip().removeprefix("v.") for name in COLUMNS.split(",")]
ROOMY = Limits(disk_bytes=10**12, max_variants=10**6, variants_per_chunk=10**6)


def make(
    chunk: str = "chunk",
    prefix: tuple[str, ...] = ("system",),
    *,
    created: float = 1.0,
    exact_share: float = 1.0,
    session: str | None = None,
    frequency: float = 0.0,
    namespace: str = "ns",
    fingerprint: str = "model",
) -> Variant:
    key = VariantKey(namespace, fingerprint, chunk, prefix)
    inter = tuple(0.5**n for n in range(len(prefix)))
    return Variant(
        key=key,
        variant_id=key.variant_id,
        tokens=7,
        tokens_digest="tokens",
        inter=inter,
        intra=0.25,
        cci=0.75,
        exact_share=exact_share,
        session=session,
        codec="raw",
        nbytes=700,
        reuse_frequency=frequency,
        created=created,
    )


def add(
    catalog: Catalog, variant: Variant, *, file_bytes: int = 1000, limits: Limits = ROOMY
) -> list[FileRef]:
    """Store a row as a writer does; return the deleted files."""
    gone: list[FileRef] = []
    while made := catalog.reserve(variant, file_bytes=file_bytes, writer="me", limits=limits):
        catalog.settle(made)
        gone += made
    assert made == []
    more = catalog.commit(variant, TokenScores(), file_bytes=file_bytes, writer="me", limits=limits)
    catalog.settle(more)
    return gone + more


def evict(catalog: Catalog, chosen: RowFilter, down_to_bytes: int | None = None) -> list[FileRef]:
    """Remove the chosen rows as an administrator does."""
    files = catalog.chosen(chosen, down_to_bytes=down_to_bytes)
    return catalog.remove(files, writer="me", forget=chosen.chunk_ids or ())


def chunks_in(catalog: Catalog) -> set[str]:
    return {row.variant.key.chunk_id for row in catalog.scan()}


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog(tmp_path / "catalog.sqlite")
    yield opened
    opened.close()


def test_a_variant_comes_back_as_it_went_in(catalog: Catalog) -> None:
    ids = tuple(digest("segment", str(n)) for n in range(5))
    variant = make(digest("c"), ids, exact_share=0.3, created=1234.000001)
    add(catalog, variant)
    assert catalog.find("ns", "model", [variant.key.chunk_id])[0] == {
        variant.key.chunk_id: [variant]
    }
    assert [(row.variant, row.file_bytes) for row in catalog.scan()] == [(variant, 1000)]


@given(st.lists(st.text(alphabet="0123456789abcdefABCDEF -", max_size=40)).map(tuple))
def test_every_prefix_survives_packing(ids: tuple[str, ...]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


def test_digests_are_packed_to_sixteen_bytes() -> None:
    assert len(pack_ids([digest("a"), digest("b")])) == 32


def test_lookup_keeps_namespaces_fingerprints_and_sessions_apart(catalog: Catalog) -> None:
    shared = make("c", ("s",))
    mine, theirs = (
        make("c", ("s", "my secret"), session="me"),
        make("c", ("s", "your secret"), session="you"),
    )
    others = [make("c", namespace="other"), make("c", fingerprint="other"), make("d")]
    for variant in (shared, mine, theirs, *others):
        add(catalog, variant)

    def seen(namespace: str, fingerprint: str, session: str | None) -> set[Variant]:
        return set(catalog.find(namespace, fingerprint, ["c"], session=session)[0]["c"])

    assert seen("ns", "model", None) == {shared}
    assert seen("ns", "model", "me") == {shared, mine}
    assert seen("ns", "model", "") == {shared}
    assert seen("other", "model", "me") == {others[0]}
    assert seen("ns", "other", "me") == {others[1]}
    assert seen("nowhere", "model", "me") == set()


def test_lookup_answers_every_chunk_and_takes_any_id(catalog: Catalog) -> None:
    hostile = 'it\'s "a", [chunk]\\ \N{SNOWMAN}'
    add(catalog, make(hostile))
    found = catalog.find("ns", "model", [hostile, "unknown", hostile])[0]
    assert len(found[hostile]) == 1
    assert found["unknown"] == []
    assert catalog.find("ns", "model", [])[0] == {}


def test_token_scores_come_for_winners_only(catalog: Catalog) -> None:
    first, second, third = make("a"), make("b"), make("c")
    numbers = np.arange(7, dtype=np.float64)
    given = (TokenScores(numbers), TokenScores(numbers[::-1]), TokenScores())
    for variant, scores in zip((first, second, third), given, strict=True):
        catalog.reserve(variant, file_bytes=1, writer="me", limits=ROOMY)
        catalog.commit(variant, scores, file_bytes=1, writer="me", limits=ROOMY)
    names = [first.variant_id, second.variant_id, third.variant_id, "gone"]
    found = catalog.token_scores(names)
    assert [as_list(found[name]) for name in names] == [
        [0, 1, 2, 3, 4, 5, 6],
        [6, 5, 4, 3, 2, 1, 0],
        None,
        None,
    ]
    assert found[first.variant_id].inter.dtype == np.float32  # type: ignore[union-attr]
    add(catalog, replace(second, created=2.0))  # replaced by a capture without scores
    catalog.remove([FileRef(first.variant_id, first.created)], writer="me")
    assert [as_list(scores) for scores in catalog.token_scores(names).values()] == [None] * 4


def as_list(scores: TokenScores) -> list[float] | None:
    return None if scores.inter is None else scores.inter.tolist()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", 8),
        ("tokens", "seven"),
        ("tokens", -1),
        ("tokens_digest", "other"),
        ("inter", b"abc"),
        ("inter", "text"),
        ("intra", 0.5),
        ("cci", 1e300),
        ("exact_share", 0.5),
        ("codec", "int8"),
        ("nbytes", 2**62),
        ("file_bytes", "x"),
        ("created", 5.0),
        ("primed", 1),
        ("origin_prefix", '["other"]'),
        ("origin_prefix", "[["),
        ("origin_prefix", 7),
        ("reuse_frequency", -1.0),
        ("reuse_frequency", "often"),
        ("session", "mine"),
        ("row_sum", None),
        ("row_sum", 7),
    ],
)
def test_a_row_that_was_changed_is_named_and_no_answer(
    catalog: Catalog, column: str, value: object
) -> None:
    add(catalog, make("chunk", created=1.0))
    add(catalog, make("other", created=2.0))
    with closing(sqlite3.connect(catalog.path)) as connection, connection:
        connection.execute(f"UPDATE variants SET {column} = ? WHERE chunk_id = 'chunk'", (value,))
    found, damaged = catalog.find("ns", "model", ["chunk", "other"], session="mine")
    assert (found["chunk"], found["other"]) == ([], [make("other", created=2.0)])
    assert [
        (row.chunk_id, "its row in the catalog is damaged" in row.reason) for row in damaged
    ] == [("chunk", True)]
    assert catalog.rows(RowFilter())[0].variant == make("other", created=2.0)
    assert sorted(type(row).__name__ for row in catalog.scan()) == ["DamagedRow", "Listed"]
    assert [file.variant_id for file in catalog.remove([damaged[0].file], writer="me")] == [
        make("chunk").variant_id
    ]
    assert chunks_in(catalog) == {"other"}


def test_a_changed_row_of_nonsense_with_the_right_checksum_is_no_answer(catalog: Catalog) -> None:
    add(catalog, make())
    with closing(sqlite3.connect(catalog.path)) as connection, connection:
        (row,) = connection.execute(f"SELECT {COLUMNS} FROM variants AS v").fetchall()
        row = [
            9.0 if place == COLUMNS_OF.index("cci") else value for place, value in enumerate(row)
        ]
        connection.execute(
            "UPDATE variants SET cci = 9.0, row_sum = ?", (sum_of("ns", "model", CatalogRow(*row)),)
        )
    found, damaged = catalog.find("ns", "model", ["chunk"])
    assert (found["chunk"], [row.reason for row in damaged]) == (
        [],
        ["its row in the catalog is damaged: a number of it is out of range"],
    )


def test_text_that_is_no_text_hides_one_row_only(catalog: Catalog) -> None:
    add(catalog, make("chunk", created=1.0))
    add(catalog, make("other", created=2.0))
    with closing(sqlite3.connect(catalog.path)) as connection, connection:
        connection.execute(
            "UPDATE variants SET codec = CAST(x'ff' AS TEXT) WHERE chunk_id = 'chunk'"
        )
    found, damaged = catalog.find("ns", "model", ["chunk", "other"])
    assert (len(found["other"]), len(damaged)) == (1, 1)


def test_a_row_whose_chunk_id_is_no_text_can_be_evicted(catalog: Catalog) -> None:
    old, new = make("chunk", created=1.0), make("other", created=2.0)
    add(catalog, old)
    with closing(sqlite3.connect(catalog.path)) as connection, connection:
        connection.execute("UPDATE variants SET chunk_id = CAST(x'ff' AS TEXT)")
    assert [file.variant_id for file in catalog.chosen(RowFilter())] == [old.variant_id]
    gone = catalog.reserve(new, file_bytes=1, writer="me", limits=replace(ROOMY, disk_bytes=1))
    assert [file.variant_id for file in gone or ()] == [old.variant_id]


@pytest.mark.parametrize(
    "scores", [b"abc", b"\0" * 4, b"\xff" * 28, np.full(7, 3e38, "<f4").tobytes(), "text", 7]
)
def test_token_scores_that_were_changed_are_unknown(catalog: Catalog, scores: object) -> None:
    variant, numbers = make(), np.ones(7, dtype=np.float32)
    catalog.reserve(variant, file_bytes=1, writer="me", limits=ROOMY)
    catalog.commit(variant, TokenScores(numbers), file_bytes=1, writer="me", limits=ROOMY)
    for checksum in ("scores_sum", "NULL"):
        with closing(sqlite3.connect(catalog.path)) as connection, connection:
            connection.execute("UPDATE token_scores SET scores = ?", (scores,))
            connection.execute(f"UPDATE variants SET scores_sum = {checksum}")
        assert as_list(catalog.token_scores([variant.variant_id])[variant.variant_id]) is None
        (row,) = catalog.scan()
        assert isinstance(row, DamagedRow)
        assert "token scores are damaged" in row.reason


def test_limits_that_are_none_are_passed_over(catalog: Catalog) -> None:
    with closing(sqlite3.connect(catalog.path)) as connection, connection:
        rows = [
            ("disk_bytes", "many"),
            ("max_variants", -1),
            ("unheard of", 7),
            ("variants_per_chunk", 3),
        ]
        connection.executemany("INSERT INTO limits VALUES (?,?)", rows)
    assert catalog.limits() == {"variants_per_chunk": 3}


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM totals",
        "INSERT INTO totals VALUES (7, 7)",
        "UPDATE totals SET variants = 'many'",
        "UPDATE totals SET file_bytes = x'00'",
        "UPDATE totals SET file_bytes = CAST(x'ff' AS TEXT)",
        "UPDATE totals SET variants = -1",
        "DELETE FROM eviction",
        "UPDATE eviction SET clock = 'noon', policy = 7",
    ],
)
@pytest.mark.parametrize("is_open", [True, False], ids=["while it is open", "while it is closed"])
def test_a_catalog_whose_sums_or_clock_are_damaged_goes_on_and_is_counted_again(
    tmp_path: Path, damage: str, is_open: bool
) -> None:
    path = tmp_path / "catalog.sqlite"
    catalog = Catalog(path)
    for name in ("kettle", "toaster"):
        add(catalog, make(name))
    if not is_open:
        catalog.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(damage)
    if not is_open:
        catalog = Catalog(path)
        assert catalog.check_sums(repair=False) == ""
    assert catalog.totals() == Totals(variants=2, chunks=2, file_bytes=2000, reserved_bytes=0)
    assert catalog.over(replace(ROOMY, disk_bytes=1500))[0]
    assert len(catalog.chosen(RowFilter(), down_to_bytes=1500)) == 1
    catalog.check_sums(repair=True)
    assert catalog.check_sums(repair=False) == ""
    add(catalog, make("fridge"))
    catalog.record_uses({make("fridge").variant_id: Use(1.0, 1.0)})
    assert (catalog.totals().variants, catalog.totals().file_bytes) == (3, 3000)
    catalog.close()


def test_sums_that_do_not_match_the_rows_are_found_and_counted_again(catalog: Catalog) -> None:
    add(catalog, make())
    assert catalog.check_sums(repair=False) == ""
    with closing(sqlite3.connect(catalog.path, isolation_level=None)) as connection:
        connection.execute("UPDATE totals SET file_bytes = 5")
    assert "1 rows with 1000 bytes" in catalog.check_sums(repair=False)
    assert catalog.totals().file_bytes == 5
    catalog.check_sums(repair=True)
    assert catalog.totals().file_bytes == 1000


def test_replacing_keeps_one_row_and_its_frequency(catalog: Catalog) -> None:
    old, new = make(created=1.0), replace(make(created=2.0), cci=0.9)
    add(catalog, old)
    catalog.record_uses({old.variant_id: Use(3.0, 3.0)})
    assert add(catalog, new) == [FileRef(old.variant_id, 1.0, 1000)]
    assert catalog.find("ns", "model", ["chunk"])[0]["chunk"] == [replace(new, reuse_frequency=3.0)]
    assert catalog.totals().file_bytes == 1000


def test_two_captures_in_one_tick_do_not_delete_their_common_file(catalog: Catalog) -> None:
    add(catalog, make(created=1.0))
    assert add(catalog, make(created=1.0)) == []
    assert catalog.totals().variants == 1


def test_the_least_used_leave_first_and_exact_captures_stay(catalog: Catalog) -> None:
    limits = replace(ROOMY, disk_bytes=4000)
    add(catalog, make("exact", created=1.0))
    # younger, and unused like the exact one
    add(catalog, make("inexact", created=2.0, exact_share=0.2))
    add(catalog, make("inexact but used", created=3.0, exact_share=0.2))
    add(catalog, make("busy", created=4.0, exact_share=0.0))
    once, twice = Use(1.0, 1.0), Use(2.0, 2.0)
    used = {make("inexact but used").variant_id: once, make("busy").variant_id: twice, "gone": once}
    catalog.record_uses(used)
    left = [
        add(catalog, make(f"new {n}", created=10.0 + n, frequency=99.0), limits=limits)
        for n in range(4)
    ]
    order = [make(name).variant_id for name in ("inexact", "exact", "inexact but used", "busy")]
    assert [file.variant_id for files in left for file in files] == order


def test_variants_of_one_chunk_and_variants_in_all_are_bounded(catalog: Catalog) -> None:
    limits = replace(ROOMY, max_variants=4, variants_per_chunk=2)
    for n in range(5):
        add(catalog, make("popular", (f"prefix {n}",), created=float(n)), limits=limits)
    kept = catalog.find("ns", "model", ["popular"])[0]["popular"]
    assert sorted(variant.created for variant in kept) == [3.0, 4.0]
    for n in range(5):
        add(catalog, make(f"chunk {n}", created=10.0 + n), limits=limits)
    assert chunks_in(catalog) == {"chunk 1", "chunk 2", "chunk 3", "chunk 4"}
    catalog.remove(catalog.over(replace(limits, max_variants=1))[0], writer="me")
    assert chunks_in(catalog) == {"chunk 4"}
    catalog.remove(catalog.over(replace(limits, disk_bytes=999))[0], writer="me")
    assert chunks_in(catalog) == set()


def test_reservations_count_towards_the_budget(catalog: Catalog) -> None:
    limits = replace(ROOMY, disk_bytes=2500)
    add(catalog, make("a"), limits=limits)
    assert catalog.reserve(make("b"), file_bytes=1000, writer="one", limits=limits) == []
    gone = catalog.reserve(make("c"), file_bytes=1000, writer="two", limits=limits)
    assert gone == [FileRef(make("a").variant_id, 1.0, 1000)]
    assert catalog.totals().reserved_bytes == 2000  # b, and a until it is deleted
    assert catalog.reserve(make("d"), file_bytes=1000, writer="three", limits=limits) is None
    catalog.settle(gone)
    assert catalog.reserve(make("c"), file_bytes=1000, writer="two", limits=limits) == []
    assert catalog.totals().reserved_bytes == 2000
    assert set(catalog.at_risk()) == {"one", "two"}
    catalog.settle([FileRef(make("b").variant_id, 1.0)])
    assert catalog.reserve(make("d"), file_bytes=1000, writer="three", limits=limits) == []


def test_another_variant_of_a_chunk_is_stored_unless_the_chunk_was_removed(
    catalog: Catalog,
) -> None:
    limits = replace(ROOMY, disk_bytes=1000)

    def another(chunk: str) -> list[FileRef] | None:
        variant = make(chunk, ("system", "other"), created=2.0)
        while gone := catalog.reserve(variant, file_bytes=1000, writer="me", limits=limits):
            catalog.settle(gone)
        over = catalog.commit(
            variant,
            TokenScores(),
            file_bytes=1000,
            writer="me",
            limits=replace(limits, max_variants=1),
            extra_variant=True,
        )
        catalog.settle([FileRef(variant.variant_id, variant.created)])
        return over

    assert another("a") is None  # nor was it ever there
    add(catalog, make("a"), limits=limits)
    assert another("a") == []  # it took the place of the first variant
    add(catalog, make("b"), limits=limits)
    assert another("a") == []  # it had to leave for b
    add(catalog, make("b"), limits=limits)
    catalog.settle(evict(catalog, RowFilter(chunk_ids=("a",))))
    assert another("a") is None  # removed for good, though it had to leave before
    catalog.settle(evict(catalog, RowFilter(chunk_ids=("b",))))
    assert another("b") is None
    assert chunks_in(catalog) == set()


def test_a_removed_row_leaves_its_file_announced(catalog: Catalog) -> None:
    variant = make()
    file = FileRef(variant.variant_id, variant.created)
    add(catalog, variant)
    # another file of the same variant
    assert catalog.remove([replace(file, created=2.0)], writer="me") == []
    assert catalog.holds(file)
    assert catalog.remove([file], writer="me") == [replace(file, file_bytes=1000)]
    assert not catalog.holds(file)
    assert catalog.holds(file, or_at_risk=True)
    # its bytes count until it is deleted
    assert catalog.at_risk() == {"me": [replace(file, file_bytes=1000)]}
    catalog.settle([file])
    assert not catalog.holds(file, or_at_risk=True)


def test_administration_filters_pages_and_evicts(catalog: Catalog) -> None:
    for n in range(10):
        add(catalog, make(f"chunk {n}", created=float(n), namespace=f"ns {n % 2}"))
    catalog.record_uses({make("chunk 7", namespace="ns 1").variant_id: Use(5.0, 5.0)})
    even = [row.variant.key.chunk_id for row in catalog.rows(RowFilter(namespace="ns 0"))]
    assert even == ["chunk 8", "chunk 6", "chunk 4", "chunk 2", "chunk 0"]
    pages = [catalog.rows(RowFilter(), offset=offset, limit=4) for offset in (0, 4, 8)]
    assert [len(page) for page in pages] == [4, 4, 2]
    assert pages[0][0].variant.key.chunk_id == "chunk 7"
    assert len({row.variant.variant_id for page in pages for row in page}) == 10
    assert len(list(catalog.scan(page=3))) == 10
    assert len(evict(catalog, RowFilter(namespace="ns 0", created_before=5.0))) == 3
    assert len(evict(catalog, RowFilter(fingerprint="another"))) == 0
    assert len(evict(catalog, RowFilter(), down_to_bytes=2500)) == 5
    assert chunks_in(catalog) == {"chunk 7", "chunk 9"}
    assert evict(catalog, RowFilter(), down_to_bytes=2500) == []


def test_chunks_to_evict_are_named_and_none_named_is_none_evicted(catalog: Catalog) -> None:
    for n in range(4):
        add(catalog, make(f"chunk {n}"))
    assert evict(catalog, RowFilter(chunk_ids=())) == []
    assert catalog.rows(RowFilter(chunk_ids=())) == []
    assert len(evict(catalog, RowFilter(chunk_ids=("chunk 1", "chunk 3", "nowhere")))) == 2
    assert chunks_in(catalog) == {"chunk 0", "chunk 2"}


def test_a_chunk_is_found_by_how_its_id_begins(catalog: Catalog) -> None:
    for chunk in ("ab12", "abc3", "b0ab", "a%", "A%"):
        add(catalog, make(chunk))
    assert {row.variant.key.chunk_id for row in catalog.rows(RowFilter(chunk_prefix="ab"))} == {
        "ab12",
        "abc3",
    }
    assert len(evict(catalog, RowFilter(chunk_prefix="a%"))) == 1
    assert catalog.rows(RowFilter(chunk_prefix="a_")) == []


def test_a_failed_transaction_changes_nothing(catalog: Catalog) -> None:
    add(catalog, make())
    with pytest.raises(StoreError, match="IntegrityError"):
        add(catalog, replace(make(), cci=float("nan")))
    assert catalog.totals().variants == 1
    assert [row.variant for row in catalog.scan()] == [make()]


def test_reopening_finds_everything(tmp_path: Path) -> None:
    for _ in range(2):
        catalog = Catalog(tmp_path / "catalog.sqlite")
        add(catalog, make())
        assert catalog.totals().variants == 1
        assert catalog.problems() == []
        catalog.close()
    with pytest.raises(StoreError, match="closed"):
        catalog.totals()


def test_a_file_that_is_no_catalog_is_named_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    path.write_bytes(b"these are not the rows you are looking for" * 100)
    with pytest.raises(StoreError, match=r"catalog\.sqlite is damaged.*delete the folder"):
        Catalog(path)


def test_damage_inside_is_found_by_the_check(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    catalog = Catalog(path)
    for n in range(200):
        add(catalog, make(f"chunk {n}"))
    catalog.close()
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 8192 * 8192
    content[middle : middle + 4096] = b"\xff" * 4096
    path.write_bytes(content)
    catalog = Catalog(path)
    try:
        problems = catalog.problems()
    except StoreError as error:
        problems = [str(error)]
    assert problems
    catalog.close()


def test_a_locked_catalog_says_so_after_the_timeout(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    first = Catalog(path)
    add(first, make())
    second = Catalog(path, busy_timeout_s=0.05)
    with first.standstill():
        with pytest.raises(StoreError, match="locked by another process"):
            add(second, make("other"))
        Catalog(path, busy_timeout_s=0.05).close()  # changes nothing, so it need not wait
        assert second.find("ns", "model", ["chunk"])[0]["chunk"] == [make()]  # readers do not care
    second.close()
    first.close()


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Catalog, list[str]]]:
    """100,000 variants: 12,500 chunks with 8 variants of 1 to 12 prefix segments each."""
    path = tmp_path_factory.mktemp("crowded") / "catalog.sqlite"
    catalog = Catalog(path)
    dice = random.Random(0)
    chunks = [digest("chunk", str(n)) for n in range(12_500)]

    def row(n: int) -> tuple[object, ...]:
        prefix = tuple(dice.sample(chunks, dice.randint(1, 12)))
        variant = replace(
            make(chunks[n % len(chunks)], prefix, created=float(n)),
            variant_id=f"{n:032x}",
            inter=tuple(
                struct.unpack(
                    f"<{len(prefix)}f", struct.pack(f"<{len(prefix)}f", *(0.1,) * len(prefix))
                )
            ),
        )
        frequency = dice.random() * 20
        columns = row_of(variant, file_bytes=18_004_096, frequency=frequency)
        return (1, *columns, sum_of_scores(None), 0.0, frequency)

    connection = sqlite3.connect(path)
    with connection:
        connection.execute("INSERT INTO scopes VALUES (1, 'ns', 'model')")
        connection.executemany(_INSERT, map(row, range(100_000)))
    connection.close()
    yield catalog, chunks
    catalog.close()


CountSteps = Callable[[Catalog], AbstractContextManager[list[int]]]


def test_lookup_of_160_among_100000_variants_scans_nothing(
    crowded: tuple[Catalog, list[str]], sqlite_steps: CountSteps
) -> None:
    catalog, chunks = crowded
    assert catalog.totals().variants == 100_000
    dice = random.Random(1)
    for _ in range(10):
        with sqlite_steps(catalog) as steps:
            found = catalog.find("ns", "model", dice.sample(chunks, 20))[0]
        assert [len(variants) for variants in found.values()] == [8] * 20
        assert steps[0] < 100 * 160


def test_evicting_the_chunks_of_a_removed_folder_among_100000_variants_scans_nothing_for_each(
    crowded: tuple[Catalog, list[str]], sqlite_steps: CountSteps
) -> None:
    catalog, chunks = crowded
    with sqlite_steps(catalog) as steps:
        assert len(evict(catalog, RowFilter(chunk_ids=tuple(chunks[-500:])))) == 4000
    assert steps[0] < 1000 * 4000  # a scan for each chunk takes fifty times as many


def test_eviction_among_100000_variants_does_not_scan_them(
    crowded: tuple[Catalog, list[str]], sqlite_steps: CountSteps
) -> None:
    catalog, _ = crowded
    # of tests before
    catalog.settle([file for files in catalog.at_risk().values() for file in files])
    limits = replace(ROOMY, disk_bytes=catalog.totals().file_bytes)
    for n in range(20):
        with sqlite_steps(catalog) as steps:
            # fewer bytes in than out
            assert len(add(catalog, make(f"new {n}", created=1e9), limits=limits)) == 1
        assert steps[0] < 10_000
        limits = replace(limits, disk_bytes=catalog.totals().file_bytes)


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_chunks_asked_for_once_pass_through_without_evicting_warm_ones(catalog: Catalog) -> None:
    limits = replace(ROOMY, disk_bytes=10_000)
    for n in range(9):
        add(catalog, make(f"warm {n}", created=float(n)), limits=limits)
    catalog.record_uses({make(f"warm {n}").variant_id: Use(60.0, 12.0) for n in range(9)})
    for n in range(8):
        add(catalog, make(f"once {n}", created=100.0 + n), limits=limits)
    assert chunks_in(catalog) == {f"warm {n}" for n in range(9)} | {"once 7"}


def test_chunks_no_longer_asked_for_leave_however_much_they_served(catalog: Catalog) -> None:
    limits = replace(ROOMY, disk_bytes=2000)
    add(catalog, make("of yesterday", created=1.0), limits=limits)
    catalog.record_uses({make("of yesterday").variant_id: Use(1.0, 5.0)})
    for n in range(70):
        add(catalog, make(f"of today {n}", created=10.0 + n), limits=limits)
    assert "of yesterday" not in chunks_in(catalog)


def test_a_chunk_that_comes_back_is_worth_what_it_was(catalog: Catalog) -> None:
    limits = replace(ROOMY, max_variants=1)
    add(catalog, make("a", created=1.0), limits=limits)
    catalog.record_uses({make("a").variant_id: Use(2.0, 3.0)})
    add(catalog, make("b", created=2.0), limits=limits)
    assert (
        add(catalog, make("a", ("elsewhere",), created=3.0), limits=replace(limits, max_variants=3))
        == []
    )
    (again,) = catalog.find("ns", "model", ["a"])[0]["a"]
    assert again.reuse_frequency == 2.0
    add(catalog, make("a", ("yet elsewhere",), created=4.0), limits=replace(limits, max_variants=3))
    assert [v.reuse_frequency for v in catalog.find("ns", "model", ["a"])[0]["a"]].count(0.0) == 1


def test_another_policy_makes_the_scores_anew(tmp_path: Path) -> None:
    path = tmp_path / "catalog.sqlite"
    with closing(Catalog(path)) as catalog:
        for name, use in (("exact once", Use(100.0, 1.0)), ("often", Use(60.0, 50.0))):
            add(catalog, make(name))
            catalog.record_uses({make(name).variant_id: use})
        assert [row.variant.key.chunk_id for row in catalog.rows(RowFilter())] == [
            "often",
            "exact once",
        ]
    for policy, first in (
        ("f_r", "exact once"),
        (None, "exact once"),
        ("saving", "often"),
        (None, "often"),
    ):
        named = None if policy is None else policy_named(policy)  # who names none changes nothing
        with closing(Catalog(path, policy=named)) as catalog:
            assert catalog.rows(RowFilter())[0].variant.key.chunk_id == first


def test_no_flipped_bit_in_the_catalog_gives_a_wrong_row_or_another_error(tmp_path: Path) -> None:
    made = Catalog(tmp_path / "catalog.sqlite")
    variants = {f"chunk {number}": make(f"chunk {number}") for number in range(20)}
    scores = np.linspace(0.0, 1.0, 7, dtype=np.float32)
    for variant in variants.values():
        made.reserve(variant, file_bytes=1000, writer="me", limits=ROOMY)
        made.commit(variant, TokenScores(scores), file_bytes=1000, writer="me", limits=ROOMY)
    made.close()
    content = (tmp_path / "catalog.sqlite").read_bytes()
    used = [place for place, byte in enumerate(content) if byte]
    noticed = 0
    for seed in range(200):
        dice = random.Random(seed)
        damaged = bytearray(content)
        damaged[dice.choice(used)] ^= 1 << dice.randrange(8)
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "catalog.sqlite").write_bytes(damaged)
        try:
            noticed += flaws_in(folder, variants, scores)
        except StoreError:
            noticed += 1
    assert noticed


def flaws_in(folder: Path, variants: dict[str, Variant], scores: np.ndarray) -> int:
    """Read all of a catalog; return how many rows it says are damaged or missing. The others are right."""
    with closing(Catalog(folder / "catalog.sqlite")) as catalog:
        found, damaged = catalog.find("ns", "model", list(variants))
        for chunk_id, of_chunk in found.items():
            for variant in of_chunk:
                assert replace(variant, reuse_frequency=0.0) == variants[chunk_id]
                kept = catalog.token_scores([variant.variant_id])[variant.variant_id].inter
                assert kept is None or np.array_equal(kept, scores)
        listed = sum(isinstance(row, Listed) for row in catalog.scan())
        catalog.limits()
        catalog.totals()
        catalog.at_risk()
        catalog.removals.noted(None)
        catalog.shaped_by(["chunk 1"], namespace=None)
        catalog.over(ROOMY)
        catalog.chosen(RowFilter(namespace="ns"))
        add(catalog, make("new"))
        return len(damaged) + len(variants) - listed
