"""Object stores (S3, Google Cloud Storage, Azure, a shared folder), through obstore.

Below `<place>/` of a chunk lie, for each variant, `<name>.cache` (payload), `<name>.<level>.row` (written last: what
has no row is not there) and, once it was used, empty objects `<name>.<level>.up`. The highest level among them is its
score: floor(2 · log2(score)). So a listing alone ranks everything, and no two writers ever change one object,
which these stores could not do atomically; what an engine learns of uses is lost when it ends between two levels.

The budget is kept from listings, and amortised: who has listed everything and made room may send a sixteenth of the
budget (or one variant, if that is more) before it lists again. So W writers exceed the budget by W − 1 such shares at
most, and one writer never does.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import re
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.expected import MOST_VARIANTS
from cachecraft_rag.store.remote.base import LONGEST_ROWS, PIECE_BYTES, Outcome, Parcel, Usage, told
from cachecraft_rag.store.remote.config import RemoteConfig
from cachecraft_rag.store.remote.rows import ROOT

T = TypeVar("T")
_SHARE = 16
_ABANDONED = timedelta(hours=1)  # a payload without a row: its upload is over, one way or the other
_ONE_REQUEST = 8 << 20  # larger payloads are sent in parts
_MOST_REMEMBERED = 100_000
_MOST_LEVEL = 120  # a score of 2 ** 60: no use gets so far
# What `put` and `raise_score` write, below `ROOT`; everything else is somebody else's.
_PATH = re.compile(
    r"(?P<name>[0-9a-f]{32}/[0-9a-f]{32}/[0-9a-f]{32}-[0-9a-f]{16})\.((?P<level>[0-9]{1,3})\.(?P<kind>row|up)|cache)"
)
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass
class _Entry:
    """What a listing says of one variant; `name` is place/name."""

    name: str
    nbytes: int = 0
    level: int = -1
    row: str | None = None
    row_bytes: int = 0
    payload: bool = False
    paths: list[str] = field(default_factory=list)
    newest: datetime = _LONG_AGO

    @property
    def rank(self) -> tuple[int, str]:
        """Lowest first: level, then age."""
        return self.level, self.name[-16:]


class ObjectBackend:
    """See `base.Backend`. Its methods but `put` may run at the same time; `put` runs alone."""

    def __init__(self, config: RemoteConfig) -> None:
        """Asks nothing of the server yet. Raises ValueError when obstore cannot use URL or environment,
        ConfigError when a folder is not there.
        """
        self._config = config
        self._granted = 0
        self._levels: dict[str, int] = {}  # by place/name, as last listed or written
        self._gains: dict[str, float] = {}  # not yet enough for the next level
        options: dict[str, Any] = {}
        self._folder = unquote(urlsplit(config.url).path) if config.scheme == "file" else None
        if self._folder is not None and not os.path.isdir(self._folder):  # made here, it would hide a missing mount
            raise ConfigError(
                f"The remote {config.shown} cannot be used: there is no folder {self._folder}; mount it, or make it: "
                f"mkdir -p {quote(self._folder)}"
            )
        if config.scheme not in ("file", "memory"):
            # Retried by the tier, within its time limits. No client options: they would hide those of the environment.
            options["retry_config"] = {"max_retries": 0}
        try:
            self._store: Any = obstore.store.from_url(config.url, **options)
            return
        except (BaseError, ValueError, TypeError, OSError) as error:
            why = f"{type(error).__name__}: {config.hide(str(error).partition(chr(10))[0])}"
        raise ValueError(why)

    async def lookup(self, places: Sequence[str]) -> list[list[bytes]]:
        """See `Backend.lookup`; two round trips, for all places at the same time."""
        await self._require_folder()
        return await asyncio.gather(*(self._rows(place) for place in places))

    async def _rows(self, place: str) -> list[bytes]:
        entries = await self._list(place)
        self._remember(entries)
        most = max(MOST_VARIANTS, self._config.variants_per_chunk)
        listed = [entry for entry in entries if entry.row is not None and entry.payload][:most]
        sizes = itertools.accumulate(entry.row_bytes for entry in listed)
        paths = [entry.row for entry, size in zip(listed, sizes, strict=True) if entry.row and size <= LONGEST_ROWS]
        rows = await asyncio.gather(*(self._get(path) for path in paths))
        return [row for row in rows if row]

    async def _get(self, path: str) -> bytes:
        async def get() -> bytes:
            return bytes(await (await obstore.get_async(self._store, path)).bytes_async())

        try:
            return await self._told(get())
        except FileNotFoundError:
            return b""

    async def read(self, name: str) -> AsyncIterator[bytes | memoryview]:
        """See `Backend.read`."""

        async def begin() -> Any:
            return (await obstore.get_async(self._store, f"{ROOT}/{name}.cache")).stream(PIECE_BYTES)

        async def go_on() -> Any:
            return await anext(stream, None)

        try:
            stream = await self._told(begin())
        except FileNotFoundError:
            return
        while (piece := await self._told(go_on())) is not None:
            yield memoryview(piece)

    async def put(self, parcel: Parcel) -> Outcome:
        """See `Backend.put`."""
        await self._require_folder()
        base = f"{parcel.place}/{parcel.name}"
        entries = [entry for entry in await self._list(parcel.place) if entry.row is not None]
        if any(entry.name.startswith(f"{parcel.place}/{parcel.variant_id}") for entry in entries):
            return "already there"
        if parcel.nbytes > self._config.budget_bytes:
            return "no room"
        if parcel.nbytes > self._granted:
            await self._make_room(parcel.nbytes)
        if parcel.nbytes > self._granted:
            return "no room"
        self._granted -= parcel.nbytes
        level = _level(parcel.score)
        small = parcel.payload_bytes <= _ONE_REQUEST
        payload = b"".join(parcel.payload) if small else list(_pieces(parcel.payload))
        await self._write(f"{base}.cache", payload, use_multipart=not small)
        await self._write(f"{base}.{level}.row", parcel.row)
        self._levels[base] = level
        crowd = sorted(entries, key=lambda entry: entry.rank)
        await self._delete(crowd[: max(0, len(crowd) + 1 - self._config.variants_per_chunk)])
        return "sent"

    async def _write(self, path: str, data: Any, **how: Any) -> None:
        async def write() -> None:
            await obstore.put_async(self._store, f"{ROOT}/{path}", data, **how)

        await self._told(write())

    async def _make_room(self, nbytes: int) -> None:
        """List everything, and delete those with the lowest score until a share is free for us."""
        share = max(self._config.budget_bytes // _SHARE, nbytes)
        entries = await self._list("")
        now = datetime.now(UTC)
        halves = [entry for entry in entries if entry.row is None or not entry.payload]
        gone = [entry for entry in halves if now - entry.newest > _ABANDONED]
        used = sum(entry.nbytes for entry in entries) - sum(entry.nbytes for entry in gone)
        ranked = iter(sorted((e for e in entries if e.row is not None and e.payload), key=lambda entry: entry.rank))
        while used + share > self._config.budget_bytes and (entry := next(ranked, None)) is not None:
            gone.append(entry)
            used -= entry.nbytes
        await self._delete(gone)
        self._granted = max(0, min(share, self._config.budget_bytes - used))

    async def _require_folder(self) -> None:
        """Raise OSError where the folder has vanished: listing would find nothing, and writing make it anew."""
        if self._folder is not None and not await asyncio.to_thread(os.path.isdir, self._folder):
            raise FileNotFoundError(f"the folder {self._folder} is not there any more; is it mounted?")

    async def raise_score(self, gains: Mapping[str, float]) -> None:
        """See `Backend.raise_score`; written when it reaches the next level."""
        await self._require_folder()
        for name, gain in gains.items():
            if (level := self._levels.get(name)) is None:
                continue
            total = self._gains.get(name, 0.0) + gain
            raised = _level(2 ** (level / 2) + total)
            self._gains[name] = total
            if raised > level:
                await self._write(f"{name}.{raised}.up", b"")
                self._levels[name] = raised
                del self._gains[name]

    async def remove(self, name: str) -> None:
        """See `Backend.remove`."""
        place = name.rpartition("/")[0]
        await self._delete([entry for entry in await self._list(place) if entry.name == name])

    async def remove_row(self, place: str, row: bytes) -> None:
        """See `Backend.remove_row`; the payload goes too: here nothing else would ever find it."""
        for entry in await self._list(place):
            if entry.row is not None and entry.row_bytes == len(row) and await self._get(entry.row) == row:
                await self._delete([entry])

    async def usage(self) -> Usage:
        """See `Backend.usage`; lists everything."""
        entries = await self._list("")
        return Usage(sum(entry.row is not None for entry in entries), sum(entry.nbytes for entry in entries))

    async def probe(self) -> None:
        """See `Backend.probe`."""
        await self._list("probe")

    async def close(self) -> None:
        """See `Backend.close`; obstore lets go of its connections by itself."""

    async def _list(self, place: str) -> list[_Entry]:
        found: dict[str, _Entry] = {}

        async def collect() -> None:
            async for batch in obstore.list(self._store, f"{ROOT}/{place}", chunk_size=1000):
                for meta in batch:
                    _note(found, meta)

        await self._told(collect())
        return list(found.values())

    def _remember(self, entries: Iterable[_Entry]) -> None:
        if len(self._levels) > _MOST_REMEMBERED:  # they come back with the next look-up
            self._levels.clear()
            self._gains.clear()
        self._levels.update((entry.name, max(entry.level, self._levels.get(entry.name, 0))) for entry in entries)

    async def _delete(self, entries: Sequence[_Entry]) -> None:
        """Rows first: a payload without a row is not found any more."""
        rows = [entry.row for entry in entries if entry.row is not None]
        rest = [path for entry in entries for path in entry.paths if path != entry.row]
        for paths in (rows, rest):
            if paths:
                try:
                    await self._drop(paths)
                except FileNotFoundError:  # a folder says so; another engine was quicker
                    for path in paths:
                        with suppress(FileNotFoundError):
                            await self._drop([path])

    async def _drop(self, paths: Sequence[str]) -> None:
        async def drop() -> None:
            await obstore.delete_async(self._store, paths)

        await self._told(drop())

    async def _told(self, asking: Awaitable[T]) -> T:
        """What obstore answers. Raises OSError, FileNotFoundError among them, with no secret in its text."""
        return await told(asking, self._failure, BaseError)

    def _failure(self, error: Exception) -> OSError:
        # The first line of a message; the others show the inside of the library.
        text = f"{type(error).__name__}: {self._config.hide(str(error).partition(chr(10))[0])}"
        return FileNotFoundError(text) if isinstance(error, NotFoundError | FileNotFoundError) else OSError(text)


def _note(found: dict[str, _Entry], meta: Any) -> None:
    """Add one object of a listing to the entry of its variant."""
    path = meta["path"]
    match = _PATH.fullmatch(path.removeprefix(f"{ROOT}/"))
    if match is None:
        return
    entry = found.setdefault(match["name"], _Entry(match["name"]))
    entry.paths.append(path)
    entry.nbytes += meta["size"]
    entry.newest = max(entry.newest, meta["last_modified"])
    entry.payload = entry.payload or match["kind"] is None
    if match["level"] is not None:
        entry.level = max(entry.level, min(int(match["level"]), _MOST_LEVEL))
    if match["kind"] == "row":
        entry.row, entry.row_bytes = path, meta["size"]


def _level(score: float) -> int:
    """Half powers of two: fine enough to rank, coarse enough that a much used variant has a dozen objects.

    >>> _level(1.0), _level(2.0), _level(3.0), _level(1000.0)
    (0, 2, 3, 19)
    """
    if not score < 2.0 ** (_MOST_LEVEL / 2):  # nor is it what is no number
        return _MOST_LEVEL
    return max(0, math.floor(2 * math.log2(max(score, 1.0))))


def _pieces(payload: Sequence[memoryview]) -> Iterator[memoryview]:
    for part in payload:
        for start in range(0, part.nbytes, _ONE_REQUEST):
            yield part[start : start + _ONE_REQUEST]
