"""Results of audits on disk: one bounded SQLite file beside the catalog of chunk-caches.

This is a separate file, so that a store whose answers are never audited holds nothing about audits, and so that
a change of its tables sets no chunk-caches aside.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from cachecraft_rag.serving.audits.audit import Audit
from cachecraft_rag.store.database import fetched
from cachecraft_rag.store.files.audit_file import AUDIT_FILE, opened_audits

_NAMES = (
    "request_id",
    "created",
    "tokens",
    "differences",
    "near_ties",
    "kl",
    "computed_tokens",
    "selector",
    "recomputed",
    "origin",
    "outcomes",
    "ratio",
    "early",
    "exact",
    "text",
)
_COLUMNS = ", ".join(_NAMES)
_INSERT = (
    f"INSERT INTO audits (namespace, fingerprint, {_COLUMNS}) VALUES (?, ?{', ?' * len(_NAMES)})"
)
_READ = f"""SELECT {_COLUMNS} FROM audits WHERE namespace = coalesce(:namespace, namespace)
    AND fingerprint = coalesce(:fingerprint, fingerprint) ORDER BY place DESC LIMIT :limit"""

_TRIM = """DELETE FROM audits
    WHERE namespace = :namespace AND fingerprint = :fingerprint AND place <= (SELECT place FROM audits
    WHERE namespace = :namespace AND fingerprint = :fingerprint ORDER BY place DESC LIMIT 1 OFFSET :kept)"""


class AuditLog:
    """The results of one store folder, of all its namespaces (never "") and models. Any thread may call any method."""

    def __init__(self, folder: Path, *, kept: int, busy_timeout_s: float = 5.0) -> None:
        """Open or create it; keeps `kept` results of each tenant and model. Waits `busy_timeout_s` for writers."""
        self._kept = kept
        self._database = opened_audits(folder, busy_timeout_s=busy_timeout_s)
        self._opened_file = _identity(self._database.path)

    def close(self) -> None:
        """Close the file, after calls in other threads."""
        self._database.close()

    def add(self, namespace: str, fingerprint: str, audit: Audit) -> None:
        """Store a result, and remove the oldest ones of this namespace and model beyond the limit."""
        row = (
            audit.request_id,
            audit.created,
            audit.tokens,
            json.dumps(audit.differences),
            audit.near_ties,
            audit.kl,
            audit.computed_tokens,
            audit.selector,
            audit.recomputed,
            audit.origin,
            json.dumps(audit.outcomes),
            audit.ratio,
            int(audit.early),
            int(audit.exact),
            None if audit.text is None else json.dumps(asdict(audit.text)),
        )
        with self._database.writing() as connection:
            connection.execute(_INSERT, (namespace, fingerprint, *row))
            limit = {"namespace": namespace, "fingerprint": fingerprint, "kept": self._kept}
            connection.execute(_TRIM, limit)

    def read(
        self, *, namespace: str | None = None, fingerprint: str | None = None, limit: int = -1
    ) -> list[Audit]:
        """Return at most `limit` results (-1: all), the last written first, of one namespace and model (None: all).

        Damaged rows are left out.
        """
        asked = {"namespace": namespace, "fingerprint": fingerprint, "limit": limit}
        with self._database.reading() as connection:
            rows = fetched(connection, _READ, asked)
        return list(_readable(rows))

    @property
    def is_there(self) -> bool:
        """False once the file was deleted or replaced: what is written then reaches no reader."""
        present = _identity(self._database.path)
        return present is not None and present == self._opened_file


def audits_in(
    folder: Path, *, namespace: str | None = None, fingerprint: str | None = None, limit: int = -1
) -> list[Audit]:
    """Return the results in a folder of chunk-caches, as `AuditLog.read`; [] without a file, which is not made."""
    if not os.path.isfile(folder / AUDIT_FILE):
        return []
    log = AuditLog(folder, kept=1)  # reading removes nothing
    try:
        return log.read(namespace=namespace, fingerprint=fingerprint, limit=limit)
    finally:
        log.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another one of its name; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _readable(rows: Iterable[sqlite3.Row]) -> Iterable[Audit]:
    for row in rows:
        values = dict(zip(_NAMES, row, strict=True))
        try:
            for name in ("differences", "outcomes"):
                values[name] = json.loads(values[name])
            if values["text"] is not None:
                values["text"] = json.loads(values["text"])
            yield Audit.from_dict(values)
        # also of json, whose brackets may be nested too deeply
        except (TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            continue
