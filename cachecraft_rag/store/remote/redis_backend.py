"""Redis and Valkey.

All keys begin with the layout version. `rows/<place>` is a hash of a chunk's rows by file name, `data/<name>` a
payload. Budget and eviction are the server's own (`maxmemory`, `maxmemory-policy`): it may drop any key at any time, so
a look-up passes over rows without a payload, and removes them. One server, or a primary with its replicas; not a
cluster, whose scripts cannot see all keys.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from cachecraft_rag.store.remote.base import LONGEST_ROWS, PIECE_BYTES, Parcel, Usage, answer_of
from cachecraft_rag.store.remote.config import RemoteConfig
from cachecraft_rag.store.remote.rows import ROOT
from cachecraft_rag.store.row_checks import MOST_VARIANTS

T = TypeVar("T")
_FIRST_PIECE = 64 << 10  # holds the header, which has to be there before anything is planned
_LOOKUP = """
local most, longest, found = tonumber(ARGV[1]), tonumber(ARGV[2]), {}
for i = 3, #ARGV do
  local rows, kept, size, key = {}, {}, 0, KEYS[1] .. 'rows/' .. ARGV[i]
  local many = redis.pcall('HLEN', key)
  if type(many) == 'number' and many <= most then rows = redis.call('HGETALL', key) end
  for n = 1, #rows, 2 do
    local name = ARGV[i] .. '/' .. rows[n]
    size = size + #rows[n + 1]
    if redis.call('EXISTS', KEYS[1] .. 'data/' .. name) == 0 then
      redis.call('HDEL', key, rows[n])
    elseif size <= longest then
      table.insert(kept, name)
      table.insert(kept, rows[n + 1])
    end
  end
  table.insert(found, kept)
end
return found
"""


class NoRoomError(OSError):
    """The server is full, and evicts nothing."""


class RedisBackend:
    """A remote on Redis or Valkey; see `base.Backend`.

    Errors are TimeoutError if the server is too slow, and NoRoomError if it is full and evicts nothing.
    """

    def __init__(self, config: RemoteConfig) -> None:
        """Create the client, which connects at its first request. Raises ValueError if the library refuses the URL."""
        self._config = config
        self._prefix = ROOT + ":"
        self._redis: Any = aioredis.Redis.from_url(
            config.url,
            socket_connect_timeout=config.tuning.connect_timeout_s,
            # a last resort: every call is cancelled long before
            socket_timeout=config.tuning.put_timeout_s,
            # a pooled connection breaks with its server
            retry=Retry(ExponentialBackoff(cap=0.04, base=0.01), 2),
        )
        self._lookup = self._redis.register_script(_LOOKUP)

    async def rows(self, places: Sequence[str]) -> list[dict[str, bytes]]:
        """Return name → row for each place, in their order, in one round trip; rows without a payload are removed.

        A place with too many rows has an empty dictionary; rows beyond 4 MiB of a place are left out.
        """
        most = max(MOST_VARIANTS, self._config.tuning.variants_per_chunk)

        async def looked_up() -> list[dict[str, bytes]]:
            answer = await self._lookup(keys=[self._prefix], args=[most, LONGEST_ROWS, *places])
            return [
                {
                    name.decode(errors="replace"): row
                    for name, row in zip(*[iter(rows)] * 2, strict=True)
                }
                for rows in answer
            ]

        return await self._answer(looked_up())

    async def names(self, place: str) -> list[str]:
        """Return the names in a place, with the place; none of too many. Rows without a payload are removed."""
        (rows,) = await self.rows([place])
        return list(rows)

    async def read(self, name: str) -> AsyncIterator[bytes | memoryview]:
        """Yield a payload in pieces of 64 KiB, 256 KiB, then 1 MiB; ends early if it is missing or is removed."""
        start = 0
        step = _FIRST_PIECE
        while True:
            asking = self._redis.getrange(f"{self._prefix}data/{name}", start, start + step - 1)
            try:
                piece = await self._answer(asking)
            except FileNotFoundError:  # it is there, but no payload: as good as gone
                return
            if piece:
                yield piece
            if len(piece) < step:
                return
            start = start + step
            step = min(4 * step, PIECE_BYTES)

    async def write(self, parcel: Parcel) -> bool:
        """Send payload and row in one transaction. Returns False if the server is full and evicts nothing."""
        async with self._redis.pipeline(transaction=True) as both:
            both.set(f"{self._prefix}data/{parcel.name}", b"".join(parcel.payload))
            both.hset(
                f"{self._prefix}rows/{parcel.place}", parcel.name.rpartition("/")[2], parcel.row
            )
            try:
                await self._answer(both.execute())
            except NoRoomError:
                return False
        return True

    async def remove(self, name: str) -> None:
        """Remove row and payload of an entry in one transaction; does nothing for an unknown name."""
        place, _, file = name.rpartition("/")
        async with self._redis.pipeline(transaction=True) as both:
            both.hdel(f"{self._prefix}rows/{place}", file)
            both.unlink(f"{self._prefix}data/{name}")
            await self._answer(both.execute())

    async def usage(self) -> Usage:
        """Return payloads that have a row, bytes of all payloads, `maxmemory`. Looks at every key of the database."""

        async def ask() -> Usage:
            start = f"{self._prefix}data/"
            async with self._redis.pipeline(transaction=False) as facts:
                async for key in self._redis.scan_iter(match=f"{start}*", count=1000):
                    place, _, file = (
                        key.decode(errors="replace").removeprefix(start).rpartition("/")
                    )
                    facts.strlen(key)
                    # the server may have evicted the row alone
                    facts.hexists(f"{self._prefix}rows/{place}", file)
                sizes_and_rows = await facts.execute()
            budget = (await self._redis.info("memory")).get("maxmemory") or None
            return Usage(sum(sizes_and_rows[1::2]), sum(sizes_and_rows[::2]), budget)

        return await self._answer(ask())

    async def probe(self) -> None:
        """Ping the server."""
        await self._answer(self._redis.ping())

    async def close(self) -> None:
        """Close all connections."""
        await self._answer(self._redis.aclose())

    async def _answer(self, asking: Awaitable[T]) -> T:
        """Await Redis' answer. Raises OSError, no secret in its text; FileNotFoundError for a key of another kind."""
        return await answer_of(asking, self._failure, RedisError)

    def _failure(self, error: Exception) -> OSError:
        text = f"{type(error).__name__}: {self._config.hide(error)}"
        if isinstance(error, OutOfMemoryError):
            return NoRoomError(text)
        if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
            return FileNotFoundError(text)
        return (
            TimeoutError(text) if isinstance(error, RedisTimeout | TimeoutError) else OSError(text)
        )
