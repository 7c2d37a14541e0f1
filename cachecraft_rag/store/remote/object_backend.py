"""Object stores (S3, Google Cloud Storage, Azure, a shared folder), through obstore.

An entry is two objects: `<name>.cache`, its payload, and `<name>.row`, written last. An entry with only one of them
does not count. The size of buckets is limited by their life-cycle rules. In a shared folder the writers remove the
entries that were read least recently.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from shlex import quote
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, NotFoundError

from cachecraft_rag.errors import ConfigError
from cachecraft_rag.store.remote.base import LONGEST_ROWS, PIECE_BYTES, Parcel, Usage, answer_of
from cachecraft_rag.store.remote.config import RemoteConfig
from cachecraft_rag.store.remote.rows import ROOT
from cachecraft_rag.store.row_checks import MOST_VARIANTS

T = TypeVar("T")
_FOLDER_BYTES = 20 << 30  # budget of a folder, unless given
_SHARE = 16  # a sweep follows each time that one in so many bytes of the budget have been written
_PATH = re.compile(
    r"(?P<name>[0-9a-f]{32}/[0-9a-f]{32}/[0-9a-f]{32}-[0-9a-f]{16})\.(?P<kind>row|cache)"
)
_Entry = dict[str, Any]  # kind of an object of an entry → obstore's metadata of it


class ObjectBackend:
    """A remote in an object store or a shared folder; see `base.Backend`.

    A FileNotFoundError means that an object or the folder is missing.
    """

    def __init__(self, config: RemoteConfig) -> None:
        """Create the client without asking the server; ValueError if obstore cannot use URL or environment."""
        self._config = config
        self._unswept: float = math.inf  # bytes written since the last sweep
        options: dict[str, Any] = {}
        self._folder = unquote(urlsplit(config.url).path) if config.scheme == "file" else None
        # creating it would hide a missing mount
        if self._folder is not None and not os.path.isdir(self._folder):
            raise ConfigError(
                f"The remote {config.shown} cannot be used: there is no folder {self._folder}; mount it, or make it: "
                f"mkdir -p {quote(self._folder)}"
            )
        # no client options: they would override those of the environment
        if config.scheme not in ("file", "memory"):
            backoff = {
                "init_backoff": timedelta(seconds=0.01),
                "max_backoff": timedelta(seconds=0.04),
                "base": 2,
            }
            options["retry_config"] = {
                "max_retries": 2,
                "backoff": backoff,
                "retry_timeout": timedelta(seconds=30),
            }
        try:
            self._store: Any = obstore.store.from_url(config.url, **options)
            return
        except (BaseError, ValueError, TypeError, OSError) as error:
            why = f"{type(error).__name__}: {config.hide(str(error).partition(chr(10))[0])}"
        raise ValueError(why)

    async def rows(self, places: Sequence[str]) -> list[dict[str, bytes]]:
        """Return name → row for each place, in their order, in two round trips; of too many rows the first ones."""
        await self._require_folder()
        return await asyncio.gather(*(self._rows(place) for place in places))

    async def _rows(self, place: str) -> dict[str, bytes]:
        most = max(MOST_VARIANTS, self._config.tuning.variants_per_chunk)
        listed = [
            (name, entry["row"]["size"])
            for name, entry in (await self._list(place)).items()
            if len(entry) == 2
        ]
        sizes = itertools.accumulate(size for _, size in listed[:most])
        names = [
            name for (name, _), size in zip(listed, sizes, strict=False) if size <= LONGEST_ROWS
        ]
        rows = await asyncio.gather(*(self._row(name) for name in names))
        return {name: row for name, row in zip(names, rows, strict=True) if row}

    async def _row(self, name: str) -> bytes:
        async def get() -> bytes:
            return bytes(await (await self._ask(obstore.get_async, f"{name}.row")).bytes_async())

        try:
            return await self._answer(get())
        except FileNotFoundError:
            return b""

    async def names(self, place: str) -> list[str]:
        """Return the names of all complete entries in a place, with the place, however many."""
        return [name for name, entry in (await self._list(place)).items() if len(entry) == 2]

    async def read(self, name: str) -> AsyncIterator[bytes | memoryview]:
        """Yield a payload in pieces, or nothing. In a folder its times become now: entries read last stay longest."""

        async def go_on() -> Any:
            return await anext(stream, None)

        if self._folder is not None:  # entries that are read stay longer
            with suppress(OSError):
                await asyncio.to_thread(os.utime, f"{self._folder}/{ROOT}/{name}.cache")
        try:
            stream = (await self._answer(self._ask(obstore.get_async, f"{name}.cache"))).stream(
                PIECE_BYTES
            )
        except FileNotFoundError:
            return
        while (piece := await self._answer(go_on())) is not None:
            yield memoryview(piece)

    async def write(self, parcel: Parcel) -> bool:
        """Send payload, then row. Returns False only in a folder, if both together exceed the whole budget.

        There the first call, and then one call after each 1/16 of the budget that was written, first removes the
        entries that were read or written least recently, incomplete ones too, until 1/16 of the budget (or this entry's
        size, if larger) is free.
        """
        await self._require_folder()
        if self._folder is not None:
            budget = self._config.budget_bytes or _FOLDER_BYTES
            if parcel.nbytes > budget:
                return False
            self._unswept += parcel.nbytes
            if self._unswept > budget // _SHARE:
                await self._sweep(budget - max(budget // _SHARE, parcel.nbytes))
                self._unswept = parcel.nbytes
        for kind, data in (("cache", b"".join(parcel.payload)), ("row", parcel.row)):
            await self._answer(self._ask(obstore.put_async, f"{parcel.name}.{kind}", data))
        return True

    async def _sweep(self, most: int) -> None:
        """Remove the least recently written or read objects until no more than `most` bytes are left."""
        entries = {name: list(entry.values()) for name, entry in (await self._list("")).items()}
        sizes = {name: sum(part["size"] for part in parts) for name, parts in entries.items()}
        used = sum(sizes.values())
        for name in sorted(
            entries, key=lambda name: max(part["last_modified"] for part in entries[name])
        ):
            if used <= most:
                return
            await self.remove(name)
            used -= sizes[name]

    async def _require_folder(self) -> None:
        """Raise OSError if the folder has vanished: listing would find no entries, and writing would create it."""
        if self._folder is not None and not await asyncio.to_thread(os.path.isdir, self._folder):
            raise FileNotFoundError(
                f"the folder {self._folder} is not there any more; is it mounted?"
            )

    async def remove(self, name: str) -> None:
        """Remove an entry, if it exists. The row is removed first: a payload without a row does not count."""
        for kind in ("row", "cache"):
            # another engine has removed it; only folders report this
            with suppress(FileNotFoundError):
                await self._answer(self._ask(obstore.delete_async, f"{name}.{kind}"))

    async def usage(self) -> Usage:
        """Return the contents; the budget is a folder's, `RemoteConfig.budget_bytes` or 20 GiB, and else None."""
        whole = [entry for entry in (await self._list("")).values() if len(entry) == 2]
        budget = None if self._folder is None else self._config.budget_bytes or _FOLDER_BYTES
        return Usage(len(whole), sum(entry["cache"]["size"] for entry in whole), budget)

    async def probe(self) -> None:
        """List a place that does not exist."""
        await self._list("probe")

    async def close(self) -> None:
        """Do nothing: obstore closes its own connections."""

    async def _list(self, place: str) -> dict[str, _Entry]:
        """Return name → entry, including incomplete entries, without objects of other programs."""
        entries: dict[str, _Entry] = {}

        async def collect() -> None:
            async for batch in obstore.list(self._store, f"{ROOT}/{place}", chunk_size=1000):
                for meta in batch:
                    if match := _PATH.fullmatch(meta["path"].removeprefix(f"{ROOT}/")):
                        entries.setdefault(match["name"], {})[match["kind"]] = meta

        await self._answer(collect())
        return entries

    async def _ask(self, function: Callable[..., Awaitable[T]], path: str, *more: bytes) -> T:
        """Call a function of obstore on an object of an entry; it may raise at once."""
        return await function(self._store, f"{ROOT}/{path}", *more)

    async def _answer(self, asking: Awaitable[T]) -> T:
        """Await obstore's answer. Raises OSError, such as FileNotFoundError, without secrets in its text."""
        return await answer_of(asking, self._failure, BaseError)

    def _failure(self, error: Exception) -> OSError:
        # Only the first line of a message; the others are about the inside of the library.
        text = f"{type(error).__name__}: {self._config.hide(str(error).partition(chr(10))[0])}"
        return (
            FileNotFoundError(text)
            if isinstance(error, NotFoundError | FileNotFoundError)
            else OSError(text)
        )
