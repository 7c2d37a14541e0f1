"""Redis and Valkey.

All keys begin with the layout version. `rows/<place>` is a hash of a chunk's rows by variant id, and
`data/<place>/<name>` a payload. The budget is kept by scripts, which Redis runs one at a time: `worth` (sorted set)
ranks what is there, `sizes` (hash) and `bytes` (counter) say how much that is, `uploads` (sorted set) when an upload
counts as abandoned. Room is reserved before the first byte is sent, so the budget holds with any number of writers.

A member of `worth` begins with `created`: among equals the oldest gives way first. One server, or a primary with its
replicas; not a cluster, whose scripts cannot see all keys.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from cachecraft_rag.tiers.remote.base import PIECE_BYTES, Outcome, Parcel, Usage
from cachecraft_rag.tiers.remote.config import RemoteConfig, redact
from cachecraft_rag.tiers.remote.rows import ROOT

_FIRST_PIECE = 64 << 10  # holds the header, which has to be there before anything is planned
# `member` is created:scope/chunk/variant-created, all of fixed width.
_COMMON = """
local P, call = KEYS[1], redis.call
local function member_of(place, variant, created)
  return created .. ':' .. place .. '/' .. variant .. '-' .. created
end
local function forget(name)  -- bytes of a member or an upload that counts no more
  local size = tonumber(call('HGET', P .. 'sizes', name) or 0)
  call('HDEL', P .. 'sizes', name)
  call('DECRBY', P .. 'bytes', size)
  return size
end
local function drop(member)
  local created, place, variant = member:sub(1, 16), member:sub(18, 82), member:sub(84, 115)
  call('ZREM', P .. 'worth', member)
  call('UNLINK', P .. 'data/' .. member:sub(18))
  local row = call('HGET', P .. 'rows/' .. place, variant)
  if row and row:sub(1, 16) == created then call('HDEL', P .. 'rows/' .. place, variant) end
  return forget(member)
end
local function abandon(token)
  call('ZREM', P .. 'uploads', token)
  call('UNLINK', P .. 'upload/' .. token)
  return forget(token)
end
"""
_RESERVE = """
local token, place, variant = ARGV[1], ARGV[2], ARGV[3]
local nbytes, budget, patience = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if call('HEXISTS', P .. 'rows/' .. place, variant) == 1 then return 'already there' end
if nbytes > budget then return 'no room' end
local now = tonumber(call('TIME')[1])
for _, dead in ipairs(call('ZRANGEBYSCORE', P .. 'uploads', '-inf', now)) do abandon(dead) end
local excess = nbytes + tonumber(call('GET', P .. 'bytes') or 0) - budget
while excess > 0 do
  local least = call('ZRANGE', P .. 'worth', 0, 0)[1]
  if not least then return 'no room' end  -- all of it is reserved by other writers
  excess = excess - drop(least)
end
call('ZADD', P .. 'uploads', now + patience, token)
call('HSET', P .. 'sizes', token, nbytes)
call('INCRBY', P .. 'bytes', nbytes)
return 'go on'
"""
_COMMIT = """
local token, place, variant, row = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local worth, payload_bytes, most = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local rows, created = P .. 'rows/' .. place, row:sub(1, 16)
if not call('ZSCORE', P .. 'uploads', token) then return 'too slow' end
local refused = call('STRLEN', P .. 'upload/' .. token) ~= payload_bytes and 'too slow'
if call('HEXISTS', rows, variant) == 1 then refused = 'already there' end
if refused then abandon(token) return refused end
local member = member_of(place, variant, created)
call('RENAME', P .. 'upload/' .. token, P .. 'data/' .. member:sub(18))
call('PERSIST', P .. 'data/' .. member:sub(18))
call('HSET', P .. 'sizes', member, call('HGET', P .. 'sizes', token))
call('HDEL', P .. 'sizes', token)
call('ZREM', P .. 'uploads', token)
call('ZADD', P .. 'worth', worth, member)
local others = call('HGETALL', rows)  -- the newest is spared, or a full chunk would never learn anything new
call('HSET', rows, variant, row)
local ranked = {}
for i = 1, #others, 2 do
  local other = member_of(place, others[i], others[i + 1]:sub(1, 16))
  table.insert(ranked, {tonumber(call('ZSCORE', P .. 'worth', other) or 0), other})
