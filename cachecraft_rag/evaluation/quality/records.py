"""The measurements of one evaluation in a file: a line of settings, then a line for each, as soon as it is there.

So an evaluation can be killed at any time and goes on from there. A last line that is torn is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.evaluation.quality.measuring import Record
from cachecraft_rag.store.closeable import Closeable

FILE = "records.jsonl"
_SHOWN = 3  # differences in one message


class RecordLog(Closeable):
    """The open file; one process at a time.

    Args:
        folder: made where it is missing.
        settings: plain values, all that the measurements depend on.
        restart: throw away what an earlier evaluation has left.

    Raises:
        ConfigError: the folder holds an evaluation with other settings, or a damaged file, or cannot be written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, restart: bool = False) -> None:
        self._path = folder / FILE
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        self.records: list[Record] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            left = self._path.read_bytes() if self._path.exists() and not restart else b""
            whole = left[: left.rfind(b"\n") + 1]
            if whole.count(b"\n") == 1:  # nothing was measured yet, so the settings are still free
                whole = b""
            if whole:
                self.records = self._read(whole, plain)
            self._file = self._path.open("r+b" if whole else "wb")
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written ({error}); choose another folder with --out") from error
        if not whole:
            self._write({"settings": plain})

    def append(self, record: Record) -> None:
        """Keep one more; it is in the file when this returns."""
        self._write(asdict(record))
        self.records.append(record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        self._file.flush()

    def _read(self, whole: bytes, settings: dict[str, Any]) -> list[Record]:
        try:
            first, *rest = [json.loads(line) for line in whole.splitlines()]
            found = list(_differences(first["settings"], settings))
            records = [Record(**line) for line in rest] if not found else []
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{self._path} is damaged or of another version ({error!r}); choose another folder with --out, or "
                "begin again with --restart"
            ) from error
        if found:
            more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise ConfigError(
                f"{self._path.parent} holds an evaluation with other settings ({'; '.join(found[:_SHOWN])}{more}). "
                "Choose another folder with --out, or begin again with --restart."
            )
        return records


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """In words, each setting that differs."""
    for name in [*old, *(name for name in new if name not in old)]:
        before, now = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _differences(before, now, f"{path}{name}.")
        elif before != now:
            yield f"{path}{name}: {_short(before)} there, {_short(now)} now"


def _short(value: Any) -> str:
    if value is None or isinstance(value, dict):
        return "none" if value is None else "some"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
