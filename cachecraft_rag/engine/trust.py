"""Trust in the settings file of a folder, recorded in the user's own config folder.

A `cachecraft.toml` may be somebody else's, in a downloaded folder. Until the user has trusted it, keys that load a
model, send data, open a port, or decide who shares chunk-caches have no effect there. Trust holds for this content of
this file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.small_file import replace_file

FILE_NAME = "cachecraft.toml"

# Keys that need trust, and why. The whole table `remote` does.
_GUARDED = {
    "model": "loads a model and its tokenizer",
    "embeddings": "loads a model and its tokenizer",
    "metrics_port": "opens a port",
    "namespace": "decides who shares chunk-caches",
    "private_system": "decides who shares chunk-caches",
    "audit_text": "keeps the text of answers on disk",
}

Trust = Literal["trusted", "changed", "missing"]


def config_folder() -> Path:
    """Return the user's own folder for settings and trust; it need not exist."""
    from platformdirs import user_config_path  # here, so that importing this module costs nothing

    return user_config_path("cachecraft-rag", appauthor=False)


def needs_trust(key: str, value: object, folder: Path) -> str | None:
    """Return why a key of the settings file in `folder` needs trust; None if it always counts.

    A `store` is an absolute path; it needs trust outside `folder`.

    >>> needs_trust("top_k", 3, Path("/docs")), needs_trust("remote.url", "s3://bucket", Path("/docs"))
    (None, 'sends chunk-caches away')
    """
    if key.startswith("remote."):
        return "sends chunk-caches away"
    if key == "store" and not _is_inside(value, folder):
        return "names a folder outside the file's own"
    return _GUARDED.get(key)


def _is_inside(store: object, folder: Path) -> bool:
    try:
        return Path(os.path.realpath(str(store))).is_relative_to(os.path.realpath(folder))
    except (OSError, ValueError):  # a loop of links, or text that no path can have
        return False


@dataclass(frozen=True, slots=True)
class TrustRecord:
    """A settings file that the user trusted.

    file    absolute path of the file, without links to its folder
    digest  SHA-256 of the content that was trusted
    """

    file: Path
    digest: str

    @property
    def state(self) -> Trust:
        """State of the file now: "trusted", "changed" since then (or unreadable), or "missing"."""
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            return "missing"
        except OSError:
            return "changed"
        return "trusted" if _digest(content) == self.digest else "changed"


def is_trusted(file: Path, content: bytes) -> bool:
    """Return True if the user trusted this content of this file; False too if the record is damaged."""
    place = _place(file)
    try:
        record = _read(_record_file(place))
    except ConfigError:
        return False
    return record == TrustRecord(place, _digest(content))


def trust(file: Path, content: bytes) -> TrustRecord:
    """Record that the user trusts this content of the file, and no other. ConfigError if it cannot be recorded."""
    record = TrustRecord(_place(file), _digest(content))
    target = _record_file(record.file)
    written = json.dumps({"file": os.fsencode(record.file).hex(), "digest": record.digest})
    try:
        replace_file(target, written.encode())
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror or error}); check the folder's permissions"
        ) from error
    return record


def distrust(file: Path) -> bool:
    """Remove trust from a file; return False if it was not recorded. Raises ConfigError if that fails."""
    target = _record_file(_place(file))
    try:
        target.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be removed ({error.strerror or error}); check the folder's permissions"
        ) from error
    return True


def trusted_files() -> Iterator[TrustRecord]:
    """Yield what the user trusted, also if changed or missing now, sorted by path; ConfigError for a damaged record."""
    records = map(_read, sorted((config_folder() / "trusted").glob("*.json")))
    yield from sorted(records, key=lambda record: record.file)


def _place(file: Path) -> Path:
    # Not the target of a link: its relative paths would be those of another folder.
    return Path(os.path.realpath(file.parent)) / file.name


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _record_file(place: Path) -> Path:
    """Return the file of one record: a file each, so that two commands at once lose none."""
    return config_folder() / "trusted" / f"{_digest(os.fsencode(place))}.json"


def _read(record_file: Path) -> TrustRecord:
    try:
        record = json.loads(record_file.read_bytes())
        place = os.fsdecode(bytes.fromhex(record["file"]))
        return TrustRecord(Path(place), str(record["digest"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{record_file} cannot be read ({error}); remove it, and trust again"
        ) from error