end
table.sort(ranked, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
for i = 1, #ranked + 1 - most do drop(ranked[i][2]) end
return 'sent'
"""
_ABANDON = "abandon(ARGV[1])"
_REMOVE = "if call('ZSCORE', P .. 'worth', ARGV[1]) then drop(ARGV[1]) end"
_REMOVE_ROW = "if call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then call('HDEL', KEYS[2], ARGV[1]) end"


class RedisBackend:
    """See `base.Backend`."""

    def __init__(self, config: RemoteConfig) -> None:
        """Connects when first asked something. Raises ValueError when the URL makes no sense to the library."""
        self._config, self._prefix = config, ROOT + ":"
        self._redis: Any = aioredis.Redis.from_url(
            config.url,
            socket_connect_timeout=config.connect_timeout_s,
            socket_timeout=config.put_timeout_s,  # a last resort: every call is cancelled long before
            retry=Retry(NoBackoff(), 0),  # retried by the tier, within its time limits
        )
        script = self._redis.register_script
        self._reserve, self._commit = script(_COMMON + _RESERVE), script(_COMMON + _COMMIT)
        self._abandon, self._remove = script(_COMMON + _ABANDON), script(_COMMON + _REMOVE)
        self._remove_row = script(_COMMON + _REMOVE_ROW)

    async def lookup(self, places: Sequence[str]) -> list[list[bytes]]:
        """See `Backend.lookup`; one round trip."""
        with _os_errors():
            async with self._redis.pipeline(transaction=False) as pipe:
                for place in places:
                    pipe.hvals(f"{self._prefix}rows/{place}")
                return [list(rows) for rows in await pipe.execute()]

    async def read(self, name: str) -> AsyncIterator[bytes | memoryview]:
        """See `Backend.read`."""
        start, step = 0, _FIRST_PIECE
        while True:
            with _os_errors():
                piece = await self._redis.getrange(f"{self._prefix}data/{name}", start, start + step - 1)
            if piece:
                yield piece
            if len(piece) < step:
                return
            start, step = start + step, min(4 * step, PIECE_BYTES)

    async def put(self, parcel: Parcel) -> Outcome:
        """See `Backend.put`."""
        token, config = uuid.uuid4().hex, self._config
        patience = int(config.put_timeout_s) + 2
        budget = (parcel.nbytes, config.budget_bytes, patience)
        with _os_errors():
            answer: Outcome | Literal["go on"]
            answer = await self._ask(self._reserve, token, parcel.place, parcel.variant_id, *budget)
            if answer != "go on":
                return answer
            try:
                await self._send(f"{self._prefix}upload/{token}", parcel.payload, patience)
                limits = (repr(parcel.worth), parcel.payload_bytes, config.variants_per_chunk)
                done: Outcome = await self._ask(
                    self._commit, token, parcel.place, parcel.variant_id, parcel.row, *limits
                )
                return done
            except RedisError:
                await self._ask(self._abandon, token)  # if that fails too, it counts as abandoned in a while
                raise

    async def _send(self, key: str, payload: Sequence[memoryview], patience: int) -> None:
        for part in payload:
            for start in range(0, part.nbytes, PIECE_BYTES):
                await self._redis.append(key, part[start : start + PIECE_BYTES])
                if start == 0:  # from the first piece on: nobody else removes what a killed writer leaves
                    await self._redis.expire(key, patience)

    async def raise_worth(self, gains: Mapping[str, float]) -> None:
        """See `Backend.raise_worth`."""
        with _os_errors():
            async with self._redis.pipeline(transaction=False) as pipe:
                for name, gain in gains.items():
                    pipe.zadd(f"{self._prefix}worth", {_member(name): gain}, xx=True, incr=True)
                await pipe.execute()

    async def remove(self, name: str) -> None:
        """See `Backend.remove`."""
        with _os_errors():
            await self._ask(self._remove, _member(name))

    async def remove_row(self, place: str, row: bytes) -> None:
        """See `Backend.remove_row`."""
        key = f"{self._prefix}rows/{place}"
        with _os_errors():
            for variant_id, found in (await self._redis.hgetall(key)).items():
                if found == row:
                    await self._remove_row(keys=[self._prefix, key], args=[variant_id, row])

    async def usage(self) -> Usage:
        """See `Backend.usage`."""
        with _os_errors():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.zcard(f"{self._prefix}worth")
                pipe.get(f"{self._prefix}bytes")
                variants, nbytes = await pipe.execute()
        return Usage(variants, int(nbytes or 0))

    async def probe(self) -> None:
        """See `Backend.probe`."""
        with _os_errors():
            await self._redis.ping()

    async def close(self) -> None:
        """See `Backend.close`."""
        with _os_errors():
            await self._redis.aclose()

    async def _ask(self, script: Any, *arguments: Any) -> Any:
        answer = await script(keys=[self._prefix], args=arguments)
        return answer.decode() if isinstance(answer, bytes) else answer


def _member(name: str) -> str:
    return f"{name[-16:]}:{name}"


@contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except RedisTimeout as error:
        raise TimeoutError(redact(str(error))) from error
    except RuntimeError as error:  # at the end of the interpreter there is no thread any more that resolves names
        raise OSError(f"the interpreter is shutting down: {error}") from error
    except (RedisError, OSError) as error:
        raise OSError(redact(f"{type(error).__name__}: {error}")) from error
