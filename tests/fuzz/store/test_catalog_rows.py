"""Rows of a catalog, and files beside it, as a hand or a broken disk might have left them, checksums right or not."""

from __future__ import annotations

import random
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cachecraft_rag.engine.engine import Engine
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.store import ChunkCacheStore
from cachecraft_rag.store.catalog.rows import COLUMNS, CatalogRow, pack_ids, sum_of, sum_of_scores
from cachecraft_rag.store.codecs import CODECS
from cachecraft_rag.store.layout import Header, encode, size_of
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.variants import Variant, VariantKey

NAMES = CatalogRow._fields
ODD = (
    0,
    -1,
    1,
    2,
    3,
    64,
    10**6,
    10**10,
    2**62,
    2**63 - 1,
    -(2**63),
    0.0,
    0.5,
    1.0,
    -0.5,
    1e300,
    float("inf"),
    "",
    "raw",
    "int8",
    "entropy",
    "x" * 1000,
    "../../../x",
    "[]",
    "[1]",
    '["a"',
    b"",
    b"\x00",
    b"\xff" * 16,
    b"\xff" * 480_000,
)
SHARES = ("cci", "exact_share", "intra")  # a lie that is possible is believed


class Folder:
    """A store's folder, and what an honest engine left in it."""

    def __init__(self, root: Path) -> None:
        self.root, self._kept = root, root.with_name("kept")
        shutil.copytree(root / "variants", self._kept)
        names = ("variants", "token_scores", "limits", "totals")
        with self.open() as database:
            self._tables = {name: self._table(database, name) for name in names}
        self.rows = self._tables["variants"][1]

    @staticmethod
    def _table(database: sqlite3.Connection, name: str) -> tuple[str, list[Any]]:
        """The columns of a table, without those that are worked out, and its rows."""
        columns = ",".join(row[1] for row in database.execute(f"PRAGMA table_info({name})"))
        return columns, database.execute(f"SELECT {columns} FROM {name}").fetchall()

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        with (
            closing(sqlite3.connect(self.root / "catalog.sqlite", timeout=30)) as database,
            database,
        ):
            yield database

    def restore(self) -> None:
        with self.open() as database:
            database.execute("DELETE FROM files_at_risk")
            for name, (columns, rows) in self._tables.items():
                database.execute(f"DELETE FROM {name}")  # `totals` comes last: triggers change it
                for row in rows:
                    database.execute(
                        f"INSERT INTO {name} ({columns}) VALUES ({','.join('?' * len(row))})", row
                    )
        for path in self._kept.rglob("*.safetensors"):
            place = self.root / "variants" / path.relative_to(self._kept)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)

    def file(self, variant_id: str) -> Path:
        return next((self.root / "variants").rglob(f"{variant_id}-*"))

    def pick(self, dice: random.Random, database: sqlite3.Connection) -> dict[str, Any]:
        query = f"SELECT s.namespace, s.fingerprint, {COLUMNS} FROM variants AS v JOIN scopes AS s USING (scope)"
        namespace, fingerprint, *row = dice.choice(database.execute(query).fetchall())
        return {
            "namespace": namespace,
            "fingerprint": fingerprint,
            **dict(zip(NAMES, row, strict=True)),
        }

    def put(
        self, database: sqlite3.Connection, was: dict[str, Any], row: dict[str, Any], row_sum: str
    ) -> None:
        """Write the row in place of what it was; its checksum right, wrong or none."""
        found = None
        if row_sum == "right":
            with suppress(TypeError, ValueError, AttributeError, OverflowError, struct.error):
                found = sum_of(
                    row["namespace"], row["fingerprint"], CatalogRow(*(row[name] for name in NAMES))
                )
        elif row_sum == "wrong":
            found = was["row_sum"]
        values = [found if name == "row_sum" else row[name] for name in NAMES]
        marks = ",".join(f"{name} = ?" for name in NAMES)
        with suppress(sqlite3.IntegrityError, OverflowError):
            database.execute(
                f"UPDATE variants SET {marks} WHERE variant_id = ?", (*values, was["variant_id"])
            )


def change_column(folder: Folder, dice: random.Random, row_sum: str) -> tuple[str, bool]:
    """One column, any value; the second part of the answer: whether that may be believed."""
    with folder.open() as database:
        was = folder.pick(dice, database)
        name = dice.choice([name for name in NAMES if name != "row_sum"])
        value = dice.choice(ODD)
        if name == "tokens" and dice.random() < 0.5:
            value = was["tokens"] + dice.choice((-5, -1, 1, 5))
        elif name in SHARES and dice.random() < 0.5:
            value = dice.random()
        folder.put(database, was, was | {name: value}, row_sum)
    lie = name in SHARES and row_sum == "right"
    return f"{name} = {str(value)[:40]!r}, checksum {row_sum}", lie


