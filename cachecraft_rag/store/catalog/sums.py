"""Sums over all rows: how many there are, and the bytes that count against the budget.

Triggers keep them in the table `totals` (see `schema`). A disk may return damaged bytes, so no stored sum is trusted
unless it can be one. All functions see the transaction of their connection.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from cachecraft_rag.store.database import fetched

# Of a damaged row any column may be of another type or out of range: such a number counts as 0.
BYTES = "iif(typeof(file_bytes) = 'integer' AND file_bytes > 0, file_bytes, 0)"
FILE = f"variant_id, created, {BYTES}"  # columns of a `FileRef`
_COUNTED = f"SELECT count(*), coalesce(sum({BYTES}), 0) FROM variants"
_RESERVED = """SELECT coalesce(sum(reserved_bytes), 0) FROM files_at_risk
    WHERE typeof(reserved_bytes) = 'integer' AND reserved_bytes > 0"""


def of_rows(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the number of rows and the bytes of their files; counted if the stored sums are damaged."""
    return sound(connection) or counted(connection)


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes that count against the budget: files with a row, and those being written or deleted."""
    return of_rows(connection)[1] + reserved_bytes(connection)


def reserved_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes of files that are being written or deleted."""
    nbytes: int = connection.execute(_RESERVED).fetchone()[0]
    return nbytes


def stored(connection: sqlite3.Connection) -> list[Any]:
    """Return the rows (variants, bytes) of `totals` as they are: one, unless the file is damaged."""
    return fetched(connection, "SELECT variants, file_bytes FROM totals", ())


def sound(connection: sqlite3.Connection) -> tuple[int, int] | None:
    """Return the stored sums (rows, bytes of their files); None if they are missing, of another type or negative."""
    rows = stored(connection)
    if len(rows) != 1:
        return None
    variants, file_bytes = rows[0]
    if not (type(variants) is type(file_bytes) is int and variants >= 0 and file_bytes >= 0):
        return None
    return variants, file_bytes


def counted(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the number of rows and the bytes of their files, counted from every row."""
    variants, file_bytes = connection.execute(_COUNTED).fetchone()
    return variants, file_bytes


def count_again(connection: sqlite3.Connection) -> None:
    """Replace the stored sums by those of the rows."""
    connection.execute("DELETE FROM totals")
    connection.execute(f"INSERT INTO totals {_COUNTED}")
