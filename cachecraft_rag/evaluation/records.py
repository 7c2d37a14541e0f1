"""The measurements of one evaluation as a file of JSON lines: the settings first, then one line per measurement.

Each line is written as soon as it is measured, so an evaluation that was killed resumes from the file. An incomplete
last line is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.measuring import Record
from cachecraft_rag.store.closeable import Closeable

FILE = "records.jsonl"
# Version of the names in the file: raise it when a field of `Record` or a setting is added, removed or renamed.
VERSION = 5
_SHOWN = 3  # differences in one message


class RecordLog(Closeable):
    """The open file, for one process at a time; a second one is not kept out. Its name in the folder is `FILE`.

    A file that holds no measurement yet takes the new settings. ConfigError for a damaged file, one with other settings
    or of another version of this package, or one that cannot be written.

    Args:
        folder: created if missing.
        settings: plain values, everything that the measurements depend on.
        restart: discard the measurements of an earlier evaluation.
        discard_others: discard what would be refused.

    Attributes:
        records: the measurements of the file, in its order, those of an earlier evaluation first.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        *,
        restart: bool = False,
        discard_others: bool = False,
    ) -> None:
        self._path = folder / FILE
        plain: dict[str, object] = json.loads(json.dumps(settings))
        self.records: list[Record] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            left = self._path.read_bytes() if self._path.exists() and not restart else b""
            whole = left[: left.rfind(b"\n") + 1]
            if whole.count(b"\n") == 1:  # nothing was measured yet, so the settings may change
                whole = b""
            try:
                self.records = self._read(whole, plain) if whole else []
            except ConfigError:
                if not discard_others:
                    raise
                whole = b""
            self._file = self._path.open("r+b" if whole else "wb")
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
            if not whole:
                self._write({"version": VERSION, "settings": plain})
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be written ({error.strerror or error}); choose another folder with --out"
            ) from error

    def append(self, record: Record) -> None:
        """Add a measurement to the file and to `records`. It is not synced, but survives a killed process."""
        self._write(asdict(record))
        self.records.append(record)

    def close(self) -> None:
        """Close the file; if a record still cannot be written, raise OSError after that."""
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._file.flush()

    def _read(self, whole: bytes, settings: dict[str, object]) -> list[Record]:
        try:
            first, *rest = [json.loads(line) for line in whole.splitlines()]
            same_version = first.get("version") == VERSION
            differences = list(_differences(first["settings"], settings))
            records = [Record(**line) for line in rest] if same_version and not differences else []
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self._path} is damaged ({error!r}); choose another folder with --out, or begin again with --restart"
            ) from error
        if not same_version:
            raise ConfigError(
                f"{self._path} was written by another version of this package, and measurements of two versions do not "
                "belong in one report. Choose another folder with --out, or begin again with --restart."
            )
        if differences:
            shown = "; ".join(differences[:_SHOWN])
            if len(differences) > _SHOWN:
                shown += f"; and {len(differences) - _SHOWN} more"
            raise ConfigError(
                f"{self._path.parent} holds an evaluation with other settings ({shown}). "
                "Choose another folder with --out, or begin again with --restart."
            )
        return records


def _differences(
    old: Mapping[str, object], new: Mapping[str, object], path: str = ""
) -> Iterator[str]:
    """Each setting that differs, in words."""
    for name in [*old, *(name for name in new if name not in old)]:
        before = old.get(name)
        now = new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _differences(before, now, f"{path}{name}.")
        elif before != now:
            yield f"{path}{name}: {_short(before)} there, {_short(now)} now"


def _short(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "some"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
