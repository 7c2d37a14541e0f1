"""Formats that other processes and later versions read: frozen byte by byte in `tests/data/layout-3`.

To change one, raise `LAYOUT_VERSION` and `IDENTITY_VERSION`, and add a folder for the new layout.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from cachecraft_rag.store.catalog import Catalog
from cachecraft_rag.store.catalog_records import Limits
from cachecraft_rag.store.files.disk import DiskTier
from cachecraft_rag.store.layout import Header, encode
from cachecraft_rag.store.remote.rows import Row, decode_row, framed, unframed
from cachecraft_rag.types.captures import TokenScores
from cachecraft_rag.types.digests import digest
from cachecraft_rag.types.kv_layout import KVLayout
from cachecraft_rag.types.store_reasons import Damaged, Unavailable
from cachecraft_rag.types.variants import PayloadFacts, Variant, VariantKey
from cachecraft_rag.types.versions import LAYOUT_VERSION

DATA = Path(__file__).parents[1] / "data" / "layout-3"
LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=4, dtype="float32")
KEY = VariantKey(
    namespace="tenant ☃",
    fingerprint="2-" + digest("model"),
    chunk_id=digest("chunk"),
    origin_prefix=(digest("system"), digest("before")),
)
VARIANT = Variant(
    key=KEY,
    variant_id=KEY.variant_id,
    tokens=3,
    tokens_digest=digest("tokens"),
    inter=(0.5, 0.25),
    intra=0.125,
    cci=0.625,
    exact_share=0.75,
    session=None,
    codec="raw",
    nbytes=LAYOUT.nbytes(3),
    reuse_frequency=1.5,
    created=1.5e9,
    primed=True,
)
SCORES = TokenScores(np.array([0.0, 0.5, 1.0], np.float32))
KV = torch.arange(48, dtype=torch.float32).reshape(2, 2, 3, 1, 4)
ROW = Row(
    replace(VARIANT, home="remote", payload_facts=PayloadFacts(nbytes=5000, seal=b"\x01" * 16)),
    SCORES,
)
ROOMY = Limits(disk_bytes=10**9, max_variants=10, variants_per_chunk=10)


def as_json(value: object) -> object:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def from_json(value: Any) -> object:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value


def tables(path: Path) -> dict[str, Any]:
    """Contents of a catalog, by table and column; without SQLite's own tables."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        names = [
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        return {
            name: [
                {column: as_json(value) for column, value in dict(row).items()}
                for row in connection.execute(f"SELECT * FROM {name}")
            ]
            for name in sorted(names)
        }


def written(path: Path) -> dict[str, Any]:
    """The catalog that holds the variant alone."""
    with closing(Catalog(path)) as catalog:
        assert catalog.reserve(VARIANT, file_bytes=4288, writer="me", limits=ROOMY) == []
        assert catalog.commit(VARIANT, SCORES, file_bytes=4288, writer="me", limits=ROOMY) == []
    return tables(path)


def test_a_file_is_byte_by_byte_what_layout_3_says() -> None:
    encoded = encode(VARIANT, LAYOUT, KV)
    whole = (DATA / "chunk-cache.safetensors").read_bytes()
    assert b"".join(encoded) == whole
    header = Header.decode(whole[:4096])
    assert (header.key, header.layout, header.tokens, header.codec) == (KEY, LAYOUT, 3, "raw")


def test_a_row_of_a_remote_is_byte_by_byte_what_layout_3_says() -> None:
    raw = (DATA / "remote.row").read_bytes()
    assert ROW.encode() == raw
    row = decode_row(
        raw, namespace=KEY.namespace, fingerprint=KEY.fingerprint, chunk_id=KEY.chunk_id
    )
    # what others say of uses is not believed
    assert row.variant == replace(ROW.variant, reuse_frequency=0.0)
    assert row.variant.payload_facts == ROW.variant.payload_facts
    assert row.token_scores.inter.tolist() == [0.0, 0.5, 1.0]


def test_a_row_of_the_catalog_is_what_layout_3_says(tmp_path: Path) -> None:
    frozen = json.loads((DATA / "catalog.json").read_text())
    assert written(tmp_path / "catalog.sqlite") == frozen
    with closing(Catalog(tmp_path / "again.sqlite")) as catalog:
        with closing(sqlite3.connect(tmp_path / "again.sqlite")) as connection, connection:
            for table in ("scopes", "variants", "token_scores"):
                for row in frozen[table]:
                    marks = ",".join("?" * len(row))
                    query = f"INSERT INTO {table} ({','.join(row)}) VALUES ({marks})"
                    connection.execute(query, [from_json(value) for value in row.values()])
        assert catalog.find(KEY.namespace, KEY.fingerprint, [KEY.chunk_id])[0] == {
            KEY.chunk_id: [VARIANT]
        }
        assert catalog.token_scores([VARIANT.variant_id])[VARIANT.variant_id].inter.tolist() == [
            0.0,
            0.5,
            1.0,
        ]


# -- other versions ---------------------------------------------------------------------------------------------------


def changed_file(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The frozen file with other fields, as another version would write it."""
    whole = (DATA / "chunk-cache.safetensors").read_bytes()
    entries = json.loads(whole[8:4096])
    fields = json.loads(entries["__metadata__"]["fields"])
    change(fields)
    text = json.dumps(fields, separators=(",", ":"))
    entries["__metadata__"] |= {
        "fields": text,
        "fields_xxh3": xxhash.xxh3_64_hexdigest(text.encode()),
    }
    packed = json.dumps(entries, separators=(",", ":")).encode()
    return whole[:8] + packed.ljust(4088) + whole[4096:]


def changed_row(change: Callable[[dict[str, Any]], object]) -> bytes:
    created, text, _ = unframed((DATA / "remote.row").read_bytes())
    fields = json.loads(text)
    change(fields)
    return framed(created, json.dumps(fields, separators=(",", ":")).encode())


def read(raw: bytes) -> Row:
    return decode_row(
        raw, namespace=KEY.namespace, fingerprint=KEY.fingerprint, chunk_id=KEY.chunk_id
    )


def on_disk(folder: Path, raw: bytes) -> DiskTier:
    tier = DiskTier(folder)
    path = tier.path(VARIANT.variant_id, VARIANT.created)
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)
    return tier


def more(fields: dict[str, Any]) -> None:
    fields["age"] = {"days": 3}


def test_fields_that_are_not_known_are_ignored(tmp_path: Path) -> None:
    assert read(changed_row(more)).variant == read((DATA / "remote.row").read_bytes()).variant
    loaded = on_disk(tmp_path, changed_file(more)).read(VARIANT)
    assert not isinstance(loaded, Unavailable)
    assert torch.equal(loaded.kv, KV)


@pytest.mark.parametrize("version", [LAYOUT_VERSION + 1, LAYOUT_VERSION - 1, "4", None, 4.5, True])
def test_another_layout_is_never_served(tmp_path: Path, version: object) -> None:
    found = on_disk(
        tmp_path, changed_file(lambda fields: fields.update(layout_version=version))
    ).read(VARIANT)
    assert isinstance(found, Damaged)
    with pytest.raises(ValueError, match="row damaged"):
        read(changed_row(lambda fields: fields.update(layout_version=version)))
