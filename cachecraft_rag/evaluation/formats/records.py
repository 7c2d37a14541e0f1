"""The records of a data file in JSON, JSON lines, CSV or Parquet."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachecraft_rag.errors import DocumentError


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object, line or row; `where` locates it, in words, for error messages.

    Every method raises DocumentError with the place and the field if the field is missing or of another type.
    """

    where: str
    fields: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def _field(self, name: str, kind: type, wanted: str) -> Any:
        value = self.fields.get(name)
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"is {json.dumps(value, default=str)[:40]}"
            raise DocumentError(f'{self.where}: "{name}" {found}; it must be {wanted}. Fix or remove that entry.')
        return value

    def text(self, name: str) -> str:
        """A text that is not blank, stripped."""
        text: str = self._field(name, str, "a text").strip()
        if not text:
            raise DocumentError(f'{self.where}: "{name}" is blank. Fix or remove that entry.')
        return text

    def label(self, name: str, default: str) -> str:
        """An identifier: a text or a number, or the default if there is none."""
        value = self.fields.get(name)
        return str(value) if isinstance(value, str | int) and str(value).strip() else default

    def texts(self, name: str, *, optional: bool = False) -> list[str]:
        """A list of texts; empty if it is optional and missing."""
        if optional and self.fields.get(name) is None:
            return []
        values: list[Any] = self._field(name, list, "a list of texts")
        for place, value in enumerate(values, start=1):
            if not isinstance(value, str):
                raise DocumentError(
                    f'{self.where}: item {place} of "{name}" is {json.dumps(value, default=str)[:40]}; it must be a '
                    "text. Fix or remove that entry."
                )
        return values

    def records(self, name: str) -> list[Record]:
        """A list of objects."""
        values: list[Any] = self._field(name, list, "a list of objects")
        return [as_record(value, f"{self.where}, {name} {place}") for place, value in enumerate(values, start=1)]

    def record(self, name: str) -> Record:
        """An object."""
        return Record(f"{self.where}, {name}", self._field(name, dict, "an object"))


def as_record(value: Any, where: str) -> Record:
    """The value as a record. Raises DocumentError if it is not an object."""
    if not isinstance(value, dict):
        raise DocumentError(
            f"{where}: expected an object with named fields, not {json.dumps(value, default=str)[:40]}. Fix or "
            "remove that entry."
        )
    return Record(where, value)


def read_records(path: Path) -> list[Record]:
    """The file's records: rows of Parquet or CSV, lines of JSON lines, a JSON list's entries, or one whole JSON object.

    Raises:
        DocumentError: the file cannot be read, is empty, or is malformed; the message names the line if there is one.
    """
    try:
        if path.suffix.lower() == ".parquet":
            return list(_parquet(path))
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix.lower() == ".csv":
                return list(_rows(path, csv.DictReader(file, strict=True)))
            text = file.read()
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror or error}. Name a file of questions.") from error
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8."
        ) from error
    if not text.strip():
        raise DocumentError(f"{path} is empty. Name a file of questions.")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return list(_lines(path, text))
    return _json(path, text)


def _json(path: Path, text: str) -> list[Record]:
    try:
        whole = json.loads(text)
    except ValueError as error:
        first = next(line for line in text.splitlines() if line.strip())
        try:
            json.loads(first)
        except ValueError:
            raise DocumentError(f"{path} is not JSON: {error}. Fix that place, or name another file.") from error
        return list(_lines(path, text))  # the first line alone is valid: JSON lines with another suffix
    if isinstance(whole, list):
        return [as_record(value, f"{path}, entry {place}") for place, value in enumerate(whole, start=1)]
    return [as_record(whole, str(path))]


def _lines(path: Path, text: str) -> Iterator[Record]:
    # Not splitlines(): JSON strings may contain U+2028 and similar characters unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DocumentError(f"{path}, line {number} is not JSON: {error}. Fix or remove that line.") from error
        yield as_record(value, f"{path}, line {number}")


def _rows(path: Path, reader: csv.DictReader[str]) -> Iterator[Record]:
    try:
        for row in reader:
            yield Record(f"{path}, line {reader.line_num}", {name: row[name] for name in reader.fieldnames or ()})
    except csv.Error as error:
        raise DocumentError(f"{path}, line {reader.line_num} is not CSV: {error}. Fix or remove that line.") from error


def _parquet(path: Path) -> Iterator[Record]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DocumentError(
            f"reading {path} needs pyarrow: pip install pyarrow, or save the file as JSON lines or CSV."
        ) from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise DocumentError(f"{path} is not a Parquet file: {error}. Name another file.") from error
    for number, row in enumerate(rows, start=1):
        yield Record(f"{path}, row {number}", row)