def change_prefix(folder: Folder, dice: random.Random, row_sum: str) -> tuple[str, bool]:
    with folder.open() as database:
        was = folder.pick(dice, database)
        many = dice.choice((1, 2, 100, 30_000))
        ids = ["00" * 16] * many if dice.random() < 0.5 else [f"{n:032x}" for n in range(many)]
        key = VariantKey(was["namespace"], was["fingerprint"], was["chunk_id"], tuple(ids))
        row = was | {
            "origin_prefix": pack_ids(ids),
            "inter": struct.pack(f"<{many}f", *[0.1] * many),
        }
        if dice.random() < 0.5:
            row["variant_id"] = key.variant_id
        folder.put(database, was, row, row_sum)
    return f"{many} ids in the prefix", False


def change_scores(folder: Folder, dice: random.Random, row_sum: str) -> tuple[str, bool]:
    with folder.open() as database:
        was = folder.pick(dice, database)
        value = dice.choice((0.0, 1.0, -1.0, float("nan"), float("inf"), 3e38))
        many = dice.choice((was["tokens"], was["tokens"], was["tokens"] + 1, 0, 10**6))
        scores: Any = dice.choice((np.full(many, value, "<f4").tobytes(), b"abc", "text", 7))
        database.execute(
            "INSERT OR REPLACE INTO token_scores VALUES (?,?)", (was["variant_id"], scores)
        )
        checksum = (
            sum_of_scores(scores) if row_sum == "right" and isinstance(scores, bytes) else None
        )
        if row_sum != "wrong":
            database.execute(
                "UPDATE variants SET scores_sum = ? WHERE variant_id = ?",
                (checksum, was["variant_id"]),
            )
    return f"{many} token scores of {value}", False


def change_file(folder: Folder, dice: random.Random, row_sum: str) -> tuple[str, bool]:
    """Row and file agree on what the model never wrote."""
    with folder.open() as database:
        was = folder.pick(dice, database)
        path = folder.file(was["variant_id"])
        data = path.read_bytes()
        header = Header.decode(data[: 8 + int.from_bytes(data[:8], "little")])
        layout, tokens = header.layout, header.tokens
        kind = dice.choice(("tokens", "heads", "layers", "damage", "swap"))
        if kind == "tokens":
            tokens = max(1, tokens + dice.choice((-5, -1, 1, 500)))
        elif kind == "heads":
            layout = KVLayout(
                layout.layers, layout.kv_heads * 2, layout.head_dim // 2, layout.dtype
            )
        elif kind == "layers":
            layout = replace(layout, layers=layout.layers + dice.choice((-1, 1)))
        elif kind == "damage":
            spot = dice.randrange(len(data))
            path.write_bytes(
                data[:spot] + bytes([data[spot] ^ 4]) + data[spot + dice.randrange(2) :]
            )
            return "a byte of a file", False
        else:
            path.write_bytes(folder.file(dice.choice(folder.rows)[2]).read_bytes())
            return "another file in its place", False
        codec = dice.choice(tuple(CODECS))
        row = was | {"tokens": tokens, "nbytes": layout.nbytes(tokens), "codec": codec}
        variant = Variant(
            key=header.key,
            variant_id=header.key.variant_id,
            tokens=tokens,
            tokens_digest=header.tokens_digest,
            inter=(0.1,) * len(header.key.origin_prefix),
            intra=0.1,
            cci=0.6,
            exact_share=1.0,
            session=None,
            codec=codec,
            nbytes=row["nbytes"],
            reuse_frequency=0.0,
            created=was["created"],
        )
        kv = torch.randn(layout.shape(tokens)).to(getattr(torch, layout.dtype))
        encoded = encode(variant, layout, kv)
        path.write_bytes(b"".join(encoded))
        folder.put(database, was, row | {"file_bytes": size_of(encoded)}, row_sum)
    return f"file: {kind}, {codec}", False


CHANGES = (change_column, change_column, change_column, change_prefix, change_scores, change_file)


def test_no_row_of_a_catalog_breaks_or_misleads_an_engine(
    fuzz: Any, fuzz_decoder: Decoder, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    with ChunkCacheStore.open(root) as store, Engine(fuzz_decoder, store) as engine:
        for _ in engine.stream(fuzz.question, fuzz.chunks):
            pass
    folder, watch = Folder(root), fuzz.watch()
    assert len(folder.rows) == 3
    with ChunkCacheStore.open(root, host_bytes=0) as store, Engine(fuzz_decoder, store) as engine:
        judge = fuzz.judge(engine)
        for number in range(fuzz.count):
            dice = random.Random(number)
            torch.manual_seed(number)
            what, lie = dice.choice(CHANGES)(
                folder, dice, dice.choice(("right", "right", "none", "wrong"))
            )
            with watch.item((number, what)):
                judge.ask((number, what), compare=not lie)
                if number % 4 == 0:
                    judge.turned()
                assert store.flush(60)
                if number % 5 == 0:
                    store.rows()
                    store.stats()
                if number % 20 == 0:
                    store.check(repair=True)
                    store.evict(down_to_bytes=number % 40 * 1000)
            folder.restore()
        assert [chunk.outcome for chunk in judge.ask("honest", compare=True).stats.chunks] == [
            "exact",
            "exact",
        ]
        assert store.check().findings == ()
    print(watch, judge.outcomes)
